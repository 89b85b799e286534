"""The sandbox's contract at every level that works here: results, limits, cleanliness, falling back to a lower level.

Attacks are in test_sandbox_attacks.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat_lib import sandbox
from nanochat_lib.errors import UserError
from nanochat_lib.sandbox import confine, execute, levels, portable, processes, seccomp, view

HERE = sandbox.LEVELS[: sandbox.LEVELS.index(sandbox.level()) + 1]
each_level = pytest.mark.parametrize("use", HERE)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
PYTHON = [sys.executable, "-I", "-S", "-B", "-c"]
MIB = 2**20


@each_level
def test_prints(use: str) -> None:
    result = sandbox.run_code("print('héllo', input())", stdin="wörld\n", use=use)
    assert result.success and result.stdout == "héllo wörld\n" and result.stderr == "" and result.error is None
    assert (result.level, result.exit_code, result.timeout, result.memory_exceeded) == (use, 0, False, False)


@each_level
def test_error_is_the_last_line(use: str) -> None:
    result = sandbox.run_code("def f():\n    raise ValueError('a MemoryError, it says')\nf()", use=use)
    assert not result.success and result.exit_code == 1 and result.error == "ValueError: a MemoryError, it says"
    assert "line 2, in f" in result.stderr and "_guard" not in result.stderr and not result.memory_exceeded
    assert "SyntaxError" in sandbox.run_code("def", use=use).error
    assert sandbox.run_code("import sys; sys.exit(3)", use=use).error == "Execution failed"
    assert sandbox.run_code("import sys; sys.exit(0)", use=use).success
    assert not sandbox.run_code("exit()", use=use).success


@each_level
def test_endless_loop_is_killed(use: str) -> None:
    began = time.monotonic()
    result = sandbox.run_code("print('x', flush=True)\nwhile True: pass", timeout=0.6, use=use)
    assert time.monotonic() - began < 5 and 0.5 < result.seconds < 5
    assert result.timeout and not result.success and result.stdout == result.stderr == "" and "killed" in result.error
    kept = sandbox.run([*PYTHON, "import time; print('x', flush=True); time.sleep(60)"], timeout=1.0, use=use)
    assert kept.timeout and kept.stdout == "x\n"  # the general form keeps what there was


@each_level
def test_memory(use: str) -> None:
    result = sandbox.run_code("x = bytearray(1 << 30)", use=use)
    assert result.memory_exceeded and not result.success and result.exit_code == 1 and result.error == "MemoryError"
    watched = "x = [bytearray(b'x' * (1 << 20)) for _ in range(400)]"
    result = sandbox.run([*PYTHON, watched], memory_bytes=128 * MIB, timeout=20, use=use)
    assert result.memory_exceeded and not result.success and not result.timeout and "128 MiB" in result.error
    assert sandbox.run_code("x = bytearray(1 << 28)", memory_bytes=None, use=use).success


DANGEROUS = """
import os; os.system('true')
import os; os.kill(os.getpid(), 9)
import os; os.fork()
import shutil; shutil.rmtree('.')
import subprocess; subprocess.Popen(['true'])
import subprocess; subprocess.run(['true'])
import psutil
import resource
input()
"""


@each_level
def test_what_a_model_should_not_do_fails(use: str) -> None:
    lines = DANGEROUS.strip().splitlines()
    code = (
        f"for line in {lines}:\n try: exec(line); print('DONE', line)\n except Exception as error: print(repr(error))"
    )
    result = sandbox.run_code(code, use=use)
    assert result.success and len(result.stdout.splitlines()) == len(lines) and "DONE" not in result.stdout
    assert result.stdout.count("is not available in the sandbox") == 6
    alone = sandbox.run_code("import os; os.fork()", use=use)
    assert not alone.success and alone.error == "PermissionError: os.fork is not available in the sandbox"


@each_level
def test_files_stay_in_a_folder_that_goes_away(use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOCHAT_TEST_SECRET", "canary")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os; open('made', 'w').write('x'); print(*os.listdir('.')); print(dict(os.environ), os.getpid())"
    result = sandbox.run_code(code, use=use)
    shown = {Path(path).parts[2] for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/")}  # this project
    assert result.success and set(result.stdout.splitlines()[0].split()) - shown == {"made"}
    assert "canary" not in result.stdout
    assert result.stdout.split()[-1] != str(os.getpid())
    assert not Path("made").exists() and not list(tmp_path.iterdir())


TRICKY = '''a = "q'\\"\\\\ {x} %s \\n"
b = """{}{{}}\n\t$HOME `id` \\u00e9 é \U0001f40d"""
print(a, b, len(b), __name__)
import __main__, pickle, sys
class Thing: pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing and __main__.Thing is Thing
print(sorted(set(globals())), sys.argv)
assert not [name for name in dir(__main__) if "guard" in name.lower()]
try: _guard
except NameError: print("unseen")
'''


@each_level
def test_code_arrives_as_it_is_and_sees_no_guard(use: str) -> None:
    result = sandbox.run_code(TRICKY, use=use)
    assert result.success, result.stderr
    assert result.stdout.splitlines()[-1] == "unseen" and "$HOME `id` é é 🐍" in result.stdout
    assert sandbox.run_code("#" * 300_000 + "\nprint('long')", use=use).stdout == "long\n"


@each_level
def test_bytes_that_are_no_text(use: str) -> None:
    result = sandbox.run_code("import sys; sys.stdout.buffer.write(b'\\xff\\x00ok')", use=use)
    assert result.success and result.stdout == "\ufffd\x00ok" and result.stdout_bytes == b"\xff\x00ok"
    assert not sandbox.run_code("print('\\ud800')", use=use).success


@each_level
def test_numpy_and_threads_work(use: str) -> None:
    code = (
        "import threading, numpy as np\n"
        "def f(): print(np.linalg.solve(np.eye(50) * 2, np.ones(50)).sum())\n"
        "t = threading.Thread(target=f); t.start(); t.join()"
    )
    assert sandbox.run_code(code, timeout=20, use=use).stdout == "25.0\n"


@each_level
def test_output_is_cut_not_kept(use: str) -> None:
    code = "import sys\nfor _ in range(30): sys.stdout.write('y' * (1 << 20)); sys.stderr.write('z' * (1 << 20))"
    result = sandbox.run_code(code, output_bytes=1000, timeout=20, use=use)
    assert result.success and result.truncated and (len(result.stdout), len(result.stderr)) == (1000, 1000)
    assert not sandbox.run_code("print('y' * 999)", output_bytes=1000, use=use).truncated
    unread = sandbox.run([*PYTHON, "print(1)"], stdin=b"x" * 10**7, use=use)
    assert unread.success and unread.stdout == "1\n"


@each_level
def test_run_with_readable_and_scratch(use: str, tmp_path: Path) -> None:
    shared, scratch, hidden = tmp_path / "a b" / "shared", tmp_path / "scratch", tmp_path / "hidden"
    for folder in (shared, scratch, hidden):
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("VALUE = 7")
    (tmp_path / "link").symlink_to(shared)
    (scratch / "program.py").write_text(
        "import os, sys\n"
        f"for path in ({str(tmp_path / 'link')!r}, {str(shared)!r}):\n"
        "    sys.path[0] = path; import module; del sys.modules['module']\n"
        f"open('result', 'w').write(str(module.VALUE)); print(os.path.exists({str(hidden)!r}), os.environ['EXTRA'])\n"
    )
    argv = [sys.executable, "-I", str(scratch / "program.py")]
    result = sandbox.run(argv, scratch=scratch, readable=[tmp_path / "link"], env={"EXTRA": "yes"}, use=use)
    assert result.stdout == f"{use == 'limits'} yes\n", result.stderr
    assert (scratch / "result").read_text() == "7" and (shared / "module.py").read_text() == "VALUE = 7"


@pytest.mark.slow
@each_level
def test_jax_and_the_package_work_inside(use: str, tmp_path: Path) -> None:
    package = Path(sandbox.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "import jax, jax.numpy as jnp, nanochat_lib.calculator\n"
        "print(jax.jit(lambda x: (x @ x).sum())(jnp.ones((64, 64))))"
    )
    argv = [sys.executable, "-I", "-B", "-c", code]
    for proc in (True, False) if use != "limits" else (True,):
        result = execute.execute(
            argv, level=use, proc=proc, scratch=tmp_path, readable=[package], env={"JAX_PLATFORMS": "cpu"},
            timeout=120, memory_bytes=1024 * MIB, threads=512,
        )  # fmt: skip
        assert result.stdout == "262144.0\n", result.stderr


@each_level
def test_wrong_arguments_are_one_line(use: str, tmp_path: Path) -> None:
    for wrong, words in [
        ({"readable": [tmp_path / "none"]}, "no such file"), ({"readable": [Path("/")]}, "whole machine"),
        ({"scratch": tmp_path / "none"}, "make it first"), ({"timeout": 0}, "positive"), ({"processes": 0}, "positive"),
        ({"require": "docker"}, "use one of limits"), ({"use": "docker"}, "use one of limits"),
    ]:  # fmt: skip
        if use == "limits" and "readable" in wrong:
            continue
        with pytest.raises(UserError, match=words):
            sandbox.run([*PYTHON, ""], **{"use": use, **wrong})
    with pytest.raises(UserError, match="could not be started"):
        sandbox.run(["/bin/no-such-program"], use=use)


def test_many_at_once() -> None:
    def one(number: int) -> str:
        return sandbox.run_code(f"open('n', 'w').write('{number}'); print(open('n').read())").stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(24))) == [f"{number}\n" for number in range(24)]


@linux
@each_level
def test_dies_with_its_caller(use: str, tmp_path: Path) -> None:
    """kill -9 of the process that called: nothing goes on."""
    inner = "import time; open('began', 'w'); time.sleep(1.5); open('late', 'w')"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(sandbox.__file__).parents[2])!r})\n"
        "from pathlib import Path; from nanochat_lib import sandbox\n"
        f"sandbox.run([*{PYTHON!r}, {inner!r}], scratch=Path({str(tmp_path)!r}), use={use!r})"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not (tmp_path / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    time.sleep(2.0)
    assert (tmp_path / "began").exists() and not (tmp_path / "late").exists()


# --- systems that refuse something ------------------------------------------------------------------------------------

IN_NAMESPACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10000000 | 0x00020000): sys.exit(77)
for name, text in (("setgroups", "deny"), ("gid_map", f"0 {gid} 1"), ("uid_map", f"0 {uid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
libc.mount(None, b"/", None, 1 << 18 | 16384, None)
sys.path.insert(0, sys.argv[1])
from nanochat_lib import sandbox
"""


def in_namespace(code: str) -> str:
    """Runs code as root of a user namespace, where kernel settings can be changed for it alone."""
    root = str(Path(sandbox.__file__).parents[2])
    command = [sys.executable, "-B", "-c", IN_NAMESPACE + code, root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    return done.stdout


@linux
def test_where_namespaces_are_refused_it_says_so() -> None:
    out = in_namespace(
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "r = sandbox.run_code('print(1)'); print(r.level, r.stdout.strip(), r.notes)\n"
        "try: sandbox.run_code('', require='namespaces')\n"
        "except Exception as e: print(type(e).__name__, e)\n"
        "print(sandbox.describe())"
    )
    first, refusal, line = out.strip().splitlines()
    assert first == "limits 1 ()"
    assert refusal.startswith("UserError isolation namespaces is asked for, here works only limits")
    assert "install bubblewrap" in refusal and "namespaces: " in refusal
    assert line.startswith("limits (") and "not a security boundary" in line


@linux
def test_where_proc_cannot_be_mounted_it_does_without() -> None:
    if sandbox.level() == "limits":
        pytest.skip("no strong level here")
    out = in_namespace(
        "assert not libc.mount(b'none', b'/proc/tty', b'tmpfs', 0, None)\n"
        "from nanochat_lib.sandbox import levels\n"
        "for use in sandbox.LEVELS[1:sandbox.LEVELS.index(sandbox.level()) + 1]:\n"
        "    r = sandbox.run_code('import os; print(os.listdir(\"/proc\"))', use=use)\n"
        "    print(use, r.stdout.strip(), r.error)\n"
        "print(levels.proc_works())"
    )
    lines = out.strip().splitlines()
    assert len(lines) == len(HERE) and lines[-1] == "False"  # every strong level of this machine
    for line in lines[:-1]:
        assert line.split(" ", 1)[1] in ("['cpuinfo', 'meminfo'] None", "['meminfo', 'cpuinfo'] None")


def test_limits_that_the_system_refuses_become_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")

    def refuse(number: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    spec = {"files_bytes": 1, "processes": 1, "threads": 1, "cpu_seconds": 1.0, "memory_bytes": 1, "big_virtual": False}
    refused = confine.apply_limits(spec)
    assert any("no limit AS here" in line for line in refused) and any("DATA" in line for line in refused)


def test_another_system_gets_limits_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(levels, "_found", {})
    with pytest.warns(UserWarning, match="no isolation on this system"):
        assert sandbox.level() == "limits"
    assert sandbox.reasons()["bubblewrap"] == "needs Linux"
    result = sandbox.run_code("print(1)")
    assert result.success and result.level == "limits"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sandbox.run_code("x = bytearray(1 << 30)").memory_exceeded  # said once


def test_where_there_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "POSIX", False)
    result = sandbox.run_code("print(input())", stdin="hello", use="limits")
    assert result.success and result.stdout == "hello\n" and result.notes == (portable.NOTE,)
    assert sandbox.run_code("while True: pass", timeout=0.7, use="limits").timeout
    assert sandbox.run_code("print('y' * 5000)", output_bytes=1000, use="limits").truncated
    with pytest.raises(UserError, match="could not be started"):
        sandbox.run(["/bin/no-such-program"], use="limits")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_processes_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; x = bytearray(b'x') * (50 << 20); print('all of it', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()  # from now on it does not grow
        exact = processes.memory([child.pid], 0)
        assert exact > 50 * MIB
        assert child.pid in processes.family(os.getpid())
        monkeypatch.setattr(processes, "PROC", False)
        assert child.pid in processes.family(os.getpid()) and child.pid in processes.children(os.getpid())
        assert abs(processes.memory([child.pid], 0) - exact) < 5 * MIB
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("single", [True, False])
def test_the_call_filter_decides_as_written(machine: str, single: bool) -> None:
    """The filter's program, run by a small interpreter of its language on calls that it must refuse or let through."""
    column = 0 if machine == "x86_64" else 1
    program = seccomp.program(machine, single)

    def decide(number: int, first: int = 0, second: int = 0, arch: int = seccomp.AUDIT_ARCH[machine]) -> int:
        words = {0: number, 4: arch, 16: first, 24: second}
        place, value = 0, 0
        while True:
            code, if_true, if_false, operand = seccomp.struct.unpack_from("HBBI", program, place * 8)
            place += 1
            if code == seccomp.LOAD:
                value = words[operand]
            elif code == seccomp.RETURN:
                return operand
            else:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                place += if_true if holds else if_false

    refusals = {name: decide(numbers[column]) for name, numbers in seccomp.REFUSED.items() if numbers[column]}
    assert set(refusals.values()) == {0x50001}  # EPERM
    assert decide(seccomp.CLONE3[column]) == 0x50026  # ENOSYS
    clone, allow = seccomp.CLONE[column], seccomp.ALLOW
    assert decide(clone, 0x10000000 | 0x10000) == 0x50001 and decide(clone, 0x3D0F00) == allow  # a namespace; a thread
    assert decide(clone, 17) == (0x5000B if single else allow)  # fork: EAGAIN
    for number, allowed in ((seccomp.SOCKET[column], {2, 10}), (seccomp.SOCKETPAIR[column], {1})):
        assert {family for family in range(46) if decide(number, family) == allow} == allowed
    ioctl = seccomp.IOCTL[column]
    assert decide(ioctl, 0, 0x5412) == decide(ioctl, 0, 0x541C) == 0x50001 and decide(ioctl, 0, 0x5401) == allow
    assert decide(0, arch=0x40000003) == seccomp.KILL  # the 32-bit entry
    for number in (0, 1, 9, 10, 11, 12, 60, 202, 231):  # read, write, memory, futex, exit, whatever these are on ARM
        assert decide(number) == allow or number in {n[column] for n in seccomp.REFUSED.values()}


def test_the_view_hides_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown, _ = view.view([tmp_path])
    places = {place for _, place in shown}
    home = os.path.expanduser("~")
    assert str(tmp_path) in places
    assert not places & {"/", "/home", "/root", "/etc", "/tmp", "/usr", "/var", "/proc", "/sys", home, os.getcwd()}
    assert all(Path(source).exists() for source, _ in shown)
    parents = [place for place in places if any(str(above) in places for above in Path(place).parents)]
    for place in parents:  # a tree inside a shown tree is there only when it comes from elsewhere
        assert os.path.realpath(place) in dict(shown)


def test_remove_tree(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "kept").write_text("x")
    (folder / "link").symlink_to(tmp_path)
    closed = folder / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner" / "file").write_text("x")
    closed.chmod(0)
    back = os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(400):  # deeper than a path can be long, and than Python recurses
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
    finally:
        os.chdir(back)
    sandbox.remove_tree(folder)
    assert not folder.exists() and (tmp_path / "kept").read_text() == "x"
