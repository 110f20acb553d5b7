"""A loop over layers. Its backward pass adds each layer's gradient to the sums of all microbatches.

    forward     x --layer--> x, out, residuals           layers 0, 1, ...
    backward    dx <--layer-- dx, d_out, residuals       layers ..., 1, 0
                total[layer] += gradient                 in place, for parameters that are `Summed`

The backward pass of `jax.lax.scan` returns the gradients of all layers as new arrays, to be added
to the sums afterwards: they take as much memory as the parameters do in float32, and are written
and read once more. And where no layer is recomputed, it keeps the gathered parameters of every
layer. Here they are gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

from sharding.by_platform import by_platform, traced_platform
from sharding.gradient import LayerGradient, Params
from sharding.parameters import Parameter, differentiated
from sharding.rules import Layout

Tree = Any
Layer = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]


@partial(jax.tree_util.register_dataclass, data_fields=("parameter", "total"), meta_fields=())
@dataclass(frozen=True)
class Summed:
    """A trained parameter of all layers, and the sum of its gradients so far.

    The new sum is returned as the gradient of `total`. So the layers must run exactly once, in
    `run_layers`, and the differentiated value must depend on their results: otherwise the sum is
    lost or counted twice.
    """

    parameter: Parameter  # [L, ...]
    total: jax.Array  # as many elements as the gradient


def run_layers(
    layout: Layout, layer: Layer, parameters: Tree, x: Tree, of_layers: Tree, of_all: Tree
) -> tuple[Tree, Tree]:
    """x after all layers, and the other results of the layers, stacked.

    Args:
      layout: the layout of the calling code.
      layer: (its parameters, x, its part of `of_layers`, `of_all`) -> x, other results. It must not
        close over traced arrays.
      parameters: arrays [L, ...], of which some may be `Deferred` or `Summed`.
      of_layers: arrays [L, ...] that have no gradients.
      of_all: arrays that all layers read.
    """
    is_summed = lambda node: isinstance(node, Summed)  # noqa: E731
    nodes, tree = jax.tree.flatten(parameters, is_leaf=is_summed)
    plain = [node.parameter if is_summed(node) else node for node in nodes]
    totals = [node.total if is_summed(node) else None for node in nodes]

    def run_layer(plain: list[Parameter], x: Tree, own: Tree, of_all: Tree) -> tuple[Tree, Tree]:
        return layer(jax.tree.unflatten(tree, plain), x, own, of_all)

    @jax.custom_vjp
    def run(
        plain: list[Parameter], totals: list[Any], x: Tree, of_layers: Tree, of_all: Tree
    ) -> tuple[Tree, Tree]:
        def step(x: Tree, of_layer: tuple[list[Parameter], Tree]) -> tuple[Tree, Tree]:
            plain, own = _in_memory_order(layout, of_layer)
            return run_layer(plain, x, own, of_all)

        return jax.lax.scan(step, x, (plain, of_layers))

    def forward(*primals: Tree) -> tuple[tuple[Tree, Tree], Callable[..., Any]]:
        plain, totals, x, of_layers, of_all = jax.tree.map(lambda primal: primal.value, primals)
        trained, read = (_AskedLeaves.of(primals[argument]) for argument in (0, 4))
        passes = _LoopPasses(layout, run_layer, trained, read, plain, x, of_layers, of_all)
        results, residuals = passes.forward(plain, x, of_layers, of_all)
        # A forward rule must return its residuals as a tree of arrays, such as a Partial, whose
        # leaves are those of its arguments.
        backward = jax.tree_util.Partial(
            passes.backward, plain, totals, of_layers, of_all, residuals
        )
        return results, backward

    run.defvjp(forward, lambda backward, gradients: backward(*gradients), symbolic_zeros=True)
    results: tuple[Tree, Tree] = run(plain, totals, x, of_layers, of_all)
    return results


class _AskedLeaves(NamedTuple):
    """Which leaves of a tree need gradients."""

    tree: Any  # the tree's structure
    flags: Sequence[bool]

    @classmethod
    def of(cls, primals: Tree) -> _AskedLeaves:
        """Read from the primals that a `custom_vjp` with symbolic zeros gives its forward rule."""
        leaves, tree = jax.tree.flatten(primals)
        return cls(tree, [leaf.perturbed for leaf in leaves])

    def parted(self, tree: Tree) -> Params:
        """The leaves that need gradients, and the others; each with None in the others' places."""
        leaves = list(zip(jax.tree.leaves(tree), self.flags, strict=True))
        asked_leaves = [leaf if asked else None for leaf, asked in leaves]
        others = [None if asked else leaf for leaf, asked in leaves]
        return Params(asked_leaves, others)

    def joined(self, asked: Sequence[Any], others: Sequence[Any]) -> Tree:
        """The tree made of the two lists that `parted` returns."""
        leaves = zip(asked, others, strict=True)
        return jax.tree.unflatten(
            self.tree, [other_leaf if leaf is None else leaf for leaf, other_leaf in leaves]
        )


class _LoopPasses:
    """The forward and the backward pass of the loop.

    Leaves of `of_all` that need gradients are inputs of a layer like x, but no layer returns them:
    their gradients are sums over layers, and such a leaf is not kept as a residual of each layer.
    """

    def __init__(
        self,
        layout: Layout,
        layer: Layer,
        trained: _AskedLeaves,
        read: _AskedLeaves,
        plain: list[Parameter],
        x: Tree,
        of_layers: Tree,
        of_all: Tree,
    ):
        self._trained = trained
        self._read = read
        self._layout = layout
        self._in_memory_order = partial(_in_memory_order, layout)

        def parted_layer(params: Params, inputs: tuple[Tree, Any], rows: Any) -> tuple[Tree, Tree]:
            (x, asked), (own, unasked) = inputs, rows
            return layer(trained.joined(*params), x, own, read.joined(asked, unasked))

        params, own = jax.tree.map(_layer_shape, (trained.parted(plain), of_layers))
        asked, unasked = read.parted(of_all)
        self._gradient = LayerGradient(parted_layer, params, (x, asked), (own, unasked))
        # For each residual: the leaf of `asked` that it is, or None. The leaves of x come first.
        x_leaves = len(jax.tree.leaves(x))
        self._asked_leaf_of = [
            None if leaf is None or leaf < x_leaves else leaf - x_leaves
            for leaf in self._gradient.of_x
        ]

    def forward(
        self, plain: list[Parameter], x: Tree, of_layers: Tree, of_all: Tree
    ) -> tuple[tuple[Tree, Tree], list[jax.Array]]:
        """The results of the loop, and the residuals of all layers, stacked."""
        asked, unasked = self._read.parted(of_all)

        def step(x: Tree, of_layer: tuple[Params, Tree]) -> tuple[Tree, Any]:
            params, own = self._in_memory_order(of_layer)
            (x, out), residuals = self._gradient.forward(params, (x, asked), (own, unasked))
            pairs = zip(residuals, self._asked_leaf_of, strict=True)
            return x, (out, [residual for residual, leaf in pairs if leaf is None])

        x, (outs, residuals) = jax.lax.scan(step, x, (self._trained.parted(plain), of_layers))
        return (x, outs), residuals

    def backward(
        self,
        plain: list[Parameter],
        totals: list[jax.Array | None],
        of_layers: Tree,
        of_all: Tree,
        residuals: list[jax.Array],
        dx: Tree,
        d_outs: Tree,
    ) -> tuple[Any, ...]:
        """Gradients of the arguments of `run`: plain, totals, x, `of_layers` (None), `of_all`."""
        asked, unasked = self._read.parted(of_all)

        def step(carry: tuple[Tree, Tree, list[Any]], of_layer: Any) -> tuple[Any, list[Any]]:
            dx, d_asked, sums = carry
            layer_number, params, own, layer_residuals, d_out = self._in_memory_order(of_layer)
            leaves, (dx, d_read) = self._gradient.backward(
                params, (own, unasked), self._all_residuals(layer_residuals, asked), (dx, d_out)
            )
            d_asked = jax.tree.map(jnp.add, d_asked, d_read)
            gradients = jax.tree.unflatten(self._trained.tree, leaves)
            pairs = list(zip(sums, gradients, strict=True))
            added = [
                None if total is None else self._add_gradient(total, layer_number, gradient)
                for total, gradient in pairs
            ]
            unsummed = [gradient if total is None else None for total, gradient in pairs]
            return (dx, d_asked, added), unsummed

        # Where each device has a sum of its own, a total has a leading axis of length 1.
        sums = [
            None if total is None else total.reshape(differentiated(parameter).shape)
            for parameter, total in zip(plain, totals, strict=True)
        ]
        layer_numbers = np.arange(len(jax.tree.leaves(plain)[0]))
        dx, d_outs = jax.tree.map(_gradient_array, (dx, d_outs))
        layers = layer_numbers, self._trained.parted(plain), of_layers, residuals, d_outs
        carry = dx, jax.tree.map(jnp.zeros_like, asked), sums
        (dx, d_asked, sums), unsummed = jax.lax.scan(step, carry, layers, reverse=True)
        d_totals = jax.tree.map(lambda total, new: new.reshape(total.shape), totals, sums)
        return unsummed, d_totals, dx, None, jax.tree.unflatten(self._read.tree, d_asked)

    def _add_gradient(self, total: jax.Array, number: jax.Array, gradient: Any) -> jax.Array:
        """The sums of all layers, with the gradient of layer `number` added."""
        if self._is_added_by_rows(differentiated(gradient)):
            return _add_rows(total, number, differentiated(gradient).astype(total.dtype))
        layer_total = jax.lax.dynamic_index_in_dim(total, number, keepdims=False)
        layer_total += self._in_memory_order(differentiated(gradient).astype(total.dtype))
        return jax.lax.dynamic_update_index_in_dim(total, layer_total, number, 0)

    def _is_added_by_rows(self, gradient: jax.Array) -> bool:
        """Whether `_add_rows` adds the gradient: on CPUs, if it has rows, and XLA does not split
        it."""
        known_cpu = traced_platform() == "cpu"
        return known_cpu and gradient.ndim > 1 and not self._layout.is_partitioned

    def _all_residuals(self, kept: Sequence[jax.Array], asked: Sequence[Any]) -> list[jax.Array]:
        """All residuals of a layer: those kept for it, and those that are leaves of `asked`."""
        layer_residuals = iter(kept)
        leaves = jax.tree.leaves(asked)
        return [
            next(layer_residuals) if leaf is None else leaves[leaf] for leaf in self._asked_leaf_of
        ]


def _add_rows(total: jax.Array, number: jax.Array, gradient: jax.Array) -> jax.Array:
    """An array [L, I, ...], with a gradient [I, ...] added to part `number` row by row.

    A scatter adds in place, on all cores of a CPU. To update a slice, XLA's CPU backend first
    copies what the slice held, and then adds on one core.
    """
    row_count = len(gradient)
    rows = total.reshape(-1, *gradient.shape[1:])
    row_numbers = number * row_count + jnp.arange(row_count)
    added = rows.at[row_numbers].add(
        gradient, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
    )
    return added.reshape(total.shape)


def _in_memory_order(layout: Layout, of_layer: Tree) -> Tree:
    """One layer's part of arrays that are stored for all layers; on GPUs its dimensions keep the
    order that they have in memory there.

    XLA would otherwise choose an order that suits the layer, such as the one in which a matrix is
    gathered, and transpose the arrays of all layers before the loop, and its results after it. On
    CPUs XLA's choice is better: a step takes 3 % less.
    """
    if layout.is_partitioned:  # by XLA, which would first gather arrays with a layout constraint
        return of_layer

    def constrained(of_layer: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: with_layout_constraint(leaf, ArrayLayout(tuple(range(leaf.ndim)))),
            of_layer,
        )

    return by_platform(
        of_layer, cuda=constrained, rocm=constrained, default=lambda of_layer: of_layer
    )


def _layer_shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _gradient_array(gradient: Any) -> Any:
    """The gradient as an array: zeros where JAX knows that it is zero; for integers, which have no
    gradient, an array that nothing reads."""
    if gradient.dtype == jax.dtypes.float0:
        # [L] for results of layers, because the scan slices these layer by layer
        return np.zeros(gradient.shape[:1])
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype)
    return gradient
