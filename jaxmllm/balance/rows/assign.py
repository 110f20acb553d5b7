"""Placing the items of one phase: which row, which microbatch, which rank.

Rows cost their capacity, whatever is in them, so their number comes first; only then their contents.

    for counts in row_counts(..):   rows of each class a rank, fewest slots first
        fill R * counts rows        fill_by_cost, fix_overflow rows that are too full, level the rows that run together
    arrange                         rows of like cost into one microbatch, then rows onto ranks

Letters: N items, R ranks, M microbatches, K row classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, sums_by
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.level import RowState, balance_rows, fix_overflow
from jaxmllm.balance.rows.long import with_long_rows
from jaxmllm.balance.rows.pack import best_fit, fill_by_cost, first_fit, lay_out

EVEN = 100  # ranks that wait less than one part in so many are left as they are
UNEVEN = 4  # what the costliest rank has above that weighs so many times what rows take
STEP = 40  # a set of rows is little larger than another if it has at most one part in so many more slots
TRADING_ROOM = 12  # one slot in so many should be free if all cost were attention's: full rows cannot be levelled ...
LOOSE = 3  # ... but of more than this many times the longest item, part of the rows can take the long items
FEW = 1024  # items that are no longer many ...
HANDFUL = 256  # ... and so few that a long search for the tightest rows takes no time
WINDOW, TRIES = 20, 3  # where ranks wait longer, the best is taken of so many sets with up to a twentieth more slots


def assign(spec: PhaseSpec, items: PhaseItems) -> PhasePlan:
    """Place every item of a phase freely over all ranks (A1 of OrchMLLM, arXiv 2503.23830, under row capacities), and
    those that need long rows in these.

    Returns:
      The plan, with `pool` and `pool_offset` left at zero: routes.py sets them.

    Raises:
      ValueError: an item is longer than the largest capacity.
    """
    return with_long_rows(spec, items, None, lambda items, _: _assign(spec, items))


def _assign(spec: PhaseSpec, items: PhaseItems) -> PhasePlan:
    _check_lengths(spec, items)
    cost = item_costs(spec, items.length)
    if not len(cost):
        return _phase_plan(spec, np.zeros(len(spec.capacities), np.int64), cost, cost, cost)
    anyone = np.zeros(len(cost), np.int64)
    sizes = np.array(spec.capacities, np.int64)
    even = ceil_divide(int(cost.sum()) * (EVEN + 1), EVEN * spec.ranks)
    floor = rank_floor(cost, spec.ranks)
    wanted = wanted_slots(items.length, cost, spec.ranks)
    best: tuple[int, Longs, _Placing] | None = None
    most_slots, tries = 0, 0
    for counts, more in _with_next(row_counts(spec.capacities, row_needs(spec, items.length, anyone, 1))):
        slots, after = int(counts @ sizes), int(more @ sizes)
        search = len(cost) <= FEW or after * STEP > slots * (STEP + 1)
        if not search and slots * spec.ranks < wanted:
            continue
        if best is not None and (slots > most_slots or tries == TRIES):
            break
        placing = _fill(spec, items.length, cost, counts, search=search)
        if placing is None:
            continue
        if best is None:
            most_slots = slots * (WINDOW + 1) // WINDOW
        tries += 1
        score = slots * placing.waits * max(placing.most * EVEN, floor * (EVEN + 1)) ** UNEVEN
        if best is None or score < best[0]:
            best = score, counts, placing
        if placing.waits <= even:
            break
    assert best is not None, "one row for every item always suffices"
    _, counts, placing = best
    return _phase_plan(spec, counts, placing.microbatch, placing.rank, items.length)


def assign_in_place(spec: PhaseSpec, items: PhaseItems, rank: Longs) -> PhasePlan:
    """Pack every item on the rank it is given, in order: what happens without balancing.

    Args:
      rank: [N] rank of each item.
    """
    return with_long_rows(spec, items, rank, lambda items, rank: _assign_in_place(spec, items, rank))


def _assign_in_place(spec: PhaseSpec, items: PhaseItems, rank: Longs | None) -> PhasePlan:
    assert rank is not None
    _check_lengths(spec, items)
    fullest_first = np.argsort(-sums_by(rank, items.length, spec.ranks), kind="stable")
    own = [np.flatnonzero(rank == number) for number in fullest_first]
    for counts in row_counts(spec.capacities, row_needs(spec, items.length, rank, spec.ranks)):
        capacity = np.repeat(np.array(spec.capacities, np.int64), counts)
        microbatch = np.empty(len(rank), np.int64)
        for members in own:
            row_of = first_fit(items.length[members], capacity, spec.max_segments)
            if row_of is None:
                break
            microbatch[members] = row_of
        else:
            return _phase_plan(spec, counts, microbatch, rank, items.length)
    raise AssertionError("one row for every item always suffices")


def item_costs(spec: PhaseSpec, length: Longs) -> Longs:
    """linear * length + quadratic * length**2, shifted right until any sum of them is below 2**53: [N].

    Sums are then exact as int64 and as float64, on every host alike.
    """
    longest = int(length.max(initial=0))
    largest = spec.linear * longest + spec.quadratic * longest**2
    before = max(0, largest.bit_length() - 62)  # a product must fit int64
    after = max(0, (len(length) * largest).bit_length() - 53 - before)
    return ((spec.linear >> before) * length + (spec.quadratic >> before) * length**2) >> after


def rank_floor(cost: Longs, ranks: int) -> int:
    """What no placement of items of these costs [N] brings the costliest rank below."""
    return max(ceil_divide(int(cost.sum()), ranks), int(cost.max(initial=0)))


@dataclass(frozen=True)
class RowNeeds:
    """What no packing can do without, per rank: for each class, slots and rows of that class or a larger one."""

    slots: Longs  # [K]
    rows: Longs  # [K]


def row_needs(spec: PhaseSpec, length: Longs, owner: Longs, owners: int) -> RowNeeds:
    """Lower bounds on the rows of a rank.

    Args:
      length: [N] slots.
      owner: [N] number of the group of ranks an item may go to.
      owners: groups, of `spec.ranks / owners` ranks each: 1 when items move freely, R when none moves.
    """
    ranks = spec.ranks // owners
    slots, rows = [], []
    for below in (*spec.capacities[1:], 0):
        bound = length > below  # fits no smaller class
        alone = bound & (length > spec.capacities[0] // 2)  # no two of them share a row
        slots.append(ceil_divide(int(sums_by(owner[bound], length[bound], owners).max(initial=0)), ranks))
        members = int(np.bincount(owner[bound], minlength=owners).max(initial=0))
        singles = int(np.bincount(owner[alone], minlength=owners).max(initial=0))
        rows.append(max(ceil_divide(members, ranks * spec.max_segments), ceil_divide(singles, ranks)))
    return RowNeeds(np.array(slots, np.int64), np.array(rows, np.int64))


def row_counts(capacities: tuple[int, ...], needs: RowNeeds) -> Iterator[Longs]:
    """Rows of each class a rank, [K]: combinations that meet the needs, fewest slots first, then fewest rows.

    A class never has so many rows that one of the next larger class would hold as much, or else two: then classes of
    about one size come to finely stepped sums. Without items the only combination is no row.
    """
    if not needs.rows.any():
        yield np.zeros(len(capacities), np.int64)
        return
    sizes, steps = np.array(capacities, np.int64), row_steps(capacities)
    for first in itertools.count(int(needs.slots[-1]) // capacities[0]):
        counts = steps + first * (np.arange(len(capacities)) == 0)
        enough = (np.cumsum(counts * sizes, axis=1) >= needs.slots) & (np.cumsum(counts, axis=1) >= needs.rows)
        yield from counts[enough.all(axis=1) & (counts[:, 0] >= 0)]


@lru_cache(maxsize=1024)
def row_steps(capacities: tuple[int, ...]) -> Longs:
    """Rows of each class that come to less than one row of the first, in the order of `row_counts`: [n, K]. Where the
    smaller classes come to more, the count of the first is negative."""
    bounds = [max(2, (larger - 1) // smaller) for larger, smaller in itertools.pairwise(capacities)]
    tails = np.array(list(itertools.product(*(range(bound + 1) for bound in bounds))), np.int64)
    whole, rest = np.divmod(tails @ np.array(capacities[1:], np.int64), capacities[0])
    counts = np.concatenate([-whole[:, None], tails], axis=1)
    return counts[np.lexsort((counts.sum(axis=1), rest))]


def wanted_slots(length: Longs, cost: Longs, ranks: int) -> int:
    """Slots in which many items can be placed evenly: their own, and some room where cost does not follow length."""
    slots, total = int(length.sum()), max(int(cost.sum()), 1)
    beyond = total - slots * int((cost // length).min())
    looseness = max(LOOSE, slots // (ranks * int(length.max())))
    return slots + slots * beyond * LOOSE // (total * TRADING_ROOM * looseness)


def _with_next(counts: Iterator[Longs]) -> Iterator[tuple[Longs, Longs]]:
    """Each of endless counts and the one that follows it."""
    this = next(counts)
    for following in counts:
        yield this, following
        this = following


def _fill(spec: PhaseSpec, length: Longs, cost: Longs, counts: Longs, search: bool) -> _Placing | None:
    """Place all items in `counts` rows of each class a rank; None where they do not fit.

    Args:
      search: try best fit too, which is slow.
    """
    capacity = np.repeat(np.array(spec.capacities, np.int64), counts * spec.ranks)

    def filling(row_of: Longs) -> RowState:
        amounts, most = (length, np.ones_like(length), cost), (capacity, spec.max_segments, 0)
        return RowState.from_limits(row_of, amounts, most, len(capacity))

    row_of = fill_by_cost(length, cost, capacity, spec.max_segments)
    filled = None if row_of is None else filling(row_of)
    if filled is None or not fix_overflow(filled, len(length) <= HANDFUL):
        row_of = best_fit(length, capacity, spec.max_segments) if search else None
        if row_of is None:
            return None
        filled = filling(row_of)
    classes = np.split(np.arange(len(capacity)), np.cumsum(counts * spec.ranks)[:-1])
    balance_rows(filled, [rows for rows in classes if len(rows)], spec.ranks)
    return _arrange(filled.row_of, cost, counts, spec)


@dataclass(frozen=True)
class _Placing:
    microbatch: Longs  # [N]
    rank: Longs  # [N]
    waits: int  # sum over microbatches of the slowest rank's row
    most: int  # total of the costliest rank


def _arrange(row_of: Longs, cost: Longs, counts: Longs, spec: PhaseSpec) -> _Placing:
    """Sort the rows of a class by cost, cut them into microbatches, and give the heaviest row of each to the rank
    that has least so far."""
    row_cost = sums_by(row_of, cost, int(counts.sum()) * spec.ranks)
    class_of = np.repeat(np.arange(len(counts)), counts * spec.ranks)
    rows = np.lexsort((-row_cost, class_of)).reshape(-1, spec.ranks)  # [M, R], descending in each microbatch
    ranks = np.empty_like(rows)
    total = np.zeros(spec.ranks, np.int64)
    for number, members in enumerate(rows):
        ranks[number] = np.argsort(total, kind="stable")
        total[ranks[number]] += row_cost[members]
    microbatch_of, rank_of = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    microbatch_of[rows] = np.arange(len(rows))[:, None]
    rank_of[rows] = ranks
    return _Placing(microbatch_of[row_of], rank_of[row_of], int(row_cost[rows[:, 0]].sum()), int(total.max()))


def _phase_plan(spec: PhaseSpec, counts: Longs, microbatch: Longs, rank: Longs, length: Longs) -> PhasePlan:
    capacity = np.repeat(np.array(spec.capacities, np.int32), counts)
    offset, segment = lay_out(microbatch * spec.ranks + rank, length)
    return PhasePlan(
        capacity=capacity,
        pool=np.zeros_like(capacity),
        pool_offset=np.zeros_like(capacity),
        microbatch=microbatch.astype(np.int32),
        rank=rank.astype(np.int32),
        offset=offset,
        segment=segment,
    )


def _check_lengths(spec: PhaseSpec, items: PhaseItems) -> None:
    if (items.length > spec.capacities[0]).any():
        worst = int(items.length.argmax())
        raise ValueError(
            f"an item of phase {spec.name!r} has {items.length[worst]} slots (example {items.example[worst]} of the "
            f"batch), but its largest row holds {spec.capacities[0]}: raise phases.{spec.name}.capacities or "
            f"phases.{spec.name}.max_capacity, or limit the size of items"
        )
