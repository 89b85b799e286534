"""How many processes a run has and how they find each other, decided from options and environment alone."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError

PORT = 8476  # JAX's own default, 8482, is not among the ports that clouds open between TPU workers
TIMEOUT = 120.0  # seconds to wait for all processes


@dataclass(frozen=True)
class Options:
    """How processes find each other; None: the environment variable of that name, else found out or the default."""

    coordinator: str | None = None  # NANOCHAT_COORDINATOR: host or host:port of process 0
    processes: int | None = None  # NANOCHAT_PROCESSES
    process_id: int | None = None  # NANOCHAT_PROCESS_ID, from 0
    port: int | None = None  # NANOCHAT_COORDINATOR_PORT
    timeout: float | None = None  # NANOCHAT_COORDINATOR_TIMEOUT, seconds


@dataclass(frozen=True)
class Plan:
    """What `start` is going to do. kind: "alone"; "given" (address, count and index are known); "cluster" (JAX knows
    this kind of cluster and finds the others); "ask" (a TPU machine, which may be one of several)."""

    kind: str
    timeout: float = TIMEOUT
    port: int | None = None
    address: str = ""
    count: int = 1
    index: int = 0


def decide(options: Options, env: Mapping[str, str], tpu: bool) -> Plan:
    """What to start, from options and environment alone; `tpu`: this machine has TPU chips that JAX may use.

    Raises UserError for settings that are incomplete or out of range.
    """
    coordinator = options.coordinator or env.get("NANOCHAT_COORDINATOR")
    count = _number(options.processes, env, "NANOCHAT_PROCESSES", 1)
    index = _number(options.process_id, env, "NANOCHAT_PROCESS_ID", 0)
    port = _number(options.port, env, "NANOCHAT_COORDINATOR_PORT", 1)
    timeout = float(_number(options.timeout, env, "NANOCHAT_COORDINATOR_TIMEOUT", 1) or TIMEOUT)
    if count == 1:
        return Plan("alone")
    given = {"NANOCHAT_COORDINATOR": coordinator, "NANOCHAT_PROCESSES": count, "NANOCHAT_PROCESS_ID": index}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) < len(given):
        if missing:
            raise UserError(f"several processes need {', '.join(given)}; set {' and '.join(missing)} too")
        if index >= count:
            raise UserError(f"NANOCHAT_PROCESS_ID is {index}, must be from 0 to {count - 1} (NANOCHAT_PROCESSES - 1)")
        return Plan("given", timeout, port, _address(coordinator, port), count, index)
    if (found := _one_process_a_node(env, tpu)) is not None:
        host, count, index = found
        return Plan("given", timeout, port, _address(host, port), count, index)
    return Plan(_surroundings(env, tpu), timeout, port)


def _number(option: float | None, env: Mapping[str, str], name: str, least: int) -> int | None:
    value = env.get(name) if option is None else option
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, must be a whole number of at least {least}") from None
    if number < least:
        raise UserError(f"{name} is {number}, must be at least {least}")
    return number


def _address(coordinator: str, port: int | None) -> str:
    """host:port; a port within `coordinator` wins, an IPv6 host stands in brackets."""
    host, colon, tail = coordinator.rpartition(":")
    if not colon or coordinator.endswith("]"):
        return f"{coordinator}:{port or PORT}"
    if not tail.isdigit() or not 0 < int(tail) < 2**16:
        raise UserError(f"NANOCHAT_COORDINATOR is {coordinator!r}, must be host or host:port ([…]:port for IPv6)")
    return f"{host}:{tail}"


def _one_process_a_node(env: Mapping[str, str], tpu: bool) -> tuple[str, int, int] | None:
    """(host of process 0, count, index) where one process was started on each of several nodes.

    JAX does not know SkyPilot; under SLURM it would give each process one GPU, as if there were one process a GPU.
    Raises UserError where SLURM has several nodes but this process was started without srun: the others would idle.
    """
    nodes = env.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" in env and nodes != "1" and "SLURM_STEP_NODELIST" not in env:
        raise UserError(
            f"this Slurm job has {nodes} nodes, but the run was started on one of them only; start it on all: "
            f"{on_all_workers(env, tpu)} (NANOCHAT_PROCESSES=1: on this one alone)"
        )
    if tpu:  # the numbers must be those of the slice's own workers, which JAX finds out
        return None
    if env.get("SKYPILOT_NUM_NODES", "1") != "1" and {"SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"} <= env.keys():
        return env["SKYPILOT_NODE_IPS"].split()[0], int(env["SKYPILOT_NUM_NODES"]), int(env["SKYPILOT_NODE_RANK"])
    tasks = env.get("SLURM_NTASKS", "1")
    if (
        tasks != "1"
        and env.get("SLURM_STEP_NUM_NODES") == tasks
        and {"SLURM_STEP_NODELIST", "SLURM_PROCID"} <= env.keys()
    ):
        return _first_host(env["SLURM_STEP_NODELIST"]), int(tasks), int(env["SLURM_PROCID"])
    return None


def _first_host(nodes: str) -> str:
    """The first of SLURM's "n7", "n7,m1", "n[007-9,12]-a,m1"."""
    found = re.match(r"([^\[,]+)(?:\[([^-,\]]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def on_all_workers(env: Mapping[str, str], tpu: bool) -> str:
    """The command that starts this program on all workers at once, as far as the surroundings tell; "" when not."""
    program = Path(sys.argv[0])
    command = shlex.join(sys.argv) if program.stem == "nanochat" else "COMMAND"
    if "SLURM_JOB_ID" in env:
        return f"srun --nodes={env.get('SLURM_JOB_NUM_NODES', 'N')} --ntasks-per-node=1 {command}"
    if "SKYPILOT_NODE_IPS" in env:
        count = "" if tpu else f" --num-nodes {env.get('SKYPILOT_NUM_NODES', 'N')}"
        return f"sky exec CLUSTER{count} {shlex.quote(f'cd {Path.cwd()} && {command}')}"
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubectl get pods: as many as the Job's completions, which parallelism must equal, have to run"
    if tpu:
        name, zone = env.get("TPU_NAME", "NAME"), env.get("ZONE", "ZONE")
        there = shlex.quote(f"cd {Path.cwd()} && {command}")
        return f"gcloud compute tpus tpu-vm ssh {name} --zone={zone} --worker=all --command={there}"
    return ""


def _surroundings(env: Mapping[str, str], tpu: bool) -> str:
    """The kind of plan when the user has said nothing: several processes only where a cluster says so."""
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in env for name in slurm) and env["SLURM_NTASKS"] != "1":
        return "cluster"
    if "OMPI_MCA_orte_hnp_uri" in env and env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return "cluster"
    workers = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if "JAX_COORDINATOR_ADDRESS" in env:
        return "cluster"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= env.keys() and not (tpu and workers):
        return "cluster"
    if not tpu:
        return "alone"
    if "," in (workers or "") or env.get("MEGASCALE_NUM_SLICES", "1") != "1":
        return "cluster"
    # A TPU VM keeps the list of its workers in its metadata server, which JAX asks.
    return "alone" if workers or "TPU_SKIP_MDS_QUERY" in env else "ask"


def tpu_chips(env: Mapping[str, str]) -> bool:
    """Whether this machine has TPU chips and JAX is not told to leave them alone."""
    wanted = env.get("JAX_PLATFORMS", "tpu").split(",")
    return "tpu" in wanted and any(any(Path("/dev").glob(chips)) for chips in ("accel[0-9]*", "vfio/[0-9]*"))
