"""The examples that rows are filled from, rendered on demand and checked against the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.records import BatchItems, PhasePlan
from jaxmllm.data.media.generated import item_slots
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.printable import shown
from jaxmllm.data.text.render import MediaSpan, Rendered

CHANGED = "the data changed after its length index was built; delete the index (data.index_cache) and start again"


class MisalignmentError(ValueError):
    """Loaded data does not fit the plan that was made from its index; the message gives both counts
    in one line."""

    def __init__(self, message: str):
        super().__init__(shown(message))


@dataclass(frozen=True)
class Batch:
    """The B examples of a batch. An `index` counts examples in the batch, a `number` those in the
    corpus, and an item's number the items of its phase."""

    examples: Longs  # [B] numbers
    items: BatchItems
    render: Callable[[int], Rendered]  # by example number
    source_of: Callable[[int], int]  # source number, by example number
    modalities: Mapping[str, Modality]
    cancelled: Callable[[], bool]

    @cached_property
    def _first_items(self) -> dict[str, Longs]:
        """Number of each example's first item, then the item count: [B + 1], by media phase."""
        # All starts at once, not a search for each example: the batch is that of all hosts.
        return {
            phase: np.append(0, np.cumsum(np.bincount(items.example, minlength=len(self.examples))))
            for phase, items in self.items.phases.items()
            if phase in self.modalities
        }

    def example(self, index: int) -> Rendered:
        """One rendered example. Raises `CancelledError` once the batch is no longer wanted."""
        if self.cancelled():
            raise CancelledError
        return self.render(int(self.examples[index]))

    def source(self, index: int) -> int:
        """Number of the source of one example."""
        return self.source_of(int(self.examples[index]))

    def number_in_example(self, phase: str, item: int) -> int:
        """Number of an item among the items of its phase in its example, from 0."""
        return item - int(self._first_items[phase][self.items.phases[phase].example[item]])

    def media(self, phase: str, index: int) -> Iterator[tuple[int, MediaSpan]]:
        """Item number and span of each media item of one example. Raises `MisalignmentError`."""
        items = self.items.phases[phase]
        example = int(self.examples[index])
        start, stop = self._first_items[phase][index : index + 2].tolist()
        # Both sides are in the reading order of the example, so they pair up by place.
        spans = [span for span in self.example(index).media if span.phase == phase]
        if len(spans) != stop - start:
            raise MisalignmentError(
                f"example {example} has {len(spans)} {phase} items, but the plan was made for {stop - start}: {CHANGED}"
            )
        for item, span in zip(range(start, stop), spans, strict=True):
            slots = item_slots(self.modalities[phase], span.shape, span.conditions)
            rendered = (slots, span.tokens, span.slot)
            planned = (int(items.length[item]), int(items.tokens[item]), int(items.slot[item]))
            if rendered != planned:
                raise MisalignmentError(
                    f"{span.reference} of example {example} has (slots, tokens, first token) {rendered}, "
                    f"but the plan was made for {planned}: {CHANGED}"
                )
            yield item, span


@dataclass(frozen=True)
class LocalRows:
    """The rows of a phase that a host fills: whole rows, of all groups with one of its ranks."""

    phase: str
    plan: PhasePlan
    ranks: tuple[int, ...]  # ranks of this host

    def groups(self, span: int) -> tuple[int, ...]:
        """Numbers of the groups of `span` neighbouring ranks that have a local rank, in the order
        of rows."""
        if span == 1:
            return self.ranks
        return tuple(sorted({rank // span for rank in self.ranks}))

    @property
    def items(self) -> Longs:
        """Numbers of the items in these rows."""
        # The plan gives an item the first rank of its group, and `rank // span` numbers the groups.
        # The number of a group depends on the span, so each span is handled on its own.
        span_of_item = self.plan.span[self.plan.microbatch]
        is_local = np.zeros(len(span_of_item), np.bool_)
        for span in np.unique(span_of_item).tolist():
            is_local |= (span_of_item == span) & np.isin(self.plan.rank // span, self.groups(span))
        return np.flatnonzero(is_local)

    def row(self, item: int) -> int:
        """Number of an item's row among this host's rows of the microbatch."""
        span = int(self.plan.span[self.plan.microbatch[item]])
        return self.groups(span).index(int(self.plan.rank[item]) // span)

    def slots(self, item: int, length: int) -> slice:
        """An item's slots in its row. Raises `MisalignmentError`."""
        start = int(self.plan.offset[item])
        microbatch = self.plan.microbatch[item]
        end = int(self.plan.capacity[microbatch]) * int(self.plan.span[microbatch])
        if start + length > end:  # numpy would cut the slice silently
            raise MisalignmentError(
                f"{self.phase} item {item} ends at slot {start + length} of a row of {end}: "
                "the plan does not fit its items"
            )
        return slice(start, start + length)
