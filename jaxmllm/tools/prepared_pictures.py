"""Pictures and videos that another program prepared: patches of normalised colors.

pixel_values [patches, 3 * frames * size**2], image_grid_thw [pictures, 3]         --> slots of rows, spans of texts
pixel_values [pictures, 3, side, side], for towers that see only squares           --> the same
pixel_values_videos, video_grid_thw, and the seconds from one group of frames to the next

Rows hold colors as files have them, so the normalisation is undone; values that are no 8-bit colors
are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints
from jaxmllm.config.schema import SQUARES, ConfigError, VisionConfig
from jaxmllm.data.media.image_tiles import ClassedTiles
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import ClipShape, Modality, Shape
from jaxmllm.data.media.reference import Clip, MediaReference
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.tools.prepared_media import Places, Prepared, Spans

PICTURES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")
SECONDS = ("second_per_grid_ts", "video_second_per_grid")  # names in different families
ARGUMENTS = (*PICTURES, *VIDEOS, *SECONDS)
COLOR_ERROR = 0.01  # largest rounding error of a color, in levels of 255
OF_VIDEO = "v"  # prefix of the addresses of videos

# By address: [patches, numbers] of a picture, or [groups of frames, patches, numbers] of a video
Patches = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class _PreparedPatches:
    """Part of a modality that gives out prepared patches instead of reading files."""

    prepared: Patches = field(default_factory=dict)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        return self.prepared[media.address]


@dataclass(frozen=True)
class PreparedImages(_PreparedPatches, Images):
    """Images with prepared patches."""


@dataclass(frozen=True)
class PreparedTiles(_PreparedPatches, ClassedTiles):
    """Images in tiles, with prepared patches."""


@dataclass(frozen=True)
class PreparedVideos(_PreparedPatches, ImagesAndVideos):
    """Images and videos with prepared patches. The rate of a `ClipShape` is here the seconds from
    one group of frames to the next."""

    def load_groups(
        self, clip: Clip, numbers: Sequence[int], group: Shape
    ) -> Iterator[NDArray[Any]]:
        return (self.prepared[clip.address][group_index] for group_index in numbers)

    def group_seconds(self, shape: ClipShape) -> float:
        return shape.rate


def read_pictures(
    prepared: Prepared, images: Modality, vision: VisionConfig
) -> tuple[Modality, tuple[Spans, ...]]:
    """The pictures and videos of some texts, and their spans in each text.

    Raises `ConfigError` for media that the tower does not take, or that do not have the tokens of
    the texts.

    Args:
      prepared: with the places of images and, if they are read, of videos.
      images: the modality that reads pictures from files.
    """
    assert isinstance(images, Images)
    if images.resize in SQUARES:
        return _read_squares(prepared, images, vision)
    path = prepared.path
    arrays = prepared.arrays
    written = isinstance(images, ImagesAndVideos) and images.videos.times == "text"
    if (seconds := sorted(arrays.keys() & {*SECONDS})) and (written or VIDEOS[1] not in arrays):
        raise ConfigError(
            f"{path}: {seconds[0]}: there are no videos whose times are positions; leave it out"
        )
    patches: dict[str, NDArray[np.uint8]] = {}
    spans: list[Spans] = [()] * len(prepared.texts)
    for medium, kind, names, prefix in (
        ("image", "pictures", PICTURES, ""),
        ("video", "videos", VIDEOS, OF_VIDEO),
    ):
        missing = [name for name in names if name not in arrays]
        # Without any of the arguments, the texts have no media of this kind.
        if missing == [*names]:
            continue
        if missing:
            raise ConfigError(f"{path} has {kind}, but not {' and '.join(missing)}")
        shapes = _shapes(path, names[1], arrays, images)
        colors = _colors(path, names[0], arrays[names[0]], vision)
        counts = [images.length(shape) for shape in shapes]
        if len(colors) != sum(counts):
            raise ConfigError(
                f"{path}: {names[0]} has {len(colors)} patches, and {names[1]} {sum(counts)}"
            )
        what = f"the {kind} of {names[1]}"
        of_texts = prepared.spans(medium, what, images, shapes, prefix)
        # Pictures come before videos here; the caller puts both into reading order.
        spans = [(*before, *added) for before, added in zip(spans, of_texts, strict=True)]
        by_item = zip(shapes, np.split(colors, np.cumsum(counts)[:-1]), strict=True)
        patches |= {
            f"{prefix}{index}": _grouped_patches(shape, of_item)
            for index, (shape, of_item) in enumerate(by_item)
        }
    return _prepared_modality(images, patches), tuple(spans)


def _read_squares(
    prepared: Prepared, images: Images, vision: VisionConfig
) -> tuple[Modality, tuple[Spans, ...]]:
    """`read_pictures` for squares of one size."""
    path = prepared.path
    arrays = prepared.arrays
    places = prepared.places["image"]
    if unused := [name for name in ARGUMENTS[1:] if name in arrays]:
        raise ConfigError(
            f"{path} has {unused[0]}, and pictures of this model are squares; leave it out"
        )
    pixels = arrays["pixel_values"]
    side = images.side
    if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
        raise ConfigError(
            f"{path}: pixel_values must be [pictures, 3, {side}, {side}] (got {list(pixels.shape)})"
        )
    grid = images.grid(side, side)
    counts = _tile_counts(images, places, prepared.texts) or [1] * len(pixels)
    if sum(counts) != len(pixels):
        raise ConfigError(
            f"{path}: pixel_values has {len(pixels)} tiles, and {places.source} {sum(counts)}"
        )
    shapes = [(tiles, *grid) for tiles in counts]
    spans = prepared.spans("image", "the pictures of pixel_values", images, shapes)
    # [tiles, 3, side, side] becomes one frame of [tiles, side, side, 3]. Below, the tiles of a
    # picture are put on top of each other, [tiles * side, side, 3], as `patches` takes them.
    (colors,) = _levels(path, "pixel_values", pixels.transpose(0, 2, 3, 1)[None], vision)
    pictures = np.split(colors.reshape(-1, side, 3), side * np.cumsum(counts)[:-1])
    patches = {
        str(index): images.patches(picture, shape)
        for index, (picture, shape) in enumerate(zip(pictures, shapes, strict=True))
    }
    return _prepared_modality(images, patches), spans


def _tile_counts(images: Images, places: Places, texts: Sequence[Ints]) -> list[int]:
    """How many tiles each picture has, counted by its tokens; empty if pictures are not cut into
    tiles."""
    if not isinstance(images, ClassedTiles):
        return []
    of_tile = images.tokens((1, *images.grid(images.side, images.side)))
    return [(end - start) // of_tile for runs in places.runs(texts) for start, end in runs]


def _prepared_modality(images: Images, patches: Patches) -> Modality:
    """A modality with the settings of `images` that gives out these patches."""
    settings = {setting.name: getattr(images, setting.name) for setting in fields(images)}
    prepared: type[PreparedImages | PreparedTiles | PreparedVideos] = PreparedImages
    if isinstance(images, ClassedTiles):
        prepared = PreparedTiles
    elif isinstance(images, ImagesAndVideos):
        prepared = PreparedVideos
    return prepared(**settings, prepared=patches)


def _grouped_patches(shape: Shape, patches: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if not isinstance(shape, ClipShape):
        return patches
    return patches.reshape(shape[0], -1, patches.shape[-1])


def _shapes(
    path: Path, name: str, arrays: Mapping[str, NDArray[Any]], images: Images
) -> list[Shape]:
    """Shapes of the pictures, or of the videos; if the texts hold the times of videos, each group
    of frames is an item of its own."""
    if arrays[name].shape[1:] != (3,) or arrays[name].dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: {name} must be whole numbers, [items, 3]: frames, rows and columns (got {arrays[name].dtype} "
            f"{list(arrays[name].shape)})"
        )
    grids = [(int(frames), int(rows), int(columns)) for frames, rows, columns in arrays[name]]
    moving = name in VIDEOS
    merge = images.merge
    for frames, *sides in grids:
        if (frames != 1 and not moving) or any(side % merge for side in sides):
            raise ConfigError(
                f"{path}: {name} has {[frames, *sides]}; pictures have one frame, and whole cells of {merge} x "
                f"{merge} patches"
            )
    if not moving:
        return [*grids]
    assert isinstance(images, ImagesAndVideos)
    if images.videos.times == "text":
        return [(1, *grid[1:]) for grid in grids for _ in range(grid[0])]
    seconds = next((arrays[key] for key in SECONDS if key in arrays), None)
    if seconds is None or seconds.shape != (len(grids),):
        raise ConfigError(
            f"{path} has videos, but not {' or '.join(SECONDS)} [videos], the seconds from one group of frames to the "
            "next"
        )
    return [
        ClipShape(grid, grid[0], step) for grid, step in zip(grids, seconds.tolist(), strict=True)
    ]


def _colors(path: Path, name: str, pixels: NDArray[Any], vision: VisionConfig) -> NDArray[np.uint8]:
    """Patches as uint8 [patches, (frame, row, column, color)], with as many frames as rows hold,
    from normalised ones in the order (color, frame, row, column)."""
    size = vision.patch_size
    frames = vision.patch_frames
    if pixels.ndim != 2 or pixels.shape[1] != frames * vision.patch_features:
        raise ConfigError(
            f"{path}: {name} must be [patches, {frames * vision.patch_features}] (got {list(pixels.shape)})"
        )
    by_frame = pixels.reshape(-1, 3, frames, size, size).transpose(2, 0, 3, 4, 1)
    return _levels(path, name, by_frame, vision).swapaxes(0, 1).reshape(len(pixels), -1)


def _levels(path: Path, name: str, frames: NDArray[Any], vision: VisionConfig) -> NDArray[np.uint8]:
    """Colors as files have them, [frames of rows, ..., 3], from normalised ones [frames, ..., 3].
    Frames beyond those that rows hold must repeat them."""
    levels = 255 * (frames.astype(np.float64) * vision.pixel_std + vision.pixel_mean)
    colors = levels[: vision.row_frames].round()
    # Frames beyond those of rows are compared by broadcasting
    rounded = np.abs(levels - colors).max(initial=0.0)
    if rounded > COLOR_ERROR or colors.min(initial=0) < 0 or colors.max(initial=0) > 255:
        equal = "" if vision.videos else f", equal in all {len(frames)} frames,"
        raise ConfigError(
            f"{path}: {name} are not colors of 8 bits{equal} less {list(vision.pixel_mean)}, over "
            f"{list(vision.pixel_std)}; write what the folder's processor makes"
        )
    return colors.astype(np.uint8)
