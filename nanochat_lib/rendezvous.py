"""The start of several processes: wait until all are there, and say which are missing instead of hanging.

JAX's own start ends the process from C++ when a worker does not come, with a stack trace and without naming it. So the
processes meet first over plain TCP, at the address and port where process 0 will then open JAX's coordinator.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from nanochat_lib.errors import UserError
from nanochat_lib.launch import on_all_workers, tpu_chips

RETRY_SECONDS = 0.2
LINE_BYTES = 8192  # at most, of the one line that each side sends
PATIENCE = 5.0  # seconds more that a worker waits for process 0's verdict, which falls at the deadline


def checklist(what: str, address: str, timeout: float) -> str:
    """`what` went wrong at the start, and what to look at, a line each."""
    given = ", each with its own NANOCHAT_PROCESS_ID, counted from 0"
    command = on_all_workers(os.environ, tpu_chips(os.environ))
    lines = [
        f"{what}; waited {timeout:g} s at {address}",
        f"  - start the same command on every worker{f': {command}' if command else given}",
        f"  - every worker must reach {address}: open the port in the firewall or take another (NANOCHAT_COORDINATOR)",
        "  - every worker needs the same code, packages and run folder",
        "  - workers that start slowly: raise NANOCHAT_COORDINATOR_TIMEOUT (seconds)",
    ]
    if proxies := sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")):
        lines.append(f"  - a proxy may be in the way: add the workers to no_proxy, or unset {', '.join(proxies)}")
    return "\n".join(lines)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port"; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def meet(address: str, count: int, index: int, timeout: float) -> None:
    """Returns in all `count` processes once all of them have called it, each with another `index` from 0.

    Raises UserError with a checklist when somebody is missing after `timeout` seconds or two have the same index.
    """
    deadline = time.monotonic() + timeout
    if index == 0:
        _host(address, count, timeout, deadline)
    else:
        _visit(address, count, index, timeout, deadline)


def _host(address: str, count: int, timeout: float, deadline: float) -> None:
    """Process 0: collects the others' hellos, then tells everybody who came whether the run can begin."""
    arrived: dict[int, socket.socket] = {}
    wrong = ""
    with _listen(address) as server:
        try:
            while len(arrived) < count - 1 and not wrong and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    visitor, _ = server.accept()
                except TimeoutError:
                    break
                wrong = _admit(visitor, count, arrived)
            missing = [str(i) for i in range(1, count) if i not in arrived]
            if missing and not wrong:
                wrong = f"process 0 of {count} is there, missing: {', '.join(missing)}"
            for visitor in arrived.values():
                _send(visitor, {"wrong": wrong})
            for visitor in arrived.values():  # the other side closes first, so that the port is free at once
                _receive(visitor)
        finally:
            for visitor in arrived.values():
                visitor.close()
    if wrong:
        raise UserError(checklist(wrong, address, timeout))


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    local = host in ("localhost", "127.0.0.1", "::1")
    try:
        if local:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {address}: {error.strerror or error}; name a free port of its own address "
            "in NANOCHAT_COORDINATOR (host:port)"
        ) from None


def _admit(visitor: socket.socket, count: int, arrived: dict[int, socket.socket]) -> str:
    """Takes in one connection; what is wrong with it, or nothing. Strangers on the port are sent away."""
    visitor.settimeout(PATIENCE)
    hello = _receive(visitor)
    index, of = hello.get("process"), hello.get("of")
    if not (isinstance(index, int) and isinstance(of, int)):
        visitor.close()
        return ""
    if of == count and 0 < index < count and (index not in arrived or _gone(arrived[index])):
        arrived[index] = visitor
        return ""
    wrong = f"two processes have NANOCHAT_PROCESS_ID {index}" if of == count else ""
    wrong = wrong or f"process {index} was started for {of} processes, process 0 for {count}"
    _send(visitor, {"wrong": wrong})
    visitor.close()
    return wrong


def _gone(peer: socket.socket) -> bool:
    """True when the other side has closed: a worker that was started again."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(PATIENCE)


def _visit(address: str, count: int, index: int, timeout: float, deadline: float) -> None:
    """Any other process: knocks until process 0 opens, then waits for its verdict."""
    wrong = f"process {index} of {count} found no process 0"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(split_address(address), timeout=left) as host:
                host.settimeout(deadline - time.monotonic() + PATIENCE)
                _send(host, {"process": index, "of": count})
                verdict = _receive(host)
        except OSError:  # not listening yet, or its name is not known yet
            time.sleep(RETRY_SECONDS)
            continue
        if verdict.get("wrong") == "":
            return
        if "wrong" in verdict:
            wrong = str(verdict["wrong"])
            break
        time.sleep(RETRY_SECONDS)  # something else answered, or process 0 went away: perhaps it starts again
    raise UserError(checklist(wrong, address, timeout))


def _send(peer: socket.socket, message: dict) -> None:
    try:
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # it is gone; its own side says why


def _receive(peer: socket.socket) -> dict:
    """One line of JSON; empty when the other side says nothing or nonsense."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < LINE_BYTES and (part := peer.recv(LINE_BYTES)):
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


class Watchdog:
    """Ends the process with a message when the block takes longer than `seconds`: for calls that cannot be left."""

    def __init__(self, seconds: float, message: str) -> None:
        self.timer = threading.Timer(seconds, self.end, [message])
        self.timer.daemon = True

    @staticmethod
    def end(message: str) -> None:
        sys.stdout.flush()
        print(f"nanochat: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *exc: object) -> None:
        self.timer.cancel()
