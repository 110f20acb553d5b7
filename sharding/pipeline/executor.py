"""The pipeline executor: one compiled program that runs any schedule table.

    every tick, every stage rank          row of the table, an argument
      1  lax.switch over the operations     slots -> one operation -> slots
      2  ring ppermutes, outside of it      slot -> next or previous rank -> slot

Loop bounds, slots and microbatch numbers are data, so another schedule or batch compiles nothing. shard_map is manual
over `stage` alone: data, fsdp and tensor axes stay automatic inside the operations. Two traps shape the code. Ranks run
different branches, so nothing inside one may communicate over `stage`: edges wait for the switch to end, and gradients
of parameters that all ranks share are summed after the loop. And vmap over stages would turn the switch into a select
that runs every branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from sharding.pipeline.gradient import LayerGradient, Params, used_leaves
from sharding.pipeline.graph import Kind, PipelineError, Pool
from sharding.pipeline.table import Table, TableSpec

Tree = Any
Row = dict[str, Array]


@dataclass(frozen=True)
class Component:
    """One component as pure functions; activations, tokens and media are pytrees of floating-point arrays.

    Encoders: first(outer, row, ()) -> x; layer(params, x, row) -> x; last(outer, x, row) -> tokens.
    Language: first(outer, row, media) -> x, where media[e] holds the tokens of the consumed sub-microbatches of
    encoder e, [fan, ...], zeros where there are fewer; last(outer, x, row) -> (loss, sums), float32 scalars.
    `outer` are the component's parameters outside its layers, `row` one microbatch of its rows. `activation` and
    `tokens` say how x and tokens lie on the automatic axes.
    """

    first: Callable[[Params, Tree, Tree], Tree]
    layer: Callable[[Params, Tree, Tree], Tree]
    last: Callable[[Params, Tree, Tree], Any]
    activation: PartitionSpec | None = None
    tokens: PartitionSpec | None = None


class Inputs(NamedTuple):
    """What one step computes on, each a tuple by component: encoders, then language.

    layers: leaves [S, K, L, ...], K chunks of a rank with up to L layers, sharded over `stage`. outer: parameters
    outside the layers, alike on all stages. rows: leaves [M, ...], alike on all stages; M may exceed what a table uses.
    """

    layers: tuple[Params, ...]
    outer: tuple[Params, ...]
    rows: tuple[Tree, ...]


class Outputs(NamedTuple):
    """Summed loss and sums, and gradients of `Inputs.layers` and `Inputs.outer` (trained leaves, at least float32)."""

    loss: Float[Array, ""]
    sums: Tree
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]


class TableArrays(NamedTuple):
    """A table as arguments of the program."""

    rows: Int[Array, "T S columns"]
    moves: Int[Array, "T wires"]
    ticks: Int[Array, ""]

    @staticmethod
    def of(table: Table) -> TableArrays:
        return TableArrays(jnp.asarray(table.rows), jnp.asarray(table.moves), jnp.asarray(table.count, jnp.int32))


class _State(NamedTuple):
    """What the ticks change. Pools have one slot more than the table knows: results that leave the rank wait there."""

    pools: dict[tuple[Pool, int], Tree]
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]
    loss: Array
    sums: Tree


Branch = Callable[[_State, Row], _State]


def make_executor(
    spec: TableSpec, components: tuple[Component, ...], mesh: Mesh, axis: str = "stage"
) -> Callable[[TableArrays, Inputs], Outputs]:
    """The function that runs tables of `spec`; jit it once. `mesh` has the axis `axis` of as many places as stages.

    Residuals can be kept where `spec.slots` has RESIDUAL slots, and split backwards run where it has PENDING slots;
    without them the program holds no code for either. Raises `PipelineError` when mesh, spec and components differ.
    """
    if mesh.shape.get(axis) != spec.ring.stages:
        raise PipelineError(f"a pipeline of {spec.ring.stages} stages on a mesh of {dict(mesh.shape)}")
    if len(components) != len(spec.ring.chains):
        raise PipelineError(f"{len(components)} components for a ring of {len(spec.ring.chains)}")

    def run(table: TableArrays, inputs: Inputs) -> Outputs:
        local = PartitionSpec(axis)
        whole = PartitionSpec()
        body = jax.shard_map(
            lambda table, inputs: _run(spec, components, axis, table, inputs),
            mesh=mesh,
            in_specs=(TableArrays(PartitionSpec(None, axis), whole, whole), Inputs(local, whole, whole)),
            out_specs=Outputs(whole, whole, local, whole),
            axis_names={axis},
            check_vma=False,
        )
        return body(table, inputs)

    return run


def _run(spec: TableSpec, components: tuple[Component, ...], axis: str, table: TableArrays, inputs: Inputs) -> Outputs:
    """The program of one stage rank."""
    program = _Program(spec, components, inputs)
    branches = [_idle, *program.branches()]

    def tick(number: Array, state: _State) -> _State:
        row = dict(zip(spec.columns, table.rows[number, 0], strict=True))
        state = lax.switch(row["action"], branches, state, row)
        return state._replace(pools=_exchange(spec, axis, state.pools, row, table.moves[number]))

    state = lax.fori_loop(0, table.ticks, tick, program.start())
    loss, sums, outer = lax.psum((state.loss, state.sums, state.outer), axis)
    layers = tuple(
        jax.tree.map(lambda total, leaf: total.reshape(leaf.shape), found, params.trained)
        for found, params in zip(state.layers, inputs.layers, strict=True)
    )
    return Outputs(loss, sums, layers, outer)


def _exchange(
    spec: TableSpec, axis: str, pools: dict[tuple[Pool, int], Tree], row: dict[str, Array], moves: Array
) -> dict[tuple[Pool, int], Tree]:
    """Edges move one place. All ranks agree on `moves`, so a ppermute may be left out where nothing travels."""
    stages = spec.ring.stages
    for number, wire in enumerate(spec.wires):
        place = (wire.pool, wire.chain)
        if place not in pools:
            continue
        ring = [(rank, (rank + (1 if wire.up else -1)) % stages) for rank in range(stages)]
        slots = spec.slots.get(place, 0)
        send, receive = row[f"send.{wire.name}"], row[f"receive.{wire.name}"]
        source, target = jnp.where(send >= 0, send, slots), jnp.where(receive >= 0, receive, slots)

        def move(pool: Tree, source: Array = source, target: Array = target, ring: Any = ring) -> Tree:
            value = jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, ring), _read(pool, source))
            return _write(pool, target, value)

        pools = pools | {place: lax.cond(moves[number] > 0, move, lambda pool: pool, pools[place])}
    return pools


class _Program:
    """The branches of one stage rank, and the buffers they work on."""

    def __init__(self, spec: TableSpec, components: tuple[Component, ...], inputs: Inputs):
        self.spec, self.components, self.rows, self.outer = spec, components, inputs.rows, inputs.outer
        self.chains, self.language = spec.ring.chains, len(components) - 1
        self.per_chunk = [max(1, *chain.layers) for chain in self.chains]
        # One leading axis for chunks and layers: a chunk's parameters are never copied as a whole.
        self.layers = [jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), params) for params in inputs.layers]
        data = [jax.eval_shape(lambda rows: _read(rows, 0), rows) for rows in inputs.rows]
        self.x: list[Tree] = []
        self.tokens: list[Tree] = []
        for c, component in enumerate(components):
            self.x.append(jax.eval_shape(component.first, self.outer[c], data[c], self._media_shape(c)))
            out = jax.eval_shape(component.last, self.outer[c], self.x[c], data[c])
            if c == self.language:
                self.sums = out[1]
            else:
                self.tokens.append(out)
        self.gradients = [
            LayerGradient(component.layer, jax.eval_shape(lambda of: _read(of, 0), layers), x, row)
            for component, layers, x, row in zip(components, self.layers, self.x, data, strict=True)
        ]
        self.splits = [
            gradient.split() if self.has(Pool.PENDING, c) else None for c, gradient in enumerate(self.gradients)
        ]

    def has(self, pool: Pool, c: int) -> bool:
        return self.spec.slots.get((pool, c), 0) > 0

    def goes_back(self, c: int) -> bool:
        """Whether tables of this spec can hold backward operations of a component."""
        arrives = self.chains[c].depth == 1 or self.chains[c].head_only or self.has(Pool.GRADIENT, c)
        if c < self.language:
            return arrives and self.has(Pool.TOKEN_GRADIENT, c)
        own = jax.tree.leaves((self.layers[c].trained, self.outer[c].trained))
        return arrives and (bool(own) or any(self.has(Pool.TOKEN_GRADIENT, e) for e in range(c)))

    def _media_shape(self, c: int) -> Tree:
        if c < self.language:
            return ()
        return tuple(
            jax.tree.map(lambda leaf, fan=fan: jax.ShapeDtypeStruct((fan, *leaf.shape), leaf.dtype), tokens)
            for fan, tokens in zip(self.spec.fan, self.tokens, strict=True)
        )

    # ------------------------------------------------------------------------ buffers

    def start(self) -> _State:
        """Empty slots and zero sums."""
        used = [place for place, slots in self.spec.slots.items() if slots]
        used += [(Pool.TOKENS, c) for c in range(self.language)]
        used += [(Pool.INPUT, c) for c, chain in enumerate(self.chains) if chain.depth > 1]
        pools = {(pool, c): self._pool(pool, c, self.spec.slots.get((pool, c), 0)) for pool, c in used}
        layers = tuple(jax.tree.map(_zeros, params.trained) for params in self.layers)
        outer = tuple(jax.tree.map(_zeros, params.trained) for params in self.outer)
        return _State(pools, layers, outer, jnp.zeros((), jnp.float32), jax.tree.map(_zeros, self.sums))

    def _pool(self, pool: Pool, c: int, slots: int) -> Tree:
        component, layers = self.components[c], self.per_chunk[c]
        spec = None
        if pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT):
            shape, spec = self.tokens[c], component.tokens
        elif pool in (Pool.INPUT, Pool.GRADIENT):
            shape, spec = self.x[c], component.activation
        elif pool == Pool.RESIDUAL:
            shape = (_stacked(self.gradients[c].residuals, layers), self.x[c])
        else:
            shape = _stacked(self.splits[c].pending, layers)
        return jax.tree.map(lambda leaf: _lie(jnp.zeros((slots + 1, *leaf.shape), leaf.dtype), spec), shape)

    def _place(self, pool: Pool, c: int, slot: Array) -> Array:
        """A slot, or where there is none the one that the table does not know."""
        return jnp.where(slot >= 0, slot, self.spec.slots.get((pool, c), 0))

    # ------------------------------------------------------------------------ branches

    def branches(self) -> list[Branch]:
        """In the order of the table's actions."""
        return [self._branch(c, kind) for c in range(len(self.components)) for kind in Kind]

    def _branch(self, c: int, kind: Kind) -> Branch:
        if kind == Kind.FORWARD:
            return lambda state, row: self._forward(c, state, row)
        if kind == Kind.BACKWARD and self.goes_back(c):
            return lambda state, row: self._backward(c, state, row, split=False)
        if kind == Kind.INPUT_GRADIENT and self.goes_back(c) and self.has(Pool.PENDING, c):
            return lambda state, row: self._backward(c, state, row, split=True)
        if kind == Kind.WEIGHT_GRADIENT and self.has(Pool.PENDING, c):
            return lambda state, row: self._weight_gradient(c, state, row)
        return _idle

    def _forward(self, c: int, state: _State, row: Row) -> _State:
        data, pools = _read(self.rows[c], row["microbatch"]), dict(state.pools)
        x = self._input(c, state, row, data)
        if self.has(Pool.RESIDUAL, c):

            def keep(pool: Tree) -> tuple[Tree, Tree]:
                stack, y = self._keep(c, row, data, x)
                return y, _write(pool, row["keep"], (stack, y))

            plain = lambda pool: (self._up(c, row, data, x), pool)  # noqa: E731
            y, pools[Pool.RESIDUAL, c] = lax.cond(row["keep"] >= 0, keep, plain, pools[Pool.RESIDUAL, c])
        else:
            y = self._up(c, row, data, x)
        if self.chains[c].head_only and self.has(Pool.INPUT, c):
            pools[Pool.INPUT, c] = _write(pools[Pool.INPUT, c], self._place(Pool.INPUT, c, row["features"]), y)
        if c == self.language:
            count = lambda loss, sums: self._tally(c, row, loss, sums, *self.components[c].last(self.outer[c], y, data))  # noqa: E731
            loss, sums = self._if_last(c, row, count, lambda *totals: totals, state.loss, state.sums)
            state = state._replace(loss=loss, sums=sums)
        else:
            tokens = lambda pool: _write(  # noqa: E731
                pool, self._place(Pool.TOKENS, c, row["output"]), self.components[c].last(self.outer[c], y, data)
            )
            pools[Pool.TOKENS, c] = self._if_last(c, row, tokens, lambda pool: pool, pools[Pool.TOKENS, c])
        if self.chains[c].depth > 1:
            # The last chunk's output lands in the slot that nobody reads.
            slot = jnp.where(row["last"] > 0, -1, row["output"])
            pools[Pool.INPUT, c] = _write(pools[Pool.INPUT, c], self._place(Pool.INPUT, c, slot), y)
        return state._replace(pools=pools)

    def _backward(self, c: int, state: _State, row: Row, split: bool) -> _State:
        data = _read(self.rows[c], row["microbatch"])
        if self.chains[c].head_only:
            return self._back_through_last(c, state, row, data, self._features(c, state, row, data))[1]

        def again() -> tuple[Tree, Tree]:
            return self._keep(c, row, data, self._input(c, state, row, data))

        if self.has(Pool.RESIDUAL, c):
            kept = lambda: _read(state.pools[Pool.RESIDUAL, c], row["kept"])  # noqa: E731
            stack, y = lax.cond(row["kept"] >= 0, kept, again)
        else:
            stack, y = again()
        dy, state = self._if_last(
            c,
            row,
            lambda state: self._back_through_last(c, state, row, data, y),
            lambda state: (_read(state.pools[Pool.GRADIENT, c], row["gradient"]), state),
            state,
        )
        dx, state = self._down(c, state, row, data, stack, dy, split)
        if self.chains[c].depth > 1:
            slot = self._place(Pool.GRADIENT, c, row["output"])
            pool = _write(state.pools[Pool.GRADIENT, c], slot, dx)
            state = state._replace(pools=state.pools | {(Pool.GRADIENT, c): pool})
        through = lambda state: self._back_through_first(c, state, row, data, dx)  # noqa: E731
        return through(state) if self.chains[c].depth == 1 else lax.cond(row["first"] > 0, through, _same, state)

    # ------------------------------------------------------------------------ parts of operations

    def _if_last(self, c: int, row: Row, yes: Any, no: Any, *operands: Any) -> Any:
        return yes(*operands) if self.chains[c].depth == 1 else lax.cond(row["last"] > 0, yes, no, *operands)

    def _input(self, c: int, state: _State, row: Row, data: Tree) -> Tree:
        first = lambda: self.components[c].first(self.outer[c], data, self._media(c, state, row))  # noqa: E731
        if self.chains[c].depth == 1:
            return first()
        return lax.cond(row["first"] > 0, first, lambda: _read(state.pools[Pool.INPUT, c], row["input"]))

    def _features(self, c: int, state: _State, row: Row, data: Tree) -> Tree:
        """What the last layer of a chunk yielded, where only what follows it is trained."""
        computed = lambda: self._up(c, row, data, self._input(c, state, row, data))  # noqa: E731
        if not self.has(Pool.INPUT, c):
            return computed()
        kept = lambda: _read(state.pools[Pool.INPUT, c], row["input"])  # noqa: E731
        return kept() if c < self.language else lax.cond(row["tally"] > 0, computed, kept)

    def _media(self, c: int, state: _State, row: Row) -> Tree:
        """Tokens of all consumed sub-microbatches, by encoder."""
        if c < self.language:
            return ()
        found = []
        for encoder, (fan, shape) in enumerate(zip(self.spec.fan, self._media_shape(c), strict=True)):
            if not fan or not self.has(Pool.TOKENS, encoder):
                found.append(jax.tree.map(_zeros_like, shape))
                continue
            slots = jnp.stack([row[f"tokens.{encoder}.{place}"] for place in range(fan)])

            def gather(pool: Array, slots: Array = slots) -> Array:
                there = (slots >= 0).reshape(-1, *(1,) * (pool.ndim - 1))
                return jnp.where(there, pool[jnp.maximum(slots, 0)], 0)

            found.append(jax.tree.map(gather, state.pools[Pool.TOKENS, encoder]))
        return tuple(found)

    def _layer(self, c: int, row: Row, number: Array) -> Array:
        return row["chunk"] * self.per_chunk[c] + number

    def _up(self, c: int, row: Row, data: Tree, x: Tree) -> Tree:
        """Through the layers of a chunk."""

        def step(number: Array, x: Tree) -> Tree:
            return self.components[c].layer(_read(self.layers[c], self._layer(c, row, number)), x, data)

        return lax.fori_loop(0, row["layers"], step, x)

    def _keep(self, c: int, row: Row, data: Tree, x: Tree) -> tuple[Tree, Tree]:
        """The same with the residuals of all layers: residuals, y."""

        def step(number: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            stack, x = carry
            params = _read(self.layers[c], self._layer(c, row, number))
            y, residuals = self.gradients[c].forward(params, x, data)
            return _write(stack, number, residuals), y

        empty = jax.tree.map(_zeros_like, _stacked(self.gradients[c].residuals, self.per_chunk[c]))
        return lax.fori_loop(0, row["layers"], step, (empty, x))

    def _down(
        self, c: int, state: _State, row: Row, data: Tree, stack: Tree, dy: Tree, split: bool
    ) -> tuple[Tree, _State]:
        """Back through the layers of a chunk: dx, and gradients added up or, split, left pending."""
        parted = self.splits[c] if split else None

        def step(number: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            dx, found = carry
            number = row["layers"] - 1 - number
            layer = self._layer(c, row, number)
            params, residuals = _read(self.layers[c], layer), _read(stack, number)
            if parted:
                dx, pending = parted.input_gradient(params, data, residuals, dx)
                return dx, _write(found, number, pending)
            dw, dx = self.gradients[c].backward(params, data, residuals, dx)
            return dx, _add(found, layer, dw)

        if not parted:
            dx, layers = lax.fori_loop(0, row["layers"], step, (dy, state.layers[c]))
            return dx, state._replace(layers=_replaced(state.layers, c, layers))
        empty = jax.tree.map(_zeros_like, _stacked(parted.pending, self.per_chunk[c]))
        dx, pending = lax.fori_loop(0, row["layers"], step, (dy, empty))
        pool = _write(state.pools[Pool.PENDING, c], row["pending"], pending)
        return dx, state._replace(pools=state.pools | {(Pool.PENDING, c): pool})

    def _weight_gradient(self, c: int, state: _State, row: Row) -> _State:
        data = _read(self.rows[c], row["microbatch"])
        stack = _read(state.pools[Pool.PENDING, c], row["pending"])

        def step(number: Array, found: Tree) -> Tree:
            layer = self._layer(c, row, number)
            params = _read(self.layers[c], layer)
            return _add(found, layer, self.splits[c].weight_gradient(params, data, _read(stack, number)))

        layers = lax.fori_loop(0, row["layers"], step, state.layers[c])
        return state._replace(layers=_replaced(state.layers, c, layers))

    def _tally(self, c: int, row: Row, loss: Array, sums: Tree, more: Array, parts: Tree) -> tuple[Array, Tree]:
        counts = row["tally"] > 0
        return jax.tree.map(lambda total, part: total + jnp.where(counts, part, 0), (loss, sums), (more, parts))

    def _back_through_last(self, c: int, state: _State, row: Row, data: Tree, y: Tree) -> tuple[Tree, _State]:
        """dy, and the gradients of what follows the layers added up; loss and sums where no forward counted them."""
        last = lambda outer, y: self.components[c].last(outer, y, data)  # noqa: E731
        if c == self.language:
            vjp, add, (loss, sums) = self._outer_vjp(c, last, y, has_aux=True)
            found = self._tally(c, row, state.loss, state.sums, loss, sums)
            state = state._replace(loss=found[0], sums=found[1])
            dy, weights = vjp(jnp.ones_like(loss))
        else:
            vjp, add, _ = self._outer_vjp(c, last, y, has_aux=False)
            dy, weights = vjp(_read(state.pools[Pool.TOKEN_GRADIENT, c], row["gradient"]))
        return dy, state._replace(outer=_replaced(state.outer, c, add(state.outer[c], weights)))

    def _back_through_first(self, c: int, state: _State, row: Row, data: Tree, dx: Tree) -> _State:
        """Gradients of what precedes the layers, and shares of the gradients of consumed tokens."""
        wanted = [e for e in range(self.language) if c == self.language and self.has(Pool.TOKEN_GRADIENT, e)]
        media = self._media(c, state, row)

        def first(outer: Params, parts: list[Tree]) -> Tree:
            chosen = dict(zip(wanted, parts, strict=True))
            return self.components[c].first(outer, data, tuple(chosen.get(e, of) for e, of in enumerate(media)))

        vjp, add, _ = self._outer_vjp(c, first, [media[e] for e in wanted], has_aux=False)
        shares, weights = vjp(dx)
        pools = dict(state.pools)
        for e, share in zip(wanted, shares, strict=True):
            for place in range(self.spec.fan[e]):
                slot = self._place(Pool.TOKEN_GRADIENT, e, row[f"share.{e}.{place}"])
                fresh = row[f"fresh.{e}.{place}"] > 0
                pool = pools[Pool.TOKEN_GRADIENT, e]
                total = jax.tree.map(
                    lambda old, new: jnp.where(fresh, new, old + new),  # noqa: B023
                    _read(pool, slot),
                    _read(share, place),
                )
                pools[Pool.TOKEN_GRADIENT, e] = _write(pool, slot, total)
        outer = _replaced(state.outer, c, add(state.outer[c], weights))
        return state._replace(pools=pools, outer=outer)

    def _outer_vjp(
        self, c: int, function: Callable[[Params, Tree], Any], argument: Tree, has_aux: bool
    ) -> tuple[Callable[[Tree], tuple[Tree, list[Array]]], Callable[[Tree, list[Array]], Tree], Any]:
        """Differentiate function(outer, argument) by its argument and the parameters that it uses.

        Others would get zeros, and adding zeros to the gradient of a vocabulary costs as much as adding anything.
        Returns the vjp -> (gradient of the argument, of the parameters used), how those are added to gradients of all
        trained ones, and the results.
        """
        trained, frozen = self.outer[c]
        leaves, tree = jax.tree.flatten(trained)
        mask = used_leaves(lambda trained, argument: function(Params(trained, frozen), argument), trained, argument)

        def rebuilt(chosen: list[Array], argument: Tree) -> Any:
            given = iter(chosen)
            merged = [next(given) if use else leaf for leaf, use in zip(leaves, mask, strict=True)]
            return function(Params(jax.tree.unflatten(tree, merged), frozen), argument)

        chosen = [leaf for leaf, use in zip(leaves, mask, strict=True) if use]
        if has_aux:
            value, vjp, sums = jax.vjp(rebuilt, chosen, argument, has_aux=True)
            results: Any = (value, sums)
        else:
            results, vjp = jax.vjp(rebuilt, chosen, argument)

        def add(totals: Tree, weights: list[Array]) -> Tree:
            more = iter(weights)
            found = [
                total + next(more).astype(total.dtype) if use else total
                for total, use in zip(jax.tree.leaves(totals), mask, strict=True)
            ]
            return jax.tree.unflatten(tree, found)

        def by_argument(cotangent: Tree) -> tuple[Tree, list[Array]]:
            weights, of_argument = vjp(cotangent)
            return of_argument, weights

        return by_argument, add, results


# ---------------------------------------------------------------------------- trees with a leading axis


def _same(state: _State) -> _State:
    return state


def _idle(state: _State, row: Row) -> _State:
    return state


def _read(tree: Tree, index: Array | int) -> Tree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _write(tree: Tree, index: Array, value: Tree) -> Tree:
    return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, value)


def _add(tree: Tree, index: Array, value: Tree) -> Tree:
    """Add to one place, in the precision of the sum."""
    return _write(tree, index, jax.tree.map(lambda old, new: old + new.astype(old.dtype), _read(tree, index), value))


def _stacked(shapes: Tree, count: int) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), shapes)


def _zeros(leaf: Any) -> Array:
    """A sum of such leaves: at least in float32."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _zeros_like(leaf: Any) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def _replaced(items: tuple[Tree, ...], number: int, item: Tree) -> tuple[Tree, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _lie(array: Array, spec: PartitionSpec | None) -> Array:
    """A pool of arrays that lie so on the automatic axes."""
    return array if spec is None else lax.with_sharding_constraint(array, PartitionSpec(None, *spec))
