"""Schedule tables: a schedule as int32 rows, which the executor follows.

In a tick every rank (1) does the operation of its row, which reads slots and then may write some,
(2) sends on each wire the operation's result or a slot, (3) receives from the wires into slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharding.pipeline.graph import Buffer, Graph, Kind, Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import Ints, Schedule
from sharding.pipeline.slots import Life, Moment, TickTimes, allocate, lives_of, tick_of
from sharding.pipeline.table_spec import IDLE, TableSpec, Wire, action_of


@dataclass(frozen=True)
class Table:
    """Rows of all ranks, padded with idle ones to the spec's ticks; the first `count` are run.

    `wire_active[t, w]` says what is sent on wire w in tick t: 0 for nothing, otherwise 1 + the
    class of the largest row that is sent. It is the same for all ranks, unlike `rows`.
    """

    spec: TableSpec
    rows: Ints  # [T, S, columns]
    wire_active: Ints  # [T, wires]
    count: int

    @property
    def used(self) -> tuple[Ints, Ints]:
        """`rows` and `wire_active` of the ticks that are run."""
        return self.rows[: self.count], self.wire_active[: self.count]


def make_table(schedule: Schedule, spec: TableSpec) -> Table:
    """The table of a schedule.

    Raises `PipelineError` when the schedule needs more slots, ticks, row classes, or encoder rows
    of a language microbatch than the spec has, or belongs to another ring.
    """
    graph = schedule.graph
    if graph.ring != spec.ring:
        raise PipelineError("a schedule of another ring than the tables'")
    # Columns for rows read and programs for row classes exist only as far as the spec has them.
    _check_rows_read(graph, spec)
    _check_classes(graph, spec)
    writer = _TableWriter(spec, schedule)
    for life, slot in allocate(lives_of(schedule)):
        # `allocate` hands out as many slots as the schedule needs, whatever the spec has.
        if slot >= spec.room(*life.buffer.pool_key):
            raise PipelineError(_too_many_slots_text(spec, life.buffer))
        writer.write_life(life, slot)
    for tick, row in enumerate(schedule.ticks.tolist()):
        for rank, n in enumerate(row):
            if n >= 0:
                writer.write_operation(tick, rank, n)
    return padded_table(spec, writer.rows, writer.wire_active)


def padded_table(spec: TableSpec, rows: Ints, wire_active: Ints) -> Table:
    """The table of the rows of a schedule's ticks, with idle ticks after them."""
    ticks = len(rows)
    missing = spec.ticks - ticks
    if missing < 0:
        raise PipelineError(
            f"a schedule of {ticks} ticks for tables of {spec.ticks}; raise the ticks of the pipeline",
        )
    idle = _idle_rows(spec, missing)
    still = np.zeros((missing, len(spec.wires)), np.int32)
    return Table(spec, np.concatenate([rows, idle]), np.concatenate([wire_active, still]), ticks)


def with_pauses(spec: TableSpec, rows: Ints, wire_active: Ints, pauses: int) -> tuple[Ints, Ints]:
    """The ticks of a table with a pause after each of the first `pauses`: a tick in which every
    rank waits and the same wires are active. A pause takes what a tick takes beyond its operations,
    and changes no result.

    Args:
      rows: [T, ...] of a table, on any number of ranks.
      wire_active: [T, wires].
    """
    # 4 ticks, 2 pauses: 0 0 1 1 2 3, where the second of two equal numbers is the pause.
    order = np.sort(np.concatenate([np.arange(len(rows)), np.arange(pauses)]), kind="stable")
    paused = np.zeros(len(order), bool)
    paused[1:] = order[1:] == order[:-1]
    rows = rows[order]
    rows[paused] = -1
    rows[paused, ..., spec.columns["action"]] = IDLE
    return rows, wire_active[order]


def _idle_rows(spec: TableSpec, ticks: int) -> Ints:
    rows = np.full((ticks, spec.ring.stages, len(spec.columns)), -1, np.int32)
    rows[..., spec.columns["action"]] = IDLE
    return rows


def _check_rows_read(graph: Graph, spec: TableSpec) -> None:
    for encoder, chain in enumerate(spec.ring.encoders):
        reader = spec.ring.readers[encoder]
        for microbatch, inputs in enumerate(graph.workload.inputs_of(reader)):
            rows = sum(source == encoder for source, _ in inputs)
            if rows > spec.rows_read[encoder]:
                raise PipelineError(
                    f"{spec.ring.chains[reader].name} microbatch {microbatch} consumes {rows} rows of {chain.name}, "
                    f"tables have room for {spec.rows_read[encoder]}; raise the rows that a microbatch of the "
                    "pipeline reads",
                )


def _check_classes(graph: Graph, spec: TableSpec) -> None:
    for chain_number, chain in enumerate(spec.ring.chains):
        highest_class = max(
            (row_class for row_class, _ in graph.workload.chains[chain_number].rows), default=0
        )
        if highest_class >= spec.classes(chain_number):
            raise PipelineError(
                f"a row of {chain.name} of class {highest_class}, the tables have {spec.classes(chain_number)} classes"
            )


def _too_many_slots_text(spec: TableSpec, buffer: Buffer) -> str:
    return (
        f"the schedule needs more than {spec.room(*buffer.pool_key)} {buffer.pool.words} slots of "
        f"{spec.ring.chains[buffer.chain].name} on rank {buffer.rank}; raise the slots of the pipeline, "
        "pipeline.microbatches_in_flight"
    )


class _TableWriter:
    """Fills the rows of a table: `write_life` puts the slots of buffers into the rows of the
    operations that read and write them, `write_operation` puts in the operations themselves."""

    def __init__(self, spec: TableSpec, schedule: Schedule):
        ticks = len(schedule.ticks)
        self.spec = spec
        self.graph = schedule.graph
        self.tick = TickTimes(schedule).tick
        self.rows = _idle_rows(spec, ticks)
        self.wire_active = np.zeros((ticks, len(spec.wires)), np.int32)
        self._wire_number = {wire.pool_key: number for number, wire in enumerate(spec.wires)}

    # ------------------------------------------------------------------------ slots

    def write_life(self, life: Life, slot: int) -> None:
        """Name a slot in every row that receives, reads, writes or sends its buffer."""
        buffer = life.buffer
        tick, arrival = tick_of(life.start)
        if arrival == Moment.RECEIVE:
            wire = self._wire_number[buffer.pool_key]
            self._put_at(tick, buffer.rank, f"receive.{self.spec.wires[wire].name}", slot)
            row_class, _ = self.graph.row_of(buffer.chain, buffer.microbatch)
            active = self.wire_active[tick, wire]
            # The larger a row, the smaller the number of its class
            self.wire_active[tick, wire] = min(active or row_class + 1, row_class + 1)
        last_tick, departure = tick_of(life.end)
        # Only sums of gradients, and values that pass through a rank, are sent from a slot. The
        # result of an operation is sent in the operation's tick, from no slot the table knows.
        if departure == Moment.SEND:
            self._put_at(
                last_tick,
                buffer.rank,
                f"send.{Wire(buffer.pool, buffer.chain, up=True).name}",
                slot,
            )
        self._write_buffer(buffer, slot, stays=arrival == Moment.WRITE)

    def _write_buffer(self, buffer: Buffer, slot: int, stays: bool) -> None:
        """Name a buffer's slot in the rows of the operations that write and read it.

        stays: the operation that makes the value writes it into a slot of its own rank.
        """
        match buffer.pool:
            case Pool.INPUT:
                self._write_input(buffer, slot, stays)
            case Pool.GRADIENT:
                self._put(buffer.readers[0], "gradient", slot)
                if stays:
                    self._put(buffer.writers[0], "output", slot)
            case Pool.RESIDUAL:
                self._put(buffer.writers[0], "write_residual", slot)
                self._put(buffer.readers[0], "read_residual", slot)
            case Pool.PENDING:
                for n in (*buffer.writers, *buffer.readers):
                    self._put(n, "pending", slot)
            case Pool.TOKENS if buffer.readers:  # without readers they only pass through the rank
                if stays:
                    self._put(buffer.writers[0], "output", slot)
                for n in buffer.readers:
                    self._write_tokens(n, buffer, slot)
            case Pool.TOKEN_GRADIENT:
                self._write_token_gradient(buffer, slot, stays)

    def _write_input(self, buffer: Buffer, slot: int, stays: bool) -> None:
        """Name a chunk's input slot for forward and backward. Where only the head is trained, the
        forward writes the features into it, for the backward."""
        chain = self.spec.ring.chains[buffer.chain]
        forward = self.graph.number.get(
            (Kind.FORWARD, buffer.chain, buffer.depth, buffer.microbatch),
        )
        writer = buffer.writers[0]
        for n in buffer.readers:
            self._put(n, "input", slot)
        # `readers` names only the last reader. At depth 0 the buffer holds only features, which the
        # forward writes.
        if forward is not None and buffer.depth:
            self._put(forward, "input", slot)
        if stays and writer != forward:
            self._put(writer, "output", slot)
        read_by_backward = buffer.readers[0] != forward
        at_head = buffer.depth == chain.depth - 1 and chain.head_only
        if forward is not None and read_by_backward and at_head:
            self._put(forward, "features", slot)

    def _write_tokens(self, n: int, buffer: Buffer, slot: int) -> None:
        column = f"tokens.{buffer.chain}.{self._input_index(n, buffer)}"
        self._put(n, column, slot)
        forward = self.graph.number.get(
            (Kind.FORWARD, self.graph.chain[n], 0, self.graph.microbatch[n]),
        )
        if forward is not None:
            self._put(forward, column, slot)

    def _write_token_gradient(self, buffer: Buffer, slot: int, stays: bool) -> None:
        for n in buffer.readers:
            self._put(n, "gradient", slot)
        if not stays:
            return
        # All writers run on one rank, so no two in a tick. The first overwrites the slot.
        earliest = min(buffer.writers, key=lambda n: self.tick[n])
        for n in buffer.writers:
            suffix = f"{buffer.chain}.{self._input_index(n, buffer)}"
            self._put(n, f"grad_slot.{suffix}", slot)
            self._put(n, f"grad_is_first.{suffix}", int(n == earliest))

    def _input_index(self, n: int, buffer: Buffer) -> int:
        """Index of an encoder row among the rows of its encoder that operation n consumes."""
        graph = self.graph
        inputs = graph.workload.inputs_of(graph.chain[n])[graph.microbatch[n]]
        return [sub for encoder, sub in inputs if encoder == buffer.chain].index(buffer.microbatch)

    # ------------------------------------------------------------------------ operations

    def write_operation(self, tick: int, rank: int, n: int) -> None:
        """Write the columns that say which operation a row does."""
        graph = self.graph
        c = graph.chain[n]
        chain = self.spec.ring.chains[c]
        depth = graph.depth[n]
        kind = graph.kind[n]
        is_last = depth == chain.depth - 1
        # Without a forward operation, this one computes the forward pass as well.
        fused = (Kind.FORWARD, c, depth, graph.microbatch[n]) not in graph.number
        has_loss = is_last and self.spec.ring.has_loss(c)
        row_class, row = graph.row_of(c, graph.microbatch[n])
        # A loss counts once. Of the two halves of a backward, the input gradient recomputes the
        # forward pass, and so has the loss.
        computes_loss = kind == Kind.FORWARD or (fused and kind != Kind.WEIGHT_GRADIENT)
        values = {
            "action": action_of(c, kind),
            "chunk": chain.local(depth),
            "layers": chain.layers[depth],
            "first": int(depth == 0),
            "last": int(is_last),
            "microbatch": graph.microbatch[n],
            "row_class": row_class,
            "row": row,
            "count_loss": int(has_loss and computes_loss),
        }
        for column, value in values.items():
            self._put_at(tick, rank, column, value)

    def _put(self, n: int, column: str, value: int) -> None:
        self._put_at(self.tick[n], self.graph.stage[n], column, value)

    def _put_at(self, tick: int, rank: int, column: str, value: int) -> None:
        self.rows[tick, rank, self.spec.columns[column]] = value
