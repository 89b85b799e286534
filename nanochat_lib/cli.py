"""`nanochat …`: which command calls what. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanochat_lib import __version__, stopping
from nanochat_lib.errors import UserError, explain

DEFAULT_PRESET = "cpu"


def _processes(args: argparse.Namespace) -> None:
    """What the options say about the processes of a run, for distributed.start."""
    for option, (variable, _, _) in PROCESSES.items():
        given = getattr(args, option.replace("-", "_"), None)
        if given is not None:
            os.environ[variable] = given


def _stages(args: argparse.Namespace, *names: str) -> None:
    """Opens the run and does these stages of it."""
    from nanochat_lib.finish import finishing
    from nanochat_lib.pipeline import default_run_dir, open_run

    _processes(args)
    config = run_config(args)
    folder = args.run_dir or default_run_dir(config)
    with finishing(folder, config.ops) as ending:
        opened = open_run(folder, config, **({"any_machine": True} if getattr(args, "any_machine", False) else {}))
        ending.opened = True
        for name in names:
            _show(getattr(opened, name)().figures)


def run(args: argparse.Namespace) -> None:
    from nanochat_lib.capstone import run_capstone
    from nanochat_lib.pipeline import default_run_dir

    config = run_config(args)
    run_capstone(config, args.run_dir or default_run_dir(config), mine=args.mine)


def presets(args: argparse.Namespace) -> None:
    from nanochat_lib.doctor import print_presets

    print_presets(args.name, args.json)


def doctor(args: argparse.Namespace) -> int:
    from nanochat_lib.doctor import print_diagnosis

    return print_diagnosis(DEFAULT_PRESET, args.json)


def _show(figures: dict) -> None:
    from nanochat_lib.report import scores, tables

    print(tables.figures_table(figures))
    if "core_tasks" in figures:
        print(tables.core_table(figures["core_tasks"]))
        print("".join(f"{line}\n" for line in scores.warnings(figures["core_tasks"])), end="")
    if "stages" in figures:
        print(tables.chat_table(figures["stages"]))


def tokenizer(args: argparse.Namespace) -> None:
    _stages(args, "tokenizer")


def pretrain(args: argparse.Namespace) -> None:
    _stages(args, "pretrain")


def mid(args: argparse.Namespace) -> None:
    _stages(args, "mid")


def sft(args: argparse.Namespace) -> None:
    _stages(args, "sft")


def rl(args: argparse.Namespace) -> None:
    _stages(args, "rl")


def evaluate(args: argparse.Namespace) -> int | None:
    return args.act(args)


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[Any]:
    """A run that is there, opened to look at its models; it is not trained."""
    from nanochat_lib import distributed
    from nanochat_lib.pipeline import default_run_dir, open_run

    _processes(args)
    args = argparse.Namespace(**{"preset": None, "seed": None, "corpus": None, "set": []} | vars(args))
    config = run_config(args)
    folder = Path(args.run_dir or default_run_dir(config))
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} holds no run; start one with `nanochat run --run-dir {folder}`")
    run = open_run(folder, config)
    try:
        with distributed.together():
            yield run
        run.share_files()
    finally:
        run.close()


def report(args: argparse.Namespace) -> None:
    from nanochat_lib.course import standing
    from nanochat_lib.report import write_report

    folder = Path(args.run_dir or Path("runs") / DEFAULT_PRESET)
    if (folder / "config.json").exists():
        standing.keep(folder)
    write_report(folder)
    print(folder / "report.html")


def chat(args: argparse.Namespace) -> None:
    from nanochat_lib.pipeline import open_chat

    open_chat(
        args.run_dir,
        stage=args.stage,
        prompt=args.prompt,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )


def serve(args: argparse.Namespace) -> None:
    from nanochat_lib.pipeline import open_server

    open_server(
        args.run_dir, args.stage, host=args.host, port=args.port, rows=args.rows, queue=args.queue,
        token=args.token or os.environ.get("NANOCHAT_TOKEN"), allow_origins=tuple(args.allow_origin),
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, max_tokens=args.max_tokens,
    )  # fmt: skip


def preflight(args: argparse.Namespace) -> int:
    from nanochat_lib.preflight import print_preflight

    return print_preflight(
        run_config(args), as_json=args.json, profile=args.profile, precision=args.precision, search_rows=args.search,
        run_dir=args.run_dir, save=args.save,
    )  # fmt: skip


def plan(args: argparse.Namespace) -> None:
    from nanochat_lib.budget import print_plan

    print_plan(
        run_config(args), args.chip, args.devices, args.mfu, args.spot, mtbf_hours=args.mtbf_hours,
        save_seconds=args.save_seconds, setup_minutes=args.setup_minutes, wait_minutes=args.wait_minutes,
    )  # fmt: skip


def convert(args: argparse.Namespace) -> None:
    from nanochat_lib.convert import from_upstream, to_upstream

    if args.direction == "from-upstream":
        changes = settings(args.set)
        print(from_upstream(args.source, args.target, step=args.step, tokenizer=args.tokenizer, changes=changes))
        print(f"talk to it: nanochat chat --run-dir {args.target}")
    else:
        print(to_upstream(args.source, args.target, stage=args.stage, step=args.step, ranks=args.ranks))


def course(args: argparse.Namespace) -> int | None:
    return args.act(args)


def grade(args: argparse.Namespace) -> int | None:
    return args.act(args)


def data(args: argparse.Namespace) -> int | None:
    return args.act(args)


def settings(pairs: list[str]) -> dict[str, object]:
    """{"pretrain.steps": "100"} of the options `-s pretrain.steps=100`."""
    changes: dict[str, object] = {}
    for setting in pairs:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"setting {setting!r} has no value; write it as name=value, e.g. -s pretrain.steps=100")
        changes[name.strip()] = value.strip()
    return changes


def run_config(args: argparse.Namespace) -> object:
    """The RunConfig: `--preset`, else what the folder `--run-dir` was started with, else the default; options win."""
    from nanochat_lib.presets import from_dict, override, preset
    from nanochat_lib.storage import read_json

    saved = Path(args.run_dir or "") / "config.json"
    resume = args.preset is None and args.run_dir and saved.exists()
    base = from_dict(read_json(saved)) if resume else preset(args.preset or DEFAULT_PRESET)
    changes = {"ops.on_finish": getattr(args, "on_finish", "stay")} | settings(args.set)  # never what was saved
    if args.seed is not None:
        changes["seed"] = args.seed
    if args.corpus is not None:
        changes["data.corpus"] = args.corpus
    return override(base, changes)


def _set_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-s", "--set", action="append", default=[], metavar="NAME=VALUE",
        help="change one setting of the preset; may be repeated",
    )  # fmt: skip


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help="start from this preset (`nanochat presets` lists them)")
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder (default: in runs/, named after the preset)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of data, weights and sampling")
    parser.add_argument(
        "--corpus", metavar="PATH", help="train on this .txt, .jsonl, .parquet, folder, or URL of shards"
    )
    _set_option(parser)


def _finish_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-finish", choices=("stay", "shutdown"), default="stay",
        help="shutdown: switch this machine off when the command is done, has failed, or was ended because it stalled "
        "(-s ops.on_stall=stop), never after Ctrl-C or SIGTERM; it runs `shutdown -h now`, or what NANOCHAT_SHUTDOWN "
        "names, two minutes after a line that says how to stop it; ask for it at each start",
    )  # fmt: skip


def _whole_run_options(parser: argparse.ArgumentParser) -> None:
    _run_options(parser)
    _finish_option(parser)
    parser.add_argument(
        "--mine", default="", metavar="all|ID,ID", help="use your own functions of these exercises of the course"
    )


PROCESSES = {  # option -> (what it sets for distributed.start, placeholder, help)
    "coordinator": ("NANOCHAT_COORDINATOR", "HOST", "several processes: host or host:port of process 0"),
    "coordinator-port": ("NANOCHAT_COORDINATOR_PORT", "N", "its port (default 8476)"),
    "coordinator-timeout": ("NANOCHAT_COORDINATOR_TIMEOUT", "S", "seconds to wait for all processes (default 120)"),
    "processes": ("NANOCHAT_PROCESSES", "N", "how many processes there are"),
    "process-id": ("NANOCHAT_PROCESS_ID", "I", "which of them this is, from 0"),
}


def _stage_options(parser: argparse.ArgumentParser) -> None:
    _run_options(parser)
    _finish_option(parser)
    for option, (_, placeholder, about) in PROCESSES.items():
        parser.add_argument(f"--{option}", metavar=placeholder, help=about)


def _tokenizer_options(parser: argparse.ArgumentParser) -> None:
    _stage_options(parser)
    parser.add_argument(
        "--any-machine", action="store_true",
        help="train it here, whatever machine the preset is for: before one is rented (then `nanochat data encode`)",
    )  # fmt: skip


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", metavar="DIR", help=f"folder of the run (default: runs/{DEFAULT_PRESET})")


def _eval_options(parser: argparse.ArgumentParser) -> None:
    from nanochat_lib.eval_commands import options

    options(parser, _stage_options, _stages, _opened, _Parser)


def _chat_options(parser: argparse.ArgumentParser) -> None:
    default = f"runs/{DEFAULT_PRESET}"
    parser.add_argument("--run-dir", metavar="DIR", default=default, help=f"folder of the run (default: {default})")
    parser.add_argument(
        "--stage", choices=("base", "mid", "sft", "rl"), help="which model (default: the last one trained)"
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this one message and stop")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="X", help="0 = always the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, metavar="N", help="sample among the N likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="X", help="… and of these among the fewest that make up this share"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling")


def _serve_options(parser: argparse.ArgumentParser) -> None:
    default = f"runs/{DEFAULT_PRESET}"
    parser.add_argument("--run-dir", metavar="DIR", default=default, help=f"folder of the run (default: {default})")
    parser.add_argument(
        "--stage", choices=("base", "mid", "sft", "rl"), help="which model (default: the last one trained)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (default 8000; 0: any free one)")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="answers written at a time (default 8)")
    parser.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait (default 32)")
    parser.add_argument(
        "--token", metavar="WORD", help="ask every client for this token (auto: draw one); default: $NANOCHAT_TOKEN"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL",
        help="let pages of this address use the server, and let it be reached by that name; may be repeated",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="if a request says none (0.8)")
    parser.add_argument("--top-k", type=int, default=50, metavar="N", help="if a request says none (50; 0: all)")
    parser.add_argument("--top-p", type=float, metavar="X", help="if a request says none (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="if a request says none (512)")


def _presets_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="show every setting of this preset")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def _preflight_options(parser: argparse.ArgumentParser) -> None:
    _run_options(parser)
    parser.add_argument("--profile", action="store_true", help="add the compiler's estimated cycles by kind")
    parser.add_argument("--precision", action="store_true", help="list every matrix product with its dtypes")
    parser.add_argument("--search", action="store_true", help="find the largest micro-batch that fits")
    parser.add_argument("--save", action="store_true", help="keep the figures in --run-dir, for the run's report")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _run_options(parser)
    add = parser.add_argument
    add("--chip", metavar="NAME", help="kind of chip: v6e, h100, … (default: the preset's)")
    add("--devices", type=int, metavar="N", help="how many (default: the preset's)")
    add("--mfu", type=float, default=0.25, metavar="X", help="share of the chips' peak that is reached (default: 0.25)")
    add("--spot", action="store_true", help="machines that may be taken away, at their price")
    add("--mtbf-hours", type=float, default=float("inf"), metavar="H", help="hours between failures (default: none)")
    add("--save-seconds", type=float, default=60.0, metavar="S", help="what a checkpoint costs (default: 60)")
    add("--setup-minutes", type=float, default=15.0, metavar="M", help="before a new machine works (default: 15)")
    add("--wait-minutes", type=float, default=0.0, metavar="M", help="for a machine, which are not paid (default: 0)")


def _convert_options(parser: argparse.ArgumentParser) -> None:
    directions = parser.add_subparsers(dest="direction", metavar="DIRECTION", required=True, parser_class=_Parser)
    about = "make a run folder of nanochat's checkpoint folder"
    text = "Make a run whose base model, optimiser state and tokenizer are those in nanochat's checkpoint folder."
    example = "nanochat convert from-upstream base_checkpoints/d12 runs/d12"
    sub = directions.add_parser("from-upstream", help=about, description=text, epilog=f"example: {example}")
    sub.add_argument("source", metavar="DIR", help="nanochat's folder, with model_<step>.pt")
    sub.add_argument("target", metavar="RUN", help="new run folder")
    sub.add_argument("--step", type=int, metavar="N", help="this checkpoint (default: the newest)")
    sub.add_argument("--tokenizer", metavar="DIR", help="folder of tokenizer.pkl (default: where nanochat keeps it)")
    _set_option(sub)
    about = "write a run's model as nanochat's checkpoint folder"
    text = "Write a model of a run as nanochat's files: model, optimiser state, meta file, tokenizer."
    example = "nanochat convert to-upstream runs/mine mine --stage base --ranks 8"
    sub = directions.add_parser("to-upstream", help=about, description=text, epilog=f"example: {example}")
    sub.add_argument("source", metavar="RUN", help="run folder")
    sub.add_argument("target", metavar="DIR", help="new folder for nanochat's files")
    sub.add_argument(
        "--stage", choices=("base", "mid", "sft", "rl"), help="which model (default: the last one trained)"
    )
    sub.add_argument("--step", type=int, metavar="N", help="this checkpoint (default: the newest)")
    sub.add_argument("--ranks", type=int, metavar="N", help="processes that nanochat will resume with")
    for sub in directions.choices.values():
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")


def _course_options(parser: argparse.ArgumentParser) -> None:
    from nanochat_lib.course.commands import options

    options(parser)


def _grade_options(parser: argparse.ArgumentParser) -> None:
    from nanochat_lib.course.grading.commands import options

    options(parser)


def _data_options(parser: argparse.ArgumentParser) -> None:
    from nanochat_lib import encode_commands
    from nanochat_lib.hub.commands import options

    options(parser, {"encode": encode_commands.ACTION})


Command = tuple[Callable[[argparse.Namespace], "int | None"], Callable[[argparse.ArgumentParser], None], str, str]
COMMANDS: dict[str, Command] = {
    "run": (run, _whole_run_options, "run the whole pipeline, or continue it", "nanochat run --preset cpu --seed 1"),
    "presets": (presets, _presets_options, "list the presets, or show one", "nanochat presets cpu"),
    "doctor": (doctor, _doctor_options, "check this machine and what fits on it", "nanochat doctor"),
    "data": (
        data, _data_options, "fetch data sets, list them, or encode shards", "nanochat data get climbmix --shards 8",
    ),
    "tokenizer": (tokenizer, _tokenizer_options, "train the tokenizer", "nanochat tokenizer --corpus my_texts/"),
    "pretrain": (pretrain, _stage_options, "train the base model", "nanochat pretrain --run-dir runs/mine --seed 1"),
    "mid": (
        mid, _stage_options, "midtraining, an optional stage before sft",
        "nanochat mid --run-dir runs/mid -s mid.mixture=primer",
    ),
    "sft": (sft, _stage_options, "teach the base model to chat", "nanochat sft --run-dir runs/mine"),
    "rl": (rl, _stage_options, "reinforcement learning on a task", "nanochat rl --run-dir runs/mine -s rl.steps=20"),
    "eval": (evaluate, _eval_options, "evaluate the models", "nanochat eval --run-dir runs/mine --stage base"),
    "chat": (chat, _chat_options, "talk to the model in the terminal", 'nanochat chat --run-dir runs/mine -p "Hello"'),
    "serve": (serve, _serve_options, "serve the model: web page and API", "nanochat serve --run-dir runs/mine"),
    "report": (report, _report_options, "write the run's report", "nanochat report --run-dir runs/mine"),
    "preflight": (
        preflight,
        _preflight_options,
        "compile the training step for a machine that is not here",
        "nanochat preflight --preset tpu-v6e-8-d24 --profile",
    ),
    "plan": (
        plan, _plan_options, "what a run will cost, and how often to save",
        "nanochat plan --preset tpu-v6e-8-d24 --spot --mtbf-hours 4 --wait-minutes 30",
    ),
    "convert": (
        convert, _convert_options, "read and write nanochat's own checkpoints",
        "nanochat convert from-upstream base_checkpoints/d12 runs/d12",
    ),
    "course": (course, _course_options, "the course: build, check, hints, progress", "nanochat course build --check"),
    "grade": (grade, _grade_options, "grade what learners hand in", "nanochat grade run submissions/ --chapter 03"),
}  # fmt: skip


class _Formatter(argparse.HelpFormatter):
    """Wide, and an example stays on its line: broken at a hyphen it could not be copied."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example: ") else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"nanochat: {message}; `{self.prog} --help` explains\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
    parser = _Parser(
        prog="nanochat", parents=[shared], epilog="example: nanochat run --preset cpu",
        description="Train a small ChatGPT from raw text, look at every stage, and talk to it.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"nanochat {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND [options]", required=True, parser_class=_Parser)
    for name, (function, add_options, about, example) in COMMANDS.items():
        sub = subparsers.add_parser(
            name, parents=[shared], help=about, description=about.capitalize() + ".", epilog=f"example: {example}"
        )  # fmt: skip
        add_options(sub)
        sub.set_defaults(function=function)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 success, 1 failure, 2 a mistake in the input.

    75: stopped by SIGTERM or as stalled, start the same command again; 130: stopped by Ctrl-C, likewise.
    """
    args = build_parser().parse_args(argv)
    ours = argv is None and args.function in (run, tokenizer, pretrain, mid, sft, rl, evaluate)  # nobody else's process
    with stopping.watching(whole=True) if ours else contextlib.nullcontext():
        return _main(args, ours)


def _main(args: argparse.Namespace, ours: bool) -> int:
    try:
        if ours and args.function in (pretrain, mid, sft, rl):  # JAX has not started
            from nanochat_lib.allocator import keep_memory

            keep_memory()
        return args.function(args) or 0
    except KeyboardInterrupt as stop:
        text = str(stop) or "stopped; the same command continues a run where it stopped"
        print(f"\nnanochat: {text}", file=sys.stderr)
        return getattr(stop, "code", 130)
    except BrokenPipeError:  # the reader of our output went away (`nanochat presets | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        if stop := stopping.overtaken():
            print(f"\nnanochat: {stop}", file=sys.stderr)
            return stop.code
        print(f"nanochat: {explain(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else getattr(error, "code", 1)
