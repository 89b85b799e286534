"""Tokens a second of the best-fit packer and of the plain scan of the buffer, at several buffer sizes.

Both pack the same documents (lengths log-normal like web text); the rows are compared, so a ratio is only printed for
equal work. Example:

    python scripts/bench/packing.py --rows 2000 --sequence-len 2048 --buffers 100 1000 10000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import cycle

import numpy as np

from nanochat_lib.packing import BestFitPacker


def plain_scan(documents: Iterator[np.ndarray], capacity: int, buffer_size: int, count: int) -> Iterator[np.ndarray]:
    """The rule read literally: every placement looks at every document of the buffer."""
    buffer: list[np.ndarray] = []
    for _ in range(count):
        row, position = np.empty(capacity, np.int32), 0
        while position < capacity:
            while len(buffer) < buffer_size:
                buffer.append(next(documents))
            room, best, length = capacity - position, -1, 0
            for i, document in enumerate(buffer):
                if length < len(document) <= room:
                    best, length = i, len(document)
            if best < 0:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            document = buffer.pop(best)[:room]
            row[position : position + len(document)] = document
            position += len(document)
        yield row


def best_fit(documents: Iterator[np.ndarray], capacity: int, buffer_size: int, count: int) -> Iterator[np.ndarray]:
    """The same rows from `BestFitPacker`."""
    packer = BestFitPacker(capacity, buffer_size)

    def refill() -> bool:
        packer.add(next(documents))
        return True

    for _ in range(count):
        row = np.empty(capacity, np.int32)
        packer.fill_row(row, None, refill)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000, help="rows packed for each figure (default 1000)")
    parser.add_argument("--sequence-len", type=int, default=2048, help="T; a row holds T + 1 tokens (default 2048)")
    parser.add_argument("--buffers", type=int, nargs="+", default=[100, 1000, 10000], help="documents in the buffer")
    parser.add_argument("--median", type=float, default=500, help="median tokens of a document (default 500)")
    arguments = parser.parse_args()

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(arguments.median), 0.9, 20_000), 2, 50_000).astype(int)
    documents = [rng.integers(0, 32_768, n, dtype=np.int32) for n in lengths]
    capacity = arguments.sequence_len + 1
    print(f"{arguments.rows:,} rows of {capacity:,} tokens, documents of median {arguments.median:g} tokens")
    print(f"{'buffer':>8} {'plain scan':>18} {'best-fit packer':>18} {'ratio':>7}")
    for size in arguments.buffers:
        seconds, rows = {}, {}
        for pack in (plain_scan, best_fit):
            stream = pack(cycle(documents), capacity, size, arguments.rows + 1)
            first = next(stream)  # fills the buffer
            start = time.perf_counter()
            rows[pack] = [first, *stream]
            seconds[pack] = time.perf_counter() - start
        if any((a != b).any() for a, b in zip(rows[plain_scan], rows[best_fit], strict=True)):
            raise SystemExit(f"buffer {size}: the two packers disagree")
        slow, fast = (arguments.rows * capacity / seconds[pack] for pack in (plain_scan, best_fit))
        print(f"{size:>8,} {slow:>12,.0f} tok/s {fast:>12,.0f} tok/s {fast / slow:>6.1f}x")


if __name__ == "__main__":
    main()
