"""Rows of the language phase: tokens of examples, and pool slots where their media tokens arrive.

A row holds, with q local ranks, C slots and S segments:
    tokens int32 [q, C]
    targets int32 [q, C]        -1: none
    segments int32 [q, C]
    positions float32 [q, C, 3]
    media int32 [q, C]          language-pool slot where the token's embedding arrives; -1: text
    sources int32 [q, S]        source of segment s at s - 1; -1: none
    groups int32 [q, C]         number of the item, for media tokens that see one another in both
                                directions; 0: none
    order int32 [q, C]          slot of this token in the order of the plan, before dealing to parts
    tiles                       see masks.py
For span g, the rows are whole rows of the q groups that have a local rank: g * C slots. In the
order of the plan, slots p * C .. (p + 1) * C - 1 of such a row belong to the p-th rank of the
group, and `media` counts slots in the pool of the rank that owns the token's slot. `arrived` int32
[q, g * C] is `media` in the order of the plan.

With a generator, states int32 [q, C] is the slot of the language pool from which the state of this
token is sent to the item that is made from it (-1: none), and `leaving` is `states` in the order of
the plan. Only rows with a span above 1 have `arrived` and `leaving`.
"""

from __future__ import annotations

import numpy as np

from jaxmllm.balance.records import StepPlan
from jaxmllm.data.rows.batch import CHANGED, Batch, LocalRows, MisalignmentError
from jaxmllm.data.rows.encoder_rows import empty_rows
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_language_row
from jaxmllm.data.text.render import Rendered
from jaxmllm.phases import LANGUAGE


def language_rows(
    batch: Batch,
    plan: StepPlan,
    ranks: tuple[int, ...],
    attention: AttentionSpec,
    max_segments: int,
) -> list[Row]:
    """Rows of every microbatch. Raises `MisalignmentError`."""
    phase = plan.phases[LANGUAGE]
    items = batch.items.phases[LANGUAGE]
    local = LocalRows(LANGUAGE, phase, ranks)
    rows = empty_rows(local, lambda row_count, slots: _empty_row(row_count, slots, max_segments))
    # In stages a generator reads whole rows, so no states are sent by slot.
    routes = {
        name: route
        for name, route in plan.routes.items()
        if not (plan.runs and batch.modalities[name].generated)
    }
    generates = any(batch.modalities[name].generated for name in routes)
    if generates:
        rows = [row | {"states": np.full_like(row["media"], -1)} for row in rows]
    for item in local.items.tolist():
        row = rows[phase.microbatch[item]]
        row_index = local.row(item)
        index = int(items.example[item])
        segment = int(phase.segment[item])
        example = _planned_example(batch, index, int(items.length[item]))
        slots = local.slots(item, len(example.tokens))
        row["tokens"][row_index, slots] = example.tokens
        row["targets"][row_index, slots] = example.targets
        row["positions"][row_index, slots] = example.positions
        row["segments"][row_index, slots] = segment
        row["sources"][row_index, segment - 1] = batch.source(index)
        for name, route in routes.items():
            column = "states" if batch.modalities[name].generated else "media"
            for media, span in batch.media(name, index):
                first_slot = slots.start + span.slot
                read = slice(first_slot, first_slot + span.tokens)
                row[column][row_index, read] = route.arrivals(media)
                if name in attention.bidirectional:
                    # A number that no other item of the row has, and not 0, which means no group
                    row["groups"][row_index, read] = first_slot + 1
    for row, span in zip(rows, phase.span.tolist(), strict=True):
        if span > 1:
            # Copied while the slots are in the order of the plan: `finish_language_row` deals them
            # to parts.
            row["arrived"] = row["media"].copy()
            if generates:
                row["leaving"] = row["states"].copy()
        finish_language_row(row, attention, span)
    return rows


def _planned_example(batch: Batch, index: int, tokens: int) -> Rendered:
    """One example of a batch. Raises `MisalignmentError` if it has not the planned token count."""
    example = batch.example(index)
    if len(example.tokens) != tokens:
        raise MisalignmentError(
            f"example {batch.examples[index]} has {len(example.tokens)} tokens, but the plan was made for {tokens}: "
            f"{CHANGED}"
        )
    return example


def _empty_row(rows: int, slots: int, max_segments: int) -> Row:
    return {
        "tokens": np.zeros((rows, slots), np.int32),
        "targets": np.full((rows, slots), -1, np.int32),
        "segments": np.zeros((rows, slots), np.int32),
        "positions": np.zeros((rows, slots, 3), np.float32),
        "media": np.full((rows, slots), -1, np.int32),
        "groups": np.zeros((rows, slots), np.int32),
        "sources": np.full((rows, max_segments), -1, np.int32),
    }
