"""The pipeline executor: one compiled program that runs any schedule table.

    every tick, every stage rank        row of the table, an argument
      1  slots -> values                  load
      2  one operation                    values, box -> box, gradients, loss
      3  box -> slots                     store
      4  ring ppermutes                   slot -> slot of the next or previous rank

Loop bounds, slots and microbatch numbers are data, so another schedule or batch compiles nothing. shard_map is manual
over `stage` alone, or over replicas too: other axes stay automatic inside the operations. Traps that shape the code:

* Ranks run different branches, so nothing inside one may communicate over `stage`: edges wait for the operation to
  end, and gradients of parameters that all ranks share are summed after the loop.
* vmap over stages would turn conditions into selects, which run every branch.
* XLA copies what a switch passes through any branch but the first, and slots that a condition reads and a later one
  writes: all of them, in every tick. So slots stay outside of conditions, a box holds what operations yield and work
  on, and operations are conditions whose other side does nothing (openxla/xla#46314).
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

from sharding.pipeline.executor.gradient import LayerGradient, Params, SplitGradient, used_leaves
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


class _Work(NamedTuple):
    """What operations change. The box holds, by pool and component, what they yield for slots and what they work on."""

    box: dict[tuple[Pool, int], Tree]
    media: tuple[Tree, ...]
    layers: tuple[Tree, ...]
    outer: tuple[Tree, ...]
    loss: Array
    sums: Tree


class _State(NamedTuple):
    """What ticks change. Pools have one slot more than the table knows: results that leave the rank wait there."""

    pools: dict[tuple[Pool, int], Tree]
    work: _Work


class _Values(NamedTuple):
    """What the operation of a tick may read of a component: slots of its row, whatever they hold if it is another's."""

    x: Tree
    dy: Tree
    d_tokens: Tree
    media: Tree


Branch = Callable[[_Work, _Values], _Work]


def make_executor(
    spec: TableSpec,
    components: tuple[Component, ...],
    mesh: Mesh,
    axis: str = "stage",
    replicas: tuple[str, ...] = (),
) -> Callable[[TableArrays, Inputs], Outputs]:
    """The function that runs tables of `spec`; jit it once. `mesh` has the axis `axis` of as many places as stages.

    replicas: axes that split axis 1 of all rows, after that of the microbatches. Components then see one replica's
    part of a row, and gradients are summed over replicas once, after the loop; over an automatic axis that is done in
    every operation.

    Residuals can be kept where `spec.slots` has RESIDUAL slots, and split backwards run where it has PENDING slots;
    without them the program holds no code for either. Raises `PipelineError` when mesh, spec and components differ.
    """
    if mesh.shape.get(axis) != spec.ring.stages:
        raise PipelineError(f"a pipeline of {spec.ring.stages} stages on a mesh of {dict(mesh.shape)}")
    if len(components) != len(spec.ring.chains):
        raise PipelineError(f"{len(components)} components for a ring of {len(spec.ring.chains)}")

    staged: Any = PartitionSpec(axis)
    ranks: Any = PartitionSpec(None, axis)
    whole: Any = PartitionSpec()
    rows: Any = PartitionSpec(None, replicas) if replicas else whole
    return jax.shard_map(
        lambda table, inputs: _run(spec, components, axis, replicas, table, inputs),
        mesh=mesh,
        in_specs=(TableArrays(ranks, whole, whole), Inputs(staged, whole, rows)),
        out_specs=Outputs(whole, whole, staged, whole),
        axis_names={axis, *replicas},
        check_vma=False,
    )


def _run(
    spec: TableSpec,
    components: tuple[Component, ...],
    axis: str,
    replicas: tuple[str, ...],
    table: TableArrays,
    inputs: Inputs,
) -> Outputs:
    """The program of one stage rank."""
    program = _Program(spec, components, inputs)

    def tick(number: Array, state: _State) -> _State:
        row = dict(zip(spec.columns, table.rows[number, 0], strict=True))
        pools, work = program.load(state, row)
        work = program.operate(pools, work, row)
        pools = program.store(pools, work, row)
        return _State(_exchange(spec, axis, pools, row, table.moves[number]), work)

    work = lax.fori_loop(0, table.ticks, tick, program.start()).work
    layers = tuple(
        jax.tree.map(lambda total, leaf: total.reshape(leaf.shape), found, params.trained)
        for found, params in zip(work.layers, inputs.layers, strict=True)
    )
    loss, sums, outer = lax.psum((work.loss, work.sums, work.outer), (axis, *replicas))
    return Outputs(loss, sums, lax.psum(layers, replicas) if replicas else layers, outer)


def _exchange(
    spec: TableSpec, axis: str, pools: dict[tuple[Pool, int], Tree], row: Row, moves: Array
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

        def move(value: Tree, ring: list[tuple[int, int]] = ring) -> Tree:
            return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, ring), value)

        value = _read(pools[place], jnp.where(send >= 0, send, slots))
        value = lax.cond(moves[number] > 0, move, _same, value)
        pools = pools | {place: _write(pools[place], jnp.where(receive >= 0, receive, slots), value)}
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
        self._splits: dict[int, SplitGradient] = {}

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
        """Empty slots and boxes, zero sums."""
        pools = {place: self._pool(*place) for place in self._pools()}
        box: dict[tuple[Pool, int], Tree] = {
            (pool, c): jax.tree.map(_zeros_like, self._shape(pool, c))
            for pool, c in pools
            if pool not in (Pool.RESIDUAL, Pool.TOKEN_GRADIENT)
        }
        for c in range(len(self.components)):
            if self.goes_back(c) and not self.chains[c].head_only:
                box[Pool.RESIDUAL, c] = jax.tree.map(_zeros_like, self._shape(Pool.RESIDUAL, c))
        for e in range(self.language):
            if self.has(Pool.TOKEN_GRADIENT, e):
                box[Pool.TOKEN_GRADIENT, e] = jax.tree.map(_zeros_like, self._media_shape(self.language)[e])
        media = jax.tree.map(_zeros_like, self._media_shape(self.language))
        layers = tuple(jax.tree.map(_zeros, params.trained) for params in self.layers)
        outer = tuple(jax.tree.map(_zeros, params.trained) for params in self.outer)
        sums = jax.tree.map(_zeros, self.sums)
        return _State(pools, _Work(box, media, layers, outer, jnp.zeros((), jnp.float32), sums))

    def _pools(self) -> list[tuple[Pool, int]]:
        """Those of the spec, and those that operations write whatever the table."""
        found = [place for place, slots in self.spec.slots.items() if slots]
        found += [(Pool.TOKENS, c) for c in range(self.language)]
        for c, chain in enumerate(self.chains):
            found += [(Pool.INPUT, c)] if chain.depth > 1 else []
            found += [(Pool.GRADIENT, c)] if chain.depth > 1 and self.goes_back(c) else []
        return list(dict.fromkeys(found))

    def _pool(self, pool: Pool, c: int) -> Tree:
        slots = self.spec.slots.get((pool, c), 0)
        spec = None
        if pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT):
            spec = self.components[c].tokens
        elif pool in (Pool.INPUT, Pool.GRADIENT):
            spec = self.components[c].activation
        return jax.tree.map(
            lambda leaf: _lie(jnp.zeros((slots + 1, *leaf.shape), leaf.dtype), spec), self._shape(pool, c)
        )

    def _shape(self, pool: Pool, c: int) -> Tree:
        """Shapes of what one slot of a pool holds."""
        if pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT):
            return self.tokens[c]
        if pool in (Pool.INPUT, Pool.GRADIENT):
            return self.x[c]
        if pool == Pool.RESIDUAL:
            return _stacked(self.gradients[c].residuals, self.per_chunk[c]), self.x[c]
        return _stacked(self.split(c).pending, self.per_chunk[c])

    def _place(self, pool: Pool, c: int, slot: Array, meant: Array | bool = True) -> Array:
        """A slot, or where there is none the one that the table does not know."""
        return jnp.where((slot >= 0) & meant, slot, self.spec.slots.get((pool, c), 0))

    def _doing(self, row: Row, c: int, *kinds: Kind) -> Array:
        """Whether the operation of a row is one of these."""
        found = jnp.zeros((), bool)
        for kind in kinds:
            found |= row["action"] == 1 + len(Kind) * c + kind
        return found

    def load(self, state: _State, row: Row) -> tuple[dict[tuple[Pool, int], Tree], _Work]:
        """Stacks of residuals are copied into the box, by loops of one turn or none."""
        pools, box = dict(state.pools), dict(state.work.box)
        for c in range(len(self.components)):
            back = self._doing(row, c, Kind.BACKWARD, Kind.INPUT_GRADIENT)
            weight = self._doing(row, c, Kind.WEIGHT_GRADIENT)
            for pool, slot, meant in ((Pool.RESIDUAL, "kept", back), (Pool.PENDING, "pending", weight)):
                if self.has(pool, c):
                    there = meant & (row[slot] >= 0)
                    box[pool, c], pools[pool, c] = _once(there, _load, (box[pool, c], pools[pool, c]), row[slot])
        media = list(state.work.media)
        uses = row["first"] > 0
        for e in range(self.language):
            if self.spec.fan[e] and self.has(Pool.TOKENS, e):
                slots = jnp.stack([row[f"tokens.{e}.{number}"] for number in range(self.spec.fan[e])])
                consumes = self._doing(row, self.language, *Kind) & uses
                place = (Pool.TOKENS, e)
                media[e], pools[place] = _once(consumes, _collect, (media[e], pools[place]), slots)
        return pools, state.work._replace(box=box, media=tuple(media))

    def store(self, pools: dict[tuple[Pool, int], Tree], work: _Work, row: Row) -> dict[tuple[Pool, int], Tree]:
        """Put what the operation yielded into its slots."""
        pools, box = dict(pools), work.box
        last, first = row["last"] > 0, row["first"] > 0
        for c in range(len(self.components)):
            forward = self._doing(row, c, Kind.FORWARD)
            back = self._doing(row, c, Kind.BACKWARD, Kind.INPUT_GRADIENT)
            targets = [
                (Pool.INPUT, jnp.where(last, row["features"], row["output"]), forward),
                (Pool.TOKENS, row["output"], forward & last),
                (Pool.GRADIENT, row["output"], back & ~first),
            ]
            for pool, slot, meant in targets:
                if (pool, c) in pools:
                    pools[pool, c] = _write(pools[pool, c], self._place(pool, c, slot, meant), box[pool, c])
            split = self._doing(row, c, Kind.INPUT_GRADIENT)
            for pool, column, meant in ((Pool.RESIDUAL, "keep", forward), (Pool.PENDING, "pending", split)):
                if self.has(pool, c):
                    there = meant & (row[column] >= 0)
                    pools[pool, c], _ = _once(there, _store, (pools[pool, c], box[pool, c]), row[column])
        shared = self._doing(row, self.language, Kind.BACKWARD, Kind.INPUT_GRADIENT) & first
        for e in range(self.language):
            if self.has(Pool.TOKEN_GRADIENT, e):
                place = (Pool.TOKEN_GRADIENT, e)
                for number in range(self.spec.fan[e]):
                    slot = self._place(*place, row[f"share.{e}.{number}"], shared)
                    old, new = _read(pools[place], slot), _read(box[place], number)
                    fresh = row[f"fresh.{e}.{number}"] > 0
                    total = jax.tree.map(lambda old, new, fresh=fresh: jnp.where(fresh, new, old + new), old, new)
                    pools[place] = _write(pools[place], slot, total)
        return pools

    # ------------------------------------------------------------------------ operations

    def operate(self, pools: dict[tuple[Pool, int], Tree], work: _Work, row: Row) -> _Work:
        """Do the operation of a row: a switch as conditions that have nothing on their other side."""
        for c in range(len(self.components)):
            branches = [(kind, branch) for kind in Kind if (branch := self._branch(c, kind, row))]
            values = self._values(pools, work, c, row)

            def component(work: _Work, c: int = c, branches: Any = branches, values: _Values = values) -> _Work:
                for kind, branch in branches:
                    chosen = self._doing(row, c, kind)
                    work = lax.cond(chosen, lambda work, branch=branch: branch(work, values), _same, work)
                return work

            work = lax.cond(self._doing(row, c, *Kind), component, _same, work)
        return work

    def _branch(self, c: int, kind: Kind, row: Row) -> Branch | None:
        split = self.has(Pool.PENDING, c)
        if kind == Kind.FORWARD:
            return lambda work, values: self._forward(c, work, row, values)
        if kind == Kind.BACKWARD and self.goes_back(c):
            return lambda work, values: self._backward(c, work, row, values, split=False)
        if kind == Kind.INPUT_GRADIENT and self.goes_back(c) and split:
            return lambda work, values: self._backward(c, work, row, values, split=True)
        if kind == Kind.WEIGHT_GRADIENT and split:
            return lambda work, values: self._weight_gradient(c, work, row)
        return None

    def _values(self, pools: dict[tuple[Pool, int], Tree], work: _Work, c: int, row: Row) -> _Values:
        def slot(pool: Pool, column: str) -> Tree:
            return _read(pools[pool, c], jnp.maximum(row[column], 0)) if (pool, c) in pools else None

        media = tuple(work.media) if c == self.language else ()
        return _Values(
            slot(Pool.INPUT, "input"), slot(Pool.GRADIENT, "gradient"), slot(Pool.TOKEN_GRADIENT, "gradient"), media
        )

    def _forward(self, c: int, work: _Work, row: Row, values: _Values) -> _Work:
        data, box = _read(self.rows[c], row["microbatch"]), dict(work.box)
        y, place = self._input(c, row, data, values), (Pool.RESIDUAL, c)
        if self.has(*place) and not self.chains[c].head_only:
            # Two loops, one of them of no turns: a condition would copy the residuals.
            keeps = row["keep"] >= 0
            stack, y = self._keep(c, row, data, y, box[place][0], keeps)
            y = self._up(c, row, data, y, ~keeps)
            box[place] = (stack, y)
        else:
            y = self._up(c, row, data, y)
        if (Pool.INPUT, c) in box:
            box[Pool.INPUT, c] = y
        last = self.components[c].last
        if c == self.language:

            def count(totals: tuple[Array, Tree]) -> tuple[Array, Tree]:
                return _tally(row, totals, last(self.outer[c], y, data))

            loss, sums = self._if_last(c, row, count, _same, (work.loss, work.sums))
            return work._replace(box=box, loss=loss, sums=sums)
        box[Pool.TOKENS, c] = self._if_last(c, row, lambda _: last(self.outer[c], y, data), _same, box[Pool.TOKENS, c])
        return work._replace(box=box)

    def _backward(self, c: int, work: _Work, row: Row, values: _Values, split: bool) -> _Work:
        data = _read(self.rows[c], row["microbatch"])
        if self.chains[c].head_only:
            y = self._features(c, row, data, values)
            return self._back_through_last(c, row, data, y, values, (values.dy, work))[1]
        place = (Pool.RESIDUAL, c)
        stack, y = work.box[place]
        again = row["kept"] < 0
        stack, computed = self._keep(c, row, data, self._input(c, row, data, values), stack, again)
        y = jax.tree.map(lambda new, old: jnp.where(again, new, old), computed, y) if self.has(*place) else computed
        work = work._replace(box=work.box | {place: (stack, y)})
        # At the last chunk dy is not read, but it has the right shape.
        dy = y if values.dy is None else values.dy
        dy, work = self._if_last(
            c, row, lambda carry: self._back_through_last(c, row, data, y, values, carry), _same, (dy, work)
        )
        dx, work = self._down(c, work, row, data, stack, dy, split)
        if (Pool.GRADIENT, c) in work.box:
            work = work._replace(box=work.box | {(Pool.GRADIENT, c): dx})

        def through(work: _Work) -> _Work:
            return self._back_through_first(c, work, data, dx, values)

        return through(work) if self.chains[c].depth == 1 else lax.cond(row["first"] > 0, through, _same, work)

    def _weight_gradient(self, c: int, work: _Work, row: Row) -> _Work:
        data = _read(self.rows[c], row["microbatch"])

        place = (Pool.PENDING, c)
        stack = work.box[place]

        def step(number: Array, found: Tree) -> Tree:
            layer = self._layer(c, row, number)
            params = _read(self.layers[c], layer)
            return _add(found, layer, self.split(c).weight_gradient(params, data, _read(stack, number)))

        layers = lax.fori_loop(0, row["layers"], step, work.layers[c])
        # XLA would copy a stack that is only read here in the branches that write it, so write something, afterwards.
        mark = sum(leaf.ravel()[0] for leaf in jax.tree.leaves(layers))
        stack = jax.tree.map(lambda leaf: _marked(leaf, mark), stack)
        return work._replace(box=work.box | {place: stack}, layers=_replaced(work.layers, c, layers))

    # ------------------------------------------------------------------------ parts of operations

    def split(self, c: int) -> SplitGradient:
        """The two halves of the backward pass of a component's layer."""
        if c not in self._splits:
            self._splits[c] = self.gradients[c].split()
        return self._splits[c]

    def _if_last(self, c: int, row: Row, yes: Any, no: Any, operand: Any) -> Any:
        return yes(operand) if self.chains[c].depth == 1 else lax.cond(row["last"] > 0, yes, no, operand)

    def _input(self, c: int, row: Row, data: Tree, values: _Values) -> Tree:
        def first(x: Tree) -> Tree:
            return self.components[c].first(self.outer[c], data, values.media)

        return first(None) if self.chains[c].depth == 1 else lax.cond(row["first"] > 0, first, _same, values.x)

    def _features(self, c: int, row: Row, data: Tree, values: _Values) -> Tree:
        """What the last layer of a chunk yielded, where only what follows it is trained."""

        def computed(x: Tree) -> Tree:
            return self._up(c, row, data, self._input(c, row, data, values))

        if values.x is None:
            return computed(None)
        # A language backward that counts the loss stands for its forward as well.
        return values.x if c < self.language else lax.cond(row["tally"] > 0, computed, _same, values.x)

    def _layer(self, c: int, row: Row, number: Array) -> Array:
        return row["chunk"] * self.per_chunk[c] + number

    def _up(self, c: int, row: Row, data: Tree, x: Tree, wanted: Array | bool = True) -> Tree:
        """Through the layers of a chunk, if wanted."""

        def step(number: Array, x: Tree) -> Tree:
            return self.components[c].layer(_read(self.layers[c], self._layer(c, row, number)), x, data)

        return lax.fori_loop(0, jnp.where(wanted, row["layers"], 0), step, x)

    def _keep(self, c: int, row: Row, data: Tree, x: Tree, stack: Tree, wanted: Array | bool) -> tuple[Tree, Tree]:
        """The same with the residuals of all layers: those, and y."""

        def step(number: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            stack, x = carry
            params = _read(self.layers[c], self._layer(c, row, number))
            y, residuals = self.gradients[c].forward(params, x, data)
            return _write(stack, number, residuals), y

        return lax.fori_loop(0, jnp.where(wanted, row["layers"], 0), step, (stack, x))

    def _down(
        self, c: int, work: _Work, row: Row, data: Tree, stack: Tree, dy: Tree, split: bool
    ) -> tuple[Tree, _Work]:
        """Back through the layers of a chunk: dx, and gradients added up or, split, left pending."""
        parted = self.split(c) if split else None

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

        place = (Pool.PENDING, c)
        start = work.box[place] if split else work.layers[c]
        dx, found = lax.fori_loop(0, row["layers"], step, (dy, start))
        if split:
            return dx, work._replace(box=work.box | {place: found})
        return dx, work._replace(layers=_replaced(work.layers, c, found))

    def _back_through_last(
        self, c: int, row: Row, data: Tree, y: Tree, values: _Values, carry: tuple[Tree, _Work]
    ) -> tuple[Tree, _Work]:
        """dy, and the gradients of what follows the layers added up; loss and sums where no forward counted them."""
        work = carry[1]

        def last(outer: Params, y: Tree) -> Any:
            return self.components[c].last(outer, y, data)

        if c == self.language:
            vjp, add, results = self._outer_vjp(c, last, y, has_aux=True)
            loss, sums = _tally(row, (work.loss, work.sums), results)
            work = work._replace(loss=loss, sums=sums)
            dy, weights = vjp(jnp.ones_like(results[0]))
        else:
            vjp, add, _ = self._outer_vjp(c, last, y, has_aux=False)
            dy, weights = vjp(values.d_tokens)
        return dy, work._replace(outer=_replaced(work.outer, c, add(work.outer[c], weights)))

    def _back_through_first(self, c: int, work: _Work, data: Tree, dx: Tree, values: _Values) -> _Work:
        """Gradients of what precedes the layers, and shares of the gradients of consumed tokens."""
        wanted = [e for e in range(self.language) if c == self.language and self.has(Pool.TOKEN_GRADIENT, e)]

        def first(outer: Params, parts: list[Tree]) -> Tree:
            chosen = dict(zip(wanted, parts, strict=True))
            return self.components[c].first(outer, data, tuple(chosen.get(e, of) for e, of in enumerate(values.media)))

        vjp, add, _ = self._outer_vjp(c, first, [values.media[e] for e in wanted], has_aux=False)
        shares, weights = vjp(dx)
        box = work.box | {(Pool.TOKEN_GRADIENT, e): share for e, share in zip(wanted, shares, strict=True)}
        return work._replace(box=box, outer=_replaced(work.outer, c, add(work.outer[c], weights)))

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


def _same(operand: Tree) -> Tree:
    return operand


def _once(there: Array, step: Callable[[Tree, Array], Tree], carry: Tree, slot: Array) -> Tree:
    """One step or none, as a loop: a condition would copy what it passes through."""
    return lax.fori_loop(0, there.astype(jnp.int32), lambda _, carry: step(carry, slot), carry)


def _load(carry: tuple[Tree, Tree], slot: Array) -> tuple[Tree, Tree]:
    return _read(carry[1], slot), carry[1]


def _collect(carry: tuple[Tree, Tree], slots: Array) -> tuple[Tree, Tree]:
    """Several slots side by side, zeros for those that are not there."""
    found, pool = carry
    for number in range(slots.shape[0]):
        part = _read(pool, jnp.maximum(slots[number], 0))
        part = jax.tree.map(lambda leaf, number=number: jnp.where(slots[number] >= 0, leaf, 0), part)
        found = _write(found, number, part)
    # Without a write here XLA sees no order between these reads and later writes, and copies the pool in every tick
    # instead of only here.
    return found, _write(pool, jax.tree.leaves(pool)[0].shape[0] - 1, part)


def _store(carry: tuple[Tree, Tree], slot: Array) -> tuple[Tree, Tree]:
    return _write(carry[0], slot, carry[1]), carry[1]


def _tally(row: Row, totals: tuple[Array, Tree], more: tuple[Array, Tree]) -> tuple[Array, Tree]:
    """Loss and sums, if this operation is the one that counts."""
    return jax.tree.map(lambda total, part: total + jnp.where(row["tally"] > 0, part, 0), totals, more)


def _read(tree: Tree, index: Array | int) -> Tree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _write(tree: Tree, index: Array | int, value: Tree) -> Tree:
    return jax.tree.map(lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), tree, value)


def _add(tree: Tree, index: Array, value: Tree) -> Tree:
    """Add to one place, in the precision of the sum."""
    return _write(tree, index, jax.tree.map(lambda old, new: old + new.astype(old.dtype), _read(tree, index), value))


def _marked(leaf: Array, mark: Array) -> Array:
    """With another first element."""
    return lax.dynamic_update_slice(leaf, mark.astype(leaf.dtype).reshape((1,) * leaf.ndim), (0,) * leaf.ndim)


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
