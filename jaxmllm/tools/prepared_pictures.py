"""Pictures that another program prepared: patches of normalised colors.

pixel_values [patches, 3 * frames * size**2], image_grid_thw [pictures, 3] --> slots of rows, spans of texts

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

    patches: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)  # by address

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        return self.patches[media.address]


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
    if missing := [name for name in ARGUMENTS if name not in arrays]:
        raise ConfigError(f"{path} has pictures, but not {' and '.join(missing)}")
    assert isinstance(images, Images)
    grids = _grids(path, arrays["image_grid_thw"], images.merge)
    colors = _colors(path, arrays["pixel_values"], vision)
    counts = [images.length(grid) for grid in grids]
    if len(colors) != sum(counts):
        raise ConfigError(
            f"{path}: pixel_values has {len(colors)} patches, and image_grid_thw {sum(counts)}"
        )
    spans = places.spans(path, "the pictures of image_grid_thw", images, grids, texts)
    parts = np.split(colors, np.cumsum(counts)[:-1])
    settings = {part.name: getattr(images, part.name) for part in fields(images)}
    patches = {str(number): part for number, part in enumerate(parts)}
    return PreparedImages(**settings, patches=patches), spans


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
    apart = pixels.astype(np.float64).reshape(-1, 3, frames, size, size).transpose(2, 0, 3, 4, 1)
    levels = 255 * (apart * vision.pixel_std + vision.pixel_mean)
    colors = levels[0].round()
    rounded = np.abs(levels - colors).max(initial=0.0)
    if rounded > COLOR_ERROR or colors.min(initial=0) < 0 or colors.max(initial=0) > 255:
        raise ConfigError(
            f"{path}: pixel_values are not colors of 8 bits, equal in all {frames} frames, less "
            f"{list(vision.pixel_mean)}, over {list(vision.pixel_std)}; write what the folder's processor makes"
        )
    return colors.astype(np.uint8).reshape(len(colors), -1)
