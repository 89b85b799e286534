"""`nanochat eval …`: the stages' evaluations, evaluations by other choices, bits per byte of files, and comparing."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from nanochat_lib.errors import UserError

BASE = ("only", "context", "bundle")  # options of the base evaluation alone
CHAT = ("tasks", "samples", "temperature")  # of the chat evaluation alone
BOTH = ("model", "max_per_task")


def given(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(args, name) is not None]


def evaluate(args: argparse.Namespace, stages: Callable, opened: Callable) -> None:
    """Without choices the stages of the run; with some, an evaluation that leaves the run's report alone.

    `stages(args, *names)` does stages of the run; `opened(args)` opens it.
    """
    base, chat = given(args, BASE), given(args, CHAT)
    kinds = [kind for kind in ("base", "chat") if args.stage in (kind, "all")]
    if not base and not chat and not given(args, BOTH):
        stages(args, *(f"eval_{kind}" for kind in kinds))
        return
    for names, kind, other in ((base, "base", "chat"), (chat, "chat", "base")):
        if names and (args.stage == other or (base and chat)):
            option = f"--{names[0].replace('_', '-')}"
            raise UserError(f"{option} is a choice of the {kind} evaluation; use it with --stage {kind} alone")
    wanted = wanted_of(args)
    with opened(args) as run:
        for kind in ["base"] if base else ["chat"] if chat else kinds:
            show(kind, run.measure(kind, wanted))


def wanted_of(args: argparse.Namespace) -> object:
    from nanochat_lib.evaluations import Wanted, parts_of

    for name in ("max_per_task", "samples"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.temperature is not None and not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise UserError(f"--temperature {args.temperature} must be a number of at least 0")
    names = lambda text: tuple(name.strip() for name in text.split(",")) if text else ()  # noqa: E731
    return Wanted(
        models=names(args.model), only=parts_of(args.only) if args.only is not None else (), context=args.context,
        bundle=Path(args.bundle).expanduser() if args.bundle else None, max_per_task=args.max_per_task,
        tasks=names(args.tasks), samples=args.samples or 1, temperature=args.temperature,
    )  # fmt: skip


def show(kind: str, found: dict[str, dict]) -> None:
    from nanochat_lib import distributed
    from nanochat_lib.report import scores, tables

    if not distributed.first():
        return
    if kind == "chat":
        print(scores.chat_table(found))
        return
    for model, figures in found.items():
        print(f"{model}, step {figures['step']:,}")
        print(tables.figures_table(figures))
        if "core_tasks" in figures:
            print(scores.core_table(figures["core_tasks"]))
            for warning in scores.warnings(figures["core_tasks"]):
                print(warning)
        if "samples" in figures:
            print(tables.continuations_table(figures["samples"]))


def compare(args: argparse.Namespace) -> None:
    from nanochat_lib.evaluate.compare import compare
    from nanochat_lib.report import scores

    found = compare(args.a, args.b)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(scores.comparison_table(found))
    for note in found["notes"]:
        print(f"note: {note}")


def bpb(args: argparse.Namespace, opened: Callable) -> None:
    from nanochat_lib.evaluations import text_bpb
    from nanochat_lib.report import scores

    with opened(args) as run:
        stage = args.model or run.trained()[-1]
        found = text_bpb(run, stage, [Path(name) for name in args.files])
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(scores.text_table(found))


def options(
    parser: argparse.ArgumentParser, run_options: Callable, stages: Callable, opened: Callable, parser_class: type
) -> None:
    """`run_options(parser)` adds what commands that run stages have; `stages` and `opened` as in `evaluate`."""
    run_options(parser)
    parser.add_argument("--stage", choices=("base", "chat", "all"), default="all", help="what to evaluate")
    extra = parser.add_argument_group(
        "other choices", "Evaluate by other choices than the run's settings. The run's report stays as it is; results "
        "are kept in RUN/evaluations, so that a stopped evaluation goes on and `compare` finds them.",
    )  # fmt: skip
    add = extra.add_argument
    add("--only", metavar="PARTS", help="of a base evaluation: core, bpb, sample, joined by commas")
    add("--context", type=int, metavar="N", help="CORE: longer prompts lose their front (default: whole prompts)")
    add("--bundle", metavar="DIR", help="CORE: another bundle")
    add("--model", metavar="NAMES", help="base, sft, rl, joined by commas")
    add("--max-per-task", type=int, metavar="N", help="so many examples of each task")
    add("--tasks", metavar="NAMES", help="chat tasks, joined by commas")
    add("--samples", type=int, metavar="K", help="chat: answers a question, right when one of them is; with pass@k")
    add("--temperature", type=float, metavar="X", help="chat: of sampling (default 0, with --samples 1)")
    parser.set_defaults(act=lambda args: evaluate(args, stages, opened))
    actions = parser.add_subparsers(metavar="ACTION", parser_class=parser_class, title="actions")
    about = "two models side by side: is the difference more than noise?"
    sub = actions.add_parser(
        "compare", help=about, description="Two runs, or two models of a run, side by side, from their stored results.",
        epilog="example: nanochat eval compare runs/cpu:base runs/cpu:sft",
    )  # fmt: skip
    sub.add_argument("a", metavar="A", help="a run's folder (its last evaluated model), or RUN:base, RUN:sft, RUN:rl")
    sub.add_argument("b", metavar="B", help="the other one")
    sub.add_argument("--json", action="store_true", help="as JSON")
    sub.set_defaults(act=compare)
    sub = actions.add_parser(
        "bpb", help="bits per byte of a model on files of text", description="Bits per byte on files of UTF-8 text.",
        epilog="example: nanochat eval bpb book.txt --run-dir runs/cpu",
    )  # fmt: skip
    sub.add_argument("files", metavar="FILE", nargs="+", help="text to measure")
    sub.add_argument("--run-dir", metavar="DIR", help="the run's folder")
    sub.add_argument("--model", choices=("base", "sft", "rl"), help="which model (default: the last one trained)")
    sub.add_argument("--json", action="store_true", help="as JSON")
    sub.set_defaults(act=lambda args: bpb(args, opened))
    for sub in actions.choices.values():
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
