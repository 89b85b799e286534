"""The PyTorch twin against nanochat's numbers, and against the JAX model and optimiser, in both recipes."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import vectors
from tiny import CONFIGS, OLD, TINY

from nanochat_lib import gpt, losses, optim, twin, twin_optim
from nanochat_lib.muon import init_stack
from nanochat_lib.presets import OptimConfig
from nanochat_lib.twin_optim import MuonAdamW

RATES = {
    "head": {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "weight_decay": 0.28},
    "recipe4": {"unembedding_lr": 0.004, "embedding_lr": 0.3, "matrix_lr": 0.02, "weight_decay": 0.2},
}

torch.set_num_threads(1)  # small matrices: a second thread costs more than it does


def tensor(array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def vectors_model(recipe: str) -> twin.GPT:
    config = vectors.config(recipe)
    return twin.build(config, {k: vectors.fill(k, s) for k, s in gpt.param_shapes(config).items()})


def vectors_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(tensor(array).long() for array in vectors.batch())


def random_params(config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights with which activations stay of order one."""
    random = np.random.default_rng(seed)
    scale = {"transformer.wte.weight": 1.0, "resid_lambdas": 0.5, "x0_lambdas": 0.5}
    return {
        name: (random.normal(size=shape) * scale.get(name, 0.15)).astype(np.float32)
        for name, shape in gpt.param_shapes(config).items()
    }


def difference(ours, theirs, before) -> float:
    """How far two updates of the same weights are apart, as a share of their size."""
    ours, theirs = (np.asarray(after, np.float64) - before for after in (ours, theirs))
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


# --- Against nanochat's numbers


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_logits_losses_and_gradients_are_nanochats(recipe) -> None:
    model, (inputs, targets) = vectors_model(recipe), vectors_batch()
    logits = model(inputs).detach().double().numpy()
    assert logits.shape == (2, 200, 300)
    for where, (first, best) in vectors.LOGITS[recipe].items():
        np.testing.assert_allclose(logits[where][:4], first, atol=2e-6)
        assert logits[where].argmax() == best
    assert logits.sum() == pytest.approx(vectors.LOGIT_SUM[recipe], abs=1e-3)
    assert np.abs(logits).sum() == pytest.approx(vectors.LOGIT_ABS_SUM[recipe], rel=1e-6)
    nll = model(inputs, targets, reduction="none").detach()
    assert nll.double().sum().item() == pytest.approx(vectors.LOSS_SUM[recipe], rel=1e-6)
    np.testing.assert_allclose(nll[:7], (0, 0, 0, 0, 0, *vectors.FIRST_LOSSES[recipe]), atol=2e-6)
    loss = model(inputs, targets)
    assert loss.item() == pytest.approx(vectors.MEAN_LOSS[recipe], abs=2e-6)
    loss.backward()
    column = 0 if recipe == "head" else 1
    expected = {name: norms[column] for name, norms in vectors.GRADIENT_NORMS.items() if norms[column] is not None}
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_three_optimiser_steps_are_nanochats(recipe) -> None:
    model, batch = vectors_model(recipe), vectors_batch()
    optimizer = MuonAdamW(model, **RATES[recipe])
    tolerance = 1e-5 if recipe == "head" else 1e-3  # recipe 4 orthogonalises in bfloat16
    for step in range(4):
        loss = model(*batch)
        assert loss.item() == pytest.approx(vectors.STEP_LOSSES[recipe][step], abs=tolerance if step else 2e-6)
        if recipe == "head":
            for name, p in model.named_parameters():
                norm, *entries = vectors.STEPS[name][step]
                assert p.norm().item() == pytest.approx(norm, rel=1e-5), name
                np.testing.assert_allclose(p.detach().flatten()[: len(entries)], entries, atol=5e-5, err_msg=name)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_state_dicts_have_nanochats_layout() -> None:
    model = vectors_model("head")
    first = ["resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda", "transformer.wte.weight"]
    block = ["attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "attn.ve_gate", "mlp.c_fc", "mlp.c_proj"]
    blocks = [f"transformer.h.{i}.{name}.weight" for i in range(4) for name in block if i % 2 or name != "attn.ve_gate"]
    last = ["lm_head.weight", "smear_gate.weight", "value_embeds.1.weight", "value_embeds.3.weight"]
    assert list(model.state_dict()) == first + blocks + last
    optimizer = MuonAdamW(model)
    model(*vectors_batch()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    adamw = {number: {"step", "exp_avg", "exp_avg_sq"} for number in range(9)}
    stacks = {number: {"momentum_buffer", "second_momentum_buffer"} for number in (9, 11, 19, 27, 31)}
    assert {number: set(entry) for number, entry in state["state"].items()} == adamw | stacks
    seconds = [tuple(state["state"][number]["second_momentum_buffer"].shape) for number in stacks]
    assert seconds == [(2, 1, 12), (8, 1, 64), (8, 64, 1), (4, 1, 256), (4, 256, 1)]
    assert list(state["param_groups"][0]) == [
        "kind", "lr", "betas", "eps", "weight_decay", "initial_lr", "params",
    ]  # fmt: skip
    assert list(state["param_groups"][-1]) == [
        "kind", "lr", "momentum", "ns_steps", "beta2", "weight_decay", "initial_lr", "params",
    ]  # fmt: skip


# --- Against the JAX model and optimiser


@pytest.mark.parametrize("name", ["grouped heads", "recipe 4", "one layer"])
def test_logits_loss_and_all_gradients_equal_the_jax_models(name) -> None:
    config = CONFIGS[name]
    params, random = random_params(config), np.random.default_rng(1)
    inputs, targets = random.integers(0, config.vocab_size, (2, 3, 23))
    targets[random.random(targets.shape) < 0.3] = -1
    model = twin.build(config, params)
    assert {k: tuple(p.shape) for k, p in model.state_dict().items()} == gpt.param_shapes(config)
    loss = model(tensor(inputs), tensor(targets))
    loss.backward()

    def mean(params):
        logits = gpt.apply(config, params, jnp.asarray(inputs))
        total, count = losses.cross_entropy(logits, jnp.asarray(targets))
        return total / count, logits

    (ours, logits), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    np.testing.assert_allclose(model(tensor(inputs)).detach(), logits, atol=1e-5)
    assert loss.item() == pytest.approx(float(ours), abs=1e-5)
    for key, p in model.named_parameters():
        size = max(float(jnp.abs(gradients[key]).max()), 0.1)  # the scalars' small ones are sums that cancel
        np.testing.assert_allclose(p.grad / size, gradients[key] / size, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("config", [replace(TINY, n_layer=1), replace(OLD, n_layer=1)], ids=lambda c: c.recipe)
def test_three_optimiser_steps_equal_the_jax_ones(config) -> None:
    """Same gradients into both, scalars that change from step to step: parameters and moments agree."""
    before = random_params(config)
    params = {key: jnp.asarray(value) for key, value in before.items()}
    model = twin.build(config, params)
    theirs = MuonAdamW(model, **RATES["head"])
    ours = optim.make_optimizer(config, OptimConfig(transfer=False))
    state, update = ours.init(params), jax.jit(ours.update)
    for step in range(3):
        random = np.random.default_rng(step)
        grads = {key: (0.01 * random.normal(size=p.shape)).astype(np.float32) for key, p in params.items()}
        hyper = {"lr": 0.5 + 0.2 * step, "momentum": 0.85 + 0.03 * step, "weight_decay": 0.1 * step}
        updates, state = update(grads, state, params, **{key: np.float32(value) for key, value in hyper.items()})
        params = {key: p + updates[key] for key, p in params.items()}
        for group in theirs.param_groups:
            group["lr"] = hyper["lr"] * group["initial_lr"]
            if group["kind"] == "muon":
                group |= {"momentum": hyper["momentum"], "weight_decay": hyper["weight_decay"]}
        for key, p in model.named_parameters():
            p.grad = tensor(grads[key])
        theirs.step()
    exact = config.recipe == "head"  # recipe 4 orthogonalises in bfloat16
    named = dict(model.named_parameters())
    for key, p in named.items():
        tolerance = 5e-5 if exact or "transformer.h." not in key else 0.25
        assert difference(p.detach(), params[key], before[key]) < tolerance, key
    names = {p: key for key, p in named.items()}
    groups = optim.param_groups(config, OptimConfig(), params)
    assert [[names[p] for p in group["params"]] for group in theirs.param_groups] == [list(g.params) for g in groups]
    for group in groups:
        if group.kind == "muon":
            kept, ours = theirs.state[named[group.params[0]]], state.muon[group.name]
            np.testing.assert_allclose(kept["momentum_buffer"], ours.momentum, atol=1e-6)
            np.testing.assert_allclose(kept["second_momentum_buffer"], ours.second, rtol=1e-4 if exact else 0.5)
    for key in state.exp_avg:
        kept = theirs.state[named[key]]
        assert kept["step"] == int(state.step) == 3
        np.testing.assert_allclose(kept["exp_avg"], state.exp_avg[key], atol=1e-6)
        np.testing.assert_allclose(kept["exp_avg_sq"], state.exp_avg_sq[key], atol=1e-8)


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
@pytest.mark.parametrize("shape", [(3, 24, 8), (2, 8, 24)])
def test_muon_in_bfloat16_is_the_float32_one_coarsely(shape, recipe) -> None:
    random = np.random.default_rng(3)
    p, g, momentum = (random.normal(size=shape).astype(np.float32) for _ in range(3))

    def step(rule, bf16):
        second = tensor(init_stack(shape[0], shape[1:]).second)
        scalars = [torch.tensor(value) for value in (0.02, 0.9, 0.1)]
        return twin_optim.muon_update(tensor(p), tensor(g), tensor(momentum), second, *scalars, rule, bf16)

    rule = twin_optim.RULES[recipe]
    assert 1e-3 < difference(step(rule, True), step(rule._replace(always_bf16=False), False), p) < 0.15


# --- Types and compilation


def test_bfloat16_tables_and_activations() -> None:
    params = random_params(TINY)
    tables = {name for name in params if "wte" in name or "value_embeds" in name}
    mixed = {name: tensor(p).bfloat16() if name in tables else p for name, p in params.items()}
    model = twin.build(TINY, mixed, torch.bfloat16)
    idx = torch.arange(46).reshape(2, 23)
    logits = model(idx)
    assert logits.dtype == torch.float32
    exact = twin.build(TINY, params)(idx)
    assert 1e-4 < (logits - exact).abs().max() < 0.1
    optimizer = MuonAdamW(model)
    model(idx, idx).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        wanted = torch.bfloat16 if name in tables else torch.float32
        assert p.dtype == wanted
        if name in tables:
            assert optimizer.state[p]["exp_avg"].dtype == optimizer.state[p]["exp_avg_sq"].dtype == wanted


def test_compiled_steps_equal_plain_ones_and_new_scalars_compile_nothing(monkeypatch) -> None:
    compilations = []

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    idx, params, results = torch.arange(46).reshape(2, 23), random_params(TINY), []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = twin.build(TINY, params)
        optimizer = MuonAdamW(model, compiled=compiled)
        forward = torch.compile(model, fullgraph=True) if compiled else model
        counts = []
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - 0.1 * step)
            optimizer.zero_grad()
            forward(idx, (7 * idx + 3) % 50).backward()
            optimizer.step()
            counts.append(len(compilations))
        results.append(model.state_dict())
    assert counts[0] >= 10 and counts[0] == counts[-1]
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, atol=1e-6, rtol=1e-6)


def test_build_copies_and_names_what_does_not_fit() -> None:
    params = random_params(TINY)
    model = twin.build(TINY, params)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert np.abs(params["lm_head.weight"]).max() > 0
    with pytest.raises(RuntimeError, match="x0_lambdas"):
        twin.build(TINY, {name: p for name, p in params.items() if name != "x0_lambdas"})
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        twin.build(TINY, params | {"lm_head.weight": np.zeros((50, 32), np.float32)})
