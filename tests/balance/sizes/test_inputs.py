"""Rows consist of whole blocks, and blocks of attention are smaller where devices hold few of a row."""

import pytest

from jaxmllm.balance.records import RowClass
from jaxmllm.balance.sizes.inputs import Alignment


def test_rows_in_parts_of_few_blocks_have_smaller_ones():
    alignment = Alignment(128, small=64)
    assert [alignment.round_up(130, span) for span in (1, 2, 8)] == [256, 192, 192]
    assert [alignment.round_up(slots, 8) for slots in (1, 900, 1000, 1030)] == [64, 960, 1024, 1152]
    assert [alignment.unit(span) for span in (1, 2)] == [128, 64]
    parts = Alignment(128, small=64, parts=2)
    assert [parts.round_up(300, span) for span in (1, 4)] == [384, 384]
    assert Alignment(128).round_up(130, 8) == 256


@pytest.mark.parametrize(
    ("slots", "span", "options", "expected"),
    [
        (8192, 1, {}, 128),
        (8192, 8, {}, 128),
        (8192, 16, {}, 64),
        (8192, 16, {"few": 4}, 64),
        (8192, 8, {"few": 4}, 128),
        (16_384, 16, {}, 64),  # eight blocks of 128 each for 16 ranks
        (32_768, 16, {}, 128),
        (65_536, 32, {}, 64),
        (128 * 33, 2, {"few": 1}, 64),  # 16.5 blocks of 128 a rank
        (4096, 2, {"parts": 2}, 128),
        (2048, 2, {"parts": 2}, 64),
        (8192, 8, {"token": 9}, 64),  # rows are cut inside of a token
        (8192, 1, {"token": 9}, 128),
    ],
)
def test_devices_with_few_blocks_of_a_row_get_smaller_ones(slots, span, options, expected):
    alignment = Alignment(128, small=64, **options)
    rows = RowClass(slots // span, span)
    assert alignment.attention_block((rows,)) == expected
    assert alignment.attention_block((RowClass(1 << 20), rows)) == expected
    assert Alignment(128, **options).attention_block((rows,)) == 128


def test_items_lie_at_blocks_that_hold_whole_tokens():
    rows = (RowClass(1152),)
    assert Alignment(128).layout_block(rows) == 128
    assert Alignment(128, token=4).layout_block(rows) == 128
    assert Alignment(128, token=9).layout_block(rows) == 1
