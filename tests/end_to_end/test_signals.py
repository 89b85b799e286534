"""SIGTERM and Ctrl-C in every phase of real commands: saved or bounded, the right exit code, nothing left behind."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doors import ROOT, SETTINGS, corpus, ended, reached, start

from nanochat_lib import checkpoint

GRACE = 2  # seconds; where a phase cannot be left, the process is ended after it
UNTIL_THE_END = 20  # seconds from the signal on a busy machine, where nothing has to be waited for
TOOK = []  # (phase, seconds until the end), printed when all is done


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with a tokenizer and a model, and a compilation cache."""
    folder = tmp_path_factory.mktemp("base")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    settings = f"--run-dir run {SETTINGS} --corpus {corpus(folder)} -s pretrain.steps=4"
    assert ended(start(f"pretrain {settings}", folder / "out"))[0] == 0, (folder / "out").read_text()
    shutil.copytree(folder / "run/base", folder / "run/sft")  # RL starts from any model
    shutil.copy(folder / "run/stages/pretrain.json", folder / "run/stages/sft.json")
    yield folder
    del os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    for phase, seconds in TOOK:
        print(f"{phase}: ended after {seconds:.1f} s")


def prepare(base, folder, settings, keep=(), stages=()):
    """A copy of the base run in folder/run, with the models of `keep` and the records of `stages` only."""
    run = folder / "run"
    shutil.copytree(base / "run", run)
    for name in {"base", "sft"} - set(keep):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in {"pretrain", "sft"} - set(stages):
        (run / f"stages/{name}.json").unlink(missing_ok=True)
    (run / "metrics.jsonl").unlink()
    config = json.loads((run / "config.json").read_text())
    for name, value in settings.items():
        part, _, name = name.partition(".")
        config[part][name] = value
    (run / "config.json").write_text(json.dumps(config))
    return run


class Tried:
    """A command in a fresh copy of the base run that was sent signals in one of its phases."""

    def __init__(self, base, tmp_path, command, door, *signals, pause=2.5, keep=(), stages=(), grace=90, **options):
        self.folder = prepare(base, tmp_path, {"ops.grace_seconds": grace} | options.pop("settings", {}), keep, stages)
        output = tmp_path / "out"
        process = start(f"{command} --run-dir run", output, door, **options)
        reached(process, output, door)
        for number in signals[:-1]:
            os.kill(process.pid, number)
            time.sleep(pause)
        os.kill(process.pid, signals[-1])
        self.code, self.seconds = ended(process)
        self.said = output.read_text()
        self.at_the_door = int(Path(f"{output}.{door}").read_text())
        self.status = json.loads((self.folder / "status.json").read_text())
        path = self.folder / "metrics.jsonl"
        self.metrics = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        TOOK.append((f"{command}, {door}, {'+'.join(signal.Signals(n).name for n in signals)}", self.seconds))

    def saved(self, stage="base"):
        """The step of the newest checkpoint; everything in its folder is whole."""
        folder = self.folder / stage
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert not [name for name in names if ".tmp-" in name or name.startswith(".seen")], names
        step, problems = checkpoint.latest(folder)
        assert not problems
        return step

    def logged(self, stage="pretrain"):
        return max((r["step"] for r in self.metrics if r["stage"] == stage and "loss" in r), default=0)


def steps(count=1000, **more):
    return {"pretrain.steps": count, "pretrain.save_every": 1000, "pretrain.eval_every": 1000} | more


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(("number", "code", "word"), [(TERM, 75, "SIGTERM"), (INT, 130, "Ctrl-C")])
def test_in_a_step_it_is_finished_and_saved(base, tmp_path, number, code, word):
    tried = Tried(base, tmp_path, "pretrain", "step", number, at=3, settings=steps())
    assert tried.code == code and tried.seconds < UNTIL_THE_END, tried.said
    step = tried.saved()
    assert step == tried.logged() >= 3
    line = f"pretrain: stopped by {word} after step {step}, which is saved; the same command goes on from there"
    assert f"nanochat: {line}\n" in tried.said and "Traceback" not in tried.said
    state = {"state": "preempted", "stage": "pretrain", "step": step, "of": 1000, "reason": line}
    assert {name: tried.status[name] for name in state} == state and abs(time.time() - tried.status["time"]) < 60


@pytest.mark.parametrize("command", ["pretrain", "eval"])
def test_where_nothing_is_lost_it_ends_on_the_spot(base, tmp_path, command):
    door, keep = {"pretrain": ("setup", ()), "eval": ("score", ("base", "sft"))}[command]
    options = {"keep": keep, "stages": ("pretrain", "sft") if keep else (), "hold": 100.0}
    tried = Tried(base, tmp_path, command, door, TERM, **options)
    assert tried.code == 75 and tried.seconds < UNTIL_THE_END, tried.said
    assert "nanochat: stopped by SIGTERM; the same command goes on" in tried.said
    assert tried.status["state"] == "preempted" and "Traceback" not in tried.said


def test_a_compiler_that_comes_to_an_end_is_waited_for(base, tmp_path):
    tried = Tried(base, tmp_path, "pretrain", "compiler", TERM, hold=1.5, settings=steps())
    assert tried.code == 75 and tried.saved() == 1 and "after step 1, which is saved" in tried.said, tried.said


def test_a_compiler_that_does_not_is_ended_with_the_grace_time(base, tmp_path):
    tried = Tried(base, tmp_path, "pretrain", "compiler", INT, hold=100.0, grace=GRACE, settings=steps())
    assert tried.code == 130 and GRACE - 1 < tried.seconds < GRACE + UNTIL_THE_END, tried.said
    assert "it was compiling still and is ended: nothing was saved so far" in tried.said
    assert tried.saved() is None and tried.status["state"] == "preempted" and "compiling" in tried.status["reason"]


def test_data_that_do_not_come_lose_what_the_save_interval_allows(base, tmp_path):
    settings = steps(**{"pretrain.save_every": 2})
    tried = Tried(base, tmp_path, "pretrain", "reading", TERM, at=9, hold=100.0, grace=GRACE, settings=settings)
    assert tried.code == 75 and tried.seconds < GRACE + UNTIL_THE_END, tried.said
    step = tried.saved()
    assert step > 0 and f"it was busy still and is ended: step {step}, the last that is saved, counts" in tried.said


@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_ends_between_two_batches(base, tmp_path, first):
    settings = steps(**{"pretrain.eval_every": 2, "pretrain.eval_tokens": 512 * 60})
    tried = Tried(base, tmp_path, "pretrain", "evaluation", TERM, at=3 if first else 63, settings=settings)
    assert tried.code == 75 and tried.seconds < UNTIL_THE_END, tried.said
    assert tried.at_the_door < 58 + 60 * (not first)  # it was not evaluated to the end
    assert tried.saved() == (None if first else 2)
    assert not [r for r in tried.metrics if r.get("event") == "eval" and r["step"] == 2]


@pytest.mark.parametrize(("door", "at"), [("sampling", 1), ("rollout", 2)])
def test_rollouts_and_their_evaluation_end_between_two_chunks(base, tmp_path, door, at):
    settings = {"rl.steps": 50, "rl.save_every": 50, "rl.eval_every": 50, "rl.max_new_tokens": 40}
    options = {"keep": ("base", "sft"), "stages": ("pretrain", "sft"), "settings": settings}
    tried = Tried(base, tmp_path, "rl", door, TERM, at=at, **options)
    assert tried.code == 75 and tried.seconds < UNTIL_THE_END, tried.said
    assert tried.at_the_door < at + 9 and "Traceback" not in tried.said
    assert (tried.saved("rl") or 0) == tried.logged("rl")


def vowels(_conversation, completion):
    """A reward that an untrained model gets now and then."""
    return sum(completion.count(vowel) for vowel in "aeiou") / 20


CHAT = {  # settings of each later stage, so that nothing is saved before its end
    "mid": {
        "mid.mixture": "primer",
        "mid.steps": 6,
        "mid.eval_every": 3,
        "mid.eval_tokens": 2048,
        "mid.save_every": 99,
    },
    "sft": {"sft.steps": 6, "sft.eval_every": 3, "sft.save_every": 99},
    "rl": {
        "rl.steps": 3,
        "rl.eval_every": 99,
        "rl.save_every": 99,
        "rl.reward": f"{__file__}:vowels",
        "rl.questions_per_step": 1,
        "rl.max_new_tokens": 8,
        "rl.eval_questions": 2,
        "rl.eval_samples": 1,
    },
}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """stage -> the folder of its run that was never stopped."""
    done = {}

    def run(stage):
        if stage not in done:
            folder = tmp_path_factory.mktemp(stage)
            prepare(base, folder, CHAT[stage], **later(stage))
            assert ended(start(f"{stage} --run-dir run", folder / "out"))[0] == 0, (folder / "out").read_text()
            done[stage] = folder / "run"
        return done[stage]

    return run


def later(stage):
    """What a stage needs of the run before it."""
    return {"keep": ("base", "sft")[: 1 + (stage == "rl")], "stages": ("pretrain", "sft")[: 1 + (stage == "rl")]}


def told(folder, stage):
    """What a stage has written into its log, without its starts and what a clock says."""
    clock = ("seconds", "time", "tokens_per_s", "mfu", "cost_usd")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in r.items() if k not in clock}
        for r in lines
        if r["stage"] == stage and r.get("event") != "start"
    ]


ROUGH = pytest.mark.slow  # other moments, and stages that take long to compile


@pytest.mark.parametrize(
    ("stage", "door", "at", "number"),
    [
        ("sft", "step", 4, TERM),
        pytest.param("rl", "step", 2, TERM, marks=ROUGH),
        pytest.param("mid", "save", 1, INT, marks=ROUGH),
        pytest.param("mid", "step", 2, TERM, marks=ROUGH),
        pytest.param("mid", "evaluation", 6, TERM, marks=ROUGH),
        pytest.param("mid", "compiler", 1, TERM, marks=ROUGH),
        pytest.param("mid", "reading", 5, INT, marks=ROUGH),
        pytest.param("mid", "setup", 1, TERM, marks=ROUGH),
        pytest.param("sft", "evaluation", 4, INT, marks=ROUGH),
        pytest.param("sft", "compiler", 1, INT, marks=ROUGH),
        pytest.param("sft", "reading", 6, TERM, marks=ROUGH),
        pytest.param("sft", "save", 1, TERM, marks=ROUGH),
        pytest.param("rl", "sampling", 3, INT, marks=ROUGH),
        pytest.param("rl", "sampling", 12, TERM, marks=ROUGH),
        pytest.param("rl", "compiler", 1, TERM, marks=ROUGH),
        pytest.param("rl", "save", 1, INT, marks=ROUGH),
    ],
)
def test_a_later_stage_that_was_stopped_ends_as_one_that_was_not(base, whole, tmp_path, stage, door, at, number):
    tried = Tried(base, tmp_path, stage, door, number, at=at, settings=CHAT[stage], **later(stage))
    assert tried.code == {TERM: 75, INT: 130}[number] and tried.seconds < UNTIL_THE_END, tried.said
    saved = tried.saved(stage) or 0  # before the stage is started again
    assert saved == tried.logged(stage) and "Traceback" not in tried.said
    assert tried.status["state"] == "preempted" and tried.status["stage"] == stage, tried.status
    assert ended(start(f"{stage} --run-dir run", tmp_path / "again"))[0] == 0, (tmp_path / "again").read_text()
    assert ("continuing from step" in (tmp_path / "again").read_text()) == bool(saved)
    records = told(tried.folder, stage)
    assert records == told(whole(stage), stage) and any(r.get("loss") for r in records)
    states = [checkpoint.load(folder / stage)[0] for folder in (tried.folder, whole(stage))]
    assert {k: np.asarray(v).tobytes() for k, v in states[0].items()} == {
        k: np.asarray(v).tobytes() for k, v in states[1].items()
    }


def test_a_save_is_finished_even_beyond_the_grace_time(base, tmp_path):
    settings = steps(**{"pretrain.save_every": 2})
    tried = Tried(base, tmp_path, "pretrain", "save", TERM, hold=2.5, grace=1, settings=settings)
    assert tried.code == 75 and tried.saved() == tried.logged() >= 2 and "is saved" in tried.said, tried.said
    assert tried.seconds > 1


def test_a_second_signal_ends_at_once(base, tmp_path):
    settings = steps(**{"pretrain.save_every": 2})
    tried = Tried(base, tmp_path, "pretrain", "never_again", INT, INT, at=4, hold=100.0, settings=settings)
    assert tried.code == 130 and tried.seconds < UNTIL_THE_END, tried.said
    assert "a second signal ends it at once: step 2, the last that is saved, counts" in tried.said
    assert tried.saved() == 2


def test_the_same_request_passed_on_twice_is_no_second_signal(base, tmp_path):
    tried = Tried(base, tmp_path, "pretrain", "step", TERM, TERM, at=3, pause=0.3, settings=steps())
    assert tried.code == 75 and tried.saved() >= 3, tried.said


def test_a_run_that_stands_still_is_ended_and_its_machine_switched_off(base, tmp_path):
    settings = steps(**{"ops.stall_seconds": 1.0, "ops.stall_factor": 2.0, "ops.on_stall": "stop"})
    log = tmp_path / "off"
    env = {"NANOCHAT_SHUTDOWN": f"touch {log}"}
    settings["ops.finish_seconds"] = 0.5
    tried = Tried(
        base, tmp_path, "pretrain --on-finish shutdown", "never_again", signal.SIGCONT, at=4, hold=100.0,
        settings=settings, **env,
    )  # fmt: skip
    assert tried.code == 75 and log.exists(), tried.said
    assert tried.status["state"] == "stalled" and tried.status["reason"].startswith("pretrain: stalled, no step was")
    (dump,) = tried.folder.glob("stall-*.txt")
    assert "trainer.py" in dump.read_text() and str(dump) in (tried.said).replace("in run/", f"in {tried.folder}/")


def test_a_failure_is_one_line_and_in_the_status(base, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(base / "run", folder)
    (folder / "stages/pretrain.json").unlink()
    (folder / "tokenizer").rename(folder / "elsewhere")
    code, _ = ended(start("pretrain --run-dir run", tmp_path / "out"))
    said = (tmp_path / "out").read_text()
    status = json.loads((folder / "status.json").read_text())
    assert code == 2 and status["state"] == "failed" and f"nanochat: {status['reason']}\n" in said, said


def papermill_run(base, tmp_path, number, group):
    """(exit code, what was said, the run's folder) of `nanochat run`, sent a signal while its kernel pretrains."""
    import psutil

    folder = tmp_path / "run"
    settings = f"--run-dir {folder} {SETTINGS} --corpus {base / 'corpus.jsonl'} -s pretrain.steps=100000"
    more = "-s data.epochs=1e6 -s pretrain.save_every=100000 -s pretrain.eval_every=100000 -s ops.grace_seconds=10"
    command = [sys.executable, "-W", "ignore", "-m", "nanochat_lib", "run", *shlex.split(f"{settings} {more}")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    kernels = []
    try:
        end = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() or '"loss"' not in (folder / "metrics.jsonl").read_text():
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
            time.sleep(0.05)
        kernels = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        if group:  # as a batch system does: every process of the job
            for kernel in kernels:
                kernel.send_signal(number)
        process.send_signal(number)
        said = process.communicate(timeout=60)[0]
        TOOK.append((f"run, pretraining, {number.name}", time.monotonic() - began))
        assert kernels and not [kernel for kernel in kernels if kernel.is_running()], "a kernel was left running"
        return process.returncode, said, folder
    finally:
        process.kill()
        for kernel in kernels:
            if kernel.is_running():
                kernel.kill()


@pytest.mark.parametrize(
    ("number", "code", "group"), [(TERM, 75, True), pytest.param(INT, 130, False, marks=pytest.mark.slow)]
)
def test_the_whole_run_saves_in_its_kernel_and_ends_with_it(base, tmp_path, number, code, group):
    found, said, folder = papermill_run(base, tmp_path, number, group)
    status = json.loads((folder / "status.json").read_text())
    step = checkpoint.latest(folder / "base")[0]
    assert found == code and step == status["step"] > 0 and status["state"] == "preempted", said
    assert f"after step {step}, which is saved; the same command goes on from there" in said
    assert "Traceback" not in said and not list(folder.glob("base/*.tmp-*"))
