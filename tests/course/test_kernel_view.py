"""The viewer of Pallas kernels: what it records is what runs, and its counts are those made by hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat_lib.course import kernel_picture
from nanochat_lib.course.kernel_view import budget, cost, fetches, padded, record
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS
from nanochat_lib.kernels.flash import KEY, QUERY, Band, flash_attention

V6E = next(chip for chip in CHIPS if chip.name == "v6e")


def trace_kernel(table, x_ref, out_ref):
    out_ref[...] = x_ref[...]


def visited(x, order):
    """The blocks of x (4, 3) in the order of `order`, one for each step of the grid (2, steps/2)."""
    steps = len(order) // 2
    return pl.pallas_call(
        trace_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, steps),
            in_specs=[pl.BlockSpec((1, 1), lambda i, j, table: (table[i * steps + j] // 3, table[i * steps + j] % 3))],
            out_specs=pl.BlockSpec((1, 1), lambda i, j, table: (0, i * steps + j)),
        ),
        out_shape=jax.ShapeDtypeStruct((1, len(order)), x.dtype),
        interpret=True,
    )(np.asarray(order, np.int32), x)


def test_the_recorded_blocks_are_those_that_the_kernel_reads():
    order = np.random.default_rng(0).integers(0, 12, 10)
    x = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    call = record(visited, x, order=order)[0]
    source, out = call.operands
    ran = np.asarray(visited(x, order))[0]
    np.testing.assert_array_equal(np.asarray(x)[tuple(source.visits.T)], ran)
    np.testing.assert_array_equal(out.visits[:, 1], np.arange(10))
    assert call.grid == (2, 5) and call.places.tolist() == [[i, j] for i in range(2) for j in range(5)]
    assert (source.output, out.output) == (False, True) and (source.name, out.name) == ("x", "out")


def sum_kernel(x_ref, y_ref, acc_ref):
    @pl.when(pl.program_id(1) == 0)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...] @ x_ref[...]

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def end():
        y_ref[...] = acc_ref[...]


def squares(x):
    return pl.pallas_call(
        sum_kernel, jax.ShapeDtypeStruct((8, 4), x.dtype), grid=(2, 3),
        in_specs=[pl.BlockSpec((4, 4), lambda i, j: (i, j))], out_specs=pl.BlockSpec((4, 4), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((4, 4), jnp.float32)],
    )(x)  # fmt: skip


def test_counts_of_a_small_kernel_by_hand():
    call = record(squares, jax.ShapeDtypeStruct((8, 12), jnp.float32))[0]
    x, y = call.operands
    assert (x.block, x.blocks, x.block_bytes, x.bytes, x.moved) == ((4, 4), (2, 3), 64, 384, 6 * 64)
    assert (y.copies.tolist(), y.moved) == ([False, False, True] * 2, 2 * 64)
    assert call.products == ((4, 4, 4),) and call.scratch_bytes == 64
    assert call.vmem_bytes == 2 * (64 + 64) + 64
    found = cost(call, V6E)
    assert (found.steps, found.hbm_bytes, found.flops) == (6, 512, 6 * 128)
    assert found.padded_flops == 6 * 2 * 8 * 256 * 256
    assert found.seconds == found.padded_flops / 918e12 and found.memory_s == 512 / 1.64e12
    floor, score = budget(call, V6E, useful_flops=6 * 128)
    assert floor == 512 / 1.64e12 and score == pytest.approx(100 * floor / found.seconds)


def sometimes_kernel(x_ref, y_ref):
    @pl.when(pl.program_id(0) == 1)
    def product():
        y_ref[...] = x_ref[...] @ x_ref[...]


def test_a_product_under_a_condition_counts():
    def sometimes(x):
        return pl.pallas_call(sometimes_kernel, jax.ShapeDtypeStruct((4, 4), x.dtype), grid=(2,))(x)

    call = record(sometimes, jax.ShapeDtypeStruct((4, 4), jnp.float32))[0]
    assert call.products == ((4, 4, 4),)
    assert [one.moved for one in call.operands] == [64, 64]  # no blocks are given: the whole array, once


def test_a_block_is_copied_unless_the_step_before_had_it():
    visits = np.random.default_rng(1).integers(0, 2, (40, 3))
    brute = [i == 0 or visits[i].tolist() != visits[i - 1].tolist() for i in range(40)]
    assert fetches(visits).tolist() == brute


@pytest.mark.parametrize(
    ("sizes", "unit", "spent"),
    [((512, 128, 512), 128, 512 * 128 * 512), ((512, 128, 512), 256, 512 * 256 * 512), ((4, 4, 4), 128, 8 * 128 * 128)],
)
def test_padding_of_the_matrix_unit(sizes, unit, spent):
    assert padded(sizes, unit) == spent


def attention_calls(kv_heads: int, tile: int, window: int):
    def all_of_it(q, k, v):
        y, pull = jax.vjp(partial(flash_attention, window=window, block_q=tile, block_kv=tile), q, k, v)
        return pull(y)

    q, k = (jax.ShapeDtypeStruct((1, heads, 1024, 64), jnp.bfloat16) for heads in (4, kv_heads))
    return record(all_of_it, q, k, k)


def test_flash_attention_is_seen_as_its_own_tables_say():
    forward, dq, dkv = attention_calls(2, 256, 300)
    band = Band(1024, 1024, 300, 256, 256)
    assert [call.name for call in (forward, dq, dkv)] == ["forward_kernel", "dq_kernel", "dkv_kernel"]
    assert [len(call.products) for call in (forward, dq, dkv)] == [2, 3, 4]
    queries, keys = band.steps(QUERY)[:2]
    one_head = slice(0, len(queries))
    np.testing.assert_array_equal(forward.operands[0].visits[one_head, 3], queries)
    np.testing.assert_array_equal(forward.operands[1].visits[one_head, 2], keys)
    np.testing.assert_array_equal(dkv.operands[1].visits[: 2 * len(keys) : 2, 2], band.steps(KEY)[1])
    # Heads that share keys: the forward kernel copies a key block for each head, dk/dv once.
    assert dkv.operands[1].moved == dkv.operands[1].bytes
    assert forward.operands[1].moved > 1.5 * forward.operands[1].bytes


def test_the_patch_goes_away_and_no_kernel_is_an_error():
    before = pl.pallas_call
    with pytest.raises(UserError, match="makes no pallas_call"):
        record(jnp.sin, jnp.ones(3))
    with pytest.raises(ZeroDivisionError):
        record(lambda x: 1 // 0, jnp.ones(3))
    assert pl.pallas_call is before


def test_pictures():
    call = record(squares, jax.ShapeDtypeStruct((8, 12), jnp.float32))[0]
    x, y = call.operands
    states = kernel_picture
    assert states.states(x, 4).tolist() == [[states.BEFORE] * 3, [states.BEFORE, states.COPIED, states.UNTOUCHED]]
    assert states.states(y, 4).tolist() == [[states.BEFORE, states.HELD]]
    assert states.states(y, 5).tolist() == [[states.BEFORE, states.WRITTEN]]
    for step in (-1, 0, 99):
        figure = kernel_picture.draw_step(call, step, V6E, 768)
        assert len(figure.axes) == 4
    assert len(kernel_picture.draw_step(call, 0).axes) == 3
    assert kernel_picture.size_of(2**20 * 2.5) == "2.5 MiB"
