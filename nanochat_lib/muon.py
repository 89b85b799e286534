"""Muon: momentum whose update is made (nearly) orthogonal, with the refinements nanochat uses.

Muon (Jordan et al. 2024), Polar Express (Amsel et al. 2025, arXiv:2505.16932), NorMuon (Li et al. 2025,
arXiv:2510.05491), cautious weight decay (Chen et al. 2025, arXiv:2510.12402); row equilibration (MuonEq) and the final
rescaling (Muon+) as in nanochat. All functions work on a stack (K, R, N) of K equally shaped matrices, weights
[out, in], so that a model needs one iteration per shape instead of one per matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nanochat_lib.errors import UserError

Coefficients = tuple[tuple[float, float, float], ...]

# Five steps with safety factor 0.02 and cushion 2: singular values end within 0.86 … 1.14.
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5  # the original Muon

HUGE = 1e6  # entries above this are scaled down first, because their squares could overflow


@dataclass(frozen=True)
class MuonOptions:
    """Which refinements are on. All off and NEWTON_SCHULZ gives the original Muon."""

    nesterov: bool = True
    equilibrate: bool = True  # MuonEq: rows of equal norm before the iteration
    coefficients: Coefficients = POLAR_EXPRESS
    margin: float = 1.01  # the iteration starts from a Frobenius norm of 1/margin
    rescale: bool = True  # Muon+: Frobenius norm √min(R, N) after the iteration
    normalise: bool = True  # NorMuon: even out the size of the rows (columns of wide matrices)
    beta2: float = 0.9  # of NorMuon's running variance
    cautious: bool = True  # decay only where update and weight have the same sign
    dtype: Any = jnp.float32  # of the iteration
    keep_dtype: bool = False  # stay in `dtype` after the iteration (recipe 4) instead of going back to float32


HEAD = MuonOptions()
RECIPE4 = MuonOptions(equilibrate=False, margin=1.02, rescale=False, beta2=0.95, dtype=jnp.bfloat16, keep_dtype=True)


def nesterov(grads: jax.Array, buffer: jax.Array, momentum: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """(update, new buffer): the running mean of the gradients, M ← μ M + (1−μ) G, and μ M + (1−μ) G once more.

    Written as a weighted mean: unlike M + (1−μ)(G − M) it cannot overflow.
    """
    buffer = momentum * buffer + (1 - momentum) * grads
    return momentum * buffer + (1 - momentum) * grads, buffer


def frobenius(x: jax.Array) -> jax.Array:
    """Frobenius norm of each matrix, float32 (K, 1, 1)."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))


def equilibrate_rows(x: jax.Array) -> jax.Array:
    """Give every row of (K, R, N) the same norm, keeping the Frobenius norm: X_i · (‖X‖_F / √R) / ‖X_i‖."""
    wide = x.astype(jnp.float32)
    rows = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    factor = frobenius(x) / x.shape[-2] ** 0.5 / jnp.maximum(rows, 1e-6)
    return x * factor.astype(x.dtype)


def polynomial_step(x: jax.Array, a: float, b: float, c: float) -> jax.Array:
    """a X + b (X Xᵀ) X + c (X Xᵀ)² X of each X in (K, R, N): a singular value s becomes a s + b s³ + c s⁵.

    The products are made on the smaller side, since (X Xᵀ) X = X (Xᵀ X).
    """
    tall = x.shape[-2] > x.shape[-1]
    gram = x.mT @ x if tall else x @ x.mT
    polynomial = b * gram + c * (gram @ gram)
    return a * x + (x @ polynomial if tall else polynomial @ x)


def polar_express(x: jax.Array, coefficients: Coefficients = POLAR_EXPRESS, margin: float = 1.01) -> jax.Array:
    """The orthogonal factor U Vᵀ of each X = U S Vᵀ in (K, R, N), approximately, in X's dtype.

    One `polynomial_step` for each triple of coefficients, from a Frobenius norm of 1/margin.
    """
    x = x / (frobenius(x) * margin + 1e-6).astype(x.dtype)
    for a, b, c in coefficients:
        x = polynomial_step(x, a, b, c)
    return x


def normalise_variance(u: jax.Array, second: jax.Array, beta2: float) -> tuple[jax.Array, jax.Array]:
    """NorMuon: divide by the running root mean square of each row (column if wide), keeping the Frobenius norm.

    `second` is the running mean square, (K, R, 1) if R ≥ N else (K, 1, N). Returns the new update and state.
    """
    axis = -1 if u.shape[-2] >= u.shape[-1] else -2
    size = u.shape[axis]
    square = jnp.mean(jnp.square(u.astype(jnp.float32)), axis=axis, keepdims=True)
    second = second + (1 - beta2) * (square - second)
    inverse = jax.lax.rsqrt(jnp.maximum(second, 1e-10))
    total = lambda q: jnp.sqrt(size * jnp.sum(q, axis=(-2, -1), keepdims=True))  # noqa: E731
    factor = inverse * total(square) / jnp.maximum(total(square * inverse * inverse), 1e-10)
    return u * factor.astype(u.dtype), second


def descend(
    u: jax.Array, params: jax.Array, lr: jax.Array | float, weight_decay: jax.Array | float, cautious: bool = True
) -> jax.Array:
    """What to add to `params`: −η u − η λ params, float32; η and λ are rounded to u's dtype.

    Cautious: the decay leaves alone every weight whose update has the other sign, that is, would make it larger.
    """
    rate = jnp.asarray(lr, u.dtype)
    decay = rate * jnp.asarray(weight_decay, u.dtype)
    agree = u.astype(jnp.float32) * params >= 0
    decayed = jnp.where(agree, params, 0.0) if cautious else params
    return -((rate * u).astype(jnp.float32) + decay.astype(jnp.float32) * decayed)


class StackState(NamedTuple):
    """Float32 state of one stack: momentum (K, R, N) and NorMuon's second moment (K, R, 1) or (K, 1, N)."""

    momentum: jax.Array
    second: jax.Array


def init_stack(count: int, shape: tuple[int, ...]) -> StackState:
    """Zero state for `count` matrices of `shape` (R, N). Raises UserError for anything that is not a matrix."""
    if len(shape) != 2:
        raise UserError(f"Muon needs whole matrices, got a parameter of shape {shape}; give it to AdamW")
    rows, columns = shape
    second = (count, rows, 1) if rows >= columns else (count, 1, columns)
    return StackState(jnp.zeros((count, rows, columns), jnp.float32), jnp.zeros(second, jnp.float32))


def update_stack(
    grads: jax.Array,
    params: jax.Array,
    state: StackState,
    lr: jax.Array | float,
    momentum: jax.Array | float,
    weight_decay: jax.Array | float,
    options: MuonOptions = HEAD,
) -> tuple[jax.Array, StackState]:
    """One Muon step on stacks (K, R, N): what to add to `params`, float32, and the new state.

    `lr` is multiplied by √max(1, R/N), so that tall matrices move as far per input. The update's Frobenius norm is
    lr·√min(R, N) (before decay). A zero gradient history gives a zero update, and decay alone acts.
    """
    rows, columns = grads.shape[-2:]
    grads, params = grads.astype(jnp.float32), params.astype(jnp.float32)
    ahead, buffer = nesterov(grads, state.momentum, momentum)
    u = ahead if options.nesterov else buffer
    u = u / jnp.maximum(jnp.max(jnp.abs(u), axis=(-2, -1), keepdims=True) / HUGE, 1.0)
    u = u.astype(options.dtype)
    if options.equilibrate:
        u = equilibrate_rows(u)
    u = polar_express(u, options.coefficients, options.margin)
    if not options.keep_dtype:
        u = u.astype(jnp.float32)
    if options.rescale:
        u = u * (min(rows, columns) ** 0.5 / jnp.maximum(frobenius(u), 1e-6)).astype(u.dtype)
    second = state.second
    if options.normalise:
        u, second = normalise_variance(u, second, options.beta2)
    rate = lr * max(1.0, rows / columns) ** 0.5
    return descend(u, params, rate, weight_decay, options.cautious), StackState(buffer, second)


def shape_key(shape: Sequence[int]) -> str:
    """The name of a stack, e.g. "512x128"."""
    return f"{shape[-2]}x{shape[-1]}"


def stack_matrices(leaves: Sequence[jax.Array]) -> jax.Array:
    """(R, N) and (L, R, N) leaves of one shape as a single stack (K, R, N)."""
    return jnp.concatenate([leaf if leaf.ndim == 3 else leaf[None] for leaf in leaves])


def muon(
    learning_rate: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    options: MuonOptions = HEAD,
) -> optax.GradientTransformationExtraArgs:
    """Muon for any tree whose leaves are matrices (R, N) or stacks of matrices (L, R, N), as an optax transformation.

    `update(grads, state, params, *, lr=1.0, momentum=…, weight_decay=…)`: `lr` is a factor on `learning_rate`, the
    others replace the constructor's values; all may be traced. The state is {"RxN": StackState}. None leaves are
    passed over. Raises UserError for leaves of any other rank and when `params` is missing.
    """

    def groups(tree: Any) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, leaf in enumerate(jax.tree.leaves(tree)):
            if leaf.ndim not in (2, 3):
                raise UserError(f"Muon needs whole matrices, got a parameter of shape {leaf.shape}; give it to AdamW")
            found.setdefault(shape_key(leaf.shape), []).append(i)
        return found

    def init(params: Any) -> dict[str, StackState]:
        leaves = jax.tree.leaves(params)
        state = {}
        for key, members in groups(params).items():
            count = sum(leaves[i].shape[0] if leaves[i].ndim == 3 else 1 for i in members)
            state[key] = init_stack(count, leaves[members[0]].shape[-2:])
        return state

    def update(
        grads: Any,
        state: dict[str, StackState],
        params: Any = None,
        *,
        lr: jax.Array | float = 1.0,
        momentum: jax.Array | float = momentum,
        weight_decay: jax.Array | float = weight_decay,
        **extra: Any,
    ) -> tuple[Any, dict[str, StackState]]:
        if params is None:
            raise UserError("Muon's update needs the parameters, for the weight decay: update(grads, state, params)")
        leaves, structure = jax.tree.flatten(grads)
        weights = structure.flatten_up_to(params)
        updates, new_state = list(leaves), {}
        for key, members in groups(grads).items():
            stacked = [stack_matrices([tree[i] for i in members]) for tree in (leaves, weights)]
            delta, new_state[key] = update_stack(
                *stacked, state[key], lr * learning_rate, momentum, weight_decay, options
            )  # fmt: skip
            start = 0
            for i in members:
                size = leaves[i].shape[0] if leaves[i].ndim == 3 else 1
                updates[i] = delta[start : start + size].reshape(leaves[i].shape)
                start += size
        return structure.unflatten(updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)
