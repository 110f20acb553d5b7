"""Rows whose slots are dealt to parts: nothing is lost, every part has its share, and the way back is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.attention.mask import causal_ids
from jaxmllm.attention.tiles import visible_tiles
from jaxmllm.config.schema import LayerWindows
from jaxmllm.data.rows.masks import AttentionSpec, finish_encoder_row, finish_language_row
from jaxmllm.row_format import RowFormat

BLOCK, SLOTS = 4, 48


@st.composite
def segments(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:SLOTS]
    return np.pad(ids, (0, SLOTS - len(ids))).astype(np.int32)


def language_row(ids, seed=0):
    random = np.random.default_rng(seed)
    ids = np.stack(ids)
    numbers = np.arange(1, ids.size + 1, dtype=np.int32).reshape(ids.shape)
    return {
        "tokens": numbers,
        "targets": numbers + 1000,
        "segments": ids,
        "positions": np.stack([numbers] * 3, axis=2),
        "media": numbers - 1,
        "sources": np.zeros((len(ids), 9), np.int32),
        "groups": np.sort(random.integers(0, 3, ids.shape)).astype(np.int32) * (ids > 0),
    }


def dense(row, rank, parts):
    """Visible tiles by the blocks' numbers before dealing, from the lists of all parts."""
    tables, order = row["tiles"], row["order"][rank] // BLOCK
    blocks = order.reshape(-1, BLOCK)[:, 0]
    own, found = len(blocks) // parts, set()
    for part in range(parts):
        for i, (first, partial, full) in enumerate(tables["query_spans"][rank, part].tolist()):
            for t, j in enumerate(
                tables["query_blocks"][rank, part][first : first + partial + full].tolist()
            ):
                found.add((blocks[part * own + i], blocks[j], t >= partial))
    return found


@given(st.lists(segments(), min_size=2, max_size=2), st.sampled_from([1, 2, 4]))
def test_language_slots_are_dealt_with_all_that_belongs_to_them(ids, parts):
    before = language_row(ids)
    row = {name: values.copy() for name, values in before.items()}
    finish_language_row(row, AttentionSpec({"language": BLOCK}, {"language": parts}))
    for rank in range(2):
        order = row["order"][rank]
        assert sorted(order) == list(range(SLOTS))
        assert (order.reshape(-1, BLOCK) % BLOCK == np.arange(BLOCK)).all()  # whole blocks
        for part in order.reshape(parts, -1):
            assert (np.diff(part[::BLOCK]) > 0).all()  # which ascend in each part
        for name in ("tokens", "targets", "segments", "positions", "media", "groups"):
            np.testing.assert_array_equal(row[name][rank], before[name][rank][order], err_msg=name)
        mask = causal_ids(before["segments"][rank], before["groups"][rank])
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


@given(segments(), st.sampled_from([1, 2, 3]))
def test_encoder_tokens_find_back_to_the_order_of_the_pool(ids, parts):
    """Two slots behind an attention token, four behind a language token."""
    slots = np.repeat(ids, 2)
    numbers = np.arange(len(slots))
    row = {
        "features": numbers[None, :, None].astype(np.float32),
        "segments": slots[None].copy(),
        "positions": np.stack([numbers, numbers], axis=1)[None].astype(np.int32),
        "valid": np.ones((1, len(slots) // 4), bool),
        "failed": np.zeros(1, np.int32),
    }
    row_format = RowFormat(
        1, np.dtype(np.float32), slots_per_token=4, stride=2, alignment=4, axes=(1, 2)
    )
    finish_encoder_row(row, AttentionSpec({"audio": BLOCK}, {"audio": parts}), "audio", row_format)
    tokens = row["features"][0, ::4, 0] / 4  # the language token that each four slots become
    np.testing.assert_array_equal(tokens[row["places"][0]], np.arange(len(tokens)))
    np.testing.assert_array_equal(row["segments"][0], slots[row["features"][0, :, 0].astype(int)])


def test_parts_share_the_work_of_a_long_causal_document():
    row = language_row([np.ones(SLOTS, np.int32)])
    row["groups"][:] = 0
    finish_language_row(row, AttentionSpec({"language": BLOCK}), span=3)
    work = row["tiles"]["query_spans"][0, :, :, 1:].sum(axis=(1, 2))
    assert work.sum() == 12 * 13 // 2 and work.max() - work.min() <= 1


@pytest.mark.parametrize(("phase", "expected"), [("vision", (8, 1)), ("language", (16, 2))])
def test_blocks_and_parts_go_by_phase(phase, expected):
    assert AttentionSpec({"vision": 8, "language": 16}, {"language": 2}).of(phase) == expected
