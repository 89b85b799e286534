"""Two real processes on this machine: they train as one, survive being killed, stop together, and never hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import tiny_run
from tiny_run import MICRO, ROWS, STEPS, Runs

from nanochat_lib import checkpoint
from nanochat_lib.durable import RunCopy

ROOT = Path(checkpoint.__file__).parents[1]
SAMPLED = ("step", "loss", "reward", "collapsed", "correct", "ended", "answer_tokens", "tokens")  # of a step of RL
LIMIT = 300  # seconds in which everything has ended, on the busiest machine


class Pair:
    """Two processes of two devices each, started with the same commands."""

    def __init__(self, folder, *commands):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.outputs = [folder / f"output-{len(list(folder.glob('output-*')))}-{i}" for i in range(2)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", tiny_run.__file__, str(folder), *commands],
                env=os.environ | {
                    "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NANOCHAT_PROCESSES": "2",
                    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
                    "NANOCHAT_COORDINATOR": f"127.0.0.1:{port}", "NANOCHAT_PROCESS_ID": str(i),
                    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
                },
                stdout=open(output, "w"), stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job is deaf to Ctrl-C
            )
            for i, output in enumerate(self.outputs)
        ]  # fmt: skip

    def wait(self):
        """Exit codes, when both have ended."""
        try:
            return [process.wait(LIMIT) for process in self.processes]
        finally:
            self.kill()

    def kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def text(self, i):
        return self.outputs[i].read_text()

    def said(self):
        """{command: what each process printed for it}."""
        lines = [[json.loads(x) for x in self.text(i).splitlines() if x.startswith('{"command"')] for i in range(2)]
        return {one["command"]: (one, other) for one, other in zip(*lines, strict=True)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that both processes were killed in with -9, after step 4, when step 3 had been saved."""
    folder = tmp_path_factory.mktemp("two")
    pair = Pair(folder, "preempted", "train until killed")
    try:
        end = time.time() + LIMIT
        saved = folder / "killed" / "base" / "step_00000003"
        while (len(list(folder.glob("waiting-*"))) < 2 or not saved.exists()) and time.time() < end:
            assert all(process.poll() is None for process in pair.processes), pair.text(0) + pair.text(1)
            time.sleep(0.1)
    finally:
        pair.kill()
    assert [process.returncode for process in pair.processes] == [-signal.SIGKILL] * 2
    return folder, pair


@pytest.fixture(scope="module")
def second(killed):
    """The next start of both: they go on, train another run from the beginning, and end when one of them fails."""
    pair = Pair(killed[0], "resume", "train", "evaluate", "own folder", "own disks", "fail alone")
    return pair, pair.wait()


def records(folder, run):
    return [r for r in Runs.metrics(folder / run).read() if "loss" in r]


def test_the_killed_run_ends_bit_equal_to_one_that_was_not_killed(killed, second):
    pair, _ = second
    said = pair.said()
    assert "pretrain: continuing from step 3" in pair.text(0) and "continuing" not in pair.text(1)
    assert said["resume"][0]["devices"] == 4
    assert len({one["state"] for name in ("resume", "train") for one in said[name]}) == 1
    losses = [[(r["step"], r["loss"]) for r in records(killed[0], run)] for run in ("killed", "whole")]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == list(range(1, STEPS + 1))


def test_every_step_trained_the_planned_tokens(killed, second):
    assert [r["tokens"] for r in records(killed[0], "whole")] == [n * MICRO * ROWS * 16 for n in range(1, STEPS + 1)]


def test_evaluation_gives_one_process_s_number(killed, second):
    runs = Runs(jax.devices()[:1])
    found = [r for r in Runs.metrics(killed[0] / "whole").read() if r.get("event") == "eval"]
    assert [r["step"] for r in found] == [0, 3, 6]
    assert found[0]["bpb"] == pytest.approx(runs.evaluate(0, runs.state())["bpb"], rel=1e-6)


def test_one_process_reads_what_two_wrote(killed, second):
    pair, _ = second
    state, meta = checkpoint.load(killed[0] / "whole" / "base", like=Runs(jax.devices()[:1]).state())
    assert tiny_run.digest(state) == pair.said()["train"][0]["state"]
    assert [own["rank"] for own in meta["processes"]] == [0, 1] and int(state.step) == meta["step"] == STEPS
    restored = checkpoint.load(killed[0] / "whole" / "base")[0]
    assert all(isinstance(leaf, jax.Array) and len(leaf.devices()) == 1 for leaf in restored.values())


def test_one_process_goes_on_where_two_stopped(killed, second, capsys):
    runs = Runs(jax.devices()[:1])
    runs.train(killed[0] / "whole", STEPS + 2)
    said = capsys.readouterr().out
    assert "1 processes go on where 2 stopped" in said and f"continuing from step {STEPS}" in said
    losses = [r["loss"] for r in records(killed[0], "whole")]
    assert len(losses) == STEPS + 2 and np.isfinite(losses).all()


def test_two_processes_evaluate_as_one(killed, second):
    """Two processes of two devices: every example is answered once, and both know all results."""
    one, other = second[0].said()["evaluate"]
    alone = tiny_run.evaluate(killed[0])
    assert one["found"] == other["found"] == json.loads(json.dumps(alone))
    kept = [sorted((killed[0] / f"kept-by-{n}").glob("*/?.json")) for n in (1, 2)]
    assert [path.read_text() for path in kept[0]] == [path.read_text() for path in kept[1]] and len(kept[0]) == 2


@pytest.mark.slow
def test_two_processes_reinforce_as_one(tmp_path):
    """Each samples answers to its own questions; the update is that of all of them, in both."""
    tiny_run.write_sft(tmp_path)
    pair = Pair(tmp_path, "rl")
    assert pair.wait() == [0, 0], pair.text(0) + pair.text(1)
    one, other = pair.said()["rl"]
    assert one["state"] == other["state"]
    both = dict(np.load(tmp_path / "rl-of-two.npz"))
    alone = tiny_run.reinforce(tmp_path, "rl-of-one")
    before = checkpoint.load_params(tmp_path / "sft")
    moved = max(float(np.abs(both[name] - before[name]).max()) for name in both)
    assert moved > 0.01
    for name, wanted in alone.items():
        np.testing.assert_allclose(both[name], wanted, atol=1e-3 * moved, err_msg=name)
    steps, evals = [], []
    for name in ("rl-of-one", "rl-of-two"):
        found = Runs.metrics(tmp_path / name).read()
        steps.append([{key: r[key] for key in SAMPLED} for r in found if "loss" in r])
        evals.append([(r["step"], r["reward_heldout"], r["pass_at_k"]) for r in found if r.get("event") == "eval"])
    assert len(steps[0]) == 3 and all(r["collapsed"] == 0 for r in steps[0])
    for a, b in zip(*steps, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
    assert evals[0] == evals[1] and len(evals[0]) == 3


def test_folders_that_are_not_shared_are_refused(second):
    for one in second[0].said()["own folder"]:
        assert "own-1" in one["message"] and "is not the folder of process 0" in one["message"]


def test_processes_with_disks_of_their_own_go_on_from_what_they_uploaded(killed, second):
    said = second[0].said()["own disks"]
    assert [one["left"] for one in said] == [[], []]  # no part of a checkpoint stays on one disk
    assert [one["state"] for one in said] == [second[0].said()["train"][0]["state"]] * 2
    for i in range(2):  # the whole is on each: process 1 reads it here alone
        assert checkpoint.steps(killed[0] / f"disk-{i}-b" / "base") == [3]
    fetched = RunCopy(str(killed[0] / "store"), killed[0] / "third")
    assert fetched.newest(killed[0] / "third" / "base") == (STEPS, [])
    state, meta = checkpoint.load(killed[0] / "third" / "base", like=Runs(jax.devices()[:1]).state())
    assert tiny_run.digest(state) == said[0]["state"] and [own["rank"] for own in meta["processes"]] == [0, 1]


def test_a_store_that_refuses_one_process_leaves_no_part_that_looks_whole(killed, second):
    pair, _ = second
    for one in pair.said()["own disks"]:
        steps, problems = one["once"]
        assert steps == [STEPS] and problems == []
        assert "the last checkpoint could not be copied" in one["never"] and "\n" not in one["never"]
    assert "step_00000003 is lost: process 1: 403 for process 1" in pair.text(0)


def test_one_that_fails_alone_does_not_leave_the_other_waiting(second):
    pair, codes = second  # without a hard end both would wait for each other for five minutes
    assert codes[1] == 1 and codes[0] != 0
    assert "the disk of process 1 is gone" in pair.text(1)


def test_a_preemption_of_one_saves_the_same_step_in_both(killed):
    folder, pair = killed
    messages = [one["message"] for one in pair.said()["preempted"]]
    base = folder / "preempted" / "base"
    step = checkpoint.steps(base)[-1]
    assert messages == [
        f"pretrain: stopped by SIGTERM after step {step}, which is saved; the same command goes on from there"
    ] * 2  # fmt: skip
    meta = checkpoint.load_meta(base)
    assert meta["step"] == step < 99 and {own["batches"] for own in meta["processes"]} == {step * MICRO}


def test_ctrl_c_in_one_stops_both_at_one_step(killed, second):
    folder, _ = killed
    pair = Pair(folder, "interrupted")
    assert pair.wait() == [75, 130], pair.text(0) + pair.text(1)
    step = checkpoint.load_meta(folder / "interrupted" / "base")["step"]
    for (i, word), one in zip(enumerate(("SIGTERM", "Ctrl-C")), pair.said()["interrupted"], strict=True):
        assert "no training was under way" not in pair.text(i)
        assert one["agreed"] and f"stopped by {word} after step {step}, which is saved" in one["message"], pair.text(i)


@pytest.mark.slow
def test_both_end_in_time_when_one_does_not_come_to_a_common_step(killed, second):
    pair = Pair(killed[0], "hanging")
    assert pair.wait() == [75, 75], pair.text(0) + pair.text(1)
    assert "it was busy still and is ended: nothing was saved so far" in pair.text(1)
    assert "stopped by SIGTERM" in pair.text(0)


def test_both_end_at_once_where_training_has_not_begun(killed):
    pair = Pair(killed[0], "in set-up")
    assert pair.wait() == [75, 75], pair.text(0) + pair.text(1)
    assert all("nanochat: stopped by SIGTERM; no training was under way" in pair.text(i) for i in range(2))


def test_work_of_uneven_amounts_is_stopped_in_both(killed):
    pair = Pair(killed[0], "uneven")
    assert pair.wait() == [75, 75], pair.text(0) + pair.text(1)
    assert all(one["agreed"] for one in pair.said()["uneven"])


def test_a_start_with_different_settings_stops_both(tmp_path):
    pair = Pair(tmp_path, "other settings")
    assert all(pair.wait())
    for i in range(2):
        assert "process 1 has another config (settings of 1) than process 0 (settings of 0)" in pair.text(i)
