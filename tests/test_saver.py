"""Saving while training goes on: nothing waits, nothing is overwritten, nothing fails in silence."""

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanochat_lib import arrays, checkpoint, step_folders, storage
from nanochat_lib.checkpoint import Saver
from nanochat_lib.durable import RunCopy
from nanochat_lib.errors import UserError
from nanochat_lib.objects import Store, StoreError
from nanochat_lib.runtime import Preempted

ADVANCE = jax.jit(lambda state: {name: leaf + 1 for name, leaf in state.items()}, donate_argnums=0)


def state_at(step):
    return {"w": jnp.full((256, 256), step, jnp.float32), "step": jnp.int32(step)}


class SlowDisk:
    """Writing begins when `let` is set; by then the arrays are in host memory."""

    def __init__(self, monkeypatch):
        self.let, self.plain = threading.Event(), arrays.write
        monkeypatch.setattr(arrays, "write", self.write)

    def write(self, place, leaves, copied):
        copied()
        assert self.let.wait(60)
        self.plain(place, leaves)


@pytest.fixture
def disk(monkeypatch):
    slow = SlowDisk(monkeypatch)
    yield slow
    slow.let.set()


def test_training_goes_on_while_the_disk_is_slow_and_what_is_saved_is_the_state_of_then(tmp_path, disk):
    saver, state = Saver(tmp_path), state_at(5)
    counter = np.array(5)
    saver.save(5, state | {"counter": counter}, {"step": 5}, {"rank": 0})
    counter += 1
    for _ in range(4):
        state = ADVANCE(state)
        saver.poll()
    assert int(state["step"]) == 9 and checkpoint.steps(tmp_path) == [] and saver.busy()
    disk.let.set()
    saver.wait()
    saved, meta = checkpoint.load(tmp_path)
    assert int(saved["step"]) == 5 and (saved["w"] == 5).all() and saved["counter"] == 5
    assert meta == {"step": 5, "processes": [{"rank": 0}]} and not saver.busy()


def test_the_copy_is_one_state_and_goes_when_it_is_written(tmp_path, disk):
    saver, state = Saver(tmp_path), state_at(1)
    live = lambda: sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.shape == (256, 256))  # noqa: E731
    before, size = live(), state["w"].nbytes
    saver.save(1, state, {})
    assert live() - before == size
    disk.let.set()
    saver.wait()
    assert live() == before


def test_an_array_is_copied_before_its_memory_is_used_again():
    leaf, host = jnp.arange(1000.0), np.arange(3)
    assert arrays.own_copy(leaf).unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    assert not np.shares_memory(arrays.own_copy(host), host)


def test_it_returns_when_the_arrays_are_in_host_memory_and_not_before(tmp_path, monkeypatch):
    """An accelerator's arrays are not copied before the writing begins, and the next step reuses their memory."""
    order, plain = [], arrays.write

    def write(place, leaves, copied):
        time.sleep(0.3)
        order.append("copied")
        plain(place, leaves, copied)

    monkeypatch.setattr(arrays, "write", write)
    saver = Saver(tmp_path)
    saver.save(1, state_at(1), {"step": 1})
    order.append("returned")
    saver.wait()
    assert order == ["copied", "returned"]


@pytest.mark.parametrize("damaged", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced_or_set_aside_if_it_is_damaged(tmp_path, damaged):
    """What is damaged stays for a person to look at."""
    saver = Saver(tmp_path)
    saver.save(1, state_at(1), {"step": 1})
    saver.wait()
    meta = step_folders.step_folder(tmp_path, 1) / "meta.json"
    if damaged:
        meta.write_text("{}")
    saver.save(1, state_at(7), {"step": 1})
    saver.wait()
    assert int(checkpoint.load(tmp_path)[0]["step"]) == 7
    aside = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    assert len(list(tmp_path.iterdir())) == 1 + damaged == 1 + len(aside)
    assert all((path / "meta.json").read_text() == "{}" for path in aside)


def test_room_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(arrays, "write", lambda *args: begun.append(1))
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 10)
    with pytest.raises(UserError, match="bytes and 10 are free") as e:
        Saver(tmp_path).save(1, state_at(1), {"step": 1})
    assert "\n" not in str(e.value) and not begun and not list(tmp_path.iterdir())


def test_nothing_is_read_from_the_arrays_once_they_are_copied(tmp_path):
    """On an accelerator they are donated to the next step then."""
    leaves = {"w": jnp.arange(64.0).reshape(8, 8), "step": jnp.int32(3)}
    arrays.write(tmp_path / "arrays", leaves, lambda: [leaf.delete() for leaf in leaves.values()])
    arrays.merge(tmp_path / "arrays")
    storage.atomic_write_json(tmp_path / "arrays.json", {"w": ["float32", [8, 8]], "step": ["int32", []]})
    back = arrays.restore(tmp_path, dict.fromkeys(leaves))
    assert (back["w"] == np.arange(64.0).reshape(8, 8)).all() and back["step"] == 3


def test_one_save_at_a_time(tmp_path, disk):
    saver = Saver(tmp_path)
    saver.save(1, state_at(1), {})
    second = threading.Thread(target=lambda: saver.save(2, state_at(2), {}))
    second.start()
    second.join(0.3)
    assert second.is_alive() and not list(tmp_path.glob("step_00000002*"))
    disk.let.set()
    second.join()
    saver.wait()
    assert checkpoint.steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", ["poll", "save", "wait"])
def test_what_the_disk_refuses_later_comes_out_of_the_next_call(tmp_path, monkeypatch, call):
    saver = Saver(tmp_path)
    saver.save(1, state_at(1), {})
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "merge", lambda place: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        saver.save(2, state_at(2), {})
        while saver.busy():
            pass
        with pytest.raises(UserError) as e:
            saver.save(3, state_at(3), {}) if call == "save" else getattr(saver, call)()
    assert "step_00000002" in str(e.value) and "No space left" in str(e.value) and "\n" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"] and checkpoint.latest(tmp_path) == (1, [])
    saver.save(3, state_at(3), {})  # it is said once
    saver.wait()
    assert checkpoint.latest(tmp_path) == (3, [])


def test_a_folder_that_is_removed_while_it_is_written_is_one_line(tmp_path, monkeypatch):
    saver, plain = Saver(tmp_path / "base"), arrays.write

    def write(place, leaves, copied):
        shutil.rmtree(tmp_path / "base")
        plain(place, leaves, copied)
        shutil.rmtree(tmp_path / "base")
        raise ValueError("what orbax makes of it")

    monkeypatch.setattr(arrays, "write", write)
    saver.save(1, state_at(1), {})
    with pytest.raises(UserError, match="base was removed while the run was using it"):
        saver.wait()


def test_waiting_at_the_end_does_not_hide_why_it_ends(tmp_path, monkeypatch, capsys):
    saver = Saver(tmp_path)
    monkeypatch.setattr(arrays, "merge", lambda place: (_ for _ in ()).throw(OSError(28, "No space left on device")))

    def end_with(error):
        saver.save(1, state_at(1), {})
        try:
            raise error
        finally:
            saver.wait()

    for error in (KeyError("a bug"), KeyboardInterrupt(), Preempted("stopped")):
        with pytest.raises(type(error)):
            end_with(error)
        assert "No space left" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_an_exception_of_somebody_else_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "merge", lambda place: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    try:
        raise KeyError("handled by the caller")
    except KeyError:
        saver = Saver(tmp_path)
        saver.save(1, state_at(1), {})
        with pytest.raises(UserError, match="No space left"):
            saver.wait()


# ---- which ones stay


@pytest.mark.parametrize(
    ("complete", "keep", "keep_every", "removed"),
    [
        ([], 1, -1, []),
        ([5], 1, -1, []),
        ([5, 10, 15, 20, 25], 2, -1, [5, 10, 15]),
        ([25, 5, 15, 20, 10], 2, 10, [5, 15]),
        ([5, 10, 15], 9, -1, []),
        ([3, 7, 11], 1, 5, [3, 7]),
        ([0, 5, 7], 1, 5, []),
    ],
)
def test_keep_policies(complete, keep, keep_every, removed):
    assert step_folders.superfluous(complete, keep, keep_every) == removed


@pytest.mark.parametrize(("keep", "every", "words"), [(0, -1, "keep=0"), (1, 0, "keep_every=0"), (1, -2, "keep_every")])
def test_policies_that_make_no_sense(tmp_path, keep, every, words):
    with pytest.raises(UserError, match=words):
        Saver(tmp_path, None, keep, every)


def flip(place):
    path = max((p for p in (place / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_newest_and_every_nth_stay_and_damaged_ones_too(tmp_path):
    earlier = Saver(tmp_path, None, 9)
    for step in (1, 2, 3, 4):
        earlier.save(step, state_at(step), {})
    earlier.wait()
    flip(checkpoint.step_folder(tmp_path, 1))  # its size is right: only the checksum shows it
    (checkpoint.step_folder(tmp_path, 2) / "meta.json").write_text("")
    saver = Saver(tmp_path, None, 2, 3)
    for step in (5, 6, 7, 8):
        saver.save(step, state_at(step), {})
    saver.wait()
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 6, 7, 8]


def test_a_checkpoint_of_this_run_is_not_read_again_to_be_removed(tmp_path, monkeypatch):
    saver = Saver(tmp_path, None, 1)
    saver.save(1, state_at(1), {})
    saver.wait()
    read = []
    plain = storage.sha256_file
    monkeypatch.setattr(storage, "sha256_file", lambda path: (read.append(str(path)), plain(path))[1])
    saver.save(2, state_at(2), {})
    saver.wait()
    assert checkpoint.steps(tmp_path) == [2] and read and not any("step_00000001" in path for path in read)


# ---- with a copy


@pytest.fixture
def copied(tmp_path):
    copy = RunCopy(str(tmp_path / "store"), tmp_path / "run")
    copy.store.check()
    return Saver(tmp_path / "run" / "base", copy, 1)


def test_both_places_have_the_newest(copied):
    for step in (1, 2):
        copied.save(step, state_at(step), {"step": step})
    copied.wait()
    assert checkpoint.steps(copied.folder) == [2] and copied.durable.checkpoints(copied.folder) == ([2], [])


def test_a_vanished_store_is_a_warning_until_the_end(copied, capsys):
    copied.save(1, state_at(1), {})
    copied.wait()
    away = Path(copied.durable.store.root).rename(copied.folder.parent / "away")
    copied.save(2, state_at(2), {})
    while copied.busy():
        pass
    copied.poll()
    said = capsys.readouterr().out
    assert "step_00000002 is only on this machine" in said and re.search(r"the newest copy is \d+ s old", said)
    assert "is gone" in said and said.count("\n") == 1
    copied.save(3, state_at(3), {})
    with pytest.raises(UserError, match=r"step_00000003 is only on this machine.*same command again") as e:
        copied.wait()
    assert "\n" not in str(e.value)
    assert checkpoint.latest(copied.folder) == (3, [])
    away.rename(copied.durable.store.root)
    copied.wait()  # now it is there
    assert copied.durable.checkpoints(copied.folder) == ([3], [])
    capsys.readouterr()


def test_the_next_save_tries_again(copied, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", lambda *a: (_ for _ in ()).throw(StoreError("403")))
        copied.save(1, state_at(1), {})
        copied.settle()
    assert "403" in capsys.readouterr().out and copied.durable.checkpoints(copied.folder)[0] == []
    copied.save(2, state_at(2), {})
    copied.settle()
    assert capsys.readouterr().out == "" and copied.durable.checkpoints(copied.folder)[0] == [2]


def test_a_preemption_is_not_turned_into_an_error_by_the_store(copied, capsys):
    with pytest.raises(Preempted):
        try:
            copied.save(1, state_at(1), {})
            shutil.rmtree(copied.durable.store.root)
            raise Preempted("stopped by SIGTERM")
        finally:
            copied.wait()
    assert "only on this machine" in capsys.readouterr().out
    assert checkpoint.latest(copied.folder) == (1, [])


# ---- real disks that refuse

REAL = """
import os, resource, shutil, subprocess, sys
import jax.numpy as jnp
from nanochat_lib import checkpoint, storage
from nanochat_lib.errors import UserError
from pathlib import Path
place, kind = Path(sys.argv[1]), sys.argv[2]
small, large = {"w": jnp.ones(1000)}, {"w": jnp.ones(2_500_000)}
def mount(*options):
    subprocess.run(["mount", *options, str(place)], check=True)
if kind == "full":
    mount("-t", "tmpfs", "-o", "size=9m", "none")
    storage.free_bytes = lambda path: 10**12  # what else takes the space while this is written
folder = place / "base"
saver = checkpoint.Saver(folder)
saver.save(1, small, {})
saver.wait()
if kind == "file limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000_000, resource.RLIM_INFINITY))
elif kind == "read-only":
    mount("--bind", str(place))
    mount("-o", "remount,ro,bind")
elif kind == "removed":
    shutil.rmtree(folder)
try:
    saver.save(2, large, {})
    saver.wait()
except UserError as error:
    print("SAID", error)
left = sorted(p.name for p in folder.iterdir()) if folder.exists() else None
print("LEFT", left, checkpoint.latest(folder))
"""
HOLDS = "LEFT ['step_00000001'] (1, [])"


@pytest.mark.parametrize(
    ("kind", "words", "left"),
    [
        ("full", "No space left on device", HOLDS),
        ("file limit", "File too large", HOLDS),
        ("read-only", "Read-only file system", HOLDS),
        ("removed", "was removed while the run was using it", "LEFT None (None, [])"),
    ],
)
def test_a_real_disk_that_refuses_costs_only_the_save(tmp_path, kind, words, left):
    command = [sys.executable, "-c", REAL, str(tmp_path), kind]
    if kind in ("full", "read-only"):
        command = ["unshare", "--mount", "--map-root-user", *command]
        if subprocess.run(
            [*command[:3], "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True
        ).returncode:
            pytest.skip("no mounts of one's own here")
    root = str(Path(checkpoint.__file__).parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin:/sbin", "PYTHONPATH": root, "HOME": root,
                                                      "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert len(said) == 1 and words in said[0] and str(tmp_path) in said[0], done.stdout + done.stderr
    assert left in done.stdout
    # Now and then orbax's own loop is gone when the last of its writes has failed, and Python says so.
    assert done.stderr.count("Traceback") == done.stderr.count("\nRuntimeError: Event loop is closed"), done.stderr
