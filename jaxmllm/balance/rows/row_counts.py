"""How many rows of each class: lower bounds on what a batch needs, and the sets of rows that meet
them.

Rows cost their capacity, whatever is in them, so sets of rows come by their slots, fewest first.

Letters: N items, R ranks, K row classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, sums_by
from jaxmllm.balance.records import PhaseSpec


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
    # Full rows cannot be balanced: one slot in 12 should be free if all cost were attention's. Of
    # ranks that hold more than 3 times the longest item, less is enough, for part of their rows can
    # take the long items.
    room_to_balance: int = 12
    loose_ranks: int = 3


ROW_SEARCH = RowSearch()


@dataclass(frozen=True)
class RowNeeds:
    """What no packing can do without, per rank: for each class, slots and rows of that class or a
    larger one."""

    slots: Longs  # [K]
    rows: Longs  # [K]


def row_needs(spec: PhaseSpec, length: Longs, owner: Longs, owners: int) -> RowNeeds:
    """Lower bounds on the rows of a rank.

    Args:
      length: [N] slots.
      owner: [N] number of the group of ranks an item may go to.
      owners: groups, of `spec.ranks / owners` ranks each: 1 when items move freely, R when none
        moves.
    """
    ranks = spec.ranks // owners
    slots: list[int] = []
    rows: list[int] = []
    for next_capacity in (*spec.capacities[1:], 0):
        bound = length > next_capacity  # fits no smaller class
        alone = bound & (length > spec.capacities[0] // 2)  # no two of them share a row
        most_slots = int(sums_by(owner[bound], length[bound], owners).max(initial=0))
        most_items = int(np.bincount(owner[bound], minlength=owners).max(initial=0))
        most_alone = int(np.bincount(owner[alone], minlength=owners).max(initial=0))
        slots.append(ceil_divide(most_slots, ranks))
        rows_by_segments = ceil_divide(most_items, ranks * spec.max_segments)
        rows.append(max(rows_by_segments, ceil_divide(most_alone, ranks)))
    return RowNeeds(np.array(slots, np.int64), np.array(rows, np.int64))


def row_counts(capacities: tuple[int, ...], needs: RowNeeds) -> Iterator[Longs]:
    """Rows of each class per rank, [K]: combinations that meet the needs, fewest slots first, then
    fewest rows.

    A class never has so many rows that one of the next larger class would hold as much, or else
    two: then a few similar row sizes allow finer total capacities. Without items the only
    combination is no row.
    """
    if not needs.rows.any():
        yield np.zeros(len(capacities), np.int64)
        return
    sizes = np.array(capacities, np.int64)
    steps = row_steps(capacities)
    largest_class = np.arange(len(capacities)) == 0
    for largest_rows in itertools.count(int(needs.slots[-1]) // capacities[0]):
        counts = steps + largest_rows * largest_class
        enough_slots = np.cumsum(counts * sizes, axis=1) >= needs.slots
        enough_rows = np.cumsum(counts, axis=1) >= needs.rows
        yield from counts[(enough_slots & enough_rows).all(axis=1) & (counts[:, 0] >= 0)]


@lru_cache(maxsize=1024)
def row_steps(capacities: tuple[int, ...]) -> Longs:
    """Rows of each class that come to less than one row of the first, in the order of `row_counts`:
    [n, K].

    Where the smaller classes come to more, the count of the first is negative.
    """
    bounds = [max(2, (larger - 1) // smaller) for larger, smaller in itertools.pairwise(capacities)]
    combinations = itertools.product(*(range(bound + 1) for bound in bounds))
    smaller_rows = np.array(list(combinations), np.int64)
    # What the smaller classes hold is counted in rows of the first and slots over these.
    smaller_sizes = np.array(capacities[1:], np.int64)
    held_rows, held_slots = np.divmod(smaller_rows @ smaller_sizes, capacities[0])
    counts = np.concatenate([-held_rows[:, None], smaller_rows], axis=1)
    return counts[np.lexsort((counts.sum(axis=1), held_slots))]


def wanted_slots(length: Longs, cost: Longs, ranks: int) -> int:
    """Slots in which many items can be placed evenly: their own, and some room where cost does not
    follow length."""
    slots = int(length.sum())
    total_cost = max(int(cost.sum()), 1)
    uneven_cost = total_cost - slots * int((cost // length).min())
    looseness = max(ROW_SEARCH.loose_ranks, slots // (ranks * int(length.max())))
    divisor = total_cost * ROW_SEARCH.room_to_balance * looseness
    return slots + slots * uneven_cost * ROW_SEARCH.loose_ranks // divisor
