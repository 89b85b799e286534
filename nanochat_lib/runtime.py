"""JAX's distributed runtime, started and kept out of the way: of forked children, of SIGTERM, of networks.

It brings collective operations between processes and the notice of a preemption, also for one process alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from nanochat_lib.errors import UserError
from nanochat_lib.launch import PORT, Plan, tpu_chips
from nanochat_lib.rendezvous import Watchdog, checklist, meet


def start_alone() -> None:
    """The runtime for this process only. No TCP: a proxy, a firewall or a missing network cannot be in the way."""
    import jax

    folder, owner = tempfile.mkdtemp(prefix="nanochat-"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    address = f"unix:{folder}/socket"
    with contextlib.suppress(AttributeError):  # an option of some versions: a warning about proxies
        jax.config.update("jax_check_proxy_envs", False)
    try:
        _initialize(
            coordinator_address=address, num_processes=1, process_id=0, coordinator_bind_address=address,
            cluster_detection_method="deactivate",
        )  # fmt: skip
    except RuntimeError:  # JAX has been used before, or no socket can be had
        return
    jax.config.update("jax_cpu_collectives_implementation", None)  # gloo would look up this machine's name


def start_given(plan: Plan) -> bool:
    """The runtime among processes whose number and meeting place are known."""
    end = time.monotonic() + plan.timeout
    meet(plan.address, plan.count, plan.index, plan.timeout)
    left = max(end - time.monotonic(), plan.timeout / 4)
    what = f"process {plan.index} of {plan.count} met the others, but JAX's coordinator did not answer"
    local = plan.address.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
    with Watchdog(left, checklist(what, plan.address, plan.timeout)):
        try:
            _initialize(
                coordinator_address=plan.address, num_processes=plan.count, process_id=plan.index,
                coordinator_bind_address=plan.address if local else None, cluster_detection_method="deactivate",
                initialization_timeout=int(left) + 60,
            )  # fmt: skip
        except RuntimeError as error:
            raise UserError(f"several processes must start before JAX is used: {first_line(error)}") from error
    return True


def start_cluster(plan: Plan) -> bool:
    """Lets JAX find the others. False when a plan of kind "ask" found no cluster."""
    if plan.port or plan.kind == "ask" or tpu_chips(os.environ):
        os.environ.setdefault("JAX_COORDINATOR_PORT", str(plan.port or PORT))
    what = "not all processes of the cluster came"
    try:
        with Watchdog(plan.timeout, checklist(what, "the address that JAX found", plan.timeout)):
            _initialize(initialization_timeout=int(plan.timeout) + 60)
    except Exception as error:
        if plan.kind == "ask":
            return False
        raise UserError(
            f"JAX could not start among several processes: {first_line(error)}; set NANOCHAT_COORDINATOR, "
            "NANOCHAT_PROCESSES and NANOCHAT_PROCESS_ID, or NANOCHAT_PROCESSES=1 for this process alone"
        ) from error
    return True


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _initialize(**options: Any) -> None:
    """jax.distributed.initialize, which would from then on swallow SIGTERM wherever nobody looks for a preemption."""
    global _notifier
    import jax

    before = _on_sigterm(None)
    try:
        jax.distributed.initialize(**options)
    finally:
        _notifier = _on_sigterm(before)
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a forked child: the runtime's threads stayed behind, so that the child would wait for them when it ends."""
    global _notifier
    from jax._src import distributed

    _notifier = None
    state = distributed.global_state
    for part in ("client", "service", "preemption_sync_manager"):
        if (kept := getattr(state, part, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # never destroyed
            setattr(state, part, None)


_notifier: int | None = None  # JAX's handler of SIGTERM, a C function
_watching = False
_polls = 0


class Preempted(UserError):
    """The machine is going to be taken away (SIGTERM): what was learned is saved, the run can go on elsewhere."""


def _on_sigterm(handler: int | None) -> int | None:
    """Sets what SIGTERM does, a C function or None for the default (the process ends); returns what it was."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    return libc.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def watching_for_preemption() -> Iterator[None]:
    """In the block SIGTERM is a notice that `check_preempted` passes on; outside it ends the process as ever."""
    global _watching
    if _notifier is None:
        yield
        return
    before, _watching = _on_sigterm(_notifier), True
    try:
        yield
    finally:
        _watching = False
        _on_sigterm(before)


def check_preempted() -> None:
    """Raises Preempted in all processes at the same call, a second or two after one of them was sent SIGTERM.

    All processes call this equally often, every few seconds. Does nothing outside `watching_for_preemption`.
    """
    global _polls, _notifier
    if not _watching or _notifier is None:
        return
    from jax.experimental import multihost_utils

    _polls += 1
    if multihost_utils.reached_preemption_sync_point(_polls):
        _notifier = None  # JAX notices one preemption; a second signal is to end the process
        raise Preempted("stopped by SIGTERM")
