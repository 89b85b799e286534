"""The two steps that scripts/bench/tpu_estimate.py compares are one computation, and its bookkeeping adds up."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import vectors
from jax.sharding import Mesh

from nanochat_lib import gpt
from nanochat_lib.attention import attention
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import init_train_state, make_train_step

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "bench"))
import step_costs
import straightforward

CONFIG = GPTConfig(16, 60, 2, 2, 2, 32, window_pattern="SL", recipe="recipe4")  # windows 8 and 16, a padded vocabulary
HYPER = {name: jnp.float32(1.0) for name in ("lr", "momentum", "weight_decay")}
# Changes nothing and keeps the gradients: Muon, in bfloat16 for this recipe, would blow rounding up.
KEEP = optax.GradientTransformationExtraArgs(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params, **hyper: (jax.tree.map(jnp.zeros_like, params), grads),
)


def test_straightforward_step_is_ours() -> None:
    """A step of 2 micro-batches in float32: the loss to 1e-6, each gradient to 1e-5 of its largest entry."""
    start = {name: vectors.fill(name, shape) for name, shape in gpt.param_shapes(CONFIG).items()}
    fresh = lambda: {name: jnp.asarray(p) for name, p in start.items()}  # noqa: E731
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 2, 3, 16)).astype(np.int32)
    batch = {"inputs": jnp.asarray(ids[0]), "targets": jnp.asarray(ids[1])}

    state, metrics = make_train_step(CONFIG, KEEP)(init_train_state(CONFIG, KEEP, fresh()), batch, HYPER)
    attend = lambda q, k, v, window: attention(q, k, v, window=window)  # noqa: E731
    step = straightforward.make_step(CONFIG, KEEP, Mesh(np.array(jax.devices()[:1]), "data"), jnp.float32, attend)
    params, gradients, loss = step(fresh(), KEEP.init(fresh()), batch, HYPER)

    assert float(loss) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    for name, before in start.items():
        ours, theirs = np.asarray(state.opt_state[name]), np.asarray(gradients[name])
        assert np.abs(ours).max() > 0, name
        np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max(), rtol=0, err_msg=name)
        np.testing.assert_array_equal(params[name], before)


def line(name: str, shape: str, opcode: str, op_name: str, cycles: int | None, more: str = "") -> str:
    estimate = f', backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}' if cycles is not None else ""
    return f'  %{name} = {shape} {opcode}, {more}metadata={{op_name="{op_name}"}}{estimate}'


def program(batches: int = 4) -> str:
    """A step of one fusion of each kind: 1, 2, 4, … cycles in the loop, 1000 to 3000 outside of it."""
    body = "jit(step)/while/body/closed_call/"
    fused = {
        "product": [line("p.1", "bf16[8,8]{1,0}", "convolution(%a.1, %a.2)", body + "jvp(mlp)/dot_general", None)],
        "gradient": [line("p.2", "f32[8,8]{1,0}", "convolution(%a.3, %a.4)", body + "jvp(loss)/dot_general", None)],
        "kernel": [line("p.3", "f32[8,8]{1,0}", "reduce(%a.5)", body + "jit(_splash_attention)/reduce_sum", None)],
        "mixed": [
            line("p.4", "f32[8,8]{1,0}", "reduce(%a.6)", body + "jit(_splash_attention)/reduce_sum", None),
            line("p.5", "bf16[8,8]{1,0}", "multiply(%p.4, %a.7)", body + "transpose(jvp(attention))/mul", None),
        ],
        "table": [line("p.6", "f32[8,8]{1,0}", "dot(%a.8, %a.9)", body + "embedding_gradients/dot_general", None)],
        "rows": [line("p.7", "bf16[64,64]{1,0}", "gather(%a.8, %a.9)", body + "embedding/gather", None)],
    }
    calls = lambda name: f"kind=kOutput, calls=%{name}, "  # noqa: E731
    loop = [
        line("f.1", "bf16[8,8]{1,0}", "fusion(%x)", body + "jvp(mlp)/convert", 1, calls("product")),
        line("f.2", "f32[8,8]{1,0}", "fusion(%x)", "jit(step)/while/body/add", 2, calls("gradient")),
        line("f.3", "f32[8,8]{1,0}", "fusion(%x)", body + "jit(_splash_attention)/reduce_sum", 4, calls("kernel")),
        line("f.4", "bf16[8,8]{1,0}", "fusion(%x)", body + "jit(_splash_attention)/mul/attention", 8, calls("mixed")),
        line("f.5", "f32[8,8]{1,0}", "fusion(%x)", body + "embedding_gradients/add", 16, calls("table")),
        line("f.6", "u8[1024,1024]{1,0}", "negate(%x)", "", 32),
        line("f.9", "bf16[8,8]{1,0}", "negate(%x)", "jit(step)/while/jit(dynamic_update_index_in_dim)/d", 128),
        line("f.7", "pred[1024]{0}", "negate(%x)", body + "jvp(mlp)/gt", 64),
        line("f.8", "bf16[64,64]{1,0}", "fusion(%x)", body + "embedding/gather", None, calls("rows")),
        line("k.1", "bf16[4096]{0}", "custom-call(%x)", body + "pallas_call", None, 'custom_call_target="tpu", '),
        line("c.1", "bf16[4096]{0}", "custom-call(%x)", "", None, 'custom_call_target="ConcatBitcast", '),
        line("s.1", "(bf16[4096]{0}, bf16[4096]{0})", "copy-start(%x)", "", None),
        line("s.2", "bf16[4096]{0}", "copy-done(%s.1)", "", None),
    ]
    counted = f'body=%body, condition=%condition, backend_config={{"known_trip_count":{{"n":"{batches}"}}}}'
    entry = [
        f"  %w = (s32[]) while(%x), {counted}",
        line("v.1", "bf16[8,8]{1,0}", "convert(%x)", body + "jvp(attention)/convert_element_type", 3000),
        line("o.1", "f32[8,8]{1,0}", "negate(%x)", "jit(step)/optimizer/mul", 1000),
        line("g.1", "bf16[4096]{0}", "all-gather(%x)", "jit(step)/all_gather", 2000),
        line("g.2", "bf16[4096]{0}", "reduce-scatter(%x)", "jit(step)/collectives/reduce_scatter", None),
    ]
    parts = [(f"%{name} (a: f32[])", lines) for name, lines in fused.items()]
    parts += [("%condition (a: s32[])", []), ("%body (a: s32[])", loop), ("ENTRY %main (a: s32[])", entry)]
    return "\n".join("\n".join([f"{head} -> f32[] {{", *lines, "}"]) for head, lines in parts)


def test_costs_by_kind() -> None:
    found = step_costs.read(program())
    assert found.trips == 4
    assert found.micro.cycles == {
        "matmul": 1, "loss": 2, step_costs.KERNEL: 4, step_costs.OUTSIDE: 8, "embedding gradients": 16 + 128,
        "masks": 32, "elementwise": 64,
    }  # fmt: skip
    assert found.micro.total == 255 - 4  # without the kernel's own
    assert found.micro.uncosted == {"fused gather": 8192, "kernel k": 8192, "prefetches, beside other work": 8192}
    assert found.rest.cycles == {"optimizer": 1000, "collectives": 2000, "elementwise": 3000}
    assert found.rest.uncosted == {"reduce-scatter": 8192}


def test_figures_go_on_linearly() -> None:
    cost = lambda cycles, size: step_costs.Cost(Counter(matmul=cycles), Counter(gather=size))  # noqa: E731
    deep = step_costs.extrapolate({4: cost(30, 7), 2: cost(20, 5)}, 24)
    assert (deep.total, deep.uncosted["gather"]) == (130, 27)
    assert step_costs.extrapolate({3: cost(30, 7)}, 3).total == 30


@pytest.mark.aot
def test_both_sides_compile_for_a_tpu() -> None:
    """At a small width: both loops are found, and everything of the step is either in it or once a step."""
    import tpu_estimate as estimate

    model = GPTConfig(256, 512, 2, 2, 2, 256, recipe="recipe4")
    devices = np.array(estimate.topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices)
    chip = next(chip for chip in estimate.CHIPS if chip.name == "v6e")
    setting = estimate.Setting(model, chip, devices, rows=1, batches=3, layers=(2,))
    theirs, ours = (estimate.compiled(setting, side, 2, None) for side in estimate.SIDES)
    for found in (theirs, ours):
        assert found.trips == 3
        assert {"matmul", "loss", "elementwise"} <= found.micro.cycles.keys()
        assert "optimizer" not in found.micro.cycles and "optimizer" in found.rest.cycles
        assert any(name.startswith("kernel splash") for name in found.micro.uncosted)
    assert theirs.micro.cycles["embedding gradients"] > 0 and "all-reduce" in theirs.rest.uncosted
    assert "kernel segment_sum" in ours.rest.uncosted and "kernel segment_sum" not in ours.micro.uncosted
    assert estimate.table_gradient_cycles(setting) > 0


def test_a_program_without_loop_is_refused() -> None:
    with pytest.raises(SystemExit, match="--micro 2"):
        step_costs.read("ENTRY %main (a: s32[]) -> f32[] {\n}")
