"""Programs that XLA has compiled, kept on disk: the next start of a run, or of a chapter, does not compile them again.

JAX looks a program up by its text, its options, the versions and the kind of device, so a stale one is never used. The
folder's name has the processor's features too: a home folder may be shared by machines that differ in them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from pathlib import Path

from nanochat_lib.home import base_dir

MOST_BYTES = 2 << 30  # the programs used longest ago make room
OFF = "NANOCHAT_COMPILE_CACHE"  # 0: compile every time
OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # a chapter compiles hundreds of small ones
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_compilation_cache_max_size": MOST_BYTES,
}


def folder() -> Path:
    """Where this machine's programs are kept."""
    return base_dir() / "compiled" / hashlib.sha256(processor().encode()).hexdigest()[:12]


def processor() -> str:
    """What the processor can do, as text, which compiled programs depend on; on systems that do not tell, its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def keep_compiled() -> Path | None:
    """Makes JAX keep what it compiles and returns the folder; None when it stays as it was.

    It stays as it was where the user has set JAX's own cache, where NANOCHAT_COMPILE_CACHE is 0, and where the folder
    cannot be written. May be called before JAX is imported, and again.
    """
    env = os.environ
    if env.get(OFF) == "0" or "JAX_COMPILATION_CACHE_DIR" in env or env.get("JAX_ENABLE_COMPILATION_CACHE") == "0":
        return None
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe = place / f"probe-{uuid.uuid4().hex[:8]}"
        probe.touch()
        probe.unlink()
    except OSError:
        return None
    import jax

    if jax.config.jax_compilation_cache_dir not in (None, str(place)):  # set by the program that uses this library
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    for name, value in OPTIONS.items():
        jax.config.update(name, value)
    return place
