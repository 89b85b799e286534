"""A bucket in memory whose requests can be slow, fail, or come back short; and shards of any layout to put into it."""

import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem


class Shaky(MemoryFileSystem):
    """`failures`: how often each request fails before it works; `requests`: (path, start, end) of those that worked."""

    protocol = "shaky"
    store = {}
    pseudo_dirs = [""]
    failures, error, short, hold = 0, ConnectionError("reset by peer"), False, None
    requests, tries, lock = [], {}, threading.Lock()

    @classmethod
    def fresh(cls):
        cls.store.clear()
        cls.requests, cls.tries = [], {}
        cls.failures, cls.error, cls.short, cls.hold = 0, ConnectionError("reset by peer"), False, None

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).replace("shaky://", "memory://", 1))

    def cat_file(self, path, start=None, end=None, **options):
        key = (path, start, end)
        with self.lock:
            self.tries[key] = self.tries.get(key, 0) + 1
            failing = self.tries[key] <= self.failures
        if failing and not self.short:
            raise self.error
        if self.hold is not None:
            self.hold.wait(20)
        data = super().cat_file(path, start, end, **options)
        self.requests.append(key)
        return data[: len(data) // 2] if failing else data


fsspec.register_implementation("shaky", Shaky, clobber=True)


def shard(path, groups, **options):
    """A parquet file with a row group of each list of texts, as nanochat writes them; `path` local or a URL."""
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False} | options
    with fsspec.open(str(path), "wb") as out:
        with pq.ParquetWriter(out, pa.schema([("text", pa.string())]), **options) as writer:
            for texts in groups:
                writer.write_table(pa.table({"text": pa.array(texts, pa.string())}), row_group_size=max(len(texts), 1))
    return path


def folder(url, layout, val=1):
    """Shards 00000, 00001, … with row groups of so many rows: `layout` [[rows, …], …]; then one for validation.

    Text n of the train shards begins with "n"; the texts of the validation shard with "v".
    """
    Path(url).mkdir(exist_ok=True) if "://" not in str(url) else None
    number = 0
    for i, rows in enumerate(layout):
        groups = [[f"{number + sum(rows[:j]) + k:05d}" for k in range(count)] for j, count in enumerate(rows)]
        number += sum(rows)
        shard(f"{url}/shard_{i:05d}.parquet", groups)
    shard(f"{url}/shard_{len(layout):05d}.parquet", [[f"v{i}" for i in range(val)]])
    return url


def damaged_inside(folder):
    """Writes the shards a and b; a's second row group is damaged, its footer and its first row group are whole."""
    texts = [np.random.default_rng(i).bytes(200).hex() for i in range(100)]
    shard(folder / "a.parquet", [texts[:50], texts[50:]])
    shard(folder / "b.parquet", [texts])
    data = bytearray((folder / "a.parquet").read_bytes())
    data[len(data) * 5 // 8 : len(data) * 7 // 8] = bytes(len(data) // 4)
    (folder / "a.parquet").write_bytes(data)
    return texts
