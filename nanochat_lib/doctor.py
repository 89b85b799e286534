"""`nanochat doctor`: what this machine is, which presets fit on it, and the command that mends what is wrong."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from nanochat_lib import hardware, sandbox
from nanochat_lib.hardware import CHIPS, GIB, PRICE_DATE, TOPOLOGIES, Machine
from nanochat_lib.presets import PRESETS, RunConfig, Target, flatten, preset, to_dict
from nanochat_lib.schedules import transferred
from nanochat_lib.sizing import count_params, flops_per_token

NEEDED = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pyarrow", "huggingface_hub", "rustbpe", "tiktoken",
    "torch", "matplotlib", "papermill", "ipykernel", "jupyterlab", "jupytext", "ipywidgets",
)  # fmt: skip
PLUGINS = (
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu", "libtpu-nightly",
)  # fmt: skip
REBUILD = "bash scripts/setup.sh --rebuild"
DISK_NEEDED = 2 * GIB  # a CPU run writes far less; checkpoints of large presets need more
HOST_BASE = 3 * GIB // 2  # Python, JAX, its compiler, the corpus
LIBTPU_LOCK = "/tmp/libtpu_lockfile"
PCI = "/sys/bus/pci/devices/*"
GOOGLE = "0x1ae0"
TPU_DEVICES = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")  # v2-3, v4, v5p, v5e, v6e, 7x
TPU_NODES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")  # what the system offers of the chips
PRODUCT = "/sys/class/dmi/id/product_name"
NVIDIA_DRIVER = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Problem:
    """What is wrong and the command that mends it. `fatal`: nothing can run before it is mended."""

    what: str
    fix: str
    fatal: bool = False


def versions() -> dict[str, str | None]:
    """Installed version of every package a run needs (None: missing) and of the accelerator plugins that are there."""
    found: dict[str, str | None] = {}
    for name in NEEDED + PLUGINS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in NEEDED:
                found[name] = None
    return found


def _wanted_libtpu() -> str | None:
    """The libtpu versions this JAX was built for, as its own metadata says ("0.0.42.*")."""
    try:
        lines = metadata.requires("jax") or []
    except metadata.PackageNotFoundError:
        return None
    found = [re.match(r"libtpu==([^;]+);.*tpu", line) for line in lines]
    return next((match.group(1).strip() for match in found if match), None)


def package_problems(found: dict[str, str | None], wanted_libtpu: str | None) -> list[Problem]:
    """Missing packages, and parts of JAX that are not of one version: a mix crashes far from its cause."""
    problems = []
    if missing := [name for name in NEEDED if found.get(name) is None]:
        problems.append(Problem(f"not installed: {', '.join(missing)}", REBUILD, fatal=True))
    jax = found.get("jax")
    for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"):
        if jax and found.get(name) and found[name].split("+")[0] != jax:
            what = f"{name} {found[name]} beside jax {jax}: they must be of one version"
            problems.append(Problem(what, REBUILD, fatal=True))
    if "jax-cuda12-plugin" in found and "jax-cuda13-plugin" in found:
        problems.append(Problem("the CUDA 12 and the CUDA 13 plugin are both installed", REBUILD, fatal=True))
    if "libtpu" in found and "libtpu-nightly" in found:
        problems.append(Problem("libtpu and libtpu-nightly are both installed", REBUILD, fatal=True))
    elif wanted_libtpu and found.get("libtpu"):
        if not (found["libtpu"] + ".").startswith(wanted_libtpu.removesuffix(".*") + "."):
            what = f"libtpu {found['libtpu']} beside jax {jax}, which wants {wanted_libtpu}"
            problems.append(Problem(what, REBUILD, fatal=True))
    return problems


def nvidia_driver() -> int | None:
    """Major version of the loaded NVIDIA driver; None without one, 0 when it does not say."""
    if not os.path.exists(NVIDIA_DRIVER):
        return 0 if shutil.which("nvidia-smi") else None
    with open(NVIDIA_DRIVER, encoding="utf-8", errors="replace") as file:
        found = re.search(r"Kernel Module[^\n]*?\s(\d+)\.\d+", file.read())
    return int(found.group(1)) if found else 0


def tpu_chips() -> int:
    """TPU chips on this machine's PCI bus, whether JAX sees them or not."""

    def read(folder: str, name: str) -> str:
        try:
            return Path(folder, name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    return sum(read(d, "vendor") == GOOGLE and read(d, "device") in TPU_DEVICES for d in glob.glob(PCI))


def accelerator_problems(machine: Machine, found: dict[str, str | None]) -> list[Problem]:
    """An accelerator that is there while JAX computes on the CPU, with the way out."""
    if machine.backend != "cpu":
        return []
    driver, chips = nvidia_driver(), tpu_chips()
    if driver is None and not chips:
        return _lost_tpu(found)
    what = "a TPU" if chips else "an NVIDIA GPU"
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"tpu", "cuda", "gpu"} & set(platforms.split(",")):
        return [Problem(f"{what} is there, but JAX_PLATFORMS={platforms} keeps JAX off it", "unset JAX_PLATFORMS")]
    if chips and "libtpu" not in found:
        return [Problem(f"{what} is there, but JAX computes on the CPU", "NANOCHAT_EXTRAS=tpu bash scripts/setup.sh")]
    if chips and not any(glob.glob(nodes) for nodes in TPU_NODES):
        what = f"{chips} TPU chips are on the bus, but the system offers none of them ({', '.join(TPU_NODES)})"
        return [Problem(what, "sudo reboot; if that does not help delete the machine and make a new one")]
    if chips:
        from nanochat_lib.distributed import tpu_holder

        fix = f"end the other program that uses it, then: sudo rm -f {LIBTPU_LOCK}"
        held = f"{LIBTPU_LOCK} says it is in use" if os.path.exists(LIBTPU_LOCK) else "another program may hold it"
        held = tpu_holder(lock=LIBTPU_LOCK).removeprefix(": ") or held
        return [Problem(f"{what} is there, but JAX computes on the CPU ({held})", fix)]
    if not any(name.startswith("jax-cuda") for name in found):
        extra = "cuda13" if driver >= 580 else "cuda12"
        fix = f"NANOCHAT_EXTRAS={extra} bash scripts/setup.sh"
        return [Problem(f"{what} is there, but JAX computes on the CPU", fix)]
    return [Problem(f"{what} and JAX's CUDA plugin are there, but JAX computes on the CPU", "nvidia-smi")]


def _lost_tpu(found: dict[str, str | None]) -> list[Problem]:
    """A machine of Google's that was set up for a TPU and has none: stopped and started, or moved by maintenance."""
    try:
        product = Path(PRODUCT).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return []
    if not product.startswith("Google") or "libtpu" not in found:
        return []
    what = f"libtpu is installed on this machine ({product}), but it has no TPU chip: was it stopped and started again?"
    fix = (
        "sudo reboot; else from outside: gcloud compute tpus tpu-vm describe NAME --zone=ZONE (state and health), "
        "delete it, make a new one"
    )
    return [Problem(what, fix)]


def estimate_bytes(config: RunConfig) -> int:
    """Rough peak memory of one device in training (of the process, on a CPU), without recomputation.

    State: 16 bytes a parameter (float32 weight, gradient, two moments), split over `compute.fsdp` devices. Activations:
    about 20 vectors of width C that each token and layer keep for the backward pass. Logits and their gradient in
    float32 beside the compute dtype's.
    """
    gpt, cpu = config.gpt_config(), config.target.kind == "cpu"
    width = 4 if cpu or config.compute.dtype == "float32" else 2
    tokens = config.pretrain.device_rows * gpt.sequence_len
    state = 16 * count_params(gpt)["total"] // config.compute.fsdp
    activations = tokens * gpt.n_layer * gpt.n_embd * 20 * width
    logits = tokens * gpt.padded_vocab_size * (4 + 4 + width)
    scores = 2 * 4 * tokens * gpt.n_head * gpt.sequence_len if cpu else 0  # kept per layer's backward, one at a time
    return state + activations + logits + scores + (HOST_BASE if cpu else 0)


def misfit(config: RunConfig, machine: Machine) -> str | None:
    """Why the preset does not fit on this machine; None when it does."""
    need, target = estimate_bytes(config), config.target
    if target.kind == "cpu":
        have = machine.memory_free_bytes
        return None if have is None or have >= need else f"{have / GIB:.1f} GiB of memory are free"
    if machine.backend != target.kind:
        return f"no {target.kind.upper()} here"
    if machine.devices < target.devices:
        return f"{machine.devices} of {target.devices} devices here"
    have = machine.device_memory_bytes
    return None if have is None or have >= need else f"a device has {have / GIB:.0f} GiB"


def diagnose(default: str, path: str = ".") -> dict:
    """Everything `nanochat doctor` prints, as plain data; `ok` when the preset `default` can run."""
    found = versions()
    problems = package_problems(found, _wanted_libtpu())
    try:
        machine = hardware.machine(path)
    except Exception as error:  # whatever a broken installation or a busy accelerator raises
        machine = hardware.machine(path, accelerators=False)
        first = (str(error).splitlines() or [type(error).__name__])[0]
        problems.append(Problem(f"JAX does not start: {first}", REBUILD, fatal=True))
    problems += accelerator_problems(machine, found)
    if machine.disk_free_bytes < DISK_NEEDED:
        what = f"{machine.disk_free_bytes / GIB:.1f} GiB of disk are free, a run wants {DISK_NEEDED / GIB:.0f}"
        problems.append(Problem(what, "free some space, or use --run-dir on another disk", fatal=True))
    fits = {}
    for name, config in PRESETS.items():
        reason = misfit(config, machine)
        fits[name] = {"fits": reason is None, "reason": reason, "estimated_bytes": estimate_bytes(config)}
    if not fits[default]["fits"]:
        what = f"the preset {default} does not fit: {fits[default]['reason']}"
        problems.append(Problem(what, "close other programs, or: bash scripts/capstone.sh cpu-smoke", fatal=True))
    return {
        "ok": not any(problem.fatal for problem in problems),
        "machine": machine.to_dict(),
        "sandbox": sandbox.describe(),
        "versions": found,
        "presets": fits,
        "problems": [{"what": p.what, "fix": p.fix} for p in problems],
    }


def print_diagnosis(default: str, as_json: bool = False) -> int:
    """Prints the diagnosis; 0 when the preset `default` can run, else 1."""
    result = diagnose(default)
    if as_json:
        print(json.dumps(result, indent=2))
        return 0 if result["ok"] else 1
    host = result["machine"]
    memory = "unknown"
    if host["memory_bytes"]:
        memory = f"{host['memory_free_bytes'] / GIB:.1f} GiB free of {host['memory_bytes'] / GIB:.1f}"
    print(f"machine   {host['system']}, Python {host['python']}")
    print(f"cpu       {host['cpu']}, {host['cores']} cores")
    print(f"memory    {memory}")
    print(f"disk      {host['disk_free_bytes'] / GIB:.1f} GiB free")
    print(f"devices   {host['devices']} × {host['device_kind']} ({host['backend']})")
    print(f"sandbox   {result['sandbox']}")
    print("packages  " + ", ".join(f"{name} {version or 'MISSING'}" for name, version in result["versions"].items()))
    print("\npreset             fits  estimated memory")
    for name, fit in result["presets"].items():
        verdict = "yes" if fit["fits"] else "no "
        print(f"{name:18} {verdict:4} {fit['estimated_bytes'] / GIB:8.1f} GiB     {fit['reason'] or ''}".rstrip())
    for problem in result["problems"]:
        print(f"\nproblem: {problem['what']}\n    fix: {problem['fix']}")
    print(f"\nready: bash scripts/capstone.sh {default}" if result["ok"] else "\nnot ready")
    return 0 if result["ok"] else 1


def print_presets(name: str | None = None, as_json: bool = False) -> None:
    """All presets as a table, or every setting of one (the names for `-s name=value`) and what follows from it."""
    if name is None:
        if as_json:
            print(json.dumps({key: to_dict(config) for key, config in PRESETS.items()}, indent=2))
            return
        for key, config in PRESETS.items():
            total = count_params(config.gpt_config())["total"]
            size = f"{total / 1e9:.2f}B" if total >= 1e9 else f"{total / 1e6:.1f}M"
            print(f"{key:18} {size:>7} parameters  {estimate_bytes(config) / GIB:6.1f} GiB  {config.about}")
        return
    config = preset(name)
    if as_json:
        print(json.dumps(to_dict(config), indent=2))
        return
    for key, value in flatten(config).items():
        print(f"{key} = {value}")
    print("\n" + "\n".join(derived(config)))


def derived(config: RunConfig) -> list[str]:
    """What follows from a preset's settings, a line each: sizes, horizon, learning rates, slice and price."""
    gpt, plan, groups = config.gpt_config(), config.horizon(), count_params(config.gpt_config())
    kv = f", {gpt.n_kv_head} of keys and values" if gpt.n_kv_head != gpt.n_head else ""
    rates = transferred(config.pretrain.optim, plan)
    total = plan.steps * plan.batch_tokens
    micro_batches = plan.batch_tokens // (config.pretrain.device_rows * gpt.sequence_len * config.target.devices)
    lines = [
        f"{groups.pop('total'):,} parameters: " + ", ".join(f"{name} {count:,}" for name, count in groups.items()),
        f"{gpt.n_layer} layers of {gpt.n_embd}, {gpt.n_head} heads of {gpt.head_dim}{kv}; "
        f"{flops_per_token(gpt):.6e} FLOPs a token",
        f"pretraining: {plan.steps:,} steps of {plan.batch_tokens:,} tokens = {total:,} tokens, "
        f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} a step",
        f"learning rates at width 768: embedding {rates.embedding_lr:.5g}, unembedding {rates.unembedding_lr:.5g}, "
        f"matrix {rates.matrix_lr:.5g}, scalar {rates.scalar_lr:.5g}; Muon's weight decay {rates.weight_decay:.5g}",
    ]
    return lines + rented(config.target)


def rented(target: Target) -> list[str]:
    """The slice and the price of a preset's machine, where they are known."""
    lines = []
    if found := TOPOLOGIES.get((target.chip, target.devices)):
        lines.append(f"slice: {found.name}, {found.hosts} host{'s' * (found.hosts > 1)}")
    chip = next((chip for chip in CHIPS if chip.name == target.chip), None)
    if chip and not chip.usd_hour:
        lines.append("price: unknown, set ops.usd_per_hour")
    if chip and chip.usd_hour:
        spot = f", spot ${target.devices * chip.usd_hour_spot:.2f} ({PRICE_DATE})" if chip.usd_hour_spot else ""
        lines.append(f"price: ${target.devices * chip.usd_hour:.2f} an hour on demand{spot}")
    return lines
