"""Our own flash kernel, run as plain JAX: against float64, and that hidden blocks are neither loaded nor computed."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import draw, exact, largest_errors, seen, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.kernels.flash import FIRST, KEY, LAST, QUERY, Band, flash_attention, visible_blocks


def kernel(window: int, block_q: int, block_kv: int):
    return with_gradients(partial(flash_attention, window=window, block_q=block_q, block_kv=block_kv, interpret=True))


def check(b, h, kv_heads, tq, tk, d, window, block_q, block_kv, seed):
    q, k, v, dy = draw(seed, b, h, kv_heads, tq, tk, d)
    y, *gradients = largest_errors(kernel(window, block_q, block_kv)(q, k, v, dy), exact(q, k, v, window, dy))
    assert y < 1e-5 and max(gradients) < 1e-4


shapes = {
    "b": st.integers(1, 2),
    "heads": st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    "tq": st.integers(1, 60),
    "extra": st.sampled_from([0, 0, 0, -3, 20]),
    "d": st.sampled_from([4, 8, 16]),
    "window": st.integers(0, 64),
    "block_q": st.sampled_from([8, 16, 24]),
    "block_kv": st.sampled_from([8, 16, 24]),
    "seed": st.integers(0, 2**31),
}


def random_shape(b, heads, tq, extra, d, window, block_q, block_kv, seed):
    check(b, *heads, tq, max(1, tq + extra), d, window, block_q, block_kv, seed)


test_random_shapes = settings(max_examples=7, deadline=None)(given(**shapes)(random_shape))
test_many_random_shapes = pytest.mark.slow(settings(max_examples=150, deadline=None)(given(**shapes)(random_shape)))


@pytest.mark.parametrize("extra", [-3, 0, 20])
def test_lengths_that_are_no_whole_blocks(extra):
    """The last queries and keys are padded; with 20 more keys than queries the first key blocks are seen by nobody."""
    check(1, 4, 2, 37, 37 + extra, 8, window=6, block_q=16, block_kv=8, seed=extra + 9)


def test_bfloat16_is_summed_in_float32():
    """With q = 0 the output is the mean of the values so far: only its own rounding may show, at most 2⁻⁸ of it."""
    q, k, v, dy = draw(3, 1, 1, 1, 300, 300, 8, jnp.bfloat16)
    q = np.zeros_like(q)
    ours, expected = kernel(300, 16, 16)(q, k, v, dy), exact(q, k, v, 300, dy)
    assert all(a.dtype == jnp.bfloat16 for a in ours)
    assert (np.abs(np.asarray(ours[0], np.float64) - expected[0]) <= 1.01 * 2.0**-8 * np.abs(expected[0])).all()
    assert max(largest_errors(ours, expected)) < 1e-2


def test_blocks_outside_of_the_window_are_not_read():
    """NaN in what no query of a block sees: any load would spread it, since 0 · NaN is NaN."""
    q, k, v, dy = draw(4, 1, 1, 1, 64, 64, 8)
    expected = exact(q, k, v, 8, dy)
    f = kernel(8, 16, 16)
    for poisoned in (k, v):
        poisoned[:, :, :16] = np.nan  # seen by queries 0 … 23, so by the first two blocks
    dy[:, :, :32] = 0
    y, dq, dk, dv = (np.asarray(a) for a in f(q, k, v, dy))
    assert largest_errors([y[:, :, 32:]], [expected[0][:, :, 32:]])[0] < 1e-5
    assert largest_errors([dq[:, :, 32:]], [expected[1][:, :, 32:]])[0] < 1e-4
    assert np.isnan(y[:, :, :24]).all()
    q[:, :, 48:], dy[:, :, 48:] = np.nan, np.nan  # see keys from 40 on
    _, _, dk, dv = (np.asarray(a) for a in f(q, *draw(4, 1, 1, 1, 64, 64, 8)[1:3], dy))
    assert np.isfinite(dk[:, :, :32]).all() and np.isfinite(dv[:, :, :32]).all()
    assert np.isnan(dk[:, :, 48:]).all()


bands = st.builds(
    Band, st.integers(1, 70), st.integers(1, 70), st.integers(0, 80), st.sampled_from([8, 16, 24]),
    st.sampled_from([8, 16, 24]),
)  # fmt: skip


@settings(max_examples=100)
@given(bands)
def test_the_grid_is_the_list_of_visible_blocks(band):
    mask = seen(band.tq, band.tk, band.window)
    rows, columns = -(-band.tq // band.block_q), -(-band.tk // band.block_kv)
    visible = np.zeros((rows, columns), bool)
    for i in range(rows):
        for j in range(columns):
            block = mask[i * band.block_q : (i + 1) * band.block_q, j * band.block_kv : (j + 1) * band.block_kv]
            visible[i, j] = block.any()
    np.testing.assert_array_equal(visible_blocks(band.tq, band.tk, band.window, band.block_q, band.block_kv), visible)
    for run, blocks in ((QUERY, visible), (KEY, visible.T)):
        steps = band.steps(run)
        pairs = list(zip(*steps[[run, 1 - run]], strict=True))
        wanted = {(i, j) for i, row in enumerate(blocks) for j, any_of_it in enumerate(row) if any_of_it}
        # One step for a block that sees nothing, so that zeros are written for it.
        wanted |= {(i, 0) for i, row in enumerate(blocks) if not row.any()}
        assert pairs == sorted(wanted)
        for position, (i, _) in enumerate(pairs):
            assert steps[FIRST, position] == (position == 0 or pairs[position - 1][0] != i)
            assert steps[LAST, position] == (position == len(pairs) - 1 or pairs[position + 1][0] != i)


def grids(program) -> list[tuple[int, ...]]:
    """The grids of all Pallas calls in a jaxpr, those inside of other calls included."""
    found = []
    for equation in program.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(tuple(equation.params["grid_mapping"].grid))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += grids(inner) if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call" else []
    return found


def test_what_runs_is_the_list():
    """Length 2048, window 512, blocks of 512: 7 of 16 pairs, in the forward and in both backward kernels."""
    q, k = (jax.ShapeDtypeStruct((2, heads, 2048, 128), jnp.bfloat16) for heads in (6, 3))
    f = with_gradients(partial(flash_attention, window=512))
    assert grids(jax.make_jaxpr(f)(q, k, k, q).jaxpr) == [(2, 3, 2, 7), (2, 3, 2, 7), (2, 3, 7, 2)]


def test_it_runs_under_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v, dy = draw(6, 2, 2, 1, 20, 20, 8)
    spec = jax.sharding.PartitionSpec("data")
    local = partial(flash_attention, window=5, block_q=8, block_kv=8, interpret=True)
    f = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    assert max(largest_errors(with_gradients(f)(q, k, v, dy), exact(q, k, v, 5, dy))) < 1e-5
