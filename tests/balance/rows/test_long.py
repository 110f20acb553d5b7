"""Items that no ordinary row holds, and the plans of all others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseItems, PhaseSpec, row_classes
from jaxmllm.balance.rows.assign import assign, assign_in_place
from jaxmllm.balance.statistics import phase_statistics
from jaxmllm.phases import decoder_phase

SPEC = PhaseSpec(decoder_phase(), 4, row_classes((64, 16)), 8, 1, ItemCost(1, 0), long_capacity=256)


def items_of(lengths):
    length = np.array(lengths, np.int64)
    numbers = np.arange(len(length), dtype=np.int32)
    return PhaseItems(length, length, numbers, 0 * numbers, 0 * numbers)


lengths = st.lists(st.one_of(st.integers(1, 64), st.integers(65, 256)), max_size=20)


@given(lengths, st.booleans())
def test_long_items_get_rows_of_their_own_and_the_others_what_they_would_get_alone(lengths, stay):
    items = items_of(lengths)
    rank = np.arange(len(lengths)) * 7 % 4
    place = (
        (lambda items, rank: assign_in_place(SPEC, items, rank))
        if stay
        else lambda items, _: assign(SPEC, items)
    )
    plan, long = place(items, rank), items.length > 64
    count = int(long.sum())
    assert (plan.capacity[:count] == 256).all() and (plan.capacity[count:] <= 64).all()
    assert sorted(plan.microbatch[long]) == list(range(count))
    assert (plan.offset[long] == 0).all() and (plan.segment[long] == 1).all()
    np.testing.assert_array_equal(plan.rank[long], rank[long] if stay else np.arange(count) % 4)
    rest = place(items_of(items.length[~long]), rank[~long])
    np.testing.assert_array_equal(plan.capacity[count:], rest.capacity)
    np.testing.assert_array_equal(plan.microbatch[~long], rest.microbatch + count)
    for name in ("rank", "offset", "segment"):
        np.testing.assert_array_equal(getattr(plan, name)[~long], getattr(rest, name))


def test_statistics_share_a_long_row_among_all_ranks():
    items = items_of([200, 64, 64, 64, 64])
    statistics = phase_statistics(assign(SPEC, items), items, SPEC)
    assert statistics["language/slots"] == 256 + 4 * 64
    assert statistics["language/max_over_mean"] == statistics["language/synchronised"] == 1


def test_an_item_longer_than_a_long_row_is_refused():
    with pytest.raises(
        ValueError,
        match=r"257 slots \(example 1 .*long row holds 256: raise phases\.language\.long_c",
    ):
        assign(SPEC, items_of([3, 257]))
