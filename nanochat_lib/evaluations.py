"""What is evaluated of a run: which bundle, which texts, which chat tasks; where the results are kept.

The stages eval_base and eval_chat take what the run's settings say and become part of its report. `measure` takes other
choices (a context, a bundle, a model, several samples) and leaves the report alone. Both keep the result of every task
in the run's folder (evaluate/results.py), so a stopped one goes on, and `nanochat eval compare` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.results import FOLDER, Results
from nanochat_lib.settings import nearest
from nanochat_lib.step_folders import step_folder
from nanochat_lib.storage import MANIFEST, sha256_file

Run = Any  # pipeline.Run, which imports this module

PARTS = ("core", "bpb", "sample")  # of a base evaluation


def parts_of(names: str) -> tuple[str, ...]:
    """("core", "bpb") of "core,bpb"; UserError for an unknown name or none."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in PARTS:
            raise UserError(f"--only {name!r} is unknown; {nearest(name, list(PARTS))}")
    return chosen


def standard_parts(run: Run) -> tuple[str, ...]:
    """What the stage eval_base does: all of it, on a CPU only CORE, since pretraining has just shown the rest."""
    return ("core",) if run.config.target.kind == "cpu" else PARTS


def has_own_bundle(run: Run) -> bool:
    """Whether the run is scored on the primer's bundle, which it writes itself."""
    return run.config.target.kind == "cpu"


def bundle_of(run: Run) -> Path:
    """The folder of the bundle that the run is scored on. UserError, with the command, when it is not there."""
    from nanochat_lib import distributed
    from nanochat_lib.hub.sets import path_of

    if not has_own_bundle(run):
        with distributed.everyone():
            return check_bundle(path_of("core"))
    from nanochat_lib.primer.bundle import write_core_bundle

    bundle = run.dir / "core_bundle"
    with distributed.everyone():
        if distributed.first() or not run.shared:
            write_core_bundle(run.world, bundle)
    return bundle


def check_bundle(folder: Path) -> Path:
    if not (folder / "core.yaml").is_file():
        raise UserError(f"{folder} holds no CORE bundle (core.yaml is missing); fetch it with `nanochat data get core`")
    return folder


@dataclass(frozen=True)
class Model:
    """A model of a run, and where results of it are kept."""

    run: Run
    stage: str  # base, sft, rl

    @cached_property
    def loaded(self) -> tuple:
        """(GPTConfig, parameters, step), whole in every process."""
        from nanochat_lib.checkpoint import load_model

        return load_model(self.run.fetch(self.stage), self.tokenizer)

    @cached_property
    def tokenizer(self):
        return self.run.load_tokenizer()

    @cached_property
    def compute(self):
        from nanochat_lib.plan import compute_here

        return compute_here(self.run.config.compute, self.loaded[0], None)

    @property
    def place(self) -> Path:
        return self.run.dir / FOLDER / self.stage / step_folder("", self.loaded[2]).name

    def results(self, kind: str, **options: object) -> Results:
        """Where results with these options are kept: those of other weights or another tokenizer are others."""
        manifest = step_folder(self.run.dir / self.stage, self.loaded[2]) / MANIFEST
        weights = sha256_file(manifest)[:16] if manifest.exists() else ""
        made = {"stage": self.stage, "step": self.loaded[2], "weights": weights, "dtype": self.compute.dtype,
                "tokenizer": self.tokenizer.fingerprint[:16]}  # fmt: skip
        return Results(self.place, kind, made | options, self.run.push_files)

    def engine(self):
        from nanochat_lib.engine import Engine

        model, params, _ = self.loaded
        return Engine(model, params, self.tokenizer, dtype=self.compute.dtype)


# ---- the base evaluation


def base_figures(
    subject: Model,
    parts: tuple[str, ...],
    *,
    context: int | None = None,
    max_per_task: int | None = None,
    bundle: Path | None = None,
) -> dict:
    """The chosen parts of the evaluation of a base model (or another one, taken as one); all processes together."""
    run, settings = subject.run, subject.run.config.evaluation
    most = settings.core_max_per_task if max_per_task is None else max_per_task
    folder = (bundle and check_bundle(bundle)) or (bundle_of(run) if "core" in parts else None)
    figures: dict = {"model": subject.stage, "step": subject.loaded[2]}
    if "core" in parts:
        figures |= core_figures(subject, folder, context, most)
    if "bpb" in parts:
        figures |= corpus_bpb(subject)
    if "sample" in parts:
        figures["samples"] = written_samples(subject)
    return figures


def core_figures(subject: Model, bundle: Path, context: int | None, max_per_task: int) -> dict:
    """CORE's figures; also writes nanochat's table base_eval/<model>_model_<step>.csv."""
    from nanochat_lib import distributed
    from nanochat_lib.evaluate import core

    run, (model, params, step) = subject.run, subject.loaded
    results = subject.results("core", context=context or 0, max_per_task=max_per_task)
    out = core.evaluate_core(
        model, params, subject.tokenizer, bundle, max_per_task=max_per_task, context=context, results=results,
        title=f"core, {subject.stage}", **how(subject),
    )  # fmt: skip
    suffix = f"_context{context}" if context else ""
    path = run.dir / "base_eval" / f"{subject.stage}_model_{step:06d}{suffix}.csv"
    if distributed.first():
        core.write_csv(path, out)
    return out


def how(subject: Model) -> dict:
    """The options of evaluate_core that say how it computes."""
    compute = subject.compute
    rows = subject.run.config.evaluation.batch_rows
    return {"rows": rows, "dtype": compute.dtype, "attention": compute.attention}


def untrained_core(subject: Model, bundle: Path) -> dict:
    """CORE of the model that pretraining started from."""
    import jax

    from nanochat_lib import gpt
    from nanochat_lib.evaluate import core

    run, model = subject.run, subject.loaded[0]
    most = run.config.evaluation.core_max_per_task
    options = {"seed": run.config.seed, "model": model.to_dict(), "max_per_task": most, "dtype": subject.compute.dtype,
               "tokenizer": subject.tokenizer.fingerprint[:16]}  # fmt: skip
    return core.evaluate_core(
        model, gpt.init_params(model, jax.random.key(run.config.seed)), subject.tokenizer, bundle, max_per_task=most,
        results=Results(run.dir / FOLDER / "untrained", "core", options), title="core, untrained", **how(subject),
    )  # fmt: skip


def base_stage(run: Run) -> dict:
    """The figures of the stage eval_base; on the primer's bundle with the untrained model's beside them."""
    from nanochat_lib.primer.bundle import FACT_TASKS

    own = has_own_bundle(run)
    bundle = bundle_of(run)  # before anything is loaded
    subject = Model(run, "base")
    before = untrained_core(subject, bundle) if own else None
    figures = base_figures(subject, standard_parts(run), bundle=bundle)
    if before is None:
        return figures
    for label, task in figures["core_tasks"].items():
        task["centered_untrained"] = before["core_tasks"][label]["centered"]

    def facts(tasks: dict[str, dict]) -> float:
        return sum(tasks[label]["centered"] for label in FACT_TASKS) / len(FACT_TASKS)

    return figures | {
        "core_before": before["core"],
        "core_facts": facts(figures["core_tasks"]),
        "core_facts_before": facts(before["core_tasks"]),
    }


def corpus_bpb(subject: Model) -> dict:
    """Bits per byte on the first `pretrain.eval_tokens` tokens of every split of the run's corpus, over all devices."""
    import jax

    from nanochat_lib.evaluate.bpb import bits_per_byte
    from nanochat_lib.pretrain import bpb_splits, fixed_batches, kept_ids_of
    from nanochat_lib.sharding import own_rows, param_sharding
    from nanochat_lib.train_step import make_eval_step
    from nanochat_lib.trainer import on_devices, open_mesh

    run, (model, params, _), tokenizer = subject.run, subject.loaded, subject.tokenizer
    stage, mesh = run.config.pretrain, open_mesh(run.config, tokenizer, corpus=run.corpus.fingerprint)
    rows = stage.device_rows * (mesh.size if mesh else 1)
    mine = own_rows(mesh, rows)
    if mesh is not None:
        places = param_sharding(mesh, {name: leaf.shape for name, leaf in params.items()})
        params = {
            name: jax.make_array_from_callback(leaf.shape, places[name], lambda index, leaf=leaf: leaf[index])
            for name, leaf in params.items()
        }
    eval_step, token_bytes = make_eval_step(model, dtype=subject.compute.dtype), tokenizer.token_bytes()
    found, data = {}, run.config.data
    kept = kept_ids_of(run.corpus, tokenizer, run.config.ops.kept_ids)
    for name, split in ({"train_bpb": "train"} | bpb_splits(run.corpus)).items():
        batches = fixed_batches(
            run.corpus, tokenizer, split, rows, model.sequence_len, stage.eval_tokens, data.buffer_docs, mine, kept
        )
        found[name] = bits_per_byte(eval_step, params, on_devices(mesh, batches), token_bytes)
    return found


def written_samples(subject: Model) -> list[dict]:
    """What the model writes after nanochat's seven prompts, and from nothing."""
    from nanochat_lib import distributed
    from nanochat_lib.evaluate.texts import continuations, unconditioned
    from nanochat_lib.pretrain import SAMPLE_PROMPTS, SAMPLE_TOKENS

    def write() -> list[dict]:
        engine = subject.engine()
        prompted = continuations(engine, subject.tokenizer, SAMPLE_PROMPTS, SAMPLE_TOKENS)
        return prompted + unconditioned(engine, subject.tokenizer)

    return write() if distributed.count() == 1 else distributed.from_first(write)


def text_bpb(run: Run, stage: str, files: list[Path]) -> dict[str, dict]:
    """{file: figures} of a run's model on files of text."""
    from nanochat_lib.evaluate.texts import bpb_of_text, read_text
    from nanochat_lib.train_step import make_eval_step

    texts = {str(path): read_text(path) for path in files}  # before anything is loaded
    subject = Model(run, stage)
    model, params, _ = subject.loaded
    eval_step, rows = make_eval_step(model, dtype=subject.compute.dtype), run.config.pretrain.device_rows
    return {
        name: bpb_of_text(eval_step, params, subject.tokenizer, text, size, model.sequence_len, rows, name)
        for name, (text, size) in texts.items()
    }


# ---- the chat evaluation


def chat_tasks(run: Run) -> dict:
    """{name: task} of the chat evaluation; says what is left out of it, and why."""
    from nanochat_lib import distributed

    for task, why in run.chats.left_out().items():
        if distributed.first():
            print(f"{task} is left out: {why}")
    return run.chats.eval_tasks()


def chat_figures(
    subject: Model, tasks: dict, *, complete: bool = True, max_per_task: int | None = None, samples: int = 1,
    temperature: float = 0.0,
) -> dict:  # fmt: skip
    """The chat evaluation of one model; all processes together."""
    from nanochat_lib.evaluate.chat import Sampling, evaluate_chat

    settings = subject.run.config.evaluation
    sampling = Sampling(samples, settings.chat_max_new_tokens, temperature)
    most = settings.chat_max_per_task if max_per_task is None else max_per_task
    results = subject.results("chat", samples=samples, max_new_tokens=sampling.max_new_tokens, temperature=temperature,
                              top_k=sampling.top_k, max_per_task=most)  # fmt: skip
    return {"step": subject.loaded[2]} | evaluate_chat(
        subject.engine(), subject.tokenizer, tasks, max_per_task=most, rows=settings.batch_rows,
        max_new_tokens=sampling.max_new_tokens, sampling=sampling, complete=complete, results=results,
        title=f"chat, {subject.stage}",
    )  # fmt: skip


def chat_stage(run: Run, stages: list[str]) -> dict:
    """The figures of the stage eval_chat: every model on all tasks, and a few of its answers to read."""
    from nanochat_lib import distributed
    from nanochat_lib.evaluate.chat import chat_samples

    tasks, questions = chat_tasks(run), run.chats.sample_questions()
    found, samples = {}, []
    for stage in stages:
        subject = Model(run, stage)
        found[stage] = chat_figures(subject, tasks)

        def answer(subject: Model = subject) -> list[dict]:
            longest = run.config.evaluation.chat_max_new_tokens
            return chat_samples(subject.engine(), subject.tokenizer, questions, subject.stage, longest)

        samples += answer() if distributed.count() == 1 else distributed.from_first(answer)
    return {"stages": found, "samples": samples, "left_out": run.chats.left_out()}


# ---- evaluations beside the report


@dataclass(frozen=True)
class Wanted:
    """An evaluation by other choices than the run's settings; None or empty: as the settings say."""

    models: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    context: int | None = None
    bundle: Path | None = None
    max_per_task: int | None = None
    tasks: tuple[str, ...] = ()
    samples: int = 1
    temperature: float | None = None


def measure_base(run: Run, wanted: Wanted) -> dict[str, dict]:
    """{model: figures} of the base evaluation."""
    parts = wanted.only or standard_parts(run)
    if wanted.context is not None and wanted.context < 2:
        raise UserError(f"--context {wanted.context} must be at least 2 tokens")
    options = {"context": wanted.context, "bundle": wanted.bundle, "max_per_task": wanted.max_per_task}
    return {stage: base_figures(Model(run, stage), parts, **options) for stage in wanted.models or ("base",)}


def measure_chat(run: Run, wanted: Wanted, trained: list[str]) -> dict[str, dict]:
    """{model: figures} of the chat evaluation, of all `trained` models unless some are named."""
    tasks = chat_tasks(run)
    for name in wanted.tasks:
        if name not in tasks:
            raise UserError(f"unknown chat task {name!r}; {nearest(name, list(tasks))}")
    chosen = {name: tasks[name] for name in wanted.tasks} or tasks
    warm = 1.0 if wanted.samples > 1 else 0.0
    temperature = warm if wanted.temperature is None else wanted.temperature
    return {
        stage: chat_figures(
            Model(run, stage), chosen, complete=len(chosen) == len(tasks), max_per_task=wanted.max_per_task,
            samples=wanted.samples, temperature=temperature,
        )
        for stage in wanted.models or trained
    }  # fmt: skip
