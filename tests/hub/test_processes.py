"""`nanochat data get` as a process of its own: two at once, killed, interrupted, behind a mirror, without a network."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback import Fault
from samples import CLIMBMIX, SHARDS

ROOT = Path(__file__).parents[2]
ZERO, ONE, VALIDATION = "shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"


def start(*argv: str, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nanochat_lib", "data", "get", *argv]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job is deaf to Ctrl-C
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    assert out == "" and "Traceback" not in err, err
    return process.returncode, err


def whole(home: Path, *names: str) -> None:
    folder = home / "base_data_climbmix"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: SHARDS[name] for name in names}


def until(holds, process: subprocess.Popen) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def part_bytes(home: Path, name: str) -> int:
    return sum(path.stat().st_size for path in home.rglob(f"{name}.tmp-*"))


def test_two_at_once_fetch_each_byte_once(hub, home) -> None:
    """HF_ENDPOINT is all that leads them to the server (DL-06)."""
    for name in (ZERO, ONE, VALIDATION):
        hub.faults[f"bucket/{CLIMBMIX}/{name}"] = [Fault("slow", 1.5)]
    both = [start("climbmix", "--shards", "2") for _ in range(2)]
    told = [finish(process) for process in both]
    assert [code for code, _ in told] == [0, 0]
    assert sum("another process is fetching it; waiting" in err for _, err in told) == 1, told
    whole(home, ZERO, ONE, VALIDATION)
    assert all(len(hub.asked("GET", f"bucket/{CLIMBMIX}/{name}")) == 1 for name in (ZERO, ONE, VALIDATION))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_and_started_again(how: signal.Signals, hub, home) -> None:
    """DL-04: nothing that is cut has the file's name, the lock is gone with its holder, and no byte comes twice."""
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [Fault("stall", 70_000)]
    process = start("climbmix", "--shards", "1", HF_HUB_DOWNLOAD_TIMEOUT="60")
    until(lambda: part_bytes(home, ZERO) and (home / "base_data_climbmix" / VALIDATION).exists(), process)
    process.send_signal(how)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how) and "Traceback" not in err
    assert time.monotonic() - began < 10  # the stall lasts twenty
    assert not (home / "base_data_climbmix" / ZERO).exists()
    had = part_bytes(home, ZERO)
    code, err = finish(start("climbmix", "--shards", "1"))
    assert code == 0 and "fetching 1 file," in err
    whole(home, ZERO, VALIDATION)
    assert hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")[-1]["Range"] == f"bytes={had}-"


def test_waiting_for_another_process_has_a_limit(hub, home) -> None:
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [Fault("stall", 0)]
    first = start("climbmix", "--shards", "1", HF_HUB_DOWNLOAD_TIMEOUT="60")
    until(lambda: (home / "base_data_climbmix" / VALIDATION).exists(), first)
    code, err = finish(start("climbmix", "--shards", "1", "--wait", "0.2"))
    assert code == 2 and "another process has been fetching climbmix" in err and "--wait SECONDS" in err
    first.kill()
    first.communicate()


def test_offline_with_and_without_the_files(hub, home) -> None:
    code, err = finish(start("climbmix", "--shards", "1", HF_HUB_OFFLINE="1"))
    assert code == 2 and hub.log == [] and err.count("\n") == 1
    assert "offline mode (HF_HUB_OFFLINE)" in err and f"climbmix/{VALIDATION}, climbmix/{ZERO} not in" in err
    folder = home / "base_data_climbmix"  # as a teacher copies it onto machines without a network, read-only
    folder.mkdir(parents=True)
    for name in (ZERO, VALIDATION):
        (folder / name).write_bytes(SHARDS[name])
    code, err = finish(start("climbmix", "--shards", "1", HF_HUB_OFFLINE="1"))
    assert code == 0 and "all there" in err and hub.log == []
    assert [path.name for path in home.iterdir()] == ["base_data_climbmix"]  # nothing had to be written
