"""Generation with the cache equals the full forward pass, whatever the rows' lengths and the windows."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, LENGTH, OLD, PROMPT, ROWS, SLOTS, TINY, cached, filled, forward, full, ids

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.kv_cache import held, put_row, row_bytes, slots, steps_back, store_chunk, take_row


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


# Rings, and texts in parts ------------------------------------------------------------------------------------------

PART, SLACK = 7, 2


@lru_cache
def extended(config):
    """extend, compiled for parts of up to PART tokens, and decode with what it may be told."""
    return (
        jax.jit(lambda params, idx, n, previous, cache: gpt.extend(config, params, idx, n, previous, cache)),
        jax.jit(lambda params, token, cache, alive: gpt.decode(config, params, token, cache, alive=alive)),
    )


def in_parts(config, params, idx, cache, start, stop, cuts):
    """Runs idx[:, start:stop] behind the cache in parts that end at `cuts`; (logits, cache)."""
    logits = None
    borders = sorted({start, stop, *(c for c in cuts if start < c < stop)})
    borders = sorted({*borders, *(b for a, c in pairwise(borders) for b in range(a, c, PART))})
    for begin, end in pairwise(borders):
        part = np.full((ROWS, PART), 3, np.int32)
        part[:, : end - begin] = idx[:, begin:end]
        previous = idx[:, begin - 1] if begin else np.full(ROWS, -1)
        logits, cache = extended(config)[0](params, part, np.full(ROWS, end - begin), previous, cache)
    return logits, cache


@pytest.mark.parametrize("name", ["grouped heads", "recipe 4", "one kv head"])
def test_rings_hold_only_the_window(name):
    config = CONFIGS[name]
    cache = gpt.init_cache(config, 1, SLOTS)
    assert [k.shape[2] for k in cache.k] == [w + 1 for w in config.windows[:-1]] + [SLOTS]
    assert cache.length == SLOTS and slots(config, 3, 9) == (3,) * config.n_layer


@given(st.lists(st.integers(1, 22), max_size=4), st.integers(1, 23), st.integers(0, 24), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_a_text_in_parts_and_after_steps_back_equals_the_full_pass(cuts, stop, back, seed):
    """Any cuts; then as many tokens as allowed are taken back and others run; then one more is decoded."""
    for config in (TINY, OLD):
        params, idx = filled(config), ids(config, ROWS, LENGTH, seed)
        logits, cache = in_parts(config, params, idx, gpt.init_cache(config, ROWS, SLOTS, slack=SLACK), 0, stop, cuts)
        np.testing.assert_allclose(logits, full(config, params, idx)[:, stop - 1], atol=3e-6)
        keep = stop - min(back, steps_back(config, SLOTS, SLACK, stop), stop)
        idx = np.concatenate([idx[:, :keep], ids(config, ROWS, LENGTH, seed + 100)], axis=1)[:, :LENGTH]
        end = min(keep + 2, LENGTH - 1)
        wanted = full(config, params, idx)
        logits, cache = in_parts(config, params, idx, replace(cache, pos=cache.pos * 0 + keep), keep, end, cuts)
        np.testing.assert_allclose(logits, wanted[:, end - 1], atol=3e-6)
        logits, _ = extended(config)[1](params, idx[:, end], cache, np.ones(ROWS, bool))
        np.testing.assert_allclose(logits, wanted[:, end], atol=3e-6)


def test_one_step_back_too_many_would_be_wrong():
    """`steps_back` is exact: one more and a key that the window needs is gone."""
    params, idx = filled(TINY), ids(TINY, ROWS, LENGTH)
    most = steps_back(TINY, SLOTS, SLACK, 20)
    assert most == SLACK + 1 and steps_back(TINY, SLOTS, SLACK, 9) == 9
    _, cache = in_parts(TINY, params, idx, gpt.init_cache(TINY, ROWS, SLOTS, slack=SLACK), 0, 20, [])
    for back, right in ((most, True), (most + 1, False)):
        keep = 20 - back
        logits, _ = in_parts(TINY, params, idx, replace(cache, pos=cache.pos * 0 + keep), keep, keep + 1, [])
        assert np.allclose(logits, full(TINY, params, idx)[:, keep], atol=3e-6) == right


def test_rows_that_are_not_alive_keep_every_bit():
    params, idx = filled(TINY), ids(TINY, ROWS, LENGTH)
    _, cache = in_parts(TINY, params, idx, gpt.init_cache(TINY, ROWS, SLOTS), 0, 12, [])
    alive = np.array([True, False] * 3)
    _, after = extended(TINY)[1](params, idx[:, 12], cache, alive)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        changed = np.array([not np.array_equal(a, b) for a, b in zip(old, new, strict=True)])
        assert changed.tolist() == alive.tolist()


def test_nothing_is_written_past_the_end():
    params = filled(TINY)
    idx = ids(TINY, ROWS, SLOTS + 2)
    _, cache = in_parts(TINY, params, idx, gpt.init_cache(TINY, ROWS, SLOTS), 0, SLOTS, [])
    assert cache.pos.tolist() == [SLOTS] * ROWS
    _, after = extended(TINY)[1](params, idx[:, SLOTS], cache, np.ones(ROWS, bool))
    assert all(np.array_equal(a, b) for a, b in zip(cache.k + cache.v, after.k + after.v, strict=True))


def test_a_span_above_the_longest_row_changes_nothing():
    config = replace(TINY, n_layer=1)
    rng, idx, pos = np.random.default_rng(0), ids(config, 3, 1), np.array([10, 0, 4])
    cache = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), gpt.init_cache(config, 3, SLOTS))
    params = filled(config)
    decode = jax.jit(lambda cache, span: gpt.decode(config, params, idx[:, 0], cache, span=span)[0], static_argnums=1)
    cache = replace(cache, pos=pos)
    np.testing.assert_allclose(decode(cache, 11), decode(cache, None), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_of_a_row_are_exact(dtype):
    for config, length, slack in ((TINY, 24, 0), (OLD, 24, 2), (TINY, 5, 0), (CONFIGS["one kv head"], 40, 7)):
        cache = jax.eval_shape(lambda c=config, n=length, s=slack: gpt.init_cache(c, 3, n, dtype, s))
        sizes = row_bytes(config, length, dtype, slack)
        assert 3 * sizes["total"] == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        assert sizes["total"] == sizes["full"] + sizes["window"] + sizes["state"]


@given(st.integers(0, 9), st.integers(0, 12), st.sampled_from([1, 5, 8]))
@settings(max_examples=40, deadline=None)
@example(9, 12, 5)
def test_slots_hold_the_newest_positions(pos, new, count):
    cache = replace(gpt.init_cache(replace(TINY, n_layer=1), 1, count), pos=np.array([pos]))
    position = lambda start, n: np.arange(start, start + n, dtype=np.float32)[None, None, :, None]  # noqa: E731
    old = np.full((1, 2, count, 8), -1, np.float32)
    for p in range(pos):
        old[:, :, p % count] = p
    values = np.broadcast_to(position(pos, 14), (1, 2, 14, 8))  # at least two of padding
    stored = jax.jit(store_chunk, static_argnums=1)(
        replace(cache, k=(old,), v=(old,)), 0, values, values, np.array([new])
    )
    stored = stored.k[0]
    expected = np.full(count, -1)
    for p in range(pos + new):
        expected[p % count] = p
    assert stored[0, 0, :, 0].tolist() == expected.tolist()
    places = np.asarray(held(np.array([pos + new]), count))[0]
    assert np.where(places < 0, -1, places).tolist() == expected.tolist()


def test_a_row_is_taken_out_and_put_back():
    cache = gpt.init_cache(TINY, 3, 5)
    one = jax.tree.map(lambda leaf: leaf + 1, take_row(cache, 1))
    cache = put_row(cache, 1, one)
    for leaf in jax.tree.leaves(cache):
        assert leaf[1].min() == 1 and not leaf[0].any() and not leaf[2].any()
