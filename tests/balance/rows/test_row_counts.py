"""Sets of rows: complete, in order, and with bounds that no plan gets below."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import PhaseItems, PhaseSpec, RowClass, row_classes
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.rows.row_counts import ROW_SEARCH, RowNeeds, row_counts, row_needs, row_steps
from jaxmllm.phases import encoder_phase

LENGTHS = st.lists(st.integers(1, 32), max_size=40)
CLASSES = st.sampled_from([(32,), (64,), (64, 16), (48, 32, 8), (96, 24, 8), (40, 36, 32)])
SHARED = st.sampled_from(
    [
        (RowClass(16, 4),),
        (RowClass(16, 4), RowClass(8, 4), RowClass(16)),
        (RowClass(8, 4), RowClass(16), RowClass(4, 2)),
        (RowClass(8, 4), RowClass(12, 2), RowClass(20)),
        (RowClass(24, 2), RowClass(24), RowClass(4)),
    ]
)


@settings(max_examples=100, deadline=None)
@given(CLASSES, st.data())
def test_row_counts_are_complete_and_ordered(capacities, data):
    """The first 40 sets against all products of counts: none that meets the needs with
    fewer slots is missing."""
    classes = len(capacities)
    numbers = st.lists(st.integers(0, 3), min_size=classes, max_size=classes)
    slots = np.cumsum(data.draw(numbers)) * 20
    rows = np.cumsum(data.draw(numbers))
    listed = [
        tuple(c.tolist())
        for c in itertools.islice(row_counts(row_classes(capacities), 1, RowNeeds(slots, rows)), 40)
    ]
    if not rows.any():
        assert listed == [(0,) * classes]
        return
    totals = [(int(np.dot(counts, capacities)), sum(counts)) for counts in listed]
    assert totals == sorted(totals) and len(set(listed)) == len(listed)
    legal = [
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
    assert set(legal) <= set(listed)


@settings(max_examples=100, deadline=None)
@given(
    LENGTHS, CLASSES.map(row_classes) | SHARED, st.sampled_from([4, 8]), st.sampled_from([2, 1000])
)
def test_needs_never_exceed_a_plan(lengths, classes, ranks, max_segments):
    """The lower bounds hold for the rows of an actual plan, and that set of rows is among
    those that are tried."""
    spec = PhaseSpec(encoder_phase("vision"), ranks, classes, max_segments, 1, ItemCost(5, 1))
    items = items_of(lengths)
    plan = assign(spec, items)
    counts = counts_of(plan, classes)
    rows = counts * [ranks // row_class.span for row_class in classes]
    needs = row_needs(spec, items.length, np.zeros(len(lengths), np.int64), 1)
    assert (np.cumsum(counts * spec.capacities) >= needs.slots).all()
    assert (np.cumsum(rows) >= needs.rows).all()
    sets = row_counts(classes, ranks, needs)
    slots = int(plan.capacity.sum())
    tried = itertools.takewhile(lambda tried: tried @ spec.capacities <= slots, sets)
    assert any((counts == row_set).all() for row_set in tried)


def test_rows_are_needed_for_items_of_which_few_fit_one():
    """Only two items of 40 slots share a row of 100, although five would fill
    two rows by their slots."""
    spec = PhaseSpec(encoder_phase("vision"), 4, row_classes((100, 50)), 9, 1, ItemCost(5, 1))
    needs = row_needs(spec, np.array([40] * 80), np.zeros(80, np.int64), 1)
    assert needs.slots.tolist() == [0, 800] and needs.rows.tolist() == [0, 40]
    assert row_needs(spec, np.array([9, *[60] * 9]), np.zeros(10, np.int64), 1).rows.tolist() == [
        9,
        9,
    ]


@pytest.mark.parametrize("lengths", [[4000] * 64, [300] * 64, [3000, 1500, 700, 30] * 9])
def test_given_capacities_with_every_span_are_planned(lengths):
    """With many classes, and items that few of them hold, the list of sets stays short."""
    unordered = [RowClass(capacity, span) for capacity in (512, 384, 256) for span in (8, 4, 2, 1)]
    classes = tuple(sorted(unordered, key=lambda c: (c.slots, c.span), reverse=True))
    spec = PhaseSpec(encoder_phase("vision"), 8, classes, 1000, 1, ItemCost(1000, 1))
    plan = assign(spec, items_of(lengths))
    assert 8 * int(plan.capacity.sum()) < 1.4 * sum(lengths)
    assert len(row_steps(classes, (999,) * 9)) <= ROW_SEARCH.most_steps


def test_items_of_one_length_take_the_rows_that_they_fill():
    """Also where those rows are not of the largest class, and more of them are needed than
    keep the totals fine."""
    classes = (RowClass(1000, 2), RowClass(750, 2), RowClass(1000), RowClass(750))
    spec = PhaseSpec(encoder_phase("vision"), 8, classes, 1000, 1, ItemCost(1000, 1))
    plan = assign(spec, items_of([1500] * 100))
    assert set(plan.capacity) == {750} and plan.microbatches == 25


def items_of(lengths) -> PhaseItems:
    length = np.array(lengths, np.int64)
    zeros = np.zeros(len(length), np.int32)
    return PhaseItems(length, length, np.arange(len(length), dtype=np.int32), zeros, zeros)


def counts_of(plan, classes) -> np.ndarray:
    """Microbatches of each class."""
    return np.array(
        [
            ((plan.capacity == row_class.capacity) & (plan.span == row_class.span)).sum()
            for row_class in classes
        ]
    )


@settings(max_examples=100, deadline=None)
@given(SHARED, st.sampled_from([4, 8, 16]), st.data())
def test_sets_of_shared_rows_are_ordered_and_meet_the_needs(classes, ranks, data):
    numbers = st.lists(st.integers(0, 9), min_size=len(classes), max_size=len(classes))
    needs = RowNeeds(np.cumsum(data.draw(numbers)) * 5, np.cumsum(data.draw(numbers)) + 1)
    capacity = [row_class.capacity for row_class in classes]
    rows = [ranks // row_class.span for row_class in classes]
    listed = [counts.tolist() for counts in itertools.islice(row_counts(classes, ranks, needs), 60)]
    assert len(listed) == 60
    totals = [(int(np.dot(counts, capacity)), sum(counts)) for counts in listed]
    assert totals == sorted(totals) and len({tuple(counts) for counts in listed}) == 60
    for counts in listed:
        assert (np.cumsum(np.multiply(counts, capacity)) >= needs.slots).all()
        assert (np.cumsum(np.multiply(counts, rows)) >= needs.rows).all()
