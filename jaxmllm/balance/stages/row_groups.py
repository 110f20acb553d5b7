"""Rows that neighbouring ranks hold together, in pipelines.

language rows: widest groups --encoder_groups--> groups of an encoder's ranks, on the same ranks
rows of widest groups        --narrowest-------> rows of fewer ranks, where their items fit (each C slots per rank)
rows of encoders             --group_route-----> slots of tokens in the pools of a group's ranks, end to end
rows of language             --group_route-----> the same for states that a generator reads
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec, PlanSpec, RoutePlan
from jaxmllm.phases import LANGUAGE


def encoder_groups(group: Longs, length: Longs, of_language: int, widest: int) -> Longs:
    """Widest group of an encoder's ranks for each item [n]: one that shares ranks with the item's
    language group. If there are several, each item, longest first, gets the one with the fewest
    filled slots so far.

    Args:
      group: [n] widest group of language ranks that has the item's example.
      of_language, widest: ranks of such a group, and of a widest group of the encoder.
    """
    # The item's language group is inside one group of the encoder: there is no choice.
    if widest >= of_language:
        return group * of_language // widest
    inside = of_language // widest
    filled = np.zeros((int(group.max(initial=0)) + 1, inside), np.int64)
    chosen = np.empty_like(group)
    for item in np.argsort(-length, kind="stable").tolist():
        # A view, so that what is added below is added to `filled`.
        group_filled = filled[group[item]]
        emptiest = int(group_filled.argmin())
        group_filled[emptiest] += length[item]
        chosen[item] = group[item] * inside + emptiest
    return chosen


def narrowest(
    phase: PhaseSpec, length: Longs, work: Longs, row: Longs, group: Longs, capacity: Longs
) -> tuple[Longs, Longs]:
    """Span of every row [count]: the least of the classes with the row's capacity for which all
    widest groups can split their items into rows of that span. And for each item [n], the number in
    its widest group of the first rank that holds its row.

    Args:
      length, work, row, group: [n] slots, work of attention, row and widest group of each item.
      capacity: [count] slots of each row on a rank.
    """
    span = np.full(len(capacity), phase.widest, np.int64)
    member = np.zeros(len(length), np.int64)
    # With a single span no row can be split, and its first rank is the group's.
    if len(set(phase.spans)) == 1:
        return span, member
    for row_number, slots in enumerate(capacity.tolist()):
        # A row number means one row in every widest group. These rows run as one microbatch, of one
        # class, so a span has to suit all of them.
        items = np.flatnonzero(row == row_number)
        by_group = [items[group[items] == widest_group] for widest_group in np.unique(group[items])]
        spans = [row_class.span for row_class in phase.classes if row_class.capacity == slots]
        for narrow in sorted(spans):
            rows = phase.widest // narrow
            splits = (
                split(length[members], work[members], narrow * slots, rows) for members in by_group
            )
            fitting = [row_of for row_of in splits if row_of is not None]
            if len(fitting) < len(by_group):
                continue
            span[row_number] = narrow
            # Each row of a split is held by the next `narrow` ranks of the widest group.
            for members, row_of in zip(by_group, fitting, strict=True):
                member[members] = row_of * narrow
            break
    return span, member


def split(length: Longs, work: Longs, capacity: int, rows: int) -> Longs | None:
    """The one of some equal rows that holds each item [n]: the costliest first, each to the row
    with room that has the least work. None if an item finds no room."""
    room = [capacity] * rows
    load = [0] * rows
    chosen = np.zeros(len(length), np.int64)
    for item in np.lexsort((-length, -work)).tolist():
        size = int(length[item])
        with_room = [row for row in range(rows) if room[row] >= size]
        if not with_room:
            return None
        lightest = min(with_room, key=load.__getitem__)
        room[lightest] -= size
        load[lightest] += int(work[item])
        chosen[item] = lightest
    return chosen


def group_route(
    plans: Mapping[str, PhasePlan],
    items: Mapping[str, PhaseItems],
    row_start: Ints,
    name: str,
    spec: PlanSpec,
    pool: int,
) -> RoutePlan:
    """The arrivals of an encoder's tokens, or of the states that a generator's items read: their
    slots in the pools of all ranks of a widest group, end to end.

    Args:
      row_start: [N] slot of a rank's pool where the row that is read begins.
      name: of the encoder or generator.
      pool: slots of the pool of a rank.
    """
    tokens = items[name].tokens
    if spec.phases[name].phase.generates:  # it reads slots of language rows
        plan = plans[LANGUAGE]
        per_token = 1
        examples = items[LANGUAGE].example  # ascending, one language item each
        held = np.searchsorted(examples, items[name].example)
        first_token = plan.offset[held] + items[name].slot
    else:
        plan = plans[name]
        per_token = spec.phases[name].slots_per_token
        held = np.arange(len(tokens))
        first_token = plan.offset // per_token  # token of the row
    on_rank = plan.capacity[plan.microbatch[held]] // per_token  # tokens of the row on each rank
    # row, by rank |  on_rank  |  on_rank  |  on_rank  |     An item without tokens
    # item              |first_token        end|          has one piece, of none.
    # pieces            |part 0|  part 1   |p.2|
    last_token = np.maximum(first_token + tokens - 1, first_token)
    item = np.repeat(np.arange(len(tokens)), last_token // on_rank - first_token // on_rank + 1)
    first_token, end, on_rank = first_token[item], (first_token + tokens)[item], on_rank[item]
    part = first_token // on_rank + running_sums(item, np.ones_like(item))  # which rank of the row
    begin = np.maximum(first_token, part * on_rank)
    end = np.minimum(end, (part + 1) * on_rank)
    widest = max(phase.widest for phase in spec.phases.values())
    member = plan.rank[held[item]] % widest + part
    arrival = member * pool + row_start[item] + begin - part * on_rank
    return RoutePlan(
        item=item.astype(np.int32),
        skipped=np.asarray(begin - first_token, np.int32),
        tokens=np.asarray(end - begin, np.int32),
        arrival=arrival.astype(np.int32),
        rounds=(),
    )
