"""Objects in a store that outlives the machine: gs://, s3:// or a folder elsewhere, all through fsspec.

A store has no renames and no locks; a single object appears whole or not at all. So whatever consists of several
objects gets its manifest last, and counts from then on. A folder is given the same property by a rename.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanochat_lib.errors import UserError
from nanochat_lib.storage import TEMPORARY

PARALLEL = 8  # objects that are on their way at once


class StoreError(UserError):
    """A store that cannot be reached or refuses: perhaps only for a while."""


@contextlib.contextmanager
def clear_store_errors(url: str) -> Iterator[None]:
    """Turns whatever a store's client raises in the block into one line that names the store, the cause and the fix."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{url} needs a package that is not installed ({first_line(error)}): "
            "NANOCHAT_EXTRAS=cloud bash scripts/setup.sh"
        ) from error
    except Exception as error:  # each client has its own errors
        raise StoreError(
            f"{url} cannot be used ({type(error).__name__}: {first_line(error)}); check that it exists, that you may "
            "read, write and list it, and the network"
        ) from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


class Store:
    """The objects under one URL or folder, by their names relative to it. StoreError when it refuses."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        for client in ("gcsfs", "s3fs"):  # what they raise is said once, in a line
            logging.getLogger(client).setLevel(logging.CRITICAL)
        with clear_store_errors(self.url):
            # No cached listings: other machines write there too.
            self.fs, root = url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        self.root = root.rstrip("/")
        self.folder = Path(self.root) if "file" in _protocols(self.fs) else None

    def check(self) -> None:
        """Makes sure, before anything is spent, that the store takes, lists, returns and removes an object."""
        name = f"probe{TEMPORARY}{uuid.uuid4().hex[:8]}"
        with clear_store_errors(self.url):
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.write(name, b"probe")
            if self.sizes().get(name) != 5 or self.read(name) != b"probe":
                raise StoreError(f"{self.url} does not list and return what was just written there")
            self.remove([name])

    def sizes(self, under: str = "") -> dict[str, int]:
        """{name: bytes} of every object, or of those in one folder; empty when there is none."""
        with clear_store_errors(self.url):
            self._there()
            found = self.fs.find(self._path(under), detail=True)
            return {
                path.removeprefix(self.root).lstrip("/"): int(info["size"])
                for path, info in found.items()
                if info.get("type") != "directory" and not path.endswith("/")  # consoles make "folders" of no bytes
            }

    def put(self, local: Path, name: str) -> None:
        """Uploads one file."""
        with clear_store_errors(self.url):
            self._there()
            if not self.folder:
                self.fs.put_file(str(local), self._path(name))
                return
            temporary = self._temporary(name)
            self.fs.put_file(str(local), str(temporary))
            os.replace(temporary, self._path(name))

    def put_all(self, folder: Path, names: Iterable[str], under: str = "") -> None:
        """Uploads files of `folder` by their names there, several at once, and sees that each arrived whole."""
        names = list(names)
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda name: self.put(folder / name, f"{under}/{name}".lstrip("/")), names))
        there = self.sizes(under)
        for name in names:
            size, found = (folder / name).stat().st_size, there.get(f"{under}/{name}".lstrip("/"))
            if size != found:
                raise StoreError(
                    f"{self.url}/{under}/{name} has {found} bytes there instead of {size:,}: half uploaded"
                )

    def get_all(self, names: Iterable[str], folder: Path, under: str = "") -> None:
        """Downloads objects under `under` into `folder`, several at once."""

        def get(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with clear_store_errors(self.url):
                self.fs.get_file(self._path(f"{under}/{name}".lstrip("/")), str(folder / name))

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(get, names))

    def write(self, name: str, data: bytes) -> None:
        with clear_store_errors(self.url):
            self._there()
            if not self.folder:
                self.fs.pipe_file(self._path(name), data)
                return
            temporary = self._temporary(name)
            temporary.write_bytes(data)
            os.replace(temporary, self._path(name))

    def read(self, name: str) -> bytes | None:
        """The object's bytes; None when there is no such object."""
        with clear_store_errors(self.url):
            self._there()
            try:
                return self.fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def read_json(self, name: str) -> Any:
        """The object's document; None when there is none or it is not JSON."""
        data = self.read(name)
        try:
            return None if data is None else json.loads(data)
        except ValueError:
            return None

    def remove(self, names: Iterable[str]) -> None:
        with clear_store_errors(self.url):
            paths = [self._path(name) for name in names]
            if paths:
                self.fs.rm(paths)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _temporary(self, name: str) -> Path:
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")

    def _there(self) -> None:
        """A folder that is gone (a disk no longer mounted) is not made again: that would fill the wrong disk."""
        if self.folder and not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is gone")


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
