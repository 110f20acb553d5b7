"""Searched schedules against brute force, the lower bound, what they start from, and their slot budget."""

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
    forward, input_gradient, weight_gradient = random.integers(1, most + 1, (3, depth, count))
    return ChainWork(forward, forward, input_gradient, weight_gradient)


def tiny_graph(seed: int, split: bool = False) -> Graph:
    """An encoder on the first of two ranks, language on both, two microbatches that read a row each and cost alike."""
    random = np.random.default_rng(seed)
    ring = Ring(2, (Chain("vision", (0,), (1,)), Chain("language", (0, 1), (1, 1))))
    vision = make_work(random, 1, 2, 5)
    language = make_work(random, 2, 2, 5)
    for work in (vision, language):
        for costs in (work.forward, work.input_gradient, work.weight_gradient):
            costs[:, 1] = costs[:, 0]
    return build_graph(ring, Workload((vision, language), (((0, 0),), ((0, 1),))), split=split)


def segments_graph(seed: int, microbatches: int = 6, split: bool = True) -> Graph:
    """Two encoders and language on every one of three ranks, rows of an encoder read by one or two microbatches."""
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
        ring, Workload(work, tuple(tuple(sorted(each)) for each in inputs)), split=split
    )


def prove(graph: Graph, schedule, slots) -> None:
    """Make a table within the slots and run it on labels."""
    fan = tuple(
        max(sum(of == encoder for of, _ in inputs) for inputs in graph.workload.inputs)
        for encoder in range(len(graph.ring.encoders))
    )
    validate(make_table(schedule, TableSpec(graph.ring, slots, len(schedule.ticks), fan)), graph)


def least_lockstep(graph: Graph) -> int:
    """By Dijkstra's algorithm over the sets of operations done; every edge takes one tick."""
    needs: list[set[int]] = [set() for _ in range(graph.size)]
    for n in range(graph.size):
        assert all(ticks == 1 for _, ticks in graph.successors[n])
        for after in [op for op, _ in graph.successors[n]] + [op for *_, op in graph.returns[n]]:
            needs[after].add(n)
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    seen = set()
    while queue:
        cost, done = heapq.heappop(queue)
        if len(done) == graph.size:
            return cost
        if done in seen:
            continue
        seen.add(done)
        ready = [n for n in range(graph.size) if n not in done and needs[n] <= set(done)]
        ranks = [
            [None, *(n for n in ready if graph.stage[n] == rank)]
            for rank in range(graph.ring.stages)
        ]
        for row in itertools.product(*ranks):
            chosen = [n for n in row if n is not None]
            if chosen:
                length = max(graph.duration[n] for n in chosen)
                heapq.heappush(queue, (cost + length, tuple(sorted((*done, *chosen)))))
    raise AssertionError("nothing left to do, but not done")


def even_graph(microbatches: int, times: int, split: bool) -> Graph:
    """Every forward of the encoder takes as long as any other, and so on; backwards are `times` forwards."""
    ring = Ring(2, (Chain("vision", (0,), (1,)), Chain("language", (0, 1), (1, 1))))

    def work(depth: int, forward: int) -> ChainWork:
        each = np.full((depth, microbatches), forward, np.int64)
        return ChainWork(each, each, each * (times - 1), each)

    inputs = tuple(((0, m),) for m in range(microbatches))
    return build_graph(ring, Workload((work(1, 2), work(2, 3)), inputs), split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_even_batches_are_solved(microbatches, times, split):
    graph = even_graph(microbatches, times, split)
    best = least_lockstep(graph)
    assert lower_bound(graph) <= best
    assert search(graph, fixed_orders(), rollouts=200).lockstep == best


def test_tiny_uneven_batches_are_nearly_solved():
    """What chunks cost has nothing to do with each other here, so that ticks of any length can be right."""
    gaps = []
    for seed, split in itertools.product(range(10), (False, True)):
        graph = tiny_graph(seed, split)
        best = least_lockstep(graph)
        assert lower_bound(graph) <= best
        gaps.append(search(graph, fixed_orders(), rollouts=100).lockstep / best - 1)
    assert min(gaps) == 0 and sorted(gaps)[10] < 0.015 and max(gaps) < 0.06


@pytest.mark.parametrize("seed", [0, 1])
def test_searched_schedules_are_proven_and_no_worse_than_others(seed):
    graph = segments_graph(seed)
    found = search(graph, fixed_orders(), rollouts=40, seed=seed)
    prove(graph, found.schedule, slots_needed([found.schedule]))
    assert found.lockstep == lockstep(found.schedule) and found.rollouts == 40
    others = [lockstep(greedy(graph)), lockstep(gpipe(graph)), lockstep(interleaved(graph))]
    assert found.baseline == min(others) >= found.lockstep > lower_bound(graph)
    assert seed or found.lockstep < found.baseline


def test_a_chain_starts_from_its_fixed_orders():
    """Without rollouts, the best of greedy, GPipe and 1F1B."""
    graph = even_graph(2, 3, split=False)
    found = search(graph, fixed_orders(), rollouts=0)
    assert found.lockstep == min(lockstep(each(graph)) for each in (greedy, one_f_one_b, gpipe))


@pytest.mark.parametrize("room", [1, 2, 4])
def test_slots_are_kept_to(room):
    """Fewer slots than the free search would use."""
    graph = segments_graph(3)
    free = slots_needed([search(graph, fixed_orders(), rollouts=20).schedule])
    slots = {
        (pool, chain): 2 * room * (2 if chain == 2 else 1) for pool in Pool for chain in range(3)
    }
    assert any(free[place] > slots[place] for place in free) or room == 4
    found = search(graph, fixed_orders(), slots, rollouts=20)
    assert all(count <= slots[place] for place, count in slots_needed([found.schedule]).items())
    prove(graph, found.schedule, slots)
    assert found.lockstep <= lockstep(greedy(graph, slots))


@pytest.mark.parametrize("seed", range(4))
def test_a_search_is_no_worse_than_greedy_with_residuals_kept(seed):
    graph = segments_graph(seed, split=False)
    slots = {(pool, chain): 99 for pool in Pool for chain in range(3)}
    slots |= {(Pool.RESIDUAL, chain): 2 for chain in range(3)}
    found = search(graph, fixed_orders(), slots, rollouts=20)
    assert found.lockstep == lockstep(keep_residuals(found.schedule, slots))
    compared = shortest(graph, fixed_orders(), slots)
    assert found.lockstep <= found.baseline == lockstep(keep_residuals(compared, slots))


def test_no_room_at_all_is_an_error():
    with pytest.raises(
        PipelineError, match=r"no schedule fits the slots: .* raise the slots of the pipeline"
    ):
        search(segments_graph(0), fixed_orders(), {(Pool.INPUT, 0): 1}, rollouts=5)


def test_the_same_seed_finds_the_same_schedule():
    first, second = (
        search(segments_graph(1), fixed_orders(), rollouts=30, seed=7) for _ in range(2)
    )
    other = search(segments_graph(1), fixed_orders(), rollouts=30, seed=8)
    assert (
        np.array_equal(first.schedule.ticks, second.schedule.ticks)
        and first.lockstep == second.lockstep
    )
    assert not np.array_equal(first.schedule.ticks, other.schedule.ticks)


def test_more_rollouts_find_more():
    """On average; a budget is no prefix of a greater one."""
    graphs = [segments_graph(seed) for seed in range(4)]
    few, many = (
        sum(search(graph, fixed_orders(), rollouts=count).lockstep for graph in graphs)
        for count in (2, 80)
    )
    assert many < few


def test_nothing_left_to_find_ends_a_search():
    """One microbatch on one rank: the sum of its operations."""
    ring = Ring(1, (Chain("language", (0,), (4,)),))
    one = np.full((1, 1), 5, np.int64)
    graph = build_graph(ring, Workload((ChainWork(one, one, one, one),), ((),)))
    found = search(graph, fixed_orders(), rollouts=10)
    assert (found.rollouts, found.lockstep, lower_bound(graph)) == (0, 15, 15)


def test_the_lower_bound_is_the_longest_path_or_the_busiest_rank():
    graph = even_graph(1, 3, split=False)
    assert lower_bound(graph) == sum(graph.duration), (
        "one microbatch: one operation after the other"
    )
    many = even_graph(30, 3, split=False)
    assert max(many.rank_work) <= lower_bound(many) <= 1.05 * max(many.rank_work)
