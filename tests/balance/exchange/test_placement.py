"""Node-wise placement: rows only change ranks inside their microbatch, and tokens come nearer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.exchange import row_ranks
from jaxmllm.balance.exchange.placement import place_rows
from jaxmllm.balance.exchange.row_ranks import PLACEMENT_SEARCH
from jaxmllm.balance.exchange.traffic import media_tokens
from jaxmllm.balance.step_plan import place_items, plan_step


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
    far, near = 0, 0
    for seed in range(3):
        batch = make.batch(seed, 128)
        spec = make.spec(batch, {"vision": (16, 1, 1), "audio": (16, 1, 1)}, node=4)
        grids = {name: route.grid for name, route in spec.routes.items()}
        plans = place_items(batch, spec.phases, grids, "phases")
        placed = place_items(batch, spec.phases, grids, "phases", spec.nodes)
        far += sum(far_tokens(plans, batch, phase, 4) for phase in grids)
        near += sum(far_tokens(placed, batch, phase, 4) for phase in grids)
    assert near < 0.75 * far


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


def test_rank_totals_hardly_grow(make):
    for seed in range(5):
        batch = make.batch(seed, 64)
        spec = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2, node=2)
        free = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2)
        placed, left = plan_step(batch, spec).statistics, plan_step(batch, free).statistics
        for phase in ("vision", "audio", "language"):
            # Rounding of costs
            gap, allowed = placed[f"{phase}/gap_to_floor"], 1 + 1 / PLACEMENT_SEARCH.margin + 1e-3
            assert gap <= max(left[f"{phase}/gap_to_floor"], allowed)
            waits = max(left[f"{phase}/synchronised"], 1 + 1 / PLACEMENT_SEARCH.margin)
            assert placed[f"{phase}/synchronised"] <= waits + 1e-3
