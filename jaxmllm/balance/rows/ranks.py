"""Dealing the items of a phase to ranks so that the costliest rank costs least: one function for each kind of cost.

    packed_linear              sum of l                            rows without padding, attention negligible
    packed_quadratic           sum of (a l + c l^2)                ... or counted, by segment
    packed                     sum of any costs
    padded                     n times the longest                 every item padded to the longest of its rank
    convolution_transformer    g n longest + sum (a l + c l^2)     a stem that pads before a tower that packs

After OrchMLLM (arXiv 2503.23830); what longest-first leaves uneven is levelled by moves and swaps. Plans of fixed rows
(assign.py) use the same dealing and levelling under the rows' capacities; these functions have no capacities. Integers
only: every host finds the same ranks.
"""

from __future__ import annotations

import heapq

import numpy as np

from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.rows.level import RowState, balance_rows
from jaxmllm.balance.rows.pack import fill_by_cost

LIGHTEST = 16  # ranks that the costliest rank may exchange items with, in `convolution_transformer`


def packed(costs: Longs, ranks: int) -> Longs:
    """Rank of each item [N]; a rank costs the sum of its items. Within 4/3 - 1/(3 ranks) of the optimum.

    Args:
      costs: [N] at least 0, sum below 2**53.

    Raises:
      ValueError: no rank, or a negative cost.
    """
    costs = _checked(costs, ranks)
    room = np.full(ranks, max(int(costs.sum()), 1), np.int64)
    rank = fill_by_cost(costs, costs, room, max(len(costs), 1))
    assert rank is not None, "every rank has room for all"
    filling = RowState.from_limits(rank, (np.zeros_like(costs), np.ones_like(costs), costs), (0, len(costs), 0), ranks)
    balance_rows(filling, [np.arange(ranks)], ranks)
    return filling.row_of


def packed_linear(lengths: Longs, ranks: int) -> Longs:
    """Rank of each item [N]; a rank costs the sum of its lengths [N]. Errors as for `packed`."""
    return packed(lengths, ranks)


def packed_quadratic(lengths: Longs, ranks: int, linear: int, quadratic: int) -> Longs:
    """Rank of each item [N]; a rank costs the sum of linear * l + quadratic * l**2. Errors as for `packed`."""
    lengths = _checked(lengths, ranks)
    return packed(linear * lengths + quadratic * lengths**2, ranks)


def padded(costs: Longs, ranks: int) -> Longs:
    """Rank of each item [N]; a rank costs its number of items times its costliest: the optimum.

    In some optimum every rank has neighbours by cost, so the least bound is found by bisection: under a bound, ranks
    take as many as they can in descending order.

    Args:
      costs: [N] what an item would cost alone: its length, or any ascending function of it.

    Raises:
      ValueError: no rank, or a negative cost.
    """
    costs = _checked(costs, ranks)
    order = np.argsort(-costs, kind="stable")
    descending = costs[order].tolist()
    low, high = max(descending, default=0), len(costs) * max(descending, default=0)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(descending, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    rank = np.empty(len(costs), np.int64)
    rank[order] = np.repeat(np.arange(len(taken := _cuts(descending, high))), taken)
    return rank


def _cuts(descending: list[int], bound: int) -> list[int]:
    """How many items each rank takes, in descending order, when none may cost more than `bound`."""
    taken, done = [], 0
    while done < len(descending):
        longest = descending[done]
        count = min(bound // longest if longest else len(descending), len(descending) - done)
        taken.append(count)
        done += count
    return taken


def convolution_transformer(lengths: Longs, ranks: int, padding: int, linear: int, quadratic: int) -> Longs:
    """Rank of each item [N]; a rank of n items costs padding * n * longest + sum of (linear * l + quadratic * l**2).

    Each item by descending length to the rank that then costs least; after that single moves and swaps out of the
    costliest rank into one of the `LIGHTEST` as long as its cost falls.

    Args:
      lengths: [N] at least 0.

    Raises:
      ValueError: no rank, or a negative length.
    """
    lengths = _checked(lengths, ranks)
    own = linear * lengths + quadratic * lengths**2
    rank = np.empty(len(lengths), np.int64)
    # Members of a rank come in descending order: one more costs it `padding * longest` beside its own cost.
    used: list[tuple[int, int, int]] = []  # (cost of the rank and of padding one more item, rank, longest)
    unused = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        fresh = padding * int(lengths[item])
        if unused < ranks and (not used or fresh < used[0][0]):
            number, longest, before = unused, int(lengths[item]), fresh
            unused += 1
        else:
            before, number, longest = heapq.heappop(used)
        rank[item] = number
        heapq.heappush(used, (before + int(own[item]) + padding * longest, number, longest))
    if ranks == 1 or not len(lengths):
        return rank
    for _ in range(len(lengths)):
        if not _lighten(rank, lengths, own, ranks, padding):
            break
    return rank


def _lighten(rank: Longs, lengths: Longs, own: Longs, ranks: int, padding: int) -> bool:
    """The one move or swap out of the costliest rank that lowers the greater cost of the two most; False if none."""
    count, work = np.bincount(rank, minlength=ranks), sums_by(rank, own, ranks)
    longest = np.zeros(ranks, np.int64)
    np.maximum.at(longest, rank, lengths)
    cost = padding * count * longest + work
    by_cost = np.argsort(cost, kind="stable")
    worst, light = by_cost[-1], by_cost[:-1][:LIGHTEST]
    theirs = np.flatnonzero(np.isin(rank, light))
    their = rank[theirs]
    rest_theirs = np.array([_longest_without(lengths[rank == rank[item]], lengths[item]) for item in theirs], np.int64)
    best = int(cost[worst])
    change: tuple[int, int, int | None] | None = None
    ours = np.flatnonzero(rank == worst)
    for item in ours.tolist():
        size, spent, rest = lengths[item], own[item], _longest_without(lengths[ours], lengths[item])
        left = padding * (count[worst] - 1) * rest + work[worst] - spent
        moved = padding * (count[light] + 1) * np.maximum(longest[light], size) + work[light] + spent
        greater = np.maximum(moved, left)
        if greater.min() < best:
            best, change = int(greater.min()), (item, int(light[greater.argmin()]), None)
        if not len(theirs):
            continue
        here = padding * count[worst] * np.maximum(rest, lengths[theirs]) + work[worst] - spent + own[theirs]
        there = padding * count[their] * np.maximum(rest_theirs, size) + work[their] - own[theirs] + spent
        greater = np.maximum(here, there)
        if greater.min() < best:
            other = int(greater.argmin())
            best, change = int(greater.min()), (item, int(their[other]), int(theirs[other]))
    if change is None:
        return False
    item, goal, other_item = change
    rank[item] = goal
    if other_item is not None:
        rank[other_item] = worst
    return True


def _longest_without(lengths: Longs, length: int | np.integer) -> int:
    """The greatest of `lengths` after one occurrence of `length` is taken out."""
    greatest = int(lengths.max())
    if length < greatest or (lengths == greatest).sum() > 1:
        return greatest
    return int(lengths[lengths < greatest].max(initial=0))


def _checked(costs: Longs, ranks: int) -> Longs:
    costs = np.asarray(costs, np.int64)
    if ranks < 1:
        raise ValueError(f"items cannot be dealt to {ranks} ranks: there must be at least one")
    if (costs < 0).any():
        raise ValueError(f"item {int(costs.argmin())} has the negative length or cost {int(costs.min())}")
    return costs
