"""Swaps of items of similar length: balance and fill stay within their bounds,
and tokens stay nearer."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.exchange.placement import place_rows, swap_items
from jaxmllm.balance.exchange.row_ranks import PLACEMENT_SEARCH
from jaxmllm.balance.exchange.swaps import Destinations, reduce_traffic
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec, RowClass
from jaxmllm.balance.rows.assign import item_costs
from jaxmllm.balance.rows.level import RowState
from jaxmllm.balance.step_plan import place_items, plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.phases import encoder_phase


def destinations_of(tokens, wanted, ranks, node):
    """Destinations where every rank is a block by itself, with `node`
    consecutive ranks per node."""
    nodes = np.arange(ranks) // node
    ranks = np.arange(ranks)
    return Destinations(nodes, ranks, nodes[wanted], wanted, tokens)


def swapped(row, length, cost, left, destinations):
    """New rows of the items. `left` is what each row can still take in slots, cost and segments."""
    slots, costs, segments = left
    amounts = np.stack([np.append(amount, 0) for amount in (length, np.ones_like(length), cost)])
    state = RowState(row.copy(), amounts, np.stack([slots, segments, costs]))
    reduce_traffic(state, destinations, 1)
    return state.row_of


def slow_benefit(row, destinations):
    """Two per token on the right rank, one on the right node alone, summed in a loop."""
    ranks = len(destinations.node)
    benefit = 0
    for item, item_row in enumerate(row.tolist()):
        rank = item_row % ranks
        right_node = destinations.node[rank] == destinations.wanted_node[item]
        matches = int(right_node) + int(rank == destinations.wanted_block[item])
        benefit += matches * int(destinations.tokens[item])
    return benefit


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ranks=st.sampled_from([2, 4, 6]),
    microbatches=st.integers(1, 3),
    items=st.integers(0, 60),
    kinds=st.integers(1, 6),
    spare=st.integers(0, 8),
)
def test_swaps_keep_all_bounds_and_never_lose(seed, ranks, microbatches, items, kinds, spare):
    """What a row gains in slots, cost and segments stays within what it had to spare, and the
    benefit does not fall."""
    random = np.random.default_rng(seed)
    rows = ranks * microbatches
    row = random.integers(0, rows, items)
    length = random.integers(1, 1 + kinds, items)
    cost = 3 * length + length**2
    spare_slots = random.integers(0, 1 + spare, rows)
    spare_costs = random.integers(0, 1 + 10 * spare, rows)
    target = random.integers(0, ranks, items)
    destinations = destinations_of(4 * length, target, ranks, 2)
    spare_segments = random.integers(0, 3, rows)
    new_row = swapped(row, length, cost, (spare_slots, spare_costs, spare_segments), destinations)

    def sums(where, amount):
        return np.bincount(where, weights=amount, minlength=rows)

    assert (
        np.bincount(new_row, minlength=rows) - np.bincount(row, minlength=rows) <= spare_segments
    ).all()
    assert (sums(new_row, length) - sums(row, length) <= spare_slots).all()
    assert (sums(new_row, cost) - sums(row, cost) <= spare_costs).all()
    assert slow_benefit(new_row, destinations) >= slow_benefit(row, destinations)
    repeated = swapped(row, length, cost, (spare_slots, spare_costs, spare_segments), destinations)
    np.testing.assert_array_equal(new_row, repeated)


def test_two_items_of_one_length_are_swapped():
    """Items 0 and 2 of five slots each want the other rank; no row has any room."""
    length = np.array([5, 7, 5])
    no_room = np.zeros(2, np.int64)
    destinations = destinations_of(length, np.array([1, 0, 0]), 2, 1)
    new_row = swapped(
        np.array([0, 0, 1]), length, length, (no_room, no_room, no_room), destinations
    )
    assert new_row.tolist() == [1, 0, 0]


@pytest.mark.parametrize("segments", [0, 1])
def test_an_item_is_swapped_for_two(segments):
    """9 slots against 4 and 5 fit exactly, but the other row then holds one more segment."""
    length = np.array([9, 4, 5])
    no_room = np.zeros(2, np.int64)
    destinations = destinations_of(length, np.array([1, 0, 0]), 2, 1)
    new_row = swapped(
        np.array([0, 1, 1]), length, length, (no_room, no_room, no_room + segments), destinations
    )
    assert new_row.tolist() == ([1, 0, 0] if segments else [0, 1, 1])


def test_an_item_moves_with_a_companion_of_its_row():
    """No partner of item 0 alone leaves both rows within their room."""
    length = np.array([9, 3, 7, 5])
    no_room = np.zeros(4, np.int64)
    destinations = destinations_of(length, np.array([1, 2, 0, 0]), 4, 1)
    new_row = swapped(
        np.array([0, 0, 1, 1]), length, length, (no_room, no_room, no_room), destinations
    )
    assert new_row.tolist() == [1, 1, 0, 0]


def test_no_swap_beyond_the_room_of_a_row():
    """A swap of 5 against 6 needs one free slot in the row of the 5."""
    length = np.array([5, 6])
    row = np.array([0, 1])
    destinations = destinations_of(length, np.array([1, 0]), 2, 1)
    no_room = np.zeros(2, np.int64)
    spare_cost = np.full(2, 9)
    unchanged = swapped(row, length, length, (no_room, spare_cost, no_room), destinations)
    assert unchanged.tolist() == [0, 1]
    changed = swapped(row, length, length, (np.array([1, 0]), spare_cost, no_room), destinations)
    assert changed.tolist() == [1, 0]


def test_rows_that_all_ranks_share_are_left_alone():
    """Item 0 fills such a row and stays in it. The other three are equally long, and item 1 swaps
    with one of them to reach the rank that it wants."""
    length = np.array([20, 5, 5, 5])
    target = np.array([1, 1, 0, 0])
    column = functools.partial(np.array, dtype=np.int32)
    plan = PhasePlan(
        capacity=column([10, 5, 5]),
        span=column([2, 1, 1]),
        pool=column([0, 0, 0]),
        pool_offset=column([0, 0, 0]),
        microbatch=column([0, 1, 1, 2]),
        rank=column([0, 0, 1, 1]),
        offset=column([0, 0, 0, 0]),
        segment=column([1, 1, 1, 1]),
    )
    classes = (RowClass(10, 2), RowClass(5))
    spec = PhaseSpec(encoder_phase("vision"), 2, classes, 4, 1, ItemCost(1, 0))
    zeros = np.zeros(4, np.int32)
    items = PhaseItems(length, length, zeros, zeros, zeros)
    swapped_plan = swap_items(plan, items, spec, destinations_of(length, target, 2, 1), 1)
    assert (swapped_plan.microbatch[0], swapped_plan.rank[0]) == (0, 0)
    assert swapped_plan.rank[1] == 1 and (swapped_plan.microbatch[1:] > 0).all()
    assert 0 in swapped_plan.rank[2:] and sorted(
        zip(swapped_plan.microbatch[1:], swapped_plan.rank[1:], strict=True)
    ) == [
        (1, 0),
        (1, 1),
        (2, 1),
    ]


def test_most_tokens_of_a_large_batch_stay_on_their_rank(make):
    """The share of tokens that stay grows when rows change ranks, and by far more
    when items also swap."""
    rank_shares = {}
    batch = make.batch(3, 512)
    spec = make.spec(
        batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, classes=2, node=4, pool=2000
    )
    grids = {name: route.grid for name, route in spec.routes.items()}
    unplaced = place_items(batch, spec.phases, grids, "phases")
    with_swaps = place_items(batch, spec.phases, grids, "phases", spec.nodes)
    with_rows = place_rows(unplaced, batch, spec.phases, grids, spec.nodes)
    for name, plans in (("free", unplaced), ("rows", with_rows), ("swaps", with_swaps)):
        # Sequences are in the order of examples, so an example's number finds its sequence.
        target = plans["language"].rank[batch.phases["vision"].example]
        tokens = batch.phases["vision"].tokens
        rank_shares[name] = tokens[plans["vision"].rank == target].sum() / tokens.sum()
    assert (
        rank_shares["free"] < rank_shares["rows"]
        and rank_shares["swaps"] > rank_shares["rows"] + 0.3
    )
    validate(plan_step(batch, spec), batch, spec)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    grid=st.sampled_from([(4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (8, 1, 1)]),
    examples=st.integers(1, 60),
)
def test_costliest_rows_and_ranks_stay_within_their_margin(make, seed, grid, examples):
    """Swaps may raise the costliest row of a microbatch, or the busiest rank, only up to the
    margin over the mean."""
    batch = make.batch(seed, examples)
    spec = make.spec(batch, {"vision": grid, "audio": grid}, classes=2, node=2)
    grids = {name: route.grid for name, route in spec.routes.items()}
    plans_before = place_rows(
        place_items(batch, spec.phases, grids, "phases"), batch, spec.phases, grids, spec.nodes
    )
    plans_after = place_items(batch, spec.phases, grids, "phases", spec.nodes)
    for name in grids:
        phase = spec.phases[name]
        ranks = spec.phases[name].ranks
        cost = item_costs(phase, batch.phases[name])
        loads = []
        for plan in (plans_before[name], plans_after[name]):
            load = np.zeros((plan.microbatches, ranks))
            np.add.at(load, (plan.microbatch, plan.rank), cost)
            loads.append(load)
        loads_before, loads_after = loads
        assert (
            loads_after.max(axis=1)
            <= np.maximum(
                loads_before.max(axis=1),
                loads_before.mean(axis=1) * (1 + 1 / PLACEMENT_SEARCH.margin),
            )
        ).all()
        floor = max(loads_before.sum() / ranks, cost.max(initial=0))
        allowed = max(
            loads_before.sum(axis=0).max(initial=0), floor * (1 + 1 / PLACEMENT_SEARCH.margin) + 2
        )
        assert loads_after.sum(axis=0).max(initial=0) <= allowed
