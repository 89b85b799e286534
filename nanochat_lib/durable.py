"""The copy of a run that outlives its machine: checkpoints and the small files, in a store (`ops.durable`).

A fresh machine that starts the same command gets the small files when it opens the run, and checkpoints when a stage
needs them. A checkpoint counts there when its manifest does, which comes last, and when sizes and checksums agree.

`copy.json` names who wrote last. A machine that finds another's name there when it opens the run takes what that one
left; one that finds it while it runs has a rival, and stops: two runs in one place would mix.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from fnmatch import fnmatch
from pathlib import Path

from nanochat_lib import step_folders, storage
from nanochat_lib.errors import UserError
from nanochat_lib.objects import Store

SMALL = (
    "config.json", "mine.json", "preflight.json", "metrics.jsonl", "status.json", "report.*", "stages/*.json",
    "tokenizer/*", "evaluations/*", "base_eval/*",
)  # fmt: skip
MARK = "copy.json"  # in the store: {"id", "time"} of the last change
OWN_MARK = ".durable.json"  # in the run's folder: {"ids"}, the last changes made or taken here


class RunCopy:
    """The copy at `url` of the run in `run_dir`."""

    def __init__(self, url: str, run_dir: str | Path) -> None:
        self.url, self.run_dir, self.store = url.rstrip("/"), Path(run_dir), Store(url)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> (bytes, time of change) of the file as it was uploaded
        self._manifests: dict[str, dict[str, int]] = {}  # checkpoint -> sizes, of those read before
        self._damaged: dict[str, str] = {}  # checkpoint -> what was wrong with its bytes when it was fetched
        self.fresh_at: float | None = None  # time of the last change there, as far as known

    @classmethod
    def of(cls, url: str, run_dir: str | Path) -> RunCopy | None:
        """The copy, or None when the run has none (an empty URL)."""
        return cls(url, run_dir) if url else None

    # ---- the run's small files ---------------------------------------------------------------------------------

    def config(self) -> dict | None:
        """The configuration of the run that is there, None when there is none; checks that the store can be used."""
        self.store.check()
        return self.store.read_json("config.json")

    def open(self) -> str:
        """Takes the small files when another machine wrote them, or this one's were lost. Returns a line about it."""
        mark = self.store.read_json(MARK)
        if mark is None:
            return ""
        self.fresh_at = mark["time"]
        if mark["id"] in self._own_ids() or self._newest_change() > mark["time"]:
            self._note(mark["id"])
            return ""
        count = self.pull_files()
        self._note(mark["id"])
        return f"{self.url}: {count} files of the run taken from there, its copy is {self.age()} old"

    def pull_files(self) -> int:
        """Takes all small files that are there, whatever is here; returns how many."""
        names = [name for name in self.store.sizes() if _is_small(name)]
        for name in names:
            data = self.store.read(name)
            if data is not None:
                storage.atomic_write_bytes(self.run_dir / name, data)
        return len(names)

    def push_files(self) -> None:
        """Uploads the small files that have changed since the last time."""
        mark = self.store.read_json(MARK)
        if mark is not None and mark["id"] not in self._own_ids():
            raise UserError(
                f"{self.url}: another run has written there meanwhile; let one of them end, and start this one again "
                "or give it another ops.durable"
            )
        new = uuid.uuid4().hex
        self._note(new)  # before it is there: a kill in between must not make this machine a stranger
        for path in sorted(path for path in self.run_dir.rglob("*") if path.is_file()):
            name = path.relative_to(self.run_dir).as_posix()
            if not _is_small(name):
                continue
            stat = path.stat()
            seen = (stat.st_size, stat.st_mtime_ns)
            if self._sent.get(name) != seen:
                self.store.write(name, path.read_bytes())  # as it is now: it may be growing
                self._sent[name] = seen
        self.fresh_at = time.time()
        self.store.write(MARK, json.dumps({"id": new, "time": self.fresh_at}).encode())

    def age(self) -> str:
        """How old the copy is, in words."""
        if self.fresh_at is None:
            return "not there at all"
        seconds = max(time.time() - self.fresh_at, 0)
        if seconds < 120:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

    def _own_ids(self) -> list[str]:
        path = self.run_dir / OWN_MARK
        try:
            return storage.read_json(path)["ids"] if path.exists() else []
        except (UserError, KeyError, TypeError):
            return []

    def _note(self, mark: str) -> None:
        storage.atomic_write_json(self.run_dir / OWN_MARK, {"ids": [*self._own_ids(), mark][-2:]})

    def _newest_change(self) -> float:
        times = [path.stat().st_mtime for path in self.run_dir.glob("stages/*.json")]
        return max(times, default=0.0)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def checkpoints(self, folder: Path) -> tuple[list[int], list[str]]:
        """(steps that are complete there by their sizes, what is wrong with the others), of one stage's folder."""
        under = self.name(folder)
        places: dict[str, dict[str, int]] = {}
        for name, size in self.store.sizes(under).items():
            place, _, inside = name.removeprefix(f"{under}/").partition("/")
            step = step_folders.STEP_NAME.match(place)
            if inside and step and place == step_folders.step_folder("", int(step[1])).name:
                places.setdefault(place, {})[inside] = size
        complete, wrong = [], []
        for place, found in sorted(places.items()):
            problem = self._problem(f"{under}/{place}", found)
            if problem:
                wrong.append(problem)
            else:
                complete.append(int(place.removeprefix("step_")))
        return sorted(complete), wrong

    def _problem(self, name: str, found: dict[str, int]) -> str:
        if name in self._damaged:
            return self._damaged[name]
        if storage.MANIFEST not in found:
            self._manifests.pop(name, None)
            return f"{self.url}/{name} was never finished: {len(found)} objects without {storage.MANIFEST}"
        if name not in self._manifests:
            try:
                files = self.store.read_json(f"{name}/{storage.MANIFEST}")["files"]
                self._manifests[name] = {file: int(entry["size"]) for file, entry in files.items()}
            except (KeyError, TypeError, ValueError, AttributeError):
                return f"{self.url}/{name}/{storage.MANIFEST} is damaged"
        for file, size in self._manifests[name].items():
            if found.get(file) != size:
                del self._manifests[name]  # it may be repaired
                has = f"has {found[file]:,} bytes instead of {size:,}" if file in found else "is missing"
                return f"{self.url}/{name}/{file} {has}"
        return ""

    def newest(self, folder: Path) -> tuple[int | None, list[str]]:
        """(newest valid step here or there or None, problems); fetched into `folder` when only the store has it."""
        here, wrong = step_folders.latest(folder)
        there, problems = self.checkpoints(folder)
        for step in reversed(there):
            if here is not None and step <= here:
                break
            found = self._fetch(folder, step)
            problems += found
            if not found:
                here = step
                break
            self._damaged[self.name(step_folders.step_folder(folder, step))] = found[0]  # no reason to remove others
        return here, wrong + problems

    def _fetch(self, folder: Path, step: int) -> list[str]:
        """Downloads one checkpoint and compares its checksums; what is wrong with it, nothing being left then."""
        from nanochat_lib import arrays

        final = step_folders.step_folder(folder, step)
        name = self.name(final)
        temporary = storage.temporary_name(final)
        sizes = self._manifests[name]
        try:
            temporary.mkdir(parents=True)
            storage.check_room(temporary, sum(sizes.values()))
            self.store.get_all([*sizes, storage.MANIFEST], temporary, name)
            found = step_folders.problems_in(temporary, step)
            if not found:
                if not arrays.is_merged(temporary / "arrays"):  # each of several machines uploaded its own pieces
                    arrays.merge(temporary / "arrays")
                storage.set_aside(final)
                storage.publish_dir(temporary, final)
            return [problem.replace(str(temporary), f"{self.url}/{name}") for problem in found]
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def push(self, place: Path) -> None:
        """Uploads the finished checkpoint in `place`, its manifest last; does nothing when it is there already."""
        listed = storage.read_json(place / storage.MANIFEST)
        name = self.name(place)
        if int(place.name.removeprefix("step_")) in self.checkpoints(place.parent)[0]:
            if self.store.read_json(f"{name}/{storage.MANIFEST}") == listed:
                return
            self.forget(name)
        self.push_files()
        self.store.put_all(place, listed["files"], name)
        self.finish(name, (place / storage.MANIFEST).read_bytes())

    def push_pieces(self, pieces: Path, place: Path) -> dict[str, dict]:
        """Uploads the files of the folder `pieces`, one process's part of checkpoint `place`; returns their list."""
        files = storage.list_files(pieces)
        self.store.put_all(pieces, files, self.name(place))
        return files

    def push_whole(self, pieces: Path, place: Path, others: list[dict[str, dict]]) -> None:
        """Uploads process 0's part, and then the manifest of it and of what the others have uploaded."""
        self.push_files()
        files = self.push_pieces(pieces, place)
        for listed in others:
            files |= listed
        self.finish(self.name(place), json.dumps({"files": files}).encode())

    def catch_up(self, folder: Path) -> str:
        """Uploads a stage's newest checkpoint when the copy, begun later, lacks it. Returns a line about it."""
        here = step_folders.complete(folder)
        if not here or here[-1] <= max(self.checkpoints(folder)[0], default=-1):
            return ""
        self.push(step_folders.step_folder(folder, here[-1]))
        return f"{self.url}: checkpoint {here[-1]} of {folder.name} copied there"

    def finish(self, name: str, manifest: bytes) -> None:
        """Makes the checkpoint valid: its objects are all there."""
        self.store.write(f"{name}/{storage.MANIFEST}", manifest)
        self._manifests.pop(name, None)
        self._damaged.pop(name, None)

    def forget(self, name: str) -> None:
        """Makes a checkpoint invalid, so that its objects may be replaced or removed."""
        self.store.remove([f"{name}/{storage.MANIFEST}"])
        self._manifests.pop(name, None)

    def prune(self, folder: Path, keep: int, keep_every: int) -> None:
        """Removes what the keep policy lets go. Whatever is not complete stays for a person to look at."""
        for step in step_folders.superfluous(self.checkpoints(folder)[0], keep, keep_every):
            name = self.name(step_folders.step_folder(folder, step))
            objects = list(self._manifests[name])
            self.forget(name)
            self.store.remove(f"{name}/{file}" for file in objects)

    def name(self, path: Path) -> str:
        """What a folder of the run is called in the store."""
        return path.relative_to(self.run_dir).as_posix()


def _is_small(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in SMALL) and storage.TEMPORARY not in name
