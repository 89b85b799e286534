"""The one compiled training step: gradients over micro-batches, update and metrics in a single program.

The state is donated, so parameters and moments are updated in place. The three hyper-parameters enter as float32
scalars and the batch always has the same types, so a run compiles its step once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.losses import cross_entropy, token_nll
from nanochat_lib.optim import OptState
from nanochat_lib.schedules import Hyper
from nanochat_lib.sizing import GPTConfig

HYPER = Hyper._fields
BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}


class TrainState(NamedTuple):
    params: gpt.Params
    opt_state: OptState
    step: jax.Array  # int32 (), updates made; equal to opt_state.step unless the optimiser was started anew


def init_train_state(
    config: GPTConfig, optimizer: optax.GradientTransformation, source: jax.Array | Mapping[str, jax.Array]
) -> TrainState:
    """Step 0 from a typed random key (fresh parameters) or from given parameters, which are copied to float32.

    The copy keeps the caller's arrays alive: the step deletes the buffers of the state it is given.
    """
    if isinstance(source, Mapping):
        params = {name: jnp.array(value, dtype=jnp.float32) for name, value in source.items()}
    else:
        params = gpt.init_params(config, source)
    rest = optimizer.init(params), jnp.zeros((), jnp.int32)
    # Parameters bound to one device (loaded ones are) bind the step's outputs; a state that starts out unbound would
    # then come back with other types, and the second step would compile again.
    leaf = next(iter(params.values()))
    if leaf.committed and len(leaf.devices()) == 1:
        rest = jax.device_put(rest, leaf.sharding)
    return TrainState(params, *rest)


def loss_and_gradients(
    config: GPTConfig, params: gpt.Params, batch: Mapping[str, jax.Array], dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[jax.Array, gpt.Params, jax.Array]:
    """(loss, gradients, number of targets) of a batch of micro-batches (A, B, T).

    loss = Σ nll·weight / max(number of targets ≥ 0, 1), both sums over all A·B·T positions. Dividing every
    micro-batch by the count of the whole batch makes A micro-batches of B rows equal one of A·B rows, whatever their
    shares of ignored targets; a batch without any target has zero loss and zero gradients.
    """
    count = jnp.sum(batch["targets"] >= 0, dtype=jnp.int32)
    scale = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)

    def loss_fn(params: gpt.Params, micro: Mapping[str, jax.Array]) -> jax.Array:
        logits = gpt.apply(config, params, micro["inputs"], dtype=dtype)
        return cross_entropy(logits, micro["targets"], micro.get("weights"))[0] * scale

    def add(carry: tuple, micro: Mapping[str, jax.Array]) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(params, micro)), None

    if batch["inputs"].shape[0] == 1:  # a scan of one would still carry and add a second set of gradients
        loss, grads = jax.value_and_grad(loss_fn)(params, {name: x[0] for name, x in batch.items()})
    else:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
        (loss, grads), _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), dict(batch))
    return loss, grads, count


@dataclass(frozen=True)
class TrainStep:
    """Callable `(state, batch, hyper) -> (state, metrics)`; `jitted` is the function underneath."""

    jitted: Any

    def __call__(self, state: TrainState, batch: Mapping[str, Any], hyper: Hyper | Mapping[str, Any]) -> tuple:
        return self.jitted(state, self.batch(batch), self.hyper(hyper))

    def lower(self, state: TrainState, batch: Mapping[str, Any], hyper: Hyper | Mapping[str, Any]) -> Any:
        """The step lowered for these arguments, for inspecting or compiling ahead of time."""
        return self.jitted.lower(state, self.batch(batch), self.hyper(hyper))

    @property
    def compiles(self) -> int:
        """How many versions have been compiled; 1 in a healthy run."""
        return self.jitted._cache_size()

    @staticmethod
    def hyper(hyper: Hyper | Mapping[str, Any]) -> dict[str, Any]:
        """float32 scalars: a Python float would be weakly typed and compile the step a second time."""
        values = hyper._asdict() if isinstance(hyper, Hyper) else hyper
        if set(values) != set(HYPER):
            raise UserError(f"train step: hyper has {', '.join(sorted(values))}; needs exactly {', '.join(HYPER)}")
        return {name: jnp.asarray(values[name], jnp.float32) for name in HYPER}

    @staticmethod
    def batch(batch: Mapping[str, Any]) -> dict[str, Any]:
        """int32 and float32 jax arrays, (A, B, T) each; those that are so already, sharded ones too, pass unchanged."""
        if set(batch) - {"weights"} != {"inputs", "targets"}:
            raise UserError(f"train step: batch has {', '.join(sorted(batch))}; needs inputs, targets, maybe weights")
        shapes = {name: tuple(np.shape(x)) for name, x in batch.items()}
        if len(set(shapes.values())) > 1 or len(shapes["inputs"]) != 3:
            raise UserError(f"train step: batch shapes {shapes}; all must be one (micro-batches, rows, tokens)")
        return {
            name: x if getattr(x, "dtype", None) == BATCH[name] and not isinstance(x, np.ndarray)
            else jnp.asarray(x, BATCH[name])
            for name, x in batch.items()
        }  # fmt: skip


def make_train_step(
    config: GPTConfig,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    donate: bool = True,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> TrainStep:
    """The compiled step `(state, batch, hyper) -> (state, metrics)`.

    batch: "inputs" and "targets" int32 (A, B, T), target -1 is ignored; optional "weights" float32 (A, B, T) multiply
    each position's nll (advantages in RL). hyper: lr (a factor), momentum, weight_decay. metrics: "loss" (nats a
    target, weighted), "grad_norm" (all parameters together), "tokens" (targets ≥ 0), device scalars.

    `state` is deleted by the call when `donate` is on; go on with the returned one. A batch without targets, or with
    zero weights only, gives zero gradients, yet the update still applies earlier momentum and weight decay: leave
    the call out to keep the parameters as they are. `dtype` is the compute dtype; gradients are float32.
    """

    def step(state: TrainState, batch: Mapping[str, jax.Array], hyper: Mapping[str, jax.Array]) -> tuple:
        loss, grads, count = loss_and_gradients(config, state.params, batch, dtype)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **hyper)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": count}
        return TrainState(params, opt_state, state.step + 1), metrics

    return TrainStep(jax.jit(step, donate_argnums=(0,) if donate else ()))


def make_eval_step(config: GPTConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Callable[..., tuple]:
    """The compiled `(params, inputs, targets, token_bytes) -> (nats, bytes, nll_sum, count)`, all device scalars.

    inputs, targets (B, T) int32; token_bytes (V,) int32: UTF-8 bytes of each token, 0 for special ones. Ignored
    targets (-1) count nowhere; special ones count in nll_sum and count only. Add the sums over batches in Python
    numbers, then bits per byte = nats / (ln 2 · bytes) and loss = nll_sum / count.
    """

    def evaluate(params: gpt.Params, inputs: jax.Array, targets: jax.Array, token_bytes: jax.Array) -> tuple:
        nll = token_nll(gpt.apply(config, params, inputs, dtype=dtype), targets)
        valid = targets >= 0
        sizes = jnp.where(valid, token_bytes[jnp.where(valid, targets, 0)], 0)
        nats = jnp.sum(jnp.where(sizes > 0, nll, 0.0))
        return nats, jnp.sum(sizes, dtype=jnp.int32), jnp.sum(nll), jnp.sum(valid, dtype=jnp.int32)

    return jax.jit(evaluate)
