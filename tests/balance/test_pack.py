"""The fillers against the plain double loops they speed up, and against the optimum where it can be searched."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.pack import best_fit, first_fit, lay_out, longest_first

LENGTHS = st.lists(st.integers(1, 30), max_size=40)
ROWS = st.lists(st.integers(10, 60), min_size=1, max_size=12)


def long(values) -> np.ndarray:
    return np.array(values, np.int64)


def plain_fill(order, lengths, costs, capacities, max_segments, choose):
    """Row of each item when `choose(row's room, load, capacity, row)` is least among the rows with room."""
    room, load, count, row_of = list(capacities), [0] * len(capacities), [0] * len(capacities), [-1] * len(lengths)
    for item in order:
        fitting = [r for r in range(len(room)) if room[r] >= lengths[item] and count[r] < max_segments]
        if not fitting:
            return None
        row = min(fitting, key=lambda r: choose(room[r], load[r], capacities[r], r))
        row_of[item], room[row], load[row], count[row] = (
            row,
            room[row] - lengths[item],
            load[row] + costs[item],
            count[row] + 1,
        )
    return row_of


def same(found, wanted) -> bool:
    return (found is None) == (wanted is None) and (found is None or found.tolist() == wanted)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, ROWS, st.integers(1, 6))
def test_fillers_equal_the_plain_loops(lengths, capacities, max_segments):
    costs = [7 * n + n * n for n in lengths]
    descending = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    arguments = (lengths, costs, capacities, max_segments)
    largest = max(capacities)
    light = plain_fill(descending, *arguments, lambda room, load, capacity, row: (load * largest // capacity, row))
    tight = plain_fill(descending, *arguments, lambda room, load, capacity, row: (room, row))
    first = plain_fill(range(len(lengths)), *arguments, lambda room, load, capacity, row: row)
    assert same(longest_first(long(lengths), long(costs), long(capacities), max_segments), light)
    assert same(best_fit(long(lengths), long(capacities), max_segments), tight)
    assert same(first_fit(long(lengths), long(capacities), max_segments), first)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_keeps_its_bound(costs, ranks):
    """max load <= (4/3 - 1/(3 ranks)) * optimum when rows never overflow."""
    rows = np.full(ranks, sum(costs), np.int64)
    row_of = longest_first(long(costs), long(costs), rows, len(costs))
    optimum = min(
        max(sum(c for c, r in zip(costs, choice, strict=True) if r == rank) for rank in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(costs))
    )
    assert 3 * ranks * np.bincount(row_of, weights=costs).max() <= (4 * ranks - 1) * optimum


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=30))
def test_rows_are_laid_out_without_gaps(items):
    rows, lengths = long([row for row, _ in items]), long([length for _, length in items])
    offset, segment = lay_out(rows, lengths)
    for item, row in enumerate(rows):
        earlier = [other for other in range(item) if rows[other] == row]
        assert offset[item] == sum(lengths[other] for other in earlier)
        assert segment[item] == len(earlier) + 1
