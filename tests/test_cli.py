"""The command line: help with examples, one line an error, exit codes, and what each command calls."""

import errno
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nanochat_lib import __version__
from nanochat_lib.cli import COMMANDS, build_parser, main
from nanochat_lib.errors import UserError
from nanochat_lib.presets import PRESETS, flatten, override, preset, to_dict

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def call(capsys, *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command."""
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def one_line(err: str) -> str:
    assert err.startswith("nanochat: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


@pytest.fixture
def pipeline(monkeypatch) -> list:
    """Stands in for the modules that do the work; returns the list of calls."""
    calls: list = []

    class Run:
        def __getattr__(self, name: str):
            return lambda: calls.append(name) or types.SimpleNamespace(figures={"steps": 7})

    def open_run(run_dir, config):
        calls.append(("open_run", str(run_dir), config))
        return Run()

    def record(name):
        return lambda *args, **options: calls.append((name, args, options))

    module = types.ModuleType("nanochat_lib.pipeline")
    module.open_run, module.open_chat = open_run, record("open_chat")
    module.default_run_dir = lambda config: Path("runs") / config.preset
    capstone = types.ModuleType("nanochat_lib.capstone")
    capstone.run_capstone = lambda config, run_dir, mine: calls.append(
        ("run_capstone", str(run_dir), config, *([mine] if mine else []))
    )
    build = types.ModuleType("nanochat_lib.course.build")
    build.build = lambda check: calls.append(("build", check)) or [Path("chapters/12_capstone.py")]
    for name, stub in (("pipeline", module), ("capstone", capstone), ("course.build", build)):
        monkeypatch.setitem(sys.modules, f"nanochat_lib.{name}", stub)
    return calls


# --- Help -------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys) -> None:
    code, out, err = call(capsys, "--help")
    assert code == 0 and err == "" and "example: nanochat run" in out
    for name, (_, _, about, _) in COMMANDS.items():
        assert re.search(rf"^    {name} +{re.escape(about)}$", out, re.MULTILINE), name
    assert list(COMMANDS) == [
        "run", "presets", "doctor", "data", "tokenizer", "pretrain", "mid", "sft", "rl", "eval", "chat", "serve",
        "report", "preflight", "plan", "convert", "course", "grade",
    ]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_parses(name: str, capsys) -> None:
    code, out, err = call(capsys, name, "--help")
    assert code == 0 and err == ""
    example = re.search(r"^example: nanochat (.+)$", out, re.MULTILINE).group(1)
    assert example.split()[0] == name
    assert build_parser().parse_args(shlex.split(example)).function is COMMANDS[name][0]
    for option in re.findall(r"^  -.*$", out, re.MULTILINE):
        assert re.search(r"\S {2,}\S", option.strip()), f"{option} says nothing"
    assert "==SUPPRESS==" not in out


@pytest.mark.parametrize("name", ["course", "grade"])
def test_every_action_has_help_with_an_example_that_parses(name: str, capsys) -> None:
    _, out, _ = call(capsys, name, "--help")
    actions = re.findall(r"^    ([a-z-]+)(?: {2,}|$)", out, re.MULTILINE)
    assert len(actions) > 9
    for action in actions:
        code, out, _ = call(capsys, name, action, "--help")
        example = re.search(rf"^example: nanochat ({name} {action}\b.*)$", out, re.MULTILINE)
        assert code == 0 and example, action
        assert build_parser().parse_args(shlex.split(example[1])).function is COMMANDS[name][0]


def test_version(capsys) -> None:
    assert call(capsys, "--version")[:2] == (0, f"nanochat {__version__}\n")


def test_as_a_module_and_its_exit_code() -> None:
    command = [sys.executable, "-m", "nanochat_lib", "presets"]
    good = subprocess.run([*command, "cpu"], capture_output=True, text=True, check=False)
    assert good.returncode == 0 and "pretrain.steps = " in good.stdout and good.stderr == ""
    bad = subprocess.run([*command, "cpuu"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and bad.stdout == "" and "did you mean cpu?" in one_line(bad.stderr)


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m nanochat_lib presets cpu | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


# --- Mistakes in the input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "COMMAND"),
        ("pretrian", "pretrain"),
        ("run --nosuch 1", "--nosuch"),
        ("run --pre cpu", "--pre"),
        ("run --seed one", "invalid int value: 'one'"),
        ("run --seed", "expected one argument"),
        ("run extra", "extra"),
        ("eval --stage rl", "invalid choice: 'rl'"),
        ("course", "ACTION"),
        ("run --preset cpuu", "unknown preset 'cpuu'; did you mean cpu?"),
        ("run -s pretrain.steps", "has no value; write it as name=value"),
        ("run -s pretrain.step=1", "did you mean pretrain.steps?"),
        ("run -s pretrain.steps=many", "pretrain.steps must be int, got 'many'"),
        ("run -s pretrain.batch_tokens=100", "use 2,048 or 4,096"),
        ("run -s =5", "unknown setting ''"),
        ("pretrain --preset cpuu", "unknown preset"),
        ("presets nosuch", "unknown preset 'nosuch'"),
    ],
)
def test_one_line_and_exit_code_2(argv: str, words: str, capsys, pipeline) -> None:
    code, out, err = call(capsys, *shlex.split(argv))
    assert code == 2 and out == "" and words in one_line(err)
    assert pipeline == []  # nothing was begun


def fail_with(monkeypatch, error: BaseException) -> None:
    def fail(config, run_dir, mine):
        raise error

    module = types.ModuleType("nanochat_lib.capstone")
    module.run_capstone = fail
    monkeypatch.setitem(sys.modules, "nanochat_lib.capstone", module)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("corpus x is empty; add text"), 2, "nanochat: corpus x is empty; add text\n"),
        (ValueError("bad\nsecond line"), 1, "nanochat: ValueError: bad; --debug shows where\n"),
        (RuntimeError("\n\n  deep\n"), 1, "nanochat: RuntimeError: deep; --debug shows where\n"),
        (KeyError(), 1, "nanochat: KeyError: ; --debug shows where\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x/a"), 1,
            "nanochat: No space left on device: runs/x/a; free some space or choose another --run-dir\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/ro"), 1,
            "nanochat: Read-only file system: /ro; choose a --run-dir that can be written\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"), 1,
            "nanochat: Permission denied: /x; choose a --run-dir that you may write, or change the permissions\n",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "t.txt"), 1,
         "nanochat: No such file or directory: t.txt; check the path\n"),
        (OSError("odd"), 1, "nanochat: OSError: odd; --debug shows where\n"),
        (MemoryError(), 1, "nanochat: MemoryError: ; --debug shows where\n"),
    ],
)  # fmt: skip
def test_any_failure_is_one_line(error, code: int, line: str, monkeypatch, capsys, pipeline) -> None:
    fail_with(monkeypatch, error)
    assert call(capsys, "run") == (code, "", line)


@pytest.mark.parametrize("argv", ["run --debug", "--debug run"])
def test_debug_shows_the_traceback_and_then_the_line(argv: str, monkeypatch, capsys, pipeline) -> None:
    fail_with(monkeypatch, UserError("no"))
    code, _, err = call(capsys, *argv.split())
    assert code == 2 and err.startswith("Traceback") and err.endswith("nanochat: no\n")


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, pipeline) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    code, out, err = call(capsys, "run")
    assert code == 130 and out == "" and "continues" in one_line(err.lstrip("\n"))


# --- What each command calls ------------------------------------------------------------------------------------------


def test_run_takes_everything_from_its_options(capsys, pipeline) -> None:
    argv = (
        "run --preset cpu-smoke --run-dir 'my runs/x' --seed 4 --corpus 'a texts' "
        "-s pretrain.steps=7 --set rl.top_k=5 -s sft.words=a=b"
    )
    code, *_ = call(capsys, *shlex.split(argv))
    changes = {"seed": 4, "data.corpus": "a texts", "pretrain.steps": 7, "rl.top_k": 5, "sft.words": "a=b"}
    assert code == 0
    assert pipeline == [("run_capstone", "my runs/x", override(preset("cpu-smoke"), changes))]


def test_run_alone_is_the_default_preset(capsys, pipeline) -> None:
    assert call(capsys, "run")[0] == 0
    assert pipeline == [("run_capstone", "runs/cpu", preset("cpu"))]


def test_a_begun_run_continues_with_its_own_configuration(tmp_path, capsys, pipeline) -> None:
    begun = override(preset("cpu-smoke"), {"seed": 5, "pretrain.steps": 12})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(to_dict(begun)))
    call(capsys, "run", "--run-dir", "mine")
    call(capsys, "sft", "--run-dir", "mine", "-s", "sft.steps=3")
    call(capsys, "run", "--run-dir", "mine", "--preset", "cpu")
    assert pipeline == [
        ("run_capstone", "mine", begun),
        ("open_run", "mine", override(begun, {"sft.steps": 3})),
        "sft",
        ("run_capstone", "mine", preset("cpu")),  # the pipeline refuses it, for it knows what is there
    ]


def test_a_broken_config_is_one_line(tmp_path, capsys, pipeline) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text('{"preset": ')
    code, _, err = call(capsys, "run", "--run-dir", "mine")
    assert code == 2 and "config.json" in one_line(err) and pipeline == []


@pytest.mark.parametrize(
    ("argv", "stages"),
    [
        ("tokenizer", ["tokenizer"]),
        ("pretrain", ["pretrain"]),
        ("sft", ["sft"]),
        ("rl", ["rl"]),
        ("eval", ["eval_base", "eval_chat"]),
        ("eval --stage base", ["eval_base"]),
        ("eval --stage chat", ["eval_chat"]),
    ],
)
def test_stage_commands(argv: str, stages: list[str], capsys, pipeline) -> None:
    code, out, _ = call(capsys, *argv.split(), "--preset", "cpu-smoke", "--seed", "2")
    assert code == 0 and out.count("optimiser steps") == len(stages)  # what a stage found is shown
    assert pipeline == [("open_run", "runs/cpu-smoke", override(preset("cpu-smoke"), {"seed": 2})), *stages]


def test_report_never_makes_a_run(tmp_path, capsys, pipeline) -> None:
    code, _, err = call(capsys, "report", "--run-dir", "typo")
    assert code == 2 and "typo" in one_line(err) and pipeline == [] and not (tmp_path / "typo").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(to_dict(preset("cpu"))))
    code, out, _ = call(capsys, "report", "--run-dir", "mine")
    assert code == 0 and out.strip() == "mine/report.html" and (tmp_path / "mine/report.html").exists()


def test_chat(capsys, pipeline) -> None:
    assert call(capsys, "chat")[0] == 0
    argv = shlex.split("chat --run-dir 'a b' --stage sft -p 'Hi there' --temperature 0 --top-k 5 --top-p 0.5")
    assert call(capsys, *argv)[0] == 0
    options = {
        "stage": None,
        "prompt": None,
        "temperature": 0.6,
        "top_k": 50,
        "top_p": None,
        "max_tokens": 256,
        "seed": 0,
    }
    given = options | {"stage": "sft", "prompt": "Hi there", "temperature": 0.0, "top_k": 5, "top_p": 0.5}
    assert pipeline == [("open_chat", ("runs/cpu",), options), ("open_chat", ("a b",), given)]


def test_course_build(capsys, pipeline) -> None:
    assert call(capsys, "course", "build") == (0, "wrote chapters/12_capstone.py\n", "")
    assert call(capsys, "course", "build", "--check")[0] == 0
    assert pipeline == [("build", False), ("build", True)]


def test_presets_prints_names_sizes_and_settings(capsys) -> None:
    code, out, _ = call(capsys, "presets")
    assert code == 0 and len(out.splitlines()) == len(PRESETS) and "286.3M parameters" in out
    code, out, _ = call(capsys, "presets", "cpu", "--json")
    assert code == 0 and json.loads(out) == to_dict(preset("cpu"))
    code, out, _ = call(capsys, "presets", "--json")
    assert code == 0 and json.loads(out)["cpu"] == to_dict(preset("cpu"))
    code, out, _ = call(capsys, "presets", "cpu")
    assert set(re.findall(r"^(\S+) = ", out, re.MULTILINE)) == set(flatten(preset("cpu")))


def test_the_exit_code_is_the_commands(monkeypatch, capsys) -> None:
    import nanochat_lib.doctor

    monkeypatch.setattr(nanochat_lib.doctor, "print_diagnosis", lambda default, as_json: 1 if as_json else 0)
    assert call(capsys, "doctor")[0] == 0
    assert call(capsys, "doctor", "--json")[0] == 1


# --- The README promises what is there --------------------------------------------------------------------------------


def commands_in(name: str) -> list[str]:
    """Lines of the shell blocks, and commands in running text; of a chapter's source, in its text cells."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines() if line[:1] == "#")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " ")
    lines += re.findall(r"`((?:nanochat|bash|\.venv/bin/nanochat)\s[^`]+)`", prose)
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "solutions/12_capstone.py"])
def test_documented_commands_exist(name: str) -> None:
    found = commands_in(name)
    assert found
    for line in found:
        words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[0] == "bash":
            assert (ROOT / words[1]).is_file(), line
            if words[1].endswith("capstone.sh") and len(words) > 2:
                build_parser().parse_args(["run", "--preset", *words[2:]])
                preset(words[2])
        elif words[0].endswith("nanochat"):
            words = ["cpu" if word == "NAME" else word for word in words[1:]]
            if "--help" not in words:
                build_parser().parse_args(words)
        else:
            assert words[0] in (".venv/bin/ruff", ".venv/bin/python", "python3", ".venv-tpu/bin/pip"), line
            assert not words[0].endswith("python") or (ROOT / words[1]).is_file(), line


def test_the_readme_has_every_preset_and_no_unfinished_word() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in PRESETS:
        assert f"`{name}`" in text
    for word in ("TODO", "FIXME", "TBD", "XXX", "coming soon", "placeholder"):
        assert word.lower() not in text.lower()
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (ROOT / path).exists(), path
