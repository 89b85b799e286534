"""Gradients of embedding tables, each a sum by id: row v of a table's gradient is the sum of the cotangents of the
looked-up rows whose id was v.

All tables are read with the same ids. The step keeps the cotangents of all its micro-batches and sums once, because
adding into a table costs time for the whole table, however few rows are added. Shapes: N tokens of a step on one
device, V rows of a table, C columns, which may differ from table to table.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nanochat_lib.errors import UserError
from nanochat_lib.kernels import segment_sum as kernel

BACKENDS = ("xla", "pallas", "pallas-interpret")


def table_gradients(
    ids: jax.Array, rows: dict[str, jax.Array], num_rows: int, backend: str = "xla"
) -> dict[str, jax.Array]:
    """Sums every table's cotangent rows by id.

    Args:
        ids: (N,) integers, N ≥ 1. A row whose id is negative or at least `num_rows` counts nowhere: the host has
            checked the ids before, and -1 never means the last row.
        rows: by table, (N, C) bfloat16 or float32.
        num_rows: V, the same for all tables.
        backend: "xla", a scatter-add, for CPU and GPU, where the order of the additions is the device's choice;
            "pallas", the TPU kernel, which sorts the ids once for all tables; "pallas-interpret", the same without
            a TPU, slowly. On more than one device call the latter two inside `jax.shard_map`, "pallas-interpret" with
            `check_vma=False`: JAX's interpreter of kernels does not know that check.
    Returns:
        By table, (num_rows, C) float32: summed in float32, zero for an id that does not occur.
    Raises:
        UserError: an unknown backend, or a shape or dtype other than the above.
    """
    if backend not in BACKENDS:
        raise UserError(f"table_gradients: backend {backend!r} is unknown, use {', '.join(BACKENDS)}")
    if ids.ndim != 1 or ids.size == 0 or num_rows < 1:
        raise UserError(
            f"table_gradients: ids {ids.shape} into {num_rows} rows; give at least one id, on one axis, and one row"
        )
    for name, r in rows.items():
        if r.ndim != 2 or r.shape[0] != ids.size or r.dtype not in (jnp.bfloat16, jnp.float32):
            raise UserError(
                f"table_gradients: {name} has rows {r.dtype}{list(r.shape)}; "
                f"give ({ids.size}, C), one row an id, in bfloat16 or float32"
            )

    if backend == "xla":
        return {name: scatter_add(ids, r, num_rows) for name, r in rows.items()}
    plan = kernel.plan(ids, num_rows)
    interpret = backend == "pallas-interpret"
    return {name: kernel.segment_sum(r[plan.order], plan, num_rows, interpret=interpret) for name, r in rows.items()}


def scatter_add(ids: jax.Array, rows: jax.Array, num_rows: int) -> jax.Array:
    """One table by XLA's scatter. On a CPU it took a third or less of the time of a sort and sorted sum."""
    zeros = jnp.zeros((num_rows, rows.shape[1]), jnp.float32)
    return zeros.at[ids].add(rows.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
