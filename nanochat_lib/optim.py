"""nanochat's optimiser as one optax transformation: AdamW for tables and scalars, Muon for the blocks' matrices.

Parameters are routed by their name, never by their rank: an embedding is a matrix too, and must not go to Muon.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanochat_lib.errors import UserError
from nanochat_lib.muon import HEAD, RECIPE4, MuonOptions, StackState, init_stack, muon, shape_key, update_stack
from nanochat_lib.presets import OptimConfig, RLConfig
from nanochat_lib.sharding import owners, split_axis, state_spec
from nanochat_lib.sizing import GPTConfig

__all__ = ["Group", "OptState", "adamw_step", "apply_updates", "make_optimizer", "muon", "param_groups"]

REFERENCE_WIDTH = 768  # width at which the tables' learning rates were tuned
EPS = 1e-10
SQUARE_LIMIT = 1e18  # a gradient above this has no finite float32 square
MATRICES = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "attn.ve_gate", "mlp.c_fc", "mlp.c_proj")
BLOCK = re.compile(rf"transformer\.h\.(\d+)\.({'|'.join(map(re.escape, MATRICES))})\.weight")
VALUE_EMBEDDING = re.compile(r"value_embeds\.(\d+)\.weight")


@dataclass(frozen=True)
class Group:
    """Parameters that share hyper-parameters. A Muon group is one stack: all its matrices have one shape."""

    name: str  # "lm_head", "wte", "value_embeds", "resid_lambdas", "x0_lambdas", "smear"; Muon: the shape, "512x128"
    kind: str  # "adamw" or "muon"
    params: tuple[str, ...]  # in stack order for Muon
    lr: float
    betas: tuple[float, float] = (0.0, 0.0)  # AdamW only
    weight_decay: float = 0.0  # AdamW only; Muon's arrives with every step


def _adamw_table(config: GPTConfig, lrs: OptimConfig | RLConfig) -> tuple[Group, ...]:
    """The AdamW groups in nanochat's order, still without their parameters."""
    # Tables were tuned at width 768; their rates follow 1/√width.
    width = (config.n_embd / REFERENCE_WIDTH) ** -0.5
    head, wte, embed = lrs.unembedding_lr * width, lrs.embedding_lr * width, lrs.embedding_lr * width
    rows = (
        ("lm_head", head, (0.8, 0.96), 0.01),
        ("wte", wte, (0.8, 0.995), 0.001),
        ("value_embeds", 0.5 * embed, (0.8, 0.995), 0.01),
        ("resid_lambdas", 0.01 * lrs.scalar_lr, (0.8, 0.95), 0.05),
        ("x0_lambdas", lrs.scalar_lr, (0.96, 0.95), 0.0),
        ("smear", lrs.smear_lr, (0.8, 0.95), 0.0),
    )
    if config.recipe == "recipe4":
        rows = (
            ("lm_head", head, (0.8, 0.95), 0.0),
            ("wte", wte, (0.8, 0.95), 0.0),
            ("value_embeds", embed, (0.8, 0.95), 0.0),
            ("resid_lambdas", 0.01 * lrs.scalar_lr, (0.8, 0.95), 0.0),
            ("x0_lambdas", lrs.scalar_lr, (0.96, 0.95), 0.0),
        )
    return tuple(Group(name, "adamw", (), lr, betas, decay) for name, lr, betas, decay in rows)


ADAMW_NAMES = {
    "lm_head.weight": "lm_head",
    "transformer.wte.weight": "wte",
    "resid_lambdas": "resid_lambdas",
    "x0_lambdas": "x0_lambdas",
    "smear_gate.weight": "smear",
    "smear_lambda": "smear",
    "backout_lambda": "smear",
}


def group_of(name: str) -> str:
    """`muon` for the matrices of the blocks, else the AdamW group of a parameter; "" for a name nobody knows."""
    if BLOCK.fullmatch(name):
        return "muon"
    return "value_embeds" if VALUE_EMBEDDING.fullmatch(name) else ADAMW_NAMES.get(name, "")


def param_groups(config: GPTConfig, lrs: OptimConfig | RLConfig, params: Mapping[str, Any]) -> tuple[Group, ...]:
    """Every parameter in exactly one group, groups and members in nanochat's order (the order of its state dict).

    `params` maps names to arrays, to anything else with a shape, or to shapes; None entries are passed over.
    Raises UserError for a name that is no parameter of `config.recipe` and for a block parameter that is no matrix.
    """
    shapes = {name: tuple(getattr(p, "shape", p)) for name, p in params.items() if p is not None}
    table = {group.name: group for group in _adamw_table(config, lrs)}
    adamw: dict[str, list[tuple]] = {name: [] for name in table}
    stacks: dict[tuple[int, ...], list[tuple]] = {}
    for name, shape in shapes.items():
        group = group_of(name)
        if group == "muon":
            if len(shape) != 2:
                raise UserError(f"optimiser: {name} has shape {shape}, Muon needs the whole matrix [out, in]")
            layer, matrix = BLOCK.fullmatch(name).groups()
            stacks.setdefault(shape, []).append(((int(layer), MATRICES.index(matrix)), name))
            continue
        if group not in table:
            raise UserError(
                f"optimiser: no group for parameter {name!r} of recipe {config.recipe}; use nanochat's names"
            )
        position = int(name.split(".")[1]) if group == "value_embeds" else list(ADAMW_NAMES).index(name)
        adamw[group].append((position, name))
    members = lambda entries: tuple(name for _, name in sorted(entries))  # noqa: E731
    tables = [replace(table[name], params=members(entries)) for name, entries in adamw.items() if entries]
    matrices = [Group(shape_key(s), "muon", members(stacks[s]), lrs.matrix_lr) for s in sorted(stacks)]
    return (*tables, *matrices)


class OptState(NamedTuple):
    """Float32 moments: AdamW's by parameter name, Muon's by stack; `step` counts the updates made."""

    step: jax.Array  # int32 ()
    exp_avg: dict[str, jax.Array]
    exp_avg_sq: dict[str, jax.Array]
    muon: dict[str, StackState]


def adamw_step(
    grad: jax.Array, param: jax.Array, m: jax.Array, v: jax.Array, step: jax.Array, lr: jax.Array | float, group: Group
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) in float32: (what to add to `param`, new m, new v).

    m ← m + (1−β1)(g − m), v ← v + (1−β2)(g² − v); p ← p − lr·wd·p − lr · m̂ / (√v̂ + ε), with m̂ = m/(1 − β1^step),
    v̂ = v/(1 − β2^step). `step` is 1 at the first update; the decay acts on the old value.
    """
    beta1, beta2 = group.betas
    grad = jnp.clip(grad.astype(jnp.float32), -SQUARE_LIMIT, SQUARE_LIMIT)
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad * grad - v)
    count = step.astype(jnp.float32)
    m_hat, v_hat = m / (1 - beta1**count), v / (1 - beta2**count)
    update = lr * group.weight_decay * param.astype(jnp.float32) + lr * m_hat / (jnp.sqrt(v_hat) + EPS)
    return -update, m, v


def make_optimizer(
    config: GPTConfig,
    lrs: OptimConfig | RLConfig,
    compute_dtype: Any = jnp.float32,
    *,
    options: MuonOptions | None = None,
    mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon and AdamW over the groups of `param_groups`, for flat parameters {name: array}.

    `lrs` gives the groups' learning rates at width 768 (its schedule fields and weight decay are not read).
    `update(grads, state, params, *, lr, momentum, weight_decay)` returns what to add to the parameters (float32) and
    the new OptState. The three scalars may be traced: `lr` multiplies every group's own rate, the other two are
    Muon's. `compute_dtype` bfloat16 runs Muon's iteration in bfloat16; moments are always float32. `options`
    replaces the Muon variant that belongs to `config.recipe`. With a mesh, the matrices of a stack are dealt out to
    the devices for the iteration, so that none is orthogonalised twice. Finite gradients of any size give finite
    updates.

    Raises UserError for unknown names, for block parameters that are no matrices, and for missing gradients.
    """
    if options is None:
        options = RECIPE4 if config.recipe == "recipe4" else HEAD
        if jnp.dtype(compute_dtype) == jnp.bfloat16:
            options = replace(options, dtype=jnp.bfloat16)

    def init(params: Mapping[str, jax.Array]) -> OptState:
        groups = param_groups(config, lrs, params)
        zeros = lambda: {  # noqa: E731
            name: jnp.zeros(params[name].shape, jnp.float32) for g in groups if g.kind == "adamw" for name in g.params
        }
        stacks = {g.name: init_stack(len(g.params), params[g.params[0]].shape) for g in groups if g.kind == "muon"}
        return OptState(jnp.zeros((), jnp.int32), zeros(), zeros(), stacks)

    def update(
        grads: Mapping[str, jax.Array],
        state: OptState,
        params: Mapping[str, jax.Array] | None = None,
        *,
        lr: jax.Array | float,
        momentum: jax.Array | float,
        weight_decay: jax.Array | float,
        **extra: Any,
    ) -> tuple[dict[str, jax.Array], OptState]:
        if params is None:
            raise UserError("the optimiser's update needs the parameters: update(grads, state, params, …)")
        check_gradients(grads, params)
        step = state.step + 1
        updates, exp_avg, exp_avg_sq, stacks = dict.fromkeys(params), {}, {}, {}
        for group in param_groups(config, lrs, params):
            rate = lr * group.lr
            if group.kind == "muon":
                gradient, weights = (
                    jnp.stack([tree[name].astype(jnp.float32) for name in group.params]) for tree in (grads, params)
                )
                delta, stacks[group.name] = update_dealt(
                    mesh, gradient, weights, state.muon[group.name], rate, momentum, weight_decay, options
                )
                updates |= zip(group.params, delta, strict=True)
                continue
            for name in group.params:
                updates[name], exp_avg[name], exp_avg_sq[name] = adamw_step(
                    grads[name], params[name], state.exp_avg[name], state.exp_avg_sq[name], step, rate, group
                )
        return updates, OptState(step, exp_avg, exp_avg_sq, stacks)

    return optax.GradientTransformationExtraArgs(init, update)


def update_dealt(
    mesh: Mesh | None, grads: jax.Array, params: jax.Array, state: StackState, *rest: Any
) -> tuple[jax.Array, StackState]:
    """`update_stack` with whole matrices on each device: the stack is filled up with zeros until it divides, cut along
    its first axis for the update, and laid out as the state is kept again."""
    if mesh is None:
        return update_stack(grads, params, state, *rest)
    count = grads.shape[0]
    extra = -count % mesh.size
    owner = NamedSharding(mesh, P(owners(mesh)))

    def deal(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.pad(x, ((0, extra), (0, 0), (0, 0))), owner)

    def collect(x: jax.Array, spec: P) -> jax.Array:
        return jax.lax.with_sharding_constraint(x[:count], NamedSharding(mesh, spec))

    delta, new = update_stack(deal(grads), deal(params), StackState(*map(deal, state)), *rest)
    # Along the rows of the matrices, as each parameter lives: taking a matrix out of the stack then moves nothing.
    axis = split_axis(grads.shape[1:], mesh)
    rows = P() if axis is None else P(None, *[None] * axis, owners(mesh))
    return collect(delta, rows), StackState(*(collect(x, state_spec(x.shape, mesh)) for x in new))


def apply_updates(params: Mapping[str, jax.Array], updates: Mapping[str, jax.Array], step: jax.Array) -> dict:
    """p + u of every parameter in its own dtype; `step` () int32 is the number of the update.

    A bfloat16 parameter is rounded up or down at random, with the odds that keep its mean (arXiv:2010.06192). Rounded
    to nearest, the small updates at a run's end would vanish: each is less than half the distance of two neighbours.
    The odds depend on `step` and the name's place only, so a resumed run rounds as the unbroken one.
    """
    key = jax.random.fold_in(jax.random.key(0), step)
    made = {}
    for place, (name, p) in enumerate(sorted(params.items())):
        value = p.astype(jnp.float32) + updates[name].astype(jnp.float32)
        half = p.dtype == jnp.bfloat16
        made[name] = round_at_random(value, jax.random.fold_in(key, place)) if half else value.astype(p.dtype)
    return {name: made[name] for name in params}


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 → bfloat16: one of the two neighbours, the nearer the likelier. Infinities and NaN stay what they are."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + jax.random.bits(key, x.shape, jnp.uint16)
    cut = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), cut, x.astype(jnp.bfloat16))


def check_gradients(grads: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Raises UserError unless every parameter has a gradient of its own shape, and nothing else has one."""
    present = lambda tree: {name: tuple(x.shape) for name, x in tree.items() if x is not None}  # noqa: E731
    wrong = sorted(name for name, _ in present(grads).items() ^ present(params).items())
    if wrong:
        raise UserError(f"optimiser: gradient and parameter do not match for {', '.join(dict.fromkeys(wrong))}")
