"""Placing the items of one phase: which row, which microbatch, which rank.

    row_counts      microbatches of each class, fewest slots first       row_counts.py
    _fill_rows      items into their rows, which are balanced            pack.py, level.py
    _arrange_rows   similar rows into one microbatch, then rows to ranks

A microbatch of a class of span g has R / g rows, each of them on g neighbouring ranks.

Letters: N items, R ranks, M microbatches, K row classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, sums_by
from jaxmllm.balance.records import PhaseItems, PhasePlan, PhaseSpec
from jaxmllm.balance.rows.level import (
    ATTENTION,
    COST,
    SLOTS,
    RowsByClass,
    RowState,
    balance_attention,
    balance_rows,
    fix_overflow,
)
from jaxmllm.balance.rows.pack import best_fit, fill_by_cost, first_fit, lay_out
from jaxmllm.balance.rows.row_counts import ROW_SEARCH, row_counts, row_needs, wanted_slots


def assign(spec: PhaseSpec, items: PhaseItems) -> PhasePlan:
    """Place every item of a phase freely over all ranks (A1 of OrchMLLM, arXiv 2503.23830, under
    row capacities).

    Returns:
      The plan, with `pool` and `pool_offset` left at zero: routes.py sets them.

    Raises:
      ValueError: an item is longer than the largest row.
    """
    _check_lengths(spec, items)
    cost = item_costs(spec, items)
    if not len(cost):
        return _phase_plan(spec, np.zeros(len(spec.classes), np.int64), cost, cost, cost)
    amounts = (items.length, np.ones_like(items.length), cost, attention_costs(spec, items))
    within = ROW_SEARCH.stop_within
    good_enough = ceil_divide(int(cost.sum()) * (within + 1), within * spec.ranks)
    best: tuple[int, _FilledRows] | None = None  # score, rows
    max_slots = 0
    tries = 0
    for row_set in _row_sets(spec, items.length, cost):
        if best is not None and (row_set.slots > max_slots or tries == ROW_SEARCH.tries):
            break
        filled = _fill_rows(spec, amounts, row_set)
        if filled is None:
            continue
        if best is None:  # the first set that holds all items has the fewest slots
            max_slots = row_set.slots * (ROW_SEARCH.extra_slots + 1) // ROW_SEARCH.extra_slots
        tries += 1
        placing = _arrange_rows(filled, spec, COST)
        score = row_set.slots * placing.waits * _imbalance_factor(placing)
        if best is None or score < best[0]:
            best = score, filled
        if placing.waits <= good_enough:
            break
    assert best is not None, "one row for every item always suffices"
    _, filled = best
    balance_attention(filled.state, filled.classes)
    placing = _arrange_rows(filled, spec, ATTENTION)
    return _phase_plan(spec, filled.counts, placing.microbatch, placing.rank, items.length)


def assign_in_place(spec: PhaseSpec, items: PhaseItems, rank: Longs) -> PhasePlan:
    """Pack the items of each rank, in order, on that rank: the plan without balancing.

    Args:
      rank: [N] rank of each item.
    """
    _check_lengths(spec, items)
    # A set of rows that is too small most likely fails on the rank with most slots, so that rank
    # is tried first.
    fullest_first = np.argsort(-sums_by(rank, items.length, spec.ranks), kind="stable")
    ends = np.cumsum(np.bincount(rank, minlength=spec.ranks))[:-1]
    items_of_ranks = np.split(np.argsort(rank, kind="stable"), ends)
    assert all(row_class.span == 1 for row_class in spec.classes), "shared rows need balancing"
    for counts in row_counts(spec.classes, 1, row_needs(spec, items.length, rank, spec.ranks)):
        capacity = np.repeat(np.array(spec.capacities, np.int64), counts)
        microbatch = np.empty(len(rank), np.int64)
        for rank_number in fullest_first:
            members = items_of_ranks[rank_number]
            # A rank has one row in each microbatch, so its row numbers are microbatch numbers.
            row_of = first_fit(items.length[members], capacity, spec.max_segments)
            if row_of is None:
                break
            microbatch[members] = row_of
        else:
            return _phase_plan(spec, counts, microbatch, rank, items.length)
    raise AssertionError("one row for every item always suffices")


def item_costs(spec: PhaseSpec, items: PhaseItems) -> Longs:
    """Costs of items: [N].

    They are shifted right until their sum is below 2**53. Sums are then exact both as int64 and as
    float64, and so the same on every host.
    """
    before, after = _shifts(spec, items)
    cost: Longs = spec.cost.shifted(before).of(items.length, items.extra) >> after
    return cost


def attention_costs(spec: PhaseSpec, items: PhaseItems) -> Longs:
    """The part of `item_costs` that is attention: [N]."""
    before, after = _shifts(spec, items)
    cost: Longs = spec.cost.shifted(before).attention(items.length, items.extra) >> after
    return cost


def _shifts(spec: PhaseSpec, items: PhaseItems) -> tuple[int, int]:
    """Bits by which to shift costs right: (coefficients, before they are multiplied by lengths;
    products)."""
    largest = spec.cost.of(*items.most)
    before = max(0, largest.bit_length() - 62)  # a product must fit int64
    return before, max(0, (len(items.length) * largest).bit_length() - 53 - before)


def part_costs(plan: PhasePlan, cost: Longs, ranks: int) -> Longs:
    """Cost of each rank's row, or of its part of a shared row, rounded up: [M, R].

    Args:
      cost: [N] cost of each item.
    """
    row = plan.microbatch.astype(np.int64) * ranks + plan.rank
    rank_costs = sums_by(row, cost, plan.microbatches * ranks).reshape(-1, ranks)
    for span in np.unique(plan.span[plan.span > 1]).tolist():
        shared = plan.span == span
        # `rank_costs` has a shared row's cost at the first rank of its group.
        part_cost = ceil_divide(rank_costs[shared][:, ::span], span)
        rank_costs[shared] = np.repeat(part_cost, span, axis=1)
    return rank_costs


def largest_share(plan: PhasePlan, cost: Longs) -> int:
    """The largest cost that an item has for one of the ranks that hold it, rounded up.

    Args:
      cost: [N] cost of each item.
    """
    return int(ceil_divide(cost, plan.span[plan.microbatch].astype(np.int64)).max(initial=0))


def rank_floor(cost: Longs, ranks: int) -> int:
    """Lower bound on the load of the costliest rank when each item, of cost [N], is on one rank."""
    return max(ceil_divide(int(cost.sum()), ranks), int(cost.max(initial=0)))


# ---------------------------------------------------------------------------- sets of rows


@dataclass(frozen=True)
class _RowSet:
    counts: Longs  # [K] microbatches of each class
    slots: int  # of all these microbatches, per rank
    try_best_fit: bool  # whether `best_fit` is tried where filling by cost fails


def _row_sets(spec: PhaseSpec, length: Longs, cost: Longs) -> Iterator[_RowSet]:
    """Sets of rows that are worth trying, fewest slots first."""
    sizes = np.array(spec.capacities, np.int64)
    anywhere = np.zeros(len(length), np.int64)  # one group of all ranks: items move freely
    roomy_slots = wanted_slots(
        length, cost, spec.ranks, max(row_class.span for row_class in spec.classes)
    )
    sets = row_counts(spec.classes, spec.ranks, row_needs(spec, length, anywhere, 1))
    # The loop looks one set ahead, because whether a set is worth trying also depends on how much
    # larger the next one is.
    counts = next(sets)
    for next_counts in sets:
        slots = int(counts @ sizes)
        next_slots = int(next_counts @ sizes)
        much_larger = next_slots * ROW_SEARCH.similar_slots > slots * (ROW_SEARCH.similar_slots + 1)
        try_best_fit = len(length) <= ROW_SEARCH.few_items or much_larger
        if try_best_fit or slots * spec.ranks >= roomy_slots:
            yield _RowSet(counts, slots, try_best_fit)
        counts = next_counts


def _imbalance_factor(placing: _Placing) -> int:
    """Factor of the score of a set of rows: a power of the costliest rank's cost, which counts as
    1/100 above its lower bound at least. Scaled by `stop_within` to stay an integer."""
    within = ROW_SEARCH.stop_within
    floor = placing.rank_floor * (within + 1)
    return max(placing.costliest_rank * within, floor) ** ROW_SEARCH.imbalance_power


# ---------------------------------------------------------------------------- rows and their places


@dataclass(frozen=True)
class _FilledRows:
    """Rows that hold all items."""

    counts: Longs  # [K] microbatches of each class
    state: RowState
    classes: RowsByClass  # the classes that have rows


def _fill_rows(spec: PhaseSpec, amounts: Sequence[Longs], row_set: _RowSet) -> _FilledRows | None:
    """Place all items in a set of rows; None where they do not fit.

    Args:
      amounts: arrays [N], what each item takes: slots, segments, cost and attention, as in
        `RowState`.
    """
    # Rows are numbered class by class: those of class k come before those of class k + 1.
    span = np.array([row_class.span for row_class in spec.classes])
    row_slots = np.array([row_class.slots for row_class in spec.classes], np.int64)
    rows_of_classes = row_set.counts * (spec.ranks // span)
    capacity = np.repeat(row_slots, rows_of_classes)
    state = _pack(amounts, capacity, spec.max_segments, row_set.try_best_fit)
    if state is None:
        return None
    end = np.cumsum(rows_of_classes)
    rows = [rows for rows in np.split(np.arange(end[-1]), end[:-1]) if len(rows)]
    classes = RowsByClass(rows, span[rows_of_classes > 0].tolist(), spec.ranks)
    balance_rows(state, classes)
    return _FilledRows(row_set.counts, state, classes)


def _pack(
    amounts: Sequence[Longs], capacity: Longs, max_segments: int, try_best_fit: bool
) -> RowState | None:
    """Rows filled by cost or, where that overflows, as tightly as possible; None where items do not
    fit."""
    length = amounts[SLOTS]
    cost = amounts[COST]

    def state_of(row_of: Longs) -> RowState:
        limits = (capacity, max_segments, 0, 0)  # costs are balanced, not limited
        return RowState.from_limits(row_of, amounts, limits, len(capacity))

    row_of = fill_by_cost(length, cost, capacity, max_segments)
    if row_of is not None:
        state = state_of(row_of)
        if fix_overflow(state, search=len(length) <= ROW_SEARCH.very_few_items):
            return state
    row_of = best_fit(length, capacity, max_segments) if try_best_fit else None
    return None if row_of is None else state_of(row_of)


@dataclass(frozen=True)
class _Placing:
    microbatch: Longs  # [N]
    rank: Longs  # [N]
    waits: int  # sum over microbatches of the slowest rank's cost: of its row, or part of a row
    costliest_rank: int  # total cost of the costliest rank
    rank_floor: int  # lower bound on that total while items stay in the classes of their rows


def _arrange_rows(filled: _FilledRows, spec: PhaseSpec, by: int) -> _Placing:
    """Sort the rows of a class, cut them into microbatches, and assign the costliest row of each to
    the group of ranks with the least total so far.

    Args:
      by: index of the amount that should be nearly the same in all rows of a microbatch.
    """
    counts = filled.counts
    row_of = filled.state.row_of
    cost = filled.state.amounts[COST, :-1]
    span_of_class = np.array([row_class.span for row_class in spec.classes])
    span = np.repeat(span_of_class, counts)  # [M]
    rows_of_classes = counts * (spec.ranks // span_of_class)
    class_of_row = np.repeat(np.arange(len(counts)), rows_of_classes)
    row_cost = sums_by(row_of, cost, len(class_of_row))
    row_amount = sums_by(row_of, filled.state.amounts[by, :-1], len(class_of_row))
    # The last key counts first: sorted by class, as microbatches are numbered; then by the amount,
    # so that neighbours have nearly the same; then by cost.
    order = np.lexsort((-row_cost, -row_amount, class_of_row))  # rows by microbatch
    microbatch_of_row = np.empty(len(order), np.int64)
    rank_of_row = np.empty(len(order), np.int64)
    widest = int(span.max())
    # Total cost of each rank in units of 1 / widest, which make every rank's part of a row whole.
    total = np.zeros(spec.ranks, np.int64)
    waits = 0
    start = 0
    for microbatch, held_by in enumerate(span.tolist()):
        groups = spec.ranks // held_by
        members = order[start : start + groups]
        # Rows are sorted costliest first and groups, below, least total first: the n-th row is
        # assigned to the n-th group.
        members = members[np.argsort(-row_cost[members], kind="stable")]
        start += groups
        total_of_groups = total.reshape(groups, held_by)  # a view
        group = np.argsort(total_of_groups.sum(axis=1), kind="stable")
        total_of_groups[group] += row_cost[members, None] * (widest // held_by)
        microbatch_of_row[members] = microbatch
        rank_of_row[members] = group * held_by
        waits += ceil_divide(int(row_cost[members[0]]), held_by)
    microbatch_of_item = microbatch_of_row[row_of]
    largest_part = int(ceil_divide(cost, span[microbatch_of_item]).max())
    return _Placing(
        microbatch=microbatch_of_item,
        rank=rank_of_row[row_of],
        waits=waits,
        costliest_rank=ceil_divide(int(total.max()), widest),
        rank_floor=max(ceil_divide(int(cost.sum()), spec.ranks), largest_part),
    )


def _phase_plan(
    spec: PhaseSpec, counts: Longs, microbatch: Longs, rank: Longs, length: Longs
) -> PhasePlan:
    """The plan of items with the given microbatches and ranks, laid out in their rows."""
    capacity = np.repeat(np.array(spec.capacities, np.int32), counts)
    span = np.repeat(np.array(spec.spans, np.int32), counts)
    # Row m * R + r is the row of microbatch m whose first rank is r; where rows are shared, the
    # numbers of the other ranks have no items.
    row_slots = np.repeat(capacity.astype(np.int64) * span, spec.ranks)
    blocks = spec.row_blocks(capacity, span, spec.ranks)
    offset, segment = lay_out(microbatch * spec.ranks + rank, length, row_slots, blocks)
    return PhasePlan(
        capacity=capacity,
        span=span,
        pool=np.zeros_like(capacity),
        pool_offset=np.zeros_like(capacity),
        microbatch=microbatch.astype(np.int32),
        rank=rank.astype(np.int32),
        offset=offset,
        segment=segment,
    )


def _check_lengths(spec: PhaseSpec, items: PhaseItems) -> None:
    if (items.length > spec.longest_row).any():
        worst = int(items.length.argmax())
        length = int(items.length[worst])
        span = _span_that_holds(length, spec)
        remedy = (
            f"rows of span {span} would hold it (phases.{spec.name}.spans), or " if span else ""
        )
        raise ValueError(
            f"an item of phase {spec.name!r} has {length} slots "
            f"(example {items.example[worst]} of the batch), but its largest row holds "
            f"{spec.longest_row}: {remedy}raise phases.{spec.name}.capacities or "
            f"phases.{spec.name}.max_capacity, or limit the size of items"
        )


def _span_that_holds(length: int, spec: PhaseSpec) -> int | None:
    """The smallest span, of those that divide the ranks, at which a row of the largest capacity
    would hold an item; None where even all ranks together would not."""
    least_span = ceil_divide(length, max(spec.capacities))
    spans = range(least_span, spec.ranks + 1)
    return next((span for span in spans if spec.ranks % span == 0), None)
