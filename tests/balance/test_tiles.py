import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.tiles import tile_ranges


def dense_hulls(segments, block, causal):
    """Both tables from the dense mask, block by block."""
    slots = np.arange(len(segments))
    mask = (segments[:, None] == segments) & (segments > 0)
    if causal:
        mask &= slots[:, None] >= slots
    count = len(segments) // block
    met = mask.reshape(count, block, count, block).any(axis=(1, 3))

    def hull(seen):
        where = np.flatnonzero(seen)
        return (where[0], where[-1] + 1) if len(where) else (0, 0)

    return np.array([hull(row) for row in met]), np.array([hull(column) for column in met.T])


@st.composite
def rows(draw):
    """A row of ascending segments, with padding before, inside, between and after them."""
    block = draw(st.sampled_from([1, 4, 8]))
    size = block * draw(st.integers(1, 8))
    runs = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=12))  # (step of the id, length)
    ids = np.cumsum([step for step, _ in runs]).astype(np.int32)
    segments = np.repeat(ids, [length for _, length in runs])[:size]
    segments = np.pad(segments, (0, size - len(segments)))
    holes = draw(st.lists(st.tuples(st.integers(0, size), st.integers(1, 12)), max_size=4))
    for start, length in holes:
        segments[start : start + length] = 0
    return segments, block


@settings(max_examples=200, deadline=None)
@given(rows(), st.booleans())
def test_ranges_are_the_hulls_of_the_dense_mask(row, causal):
    segments, block = row
    ranges = tile_ranges(segments, block, causal)
    queries, keys = dense_hulls(segments, block, causal)
    np.testing.assert_array_equal(ranges.queries, queries)
    np.testing.assert_array_equal(ranges.keys, keys)
    assert ranges.queries.dtype == ranges.keys.dtype == np.int32


def test_the_example_of_the_module():
    segments = np.array([1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 0, 0, 0, 0], np.int32)
    bidirectional = [[0, 3], [0, 3], [0, 3], [0, 0]]
    assert tile_ranges(segments, 4, causal=False).queries.tolist() == bidirectional
    assert tile_ranges(segments, 4, causal=False).keys.tolist() == bidirectional
    assert tile_ranges(segments, 4, causal=True).queries.tolist() == [[0, 1], [0, 2], [0, 3], [0, 0]]
    assert tile_ranges(segments, 4, causal=True).keys.tolist() == [[0, 3], [1, 3], [2, 3], [0, 0]]


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match=r"10 slots .* blocks of 4.*phases\.<phase>\.block"):
        tile_ranges(np.ones(10, np.int32), 4, causal=True)


def test_descending_segments_are_refused():
    with pytest.raises(ValueError, match="slot 3 falls back to segment 1"):
        tile_ranges(np.array([1, 2, 0, 1], np.int32), 4, causal=True)
