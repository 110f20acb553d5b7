"""Rows of the language phase: tokens of examples, and where the media tokens that they read will arrive.

A row holds, with r local ranks, C slots and S segments:
    tokens, targets int32 [r, C] (target -1: none), segments int32 [r, C], positions int32 [r, C,
    3], media int32 [r, C] (slot of the language pool where this token's embedding arrives; -1:
    text), sources int32 [r, S] (source of segment s at s - 1; -1: none), groups int32 [r, C] (media
    seen in both directions), order int32 [r, C] (slot before the row was dealt to parts), tiles
    (see masks.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxmllm.balance.records import PhaseSpec, StepPlan
from jaxmllm.data.rows.batch import CHANGED, Batch, MisalignmentError, slots_of
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_language_row
from jaxmllm.phases import LANGUAGE


def language_rows(
    batch: Batch,
    plan: StepPlan,
    ranks: tuple[int, ...],
    attention: AttentionSpec,
    spec: PhaseSpec,
    source_of: Callable[[int], int],
) -> list[Row]:
    """Rows of every microbatch; a long one, which all ranks share, is whole. Raises
    `MisalignmentError`."""
    phase = plan.phases[LANGUAGE]
    items = batch.items.phases[LANGUAGE]
    is_shared = phase.capacity > spec.capacities[0]  # one long row for all ranks
    rows = [
        _empty_row(1 if shared else len(ranks), int(capacity), spec.max_segments)
        for capacity, shared in zip(phase.capacity, is_shared, strict=True)
    ]
    for item in np.flatnonzero(np.isin(phase.rank, ranks) | is_shared[phase.microbatch]).tolist():
        index = int(items.example[item])
        row = rows[phase.microbatch[item]]
        number = int(batch.examples[index])
        example = batch.example(index)
        if len(example.tokens) != items.length[item]:
            raise MisalignmentError(
                f"example {number} has {len(example.tokens)} tokens, but the plan was made for {items.length[item]}: "
                f"{CHANGED}"
            )
        row_ranks = (int(phase.rank[item]),) if is_shared[phase.microbatch[item]] else ranks
        rank, slots = slots_of(LANGUAGE, item, phase, row_ranks, len(example.tokens))
        row["tokens"][rank, slots] = example.tokens
        row["targets"][rank, slots] = example.targets
        row["positions"][rank, slots] = example.positions
        row["segments"][rank, slots] = phase.segment[item]
        row["sources"][rank, phase.segment[item] - 1] = source_of(number)
        for encoder, route in plan.routes.items():
            for media, span in batch.media(encoder, index):
                first = slots.start + span.slot
                last = first + span.tokens
                row["media"][rank, first:last] = route.arrival[media] + np.arange(span.tokens)
                if encoder in attention.bidirectional:
                    # A number that no other item of the row has
                    row["groups"][rank, first:last] = first + 1
    for row, shared in zip(rows, is_shared, strict=True):
        finish_language_row(row, attention, shared_by=spec.ranks if shared else 1)
    return rows


def _empty_row(ranks: int, capacity: int, max_segments: int) -> Row:
    return {
        "tokens": np.zeros((ranks, capacity), np.int32),
        "targets": np.full((ranks, capacity), -1, np.int32),
        "segments": np.zeros((ranks, capacity), np.int32),
        "positions": np.zeros((ranks, capacity, 3), np.int32),
        "media": np.full((ranks, capacity), -1, np.int32),
        "groups": np.zeros((ranks, capacity), np.int32),
        "sources": np.full((ranks, max_segments), -1, np.int32),
    }
