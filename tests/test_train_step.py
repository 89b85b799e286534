"""The compiled step: nanochat's numbers, micro-batches, masks, one compilation, donation; and the evaluation step."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors

from nanochat_lib import gpt
from nanochat_lib.compute import Compute
from nanochat_lib.errors import UserError
from nanochat_lib.optim import make_optimizer
from nanochat_lib.presets import OptimConfig
from nanochat_lib.schedules import Hyper
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import (
    TrainState,
    TrainStep,
    init_train_state,
    loss_and_gradients,
    make_eval_step,
    make_train_step,
)

CONFIG = GPTConfig(sequence_len=16, vocab_size=60, n_layer=1, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")
HYPER = {"lr": 1.0, "momentum": 0.95, "weight_decay": 0.1}
LRS = OptimConfig(embedding_lr=0.02, unembedding_lr=0.002, scalar_lr=0.02, smear_lr=0.02)


def params_of(config: GPTConfig) -> dict[str, np.ndarray]:
    return {name: vectors.fill(name, shape) for name, shape in gpt.param_shapes(config).items()}


def batch_of(seed: int, micro: int, rows: int, length: int = 16, ignored: float = 0.0) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    ids = random.randint(0, 60, size=(2, micro, rows, length)).astype(np.int32)
    targets = np.where(random.rand(micro, rows, length) < ignored, -1, ids[1]).astype(np.int32)
    return {"inputs": ids[0], "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def unweighted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x for name, x in batch.items() if name != "weights"}


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    return {name: jnp.asarray(p) for name, p in params_of(CONFIG).items()}


@pytest.fixture(scope="module")
def gradients():
    """Compiled (params, batch) -> (loss, gradients, count)."""
    return jax.jit(lambda params, batch: loss_and_gradients(CONFIG, params, batch))


@pytest.fixture(scope="module")
def optimizer():
    return make_optimizer(CONFIG, LRS)


@pytest.fixture(scope="module")
def step(optimizer) -> TrainStep:
    return make_train_step(CONFIG, optimizer)


# --- nanochat's numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_three_steps_equal_nanochat(recipe):
    config = vectors.config(recipe)
    lrs = OptimConfig(embedding_lr=0.3, unembedding_lr=0.008, matrix_lr=0.02, scalar_lr=0.5)
    decay = 0.28
    if recipe == "recipe4":
        lrs, decay = replace(lrs, unembedding_lr=0.004), 0.2
    optimizer = make_optimizer(config, lrs)
    state = init_train_state(config, optimizer, params_of(config))
    train_step = make_train_step(config, optimizer)
    inputs, targets = vectors.batch()
    batch = {"inputs": inputs[None], "targets": targets[None]}
    losses = []
    for number in range(4):
        if recipe == "head":
            for name, rows in vectors.STEPS.items():
                norm, *first = rows[number]
                value = np.array(state.params[name])
                where = f"{name} after {number}"
                np.testing.assert_allclose(np.linalg.norm(value), norm, rtol=1e-5, err_msg=where)
                np.testing.assert_allclose(value.ravel()[:2], first[: value.size], atol=5e-5, err_msg=where)
        state, metrics = train_step(state, batch, {"lr": 1.0, "momentum": 0.95, "weight_decay": decay})
        losses.append(float(metrics["loss"]))
    assert len(vectors.STEPS) == 35
    assert metrics["tokens"] == 395 and state.step == state.opt_state.step == 4
    expected = vectors.STEP_LOSSES[recipe]
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    # Recipe 4 iterates in bfloat16.
    assert losses == pytest.approx(expected, rel=1e-5 if recipe == "head" else 1e-3)


# --- micro-batches and masks ------------------------------------------------------------------------------------------


def assert_same_gradients(a: tuple, b: tuple, tolerance: float = 1e-6) -> None:
    (loss_a, grads_a, count_a), (loss_b, grads_b, count_b) = a, b
    assert int(count_a) == int(count_b)
    np.testing.assert_allclose(loss_a, loss_b, atol=tolerance)
    for name in grads_a:
        np.testing.assert_allclose(grads_a[name], grads_b[name], atol=tolerance, err_msg=name)


def regrouped(batch: dict[str, np.ndarray], micro: int) -> dict[str, np.ndarray]:
    return {name: x.reshape(micro, -1, x.shape[-1]) for name, x in batch.items()}


def test_micro_batches_equal_one_batch_whatever_their_share_of_targets(params, gradients):
    """Four rows with 16, 1, 9 and 0 targets: as 1 × 4 and as 4 × 1, with equal and with random weights."""
    batch = batch_of(0, 1, 4)
    for row, valid in enumerate((16, 1, 9, 0)):
        batch["targets"][0, row, valid:] = -1
    for weights in (batch["weights"], np.random.RandomState(1).randn(1, 4, 16).astype(np.float32)):
        whole = gradients(params, batch | {"weights": weights})
        assert whole[2] == 26
        assert max(float(jnp.abs(g).max()) for g in whole[1].values()) > 1e-3
        assert_same_gradients(whole, gradients(params, regrouped(batch | {"weights": weights}, 4)))


def test_loss_is_the_mean_over_targets_and_gradients_are_its_own(params, gradients):
    """Against plain jax.grad of a mean written here with log_softmax."""
    batch = batch_of(2, 1, 4, ignored=0.3)

    def mean_nll(params):
        logits = gpt.apply(CONFIG, params, batch["inputs"][0])
        targets = batch["targets"][0]
        rows, columns = np.nonzero(targets >= 0)
        return -jax.nn.log_softmax(logits)[rows, columns, targets[rows, columns]].mean()

    loss, grads = jax.jit(jax.value_and_grad(mean_nll))(params)
    count = int((batch["targets"] >= 0).sum())
    assert_same_gradients((loss, grads, count), gradients(params, batch))


def test_advantages_weight_the_positions(params, gradients):
    """A row of weight 2 beside rows of weight 0 is twice the first row's share; the count stays that of both."""
    batch = batch_of(3, 1, 4, ignored=0.2)
    weights = np.broadcast_to(np.float32([2, 0, 0, 0])[None, :, None], (1, 4, 16))
    weighted = gradients(params, batch | {"weights": np.array(weights)})
    first = {name: x.copy() for name, x in batch.items()}
    first["targets"][:, 1:] = -1
    alone = gradients(params, first)
    ratio = 2 * float(alone[2]) / float(weighted[2])
    scaled = {name: ratio * g for name, g in alone[1].items()}
    assert_same_gradients((ratio * alone[0], scaled, weighted[2]), weighted)


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("case", ["no targets", "zero advantages"])
def test_nothing_to_learn_gives_exactly_zero(params, gradients, micro, case):
    batch = batch_of(4, 1, 4)
    if case == "no targets":
        batch["targets"][:] = -1
    else:
        batch["weights"][:] = 0
    loss, grads, count = gradients(params, regrouped(batch, micro))
    assert loss == 0 and count == (0 if case == "no targets" else 64)
    assert all((g == 0).all() for g in grads.values())


def test_a_batch_without_targets_only_decays(params, optimizer, step):
    batch = unweighted(batch_of(5, 1, 4))
    batch["targets"][:] = -1
    state, metrics = step(init_train_state(CONFIG, optimizer, params), batch, HYPER)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0
    name = "transformer.h.0.mlp.c_proj.weight"
    np.testing.assert_allclose(state.params[name], (1 - 0.02 * 0.1) * params[name], rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# --- the compiled program ---------------------------------------------------------------------------------------------


def test_changing_scalars_and_kinds_of_input_compile_once(params, optimizer, step):
    state = init_train_state(CONFIG, optimizer, jax.random.key(0))
    state, _ = step(state, unweighted(batch_of(0, 1, 4)), HYPER)
    compiled = step.compiles
    hypers = [
        Hyper(0.5, 0.9, 0.0),
        {"lr": np.float32(0.1), "momentum": jnp.float32(0.85), "weight_decay": 1},
        {"lr": np.float64(0.2), "momentum": 0.9, "weight_decay": jnp.asarray(0.3)},
        Hyper(1.0, 0.97, 0.1),
    ]
    for number, hyper in enumerate(hypers):
        batch = unweighted(batch_of(number, 1, 4))
        if number == 1:
            batch = {name: jnp.asarray(x) for name, x in batch.items()}
        if number == 2:
            batch = {name: x.astype(np.int64) for name, x in batch.items()}
        state, metrics = step(state, batch, hyper)
    assert step.compiles == compiled == 1
    assert state.step == 5 and state.step.dtype == jnp.int32
    assert {name: (x.shape, str(x.dtype)) for name, x in metrics.items()} == {
        "loss": ((), "float32"), "grad_norm": ((), "float32"), "tokens": ((), "int32"),
    }  # fmt: skip
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((state, metrics)))


def test_parameters_bound_to_a_device_compile_once_too(params, optimizer, step):
    """Loaded parameters are bound; the moments beside them must be so from the start."""
    before = step.compiles
    state = init_train_state(CONFIG, optimizer, jax.device_put(params, jax.devices()[0]))
    for number in range(3):
        state, _ = step(state, unweighted(batch_of(number, 1, 4)), HYPER)
    assert step.compiles <= before + 1


def test_the_whole_state_is_donated(params, optimizer, step):
    state = init_train_state(CONFIG, optimizer, params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    memory = step.lower(state, unweighted(batch_of(0, 1, 4)), HYPER).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * size
    after, _ = step(state, unweighted(batch_of(0, 1, 4)), HYPER)
    with pytest.raises(RuntimeError, match="deleted"):
        np.array(state.params["lm_head.weight"])
    assert np.isfinite(after.params["lm_head.weight"]).all()
    assert np.isfinite(params["lm_head.weight"]).all(), "the caller's own arrays must survive"


def test_one_micro_batch_has_no_loop(params):
    loops = {}
    for micro in (1, 2):
        traced = jax.make_jaxpr(lambda p, b: loss_and_gradients(CONFIG, p, b))(params, batch_of(0, micro, 2))
        loops[micro] = sum(eq.primitive.name == "scan" and eq.params["length"] == micro for eq in traced.eqns)
    assert loops == {1: 0, 2: 1}


def test_metrics_are_of_all_parameters_and_no_weights_means_one(params, optimizer, step, gradients):
    batch = batch_of(6, 1, 4)
    loss, grads, _ = gradients(params, batch)
    _, metrics = step(init_train_state(CONFIG, optimizer, params), unweighted(batch), HYPER)
    expected = math.sqrt(sum(float((np.array(g, np.float64) ** 2).sum()) for g in grads.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)


def test_initial_state_from_a_key_or_from_parameters(optimizer):
    fresh = init_train_state(CONFIG, optimizer, jax.random.key(1))
    assert set(fresh.params) == set(gpt.param_shapes(CONFIG))
    given = init_train_state(CONFIG, optimizer, {n: np.asarray(p, np.float16) for n, p in params_of(CONFIG).items()})
    for state in (fresh, given):
        assert state.step == 0 and state.opt_state.step == 0
        assert all(p.dtype == jnp.float32 and not p.weak_type for p in state.params.values())
    other = init_train_state(CONFIG, optimizer, jax.random.key(2))
    assert not np.array_equal(fresh.params["lm_head.weight"], other.params["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b, h: b.pop("targets"), "needs inputs, targets"),
        (lambda b, h: b.update(mask=b["inputs"]), "batch has inputs, mask, targets"),
        (lambda b, h: b.update(targets=b["targets"][:, :, :-1]), r"\(1, 4, 15\)"),
        (lambda b, h: b.update({name: x[0] for name, x in b.items()}), "micro-batches, rows, tokens"),
        (lambda b, h: h.pop("momentum"), "needs exactly lr, momentum, weight_decay"),
        (lambda b, h: h.update(beta=1.0), "hyper has beta, lr"),
    ],
)
def test_wrong_calls_are_one_line_errors(step, change, words):
    batch, hyper = batch_of(0, 1, 4), dict(HYPER)
    change(batch, hyper)
    with pytest.raises(UserError, match=words) as caught:
        step(None, batch, hyper)
    assert "\n" not in str(caught.value)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_eval_step_counts_as_bits_per_byte_does(params):
    """Special tokens have zero bytes: they count in the loss, not in nats or bytes. Ignored targets count nowhere."""
    evaluate = make_eval_step(CONFIG)
    token_bytes = np.random.RandomState(0).randint(1, 6, size=60).astype(np.int32)
    token_bytes[50:] = 0
    batch = {name: x[0] for name, x in batch_of(7, 1, 4, ignored=0.3).items()}
    nats, size, nll_sum, count = evaluate(params, batch["inputs"], batch["targets"], token_bytes)

    logits = np.array(jax.jit(lambda p, x: gpt.apply(CONFIG, p, x))(params, batch["inputs"]), np.float64)
    expected = np.zeros(4)
    for row, column in np.ndindex(4, 16):
        target = batch["targets"][row, column]
        if target >= 0:
            scores = logits[row, column]
            nll = np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target]
            expected += (nll * (token_bytes[target] > 0), token_bytes[target], nll, 1)
    assert expected[1] > 0 and expected[0] < expected[2]
    np.testing.assert_allclose([float(nats), float(size), float(nll_sum), float(count)], expected, rtol=1e-5)
    assert nats.dtype == nll_sum.dtype == jnp.float32 and size.dtype == count.dtype == jnp.int32

    nothing = evaluate(params, batch["inputs"], np.full((4, 16), -1, np.int32), token_bytes)
    assert [float(x) for x in nothing] == [0, 0, 0, 0]
    special = evaluate(params, batch["inputs"], np.full((4, 16), 55, np.int32), token_bytes)
    assert float(special[0]) == 0 and int(special[1]) == 0 and float(special[2]) > 0 and int(special[3]) == 64
    # A target of -1 must never be read as the last token.
    assert int(evaluate(params, batch["inputs"], batch["targets"], np.full(60, 1, np.int32))[1]) == int(count)


# --- how it computes, not what ----------------------------------------------------------------------------------------

WIDE = GPTConfig(sequence_len=16, vocab_size=60, n_layer=2, n_head=2, n_kv_head=2, n_embd=128, window_pattern="L")


@pytest.fixture(scope="module")
def wide() -> dict[str, jax.Array]:
    return {name: jnp.asarray(p) for name, p in params_of(WIDE).items()}


def computed(compute: Compute, params: dict, micro: int = 2) -> tuple:
    batch = unweighted(batch_of(5, micro, 2))
    return jax.jit(lambda p, b: loss_and_gradients(WIDE, p, b, compute))(params, batch)


@pytest.fixture(scope="module")
def plain(wide):
    return computed(Compute(), wide)


@pytest.mark.parametrize(
    "compute", [Compute(remat=True), Compute(loss_chunks=3), Compute(table_gradients="pallas-interpret")],
    ids=["remat", "chunks", "pallas tables"],
)  # fmt: skip
def test_memory_choices_change_no_number(compute, plain, wide):
    assert_same_gradients(plain, computed(compute, wide), 2e-6)


def relative_error(a: tuple, b: tuple) -> float:
    """Of the gradients of the blocks' matrices, all together."""
    names = [name for name in a[1] if ".h." in name]
    difference = math.sqrt(sum(float(jnp.sum((a[1][n] - b[1][n]) ** 2)) for n in names))
    return difference / math.sqrt(sum(float(jnp.sum(a[1][n] ** 2)) for n in names))


def test_fp8_is_near_and_leaves_gates_head_and_evaluation_alone(plain, wide):
    quantised = computed(Compute(fp8=True), wide)
    assert float(quantised[0]) != float(plain[0]) and float(quantised[0]) == pytest.approx(float(plain[0]), rel=0.02)
    assert 1e-3 < relative_error(plain, quantised) < 0.2
    text = jax.jit(lambda p, b: loss_and_gradients(WIDE, p, b, Compute(fp8=True))).lower(
        wide, unweighted(batch_of(5, 1, 2))
    )
    products = [line for line in text.as_text().splitlines() if "dot_general" in line]
    in_fp8 = [line for line in products if "f8E4M3FN" in line]
    assert len(in_fp8) == 3 * 6 * WIDE.n_layer  # q, k, v, both projections and the MLP's first, three products each
    assert len(products) > len(in_fp8) and not [line for line in in_fp8 if "x60x" in line]
    evaluation = make_eval_step(WIDE).lower(
        wide, *(jax.ShapeDtypeStruct((2, 16), jnp.int32),) * 2, jax.ShapeDtypeStruct((60,), jnp.int32)
    )
    assert "f8E" not in evaluation.as_text()


def test_bfloat16_computes_with_float32_gradients_and_masters(plain, wide):
    found = computed(Compute("bfloat16"), wide)
    assert {g.dtype for g in found[1].values()} == {jnp.dtype("float32")}
    assert relative_error(plain, found) < 0.05
    # The sums of a product are not rounded to bfloat16 on the way into the gradient.
    values = np.asarray(found[1]["transformer.h.0.mlp.c_fc.weight"])
    assert not np.array_equal(values, np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32))


@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_masters_keep_their_dtype_and_learn(masters):
    optimizer = make_optimizer(CONFIG, LRS)
    state = init_train_state(CONFIG, optimizer, jax.random.key(0), masters=masters)
    train_step = make_train_step(CONFIG, optimizer)
    batch = unweighted(batch_of(1, 2, 2))
    losses = []
    for _ in range(6):
        state, metrics = train_step(state, batch, HYPER)
        losses.append(float(metrics["loss"]))
    assert {p.dtype for p in state.params.values()} == {jnp.dtype(masters)}
    assert {m.dtype for m in jax.tree.leaves(state.opt_state)[1:]} == {jnp.dtype("float32")}
    assert losses[-1] < losses[0] - 0.3 and train_step.compiles == 1


def test_in_chunks_the_compiled_step_never_holds_all_logits():
    """Of 64 tokens and 320 ids; the state's own arrays have other shapes."""
    config = replace(WIDE, vocab_size=320)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gpt.param_shapes(config).items()}
    batch = {name: jax.ShapeDtypeStruct((1, 4, 16), jnp.int32) for name in ("inputs", "targets")}
    optimizer = make_optimizer(config, LRS)
    state = jax.eval_shape(lambda p: TrainState(p, optimizer.init(p), jnp.int32(0)), params)
    hyper = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in HYPER}
    held = {}
    for chunks in (1, 4):
        train_step = make_train_step(config, optimizer, compute=Compute(loss_chunks=chunks))
        text = train_step.jitted.lower(state, batch, hyper).compile().as_text()
        held[chunks] = any(shape in text for shape in ("f32[64,320]", "f32[4,16,320]", "f32[320,64]"))
    assert held == {1: True, 4: False}
