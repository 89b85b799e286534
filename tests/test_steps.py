"""The decode steps of one compiled call: the same numbers as one `gpt.decode` after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors

from nanochat_lib import gpt
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.steps import Steps


@dataclass(frozen=True)
class Windowed(GPTConfig):
    @property
    def windows(self) -> tuple[int, ...]:
        return 3, 40, self.sequence_len


@pytest.mark.parametrize(("rows", "recipe"), [(1, "recipe4"), (4, "head")])
def test_steps_equal_single_decodes(rows: int, recipe: str) -> None:
    """Rings smaller than the steps of a call, grouped heads, rows at different places, one empty, one that ends."""
    config = Windowed(64, 300, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, recipe=recipe)
    params = {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}
    rng, count = np.random.default_rng(rows), 12
    lengths = np.array([30, 0, 7, 21], np.int32)[:rows]
    cache = gpt.init_cache(config, rows, 64, "float32", 2)
    prompts = rng.integers(0, 300, (rows, 32)).astype(np.int32)
    _, cache = jax.jit(gpt.prefill, static_argnums=0)(config, params, prompts, np.maximum(lengths, 1), cache)
    cache = replace(cache, pos=jnp.asarray(lengths))  # the second row holds nothing, whatever is in its slots
    tokens = rng.integers(0, 300, (count, rows)).astype(np.int32)
    alive = np.ones((count, rows), bool)
    alive[5:, 2:3] = False

    @jax.jit
    def one_by_one(cache):
        def advance(cache, now):
            logits, cache = gpt.decode(config, params, now[0], cache, alive=now[1], span=48)
            return cache, logits

        return jax.lax.scan(advance, cache, (tokens, alive))

    @jax.jit
    def together(cache):
        steps = Steps(config, params, cache, dtype="float32", span=30, size=16)  # no more than is held

        def advance(recent, now):
            logits, recent = steps.step(recent, *now)
            return recent, logits

        recent, seen = jax.lax.scan(advance, steps.recent, (tokens, alive))
        return steps.cache(recent), seen

    (after, expected), (stored, seen) = one_by_one(cache), together(cache)
    np.testing.assert_allclose(seen[alive], expected[alive], rtol=0, atol=3e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-5), stored, after)
