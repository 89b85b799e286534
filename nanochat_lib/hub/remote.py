"""Where on a server the missing parts of a data set are, with the sizes and checksums that the server gives."""

from __future__ import annotations

from collections.abc import Callable

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.utils import hf_raise_for_status

from nanochat_lib.home import base_dir
from nanochat_lib.hub.fetch import Remote
from nanochat_lib.hub.patience import GaveUp, patiently, words
from nanochat_lib.hub.sets import PARQUET_REVISION, DataSet, OneFile, Shards, Tasks

AT_ONCE = 500  # paths in one question to the hub


def locate(entry: DataSet, parts: list[str], say: Callable[[str], None]) -> tuple[list[Remote], dict[str, str]]:
    """(the files of `parts`, {part: why it is not to be had}); `say` is told of pauses.

    Raises GaveUp when the server says nothing of use.
    """
    try:
        if isinstance(entry, Shards):
            return _shards(entry, parts, say)
        if isinstance(entry, Tasks):
            return _splits(entry, parts, say)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a login page, say, in place of the hub's JSON
        raise GaveUp(
            f"{constants.ENDPOINT} does not answer like the hub ({words(error)}); check HF_ENDPOINT"
        ) from error
    return [_one_file(entry, say)], {}


def _hub_file(repo: str, revision: str, label: str, below: str, found: object) -> Remote:
    """`found`: the hub's record of a file, which names its content by sha256 (large files) or git id."""
    lfs, name = found.lfs, getattr(found, "path", None) or found.rfilename
    url = hf_hub_url(repo, name, repo_type="dataset", revision=revision, endpoint=constants.ENDPOINT)
    size = lfs.size if lfs else found.size
    sha256 = lfs.sha256 if lfs else None
    return Remote(label, base_dir() / below, url, size, sha256, sha256 or found.blob_id or "", hub=True)


def _shards(entry: Shards, parts: list[str], say: Callable[[str], None]) -> tuple[list[Remote], dict[str, str]]:
    get_session().timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # this one question has no time limit of its own
    found = []
    for first in range(0, len(parts), AT_ONCE):
        asked = parts[first : first + AT_ONCE]
        found += patiently(lambda asked=asked: HfApi().get_paths_info(entry.repo, asked, repo_type="dataset"), say)
    by_name = {file.path: file for file in found}
    remotes = [
        _hub_file(entry.repo, "main", f"{entry.name}/{part}", f"{entry.where}/{part}", by_name[part])
        for part in parts
        if part in by_name
    ]
    return remotes, {part: f"404, not in {entry.repo}" for part in parts if part not in by_name}


def _splits(entry: Tasks, parts: list[str], say: Callable[[str], None]) -> tuple[list[Remote], dict[str, str]]:
    """The parquet files of each split at the commit that the export is at now.

    The hub also lists their addresses (/api/datasets/…/parquet/…), but as whole addresses, which lead past a mirror,
    and without sizes or checksums.
    """
    info = patiently(
        lambda: HfApi().dataset_info(
            entry.repo, revision=PARQUET_REVISION, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        ),
        say,
    )
    remotes, absent = [], {}
    for part in parts:
        files = sorted(
            (file for file in info.siblings or [] if file.rfilename.rpartition("/")[0] == part),
            key=lambda file: file.rfilename,
        )
        if not files:
            absent[part] = f"404, no such split in the parquet export of {entry.repo}"
        for i, file in enumerate(files):
            below = f"{entry.where}/{part}/{i:05d}.parquet"
            label = f"{entry.name}/{part}/{i:05d}.parquet"
            remotes.append(_hub_file(entry.repo, info.sha or PARQUET_REVISION, label, below, file))
    return remotes, absent


def _one_file(entry: OneFile, say: Callable[[str], None]) -> Remote:
    def ask() -> object:
        response = get_session().head(
            entry.url(), headers={"Accept-Encoding": "identity"}, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        )  # fmt: skip
        hf_raise_for_status(response)
        return response.headers

    headers = patiently(ask, say)
    length = headers.get("Content-Length", "")
    size = int(length) if length.isdigit() else None
    return Remote(entry.name, base_dir() / entry.file, entry.url(), size, None, headers.get("ETag", ""), hub=False)
