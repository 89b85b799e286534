"""Public checks, hints, quizzes and predictions of chapter 11: scale and cost."""

from __future__ import annotations

import math

import numpy as np

from nanochat_lib import budget, scaling, sizing
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    example,
    prop,
    raises,
    reference,
    sign,
    suspect,
)
from nanochat_lib.errors import UserError

# ---- batch size


def some_tokens(rng: np.random.Generator) -> tuple[float, float]:
    reference_tokens = float(rng.uniform(5e8, 2e9))
    return float(reference_tokens * 10 ** rng.uniform(-1.5, 2)), reference_tokens


def _other_batch(power: float = 0.383, rounding: object = round, base: int = sizing.REFERENCE_BATCH) -> object:
    return lambda tokens, reference: 2 ** rounding(math.log2(base * (tokens / reference) ** power))


def _batches_shown() -> str:
    lines = [f"ratio {r:>4}: {sizing.batch_for(r * 1e9, 1e9):>9,} tokens a step" for r in (0.1, 0.5, 1, 3, 10, 30)]
    return "tokens of the run / tokens of the reference\n" + "\n".join(lines)


# ---- the law

GRID = np.geomspace(0.02, 1.0, 60)


def some_runs(rng: np.random.Generator, count: int = 7, floor: float | None = None, noise: float = 0.02) -> tuple:
    """(x, y, exponents): runs around a law."""
    x = np.sort(10 ** rng.uniform(9, 12, count))
    floor = rng.uniform(0.5, 1.2) if floor is None else floor
    y = floor + rng.uniform(1, 3) * (x / x[0]) ** -rng.uniform(0.15, 0.6) + noise * rng.standard_normal(count)
    return x, y, GRID


def no_floor_needed(rng: np.random.Generator) -> tuple:
    """Runs that lie on a law whose floor is below zero."""
    x = np.geomspace(1e9, 1e12, 6)
    return x, 3 * (x / x[0]) ** -0.15 - rng.uniform(0.25, 0.35), np.array([0.05, 0.15, 1.0])


def as_numbers(fn: object, *args: object) -> list[float]:
    """Floor and exponent as they are, the scale as what stands above the floor at the first x."""
    floor, scale, exponent = fn(*args)
    return [float(floor), float(scale) * float(args[0][0]) ** -float(exponent), float(exponent)]


def _fit(x: np.ndarray, y: np.ndarray, exponents: np.ndarray, kind: str) -> tuple[float, float, float]:
    """Wrong ways to fit."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if kind == "no floor":
        law = min(
            ((0.0, float(power @ y / (power @ power)), float(a)) for a in exponents for power in [(x / x.min()) ** -a]),
            key=lambda f: np.sum((f[1] * (x / x.min()) ** -f[2] - y) ** 2),
        )
        return law[0], law[1] * x.min() ** law[2], law[2]
    best, least = None, np.inf
    for a in exponents:
        power = (x / x.min()) ** -a
        tilt, floor = np.polyfit(power, y, 1)
        if kind == "clipped":
            floor = max(floor, 0.0)
        if kind == "last":
            error = -a
        else:
            error = np.sum((floor + tilt * power - y) ** 2)
        if error < least:
            least, best = error, (float(floor), float(tilt * x.min() ** a), float(a))
    return best


def _law_shown() -> object:
    from nanochat_lib.report.plots import BLUE, ORANGE, new_figure

    x, y, _ = some_runs(np.random.default_rng(3))
    law = scaling.fit_power_law(x, y, GRID)
    figure, ax = new_figure(height=2.3, width=5)
    wide = np.geomspace(x.min() / 2, x.max() * 100, 100)
    ax.plot(wide, law(wide), color=BLUE)
    ax.plot(x, y, "o", color=ORANGE)
    ax.axhline(law.floor, color=BLUE, linestyle=":")
    ax.set_xscale("log")
    ax.set_title(f"floor {law.floor:.3f}, exponent {law.exponent:.3f}")
    return figure


# ---- its uncertainty


def runs_and_draws(rng: np.random.Generator) -> tuple:
    x, y, _ = some_runs(rng)
    return x, y, 12, int(rng.integers(0, 1000))


def as_values(fn: object, x: np.ndarray, y: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """(draws, 3): each law's values at the smallest x, the largest, and a hundred times beyond."""
    laws = np.asarray(fn(x, y, draws, seed), np.float64)
    if laws.ndim != 2 or laws.shape[1] != 3:
        raise ValueError(
            f"the result has shape {laws.shape}, expected ({draws}, 3): floor, scale, exponent of each draw"
        )
    at = np.array([min(x), max(x), 100 * max(x)])
    return np.array([floor + scale * at**-exponent for floor, scale, exponent in laws])


def _draws(x: np.ndarray, y: np.ndarray, draws: int, seed: int, kind: str) -> np.ndarray:
    """Wrong ways to draw."""
    law, rng, n = scaling.fit_power_law(x, y), np.random.default_rng(seed), len(y)
    stretch = 1.0 if kind == "narrow" else np.sqrt(n / (n - 3))
    residuals = (y - law(x)) * stretch
    laws = []
    for _ in range(draws):
        if kind == "permuted":
            new = law(x) + rng.permutation(residuals)
        elif kind == "around y":
            new = y + rng.choice(residuals, n)
        elif kind == "one":
            new = law(x) + rng.choice(residuals)
        else:
            new = law(x) + rng.choice(residuals, n)
        laws.append(scaling.fit_power_law(x, new))
    return np.array(laws)


def _spread(laws: np.ndarray, x: np.ndarray) -> np.ndarray:
    at = np.array([x.max(), 1e3 * x.max()])
    return np.std([scaling.PowerLaw(*law)(at) for law in laws], axis=0)


def _grows(out: object, x: np.ndarray, y: np.ndarray, draws: int, seed: int) -> str:
    laws = np.asarray(out, np.float64)
    if laws.shape != (draws, 3):
        return f"shape {laws.shape}, expected ({draws}, 3)"
    if len({tuple(law) for law in laws.tolist()}) < draws // 2:
        return "most laws are the same: draw anew for each of them"
    near, far = _spread(laws, x)
    return "" if far > near > 0 else f"the laws spread by {near:.3g} at the largest run and by {far:.3g} far beyond it"


def _draws_shown() -> object:
    from nanochat_lib.report.plots import BLUE, ORANGE, new_figure

    x, y, _ = some_runs(np.random.default_rng(5))
    laws = scaling.bootstrap(x, y, 100, 0)
    wide = np.geomspace(x.min(), x.max() * 1e3, 60)
    low, high = scaling.band(laws, wide)
    figure, ax = new_figure(height=2.3, width=5)
    ax.fill_between(wide, low, high, color=BLUE, alpha=0.25)
    ax.plot(x, y, "o", color=ORANGE)
    ax.set_xscale("log")
    ax.set_title("80 of 100 laws lie in the band")
    return figure


# ---- checkpoints and failures


def _interval_shown() -> str:
    lines = []
    for save in (10, 120):
        for hours in (2, 12):
            minutes = budget.checkpoint_interval(save, hours * 3600) / 60
            lines.append(f"save {save:>3} s, a failure every {hours:>2} h: every {minutes:.1f} min")
    return "\n".join(lines)


def some_job(rng: np.random.Generator) -> tuple:
    """(work, interval, save, setup, mtbf, wait) in seconds, with a last piece that is shorter."""
    work, mtbf = rng.uniform(2e4, 6e4), rng.uniform(4e3, 4e4)
    return (
        float(work), float(rng.uniform(0.03, 0.2) * work), float(rng.uniform(20, 200)), float(rng.uniform(100, 900)),
        float(mtbf), float(rng.uniform(100, 3000)),
    )  # fmt: skip


def _costs(work: float, interval: float, save: float, setup: float, mtbf: float, wait: float, kind: str) -> tuple:
    """Wrong ways to add up."""
    whole, rest = divmod(work, interval)
    u = budget.uninterrupted
    start = u(setup, mtbf)
    saved = 0 if kind == "no save" else save
    piece = lambda t: u(setup + t + saved, mtbf) - start  # noqa: E731
    if kind == "no setup":
        piece = lambda t: u(t + save, mtbf)  # noqa: E731
    if kind == "setup each":
        piece = lambda t: u(setup + t + save, mtbf)  # noqa: E731
    paid = start + whole * piece(interval)
    if rest and kind != "no rest":
        paid += piece(interval if kind == "whole rest" else rest)
    machines = paid / mtbf if kind == "failures" else 1 + paid / mtbf
    if kind == "wall":
        machines = 1 + work / mtbf
    return paid + (0 if kind == "no wait" else machines * wait), paid, machines


def _cost_shown() -> str:
    found = budget.expected_cost(36000, 1800, 60, 600, 4 * 3600, 1200)
    return (
        "10 h of work, a save of 1 min every 30 min, 10 min of set-up, a failure every 4 h, 20 min of waiting:\n"
        f"wall {found.wall / 3600:.2f} h, paid {found.paid / 3600:.2f} h, machines {found.machines:.2f}"
    )


def some_machines(rng: np.random.Generator, mean: float = 60.0) -> tuple:
    """(work, interval, save, setup, lives, waits): more machines than are needed, some of them gone at once."""
    return (
        100.0, 15.0, 2.0, 4.0, [*np.round(rng.exponential(mean, 40), 1).tolist(), 200.0],
        np.round(rng.exponential(10, 41), 1).tolist(),
    )  # fmt: skip


def _replayed(
    work: float, interval: float, save: float, setup: float, lives: list, waits: list, kind: str
) -> tuple[float, float, int]:
    """Wrong ways to run."""
    done = wall = paid = 0.0
    for machines, (life, wait) in enumerate(zip(lives, waits, strict=True), 1):
        clock = setup if kind != "setup once" or machines == 1 else 0.0
        while done < work:
            piece = interval if kind == "whole rest" else min(interval, work - done)
            cost = piece + (0.0 if kind == "no save" else save)
            if clock + cost > life:
                if kind == "keeps" and clock < life:
                    done += min(life - clock, piece)
                break
            clock += cost
            done += piece
        spent = clock if done >= work else life
        if kind == "life":
            spent = life
        wall, paid = wall + wait + spent, paid + spent + (wait if kind == "paid wait" else 0.0)
        if kind == "no wait":
            wall -= wait
        if done >= work:
            return wall, paid, machines
        if kind == "from zero":
            done = 0.0
    raise UserError("not enough")


def _same_cost(**kinds: str) -> list:
    """Causes of `replay` by kind."""
    return [
        suspect(words, lambda *args, kind=kind: budget.Cost(*_replayed(*args, kind=kind)))
        for kind, words in kinds.items()
    ]


def _run_shown() -> str:
    found = budget.replay(25, 10, 1, 2, [18, 100], [4, 6])
    return (
        "work 25, pieces of 10, save 1, set-up 2; machines live 18 and 100, waits 4 and 6\n"
        "first: set-up 2, piece and save 11, then 5 that are lost. second: set-up 2, 11, and 5 + 1\n"
        f"wall {found.wall}, paid {found.paid}, machines {found.machines}"
    )


# ---- symptoms


def some_log(rng: np.random.Generator, count: int = 40) -> tuple[list[dict], float]:
    """(records, patience): a log with restarts, long gaps and new epochs at random places."""
    records, step, time, epoch = [], 0, 1000.0, 1
    for _ in range(count):
        step += 10
        time += 30 + float(rng.uniform(-5, 5))
        if rng.random() < 0.08:
            time += float(rng.choice([200, 900, 4000]))
        if rng.random() < 0.08:
            step = max(10, step - int(rng.integers(1, 6)) * 10)
        if rng.random() < 0.08:
            epoch += 1
        records.append({"step": step, "time": time, "epoch": epoch})
    return records, 10.0


def symptoms_slowly(records: list[dict], patience: float) -> list[tuple[str, int]]:
    """`symptoms`, one record at a time. Also its fallback."""
    gaps = sorted(b["time"] - a["time"] for a, b in zip(records, records[1:], strict=False))
    middle = len(gaps) // 2
    usual = 0.0 if not gaps else gaps[middle] if len(gaps) % 2 else (gaps[middle - 1] + gaps[middle]) / 2
    found = []
    for i in range(1, len(records)):
        before, now = records[i - 1], records[i]
        if now["step"] <= before["step"]:
            found.append(("lost", now["step"]))
        if now["time"] - before["time"] > patience * usual:
            found.append(("stalled", now["step"]))
        if now["epoch"] > before["epoch"]:
            found.append(("wrapped", now["step"]))
    return found


def _said(records: list[dict], patience: float, kind: str) -> list[tuple[str, int]]:
    """Wrong ways to read a log."""
    gaps = [b["time"] - a["time"] for a, b in zip(records, records[1:], strict=False)]
    usual = float(np.mean(gaps) if kind == "mean" else np.median(gaps)) if gaps else 0.0
    found = []
    for before, now in zip(records, records[1:], strict=False):
        step = before["step"] if kind == "before" else now["step"]
        if now["step"] < before["step"] or (kind != "equal" and now["step"] == before["step"]):
            found.append(("lost", step))
        if now["time"] - before["time"] > (patience if kind == "seconds" else patience * usual):
            found.append(("stalled", step))
        if now["epoch"] > (1 if kind == "epoch" else before["epoch"]):
            found.append(("wrapped", step))
    return found


def _symptoms_shown() -> str:
    log = [(10, 0, 1), (20, 30, 1), (30, 60, 1), (40, 900, 1), (30, 930, 1), (40, 960, 2)]
    records = [{"step": s, "time": float(t), "epoch": e} for s, t, e in log]
    return f"(step, time, epoch): {log}\nsymptoms with patience 10: {symptoms_slowly(records, 10.0)}"


EXERCISES = [
    Exercise(
        "scale.batch_for",
        cases=[
            example("the reference itself", (1_321_210_944, 1_321_210_944), 524_288),
            example("d24 at ratio 12", (8_757_727_488, 1_321_210_944), 1_048_576),
            example("d4 at ratio 12", (138_412_608, 1_321_210_944), 262_144),
            reference("any run", some_tokens),
        ],
        causes=[
            suspect("the batch grows as tokens^0.383, not in proportion to the tokens", _other_batch(1.0)),
            suspect("the exponent is 0.383: a square root is steeper", _other_batch(0.5)),
            suspect(
                "to the *nearest* power of two in the logarithm: round, neither up nor down",
                _other_batch(0.383, math.floor),
            ),
            suspect(
                "to the *nearest* power of two in the logarithm: round, neither up nor down",
                _other_batch(0.383, math.ceil),
            ),
            suspect("the shorter run takes the smaller batch: you divided the wrong way round", _other_batch(-0.383)),
            suspect(
                "the power of two stands in the exponent: 2 ** …",
                lambda t, r: round(math.log2(2**19 * (t / r) ** 0.383)),
            ),
            suspect("the reference run has 2^19 tokens a step", _other_batch(base=2**20)),
        ],
        hints=[
            "Three steps: how many times the reference's tokens, to the power 0.383, times 2^19.",
            "Then the logarithm to base 2, `round`, and 2 to that power. Python's integers keep it exact.",
            _batches_shown,
        ],
    ),
    Exercise(
        "scale.fit_power_law",
        call=as_numbers,
        cases=[
            example(
                "a law without noise",
                lambda: (
                    np.array([1.0, 4.0, 16.0, 64.0]),
                    1 + 2 * np.array([1.0, 0.5, 0.25, 0.125]),
                    np.array([0.3, 0.5, 0.9]),
                ),
                [1.0, 2.0, 0.5],
                atol=1e-6,
            ),
            reference("noisy runs", some_runs, rtol=1e-6),
            reference("runs that ask for a floor below zero", no_floor_needed, rtol=1e-6),
        ],
        causes=[
            suspect(
                "you fit no floor: y - floor is the power law, not y",
                lambda x, y, e: _fit(x, y, e, "no floor"),
            ),
            suspect(
                "the floor is below zero: no text has less than nothing; there the best law *without* a floor "
                "stands in",
                lambda x, y, e: _fit(x, y, e, "free"),
            ),
            suspect(
                "a floor that is cut off at 0 needs another scale: that of the best law through zero",
                lambda x, y, e: _fit(x, y, e, "clipped"),
            ),
            sign(
                "the exponent is not the best of the list: compare the squared errors of all of them",
                lambda got, want, *_: abs(got[2] - want[2]) > 1e-9,
            ),
            sign(
                "exponent and floor are right, the scale is not: it is what stands above the floor at x = 1",
                lambda got, want, *_: abs(got[0] - want[0]) < 1e-9 and abs(got[1] - want[1]) > 1e-6,
            ),
        ],
        hints=[
            "Fix the exponent, and y is a straight line in x^-exponent. Do that for all exponents, keep the best.",
            "With `power = (x / x.min()) ** -exponents[:, None]`, a row an exponent: slope = Σ(power - its mean)·y / "
            "Σ(power - its mean)², floor = mean of y - slope · mean of power. Where the floor is below 0: floor "
            "0, scale "
            "Σ power·y / Σ power². At the end scale by x.min() ** exponent, because you divided x by its smallest.",
            _law_shown,
        ],
    ),
    Exercise(
        "scale.bootstrap",
        cases=[
            reference("twelve draws", runs_and_draws, call=as_values, rtol=1e-7),
            prop(
                "the laws part beyond the runs",
                lambda rng: (*some_runs(rng)[:2], 30, int(rng.integers(0, 99))),
                _grows,
            ),
            example("three points", (np.array([1.0, 2.0, 4.0]), np.array([3.0, 2.0, 1.5]), 5, 0), raises(UserError)),
        ],
        causes=[
            sign(
                "three points leave no error to draw from: a UserError",
                lambda got, want, x, y, draws, seed: len(x) < 4,
            ),
            suspect(
                "a fit of three numbers makes errors too small: stretch the residuals by √(n / (n - 3))",
                lambda *a: _draws(*a, kind="narrow"),
            ),
            suspect(
                "the residuals go onto the *fitted* values; y has its errors already",
                lambda *a: _draws(*a, kind="around y"),
            ),
            suspect("draw with replacement: `rng.choice`, not a permutation", lambda *a: _draws(*a, kind="permuted")),
            suspect("each point gets a residual of its own: draw n of them", lambda *a: _draws(*a, kind="one")),
            sign(
                "draw all of a law's residuals with one `rng.choice(residuals, n)`, and make the generator once, "
                "from `seed`",
                lambda got, want, *_: want is not None and got.shape == want.shape,
            ),
        ],
        hints=[
            "Fit once. What the fit leaves over are the errors; shuffle such errors onto the fitted values, fit again.",
            "What is left over, stretched, is what you draw from: as many as there are points, with replacement, "
            "by one "
            "`np.random.default_rng(seed)` for all draws. Add to the fitted values, fit again. n below 4: raise "
            "UserError.",
            _draws_shown,
        ],
    ),
    Exercise(
        "scale.checkpoint_interval",
        cases=[
            example("a save of 50 s, a failure every 10,000 s", (50.0, 10_000.0), 1000.0),
            reference("any", lambda rng: (float(rng.uniform(5, 300)), float(rng.uniform(2e3, 9e4)))),
        ],
        causes=[
            suspect(
                "a failure costs *half* an interval on average: there is a 2 under the root",
                lambda s, m: math.sqrt(s * m),
            ),
            suspect("it is the root of 2·save·mtbf", lambda s, m: 2 * s * m),
            suspect(
                "the interval is longer where saving costs more: save stands beside mtbf, not below it",
                lambda s, m: math.sqrt(2 * m / s),
            ),
            suspect(
                "half an interval is lost, so the 2 stands above: √(2·save·mtbf)", lambda s, m: math.sqrt(s * m / 2)
            ),
        ],
        hints=[
            "Per second of work: save / t for saving, and 1 / mtbf failures that cost t / 2 each. Where is the "
            "sum least?",
            "Its derivative is - save / t² + 1 / (2·mtbf). Set it to 0.",
            _interval_shown,
        ],
    ),
    Exercise(
        "scale.expected_cost",
        cases=[
            example("no failure at all", (1000.0, 300.0, 10.0, 50.0, math.inf, 7.0), budget.Cost(1097.0, 1090.0, 1.0)),
            reference("a job", some_job),
            reference(
                "a last piece that is whole",
                lambda rng: (9000.0, 900.0, 60.0, 300.0, float(rng.uniform(3e3, 3e4)), 600.0),
            ),
        ],
        causes=[
            suspect("the last, shorter piece is missing", lambda *a: budget.Cost(*_costs(*a, kind="no rest"))),
            suspect(
                "the last piece is only as long as what is left", lambda *a: budget.Cost(*_costs(*a, kind="whole rest"))
            ),
            suspect(
                "a piece is done when it is *saved*: the save must be survived, too",
                lambda *a: budget.Cost(*_costs(*a, kind="no save")),
            ),
            suspect(
                "each failure costs a set-up: survive setup + piece, less the set-up that is not repeated",
                lambda *a: budget.Cost(*_costs(*a, kind="no setup")),
            ),
            suspect(
                "a piece on a machine that runs needs no set-up: take uninterrupted(setup) off again",
                lambda *a: budget.Cost(*_costs(*a, kind="setup each")),
            ),
            suspect(
                "the first machine is waited for as well: 1 + paid / mtbf machines",
                lambda *a: budget.Cost(*_costs(*a, kind="failures")),
            ),
            suspect(
                "waiting belongs to the wall time: one wait a machine",
                lambda *a: budget.Cost(*_costs(*a, kind="no wait")),
            ),
            suspect(
                "machines fail in all *paid* time, repeated work and set-ups included",
                lambda *a: budget.Cost(*_costs(*a, kind="wall")),
            ),
        ],
        hints=[
            "First the paid time: one set-up, then the pieces, each of which may have to be repeated. Then the "
            "machines: "
            "one, and one more for each failure; failures come at a rate of 1 / mtbf while you pay.",
            "`uninterrupted(setup, mtbf)` for the start. A piece of t costs `uninterrupted(setup + t + save, "
            "mtbf)` less "
            "that start. `divmod(work, interval)` gives the whole pieces and the rest.",
            _cost_shown,
        ],
    ),
    Exercise(
        "scale.replay",
        cases=[
            example("two machines", (25, 10, 1, 2, [18, 100], [4, 6]), budget.Cost(47.0, 37.0, 2)),
            example("one that lives exactly long enough", (25, 10, 1, 2, [30], [5]), budget.Cost(35.0, 30.0, 1)),
            example("gone while it was set up", (25, 10, 1, 2, [1, 40], [3, 5]), budget.Cost(39.0, 31.0, 2)),
            reference("many machines", some_machines),
            example("too few machines", (25, 10, 1, 2, [14, 12], [0, 0]), raises(UserError)),
        ],
        causes=[
            sign(
                "when the machines are used up and work is left: a UserError",
                lambda got, want, w, i, s, u, lives, waits: len(lives) == 2 and lives[1] == 12,
            ),
            *_same_cost(
                **{
                    "no save": "a piece counts when it is saved: its save takes machine time as well",
                    "keeps": "what a machine did since its last save is lost with it",
                    "from zero": "checkpoints survive: the next machine goes on from the last save",
                    "setup once": "every machine is set up, not only the first",
                    "life": "when the work is done the machine is given back: pay its clock, not its whole life",
                    "paid wait": "waiting costs time, not money",
                    "no wait": "waiting belongs to the wall time",
                    "whole rest": "the last piece is only as long as what is left of the work",
                }
            ),
            sign(
                "a machine that lives exactly long enough has made it",
                lambda got, want, w, i, s, u, lives, waits: lives == [30],
            ),
        ],
        hints=[
            "A loop over machines, and inside of it a loop over pieces. Keep three sums: work done, wall time, "
            "paid time.",
            "Inside: clock = setup; piece = min(interval, work - done); if clock + piece + save > life, this "
            "machine is "
            "over. A machine costs its clock when the work is done, else its life; the wait before it goes to "
            "wall alone.",
            _run_shown,
        ],
    ),
    Exercise(
        "scale.symptoms",
        cases=[
            example(
                "one of each",
                (
                    [
                        {"step": s, "time": t, "epoch": e}
                        for s, t, e in (
                            (10, 0.0, 1),
                            (20, 30.0, 1),
                            (30, 60.0, 1),
                            (40, 900.0, 1),
                            (30, 930.0, 1),
                            (40, 960.0, 2),
                        )
                    ],
                    10.0,
                ),
                [("stalled", 40), ("lost", 30), ("wrapped", 40)],
            ),
            example("a healthy log", ([{"step": s, "time": 3.0 * s, "epoch": 1} for s in range(0, 90, 10)], 5.0), []),
            reference("a random log", some_log, against=symptoms_slowly),
        ],
        causes=[
            suspect("the same step twice in a row is lost work, too", lambda *a: _said(*a, kind="equal")),
            suspect(
                "compare each epoch with the record before: one wrap is one symptom", lambda *a: _said(*a, kind="epoch")
            ),
            suspect(
                "the median of the gaps, not their mean: one long gap would hide behind itself",
                lambda *a: _said(*a, kind="mean"),
            ),
            suspect("patience counts in usual gaps, not in seconds", lambda *a: _said(*a, kind="seconds")),
            suspect("name the step of the *later* record", lambda *a: _said(*a, kind="before")),
            sign(
                "the order is that of the log; within one record lost, stalled, wrapped",
                lambda got, want, *_: isinstance(got, list) and sorted(got) == sorted(want),
            ),
            sign(
                "one kind is never found, or found too often: test each record for all three, not for the first "
                "that fits",
                lambda got, want, *_: isinstance(got, list) and len(got) != len(want),
            ),
        ],
        hints=[
            "All three are seen in two neighbouring records. The usual gap is one number for the whole log.",
            "`np.median([b['time'] - a['time'] for a, b in zip(records, records[1:])])`, then a second loop over "
            "the same "
            "pairs with three ifs, no else.",
            _symptoms_shown,
        ],
        fallback=symptoms_slowly,
    ),
]

CAUSES = {
    "durable": "the checkpoints stood on the machine's own disk",
    "wrapped": "the data ran out and began again",
    "idle": "nobody gave the machine back",
    "damaged": "the newest checkpoint was not written to its end",
    "start": "not all workers were started",
}


def _incident(number: int, right: str, why: dict[str, str]) -> Quiz:
    """The five causes as options, in one order."""
    options = [Option(text[0].upper() + text[1:], why=why[name], right=name == right) for name, text in CAUSES.items()]
    return Quiz(f"scale.q_incident_{number}", "What has happened?", options)


QUIZZES = [
    Quiz(
        "scale.q_band",
        "The best law says 0.9 to 1 bits per byte for the FLOPs of a d12, and nanochat's d12 had 0.98. What follows?",
        [
            Option(
                "A few laptop runs suffice to know a d12",
                why="Look at the band: anything from 0.9 to 2 would have been 'predicted', too.",
            ),
            Option(
                "Nothing: other text, other tokens, another model; and the band holds nearly everything",
                right=True,
                why="Bits per byte of Python's documentation and of web pages have no reason to meet. A hit of a "
                    "wide band "
                "by a law of another text is luck.",
            ),
            Option(
                "Bits per byte depend on FLOPs alone",
                why="At 1e18 FLOPs nanochat's best was 0.978 on January 7 and 0.897 on January 27.",
            ),
        ],
    ),
    Quiz(
        "scale.q_interval",
        "Your provider's machines now last twice as long. How does the best checkpoint interval change?",
        [
            Option("It doubles", why="Only if the cost of failures alone counted; the root halves the exponent."),
            Option("It becomes 1.41 times as long", right=True, why="√(2·save·mtbf): the root of two."),
            Option("Not at all: saving costs what it costs", why="Rarer failures make saves worth less, so save "
                                                                 "less often."),
        ],
    ),
    Quiz(
        "scale.q_spot",
        "The price table says: spot costs a fifth. When is on demand the cheaper choice nevertheless?",
        [
            Option(
                "As soon as there is one preemption",
                why="One preemption costs half an interval and a set-up, minutes of a machine at a fifth of the price.",
            ),
            Option(
                "When a machine lasts, on average, less than half as long as set-up, one piece and its save together",
                right=True,
                why="The paid time is (e^x - 1)/x times that of one try, with x = (set-up + piece + save) / mtbf: "
                    "1.7 at "
                "x = 1, and 5, which eats the discount up, at x = 2.7. And when there is a deadline: spot waits.",
            ),
            Option("Never", why="The paid time grows exponentially with (set-up + interval + save) / mtbf."),
        ],
    ),
    _incident(
        1, "damaged",
        {
            "durable": "Steps 4,500 and 5,000 are both there: the disk is still with us.",
            "wrapped": "Training was not the problem; the loss was as usual to the last line.",
            "idle": "It crashed at once at every start, and nothing ran in between.",
            "damaged": "The newest file has 0 bytes: the machine went between opening and writing it. Whoever "
            "takes the newest "
            "by its name reads nothing.",
            "start": "One host, eight devices, all there.",
        },
    ),
    _incident(
        2, "idle",
        {
            "durable": "Everything that was to be saved is saved: the run is done.",
            "wrapped": "The tokens were enough for all 6,612 steps.",
            "idle": "Step 6,612 of 6,612, and the machine stays for nine hours more: nobody was awake.",
            "damaged": "No start failed here; there was none.",
            "start": "All hosts ran to the end.",
        },
    ),
    _incident(
        3, "start",
        {
            "durable": "Nothing was lost: no step was ever made.",
            "wrapped": "No data were read yet.",
            "idle": "It does cost money all the time, but it is not done: it never began.",
            "damaged": "There is no checkpoint yet.",
            "start": "JAX on worker 0 waits for the three others, and nobody said the command there. No error, no "
            "step, four "
            "machines on the bill.",
        },
    ),
    _incident(
        4, "durable",
        {
            "durable": "Saved to the folder of a machine that no longer exists. The new machine has an empty disk "
            "and begins at "
            "step 0.",
            "wrapped": "The loss goes back to ln V, which no repeated data would do: these are fresh weights.",
            "idle": "Between the two machines 22 minutes passed, which cost nothing.",
            "damaged": "A damaged checkpoint would be there, and fail to be read. Here there is none.",
            "start": "All eight chips of the one host were there.",
        },
    ),
    _incident(
        5, "wrapped",
        {
            "durable": "The steps go on without a break.",
            "wrapped": "The training loss falls below everything that held-out text allows, while the held-out "
            "loss rises: the "
            "model learns its few pages by heart.",
            "idle": "The steps go on without a break.",
            "damaged": "A restart from a damaged checkpoint would show as a jump.",
            "start": "It trains, so all are there.",
        },
    ),
    Quiz(
        "scale.q_untested",
        "Which of these choices of the 3.8B run is supported by a comparison that was published with it?",
        [
            Option("QK-norm", why="It was never switched off: perhaps it helps, nobody measured."),
            Option("24 query heads for 8 key/value heads", why="The ratio was chosen for memory; no other was "
                                                               "trained."),
            Option(
                "The value tables",
                right=True,
                why="With and without, at 12,500 steps: loss 2.1075 against 2.1171, CORE 0.3147 against 0.3047, "
                    "same speed.",
            ),
            Option("Muon's learning rate", why="It was taken over and not tuned."),
        ],
    ),
]  # fmt: skip

PREDICTIONS = [
    Prediction("scale.p_depth", "Twice the depth, 12 to 24: how many times the training FLOPs?", unit="times"),
    Prediction("scale.p_next", "Bits per byte of the depth-5 run, which was not in the fit?", unit="bits per byte"),
    Prediction("scale.p_wait", "Asking every 10 minutes, 36 % granted: how long do you wait on "
                               "average?", unit="minutes"),
    Prediction(
        "scale.p_spot", "Spot costs a fifth an hour. With a failure every 4 hours: what share of the on-demand "
        "bill remains?",
        unit="%",
    ),
    Prediction("scale.p_repeat", "Held-out bits per byte at the end of a run whose training loss ends at 1.4 "
                                 "bits, far below any other?", unit="bits per byte"),
]  # fmt: skip
