"""Cross-entropy of next-token prediction, in nats and float32. A target of -1 is ignored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

IGNORED = -1


def token_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] for every position: (B, T, V), (B, T) → (B, T) float32, 0 where ignored.

    The target is replaced before it is used as an index: -1 would silently read the last class.
    """
    logits = logits.astype(jnp.float32)
    valid = targets >= 0
    picked = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sum of the nll over positions with a target, times `weights` (B, T) if given; number of such positions).

    Float32 and int32 scalars. The caller divides, so that micro-batches and devices can first add up both.
    """
    nll = token_nll(logits, targets)
    total = jnp.sum(nll if weights is None else nll * weights)
    return total, jnp.sum(targets >= 0, dtype=jnp.int32)
