"""Whole plans: valid on random batches, the same on every host, and honest about what they waste."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.records import Mode, StepPlan
from jaxmllm.balance.step_plan import plan_step, validate

MODES = get_args(Mode)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    examples=st.integers(1, 40),
    media=st.sampled_from([0, 1, 4]),
    ranks=st.sampled_from([1, 2, 4, 8]),
    wide=st.booleans(),
    classes=st.integers(1, 3),
    max_segments=st.sampled_from([1, 4, 64]),
    mode=st.sampled_from(MODES),
    pool=st.sampled_from([0, 512]),
)
def test_plans_are_valid(make, seed, examples, media, ranks, wide, classes, max_segments, mode, pool):
    batch = make.batch(seed, examples, media)
    grid = (ranks // 2, 2, 1) if wide and ranks > 1 else (ranks, 1, 1)
    grids = {"vision": grid, "audio": (grid[0], 1, 1)}
    validate(plan := plan_step(batch, spec := make.spec(batch, grids, classes, mode, max_segments, pool)), batch, spec)
    for name, phase in spec.phases.items():
        rows = plan.statistics[f"{name}/rows"]
        assert rows == plan.statistics[f"{name}/microbatches"] * phase.ranks
        assert (f"{name}/real_token_fraction" in plan.statistics) == (rows > 0)
        if rows:
            assert 0 < plan.statistics[f"{name}/real_token_fraction"] <= 1
            assert 1 <= plan.statistics[f"{name}/max_over_mean"] <= phase.ranks
            assert plan.statistics[f"{name}/max_over_mean"] <= plan.statistics[f"{name}/synchronised"] * (1 + 1e-12)


def arrays(plan: StepPlan) -> list[np.ndarray]:
    records = [
        *plan.phases.values(),
        *plan.routes.values(),
        *(r for route in plan.routes.values() for r in route.rounds),
    ]
    return [value for record in records for value in vars(record).values() if isinstance(value, np.ndarray)]


def test_plans_repeat_exactly_and_are_integers(make):
    batch = make.batch(7, 32)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    one, other = arrays(plan_step(batch, spec)), arrays(plan_step(batch, spec))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert {a.dtype for a in one} == {np.dtype(np.int32), np.dtype(np.bool_)}


def test_statistics_against_plain_loops(make):
    batch = make.batch(11, 20)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    plan = plan_step(batch, spec)
    for name, phase in spec.phases.items():
        rows, items = plan.phases[name], batch.phases[name]
        load = np.zeros((rows.microbatches, phase.ranks))
        for item, length in enumerate(items.length):
            load[rows.microbatch[item], rows.rank[item]] += phase.linear * length + phase.quadratic * length**2
        slots = sum(int(capacity) for capacity in rows.capacity) * phase.ranks
        assert plan.statistics[f"{name}/real_token_fraction"] == pytest.approx(items.real.sum() / slots)
        assert plan.statistics[f"{name}/slots"] == slots
        assert plan.statistics[f"{name}/tokens"] == sum(int(real) for real in items.real)
        flops = sum(phase.linear * int(real) + phase.quadratic * int(real) ** 2 for real in items.real)
        assert plan.statistics[f"{name}/flops"] == pytest.approx(flops)
        assert plan.statistics[f"{name}/max_over_mean"] == pytest.approx(load.sum(0).max() / load.sum(0).mean())
        cost = phase.linear * items.length + phase.quadratic * items.length**2
        floor = max(load.sum(0).mean(), cost.max())
        assert plan.statistics[f"{name}/gap_to_floor"] == pytest.approx(load.sum(0).max() / floor)
        assert plan.statistics[f"{name}/idle_share"] == pytest.approx(1 - load.mean(1).sum() / load.max(1).sum())
        assert plan.statistics[f"{name}/synchronised"] == pytest.approx(load.max(1).sum() / load.mean(1).sum())


def test_flops_of_a_large_model_are_not_scaled(make):
    """Costs are scaled to fit integers; what MFU is computed from must not be."""
    batch = make.batch(2, 16)
    spec = make.spec(batch, {"vision": (2, 1, 1), "audio": (2, 1, 1)})
    large = dataclasses.replace(spec.phases["language"], linear=5 * 10**14, quadratic=10**11)
    statistics = plan_step(batch, dataclasses.replace(spec, phases=spec.phases | {"language": large})).statistics
    real = [int(n) for n in batch.phases["language"].real]
    assert statistics["language/flops"] == pytest.approx(sum(5 * 10**14 * n + 10**11 * n * n for n in real))


def test_balancing_beats_leaving_examples_where_they_are(make):
    waste = {}
    for mode in ("none", "phases"):
        totals = np.zeros(3)
        for seed in range(5):
            batch = make.batch(seed, 64)
            spec = make.spec(batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2, mode=mode, pool=4096)
            statistics = plan_step(batch, spec).statistics
            totals += [statistics[f"{phase}/synchronised"] for phase in ("vision", "audio", "language")]
        waste[mode] = totals / 5
    assert (waste["phases"] < 0.75 * waste["none"]).all()


def test_example_ranks_of_every_mode(make):
    """Contiguous blocks; like totals of tokens; the ranks of the balanced language phase."""
    batch = make.batch(5, 64)
    grids = {"vision": (4, 2, 1), "audio": (4, 1, 1)}
    plans = {mode: plan_step(batch, make.spec(batch, grids, 2, mode, pool=4096)).phases for mode in MODES}
    example = batch.phases["language"].example
    ranks = {mode: np.zeros(64, int) for mode in MODES}
    for mode in MODES:
        ranks[mode][example] = plans[mode]["language"].rank
    assert ranks["none"].tolist() == np.repeat(range(4), 16).tolist()
    assert np.array_equal(ranks["language"], ranks["phases"])
    tokens = np.zeros(64)
    for name, items in batch.phases.items():
        np.add.at(tokens, items.example, items.length if name == "language" else items.tokens)
    totals = np.bincount(ranks["tokens"], weights=tokens)
    assert totals.max() <= 1.01 * totals.mean()
    grid = make.spec(batch, grids).routes["vision"].grid
    for mode in ("none", "tokens", "language"):  # media run on the devices of their example
        home = ranks[mode][batch.phases["vision"].example]
        block = [int(np.flatnonzero((grid.language == rank).any(axis=1))[0]) for rank in home]
        on = plans[mode]["vision"].rank
        assert all(rank in grid.encoder[number] for rank, number in zip(on, block, strict=True))


def test_gap_and_idle_share_of_a_giant(make):
    """One item dwarfs the rest: the floor is that item, and three of four ranks idle beside it."""
    batch = make.batch(3, 12, media=0)
    length = batch.phases["language"].length.copy()
    length[4] = 100_000
    language = dataclasses.replace(batch.phases["language"], length=length, real=length)
    batch = dataclasses.replace(batch, phases=batch.phases | {"language": language})
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)})
    statistics = plan_step(batch, spec).statistics
    assert statistics["language/gap_to_floor"] == pytest.approx(1)
    assert statistics["language/idle_share"] > 0.7
    assert "vision/gap_to_floor" not in statistics


def corrupted(plan: StepPlan, phase: str, **changes) -> StepPlan:
    return dataclasses.replace(plan, phases=plan.phases | {phase: dataclasses.replace(plan.phases[phase], **changes)})


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
    fails(corrupted(plan, "vision", microbatch=vision.microbatch[:-1]), "one entry an item")
    round_ = route.rounds[0]
    for name in ("start", "arrival", "ordinal"):
        spoiled = (getattr(round_, name) + np.arange(len(round_.tokens)) % 2).astype(np.int32)
        broken = dataclasses.replace(route, rounds=(dataclasses.replace(round_, **{name: spoiled}), *route.rounds[1:]))
        fails(dataclasses.replace(plan, routes=plan.routes | {"vision": broken}), "every (token|gradient)|beyond its")
    late = dataclasses.replace(round_, second_leg=round_.second_leg - 1, first_leg=round_.first_leg + 1)
    for spoiled in (dataclasses.replace(round_, first_leg=round_.first_leg - 1), late):
        broken = dataclasses.replace(route, rounds=(spoiled, *route.rounds[1:]))
        fails(dataclasses.replace(plan, routes=plan.routes | {"vision": broken}), "has no hop for it|every token")
    moved = dataclasses.replace(route, arrival=np.zeros_like(route.arrival))
    fails(dataclasses.replace(plan, routes=plan.routes | {"vision": moved}), "every token|one slot")


def test_digests_tell_plans_apart(make):
    batch = make.batch(3, 24)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, 1, "phases", 64, 0)
    plan = plan_step(batch, spec)
    examples = np.arange(24)

    def digest(plan):
        return plan.digest(examples)

    assert digest(plan) == digest(plan_step(batch, spec))
    assert digest(plan) != plan.digest(examples[::-1]), "other examples of the same lengths"
    moved = plan.phases["vision"].rank.copy()
    moved[0] = (moved[0] + 1) % 4
    other = plan.phases | {"vision": dataclasses.replace(plan.phases["vision"], rank=moved)}
    assert digest(plan) != digest(dataclasses.replace(plan, phases=other))
    route = plan.routes["vision"]
    assert len(route.rounds)
    for changed in (
        route.rounds[:-1],
        (dataclasses.replace(route.rounds[0], first_leg=route.rounds[0].first_leg + 1), *route.rounds[1:]),
        (dataclasses.replace(route.rounds[0], ordinal=route.rounds[0].ordinal + 1), *route.rounds[1:]),
    ):
        other = plan.routes | {"vision": dataclasses.replace(route, rounds=changed)}
        assert digest(plan) != digest(dataclasses.replace(plan, routes=other))
