"""Sampled batches as loads: what the rows of a phase will have to hold.

sampled batches --redraw--> many more of the same examples
                --loads_of--> items and slots, by phase and batch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide, running_sums, sums_by
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    RowClass,
)
from jaxmllm.balance.rows.assign import assign, assign_in_place, item_costs
from jaxmllm.balance.rows.row_counts import wanted_slots
from jaxmllm.balance.sizes.inputs import CAPACITY_SEARCH, SizingInputs, phase_spec
from jaxmllm.balance.step_plan import item_ranks

ITEM_COLUMNS = [column.name for column in fields(PhaseItems)]


class SampleSize(NamedTuple):
    """The size of a sample: as many batches as `examples` examples fill, within bounds."""

    examples: int
    fewest: int  # batches
    most: int

    def batches(self, batch_size: int) -> int:
        return min(max(self.examples // batch_size, self.fewest), self.most)


PLANNED = SampleSize(2048, fewest=8, most=32)  # the samples that whole plans are made for


@dataclass(frozen=True)
class Load:
    """The items of one phase in one batch, and what its rows have to hold."""

    items: PhaseItems
    item_rank: Longs | None  # [N], where items stay with their example; None: they move freely
    ranks: int
    slots: int  # slots of the fullest rank, if rows could be cut anywhere
    microbatch_overhead: float  # overhead of each microbatch, in slots of average cost

    @cached_property
    def _ascending_lengths(self) -> tuple[Longs, Longs]:
        """(lengths of the items, ascending, [N]; sum of the lengths from each item on, [N + 1])."""
        lengths = np.sort(self.items.length)
        return lengths, np.append(np.cumsum(lengths[::-1])[::-1], 0)

    def needs_over(self, length: int) -> tuple[int, int]:
        """(slots, number) of the items longer than `length`: the most that any rank has or, where
        items move freely, slots of the mean rank and the number on all ranks."""
        if self.item_rank is None:
            lengths, slots_from = self._ascending_lengths
            fitting = int(np.searchsorted(lengths, length, side="right"))
            return ceil_divide(int(slots_from[fitting]), self.ranks), len(lengths) - fitting
        longer = self.items.length > length
        rank = self.item_rank[longer]
        slots = int(sums_by(rank, self.items.length[longer], self.ranks).max())
        return slots, int(np.bincount(rank, minlength=1).max())

    def wanted_slots(self, inputs: SizingInputs, span: int) -> int:
        """Slots that the rows of a rank should have where `span` ranks may share a row."""
        least_slots = math.ceil(self.slots / CAPACITY_SEARCH.expected_fill)
        if self.item_rank is not None:
            return least_slots
        # Slots of the mean rank. Items that move freely also need room to balance their costs.
        cost = item_costs(phase_spec(inputs, (RowClass(1),)), self.items)
        roomy_slots = wanted_slots(self.items.length, cost, self.ranks, span)
        return max(least_slots, ceil_divide(roomy_slots, self.ranks))

    def plan(self, spec: PhaseSpec) -> PhasePlan:
        """The plan of these items, really packed into rows of `spec`."""
        if self.item_rank is None:
            return assign(spec, self.items)
        return assign_in_place(spec, self.items, self.item_rank)


def loads_of(
    batches: Sequence[BatchItems],
    inputs: SizingInputs,
    grids: Mapping[str, ExchangeGrid],
    example_ranks: Sequence[Longs | None],
) -> list[Load]:
    """Loads of the batches that have items of a phase.

    Args:
      grids: by encoder or generator phase.
      example_ranks: for each batch the rank of each example where its items stay with it; None:
        items move freely.
    """
    return [
        _load_of_batch(batch, inputs, grids, example_rank)
        for batch, example_rank in zip(batches, example_ranks, strict=True)
        if len(batch.phases[inputs.name].length)
    ]


def _load_of_batch(
    batch: BatchItems,
    inputs: SizingInputs,
    grids: Mapping[str, ExchangeGrid],
    example_rank: Longs | None,
) -> Load:
    items = batch.phases[inputs.name]
    if example_rank is None:
        item_rank = None
        slots = ceil_divide(int(items.length.sum()), inputs.ranks)
    else:
        item_rank = item_ranks(batch, inputs.name, example_rank, grids)
        slots = int(sums_by(item_rank, items.length, inputs.ranks).max())
    return Load(
        items=items,
        item_rank=item_rank,
        ranks=inputs.ranks,
        slots=slots,
        microbatch_overhead=_microbatch_overhead(inputs, items, slots),
    )


def _microbatch_overhead(inputs: SizingInputs, items: PhaseItems, slots: int) -> float:
    """What a microbatch takes in addition to its slots, in slots of average cost: each microbatch
    is dispatched on its own and gathers sharded parameters again."""
    if inputs.time is not None and inputs.time.row:
        overhead = inputs.time.row
        cost = inputs.time.item
    else:
        overhead = inputs.microbatch_cost
        cost = inputs.flops
    slots_of_items = items.length.astype(float).sum()
    least_overhead = CAPACITY_SEARCH.least_overhead * slots
    return max(
        float(overhead * slots_of_items / cost.total(items.length, items.extra)), least_overhead
    )


def to_plan(samples: Sequence[BatchItems]) -> Sequence[BatchItems]:
    """The first samples, for uses that make a whole plan of each. Uses that only read lengths are
    cheap, so there are more samples."""
    size = max((len(batch.examples) for batch in samples), default=0)
    return samples[: PLANNED.batches(max(size, 1))]


def redraw(samples: Sequence[BatchItems]) -> list[BatchItems]:
    """Batches of examples drawn again from all samples. Rows are judged on these and the samples.

    A few batches show the lengths of items well, but not how far the load of a batch strays from
    the mean.
    """
    size = max((len(batch.examples) for batch in samples), default=0)
    affordable = CAPACITY_SEARCH.judged_examples // max(size, 1)
    missing = min(CAPACITY_SEARCH.judged_batches, affordable) - len(samples)
    if missing <= 0 or not size:
        return []
    random = np.random.default_rng(0)  # every host must draw the same
    pooled, examples = _pooled_items(samples)
    batches = []
    for chosen in random.integers(examples, size=(missing, size)):
        phases = {phase: _chosen_items(items, chosen, examples) for phase, items in pooled.items()}
        batches.append(BatchItems(chosen, 0, phases))
    return batches


def _pooled_items(samples: Sequence[BatchItems]) -> tuple[dict[str, PhaseItems], int]:
    """(items of all batches joined into one batch, by phase; number of its examples)."""
    start = np.cumsum([0, *(len(batch.examples) for batch in samples)])  # examples before a batch
    pooled = {}
    for phase in samples[0].phases:
        by_batch = [batch.phases[phase] for batch in samples]
        columns = {}
        for name in ITEM_COLUMNS:
            batch_columns = [getattr(items, name) for items in by_batch]
            if batch_columns[0] is not None:
                columns[name] = np.concatenate(batch_columns)
        examples = [items.example + start[batch] for batch, items in enumerate(by_batch)]
        pooled[phase] = PhaseItems(**columns | {"example": np.concatenate(examples)})
    return pooled, int(start[-1])


def _chosen_items(items: PhaseItems, chosen: Longs, examples: int) -> PhaseItems:
    """The items of the chosen examples, which are numbered 0, 1, .. in the order of `chosen`."""
    # Items are in the order of examples, so those of an example are consecutive, from `start` on.
    items_per_example = np.bincount(items.example, minlength=examples)
    start = np.cumsum(items_per_example) - items_per_example
    example = np.repeat(np.arange(len(chosen)), items_per_example[chosen])
    item = start[chosen][example] + running_sums(example, np.ones_like(example))
    return replace(items.at(item), example=example.astype(np.int32))
