"""Cross-entropy of next-token prediction, in nats and float32. A target of -1 is ignored.

`cross_entropy` reads logits; `head_cross_entropy` starts at the hidden states and holds at most a chunk of the logits.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from nanochat_lib.errors import UserError

IGNORED = -1
LARGEST_CAP = 35.0  # Logits then differ by 70 at most, and V · e^70 is far below the largest float32.


def token_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] for every position: (B, T, V), (B, T) → (B, T) float32, 0 where ignored.

    The target is replaced before it is used as an index: -1 would silently read the last class.
    """
    logits = logits.astype(jnp.float32)
    valid = targets >= 0
    picked = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)


def nats_and_bytes(nll: jax.Array, targets: jax.Array, token_bytes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the nll over targets that stand for text, bytes of these targets): bits per byte = nats / (ln 2 · bytes).

    nll and targets (B, T), token_bytes (V,) int32: bytes behind each token, 0 for special ones, which count in neither
    sum. Nor do ignored targets. Float32 and int32 scalars.
    """
    valid = targets >= 0
    sizes = jnp.where(valid, token_bytes[jnp.where(valid, targets, 0)], 0)
    return jnp.sum(jnp.where(sizes > 0, nll, 0.0)), jnp.sum(sizes, dtype=jnp.int32)


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sum of the nll over positions with a target, times `weights` (B, T) if given; number of such positions).

    Float32 and int32 scalars. The caller divides, so that micro-batches and devices can first add up both.
    """
    nll = token_nll(logits, targets)
    total = jnp.sum(nll if weights is None else nll * weights)
    return total, jnp.sum(targets >= 0, dtype=jnp.int32)


def head_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    cap: float,
    vocab_size: int,
    chunks: int = 1,
    scale: jax.Array | float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` of cap · tanh(x Wᵀ / cap), with the head's product inside: (weighted nll sum · scale, count).

    x (B, T, C) or (N, C) in the compute dtype; weight (Vp, C), cast to that dtype, of which the first `vocab_size`
    rows are the vocabulary (the rest is never read and gets a gradient of exactly zero); targets and `weights` like x
    without C. Float32 and int32 scalars; logits come out of the product in float32. Differentiable in x, weight,
    `weights` and `scale`, once and in reverse mode; the weight's gradient is summed in float32 and has its dtype.

    The last axis of targets is cut into `chunks` pieces (padded with ignored targets where it does not divide), so a
    batch sharded over B stays so. The gradient is made together with the loss, one chunk after the other: no product
    is repeated, and no more than (N / chunks, Vp) logits exist at a time. Put a factor that multiplies the result
    into `scale`: there it costs nothing, outside it costs a pass over the weight's gradient.
    Raises UserError for shapes that do not fit, chunks below 1 and caps outside of 0 … 35.
    """
    shapes = {targets.shape} if weights is None else {targets.shape, weights.shape}
    if x.ndim not in (2, 3) or shapes != {x.shape[:-1]}:
        raise UserError(f"loss: x {x.shape}, targets and weights {sorted(shapes)}; need (B, T, C) and (B, T)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or not 0 < vocab_size <= weight.shape[0]:
        raise UserError(f"loss: head {weight.shape}; need at least {vocab_size} rows of {x.shape[-1]} channels")
    if chunks < 1 or not 0 < cap <= LARGEST_CAP:
        raise UserError(f"loss: {chunks} chunks, soft cap {cap}; need chunks ≥ 1 and 0 < cap ≤ {LARGEST_CAP:g}")
    factors = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    if scale is not None:
        factors = factors * scale
    if x.ndim == 2:
        x, targets, factors = x[None], targets[None], factors[None]
    total = _head_nll((cap, vocab_size, chunks), x, weight, targets, jnp.where(targets >= 0, factors, 0.0))
    return total, jnp.sum(targets >= 0, dtype=jnp.int32)


Static = tuple[float, int, int]  # cap, vocab_size, chunks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_nll(static: Static, x: jax.Array, weight: jax.Array, targets: jax.Array, factors: jax.Array) -> jax.Array:
    """Σ factors · nll of x (B, T, C), weight (Vp, C), targets and factors (B, T)."""
    (nll,), _ = _over_chunks(static, False, x, weight, targets, factors)
    return jnp.sum(nll * factors)


def _head_forward(
    static: Static, x: jax.Array, weight: jax.Array, targets: jax.Array, factors: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The loss and already its gradients, because they read the same logits and those are gone after each chunk."""
    (nll, dx), dtable = _over_chunks(static, True, x, weight, targets, factors)
    return jnp.sum(nll * factors), (dx, dtable.T.astype(weight.dtype), nll)


def _head_backward(static: Static, saved: tuple[jax.Array, ...], g: jax.Array) -> tuple:
    dx, dweight, nll = ((leaf * g).astype(leaf.dtype) for leaf in saved)  # no work where g is a constant 1
    return dx, dweight, None, nll


_head_nll.defvjp(_head_forward, _head_backward)


def _over_chunks(
    static: Static, gradients: bool, x: jax.Array, weight: jax.Array, targets: jax.Array, factors: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """((nll (B, T), and dx (B, T, C) with `gradients`), the table's gradient (C, Vp) float32 or zeros ())."""
    _, vocab_size, chunks = static
    length = targets.shape[1]
    step = -(-length // min(chunks, max(length, 1)))
    table = weight.astype(x.dtype)
    if vocab_size < table.shape[0]:
        table = jnp.where(jnp.arange(table.shape[0])[:, None] < vocab_size, table, 0)

    def split(a: jax.Array, fill: int = 0) -> jax.Array:
        """(B, T, …) → (chunks, B, step, …)."""
        a = jnp.pad(a, ((0, 0), (0, -length % step), *[(0, 0)] * (a.ndim - 2)), constant_values=fill)
        return jnp.moveaxis(a.reshape(a.shape[0], -1, step, *a.shape[2:]), 1, 0)

    def join(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]

    def body(dtable: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        rows = [a.reshape(-1, *a.shape[2:]) for a in part]
        made, more = _chunk(static, gradients, table, *rows)
        return dtable + more, tuple(a.reshape(*part[1].shape, *a.shape[1:]) for a in made)

    parts = split(x), split(targets, IGNORED), split(factors)
    start = jnp.zeros((x.shape[-1], table.shape[0]) if gradients else (), jnp.float32)
    if parts[0].shape[0] == 1:
        dtable, made = body(start, tuple(a[0] for a in parts))
        made = tuple(a[None] for a in made)
    else:
        dtable, made = jax.lax.scan(body, start, parts)
    return tuple(join(a) for a in made), dtable


def _chunk(
    static: Static, gradients: bool, table: jax.Array, x: jax.Array, targets: jax.Array, factors: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array | float]:
    """One chunk: x (n, C), table (Vp, C), targets and factors (n,); n counts rows and tokens together.

    With t = tanh(x Wᵀ / cap), e = exp(cap · (t - t[target])) and s = Σ e over the vocabulary: nll = log s and
    d nll / d (x Wᵀ) = (e / s - onehot(target)) · (1 - t²). Measured from the target's logit instead of the largest,
    the softmax needs no pass over the logits for a maximum (the cap bounds e), and a small nll keeps its digits.
    """
    cap, vocab_size, _ = static
    raw = jax.lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    valid, column = targets >= 0, jax.lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    picked = jnp.where(valid, targets, 0)[:, None]
    if x.dtype == jnp.bfloat16:
        # From the table's row and not out of raw, so that a compiler may sum e while the product still makes raw.
        row = table[picked[:, 0]].astype(jnp.float32)
        own = jnp.sum(x.astype(jnp.float32) * row, axis=-1, keepdims=True)
    else:  # The very number that stands in raw: e is then exactly 1 there, and a gradient near zero keeps its digits.
        own = jnp.take_along_axis(raw, picked, axis=1)
    own = jnp.where(targets[:, None] < vocab_size, own, jnp.nan)  # a target beyond the vocabulary must show
    t = jnp.tanh(raw / cap)
    e = jnp.exp(cap * t - cap * jnp.tanh(own / cap))
    if vocab_size < table.shape[0]:
        e = jnp.where(column < vocab_size, e, 0.0)
    s = jnp.sum(e, axis=-1)
    nll = jnp.where(valid, jnp.log(s), 0.0)
    if not gradients:
        return (nll,), 0.0
    onehot = jnp.where(column == targets[:, None], factors[:, None], 0.0)
    d = ((e * (factors / s)[:, None] - onehot) * (1 - t * t)).astype(x.dtype)
    # Both products read d: without the barrier a compiler may compute it in each of them from float32 logits.
    d = jax.lax.optimization_barrier(d)
    # As in layers.linear, the product that does not transpose the wide operand.
    return (nll, d @ table), jax.lax.dot_general(x, d, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
