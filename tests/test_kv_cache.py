"""Generation with the cache equals the full forward pass, whatever the rows' lengths and the windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors
from tiny import CONFIGS, LENGTH, PROMPT, ROWS, SLOTS, TINY, cached, filled, forward, full, ids

from nanochat_lib import gpt
from nanochat_lib.errors import UserError


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
