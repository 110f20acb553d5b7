"""Exchanging items between rows: sums stay true, capacities hold, and nothing gets slower."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.level import Filling, even_out, level, relieve
from jaxmllm.balance.pack import sums_by

ITEMS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 30)), min_size=1, max_size=60)


def filling_of(items, slack: int, max_segments: int = 60) -> tuple[Filling, np.ndarray]:
    """Twelve rows, each with `slack` slots more than it uses, or fewer."""
    row_of, length = np.array(items, np.int64).T
    capacity = np.maximum(sums_by(row_of, length, 12) + slack, length.max())
    return Filling.of(row_of, length, capacity, max_segments), capacity


def check(filling: Filling, capacity: np.ndarray, max_segments: int = 60) -> None:
    assert filling.room.tolist() == (capacity - sums_by(filling.row_of, filling.length, 12)).tolist()
    assert filling.spare.tolist() == (max_segments - np.bincount(filling.row_of, minlength=12)).tolist()
    assert (filling.spare >= 0).all()


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(0, 20), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_levelling_keeps_rows_and_never_makes_ranks_wait_longer(items, slack, ranks):
    filling, capacity = filling_of(items, slack, most := 60)
    cost = 3 * filling.length + filling.length**2
    classes = [np.arange(12)] if ranks == 12 else [np.arange(0, 12 - ranks), np.arange(12 - ranks, 12)]

    def waits() -> int:
        load = sums_by(filling.row_of, cost, 12)
        return sum(int(np.sort(load[rows])[::-1].reshape(-1, ranks)[:, 0].sum()) for rows in classes)

    before = waits()
    level(filling, cost, classes, ranks)
    check(filling, capacity, most)
    assert (filling.room >= 0).all()
    assert waits() <= before


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(-20, 5), st.sampled_from([8, 60]), st.booleans())
def test_relieving_tells_the_truth(items, slack, max_segments, search):
    if np.bincount([row for row, _ in items]).max() > max_segments:
        return
    filling, capacity = filling_of(items, slack, max_segments)
    before = -filling.room.min()
    assert relieve(filling, search) == bool((filling.room >= 0).all())
    check(filling, capacity, max_segments)
    assert -filling.room.min() <= max(before, 0)


def test_an_overflow_that_one_swap_cures():
    filling = Filling.of(np.array([0, 0, 1, 1]), np.array([6, 5, 4, 3]), np.array([10, 10]), 2)
    assert relieve(filling)
    assert filling.room.min() >= 0 and filling.spare.tolist() == [0, 0]


def test_a_search_finds_what_single_swaps_do_not():
    """The only way is both against both: rows of 5 + 3 and 1 + 8."""
    filling = Filling.of(np.array([0, 0, 1, 1]), np.array([1, 8, 5, 3]), np.array([8, 9]), 2)
    assert not relieve(filling)
    assert relieve(filling, search=True)
    assert filling.room.tolist() == [0, 0]


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(0, 20), st.integers(0, 300), st.sampled_from([1, 2, 3, 4, 6, 12]), st.randoms())
def test_evening_out_keeps_slots_and_costs(items, slack, spare_cost, ranks, random):
    filling, capacity = filling_of(items, slack)
    cost, weight = filling.length**2, np.array([random.randrange(50) for _ in items], np.int64)
    allowed = sums_by(filling.row_of, cost, 12) + spare_cost
    left = np.full(12, spare_cost)

    def unevenness() -> int:
        return int((sums_by(filling.row_of % ranks, weight, ranks) ** 2).sum())

    before = unevenness()
    even_out(filling, weight, cost, left, ranks)
    check(filling, capacity)
    assert (filling.room >= 0).all() and (left >= 0).all()
    assert left.tolist() == (allowed - sums_by(filling.row_of, cost, 12)).tolist()
    assert unevenness() <= before


def test_full_rows_trade_cost_without_slots():
    """No single swap fits, but 8 against 5 and, for the slots, 5 against 2 does: both rows become 8 5 5 2."""
    length = np.array([8, 8, 2, 2, 5, 5, 5, 5])
    filling = Filling.of(np.repeat([0, 1], 4), length, np.array([20, 20]), 10)
    level(filling, length**2, [np.arange(2)], 2)
    assert filling.room.tolist() == [0, 0]
    assert sums_by(filling.row_of, length**2, 2).tolist() == [118, 118]
