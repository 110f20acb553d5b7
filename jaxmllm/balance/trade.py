"""Bringing items home: items of like length trade places, so that their tokens need not travel.

    row of rank a [ . i . . . ]  --i-->      row of i's home b [ j . k . . ]     j and k are as long as i together,
                  [ . j k . . ]  <--j, k--                     [ i . . . . ]     and not at home

Balancing deals items to rows without regard to where their tokens are needed; which of two items of like length lies
in which row hardly matters to it, but decides what the exchange has to carry. No trade lets a row overflow or get
costlier than it may, so the balance stays.

Many items trade at a time: every one that is not at home looks for one or two items of nearly its length in a row of
its home, and of those trades the ones are made that save most, as long as the room of their rows lasts.

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
APART = (1, 2, 3, 5, 8)  # two items of a row may go for one if they are so many places apart by length ...
MUCH = 6  # ... but single ones do, which is quicker, while a sweep saves so many times what is worth one


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

    def of(self, items: Longs) -> Places:
        """Those of some items."""
        wanted = self.wanted_node[items], self.wanted_block[items]
        return Places(self.node, self.block, *wanted, self.tokens[items])

    def with_nothing(self) -> Places:
        """The same with one more item that is of no benefit anywhere."""
        wanted = np.append(self.wanted_node, np.int32(-1)), np.append(self.wanted_block, -1)
        return Places(self.node, self.block, *wanted, np.append(self.tokens, 0))


@dataclass(frozen=True)
class Rows:
    """What every row can still take, all [M * R] by microbatch * R + rank."""

    slots: Longs
    cost: Longs
    segments: Longs

    def copy(self) -> Rows:
        return Rows(self.slots.copy(), self.cost.copy(), self.segments.copy())


def trade(row_of: Longs, length: Longs, cost: Longs, left: Rows, places: Places, worth: int) -> Longs:
    """Let items trade places until that saves little.

    Args:
      row_of: [N] microbatch * R + rank.
      length: [N] slots.
      cost: [N].
      left: by row; negative amounts allow no more either.
      places: of the items.
      worth: benefit, above 0, below which a sweep is the last over the rows of its microbatch.

    Returns:
      [N] new row of each item.
    """
    ranks = len(places.node)
    homes = np.argsort(places.block, kind="stable").reshape(int(places.block.max()) + 1, -1)  # [blocks, E]
    state = _State(
        row_of=np.append(row_of, -1),
        amounts=(np.append(length, 0), np.append(cost, 0), np.append(np.ones_like(length), 0)),
        left=left.copy(),
        by_length=np.lexsort((cost, length)),
        places=places.with_nothing(),
    )
    rows = range(len(left.slots) // ranks)
    homes_of = [microbatch * ranks + rank[places.wanted_block] for microbatch in rows for rank in homes.T]
    goals: deque[tuple[Longs, tuple[int, ...]]] = deque((goal, ()) for goal in homes_of)
    while goals:
        goal, apart = goals.popleft()
        saved = _sweep(state, goal, apart)
        if saved >= MUCH * worth:
            goals.append((goal, apart))
        elif saved >= (worth if apart else worth // MUCH):
            goals.append((goal, APART))
    return state.row_of[:-1]


@dataclass(frozen=True)
class _State:
    """Where items lie and what their rows can still take, kept up to date. Item N is nothing."""

    row_of: Longs  # [N + 1]
    amounts: tuple[Longs, Longs, Longs]  # [N + 1] of each item, in the order of `Rows`
    left: Rows
    by_length: Longs  # [N] items
    places: Places

    def resources(self) -> tuple[tuple[Longs, Longs], ...]:
        """What each row has left, and what each item takes of it."""
        return tuple(zip((self.left.slots, self.left.cost, self.left.segments), self.amounts, strict=True))

    def sum_of(self, partner: tuple[Longs, Longs], amount: Longs) -> Longs:
        return amount[partner[0]] + amount[partner[1]]

    def swap(self, ours: Longs, partner: tuple[Longs, Longs]) -> None:
        a, b = self.row_of[ours], self.row_of[partner[0]]
        for left, amount in self.resources():
            more = self.sum_of(partner, amount) - amount[ours]
            np.subtract.at(left, a, more)
            np.add.at(left, b, more)
        self.row_of[ours], self.row_of[partner[0]], self.row_of[partner[1]] = b, a, a
        self.row_of[-1] = -1


def _sweep(state: _State, goal: Longs, apart: tuple[int, ...]) -> int:
    """Every item away from home offers itself to row `goal` [N] of its home; returns the benefit of what was done."""
    places, length = state.places, state.amounts[0]
    ranks, nothing = len(places.node), len(state.by_length)
    at_home = places.block[state.row_of % ranks] == places.wanted_block
    away = state.by_length[~at_home[state.by_length]]
    if not len(away):
        return 0
    one, other = _partners(state.row_of, away, nothing, apart)
    reach = 2 * int(length[away[-1]]) + 1
    key = state.row_of[one] * reach + length[one] + length[other]
    order = np.argsort(key, kind="stable")
    middle = np.searchsorted(key[order], goal[away] * reach + length[away])
    near = order[np.clip(middle[:, None] + np.arange(-NEAREST, NEAREST), 0, len(order) - 1)]
    a, b = state.row_of[away][:, None], goal[away][:, None]
    more = length[one[near]] + length[other[near]] - length[away][:, None]
    fits = (state.row_of[one[near]] == b) & (more <= state.left.slots[a]) & (-more <= state.left.slots[b]) & (a != b)
    offer, choice = np.nonzero(fits)
    ours, found = away[offer], near[offer, choice]
    fits = _fits(state, ours, (one[found], other[found]))
    ours, one, other = ours[fits], one[found[fits]], other[found[fits]]
    here, there = state.row_of[ours] % ranks, goal[ours] % ranks
    gain = places.benefit(ours, there) - places.benefit(ours, here)
    for theirs in (one, other):
        gain += places.benefit(theirs, here) - places.benefit(theirs, there)
    misfit = np.abs(length[one] + length[other] - length[ours])
    order = np.lexsort((misfit, -gain))[: np.count_nonzero(gain > 0)]
    order = order[_names_first((ours[order], one[order], other[order]), nothing)]
    order = order[_affordable(state, ours[order], (one[order], other[order]))]
    state.swap(ours[order], (one[order], other[order]))
    return int(gain[order].sum())


def _partners(row_of: Longs, away: Longs, nothing: int, apart: tuple[int, ...]) -> tuple[Longs, Longs]:
    """Items, each alone (with `nothing`) and together with others of its row so many places apart."""
    listed = away[np.argsort(row_of[away], kind="stable")]
    ones, others = [listed], [np.full_like(listed, nothing)]
    for places in apart:
        one, other = listed[:-places], listed[places:]
        alike = row_of[one] == row_of[other]
        ones.append(one[alike])
        others.append(other[alike])
    return np.concatenate(ones), np.concatenate(others)


def _fits(state: _State, ours: Longs, partner: tuple[Longs, Longs]) -> NDArray[np.bool_]:
    """Which trades fit if no other is made."""
    a, b = state.row_of[ours], state.row_of[partner[0]]
    fits = np.ones(len(ours), np.bool_)
    for left, amount in state.resources():
        more = state.sum_of(partner, amount) - amount[ours]
        fits &= (more <= np.maximum(left[a], 0)) & (-more <= np.maximum(left[b], 0))
    return fits


def _names_first(columns: tuple[Longs, ...], nothing: int) -> NDArray[np.bool_]:
    """Which of the trades name no item that an earlier one names."""
    turn = np.arange(len(columns[0]))
    first = np.full(nothing + 1, len(turn))
    for items in columns:
        np.minimum.at(first, items, turn)
    return np.logical_and.reduce([(first[items] == turn) | (items == nothing) for items in columns])


def _affordable(state: _State, ours: Longs, partner: tuple[Longs, Longs]) -> NDArray[np.bool_]:
    """Which trades all fit, made in this order, if what a row gets back counts for nothing yet."""
    row = np.concatenate([state.row_of[ours], state.row_of[partner[0]]])
    order = np.lexsort((np.tile(np.arange(len(ours)), 2), row))
    grouped = row[order]
    fits = np.ones(len(row), np.bool_)
    for left, amount in state.resources():
        more = state.sum_of(partner, amount) - amount[ours]
        use = np.maximum(np.concatenate([more, -more]), 0)[order]
        fits[order] &= (running_sums(grouped, use) + use <= left[grouped]) | (use == 0)
    return fits[: len(ours)] & fits[len(ours) :]
