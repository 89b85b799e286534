"""RL rollouts a second: all answers of a step in one batch on the device, and the same answers one at a time.

A step has `--questions` prompts of different lengths and `--samples` answers to each, as in `rl.rollout`; weights are
random, from a seed. Both sides draw with the same seeds and must give the same answers; a ratio is only printed for
equal work. "groups" is the form that training uses, where the answers to a question share its prompt's pass. Example:

    python scripts/bench/rollout.py --questions 8 --samples 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from decode import any_tokenizer, random_params

from nanochat_lib.engine import Engine
from nanochat_lib.kv_cache import row_bytes
from nanochat_lib.sizing import GPTConfig


def best(work: Callable[[], list], repeat: int) -> tuple[float, list]:
    """(seconds of the fastest of `repeat` runs after one that compiles, what it gives)."""
    answers, seconds = work(), []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=8, help="prompts of a step (default 8)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each (default 8)")
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4, the cpu preset's)")
    parser.add_argument("--width", type=int, default=128, help="channels (default 128)")
    parser.add_argument("--vocab", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--context", type=int, default=128, help="context (default 128)")
    parser.add_argument("--new", type=int, default=32, help="longest answer (default 32)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side; the best counts (default 3)")
    args = parser.parse_args()

    config = GPTConfig(args.context, args.vocab, args.depth, 2, 2, args.width, "L")
    engine, rng = Engine(config, random_params(config), any_tokenizer(args.vocab)), np.random.default_rng(0)
    longest = max(args.context - args.new, 2)
    lengths = rng.integers(longest // 4 + 1, longest // 2 + 1, args.questions)
    prompts = [rng.integers(0, args.vocab - 16, n).tolist() for n in lengths for _ in range(args.samples)]
    options = {"max_tokens": args.new, "temperature": 1.0, "top_k": 50}
    seeds = range(len(prompts))

    def batched() -> list:
        return engine.generate_batch(prompts, seed=list(seeds), **options).sequences

    def groups() -> list:
        questions = prompts[:: args.samples]
        return engine.generate_batch(questions, args.samples, seed=list(range(len(questions))), **options).sequences

    def one_by_one() -> list:
        return [engine.generate_batch([prompts[i]], seed=[i], **options).sequences[0] for i in seeds]

    (slow, alone), (fast, together), (faster, grouped) = (best(f, args.repeat) for f in (one_by_one, batched, groups))
    same = np.mean([a == b for a, b in zip(alone, together, strict=True)])
    if same < 1:
        raise SystemExit(f"only {same:.1%} of the answers are the same on both sides")
    tokens = sum(map(len, together)) - sum(map(len, prompts))
    group_tokens = sum(map(len, grouped)) - sum(map(len, prompts))
    print(f"{config.n_layer} layers of {config.n_embd}, {args.vocab:,} tokens; {args.questions} questions of")
    print(
        f"{min(lengths)} to {max(lengths)} tokens × {args.samples} answers of up to {args.new}, top-k 50; same answers"
    )
    print(f"memory of a row in a cache of {args.context} positions: {row_bytes(config, args.context)['total']:,} bytes")
    for name, count, seconds in (
        ("one at a time", tokens, slow), ("one batch", tokens, fast), ("groups", group_tokens, faster),
    ):  # fmt: skip
        rate, ratio = len(prompts) / seconds, count / seconds / (tokens / slow)
        print(f"{name:>14}: {rate:>8,.1f} answers/s {count / seconds:>10,.0f} tok/s {ratio:>6.1f}x")


if __name__ == "__main__":
    main()
