"""Places of media in the token ids that another program prepared, and positions of texts with
media."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.config.schema import ConfigError
from jaxmllm.data.media.modality import ClipShape, Modality, Shape
from jaxmllm.data.media.reference import FileRange, taken_as
from jaxmllm.data.text.render import MediaSpan, items_of
from jaxmllm.data.text.sequence_positions import SequencePositions

Spans = tuple[MediaSpan, ...]  # the media of one text, in reading order


@dataclass(frozen=True)
class Places:
    """The tokens of one kind of media, and the argument that marks them."""

    source: str  # name of the argument
    inside: NDArray[np.bool_]  # [B, T]

    def runs(self, texts: Sequence[Ints]) -> list[list[tuple[int, int]]]:
        """Begin and end of each item's tokens, by text.

        Args:
          texts: columns that hold each text.
        """
        return [_runs(row[columns]) for row, columns in zip(self.inside, texts, strict=True)]

    def spans(
        self,
        path: Path,
        what: str,
        modality: Modality,
        shapes: Sequence[Shape],
        texts: Sequence[Ints],
        prefix: str = "",
    ) -> tuple[Spans, ...]:
        """The media in each text; the address of an item's reference is `prefix` and the item's
        number.

        Raises `ConfigError` if the items do not have as many tokens as the texts have for them.

        Args:
          what: the items in words, with the argument that holds them.
          texts: columns that hold each text.
        """
        runs = self.runs(texts)
        tokens = [modality.tokens(shape) for shape in shapes]
        run_tokens = [stop - start for of_text in runs for start, stop in of_text]
        if run_tokens != tokens:
            raise ConfigError(
                f"{path}: {what} have {tokens} tokens, and {self.source} {run_tokens}"
            )
        # Items are numbered through all texts, in the order in which `tokens` was compared above.
        numbers = itertools.count()

        def span(start: int, stop: int) -> MediaSpan:
            item = next(numbers)
            shape = shapes[item]
            address = f"{prefix}{item}"
            reference = FileRange(path, 0, 0, f"{what}: {item}", address)
            kind = "video" if isinstance(shape, ClipShape) else "image"
            return MediaSpan(modality.name, taken_as(kind, reference), shape, start, stop - start)

        return tuple(tuple(span(*run) for run in of_text) for of_text in runs)


@dataclass(frozen=True)
class Prepared:
    """The arrays of a file of prepared inputs, and where its texts and their media stand in them."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]  # by argument
    texts: Sequence[Ints]  # columns that hold each text
    places: Mapping[str, Places]  # by kind of media, of those that one encoder reads

    def spans(
        self, kind: str, what: str, modality: Modality, shapes: Sequence[Shape], prefix: str = ""
    ) -> tuple[Spans, ...]:
        """The media of a kind in each text, as `Places.spans`."""
        return self.places[kind].spans(self.path, what, modality, shapes, self.texts, prefix)


def items_in(spans: Spans, modalities: Mapping[str, Modality]) -> Spans:
    """The items of a text with these media: a video's items are its groups of frames."""
    items: list[MediaSpan] = []
    for span in spans:
        slot = span.slot
        for reference, shape in items_of(span.reference, span.shape):
            tokens = modalities[span.phase].tokens(shape)
            items.append(MediaSpan(span.phase, reference, shape, slot, tokens))
            slot += tokens
    return tuple(items)


def positions_of(
    length: int, spans: Spans, modalities: Mapping[str, Modality]
) -> NDArray[np.float32]:
    """Three-axis positions [L, 3] of a text with media."""
    positions = SequencePositions()
    end = 0
    for span in spans:
        positions.add_text(span.slot - end)
        positions.add_item(modalities[span.phase], span.shape)
        end = span.slot + span.tokens
    positions.add_text(length - end)
    return positions.finish()


def _runs(inside: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of each run of true values."""
    edges = np.flatnonzero(np.diff(inside.astype(np.int8), prepend=0, append=0))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
