"""The one compiled training step: gradients over micro-batches, update and metrics in a single program.

The state is donated, so parameters and moments are updated in place. The three hyper-parameters enter as float32
scalars and the batch always has the same types, so a run compiles its step once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nanochat_lib import gpt
from nanochat_lib.collectives import Collectives
from nanochat_lib.compute import PLAIN, Compute
from nanochat_lib.errors import UserError
from nanochat_lib.losses import nats_and_bytes, token_nll
from nanochat_lib.optim import OptState, apply_updates
from nanochat_lib.schedules import Hyper
from nanochat_lib.sharding import batch_spec, state_sharding, state_spec
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.table_gradient import table_gradients

DType = jax.typing.DTypeLike
HYPER = Hyper._fields
BATCH = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}


class TrainState(NamedTuple):
    params: gpt.Params
    opt_state: OptState
    step: jax.Array  # int32 (), updates made; equal to opt_state.step unless the optimiser was started anew


def init_train_state(
    config: GPTConfig,
    optimizer: optax.GradientTransformation,
    source: jax.Array | Mapping[str, jax.Array],
    *,
    mesh: Mesh | None = None,
    masters: DType = jnp.float32,
) -> TrainState:
    """Step 0 from a typed random key (fresh parameters) or from given parameters, which are copied.

    Parameters are kept in `masters`. With a mesh every leaf is made where sharding.py wants it, never whole on one
    device. The copy keeps the caller's arrays alive: the step deletes the buffers of the state it is given.
    """

    make = partial(_fresh_state, config, optimizer, masters)
    if mesh is not None:
        source = jax.device_get(source) if isinstance(source, Mapping) else source  # it may be bound to one device
        return jax.jit(make, out_shardings=state_sharding(mesh, jax.eval_shape(make, source)))(source)
    state = make(source)
    # Parameters bound to one device (loaded ones are) bind the step's outputs; a state that starts out unbound would
    # then come back with other types, and the second step would compile again.
    leaf = next(iter(state.params.values()))
    return jax.device_put(state, leaf.sharding) if leaf.committed and len(leaf.devices()) == 1 else state


def abstract_state(
    config: GPTConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None, masters: DType = jnp.float32
) -> TrainState:
    """Shapes, dtypes and places of `init_train_state`, without any array: for compiling ahead and for restoring."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(partial(_fresh_state, config, optimizer, masters), key)
    if mesh is None:
        return state
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, state, state_sharding(mesh, state))


def _fresh_state(
    config: GPTConfig, optimizer: optax.GradientTransformation, masters: DType,
    source: jax.Array | Mapping[str, jax.Array],
) -> TrainState:  # fmt: skip
    params = source if isinstance(source, Mapping) else gpt.init_params(config, source)
    params = {name: jnp.array(value, dtype=masters) for name, value in params.items()}
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def loss_and_gradients(
    config: GPTConfig,
    params: gpt.Params,
    batch: Mapping[str, jax.Array],
    compute: Compute = PLAIN,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, gpt.Params, jax.Array]:
    """(loss, gradients, number of targets) of a batch of micro-batches (A, B, T).

    loss = Σ nll·weight / max(number of targets ≥ 0, 1), both sums over all A·B·T positions. Dividing every
    micro-batch by the count of the whole batch makes A micro-batches of B rows equal one of A·B rows, whatever their
    shares of ignored targets; a batch without any target has zero loss and zero gradients.

    Gradients are float32, also where a micro-batch computes in bfloat16. With a mesh, `params` and the gradients are
    laid out by sharding.py and the batch's rows are spread over all devices.
    """
    shapes = {name: tuple(p.shape) for name, p in params.items()}
    moves = Collectives.of(mesh, shapes)
    local = partial(_local_gradients, config, compute, moves)
    if mesh is None:
        return local(params, dict(batch))
    layout = {name: state_spec(shape, mesh) for name, shape in shapes.items()}
    specs = (layout, {name: batch_spec() for name in batch})
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), layout, P()), check_vma=False)(
        params, dict(batch)
    )


def _local_gradients(
    config: GPTConfig, compute: Compute, moves: Collectives, params: gpt.Params, batch: dict[str, jax.Array]
) -> tuple[jax.Array, gpt.Params, jax.Array]:
    """`loss_and_gradients` as one device sees it: its own slices of the parameters, its own rows of the batch."""
    count = moves.total(jnp.sum(batch["targets"] >= 0, dtype=jnp.int32))
    scale = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
    working = {name: moves.working_copy(name, p, compute.dtype) for name, p in params.items()}
    tables = {name: working.pop(name) for name in gpt.table_names(config)}
    # The gradient of a bfloat16 array would be bfloat16. Differentiating by its float32 copy gives what the matrix
    # unit accumulated; the copy itself is never made, since the layers cast it straight back.
    dense = {name: p.astype(jnp.float32) for name, p in working.items()}
    absent = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gpt.param_shapes(config).items()}

    @moves.forget_gathered
    def loss_of(dense: gpt.Params, rows: gpt.Rows, micro: dict[str, jax.Array]) -> jax.Array:
        whole = moves.gather(dense, micro, compute.dtype)
        model = gpt.build(config, absent | whole)  # the tables have been read already
        x = model.hidden(rows, compute)
        with jax.named_scope("loss"):
            return model.loss(x, micro["targets"], micro.get("weights"), scale, compute.loss_chunks)

    def one(micro: dict[str, jax.Array]) -> tuple[tuple[jax.Array, gpt.Params], gpt.Rows]:
        """((loss, gradients of the matrices), gradients of the table rows that were read)."""
        with jax.named_scope("embedding"):
            rows = {
                name: moves.lookup(name, table, micro["inputs"]).astype(compute.dtype) for name, table in tables.items()
            }
        loss, (grads, row_grads) = jax.value_and_grad(loss_of, argnums=(0, 1))(dense, rows, micro)
        return (loss, grads), row_grads

    if batch["inputs"].shape[0] == 1:  # a scan of one would still carry and add a second set of gradients
        (loss, grads), row_grads = one({name: x[0] for name, x in batch.items()})
    else:
        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, dense)
        (loss, grads), row_grads = accumulate(one, zeros, batch)

    with jax.named_scope("embedding_gradients"):  # once a step, not once a micro-batch: a table is large
        flat = {name: g.reshape(-1, g.shape[-1]) for name, g in row_grads.items()}
        sums = table_gradients(batch["inputs"].reshape(-1), flat, config.padded_vocab_size, compute.table_gradients)
    with jax.named_scope("collectives"):
        shares = {name: moves.own_share(name, g, whole=False) for name, g in grads.items()}
        shares |= {name: moves.own_share(name, g, whole=True) for name, g in sums.items()}
        return moves.total(loss), {name: shares[name] for name in params}, count


def accumulate(one: Callable[[Any], tuple], zeros: Any, batch: Any) -> tuple[Any, Any]:
    """(sums, rest) over the A micro-batches of `batch`, a tree of arrays (A, …); one after the other, in one program.

    one(micro) -> (a tree like `zeros`, which is added up; a tree which is kept of each, stacked to (A, …)).
    """

    def add(carry: Any, micro: Any) -> tuple:
        found, kept = one(micro)
        return jax.tree.map(jnp.add, carry, found), kept

    return jax.lax.scan(add, zeros, batch)


def scalars(values: Mapping[str, Any]) -> dict[str, jax.Array]:
    """float32 scalars by name: a Python float would be weakly typed and compile the step a second time."""
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


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
        """Lr, momentum and weight decay as `scalars`."""
        values = hyper._asdict() if isinstance(hyper, Hyper) else hyper
        if set(values) != set(HYPER):
            raise UserError(f"train step: hyper has {', '.join(sorted(values))}; needs exactly {', '.join(HYPER)}")
        return scalars({name: values[name] for name in HYPER})

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
    compute: Compute = PLAIN,
    mesh: Mesh | None = None,
    donate: bool = True,
) -> TrainStep:
    """The compiled step `(state, batch, hyper) -> (state, metrics)`.

    batch: "inputs" and "targets" int32 (A, B, T), target -1 is ignored; optional "weights" float32 (A, B, T) multiply
    each position's nll (advantages in RL). hyper: lr (a factor), momentum, weight_decay. metrics: "loss" (nats a
    target, weighted), "grad_norm" (all parameters together), "tokens" (targets ≥ 0), device scalars.

    `state` is deleted by the call when `donate` is on; go on with the returned one. A batch without targets, or with
    zero weights only, gives zero gradients, yet the update still applies earlier momentum and weight decay: leave
    the call out to keep the parameters as they are. With a mesh, state and batch are global arrays (sharding.py),
    and `optimizer` must have been made for the same mesh.
    """

    def step(state: TrainState, batch: Mapping[str, jax.Array], hyper: Mapping[str, jax.Array]) -> tuple:
        loss, grads, count = loss_and_gradients(config, state.params, batch, compute, mesh)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **hyper)
            params = apply_updates(state.params, updates, state.step)
            metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": count}
        state = TrainState(params, opt_state, state.step + 1)
        # Pinned, because a state that comes back laid out differently would compile the next step anew.
        return state if mesh is None else jax.lax.with_sharding_constraint(state, state_sharding(mesh, state)), metrics

    return TrainStep(jax.jit(step, donate_argnums=(0,) if donate else ()))


def make_eval_step(config: GPTConfig, dtype: DType = jnp.float32) -> Callable[..., tuple]:
    """The compiled `(params, inputs, targets, token_bytes) -> (nats, bytes, nll_sum, count)`, all device scalars.

    inputs, targets (B, T) int32; token_bytes (V,) int32: UTF-8 bytes of each token, 0 for special ones. Ignored
    targets (-1) count nowhere; special ones count in nll_sum and count only. Add the sums over batches in Python
    numbers, then bits per byte = nats / (ln 2 · bytes) and loss = nll_sum / count.
    """

    def evaluate(params: gpt.Params, inputs: jax.Array, targets: jax.Array, token_bytes: jax.Array) -> tuple:
        nll = token_nll(gpt.apply(config, params, inputs, dtype=dtype), targets)
        return *nats_and_bytes(nll, targets, token_bytes), jnp.sum(nll), jnp.sum(targets >= 0, dtype=jnp.int32)

    return jax.jit(evaluate)
