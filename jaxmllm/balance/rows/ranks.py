"""Assigning items to ranks without rows, so that the costliest rank costs least.

    packed    a rank costs the sum of its items: examples to ranks, in mode "tokens"
    padded    a rank costs its number of items times its costliest item: the baseline
              `padded, balanced` of the command waste

After OrchMLLM (arXiv 2503.23830). Integers only: every host finds the same ranks.
"""

from __future__ import annotations

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.rows.level import RowsByClass, RowState, balance_rows
from jaxmllm.balance.rows.pack import fill_by_cost


def packed(costs: Longs, ranks: int) -> Longs:
    """Rank of each item [N], where a rank costs the sum of its items. The costliest rank is within
    4/3 - 1/(3 ranks) of the optimum.

    Args:
      costs: [N] at least 0, sum below 2**53.

    Raises:
      ValueError: no rank, or a negative cost.
    """
    costs = _checked_costs(costs, ranks)
    room = np.full(ranks, max(int(costs.sum()), 1), np.int64)
    rank = fill_by_cost(costs, costs, room, max(len(costs), 1))
    assert rank is not None, "every rank has room for all"
    # A rank is treated as a row that runs out of neither slots nor segments.
    amounts = (np.zeros_like(costs), np.ones_like(costs), costs)
    state = RowState.from_limits(rank, amounts, (0, len(costs), 0), ranks)
    balance_rows(state, RowsByClass([np.arange(ranks)], [1], ranks))
    return state.row_of


def padded(costs: Longs, ranks: int) -> Longs:
    """Rank of each item [N], where a rank costs its number of items times its costliest item: the
    optimum.

    In some optimum the items of each rank are neighbours in the order of costs. So bisection finds
    the least bound: under a given bound, ranks take as many items as they can, in descending order.

    Args:
      costs: [N] cost of each item alone: its length, or any ascending function of it.

    Raises:
      ValueError: no rank, or a negative cost.
    """
    costs = _checked_costs(costs, ranks)
    order = np.argsort(-costs, kind="stable")
    descending = costs[order].tolist()
    # No bound can be below the costliest item, and from there on every rank takes at least one
    # item. At the upper bound one rank takes all.
    low = max(descending, default=0)
    high = len(costs) * low
    while low < high:
        middle = (low + high) // 2
        if len(_items_of_ranks(descending, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    items_of_ranks = _items_of_ranks(descending, high)
    rank = np.empty(len(costs), np.int64)
    rank[order] = np.repeat(np.arange(len(items_of_ranks)), items_of_ranks)
    return rank


def _items_of_ranks(descending: list[int], bound: int) -> list[int]:
    """Number of items that each rank takes, in descending order of costs, when no rank may cost
    more than `bound`."""
    items_of_ranks = []
    start = 0
    while start < len(descending):
        costliest = descending[start]
        remaining = len(descending) - start
        items = min(bound // costliest, remaining) if costliest else remaining
        items_of_ranks.append(items)
        start += items
    return items_of_ranks


def _checked_costs(costs: Longs, ranks: int) -> Longs:
    costs = np.asarray(costs, np.int64)
    if ranks < 1:
        raise ValueError(f"items cannot be placed on {ranks} ranks: there must be at least one")
    if (costs < 0).any():
        item = int(costs.argmin())
        raise ValueError(f"item {item} has the negative length or cost {costs[item]}")
    return costs
