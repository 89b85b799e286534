"""What machine is this, how fast could it be, and which dtype does it like."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import time
from dataclasses import asdict, dataclass, field

from nanochat_lib.errors import UserError

GIB = 2**30
DTYPES = ("auto", "float32", "bfloat16")  # of activations and matrix products


@dataclass(frozen=True)
class Chip:
    """What one device of a kind can do. Figures are the vendor's dense ones, per JAX device."""

    name: str
    kind: str  # gpu, tpu, cpu
    match: tuple[str, ...]  # alternatives; the words of one must all occur in the lower-cased device name
    peak: dict[str, float]  # FLOP/s (int8: operations a second) by dtype
    hbm_bytes: int | None = None  # the smallest version that is sold
    bandwidth: float | None = None  # bytes/s
    matrix_unit: int | None = None  # side of a TPU's systolic array; GPUs work in tiles of 16 and have None
    usd_hour: float | None = None  # one chip on demand, 2026; None where no price was found
    usd_hour_spot: float | None = None  # one chip that may be taken away at any time; None where no price was found
    clock_hz: float | None = None  # of a TPU's matrix units, to read a compiler's cycles as seconds
    measured: bool = False  # the peak was measured on this machine, not published


def _gpu(
    name: str, match: tuple[str, ...], bf16: float, bandwidth: float | None, gib: int | None = None,
    usd_hour: float | None = None, float8: float | None = None,
) -> Chip:  # fmt: skip
    peak = {"bfloat16": bf16} | ({"float8": float8} if float8 else {})
    return Chip(name, "gpu", match, peak, gib and gib * GIB, bandwidth, None, usd_hour)


def _tpu(
    name: str, match: tuple[str, ...], bf16: float, bandwidth: float, gib: int, matrix_unit: int,
    usd_hour: float | None = None, usd_hour_spot: float | None = None, int8: float | None = None,
    clock_hz: float | None = None,
) -> Chip:  # fmt: skip
    peak = {"bfloat16": bf16} | ({"int8": int8} if int8 else {})
    return Chip(name, "tpu", match, peak, gib * GIB, bandwidth, matrix_unit, usd_hour, usd_hour_spot, clock_hz)


# The first match wins. GPUs and their order as in nanochat. TPU generations whose chips JAX shows as two devices
# (v2, v3, 7x) are left out: a peak per chip would give half the true MFU. Prices of v6e: Google Cloud, us-central1,
# 4 June 2026. Clocks of v5e and v5p: "How to Scale Your Model" (Austin et al., 2025), part 2; v6e's is the one at which
# the compiler's cost model counts. Each gives the published peak with a whole number of matrix units.
CHIPS = (
    _gpu("gb200", ("gb200", "grace blackwell"), 2.5e15, 8.0e12, 186, float8=5.0e15),
    _gpu("b200", ("b200",), 2.25e15, 8.0e12, 180, float8=4.5e15),
    _gpu("b100", ("b100",), 1.8e15, 8.0e12, 180, float8=3.5e15),
    _gpu("h200-nvl", ("h200 nvl", "h200 pcie"), 836e12, 4.8e12, 141, float8=1671e12),
    _gpu("h200", ("h200",), 989e12, 4.8e12, 141, float8=1979e12),
    _gpu("h100-nvl", ("h100 nvl",), 835e12, 3.9e12, 94, 3.00, 1671e12),
    _gpu("h100-pcie", ("h100 pcie",), 756e12, 2.0e12, 80, 3.00, 1513e12),
    _gpu("h100", ("h100",), 989e12, 3.35e12, 80, 3.00, 1979e12),
    _gpu("h800-nvl", ("h800 nvl",), 989e12, 3.35e12, 94),
    _gpu("h800", ("h800",), 756e12, 2.0e12, 80),
    _gpu("a100", ("a100", "a800"), 312e12, 2.0e12, 40, 1.79),
    _gpu("a40", ("a40",), 149.7e12, 696e9, 48),
    _gpu("a30", ("a30",), 165e12, 933e9, 24),
    _gpu("l40s", ("l40s", "l40-s", "l40 s"), 362e12, 864e9, 48, float8=733e12),
    _gpu("l4", ("l4",), 121e12, 300e9, 24, float8=242e12),
    _gpu("mi355", ("mi355",), 2.5e15, 8.0e12, 288),
    _gpu("mi325", ("mi325",), 1.3074e15, 6.0e12, 256),
    _gpu("mi300x", ("mi300x",), 1.3074e15, 5.3e12, 192),
    _gpu("mi300a", ("mi300a",), 980.6e12, 5.3e12, 128),
    _gpu("mi250x", ("mi250x",), 383e12, 3.28e12, 128),
    _gpu("mi250", ("mi250",), 362.1e12, 3.28e12, 128),
    _gpu("5090", ("5090",), 209.5e12, 1.79e12, 32),
    _gpu("4090", ("4090",), 165.2e12, 1.01e12, 24),
    _gpu("3090", ("3090",), 71e12, 936e9, 24),
    _tpu("v6e", ("tpu v6e", "tpu v6 lite"), 918e12, 1.64e12, 32, 256, 2.70, 0.540137, int8=1836e12, clock_hz=1.75e9),
    _tpu("v5e", ("tpu v5e", "tpu v5 lite"), 197e12, 819e9, 16, 128, int8=394e12, clock_hz=1.5e9),
    _tpu("v5p", ("tpu v5p", "tpu v5"), 459e12, 2.765e12, 95, 128, int8=918e12, clock_hz=1.75e9),
    _tpu("v4", ("tpu v4",), 275e12, 1.228e12, 32, 128),
)
PRICE_DATE = "June 2026"  # of the prices of TPUs


@dataclass(frozen=True)
class Topology:
    """A TPU slice: its name for ahead-of-time compilation, and how many virtual machines it is."""

    name: str
    hosts: int  # each runs one process of the program


# (chip, devices): 8 chips of v6e and v5e are one machine, larger slices are machines of 4; v5p's have 4 always.
TOPOLOGIES = {
    (chip, devices): Topology(f"{chip}:{shape}", 1 if devices == 8 and chip != "v5p" else devices // 4)
    for chip, shapes in {
        "v6e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
        "v5e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
        "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"},
    }.items()
    for devices, shape in shapes.items()
}


def find_chip(device_name: str) -> Chip | None:
    """The table's row for a device name ("NVIDIA H100 80GB HBM3", "TPU v5 lite"); None when it is not known."""
    name = device_name.lower()
    if "laptop" in name:  # the same number on a much smaller chip
        return None

    def has(word: str) -> bool:
        # Not followed by a digit: "a40" is not in "RTX A4000", "l4" not in "L40".
        return re.search(rf"(?<![a-z0-9]){re.escape(word)}(?!\d)", name) is not None

    for chip in CHIPS:
        for alternative in chip.match:
            # "h200 nvl": both words, anywhere. A TPU's or "grace blackwell"'s words stand together.
            words = alternative.split() if chip.kind == "gpu" and "blackwell" not in alternative else [alternative]
            if all(has(word) for word in words):
                return chip
    return None


def mfu(
    flops_per_token: float, tokens_per_s: float, devices: int, chip: Chip | None, dtype: str = "bfloat16"
) -> float | None:
    """Model FLOP utilisation as a fraction: flops_per_token · tokens/s / (devices · peak of one device).

    `flops_per_token` is sizing.flops_per_token, which counts the model's structure and so is the same under fp8.
    `tokens_per_s` counts all tokens of all devices and micro-batches. The peak is the dense bfloat16 one, as in
    nanochat, under fp8 too, so that figures stay comparable; `dtype="float8"` asks for the share of the fp8 peak
    instead. A CPU's is its measured float32 peak, the whole machine's, whatever number of devices JAX makes of it.
    None when the chip is unknown or has no peak for `dtype`, and when the result is above 1: then peak and
    device do not belong together, and no figure is better than a wrong one.
    """
    if chip is None or devices < 1 or not tokens_per_s > 0:
        return None
    if chip.kind == "cpu":
        devices, dtype = 1, "float32" if dtype == "bfloat16" else dtype
    peak = chip.peak.get(dtype)
    if peak is None:
        return None
    share = flops_per_token * tokens_per_s / (devices * peak)
    return share if share <= 1 else None


@functools.cache
def cpu_peak(size: int = 768, seconds: float = 0.25) -> float:
    """Measured float32 FLOP/s of this machine's fastest square matrix product in JAX; once per process, under 0.5 s."""
    import jax
    import jax.numpy as jnp

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        x = jnp.full((size, size), 0.5, jnp.float32)
        product = jax.jit(jnp.matmul)
        product(x, x).block_until_ready()
        best, end = float("inf"), time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            product(x, x).block_until_ready()
            best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def cpu_chip() -> Chip:
    """This machine's CPU as a chip whose peak is measured, so that MFU means "share of its own matmul speed"."""
    return Chip("cpu", "cpu", (), {"float32": cpu_peak()}, measured=True)


def this_chip() -> Chip | None:
    """The kind of device JAX computes on here; a CPU's peak is measured, an unknown accelerator is None."""
    import jax

    device = jax.local_devices()[0]
    return cpu_chip() if device.platform == "cpu" else find_chip(device.device_kind)


def compute_dtype(setting: str, backend: str) -> str:
    """`auto` is float32 on a CPU, which computes bfloat16 slowly, and bfloat16 on accelerators."""
    if setting not in DTYPES:
        raise UserError(f"compute.dtype {setting!r} is unknown, use auto, float32 or bfloat16")
    if setting != "auto":
        return setting
    return "float32" if backend == "cpu" else "bfloat16"


@dataclass(frozen=True)
class Machine:
    """One computer and what JAX sees of it. Bytes throughout; None where it cannot be told."""

    system: str
    python: str
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int | None  # that this process may use
    memory_free_bytes: int | None
    disk_free_bytes: int
    backend: str = "cpu"
    devices: int = 1
    device_kind: str = "cpu"
    device_memory_bytes: int | None = None
    usd_hour: float | None = None  # what the whole machine is rented for; None on an own machine
    peak: dict[str, float] = field(default_factory=dict)  # FLOP/s of one accelerator by dtype

    def to_dict(self) -> dict:
        return asdict(self)

    def line(self) -> str:
        """The machine in one line."""
        memory = f", {self.memory_bytes / GIB:.0f} GiB memory" if self.memory_bytes else ""
        devices = "" if self.backend == "cpu" else f", {self.devices} × {self.device_kind}"
        return f"{self.system}, {self.cpu}, {self.cores} cores{memory}{devices}"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def cpu_name() -> str:
    """The processor's model name, else its architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use: its affinity and its container's quota, whichever is smaller."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory() -> tuple[int | None, int | None]:
    """(total, free) bytes of memory this process may use; a container's limit counts."""
    try:
        import psutil
    except ImportError:
        return None, None
    found = psutil.virtual_memory()
    total, free = found.total, found.available
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        used = _read("/sys/fs/cgroup/memory.current").strip()
        free = min(free, total - int(used) if used.isdigit() else total)
    return total, free


def device_peak_gb() -> float | None:
    """The most memory that one device here has held, in GB (10⁹ bytes); None where JAX does not say (CPU)."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max(peaks) / 1e9 if all(peaks) else None


def machine(path: str = ".", accelerators: bool = True) -> Machine:
    """This machine, with the disk that holds `path`. `accelerators=False` leaves JAX alone."""
    total, free = memory()
    system = f"{platform.system()} {platform.machine()}"
    host = Machine(
        system, platform.python_version(), cpu_name(), cores(), total, free, shutil.disk_usage(path).free,
    )  # fmt: skip
    if not accelerators:
        return host
    import jax

    device, count = jax.local_devices()[0], jax.device_count()
    if device.platform == "cpu":
        return host
    chip = find_chip(device.device_kind)
    stats = device.memory_stats() or {}
    return Machine(
        **(asdict(host) | {
            "backend": device.platform,
            "devices": count,
            "device_kind": device.device_kind,
            "device_memory_bytes": stats.get("bytes_limit") or (chip and chip.hbm_bytes),
            "peak": chip.peak if chip else {},
        })
    )  # fmt: skip
