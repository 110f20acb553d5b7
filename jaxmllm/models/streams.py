"""Conditions with weights of their own, in rows of mostly patches: a second stream, or only keys
and values.

    slots      | c c c p p p p p p | c p p p p | . .
    patches    --weights of patches--> all slots --------------------+--> each slot by its own weights
    conditions --gathered--> | c c c c . . | --their own weights--> -+

Products with the weights of patches run over all slots. Those with the weights of conditions run
over a share of the row: the smallest one (see `SHARES`) that holds all conditions. Which one it is
comes as data, so that one program serves rows with any amount of text, and with none.

The backward pass recomputes all that is done with conditions, whatever `remat` says: kept values
need a fixed shape, and would have to be as large as all shares together.

Letters: R rows, C slots of a row, M slots of a share.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Int

from sharding.rules import Layout

SHARES = (16, 8, 4, 2, 1)  # conditions take a row divided by one of these

OfSlots = Callable[..., Any]  # arrays [R, C, ...] -> a tree of such arrays, slot by slot


class ConditionSlots(NamedTuple):
    """Which slots of rows are conditions."""

    places: Int[Array, "R C"]  # slots of conditions first, then places beyond the row
    share: Int[Array, ""]  # index in `shares` of the smallest one that holds them

    @classmethod
    def of(cls, layout: Layout, is_condition: Bool[Array, "R C"]) -> ConditionSlots:
        """Find the conditions. Devices that gather weights together take the same share, because
        the gathers are inside the branch of a share."""
        slots = is_condition.shape[1]
        # A stable sort of booleans: slots of conditions first, each kind in the order of the row
        order = jnp.argsort(~is_condition, axis=1, stable=True).astype(jnp.int32)
        condition_counts = is_condition.sum(axis=1, dtype=jnp.int32)
        slot = jnp.arange(slots, dtype=jnp.int32)
        # Places beyond the row differ, too: `_take` and `_put` promise unique indices.
        indices = jnp.where(slot < condition_counts[:, None], order, slots + slot)
        longest = condition_counts.max()
        if axes := tuple(a for a in layout.mesh_axes("embed") if a in layout.manual_axes):
            longest = layout.local(lambda longest: jax.lax.pmax(longest, axes), ((),), ())(longest)
        fits = jnp.array(shares(layout, slots)) >= longest
        # Shares ascend, and argmax finds the first that fits.
        return cls(indices, jnp.argmax(fits))


def shares(layout: Layout, slots: int) -> list[int]:
    """Slots M of every share of a row, ascending up to the whole row; each is split over parts as
    the row is."""
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
    """Outputs of all slots: of conditions by `of_conditions`, of all others by `of_patches`.

    Args:
      of_conditions: function of `given` and slots; nothing else that it reads may have a gradient.
    """
    sizes = tuple(shares(layout, where.places.shape[1]))
    return _put_conditions(of_conditions, sizes, where, of_patches(*slots), (given, *slots))


def of_conditions_alone(
    layout: Layout,
    where: ConditionSlots,
    function: Callable[..., Any],
    given: Any,
    *slots: Array,
) -> Any:
    """Outputs of the function for conditions, as in `in_streams`, and zeros in all other slots."""

    def zeros(*slots: Array) -> Any:
        shapes = jax.eval_shape(function, given, *slots)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return in_streams(layout, where, zeros, function, given, *slots)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _put_conditions(
    function: Callable[..., Any],
    sizes: tuple[int, ...],
    where: ConditionSlots,
    whole: Any,
    arguments: tuple[Any, ...],
) -> Any:
    """The tree `whole` of slots, with the function's outputs for conditions in their places.

    The backward pass starts from the arguments: the one that JAX derives would be handed what each
    branch keeps, in buffers for all branches.
    """

    def with_share(size: int) -> OfSlots:
        def run(whole: Any, arguments: tuple[Any, ...]) -> Any:
            places = where.places[:, :size]
            outputs = _condition_outputs(function, places, arguments)
            return jax.tree.map(lambda out, values: _put(out, values, places), whole, outputs)

        return run

    return jax.lax.switch(where.share, [with_share(size) for size in sizes], whole, arguments)


def _condition_outputs(
    function: Callable[..., Any], places: Array, arguments: tuple[Any, ...]
) -> Any:
    """Outputs of the function for the slots in these places: [R, M, ...]."""
    given, *slots = arguments
    return function(given, *(_take(values, places) for values in slots))


def _conditions_forward(
    function: Callable[..., Any], sizes: tuple[int, ...], *primals: Any
) -> tuple[Any, tuple[Any, ...]]:
    where, whole, arguments = jax.tree.map(lambda primal: primal.value, primals)
    # Residuals must be trees of arrays, so () stands for True and None for False.
    asked = [() if primal.perturbed else None for primal in jax.tree.leaves(primals[2])]
    return _put_conditions(function, sizes, where, whole, arguments), (where, arguments, asked)


def _conditions_backward(
    function: Callable[..., Any], sizes: tuple[int, ...], kept: tuple[Any, ...], d_out: Any
) -> tuple[Any, ...]:
    where, arguments, asked = kept
    # Outputs that nothing reads have no gradient, which JAX says by an object that is no array.
    d_out = jax.tree.map(
        lambda d: jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d, d_out
    )
    leaves, tree = jax.tree.flatten(arguments)
    learned = [n for n, leaf in enumerate(leaves) if asked[n] is not None]

    def with_share(size: int) -> Callable[..., list[Array]]:
        def run(leaves: list[Array], d_out: Any) -> list[Array]:
            places = where.places[:, :size]

            def made(*values: Array) -> Any:
                all_leaves = dict(enumerate(leaves)) | dict(zip(learned, values, strict=True))
                return _condition_outputs(
                    function, places, jax.tree.unflatten(tree, all_leaves.values())
                )

            _, pull_back = jax.vjp(made, *(leaves[n] for n in learned))
            return list(pull_back(jax.tree.map(lambda d: _take(d, places), d_out)))

        return run

    d_learned = jax.lax.switch(where.share, [with_share(size) for size in sizes], leaves, d_out)
    d_leaves = dict.fromkeys(range(len(leaves))) | dict(zip(learned, d_learned, strict=True))
    # `whole` was overwritten in the places of conditions, so its gradient is zero there.
    d_whole = jax.tree.map(lambda d: _put(d, jnp.zeros_like(d), where.places), d_out)
    return None, d_whole, jax.tree.unflatten(tree, d_leaves.values())


_put_conditions.defvjp(_conditions_forward, _conditions_backward, symbolic_zeros=True)


@jax.vmap
def _take(values: Array, places: Array) -> Array:
    """Values [C, ...] at the places [M]: [M, ...]; zeros for places beyond the row."""
    return values.at[places].get(mode="fill", fill_value=0, unique_indices=True)


@jax.vmap
def _put(out: Array, values: Array, places: Array) -> Array:
    """`out` [C, ...] with values [M, ...] in their places; places beyond the row are left out."""
    return out.at[places].set(values, mode="drop", unique_indices=True)
