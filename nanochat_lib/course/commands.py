"""`nanochat course …`: which action calls what."""

from __future__ import annotations

import argparse
from pathlib import Path


def build(args: argparse.Namespace) -> None:
    from nanochat_lib.course.build import build

    for path in build(check=args.check):
        print(f"wrote {path}")


def mutants(args: argparse.Namespace) -> int:
    from nanochat_lib.course.mutants import print_mutants

    return print_mutants(wanted=args.chapter or "", settings=not args.quick)


def execute(args: argparse.Namespace) -> int:
    from nanochat_lib.course.execute import print_execution

    path = notebook(args.chapter, "chapters" if args.learner else "solutions")
    return print_execution(path, strict=not args.learner, fast=not args.full, save=args.save and Path(args.save))


def notebook(chapter: str, folder: str) -> Path:
    """chapters/01_tokenizer.ipynb of "1", "01", "tokenizer" or "01_tokenizer"."""
    from nanochat_lib.course.mutants import pick
    from nanochat_lib.course.parameters import project_root

    found = {path.stem: path for path in sorted((project_root() / folder).glob("[0-9][0-9]_*.ipynb"))}
    return found[pick(chapter, list(found))]


def build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a chapter is out of date")


def mutants_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", nargs="?", metavar="NN", help="only this chapter, by number or topic")
    parser.add_argument("--quick", action="store_true", help="leave out 64 bits and one thread")


def execute_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", metavar="NN", help="the chapter, by number or topic")
    parser.add_argument("--learner", action="store_true", help="the learner's notebook, not the solved one")
    parser.add_argument("--full", action="store_true", help="not in fast mode")
    parser.add_argument("--save", metavar="FILE", help="keep the executed notebook")


ACTIONS = {
    "build": (build, build_options, "build the chapters from solutions/"),
    "mutants": (mutants, mutants_options, "try right and wrong answers on every check"),
    "execute": (execute, execute_options, "run a chapter's notebook in a fresh kernel and look at what it shows"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `nanochat course`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, (function, add_options, about) in ACTIONS.items():
        sub = actions.add_parser(name, help=about, description=about.capitalize() + ".")
        add_options(sub)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        sub.set_defaults(act=function)
