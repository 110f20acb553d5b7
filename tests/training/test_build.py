"""What the run's parts are built from."""

import pytest

from jaxmllm.balance.plan import PhaseSpec
from jaxmllm.config import parse_config
from jaxmllm.data.corpus import modalities
from jaxmllm.training.build import attention_block
from tests.support import tiny_config


@pytest.mark.parametrize(
    "phase, block, capacities, long_capacity, parts, expected",
    [
        ("language", 128, [4096], 0, 1, 128),  # nothing is shared out
        ("language", 128, [4096], 0, 4, 128),  # eight blocks each
        ("language", 128, [4096, 2048], 0, 4, 64),  # four of the smaller row
        ("language", 128, [1024], 2048, 1, 64),  # the four ranks share long rows
        ("language", 128, [1024], 16384, 1, 128),
        ("language", 256, [4096], 0, 8, 64),
        ("language", 32, [256], 0, 4, 32),
        ("language", 96, [768], 0, 4, 96),  # 64 does not divide it
        ("audio", 128, [4 * 2048], 0, 4, 64),  # frames, four to a slot of attention
        ("audio", 128, [4 * 4096], 0, 4, 128),
    ],
)
def test_shared_rows_get_smaller_blocks_where_these_are_few(
    tmp_path, phase, block, capacities, long_capacity, parts, expected
):
    config = parse_config(tiny_config(tmp_path, **{f"phases__{phase}__block": block}))
    rows = PhaseSpec(phase, 4, tuple(capacities), 8, 1, 1, 1, long_capacity=long_capacity)
    assert attention_block(config, rows, modalities(config.model, config.data), parts) == expected
