"""Two streams of weights in one row: most slots are patches, and those of conditions go through weights of their own.

    slots      | c c c p p p p p p | c p p p p | . .
    patches    --weights of patches--> all slots --------------------+--> each slot by its own weights
    conditions --gathered--> | c c c c . . | --their own weights--> -+

Products with the weights of patches run over all slots, and those of conditions over a share of the row: the smallest
of `SHARES` that holds all conditions. Which one is data, so that one program serves rows of any text and none.

Letters: R rows, C slots of a row, M slots of a share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sharding.rules import Layout

SHARES = (8, 2, 1)  # parts of a row, of which conditions take one

OfSlots = Callable[..., Any]  # of arrays [R, C, ...] to a tree of such, slot by slot


class ConditionSlots(NamedTuple):
    """Which slots of rows are conditions."""

    places: Int[Array, "R C"]  # theirs first, one after another, then places beyond the row
    share: Int[Array, ""]  # number in `shares` of the one that holds them

    @classmethod
    def of(cls, layout: Layout, is_condition: Bool[Array, "R C"]) -> ConditionSlots:
        """Find them. Devices that gather weights together take the same share, for they meet in its products."""
        slots = is_condition.shape[1]
        order = jnp.argsort(~is_condition, axis=1, stable=True).astype(jnp.int32)
        counts = is_condition.sum(axis=1, dtype=jnp.int32)
        slot = jnp.arange(slots, dtype=jnp.int32)
        # Each another one, so that none is written to twice
        indices = jnp.where(slot < counts[:, None], order, slots + slot)
        longest = counts.max()
        if axes := tuple(a for a in layout.mesh_axes("embed") if a in layout.manual_axes):
            longest = layout.local(lambda longest: jax.lax.pmax(longest, axes), ((),), ())(longest)
        fits = jnp.array(shares(layout, slots)) >= longest
        return cls(indices, jnp.argmax(fits))


def shares(layout: Layout, slots: int) -> list[int]:
    """M of every share of a row, the last of which is the row; each is split as the row is."""
    parts = layout.parts
    return [slots // share for share in SHARES if slots % (share * parts) == 0]


def in_streams(
    layout: Layout,
    where: ConditionSlots,
    of_patches: OfSlots,
    of_conditions: OfSlots,
    *slots: Array,
) -> Any:
    """What each slot becomes: a condition by `of_conditions`, any other by `of_patches`."""
    whole = of_patches(*slots)

    def with_share(size: int) -> Callable[[Any, tuple[Array, ...]], Any]:
        def run(whole: Any, slots: tuple[Array, ...]) -> Any:
            places = where.places[:, :size]
            made = of_conditions(*(_taken(values, places) for values in slots))
            return jax.tree.map(lambda out, values: _put(out, values, places), whole, made)

        return run

    branches = [with_share(size) for size in shares(layout, where.places.shape[1])]
    return jax.lax.switch(where.share, branches, whole, slots)


@jax.vmap
def _taken(values: Array, places: Array) -> Array:
    """[M, ...] of [C, ...]; zeros from places beyond."""
    return values.at[places].get(mode="fill", fill_value=0, unique_indices=True)


@jax.vmap
def _put(out: Array, values: Array, places: Array) -> Array:
    """[C, ...] with [M, ...] in their places, and what lies beyond left out."""
    return out.at[places].set(values, mode="drop", unique_indices=True)
