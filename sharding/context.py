"""Rows in parts: the slots of a row are split over devices, and each attends from its own queries.

These are the devices of one rank (context parallelism), those of a group of ranks that hold the row
together (spans), or both. The host chooses which slots a device gets, and the choice reaches the
device as data; all devices get equally many, so everything that works token by token stays
balanced. Keys and values are gathered from all parts, a few heads at a time, and their gradients
are scattered back as sums: the transpose of the gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sharding.rules import Layout

# Keys and values are gathered in up to 4 groups of heads: all gathers but the first can overlap
# with the attention of the group before. Small rows are gathered at once: a gather of a few
# megabytes costs hardly more than its start, and each group loops over the tiles once more.
HEAD_GROUPS = 4
GROUP_BYTES = 4 * 2**20  # the least that a device receives for a group, where there are several
SLOTS = ("batch", "sequence")  # logical axes of [R / g, g * C, ...]
RANKS = ("rank",)  # logical axes of [R, ...]


def gather_parts(x: jax.Array, axes: Sequence[str], axis: int = 1) -> jax.Array:
    """Inside shard_map: the parts of `x` end to end along `axis`, in the order of the mesh axes."""
    return jax.lax.all_gather(x, tuple(axes), axis=axis, tiled=True) if _is_split(axes) else x


def _is_split(axes: Sequence[str]) -> bool:
    """Inside shard_map: whether there is more than one device along the axes."""
    return bool(axes) and jax.lax.axis_size(tuple(axes)) > 1


def take_slots(layout: Layout, x: jax.Array, slots: jax.Array) -> jax.Array:
    """Slots of rows in packed order, [R, T, D], on the ranks that hold them in this order; no
    longer in parts.

    Args:
      layout: that of the rows, of span g.
      x: [R / g, g * T, D] in another order, perhaps in parts.
      slots: int32 [R / g, g * T], the slot of x for each slot of the result; in parts where ranks
        share the row.
    """
    axes = layout.mesh_axes("sequence")
    if layout.span > 1 or not axes:
        return _divide_gradient(layout, by_rank(layout, permute(layout, x, slots)))

    def on_device(x: jax.Array, slots: jax.Array) -> jax.Array:
        return jnp.take_along_axis(gather_parts(x, axes), slots[..., None], axis=1)

    rank_slots = layout.local(
        on_device, in_axes=(("batch", "sequence"), ("batch",)), out_axes=("batch",)
    )(x, slots)
    return _divide_gradient(layout, rank_slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divide_gradient(layout: Layout, x: jax.Array) -> jax.Array:
    """x, of which all devices of a rank hold a copy, in code that is manual over these devices.

    Each copy receives the gradient of all copies, and must return only its share of it: shard_map
    divides gradients at its end, but no shard_map ends here.
    """
    return x


def _divide_gradient_forward(layout: Layout, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _divide_gradient_backward(layout: Layout, _: None, d_x: jax.Array) -> tuple[jax.Array]:
    copies = (layout.mesh.shape[axis] for axis in layout.part_axes if axis in layout.manual_axes)
    return (d_x / math.prod(copies),)


_divide_gradient.defvjp(_divide_gradient_forward, _divide_gradient_backward)


def by_rank(layout: Layout, x: jax.Array) -> jax.Array:
    """Each rank's slots of rows in packed order, whole on all its devices: [R, T, ...].

    Args:
      layout: that of the rows, of span g.
      x: [R / g, g * T, ...] in parts.
    """
    return layout.local(lambda x: gather_parts(x, layout.part_axes), (SLOTS,), RANKS)(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def to_ranks(layout: Layout, x: Any, order: jax.Array) -> Any:
    """Each rank's slots of rows, put into packed order, whole on all its devices: [R, C, ...].

    Differentiable: a device takes the gradients of its own slots from those of its rank, which are
    sums over all devices that read them.

    Args:
      layout: that of the rows, of span g.
      x: [R / g, g * C, ...] in parts, or a tree of such arrays.
      order: int32 [R / g, g * C] in parts, the place of each slot in the packed row.
    """
    return jax.tree.map(partial(by_rank, layout), permute_back(layout, x, order))


def _to_ranks_forward(layout: Layout, x: Any, order: jax.Array) -> tuple[Any, jax.Array]:
    return to_ranks(layout, x, order), order


def _to_ranks_backward(layout: Layout, order: jax.Array, d_ranks: Any) -> tuple[Any, None]:
    axes = layout.part_axes

    def on_device(of_rank: jax.Array) -> jax.Array:
        if not axes:
            return of_rank
        part_slots = of_rank.shape[1] // jax.lax.axis_size(axes)
        first_slot = jax.lax.axis_index(axes) * part_slots
        return jax.lax.dynamic_slice_in_dim(of_rank, first_slot, part_slots, axis=1)

    d_slots = jax.tree.map(layout.local(on_device, (RANKS,), SLOTS), d_ranks)
    return permute(layout, d_slots, order), None


to_ranks.defvjp(_to_ranks_forward, _to_ranks_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def permute(layout: Layout, x: Any, index: jax.Array) -> Any:
    """Slots of rows in another order, still in parts: y[row, j] = x[row, index[row, j]].

    Every leaf is gathered from all parts of its row. Differentiable in floating-point leaves: the
    backward pass gathers too, by the inverse (`permute_back`).

    Args:
      x: [R / g, N, ...] in parts, or a tree of such arrays.
      index: int32 [R / g, N] in parts, a permutation in each row.
    """
    axes = layout.mesh_axes("sequence")

    def on_device(x: Any, index: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: _take_by_row(gather_parts(leaf, axes), index), x)

    return _run_on_devices(layout, on_device, x, index)


def permute_back(layout: Layout, y: Any, index: jax.Array) -> Any:
    """The inverse of `permute`, and its transpose: x[row, index[row, j]] = y[row, j]."""
    axes = layout.mesh_axes("sequence")

    def on_device(y: Any, index: jax.Array) -> Any:
        # Made for whole rows; each device needs only the slots that it holds itself
        inverse = jax.vmap(_inverse_permutation)(gather_parts(index, axes))
        first_slot = jax.lax.axis_index(axes) * index.shape[1] if axes else 0
        held = jax.lax.dynamic_slice_in_dim(inverse, first_slot, index.shape[1], axis=1)
        return jax.tree.map(lambda leaf: _take_by_row(gather_parts(leaf, axes), held), y)

    return _run_on_devices(layout, on_device, y, index)


def _take_by_row(x: jax.Array, slots: jax.Array) -> jax.Array:
    """x[row, slots[row]] for every row."""
    return jax.vmap(lambda of_row, slots: of_row[slots])(x, slots)


def _inverse_permutation(permutation: jax.Array) -> jax.Array:
    slots = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(slots, unique_indices=True)


def _run_on_devices(
    layout: Layout, on_device: Callable[[Any, jax.Array], Any], x: Any, index: jax.Array
) -> Any:
    leaves = jax.tree.map(lambda _: SLOTS, x)
    return layout.local(on_device, (leaves, SLOTS), leaves)(x, index)


def _permute_forward(layout: Layout, x: Any, index: jax.Array) -> tuple[Any, jax.Array]:
    return permute(layout, x, index), index


def _permute_backward(layout: Layout, index: jax.Array, d_y: Any) -> tuple[Any, None]:
    return permute_back(layout, d_y, index), None


permute.defvjp(_permute_forward, _permute_backward)


def gathered_attention(
    attend: Callable[[jax.Array, jax.Array, jax.Array], Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block: int,
    axes: Sequence[str],
) -> Any:
    """Inside shard_map: attention of this device's queries to the keys of all parts of the row.

    Args:
      attend: attention of q [1, C/X, h, K] to k and v [1, C, g, K], for any numbers of heads with
        h / g = H / G; it returns an array [1, C/X, h, ...], or a tree of such arrays.
      q: [1, C/X, H, K], this device's.
      k: [1, C/X, G, K], this device's.
      v: [1, C/X, G, K], this device's.
      block: slots of a block of attention; parts hold whole blocks.
      axes: mesh axes that rows are split over; without any, or with one device along them, nothing
        is gathered.
    """
    if not _is_split(axes):
        return attend(q, k, v)
    groups = _head_groups(k, axes)
    queries, keys, values = (jnp.split(x, groups, axis=2) for x in (q, k, v))
    outs: list[Any] = []
    ready = _gather_keys_values(keys[0], values[0], block, axes)
    for group in range(groups):
        k_all, v_all = ready
        if group + 1 < groups:
            following = keys[group + 1], values[group + 1]
            # Gather only one group ahead, or the keys of all heads would be in memory at once: the
            # gather waits for the attention of the group before the current one.
            if outs:
                following = jax.lax.optimization_barrier((following, outs[-1]))[0]
            ready = _gather_keys_values(*following, block, axes)
        outs.append(attend(queries[group], k_all, v_all))
    return jax.tree.map(lambda *of_groups: jnp.concatenate(of_groups, axis=2), *outs)


def _head_groups(k: jax.Array, axes: Sequence[str]) -> int:
    """Number of groups of heads in which keys k [1, C/X, G, K] and their values are gathered."""
    received = 2 * k.size * k.dtype.itemsize * jax.lax.axis_size(tuple(axes))
    max_groups = max(1, min(HEAD_GROUPS, k.shape[2], received // GROUP_BYTES))
    return next(n for n in range(max_groups, 0, -1) if k.shape[2] % n == 0)


def _gather_keys_values(
    k: jax.Array, v: jax.Array, block: int, axes: Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all parts, [1, C, G, K] each, in one collective; their gradients likewise.

    They are sent block by block, each head's slots together, in the order that a kernel that loops
    over blocks wants. So only the device's own part is transposed: the transposes of the gathered
    arrays, here and for the kernel, cancel, and the compiler drops them.
    """
    heads = k.shape[2]
    blocks = jnp.concatenate([k, v], axis=2).reshape(-1, block, 2 * heads, k.shape[3])
    blocks = blocks.swapaxes(1, 2)
    # One line per block: with more dimensions XLA would change the layout instead of transposing
    # the part, and every device would then transpose the whole row
    all_blocks = gather_parts(blocks.reshape(len(blocks), -1), axes, axis=0)
    all_blocks = all_blocks.reshape(-1, *blocks.shape[1:]).swapaxes(1, 2)
    keys_values = all_blocks.reshape(1, -1, 2 * heads, k.shape[3])
    return keys_values[:, :, :heads], keys_values[:, :, heads:]
