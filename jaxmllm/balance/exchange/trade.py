"""Bringing items home: items of like length trade places, so that their tokens need not travel.

    row of rank a [ . i . . . ]  --i-->      row of i's home b [ j . k . . ]     j and k are as long as i together,
                  [ . j k . . ]  <--j, k--                     [ i . . . . ]     and not at home

i may also take along another item of its row. Balancing deals items to rows without regard to where their tokens are
needed; which of two items of like length lies in which row hardly matters to it, but decides what the exchange has to
carry. No trade lets a row overflow or get costlier than it may, so the balance stays.

Letters: N items, R ranks, E ranks of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.compiled import compiled
from jaxmllm.balance.rows.level import COST, RowState

TOGETHER = 6  # an item goes alone or with one of fewer than so many others of its row
PAIRED = 12  # the first items of a row are also tried two at a time, fewer than so many: all pairs would take long


class Places(NamedTuple):
    """Where items may lie and where they would rather.

    The benefit of an item on a rank is its tokens for the right node, and once more for the right block.
    """

    node: Longs  # [R]
    block: Longs  # [R] ranks that share their devices with one language rank, by number
    wanted_node: Longs  # [N]
    wanted_block: Longs  # [N]
    tokens: Longs  # [N]

    def of(self, items: Longs) -> Places:
        """Those of some items."""
        return Places(self.node, self.block, self.wanted_node[items], self.wanted_block[items], self.tokens[items])


class _Away(NamedTuple):
    """The items away from home in each row, as lists, at first those of most tokens first. N is nothing."""

    first: Longs  # [rows]
    after: Longs  # [N] the next one of the same row


def bring_home(filling: RowState, places: Places, worth: int) -> None:
    """Let items trade places until that saves little.

    Args:
      filling: of rows microbatch * R + rank; changed in place. Rows that have too much already may only get less.
      places: of the items.
      worth: benefit, above 0, below which a pass over all items is the last.
    """
    homes = np.argsort(places.block, kind="stable").reshape(int(places.block.max()) + 1, -1)  # [blocks, E]
    most_first = np.argsort(-places.tokens, kind="stable")
    while _trade_all(filling, places, homes, most_first) >= worth:
        pass


@compiled
def _trade_all(filling: RowState, places: Places, homes: Longs, order: Longs) -> int:
    """Every item away from home makes the best trade there is with a row of its home; returns the benefit of all."""
    nothing, rows, ranks = len(filling.row_of), filling.remaining.shape[1], len(places.node)
    away = _Away(np.full(rows, nothing), np.empty(nothing, np.int64))
    for item in order[::-1]:
        if not _at_home(places, item, filling.row_of[item] % ranks):
            _add(away, filling.row_of[item], item)
    saved = 0
    for item in order:
        source = filling.row_of[item]
        if _at_home(places, item, source % ranks):
            continue
        gain, goal, companion, one, other = _best(filling, places, away, homes[places.wanted_block[item]], item)
        if gain:
            saved += gain
            for given in (item, companion):
                _move(filling, places, away, given, source, goal)
            for taken in (one, other):
                _move(filling, places, away, taken, goal, source)
    return saved


@compiled
def _best(filling: RowState, places: Places, away: _Away, homes: Longs, item: int) -> tuple[int, int, int, int, int]:
    """(benefit, row, companion, partner, second partner) of an item's best trade, companion and second partner perhaps
    nothing; of equals that of likest cost."""
    cost, nothing, ranks = filling.amounts[COST], len(filling.row_of), len(places.node)
    source, here = filling.row_of[item], filling.row_of[item] % ranks
    most, misfit, best = 0, 0, (source, nothing, nothing, nothing)
    companions, given = np.full(TOGETHER, nothing), np.zeros(TOGETHER, np.int64)
    seconds, taken = np.full(PAIRED, nothing), np.zeros(PAIRED, np.int64)
    many, companion = 1, away.first[source]
    while companion != nothing and many < TOGETHER:
        if companion != item:
            companions[many] = companion
            many += 1
        companion = away.after[companion]
    for first in range(0, filling.remaining.shape[1], ranks):
        for there in homes:
            for number in range(many):
                given[number] = _gain(places, companions[number], here, there)
            goal, own, count = first + there, _gain(places, item, here, there), 1
            one = away.first[goal]
            while one != nothing:
                theirs = _gain(places, one, there, here)
                for second in range(count if count < PAIRED else 1):  # nothing, and then those before it
                    for number in range(many):
                        gain = own + given[number] + theirs + taken[second]
                        if gain < max(most, 1):
                            continue
                        companion, other = companions[number], seconds[second]
                        miss = abs(cost[item] + cost[companion] - cost[one] - cost[other])
                        if gain == most and miss >= misfit:
                            continue
                        if _fits(filling, source, goal, item, companion, one, other):
                            most, misfit, best = gain, miss, (goal, companion, one, other)
                if count < PAIRED:
                    seconds[count], taken[count] = one, theirs
                    count += 1
                one = away.after[one]
    return most, best[0], best[1], best[2], best[3]


@compiled
def _at_home(places: Places, item: int, rank: int) -> bool:
    return places.block[rank] == places.wanted_block[item]


@compiled
def _gain(places: Places, item: int, here: int, there: int) -> int:
    """Benefit of an item's going from rank `here` to rank `there`."""
    if item == len(places.tokens):  # nothing
        return 0
    node, block = places.wanted_node[item], places.wanted_block[item]
    gain = int(places.node[there] == node) - int(places.node[here] == node)
    gain += int(places.block[there] == block) - int(places.block[here] == block)
    return gain * places.tokens[item]


@compiled
def _fits(filling: RowState, source: int, goal: int, item: int, companion: int, one: int, other: int) -> bool:
    """Whether both rows can take what they would get."""
    amounts, left = filling.amounts, filling.remaining
    for kind in range(len(amounts)):
        more = amounts[kind, item] + amounts[kind, companion] - amounts[kind, one] - amounts[kind, other]
        if more > max(left[kind, goal], 0) or -more > max(left[kind, source], 0):
            return False
    return True


@compiled
def _move(filling: RowState, places: Places, away: _Away, item: int, source: int, goal: int) -> None:
    """Of an item that is away from home, or of nothing."""
    if item == len(filling.row_of):
        return
    filling.row_of[item] = goal
    filling.remaining[:, source] += filling.amounts[:, item]
    filling.remaining[:, goal] -= filling.amounts[:, item]
    before = away.first[source]
    if before == item:
        away.first[source] = away.after[item]
    else:
        while away.after[before] != item:
            before = away.after[before]
        away.after[before] = away.after[item]
    if not _at_home(places, item, goal % len(places.node)):
        _add(away, goal, item)


@compiled
def _add(away: _Away, row: int, item: int) -> None:
    away.after[item] = away.first[row]
    away.first[row] = item
