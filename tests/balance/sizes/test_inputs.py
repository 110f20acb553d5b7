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
        (1152 * 8, 8, {"token": 9}, 128),  # nine blocks, which hold 128 tokens
        (1728 * 8, 8, {"token": 9}, 64),
        (8192, 1, {"token": 9}, 128),
    ],
)
def test_devices_with_few_blocks_of_a_row_get_smaller_ones(slots, span, options, expected):
    alignment = Alignment(128, small=64, **options)
    rows = RowClass(slots // span, span)
    assert alignment.attention_block((rows,)) == expected
    assert alignment.attention_block((RowClass(1 << 20), rows)) == expected


@pytest.mark.parametrize("slots", [0, 100, 64 * 3])
@pytest.mark.parametrize(
    ("parts", "span", "token", "multiple"), [(2, 1, 1, 128), (1, 2, 1, 64), (1, 2, 9, 576)]
)
def test_a_row_that_devices_cannot_share_is_refused(slots, parts, span, token, multiple):
    alignment = Alignment(128, small=64, token=token, parts=parts)
    with pytest.raises(
        ValueError,
        match=rf"row of {slots} tokens .* 64 on each of 2 .*multiples of {multiple},.*mesh\.context",
    ):
        alignment.attention_block((RowClass(slots // span, span),))


def test_where_there_are_no_smaller_blocks_all_rows_have_the_same():
    assert Alignment(128).attention_block((RowClass(512, 16),)) == 128
    assert Alignment(128, parts=2).attention_block((RowClass(1024, 2), RowClass(256))) == 128
    assert Alignment(128, small=64).attention_block((RowClass(512, 16),)) == 64


def test_attention_counts_tokens():
    audio = Alignment(512, small=256, stride=4, token=8)
    assert audio.attention_block((RowClass(8192),)) == 128
    assert audio.attention_block((RowClass(2048, 8),)) == 64
    assert audio.layout_block((RowClass(2048, 8),)) == 256


def test_items_lie_at_blocks_that_hold_whole_tokens():
    rows = (RowClass(1152),)
    assert Alignment(128).layout_block(rows) == 128
    assert Alignment(128, token=4).layout_block(rows) == 128
    assert Alignment(128, token=9).layout_block(rows) == 1
