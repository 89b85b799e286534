"""The TPU kernel, interpreted on the CPU, against a float64 sum row by row; and its plan and its bill."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.kernels import segment_sum as kernel

# Seven chunks, the last one short, and eight tiles, the last one short. One shape, so that one compilation serves all.
N, V, C, TILE, CHUNK = 100, 125, 24, 16, 16
DTYPES = [jnp.float32, jnp.bfloat16]


@partial(jax.jit, static_argnames="num_segments")
def run(ids: jax.Array, rows: jax.Array, num_segments: int) -> tuple[kernel.Plan, jax.Array]:
    plan = kernel.plan(ids, num_segments, tile=TILE, chunk=CHUNK)
    sums = kernel.segment_sum(rows[plan.order], plan, num_segments, tile=TILE, chunk=CHUNK, interpret=True)
    return plan, sums


def normal(shape: tuple[int, ...], dtype, seed: int = 0) -> jax.Array:
    """Rows whose sizes differ by powers of ten, so that a rounded sum shows."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, (shape[0], 1)), dtype)


def assert_is_sum(got: jax.Array, ids: np.ndarray, rows: jax.Array, num_segments: int) -> None:
    """Within 1e-6 of the sum of magnitudes: float32 additions in any order, nothing rounded to bfloat16."""
    rows, counts = np.asarray(rows, np.float64), (ids >= 0) & (ids < num_segments)
    expected, magnitude = np.zeros((2, num_segments, rows.shape[1]))
    np.add.at(expected, ids[counts], rows[counts])
    np.add.at(magnitude, ids[counts], abs(rows[counts]))
    assert got.shape == expected.shape and got.dtype == jnp.float32
    assert np.all(abs(np.asarray(got, np.float64) - expected) <= 1e-6 * magnitude)


rng = np.random.default_rng(1)
IDS = {
    "Zipf": np.minimum(rng.zipf(1.3, N) - 1, V - 1),
    "all the first": np.zeros(N),
    "all the last": np.full(N, V - 1),
    "first and last": rng.permutation(np.arange(N) % 2 * (V - 1)),
    "all different": rng.permutation(V)[:N],
    "every third tile": rng.integers(0, V // (3 * TILE), N) * 3 * TILE + rng.integers(0, TILE, N),
    "chunks end where tiles do": rng.permutation(np.arange(N) // CHUNK * TILE),
    "out of range": rng.choice([-(2**31), -V, -2, -1, 0, 7, V - 1, V, V + 1, 127, 128, 2**31 - 1], N),
    "none in range": rng.choice([-1, V], N),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", IDS)
def test_sums_by_segment(name: str, dtype) -> None:
    ids, rows = IDS[name].astype(np.int32), normal((N, C), dtype)
    assert_is_sum(run(jnp.asarray(ids), rows, V)[1], ids, rows, V)


@st.composite
def ids_in_runs(draw) -> np.ndarray:
    """N ids, some repeated often, some out of range, in any order."""
    runs = draw(st.lists(st.tuples(st.integers(-2, V + 2), st.integers(1, 3 * CHUNK)), min_size=1, max_size=30))
    ids = np.resize(np.repeat(*np.array(runs, np.int32).T), N)
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(ids)


@settings(max_examples=100)
@given(ids=ids_in_runs())
def test_any_ids(ids: np.ndarray) -> None:
    rows = normal((N, C), jnp.float32)
    plan, sums = run(jnp.asarray(ids), rows, V)
    assert_is_sum(sums, ids, rows, V)
    assert_plan_is_sound(plan, ids)


def assert_plan_is_sound(plan: kernel.Plan, ids: np.ndarray) -> None:
    counts = (ids >= 0) & (ids < V)
    order = np.argsort(np.where(counts, ids, V), kind="stable")
    np.testing.assert_array_equal(plan.order[: ids.size], order)  # stable
    tile, chunk, live = (np.asarray(x) for x in (plan.tile, plan.chunk, plan.live != 0))
    # The steps that multiply are the pairs that share a row, each once.
    shared = {(i // TILE, at // CHUNK) for at, i in enumerate(ids[order]) if 0 <= i < V}
    pairs = list(zip(tile[live].tolist(), chunk[live].tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) and set(pairs) == shared
    # Every tile is written once, and no block is fetched twice.
    assert set(tile.tolist()) == set(range(-(-V // TILE)))
    assert np.all(np.diff(tile) >= 0) and np.all(np.diff(chunk) >= 0)
    assert 0 <= chunk.min() and chunk.max() < -(-ids.size // CHUNK)


def test_tiles_after_the_end_of_a_full_chunk() -> None:
    ids = np.arange(6 * CHUNK) % 40
    assert_plan_is_sound(kernel.plan(jnp.asarray(ids, jnp.int32), V, tile=TILE, chunk=CHUNK), ids)


def test_the_grid_is_no_longer_than_some_ids_need() -> None:
    ids = np.repeat(np.arange(8), 14)[:N] * TILE  # every tile begins within a chunk
    plan, _ = run(jnp.asarray(ids, jnp.int32), normal((N, C), jnp.float32), V)
    assert plan.live.all() and plan.live.size == kernel.steps(N, V, tile=TILE, chunk=CHUNK)


def test_leftover_steps_fetch_nothing() -> None:
    """After the last row that counts no chunk is read, however many rows follow that count nowhere."""
    ids = np.where(np.arange(N) < 20, V - 1, -1)
    plan, _ = run(jnp.asarray(ids, jnp.int32), normal((N, C), jnp.float32), V)
    assert plan.chunk.max() == 1


@pytest.mark.parametrize(
    ("c", "dtype", "expected"),
    [
        (24, jnp.float32, 24), (768, jnp.float32, 768), (1536, jnp.bfloat16, 1536), (1536, jnp.float32, 768),
        (1537, jnp.bfloat16, 896), (1920, jnp.bfloat16, 1024), (3072, jnp.bfloat16, 1536), (5120, jnp.bfloat16, 1280),
    ],
)  # fmt: skip
def test_columns_fit_and_fill_whole_lanes(c: int, dtype, expected: int) -> None:
    assert kernel.columns(c, dtype) == expected


def test_wide_rows_are_taken_in_parts() -> None:
    ids, rows = rng.integers(0, 40, 30).astype(np.int32), normal((30, 900), jnp.float32)
    assert kernel.columns(900, jnp.float32) == 512  # a whole part and a short one
    assert_is_sum(run(jnp.asarray(ids), rows, 40)[1], ids, rows, 40)


def call(n: int, v: int, c: int, dtype) -> str:
    """The kernel's call as JAX writes it."""
    arguments = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, c), dtype)
    return str(jax.make_jaxpr(lambda ids, rows: kernel.segment_sum(rows, kernel.plan(ids, v), v))(*arguments))


def test_float32_rows_ask_for_full_precision() -> None:
    """On a CPU every product is exact, so that the sums cannot tell."""
    assert "HIGHEST" in call(512, 256, 128, jnp.float32)
    assert "HIGHEST" not in call(512, 256, 128, jnp.bfloat16)


@pytest.mark.parametrize(
    ("n", "v", "c", "dtype", "steps", "bytes_accessed"),
    [
        (131_072, 32_768, 1536, jnp.bfloat16, 383, 131_072 * (4 + 3072) + 32_768 * 6144),
        (8192, 32_768, 1536, jnp.float32, 143, 8192 * (2 * 4 + 6144) + 32_768 * 6144),  # ids once for either half
        (513, 257, 128, jnp.bfloat16, 3, 1024 * (4 + 256) + 257 * 512),
    ],
)
def test_cost(n: int, v: int, c: int, dtype, steps: int, bytes_accessed: int) -> None:
    expected = 2 * 256 * 512 * c * steps, bytes_accessed
    assert kernel.cost(n, v, c, dtype) == expected
    if n % 512 == 0:
        assert f"flops={expected[0]}, transcendentals=0, bytes_accessed={expected[1]}" in call(n, v, c, dtype)


AOT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from nanochat_lib.table_gradient import table_gradients
topology, n, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = Mesh(np.array(devices), ("data",))
shape = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))
rows = {name: shape((8 * n, 1536), dtype) for name in "ab"}
step = jax.shard_map(lambda ids, rows: table_gradients(ids, rows, 32_768, "pallas"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
done = jax.jit(step).lower(shape((8 * n,), jnp.int32), rows).compile()
text, memory = done.as_text(), done.memory_analysis()
print(json.dumps({
    "devices": len(devices),
    "kernels": sum("tpu_custom_call" in line for line in text.splitlines()),
    "sorts": text.count(" sort("),
    "collectives": sum(text.count(f" {name}(") for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")),
    "out": memory.output_size_in_bytes,
    "temp": memory.temp_size_in_bytes,
    "flops": done.cost_analysis()["flops"],
}))
"""  # noqa: E501


@pytest.mark.aot
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the tpu extra: libtpu is not installed")
@pytest.mark.parametrize(("n", "dtype"), [(8192, "bfloat16"), (131_072, "bfloat16"), (8192, "float32")])
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_compiles_for_a_tpu(topology: str, n: int, dtype: str) -> None:
    """VMEM suffices, else it would not compile; two tables share one sort, and one sorted copy of rows at a time."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-c", AOT, topology, str(n), dtype]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(topology, n, dtype, seen)
    assert (seen["devices"], seen["kernels"], seen["sorts"], seen["collectives"]) == (8, 2, 1, 0)
    assert 0 <= seen["out"] - 2 * 32_768 * 1536 * 4 <= 4096
    assert seen["temp"] <= n * 1536 * jnp.dtype(dtype).itemsize + 2 * 2**20
    flops = 2 * kernel.cost(n, 32_768, 1536, dtype)[0]
    assert flops <= seen["flops"] <= 1.01 * flops
