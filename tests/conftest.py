"""What every test starts from: the CPU, no display, no leftovers of an outer run."""

import os
from pathlib import Path

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

# The dearest files, in seconds' order: started first, they leave no process without work at the end.
DEAREST = (
    "course/test_chapters", "end_to_end/test_whole_course", "test_train_step", "end_to_end/test_cpu_smoke",
    "end_to_end/test_signals", "multi_process/test_two_processes", "test_mesh_step", "test_guards", "test_attention",
    "test_rl", "test_engine", "test_losses", "test_optim", "test_batching", "course/test_site",
    "end_to_end/test_crashes", "test_kept_ids", "test_kv_cache", "test_preflight", "test_gpt", "serve/test_serve_model",
    "test_saver", "test_twin", "test_import_order",
)  # fmt: skip


def pytest_collection_modifyitems(items: list) -> None:
    """The dearest files first (scripts/test.sh tells xdist to keep this order)."""
    places = {name: place for place, name in enumerate(DEAREST)}
    here = Path(__file__).parent

    def place(item) -> int:
        return places.get(item.path.relative_to(here).with_suffix("").as_posix(), len(DEAREST))

    items.sort(key=place)
