"""Pictures that another program prepared: patches of normalised colors.

pixel_values [patches, 3 * frames * size**2], image_grid_thw [pictures, 3] --> slots of rows, spans of texts
pixel_values [pictures, 3, side, side], of towers that see squares alone   --> the same

Rows hold colors as files have them, so the normalisation is taken back; what is no color of 8 bits is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.config.schema import ConfigError, VisionConfig
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.tools.prepared_media import Places, Spans

ARGUMENTS = ("pixel_values", "image_grid_thw")
COLOR_ERROR = 0.01  # of 255 levels, that rounding may have come to


@dataclass(frozen=True)
class PreparedImages(Images):
    """Images whose patches are there already."""

    prepared: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)  # by address

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        return self.prepared[media.address]


def read_pictures(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    texts: Sequence[Ints],
    places: Places,
    images: Modality,
    vision: VisionConfig,
) -> tuple[PreparedImages, tuple[Spans, ...]]:
    """The pictures of some texts, and where they stand in each.

    Raises `ConfigError` for what is no picture that the tower takes, or has other tokens than the texts.

    Args:
      texts: columns that hold each text.
      images: what reads pictures elsewhere.
    """
    assert isinstance(images, Images)
    if images.resize == "square":
        return _read_squares(path, arrays, texts, places, images, vision)
    if missing := [name for name in ARGUMENTS if name not in arrays]:
        raise ConfigError(f"{path} has pictures, but not {' and '.join(missing)}")
    grids = _grids(path, arrays["image_grid_thw"], images.merge)
    colors = _colors(path, arrays["pixel_values"], vision)
    counts = [images.length(grid) for grid in grids]
    if len(colors) != sum(counts):
        raise ConfigError(
            f"{path}: pixel_values has {len(colors)} patches, and image_grid_thw {sum(counts)}"
        )
    spans = places.spans(path, "the pictures of image_grid_thw", images, grids, texts)
    return _prepared(images, np.split(colors, np.cumsum(counts)[:-1])), spans


def _read_squares(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    texts: Sequence[Ints],
    places: Places,
    images: Images,
    vision: VisionConfig,
) -> tuple[PreparedImages, tuple[Spans, ...]]:
    """`read_pictures` of squares of one size."""
    if others := [name for name in ARGUMENTS[1:] if name in arrays]:
        raise ConfigError(f"{path} has {others[0]}, and pictures of this model are squares")
    pixels, side = arrays["pixel_values"], images.side
    if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
        raise ConfigError(
            f"{path}: pixel_values must be [pictures, 3, {side}, {side}] (got {list(pixels.shape)})"
        )
    shape = (1, *images.grid(side, side))
    spans = places.spans(path, "the pictures of pixel_values", images, [shape] * len(pixels), texts)
    colors = _levels(path, pixels.transpose(0, 2, 3, 1)[None], vision)
    return _prepared(images, [images.patches(picture, shape) for picture in colors]), spans


def _prepared(images: Images, pictures: Sequence[NDArray[np.uint8]]) -> PreparedImages:
    """What reads these pictures, given as patches, by their numbers."""
    settings = {part.name: getattr(images, part.name) for part in fields(images)}
    patches = {str(number): picture for number, picture in enumerate(pictures)}
    return PreparedImages(**settings, prepared=patches)


def _grids(path: Path, values: NDArray[Any], merge: int) -> list[Shape]:
    grids = [(int(frames), int(rows), int(columns)) for frames, rows, columns in values]
    for frames, *sides in grids:
        if frames != 1 or any(side % merge for side in sides):
            raise ConfigError(
                f"{path}: image_grid_thw has {[frames, *sides]}; pictures have one frame, and whole cells of {merge} x "
                f"{merge} patches"
            )
    return grids


def _colors(path: Path, pixels: NDArray[Any], vision: VisionConfig) -> NDArray[np.uint8]:
    """uint8 [patches, (row, column, color)] of normalised (color, frame, row, column)."""
    size, frames = vision.patch_size, vision.patch_frames
    if pixels.ndim != 2 or pixels.shape[1] != frames * vision.patch_features:
        raise ConfigError(
            f"{path}: pixel_values must be [patches, {frames * vision.patch_features}] (got {list(pixels.shape)})"
        )
    apart = pixels.reshape(-1, 3, frames, size, size).transpose(2, 0, 3, 4, 1)
    return _levels(path, apart, vision).reshape(len(pixels), -1)


def _levels(path: Path, frames: NDArray[Any], vision: VisionConfig) -> NDArray[np.uint8]:
    """Colors as files have them, of normalised ones [frames, ..., 3] that are equal in all frames: [..., 3]."""
    levels = 255 * (frames.astype(np.float64) * vision.pixel_std + vision.pixel_mean)
    colors = levels[0].round()
    rounded = np.abs(levels - colors).max(initial=0.0)
    if rounded > COLOR_ERROR or colors.min(initial=0) < 0 or colors.max(initial=0) > 255:
        raise ConfigError(
            f"{path}: pixel_values are not colors of 8 bits, equal in all {len(frames)} frames, less "
            f"{list(vision.pixel_mean)}, over {list(vision.pixel_std)}; write what the folder's processor makes"
        )
    return colors.astype(np.uint8)
