"""Putting items into rows of fixed capacity.

A row holds at most `capacity` slots and `max_segments` items. The fillers take a fixed set of rows and either find
a place for every item or give up; how many rows to offer is decided in assign.py.

    longest_first   costliest item onto the relatively lightest row that has room: rows of like cost
    best_fit        longest item into the row it fills best: the tightest, for when the above gives up
    first_fit       items in the order given, into the first row with room: nothing is rearranged
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from jaxmllm.balance.plan import Ints, Longs


def longest_first(length: Longs, cost: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Each item, by descending cost, onto the lightest row that has room; light is cost over capacity.

    Args:
      length: [N] slots.
      cost: [N] ascending with length.
      capacity: [rows] slots.
      max_segments: most items in a row.

    Returns:
      [N] row of each item, or None when some item finds no room. Ties go to the lower item and row number.
    """
    order = np.lexsort((-length, -cost))
    largest = int(capacity.max(initial=1))
    room, segments, load = capacity.tolist(), [max_segments] * len(capacity), [0] * len(capacity)
    lengths, costs, capacities = length.tolist(), cost.tolist(), capacity.tolist()
    row_of = np.empty(len(length), np.int64)
    light = [(0, row) for row in range(len(capacity))]
    parked: list[tuple[int, int]] = []  # (-room, row) of light rows that were too full for a longer item
    smallest = int(length.min(initial=0))
    for item in order.tolist():
        wanted = lengths[item]
        while parked and -parked[0][0] >= wanted:
            row = heapq.heappop(parked)[1]
            heapq.heappush(light, (load[row] * largest // capacities[row], row))
        while light and room[light[0][1]] < wanted:
            row = heapq.heappop(light)[1]
            heapq.heappush(parked, (-room[row], row))
        if not light:
            return None
        row = light[0][1]
        row_of[item] = row
        room[row] -= wanted
        segments[row] -= 1
        load[row] += costs[item]
        if segments[row] and room[row] >= smallest:
            heapq.heapreplace(light, (load[row] * largest // capacities[row], row))
        else:
            heapq.heappop(light)
    return row_of


def best_fit(length: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Each item, by descending length, into the row with the least room that suffices.

    Arguments, result and ties as for `longest_first`.
    """
    rows = len(capacity)
    segments = [max_segments] * rows
    by_room = sorted((capacity * rows + np.arange(rows)).tolist())  # room and row in one integer
    lengths = length.tolist()
    row_of = np.empty(len(length), np.int64)
    for item in np.argsort(-length, kind="stable").tolist():
        place = bisect_left(by_room, lengths[item] * rows)
        if place == len(by_room):
            return None
        key = by_room.pop(place)
        row = key % rows
        row_of[item] = row
        segments[row] -= 1
        if segments[row]:
            insort(by_room, key - lengths[item] * rows)
    return row_of


def first_fit(length: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Each item, in the order given, into the first row that has room. Arguments and result as above."""
    room, segments = capacity.tolist(), [max_segments] * len(capacity)
    row_of = np.empty(len(length), np.int64)
    for item, wanted in enumerate(length.tolist()):
        row = next((row for row, free in enumerate(room) if free >= wanted and segments[row]), None)
        if row is None:
            return None
        row_of[item] = row
        room[row] -= wanted
        segments[row] -= 1
    return row_of


def lay_out(row_of: Longs, length: Longs) -> tuple[Ints, Ints]:
    """Offset and segment of each item when the items of a row stand one behind another by item number.

    Args:
      row_of: [N] any number that tells rows apart.
      length: [N] slots.

    Returns:
      (offset [N] in slots from the start of the row, segment [N] counted from 1).
    """
    order = np.argsort(row_of, kind="stable")
    offset, segment = np.empty(len(order), np.int32), np.empty(len(order), np.int32)
    offset[order] = running_sums(row_of[order], length[order])
    segment[order] = running_sums(row_of[order], np.ones_like(row_of)) + 1
    return offset, segment


def running_sums(group: Longs, amount: Longs) -> Longs:
    """Sum of `amount` over the earlier members of the same group; members of a group are neighbours. [N]"""
    if not len(group):
        return np.zeros(0, np.int64)
    before = np.cumsum(amount, dtype=np.int64) - amount
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    return before - np.repeat(before[starts], np.diff(np.r_[starts, len(group)]))


def sums_by(group: Sequence[int] | Ints | Longs, amount: Longs, groups: int) -> Longs:
    """Exact integer sums of `amount` by group number: [groups]."""
    result = np.zeros(groups, np.int64)
    np.add.at(result, np.asarray(group, np.int64), amount)
    return result
