"""The alignment of rows: whole blocks, whole tokens, and whole chunks in each part of a row."""

import pytest

from jaxmllm.balance.records import RowClass
from jaxmllm.config.read import parse_config
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.setup.row_shapes import alignment
from tests.support import tiny_config


@pytest.mark.parametrize(
    "phase, block, capacity, span, parts, expected",
    [
        ("language", 128, 4096, 1, 1, 128),
        ("language", 128, 512, 1, 1, 64),
        ("language", 128, 4096, 1, 4, 128),  # eight blocks per part
        ("language", 128, 2048, 1, 4, 64),  # four blocks of 128 per part are too few
        ("language", 128, 512, 4, 1, 64),  # rows shared by four ranks
        ("language", 128, 192, 4, 1, 32),
        ("language", 128, 4096, 4, 1, 128),
        ("language", 128, 1024, 2, 4, 64),
        ("language", 256, 4096, 1, 8, 64),
        ("language", 32, 256, 1, 4, 32),
        ("language", 96, 768, 1, 4, 96),  # 64 does not divide 96
        ("audio", 128, 4 * 2048, 1, 4, 64),  # capacities in frames, of which attention joins four
        ("audio", 128, 4 * 224, 8, 1, 32),
        ("audio", 128, 4 * 4096, 1, 4, 128),
    ],
)
def test_rows_get_smaller_blocks_where_these_are_few(
    tmp_path, phase, block, capacity, span, parts, expected
):
    config = parse_config(tiny_config(tmp_path, **{f"phases__{phase}__block": block}))
    formats = row_formats(modalities(config.model, config.data))
    shape = alignment(config, phase, formats, parts)
    assert shape.attention_block(RowClass(capacity, span)) == expected


@pytest.mark.parametrize("block, expected", [(128, 64), (256, 64), (32, 32), (96, 96)])
def test_towers_with_windows_get_blocks_that_hold_few_of_them(tmp_path, block, expected):
    windows = {"model__vision__layers": 2, "model__vision__window": 8}
    config = parse_config(tiny_config(tmp_path, phases__vision__block=block, **windows))
    formats = row_formats(modalities(config.model, config.data))
    shape = alignment(config, "vision", formats, 1)
    assert shape.attention_block(RowClass(768 * 8)) == expected


def test_rows_of_frames_hold_whole_blocks_and_whole_tokens(tmp_path):
    """A token is 8 frames, and attention joins 4 frames into one of its slots."""

    def of(block, parts):
        config = parse_config(tiny_config(tmp_path, phases__audio__block=block))
        media = row_formats(modalities(config.model, config.data))
        return alignment(config, "audio", media, parts)

    assert [of(block, 1).slots for block in (1, 3, 4, 32)] == [8, 24, 16, 128]
    assert [of(block, 2).slots for block in (8, 32)] == [64, 256]
    assert [of(block, 1).slots for block in (32, 96, 128)] == [128, 384, 512]
    assert of(128, 2).slots == 1024
    assert [of(block, 1).unit(1024) for block in (32, 96, 128)] == [128, 384, 256]
    assert [of(block, 1).unit(1023) for block in (32, 96, 128)] == [128, 384, 128]
    assert [of(block, 2).unit(2048) for block in (32, 96, 128)] == [256, 768, 512]
    assert [of(block, 2).unit(2047) for block in (32, 96, 128)] == [256, 768, 256]
    # Each of two parts needs two blocks of 4 frames to hold a whole token
    assert of(1, 2).slots == of(1, 2).unit(100) == 16
