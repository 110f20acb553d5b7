"""Rows consist of whole blocks of attention, and blocks are smaller where
devices hold few of a row."""

import pytest

from jaxmllm.balance.records import RowClass
from jaxmllm.balance.sizes.inputs import Alignment


def test_rows_of_few_blocks_have_smaller_ones():
    alignment = Alignment(128, small=64)
    assert [alignment.round_up(slots) for slots in (1, 130, 900, 1000, 1030)] == [
        *(64, 192, 960, 1024, 1152)
    ]
    assert Alignment(128, small=64, parts=2).round_up(300) == 384
    assert Alignment(128).round_up(130) == 256


@pytest.mark.parametrize(
    ("slots", "span", "options", "expected"),
    [
        (8192, 1, {}, 128),
        (896, 1, {}, 64),
        (8192, 8, {}, 128),
        (8192, 16, {}, 64),
        (8192, 16, {"few": 4}, 64),
        (8192, 8, {"few": 4}, 128),
        (16_384, 16, {}, 64),  # eight blocks of 128 each for 16 ranks
        (32_768, 16, {}, 128),
        (65_536, 32, {}, 64),
        (128 * 33, 2, {"few": 1}, 64),  # 16.5 blocks of 128 per rank
        (4096, 2, {"parts": 2}, 128),
        (2048, 2, {"parts": 2}, 64),
        (1152 * 8, 8, {"token": 9}, 128),  # nine blocks, which hold 128 tokens
        (1728 * 8, 8, {"token": 9}, 64),
        (9216, 1, {"token": 9}, 128),
    ],
)
def test_devices_with_few_blocks_of_a_row_get_smaller_ones(slots, span, options, expected):
    alignment = Alignment(128, small=64, **options)
    rows = RowClass(slots // span, span)
    assert alignment.attention_block(rows) == expected


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
        alignment.attention_block(RowClass(slots // span, span))


@pytest.mark.parametrize(
    ("capacity", "span", "options", "expected"),
    [
        (32, 8, {}, 32),
        (224, 8, {}, 32),
        (256, 8, {}, 64),  # four small ones
        (288, 8, {}, 32),  # no whole number of small ones
        (1024, 8, {}, 128),
        (192, 1, {}, 32),
        (320, 1, {}, 64),
        (448, 2, {"parts": 2}, 32),
        (512, 2, {"parts": 2}, 64),
        (512, 16, {"few": 16}, 64),
        (480, 16, {"few": 16}, 32),
    ],
)
def test_devices_with_few_small_blocks_get_the_smallest(capacity, span, options, expected):
    alignment = Alignment(128, small=64, smallest=32, **options)
    assert alignment.attention_block(RowClass(capacity, span)) == expected


def test_rows_of_few_small_blocks_come_in_the_smallest():
    alignment = Alignment(128, small=64, smallest=32)
    rounded = [alignment.round_up(slots) for slots in (1, 130, 230, 256, 257, 1000, 1030)]
    assert rounded == [32, 160, 256, 256, 320, 1024, 1152]
    assert [alignment.unit(slots) for slots in (1, 255, 256, 2048)] == [32, 32, 64, 64]
    for slots in range(1, 1300):  # each capacity can be shared by 8 ranks, and is the next one
        capacity = alignment.round_up(slots)
        alignment.attention_block(RowClass(capacity, 8))
        assert alignment.round_down(capacity) == capacity >= slots
        assert alignment.round_up(alignment.round_down(slots) + 1) >= capacity


def test_where_there_are_no_smaller_blocks_all_rows_have_the_same():
    assert Alignment(128).attention_block(RowClass(512, 16)) == 128
    assert Alignment(128, parts=2).attention_block(RowClass(1024, 2)) == 128
    assert Alignment(128, small=64).attention_block(RowClass(128, 16)) == 64


def test_attention_counts_tokens():
    audio = Alignment(512, small=256, smallest=128, stride=4, token=8)
    rows = (RowClass(8192), RowClass(2048, 8), RowClass(384, 8))
    assert [audio.attention_block(row_class) for row_class in rows] == [128, 64, 32]
    assert audio.layout_blocks(rows) == (512, 256, 128)


def test_items_lie_at_blocks_that_hold_whole_tokens():
    rows = (RowClass(1152),)
    assert Alignment(128).layout_blocks(rows) == (128,)
    assert Alignment(128, token=4).layout_blocks(rows) == (128,)
    assert Alignment(128, token=9).layout_blocks(rows) is None
