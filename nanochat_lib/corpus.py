"""Where documents come from: the embedded primer, the user's own files, or shards; with a fixed split for validation.

Documents that cannot be trained on (empty, null, broken) are skipped, counted and named in `corpus.report`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nanochat_lib.corpus_base import Corpus, Report
from nanochat_lib.corpus_files import READERS
from nanochat_lib.errors import UserError
from nanochat_lib.hub.sets import path_of
from nanochat_lib.presets import DataConfig
from nanochat_lib.primer.names import fraction
from nanochat_lib.primer.streams import primer_streams
from nanochat_lib.primer.world import World
from nanochat_lib.shards import KNOWN, ShardCorpus

HELD_OUT = 0.05  # share of a user's documents that becomes validation
KINDS = tuple(READERS)
OWN_DATA = "use your own text with --corpus PATH (data.corpus), or a preset that needs no download (cpu, cpu-smoke)"


def _digest(texts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for text in texts:
        data = text.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


class PrimerCorpus(Corpus):
    """Real text and invented world, mixed so that `real_share` of the training characters is real."""

    name = "primer"

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.world = World(seed)
        self.streams, notes = primer_streams(data, self.world)
        self.streams["tokenizer"] = self.streams["train"]
        texts = [*self.streams["train"], *self.streams["val"]]
        self.report = Report(documents=len(texts), characters=sum(map(len, texts)), notes=notes)
        self.fingerprint = _digest([*texts, *self.streams["val-world"]])

    def splits(self) -> tuple[str, ...]:
        return tuple(self.streams)

    def num_documents(self, split: str) -> int:
        return len(self.streams[self._known(split)])

    def documents(self, split: str, start: int = 0) -> Iterator[str]:
        return iter(self.streams[self._known(split)][start:])

    def place(self, split: str, index: int) -> str:
        return self.name


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def held_out(text: str, share: float = HELD_OUT) -> bool:
    """Whether a document is for validation. Its content decides: not its place, and equal ones stay on one side."""
    return fraction("val", hashlib.sha256(text.encode()).hexdigest()) < share


class FileCorpus(Corpus):
    """Documents of .txt, .jsonl and .parquet files, in name order. Read once at the start to count and check.

    Validation: of several parquet files the last by name, else about one document in twenty, chosen by its content,
    so that it does not depend on order and equal documents stand on the same side.
    """

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.name, self.path, self.files = str(path), path, files
        self.val_file = files[-1] if _only_shards(files) else None
        self.report = Report()
        self.always = self.never = ""  # documents that the content rule alone would put on the wrong side
        self._scan()

    def _read(self, path: Path, report: Report | None = None) -> Iterator[str]:
        for where, text, reason in READERS[path.suffix.lower()](path):
            if text is not None and not text.strip():
                text, reason = None, "empty"
            if text is not None and not is_unicode(text):
                text, reason = None, "half a surrogate pair, not text"
            if text is not None:
                yield text
            elif report is not None:
                report.skip(f"{path.name}, {where}", reason)

    def _scan(self) -> None:
        state = hashlib.sha256()
        self.counts: dict[Path, list[int]] = {}  # file -> documents in train, in val
        smallest, largest = (2.0, ""), (-1.0, "")
        for path in self.files:
            counts = self.counts[path] = [0, 0]
            for text in self._read(path, self.report):
                digest = hashlib.sha256(text.encode()).hexdigest()
                state.update(digest.encode())
                position = (fraction("val", digest), digest)
                smallest, largest = min(smallest, position), max(largest, position)
                counts[self._in_val(path, text)] += 1
                self.report.documents += 1
                self.report.characters += len(text)
        self.fingerprint = state.hexdigest()
        train, val = (sum(counts[side] for counts in self.counts.values()) for side in (0, 1))
        documents, skipped = self.report.documents, self.report.skipped
        if documents == 0:
            first = f"; first: {': '.join(self.report.broken[0])}" if self.report.broken else ""
            raise UserError(
                f"the corpus {self.path} is empty: 0 usable documents in {len(self.files)} files, "
                f"{skipped:,} skipped ({self.report.empty:,} empty){first}; give it text"
            )
        if self.val_file is None and smallest != largest and (train == 0 or val == 0):
            self.always, self.never = (smallest[1], "") if val == 0 else ("", largest[1])
            for path in self.files:
                self.counts[path] = [0, 0]
                for text in self._read(path):
                    self.counts[path][self._in_val(path, text)] += 1
            train, val = (sum(counts[side] for counts in self.counts.values()) for side in (0, 1))
        if train == 0 or val == 0:
            raise UserError(
                f"the corpus {self.path} has too few documents: {train:,} for training, {val:,} for validation "
                f"({documents:,} usable, {skipped:,} skipped); it needs at least 2 different ones"
            )

    def _in_val(self, path: Path, text: str) -> bool:
        if self.val_file is not None:
            return path == self.val_file
        if self.always or self.never:
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in (self.always, self.never):
                return digest == self.always
        return held_out(text)

    def num_documents(self, split: str) -> int:
        return sum(counts[self._known(split) == "val"] for counts in self.counts.values())

    def documents(self, split: str, start: int = 0) -> Iterator[str]:
        wanted = self._known(split) == "val"
        for path in self.files:
            count = self.counts[path][wanted]
            if start >= count:  # the file holds nothing that is still wanted
                start -= count
                continue
            for text in self._read(path):
                if self._in_val(path, text) == wanted:
                    if start == 0:
                        yield text
                    start = max(0, start - 1)

    def place(self, split: str, index: int) -> str:
        wanted = self._known(split) == "val"
        for path in self.files:
            if index < self.counts[path][wanted]:
                break
            index -= self.counts[path][wanted]
        return path.stem


def _only_shards(files: list[Path]) -> bool:
    return len(files) > 1 and all(file.suffix.lower() == ".parquet" for file in files)


def _downloaded(name: str) -> ShardCorpus:
    """The shards of a published set that `nanochat data get` fetched."""
    folder = path_of(name)
    if not any(folder.glob("*.parquet")):
        raise UserError(
            f"no {name} shards (*.parquet) in {folder}; run `nanochat data get {name} --shards 8`, or {OWN_DATA}"
        )
    return ShardCorpus(folder, KNOWN[name])


def open_corpus(data: DataConfig, seed: int) -> Corpus:
    """The corpus of `data.corpus`: "primer" (with the world of `seed`), "climbmix", "fineweb-edu", a path, or a URL.

    A folder of several parquet files and nothing else, and every URL, is a corpus of shards.

    Raises UserError for a missing path, an unknown kind of file, a file that cannot be read, or an empty corpus.
    """
    if data.corpus == "primer":
        return PrimerCorpus(data, seed)
    if data.corpus in KNOWN:
        return _downloaded(data.corpus)
    if "://" in data.corpus:
        return ShardCorpus(data.corpus)
    path = Path(data.corpus).expanduser()
    if not path.exists():
        raise UserError(f"no corpus at {path}: no such file or folder; {OWN_DATA}")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in KINDS and file.is_file())
        if not files:
            raise UserError(f"the folder {path} holds no {', '.join(KINDS)} files; {OWN_DATA}")
        if _only_shards(files):
            return ShardCorpus(path)
    elif path.suffix.lower() in KINDS:
        files = [path]
    else:
        raise UserError(f"{path} is not a kind of corpus file; known: {', '.join(KINDS)}, or a folder of these")
    return FileCorpus(path, files)


def byte_bigram_bpb(train: Iterable[str], val: Iterable[str], alpha: float = 0.1) -> float:
    """Bits per byte of `val` under a byte-bigram model of `train`: p(b|a) = (n(a,b) + alpha) / (n(a) + 256·alpha).

    The yardstick a language model must beat. A document's first byte is conditioned on byte 0.
    """

    def counts(texts: Iterable[str]) -> np.ndarray:
        table = np.zeros(256 * 256, np.int64)
        for text in texts:
            data = np.frombuffer(b"\0" + text.encode(), np.uint8).astype(np.int64)
            table += np.bincount(data[:-1] * 256 + data[1:], minlength=256 * 256)
        return table.reshape(256, 256)

    seen, asked = counts(train), counts(val)
    if not asked.sum():
        raise UserError("the byte-bigram yardstick needs validation text, got none")
    probability = (seen + alpha) / (seen.sum(1, keepdims=True) + 256 * alpha)
    return float(-(asked * np.log2(probability)).sum() / asked.sum())
