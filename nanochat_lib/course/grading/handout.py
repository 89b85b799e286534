"""`nanochat grade bundle`: the learner's zip, and the proof that no answer and no hidden case is in it."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from pathlib import Path

from nanochat_lib import __version__
from nanochat_lib.course import leaks
from nanochat_lib.course.build import build, sources
from nanochat_lib.errors import UserError

NAME = "BUNDLE.json"
NEVER = re.compile(r"(^|/)(solutions|tests|\.git|\.course|my_nanochat)/|\.sqlite|grading\.yaml|rubric\.yaml")


def bundle(root: Path, target: Path, salt: str = "") -> dict:
    """Writes the zip, the same bytes each time; returns what BUNDLE.json in it says. UserError for any leak.

    `salt`: only its fingerprint goes in, so that one can see later which salt belongs to the handed-out course.
    """
    build(check=True, root=root)
    chapters = sources(root)
    files = [path for path in leaks.bundle(root) if not NEVER.search(path.relative_to(root).as_posix())]
    found = hashlib.sha256()
    for path in files:
        data = leaks.given(path, root, files)
        found.update(f"{path.relative_to(root).as_posix()}\n{len(data)}\n".encode() + data)
    about = {"version": __version__, "hash": found.hexdigest()[:16], "files": len(files), "chapters": sorted(chapters)}
    about["salted"] = hashlib.sha256(f"salt\n{salt}".encode()).hexdigest()[:8] if salt else ""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(f"{target.stem}/{path.relative_to(root).as_posix()}")  # dated 1980
            entry.external_attr = (path.stat().st_mode & 0o755) << 16
            archive.writestr(entry, leaks.given(path, root, files), zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(f"{target.stem}/{NAME}"), json.dumps(about, indent=1) + "\n")
    try:
        prove(target, root)
    except UserError:
        target.unlink()
        raise
    return about


def prove(target: Path, root: Path) -> None:
    """Looks through the zip itself, as it would be handed out. UserError naming what a learner must not get."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(target) as archive:
        if wrong := [name for name in archive.namelist() if NEVER.search(name)]:
            raise UserError(f"{target} holds {wrong[0]}, which learners must not get")
        archive.extractall(folder)
        if problems := leaks.leaks(Path(folder) / target.stem, sources(root)):
            raise UserError(f"{target}: {problems[0]}")
