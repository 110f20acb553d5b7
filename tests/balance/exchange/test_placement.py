"""Placement by nodes: rows only change ranks within their microbatch, items only swap with similar
ones, and tokens have shorter ways."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange import row_ranks
from jaxmllm.balance.exchange.placement import place_items_near, place_rows
from jaxmllm.balance.exchange.routes import plan_routes
from jaxmllm.balance.exchange.row_ranks import PLACEMENT_SEARCH
from jaxmllm.balance.exchange.traffic import media_tokens
from jaxmllm.balance.records import StepPlan
from jaxmllm.balance.rows.assign import item_costs, part_costs
from jaxmllm.balance.step_plan import place_items, plan_step
from jaxmllm.balance.validate_plan import validate


def exact_up_to(ranks):
    """Limits of the search that match rows and ranks exactly up to `ranks`
    ranks, and greedily beyond."""
    return replace(PLACEMENT_SEARCH, exact_ranks=ranks)


def far_tokens(plans, items, phase, node):
    """Tokens that leave their node, counted item by item, with `node`
    consecutive ranks per node."""
    language = plans["language"].rank
    pairs = zip(
        plans[phase].rank, items.phases[phase].example, items.phases[phase].tokens, strict=True
    )
    return sum(
        int(tokens) for rank, example, tokens in pairs if rank // node != language[example] // node
    )


def contents(plan):
    """The rows of each microbatch as sets of items, whatever their ranks."""
    rows = {}
    for item, (microbatch, rank) in enumerate(
        zip(plan.microbatch.tolist(), plan.rank.tolist(), strict=True)
    ):
        rows.setdefault((microbatch, rank), []).append(
            (item, int(plan.offset[item]), int(plan.segment[item]))
        )
    return sorted((microbatch, row) for (microbatch, _), row in rows.items())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    grid=st.sampled_from([(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (8, 1, 1)]),
    examples=st.integers(1, 40),
    node=st.sampled_from([1, 2, 3]),
    exact=st.booleans(),
)
def test_rows_only_change_ranks(make, seed, grid, examples, node, exact):
    """Every microbatch keeps its rows with the same items, and the same input
    gives the same ranks."""
    batch = make.batch(seed, examples)
    spec = make.spec(batch, {"vision": grid, "audio": grid}, classes=2, node=node)
    grids = {name: route.grid for name, route in spec.routes.items()}
    plans = place_items(batch, spec.phases, grids, "phases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ranks, "PLACEMENT_SEARCH", exact_up_to(128 if exact else 1))
        placed = place_rows(plans, batch, spec.phases, grids, spec.nodes)
        repeated = place_rows(plans, batch, spec.phases, grids, spec.nodes)
    assert placed["language"] is plans["language"]
    for phase in grids:
        assert contents(placed[phase]) == contents(plans[phase])
        np.testing.assert_array_equal(placed[phase].rank, repeated[phase].rank)
        assert placed[phase].rank.dtype == np.int32


@pytest.mark.parametrize("exact", [128, 1])
def test_fewer_tokens_leave_their_node(make, exact, monkeypatch):
    """On 16 ranks in 4 nodes, over three batches, exactly matched and greedily."""
    monkeypatch.setattr(row_ranks, "PLACEMENT_SEARCH", exact_up_to(exact))
    tokens_before = 0
    tokens_after = 0
    for seed in range(3):
        batch = make.batch(seed, 128)
        spec = make.spec(batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, node=4)
        grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items(batch, spec.phases, grids, "phases")
        placed = place_items(batch, spec.phases, grids, "phases", spec.nodes)
        tokens_before += sum(far_tokens(plans, batch, phase, 4) for phase in grids)
        tokens_after += sum(far_tokens(placed, batch, phase, 4) for phase in grids)
    assert tokens_after < 0.75 * tokens_before


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    grid=st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 1, 2)]),
    spans=st.sampled_from([(2,), (8,), (1, 4), (1, 2, 4, 8)]),
    examples=st.integers(1, 30),
    node=st.sampled_from([2, 8]),
    exact=st.booleans(),
)
def test_shared_rows_change_groups_and_swap_items_with_rows_of_their_span(
    make, seed, grid, spans, examples, node, exact
):
    """No row overflows, and no rank is loaded beyond its former load or the
    margin over the floor."""
    batch = make.batch(seed, examples, longest=128)
    spec = make.spec(batch, {"vision": grid, "audio": grid}, node=node)
    spec = make.with_spans(spec, spans)
    grids = {name: route.grid for name, route in spec.routes.items()}
    plans = {
        name: make.scattered(seed, batch.phases[name], phase) for name, phase in spec.phases.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ranks, "PLACEMENT_SEARCH", exact_up_to(128 if exact else 1))
        matched = place_rows(plans, batch, spec.phases, grids, spec.nodes)
        placed = place_items_near(plans, batch, spec.phases, grids, spec.nodes)
    for phase in grids:
        assert contents(matched[phase]) == contents(plans[phase])
        span = matched[phase].span[matched[phase].microbatch]
        assert (matched[phase].rank % span == 0).all()
        swapped = placed[phase]
        np.testing.assert_array_equal(swapped.span[swapped.microbatch], span)
        assert (swapped.rank % span == 0).all()
        cost = item_costs(spec.phases[phase], batch.phases[phase])
        ranks = spec.phases[phase].ranks
        loads_before, loads_after = (
            part_costs(plan, cost, ranks).sum(axis=0) for plan in (plans[phase], swapped)
        )
        # No plan can load its busiest rank less than the mean, or than one rank's part of the
        # costliest item. The number of microbatches bounds the rounding of costs.
        floor = max(loads_before.sum() / ranks, (cost / span).max(initial=0))
        allowed = floor * (1 + 1 / PLACEMENT_SEARCH.margin) + swapped.microbatches
        assert loads_after.max() <= max(loads_before.max() + swapped.microbatches, allowed)
    phases, routes = plan_routes(placed, batch, spec)
    validate(StepPlan(phases, routes), batch, spec)


@pytest.mark.parametrize("span", [2, 4])
def test_shared_rows_run_near_the_ranks_that_read_them(make, span):
    """Against the best of all permutations of groups, which may load ranks unevenly: three quarters
    of the tokens that could stay in their node do stay."""
    near_tokens = 0
    near_tokens_before = 0
    best_near_tokens = 0
    for seed in range(6):
        batch = make.batch(seed, 40, longest=128)
        grids = {"vision": (8, 1, 1), "audio": (8, 1, 1)}
        spec = make.with_spans(make.spec(batch, grids, node=4), (span,))
        plans = {
            name: make.scattered(seed, batch.phases[name], phase)
            for name, phase in spec.phases.items()
        }
        placed = place_rows(
            plans,
            batch,
            spec.phases,
            {name: route.grid for name, route in spec.routes.items()},
            spec.nodes,
        )
        for phase in grids:
            items = batch.phases[phase]
            target_node = plans["language"].rank[items.example] // 4
            near_tokens += int(items.tokens[placed[phase].rank // 4 == target_node].sum())
            near_tokens_before += int(items.tokens[plans[phase].rank // 4 == target_node].sum())
            for microbatch in range(plans[phase].microbatches):
                members = plans[phase].microbatch == microbatch
                group = plans[phase].rank[members] // span
                best_near_tokens += max(
                    int(items.tokens[members][node[group] == target_node[members]].sum())
                    for node in permuted_nodes(8 // span)
                )
    assert near_tokens > 0.75 * best_near_tokens and near_tokens > 1.2 * near_tokens_before


@pytest.mark.parametrize("spans", [(8,), (4, 1), (1, 2, 4, 8)])
def test_few_tokens_of_shared_rows_leave_their_node(make, spans):
    """With three items per rank, rows that groups of ranks share swap items just as
    rows of single ranks do."""
    batch = make.batch(2, 96, longest=256)
    grids = {"vision": (32, 1, 1), "audio": (32, 1, 1)}
    spec = make.with_spans(make.spec(batch, grids, node=8, pool=4000), spans)
    placed = plan_step(batch, spec)
    validate(placed, batch, spec)
    unplaced = plan_step(batch, replace(spec, nodes={}))
    assert any((plan.span > 1).any() for plan in placed.phases.values())

    def between_nodes(plan):
        return sum(
            int(round_.tokens[round_.sender // 8 != round_.receiver // 8].sum())
            for route in plan.routes.values()
            for round_ in route.rounds
        )

    # The bound is loose: rows this small can hardly swap without a higher cost of attention.
    assert between_nodes(placed) < 0.7 * between_nodes(unplaced)


def permuted_nodes(groups):
    """Every assignment of groups to two nodes: the node that each group's row might run on."""
    nodes = np.arange(groups) * 2 // groups
    return [np.array(order) for order in set(itertools.permutations(nodes.tolist()))]


def test_language_ranks_take_in_media_more_evenly(make):
    """Placement levels the media tokens that each rank receives over all microbatches."""
    unevenness = np.zeros(2)
    for seed in range(5):
        batch = make.batch(seed, 128)
        spec = make.spec(batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, node=4)
        grids = {name: route.grid for name, route in spec.routes.items()}
        media_unplaced, media_placed = (
            media_tokens(
                batch,
                place_items(batch, spec.phases, grids, "phases", nodes)["language"],
                tuple(grids),
                16,
            )
            for nodes in (None, spec.nodes)
        )
        assert media_placed.sum() == media_unplaced.sum()
        unevenness += [media.sum(axis=0).std() for media in (media_unplaced, media_placed)]
    assert unevenness[1] < 0.85 * unevenness[0]


def test_text_alone_stays_where_it_is(make):
    batch = make.batch(0, 64, media=0)
    spec = make.spec(batch, {"vision": (8, 1, 1)}, node=2)
    plans = place_items(batch, spec.phases, {}, "phases")
    placed = place_items(batch, spec.phases, {}, "phases", spec.nodes)
    repeated = place_items_near(plans, batch, spec.phases, {}, spec.nodes)
    assert repeated["language"] is plans["language"]
    for column in ("microbatch", "rank", "offset", "segment"):
        expected = getattr(plans["language"], column)
        assert np.array_equal(getattr(placed["language"], column), expected)


def test_rank_totals_hardly_grow(make):
    """Loads may exceed those of a plan without nodes by the margin of the search alone."""
    for seed in range(5):
        batch = make.batch(seed, 64)
        spec = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2, node=2)
        spec_without_nodes = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2)
        placed = plan_step(batch, spec).statistics
        unplaced = plan_step(batch, spec_without_nodes).statistics
        for phase in ("vision", "audio", "language"):
            # 1e-3 allows for the rounding of costs to integers.
            gap = placed[f"{phase}/gap_to_floor"]
            allowed = 1 + 1 / PLACEMENT_SEARCH.margin + 1e-3
            assert gap <= max(unplaced[f"{phase}/gap_to_floor"], allowed)
            allowed_waits = max(unplaced[f"{phase}/synchronised"], 1 + 1 / PLACEMENT_SEARCH.margin)
            assert placed[f"{phase}/synchronised"] <= allowed_waits + 1e-3
