"""Whole plans: valid on random batches, the same on every host, and honest
about what they waste."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.exchange.tables import route_tables
from jaxmllm.balance.records import (
    BatchItems,
    Mode,
    PhaseItems,
    PhaseSpec,
    PlanSpec,
    StepPlan,
    row_classes,
)
from jaxmllm.balance.step_plan import place_items, plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.phases import decoder_phase, generator_phase

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
def test_plans_are_valid(
    make, seed, examples, media, ranks, wide, classes, max_segments, mode, pool
):
    """In every mode, and statistics that lie within their bounds."""
    batch = make.batch(seed, examples, media)
    grid = (ranks // 2, 2, 1) if wide and ranks > 1 else (ranks, 1, 1)
    grids = {"vision": grid, "audio": (grid[0], 1, 1)}
    validate(
        plan := plan_step(
            batch, spec := make.spec(batch, grids, classes, mode, max_segments, pool)
        ),
        batch,
        spec,
    )
    for name, phase in spec.phases.items():
        rows = plan.statistics[f"{name}/rows"]
        assert rows == plan.statistics[f"{name}/microbatches"] * phase.ranks
        assert (f"{name}/real_token_fraction" in plan.statistics) == (rows > 0)
        if rows:
            assert 0 < plan.statistics[f"{name}/real_token_fraction"] <= 1
            assert 1 <= plan.statistics[f"{name}/max_over_mean"] <= phase.ranks
            assert plan.statistics[f"{name}/max_over_mean"] <= plan.statistics[
                f"{name}/synchronised"
            ] * (1 + 1e-12)


def arrays(plan: StepPlan) -> list[np.ndarray]:
    """All arrays of a plan's records."""
    records = [
        *plan.phases.values(),
        *plan.routes.values(),
        *(r for route in plan.routes.values() for r in route.rounds),
    ]
    return [
        value
        for record in records
        for value in vars(record).values()
        if isinstance(value, np.ndarray)
    ]


def test_plans_repeat_exactly_and_are_integers(make):
    """Every host plans by itself, so plans must not depend on floating-point rounding."""
    batch = make.batch(7, 32)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, classes=2)
    planned = arrays(plan_step(batch, spec))
    replanned = arrays(plan_step(batch, spec))
    assert all(np.array_equal(a, b) for a, b in zip(planned, replanned, strict=True))
    assert {a.dtype for a in planned} == {np.dtype(np.int32), np.dtype(np.bool_)}


def test_balancing_beats_leaving_examples_where_they_are(make):
    """`synchronised` is the cost that all ranks wait for over the mean cost; the mean of five
    batches must fall by a quarter in every phase."""
    waste = {}
    for mode in ("none", "phases"):
        totals = np.zeros(3)
        for seed in range(5):
            batch = make.batch(seed, 64)
            spec = make.spec(
                batch, {"vision": (8, 1, 1), "audio": (8, 1, 1)}, classes=2, mode=mode, pool=4096
            )
            statistics = plan_step(batch, spec).statistics
            totals += [
                statistics[f"{phase}/synchronised"] for phase in ("vision", "audio", "language")
            ]
        waste[mode] = totals / 5
    assert (waste["phases"] < 0.75 * waste["none"]).all()


def test_example_ranks_of_every_mode(make):
    """`none` leaves contiguous blocks; `tokens` levels totals of tokens; `language` and `phases`
    take the ranks of the balanced language phase."""
    batch = make.batch(5, 64)
    grids = {"vision": (4, 2, 1), "audio": (4, 1, 1)}
    plans = {
        mode: plan_step(batch, make.spec(batch, grids, 2, mode, pool=4096)).phases for mode in MODES
    }
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
        language_rank = ranks[mode][batch.phases["vision"].example]
        block = [
            int(np.flatnonzero((grid.language == rank).any(axis=1))[0]) for rank in language_rank
        ]
        vision_ranks = plans[mode]["vision"].rank
        assert all(
            rank in grid.encoder[block_number]
            for rank, block_number in zip(vision_ranks, block, strict=True)
        )


def test_tokens_count_what_is_drawn():
    """Large and small pictures in turn, drawn from equal texts: each rank draws
    half of the large ones."""
    slots = np.array([4096, 64] * 4)
    numbers = np.arange(8, dtype=np.int32)
    text = PhaseItems(np.full(8, 60), np.full(8, 60), numbers, 0 * numbers, 0 * numbers)
    drawn = PhaseItems(slots, slots, numbers, 0 * numbers + 50, 0 * numbers + 5)
    phases = {
        "language": (decoder_phase(), text),
        "diffusion": (generator_phase("diffusion"), drawn),
    }
    specs = {
        name: PhaseSpec(phase, 2, row_classes((8320,)), 64, 1, ItemCost(1, 1))
        for name, (phase, _) in phases.items()
    }
    items = BatchItems(
        numbers.astype(np.int64),
        1,
        {name: phase_items for name, (_, phase_items) in phases.items()},
    )
    rank = place_items(items, specs, {}, "tokens")["diffusion"].rank
    assert np.bincount(rank, weights=slots).tolist() == [8320, 8320]


def test_digests_tell_plans_apart(make):
    """Hosts compare digests to be sure that they have the same plan, so each
    part of it must count."""
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
    changed_records = plan.phases | {
        "vision": dataclasses.replace(plan.phases["vision"], rank=moved)
    }
    assert digest(plan) != digest(dataclasses.replace(plan, phases=changed_records))
    route = plan.routes["vision"]
    assert len(route.rounds)
    for changed in (
        route.rounds[:-1],
        (
            dataclasses.replace(route.rounds[0], first_leg=route.rounds[0].first_leg + 1),
            *route.rounds[1:],
        ),
        (
            dataclasses.replace(route.rounds[0], ordinal=route.rounds[0].ordinal + 1),
            *route.rounds[1:],
        ),
    ):
        changed_records = plan.routes | {"vision": dataclasses.replace(route, rounds=changed)}
        assert digest(plan) != digest(dataclasses.replace(plan, routes=changed_records))


KEPT = {  # digests of plans and tables without a generator
    ("phases", "padded"): "ed4cad9e3e53be64",
    ("phases", "ragged"): "e1829f1f95aa3eef",
    ("none", "padded"): "5dee97894f3d3973",
}


@pytest.mark.parametrize("mode, backend", KEPT)
def test_plans_and_tables_without_a_generator_keep_their_digests(make, mode, backend):
    """A run that began with an earlier version goes on with the same plans.

    Whoever changes on purpose how plans are made stores the digests that the failure prints.
    """
    batch = make.batch(11, 48)
    grids = {"vision": (4, 2, 1), "audio": (4, 1, 1)}
    spec = make.spec(batch, grids, classes=2, mode=mode, pool=256, pair=8, backend=backend)
    plan = plan_step(batch, spec)
    assert sum(len(route.rounds) for route in plan.routes.values()) >= 2
    assert _digest([*arrays(plan), *tables(plan, spec)]) == KEPT[mode, backend]


def tables(plan: StepPlan, spec: PlanSpec) -> list[np.ndarray]:
    """Index tables of all rounds, for all ranks."""
    all_tables = [
        route_tables(round_, spec.routes[phase], range(spec.routes[phase].grid.ranks))
        for phase, route in plan.routes.items()
        for round_ in route.rounds
    ]
    return [
        np.asarray(leaf)
        for of_one_round in all_tables
        for hops in (of_one_round.send_forward, of_one_round.send_backward)
        for hop in hops
        for leaf in (hop.index, *(() if hop.sizes is None else (hop.sizes,)))
    ] + [
        leaf
        for of_one_round in all_tables
        for leaf in (of_one_round.gather_forward, of_one_round.gather_backward)
    ]


def _digest(values: list[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(f"{value.shape};".encode())
        digest.update(value.astype("<i4").tobytes())
    return digest.hexdigest()
