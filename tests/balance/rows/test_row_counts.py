"""Sets of rows: complete, in order, and bounds that no plan gets below."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseItems, PhaseSpec, row_classes
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.rows.row_counts import RowNeeds, row_counts, row_needs
from jaxmllm.phases import encoder_phase

LENGTHS = st.lists(st.integers(1, 32), max_size=40)
CLASSES = st.sampled_from([(32,), (64,), (64, 16), (48, 32, 8), (96, 24, 8), (40, 36, 32)])


@settings(max_examples=100, deadline=None)
@given(CLASSES, st.data())
def test_row_counts_are_complete_and_ordered(capacities, data):
    classes = len(capacities)
    numbers = st.lists(st.integers(0, 3), min_size=classes, max_size=classes)
    slots = np.cumsum(data.draw(numbers)) * 20
    rows = np.cumsum(data.draw(numbers))
    found = [
        tuple(c.tolist())
        for c in itertools.islice(row_counts(capacities, RowNeeds(slots, rows)), 40)
    ]
    if not rows.any():
        assert found == [(0,) * classes]
        return
    totals = [(int(np.dot(counts, capacities)), sum(counts)) for counts in found]
    assert totals == sorted(totals) and len(set(found)) == len(found)
    within = [
        counts
        for counts in itertools.product(
            range(totals[-1][0] // capacities[0] + 1),
            *(
                range(max(2, (large - 1) // small) + 1)
                for large, small in itertools.pairwise(capacities)
            ),
        )
        if np.dot(counts, capacities) < totals[-1][0]
        and (np.cumsum(np.multiply(counts, capacities)) >= slots).all()
        and (np.cumsum(counts) >= rows).all()
    ]
    assert set(within) <= set(found)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, CLASSES, st.sampled_from([1, 2, 3]), st.sampled_from([2, 1000]))
def test_needs_never_exceed_a_plan(lengths, capacities, ranks, max_segments):
    """The lower bounds hold for the rows of an actual plan."""
    spec = PhaseSpec(
        encoder_phase("vision"), ranks, row_classes(capacities), max_segments, 1, ItemCost(5, 1)
    )
    length = np.array(lengths, np.int64)
    zeros = np.zeros(len(length), np.int32)
    items = PhaseItems(length, length, np.arange(len(length), dtype=np.int32), zeros, zeros)
    plan = assign(spec, items)
    counts = np.array([(plan.capacity == capacity).sum() for capacity in capacities])
    needs = row_needs(spec, items.length, np.zeros(len(lengths), np.int64), 1)
    assert (np.cumsum(counts * capacities) >= needs.slots).all()
    assert (np.cumsum(counts) >= needs.rows).all()
