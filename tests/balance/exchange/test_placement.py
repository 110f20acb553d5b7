"""Node-wise placement: rows only change ranks inside their microbatch, and tokens come nearer."""

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
    return replace(PLACEMENT_SEARCH, exact_ranks=ranks)


def far_tokens(plans, items, phase, node):
    """Tokens that leave their node, item by item; `node` ranks make one."""
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
    batch = make.batch(seed, examples)
    spec = make.spec(batch, {"vision": grid, "audio": grid}, classes=2, node=node)
    grids = {name: route.grid for name, route in spec.routes.items()}
    plans = place_items(batch, spec.phases, grids, "phases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ranks, "PLACEMENT_SEARCH", exact_up_to(128 if exact else 1))
        placed = place_rows(plans, batch, spec.phases, grids, spec.nodes)
        again = place_rows(plans, batch, spec.phases, grids, spec.nodes)
    assert placed["language"] is plans["language"]
    for phase in grids:
        assert contents(placed[phase]) == contents(plans[phase])
        np.testing.assert_array_equal(placed[phase].rank, again[phase].rank)
        assert placed[phase].rank.dtype == np.int32


@pytest.mark.parametrize("exact", [128, 1])
def test_fewer_tokens_leave_their_node(make, exact, monkeypatch):
    monkeypatch.setattr(row_ranks, "PLACEMENT_SEARCH", exact_up_to(exact))
    far = 0
    near = 0
    for seed in range(3):
        batch = make.batch(seed, 128)
        spec = make.spec(batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, node=4)
        grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items(batch, spec.phases, grids, "phases")
        placed = place_items(batch, spec.phases, grids, "phases", spec.nodes)
        far += sum(far_tokens(plans, batch, phase, 4) for phase in grids)
        near += sum(far_tokens(placed, batch, phase, 4) for phase in grids)
    assert near < 0.75 * far


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
    """No row overflows, and no rank is loaded beyond what it may be."""
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
        moved = placed[phase]
        np.testing.assert_array_equal(moved.span[moved.microbatch], span)
        assert (moved.rank % span == 0).all()
        cost = item_costs(spec.phases[phase], batch.phases[phase])
        ranks = spec.phases[phase].ranks
        before, after = (
            part_costs(plan, cost, ranks).sum(axis=0) for plan in (plans[phase], moved)
        )
        floor = max(before.sum() / ranks, (cost / span).max(initial=0))
        allowed = floor * (1 + 1 / PLACEMENT_SEARCH.margin) + moved.microbatches
        assert after.max() <= max(before.max() + moved.microbatches, allowed)
    phases, routes = plan_routes(placed, batch, spec)
    validate(StepPlan(phases, routes), batch, spec)


@pytest.mark.parametrize("span", [2, 4])
def test_shared_rows_run_near_the_ranks_that_read_them(make, span):
    """Most of the tokens stay in their node that can with any permutations of groups, which may load ranks unevenly."""
    stays = 0
    left = 0
    best = 0
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
            goal = plans["language"].rank[items.example] // 4
            stays += int(items.tokens[placed[phase].rank // 4 == goal].sum())
            left += int(items.tokens[plans[phase].rank // 4 == goal].sum())
            for microbatch in range(plans[phase].microbatches):
                members = plans[phase].microbatch == microbatch
                group = plans[phase].rank[members] // span
                best += max(
                    int(items.tokens[members][node[group] == goal[members]].sum())
                    for node in permuted_nodes(8 // span)
                )
    assert stays > 0.75 * best and stays > 1.2 * left


@pytest.mark.parametrize("spans", [(8,), (4, 1), (1, 2, 4, 8)])
def test_few_tokens_of_shared_rows_leave_their_node(make, spans):
    """As many items as ranks take: rows of groups swap items just as those of ranks do."""
    batch = make.batch(2, 96, longest=256)
    grids = {"vision": (32, 1, 1), "audio": (32, 1, 1)}
    spec = make.with_spans(make.spec(batch, grids, node=8, pool=4000), spans)
    placed = plan_step(batch, spec)
    validate(placed, batch, spec)
    left = plan_step(batch, replace(spec, nodes={}))
    assert any((plan.span > 1).any() for plan in placed.phases.values())

    def between_nodes(plan):
        return sum(
            int(round_.tokens[round_.sender // 8 != round_.receiver // 8].sum())
            for route in plan.routes.values()
            for round_ in route.rounds
        )

    # Rows this small can hardly swap without attending more
    assert between_nodes(placed) < 0.7 * between_nodes(left)


def permuted_nodes(groups):
    """Node, of two, that each group's row might run on."""
    half = np.arange(groups) * 2 // groups
    return [np.array(order) for order in set(itertools.permutations(half.tolist()))]


def test_language_ranks_take_in_media_more_evenly(make):
    unevenness = np.zeros(2)
    for seed in range(5):
        batch = make.batch(seed, 128)
        spec = make.spec(batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, node=4)
        grids = {name: route.grid for name, route in spec.routes.items()}
        dealt, placed = (
            media_tokens(
                batch,
                place_items(batch, spec.phases, grids, "phases", nodes)["language"],
                tuple(grids),
                16,
            )
            for nodes in (None, spec.nodes)
        )
        assert placed.sum() == dealt.sum()
        unevenness += [each.sum(axis=0).std() for each in (dealt, placed)]
    assert unevenness[1] < 0.85 * unevenness[0]


def test_text_alone_stays_where_it_is(make):
    batch = make.batch(0, 64, media=0)
    spec = make.spec(batch, {"vision": (8, 1, 1)}, node=2)
    plans = place_items(batch, spec.phases, {}, "phases")
    placed = place_items(batch, spec.phases, {}, "phases", spec.nodes)
    again = place_items_near(plans, batch, spec.phases, {}, spec.nodes)
    assert again["language"] is plans["language"]
    for column in ("microbatch", "rank", "offset", "segment"):
        expected = getattr(plans["language"], column)
        assert np.array_equal(getattr(placed["language"], column), expected)


def test_rank_totals_hardly_grow(make):
    for seed in range(5):
        batch = make.batch(seed, 64)
        spec = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2, node=2)
        free = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2)
        placed = plan_step(batch, spec).statistics
        left = plan_step(batch, free).statistics
        for phase in ("vision", "audio", "language"):
            # Rounding of costs
            gap = placed[f"{phase}/gap_to_floor"]
            allowed = 1 + 1 / PLACEMENT_SEARCH.margin + 1e-3
            assert gap <= max(left[f"{phase}/gap_to_floor"], allowed)
            waits = max(left[f"{phase}/synchronised"], 1 + 1 / PLACEMENT_SEARCH.margin)
            assert placed[f"{phase}/synchronised"] <= waits + 1e-3
