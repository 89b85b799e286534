"""`nanochat course …`: which action calls what."""

from __future__ import annotations

import argparse


def build(args: argparse.Namespace) -> None:
    from nanochat_lib.course.build import build

    for path in build(check=args.check):
        print(f"wrote {path}")


def mutants(args: argparse.Namespace) -> int:
    from nanochat_lib.course.mutants import print_mutants

    return print_mutants(wanted=args.chapter or "", settings=not args.quick)


def build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a chapter is out of date")


def mutants_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", nargs="?", metavar="NN", help="only this chapter, by number or topic")
    parser.add_argument("--quick", action="store_true", help="leave out 64 bits and one thread")


ACTIONS = {
    "build": (build, build_options, "build the chapters from solutions/"),
    "mutants": (mutants, mutants_options, "try right and wrong answers on every check"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `nanochat course`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, (function, add_options, about) in ACTIONS.items():
        sub = actions.add_parser(name, help=about, description=about.capitalize() + ".")
        add_options(sub)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        sub.set_defaults(act=function)
