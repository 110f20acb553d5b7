"""Levelling the rows of a filling: many pairs of a heavy and a light row at a time move or swap one item each.

    heavy [ a . . . ]  --a-->  light [ . . b . ]    the a and b whose weights differ most nearly by half the gap:
          [ b . . . ]  <--b--        [ . . a . ]    the heavier of the two gets as light as one swap can make it

For every a the b is found by bisection among the items of the light row, for all pairs in one numpy call, so a sweep
over n items costs O(n log n) whatever the number of rows. A move is a swap with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxmllm.balance.pack import NEVER, sums_by
from jaxmllm.balance.plan import Longs

SWEEPS = 14  # at most
DIRECT = 2  # of them between all rows; after that the costlier of the heavy rows trade, too
TURN = 7  # places by which partners change from sweep to sweep: those of the last may be full
EVEN = 100  # the slowest rows need not be nearer to the mean than one part in so many
GAIN = 1024  # sweeps that gain less than one part in so many ...
PATIENCE = 6  # ... may be this many in a row
NEIGHBOURS = 2  # candidates tried on either side of the ideal weight: the nearest may not fit its new row


@dataclass
class Filling:
    """Which row every item lies in, with the sums that exchanging items keeps up to date."""

    row_of: Longs  # [N]
    length: Longs  # [N] slots
    room: Longs  # [rows] free slots; below 0 where a row overflows
    spare: Longs  # [rows] further items it may hold

    @classmethod
    def of(cls, row_of: Longs, length: Longs, capacity: Longs, max_segments: int) -> Filling:
        room = capacity - sums_by(row_of, length, len(capacity))
        spare = max_segments - np.bincount(row_of, minlength=len(capacity))
        return cls(row_of.copy(), length, room, spare)

    def swap(self, given: Longs, taken: Longs, source: Longs, goal: Longs, slots: Longs) -> None:
        """Move items `given` from rows `source` to rows `goal` and `taken` back, where that is an item; no row occurs
        twice. The given are longer by `slots`."""
        swapped = taken < len(self.row_of)
        self.row_of[given] = goal
        self.row_of[taken[swapped]] = source[swapped]
        self.room[source] += slots
        self.room[goal] -= slots
        self.spare[source] += ~swapped
        self.spare[goal] -= ~swapped


def relieve(filling: Filling) -> bool:
    """Exchange items until no row overflows; returns whether that succeeded."""
    order = np.argsort(filling.length, kind="stable")
    for sweep in range(SWEEPS):
        rows = np.argsort(filling.room, kind="stable")
        over = int(np.searchsorted(filling.room[rows], 0))
        if not over:
            return True
        over = min(over, len(rows) // 2)
        heavy, light = rows[:over], np.roll(rows[::-1], -sweep // 2)[:over]
        if not over or not _exchange(filling, filling.length, order, -filling.room, heavy, light, fits=False):
            return False
    return not (filling.room < 0).any()


def level(filling: Filling, cost: Longs, classes: list[Longs], ranks: int) -> None:
    """Make the rows that run together cost alike, without overflow.

    Args:
      filling: without overflow; changed in place.
      cost: [N] of the items.
      classes: rows of one capacity; of those of a class, `ranks` of like cost run together.
    """
    load = sums_by(filling.row_of, cost, len(filling.room))
    order = np.argsort(cost, kind="stable")
    half = ranks // 2
    upper = -(-half // 2)
    waits, patience = NEVER, PATIENCE
    for sweep in range(SWEEPS):
        ordered = np.concatenate([rows[np.argsort(-load[rows], kind="stable")].reshape(-1, ranks) for rows in classes])
        slowest = int(load[ordered[:, 0]].sum())
        mean = load[ordered].sum(axis=1, keepdims=True) // ranks
        patience = PATIENCE if (waits - slowest) * GAIN > slowest else patience - 1
        if slowest <= int((mean + mean // EVEN).sum()) or not patience:
            return
        waits = slowest
        heavy = ordered[:, : half if sweep < DIRECT else upper]
        light = np.roll(ordered[:, ranks - half :][:, ::-1], TURN * sweep, axis=1)[:, : heavy.shape[1]]
        uneven = load[heavy] - load[light] > mean // EVEN
        if not uneven.any():
            return
        _exchange(filling, cost, order, load, heavy[uneven], light[uneven], fits=True)
        if sweep == DIRECT:
            goods = _Goods.of(filling.length, cost, order)
        if sweep >= DIRECT:
            _trade(filling, cost, goods, load, heavy[uneven], light[uneven])


@dataclass(frozen=True)
class _Goods:
    """What full rows trade: cost beyond what short items cost a slot, against slots in short items."""

    beyond: Longs  # [N]; large enough that no item is given for nothing
    by_beyond: Longs  # [N] items in that order
    short: Longs  # two thirds of the items, by length

    @classmethod
    def of(cls, length: Longs, cost: Longs, order: Longs) -> _Goods:
        short = order[: -(-len(order) * 2 // 3)]
        low, high = short[0], short[-1]
        a_slot = int(cost[high] - cost[low]) // max(int(length[high] - length[low]), 1)
        beyond = cost - a_slot * length
        beyond += int(cost.sum()) + 1 - int(beyond.min())
        return cls(beyond, np.argsort(beyond, kind="stable"), short)


def _trade(filling: Filling, cost: Longs, goods: _Goods, load: Longs, heavy: Longs, light: Longs) -> None:
    """Two exchanges for every pair of full rows that gains by both: a long item against a shorter one, then, to give
    the slots back, short items against even shorter ones. Arguments as for `_exchange`."""
    row_of, room, spare, before = filling.row_of.copy(), filling.room.copy(), filling.spare.copy(), load.copy()
    _exchange(filling, goods.beyond, goods.by_beyond, load.copy(), heavy, light, fits=False)
    owed = np.zeros_like(room)
    owed[light] = 2 * (room - filling.room)[light]
    _exchange(filling, filling.length, goods.short, owed, light, heavy, fits=False)
    load[:] = sums_by(filling.row_of, cost, len(load))
    worse = np.maximum(load[heavy], load[light]) >= before[heavy]
    worse |= (filling.room[heavy] < 0) | (filling.room[light] < 0)
    undone = np.zeros(len(load), np.bool_)
    undone[heavy[worse]] = undone[light[worse]] = True
    filling.row_of[undone[row_of]] = row_of[undone[row_of]]
    filling.room[undone], filling.spare[undone], load[undone] = room[undone], spare[undone], before[undone]


def _exchange(
    filling: Filling, weight: Longs, order: Longs, load: Longs, heavy: Longs, light: Longs, fits: bool
) -> int:
    """One move or swap for every pair of rows that gains by it.

    Args:
      weight: [N] what shall be level.
      order: items that may be exchanged, by ascending weight.
      load: [rows] sums of weight and a constant; changed in place.
      heavy, light: [pairs] different rows.
      fits: whether the rows must not overflow.

    Returns:
      How many pairs gained.
    """
    offers = _Offers.of(filling.row_of, order, heavy, light)
    if not len(offers.ours):
        return 0
    gap = load[heavy] - load[light]
    weights, lengths = np.append(weight, 0), np.append(filling.length, 0)
    middle = offers.near(weights, weight[offers.ours] - gap[offers.our_pair] // 2)
    item, pair, pair_gap = offers.ours, offers.our_pair, gap[offers.our_pair]
    room, spare, own_room = filling.room[light][pair], filling.spare[light][pair] > 0, filling.room[heavy][pair]
    if fits:  # what is longer than the light row has room for needs as much in return
        middle = np.maximum(middle, offers.near(lengths, lengths[item] - room))
    least, choice = np.full(len(item), NEVER), np.zeros(len(item), np.int64)
    for step in range(-NEIGHBOURS, NEIGHBOURS):
        place = np.clip(middle + step, 0, len(offers.theirs) - 1)
        other = offers.theirs[place]
        passed, more = weights[item] - weights[other], lengths[item] - lengths[other]
        allowed = (offers.their_pair[place] == pair) & (passed > 0) & (passed < pair_gap)
        allowed &= (other < len(weight)) | spare
        if fits:
            allowed &= (more <= room) & (-more <= own_room)
        miss = np.where(allowed, np.abs(2 * passed - pair_gap), NEVER)
        choice = np.where(miss < least, other, choice)
        least = np.minimum(miss, least)
    won = _least_of_group(least, pair)
    given, taken, winner = item[won], choice[won], pair[won]
    filling.swap(given, taken, heavy[winner], light[winner], lengths[given] - lengths[taken])
    load[heavy[winner]] -= weights[given] - weights[taken]
    load[light[winner]] += weights[given] - weights[taken]
    return len(won)


@dataclass(frozen=True)
class _Offers:
    """Items of the heavy and of the light rows, by pair and then by weight. Every light row also offers nothing,
    which has the number N, before its lightest item."""

    ours: Longs
    our_pair: Longs
    theirs: Longs
    their_pair: Longs

    @classmethod
    def of(cls, row_of: Longs, order: Longs, heavy: Longs, light: Longs) -> _Offers:
        pairs = len(heavy)
        pair_of = np.full(max(int(row_of.max()), int(heavy.max()), int(light.max())) + 1, 2 * pairs, np.int64)
        pair_of[heavy], pair_of[light] = np.arange(pairs), np.arange(pairs, 2 * pairs)
        pair = pair_of[row_of[order]]
        chosen = np.flatnonzero(pair < 2 * pairs)
        small = np.int16 if 2 * pairs < 1 << 15 else np.int64  # numpy sorts 16 bits by radix
        grouped = chosen[np.argsort(pair[chosen].astype(small), kind="stable")]
        item, owner = order[grouped], pair[grouped]
        starts = np.searchsorted(owner, np.arange(pairs, 2 * pairs))
        split = int(starts[0])
        theirs = np.insert(item[split:], starts - split, len(row_of))
        their_pair = np.insert(owner[split:] - pairs, starts - split, np.arange(pairs))
        return cls(item[:split], owner[:split], theirs, their_pair)

    def near(self, amounts: Longs, wanted: Longs) -> Longs:
        """For each of ours, the place of the first of its pair's theirs that has at least the wanted amount.

        Args:
          amounts: [N + 1] ascending with weight.
          wanted: one for each of ours.
        """
        theirs = amounts[self.theirs]
        end = int(theirs.max()) + 1
        shift = max(0, end.bit_length() + int(self.their_pair[-1]).bit_length() - 61)  # a product must fit int64
        reach = (end >> shift) + 1
        sought = np.clip(wanted, 0, end) >> shift
        return np.searchsorted(self.their_pair * reach + (theirs >> shift), self.our_pair * reach + sought)


def _least_of_group(amount: Longs, group: Longs) -> Longs:
    """Place of the first least amount of every group that has one below `NEVER`; members of a group are neighbours."""
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    least = np.repeat(np.minimum.reduceat(amount, first), np.diff(np.r_[first, len(group)]))
    place = np.flatnonzero((amount == least) & (amount < NEVER))
    return place[np.r_[True, group[place][1:] != group[place][:-1]][: len(place)]]
