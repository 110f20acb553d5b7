"""Pictures that are not there yet: items of a size, which a model draws.

    Blank(height, width) --measure--> patches (1, grid_h, grid_w)     drawn patches --picture--> [height, width, 3]

Each lies twice in a row, for classifier-free guidance (arXiv 2207.12598): once it sees what it is drawn from,
once it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.images import GeneratedImages, Images
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import MediaError, MediaReference, Stream

BLANK = "blank:"  # before the size in addresses
COPIES = 2  # of an item in its row


@dataclass(frozen=True)
class Blank:
    """A picture to be drawn, in pixels."""

    height: int
    width: int

    @property
    def address(self) -> str:
        return f"{BLANK}{self}"

    @classmethod
    def at(cls, address: str) -> Blank:
        """That of an address."""
        height, width = map(int, address.removeprefix(BLANK).split("x"))
        return cls(height, width)

    def open(self) -> Stream:
        raise MediaError("missing_file", f"the picture of {self} is not drawn yet")

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class BlankImages(GeneratedImages):
    """The diffusion modality of pictures that are to be drawn."""

    @classmethod
    def like(cls, learned: Images) -> BlankImages:
        """With the patches and bounds of what was learned."""
        return cls(learned.patch_size, learned.merge, learned.min_pixels, learned.max_pixels)

    def measure(self, media: MediaReference) -> Shape:
        """Raises `MediaError`: answered_before, cut_patch, image_too_large."""
        if not isinstance(media, Blank):
            raise MediaError(
                "answered_before",
                f"{media} is an image of the assistant, which would be drawn again; leave it out, or show it",
            )
        if media.height % self.cell_size or media.width % self.cell_size:
            raise MediaError(
                "cut_patch",
                f"size {media}: both sides must be multiples of model.diffusion.patch_size ({self.cell_size})",
            )
        pixels = media.height * media.width
        if pixels > self.max_pixels:
            raise MediaError(
                "image_too_large",
                f"size {media}: {pixels} pixels are more than data.generated.max_pixels ({self.max_pixels}) of the "
                "run, the largest that it has learned to draw",
            )
        return 1, media.height // self.cell_size, media.width // self.cell_size

    def length(self, shape: Shape) -> int:
        return COPIES * super().length(shape)

    def real(self, shape: Shape) -> int:
        return COPIES * super().real(shape)

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        return np.tile(super().positions(shape), (COPIES, 1))

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Zeros: drawing begins with noise alone."""
        return np.zeros((self.length(shape), self.format.features), np.uint8)

    def picture(self, patches: NDArray[Any], shape: Shape) -> NDArray[Any]:
        """Drawn patches [grid_h * grid_w, features] side by side: [height, width, 3]."""
        _, rows, columns = shape
        size = self.patch_size
        tiles = patches.reshape(rows, columns, size, size, 3).swapaxes(1, 2)
        return tiles.reshape(rows * size, columns * size, 3)
