"""Rows and pools: rows read their slots from the pools of their ranks, or write them there.

    pool [R, W, D] --take_rows--> rows [R / g, g * C, D]        put_rows replaces what was taken

A row of span g is held by g ranks, in packed order: each has C consecutive slots and reads them
from its own pool. No values are scattered: the way back gathers by an inverse table, and only that
table, of integers, is made by scattering. So gradients are deterministic.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sharding.context import RANKS, SLOTS, gather_parts, permute, permute_back
from sharding.rules import Layout

Residuals = tuple[jax.Array, jax.Array]  # pool, index


class PoolSlots(NamedTuple):
    """The slots of the ranks' pools that the slots of rows read or write; rows may be in parts."""

    slots: jax.Array  # int32 [R / g, g * C] slot of the pool, -1: none
    packed: jax.Array | None  # `slots` in packed order, where several ranks hold a row
    order: jax.Array  # int32 [R / g, g * C] place of each slot in the packed row

    def take(self, layout: Layout, pool: Any) -> Any:
        """Rows [R / g, g * C, ...], read from each leaf [R, W, ...] of a pool; zeros for slot -1.

        Args:
          layout: that of the rows, of span g.
        """
        if self.packed is None:
            return jax.tree.map(lambda leaf: take_rows(layout, leaf, self.slots), pool)
        packed = jax.tree.map(lambda leaf: take_rows(layout, leaf, self.packed), pool)
        return permute(layout, packed, self.order)

    def put(self, layout: Layout, rows: Any, pool: Any) -> Any:
        """The pool with leaves [R / g, g * C, ...] of rows in the slots that `take` reads."""
        slots = self.slots
        if self.packed is not None:
            rows, slots = permute_back(layout, rows, self.order), self.packed
        return jax.tree.map(
            lambda of_rows, leaf: put_rows(layout, of_rows, slots, leaf), rows, pool
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_rows(layout: Layout, pool: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [R / g, g * C, D], read by each rank from its own pool. Differentiable in `pool`.

    Args:
      layout: that of the rows, of span g.
      pool: [R, W, D].
      index: int32 [R / g, g * C] slot of the pool of the rank that holds the row's slot; -1: zero.
        Where gradients flow, no slot may occur twice on one rank.
    """

    def on_device(pool: jax.Array, index: jax.Array) -> jax.Array:
        return gather(pool[0], index[0])[None]

    return layout.local(on_device, (RANKS, SLOTS), SLOTS)(pool, index)


def _take_forward(layout: Layout, pool: jax.Array, index: jax.Array) -> tuple[jax.Array, Residuals]:
    return take_rows(layout, pool, index), (pool, index)


def _take_backward(
    layout: Layout, residuals: Residuals, d_rows: jax.Array
) -> tuple[jax.Array, None]:
    pool, index = residuals
    return put_rows(layout, d_rows, index, jnp.zeros_like(pool)), None


take_rows.defvjp(_take_forward, _take_backward)


def put_rows(layout: Layout, rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
    """The pool in which rows replace the slots that `take_rows` reads. With a pool of zeros it is
    the transpose of `take_rows`. No slot may occur twice in one rank's index.

    Args:
      layout: that of the rows, of span g.
      rows: [R / g, g * C, D].
      index: int32 [R / g, g * C] slot of the pool where each slot of the rows is put; -1: nowhere.
      pool: [R, W, D]; slots that no index names stay as they are.
    """
    part_axes = layout.part_axes

    def on_device(rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
        slots = pool.shape[1]
        # -1 would wrap around to the last slot; `slots` is out of range, and dropped
        target = jnp.where(index[0] >= 0, index[0], slots)
        row_slots = jnp.arange(index.shape[1], dtype=jnp.int32)
        # [W] the slot of the rows that is put into each slot of the pool; -1: none
        inverse = jnp.full(slots, -1, jnp.int32).at[target].set(row_slots, mode="drop")
        put = gather(rows[0], inverse)[None].astype(pool.dtype)
        is_filled = (inverse >= 0)[None]
        if part_axes:  # each device has only some of its rank's slots
            put, is_filled = jax.lax.psum((put, is_filled.astype(jnp.int32)), part_axes)
        return jnp.where(_expanded(is_filled > 0, put), put, pool)

    return layout.local(on_device, (SLOTS, SLOTS, RANKS), RANKS)(rows, index, pool)


def add_to_first_rank(layout: Layout, x: jax.Array, rows: jax.Array) -> jax.Array:
    """Add a value of each row, [R / g, ...], to x of the row's first rank: x [R, ...] -> [R, ...].

    Args:
      layout: that of the rows, of span g.
    """
    group = _group_axes(layout)
    if not group:
        return x + rows

    def on_device(x: jax.Array, rows: jax.Array) -> jax.Array:
        return x + jnp.where(jax.lax.axis_index(group) == 0, rows, 0)

    return layout.local(on_device, (RANKS, ("batch",)), RANKS)(x, rows)


def on_first_part(layout: Layout, x: jax.Array) -> jax.Array:
    """x, a value of whole rows, on the first of the devices that hold a row's parts, and zero on
    the others, so that a sum over devices counts it once. For code that is manual over parts."""
    part_axes = tuple(axis for axis in layout.mesh_axes("sequence") if axis in layout.manual_axes)
    return jnp.where(jax.lax.axis_index(part_axes) == 0, x, 0) if part_axes else x


def of_group(layout: Layout, pool: Any) -> Any:
    """The pools of a group's ranks end to end, on each of these ranks: every leaf [R, W, ...]
    becomes [R, g * W, ...].

    Args:
      layout: that of rows of span g.
    """
    group = _group_axes(layout)
    if not group:
        return pool
    joined = layout.local(lambda x: gather_parts(x, group), (RANKS,), RANKS)
    return jax.tree.map(joined, pool)


def _group_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes of the ranks that hold a row together."""
    return tuple(axis for axis in layout.mesh_axes("rank") if axis not in layout.batch_axes)


def gather(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where index is -1."""
    gathered = values[jnp.maximum(index, 0)]
    return jnp.where(_expanded(index >= 0, gathered), gathered, 0)


def gather_either(first: jax.Array, second: jax.Array, index: jax.Array) -> jax.Array:
    """(first ++ second)[index], zero where index is -1, without joining the two."""
    end = len(first)
    from_first = first[jnp.clip(index, 0, end - 1)]
    from_second = second[jnp.maximum(index - end, 0)]
    gathered = jnp.where(_expanded(index < end, from_first), from_first, from_second)
    return jnp.where(_expanded(index >= 0, from_first), gathered, 0)


def _expanded(mask: jax.Array, values: jax.Array) -> jax.Array:
    """The mask with trailing axes of length 1, so that it broadcasts against `values`."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
