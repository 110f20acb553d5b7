"""Which slot holds what from when to when, like registers, and which residuals are worth one.

A slot is taken from the moment that something is written to it until the last read; whatever needs
a slot gets the lowest that is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from sharding.pipeline.graph import Buffer, Kind, Pool, RankPool, Slots
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.schedules.ticks import TickClock

Longs = NDArray[np.int64]


class Moment(IntEnum):
    """What happens in a tick, in this order."""

    READ = 0
    WRITE = 1
    SEND = 2
    RECEIVE = 3


@dataclass(frozen=True)
class Life:
    """Times between which a buffer needs a slot, both counted in moments since the first tick."""

    buffer: Buffer
    start: int
    end: int


def moment_of(tick: int, moment: Moment) -> int:
    """A moment of a tick, counted from the first tick on."""
    return len(Moment) * tick + moment


def tick_of(time: int) -> tuple[int, Moment]:
    """The tick and the moment in it."""
    tick, moment = divmod(time, len(Moment))
    return tick, Moment(moment)


class TickTimes:
    """`tick[n]` is the tick in which a schedule does operation n, and buffers come and go
    accordingly."""

    def __init__(self, schedule: Schedule):
        self.graph = schedule.graph
        self.tick = [-1] * self.graph.size
        clock = TickClock(self.graph)
        for tick, row in enumerate(schedule.ticks.tolist()):
            for n in row:
                if n >= 0:
                    self.tick[n] = tick
                    clock.finish(n, tick)
        self._sent = clock.sent

    def arrival(self, buffer: Buffer) -> int:
        """When something is written into the slot for the first time."""
        # Sent in tick t over h hops: received in tick t + h - 1, and read from tick t + h on.
        if buffer.pool == Pool.TOKEN_GRADIENT and buffer.hops:
            sent = self._sent[buffer.chain, buffer.microbatch]
            return moment_of(sent + buffer.hops - 1, Moment.RECEIVE)
        written = min(self.tick[n] for n in buffer.writers)
        if buffer.hops:
            return moment_of(written + buffer.hops - 1, Moment.RECEIVE)
        neighbour = (
            self.graph.ring.stages > 1 and self.graph.stage[buffer.writers[0]] != buffer.rank
        )
        moved = buffer.pool in (Pool.INPUT, Pool.GRADIENT) and neighbour
        return moment_of(written, Moment.RECEIVE if moved else Moment.WRITE)

    def departure(self, buffer: Buffer) -> int:
        """When the slot is read for the last time."""
        if buffer.readers:
            return moment_of(max(self.tick[n] for n in buffer.readers), Moment.READ)
        return moment_of(self._sent[buffer.chain, buffer.microbatch], Moment.SEND)


def lives_of(schedule: Schedule) -> list[Life]:
    """Lives of all buffers, with those of kept residuals and those of tokens and gradients that
    pass through a rank."""
    graph = schedule.graph
    times = TickTimes(schedule)
    lives = [
        Life(buffer, times.arrival(buffer), times.departure(buffer)) for buffer in graph.buffers
    ]
    for n in sorted(schedule.keepers):
        backward = graph.backward_of(n)
        if backward is None:
            raise PipelineError(f"{graph.name(n)} keeps residuals that no backward needs")
        buffer = Buffer(
            pool=Pool.RESIDUAL,
            chain=graph.chain[n],
            depth=graph.depth[n],
            microbatch=graph.microbatch[n],
            rank=graph.stage[n],
            writers=(n,),
            readers=(backward,),
        )
        lives.append(Life(buffer, times.arrival(buffer), times.departure(buffer)))
    for life in list(lives):
        # The ranks on the way, from the goal back: tokens go up the ring, their gradients down.
        direction = 1 if life.buffer.pool == Pool.TOKENS else -1
        for hop in range(1, life.buffer.hops):
            # Received in one tick and sent on in the next.
            rank = (life.buffer.rank - direction * hop) % graph.ring.stages
            # RECEIVE of a tick plus `Moment.RECEIVE` moments is SEND of the next: one slot is
            # enough for all that passes, for the next arrival comes right after it.
            arrival = life.start - len(Moment) * hop
            lives.append(
                Life(
                    replace(life.buffer, rank=rank, readers=(), hops=0),
                    arrival,
                    arrival + Moment.RECEIVE,
                ),
            )
    return lives


def allocate(lives: Iterable[Life]) -> list[tuple[Life, int]]:
    """Each life with the lowest slot of its pool and rank that is free."""
    free: dict[RankPool, list[int]] = defaultdict(list)
    occupied: dict[RankPool, list[tuple[int, int]]] = defaultdict(list)  # (end of the life, slot)
    allocated = []
    # By their starts: so a pool gets no more slots than it has lives at any one moment.
    for life in sorted(
        lives,
        key=lambda life: (life.start, life.end, life.buffer.microbatch, life.buffer.depth),
    ):
        rank_pool = life.buffer.rank_pool
        # Ends are inclusive, and READ comes before WRITE: what an operation reads for the last time
        # may be overwritten by its result.
        while occupied[rank_pool] and occupied[rank_pool][0][0] < life.start:
            heappush(free[rank_pool], heappop(occupied[rank_pool])[1])
        # No slot is free: all that were ever given out are taken, so their number is the next one.
        slot = heappop(free[rank_pool]) if free[rank_pool] else len(occupied[rank_pool])
        heappush(occupied[rank_pool], (life.end, slot))
        allocated.append((life, slot))
    return allocated


def slots_needed(schedules: Iterable[Schedule]) -> Slots:
    """The slots that tables of all these schedules need."""
    needed: Slots = {}
    for schedule in schedules:
        for life, slot in allocate(lives_of(schedule)):
            key = life.buffer.pool_key
            needed[key] = max(needed.get(key, 0), slot + 1)
    return needed


# ---------------------------------------------------------------------------- kept residuals


def keep_residuals(schedule: Schedule, slots: Slots) -> Schedule:
    """The schedule with as many forwards keeping their residuals as there are slots for, shortest
    wait first.

    Only ticks whose slowest operation is a backward become shorter, so the forwards of those come
    first.
    """
    graph = schedule.graph
    times = TickTimes(schedule)
    # By chain and rank: how many residuals are held at each moment
    moments = moment_of(len(schedule.ticks) + 1, Moment.READ)
    held: dict[tuple[int, int], Longs] = defaultdict(lambda: np.zeros(moments, np.int64))
    for life in lives_of(schedule):
        if life.buffer.pool == Pool.RESIDUAL:
            held[life.buffer.chain, life.buffer.rank][life.start : life.end + 1] += 1
    keepers = set(schedule.keepers)
    for n, backward in _candidates(schedule, times):
        first_moment = moment_of(times.tick[n], Moment.WRITE)
        last_moment = moment_of(times.tick[backward], Moment.READ)
        meanwhile = held[graph.chain[n], graph.stage[n]][first_moment : last_moment + 1]
        room = slots.get((Pool.RESIDUAL, graph.chain[n]), 0)
        # `meanwhile` is a view. Fewer than `room` at every moment: `allocate` finds a slot.
        if n not in keepers and meanwhile.max() < room:
            meanwhile += 1
            keepers.add(n)
    return Schedule(graph, schedule.ticks, frozenset(keepers))


def _candidates(schedule: Schedule, times: TickTimes) -> list[tuple[int, int]]:
    """(forward, backward) of all that may keep residuals, the best first."""
    graph = schedule.graph
    candidates = []
    for n in range(graph.size):
        if graph.kind[n] != Kind.FORWARD or graph.ring.chains[graph.chain[n]].head_only:
            continue
        backward = graph.backward_of(n)
        if backward is None:
            continue
        row = schedule.ticks[times.tick[backward]].tolist()
        length = max((graph.duration[operation] for operation in row if operation >= 0), default=0)
        shortens_nothing = length > graph.duration[backward]
        candidates.append((shortens_nothing, times.tick[backward] - times.tick[n], n, backward))
    return [(n, backward) for *_, n, backward in sorted(candidates)]
