"""Items to ranks: against the optimum over all placements on small cases, and
properties on random ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.rows.ranks import packed, padded

SMALL = st.lists(st.integers(0, 40), min_size=1, max_size=7)
MANY = st.lists(st.integers(0, 1000), max_size=60)
RANKS = st.integers(1, 9)


KINDS = {
    "packed": (packed, sum),
    "padded": (padded, lambda costs: len(costs) * max(costs, default=0)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def slowest(lengths, rank, cost) -> int:
    """Cost of the busiest rank."""
    return max(
        cost([n for n, r in zip(lengths, rank, strict=True) if r == rank_number])
        for rank_number in set(rank)
    )


def run(kind: str, lengths, ranks: int) -> tuple[list[int], int]:
    """The rank of each item and the cost of the busiest rank."""
    assign_ranks, cost = KINDS[kind]
    rank = assign_ranks(np.array(lengths, np.int64), ranks).tolist()
    assert len(rank) == len(lengths) and all(0 <= rank_number < ranks for rank_number in rank)
    return rank, slowest(lengths, rank, cost) if lengths else 0


@kinds
@settings(max_examples=60, deadline=None)
@given(lengths=SMALL, ranks=st.integers(1, 3))
def test_against_the_optimum(kind, lengths, ranks):
    """Padded placement is optimal; placement by sums keeps the bound of longest-
    first, 4/3 - 1/(3 ranks)."""
    cost = KINDS[kind][1]
    optimum = min(
        slowest(lengths, choice, cost)
        for choice in itertools.product(range(ranks), repeat=len(lengths))
    )
    _, slowest_cost = run(kind, lengths, ranks)
    assert slowest_cost >= optimum
    if kind == "padded":
        assert slowest_cost == optimum
    else:
        assert 3 * ranks * slowest_cost <= (4 * ranks - 1) * optimum


@kinds
@settings(max_examples=60, deadline=None)
@given(lengths=MANY, ranks=RANKS, random=st.randoms(use_true_random=False))
def test_order_of_items_does_not_change_the_cost(kind, lengths, ranks, random):
    shuffled = random.sample(lengths, len(lengths))
    assert run(kind, lengths, ranks)[1] == run(kind, shuffled, ranks)[1]


@kinds
def test_equal_items_are_spread_evenly(kind):
    rank, _ = run(kind, [10] * 12, 4)
    assert np.bincount(rank).tolist() == [3, 3, 3, 3]
    assert rank == run(kind, [10] * 12, 4)[0]


@kinds
def test_edge_cases(kind):
    assert run(kind, [], 3)[0] == []
    assert len(set(run(kind, [5, 4, 3], 8)[0])) == 3  # more ranks than items
    rank, _ = run(kind, [1000, 1, 1, 1, 1], 3)  # the giant stays alone
    assert rank.count(rank[0]) == 1
    with pytest.raises(ValueError, match="0 ranks"):
        KINDS[kind][0](np.array([1]), 0)
    with pytest.raises(ValueError, match="item 1 has the negative"):
        KINDS[kind][0](np.array([1, -2]), 2)


@pytest.mark.parametrize("linear, quadratic", [(1, 0), (7, 2)])
@pytest.mark.parametrize("ranks", [8, 64, 500])
def test_many_items_reach_the_floor(ranks, linear, quadratic):
    """32 log-normal items per rank: the busiest rank is within one percent of the mean,
    or of the largest item."""
    lengths = np.random.default_rng(ranks).lognormal(6, 1, 32 * ranks).astype(np.int64)
    costs = linear * lengths + quadratic * lengths**2
    load = np.bincount(packed(costs, ranks), weights=costs, minlength=ranks)
    assert load.max() <= 1.01 * max(load.mean(), costs.max())


def test_swaps_improve_on_longest_first():
    """3 3 2 2 2 on two ranks: longest-first gives one of them 7; a swap of 3
    against 2 makes both 6."""
    assert np.bincount(packed(np.array([3, 3, 2, 2, 2]), 2), weights=[3, 3, 2, 2, 2]).tolist() == [
        6,
        6,
    ]
