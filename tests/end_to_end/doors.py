"""A run whose commands take seconds, started in children that share their imports, with doors at the phases of a run.

`start("pretrain --run-dir …", door="save", …)` runs a real `nanochat` command in a process of its own. A door is a
place in the command that leaves a file when it is reached and then takes its time, so that a test can send a signal.
"""

import ctypes
import json
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    f"nanochat_lib.{name}"
    for name in ("pipeline", "finish", "pretrain", "sft", "rl", "evaluate.core", "report.tables", "tasks.primer")
]
SETTINGS = (
    "--preset cpu-smoke -s model.depth=1 -s tokenizer.vocab_size=400 -s data.epochs=1000 -s pretrain.batch_tokens=512 "
    "-s pretrain.device_rows=4 -s pretrain.eval_tokens=2048 -s sft.eval_tokens=2048 -s rl.max_new_tokens=16 "
    "-s rl.eval_questions=8 -s evaluation.bigram=false -s evaluation.chat_max_new_tokens=16"
)


def corpus(folder: Path) -> Path:
    """About 90 kB of documents of the invented world."""
    from nanochat_lib.primer.documents import world_documents
    from nanochat_lib.primer.world import World

    path = folder / "corpus.jsonl"
    texts = world_documents(World(0), 90_000)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


_server = multiprocessing.get_context("forkserver")


def start(command: str, output: Path, door: str = "", at: int = 1, hold: float = 0.3, **env: str):
    """The process of `nanochat COMMAND`. Its door opens the `at`-th time it is reached, and from then on each time."""
    _server.set_forkserver_preload(MODULES)
    process = _server.Process(target=child, args=(command, str(output), door, at, hold, env), daemon=True)
    process.start()
    return process


def reached(process, output: Path, door: str, limit: float = 120) -> None:
    """Waits until the command has come to its door."""
    end = time.monotonic() + limit
    while not Path(f"{output}.{door}").exists():
        assert process.is_alive() and time.monotonic() < end, Path(output).read_text()
        time.sleep(0.02)


def ended(process, limit: float = 120) -> tuple[int, float]:
    """(exit code, seconds until the end)."""
    began = time.monotonic()
    process.join(limit)
    if process.is_alive():
        process.kill()
        raise AssertionError("it did not end")
    return process.exitcode, time.monotonic() - began


def child(command: str, output: str, door: str, at: int, hold: float, env: dict) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    os.chdir(Path(output).parent)
    if door:
        DOORS[door](Door(f"{output}.{door}", at, hold))
    from nanochat_lib import cli

    sys.argv = ["nanochat", *shlex.split(command)]
    sys.exit(cli.main())


class Door:
    """Leaves a file when it is reached for the `at`-th time and holds the main thread from then on."""

    def __init__(self, path: str, at: int, hold: float) -> None:
        self.path, self.at, self.hold, self.count = Path(path), at, hold, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count >= self.at:
            self.path.write_text(str(self.count))
            time.sleep(self.hold)

    def in_c(self) -> None:
        """As __call__, but in C code that no signal interrupts, as a compiler is; no Python handler runs meanwhile."""
        self.count += 1
        if self.count != self.at:
            return
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(mutex)
        threading.Timer(self.hold, libc.pthread_mutex_unlock, [mutex]).start()
        self.path.write_text(str(self.count))
        libc.pthread_mutex_lock(mutex)

    def before(self, owner: object, name: str, hold=None) -> None:
        """Puts the door before every call of `owner.name`."""
        function, hold = getattr(owner, name), hold or self.__call__

        def passed(*args, **options):
            hold()
            return function(*args, **options)

        setattr(owner, name, passed)


def setup(door: Door) -> None:
    from nanochat_lib import chat_data, corpus

    door.before(corpus, "open_corpus")
    door.before(chat_data.ChatData, "mixture")  # a stage that reads conversations opens no corpus


def compiler(door: Door) -> None:
    from jax._src import compiler

    from nanochat_lib.train_step import TrainStep

    function, call = compiler.compile_or_get_cached, TrainStep.__call__
    within = []

    def compile_it(*args, **options):
        if within:
            door.in_c()
        return function(*args, **options)

    def step(self, *args):
        within.append(1)
        try:
            return call(self, *args)
        finally:
            within.pop()

    # The wrapper must look like a part of the compiler, since its stack is looked at.
    compiler.compile_or_get_cached = type(compile_it)(
        compile_it.__code__.replace(co_filename=compiler.__file__), globals(), "compile", None, compile_it.__closure__
    )
    TrainStep.__call__ = step


def step(door: Door) -> None:
    from nanochat_lib.train_step import TrainStep

    door.before(TrainStep, "__call__")


def reading(door: Door) -> None:
    from nanochat_lib.loader import PretrainLoader

    door.before(PretrainLoader.__mro__[1], "__next__")  # what both loaders share


def evaluation(door: Door) -> None:
    from nanochat_lib import pretrain, sft

    function = pretrain.on_devices

    def batches(mesh, items):
        for item in function(mesh, items):
            door()
            yield item

    pretrain.on_devices = sft.on_devices = batches


def sampling(door: Door) -> None:
    from nanochat_lib.decoding import Batch

    door.before(Batch, "advance")


def rollout(door: Door) -> None:
    """`sampling` of training answers: the evaluation before them takes no time."""
    from nanochat_lib import rl

    rl.held_out_reward = lambda *args: {"reward_heldout": 0.0, "reward_greedy": 0.0, "pass_at_k": [0.0]}
    sampling(door)


def save(door: Door) -> None:
    from nanochat_lib import storage

    door.before(storage, "write_manifest")


def score(door: Door) -> None:
    from nanochat_lib.evaluate import core

    door.before(core, "score_spans")


def never_again(door: Door) -> None:
    """A step that does not come back: a hanging collective."""
    from nanochat_lib.train_step import TrainStep

    door.before(TrainStep, "__call__", door.in_c)


DOORS = {
    f.__name__: f for f in (setup, compiler, step, reading, evaluation, sampling, rollout, save, score, never_again)
}  # fmt: skip
