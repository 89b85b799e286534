"""The end of a command: status.json's last word, and a machine that is switched off, or is not.

Nothing real is ever switched off: every command here runs with a PATH that holds nothing but fakes.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanochat_lib import cli, finish, status
from nanochat_lib.errors import InUse, UserError
from nanochat_lib.finish import Stalled, finishing
from nanochat_lib.preempted import Interrupted, Preempted
from nanochat_lib.presets import OpsConfig, override, preset, to_dict
from nanochat_lib.storage import atomic_write_json

OFF = OpsConfig(on_finish="shutdown", finish_seconds=0.01)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A function that says what would have been switched off, and how."""
    fakes, log = tmp_path / "fakes", tmp_path / "log"
    fakes.mkdir()
    for name in ("shutdown", "sudo", "sky"):
        (fakes / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{log}"\nexit 0\n')
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(fakes))
    assert shutil.which("shutdown") == str(fakes / "shutdown") and shutil.which("systemctl") is None
    monkeypatch.delenv("NANOCHAT_SHUTDOWN", raising=False)
    monkeypatch.setattr(finish.os, "geteuid", lambda: 0)
    return lambda: log.read_text().splitlines() if log.exists() else []


def end(folder, error=None, ops=OFF, opened=True):
    try:
        with finishing(folder, ops) as ending:
            ending.opened = opened
            if error:
                raise error
    except BaseException as found:
        assert found is error


CASES = [
    (None, "done", ["shutdown -h now"]),
    (UserError("the loss is nan"), "failed", ["shutdown -h now"]),
    (OSError(28, "No space left on device", "/x"), "failed", ["shutdown -h now"]),
    (MemoryError(), "failed", ["shutdown -h now"]),
    (Stalled("pretrain: stalled"), "running", ["shutdown -h now"]),  # the stalled process itself has written so
    (Preempted("stopped by SIGTERM"), "preempted", []),
    (Interrupted("stopped by Ctrl-C"), "preempted", []),
    (KeyboardInterrupt(), "preempted", []),
]


@pytest.mark.parametrize(("error", "state", "off"), CASES)
def test_what_is_written_and_when_the_machine_is_switched_off(tmp_path, machine, error, state, off, capsys):
    status.Status(tmp_path).write("running", stage="rl", step=4, of=9)
    end(tmp_path, error)
    found = status.read(tmp_path)
    assert (found["state"], found["stage"], found["step"], found["of"]) == (state, "rl", 4, 9)
    assert machine() == off
    said = capsys.readouterr().err
    assert ("is switched off in 0:00 by `shutdown -h now`; Ctrl-C here, or kill " in said) == bool(off)
    end(tmp_path, error, OpsConfig())  # nobody asked for it
    assert machine() == off


def test_a_run_that_could_not_be_opened_is_not_written_to(tmp_path, machine):
    status.Status(tmp_path).write("done", stage="rl")
    end(tmp_path, UserError("another configuration"), opened=False)
    assert status.read(tmp_path)["state"] == "done" and machine() == ["shutdown -h now"]  # an idle machine bills
    end(tmp_path, InUse("in use by another run"), opened=False)
    assert len(machine()) == 1  # that run goes on on this machine


def test_the_command_can_be_named_and_is_given_to_no_shell(tmp_path, machine, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_SHUTDOWN", "sky down -y 'my run' ; rm")
    end(tmp_path)
    assert machine() == ["sky down -y my run ; rm"]
    monkeypatch.setattr(finish, "first", lambda: False)
    end(tmp_path)
    assert len(machine()) == 1  # one process of several is enough
    end(tmp_path, UserError("this one failed"))
    assert len(machine()) == 2


def test_a_user_without_rights_asks_sudo(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(finish.os, "geteuid", lambda: 1000)
    end(tmp_path)
    assert machine() == ["sudo -n shutdown -h now"]
    (tmp_path / "fakes/sudo").unlink()
    assert finish.off_command() == ["shutdown", "-h", "now"]


@pytest.mark.parametrize("broken", ["#!/bin/sh\necho 'not permitted' >&2\nexit 3\n", None])
def test_a_command_that_fails_says_that_the_machine_is_still_on(tmp_path, machine, broken, capsys):
    fake = tmp_path / "fakes/shutdown"
    fake.write_text(broken) if broken else fake.unlink()
    end(tmp_path)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("nanochat: `shutdown -h now` failed, the machine is still on: ")
    assert said.endswith("not permitted" if broken else "No such file or directory: 'shutdown'")


def test_ctrl_c_in_the_delay_keeps_the_machine(tmp_path, machine, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background may be deaf to it
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    end(tmp_path, ops=OpsConfig(on_finish="shutdown", finish_seconds=30.0))
    signal.signal(signal.SIGINT, before)
    assert machine() == [] and "the machine stays on" in capsys.readouterr().err
    assert status.read(tmp_path)["state"] == "done"


# ---- the command line


def config_of(line, tmp_path):
    return cli.run_config(cli.build_parser().parse_args(line.split()))


@pytest.mark.parametrize("command", ["run", "tokenizer", "pretrain", "sft", "rl", "eval"])
def test_it_is_asked_for_at_each_start(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert config_of(f"{command} --on-finish shutdown", tmp_path).ops.on_finish == "shutdown"
    assert config_of(f"{command} -s ops.on_finish=shutdown", tmp_path).ops.on_finish == "shutdown"
    saved = override(preset("cpu-smoke"), {"ops.on_finish": "shutdown", "ops.grace_seconds": 9.0})
    atomic_write_json(tmp_path / "r/config.json", to_dict(saved))
    found = config_of(f"{command} --run-dir r", tmp_path)
    assert found.ops.on_finish == "stay" and found.ops.grace_seconds == 9.0


def test_help_says_when(capsys):
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "never after Ctrl-C or SIGTERM" in said and "NANOCHAT_SHUTDOWN" in said and "two minutes" in said


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Preempted("pretrain: stopped by SIGTERM after step 5, which is saved"), 75, "after step 5, which is saved"),
        (Interrupted(), 130, "stopped by Ctrl-C; the same command goes on"),
        (Stalled("pretrain: stalled"), 75, "pretrain: stalled"),
        (UserError("no"), 2, "nanochat: no"),
    ],
)
def test_exit_codes(error, code, line, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "presets", (fail, *cli.COMMANDS["presets"][1:]))
    assert cli.main(["presets"]) == code
    assert line in capsys.readouterr().err


def test_sigterm_while_the_command_itself_is_loading():
    root = Path(cli.__file__).parents[1]
    code = (
        "import sys, time, os\nfrom nanochat_lib import cli, pipeline\n"
        "pipeline.open_run = lambda *a, **o: (print('here', flush=True), time.sleep(60))\n"
        "sys.argv = ['nanochat', 'pretrain', '--run-dir', '/nonexistent/x']\nsys.exit(cli.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 75 and "nanochat: stopped by SIGTERM; the same command goes on" in said, said
    finally:
        process.kill()
