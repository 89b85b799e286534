"""Checkpoints written while training goes on.

`save` returns as soon as the arrays are in host memory: one copy of the state, this process's pieces of it. A thread of
each process then writes its pieces; process 0's waits for the others' word, completes and publishes the folder, removes
what the keep policy lets go, and uploads the checkpoint to the run's copy, if it has one. What went wrong comes out of
the next call of `save`, `poll` or `wait`, of all processes alike. One save is on its way at a time.

Where the processes of a run share no folder (each host has a disk of its own), each uploads its pieces to the run's
copy and nothing stays here: the copy alone has the whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanochat_lib import arrays, distributed, step_folders, stopping, storage
from nanochat_lib.durable import RunCopy
from nanochat_lib.errors import UserError
from nanochat_lib.objects import StoreError
from nanochat_lib.preempted import Preempted

SPARE_BYTES = 1 << 20  # room asked for beside the arrays
ALONE = 60  # seconds that one of several processes, which fails, gives the save on its way


class Job(threading.Thread):
    """One save on its way in this process."""

    def __init__(self, step: int, work: Callable[[Job], None]) -> None:
        super().__init__(name=f"checkpoint {step}", daemon=True)  # a process that has to end does not wait for it
        self.step, self.work = step, work
        self.copied = threading.Event()
        self.error: BaseException | None = None
        self.warning = ""  # the copy could not be made: not this run's end

    def run(self) -> None:
        try:
            self.work(self)
        except BaseException as error:
            self.error = error
        finally:
            self.copied.set()


class Saver:
    """Writes the checkpoints of one folder, with a copy in `durable` if that is given.

    The newest `keep` stay, and those whose step is a multiple of `keep_every` (-1: none), here and in the copy; damaged
    ones stay too. With several processes all of them make each call together. `shared`: they see the same folder.
    """

    def __init__(
        self, folder: str | Path, durable: RunCopy | None = None, keep: int = 2, keep_every: int = -1,
        shared: bool = True,
    ) -> None:  # fmt: skip
        step_folders.check_keep(keep, keep_every)
        if not shared and durable is None:
            raise UserError(
                f"{folder} is not shared by all processes: set ops.durable, or give them one that they share"
            )
        self.folder, self.durable, self.keep, self.keep_every = Path(folder), durable, keep, keep_every
        self.shared = shared
        self._job: Job | None = None
        self._known: set[int] = set()  # steps whose checksums were compared, or which were written here
        self._around = sys.exc_info()[1]  # an exception that somebody is handling already
        self._seen = self.folder.is_dir()  # so that one that was removed is not made again
        self._behind = False  # whether the copy lacks what was saved last

    # ---- the three calls ---------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, meta: dict, own: dict | None = None) -> Path:
        """Begins to write `state` (pytree of arrays) and `meta` (plain data) as checkpoint `step`; returns its folder.

        `state` may be donated as soon as this returns. `meta` is process 0's; `own` is what this process alone knows,
        and comes back among the others' in meta["processes"]. A checkpoint of the same step is replaced; one that is
        damaged is set aside under another name. When the disk refuses, one UserError says so, here or at the next
        call; what was there before is untouched.
        """
        self.settle()
        final = step_folders.step_folder(self.folder, step)
        leaves = {name: arrays.own_copy(leaf) for name, leaf in arrays.named_leaves(state).items()}
        needed = sum(leaf.nbytes for leaf in leaves.values()) + SPARE_BYTES
        specs = {name: arrays.spec(leaf) for name, leaf in leaves.items()}
        files = {"arrays.json": specs, **step_folders.meta_files(meta)}
        mark = distributed.from_first(lambda: uuid.uuid4().hex[:8])
        temporary = final.with_name(f"{final.name}{storage.TEMPORARY}{mark}")
        try:
            with distributed.everyone(), storage.clear_disk_errors(final):
                if distributed.first() or not self.shared:
                    if self._seen and not self.folder.is_dir():
                        raise self._removed()
                    temporary.mkdir(parents=True)
                    # The array writer meets a full disk half-way, with a screen full of tracebacks: ask before.
                    storage.check_room(temporary, needed)
        except BaseException:
            self._drop(temporary)
            raise
        self._seen = True

        def work(job: Job) -> None:
            nonlocal leaves
            ours, leaves = leaves, None  # the copy lives no longer than its writing
            try:
                self._write(job, temporary, final, mark, ours, files, own)
            finally:
                self._drop(temporary)

        self._job = Job(step, work)
        self._job.start()
        self._job.copied.wait()
        return final

    def poll(self) -> None:
        """Raises what went wrong with the save on its way, if it has ended; otherwise returns at once."""
        if self._job and self._ended():
            self.settle()

    def wait(self) -> None:
        """Waits until the save on its way has ended and the copy, if there is one, has the newest checkpoint.

        Raises UserError when one of them failed. Called while another exception ends the run, it prints that instead;
        then, unless all processes came to the exception together, each waits for itself alone.
        """
        ending = sys.exc_info()[1]
        if ending is self._around:
            ending = None
        one = distributed.count() == 1
        if ending is not None and not (isinstance(ending, Preempted) and (ending.agreed or one)):
            job, self._job = self._job, None
            if job:
                job.join(None if one else ALONE)
                if job.is_alive() or job.error:
                    print(f"checkpoint {job.step} was not saved: {job.error or 'not all processes finished it'}")
            return
        try:
            self.settle()
            self._catch_up()
        except UserError as error:
            if ending is None:
                raise
            distributed.say(str(error))

    def newest(self) -> tuple[int | None, list[str]]:
        """(newest valid step or None, what is wrong with others): of this folder, or fetched into it from the copy."""

        def find() -> tuple[int | None, list[str]]:
            return self.durable.newest(self.folder) if self.durable else step_folders.latest(self.folder)

        if self.shared:
            step, problems = distributed.from_first(find)
        else:
            with distributed.everyone():
                step, problems = find()
                # What was fetched at earlier starts:
                step_folders.prune(self.folder, self.keep, self.keep_every, self._known)
        if step is not None:
            self._known.add(step)
        if len({*distributed.gather_text(str(step))}) > 1:
            raise UserError(
                f"{self.durable.url}: the processes do not find the same newest checkpoint; start them again"
            )
        return step, problems

    # ---- what they are made of ---------------------------------------------------------------------------------

    def _ended(self) -> bool:
        alive = self._job.is_alive()
        return not alive if distributed.count() == 1 else not any(distributed.gather_text("1" if alive else ""))

    def busy(self) -> bool:
        """Whether a save is on its way in this process."""
        return self._job is not None and self._job.is_alive()

    def settle(self) -> None:
        """Waits until the save on its way has ended, in all processes together; raises what went wrong with it."""
        job, self._job = self._job, None
        if job is None:
            return
        job.join()
        with distributed.everyone():
            if job.error:
                raise job.error
        self._known.add(job.step)
        if self.shared or not job.warning:
            stopping.keeps(job.step)
        if job.warning:
            print(job.warning)

    def _write(
        self, job: Job, temporary: Path, final: Path, mark: str, leaves: dict, files: dict, own: dict | None
    ) -> None:
        """All of one save that happens in the background."""
        index, pieces, error = distributed.index(), {}, None
        try:
            with self._while_there(), storage.clear_disk_errors(final):
                arrays.write(temporary / "arrays", leaves, job.copied.set)
                leaves.clear()
                if own is not None:
                    storage.atomic_write_json(temporary / step_folders.process_file(index), own, indent=None)
            if index and not self.shared:
                pieces = self.durable.push_pieces(temporary, final)
        except Exception as failure:
            error = failure
        if index:
            said = {"error": _text(error), "store": isinstance(error, StoreError), "pieces": pieces}
            distributed.post(f"save-{mark}-{index}", json.dumps(said))
        else:  # also after a failure: nothing is removed while others write there
            others = [json.loads(distributed.await_post(f"save-{mark}-{i}")) for i in range(1, distributed.count())]
            failed = [(i, one) for i, one in enumerate(others, 1) if one["error"]]
            if error is None and failed:
                number, one = failed[0]
                error = (StoreError if one["store"] else UserError)(f"process {number}: {one['error']}")
        try:
            if error:
                raise error
            if index == 0:
                with self._while_there(), storage.clear_disk_errors(final):
                    for name, value in files.items():
                        storage.atomic_write_json(temporary / name, value, indent=None)
                    if self.shared:
                        self._publish(temporary, final, own is not None)
                        stopping.keeps(job.step)
                if self.shared:
                    self._copy(final)
                else:
                    self.durable.push_whole(temporary, final, [one["pieces"] for one in others])
                    stopping.keeps(job.step)
                    self.durable.prune(self.folder, self.keep, self.keep_every)
            self._behind = False
        except StoreError as failure:  # perhaps only for a while
            self._behind = True
            job.warning = (
                f"{final.name} {'is only on this machine' if self.shared else 'is lost'}: {failure}; the newest copy "
                f"is {self.durable.age()} old. Training goes on, the next save tries again"
            )

    def _removed(self) -> UserError:
        return UserError(f"{self.folder} was removed while the run was using it; start the command again")

    @contextlib.contextmanager
    def _while_there(self) -> Iterator[None]:
        """Whatever a library makes of it: a folder that is gone is the cause."""
        try:
            yield
        except Exception as error:
            if self.folder.is_dir():
                raise
            raise self._removed() from error

    def _publish(self, temporary: Path, final: Path, with_own: bool) -> None:
        arrays.merge(temporary / "arrays")
        listed = storage.write_manifest(temporary)
        unseen = [i for i in range(distributed.count()) if with_own and step_folders.process_file(i) not in listed]
        if unseen:
            raise UserError(f"{final}: process 0 does not see what process {unseen[0]} wrote; share the folder")
        aside = storage.set_aside(final)
        storage.publish_dir(temporary, final)
        if aside and ".replaced-" in aside.name:
            shutil.rmtree(aside)
        self._known.add(int(final.name.removeprefix("step_")))
        step_folders.prune(self.folder, self.keep, self.keep_every, self._known)

    def _copy(self, final: Path) -> None:
        """Uploads a finished checkpoint."""
        if self.durable:
            self.durable.push(final)
            self.durable.prune(self.folder, self.keep, self.keep_every)  # here and there alike

    def _catch_up(self) -> None:
        """UserError unless the copy has the newest checkpoint of this folder."""
        if self.durable is None:
            return
        with distributed.everyone():
            if not distributed.first():
                return
            if not self.shared:
                if self._behind:
                    raise UserError(
                        f"{self.folder}: the last checkpoint could not be copied to {self.durable.url}, the newest "
                        f"there is {self.durable.age()} old; start the same command again"
                    )
                return
            whole = step_folders.complete(self.folder)
            if not whole:
                return
            final = step_folders.step_folder(self.folder, whole[-1])
            try:
                self._copy(final)
            except StoreError as error:
                raise UserError(
                    f"{final} is only on this machine: {error}; the newest copy is {self.durable.age()} old. Start the "
                    "same command again to copy it"
                ) from error

    def _drop(self, temporary: Path) -> None:
        if distributed.first() or not self.shared:
            shutil.rmtree(temporary, ignore_errors=True)


def _text(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__
