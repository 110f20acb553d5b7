"""Swapping items between rows: the running sums stay true, capacities hold, and
no step takes longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.arrays import sums_by
from jaxmllm.balance.rows.level import (
    ATTENTION,
    COST,
    SEGMENTS,
    SLOTS,
    SWAP_SEARCH,
    RowsByClass,
    RowState,
    _swap_items,
    balance_attention,
    balance_ranks,
    balance_rows,
    fix_overflow,
)

ITEMS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 30)), min_size=1, max_size=60)


def state_of(items, slack: int, max_segments: int = 60) -> tuple[RowState, np.ndarray]:
    """Twelve rows, each with `slack` slots more than its items use (fewer if negative), but room
    for the longest item."""
    row_of, length = np.array(items, np.int64).T
    capacity = np.maximum(sums_by(row_of, length, 12) + slack, length.max())
    return state_with(row_of, length, capacity, max_segments, 3 * length + length**2), capacity


def state_with(row_of, length, capacity, max_segments: int, cost=None, most_cost=0) -> RowState:
    """A row state of given capacities, where the cost of an item is its length
    unless told otherwise."""
    row_of = np.array(row_of, np.int64)
    length = np.array(length, np.int64)
    cost = length if cost is None else cost
    amounts = (length, np.ones_like(length), cost)
    limits = (np.array(capacity), max_segments, most_cost)
    return RowState.from_limits(row_of, amounts, limits, len(capacity))


def check(state: RowState, capacity: np.ndarray, max_segments: int = 60) -> None:
    """What each row has left is its limit minus the sum over its items, computed anew."""
    limits = np.stack([capacity, np.full(12, max_segments), np.zeros(12, np.int64)])
    for limit, amount, remaining in zip(limits, state.amounts, state.remaining, strict=True):
        assert remaining.tolist() == (limit - sums_by(state.row_of, amount[:-1], 12)).tolist()
    assert (state.remaining[SEGMENTS] >= 0).all()


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(0, 20), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_balancing_rows_never_makes_ranks_wait_longer(items, slack, ranks):
    """Ranks wait for the costliest row of each microbatch, where a microbatch has `ranks`
    rows of similar cost."""
    state, capacity = state_of(items, slack, max_segments := 60)
    classes = (
        [np.arange(12)] if ranks == 12 else [np.arange(0, 12 - ranks), np.arange(12 - ranks, 12)]
    )

    def waits() -> int:
        load = sums_by(state.row_of, state.amounts[COST, :-1], 12)
        return sum(
            int(np.sort(load[rows])[::-1].reshape(-1, ranks)[:, 0].sum()) for rows in classes
        )

    waits_before = waits()
    balance_rows(state, RowsByClass(classes, [1] * len(classes), ranks))
    check(state, capacity, max_segments)
    assert (state.remaining[SLOTS] >= 0).all()
    assert waits() <= waits_before


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(0, 20))
def test_balancing_attention_leaves_slots_and_the_costliest_row(items, slack):
    """Attention is levelled within capacities, and the costliest row grows by at
    most 1/128 over the mean."""
    row_of, length = np.array(items, np.int64).T
    capacity = np.maximum(sums_by(row_of, length, 12) + slack, length.max())
    attention = length**2
    amounts = (length, np.ones_like(length), 3 * length + attention, attention)
    state = RowState.from_limits(row_of, amounts, (capacity, 60, 0, 0), 12)
    cost = sums_by(row_of, amounts[COST], 12)
    most_cost = max(int(cost.max()), int(cost.sum()) // 12 * 129 // 128)
    most_attention = sums_by(row_of, attention, 12).max()

    balance_attention(state, RowsByClass([np.arange(12)], [1], 12))

    assert (sums_by(state.row_of, length, 12) <= capacity).all()
    assert sums_by(state.row_of, amounts[COST], 12).max() <= most_cost
    assert sums_by(state.row_of, attention, 12).max() <= most_attention
    assert (-state.remaining[ATTENTION] == sums_by(state.row_of, attention, 12)).all()


def test_rows_of_equal_cost_come_to_attend_equally():
    """Two rows cost the same, but one holds the long items, and the other leaves slots empty."""
    row_of = np.array([0, 0, 1, 1])
    length = np.array([20, 20, 2, 2])
    attention = length**2
    amounts = (length, np.ones_like(length), np.full(4, 1000), attention)
    state = RowState.from_limits(row_of, amounts, (np.array([40, 40]), 60, 0, 0), 2)

    balance_attention(state, RowsByClass([np.arange(2)], [1], 2))

    assert sums_by(state.row_of, attention, 2).tolist() == [404, 404]


@settings(max_examples=100, deadline=None)
@given(ITEMS, st.integers(0, 20), st.sampled_from([(4, 2), (2, 1), (4, 1)]))
def test_rows_of_several_spans_swap_within_their_class(items, slack, spans):
    """On four ranks, rows 0 to 3 have the first span and the other rows the second."""
    state, capacity = state_of(items, slack)
    classes = [np.arange(4), np.arange(4, 12)]

    def waits() -> list[int]:
        load = sums_by(state.row_of, state.amounts[COST, :-1], 12)
        return [
            int((-(-np.sort(load[rows])[::-1].reshape(-1, 4 // span)[:, 0] // span)).sum())
            for rows, span in zip(classes, spans, strict=True)
        ]

    waits_before = waits()
    in_first_class = state.row_of < 4
    balance_rows(state, RowsByClass(classes, spans, 4))
    check(state, capacity)
    assert ((state.row_of < 4) == in_first_class).all()
    assert (state.remaining[SLOTS] >= 0).all()
    assert sum(waits()) <= sum(waits_before)


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(-20, 5), st.sampled_from([8, 60]), st.booleans())
def test_fixing_overflow_tells_the_truth(items, slack, max_segments, search):
    """The returned flag says whether every row fits now, and no row overflows by more than
    the worst did before."""
    if np.bincount([row for row, _ in items]).max() > max_segments:
        return
    state, capacity = state_of(items, slack, max_segments)
    worst_overflow = -state.remaining[SLOTS].min()
    assert fix_overflow(state, search) == bool((state.remaining[SLOTS] >= 0).all())
    check(state, capacity, max_segments)
    assert -state.remaining[SLOTS].min() <= max(worst_overflow, 0)


def test_an_overflow_that_one_swap_cures():
    """Rows of 11 and 7 slots, each with room for 10."""
    state = state_with([0, 0, 1, 1], [6, 5, 4, 3], [10, 10], 2)
    assert fix_overflow(state)
    assert state.remaining[SLOTS].min() >= 0 and state.remaining[SEGMENTS].tolist() == [0, 0]


def test_an_overflow_that_only_two_against_two_cure():
    """Rows of 9 and 8 slots with room for 8 and 9: the only way is to
    exchange both items for both."""
    state = state_with([0, 0, 1, 1], [1, 8, 5, 3], [8, 9], 2)
    assert fix_overflow(state)
    assert state.remaining[SLOTS].tolist() == [0, 0]


@pytest.mark.parametrize("search", [False, True])
def test_no_row_passes_items_in_two_swaps_at_once(search):
    """If a row took part in two swaps at once, its recorded remainder would differ from
    what its items leave."""
    random = np.random.default_rng(0)
    for _ in range(400):
        rows = int(random.integers(3, 9))
        length = random.integers(1, 30, int(random.integers(2 * rows, 6 * rows)))
        capacity = np.full(rows, -(-length.sum() // rows) + int(random.integers(0, 3)))
        row_of = random.integers(0, rows, len(length))
        state = state_with(row_of.tolist(), length.tolist(), capacity.tolist(), 100)
        fix_overflow(state, search)
        expected = capacity - np.bincount(state.row_of, weights=length, minlength=rows).astype(int)
        assert state.remaining[SLOTS].tolist() == expected.tolist()


def test_a_search_continues_where_a_sweep_finds_nothing():
    """Row 0 first meets row 3, which has the most room but no item to give for the 6; the search
    then tries row 2, which has one."""
    items = [(0, 6), (0, 6), (1, 9), (2, 5), (2, 4), (3, 7)]
    row_of, length = zip(*items, strict=True)
    arguments = row_of, length, [11, 9, 10, 9], 2
    assert not fix_overflow(state_with(*arguments))
    assert fix_overflow(state_with(*arguments), search=True)


def slow_fix_overflow(state: RowState, search: bool) -> bool:
    """`fix_overflow`, with the pairs of every sweep written out in numpy."""
    room = state.remaining[SLOTS]
    if room.sum() < 0:
        return False
    for sweep in range(SWAP_SEARCH.sweeps + search * SWAP_SEARCH.further_sweeps):
        rows = np.argsort(room, kind="stable")
        overflowing = min(int((room < 0).sum()), len(rows) // 2)
        if not overflowing:
            break
        heavy = rows[:overflowing]
        light = np.roll(rows[::-1], -sweep)[:overflowing]
        apart = ~np.isin(light, heavy)
        order = state.in_order(SLOTS)
        pairs = heavy[apart], light[apart]
        swaps = _swap_items(state, order, *pairs, sweep, SLOTS, limited=COST)
        if not swaps and not search:
            break
    return not (room < 0).any()


@settings(max_examples=100, deadline=None)
@given(ITEMS, st.integers(-3, 8), st.integers(3, 60), st.booleans())
def test_an_overflow_is_fixed_by_the_swaps_of_a_plain_loop(items, slack, max_segments, search):
    states = [state_of(items, slack, max_segments)[0] for _ in range(2)]
    if (states[0].remaining[SEGMENTS] < 0).any():
        return
    assert fix_overflow(states[0], search) == slow_fix_overflow(states[1], search)
    assert states[0].row_of.tolist() == states[1].row_of.tolist()
    assert states[0].remaining.tolist() == states[1].remaining.tolist()


@settings(max_examples=200, deadline=None)
@given(
    ITEMS,
    st.integers(0, 20),
    st.integers(0, 300),
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.randoms(),
)
def test_balancing_ranks_keeps_slots_and_costs(items, slack, spare_cost, ranks, random):
    """Rows exchange items so that the weights of ranks become more even, within the slots, segments
    and costs of each row."""
    row_of, length = np.array(items, np.int64).T
    cost = length**2
    weight = np.array([random.randrange(50) for _ in items], np.int64)
    capacity = sums_by(row_of, length, 12) + slack
    allowed = sums_by(row_of, cost, 12) + spare_cost
    amounts = length, np.ones_like(length), cost, weight
    state = RowState.from_limits(row_of, amounts, (capacity, 60, allowed, 0), 12)

    def unevenness() -> int:
        return int((sums_by(state.row_of % ranks, weight, ranks) ** 2).sum())

    unevenness_before = unevenness()
    balance_ranks(state, ranks)
    for limit, amount, remaining in zip(
        (capacity, 60, allowed), amounts, state.remaining, strict=False
    ):
        assert remaining.tolist() == (limit - sums_by(state.row_of, amount, 12)).tolist()
        assert (remaining >= 0).all()
    assert unevenness() <= unevenness_before


def test_full_rows_trade_cost_without_slots():
    """No single swap fits. 8 against 5 and, to even out the slots, 5 against 2 does:
    both rows become 8 5 5 2."""
    length = np.array([8, 8, 2, 2, 5, 5, 5, 5])
    state = state_with(np.repeat([0, 1], 4), length, [20, 20], 10, length**2)
    balance_rows(state, RowsByClass([np.arange(2)], [1], 2))
    assert state.remaining[SLOTS].tolist() == [0, 0]
    assert sums_by(state.row_of, length**2, 2).tolist() == [118, 118]
