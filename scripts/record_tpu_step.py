"""What compilers say in chapter 06: about single products and a short step on TPUs that are not here, and about a
small model's step on eight CPU devices. Writes assets/tpu_step.json.

    pip install -e ".[tpu]"                  # the compiler; no TPU is needed
    python scripts/record_tpu_step.py        # the whole page, five minutes
    python scripts/record_tpu_step.py --print "bfloat16, highest"    # only this product, to the screen

Chapter 06 reads the page. It compiles a product of it again where the TPU's compiler is installed, and the small step
except in its fast mode. Cycles are estimates of the compiler's cost model.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from nanochat_lib.compiled import Module
from nanochat_lib.course.fake_devices import on_devices
from nanochat_lib.preflight import accounting, preflight
from nanochat_lib.presets import override, preset

PAGE = Path(__file__).parents[1] / "assets" / "tpu_step.json"
M, K, N = 4096, 1536, 6144  # a micro-batch of 2 × 2048 tokens into the MLP of a d24
PRODUCTS = {  # name: dtype of the operands, precision, dtype of the result
    "bfloat16, default": ("bfloat16", "default", None),
    "bfloat16, highest": ("bfloat16", "highest", None),
    "bfloat16, result float32": ("bfloat16", "default", "float32"),
    "float32, default": ("float32", "default", None),
    "float32, highest": ("float32", "highest", None),
}
KEPT = (
    "memory", "needed", "matmul_flops", "attention_flops", "hbm_bytes", "collectives", "padding_waste", "bound",
)  # fmt: skip
MODEL = {"sequence_len": 32, "vocab_size": 128, "n_layer": 4, "n_head": 2, "n_kv_head": 2, "n_embd": 64}
LAYOUTS = "from nanochat_lib.course.layouts import read_layouts\nresult = read_layouts(model, micro)"


def product(name: str) -> dict:
    """What the compiler for a v6e makes of one product."""
    dtype, precision, result = PRODUCTS[name]
    device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    place = lambda *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))  # noqa: E731
    multiply = jax.jit(lambda x, w: jnp.matmul(x, w, precision=precision, preferred_element_type=result))
    module = Module(multiply.lower(place(M, K), place(K, N)).compile().as_text())
    made = accounting.matmuls(module)
    cycles = accounting.estimated_cycles(module)
    dtypes = sorted({f"{' × '.join(p.operands)} -> {p.result}" for p in made})
    return {"products": len(made), "dtypes": dtypes, "cycles": cycles.total}


def step() -> dict:
    """The pre-flight's findings for the preset's step with two layers and four micro-batches on eight v6e."""
    config = override(
        preset("tpu-v6e-8-d24"), {"model.depth": "2", "model.n_embd": "1536", "pretrain.batch_tokens": str(2**17)}
    )
    return shortened(preflight(config, quiet=True))


def shortened(report: dict) -> dict:
    """What the chapter shows of a pre-flight."""
    by_dtype: dict[str, float] = {}
    for p in report["matmuls"]:
        name = f"{' × '.join(p['operands'])} -> {p['result']}"
        by_dtype[name] = by_dtype.get(name, 0) + p["flops"]
    found = {name: report[name] for name in KEPT} | {"flops_by_dtype": by_dtype}
    found["by_formula"] = sum(report["memory_by_formula"].values())
    return found | {name: report["profile"].get(name) for name in ("step", "seconds", "mfu")}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--print"]:
        print(json.dumps({name: product(name) for name in arguments[1:]}))
        return
    page = {
        "made_by": "scripts/record_tpu_step.py", "jax": jax.__version__, "libtpu": version("libtpu"),
        "product": f"{M} × {K} times {K} × {N}", "products": {name: product(name) for name in PRODUCTS},
        "steps": {"v6e": step()},
        "layouts": on_devices(LAYOUTS, 8, model=MODEL, micro=4),
    }  # fmt: skip
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in page.items()]
    PAGE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
