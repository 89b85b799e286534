"""Names, numbers and plans of data sets: what is said before anything is fetched."""

import json
import math
import shlex

import pytest
from huggingface_hub import constants
from samples import SHARDS

from nanochat_lib.cli import build_parser, main
from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub import commands, ledger, local
from nanochat_lib.hub.plan import shards_for
from nanochat_lib.hub.pool import format_bytes
from nanochat_lib.hub.sets import SETS, Shards, path_of
from nanochat_lib.presets import override, preset


def call(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["data", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def shard(home, *names: str) -> None:
    for name in names:
        path = home / "base_data_climbmix" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SHARDS.get(name, SHARDS["shard_00000.parquet"]))


def test_where_data_lie(home, monkeypatch) -> None:
    assert path_of("climbmix") == home / "base_data_climbmix" and path_of("fineweb-edu") == home / "base_data"
    assert path_of("mmlu") == home / "task_data/cais--mmlu" and path_of("core") == home / "eval_bundle"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/data")
    monkeypatch.setenv("HOME", str(home))
    assert base_dir() == home / "data"
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    assert base_dir() == home / ".cache/nanochat"
    with pytest.raises(UserError, match="unknown data set 'climbmx'; did you mean climbmix?"):
        path_of("climbmx")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("get climbmx --shards 1", "did you mean climbmix?"),
        ("get climbmix", "--shards N takes N training shards, --preset NAME"),
        ("get climbmix --shards 6543", "--shards 6543 is out of range: climbmix has 0 to 6,542 training shards"),
        ("get fineweb-edu --shards -1", "--shards -1 is out of range: fineweb-edu has 0 to 1,822"),
        ("get climbmix --shards 1 --workers 0", "--workers 0 is out of range: 1 to 32"),
        ("get climbmix --preset gpu-8-d25", "unknown preset 'gpu-8-d25'"),
        ("get fineweb-edu --preset gpu-8-little-lm", "needs about 1,936 shards of fineweb-edu, which has 1,822"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_touched(argv: str, words: str, home, capsys) -> None:
    code, out, err = call(capsys, *shlex.split(argv))
    assert code == 2 and out == "" and words in err and err.count("\n") == 1 and not home.exists()


@pytest.mark.parametrize("action", commands.ACTIONS)
def test_every_action_has_help_with_an_example_that_parses(action: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["data", action, "--help"])
    example = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("example: nanochat "))
    assert build_parser().parse_args(shlex.split(example)[2:]).act is commands.ACTIONS[action][0]


def test_shards_of_a_preset_by_hand() -> None:
    """5,568 steps of 2^20 tokens; 250M characters / 4.8 of which 35 % are cut off; the tokenizer's 2B alone need 8."""
    climbmix = SETS["climbmix"]
    assert isinstance(climbmix, Shards)
    assert shards_for(preset("gpu-8-d24"), climbmix) == math.ceil(5568 * 2**20 / (250e6 / 4.8 * 0.65)) == 173
    assert shards_for(override(preset("gpu-8-d24"), {"data.epochs": 2.0}), climbmix) == 87
    assert shards_for(override(preset("gpu-8-d24"), {"pretrain.steps": 10}), climbmix) == 8
    assert shards_for(preset("cpu"), climbmix) == 1


def test_the_plan_asks_nobody_and_fetches_nothing(home, capsys, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = call(capsys, "get", "climbmix", "smoltalk", "--plan", "--preset", "gpu-8-d24")
    assert code == 0 and err == "" and not home.exists()
    assert "gpu-8-d24 trains on 5,838,471,168 tokens" in out and "estimates: 4.8 characters a token, 35%" in out
    assert "climbmix: 173 training shards and the validation shard, about 15.3 GB in all; 0 of 174 there" in out
    assert "to fetch: about 15.3 GB" in out and "are free on that disk" in out
    assert "time: unknown until something was fetched here" in out
    assert "smoltalk: 0 of 2 there, size not known before it is fetched" in out


def test_the_plan_counts_what_is_there_and_knows_the_rate(home, capsys) -> None:
    shard(home, "shard_00000.parquet", "shard_06542.parquet")
    (home / "base_data_climbmix/shard_00001.parquet").write_bytes(b"")  # that one does not count
    (home / "base_data_climbmix/shard_00001.parquet.tmp-abc").write_bytes(bytes(1_000_000))
    ledger.note_rate(ledger.TELLING - 1, 1.0, 4)  # too little to tell
    assert ledger.last_rate() is None
    ledger.note_rate(10**9, 100.0, 4)
    ledger.note_rate(2 * 10**9, 100.0, 4)
    code, out, _ = call(capsys, "get", "climbmix", "--plan", "--shards", "11")
    assert code == 0 and "11 training shards and the validation shard, about 1.1 GB in all; 2 of 12 there" in out
    assert "to fetch: about 879.0 MB" in out  # ten of 88 MB, less the part
    assert "time: about 0:43 at 20.0 MB/s" in out


def test_the_list_says_what_is_there_missing_and_broken(home, capsys) -> None:
    shard(home, "shard_00000.parquet", "shard_00007.parquet")
    (home / "base_data_climbmix/shard_00001.parquet").write_bytes(b"PAR1")
    folder = home / "task_data/openai--gsm8k/main/train"
    folder.mkdir(parents=True)
    (folder / "00000.parquet").write_bytes(SHARDS["shard_00000.parquet"])
    (folder / "manifest.json").write_text(json.dumps(["00000.parquet"]))
    (home / "eval_bundle.zip.tmp-1").write_bytes(bytes(2000))
    code, out, err = call(capsys, "list")
    assert code == 0 and err == "" and str(home) in out
    lines = dict(zip([line.split()[0] for line in out.splitlines()[1::2]], out.splitlines()[2::2], strict=True))
    assert list(lines) == list(SETS)
    assert "2 of 6,542 training shards; MISSING: validation shard shard_06542.parquet" in lines["climbmix"]
    assert "broken: shard_00001.parquet, no parquet footer" in lines["climbmix"]
    assert lines["gsm8k"].strip() == "missing: main/test"
    assert lines["core"].strip() == "nothing there; 2.0 kB of unfinished files"
    shard(home, "shard_06542.parquet")
    before = call(capsys, "list")[1]
    assert "MISSING" not in before and "token ids" not in before
    ids = home / "base_data_climbmix/ids-0123"
    ids.mkdir()
    (ids / "shard_00000.parquet.ids").write_bytes(bytes(3000))
    (ids / "shard_00007.parquet.ids.tmp-1").write_bytes(bytes(500))
    after = call(capsys, "list")[1]
    assert "; token ids, 1 files, 3.0 kB" in after and after.replace("; token ids, 1 files, 3.0 kB", "") == before


def test_notes_that_were_cut_or_are_not_ours_do_no_harm(home) -> None:
    shard(home, "shard_00000.parquet", "shard_06542.parquet")
    path = home / "base_data_climbmix/shard_00000.parquet"
    ledger.note_file(path, 5, None)
    ledger.note_file(path, path.stat().st_size, "0" * 64)  # the newest note counts
    with open(home / ledger.NAME, "ab") as file:
        file.write(b'[1]\n\xff\n{"bytes": 1}\n{"file": "x"}\n{"file": "base_data_climbmix/shard_06542.parq')
    assert local.lacking(SETS["climbmix"], 1) == {} and ledger.last_rate() is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (999_960, "1.0 MB"), (5.8e11, "580.0 GB"), (5e12, "5.00 TB")]
)
def test_bytes_are_written_as_disks_are_sold(count: float, text: str) -> None:
    assert format_bytes(count) == text
