"""Muon and AdamW against nanochat's numbers, PyTorch, optax, and a float64 transcription; routing; odd inputs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.muon import (
    HEAD,
    NEWTON_SCHULZ,
    POLAR_EXPRESS,
    RECIPE4,
    init_stack,
    muon,
    polar_express,
    polynomial_step,
    update_stack,
)
from nanochat_lib.optim import Group, adamw_step, apply_updates, group_of, make_optimizer, param_groups, round_at_random
from nanochat_lib.presets import OptimConfig, RLConfig
from nanochat_lib.sizing import GPTConfig

LRS = OptimConfig()
HYPER = {"lr": 1.0, "momentum": 0.95, "weight_decay": 0.28}
PLAIN = replace(
    HEAD, equilibrate=False, coefficients=NEWTON_SCHULZ, margin=1.0, rescale=False, normalise=False, cautious=False
)

stack_step = jax.jit(update_stack, static_argnames="options")
adam_step = jax.jit(adamw_step, static_argnames="group")


def uniform(seed: int, shape: tuple[int, ...], a: float) -> np.ndarray:
    return np.random.RandomState(seed).uniform(-a, a, size=shape).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


# --- Muon: nanochat's numbers -----------------------------------------------------------------------------------------

# shape: per step (sum of p0, sum of p1, first four of p0, norm of each change); the second moment of p0 after step 2
MUON = {
    (4, 8): (
        ((0.6834137, -1.8857871, (0.2664765, -0.4711879, 0.1343972, 0.2404397), (0.041483, 0.041490)),
         (0.7359959, -1.8362189, (0.2769082, -0.4764983, 0.1329155, 0.2336849), (0.040922, 0.041699))),
        (0.0155441, 0.0209921, 0.0312246, 0.0245970, 0.0298105, 0.0292224, 0.0211893, 0.0174200),
    ),
    (8, 4): (
        ((0.6918803, -1.9293748, (0.2672493, -0.4735095, 0.1337060, 0.2288682), (0.058594, 0.058714)),
         (0.7702984, -1.9063373, (0.2833098, -0.4770348, 0.1386488, 0.2151815), (0.057899, 0.058958))),
        (0.0212849, 0.0240996, 0.0254947, 0.0165448, 0.0269050, 0.0223250, 0.0309199, 0.0224264),
    ),
    (6, 6): (
        ((0.3151572, -1.0551492, (0.2683614, -0.4769657, 0.1340692, 0.2419069), (0.050446, 0.050365)),
         (0.3747954, -1.0404267, (0.2834061, -0.4871131, 0.1398610, 0.2360413), (0.049888, 0.050507))),
        (0.0288054, 0.0324056, 0.0327126, 0.0327918, 0.0325250, 0.0307595),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", MUON)
def test_muon_equals_nanochat(shape):
    steps, second = MUON[shape]
    params = np.stack([uniform(10, shape, 0.5), uniform(11, shape, 0.5)])
    state = init_stack(2, shape)
    for number, (sum0, sum1, first, norms) in enumerate(steps):
        grads = np.stack([uniform(100 + 10 * number + i, shape, 0.01) for i in range(2)])
        update, state = stack_step(jnp.asarray(grads), jnp.asarray(params), state, 0.02, 0.95, 0.1)
        params = params + np.asarray(update)
        np.testing.assert_allclose(params.sum(axis=(1, 2), dtype=np.float64), (sum0, sum1), atol=1e-5)
        np.testing.assert_allclose(params[0].ravel()[:4], first, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(update, axis=(1, 2)), norms, rtol=5e-5)
    np.testing.assert_allclose(state.second[0].ravel(), second, rtol=5e-5)


def test_zero_gradient_leaves_decay_alone():
    params = jnp.asarray(uniform(10, (1, 4, 8), 0.5))
    update, state = stack_step(jnp.zeros_like(params), params, init_stack(1, (4, 8)), 0.02, 0.95, 0.1)
    np.testing.assert_allclose(params + update, 0.998 * params, rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in state)


# --- Muon: an independent transcription in float64 --------------------------------------------------------------------


def muon_float64(g, p, m, s, lr, mu, wd, options):
    """One step on one matrix, from the formulas, through the eigenvalues of X Xᵀ (no matrix iteration)."""
    rows, columns = g.shape
    m = mu * m + (1 - mu) * g
    x = (1 - mu) * g + mu * m if options.nesterov else m
    if options.equilibrate:
        lengths = np.sqrt((x**2).sum(axis=1))
        x = (np.sqrt((x**2).sum() / rows) / np.maximum(lengths, 1e-6))[:, None] * x
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values = values / (np.sqrt((values**2).sum()) * options.margin + 1e-6)
    for a, b, c in options.coefficients:
        values = a * values + b * values**3 + c * values**5
    u = (left * values) @ right
    if options.rescale:
        u = u * np.sqrt(min(rows, columns)) / max(np.linalg.norm(u), 1e-6)
    if options.normalise:
        axis = 1 if rows >= columns else 0
        mean = (u**2).mean(axis=axis, keepdims=True)
        s = options.beta2 * s + (1 - options.beta2) * mean
        before = np.linalg.norm(u)
        u = u / np.sqrt(np.maximum(s, 1e-10))
        u = u * before / max(np.linalg.norm(u), 1e-10)
    eta = lr * np.sqrt(max(1, rows / columns))
    mask = (u * p >= 0) if options.cautious else 1.0
    return p - eta * u - eta * wd * p * mask, m, s


VARIANTS = {
    "head": HEAD,
    "original": PLAIN,
    **{
        f"no {name}": replace(HEAD, **{name: False})
        for name in ("nesterov", "equilibrate", "rescale", "normalise", "cautious")
    },
}


@pytest.mark.parametrize(
    ("variant", "shape"),
    [(variant, shape) for variant in VARIANTS for shape in ((9, 4), (4, 16))]
    + [("head", shape) for shape in ((1, 5), (3, 7), (5, 5), (6, 1))],
)
def test_muon_equals_the_float64_transcription(variant, shape):
    options, seed = VARIANTS[variant], shape[0] + len(variant)
    p = normal(seed, *shape)
    state, m, s = init_stack(1, shape), np.zeros(shape), 0.0
    ours, reference = jnp.asarray(p)[None], p.astype(np.float64)
    for number in range(3):
        g = normal(seed + 1 + number, *shape)
        update, state = stack_step(jnp.asarray(g)[None], ours, state, 0.02, 0.9, 0.1, options)
        ours = ours + update
        reference, m, s = muon_float64(g.astype(np.float64), reference, m, s, 0.02, 0.9, 0.1, options)
    np.testing.assert_allclose(ours[0], reference, atol=5e-5)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (12, 12)])
def test_without_refinements_muon_equals_optax(shape):
    """Without Nesterov: optax's bias correction then only rescales, which the iteration removes again.

    Five rows of coefficients, because optax refuses more rows than steps and runs fewer in silence.
    """
    decay = 0.1 * max(1, shape[0] / shape[1]) ** 0.5  # optax multiplies it by the plain learning rate
    dims = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)  # weights are [out, in]
    theirs = optax.contrib.muon(
        0.02, ns_coeffs=NEWTON_SCHULZ, beta=0.95, nesterov=False, weight_decay=decay,
        muon_weight_dimension_numbers={"w": dims},
    )  # fmt: skip
    ours = muon(0.02, 0.95, 0.1, replace(PLAIN, nesterov=False))
    our_update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    a = b = {"w": jnp.asarray(normal(0, *shape))}
    state_a, state_b = ours.init(a), theirs.init(b)
    for step in range(4):
        grads = {"w": 30 * jnp.asarray(normal(1 + step, *shape))}
        update, state_a = our_update(grads, state_a, a)
        a = optax.apply_updates(a, update)
        update, state_b = their_update(grads, state_b, b)
        b = optax.apply_updates(b, update)
        np.testing.assert_allclose(a["w"], b["w"], atol=1e-5)


def test_a_stack_equals_its_matrices_one_by_one():
    grads, params = jnp.asarray(normal(0, 5, 6, 10)), jnp.asarray(normal(1, 5, 6, 10))
    together, state = stack_step(grads, params, init_stack(5, (6, 10)), 0.02, 0.95, 0.1)
    for i in range(5):
        alone, own = stack_step(grads[i : i + 1], params[i : i + 1], init_stack(1, (6, 10)), 0.02, 0.95, 0.1)
        np.testing.assert_allclose(together[i], alone[0], atol=1e-6)
        np.testing.assert_allclose(state.second[i], own.second[0], atol=1e-6)


def test_a_stacked_leaf_equals_separate_leaves():
    """(L, R, N) leaves are L matrices, beside (R, N) leaves of the same shape."""
    params, grads = (
        {
            "a": jnp.asarray(normal(s, 3, 6, 4)),
            "b": jnp.asarray(normal(s + 1, 6, 4)),
            "c": jnp.asarray(normal(s + 2, 4, 6)),
        }
        for s in (0, 10)
    )
    transform = muon(weight_decay=0.1)
    transform_update = jax.jit(transform.update)
    update, state = transform_update(grads, transform.init(params), params)
    assert {key: leaf.momentum.shape for key, leaf in state.items()} == {"6x4": (4, 6, 4), "4x6": (1, 4, 6)}
    pairs = [(update["a"][i], grads["a"][i], params["a"][i]) for i in range(3)]
    for together, grad, param in [*pairs, (update["b"], grads["b"], params["b"])]:
        single, _ = transform_update({"w": grad}, transform.init({"w": param}), {"w": param})
        np.testing.assert_allclose(together, single["w"], atol=1e-6)


# --- Muon: what the iteration promises, and odd gradients -------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_singular_values_end_near_one(shape):
    x, polar = jnp.asarray(normal(0, 4, *shape)), jax.jit(polar_express, static_argnums=(1, 2))
    values = np.linalg.svd(polar(x, POLAR_EXPRESS), compute_uv=False)
    # A square Gaussian matrix has a few singular values too small for five steps; 98 % is the promise.
    assert values.max() < 1.15 and np.quantile(values, 0.02) > 0.85
    standard = np.linalg.svd(polar(x, NEWTON_SCHULZ, 1.0), compute_uv=False)
    assert standard.max() < 1.3 and np.quantile(standard, 0.02) > 0.6


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (24, 3)])
def test_one_step_is_a_polynomial_of_the_singular_values(shape):
    x, (a, b, c) = normal(1, 2, *shape) / 8, POLAR_EXPRESS[1]
    left, s, right = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    want = (left * (a * s + b * s**3 + c * s**5)[:, None, :]) @ right
    step = jax.jit(polynomial_step).lower(jnp.asarray(x), a, b, c).compile()
    np.testing.assert_allclose(step(jnp.asarray(x), a, b, c), want, atol=1e-5)
    short, long = sorted(shape)  # the gram matrix is that of the short side
    assert step.cost_analysis()["flops"] < 1.5 * 2 * short**2 * (4 * long + 2 * short)


@pytest.mark.parametrize(
    "options", [HEAD, replace(HEAD, dtype=jnp.bfloat16), RECIPE4, PLAIN], ids="head bf16 r4 plain".split()
)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e15, 1e30, 3e37])
def test_any_finite_gradient_gives_a_finite_update(scale, options):
    scaled = (scale * normal(0, 8, 8)).astype(np.float32)
    zero_row = scaled.copy()
    zero_row[0] = 0
    one_entry = np.zeros((8, 8), np.float32)
    one_entry[2, 3] = scale
    rank_one = np.float32(scale) * np.outer(normal(1, 8), normal(2, 8)).clip(-5, 5)
    grads = jnp.asarray(np.stack([scaled, zero_row, rank_one, one_entry]), jnp.float32)
    assert np.isfinite(grads).all()
    params, state = jnp.asarray(normal(3, 4, 8, 8)), init_stack(4, (8, 8))
    for sign in (1, -1, 1):  # opposite signs: differences of extreme values must not overflow either
        update, state = stack_step(sign * grads, params, state, 1.0, 0.95, 0.0, options)
        assert np.isfinite(update).all() and all(np.isfinite(leaf).all() for leaf in state)
        assert np.linalg.svd(update, compute_uv=False).max() < 4
    if scale >= 1e-3:
        assert np.linalg.norm(update[0]) == pytest.approx(8**0.5, rel=0.25)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e18, 1e30, 3e38])
def test_adamw_survives_any_finite_gradient(scale):
    group = Group("x", "adamw", ("x",), 1.0, (0.8, 0.96))
    p, m, v = jnp.ones(4), jnp.zeros(4), jnp.zeros(4)
    for step in range(1, 4):
        grad = jnp.asarray([scale, -scale, 0.0, scale * (-1) ** step], jnp.float32)
        update, m, v = adam_step(grad, p, m, v, jnp.int32(step), 0.01, group)
        assert all(np.isfinite(leaf).all() for leaf in (update, m, v))
        assert np.abs(update).max() <= 0.0101
        assert update[2] == 0


@pytest.mark.parametrize("shape", [(), (12,), (2, 2, 3, 3)])
def test_muon_refuses_what_is_no_matrix(shape):
    with pytest.raises(UserError, match="Muon needs whole matrices"):
        muon().init({"flattened shard": jnp.zeros(shape)})


def test_muon_passes_over_none_and_runs_under_jit():
    params = {"w": jnp.asarray(normal(0, 4, 6)), "frozen": None}
    grads = {"w": jnp.asarray(normal(1, 4, 6)), "frozen": None}
    transform = muon()
    with jax.checking_leaks():
        update, _ = jax.jit(transform.update)(grads, transform.init(params), params, lr=jnp.float32(0.5))
    assert update["frozen"] is None
    assert np.linalg.norm(update["w"]) == pytest.approx(0.5 * 0.02 * 2, rel=1e-3)
    with pytest.raises(UserError, match="needs the parameters"):
        transform.update(grads, transform.init(params))


# --- AdamW ------------------------------------------------------------------------------------------------------------

ADAMW = (
    (-0.1275019, (-0.5459580, 0.7513905, -0.5765030, 0.8471380)),
    (-0.0942189, (-0.5534866, 0.7612355, -0.5668734, 0.8443576)),
    (-0.0846586, (-0.5621759, 0.7712013, -0.5569556, 0.8387146)),
)


def test_adamw_equals_nanochat():
    group = Group("x", "adamw", ("x",), 0.01, (0.8, 0.96), 0.01)
    p = jnp.asarray(uniform(5, (3, 4), 1.0))
    m = v = jnp.zeros_like(p)
    for step, (total, first) in enumerate(ADAMW):
        grad = jnp.asarray(uniform(50 + step, (3, 4), 0.1))
        update, m, v = adam_step(grad, p, m, v, jnp.int32(step + 1), group.lr, group)
        p = p + update
        np.testing.assert_allclose(p.sum(), total, atol=1e-5)
        np.testing.assert_allclose(p.ravel()[:4], first, atol=1e-5)


@pytest.mark.parametrize(("betas", "decay"), [((0.8, 0.96), 0.01), ((0.96, 0.95), 0.0), ((0.8, 0.995), 0.3)])
def test_adamw_equals_torch(betas, decay):
    group = Group("x", "adamw", ("x",), 0.01, betas, decay)
    p = jnp.asarray(normal(0, 5, 7))
    m = v = jnp.zeros_like(p)
    tensor = torch.nn.Parameter(torch.tensor(np.asarray(p)))
    theirs = torch.optim.AdamW([tensor], lr=0.01, betas=betas, eps=1e-10, weight_decay=decay)
    for step in range(1, 21):
        grad = 10.0 ** (step % 7 - 3) * normal(step, 5, 7)
        update, m, v = adam_step(jnp.asarray(grad), p, m, v, jnp.int32(step), 0.01, group)
        p = p + update
        tensor.grad = torch.tensor(grad)
        theirs.step()
    np.testing.assert_allclose(p, tensor.detach().numpy(), atol=2e-6)


def test_decay_acts_on_the_old_value():
    """θ = 1, lr 0.1, wd 0.1, first gradient 2: the step is lr·sign(g), the decay lr·wd·1, together 0.11."""
    group = Group("x", "adamw", ("x",), 0.1, (0.9, 0.99), 0.1)
    one, zero = jnp.ones(1), jnp.zeros(1)
    update, _, _ = adamw_step(2 * one, one, zero, zero, jnp.int32(1), 0.1, group)
    np.testing.assert_allclose(one + update, 0.89, rtol=1e-6)


def test_bfloat16_parameters_keep_float32_moments():
    """Only the final cast is bfloat16. Decays near 1 would lose their digits in bfloat16 arithmetic."""
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)
    optimizer = make_optimizer(config, OptimConfig(embedding_lr=0.01))
    name = "transformer.wte.weight"
    low, full = ({name: jnp.asarray(normal(0, 64, 32), dtype)} for dtype in (jnp.bfloat16, jnp.float32))
    state_low, state_full = optimizer.init(low), optimizer.init(full)
    step_of = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, **HYPER))
    for step in range(20):
        grads = {name: jnp.asarray(0.1 * normal(1 + step, 64, 32))}
        lowered = {name: grads[name].astype(jnp.bfloat16)}
        update, state_low = step_of(lowered, state_low, low)
        low = optax.apply_updates(low, update)
        update, state_full = step_of({name: lowered[name].astype(jnp.float32)}, state_full, full)
        full = optax.apply_updates(full, update)
    assert low[name].dtype == jnp.bfloat16 and state_low.exp_avg_sq[name].dtype == jnp.float32
    np.testing.assert_allclose(state_low.exp_avg_sq[name], state_full.exp_avg_sq[name], rtol=1e-6)
    difference = np.linalg.norm(low[name].astype(jnp.float32) - full[name]) / np.linalg.norm(full[name])
    assert difference < 1e-2


# --- groups -----------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_group_in_nanochats_order():
    config = GPTConfig(n_layer=12)
    shapes = gpt.param_shapes(config)
    groups = param_groups(config, LRS, dict(sorted(shapes.items(), reverse=True)))
    names = [name for group in groups for name in group.params]
    assert sorted(names) == sorted(shapes) and len(names) == len(set(names)) == 91
    assert all(group_of(name) == ("muon" if g.kind == "muon" else g.name) for g in groups for name in g.params)
    assert not any(map(group_of, ("wte", "transformer.h.0.mlp.c_fc.bias", "value_embeds.a.weight")))
    assert names[:2] == ["lm_head.weight", "transformer.wte.weight"]
    assert names[2:8] == [f"value_embeds.{i}.weight" for i in (1, 3, 5, 7, 9, 11)]
    assert names[8:13] == ["resid_lambdas", "x0_lambdas", "smear_gate.weight", "smear_lambda", "backout_lambda"]
    assert [(g.name, len(g.params)) for g in groups[6:]] == [
        ("6x12", 6),
        ("768x768", 48),
        ("768x3072", 12),
        ("3072x768", 12),
    ]
    first_layer = [f"transformer.h.0.attn.{part}.weight" for part in ("c_q", "c_k", "c_v", "c_proj")]
    assert list(groups[7].params[:4]) == first_layer
    assert groups[7].params[-1] == "transformer.h.11.attn.c_proj.weight"
    assert all(len(shapes[name]) == 2 and name.startswith("transformer.h.") for g in groups[6:] for name in g.params)


def test_group_hyper_parameters():
    table = {
        g.name: (g.kind, g.lr, g.betas, g.weight_decay)
        for g in groups_of(GPTConfig(n_layer=2, n_embd=192, n_head=2, n_kv_head=1))
    }
    assert table["lm_head"] == ("adamw", pytest.approx(0.016), (0.8, 0.96), 0.01)
    assert table["wte"] == ("adamw", pytest.approx(0.6), (0.8, 0.995), 0.001)
    assert table["value_embeds"] == ("adamw", pytest.approx(0.3), (0.8, 0.995), 0.01)
    assert table["resid_lambdas"] == ("adamw", pytest.approx(0.005), (0.8, 0.95), 0.05)
    assert table["x0_lambdas"] == ("adamw", 0.5, (0.96, 0.95), 0.0)
    assert table["smear"] == ("adamw", 0.2, (0.8, 0.95), 0.0)
    assert [name for name in table if table[name][0] == "muon"] == ["1x12", "96x192", "192x192", "192x768", "768x192"]
    assert table["96x192"][1] == 0.02


def test_recipe4_groups():
    table = {g.name: (g.lr, g.betas, g.weight_decay) for g in groups_of(GPTConfig(recipe="recipe4"))}
    assert "smear" not in table
    assert table["value_embeds"] == table["wte"] == (0.3, (0.8, 0.95), 0.0)
    assert table["lm_head"] == (0.008, (0.8, 0.95), 0.0)
    assert table["x0_lambdas"] == (0.5, (0.96, 0.95), 0.0)
    assert "6x32" in table


def groups_of(config: GPTConfig) -> tuple[Group, ...]:
    return param_groups(config, LRS, gpt.param_shapes(config))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("transformer.h.0.attn.c_q.bias", (768,), "no group for parameter 'transformer.h.0.attn.c_q.bias'"),
        ("transformer.h.0.attn.rotary.weight", (4, 4), "no group"),
        ("Transformer.wte.weight", (4, 4), "no group"),
        ("value_embeds.one.weight", (4, 4), "no group"),
        ("transformer.h.0.mlp.c_fc.weight", (3072 * 768,), "whole matrix"),
        ("transformer.h.0.mlp.c_fc.weight", (12, 3072, 768), "whole matrix"),
    ],
)
def test_parameters_without_a_home_are_errors(name, shape, words):
    with pytest.raises(UserError, match=words):
        param_groups(GPTConfig(), LRS, {name: shape})
    with pytest.raises(UserError, match=words):
        make_optimizer(GPTConfig(), LRS).init({name: jax.ShapeDtypeStruct(shape, jnp.float32)})


def test_recipe4_has_no_smear_group():
    with pytest.raises(UserError, match="smear_lambda.*recipe4"):
        param_groups(GPTConfig(recipe="recipe4"), LRS, {"smear_lambda": (1,)})


def test_missing_or_misshapen_gradients_are_named(tiny):
    optimizer, _, params = tiny
    state = optimizer.init(params)
    lacking = {name: p for name, p in params.items() if name != "lm_head.weight"}
    none = params | {"lm_head.weight": None}
    flat = params | {"lm_head.weight": params["lm_head.weight"].ravel()}
    for grads in (lacking, none, flat):
        with pytest.raises(UserError, match="do not match for lm_head.weight"):
            optimizer.update(grads, state, params, **HYPER)


# --- the whole optimiser ----------------------------------------------------------------------------------------------


TINY = GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=32)


@pytest.fixture(scope="module")
def tiny():
    """(optimizer, its compiled update, parameters) of a one-layer model; one compilation serves several tests."""
    optimizer = make_optimizer(TINY, LRS)
    params = {name: jnp.asarray(normal(1, *shape)) for name, shape in gpt.param_shapes(TINY).items()}
    return optimizer, jax.jit(optimizer.update), params


def scalars(**changes: float) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in (HYPER | changes).items()}


def test_state_is_strongly_typed_float32_and_counts_steps(tiny):
    optimizer, update, params = tiny
    state = jax.jit(optimizer.init)(params)
    for step in range(4):
        for leaf in jax.tree.leaves(state):
            assert not leaf.weak_type and leaf.dtype == (jnp.int32 if leaf.ndim == 0 else jnp.float32)
        assert state.step == step
        _, state = update(params, state, params, **scalars(lr=1 / (step + 1), momentum=0.9, weight_decay=0.1 * step))
    assert update._cache_size() == 1
    assert {name: (s.momentum.shape, s.second.shape) for name, s in state.muon.items()} == {
        "1x12": ((1, 1, 12), (1, 1, 12)),
        "16x32": ((2, 16, 32), (2, 1, 32)),
        "32x32": ((2, 32, 32), (2, 32, 1)),
        "32x128": ((1, 32, 128), (1, 1, 128)),
        "128x32": ((1, 128, 32), (1, 128, 1)),
    }
    abstract = jax.eval_shape(optimizer.init, params)
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, state)


def test_scalars_reach_the_groups_they_are_meant_for(tiny):
    optimizer, update, params = tiny
    grads = {name: jnp.asarray(normal(2, *p.shape)) for name, p in params.items()}
    state = optimizer.init(params)
    matrices = {name for name in params if name.startswith("transformer.h.")}
    full, _ = update(grads, state, params, **scalars())
    half, _ = update(grads, state, params, **scalars(lr=0.5))
    for name in params:
        np.testing.assert_allclose(half[name], full[name] / 2, rtol=2e-5, err_msg=name)
    assert moved(full, update(grads, state, params, **scalars(weight_decay=0.0))[0]) == matrices
    assert moved(
        update(grads, state, params, **scalars(momentum=0.5))[1].muon, update(grads, state, params, **scalars())[1].muon
    )


def moved(a: dict, b: dict) -> set[str]:
    """Names whose arrays differ."""
    same = lambda x, y: all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))  # noqa: E731
    return {name for name in a if not same(a[name], b[name])}


def test_parameters_that_are_none_are_passed_over(tiny):
    optimizer, _, params = tiny
    few = {"smear_lambda": None, "x0_lambdas": params["x0_lambdas"]}
    update, state = optimizer.update(few, optimizer.init(few), few, **HYPER)
    assert update["smear_lambda"] is None and set(state.exp_avg) == {"x0_lambdas"}


def test_smear_rate_is_absolute_and_settable():
    (group,) = param_groups(GPTConfig(n_embd=96), OptimConfig(smear_lr=0.01), {"smear_lambda": (1,)})
    assert group.lr == 0.01


def test_rl_rates_are_accepted():
    table = {g.name: g.lr for g in param_groups(GPTConfig(), RLConfig(), gpt.param_shapes(GPTConfig()))}
    assert (table["wte"], table["lm_head"], table["smear"], table["768x768"]) == (0.2, 0.004, 0.2, 0.02)


def test_bfloat16_iteration_stays_close_to_float32():
    grads, params = jnp.asarray(normal(0, 1, 16, 64)), jnp.asarray(normal(1, 1, 16, 64))
    moves = [
        stack_step(grads, params, init_stack(1, (16, 64)), 0.02, 0.95, 0.0, replace(HEAD, dtype=dtype))[0]
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    assert moves[1].dtype == jnp.float32
    assert 0 < np.linalg.norm(moves[1] - moves[0]) / np.linalg.norm(moves[0]) < 0.2


@pytest.mark.parametrize(("recipe", "dtype"), [("head", jnp.float32), ("head", jnp.bfloat16), ("recipe4", jnp.float32)])
def test_compute_dtype_selects_the_iterations_dtype(recipe, dtype):
    config = GPTConfig(n_layer=1, n_embd=64, n_head=1, n_kv_head=1, recipe=recipe)
    optimizer = make_optimizer(config, LRS, dtype)
    params = {"transformer.h.0.mlp.c_fc.weight": jnp.zeros((256, 64))}
    traced = jax.make_jaxpr(lambda g, s, p: optimizer.update(g, s, p, **HYPER))(params, optimizer.init(params), params)
    products = {str(eq.outvars[0].aval.dtype) for eq in traced.eqns if eq.primitive.name == "dot_general"}
    assert products == {"bfloat16" if recipe == "recipe4" else jnp.dtype(dtype).name}


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from nanochat_lib.optim import make_optimizer
from nanochat_lib.presets import OptimConfig
from nanochat_lib.sizing import GPTConfig

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
layout = {
    "transformer.h.0.attn.c_q.weight": ((32, 32), P("d")),
    "transformer.h.1.attn.c_q.weight": ((32, 32), P(None, "d")),
    "transformer.h.0.mlp.c_fc.weight": ((128, 32), P("d")),
    "transformer.h.0.mlp.c_proj.weight": ((32, 128), P("d")),
    "transformer.h.1.mlp.c_proj.weight": ((32, 128), P(None, "d")),
    "lm_head.weight": ((64, 32), P("d")),
    "resid_lambdas": ((2,), P()),
}
optimizer = make_optimizer(GPTConfig(n_layer=2, n_head=1, n_kv_head=1, n_embd=32), OptimConfig())
random = np.random.RandomState(0)
draw = lambda: {n: random.randn(*shape).astype(np.float32) for n, (shape, _) in layout.items()}
params, grads = draw(), [draw() for _ in range(3)]

def run(sharded):
    one = NamedSharding(mesh, P()) if sharded else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = {n: NamedSharding(mesh, spec) if sharded else one for n, (_, spec) in layout.items()}

    def step(g, state, p):
        delta, state = optimizer.update(g, state, p, lr=1.0, momentum=0.95, weight_decay=0.28)
        return optax.apply_updates(p, delta), state

    jit = jax.jit(step, in_shardings=(where, one, where), out_shardings=(where, one))
    p = jax.device_put(params, where)
    state = jax.device_put(optimizer.init(p), one)
    with jax.checking_leaks():
        for g in grads:
            p, state = jit(g, state, p)
    return jax.device_get(p)

assert jax.device_count() == 8
plain, spread = run(False), run(True)
worst = max(np.abs(plain[n] - x).max() for n, x in spread.items())
assert worst < 1e-6, worst
"""


def test_sharded_matrices_give_the_same_update():
    """Rows or columns spread over eight devices: Muon still sees whole matrices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- masters in bfloat16


def test_float32_parameters_are_added_to_exactly():
    rng = np.random.default_rng(0)
    p, u = ({"a": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)} for _ in range(2))
    np.testing.assert_array_equal(apply_updates(p, u, jnp.int32(7))["a"], p["a"] + u["a"])


def test_small_updates_of_bfloat16_parameters_are_not_lost():
    """Each update is a twentieth of the distance of two neighbours; to nearest, none of them would arrive."""
    p = {"b": jnp.full((200, 500), 1.0, jnp.bfloat16), "a": jnp.full((200, 500), -3.0, jnp.bfloat16)}
    u = {"b": jnp.full((200, 500), 2.0**-7 / 20), "a": jnp.full((200, 500), 2.0**-6 / 20)}
    nearest = optax.apply_updates(p, u)
    assert all(np.array_equal(nearest[name], p[name]) for name in p)
    moved = p
    step = jax.jit(apply_updates)
    for i in range(40):
        moved = step(moved, u, jnp.int32(i))
    for name in p:
        assert moved[name].dtype == jnp.bfloat16
        distance = np.mean(np.asarray(moved[name], np.float64) - np.asarray(p[name], np.float64))
        # 100,000 walks of 40 steps with variance at most (a twentieth of the distance): far below one per cent.
        assert distance == pytest.approx(40 * float(u[name][0, 0]), rel=0.01)


def test_rounding_at_random_gives_one_of_the_two_neighbours_and_repeats():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=4000) * 10.0 ** rng.integers(-30, 30, 4000)).astype(np.float32)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.5]
    key = jax.random.key(3)
    got = np.asarray(round_at_random(jnp.asarray(x), key), np.float32)
    np.testing.assert_array_equal(got, np.asarray(round_at_random(jnp.asarray(x), key), np.float32))
    assert (got != np.asarray(round_at_random(jnp.asarray(x), jax.random.key(4)), np.float32)).mean() > 0.2
    np.testing.assert_array_equal(got[:6], x[:6])
    low = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # towards zero
    high = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    assert ((got == low) | (got == high) | ~np.isfinite(x)).all()
    names = {"x": jnp.asarray(x[6:], jnp.bfloat16), "y": jnp.asarray(x[6:], jnp.bfloat16)}
    tiny = {name: jnp.asarray(np.abs(x[6:]) / 700, jnp.float32) for name in names}
    first = apply_updates(names, tiny, jnp.int32(1))
    assert not np.array_equal(first["x"], first["y"]), "parameters must not share their random bits"
    assert not np.array_equal(first["x"], apply_updates(names, tiny, jnp.int32(2))["x"]), "nor steps"
