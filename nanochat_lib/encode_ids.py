"""`nanochat data encode`: the token ids of a corpus of shards, made once by several processes, kept beside them."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from nanochat_lib import parquet, storage
from nanochat_lib.errors import UserError
from nanochat_lib.hub.pool import format_bytes
from nanochat_lib.kept_ids import SUFFIX, KeptIds, Unusable, dtype_for, encode_texts, path_of, read_block, write_shard
from nanochat_lib.progress import Progress, format_seconds
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.supply import sample_texts
from nanochat_lib.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanochat_lib.corpus import Corpus
    from nanochat_lib.parquet import Shard

SAMPLE_DOCS = 256  # documents that are encoded to estimate size and time
WAIT = 3600.0  # seconds for another process that encodes the same
ENDING = 30.0  # seconds in which processes that are told to end do so
AGAIN = "what is finished stays, the same command goes on with the rest"


@dataclass(frozen=True)
class Estimate:
    """What encoding will take, by a sample of the documents."""

    shards: int
    documents: int
    tokens: int
    bytes: int  # on the disk
    seconds: float  # of one process


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def only_shards(corpus: Corpus) -> ShardCorpus:
    """UserError for a corpus whose ids cannot be kept."""
    if isinstance(corpus, ShardCorpus):
        return corpus
    raise UserError(
        f"the corpus {corpus.name} is no corpus of shards: ids are kept for several parquet files in a folder or a "
        "bucket only, smaller corpora are encoded while they are read"
    )


def missing(corpus: ShardCorpus, kept: KeptIds, check: bool = False) -> list[Shard]:
    """The shards that have no usable ids; with `check` every block of those that have some is read first."""
    shards = [shard for split in corpus.shards.values() for shard in split]
    there = [shard for shard in shards if shard.name in kept.files]
    if check and there:
        with Progress(len(there), "check", unit="shard") as progress:
            for shard in there:
                file = kept.files[shard.name]
                try:
                    for group in range(len(file.blocks)):
                        read_block(kept.fs, file, group)
                except Unusable as reason:
                    kept.problems.append(f"{file.path}: {reason}")
                    del kept.files[shard.name]
                progress.update()
    return [shard for shard in shards if shard.name not in kept.files]


def estimate(corpus: ShardCorpus, tokenizer: Tokenizer, todo: list[Shard]) -> Estimate:
    """What the ids of the shards `todo` will take."""
    texts, looked_at = sample_texts(corpus, "train", SAMPLE_DOCS)
    texts = texts[:: max(len(texts) // SAMPLE_DOCS, 1)]
    began = time.perf_counter()
    ids = encode_texts(tokenizer, texts)
    seconds = time.perf_counter() - began
    characters = sum(shard.characters for shard in todo)  # bytes, as the sample's are counted
    share = characters / max(sum(len(text.encode()) for text in texts), 1)
    documents = sum(sum(shard.rows) for shard in todo)
    tokens = round(sum(map(len, ids)) * share)
    size = tokens * dtype_for(tokenizer.vocab_size).itemsize + 4 * documents
    return Estimate(len(todo), documents, tokens, size, seconds * share)


def encode(
    corpus: Corpus, tokenizer: Tokenizer, jobs: int, *, plan: bool = False, check: bool = False, wait: float = WAIT
) -> None:
    """Keeps the ids of every shard that has none; `plan` says what it would take and writes nothing.

    Raises UserError for another kind of corpus, a damaged shard, and a place that takes no files: what is finished by
    then stays, nothing is left half-written.
    """
    corpus = only_shards(corpus)
    local = parquet.is_local(corpus.fs)
    kept = KeptIds(corpus, tokenizer.fingerprint)
    folder, shards = kept.folder, sum(map(len, corpus.shards.values()))
    with contextlib.ExitStack() as held:
        if local and not plan and (check or missing(corpus, kept)):
            tell = lambda text: say(f"{folder}: {text}")  # noqa: E731
            held.enter_context(storage.alone(Path(folder) / ".lock", wait, "encoding", "these shards", tell))
            _remove_leftovers(Path(folder))
            kept = KeptIds(corpus, tokenizer.fingerprint)  # again, for another process may have made them
        todo = missing(corpus, kept, check)
        for problem in kept.problems:
            say(f"not used: {problem}")
        if not todo:
            say(f"all {shards:,} shards have their ids, {format_bytes(kept.bytes)}, in {folder}")
            return
        expected = estimate(corpus, tokenizer, todo)
        jobs = min(jobs, len(todo))
        say(
            f"{len(todo):,} of {shards:,} shards to encode: about {expected.tokens / 1e6:,.1f}M tokens, "
            f"{format_bytes(expected.bytes)}, {format_seconds(expected.seconds / jobs)} with {jobs} "
            f"process{'es' * (jobs > 1)}, into {folder}"
        )
        if local:
            say(f"{format_bytes(storage.free_bytes(folder))} are free on that disk")
        if plan:
            return
        if local:
            storage.check_room(folder, expected.bytes)
        _encode(corpus, tokenizer, folder, todo, jobs)
    say(
        f"all {shards:,} shards have their ids, in {folder}; runs with this tokenizer read them "
        "(-s ops.kept_ids=false: they encode)"
    )


def _remove_leftovers(folder: Path) -> None:
    """What processes that were killed have left."""
    for path in folder.rglob(f"*{SUFFIX}{storage.TEMPORARY}*"):
        path.unlink(missing_ok=True)


def encode_shard(fs: Any, shard: Shard, tokenizer: Tokenizer, path: str, told: Any) -> None:
    """Makes the file of ids `path` of one shard, whole or not at all."""
    if parquet.is_local(fs):
        with storage.atomic_file(path) as file:
            write_shard(fs, shard, tokenizer, file, told)
        return
    with tempfile.TemporaryDirectory(prefix="nanochat-ids-") as scratch:
        local = Path(scratch) / "ids"
        with storage.clear_disk_errors(local), open(local, "wb") as file:
            size, _ = write_shard(fs, shard, tokenizer, file, told)

        def put() -> None:
            fs.put_file(str(local), path)  # an object appears whole or not at all
            fs.invalidate_cache()
            if (found := fs.info(path)["size"]) != size:
                raise OSError(f"{found:,} of {size:,} bytes arrived")

        parquet.retried(fs, path, put, "written")


def _encode(corpus: ShardCorpus, tokenizer: Tokenizer, folder: str, todo: list[Shard], jobs: int) -> None:
    documents = sum(sum(shard.rows) for shard in todo)
    done, tokens, began = 0, 0, time.monotonic()
    with Progress(documents, "encode", unit="document") as progress:
        events = _in_processes(corpus.name, tokenizer, folder, todo, jobs) if jobs > 1 else None
        for kind, *told in events or _here(corpus, tokenizer, folder, todo):
            if kind == "failed":
                more = f" ({done:,} of {len(todo):,} shards are encoded; {AGAIN})"
                raise UserError(f"{told[0]}{more}")
            done += kind == "done"
            rows, ids = told if kind == "group" else (0, 0)
            tokens += ids
            rate = round(tokens / max(time.monotonic() - began, 1e-6))
            progress.update(rows, **{"shards": f"{done:,}/{len(todo):,}", "tok/s": rate})


def _here(corpus: ShardCorpus, tokenizer: Tokenizer, folder: str, todo: list[Shard]) -> Iterator[tuple]:
    """("group", rows, ids), ("done",) and ("failed", why), made in this process."""
    events: list[tuple] = []
    for shard in todo:
        try:
            encode_shard(
                corpus.fs, shard, tokenizer, path_of(folder, shard), lambda *told: events.append(("group", *told))
            )
        except UserError as error:
            yield ("failed", str(error))
            return
        yield from events
        events.clear()
        yield ("done",)


def _in_processes(name: str, tokenizer: Tokenizer, folder: str, todo: list[Shard], jobs: int) -> Iterator[tuple]:
    """The same from `jobs` processes. However this ends, they end too, and leave nothing half-written."""
    context = multiprocessing.get_context("spawn")  # a forked child must not use the object stores' clients
    tasks, events = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="nanochat-ids-") as scratch:
        tokenizer.save(scratch)
        workers = [
            context.Process(target=_work, args=(name, scratch, folder, tasks, events), daemon=True) for _ in range(jobs)
        ]
        try:
            for worker in workers:
                worker.start()
            for task in [*todo, *([None] * jobs)]:
                tasks.put(task)
            left = len(todo)
            while left:
                try:
                    event = events.get(timeout=0.5)
                except Empty:
                    for worker in workers:
                        if worker.exitcode:
                            why = f"a process that encodes has ended with code {worker.exitcode}"
                            yield ("failed", f"{why}; if there was too little memory, try fewer --jobs")
                            return
                    continue
                left -= event[0] == "done"
                yield event
            for worker in workers:
                worker.join(ENDING)
        finally:
            tasks.cancel_join_thread()
            for worker in workers:
                if worker.pid:
                    worker.terminate()
            for worker in workers:
                if worker.pid:
                    worker.join(ENDING)
                    worker.kill()


def _work(name: str, tokenizer_folder: str, folder: str, tasks: Any, events: Any) -> None:
    """Body of a process: encodes one shard after the other, until there are no more or its parent is gone."""
    parent = multiprocessing.parent_process()

    def stop(*_: object) -> None:
        events.cancel_join_thread()  # nobody reads them any more
        raise SystemExit(1)

    def told(rows: int, ids: int) -> None:
        if not parent.is_alive():
            stop()
        events.put(("group", rows, ids))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, stop)
    try:
        tokenizer, (fs, _) = Tokenizer.load(tokenizer_folder), parquet.filesystem(name)
        while (shard := tasks.get()) is not None:
            encode_shard(fs, shard, tokenizer, path_of(folder, shard), told)
            events.put(("done",))
    except UserError as error:
        events.put(("failed", str(error)))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is at its end, and what ends it needs no exception
