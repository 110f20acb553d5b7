"""The rule who sees whom, and its form as intervals."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.attention.mask import TokenIds, causal_ids, item_ids, seen_spans, visible
from tests.attention.masks import visible_pairs
from tests.attention.test_tiles import any_rows, packed_rows


def dense(ids):
    """What `visible` says of all pairs."""
    return visible(TokenIds(*(x[:, None] for x in ids)), ids)


def sees(ids, q, k):
    """The rule in words, token by token."""
    if ids.document[q] == 0 or ids.document[q] != ids.document[k]:
        return False
    if ids.group[q] > 0 and ids.group[q] == ids.group[k]:
        return True
    return ids.position[k] <= ids.position[q]


@settings(max_examples=60, deadline=None)
@given(st.one_of(packed_rows(), any_rows()))
def test_the_rule_is_that_of_its_words(ids):
    tokens = range(len(ids.document))
    expected = np.array([[sees(ids, q, k) for k in tokens] for q in tokens])
    np.testing.assert_array_equal(dense(ids), expected)
    np.testing.assert_array_equal(dense(TokenIds(*map(jnp.asarray, ids))), expected)
    np.testing.assert_array_equal(visible_pairs(ids, ids), expected)


@settings(max_examples=150, deadline=None)
@given(st.one_of(packed_rows(), any_rows()))
def test_spans_hold_what_is_visible(ids):
    spans = seen_spans(ids)
    if spans is not None:
        slots = np.arange(len(ids.document))
        within = (spans[0][:, None] <= slots) & (slots < spans[1][:, None]) & (ids.document > 0)
        np.testing.assert_array_equal(within, visible_pairs(ids, ids))
        real = ids.document > 0
        ends = [spans[0][real], spans[1][real] - 1]
        assert all(visible_pairs(ids, ids)[np.flatnonzero(real), end].all() for end in ends)
        assert not spans[0][~real].any() and not spans[1][~real].any()


@settings(max_examples=50, deadline=None)
@given(packed_rows())
def test_packed_rows_have_spans(ids):
    assert seen_spans(ids) is not None
    assert seen_spans(item_ids(ids.document)) is not None
    assert seen_spans(TokenIds(*(x[::-1] for x in ids))) is None or (np.diff(ids.document[ids.document > 0]) > 0).all()


def test_a_causal_row_and_a_row_of_items():
    segments = np.array([1, 1, 2, 0], np.int32)
    np.testing.assert_array_equal(dense(item_ids(segments))[:2, :2], True)
    np.testing.assert_array_equal(dense(causal_ids(segments))[:2, :2], [[True, False], [True, True]])
    assert not dense(causal_ids(segments))[:2, 2:].any()
    assert dense(causal_ids(segments, np.array([5, 5, 0, 0], np.int32)))[0, 1]
