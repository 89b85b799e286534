"""Sizes against nanochat's own figures, and FLOPs against a count by hand and by the compiler."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.sizing import (
    GPTConfig,
    count_params,
    flops_per_token,
    horizon,
    scaling_params,
    transfer_scales,
    width_from_depth,
)


def from_depth(depth: int, recipe: str = "head") -> GPTConfig:
    n_embd, n_head = width_from_depth(depth)
    return GPTConfig(n_layer=depth, n_head=n_head, n_kv_head=n_head, n_embd=n_embd, recipe=recipe)


# depth: C, H, wte = lm_head, value_embeds, transformer_matrices, scalars, total, scaling parameters, FLOPs/token
SIZES = {
    4: (256, 2, 8388608, 16777216, 3145776, 34, 36700242, 11534384, 8.021650e7),
    6: (384, 3, 12582912, 37748736, 10616940, 38, 73531538, 23199852, 1.675108e8),
    8: (512, 4, 16777216, 67108864, 25166016, 42, 125829354, 41943232, 2.956997e8),
    10: (640, 5, 20971520, 104857600, 49152300, 46, 195952986, 70123820, 4.954541e8),
    12: (768, 6, 25165824, 150994944, 84935088, 50, 286261730, 110100912, 7.596960e8),
    16: (1024, 8, 33554432, 268435456, 201327360, 58, 536871738, 234881792, 1.585452e9),
    20: (1280, 10, 41943040, 419430400, 393217200, 66, 896533746, 435160240, 2.886213e9),
    24: (1536, 12, 50331648, 603979776, 679478976, 74, 1384122122, 729810624, 4.775226e9),
    26: (1664, 13, 54525952, 708837376, 863897580, 78, 1681786938, 918423532, 5.991051e9),
    32: (2048, 16, 67108864, 1073741824, 1610615808, 90, 2818575450, 1677724672, 1.077099e10),
    34: (2176, 17, 71303168, 1212153856, 1931873676, 94, 3286633962, 2003176844, 1.283459e10),
}  # fmt: skip

# depth: tokens, batch, steps, learning-rate scale, decay scale, total FLOPs at ratio 12
HORIZONS = {
    4: (138412608, 262144, 528, 0.707107, 6.749654, 1.1103e16),
    6: (278398224, 262144, 1062, 0.707107, 3.355759, 4.6634e16),
    8: (503318784, 262144, 1920, 0.707107, 1.856154, 1.4883e17),
    10: (841485840, 524288, 1605, 1, 1.570093, 4.1692e17),
    12: (1321210944, 524288, 2520, 1, 1, 1.0037e18),
    14: (1970805648, 524288, 3759, 1, 0.670391, 2.2241e18),
    16: (2818581504, 524288, 5376, 1, 0.468750, 4.4687e18),
    18: (3892850064, 1048576, 3712, 1.414214, 0.479976, 8.4852e18),
    20: (5221922880, 1048576, 4980, 1.414214, 0.357813, 1.5072e19),
    22: (6834111504, 1048576, 6517, 1.414214, 0.273404, 2.5715e19),
    24: (8757727488, 1048576, 8352, 1.414214, 0.213352, 4.1820e19),
    26: (11021082384, 1048576, 10510, 1.414214, 0.169536, 6.6025e19),
    32: (20132696064, 2097152, 9600, 2, 0.131250, 2.1685e20),
}  # fmt: skip


@pytest.mark.parametrize("depth", SIZES)
def test_sizes_of_every_depth(depth):
    config = from_depth(depth)
    groups = count_params(config)
    assert groups["wte"] == groups["lm_head"]
    found = (
        config.n_embd, config.n_head, groups["wte"], groups["value_embeds"], groups["transformer_matrices"],
        groups["scalars"], groups["total"], scaling_params(config),
    )  # fmt: skip
    assert found == SIZES[depth][:-1]
    assert flops_per_token(config) == pytest.approx(SIZES[depth][-1], rel=1e-6)


@pytest.mark.parametrize("depth", HORIZONS)
def test_horizon_of_every_depth(depth):
    config = from_depth(depth)
    found = horizon(config, from_depth(12), 12.0)
    tokens, batch, steps, lr_scale, decay_scale, flops = HORIZONS[depth]
    assert (found.tokens, found.batch_tokens, found.steps) == (tokens, batch, steps)
    assert found.lr_scale == pytest.approx(lr_scale, rel=1e-6)
    assert found.decay_scale == pytest.approx(decay_scale, rel=5e-6)
    assert flops_per_token(config) * found.batch_tokens * found.steps == pytest.approx(flops, rel=1e-4)


def test_published_runs():
    """The speedrun (d24, ratio 8), recipe 4 (d24, ratio 9.5) and its run 3 (d26, ratio 8.25)."""
    speedrun = horizon(from_depth(24), from_depth(12), 8.0)
    assert (speedrun.tokens, speedrun.batch_tokens, speedrun.steps) == (5838484992, 1048576, 5568)
    old = horizon(from_depth(24, "recipe4"), from_depth(12, "recipe4"), 9.5)
    assert (old.tokens, old.batch_tokens, old.steps) == (6933228288, 1048576, 6612)
    assert horizon(from_depth(26, "recipe4"), from_depth(12, "recipe4"), 8.25).steps == 7226


def test_the_batch_doubles_where_tokens_to_the_power_0_383_say():
    """Rounded to a power of two, so each depth alone says little about the exponent: a step of 1 % each side of √2."""
    threshold = scaling_params(from_depth(12)) * 2 ** (0.5 / 0.383)
    for factor, batch in ((0.99, 2**19), (1.01, 2**20)):
        vocab = round((factor * threshold - count_params(from_depth(12))["transformer_matrices"]) / 768)
        wide = replace(from_depth(12), vocab_size=vocab)
        assert horizon(wide, from_depth(12), 12.0).batch_tokens == batch
    # nanochat's own range of each batch
    batches = {depth: horizon(from_depth(depth), from_depth(12), 8.0).batch_tokens for depth in range(8, 52, 2)}
    ranges = {2**18: [8], 2**19: [10, 12, 14, 16], 2**20: [18, 20, 22, 24, 26], 2**21: [*range(32, 52, 2)]}
    for batch, depths in ranges.items():
        assert {batches[depth] for depth in depths} == {batch}


def test_explicit_steps_and_batch_win_but_the_transfer_still_applies():
    found = horizon(from_depth(6), from_depth(12), 12.0, steps=100, batch_tokens=131072)
    assert (found.steps, found.batch_tokens) == (100, 131072)
    assert found.lr_scale == 0.5
    assert found.decay_scale == pytest.approx(0.5 * 1321210944 / 278398224)


def test_transfer_keeps_batch_over_rate_decay_tokens():
    for batch, tokens in ((2**17, 3e9), (2**19, 1e9), (2**22, 7e10)):
        rate, decay = transfer_scales(batch, tokens, 1e9)
        assert rate**2 == pytest.approx(batch / 2**19)
        assert batch / (rate * decay * tokens) == pytest.approx(2**19 / 1e9)


def test_recipe_4_counts():
    groups = count_params(from_depth(24, "recipe4"))
    assert (groups["transformer_matrices"], groups["scalars"], groups["total"]) == (679481856, 48, 1384124976)
    assert scaling_params(from_depth(24, "recipe4")) == 729813504
    assert flops_per_token(from_depth(24, "recipe4")) == pytest.approx(4.945112e9, rel=1e-6)
    assert count_params(from_depth(12, "recipe4"))["total"] == 286262424
    assert flops_per_token(from_depth(12, "recipe4")) == pytest.approx(8.021676e8, rel=1e-6)
    assert scaling_params(from_depth(26, "recipe4")) == 918426912


@pytest.mark.parametrize("recipe", ["head", "recipe4"])
def test_counts_of_the_small_model_equal_its_parameters(recipe):
    config = vectors.config(recipe)
    assert count_params(config) == vectors.PARAMETER_GROUPS[recipe]
    assert flops_per_token(config) == vectors.FLOPS_PER_TOKEN[recipe]
    shapes = gpt.param_shapes(config)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count_params(config)["total"]
    blocks = {name: shape for name, shape in shapes.items() if name.startswith("transformer.h.")}
    assert sum(int(np.prod(shape)) for shape in blocks.values()) == count_params(config)["transformer_matrices"]


def test_flops_of_one_layer_by_hand():
    """Multiply-add = 2; backward twice the forward; every weight once a token, every visible key twice a channel."""
    config = GPTConfig(sequence_len=8, vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, window_pattern="L")
    forward = 2 * (
        32 * 32  # c_q
        + 2 * 16 * 32  # c_k and c_v, one head of 16 each
        + 32 * 32  # attention's c_proj
        + 2 * 4 * 32 * 32  # MLP
        + 12  # value-embedding gate of the one key/value head
        + 24  # smear gate
        + 64 * 32  # head
        + 2 * 8 * 32  # scores and average over at most 8 keys, 32 channels each
    )
    assert flops_per_token(config) == 3 * forward


def test_flops_agree_with_the_compiler():
    """XLA counts the causal half of the window as full and adds elementwise work: within 15 % on one layer."""
    config = GPTConfig(sequence_len=64, vocab_size=256, n_layer=1, n_head=2, n_kv_head=2, n_embd=64, window_pattern="L")
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gpt.param_shapes(config).items()}
    lowered = jax.jit(lambda p, idx: gpt.apply(config, p, idx)).lower(shapes, jax.ShapeDtypeStruct((2, 64), jnp.int32))
    counted = lowered.compile().cost_analysis()["flops"] / (2 * 64)
    assert counted == pytest.approx(flops_per_token(config) / 3, rel=0.15)


@pytest.mark.parametrize(
    ("length", "short"),
    [(128, 128), (256, 128), (512, 128), (513, 256), (640, 256), (1024, 256), (1536, 384), (2048, 512), (4096, 1024)],
)
def test_windows(length, short):
    config = GPTConfig(sequence_len=length, n_layer=6, window_pattern="ssSL")
    assert config.windows == (short, short, short, length, short, length)
    old = GPTConfig(sequence_len=length, n_layer=4, window_pattern="S", recipe="recipe4")
    assert old.windows == (length // 2,) * 3 + (length,)


def test_vocabulary_padding_and_value_embedding_layers():
    sizes = {1: 64, 64: 64, 65: 128, 300: 320, 32768: 32768, 50257: 50304}
    assert {size: GPTConfig(vocab_size=size).padded_vocab_size for size in sizes} == sizes
    assert GPTConfig(n_layer=4).value_embedding_layers == (1, 3)
    assert GPTConfig(n_layer=5).value_embedding_layers == (0, 2, 4)
    assert GPTConfig(n_layer=1).value_embedding_layers == (0,)


def test_odd_depths_are_rounded_up_to_whole_heads():
    assert width_from_depth(11) == (768, 6)
    assert width_from_depth(24) == (1536, 12)
    assert width_from_depth(6, 64, 64) == (384, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 5}, "n_embd 768 is not a multiple of n_head 5"),
        ({"n_head": 256}, "head size 3 is odd"),
        ({"n_kv_head": 4}, "n_head 6 is not a multiple of n_kv_head 4"),
        ({"n_layer": 0}, "n_layer is 0, must be at least 1"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"n_embd": 12}, "n_embd 12 is below 24"),
        ({"window_pattern": "SXL"}, "'SXL' may hold only the letters S and L"),
        ({"window_pattern": ""}, "may hold only the letters S and L"),
        ({"recipe": "recipe5"}, "recipe 'recipe5' is unknown"),
    ],
)
def test_impossible_shapes_are_user_errors(change, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**change)


def test_dict_round_trip_and_nanochats_seven_keys():
    config = vectors.config("recipe4")
    assert GPTConfig.from_dict(config.to_dict()) == config
    seven = {
        "sequence_len": 256, "vocab_size": 300, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64,
        "window_pattern": "SSSL",
    }  # fmt: skip
    assert GPTConfig.from_dict(seven) == vectors.config("head")
    with pytest.raises(UserError, match="unknown keys rope"):
        GPTConfig.from_dict(seven | {"rope": 1})
