"""Context parallelism: the slots of a row are split over devices, which attend from their queries.

Which slots a device gets is the host's choice and reaches it as data; every device has equally
many, so all that works token by token stays balanced. Keys and values are gathered from all parts,
a few heads at a time, and their gradients are scattered back as sums: the transpose of the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sharding.rules import Layout

# Keys and values are gathered in up to 4 groups of heads: all gathers but the first can overlap with
# the attention of the group before.
HEAD_GROUPS = 4


def gather_parts(x: jax.Array, axes: Sequence[str], axis: int = 1) -> jax.Array:
    """Inside shard_map: the parts of `x` end to end along `axis`, in the order of the mesh axes."""
    return jax.lax.all_gather(x, tuple(axes), axis=axis, tiled=True) if axes else x


def take_slots(layout: Layout, x: jax.Array, slots: jax.Array) -> jax.Array:
    """Slots of rows in another order, gathered from the parts: [R, T, D], no longer in parts.

    Args:
      x: [R, T, D] in parts.
      slots: int32 [R, T], which slot of x each is.
    """
    axes = layout.mesh_axes("sequence")
    if not axes:
        return x  # a row in one part is in order

    def on_device(x: jax.Array, slots: jax.Array) -> jax.Array:
        return jnp.take_along_axis(gather_parts(x, axes), slots[..., None], axis=1)

    return layout.local(
        on_device, in_axes=(("batch", "sequence"), ("batch",)), out_axes=("batch",)
    )(x, slots)


def gathered_attention(
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axes: Sequence[str],
) -> jax.Array:
    """Inside shard_map: attention of this device's queries to the keys of all parts of the row.

    Args:
      attend: attention of q [B, C/X, h, K] to k and v [B, C, g, K], for any number of heads h / g = H / G.
      q: [B, C/X, H, K], this device's.
      k: [B, C/X, G, K], this device's.
      v: [B, C/X, G, K], this device's.
      axes: mesh axes that rows are split over; none: nothing is gathered.
    """
    if not axes:
        return attend(q, k, v)
    key_heads = k.shape[2]
    groups = next(n for n in range(min(HEAD_GROUPS, key_heads), 0, -1) if key_heads % n == 0)
    queries, keys, values = (jnp.split(x, groups, axis=2) for x in (q, k, v))
    outs: list[jax.Array] = []
    ready = _gathered(keys[0], values[0], axes)
    for group in range(groups):
        k_all, v_all = ready
        if group + 1 < groups:
            following = keys[group + 1], values[group + 1]
            # Gather one group ahead and no more, or the whole row's keys would lie in memory at
            # once: the gather waits for the group before the current one.
            if outs:
                following = jax.lax.optimization_barrier((following, outs[-1]))[0]
            ready = _gathered(*following, axes)
        outs.append(attend(queries[group], k_all, v_all))
    return jnp.concatenate(outs, axis=2)


def _gathered(k: jax.Array, v: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    return gather_parts(k, axes), gather_parts(v, axes)
