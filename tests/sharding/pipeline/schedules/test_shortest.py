"""The shortest of the greedy schedule and the fixed orders, within slots and
a bound on its length."""

import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import fixed_orders, scheduler_of
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.orders import gpipe, interleaved
from sharding.pipeline.schedules.schedule import lockstep
from sharding.pipeline.schedules.shortest import fitting_orders, shortest
from sharding.pipeline.slots import keep_residuals, slots_needed
from tests.sharding.pipeline.models import ring_of, workload_of


def graph_of(seed: int, stages: int = 4, microbatches: int = 8):
    ring = ring_of("segments", stages)
    return build_graph(ring, workload_of(ring, microbatches, seed=seed))


@pytest.mark.parametrize("seed", range(6))
def test_none_of_the_compared_is_shorter(seed):
    graph = graph_of(seed)
    costs = [lockstep(order(graph)) for order in (greedy, gpipe, interleaved)]
    assert lockstep(shortest(graph, fixed_orders())) == min(costs)
    assert lockstep(scheduler_of("greedy").make(graph, None, 0)) == min(costs)


def test_fixed_orders_win_somewhere_and_greedy_ones_elsewhere():
    winners = {
        lockstep(greedy(graph))
        < min(lockstep(schedule) for schedule in fitting_orders(graph, fixed_orders()))
        for graph in (graph_of(0, stages=2), graph_of(0, stages=8))
    }
    assert winners == {True, False}


def test_orders_that_do_not_fit_the_slots_take_no_part():
    graph = graph_of(1)
    slots = slots_needed([greedy(graph)])
    slots[Pool.INPUT, 1] = max(2, slots[Pool.INPUT, 1] // 2)
    assert not fitting_orders(graph, [gpipe], slots)
    schedule = shortest(graph, fixed_orders(), slots)
    assert all(slot_count <= slots[key] for key, slot_count in slots_needed([schedule]).items())


def test_a_bound_is_kept_or_told():
    graph = graph_of(2)
    least_cost = lockstep(greedy(graph))
    assert lockstep(greedy(graph, bound=least_cost)) == least_cost
    with pytest.raises(PipelineError, match="longer than the bound"):
        greedy(graph, bound=least_cost - 1)
    with pytest.raises(PipelineError, match="longer than the bound"):
        shortest(graph, [], bound=least_cost - 1)


def test_slots_are_counted_of_orders_that_may_win_alone(monkeypatch):
    """Among the fixed orders, slots are counted for the shortest one alone."""
    graph = graph_of(2)
    least_cost = lockstep(shortest(graph, fixed_orders()))
    counted = []
    monkeypatch.setattr(
        "sharding.pipeline.schedules.shortest.slots_needed",
        lambda schedules: counted.extend(schedules) or slots_needed(schedules),
    )
    slots = slots_needed([order(graph) for order in (greedy, gpipe, interleaved)])
    assert lockstep(shortest(graph, fixed_orders(), slots)) == least_cost
    (counted_schedule,) = counted
    assert lockstep(counted_schedule) == min(map(lockstep, fitting_orders(graph, fixed_orders())))
    with pytest.raises(PipelineError, match="longer than the bound"):
        shortest(graph, fixed_orders(), slots, bound=least_cost - 1)


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_kept_residuals_count(kept):
    """With residuals kept, greedy schedules, which soon go back, may become the shorter ones."""
    graph = graph_of(0, stages=2, microbatches=12)
    schedules = [order(graph) for order in (greedy, gpipe, interleaved)]
    slots = {key: 99 for schedule in schedules for key in slots_needed([schedule])}
    slots |= {(Pool.RESIDUAL, chain): kept for chain in range(len(graph.ring.chains))}
    costs = [lockstep(keep_residuals(schedule, slots)) for schedule in schedules]
    shortest_schedule = shortest(graph, fixed_orders(), slots)
    assert lockstep(keep_residuals(shortest_schedule, slots)) == min(costs)
    assert costs != [lockstep(schedule) for schedule in schedules], (
        "slots that keep nothing prove nothing"
    )
