"""Lists of tiles against the dense mask: which tiles have a visible pair, which are full, and what
happens where a list is too short."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.attention.mask import TokenIds, causal_ids, item_ids
from jaxmllm.attention.tiles import list_bound, visible_tiles
from tests.attention.masks import tile_map, visible_pairs

BLOCK = 4
SLOTS = 24


def dense_tiles(ids, block):
    """{(query block, key block): whether it is full} for all tiles with a visible pair."""
    pairs = visible_pairs(ids, ids)
    blocks = len(pairs) // block
    tiles = pairs.reshape(blocks, block, blocks, block).transpose(0, 2, 1, 3)
    return {
        (i, j): bool(tiles[i, j].all())
        for i in range(blocks)
        for j in range(blocks)
        if tiles[i, j].any()
    }


def listed(lists, swap=False):
    """The same from the lists, after a check of the order within the list of each block."""
    tiles = {}
    for i, (start, partial, full) in enumerate(lists.spans.tolist()):
        assert start >= 0
        own_blocks = lists.blocks[start : start + partial + full].tolist()
        assert own_blocks[:partial] == sorted(own_blocks[:partial]) and own_blocks[
            partial:
        ] == sorted(own_blocks[partial:])
        tiles |= {((j, i) if swap else (i, j)): t >= partial for t, j in enumerate(own_blocks)}
    return tiles


@st.composite
def packed_rows(draw):
    """Regular rows: documents of text and groups, with padding between and inside of them."""
    document = []
    group = []
    for document_number in range(1, draw(st.integers(1, 4)) + 1):
        for item in range(1, draw(st.integers(1, 4)) + 1):
            length = draw(st.integers(0, 9))
            document += [document_number] * length
            group += [item * draw(st.integers(0, 1))] * length
            padding = draw(st.sampled_from([0, 0, 1, 5]))
            document += [0] * padding
            group += [0] * padding
    ids = np.zeros((2, SLOTS), np.int32)
    ids[:, : len(document)] = np.array([document, group], np.int32)[:, :SLOTS]
    return TokenIds(ids[0], ids[1], np.arange(SLOTS, dtype=np.int32))


@st.composite
def any_rows(draw):
    """Documents, groups and positions without any order."""
    column = lambda most: st.lists(st.integers(0, most), min_size=SLOTS, max_size=SLOTS)  # noqa: E731
    run = draw(st.sampled_from([1, 2, 6]))
    ids = np.array([draw(column(most)) for most in (2, 2, 9)], np.int32)
    return TokenIds(*np.repeat(ids, run, axis=1)[:, :SLOTS])


def windowed(rows):
    """The same rows with a window."""
    return st.builds(
        lambda ids, window: ids.within(window), rows, st.sampled_from([1, 2, 3, 7, 100, None])
    )


all_rows = st.one_of(packed_rows(), any_rows(), windowed(packed_rows()), windowed(any_rows()))


@settings(max_examples=250, deadline=None)
@given(all_rows, st.sampled_from([1, 2, 4, 8, 24]))
def test_lists_hold_exactly_the_visible_tiles(ids, block):
    tiles = tile_map(ids, block)
    assert listed(tiles.queries) == listed(tiles.keys, swap=True)
    if block > 1:
        assert listed(tiles.queries) == dense_tiles(ids, block)
    else:
        assert listed(tiles.queries).keys() == dense_tiles(ids, block).keys()


@settings(max_examples=60, deadline=None)
@given(st.one_of(packed_rows(), windowed(packed_rows())))
def test_both_ways_of_finding_tiles_agree(ids):
    """A row in regular order has spans and takes the fast way. Mirroring its blocks spoils the
    order, so it takes the other way, but only renames the tiles."""
    order = np.arange(SLOTS).reshape(-1, BLOCK)[::-1].reshape(-1)
    blocks = SLOTS // BLOCK
    mirrored = visible_tiles(ids.at(order), BLOCK)
    renamed = {
        (blocks - 1 - i, blocks - 1 - j): full
        for i, j, full in zip(
            mirrored.query.tolist(), mirrored.key.tolist(), mirrored.full.tolist(), strict=True
        )
    }
    tiles = visible_tiles(ids, BLOCK)
    assert renamed == dict(
        zip(
            zip(tiles.query.tolist(), tiles.key.tolist(), strict=True),
            tiles.full.tolist(),
            strict=True,
        )
    )


@settings(max_examples=60, deadline=None)
@given(st.one_of(packed_rows(), windowed(packed_rows())), st.integers(1, 20))
def test_lists_that_are_too_short_fall_back_to_ranges(ids, bound):
    """A negative start, -1 - s, stands for the range of blocks from s on."""
    expected = dense_tiles(ids, BLOCK)
    for lists, side in (
        (tile_map(ids, BLOCK, bound).queries, 0),
        (tile_map(ids, BLOCK, bound).keys, 1),
    ):
        assert lists.blocks.shape == (bound,)
        for i, (start, partial, full) in enumerate(lists.spans.tolist()):
            other_blocks = {tile[1 - side] for tile in expected if tile[side] == i}
            if start >= 0:
                assert set(lists.blocks[start : start + partial + full].tolist()) == other_blocks
            else:
                assert (min(other_blocks), max(other_blocks) + 1, full) == (
                    -1 - start,
                    -1 - start + partial,
                    0,
                )


def test_segments_of_an_encoder_row_see_themselves_in_both_directions():
    ids = item_ids(np.array([1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 0, 0, 0, 0, 0], np.int32))
    tiles = tile_map(ids, 4)
    assert [tiles.queries.blocks[a : a + b + c].tolist() for a, b, c in tiles.queries.spans] == [
        [0, 1, 2],
        [0, 2, 1],
        [0, 1, 2],
        [],
    ]
    assert tiles.queries.spans.tolist() == [[0, 3, 0], [3, 2, 1], [6, 3, 0], [9, 0, 0]]


def test_an_image_in_a_causal_row_is_seen_whole_by_itself():
    """The image fills blocks 1 and 2, so that tile (1, 2) above the diagonal is full."""
    groups = np.array([0] * 4 + [7] * 8 + [0] * 4, np.int32)
    tiles = tile_map(causal_ids(np.ones(16, np.int32), groups), 4)
    assert listed(tiles.queries) == {
        (0, 0): False,
        (1, 0): True,
        (1, 1): True,
        (1, 2): True,
        (2, 0): True,
        (2, 1): True,
        (2, 2): True,
        (3, 0): True,
        (3, 1): True,
        (3, 2): True,
        (3, 3): False,
    }


def test_a_window_leaves_a_band():
    """With blocks of 4, a window of 6 reaches two blocks back and fills no tile; a window of 8
    fills the tile before the diagonal."""
    ids = causal_ids(np.ones(64, np.int32)).within(6)
    tiles = listed(tile_map(ids, 4).queries)
    assert set(tiles) == {(i, j) for i in range(16) for j in range(max(0, i - 2), i + 1)}
    assert not any(tiles.values())
    wider_window = listed(tile_map(ids.within(8), 4).queries)
    assert {tile for tile, full in wider_window.items() if full} == {
        (i, i - 1) for i in range(1, 16)
    }


def test_the_bound_holds_every_tile_until_the_largest_list():
    assert list_bound(4, 8) == 32
    assert list_bound(2048, 2048) == 2**20


def test_block_must_divide_the_row():
    with pytest.raises(ValueError, match=r"10 tokens.*blocks of 4.*phases\.<phase>\.capacities"):
        tile_map(causal_ids(np.ones(10, np.int32)), 4)
