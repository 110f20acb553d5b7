"""Row capacities: checked where a config gives them, else chosen from sampled loads.

    candidates --a bound, in all loads--> a few best --really packed, in some loads--> row classes

They minimise, summed over the loads, the slots of a rank times the wait for the slowest, plus the
overhead of every microbatch. Fewer classes win ties, for each is a program to compile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np

from jaxmllm.arrays import Floats, Longs, round_up
from jaxmllm.balance.compiled import compiled
from jaxmllm.balance.records import row_classes
from jaxmllm.balance.rows.row_counts import ROW_SEARCH, row_steps
from jaxmllm.balance.sizes.inputs import CAPACITY_SEARCH, Capacities, SizingInputs, phase_spec
from jaxmllm.balance.sizes.loads import Load
from jaxmllm.balance.statistics import phase_statistics
from jaxmllm.config.schema import ConfigError


def choose_capacities(inputs: SizingInputs, loads: Sequence[Load]) -> Capacities:
    """Up to `row_classes` capacities that hold the loads of a phase with little waste.

    Raises:
      ConfigError: `max_capacity` is too small for the longest item.
    """
    smallest = round_up(max(inputs.longest, 1), inputs.alignment)
    if inputs.largest_capacity < smallest:
        raise ConfigError(
            f"phases.{inputs.name}.max_capacity = {inputs.config.max_capacity} is too small: the "
            f"largest item has {inputs.longest} slots and rows come in multiples of "
            f"{inputs.alignment}; raise it to {smallest} or limit the size of items"
        )
    if not loads:
        return (smallest,)
    items = max(len(load.items.length) for load in loads)
    affordable = CAPACITY_SEARCH.packed_items // (CAPACITY_SEARCH.first_packed * items)
    batches = slice(max(1, min(CAPACITY_SEARCH.packed_batches, affordable)))
    quarter = slice(0, batches.stop, 4)
    judge = _Judge(inputs, loads)
    sets = _candidates(inputs, loads, smallest)
    sets = _best(sets, CAPACITY_SEARCH.first_packed, lambda sizes: judge.bounds(sizes).sum())
    sets = _best(sets, CAPACITY_SEARCH.then_packed, lambda sizes: judge.expected(sizes, quarter))
    return _best(sets, 1, lambda sizes: judge.expected(sizes, batches))[0]


def _candidates(inputs: SizingInputs, loads: Sequence[Load], smallest: int) -> list[Capacities]:
    """Sets of up to `row_classes` capacities: the first so that some rows hold much or all of a
    load. The others are parts of the median load, to hold what the first leaves over, or a little
    smaller than the one before: a few similar row sizes allow finer total capacities."""
    slots = np.array([load.slots for load in loads])
    median = float(np.median(slots))

    def shares_of_median(divisors: Iterable[int]) -> set[int]:
        return {round_up(math.ceil(median / divisor), inputs.alignment) for divisor in divisors}

    firsts = {smallest}
    for load in (float(slots.min()), median, float(slots.max())):
        fewest = math.ceil(load / inputs.largest_capacity)
        numbers = range(fewest, fewest + CAPACITY_SEARCH.row_numbers)
        for rows, share in itertools.product(numbers, CAPACITY_SEARCH.load_shares):
            firsts.add(round_up(math.ceil(load * share / rows), inputs.alignment))
    leftovers = shares_of_median(CAPACITY_SEARCH.leftover_divisors)
    steps = shares_of_median(CAPACITY_SEARCH.step_divisors)
    longest_sets: set[Capacities] = {
        (size,) for size in firsts if smallest <= size <= inputs.largest_capacity
    }
    candidates = set(longest_sets)
    for _ in range(1, inputs.config.row_classes):
        longest_sets = {
            (*sizes, size)
            for sizes in longest_sets
            for size in leftovers | {sizes[-1] - step for step in _next_steps(sizes, steps)}
            if 0 < size < sizes[-1]
        }
        candidates |= longest_sets
    return list(candidates)


def _next_steps(sizes: Capacities, steps: set[int]) -> set[int]:
    """Steps down to a further class of similar size: once there is one, all steps are equal."""
    if len(sizes) > 1 and sizes[0] < 2 * sizes[1]:
        return {sizes[0] - sizes[1]}
    return steps


def _best(
    candidates: Iterable[Capacities], size: int, cost: Callable[[Capacities], float]
) -> list[Capacities]:
    """The `size` candidates of least cost; of equal ones those of fewer and smaller classes."""
    return sorted(candidates, key=lambda sizes: (cost(sizes), len(sizes), sizes))[:size]


class _Judge:
    """Costs of sets of capacities, in slots of a rank, that hold the loads of one phase."""

    def __init__(self, inputs: SizingInputs, loads: Sequence[Load]):
        self.inputs = inputs
        self.loads = loads
        self.wanted = np.array([load.wanted_slots for load in loads])
        self.overheads = np.array([load.microbatch_overhead for load in loads])
        self.bounds = cache(self._bounds)  # asked for thrice of the candidates that are packed
        self.items_over = cache(self._items_over)

    def expected(self, capacities: Capacities, packed: slice) -> float:
        """The bound of all loads, times what packing some of them takes over their own bound."""
        bounds = self.bounds(capacities)
        return bounds.sum() * self._packed(capacities, self.loads[packed]) / bounds[packed].sum()

    def _packed(self, capacities: Capacities, loads: Sequence[Load]) -> float:
        spec = phase_spec(self.inputs, capacities)
        cost = 0.0
        for load in loads:
            plan = load.plan(spec)
            statistics = phase_statistics(plan, load.items, spec)
            # Below this nothing is gained: assigning rows stops there, too.
            synchronised = statistics[f"{self.inputs.name}/synchronised"]
            waits = max(synchronised, 1 + 1 / ROW_SEARCH.stop_within)
            slots = int(plan.capacity.sum(dtype=np.int64))
            cost += slots * waits + load.microbatch_overhead * plan.microbatches
        return cost

    def _bounds(self, capacities: Capacities) -> Floats:
        """Cost of the fewest rows that may hold each load, filled as far as rows get: [loads]."""
        sizes = np.array(capacities, np.int64)
        no_larger_than = (*capacities[1:], 0)  # items over it fit no smaller class
        half = capacities[0] // 2  # of the items over it, no two share a row
        slots_by_class = [self.items_over(length)[0] for length in no_larger_than[:-1]]
        slots = np.stack([*slots_by_class, self.wanted], axis=1)
        rows_by_class = [self.items_over(max(length, half))[1] for length in no_larger_than]
        rows = np.maximum(np.stack(rows_by_class, axis=1), slots > 0)
        most_firsts = max(self.wanted.max() // sizes[0] + 1, rows.max())
        firsts = np.arange(self.wanted.min() // sizes[0], most_firsts + 1)
        counts = row_steps(row_classes(capacities)) + firsts[:, None, None] * (
            np.arange(len(sizes)) == 0
        )
        counts = counts.reshape(-1, len(sizes))
        counts = counts[counts[:, 0] >= 0]
        start = np.searchsorted(counts @ sizes, self.wanted)
        chosen = counts[_first_enough(counts, sizes, slots, rows, start)]
        return chosen @ sizes + chosen.sum(axis=1) * self.overheads

    def _items_over(self, length: int) -> Longs:
        """`Load.slots_of_items_over` of all loads: [2, loads]."""
        return np.array([load.slots_of_items_over(length) for load in self.loads]).T


@compiled
def _first_enough(counts: Longs, sizes: Longs, slots: Longs, rows: Longs, start: Longs) -> Longs:
    """Index of the first counts [any, K], from `start` [loads] on, that meet the needs `slots` and
    `rows` [loads, K]: [loads]."""
    chosen = np.zeros(len(start), np.int64)
    for load in range(len(start)):
        for index in range(start[load], len(counts)):
            held_slots = 0
            held_rows = 0
            enough = True
            for size in range(len(sizes)):
                held_slots += counts[index, size] * sizes[size]
                held_rows += counts[index, size]
                enough &= held_slots >= slots[load, size] and held_rows >= rows[load, size]
            if enough:
                chosen[load] = index
                break
    return chosen


def checked_capacities(capacities: Capacities, inputs: SizingInputs) -> Capacities:
    """The capacities of a config, descending.

    Raises:
      ConfigError: one is not a multiple of the alignment, they are not different, or none holds the
        longest item.
    """
    key = f"phases.{inputs.name}.capacities"
    for capacity in capacities:
        if capacity % inputs.alignment:
            near = round_up(capacity, inputs.alignment)
            raise ConfigError(
                f"{key}: {capacity} is not a multiple of {inputs.alignment} (whole attention blocks "
                f"and whole language tokens); use {near}, or change phases.{inputs.name}.block"
            )
    if len(set(capacities)) < len(capacities) or not capacities:
        raise ConfigError(f"{key} must be one or more different numbers, not {list(capacities)}")
    if max(capacities) < inputs.longest:
        raise ConfigError(
            f"{key}: the largest, {max(capacities)}, is too small for the largest item "
            f"({inputs.longest} slots); raise it to {round_up(inputs.longest, inputs.alignment)} or "
            f"limit the size of items"
        )
    return tuple(sorted(capacities, reverse=True))


def checked_long_capacity(inputs: SizingInputs) -> int:
    """Slots of a long row; 0 without any.

    Raises:
      ConfigError: the ranks cannot share a long row evenly, or it does not hold the longest item.
    """
    capacity = inputs.config.long_capacity
    if capacity is None:
        return 0
    unit = inputs.alignment * inputs.ranks
    key = f"phases.{inputs.name}.long_capacity"
    if capacity % unit:
        raise ConfigError(
            f"{key}: {capacity} is not a multiple of {unit} (whole attention blocks on each of "
            f"{inputs.ranks} ranks): use {round_up(capacity, unit)}"
        )
    if capacity < inputs.longest:
        raise ConfigError(
            f"{key}: {capacity} is too small for the longest item of {inputs.longest} slots: raise "
            f"it to {round_up(inputs.longest, unit)} or limit the size of items"
        )
    return capacity
