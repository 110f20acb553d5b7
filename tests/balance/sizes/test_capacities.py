"""Row capacities: no worse than what a plain search finds, and clear errors for wrong ones."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import row_classes
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import CAPACITY_SEARCH, SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.schema import BalanceConfig, ConfigError, PhaseConfig
from jaxmllm.phases import decoder_phase
from jaxmllm.tools.workload import generate
from tests.balance.sizes.sample_inputs import ALIGNMENT, PER_TOKEN, grids_of, inputs_of


def test_measured_times_take_the_place_of_flops_and_weigh_rows(make):
    samples = [make.batch(k, 120) for k in range(2)]
    config = PhaseConfig(max_capacity=8192)
    inputs = inputs_of(2, vision=config, audio=config, language=config)

    def chosen(row):
        timed = [
            dataclasses.replace(of_phase, time=PhaseTime(ItemCost(1000, 3), row))
            for of_phase in inputs
        ]
        return choose_sizes(samples, timed, grids_of(make, 2), BalanceConfig())

    def microbatches(spec):
        return sum(plan_step(batch, spec).statistics["vision/microbatches"] for batch in samples)

    plain, timed = choose_sizes(samples, inputs, grids_of(make, 2), BalanceConfig()), chosen(0)
    for (
        name,
        phase,
    ) in plain.phases.items():  # the same figures, and a row that is not told: the same sizes
        assert timed.phases[name] == dataclasses.replace(phase, model_flops=ItemCost(1000, 3))
    assert microbatches(chosen(10**9)) < microbatches(chosen(1))


def test_one_class_is_as_good_as_a_search_over_all_multiples(make):
    """Every legal capacity is tried; the chosen one may be at most 2 % worse by the stated objective."""
    samples = [make.batch(k, 24) for k in range(8)]
    config = PhaseConfig(max_capacity=2048, max_segments=1000)
    inputs = inputs_of(2, vision=config)
    spec = choose_sizes(samples, inputs, grids_of(make, 2), BalanceConfig()).phases["vision"]

    def score(capacity: int) -> float:
        total = 0.0
        for batch in samples:
            items = batch.phases["vision"]
            rows = assign(
                dataclasses.replace(spec, classes=row_classes((capacity,))), items
            ).microbatches
            total += rows * (
                capacity + CAPACITY_SEARCH.microbatch_overhead * -(-items.length.sum() // 2)
            )
        return total

    best = min(score(capacity) for capacity in range(512, 2049, ALIGNMENT))
    assert score(spec.capacities[0]) <= 1.02 * best


def test_more_classes_waste_less(make):
    samples = [make.batch(k, 64) for k in range(16)]
    fill = []
    for classes in (1, 2, 3):
        configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=classes))
        spec = choose_sizes(samples, inputs_of(8, **configs), grids_of(make, 8), BalanceConfig())
        plans = [plan_step(batch, spec) for batch in samples]
        slots = sum(int(plan.phases["audio"].capacity.sum()) for plan in plans)
        fill.append(sum(batch.phases["audio"].length.sum() for batch in samples) / slots / 8)
    assert fill[0] < fill[1] <= fill[2] + 0.01
    assert fill[2] > 0.85


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            PhaseConfig(capacities=(500,)),
            r"phases\.vision\.capacities: 500 is not a multiple of 64.*use 512",
        ),
        (
            PhaseConfig(capacities=(256, 64)),
            r"phases\.vision\.capacities.*256, is too small.*512 slots",
        ),
        (PhaseConfig(capacities=(512, 512)), r"phases\.vision\.capacities.*different"),
        (
            PhaseConfig(max_capacity=500),
            r"phases\.vision\.max_capacity = 500 is too small.*raise it to 512",
        ),
    ],
)
def test_errors_name_the_key(make, config, message):
    with pytest.raises(ConfigError, match=message):
        choose_sizes(
            [make.batch(0, 8)], inputs_of(2, vision=config), grids_of(make, 2), BalanceConfig()
        )


def long_inputs(config, longest=40_000):
    return SizingInputs(decoder_phase(), 4, 128, 1, longest, ItemCost(1000, 1), config)


def test_ordinary_rows_are_chosen_from_ordinary_items():
    samples = [generate([0, n], 64) for n in range(2)]
    long = samples[0].phases["language"]
    length = long.length.copy()
    length[3] = 40_000
    with_one = dataclasses.replace(long, length=length, real=length)
    spiked = [
        dataclasses.replace(samples[0], phases=samples[0].phases | {"language": with_one}),
        samples[1],
    ]
    config = PhaseConfig(max_capacity=8192, long_capacity=65_536)
    language = choose_sizes(spiked, [long_inputs(config)], {}, BalanceConfig()).phases["language"]
    assert language.long_capacity == 65_536 and language.capacities[0] <= 8192


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (65_664, r"phases\.language\.long_capacity: 65664 is not a multiple of 512 .*use 66048"),
        (
            32_768,
            r"long_capacity: 32768 is too small for the longest item of 40000 slots: raise it to 40448",
        ),
    ],
)
def test_long_rows_that_cannot_be_are_refused(capacity, message):
    config = PhaseConfig(max_capacity=8192, long_capacity=capacity)
    with pytest.raises(ConfigError, match=message):
        choose_sizes([generate(0, 64)], [long_inputs(config)], {}, BalanceConfig())
