"""The model against nanochat's own numbers and a float64 transcription; cache, windows, initialisation, odd inputs."""

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

from nanochat_lib import gpt, losses
from nanochat_lib.errors import UserError
from nanochat_lib.sizing import GPTConfig

TINY = GPTConfig(sequence_len=6, vocab_size=50, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, window_pattern="L")
OLD = replace(TINY, n_layer=2, window_pattern="SL", recipe="recipe4")  # windows 3 and 6
CONFIGS = {
    "grouped heads": TINY,
    "recipe 4": OLD,
    "one layer": replace(TINY, n_layer=1, n_kv_head=4, sequence_len=20),
    "one kv head": replace(TINY, n_layer=4, n_kv_head=1, sequence_len=4),
}


@lru_cache
def filled(config: GPTConfig) -> dict[str, jax.Array]:
    return {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}


@lru_cache
def forward(config: GPTConfig, dtype=jnp.float32):
    return jax.jit(lambda params, idx: gpt.apply(config, params, idx, dtype=dtype))


@lru_cache
def cached(config: GPTConfig, dtype=jnp.float32):
    """(prefill, decode), compiled."""
    return (
        jax.jit(lambda params, idx, lengths, cache: gpt.prefill(config, params, idx, lengths, cache, dtype=dtype)),
        jax.jit(lambda params, token, cache: gpt.decode(config, params, token, cache, dtype=dtype)),
    )


ROWS, LENGTH, PROMPT, SLOTS = 6, 23, 15, 24  # one shape for nearly everything: each other one is a compilation


def full(config: GPTConfig, params: dict, idx: np.ndarray, dtype=jnp.float32) -> np.ndarray:
    """Logits of ids (b, t), computed in the common shape; what is added comes later or stands in other rows."""
    idx = np.asarray(idx)
    (b, t) = idx.shape
    return np.asarray(forward(config, dtype)(params, np.pad(idx, ((0, ROWS - b), (0, LENGTH - t)))))[:b, :t]


@lru_cache
def gradient(config: GPTConfig):
    """Gradient of the summed loss of predicting `targets`, compiled."""
    loss = lambda params, idx, targets: losses.cross_entropy(gpt.apply(config, params, idx), targets)[0]  # noqa: E731
    return jax.jit(jax.grad(loss))


def ids(config: GPTConfig, rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)).astype(np.int32)


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


@pytest.mark.parametrize("prompt", range(2))
def test_greedy_text_is_nanochats_with_and_without_the_cache(prompt):
    config = vectors.config()
    params, (start, expected) = filled(config), vectors.GREEDY[prompt]
    prefill, decode = cached(config)
    padded = np.zeros((1, 190), np.int32)
    padded[0, : len(start)] = start
    logits, cache = prefill(params, padded, np.array([len(start)]), gpt.init_cache(config, 1, 210))
    naive, out = np.zeros((1, 202), np.int32), []
    naive[0, : len(start)] = start
    for i in range(12):
        full = np.asarray(forward(config)(params, naive))[0, len(start) + i - 1]
        np.testing.assert_allclose(logits[0], full, atol=2e-6)
        out.append(int(jnp.argmax(logits[0])))
        naive[0, len(start) + i] = out[-1]
        logits, cache = decode(params, np.array(out[-1:]), cache)
    assert tuple(out) == expected


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


# --- cache


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_equal_the_full_pass_for_rows_of_every_length(name):
    """Lengths around each window share one batch; the padding holds other ids; then eight tokens each."""
    config = CONFIGS[name]
    params, window = filled(config), config.windows[0]
    lengths = np.array([1, 2, window - 1, window, window + 1, 2 * window + 3]).clip(1, PROMPT)
    idx = ids(config, ROWS, LENGTH, seed=1)
    logits_of = full(config, params, idx)
    padded = np.where(np.arange(PROMPT) < lengths[:, None], idx[:, :PROMPT], ids(config, 1, PROMPT, seed=2))
    prefill, decode = cached(config)
    logits, cache = prefill(params, padded, lengths, gpt.init_cache(config, ROWS, SLOTS))
    rows = np.arange(ROWS)
    np.testing.assert_allclose(logits, logits_of[rows, lengths - 1], atol=3e-6)
    for step in range(8):
        assert cache.pos.tolist() == (lengths + step).tolist()
        logits, cache = decode(params, idx[rows, lengths + step], cache)
        np.testing.assert_allclose(logits, logits_of[rows, lengths + step], atol=3e-6)
    assert decode._cache_size() == 1


def test_padding_does_not_change_a_bit():
    params, lengths = filled(TINY), np.array([1, 3, 5, 6, 7, 14])
    prefill, decode = cached(TINY)
    results = []
    for seed in (3, 4):
        idx = np.where(np.arange(PROMPT) < lengths[:, None], ids(TINY, ROWS, PROMPT), ids(TINY, ROWS, PROMPT, seed))
        logits, cache = prefill(params, idx, lengths, gpt.init_cache(TINY, ROWS, SLOTS))
        results.append([logits, decode(params, np.arange(ROWS), cache)[0]])
    assert np.array_equal(results[0], results[1])


def test_decoding_from_an_empty_cache_is_the_forward_pass_of_one_token():
    params, idx = filled(TINY), ids(TINY, ROWS, 5)
    expected, cache = full(TINY, params, idx), gpt.init_cache(TINY, ROWS, SLOTS)
    for t in range(5):
        logits, cache = cached(TINY)[1](params, idx[:, t], cache)
        np.testing.assert_allclose(logits, expected[:, t], atol=3e-6)


def test_one_token_is_a_sequence_too():
    params, idx = filled(TINY), ids(TINY, 2, 4)
    one = forward(TINY)(params, idx[:, :1])
    assert one.shape == (2, 1, 50)
    np.testing.assert_allclose(one, full(TINY, params, idx)[:, :1], atol=2e-6)


def test_repeated_rows_continue_the_same_prompt():
    params, lengths = filled(TINY), np.array([2, 5, 1, 1, 1, 1])
    prefill, decode = cached(TINY)
    _, cache = prefill(params, ids(TINY, ROWS, PROMPT), lengths, gpt.init_cache(TINY, ROWS, SLOTS))
    many = gpt.repeat_cache(jax.tree.map(lambda leaf: leaf[:2], cache), 3)
    assert many.pos.tolist() == [2, 2, 2, 5, 5, 5]
    single, _ = decode(params, np.array([7, 8, 0, 0, 0, 0]), cache)
    repeated, _ = decode(params, np.array([7, 7, 7, 8, 8, 8]), many)
    np.testing.assert_allclose(repeated, np.repeat(single[:2], 3, axis=0), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_cache_has_the_compute_dtype_and_keeps_it(dtype):
    prefill, decode = cached(TINY, dtype)
    empty = jax.eval_shape(lambda: gpt.init_cache(TINY, 2, 8, dtype))
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    logits, prompt = jax.eval_shape(prefill, filled(TINY), shape(2, 4), shape(2), empty)
    last_logits, last = jax.eval_shape(decode, filled(TINY), shape(2), prompt)
    assert logits.dtype == last_logits.dtype == jnp.float32
    assert empty.k[0].dtype == empty.prev.dtype == dtype
    for other in (prompt, last):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), other) == jax.tree.map(lambda a: (a.shape, a.dtype), empty)


def test_an_empty_cache_is_refused():
    with pytest.raises(UserError, match="0 rows"):
        gpt.init_cache(TINY, 0, 8)


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


# --- parameters


def test_names_and_shapes_are_nanochats_state_dict():
    expected = {
        "resid_lambdas": (3,), "x0_lambdas": (3,), "smear_lambda": (1,), "backout_lambda": (1,),
        "transformer.wte.weight": (64, 32), "lm_head.weight": (64, 32), "smear_gate.weight": (1, 24),
        "value_embeds.0.weight": (64, 16), "value_embeds.2.weight": (64, 16),
        "transformer.h.0.attn.ve_gate.weight": (2, 12), "transformer.h.2.attn.ve_gate.weight": (2, 12),
    }  # fmt: skip
    for i in range(3):
        expected |= {
            f"transformer.h.{i}.attn.c_q.weight": (32, 32), f"transformer.h.{i}.attn.c_k.weight": (16, 32),
            f"transformer.h.{i}.attn.c_v.weight": (16, 32), f"transformer.h.{i}.attn.c_proj.weight": (32, 32),
            f"transformer.h.{i}.mlp.c_fc.weight": (128, 32), f"transformer.h.{i}.mlp.c_proj.weight": (32, 128),
        }  # fmt: skip
    assert gpt.param_shapes(TINY) == expected
    head_only = {"smear_lambda", "backout_lambda", "smear_gate.weight"}
    old = {name: (2, 32) if "ve_gate" in name else shape for name, shape in expected.items() if name not in head_only}
    old_config = replace(TINY, recipe="recipe4")
    assert gpt.param_shapes(old_config) == old
    for config, shapes in ((TINY, expected), (old_config, old)):
        params = jax.eval_shape(lambda config=config: gpt.init_params(config, jax.random.key(0)))
        assert {name: leaf.shape for name, leaf in params.items()} == shapes
        assert all(leaf.dtype == jnp.float32 and not leaf.weak_type for leaf in params.values())


@lru_cache
def initial(recipe: str):
    config = GPTConfig(sequence_len=64, vocab_size=2000, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, recipe=recipe)
    return {name: np.asarray(leaf, np.float64) for name, leaf in gpt.init_params(config, jax.random.key(1)).items()}


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_initial_distributions(recipe):
    params, head = initial(recipe), recipe == "head"
    bound = np.sqrt(3 / 128)
    uniform = {  # name: (low, high)
        "c_q": (-bound, bound), "c_k": (-bound, bound), "c_v": (-bound, bound), "value_embeds": (-bound, bound),
        "c_fc": (-0.4 * bound, 0.4 * bound) if head else (-bound, bound),
    }  # fmt: skip
    normal = {"wte": 0.8 if head else 1.0, "lm_head": 0.001}
    for name, value in params.items():
        if "c_proj" in name or ("ve_gate" in name and not head):
            assert not value.any(), name
        elif "gate" in name:  # a few entries of U(0, 0.02)
            assert value.min() >= 0 and value.max() <= 0.02 and value.std() > 0.003, name
        elif any(key in name for key in uniform):
            low, high = next(limits for key, limits in uniform.items() if key in name)
            assert low <= value.min() < 0.98 * low and 0.98 * high < value.max() <= high, name
            assert abs(value.mean()) < 5 * high / np.sqrt(3 * value.size), name
            assert value.std() == pytest.approx(high / np.sqrt(3), rel=0.02), name
        elif any(key in name for key in normal):
            std = next(std for key, std in normal.items() if key in name)
            assert abs(value.mean()) < 5 * std / np.sqrt(value.size), name
            assert value.std() == pytest.approx(std, rel=0.01), name
            assert 3.5 * std < np.abs(value).max() < 7 * std, name
        else:
            assert "lambda" in name
    line = np.arange(4) / 3
    np.testing.assert_allclose(params["resid_lambdas"], 1.15 - 0.10 * line if head else np.ones(4), atol=1e-7)
    np.testing.assert_allclose(params["x0_lambdas"], 0.20 - 0.15 * line if head else np.full(4, 0.1), atol=1e-7)
    assert ("smear_lambda" in params) == ("backout_lambda" in params) == head
    if head:
        assert params["smear_lambda"] == [0] and params["backout_lambda"] == pytest.approx([0.2])


def test_initial_weights_differ_by_layer_and_by_key_but_not_by_call():
    params = initial("head")
    drawn = [value for name, value in params.items() if value.any() and "lambda" not in name]
    assert len({value.ravel()[0] for value in drawn}) == len(drawn)
    a, b, c = (gpt.init_params(TINY, jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["lm_head.weight"], c["lm_head.weight"])


def test_at_the_start_every_block_is_the_identity():
    """Zero output projections: nothing reaches q, k, v, fc, gates and value embeddings in the first step."""
    params, idx = gpt.init_params(TINY, jax.random.key(0)), ids(TINY, ROWS, 15)
    gradients = gradient(TINY)(params, idx, idx)
    for name, pull in gradients.items():
        silent = any(key in name for key in ("c_q", "c_k", "c_v", "c_fc", "ve_gate", "value_embeds", "smear_gate"))
        assert np.any(pull) != silent, name


def test_the_module_is_the_same_model():
    """GPT(config, rngs) used as an ordinary flax module; its parameters taken out and put back by name."""
    model = gpt.GPT(TINY, nnx.Rngs(3))
    params = gpt.get_params(model)
    assert {name: leaf.shape for name, leaf in params.items()} == gpt.param_shapes(TINY)
    idx = jnp.asarray(ids(TINY, ROWS, LENGTH))
    np.testing.assert_allclose(nnx.jit(gpt.GPT.__call__)(model, idx), forward(TINY)(params, idx), atol=1e-7)
    assert model.transformer.h[2].attn.ve_gate.weight[...].shape == (2, 12)
    rebuilt = gpt.get_params(gpt.build(TINY, params))
    assert all(rebuilt[name] is params[name] for name in params)


def test_parameters_of_another_model_are_named():
    params = filled(TINY)
    with pytest.raises(UserError, match=r"lm_head.weight is \(64, 31\), the configuration wants \(64, 32\)"):
        gpt.apply(TINY, params | {"lm_head.weight": jnp.zeros((64, 31))}, jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(UserError, match="backout_lambda is missing"):
        gpt.apply(TINY, {k: v for k, v in params.items() if k != "backout_lambda"}, jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(UserError, match="no such parameter"):
        gpt.apply(replace(TINY, recipe="recipe4", n_layer=3), params, jnp.zeros((1, 2), jnp.int32))


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
