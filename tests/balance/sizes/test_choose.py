"""Sizes chosen from samples can plan any batch, and sizes that the config gives are kept."""

from __future__ import annotations

import time
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.records import Mode
from jaxmllm.balance.sizes.choose import PhaseRows, choose_sizes
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.config.schema import BalanceConfig, PhaseConfig
from tests.balance.sizes.sample_inputs import ALIGNMENT, LONGEST, PER_TOKEN, grids_of, inputs_of

MODES = get_args(Mode)


def long_enough(batches):
    """The batches, after a check that no item exceeds the longest length of the sizing inputs."""
    assert all(
        batch.phases[name].length.max(initial=0) <= LONGEST[name]
        for batch in batches
        for name in LONGEST
    )
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
    inputs = inputs_of(ranks, vision=config, audio=config, language=config)
    spec = choose_sizes(samples, inputs, grids_of(make, ranks), BalanceConfig(mode=mode))
    for phase_inputs in inputs:
        phase = spec.phases[phase_inputs.name]
        assert 1 <= len(phase.capacities) <= classes
        assert list(phase.capacities) == sorted(set(phase.capacities), reverse=True)
        assert all(capacity % ALIGNMENT == 0 for capacity in phase.capacities)
        assert phase_inputs.longest <= phase.capacities[0] <= 2048
    assert spec == choose_sizes(samples, inputs, spec_grids(spec), BalanceConfig(mode=mode))
    for batch in [*samples, make.batch(seed + 77, 12)]:  # the last was not sampled, and has media
        validate(plan_step(batch, spec), batch, spec)


def test_remembered_rows_are_those_chosen_anew(make):
    """One `PhaseRows` over several numbers of ranks chooses what a fresh search chooses."""
    samples = long_enough([make.batch(k, 4) for k in range(2)])
    remembered = PhaseRows(samples)
    configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=1, max_capacity=2048))
    for ranks in (1, 2):
        args = (inputs_of(ranks, **configs), grids_of(make, ranks), BalanceConfig())
        chosen = choose_sizes(samples, *args)
        assert choose_sizes(samples, *args, rows=remembered) == chosen
        assert remembered.chosen(*args) == chosen.phases
        classes = {name: phase.classes for name, phase in chosen.phases.items()}
        unlimited = remembered.chosen(*args, segments=False)
        assert {name: phase.classes for name, phase in unlimited.items()} == classes


def spec_grids(spec):
    return {name: route.grid for name, route in spec.routes.items()}


def test_time(make):
    """Choosing sizes happens at the start of every run, so a search that explodes
    would be noticed here."""
    samples = [make.batch(k, 64) for k in range(16)]
    configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=3))
    began = time.process_time()
    choose_sizes(samples, inputs_of(8, **configs), grids_of(make, 8), BalanceConfig())
    assert time.process_time() - began < 15  # about 2 s on an idle core


def test_explicit_sizes_are_kept(make):
    """Capacities are sorted, largest first; all else is as the config says."""
    samples = [make.batch(0, 16)]
    inputs = inputs_of(2, vision=PhaseConfig(capacities=(64, 1024), max_segments=9))
    spec = choose_sizes(
        samples, inputs, grids_of(make, 2), BalanceConfig(pool_slots=5000, pair_slots=17)
    )
    assert (
        spec.phases["vision"].capacities == (1024, 64) and spec.phases["vision"].max_segments == 9
    )
    assert {(r.encoder_pool, r.language_pool, r.pair_slots) for r in spec.routes.values()} == {
        (5000, 5000, 17)
    }


def test_a_model_without_encoders_has_no_routes(make):
    spec = choose_sizes([make.batch(0, 8)], inputs_of(2)[2:], {}, BalanceConfig())
    assert spec.routes == {} and list(spec.phases) == ["language"]
    batch = make.batch(1, 8)
    validate(plan_step(batch, spec), batch, spec)
