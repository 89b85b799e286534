"""What a function costs: time beside another's, equations, FLOPs, bytes, memory. Nothing in absolute seconds.

Time is noisy on a shared machine, so processor time counts (of all threads), not the clock on the wall; two functions
take turns, the best of several turns counts for each, and a ratio above the limit is measured again before it is
believed: noise only ever makes a turn slower.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping

from nanochat_lib.course.values import fresh, is_array

# Windows counts processor time in steps of 16 ms, which is too coarse.
clock = time.perf_counter if sys.platform == "win32" else time.process_time
TURN = 0.004  # seconds that one turn should last, so that the clock's own error is small
STEP = 0.02  # seconds of processor time from which its own steps are small; below, this thread's count
TURNS = 5
FAR = 3  # a ratio that many times below the limit at the first look is believed
TRIES = 4  # times that a ratio above the limit is measured anew
NAMES = {
    "time": "time",
    "jaxpr": "equations in the jaxpr",
    "flops": "FLOPs",
    "bytes": "bytes read and written",
    "temp_bytes": "bytes of scratch memory",
    "peak_bytes": "bytes of memory at the peak",
}

Bound = Callable[..., object]  # a function with the exercise's harness around it: (*args) -> result


def over_budget(
    mine: Bound, theirs: Bound | None, args: tuple, limits: Mapping[str, float], mutates: bool
) -> list[str]:
    """What is over its limit, a sentence each. `mine` is measured, `theirs` is what ratios compare with."""
    return over(measured(mine, theirs, args, limits, mutates), limits)


def measured(
    mine: Bound, theirs: Bound | None, args: tuple, limits: Mapping[str, float], mutates: bool
) -> dict[str, tuple[float, float]]:
    """Limit -> (what `mine` uses, what `theirs` uses, or 0 where nothing is compared)."""
    found = {}
    for limit, allowed in limits.items():
        name = limit.removesuffix("_ratio")
        if name == "time":
            found[limit] = time_ratio(mine, theirs, args, allowed, mutates), 1.0
        else:
            measure = MEASURES[name]
            found[limit] = measure(mine, args), measure(theirs, args) if limit != name else 0.0
    return found


def over(found: Mapping[str, tuple[float, float]], limits: Mapping[str, float]) -> list[str]:
    """What is over its limit, a sentence each."""
    lines = []
    for limit, allowed in limits.items():
        used, other = found[limit]
        words = NAMES[limit.removesuffix("_ratio")]
        if limit == "time":
            if used > allowed:
                took = f"it takes {_times(used)} the time of the library's function"
                lines.append(f"{took}; allowed are {allowed:g} times")
        elif limit.endswith("_ratio"):
            if used > allowed * max(other, 1):
                both = f"{used:,.0f} {words}; the library's function has {other:,.0f}"
                lines.append(f"{both}, and {allowed:g} times that is allowed")
        elif used > allowed:
            lines.append(f"{used:,.0f} {words}; allowed are {allowed:,.0f}")
    return lines


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def time_ratio(mine: Bound, theirs: Bound, args: tuple, allowed: float, mutates: bool = False) -> float:
    """Time of `mine` over time of `theirs`; measured again, more patiently, while it is above `allowed`."""
    clocks = [_Clock(mine, args, mutates), _Clock(theirs, args, mutates)]
    ratio = clocks[0].first / clocks[1].first
    if ratio < allowed / FAR:
        return ratio  # so far below that noise cannot be the reason
    for attempt in range(TRIES):
        for _ in range(TURNS + 2 * attempt):
            for one in clocks:
                one.turn()
        ratio = clocks[0].best / clocks[1].best
        if ratio <= allowed or ratio > 20 * allowed:
            break
    return ratio


class _Clock:
    """Times one function in turns of several calls; `best` is the least seconds per call so far."""

    def __init__(self, fn: Bound, args: tuple, mutates: bool) -> None:
        self.fn, self.args, self.mutates = fn, args, mutates
        out = wait(fn(*fresh(args)))  # whatever compiles, compiles here
        self.wait = wait if _in_background(out) else (lambda out: out)  # looking through a long list takes time, too
        self.first = min(self._once(fresh(args)) for _ in range(3))  # one alone may have been interrupted
        self.calls = 1 if mutates else max(1, min(int(TURN / self.first), 2000))
        self.best = float("inf")

    def _once(self, args: tuple) -> float:
        began = _now()
        self.wait(self.fn(*args))
        return self._since(began)

    def _since(self, began: tuple[float, float, float]) -> float:
        """Seconds. Under a limit on processor time Linux moves that clock in steps of some 4 ms: it may stand still."""
        busy, thread, wall = (now - then for now, then in zip(_now(), began, strict=True))
        if busy < STEP and clock is time.process_time:
            busy = thread if self.wait is not wait else wall
        return max(busy, 1e-9)

    def turn(self) -> None:
        fn, args = self.fn, fresh(self.args)
        began = _now()
        for _ in range(self.calls):
            self.wait(fn(*args))
        self.best = min(self.best, self._since(began) / self.calls)


def _now() -> tuple[float, float, float]:
    """Of all threads, of this one, on the wall."""
    return clock(), time.thread_time(), time.perf_counter()


def _in_background(result: object) -> bool:
    """Whether a result holds arrays that JAX may still be computing."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))


def wait(result: object) -> object:
    """Waits for what JAX still computes in the background."""
    if "jax" in sys.modules:
        sys.modules["jax"].block_until_ready(result)
    return result


def _traceable(fn: Bound, args: tuple) -> tuple[Callable, tuple]:
    """`fn` as a function of its array arguments alone (pytrees of arrays count), the others held fixed."""
    import jax

    def dynamic(arg: object) -> bool:
        leaves = jax.tree.leaves(arg)
        return bool(leaves) and all(is_array(leaf) for leaf in leaves)

    places = [i for i, arg in enumerate(args) if dynamic(arg)]

    def traced(*arrays: object) -> object:
        full = list(args)
        for i, array in zip(places, arrays, strict=True):
            full[i] = array
        return fn(*full)

    return traced, tuple(args[i] for i in places)


def equations(fn: Bound, args: tuple) -> int:
    """Equations of the function's jaxpr, nested ones counted; a call such as jit counts only what it holds."""
    import jax

    traced, arrays = _traceable(fn, args)
    return _count(jax.make_jaxpr(traced)(*arrays).jaxpr)


def _count(jaxpr: object) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [sub for value in equation.params.values() for sub in _jaxprs(value)]
        wrapper = inner and any(
            word in equation.primitive.name for word in ("jit", "call", "custom", "remat", "checkpoint")
        )
        total += sum(map(_count, inner)) + (0 if wrapper else 1)
    return total


def _jaxprs(value: object) -> list:
    """The jaxprs inside one parameter of an equation."""
    if hasattr(value, "eqns"):
        return [value]
    if hasattr(value, "jaxpr"):
        return _jaxprs(value.jaxpr)
    if isinstance(value, (list, tuple)):
        return [sub for item in value for sub in _jaxprs(item)]
    return []


def _compiled(fn: Bound, args: tuple) -> object:
    import jax

    traced, arrays = _traceable(fn, args)
    return jax.jit(traced).lower(*arrays).compile()


def _cost(fn: Bound, args: tuple, name: str) -> float:
    cost = _compiled(fn, args).cost_analysis()
    cost = cost[0] if isinstance(cost, (list, tuple)) else cost
    return float((cost or {}).get(name, 0.0))


def flops(fn: Bound, args: tuple) -> float:
    """Floating-point operations of one call, as the compiler counts them."""
    return _cost(fn, args, "flops")


def bytes_accessed(fn: Bound, args: tuple) -> float:
    """Bytes that one call reads and writes, as the compiler counts them."""
    return _cost(fn, args, "bytes accessed")


def temp_bytes(fn: Bound, args: tuple) -> float:
    """Scratch memory of the compiled function."""
    return float(_compiled(fn, args).memory_analysis().temp_size_in_bytes)


def peak_bytes(fn: Bound, args: tuple) -> float:
    """Highest Python and numpy memory during one call, above what was there before it."""
    copies = fresh(args)
    outer = tracemalloc.is_tracing()
    if not outer:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        fn(*copies)
        return float(tracemalloc.get_traced_memory()[1] - before)
    finally:
        if not outer:
            tracemalloc.stop()


MEASURES = {
    "jaxpr": equations,
    "flops": flops,
    "bytes": bytes_accessed,
    "temp_bytes": temp_bytes,
    "peak_bytes": peak_bytes,
}
