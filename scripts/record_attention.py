"""Compiles attention for a TPU v6e that is not here and writes what the compiler says: assets/attention_v6e.json.

    pip install -e ".[tpu]"                       # the compiler; no TPU is needed
    python scripts/record_attention.py            # the whole page, some minutes
    python scripts/record_attention.py --print "tiles of 512, 6 heads of 256" …    # only these lines, to the screen

Chapter 03 reads the page, and compiles a line of it again where the compiler is installed. Every line is one layer's
attention, forward and backward, in bfloat16.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from nanochat_lib.attention import attention
from nanochat_lib.kernels.flash import flash_attention

PAGE = Path(__file__).parents[1] / "assets" / "attention_v6e.json"
ROWS, LENGTH = 16, 2048  # large enough that no array fits the fast memory as a whole
HEADS = ((12, 128), (6, 256))


def lines() -> dict[str, tuple]:
    """Name -> (attention function, heads, head size)."""
    found = {}
    for heads, d in HEADS:
        shape = f"{heads} heads of {d}"
        found[f"plain XLA, {shape}"] = (partial(attention, window=LENGTH, backend="reference"), heads, d)
        for tile in (128, 256, 512, 1024, 2048):
            kernel = partial(flash_attention, window=LENGTH, block_q=tile, block_kv=tile)
            found[f"tiles of {tile}, {shape}"] = (kernel, heads, d)
        found[f"splash, {shape}"] = (partial(attention, window=LENGTH, backend="splash:v6e"), heads, d)
    return found


def compile_line(device: object, attend: object, heads: int, d: int) -> dict:
    def forward_and_backward(q, k, v, dy):
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    array = jax.ShapeDtypeStruct((ROWS, heads, LENGTH, d), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    try:
        compiled = jax.jit(forward_and_backward).lower(array, array, array, array).compile()
    except Exception as error:
        used = re.search(r"[Ss]coped allocation with size ([\d.]+[KMG]) and limit ([\d.]+[KMG])", str(error))
        words = f"needs {used[1]} of fast memory, the limit is {used[2]}" if used else str(error).splitlines()[0][:200]
        return {"error": words}
    return {
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


def main(wanted: list[str]) -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]
    known = lines()
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"record_attention: no line is called {unknown[0]!r}; there are {', '.join(known)}")
    found = {name: compile_line(device, *known[name]) for name in wanted or known}
    if wanted:
        print(json.dumps(found))
        return
    page = {
        "made_by": "scripts/record_attention.py",
        "jax": version("jax"), "libtpu": version("libtpu"), "chip": "v6e", "rows": ROWS, "length": LENGTH,
        "lines": found,
    }  # fmt: skip
    PAGE.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[2:] if sys.argv[1:2] == ["--print"] else sys.argv[1:])
