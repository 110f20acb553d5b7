"""Row classes: checked where a config gives capacities, else chosen from sampled loads.

    candidates --a bound, in all loads--> a few best --really packed, in some loads--> row classes
    row classes, one of them moved, or one more ------ in the same way --------------> row classes, until none is better

They minimise, summed over the loads, what the slowest rows cost with their padding, plus the
overhead of every microbatch and the price of gathering keys and values in rows that several ranks
hold. Fewer classes win ties, for each is a program to compile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxmllm.arrays import INT64_MAX, Floats, Longs, ceil_divide, round_up
from jaxmllm.balance.records import RowClass
from jaxmllm.balance.rows.row_counts import by_capacity
from jaxmllm.balance.sizes.inputs import (
    CAPACITY_SEARCH,
    Capacities,
    Classes,
    SizingInputs,
    phase_spec,
)
from jaxmllm.balance.sizes.loads import Load
from jaxmllm.balance.statistics import slowest_cost
from jaxmllm.compiled import compiled
from jaxmllm.config.schema import MOST_ROW_CLASSES, ConfigError

INT32_MAX = int(np.iinfo(np.int32).max)


def choose_classes(inputs: SizingInputs, loads: Sequence[Load], share: float) -> Classes:
    """Up to `row_classes` classes of rows that hold the loads of a phase with little waste, of the
    spans that are allowed; of `auto` more as long as each saves enough.

    Args:
      share: of a step's FLOPs that are the phase's.

    Raises:
      ConfigError: no row that `max_capacity` and the spans allow holds the longest item.
    """
    largest = inputs.largest_capacity
    spans = [span for span in inputs.spans if smallest_capacity(inputs, span) <= largest]
    if not spans:
        raise ConfigError(_too_small(inputs))
    if not loads:
        return (RowClass(smallest_capacity(inputs, spans[0]), spans[0]),)
    judge = _Judge(inputs, loads)
    by_span = {span: _Candidates(judge, span) for span in spans}
    # The bound knows slots, not waits: rows of each span have their best packed.
    best = judge.best([classes for of_span in by_span.values() for classes in of_span.best()])
    candidates = by_span[best[0].span]
    chosen = _moved(best, candidates, judge)
    if inputs.config.row_classes != "auto":
        return chosen
    return _with_more(chosen, candidates, judge, share)


def _moved(classes: Classes, candidates: _Candidates, judge: _Judge) -> Classes:
    """The set with other classes in the place of some, one after the other, as long as each saves more than chance."""
    while True:
        moved = judge.best([classes, *candidates.with_one_moved(classes)])
        worth = CAPACITY_SEARCH.capacity_worth * judge.expected(classes, 1)
        if judge.expected(moved, 1) >= worth:
            return classes
        classes = moved


def _with_more(chosen: Classes, candidates: _Candidates, judge: _Judge, share: float) -> Classes:
    """More classes than those chosen, one after the other, as long as each saves enough of a step, or two of them as
    much as two should."""
    # So far the phase's cost has to fall for a step to fall by `class_saves`: to 0 where the phase
    # is no larger part of a step than that.
    enough = 1 - CAPACITY_SEARCH.class_saves / max(share, CAPACITY_SEARCH.class_saves)
    further, added = chosen, 0  # with so many classes more, which do not save enough yet
    for _ in range(CAPACITY_SEARCH.usual_classes, MOST_ROW_CLASSES):
        # Not even rows without waste would save what so many more classes have to.
        if judge.least > enough ** (added + 1) * judge.expected(chosen, 1):
            break
        sets = candidates.with_one_more(further)
        # Where there is that much left to save even below the best bound, sets of one more class
        # are also made anew, not only around those chosen.
        if not added and judge.least <= enough * candidates.bound:
            candidates.extend()
            sets += candidates.best()
        further, added = _moved(judge.best([further, *sets]), candidates, judge), added + 1
        if judge.expected(further, 1) <= enough**added * judge.expected(chosen, 1):
            chosen = further
            added = 0
        elif added == 2:
            break
    return chosen


def smallest_capacity(inputs: SizingInputs, span: int) -> int:
    """The least capacity at which a row of `span` ranks holds the longest item."""
    return inputs.alignment.round_up(max(ceil_divide(inputs.longest, span), 1))


def _too_small(inputs: SizingInputs) -> str:
    widest = max(inputs.spans)
    needed = smallest_capacity(inputs, widest)
    ranks = f" on each of {widest} ranks" if widest > 1 else ""
    if inputs.config.max_capacity == "auto":
        return (
            f"phases.{inputs.name}.max_capacity (auto): the largest item has {inputs.longest} slots, which takes a row "
            f"of {needed}{ranks}, and the memory of a device is estimated to hold {inputs.fitting}; split the model "
            f"over more devices (mesh), keep less (components.{inputs.name}.remat), limit the size of items, or set "
            f"it to {needed}"
        )
    return (
        f"phases.{inputs.name}.max_capacity = {inputs.config.max_capacity} is too small: the "
        f"largest item has {inputs.longest} slots and rows come in multiples of "
        f"{inputs.alignment.unit(needed)}{ranks}; raise it to {needed} or limit the size of items"
    )


# ---------------------------------------------------------------------------- candidates


class _Candidates:
    """Sets of up to `row_classes` classes, of which the one with most slots has rows of `span`
    ranks, and the others of as many or the fewest allowed.

    The first holds much or all of a load, or just the longest item. The others are such shares of a
    load, too, where the first is larger than that; or parts of the median load, to hold what the
    first leaves over; or a little smaller than the one before: a few similar sizes allow finer
    totals; or parts of the first; or what holds a whole load, or the longest item of most.
    """

    def __init__(self, judge: _Judge, span: int):
        inputs = judge.inputs
        self.judge = judge
        self.span = span
        self.firsts = [
            RowClass(capacity, span)
            for capacity in _load_shares(judge) | {smallest_capacity(inputs, span)}
            if smallest_capacity(inputs, span) <= capacity <= inputs.largest_capacity
        ]
        self.largest_sets: list[Classes] = [(row_class,) for row_class in self.firsts]
        self.sets = set(self.largest_sets)
        self.further = [_Further(judge, of_ranks) for of_ranks in {span, min(inputs.spans)}]
        for _ in range(1, inputs.row_classes):
            self.extend()

    @property
    def bound(self) -> float:
        """Of the best set."""
        return min(map(self.judge.bound, self.sets))

    def best(self) -> list[Classes]:
        """The sets that are worth packing: the best of all, and of those whose rows all have this span. What gathering
        takes is in the bound, and waiting for the longest items, which it saves, is not."""
        packed = _of_span(self.judge.inputs, self.span, CAPACITY_SEARCH.first_packed)
        packed_sets = max(CAPACITY_SEARCH.least_packed, packed)
        alike = [classes for classes in self.sets if {c.span for c in classes} == {self.span}]
        best = (_best(sets, packed_sets, self.judge.bound) for sets in (self.sets, alike))
        return list(dict.fromkeys(itertools.chain(*best)))

    def extend(self) -> None:
        """Add a further class to the best sets of most classes."""
        extended = _of_span(self.judge.inputs, self.span, CAPACITY_SEARCH.extended)
        self.largest_sets = list(
            dict.fromkeys(
                (*classes, further_class)
                for classes in _best(self.largest_sets, extended, self.judge.bound)
                for of_ranks in self.further
                for further_class in of_ranks.classes_after(classes)
            )
        )
        self.sets.update(self.largest_sets)

    def with_one_moved(self, classes: Classes) -> list[Classes]:
        """A few sets that have another class in the place of one."""
        first_class = classes[0]
        beside = self._beside(classes)
        near_first = [
            RowClass(capacity, first_class.span) for capacity in self.further[0].near(first_class)
        ]
        return self._promising(
            (*classes[:index], other_class, *classes[index + 1 :])
            for index in range(len(classes))
            for other_class in (beside if index else self.firsts + near_first)
            if other_class not in classes
        )

    def with_one_more(self, classes: Classes) -> list[Classes]:
        """A few sets that have one class more."""
        return self._promising((*classes, further_class) for further_class in self._beside(classes))

    def _beside(self, classes: Classes) -> list[RowClass]:
        return [
            row_class for of_ranks in self.further for row_class in of_ranks.classes_beside(classes)
        ]

    def _promising(self, sets: Iterable[Classes]) -> list[Classes]:
        """The best by their bound of those that hold all items, each in the order of its rows' slots."""
        inputs = self.judge.inputs
        ordered = {
            tuple(sorted(classes, key=lambda row_class: row_class.slots, reverse=True))
            for classes in sets
        }
        valid = (
            classes
            for classes in ordered
            if classes[0].slots >= inputs.longest
            and max(row_class.capacity for row_class in classes) <= inputs.largest_capacity
            and all(larger.slots > smaller.slots for larger, smaller in itertools.pairwise(classes))
        )
        return _best(valid, CAPACITY_SEARCH.least_packed, self.judge.bound)


def _of_span(inputs: SizingInputs, span: int, number: int) -> int:
    """How many of a number of candidates have longest rows of `span` ranks: all for the fewest ranks, so that what
    would be chosen without other spans is among those compared; of each other span an equal part, if not too small."""
    parts = min(len(inputs.spans), CAPACITY_SEARCH.most_parts)
    return number if span == min(inputs.spans) else number // parts


def _load_shares(judge: _Judge) -> set[int]:
    """Capacities of which a few rows hold much or all of a load."""
    inputs = judge.inputs
    capacities: set[int] = set()
    loads = np.quantile(judge.slots, CAPACITY_SEARCH.load_quantiles, method="higher").tolist()
    for load in (judge.median, *loads):
        fewest = math.ceil(load / inputs.largest_capacity)
        numbers = range(fewest, fewest + CAPACITY_SEARCH.row_numbers)
        for rows, share in itertools.product(numbers, CAPACITY_SEARCH.load_shares):
            capacities.add(inputs.alignment.round_up(math.ceil(load * share / rows)))
    return capacities


class _Further:
    """Classes of rows of `span` ranks that may come after others."""

    def __init__(self, judge: _Judge, span: int):
        self.span = span
        self.alignment = judge.inputs.alignment
        self.largest_capacity = judge.inputs.largest_capacity
        self.median = judge.median
        self.shares = self._parts(
            judge.median, (1 / share for share in CAPACITY_SEARCH.load_shares)
        )
        self.leftovers = self._parts(judge.median, CAPACITY_SEARCH.leftover_divisors)
        self.steps = self._parts(judge.median, CAPACITY_SEARCH.step_divisors)
        # Capacities that hold a whole load, from the smaller ones to the larger
        self.wholes = self._parts_of_quantiles(
            judge.slots, CAPACITY_SEARCH.whole_quantiles, CAPACITY_SEARCH.expected_fill
        )
        # Capacities that hold the longest item of most loads, if not of all data
        self.longest = self._parts_of_quantiles(
            np.array([load.items.length.max() for load in judge.loads]),
            CAPACITY_SEARCH.longest_quantiles,
            span,
        )

    def _parts_of_quantiles(
        self, slots: Longs, quantiles: Sequence[float], divisor: float
    ) -> set[int]:
        """Of each of these quantiles of the loads' slots one part."""
        amounts = np.quantile(slots, quantiles, method="higher").tolist()
        return {capacity for amount in amounts for capacity in self._parts(amount, (divisor,))}

    def _parts(self, slots: float, divisors: Iterable[float]) -> set[int]:
        return {self._rounded(math.ceil(slots / divisor)) for divisor in divisors}

    def _rounded(self, slots: int) -> int:
        return self.alignment.round_up(slots)

    def classes_after(self, classes: Classes) -> list[RowClass]:
        """Classes whose rows have fewer slots than those of the last of `classes`."""
        last_class = classes[-1]
        capacities = self._capacities(classes)
        capacities |= {self._rounded(last_class.capacity - step) for step in self._steps(classes)}
        if last_class.span > 1:
            capacities.add(self._rounded(last_class.capacity))  # of fewer ranks
        return self._smaller(capacities, classes[0], last_class)

    def classes_beside(self, classes: Classes) -> list[RowClass]:
        """Classes whose rows have fewer slots than those of the first of `classes`: those that may come after it, and
        some near to all."""
        capacities = self._capacities(classes).union(*map(self.near, classes))
        return self._smaller(capacities, classes[0], classes[0])

    def near(self, row_class: RowClass) -> set[int]:
        """Capacities a little above and below that of a class."""
        unit = self.alignment.unit(row_class.capacity)
        steps = self.steps | {unit * units for units in CAPACITY_SEARCH.unit_steps}
        capacities = (row_class.capacity + sign * step for step in steps for sign in (1, -1))
        return {self._rounded(slots) for slots in capacities if slots > 0}

    def _capacities(self, classes: Classes) -> set[int]:
        first_capacity = classes[0].capacity
        capacities = self.leftovers | self.longest | self.wholes
        if first_capacity > self.median:
            capacities |= self.shares | self._parts(first_capacity, CAPACITY_SEARCH.first_divisors)
        return capacities

    def _smaller(self, capacities: set[int], first: RowClass, last: RowClass) -> list[RowClass]:
        """Classes of these capacities whose rows have fewer slots than those of `last`."""
        capacity_bound = min(max(first.capacity, self.median), self.largest_capacity)
        return [
            RowClass(capacity, self.span)
            for capacity in sorted(capacities)
            if 0 < capacity * self.span < last.slots and capacity <= capacity_bound
        ]

    def _steps(self, classes: Classes) -> set[int]:
        """Steps down to a further class of similar size: once there is one, all steps are equal."""
        if len(classes) > 1 and classes[0].capacity < 2 * classes[1].capacity:
            return {classes[0].capacity - classes[1].capacity}
        return self.steps


def _best(
    candidates: Iterable[Classes], size: int, cost: Callable[[Classes], float]
) -> list[Classes]:
    """The `size` candidates of least cost; of equal ones those of fewer and smaller classes."""
    return sorted(candidates, key=lambda classes: (cost(classes), len(classes), classes))[:size]


# ---------------------------------------------------------------------------- their costs


@dataclass(frozen=True)
class _Needs:
    """What the loads need at least for their items over some length: [loads]."""

    slots: Longs  # of a rank
    rows: Longs  # of all ranks that exchange items


class _Judge:
    """Costs of sets of classes, in slots of a rank, that hold the loads of one phase."""

    def __init__(self, inputs: SizingInputs, loads: Sequence[Load]):
        self.inputs = inputs
        self.loads = loads
        self.slots = np.array([load.slots for load in loads])
        self.median = float(np.median(self.slots))
        self.overheads = np.array([load.microbatch_overhead for load in loads])
        # Where items stay with their example, each rank needs rows for its own.
        self.ranks = inputs.ranks if loads[0].item_rank is None else 1
        slots = sum(int(load.items.length.sum()) for load in loads)
        flops = sum(inputs.flops.total(load.items.length, load.items.extra) for load in loads)
        gather = inputs.gather_cost * slots / flops if flops else 0.0
        self.gather = max(gather, CAPACITY_SEARCH.least_gather)
        items = max(len(load.items.length) for load in loads)
        affordable = CAPACITY_SEARCH.packed_items // (CAPACITY_SEARCH.first_packed * items)
        self.packed_batches = max(1, min(CAPACITY_SEARCH.packed_batches, affordable))
        self.bounds = cache(self._bounds)  # asked for thrice of the candidates that are packed
        self.wanted = cache(self._wanted)
        self.needs_over = cache(self._needs_over)
        self.expected = cache(self._expected)  # packed once, though asked for again

    def best(self, sets: Sequence[Classes]) -> Classes:
        """The set of least expected cost: of all by packing a quarter of the batches, of the best by packing all."""
        finalists = _best(
            sets, CAPACITY_SEARCH.then_packed, lambda classes: self.expected(classes, 4)
        )
        return _best(finalists, 1, lambda classes: self.expected(classes, 1))[0]

    def _expected(self, classes: Classes, step: int) -> float:
        """The bound of all loads, times what packing some of them takes over their own bound: one in `step` of those
        that are packed."""
        packed = slice(0, self.packed_batches, step)
        packed_cost = self._packed(classes, self.loads[packed])
        return self.bound(classes) * packed_cost / float(self.bounds(classes)[packed].sum())

    def bound(self, classes: Classes) -> float:
        """The bound of all loads together."""
        return float(self.bounds(classes).sum())

    @property
    def least(self) -> float:
        """A bound for any classes: full rows, and a microbatch of each load."""
        return float(self.slots.sum() / CAPACITY_SEARCH.expected_fill + self.overheads.sum())

    def _packed(self, classes: Classes, loads: Sequence[Load]) -> float:
        spec = phase_spec(self.inputs, classes)
        cost = 0.0
        for load in loads:
            plan = load.plan(spec)
            items = load.items
            mean_cost = spec.cost.total(items.length, items.extra) / int(items.length.sum())
            cost += slowest_cost(plan, items, spec, spec.cost) / mean_cost
            capacity = plan.capacity.astype(np.int64)
            cost += self.gather * int((capacity * (plan.span - 1)).sum())
            cost += load.microbatch_overhead * plan.microbatches
        return cost

    def _bounds(self, classes: Classes) -> Floats:
        """Cost of the fewest rows that may hold each load, filled as far as rows get: [loads]."""
        half_row = classes[0].slots // 2  # of the items over it, no two share a row
        slots = np.empty((len(self.loads), len(classes)), np.int64)
        rows = np.empty_like(slots)
        for k, row_class in enumerate(classes[1:]):  # no later class holds longer items
            slots[:, k] = self.needs_over(row_class.slots).slots
            rows[:, k] = self.needs_over(max(row_class.slots, half_row)).rows
        slots[:, -1] = self.wanted(max(row_class.span for row_class in classes))
        rows[:, -1] = self.needs_over(half_row).rows
        np.maximum(rows, slots > 0, out=rows)
        capacity = np.array([row_class.capacity for row_class in classes], np.int64)
        span = np.array([row_class.span for row_class in classes], np.int64)
        order = np.array(by_capacity(classes), np.int64)
        rows_of_microbatch = np.maximum(self.ranks // span, 1)
        counts = _fewest_slots(capacity, rows_of_microbatch, order, slots, rows)
        price = capacity * (1 + self.gather * (span - 1))
        return np.asarray(counts @ price + counts.sum(axis=1) * self.overheads)

    def _wanted(self, span: int) -> Longs:
        """`Load.wanted_slots` of all loads: [loads]."""
        return np.array([load.wanted_slots(self.inputs, span) for load in self.loads])

    def _needs_over(self, length: int) -> _Needs:
        """`Load.needs_over` of all loads."""
        slots, rows = np.array([load.needs_over(length) for load in self.loads]).T
        return _Needs(slots, rows)


@compiled
def _fewest_slots(
    capacity: Longs, rows: Longs, order: Longs, needs: Longs, rows_needed: Longs
) -> Longs:
    """Microbatches of each class that meet the needs of each load with fewest slots of a rank,
    then fewest microbatches: [loads, K].

    Args:
      capacity: [K] slots of a rank.
      rows: [K] rows of a microbatch.
      order: [K] classes by capacity, largest first: any number of the first, of the others as many
        as `row_counts` offers.
      needs: [loads, K] slots of a rank in the classes up to each.
      rows_needed: [loads, K] rows in the classes up to each.
    """
    loads, classes = needs.shape
    chosen = np.zeros((loads, classes), np.int64)
    counts = np.zeros(classes, np.int64)
    bounds = np.zeros(classes, np.int64)
    base = order[0]
    for load in range(loads):
        for index in range(1, classes):
            k = order[index]
            bounds[k] = max(2, (capacity[order[index - 1]] - 1) // capacity[k])
            if k < base:  # items may need such rows that none of the base hold
                slots = rows_left = 0
                for later in range(k, base):
                    slots = max(slots, needs[load, later])
                    rows_left = max(rows_left, rows_needed[load, later])
                bounds[k] += 2 * (-(-slots // capacity[k])) - (-rows_left // rows[k])
        # The search starts from what two classes reach, a combination that it will come by, too.
        best_slots = _slots_of_two(capacity, rows, base, needs[load], rows_needed[load])
        best_microbatches = INT64_MAX
        counts[:] = 0
        # `counts` goes through combinations as an odometer does, the smallest class fastest; that
        # of the base stays 0.
        while True:
            # Of the base as many as the others leave over.
            held = held_rows = missing = missing_rows = microbatches = 0
            enough = True
            for k in range(classes):
                held += counts[k] * capacity[k]
                held_rows += counts[k] * rows[k]
                microbatches += counts[k]
                open_slots = needs[load, k] - held
                open_rows = rows_needed[load, k] - held_rows
                # Rows before the base have to meet their needs by themselves: base rows are too
                # short for such items. From the base on it makes up what is missing.
                if k < base:
                    enough &= open_slots <= 0 and open_rows <= 0
                else:
                    missing = max(missing, open_slots)
                    missing_rows = max(missing_rows, open_rows)
            if enough and held + missing <= best_slots:
                needed = max(-(-missing // capacity[base]), -(-missing_rows // rows[base]))
                slots = held + needed * capacity[base]
                microbatches += needed
                if slots < best_slots or (slots == best_slots and microbatches < best_microbatches):
                    best_slots = slots
                    best_microbatches = microbatches
                    chosen[load] = counts
                    chosen[load, base] = needed
            # The next combination: too many of a class are followed by none of it and one more of
            # the next larger. Too many are also those that hold more than the best, whatever
            # smaller classes would add.
            index = classes - 1
            while index > 0:
                k = order[index]
                counts[k] += 1
                held += capacity[k]
                if counts[k] <= bounds[k] and held <= best_slots:
                    break
                held -= counts[k] * capacity[k]
                counts[k] = 0
                index -= 1
            if index == 0:
                break
    return chosen


@compiled
def _slots_of_two(capacity: Longs, rows: Longs, base: int, needs: Longs, rows_needed: Longs) -> int:
    """Slots of a rank in microbatches of the first class and of `base` alone that meet the needs of
    a load, [K]: where these are the same class, no bound."""
    if base == 0:
        return INT64_MAX
    first_microbatches = max(
        -(-needs[:base].max() // capacity[0]),
        -(-rows_needed[:base].max() // rows[0]),
    )
    missing = max(needs[base:].max() - first_microbatches * capacity[0], 0)
    missing_rows = max(rows_needed[base:].max() - first_microbatches * rows[0], 0)
    base_microbatches = max(-(-missing // capacity[base]), -(-missing_rows // rows[base]))
    return int(first_microbatches * capacity[0] + base_microbatches * capacity[base])


# ---------------------------------------------------------------------------- capacities of a config


def given_classes(capacities: Capacities, inputs: SizingInputs) -> Classes:
    """The capacities of a config, each in every span that is allowed, by the slots of a row.

    Raises:
      ConfigError: one is not a multiple of the alignment, they are not different, or no row holds
        the longest item.
    """
    checked = checked_capacities(capacities, inputs, max(inputs.spans))
    classes = [RowClass(capacity, span) for capacity in checked for span in inputs.spans]
    return tuple(sorted(classes, key=lambda c: (c.slots, c.span), reverse=True))


def checked_capacities(capacities: Capacities, inputs: SizingInputs, span: int = 1) -> Capacities:
    """The capacities of a config, descending.

    Args:
      span: most ranks that hold a row together.

    Raises:
      ConfigError: one is not a multiple of the alignment, they are not different, rows have more
        slots than are counted, or none holds the longest item.
    """
    key = f"phases.{inputs.name}.capacities"
    if max(capacities, default=0) * span > INT32_MAX:
        raise ConfigError(
            f"{key}: {max(capacities)} slots on each of {span} ranks are more than {INT32_MAX}, up to which places in "
            "a row are counted; lower it"
        )
    for capacity in capacities:
        unit = inputs.alignment.unit(capacity)
        if capacity % unit:
            raise ConfigError(
                f"{key}: {capacity} is not a multiple of {unit} (whole attention blocks and whole language tokens); "
                f"use {round_up(capacity, unit)}, or change phases.{inputs.name}.block"
            )
    if len(set(capacities)) < len(capacities) or not capacities:
        raise ConfigError(f"{key} must be one or more different numbers, not {list(capacities)}")
    if max(capacities) * span < inputs.longest:
        ranks = f" on each of {span} ranks" if span > 1 else ""
        raise ConfigError(
            f"{key}: the largest, {max(capacities)}{ranks}, is too small for the largest item "
            f"({inputs.longest} slots); raise it to {smallest_capacity(inputs, span)} or "
            f"limit the size of items"
        )
    return tuple(sorted(capacities, reverse=True))
