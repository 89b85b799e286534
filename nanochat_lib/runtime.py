"""JAX's distributed runtime, started and kept out of the way: of forked children and of SIGTERM.

It brings collective operations between processes, and the step at which all of them stop when one is asked to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Any

from nanochat_lib import stopping
from nanochat_lib.errors import UserError
from nanochat_lib.launch import PORT, Plan, tpu_chips
from nanochat_lib.preempted import Preempted
from nanochat_lib.rendezvous import Watchdog, checklist, meet


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
    _on_sigterm(before)
    try:
        jax.distributed.initialize(**options)
    finally:
        found = _on_sigterm(before)
        _notifier = found if found != before else None  # the preemption service may be switched off
    os.register_at_fork(after_in_child=_forget)


def link_notices(index: int) -> None:
    """From now on a process that is asked to end tells the others. `index`: this process's number."""
    stopping.link(stopping.Link(index, _tell, _heard))


def _forget() -> None:
    """In a forked child: the runtime's threads stayed behind, so that the child would wait for them when it ends."""
    global _notifier
    from jax._src import distributed

    _notifier = None
    stopping.link(None)
    state = distributed.global_state
    for part in ("client", "service", "preemption_sync_manager"):
        if (kept := getattr(state, part, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # never destroyed
            setattr(state, part, None)


_notifier: int | None = None  # JAX's handler of SIGTERM, a C function
_polls = 0
NOTICE = "nanochat/stop"  # where the first process that is asked to end says so


def _on_sigterm(handler: int | None) -> int | None:
    """Sets what SIGTERM does, a C function or None for the default (the process ends); returns what it was."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    return libc.signal(signal.SIGTERM, handler)


def _tell() -> None:
    """Passes a notice on: to JAX, which finds the step to stop at, and to the other processes' own threads."""
    from jax._src import distributed

    if _notifier is not None:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(_notifier)(signal.SIGTERM)
    with contextlib.suppress(RuntimeError):  # said already, or nobody is there any more
        distributed.global_state.client.key_value_set(NOTICE, "1")


def _heard() -> bool:
    from jax._src import distributed

    try:
        return bool(distributed.global_state.client.key_value_try_get(NOTICE))
    except (RuntimeError, AttributeError):  # nothing said, or the runtime has ended
        return False


def check_preempted() -> None:
    """Raises preempted.Preempted when this run was asked to end: in all processes at the same call, within seconds.

    All processes call this equally often, every few seconds, except where they go at their own pace
    (distributed.own_pace). It is a sign of life as well. Outside `stopping.deferred` it only is that.
    """
    global _polls, _notifier
    stopping.beats += 1
    if not stopping.is_deferred():
        return
    if stopping.deciding_alone():
        if kind := stopping.noticed():
            raise kind()
        return
    if _notifier is None:  # no preemption service: nobody can agree on a step, and what was saved before counts
        return
    from jax.experimental import multihost_utils

    _polls += 1
    try:
        reached = multihost_utils.reached_preemption_sync_point(_polls)
    except RuntimeError:
        return
    if reached:
        _notifier = None  # JAX notices one preemption only
        raise (stopping.noticed() or Preempted)(agreed=True)
