"""`nanochat grade …`: which action calls what."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

BOOK = "gradebook.sqlite"
SHIPPED = "solutions/rubric.yaml"  # the chapters' own written questions


def run(args: argparse.Namespace) -> int:
    from nanochat_lib.course.grading import grade

    return grade.run(
        Path(args.submissions), Path(args.book), chapter=args.chapter or "", jobs=args.jobs or os.cpu_count() or 1,
        require=args.require_isolation, salt=args.salt or "", shard=args.shard or "",
    )  # fmt: skip


def bundle(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import handout

    about = handout.bundle(Path("."), Path(args.file), args.salt or "")
    print(f"{args.file}: version {about['version']}, hash {about['hash']}, {about['files']} files")
    print("looked through file by file: no answer and no hidden case is in it")


def regrade(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import policy, regrade

    regrade.regrade(
        Path(args.submissions), Path(args.book), policy.load(Path(args.policy)), args.write, chapter=args.chapter or "",
        jobs=args.jobs or os.cpu_count() or 1, require=args.require_isolation, salt=args.salt or "",
    )  # fmt: skip


def feedback(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import classpage, feedback, grade, resemble

    found = everybody(args)
    known: dict = {}
    if not args.no_mutants:
        cache = Path(args.book).with_suffix(".cache")
        with grade.open_desk(Path("."), cache, args.chapter or "", args.require_isolation) as desk:
            for one in desk.keys.values():
                if any(mark.chapters.get(one.stem) and mark.chapters[one.stem].result for mark in found):
                    known |= resemble.signatures(desk, one, cache, args.jobs or os.cpu_count() or 1)
    paths = feedback.write(found, Path(args.to), classpage.class_page(found, known))
    print(f"{len(paths) - 1} pages in {Path(args.to) / 'learners'}, the class in {paths[-1]}")


def similarity(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import similarity, similarpage

    pairs, answers = similarity.compared(Path(args.submissions), Path("."), args.chapter or "")
    print(similarity.report(pairs))
    if args.to:
        Path(args.to).write_text(similarpage.similarity_page(pairs, answers), encoding="utf-8")
        print(f"\nside by side: {args.to}")


def audit(args: argparse.Namespace) -> int:
    from nanochat_lib.course.grading.audit import audit

    cache = Path(args.book).with_suffix(".cache")
    return audit(Path("."), cache, args.require_isolation, args.jobs or os.cpu_count() or 1, only=args.at or "")


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
    from nanochat_lib.course.grading import marks, policy, rubric
    from nanochat_lib.course.grading.gradebook import Gradebook
    from nanochat_lib.errors import UserError

    if not Path(args.book).exists():
        raise UserError(f"{args.book} does not exist; nanochat grade run SUBMISSIONS/ makes it")
    found = policy.load(Path(args.policy))
    with Gradebook(Path(args.book)) as book:
        asked = rubric.most(questions(args)) if found.rubric or Path(SHIPPED).exists() else {}
        if not found.rubric:  # the course's own questions count from when somebody has marked their answers
            marked = {note.chapter for note in book.notes() if note.kind == "written"}
            asked = {chapter: points for chapter, points in asked.items() if chapter in marked}
        return marks.marks(book, found, asked)


def questions(args: argparse.Namespace) -> list:
    """The written questions of the rubric that the policy names, else of the course's own."""
    from nanochat_lib.course.grading import policy, rubric
    from nanochat_lib.course.registry import chapters
    from nanochat_lib.errors import UserError

    path = Path(args.policy)
    name = policy.load(path).rubric
    if not name and not Path(SHIPPED).exists():
        raise UserError(f"{path} names no rubric:, so there are no written answers to mark")
    known = [f"{chapter.number}_{chapter.topic}" for chapter in chapters()]
    return rubric.load(path.parent / name if name else Path(SHIPPED), known)


def export_nbgrader(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import for_nbgrader

    for path in for_nbgrader.export(Path("."), Path(args.folder), args.chapter or ""):
        print(f"wrote {path}")


def written(args: argparse.Namespace) -> None:
    from nanochat_lib.course.grading import written
    from nanochat_lib.course.grading.key import keys
    from nanochat_lib.course.grading.submissions import collect

    found = written.items(collect(Path(args.submissions)), questions(args), keys(Path(".")))
    written.serve(written.Desk(found, Path(args.book), args.by or who(), args.names), args.port)


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

    def action(name: str, act: object, about: str, example: str) -> argparse.ArgumentParser:
        words = f"example: nanochat grade {name} {example}"
        sub = actions.add_parser(name, help=about, description=about.capitalize() + ".", epilog=words)
        sub.set_defaults(act=act)
        return sub

    def grading(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--chapter", help="only this one: 03, attention")
        sub.add_argument("--jobs", type=int, help="submissions at a time (default: one a processor)")
        sub.add_argument(
            "--require-isolation", default="limits", choices=("limits", "strong", "namespaces", "bubblewrap"),
            metavar="LEVEL", help="refuse to grade with less: limits, strong (namespaces or better), bubblewrap",
        )  # fmt: skip
        _book(sub)

    where = "a folder or zip: a folder, notebook or zip a learner, or a Moodle or Canvas download"
    sub = action(
        "bundle", bundle, "the learner's zip, without any answer or hidden case", "--file course.zip --salt autumn"
    )
    sub.add_argument("--file", default="course.zip", help="the zip to write (default: course.zip)")
    sub.add_argument("--salt", help="the secret word of this class; its fingerprint is noted in the zip")

    sub = action("run", run, "grade a folder of submissions", "submissions/ --chapter 03 --jobs 4")
    sub.add_argument("submissions", help=where)
    sub.add_argument("--salt", help="a secret word: each learner gets cases from a seed of their own")
    sub.add_argument("--shard", metavar="I/N", help="only this part of the learners; merge the gradebooks afterwards")
    grading(sub)

    sub = action(
        "regrade",
        regrade,
        "grade again after a case was fixed: shows who changes before writing",
        "submissions/ --chapter 03",
    )
    sub.add_argument("submissions", help=where)
    sub.add_argument("--salt", help="the secret word that the class was graded with")
    sub.add_argument("--write", action="store_true", help="add the new results to the gradebook")
    grading(sub)
    _policy(sub)

    sub = action("feedback", feedback, "a page for each learner, and one of the class", "--to feedback/")
    sub.add_argument("--to", default="feedback", help="folder to write (default: feedback)")
    sub.add_argument("--no-mutants", action="store_true", help="do not compare failures with the kept wrong answers")
    grading(sub)
    _policy(sub)

    sub = action(
        "similarity",
        similarity,
        "answers that are alike, with what everybody has taken out",
        "submissions/ --chapter 03 --to alike.html",
    )
    sub.add_argument("submissions", help=where)
    sub.add_argument("--chapter", help="only this one: 03, attention")
    sub.add_argument("--to", metavar="PAGE", help="write both answers of each pair side by side to this HTML file, too")

    sub = action("audit", audit, "does anything leak, does any attack work, on this machine", "--at namespaces")
    grading(sub)
    sub.add_argument(
        "--at", choices=("limits", "namespaces", "bubblewrap"), metavar="LEVEL",
        help="try this level (default: the strongest that works here)",
    )  # fmt: skip

    sub = action(
        "export", export, "write the marks for a spreadsheet or another system", "--format moodle --to marks.csv"
    )
    sub.add_argument("--format", default="csv", choices=("csv", "exercises", "moodle", "canvas", "gradescope"))
    sub.add_argument("--to", help="file (gradescope: folder) to write")
    sub.add_argument("--template", help="Canvas's own export of its gradebook, to be filled in")
    _book(sub)
    _policy(sub)

    sub = action(
        "export-nbgrader", export_nbgrader, "write the chapters as nbgrader's own source tree", "nbgrader_course/"
    )
    sub.add_argument("folder", help="where nbgrader_config.py and source/ go")
    sub.add_argument("--chapter", help="only this one: 03, attention")

    sub = action(
        "written", written, "mark written answers by a rubric, on a page of this machine", "submissions/ --by Ada"
    )
    sub.add_argument("submissions", help=where)
    sub.add_argument("--names", action="store_true", help="show who wrote an answer (default: not)")
    sub.add_argument("--port", type=int, default=0, help="of the page (default: any that is free)")
    sub.add_argument("--by", help="who marks (default: you)")
    _book(sub)
    _policy(sub)

    sub = action(
        "adjust",
        adjust,
        "add or take points by hand; the reason stays on record",
        'anna 03 2 --reason "found a mistake in a case"',
    )
    sub.add_argument("learner")
    sub.add_argument("item", help="an exercise or a chapter: attention.absorb, 03")
    sub.add_argument("points", type=float, help="to add; negative takes away (write -- before it)")
    sub.add_argument("--reason", required=True)
    sub.add_argument("--by", help="who decided (default: you)")
    _book(sub)

    sub = action("merge", merge, "take over the rows of other gradebooks; safe to repeat", "one.sqlite two.sqlite")
    sub.add_argument("others", nargs="+", metavar="GRADEBOOK")
    _book(sub)
