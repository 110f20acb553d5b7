"""How many rows of each class: lower bounds on what a batch needs, and the sets of rows that meet
them.

A microbatch costs each rank the capacity of its class, whatever is in the rows and however many
ranks share one, so sets of rows come by their slots per rank, fewest first.

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
    # items. The score is slots * waits * (costliest rank / its lower bound)**4.
    tries: int = 3
    extra_slots: int = 20
    imbalance_power: int = 4
    # Up to 1024 items every set is tried, also by best fit, which finds the tightest rows and is
    # slow. With more items only sets that the next exceeds by over 1/40 are; of the others those
    # that `wanted_slots` calls roomy enough.
    few_items: int = 1024
    similar_slots: int = 40
    # Up to 256 items the search for the last overflowing rows goes to its end, for it takes no
    # time.
    very_few_items: int = 256
    # So many combinations of row counts are listed in hundredths of a second. `auto` classes have some hundred.
    most_steps: int = 1 << 14
    # Full rows cannot be balanced: one slot in 12 should be free if all cost were attention's. Of
    # ranks that hold more than 3 times the longest item, less is enough, for part of their rows can
    # take the long items.
    room_to_balance: int = 12
    loose_ranks: int = 3


ROW_SEARCH = RowSearch()


@dataclass(frozen=True)
class RowNeeds:
    """What no packing can do without: for each class, slots and rows of that class or of one before
    it, whose rows have more slots."""

    slots: Longs  # [K] of a rank
    rows: Longs  # [K] of a group of ranks that exchange items; see `row_needs`


def row_needs(spec: PhaseSpec, length: Longs, owner: Longs, owners: int) -> RowNeeds:
    """Lower bounds on the rows of a phase.

    Args:
      length: [N] slots.
      owner: [N] number of the set of ranks an item may go to.
      owners: such sets, of `spec.ranks / owners` ranks each: 1 when items move freely, R when none
        moves.
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
        # No row holds more items of at least the shortest length than end to end; nor more segments.
        shortest = max(1, int(length[bound].min(initial=spec.longest_row)))
        together = max(1, min(spec.max_segments, spec.longest_row // shortest))
        slots.append(ceil_divide(most_slots, ranks))
        rows.append(max(ceil_divide(most_items, together), most_alone))
    return RowNeeds(np.array(slots, np.int64), np.array(rows, np.int64))


def row_counts(classes: tuple[RowClass, ...], ranks: int, needs: RowNeeds) -> Iterator[Longs]:
    """Microbatches of each class, [K]: combinations that meet the needs, fewest slots per rank
    first, then fewest microbatches.

    The class that takes most slots of a rank may have any number. Another never has so many that
    one microbatch of the class that takes next more would take as many slots, or else two: then a
    few similar sizes allow finer total capacities. What items need that only rows of more slots
    than those of the first hold comes on top. Where that multiplies to too many combinations, there
    are fewer of each. Without items the only combination is no microbatch.

    Args:
      ranks: of the group that the needs speak of; every span divides them.
    """
    if not needs.rows.any():
        yield np.zeros(len(classes), np.int64)
        return
    capacity = np.array([row_class.capacity for row_class in classes], np.int64)
    rows = np.array([ranks // row_class.span for row_class in classes], np.int64)
    base = base_class(classes)
    steps = row_steps(classes, _further_counts(capacity[:base], rows[:base], needs))
    is_base = np.arange(len(classes)) == base
    # Sets of number n have n times the slots of the base or more, but less than n + 1 times. So
    # those of fewest slots come first, and those before the first n cannot hold all items.
    for base_count in itertools.count(int(needs.slots[-1]) // int(capacity[base])):
        counts = steps + base_count * is_base
        # Needs are those of a class and all before it, so what sets have is summed up likewise.
        enough_slots = np.cumsum(counts * capacity, axis=1) >= needs.slots
        enough_rows = np.cumsum(counts * rows, axis=1) >= needs.rows
        yield from counts[(enough_slots & enough_rows).all(axis=1) & (counts[:, base] >= 0)]


def base_class(classes: tuple[RowClass, ...]) -> int:
    """The class that takes most slots of a rank; of equal ones the one of fewest ranks a row."""
    return by_capacity(classes)[0]


def by_capacity(classes: tuple[RowClass, ...]) -> list[int]:
    """Numbers of the classes by what they take of a rank, most first."""
    return sorted(range(len(classes)), key=lambda k: (-classes[k].capacity, classes[k].span))


def _further_counts(capacity: Longs, rows: Longs, needs: RowNeeds) -> tuple[int, ...]:
    """Of the classes whose rows have more slots than those of the base: microbatches that would
    hold all items which need such rows, were there no other class."""
    further: list[int] = []
    for k in range(len(capacity)):
        # All rows but one of a tight packing are more than half full.
        by_slots = 2 * ceil_divide(int(needs.slots[k : len(capacity)].max()), capacity[k])
        by_rows = ceil_divide(int(needs.rows[k : len(capacity)].max()), rows[k])
        further.append(int(by_slots + by_rows) + 1 if by_rows else 0)
    return tuple(further)


@lru_cache(maxsize=32)
def row_steps(classes: tuple[RowClass, ...], further: tuple[int, ...] = ()) -> Longs:
    """Microbatches of each class that come to less than one of the base, in the order of
    `row_counts`: [n, K].

    Where the others come to more, the count of the base is negative.

    Args:
      further: microbatches that the first classes, those before the base, may have beyond what
        makes totals fine.
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
    # Many given classes, and many items that only larger rows hold, multiply to more combinations than memory holds.
    # Class 0 holds every item and the base comes in any number, so the others may be fewer.
    spared = [k for k in other_classes if k]
    while math.prod(bound + 1 for bound in bounds.values()) > ROW_SEARCH.most_steps and any(
        bounds[k] for k in spared
    ):
        bounds[max(spared, key=bounds.__getitem__)] //= 2
    combinations = itertools.product(*(range(bounds[k] + 1) for k in other_classes))
    counts = np.zeros((math.prod(bounds[k] + 1 for k in other_classes), len(classes)), np.int64)
    counts[:, other_classes] = list(combinations)
    # What the others take is counted in microbatches of the base and slots over these.
    capacity = np.array([row_class.capacity for row_class in classes], np.int64)
    held_rows, held_slots = np.divmod(counts @ capacity, classes[base].capacity)
    counts[:, base] = -held_rows
    # Sets add equally many of the base to all steps, so these sums compare their microbatches.
    return counts[np.lexsort((counts.sum(axis=1), held_slots))]


def wanted_slots(length: Longs, cost: Longs, ranks: int, span: int = 1) -> int:
    """Slots in which many items can be placed evenly: their own, and some room where cost does not
    follow length. `span` ranks may share a row."""
    slots = int(length.sum())
    total_cost = max(int(cost.sum()), 1)
    # What every slot costs at least follows length. The rest makes rows of equal slots uneven.
    uneven_cost = total_cost - slots * int((cost // length).min())
    # How many of the longest items the slots of `span` ranks would hold.
    looseness = max(ROW_SEARCH.loose_ranks, slots * span // (ranks * int(length.max())))
    divisor = total_cost * ROW_SEARCH.room_to_balance * looseness
    return slots + slots * uneven_cost * ROW_SEARCH.loose_ranks // divisor
