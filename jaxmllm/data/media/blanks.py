"""Blank items: images, clips and latents of a given size that a model is to draw.

    Blank(frames, height, width) --measure--> patches (time, height, width)
    drawn patches --frames--> [frames, height, width, channels]

For classifier-free guidance (arXiv 2207.12598) a row holds each item twice: one copy sees its
conditions, the other does not. Without guidance it holds each item once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import ceil_divide
from jaxmllm.data.media.generated import Generated, GeneratedPixels, frames_of
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference, Stream
from jaxmllm.row_format import RowFormat

BLANK = "blank:"  # begins addresses; the sizes follow


@dataclass(frozen=True)
class Blank:
    """Size of an item to be drawn, in pixels, or for latents in numbers of a channel; an image has
    one frame."""

    frames: int
    height: int
    width: int

    @property
    def address(self) -> str:
        return f"{BLANK}{self.frames}x{self.height}x{self.width}"

    @classmethod
    def at(cls, address: str) -> Blank:
        """The blank item of an address."""
        return cls(*map(int, address.removeprefix(BLANK).split("x")))

    def open(self) -> Stream:
        raise MediaError("missing_file", f"{self} is not drawn yet")

    def files(self) -> Sequence[MediaReference]:
        return ()

    def __str__(self) -> str:
        frames = f" of {self.frames} frames" if self.frames > 1 else ""
        return f"size {self.height}x{self.width}{frames}"


@dataclass(frozen=True)
class Blanks(Generated):
    """The diffusion modality of items to be drawn, with the patches and bounds of the modality
    `learned` that the model was trained with."""

    learned: GeneratedPixels | GeneratedLatents
    copies: int = 2

    formats: ClassVar[tuple[str, ...]] = ()

    @property
    def format(self) -> RowFormat:
        return self.learned.format

    @property
    def crossed(self) -> bool:
        return self.learned.crossed

    def measure(self, media: MediaReference) -> Shape:
        """Patch grid of a blank item. Raises `MediaError`: answered_before, cut_patch,
        too_many_frames, image_too_large."""
        learned = self.learned
        # The reference of a clip to be drawn is wrapped, as that of any video.
        blank = media.media if isinstance(media, Clip) else media
        if not isinstance(blank, Blank):
            raise MediaError(
                "answered_before",
                f"{media} is what the assistant answers, which would be drawn again; leave it out, or show it",
            )
        if blank.height % learned.patch_size or blank.width % learned.patch_size:
            raise MediaError(
                "cut_patch",
                f"{blank}: both sides must be multiples of model.diffusion.patch_size ({learned.patch_size})",
            )
        if blank.frames > learned.max_frames:
            raise MediaError(
                "too_many_frames",
                f"{blank}: the run has learned to draw at most max_frames ({learned.max_frames}) of data",
            )
        # A last patch of pixels may have more frames than are asked for, which `frames` cuts off.
        # One of latents may not.
        if isinstance(learned, GeneratedPixels):
            self._check_area(blank, learned.max_pixels)
        elif blank.frames % learned.patch_frames:
            raise MediaError(
                "cut_patch",
                f"{blank}: latents have a multiple of model.diffusion.patch_frames ({learned.patch_frames})",
            )
        return (
            ceil_divide(blank.frames, learned.patch_frames),
            blank.height // learned.patch_size,
            blank.width // learned.patch_size,
        )

    def _check_area(self, blank: Blank, max_pixels: int) -> None:
        if (pixels := blank.height * blank.width) > max_pixels:
            raise MediaError(
                "image_too_large",
                f"{blank}: {pixels} pixels are more than data.generated.max_pixels ({max_pixels}) of the run, the "
                "largest that it has learned to draw",
            )

    def length(self, shape: Shape) -> int:
        return self.copies * super().length(shape)

    def real(self, shape: Shape) -> int:
        return self.copies * super().real(shape)

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        return np.tile(self.learned.positions(shape), (self.copies, 1))

    def condition_positions(self, shape: Shape, count: int) -> NDArray[np.int32]:
        return self.learned.condition_positions(shape, count)

    def first_time(self, conditions: int) -> int:
        return self.learned.first_time(conditions)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Zeros: drawing begins with noise alone."""
        return np.zeros((self.length(shape), self.format.features), self.format.dtype)

    def frames(self, patches: NDArray[Any], blank: Blank) -> NDArray[Any]:
        """Drawn patches [slots, features] joined to frames: [frames, height, width, channels].
        Pixels range from about -1 (black) to 1; latents are on the scale of the autoencoder."""
        learned = self.learned
        shape = self.measure(blank)
        frames = frames_of(patches, shape, learned.patch_frames, learned.patch_size)
        if isinstance(learned, GeneratedLatents):
            frames = frames * np.array(learned.std) + np.array(learned.mean)
        return frames[: blank.frames]
