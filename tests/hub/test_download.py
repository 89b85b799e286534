"""`nanochat data get` through the real client against a server that misbehaves as servers do."""

import json
import time
from email.utils import formatdate

import pytest
from calling import HALF, ONE, VALIDATION, ZERO, get, leave_part, on_disk, same
from huggingface_hub import constants
from loopback import Fault, LoopbackHub
from samples import CLIMBMIX, SHARDS, bundle, parquet

from nanochat_lib.hub.patience import TRIES

# --- As it should be --------------------------------------------------------------------------------------------------


def test_the_validation_shard_always_comes_and_a_second_start_asks_nobody(hub, home, capsys, naps) -> None:
    code, err = get(capsys, "climbmix", "--shards", "2")
    assert code == 0 and "3 of 3 files" in err and naps == []
    same(home, ZERO, ONE, VALIDATION)
    before = len(hub.log)
    code, err = get(capsys, "climbmix", "--shards", "2")
    assert code == 0 and "all there" in err and len(hub.log) == before
    code, err = get(capsys, "climbmix", "--shards", "3")  # only what is missing
    assert code == 0 and "fetching 1 file," in err
    assert len(hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")) == 1
    for headers in hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}"):
        assert headers["Accept-Encoding"] == "identity"


def test_zero_shards_are_the_validation_shard(hub, home, capsys) -> None:
    assert get(capsys, "climbmix", "--shards", "0")[0] == 0
    same(home, VALIDATION)


def test_several_data_sets_in_one_go(hub, home, capsys, monkeypatch) -> None:
    rows = {path: parquet(i, 5) for i, path in enumerate(["main/train/0000", "main/train/0001", "main/test/0000"])}
    for path, data in rows.items():
        hub.add("openai/gsm8k", f"{path}.parquet", data, "refs/convert/parquet")
    hub.add("openai/gsm8k", "socratic/train/0000.parquet", b"not asked for", "refs/convert/parquet")
    hub.beside["eval_bundle.zip"] = bundle()
    hub.beside["identity_conversations.jsonl"] = b'[{"role": "user", "content": "who are you?"}]\n'
    code, err = get(capsys, "gsm8k", "climbmix", "core", "identity", "gsm8k", "--shards", "1")
    assert code == 0, err
    same(home, ZERO, VALIDATION)
    folder = home / "task_data/openai--gsm8k/main"
    assert json.loads((folder / "train/manifest.json").read_text()) == ["00000.parquet", "00001.parquet"]
    assert (folder / "train/00001.parquet").read_bytes() == rows["main/train/0001"]
    assert (folder / "test/00000.parquet").read_bytes() == rows["main/test/0000"]
    assert not (folder.parent / "socratic").exists()
    from nanochat_lib.evaluate.core import load_bundle

    assert [task.label for task in load_bundle(home / "eval_bundle")] == ["copa"]
    assert not (home / "eval_bundle.zip").exists() and not (home / "eval_bundle/__MACOSX").exists()
    assert (home / "identity_conversations.jsonl").read_bytes() == hub.beside["identity_conversations.jsonl"]
    before = len(hub.log)
    assert get(capsys, "gsm8k", "climbmix", "core", "identity", "--shards", "1")[0] == 0 and len(hub.log) == before


def test_the_token_goes_to_the_hub_and_to_nobody_else(hub, home, capsys, monkeypatch) -> None:
    bucket = LoopbackHub()  # another host, as large files have
    bucket.files = hub.files
    hub.bucket = bucket.url
    hub.beside["eval_bundle.zip"] = bundle()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, err = get(capsys, "climbmix", "core", "--shards", "0")
    bucket.close()
    assert code == 0, err
    same(home, VALIDATION)
    assert all("secret" in headers["authorization"] for _, path, headers in hub.log if "beside" not in path)
    others = [headers for _, path, headers in bucket.log + hub.log if "bucket" in path or "beside" in path]
    assert len(bucket.log) == 1 and len(others) == 3
    assert not any("authorization" in {name.lower() for name in headers} for headers in others)


# --- Answers that are no data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_it_waits_as_told_and_then_goes_on(status: int, hub, home, capsys, naps) -> None:
    """DL-02. The other files are not disturbed."""
    hub.faults[f"resolve/{ONE}"] = [Fault("status", status, {"Retry-After": "37"}), Fault("status", status)]
    code, err = get(capsys, "climbmix", "--shards", "2", "--workers", "1")
    assert code == 0 and f"climbmix/{ONE}: {status}, " in err and "; again in 37 s" in err
    assert naps == [37.0, 4.0]  # as told; untold, the second pause of 2, 4, 8, 16
    same(home, ZERO, ONE, VALIDATION)


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"RateLimit": '"resolvers";r=0;t=55'}, 55, 55),
        ({"RateLimit": '"resolvers";r=3;t=55'}, 2, 2),
        ({"Retry-After": "soon"}, 2, 2),
        ({"Retry-After": 100}, 40, 100),  # a number: a date so many seconds from now
        ({"Retry-After": -100}, 0, 0),
    ],
)
def test_every_way_to_be_told(headers: dict, low: float, high: float, hub, home, capsys, naps) -> None:
    now = time.time()
    headers = {n: v if isinstance(v, str) else formatdate(now + v, usegmt=True) for n, v in headers.items()}
    hub.faults[f"resolve/{VALIDATION}"] = [Fault("status", 429, headers)]
    assert get(capsys, "climbmix", "--shards", "0")[0] == 0
    assert len(naps) == 1 and low <= naps[0] <= high


def test_the_list_of_files_is_asked_for_patiently_too(hub, home, capsys, naps) -> None:
    hub.faults[f"{CLIMBMIX}/paths-info"] = [Fault("status", 429, {"Retry-After": "5"}), Fault("status", 502)]
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 0 and naps == [5.0, 4.0] and "climbmix: 429" in err and "climbmix: 502" in err
    same(home, ZERO, VALIDATION)


def test_a_stall_while_the_list_is_asked_for(hub, home, capsys, naps, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults[f"{CLIMBMIX}/paths-info"] = [Fault("stall")]
    code, err = get(capsys, "climbmix", "--shards", "0")
    assert code == 0 and naps == [2.0] and "climbmix: ReadTimeout" in err


def test_patience_has_an_end(hub, home, capsys, naps) -> None:
    hub.faults[f"resolve/{ONE}"] = [Fault("status", 503) for _ in range(20)]
    hub.faults[f"resolve/{ZERO}"] = [Fault("status", 429, {"Retry-After": "7200"})]
    code, err = get(capsys, "climbmix", "--shards", "2", "--workers", "1")
    assert code == 1 and naps == [2.0, 4.0, 8.0, 16.0] and len(hub.asked("GET", f"main/{ONE}")) == TRIES
    assert f"climbmix/{ONE}: 503, service unavailable ({TRIES} tries)" in err
    assert f"climbmix/{ZERO}: 429, too many requests" in err and "asks to wait 7,200 s" in err
    same(home, VALIDATION)


def test_what_is_absent_is_named_and_the_rest_is_kept(hub, home, capsys, naps) -> None:
    """DL-07: an exit code that a script sees, and a list."""
    del hub.files[CLIMBMIX]["main"][ONE]
    hub.faults["resolve/shard_00002.parquet"] = [Fault("status", 403)]
    code, err = get(capsys, "climbmix", "smoltalk", "--shards", "3")
    assert code == 1 and naps == []
    assert f"climbmix/{ONE}: 404, not in {CLIMBMIX}" in err
    assert "climbmix/shard_00002.parquet: 403, refused" in err and "HF_TOKEN" in err
    assert "smoltalk: 404, not there" in err and "3 not fetched" in err
    same(home, ZERO, VALIDATION)
    hub.add(CLIMBMIX, ONE, SHARDS[ONE])
    code, err = get(capsys, "climbmix", "--shards", "3")  # the same command goes on
    assert code == 0 and "fetching 2 files" in err


@pytest.mark.parametrize("status", [400, 418, 501])
def test_what_another_try_does_not_mend_is_not_tried_again(status: int, hub, home, capsys, naps) -> None:
    hub.faults[f"resolve/{ZERO}"] = [Fault("status", status)]
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 1 and naps == [] and f"climbmix/{ZERO}: {status}, " in err and "tries" not in err
    same(home, VALIDATION)


def test_a_split_of_which_a_file_failed_has_no_list_yet(hub, home, capsys, naps) -> None:
    """Whoever finds the list may read the split."""
    for split, count in (("train", 3), ("test", 1)):
        for i in range(count):
            hub.add("openai/gsm8k", f"main/{split}/{i:04d}.parquet", parquet(i, 5), "refs/convert/parquet")
    hub.faults["main/train/0001.parquet"] = [Fault("status", 403)]
    code, err = get(capsys, "gsm8k")
    folder = home / "task_data/openai--gsm8k/main"
    assert code == 1 and "gsm8k/main/train/00001.parquet: 403" in err
    assert not (folder / "train/manifest.json").exists() and (folder / "test/manifest.json").exists()
    code, err = get(capsys, "gsm8k")
    assert code == 0 and "fetching 1 file," in err
    assert json.loads((folder / "train/manifest.json").read_text()) == [f"0000{i}.parquet" for i in range(3)]
    assert [(folder / f"train/0000{i}.parquet").read_bytes() for i in range(3)] == [parquet(i, 5) for i in range(3)]


def test_a_split_that_is_not_there(hub, home, capsys) -> None:
    hub.add("openai/gsm8k", "main/train/0000.parquet", parquet(1, 5), "refs/convert/parquet")
    code, err = get(capsys, "gsm8k")
    assert code == 1 and "gsm8k/main/test: 404, no such split" in err
    assert (home / "task_data/openai--gsm8k/main/train/manifest.json").exists()


@pytest.mark.parametrize("status", [403, 404])
def test_the_identity_file_is_optional(status: int, hub, home, capsys, naps) -> None:
    """DL-01: a clear message, and a script goes on."""
    hub.faults["beside/identity_conversations.jsonl"] = [Fault("status", status)]
    code, err = get(capsys, "identity", "climbmix", "--shards", "0")
    assert code == 0 and f"identity: cannot be fetched ({status}" in err and "optional" in err
    same(home, VALIDATION)
    hub.faults["beside/identity_conversations.jsonl"] = [Fault("status", 500) for _ in range(9)]
    assert get(capsys, "identity")[0] == 1  # that is another matter


def test_something_that_is_no_hub(hub, home, capsys) -> None:
    hub.faults[f"{CLIMBMIX}/paths-info"] = [Fault("status", 200)]  # a page of a hotel, say
    code, err = get(capsys, "climbmix", "--shards", "0")
    assert code == 1 and "does not answer like the hub" in err and "check HF_ENDPOINT" in err


def test_nobody_listens(hub, home, capsys, naps, monkeypatch) -> None:
    hub.close()
    code, err = get(capsys, "climbmix", "--shards", "0")
    assert code == 1 and "climbmix: ConnectError" in err and f"{TRIES} tries" in err


# --- Bodies that are not the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut", "unannounced", "stall"])
def test_a_body_that_ends_early_is_resumed(kind: str, hub, home, capsys, naps, monkeypatch) -> None:
    """DL-03. The second request asks for the rest alone."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [Fault(kind, HALF)]
    code, err = get(capsys, "climbmix", "--shards", "1")
    assert code == 0 and naps == [2.0] and ("ReadTimeout" in err) == (kind == "stall")
    same(home, ZERO, VALIDATION)
    first, second = hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")
    begin = int(second["Range"].removeprefix("bytes=").rstrip("-"))
    assert "Range" not in first and begin == HALF


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("flip"), "its sha256 differs from the hub's"),
        (Fault("longer", 1000), f"{len(SHARDS[ZERO]) + 1000:,} bytes instead of {len(SHARDS[ZERO]):,}"),
        (Fault("cut", 0), "RemoteProtocolError"),
    ],
)
def test_wrong_bytes_never_get_the_files_name(fault, words: str, hub, home, capsys, naps) -> None:
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [fault] * TRIES
    code, err = get(capsys, "climbmix", "--shards", "1", "--workers", "1")
    assert code == 1 and words in err and len(naps) == TRIES - 1
    assert [name for name in on_disk(home) if name.endswith(".parquet")] == [VALIDATION]
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    same(home, ZERO, VALIDATION)


def test_a_part_of_an_earlier_start_is_continued(hub, home, capsys) -> None:
    leave_part(home, SHARDS[ZERO][:HALF])
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    assert hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")[0]["Range"] == f"bytes={HALF}-"
    same(home, ZERO, VALIDATION)


def test_a_part_that_was_whole_is_only_checked(hub, home, capsys) -> None:
    inode = leave_part(home, SHARDS[ZERO]).stat().st_ino
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    assert (home / "base_data_climbmix" / ZERO).stat().st_ino == inode  # renamed, so it is never there in part
    assert hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}") == []
    same(home, ZERO, VALIDATION)


@pytest.mark.parametrize("left", [b"x" * HALF, SHARDS[ZERO] + b"x" * 10])
def test_a_part_that_is_no_beginning_is_given_up(left: bytes, hub, home, capsys, naps) -> None:
    leave_part(home, left)
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0 and naps == [2.0]
    same(home, ZERO, VALIDATION)


def test_a_server_without_ranges_sends_all_of_it(hub, home, capsys, naps) -> None:
    leave_part(home, SHARDS[ZERO][:HALF])
    hub.faults[f"bucket/{CLIMBMIX}/{ZERO}"] = [Fault("no range")]
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0 and naps == []
    same(home, ZERO, VALIDATION)


def test_the_part_of_another_version_is_not_continued(hub, home, capsys) -> None:
    leave_part(home, SHARDS[ZERO][:HALF])
    newer = parquet(77)
    hub.add(CLIMBMIX, ZERO, newer)
    assert get(capsys, "climbmix", "--shards", "1")[0] == 0
    assert "Range" not in hub.asked("GET", f"bucket/{CLIMBMIX}/{ZERO}")[0]
    assert on_disk(home)[ZERO] == newer and not list(home.rglob("*.tmp-*"))
