"""Gradients of tables: every backend against float64 sums table by table, and against the gradient of a look-up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from nanochat_lib.errors import UserError
from nanochat_lib.table_gradient import BACKENDS, table_gradients

N, V = 700, 300  # two chunks of the kernel and two tiles, both not full
WIDTHS = {"wte": (24, jnp.float32), "value_embeds.1": (16, jnp.bfloat16), "value_embeds.3": (16, jnp.bfloat16)}
HERE = [backend for backend in BACKENDS if backend != "pallas"]
rng = np.random.default_rng(0)
ROWS = {name: jnp.asarray(rng.standard_normal((N, c)), dtype) for name, (c, dtype) in WIDTHS.items()}
run = partial(jax.jit, static_argnums=(2, 3))(table_gradients)


def assert_sums(got: dict[str, jax.Array], ids: np.ndarray, rows: dict[str, jax.Array] = ROWS) -> None:
    """Within 1e-6 of the sum of magnitudes, as float32 additions in any order are."""
    assert list(got) == sorted(rows)
    counts = (ids >= 0) & (ids < V)
    for name, r in rows.items():
        r = np.asarray(r, np.float64)[counts]
        expected, magnitude = np.zeros((2, V, r.shape[1]))
        np.add.at(expected, ids[counts], r)
        np.add.at(magnitude, ids[counts], abs(r))
        assert got[name].shape == expected.shape and got[name].dtype == jnp.float32
        assert np.all(abs(np.asarray(got[name], np.float64) - expected) <= 1e-6 * magnitude), name


@pytest.mark.parametrize("backend", HERE)
def test_every_table_is_summed_by_id(backend: str) -> None:
    ids = np.minimum(rng.zipf(1.2, N) - 1, V - 1).astype(np.int32)
    assert_sums(run(jnp.asarray(ids), ROWS, V, backend), ids)


@pytest.mark.parametrize("backend", HERE)
def test_ids_out_of_range_count_nowhere(backend: str) -> None:
    ids = rng.choice([-(2**31), -V, -1, 0, 1, V - 1, V, 511, 512, 2**31 - 1], N).astype(np.int32)
    assert_sums(run(jnp.asarray(ids), ROWS, V, backend), ids)


@pytest.mark.parametrize("backend", HERE)
def test_is_the_gradient_of_a_lookup(backend: str) -> None:
    ids = jnp.asarray(rng.integers(0, V, N), jnp.int32)
    tables = {name: jnp.zeros((V, r.shape[1]), jnp.float32) for name, r in ROWS.items()}
    cotangents = {name: r.astype(jnp.float32) for name, r in ROWS.items()}
    (expected,) = jax.vjp(lambda tables: {name: table[ids] for name, table in tables.items()}, tables)[1](cotangents)
    got = run(ids, ROWS, V, backend)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), got, expected)


@pytest.mark.parametrize("backend", HERE)
def test_within_shard_map(backend: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    data = PartitionSpec("data")
    local = partial(table_gradients, num_rows=V, backend=backend)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=data, out_specs=data, check_vma=backend == "xla")
    ids = rng.integers(-1, V + 1, N).astype(np.int32)
    assert_sums(jax.jit(sharded)(jnp.asarray(ids), ROWS), ids)


def test_lowers_for_a_tpu_within_a_checked_shard_map() -> None:
    """As far as this goes without a TPU's compiler: the kernel's own language."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    data = PartitionSpec("data")
    local = partial(table_gradients, num_rows=V, backend="pallas")
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=data, out_specs=data))
    text = sharded.trace(jnp.zeros(N, jnp.int32), ROWS).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == len(ROWS) and text.count("stablehlo.sort") == 1


@pytest.mark.parametrize(
    ("ids", "rows", "num_rows", "backend", "message"),
    [
        ((N,), (N, 8), V, "cuda", "backend 'cuda'"),
        ((7, 100), (N, 8), V, "xla", "one axis"),
        ((0,), (0, 8), V, "xla", "at least one id"),
        ((N,), (N, 8), 0, "xla", "into 0 rows"),
        ((N,), (N - 1, 8), V, "pallas", r"t has rows float32\[699, 8\]"),
        ((N,), (N,), V, "xla", r"give \(700, C\)"),
    ],
)
def test_errors(ids, rows, num_rows: int, backend: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        table_gradients(jnp.zeros(ids, jnp.int32), {"t": jnp.zeros(rows)}, num_rows, backend)


def test_refuses_other_dtypes() -> None:
    with pytest.raises(UserError, match=r"float16\[700, 8\].*bfloat16 or float32"):
        table_gradients(jnp.zeros(N, jnp.int32), {"t": jnp.zeros((N, 8), jnp.float16)}, V)
