"""A TPU from Google Cloud's queue: one request and the machine that comes of it, in one zone after another.

States and codes are those of gcloud 528 and the Cloud TPU API v2. What is unknown here counts as waiting, for a bounded
time; what was asked for is deleted before anything else is asked for.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanochat_lib.presets import Target  # noqa: E402

# By chip: the type's name for n chips, the image, and zones that offer it to everybody (Google's list of 2025; others
# with --zones). v5p is counted in cores, two a chip: eight chips are a v5p-16.
TYPES = {
    "v5e": (lambda n: f"v5litepod-{n}", "v2-alpha-tpuv5-lite", "us-central1-a us-south1-a us-west1-c us-west4-a"),
    "v5p": (lambda n: f"v5p-{2 * n}", "v2-alpha-tpuv5", "us-east5-a us-central1-a europe-west4-b"),
    "v6e": (
        lambda n: f"v6e-{n}", "v2-alpha-tpuv6e",
        "us-east5-b us-east5-a us-east1-d us-central1-b europe-west4-a asia-northeast1-b",
    ),
}  # fmt: skip
WAITING = ("CREATING", "ACCEPTED", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED")
OVER = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")  # nothing comes of it, and it is in the way until deleted
LOST = ("PREEMPTED", "TERMINATED", "STOPPING", "STOPPED", "DELETING", "HIDING", "HIDDEN", "GONE")  # a node, for good
NEVER = ("PERMISSION_DENIED", "UNAUTHENTICATED", "SERVICE_DISABLED", "BILLING_DISABLED", "gcloud auth login")
DELETE_TRIES, REACH_TRIES, LOOKS = 6, 8, 4  # LOOKS: at a machine whose training broke off, before it counts as sound
SAVE_SECONDS = 240.0
LOG = "../nanochat-log"  # on the machine


class Stop(Exception):
    """The end, with an exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def say(text: str) -> None:
    print(f"tpu: {text}", file=sys.stderr, flush=True)


def pauses(first: float = 10.0, longest: float = 60.0) -> Iterator[float]:
    """Seconds between looks, longer and longer."""
    while True:
        yield first
        first = min(first * 1.5, longest)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


class Machine:
    """One request for a TPU and the node that comes of it, both under one name, in one zone after another."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        kind, self.image, zones = TYPES[target.chip]
        self.args, self.name, self.type = args, args.name, kind(target.devices)
        self.zones = (args.zones or zones).replace(",", " ").split()
        self.zone = ""
        self.asked = False  # something of ours may be there
        self.no_quota: set[str] = set()  # zones
        self.attempt = ""  # of the training that may run
        self.leaving = False  # gcloud is then kept from the terminal's Ctrl-C
        self.starting, self.pending = False, 0  # gcloud is being started; the signal that came meanwhile

    # ---- what gcloud is told --------------------------------------------------------------------------------------

    def command(self, *words: str) -> list[str]:
        project = [f"--project={self.args.project}"] if self.args.project else []
        return ["gcloud", "compute", "tpus", *words, f"--zone={self.zone}", *project, "--quiet"]

    def create(self) -> list[str]:
        return self.command(
            "queued-resources", "create", self.name, f"--node-id={self.name}", f"--accelerator-type={self.type}",
            f"--runtime-version={self.image}", "--async", *([] if self.args.on_demand else ["--spot"]),
        )  # fmt: skip

    def delete(self) -> list[str]:
        return self.command("queued-resources", "delete", self.name, "--force")

    def copy(self, archive: Path) -> list[str]:
        return self.command("tpu-vm", "scp", str(archive), f"{self.name}:nanochat.tgz", "--worker=all")

    def on_workers(self, what: str) -> list[str]:
        return self.command("tpu-vm", "ssh", self.name, "--worker=all", f"--command={what}")

    def training(self) -> str:
        """What each worker is told to do; told again while it runs, it shows how it goes on."""
        args = self.args
        values = {
            "NANOCHAT_PRESET": args.preset, "NANOCHAT_DURABLE": args.durable, "NANOCHAT_EXTRAS": "tpu store",
            "NANOCHAT_STAGES": args.stages, "NANOCHAT_SHARDS": args.shards, "NANOCHAT_SHARED": args.shared,
            "NANOCHAT_RUN_DIR": f"/mnt/nanochat/{self.name}" if args.shared else "",
            "NANOCHAT_SPOT": "" if args.on_demand else "1", "TPU_NAME": self.name, "ZONE": self.zone,
        }  # fmt: skip
        given = shlex.join(["env", *(f"{name}={value}" for name, value in values.items() if value)])
        train = shlex.join(["bash", "scripts/cloud/train.sh", *args.settings])
        unpack = "mkdir -p nanochat && tar xzf nanochat.tgz -C nanochat && cd nanochat"
        return f"{unpack} && bash scripts/cloud/attach.sh {LOG} {self.attempt} {given} {train}"

    def run(self, command: list[str], show: bool = False, limit: float | None = None) -> subprocess.CompletedProcess:
        """Runs gcloud for `limit` seconds at most; what it prints is kept, or shown as it comes."""
        kept = None if show else subprocess.PIPE
        self.starting = True  # a signal now would leave gcloud running without us
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=kept, stderr=kept, text=True, start_new_session=self.leaving
            )
        finally:
            self.starting = False
        try:
            if self.pending:
                signal.raise_signal(self.pending)
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return subprocess.CompletedProcess(command, 255, "", f"no answer in {limit:g} s")
        except BaseException:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out or "", err or "")

    # ---- how things stand -----------------------------------------------------------------------------------------

    def look(self, kind: str) -> dict:
        """What gcloud knows of the request or the node; {"state": "GONE"} when there is none."""
        done = self.run(self.command(kind, "describe", self.name, "--format=json"))
        if done.returncode == 0:
            return json.loads(done.stdout)
        if "NOT_FOUND" in done.stderr or "not found" in done.stderr.lower():
            return {"state": "GONE"}
        self.refuse(done.stderr)
        say(f"{self.zone}: {last_line(done.stderr)}")
        return {"state": "UNREACHABLE"}

    def refuse(self, stderr: str) -> None:
        """Raises Stop when no zone will ever say yes: rights, login, billing, a service that is off."""
        for line in stderr.splitlines():
            if not self.leaving and any(word in line for word in NEVER):
                raise Stop(2, line.strip())
        if "quota" in stderr.lower():
            self.no_quota.add(self.zone)

    def request(self) -> str:
        """The state of the request: one of Google's, GONE or UNREACHABLE."""
        found = self.look("queued-resources")["state"]
        if isinstance(found, str):
            return found
        if why := found.get("failedData", {}).get("error", {}).get("message"):
            say(f"{self.zone}: {why}")
            self.refuse(why)
        return found.get("state", "STATE_UNSPECIFIED")

    def node(self) -> str:
        return self.look("tpu-vm")["state"]

    # ---- renting --------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Looks where an earlier start left a request, so that there are never two."""
        for zone in self.zones:
            self.zone = zone
            state = self.request()
            if state == "UNREACHABLE":
                raise Stop(1, "gcloud does not answer")
            if state != "GONE":
                self.asked = True
                return

    def rent(self) -> None:
        """Returns when a machine is there. Raises Stop when no zone had one in time."""
        end = time.monotonic() + 3600 * self.args.patience
        first = self.zones.index(self.zone) if self.asked else 0
        zones = self.zones[first:] + self.zones[:first]
        for pause in pauses(30, 600):
            for zone in zones:
                self.zone = zone
                if self.ask() and self.wait(min(end, time.monotonic() + 60 * self.args.zone_minutes)):
                    return
                self.give_back()
                if time.monotonic() >= end:
                    raise Stop(75, f"no machine in {self.args.patience:g} hours; the same command asks again")
            if self.no_quota >= set(zones):
                raise Stop(2, f"no quota for {self.type} in any of these zones; ask Google for it, or name --zones")
            say(f"no zone has a {self.type}; asking again in {pause:.0f} s")
            time.sleep(pause)

    def ask(self) -> bool:
        """Makes the request, or takes over the one that is there. False when this zone refuses."""
        state = self.request()
        if state in OVER or state == "ACTIVE" and self.node() in LOST:  # the node was taken away
            say(f"{self.zone}: an old request is in the way ({state})")
            self.give_back()
        elif state != "GONE":
            say(f"{self.zone}: the request {self.name} is there already ({state})")
            return True
        self.asked = True
        done = self.run(self.create())
        if done.returncode == 0:
            say(f"{self.zone}: asked for a {self.type}{'' if self.args.on_demand else ' (spot)'}")
            return True
        say(f"{self.zone}: {last_line(done.stderr)}")  # no quota, no such type, no capacity: the next zone
        self.refuse(done.stderr)
        return False

    def wait(self, end: float) -> bool:
        """Waits for the machine. False when it does not come to this zone in time."""
        shown = ""
        for pause in pauses():
            state = self.request()
            node = self.node() if state == "ACTIVE" else ""
            if shown != (shown := f"{state} {node}".strip()):
                known = state in (*WAITING, *OVER, "ACTIVE", "GONE", "UNREACHABLE")
                say(f"{self.zone}: {shown}{'' if known else ', a state unknown here; waiting'}")
            if node == "READY":
                return True
            if state in OVER or state == "GONE" or node in LOST:
                return False
            if time.monotonic() + pause > end:
                say(f"{self.zone}: not in time")
                return False
            time.sleep(pause)
        raise AssertionError

    def give_back(self) -> None:
        """Deletes the request and its node and looks that they are gone. Raises Stop when they are not."""
        self.attempt = ""
        if not self.asked:
            return
        for _, pause in zip(range(DELETE_TRIES), pauses(5), strict=False):
            state = self.request()
            if state == "GONE" and self.node() == "GONE":
                self.asked = False
                return
            if state != "DELETING":
                say(f"{self.zone}: deleting {self.name}")
                by_itself = state == "GONE"  # a node without its request
                command = self.command("tpu-vm", "delete", self.name) if by_itself else self.delete()
                if (done := self.run(command)).returncode:
                    say(f"{self.zone}: {last_line(done.stderr)}")
                    time.sleep(pause)
            else:
                time.sleep(pause)
        raise Stop(3, f"NOT DELETED, MAY STILL COST MONEY; delete it by hand: {shlex.join(self.delete())}")

    # ---- training -------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """The project's files and the training, on all workers; the exit code of the first worker that failed."""
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "nanochat.tgz"
            pack(archive)
            for _, pause in zip(range(REACH_TRIES), pauses(), strict=False):
                if self.run(self.copy(archive), show=True).returncode == 0:
                    return self.run(self.on_workers(self.training()), show=True).returncode
                if self.node() in LOST:
                    break
                time.sleep(pause)  # it has only just started
        return 255

    def lost(self) -> bool:
        """Whether the machine was taken away; that is not seen at once."""
        for _, pause in zip(range(LOOKS), pauses(15), strict=False):
            if self.node() in LOST or self.request() in (*OVER, "GONE"):
                return True
            time.sleep(pause)
        return False

    def stop_training(self) -> None:
        """Lets a training that still runs save, for two minutes at most."""
        if self.attempt:
            say("letting the training save before the machine is deleted")
            self.run(self.on_workers(f"cd nanochat && bash scripts/cloud/attach.sh {LOG} stop"), limit=SAVE_SECONDS)


def pack(archive: Path) -> None:
    """The project's files as git lists them, with uncommitted changes and new files."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            if name and (ROOT / name).is_file():
                tar.add(ROOT / name, arcname=name)
