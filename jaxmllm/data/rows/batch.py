"""The examples of a batch as rows are filled from them: rendered on demand, and compared with what
was planned."""

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
    """What was loaded is not what the plan was made from; the message says both counts, in one line."""

    def __init__(self, message: str):
        super().__init__(shown(message))


@dataclass(frozen=True)
class Batch:
    """The B examples of a batch. `index` counts in the batch, `number` in the corpus."""

    examples: Longs  # [B] numbers
    items: BatchItems
    render: Callable[[int], Rendered]  # by number
    source_of: Callable[[int], int]  # likewise
    modalities: Mapping[str, Modality]
    cancelled: Callable[[], bool]

    @cached_property
    def _first_items(self) -> dict[str, Longs]:
        """Number of the first item of each example, and of all items, by phase of media: [B + 1]."""
        # Not by search: the batch is that of all hosts, of which one fills a few examples
        return {
            phase: np.append(0, np.cumsum(np.bincount(items.example, minlength=len(self.examples))))
            for phase, items in self.items.phases.items()
            if phase in self.modalities
        }

    def example(self, index: int) -> Rendered:
        """One example. Raises `CancelledError` once the batch is not wanted any more."""
        if self.cancelled():
            raise CancelledError
        return self.render(int(self.examples[index]))

    def source(self, index: int) -> int:
        """Number of the source that one example is from."""
        return self.source_of(int(self.examples[index]))

    def number_in_example(self, phase: str, item: int) -> int:
        """Of an item, among those of its phase."""
        return item - int(self._first_items[phase][self.items.phases[phase].example[item]])

    def media(self, phase: str, index: int) -> Iterator[tuple[int, MediaSpan]]:
        """Item number and span of each media item of one example. Raises `MisalignmentError`."""
        items = self.items.phases[phase]
        example = int(self.examples[index])
        start, stop = self._first_items[phase][index : index + 2].tolist()
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
    """The rows of a phase that a host fills: whole rows of all groups with one of its ranks."""

    phase: str
    plan: PhasePlan
    ranks: tuple[int, ...]  # of this host

    def groups(self, span: int) -> tuple[int, ...]:
        """Groups of `span` neighbouring ranks, in the order of rows."""
        if span == 1:
            return self.ranks
        return tuple(sorted({rank // span for rank in self.ranks}))

    @property
    def items(self) -> Longs:
        """Numbers of the items that lie in these rows."""
        # A plan names an item's rank by the first of its group, and groups count by `rank // span`;
        # so rows of each span are found on their own.
        span_of_item = self.plan.span[self.plan.microbatch]
        is_local = np.zeros(len(span_of_item), np.bool_)
        for span in np.unique(span_of_item).tolist():
            is_local |= (span_of_item == span) & np.isin(self.plan.rank // span, self.groups(span))
        return np.flatnonzero(is_local)

    def row(self, item: int) -> int:
        """Which of the microbatch's rows on this host an item lies in."""
        span = int(self.plan.span[self.plan.microbatch[item]])
        return self.groups(span).index(int(self.plan.rank[item]) // span)

    def slots(self, item: int, length: int) -> slice:
        """An item's slots in its row. Raises `MisalignmentError`."""
        start = int(self.plan.offset[item])
        microbatch = self.plan.microbatch[item]
        end = int(self.plan.capacity[microbatch]) * int(self.plan.span[microbatch])
        if start + length > end:  # a slice would be cut silently
            raise MisalignmentError(
                f"{self.phase} item {item} ends at slot {start + length} of a row of {end}: "
                "the plan does not fit its items"
            )
        return slice(start, start + length)
