"""The last steps before the program starts, in its own process: limits, no capabilities, Landlock, the call filter."""

from __future__ import annotations

import os

from nanochat_lib.sandbox import landlock, seccomp, syscalls

NOFILE = 256  # open files of one process


def wanted_limits(spec: dict, tasks: int) -> dict[str, int]:
    """RLIMIT_… → value. `tasks`: threads that the kernel already counts for this user."""
    limits = {"CORE": 0, "NOFILE": NOFILE, "FSIZE": spec["files_bytes"], "MEMLOCK": 1 << 16, "MSGQUEUE": 0}
    limits["NPROC"] = tasks + spec["processes"] + spec["threads"]
    if spec["cpu_seconds"] is not None:
        limits["CPU"] = int(spec["cpu_seconds"]) + 1
    if spec["memory_bytes"] is not None:
        # Private writable pages. The watcher counts what is really used; this stops a burst between two looks.
        limits["DATA"] = spec["memory_bytes"] + (2**30 if spec["big_virtual"] else 0)
        if not spec["big_virtual"]:
            limits["AS"] = spec["memory_bytes"]
    return limits


def apply_limits(spec: dict, tasks: int = 0) -> list[str]:
    """Sets every limit of this process that the system has; returns a line for each that it refused."""
    import resource  # not on Windows

    refused = []
    for name, value in wanted_limits(spec, tasks).items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            continue
        try:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError) as error:
            refused.append(f"no limit {name} here: {error}")
    return refused


def become(spec: dict, pipes: tuple[int, int, int], report: int, tasks: int) -> None:
    """Turns this forked process into the program, confined. Writes "started" to `report`, or why it could not."""
    try:
        os.setsid()  # no terminal to type into
        if spec["linux"]:
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, syscalls.SIGKILL)
        for target, source in enumerate(pipes):
            os.dup2(source, target)
        report = _only_keep(report)
        os.umask(0o077)
        os.chdir(spec["cwd"])
        for number in (syscalls.SIGPIPE, syscalls.SIGXFSZ):
            syscalls.call("signal", number, 0)  # the default: Python ignores them and children inherit that
        notes = apply_limits(spec, tasks)
        if spec["linux"]:
            syscalls.drop_capabilities()
            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        if spec["strong"]:
            landlock.restrict(["/"], [path for path in spec["writable"] if os.path.exists(path)])
            if seccomp.available():
                seccomp.install(single_process=spec["processes"] == 1)
        os.write(report, "".join(f"note {line}\n" for line in notes).encode() + b"started\n")
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as error:  # whatever it is, the caller must hear of it and the program must not start
        os.write(report, f"refused {type(error).__name__}: {error}\n".encode())
    os._exit(127)


def _only_keep(report: int) -> int:
    """Closes all but 0, 1, 2 and `report`, which moves to 3 and closes by itself when the program starts."""
    if report != 3:
        os.dup2(report, 3)
    os.set_inheritable(3, False)
    os.closerange(4, 65536)
    return 3
