"""The pipeline executor: one compiled program that runs any schedule table.

    every tick, every stage rank        row of the table, an argument
      1  slots -> scratch                 load         buffers.py
      2  one operation                    scratch -> scratch, sums   program.py
      3  scratch -> slots                 store        buffers.py
      4  ring ppermutes                   slot -> slot of the next or previous rank

Loop bounds, slots and microbatch numbers are data, so another schedule or batch compiles nothing.
shard_map is manual over `stage` alone, or over replicas too: other axes stay automatic inside the
operations. Traps that shape the code:

* Ranks run different branches, so nothing inside one may communicate over `stage`: edges wait for
  the operation to end, and gradients of parameters that all ranks share are summed after the loop.
* vmap over stages would turn conditions into selects, which run every branch.
* What conditions and switches copy: see buffers.py and program.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from sharding.pipeline.executor.buffers import Buffers, Pools, Row, Shapes, State
from sharding.pipeline.executor.carry import Held
from sharding.pipeline.executor.component import Component, Inputs, Outputs, TableArrays
from sharding.pipeline.executor.program import Program
from sharding.pipeline.executor.trees import Tree, corner, read, unchanged, with_corner, write
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.table_spec import TableSpec


def make_executor(
    spec: TableSpec,
    components: tuple[Component, ...],
    mesh: Mesh,
    axis: str = "stage",
    replicas: tuple[str, ...] = (),
) -> Callable[[TableArrays, Inputs], Outputs]:
    """The function that runs tables of `spec`; jit it once. `mesh` has the axis `axis` of as many
    places as stages.

    replicas: axes that split axis 1 of all rows, after that of the microbatches. Components then
    see one replica's part of a row, and gradients are summed over replicas once, after the loop;
    over an automatic axis that is done in every operation.

    Residuals can be kept where `spec.slots` has RESIDUAL slots, and split backwards run where it
    has PENDING slots; without them the program holds no code for either. Raises `PipelineError`
    when mesh, spec and components differ.
    """
    if mesh.shape.get(axis) != spec.ring.stages:
        raise PipelineError(
            f"a pipeline of {spec.ring.stages} stages on a mesh of {dict(mesh.shape)}",
        )
    if len(components) != len(spec.ring.chains):
        raise PipelineError(f"{len(components)} components for a ring of {len(spec.ring.chains)}")

    staged: Any = PartitionSpec(axis)
    table_rows: Any = PartitionSpec(None, axis)
    replicated: Any = PartitionSpec()
    return jax.shard_map(
        lambda table, inputs: _run(spec, components, axis, replicas, table, inputs),
        mesh=mesh,
        in_specs=(
            TableArrays(table_rows, replicated, replicated),
            _input_specs(axis, replicas),
        ),
        out_specs=Outputs(loss=replicated, sums=replicated, layers=staged, outer=replicated),
        axis_names={axis, *replicas},
        check_vma=False,
    )


def held_bytes(
    spec: TableSpec,
    components: tuple[Component, ...],
    mesh: Mesh,
    inputs: Inputs,
    axis: str = "stage",
    replicas: tuple[str, ...] = (),
) -> Held:
    """What a device holds from tick to tick while `make_executor`'s program runs a table, whatever
    the table; beside that, sums of gradients, one for each trained number.

    Args:
      inputs: arrays or their shapes.
    """
    found: list[Held] = []

    def start(inputs: Inputs) -> State:
        shapes = Shapes(spec, components, inputs)
        state = Buffers(shapes).start()
        found.append(Held.of(shapes, state, mesh))
        return state

    replicated: Any = PartitionSpec()
    mapped = jax.shard_map(
        start,
        mesh=mesh,
        in_specs=(_input_specs(axis, replicas),),
        out_specs=replicated,
        axis_names={axis, *replicas},
        check_vma=False,
    )
    jax.eval_shape(mapped, inputs)
    return found[-1]


def _input_specs(axis: str, replicas: tuple[str, ...]) -> Inputs:
    """How inputs lie on the manual axes, as prefixes of their trees."""
    staged: Any = PartitionSpec(axis)
    replicated: Any = PartitionSpec()
    data_rows: Any = PartitionSpec(None, replicas) if replicas else replicated
    return Inputs(staged, replicated, data_rows)


def _run(
    spec: TableSpec,
    components: tuple[Component, ...],
    axis: str,
    replicas: tuple[str, ...],
    table: TableArrays,
    inputs: Inputs,
) -> Outputs:
    """The program of one stage rank."""
    for c, rows in enumerate(inputs.rows):
        if len(rows) != spec.classes(c):
            raise PipelineError(
                f"rows of {len(rows)} classes of {spec.ring.chains[c].name}, the tables have {spec.classes(c)}"
            )
    shapes = Shapes(spec, components, inputs)
    buffers = Buffers(shapes)
    program = Program(shapes, inputs.rows)

    def run_tick(tick: Array, state: State) -> State:
        row = dict(zip(spec.columns, table.rows[tick, 0], strict=True))
        pools, work = buffers.load(state, row)
        work = program.operate(pools, work, row)
        pools = buffers.store(pools, work, row)
        return State(_move_edges(shapes, axis, pools, row, table.wire_active[tick]), work)

    work = lax.fori_loop(0, table.ticks, run_tick, buffers.start()).work
    layers = tuple(
        jax.tree.map(lambda total, leaf: total.reshape(leaf.shape), gradients, params.trained)
        for gradients, params in zip(work.layers, inputs.layers, strict=True)
    )
    loss, sums, outer = lax.psum((work.loss, work.sums, work.outer), (axis, *replicas))
    return Outputs(loss, sums, lax.psum(layers, replicas) if replicas else layers, outer)


def _move_edges(shapes: Shapes, axis: str, pools: Pools, row: Row, wire_active: Array) -> Pools:
    """Edges move one place. All ranks agree on `wire_active`, so a ppermute may be left out where
    nothing travels, and sends no more than the largest row that does."""
    spec = shapes.spec
    stages = spec.ring.stages
    for number, wire in enumerate(spec.wires):
        key = wire.pool_key
        if key not in pools:
            continue
        neighbours = [(rank, (rank + (1 if wire.up else -1)) % stages) for rank in range(stages)]
        unknown_slot = spec.room(
            *key,
        )  # the one that the table does not know holds the operation's result
        send = row[f"send.{wire.name}"]
        receive = row[f"receive.{wire.name}"]

        def move(
            value: Tree, neighbours: list[tuple[int, int]] = neighbours, shape: Tree = None
        ) -> Tree:
            sent = corner(value, shape)
            sent = jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, neighbours), sent)
            return with_corner(value, sent)

        value = read(pools[key], jnp.where(send >= 0, send, unknown_slot))
        sizes = shapes.tokens if wire.pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT) else shapes.x
        for row_class, shape in enumerate(sizes[wire.chain]):
            travels = wire_active[number] == row_class + 1
            value = lax.cond(travels, partial(move, shape=shape), unchanged, value)
        pools = pools | {
            key: write(pools[key], jnp.where(receive >= 0, receive, unknown_slot), value),
        }
    return pools
