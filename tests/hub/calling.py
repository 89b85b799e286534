"""Calling `nanochat data get` in this process, and looking at what it left."""

import hashlib
from pathlib import Path

from samples import SHARDS

from nanochat_lib.cli import main

ZERO, ONE, VALIDATION = "shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"
HALF = len(SHARDS[ZERO]) // 2


def get(capsys, *argv: str) -> tuple[int, str]:
    """(exit code, stderr) of `nanochat data get …`."""
    code = main(["data", "get", *argv])
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return code, err


def on_disk(home: Path, where: str = "base_data_climbmix") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((home / where).iterdir())}


def same(home: Path, *names: str) -> None:
    """Exactly these shards are there, whole, and no part of another."""
    assert on_disk(home) == {name: SHARDS[name] for name in sorted(names)}


def part_of(home: Path, name: str = ZERO) -> Path:
    """Where the part of a shard lies."""
    return home / "base_data_climbmix" / f"{name}.tmp-{hashlib.sha256(SHARDS[name]).hexdigest()[:12]}"


def leave_part(home: Path, data: bytes) -> Path:
    part = part_of(home)
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    return part
