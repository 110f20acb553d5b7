"""Levelling the rows of a filling: pairs of a heavy and a light row exchange the items that bring them nearest.

    heavy [ a . b . ]  --a, b-->  light [ . . c . ]    of all choices of up to two items of each row, the one whose
          [ . c . . ]  <---c---         [ . a b . ]    difference is nearest to half the gap and that both can take

Many pairs meet in a sweep, the heaviest row with the lightest and so on, and other pairs in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import INT64_MAX, Longs, sums_by
from jaxmllm.balance.compiled import compiled

SLOTS, SEGMENTS, COST = range(3)  # amounts of a `RowState`

SWEEPS = 14  # at most
DIRECT = 2  # of them between all rows; after that only rows above the mean trade
OFFERED = 10  # items of a row among which those that it trades are chosen
TURN = 7  # places by which partners change from sweep to sweep: those of the last may be full
EVEN = 100  # the slowest rows need not be nearer to the mean than one part in so many
GAIN = 1024  # sweeps that gain less than one part in so many ...
PATIENCE = 6  # ... may be this many in a row
SEARCHED = 24  # further sweeps of a search for the last overflowing rows
EVENING = 4  # sweeps that even out a further weight, at least one a microbatch ...
ROUGHLY = 8  # ... between ranks that differ by more than one part in so many of the mean

# All choices of up to two of a row's items, which count from 1; 0 is no item. Those of n items are the first.
ONE = np.array([0] + [one for other in range(1, OFFERED + 1) for one in range(other)])
OTHER = np.array([0] + [other for other in range(1, OFFERED + 1) for one in range(other)])


class RowState(NamedTuple):
    """Which row every item lies in, and what rows can still take. Of K amounts the first are slots, segments, cost.

    Item N is nothing: it takes nothing, and lies nowhere.
    """

    row_of: Longs  # [N]
    amounts: Longs  # [K, N + 1] what each item takes
    remaining: Longs  # [K, rows]; below 0 where a row has too much

    @classmethod
    def from_limits(cls, row_of: Longs, amounts: Sequence[Longs], most: Sequence[Longs | int], rows: int) -> RowState:
        """From what each item takes, and the most that rows may hold: K of [N], K of [rows]."""
        left = [limit - sums_by(row_of, amount, rows) for amount, limit in zip(amounts, most, strict=True)]
        return cls(row_of.copy(), np.stack([np.append(amount, 0) for amount in amounts]), np.stack(left))

    def in_order(self, kind: int) -> Longs:
        """[N] items by the amount they take."""
        return np.argsort(self.amounts[kind, :-1], kind="stable")


def fix_overflow(filling: RowState, search: bool = False) -> bool:
    """Exchange items until no row overflows; returns whether that succeeded.

    Args:
      filling: changed in place.
      search: go on where a sweep gains nothing, which takes long.
    """
    room = filling.remaining[SLOTS]
    if room.sum() < 0:  # exchanging items does not change it
        return False
    order = filling.in_order(SLOTS)
    for sweep in range(SWEEPS + (SEARCHED if search else 0)):
        rows = np.argsort(room, kind="stable")
        over = min(int(np.searchsorted(room[rows], 0)), len(rows) // 2)
        if not over:
            break
        light = np.roll(rows[::-1], -sweep)[:over]
        if not _trade(filling, order, rows[:over], light, sweep, SLOTS, limits=COST) and not search:
            break
    return not (room < 0).any()


def balance_rows(filling: RowState, classes: list[Longs], ranks: int) -> None:
    """Make the rows that run together cost alike, without overflow.

    Args:
      filling: without overflow; changed in place.
      classes: rows of one capacity; of those of a class, `ranks` of like cost run together.
    """
    order, half = filling.in_order(COST), ranks // 2
    load = -filling.remaining[COST]
    waits, patience = INT64_MAX, PATIENCE
    for sweep in range(SWEEPS):
        ordered = np.concatenate([rows[np.argsort(-load[rows], kind="stable")].reshape(-1, ranks) for rows in classes])
        slowest = int(load[ordered[:, 0]].sum())
        mean = load[ordered].sum(axis=1, keepdims=True) // ranks
        patience = PATIENCE if (waits - slowest) * GAIN > slowest else patience - 1
        if slowest <= int((mean + mean // EVEN).sum()) or not patience:
            return
        waits = slowest
        heavy, light = ordered[:, :half], np.roll(ordered[:, ranks - half :][:, ::-1], TURN * sweep, axis=1)
        uneven = load[heavy] - load[light] > mean // EVEN
        if sweep >= DIRECT:
            uneven &= load[heavy] > mean + mean // (2 * EVEN)
        if not uneven.any():
            return
        _trade(filling, order, heavy[uneven], light[uneven], sweep, COST, limits=COST)
        load = -filling.remaining[COST]


def balance_ranks(filling: RowState, ranks: int) -> None:
    """Make the ranks' totals of the last amount more alike: rows that run together trade items of like cost.

    Args:
      filling: of rows microbatch * R + rank, without overflow, and with what each row may still cost; changed in place.
    """
    weight, order = len(filling.amounts) - 1, filling.in_order(COST)
    half, microbatches = ranks // 2, filling.remaining.shape[1] // ranks
    load = -filling.remaining[weight].reshape(microbatches, ranks).sum(axis=0)
    for sweep in range(max(EVENING, microbatches)):
        by_load = np.argsort(-load, kind="stable")
        heavy, light = by_load[:half], np.roll(by_load[ranks - half :][::-1], TURN * sweep)
        uneven = (load[heavy] - load[light]) * ROUGHLY * ranks > load.sum()
        if not uneven.any():
            return
        filling.remaining[weight] = np.tile(-load, microbatches)  # of the rank, at each of its rows
        first = sweep % microbatches * ranks
        _trade(filling, order, first + heavy[uneven], first + light[uneven], sweep, weight, limits=weight)
        load = -filling.remaining[weight, first : first + ranks]


def _trade(filling: RowState, order: Longs, heavy: Longs, light: Longs, turn: int, weight: int, limits: int) -> int:
    """One exchange for every pair of rows that gains by it; returns how many do.

    Args:
      order: [N] items; those that a row offers are spread evenly over it, and others every `turn`.
      heavy, light: [pairs] different rows.
      weight: the amount that is to be alike; heavy rows have less left of it.
      limits: of the amounts before this one, but for `weight`, no row may take more than it has left.
    """
    start = np.zeros(filling.remaining.shape[1] + 1, np.int64)
    start[1:] = np.cumsum(np.bincount(filling.row_of, minlength=len(start) - 1))
    return _trade_pairs(filling, order, start, heavy, light, turn, weight, limits)


@compiled
def _trade_pairs(
    filling: RowState, order: Longs, start: Longs, heavy: Longs, light: Longs, turn: int, weight: int, limits: int
) -> int:
    """`_trade`; the items of row r are those from start[r] on in a list by row."""
    row_of, amounts, left = filling
    by_row, free = np.empty(len(order), np.int64), start.copy()
    for item in order:
        by_row[free[row_of[item]]] = item
        free[row_of[item]] += 1
    offered = np.full((2, OFFERED + 1), len(row_of))
    weights, choices = np.empty((2, len(ONE)), np.int64), np.empty(2, np.int64)
    gained = 0
    for pair in range(len(heavy)):
        rows = heavy[pair], light[pair]
        for side in range(2):
            count = _offer(offered[side], by_row[start[rows[side]] : start[rows[side] + 1]], turn)
            choices[side] = 1 + count * (count + 1) // 2
            for choice in range(choices[side]):
                one, other = offered[side, ONE[choice]], offered[side, OTHER[choice]]
                weights[side, choice] = amounts[weight, one] + amounts[weight, other]
        gap = left[weight, rows[1]] - left[weight, rows[0]]
        least, best = gap, (0, 0)
        for given in range(choices[0]):
            for taken in range(choices[1]):
                passed = weights[0, given] - weights[1, taken]
                miss = abs(2 * passed - gap)
                if miss < least and _fits(filling, offered, rows, given, taken, weight, limits):
                    least, best = miss, (given, taken)
        gained += least < gap
        for side in range(2):
            for item in (offered[side, ONE[best[side]]], offered[side, OTHER[best[side]]]):
                if item < len(row_of):
                    row_of[item] = rows[1 - side]
                    left[:, rows[side]] += amounts[:, item]
                    left[:, rows[1 - side]] -= amounts[:, item]
    return gained


@compiled
def _offer(offered: Longs, items: Longs, turn: int) -> int:
    """Put items of a row into `offered` from 1 on: all, or some evenly spread; returns how many."""
    many, count = len(items), min(len(items), OFFERED)
    for number in range(count):
        offered[number + 1] = items[number if many <= OFFERED else (number * many + turn % many) // OFFERED]
    return count


@compiled
def _fits(
    filling: RowState, offered: Longs, rows: tuple[int, int], given: int, taken: int, weight: int, limits: int
) -> bool:
    """Whether both rows can take what they would get; a row that has too much already may get less."""
    amounts, left = filling.amounts, filling.remaining
    for kind in range(limits):
        more = amounts[kind, offered[0, ONE[given]]] + amounts[kind, offered[0, OTHER[given]]]
        more -= amounts[kind, offered[1, ONE[taken]]] + amounts[kind, offered[1, OTHER[taken]]]
        if kind != weight and (more > max(left[kind, rows[1]], 0) or -more > max(left[kind, rows[0]], 0)):
            return False
    return True
