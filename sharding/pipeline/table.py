"""Schedule tables: a schedule as int32 rows that the executor obeys, their validator, and tables as files.

In a tick every rank (1) does the operation of its row, which reads slots and then may write some, (2) sends on each
wire the operation's result or a slot, (3) receives from the wires into slots. A slot is taken from the moment that
something is written to it until the last read; whatever needs one gets the lowest that is free, like a register.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from sharding.pipeline.graph import Buffer, Graph, Kind, PipelineError, Pool, Ring, Slots
from sharding.pipeline.schedules.orders import Clock, Ints, Schedule

FORMAT = 1
IDLE = 0


@dataclass(frozen=True)
class Wire:
    """One kind of edge of the ring: from each rank to the next (up) or to the one before, for one component."""

    pool: Pool
    chain: int
    up: bool

    @property
    def name(self) -> str:
        return f"{self.pool.name.lower()}.{self.chain}"


@dataclass(frozen=True)
class TableSpec:
    """All that tables of one compiled program share. `fan` is the most sub-microbatches of each encoder that one
    language microbatch consumes; `ticks` the most ticks of a table."""

    ring: Ring
    slots: Slots
    ticks: int
    fan: tuple[int, ...]

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """Edges that leave their rank; there is none for what stays where it is."""
        found = []
        for number, chain in enumerate(self.ring.chains):
            if len(set(chain.stages)) > 1:
                found += [Wire(Pool.INPUT, number, True), Wire(Pool.GRADIENT, number, False)]
        for number in range(len(self.ring.encoders)):
            if self.ring.delivery_hops(number):
                found += [Wire(Pool.TOKENS, number, True), Wire(Pool.TOKEN_GRADIENT, number, False)]
        return tuple(found)

    @cached_property
    def columns(self) -> dict[str, int]:
        """Number of each column of a row by name; -1 in a row means none.

        action: 0, or 1 + 4 * component + kind. chunk: number on its rank. layers, first, last: of the chunk.
        input, gradient: slots read. kept: residuals read instead of recomputed; keep: residuals written. output: slot
        of a result that stays on the rank. features: input slot that the last layer's output replaces. tally: whether
        loss and sums count. tokens, share, fresh: for each consumed sub-microbatch its tokens, the sum its gradient
        joins, and whether it is the first to. pending: what a weight gradient needs. receive, send: slots by wire.
        """
        names = [
            "action",
            "chunk",
            "layers",
            "first",
            "last",
            "microbatch",
            "input",
            "gradient",
            "kept",
            "keep",
            "pending",
        ]
        names += ["output", "features", "tally"]
        for kind in ("tokens", "share", "fresh"):
            names += [f"{kind}.{encoder}.{place}" for encoder, fan in enumerate(self.fan) for place in range(fan)]
        for kind in ("receive", "send"):
            names += [f"{kind}.{wire.name}" for wire in self.wires]
        return {name: number for number, name in enumerate(names)}

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits: equal where tables are interchangeable."""
        chains = [[c.name, c.stages, c.layers, c.head_only] for c in self.ring.chains]
        slots = sorted([pool.name, chain, count] for (pool, chain), count in self.slots.items())
        text = json.dumps([FORMAT, self.ring.stages, chains, slots, self.ticks, self.fan])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Table:
    """Rows of all ranks, padded to the spec's ticks with idle ones, of which `count` are run.

    `moves[t, w]` says that something travels on wire w in tick t: alike on all ranks, unlike anything in `rows`.
    """

    spec: TableSpec
    rows: Ints  # [T, S, columns]
    moves: Ints  # [T, wires]
    count: int

    def save(self, path: Path) -> None:
        """Write an npz file."""
        meta = json.dumps({"fingerprint": self.spec.fingerprint, "count": self.count})
        with open(path, "wb") as file:
            np.savez_compressed(file, rows=self.rows[: self.count], moves=self.moves[: self.count], meta=np.array(meta))

    @staticmethod
    def load(path: Path, spec: TableSpec) -> Table:
        """Read a table again. Raises `PipelineError` for a file that is none or comes from another configuration."""
        try:
            with np.load(path, allow_pickle=False) as file:
                rows, moves, meta = file["rows"], file["moves"], json.loads(str(file["meta"]))
                fingerprint, count = str(meta["fingerprint"]), int(meta["count"])
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise PipelineError(f"{path} is not a schedule table: {error}") from error
        if fingerprint != spec.fingerprint:
            raise PipelineError(
                f"{path} is a table of another configuration ({fingerprint}, this one is {spec.fingerprint}): its "
                f"stages, layers, slots, ticks or sub-microbatches differ; plan it anew"
            )
        return _padded(spec, rows.astype(np.int32), moves.astype(np.int32), count)


def _padded(spec: TableSpec, rows: Ints, moves: Ints, count: int) -> Table:
    more = spec.ticks - count
    if more < 0:
        raise PipelineError(f"a schedule of {count} ticks for tables of {spec.ticks}; raise the ticks of the pipeline")
    idle = np.full((more, *rows.shape[1:]), -1, np.int32)
    idle[..., spec.columns["action"]] = IDLE
    still = np.zeros((more, *moves.shape[1:]), np.int32)
    return Table(spec, np.concatenate([rows, idle]), np.concatenate([moves, still]), count)


# ---------------------------------------------------------------------------- slots


@dataclass(frozen=True)
class _Life:
    """Moments between which a buffer needs a slot: 4 * tick, + 0 for an operation's reads, 1 for its writes, 2 for
    sending, 3 for receiving."""

    buffer: Buffer
    start: int
    end: int


class _Times:
    """Ticks of operations and of the sending of token gradients."""

    def __init__(self, schedule: Schedule):
        graph = self.graph = schedule.graph
        self.tick = [-1] * graph.size
        clock = Clock(graph)
        for tick, row in enumerate(schedule.ticks.tolist()):
            for n in row:
                if n >= 0:
                    self.tick[n] = tick
                    clock.finish(n, tick)
        self.sent = clock.sent

    def arrival(self, buffer: Buffer) -> int:
        """When something is written into the slot."""
        ring, graph = self.graph.ring, self.graph
        first = min(self.tick[n] for n in buffer.writers)
        if buffer.pool == Pool.TOKEN_GRADIENT and buffer.hops:
            return 4 * (self.sent[buffer.chain, buffer.microbatch] + buffer.hops - 1) + 3
        if buffer.hops:
            return 4 * (first + buffer.hops - 1) + 3
        writer = buffer.writers[0]
        moved = buffer.pool in (Pool.INPUT, Pool.GRADIENT) and ring.stages > 1 and graph.stage[writer] != buffer.rank
        return 4 * first + (3 if moved else 1)

    def departure(self, buffer: Buffer) -> int:
        """When the slot is read for the last time."""
        if buffer.readers:
            return 4 * max(self.tick[n] for n in buffer.readers)
        return 4 * self.sent[buffer.chain, buffer.microbatch] + 2


def _lives(schedule: Schedule) -> list[_Life]:
    """Of all buffers, with those of kept residuals and those of tokens and gradients that pass through a rank."""
    graph, times = schedule.graph, _Times(schedule)
    found = [_Life(buffer, times.arrival(buffer), times.departure(buffer)) for buffer in graph.buffers]
    for n in sorted(schedule.kept):
        back = graph.backward_of(n)
        if back is None:
            raise PipelineError(f"{graph.name(n)} keeps residuals that no backward needs")
        buffer = Buffer(
            Pool.RESIDUAL, graph.chain[n], graph.depth[n], graph.microbatch[n], graph.stage[n], (n,), (back,)
        )
        found.append(_Life(buffer, times.arrival(buffer), times.departure(buffer)))
    for life in list(found):
        buffer = life.buffer
        step = 1 if buffer.pool == Pool.TOKENS else -1
        for hop in range(1, buffer.hops):
            rank = (buffer.rank - step * hop) % graph.ring.stages
            arrival = life.start - 4 * hop
            passing = Buffer(buffer.pool, buffer.chain, buffer.depth, buffer.microbatch, rank, buffer.writers, ())
            found.append(_Life(passing, arrival, arrival + 3))
    return found


def _allocate(lives: Iterable[_Life]) -> list[tuple[_Life, int]]:
    """Each life with the lowest slot of its pool and rank that is free."""
    free: dict[tuple[Pool, int, int], list[int]] = defaultdict(list)
    taken: dict[tuple[Pool, int, int], list[tuple[int, int]]] = defaultdict(list)
    found = []
    for life in sorted(lives, key=lambda life: (life.start, life.end, life.buffer.microbatch, life.buffer.depth)):
        place = (life.buffer.pool, life.buffer.chain, life.buffer.rank)
        while taken[place] and taken[place][0][0] < life.start:
            heappush(free[place], heappop(taken[place])[1])
        slot = heappop(free[place]) if free[place] else len(taken[place])
        heappush(taken[place], (life.end, slot))
        found.append((life, slot))
    return found


def slots_needed(schedules: Iterable[Schedule]) -> Slots:
    """The slots that tables of all these schedules need."""
    needed: Slots = {}
    for schedule in schedules:
        for life, slot in _allocate(_lives(schedule)):
            place = (life.buffer.pool, life.buffer.chain)
            needed[place] = max(needed.get(place, 0), slot + 1)
    return needed


def keep_residuals(schedule: Schedule, slots: Slots) -> Schedule:
    """The schedule with as many forwards keeping their residuals as there are slots for, shortest wait first.

    Only ticks whose slowest operation is a backward become shorter, so those come first.
    """
    graph, times = schedule.graph, _Times(schedule)
    base = [_span(life) for life in _lives(schedule) if life.buffer.pool == Pool.RESIDUAL]
    busy: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for place, span in base:
        busy[place].append(span)
    wanted = []
    for n in range(graph.size):
        if graph.kind[n] == Kind.FORWARD:
            back = graph.number.get((Kind.BACKWARD, graph.chain[n], graph.depth[n], graph.microbatch[n]))
            back = back or graph.number.get((Kind.INPUT_GRADIENT, graph.chain[n], graph.depth[n], graph.microbatch[n]))
            head_only = graph.ring.chains[graph.chain[n]].head_only
            if back is not None and not head_only:
                length = max(
                    (graph.duration[o] for o in schedule.ticks[times.tick[back]].tolist() if o >= 0), default=0
                )
                wanted.append((length > graph.duration[back], times.tick[back] - times.tick[n], n, back))
    kept = set(schedule.kept)
    for *_, n, back in sorted(wanted):
        place = (graph.chain[n], graph.stage[n])
        span = (4 * times.tick[n] + 1, 4 * times.tick[back])
        if n not in kept and _peak([*busy[place], span]) <= slots.get((Pool.RESIDUAL, graph.chain[n]), 0):
            busy[place].append(span)
            kept.add(n)
    return Schedule(graph, schedule.ticks, frozenset(kept))


def _span(life: _Life) -> tuple[tuple[int, int], tuple[int, int]]:
    return (life.buffer.chain, life.buffer.rank), (life.start, life.end)


def _peak(spans: list[tuple[int, int]]) -> int:
    """Most spans that hold one moment."""
    events = sorted([(start, 1) for start, _ in spans] + [(end + 0.5, -1) for _, end in spans])
    height = peak = 0
    for _, step in events:
        height += step
        peak = max(peak, height)
    return peak


# ---------------------------------------------------------------------------- rows


def make_table(schedule: Schedule, spec: TableSpec) -> Table:
    """A schedule as rows.

    Raises `PipelineError` when it needs more slots, ticks or sub-microbatches of a language microbatch than the spec
    has, or belongs to another ring.
    """
    graph = schedule.graph
    if graph.ring != spec.ring:
        raise PipelineError("a schedule of another ring than the tables'")
    _check_fan(graph, spec)
    rows = np.full((len(schedule.ticks), spec.ring.stages, len(spec.columns)), -1, np.int32)
    rows[..., spec.columns["action"]] = IDLE
    moves = np.zeros((len(schedule.ticks), len(spec.wires)), np.int32)
    writer = _Writer(spec, schedule, rows, moves)
    for life, slot in _allocate(_lives(schedule)):
        if slot >= spec.slots.get((life.buffer.pool, life.buffer.chain), 0):
            raise PipelineError(_too_many(spec, life.buffer))
        writer.slot(life, slot)
    for tick, row in enumerate(schedule.ticks.tolist()):
        for rank, n in enumerate(row):
            if n >= 0:
                writer.operation(tick, rank, n)
    return _padded(spec, rows, moves, len(rows))


def _check_fan(graph: Graph, spec: TableSpec) -> None:
    for microbatch, inputs in enumerate(graph.workload.inputs):
        for encoder, chain in enumerate(spec.ring.encoders):
            count = sum(of == encoder for of, _ in inputs)
            if count > spec.fan[encoder]:
                raise PipelineError(
                    f"language microbatch {microbatch} consumes {count} sub-microbatches of {chain.name}, the tables "
                    f"have room for {spec.fan[encoder]}; raise the fan of the pipeline"
                )


def _too_many(spec: TableSpec, buffer: Buffer) -> str:
    count = spec.slots.get((buffer.pool, buffer.chain), 0)
    return (
        f"the schedule needs more than {count} {buffer.pool.name.lower().replace('_', ' ')} slots of "
        f"{spec.ring.chains[buffer.chain].name} on rank {buffer.rank}; raise the slots of the pipeline"
    )


class _Writer:
    """Fills rows: first the slots of buffers, into the rows of whoever reads and writes them, then the operations."""

    def __init__(self, spec: TableSpec, schedule: Schedule, rows: Ints, moves: Ints):
        self.spec, self.graph, self.kept, self.rows, self.moves = spec, schedule.graph, schedule.kept, rows, moves
        self.tick = _Times(schedule).tick
        self.wires = {(wire.pool, wire.chain): number for number, wire in enumerate(spec.wires)}

    def put(self, n: int, column: str, value: int) -> None:
        self.rows[self.tick[n], self.graph.stage[n], self.spec.columns[column]] = value

    def slot(self, life: _Life, slot: int) -> None:
        buffer = life.buffer
        tick, moment = divmod(life.start, 4)
        if moment == 3:
            wire = self.wires[buffer.pool, buffer.chain]
            name = self.spec.wires[wire].name
            self.rows[tick, buffer.rank, self.spec.columns[f"receive.{name}"]] = slot
            self.moves[tick, wire] = 1
        if life.end % 4 == 2:
            name = f"send.{Wire(buffer.pool, buffer.chain, True).name}"
            self.rows[life.end // 4, buffer.rank, self.spec.columns[name]] = slot
        here = moment == 1
        if buffer.pool == Pool.INPUT:
            for n in buffer.readers:
                self.put(n, "input", slot)
            self._input(buffer, slot, here)
        elif buffer.pool == Pool.GRADIENT:
            self.put(buffer.readers[0], "gradient", slot)
            if here:
                self.put(buffer.writers[0], "output", slot)
        elif buffer.pool == Pool.RESIDUAL:
            self.put(buffer.writers[0], "keep", slot)
            self.put(buffer.readers[0], "kept", slot)
        elif buffer.pool == Pool.PENDING:
            for n in (*buffer.writers, *buffer.readers):
                self.put(n, "pending", slot)
        elif buffer.pool == Pool.TOKENS and buffer.readers:
            if here:
                self.put(buffer.writers[0], "output", slot)
            for n in buffer.readers:
                self._tokens(n, buffer, slot)
        elif buffer.pool == Pool.TOKEN_GRADIENT:
            for n in buffer.readers:
                self.put(n, "gradient", slot)
            if here:
                first = min(buffer.writers, key=lambda n: self.tick[n])
                for n in buffer.writers:
                    self.put(n, f"share.{buffer.chain}.{self._place(n, buffer)}", slot)
                    self.put(n, f"fresh.{buffer.chain}.{self._place(n, buffer)}", int(n == first))

    def _input(self, buffer: Buffer, slot: int, here: bool) -> None:
        """The forward reads it too; where only the head is trained it leaves the features there."""
        chain, depth, microbatch = buffer.chain, buffer.depth, buffer.microbatch
        forward = self.graph.number.get((Kind.FORWARD, chain, depth, microbatch))
        writer = buffer.writers[0]
        if forward is not None and depth:
            self.put(forward, "input", slot)
        if here and writer != forward:
            self.put(writer, "output", slot)
        last = depth == self.spec.ring.chains[chain].depth - 1
        backward = buffer.readers[0] != forward
        if forward is not None and last and backward and self.spec.ring.chains[chain].head_only:
            self.put(forward, "features", slot)

    def _place(self, n: int, buffer: Buffer) -> int:
        """Which of the consumed sub-microbatches of its encoder this one is."""
        inputs = self.graph.workload.inputs[self.graph.microbatch[n]]
        return [sub for encoder, sub in inputs if encoder == buffer.chain].index(buffer.microbatch)

    def _tokens(self, n: int, buffer: Buffer, slot: int) -> None:
        column = f"tokens.{buffer.chain}.{self._place(n, buffer)}"
        self.put(n, column, slot)
        forward = self.graph.number.get((Kind.FORWARD, self.graph.chain[n], 0, self.graph.microbatch[n]))
        if forward is not None:
            self.put(forward, column, slot)

    def operation(self, tick: int, rank: int, n: int) -> None:
        graph, ring = self.graph, self.spec.ring
        chain = ring.chains[graph.chain[n]]
        depth, microbatch, kind = graph.depth[n], graph.microbatch[n], graph.kind[n]
        last = depth == chain.depth - 1
        fused = (Kind.FORWARD, graph.chain[n], depth, microbatch) not in graph.number
        tally = graph.chain[n] == len(ring.chains) - 1 and last and (kind == Kind.FORWARD or fused)
        values = {
            "action": 1 + len(Kind) * graph.chain[n] + kind,
            "chunk": chain.local(depth),
            "layers": chain.layers[depth],
            "first": int(depth == 0),
            "last": int(last),
            "microbatch": microbatch,
            "tally": int(tally and kind != Kind.WEIGHT_GRADIENT),
        }
        for column, value in values.items():
            self.rows[tick, rank, self.spec.columns[column]] = value
