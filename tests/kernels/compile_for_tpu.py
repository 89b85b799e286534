"""Compiles attention, forward and backward, for TPUs that this machine does not have; a program of its own.

Arguments: a topology ("v6e:2x4") and a JSON list of cases {backend, d, window, dtype, t}. Writes one JSON line a case:
{temp_mib, kernels} or {error}. Libtpu is noisy and locks itself, so tests run this in a child process.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from nanochat_lib.attention import attention

B, H, K = 32, 16, 8  # arrays that do not fit the fast memory as a whole, which would hide what the kernels need of it


def compile_case(device, backend: str, d: int, window: int, dtype: str, t: int) -> dict:
    def forward_and_backward(q, k, v, dy):
        y, pull = jax.vjp(lambda *a: attention(*a, window=window, backend=backend), q, k, v)
        return y, *pull(dy)

    place = SingleDeviceSharding(device)
    q, k = (jax.ShapeDtypeStruct((B, heads, t, d), jnp.dtype(dtype), sharding=place) for heads in (H, K))
    compiled = jax.jit(forward_and_backward).lower(q, k, k, q).compile()
    return {
        "temp_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    }


if __name__ == "__main__":
    chip = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0]
    for case in json.loads(sys.argv[2]):
        try:
            result = compile_case(chip, **case)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(result), flush=True)
