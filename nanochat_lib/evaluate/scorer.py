"""Likelihoods of many continuations at once: few padded shapes, all devices, logits only where they count.

A row is a prefix and one or more branches that continue it:

    prefix ids … padding | branch 1 | branch 2 | … padding
    P slots                S slots

The answers offered to one question share the question and all its shots, so these are computed once, not once an
answer. A branch sees the prefix and itself, as if it stood right behind the prefix; the result is that of separate
sequences. Only the tokens of branches go through the head, which at a vocabulary of 32,768 costs more than all blocks
of a small model.

Shapes (P, S) come from a ladder, two S for each P, and the number of rows follows from the shape. However many prompts
there are, at most two programs a rung are compiled; the real bundle of 22 tasks needs about 16.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanochat_lib import gpt
from nanochat_lib.attention import attention, masked_attention
from nanochat_lib.evaluate.spans import Span
from nanochat_lib.layers import norm
from nanochat_lib.losses import token_nll
from nanochat_lib.runtime import check_preempted
from nanochat_lib.sampling import next_power
from nanochat_lib.sizing import GPTConfig

SHORTEST = 32  # slots of a prefix
CHUNK = 512  # positions whose logits exist at a time
KERNEL_FROM = 128  # shorter prefixes are not worth a flash kernel
CPU_TOKENS = 4096  # slots of a batch: a CPU is no faster with more, and its caches are small
IN_FLIGHT = 2  # batches that the device works on while the host prepares the next


class Shape(NamedTuple):
    """Slots of a row."""

    prefix: int  # P
    branches: int  # S

    @property
    def slots(self) -> int:
        return self.prefix + self.branches


def rung(length: int) -> int:
    """The ladder's step that holds `length`: 32, 64, 128, 256, 384, 512, 768, 1024, … (powers of two, and halves)."""
    power = next_power(length, SHORTEST)
    return power * 3 // 4 if power >= 512 and length <= power * 3 // 4 else power


def branch_slots(prefix: int) -> tuple[int, int]:
    """S of a rung: a narrow one for short continuations, a wide one for several answers side by side."""
    return max(16, prefix // 16), max(64, prefix // 4)


@dataclass
class Row:
    """A prefix with the branches that one row of a batch scores: (index of the span, its ids)."""

    prefix: np.ndarray
    branches: list[tuple[int, np.ndarray]] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(len(ids) for _, ids in self.branches)


def plan_rows(prefix: np.ndarray, branches: list[tuple[int, np.ndarray]]) -> tuple[Shape, list[Row]]:
    """The cheapest shape and rows for the branches of one prefix. A branch that is too long for a rung takes a larger
    one."""
    longest, slots = max(len(ids) for _, ids in branches), rung(len(prefix))
    while longest > branch_slots(slots)[1]:
        slots = rung(slots + 1)
    best = None
    for room in branch_slots(slots):
        if longest > room:
            continue
        rows = [Row(prefix)]
        for branch in branches:
            if rows[-1].used + len(branch[1]) > room:
                rows.append(Row(prefix))
            rows[-1].branches.append(branch)
        if best is None or len(rows) * (slots + room) < len(best[1]) * best[0].slots:
            best = Shape(slots, room), rows
    return best


def rows_of(spans: Sequence[Span]) -> dict[Shape, list[Row]]:
    """All spans as rows, by shape. Neighbours in the list with the same prefix share it."""
    found: dict[Shape, list[Row]] = {}
    group: list[tuple[int, np.ndarray]] = []
    prefix = None
    for i, span in enumerate([*spans, None]):
        mine = None if span is None else np.asarray(span.ids[: span.start], np.int32)
        if group and (mine is None or not np.array_equal(mine, prefix)):
            shape, rows = plan_rows(prefix, group)
            found.setdefault(shape, []).extend(rows)
            group = []
        if span is not None:
            prefix = mine
            group.append((i, np.asarray(span.ids[span.start : span.end], np.int32)))
    return found


class Scorer:
    """Scores spans with a model of shape `config` on `devices` (of this process), each computing rows of its own.

    `tokens`: slots of a batch on one device, which bounds the memory. `backend`: attention's, for long prefixes.
    """

    def __init__(
        self, config: GPTConfig, dtype: str, backend: str, devices: tuple[jax.Device, ...], tokens: int
    ) -> None:
        self.config, self.dtype, self.backend, self.devices = config, dtype, backend, devices
        self.tokens = min(tokens, CPU_TOKENS) if devices[0].platform == "cpu" else tokens
        self.mesh = Mesh(np.asarray(devices), ("data",))
        score = functools.partial(_score, config, dtype, backend)
        if len(devices) > 1:  # every device alone: no compiler has to find out how to cut a kernel
            rows = P("data")
            score = jax.shard_map(
                score, mesh=self.mesh, in_specs=(P(), *[rows] * 6), out_specs=(rows, rows), check_vma=False
            )
        self.compiled = jax.jit(score)

    def rows(self, shape: Shape) -> int:
        """Rows of a batch, all devices together."""
        return len(self.devices) * max(1, next_power(self.tokens // shape.slots + 1) // 2)

    def place(self, params: gpt.Params) -> gpt.Params:
        """The parameters where the devices need them, matrices in the compute dtype: once, not once a batch."""
        cast = {name: leaf.astype(self.dtype) if leaf.ndim > 1 else leaf for name, leaf in params.items()}
        return jax.device_put(cast, NamedSharding(self.mesh, P()) if len(self.devices) > 1 else self.devices[0])

    def batches(self, rows: dict[Shape, list[Row]]) -> Iterator[tuple[Shape, list[Row]]]:
        """Rows in batches. What does not fill its last batch goes into a larger shape's, where that has room."""
        shapes, taken = sorted(rows, key=lambda shape: shape.slots), {shape: list(rows[shape]) for shape in rows}
        for i, shape in enumerate(shapes):
            left = len(taken[shape]) % self.rows(shape)
            for larger in shapes[i + 1 :]:
                holds = larger.prefix >= shape.prefix and larger.branches >= shape.branches
                free = -len(taken[larger]) % self.rows(larger)
                if holds and 0 < left <= free:
                    taken[larger] += taken[shape][-left:]
                    del taken[shape][-left:]
                    break
        for shape in reversed(shapes):  # the largest first: what does not fit into memory fails at once
            for first in range(0, len(taken[shape]), self.rows(shape)):
                yield shape, taken[shape][first : first + self.rows(shape)]

    def __call__(
        self,
        params: gpt.Params,
        spans: Sequence[Span],
        pad_id: int,
        advance: Callable[[int], None] = lambda spans: None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(mean nll, exact match) of every span; `params` as `place` left them. `advance(n)`: n spans more are done."""
        nll, exact = np.zeros(len(spans)), np.zeros(len(spans), bool)
        running: deque[tuple[list[Row], tuple[jax.Array, jax.Array]]] = deque()

        def collect(upto: int) -> None:
            while len(running) > upto:
                rows, out = running.popleft()
                token_nlls, hits = (np.asarray(x) for x in jax.device_get(out))
                for r, row in enumerate(rows):
                    at = 0
                    for i, ids in row.branches:
                        nll[i] = token_nlls[r, at : at + len(ids)].mean(dtype=np.float64)
                        exact[i] = hits[r, at : at + len(ids)].all()
                        at += len(ids)
                advance(sum(len(row.branches) for row in rows))

        for shape, rows in self.batches(rows_of(spans)):
            check_preempted()
            running.append((rows, self.compiled(params, *fill(shape, rows, self.rows(shape), pad_id))))
            collect(IN_FLIGHT)
        collect(0)
        return nll, exact


@functools.lru_cache(maxsize=4)
def scorer_for(
    config: GPTConfig, dtype: str = "float32", backend: str = "xla", rows: int = 32,
    devices: tuple[jax.Device, ...] | None = None,
) -> Scorer:  # fmt: skip
    """The scorer that holds `rows` prompts of the training context at a time on each of `devices` (all local ones)."""
    devices = devices or tuple(jax.local_devices())
    return Scorer(config, jnp.dtype(dtype).name, backend, devices, rows * config.sequence_len)


def fill(shape: Shape, rows: list[Row], count: int, pad_id: int) -> tuple[np.ndarray, ...]:
    """The arrays of a batch: prefix (R, P), its lengths (R,), and (R, S) each: branch ids, which branch (from 1; 0 is
    padding), the slot of the token before, the position."""
    prefix = np.full((count, shape.prefix), pad_id, np.int32)
    length = np.ones(count, np.int32)
    branch = np.full((count, shape.branches), pad_id, np.int32)
    segment, before, position = (np.zeros((count, shape.branches), np.int32) for _ in range(3))
    for r, row in enumerate(rows):
        size = len(row.prefix)
        prefix[r, :size], length[r] = row.prefix, size
        at = 0
        for number, (_, ids) in enumerate(row.branches, 1):
            part = slice(at, at + len(ids))
            branch[r, part], segment[r, part] = ids, number
            before[r, part] = shape.prefix - 1 + np.arange(at, at + len(ids))
            before[r, at] = size - 1
            position[r, part] = size + np.arange(len(ids))
            at += len(ids)
    return prefix, length, branch, segment, before, position


def _score(
    config: GPTConfig, dtype: str, backend: str, params: gpt.Params, prefix: jax.Array, length: jax.Array,
    branch: jax.Array, segment: jax.Array, before: jax.Array, position: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(nll, whether the model would have written this token) of every slot of the branches, (R, S) each."""
    model = gpt.build(config, params)
    x = _hidden(model, dtype, backend, prefix, length, branch, segment, before, position)
    rows, slots = branch.shape
    x = x.reshape(-1, x.shape[-1])
    source = (jnp.arange(rows)[:, None] * (prefix.shape[1] + slots) + before).reshape(-1)
    targets, real = branch.reshape(-1), segment.reshape(-1) > 0
    # The slots in use come first, and the loop ends with them: padding costs no logits.
    count, size = rows * slots, min(CHUNK, rows * slots)
    order = jnp.pad(jnp.argsort(~real, stable=True), (0, -count % size), constant_values=count)

    def chunk(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chosen = jax.lax.dynamic_slice(order, (i * size,), (size,))
        logits = model.logits(x[source.at[chosen].get(mode="clip")])
        target = targets.at[chosen].get(mode="clip")
        hit = jnp.argmax(logits, axis=-1) == target
        return out[0].at[chosen].set(token_nll(logits, target), mode="drop"), out[1].at[chosen].set(hit, mode="drop")

    blank = jnp.zeros(count, jnp.float32), jnp.zeros(count, bool)
    nll, exact = jax.lax.fori_loop(0, -(-real.sum() // size), chunk, blank)
    return nll.reshape(rows, slots), exact.reshape(rows, slots)


def _hidden(
    model: gpt.GPT, dtype: str, backend: str, prefix: jax.Array, length: jax.Array, branch: jax.Array,
    segment: jax.Array, before: jax.Array, position: jax.Array,
) -> jax.Array:  # fmt: skip
    """What the head reads, (R, P + S, C)."""
    (r, p), s = prefix.shape, branch.shape[1]
    tables = model.lookup(jnp.concatenate([prefix, branch], axis=1), dtype)
    x = norm(tables[gpt.WTE])
    previous = jnp.concatenate([gpt.before(x[:, :p]), jnp.take_along_axis(x, before[..., None], axis=1)], axis=1)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(p), (r, p)), position], axis=1)
    rotation = tuple(table[positions][:, None] for table in model.rotation(p + s, dtype))  # (R, 1, P + S, D/2)
    own = (segment[:, :, None] == segment[:, None, :]) & jnp.tril(jnp.ones((s, s), bool))
    seen = jnp.concatenate([jnp.broadcast_to((jnp.arange(p) < length[:, None])[:, None], (r, s, p)), own], axis=2)
    distance = position[:, :, None] - positions[:, None, :]
    backend = backend if p >= KERNEL_FROM else "xla"

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = model.config.windows[layer]
        first = attention(q[:, :, :p], k[:, :, :p], v[:, :, :p], window=window, backend=backend)
        rest = masked_attention(q[:, :, p:], k, v, seen & (distance <= window))
        return jnp.concatenate([first, rest], axis=2)

    return model.trunk(model.smear(x, previous), tables, rotation, attend)
