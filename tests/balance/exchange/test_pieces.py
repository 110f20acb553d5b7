"""Cutting items where a rank's share of a row ends, against the owner of every single token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.balance.exchange.pieces import Pieces, Runs, cut
from jaxmllm.balance.exchange.traffic import (
    exchange_ranks,
    media_tokens,
    moving_tokens,
    sequence_of_example,
)

STRETCHES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 40), st.integers(1, 12)), max_size=8
)


@given(STRETCHES)
def test_parts_are_all_places_in_order_and_none_holds_a_multiple_inside(stretches):
    start, amount, size = np.array(stretches, np.int64).reshape(-1, 3).T
    stretch, skipped, places = cut(start, amount, size)
    assert np.array_equal(np.unique(stretch), np.arange(len(start)))  # also those of no places
    for number, (first, count, multiple) in enumerate(stretches):
        parts = np.flatnonzero(stretch == number)
        owners = (first + np.arange(count)) // multiple
        assert len(parts) == max(len(set(owners)), 1)
        cuts = np.flatnonzero(np.diff(owners)) + 1
        assert skipped[parts].tolist() == [0, *cuts]
        assert places[parts].tolist() == np.diff([0, *cuts, count]).tolist()


@given(
    seed=st.integers(0, 1000),
    spans=st.sampled_from([(1,), (2,), (4,), (8,), (1, 2, 4, 8)]),
    grid=st.sampled_from([(8, 1, 1), (4, 2, 1), (4, 1, 2)]),
)
def test_tokens_are_counted_on_the_ranks_that_own_them(make, seed, spans, grid):
    batch = make.batch(seed, 6, longest=128, text=5)
    grids = {"vision": grid, "audio": grid}
    spec = make.with_spans(make.spec(batch, grids), spans)
    plans = {
        name: make.scattered(seed, batch.phases[name], phase) for name, phase in spec.phases.items()
    }
    language = plans["language"]
    ranks = spec.phases["language"].ranks
    arriving = np.zeros((language.microbatches, ranks), np.int64)
    leaving: dict[tuple[int, int], int] = {}
    exchange_grid = make.grid(grid)
    for phase in grids:
        items = batch.phases[phase]
        plan = plans[phase]
        per_token = spec.phases[phase].slots_per_token
        for item, example in enumerate(items.example.tolist()):
            m = plan.microbatch[item]
            n = language.microbatch[example]
            for token in range(items.tokens[item]):
                slot = plan.offset[item] + token * per_token
                source = int(plan.rank[item] + slot // plan.capacity[m])
                slot = language.offset[example] + items.slot[item] + token
                goal = int(language.rank[example] + slot // language.capacity[n])
                arriving[n, goal] += 1
                sender, receiver = exchange_ranks(
                    exchange_grid, np.array([source]), np.array([goal])
                )
                if sender != receiver:
                    pair = int(sender[0]), int(receiver[0])
                    leaving[pair] = leaving.get(pair, 0) + 1
    np.testing.assert_array_equal(media_tokens(batch, language, tuple(grids), ranks), arriving)

    slots_per_token = {phase: spec.phases[phase].slots_per_token for phase in grids}
    encoders = {phase: plans[phase] for phase in grids}
    moves = moving_tokens(encoders, language, batch, exchange_grid, slots_per_token)
    pairs = list(zip(*(column.tolist() for column in moves[:2]), strict=True))
    assert pairs == sorted(pairs) and (moves[2] > 0).all()
    moved: dict[tuple[int, int], int] = {}
    for pair, tokens in zip(pairs, moves[2].tolist(), strict=True):
        moved[pair] = moved.get(pair, 0) + tokens
    assert moved == leaving


def test_in_rows_of_one_rank_items_are_whole(make):
    batch = make.batch(5, 12)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    plans = {
        name: make.scattered(5, batch.phases[name], phase) for name, phase in spec.phases.items()
    }
    items = batch.phases["vision"]
    pieces = Pieces.of(items, plans["language"], sequence_of_example(batch))
    np.testing.assert_array_equal(pieces.item, np.arange(len(items.tokens)))
    np.testing.assert_array_equal(pieces.tokens, items.tokens)
    np.testing.assert_array_equal(pieces.rank, plans["language"].rank[items.example])
    assert not pieces.skipped.any()
    runs = Runs.of(pieces, plans["vision"], 4)
    np.testing.assert_array_equal(runs.piece, np.arange(len(items.tokens)))
    np.testing.assert_array_equal(runs.rank, plans["vision"].rank)
    np.testing.assert_array_equal(runs.start, plans["vision"].offset // 4)
