"""Validation finds plans that are wrong: a valid plan is spoiled in one column at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmllm.balance.exchange.routes import plan_routes
from jaxmllm.balance.records import RoutePlan, StepPlan
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate


def corrupted(plan: StepPlan, phase: str, **changes) -> StepPlan:
    """The plan with some columns of one phase replaced."""
    return dataclasses.replace(
        plan, phases=plan.phases | {phase: dataclasses.replace(plan.phases[phase], **changes)}
    )


def test_validation_finds_what_is_wrong(make):
    """Rows first, then the rounds of a route, whose tables would deliver a token to a
    wrong slot or not at all."""
    batch = make.batch(13, 24)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)}, pool=2048)
    plan = plan_step(batch, spec)
    vision = plan.phases["vision"]
    route = plan.routes["vision"]
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
    late_first_leg = dataclasses.replace(
        round_, second_leg=round_.second_leg - 1, first_leg=round_.first_leg + 1
    )
    for spoiled in (dataclasses.replace(round_, first_leg=round_.first_leg - 1), late_first_leg):
        broken = dataclasses.replace(route, rounds=(spoiled, *route.rounds[1:]))
        fails(
            dataclasses.replace(plan, routes=plan.routes | {"vision": broken}),
            "has no hop for it|every token",
        )
    moved = dataclasses.replace(route, arrival=np.zeros_like(route.arrival))
    fails(dataclasses.replace(plan, routes=plan.routes | {"vision": moved}), "every token|one slot")


def test_validation_finds_what_is_wrong_in_shared_rows(make):
    """A scattered plan with rows of two to eight ranks, in which some items
    lie on several ranks."""
    batch = make.batch(2, 24, longest=128, text=5)
    spec = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, pool=2048)
    spec = make.with_spans(spec, (2, 4, 8))
    plans = {
        name: make.scattered(3, batch.phases[name], phase) for name, phase in spec.phases.items()
    }
    plan = StepPlan(*plan_routes(plans, batch, spec))
    vision = plan.phases["vision"]
    route = plan.routes["vision"]
    validate(plan, batch, spec)
    # Some items lie on both sides of a cut between ranks.
    assert len(route.item) > len(batch.phases["vision"].length)
    shared = vision.span[vision.microbatch] > 1

    def fails(broken: StepPlan, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            validate(broken, batch, spec)

    def rerouted(**changes) -> StepPlan:
        routes = {"vision": dataclasses.replace(route, **changes)}
        return dataclasses.replace(plan, routes=plan.routes | routes)

    fails(corrupted(plan, "vision", rank=vision.rank + shared), "first rank of a group")
    fails(corrupted(plan, "vision", span=np.ones_like(vision.span)), "of no class")
    reversed_classes = {name: getattr(vision, name)[::-1] for name in ("capacity", "span")}
    fails(corrupted(plan, "vision", **reversed_classes), "ordered by class")
    moved = vision.offset + (vision.span * vision.capacity)[vision.microbatch] * shared
    fails(corrupted(plan, "vision", offset=moved), "beyond its row")
    fails(rerouted(skipped=np.zeros_like(route.skipped)), "not its tokens in order")
    columns = ("item", "skipped", "tokens", "arrival")
    fails(rerouted(**{name: getattr(route, name)[::-1] for name in columns}), "in order")
    whole_items = RoutePlan.of_whole_items(batch.phases["vision"].tokens, vision.rank)
    fails(
        dataclasses.replace(plan, routes=plan.routes | {"vision": whole_items}),
        "read by several ranks",
    )
    language = plan.phases["language"]
    span = language.span[language.microbatch]
    fails(corrupted(plan, "language", rank=(language.rank + span) % 8), "every token|one slot")
