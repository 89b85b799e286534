"""A run: its folder, its stages in order, and what can be reused when it is started again.

The capstone notebook calls the stage methods one by one; `nanochat run` executes that notebook with papermill.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat_lib import chat_data, presets, rewards, run_folder
from nanochat_lib.errors import UserError
from nanochat_lib.presets import RunConfig, nearest
from nanochat_lib.storage import atomic_write_json, read_json

if TYPE_CHECKING:
    from nanochat_lib.durable import RunCopy

STAGES = ("tokenizer", "pretrain", "eval_base", "sft", "rl", "eval_chat")
CHAT_STAGES = {"base": "base", "mid": "mid", "sft": "sft", "rl": "rl"}  # model -> folder of its checkpoints
MODELS = tuple(CHAT_STAGES.values())
NAMED_CORPORA = ("primer", "climbmix", "fineweb-edu")  # everything else is a path or a URL
FORMAT = 1  # of the stage records; a new number makes old ones stale
VAL_SAMPLE = 2000  # validation documents that are tokenised to measure bytes a token
NAMED = 5  # left-out documents that are named on the screen; stages/tokenizer.json names more


@dataclass(frozen=True)
class StageResult:
    """What a finished stage left: its figures, the seconds it took, and whether they come from an earlier start."""

    name: str
    seconds: float
    figures: dict
    reused: bool


def default_run_dir(config: RunConfig) -> Path:
    """`runs/<preset>` under the current folder, `runs/<preset>-seed<n>` for a seed other than 0."""
    return Path("runs") / (config.preset if config.seed == 0 else f"{config.preset}-seed{config.seed}")


def backend(in_child: bool = False) -> str:
    """cpu, gpu or tpu: what JAX computes on here; asked in a process that ends again when `in_child`."""
    if in_child:
        program = "import jax; print(jax.default_backend())"
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() or "cpu"
    import jax

    return jax.default_backend()


def check_runnable(config: RunConfig, accelerator: bool = True, any_machine: bool = False) -> None:
    """Raises UserError when this machine or this version cannot run `config`, before anything is spent.

    `accelerator=False` leaves JAX's devices alone: a TPU belongs to one process, and that is to be the notebook's.
    `any_machine`: what is asked for needs no accelerator and is not lost with a rented one, so none is looked for.
    """
    presets.validate(config)
    if accelerator:
        from nanochat_lib import distributed

        distributed.start()  # before anything asks JAX for its devices
    if any_machine:
        return
    target = config.target
    have = "cpu" if target.kind == "cpu" else backend(in_child=not accelerator)
    if have != target.kind:
        from nanochat_lib.distributed import tpu_holder

        raise UserError(
            f"preset {config.preset} is for {target.devices} × {target.chip} {target.kind}, JAX sees {have} here"
            f"{tpu_holder() if target.kind == 'tpu' else ''}; use --preset cpu, or install the matching extra "
            "(NANOCHAT_EXTRAS=cuda12, cuda13 or tpu)"
        )
    check_durable(config)


def check_durable(config: RunConfig) -> None:
    """Raises UserError when the checkpoints of a rented machine would be lost with it, and nobody agreed to that."""
    if config.target.kind != "cpu" and not config.ops.durable and not config.ops.ephemeral_ok:
        raise UserError(
            f"preset {config.preset} rents a machine, and checkpoints on its disk alone would be lost with it: name a "
            "place that stays (-s ops.durable=gs://bucket/run, s3://… or a folder of another disk), or accept the loss "
            "(-s ops.ephemeral_ok=true)"
        )


def open_run(
    run_dir: str | Path, config: RunConfig, accelerator: bool = True, mine: str = "", any_machine: bool = False
) -> Run:
    """The run in `run_dir`, created there when the folder is new.

    `mine` names exercises whose functions of the learner's the run uses: "all" or "id,id". `any_machine`: for a stage
    that needs no accelerator.

    Raises UserError when the folder holds a run of another configuration, is in use by another process, cannot be
    written, or when its disk is nearly full.
    """
    config = chat_data.with_whole_paths(config)  # the kernel runs elsewhere
    if config.data.corpus not in NAMED_CORPORA and "://" not in config.data.corpus:
        path = Path(config.data.corpus).expanduser().absolute()
        config = replace(config, data=replace(config.data, corpus=str(path)))
    if config.ops.durable and "://" not in config.ops.durable:
        path = Path(config.ops.durable).expanduser().absolute()
        config = replace(config, ops=replace(config.ops, durable=str(path)))
    check_runnable(config, accelerator, any_machine)
    if mine:
        from nanochat_lib.course import borrow

        borrow.check_names(mine)  # before a folder is made for it
    folder = Path(run_dir)
    if not accelerator:
        run_folder.take(folder, config, MODELS)
        return _borrow(Run(folder, config), mine, now=False)
    from nanochat_lib import distributed

    with distributed.everyone():
        if distributed.first():
            run_folder.take(folder, config, MODELS)
    run = Run(folder, config)
    if config.ops.durable and distributed.count() > 1 and not distributed.is_shared(folder):
        run.shared = False
        run.share_files()
    if not distributed.first():
        run_folder.check_same(folder, read_json(folder / "config.json"), presets.to_dict(config))
    return _borrow(run, mine, now=True)


def _borrow(run: Run, mine: str, now: bool) -> Run:
    """Puts the learner's functions into the library, if the run uses any, before anything of it is compiled."""
    from nanochat_lib.course import borrow

    try:
        borrow.begin(run.dir, mine, now)
    except BaseException:
        run.close()
        raise
    return run


IN_COMMON = ("pretrain", "mid", "eval_base", "sft", "rl", "eval_chat")  # all processes; process 0 does the others


def together(work: Callable[[], dict]) -> dict:
    """`work()`; with several processes that of process 0, plain data, in all of them."""
    from nanochat_lib import distributed

    return work() if distributed.count() == 1 else distributed.from_first(work)


class Run:
    """One run folder. Each stage method does the stage's work, or returns what an earlier start left."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.dir, self.config = folder, config
        self.shared = True  # whether all processes see the same folder

    def close(self) -> None:
        """Lets go of the folder, so that another process may open the run."""
        run_folder.release(self.dir)

    # What the stages share -------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self):
        from nanochat_lib.corpus import open_corpus

        return open_corpus(self.config.data, self.config.seed)

    @property
    def world(self):
        return self.chats.world

    @cached_property
    def chats(self) -> chat_data.ChatData:
        """The conversations that the run trains and is judged on."""
        return chat_data.ChatData(self.config)

    @property
    def models(self) -> list[str]:
        """The models that the run trains, in order: base, mid where there is such a stage, sft, rl."""
        return [name for name in CHAT_STAGES if name != "mid" or self.config.has_mid]

    @cached_property
    def metrics(self):
        from nanochat_lib.metrics import MetricsLog

        return MetricsLog(self.dir / "metrics.jsonl")

    @cached_property
    def copy(self) -> RunCopy | None:
        """The run's copy that outlives this machine, None without ops.durable."""
        from nanochat_lib.durable import RunCopy

        return RunCopy.of(self.config.ops.durable, self.dir)

    def share_files(self) -> None:
        """Brings the run's small files to its copy, and from there to processes that have a folder of their own."""
        from nanochat_lib import distributed

        if self.copy is None:
            return
        with distributed.everyone():
            if distributed.first():
                self.copy.push_files()
        with distributed.everyone():
            if not self.shared and not distributed.first():
                self.copy.pull_files()

    def fetch(self, model: str) -> Path:
        """The folder with a model's checkpoints (a key of CHAT_STAGES), the newest fetched if only the copy has it."""
        from nanochat_lib import distributed

        folder = self.dir / CHAT_STAGES[model]
        if self.copy is not None:
            with distributed.everyone():
                if distributed.first() or not self.shared:
                    _, problems = self.copy.newest(folder)
                    for problem in problems if distributed.first() else []:
                        if problem.startswith(self.copy.url):  # whoever reads the folder names those in it
                            print(f"{model}: checkpoint left alone: {problem}")
        return folder

    def load_tokenizer(self):
        """The run's trained tokenizer."""
        from nanochat_lib.tokenizer import Tokenizer

        return Tokenizer.load(self.dir / "tokenizer")

    def load_model(self, stage: str):
        """(GPTConfig, parameters, tokenizer) of the newest checkpoint of "base", "mid", "sft" or "rl"."""
        from nanochat_lib.checkpoint import load_model

        tokenizer = self.load_tokenizer()
        model, params, _ = load_model(self.fetch(stage), tokenizer)
        return model, params, tokenizer

    # Bookkeeping -----------------------------------------------------------------------------------------------------

    def _record(self, name: str) -> Path:
        return self.dir / "stages" / f"{name}.json"

    def _stage(
        self,
        name: str,
        parts: tuple[str, ...],
        needs: tuple[str, ...],
        work: Callable[[], dict],
        reads: str | None = None,
    ) -> StageResult:
        """Runs `work`, or reuses its record when the settings in `parts` and the stages in `needs` are the same.

        `reads` is a hash of what the stage reads besides, None for nothing; of the corpus it is added here.
        """
        from nanochat_lib import distributed, supervise
        from nanochat_lib.hardware import device_peak_gb
        from nanochat_lib.price import price_here

        began = time.monotonic()
        before = [read_json(self._record(need))["key"] for need in needs]
        settings = {part: _plain(getattr(self.config, part)) for part in parts}
        if "data" in parts:  # the other stages see the corpus through `needs`
            reads = self.corpus.fingerprint
        text = json.dumps([FORMAT, name, settings, reads, before], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        path = self._record(name)
        earlier = together(lambda: read_json(path) if path.exists() else {})
        if earlier.get("key") == key and earlier["finished"]:
            print(f"{name}: reused, it took {earlier['seconds']:.0f} s when it ran")
            return StageResult(name, earlier["seconds"], earlier["figures"], reused=True)
        if earlier and earlier.get("key") != key:
            raise UserError(
                f"{self.dir}: {name} was begun with other inputs (the corpus, its Python version, or a file "
                "that the settings name changed); "
                "use another --run-dir"
            )
        # A kill leaves no time to write the record; the metrics know at least the seconds spent in training steps.
        logged = [r.get("seconds") or 0.0 for r in self.metrics.read(name)]
        spent = max([earlier.get("seconds", 0.0), *logged]) if earlier else 0.0
        record = {
            "name": name,
            "key": key,
            "seconds": spent,
            "usd": earlier.get("usd"),
            "figures": {},
            "finished": False,
        }
        usd_hour = price_here(self.config.ops)
        write = atomic_write_json if distributed.first() else lambda path, record: None
        if distributed.first():
            path.parent.mkdir(exist_ok=True)
        write(path, record)
        try:
            with supervise.supervised(self.dir, name, self.config.ops):
                with distributed.together():
                    found = work() if name in IN_COMMON else together(work)
            record["figures"] = found | {"peak_memory_gb": peak_memory_gb(), "device_peak_gb": device_peak_gb()}
            record["finished"] = True
        finally:
            record["seconds"] = spent + time.monotonic() - began
            if usd_hour:  # the price may change from start to start
                fresh = record["seconds"] - earlier.get("seconds", 0.0)
                record["usd"] = (record["usd"] or 0.0) + usd_hour * fresh / 3600
            write(path, record)
        self.share_files()
        return StageResult(name, record["seconds"], record["figures"], reused=False)

    # The stages ------------------------------------------------------------------------------------------------------

    def tokenizer(self) -> StageResult:
        """Trains the tokenizer on the corpus."""

        def work() -> dict:
            from nanochat_lib.tokenizer import Tokenizer

            settings = self.config.tokenizer
            tokenizer = Tokenizer.train(
                self.corpus.documents("tokenizer"), settings.vocab_size, max_chars=settings.max_chars,
                doc_cap=settings.doc_cap,
            )  # fmt: skip
            tokenizer.save(self.dir / "tokenizer")
            held_out = list(islice(self.corpus.documents("val"), VAL_SAMPLE))
            size = sum(len(text.encode()) for text in held_out)
            report = self.corpus.report
            for note in report.notes + [f"left out: {where}: {reason}" for where, reason in report.broken[:NAMED]]:
                print(note)
            if report.skipped > NAMED:
                print(f"left out: {report.skipped:,} documents in all")
            return {
                "vocab_size": tokenizer.vocab_size,
                "bytes_per_token": size / sum(len(ids) for ids in tokenizer.encode(held_out)),
                "documents": report.documents,
                "characters": report.characters,
                "empty": report.empty,
                "skipped": report.skipped,
                "notes": report.notes,
                "broken": [list(pair) for pair in report.broken],
                "fingerprint": tokenizer.fingerprint,
                "examples": [
                    [tokenizer.decode([i]) for i in tokenizer.encode(text)]
                    for text in ("Hello world! It's 12345.", held_out[0][:120])
                ],
            }

        return self._stage("tokenizer", ("seed", "data", "tokenizer"), (), work)

    def pretrain(self) -> StageResult:
        """Trains the base model on the corpus."""
        self._need("tokenizer")

        def work() -> dict:
            from nanochat_lib.preflight import outcome
            from nanochat_lib.pretrain import SAMPLE_PROMPTS, pretrain

            if self.config.sft.mixture == "primer":
                self._check_prompts()
            outcome.predict_here(self.dir, self.config)
            prompts = SAMPLE_PROMPTS if self.config.data.corpus != "primer" else tuple(self.world.sample_prompts())
            return pretrain(self.config, self.load_tokenizer(), self.corpus, self.dir / "base", self.metrics, prompts)

        return self._stage("pretrain", ("seed", "data", "model", "compute", "pretrain"), ("tokenizer",), work)

    def _check_prompts(self) -> None:
        """Raises UserError when the chat tasks do not fit the context: a tokenizer of other text cuts them finely."""
        from nanochat_lib.conversation import render_for_completion

        tokenizer, config = self.load_tokenizer(), self.config
        tasks = list(self.chats.eval_tasks().values())
        if config.rl.task != "gsm8k":
            tasks.append(self.chats.rl_task("train"))
        prompts = (render_for_completion(tokenizer, task[i]) for task in tasks for i in range(min(len(task), 64)))
        needed = max(map(len, prompts)) + max(config.rl.max_new_tokens, config.evaluation.chat_max_new_tokens)
        if needed > config.model.sequence_len:
            raise UserError(
                f"the chat tasks need {needed} tokens with this corpus's tokenizer, model.sequence_len is "
                f"{config.model.sequence_len}; use -s model.sequence_len={128 * -(-needed // 128)} in a new run folder"
            )

    def _need(self, *names: str) -> None:
        """Stages need the ones before them: runs what is missing, reuses what is there."""
        for name in names:
            path = self._record(name)
            if not (path.exists() and read_json(path).get("finished")):
                getattr(self, name)()

    def eval_base(self) -> StageResult:
        """Scores the base model on CORE; a run for an accelerator also on its corpus, with samples of its writing."""
        self._need("tokenizer", "pretrain")

        def work() -> dict:
            from nanochat_lib.evaluations import base_stage

            return base_stage(self)

        return self._stage("eval_base", ("evaluation",), ("pretrain",), work)

    def mid(self) -> StageResult:
        """Trains the base model on a large mixture of conversations, every token of them (mid.mixture)."""
        if not self.config.has_mid:
            raise UserError("this run has no midtraining; set mid.mixture in a new run folder")
        chat_data.check(self.config, "mid")
        self._need("tokenizer", "pretrain")
        return self._conversations("mid", "base", "pretrain")

    def sft(self) -> StageResult:
        """Fine-tunes the base or the midtrained model on conversations."""
        before = ("mid", "mid") if self.config.has_mid else ("base", "pretrain")
        chat_data.check(self.config, "mid", "sft")
        self._need("tokenizer", "pretrain", *(["mid"] if self.config.has_mid else []))
        return self._conversations("sft", *before)

    def _conversations(self, name: str, source: str, before: str) -> StageResult:
        """The stage `name`, mid or sft, from the model `source` that the stage `before` has left."""

        def work() -> dict:
            from nanochat_lib.sft import sft

            return sft(
                self.config, self.load_tokenizer(), self.chats.mixture(name), self.chats.held_out(name),
                self.fetch(source), self.dir / name, self.metrics, name,
            )  # fmt: skip

        return self._stage(name, (name,), (before,), work, chat_data.fingerprint(getattr(self.config, name)))

    def rl(self) -> StageResult:
        """Improves the fine-tuned model on its RL task."""
        chat_data.check(self.config, "mid", "sft", "rl")
        self._need("tokenizer", "pretrain", "sft")

        def work() -> dict:
            from nanochat_lib.rl import rl

            train, held_out = (self.chats.rl_task(split) for split in ("train", "test"))
            return rl(
                self.config, self.load_tokenizer(), train, held_out, self.fetch("sft"), self.dir / "rl", self.metrics
            )

        return self._stage("rl", ("rl",), ("sft",), work, rewards.fingerprint(self.config.rl.reward))

    def eval_chat(self) -> StageResult:
        """Scores the base, the fine-tuned and the RL model on the chat tasks, and keeps a few of their answers."""
        chat_data.check(self.config, "eval_chat")
        self._need("tokenizer", "pretrain", "sft", "rl")

        def work() -> dict:
            from nanochat_lib.evaluations import chat_stage

            return chat_stage(self, list(self.models))

        return self._stage("eval_chat", ("evaluation",), ("rl",), work)

    def measure(self, kind: str, wanted) -> dict[str, dict]:
        """{model: figures} of a "base" or "chat" evaluation by other choices (evaluations.Wanted) than the settings.

        Nothing is trained for it, and the report stays as it is.
        """
        from nanochat_lib import evaluations

        for model in wanted.models:
            if model not in CHAT_STAGES:
                raise UserError(f"unknown model {model!r}; {nearest(model, list(CHAT_STAGES))}")
        if kind == "base":
            return evaluations.measure_base(self, wanted)
        return evaluations.measure_chat(self, wanted, self.trained())

    def trained(self) -> list[str]:
        """The models that have a checkpoint here or in the run's copy. UserError when none has."""
        from nanochat_lib import checkpoint

        found = [stage for stage in CHAT_STAGES if checkpoint.latest(self.fetch(stage))[0] is not None]
        if not found:
            raise UserError(f"{self.dir} holds no trained model; run `nanochat run --run-dir {self.dir}` first")
        return found

    def push_files(self) -> None:
        """Brings the run's small files to its copy, if it has one; process 0 alone."""
        if self.copy is not None:
            self.copy.push_files()

    def engine(self, stage: str):
        """An Engine with the newest model of "base", "mid", "sft" or "rl", in the run's compute dtype."""
        import jax

        from nanochat_lib.engine import Engine
        from nanochat_lib.hardware import compute_dtype

        model, params, tokenizer = self.load_model(stage)
        return Engine(model, params, tokenizer, dtype=compute_dtype(self.config.compute.dtype, jax.default_backend()))

    def report(self) -> dict:
        """Writes report.json, report.md and report.html of the stages that are there; returns report.json's content."""
        from nanochat_lib import distributed
        from nanochat_lib.course import standing
        from nanochat_lib.report import write_report
        from nanochat_lib.status import Status

        if distributed.place().index == 0:
            standing.keep(self.dir)
        report = write_report(self.dir)
        if not report["missing"]:
            Status(self.dir, distributed.place().index == 0).write("done")
        self.share_files()
        return report


def _plain(value: object) -> object:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def peak_memory_gb() -> float:
    """The largest resident memory this process has had, in GB (10⁹ bytes)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def last_stage(run_dir: Path) -> str:
    """The furthest trained model in `run_dir`: "rl", "sft", "mid" or "base"."""
    from nanochat_lib import checkpoint

    for stage in reversed(CHAT_STAGES):
        if checkpoint.latest(run_dir / CHAT_STAGES[stage])[0] is not None:
            return stage
    raise UserError(f"{run_dir} holds no trained model; run `nanochat run --run-dir {run_dir}` first")


def open_chat(run_dir: str | Path, stage: str | None = None, **options: object) -> None:
    """Talks to the model of a run in the terminal. `options` are serve.terminal.chat's."""
    from nanochat_lib.serve.terminal import chat

    engine, folder, stage = _chat_engine(run_dir, stage)
    chat(engine, engine.tokenizer, title=f"{folder} · {stage}", **options)


def open_server(
    run_dir: str | Path, stage: str | None = None, *, port: int = 8000, rows: int = 8, **settings: object
) -> None:
    """Serves the model of a run until it is told to stop. `settings`: serve.app.Settings'."""
    from nanochat_lib.serve import launch

    launch.launch(lambda: _chat_engine(run_dir, stage), port=port, rows=rows, **settings)


def _chat_engine(run_dir: str | Path, stage: str | None) -> tuple[object, Path, str]:
    """(engine, folder, stage) of a run's model, by default the last one trained."""
    folder = Path(run_dir)
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} holds no run; start one with `nanochat run --run-dir {folder}`")
    config = presets.from_dict(read_json(folder / "config.json"))
    run = Run(folder, replace(config, ops=replace(config.ops, durable="")))  # what is here, also without a network
    stage = stage or last_stage(folder)
    return run.engine(stage), folder, stage
