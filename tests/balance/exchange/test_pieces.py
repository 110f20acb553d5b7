"""Items are cut where one rank's share of a row ends: against the owner of every single token."""

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
    """A stretch of consecutive places is cut at every multiple of its size; the owner of a
    place is the quotient."""
    start, amount, size = np.array(stretches, np.int64).reshape(-1, 3).T
    stretch, skipped, piece_lengths = cut(start, amount, size)
    # A stretch of no places has one empty piece.
    assert np.array_equal(np.unique(stretch), np.arange(len(start)))
    for index, (first_place, place_count, multiple) in enumerate(stretches):
        pieces = np.flatnonzero(stretch == index)
        owners = (first_place + np.arange(place_count)) // multiple
        assert len(pieces) == max(len(set(owners)), 1)
        cuts = np.flatnonzero(np.diff(owners)) + 1
        assert skipped[pieces].tolist() == [0, *cuts]
        assert piece_lengths[pieces].tolist() == np.diff([0, *cuts, place_count]).tolist()


@given(
    seed=st.integers(0, 1000),
    spans=st.sampled_from([(1,), (2,), (4,), (8,), (1, 2, 4, 8)]),
    grid=st.sampled_from([(8, 1, 1), (4, 2, 1), (4, 1, 2)]),
)
def test_tokens_are_counted_on_the_ranks_that_own_them(make, seed, spans, grid):
    """`media_tokens` and `moving_tokens` against a loop over tokens that divides each slot by its
    rank's share of the row."""
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
            microbatch = plan.microbatch[item]
            language_microbatch = language.microbatch[example]
            for token in range(items.tokens[item]):
                slot = plan.offset[item] + token * per_token
                source = int(plan.rank[item] + slot // plan.capacity[microbatch])
                slot = language.offset[example] + items.slot[item] + token
                target = int(
                    language.rank[example] + slot // language.capacity[language_microbatch]
                )
                arriving[language_microbatch, target] += 1
                sender, receiver = exchange_ranks(
                    exchange_grid, np.array([source]), np.array([target])
                )
                if sender != receiver:
                    pair = int(sender[0]), int(receiver[0])
                    leaving[pair] = leaving.get(pair, 0) + 1
    np.testing.assert_array_equal(media_tokens(batch, language, tuple(grids), ranks), arriving)

    slots_per_token = {phase: spec.phases[phase].slots_per_token for phase in grids}
    encoders = {phase: plans[phase] for phase in grids}
    moves = moving_tokens(encoders, language, batch, exchange_grid, slots_per_token)
    pairs = list(zip(*(column.tolist() for column in moves[:2]), strict=True))
    # A pair of exchange ranks may have several entries, in order; summed, they equal the loop's.
    assert pairs == sorted(pairs) and (moves[2] > 0).all()
    moved: dict[tuple[int, int], int] = {}
    for pair, tokens in zip(pairs, moves[2].tolist(), strict=True):
        moved[pair] = moved.get(pair, 0) + tokens
    assert moved == leaving


def test_in_rows_of_one_rank_items_are_whole(make):
    """Where no row is shared, each item is one piece and one run, at the rank and offset
    that the plans give it."""
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
