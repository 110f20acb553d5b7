"""Legal plans that no planner makes: whatever builds on a plan must hold for these as well."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxmllm.balance.exchange.routes import plan_routes
from jaxmllm.balance.records import (
    BatchItems,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RowClass,
    StepPlan,
)


def any_plan(
    seed: int, items: BatchItems, spec: PlanSpec, alignment: Mapping[str, int]
) -> StepPlan:
    """A plan whose items are `scattered` in every phase; `alignment` is by phase."""
    plans = {
        name: scattered(seed, items.phases[name], phase, alignment[name])
        for name, phase in spec.phases.items()
    }
    return StepPlan(*plan_routes(plans, items, spec))


def scattered(
    seed: int, items: PhaseItems, spec: PhaseSpec, alignment: int | None = None
) -> PhasePlan:
    """Items in random order, in random rows of random classes, with random gaps between them.

    Gaps are multiples of `alignment` slots, by default of one token. A row is left unfinished now
    and then, so that many groups of ranks stay empty in a microbatch.
    """
    alignment = alignment or spec.slots_per_token
    random = np.random.default_rng(seed)
    rows: list[dict[int, tuple[int, int]]] = []  # per microbatch: first rank -> (slots, items)
    classes: list[RowClass] = []
    # Columns: microbatch, rank, offset, segment.
    placements = np.zeros((len(items.length), 4), np.int64)
    for item in random.permutation(len(items.length)).tolist():
        length = int(items.length[item])
        gap = int(random.integers(0, 3)) * alignment

        fitting_classes = [row_class for row_class in spec.classes if row_class.slots >= length]
        chosen_class = fitting_classes[random.integers(len(fitting_classes))]

        def fits(m: int, first: int, needed: int = gap + length) -> bool:
            used_slots, segments = rows[m].get(first, (0, 0))
            return used_slots + needed <= classes[m].slots and segments < spec.max_segments

        fitting_rows = [
            (m, first)
            for m, row_class in enumerate(classes)
            for first in range(0, spec.ranks, row_class.span)
            if row_class == chosen_class and fits(m, first)
        ]
        # A new microbatch where no row fits, and sometimes although one would.
        if not fitting_rows or random.random() < 0.15:
            classes.append(chosen_class)
            rows.append({})
            group = int(random.integers(spec.ranks // chosen_class.span))
            fitting_rows = [(len(rows) - 1, group * chosen_class.span)]
            gap = min(gap, chosen_class.slots - length)
        m, first = fitting_rows[random.integers(len(fitting_rows))]
        used_slots, segments = rows[m].get(first, (0, 0))
        placements[item] = m, first, used_slots + gap, segments + 1
        rows[m][first] = (used_slots + gap + length, segments + 1)
    # Microbatches of a plan are ordered by class, so those drawn in another order get new numbers.
    order = sorted(range(len(classes)), key=lambda m: spec.classes.index(classes[m]))
    sorted_index = np.argsort(np.array(order, np.int64))
    placements[:, 0] = sorted_index[placements[:, 0]] if len(order) else 0
    shape = np.array([classes[m] for m in order], np.int32).reshape(-1, 2)
    zeros = np.zeros(len(order), np.int32)
    columns = placements.astype(np.int32).T
    return PhasePlan(shape[:, 0], shape[:, 1], zeros, zeros, *columns)
