"""Rows whose slots are dealt to the parts of an attention computation.

Dealing loses nothing, gives every part its share of the work, and records the way back. The
reference is the visible tiles of the dense mask in the order before dealing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.attention.mask import causal_ids
from jaxmllm.attention.tiles import visible_tiles
from jaxmllm.balance.records import RowClass
from jaxmllm.config.schema import LayerWindows
from jaxmllm.data.media.images import Images
from jaxmllm.data.rows.masks import AttentionSpec, finish_encoder_row, finish_language_row
from jaxmllm.row_format import RowFormat

BLOCK = 4
SLOTS = 48


@st.composite
def segments(draw):
    """Segment ids of a random row: documents behind one another from 1, then padding."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:SLOTS]
    return np.pad(ids, (0, SLOTS - len(ids))).astype(np.int32)


def language_row(ids, seed=0):
    """A language row whose slots carry their own number in every field, so that a move can be
    traced."""
    random = np.random.default_rng(seed)
    ids = np.stack(ids)
    slot_numbers = np.arange(1, ids.size + 1, dtype=np.int32).reshape(ids.shape)
    return {
        "tokens": slot_numbers,
        "targets": slot_numbers + 1000,
        "segments": ids,
        "positions": np.stack([slot_numbers] * 3, axis=2),
        "media": slot_numbers - 1,
        "sources": np.zeros((len(ids), 9), np.int32),
        "groups": np.sort(random.integers(0, 3, ids.shape)).astype(np.int32) * (ids > 0),
    }


def dense(row, rank, parts):
    """All visible tiles as (query block, key block, full), with block numbers from before dealing.

    They are gathered from the tile lists of all parts of one rank."""
    tables = row["tiles"]
    order = row["order"][rank] // BLOCK
    blocks = order.reshape(-1, BLOCK)[:, 0]
    blocks_per_part = len(blocks) // parts
    tiles = set()
    for part in range(parts):
        for i, (start, partial, full) in enumerate(tables["query_spans"][rank, part].tolist()):
            for t, j in enumerate(
                tables["query_blocks"][rank, part][start : start + partial + full].tolist()
            ):
                tiles.add((blocks[part * blocks_per_part + i], blocks[j], t >= partial))
    return tiles


@given(st.lists(segments(), min_size=2, max_size=2), st.sampled_from([1, 2, 4]))
def test_language_slots_are_dealt_with_all_that_belongs_to_them(ids, parts):
    original = language_row(ids)
    row = {name: values.copy() for name, values in original.items()}
    finish_language_row(row, AttentionSpec({"language": BLOCK}, {"language": parts}))
    for rank in range(2):
        order = row["order"][rank]
        assert sorted(order) == list(range(SLOTS))
        assert (order.reshape(-1, BLOCK) % BLOCK == np.arange(BLOCK)).all()  # blocks move whole
        for part in order.reshape(parts, -1):
            assert (np.diff(part[::BLOCK]) > 0).all()  # and ascend inside each part
        for name in ("tokens", "targets", "segments", "positions", "media", "groups"):
            np.testing.assert_array_equal(
                row[name][rank], original[name][rank][order], err_msg=name
            )
        mask = causal_ids(original["segments"][rank], original["groups"][rank])
        tiles = visible_tiles(mask, BLOCK)
        assert dense(row, rank, parts) == set(zip(tiles.query, tiles.key, tiles.full, strict=True))


@given(segments(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 9, 50]))
def test_windows_have_lists_of_their_own_in_the_same_order(ids, parts, window):
    row = language_row([ids])
    tiles = visible_tiles(causal_ids(ids, row["groups"][0].copy()).within(window), BLOCK)
    layers = LayerWindows(layers=3, window=window, full_layers=(1,))
    spec = AttentionSpec({"language": BLOCK}, {"language": parts}, windows={"language": layers})
    finish_language_row(row, spec)
    expected = set(zip(tiles.query, tiles.key, tiles.full, strict=True))
    assert dense(row | {"tiles": row["window_tiles"]}, 0, parts) == expected
    assert expected <= {
        (query, key, full) for query, key, _ in dense(row, 0, parts) for full in (True, False)
    }


@given(segments(), st.sampled_from([(4, 1), (4, 2), (4, 3), (6, 1), (6, 2), (6, 4)]))
def test_encoder_tokens_find_back_to_the_order_of_the_pool(ids, shape):
    """Encoder rows record where each language token went, so the pool gets its order back.

    An attention token has 2 slots and a block 8. A language token has 4 slots, half a block, or 6,
    which do not divide a block."""
    slots_per_token, parts = shape
    slots = np.repeat(ids, 2)
    numbers = np.arange(len(slots))
    row = {
        "features": numbers[None, :, None].astype(np.float32),
        "segments": slots[None].copy(),
        "positions": np.stack([numbers, numbers], axis=1)[None].astype(np.int32),
        "valid": np.ones((1, len(slots) // slots_per_token), bool),
        "failed": np.zeros(1, np.int32),
    }
    row_format = RowFormat(
        *(1, np.dtype(np.float32)),
        slots_per_token=slots_per_token,
        stride=2,
        alignment=slots_per_token,
        axes=(1, 2),
        margin=3,
    )
    finish_encoder_row(row, AttentionSpec({"audio": BLOCK}, {"audio": parts}), "audio", row_format)
    assert ("margins" in row) == (parts > 1)
    if parts > 1:
        check_margins(row, slots, 2 * BLOCK, 3)
    token_slots = row["features"][0, :, 0].reshape(-1, slots_per_token)
    # The slots of a language token stay together.
    assert (token_slots == token_slots[:, :1] + np.arange(slots_per_token)).all()
    token_numbers = token_slots[:, 0] / slots_per_token
    np.testing.assert_array_equal(token_numbers[row["places"][0]], np.arange(len(token_numbers)))
    np.testing.assert_array_equal(row["segments"][0], slots[row["features"][0, :, 0].astype(int)])


def check_margins(row, segments, size, margin):
    """The margins of each block hold what lies before and after it in the original row, or zeros at
    the ends.

    Features of the row are the numbers of its slots."""
    block_slots = row["features"][0, :, 0].reshape(-1, size).astype(int)
    for name in ("features", "segments", "positions"):
        block_margins = row["margins"][name][0].reshape(len(block_slots), 2 * margin, -1)
        for block, margin_values in zip(block_slots, block_margins, strict=True):
            neighbour_slots = [
                *range(block[0] - margin, block[0]),
                *range(block[-1] + 1, block[-1] + 1 + margin),
            ]
            for slot, value in zip(neighbour_slots, margin_values[:, 0], strict=True):
                in_row = 0 <= slot < len(segments)
                expected = segments[slot] if name == "segments" and in_row else slot
                assert value == (expected if in_row else 0)


def image_row(images, merge, slots, start=0):
    """A row of images of (height, width) patches, one after the other, cut as the modality cuts
    them."""
    segments = np.zeros((1, slots), np.int32)
    positions = np.zeros((1, slots, 2), np.int32)
    modality = Images(patch_size=2, merge=merge, min_pixels=1, max_pixels=10**6)
    for image_id, (height, width) in enumerate(images, 1):
        end = start + height * width
        segments[0, start:end] = image_id
        positions[0, start:end] = modality.positions((1, height, width))[:, 1:]
        start = end
    return {
        "features": np.arange(slots, dtype=np.float32)[None, :, None],
        "segments": segments,
        "positions": positions,
        "valid": np.ones((1, slots // merge**2), bool),
        "failed": np.zeros(1, np.int32),
    }


def in_windows(row, merge, side, block, parts=1):
    """Finishes the row, and returns (visible pairs, pairs of listed tiles) for layers with windows."""
    vision = LayerWindows(layers=2, window=side, full_layers=(1,))
    row_format = RowFormat(1, np.dtype(np.float32), merge**2, 1, merge**2, axes=(1, 2))
    attention = AttentionSpec({"vision": block}, {"vision": parts}, windows={"vision": vision})
    finish_encoder_row(row, attention, "vision", row_format)
    visible = (np.bincount(row["windows"][0])[1:].astype(np.int64) ** 2).sum()
    return visible, int(row["window_tiles"]["query_spans"][..., 1:].sum()) * block**2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 9),
    st.sampled_from([1, 2]),
    st.integers(0, 5),
    st.sampled_from([12, 36]),
)
def test_windows_move_tokens_inside_their_items_alone(grids, merge, side, parts, start, block):
    images = [(height * merge, width * merge) for height, width in grids]
    slot_unit = 36 * parts  # whole language tokens of every merge (1, 4, 9 patches) fill this
    used_slots = start * merge**2 + sum(height * width for height, width in images)
    original = image_row(images, merge, -(-used_slots // slot_unit) * slot_unit, start * merge**2)
    row = {name: values.copy() for name, values in original.items()}
    in_windows(row, merge, side, block, parts)
    tokens = row["features"].reshape(-1, merge**2).astype(int)
    # The patches of a language token stay together.
    assert (tokens == tokens[:, :1] + np.arange(merge**2)).all()
    np.testing.assert_array_equal(tokens[row["places"][0], 0] // merge**2, np.arange(len(tokens)))
    origin = tokens.reshape(-1)
    np.testing.assert_array_equal(row["segments"][0], original["segments"][0][origin])
    np.testing.assert_array_equal(row["positions"][0], original["positions"][0][origin])
    # A single part keeps items where they are, so that only tokens inside an item move.
    if parts == 1:
        np.testing.assert_array_equal(row["segments"], original["segments"])
    real = row["segments"][0] > 0
    keys = np.column_stack([row["segments"][0], row["positions"][0] // side])
    np.testing.assert_array_equal(row["windows"][0] > 0, real)
    _, expected = np.unique(keys[real], axis=0, return_inverse=True)
    np.testing.assert_array_equal(row["windows"][0][real], expected.reshape(-1) + 1)


@pytest.mark.parametrize(
    ("images", "merge", "most"),
    [
        ([(37, 37)], 1, 1.6),
        ([(74, 74)], 1, 1.1),
        ([(74, 74)], 2, 1.1),
        ([(36, 36), (20, 52), (74, 74), (30, 44)], 2, 1.3),
        ([(37, 37)] * 5, 1, 1.7),
    ],
)
def test_windows_compute_little_more_than_they_see(images, merge, most):
    """`most` bounds the computed pairs per visible pair. In raster order there would be 8 to 13."""
    slots = -(-sum(height * width for height, width in images) // 64) * 64
    visible, computed = in_windows(image_row(images, merge, slots), merge, side=8, block=64)
    # Windows of 8 patches are cut off at the lower and right edges of an image.
    sides = [[min(8, n - start) for start in range(0, n, 8)] for image in images for n in image]
    window_sides = zip(sides[::2], sides[1::2], strict=True)
    assert visible == sum(
        (h * w) ** 2 for rows, columns in window_sides for h in rows for w in columns
    )
    assert visible < computed <= most * visible


def test_parts_share_the_work_of_a_long_causal_document():
    row = language_row([np.ones(SLOTS, np.int32)])
    row["groups"][:] = 0
    finish_language_row(row, AttentionSpec({"language": BLOCK}), span=3)
    work = row["tiles"]["query_spans"][0, :, :, 1:].sum(axis=(1, 2))
    # 12 blocks see each other causally: 12 * 13 / 2 tiles, which 3 parts share to within one.
    assert work.sum() == 12 * 13 // 2 and work.max() - work.min() <= 1


@pytest.mark.parametrize(
    ("phase", "slots", "span", "expected"),
    [
        ("vision", 128, 1, (8, 1)),
        ("language", 128, 1, (16, 2)),
        ("language", 128, 4, (4, 8)),
        ("language", 128, 2, (16, 4)),
        ("vision", 128, 4, (8, 4)),
    ],
)
def test_blocks_and_parts_go_by_phase_and_rows(phase, slots, span, expected):
    smaller = {("language", RowClass(32, 4)): 4}
    spec = AttentionSpec({"vision": 8, "language": 16}, {"language": 2}, smaller_blocks=smaller)
    assert spec.of(phase, slots, span) == expected
