"""Speed of the training step beside a PyTorch twin of the same model, and as a share of what the machine can multiply.

On a CPU, ours, the twin eager and the twin compiled run in one process, a few steps of each in every round, and each
side's fastest step counts: whatever else the machine does only ever adds time, and a slow minute meets all sides.
Useful FLOPs are those of `sizing.flops_per_token`, so the optimiser and all elementwise work lower the share. The
machine's matmul rate is the faster of JAX's and PyTorch's product of two 1024 × 1024 float32 matrices, measured in the
same rounds. Before anything is timed, all sides take steps from the same parameters on the same batch and must see the
same losses. Compile time is the first step's, without caches, less a later step's. All sides share one process and so
one malloc, set as the training commands set it (nanochat_lib/allocator.py) unless `--plain-malloc` is given.

On an accelerator the step runs in bfloat16 once for each attention backend (GPU: cudnn and xla), and MFU is the share
of the chip's dense bfloat16 peak; the twin is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import hardware
from nanochat_lib.allocator import TUNABLES, keep_memory
from nanochat_lib.gpt import init_params
from nanochat_lib.optim import make_optimizer
from nanochat_lib.plan import compute_for
from nanochat_lib.run_config import ComputeConfig, OptimConfig
from nanochat_lib.sizing import GPTConfig, flops_per_token
from nanochat_lib.train_step import init_train_state, make_train_step

EXAMPLE = """examples:
  python scripts/bench/step.py                              a laptop's model, with the twin; about two minutes
  python scripts/bench/step.py --depth 12 --width 768 --vocab 32768 --rows 16 --length 2048         on a GPU"""
RATES = OptimConfig()
HYPER = {"lr": 1.0, "momentum": 0.95, "weight_decay": 0.1}
CHECKED = 4  # steps whose losses are compared
FIRST, LATER = 1e-5, 1e-3  # relative tolerance of the first loss and of the following ones


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--width", type=int, default=256, help="channels, heads of 128 (default 256)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (default 4096)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch (default 16)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (default 256)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds over all sides (default 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a side in a round (default 3)")
    parser.add_argument("--skip-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--plain-malloc", action="store_true", help="leave the allocator as the system has it")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    if args.width % 128 and args.width > 128:
        parser.error(f"--width {args.width} is no multiple of the head size 128; use one that is, or at most 128")
    if min(args.rounds, args.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return args


@dataclass
class Side:
    """Something timed: `step()` does one unit of work; a training step returns its loss."""

    name: str
    step: Callable[[], Any]
    losses: list[float] = field(default_factory=list)  # of the first steps
    first_s: float = 0.0  # the first step's seconds: compiling included
    best_s: float = float("inf")

    def run(self, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            self.step()
            self.best_s = min(self.best_s, time.perf_counter() - start)

    def start(self, count: int) -> None:
        start = time.perf_counter()
        self.losses.append(self.step())
        self.first_s = time.perf_counter() - start
        self.losses += [self.step() for _ in range(count - 1)]


def ours(name: str, config: GPTConfig, params: dict, batch: dict, settings: ComputeConfig, device: jax.Device) -> Side:
    rows = batch["inputs"].shape[1]
    compute = compute_for(settings, config, device.platform, device.device_kind, rows)
    optimizer = make_optimizer(config, RATES, jnp.dtype(compute.dtype))
    train_step, batch = make_train_step(config, optimizer, compute=compute), jax.device_put(batch)
    state = init_train_state(config, optimizer, params)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch, HYPER)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return Side(name, step)


def twin(config: GPTConfig, params: dict, batch: dict, compiled: bool) -> Side:
    import torch

    from nanochat_lib.twin import build
    from nanochat_lib.twin_optim import MuonAdamW

    torch._inductor.config.force_disable_caches = True
    model = build(config, params)
    rates = {name: getattr(RATES, name) for name in ("unembedding_lr", "embedding_lr", "matrix_lr", "scalar_lr")}
    optimizer = MuonAdamW(model, **rates, weight_decay=HYPER["weight_decay"], compiled=compiled)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * HYPER["lr"]
        if group["kind"] == "muon":
            group["momentum"] = HYPER["momentum"]
    forward = torch.compile(model) if compiled else model
    inputs, targets = (torch.from_numpy(np.array(batch[name][0])).long() for name in ("inputs", "targets"))

    def step() -> float:
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Side("twin, compiled" if compiled else "twin, eager", step)


def products(config: GPTConfig, tokens: int) -> dict[str, tuple[int, int, int, int]]:
    """By name, (rows, inner, columns, how often a step does it): a square, and the step's products of whole layers."""
    c, v, layers = config.n_embd, config.padded_vocab_size, config.n_layer
    layer = {
        "C to C": (c, c, 4 * layers),
        "C to 4C": (c, 4 * c, layers),
        "4C to C": (4 * c, c, layers),
        "C to V": (c, v, 1),
    }
    found = {"1024³": (1024, 1024, 1024, 0)}
    for name, (inner, outer, count) in layer.items():
        found[f"{name}, forward"] = (tokens, inner, outer, count)
        found[f"{name}, input's gradient"] = (tokens, outer, inner, count)
        found[f"{name}, weight's gradient"] = (outer, tokens, inner, count)
    return found


def product_sides(name: str, rows: int, inner: int, columns: int) -> list[Side]:
    """The product by JAX and by PyTorch, its operands laid out as a step has them: weights are [out, in]."""
    import torch

    random, forward, weight = np.random.RandomState(0), name.endswith("forward"), name.endswith("weight's gradient")
    left = random.randn(*((inner, rows) if weight else (rows, inner))).astype(np.float32)
    right = random.randn(*((columns, inner) if forward else (inner, columns))).astype(np.float32)
    product = jax.jit(lambda a, b: (a.T if weight else a) @ (b.T if forward else b))
    a, b = jnp.asarray(left), jnp.asarray(right)
    ta, tb = torch.from_numpy(left), torch.from_numpy(right)
    ta, tb = ta.T if weight else ta, tb.T if forward else tb
    return [
        Side(f"{name} jax", lambda: jax.block_until_ready(product(a, b))),
        Side(f"{name} torch", lambda: ta @ tb),
    ]


def check(sides: list[Side]) -> str:
    """What was compared. SystemExit when a side's losses are not those of the first side."""
    reference, *others = sides
    for side in others:
        for number, (a, b) in enumerate(zip(reference.losses, side.losses, strict=True)):
            if not abs(a - b) <= (FIRST if number == 0 else LATER) * abs(a):
                raise SystemExit(
                    f"{side.name} computes another step: loss {number + 1} is {b:.6f}, {reference.name} has {a:.6f}"
                )
    losses = ", ".join(f"{loss:.4f}" for loss in reference.losses)
    return f"losses {losses}: the same on every side (first within {FIRST:g}, others within {LATER:g} of ours)"


def on_cpu(args: argparse.Namespace, config: GPTConfig, params: dict, batch: dict) -> dict:
    sides = [ours("ours", config, params, batch, ComputeConfig(), jax.devices()[0])]
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is missing: the twin and the second matmul rate need it (pip install nanochat-lib)")
    import torch

    torch.set_num_threads(hardware.cores())
    sides.append(twin(config, params, batch, compiled=False))
    compiler = os.environ.get("CXX", "g++")
    if not args.skip_compiled and shutil.which(compiler):
        sides.append(twin(config, params, batch, compiled=True))
    elif not args.skip_compiled:
        print(f"twin, compiled: left out, torch.compile needs a C++ compiler and there is no {compiler}")
    for side in sides:
        side.start(CHECKED)
    print(check(sides))

    tokens = args.rows * args.length
    shapes = products(config, tokens)
    multiply = {name: product_sides(name, *shape[:3]) for name, shape in shapes.items()}
    for _ in range(args.rounds):
        for side in sides:
            side.run(args.steps)
        for pair in multiply.values():
            for side in pair:
                side.run(3)

    useful = flops_per_token(config)
    print(f"\n{'product':<28}{'JAX':>8}{'torch':>8}  GFLOP/s")
    ideal, rates = 0.0, {}
    for name, (rows, inner, columns, count) in shapes.items():
        rates[name] = [2 * rows * inner * columns / side.best_s for side in multiply[name]]
        ideal += count * 2 * rows * inner * columns / max(rates[name])
        print(f"{name:<28}{rates[name][0] / 1e9:8.0f}{rates[name][1] / 1e9:8.0f}")
    rate = max(rates["1024³"])
    print(
        f"matmul rate {rate / 1e9:.0f} GFLOP/s; all products with weights at their own best rates: {1e3 * ideal:.0f} ms"
    )

    print(f"\n{'':<16}{'ms':>8}{'tokens/s':>10}{'GFLOP/s':>9}{'share':>8}{'compile':>10}")
    for side in sides:
        flops = useful * tokens / side.best_s
        print(
            f"{side.name:<16}{1e3 * side.best_s:8.1f}{tokens / side.best_s:10.0f}{flops / 1e9:9.0f}{flops / rate:8.1%}"
            f"{max(side.first_s - side.best_s, 0.0):8.1f} s"
        )
    for side in sides[1:]:
        print(f"ours / {side.name}: {side.best_s / sides[0].best_s:.2f} times the tokens/s")
    return {
        "matmul_flops": {name: dict(zip(("jax", "torch"), pair, strict=True)) for name, pair in rates.items()},
        "matmul_rate": rate,
        "sides": {
            side.name: {
                "seconds": side.best_s,
                "tokens_per_s": tokens / side.best_s,
                "share": useful * tokens / side.best_s / rate,
                "compile_s": side.first_s - side.best_s,
                "losses": side.losses,
            }
            for side in sides
        },
    }


def on_accelerator(args: argparse.Namespace, config: GPTConfig, params: dict, batch: dict) -> dict:
    device = jax.devices()[0]
    backends = ("cudnn", "xla") if device.platform == "gpu" else ("splash", "pallas", "xla")
    sides = [
        ours(backend, config, params, batch, ComputeConfig(dtype="bfloat16", attention=backend), device)
        for backend in backends
    ]
    for side in sides:
        side.start(CHECKED)
    for _ in range(args.rounds):
        for side in sides:
            side.run(args.steps)
    chip, tokens, figures = hardware.find_chip(device.device_kind), args.rows * args.length, {}
    print(f"{'attention':<12}{'ms':>8}{'tokens/s':>12}{'MFU':>8}{'compile':>10}")
    for side in sides:
        share = hardware.mfu(flops_per_token(config), tokens / side.best_s, 1, chip)
        shown = "unknown" if share is None else f"{share:.1%}"
        print(
            f"{side.name:<12}{1e3 * side.best_s:8.1f}{tokens / side.best_s:12.0f}{shown:>8}"
            f"{side.first_s - side.best_s:8.1f} s   losses {', '.join(f'{loss:.3f}' for loss in side.losses)}"
        )
        figures[side.name] = {"seconds": side.best_s, "tokens_per_s": tokens / side.best_s, "mfu": share}
    return {"sides": figures}


def main() -> None:
    args = arguments()
    malloc = "the system's"
    if not args.plain_malloc and keep_memory():
        huge = TUNABLES in os.environ.get("GLIBC_TUNABLES", "")
        malloc = "large blocks kept, in huge pages" if huge else "large blocks kept (as `nanochat pretrain` does)"
    heads = max(1, args.width // 128)
    config = GPTConfig(args.length, args.vocab, args.depth, heads, heads, args.width)
    ids = np.random.RandomState(0).randint(0, args.vocab, (1, args.rows, args.length + 1)).astype(np.int32)
    batch = {"inputs": ids[..., :-1], "targets": ids[..., 1:]}
    params = init_params(config, jax.random.key(0))
    machine = hardware.machine()
    print(machine.line())
    print(f"malloc: {malloc}")
    print(
        f"{args.depth} layers, width {args.width}, vocabulary {args.vocab}, {args.rows} × {args.length} tokens: "
        f"{flops_per_token(config) / 1e6:.1f} MFLOP a token"
    )
    run = on_cpu if jax.devices()[0].platform == "cpu" else on_accelerator
    figures = run(args, config, params, batch)
    if args.json:
        shape = {name: getattr(args, name) for name in ("depth", "width", "vocab", "rows", "length")}
        args.json.write_text(
            json.dumps(
                {"machine": machine.line(), "malloc": malloc, "jax": jax.__version__} | shape | figures, indent=1
            )
        )


if __name__ == "__main__":
    main()
