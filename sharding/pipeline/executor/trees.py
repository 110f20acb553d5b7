"""Functions of pytrees of arrays with a leading axis, of slots, layers or microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

Tree = Any


def read(tree: Tree, index: Array | int, shapes: Tree | None = None) -> Tree:
    """The element of every leaf at an index, or the corner of it that has these shapes."""
    if shapes is None:
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
        )

    def part(leaf: Array, shape: Any) -> Array:
        begin = (index, *(0 for _ in shape.shape))
        return lax.dynamic_slice(leaf, begin, (1, *shape.shape))[0]

    return jax.tree.map(part, tree, shapes)


def write(tree: Tree, index: Array | int, value: Tree) -> Tree:
    """The tree with a value in the corner of the element at an index, whose rest stays as it is."""

    def changed(leaf: Array, new: Array) -> Array:
        return lax.dynamic_update_slice(leaf, new[None], (index, *(0 for _ in new.shape)))

    return jax.tree.map(changed, tree, value)


def corner(tree: Tree, shapes: Tree) -> Tree:
    """The corner of every leaf that has these shapes."""
    return jax.tree.map(
        lambda leaf, shape: lax.slice(leaf, (0,) * leaf.ndim, shape.shape), tree, shapes
    )


def with_corner(tree: Tree, value: Tree) -> Tree:
    """The tree with a value in the corner of every leaf, whose rest stays as it is."""

    def changed(leaf: Array, new: Array) -> Array:
        if leaf.shape == new.shape:
            return new
        return lax.dynamic_update_slice(leaf, new, (0,) * leaf.ndim)

    return jax.tree.map(changed, tree, value)


def fits(value: Tree, tree: Tree) -> bool:
    """Whether a value fits into the corners of a tree's leaves, with the same types."""
    new = jax.tree.leaves(value)
    old = jax.tree.leaves(tree)
    if len(new) != len(old):
        return False
    for new_leaf, leaf in zip(new, old, strict=True):
        if new_leaf.dtype != leaf.dtype or len(new_leaf.shape) != len(leaf.shape):
            return False
        if any(size > room for size, room in zip(new_leaf.shape, leaf.shape, strict=True)):
            return False
    return True


def add_at(tree: Tree, index: Array, value: Tree) -> Tree:
    """The tree with a value added to the element at an index, in the tree's precision."""
    return write(
        tree,
        index,
        jax.tree.map(lambda old, new: old + new.astype(old.dtype), read(tree, index), value),
    )


def stacked_shapes(shapes: Tree, count: int) -> Tree:
    """The shapes of `count` such trees, stacked."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), shapes)


def zero_sum(leaf: Any) -> Array:
    """An empty sum of leaves like this one: in at least float32, or in the leaf's integer type."""
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def zeros(leaf: Any) -> Array:
    """Zeros of a leaf's shape and type."""
    return jnp.zeros(leaf.shape, leaf.dtype)


def constrained(stack: Array, spec: PartitionSpec | None, leading: int = 1) -> Array:
    """A stack of arrays, constrained to `spec` over the automatic axes after its leading axes."""
    if spec is None:
        return stack
    return lax.with_sharding_constraint(stack, PartitionSpec(*(None,) * leading, *spec))


def unchanged(operand: Tree) -> Tree:
    """The branch of a condition that does nothing."""
    return operand


def once(wanted: Array, body: Callable[[Tree, Array], Tree], carry: Tree, slot: Array) -> Tree:
    """body(carry, slot) if wanted, as a loop of one turn or none: a condition would copy the values
    that it passes through."""
    return lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, carry: body(carry, slot), carry)


def replaced(items: tuple[Tree, ...], index: int, item: Tree) -> tuple[Tree, ...]:
    """The tuple with another item at an index."""
    return (*items[:index], item, *items[index + 1 :])
