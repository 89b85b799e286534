"""A run's copy in a store: what a fresh machine gets from it, what it does not believe, and what it removes."""

import json
import shutil
import time
import uuid
from pathlib import Path

import jax.numpy as jnp
import pytest
from object_stores import gs_server, s3_server

from nanochat_lib import checkpoint, durable, objects, storage
from nanochat_lib.durable import RunCopy
from nanochat_lib.errors import UserError
from nanochat_lib.objects import StoreError


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run folder with its small files and checkpoints 10, 20 and 30, written once; tests work on copies."""
    run = tmp_path_factory.mktemp("three") / "run"
    for name, text in {
        "config.json": "{}", "metrics.jsonl": '{"step": 30}\n', "status.json": "{}", "report.html": "<p>",
        "stages/pretrain.json": "{}", "tokenizer/tokenizer.json": "{}", "notes.txt": "mine", "core_bundle/x": "big",
    }.items():  # fmt: skip
        storage.atomic_write_text(run / name, text)
    for step in (10, 20, 30):
        checkpoint.save(run / "base", step, {"params": {"w": jnp.arange(4.0) * step}}, {"step": step}, {}, keep=9)
    return run


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def gs():
    with gs_server("bucket") as url:
        yield url


@pytest.fixture
def run(three, tmp_path):
    return Path(shutil.copytree(three, tmp_path / "run"))


@pytest.fixture
def copy(run, tmp_path):
    """The run's copy in a folder, with its small files and checkpoints 10 and 20."""
    copy = RunCopy(str(tmp_path / "store"), run)
    copy.store.check()
    for step in (10, 20):
        copy.push(place(run, step))
    return copy


def place(run, step):
    return checkpoint.step_folder(run / "base", step)


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["folder", "memory", "s3", "gs"])
def test_a_fresh_machine_gets_the_small_files_and_the_newest_checkpoint(run, tmp_path, kind, request):
    name = uuid.uuid4().hex
    url = {"folder": lambda: str(tmp_path / "store"), "memory": lambda: f"memory://{name}",
           "s3": lambda: request.getfixturevalue("s3").bucket(name) + "/runs/mine",
           "gs": lambda: f"{request.getfixturevalue('gs')}/{name}"}[kind]()  # fmt: skip
    copy = RunCopy(url, run)
    assert copy.config() is None and copy.open() == ""
    for step in (10, 20, 30):
        copy.push(place(run, step))
    fresh = RunCopy(url, tmp_path / "fresh")
    assert fresh.config() == {}
    assert "6 files of the run taken from there" in fresh.open()
    assert fresh.newest(tmp_path / "fresh" / "base") == (30, [])
    assert fresh.newest(tmp_path / "fresh" / "sft") == (None, [])
    got, had = contents(tmp_path / "fresh"), contents(run)
    small = {n for n in had if "/" not in n or n.startswith(("stages", "tokenizer"))} - {"notes.txt", ".durable.json"}
    wanted = small | {n for n in had if n.startswith("base/step_00000030/")}
    assert set(got) - {".durable.json"} == wanted and all(got[n] == had[n] for n in wanted)
    state, meta = checkpoint.load(tmp_path / "fresh" / "base")
    assert state["params/w"].tolist() == [0, 30, 60, 90] and meta["step"] == 30


def inside(copy, step):
    return Path(copy.store.root) / "base" / f"step_{step:08d}"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(folder):
    return max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGE = {
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "was never finished"),
    "zero bytes": (lambda p: largest(p).write_bytes(b""), "has 0 bytes instead of"),
    "changed byte": (lambda p: flip(largest(p)), "was changed"),
    "missing object": (lambda p: largest(p).unlink(), "is missing"),
    "cut manifest": (lambda p: (p / "manifest.json").write_text('{"fi'), "manifest.json is damaged"),
    "odd manifest": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    "renamed": (lambda p: (shutil.rmtree(p), shutil.copytree(p.with_name("step_00000010"), p)), "holds step 10"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_hold_in_the_store_is_named_and_left_alone(copy, run, tmp_path, damage):
    hurt, words = DAMAGE[damage]
    hurt(inside(copy, 20))
    before, good = contents(inside(copy, 20)), contents(inside(copy, 10))
    fresh = RunCopy(copy.url, tmp_path / "fresh")
    step, problems = fresh.newest(tmp_path / "fresh" / "base")
    assert step == 10 and len(problems) == 1 and words in problems[0] and copy.url in problems[0]
    assert str(tmp_path / "fresh") not in problems[0]
    assert [p.name for p in (tmp_path / "fresh" / "base").iterdir()] == ["step_00000010"]
    fresh.prune(tmp_path / "fresh" / "base", 1, -1)
    assert contents(inside(copy, 20)) == before
    assert contents(inside(copy, 10)) == good  # the newest that is whole
    assert fresh.newest(tmp_path / "fresh" / "base") == (10, problems)
    fresh.run_dir = run  # it comes to step 20 by itself
    fresh.open()
    fresh.push(place(run, 20))
    assert fresh.checkpoints(run / "base") == ([10, 20], [])


@pytest.mark.parametrize("meanwhile", ["without a manifest", "of other sizes"])
def test_a_checkpoint_that_is_written_anew_is_looked_at_anew(copy, run, meanwhile):
    """Sizes are remembered from one look to the next; another machine may repair what was wrong."""
    manifest = "base/step_00000020/manifest.json"
    files = copy.store.read_json(manifest)
    assert copy.checkpoints(run / "base") == ([10, 20], [])
    copy.store.write("base/step_00000020/meta.json", bytes(77))
    if meanwhile == "without a manifest":
        copy.store.remove([manifest])
    steps, problems = copy.checkpoints(run / "base")
    assert steps == [10] and len(problems) == 1
    files["files"]["meta.json"]["size"] = 77
    copy.store.write(manifest, json.dumps(files).encode())
    assert copy.checkpoints(run / "base") == ([10, 20], [])


def test_stray_objects_harm_nothing(copy, tmp_path):
    for name in (".DS_Store", "base/.DS_Store", "base/step_00000020/.DS_Store", "base/step_00000099", "base/step_20/x",
                 "base/step_00000030_old/manifest.json", "base/notes/step_00000040/manifest.json", "config.json.bak",
                 "stages/pretrain.json.tmp-12345678", "tokenizer/tokenizer.json.tmp-12345678"):  # fmt: skip
        copy.store.write(name, b"{}")
    fresh = RunCopy(copy.url, tmp_path / "fresh")
    assert "6 files" in fresh.open()
    assert fresh.newest(tmp_path / "fresh" / "base") == (20, [])
    fresh.prune(tmp_path / "fresh" / "base", 1, -1)
    assert {"base/.DS_Store", "base/step_00000099", "base/step_20/x"} < set(copy.store.sizes())


def test_the_newer_one_is_used_wherever_it_is(copy, run):
    base = run / "base"
    assert copy.newest(base) == (30, [])  # only here
    shutil.rmtree(place(run, 30))
    (place(run, 20) / "here").touch()
    assert copy.newest(base) == (20, []) and (place(run, 20) / "here").exists()  # in both: nothing is fetched
    shutil.rmtree(place(run, 20))
    assert copy.newest(base) == (20, []) and not (place(run, 20) / "here").exists()  # only there
    flip(largest(place(run, 20)))
    step, problems = copy.newest(base)
    assert step == 20 and "was changed" in problems[0] and storage.verify_manifest(place(run, 20)) == []
    assert len(list(base.glob("step_00000020.damaged-*"))) == 1


def test_the_keep_policy_holds_in_the_store(copy, run):
    base = run / "base"
    for step in (30, 40, 50, 60):
        checkpoint.save(base, step, {"x": jnp.zeros(1)}, {"step": step}, keep=9)
        copy.push(place(run, step))
    (inside(copy, 40) / "manifest.json").unlink()
    copy.prune(base, 2, 20)
    assert copy.checkpoints(base)[0] == [20, 50, 60]
    assert len(contents(inside(copy, 40))) > 3 and not contents(inside(copy, 10)) and not contents(inside(copy, 30))


def test_a_removal_that_stops_half_way_leaves_nothing_that_looks_valid(copy, run, monkeypatch):
    removed = []

    def stop_at_the_second(names):
        removed.append(list(names))
        if len(removed) == 2:
            raise StoreError("gone")
        plain(removed[-1])

    plain = copy.store.remove
    monkeypatch.setattr(copy.store, "remove", stop_at_the_second)
    with pytest.raises(StoreError):
        copy.prune(run / "base", 1, -1)
    assert copy.checkpoints(run / "base")[0] == [20] and len(contents(inside(copy, 10))) > 3


def test_an_upload_that_fails_half_way_does_not_count_and_is_completed_later(copy, run, tmp_path, monkeypatch):
    sent = []

    def fail_at_the_third(local, name):
        sent.append(name)
        if len(sent) == 3:
            raise StoreError("network gone")
        plain(local, name)

    plain = copy.store.put
    with monkeypatch.context() as patch:
        patch.setattr(objects, "PARALLEL", 1)
        patch.setattr(copy.store, "put", fail_at_the_third)
        with pytest.raises(StoreError, match="network gone"):
            copy.push(place(run, 30))
    fresh = RunCopy(copy.url, tmp_path / "fresh")
    step, problems = fresh.newest(tmp_path / "fresh" / "base")
    assert step == 20 and len(problems) == 1 and "was never finished" in problems[0]
    copy.push(place(run, 30))
    assert fresh.newest(tmp_path / "fresh" / "base")[0] == 30


def test_a_checkpoint_written_again_replaces_the_one_there(copy, run, tmp_path):
    checkpoint.save(run / "base", 20, {"x": jnp.ones(3)}, {"step": 20}, keep=9)
    copy.push(place(run, 20))
    fresh = RunCopy(copy.url, tmp_path / "fresh")
    assert fresh.newest(tmp_path / "fresh" / "base") == (20, [])
    assert checkpoint.load(tmp_path / "fresh" / "base")[0]["x"].tolist() == [1, 1, 1]
    before = {p: p.stat().st_mtime_ns for p in inside(copy, 20).rglob("*")}
    copy.push(place(run, 20))  # it is there: nothing is sent
    assert before == {p: p.stat().st_mtime_ns for p in inside(copy, 20).rglob("*")}


def test_a_replacement_that_stops_half_way_is_no_mixture_that_counts(copy, run, monkeypatch):
    """The objects have the same sizes as before: nothing but the missing manifest tells."""
    checkpoint.save(run / "base", 20, {"params": {"w": jnp.arange(4.0) * 99}}, {"step": 20}, {}, keep=9)

    def fail(folder, names, under):
        raise StoreError("network gone")

    with monkeypatch.context() as patch:
        patch.setattr(copy.store, "put_all", fail)
        with pytest.raises(StoreError, match="network gone"):
            copy.push(place(run, 20))
    assert copy.checkpoints(run / "base")[0] == [10]


def test_a_copy_that_was_begun_later_catches_up(copy, run):
    shutil.rmtree(place(run, 30))
    assert copy.catch_up(run / "base") == ""  # it has 20
    assert copy.catch_up(run / "sft") == ""
    checkpoint.save(run / "base", 40, {"x": jnp.zeros(1)}, {"step": 40}, keep=9)
    assert copy.catch_up(run / "base") == f"{copy.url}: checkpoint 40 of base copied there"
    assert copy.checkpoints(run / "base") == ([10, 20, 40], []) and copy.catch_up(run / "base") == ""


def test_only_changed_files_are_sent_again(copy, run, monkeypatch):
    sent = []
    plain = copy.store.write
    monkeypatch.setattr(copy.store, "write", lambda name, data: (sent.append(name), plain(name, data)))
    copy.push_files()
    with open(run / "metrics.jsonl", "a") as out:
        out.write("more\n")
    copy.push_files()
    assert sent == ["copy.json", "metrics.jsonl", "copy.json"]
    assert copy.store.read("metrics.jsonl") == b'{"step": 30}\nmore\n'


def test_two_runs_in_one_place_stop_each_other(copy, run, tmp_path):
    rival = RunCopy(copy.url, tmp_path / "rival")
    rival.open()
    rival.push_files()
    with pytest.raises(UserError, match="another run has written there meanwhile") as e:
        copy.push(place(run, 30))
    assert not isinstance(e.value, StoreError) and "\n" not in str(e.value)
    rival.push_files()


@pytest.mark.parametrize("moment", ["before the mark", "after the mark"])
def test_a_kill_while_copying_does_not_make_a_machine_a_stranger(copy, run, monkeypatch, moment):
    def kill(name, data):
        if name == "copy.json" and moment == "after the mark":
            plain(name, data)
        if name == "copy.json":
            raise KeyboardInterrupt
        plain(name, data)

    plain = copy.store.write
    with monkeypatch.context() as patch:
        patch.setattr(copy.store, "write", kill)
        with pytest.raises(KeyboardInterrupt):
            copy.push_files()
    again = RunCopy(copy.url, run)
    assert again.open() == ""
    again.push_files()


def test_a_machine_that_comes_back_takes_what_its_follower_left(copy, run, tmp_path):
    follower = RunCopy(copy.url, tmp_path / "follower")
    follower.open()
    storage.atomic_write_text(tmp_path / "follower" / "stages" / "sft.json", "{}")
    follower.push_files()
    back = RunCopy(copy.url, run)
    assert "files of the run taken from there" in back.open()
    assert (run / "stages" / "sft.json").exists() and (run / "notes.txt").read_text() == "mine"
    back.push_files()


def test_a_run_that_was_further_keeps_its_own_files(copy, run, tmp_path):
    """The copy is an old one of this run, which went on without it."""
    (run / durable.OWN_MARK).unlink()
    mark = json.loads(copy.store.read("copy.json"))
    copy.store.write("copy.json", json.dumps(mark | {"time": time.time() - 9999}).encode())
    storage.atomic_write_text(run / "stages" / "sft.json", "{}")
    later = RunCopy(copy.url, run)
    assert later.open() == "" and later.age() == "2.8 h"
    later.push_files()
    assert later.store.read("stages/sft.json") == b"{}" and later.age() == "0 s"


def test_too_little_room_to_fetch_leaves_nothing(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda path: 10)
    with pytest.raises(UserError, match="10 are free"):
        RunCopy(copy.url, tmp_path / "fresh").newest(tmp_path / "fresh" / "base")
    assert list((tmp_path / "fresh" / "base").iterdir()) == []
