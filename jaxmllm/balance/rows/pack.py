"""Putting items into rows of fixed capacity.

A row holds at most `capacity` slots and `max_segments` items. The fillers take a fixed set of rows
and either find room for every item or give up; how many rows to offer is decided in row_counts.py
and assign.py.

    fill_by_cost    costliest item first, to the row that has most left: rows of similar cost, some
                    of them too full (level.py fixes that)
    best_fit        longest item first, into the row with the least room that suffices: the tightest
                    filling, for when fill_by_cost fails
    first_fit       items in the order given, into the first row with room: nothing is rearranged

Letters: N items.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np

from jaxmllm.arrays import Ints, Longs
from jaxmllm.compiled import compiled


def fill_by_cost(length: Longs, cost: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Assign items by descending cost, each to the row that has most left; rows may overflow a
    little.

    What a row has left is the lesser of its free slots and its free budget. The budget of a row
    equals its capacity, and an item takes cost / total cost * total slots from it. So rows of one
    capacity end up with nearly the same cost while slots last, and small rows are left to small
    items. An item that does not fit into the row with most left is assigned to the row with most
    free slots.

    Args:
      length: [N] slots.
      cost: [N], sum below 2**53.
      capacity: [rows] slots; some row holds the longest item.
      max_segments: most items of a row.

    Returns:
      [N] row of each item, or None when the rows cannot take so many items. Ties go to the lower
      item and row number.
    """
    order = np.lexsort((-length, -cost))
    total_cost = int(cost.sum())
    total_slots = int(length.sum())
    # Shifted so that cost * total_slots fits int64.
    shift = max(0, total_cost.bit_length() + total_slots.bit_length() - 62)
    budget_share = (cost >> shift) * total_slots // max(total_cost >> shift, 1)
    row_of = np.empty(len(order), np.int64)
    sizes, size_of = np.unique(capacity, return_inverse=True)
    filled = _fill_by_cost(
        row_of, order, length, budget_share, capacity, sizes, size_of, max_segments
    )
    return row_of if filled else None


@compiled
def _fill_by_cost(
    row_of: Longs,
    order: Longs,
    length: Longs,
    budget_share: Longs,
    capacity: Longs,
    sizes: Longs,
    size_of: Longs,
    max_segments: int,
) -> bool:
    """Write the row of each item, by `order`; return whether rows can take so many items."""
    room = capacity.copy()
    budget = capacity.copy()
    free_segments = np.full(len(capacity), max_segments)
    # Entries of the heap are not updated: one that differs from what its row has left is out of
    # date, and is dropped when it gets to the top.
    by_left = [(-capacity[row], row) for row in range(len(capacity))]
    heapify(by_left)
    # The same by room, one heap for the rows of each size. Filled when an item first does not fit
    # into the row with most left; until then empty lists, from which numba gets the type.
    by_room = [[(-size, 0) for _ in range(0)] for size in sizes]
    searched = False
    for item in order:
        # Find the row that has most left of those that may take another item, if there is one. Its
        # entry stays on the heap and is out of date as soon as the row has less left.
        row = -1
        while by_left and row < 0:
            negative_left, top = by_left[0]
            if free_segments[top] and -negative_left == min(room[top], budget[top]):
                row = top
            else:
                heappop(by_left)
        if row >= 0 and length[item] > room[row]:  # slots are short: the budget is not kept
            if not searched:
                searched = True
                for candidate in range(len(room)):
                    heappush(by_room[size_of[candidate]], (-room[candidate], candidate))
            # If even this row has too little room, it overflows.
            row = _roomiest_row(by_room, sizes, room, free_segments, length[item])
        if row < 0:
            return False
        row_of[item] = row
        room[row] -= length[item]
        budget[row] -= budget_share[item]
        free_segments[row] -= 1
        heappush(by_left, (-min(room[row], budget[row]), row))
        if searched:
            heappush(by_room[size_of[row]], (-room[row], row))
    return True


@compiled
def _roomiest_row(
    by_room: list[list[tuple[int, int]]],
    sizes: Longs,
    room: Longs,
    free_segments: Longs,
    length: int,
) -> int:
    """The row with most room among those that may take another item and would hold this one when
    empty; -1 if there is none.

    Args:
      by_room: a heap of (-room, row) for the rows of each of `sizes`.
    """
    best = -1
    for size_index in range(len(sizes)):
        if sizes[size_index] < length:
            continue
        heap = by_room[size_index]
        # Entries at the top that are out of date are dropped: the row has less room by now, or may
        # take no further item.
        while heap and (not free_segments[heap[0][1]] or -heap[0][0] != room[heap[0][1]]):
            heappop(heap)
        if heap:
            row = heap[0][1]
            if best < 0 or (room[row], -row) > (room[best], -best):
                best = row
    return best


def best_fit(length: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Put items by descending length, each into the row with the least room that suffices.

    Arguments as for `fill_by_cost`.

    Returns:
      [N] row of each item, or None when some item finds no room. Ties go to the lower item and row
      number.
    """
    free_segments = [max_segments] * len(capacity)
    # Heaps of row numbers by room: where items have few sizes, there are few different rooms.
    by_room: dict[int, list[int]] = {}
    for row, room in enumerate(capacity.tolist()):
        by_room.setdefault(room, []).append(row)
    # The keys of `by_room`, ascending; no heap is empty. Rows that may take no further item are in
    # neither.
    rooms = sorted(by_room)
    lengths = length.tolist()
    row_of = np.empty(len(length), np.int64)
    for item in np.argsort(-length, kind="stable").tolist():
        index = bisect_left(rooms, lengths[item])
        if index == len(rooms):
            return None
        room = rooms[index]
        row = heappop(by_room[room])
        if not by_room[room]:
            del by_room[room], rooms[index]
        row_of[item] = row
        free_segments[row] -= 1
        if free_segments[row]:
            room -= lengths[item]
            if room not in by_room:
                by_room[room] = []
                insort(rooms, room)
            heappush(by_room[room], row)
    return row_of


def first_fit(length: Longs, capacity: Longs, max_segments: int) -> Longs | None:
    """Put items in the order given, each into the first row that has room.

    Arguments and result as for `best_fit`.
    """
    row_of = np.empty(len(length), np.int64)
    free_segments = np.full(len(capacity), max_segments)
    return row_of if _first_fit(row_of, length, capacity.copy(), free_segments) else None


@compiled
def _first_fit(row_of: Longs, length: Longs, room: Longs, free_segments: Longs) -> bool:
    for item in range(len(length)):
        row = 0
        while row < len(room) and (room[row] < length[item] or not free_segments[row]):
            row += 1
        if row == len(room):
            return False
        row_of[item] = row
        room[row] -= length[item]
        free_segments[row] -= 1
    return True


def lay_out(
    row_of: Longs, length: Longs, slots: Longs | None = None, blocks: Longs | None = None
) -> tuple[Ints, Ints]:
    """Offset and segment of each item in its row.

    Attention computes whole tiles, each of two blocks of the row, so an item should touch as few
    blocks as possible. It does if its leftover (the slots beyond whole blocks) fits into the rest
    of the block in which the item begins:

        blocks of 4        |a a a a|a b b b|b c c c|      b touches 2 blocks, but alone only 1
        lengths 5, 4, 3    |b b b b|c c c a|a a a a|      all touch as few blocks as alone

    So leftovers are packed into blocks (best fit by descending size), and the items whose leftovers
    share a block are a group, laid end to end. A group begins at the edge of a block as long as the
    row has slots to spare, the fullest groups first. Without blocks items are laid end to end by
    number.

    Args:
      row_of: [N] row number, at least 0.
      length: [N] slots.
      slots: [rows] slots of each row, enough for its items; None: items are laid end to end.
      blocks: [rows] slots of an attention block of each row; None: items are laid end to end.

    Returns:
      (offset [N] in slots from the start of the row, segment [N] counted from 1 along the row).
    """
    offset = np.empty(len(row_of), np.int32)
    segment = np.empty(len(row_of), np.int32)
    rows = int(row_of.max(initial=-1)) + 1
    if blocks is None or slots is None:
        counts = np.zeros(rows, np.int64), np.zeros(rows, np.int32)
        _lay_end_to_end(row_of, length, *counts, offset, segment)
    else:
        _lay_out_in_blocks(row_of, length, slots[:rows].copy(), blocks, offset, segment)
    return offset, segment


@compiled
def _lay_end_to_end(
    row_of: Longs, length: Longs, slots: Longs, items: Ints, offset: Ints, segment: Ints
) -> None:
    """Write offsets and segments of items laid end to end. `slots` and `items` count those placed
    in each row so far."""
    for item in range(len(row_of)):
        row = row_of[item]
        offset[item] = slots[row]
        slots[row] += length[item]
        items[row] += 1
        segment[item] = items[row]


@compiled
def _lay_out_in_blocks(
    row_of: Longs, length: Longs, spare: Longs, blocks: Longs, offset: Ints, segment: Ints
) -> None:
    """Write offsets and segments of groups. `spare` has the slots of each row at first; what items
    and gaps take is subtracted.

    Sorting items would take a sixth of a plan's time. They are put on chains (linked lists)
    instead: the `first` entry of each chain, and the entry `after` each item, -1 where a chain
    ends. The number of a group is that of its first item.
    """
    items = len(row_of)
    first_of_row = np.full(len(spare), -1)
    after = np.empty(items, np.int64)
    # Backwards, because entries are put in front: a row's chain is then in the order of numbers.
    for item in range(items - 1, -1, -1):
        spare[row_of[item]] -= length[item]
        _put_first(first_of_row, after, row_of[item], item)
    after_group = np.empty(items, np.int64)
    last_of_group = np.empty(items, np.int64)
    for row in range(len(spare)):
        block = blocks[row]
        first_with_room = np.full(block, -1)
        _group(first_of_row[row], length, block, after, last_of_group, first_with_room, after_group)
        slot = segments = 0
        # The index is the room that groups leave in their block, so the fullest ones come first.
        for fullest in first_with_room:
            group = fullest
            while group >= 0:
                # Skip to the next edge of a block if the row can spare these slots; else the group
                # follows without a gap.
                gap = -slot % block
                if gap <= spare[row]:
                    spare[row] -= gap
                    slot += gap
                member = group
                while member >= 0:
                    segments += 1
                    offset[member] = slot
                    segment[member] = segments
                    slot += length[member]
                    member = after[member]
                group = after_group[group]


@compiled
def _group(
    item: int,
    length: Longs,
    block: int,
    after: Longs,
    last_of_group: Longs,
    first_with_room: Longs,
    after_group: Longs,
) -> None:
    """Divide a row's items, the chain that begins with `item`, into groups whose leftovers fit one
    block.

    Each group becomes a chain in `after`. Groups that leave the same room in their block become a
    chain in `after_group`, which begins with first_with_room[room], [block].
    """
    first_of_size = np.full(block + 1, -1)
    while item >= 0:
        # Read first: putting the item on the chain of its size overwrites `after`.
        following = after[item]
        left_over = (length[item] - 1) % block + 1  # in its last block, if it begins at an edge
        _put_first(first_of_size, after, left_over, item)
        item = following
    # No group has more room than this. It is below `block`, so the search below stays inside the
    # array.
    most_room = 0
    for size in range(block, 0, -1):
        item = first_of_size[size]
        while item >= 0:
            following = after[item]
            # Best fit: the group with the least room that suffices, taken off its chain; else a new
            # group, in which the item has the block to itself so far.
            room = size
            while room <= most_room and first_with_room[room] < 0:
                room += 1
            if room <= most_room:
                group = first_with_room[room]
                first_with_room[room] = after_group[group]
                after[last_of_group[group]] = item
            else:
                group = item
                room = block
            last_of_group[group] = item
            after[item] = -1
            room -= size
            _put_first(first_with_room, after_group, room, group)
            most_room = max(most_room, room)
            item = following


@compiled
def _put_first(first: Longs, after: Longs, chain: int, entry: int) -> None:
    """Put an item or a group at the front of a chain."""
    after[entry] = first[chain]
    first[chain] = entry
