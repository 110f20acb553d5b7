"""Allocation of slots to buffers over time, as of registers, and the choice of residuals to keep.

A buffer occupies a slot from its first write until it is last read or sent, and gets the lowest
slot that is free.
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
    """What happens at the successive moments of a tick."""

    READ = 0
    WRITE = 1
    SEND = 2
    RECEIVE = 3


@dataclass(frozen=True)
class Life:
    """First and last time at which a buffer needs a slot, in moments since the start of tick 0."""

    buffer: Buffer
    start: int
    end: int


def moment_of(tick: int, moment: Moment) -> int:
    """Time of a moment of a tick, in moments since the start of tick 0."""
    return len(Moment) * tick + moment


def tick_of(time: int) -> tuple[int, Moment]:
    """Tick of a time, and the moment in that tick."""
    tick, moment = divmod(time, len(Moment))
    return tick, Moment(moment)


class TickTimes:
    """Times of a schedule: `tick[n]` is the tick of operation n; `arrival` and `departure` are the
    times between which a buffer needs its slot."""

    def __init__(self, schedule: Schedule):
        self.graph = schedule.graph
        self.tick = [-1] * self.graph.size
        clock = TickClock(self.graph)
        for tick, row in enumerate(schedule.ticks.tolist()):
            for n in row:
                if n >= 0:
                    self.tick[n] = tick
                    clock.finish(n, tick)
        self._sent_ticks = clock.sent

    def arrival(self, buffer: Buffer) -> int:
        """Time at which the buffer's slot is first written."""
        # A value sent in tick t over h hops is received in tick t + h - 1, and read from t + h on.
        if buffer.pool == Pool.TOKEN_GRADIENT and buffer.hops:
            sent = self._sent_ticks[buffer.chain, buffer.microbatch]
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
        """Time at which the buffer's slot is last read or sent."""
        if buffer.readers:
            return moment_of(max(self.tick[n] for n in buffer.readers), Moment.READ)
        return moment_of(self._sent_ticks[buffer.chain, buffer.microbatch], Moment.SEND)


def lives_of(schedule: Schedule) -> list[Life]:
    """Lives of all buffers: those of the graph, of kept residuals, and of tokens and token
    gradients on the ranks that they pass through."""
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
        # The ranks on the way, from the target back: tokens go up the ring, their gradients down.
        direction = 1 if life.buffer.pool == Pool.TOKENS else -1
        for hop in range(1, life.buffer.hops):
            # Received in one tick and sent on in the next.
            rank = (life.buffer.rank - direction * hop) % graph.ring.stages
            # RECEIVE of a tick plus `Moment.RECEIVE` moments is SEND of the next tick. One slot is
            # enough for everything that passes, because the next arrival comes right after SEND.
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
    """Every life with its slot: the lowest of its pool and rank that is free."""
    free: dict[RankPool, list[int]] = defaultdict(list)
    occupied: dict[RankPool, list[tuple[int, int]]] = defaultdict(list)  # (end of the life, slot)
    allocated = []
    # In the order of their starts: then a pool gets no more slots than it has lives at once.
    for life in sorted(
        lives,
        key=lambda life: (life.start, life.end, life.buffer.microbatch, life.buffer.depth),
    ):
        rank_pool = life.buffer.rank_pool
        # Ends are inclusive, and READ comes before WRITE: what an operation reads for the last time
        # may be overwritten by its result.
        while occupied[rank_pool] and occupied[rank_pool][0][0] < life.start:
            heappush(free[rank_pool], heappop(occupied[rank_pool])[1])
        # If no slot is free, all that were ever given out are occupied, so their count is the next
        # one's number.
        slot = heappop(free[rank_pool]) if free[rank_pool] else len(occupied[rank_pool])
        heappush(occupied[rank_pool], (life.end, slot))
        allocated.append((life, slot))
    return allocated


def slots_needed(schedules: Iterable[Schedule]) -> Slots:
    """The slots that are enough for the tables of all these schedules."""
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

    Only ticks whose slowest operation is a backward become shorter, so the forwards of these
    backwards come first.
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
    for n, backward in _keeper_candidates(schedule, times):
        first_moment = moment_of(times.tick[n], Moment.WRITE)
        last_moment = moment_of(times.tick[backward], Moment.READ)
        meanwhile = held[graph.chain[n], graph.stage[n]][first_moment : last_moment + 1]
        room = slots.get((Pool.RESIDUAL, graph.chain[n]), 0)
        # `meanwhile` is a view of `held`. With fewer than `room` held at every moment in between,
        # `allocate` finds a slot.
        if n not in keepers and meanwhile.max() < room:
            meanwhile += 1
            keepers.add(n)
    return Schedule(graph, schedule.ticks, frozenset(keepers))


def _keeper_candidates(schedule: Schedule, times: TickTimes) -> list[tuple[int, int]]:
    """(forward, backward) of every forward that may keep residuals, the best first."""
    graph = schedule.graph
    candidates = []
    for n in range(graph.size):
        # Where only the head of a chain is trained, features are kept instead, in an input slot.
        if graph.kind[n] != Kind.FORWARD or graph.ring.chains[graph.chain[n]].head_only:
            continue
        backward = graph.backward_of(n)
        if backward is None:
            continue
        # A tick is as long as its slowest operation. If that is not this backward, the tick stays
        # as long even if the backward recomputes nothing.
        row = schedule.ticks[times.tick[backward]].tolist()
        length = max((graph.duration[operation] for operation in row if operation >= 0), default=0)
        shortens_nothing = length > graph.duration[backward]
        # False sorts first: backwards that shorten their tick; among these, the shortest wait.
        candidates.append((shortens_nothing, times.tick[backward] - times.tick[n], n, backward))
    return [(n, backward) for *_, n, backward in sorted(candidates)]
