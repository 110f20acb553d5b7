"""Ranks for the rows of an encoder phase, near the language ranks that need their tokens.

    benefit[row, rank] = weight of the row's items that are wanted on the rank's node
                         + weight of those that are wanted on the rank's own devices

An item weighs the square of its tokens, because short items find others to swap with afterwards
(swaps.py). Few ranks get the assignment of greatest benefit, many a greedy one: first nodes, then
ranks inside each (node-wise placement as in OrchMLLM, arXiv 2503.23830, but row by row). A shared
row gets a group instead of a rank: for rows of one span, everything below that holds for ranks
holds for the groups of that span.

Letters: N items, R ranks, M microbatches, G groups of one span, and A, E, L of `ExchangeGrid`. A
block is a row of that grid: the encoder ranks and the language ranks on the same devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxmllm.arrays import Ints, Longs, ceil_divide, sums_by
from jaxmllm.balance.records import ExchangeGrid, PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.assign import item_costs, largest_share, part_costs


@dataclass(frozen=True)
class PlacementSearch:
    """Constants of node-wise placement."""

    # The exact assignment takes cubic time: rows of more ranks are placed greedily.
    exact_ranks: int = 128
    # The costliest rank may be 1/128 above its lower bound, the costliest row of a microbatch 1/128
    # above the mean. The row with most attention may exceed mean attention by 1/400 of the mean
    # cost, because empty slots do not make up for attention.
    margin: int = 128
    attention_margin: int = 400
    # Items are swapped for as long as a sweep gains 1/33 of all routed tokens.
    least_benefit: int = 33


PLACEMENT_SEARCH = PlacementSearch()


@dataclass(frozen=True)
class Places:
    """The places where rows of an encoder phase can run, and those where their items are wanted."""

    node: Ints  # [G] node of each group
    block: Longs  # [G] number of each group's block
    wanted_node: Longs  # [N]
    wanted_block: Longs  # [N]

    @classmethod
    def of_groups(
        cls, span: int, goal: Longs, grid: ExchangeGrid, encoder_node: Ints, language_node: Ints
    ) -> Places:
        """The places of groups of `span` encoder ranks, and of items that language ranks `goal` [N]
        need. If a group has ranks in several blocks, its first rank's block stands for all of them.
        """
        block = blocks_of(grid.encoder)
        first_rank = np.arange(len(block)) // span * span  # of the group of each encoder rank
        standing_for = block[first_rank[grid.encoder[:, 0]]]  # for each block
        return cls(
            node=encoder_node[::span],
            block=block[::span],
            wanted_node=language_node[goal].astype(np.int64),
            wanted_block=standing_for[blocks_of(grid.language)[goal]],
        )

    def chosen(self, items: Longs) -> Places:
        """The same places for some of the items only."""
        return replace(
            self, wanted_node=self.wanted_node[items], wanted_block=self.wanted_block[items]
        )


def match_rows(
    plan: PhasePlan,
    items: PhaseItems,
    spec: PhaseSpec,
    *,
    goal: Longs,
    grid: ExchangeGrid,
    encoder_node: Ints,
    language_node: Ints,
) -> Ints:
    """New rank of each item of an encoder phase, the same for all items of a row: [N].

    Args:
      goal: [N] language rank that needs the item.
      encoder_node, language_node: [R] node of each rank.
    """
    ranks = np.arange(spec.ranks)
    weight = items.tokens.astype(np.int64) ** 2
    cost = item_costs(spec, items)
    places_by_span = {
        span: Places.of_groups(span, goal, grid, encoder_node, language_node)
        for span in np.unique(plan.span).tolist()
    }

    def moved(span: int, members: Longs) -> Longs:
        """New rank for the rows that each rank has now, when groups of `span` move whole: [R]."""
        groups = best_ranks(
            plan.rank[members].astype(np.int64) // span,
            weight[members],
            places_by_span[span].chosen(members),
        )
        return groups[ranks // span] * span + ranks % span

    # New rank of the row that each rank has now: [M, R].
    rank_of = np.empty((plan.microbatches, spec.ranks), np.int64)
    for microbatch, span in enumerate(plan.span.tolist()):
        rank_of[microbatch] = moved(span, np.flatnonzero(plan.microbatch == microbatch))
    row_cost = part_costs(plan, cost, spec.ranks)
    # Only rows of one rank are swapped to keep the limit; shared ones stay in their new groups.
    alone = plan.span == 1
    shared = np.zeros(spec.ranks, np.int64)
    np.add.at(shared, rank_of[~alone], row_cost[~alone])
    ranks_of_rows = rank_of[alone]
    limit = rank_limit(row_cost.sum(axis=0), largest_share(plan, cost))
    if _cap_rank_totals(ranks_of_rows, row_cost[alone], shared, limit):
        rank_of[alone] = ranks_of_rows
    else:
        # Move the widest groups whole, with all their rows, which leaves totals as they are.
        rank_of[:] = moved(int(plan.span.max()), np.arange(len(cost)))
    return rank_of[plan.microbatch, plan.rank].astype(np.int32)


def rank_limit(rank_cost: Longs, largest_item: int) -> int:
    """Limit on the cost of a rank: the present maximum, or a little above the lower bound of any
    placement.

    Args:
      rank_cost: [R] cost of each rank now.
      largest_item: cost that some rank has at least, because of a single item.
    """
    floor = max(ceil_divide(int(rank_cost.sum()), len(rank_cost)), largest_item)
    return max(int(rank_cost.max(initial=0)), floor + floor // PLACEMENT_SEARCH.margin)


def _cap_rank_totals(rank_of: Longs, cost: Longs, shared: Longs, limit: int) -> bool:
    """Swap rows, in place, until no rank's total is above `limit`.

    Args:
      rank_of: [M, R] rank of each row.
      cost: [M, R] of each row.
      shared: [R] further cost of each rank.

    Returns:
      Whether that succeeded; if not, `rank_of` is unchanged.
    """
    # The inverse of `rank_of`: the row on each rank. Swaps change this inverse, from which
    # `rank_of` is written in the end.
    row_at = np.argsort(rank_of, axis=1)  # [M, R], by rank
    cost_at = np.take_along_axis(cost, row_at, axis=1)
    total = cost_at.sum(axis=0) + shared
    while (highest := int(total.max())) > limit:
        if not len(cost_at):
            return False
        heavy = int(total.argmax())
        # Cost that the heavy rank gives to each other rank by a swap of their rows: [M, R].
        passed = cost_at[:, heavy, None] - cost_at
        # The higher total of the two ranks after each swap: [M, R]. Swaps are made only if it is
        # below the present highest total, so the loop ends.
        higher = np.maximum(total[heavy] - passed, total + passed)
        higher[:, heavy] = highest
        microbatch, light = divmod(int(higher.argmin()), len(total))
        if higher[microbatch, light] >= highest:
            return False
        pair = [heavy, light]
        total[pair] += passed[microbatch, light] * np.array([-1, 1])
        cost_at[microbatch, pair] = cost_at[microbatch, pair[::-1]]
        row_at[microbatch, pair] = row_at[microbatch, pair[::-1]]
    np.put_along_axis(rank_of, row_at, np.arange(len(total))[None], axis=1)
    return True


def best_ranks(row: Longs, weight: Longs, places: Places) -> Longs:
    """The rank (or group) of each of G rows, each rank taken once: [G].

    Args:
      row: [N] row of each item, 0 .. G - 1.
      weight: [N] benefit of each item's being where it is wanted.
      places: of the ranks (or groups) and the items.
    """
    ranks = len(places.node)
    wanted_node = places.wanted_node
    wanted_block = places.wanted_block
    nodes = 1 + max(int(places.node.max()), int(wanted_node.max(initial=0)))
    blocks = 1 + max(int(places.block.max()), int(wanted_block.max(initial=0)))
    if ranks <= PLACEMENT_SEARCH.exact_ranks:
        by_node = sums_by(row * nodes + wanted_node, weight, ranks * nodes)
        by_block = sums_by(row * blocks + wanted_block, weight, ranks * blocks)
        benefit = by_node.reshape(ranks, nodes)[:, places.node]
        benefit = benefit + by_block.reshape(ranks, blocks)[:, places.block]
        return linear_sum_assignment(benefit, maximize=True)[1].astype(np.int64)
    # Nodes have as many ranks as there are rows, so the rest is for rows that have no node yet.
    room = np.bincount(places.node, minlength=nodes)
    node_of, room = _greedy_groups(row, wanted_node, weight, room=room, rows=ranks)
    without = node_of < 0
    node_of[without] = np.repeat(np.arange(nodes), room)[: np.count_nonzero(without)]
    # A block of several ranks may span nodes. Nodes come first: a row gets a rank of its block only
    # if the row's node has one.
    inside = node_of[row] == wanted_node
    block_of, _ = _greedy_groups(
        row[inside],
        wanted_block[inside],
        weight[inside],
        room=np.bincount(places.block, minlength=blocks),
        rows=ranks,
    )
    return _ranks_in_nodes(node_of, block_of, places.node, places.block)


def blocks_of(ranks: Ints) -> Longs:
    """Block of every rank, from the ranks [A, ..] of each block."""
    block = np.empty(ranks.size, np.int64)
    block[ranks] = np.arange(len(ranks))[:, None]
    return block


def _greedy_groups(
    row: Longs, group: Longs, weight: Longs, *, room: Longs, rows: int
) -> tuple[Longs, Longs]:
    """Choose a group for each row: repeatedly, every row without one asks for the group with room
    that wants most of the row's weight, and groups take the rows that bring most.

    Args:
      row, group, weight: [N] of each item.
      room: rows that each group can take.

    Returns:
      (group of each row [rows], -1 if none that wants its items had room; room left in each group).
    """
    groups = len(room)
    key, index = np.unique(row * groups + group, return_inverse=True)
    gain = sums_by(index, weight, len(key))
    key = key[np.lexsort((key, -gain))]  # (row, group) pairs, the best first
    wishing_row, wish = np.divmod(key, groups)
    group_of = np.full(rows, -1, np.int64)
    room = room.astype(np.int64)
    while len(wishing_row):
        asking = np.unique(wishing_row, return_index=True)[1]  # best wish of each row
        # Wishes are sorted best first, so by ascending index each group takes the rows that bring
        # most.
        asking = asking[np.lexsort((asking, wish[asking]))]
        asked = wish[asking]
        granted = asking[_ordinals(asked) < room[asked]]
        group_of[wishing_row[granted]] = wish[granted]
        room -= np.bincount(wish[granted], minlength=groups)
        still_open = (group_of[wishing_row] < 0) & (room[wish] > 0)
        wishing_row = wishing_row[still_open]
        wish = wish[still_open]
    return group_of, room


def _ranks_in_nodes(
    node_of: Longs, block_of: Longs, encoder_node: Ints, encoder_block: Longs
) -> Longs:
    """The rank of each row on its node, in the row's block if that has a rank left there: [R]."""
    blocks = int(encoder_block.max()) + 1
    rank_of = np.full(len(node_of), -1, np.int64)
    node_and_block = encoder_node * blocks + encoder_block
    ranks = np.argsort(node_and_block, kind="stable")
    available = node_and_block[ranks]

    wishing = np.flatnonzero(block_of >= 0)
    wish = node_of[wishing] * blocks + block_of[wishing]
    order = np.argsort(wish, kind="stable")
    wishing = wishing[order]
    wish = wish[order]
    # The n-th row with a wish takes the n-th rank of that node and block, as long as there is one.
    index = np.searchsorted(available, wish) + _ordinals(wish)
    fits = index < np.searchsorted(available, wish, side="right")
    rank_of[wishing[fits]] = ranks[index[fits]]

    # The other rows take the ranks left on their node: both are sorted by node, so they match up.
    waiting = np.flatnonzero(rank_of < 0)
    free = np.setdiff1d(np.arange(len(node_of)), rank_of)
    waiting = waiting[np.argsort(node_of[waiting], kind="stable")]
    rank_of[waiting] = free[np.argsort(encoder_node[free], kind="stable")]
    return rank_of


def _ordinals(ordered: Longs) -> Longs:
    """Number of each entry among the entries equal to it; entries are in ascending order."""
    return np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
