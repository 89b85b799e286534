"""Many processes, one run: the start, the comparison of what they run, common decisions, an end without hanging.

JAX is multi-controller: every process runs the same program over its own devices and meets the others in collective
operations. A process that decides alone (to save, to stop, to fail) leaves the others waiting, so decisions are made
together here.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat_lib import stopping
from nanochat_lib.compile_cache import keep_compiled
from nanochat_lib.errors import UserError
from nanochat_lib.launch import Options, decide, tpu_chips
from nanochat_lib.preempted import Preempted
from nanochat_lib.rendezvous import Watchdog, checklist
from nanochat_lib.runtime import link_notices, start_cluster, start_given

GRACE = 5.0  # seconds that process 0, which holds the runtime, outlives a failure: the others say theirs meanwhile


@dataclass(frozen=True)
class Processes:
    """This process's place among all."""

    index: int
    count: int


# ---- start ----------------------------------------------------------------------------------------------------------

_started: tuple[int, Processes] | None = None  # by the process of this id: a forked child has not started anything


def start(options: Options | None = None) -> Processes:
    """Starts JAX's runtime where there are several processes, before JAX is used; a second call returns the same.

    Raises UserError with a checklist when processes are missing after the timeout.
    """
    global _started
    import jax

    if _started and _started[0] == os.getpid():
        return _started[1]
    keep_compiled()
    plan = decide(options or Options(), os.environ, tpu_chips(os.environ))
    found = jax.distributed.is_initialized()  # by the program that uses this library
    if not found and plan.kind == "given":
        found = start_given(plan)
    elif not found and plan.kind != "alone":
        found = start_cluster(plan)
    if found:
        with Watchdog(plan.timeout, checklist("not all processes found their devices", plan.address, plan.timeout)):
            processes = Processes(jax.process_index(), jax.process_count())
        _check_devices()
    else:
        processes = Processes(0, 1)
    if processes.count > 1:
        link_notices(processes.index)
        atexit.register(_leave)
        sys.excepthook = _excepthook
    _started = (os.getpid(), processes)
    return processes


def _check_devices() -> None:
    import jax

    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts)) > 1:
        named = ", ".join(f"process {i} has {n}" for i, n in enumerate(counts))
        raise UserError(f"all processes need the same number of devices, but {named}")


# ---- decisions in common --------------------------------------------------------------------------------------------


def place() -> Processes:
    """This process's place, without touching JAX: before the start it is the only one."""
    return _started[1] if _started else Processes(0, 1)


def index() -> int:
    """This process's number, from 0."""
    import jax

    return jax.process_index()


def count() -> int:
    import jax

    return jax.process_count()


def first() -> bool:
    """Whether this is process 0, which alone prints and writes what is the same in all."""
    return index() == 0


def say(text: str) -> None:
    """Prints in process 0 only."""
    if first():
        print(text)


def gather_text(text: str) -> list[str]:
    """The `text` of every process, in their order. All processes call this together."""
    if count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.int32(len(data))).max())
    room = 1 << max(longest, 1).bit_length()  # few shapes: each compiles once
    rows = multihost_utils.process_allgather(np.pad(data, (0, room - len(data)))).reshape(count(), room)
    return [bytes(row).rstrip(b"\0").decode() for row in rows]


def gather(values: np.ndarray) -> np.ndarray:
    """(N, …) of every process, one below the other. All processes call this together, with the same shape."""
    if count() == 1:
        return values
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values, tiled=True))


@contextlib.contextmanager
def own_pace() -> Iterator[None]:
    """Around work of which processes have different amounts: one that is stopped in it stops all at its end.

    Nothing in the block may wait for another process.
    """
    if count() == 1:
        yield
        return
    stop: type[Preempted] | None = None
    try:
        with stopping.alone():
            yield
    except Preempted as error:
        stop = type(error)
    if gather(np.array([stop is not None])).any():
        raise (stop or Preempted)(agreed=True)


def from_first(value: Callable[[], Any]) -> Any:
    """`value()` of process 0, plain data, in every process. All processes call this together; it is made once."""
    with everyone():
        text = json.dumps(value()) if first() else ""
    return json.loads(gather_text(text)[0])


def post(name: str, text: str) -> None:
    """Leaves `text` for another process under a name never used before. No collective operation: any thread may."""
    from jax._src import distributed

    distributed.global_state.client.key_value_set(name, text)


def await_post(name: str, hours: float = 24) -> str:
    """The text that a process has left, or will leave, under `name`. JAX ends us when that process has died."""
    from jax._src import distributed

    return distributed.global_state.client.blocking_key_value_get(name, int(hours * 3_600_000))


@contextlib.contextmanager
def everyone() -> Iterator[None]:
    """All processes reach the end of the block, or all stop with the message of the one that failed in it.

    Nothing in the block may wait for another process.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if count() == 1:
        if failure:
            raise failure
        return
    texts = gather_text("" if failure is None else str(failure) or type(failure).__name__)
    if failure:
        raise failure
    for number, text in enumerate(texts):
        if text:
            raise UserError(f"process {number}: {text}")


def shared_folder(folder: Path) -> None:
    """Makes `folder`; UserError when it is not one and the same for all processes, which call this together."""
    if not is_shared(folder):
        with everyone():
            if not first():
                raise UserError(f"{folder} here is not the folder of process 0; give all processes one that they share")


def is_shared(folder: Path) -> bool:
    """Makes `folder` in process 0; whether all processes, which call this together, see that very folder."""
    mark = folder / f".seen-{from_first(lambda: uuid.uuid4().hex)}"
    with everyone():
        if first():
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
    try:
        return not any(gather_text("" if mark.exists() else "unseen"))
    finally:
        if first():
            mark.unlink(missing_ok=True)


def check_platform(wanted: str) -> None:
    """Raises UserError when the run is for a gpu or tpu and JAX computes on something else here.

    NANOCHAT_ANY_PLATFORM=1 in the environment lets it run all the same.
    """
    import jax

    found = jax.default_backend()
    if wanted in ("cpu", found) or os.environ.get("NANOCHAT_ANY_PLATFORM") == "1":
        return
    kinds = f"{jax.local_device_count()} × {jax.local_devices()[0].device_kind}"
    raise UserError(
        f"this run is for a {wanted}, but JAX found only {found} ({kinds}){tpu_holder() if wanted == 'tpu' else ''}; "
        f"`nanochat doctor` looks for the cause, NANOCHAT_ANY_PLATFORM=1 runs it on the {found} all the same"
    )


def tpu_holder(devices: Iterable[str] = ("/dev/accel", "/dev/vfio/"), lock: str = "/tmp/libtpu_lockfile") -> str:
    """Who keeps the TPU from us, for a message: a process that has it or its lock file open, or a lock left behind."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(handle).startswith((*devices, lock)) and int(handle.parts[2]) != os.getpid():
                return f": process {handle.parts[2]} holds the TPU, end it first"
    if not Path(lock).exists():
        return ""
    if os.geteuid():  # the files that other users' processes have open are not shown
        return f": {lock} is there; `sudo fuser {lock}` shows whose it is, if nobody's remove it: sudo rm -f {lock}"
    return f": {lock} is left of an earlier process, remove it: rm -f {lock}"


def agree(**values: str) -> None:
    """Stops every process when one of `values` (hashes, versions) differs between them.

    The code of this package, JAX's version and the devices are always compared. Raises UserError naming the first
    that differs and the processes that differ from process 0.
    """
    if count() == 1:
        return
    import jax

    kinds = sorted({device.device_kind for device in jax.local_devices()})
    mine = {"code": code_hash(), "jax": jax.__version__, "devices": ", ".join(kinds)} | values
    every = [json.loads(text) for text in gather_text(json.dumps(mine))]
    for name in dict.fromkeys(name for one in every for name in one):
        others = [i for i, one in enumerate(every) if one.get(name) != every[0].get(name)]
        if others:
            found = [str(every[i].get(name))[:24] for i in (others[0], 0)]
            raise UserError(
                f"process {', '.join(map(str, others))} has another {name} ({found[0]}) than process 0 ({found[1]}); "
                "start all processes with the same settings, code and data"
            )


def text_hash(value: object) -> str:
    """sha256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def code_hash() -> str:
    """sha256 over the names and contents of this package's .py files."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


# ---- end ------------------------------------------------------------------------------------------------------------

_broken, _code = False, 1


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around all that processes do in common: one that fails here ends at once, and with it all others.

    Without this it would wait at its end for the others, which wait for it in the middle of their work.
    """
    global _broken, _code
    try:
        yield
    except BaseException as error:
        _broken = not getattr(error, "agreed", False)  # a preemption to which all came together
        _code = getattr(error, "code", 1)
        raise


def _excepthook(*error: Any) -> None:
    global _broken
    _broken = True
    sys.__excepthook__(*error)


def _leave() -> None:
    """At exit of one of several processes; JAX's own end, which waits for all others, comes after it."""
    if not _broken:
        return
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if _started and _started[1].index == 0:
        time.sleep(GRACE)
    os._exit(_code)
