"""Row classes: checked where a config gives capacities, else chosen from sampled loads.

    candidates --a bound, on all loads--> a few best --really packed, in some loads--> row classes
    row classes, with one replaced or one more --judged in the same way--> row classes, until none
                                                                           is better

The chosen classes minimise, summed over the loads, the cost of the slowest rows with their padding,
plus the overhead of every microbatch and the price of gathering keys and values in rows that
several ranks hold. Fewer classes win ties, because each is a program to compile.
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
    """Up to `row_classes` classes of allowed spans that hold the loads of a phase with little
    waste. `auto` adds more classes as long as each saves enough.

    Args:
      share: the phase's share of a step's FLOPs.

    Raises:
      ConfigError: no row that `max_capacity` and the spans allow holds the longest item.
    """
    largest = inputs.largest_capacity
    spans = [span for span in inputs.spans if smallest_capacity(inputs, span) <= largest]
    if not spans:
        raise ConfigError(_too_small_message(inputs))
    if not loads:
        return (RowClass(smallest_capacity(inputs, spans[0]), spans[0]),)
    judge = _Judge(inputs, loads)
    by_span = {span: _Candidates(judge, span) for span in spans}
    # The bound counts slots and not waits, so the best candidates of every span are packed.
    best = judge.best([classes for of_span in by_span.values() for classes in of_span.best()])
    candidates = by_span[best[0].span]
    chosen = _improved_set(best, candidates, judge)
    if inputs.config.row_classes != "auto":
        return chosen
    return _with_more(chosen, candidates, judge, share)


def _improved_set(classes: Classes, candidates: _Candidates, judge: _Judge) -> Classes:
    """The set after replacing classes, one at a time, while each saves more than chance might."""
    while True:
        improved = judge.best([classes, *candidates.with_one_moved(classes)])
        worth = CAPACITY_SEARCH.capacity_worth * judge.expected(classes, 1)
        if judge.expected(improved, 1) >= worth:
            return classes
        classes = improved


def _with_more(chosen: Classes, candidates: _Candidates, judge: _Judge, share: float) -> Classes:
    """The set after adding classes, one at a time, as long as each saves enough of a step, or two
    together save as much as two should."""
    # The phase's cost must fall to this part for a step's cost to fall by `class_saves`: to 0 where
    # the phase is no larger share of a step than that.
    enough = 1 - CAPACITY_SEARCH.class_saves / max(share, CAPACITY_SEARCH.class_saves)
    # `further` has `added` more classes than `chosen`, which do not save enough yet.
    further, added = chosen, 0
    for _ in range(CAPACITY_SEARCH.usual_classes, MOST_ROW_CLASSES):
        # Stop where not even rows without waste would save what that many classes must.
        if judge.least > enough ** (added + 1) * judge.expected(chosen, 1):
            break
        sets = candidates.with_one_more(further)
        # Where even the best bound leaves that much to save, sets with one more class are also
        # built from the candidates, not only around the chosen classes.
        if not added and judge.least <= enough * candidates.bound:
            candidates.extend()
            sets += candidates.best()
        further, added = _improved_set(judge.best([further, *sets]), candidates, judge), added + 1
        if judge.expected(further, 1) <= enough**added * judge.expected(chosen, 1):
            chosen = further
            added = 0
        elif added == 2:
            break
    return chosen


def smallest_capacity(inputs: SizingInputs, span: int) -> int:
    """The least capacity at which a row of `span` ranks holds the longest item."""
    return inputs.alignment.round_up(max(ceil_divide(inputs.longest, span), 1))


def _too_small_message(inputs: SizingInputs) -> str:
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
    """Candidate sets of up to `row_classes` classes. Rows of the first class, which have most
    slots, have span `span`; rows of the others have that span or the smallest allowed one.

    Rows of the first class hold much or all of a load, or just the longest item. Another class is
    one of these: a part of the median load, to hold what the first class leaves over; a little
    smaller than the class before it, because a few similar sizes allow finer totals; a whole load;
    the longest item of most loads; or, where the first class is larger than the median load, a
    large share of that load or a part of the first class.
    """

    def __init__(self, judge: _Judge, span: int):
        inputs = judge.inputs
        self.judge = judge
        self.span = span
        smallest = smallest_capacity(inputs, span)
        self.firsts = [
            RowClass(capacity, span)
            for capacity in _load_shares(judge) | {smallest}
            if smallest <= capacity <= inputs.largest_capacity
        ]
        self.largest_sets: list[Classes] = [(row_class,) for row_class in self.firsts]
        self.sets = set(self.largest_sets)
        self.further = [_FurtherClasses(judge, ranks) for ranks in {span, min(inputs.spans)}]
        for _ in range(1, inputs.row_classes):
            self.extend()

    @property
    def bound(self) -> float:
        """The lowest bound of all sets."""
        return min(map(self.judge.bound, self.sets))

    def best(self) -> list[Classes]:
        """The sets that are worth packing: the best of all sets, and the best of those whose rows
        all have this span. The latter are added because the bound includes the price of gathering,
        but not the waiting for the longest items, which shared rows save."""
        packed = _candidate_limit(self.judge.inputs, self.span, CAPACITY_SEARCH.first_packed)
        packed_sets = max(CAPACITY_SEARCH.least_packed, packed)
        alike = [classes for classes in self.sets if {c.span for c in classes} == {self.span}]
        best = (_cheapest_sets(sets, packed_sets, self.judge.bound) for sets in (self.sets, alike))
        return list(dict.fromkeys(itertools.chain(*best)))

    def extend(self) -> None:
        """Add sets: the best of those with most classes, each with a further class."""
        extended = _candidate_limit(self.judge.inputs, self.span, CAPACITY_SEARCH.extended)
        larger_sets = (
            (*classes, further_class)
            for classes in _cheapest_sets(self.largest_sets, extended, self.judge.bound)
            for further in self.further
            for further_class in further.classes_after(classes)
        )
        self.largest_sets = list(dict.fromkeys(larger_sets))
        self.sets.update(self.largest_sets)

    def with_one_moved(self, classes: Classes) -> list[Classes]:
        """A few sets in which one of the classes is replaced."""
        first_class = classes[0]
        replacements = self._beside(classes)
        near_first = [
            RowClass(capacity, first_class.span) for capacity in self.further[0].near(first_class)
        ]
        moved: list[Classes] = []
        for index in range(len(classes)):
            others = replacements if index else self.firsts + near_first
            before = classes[:index]
            after = classes[index + 1 :]
            moved += [(*before, other, *after) for other in others if other not in classes]
        return self._shortlist(moved)

    def with_one_more(self, classes: Classes) -> list[Classes]:
        """A few sets that have one more class."""
        return self._shortlist((*classes, further_class) for further_class in self._beside(classes))

    def _beside(self, classes: Classes) -> list[RowClass]:
        return [
            row_class for further in self.further for row_class in further.classes_beside(classes)
        ]

    def _shortlist(self, sets: Iterable[Classes]) -> list[Classes]:
        """The sets with the lowest bounds among those that hold all items, each with its classes by
        slots of a row, descending."""
        inputs = self.judge.inputs
        ordered = {
            tuple(sorted(classes, key=lambda row_class: row_class.slots, reverse=True))
            for classes in sets
        }

        def is_valid(classes: Classes) -> bool:
            if classes[0].slots < inputs.longest:
                return False
            if max(row_class.capacity for row_class in classes) > inputs.largest_capacity:
                return False
            return all(
                larger.slots > smaller.slots for larger, smaller in itertools.pairwise(classes)
            )

        valid = filter(is_valid, ordered)
        return _cheapest_sets(valid, CAPACITY_SEARCH.least_packed, self.judge.bound)


def _candidate_limit(inputs: SizingInputs, span: int, number: int) -> int:
    """How many candidates to keep whose first class has rows of `span` ranks.

    All of `number` for the smallest span, so that what would be chosen without other spans is among
    those compared; for each other span an equal part, but at least 1 / `most_parts`.
    """
    parts = min(len(inputs.spans), CAPACITY_SEARCH.most_parts)
    return number if span == min(inputs.spans) else number // parts


def _load_shares(judge: _Judge) -> set[int]:
    """Capacities at which a few rows hold much or all of a load."""
    inputs = judge.inputs
    capacities: set[int] = set()
    loads = np.quantile(judge.slots, CAPACITY_SEARCH.load_quantiles, method="higher").tolist()
    for load in (judge.median, *loads):
        fewest = math.ceil(load / inputs.largest_capacity)
        numbers = range(fewest, fewest + CAPACITY_SEARCH.row_numbers)
        for rows, share in itertools.product(numbers, CAPACITY_SEARCH.load_shares):
            capacities.add(inputs.alignment.round_up(math.ceil(load * share / rows)))
    return capacities


class _FurtherClasses:
    """Classes with rows of `span` ranks that may follow other classes in a set."""

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
        # Capacities that hold a whole load, for smaller and larger loads
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
        """Capacities: each of these quantiles of `slots`, divided by `divisor`."""
        amounts = np.quantile(slots, quantiles, method="higher").tolist()
        return {capacity for amount in amounts for capacity in self._parts(amount, (divisor,))}

    def _parts(self, slots: float, divisors: Iterable[float]) -> set[int]:
        return {self._rounded(math.ceil(slots / divisor)) for divisor in divisors}

    def _rounded(self, slots: int) -> int:
        return self.alignment.round_up(slots)

    def classes_after(self, classes: Classes) -> list[RowClass]:
        """Classes that may follow the last of `classes`, with fewer slots in a row."""
        last_class = classes[-1]
        capacities = self._further_capacities(classes)
        capacities |= {self._rounded(last_class.capacity - step) for step in self._steps(classes)}
        if last_class.span > 1:
            capacities.add(self._rounded(last_class.capacity))  # in rows of fewer ranks
        return self._smaller_classes(capacities, classes[0], last_class)

    def classes_beside(self, classes: Classes) -> list[RowClass]:
        """Classes with fewer slots in a row than the first of `classes`: classes that may follow
        it, and some that are near any of `classes`."""
        capacities = self._further_capacities(classes).union(*map(self.near, classes))
        return self._smaller_classes(capacities, classes[0], classes[0])

    def near(self, row_class: RowClass) -> set[int]:
        """Capacities a little above and below that of a class."""
        unit = self.alignment.unit(row_class.capacity)
        steps = self.steps | {unit * units for units in CAPACITY_SEARCH.unit_steps}
        capacities = (row_class.capacity + sign * step for step in steps for sign in (1, -1))
        return {self._rounded(slots) for slots in capacities if slots > 0}

    def _further_capacities(self, classes: Classes) -> set[int]:
        first_capacity = classes[0].capacity
        capacities = self.leftovers | self.longest | self.wholes
        if first_capacity > self.median:
            capacities |= self.shares | self._parts(first_capacity, CAPACITY_SEARCH.first_divisors)
        return capacities

    def _smaller_classes(
        self, capacities: set[int], first: RowClass, last: RowClass
    ) -> list[RowClass]:
        """Classes of these capacities, up to the larger of `first` and the median load, whose rows
        have fewer slots than those of `last`."""
        capacity_bound = min(max(first.capacity, self.median), self.largest_capacity)
        return [
            RowClass(capacity, self.span)
            for capacity in sorted(capacities)
            if 0 < capacity * self.span < last.slots and capacity <= capacity_bound
        ]

    def _steps(self, classes: Classes) -> set[int]:
        """Steps down to a further class of similar size: once a set has two such classes, only the
        step between these."""
        if len(classes) > 1 and classes[0].capacity < 2 * classes[1].capacity:
            return {classes[0].capacity - classes[1].capacity}
        return self.steps


def _cheapest_sets(
    candidates: Iterable[Classes], size: int, cost: Callable[[Classes], float]
) -> list[Classes]:
    """The `size` candidates of lowest cost; among equal ones those with fewer, then smaller
    classes."""
    return sorted(candidates, key=lambda classes: (cost(classes), len(classes), classes))[:size]


# ---------------------------------------------------------------------------- their costs


@dataclass(frozen=True)
class _LoadNeeds:
    """Lower bounds on what each load needs for its items over some length: [loads]."""

    slots: Longs  # per rank
    rows: Longs  # of all ranks among which items may move


class _Judge:
    """Costs of sets of classes that hold the loads of one phase, in slots per rank."""

    def __init__(self, inputs: SizingInputs, loads: Sequence[Load]):
        self.inputs = inputs
        self.loads = loads
        self.slots = np.array([load.slots for load in loads])
        self.median = float(np.median(self.slots))
        self.overheads = np.array([load.microbatch_overhead for load in loads])
        # Where items stay with their example, the needs are those of one rank, with its own rows.
        self.ranks = inputs.ranks if loads[0].item_rank is None else 1
        slots = sum(int(load.items.length.sum()) for load in loads)
        flops = sum(inputs.flops.total(load.items.length, load.items.extra) for load in loads)
        # Price of gathering one slot, in slots of average cost.
        gather = inputs.gather_cost * slots / flops if flops else 0.0
        self.gather = max(gather, CAPACITY_SEARCH.least_gather)
        items = max(len(load.items.length) for load in loads)
        affordable = CAPACITY_SEARCH.packed_items // (CAPACITY_SEARCH.first_packed * items)
        self.packed_batches = max(1, min(CAPACITY_SEARCH.packed_batches, affordable))
        self.bounds = cache(self._bounds)  # read three times for each candidate that is packed
        self.wanted = cache(self._wanted)
        self.needs_over = cache(self._needs_over)
        self.expected = cache(self._expected)  # so that a set is packed only once

    def best(self, sets: Sequence[Classes]) -> Classes:
        """The set of lowest expected cost. All sets are packed in a quarter of the batches, and the
        best of these in all batches."""
        finalists = _cheapest_sets(
            sets, CAPACITY_SEARCH.then_packed, lambda classes: self.expected(classes, 4)
        )
        return _cheapest_sets(finalists, 1, lambda classes: self.expected(classes, 1))[0]

    def _expected(self, classes: Classes, step: int) -> float:
        """The bound of all loads, times the ratio of real cost to bound in some packed loads: every
        `step`-th of the first `packed_batches`."""
        packed = slice(0, self.packed_batches, step)
        packed_cost = self._packed_cost(classes, self.loads[packed])
        return self.bound(classes) * packed_cost / float(self.bounds(classes)[packed].sum())

    def bound(self, classes: Classes) -> float:
        """The sum of the bounds of all loads."""
        return float(self.bounds(classes).sum())

    @property
    def least(self) -> float:
        """A lower bound for any classes: full rows, and one microbatch for each load."""
        return float(self.slots.sum() / CAPACITY_SEARCH.expected_fill + self.overheads.sum())

    def _packed_cost(self, classes: Classes, loads: Sequence[Load]) -> float:
        """Cost of the loads when they are really packed into rows of these classes."""
        spec = phase_spec(self.inputs, classes)
        cost = 0.0
        for load in loads:
            plan = load.plan(spec)
            items = load.items
            mean_cost = spec.cost.total(items.length, items.extra) / int(items.length.sum())
            # Divided by the mean cost of a slot: all terms are in slots.
            cost += slowest_cost(plan, items, spec, spec.cost) / mean_cost
            capacity = plan.capacity.astype(np.int64)
            cost += self.gather * int((capacity * (plan.span - 1)).sum())
            cost += load.microbatch_overhead * plan.microbatches
        return cost

    def _bounds(self, classes: Classes) -> Floats:
        """Cost of the fewest slots of rows that may hold each load, when rows get as full as they
        usually do: [loads]."""
        half_row = classes[0].slots // 2  # no two items longer than this share a row
        slots = np.empty((len(self.loads), len(classes)), np.int64)
        rows = np.empty_like(slots)
        # Items longer than rows of class k + 1 need classes up to k.
        for k, row_class in enumerate(classes[1:]):
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

    def _needs_over(self, length: int) -> _LoadNeeds:
        """`Load.needs_over` of all loads."""
        slots, rows = np.array([load.needs_over(length) for load in self.loads]).T
        return _LoadNeeds(slots, rows)


@compiled
def _fewest_slots(
    capacity: Longs, rows: Longs, order: Longs, needs: Longs, rows_needed: Longs
) -> Longs:
    """Microbatches of each class that meet the needs of each load with fewest slots per rank, then
    fewest microbatches: [loads, K].

    Args:
      capacity: [K] slots per rank.
      rows: [K] rows of a microbatch.
      order: [K] classes by capacity, largest first. The first of these, the base, may have any
        number of microbatches, the others about as many as `row_counts` offers.
      needs: [loads, K] slots per rank needed in the classes up to and including each.
      rows_needed: [loads, K] rows needed in the classes up to and including each.
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
            if k < base:  # items may need rows of this class that are too long for the base
                slots = rows_left = 0
                for later in range(k, base):
                    slots = max(slots, needs[load, later])
                    rows_left = max(rows_left, rows_needed[load, later])
                bounds[k] += 2 * (-(-slots // capacity[k])) - (-rows_left // rows[k])
        # The search starts from the slots of a combination of two classes, which it will also find.
        best_slots = _slots_of_two_classes(capacity, rows, base, needs[load], rows_needed[load])
        best_microbatches = INT64_MAX
        counts[:] = 0
        # `counts` runs through combinations like an odometer, the smallest class fastest; the count
        # of the base stays 0.
        while True:
            # The base gets as many microbatches as the needs that the others do not meet require.
            held = held_rows = missing = missing_rows = microbatches = 0
            enough = True
            for k in range(classes):
                held += counts[k] * capacity[k]
                held_rows += counts[k] * rows[k]
                microbatches += counts[k]
                open_slots = needs[load, k] - held
                open_rows = rows_needed[load, k] - held_rows
                # Classes before the base must meet their needs without it, because base rows are
                # too short for those items. From the base on, base rows make up what is missing.
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
            # Advance to the next combination. A class with too many microbatches is reset to none,
            # and the next larger class gets one more. Microbatches are also too many when they have
            # more slots than the best combination: smaller classes would only add to these.
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
def _slots_of_two_classes(
    capacity: Longs, rows: Longs, base: int, needs: Longs, rows_needed: Longs
) -> int:
    """Slots per rank of microbatches of the first class and of `base` alone that meet the needs of
    a load, [K] each; INT64_MAX, which bounds nothing, where the two are the same class."""
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
    """The row classes of a config's capacities, each with every allowed span, by slots of a row,
    descending.

    Raises:
      ConfigError: as for `checked_capacities`.
    """
    checked = checked_capacities(capacities, inputs, max(inputs.spans))
    classes = [RowClass(capacity, span) for capacity in checked for span in inputs.spans]
    return tuple(sorted(classes, key=lambda c: (c.slots, c.span), reverse=True))


def checked_capacities(capacities: Capacities, inputs: SizingInputs, span: int = 1) -> Capacities:
    """The capacities of a config, descending.

    Args:
      span: the largest span of a row.

    Raises:
      ConfigError: there are no capacities or two equal ones, one is not a multiple of the
        alignment, rows have more slots than int32 can count, or none holds the longest item.
    """
    key = f"phases.{inputs.name}.capacities"
    # An empty list passes this check and the next one, and is refused after them.
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
