"""Pools and pair slots: enough for nearly every step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.schema import BalanceConfig, ConfigError
from tests.balance.sizes.sample_inputs import grids_of, inputs_of


def test_nearly_every_step_needs_one_pool_and_one_round(make):
    samples = [make.batch(k, 64) for k in range(16)]
    spec = choose_sizes(samples, inputs_of(8), grids_of(make, 8), BalanceConfig())
    fresh = [plan_step(make.batch(1000 + k, 64), spec) for k in range(16)]
    assert np.mean([len(plan.routes["vision"].rounds) for plan in fresh]) <= 1.2
    assert all(len(plan_step(batch, spec).routes["vision"].rounds) == 1 for batch in samples)


def test_a_pool_that_holds_no_row_is_refused(make):
    with pytest.raises(ConfigError, match=r"balance\.pool_slots = 10 is too small.*raise it to"):
        choose_sizes(
            [make.batch(0, 8)], inputs_of(2), grids_of(make, 2), BalanceConfig(pool_slots=10)
        )
