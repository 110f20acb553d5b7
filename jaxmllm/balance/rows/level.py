"""Balancing filled rows: pairs of a heavy and a light row swap the items that bring them nearest.

    heavy [ a . b . ]  --a, b-->  light [ . . c . ]      of all choices of up to two items per row:
          [ . c . . ]  <---c---         [ . a b . ]      the one whose difference is nearest to half
                                                         the gap, and that both rows can take

A sweep pairs the heaviest row with the lightest and so on; the next one pairs rows differently.
That closes what longest-first leaves open, works where rows are full, and moves items out of rows
over capacity.

Letters: N items, K amounts, R ranks, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import INT64_MAX, Longs, ceil_divide, sums_by
from jaxmllm.balance.compiled import compiled

# The amounts of a `RowState`. All callers have the first three; attention is a part of the cost.
SLOTS, SEGMENTS, COST, ATTENTION = range(4)

# A row offers this many items, among which those that it swaps are chosen. Compiled code needs
# constants of the module.
OFFERED = 10

# All choices of up to two of a row's offered items, which count from 1; 0 is no item. Those of n
# items come first.
CHOICE_A = np.array([0] + [a for b in range(1, OFFERED + 1) for a in range(b)])
CHOICE_B = np.array([0] + [b for b in range(1, OFFERED + 1) for a in range(b)])


@dataclass(frozen=True)
class SwapSearch:
    """Constants of the sweeps in which pairs of rows swap items."""

    sweeps: int = 14  # at most
    # From sweep to sweep partners change by 7 positions: rows near the last partner may be as full
    # as that.
    partner_step: int = 7
    # To balance rows: stop when the slowest are less than 1/100 above the mean, and pair rows that
    # differ by more.
    stop_within: int = 100
    # After two sweeps of all pairs only rows that are over 1/200 above the mean swap: the others
    # make nobody wait.
    sweeps_of_all_pairs: int = 2
    # Stop after 6 sweeps in a row that gain less than 1/1024 each.
    least_gain: int = 1024
    patience: int = 6
    # To balance attention: 2 sweeps, which gain most of what 6 do, and rows that come to cost 1/128
    # above the mean at most.
    attention_sweeps: int = 2
    cost_margin: int = 128
    # To fix overflow: 24 further sweeps for the last rows, where the search may take long.
    further_sweeps: int = 24
    # To balance ranks: 4 sweeps, at least one per microbatch, between ranks that differ by over 1/8
    # of the mean.
    rank_sweeps: int = 4
    rank_difference: int = 8


SWAP_SEARCH = SwapSearch()


class RowState(NamedTuple):
    """Which row every item lies in, and what rows can still take. Of the K amounts that items take
    of rows, the first are slots, segments and cost; the next one is attention where rows run.

    Item index N is a sentinel for "no item": it takes nothing, and lies nowhere.
    """

    row_of: Longs  # [N]
    amounts: Longs  # [K, N + 1] what each item takes
    remaining: Longs  # [K, rows]; below 0 where a row has too much

    @classmethod
    def from_limits(
        cls, row_of: Longs, amounts: Sequence[Longs], limits: Sequence[Longs | int], rows: int
    ) -> RowState:
        """The state of items that lie in `row_of`.

        Args:
          row_of: [N]
          amounts: K of [N], what each item takes.
          limits: K of [rows] or one number, what rows may hold.
          rows: number of rows.
        """
        remaining = [
            limit - sums_by(row_of, amount, rows)
            for amount, limit in zip(amounts, limits, strict=True)
        ]
        with_sentinel = [np.append(amount, 0) for amount in amounts]
        return cls(row_of.copy(), np.stack(with_sentinel), np.stack(remaining))

    def in_order(self, kind: int) -> Longs:
        """[N] items by the amount they take."""
        return np.argsort(self.amounts[kind, :-1], kind="stable")


def fix_overflow(state: RowState, search: bool = False) -> bool:
    """Swap items until every row fits; returns whether that succeeded.

    Args:
      state: changed in place.
      search: continue where a sweep gains nothing, which takes long.
    """
    room = state.remaining[SLOTS]  # a view: swaps change it
    if room.sum() < 0:  # swapping items does not change the sum
        return False
    order = state.in_order(SLOTS)
    for sweep in range(SWAP_SEARCH.sweeps + (SWAP_SEARCH.further_sweeps if search else 0)):
        rows = np.argsort(room, kind="stable")
        overflowing = min(int(np.searchsorted(room[rows], 0)), len(rows) // 2)
        if not overflowing:
            break
        heavy = rows[:overflowing]
        light = np.roll(rows[::-1], -sweep)[:overflowing]
        swaps = _swap_items(state, order, heavy, light, sweep, SLOTS, limited=COST)
        if not swaps and not search:
            break
    return not (room < 0).any()


@dataclass(frozen=True)
class RowsByClass:
    """The rows of each class, of which `ranks / span` of similar cost run together: a microbatch."""

    rows: Sequence[Longs]
    spans: Sequence[int]  # of the classes, how many ranks hold a row together
    ranks: int

    def microbatches(self, load: Longs) -> list[Longs]:
        """The rows of each class by microbatch, heaviest first: [M, R / span]."""
        return [
            rows[np.argsort(-load[rows], kind="stable")].reshape(-1, self.ranks // span)
            for rows, span in zip(self.rows, self.spans, strict=True)
        ]


def balance_rows(state: RowState, classes: RowsByClass) -> None:
    """Make rows that run together cost nearly the same, without overflow.

    Args:
      state: without overflow; its costs are not limited (0). Changed in place.
    """
    _balance(state, classes, COST, SWAP_SEARCH.sweeps)


def balance_attention(state: RowState, classes: RowsByClass) -> None:
    """Make rows that run together attend to nearly as much, where `balance_rows` came before.

    Slots take their time empty or full, for programs have fixed shapes. So the slowest of the rows
    that run together is not the costliest, which may just be full, but the one that attends most.
    No row comes to cost more than the costliest did, or 1/128 over the mean.

    Args:
      state: as for `balance_rows`; its costs are limited afterwards.
    """
    cost = -state.remaining[COST]
    for microbatches in classes.microbatches(cost):
        of_rows = cost[microbatches]
        mean = of_rows.sum(axis=1, keepdims=True) // of_rows.shape[1]
        limit = np.maximum(of_rows[:, :1], mean + mean // SWAP_SEARCH.cost_margin)
        state.remaining[COST, microbatches] = limit - of_rows
    _balance(state, classes, ATTENTION, SWAP_SEARCH.attention_sweeps)


def _balance(state: RowState, classes: RowsByClass, weight: int, sweeps: int) -> None:
    """Make rows that run together have nearly the same of the amount `weight`, which nothing limits
    (0); those before it are limited."""
    order = state.in_order(COST)
    load = -state.remaining[weight]
    last_slowest = INT64_MAX
    patience = SWAP_SEARCH.patience
    for sweep in range(sweeps):
        slowest = 0
        slow_enough = 0
        heavy_rows: list[Longs] = []
        light_rows: list[Longs] = []
        for microbatches, span in zip(classes.microbatches(load), classes.spans, strict=True):
            pairs = _uneven_pairs(load, microbatches, sweep)
            heavy_rows.append(pairs.heavy)
            light_rows.append(pairs.light)
            # Of a rank, whose part of a row takes as long as the others' parts.
            slowest += int(ceil_divide(load[microbatches[:, 0]], span).sum())
            slow_enough += int(ceil_divide(pairs.slow_enough, span).sum())
        gains = (last_slowest - slowest) * SWAP_SEARCH.least_gain > slowest
        patience = SWAP_SEARCH.patience if gains else patience - 1
        if slowest <= slow_enough or not patience:
            return
        last_slowest = slowest
        heavy = np.concatenate(heavy_rows)
        light = np.concatenate(light_rows)
        if not len(heavy):
            return
        _swap_items(state, order, heavy, light, sweep, weight, limited=weight)
        load = -state.remaining[weight]


class _Pairs(NamedTuple):
    heavy: Longs  # [pairs]
    light: Longs  # [pairs]
    slow_enough: Longs  # [M] load of a microbatch's heaviest row that needs no swap


def _uneven_pairs(load: Longs, microbatches: Longs, sweep: int) -> _Pairs:
    """Rows of a microbatch that should swap items.

    Args:
      load: [rows]
      microbatches: [M, n] rows, heaviest first.
    """
    rows = microbatches.shape[1]
    half = rows // 2
    mean = load[microbatches].sum(axis=1, keepdims=True) // rows
    heavy = microbatches[:, :half]
    lightest_first = microbatches[:, rows - half :][:, ::-1]
    light = np.roll(lightest_first, SWAP_SEARCH.partner_step * sweep, axis=1)
    uneven = load[heavy] - load[light] > mean // SWAP_SEARCH.stop_within
    if sweep >= SWAP_SEARCH.sweeps_of_all_pairs:
        uneven &= load[heavy] > mean + mean // (2 * SWAP_SEARCH.stop_within)
    slow_enough = (mean + mean // SWAP_SEARCH.stop_within)[:, 0]
    return _Pairs(heavy[uneven], light[uneven], slow_enough)


def balance_ranks(state: RowState, ranks: int) -> None:
    """Bring the ranks' totals of the last amount nearer to each other: rows that run together swap
    items of similar cost.

    Args:
      state: of rows microbatch * R + rank, without overflow, and with what each row may still cost.
        Changed in place.
    """
    weight = len(state.amounts) - 1
    order = state.in_order(COST)
    half = ranks // 2
    microbatches = state.remaining.shape[1] // ranks
    load = -state.remaining[weight].reshape(microbatches, ranks).sum(axis=0)
    for sweep in range(max(SWAP_SEARCH.rank_sweeps, microbatches)):
        by_load = np.argsort(-load, kind="stable")
        heavy = by_load[:half]
        light = np.roll(by_load[ranks - half :][::-1], SWAP_SEARCH.partner_step * sweep)
        uneven = (load[heavy] - load[light]) * SWAP_SEARCH.rank_difference * ranks > load.sum()
        if not uneven.any():
            return
        # The totals of the ranks, at each of their rows: a swap in one microbatch counts what the
        # others hold.
        state.remaining[weight] = np.tile(-load, microbatches)
        start = sweep % microbatches * ranks
        heavy_rows = start + heavy[uneven]
        light_rows = start + light[uneven]
        _swap_items(state, order, heavy_rows, light_rows, sweep, weight, limited=weight)
        load = -state.remaining[weight, start : start + ranks]


def _swap_items(
    state: RowState, order: Longs, heavy: Longs, light: Longs, sweep: int, weight: int, limited: int
) -> int:
    """One swap for every pair of rows that gains by it; returns how many do.

    Args:
      order: [N] items; those that a row offers are spread evenly over it, and others in every
        sweep.
      heavy, light: [pairs] different rows.
      weight: the amount to balance; heavy rows have less of it remaining.
      limited: of the amounts before this one, except `weight`, no row may take more than it has
        remaining.
    """
    items_of_rows = np.bincount(state.row_of, minlength=state.remaining.shape[1])
    start = np.zeros(len(items_of_rows) + 1, np.int64)
    start[1:] = np.cumsum(items_of_rows)
    return _swap_pairs(state, order, start, heavy, light, sweep, weight, limited)


@compiled
def _swap_pairs(
    state: RowState,
    order: Longs,
    start: Longs,
    heavy: Longs,
    light: Longs,
    sweep: int,
    weight: int,
    limited: int,
) -> int:
    """`_swap_items`; the items of row r are those from start[r] on in a list by row."""
    row_of, amounts, remaining = state
    by_row = np.empty(len(order), np.int64)
    end = start.copy()
    for item in order:
        by_row[end[row_of[item]]] = item
        end[row_of[item]] += 1
    offered = np.full((2, OFFERED + 1), len(row_of))
    weights = np.empty((2, len(CHOICE_A)), np.int64)
    choices = np.empty(2, np.int64)
    swaps = 0
    for pair in range(len(heavy)):
        rows = heavy[pair], light[pair]
        for side in range(2):
            items = _offer(offered[side], by_row[start[rows[side]] : start[rows[side] + 1]], sweep)
            choices[side] = 1 + items * (items + 1) // 2
            for choice in range(choices[side]):
                a = offered[side, CHOICE_A[choice]]
                b = offered[side, CHOICE_B[choice]]
                weights[side, choice] = amounts[weight, a] + amounts[weight, b]
        gap = remaining[weight, rows[1]] - remaining[weight, rows[0]]
        best_miss = gap
        best = (0, 0)
        for from_heavy in range(choices[0]):
            for from_light in range(choices[1]):
                miss = abs(2 * (weights[0, from_heavy] - weights[1, from_light]) - gap)
                if miss >= best_miss:
                    continue
                if _fits(state, offered, rows, from_heavy, from_light, weight, limited):
                    best_miss = miss
                    best = (from_heavy, from_light)
        swaps += best_miss < gap
        for side in range(2):
            for item in (offered[side, CHOICE_A[best[side]]], offered[side, CHOICE_B[best[side]]]):
                if item < len(row_of):
                    row_of[item] = rows[1 - side]
                    remaining[:, rows[side]] += amounts[:, item]
                    remaining[:, rows[1 - side]] -= amounts[:, item]
    return swaps


@compiled
def _offer(offered: Longs, items: Longs, sweep: int) -> int:
    """Put items of a row into `offered` from 1 on: all, or some evenly spread; returns how many."""
    size = len(items)
    if size <= OFFERED:
        offered[1 : size + 1] = items
        return size
    for index in range(OFFERED):
        offered[index + 1] = items[(index * size + sweep % size) // OFFERED]
    return OFFERED


@compiled
def _fits(
    state: RowState,
    offered: Longs,
    rows: tuple[int, int],
    from_heavy: int,
    from_light: int,
    weight: int,
    limited: int,
) -> bool:
    """Whether both rows can take what they would get; one that has too much may get less."""
    amounts = state.amounts
    remaining = state.remaining
    for kind in range(limited):
        if kind == weight:
            continue
        passed = amounts[kind, offered[0, CHOICE_A[from_heavy]]]
        passed += amounts[kind, offered[0, CHOICE_B[from_heavy]]]
        passed -= amounts[kind, offered[1, CHOICE_A[from_light]]]
        passed -= amounts[kind, offered[1, CHOICE_B[from_light]]]
        if passed > max(remaining[kind, rows[1]], 0) or -passed > max(remaining[kind, rows[0]], 0):
            return False
    return True
