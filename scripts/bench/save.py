"""How long a checkpoint keeps training waiting: written at once, and in the background.

Steps of a matrix product run while a state of `--mb` megabytes is saved into `--folder`; `--slow` lets the disk take
that many seconds longer. Printed are the seconds in which no step could run, and the memory that a save takes. Example:

    python scripts/bench/save.py --mb 400 --slow 2
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from nanochat_lib import arrays
from nanochat_lib.checkpoint import Saver

LEAVES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="size of the state")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that the disk takes longer")
    parser.add_argument("--step-ms", type=int, default=50, help="about how long a step takes")
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    args = parser.parse_args()

    side = int((args.mb * 1e6 / LEAVES / 4) ** 0.5)
    state = {f"w{i}": jax.random.normal(jax.random.key(i), (side, side)) for i in range(LEAVES)}
    size = sum(leaf.nbytes for leaf in state.values())
    work = jnp.eye(512)
    advance = jax.jit(lambda state, x: ({n: w * 0.999 for n, w in state.items()}, x @ x), donate_argnums=0)
    product = jax.jit(lambda x: x @ x)
    state, work = jax.block_until_ready(advance(state, work))

    def step(state: dict, work: jax.Array) -> tuple[dict, jax.Array]:
        end = time.perf_counter() + args.step_ms / 1e3
        state, work = jax.block_until_ready(advance(state, work))
        while time.perf_counter() < end:
            work = product(work).block_until_ready()
        return state, work

    def slowly(place: Path, leaves: dict, copied: threading.Event) -> None:
        def pause() -> None:
            copied()
            time.sleep(args.slow)

        plain(place, leaves, pause)

    plain, arrays.write = arrays.write, slowly
    blocked = {}
    for way in ("at once", "in the background"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            saver, memory = Saver(folder), Memory()
            for warm in (True, False):  # the first save of a process loads code
                steps, memory.peak = 0, memory.now()
                before, began = memory.now(), time.perf_counter()
                saver.save(int(not warm), state, {})
                if way == "at once":
                    saver.settle()
                blocked[way] = time.perf_counter() - began
                while saver.busy():
                    state, work = step(state, work)
                    steps += 1
                took = time.perf_counter() - began
                saver.settle()
            memory.end()
        print(
            f"{way:18s} {size / 1e6:.0f} MB: training waits {blocked[way]:.2f} s of {took:.2f} s, {steps} steps "
            f"meanwhile, {max(memory.peak - before, 0) / size:.2f} × the state more memory"
        )
    print(f"ratio {blocked['at once'] / blocked['in the background']:.1f}")


class Memory(threading.Thread):
    """Watches how much memory this process has."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.on = psutil.Process(), 0, True
        self.start()

    def now(self) -> int:
        return self.process.memory_info().rss

    def run(self) -> None:
        while self.on:
            self.peak = max(self.peak, self.now())
            time.sleep(0.005)

    def end(self) -> None:
        self.on = False
        self.join()


if __name__ == "__main__":
    main()
