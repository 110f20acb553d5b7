"""The length index of one source as a value: columns over its examples, over their media items, and
over the distinct media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints, Longs
from jaxmllm.config.schema import Targets
from jaxmllm.data.media.modality import ClipShape, Shape
from jaxmllm.data.printable import shown
from jaxmllm.data.sources.source import Source

EXAMPLE_COLUMNS: Final = ("id", "offset", "line", "label", "language_length", "targets", "checksum")
ITEM_COLUMNS: Final = (
    "item_phase",
    "item_media",
    "item_shape",
    "item_length",
    "item_real",
    "item_tokens",
    "item_slot",
)
MEDIA_COLUMNS: Final = ("phase", "stamp", "shape", "frames", "rate")


class MediaKey(NamedTuple):
    """Identity of a media item when it is measured. An address is not enough: a file may be both an
    image and a video."""

    phase: str
    part: str  # "image", "audio" or "video", as conversations call it
    address: str


@dataclass(frozen=True)
class Rejected:
    """A record that is left out: `line` (from 1) of the file `path`, a `reason` that is a stable
    word, and a message."""

    id: str
    path: str
    line: int
    reason: str
    message: str

    def __str__(self) -> str:
        return shown(f"{self.path}:{self.line}: {self.message} [{self.reason}]")


@dataclass(frozen=True)
class Measured:
    """Result of reading a media item's header: a shape, or (reason, message) of the failure."""

    stamp: tuple[int, int]  # see `Source.media_stamp`
    shape: Shape | None
    failure: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class MediaTable:
    """The D distinct media items of a source and the results of reading their headers."""

    address: tuple[str, ...]  # [D] see `Source.media`
    part: tuple[str, ...]  # [D] "image", "audio" or "video", as conversations call them
    phase: NDArray[np.int8]  # [D] index in `LengthIndex.phases`
    stamp: Longs  # [D, 2] see `Source.media_stamp`
    shape: Ints  # [D, 3]; -1 if the header gave none
    frames: Ints  # [D] `frames` of a `ClipShape`; 0: the shape is not one
    rate: NDArray[np.float64]  # [D] `rate` of a `ClipShape`; 0: the shape is not one
    failure: Mapping[int, tuple[str, str]]  # row -> (reason, message), for rows without a shape

    def measured(self, row: int) -> Measured:
        """Result of reading the header of one item."""
        size, modified = self.stamp[row].tolist()
        if row in self.failure:
            return Measured((size, modified), None, self.failure[row])
        return Measured((size, modified), self.shape_of(row))

    def shape_of(self, row: int) -> Shape:
        """Shape of one item that has no failure."""
        time, height, width = self.shape[row].tolist()
        if not (frames := int(self.frames[row])):
            return time, height, width
        return ClipShape((time, height, width), frames, float(self.rate[row]))


@dataclass(frozen=True)
class LengthIndex:
    """N examples of one source and their K media items; example n has items item_start[n] ..
    item_start[n + 1]."""

    name: str  # configured name of the source
    source: Source
    learned: Targets  # which tokens have a target, and so are counted by `targets`
    phases: tuple[str, ...]  # phases of media; `item_phase` indexes it
    labels: tuple[str, ...]  # source labels of the records; `label` indexes it
    id: NDArray[np.str_]  # [N]
    offset: Longs  # [N] argument of `Source.record`
    line: Longs  # [N] from 1
    label: Ints  # [N] index in `labels`
    language_length: Longs  # [N] tokens
    targets: Longs  # [N] tokens with a target
    checksum: Longs  # [N] CRC-32 of the record's text
    item_start: Longs  # [N + 1]
    item_phase: NDArray[np.int8]  # [K] index in `phases`
    item_media: Ints  # [K] row of `media`
    item_shape: Ints  # [K, 3]
    item_length: Longs  # [K] slots
    item_real: Longs  # [K] slots that hold data
    item_tokens: Longs  # [K] language tokens
    item_slot: Longs  # [K] index of the first of these in the example's sequence
    media: MediaTable
    rejected: tuple[Rejected, ...]  # in the order of records

    def __len__(self) -> int:
        return len(self.id)

    def place(self, example: int) -> str:
        """Place of an example's record for messages: FILE:LINE."""
        path, line = self.source.place(int(self.line[example]))
        return f"{shown(path)}:{line}"

    def shapes(self, example: int) -> tuple[Shape, ...]:
        """Shapes of an example's media in reading order."""
        shapes = []
        item, end = self.item_start[example : example + 2].tolist()
        while item < end:
            shapes.append(self.media.shape_of(self.item_media[item]))
            # The items of a video are consecutive and share its shape: skip to the item after them.
            item += item_count(shapes[-1])
        return tuple(shapes)

    def without(self, refused: Sequence[tuple[int, str, str]]) -> LengthIndex:
        """The index with some examples moved to `rejected`.

        Args:
          refused: (example, reason, message), once per example.
        """
        if not refused:
            return self
        keep = np.ones(len(self), np.bool_)
        keep[[example for example, _, _ in refused]] = False
        counts = np.diff(self.item_start)
        keep_items = np.repeat(keep, counts)
        moved = [
            Rejected(str(self.id[example]), *self.source.place(int(self.line[example])), *failure)
            for example, *failure in refused
        ]
        # The media table stays whole, because items refer to it by row.
        columns = {name: getattr(self, name)[keep] for name in EXAMPLE_COLUMNS}
        columns |= {name: getattr(self, name)[keep_items] for name in ITEM_COLUMNS}
        rejected = tuple(
            sorted((*self.rejected, *moved), key=lambda refusal: (refusal.path, refusal.line))
        )
        return replace(self, **columns, item_start=starts(counts[keep]), rejected=rejected)

    def for_rows(self) -> LengthIndex:
        """The index without media names and refusals; see `Corpus.for_rows`."""
        media = replace(self.media, address=(), part=(), failure={})
        return replace(self, media=media, rejected=())


def item_count(shape: Shape) -> int:
    """Items that a media item of this shape becomes: a video has one for each group of frames."""
    return shape[0] if isinstance(shape, ClipShape) else 1


def starts(counts: Sequence[int] | NDArray[Any]) -> Longs:
    """Starts of N consecutive groups of these sizes, and the end of the last one: [N + 1]."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
