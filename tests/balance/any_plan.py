"""Legal plans that no planner makes: whatever stands on a plan must hold for them, too."""

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
    """A plan whose items are `scattered`; `alignment` by phase."""
    plans = {
        name: scattered(seed, items.phases[name], phase, alignment[name])
        for name, phase in spec.phases.items()
    }
    return StepPlan(*plan_routes(plans, items, spec))


def scattered(
    seed: int, items: PhaseItems, spec: PhaseSpec, alignment: int | None = None
) -> PhasePlan:
    """Items in random order, in random rows of random classes with random gaps, multiples of `alignment` slots (none:
    of a token). Many groups of a microbatch stay empty."""
    alignment = alignment or spec.slots_per_token
    random = np.random.default_rng(seed)
    rows: list[dict[int, tuple[int, int]]] = []  # of each microbatch: by first rank (slots, items)
    classes: list[RowClass] = []
    place = np.zeros((len(items.length), 4), np.int64)  # microbatch, rank, offset, segment
    for item in random.permutation(len(items.length)).tolist():
        length = int(items.length[item])
        gap = int(random.integers(0, 3)) * alignment

        holding = [row_class for row_class in spec.classes if row_class.slots >= length]
        wanted = holding[random.integers(len(holding))]

        def fits(m: int, first: int, needed: int = gap + length) -> bool:
            used, count = rows[m].get(first, (0, 0))
            return used + needed <= classes[m].slots and count < spec.max_segments

        chosen = [
            (m, first)
            for m, row_class in enumerate(classes)
            for first in range(0, spec.ranks, row_class.span)
            if row_class == wanted and fits(m, first)
        ]
        if not chosen or random.random() < 0.15:
            classes.append(wanted)
            rows.append({})
            group = int(random.integers(spec.ranks // wanted.span))
            chosen = [(len(rows) - 1, group * wanted.span)]
            gap = min(gap, wanted.slots - length)
        m, first = chosen[random.integers(len(chosen))]
        used, count = rows[m].get(first, (0, 0))
        place[item] = m, first, used + gap, count + 1
        rows[m][first] = (used + gap + length, count + 1)
    order = sorted(range(len(classes)), key=lambda m: spec.classes.index(classes[m]))
    number = np.argsort(np.array(order, np.int64))
    place[:, 0] = number[place[:, 0]] if len(order) else 0
    shape = np.array([classes[m] for m in order], np.int32).reshape(-1, 2)
    zeros = np.zeros(len(order), np.int32)
    columns = place.astype(np.int32).T
    return PhasePlan(shape[:, 0], shape[:, 1], zeros, zeros, *columns)
