"""Searched schedules against brute force, the lower bound, the schedules they start
from, and their slots."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Graph, Pool, Workload
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.bounds import lower_bound
from sharding.pipeline.schedules.by_name import fixed_orders
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.orders import gpipe, interleaved, one_f_one_b
from sharding.pipeline.schedules.schedule import lockstep
from sharding.pipeline.schedules.search import search
from sharding.pipeline.schedules.shortest import shortest
from sharding.pipeline.slots import keep_residuals, slots_needed
from sharding.pipeline.table import make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate


def make_work(random, depth: int, count: int, most: int) -> ChainWork:
    """Random costs from 1 to `most`."""
    forward, input_gradient, weight_gradient = random.integers(1, most + 1, (3, depth, count))
    return ChainWork(forward, forward, input_gradient, weight_gradient)


def tiny_graph(seed: int, split: bool = False) -> Graph:
    """An encoder on the first of two ranks, language on both, and two microbatches that read one
    row each and cost the same."""
    random = np.random.default_rng(seed)
    ring = Ring(2, (Chain("vision", (0,), (1,)), Chain("language", (0, 1), (1, 1))))
    vision = make_work(random, 1, 2, 5)
    language = make_work(random, 2, 2, 5)
    for work in (vision, language):
        for costs in (work.forward, work.input_gradient, work.weight_gradient):
            costs[:, 1] = costs[:, 0]
    return build_graph(ring, Workload((vision, language), (((0, 0),), ((0, 1),))), split=split)


def segments_graph(seed: int, microbatches: int = 6, split: bool = True) -> Graph:
    """Two encoders and a language model on each of three ranks, with encoder rows that one or
    two microbatches read."""
    random = np.random.default_rng(seed)
    ring = Ring(
        3,
        (
            Chain("vision", (0, 1, 2), (2, 2, 2)),
            Chain("audio", (0, 1, 2), (1, 1, 1)),
            Chain("language", (0, 1, 2, 0, 1, 2), (2,) * 6),
        ),
    )
    inputs = [
        {(0, m), (1, m // 2)} | ({(0, m - 1)} if m and random.random() < 0.4 else set())
        for m in range(microbatches)
    ]
    work = (
        make_work(random, 3, microbatches, 40),
        make_work(random, 3, -(-microbatches // 2), 15),
        make_work(random, 6, microbatches, 30),
    )
    return build_graph(
        ring,
        Workload(work, tuple(tuple(sorted(microbatch_inputs)) for microbatch_inputs in inputs)),
        split=split,
    )


def prove(graph: Graph, schedule, slots) -> None:
    """Make a table within the slots and let the validator run it on labels."""
    fan = tuple(
        max(sum(source == encoder for source, _ in inputs) for inputs in graph.workload.inputs)
        for encoder in range(len(graph.ring.encoders))
    )
    validate(make_table(schedule, TableSpec(graph.ring, slots, len(schedule.ticks), fan)), graph)


def least_lockstep(graph: Graph) -> int:
    """The least cost by Dijkstra's algorithm over sets of completed operations, where
    every edge takes one tick."""
    predecessors: list[set[int]] = [set() for _ in range(graph.size)]
    for n in range(graph.size):
        assert all(ticks == 1 for _, ticks in graph.successors[n])
        for successor in [op for op, _ in graph.successors[n]] + [
            op for *_, op in graph.returns[n]
        ]:
            predecessors[successor].add(n)
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    visited = set()
    while queue:
        cost, completed = heapq.heappop(queue)
        if len(completed) == graph.size:
            return cost
        if completed in visited:
            continue
        visited.add(completed)
        ready = [
            n for n in range(graph.size) if n not in completed and predecessors[n] <= set(completed)
        ]
        ranks = [
            [None, *(n for n in ready if graph.stage[n] == rank)]
            for rank in range(graph.ring.stages)
        ]
        for row in itertools.product(*ranks):
            operations = [n for n in row if n is not None]
            if operations:
                length = max(graph.duration[n] for n in operations)
                heapq.heappush(queue, (cost + length, tuple(sorted((*completed, *operations)))))
    raise AssertionError("nothing left to do, but not done")


def even_graph(microbatches: int, times: int, split: bool) -> Graph:
    """A graph where operations of one kind take equally long, and backward operations `times` as
    long as forward ones."""
    ring = Ring(2, (Chain("vision", (0,), (1,)), Chain("language", (0, 1), (1, 1))))

    def work(depth: int, forward: int) -> ChainWork:
        costs = np.full((depth, microbatches), forward, np.int64)
        return ChainWork(costs, costs, costs * (times - 1), costs)

    inputs = tuple(((0, m),) for m in range(microbatches))
    return build_graph(ring, Workload((work(1, 2), work(2, 3)), inputs), split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_even_batches_are_solved(microbatches, times, split):
    graph = even_graph(microbatches, times, split)
    least_cost = least_lockstep(graph)
    assert lower_bound(graph) <= least_cost
    assert search(graph, fixed_orders(), rollouts=200).lockstep == least_cost


def test_tiny_uneven_batches_are_nearly_solved():
    """Costs of chunks are unrelated here, so an optimal tick can be of any length. The bounds are
    for the chance of a short search."""
    gaps = []
    for seed, split in itertools.product(range(10), (False, True)):
        graph = tiny_graph(seed, split)
        least_cost = least_lockstep(graph)
        assert lower_bound(graph) <= least_cost
        gaps.append(search(graph, fixed_orders(), rollouts=100).lockstep / least_cost - 1)
    assert min(gaps) == 0 and sorted(gaps)[10] < 0.015 and max(gaps) < 0.06


@pytest.mark.parametrize("seed", [0, 1])
def test_searched_schedules_are_proven_and_no_worse_than_others(seed):
    graph = segments_graph(seed)
    result = search(graph, fixed_orders(), rollouts=40, seed=seed)
    prove(graph, result.schedule, slots_needed([result.schedule]))
    assert result.lockstep == lockstep(result.schedule) and result.rollouts == 40
    fixed_costs = [lockstep(greedy(graph)), lockstep(gpipe(graph)), lockstep(interleaved(graph))]
    assert result.baseline == min(fixed_costs) >= result.lockstep > lower_bound(graph)
    assert seed or result.lockstep < result.baseline


def test_a_chain_starts_from_its_fixed_orders():
    """Without rollouts the result is the best of greedy, GPipe and 1F1B."""
    graph = even_graph(2, 3, split=False)
    result = search(graph, fixed_orders(), rollouts=0)
    assert result.lockstep == min(
        lockstep(planner(graph)) for planner in (greedy, one_f_one_b, gpipe)
    )


@pytest.mark.parametrize("room", [1, 2, 4])
def test_slots_are_kept_to(room):
    """With fewer slots than a free search would use, except for the largest `room`."""
    graph = segments_graph(3)
    free_slots = slots_needed([search(graph, fixed_orders(), rollouts=20).schedule])
    slots = {
        (pool, chain): 2 * room * (2 if chain == 2 else 1) for pool in Pool for chain in range(3)
    }
    assert any(free_slots[pool_key] > slots[pool_key] for pool_key in free_slots) or room == 4
    result = search(graph, fixed_orders(), slots, rollouts=20)
    assert all(
        slot_count <= slots[pool_key]
        for pool_key, slot_count in slots_needed([result.schedule]).items()
    )
    prove(graph, result.schedule, slots)
    assert result.lockstep <= lockstep(greedy(graph, slots))


@pytest.mark.parametrize("seed", range(4))
def test_a_search_is_no_worse_than_greedy_with_residuals_kept(seed):
    graph = segments_graph(seed, split=False)
    slots = {(pool, chain): 99 for pool in Pool for chain in range(3)}
    slots |= {(Pool.RESIDUAL, chain): 2 for chain in range(3)}
    result = search(graph, fixed_orders(), slots, rollouts=20)
    assert result.lockstep == lockstep(keep_residuals(result.schedule, slots))
    compared = shortest(graph, fixed_orders(), slots)
    assert result.lockstep <= result.baseline == lockstep(keep_residuals(compared, slots))


def test_no_room_at_all_is_an_error():
    with pytest.raises(
        PipelineError, match=r"no schedule fits the slots: .* raise the slots of the pipeline"
    ):
        search(segments_graph(0), fixed_orders(), {(Pool.INPUT, 0): 1}, rollouts=5)


def test_the_same_seed_finds_the_same_schedule():
    first_result, second_result = (
        search(segments_graph(1), fixed_orders(), rollouts=30, seed=7) for _ in range(2)
    )
    other_seed = search(segments_graph(1), fixed_orders(), rollouts=30, seed=8)
    assert (
        np.array_equal(first_result.schedule.ticks, second_result.schedule.ticks)
        and first_result.lockstep == second_result.lockstep
    )
    assert not np.array_equal(first_result.schedule.ticks, other_seed.schedule.ticks)


def test_more_rollouts_find_more():
    """On average over four graphs, because a search is no prefix of one with a larger budget."""
    graphs = [segments_graph(seed) for seed in range(4)]
    after_2, after_80 = (
        sum(search(graph, fixed_orders(), rollouts=rollouts).lockstep for graph in graphs)
        for rollouts in (2, 80)
    )
    assert after_80 < after_2


def test_nothing_left_to_find_ends_a_search():
    """One microbatch on one rank costs the sum of its operations, which is the lower bound."""
    ring = Ring(1, (Chain("language", (0,), (4,)),))
    cost = np.full((1, 1), 5, np.int64)
    graph = build_graph(ring, Workload((ChainWork(cost, cost, cost, cost),), ((),)))
    result = search(graph, fixed_orders(), rollouts=10)
    assert (result.rollouts, result.lockstep, lower_bound(graph)) == (0, 15, 15)


def test_the_lower_bound_is_the_longest_path_or_the_busiest_rank():
    """One microbatch runs one operation after the other. With thirty, the bound is the work of the
    busiest rank and the little that must run before and after it."""
    graph = even_graph(1, 3, split=False)
    assert lower_bound(graph) == sum(graph.duration), (
        "one microbatch: one operation after the other"
    )
    long_graph = even_graph(30, 3, split=False)
    assert max(long_graph.rank_work) <= lower_bound(long_graph) <= 1.05 * max(long_graph.rank_work)
