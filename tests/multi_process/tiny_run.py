"""A run small enough to start many times: a model of two layers, 300 made-up documents, whatever devices are there.

`python tiny_run.py FOLDER COMMAND…` is what tests start, as one process or several; a command prints a line of JSON.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from nanochat_lib import checkpoint, distributed, gpt, loader, rl, sharding, stopping
from nanochat_lib.durable import RunCopy
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bpb import bits_per_byte
from nanochat_lib.metrics import MetricsLog
from nanochat_lib.objects import Store, StoreError
from nanochat_lib.optim import make_optimizer
from nanochat_lib.preempted import Preempted
from nanochat_lib.presets import CPU_OPTIM, override, preset
from nanochat_lib.pretrain import fixed_batches, step_batches
from nanochat_lib.runtime import check_preempted
from nanochat_lib.schedules import base_schedule
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tasks.common import Task
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import init_train_state, make_eval_step, make_train_step
from nanochat_lib.trainer import Stage, on_devices, train

MODEL = GPTConfig(sequence_len=16, vocab_size=64, n_layer=2, n_head=1, n_kv_head=1, n_embd=32, window_pattern="L")
ROWS, MICRO, STEPS = 8, 2, 6  # rows of a micro-batch over all devices, micro-batches, steps
TOKEN_BYTES = np.ones(64, np.int32)


class Words:
    """A corpus of 300 documents and a tokenizer of 64 ids, BOS = 63."""

    fingerprint, bos_id = "words", 63

    def num_documents(self, split):
        return 300

    def documents(self, split, start=0):
        return (str(i) for i in range(start, 300))

    def encode(self, texts, prepend=None):
        return [[63, *np.random.default_rng(int(t)).integers(0, 63, 3 + int(t) % 9).tolist()] for t in texts]


def real_step(mesh):
    """(a fresh state, the training step), laid out on the mesh."""
    optimizer = make_optimizer(MODEL, CPU_OPTIM, mesh=mesh)
    state = init_train_state(MODEL, optimizer, jax.random.key(0), mesh=mesh)
    return state, make_train_step(MODEL, optimizer, mesh=mesh)


class Runs:
    """The mesh over all devices, the compiled step, and runs of it."""

    def __init__(self, devices=None):
        mesh = sharding.make_mesh(2 if jax.device_count() > 1 else 1, devices)
        self.mesh = mesh if mesh.size > 1 else None
        _, self.step = real_step(self.mesh)
        self.eval_step = make_eval_step(MODEL)
        self.mine = sharding.own_rows(self.mesh, ROWS)
        words = Words()
        self.held_out = fixed_batches(words, words, "val", ROWS, 16, 2 * ROWS * 16, 20, self.mine)

    def state(self):
        return real_step(self.mesh)[0]

    def evaluate(self, _step, state):
        return {"bpb": bits_per_byte(self.eval_step, state.params, on_devices(self.mesh, self.held_out), TOKEN_BYTES)}

    def train(self, folder, steps=STEPS, at=lambda step: None, durable=""):
        """Trains, or goes on, in `folder`; `at(step)` is called before the batch of each step is made."""
        words = Words()
        options = {"rank": distributed.index(), "world": distributed.count(), "fetch_docs": 7, "epochs": 9}

        def batches(state, _present):
            stream = loader.PretrainLoader(words, words, "train", len(self.mine), 16, 20, state=state, **options)
            start = state["batches"] // MICRO if state else 0
            for step, batch in enumerate(step_batches(stream, MICRO), start):
                at(step)
                yield batch

        stage = Stage(
            name="pretrain", folder=Path(folder) / "base", steps=steps, step_fn=self.step, batches=batches,
            hyper=lambda step, _batch: base_schedule(step, 99, CPU_OPTIM), metrics=self.metrics(folder),
            meta={"model": MODEL.to_dict(), "tokenizer": "words"}, mesh=self.mesh, rows=ROWS,
            evaluate=self.evaluate, eval_every=3, save_every=3, log_every=1, durable=durable,
        )  # fmt: skip
        return train(stage, self.state())

    @staticmethod
    def metrics(folder):
        return MetricsLog(Path(folder) / "metrics.jsonl")


def digest(tree):
    """A hash of every number of a tree, laid out in whatever way."""
    whole = sharding.replicate({str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))})
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in whole.values())).hexdigest()


def wait_to_be_killed(folder):
    def at(step):
        if step == 4:  # one after the save
            (Path(folder) / f"waiting-{distributed.index()}").touch()
            time.sleep(600)

    return at


def fail_alone(step):
    if step == 2 and distributed.index() == 1:
        raise OSError("the disk of process 1 is gone")


def terminate_the_last(step):
    if step == 1 and distributed.index() == distributed.count() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)  # the notice takes a second or two


def own_disks(runs, folder):
    """Each process has a disk of its own; what they share is a store. It refuses process 1 now and then."""
    index, disk = distributed.index(), lambda name: folder / f"disk-{distributed.index()}-{name}"
    store = str(folder / "store")
    runs.train(disk("a"), steps=3, durable=store)
    said = {"left": [path.name for path in (disk("a") / "base").iterdir()]}
    with distributed.everyone():
        if distributed.first():  # as opening a run does
            disk("b").mkdir()
            RunCopy(store, disk("b")).open()
    said["state"] = digest(runs.train(disk("b"), durable=store))

    plain, refused = Store.put_all, []

    def refuse(self, *args):
        if index == 1 and len(refused) < self.refusals:
            refused.append(1)
            raise StoreError("403 for process 1")
        plain(self, *args)

    Store.put_all, Store.refusals = refuse, 1
    runs.train(disk("c"), durable=f"{store}-once")
    said["once"] = RunCopy(f"{store}-once", disk("c")).checkpoints(disk("c") / "base")
    Store.refusals = 99
    try:
        runs.train(disk("d"), durable=f"{store}-never")
    except UserError as error:
        said["never"] = str(error)
    Store.put_all = plain
    return said


def interrupt_the_last(step):
    if step == 1 and distributed.index() == distributed.count() - 1:
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


def hang_in_the_last(step):
    """A notice reaches all while one process does not come to its next step."""
    if step == 2 and distributed.index() == distributed.count() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def uneven(folder):
    """What rollouts are: each process has an amount of its own, and the one with more is asked to stop."""
    with stopping.deferred():
        with distributed.own_pace():
            for number in range(1000 * distributed.index()):
                check_preempted()
                if number == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        raise RuntimeError("nobody stopped")


class Characters:
    """A tokenizer of one id a character, BOS = 63."""

    bos_id = 63

    def encode_arrays(self, texts, prepend):
        return [np.array([prepend, *(ord(c) % 61 for c in text)], np.int32) for text in texts]


def evaluate(folder):
    """CORE of a tiny model on a bundle of two tasks with 11 examples each; what it leaves out is a context of 60."""
    from nanochat_lib.evaluate.core import evaluate_core
    from nanochat_lib.evaluate.results import Results

    bundle = folder / "bundle"
    with distributed.everyone():
        if distributed.first():
            (bundle / "eval_data").mkdir(parents=True, exist_ok=True)
            (bundle / "core.yaml").write_text(
                "icl_tasks:\n"
                "- {label: a, dataset_uri: a.jsonl, num_fewshot: [2], icl_task_type: multiple_choice}\n"
                "- {label: b, dataset_uri: b.jsonl, num_fewshot: [1], icl_task_type: language_modeling}\n"
            )
            (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\na,25\nb,0\n")
            choose = [{"query": f"q{i}" * 2, "choices": [f"{i * j}x" * j for j in range(1, 5)], "gold": i % 4}
                      for i in range(11)]  # fmt: skip
            complete = [{"context": f"c{i}", "continuation": "y" * (1 + i % 2)} for i in range(11)]
            for name, examples in (("a", choose), ("b", complete)):
                lines = (json.dumps(example) + "\n" for example in examples)
                (bundle / "eval_data" / f"{name}.jsonl").write_text("".join(lines))
    params = {
        name: np.asarray(leaf) + np.random.default_rng(len(name)).normal(0, 0.2, leaf.shape).astype(np.float32)
        for name, leaf in gpt.init_params(MODEL, jax.random.key(0)).items()
    }
    results = Results(folder / f"kept-by-{distributed.count()}", "core", {})
    params = {name: jax.numpy.asarray(leaf) for name, leaf in params.items()}
    return evaluate_core(MODEL, params, Characters(), bundle, context=60, results=results)


LETTERS = Tokenizer([])
# Three layers: with two the norm takes backout's factor out again, and its gradient is nothing but rounding.
TALKER = GPTConfig(sequence_len=32, vocab_size=LETTERS.vocab_size, n_layer=3, n_head=2, n_kv_head=2, n_embd=32)
POLICY = {
    "seed": 3, "rl.questions_per_step": 4, "rl.samples": 4, "rl.steps": 3, "rl.max_new_tokens": 8, "rl.rollout_rows": 8,
    "rl.eval_every": 2, "rl.eval_questions": 3, "rl.eval_samples": 2, "rl.save_every": -1, "rl.lr_frac": 0.5,
    "pretrain.device_rows": 4, "rl.reward": f"{__file__}:low_bytes",
}  # fmt: skip


def low_bytes(_conversation, completion):
    """The reward: different answers get different ones, so that no group collapses."""
    return sum(ord(c) % 7 for c in completion) / 7


class Letters(Task):
    """Six questions of a letter each."""

    name = "letters"

    def num_examples(self):
        return 6

    def get_example(self, index):
        letter = "abcdef"[index]
        return {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter}]}

    def evaluate(self, conversation, completion):
        return float(conversation["messages"][1]["content"] in completion)


def write_sft(folder):
    """A checkpoint to start reinforcement learning from, of weights that all do something."""
    params = gpt.init_params(TALKER, jax.random.key(0))
    draw = np.random.default_rng(0)
    params = {n: p + 0.3 * draw.standard_normal(p.shape, np.float32) if p.ndim > 1 else p for n, p in params.items()}
    state = init_train_state(TALKER, make_optimizer(TALKER, CPU_OPTIM), params)
    checkpoint.save(folder / "sft", 0, state, {"model": TALKER.to_dict(), "tokenizer": LETTERS.fingerprint})


def reinforce(folder, name):
    """Three steps from `write_sft`'s checkpoint: the records of the steps and evaluations, and all parameters."""
    config, metrics = override(preset("cpu-smoke"), POLICY), MetricsLog(folder / name / "metrics.jsonl")
    ends, train = [], rl.train
    rl.train = lambda stage, state: ends.append(train(stage, state))
    try:
        rl.rl(config, LETTERS, Letters(), Letters(), folder / "sft", folder / name / "rl", metrics)
    finally:
        rl.train = train
    return sharding.replicate(ends[0].params)


def ends(folder, command):
    """Commands that a process does not come back from: the exit code of a stopped run."""
    with stopping.watching(grace=4.0, whole=True):
        distributed.start()
        try:
            if command == "interrupted":
                Runs().train(folder / command, steps=99, at=interrupt_the_last)
            elif command == "hanging":
                Runs().train(folder / command, steps=99, at=hang_in_the_last)
            elif command == "uneven":
                uneven(folder)
            elif command == "in set-up":
                if distributed.index():
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(600)
                distributed.gather_text("waiting for the other")
        except Preempted as stop:
            print(json.dumps({"command": command, "message": str(stop), "agreed": stop.agreed}), flush=True)
            sys.exit(stop.code)
        except Exception:  # as the command does
            if not (stop := stopping.overtaken()):
                raise
            print(f"nanochat: {stop}", flush=True)
            sys.exit(stop.code)


def main(folder, *commands):
    folder = Path(folder)
    if commands[0] in ("interrupted", "hanging", "uneven", "in set-up"):
        return ends(folder, commands[0])
    distributed.start()
    if commands[0] == "other settings":
        distributed.agree(config=f"settings of {distributed.index()}")
    runs = Runs()
    for command in commands:
        said = {"command": command, "process": distributed.index(), "devices": jax.device_count()}
        if command == "train":
            said["state"] = digest(runs.train(folder / "whole"))
        elif command == "resume":
            said["state"] = digest(runs.train(folder / "killed"))
        elif command == "train until killed":
            runs.train(folder / "killed", at=wait_to_be_killed(folder))
        elif command == "preempted":
            try:
                runs.train(folder / "preempted", steps=99, at=terminate_the_last)
            except Preempted as error:
                said["message"] = str(error)
        elif command == "own folder":
            try:
                runs.train(folder / f"own-{distributed.index()}")
            except UserError as error:
                said["message"] = str(error)
        elif command == "own disks":
            said |= own_disks(runs, folder)
        elif command == "evaluate":
            said["found"] = evaluate(folder)
        elif command == "rl":
            params = reinforce(folder, "rl-of-two")
            said["state"] = digest(params)
            if distributed.first():
                np.savez(folder / "rl-of-two.npz", **params)
        elif command == "fail alone":
            runs.train(folder / "failed", at=fail_alone)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
