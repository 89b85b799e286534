"""What every test starts from: the CPU, no display, no leftovers of an outer run."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the tests' tolerances are a CPU's; set it to try them elsewhere
os.environ.setdefault("MPLBACKEND", "Agg")
# Tests compile thousands of programs and run each for milliseconds: what LLVM optimises would not pay for itself.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("NANOCHAT_COMPILE_CACHE", "0")  # nothing of an earlier run helps, nothing is left behind
os.environ.pop("NANOCHAT_PROGRESS_FILE", None)
os.environ["NANOCHAT_SHUTDOWN"] = "false"  # no test, nor a process that one starts, switches this machine off

from hypothesis import HealthCheck, settings

# A busy machine is not a failure.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
