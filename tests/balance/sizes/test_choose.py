"""Sizes chosen from samples: legal, no worse than what a plain search finds, and clear errors for the others."""

from __future__ import annotations

import dataclasses
import time
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import Mode
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import CAPACITY_SEARCH, SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.config.schema import BalanceConfig, ConfigError, PhaseConfig
from jaxmllm.phases import decoder_phase, encoder_phase

PER_TOKEN = {"vision": 4, "audio": 8, "language": 1}
LONGEST = {"vision": 512, "audio": 512, "language": 1500}
ALIGNMENT = 64
MODES = get_args(Mode)
PHASES = encoder_phase("vision"), encoder_phase("audio"), decoder_phase(("vision", "audio"))


def needs_of(ranks: int, **configs: PhaseConfig) -> list[SizingInputs]:
    return [
        SizingInputs(
            phase,
            ranks,
            ALIGNMENT,
            PER_TOKEN[phase.name],
            LONGEST[phase.name],
            ItemCost(1000, 3),
            configs.get(phase.name, PhaseConfig()),
        )
        for phase in PHASES
    ]


def grids_of(make, ranks: int):
    return {name: make.grid((ranks, 1, 1)) for name in ("vision", "audio")}


def long_enough(batches):
    assert all(batch.phases[name].length.max(initial=0) <= LONGEST[name] for batch in batches for name in LONGEST)
    return batches


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ranks=st.sampled_from([1, 2, 4]),
    classes=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    media=st.sampled_from([0, 2]),
)
def test_chosen_sizes_plan_any_batch(make, seed, ranks, classes, mode, media):
    samples = long_enough([make.batch(seed + k, 12, media) for k in range(3)])
    config = PhaseConfig(row_classes=classes, max_capacity=2048)
    needs = needs_of(ranks, vision=config, audio=config, language=config)
    spec = choose_sizes(samples, needs, grids_of(make, ranks), BalanceConfig(mode=mode))
    for need in needs:
        phase = spec.phases[need.name]
        assert 1 <= len(phase.capacities) <= classes
        assert list(phase.capacities) == sorted(set(phase.capacities), reverse=True)
        assert all(capacity % ALIGNMENT == 0 for capacity in phase.capacities)
        assert need.longest <= phase.capacities[0] <= 2048
    assert spec == choose_sizes(samples, needs, spec_grids(spec), BalanceConfig(mode=mode))
    for batch in [*samples, make.batch(seed + 77, 12)]:  # also one that was not seen, with media
        validate(plan_step(batch, spec), batch, spec)


def spec_grids(spec):
    return {name: route.grid for name, route in spec.routes.items()}


def test_measured_times_take_the_place_of_flops_and_weigh_rows(make):
    samples = [make.batch(k, 120) for k in range(2)]
    config = PhaseConfig(max_capacity=8192)
    needs = needs_of(2, vision=config, audio=config, language=config)

    def chosen(row):
        timed = [dataclasses.replace(need, time=PhaseTime(ItemCost(1000, 3), row)) for need in needs]
        return choose_sizes(samples, timed, grids_of(make, 2), BalanceConfig())

    def microbatches(spec):
        return sum(plan_step(batch, spec).statistics["vision/microbatches"] for batch in samples)

    plain, timed = choose_sizes(samples, needs, grids_of(make, 2), BalanceConfig()), chosen(0)
    for name, phase in plain.phases.items():  # the same figures, and a row that is not told: the same sizes
        assert timed.phases[name] == dataclasses.replace(phase, model_flops=ItemCost(1000, 3))
    assert microbatches(chosen(10**9)) < microbatches(chosen(1))


def test_one_class_is_as_good_as_a_search_over_all_multiples(make):
    """Every legal capacity is tried; the chosen one may be at most 2 % worse by the stated objective."""
    samples = [make.batch(k, 24) for k in range(8)]
    config = PhaseConfig(max_capacity=2048, max_segments=1000)
    needs = needs_of(2, vision=config)
    spec = choose_sizes(samples, needs, grids_of(make, 2), BalanceConfig()).phases["vision"]

    def score(capacity: int) -> float:
        total = 0.0
        for batch in samples:
            items = batch.phases["vision"]
            rows = assign(dataclasses.replace(spec, capacities=(capacity,)), items).microbatches
            total += rows * (capacity + CAPACITY_SEARCH.microbatch_overhead * -(-items.length.sum() // 2))
        return total

    best = min(score(capacity) for capacity in range(512, 2049, ALIGNMENT))
    assert score(spec.capacities[0]) <= 1.02 * best


def test_more_classes_waste_less(make):
    samples = [make.batch(k, 64) for k in range(16)]
    fill = []
    for classes in (1, 2, 3):
        configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=classes))
        spec = choose_sizes(samples, needs_of(8, **configs), grids_of(make, 8), BalanceConfig())
        plans = [plan_step(batch, spec) for batch in samples]
        slots = sum(int(plan.phases["audio"].capacity.sum()) for plan in plans)
        fill.append(sum(batch.phases["audio"].length.sum() for batch in samples) / slots / 8)
    assert fill[0] < fill[1] <= fill[2] + 0.01
    assert fill[2] > 0.85


def test_two_samples_tell_how_far_loads_stray(make):
    """Rows chosen from two batches are nearly as full in fresh ones as rows chosen from sixteen."""
    needs, fresh = needs_of(8, vision=PhaseConfig(row_classes=3)), [make.batch(500 + k, 64) for k in range(16)]
    fill = []
    for count in (2, 16):
        samples = [make.batch(k, 64) for k in range(count)]
        spec = choose_sizes(samples, needs, grids_of(make, 8), BalanceConfig()).phases["vision"]
        slots = sum(int(assign(spec, batch.phases["vision"]).capacity.sum()) for batch in fresh)
        fill.append(sum(batch.phases["vision"].length.sum() for batch in fresh) / slots / 8)
    assert fill[0] >= fill[1] - 0.05


def test_nearly_every_step_needs_one_pool_and_one_round(make):
    samples = [make.batch(k, 64) for k in range(16)]
    spec = choose_sizes(samples, needs_of(8), grids_of(make, 8), BalanceConfig())
    fresh = [plan_step(make.batch(1000 + k, 64), spec) for k in range(16)]
    assert np.mean([len(plan.routes["vision"].rounds) for plan in fresh]) <= 1.2
    assert all(len(plan_step(batch, spec).routes["vision"].rounds) == 1 for batch in samples)


def test_time(make):
    samples = [make.batch(k, 64) for k in range(16)]
    configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=3))
    began = time.process_time()
    choose_sizes(samples, needs_of(8, **configs), grids_of(make, 8), BalanceConfig())
    assert time.process_time() - began < 15  # about 2 s on an idle core


def test_explicit_sizes_are_kept(make):
    samples = [make.batch(0, 16)]
    needs = needs_of(2, vision=PhaseConfig(capacities=(64, 1024), max_segments=9))
    spec = choose_sizes(samples, needs, grids_of(make, 2), BalanceConfig(pool_slots=5000, pair_slots=17))
    assert spec.phases["vision"].capacities == (1024, 64) and spec.phases["vision"].max_segments == 9
    assert {(r.encoder_pool, r.language_pool, r.pair_slots) for r in spec.routes.values()} == {(5000, 5000, 17)}


def test_a_model_without_encoders_has_no_routes(make):
    spec = choose_sizes([make.batch(0, 8)], needs_of(2)[2:], {}, BalanceConfig())
    assert spec.routes == {} and list(spec.phases) == ["language"]
    batch = make.batch(1, 8)
    validate(plan_step(batch, spec), batch, spec)


@pytest.mark.parametrize(
    ("config", "balance", "message"),
    [
        (PhaseConfig(capacities=(500,)), {}, r"phases\.vision\.capacities: 500 is not a multiple of 64.*use 512"),
        (PhaseConfig(capacities=(256, 64)), {}, r"phases\.vision\.capacities.*256, is too small.*512 slots"),
        (PhaseConfig(capacities=(512, 512)), {}, r"phases\.vision\.capacities.*different"),
        (PhaseConfig(max_capacity=500), {}, r"phases\.vision\.max_capacity = 500 is too small.*raise it to 512"),
        (PhaseConfig(), {"pool_slots": 10}, r"balance\.pool_slots = 10 is too small.*raise it to"),
    ],
)
def test_errors_name_the_key(make, config, balance, message):
    with pytest.raises(ConfigError, match=message):
        choose_sizes([make.batch(0, 8)], needs_of(2, vision=config), grids_of(make, 2), BalanceConfig(**balance))
