"""Around a stage's work: status.json from its start to its end, signals that become notices, a look-out for stalls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nanochat_lib import distributed, stall, stopping
from nanochat_lib.errors import explain
from nanochat_lib.run_config import OpsConfig
from nanochat_lib.status import Status
from nanochat_lib.storage import TEMPORARY


@contextlib.contextmanager
def supervised(folder: Path, stage: str, ops: OpsConfig) -> Iterator[None]:
    """The block is the work of `stage` on the run in `folder`, which belongs to this process."""
    place = distributed.place()
    status = Status(folder, place.index == 0)
    label = f"-p{place.index}" if place.count > 1 else ""
    if status.first:
        clear_leftovers(folder)
    with contextlib.ExitStack() as around:
        around.enter_context(stopping.watching())
        stopping.set_grace(ops.grace_seconds)
        around.enter_context(stopping.last_words(lambda line: status.write("preempted", line)))
        around.enter_context(stall.detecting(status, ops, label))
        status.write("running", stage=stage, step=0, of=0)
        try:
            if stage.startswith("eval"):
                around.enter_context(stall.phase("evaluation"))
            yield
            status.write("running")
        except KeyboardInterrupt as stop:
            status.write("preempted", str(stop) or "stopped by Ctrl-C")
            raise
        except BaseException as error:
            if isinstance(error, Exception) and (stop := stopping.overtaken()):
                status.write("preempted", str(stop))
                raise stop from error
            who = f"process {place.index}: " if place.index else ""
            status.write("failed", who + explain(error))
            raise


def clear_leftovers(folder: Path) -> None:
    """Removes the small files that a killed process was writing. Checkpoints' folders are cleared by their stage."""
    for found in [*folder.glob(f"*{TEMPORARY}*"), *folder.glob(f"stages/*{TEMPORARY}*")]:
        if found.is_file():
            found.unlink(missing_ok=True)
