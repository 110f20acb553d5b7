"""Rows hold whole blocks, whole tokens and, in parts, whole chunks."""

import pytest

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseSpec, row_classes
from jaxmllm.balance.sizes.inputs import Alignment
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.phases import make_phases
from jaxmllm.setup.row_shapes import alignment, attention_block
from tests.support import tiny_config


@pytest.mark.parametrize(
    "phase, block, capacities, span, parts, expected",
    [
        ("language", 128, [4096], 1, 1, 128),  # nothing is shared out
        ("language", 128, [4096], 1, 4, 128),  # eight blocks each
        ("language", 128, [4096, 2048], 1, 4, 64),  # four of the smaller row
        ("language", 128, [512], 4, 1, 64),  # four ranks share rows
        ("language", 128, [4096], 4, 1, 128),
        ("language", 128, [1024], 2, 4, 64),
        ("language", 256, [4096], 1, 8, 64),
        ("language", 32, [256], 1, 4, 32),
        ("language", 96, [768], 1, 4, 96),  # 64 does not divide it
        ("audio", 128, [4 * 2048], 1, 4, 64),  # frames, four to a slot of attention
        ("audio", 128, [4 * 4096], 1, 4, 128),
    ],
)
def test_shared_rows_get_smaller_blocks_where_these_are_few(
    tmp_path, phase, block, capacities, span, parts, expected
):
    config = parse_config(tiny_config(tmp_path, **{f"phases__{phase}__block": block}))
    rows = PhaseSpec(
        make_phases(config.model)[phase],
        4,
        row_classes(capacities, span),
        8,
        1,
        ItemCost(1, 1),
    )
    formats = row_formats(modalities(config.model, config.data))
    assert attention_block(config, rows, formats, parts) == expected


@pytest.mark.parametrize("block, expected", [(128, 64), (256, 64), (32, 32), (96, 96)])
def test_towers_with_windows_get_blocks_that_hold_few_of_them(tmp_path, block, expected):
    windows = {"model__vision__layers": 2, "model__vision__window": 8}
    config = parse_config(tiny_config(tmp_path, phases__vision__block=block, **windows))
    vision = make_phases(config.model)["vision"]
    rows = PhaseSpec(vision, 4, row_classes([768 * 8]), 8, 1, ItemCost(1, 1))
    formats = row_formats(modalities(config.model, config.data))
    assert attention_block(config, rows, formats, 1) == expected


def test_rows_of_frames_hold_whole_blocks_and_whole_tokens(tmp_path):
    """Tokens are of 8 frames, of which 4 make one of attention."""

    def of(block, parts):
        config = parse_config(tiny_config(tmp_path, phases__audio__block=block))
        media = row_formats(modalities(config.model, config.data))
        return alignment(config, "audio", media, parts)

    assert [of(block, 1).slots for block in (1, 3, 4, 32)] == [8, 24, 16, 128]
    assert [of(block, 2).slots for block in (8, 32)] == [64, 256]
    assert of(128, 1) == Alignment(slots=512, small=256, parts=1)
    assert of(128, 2) == Alignment(slots=1024, small=512, parts=2)
    assert of(32, 1) == Alignment(slots=128, small=128, parts=1)
    assert of(96, 1) == Alignment(slots=384, small=384, parts=1)
    with pytest.raises(
        ConfigError, match=r"blocks of 4 slots, .* multiple of 8, .* audio tower .* raise it to 2"
    ):
        of(1, 2)
