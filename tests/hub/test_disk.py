"""`nanochat data get` and what it finds or leaves on the disk: broken files, parts, archives, no room."""

import json
import time

import pytest
from calling import HALF, ONE, VALIDATION, ZERO, get, leave_part, on_disk, part_of, same
from loopback import Fault
from samples import CLIMBMIX, SHARDS, bundle, parquet

from nanochat_lib.hub import fetch, pool

# --- What lies on the disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes"),
        (SHARDS[ZERO][:-1], "no parquet footer"),
        (SHARDS[ZERO][:HALF], "no parquet footer"),
        (b"x" * len(SHARDS[ZERO]), "no parquet footer"),
    ],
)
def test_a_broken_shard_is_noticed_and_fetched_again(data, words: str, record: bool, hub, home, capsys) -> None:
    """DATA-07. With and without the notes of what was fetched: a folder may come from elsewhere."""
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    (home / "base_data_climbmix" / ZERO).write_bytes(data)
    if not record:
        (home / "downloads.jsonl").unlink()
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 0 and f"{ZERO} will be fetched again" in err
    assert words in err or (record and "instead of" in err)
    same(home, ZERO, VALIDATION)


def test_a_shard_with_a_hole_is_noticed_by_its_size(hub, home, capsys) -> None:
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    whole = SHARDS[ZERO]
    (home / "base_data_climbmix" / ZERO).write_bytes(whole[:HALF] + whole[HALF + 100 :])  # the footer is there
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 0 and f"{len(whole) - 100:,} bytes instead of {len(whole):,}" in err
    same(home, ZERO, VALIDATION)


def test_a_broken_file_of_a_split_is_fetched_again_alone(hub, home, capsys) -> None:
    for split in ("train", "test"):
        for i in range(2):
            hub.add("openai/gsm8k", f"main/{split}/{i:04d}.parquet", parquet(i, 5), "refs/convert/parquet")
    assert get(capsys, "gsm8k")[0] == 0
    folder = home / "task_data/openai--gsm8k/main/train"
    (folder / "00001.parquet").write_bytes(b"")
    hub.log.clear()
    code, err = get(capsys, "gsm8k")
    assert code == 0 and "main/train will be fetched again: 00001.parquet: 0 bytes" in err
    assert len(hub.asked("GET", ".parquet")) == 2  # its address and its bytes
    assert (folder / "00001.parquet").read_bytes() == parquet(1, 5)
    (folder / "manifest.json").write_text("{")  # and a manifest that was cut
    assert get(capsys, "gsm8k")[0] == 0
    assert json.loads((folder / "manifest.json").read_text()) == ["00000.parquet", "00001.parquet"]


def test_an_archive_of_unknown_size(hub, home, capsys, naps) -> None:
    hub.beside["eval_bundle.zip"] = bundle()
    hub.faults["beside/eval_bundle.zip"] = [Fault("bare")]
    code, err = get(capsys, "core")
    assert code == 0 and (home / "eval_bundle/core.yaml").exists() and naps == []
    assert "fetching 1 file, size unknown, into" in err and f"download: {len(bundle()) / 1000:.1f} kB · 1 of 1" in err


def test_a_cut_archive_is_not_unpacked(hub, home, capsys, naps) -> None:
    """DL-05: detected, thrown away, fetched again."""
    whole = bundle()
    hub.beside["eval_bundle.zip"] = whole[: len(whole) // 2]  # the server's own copy is cut
    code, err = get(capsys, "core")
    assert code == 1 and "core: not a whole zip archive" in err
    assert not (home / "eval_bundle").exists() and not list(home.glob("eval_bundle.zip*"))
    hub.beside["eval_bundle.zip"] = whole[:200] + b"????" + whole[204:]  # a byte in the middle has turned
    assert get(capsys, "core")[0] == 1
    hub.beside["eval_bundle.zip"] = whole
    assert get(capsys, "core")[0] == 0 and (home / "eval_bundle/core.yaml").exists()


@pytest.mark.parametrize("missing", ["core.yaml", "eval_meta_data.csv", "eval_data/commonsense/copa.jsonl"])
def test_a_zip_that_is_no_bundle(missing: str, hub, home, capsys) -> None:
    hub.beside["eval_bundle.zip"] = bundle(leave_out=missing)
    code, err = get(capsys, "core")
    assert code == 2 and "no evaluation bundle" in err
    assert not (home / "eval_bundle").exists() and not list(home.glob("*.zip"))  # it is fetched again next time


@pytest.mark.parametrize("top", ["../", "/", "eval_bundle/../../"])
def test_a_zip_cannot_write_beside_its_folder(top: str, hub, home, capsys) -> None:
    hub.beside["eval_bundle.zip"] = bundle(top)
    code, err = get(capsys, "core")
    assert code == 2 and "path out of its folder" in err
    assert not list(home.parent.rglob("core.yaml")) and not list(home.glob("*.zip"))


def test_a_bundle_that_lost_a_file_is_fetched_again(hub, home, capsys) -> None:
    hub.beside["eval_bundle.zip"] = bundle("")
    assert get(capsys, "core")[0] == 0
    (home / "eval_bundle/eval_data/commonsense/copa.jsonl").unlink()
    code, err = get(capsys, "core")
    assert code == 0 and "copa.jsonl is missing" in err
    assert (home / "eval_bundle/eval_data/commonsense/copa.jsonl").exists()


# --- The disk ---------------------------------------------------------------------------------------------------------


def test_too_little_room_is_said_before_the_first_byte(hub, home, capsys, monkeypatch) -> None:
    from nanochat_lib import storage

    monkeypatch.setattr(storage, "free_bytes", lambda path: 1000)
    code, err = get(capsys, "climbmix", "--shards", "1")
    needed = len(SHARDS[ZERO]) + len(SHARDS[VALIDATION])
    assert code == 2 and err.startswith("nanochat: cannot write")
    assert f"needs {needed:,} bytes and 1,000 are free" in err
    assert hub.asked("GET", ZERO) == []


@pytest.mark.parametrize("missing", [0, 1])
def test_room_is_needed_for_what_is_missing_of_a_file_only(missing: int, hub, home, capsys, monkeypatch) -> None:
    from nanochat_lib import storage

    leave_part(home, SHARDS[ZERO][:HALF])
    needed = len(SHARDS[ZERO]) + len(SHARDS[VALIDATION]) - HALF
    monkeypatch.setattr(storage, "free_bytes", lambda path: needed - missing)
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 2 * missing and ("are free" in err) == bool(missing), err


def test_a_disk_that_fills_up_stops_everything_and_keeps_what_is_there(hub, home, capsys, naps, monkeypatch) -> None:
    import errno

    write_all, written = fetch._write_all, [0]

    def full(out, chunk: bytes) -> None:
        if written[0] + len(chunk) > len(SHARDS[VALIDATION]) + 70_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        written[0] += len(chunk)
        write_all(out, chunk)

    monkeypatch.setattr(fetch, "_write_all", full)
    code, err = get(capsys, "climbmix", "--shards", "2", "--workers", "1")
    assert code == 2 and "No space left on device" in err and "free space there" in err and naps == []
    assert sorted(on_disk(home)) == sorted([part_of(home).name, VALIDATION])
    monkeypatch.setattr(fetch, "_write_all", write_all)
    assert get(capsys, "climbmix", "--shards", "2")[0] == 0
    same(home, ZERO, ONE, VALIDATION)
    assert "Range" in hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")[-1]


# --- What the user sees -----------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_parts_that_are_resumed(hub, home, capsys, monkeypatch) -> None:
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [Fault("slow", 2.0)]
    update = pool.ByteProgress.update

    def interrupt(self, n: int = 1) -> None:
        update(self, n)
        if self.done > len(SHARDS[VALIDATION]) + HALF:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool.ByteProgress, "update", interrupt)
    assert get(capsys, "climbmix", "--shards", "1")[0] == 130
    parts = sorted(on_disk(home))
    assert parts == sorted([part_of(home).name, VALIDATION])
    left = part_of(home).read_bytes()
    assert len(left) > HALF / 2 and SHARDS[ZERO].startswith(left)
    time.sleep(0.3)
    assert part_of(home).read_bytes() == left  # nobody goes on in secret
    monkeypatch.setattr(pool.ByteProgress, "update", update)
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    same(home, ZERO, VALIDATION)


def test_the_line_of_progress(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = pool.ByteProgress(1_000_000_000, 10, 200_000_000)
    for _ in range(40):
        clock[0] += 1
        progress.done += 10_000_000
        progress.rate()
    progress.finished = 6
    assert progress.line() == "download: 600.0 MB of 1.0 GB · 6 of 10 files · 10.0 MB/s · 0:40 left"
    clock[0] += 60  # a stall shows in the rate
    assert "6 of 10 files · 0 B/s · unknown left" in progress.line()
