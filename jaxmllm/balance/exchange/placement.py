"""Node-wise placement: items run near the language rows that read their tokens.

A token costs nothing when it stays on its devices, little inside a node, and most between nodes.
There are three kinds of swaps, none of which changes the number of rows or makes a microbatch wait
longer by more than a small margin:

    examples between language ranks               to even out incoming media tokens    (here)
    encoder rows between ranks of a microbatch    all wait for its costliest anyway    row_ranks.py
    items of similar length between rows          so that they need not be sent        swaps.py

Letters: B examples, N items, R ranks, M microbatches, G groups of one span, and A, E, L of
`ExchangeGrid`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.exchange.pieces import owning_rank
from jaxmllm.balance.exchange.row_ranks import (
    PLACEMENT_SEARCH,
    Places,
    match_rows,
    rank_limit,
)
from jaxmllm.balance.exchange.swaps import Destinations, reduce_traffic
from jaxmllm.balance.exchange.traffic import media_of_examples, sequence_of_example
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.assign import (
    attention_costs,
    item_costs,
    largest_share,
    part_costs,
)
from jaxmllm.balance.rows.level import SLOTS, RowState, balance_ranks
from jaxmllm.balance.rows.pack import lay_out
from jaxmllm.phases import LANGUAGE


def place_items_near(
    plans: Mapping[str, PhasePlan],
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    nodes: Mapping[str, Ints],
) -> dict[str, PhasePlan]:
    """Spread media over the language ranks, choose ranks for the rows of every encoder phase, then
    swap items of similar length.

    The numbers of rows and microbatches do not change. The costliest row of a microbatch costs at
    most as much as before, or 1/128 above the mean row; the costliest rank at most as much as
    before, or 1/128 above the lower bound of any placement.

    Args:
      plans: by phase, with balanced ranks.
      grids: by encoder or generator phase.
      nodes: by phase, node of each rank [R].

    Returns:
      The plans with the items in their new rows.
    """
    if not grids:
        return dict(plans)
    media = media_of_examples(items)
    sequences = items.phases[LANGUAGE]
    media_of_sequences = media[sequences.example]
    # Language rows come first: their ranks decide where the items of encoders are wanted.
    language = _spread_media(plans[LANGUAGE], sequences, phases[LANGUAGE], media_of_sequences)
    placed = place_rows(dict(plans) | {LANGUAGE: language}, items, phases, grids, nodes)
    least_benefit = max(1, int(media.sum()) // PLACEMENT_SEARCH.least_benefit)
    for phase, grid in grids.items():
        media_items = items.phases[phase]
        goal = _reading_ranks(items, phase, language)
        for span in _spans_with_a_choice(placed[phase], phases[phase]):
            places = Places.of_groups(span, goal, grid, nodes[phase], nodes[LANGUAGE])
            destinations = Destinations(
                node=places.node.astype(np.int64),
                block=places.block,
                wanted_node=places.wanted_node,
                wanted_block=places.wanted_block,
                tokens=media_items.tokens.astype(np.int64),
            )
            placed[phase] = swap_items(
                placed[phase], media_items, phases[phase], destinations, least_benefit, span
            )
    return placed


def place_rows(
    plans: Mapping[str, PhasePlan],
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    nodes: Mapping[str, Ints],
) -> dict[str, PhasePlan]:
    """Choose the ranks of the rows of every encoder phase: arguments as for `place_items_near`.

    Rows move within their microbatch, so rows, microbatches and the synchronised cost stay as they
    are. The costliest rank's total is at most what it was, or 1/128 above its lower bound; where no
    swaps achieve that, all rows of a rank (or of a group of ranks) move together.

    Returns:
      The plans with new `rank` in encoder phases.
    """
    placed = dict(plans)
    for phase, grid in grids.items():
        if plans[phase].microbatches and phases[phase].ranks > 1:
            rank = match_rows(
                plans[phase],
                items.phases[phase],
                phases[phase],
                goal=_reading_ranks(items, phase, plans[LANGUAGE]),
                grid=grid,
                encoder_node=nodes[phase],
                language_node=nodes[LANGUAGE],
            )
            placed[phase] = replace(plans[phase], rank=rank)
    return placed


def _reading_ranks(items: BatchItems, phase: str, language: PhasePlan) -> Longs:
    """Language rank that reads the middle of each item of an encoder phase: [N]."""
    media = items.phases[phase]
    reader = sequence_of_example(items)[media.example]
    slot = language.offset[reader].astype(np.int64) + media.slot + media.tokens // 2
    return owning_rank(language, reader, slot)


def _spread_media(plan: PhasePlan, items: PhaseItems, spec: PhaseSpec, tokens: Longs) -> PhasePlan:
    """The language plan after swaps of examples that even out the media tokens of the ranks.

    A rank that encodes as much as all others but takes in little has to send nearly all of it.
    """
    for span in _spans_with_a_choice(plan, spec):
        movable = _movable_items(plan, items, spec, span, tokens)
        balance_ranks(movable.state, movable.groups)
        plan = movable.moved(plan)
    return plan


def _spans_with_a_choice(plan: PhasePlan, spec: PhaseSpec) -> list[int]:
    """Spans of the plan's rows that leave a choice between several groups, widest first."""
    return [span for span in np.unique(plan.span)[::-1].tolist() if span < spec.ranks]


def swap_items(
    plan: PhasePlan,
    items: PhaseItems,
    spec: PhaseSpec,
    destinations: Destinations,
    least_benefit: int,
    span: int = 1,
) -> PhasePlan:
    """The plan after swaps that bring items to rows of the ranks that want them.

    Args:
      destinations: of the groups of `span` ranks, whose rows swap items with one another.
    """
    movable = _movable_items(plan, items, spec, span)
    reduce_traffic(movable.state, destinations.chosen(movable.items), least_benefit)
    return movable.moved(plan)


@dataclass(frozen=True)
class _MovableItems:
    """The items of a plan that are in rows of one span, with the state of these rows."""

    items: Longs  # [N]
    state: RowState  # row m * G + group is that of `microbatches[m]` in a group
    microbatches: Longs  # [M] those with rows of the span
    span: int
    groups: int
    slots: Longs  # [M * G] of each row
    blocks: Longs | None  # [M * G] slots of a block in each row; None: items are laid end to end

    def moved(self, plan: PhasePlan) -> PhasePlan:
        """The plan with the items in the rows that `state` now has for them."""
        row_of = self.state.row_of
        microbatch_index, group = np.divmod(row_of, self.groups)
        length = self.state.amounts[SLOTS, :-1]
        offset, segment = lay_out(row_of, length, self.slots, self.blocks)
        new_columns = {
            "microbatch": self.microbatches[microbatch_index],
            "rank": group * self.span,
            "offset": offset,
            "segment": segment,
        }
        changed = {name: getattr(plan, name).copy() for name in new_columns}
        for name, column in new_columns.items():
            changed[name][self.items] = column
        return replace(plan, **changed)


def _movable_items(
    plan: PhasePlan, of_phase: PhaseItems, spec: PhaseSpec, span: int, tokens: Longs | None = None
) -> _MovableItems:
    """The items in a plan's rows of one span, and how much these rows can still take.

    Args:
      tokens: [N] a further amount of each item, for which rows have no limit.
    """
    groups = spec.ranks // span
    all_costs = item_costs(spec, of_phase)
    rank_cost = part_costs(plan, all_costs, spec.ranks).sum(axis=0)
    rank_room = rank_limit(rank_cost, largest_share(plan, all_costs)) - rank_cost

    chosen = plan.span == span
    microbatches = np.flatnonzero(chosen)
    microbatch_index = np.cumsum(chosen) - 1
    items = np.flatnonzero(chosen[plan.microbatch])
    group = plan.rank[items] // span
    row_of = microbatch_index[plan.microbatch[items]].astype(np.int64) * groups + group
    length = of_phase.length[items].astype(np.int64)
    cost = all_costs[items]
    attention = attention_costs(spec, of_phase)[items]

    # A row may cost as much as the costliest one of its microbatch, but add no more than its share
    # of what its ranks may take on. It may have as much attention as the row that has most.
    rows = len(microbatches) * groups
    row_cost = sums_by(row_of, cost, rows).reshape(-1, groups)
    mean = row_cost.sum(axis=1, keepdims=True) // groups
    microbatch_limit = _row_limit(row_cost, mean // PLACEMENT_SEARCH.margin)
    # A row costs each of its ranks 1 / span of its own cost, so the room of the group's fullest
    # rank counts span times; the group's rows share it equally.
    group_room = rank_room.reshape(groups, span).min(axis=1) * span // max(len(microbatches), 1)
    cost_limit = row_cost + np.minimum(microbatch_limit - row_cost, group_room)
    row_attention = sums_by(row_of, attention, rows).reshape(-1, groups)
    most_attention = _row_limit(row_attention, mean // PLACEMENT_SEARCH.attention_margin)
    attention_limit = np.repeat(most_attention, groups)

    slots = np.repeat(plan.capacity[chosen].astype(np.int64) * span, groups)
    amounts = [length, np.ones_like(length), cost, attention]
    limits: list[Longs | int] = [
        slots,
        spec.max_segments,
        cost_limit.reshape(-1),
        attention_limit,
    ]
    if tokens is not None:
        amounts.append(tokens[items])
        limits.append(0)  # so that `remaining` is minus the amount, as `balance_ranks` reads it
    state = RowState.from_limits(row_of, amounts, limits, rows)
    blocks = spec.row_blocks(plan.capacity[chosen], plan.span[chosen], groups)
    return _MovableItems(items, state, microbatches, span, groups, slots, blocks)


def _row_limit(amount: Longs, margin: Longs) -> Longs:
    """Limit on an amount [M, G] of the rows of each microbatch, [M, 1]: that of the row that has
    most, or a margin [M, 1] above the mean."""
    mean = amount.sum(axis=1, keepdims=True) // amount.shape[1]
    limit: Longs = np.maximum(amount.max(axis=1, initial=0, keepdims=True), mean + margin)
    return limit
