"""Weights of conditions in rows whose slots are patches, most of them: a second stream, or keys and values alone.

    slots      | c c c p p p p p p | c p p p p | . .
    patches    --weights of patches--> all slots --------------------+--> each slot by its own weights
    conditions --gathered--> | c c c c . . | --their own weights--> -+

Products with the weights of patches run over all slots, and those of conditions over a share of the row: the smallest
of `SHARES` that holds all conditions. Which one is data, so that one program serves rows of any text and none.

Nothing of the conditions is kept for the backward pass, whatever `remat` says: what is kept has a shape, and would have
to be as large as all shares together. They run forward once more instead.

Letters: R rows, C slots of a row, M slots of a share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from sharding.rules import Layout

SHARES = (16, 8, 4, 2, 1)  # parts of a row, of which conditions take one

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
        condition_counts = is_condition.sum(axis=1, dtype=jnp.int32)
        slot = jnp.arange(slots, dtype=jnp.int32)
        # Each another one, so that none is written to twice
        indices = jnp.where(slot < condition_counts[:, None], order, slots + slot)
        longest = condition_counts.max()
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
    of_conditions: Callable[..., Any],
    given: Any,
    *slots: Array,
) -> Any:
    """What each slot becomes: a condition by `of_conditions`, any other by `of_patches`.

    Args:
      of_conditions: of `given` and then of slots; it reads nothing else that has a gradient.
    """
    sizes = tuple(shares(layout, where.places.shape[1]))
    return _with_conditions(of_conditions, sizes, where, of_patches(*slots), (given, *slots))


def of_conditions_alone(
    layout: Layout,
    where: ConditionSlots,
    function: Callable[..., Any],
    given: Any,
    *slots: Array,
) -> Any:
    """What the function makes of conditions, as in `in_streams`, and zeros in all other slots."""

    def zeros(*slots: Array) -> Any:
        shapes = jax.eval_shape(function, given, *slots)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return in_streams(layout, where, zeros, function, given, *slots)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_conditions(
    function: Callable[..., Any],
    sizes: tuple[int, ...],
    where: ConditionSlots,
    whole: Any,
    arguments: tuple[Any, ...],
) -> Any:
    """The tree `whole` of slots, with what the function makes of conditions in their places.

    Its backward pass begins with the arguments: the one that JAX derives is handed what each branch keeps, in rooms for
    all of them.
    """

    def with_share(size: int) -> OfSlots:
        def run(whole: Any, arguments: tuple[Any, ...]) -> Any:
            places = where.places[:, :size]
            outputs = _made(function, places, arguments)
            return jax.tree.map(lambda out, values: _put(out, values, places), whole, outputs)

        return run

    return jax.lax.switch(where.share, [with_share(size) for size in sizes], whole, arguments)


def _made(function: Callable[..., Any], places: Array, arguments: tuple[Any, ...]) -> Any:
    """What the function makes of the slots in these places: [R, M, ...]."""
    given, *slots = arguments
    return function(given, *(_taken(values, places) for values in slots))


def _conditions_forward(
    function: Callable[..., Any], sizes: tuple[int, ...], *primals: Any
) -> tuple[Any, tuple[Any, ...]]:
    where, whole, arguments = jax.tree.map(lambda primal: primal.value, primals)
    # Arrays alone are handed over, and trees without any
    asked = [() if primal.perturbed else None for primal in jax.tree.leaves(primals[2])]
    return _with_conditions(function, sizes, where, whole, arguments), (where, arguments, asked)


def _conditions_backward(
    function: Callable[..., Any], sizes: tuple[int, ...], kept: tuple[Any, ...], d_out: Any
) -> tuple[Any, ...]:
    where, arguments, asked = kept
    leaves, tree = jax.tree.flatten(arguments)
    learned = [n for n, leaf in enumerate(leaves) if asked[n] is not None]

    def with_share(size: int) -> Callable[..., list[Array]]:
        def run(leaves: list[Array], d_out: Any) -> list[Array]:
            places = where.places[:, :size]

            def made(*values: Array) -> Any:
                all_leaves = dict(enumerate(leaves)) | dict(zip(learned, values, strict=True))
                return _made(function, places, jax.tree.unflatten(tree, all_leaves.values()))

            _, pull_back = jax.vjp(made, *(leaves[n] for n in learned))
            return list(pull_back(jax.tree.map(lambda d: _taken(d, places), d_out)))

        return run

    d_learned = jax.lax.switch(where.share, [with_share(size) for size in sizes], leaves, d_out)
    d_leaves = dict.fromkeys(range(len(leaves))) | dict(zip(learned, d_learned, strict=True))
    # What conditions replaced has no gradient: zeros are put where they lie.
    d_whole = jax.tree.map(lambda d: _put(d, jnp.zeros_like(d), where.places), d_out)
    return None, d_whole, jax.tree.unflatten(tree, d_leaves.values())


_with_conditions.defvjp(_conditions_forward, _conditions_backward, symbolic_zeros=True)


@jax.vmap
def _taken(values: Array, places: Array) -> Array:
    """[M, ...] of [C, ...]; zeros from places beyond."""
    return values.at[places].get(mode="fill", fill_value=0, unique_indices=True)


@jax.vmap
def _put(out: Array, values: Array, places: Array) -> Array:
    """[C, ...] with [M, ...] in their places, and what lies beyond left out."""
    return out.at[places].set(values, mode="drop", unique_indices=True)
