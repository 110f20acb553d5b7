"""The pipeline executor: one compiled program that runs any schedule table.

    in every tick, on every stage rank  row of the table, an argument
      1  slots -> scratch                 load         buffers.py
      2  one operation                    scratch -> scratch, sums   program.py
      3  scratch -> slots                 store        buffers.py
      4  ring ppermutes                   slot -> slot of the next or previous rank

Loop bounds, slots and microbatch numbers are data, so another schedule or batch compiles nothing.
shard_map is manual over `stage` and `ManualAxes`; other axes stay automatic inside the operations.
Traps that shape the code:

* Ranks run different branches, so no code in a branch may communicate over `stage`: edges wait for
  the operation to end, and gradients of parameters that all ranks share are summed after the loop.
* vmap over stages would turn conditions into selects, which run every branch.
* Conditions and switches copy some of their operands: see buffers.py and program.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from sharding.pipeline.executor.buffers import Buffers, Pools, Row, Shapes, State
from sharding.pipeline.executor.carry import Held
from sharding.pipeline.executor.component import (
    AUTOMATIC,
    Components,
    Inputs,
    ManualAxes,
    Outputs,
    TableArrays,
)
from sharding.pipeline.executor.program import Program
from sharding.pipeline.executor.trees import Tree, corner, read, unchanged, with_corner, write
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.table_spec import TableSpec


def make_executor(
    spec: TableSpec,
    components: Components,
    mesh: Mesh | AbstractMesh,
    axis: str = "stage",
    manual: ManualAxes = AUTOMATIC,
) -> Callable[[TableArrays, Inputs], Outputs]:
    """The function that runs tables of `spec`; jit it once. The mesh axis `axis` must have as many
    devices as there are stages.

    components: by component, and class of its rows.
    manual: axes along which gradients are added once, after the loop; over automatic axes they are
    added in every operation.

    Residuals can be kept where `spec.slots` has RESIDUAL slots, and split backwards can run where
    it has PENDING slots; without such slots the program has no code for them. Raises
    `PipelineError` when mesh, spec and components do not fit together.
    """
    if mesh.shape.get(axis) != spec.ring.stages:
        raise PipelineError(
            f"a pipeline of {spec.ring.stages} stages on a mesh of {dict(mesh.shape)}",
        )
    if len(components) != len(spec.ring.chains):
        raise PipelineError(f"{len(components)} components for a ring of {len(spec.ring.chains)}")

    table_rows: Any = PartitionSpec(None, axis)
    replicated: Any = PartitionSpec()
    return jax.shard_map(
        lambda table, inputs: _run(spec, components, axis, manual, table, inputs),
        mesh=mesh,
        in_specs=(
            TableArrays(table_rows, replicated, replicated),
            manual.input_specs(axis),
        ),
        out_specs=manual.output_specs(axis),
        axis_names={axis, *manual.names},
        check_vma=False,
    )


def held_bytes(
    spec: TableSpec,
    components: Components,
    mesh: Mesh | AbstractMesh,
    inputs: Inputs,
    axis: str = "stage",
    manual: ManualAxes = AUTOMATIC,
) -> Held:
    """The bytes that a device holds from tick to tick while `make_executor`'s program runs a table,
    the same for all tables. Not counted: the sums of gradients, one for each trained number.

    Args:
      inputs: arrays or their shapes.
    """
    held: list[Held] = []

    def start(inputs: Inputs) -> State:
        shapes = Shapes(spec, components, inputs)
        state = Buffers(shapes).start()
        held.append(Held.of(shapes, state, mesh))
        return state

    replicated: Any = PartitionSpec()
    mapped = jax.shard_map(
        start,
        mesh=mesh,
        in_specs=(manual.input_specs(axis),),
        out_specs=replicated,
        axis_names={axis, *manual.names},
        check_vma=False,
    )
    jax.eval_shape(mapped, inputs)
    return held[-1]


def _run(
    spec: TableSpec,
    components: Components,
    axis: str,
    manual: ManualAxes,
    table: TableArrays,
    inputs: Inputs,
) -> Outputs:
    """The program of one stage rank."""
    for c, rows in enumerate(inputs.rows):
        if not len(rows) == len(components[c]) == spec.classes(c):
            raise PipelineError(
                f"rows of {len(rows)} classes of {spec.ring.chains[c].name} and functions for "
                f"{len(components[c])}, the tables have {spec.classes(c)}"
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
    specs = manual.output_specs(axis)
    loss, sums = lax.psum((work.loss, work.sums), (axis, *manual.names))
    layers = []
    outer = []
    for c, params in enumerate(inputs.layers):
        gradients = jax.tree.map(
            lambda total, leaf: total.reshape(leaf.shape), work.layers[c], params.trained
        )
        # Layers belong to one stage each; gradients of other parameters are summed over stages.
        layers.append(manual.added(c, gradients, _component_specs(specs.layers, c)))
        outer.append(manual.added(c, work.outer[c], _component_specs(specs.outer, c), axis))
    return Outputs(loss, sums, tuple(layers), tuple(outer))


def _component_specs(specs: Any, c: int) -> Any:
    """The specs of one component's trained leaves, or the one spec of all components."""
    return specs if isinstance(specs, PartitionSpec) else specs[c]


def _move_edges(shapes: Shapes, axis: str, pools: Pools, row: Row, wire_active: Array) -> Pools:
    """Move values along all edges by one hop. All ranks agree on `wire_active`, so a ppermute may
    be left out where nothing is sent, and sends no more than the largest row in its tick."""
    spec = shapes.spec
    stages = spec.ring.stages
    for wire_number, wire in enumerate(spec.wires):
        key = wire.pool_key
        if key not in pools:
            continue
        neighbours = [(rank, (rank + (1 if wire.up else -1)) % stages) for rank in range(stages)]
        unknown_slot = spec.room(
            *key,
        )  # the slot that tables do not know; it holds the operation's result
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
        # At most one condition holds: that of the largest row sent. Smaller rows are in its corner.
        for row_class, shape in enumerate(sizes[wire.chain]):
            travels = wire_active[wire_number] == row_class + 1
            value = lax.cond(travels, partial(move, shape=shape), unchanged, value)
        # All ranks take part in a ppermute. A rank whose row receives nothing puts the value into
        # the unknown slot.
        pools = pools | {
            key: write(pools[key], jnp.where(receive >= 0, receive, unknown_slot), value),
        }
    return pools
