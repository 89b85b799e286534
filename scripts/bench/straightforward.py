"""The training step that most JAX users would write first: what `tpu_estimate.py` compares the library's step with.

The same model (recipe 4) and the same loss, from the same flat dict of parameters. Everything is left to JAX and its
partitioner: parameters stand whole on every device, the batch is cut along `data`, `jax.grad` differentiates, a scan
adds up the micro-batches' gradients. Arrays keep time before heads, (B, T, H, D), except around the attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanochat_lib import gpt
from nanochat_lib.attention import rotary_table
from nanochat_lib.sizing import GPTConfig

Params = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]  # q, k, v (B, H, T, D) and the window
SOFTCAP, ROTARY_BASE, GATE = 20.0, 10_000.0, 2.0


def norm(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 2.0**-23)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows of a float32 table. Its gradient is a product with the one-hot ids: a scatter is slow on a TPU."""
    return table.astype(dtype)[ids]


def _lookup_forward(table: jax.Array, ids: jax.Array, dtype: jax.typing.DTypeLike) -> tuple:
    return lookup(table, ids, dtype), (ids, table.shape[0])


def _lookup_backward(dtype: jax.typing.DTypeLike, saved: tuple, g: jax.Array) -> tuple:
    ids, rows = saved
    with jax.named_scope("embedding_gradients"):
        onehot = jax.nn.one_hot(ids, rows, dtype=jnp.float32)
        return jnp.einsum("btv,btc->vc", onehot, g.astype(jnp.float32), precision="highest"), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def loss_of(
    config: GPTConfig,
    dtype: jax.typing.DTypeLike,
    attend: Attend,
    params: Params,
    inputs: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Mean nll of targets (B, T), all of them ≥ 0, in nats. Weights are float32 and cast where they are used."""
    b, t = inputs.shape
    tables = rotary_table(t, config.head_dim, ROTARY_BASE, True)
    cos, sin = (jnp.asarray(table, dtype)[:, None] for table in tables)

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ params[f"{name}.weight"].astype(dtype).T

    x = x0 = norm(lookup(params["transformer.wte.weight"], inputs, dtype))
    for i in range(config.n_layer):
        block = f"transformer.h.{i}"
        x = params["resid_lambdas"][i].astype(dtype) * x + params["x0_lambdas"][i].astype(dtype) * x0
        with jax.named_scope("attention"):
            h = norm(x)
            q, k, v = (linear(h, f"{block}.attn.c_{n}").reshape(b, t, -1, config.head_dim) for n in "qkv")
            if config.has_value_embedding(i):
                embedded = lookup(params[f"value_embeds.{i}.weight"], inputs, dtype).reshape(v.shape)
                gate = GATE * jax.nn.sigmoid(linear(h[..., : config.gate_channels], f"{block}.attn.ve_gate"))
                v = v + gate[..., None] * embedded
            q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
            y = attend(*(a.transpose(0, 2, 1, 3) for a in (q, k, v)), config.windows[i])
            x = x + linear(y.transpose(0, 2, 1, 3).reshape(b, t, -1), f"{block}.attn.c_proj")
        with jax.named_scope("mlp"):
            x = x + linear(jax.nn.relu(linear(norm(x), f"{block}.mlp.c_fc")) ** 2, f"{block}.mlp.c_proj")
    with jax.named_scope("loss"):
        logits = linear(norm(x), "lm_head").astype(jnp.float32)[..., : config.vocab_size]
        logits = SOFTCAP * jnp.tanh(logits / SOFTCAP)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def make_step(
    config: GPTConfig, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh, dtype: jax.typing.DTypeLike,
    attend: Attend,
):  # fmt: skip
    """The compiled `(params, opt_state, batch, hyper) -> (params, opt_state, loss)`.

    batch: "inputs" and "targets" int32 (A, B, T), B over the mesh's one axis `data`. `attend` sees one device's rows.
    `optimizer` is the library's own, made without a mesh, so that only the gradients' way differs; where its moments
    live is left to the partitioner.
    """
    rows = P("data")

    def sharded(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
        """A kernel cannot be partitioned by the compiler."""
        local = jax.shard_map(partial(attend, window=window), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        return local(q, k, v)

    def step(params: Params, opt_state, batch: Mapping[str, jax.Array], hyper: Mapping[str, jax.Array]) -> tuple:
        gradients = jax.value_and_grad(partial(loss_of, config, dtype, sharded))

        def add(total: tuple, micro: Mapping[str, jax.Array]) -> tuple:
            return jax.tree.map(jnp.add, total, gradients(params, micro["inputs"], micro["targets"])), None

        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, batch)
        loss, grads = jax.tree.map(lambda g: g / batch["inputs"].shape[0], total)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, opt_state, params, **hyper)
            return optax.apply_updates(params, updates), opt_state, loss

    whole = NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, None, whole))


def abstract_arguments(
    config: GPTConfig, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh, micro: int, rows: int
) -> tuple:
    """The step's arguments without any array, for compiling ahead; `rows` of a micro-batch on all devices together."""

    def arrays(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: arrays(shape, jnp.float32, P()) for name, shape in gpt.param_shapes(config).items()}
    shape = (micro, rows, config.sequence_len)
    batch = {name: arrays(shape, jnp.int32, P(None, "data")) for name in ("inputs", "targets")}
    hyper = {name: arrays((), jnp.float32, P()) for name in ("lr", "momentum", "weight_decay")}
    return params, jax.eval_shape(optimizer.init, params), batch, hyper
