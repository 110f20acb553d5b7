"""Swapping items of similar length, so that more are encoded where their tokens are needed.

    row of rank a [ . i . . . ]  --i-->      row of rank b [ j . k . . ]     i is wanted on b,
                  [ . j k . . ]  <--j, k--                 [ i . . . . ]     j and k are not

j and k together are about as long as i, which may also take along another item of its row.

Balancing assigns items to rows regardless of where their tokens are needed. For the balance it
hardly matters which of two items of similar length is in which row, but it decides what the
exchange has to carry. No swap lets a row overflow or cost more than it may, so the balance stays.
Shared rows swap in the same way: what is said of ranks here then holds for groups.

Letters: N items, R ranks, E ranks of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.rows.level import COST, SLOTS, RowState
from jaxmllm.compiled import compiled, compiled_leaf

# Compiled code needs constants of the module.
COMPANIONS = 6  # an item moves alone, or with one of up to 5 misplaced items of its row
PARTNERS = 12  # the first 11 of a row are also tried in pairs: all pairs would take long
# Most items of a row that are tried, those of most tokens first: rows of thousands of small images
# would otherwise take quadratic time.
MOST_PARTNERS = 256


class Destinations(NamedTuple):
    """The node and block of each rank, and the node and block where each item is wanted.

    The benefit of an item on a rank is its number of tokens if the node is the wanted one, plus
    that number if the block is. A block is the ranks on the same devices (row_ranks.py).
    """

    node: Longs  # [R]
    block: Longs  # [R] number of each rank's block
    wanted_node: Longs  # [N]
    wanted_block: Longs  # [N]
    tokens: Longs  # [N]

    def chosen(self, items: Longs) -> Destinations:
        """The same destinations for some of the items only."""
        return Destinations(
            node=self.node,
            block=self.block,
            wanted_node=self.wanted_node[items],
            wanted_block=self.wanted_block[items],
            tokens=self.tokens[items],
        )


class _MisplacedItems(NamedTuple):
    """The items of each row that are outside their wanted block, as linked lists that end with N.
    When a sweep begins, lists start with the items of most tokens."""

    first: Longs  # [rows]
    following: Longs  # [N] the next item of the same row


class _SwapChoices(NamedTuple):
    """Choices of one or two items that a row may give in a swap: all [choices]."""

    first: Longs
    second: Longs  # N where there is none
    gain: Longs
    slots: Longs
    cost: Longs


class _Scratch(NamedTuple):
    """Choices of one search, overwritten by the next: making the arrays takes longer than many a
    search."""

    outgoing: _SwapChoices
    incoming: _SwapChoices
    paired: _SwapChoices  # items of the other row that are tried in pairs, each by itself


def reduce_traffic(state: RowState, destinations: Destinations, least_benefit: int) -> None:
    """Swap items until a sweep saves less than `least_benefit`.

    Args:
      state: of rows microbatch * R + rank; changed in place. Rows over a limit may only get less.
      destinations: of the items.
      least_benefit: above 0; a sweep over all items that gains less is the last.
    """
    ranks_of_block = _ranks_of_block(destinations.block)
    most_tokens_first = np.argsort(-destinations.tokens, kind="stable")
    # The items of a row are searched again and again, so they are numbered such that they stand
    # side by side in memory, those of most tokens first.
    by_row = most_tokens_first[np.argsort(state.row_of[most_tokens_first], kind="stable")]
    order = np.empty_like(by_row)
    order[by_row] = np.arange(len(by_row))
    order = order[most_tokens_first]
    amounts = np.ascontiguousarray(state.amounts[:, np.append(by_row, len(by_row))])
    renumbered = RowState(state.row_of[by_row], amounts, state.remaining)
    destinations = destinations.chosen(by_row)
    while _sweep_items(renumbered, destinations, ranks_of_block, order) >= least_benefit:
        pass
    state.row_of[by_row] = renumbered.row_of


def _ranks_of_block(block: Longs) -> Longs:
    """The ranks of each block: [blocks, E]; a block with fewer than E repeats its last one."""
    by_block = np.argsort(block, kind="stable")
    sizes = np.bincount(block)
    member = np.minimum(np.arange(sizes.max()), np.maximum(sizes - 1, 0)[:, None])
    starts = np.cumsum(sizes) - sizes
    # A block without ranks is given some other rank: no item is wanted there.
    ranks: Longs = by_block[np.minimum(starts[:, None] + member, len(block) - 1)]
    return ranks


@compiled
def _sweep_items(
    state: RowState, destinations: Destinations, ranks_of_block: Longs, order: Longs
) -> int:
    """Make the best swap of every misplaced item with a row of its block; return the benefit."""
    no_item = len(state.row_of)
    rows = state.remaining.shape[1]
    misplaced = _MisplacedItems(np.full(rows, no_item), np.empty(no_item, np.int64))
    scratch = _Scratch(
        _empty_choices(COMPANIONS),
        _empty_choices(MOST_PARTNERS + PARTNERS * PARTNERS),
        _empty_choices(PARTNERS),
    )
    return _swap_in_order(state, destinations, ranks_of_block, order, misplaced, scratch)


@compiled
def _empty_choices(size: int) -> _SwapChoices:
    return _SwapChoices(
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )


@compiled_leaf
def _swap_in_order(
    state: RowState,
    destinations: Destinations,
    ranks_of_block: Longs,
    order: Longs,
    misplaced: _MisplacedItems,
    scratch: _Scratch,
) -> int:
    """The loops of `_sweep_items`: a leaf, because their work arrays are given."""
    ranks = len(destinations.node)
    # `_add_misplaced` puts items first in their row's list, so those of most tokens are added last.
    for position in range(len(order) - 1, -1, -1):
        item = order[position]
        if not _is_in_block(destinations, item, state.row_of[item] % ranks):
            _add_misplaced(misplaced, state.row_of[item], item)
    benefit = 0
    for item in order:
        source = state.row_of[item]
        if _is_in_block(destinations, item, source % ranks):
            continue
        best = _best_swap(state, destinations, misplaced, ranks_of_block, item, scratch)
        gain, goal, companion, partner, second = best
        if gain:
            benefit += gain
            _move_item(state, destinations, misplaced, item, source, goal)
            _move_item(state, destinations, misplaced, companion, source, goal)
            _move_item(state, destinations, misplaced, partner, goal, source)
            _move_item(state, destinations, misplaced, second, goal, source)
    return benefit


@compiled_leaf
def _best_swap(
    state: RowState,
    destinations: Destinations,
    misplaced: _MisplacedItems,
    ranks_of_block: Longs,
    item: int,
    scratch: _Scratch,
) -> tuple[int, int, int, int, int]:
    """(benefit, row, companion, partner, second partner) of an item's best swap with a row of its
    block; N stands for no companion and no second partner. Among swaps of equal benefit, it is the
    one of most similar cost, and then the first by row, partner, second partner and companion."""
    outgoing = scratch.outgoing
    incoming = scratch.incoming
    no_item = len(state.row_of)
    ranks = len(destinations.node)
    source = state.row_of[item]
    source_rank = source % ranks
    block = destinations.wanted_block[item]
    best_gain = 0
    best_miss = 0
    best_order = 0
    best = (source, no_item, no_item, no_item)
    out_count = _list_outgoing(state, misplaced, item, outgoing)
    # The rows of the block's ranks in every microbatch. A rank that is listed twice offers nothing
    # new.
    for first_row in range(0, state.remaining.shape[1], ranks):
        for goal_rank in ranks_of_block[block]:
            goal = first_row + goal_rank
            item_gain = _move_gain(destinations, item, source_rank, goal_rank)
            max_out_gain = item_gain
            outgoing.gain[0] = item_gain
            for out_index in range(1, out_count):
                companion = outgoing.second[out_index]
                gain = item_gain + _move_gain(destinations, companion, source_rank, goal_rank)
                outgoing.gain[out_index] = gain
                max_out_gain = max(max_out_gain, gain)
            # Choices of the other row that gain less than this cannot be part of a swap as good as
            # the best one so far, whatever they are swapped for.
            least_gain = max(best_gain, 1) - max_out_gain
            in_count = _list_incoming(
                state, destinations, misplaced, goal, source, least_gain, scratch
            )
            source_slots = max(state.remaining[SLOTS, source], 0)
            source_cost = max(state.remaining[COST, source], 0)
            goal_slots = max(state.remaining[SLOTS, goal], 0)
            goal_cost = max(state.remaining[COST, goal], 0)
            for out_index in range(out_count):
                out_gain = outgoing.gain[out_index]
                out_slots = outgoing.slots[out_index]
                out_cost = outgoing.cost[out_index]
                # Hardly any swap fits: a loop without branches first tells whether one may.
                worth_trying = 0
                for in_index in range(in_count):
                    gain = out_gain + incoming.gain[in_index]
                    slots = out_slots - incoming.slots[in_index]
                    cost = out_cost - incoming.cost[in_index]
                    fits = (slots <= goal_slots) & (-slots <= source_slots)
                    fits &= (cost <= goal_cost) & (-cost <= source_cost)
                    nearer = (gain == best_gain) & (abs(cost) <= best_miss)
                    worth_trying += fits & ((gain > best_gain) | nearer)
                if not worth_trying:
                    continue
                for in_index in range(in_count):
                    gain = out_gain + incoming.gain[in_index]
                    miss = abs(out_cost - incoming.cost[in_index])
                    if gain < best_gain or (gain == best_gain and miss > best_miss):
                        continue
                    order = in_index * COMPANIONS + out_index
                    # Rows are tried in order, so a swap equal to the best one may come before it
                    # only in the same row.
                    equal = gain == best_gain and miss == best_miss
                    if equal and (goal != best[0] or order > best_order):
                        continue
                    passed = (outgoing.first[out_index], outgoing.second[out_index])
                    returned = (incoming.first[in_index], incoming.second[in_index])
                    if _swap_fits(state, source, goal, passed, returned):
                        best_gain = gain
                        best_miss = miss
                        best_order = order
                        best = (goal, passed[1], returned[0], returned[1])
    return best_gain, best[0], best[1], best[2], best[3]


@compiled_leaf
def _list_outgoing(
    state: RowState, misplaced: _MisplacedItems, item: int, outgoing: _SwapChoices
) -> int:
    """List an item alone and with each of its companions; return how many choices there are."""
    no_item = len(state.row_of)
    # Gains depend on the other row, so `_best_swap` fills in `outgoing.gain`.
    outgoing.first[:] = item
    outgoing.second[0] = no_item
    outgoing.slots[0] = state.amounts[SLOTS, item]
    outgoing.cost[0] = state.amounts[COST, item]
    choices = 1
    companion = misplaced.first[state.row_of[item]]
    while companion != no_item and choices < COMPANIONS:
        # The item itself is misplaced, so it is in the list as well.
        if companion != item:
            outgoing.second[choices] = companion
            outgoing.slots[choices] = outgoing.slots[0] + state.amounts[SLOTS, companion]
            outgoing.cost[choices] = outgoing.cost[0] + state.amounts[COST, companion]
            choices += 1
        companion = misplaced.following[companion]
    return choices


@compiled_leaf
def _list_incoming(
    state: RowState,
    destinations: Destinations,
    misplaced: _MisplacedItems,
    goal: int,
    source: int,
    least_gain: int,
    scratch: _Scratch,
) -> int:
    """List the first misplaced items of row `goal`, alone and a few of them in pairs, whose move to
    row `source` gains at least `least_gain`; return how many choices there are."""
    incoming = scratch.incoming
    paired = scratch.paired
    no_item = len(state.row_of)
    ranks = len(destinations.node)
    source_rank = source % ranks
    goal_rank = goal % ranks
    choices = 0
    partners = 0
    partner = misplaced.first[goal]
    while partner != no_item and partners < MOST_PARTNERS:
        slots = state.amounts[SLOTS, partner]
        cost = state.amounts[COST, partner]
        partner_gain = _move_gain(destinations, partner, goal_rank, source_rank)
        if partner_gain >= least_gain:
            incoming.first[choices] = partner
            incoming.second[choices] = no_item
            incoming.gain[choices] = partner_gain
            incoming.slots[choices] = slots
            incoming.cost[choices] = cost
            choices += 1
        if partners < PARTNERS - 1:
            # Pairs with the items before it in the list, so that every pair is listed once. What is
            # known of these stands side by side: to follow the list again would take far longer.
            for earlier in range(partners):
                gain = partner_gain + paired.gain[earlier]
                if gain >= least_gain:
                    incoming.first[choices] = partner
                    incoming.second[choices] = paired.first[earlier]
                    incoming.gain[choices] = gain
                    incoming.slots[choices] = slots + paired.slots[earlier]
                    incoming.cost[choices] = cost + paired.cost[earlier]
                    choices += 1
            paired.first[partners] = partner
            paired.gain[partners] = partner_gain
            paired.slots[partners] = slots
            paired.cost[partners] = cost
        partners += 1
        partner = misplaced.following[partner]
    return choices


@compiled_leaf
def _is_in_block(destinations: Destinations, item: int, rank: int) -> bool:
    return destinations.block[rank] == destinations.wanted_block[item]


@compiled_leaf
def _move_gain(destinations: Destinations, item: int, from_rank: int, to_rank: int) -> int:
    """Benefit gained by moving an item; 0 for no item (N)."""
    if item == len(destinations.tokens):
        return 0
    node = destinations.wanted_node[item]
    block = destinations.wanted_block[item]
    gain = int(destinations.node[to_rank] == node) - int(destinations.node[from_rank] == node)
    gain += int(destinations.block[to_rank] == block) - int(destinations.block[from_rank] == block)
    return gain * destinations.tokens[item]


@compiled_leaf
def _swap_fits(
    state: RowState, source: int, goal: int, outgoing: tuple[int, int], incoming: tuple[int, int]
) -> bool:
    """Whether both rows can take the items that they would get."""
    amounts = state.amounts
    remaining = state.remaining
    for kind in range(len(amounts)):
        passed = amounts[kind, outgoing[0]] + amounts[kind, outgoing[1]]
        passed -= amounts[kind, incoming[0]] + amounts[kind, incoming[1]]
        if passed > max(remaining[kind, goal], 0) or -passed > max(remaining[kind, source], 0):
            return False
    return True


@compiled_leaf
def _move_item(
    state: RowState,
    destinations: Destinations,
    misplaced: _MisplacedItems,
    item: int,
    source: int,
    goal: int,
) -> None:
    """Move a misplaced item to another row; do nothing for no item (N)."""
    if item == len(state.row_of):
        return
    state.row_of[item] = goal
    for kind in range(len(state.amounts)):
        state.remaining[kind, source] += state.amounts[kind, item]
        state.remaining[kind, goal] -= state.amounts[kind, item]
    # Only misplaced items move, so the item is in the list of its row: it is taken out there, and
    # put into the other row's list if it is outside its block there, too.
    previous = misplaced.first[source]
    if previous == item:
        misplaced.first[source] = misplaced.following[item]
    else:
        while misplaced.following[previous] != item:
            previous = misplaced.following[previous]
        misplaced.following[previous] = misplaced.following[item]
    if not _is_in_block(destinations, item, goal % len(destinations.node)):
        _add_misplaced(misplaced, goal, item)


@compiled_leaf
def _add_misplaced(misplaced: _MisplacedItems, row: int, item: int) -> None:
    misplaced.following[item] = misplaced.first[row]
    misplaced.first[row] = item
