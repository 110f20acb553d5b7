"""Items that a model learns to draw, in slots: patches of images and of clips, ordered by time,
height and width.

    image   --decode--> [1, H, W, 3]
    video   --decode, frames at `fps`--> [frames, H, W, 3]     animation, MP4, or folder of frames
                             |
                             +--> patches [slots, patch_frames * patch_size * patch_size * 3]

The frames to use follow from the times in the blocks of an animation or the packets of an MP4 file,
so the length of a clip is known without decoding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import ceil_divide
from jaxmllm.data.media.clips import Frames, opened_clip
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference
from jaxmllm.data.media.video_files import FORMATS, Sound
from jaxmllm.row_format import RowFormat


class Generated:
    """Common base of the modalities of generated items. A shape is (time, height, width) in
    patches, and every slot is real."""

    name = "diffusion"
    parts: ClassVar[tuple[str, ...]] = ("image", "video")
    generated = True
    copies = 1  # times that a row holds the patches of an item
    centred = False  # whether rows and columns are counted from the middle of the picture
    diagonal = False  # whether positions of conditions follow those of the patches along all axes

    @property
    def crossed(self) -> bool:
        """Whether patches see conditions by cross-attention."""
        return False

    def captions(self, shape: Shape) -> tuple[str, ...]:
        return ()

    def length(self, shape: Shape) -> int:
        return math.prod(shape)

    def real(self, shape: Shape) -> int:
        return math.prod(shape)

    def tokens(self, shape: Shape) -> int:
        return 0

    def positions(self, shape: Shape) -> NDArray[np.int32]:
        """(time, row, column) of each patch in the grid: [length, 3].

        If `centred`, rows and columns are negative above and left of the middle of the picture,
        where row and column 0 begin. Of an odd number, one more is negative than not
        (arXiv 2508.02324).
        """
        positions = np.indices(shape, np.int32).reshape(3, -1).T
        if self.centred:
            positions[:, 1:] -= [ceil_divide(side, 2) for side in shape[1:]]
        return positions

    def condition_positions(self, shape: Shape, conditions: int) -> NDArray[np.int32]:
        """(time, row, column) of the conditions of an item: [conditions, 3].

        They advance time, in row and column 0. If `diagonal`, they advance along all axes, from the
        first number that is no row and no column of the picture (arXiv 2508.02324).
        """
        positions = np.zeros((conditions, 3), np.int32)
        positions[:, 0] = np.arange(conditions)
        if self.diagonal:
            start = max(side // 2 if self.centred else side for side in shape[1:])
            positions[:] = start + positions[:, :1]
        return positions

    def first_patch(self, conditions: int) -> int:
        """Slot, within an item, of its first patch. With cross-attention, only keys and values are
        computed of conditions, so they need no slots of their own: conditions and patches begin in
        the same slot."""
        return 0 if self.crossed else conditions

    def patch_count(self, real: int, conditions: int) -> int:
        """Patches of items that have `real` real slots and `conditions` conditions in total."""
        return real - self.first_patch(conditions)

    def first_time(self, conditions: int) -> int:
        """Time position of the first patch of an item with this many conditions."""
        return 0 if self.diagonal else conditions

    def real_slots(self, shape: Shape) -> NDArray[np.bool_]:
        return np.ones(self.length(shape), np.bool_)

    def apart(self, shape: Shape) -> NDArray[np.int32] | None:
        return None

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        return np.zeros((0, 3), np.int32), start


@dataclass(frozen=True)
class GeneratedPixels(Generated, Images):
    """The diffusion modality of models that draw pixels.

    A slot holds one patch as uint8 [patch_frames, patch_size, patch_size, 3] flattened. An item
    whose frames are no whole number of patches, such as an image, repeats its last frame.
    """

    patch_frames: int = 1
    max_frames: int = 128
    fps: float | None = None  # frames per second to use of clips; none: all frames
    folder_fps: float | None = None  # frames per second of a folder of files
    shorten: bool = False  # cut clips with more than `max_frames`, instead of refusing them
    sound: Sound = "refuse"  # what to do with MP4 files that have sound
    centred: bool = False
    diagonal: bool = field(default=False, repr=False)  # lengths do not depend on it
    crossed: bool = False

    section = "generated"
    formats = (*Images.formats, *FORMATS)
    cell = "patch (model.diffusion.patch_size)"

    @cached_property
    def format(self) -> RowFormat:
        of_images = super().format
        return replace(of_images, features=of_images.features * self.patch_frames, axes=(0, 1, 2))

    def measure(self, media: MediaReference) -> Shape:
        """Patch grid from headers; for a folder, from the header of its first file. Raises
        `MediaError`: those of images and of `opened_clip`."""
        if not isinstance(media, Clip):
            return super().measure(media)
        with self._open_clip(media) as frames:
            return self._shape_and_frames(frames, media)[0]

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Patches: uint8 [length, features]. Raises `MediaError`: those of `measure`,
        shape_changed, undecodable_image, undecodable_video, unlike_frames."""
        if not isinstance(media, Clip):
            return super().load(media, shape)
        with self._open_clip(media) as frames:
            shape_now, numbers = self._shape_and_frames(frames, media)
            if shape_now != shape:
                raise MediaError(
                    "shape_changed",
                    f"{media} was indexed as {shape} patches but is {shape_now} now",
                )
            distinct, inverse = np.unique(numbers, return_inverse=True)
            pixels = np.stack(list(frames.decoded(self, distinct.tolist(), shape)))
        return self.patches(pixels[inverse], shape)

    def _open_clip(self, media: Clip) -> AbstractContextManager[Frames]:
        default_fps = self.folder_fps or 1.0  # times do not matter if all frames are used
        folder_fps = default_fps if self.fps is None else self.folder_fps
        return opened_clip(media, folder_fps, self.sound, self.section)

    def _shape_and_frames(self, frames: Frames, media: Clip) -> tuple[Shape, Sequence[int]]:
        """Shape of a clip, and the numbers of the frames of its file or folder that are used."""
        grid = self.grid(*frames.size(self))
        numbers = self._sampled_frames(frames.seconds, media)
        return (ceil_divide(len(numbers), self.patch_frames), *grid), numbers

    def _sampled_frames(self, seconds: Sequence[Fraction], media: MediaReference) -> Sequence[int]:
        """Numbers of the frames to use, given how long each is shown: the frame shown at the middle
        of each interval of 1 / fps seconds, or all frames without `fps`."""
        sampled = self.fps is not None and len(seconds) > 1
        fps = Fraction(self.fps or 1)
        frame_count = max(1, round(sum(seconds) * fps)) if sampled else len(seconds)
        if frame_count > self.max_frames and not self.shorten:
            raise MediaError(
                "too_many_frames",
                f"{media} has {frame_count} frames, more than data.generated.max_frames = {self.max_frames}; raise it, "
                "lower data.generated.fps, split the clip, or let data.generated.shorten cut it",
            )
        indices = range(min(frame_count, self.max_frames))
        if not sampled:
            return indices
        # The frame shown at a middle is the first that ends after it. The last middle may be at the
        # end of the clip or past it, because the number of frames is rounded.
        ends = list(accumulate(seconds))
        middles = (Fraction(2 * index + 1, 2) / fps for index in indices)
        return [min(bisect_right(ends, middle), len(ends) - 1) for middle in middles]

    def patches(self, pixels: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """Patches [length, features] of an image [H, W, 3] or of frames [frames, H, W, 3]."""
        frames = pixels.reshape(-1, *pixels.shape[-3:])
        lacking = shape[0] * self.patch_frames - len(frames)
        frames = np.concatenate([frames, np.repeat(frames[-1:], lacking, axis=0)])
        return patches_of(frames, self.patch_frames, self.patch_size)


def item_slots(modality: Modality, shape: Shape, conditions: int) -> int:
    """Slots of an item in its rows. Only generated items have conditions; for all others
    `conditions` is 0."""
    return max(_slots_before_patches(modality, conditions) + modality.length(shape), conditions)


def item_real(modality: Modality, shape: Shape, conditions: int) -> int:
    """Slots of an item in its rows that hold data; see `item_slots`."""
    return _slots_before_patches(modality, conditions) + modality.real(shape)


def _slots_before_patches(modality: Modality, conditions: int) -> int:
    return cast(Generated, modality).first_patch(conditions) if modality.generated else 0


def patches_of(frames: NDArray[Any], patch_frames: int, patch_size: int) -> NDArray[Any]:
    """Frames [T * patch_frames, H * patch_size, W * patch_size, K] -> patches [T * H * W, F]. The F
    numbers of a patch are in the order (frame, row, column, channel)."""
    frame_count, height, width, channels = frames.shape
    tiles = frames.reshape(
        frame_count // patch_frames,
        patch_frames,
        height // patch_size,
        patch_size,
        width // patch_size,
        patch_size,
        channels,
    )
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3, 5, 6)).reshape(
        -1, patch_frames * patch_size**2 * channels
    )


def frames_of(
    patches: NDArray[Any], shape: Shape, patch_frames: int, patch_size: int
) -> NDArray[Any]:
    """Patches [T * H * W, F] of shape (T, H, W) -> frames
    [T * patch_frames, H * patch_size, W * patch_size, K]: the inverse of `patches_of`."""
    time, height, width = shape
    tiles = patches.reshape(time, height, width, patch_frames, patch_size, patch_size, -1)
    frames = tiles.transpose(0, 3, 1, 4, 2, 5, 6)
    return frames.reshape(time * patch_frames, height * patch_size, width * patch_size, -1)
