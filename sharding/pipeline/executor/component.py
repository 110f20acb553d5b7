"""The components that the executor is made from, its inputs and outputs, and tables as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sharding.gradient import Params
from sharding.pipeline.table import Table

Tree = Any


@dataclass(frozen=True)
class Component:
    """One component as pure functions, for rows of one class; activations, tokens and media are
    pytrees of floating-point arrays.

    Encoders: first(outer, row, ()) -> x; layer(params, x, row) -> x; last(outer, x, row) -> tokens.
    Language: first(outer, row, media) -> x, where media[e] holds the tokens of the consumed rows of
    the e-th encoder that it reads, [rows read, ...], zeros where there are fewer rows; last(outer,
    x, row) -> (loss, sums), or, where it is read and has a loss, (tokens, (loss, sums)). The loss
    is a float32 scalar, sums are a pytree of arrays to add up. `outer` are the component's
    parameters outside its layers, `row` is one of its microbatches. `activation` and `tokens` are
    the partition specs of x and tokens over the automatic axes.
    """

    first: Callable[[Params, Tree, Tree], Tree]
    layer: Callable[[Params, Tree, Tree], Tree]
    last: Callable[[Params, Tree, Tree], Any]
    activation: PartitionSpec | None = None
    tokens: PartitionSpec | None = None


Components = tuple[tuple[Component, ...], ...]  # by component and class of row


class Inputs(NamedTuple):
    """What one step computes on, each a tuple by component: encoders, then language.

    layers: leaves [S, K, L, ...], K chunks of up to L layers on each rank, sharded over `stage`.
    outer: parameters outside the layers, the same on all stages.
    rows: by class, the largest first, leaves [M, ...], the same on all stages; M may be more than a
    table uses.
    """

    layers: tuple[Params, ...]
    outer: tuple[Params, ...]
    rows: tuple[tuple[Tree, ...], ...]


class ManualAxes(NamedTuple):
    """Mesh axes, in addition to the stages, over which the program is manual: components see one
    device's part along them, and communicate by collectives of their own.

    inputs: partition specs over the stages and these axes, by leaf or prefix; None: layers are
    split over stages only, and rows along axis 1, after the axis of microbatches.
    summed: by component, the axes along which devices compute different parts of its gradients;
    None: all these axes. The parts are added once, after the loop, except along axes that split a
    parameter, where components add them.
    """

    names: tuple[str, ...] = ()
    inputs: Inputs | None = None
    summed: tuple[tuple[str, ...], ...] | None = None

    def input_specs(self, stage: str) -> Inputs:
        """Partition specs of the inputs over the stages and these axes."""
        if self.inputs is not None:
            return self.inputs
        specs: Any = (
            PartitionSpec(stage),
            PartitionSpec(),
            PartitionSpec(None, self.names) if self.names else PartitionSpec(),
        )
        return Inputs(*specs)

    def output_specs(self, stage: str) -> Outputs:
        """Partition specs of the outputs over the stages and these axes."""
        specs = self.input_specs(stage)
        replicated: Any = PartitionSpec()
        if self.inputs is None:
            return Outputs(replicated, replicated, specs.layers, specs.outer)
        layers, outer = (
            tuple(params.trained for params in by_component)
            for by_component in (specs.layers, specs.outer)
        )
        return Outputs(replicated, replicated, layers, outer)

    def added(self, c: int, gradients: Tree, specs: Tree, *others: str) -> Tree:
        """Gradients of component c, summed over axes along which they are parts, and `others`."""
        axes = self.names if self.summed is None else self.summed[c]

        def of_leaf(gradient: Array, spec: PartitionSpec) -> Array:
            split = {axis for names in spec if names for axis in _axis_names(names)}
            over = (*others, *(axis for axis in axes if axis not in split))
            total: Array = lax.psum(gradient, over) if over else gradient
            return total

        if isinstance(specs, PartitionSpec):
            return jax.tree.map(lambda gradient: of_leaf(gradient, specs), gradients)
        return jax.tree.map(of_leaf, gradients, specs)


class Outputs(NamedTuple):
    """The summed loss; sums by component, () for those without a loss; and the gradients of
    `Inputs.layers` and `Inputs.outer` (trained leaves, in at least float32)."""

    loss: Float[Array, ""]
    sums: tuple[Tree, ...]
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]


class TableArrays(NamedTuple):
    """A table as arguments of the program."""

    rows: Int[Array, "T S columns"]
    wire_active: Int[Array, "T wires"]
    ticks: Int[Array, ""]

    @staticmethod
    def of(table: Table) -> TableArrays:
        """The arrays of a table that was planned on the host."""
        return TableArrays(
            jnp.asarray(table.rows),
            jnp.asarray(table.wire_active),
            jnp.asarray(table.count, jnp.int32),
        )


AUTOMATIC = ManualAxes()


def _axis_names(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axes of one dimension of a partition spec."""
    return (axes,) if isinstance(axes, str) else axes
