"""One file from a server to its place: resumed where an earlier start left it, checked, then renamed.

The hub's own client finds the file, carries the token, follows mirrors and obeys offline mode. Its `hf_hub_download` is
not used for the bytes: in current versions it begins from zero in every process and deletes what it has when it is
stopped. Here the bytes lie in one part file beside the final name, which always holds the beginning of the file, so
that a kill at any moment costs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from nanochat_lib.hub import ledger
from nanochat_lib.hub.local import content_problem
from nanochat_lib.hub.patience import Damaged, patiently
from nanochat_lib.storage import TEMPORARY, clear_disk_errors, sha256_file


@dataclass(frozen=True)
class Remote:
    """A file on a server and the place where it belongs."""

    label: str  # how the user is told of it
    path: Path
    url: str
    size: int | None  # bytes, where the server says so
    sha256: str | None  # hex, where the server says so
    version: str  # another content has another one: sha256, git id or ETag
    hub: bool  # served by the hub: the user's token goes along

    def part(self) -> Path:
        """Where the beginning of the file lies while it is fetched; a part of another version is never continued."""
        return self.path.with_name(
            f"{self.path.name}{TEMPORARY}{re.sub('[^0-9a-zA-Z]', '', self.version)[:12] or 'part'}"
        )

    def here(self) -> int:
        """Bytes of the part that an earlier start left."""
        try:
            return self.part().stat().st_size
        except FileNotFoundError:
            return 0


class Stopped(Exception):
    """The whole download was stopped; the part stays as it is."""


def fetch(remote: Remote, gained: Callable[[int], None], say: Callable[[str], None], stop: Event) -> None:
    """Brings `remote` to its place. `gained(n)`: n more bytes have come, or were thrown away (n < 0); `say`: of pauses.

    Raises GaveUp when it will not come, UserError when the disk refuses, Stopped soon after `stop` was set.
    """
    with clear_disk_errors(remote.path):
        remote.path.parent.mkdir(parents=True, exist_ok=True)
    patiently(lambda: _attempt(remote, gained, stop), say)


def _attempt(remote: Remote, gained: Callable[[int], None], stop: Event) -> None:
    part = remote.part()
    if remote.here() == 0 or remote.here() != remote.size:
        _receive(remote, gained, stop)
    if problem := _problem(remote):
        _drop(remote, gained)
        raise Damaged(problem)
    with clear_disk_errors(remote.path):
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        size = part.stat().st_size
        os.replace(part, remote.path)
        for old in remote.path.parent.glob(f"{remote.path.name}{TEMPORARY}*"):  # parts of other versions
            old.unlink(missing_ok=True)
    ledger.note_file(remote.path, size, remote.sha256)


def _receive(remote: Remote, gained: Callable[[int], None], stop: Event) -> None:
    """Appends to the part what is missing of it."""
    have = remote.here()
    headers = build_hf_headers() if remote.hub else {}
    headers["Accept-Encoding"] = "identity"  # ranges and sizes are those of the file itself
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream(
        "GET", remote.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        if have and (response.status_code == 416 or not _continues(response, have)):
            _drop(remote, gained)  # the server sends all of it, or the part is longer than the file
            have = 0
        if response.status_code == 416:
            raise Damaged("the part on disk was no beginning of this file")
        hf_raise_for_status(response)
        with clear_disk_errors(remote.path):
            out = open(remote.part(), "ab", buffering=0)
        with out:
            for chunk in response.iter_bytes():  # as they come: what has arrived is kept, however this ends
                if stop.is_set():
                    raise Stopped
                with clear_disk_errors(remote.path):
                    _write_all(out, chunk)
                have += len(chunk)
                gained(len(chunk))
    if remote.size is not None and have < remote.size:
        raise Damaged(f"cut short at {have:,} of {remote.size:,} bytes")


def _write_all(out: object, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:  # an unbuffered write may take a part only
        view = view[out.write(view) :]


def _continues(response: object, have: int) -> bool:
    """Whether an answer's body begins at byte `have`; an error's body is not looked at."""
    return response.status_code >= 400 or response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _drop(remote: Remote, gained: Callable[[int], None]) -> None:
    gained(-remote.here())
    remote.part().unlink(missing_ok=True)


def _problem(remote: Remote) -> str:
    """What is wrong with the received bytes; "" when they are the file that was announced."""
    part, size = remote.part(), remote.here()
    if remote.size is not None and size != remote.size:
        return f"{size:,} bytes instead of {remote.size:,}"
    if remote.sha256 is not None and sha256_file(part) != remote.sha256:
        return "its sha256 differs from the hub's"
    return content_problem(part, remote.path.suffix)
