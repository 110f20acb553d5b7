"""Node-wise placement: where items run, so that the outputs of encoders have a short way to the language rows.

A token costs nothing when it stays on its devices, little inside a node, and most between nodes. First the language
ranks trade examples of like cost until all take in about as many media tokens. The ranks of a microbatch may swap
their encoder rows freely, for every rank waits for the costliest row of the microbatch anyway; after that, items of
like length trade places (trade.py).

    benefit[row, rank] = weight of the items for the rank's node + of those for the rank's own devices

An item weighs the square of its tokens, for short ones find others to trade with afterwards. Few ranks get the
assignment of greatest benefit, many a greedy one: first nodes, then ranks inside each (node-wise placement as in
OrchMLLM, arXiv 2503.23830, but row by row).

Letters: N items, R ranks, M microbatches, and A, E, L of `ExchangeGrid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.exchange.trade import Places, bring_home
from jaxmllm.balance.exchange.traffic import media_of_examples
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.assign import item_costs, rank_floor
from jaxmllm.balance.rows.level import SLOTS, RowState, balance_ranks
from jaxmllm.balance.rows.pack import lay_out
from jaxmllm.phases import LANGUAGE

EXACT_RANKS = 128  # more are placed greedily: the exact assignment takes cubic time
MARGIN = 128  # rank totals may come to one part in so many above their floor, costliest rows above the mean
WORTH = 33  # items trade as long as one part in so many of all routed tokens gains by a sweep


def place_items_near(
    plans: Mapping[str, PhasePlan],
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    nodes: Mapping[str, Ints],
) -> dict[str, PhasePlan]:
    """Spread media over the language ranks, choose the ranks of the rows of every encoder phase, then let items of
    like length trade places.

    The number of rows and microbatches stays. The costliest row of a microbatch and the costliest rank stay as they
    are or within one part in `MARGIN` of the mean and of what no placement goes below.

    Args:
      plans: by phase, with balanced ranks.
      grids: by encoder phase.
      nodes: by phase, node of each rank [R].

    Returns:
      The plans with new rows of the items.
    """
    media, sequences = media_of_examples(items), items.phases[LANGUAGE]
    language = _spread_media(plans[LANGUAGE], sequences.length, phases[LANGUAGE], media[sequences.example])
    placed = place_rows(dict(plans) | {LANGUAGE: language}, items, phases, grids, nodes)
    worth = max(1, int(media.sum()) // WORTH)
    home = _language_ranks(items, language)
    for phase, grid in grids.items():
        spec = phases[phase]
        if placed[phase].microbatches and spec.ranks > 1:
            goal = home[items.phases[phase].example]
            places = Places(
                node=nodes[phase].astype(np.int64),
                block=_blocks(grid.encoder),
                wanted_node=nodes[LANGUAGE][goal].astype(np.int64),
                wanted_block=_blocks(grid.language)[goal],
                tokens=items.phases[phase].tokens.astype(np.int64),
            )
            placed[phase] = _trade_items(placed[phase], items.phases[phase].length, spec, places, worth)
    return placed


def _spread_media(plan: PhasePlan, length: Longs, spec: PhaseSpec, tokens: Longs) -> PhasePlan:
    """The language plan after trades that give every rank about as many media tokens to take in: a rank that encodes
    as much as all others but takes in little has to send nearly all of it."""
    movable = _movable(plan, length, spec, tokens)
    balance_ranks(movable.filling, spec.ranks)
    return movable.moved(plan)


def _trade_items(plan: PhasePlan, length: Longs, spec: PhaseSpec, places: Places, worth: int) -> PhasePlan:
    """The plan after trades that bring items home."""
    movable = _movable(plan, length, spec)
    bring_home(movable.filling, places.of(movable.items), worth)
    return movable.moved(plan)


@dataclass(frozen=True)
class _Movable:
    """The items in rows of one rank each; longer rows, which all ranks share, are left alone."""

    items: Longs  # [N]
    filling: RowState  # of rows microbatch * R + rank
    ranks: int

    def moved(self, plan: PhasePlan) -> PhasePlan:
        """The plan with the items where they lie now."""
        row_of, length = self.filling.row_of, self.filling.amounts[SLOTS, :-1]
        changed = {name: getattr(plan, name).copy() for name in ("microbatch", "rank", "offset", "segment")}
        changed["microbatch"][self.items], changed["rank"][self.items] = np.divmod(row_of, self.ranks)
        changed["offset"][self.items], changed["segment"][self.items] = lay_out(row_of, length)
        return replace(plan, **changed)


def _movable(plan: PhasePlan, length: Longs, spec: PhaseSpec, *further: Longs) -> _Movable:
    """With amounts further than cost, which nothing limits."""
    items = np.flatnonzero(plan.capacity[plan.microbatch] <= spec.capacities[0])
    ranks, rows = spec.ranks, plan.microbatches * spec.ranks
    row_of, length = plan.microbatch[items].astype(np.int64) * ranks + plan.rank[items], length[items].astype(np.int64)
    cost = item_costs(spec, length)
    load = sums_by(row_of, cost, rows).reshape(-1, ranks)
    mean, total = load.sum(axis=1) // ranks, load.sum(axis=0)
    floor = rank_floor(cost, ranks)
    most = np.maximum(load.max(axis=1, initial=0), mean + mean // MARGIN)[:, None]
    most_of_rank = max(int(total.max(initial=0)), floor + floor // MARGIN)
    # Each row has its part of what its rank may take on.
    costs = load + np.minimum(most - load, (most_of_rank - total) // max(plan.microbatches, 1))
    slots = np.repeat(plan.capacity.astype(np.int64), ranks)
    amounts = length, np.ones_like(length), cost, *(amount[items] for amount in further)
    limits = slots, spec.max_segments, costs.reshape(-1), *(0 for _ in further)
    return _Movable(items, RowState.from_limits(row_of, amounts, limits, rows), ranks)


def _language_ranks(items: BatchItems, language: PhasePlan) -> Longs:
    """Language rank of each example: [B]."""
    home = np.full(len(items.examples), -1, np.int64)
    home[items.phases[LANGUAGE].example] = language.rank
    return home


def place_rows(
    plans: Mapping[str, PhasePlan],
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    nodes: Mapping[str, Ints],
) -> dict[str, PhasePlan]:
    """Choose the ranks of the rows of every encoder phase.

    Rows move within their microbatch, so rows, microbatches and the synchronised cost stay as they are. The costliest
    rank's total stays as it is or within one part in `MARGIN` of what no placement goes below; where that cannot be
    had, all rows of a rank move together.

    Args:
      plans: by phase, with balanced ranks.
      grids: by encoder phase.
      nodes: by phase, node of each rank [R].

    Returns:
      The plans with new `rank` in encoder phases.
    """
    placed, home = dict(plans), _language_ranks(items, plans[LANGUAGE])
    for phase, grid in grids.items():
        plan, wanted, ranks = plans[phase], items.phases[phase], phases[phase].ranks
        if not plan.microbatches or ranks == 1:
            continue
        goal, near = home[wanted.example], (nodes[phase], nodes[LANGUAGE])
        rank, weight = plan.rank.astype(np.int64), wanted.tokens.astype(np.int64) ** 2
        each = item_costs(phases[phase], wanted.length)
        cost = sums_by(plan.microbatch * np.int64(ranks) + rank, each, plan.microbatches * ranks).reshape(-1, ranks)
        rank_of = np.empty_like(cost)
        for microbatch in range(plan.microbatches):
            own = np.flatnonzero(plan.microbatch == microbatch)
            rank_of[microbatch] = _match(rank[own], goal[own], weight[own], grid, *near)
        floor = rank_floor(each, ranks)
        if not _even_out(rank_of, cost, max(int(cost.sum(axis=0).max()), floor + floor // MARGIN)):
            rank_of[:] = _match(rank, goal, weight, grid, *near)
        placed[phase] = replace(plan, rank=rank_of[plan.microbatch, rank].astype(np.int32))
    return placed


def _even_out(rank_of: Longs, cost: Longs, limit: int) -> bool:
    """Swap rows of the ranks whose totals are above `limit`, in place; False if that is not enough.

    Args:
      rank_of: [M, R] rank of each row.
      cost: [M, R] of each row.
    """
    row_at = np.argsort(rank_of, axis=1)
    at = np.take_along_axis(cost, row_at, axis=1)
    total = at.sum(axis=0)
    while (worst := int(total.max())) > limit:
        heavy = int(total.argmax())
        gain = at[:, heavy, None] - at  # what the heavy rank loses, and the other one takes on
        after = np.maximum(total[heavy] - gain, total + gain)
        after[:, heavy] = worst
        microbatch, other = divmod(int(after.argmin()), len(total))
        if after[microbatch, other] >= worst:
            return False
        pair = [heavy, other]
        total[pair] += gain[microbatch, other] * np.array([-1, 1])
        at[microbatch, pair] = at[microbatch, pair[::-1]]
        row_at[microbatch, pair] = row_at[microbatch, pair[::-1]]
    np.put_along_axis(rank_of, row_at, np.arange(len(total))[None], axis=1)
    return True


def _match(
    row: Longs, goal: Longs, weight: Longs, grid: ExchangeGrid, encoder_node: Ints, language_node: Ints
) -> Longs:
    """A rank for each of R rows, every rank once: [R].

    Args:
      row: [N] row of each item, 0 .. R - 1.
      goal: [N] language rank that needs the item.
      weight: [N] of having it there.
      encoder_node, language_node: node of each rank.
    """
    ranks = grid.encoder.size
    encoder_block, language_block = _blocks(grid.encoder), _blocks(grid.language)
    nodes = int(max(encoder_node.max(), language_node.max())) + 1
    node_goal, block_goal = language_node[goal].astype(np.int64), language_block[goal]
    if ranks <= EXACT_RANKS:
        to_node = sums_by(row * nodes + node_goal, weight, ranks * nodes).reshape(ranks, nodes)
        to_block = sums_by(row * len(grid.encoder) + block_goal, weight, grid.encoder.shape[0] * ranks)
        benefit = to_node[:, encoder_node] + to_block.reshape(ranks, -1)[:, encoder_block]
        return linear_sum_assignment(benefit, maximize=True)[1].astype(np.int64)
    node_of = _greedy(row, node_goal, weight, np.bincount(encoder_node, minlength=nodes), ranks)
    inside = node_of[row] == node_goal
    room = np.full(len(grid.encoder), grid.encoder.shape[1])
    # A block of several ranks may span nodes; then the node decides and the block is left to chance.
    block_of = _greedy(row[inside], block_goal[inside], weight[inside], room, ranks, fill=False)
    return _deal(node_of, block_of, encoder_node, encoder_block)


def _blocks(ranks: Ints) -> Longs:
    """Place along A of every rank."""
    block = np.empty(ranks.size, np.int64)
    block[ranks] = np.arange(len(ranks))[:, None]
    return block


def _greedy(row: Longs, group: Longs, weight: Longs, room: Longs, rows: int, fill: bool = True) -> Longs:
    """A group for each row: repeatedly every row asks for the group that needs most of its tokens among those with
    room, and groups take those with most tokens: [rows], -1 where none is left (never with `fill`)."""
    groups = len(room)
    key, index = np.unique(row * groups + group, return_inverse=True)
    gain = sums_by(index, weight, len(key))
    key = key[np.lexsort((key, -gain))]  # best first
    row, group = np.divmod(key, groups)
    taken, room = np.full(rows, -1, np.int64), room.astype(np.int64)
    while len(row):
        asking = np.unique(row, return_index=True)[1]  # best wish of each row
        asking = asking[np.lexsort((asking, group[asking]))]
        wish = group[asking]
        turn = np.arange(len(wish)) - np.searchsorted(wish, wish)
        granted = asking[turn < room[wish]]
        taken[row[granted]] = group[granted]
        room -= np.bincount(group[granted], minlength=groups)
        open_wishes = (taken[row] < 0) & (room[group] > 0)
        row, group = row[open_wishes], group[open_wishes]
    if fill:
        taken[taken < 0] = np.repeat(np.arange(groups), room)[: np.count_nonzero(taken < 0)]
    return taken


def _deal(node_of: Longs, block_of: Longs, encoder_node: Ints, encoder_block: Longs) -> Longs:
    """A rank of its node for each row, of the wished block if it has one there: [R]."""
    rank_of = np.full(len(node_of), -1, np.int64)
    place = encoder_node * (int(encoder_block.max()) + 1) + encoder_block
    ranks = np.argsort(place, kind="stable")
    wishing = np.flatnonzero(block_of >= 0)
    wish = node_of[wishing] * (int(encoder_block.max()) + 1) + block_of[wishing]
    order = np.argsort(wish, kind="stable")
    wishing, wish = wishing[order], wish[order]
    turn = np.searchsorted(place[ranks], wish) + np.arange(len(wish)) - np.searchsorted(wish, wish)
    fits = turn < np.searchsorted(place[ranks], wish, side="right")
    rank_of[wishing[fits]] = ranks[turn[fits]]
    left = np.flatnonzero(rank_of < 0)
    free = np.setdiff1d(np.arange(len(node_of)), rank_of)
    left = left[np.argsort(node_of[left], kind="stable")]
    rank_of[left] = free[np.argsort(encoder_node[free], kind="stable")]
    return rank_of
