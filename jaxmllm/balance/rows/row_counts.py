"""How many rows of each class: lower bounds on what a batch needs, and the sets of rows that meet
them.

A microbatch costs each rank the capacity of its class, whatever is in the rows and however many
ranks share one, so sets of rows are ordered by slots per rank, fewest first.

    class (capacity C, span g)    C slots of every rank; R / g rows of g * C slots

Letters: N items, R ranks, K row classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, sums_by
from jaxmllm.balance.records import PhaseSpec, RowClass


@dataclass(frozen=True)
class RowSearch:
    """Constants of the search for the set of rows that holds a batch with the least waste."""

    # Stop at a set of rows whose slowest ranks wait less than 1/100 longer than the mean.
    stop_within: int = 100
    # Otherwise take the best of 3 sets, with up to 1/20 more slots than the smallest that holds the
    # items. The score is slots * waits * (cost of the costliest rank)**4.
    tries: int = 3
    extra_slots: int = 20
    imbalance_power: int = 4
    # Up to 1024 items every set is tried, with best fit as well, which finds the tightest rows and
    # is slow. With more items that holds only for sets whose successor has over 1/40 more slots; of
    # the other sets those with at least `wanted_slots` are tried, without best fit.
    few_items: int = 1024
    similar_slots: int = 40
    # Up to 256 items `fix_overflow` searches to its end, because that takes little time.
    very_few_items: int = 256
    # Limit on the combinations of row counts, which take hundredths of a second to list. `auto`
    # classes have a few hundred.
    most_steps: int = 1 << 14
    # Full rows cannot be balanced: one slot in 12 should be free if all cost were attention's.
    # Where ranks hold more than 3 times the longest item less is enough, because some of their rows
    # can take the long items.
    room_to_balance: int = 12
    loose_ranks: int = 3


ROW_SEARCH = RowSearch()


@dataclass(frozen=True)
class RowNeeds:
    """Lower bounds for any packing: for each class, the slots and rows of that class and those
    before it, whose rows have more slots, together."""

    slots: Longs  # [K] per rank
    rows: Longs  # [K] per set of ranks among which items may move; see `row_needs`


def row_needs(spec: PhaseSpec, length: Longs, owner: Longs, owners: int) -> RowNeeds:
    """Lower bounds on the rows of a phase.

    Args:
      length: [N] slots.
      owner: [N] number of the set of ranks that may hold each item.
      owners: number of these sets, of `spec.ranks / owners` ranks each: 1 when items move freely, R
        when none moves.
    """
    ranks = spec.ranks // owners
    slots: list[int] = []
    rows: list[int] = []
    for next_class in (*spec.classes[1:], RowClass(0)):
        bound = length > next_class.slots  # fits no smaller class
        alone = bound & (length > spec.longest_row // 2)  # no two of them share a row
        most_slots = int(sums_by(owner[bound], length[bound], owners).max(initial=0))
        most_items = int(np.bincount(owner[bound], minlength=owners).max(initial=0))
        most_alone = int(np.bincount(owner[alone], minlength=owners).max(initial=0))
        # A row holds at most as many of these items as fit when all are as short as the shortest,
        # and at most `max_segments`.
        shortest = max(1, int(length[bound].min(initial=spec.longest_row)))
        together = max(1, min(spec.max_segments, spec.longest_row // shortest))
        slots.append(ceil_divide(most_slots, ranks))
        rows.append(max(ceil_divide(most_items, together), most_alone))
    return RowNeeds(np.array(slots, np.int64), np.array(rows, np.int64))


def row_counts(classes: tuple[RowClass, ...], ranks: int, needs: RowNeeds) -> Iterator[Longs]:
    """Numbers of microbatches of each class, [K]: combinations that meet the needs, fewest slots
    per rank first, then fewest microbatches.

    The class with the largest capacity, the base, may have any number. The microbatches of any
    other class take fewer slots than one of the next larger capacity, or else are up to two: a few
    similar sizes allow finer total capacities. Classes whose rows have more slots than the base's
    may have more microbatches, for the items that need such rows. If that multiplies to too many
    combinations, the numbers are reduced. Without items the only combination is no microbatch.

    Args:
      ranks: number of ranks in a set, as the needs count them; every span divides it.
    """
    if not needs.rows.any():
        yield np.zeros(len(classes), np.int64)
        return
    capacity = np.array([row_class.capacity for row_class in classes], np.int64)
    rows = np.array([ranks // row_class.span for row_class in classes], np.int64)
    base = base_class(classes)
    steps = row_steps(classes, _further_counts(capacity[:base], rows[:base], needs))
    is_base = np.arange(len(classes)) == base
    # The sets with base count n have at least n, but less than n + 1 times the slots of a base
    # microbatch, so sets come in the order of slots. Below the first count slots cannot suffice.
    for base_count in itertools.count(int(needs.slots[-1]) // int(capacity[base])):
        counts = steps + base_count * is_base
        # Needs are those of a class and all before it, so slots and rows are summed up likewise.
        enough_slots = np.cumsum(counts * capacity, axis=1) >= needs.slots
        enough_rows = np.cumsum(counts * rows, axis=1) >= needs.rows
        yield from counts[(enough_slots & enough_rows).all(axis=1) & (counts[:, base] >= 0)]


def base_class(classes: tuple[RowClass, ...]) -> int:
    """Index of the class with the largest capacity, and among equal ones the smallest span."""
    return by_capacity(classes)[0]


def by_capacity(classes: tuple[RowClass, ...]) -> list[int]:
    """Indices of the classes by capacity, largest first; equal ones by span, smallest first."""
    return sorted(range(len(classes)), key=lambda k: (-classes[k].capacity, classes[k].span))


def _further_counts(capacity: Longs, rows: Longs, needs: RowNeeds) -> tuple[int, ...]:
    """For each class whose rows have more slots than the base's, the microbatches that would hold
    all items that need such rows if there were no other class."""
    further: list[int] = []
    for k in range(len(capacity)):
        # In a tight packing all rows but one are more than half full, so twice the slots suffice.
        by_slots = 2 * ceil_divide(int(needs.slots[k : len(capacity)].max()), capacity[k])
        by_rows = ceil_divide(int(needs.rows[k : len(capacity)].max()), rows[k])
        further.append(int(by_slots + by_rows) + 1 if by_rows else 0)
    return tuple(further)


@lru_cache(maxsize=32)
def row_steps(classes: tuple[RowClass, ...], further: tuple[int, ...] = ()) -> Longs:
    """Microbatches of each class whose slots sum to less than one base microbatch, in the order of
    `row_counts`: [n, K].

    Where slots of the other classes sum to more, the count of the base is negative.

    Args:
      further: additional microbatches that each class before the base may have (see
        `_further_counts`).
    """
    order = by_capacity(classes)
    base = order[0]
    bounds = {
        smaller: max(2, (classes[larger].capacity - 1) // classes[smaller].capacity)
        for larger, smaller in itertools.pairwise(order)
    }
    for k, microbatches in enumerate(further):
        bounds[k] += microbatches
    other_classes = [k for k in range(len(classes)) if k != base]
    # Many given classes, and many items that only larger rows hold, can multiply to more
    # combinations than memory holds. Class 0 holds every item and the base may have any number, so
    # the counts of the other classes can be reduced.
    spared = [k for k in other_classes if k]
    while math.prod(bound + 1 for bound in bounds.values()) > ROW_SEARCH.most_steps and any(
        bounds[k] for k in spared
    ):
        bounds[max(spared, key=bounds.__getitem__)] //= 2
    combinations = itertools.product(*(range(bounds[k] + 1) for k in other_classes))
    counts = np.zeros((math.prod(bounds[k] + 1 for k in other_classes), len(classes)), np.int64)
    counts[:, other_classes] = list(combinations)
    # Slots of the other classes: as many base microbatches as they make, and the slots left over.
    capacity = np.array([row_class.capacity for row_class in classes], np.int64)
    held_rows, held_slots = np.divmod(counts @ capacity, classes[base].capacity)
    counts[:, base] = -held_rows
    # `row_counts` adds the same base count to all steps, so these sums order sets by microbatches.
    return counts[np.lexsort((counts.sum(axis=1), held_slots))]


def wanted_slots(length: Longs, cost: Longs, ranks: int, span: int = 1) -> int:
    """Slots in which many items can be placed evenly: their own, and some room where cost is not
    proportional to length. `span` ranks may share a row."""
    slots = int(length.sum())
    total_cost = max(int(cost.sum()), 1)
    # The least cost per slot is proportional to length; the rest makes rows with equal slots
    # uneven.
    uneven_cost = total_cost - slots * int((cost // length).min())
    # How many of the longest items the slots of `span` ranks would hold.
    looseness = max(ROW_SEARCH.loose_ranks, slots * span // (ranks * int(length.max())))
    divisor = total_cost * ROW_SEARCH.room_to_balance * looseness
    return slots + slots * uneven_cost * ROW_SEARCH.loose_ranks // divisor
