"""Bringing items home: items of like length trade places, so that their tokens need not travel.

    row of rank a [ . i . . ]  --i-->  row of i's home rank b [ j . . . ]      j is of like length and not at home
                  [ . j . . ]  <--j--                         [ i . . . ]      either

Balancing deals items to rows without regard to where their tokens are needed; which of two items of like length lies
in which row hardly matters to it, but decides what the exchange has to carry. No trade lets a row overflow or raises
the costliest row of a microbatch or the costliest rank above what is allowed, so the balance stays.

Many items trade at a time: every one that is not at home looks for partners of nearly its length in a row of its home,
and of those trades the ones are made that save most, as long as the room of their rows lasts.

Letters: N items, R ranks, M microbatches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.balance.pack import running_sums
from jaxmllm.balance.plan import Ints, Longs

NEAREST = 1  # partners tried on either side of an item's length: more cost time and find little


@dataclass(frozen=True)
class Places:
    """Where items may lie and where they would rather.

    The benefit of an item on a rank is its tokens for the right node, and once more for the right block.
    """

    node: Ints  # [R]
    block: Longs  # [R] ranks that share their devices with one language rank, by number
    wanted_node: Ints  # [N]
    wanted_block: Longs  # [N]
    tokens: Longs  # [N]

    def benefit(self, item: Longs, rank: Longs) -> Longs:
        near = (self.node[rank] == self.wanted_node[item]).astype(np.int64)
        return self.tokens[item] * (near + (self.block[rank] == self.wanted_block[item]))


def trade(
    row_of: Longs,
    length: Longs,
    cost: Longs,
    room: Longs,
    spare: Longs,
    places: Places,
    worth: int,
) -> Longs:
    """Let items trade places until that saves little.

    Args:
      row_of: [N] microbatch * R + rank.
      length: [N] slots.
      cost: [N].
      room: [M * R] slots that each row has left.
      spare: [M * R] cost that each row may still take on.
      places: of the items.
      worth: benefit below which a sweep is the last over the rows of its microbatch.

    Returns:
      [N] new row of each item.
    """
    ranks = len(places.node)
    homes = np.argsort(places.block, kind="stable").reshape(int(places.block.max()) + 1, -1)  # [blocks, E]
    state = _Rows(row_of.copy(), length, cost, room.copy(), spare.copy(), np.lexsort((cost, length)))
    goals = deque(
        microbatch * ranks + rank[places.wanted_block] for microbatch in range(len(room) // ranks) for rank in homes.T
    )
    while goals:
        goal = goals.popleft()
        if _sweep(state, goal, places) >= worth:
            goals.append(goal)
    return state.row_of


@dataclass
class _Rows:
    """Where items lie and what every row can still take, kept up to date."""

    row_of: Longs  # [N]
    length: Longs  # [N]
    cost: Longs  # [N]
    room: Longs  # [M * R]
    spare: Longs  # [M * R]
    by_length: Longs  # [N] items

    def swap(self, ours: Longs, theirs: Longs) -> None:
        a, b = self.row_of[ours], self.row_of[theirs]
        self.row_of[ours], self.row_of[theirs] = b, a
        for left, amount in ((self.room, self.length), (self.spare, self.cost)):
            more = amount[theirs] - amount[ours]
            np.subtract.at(left, a, more)
            np.add.at(left, b, more)


def _sweep(state: _Rows, goal: Longs, places: Places) -> int:
    """Every item away from home offers itself to row `goal` [N] of its home; returns the benefit of what was done."""
    ranks, length, cost = len(places.node), state.length, state.cost
    away = state.by_length[(places.block[state.row_of % ranks] != places.wanted_block)[state.by_length]]
    if not len(away):
        return 0
    source, reach = state.row_of[away], int(length[away[-1]]) + 1
    order = np.argsort(source, kind="stable")
    listed = away[order]
    middle = np.searchsorted(source[order] * reach + length[listed], goal[away] * reach + length[away])
    near = middle[:, None] + np.arange(-NEAREST, NEAREST)
    partner = listed[np.clip(near, 0, len(listed) - 1)]
    a, b = source[:, None], goal[away][:, None]
    more, dearer = length[partner] - length[away][:, None], cost[partner] - cost[away][:, None]
    fits = (state.row_of[partner] == b) & (more <= state.room[a]) & (-more <= state.room[b])
    fits &= (dearer <= state.spare[a]) & (-dearer <= state.spare[b]) & (a != b)
    offer, choice = np.nonzero(fits)
    ours, partner, more = away[offer], partner[offer, choice], more[offer, choice]
    here, there = state.row_of[ours] % ranks, goal[ours] % ranks
    gain = places.benefit(ours, there) - places.benefit(ours, here)
    gain += places.benefit(partner, here) - places.benefit(partner, there)
    order = np.lexsort((np.abs(more), -gain))[: np.count_nonzero(gain > 0)]
    ours, partner, gain = ours[order], partner[order], gain[order]
    first = _names_first(ours, partner, len(length))
    ours, partner, gain = ours[first], partner[first], gain[first]
    kept = _affordable(state, ours, partner)
    state.swap(ours[kept], partner[kept])
    return int(gain[kept].sum())


def _names_first(ours: Longs, theirs: Longs, count: int) -> NDArray[np.bool_]:
    """Which of the pairs name no item that an earlier pair names."""
    turn = np.arange(len(ours))
    first = np.full(count, len(ours))
    np.minimum.at(first, ours, turn)
    np.minimum.at(first, theirs, turn)
    return (first[ours] == turn) & (first[theirs] == turn)


def _affordable(state: _Rows, ours: Longs, theirs: Longs) -> NDArray[np.bool_]:
    """Which swaps all fit, made in this order, if what a row gets back counts for nothing yet."""
    row = np.concatenate([state.row_of[ours], state.row_of[theirs]])
    order = np.lexsort((np.tile(np.arange(len(ours)), 2), row))
    grouped = row[order]
    fits = np.ones(len(row), np.bool_)
    for left, amount in ((state.room, state.length), (state.spare, state.cost)):
        more = amount[theirs] - amount[ours]
        use = np.maximum(np.concatenate([more, -more]), 0)[order]
        fits[order] &= running_sums(grouped, use) + use <= left[grouped]
    return fits[: len(ours)] & fits[len(ours) :]
