"""What schedules cost, in lockstep and asynchronously, and where idle time comes from."""

import functools
import itertools

import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.orders import gpipe
from sharding.pipeline.schedules.schedule import asynchronous, idle_by_cause, lockstep
from tests.sharding.pipeline.models import ring_of, workload_of
from tests.sharding.pipeline.schedules.test_orders import plain


def test_a_tick_costs_its_longest_operation():
    graph = plain(2, 2)
    rows = gpipe(graph).ticks.tolist()
    expected = sum(max(graph.duration[n] for n in row if n >= 0) for row in rows)
    assert lockstep(gpipe(graph)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_makespan_by_recursion(seed):
    """An operation ends its own duration after the last that it waits for: in the graph, or
    before it on its rank."""
    ring = ring_of("segments", 4)
    schedule = greedy(build_graph(ring, workload_of(ring, 6, seed=seed)))
    graph = schedule.graph
    predecessors = [[] for _ in range(schedule.graph.size)]
    for n in range(graph.size):
        for successor in [op for op, _ in graph.successors[n]] + [
            op for *_, op in graph.returns[n]
        ]:
            predecessors[successor].append(n)
    for order in schedule.orders:
        for n, successor in itertools.pairwise(order):
            predecessors[successor].append(n)

    @functools.cache
    def end(n: int) -> int:
        return graph.duration[n] + max(
            (end(predecessor) for predecessor in predecessors[n]), default=0
        )

    assert asynchronous(schedule) == max(end(n) for n in range(graph.size))


def test_what_is_not_work_has_a_cause():
    """One microbatch on two ranks: the busier one waits for the other, and no tick
    holds two operations."""
    graph = plain(2, 1)
    schedule = gpipe(graph)
    idle = idle_by_cause(schedule)
    assert idle["lockstep"] == 0 and idle["bubble"] == 2 * min(graph.rank_work)
    assert idle["imbalance"] == max(graph.rank_work) - min(graph.rank_work)


@pytest.mark.parametrize("seed", range(4))
def test_work_and_idle_time_are_the_whole_step(seed):
    ring = ring_of("segments", 4)
    schedule = greedy(build_graph(ring, workload_of(ring, 6, seed=seed)))
    idle = idle_by_cause(schedule)
    assert all(time > 0 for time in idle.values())
    assert sum(idle.values()) + sum(schedule.graph.rank_work) == 4 * lockstep(schedule)
