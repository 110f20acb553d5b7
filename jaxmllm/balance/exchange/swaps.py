"""Swapping items of similar length, so that more are encoded where their tokens are needed.

    row of rank a [ . i . . . ]  --i-->      row of rank b [ j . k . . ]     i is wanted on b,
                  [ . j k . . ]  <--j, k--                 [ i . . . . ]     j and k are not

j and k together are about as long as i, which may also take along another item of its row.

Balancing assigns items to rows regardless of where their tokens are needed. Which of two items of
similar length lies in which row hardly matters to it, but decides what the exchange has to carry.
No swap lets a row overflow or cost more than it may, so the balance stays. Rows of groups of ranks
swap in the same way: what is said of ranks here then holds of groups.

Letters: N items, R ranks, E ranks of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.compiled import compiled
from jaxmllm.balance.rows.level import COST, RowState

# Compiled code needs constants of the module.
COMPANIONS = 6  # an item moves alone, or with one of up to 5 misplaced items of its row
PARTNERS = 12  # the first 11 of a row are also tried in pairs: all pairs would take long


class Destinations(NamedTuple):
    """Where items may lie and where they would rather.

    The benefit of an item on a rank is its tokens for the right node, and once more for the right
    block: the ranks that share their devices with one language rank.
    """

    node: Longs  # [R]
    block: Longs  # [R] by number
    wanted_node: Longs  # [N]
    wanted_block: Longs  # [N]
    tokens: Longs  # [N]

    def chosen(self, items: Longs) -> Destinations:
        """The same for some of the items alone."""
        return Destinations(
            node=self.node,
            block=self.block,
            wanted_node=self.wanted_node[items],
            wanted_block=self.wanted_block[items],
            tokens=self.tokens[items],
        )


class _Misplaced(NamedTuple):
    """The items of each row that are not in their block, as linked lists that end with N. At first
    those of most tokens come first."""

    first: Longs  # [rows]
    following: Longs  # [N] the next item of the same row


def reduce_traffic(state: RowState, destinations: Destinations, least_benefit: int) -> None:
    """Swap items until that saves little.

    Args:
      state: of rows microbatch * R + rank; changed in place. Rows over capacity may only get less.
      destinations: of the items.
      least_benefit: above 0; a sweep over all items that gains less is the last.
    """
    ranks_of_block = _ranks_of_block(destinations.block)
    most_tokens_first = np.argsort(-destinations.tokens, kind="stable")
    while _sweep(state, destinations, ranks_of_block, most_tokens_first) >= least_benefit:
        pass


def _ranks_of_block(block: Longs) -> Longs:
    """The ranks of each block: [blocks, E]; of one that has fewer than others, some twice."""
    by_block = np.argsort(block, kind="stable")
    count = np.bincount(block)
    member = np.minimum(np.arange(count.max()), np.maximum(count - 1, 0)[:, None])
    first = np.cumsum(count) - count
    # Nothing is wanted in a block without ranks.
    ranks: Longs = by_block[np.minimum(first[:, None] + member, len(block) - 1)]
    return ranks


@compiled
def _sweep(state: RowState, destinations: Destinations, ranks_of_block: Longs, order: Longs) -> int:
    """Make the best swap of every misplaced item with a row of its block; return the benefit."""
    no_item = len(state.row_of)
    rows = state.remaining.shape[1]
    ranks = len(destinations.node)
    misplaced = _Misplaced(np.full(rows, no_item), np.empty(no_item, np.int64))
    for item in order[::-1]:
        if not _in_block(destinations, item, state.row_of[item] % ranks):
            _add(misplaced, state.row_of[item], item)
    benefit = 0
    for item in order:
        source = state.row_of[item]
        if _in_block(destinations, item, source % ranks):
            continue
        block_ranks = ranks_of_block[destinations.wanted_block[item]]
        best = _best_swap(state, destinations, misplaced, block_ranks, item)
        gain, goal, companion, partner, second = best
        if gain:
            benefit += gain
            for given in (item, companion):
                _move(state, destinations, misplaced, given, source, goal)
            for taken in (partner, second):
                _move(state, destinations, misplaced, taken, goal, source)
    return benefit


@compiled
def _best_swap(
    state: RowState,
    destinations: Destinations,
    misplaced: _Misplaced,
    block_ranks: Longs,
    item: int,
) -> tuple[int, int, int, int, int]:
    """(benefit, row, companion, partner, second partner) of an item's best swap with a row of its
    block. Companion and second partner may be none, which is N. Of equals it is the swap of most
    similar cost."""
    cost = state.amounts[COST]
    no_item = len(state.row_of)
    ranks = len(destinations.node)
    source = state.row_of[item]
    source_rank = source % ranks
    best_gain = 0
    best_miss = 0
    best = (source, no_item, no_item, no_item)

    companions = np.full(COMPANIONS, no_item)  # the first is none
    companion_gains = np.zeros(COMPANIONS, np.int64)
    companion_count = 1
    companion = misplaced.first[source]
    while companion != no_item and companion_count < COMPANIONS:
        if companion != item:
            companions[companion_count] = companion
            companion_count += 1
        companion = misplaced.following[companion]

    seconds = np.full(PARTNERS, no_item)  # the first is none
    second_gains = np.zeros(PARTNERS, np.int64)
    for first_row in range(0, state.remaining.shape[1], ranks):
        for goal_rank in block_ranks:
            goal = first_row + goal_rank
            item_gain = _gain(destinations, item, source_rank, goal_rank)
            for index in range(companion_count):
                companion = companions[index]
                companion_gains[index] = _gain(destinations, companion, source_rank, goal_rank)
            second_count = 1
            partner = misplaced.first[goal]
            while partner != no_item:
                partner_gain = _gain(destinations, partner, goal_rank, source_rank)
                # None, and the partners before this one: so every pair is tried once.
                for second_index in range(second_count if second_count < PARTNERS else 1):
                    for index in range(companion_count):
                        gain = item_gain + companion_gains[index]
                        gain += partner_gain + second_gains[second_index]
                        if gain < max(best_gain, 1):
                            continue
                        companion = companions[index]
                        second = seconds[second_index]
                        given_cost = cost[item] + cost[companion]
                        miss = abs(given_cost - cost[partner] - cost[second])
                        if gain == best_gain and miss >= best_miss:
                            continue
                        if _fits(state, source, goal, (item, companion), (partner, second)):
                            best_gain = gain
                            best_miss = miss
                            best = (goal, companion, partner, second)
                if second_count < PARTNERS:
                    seconds[second_count] = partner
                    second_gains[second_count] = partner_gain
                    second_count += 1
                partner = misplaced.following[partner]
    return best_gain, best[0], best[1], best[2], best[3]


@compiled
def _in_block(destinations: Destinations, item: int, rank: int) -> bool:
    return destinations.block[rank] == destinations.wanted_block[item]


@compiled
def _gain(destinations: Destinations, item: int, from_rank: int, to_rank: int) -> int:
    """Benefit of moving an item, or none."""
    if item == len(destinations.tokens):
        return 0
    node = destinations.wanted_node[item]
    block = destinations.wanted_block[item]
    gain = int(destinations.node[to_rank] == node) - int(destinations.node[from_rank] == node)
    gain += int(destinations.block[to_rank] == block) - int(destinations.block[from_rank] == block)
    return gain * destinations.tokens[item]


@compiled
def _fits(
    state: RowState, source: int, goal: int, given: tuple[int, int], taken: tuple[int, int]
) -> bool:
    """Whether both rows can take what they would get."""
    amounts = state.amounts
    remaining = state.remaining
    for kind in range(len(amounts)):
        passed = amounts[kind, given[0]] + amounts[kind, given[1]]
        passed -= amounts[kind, taken[0]] + amounts[kind, taken[1]]
        if passed > max(remaining[kind, goal], 0) or -passed > max(remaining[kind, source], 0):
            return False
    return True


@compiled
def _move(
    state: RowState,
    destinations: Destinations,
    misplaced: _Misplaced,
    item: int,
    source: int,
    goal: int,
) -> None:
    """Move a misplaced item, or none, to another row."""
    if item == len(state.row_of):
        return
    state.row_of[item] = goal
    state.remaining[:, source] += state.amounts[:, item]
    state.remaining[:, goal] -= state.amounts[:, item]
    previous = misplaced.first[source]
    if previous == item:
        misplaced.first[source] = misplaced.following[item]
    else:
        while misplaced.following[previous] != item:
            previous = misplaced.following[previous]
        misplaced.following[previous] = misplaced.following[item]
    if not _in_block(destinations, item, goal % len(destinations.node)):
        _add(misplaced, goal, item)


@compiled
def _add(misplaced: _Misplaced, row: int, item: int) -> None:
    misplaced.following[item] = misplaced.first[row]
    misplaced.first[row] = item
