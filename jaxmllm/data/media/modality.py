"""What the data side must know of an encoder phase, in one record: adding a modality means adding one.

A modality measures an item from its header, loads it into slots, and says where its tokens stand in
a conversation. Slots are what rows are packed with: patches of an image, log-mel frames of a clip.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.reference import MediaReference
from jaxmllm.row_format import RowFormat

# Time, height, width, in what the modality counts; 1 along the axes that it lacks
Shape = tuple[int, int, int]


class ClipShape(tuple[int, int, int]):
    """Shape of a clip that is seen: (groups of frames, height, width), each group an item of its phase.

    Attributes:
      frames: of its file or folder.
      rate: how many of these are shown per second, on average.
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
        """Shape of each item."""
        return (1, *self[1:])


class Modality(Protocol):
    """One encoder phase as the data side sees it. Implementations are frozen records whose `repr`
    shows every setting: length indexes are cached by it."""

    @property
    def name(self) -> str:
        """Phase and component name: "vision"."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The words in conversations of what it takes: ("image",)."""
        ...

    @property
    def generated(self) -> bool:
        """Whether the model learns to make such items: in what the assistant says, with rows that also
        hold what each is made from, and without language tokens of their own."""
        ...

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the file formats that it reads. Where this grows, items that a cached index
        refused are measured again."""
        ...

    @property
    def format(self) -> RowFormat:
        """What the slots of its rows hold and how they group."""
        ...

    def measure(self, media: MediaReference) -> Shape:
        """Shape of the item from its header alone: of a clip that becomes several items, a `ClipShape`. Raises
        `MediaError`."""
        ...

    def captions(self, shape: Shape) -> tuple[str, ...]:
        """What is written before each item of a clip, which then has a frame of its own; empty: nothing is, and
        they stand in one frame."""
        ...

    def length(self, shape: Shape) -> int:
        """Slots the item occupies."""
        ...

    def real(self, shape: Shape) -> int:
        """Slots of it that hold data."""
        ...

    def tokens(self, shape: Shape) -> int:
        """Language tokens the item becomes."""
        ...

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Decode: [length, F]. Raises `MediaError` when the body is broken or does not have `shape`."""
        ...

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """Positions (time, height, width) of the slots inside the item: [length, 3]."""
        ...

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        """Which slots hold data rather than padding inside the item: [length]."""
        ...

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        """The number of the part of the item that each slot is of, where slots see their own part alone, else None:
        [length]."""
        ...

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        """Three-axis positions (time, height, width) of its language tokens when the item begins at
        position `start` (M-RoPE, arXiv 2409.12191): [tokens, 3]; and where the text after it goes on. Whole numbers,
        but for times of videos that are not rounded, and what comes after these."""
        ...
