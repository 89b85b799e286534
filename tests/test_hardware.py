"""The chip table, MFU, dtype policy, and what the doctor makes of a machine."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from nanochat_lib import doctor, hardware
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS, GIB, TOPOLOGIES, Machine, compute_dtype, cpu_chip, find_chip, mfu
from nanochat_lib.presets import PRESETS, override, preset
from nanochat_lib.sizing import GPTConfig, flops_per_token

PEAKS = {  # device name as drivers and JAX print it -> dense bfloat16 FLOP/s of the vendor's sheet
    "NVIDIA GB200": 2.5e15,
    "NVIDIA B200": 2.25e15,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H800": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "AMD Instinct MI300X": 1.3074e15,
    "AMD Instinct MI250X": 383e12,
    "AMD Instinct MI250": 362.1e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
UNKNOWN = [
    "cpu", "", "Apple M3 Max", "NVIDIA L40", "NVIDIA RTX A4000", "NVIDIA RTX A3000", "NVIDIA B300", "NVIDIA GB300",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", "TPU v3", "TPU7x", "a1000", "NVIDIA H1000",
]  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_known_devices_have_the_vendors_peak(name: str) -> None:
    for spelled in (name, name.lower(), name.upper()):
        assert find_chip(spelled).peak["bfloat16"] == PEAKS[name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_device_has_no_peak_rather_than_a_relatives(name: str) -> None:
    assert find_chip(name) is None


def test_every_row_is_reachable_and_sane() -> None:
    for chip in CHIPS:
        for words in chip.match:
            assert find_chip(words) is chip  # no earlier row hides it
        assert 5e13 < chip.peak["bfloat16"] < 1e16 and 2e11 < chip.bandwidth < 1e13
        assert all(peak > 1.5 * chip.peak["bfloat16"] for dtype, peak in chip.peak.items() if dtype != "bfloat16")
        assert 16 * GIB <= chip.hbm_bytes < 300 * GIB
        assert (chip.matrix_unit in (128, 256)) == (chip.kind == "tpu")
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


def test_the_presets_chips_are_in_the_table() -> None:
    assert {c.target.chip for c in PRESETS.values()} - {"any"} <= {chip.name for chip in CHIPS}


def test_prices_are_of_one_chip() -> None:
    """8 v6e were $21.60 an hour on demand and $4.321096 on the spot market."""
    v6e = find_chip("TPU v6e")
    assert 8 * v6e.usd_hour == pytest.approx(21.60) and 8 * v6e.usd_hour_spot == pytest.approx(4.321096)
    for chip in CHIPS:
        assert chip.usd_hour is None or 0.1 < chip.usd_hour < 20
        assert chip.usd_hour_spot is None or 0 < chip.usd_hour_spot < chip.usd_hour


def test_clocks_give_the_peaks() -> None:
    """peak = matrix units × side² × 2 × clock: within 1 % of a whole number of units."""
    units = {}
    for chip in CHIPS:
        if chip.clock_hz:
            units[chip.name] = chip.peak["bfloat16"] / (2 * chip.matrix_unit**2 * chip.clock_hz)
    assert units == pytest.approx({"v6e": 4, "v5e": 4, "v5p": 2 * 4}, rel=0.01)


@pytest.mark.parametrize(
    ("chip", "devices", "name", "hosts"),
    [
        ("v6e", 4, "v6e:2x2", 1), ("v6e", 8, "v6e:2x4", 1), ("v6e", 16, "v6e:4x4", 4), ("v6e", 64, "v6e:8x8", 16),
        ("v5e", 8, "v5e:2x4", 1), ("v5e", 32, "v5e:4x8", 8), ("v5p", 4, "v5p:2x2x1", 1), ("v5p", 8, "v5p:2x2x2", 2),
        ("v5p", 64, "v5p:4x4x4", 16),
    ],
)  # fmt: skip
def test_slices(chip: str, devices: int, name: str, hosts: int) -> None:
    found = TOPOLOGIES[chip, devices]
    assert (found.name, found.hosts) == (name, hosts)


def test_every_slice_has_its_devices_and_whole_hosts() -> None:
    for (chip, devices), found in TOPOLOGIES.items():
        kind, shape = found.name.split(":")
        assert kind == chip and find_chip(f"TPU {chip}").name == chip
        sides = [int(side) for side in shape.split("x")]
        assert math.prod(sides) == devices and sides == sorted(sides) or (chip, devices) == ("v5p", 4)
        assert devices % found.hosts == 0 and devices // found.hosts in ((4,) if chip == "v5p" else (4, 8))
    tpus = [config.target for config in PRESETS.values() if config.target.kind == "tpu"]
    assert {(target.chip, target.devices) for target in tpus} <= TOPOLOGIES.keys()


@pytest.mark.aot
def test_the_compiler_knows_every_slice() -> None:
    """libtpu takes each name and makes as many chips of the right kind of it, in a process of its own."""
    program = (
        "import sys, json\nfrom jax.experimental import topologies\n"
        "slices = {n: topologies.get_topology_desc(platform='tpu', topology_name=n).devices for n in sys.argv[1:]}\n"
        "print(json.dumps({name: [len(devices), devices[0].device_kind] for name, devices in slices.items()}))"
    )
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    names = {found.name: key for key, found in TOPOLOGIES.items()}
    done = subprocess.run([sys.executable, "-c", program, *names], env=env, capture_output=True, text=True, check=True)
    for name, (devices, kind) in json.loads(done.stdout.splitlines()[-1]).items():
        assert (find_chip(kind).name, devices) == names[name]


def test_mfu_by_hand() -> None:
    chip = find_chip("NVIDIA A100-SXM4-80GB")
    # 8 devices, 4 micro-batches of 16 rows × 1024 tokens each, 0.5 s a step, 1e9 FLOPs a token.
    tokens_per_s = 8 * 4 * 16 * 1024 / 0.5
    assert mfu(1e9, tokens_per_s, 8, chip) == pytest.approx(1048576 * 1e9 / (8 * 312e12))


def test_mfu_of_published_runs() -> None:
    """Recipe 4 on 8 v6e: 2.876 s a step of 2^20 tokens, 24.5 %. The 3.8B run: 1047 TFLOP/s a B200, half of bfloat16."""
    r4 = flops_per_token(preset("tpu-v6e-8-d24-h128").gpt_config())
    assert mfu(r4, 2**20 / 2.876, 8, find_chip("TPU v6 lite")) == pytest.approx(0.2455, abs=5e-5)
    b200, little = find_chip("NVIDIA B200"), flops_per_token(preset("gpu-8-little-lm").gpt_config())
    rate = 8 * 1047e12 / little
    assert mfu(little, rate, 8, b200) == pytest.approx(0.50, abs=0.04)
    assert mfu(little, rate, 8, b200, "float8") == pytest.approx(0.25, abs=0.02)


def test_mfu_under_fp8_counts_the_same_and_can_be_asked_of_the_fp8_peak() -> None:
    d24 = preset("gpu-8-d24")
    fp8 = override(d24, {"compute.fp8": True})
    assert flops_per_token(fp8.gpt_config()) == flops_per_token(d24.gpt_config()) == 4775225616
    h100 = find_chip("NVIDIA H100 80GB HBM3")
    rate = 0.5 * 8 * 989e12 / 4775225616
    assert mfu(4775225616, rate, 8, h100) == mfu(4775225616, rate, 8, h100, "bfloat16") == pytest.approx(0.5)
    assert mfu(4775225616, rate, 8, h100, "float8") == pytest.approx(0.5 * 989 / 1979)
    faster = 3 * rate  # above the bfloat16 peak, below the fp8 one
    assert mfu(4775225616, faster, 8, h100) is None and mfu(4775225616, faster, 8, h100, "float8") < 1
    for chip in (find_chip("NVIDIA A100"), find_chip("TPU v6e"), replace(h100, kind="cpu", peak={"float32": 1e12})):
        assert mfu(1e9, 1e2, 1, chip) > 0 and mfu(1e9, 1e2, 1, chip, "float8") is None  # no such peak


def test_mfu_is_per_device() -> None:
    """Twice the devices at twice the tokens: the same share of the same peak."""
    chip = find_chip("TPU v6 lite")
    one = mfu(8e8, 200_000, 1, chip)
    assert one == pytest.approx(mfu(8e8, 400_000, 2, chip)) and 0 < one < 1
    assert mfu(8e8, 400_000, 1, chip) == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("rate", "devices", "name"),
    [(1e5, 1, "cpu"), (1e5, 1, "TPU v9"), (0.0, 1, "TPU v4"), (float("nan"), 1, "TPU v4"), (1e5, 0, "TPU v4")],
)
def test_mfu_is_none_where_it_would_be_nonsense(rate: float, devices: int, name: str) -> None:
    assert mfu(1e9, rate, devices, find_chip(name)) is None


def test_mfu_above_one_is_no_figure() -> None:
    chip = find_chip("TPU v4")
    assert mfu(1e9, 275e12 / 1e9, 1, chip) == 1.0
    assert mfu(1e9, 1.04 * 275e12 / 1e9, 1, chip) is None


def test_mfu_of_a_cpu_is_its_share_of_the_measured_peak() -> None:
    chip = cpu_chip()
    assert chip.measured and 1e8 < chip.peak["float32"] < 1e14
    assert chip is not cpu_chip() and chip == cpu_chip()  # measured once per process
    rate = 0.25 * chip.peak["float32"] / 1e9
    assert mfu(1e9, rate, 1, chip) == pytest.approx(0.25)
    assert mfu(1e9, rate, 8, chip) == pytest.approx(0.25)  # eight pretended devices are still one CPU


def test_flops_per_token_by_hand() -> None:
    """One layer, C 32, 2 heads, V 64, T 16: each weight is one multiplication and one addition, three times over."""
    config = GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")
    c, v, t = 32, 64, 16
    forward = 2 * (4 * c * c + 8 * c * c + 12 * 2 + c * v + 24)  # attention, MLP, value gate, head, smear gate
    forward += 2 * 2 * c * t  # q·k and scores·v over 16 visible keys
    assert flops_per_token(config) == 3 * forward


def test_flops_per_token_agrees_with_xla() -> None:
    """XLA counts the compiled forward pass; norms, softmax and the causal mask's half explain the rest (< 15 %)."""
    import jax
    import jax.numpy as jnp

    from nanochat_lib import gpt

    config = GPTConfig(
        sequence_len=64, vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=128, window_pattern="L"
    )
    params = gpt.init_params(config, jax.random.key(0))
    lowered = jax.jit(lambda p, x: gpt.apply(config, p, x)).lower(params, jnp.zeros((1, 64), jnp.int32))
    counted = lowered.compile().cost_analysis()["flops"] / 64
    assert counted == pytest.approx(flops_per_token(config) / 3, rel=0.15)


def test_dtype_policy() -> None:
    assert compute_dtype("auto", "cpu") == "float32"
    assert compute_dtype("auto", "gpu") == compute_dtype("auto", "tpu") == "bfloat16"
    assert compute_dtype("bfloat16", "cpu") == "bfloat16" and compute_dtype("float32", "tpu") == "float32"
    with pytest.raises(UserError, match=r"compute.dtype 'float16'.*auto, float32 or bfloat16"):
        compute_dtype("float16", "gpu")


def test_machine_tells_what_is_here(tmp_path, monkeypatch) -> None:
    found = hardware.machine(str(tmp_path))
    assert found.cores >= 1 and found.disk_free_bytes > 0 and found.memory_bytes >= found.memory_free_bytes > 0
    assert found.backend == "cpu" and found.usd_hour is None and found.peak == {}
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert found.cpu in found.line() and "\n" not in found.line()


def test_a_containers_limits_count(monkeypatch) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": f"{64 * 2**20}\n",
        "/sys/fs/cgroup/memory.current": f"{14 * 2**20}\n",
        "/sys/fs/cgroup/cpu.max": "100000 100000\n",
    }
    monkeypatch.setattr(hardware, "_read", lambda path: files.get(path, ""))
    assert hardware.memory() == (64 * 2**20, 50 * 2**20)
    assert hardware.cores() == 1
    monkeypatch.setattr(hardware, "_read", lambda path: "max\n" if path.endswith("memory.max") else "max 100000")
    assert hardware.memory()[0] > 64 * 2**20


# --- nanochat doctor --------------------------------------------------------------------------------------------------

GOOD = dict.fromkeys(doctor.NEEDED, "1.0") | {"jax": "0.10.2", "jaxlib": "0.10.2"}
HERE = Machine("Linux x86_64", "3.11.7", "a cpu", 2, 24 * GIB, 20 * GIB, 50 * GIB)


def whats(problems: list[doctor.Problem]) -> str:
    return "\n".join(f"{p.what} | {p.fix}" for p in problems)


def test_a_good_installation_has_no_problem() -> None:
    assert doctor.package_problems(GOOD, "0.0.42.*") == []
    assert doctor.package_problems(GOOD | {"libtpu": "0.0.42.1"}, "0.0.42.*") == []
    assert doctor.package_problems(GOOD | {"torch": "2.13.0+cpu"}, None) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rustbpe": None}, "not installed: rustbpe"),
        ({"jaxlib": "0.10.1"}, "jaxlib 0.10.1 beside jax 0.10.2"),
        ({"jax-cuda12-plugin": "0.11.0"}, "jax-cuda12-plugin 0.11.0 beside jax 0.10.2"),
        ({"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"}, "both installed"),
        ({"libtpu": "0.0.42", "libtpu-nightly": "0.1"}, "libtpu and libtpu-nightly are both installed"),
        ({"libtpu": "0.0.52"}, "libtpu 0.0.52 beside jax 0.10.2, which wants 0.0.42"),
        ({"libtpu": "0.0.421"}, "libtpu 0.0.421 beside"),
    ],
)
def test_mixed_versions_are_found_with_the_command_that_mends_them(change: dict, words: str) -> None:
    problems = doctor.package_problems(GOOD | change, "0.0.42.*")
    assert len(problems) == 1 and problems[0].fatal
    assert words in problems[0].what and problems[0].fix == "bash scripts/setup.sh --rebuild"


def test_the_installed_jax_says_which_libtpu_it_wants() -> None:
    assert doctor._wanted_libtpu().startswith("0.0.")


def fake_pci(tmp_path, monkeypatch, device: str = "0x006f", vendor: str = "0x1ae0") -> None:
    for i in range(2):
        folder = tmp_path / f"pci{i}"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    monkeypatch.setattr(doctor, "PCI", str(tmp_path / "pci*"))


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without accelerators, whatever this one is."""
    monkeypatch.setattr(doctor, "PCI", str(tmp_path / "none*"))
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", str(tmp_path / "driver"))
    monkeypatch.setattr(doctor, "LIBTPU_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(doctor, "TPU_NODES", (str(tmp_path / "accel[0-9]*"),))
    monkeypatch.setattr(doctor, "PRODUCT", str(tmp_path / "product"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return tmp_path


def test_no_accelerator_is_no_problem(bare) -> None:
    assert doctor.accelerator_problems(HERE, GOOD) == []


def test_a_tpu_that_jax_does_not_use_is_a_problem_with_its_way_out(bare, monkeypatch) -> None:
    fake_pci(bare, monkeypatch)
    assert doctor.tpu_chips() == 2
    assert "NANOCHAT_EXTRAS=tpu bash scripts/setup.sh" in whats(doctor.accelerator_problems(HERE, GOOD))
    with_libtpu = GOOD | {"libtpu": "0.0.42"}
    (bare / "accel0").touch()
    assert "end the other program" in whats(doctor.accelerator_problems(HERE, with_libtpu))
    (bare / "lock").touch()
    assert f"{bare / 'lock'} is " in whats(doctor.accelerator_problems(HERE, with_libtpu))
    holder = subprocess.Popen(["sleep", "60"], stdin=open(bare / "lock"))
    try:
        said = whats(doctor.accelerator_problems(HERE, with_libtpu))
        assert f"process {holder.pid} holds the TPU" in said and f"sudo rm -f {bare / 'lock'}" in said
    finally:
        holder.kill()
        holder.wait()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "unset JAX_PLATFORMS" in whats(doctor.accelerator_problems(HERE, with_libtpu))
    assert doctor.accelerator_problems(replace(HERE, backend="tpu"), with_libtpu) == []


def test_a_tpu_that_is_gone_after_a_restart_is_a_problem_with_its_steps(bare, monkeypatch) -> None:
    with_libtpu = GOOD | {"libtpu": "0.0.42"}
    assert doctor.accelerator_problems(HERE, with_libtpu) == []  # a laptop that compiles for TPUs
    (bare / "product").write_text("Google Compute Engine\n")
    assert doctor.accelerator_problems(HERE, GOOD) == []  # a machine of Google's that never had one
    said = whats(doctor.accelerator_problems(HERE, with_libtpu))
    assert "no TPU chip" in said and "sudo reboot" in said and "gcloud compute tpus tpu-vm describe" in said
    assert doctor.accelerator_problems(replace(HERE, backend="tpu"), with_libtpu) == []
    fake_pci(bare, monkeypatch)  # the chips are back, their driver is not
    said = whats(doctor.accelerator_problems(HERE, with_libtpu))
    assert "2 TPU chips are on the bus, but the system offers none" in said and "sudo reboot" in said


def test_another_device_of_the_same_vendor_is_no_tpu(bare, monkeypatch) -> None:
    fake_pci(bare, monkeypatch, device="0x0042")  # its network card
    assert doctor.tpu_chips() == 0


@pytest.mark.parametrize(("driver", "extra"), [(550, "cuda12"), (580, "cuda13")])
def test_a_gpu_without_the_plugin_gets_the_extra_its_driver_can_run(bare, driver: int, extra: str) -> None:
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}.65.06  Sun\nGCC version: 12\n"
    (bare / "driver").write_text(text)
    assert f"NANOCHAT_EXTRAS={extra} bash" in whats(doctor.accelerator_problems(HERE, GOOD))
    with_plugin = GOOD | {"jax-cuda12-plugin": "0.10.2"}
    assert "nvidia-smi" in whats(doctor.accelerator_problems(HERE, with_plugin))


def test_the_memory_estimate_by_hand() -> None:
    """65,536 tokens × 65,536 logits in bfloat16 are 8 GiB; the loss needs them in float32 and their gradient too."""
    config = preset("gpu-1-d12")
    config = replace(
        config,
        model=replace(config.model, depth=1, aspect_ratio=64, head_dim=64),
        tokenizer=replace(config.tokenizer, vocab_size=65536),
        pretrain=replace(config.pretrain, device_rows=32),
    )
    logits = 32 * 2048 * 65536 * (4 + 4 + 2)
    parameters = 16 * (65536 * 64 * 3 + 12 * 64 * 64 + 12 * 1 + 2 + 25 + 1)
    assert doctor.estimate_bytes(config) == logits + parameters + 65536 * 64 * 20 * 2
    assert logits == 5 * 8 * GIB


def test_fsdp_divides_the_state_of_the_memory_estimate() -> None:
    whole = preset("tpu-v6e-8-d24")
    split = override(whole, {"compute.fsdp": 8})
    assert doctor.estimate_bytes(whole) - doctor.estimate_bytes(split) == 16 * 1384122672 * 7 // 8


def test_what_follows_from_a_preset_is_said() -> None:
    text = "\n".join(doctor.derived(preset("tpu-v6e-8-d24")))
    for words in (
        "1,384,122,672 parameters: wte 50,331,648, value_embeds 603,979,776", "6 heads of 256;", "4.945098e+09 FLOPs",
        "6,612 steps of 1,048,576 tokens = 6,933,184,512 tokens, 32 micro-batches", "unembedding 0.0056569",
        "slice: v6e:2x4, 1 host", "price: $21.60 an hour on demand, spot $4.32 (June 2026)",
    ):  # fmt: skip
        assert words in text
    little = "\n".join(doctor.derived(preset("gpu-8-little-lm")))
    assert "24 heads of 128, 8 of keys and values" in little and "slice" not in little
    assert "price: unknown, set ops.usd_per_hour" in little
    assert "slice: v5p:2x2x2, 2 hosts" in doctor.derived(preset("tpu-v5p-8-d24"))
    assert "1 micro-batch a step" in "\n".join(doctor.derived(preset("cpu")))


def test_the_cpu_presets_fit_a_laptop() -> None:
    for name in ("cpu-smoke", "cpu"):
        assert doctor.misfit(PRESETS[name], HERE) is None
        assert doctor.estimate_bytes(PRESETS[name]) < 4e9
    assert "1.0 GiB of memory are free" in doctor.misfit(PRESETS["cpu"], replace(HERE, memory_free_bytes=GIB))


def test_what_does_not_fit_says_why() -> None:
    h100 = replace(HERE, backend="gpu", devices=8, device_kind="NVIDIA H100", device_memory_bytes=80 * GIB)
    assert doctor.misfit(PRESETS["gpu-8-d24"], HERE) == "no GPU here"
    assert doctor.misfit(PRESETS["gpu-8-d24"], h100) is None
    assert doctor.misfit(PRESETS["gpu-8-d24"], replace(h100, devices=4)) == "4 of 8 devices here"
    assert doctor.misfit(PRESETS["gpu-8-d24"], replace(h100, device_memory_bytes=24 * GIB)) == "a device has 24 GiB"
    assert doctor.misfit(PRESETS["tpu-v6e-8-d24"], h100) == "no TPU here"


def test_doctor_prints_all_and_its_exit_code_is_the_verdict(bare, monkeypatch, capsys) -> None:
    monkeypatch.setattr(hardware, "machine", lambda path=".", accelerators=True: HERE)
    monkeypatch.setattr(doctor, "versions", lambda: dict(GOOD))
    assert doctor.print_diagnosis("cpu") == 0
    text = capsys.readouterr().out
    for word in ("Python 3.11.7", "a cpu, 2 cores", "20.0 GiB free of 24.0", "50.0 GiB free", "1 × cpu", "jax 0.10.2",
                 *PRESETS, "ready: bash scripts/capstone.sh cpu"):  # fmt: skip
        assert word in text
    assert "problem" not in text
    assert doctor.print_diagnosis("cpu", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == asdict(HERE)

    monkeypatch.setattr(hardware, "machine", lambda path=".", accelerators=True: replace(HERE, disk_free_bytes=GIB))
    assert doctor.print_diagnosis("cpu") == 1
    text = capsys.readouterr().out
    assert "problem: 1.0 GiB of disk are free" in text and "fix: free some space" in text and "not ready" in text
    assert doctor.print_diagnosis("cpu", as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False

    monkeypatch.setattr(hardware, "machine", lambda path=".", accelerators=True: replace(HERE, memory_free_bytes=GIB))
    assert doctor.print_diagnosis("cpu") == 1
    assert "the preset cpu does not fit" in capsys.readouterr().out


def test_doctor_survives_a_jax_that_does_not_start(bare, monkeypatch, capsys) -> None:
    def machine(path: str = ".", accelerators: bool = True) -> Machine:
        if accelerators:
            raise RuntimeError("Unable to initialize backend 'tpu': busy\nmore")
        return HERE

    monkeypatch.setattr(hardware, "machine", machine)
    assert doctor.print_diagnosis("cpu") == 1
    assert "problem: JAX does not start: Unable to initialize backend 'tpu': busy\n" in capsys.readouterr().out
