"""Pictures and clips that are not there yet: items of a size, which a model draws.

    Blank(height, width, frames) --measure--> (time, height, width) in patches
    drawn patches                --frames-->  [frames, height, width, channels]

Each lies twice in a row, for classifier-free guidance (arXiv 2207.12598): once it sees what it is drawn from,
once it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import ceil_divide
from jaxmllm.data.media.generated import Generated, GeneratedPixels, frames_of
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference, Stream
from jaxmllm.row_format import RowFormat

BLANK = "blank:"  # before the size in addresses
COPIES = 2  # of an item in its row


@dataclass(frozen=True)
class Blank:
    """What is to be drawn, in pixels, or in numbers of a latent."""

    height: int
    width: int
    frames: int = 1

    @property
    def address(self) -> str:
        return f"{BLANK}{self}"

    @classmethod
    def at(cls, address: str) -> Blank:
        """That of an address."""
        return cls(*map(int, address.removeprefix(BLANK).split("x")))

    def open(self) -> Stream:
        raise MediaError("missing_file", f"the picture of {self} is not drawn yet")

    def files(self) -> Sequence[MediaReference]:
        return ()

    def __str__(self) -> str:
        frames = f"x{self.frames}" if self.frames > 1 else ""
        return f"{self.height}x{self.width}{frames}"


def blank_of(media: MediaReference) -> Blank | None:
    """The blank that a media item of a conversation is, if it is one."""
    inside = media.media if isinstance(media, Clip) else media
    return inside if isinstance(inside, Blank) else None


@dataclass(frozen=True)
class Blanks(Generated):
    """The diffusion modality of what is to be drawn, with the patches and bounds of what was learned."""

    learned: GeneratedPixels | GeneratedLatents

    formats = ()  # nothing is read

    @property
    def format(self) -> RowFormat:
        return self.learned.format

    def measure(self, media: MediaReference) -> Shape:
        """Raises `MediaError`: answered_before, cut_patch, image_too_large, too_many_frames."""
        blank = blank_of(media)
        if blank is None:
            raise MediaError(
                "answered_before",
                f"{media} is an image of the assistant, which would be drawn again; leave it out, or show it",
            )
        learned = self.learned
        self._check(blank)
        return (
            ceil_divide(blank.frames, learned.patch_frames),
            blank.height // learned.patch_size,
            blank.width // learned.patch_size,
        )

    def _check(self, blank: Blank) -> None:
        learned = self.learned
        if blank.height % learned.patch_size or blank.width % learned.patch_size:
            raise MediaError(
                "cut_patch",
                f"size {blank}: both sides must be multiples of model.diffusion.patch_size ({learned.patch_size})",
            )
        bounds = "generated"
        if isinstance(learned, GeneratedLatents):
            bounds = "latents"
            if blank.frames % learned.patch_frames:
                raise MediaError(
                    "cut_patch",
                    f"size {blank}: frames must be a multiple of model.diffusion.patch_frames "
                    f"({learned.patch_frames})",
                )
        elif (pixels := blank.height * blank.width) > learned.max_pixels:
            raise MediaError(
                "image_too_large",
                f"size {blank}: {pixels} pixels are more than data.generated.max_pixels ({learned.max_pixels}) of the "
                "run, the largest that it has learned to draw",
            )
        if blank.frames > learned.max_frames:
            raise MediaError(
                "too_many_frames",
                f"size {blank}: {blank.frames} frames are more than data.{bounds}.max_frames ({learned.max_frames}) of "
                "the run, the longest that it has learned to draw",
            )

    def length(self, shape: Shape) -> int:
        return COPIES * super().length(shape)

    def real(self, shape: Shape) -> int:
        return COPIES * super().real(shape)

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        return np.tile(super().positions(shape), (COPIES, 1))

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Zeros: drawing begins with noise alone."""
        return np.zeros((self.length(shape), self.format.features), self.format.dtype)

    def frames(self, patches: NDArray[Any], shape: Shape, blank: Blank) -> NDArray[Any]:
        """Drawn patches [prod(shape), features] side by side: [frames, height, width, channels], of latents as they
        were before they were normalised."""
        learned = self.learned
        frames = frames_of(patches, shape, learned.patch_frames, learned.patch_size)[: blank.frames]
        if isinstance(learned, GeneratedLatents):
            return frames * np.array(learned.std, np.float32) + np.array(learned.mean, np.float32)
        return frames
