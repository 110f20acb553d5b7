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

SWEEPS = 16  # at most
DIRECT = 2  # of them between all rows; after that the costlier of the heavy rows trade, too
TURN = 7  # places by which partners change from sweep to sweep: those of the last may be full
EVEN = 160  # the slowest rows need not be nearer to the mean than one part in so many
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
        if sweep >= DIRECT:
            _trade(filling, cost, order, load, heavy[uneven], light[uneven])


def _trade(filling: Filling, cost: Longs, order: Longs, load: Longs, heavy: Longs, light: Longs) -> None:
    """Two exchanges for every pair of full rows that gains by both: a long item against a shorter one, then, to give
    the slots back, short items against even shorter ones. Cost beyond what short items cost a slot changes hands.

    Arguments as for `_exchange`.
    """
    short = order[: len(order) * 2 // 3]
    if not len(short):
        return
    low, high = order[0], short[-1]
    slots = int(filling.length[high] - filling.length[low])
    beyond = cost - int(cost[high] - cost[low]) // max(slots, 1) * filling.length
    beyond += int((load[heavy] - load[light]).max()) + 1 - int(beyond.min())  # so that nothing is never swapped with
    row_of, room, spare, before = filling.row_of.copy(), filling.room.copy(), filling.spare.copy(), load.copy()
    by_beyond = np.argsort(beyond, kind="stable")
    _exchange(filling, beyond, by_beyond, load.copy(), heavy, light, fits=False)
    owed = np.zeros_like(room)
    owed[light] = 2 * (room - filling.room)[light]
    _exchange(filling, filling.length, short, owed, light, heavy, fits=False)
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
      order: [N] items by ascending weight.
      load: [rows] sums of weight and a constant; changed in place.
      heavy, light: [pairs] different rows.
      fits: whether the rows must not overflow.

    Returns:
      How many pairs gained.
    """
    pairs, count, rows = len(heavy), len(weight), len(load)
    pair_of = np.full(rows, 2 * pairs, np.int64)
    pair_of[heavy] = np.arange(pairs)
    pair_of[light] = np.arange(pairs, 2 * pairs)
    pair = pair_of[filling.row_of[order]]
    small = np.int16 if 2 * pairs < 1 << 15 else np.int64  # numpy sorts 16 bits by radix
    chosen = np.flatnonzero(pair < 2 * pairs)
    grouped = order[chosen[np.argsort(pair[chosen].astype(small), kind="stable")]]
    owner = pair_of[filling.row_of[grouped]]
    split = int(np.searchsorted(owner, pairs))
    ours, our_pair = grouped[:split], owner[:split]
    if not split:
        return 0
    # Every light row also offers "nothing", the item number `count`, before its lightest item.
    starts = np.searchsorted(owner[split:], np.arange(pairs, 2 * pairs))
    theirs = np.insert(grouped[split:], starts, count)
    their_pair = np.insert(owner[split:] - pairs, starts, np.arange(pairs))
    weights, lengths = np.append(weight, 0), np.append(filling.length, 0)
    gap = load[heavy] - load[light]

    largest = int(weight[order[-1]]) + 1
    shift = max(0, largest.bit_length() + pairs.bit_length() - 62)
    reach = (largest >> shift) + 1
    ideal = np.maximum(weight[ours] - gap[our_pair] // 2, 0) >> shift
    at = np.searchsorted(
        their_pair * reach + (weights[theirs] >> shift), our_pair * reach + np.minimum(ideal, reach - 1)
    )
    if fits:  # what is longer than the light row has room for needs no less than this in return
        least = np.maximum(lengths[ours] - filling.room[light][our_pair], 0)
        wide = int(lengths.max()) + 1
        at = np.maximum(at, np.searchsorted(their_pair * wide + lengths[theirs], our_pair * wide + least))
    places = np.clip(at[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS), 0, len(theirs) - 1)
    others = theirs[places]
    passed = weight[ours][:, None] - weights[others]
    mine, goal = heavy[our_pair][:, None], light[our_pair][:, None]
    allowed = (their_pair[places] == our_pair[:, None]) & (passed > 0) & (passed < gap[our_pair][:, None])
    allowed &= (others < count) | (filling.spare[goal] > 0)
    more = lengths[ours][:, None] - lengths[others]
    if fits:
        allowed &= (more <= filling.room[goal]) & (-more <= filling.room[mine])
    miss = np.where(allowed, np.abs(2 * passed - gap[our_pair][:, None]), NEVER)

    best = miss.argmin(axis=1)
    least = miss[np.arange(split), best]
    first = np.flatnonzero(np.r_[True, our_pair[1:] != our_pair[:-1]])
    lowest = np.minimum.reduceat(least, first)
    winner = np.flatnonzero((least == np.repeat(lowest, np.diff(np.r_[first, split]))) & (least < NEVER))
    winner = winner[np.r_[True, our_pair[winner][1:] != our_pair[winner][:-1]]] if len(winner) else winner
    if not len(winner):
        return 0
    given, taken = ours[winner], others[winner, best[winner]]
    source, goal = heavy[our_pair[winner]], light[our_pair[winner]]
    filling.row_of[given] = goal
    swapped = taken < count
    filling.row_of[taken[swapped]] = source[swapped]
    moved, slots = weights[given] - weights[taken], lengths[given] - lengths[taken]
    load[source] -= moved
    load[goal] += moved
    filling.room[source] += slots
    filling.room[goal] -= slots
    filling.spare[source] += ~swapped
    filling.spare[goal] -= ~swapped
    return len(winner)
