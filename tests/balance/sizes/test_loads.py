"""Few samples, from which further batches are drawn, stand for many."""

from __future__ import annotations

from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.loads import to_plan
from jaxmllm.config.schema import BalanceConfig, PhaseConfig
from tests.balance.sizes.sample_inputs import grids_of, inputs_of


def test_two_samples_tell_how_far_loads_stray(make):
    """Rows chosen from two batches are nearly as full in fresh ones as rows chosen from sixteen."""
    inputs = inputs_of(8, vision=PhaseConfig(row_classes=3))
    fresh = [make.batch(500 + k, 64) for k in range(16)]
    fill = []
    for sample_count in (2, 16):
        samples = [make.batch(k, 64) for k in range(sample_count)]
        spec = choose_sizes(samples, inputs, grids_of(make, 8), BalanceConfig()).phases["vision"]
        slots = sum(int(assign(spec, batch.phases["vision"]).capacity.sum()) for batch in fresh)
        fill.append(sum(batch.phases["vision"].length.sum() for batch in fresh) / slots / 8)
    assert fill[0] >= fill[1] - 0.05


def test_plans_are_made_of_some_samples(make):
    """Lengths are cheap, so all batches tell of loads; plans are expensive, so fewer are made the
    more items a batch has."""
    assert [len(to_plan([make.batch(0, size)] * 128)) for size in (1, 64, 128, 300)] == [
        32,
        32,
        16,
        8,
    ]
    assert to_plan([]) == []
