"""The tiles of splash attention: always valid, never the library's 128 where more fits, and what the rule prefers."""

from __future__ import annotations

import numpy as np
import pytest
from exact import seen
from hypothesis import example, given
from hypothesis import strategies as st

from nanochat_lib.errors import UserError
from nanochat_lib.kernels.tiles import LARGEST, describe, padded, tiles, visible

chips = st.sampled_from(["v6e", "v5e", "v5p", "v4", "", "v9"])


@given(chips, st.integers(1, 256), st.integers(1, 40_000), st.integers(0, 50_000))
@example("v6e", 128, 1408, 1408)  # eleven times 128
@example("v6e", 128, 128 * 121, 512)
def test_tiles_are_valid_and_never_the_librarys(chip, head_dim, length, window):
    size = tiles(chip, head_dim, length, window)
    assert length <= size.length and (length > 128 or size.length == 128)
    blocks = (size.block_q, size.block_kv, size.block_q_dkv, size.block_kv_dkv)
    computes = (size.block_kv_compute, size.block_kv_dkv_compute)
    assert all(block % 128 == 0 and size.length % block == 0 for block in blocks)
    assert size.block_kv % size.block_kv_compute == 0 == size.block_kv_dkv % size.block_kv_dkv_compute
    assert all(compute % 128 == 0 for compute in computes)
    largest = max(block for block, _ in LARGEST.values())
    assert all(min(256, size.length) <= block <= largest for block in blocks)
    assert size.use_fused_bwd_kernel


@given(st.integers(1, 40_000))
def test_padding_is_small_and_absent_where_the_length_fits(length):
    total = padded(length)
    assert total - length < 256 or total - length < 0.2 * length
    if length % 256 == 0:
        assert total == length
    assert padded(length, 128) == -(-length // 128) * 128  # a chip that takes one tile only


@pytest.mark.parametrize(
    ("length", "window", "block", "compute"),
    [
        (2048, 2048, 1024, 512),
        (2048, 2047, 1024, 512),
        (2048, 512, 512, 256),
        (1024, 1024, 1024, 512),
        (512, 512, 512, 256),
        (256, 128, 256, 256),
        (4096, 4096, 1024, 512),
    ],
)
@pytest.mark.parametrize("chip", ["v6e", "v5e"])
def test_the_choice_at_the_lengths_that_are_trained(chip, length, window, block, compute):
    size = tiles(chip, 128, length, window)
    assert (size.length, size.block_q, size.block_kv, size.block_kv_compute) == (length, block, block, compute)


@pytest.mark.parametrize(
    ("length", "block", "window"), [(2048, 512, 512), (2048, 1024, 5000), (1024, 128, 0), (768, 128, 130)]
)
def test_visible_tiles_are_counted_from_the_mask(length, block, window):
    n = length // block
    mask = seen(length, length, window).reshape(n, block, n, block)
    assert visible(length, block, window) == np.count_nonzero(mask.any(axis=(1, 3)))


def test_an_unknown_chip_gets_what_fits_every_chip():
    assert tiles("v9", 128, 2048, 2048) == tiles("", 128, 2048, 2048)
    assert tiles("v9", 128, 2048, 2048).block_q == min(block for (_, d), (block, _) in LARGEST.items() if d == 128)


def test_what_the_report_shows():
    assert describe("v6e", 128, 2048, (512, 512, 512, 2048)) == {
        "window 512": "tiles 512 × 512, computed by 256; 7 of 16 are visible",
        "window 2048": "tiles 1024 × 1024, computed by 512; 3 of 4 are visible",
    }


@pytest.mark.parametrize(("head_dim", "length", "window"), [(257, 128, 1), (128, 0, 1), (128, 128, -1)])
def test_impossible_sizes_are_user_errors(head_dim, length, window):
    with pytest.raises(UserError, match=f"head size {head_dim} .* length {length}, window {window}"):
        tiles("v6e", head_dim, length, window)
