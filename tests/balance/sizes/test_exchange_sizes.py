"""Pools and pair slots chosen from samples: large enough for nearly every step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.schema import BalanceConfig, ConfigError
from jaxmllm.tools.workload import generate, make_spec
from tests.balance.sizes.sample_inputs import grids_of, inputs_of


def test_nearly_every_step_needs_one_pool_and_one_round(make):
    """Every sampled batch, and nearly every fresh one."""
    samples = [make.batch(k, 64) for k in range(16)]
    spec = choose_sizes(samples, inputs_of(8), grids_of(make, 8), BalanceConfig())
    fresh = [plan_step(make.batch(1000 + k, 64), spec) for k in range(16)]
    assert np.mean([len(plan.routes["vision"].rounds) for plan in fresh]) <= 1.2
    assert all(len(plan_step(batch, spec).routes["vision"].rounds) == 1 for batch in samples)


@pytest.mark.slow
def test_batches_of_another_source_do_not_collapse():
    """Samples without pictures, then batches of pictures alone: if sizing also sees one batch of
    each source, the exchange takes far fewer hops."""
    ranks = 8
    usual_mix = {"speech_recognition": 1.0}
    sources = [{"captioning": 1.0}, {"multi_image": 1.0}]

    def batches(stream: int, mix: dict[str, float], count: int) -> list:
        return [generate([stream, index], 4 * ranks, mix) for index in range(count)]

    def hops_and_rounds(spec, mix) -> tuple[float, int]:
        routes = [plan_step(batch, spec).routes["vision"].rounds for batch in batches(9, mix, 3)]
        hops = [sum(round_.hops for round_ in rounds) for rounds in routes]
        return float(np.mean(hops)), max(map(len, routes))

    samples = batches(1, usual_mix, 8)
    source_batches = [
        batches(2 + stream_offset, mix, 1)[0] for stream_offset, mix in enumerate(sources)
    ]
    blind_spec = make_spec(ranks, samples)
    spec = make_spec(ranks, samples, others=source_batches)
    assert spec.phases["language"].classes == blind_spec.phases["language"].classes
    assert hops_and_rounds(spec, usual_mix)[1] == 1
    for mix in sources:
        hops, rounds = hops_and_rounds(spec, mix)
        blind_hops, blind_rounds = hops_and_rounds(blind_spec, mix)
        assert rounds <= 2 < blind_rounds
        assert hops < 0.3 * blind_hops


def test_a_pool_that_holds_no_row_is_refused(make):
    with pytest.raises(ConfigError, match=r"balance\.pool_slots = 10 is too small.*raise it to"):
        choose_sizes(
            [make.batch(0, 8)], inputs_of(2), grids_of(make, 2), BalanceConfig(pool_slots=10)
        )
