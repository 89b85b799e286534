"""scripts/cloud: what machines are told is understood, by nanochat and by each tool's own parser.

Nothing is rented here. Scripts run with pretended tools in a PATH of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from nanochat_lib.cli import build_parser
from nanochat_lib.hardware import CHIPS, PRICE_DATE, TOPOLOGIES
from nanochat_lib.presets import PRESETS, flatten, preset
from nanochat_lib.sizing import flops_per_token

ROOT = Path(__file__).parents[1]
CLOUD = ROOT / "scripts" / "cloud"
PAGE = ROOT / "docs" / "rented-machines.md"
SKY = sorted(CLOUD.glob("sky-*.yaml"))
KUBERNETES = sorted(CLOUD.glob("kubernetes-*.yaml"))


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


# ---- train.sh: what each machine runs

NANOCHAT = r"""
printf '%q ' "$@" >>"$LOG"; echo >>"$LOG"
env | grep '^NANOCHAT_COORDINATOR_TIMEOUT=' >>"$LOG.env"
trap 'echo saved >>"$LOG"; exit 75' TERM
if [ "$1" = "$HANG" ]; then touch "$LOG.hangs"; sleep 60 & wait; fi
case "$1" in "$FAILING") exit "$CODE" ;; esac
"""


def hear() -> None:
    """A test that was started in the background (nohup, &) is deaf to these, and so would be its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Train:
    """A project of only train.sh, with a pretended setup.sh and nanochat."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "project", folder / "log"
        script(self.root / "scripts" / "cloud" / "train.sh", (CLOUD / "train.sh").read_text())
        script(self.root / "scripts" / "setup.sh", 'echo "setup $NANOCHAT_EXTRAS" >>"$LOG"; exit "${SETUP:-0}"\n')
        script(self.root / ".venv" / "bin" / "nanochat", NANOCHAT)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NANOCHAT_")}
        given = {"LOG": str(self.log), "HANG": "", "FAILING": "", "CODE": "0"} | environment
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "cloud" / "train.sh"), *arguments],
            env=clean | given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear,
        )  # fmt: skip

    def run(self, *arguments: str, **environment: str) -> tuple[int, list[list[str]]]:
        process = self.start(*arguments, **environment)
        self.said = process.communicate(timeout=30)[0]
        return process.returncode, self.commands

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def train(tmp_path):
    return Train(tmp_path)


ALL_STAGES = "tokenizer pretrain sft rl eval report"


def test_the_stages_are_nanochats_commands(train) -> None:
    names = ["cpu-smoke", "gpu-8-d24", "tpu-v6e-64-d32"]
    for name in names:
        code, _ = train.run(
            "-s", "seed=1", NANOCHAT_PRESET=name, NANOCHAT_STAGES=ALL_STAGES, NANOCHAT_DURABLE="gs://my bucket/x",
            NANOCHAT_SPOT="1", NANOCHAT_SHARDS="0",
        )  # fmt: skip
        assert code == 0, train.said
    stages = [words for words in train.commands if words[0] != "setup"]
    assert [words[0] for words in stages] == ALL_STAGES.split() * len(names)
    for words in stages:
        args = build_parser().parse_args(words)
        if words[0] != "report":
            assert args.preset in names and args.run_dir == f"runs/{args.preset}"
            assert args.set == ["ops.durable=gs://my bucket/x", "ops.spot=true", "seed=1"]


def test_the_data_command_is_nanochats(train) -> None:
    train.run("setup", NANOCHAT_PRESET="gpu-8-d24")
    train.run("setup", NANOCHAT_PRESET="gpu-8-d24", NANOCHAT_SHARDS="12")
    data = [words for words in train.commands if words[0] == "data"]
    assert data == [
        ["data", "get", "climbmix", "--preset", "gpu-8-d24"], ["data", "get", "climbmix", "--shards", "12"]
    ]  # fmt: skip
    for words in data:
        build_parser().parse_args(words)


def test_what_comes_first_and_what_is_left_out(train) -> None:
    code, commands = train.run(NANOCHAT_PRESET="gpu-8-d24", NANOCHAT_EXTRAS="cuda12 store", NANOCHAT_RUN_DIR="/s/run")
    assert code == 0 and [words[0] for words in commands] == ["setup", "data", "tokenizer", "pretrain"]
    assert commands[0] == ["setup", "cuda12", "store"]
    assert commands[2] == ["tokenizer", "--preset", "gpu-8-d24", "--run-dir", "/s/run"]
    # The default wait is long: workers fetch their data at different speeds.
    assert set(Path(f"{train.log}.env").read_text().split()) == {"NANOCHAT_COORDINATOR_TIMEOUT=900"}
    train.log.unlink()
    assert [words[0] for words in train.run("setup", NANOCHAT_PRESET="gpu-8-d24")[1]] == ["setup", "data"]
    train.log.unlink()
    assert [words[0] for words in train.run(NANOCHAT_PRESET="cpu-smoke")[1]] == ["setup", "tokenizer", "pretrain"]


@pytest.mark.parametrize("code", [1, 2, 75])
@pytest.mark.parametrize("failing", ["data", "tokenizer", "pretrain"])
def test_the_exit_code_is_that_of_what_failed(train, failing, code) -> None:
    found, commands = train.run(NANOCHAT_PRESET="gpu-8-d24", FAILING=failing, CODE=str(code))
    assert found == code and commands[-1][0] == failing


def test_mistakes_in_the_variables_cost_no_time(train) -> None:
    assert train.run()[0] == 2 and "NANOCHAT_PRESET" in train.said
    code, commands = train.run(NANOCHAT_PRESET="cpu-smoke", NANOCHAT_STAGES="pretraim")
    assert code == 2 and "pretraim" in train.said
    assert train.run(NANOCHAT_PRESET="cpu-smoke", NANOCHAT_SHARED="nonsense")[0] == 2 and "HOST:/PATH" in train.said
    assert train.run(NANOCHAT_PRESET="cpu-smoke", SETUP="1")[0] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("hang", ["data", "pretrain"])
def test_a_signal_reaches_the_stage_and_asks_for_another_start(train, number, hang) -> None:
    process = train.start(NANOCHAT_PRESET="gpu-8-d24", HANG=hang)
    end = time.monotonic() + 20
    while not Path(f"{train.log}.hangs").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(20) == 75
    assert train.commands[-2:][0][0] == hang and train.commands[-1] == ["saved"]


# ---- attach.sh: once, whatever happens to the connection


def attach(folder: Path, attempt: str, *command: str, wait: bool = True):
    words = ["bash", str(CLOUD / "attach.sh"), str(folder), attempt, *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return (process.communicate(timeout=30)[0], process.returncode) if wait else process


def test_a_command_runs_once_and_survives_its_caller(tmp_path) -> None:
    folder, go = tmp_path / "log", tmp_path / "go"
    command = ("bash", "-c", f"echo begun; until [ -e {go} ]; do sleep 0.05; done; echo ended; exit 75")
    first = attach(folder, "1", *command, wait=False)
    end = time.monotonic() + 20
    while (not (folder / "log").exists() or "begun" not in (folder / "log").read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    first.kill()  # the connection breaks
    first.wait()
    again = attach(folder, "1", *command, wait=False)
    other = attach(folder, "2", *command, wait=False)  # another attempt while it runs: the same
    time.sleep(0.3)
    go.touch()
    for process in (again, other):
        text, _ = process.communicate(timeout=30)
        assert process.returncode == 75 and text == "begun\nended\n"
    assert attach(folder, "1", *command) == ("begun\nended\n", 75)  # it ended while nobody was connected
    assert attach(folder, "3", "echo", "new") == ("new\n", 0)


def test_stop_lets_it_save(tmp_path) -> None:
    folder, ready = tmp_path / "log", tmp_path / "ready"
    command = f"trap 'echo saved; exit 75' TERM; touch {ready}; sleep 60 & wait"
    process = attach(folder, "1", "bash", "-c", command, wait=False)
    end = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert attach(folder, "stop")[1] == 0
    assert process.communicate(timeout=20)[0] == "saved\n" and process.returncode == 75
    assert attach(folder, "stop")[1] == 0  # nothing runs


def test_a_command_that_was_killed_has_failed(tmp_path) -> None:
    assert attach(tmp_path / "log", "1", "bash", "-c", "kill -9 $PPID")[1] == 137
    (tmp_path / "log" / "pid").write_text(f"{os.getpid()}\n")  # its number belongs to another by now
    assert attach(tmp_path / "log", "2", "echo", "x") == ("x\n", 0)


# ---- the shell


@pytest.mark.parametrize("path", [*sorted(CLOUD.glob("*.sh")), CLOUD / "slurm.sbatch"], ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-s", "bash", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- SkyPilot

VARIABLES = set(re.findall(r"^#   (NANOCHAT_\w+)", (CLOUD / "train.sh").read_text(), re.M))
PROCESSES = {"NANOCHAT_COORDINATOR", "NANOCHAT_PROCESSES", "NANOCHAT_PROCESS_ID"}
SKY_CHIPS = {
    "tpu-v5litepod-8": ("v5e", 8), "tpu-v6e-8": ("v6e", 8), "tpu-v6e-64": ("v6e", 64),
    "tpu-v5p-16": ("v5p", 8),  # cores, two a chip
    "H100:8": ("h100", 8),
}  # fmt: skip
IMAGES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}


@pytest.mark.parametrize("path", SKY, ids=lambda path: path.name)
def test_a_sky_file_asks_for_its_presets_machine(path) -> None:
    task = yaml.safe_load(path.read_text())
    assert task.keys() == {"name", "workdir", "envs", "resources", "setup", "run"}
    assert (task["setup"], task["run"]) == ("bash scripts/cloud/train.sh setup", "bash scripts/cloud/train.sh")
    envs, resources = task["envs"], task["resources"]
    assert envs.keys() <= VARIABLES and all(value is None or isinstance(value, str) for value in envs.values())
    assert envs["NANOCHAT_DURABLE"] is None  # must be given
    target, found = preset(envs["NANOCHAT_PRESET"]).target, SKY_CHIPS[resources["accelerators"]]
    assert found == (target.chip, target.devices)
    known = {"infra", "any_of", "accelerators", "accelerator_args", "disk_size", "use_spot", "job_recovery"}
    assert resources.keys() <= known and resources["use_spot"] is (envs["NANOCHAT_SPOT"] == "1")
    assert resources["job_recovery"] == {
        "strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [75], "max_restarts_on_errors": 2
    }  # fmt: skip
    if target.kind == "tpu":
        assert resources["infra"] == "gcp" and envs["NANOCHAT_EXTRAS"].split()[0] == "tpu"
        assert resources["accelerator_args"] == {"runtime_version": IMAGES[target.chip]}
    first = re.search(r"sky jobs launch (\S+) --env (\w+)=", path.read_text())
    assert ROOT / first[1] == path and first[2] == "NANOCHAT_DURABLE"
    for name in re.findall(r"NANOCHAT_PRESET=(\S+)", path.read_text()):
        assert preset(name).target == target


def test_there_is_a_sky_file_for_every_kind_of_machine() -> None:
    found = {SKY_CHIPS[yaml.safe_load(path.read_text())["resources"]["accelerators"]] for path in SKY}
    assert found == {("v5e", 8), ("v5p", 8), ("v6e", 8), ("v6e", 64), ("h100", 8)}


SKY_PARSER = """
import json, sys, yaml, sky
found = {}
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml.safe_load(open(path)), env_overrides=[("NANOCHAT_DURABLE", "gs://b/r")])
    found[path] = sorted({name for one in task.resources for name in one.accelerators}), task.envs["NANOCHAT_DURABLE"]
    try:
        sky.Task.from_yaml(path)
    except ValueError as error:
        assert "NANOCHAT_DURABLE" in str(error), error
    else:
        raise SystemExit(f"{path}: NANOCHAT_DURABLE may be left out")
print(json.dumps(found))
"""


def test_skypilots_own_parser_takes_the_files(tmp_path) -> None:
    """Needs SkyPilot, which is heavy: in this environment, or in the one whose Python NANOCHAT_SKY_PYTHON names."""
    python = os.environ.get("NANOCHAT_SKY_PYTHON") or (sys.executable if importlib.util.find_spec("sky") else "")
    if not python:
        pytest.skip("SkyPilot is not here; NANOCHAT_SKY_PYTHON names a Python that has it")
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([python, "-c", SKY_PARSER, *map(str, SKY)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])) == len(SKY)


# ---- Kubernetes


def job_of(path: Path) -> tuple[dict, dict]:
    service, job = yaml.safe_load_all(path.read_text())
    return service, job


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_files_fit_the_schemas(path) -> None:
    for document in job_of(path):
        for version in ("1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)
    broken = job_of(path)[1]
    broken["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_a_kubernetes_job_starts_again_what_was_stopped(path) -> None:
    service, job = job_of(path)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] and pod["restartPolicy"] == "Never"
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules} == {"FailJob": [2], "Ignore": [75]}
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
    assert pod["terminationGracePeriodSeconds"] >= 120
    (command,) = container["args"]
    assert container["command"] == ["bash", "-c"] and command.rstrip().endswith("exec bash scripts/cloud/train.sh")
    assert env.keys() <= VARIABLES | PROCESSES | {"NANOCHAT_REPOSITORY", "NANOCHAT_BASE_DIR"}
    target = preset(env["NANOCHAT_PRESET"]).target
    per_pod = container["resources"]["limits"][f"{'nvidia.com/gpu' if target.kind == 'gpu' else 'google.com/tpu'}"]
    assert per_pod * spec["completions"] == target.devices
    if target.kind == "gpu":
        assert int(env["NANOCHAT_PROCESSES"]) == spec["completions"]
        assert env["NANOCHAT_COORDINATOR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    else:
        chip = pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"]
        shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        table = re.findall(r"^#   (tpu-\S+)\s+(\S+)\s+(\S+)\s+(\d+)\s+(\d+)$", path.read_text(), re.M)
        assert (env["NANOCHAT_PRESET"], chip, shape, str(spec["completions"]), str(per_pod)) in table
        kinds = {"v6e": "tpu-v6e-slice", "v5e": "tpu-v5-lite-device", "v5p": "tpu-v5p-slice"}
        assert len(table) == 4
        for name, accelerator, topology, pods, chips in table:
            target = preset(name).target
            slice_ = TOPOLOGIES[target.chip, target.devices]
            assert accelerator == kinds[target.chip] and f"{target.chip}:{topology}" == slice_.name
            assert int(pods) == slice_.hosts and int(pods) * int(chips) == target.devices


# ---- Slurm


class Slurm:
    """slurm.sbatch with a pretended srun and scontrol."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        script(folder / "bin" / "srun", r"""
printf 'srun %s\n' "$*" >>"$LOG"
case "$*" in *"train.sh setup") exit "${SETUP:-0}" ;; esac
trap 'echo "srun got TERM" >>"$LOG"; exit 75' TERM
[ -z "$HANG" ] || { touch "$LOG.hangs"; sleep 60 & wait; }
exit "${CODE:-0}"
""")  # fmt: skip
        script(folder / "bin" / "scontrol", 'echo "scontrol $*" >>"$LOG"; exit "${REQUEUE:-0}"\n')

    def start(self, **environment: str) -> subprocess.Popen:
        env = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "LOG": str(self.log), "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "7", "NANOCHAT_PRESET": "gpu-8-d24", "HANG": "",
        }  # fmt: skip
        words = ["bash", str(CLOUD / "slurm.sbatch"), "-s", "seed=1"]
        return subprocess.Popen(words, env=env | environment, stderr=subprocess.PIPE, text=True)

    def run(self, **environment: str) -> int:
        process = self.start(**environment)
        self.said = process.communicate(timeout=20)[1]
        return process.returncode

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.log.read_text()


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_a_slurm_job_sets_up_once_and_trains_on_every_node(slurm) -> None:
    assert slurm.run() == 0 and not slurm.requeued
    assert slurm.log.read_text().splitlines() == [
        "srun --nodes=1 --ntasks=1 bash scripts/cloud/train.sh setup",
        "srun --ntasks-per-node=1 --wait=300 bash scripts/cloud/train.sh -s seed=1",
    ]


@pytest.mark.parametrize(
    ("environment", "code", "requeued"),
    [
        ({"CODE": "75"}, 0, True),
        ({"SETUP": "75"}, 0, True),
        ({"CODE": "1"}, 1, False),
        ({"CODE": "2"}, 2, False),
        ({"SETUP": "1"}, 1, False),
        ({"CODE": "75", "SLURM_RESTART_COUNT": "99"}, 0, True),
        ({"CODE": "75", "SLURM_RESTART_COUNT": "100"}, 75, False),
        ({"CODE": "75", "REQUEUE": "1"}, 75, True),
    ],
)
def test_a_slurm_job_that_has_saved_goes_into_the_queue_again(slurm, environment, code, requeued) -> None:
    assert slurm.run(**environment) == code and slurm.requeued is requeued, slurm.said


def test_a_slurm_job_that_is_told_to_stop_saves_and_goes_into_the_queue_again(slurm) -> None:
    process = slurm.start(HANG="1")
    end = time.monotonic() + 20
    while not Path(f"{slurm.log}.hangs").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0 and slurm.requeued and "srun got TERM" in slurm.log.read_text()
    process.stderr.close()


SLURM_CONF = """ClusterName=x
SlurmctldHost=localhost
GresTypes=gpu
NodeName=n[1-4] CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES
SlurmctldTimeout=1
MessageTimeout=1
"""


def test_slurms_options_are_sbatchs(tmp_path) -> None:
    """By sbatch itself where it is installed: it reads the file, then finds no controller."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (CLOUD / "slurm.sbatch").read_text(), re.M))
    assert len(options) == (CLOUD / "slurm.sbatch").read_text().count("\n#SBATCH")
    assert options["ntasks-per-node"] == "1" and options["open-mode"] == "append" and "requeue" in options
    assert options["signal"] == "TERM@300" and options["gpus-per-node"] == "8"
    if not shutil.which("sbatch"):
        return
    (tmp_path / "slurm.conf").write_text(SLURM_CONF)
    env = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    words = ["sbatch", "--test-only", "-v", CLOUD / "slurm.sbatch"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    seen = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.+)$", done.stderr, re.M))
    assert options.keys() <= seen.keys() and "unrecognized" not in done.stderr, done.stderr
    assert "Unable to contact slurm controller" in done.stderr


# ---- the page


def lines_of_the_page() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


def test_the_commands_of_the_page_exist() -> None:
    sys.path.insert(0, str(CLOUD))
    import tpu_queued

    seen = set()
    for words in lines_of_the_page():
        given = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
        for word in given:
            name, _, value = word.partition("=")
            assert name in VARIABLES | PROCESSES | {"XLA_FLAGS"}
            if name == "NANOCHAT_PRESET":
                preset(value)
        words = [word for word in words if word not in given]
        seen.add(Path(words[0]).name)
        if words[0] == ".venv/bin/nanochat":
            build_parser().parse_args(words[1:])
        elif words[0] == "python3":
            tpu_queued.options().parse_args(words[2:])
        elif words[0] not in ("export", "pip"):
            paths = [word for word in words if word.startswith("scripts/")]
            assert len(paths) == 1 and (ROOT / paths[0]).is_file(), words
    assert seen == {"nanochat", "python3", "bash", "sky", "sbatch", "kubectl", "pip", "export"}


def test_the_page_names_every_recipe_and_only_these() -> None:
    text = PAGE.read_text(encoding="utf-8")
    recipes = {path.name for path in CLOUD.iterdir() if path.suffix in (".yaml", ".sbatch", ".py", ".sh")}
    named = set(re.findall(r"`(?:scripts/cloud/)?([\w-]+\.(?:yaml|sbatch|py|sh))`", text))
    helpers = {"tpu_machine.py", "attach.sh", "setup.sh"}
    assert recipes - helpers == {Path(name).name for name in named} - helpers
    assert set(re.findall(r"`(?:-s )?((?:pretrain|ops)\.\w+)", text)) <= flatten(preset("cpu")).keys()


def test_the_costs_of_the_page_are_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert PRICE_DATE in text
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    assert {row[0] for row in rows} == {name for name, c in PRESETS.items() if c.target.chip != "any"}
    for name, *cells in rows:
        config = preset(name)
        target, plan = config.target, config.horizon()
        chip = next(chip for chip in CHIPS if chip.name == target.chip)
        seconds = plan.steps * plan.batch_tokens * flops_per_token(config.gpt_config())
        hours = [seconds / (share * target.devices * chip.peak["bfloat16"]) / 3600 for share in (0.25, 0.4)]
        prices = [one and one * target.devices for one in (chip.usd_hour_spot, chip.usd_hour)]
        wanted = [f"{price:.2f}" if price else "?" for price in prices]
        wanted.append(f"{hours[0]:.1f}–{hours[1]:.1f}")
        wanted += [f"{price * hours[0]:.0f}–{price * hours[1]:.0f}" if price else "?" for price in prices]
        assert [cell.strip() for cell in cells] == wanted, name
