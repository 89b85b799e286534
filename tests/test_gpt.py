"""The model against nanochat's own numbers and a float64 transcription; causality, precision, compiled calls."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors
from flax import nnx
from jax.extend.core import jaxprs_in_params
from tiny import CONFIGS, LENGTH, OLD, ROWS, TINY, filled, forward, full, gradient, ids

from nanochat_lib import gpt, losses
from nanochat_lib.errors import UserError
from nanochat_lib.sizing import GPTConfig

# --- nanochat's numbers


@lru_cache
def reference_run(recipe: str):
    """(logits, losses of every position, gradients of the mean loss) of the model in vectors.py."""
    config, (inputs, targets) = vectors.config(recipe), vectors.batch()

    def mean(params):
        logits = gpt.apply(config, params, inputs)
        total, count = losses.cross_entropy(logits, targets)
        return total / count, (logits, losses.token_nll(logits, targets))

    (loss, (logits, nll)), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(filled(config))
    return float(loss), np.asarray(logits, np.float64), np.asarray(nll, np.float64), gradients


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_logits_and_losses_are_nanochats(recipe):
    loss, logits, nll, _ = reference_run(recipe)
    assert logits.shape == (2, 200, 300)
    for where, (first, best) in vectors.LOGITS[recipe].items():
        np.testing.assert_allclose(logits[where][:4], first, atol=2e-6)
        assert logits[where].argmax() == best
    assert logits.sum() == pytest.approx(vectors.LOGIT_SUM[recipe], abs=1e-3)
    assert np.abs(logits).sum() == pytest.approx(vectors.LOGIT_ABS_SUM[recipe], rel=1e-6)
    assert loss == pytest.approx(vectors.MEAN_LOSS[recipe], abs=2e-6)
    assert nll.sum() == pytest.approx(vectors.LOSS_SUM[recipe], rel=1e-6)
    np.testing.assert_allclose(nll[0, :7], (0, 0, 0, 0, 0, *vectors.FIRST_LOSSES[recipe]), atol=2e-6)


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_gradient_norms_are_nanochats(recipe):
    gradients = reference_run(recipe)[3]
    column = 0 if recipe == "head" else 1
    expected = {k: norms[column] for k, norms in vectors.GRADIENT_NORMS.items() if norms[column] is not None}
    assert set(gradients) == set(expected)
    for name, norm in expected.items():
        assert float(jnp.linalg.norm(gradients[name])) == pytest.approx(norm, rel=1e-5), name


# --- an independent transcription in float64


def transcription(config: GPTConfig, params: dict, idx: np.ndarray) -> np.ndarray:
    """The formulas of nanochat's forward pass for one row of ids (T,), position by position, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    old = config.recipe == "recipe4"
    d, groups, t = config.head_dim, config.n_head // config.n_kv_head, len(idx)
    norm = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 2.0**-23)  # noqa: E731
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    angle = np.arange(t)[:, None] / (1e4 if old else 1e5) ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle), np.sin(angle)
    if old:
        cos, sin = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (cos, sin))

    def rotary(x):  # (T, D)
        a, b = x[:, : d // 2], x[:, d // 2 :]
        return np.concatenate([a * cos + b * sin, -a * sin + b * cos], axis=1)

    x = norm(p["transformer.wte.weight"][idx])
    if not old:
        smeared = x.copy()
        for i in range(1, t):
            gate = p["smear_lambda"][0] * sigmoid(p["smear_gate.weight"][0] @ x[i, :24])
            smeared[i] = x[i] + gate * x[i - 1]
        x = smeared
    x0 = x
    for i in range(config.n_layer):
        w = {name.removeprefix(f"transformer.h.{i}."): a for name, a in p.items()}
        x = p["resid_lambdas"][i] * x + p["x0_lambdas"][i] * x0
        h = norm(x)
        heads = []
        for head in range(config.n_head):
            kv = head // groups
            rows, kv_rows = slice(head * d, head * d + d), slice(kv * d, kv * d + d)
            q, k, v = (h @ w[f"attn.c_{n}.weight"][r].T for n, r in (("q", rows), ("k", kv_rows), ("v", kv_rows)))
            if config.has_value_embedding(i):
                gate = w["attn.ve_gate.weight"][kv]
                factor = (2 if old else 3) * sigmoid(h[:, : len(gate)] @ gate)
                v = v + factor[:, None] * p[f"value_embeds.{i}.weight"][idx][:, kv_rows]
            q, k = ((1 if old else 1.2) * norm(rotary(a)) for a in (q, k))
            scores = q @ k.T / np.sqrt(d)
            y = np.zeros((t, d))
            for a in range(t):
                low = max(0, a - config.windows[i])
                e = np.exp(scores[a, low : a + 1])
                y[a] = e / e.sum() @ v[low : a + 1]
            heads.append(y)
        x = x + np.concatenate(heads, axis=1) @ w["attn.c_proj.weight"].T
        x = x + np.maximum(norm(x) @ w["mlp.c_fc.weight"].T, 0) ** 2 @ w["mlp.c_proj.weight"].T
        if i == config.n_layer // 2:
            middle = x
    if not old:
        x = x - p["backout_lambda"][0] * middle
    cap = 20 if old else 15
    return cap * np.tanh(norm(x) @ p["lm_head.weight"][: config.vocab_size].T / cap)


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_the_transcription(name):
    config = CONFIGS[name]
    idx = ids(config, ROWS, LENGTH)
    logits = forward(config)(filled(config), idx)
    assert logits.dtype == jnp.float32
    for row in range(2):
        np.testing.assert_allclose(logits[row], transcription(config, filled(config), idx[row]), atol=3e-6)


# --- what may and what may not influence a position


@pytest.mark.parametrize("name", ["grouped heads", "recipe 4"])
def test_later_tokens_do_not_change_a_bit(name):
    config = CONFIGS[name]
    idx = ids(config, 1, 15)
    before = full(config, filled(config), idx)[0]
    for t in range(14):
        changed = idx.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % config.vocab_size
        after = full(config, filled(config), changed)[0]
        assert np.array_equal(after[: t + 1], before[: t + 1])
        assert np.abs(after[t + 1] - before[t + 1]).max() > 1e-3


def test_documents_of_a_row_see_each_other():
    """Documented choice, as in nanochat: only the window and the position limit what a token reads, not BOS."""
    bos, first, second = 49, [3, 4, 5], [6, 7]
    together = full(TINY, filled(TINY), [[bos, *first, bos, *second]])[0, 5:]
    alone = full(TINY, filled(TINY), [[bos, *second]])[0, 1:]
    assert np.abs(together - alone).max() > 1e-3


def test_padding_rows_of_the_tables_are_never_seen():
    """The vocabulary of 50 is stored in 64 rows; even enormous padding changes nothing and gets no gradient."""
    params = filled(TINY)
    tables = [name for name, leaf in params.items() if leaf.shape[0] == 64 and leaf.shape != (64, 64)]
    assert sorted(tables) == [
        "lm_head.weight",
        "transformer.wte.weight",
        "value_embeds.0.weight",
        "value_embeds.2.weight",
    ]
    loud = params | {name: params[name].at[50:].set(1e6) for name in tables}
    idx = ids(TINY, ROWS, 15)
    logits = full(TINY, loud, idx)
    assert logits.shape == (ROWS, 15, 50)
    assert np.array_equal(logits, full(TINY, params, idx))
    gradients = gradient(TINY)(params, idx, idx)
    for name in tables:
        assert not np.any(gradients[name][50:]) and np.any(gradients[name][:50])


def test_ids_outside_of_the_vocabulary_are_named():
    assert gpt.check_ids(TINY, [[0, 49]]).dtype == np.int32
    assert gpt.check_ids(TINY, []).size == 0
    for wrong in (50, 63, -1):
        with pytest.raises(UserError, match=f"token id {wrong} is outside of the model's vocabulary 0 … 49"):
            gpt.check_ids(TINY, [[1, wrong]])
    with pytest.raises(UserError, match="must be integers, got float64"):
        gpt.check_ids(TINY, [1.5])


# --- compiled calls


def test_a_compiled_call_carries_plain_leaves_and_rebuilds_nothing(monkeypatch):
    config = replace(TINY, n_layer=1)
    built = []
    monkeypatch.setattr(nnx, "merge", lambda *a, merge=nnx.merge: built.append(1) or merge(*a))
    f = jax.jit(lambda params, idx: gpt.apply(config, params, idx))
    params, idx = filled(config), ids(config, 1, 4)
    tree = jax.tree.structure(((params, idx), {}))
    assert f.lower(params, idx).in_tree == tree and tree.num_leaves == len(params) + 1
    for _ in range(3):
        f(params, idx)
    assert len(built) == 1 and f._cache_size() == 1


def test_bfloat16_compute_stays_close_and_keeps_float32_logits():
    params, idx = filled(TINY), ids(TINY, ROWS, LENGTH)
    exact = full(TINY, params, idx)
    rough = full(TINY, params, idx, jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(rough - exact).max() < 0.1
    stream = jax.eval_shape(lambda p, i: gpt.hidden(TINY, p, i, dtype=jnp.bfloat16), params, idx)
    assert stream.dtype == jnp.bfloat16


def equations(jaxpr):
    """Every equation, those of inner functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_no_step_lifts_the_stream_out_of_bfloat16(recipe):
    """Every product with a weight matrix is computed in bfloat16; under strict rules nothing is promoted silently."""
    config = replace(TINY, recipe=recipe)
    idx = jnp.asarray(ids(config, 1, 4))
    with jax.numpy_dtype_promotion("strict"):
        graph = jax.make_jaxpr(lambda p: gpt.apply(config, p, idx, dtype=jnp.bfloat16))(filled(config))
        jax.make_jaxpr(lambda p: gpt.apply(config, p, idx))(filled(config))
    products = [e for e in equations(graph.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) >= 6 * config.n_layer
    assert all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)


def test_gradients_have_the_masters_dtype_under_bfloat16():
    params, idx = filled(OLD), ids(OLD, 1, 6)
    loss = lambda p: losses.cross_entropy(gpt.apply(OLD, p, idx, dtype=jnp.bfloat16), idx)[0]  # noqa: E731
    gradients = jax.eval_shape(jax.grad(loss), params)
    assert all(g.dtype == jnp.float32 and g.shape == params[name].shape for name, g in gradients.items())
