"""`nanochat run`: executes the capstone notebook with papermill and shows what its kernel is doing."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nanochat_lib import chat_data, presets, status, stopping
from nanochat_lib.allocator import environment
from nanochat_lib.course.parameters import project_root
from nanochat_lib.errors import UserError
from nanochat_lib.finish import Stalled, finishing
from nanochat_lib.launch import Options, decide
from nanochat_lib.pipeline import open_run
from nanochat_lib.preempted import Interrupted, Preempted
from nanochat_lib.presets import RunConfig
from nanochat_lib.progress import format_seconds

NOTEBOOK = Path(__file__).resolve().parent.parent / "chapters" / "12_capstone.ipynb"
POLL_SECONDS = 0.5
LINE_SECONDS = 10.0  # between lines when the output is not a terminal


class ProgressView(threading.Thread):
    """Shows the newest line of the kernel's progress file: in place on a terminal, now and then in a log."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.stopped = path, threading.Event()
        self.terminal = sys.stderr.isatty()

    def run(self) -> None:
        shown, waited = "", LINE_SECONDS
        while not self.stopped.wait(POLL_SECONDS):
            waited += POLL_SECONDS
            line = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            new_stage = line.split(":")[0] != shown.split(":")[0]
            if not line or line == shown or not (self.terminal or new_stage or waited >= LINE_SECONDS):
                continue
            if self.terminal:
                end = "\n" if new_stage and shown else ""
                width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
                sys.stderr.write(f"{end}\r\x1b[K{line[:width]}")
            else:
                sys.stderr.write(line + "\n")
            sys.stderr.flush()
            shown, waited = line, 0.0
        if self.terminal and shown:
            sys.stderr.write("\n")

    def stop(self) -> None:
        self.stopped.set()
        self.join()


def run_capstone(config: RunConfig, run_dir: str | Path, mine: str = "") -> None:
    """Executes the capstone in `run_dir`; started again, it continues where it stopped. `mine`: open_run's.

    Bad input is found before a kernel starts. A UserError of the notebook comes out as one; any other failure names the
    cell and the executed notebook that holds the traceback.
    """
    if not NOTEBOOK.exists():
        raise UserError(f"{NOTEBOOK} is missing; run from a clone of the repository (git checkout chapters)")
    if (several := decide(Options(), os.environ, tpu=False)).count > 1:
        raise UserError(
            f"the notebook runs in one process, {several.count} were asked for; start the stages instead, each in all "
            f"processes: {', '.join(f'nanochat {stage}' for stage in ('tokenizer', 'pretrain', 'sft', 'rl', 'eval'))}"
        )
    with finishing(run_dir, config.ops) as ending:
        chat_data.check(config, "mid", "sft", "rl", "eval_chat")
        run = open_run(run_dir, config, accelerator=False, mine=mine)
        ending.opened = True
        found = run.corpus.report  # a broken corpus is found here, in one line
        left_out = f", {found.skipped:,} left out" if found.skipped else ""
        print(f"corpus: {found.documents:,} documents{left_out}")
        run.close()
        folder = Path(run_dir).resolve()
        print(f"{config.preset}: running {NOTEBOOK.name} in {folder} (stop it any time; the same command continues)")
        parameters = {  # all of them: the notebook's own cell may have been edited
            "preset": config.preset,
            "run_dir": str(folder),
            "overrides": overrides(run.config),
            "seed": config.seed,
            "corpus": "",
            "mine": mine,
        }
        os.environ.setdefault("COURSE_HOME", str(project_root()))  # the kernel runs in the run's folder
        os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this environment, not a user-wide one
        os.environ.update(environment(os.environ))  # for the kernel
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["NANOCHAT_PROGRESS_FILE"] = str(Path(scratch) / "progress")
            view = ProgressView(Path(os.environ["NANOCHAT_PROGRESS_FILE"]))
            view.start()
            try:
                with stopping.last_words(lambda _line: end_kernel(signal.SIGKILL)):
                    beside(lambda: execute(folder, parameters))
            finally:
                view.stop()
                os.environ.pop("NANOCHAT_PROGRESS_FILE", None)
        print(summary(folder))


def execute(folder: Path, parameters: dict) -> None:
    """The notebook in a kernel of its own; what fails in a cell comes out as an exception."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    output, began = folder / "capstone.ipynb", time.time()
    try:
        papermill.execute_notebook(
            str(NOTEBOOK), str(output), parameters=parameters, kernel_name="python3", cwd=str(folder),
            progress_bar=False, extra_arguments=["--log-level=ERROR"],  # no warning about loopback TCP
        )  # fmt: skip
    except PapermillExecutionError as e:
        for kind in (Preempted, Interrupted):
            if e.ename == kind.__name__:
                raise kind(e.evalue) from None
        if e.ename == "UserError":
            raise UserError(e.evalue) from None
        raise RuntimeError(f"cell {e.exec_count} failed with {e.ename}: {e.evalue}; see {output}") from e
    except DeadKernelError as e:
        last = status.read(folder)
        kind = {"stalled": Stalled, "preempted": Preempted}.get(last["state"])
        if kind and last["time"] >= began:
            raise kind(last["reason"]) from None
        where = f" in {last['stage']}" if last["stage"] else ""
        raise RuntimeError(f"the notebook's kernel was killed{where} (out of memory?); see {output}") from e


def beside(work: Callable[[], None]) -> None:
    """`work()` in another thread, while this one, the main thread, passes on that the command is to end.

    The kernel then saves and ends, within its own grace time or as long as a save takes; a second signal ends both.
    """
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    with stopping.watching(), stopping.deferred():
        stopping.set_grace(stopping.SAVE_GRACE + stopping.GRACE)
        thread.start()
        told = False
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if stopping.noticed() and not told:
                told = True
                end_kernel(signal.SIGTERM)
        kind = stopping.noticed()
        if kind and failure:  # whatever came of it in the kernel, it was asked for here
            raise kind(str(failure[0]) if isinstance(failure[0], Preempted) else "")
    if failure:
        raise failure[0]


def end_kernel(number: signal.Signals) -> None:
    """Sends a signal to the notebook's kernel."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("ipykernel" in word for word in child.cmdline()):
                child.send_signal(number)


def overrides(config: RunConfig) -> str:
    """What `config` changes in its preset, as the notebook's `overrides` parameter: "pretrain.steps=100 seed=1"."""
    base, mine = presets.flatten(presets.preset(config.preset)), presets.flatten(config)
    return shlex.join(f"{name}={value}" for name, value in mine.items() if base[name] != value)


def summary(folder: Path) -> str:
    """The closing lines of a run: figures, report, and how to talk to the model."""
    from nanochat_lib.report.page import share_line
    from nanochat_lib.storage import read_json

    report = read_json(folder / "report.json")
    stages = report["stages"]
    figures = [
        f"bits per byte {stages['pretrain']['val_bpb_first']:.2f} → {stages['pretrain']['val_bpb_last']:.2f}",
        f"CORE {stages['eval_base']['core']:.2f}",
        f"RL reward {stages['rl']['reward_first']:.2f} → {stages['rl']['reward_last']:.2f}",
    ]
    if report.get("mine"):
        figures.append(share_line(report["mine"]))
    program = Path(sys.executable).parent / "nanochat"
    return (
        f"done in {format_seconds(report['total_seconds'])}: {', '.join(figures)}\n"
        f"report   {folder / 'report.html'}\n"
        f"chat     {shlex.join([os.path.relpath(program), 'chat', '--run-dir', os.path.relpath(folder)])}"
    )
