"""The rule of which token sees which, and its form as intervals of slots."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.attention.mask import causal_ids, item_ids, seen_spans, visible
from tests.attention.masks import visible_pairs
from tests.attention.test_tiles import all_rows, packed_rows, windowed


def dense(ids):
    """`visible` of all pairs of a row."""
    return visible(ids.at(np.s_[:, None]), ids)


def sees(ids, q, k):
    """The rule in words, for one query and one key."""
    if ids.document[q] == 0 or ids.document[q] != ids.document[k]:
        return False
    if ids.group[q] > 0 and ids.group[q] == ids.group[k]:
        return True
    earliest = 0 if ids.first is None else ids.first[q]
    return earliest <= ids.position[k] <= ids.position[q]


@settings(max_examples=100, deadline=None)
@given(all_rows)
def test_the_rule_is_that_of_its_words(ids):
    tokens = range(len(ids.document))
    expected = np.array([[sees(ids, q, k) for k in tokens] for q in tokens])
    np.testing.assert_array_equal(dense(ids), expected)
    np.testing.assert_array_equal(dense(ids.map(jnp.asarray)), expected)
    np.testing.assert_array_equal(visible_pairs(ids, ids), expected)


@settings(max_examples=200, deadline=None)
@given(all_rows)
def test_spans_hold_what_is_visible(ids):
    """Where a row has spans, they hold exactly the visible tokens, and both ends
    of a span are visible."""
    spans = seen_spans(ids)
    if spans is not None:
        slots = np.arange(len(ids.document))
        within = (spans[0][:, None] <= slots) & (slots < spans[1][:, None]) & (ids.document > 0)
        np.testing.assert_array_equal(within, visible_pairs(ids, ids))
        is_token = ids.document > 0
        ends = [spans[0][is_token], spans[1][is_token] - 1]
        assert all(visible_pairs(ids, ids)[np.flatnonzero(is_token), end].all() for end in ends)
        assert not spans[0][~is_token].any() and not spans[1][~is_token].any()


@settings(max_examples=50, deadline=None)
@given(st.one_of(packed_rows(), windowed(packed_rows())))
def test_packed_rows_have_spans(ids):
    assert seen_spans(ids) is not None
    assert seen_spans(item_ids(ids.document)) is not None
    assert (
        seen_spans(ids.at(np.s_[::-1])) is None
        or (np.diff(ids.document[ids.document > 0]) > 0).all()
    )


def test_a_causal_row_and_a_row_of_items():
    segments = np.array([1, 1, 2, 0], np.int32)
    np.testing.assert_array_equal(dense(item_ids(segments))[:2, :2], True)
    np.testing.assert_array_equal(
        dense(causal_ids(segments))[:2, :2], [[True, False], [True, True]]
    )
    assert not dense(causal_ids(segments))[:2, 2:].any()
    assert dense(causal_ids(segments, np.array([5, 5, 0, 0], np.int32)))[0, 1]


def test_a_window_counts_tokens_of_its_document():
    """A window of three tokens includes the token itself. An image is seen whole by its own tokens,
    and by others as far as their window reaches."""
    groups = np.array([0, 1, 1, 1, 1, 0, 0, 0], np.int32)
    ids = causal_ids(np.array([1, 1, 1, 1, 1, 1, 2, 2], np.int32), groups).within(3)
    rows = [
        "10000000",
        "11111000",
        "11111000",
        "01111000",
        "01111000",
        "00011100",
        "00000010",
        "00000011",
    ]
    expected = np.array([[int(digit) for digit in row] for row in rows], bool)
    np.testing.assert_array_equal(dense(ids), expected)
    unlimited = dense(ids.within(None))
    np.testing.assert_array_equal(unlimited, dense(ids._replace(first=None)))
