"""`nanochat grade …`: which action calls what."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

BOOK = "gradebook.sqlite"


def run(args: argparse.Namespace) -> int:
    from nanochat_lib.course.grading import grade

    return grade.run(
        Path(args.submissions), Path(args.book), chapter=args.chapter or "", jobs=args.jobs or os.cpu_count() or 1,
        require=args.require_isolation, salt=args.salt or "", shard=args.shard or "",
    )  # fmt: skip


def merge(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading.gradebook import Gradebook

    with Gradebook(Path(args.book)) as book:
        for other in args.others:
            added = book.merge(Path(other))
            print(f"{other}: {added['results']} results and {added['notes']} marks by hand were new")


def export(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import exports

    found = everybody(args)
    target = Path(args.to or {"gradescope": "gradescope"}.get(args.format, f"marks-{args.format}.csv"))
    paths = exports.export(found, args.format, target, Path(args.template) if args.template else None)
    print(f"{len(found)} learners: {paths[0] if len(paths) == 1 else target}")


def everybody(args: argparse.Namespace) -> list:
    """The marks of all learners in the gradebook."""
    from nanochat_lib.course.grading import marks, policy
    from nanochat_lib.course.grading.gradebook import Gradebook
    from nanochat_lib.errors import UserError

    if not Path(args.book).exists():
        raise UserError(f"{args.book} does not exist; nanochat grade run SUBMISSIONS/ makes it")
    with Gradebook(Path(args.book)) as book:
        return marks.marks(book, policy.load(Path(args.policy)))


def adjust(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading.gradebook import Gradebook
    from nanochat_lib.errors import UserError
    from nanochat_lib.presets import nearest

    with Gradebook(Path(args.book)) as book:
        current = book.current()
        chapters = {c for learner, c in current if learner == args.learner}
        if not chapters:
            raise UserError(
                f"nobody is called {args.learner!r}; {nearest(args.learner, sorted({x for x, _ in current}))}"
            )
        topics = {name: chapter for chapter in chapters for name in (chapter, chapter[:2], chapter[3:])}
        chapter = topics.get(args.item.split(".")[0])
        if chapter is None:
            raise UserError(
                f"{args.learner} has no chapter or exercise {args.item!r}; there are {', '.join(sorted(chapters))}"
            )
        item = args.item if "." in args.item else ""
        if item and item not in current[args.learner, chapter].exercises:
            raise UserError(f"{chapter} has no exercise {item!r}")
        note = book.note("adjust", args.learner, chapter, item, args.points, args.reason, args.by or who())
        print(f"{args.learner}, {item or chapter}: {note.points:+g} points ({note.reason})")


def who() -> str:
    """The name that stands beside a mark given by hand."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "instructor"


def _book(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--book", default=BOOK, help=f"the gradebook (default: {BOOK})")


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="grading.yaml", help="weights, dates, late policy (default: grading.yaml)")


def options(parser: argparse.ArgumentParser) -> None:
    """The actions below `nanochat grade`."""
    actions = parser.add_subparsers(metavar="ACTION [options]", required=True)

    def action(name: str, act: object, about: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=about, description=about.capitalize() + ".")
        sub.set_defaults(act=act)
        return sub

    sub = action("run", run, "grade a folder of submissions")
    sub.add_argument(
        "submissions", help="a folder or zip: a folder, notebook or zip a learner, or a Moodle or Canvas download"
    )
    sub.add_argument("--chapter", help="only this one: 03, attention")
    sub.add_argument("--jobs", type=int, help="submissions at a time (default: one a processor)")
    sub.add_argument(
        "--require-isolation", default="limits", metavar="LEVEL",
        choices=("limits", "strong", "namespaces", "bubblewrap"),
        help="refuse to grade with less: limits, strong (namespaces or better), bubblewrap",
    )  # fmt: skip
    sub.add_argument("--salt", help="a secret word: each learner gets cases from a seed of their own")
    sub.add_argument("--shard", metavar="I/N", help="only this part of the learners; merge the gradebooks afterwards")
    _book(sub)

    sub = action("export", export, "write the marks for a spreadsheet or another system")
    sub.add_argument("--format", default="csv", choices=("csv", "exercises", "moodle", "canvas", "gradescope"))
    sub.add_argument("--to", help="file (gradescope: folder) to write")
    sub.add_argument("--template", help="Canvas's own export of its gradebook, to be filled in")
    _book(sub)
    _policy(sub)

    sub = action("adjust", adjust, "add or take points by hand; the reason stays on record")
    sub.add_argument("learner")
    sub.add_argument("item", help="an exercise or a chapter: attention.absorb, 03")
    sub.add_argument("points", type=float, help="to add; negative takes away (write -- before it)")
    sub.add_argument("--reason", required=True)
    sub.add_argument("--by", help="who decided (default: you)")
    _book(sub)

    sub = action("merge", merge, "take over the rows of other gradebooks; safe to repeat")
    sub.add_argument("others", nargs="+", metavar="GRADEBOOK")
    _book(sub)
