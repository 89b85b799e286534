"""XLA told to compile quickly, for programs that run once or twice: half the time, and slower code.

Fast mode of the course is nearly all compilation: a chapter runs some 200 programs, most of them a single operation.
"""

from __future__ import annotations

import os
from importlib.metadata import version

LEVEL = "--xla_backend_optimization_level=0"  # LLVM's
OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false"  # the ones before took a third less time; gone since JAX 0.11


def compile_quickly() -> list[str]:
    """Adds to XLA_FLAGS what compiles quickly on a CPU, and returns it. Must come before the first computation.

    Nothing where JAX_PLATFORMS is not cpu; an option that the user has set stays. XLA ends a process over an option
    that it does not know, so those of one version are for that version.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return []
    before = os.environ.get("XLA_FLAGS", "").split()
    taken = {flag.partition("=")[0] for flag in before}
    wanted = [LEVEL, OLD_EMITTERS] if version("jax").startswith("0.10.") else [LEVEL]
    added = [flag for flag in wanted if flag.partition("=")[0] not in taken]
    os.environ["XLA_FLAGS"] = " ".join(before + added)
    return added
