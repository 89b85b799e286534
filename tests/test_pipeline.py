"""A run's folder: what is refused before anything is spent, and what a second start reuses."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_lib import pipeline, presets, run_folder
from nanochat_lib.errors import UserError
from nanochat_lib.pipeline import open_run
from nanochat_lib.storage import read_json

SMOKE = presets.preset("cpu-smoke")


def one_line(excinfo, *words):
    text = str(excinfo.value)
    assert "\n" not in text, text
    for word in words:
        assert word in text, text


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_text(
        "\n\n".join(f"This is document number {i} about {i * 7} things and more words." for i in range(200))
    )
    return path


def test_a_run_of_another_configuration_is_refused_and_left_alone(tmp_path):
    open_run(tmp_path / "r", SMOKE).close()
    before = (tmp_path / "r" / "config.json").read_bytes()
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", presets.override(SMOKE, {"pretrain.steps": 21}))
    one_line(e, "pretrain.steps 20 (asked for 21)", "another --run-dir")
    assert (tmp_path / "r" / "config.json").read_bytes() == before
    open_run(tmp_path / "r", SMOKE).close()  # the same one is welcome


def test_a_folder_in_use_is_refused(tmp_path):
    run = open_run(tmp_path / "r", SMOKE)
    program = (
        "import sys; from nanochat_lib import pipeline, presets\n"
        f"pipeline.open_run({str(tmp_path / 'r')!r}, presets.preset('cpu-smoke'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode and "is in use by another run" in done.stderr
    run.close()
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_a_nearly_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "free_bytes", lambda path: 5 * 2**20)
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", SMOKE)
    one_line(e, "5 MB of disk are free", "300 MB", "--run-dir")
    assert not (tmp_path / "r" / "config.json").exists()


def test_a_read_only_place_is_refused(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", SMOKE)
    one_line(e, "cannot be written (Read-only file system)", "--run-dir")


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "r").write_text("mine")
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", SMOKE)
    one_line(e, "cannot be written")
    assert (tmp_path / "r").read_text() == "mine"


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("gpu-1-d12", {}, ("is for 1 × any gpu, JAX sees cpu here",)),
        ("tpu-v6e-8-d24", {}, ("8 × v6e tpu",)),
    ],
)
def test_what_cannot_run_here_is_said_at_once(tmp_path, preset, changes, words):
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", presets.override(presets.preset(preset), changes))
    one_line(e, *words)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        ("rl", {"rl.task": "gsm8k"}, ("rl.task gsm8k needs", "run `nanochat data get gsm8k`")),
        ("sft", {"sft.mixture": "nanochat"}, ("sft.mixture nanochat", "run `nanochat data get smoltalk mmlu gsm8k`")),
        ("sft", {"mid.mixture": "nanochat"}, ("mid.mixture nanochat", "run `nanochat data get smoltalk mmlu gsm8k`")),
        ("rl", {"rl.reward": "short"}, ("rl.reward: unknown function 'short'", "did you mean format?")),
    ],
)
def test_a_chat_stage_without_data_is_refused_before_anything_is_spent(tmp_path, monkeypatch, stage, changes, words):
    from nanochat_lib.capstone import run_capstone

    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "data"))
    config = presets.override(SMOKE, changes)
    with pytest.raises(UserError) as e:
        run_capstone(config, tmp_path / "whole")
    one_line(e, *words)
    assert not (tmp_path / "whole").exists()
    run = open_run(tmp_path / "r", config)  # the stages before it can be run
    with pytest.raises(UserError) as e:
        getattr(run, stage)()
    one_line(e, *words)
    run.close()
    assert not (tmp_path / "r" / "stages").exists()


def test_a_corrupt_configuration_file_is_named(tmp_path):
    open_run(tmp_path / "r", SMOKE).close()
    (tmp_path / "r" / "config.json").write_text('{"preset": "cpu-sm')
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", SMOKE)
    one_line(e, "config.json")


def small(corpus, **more):
    return presets.override(SMOKE, {"data.corpus": str(corpus), "tokenizer.vocab_size": 280, **more})


def test_a_stage_runs_once_and_is_reused(tmp_path, text, capsys):
    run = open_run(tmp_path / "r", small(text))
    first = run.tokenizer()
    assert not first.reused and first.figures["vocab_size"] == 280 and first.figures["peak_memory_gb"] > 0.01
    run.close()
    again = open_run(tmp_path / "r", small(text)).tokenizer()
    assert again.reused and again.figures == first.figures and again.seconds == first.seconds
    assert "tokenizer: reused" in capsys.readouterr().out


def test_a_changed_corpus_is_refused_not_trained_over(tmp_path, text):
    run = open_run(tmp_path / "r", small(text))
    run.tokenizer()
    run.close()
    before = {p: p.read_bytes() for p in (tmp_path / "r" / "tokenizer").iterdir()}
    text.write_text(text.read_text() + "\n\nOne more document that was not there before.")
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", small(text)).tokenizer()
    one_line(e, "tokenizer was begun with other inputs", "--run-dir")
    assert {p: p.read_bytes() for p in (tmp_path / "r" / "tokenizer").iterdir()} == before


def test_an_interrupted_stage_keeps_its_time_and_runs_again(tmp_path, text, monkeypatch):
    from nanochat_lib.tokenizer import Tokenizer

    run = open_run(tmp_path / "r", small(text))
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", lambda self, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.tokenizer()
    record = read_json(tmp_path / "r" / "stages" / "tokenizer.json")
    assert record["finished"] is False and record["seconds"] > 0
    result = run.tokenizer()
    assert not result.reused and result.seconds > record["seconds"]


def test_too_large_a_vocabulary_leaves_no_tokenizer(tmp_path, text):
    run = open_run(tmp_path / "r", small(text, **{"tokenizer.vocab_size": 5000}))
    with pytest.raises(UserError) as e:
        run.tokenizer()
    one_line(e, "5")
    assert not (tmp_path / "r" / "tokenizer").exists()


def test_too_little_text_for_the_steps_is_said_before_step_0(tmp_path, text):
    longer = {"model.sequence_len": 256, "pretrain.batch_tokens": 2048}
    run = open_run(tmp_path / "r", small(text, **longer, **{"data.epochs": 1.0, "pretrain.steps": 5000}))
    with pytest.raises(UserError) as e:
        run.pretrain()
    one_line(e, "tokens", "data.epochs")
    assert not list((tmp_path / "r").glob("base/*")) and not (tmp_path / "r" / "metrics.jsonl").exists()


def test_prompts_too_long_for_the_context_are_said_before_step_0(tmp_path, text):
    """A tokenizer of other text cuts the chat tasks' questions into many tokens."""
    run = open_run(tmp_path / "r", small(text))
    with pytest.raises(UserError) as e:
        run.pretrain()
    one_line(e, "the chat tasks need", "-s model.sequence_len=256")
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_relative_corpus_path_is_kept_absolute(tmp_path, text, monkeypatch):
    monkeypatch.chdir(text.parent)
    run = open_run("r", small(text.name))
    assert json.loads((tmp_path / "r" / "config.json").read_text())["data"]["corpus"] == str(text)
    run.close()


def test_chat_without_a_run_or_a_model(tmp_path):
    with pytest.raises(UserError) as e:
        pipeline.open_chat(tmp_path / "none")
    one_line(e, "holds no run", "nanochat run")
    open_run(tmp_path / "r", SMOKE).close()
    with pytest.raises(UserError) as e:
        pipeline.open_chat(tmp_path / "r")
    one_line(e, "holds no trained model")


@pytest.mark.parametrize("accelerator", [True, False])
def test_the_backend_is_asked_here_or_in_a_child(tmp_path, accelerator):
    with pytest.raises(UserError, match="JAX sees cpu here"):
        open_run(tmp_path / "r", presets.preset("gpu-1-d12"), accelerator=accelerator)
    assert not (tmp_path / "r").exists()


# ---- the copy that outlives the machine


def test_an_accelerator_s_run_needs_a_place_that_outlives_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "backend", lambda in_child=False: "gpu")
    rented = presets.override(presets.preset("gpu-1-d12"), {"sft.mixture": "primer", "rl.task": "primer-word-sums"})
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", rented)
    one_line(e, "would be lost", "-s ops.durable=", "-s ops.ephemeral_ok=true")
    assert not (tmp_path / "r").exists()
    for changes in ({"ops.ephemeral_ok": True}, {"ops.durable": str(tmp_path / "store")}):
        open_run(tmp_path / "r", presets.override(rented, changes)).close()


def test_no_preset_names_a_place_of_its_own():
    assert {config.ops.durable for config in presets.PRESETS.values()} == {""}


def durable(tmp_path, text, **more):
    return small(text, **{"ops.durable": str(tmp_path / "store"), **more})


def test_a_fresh_machine_goes_on_from_the_copy(tmp_path, text, capsys):
    run = open_run(tmp_path / "a", durable(tmp_path, text))
    first = run.tokenizer()
    run.close()
    again = open_run(tmp_path / "b", durable(tmp_path, text))
    result = again.tokenizer()
    assert result.reused and result.figures == first.figures
    assert again.load_tokenizer().fingerprint == first.figures["fingerprint"]
    assert "files of the run taken from there" in capsys.readouterr().out
    again.close()


def test_a_copy_of_another_run_is_refused_and_left_alone(tmp_path, text):
    open_run(tmp_path / "a", durable(tmp_path, text)).close()
    before = (tmp_path / "store" / "config.json").read_bytes()
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "b", durable(tmp_path, text, **{"pretrain.steps": 21}))
    one_line(e, f"{tmp_path / 'store'} holds a run with pretrain.steps 20 (asked for 21)")
    assert not (tmp_path / "b" / "config.json").exists()
    assert (tmp_path / "store" / "config.json").read_bytes() == before


def test_a_store_that_cannot_be_used_is_said_before_anything_is_spent(tmp_path, text):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", durable(tmp_path, text))
    one_line(e, f"{tmp_path / 'store'} cannot be used")
    assert not (tmp_path / "r" / "config.json").exists()


def test_a_store_inside_the_run_is_refused(tmp_path, text):
    with pytest.raises(UserError) as e:
        open_run(tmp_path / "r", durable(tmp_path, text, **{"ops.durable": str(tmp_path / "r" / "copy")}))
    one_line(e, "lies in the run's own folder")


def test_a_relative_store_is_kept_absolute(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_run("r", durable(tmp_path, text, **{"ops.durable": "copy"})).close()
    saved = json.loads((tmp_path / "r" / "config.json").read_text())
    assert saved["ops"]["durable"] == str(tmp_path / "copy") and (tmp_path / "copy" / "config.json").exists()


def test_chat_reads_what_is_here_without_the_store(tmp_path, text):
    open_run(tmp_path / "r", durable(tmp_path, text)).close()
    (tmp_path / "r" / "base").mkdir()
    (tmp_path / "store").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="holds no trained model"):
        pipeline.open_chat(tmp_path / "r")
