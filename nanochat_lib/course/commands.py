"""`nanochat course …`: which action calls what."""

from __future__ import annotations

import argparse
from pathlib import Path


def build(args: argparse.Namespace) -> None:
    from nanochat_lib.course.build import build

    for path in build(check=args.check):
        print(f"wrote {path}")


def bundle(args: argparse.Namespace) -> None:
    from nanochat_lib.course.build import build
    from nanochat_lib.course.leaks import write_bundle

    build(check=True)
    print(f"{args.file}: {write_bundle(Path('.'), Path(args.file))} files, no answer among them")


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


def check(args: argparse.Namespace) -> int:
    from nanochat_lib.course import registry, saved
    from nanochat_lib.course.learner import print_checks

    path = notebook(args.chapter, "chapters")
    chapters = registry.chapters(path.parents[1])
    entries = [entry for chapter in chapters if path.stem.endswith(f"_{chapter.topic}") for entry in chapter.exercises]
    wanted = {entry.id: saved.name_of(entry.id) for entry in entries}
    return print_checks(Path(args.file) if args.file else path, wanted, args.exercise)


def status(args: argparse.Namespace) -> None:
    from nanochat_lib.course.overview import progress

    progress()


def hint(args: argparse.Namespace) -> None:
    from nanochat_lib.course.helping import hint

    hint(args.exercise, args.level)


def undo(args: argparse.Namespace) -> None:
    from nanochat_lib.course.saved import undo

    undo(args.exercise)


def pull(args: argparse.Namespace) -> None:
    from nanochat_lib.course.pull import pull

    path = notebook(args.chapter, "chapters")
    source = path.parents[1] / "solutions" / f"{path.stem}.py"
    print(pull(source, Path(args.file) if args.file else path) or f"{path.name} holds nothing that its source lacks")


def course_map(args: argparse.Namespace) -> None:
    from nanochat_lib.course.coursemap import print_map

    print_map(args.save or "")


def glossary(args: argparse.Namespace) -> None:
    from nanochat_lib.course.glossary import as_text, find, terms

    print(as_text(find(args.term) if args.term else terms()))


def site(args: argparse.Namespace) -> None:
    from nanochat_lib.course.site.build import print_site

    print_site(args.folder, args.view, args.fast, args.chapters, args.reuse)


def slides(args: argparse.Namespace) -> None:
    from nanochat_lib.course.site.slides import print_slides

    print_slides(args.chapter or "", args.folder, args.fast, args.reuse)


def build_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a chapter is out of date")


def bundle_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.zip", help="the archive to write")


def mutants_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", nargs="?", metavar="NN", help="only this chapter, by number or topic")
    parser.add_argument("--quick", action="store_true", help="leave out 64 bits and one thread")


def execute_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", metavar="NN", help="the chapter, by number or topic")
    parser.add_argument("--learner", action="store_true", help="the learner's notebook, not the solved one")
    parser.add_argument("--full", action="store_true", help="not in fast mode")
    parser.add_argument("--save", metavar="FILE", help="keep the executed notebook")


def check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", metavar="NN", help="the chapter, by number or topic")
    parser.add_argument("exercise", nargs="?", metavar="ID", help="only this exercise")
    parser.add_argument("--file", metavar="PATH", help="this .ipynb or .py instead of the one in chapters/")


def exercise_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("exercise", metavar="ID", help="the exercise, e.g. tokenizer.merge")


def hint_options(parser: argparse.ArgumentParser) -> None:
    exercise_options(parser)
    parser.add_argument("--level", type=int, choices=(1, 2, 3), help="this hint (default: the next one)")


def pull_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", metavar="NN", help="the chapter, by number or topic")
    parser.add_argument("--file", metavar="PATH", help="this notebook instead of the one in chapters/")


def map_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="FILE", help="also draw it, as .svg or .png")


def glossary_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("term", nargs="?", metavar="TERM", help="only this term, or those that hold the word")


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fast", action="store_true", help="run the chapters in fast mode, to see how it looks")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="keep outputs although the library changed, where the chapter's code did not",
    )


def site_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", default="build/site", metavar="DIR", help="default: build/site")
    parser.add_argument(
        "--view", choices=("learner", "instructor", "both"), default="learner",
        help="DIR/learner without answers (default), DIR/instructor with everything, or both",
    )  # fmt: skip
    parser.add_argument("--chapters", default="", metavar="NN,NN", help="only these, by number or topic")
    _run_options(parser)


def slides_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chapter", nargs="?", metavar="NN", help="only this chapter, by number or topic")
    parser.add_argument("folder", nargs="?", default="build/slides", metavar="DIR", help="default: build/slides")
    _run_options(parser)


def no_options(parser: argparse.ArgumentParser) -> None:
    pass


ACTIONS = {
    "status": (status, no_options, "show your progress and what is next", "status"),
    "check": (check, check_options, "check the exercises of your notebook", "check 01 tokenizer.merge"),
    "hint": (hint, hint_options, "show the next hint to an exercise", "hint tokenizer.merge"),
    "undo": (undo, exercise_options, "go back to your last version that passed", "undo tokenizer.merge"),
    "build": (build, build_options, "build the chapters from solutions/", "build --check"),
    "bundle": (bundle, bundle_options, "pack what learners get, without any answer", "bundle course.zip"),
    "mutants": (mutants, mutants_options, "try right and wrong answers on every check", "mutants 01 --quick"),
    "execute": (
        execute,
        execute_options,
        "run a chapter's notebook in a fresh kernel and look at what it shows",
        "execute 01 --learner",
    ),
    "map": (course_map, map_options, "show the chapters, what each uses, and how long it takes", "map --save map.svg"),
    "glossary": (glossary, glossary_options, "say what the field's terms mean", "glossary BPE"),
    "site": (site, site_options, "build the course as a read-only site", "site --view both --chapters 01,muon --fast"),
    "slides": (slides, slides_options, "make slides from the cells tagged slide", "slides 05"),
    "pull": (pull, pull_options, "show what an edited notebook would change in its source", "pull 01"),
}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the actions to the parser of `nanochat course`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    for name, (function, add_options, about, example) in ACTIONS.items():
        sub = actions.add_parser(
            name, help=about, description=about.capitalize() + ".", epilog=f"example: nanochat course {example}"
        )
        add_options(sub)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
        sub.set_defaults(act=function)
