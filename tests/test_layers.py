"""Parameters: names, shapes, initial distributions, and the way between the module and the flat dict."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import LENGTH, ROWS, TINY, filled, forward, gradient, ids

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.layers import linear, relu_squared
from nanochat_lib.sizing import GPTConfig


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


def test_relu_squared_keeps_its_input_and_no_mask():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 7)), jnp.float32).at[0, 0].set(0.0)
    plain = lambda x: jnp.square(jax.nn.relu(x))  # noqa: E731
    assert np.array_equal(relu_squared(x), plain(x))
    assert np.array_equal(jax.grad(lambda x: relu_squared(x).sum())(x), jax.grad(lambda x: plain(x).sum())(x))
    kept = [leaf.dtype for leaf in jax.tree.leaves(jax.vjp(relu_squared, x)[1])]
    assert kept == [jnp.float32]


@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 7), (2, 1, 7), (1, 3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_single_row_gives_what_a_matrix_of_rows_does(shape, dtype):
    rng = np.random.default_rng(0)
    weight, x, dy = (rng.standard_normal(s).astype(np.float32) for s in ((5, 7), shape, (*shape[:-1], 5)))
    y, back = jax.vjp(linear, jnp.asarray(x, dtype), jnp.asarray(weight))
    assert y.shape == dy.shape and y.dtype == dtype
    dx, dw = back(jnp.asarray(dy, dtype))
    assert dw.dtype == jnp.float32
    expected = x @ weight.T, dy @ weight, dy.reshape(-1, 5).T @ x.reshape(-1, 7)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.1
    for got, wanted in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=tolerance)
