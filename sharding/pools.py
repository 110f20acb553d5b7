"""Rows and pools: what rows take from their rank's pool, and what one rank shares with all.

    pool [R, W, D] --take_rows--> rows [R, C, D]        put_rows is the transpose

Nothing is scattered: the way back gathers by an inverse table, which is made of integers. So
gradients are deterministic.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from sharding.rules import Layout

SLOTS = ("batch", "sequence")  # logical axes of [R, C, ...]
Residuals = tuple[jax.Array, jax.Array]  # pool, index


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(layout: Layout, pool: jax.Array, index: jax.Array) -> jax.Array:
    """Each rank's rows from its own pool: [R, C, D]. Differentiable in `pool`.

    Args:
      pool: [R, W, D].
      index: int32 [R, C] slot of the pool; -1: zero. No slot twice in one row, where gradients flow.
    """

    def on_device(pool: jax.Array, index: jax.Array) -> jax.Array:
        return gather(pool[0], index[0])[None]

    return layout.local(on_device, (("batch",), SLOTS), SLOTS)(pool, index)


def _take_forward(layout: Layout, pool: jax.Array, index: jax.Array) -> tuple[jax.Array, Residuals]:
    return take_rows(layout, pool, index), (pool, index)


def _take_backward(
    layout: Layout, residuals: Residuals, d_rows: jax.Array
) -> tuple[jax.Array, None]:
    pool, index = residuals
    return put_rows(layout, d_rows, index, jnp.zeros_like(pool)), None


take_rows.defvjp(_take_forward, _take_backward)


def put_rows(layout: Layout, rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
    """The transpose of `take_rows`, added to `pool`. No slot may occur twice in one row's index.

    Args:
      rows: [R, C, D].
      index: int32 [R, C] slot of the pool where each goes; -1: nowhere.
      pool: [R, W, D].
    """
    parts = layout.mesh_axes("sequence")

    def on_device(rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
        slots = pool.shape[1]
        target = jnp.where(index[0] >= 0, index[0], slots)  # -1 would wrap; the end is dropped
        row_slots = jnp.arange(index.shape[1], dtype=jnp.int32)
        inverse = jnp.full(slots, -1, jnp.int32).at[target].set(row_slots, mode="drop")
        added = gather(rows[0], inverse)[None].astype(pool.dtype)
        return pool + (jax.lax.psum(added, parts) if parts else added)

    return layout.local(on_device, (SLOTS, SLOTS, ("batch",)), ("batch",))(rows, index, pool)


def share_rank(layout: Layout, x: jax.Array, rank: jax.Array) -> jax.Array:
    """What one rank holds, for all of them: x [R, ...] -> [1, ...]."""
    axes = layout.batch_axes

    def on_device(x: jax.Array, rank: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == rank, x, 0), axes)

    return layout.local(on_device, (("batch",), ()), ())(x, rank) if axes else x


def add_to_rank(layout: Layout, x: jax.Array, shared: jax.Array, rank: jax.Array) -> jax.Array:
    """Add what all ranks know, [1, ...], to what one of them holds: x [R, ...] -> [R, ...]."""
    axes = layout.batch_axes

    def on_device(x: jax.Array, shared: jax.Array, rank: jax.Array) -> jax.Array:
        return x + jnp.where(jax.lax.axis_index(axes) == rank, shared, 0)

    if not axes:
        return x + shared
    return layout.local(on_device, (("batch",), (), ()), ("batch",))(x, shared, rank)


def gather(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where index is -1."""
    taken = values[jnp.maximum(index, 0)]
    return jnp.where(_expanded(index >= 0, taken), taken, 0)


def gather_either(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """(first ++ second)[index], zero where index is -1, without joining the two."""
    end = len(first)
    from_first = first[jnp.clip(index, 0, end - 1)]
    from_second = second[jnp.maximum(index - end, 0)]
    taken = jnp.where(_expanded(index < end, from_first), from_first, from_second)
    return jnp.where(_expanded(index >= 0, from_first), taken, 0)


def _expanded(mask: jax.Array, values: jax.Array) -> jax.Array:
    """The mask with trailing axes of length one, so that it meets `values`."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
