"""Validation finds plans that are wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmllm.balance.records import StepPlan
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate


def corrupted(plan: StepPlan, phase: str, **changes) -> StepPlan:
    return dataclasses.replace(
        plan, phases=plan.phases | {phase: dataclasses.replace(plan.phases[phase], **changes)}
    )


def test_validation_finds_what_is_wrong(make):
    batch = make.batch(13, 24)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)}, pool=2048)
    plan = plan_step(batch, spec)
    vision, route = plan.phases["vision"], plan.routes["vision"]
    validate(plan, batch, spec)

    def fails(broken: StepPlan, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            validate(broken, batch, spec)

    fails(corrupted(plan, "vision", rank=vision.rank + 1), "rank number")
    fails(corrupted(plan, "vision", rank=1 - vision.rank), "every token")
    fails(corrupted(plan, "vision", segment=vision.segment + 1), "segments")
    fails(corrupted(plan, "vision", offset=np.zeros_like(vision.offset)), "overlap")
    fails(corrupted(plan, "vision", offset=vision.offset + 400), "beyond its row")
    fails(corrupted(plan, "vision", microbatch=vision.microbatch[:-1]), "one entry per item")
    round_ = route.rounds[0]
    for name in ("start", "arrival", "ordinal"):
        spoiled = (getattr(round_, name) + np.arange(len(round_.tokens)) % 2).astype(np.int32)
        broken = dataclasses.replace(
            route, rounds=(dataclasses.replace(round_, **{name: spoiled}), *route.rounds[1:])
        )
        fails(
            dataclasses.replace(plan, routes=plan.routes | {"vision": broken}),
            "every (token|gradient)|beyond its",
        )
    late = dataclasses.replace(
        round_, second_leg=round_.second_leg - 1, first_leg=round_.first_leg + 1
    )
    for spoiled in (dataclasses.replace(round_, first_leg=round_.first_leg - 1), late):
        broken = dataclasses.replace(route, rounds=(spoiled, *route.rounds[1:]))
        fails(
            dataclasses.replace(plan, routes=plan.routes | {"vision": broken}),
            "has no hop for it|every token",
        )
    moved = dataclasses.replace(route, arrival=np.zeros_like(route.arrival))
    fails(dataclasses.replace(plan, routes=plan.routes | {"vision": moved}), "every token|one slot")
