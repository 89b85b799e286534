"""The reader of compiled programs, on programs whose products, loops and sizes are known."""

import jax
import jax.numpy as jnp
import pytest

from nanochat_lib.compiled import Array, Module, operand_names, parse
from nanochat_lib.preflight import accounting
from nanochat_lib.preflight.accounting import Matmul

TPU = """HloModule jit_step, is_scheduled=true

%fused_computation.1 (param_0.1: bf16[2,2048,6144], param_1.1: bf16[2,2048,1536]) -> f32[6144,1536] {
  %param_0.1 = bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = bf16[2,2048,1536]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %convolution.1 = f32[6144,1536,1]{1,0,2:T(8,128)} convolution(%param_0.1, %param_1.1), window={size=2}, dim_labels=0fb_0io->bf0, metadata={op_name="jit(step)/while/body/transpose(jvp(mlp))/dot_general"}
  ROOT %bitcast.1 = f32[6144,1536]{1,0:T(8,128)} bitcast(%convolution.1)
}

%fused_computation.2 (param_0.2: f32[16,8,128], param_1.2: f32[8,128], param_2.2: s32[]) -> f32[16,8,128] {
  %param_0.2 = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %param_1.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %param_2.2 = s32[]{:T(128)} parameter(2)
  %bitcast.2 = f32[1,8,128]{2,1,0:T(8,128)} bitcast(%param_1.2)
  ROOT %dynamic-update-slice.1 = f32[16,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%param_0.2, %bitcast.2, %param_2.2, %param_2.2, %param_2.2)
}

%condition (arg.1: (s32[], bf16[2,2048,6144])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %get-tuple-element.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  %constant.1 = s32[]{:T(128)} constant(4)
  ROOT %compare.1 = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.1), direction=LT
}

%body (arg.2: (s32[], bf16[2,2048,6144])) -> (s32[], bf16[2,2048,6144]) {
  %arg.2 = (s32[]{:T(128)}, bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %a = bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg.2), index=1
  %b = bf16[2,2048,1536]{2,1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %fusion.1 = f32[6144,1536]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%fused_computation.1, metadata={op_name="jit(step)/while/body/transpose(jvp(mlp))/dot_general"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %splash.7 = f32[8,128]{1,0:T(8,128)} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/while/body/attention/splash"}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)}) tuple(%arg.2, %a)
}

ENTRY %main (p.0: bf16[2,2048,6144], p.1: f32[16,8,128], p.2: f32[8,128], p.3: s32[]) -> f32[16,8,128] {
  %p.0 = bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = f32[16,8,128]{2,1,0:T(8,128)} parameter(1)
  %p.2 = f32[8,128]{1,0:T(8,128)} parameter(2)
  %p.3 = s32[]{:T(128)} parameter(3)
  %while.1 = (s32[]{:T(128)}, bf16[2,2048,6144]{2,1,0:T(8,128)(2,1)}) while(%tuple.9), condition=%condition, body=%body
  %copy-start.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p.2)
  %all-reduce.1 = (f32[8,128]{1,0:T(8,128)}, f32[]{:T(128)}) all-reduce(%p.2, %p.3), replica_groups={}
  ROOT %fusion.2 = f32[16,8,128]{2,1,0:T(8,128)} fusion(%p.1, %p.2, %p.3), kind=kLoop, calls=%fused_computation.2, metadata={op_name="jit(step)/optimizer/add"}, backend_config={"window_config":{"estimated_cycles":"50"}}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def tpu() -> Module:
    return Module(TPU)


def test_a_loop_counts_as_often_as_its_condition_allows(tpu):
    assert tpu.entry == "main"
    assert tpu.loops == {"body": 4}
    times = {run.instruction.name: run.times for run in tpu.runs()}
    assert times["fusion.1"] == 4 and times["fusion.2"] == 1


def test_a_convolution_is_a_product_summed_over_its_window_and_features(tpu):
    (product,) = accounting.matmuls(tpu)
    assert (product.m, product.k, product.n) == (6144, 2 * 2048, 1536)
    assert product.operands == ("bf16", "bf16") and product.result == "f32" and product.scope == "mlp"
    assert product.flops == 2 * 6144 * 4096 * 1536 * 4


def test_a_dilated_window_is_a_batch():
    text = TPU.replace(
        "window={size=2}, dim_labels=0fb_0io->bf0", "window={size=2 stride=1 lhs_dilate=2}, dim_labels=0fb_0io->bf0"
    )
    (product,) = accounting.matmuls(Module(text))
    assert (product.batch, product.k) == (2, 2048)


def test_a_product_that_lost_its_name_belongs_where_its_operands_come_from():
    text = """ENTRY %main (p.0: f32[4,8]) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  %gram.1 = f32[4,4]{1,0} dot(%p.0, %p.0), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(step)/optimizer/dot_general"}
  %copy.1 = f32[4,4]{1,0} copy(%gram.1)
  %square.1 = f32[4,4]{1,0} dot(%copy.1, %copy.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %fusion.1 = f32[4,8]{1,0} fusion(%square.1, %p.0), kind=kCustom, calls=%fused
}

%fused (a: f32[4,4], b: f32[4,8]) -> f32[4,8] {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501
    found = [(p.scope, p.flops) for p in accounting.matmuls(Module(text))]
    assert found == [("optimizer", 2 * 4 * 8 * 4), ("optimizer", 2 * 4 * 4 * 4), ("optimizer", 2 * 4 * 4 * 8)]
    nameless = text.replace(', metadata={op_name="jit(step)/optimizer/dot_general"}', "")
    assert {p.scope for p in accounting.matmuls(Module(nameless))} == {"other"}


def test_cycles_stand_under_their_kind_and_kernels_are_named_as_uncosted(tpu):
    found = accounting.estimated_cycles(tpu)
    assert found.by_kind == {"matmul": 4000, "optimizer": 50} and found.total == 4050
    assert found.uncosted == {"splash": 4 * (2 * 2048 * 6144 * 2 + 8 * 128 * 4)}
    assert accounting.estimated_cycles(tpu, "body").by_kind == {"matmul": 1000}


def test_traffic_leaves_out_the_chips_own_memory_and_counts_slices_by_their_size(tpu):
    size = lambda name, computation: accounting.hbm_bytes(tpu, computation, tpu.computations[computation][name])  # noqa: E731
    assert size("fusion.1", "body") == 2 * 2048 * 6144 * 2 + 6144 * 1536 * 4  # operand b stands in space 1
    assert size("copy-start.1", "main") == 8 * 128 * 4
    assert size("fusion.2", "main") == 2 * 8 * 128 * 4 + 4  # reads the slice and writes it, in place
    assert size("while.1", "main") == size("p.0", "main") == 0


def test_messages_are_counted_with_their_bytes(tpu):
    assert accounting.collectives(tpu) == {"all-reduce": (1, 8 * 128 * 4 + 4)}


def test_padding_fills_two_sides_to_the_matrix_unit():
    waste = lambda m, k, n, unit: 1 - (m * k * n) / (Matmul("", 1, m, k, n, ("", ""), "", "", 1).padded_flops(unit) / 2)  # noqa: E731
    assert waste(4096, 1536, 6144, 256) == 0
    assert waste(4096, 128, 2048, 256) == 0.5  # a head of 128 on a unit of 256
    assert waste(4096, 128, 2048, 128) == 0
    assert waste(4096, 1536, 12, 128) == 1 - 12 / 16  # narrow side streamed in eights
    assert waste(1, 512, 512, 128) == 1 - 1 / 8


def test_odd_lines_of_program_text():
    found = parse(
        "x.1", "(f32[2]{0}, /*index=1*/s32[]) fusion(f32[2]{0} %a.b, (s32[], f32[3]) %c), kind=kLoop, calls=%f"
    )
    assert found.opcode == "fusion" and found.operands == ("a.b", "c") and found.called("calls") == "f"
    assert found.arrays == (Array("f32", (2,)), Array("s32", ()))
    assert list(operand_names("")) == [] and found.cycles is None and found.op_name == ""
    assert parse("k", "f8e4m3fn[4,8]{1,0} constant({...})").arrays[0].bytes == 32


def test_a_cpus_program_with_a_loop_counts_exactly():
    """Five trips of a (3, 7) × (7, 5) product and one batched product of eight (2, 4) × (4, 6)."""

    def f(x, w, a, b):
        total, _ = jax.lax.scan(lambda c, _: (c + jnp.tanh(x * c[0, 0]) @ w, None), jnp.zeros((3, 5)), None, length=5)
        return total, a @ b

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 7), (7, 5), (8, 2, 4), (8, 4, 6))]
    module = Module(jax.jit(f).lower(*shapes).compile().as_text())
    products = sorted(accounting.matmuls(module), key=lambda p: p.batch)
    assert [(p.batch, p.m, p.k, p.n, p.times) for p in products] == [(1, 3, 7, 5, 5), (8, 2, 4, 6, 1)]
    assert sum(p.flops for p in products) == 2 * (3 * 7 * 5 * 5 + 8 * 2 * 4 * 6)
    assert accounting.collectives(module) == {}
    assert accounting.memory_traffic(module) > 0
