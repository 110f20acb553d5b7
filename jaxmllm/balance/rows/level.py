"""Balancing filled rows: a heavy and a light row swap the items that bring their loads nearest.

    heavy [ a . b . ]  --a, b-->  light [ . . c . ]      of all choices of up to two items per row:
          [ . c . . ]  <---c---         [ . a b . ]      the one whose difference is nearest to half
                                                         the gap, and that both rows can take

A sweep pairs the heaviest row with the lightest, the second heaviest with the second lightest and
so on; the next sweep pairs rows differently. That closes the gap that longest-first filling leaves,
works where rows are full, and moves items out of rows over capacity.

Letters: N items, K amounts, R ranks, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import INT64_MAX, Longs
from jaxmllm.compiled import compiled, compiled_leaf

# Indices of the amounts of a `RowState`. Every state has the first three; attention is a part of
# the cost.
SLOTS, SEGMENTS, COST, ATTENTION = range(4)

# The number of items that a row offers in a sweep; swaps choose among these. A module constant,
# because compiled code needs one.
OFFERED = 10

# All choices (CHOICE_A, CHOICE_B) of up to two of a row's offered items, numbered from 1; 0 is no
# item. For every n, the choices among the first n items come before all others.
CHOICE_A = np.array([0] + [a for b in range(1, OFFERED + 1) for a in range(b)])
CHOICE_B = np.array([0] + [b for b in range(1, OFFERED + 1) for a in range(b)])


class SwapSearch(NamedTuple):
    """Constants of the sweeps in which pairs of rows swap items."""

    sweeps: int = 14  # upper bound
    # Partners shift by 7 positions from sweep to sweep: rows next to the last partner may be as
    # full as it was.
    partner_step: int = 7
    # To balance rows: stop when the slowest rows are at most 1/100 above the mean, and pair only
    # rows that differ by more than 1/100 of the mean.
    stop_within: int = 100
    # After two sweeps of all pairs only rows that are over 1/200 above the mean swap, because no
    # rank waits for the other rows.
    sweeps_of_all_pairs: int = 2
    # Stop after 6 sweeps in a row that gain less than 1/1024 each.
    least_gain: int = 1024
    patience: int = 6
    # To balance attention: 2 sweeps, which gain most of what 6 do; rows may end up costing 1/128
    # above the mean.
    attention_sweeps: int = 2
    cost_margin: int = 128
    # To fix overflow: 24 further sweeps for the last rows, where the caller allows a long search.
    further_sweeps: int = 24
    # To balance ranks: 4 sweeps, or one per microbatch if these are more, between ranks that differ
    # by over 1/8 of the mean.
    rank_sweeps: int = 4
    rank_difference: int = 8


SWAP_SEARCH = SwapSearch()


class RowState(NamedTuple):
    """The row of every item, and what every row can still take of each of K amounts.

    The first amounts are slots, segments and cost. In a phase's rows attention is the next.
    Item index N is a sentinel for "no item": it takes nothing and is in no row.
    """

    row_of: Longs  # [N]
    amounts: Longs  # [K, N + 1] what each item takes
    remaining: Longs  # [K, rows]; below 0 where a row has too much

    @classmethod
    def from_limits(
        cls, row_of: Longs, amounts: Sequence[Longs], limits: Sequence[Longs | int], rows: int
    ) -> RowState:
        """The state of items that are in rows `row_of`.

        Args:
          row_of: [N]
          amounts: K arrays [N], what each item takes.
          limits: K arrays [rows] or numbers, what rows may hold.
          rows: number of rows.
        """
        with_sentinel = np.zeros((len(amounts), len(row_of) + 1), np.int64)
        remaining = np.empty((len(limits), rows), np.int64)
        for kind, (amount, limit) in enumerate(zip(amounts, limits, strict=True)):
            with_sentinel[kind, :-1] = amount
            remaining[kind] = limit
        _subtract_amounts(remaining, with_sentinel, row_of)
        return cls(row_of.copy(), with_sentinel, remaining)

    def in_order(self, kind: int) -> Longs:
        """Items in ascending order of an amount: [N]."""
        return np.argsort(self.amounts[kind, :-1], kind="stable")


@compiled
def _subtract_amounts(remaining: Longs, amounts: Longs, row_of: Longs) -> None:
    """Subtract what the items take from what their rows have remaining."""
    for kind in range(len(amounts)):
        for item in range(len(row_of)):
            remaining[kind, row_of[item]] -= amounts[kind, item]


def fix_overflow(state: RowState, search: bool = False) -> bool:
    """Swap items until every row fits; return whether that succeeded.

    Args:
      state: changed in place.
      search: continue after a sweep without swaps, and for more sweeps, which takes long.
    """
    room = state.remaining[SLOTS]  # a view: swaps change it
    if room.sum() < 0:  # swapping items does not change the sum
        return False
    if (room >= 0).all():
        return True
    sweeps = SWAP_SEARCH.sweeps + (SWAP_SEARCH.further_sweeps if search else 0)
    _sweep_overflow(state, state.in_order(SLOTS), sweeps, search)
    return not (room < 0).any()


@compiled
def _sweep_overflow(state: RowState, order: Longs, sweeps: int, search: bool) -> None:
    """The sweeps of `fix_overflow`: up to `sweeps`, and unless `search` none after one that swaps
    nothing."""
    room = state.remaining[SLOTS]  # a view: swaps change it
    rows = len(room)
    pairs = _RowPairs(np.empty(rows // 2, np.int64), np.empty(rows // 2, np.int64))
    scratch = _empty_scratch(state)
    for sweep in range(sweeps):
        # Fullest first. Only a merge sort keeps rows of equal room in order.
        by_room = np.argsort(room, kind="mergesort")
        overflowing = 0
        while overflowing < rows // 2 and room[by_room[overflowing]] < 0:
            overflowing += 1
        if not overflowing:
            return
        # In sweep s the row that overflows most skips the s rows with most room and is paired with
        # the next one; the other rows follow in order, wrapping around the end.
        pairs_count = 0
        for index in range(overflowing):
            partner = rows - 1 - (index + sweep) % rows
            # After wrapping around, the partner could be a row that overflows.
            if partner >= overflowing:
                pairs.heavy[pairs_count] = by_room[index]
                pairs.light[pairs_count] = by_room[partner]
                pairs_count += 1
        heavy = pairs.heavy[:pairs_count]
        light = pairs.light[:pairs_count]
        swaps = _swap_each_pair(state, order, heavy, light, sweep, SLOTS, COST, scratch)
        if not swaps and not search:
            return


@dataclass(frozen=True)
class RowsByClass:
    """The rows of each class. `ranks / span` rows of similar load run together as a microbatch."""

    rows: Sequence[Longs]
    spans: Sequence[int]  # span of each class
    ranks: int

    def microbatches(self, load: Longs) -> list[Longs]:
        """The rows of each class cut into microbatches, heaviest first: [M, R / span]."""
        return [
            rows[np.argsort(-load[rows], kind="stable")].reshape(-1, self.ranks // span)
            for rows, span in zip(self.rows, self.spans, strict=True)
        ]


def balance_rows(state: RowState, classes: RowsByClass) -> None:
    """Swap items until rows that run together cost nearly the same, without overflow.

    Args:
      state: without overflow, and with limits of 0 on cost, which stand for none. Changed in place.
    """
    _balance_amount(state, classes, COST, SWAP_SEARCH.sweeps)


def balance_attention(state: RowState, classes: RowsByClass) -> None:
    """Swap items until rows that run together have nearly the same attention; `balance_rows` comes
    first.

    Programs have fixed shapes, so an empty slot takes as long as a full one. The slowest of the
    rows that run together is therefore not the costliest row, which may only be full, but the one
    with most attention. No row ends up costing more than the costliest row of its microbatch did,
    or than 1/128 above their mean if that is more.

    Args:
      state: as for `balance_rows`; afterwards its costs are limited.
    """
    cost = -state.remaining[COST]
    for microbatches in classes.microbatches(cost):
        row_costs = cost[microbatches]
        mean = row_costs.sum(axis=1, keepdims=True) // row_costs.shape[1]
        # Heaviest first: the first column is the costliest row of each microbatch.
        limit = np.maximum(row_costs[:, :1], mean + mean // SWAP_SEARCH.cost_margin)
        state.remaining[COST, microbatches] = limit - row_costs
    _balance_amount(state, classes, ATTENTION, SWAP_SEARCH.attention_sweeps)


def _balance_amount(state: RowState, classes: RowsByClass, weight: int, sweeps: int) -> None:
    """Even out the amount `weight` over rows that run together. Its limits are 0, which stands for
    none, so `remaining` is minus the load; the amounts before `weight` are limited."""
    rows_of_class = np.array([len(rows) for rows in classes.rows])
    groups = np.array([classes.ranks // span for span in classes.spans])
    rows = np.concatenate(classes.rows) if classes.rows else np.zeros(0, np.int64)
    by_class = _ClassRows(rows, rows_of_class, groups, np.array(classes.spans))
    _sweep_microbatches(state, state.in_order(COST), by_class, weight, sweeps, SWAP_SEARCH)


class _ClassRows(NamedTuple):
    """`RowsByClass` for compiled code."""

    rows: Longs  # of all classes, class by class
    rows_of_class: Longs  # [classes] number of rows
    groups: Longs  # [classes] rows per microbatch
    spans: Longs  # [classes]


class _RowPairs(NamedTuple):
    """Pairs of rows that should swap items: heavy[n] with light[n]."""

    heavy: Longs
    light: Longs


@compiled
def _sweep_microbatches(
    state: RowState,
    order: Longs,
    classes: _ClassRows,
    weight: int,
    sweeps: int,
    search: SwapSearch,
) -> None:
    """Sweep until the heaviest rows of the microbatches are close to their means."""
    by_load = np.empty(len(classes.rows), np.int64)
    pairs = _RowPairs(np.empty(len(by_load), np.int64), np.empty(len(by_load), np.int64))
    scratch = _empty_scratch(state)
    last_slowest = INT64_MAX
    patience = search.patience
    for sweep in range(sweeps):
        # Every sweep sorts rows and cuts them into microbatches again, because swaps change which
        # rows have similar loads.
        stop = 0
        for rows_of_class in classes.rows_of_class:
            rows = classes.rows[stop : stop + rows_of_class]
            # `remaining` is minus the load. Only a merge sort keeps rows of equal load in order.
            heaviest_first = np.argsort(state.remaining[weight][rows], kind="mergesort")
            by_load[stop : stop + rows_of_class] = rows[heaviest_first]
            stop += rows_of_class
        slowest, slow_enough, pairs_count = _pair_rows(
            state.remaining[weight], by_load, classes, sweep, search, pairs
        )
        # `slowest` is divided, because multiplying the first difference, near INT64_MAX, would
        # overflow.
        gains = last_slowest - slowest > slowest // search.least_gain
        patience = search.patience if gains else patience - 1
        if slowest <= slow_enough or not patience or not pairs_count:
            return
        last_slowest = slowest
        heavy = pairs.heavy[:pairs_count]
        light = pairs.light[:pairs_count]
        _swap_each_pair(state, order, heavy, light, sweep, weight, weight, scratch)


@compiled_leaf
def _pair_rows(
    remaining: Longs,
    by_load: Longs,
    classes: _ClassRows,
    sweep: int,
    search: SwapSearch,
    pairs: _RowPairs,
) -> tuple[int, int, int]:
    """Pair the rows of each microbatch that should swap items, the heaviest with the lightest in
    the first sweep.

    Args:
      remaining: [rows] minus the load of each row in the amount to balance.
      by_load: [rows] rows class by class, heaviest first in each class.
      pairs: overwritten with the pairs.

    Returns:
      (sum over microbatches of the load of the heaviest row, value of this sum at which sweeps may
      stop, number of pairs). Both sums count the load of one rank: an equal part of its row.
    """
    slowest = 0
    slow_enough = 0
    pairs_count = 0
    first_of_microbatch = 0
    for row_class in range(len(classes.spans)):
        groups = classes.groups[row_class]
        span = classes.spans[row_class]
        partners = groups // 2
        for _ in range(classes.rows_of_class[row_class] // groups):
            last_of_microbatch = first_of_microbatch + groups - 1
            load = 0
            for index in range(first_of_microbatch, last_of_microbatch + 1):
                load -= remaining[by_load[index]]
            mean = load // groups
            # `remaining` is minus the load, and floor division of a negative number rounds the load
            # of a rank's part up.
            slowest += -(remaining[by_load[first_of_microbatch]] // span)
            slow_enough += -(-(mean + mean // search.stop_within) // span)
            least_load = mean + mean // (2 * search.stop_within)
            for index in range(partners):
                heavy = by_load[first_of_microbatch + index]
                # `partner` counts from the lightest row. Heavy and light rows come from different
                # halves of the microbatch, so each row is in at most one pair.
                partner = (index - search.partner_step * sweep) % partners
                light = by_load[last_of_microbatch - partner]
                uneven = remaining[light] - remaining[heavy] > mean // search.stop_within
                if sweep >= search.sweeps_of_all_pairs:
                    uneven &= -remaining[heavy] > least_load
                if uneven:
                    pairs.heavy[pairs_count] = heavy
                    pairs.light[pairs_count] = light
                    pairs_count += 1
            first_of_microbatch = last_of_microbatch + 1
    return slowest, slow_enough, pairs_count


def balance_ranks(state: RowState, ranks: int) -> None:
    """Even out the ranks' totals of the last amount: rows that run together swap items of similar
    cost.

    Args:
      state: its row microbatch * R + rank is that of a rank in a microbatch. Without overflow, and
        with costs limited. Changed in place.
    """
    weight = len(state.amounts) - 1
    order = state.in_order(COST)
    partners = ranks // 2
    microbatches = state.remaining.shape[1] // ranks
    load = -state.remaining[weight].reshape(microbatches, ranks).sum(axis=0)
    for sweep in range(max(SWAP_SEARCH.rank_sweeps, microbatches)):
        by_load = np.argsort(-load, kind="stable")
        heavy = by_load[:partners]
        light = np.roll(by_load[ranks - partners :][::-1], SWAP_SEARCH.partner_step * sweep)
        uneven = (load[heavy] - load[light]) * SWAP_SEARCH.rank_difference * ranks > load.sum()
        if not uneven.any():
            return
        # Every row has the total of its rank here, so a swap in one microbatch takes into account
        # what the rank holds in the others.
        state.remaining[weight] = np.tile(-load, microbatches)
        # One microbatch per sweep: afterwards the totals are up to date only at its rows.
        start = sweep % microbatches * ranks
        heavy_rows = start + heavy[uneven]
        light_rows = start + light[uneven]
        _swap_items(state, order, heavy_rows, light_rows, sweep, weight, limited=weight)
        load = -state.remaining[weight, start : start + ranks]


class _Scratch(NamedTuple):
    """Arrays that swaps write to, made once because making them takes longer than some swaps."""

    by_row: Longs  # [N] items by row
    start: Longs  # [rows + 1] first entry of each row in `by_row`
    end: Longs  # [rows + 1]
    offered: Longs  # [2, OFFERED + 1] items that the heavy (0) and the light row (1) offer
    weights: Longs  # [2, choices] what each choice has of the amount to balance
    slots: Longs  # [2, choices] its slots


@compiled
def _empty_scratch(state: RowState) -> _Scratch:
    items = len(state.row_of)
    rows = state.remaining.shape[1]
    return _Scratch(
        np.empty(items, np.int64),
        np.empty(rows + 1, np.int64),
        np.empty(rows + 1, np.int64),
        np.empty((2, OFFERED + 1), np.int64),
        np.empty((2, len(CHOICE_A)), np.int64),
        np.empty((2, len(CHOICE_A)), np.int64),
    )


@compiled
def _swap_items(
    state: RowState,
    order: Longs,
    heavy: Longs,
    light: Longs,
    sweep: int,
    weight: int,
    limited: int,
) -> int:
    """Swap items once in every pair of rows that gains by it; return the number of swaps.

    Args:
      order: [N] items; the items that a row offers are spread evenly over this order, and differ
        from sweep to sweep.
      heavy, light: [pairs] rows, all different.
      weight: the amount to balance; heavy rows have less of it remaining.
      limited: no row may take more than it has remaining of the amounts before this index, except
        of `weight`.
    """
    scratch = _empty_scratch(state)
    return _swap_each_pair(state, order, heavy, light, sweep, weight, limited, scratch)


@compiled_leaf
def _swap_each_pair(
    state: RowState,
    order: Longs,
    heavy: Longs,
    light: Longs,
    sweep: int,
    weight: int,
    limited: int,
    scratch: _Scratch,
) -> int:
    """`_swap_items` with arrays to write to, so that sweeps make none."""
    row_of, amounts, remaining = state
    offered = scratch.offered
    weights = scratch.weights
    slots = scratch.slots
    # Listed once, before any swap, so a row may be in one pair only.
    _list_by_row(row_of, order, scratch)
    swaps = 0
    for pair in range(len(heavy)):
        rows = heavy[pair], light[pair]
        heavy_choices = _list_choices(amounts, scratch, 0, rows[0], sweep, weight)
        light_choices = _list_choices(amounts, scratch, 1, rows[1], sweep, weight)
        gap = remaining[weight, rows[1]] - remaining[weight, rows[0]]
        heavy_room = max(remaining[SLOTS, rows[0]], 0)
        light_room = max(remaining[SLOTS, rows[1]], 0)
        if weight == SLOTS:  # slots are balanced then, not limited
            heavy_room = light_room = INT64_MAX
        # A swap that moves a net d from the heavy to the light row leaves a gap of gap - 2 * d.
        # Choice 0 against choice 0 swaps nothing.
        best_miss = gap
        best = (0, 0)
        for from_heavy in range(heavy_choices):
            heavy_weight = weights[0, from_heavy]
            heavy_slots = slots[0, from_heavy]
            # Few swaps fit. A loop without branches, which is fast, checks first whether any may.
            worth_trying = 0
            for from_light in range(light_choices):
                miss = abs(2 * (heavy_weight - weights[1, from_light]) - gap)
                passed = heavy_slots - slots[1, from_light]
                fits = (passed <= light_room) & (-passed <= heavy_room)
                worth_trying += (miss < best_miss) & fits
            if not worth_trying:
                continue
            for from_light in range(light_choices):
                miss = abs(2 * (heavy_weight - weights[1, from_light]) - gap)
                if miss >= best_miss:
                    continue
                if _swap_fits(state, offered, rows, from_heavy, from_light, weight, limited):
                    best_miss = miss
                    best = (from_heavy, from_light)
        swaps += best_miss < gap
        # Where no swap was found, both choices are the item N, which does not move.
        for side in range(2):
            for item in (offered[side, CHOICE_A[best[side]]], offered[side, CHOICE_B[best[side]]]):
                if item < len(row_of):
                    row_of[item] = rows[1 - side]
                    for kind in range(len(amounts)):
                        remaining[kind, rows[side]] += amounts[kind, item]
                        remaining[kind, rows[1 - side]] -= amounts[kind, item]
    return swaps


@compiled_leaf
def _list_by_row(row_of: Longs, order: Longs, scratch: _Scratch) -> None:
    """List the items of every row in the given order."""
    start = scratch.start
    end = scratch.end
    # A counting sort: `start[row + 1]` first counts the items of a row; summed up, it is the end of
    # the row, where the next row starts. `end` advances from the start of each row to its end.
    start[:] = 0
    for item in range(len(row_of)):
        start[row_of[item] + 1] += 1
    for row in range(len(start) - 1):
        start[row + 1] += start[row]
        end[row] = start[row]
    for item in order:
        row = row_of[item]
        scratch.by_row[end[row]] = item
        end[row] += 1


@compiled_leaf
def _list_choices(
    amounts: Longs, scratch: _Scratch, side: int, row: int, sweep: int, weight: int
) -> int:
    """List the items that a row offers (all of them, or some that are evenly spread), and the
    weight and slots of each choice of these. Return the number of choices."""
    offered = scratch.offered
    start = scratch.start[row]
    size = scratch.start[row + 1] - start
    items = min(size, OFFERED)
    offered[side, 0] = amounts.shape[1] - 1  # no item
    for index in range(items):
        if size > OFFERED:
            # Equal steps of size / OFFERED items through the row, which start 1 / OFFERED item
            # later in each sweep. `sweep % size` is below `size`, so the last step stays inside.
            offered[side, index + 1] = scratch.by_row[
                start + (index * size + sweep % size) // OFFERED
            ]
        else:
            offered[side, index + 1] = scratch.by_row[start + index]
    # No item, one or two of `items`: these choices come first in CHOICE_A and CHOICE_B.
    choices = 1 + items * (items + 1) // 2
    for choice in range(choices):
        a = offered[side, CHOICE_A[choice]]
        b = offered[side, CHOICE_B[choice]]
        scratch.weights[side, choice] = amounts[weight, a] + amounts[weight, b]
        scratch.slots[side, choice] = amounts[SLOTS, a] + amounts[SLOTS, b]
    return choices


@compiled_leaf
def _swap_fits(
    state: RowState,
    offered: Longs,
    rows: tuple[int, int],
    from_heavy: int,
    from_light: int,
    weight: int,
    limited: int,
) -> bool:
    """Whether both rows have room for what they would get; an overflowing row may only lose."""
    amounts = state.amounts
    remaining = state.remaining
    for kind in range(limited):
        # The balanced amount has no limit: the swap is chosen to narrow its gap.
        if kind == weight:
            continue
        # What the light row gains less what it gives. A choice of fewer than two items is filled up
        # with item N, which takes nothing.
        passed = amounts[kind, offered[0, CHOICE_A[from_heavy]]]
        passed += amounts[kind, offered[0, CHOICE_B[from_heavy]]]
        passed -= amounts[kind, offered[1, CHOICE_A[from_light]]]
        passed -= amounts[kind, offered[1, CHOICE_B[from_light]]]
        if passed > max(remaining[kind, rows[1]], 0) or -passed > max(remaining[kind, rows[0]], 0):
            return False
    return True
