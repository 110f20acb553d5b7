"""Levelling the rows of a filling: many pairs of a heavy and a light row at a time move or swap one item each.

    heavy [ a . . . ]  --a-->  light [ . . b . ]    the a and b whose weights differ most nearly by half the gap:
          [ b . . . ]  <--b--        [ . . a . ]    the heavier of the two gets as light as one swap can make it

For every a the b is found by bisection among the items of the light row, for all pairs in one numpy call, so a sweep
over n items costs O(n log n) whatever the number of rows. A move is a swap with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxmllm.balance.pack import NEVER, sums_by
from jaxmllm.balance.plan import Longs

SWEEPS = 14  # at most
DIRECT = 2  # of them between all rows, one item each; after that only rows above the mean trade, up to two
OFFERED = 5  # items of a row among which those that it trades are chosen
TURN = 7  # places by which partners change from sweep to sweep: those of the last may be full
EVEN = 100  # the slowest rows need not be nearer to the mean than one part in so many
GAIN = 1024  # sweeps that gain less than one part in so many ...
PATIENCE = 6  # ... may be this many in a row
NEIGHBOURS = 2  # candidates tried on either side of the ideal weight: the nearest may not fit its new row
SEARCHED = 24  # further sweeps of a search for the last overflowing rows
EVENING = 4  # sweeps that even out a further weight, at least one a microbatch ...
ROUGHLY = 8  # ... between ranks that differ by more than one part in so many of the mean

# All choices of two, one or none of the items that a row offers; the last of these is no item.
ONE, OTHER = (np.append(index, OFFERED) for index in np.triu_indices(OFFERED + 1, 1))


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


def relieve(filling: Filling, search: bool = False) -> bool:
    """Exchange items until no row overflows; returns whether that succeeded.

    Args:
      search: where single items do not do it, go on with up to two against two, which takes long.
    """
    if filling.room.sum() < 0:  # exchanging items does not change it
        return False
    order = np.argsort(filling.length, kind="stable")
    singly = True
    for sweep in range(SWEEPS + (SEARCHED if search else 0)):
        rows = np.argsort(filling.room, kind="stable")
        over = int(np.searchsorted(filling.room[rows], 0))
        if not over:
            return True
        over = min(over, len(rows) // 2)
        if not over:
            return False
        if singly and sweep < SWEEPS:
            light = np.roll(rows[::-1], -sweep // 2)[:over]
            gained = _exchange(filling, filling.length, order, -filling.room, rows[:over], light, fits=False)
            if not gained and not search:
                return False
            singly = gained > 0
        else:
            light = np.roll(rows[::-1], -sweep)[:over]
            _trade(filling, filling.length, order, -filling.room, rows[:over], light, sweep)
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
    waits, patience = NEVER, PATIENCE
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
        if sweep < DIRECT:
            _exchange(filling, cost, order, load, heavy[uneven], light[uneven], fits=True)
        else:
            _trade(filling, cost, order, load, heavy[uneven], light[uneven], sweep)


def even_out(filling: Filling, weight: Longs, cost: Longs, left: Longs, ranks: int) -> None:
    """Make the ranks' totals of a weight other than cost more alike: rows that run together trade items of like cost.

    Args:
      filling: of rows microbatch * R + rank, without overflow; changed in place.
      weight: [N] of the items.
      cost: [N].
      left: [rows] cost that each row can still take on; changed in place.
    """
    order = np.argsort(cost, kind="stable")
    half, microbatches = ranks // 2, len(filling.room) // ranks
    for sweep in range(max(EVENING, microbatches)):
        load = sums_by(filling.row_of % ranks, weight, ranks)
        by_load = np.argsort(-load, kind="stable")
        heavy, light = by_load[:half], np.roll(by_load[ranks - half :][::-1], TURN * sweep)
        uneven = (load[heavy] - load[light]) * ROUGHLY * ranks > load.sum()
        if not uneven.any():
            return
        first = sweep % microbatches * ranks
        pairs = first + heavy[uneven], first + light[uneven]
        _trade(filling, weight, order, np.tile(load, microbatches), *pairs, sweep, (cost, left))


def _trade(
    filling: Filling,
    weight: Longs,
    order: Longs,
    load: Longs,
    heavy: Longs,
    light: Longs,
    turn: int,
    limit: tuple[Longs, Longs] | None = None,
) -> None:
    """Up to two items of every heavy row against up to two of its light row, so that the two get as near to each
    other as any choice among `OFFERED` items of each brings them, and neither overflows. Arguments as for
    `_exchange`, and a further amount of each item with what each row can still take of it, changed in place."""
    nothing = len(weight)
    items = _offered(filling.row_of, order, np.stack([heavy, light]), turn)
    resources = [(filling.length, filling.room), (np.ones_like(weight), filling.spare)]
    if limit is not None:
        resources.append(limit)

    def difference(amounts: Longs) -> Longs:
        """What the heavy row gives, less what it takes: [pairs, choices, choices]."""
        each = np.append(amounts, 0)[items]
        given, taken = each[..., ONE] + each[..., OTHER]
        return given[:, :, None] - taken[:, None, :]

    gap = (load[heavy] - load[light])[:, None, None]
    passed = difference(weight)
    allowed = (passed > 0) & (passed < gap)
    for amounts, left in resources:
        more = difference(amounts)
        allowed &= (more <= left[light, None, None]) & (-more <= left[heavy, None, None])
    miss = np.where(allowed, np.abs(2 * passed - gap), NEVER).reshape(len(heavy), -1)
    best = miss.argmin(axis=1)
    pair = np.flatnonzero(miss[np.arange(len(best)), best] < NEVER)
    for side, choice in enumerate(np.divmod(best[pair], len(ONE))):
        source, goal = (heavy, light) if side == 0 else (light, heavy)
        moved = np.concatenate([items[side, pair, ONE[choice]], items[side, pair, OTHER[choice]]])
        real = moved < nothing
        item, which = moved[real], np.tile(pair, 2)[real]
        start, end = source[which], goal[which]
        filling.row_of[item] = end
        np.subtract.at(load, start, weight[item])
        np.add.at(load, end, weight[item])
        for amounts, left in resources:
            np.add.at(left, start, amounts[item])
            np.subtract.at(left, end, amounts[item])


def _offered(row_of: Longs, order: Longs, rows: Longs, turn: int) -> Longs:
    """`OFFERED` items of each row, evenly spread over their order and others every `turn`, or all and then, once or
    more, the number N of no item: [.., OFFERED + 1]."""
    count = np.bincount(row_of, minlength=int(rows.max()) + 1)
    by_row = np.append(order[np.argsort(_small(row_of[order], len(count)), kind="stable")], len(order))
    number, many = np.arange(OFFERED + 1), count[rows][..., None]  # the last lands behind the row's items
    place = np.where(many > OFFERED, (number * many + turn % np.maximum(many, 1)) // OFFERED, number)
    return by_row[np.where(place < many, (np.cumsum(count) - count)[rows][..., None] + place, len(order))]


def _small(group: Longs, groups: int) -> NDArray[np.int16] | Longs:
    """Group numbers in 16 bits, where they fit: numpy sorts those by radix."""
    return group.astype(np.int16) if groups < 1 << 15 else group


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
        grouped = chosen[np.argsort(_small(pair[chosen], 2 * pairs), kind="stable")]
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
