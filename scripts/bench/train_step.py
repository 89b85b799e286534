"""Time of a training step: the one compiled program against the same maths as three programs in a Python loop.

One program: the scan over micro-batches, the optimiser and the parameter update, state donated. Three programs:
gradients of a micro-batch, sum of gradients, update; the loop over micro-batches runs in Python and nothing is
donated. Both sides run alternately in this process, from the same parameters and batches, and must end at the same
loss. Also prints the optimiser's share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nanochat_lib.compute import Compute
from nanochat_lib.optim import make_optimizer
from nanochat_lib.presets import OptimConfig
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import TrainState, init_train_state, loss_and_gradients, make_train_step

EXAMPLE = "example: python scripts/bench/train_step.py --depth 4 --width 128 --micro 2 --rows 8 --steps 10"
HYPER = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4)")
    parser.add_argument("--width", type=int, default=128, help="channels (default 128)")
    parser.add_argument("--heads", type=int, default=2, help="attention heads (default 2)")
    parser.add_argument("--vocab", type=int, default=1024, help="vocabulary (default 1024)")
    parser.add_argument("--length", type=int, default=128, help="tokens a row (default 128)")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches a step (default 2)")
    parser.add_argument("--rows", type=int, default=8, help="rows a micro-batch (default 8)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each side (default 8)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute dtype")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = GPTConfig(
        args.length, args.vocab, args.depth, args.heads, args.heads, args.width, window_pattern="L"
    )  # fmt: skip
    dtype = jnp.dtype(args.dtype)
    optimizer = make_optimizer(config, OptimConfig(), dtype)
    random = np.random.RandomState(0)
    ids = random.randint(0, args.vocab, (args.micro, args.rows, args.length + 1)).astype(np.int32)
    batch = {"inputs": jnp.asarray(ids[..., :-1]), "targets": jnp.asarray(ids[..., 1:])}
    hyper = {name: jnp.float32(value) for name, value in HYPER.items()}
    start = init_train_state(config, optimizer, jax.random.key(0))

    compute = Compute(args.dtype)
    one_program = make_train_step(config, optimizer, compute=compute)

    gradients = jax.jit(lambda params, micro: loss_and_gradients(config, params, micro, compute))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

    @jax.jit
    def update(state: TrainState, loss: jax.Array, grads: dict[str, jax.Array]) -> tuple:
        loss, grads = jax.tree.map(lambda x: x / args.micro, (loss, grads))  # equal counts: a mean of means
        delta, opt_state = optimizer.update(grads, state.opt_state, state.params, **hyper)
        return TrainState(optax.apply_updates(state.params, delta), opt_state, state.step + 1), loss

    def three_programs(state: TrainState) -> tuple[TrainState, jax.Array]:
        total = None
        for i in range(args.micro):
            loss, grads, _ = gradients(state.params, {name: x[i : i + 1] for name, x in batch.items()})
            total = (loss, grads) if total is None else add(total, (loss, grads))
        return update(state, *total)

    def one(state: TrainState) -> tuple[TrainState, jax.Array]:
        state, metrics = one_program(state, batch, hyper)
        return state, metrics["loss"]

    sides = {"one program": one, "three programs": three_programs}
    states = {name: init_train_state(config, optimizer, start.params) for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses = {}
    for number in range(args.steps + 2):  # the first two are compilation and warm-up
        for name, side in sides.items():
            begin = time.perf_counter()
            states[name], losses[name] = jax.block_until_ready(side(states[name]))
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)

    grads = jax.tree.map(jnp.ones_like, start.params)
    alone = jax.jit(lambda g, s, p: optimizer.update(g, s, p, **hyper))
    share = []
    for number in range(args.steps + 1):
        begin = time.perf_counter()
        jax.block_until_ready(alone(grads, start.opt_state, start.params))
        if number:
            share.append(time.perf_counter() - begin)

    tokens = batch["inputs"].size
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        spread = f"{1e3 * min(seconds[name]):.1f} … {1e3 * max(seconds[name]):.1f}"
        print(f"{name:15} {1e3 * median:9.1f} ms a step ({spread}), {tokens / median:9.0f} tokens/s")
    fast, slow = medians.values()
    print(f"three / one     {slow / fast:9.3f}")
    part = statistics.median(share)
    print(f"optimiser alone {1e3 * part:9.1f} ms, {part / fast:.1%} of the step")
    a, b = (float(loss) for loss in losses.values())
    print(f"last loss       {a:.6f} and {b:.6f}")
    if abs(a - b) > 1e-2 * max(a, b):
        raise SystemExit("the two sides do not compute the same step")


if __name__ == "__main__":
    main()
