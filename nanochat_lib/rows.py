"""A fixed number of rows on the device, each with its own text in one key/value cache, and what each still remembers.

A row is filled in chunks of a few sizes, so that prompts of any length compile a handful of programs. When its text is
done the row keeps it: a later prompt that begins with it, or with most of it, is filled only from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np

from nanochat_lib.decoding import CHUNK, COMPILES, Setup, compiled_decode, span_of
from nanochat_lib.kv_cache import put_row, steps_back, take_row
from nanochat_lib.lanes import together
from nanochat_lib.sampling import is_greedy, row_keys

FILLS = (16, 64, 256)  # tokens of one fill; the last sizes are cut to the context
LEAST_REUSE = 16  # tokens in common below which a row that differs later is not worth giving up


@partial(jax.jit, static_argnames=("setup", "fresh"), donate_argnames=("cache",))
def compiled_fill(params, cache, row, idx, length, previous, *, setup, fresh):
    """Runs `length` of the tokens idx (T,) into a row, behind what it holds (`fresh`: nothing) and token `previous`."""
    COMPILES["fill"] += 1
    one, idx, lengths = take_row(cache, row), idx[None], length[None]
    if fresh:
        _, one = setup.model.prefill(setup.config, params, idx, lengths, one, dtype=setup.dtype)
    else:
        _, one = setup.model.extend(setup.config, params, idx, lengths, previous[None], one, dtype=setup.dtype)
    return put_row(cache, row, one)


@dataclass
class Row:
    """What a row of the cache holds: `known`, its tokens; of `high` positions something has been written."""

    known: list[int] = field(default_factory=list)
    high: int = 0
    used: int = 0  # when, in claims
    stale: bool = False  # written with other weights
    cut: bool = False  # set back, and nothing run since: the cache's `prev` is that of another token


@dataclass(frozen=True)
class Draw:
    """How the next tokens of a row are drawn; see decoding.compiled_decode."""

    newest: int
    seed: int
    forced: list[int]
    limit: int
    held: int
    temperature: float
    top_k: int
    top_p: float


class Rows:
    """`count` rows of `length` positions; `slack`: tokens that a row with a full ring can take back.

    They stand in `lane_count` lanes of equal width (see lanes.py), a cache each: row i in lane i // width.
    """

    def __init__(self, setup: Setup, count: int, length: int, slack: int, lane_count: int = 1) -> None:
        self.setup, self.length, self.slack = setup, length, slack
        self.width = count // lane_count
        self.fills = sorted({min(size, length) for size in FILLS})
        self.claims = 0
        self.keys: dict[int, tuple[np.ndarray, jax.Array]] = {}  # by lane: the rows' seeds and what they became
        self.rows = [Row() for _ in range(count)]
        self.reset()

    def reset(self) -> None:
        """Empty caches, as after a failure."""
        self.caches = []  # the old ones go before the new ones come
        shape = self.setup.config, self.width, self.length, self.setup.dtype, self.slack
        self.caches = [self.setup.model.init_cache(*shape) for _ in range(len(self.rows) // self.width)]
        self.rows = [Row() for _ in self.rows]

    def forget(self) -> None:
        """No later prompt continues what the rows hold, as the weights have changed."""
        for row in self.rows:
            row.stale = bool(row.known)

    def claim(self, prompt: Sequence[int], free: Iterable[int]) -> tuple[int, int]:
        """Takes one of the `free` rows for a prompt: (row, tokens of the prompt that it holds already).

        The row that saves most, if that is its whole text or LEAST_REUSE tokens; else the one not used for longest.
        """
        shared = {row: self.reusable(row, prompt) for row in free}
        best = max(shared, key=lambda row: (shared[row], -self.rows[row].used))
        if shared[best] < min(LEAST_REUSE, len(self.rows[best].known) or LEAST_REUSE):
            best = min(shared, key=lambda row: self.rows[row].used)
            shared[best] = 0
        self.claims += 1
        row = self.rows[best]
        row.cut = row.cut or shared[best] < len(row.known)
        row.used, row.known, row.stale = self.claims, row.known[: shared[best]], False
        row.high = row.high if row.known else 0
        return best, shared[best]

    def reusable(self, index: int, prompt: Sequence[int]) -> int:
        """How many of the prompt's tokens the row holds and can go on from; the prompt's last one is never counted."""
        row, most = self.rows[index], len(prompt) - 1
        same = 0
        if row.stale:
            return 0
        while same < min(most, len(row.known)) and row.known[same] == prompt[same]:
            same += 1
        if row.cut or same < len(row.known):
            same = min(same, most - 1)  # going back needs a token to run: it brings the embedding that smear reads
            if same < 1 or row.high - same > steps_back(self.setup.config, self.length, self.slack, row.high):
                return 0
        return same

    def fill(self, params: dict[str, jax.Array], index: int, tokens: Sequence[int]) -> int:
        """Runs as many of `tokens` as one fill takes into row `index`; returns how many."""
        row, (lane, place) = self.rows[index], divmod(index, self.width)
        size = next((size for size in self.fills if size >= len(tokens)), self.fills[-1])
        part = list(tokens[:size])
        idx = np.zeros(size, np.int32)
        idx[: len(part)] = part
        previous = np.int32(row.known[-1] if row.known else -1)
        cache, self.caches[lane] = self._placed(lane), None
        self.caches[lane] = compiled_fill(
            params, cache, np.int32(place), idx, np.int32(len(part)), previous, setup=self.setup, fresh=not row.known
        )
        row.known, row.cut = row.known + part, False
        row.high = max(row.high, len(row.known))
        return len(part)

    def decode(self, params: dict[str, jax.Array], draws: dict[int, Draw], steps: int) -> dict[int, list[int]]:
        """Up to `steps` more tokens in each of these rows, the others stay as they are: {row: its new tokens}.

        params: those of `lanes.turned`, or as they are.
        """
        by_lane = [
            {row: draw for row, draw in draws.items() if row // self.width == lane} for lane in range(len(self.caches))
        ]
        tasks = [partial(self._decode, params, lane, part, steps) for lane, part in enumerate(by_lane) if part]
        new = {row: tokens for found in together(tasks) for row, tokens in found.items()}
        return {row: new[row] for row in draws}

    def _decode(
        self, params: dict[str, jax.Array], lane: int, draws: dict[int, Draw], steps: int
    ) -> dict[int, list[int]]:
        """`decode` of the rows of one lane."""
        first, count = lane * self.width, self.width
        idle = Draw(0, 0, [], 0, 0, 0.0, 0, 1.0)
        every = [draws.get(first + place, idle) for place in range(count)]
        forced = np.full((count, CHUNK), -1, np.int32)
        for row, draw in draws.items():
            forced[row - first, : len(draw.forced)] = draw.forced[:CHUNK]
        column = lambda name, dtype: np.array([getattr(draw, name) for draw in every], dtype)  # noqa: E731
        longest = max(len(self.rows[row].known) for row in draws) + min(steps, CHUNK)
        cache, self.caches[lane] = self._placed(lane), None
        tokens, _, _, self.caches[lane] = compiled_decode(
            params,
            cache,
            column("newest", np.int32),
            self._keys(lane, column("seed", np.uint32)),
            forced,
            np.array([first + place in draws for place in range(count)]),
            column("limit", np.int32),
            column("held", np.int32),
            np.int32(min(steps, CHUNK)),
            (column("temperature", np.float32), column("top_k", np.int32), column("top_p", np.float32)),
            setup=self.setup,
            greedy=all(is_greedy(draw.temperature, draw.top_k) for draw in draws.values()),
            span=span_of(longest, self.length),
        )
        tokens = np.asarray(tokens)
        new = {}
        for index, draw in draws.items():
            mine = tokens[index - first]
            new[index] = mine[mine >= 0].tolist()
            row = self.rows[index]
            row.known, row.cut = [*row.known, draw.newest, *new[index][:-1]], False
            row.high = max(row.high, len(row.known))
        return new

    def _keys(self, lane: int, seeds: np.ndarray) -> jax.Array:
        """The keys of a lane's rows, made anew when another request has come."""
        known, keys = self.keys.get(lane, (None, None))
        if known is None or not np.array_equal(known, seeds):
            zeros = np.zeros(len(seeds), np.uint32)
            keys = row_keys(seeds, zeros, zeros)
            self.keys[lane] = seeds, keys
        return keys

    def _placed(self, lane: int):
        """The cache of a lane with every row at the end of what it holds."""
        rows = self.rows[lane * self.width : (lane + 1) * self.width]
        return replace(self.caches[lane], pos=np.array([len(row.known) for row in rows], np.int32))

    def wait(self, index: int) -> None:
        """Until what row `index` was last given has been run."""
        self.caches[index // self.width].pos.block_until_ready()

    def free_memory(self) -> None:
        """No row can be used from here on."""
        self.caches = []
