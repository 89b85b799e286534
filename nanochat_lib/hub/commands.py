"""`nanochat data …`: get, make identity conversations, and list what is there."""

from __future__ import annotations

import argparse

from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub.sets import SETS, DataSet, Shards, named

WORKERS, MOST_WORKERS = 4, 32
WAIT = 3600.0  # seconds for another process that fetches the same


def get(args: argparse.Namespace) -> int:
    from nanochat_lib.hub.get import count_of
    from nanochat_lib.hub.get import get as fetch

    if not 1 <= args.workers <= MOST_WORKERS:
        raise UserError(f"--workers {args.workers} is out of range: 1 to {MOST_WORKERS} files at once")
    entries = [named(name) for name in dict.fromkeys(args.names)]
    shards = count_of(entries, args.shards, args.preset)
    for entry in entries:
        entry.parts(shards)  # a number out of range stops here, before anything is fetched
    if args.plan:
        from nanochat_lib.hub.plan import print_plan

        print_plan(entries, shards, args.preset if args.shards is None else None)
        return 0
    return fetch(entries, shards, args.workers, args.wait)


def show(args: argparse.Namespace) -> None:
    from nanochat_lib.hub.local import bytes_here
    from nanochat_lib.hub.pool import format_bytes

    print(f"in {base_dir()} (NANOCHAT_BASE_DIR)")
    for entry in SETS.values():
        whole, partial = bytes_here(entry)
        size = format_bytes(whole) if whole else "-"
        state = _state(entry) + (f"; {format_bytes(partial)} of unfinished files" if partial else "")
        print(f"{entry.name:12} {size:>9}  {entry.about}\n{'':24}{state}")


def _state(entry: DataSet) -> str:
    from nanochat_lib.hub.ledger import sizes
    from nanochat_lib.hub.local import file_problem, ids_here, lacking, shards_here
    from nanochat_lib.hub.pool import format_bytes

    if not isinstance(entry, Shards):
        missing = lacking(entry)
        whole = len(entry.parts()) - len(missing)
        bad = [f"{part}: {problem}" for part, problem in missing.items() if problem != "missing"]
        absent = [part for part, problem in missing.items() if problem == "missing"]
        words = ["all there"] if not missing else ["nothing there"] if not whole and not bad else []
        words += [f"missing: {', '.join(absent)}"] if absent and not words else []
        return "; ".join([*words, *bad])
    here, known, folder = shards_here(entry), sizes(), base_dir() / entry.where
    if not here:
        return "nothing there"
    bad = {name: problem for name in here if (problem := file_problem(folder / name, known))}
    good = [name for name in here if name not in bad]
    training = len([name for name in good if name != entry.validation()])
    words = [f"{training:,} of {entry.last:,} training shards"]
    words.append(
        "validation shard" if entry.validation() in good else f"MISSING: validation shard {entry.validation()}"
    )
    if ids := ids_here(entry):
        words.append(f"token ids, {len(ids):,} files, {format_bytes(sum(file.stat().st_size for file in ids))}")
    return "; ".join([*words, *(f"broken: {name}, {problem}" for name, problem in bad.items())])


def _get_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(SETS))
    parser.add_argument(
        "--shards", type=int, metavar="N", help="training shards of climbmix or fineweb-edu, from the first"
    )
    parser.add_argument("--preset", metavar="NAME", help="as many shards as this preset trains on, by estimate")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="K", help=f"files at once (default {WORKERS})")
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT,
        metavar="S",
        help="seconds to wait for another process that fetches the same",
    )
    parser.add_argument(
        "--plan", action="store_true", help="fetch nothing; say how many shards, GB and minutes it takes"
    )


def identity(args: argparse.Namespace) -> None:
    from nanochat_lib.hub.sets import path_of
    from nanochat_lib.identity import write

    path = args.out or path_of("identity")
    count = write(path, args.name, args.maker, args.count, args.seed, args.force)
    print(f"{count:,} conversations of {args.name} in {path}")


def _identity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, metavar="NAME", help="what your model is called")
    parser.add_argument("--maker", required=True, metavar="NAME", help="who trained it")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="conversations (default 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another number, other conversations")
    parser.add_argument("--out", metavar="FILE", help="where to (default: where the set `identity` lies)")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


ACTIONS = {
    "get": (get, _get_options, "fetch data sets, or what is missing of them", "nanochat data get climbmix --shards 8"),
    "identity": (
        identity, _identity_options, "write conversations in which your model knows its name",
        "nanochat data identity --name Ada --maker 'our class'",
    ),
    "list": (show, lambda parser: None, "show what is on this machine and what is missing", "nanochat data list"),
}  # fmt: skip


def options(parser: argparse.ArgumentParser, more: dict[str, tuple]) -> None:
    """Adds the actions, and `more` of them, to the parser of `nanochat data`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, (function, add_options, about, example) in (ACTIONS | more).items():
        sub = actions.add_parser(name, help=about, description=about.capitalize() + ".", epilog=f"example: {example}")
        add_options(sub)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        sub.set_defaults(act=function)
