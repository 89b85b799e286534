"""Checks, hints, quizzes and predictions of chapter 03, attention kernels."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib.attention import MASKED as HIDDEN
from nanochat_lib.attention import visible
from nanochat_lib.course.cases import Exercise, Option, Prediction, Quiz, example, prop, reference, sign, suspect
from nanochat_lib.course.kernel_view import fetches
from nanochat_lib.kernels import flash
from nanochat_lib.kernels.flash import EMPTY, KEY, QUERY, Band


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def map_figure(seen: np.ndarray, title: str, rows: str = "queries", columns: str = "keys"):
    """A Boolean matrix as a picture."""
    from nanochat_lib.report.plots import new_figure

    figure, ax = new_figure(width=3.2, height=2.6)
    ax.pcolormesh(np.asarray(seen), cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=1)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set(xlabel=columns, ylabel=rows, title=title)
    return figure


# 1. the mask


def visible_map():
    return map_figure(visible(np.arange(8), np.arange(8), 3), "8 positions, window 3: four keys at most")


VISIBLE = Exercise(
    "attention.visible",
    cases=[
        example(
            "three positions, window 1",
            (np.arange(3), np.arange(3), 1),
            np.array([[True, False, False], [True, True, False], [False, True, True]]),
        ),
        prop(
            "w + 1 keys",
            lambda rng: (np.arange(9), np.arange(9), 4),
            lambda seen, q, k, w: (
                ""
                if int(np.asarray(seen)[8].sum()) == 5
                else f"the last query sees {int(np.asarray(seen)[8].sum())} keys, with window 4 it must see 5"
            ),
        ),
        reference("queries that stand after the keys began", lambda rng: (np.arange(7, 12), np.arange(12), 3)),
    ],
    causes=[
        suspect(
            "the window counts the keys before the query: a key at distance w is still seen, so w+1 keys in all",
            lambda q, k, w: visible(q, k, w - 1),
        ),
        suspect(
            "queries see the future: a key after the query must be hidden",
            lambda q, k, w: visible(q, k, w) | ~visible(q, k, 10**6),
        ),
        suspect("the query itself is hidden: distance 0 must be seen", lambda q, k, w: visible(q - 1, k, w - 1)),
        suspect("the distance has the wrong sign: it is query minus key", lambda q, k, w: visible(-q, -k, w)),
        sign("rows are queries, columns are keys", lambda got, want, q, k, w: np.shape(got) == np.shape(want)[::-1]),
    ],
    hints=[
        "Subtract: how far does each key stand before each query? Broadcasting gives the whole matrix at once.",
        "`queries[..., :, None] - keys` has the shape (…, Tq, Tk). Seen is what lies between 0 and the window, both "
        "ends included.",
        visible_map,
    ],
)


# 2. online softmax


def absorb_case(rng: np.random.Generator, queries: int = 3, keys: int = 5, d: int = 4, hidden: bool = False) -> tuple:
    m, total, acc = normal(rng, queries, 1), 1 + rng.random((queries, 1), np.float32), normal(rng, queries, d)
    s = 3 * normal(rng, queries, keys)
    if hidden:
        s[1] = flash.MASKED
    return jnp.asarray(m), jnp.asarray(total), jnp.asarray(acc), jnp.asarray(s), jnp.asarray(normal(rng, keys, d))


def fresh_state(queries: int, d: int) -> tuple:
    return (
        jnp.full((queries, 1), EMPTY, jnp.float32),
        jnp.zeros((queries, 1), jnp.float32),
        jnp.zeros((queries, d), jnp.float32),
    )


def absorb_all(fn, s, v, block: int):
    """The softmax average over all keys, `block` of them at a time."""
    state = fresh_state(s.shape[0], v.shape[1])
    for start in range(0, s.shape[1], block):
        state = fn(*state, s[:, start : start + block], v[start : start + block])
    m, total, acc = state
    return acc / total


def softmax(s) -> np.ndarray:
    p = np.exp(np.float64(s) - np.max(s, axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def softmax_average(s, v, block: int) -> np.ndarray:
    return softmax(s) @ np.float64(v)


def absorb_steps(*args) -> dict:
    if len(args) != 5:  # a case of several blocks: its steps are those of the first
        return {}
    m, total, acc, s, v = args
    nothing, keys = jnp.zeros_like(total), s.shape[1]
    highest, new_total, new_acc = flash.absorb(m, total, acc, s, v)
    block = flash.absorb(m, nothing, jnp.zeros_like(s), s, jnp.eye(keys, dtype=s.dtype))
    shrink = flash.absorb(m, nothing + 1, acc, s, v)[1] - block[1]
    return {"highest": highest, "p": block[2], "shrink": shrink, "total": new_total, "acc": new_acc}


def added(factor):
    """The block's own sums plus the old ones times `factor(old maximum, new maximum)`."""

    def wrong(m, total, acc, s, v) -> tuple:
        highest, own_total, own_acc = flash.absorb(m, 0 * total, 0 * acc, s, v)
        return highest, own_total + factor(m, highest) * total, own_acc + factor(m, highest) * acc

    return wrong


def block_maximum(m, total, acc, s, v) -> tuple:
    highest, own_total, own_acc = flash.absorb(jnp.full_like(m, EMPTY), 0 * total, 0 * acc, s, v)
    return highest, own_total + jnp.exp(m - highest) * total, own_acc + jnp.exp(m - highest) * acc


def absorb_table() -> str:
    s, v = jnp.asarray([[1.0, 3.0, 2.0, 5.0]]), jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
    state, lines = fresh_state(1, 1), ["scores 1 3 | 2 5, values 1 2 | 3 4", "after     m   total     acc   acc/total"]
    for start in (0, 2):
        state = flash.absorb(*state, s[:, start : start + 2], v[start : start + 2])
        m, total, acc = (float(x[0, 0]) for x in state)
        lines.append(f"{start + 2} keys  {m:3.0f} {total:7.4f} {acc:7.4f} {acc / total:11.4f}")
    return "\n".join(lines)


ABSORB = Exercise(
    "attention.absorb",
    cases=[
        reference("one block", lambda rng: absorb_case(rng)),
        reference(
            "four blocks make a softmax",
            lambda rng: (4 * normal(rng, 3, 20), normal(rng, 20, 4), 5),
            against=softmax_average,
            call=lambda fn, *args: fn(*args) if fn is softmax_average else absorb_all(fn, *args),
        ),
        reference(
            "scores as large as 10,000",
            lambda rng: (1e4 + 30 * normal(rng, 3, 10), normal(rng, 10, 4), 5),
            against=softmax_average,
            call=lambda fn, *args: fn(*args) if fn is softmax_average else absorb_all(fn, *args),
            rtol=1e-3,
        ),
    ],
    causes=[
        sign(
            "the exponential overflowed: subtract the maximum first",
            lambda got, want, *args: bool(jnp.isnan(jnp.asarray(got[-1] if isinstance(got, tuple) else got)).any()),
        ),
        suspect(
            "the old sums were not shrunk: they were made against a smaller maximum", added(lambda m, highest: 1.0)
        ),
        suspect("the maximum of the earlier blocks was forgotten", block_maximum),
        suspect(
            "the shrink factor is upside down: it is exp(old - new), at most 1",
            added(lambda m, highest: jnp.exp(highest - m)),
        ),
    ],
    steps=absorb_steps,
    hints=[
        "The old sums were made against the old maximum. What must they be multiplied with to stand against the new?",
        "exp(s - new) = exp(s - old) · exp(old - new). So `shrink = exp(m - highest)`, and both old sums get it before "
        "the block's own sums are added.",
        absorb_table,
    ],
)


# 3. tiles in plain JAX


def whole(q, k, v, window: int, block_q: int = 0, block_kv: int = 0) -> np.ndarray:
    """One head with its whole score matrix, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    positions = np.arange(q.shape[0])
    return softmax(np.where(visible(positions, positions, window), q @ k.T * q.shape[1] ** -0.5, HIDDEN)) @ v


def head(rng: np.random.Generator, t: int, d: int, window: int, block_q: int, block_kv: int) -> tuple:
    return (*(normal(rng, t, d) for _ in range(3)), window, block_q, block_kv)


def largest_array(fn, q, k, v, *sizes) -> int:
    """Entries of the largest array that the function makes."""
    program = jax.make_jaxpr(lambda *arrays: fn(*arrays, *sizes))(q, k, v)
    found = [int(np.prod(var.aval.shape)) for equation in program.jaxpr.eqns for var in equation.outvars]
    return max(found)


def no_score_matrix(largest: int, q, k, v, window, block_q, block_kv) -> str:
    allowed = max(q.size, block_q * block_kv)
    return "" if largest <= allowed else f"an array of {largest} entries was made, {allowed} are enough for one tile"


def tile_count() -> str:
    seen = flash.visible_blocks(12, 12, 5, 4, 4)
    return f"T = 12, tiles of 4 × 4, window 5: {seen.size} tiles, {int(seen.sum())} show something\n{seen.astype(int)}"


BLOCKED = Exercise(
    "attention.blocked",
    cases=[
        reference("tiles of 4 × 3", lambda rng: head(rng, 12, 5, 12, 4, 3), against=whole),
        reference("tiles of 4 × 3, window 4", lambda rng: head(rng, 12, 5, 4, 4, 3), against=whole),
        prop("no array of all scores", lambda rng: head(rng, 24, 4, 24, 4, 6), no_score_matrix, call=largest_array),
    ],
    causes=[
        suspect(
            "the scores are not divided by √D", lambda q, k, v, *a: whole(np.float64(q) * q.shape[1] ** 0.5, k, v, *a)
        ),
        suspect("the window is not applied", lambda q, k, v, w, *a: whole(q, k, v, len(q), *a)),
        suspect("queries see the future", lambda q, k, v, *a: softmax(q @ k.T * q.shape[1] ** -0.5) @ np.float64(v)),
        sign(
            "the sums are not divided by the total",
            lambda got, want, q, k, v, *a: (
                np.shape(got) == np.shape(want)
                and bool(jnp.all(jnp.isfinite(got)))
                and bool(
                    jnp.allclose(
                        got / jnp.where(want == 0, 1, want), (got / jnp.where(want == 0, 1, want))[:, :1], rtol=1e-3
                    )
                )
            ),
        ),
    ],
    hints=[
        "Two loops: outside over blocks of queries, inside over blocks of keys. Each block of queries starts with m = "
        "EMPTY and zero sums, and ends with a division.",
        "A tile's scores are `dot(q[i : i + block_q], k[j : j + block_kv], 1, 1) * d**-0.5`; hide what `visible` does "
        "not show of *these positions*, then `absorb`.",
        tile_count,
    ],
    fallback=whole,
)


# 4. and 5. blocks that show something, and the list of them


def brute_blocks(
    tq: int, tk: int, window: int, block_q: int, block_kv: int, rows=slice(None), future=False
) -> np.ndarray:
    """From the whole mask. `rows`: the queries of a block that are looked at; `future`: causality left out."""
    mask = visible(np.arange(tk - tq, tk), np.arange(tk), window)
    mask = mask | ~visible(np.arange(tk - tq, tk), np.arange(tk), 10**6) if future else mask
    return np.array(
        [
            [mask[i : i + block_q, j : j + block_kv][rows].any() for j in range(0, tk, block_kv)]
            for i in range(0, tq, block_q)
        ]
    )


def blocks_map():
    seen = flash.visible_blocks(2048, 2048, 512, 128, 128)
    return map_figure(seen, f"{int(seen.sum())} of {seen.size} blocks", "query blocks", "key blocks")


VISIBLE_BLOCKS = Exercise(
    "attention.visible_blocks",
    cases=[
        example("two by two, full", (8, 8, 8, 4, 4), np.array([[True, False], [True, True]])),
        reference("a window of two blocks", lambda rng: (24, 24, 8, 4, 4), against=brute_blocks),
        reference("blocks that are not square", lambda rng: (24, 24, 5, 6, 4), against=brute_blocks),
        reference("a last block that is not full", lambda rng: (22, 22, 3, 8, 4), against=brute_blocks),
    ],
    causes=[
        suspect(
            "the window reaches back from the *first* query of the block, which sees furthest back",
            partial(brute_blocks, rows=slice(-1, None)),
        ),
        suspect(
            "blocks above the diagonal show nothing: compare with the *last* query", partial(brute_blocks, future=True)
        ),
        suspect(
            "a block is dropped that one key of the window still reaches: a key at distance w is seen",
            lambda tq, tk, w, bq, bk: brute_blocks(tq, tk, w - 1, bq, bk),
        ),
        suspect(
            "blocks on the diagonal are seen too: compare the first key with the *last* query of the block",
            partial(brute_blocks, rows=slice(0, 1)),
        ),
        sign(
            "rows are query blocks, columns are key blocks",
            lambda got, want, *a: np.shape(got) == np.shape(want)[::-1] != np.shape(want),
        ),
    ],
    hints=[
        "A block of queries and a block of keys are two intervals. Only their ends matter: first and last query, first "
        "and last key.",
        "Something is seen if the first key is not after the last query, and the last key is not further back than the "
        "window of the first query. Query r stands at position r + tk - tq.",
        blocks_map,
    ],
)


def schedule_table() -> str:
    seen = np.array([[True, False, False], [True, True, False], [False, True, True]])
    lines = [f"seen\n{seen.astype(int)}"]
    for name, run in (("QUERY", QUERY), ("KEY", KEY)):
        table = flash.schedule(seen, run)
        lines.append(f"run {name}: rows are query block, key block, first, last\n{table}")
    return "\n".join(lines)


def random_seen(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Boolean (rows, columns) in which no row and no column is empty."""
    seen, places = rng.random((rows, columns)) < 0.4, np.arange(max(rows, columns))
    seen[places % rows, places % columns] = True
    return seen


SMALL = np.array([[True, False], [True, True]])

SCHEDULE = Exercise(
    "attention.schedule",
    cases=[
        example(
            "two by two, runs of queries",
            (SMALL, QUERY),
            np.array([[0, 1, 1], [0, 0, 1], [1, 1, 0], [1, 0, 1]], np.int32),
            dtype="int32",
        ),
        example(
            "two by two, runs of keys",
            (SMALL, KEY),
            np.array([[0, 1, 1], [0, 0, 1], [1, 0, 1], [0, 1, 1]], np.int32),
            dtype="int32",
        ),
        reference("random blocks", lambda rng: (random_seen(rng, 4, 6), QUERY)),
        example(
            "a row that sees nothing",
            (np.array([[False, False], [True, True]]), QUERY),
            np.array([[0, 1, 1], [0, 0, 1], [1, 1, 0], [1, 0, 1]], np.int32),
        ),
    ],
    causes=[
        sign(
            "a block that sees nothing still needs one step, or its zeros are never written",
            lambda got, want, seen, run: np.ndim(got) == 2 and np.shape(got)[1] < np.shape(want)[1],
        ),
        sign(
            "the table is transposed: four rows, one column for each step",
            lambda got, want, *a: np.ndim(got) == 2 and np.shape(got) == np.shape(want)[::-1],
        ),
        sign(
            "the steps are in the wrong order: all steps of one run stand together",
            lambda got, want, *a: (
                np.shape(got) == np.shape(want)
                and sorted(zip(*np.asarray(got)[:2].tolist(), strict=True))
                == sorted(zip(*np.asarray(want)[:2].tolist(), strict=True))
                and (np.asarray(got)[:2] != np.asarray(want)[:2]).any()
            ),
        ),
        sign(
            "rows 0 and 1 are query block and key block, also when a run belongs to a key block",
            lambda got, want, *a: (
                np.shape(got) == np.shape(want) and (np.asarray(got)[:2] == np.asarray(want)[[1, 0]]).all()
            ),
        ),
        sign(
            "first and last mark where a *run* begins and ends: all steps of one query block, or of one key block",
            lambda got, want, *a: (
                np.shape(got) == np.shape(want)
                and (np.asarray(got)[:2] == np.asarray(want)[:2]).all()
                and (np.asarray(got)[2:] != np.asarray(want)[2:]).any()
            ),
        ),
    ],
    hints=[
        "`np.argwhere` lists the True places of a matrix row by row. That is the order for runs of queries; what must "
        "be done to the matrix to get the order for runs of keys?",
        "A run begins where the number of its block differs from the step before, and at the very first step. A run "
        "ends where the next step begins one, and at the very last step.",
        schedule_table,
    ],
)


# 6. copies


FETCHES = Exercise(
    "attention.fetches",
    cases=[
        example(
            "held for two steps", (np.array([[0, 0], [0, 0], [0, 1], [0, 0]]),), np.array([True, False, True, True])
        ),
        example("always the same block", (np.zeros((4, 3), int),), np.array([True, False, False, False])),
        reference("random visits", lambda rng: (rng.integers(0, 2, (9, 2)),)),
    ],
    causes=[
        suspect("the first step copies too: nothing is there yet", lambda visits: np.r_[False, fetches(visits)[1:]]),
        suspect(
            "a block that was here earlier, but not in the step before, is gone and must be copied again",
            lambda visits: np.array(
                [i == min(np.flatnonzero((visits == row).all(axis=1))) for i, row in enumerate(visits)]
            ),
        ),
        suspect(
            "one axis that changes is enough for another block",
            lambda visits: np.logical_and.reduce([fetches(column[:, None]) for column in visits.T]),
        ),
        sign("one answer for each step", lambda got, want, *a: np.shape(got) != np.shape(want)),
    ],
    hints=[
        "Compare every step with the one before it. The first has none before it.",
        "`visits[1:] != visits[:-1]` compares axis by axis; a block is another one if any axis differs.",
        lambda: (
            "visits 0 0 1 1 0\ncopied " + " ".join("yn"[not x] for x in fetches(np.array([[0], [0], [1], [1], [0]])))
        ),
    ],
)


# 7. which block a step needs


def spec_table(fn, b: int, kv_heads: int, group: int, seen: np.ndarray, band: Band, d: int, run: int) -> dict:
    """What the three BlockSpecs say: their blocks' shapes (1: an axis left out), and the block at every place."""
    table = flash.schedule(seen, run)
    inner = (group, table.shape[1]) if run == QUERY else (table.shape[1], group)
    places = list(np.ndindex(b, kv_heads, *inner))
    found = {}
    for name, spec in zip(("queries", "keys", "rows"), fn(band, d, run), strict=True):
        found[f"{name}: block"] = tuple(1 if size is None else int(size) for size in spec.block_shape)
        found[f"{name}: axes left out"] = sum(size is None for size in spec.block_shape)
        visits = [[int(x) for x in spec.index_map(*(int(i) for i in place), table)] for place in places]
        found[f"{name}: places"] = np.array(visits)
    return found


BAND = Band(8, 12, 12, 4, 6)
SEEN = np.array([[True, False], [True, True]])


def spec_case(run: int, b: int = 2, kv_heads: int = 2, group: int = 3, d: int = 5):
    return lambda rng: (b, kv_heads, group, SEEN, BAND, d, run)


def spec_words() -> str:
    """The visits of queries and keys for one key/value head with two query heads."""
    lines = []
    for name, run in (("QUERY, grid (B, K, G, steps)", QUERY), ("KEY, grid (B, K, steps, G)", KEY)):
        found = spec_table(flash.block_specs, 1, 1, 2, SEEN, BAND, 5, run)
        lines += [
            f"run {name}",
            *(f"  {key}: {value.tolist() if hasattr(value, 'tolist') else value}" for key, value in found.items()),
        ]
    return "\n".join(lines)


def places_differ(name: str):
    return lambda got, want, *a: (
        isinstance(got, dict)
        and (
            got[f"{name}: places"].shape != want[f"{name}: places"].shape
            or bool((got[f"{name}: places"] != want[f"{name}: places"]).any())
        )
    )


BLOCK_SPECS = Exercise(
    "attention.block_specs",
    cases=[
        reference("forward: runs of queries", spec_case(QUERY)),
        reference("backward: runs of keys", spec_case(KEY)),
    ],
    causes=[
        sign(
            "an axis of which a step sees one entry is None in the block's shape, so that the kernel does not see it",
            lambda got, want, *a: any(got[key] != want[key] for key in want if "left out" in key),
        ),
        sign(
            "a block's shape is wrong",
            lambda got, want, *a: any(got[key] != want[key] for key in want if key.endswith(": block")),
        ),
        sign(
            "the keys' block depends on the key/value head and the key block alone: not on the query head in its group",
            lambda got, want, *a: places_differ("keys")(got, want) and not places_differ("queries")(got, want),
        ),
        sign(
            "the rows (log-sum-exp, delta) have their time on the last axis, and follow the query block",
            lambda got, want, *a: places_differ("rows")(got, want) and not places_differ("queries")(got, want),
        ),
        sign(
            "with runs of keys the grid is (B, K, steps, G): the step comes before the head",
            lambda got, want, *a: a[-1] == KEY and places_differ("queries")(got, want),
        ),
        sign(
            "the queries' block is (batch, key/value head, head in the group, query block, 0)",
            lambda got, want, *a: places_differ("queries")(got, want),
        ),
    ],
    call=lambda fn, *args: spec_table(fn, *args),
    hints=[
        "A BlockSpec has the shape of a block and a function from the place in the grid to the number of the block "
        "along each axis. The table of steps is the function's last argument.",
        "Queries: shape (None, None, None, block_q, d), block (b, kv_head, head, i, 0). Keys: shape (None, None, "
        "block_kv, d), block (b, kv_head, j, 0). i and j are `table[QUERY, step]` and `table[KEY, step]`.",
        spec_words,
    ],
)


# 8. the kernel


def run_kernel(kernel, q, k, v, window: int, block_q: int, block_kv: int) -> tuple:
    """(y, lse) of a kernel in interpret mode; q (B, K, G, T, D), k and v (B, K, T, D)."""
    band = Band(q.shape[3], k.shape[2], window, block_q, block_kv, interpret=True)
    return flash.run_forward(kernel, q, k, v, band)


def kernel_case(t: int, window: int, block_q: int, block_kv: int, d: int = 3, group: int = 2):
    return lambda rng: (
        jnp.asarray(normal(rng, 1, 1, group, t, d)),
        *(jnp.asarray(normal(rng, 1, 1, t, d)) for _ in range(2)),
        window,
        block_q,
        block_kv,
    )


def whole_heads(q, k, v, window: int, scale: float | None = None, causal: bool = True) -> tuple:
    """(y, lse) with the whole score matrix, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    positions = np.arange(q.shape[3])
    s = np.einsum("bkgqd,bktd->bkgqt", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = np.where(visible(positions, positions, window), s, HIDDEN) if causal else s
    top = s.max(axis=-1)
    lse = top + np.log(np.exp(s - top[..., None]).sum(axis=-1))
    return np.einsum("bkgqt,bktd->bkgqd", softmax(s), v), lse[..., None, :]


def right_kernel(q, k, v, window, block_q, block_kv) -> tuple:
    return whole_heads(q, k, v, window)


def against_whole(name: str, make):
    return reference(
        name,
        make,
        against=right_kernel,
        call=lambda fn, *args: fn(*args) if fn is right_kernel else run_kernel(fn, *args),
    )


def kernel_words() -> str:
    rng = np.random.default_rng(0)
    q, k, v = jnp.asarray(normal(rng, 1, 1, 1, 4, 2)), *(jnp.asarray(normal(rng, 1, 1, 4, 2)) for _ in range(2))
    y, lse = run_kernel(flash.forward_kernel, q, k, v, 4, 2, 2)
    return f"q\n{np.round(q[0, 0, 0], 3)}\ny\n{np.round(y[0, 0, 0], 3)}\nlse\n{np.round(lse[0, 0, 0], 3)}"


FORWARD_KERNEL = Exercise(
    "attention.forward_kernel",
    cases=[
        against_whole("a window that hides blocks", kernel_case(12, 3, 4, 4)),
    ],
    causes=[
        sign(
            "lse is stored as a row (1, block_q): transpose the column",
            lambda got, want, *a: isinstance(got, tuple) and np.shape(got[1]) != np.shape(want[1]),
        ),
        sign(
            "y is not divided by the total, or by another block's",
            lambda got, want, *a: close(got[1], want[1]) and not close(got[0], want[0]),
        ),
        sign("lse = m + log(total)", lambda got, want, *a: close(got[0], want[0]) and not close(got[1], want[1])),
        suspect("the scores are not multiplied by `scale`", lambda q, k, v, w, *a: whole_heads(q, k, v, w, scale=1.0)),
        suspect(
            "hidden scores are not hidden: `band.hide` needs the block numbers of this step",
            lambda q, k, v, w, *a: whole_heads(q, k, v, w, causal=False),
        ),
        sign(
            "the sums of one block of queries run into the next: they begin anew where FIRST is 1, and only there",
            lambda got, want, q, k, v, w, bq, bk: close(got[0][..., :bq, :], want[0][..., :bq, :]),
        ),
        sign(
            "scratch memory holds anything at first: begin where FIRST is 1, write where LAST is 1",
            lambda got, want, *a: bool(np.isnan(np.asarray(got[0])).any()),
        ),
    ],
    call=run_kernel,
    hints=[
        "Three parts: where FIRST is 1, set the scratch to its starting values; always, absorb this block; where LAST "
        "is 1, write the results. `pl.when(condition)` makes a part conditional.",
        "The scores: `band.hide(scale * dot(q_ref[...], k_ref[...], 1, 1), i, j, queries=0)`, with i and j from the "
        "table `steps`. Then one call of `absorb` that reads the three scratch arrays and writes them.",
        kernel_words,
    ],
)


def close(a, b) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4))


# 9. backward


def backward_case(tq: int, tk: int, window: int, i: int, j: int, block_q: int = 4, block_kv: int = 6, d: int = 3):
    """A tile's arguments with the true lse and delta of its queries."""

    def make(rng: np.random.Generator) -> tuple:
        q, dy, k, v = (normal(rng, n, d) for n in (tq, tq, tk, tk))
        seen = visible(np.arange(tk - tq, tk), np.arange(tk), window)
        s = np.where(seen, q @ k.T * d**-0.5, HIDDEN)
        lse = np.log(np.exp(s - s.max(1, keepdims=True)).sum(1)) + s.max(1)
        y = np.exp(s - lse[:, None]) @ v
        rows, columns = slice(i * block_q, (i + 1) * block_q), slice(j * block_kv, (j + 1) * block_kv)
        delta = (dy * y).sum(1)
        band = Band(tq, tk, window, block_q, block_kv)
        return (
            band,
            d**-0.5,
            i,
            j,
            *(
                jnp.asarray(x, jnp.float32)
                for x in (q[rows], k[columns], v[columns], dy[rows], lse[None, rows], delta[None, rows])
            ),
        )

    return make


def whole_row_sums(out, *args) -> str:
    p, ds = (np.asarray(x) for x in out)
    if p.shape != (args[5].shape[0], args[4].shape[0]):
        return f"the results have shape {p.shape}, keys first is ({args[5].shape[0]}, {args[4].shape[0]})"
    if not np.allclose(p.sum(axis=0), 1, atol=1e-4):
        return f"the weights of the first query sum to {p.sum(axis=0)[0]:.4f}, all its keys are here: must be 1"
    return "" if np.allclose(ds.sum(axis=0), 0, atol=1e-4) else "the score gradients of a query must sum to 0"


def right(band, scale, i, j, q, k, v, dy, lse, delta) -> tuple:
    return flash.weights_and_score_gradients(band, scale, i, j, q, k, v, dy, lse, delta)


def nothing_hidden(band, scale, i, j, *arrays) -> tuple:
    return right(Band(band.tq, band.tk, 10**6, band.block_q, band.block_kv), scale, i + 1000, j, *arrays)


def tile_maximum(band, scale, i, j, q, k, *arrays) -> tuple:
    top = band.hide(scale * (k @ q.T), i, j, queries=1).max(axis=0, keepdims=True)
    return right(band, scale, i, j, q, k, *arrays[:2], top, arrays[3])


def without_p(band, scale, i, j, q, k, v, dy, lse, delta) -> tuple:
    return right(band, scale, i, j, q, k, v, dy, lse, delta)[0], v @ dy.T - delta


def gradient_words() -> str:
    args = backward_case(4, 4, 4, 0, 0, 4, 4)(np.random.default_rng(1))
    p, ds = flash.weights_and_score_gradients(*args)
    sums = np.round(np.asarray(ds).sum(axis=0), 3) + 0.0
    return f"pᵀ, keys × queries\n{np.round(p, 3)}\ndsᵀ\n{np.round(ds, 3)}\ncolumn sums of dsᵀ: {sums}"


GRADIENTS = Exercise(
    "attention.weights_and_score_gradients",
    cases=[
        reference("a tile below the diagonal", backward_case(8, 12, 12, 0, 0)),
        reference("a tile on the edge of the window", backward_case(8, 12, 5, 1, 0)),
        prop("one tile with all keys", backward_case(4, 6, 6, 0, 0), whole_row_sums),
    ],
    causes=[
        sign(
            "keys come first: (block_kv, block_q), so the product is k qᵀ",
            lambda got, want, *a: want is not None and np.shape(got[0]) == np.shape(want[0])[::-1],
        ),
        suspect(
            "delta is not subtracted: without it the gradient of softmax's denominator is missing",
            lambda *a: right(*a[:-1], 0 * a[-1]),
        ),
        suspect("ds lacks the factor p", without_p),
        suspect("hidden scores got a weight: use `band.hide`, with queries on axis 1", nothing_hidden),
        suspect("the scores are not multiplied by `scale`", lambda band, scale, *a: right(band, 1.0, *a)),
        suspect("p must be the weight of the whole row: exp(s - lse), not against this tile's maximum", tile_maximum),
    ],
    hints=[
        "lse is all that was kept of the softmax. With it every weight comes back in one line, without a maximum and "
        "without a division.",
        "`p = exp(hidden scores - lse)` and `ds = p (v dyᵀ - delta)`. Both with keys as rows: `dot(k, q, 1, 1)` and "
        "`dot(v, dy, 1, 1)`, so that lse and delta, which are rows, fit every column.",
        gradient_words,
    ],
)


EXERCISES = [
    VISIBLE,
    ABSORB,
    BLOCKED,
    VISIBLE_BLOCKS,
    SCHEDULE,
    FETCHES,
    BLOCK_SPECS,
    FORWARD_KERNEL,
    GRADIENTS,
]

QUIZZES = [
    Quiz(
        "attention.q_wall",
        "A chip computes 918 TFLOP/s and reads 1.64 TB/s. A function does 2 FLOPs for every byte. What share of the "
        "chip's peak can it reach?",
        [
            Option(
                "0.4 %", right=True, why="2 / 560: the memory feeds only 3.3 TFLOP/s, whatever the arithmetic could do."
            ),
            Option(
                "50 %", why="The share is intensity divided by the ridge, and the ridge is 560 FLOPs a byte, not 4."
            ),
            Option(
                "100 %, if it is compiled well", why="No compiler changes how many bytes a second the memory gives."
            ),
        ],
    ),
    Quiz(
        "attention.q_online",
        "After some blocks m = 2. A new block has the scores 1 and 5. What happens to total and acc?",
        [
            Option(
                "both are multiplied by exp(-3), then the block is added",
                right=True,
                why="The maximum rises from 2 to 5; all old terms exp(s - 2) become exp(s - 5).",
            ),
            Option(
                "both are multiplied by exp(3), then the block is added",
                why="That would make old terms grow; measured against a larger maximum they must shrink.",
            ),
            Option(
                "only total is multiplied: acc holds values, not weights",
                why="acc is a sum of weights times values, so it carries the same factor.",
            ),
        ],
    ),
    Quiz(
        "attention.q_gqa",
        "Four query heads share one key/value head. How often does our forward kernel copy the same keys, "
        "with grid (B, K, G, steps) and several key blocks?",
        [
            Option(
                "four times, once for each query head",
                right=True,
                why="Steps run inside heads: before a key block comes again, another took its place. Sharing saves "
                "memory, not copies; the dk/dv kernel turns the two around and saves both.",
            ),
            Option("once: the block stays in VMEM", why="Only the block of the step *before* is still there."),
            Option("four times more memory is needed too", why="The keys are stored once; only the copies repeat."),
        ],
    ),
    Quiz(
        "attention.q_delta",
        "Why does the backward pass subtract delta = Σ dy·y from dy vᵀ?",
        [
            Option(
                "because raising one weight lowers all others of the row",
                right=True,
                why="Softmax has a common denominator; its derivative is Σ p dp over the row, and that equals dy·y.",
            ),
            Option(
                "to keep the exponentials from overflowing", why="That is what the maximum, now inside lse, is for."
            ),
            Option("because of the window", why="A full row needs it just as well; hidden scores have p = 0."),
        ],
    ),
    Quiz(
        "attention.q_tile",
        "In bfloat16 a tile of bq queries does about bq FLOPs for each byte of keys and values. The ridge of a v6e is "
        "560. Why not simply take tiles of 2048?",
        [
            Option(
                "they do not fit the fast memory, and a tile on the diagonal computes what it then hides",
                right=True,
                why="2048 × 2048 float32 scores are 16 MiB, weights come on top; and half of such a tile is hidden.",
            ),
            Option(
                "the matrix unit takes 256 × 256 only", why="Larger products are cut into pieces for it, at no cost."
            ),
            Option("larger tiles are less exact", why="All sums are float32 in either case."),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "attention.p_scores",
        "Two sequences of 2048 tokens, six heads: how large are the float32 scores of one layer?",
        "MiB",
    ),
    Prediction(
        "attention.p_steps", "Of 16 × 16 blocks of 128 tokens, how many does a causal window of 512 leave?", "blocks"
    ),
    Prediction(
        "attention.p_tile", "How many times more bytes does the kernel move with tiles of 128 than with 512?", "times"
    ),
    Prediction(
        "attention.p_heads",
        "Heads of 128 on a 256 × 256 matrix unit: how many FLOPs does it spend for each useful one, at best?",
        "times",
    ),
]
