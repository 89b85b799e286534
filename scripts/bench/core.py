"""Speed of the CORE evaluation beside the same method done one example at a time in PyTorch.

Both sides answer the same examples of a bundle with the same parameters: ours through `evaluate.core`, the other as the
method is usually written: the prompts of one example are rendered, encoded, padded to one batch and run through the
PyTorch twin, cross-entropies of all positions are taken, the likeliest answer counts. Rendering and encoding are timed
on both sides. In every round each side answers all examples; a side's fastest round counts, since whatever else the
machine does only adds time. Compiling (ours) is the first round's extra time and shown apart: a whole evaluation has
some hundred times the examples and compiles the same few programs. Both sides must predict the same.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import torch
import torch.nn.functional as F

from nanochat_lib import gpt, twin
from nanochat_lib.evaluate.bundle import CoreTask, load_bundle, render_prompts
from nanochat_lib.evaluate.core import answer_examples
from nanochat_lib.evaluate.scorer import Scorer, scorer_for
from nanochat_lib.evaluate.spans import Span, spans
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import Tokenizer

EXAMPLE = """examples:
  python scripts/bench/core.py                                a made-up bundle, a model of 4 layers; some five minutes
  python scripts/bench/core.py --bundle ~/.cache/nanochat/eval_bundle --examples 8
  python scripts/bench/core.py --vocab 4096                   a small vocabulary: less is saved in the head"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, help="a bundle's folder (default: one is made up)")
    parser.add_argument("--depth", type=int, default=4, help="layers, 64 channels each (default 4)")
    parser.add_argument("--vocab", type=int, default=32768, help="the model's vocabulary (default 32768, nanochat's)")
    parser.add_argument("--length", type=int, default=2048, help="the model's context (default 2048)")
    parser.add_argument("--examples", type=int, default=24, help="of each task (default 24)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over both sides (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    if min(args.depth, args.vocab, args.examples, args.rounds) < 1:
        parser.error("--depth, --vocab, --examples and --rounds must be at least 1")
    return args


# ---- a bundle and a model


def made_up(folder: Path, examples: int) -> None:
    """A bundle of three tasks of random words, one of each kind, with nanochat's usual numbers of shots."""
    draw = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(2000)]
    text = lambda low, high: " ".join(draw.choices(words, k=draw.randint(low, high)))  # noqa: E731
    tasks = {
        "choices": ("multiple_choice", 10, 25, lambda: {
            "query": f"Question: {text(10, 30)}?", "choices": [text(1, 6) for _ in range(4)],
            "gold": draw.randrange(4)}),
        "completion": ("language_modeling", 10, 0, lambda: {"context": text(10, 40), "continuation": text(1, 3)}),
        "schema": ("schema", 0, 50, lambda: {
            "context_options": [text(8, 16) for _ in range(2)], "continuation": text(3, 8), "gold": draw.randrange(2)}),
    }  # fmt: skip
    (folder / "eval_data").mkdir()
    listing, scores = "icl_tasks:\n", "Eval Task,Random baseline\n"
    for label, (kind, shots, baseline, make) in tasks.items():
        lines = (json.dumps(make()) + "\n" for _ in range(max(examples, 40)))
        (folder / "eval_data" / f"{label}.jsonl").write_text("".join(lines))
        listing += f"- {{label: {label}, dataset_uri: {label}.jsonl, num_fewshot: [{shots}], icl_task_type: {kind}}}\n"
        scores += f"{label},{baseline}\n"
    (folder / "core.yaml").write_text(listing)
    (folder / "eval_meta_data.csv").write_text(scores)


def model_of(args: argparse.Namespace, tasks: list[CoreTask]) -> tuple[GPTConfig, gpt.Params, Tokenizer]:
    """A model that no text has trained, but whose every matrix says something; a tokenizer for the bundle's text."""
    texts = [json.dumps(example, ensure_ascii=False) for task in tasks for example in task.examples[:2000]]
    tokenizer = Tokenizer.train(texts, min(args.vocab, 8192), strict=False)
    width = 64 * args.depth
    heads = max(width // 128, 1)
    config = GPTConfig(args.length, args.vocab, args.depth, heads, heads, width, "SSSL")
    draw = np.random.default_rng(0)
    params = gpt.init_params(config, jax.random.key(0))
    return config, {n: x + draw.normal(0, 0.03, x.shape).astype(np.float32) for n, x in params.items()}, tokenizer


# ---- the two sides


def ours(
    config: GPTConfig, scorer: Scorer, params: gpt.Params, tokenizer: Tokenizer, tasks: list[CoreTask], count: int
) -> list[np.ndarray]:
    """Right or wrong for the examples of every task."""
    return [
        answer_examples(
            task, task.first(count), list(range(len(task.first(count)))), scorer, params, tokenizer,
            10 * config.sequence_len, lambda n: None,
        )[0]
        for task in tasks
    ]  # fmt: skip


@torch.inference_mode()
def one_at_a_time(model: twin.GPT, tokenizer: Tokenizer, tasks: list[CoreTask], count: int) -> list[np.ndarray]:
    """The same with the PyTorch twin, example by example."""
    found = []
    for task in tasks:
        examples = task.first(count)
        right = []
        for i, example in enumerate(examples):
            prompts = spans(task, render_prompts(task, examples, i), tokenizer, 10**9)
            right.append(answer(model, task.kind, prompts, tokenizer.bos_id) == example.get("gold", True))
        found.append(np.array(right, np.int8))
    return found


def answer(model: twin.GPT, kind: str, prompts: list[Span], pad_id: int) -> int | bool:
    """The likeliest prompt's number; of a completion, whether it is what the model would write."""
    ids = torch.full((len(prompts), max(len(span.ids) for span in prompts)), pad_id)
    for row, span in zip(ids, prompts, strict=True):
        row[: len(span.ids)] = torch.from_numpy(np.asarray(span.ids))
    logits = model(ids)
    targets = ids.roll(-1, dims=1)
    if kind == "language_modeling":
        (span,) = prompts
        part = slice(span.start - 1, span.end - 1)
        return bool((logits[0].argmax(-1)[part] == targets[0, part]).all())
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return int(np.argmin([nll[r, span.start - 1 : span.end - 1].mean() for r, span in enumerate(prompts)]))


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        if args.bundle is None:
            made_up(Path(temporary), args.examples)
        tasks = load_bundle(args.bundle or Path(temporary))
    config, params, tokenizer = model_of(args, tasks)
    scorer = scorer_for(config)
    placed, reference = scorer.place(params), twin.build(config, params)
    count = sum(len(task.first(args.examples)) for task in tasks)
    print(
        f"{len(tasks)} tasks, {count} examples; {config.n_layer} layers of {config.n_embd}, vocabulary "
        f"{config.vocab_size:,}; {len(scorer.devices)} × {scorer.devices[0].device_kind}, torch on "
        f"{torch.get_num_threads()} threads"
    )
    sides = {
        "ours": lambda: ours(config, scorer, placed, tokenizer, tasks, args.examples),
        "torch, one by one": lambda: one_at_a_time(reference, tokenizer, tasks, args.examples),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[np.ndarray]] = {}
    for _ in range(args.rounds + 1):  # the first one compiles
        for name, side in sides.items():
            began = time.perf_counter()
            answers[name] = side()
            seconds[name].append(time.perf_counter() - began)
    rates = {name: count / min(taken[1:]) for name, taken in seconds.items()}
    mine, theirs = rates.values()
    same = [int((a == b).sum()) for a, b in zip(*answers.values(), strict=True)]
    for name, rate in rates.items():
        print(f"{name:<20} {rate:9.2f} examples/s")
    compiling = seconds["ours"][0] - min(seconds["ours"][1:])
    print(f"ratio {mine / theirs:.1f}; compiling {scorer.compiled._cache_size()} programs took {compiling:.1f} s")
    print(f"right or wrong alike: {sum(same)} of {count} examples")
    if args.json:
        figures = {"examples": count, "examples_per_s": rates, "ratio": mine / theirs, "alike": sum(same),
                   "programs": scorer.compiled._cache_size(), "compile_s": compiling,
                   "vocab_size": config.vocab_size, "depth": config.n_layer}  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if sum(same) != count:
        raise SystemExit("the two sides do not agree")


if __name__ == "__main__":
    main()
