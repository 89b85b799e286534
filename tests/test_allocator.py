"""Memory that is kept: where the setting applies, and that large blocks then stay in the process."""

import os
import platform
import subprocess
import sys

import pytest

from nanochat_lib import allocator
from nanochat_lib.allocator import TUNABLES, applies, environment

GLIBC = platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
# 64 MiB taken, written and given back, by a thread: page faults of the ten times after the first two.
FAULTS = """
import ctypes, resource, threading
{before}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for turn in range(12):
        if turn == 2:
            start = faults()
        block = libc.malloc(2**26)
        ctypes.memset(block, 1, 2**26)
        libc.free(block)
    print(faults() - start)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.fixture
def linux_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where the setting applies."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(allocator, "tpu_chips", lambda env: False)
    monkeypatch.setattr(allocator, "_gpu", lambda: False)
    return monkeypatch


def test_applies_where_jax_computes_on_the_cpu(linux_cpu: pytest.MonkeyPatch) -> None:
    assert applies({}) and applies({"JAX_PLATFORMS": "cpu"})
    assert not applies({"JAX_PLATFORMS": "cuda,cpu"})
    for accelerator in ("tpu_chips", "_gpu"):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(allocator, accelerator, lambda *env: True)
            assert not applies({}) and applies({"JAX_PLATFORMS": "cpu"})


def test_leaves_other_systems_and_the_users_own_settings_alone(linux_cpu: pytest.MonkeyPatch) -> None:
    for env in ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {"MALLOC_ARENA_MAX": "4"}):
        assert not applies(env) and environment(env) == {}
    assert environment({}) == {"GLIBC_TUNABLES": TUNABLES}
    kept = environment({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=2048"})
    assert kept == {"GLIBC_TUNABLES": f"glibc.rtld.optional_static_tls=2048:{TUNABLES}"}
    for name, value in (("system", "Darwin"), ("libc_ver", ("", ""))):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(platform, name, lambda value=value: value)
            assert not applies({})


def faults(before: str, **env: str) -> int:
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and "MALLOC_" not in name}
    program = [sys.executable, "-c", FAULTS.format(before=before)]
    clean |= {"JAX_PLATFORMS": "cpu", **env}
    return int(subprocess.run(program, capture_output=True, text=True, check=True, env=clean).stdout)


@pytest.mark.skipif(not GLIBC, reason="glibc's malloc only")
def test_a_large_block_is_mapped_once() -> None:
    pages = 10 * 2**26 // os.sysconf("SC_PAGE_SIZE")
    assert faults("") > pages / 40  # huge pages, where all memory gets them, are rarer than this
    assert faults("from nanochat_lib.allocator import keep_memory; assert keep_memory()") < 100
    assert faults("", GLIBC_TUNABLES=TUNABLES) < 100
