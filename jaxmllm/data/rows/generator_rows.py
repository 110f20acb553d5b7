"""Rows of a generator: the items that are drawn, with slots for the states that they are drawn from
and their random values.

An item holds first its conditions, one slot per language token that it reads, then its patches:

    slots       | c c c p p p p p p | c p p p p | . .        c: condition, p: patch
    owners        1 1 1 1 1 1 1 1 1   2 2 2 2 2   0 0
    patches       - - - 0 1 2 3 4 5   - 0 1 2 3   - -

Where patches see conditions by cross-attention, nothing else is computed of conditions, so they
need no slots of their own. An item has as many slots as patches or conditions, whichever are more,
and both begin in its first slot:
    slots       | p p p p p p | p p p p | . .
    conditions  | c c c       | c       |

A row has, with q local ranks, C slots, F features and S segments:
    features [q, C, F]
    owners int32 [q, C]         segment of the item; 0: padding
    segments int32 [q, C]       the same for attention: 0 also at conditions hidden from their item
    positions int32 [q, C, 3]   (time, height, width): see data/media/generated.py
    patches int32 [q, C]        number of the patch in its item; -1: none, or it did not load
    conditions int32 [q, C]     where this condition's state arrives: slot of its rank's row in the
                                order of the plan, or in stages slot of the pool of all language
                                rows that the microbatch reads; -1: none
    noise uint32 [q, S, 2]      key of each segment's noise
    times float32 [q, S]        for guided items the shift of their times
    sources int32 [q, S]        -1: none
    failed int32 [q]            items that did not load
    order, tiles                see masks.py
In guided items, the second half of the patches repeats the first, but does not see the conditions:
    slots     | c c c p p p q p p p q |       segments of the second half are those of the first + S
    patches     - - - 0 1 2 3 0 1 2 3
and partners int32 [q, C] is the slot of the same patch in the other half; elsewhere its own slot.
With cross-attention, segments are set at patches alone, readers int32 [q, C] are the segments of
conditions, cross_tiles are the tiles of the cross-attention, and padded int32 [q, C] is how many
conditions of zeros each patch also sees (see masks.py).
For span g, the rows are whole rows of the q groups that have a local rank: g * C slots. Where g is
above 1, `arrived` int32 [q, g * C] is `conditions` in the order of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from jaxmllm.balance.records import PhasePlan, RoutePlan
from jaxmllm.data.media.generated import Generated
from jaxmllm.data.rows.batch import Batch, LocalRows
from jaxmllm.data.rows.draws import Draws, StepDraws
from jaxmllm.data.rows.encoder_rows import Filling, empty_rows
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_generator_row
from jaxmllm.data.text.render import MediaSpan
from jaxmllm.row_format import RowFormat


def generator_rows(
    batch: Batch,
    phase: str,
    plan: PhasePlan,
    ranks: tuple[int, ...],
    attention: AttentionSpec,
    max_segments: int,
    draws: StepDraws,
    threads: int,
    route: RoutePlan | None = None,
) -> tuple[list[Row], list[str]]:
    """Rows of every microbatch, and messages of items that did not load. Messages and errors are as
    in `encoder_rows`.

    Args:
      route: with stages, where states that items read arrive; none: at the slots of conditions.
    """
    modality = batch.modalities[phase]
    generated = cast(Generated, modality)
    items = batch.items.phases[phase]
    local = LocalRows(phase, plan, ranks)
    rows = empty_rows(
        local,
        lambda count, slots: _empty_row(
            count, slots, max_segments, modality.format, generated.crossed
        ),
    )
    guided = generated.copies > 1
    drawn = _draw_for_items(batch, local, generated, draws)
    for item, draw in drawn.items():
        row = rows[plan.microbatch[item]]
        row_segment = local.row(item), int(plan.segment[item]) - 1
        row["noise"][row_segment] = draw.noise
        row["times"][row_segment] = draw.time
        row["sources"][row_segment] = batch.source(int(items.example[item]))
    # Every slot starts as its own partner; filling the items overwrites the slots of their patches.
    if guided:
        for row in rows:
            row["partners"] = np.tile(
                np.arange(row["owners"].shape[1], dtype=np.int32), (len(row["owners"]), 1)
            )
    kind = _GuidedFilling if guided else _Filling
    filling = kind(modality, items, local, rows, drawn, route)
    failures = filling.load_all(batch, threads)
    for row, span in zip(rows, plan.span.tolist(), strict=True):
        if span > 1:
            row["arrived"] = row["conditions"].copy()
        finish_generator_row(row, attention, phase, span)
    return rows, failures


def _draw_for_items(
    batch: Batch, local: LocalRows, generated: Generated, draws: StepDraws
) -> dict[int, Draws]:
    """What is drawn for each item of the local rows, in their order."""
    items = batch.items.phases[local.phase]
    drawn = {}
    for item in local.items.tolist():
        patches = generated.patch_count(int(items.real[item]), int(items.tokens[item]))
        number = batch.number_in_example(local.phase, item)
        drawn[item] = draws.of(int(items.example[item]), number, patches // generated.copies)
    return drawn


@dataclass(frozen=True)
class _Filling(Filling):
    draws: dict[int, Draws]  # by item
    route: RoutePlan | None

    def lay(self, row: Row, row_index: int, item: int, span: MediaSpan, slots: slice) -> slice:
        plan = self.local.plan
        modality = cast(Generated, self.modality)
        patches = self.patches(item, slots)
        conditions = np.arange(slots.start, slots.start + span.conditions)
        row["owners"][row_index, slots] = plan.segment[item]
        seen = 0 if self.draws[item].hidden else plan.segment[item]
        row["readers" if modality.crossed else "segments"][row_index, conditions] = seen
        row["segments"][row_index, patches] = plan.segment[item]
        if self.route is None:
            # Slots p * capacity .. of the row belong to the p-th rank of the group, and a state
            # arrives in that rank's own pool, at the number of its slot on that rank.
            capacity = int(plan.capacity[plan.microbatch[item]])
            row["conditions"][row_index, conditions] = conditions % capacity
        else:
            row["conditions"][row_index, conditions] = self.route.arrivals(item)
        of_conditions = modality.condition_positions(span.shape, span.conditions)
        row["positions"][row_index, conditions] = of_conditions
        row["positions"][row_index, patches] = modality.positions(span.shape)
        row["positions"][row_index, patches, 0] += modality.first_time(span.conditions)
        return patches

    def patches(self, item: int, slots: slice) -> slice:
        """The slots of an item that hold patches."""
        modality = cast(Generated, self.modality)
        conditions = int(self.items.tokens[item])
        start = slots.start + modality.first_patch(conditions)
        return slice(start, start + modality.patch_count(int(self.items.real[item]), conditions))

    def accept(self, row: Row, row_index: int, item: int, slots: slice) -> None:
        patches = self.patches(item, slots)
        row["patches"][row_index, patches] = np.arange(patches.stop - patches.start)


class _GuidedFilling(_Filling):
    """Rows of guided items: the second half of an item's patches is a segment of its own, with the
    noise of the first half."""

    def lay(self, row: Row, row_index: int, item: int, span: MediaSpan, slots: slice) -> slice:
        patches = super().lay(row, row_index, item, span, slots)
        with_conditions, without = _halves(patches)
        # Adding S, the most segments of a row, gives numbers that no first half has.
        row["segments"][row_index, without] += row["noise"].shape[1]
        row["partners"][row_index, with_conditions] = np.arange(without.start, without.stop)
        row["partners"][row_index, without] = np.arange(with_conditions.start, with_conditions.stop)
        return patches

    def accept(self, row: Row, row_index: int, item: int, slots: slice) -> None:
        for half in _halves(self.patches(item, slots)):
            row["patches"][row_index, half] = np.arange(half.stop - half.start)


def _halves(slots: slice) -> tuple[slice, slice]:
    middle = (slots.start + slots.stop) // 2
    return slice(slots.start, middle), slice(middle, slots.stop)


def _empty_row(
    rows: int, slots: int, max_segments: int, row_format: RowFormat, crossed: bool
) -> Row:
    row = {
        "features": np.zeros((rows, slots, row_format.features), row_format.dtype),
        "owners": np.zeros((rows, slots), np.int32),
        "segments": np.zeros((rows, slots), np.int32),
        "positions": np.zeros((rows, slots, 3), np.int32),
        "patches": np.full((rows, slots), -1, np.int32),
        "conditions": np.full((rows, slots), -1, np.int32),
        "noise": np.zeros((rows, max_segments, 2), np.uint32),
        "times": np.zeros((rows, max_segments), np.float32),
        "sources": np.full((rows, max_segments), -1, np.int32),
        "failed": np.zeros(rows, np.int32),
    }
    if crossed:
        row["readers"] = np.zeros((rows, slots), np.int32)
    return row
