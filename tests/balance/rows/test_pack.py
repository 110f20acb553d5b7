"""The fillers against the plain double loops that they speed up, and items within rows against the
fewest blocks that they can touch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.arrays import sums_by
from jaxmllm.balance.rows.pack import best_fit, fill_by_cost, first_fit, lay_out

LENGTHS = st.lists(st.integers(1, 30), max_size=40)
ROWS = st.lists(st.integers(10, 60), min_size=1, max_size=12)


def long(values) -> np.ndarray:
    return np.array(values, np.int64)


def plain_fill(order, lengths, costs, capacities, max_segments, choose):
    """Row of each item, in `order`: the row with the least `choose(room, load, capacity, row)` of
    those with room. None where an item fits no row."""
    room = list(capacities)
    load = [0] * len(capacities)
    segments = [0] * len(capacities)
    row_of = [-1] * len(lengths)
    for item in order:
        fitting = [
            r for r in range(len(room)) if room[r] >= lengths[item] and segments[r] < max_segments
        ]
        if not fitting:
            return None
        row = min(fitting, key=lambda r: choose(room[r], load[r], capacities[r], r))
        row_of[item], room[row], load[row], segments[row] = (
            row,
            room[row] - lengths[item],
            load[row] + costs[item],
            segments[row] + 1,
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
    best_fit_rows = plain_fill(
        descending, *arguments, lambda room, load, capacity, row: (room, row)
    )
    first_fit_rows = plain_fill(
        range(len(lengths)), *arguments, lambda room, load, capacity, row: row
    )
    assert same(best_fit(long(lengths), long(capacities), max_segments), best_fit_rows)
    assert same(first_fit(long(lengths), long(capacities), max_segments), first_fit_rows)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 12))
def test_items_go_to_the_lightest_row(costs, rows):
    """Where all rows have one size and room for everything, this is the longest-first rule."""
    capacity = np.full(rows, max(sum(costs), 1))
    row_of = fill_by_cost(long(costs), long(costs), capacity, max(len(costs), 1))
    load = [0] * rows
    for cost in sorted(costs, reverse=True):
        load[load.index(min(load))] += cost
    assert sorted(sums_by(row_of, long(costs), rows)) == sorted(load)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, ROWS, st.integers(1, 6))
def test_filling_never_exceeds_segments(lengths, capacities, max_segments):
    lengths = [min(length, max(capacities)) for length in lengths]
    row_of = fill_by_cost(long(lengths), long(lengths), long(capacities), max_segments)
    if len(lengths) > max_segments * len(capacities):
        assert row_of is None
    elif row_of is not None:
        assert np.bincount(row_of, minlength=1).max(initial=0) <= max_segments
        assert all(lengths[item] <= capacities[row] for item, row in enumerate(row_of))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=30))
def test_rows_are_laid_out_without_gaps(items):
    rows = long([row for row, _ in items])
    lengths = long([length for _, length in items])
    offset, segment = lay_out(rows, lengths)
    for item, row in enumerate(rows):
        earlier_items = [earlier for earlier in range(item) if rows[earlier] == row]
        assert offset[item] == sum(lengths[earlier] for earlier in earlier_items)
        assert segment[item] == len(earlier_items) + 1


def touched(offset, length, block):
    """Number of blocks that hold a slot of each item."""
    return (offset + length - 1) // block - offset // block + 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30),
    st.lists(st.sampled_from([1, 2, 8, 16]), min_size=4, max_size=4),
    st.integers(0, 60),
)
def test_items_lie_apart_in_their_rows_whatever_the_blocks(items, blocks, spare):
    """Items never overlap, and a row is laid out as it would be without the others."""
    rows = long([row for row, _ in items])
    lengths = long([length for _, length in items])
    slots = sums_by(rows, lengths, int(rows.max()) + 1) + spare
    offset, segment = lay_out(rows, lengths, slots, long(blocks))
    for row in np.unique(rows):
        of_row = np.flatnonzero(rows == row)
        single_row = long(np.zeros(len(of_row))), lengths[of_row], slots[row : row + 1]
        assert offset[of_row].tolist() == lay_out(*single_row, long([blocks[row]]))[0].tolist()
        of_row = of_row[np.argsort(offset[of_row])]
        end = offset[of_row] + lengths[of_row]
        assert offset[of_row[0]] >= 0 and end[-1] <= slots[row]
        assert (offset[of_row[1:]] >= end[:-1]).all()
        assert segment[of_row].tolist() == list(range(1, len(of_row) + 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.sampled_from([4, 16]))
def test_items_touch_as_few_blocks_as_by_themselves_where_a_row_has_room(lengths, block):
    lengths = long(lengths)
    rows = np.zeros(len(lengths), np.int64)
    slots = long([block * int((-(-lengths // block)).sum())])
    offset, _ = lay_out(rows, lengths, slots, long([block]))
    assert (touched(offset, lengths, block) == -(-lengths // block)).all()


def test_what_is_left_over_shares_blocks():
    """Without a slot to spare, 5 and 3 end at edges of blocks and only two items share one; in the
    order 5, 4, 3 they touch one block more."""
    lengths = long([5, 4, 3])
    offset, segment = lay_out(np.zeros(3, np.int64), lengths, long([12]), long([4]))
    assert touched(offset, lengths, 4).tolist() == [2, 1, 1]
    assert sorted(segment.tolist()) == [1, 2, 3]
    assert touched(lay_out(np.zeros(3, np.int64), lengths)[0], lengths, 4).tolist() == [2, 2, 1]
