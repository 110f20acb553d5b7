"""A schedule: which rank does which operation in which tick, and what that costs.

Ticks are lockstep: in each, every rank does at most one operation, then edges move one place along
the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharding.pipeline.graph import Graph

Ints = NDArray[np.int32]
WAITS = -1  # in `ticks`: the rank does nothing


@dataclass(frozen=True)
class Schedule:
    """`ticks[t, s]` is the operation of rank s in tick t, -1 for none; `keepers` are the forwards
    that keep residuals for their backward."""

    graph: Graph
    ticks: Ints  # [T, S]
    keepers: frozenset[int] = frozenset()

    @staticmethod
    def of_rows(graph: Graph, rows: list[list[int]]) -> Schedule:
        """The schedule whose ticks are the given rows, [S] operations each."""
        return Schedule(graph, np.array(rows, np.int32).reshape(len(rows), graph.ring.stages))

    @property
    def orders(self) -> list[list[int]]:
        """Operations of each rank in the order in which it does them."""
        return [[int(n) for n in rank_ticks if n != WAITS] for rank_ticks in self.ticks.T]


def durations(schedule: Schedule) -> list[int]:
    """[N] durations, without the recomputation of backwards whose forward kept the residuals."""
    graph = schedule.graph
    lengths = list(graph.duration)
    for n in schedule.keepers:
        backward = graph.backward_of(n)
        if backward is not None:
            recompute = graph.workload.chains[graph.chain[n]].recompute
            lengths[backward] -= int(recompute[graph.depth[n], graph.microbatch[n]])
    return lengths


def lockstep(schedule: Schedule) -> int:
    """Duration of a step on the executor: the sum over ticks of the slowest rank's operation."""
    lengths = np.array([*durations(schedule), 0])  # WAITS, -1, finds the 0
    return int(lengths[schedule.ticks].max(axis=1).sum())


def asynchronous(schedule: Schedule) -> int:
    """Makespan of the same orders on ranks that wait only for what they need, over edges that take
    no time."""
    graph = schedule.graph
    lengths = durations(schedule)
    ready = [0] * graph.size
    free = [0] * graph.ring.stages
    # Ticks put an operation after all that it waits for, so `ready[n]` is final.
    for n in schedule.ticks.ravel().tolist():
        if n == WAITS:
            continue
        rank = graph.stage[n]
        free[rank] = max(free[rank], ready[n]) + lengths[n]
        for follower in graph.followers(n):
            ready[follower] = max(ready[follower], free[rank])
    return max(free)


def idle_by_cause(schedule: Schedule) -> dict[str, int]:
    """Rank-time of a step in which ranks compute nothing, by its cause:

    imbalance: ranks have less work than the busiest one. bubble: even the busiest one waits for
    what it needs. lockstep: a tick lasts as long as its longest operation. Together with the work
    they are the ranks times `lockstep`.
    """
    ranks = schedule.graph.ring.stages
    work = [0] * ranks
    for n, length in enumerate(durations(schedule)):
        work[schedule.graph.stage[n]] += length
    without_ticks = asynchronous(schedule)
    return {
        "imbalance": ranks * max(work) - sum(work),
        "bubble": ranks * (without_ticks - max(work)),
        "lockstep": ranks * (lockstep(schedule) - without_ticks),
    }
