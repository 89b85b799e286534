"""scripts/cloud/tpu_queued.py against a pretended gcloud that plays every state, and against the real one's parser.

The pretended one keeps a world in files: what each zone answers, and what exists there. Sleeps are counted, not slept.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLOUD = ROOT / "scripts" / "cloud"
sys.path.insert(0, str(CLOUD))

import tpu_machine  # noqa: E402
import tpu_queued  # noqa: E402

# A file of answers is read line by line; its last line stays. "INT:" before an answer sends the caller that signal
# first; without an answer after it gcloud hangs. "made:" before it: Google has the request already.
FAKE_GCLOUD = r"""#!/bin/bash
printf '%q ' "$@" >>"$FAKE/calls"; echo >>"$FAKE/calls"
for word in "$@"; do case "$word" in --zone=*) z="$FAKE/${word#--zone=}" ;; esac; done
[ -d "$z" ] || mkdir -p "$z"

next() { # FILE DEFAULT
  local line="$2" lines
  if [ -f "$1" ]; then
    mapfile -t lines <"$1"
    line="${lines[0]}"
    [ "${#lines[@]}" -le 1 ] || printf '%s\n' "${lines[@]:1}" >"$1"
  fi
  case "$line" in made:*) touch "$z/present"; line="${line#made:}" ;; esac
  case "$line" in
    INT:* | TERM:* | HUP:*)
      kill "-${line%%:*}" $PPID
      line="${line#*:}"
      [ -n "$line" ] || exec sleep 60 ;;
  esac
  answer="$line"
}
fail() { echo "ERROR: (gcloud) $1" >&2; exit 1; }
missing() { fail "NOT_FOUND: Resource 'x' was not found"; }

case "$*" in
  *"queued-resources describe"*)
    [ -f "$z/present" ] || { next "$z/absent" ""; [ -z "$answer" ] || fail "${answer#!}"; missing; }
    next "$z/now" ACTIVE
    case "$answer" in
      !*) fail "${answer#!}" ;;
      GONE) rm -f "$z/present"; missing ;;
      FAILED:*)
        echo "{\"state\": {\"state\": \"FAILED\", \"failedData\": {\"error\": {\"message\": \"${answer#*:}\"}}}}" ;;
      *) echo "{\"name\": \"x\", \"state\": {\"state\": \"$answer\"}}" ;;
    esac ;;
  *"tpu-vm describe"*)
    [ -f "$z/present" ] || [ -f "$z/orphan" ] || missing
    next "$z/node.now" READY
    [ "$answer" != GONE ] || missing
    echo "{\"state\": \"$answer\"}" ;;
  *"queued-resources create"*)
    next "$z/create" ok
    case "$answer" in !*) fail "${answer#!}" ;; esac
    touch "$z/present"
    rm -f "$z/now" "$z/node.now"
    [ ! -f "$z/states" ] || cp "$z/states" "$z/now"
    [ ! -f "$z/node" ] || cp "$z/node" "$z/node.now" ;;
  *"queued-resources delete"*)
    next "$z/delete" ok
    case "$answer" in
      !*) fail "${answer#!}" ;;
      later) printf 'DELETING\nDELETING\nGONE\n' >"$z/now" ;;
      *) rm -f "$z/present" ;;
    esac ;;
  *"tpu-vm delete"*) rm -f "$z/orphan" ;;
  *"tpu-vm scp"*) next "$FAKE/scp" 0; exit "$answer" ;;
  *"attach.sh"*" stop"*) next "$FAKE/stop" 0; exit "$answer" ;;
  *"tpu-vm ssh"*)
    next "$FAKE/ssh" 0
    case "$answer" in
      gone:*) echo PREEMPTED >"$z/node.now"; answer="${answer#*:}" ;;
      suspended:*) echo SUSPENDED >"$z/now"; answer="${answer#*:}" ;;
    esac
    exit "$answer" ;;
  *) fail "unknown command" ;;
esac
"""

DRIVER = """
import os, subprocess, sys, time
now = [0.0]
def sleep(seconds):
    assert 0 < seconds <= 900, seconds
    now[0] += seconds
    print(seconds, file=open(os.environ["FAKE"] + "/sleeps", "a"))
time.sleep, time.monotonic = sleep, lambda: now[0]
sys.path.insert(0, {cloud!r})
import tpu_machine, tpu_queued
tpu_machine.pack = lambda archive: archive.touch()
sys.exit(tpu_queued.main(sys.argv[1:]))
"""


class World:
    """What Google has, and what happened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "fake", folder / "bin"
        self.folder.mkdir()
        self.bin.mkdir()
        gcloud = self.bin / "gcloud"
        gcloud.write_text(FAKE_GCLOUD)
        gcloud.chmod(0o755)

    def says(self, place: str, *answers: str) -> World:
        """`place`: "zone/file" or a file; the answers in order, the last one for ever."""
        path = self.folder / place
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(answer + "\n" for answer in answers))
        return self

    def run(self, *options: str, zones: str = "a,b", path: str | None = None) -> World:
        words = ["--preset", "tpu-v6e-8-d24", "--durable", "gs://bucket/run", "--name", "mine", "--zones", zones]
        self.done = subprocess.run(
            [sys.executable, "-S", "-c", DRIVER.format(cloud=str(CLOUD)), *words, *options],
            env=os.environ | {"FAKE": str(self.folder), "PATH": path or f"{self.bin}:{os.environ['PATH']}"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return self

    @property
    def code(self) -> int:
        return self.done.returncode

    @property
    def said(self) -> str:
        return self.done.stderr

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def did(self) -> list[str]:
        """What was changed, in order: "create a", "scp a", "train a", "stop a", "delete a", "delete node a"."""
        found = []
        for call in self.calls:
            words = call[2:4]
            zone = next(word[7:] for word in call if word.startswith("--zone="))
            name = {
                ("queued-resources", "create"): "create", ("queued-resources", "delete"): "delete",
                ("tpu-vm", "delete"): "delete node", ("tpu-vm", "scp"): "scp", ("tpu-vm", "ssh"): "train",
            }.get(tuple(words))  # fmt: skip
            if name == "train" and call[-3].endswith(" stop"):
                name = "stop"
            if name:
                found.append(f"{name} {zone}")
        return found

    @property
    def left(self) -> list[str]:
        """What still exists, and costs money."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/present")) + sorted(
            str(path.relative_to(self.folder)) for path in self.folder.glob("*/orphan")
        )

    @property
    def sleeps(self) -> list[float]:
        path = self.folder / "sleeps"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def attempts(self) -> list[str]:
        return [command.split("../nanochat-log ")[1].split()[0] for command in self.trainings]

    @property
    def trainings(self) -> list[str]:
        """What the workers were told each time."""
        return [word for call in self.calls for word in call if word.startswith("--command=") and "train.sh" in word]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


WHOLE = ["create a", "scp a", "train a", "delete a"]


def test_the_whole_way(world) -> None:
    world.says("a/states", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE").says(
        "a/node", "CREATING", "READY"
    )
    world.run("--", "-s", "seed=1")
    assert (world.code, world.did, world.left) == (0, WHOLE, []), world.said
    create = next(call for call in world.calls if call[3] == "create")
    assert {"--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e", "--spot", "--node-id=mine"} <= set(create)
    train = next(word for call in world.calls for word in call if word.startswith("--command="))
    assert "NANOCHAT_PRESET=tpu-v6e-8-d24" in train and "NANOCHAT_DURABLE=gs://bucket/run" in train
    assert train.endswith("bash scripts/cloud/train.sh -s seed=1")
    assert all("--worker=all" in call for call in world.calls if call[3] in ("scp", "ssh"))
    assert "--force" in world.calls[world.calls.index(create) :][-3]
    assert "$4.32 an hour" in world.said and "WAITING_FOR_RESOURCES" in world.said and world.said.endswith("done\n")
    assert world.sleeps == sorted(world.sleeps) and max(world.sleeps) <= 60  # longer and longer


@pytest.mark.parametrize(
    ("place", "answers", "words"),
    [
        ("a/states", ["WAITING_FOR_RESOURCES"], "not in time"),
        ("a/states", ["ACCEPTED", "FAILED:The zone has no capacity"], "The zone has no capacity"),
        ("a/states", ["ACCEPTED", "SUSPENDING"], "SUSPENDING"),
        ("a/states", ["SUSPENDED"], "SUSPENDED"),
        ("a/states", ["PROVISIONING", "DELETING", "DELETING", "SUSPENDED"], "DELETING"),
        ("a/states", ["ACCEPTED", "GONE"], "GONE"),
        ("a/states", ["REPOSSESSING"], "REPOSSESSING, a state unknown here"),
        ("a/states", ["!503 Service Unavailable"], "503 Service Unavailable"),
        ("a/node", ["PREEMPTED"], "ACTIVE PREEMPTED"),
        ("a/create", ["!RESOURCE_EXHAUSTED: There is no more capacity in the zone"], "no more capacity"),
        ("a/create", ["!Quota limit 'TPUV6EPreemptiblePerProjectPerZone' has been exceeded"], "Quota limit"),
        ("a/create", ["!INVALID_ARGUMENT: unknown accelerator type v6e-8"], "unknown accelerator type"),
    ],
)
def test_a_zone_that_has_none_is_left_clean_for_the_next(world, place, answers, words) -> None:
    world.says(place, *answers).run()
    deletes = ["delete a"] if place != "a/create" and answers[-1] != "GONE" else []
    assert (world.code, world.left) == (0, []), world.said
    assert world.did == ["create a", *deletes, "create b", "scp b", "train b", "delete b"]
    assert words in world.said and sum(world.sleeps) < 3600


def test_nothing_is_asked_for_elsewhere_while_something_may_still_be_there(world) -> None:
    world.says("a/states", "PROVISIONING", "DELETING").run()
    assert world.code == 3 and world.did == ["create a"] and "MAY STILL COST MONEY" in world.said


@pytest.mark.parametrize("answer", ["gone:255", "gone:1", "suspended:75", "gone:75"])
def test_a_machine_that_is_taken_away_is_deleted_and_the_next_goes_on(world, answer) -> None:
    world.says("ssh", answer, answer, "0").run()
    assert (world.code, world.left) == (0, []), world.said
    assert world.did == WHOLE * 3 and len(set(world.attempts)) == 3
    same = {what.replace(attempt, "") for what, attempt in zip(world.trainings, world.attempts, strict=True)}
    assert len(same) == 1  # the same command each time


def test_the_next_machine_may_be_in_another_zone(world) -> None:
    world.says("a/create", "ok", "!There is no more capacity").says("ssh", "gone:255", "0").run()
    assert (world.code, world.left) == (0, [])
    assert world.did == [*WHOLE, "create a", "create b", "scp b", "train b", "delete b"]


def test_machines_that_are_taken_away_again_and_again_end_it(world) -> None:
    world.says("ssh", "gone:255").run("--restarts", "2")
    assert (world.code, world.left, world.did) == (75, [], WHOLE * 3)


def test_a_stop_on_a_sound_machine_is_started_again_there(world) -> None:
    world.says("ssh", "75", "75", "0").run()
    assert (world.code, world.left) == (0, [])
    assert world.did == ["create a", *["scp a", "train a"] * 3, "delete a"] and len(set(world.attempts)) == 3


def test_a_broken_connection_is_taken_up_again(world) -> None:
    world.says("ssh", "255", "255", "0").run()
    assert (world.code, world.left) == (0, [])
    assert world.did == ["create a", *["scp a", "train a"] * 3, "delete a"]
    assert len(set(world.attempts)) == 1 and len(world.attempts) == 3  # the training goes on meanwhile
    assert World.run(world.says("ssh", "255")).code == 1 and world.left == []  # but not for ever


@pytest.mark.parametrize(("answer", "code"), [("2", 2), ("1", 1), ("137", 1)])
def test_a_training_that_fails_by_itself_is_not_repeated(world, answer, code) -> None:
    world.says("ssh", answer).run()
    assert (world.code, world.left, world.did) == (code, [], WHOLE), world.said


def test_files_that_do_not_arrive_are_sent_again(world) -> None:
    world.says("scp", "1", "1", "0").run()
    assert (world.code, world.left) == (0, []) and world.did == ["create a", *["scp a"] * 3, "train a", "delete a"]
    world.says("scp", "1").run()
    assert (world.code, world.left) == (1, [])


@pytest.mark.parametrize(
    "word", ["PERMISSION_DENIED: tpu.nodes.create", "UNAUTHENTICATED: no", "run: gcloud auth login"]
)
@pytest.mark.parametrize("place", ["a/absent", "a/create"])
def test_what_no_zone_will_allow_ends_it_at_once(world, place, word) -> None:
    world.says(place, f"!{word}").run()
    assert world.code == 2 and word in world.said and world.left == []
    assert world.did == (["create a"] if place == "a/create" else []) and world.sleeps == []


def test_no_quota_anywhere_ends_it_after_one_round(world) -> None:
    world.says("a/create", "!Quota exceeded").says("b/states", "FAILED:insufficient quota to satisfy the request").run()
    assert world.code == 2 and "no quota for v6e-8" in world.said and world.left == []
    assert world.did == ["create a", "create b", "delete b"]


def test_patience_has_an_end(world) -> None:
    world.says("a/create", "!no more capacity").says("b/states", "WAITING_FOR_RESOURCES").run("--patience", "0.7")
    assert world.code == 75 and world.left == [] and "the same command asks again" in world.said
    assert 2520 - 60 <= sum(world.sleeps) < 3600 and world.did.count("create b") == 3
    assert {30, 45} <= set(world.sleeps)  # between the rounds


def test_gcloud_that_does_not_answer_or_is_not_there(world, tmp_path) -> None:
    world.says("b/absent", "!Network is unreachable").run()
    assert (world.code, world.did) == (1, []) and "does not answer" in world.said
    (tmp_path / "empty").mkdir()
    world.run(path=str(tmp_path / "empty"))
    assert world.code == 1 and "gcloud" in world.said and "Traceback" not in world.said


# ---- deleting


def test_a_deletion_that_fails_is_tried_again(world) -> None:
    world.says("a/delete", "!INTERNAL: try again", "ok").run()
    assert (world.code, world.left) == (0, []) and world.did == [*WHOLE, "delete a"] and "INTERNAL" in world.said


def test_a_deletion_that_takes_its_time_is_waited_for(world) -> None:
    world.says("a/delete", "later").run()
    assert (world.code, world.left, world.did) == (0, [], WHOLE)


def test_what_cannot_be_deleted_is_said_with_the_command(world) -> None:
    world.says("a/delete", "!INTERNAL: no").run("--project", "p")
    assert world.code == 3 and world.left == ["a/present"] and world.did.count("delete a") == tpu_machine.DELETE_TRIES
    command = "gcloud compute tpus queued-resources delete mine --force --zone=a --project=p --quiet"
    assert "MAY STILL COST MONEY" in world.said.splitlines()[-1] and command in world.said.splitlines()[-1]


def test_a_machine_without_its_request_is_deleted_too(world) -> None:
    world.says("a/delete", "ok").says("a/orphan").run()
    assert (world.code, world.left) == (0, []) and world.did == [*WHOLE, "delete node a"]


def test_keep_leaves_it_and_says_what_it_costs(world) -> None:
    world.run("--keep")
    assert (world.code, world.left, world.did) == (0, ["a/present"], WHOLE[:3])
    assert "COSTS MONEY until: gcloud compute tpus queued-resources delete mine --force --zone=a" in world.said


# ---- started again


def test_a_request_of_an_earlier_start_is_taken_over(world) -> None:
    world.says("b/present").says("b/now", "WAITING_FOR_RESOURCES", "ACTIVE").run()
    assert (world.code, world.left, world.did) == (0, [], ["scp b", "train b", "delete b"]), world.said


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "SUSPENDING", "ACTIVE"])
def test_a_dead_request_of_an_earlier_start_is_deleted_before_anything_is_asked_for(world, state) -> None:
    world.says("a/present").says("a/now", state).says("a/node.now", "PREEMPTED").run()
    assert (world.code, world.left, world.did) == (0, [], ["delete a", *WHOLE]), world.said


def test_a_request_that_is_being_deleted_is_waited_for(world) -> None:
    world.says("a/present").says("a/now", "DELETING", "DELETING", "DELETING", "GONE").run()
    assert (world.code, world.left, world.did) == (0, [], WHOLE), world.said


# ---- stopped


@pytest.mark.parametrize(
    ("place", "did"),
    [
        ("a/absent", []),
        ("a/create", ["create a"]),
        ("a/states", ["create a", "delete a"]),
        ("a/node", ["create a", "delete a"]),
        ("scp", ["create a", "scp a", "stop a", "delete a"]),
        ("ssh", ["create a", "scp a", "train a", "stop a", "delete a"]),
    ],
)
def test_ctrl_c_in_each_phase_leaves_nothing(world, place, did) -> None:
    after = {"a/states": ["ACTIVE"], "a/node": ["READY"]}.get(place, [])
    world.says(place, "INT:", *after).run()
    assert (world.code, world.left, world.did) == (130, [], did), world.said
    assert "Traceback" not in world.said


def test_ctrl_c_after_the_request_was_made_but_before_the_answer(world) -> None:
    """gcloud is killed after Google has the request: it is looked for and deleted."""
    world.says("a/create", "made:INT:").run()
    assert (world.code, world.left, world.did) == (130, [], ["create a", "delete a"])


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 143)])
def test_every_signal_lets_the_training_save_and_deletes(world, name, code) -> None:
    world.says("ssh", f"{name}:").run()
    assert (world.code, world.left) == (code, []) and world.did[-3:] == ["train a", "stop a", "delete a"]


def test_a_second_ctrl_c_does_not_stop_the_deletion(world) -> None:
    world.says("ssh", "INT:").says("stop", "INT:0").says("a/delete", "INT:!INTERNAL", "INT:ok").run()
    assert (world.code, world.left) == (130, []), world.said


def test_ctrl_c_while_it_deletes_at_the_end(world) -> None:
    world.says("a/delete", "INT:ok").run()
    assert (world.code, world.left, world.did) == (0, [], WHOLE)


# ---- without a gcloud, and with the real one's parser


def commands(capsys, *options: str) -> list[str]:
    assert tpu_queued.main(["--durable", "gs://bucket/run", "--dry-run", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_dry_run_does_nothing_and_shows_all(world) -> None:
    world.run("--dry-run")
    assert world.code == 0 and world.calls == [] and "$4.32 an hour" in world.said and "idle" in world.said
    assert [line.split()[4] for line in world.done.stdout.splitlines()] == ["create", "create", "scp", "ssh", "delete"]


TPU_PRESETS = [name for name, config in tpu_queued.PRESETS.items() if config.target.kind == "tpu"]
# Chips that JAX counts, by Google's name: v5p is counted in cores, two a chip.
CHIPS = {"v6e-8": ("v6e", 8), "v6e-64": ("v6e", 64), "v5litepod-8": ("v5e", 8), "v5p-16": ("v5p", 8)}


@pytest.mark.parametrize("name", TPU_PRESETS)
def test_the_machine_is_the_presets(capsys, name) -> None:
    create = commands(capsys, "--preset", name)[0]
    found = next(word.partition("=")[2] for word in shlex.split(create) if word.startswith("--accelerator-type"))
    target = tpu_queued.preset(name).target
    assert CHIPS[found] == (target.chip, target.devices)


def test_every_command_is_gclouds(capsys, tmp_path) -> None:
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    lines = commands(capsys, "--preset", "tpu-v6e-8-d24", "--project", "p", "--zones", "us-east5-b", "--on-demand")
    lines += commands(capsys, "--preset", "tpu-v5p-8-d24", "--zones", "us-east5-a")
    args = tpu_queued.options().parse_args(["--preset", "tpu-v5e-8-d20", "--durable", "x", "--name", "n"])
    machine = tpu_machine.Machine(args, tpu_queued.preset(args.preset).target)
    machine.zone = "us-west4-a"
    for kind in ("queued-resources", "tpu-vm"):
        lines.append(shlex.join(machine.command(kind, "describe", "n", "--format=json")))
    lines += [shlex.join(machine.command("tpu-vm", "delete", "n")), shlex.join(machine.on_workers("x stop"))]
    wrong = "gcloud compute tpus queued-resources create n --zone=a --frobnicate"
    (tmp_path / "commands.json").write_text(json.dumps([{"command_string": line} for line in (*lines, wrong)]))
    done = subprocess.run(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={tmp_path}/commands.json"],
        capture_output=True, text=True, env=os.environ | {"CLOUDSDK_CONFIG": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    results = json.loads(done.stdout)
    assert len(results) == len(lines) + 1 and not results[-1]["success"]
    for result in results[:-1]:
        assert result["success"], result["error_message"]


def test_what_is_sent_is_what_git_lists(tmp_path) -> None:
    tpu_machine.pack(tmp_path / "x.tgz")
    with tarfile.open(tmp_path / "x.tgz") as tar:
        names = set(tar.getnames())
    assert {"pyproject.toml", "scripts/setup.sh", "scripts/cloud/train.sh", "nanochat_lib/cli.py"} <= names
    assert not any(name.startswith((".git/", ".venv/", "runs/")) for name in names)
