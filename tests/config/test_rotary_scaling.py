"""Scaled rotary frequencies, pair by pair, against the formulas of the papers."""

import math

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError, RotaryScaling
from tests.support import tiny_config

PAIRS = 16
THETA = 10_000.0
FREQUENCIES = THETA ** (-np.arange(PAIRS) / PAIRS)


def test_linear_slows_all_pairs():
    scaled = RotaryScaling(kind="linear", factor=4.0).scaled(FREQUENCIES, THETA)
    np.testing.assert_allclose(scaled, FREQUENCIES / 4, rtol=1e-15)


def test_llama3_slows_long_waves_alone():
    scaling = RotaryScaling(
        kind="llama3",
        factor=8.0,
        original_max_position_embeddings=512,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected = []
    for frequency in FREQUENCIES:
        wavelength = 2 * math.pi / frequency
        if wavelength > 512 / 1.0:
            expected.append(frequency / 8)
        elif wavelength < 512 / 4.0:
            expected.append(frequency)
        else:
            smooth = (512 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({*np.round(expected / FREQUENCIES, 6)}) > 2, "all three cases occur"
    np.testing.assert_allclose(scaling.scaled(FREQUENCIES, THETA), expected, rtol=1e-13)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_slows_along_a_ramp(truncate):
    scaling = RotaryScaling(
        kind="yarn", factor=4.0, original_max_position_embeddings=4096, truncate=truncate
    )
    # The ramp goes from the pair that turns 32 times in the original length
    # to the one that turns once
    ends = [
        2 * PAIRS * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(THETA))
        for turns in (32, 1)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    expected = []
    for pair, frequency in enumerate(FREQUENCIES):
        ramp = min(max((pair - low) / (high - low), 0), 1)
        expected.append(frequency / 4 * ramp + frequency * (1 - ramp))
    np.testing.assert_allclose(scaling.scaled(FREQUENCIES, THETA), expected, rtol=1e-13)
    assert scaling.multiplier == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "llama3", "factor": 8.0}, "needs original_max_position_embeddings, low_freq"),
        ({"kind": "linear", "factor": 8.0, "beta_fast": 3.0}, "has no beta_fast"),
        ({"kind": "longrope", "factor": 8.0}, "'linear', 'llama3' or 'yarn'"),
        (
            {
                "kind": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 1.0,
                "beta_slow": 2.0,
            },
            r"beta_slow \(2\) must be less than beta_fast \(1\)",
        ),
    ],
)
def test_a_scaling_that_is_none_is_refused(tmp_path, values, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(tiny_config(tmp_path, model__language__rope_scaling=values))
