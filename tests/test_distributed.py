"""Processes find each other or say who is missing, decide together, and end instead of waiting for ever."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanochat_lib import distributed, launch, pipeline, rendezvous
from nanochat_lib.errors import UserError
from nanochat_lib.launch import Options, Plan, decide
from nanochat_lib.presets import preset

ROOT = Path(distributed.__file__).parents[1]


def child(code, *arguments, timeout=100, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env=env, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# ---- what to start, from the environment alone

NANOCHAT = {"NANOCHAT_COORDINATOR": "node1", "NANOCHAT_PROCESSES": "4", "NANOCHAT_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"
}  # fmt: skip

SKYPILOT = {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7", "SKYPILOT_NODE_RANK": "2"}


@pytest.mark.parametrize(
    ("env", "tpu", "kind"),
    [
        ({}, False, "alone"),
        (NANOCHAT, False, "given"),
        (NANOCHAT, True, "given"),
        ({"NANOCHAT_PROCESSES": "1"}, True, "alone"),
        (SLURM, False, "cluster"),
        (SLURM | {"SLURM_NTASKS": "1"}, False, "alone"),
        ({name: SLURM[name] for name in SLURM if name != "SLURM_STEP_NODELIST"}, False, "alone"),  # a shell in a job
        ({"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2"}, False, "cluster"),
        ({"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "1"}, False, "alone"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:1"}, False, "cluster"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, False, "cluster"),
        ({"KUBERNETES_SERVICE_HOST": "x"}, False, "alone"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, False, "cluster"),  # a process for each GPU: JAX's way
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, False, "given"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, True, "cluster"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}, False, "alone"),
        (SKYPILOT, False, "given"),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1"}, False, "alone"),
        (SKYPILOT, True, "ask"),  # a slice counts its workers itself
        (SKYPILOT | NANOCHAT, False, "given"),
        (SKYPILOT | {"NANOCHAT_PROCESSES": "1"}, False, "alone"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0", "TPU_WORKER_HOSTNAMES": "w0"}, True, "alone"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0", "TPU_WORKER_HOSTNAMES": "a,b"}, True, "cluster"),
        # TPU machines: one host of its own is no cluster, and a host without chips is no TPU machine.
        ({"TPU_WORKER_HOSTNAMES": "w0,w1"}, True, "cluster"),
        ({"TPU_PROCESS_ADDRESSES": "w0:1,w1:1"}, True, "cluster"),
        ({"TPU_WORKER_HOSTNAMES": "w0", "MEGASCALE_NUM_SLICES": "2"}, True, "cluster"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, "alone"),
        ({"TPU_WORKER_HOSTNAMES": "w0,w1"}, False, "alone"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, "alone"),
        ({}, True, "ask"),
    ],
)
def test_what_to_start(env, tpu, kind):
    assert decide(Options(), env, tpu).kind == kind


def test_where_the_processes_meet():
    assert decide(Options(), NANOCHAT, False) == Plan("given", 120.0, None, "node1:8476", 4, 3)
    options = Options("10.0.0.1", processes=2, process_id=0, port=9000, timeout=5)
    assert decide(options, NANOCHAT, False) == Plan("given", 5.0, 9000, "10.0.0.1:9000", 2, 0)
    for given, wanted in {
        "node1:9001": "node1:9001", "[::1]": "[::1]:8476", "[fd00::2]:9001": "[fd00::2]:9001"
    }.items():  # fmt: skip
        assert decide(Options(given, 2, 1), {}, False).address == wanted
    assert decide(Options(), {"NANOCHAT_COORDINATOR_TIMEOUT": "7"}, True) == Plan("ask", 7.0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n7,m1", "n7"), ("n[1-2]", "n1"), ("n[007-9,12],m[3]", "n007"), ("n[12,14]-gpu,m1", "n12-gpu"), ("a-1", "a-1")],
)
def test_one_process_a_node_needs_nothing_but_its_scheduler(nodes, first):
    slurm = SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": nodes}
    assert decide(Options(), slurm, False) == Plan("given", 120.0, None, f"{first}:8476", 2, 1)
    assert decide(Options(port=9, timeout=3), SKYPILOT, False) == Plan("given", 3.0, 9, "10.0.0.5:9", 3, 2)


@pytest.mark.parametrize("tpu", [False, True])
def test_one_node_of_several_is_refused_with_the_command_for_all(monkeypatch, tpu):
    monkeypatch.setattr(launch.sys, "argv", ["/x/.venv/bin/nanochat", "pretrain", "--run-dir", "a b"])
    with pytest.raises(UserError) as e:
        decide(Options(), {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, tpu)
    command = "srun --nodes=4 --ntasks-per-node=1 /x/.venv/bin/nanochat pretrain --run-dir 'a b'"
    assert "has 4 nodes" in str(e.value) and command in str(e.value) and "\n" not in str(e.value)
    alone = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "NANOCHAT_PROCESSES": "1"}
    assert decide(Options(), alone, tpu).kind == "alone"


@pytest.mark.parametrize(
    ("env", "tpu", "command"),
    [
        ({"TPU_NAME": "mine", "ZONE": "us-east5-b"}, True, "gcloud compute tpus tpu-vm ssh mine --zone=us-east5-b "),
        ({}, True, "gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='cd /there && "),
        ({"SLURM_JOB_ID": "7"}, False, "srun --nodes=N --ntasks-per-node=1 "),
        (SKYPILOT, False, "sky exec CLUSTER --num-nodes 3 'cd /there && "),
        (SKYPILOT, True, "sky exec CLUSTER 'cd /there && "),
        ({"KUBERNETES_SERVICE_HOST": "x"}, False, "kubectl get pods"),
        ({}, False, ", each with its own NANOCHAT_PROCESS_ID"),
    ],
)
def test_the_checklist_has_the_command_that_starts_all_workers(monkeypatch, env, tpu, command):
    monkeypatch.setattr(launch.sys, "argv", ["/there/.venv/bin/nanochat", "pretrain", "-s", "seed=1"])
    monkeypatch.setattr(launch.Path, "cwd", lambda: Path("/there"))
    monkeypatch.setattr(rendezvous, "tpu_chips", lambda env: tpu)
    monkeypatch.setattr(rendezvous.os, "environ", env)
    first = rendezvous.checklist("x", "a:1", 1).splitlines()[1]
    assert first.startswith("  - start the same command on every worker") and command in first
    assert (
        "kubectl" in first or "NANOCHAT_PROCESS_ID" in first or "/there/.venv/bin/nanochat pretrain -s seed=1" in first
    )


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"NANOCHAT_PROCESSES": "2"}, "set NANOCHAT_COORDINATOR and NANOCHAT_PROCESS_ID too"),
        ({"NANOCHAT_PROCESS_ID": "0"}, "set NANOCHAT_COORDINATOR and NANOCHAT_PROCESSES too"),
        (NANOCHAT | {"NANOCHAT_PROCESS_ID": "4"}, "NANOCHAT_PROCESS_ID is 4, must be from 0 to 3"),
        (NANOCHAT | {"NANOCHAT_PROCESS_ID": "-1"}, "NANOCHAT_PROCESS_ID is -1, must be at least 0"),
        (NANOCHAT | {"NANOCHAT_PROCESSES": "two"}, "NANOCHAT_PROCESSES is 'two', must be a whole number"),
        (NANOCHAT | {"NANOCHAT_COORDINATOR_TIMEOUT": "0"}, "NANOCHAT_COORDINATOR_TIMEOUT is 0, must be at least 1"),
        (NANOCHAT | {"NANOCHAT_COORDINATOR": "node1:http"}, "must be host or host:port"),
        (NANOCHAT | {"NANOCHAT_COORDINATOR": "node1:70000"}, "must be host or host:port"),
    ],
)
def test_settings_that_do_not_fit_are_named(env, words):
    with pytest.raises(UserError) as e:
        decide(Options(), env, False)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_chips_that_jax_may_not_use_are_no_chips(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "Path", lambda _: tmp_path)
    assert not launch.tpu_chips({})
    (tmp_path / "accel0").touch()
    assert launch.tpu_chips({}) and launch.tpu_chips({"JAX_PLATFORMS": "tpu,cpu"})
    assert not launch.tpu_chips({"JAX_PLATFORMS": "cpu"})


# ---- waiting for all


def together(*calls):
    """Runs the calls in threads; their results, an exception where one was raised."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def meet(address, count, index, timeout=1.0, after=0.0):
    def call():
        time.sleep(after)
        return rendezvous.meet(address, count, index, timeout)

    return call


def test_all_come_in_any_order_and_the_port_is_free_again():
    address = f"localhost:{free_port()}"
    for _ in range(2):
        assert together(*(meet(address, 3, i, 20, after) for i, after in ((2, 0), (0, 0.3), (1, 0.6)))) == [None] * 3


def test_who_is_missing_is_named_to_all_that_came():
    address = f"127.0.0.1:{free_port()}"
    for error in together(meet(address, 4, 0), meet(address, 4, 2)):
        assert isinstance(error, UserError) and "missing: 1, 3; waited 1 s" in str(error)
        lines = str(error).splitlines()
        assert len(lines) >= 5 and all(line.startswith("  - ") for line in lines[1:])
        assert any("every worker" in line for line in lines) and address in str(error)


def test_without_process_0_the_others_say_so():
    (error,) = together(meet(f"127.0.0.1:{free_port()}", 2, 1, 0.5))
    assert isinstance(error, UserError) and "process 1 of 2 found no process 0" in str(error)


def test_a_proxy_is_mentioned_where_there_is_one(monkeypatch):
    monkeypatch.delenv("http_proxy", raising=False)
    assert "proxy" not in rendezvous.checklist("x", "a:1", 1).replace("https_proxy", "").replace("all_proxy", "")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    assert "HTTP_PROXY" in rendezvous.checklist("x", "a:1", 1)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (((0, 3), (1, 3), (1, 3)), "two processes have NANOCHAT_PROCESS_ID 1"),
        (((0, 3), (1, 2)), "process 1 was started for 2 processes, process 0 for 3"),
    ],
)
def test_processes_that_contradict_each_other(calls, words):
    address = f"127.0.0.1:{free_port()}"
    errors = together(*(meet(address, count, index, 3, 0.1 * n) for n, (index, count) in enumerate(calls)))
    assert words in str(errors[0]) and words in str(errors[-1])


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=f"cannot listen at {address}"):
            rendezvous.meet(address, 2, 0, 1)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"", b"[]\n", b'{"process": "x"}\n', b"\xff" * 20_000])
def test_strangers_on_the_port_are_sent_away(said):
    port = free_port()

    def stranger():
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            peer.sendall(said)

    address = f"127.0.0.1:{port}"
    assert together(meet(address, 2, 0, 20), stranger, meet(address, 2, 1, 20, after=0.5))[::2] == [None, None]


def test_a_worker_that_was_started_again_takes_its_place():
    port = free_port()
    address = f"127.0.0.1:{port}"

    def killed():
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            peer.sendall(b'{"process": 1, "of": 3}\n')

    waiting = meet(address, 3, 1, 20, after=0.6)
    assert together(meet(address, 3, 0, 20), killed, waiting, meet(address, 3, 2, 20, after=1.0))[::2] == [None, None]


def test_a_call_that_cannot_be_left_is_ended_from_outside():
    code = (
        "import time; from nanochat_lib.rendezvous import Watchdog\n"
        "with Watchdog(60, 'not this'): pass\n"
        "with Watchdog(0.2, 'nobody came'): time.sleep(60)"
    )
    done = child(code, timeout=50)
    assert done.returncode == 1 and done.stderr == "nanochat: nobody came\n"


START = "import sys; from nanochat_lib import distributed\nprint(distributed.start())"


@pytest.mark.parametrize("index", [0, 1])
def test_a_start_without_all_workers_ends_with_the_checklist(index):
    env = {"NANOCHAT_COORDINATOR": f"127.0.0.1:{free_port()}", "NANOCHAT_PROCESSES": "2"}
    done = child(START, timeout=60, **env, NANOCHAT_PROCESS_ID=str(index), NANOCHAT_COORDINATOR_TIMEOUT="1")
    assert done.returncode == 1 and "Processes" not in done.stdout
    assert ("missing: 1" if index == 0 else "found no process 0") in done.stderr and "  - start the same" in done.stderr


# ---- one process alone

ALONE = """
import os, signal, sys, time
import multiprocessing
from nanochat_lib import distributed, runtime, stopping

assert str(distributed.start()) == "Processes(index=0, count=1)" and distributed.start() is distributed.start()
import jax
assert not jax.distributed.is_initialized()  # one process needs nobody to agree with

# Forked children end when they want to, and can be ended.
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
sleeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
sleeper.start()
sleeper.terminate()
sleeper.join(20)
assert sleeper.exitcode == -signal.SIGTERM

assert int(jax.numpy.arange(3).sum()) == 3
distributed.agree(config="x")
assert distributed.gather_text("x") == ["x"] and distributed.from_first(lambda: [1, None]) == [1, None]

runtime.check_preempted()  # outside the block nobody looks
with stopping.watching():
    try:
        with stopping.deferred():
            runtime.check_preempted()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            runtime.check_preempted()
    except stopping.Preempted:
        print("preempted", flush=True)
os.kill(os.getpid(), signal.SIGTERM)  # and now it is a signal like any other
time.sleep(20)
"""


def test_one_process_alone_sees_a_preemption_and_nothing_else_changes():
    done = child(ALONE)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert done.stdout == "preempted\n"


def test_after_jax_was_used_one_process_starts_all_the_same():
    code = "import jax; jax.devices()\nfrom nanochat_lib import distributed\nprint(distributed.start())"
    done = child(code)
    assert done.returncode == 0 and done.stdout == "Processes(index=0, count=1)\n", done.stderr


# ---- deciding together


def several(monkeypatch, texts, me=0):
    """As if this were process `me` of len(texts), and the processes had said `texts`."""
    monkeypatch.setattr(distributed, "count", lambda: len(texts))
    monkeypatch.setattr(distributed, "index", lambda: me)
    monkeypatch.setattr(distributed, "gather_text", lambda mine: [mine if t is None else t for t in texts])


def test_a_difference_names_what_and_who(monkeypatch):
    monkeypatch.setattr(distributed, "code_hash", lambda: "c" * 64)
    heard = []
    several(monkeypatch, [None])
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "gather_text", lambda mine: heard.append(mine) or [mine, mine])
    distributed.agree(config="a" * 64, tokenizer="t")
    for name, value in (("config", "b" * 64), ("tokenizer", "u"), ("jax", "0.0.1"), ("code", "d"), ("devices", "TPU")):
        import json

        other = json.dumps(json.loads(heard[0]) | {name: value})
        monkeypatch.setattr(distributed, "gather_text", lambda mine, other=other: [mine, mine, other, other])
        with pytest.raises(UserError, match=rf"^process 2, 3 has another {name} \({value[:24]}\) than process 0") as e:
            distributed.agree(config="a" * 64, tokenizer="t")
        assert "\n" not in str(e.value)


def test_one_that_fails_stops_all(monkeypatch):
    several(monkeypatch, ["", "disk full", ""])
    with pytest.raises(UserError, match="process 1: disk full"), distributed.everyone():
        pass
    several(monkeypatch, [None, "", ""])
    with pytest.raises(ValueError, match="mine"), distributed.everyone():
        raise ValueError("mine")
    several(monkeypatch, ["", ""])
    with distributed.everyone():
        pass


def test_only_process_0_makes_what_is_handed_out(monkeypatch):
    several(monkeypatch, ["[4, null]", ""], me=1)
    monkeypatch.setattr(distributed, "everyone", lambda: __import__("contextlib").nullcontext())
    assert distributed.from_first(lambda: pytest.fail("called")) == [4, None]


def test_hashes():
    assert distributed.text_hash({"a": 1, "b": 2}) == distributed.text_hash({"b": 2, "a": 1})
    assert distributed.text_hash({"a": 1}) != distributed.text_hash({"a": 2})


def test_the_hash_of_the_code_sees_every_file(monkeypatch, tmp_path):
    for name in ("a.py", "sub/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(distributed, "__file__", str(tmp_path / "distributed.py"))
    before = distributed.code_hash()
    (tmp_path / "notes.txt").write_text("x")
    assert distributed.code_hash() == before
    (tmp_path / "sub" / "b.py").write_text("other")
    changed = distributed.code_hash()
    (tmp_path / "sub" / "b.py").rename(tmp_path / "sub" / "c.py")
    assert len({before, changed, distributed.code_hash()}) == 3


# ---- the right kind of device


def test_a_run_for_an_accelerator_does_not_go_on_with_the_cpu(monkeypatch):
    distributed.check_platform("cpu")
    for wanted in ("tpu", "gpu"):
        with pytest.raises(UserError, match=f"this run is for a {wanted}, but JAX found only cpu") as e:
            distributed.check_platform(wanted)
        assert "\n" not in str(e.value)
    monkeypatch.setenv("NANOCHAT_ANY_PLATFORM", "1")
    distributed.check_platform("tpu")


def test_who_holds_the_tpu_is_named(tmp_path):
    lock, chip = tmp_path / "lock", tmp_path / "accel0"
    assert distributed.tpu_holder([str(chip)], str(lock)) == ""
    lock.touch()
    assert f"rm -f {lock}" in distributed.tpu_holder([str(chip)], str(lock))
    chip.touch()
    for held in (chip, lock):
        holder = subprocess.Popen(["sleep", "60"], stdin=open(held))
        try:
            assert f"process {holder.pid} holds the TPU" in distributed.tpu_holder([str(chip)], str(lock))
        finally:
            holder.kill()
            holder.wait()


def test_the_first_thing_that_a_run_for_a_tpu_says_is_who_holds_it(monkeypatch):
    monkeypatch.setattr(distributed, "start", lambda: None)
    monkeypatch.setattr(distributed, "tpu_holder", lambda: ": process 7 holds the TPU, end it first")
    with pytest.raises(UserError, match="JAX sees cpu here: process 7 holds the TPU") as e:
        pipeline.check_runnable(preset("tpu-v6e-8-d24"))
    assert "\n" not in str(e.value)
    with pytest.raises(UserError) as e:
        pipeline.check_runnable(preset("gpu-8-d24"))
    assert "holds" not in str(e.value)
