"""The arrays of a stage rank while it runs a table: slots, scratch and sums; and the copies between
slots and scratch.

    slots --load--> scratch --operation (program.py)--> scratch --store--> slots

XLA copies the values that a switch passes through any branch but the first. It also copies slots
that one condition reads and a later one writes: all slots, in every tick. So slots stay outside of
conditions, and the scratch holds the arrays that operations work on and yield.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding.gradient import LayerGradient, SplitGradient
from sharding.pipeline.executor.component import Components, Inputs
from sharding.pipeline.executor.trees import (
    Tree,
    constrained,
    fits,
    once,
    read,
    stacked_shapes,
    write,
    zero_sum,
    zeros,
)
from sharding.pipeline.graph import Kind, Pool, PoolKey
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.table_spec import TableSpec, action_of

Row = dict[str, Array]  # the row of this rank in this tick, by column
Pools = dict[PoolKey, Tree]


class Work(NamedTuple):
    """The arrays that operations change. `scratch` holds, by pool and component, the values that
    they yield for slots and those that they work on."""

    scratch: dict[PoolKey, Tree]
    media: tuple[Tree, ...]
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]
    loss: Array
    sums: tuple[Tree, ...]


class State(NamedTuple):
    """The arrays that ticks change. Pools have one slot more than the table knows, where results
    that leave the rank wait to be sent."""

    pools: Pools
    work: Work


class Values(NamedTuple):
    """The values of the slots that a row names, as a component's operation reads them.

    Where the row's operation is another component's they mean nothing, and are not used.
    """

    x: Tree
    dy: Tree
    d_tokens: Tree
    media: Tree


def does(row: Row, c: int, *kinds: Kind) -> Array:
    """Whether the operation of a row is of component c and one of these kinds."""
    result = jnp.zeros((), bool)
    for kind in kinds:
        result |= row["action"] == action_of(c, kind)
    return result


class Shapes:
    """The shapes of everything that components compute, found by tracing them. Make it while the
    program is traced.

    By component and class of row: `x` between layers, and `gradients`, the backward pass of a
    layer. `tokens` are by encoder and class. `layers` have one leading axis for chunks and layers,
    so that a chunk's parameters are never copied as a whole. Slots and scratch have the size for
    rows of the first class, the largest; values of smaller rows are in their corners.
    """

    def __init__(self, spec: TableSpec, components: Components, inputs: Inputs):
        self.spec = spec
        self.components = components
        self.ring = spec.ring
        self.chains = spec.ring.chains
        self.reader = len(components) - 1  # the last chain, which delivers to no other
        self.outer = inputs.outer
        self.per_chunk = [max(1, *chain.layers) for chain in self.chains]  # L
        self.layers = [
            # [1, K, L, ...] on this rank becomes [K * L, ...]
            jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), tree)
            for tree in inputs.layers
        ]
        self.x: list[list[Tree]] = []
        self.tokens: list[list[Tree]] = []
        self.sums: list[Tree] = []
        self.gradients: list[list[LayerGradient]] = []
        for c, of_classes in enumerate(components):
            data = [jax.eval_shape(lambda rows: read(rows, 0), rows) for rows in inputs.rows[c]]
            layer = jax.eval_shape(lambda stack: read(stack, 0), self.layers[c])
            media = self.media(c)
            self.x.append(
                [
                    jax.eval_shape(component.first, self.outer[c], row, media)
                    for component, row in zip(of_classes, data, strict=True)
                ]
            )
            outputs = [
                jax.eval_shape(component.last, self.outer[c], x, row)
                for component, x, row in zip(of_classes, self.x[c], data, strict=True)
            ]
            parted_outputs = [self.parted(c, output) for output in outputs]
            tokens, losses = zip(*parted_outputs, strict=True)
            self.sums.append(losses[0][1] if self.ring.has_loss(c) else ())
            if c < self.reader:
                self.tokens.append(list(tokens))
            self.gradients.append(
                [
                    LayerGradient(component.layer, layer, x, row)
                    for component, x, row in zip(of_classes, self.x[c], data, strict=True)
                ]
            )
            self._check_classes(c)
        self._split_gradients: dict[tuple[int, int], SplitGradient] = {}

    def parted(self, c: int, output: Tree) -> tuple[Tree, Tree]:
        """The result of a component's `last` as tokens and (loss, sums), None for what it lacks."""
        if c == self.reader:
            return None, output
        if self.ring.has_loss(c):
            tokens, losses = output
            return tokens, losses
        return output, None

    def _check_classes(self, c: int) -> None:
        """Check that values of smaller rows fit into the corners of those of the largest rows."""
        held = [self.x[c], [gradient.residuals for gradient in self.gradients[c]]]
        held += [] if c == self.reader else [self.tokens[c]]
        for largest, *smaller in held:
            for small in smaller:
                self._check_fits(c, small, largest)

    def _check_fits(self, c: int, value: Tree, largest: Tree) -> None:
        if not fits(value, largest):
            raise PipelineError(
                f"rows of {self.chains[c].name} need one class; a smaller one holds {value}, which does not fit "
                f"where the largest one has {largest}"
            )

    def has(self, pool: Pool, c: int) -> bool:
        """Whether tables of this spec have slots of a pool."""
        return self.spec.room(pool, c) > 0

    def goes_back(self, c: int) -> bool:
        """Whether tables of this spec can hold backward operations of a component."""
        gradient_arrives = (
            self.chains[c].depth == 1 or self.chains[c].head_only or self.has(Pool.GRADIENT, c)
        )
        if not self.ring.has_loss(c):
            return gradient_arrives and self.has(Pool.TOKEN_GRADIENT, c)
        trained = bool(jax.tree.leaves((self.layers[c].trained, self.outer[c].trained)))
        return gradient_arrives and (
            trained or any(self.has(Pool.TOKEN_GRADIENT, e) for e in self.ring.feeding(c))
        )

    def split(self, c: int, row_class: int = 0) -> SplitGradient:
        """The two halves of the backward pass of a component's layer."""
        key = (c, row_class)
        if key not in self._split_gradients:
            self._split_gradients[key] = self.gradients[c][row_class].split()
            if row_class:
                self._check_fits(c, self._split_gradients[key].pending, self.split(c).pending)
        return self._split_gradients[key]

    def media(self, c: int) -> Tree:
        """Shapes of the tokens that a component's first chunk reads, by chain that feeds it."""
        return tuple(self.read_from(e) for e in self.ring.feeding(c))

    def read_from(self, e: int) -> Tree:
        """Shapes of the tokens of encoder e that one microbatch reads: [rows read, ...]."""
        return stacked_shapes(self.tokens[e][0], self.spec.rows_read[e])

    def slot(self, pool: Pool, c: int) -> Tree:
        """Shapes of the value in one slot of a pool."""
        match pool:
            case Pool.TOKENS | Pool.TOKEN_GRADIENT:
                return self.tokens[c][0]
            case Pool.INPUT | Pool.GRADIENT:
                return self.x[c][0]
            case Pool.RESIDUAL:
                residuals = self.gradients[c][0].residuals
                return stacked_shapes(residuals, self.per_chunk[c]), self.x[c][0]
        return stacked_shapes(self.split(c).pending, self.per_chunk[c])

    def specs(self, pool: Pool, c: int) -> list[PartitionSpec | None]:
        """Partition specs of a slot's leaves over automatic axes; None: the compiler chooses."""
        activation = self.components[c][0].activation
        of_slot = activation
        match pool:
            case Pool.TOKENS | Pool.TOKEN_GRADIENT:
                of_slot = self.components[c][0].tokens
            case Pool.RESIDUAL:
                stack, x = self.slot(pool, c)
                # The layout of residuals other than inputs of layers is left to the compiler.
                of_stack = None
                if self.gradients[c][0].keeps_input_alone and activation is not None:
                    of_stack = PartitionSpec(None, *activation)
                return [of_stack] * len(stack) + [activation] * len(jax.tree.leaves(x))
            case Pool.PENDING:
                of_slot = None
        return [of_slot] * len(jax.tree.leaves(self.slot(pool, c)))


class Buffers:
    """Makes empty slots and scratch, and moves values between them as a row says."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self.spec = shapes.spec
        self.ring = shapes.ring
        self.reader = shapes.reader

    # ------------------------------------------------------------------------ at the start

    def start(self) -> State:
        """Empty slots and scratch, zero sums."""
        shapes = self.shapes
        pools = {key: self._empty_pool(*key) for key in self._pool_keys()}
        # The boxes of two pools are made below: a backward needs a stack of residuals even where
        # no slot keeps any, and shares of token gradients are computed together, [rows read, ...].
        scratch: dict[PoolKey, Tree] = {
            (pool, c): self._empty_slots(pool, c)
            for pool, c in pools
            if pool not in (Pool.RESIDUAL, Pool.TOKEN_GRADIENT)
        }
        for c in range(self.reader + 1):
            if shapes.goes_back(c) and not shapes.chains[c].head_only:
                scratch[Pool.RESIDUAL, c] = self._empty_slots(Pool.RESIDUAL, c)
        media = tuple(shapes.read_from(e) for e in range(self.reader))
        for e in range(self.reader):
            if shapes.has(Pool.TOKEN_GRADIENT, e):
                scratch[Pool.TOKEN_GRADIENT, e] = jax.tree.map(zeros, media[e])
        work = Work(
            scratch=scratch,
            media=jax.tree.map(zeros, media),
            layers=tuple(jax.tree.map(zero_sum, params.trained) for params in shapes.layers),
            outer=tuple(jax.tree.map(zero_sum, params.trained) for params in shapes.outer),
            loss=jnp.zeros((), jnp.float32),
            sums=jax.tree.map(zero_sum, tuple(shapes.sums)),
        )
        return State(pools, work)

    def _pool_keys(self) -> list[PoolKey]:
        """The pools of the spec, and those that operations write even without slots in tables."""
        keys = [key for key, slots in self.spec.slots.items() if slots]
        keys += [(Pool.TOKENS, c) for c in range(self.reader)]
        for c, chain in enumerate(self.shapes.chains):
            if chain.depth > 1:
                keys.append((Pool.INPUT, c))
                if self.shapes.goes_back(c):
                    keys.append((Pool.GRADIENT, c))
        return list(dict.fromkeys(keys))

    def _empty_pool(self, pool: Pool, c: int) -> Tree:
        return self._empty_slots(pool, c, self.spec.room(pool, c) + 1)

    def _empty_slots(self, pool: Pool, c: int, *count: int) -> Tree:
        """Zeros in the shape of a slot's value, or of `count` slots."""
        leaves, tree = jax.tree.flatten(self.shapes.slot(pool, c))
        empty = [
            constrained(jnp.zeros((*count, *leaf.shape), leaf.dtype), spec, len(count))
            for leaf, spec in zip(leaves, self.shapes.specs(pool, c), strict=True)
        ]
        return jax.tree.unflatten(tree, empty)

    # ------------------------------------------------------------------------ in every tick

    def load(self, state: State, row: Row) -> tuple[Pools, Work]:
        """Copy residuals and pending arrays that the operation reads into the scratch, and consumed
        tokens into `media`, by loops of one turn or none."""
        pools = dict(state.pools)
        scratch = dict(state.work.scratch)
        for c in range(self.reader + 1):
            backward = does(row, c, Kind.BACKWARD, Kind.INPUT_GRADIENT)
            weight = does(row, c, Kind.WEIGHT_GRADIENT)
            for key, column, reads in (
                ((Pool.RESIDUAL, c), "read_residual", backward),
                ((Pool.PENDING, c), "pending", weight),
            ):
                if self.shapes.has(*key):
                    # -1: no residuals were kept, so the backward recomputes them.
                    loads = reads & (row[column] >= 0)
                    scratch[key], pools[key] = once(
                        loads,
                        _load_slot,
                        (scratch[key], pools[key]),
                        row[column],
                    )
        media = list(state.work.media)
        is_first = row["first"] > 0
        for e in range(self.reader):
            key = (Pool.TOKENS, e)
            if self.spec.rows_read[e] and self.shapes.has(*key):
                slots = jnp.stack(
                    [row[f"tokens.{e}.{index}"] for index in range(self.spec.rows_read[e])],
                )
                # The first chunk reads tokens forward, and again in its backward, which computes
                # their gradients.
                loads = does(row, self.ring.readers[e], *Kind) & is_first
                media[e], pools[key] = once(loads, _collect_slots, (media[e], pools[key]), slots)
        return pools, state.work._replace(scratch=scratch, media=tuple(media))

    def store(self, pools: Pools, work: Work, row: Row) -> Pools:
        """Put the operation's results from the scratch into their slots."""
        pools = dict(pools)
        scratch = work.scratch
        is_last = row["last"] > 0
        is_first = row["first"] > 0
        for c in range(self.reader + 1):
            forward = does(row, c, Kind.FORWARD)
            backward = does(row, c, Kind.BACKWARD, Kind.INPUT_GRADIENT)
            # Written in every tick: results without a slot go into the slot unknown to tables, from
            # which wires send. In the last chunk `output` is for tokens, and y goes to `features`.
            for pool, slot, writes in (
                (Pool.INPUT, jnp.where(is_last, row["features"], row["output"]), forward),
                (Pool.TOKENS, row["output"], forward & is_last),
                (Pool.GRADIENT, row["output"], backward & ~is_first),
            ):
                if (pool, c) in pools:
                    pools[pool, c] = write(
                        pools[pool, c],
                        self._slot_or_unknown(pool, c, slot, writes),
                        scratch[pool, c],
                    )
            split = does(row, c, Kind.INPUT_GRADIENT)
            for key, column, writes in (
                ((Pool.RESIDUAL, c), "write_residual", forward),
                ((Pool.PENDING, c), "pending", split),
            ):
                if self.shapes.has(*key):
                    stores = writes & (row[column] >= 0)
                    pools[key], _ = once(
                        stores, _store_slot, (pools[key], scratch[key]), row[column]
                    )
        return self._add_token_gradients(pools, scratch, row)

    def _add_token_gradients(self, pools: Pools, scratch: dict[PoolKey, Tree], row: Row) -> Pools:
        """Add each consumed row's token gradient to the sum that its encoder row waits for."""
        for e in range(self.reader):
            key = (Pool.TOKEN_GRADIENT, e)
            if not self.shapes.has(*key):
                continue
            reader = self.ring.readers[e]
            writes = does(row, reader, Kind.BACKWARD, Kind.INPUT_GRADIENT) & (row["first"] > 0)
            for index in range(self.spec.rows_read[e]):
                # Written in every tick; a row that adds nothing writes the slot unknown to tables.
                slot = self._slot_or_unknown(*key, row[f"grad_slot.{e}.{index}"], writes)
                old = read(pools[key], slot)
                new = read(scratch[key], index)
                # The first share replaces what an earlier use left in the slot.
                is_first = row[f"grad_is_first.{e}.{index}"] > 0
                total = jax.tree.map(
                    lambda old, new, is_first=is_first: jnp.where(is_first, new, old + new),
                    old,
                    new,
                )
                pools[key] = write(pools[key], slot, total)
        return pools

    def _slot_or_unknown(
        self, pool: Pool, c: int, slot: Array, wanted: Array | bool = True
    ) -> Array:
        """The slot or, where it is -1 or not wanted, the slot that tables do not know."""
        return jnp.where((slot >= 0) & wanted, slot, self.spec.room(pool, c))


def _load_slot(carry: tuple[Tree, Tree], slot: Array) -> tuple[Tree, Tree]:
    """(value, pool) -> (what the slot holds, pool)."""
    return read(carry[1], slot), carry[1]


def _store_slot(carry: tuple[Tree, Tree], slot: Array) -> tuple[Tree, Tree]:
    """(pool, value) -> (pool with the value in the slot, value)."""
    return write(carry[0], slot, carry[1]), carry[1]


def _collect_slots(carry: tuple[Tree, Tree], slots: Array) -> tuple[Tree, Tree]:
    """(media, pool) -> (what several slots hold, zeros for those that are -1; pool)."""
    media, pool = carry
    for index in range(slots.shape[0]):
        tokens = read(pool, jnp.maximum(slots[index], 0))
        tokens = jax.tree.map(
            lambda leaf, index=index: jnp.where(slots[index] >= 0, leaf, 0),
            tokens,
        )
        media = write(media, index, tokens)
    # This write changes no slot that tables know. Without it XLA sees no order between these reads
    # and later writes, and copies the pool in every tick instead of only here.
    return media, write(pool, jax.tree.leaves(pool)[0].shape[0] - 1, tokens)
