"""The named data sets: where each comes from and where it lies on this machine, both as nanochat has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.settings import nearest

PARQUET_REVISION = "refs/convert/parquet"  # where the hub keeps every data set as <subset>/<split>/NNNN.parquet
FILES_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # nanochat's own files; NANOCHAT_FILES_URL: a mirror


@dataclass(frozen=True)
class Shards:
    """Pretraining text in numbered parquet files. The last of all is the validation shard, whatever else is fetched."""

    name: str
    about: str
    repo: str
    where: str  # below base_dir()
    last: int  # index of the validation shard = how many training shards there are
    shard_bytes: float  # of a typical shard

    def validation(self) -> str:
        return f"shard_{self.last:05d}.parquet"

    def parts(self, shards: int) -> list[str]:
        """File names of the first `shards` training shards, after the validation shard."""
        if not 0 <= shards <= self.last:
            raise UserError(f"--shards {shards} is out of range: {self.name} has 0 to {self.last:,} training shards")
        return [self.validation(), *(f"shard_{i:05d}.parquet" for i in range(shards))]


@dataclass(frozen=True)
class Tasks:
    """Questions or conversations from the hub's parquet export: `<subset>/<split>/00000.parquet …`, manifest.json."""

    name: str
    about: str
    repo: str
    splits: tuple[str, ...]  # subset/split

    @property
    def where(self) -> str:
        return f"task_data/{self.repo.replace('/', '--')}"

    def parts(self, shards: int = 0) -> list[str]:
        return list(self.splits)


@dataclass(frozen=True)
class OneFile:
    """A file that lies beside the hub; an archive becomes the folder `where`."""

    name: str
    about: str
    file: str
    where: str
    optional: bool = False

    def url(self) -> str:
        return f"{(os.environ.get('NANOCHAT_FILES_URL') or FILES_URL).rstrip('/')}/{self.file}"

    def parts(self, shards: int = 0) -> list[str]:
        return [self.where]


DataSet = Shards | Tasks | OneFile

SETS: dict[str, DataSet] = {
    entry.name: entry
    for entry in (
        Shards(
            "climbmix", "pretraining text, about 400B tokens in 6,542 shards", "karpathy/climbmix-400b-shuffle",
            "base_data_climbmix", 6542, 88e6,
        ),
        Shards(
            "fineweb-edu", "pretraining text of 2025, about 100B tokens in 1,822 shards",
            "karpathy/fineweb-edu-100b-shuffle", "base_data", 1822, 100e6,
        ),
        Tasks(
            "smoltalk", "conversations for SFT", "HuggingFaceTB/smol-smoltalk", ("default/train", "default/test"),
        ),
        Tasks("mmlu", "choices in 57 fields: SFT, evaluation", "cais/mmlu", ("all/auxiliary_train", "all/test")),
        Tasks("gsm8k", "sums in words: SFT, RL, evaluation", "openai/gsm8k", ("main/train", "main/test")),
        Tasks(
            "arc", "science questions, easy and hard: evaluation", "allenai/ai2_arc",
            ("ARC-Easy/train", "ARC-Easy/test", "ARC-Challenge/train", "ARC-Challenge/test"),
        ),
        Tasks(
            "humaneval", "Python functions to write: evaluation", "openai/openai_humaneval", ("openai_humaneval/test",),
        ),
        OneFile("core", "the 22 tasks of CORE: evaluation of base models", "eval_bundle.zip", "eval_bundle"),
        OneFile(
            "identity", "conversations about the model itself: SFT of 2025, optional", "identity_conversations.jsonl",
            "identity_conversations.jsonl", optional=True,
        ),
    )
}  # fmt: skip


def named(name: str) -> DataSet:
    """The data set of that name; an unknown one is a UserError that names the nearest."""
    if name not in SETS:
        raise UserError(f"unknown data set {name!r}; {nearest(name, list(SETS))}")
    return SETS[name]


def path_of(name: str) -> Path:
    """Where the data set lies, there or not: the shards' folder, that of `<subset>/<split>/`, the bundle, the file."""
    return base_dir() / named(name).where
