"""The protocol of a modality: the record from which the data side learns all about an encoder or
generator phase. Adding a modality means adding one such record.

A modality measures an item from its header, loads it into slots, and gives the positions of its
tokens in a conversation. Slots are the units that rows are packed with: patches of an image,
log-mel frames of a clip.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.reference import MediaReference
from jaxmllm.row_format import RowFormat

# (time, height, width) in the units of the modality; 1 along axes that it does not have
Shape = tuple[int, int, int]


class ClipShape(tuple[int, int, int]):
    """Shape of a video for the vision tower: (groups of frames, height, width). Each group is an
    item of the phase.

    Attributes:
      frames: number of frames of its file or folder.
      rate: average number of these that are shown per second.
    """

    frames: int
    rate: float

    def __new__(cls, shape: Shape, frames: int, rate: float) -> Self:
        clip_shape = super().__new__(cls, shape)
        clip_shape.frames = frames
        clip_shape.rate = rate
        return clip_shape

    def __getnewargs__(self) -> tuple[tuple[int, ...], int, float]:
        return (*self,), self.frames, self.rate

    @property
    def group(self) -> Shape:
        """Shape of each item, which is one group of frames."""
        return (1, *self[1:])


class Modality(Protocol):
    """One encoder or generator phase as the data side sees it. Implementations are frozen
    dataclasses whose `repr` shows every setting that lengths depend on: it is part of the name of a
    cached length index."""

    @property
    def name(self) -> str:
        """Phase and component name: "vision"."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The words by which conversations call the parts that it takes: ("image",)."""
        ...

    @property
    def generated(self) -> bool:
        """Whether the model learns to make these items. They are then part of what the assistant
        says, their rows also hold the conditions that each item is made from, and they have no
        language tokens of their own."""
        ...

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the file formats that it reads. If a format is added, items that a cached index
        refused are measured again."""
        ...

    @property
    def format(self) -> RowFormat:
        """Content of the slots of its rows, and how they are grouped."""
        ...

    def measure(self, media: MediaReference) -> Shape:
        """Shape of the item from its header alone; a `ClipShape` for a clip that becomes several
        items. Raises `MediaError`."""
        ...

    def captions(self, shape: Shape) -> tuple[str, ...]:
        """Text before each item of a clip, where each item has frame tokens of its own; empty if
        all items of the clip share one pair of frame tokens and have no text before them."""
        ...

    def length(self, shape: Shape) -> int:
        """Slots the item occupies."""
        ...

    def real(self, shape: Shape) -> int:
        """Slots of the item that hold data."""
        ...

    def tokens(self, shape: Shape) -> int:
        """Language tokens the item becomes."""
        ...

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Decode the item: [length, F]. Raises `MediaError` when the body is broken or does not
        have `shape`."""
        ...

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """Positions (time, height, width) of the slots inside the item: [length, 3], or [length, 5]
        if height and width of an image's grid follow."""
        ...

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        """Which slots hold data rather than padding inside the item: [length]."""
        ...

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        """Number of the part of the item that each slot belongs to, where slots see only their own
        part: [length]. None where slots see the whole item."""
        ...

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        """Three-axis positions (time, height, width) of the item's language tokens when it begins
        at position `start` (M-RoPE, arXiv 2409.12191): [tokens, 3]; and the position at which the
        text after it continues. Whole numbers, except for times of videos that are not rounded, and
        positions after these."""
        ...
