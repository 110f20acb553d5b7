"""Rows of the encoder phases: media are loaded into the slots that the plan gives them.

A row holds, with q local ranks, C slots, F features, P position axes and T = C / slots_per_token
language tokens:
    features [q, C, F]
    segments int32 [q, C]       0: padding, also the padding inside an item
    positions int32 [q, C, P]
    valid bool [q, T]           whether the token comes from an item that loaded
    failed int32 [q]            items that did not load
    places int32 [q, T]         place of each token in the row
    tiles                       see masks.py
and for towers with windowed attention windows int32 [q, C] and window_tiles (see masks.py).
For span g, the rows are whole rows of the q groups that have a local rank: g * C slots and g * T
tokens. Slots may be dealt to parts; `valid` and `places` stay in the order of the plan.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.balance.records import PhaseItems, PhasePlan
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.media.reference import FrameGroup, MediaError, MediaReference
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.data.printable import shown
from jaxmllm.data.rows.batch import Batch, LocalRows, MisalignmentError
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_encoder_row
from jaxmllm.data.text.render import MediaSpan
from jaxmllm.row_format import RowFormat


def encoder_rows(
    batch: Batch,
    phase: str,
    plan: PhasePlan,
    ranks: tuple[int, ...],
    attention: AttentionSpec,
    threads: int,
) -> tuple[list[Row], list[str]]:
    """Rows of every microbatch, and a message for each item that did not load, of the groups whose
    first rank is local.

    Raises `MisalignmentError`, and `CancelledError` once the batch is no longer wanted.
    """
    row_format = batch.modalities[phase].format
    _check_token_bounds(phase, plan, row_format)
    local = LocalRows(phase, plan, ranks)
    rows = empty_rows(local, lambda row_count, slots: _empty_row(row_count, slots, row_format))
    filling = _Filling(batch.modalities[phase], batch.items.phases[phase], local, rows)
    failures = filling.load_all(batch, threads)
    for row, span in zip(rows, plan.span.tolist(), strict=True):
        finish_encoder_row(row, attention, phase, row_format, span)
    return rows, failures


def empty_rows(local: LocalRows, make: Callable[[int, int], Row]) -> list[Row]:
    """Empty rows of every microbatch, made by `make(rows, slots)`."""
    plan = local.plan
    return [
        make(len(local.groups(span)), capacity * span)
        for capacity, span in zip(plan.capacity.tolist(), plan.span.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Filling(ABC):
    """Rows of one phase that several threads load items into."""

    modality: Modality
    items: PhaseItems
    local: LocalRows
    rows: Sequence[Row]

    @abstractmethod
    def lay(self, row: Row, row_index: int, item: int, span: MediaSpan, slots: slice) -> slice:
        """Write all arrays of an item that are known before it is loaded, in these slots of row
        `row_index`. Return the slots of its features."""

    @abstractmethod
    def accept(self, row: Row, row_index: int, item: int, slots: slice) -> None:
        """Mark an item as loaded."""

    def load_all(self, batch: Batch, threads: int) -> list[str]:
        """Load the items of all rows. Return a message for each item that did not load, of groups
        whose first rank is local. Raises as `encoder_rows`."""
        plan = self.local.plan
        items = self.local.items
        spans = {
            item: span
            for index in np.unique(self.items.example[items]).tolist()
            for item, span in batch.media(self.local.phase, index)
        }

        # Threads take their next items from one shared iterator: a task per item would cost more
        # than loading a small item does. Several threads may safely advance the iterator of a list.
        groups = _group_by_clip(items.tolist(), spans, self.items.example)
        unloaded = iter(groups)

        def load(_: int) -> list[tuple[int, str]]:
            return [
                (item, message)
                for together in unloaded
                for item, message in self._load_items(together, spans, batch.cancelled)
                if message is not None
            ]

        threads = max(1, min(threads, len(groups)))
        with ThreadPoolExecutor(threads) as pool:
            failures = sorted(itertools.chain.from_iterable(pool.map(load, range(threads))))
        for item, _ in failures:
            self.rows[plan.microbatch[item]]["failed"][self.local.row(item)] += 1
        # Several hosts may fill the same row: only the host of its first rank reports the failure.
        return [message for item, message in failures if plan.rank[item] in self.local.ranks]

    def _load_items(
        self, items: Sequence[int], spans: Mapping[int, MediaSpan], cancelled: Callable[[], bool]
    ) -> Iterator[tuple[int, str | None]]:
        """Fill the slots of items of one file, and yield each item with None, or with a message if
        it does not load. The features of such an item stay zero, and it is not accepted.

        Items own disjoint slots, so threads may write into one row. `failed` is shared by the items
        of a row, so `load_all` counts it later.
        """
        loaded = self._features([spans[item] for item in items])
        broken: MediaError | None = None
        for index, item in enumerate(items):
            if cancelled():
                raise CancelledError
            span = spans[item]
            row = self.rows[self.local.plan.microbatch[item]]
            row_index = self.local.row(item)
            slots = self.local.slots(item, int(self.items.length[item]))
            feature_slots = self.lay(row, row_index, item, span, slots)
            # A generator that has raised yields nothing more, so its error applies to all later
            # items of the file. For a folder a new generator starts at this item.
            if broken and _is_folder(span.reference):  # its other files may be sound
                loaded = self._features([spans[item] for item in items[index:]])
                broken = None
            if broken is None:
                try:
                    features = next(loaded)
                except MediaError as error:
                    broken = error
                except Exception as error:
                    raise _error_with_media(error, span.reference) from error
            message = (
                self._unusable_reason(features, feature_slots, span)
                if broken is None
                else str(broken)
            )
            if message is None:
                np.copyto(row["features"][row_index, feature_slots], features, casting="same_kind")
                self.accept(row, row_index, item, slots)
            yield item, message

    def _features(self, spans: Sequence[MediaSpan]) -> Iterator[NDArray[Any]]:
        """Features of the items of one file, each loaded when it is asked for."""
        clips = {span.reference.clip for span in spans if isinstance(span.reference, FrameGroup)}
        if not clips:
            return (self.modality.load(span.reference, span.shape) for span in spans)
        assert isinstance(self.modality, ImagesAndVideos)
        (clip,) = clips
        return self.modality.load_groups(
            clip, [_group_number(span) for span in spans], spans[0].shape
        )

    def _unusable_reason(self, features: NDArray[Any], slots: slice, span: MediaSpan) -> str | None:
        """Why features cannot be used; None if they can. Raises `MisalignmentError` if their shape
        is not the planned one."""
        expected = (slots.stop - slots.start, self.modality.format.features)
        if features.shape != expected:
            raise MisalignmentError(
                f"{span.reference} was loaded as {features.shape}, but the plan has room for {expected}"
            )
        if features.dtype.kind == "f" and not np.isfinite(features).all():
            return shown(
                f"{span.reference} was loaded as numbers that are not finite; leave it out, or write it again"
            )
        return None


def _group_by_clip(
    items: Sequence[int], spans: Mapping[int, MediaSpan], example: Ints
) -> list[list[int]]:
    """Items in lists that one thread loads in order: the groups of frames of one video together, so
    that it is decoded once, and every other item alone."""
    groups: list[list[int]] = []
    for item in items:
        last_item = groups[-1][-1] if groups else item
        last_media = spans[last_item].reference
        media = spans[item].reference
        continues_clip = (
            isinstance(last_media, FrameGroup)
            and isinstance(media, FrameGroup)
            and (last_media.clip, example[last_item]) == (media.clip, example[item])
            # An example may hold a video twice; the second time group numbers start again from a
            # lower one.
            and last_media.number < media.number
        )
        if continues_clip:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _is_folder(media: MediaReference) -> bool:
    try:
        return bool(media.files())
    except MediaError:  # the folder cannot be read
        return False


def _group_number(span: MediaSpan) -> int:
    """Number of a span's group of frames in its clip."""
    assert isinstance(span.reference, FrameGroup)
    return span.reference.number


class _Filling(Filling):
    """Rows of an encoder phase that items are loaded into."""

    def lay(self, row: Row, row_index: int, item: int, span: MediaSpan, slots: slice) -> slice:
        modality = self.modality
        segment = self.local.plan.segment
        segments = np.full(slots.stop - slots.start, segment[item])
        if (subsegment := modality.apart(span.shape)) is not None:  # parts that see only themselves
            # The plan numbers segments 1 .. max, so steps of max keep the numbers distinct.
            segments += segment.max() * subsegment
        row["segments"][row_index, slots] = np.where(modality.real_slots(span.shape), segments, 0)
        row["positions"][row_index, slots] = modality.positions(span.shape)[:, modality.format.axes]
        return slots

    def accept(self, row: Row, row_index: int, item: int, slots: slice) -> None:
        first_token = slots.start // self.modality.format.slots_per_token
        row["valid"][row_index, first_token : first_token + int(self.items.tokens[item])] = True


def _check_token_bounds(phase: str, plan: PhasePlan, row_format: RowFormat) -> None:
    """Raise `MisalignmentError` if a row ends, or an item begins, inside a language token."""
    slots_per_token = row_format.slots_per_token
    for name, slots in (("capacity", plan.capacity), ("offset", plan.offset)):
        for value in slots[slots % slots_per_token != 0][:1]:
            raise MisalignmentError(
                f"a {phase} row has {name} {value}, which cuts a language token of {slots_per_token} slots; "
                f"make phases.{phase}.capacities multiples of it"
            )


def _error_with_media(error: Exception, media: MediaReference) -> Exception:
    """An error that is not the fault of the media, with the item that was loading in its text."""
    where = shown(media)
    if isinstance(error, MemoryError):
        return MemoryError(f"no memory is left to load {where}")
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error}: {where}")
    return RuntimeError(f"{where} cannot be loaded: {type(error).__name__}: {error}")


def _empty_row(rows: int, slots: int, row_format: RowFormat) -> Row:
    tokens = slots // row_format.slots_per_token
    return {
        "features": np.zeros((rows, slots, row_format.features), row_format.dtype),
        "segments": np.zeros((rows, slots), np.int32),
        "positions": np.zeros((rows, slots, len(row_format.axes)), np.int32),
        "valid": np.zeros((rows, tokens), np.bool_),
        "failed": np.zeros(rows, np.int32),
    }
