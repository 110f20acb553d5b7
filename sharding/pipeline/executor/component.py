"""What the executor is made from and what passes in and out of it: components, inputs, outputs, a
table as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sharding.gradient import Params
from sharding.pipeline.table import Table

Tree = Any


@dataclass(frozen=True)
class Component:
    """One component as pure functions; activations, tokens and media are pytrees of floating-point
    arrays.

    Encoders: first(outer, row, ()) -> x; layer(params, x, row) -> x; last(outer, x, row) -> tokens.
    Language: first(outer, row, media) -> x, where media[e] holds the tokens of the consumed
    rows of encoder e, [rows read, ...], zeros where there are fewer; last(outer, x,
    row) -> (loss, sums), float32 scalars. `outer` are the component's parameters outside its
    layers, `row` one microbatch of its rows. `activation` and `tokens` say how x and tokens lie on
    the automatic axes.
    """

    first: Callable[[Params, Tree, Tree], Tree]
    layer: Callable[[Params, Tree, Tree], Tree]
    last: Callable[[Params, Tree, Tree], Any]
    activation: PartitionSpec | None = None
    tokens: PartitionSpec | None = None


class Inputs(NamedTuple):
    """What one step computes on, each a tuple by component: encoders, then language.

    layers: leaves [S, K, L, ...], K chunks per rank with up to L layers, sharded over `stage`.
    outer: parameters outside the layers, the same on all stages. rows: by class, the largest first,
    leaves [M, ...], the same on all stages; M may exceed what a table uses.
    """

    layers: tuple[Params, ...]
    outer: tuple[Params, ...]
    rows: tuple[tuple[Tree, ...], ...]


class Outputs(NamedTuple):
    """Summed loss and sums, and gradients of `Inputs.layers` and `Inputs.outer` (trained leaves, at
    least float32)."""

    loss: Float[Array, ""]
    sums: Tree
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]


class TableArrays(NamedTuple):
    """A table as arguments of the program."""

    rows: Int[Array, "T S columns"]
    wire_active: Int[Array, "T wires"]
    ticks: Int[Array, ""]

    @staticmethod
    def of(table: Table) -> TableArrays:
        """The arrays of a planned table."""
        return TableArrays(
            jnp.asarray(table.rows),
            jnp.asarray(table.wire_active),
            jnp.asarray(table.count, jnp.int32),
        )
