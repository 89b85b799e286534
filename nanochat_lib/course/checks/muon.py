"""Public checks, hints, quizzes and predictions of chapter 05: Muon."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import optim, sizing
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    budget,
    example,
    prop,
    reference,
    sign,
    suspect,
)  # fmt: skip
from nanochat_lib.muon import (
    POLAR_EXPRESS,
    descend,
    equilibrate_rows,
    frobenius,
    nesterov,
    normalise_variance,
    polynomial_step,
)  # fmt: skip


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0, dtype: object = jnp.float32) -> jax.Array:
    return jnp.asarray(scale * rng.standard_normal(shape), dtype)


def ragged(rng: np.random.Generator, *shape: int, dtype: object = jnp.float32) -> jax.Array:
    """Random matrices whose rows and columns differ much in size, as those of a gradient do."""
    rows = 10.0 ** rng.uniform(-1.5, 0.5, (*shape[:-1], 1))
    columns = 10.0 ** rng.uniform(-1.0, 0.0, (*shape[:-2], 1, shape[-1]))
    return jnp.asarray(rows * columns * rng.standard_normal(shape), dtype)


def unit(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Random matrices of Frobenius norm 1: no singular value is above 1."""
    x = rng.standard_normal(shape)
    return jnp.asarray(x / np.linalg.norm(x, axis=(-2, -1), keepdims=True), jnp.float32)


def zero_row(x: jax.Array, row: int) -> jax.Array:
    return jnp.asarray(np.where(np.arange(x.shape[-2])[:, None] == row, 0.0, np.asarray(x)), x.dtype)


# ---- the whole update: U Vᵀ


def orthogonal(x: jax.Array) -> jax.Array:
    """U Vᵀ as X (Xᵀ X)^-½, through the eigenvalues of the small square in float64; for matrices of full rank."""
    wide = np.asarray(x, np.float64)
    tall = wide if wide.shape[-2] >= wide.shape[-1] else np.swapaxes(wide, -2, -1)
    values, vectors = np.linalg.eigh(np.swapaxes(tall, -2, -1) @ tall)
    result = tall @ ((vectors / np.sqrt(values)[..., None, :]) @ np.swapaxes(vectors, -2, -1))
    return jnp.asarray(result if tall is wide else np.swapaxes(result, -2, -1), jnp.float32)


def right_angles(out: jax.Array, x: jax.Array) -> str:
    out, shape = np.asarray(out, np.float64), np.shape(x)
    if out.shape != shape:
        return f"the shape is {out.shape}, the matrix has {shape}"
    gram = out.T @ out if shape[0] >= shape[1] else out @ out.T
    off = np.abs(gram - np.eye(min(shape))).max()
    return "" if off < 1e-4 else f"the short sides are not orthonormal: their products are off by {off:.3g}"


def same_directions(out: jax.Array, x: jax.Array) -> str:
    """With O = U Vᵀ the product X Oᵀ = U S Uᵀ is symmetric and has no negative eigenvalue."""
    out, x = np.asarray(out, np.float64), np.asarray(x, np.float64)
    product = x @ out.T if x.shape[0] <= x.shape[1] else out.T @ x
    off = np.abs(product - product.T).max() / np.abs(product).max()
    if off > 1e-3 or np.linalg.eigvalsh(product).min() < 0:
        return "right angles, but other directions than those of the matrix"
    return ""


def turned(got: jax.Array, want: object, x: jax.Array) -> bool:
    return not right_angles(got, x) and bool(same_directions(got, x))


def spectra(x: jax.Array, names: dict[str, jax.Array]) -> str:
    line = lambda y: "  ".join(f"{value:.3f}" for value in np.linalg.svd(np.asarray(y), compute_uv=False))  # noqa: E731
    return "\n".join(f"{name:>22}: {line(y)}" for name, y in {"singular values of X": x, **names}.items())


def orthogonal_output() -> str:
    x = ragged(np.random.default_rng(5), 6, 4)
    return spectra(x, {"of the right result": orthogonal(x)})


# ---- momentum


def nesterov_output() -> str:
    buffer, lines = jnp.zeros(()), ["gradients 1, 1, 1, 0, 0, 0 with momentum 0.5:"]
    for gradient in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0):
        update, buffer = nesterov(jnp.float32(gradient), buffer, 0.5)
        lines.append(f"gradient {gradient:.0f}   buffer {float(buffer):.4f}   update {float(update):.4f}")
    return "\n".join(lines)


def summed(grads: jax.Array, buffer: jax.Array, momentum: float) -> tuple:
    """The classical form: a sum, which grows to 1/(1−μ) gradients."""
    total = nesterov(grads, buffer / (1 - momentum), momentum)[1] * 1.0
    total = total + momentum * grads  # (1−μ) G became G
    return grads + momentum * total, total


# ---- one step of the iteration

TRIPLE = POLAR_EXPRESS[1]
LONG_SIDE = "the numbers are right, the FLOPs are not: of a tall matrix Xᵀ X is the small square"


def scalar_polynomial(s: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    return a * s + b * s**3 + c * s**5


def values_mapped(out: jax.Array, x: jax.Array, a: float, b: float, c: float) -> str:
    got = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
    want = np.sort(np.abs(scalar_polynomial(np.linalg.svd(np.asarray(x, np.float64), compute_uv=False), a, b, c)))
    off = np.abs(np.sort(got) - want).max()
    return "" if off < 1e-4 else f"a singular value is off by {off:.3g} from a·s + b·s³ + c·s⁵"


def elementwise(x: jax.Array, a: float, b: float, c: float) -> jax.Array:
    return a * x + b * x**3 + c * x**5


def gram_entries(x: jax.Array, a: float, b: float, c: float) -> jax.Array:
    """(X Xᵀ)² made entry by entry."""
    right, plain = polynomial_step(x, a, b, c), polynomial_step(x, a, b, 0.0)
    short = polynomial_steps(x, a, b, c)["gram"]
    wrong = c * short * short
    return plain + (x @ wrong if x.shape[-2] > x.shape[-1] else wrong @ x) + 0 * right


def polynomial_steps(x: jax.Array, a: float, b: float, c: float) -> dict:
    """The gram matrix of the short side and the factor b·gram + c·gram²."""
    sides = "...ki,...kj->...ij" if x.shape[-2] > x.shape[-1] else "...ik,...jk->...ij"
    gram = jnp.einsum(sides, x, x, precision="highest")
    return {"gram": gram, "polynomial": polynomial_step(gram, b, 0.0, 0.0) + c * jnp.linalg.matrix_power(gram, 2)}


def polynomial_output() -> str:
    x = unit(np.random.default_rng(3), 5, 3)
    return spectra(x, {"after one right step": polynomial_step(x, *TRIPLE)})


# ---- rows, variance, decay


def equal_rows(out: jax.Array, x: jax.Array) -> str:
    rows = np.linalg.norm(np.asarray(out, np.float64), axis=-1)
    spread = float((rows.max(-1) / rows.min(-1)).max())
    if spread > 1.001:
        return f"the longest row is {spread:.3g} times the shortest"
    before, after = (np.linalg.norm(np.asarray(y, np.float64), axis=(-2, -1)) for y in (x, out))
    return "" if np.allclose(before, after, rtol=1e-3) else "the Frobenius norm has changed"


def with_rows(x: jax.Array, size: float, axis: int = -1) -> jax.Array:
    """Rows (columns for axis −2) of length size."""
    return x * (size / jnp.linalg.norm(x, axis=axis, keepdims=True))


def rows_output() -> str:
    x = ragged(np.random.default_rng(7), 5, 3)
    line = lambda y: "  ".join(f"{v:.3f}" for v in np.linalg.norm(np.asarray(y), axis=-1))  # noqa: E731
    return f"row norms before: {line(x)}\nrow norms after:  {line(equilibrate_rows(x))}"


def variance_arguments(rng: np.random.Generator, *shape: int, dtype: object = jnp.float32) -> tuple:
    rows, columns = shape[-2:]
    second = (*shape[:-2], rows, 1) if rows >= columns else (*shape[:-2], 1, columns)
    return ragged(rng, *shape, dtype=dtype), jnp.asarray(rng.uniform(0.01, 0.3, second), jnp.float32), 0.9


def refit(out: jax.Array, u: jax.Array) -> jax.Array:
    return out * (frobenius(u) / frobenius(out))


def not_refitted(u: jax.Array, second: jax.Array, beta2: float) -> tuple:
    new = normalise_variance(u, second, beta2)[1]
    return u / new**0.5, new


def by_square(u: jax.Array, second: jax.Array, beta2: float) -> tuple:
    new = normalise_variance(u, second, beta2)[1]
    return refit(u / new, u), new


def by_old(u: jax.Array, second: jax.Array, beta2: float) -> tuple:
    return refit(u / second**0.5, u), normalise_variance(u, second, beta2)[1]


def swapped_beta(u: jax.Array, second: jax.Array, beta2: float) -> tuple:
    return normalise_variance(u, second, 1 - beta2)


def variance_steps(u: jax.Array, second: jax.Array, beta2: float) -> dict:
    """Right intermediates: mean squares of this u (an average without memory), the new average, its inverse root."""
    new = normalise_variance(u, second, beta2)[1]
    return {"square": normalise_variance(u, second, 0.0)[1], "second": new, "inverse": new**-0.5}


def variance_output() -> str:
    u = ragged(np.random.default_rng(9), 5, 3)
    second, lines = jnp.zeros((5, 1)), []
    for step in range(3):
        out, second = normalise_variance(u, second, 0.9)
        rows = "  ".join(f"{v:.3f}" for v in np.linalg.norm(np.asarray(out), axis=-1))
        lines.append(f"call {step + 1} with the same u: row norms {rows}   whole {float(frobenius(out)[0, 0]):.3f}")
    before = "  ".join(f"{v:.3f}" for v in np.linalg.norm(np.asarray(u), axis=-1))
    return "\n".join([f"u itself:                 row norms {before}   whole {float(frobenius(u)[0, 0]):.3f}", *lines])


def keeps_norm(out: tuple, u: jax.Array, second: jax.Array, beta2: float) -> str:
    before, after = float(frobenius(u).max()), float(frobenius(out[0]).max())
    return "" if abs(after / before - 1) < 1e-3 else f"the Frobenius norm was {before:.4g} and is {after:.4g}"


def descend_arguments(rng: np.random.Generator, cautious: bool, *shape: int) -> tuple:
    return normal(rng, *shape), normal(rng, *shape), 0.1, 0.5, cautious


U = jnp.asarray([[1.0, 1.0, -1.0, 0.0]])
P = jnp.asarray([[2.0, -2.0, -2.0, 2.0]])


def growing_only(u: jax.Array, params: jax.Array, lr: float, weight_decay: float, cautious: bool = True) -> jax.Array:
    everywhere, right = (descend(u, params, lr, weight_decay, on) for on in (False, True))
    return descend(u, params, lr, 0.0) + everywhere - right


def never_cautious(u: jax.Array, params: jax.Array, lr: float, weight_decay: float, cautious: bool = True) -> jax.Array:
    return descend(u, params, lr, weight_decay, False)


def always_cautious(
    u: jax.Array, params: jax.Array, lr: float, weight_decay: float, cautious: bool = True
) -> jax.Array:
    return descend(u, params, lr, weight_decay, True)


def rate_forgotten(u: jax.Array, params: jax.Array, lr: float, weight_decay: float, cautious: bool = True) -> jax.Array:
    decay = descend(0 * u, jnp.where(u == 0, 0, params), 1.0, weight_decay, False)
    kept = decay if not cautious else jnp.where(jnp.sign(u) == -jnp.sign(params), 0.0, decay)
    return descend(u, params, lr, 0.0) + kept


def zeros_left_alone(got: jax.Array, want: jax.Array, u: jax.Array, params: jax.Array, *rest: object) -> bool:
    still = np.asarray(u) == 0
    return bool(still.any() and (np.asarray(got)[still] == 0).all() and (np.asarray(want)[still] != 0).any())


def descend_output() -> str:
    out = descend(U, P, 0.1, 0.5)
    lines = ["      u       p   what is added (lr 0.1, decay 0.5)"]
    lines += [f"{float(u):7.1f} {float(p):7.1f} {float(o):8.3f}" for u, p, o in zip(U[0], P[0], out[0], strict=True)]
    return "\n".join(lines)


# ---- routing, transfer, cost

NAMES = {
    "transformer.wte.weight": "wte",
    "lm_head.weight": "lm_head",
    "transformer.h.0.attn.c_q.weight": "muon",
    "transformer.h.11.mlp.c_fc.weight": "muon",
    "transformer.h.3.mlp.c_proj.weight": "muon",
    "transformer.h.1.attn.ve_gate.weight": "muon",
    "value_embeds.1.weight": "value_embeds",
    "resid_lambdas": "resid_lambdas",
    "x0_lambdas": "x0_lambdas",
    "smear_gate.weight": "smear",
    "smear_lambda": "smear",
    "backout_lambda": "smear",
}


def routed(call: object, names: tuple[str, ...]) -> dict[str, str]:
    return {name: call(name) for name in names}


def routing_output() -> str:
    return "\n".join(f"{name:<38} {optim.group_of(name)}" for name in NAMES)


def transfer_output() -> str:
    lines = ["batch (tokens)   length ×   rates ×   decay ×"]
    for batch in (2**17, 2**19, 2**21):
        for length in (1.0, 4.0):
            rate, decay = sizing.transfer_scales(batch, length * 1e9, 1e9)
            lines.append(f"{batch:>14,} {length:>10.0f} {rate:>9.3f} {decay:>9.3f}")
    return "\n".join(lines)


def batch_of(rng: np.random.Generator) -> tuple:
    return int(2 ** rng.integers(14, 23)), float(rng.uniform(1e9, 1e11)), float(rng.uniform(1e9, 1e10))


def orthogonal_flops(rows: int, columns: int, steps: int = 5) -> int:
    """4 m² M for the two products with the long side M, 2 m³ for the square of the gram matrix, in every step."""
    short = min(rows, columns)
    return steps * short**2 * (4 * max(rows, columns) + 2 * short)


def counted_flops(rows: int, columns: int, steps: int = 5) -> float:
    """What the compiler counts in the library's iteration, sums and scalings included."""
    x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    run = jax.jit(lambda x: muon_steps(x, steps))
    return float(run.lower(x).compile().cost_analysis()["flops"])


def muon_steps(x: jax.Array, steps: int) -> jax.Array:
    for _ in range(steps):
        x = polynomial_step(x, *TRIPLE)
    return x


def near_compiler(out: int, rows: int, columns: int, steps: int) -> str:
    counted = counted_flops(rows, columns, steps)
    return "" if 0.9 < out / counted < 1.02 else f"the compiler counts {counted:,.0f}, you {out:,.0f}"


def flops_output() -> str:
    shapes = ((64, 64), (256, 64), (64, 256), (3072, 12288))
    return "\n".join(f"{r:>5} × {c:<6} {orthogonal_flops(r, c):>22,} FLOPs in 5 steps" for r, c in shapes)


EXERCISES = [
    Exercise(
        "muon.orthogonal",
        cases=[
            example(
                "a diagonal matrix",
                lambda: (jnp.asarray([[5.0, 0.0, 0.0], [0.0, -0.1, 0.0]], jnp.float32),),
                np.asarray([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]], np.float32),
            ),
            prop("right angles, tall", lambda rng: (normal(rng, 7, 4),), right_angles),
            prop("its own directions, square", lambda rng: (normal(rng, 5, 5),), same_directions),
            reference("a stack", lambda rng: (normal(rng, 2, 7, 4),), against=orthogonal, rtol=1e-3),
        ],
        causes=[
            suspect("these are the signs of the entries; the directions of a matrix are in its SVD", jnp.sign),
            suspect("only the length was changed: all singular values must become 1", lambda x: x / frobenius(x)),
            sign("right angles, but turned: jnp.linalg.svd gives V already transposed", turned),
        ],
        hints=[
            "In which of the three factors of U S Vᵀ do the lengths live? Leave that one out.",
            "jnp.linalg.svd with full_matrices=False gives U, the singular values, and Vᵀ (not V), for stacks as well.",
            orthogonal_output,
        ],
        fallback=orthogonal,
    ),
    Exercise(
        "muon.nesterov",
        cases=[
            example(
                "from an empty buffer",
                lambda: (jnp.asarray([4.0, -2.0]), jnp.zeros(2), 0.5),
                (np.float32([3.0, -1.5]), np.float32([2.0, -1.0])),
            ),
            reference("random", lambda rng: (normal(rng, 3, 4), normal(rng, 3, 4), 0.9)),
            prop(
                "a constant gradient stays what it is",
                lambda rng: (g := normal(rng, 3), g, 0.95),
                lambda out, g, buffer, momentum: (
                    "" if np.allclose(out[0], g, rtol=1e-5) else "the mean of equal gradients is not that gradient"
                ),
            ),
        ],
        causes=[
            suspect("that is a sum of gradients; here the buffer is a mean, with weight 1 − μ for the new one", summed),
            suspect(
                "the buffer itself is the update: Nesterov goes a step ahead and mixes the gradient in once more",
                lambda g, m, mu: (nesterov(g, m, mu)[1],) * 2,
            ),
            suspect("the two results are swapped: the update comes first", lambda g, m, mu: nesterov(g, m, mu)[::-1]),
            suspect(
                "μ weighs the past and 1 − μ the new gradient, not the other way round",
                lambda g, m, mu: nesterov(g, m, 1 - mu),
            ),
        ],
        hints=[
            "Two weighted means, one after the other. Which of the two is kept for the next step?",
            "The second mean is made of the *new* buffer and the gradient, with the same two weights.",
            nesterov_output,
        ],
    ),
    Exercise(
        "muon.polynomial_step",
        cases=[
            example(
                "singular values 0.5 and 1",
                lambda: (jnp.asarray([[0.5, 0.0], [0.0, 1.0], [0.0, 0.0]]), 2.0, -1.5, 0.5),
                np.float32([[0.828125, 0.0], [0.0, 1.0], [0.0, 0.0]]),
            ),
            prop("the singular values follow the polynomial", lambda rng: (unit(rng, 4, 7), *TRIPLE), values_mapped),
            reference("a stack of tall ones", lambda rng: (unit(rng, 3, 7, 4), *TRIPLE)),
            budget("the short side", lambda rng: (unit(rng, 96, 8), *TRIPLE), flops_ratio=1.3, why=LONG_SIDE),
        ],
        causes=[
            suspect("powers of the entries; the powers here are matrix products (@)", elementwise),
            suspect("the square of the gram matrix was taken entry by entry: gram @ gram", gram_entries),
            suspect("the term a·X is missing", lambda x, a, b, c: polynomial_step(x, 0.0, b, c)),
            suspect("the fifth power is missing", lambda x, a, b, c: polynomial_step(x, a, b, 0.0)),
        ],
        steps=polynomial_steps,
        hints=[
            "Make the gram matrix of the short side once and use it for both powers.",
            "Tall: gram = Xᵀ X and the factor stands on the right of X. Wide: gram = X Xᵀ and it stands on the left. "
            ".mT transposes each matrix of a stack.",
            polynomial_output,
        ],
    ),
    Exercise(
        "muon.equilibrate_rows",
        cases=[
            example(
                "two rows",
                lambda: (jnp.asarray([[3.0, 4.0, 0.0], [0.0, 0.0, 12.0]]),),
                np.float32([[5.5154330, 7.3539105, 0.0], [0.0, 0.0, 9.1923882]]),
            ),
            prop("equal rows, the same whole", lambda rng: (ragged(rng, 6, 3),), equal_rows),
            reference("a row of zeros", lambda rng: (zero_row(ragged(rng, 6, 3), 2),)),
            reference("bfloat16 stays bfloat16", lambda rng: (ragged(rng, 3, 5, dtype=jnp.bfloat16),), dtype=True),
        ],
        causes=[
            suspect("those are the columns", lambda x: with_rows(x, frobenius(x) / x.shape[-1] ** 0.5, -2)),
            suspect(
                "each row has the whole matrix's norm: R rows share it, so divide by √R",
                lambda x: with_rows(x, frobenius(x)),
            ),
            suspect(
                "the norm is shared among the R rows, not the N columns",
                lambda x: with_rows(x, frobenius(x) / x.shape[-1] ** 0.5),
            ),
            suspect("the rows have length 1, so the Frobenius norm has changed", lambda x: with_rows(x, 1.0)),
            sign(
                "a row of zeros has norm 0: keep the divisor at 1e-6 or more",
                lambda got, want, x: bool(jnp.isnan(got).any()),
            ),
        ],
        hints=[
            "R rows of equal norm n have together the Frobenius norm √R · n. Solve for n.",
            "Multiply each row by ‖X‖_F / √R / its own norm (keepdims=True, at least 1e-6), and give back x's dtype.",
            rows_output,
        ],
    ),
    Exercise(
        "muon.normalise_variance",
        cases=[
            prop("the Frobenius norm stays", lambda rng: variance_arguments(rng, 6, 4), keeps_norm),
            reference("tall", lambda rng: variance_arguments(rng, 6, 4)),
            reference("a stack of wide ones", lambda rng: variance_arguments(rng, 2, 3, 5)),
            reference(
                "no history and a row of zeros", lambda rng: (zero_row(normal(rng, 6, 4), 1), jnp.zeros((6, 1)), 0.9)
            ),
        ],
        causes=[
            sign(
                "a row without any update has mean square 0: keep it at 1e-10 or more under the root",
                lambda got, want, u, *rest: bool(jnp.isnan(got[0]).any()),
            ),
            suspect("β₂ weighs the past, 1 − β₂ the new mean square", swapped_beta),
            suspect("divide by the root of the mean square, not by the mean square", by_square),
            suspect("update the running mean square first, then divide by the new one", by_old),
            suspect("the update's Frobenius norm must be what it was: multiply by old norm / new norm", not_refitted),
            sign(
                "tall and square matrices have one statistic a row, wide ones one a column",
                lambda got, want, u, second, beta2: np.shape(got[1]) != np.shape(second),
            ),
        ],
        steps=variance_steps,
        hints=[
            "Three parts: the mean squares of u, the running average of them, and a rescaling that keeps ‖u‖_F.",
            "The norm after dividing is known without dividing: √(size · Σ square · inverse²), size being the"
            " length of "
            'the averaged axis. note("square", …), note("second", …), note("inverse", …) are compared step by step.',
            variance_output,
        ],
    ),
    Exercise(
        "muon.descend",
        cases=[
            example("same sign, other sign, zero", lambda: (U, P, 0.1, 0.5), np.float32([[-0.2, -0.1, 0.2, -0.1]])),
            reference("cautious", lambda rng: descend_arguments(rng, True, 4, 5)),
            reference("plain decay", lambda rng: descend_arguments(rng, False, 4, 5)),
        ],
        causes=[
            sign(
                "an update of exactly 0 does not enlarge the weight, so the decay acts there: ≥, not >",
                zeros_left_alone,
            ),
            suspect(
                "the mask is the wrong way round: −u shrinks the weight where u and p have the same sign", growing_only
            ),
            suspect("the decay is multiplied by the learning rate too", rate_forgotten),
            suspect("cautious=True must leave out the weights that the update enlarges", never_cautious),
            suspect("with cautious=False the decay acts on every weight", always_cautious),
            sign(
                "the sign: this is what is *added*, and a step goes against u",
                lambda got, want, *rest: np.allclose(got, -want),
            ),
        ],
        hints=[
            "Write −η u − η λ p first, then let jnp.where take p or 0.",
            "u · p ≥ 0 says that taking u away makes the weight smaller. There, and only there, decay.",
            descend_output,
        ],
    ),
    Exercise(
        "muon.group_of",
        cases=[
            example("one of each kind", (tuple(NAMES),), NAMES, call=routed),
            example(
                "names that are no parameters",
                (("transformer.h.0.attn.bias", "wte", ""),),
                dict.fromkeys(("transformer.h.0.attn.bias", "wte", ""), ""),
                call=routed,
            ),
        ],
        causes=[
            sign(
                "a table is a matrix too, but each of its rows is one token: never Muon",
                lambda got, want, *rest: (
                    "muon"
                    in (got.get("transformer.wte.weight"), got.get("lm_head.weight"), got.get("value_embeds.1.weight"))
                ),
            ),
            sign(
                "the gates of the value embeddings are small, but they are matrices of the blocks: Muon",
                lambda got, want, *rest: got.get("transformer.h.1.attn.ve_gate.weight", "muon") != "muon",
            ),
            sign(
                "smear_gate.weight is no part of a block: it goes with the other smear scalars",
                lambda got, want, *rest: got.get("smear_gate.weight", "smear") != "smear",
            ),
            sign("a name that nobody knows gives an empty text", lambda got, want, *rest: got.get("wte", "") != ""),
        ],
        hints=[
            "Three kinds: matrices inside the blocks (transformer.h.…), value tables (value_embeds.…), and a "
            "short list.",
            "BLOCK and VALUE_EMBEDDING are compiled patterns (.fullmatch(name) gives None or a match); "
            "ADAMW_NAMES is a dict.",
            routing_output,
        ],
    ),
    Exercise(
        "muon.transfer_scales",
        cases=[
            example("the reference itself", (2**19, 1e9, 1e9), (1.0, 1.0)),
            example("four times the batch, four times the tokens", (2**21, 4e9, 1e9), (2.0, 0.5)),
            reference("random runs", batch_of),
            prop(
                "batch / (rate · decay · tokens) is kept",
                batch_of,
                lambda out, batch, tokens, reference_tokens: (
                    ""
                    if np.isclose(
                        batch / (out[0] * out[1] * tokens), sizing.REFERENCE_BATCH / reference_tokens, rtol=1e-9
                    )
                    else "the quantity that should stay has changed"
                ),
            ),
        ],
        causes=[
            suspect(
                "rates grow with the root of the batch, not with the batch",
                lambda b, d, r: (b / sizing.REFERENCE_BATCH, sizing.transfer_scales(b, d, r)[1]),
            ),
            suspect(
                "the decay must shrink in a longer run: reference tokens / tokens",
                lambda b, d, r: sizing.transfer_scales(b, r, d),
            ),
            suspect(
                "the decay depends on the batch as well: solve batch / (rate · decay · tokens) = constant for it",
                lambda b, d, r: (sizing.transfer_scales(b, d, r)[0], r / d),
            ),
            suspect(
                "the rate itself stands in the constant: batch / rate is only √batch",
                lambda b, d, r: (sizing.transfer_scales(b, d, r)[0], b / sizing.REFERENCE_BATCH * r / d),
            ),
        ],
        hints=[
            "The reference batch is REFERENCE_BATCH = 2¹⁹ tokens. At four times that, which factor has the rate?",
            "Write the constant for the reference and for this run, divide the two, and put √(batch ratio) in"
            " for the rate.",
            transfer_output,
        ],
    ),
    Exercise(
        "muon.orthogonal_flops",
        cases=[
            example("one step of 2 × 3", (2, 3, 1), 64),
            example("tall and wide cost the same", (3072, 768, 5), 40768634880),
            prop("what the compiler counts", lambda rng: (96, 64, 2), near_compiler),
        ],
        causes=[
            suspect(
                "a multiply-add is two FLOPs",
                lambda rows, columns, steps=5: orthogonal_flops(rows, columns, steps) // 2,
            ),
            suspect(
                "the gram matrix squared is missing: 2 m³",
                lambda rows, columns, steps=5: (
                    orthogonal_flops(rows, columns, steps) - steps * 2 * min(rows, columns) ** 3
                ),
            ),
            suspect(
                "that is the gram matrix of the long side: use the short one",
                lambda rows, columns, steps=5: (
                    steps * max(rows, columns) ** 2 * (4 * min(rows, columns) + 2 * max(rows, columns))
                ),
            ),
            suspect(
                "that is one step; multiply by steps", lambda rows, columns, steps=5: orthogonal_flops(rows, columns, 1)
            ),
            suspect(
                "the last product, with X itself, is missing: 2 m² M again",
                lambda rows, columns, steps=5: (
                    orthogonal_flops(rows, columns, steps) - steps * 2 * min(rows, columns) ** 2 * max(rows, columns)
                ),
            ),
        ],
        hints=[
            "A product of an (i, k) and a (k, j) matrix takes 2·i·j·k FLOPs. Which three products has one step?",
            "With m the short and M the long side: gram (m, M)·(M, m), its square (m, m)·(m, m), and the "
            "factor times X.",
            flops_output,
        ],
        fallback=orthogonal_flops,
    ),
]

QUIZZES = [
    Quiz(
        "muon.q_update",
        "Two updates have the same Frobenius norm. One has a single singular value, the other 64 equal ones. "
        "Which can change the output of the layer more, for the input it likes best?",
        [
            Option(
                "the one with a single singular value",
                right=True,
                why=(
                    "Its whole norm lies in one direction: the largest singular value is 8 times larger (√64), "
                    "and that bounds the change."
                ),
            ),
            Option(
                "the one with 64 equal ones",
                why=(
                    "It spreads its norm over 64 directions; each has only 1/8 of the norm. It is the safer step "
                    "of the two."
                ),
            ),
            Option(
                "neither: equal norms do equal things",
                why=(
                    "The Frobenius norm adds up all directions. What one input feels is the largest singular "
                    "value, not the sum."
                ),
            ),
        ],
    ),
    Quiz(
        "muon.q_iteration",
        "Why is the first coefficient of the first Polar Express step as large as 8.16?",
        [
            Option(
                "to make the step longer, like a learning rate",
                why="The length of the result is fixed afterwards; only the ratios of the singular values matter here.",
            ),
            Option(
                "small singular values grow by that factor in one step",
                right=True,
                why=(
                    "Near zero the polynomial is a·s. A value of 0.001 must become about 1 in five steps: that "
                    "needs a mean factor of 4 a step."
                ),
            ),
            Option(
                "to undo the division by the Frobenius norm",
                why=(
                    "The norm differs from matrix to matrix; a constant cannot undo it. The slope at zero is what"
                    " matters."
                ),
            ),
        ],
    ),
    Quiz(
        "muon.q_where",
        "The output head is a 32,768 × 768 matrix. Why does it not go to Muon?",
        [
            Option(
                "it is too large for the iteration",
                why=(
                    "It would be costly, but the reason is another: the optimiser would be wrong for it even if "
                    "it were free."
                ),
            ),
            Option(
                "it has no gradient in most steps",
                why=(
                    "The softmax gives every row of the head a gradient in every step; it is the embedding that "
                    "has few."
                ),
            ),
            Option(
                "each row belongs to one token, and tokens differ by orders of magnitude in frequency",
                right=True,
                why=(
                    "An orthogonal update moves all directions alike, rare tokens' noise as far as frequent "
                    "tokens' signal. AdamW's step is per entry."
                ),
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "muon.p_rank",
        "A gradient matrix of 128 × 64 has 64 singular values. How many of the largest hold 90 % of its squared norm?",
        unit="singular values",
    ),
    Prediction(
        "muon.p_iterations",
        "How many steps of the original Newton–Schulz polynomial (a = 3.4445) bring a singular value of 0.001"
        " above 0.5?",
        unit="steps",
    ),
    Prediction(
        "muon.p_share",
        "What share of a training step's FLOPs does Muon's iteration take, for the 3.8B model on each of 8 "
        "GPUs, if each orthogonalises every matrix?",
        unit="percent",
    ),
]
