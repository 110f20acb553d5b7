"""What a model learns to draw, in slots: patches of images and of clips, one after the other in time, height and width.

    image   --decode--> [1, H, W, 3]
    video   --decode, frames at `fps`--> [frames, H, W, 3]         animation, MP4, or folder with a file per frame
                             |
                             +--> patches [slots, patch_frames * patch_size * patch_size * 3]

The frames to take follow from the times in the blocks of an animation, or the packets of an MP4 file, so nothing is
decoded to tell how long a clip is.
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
    """What modalities of generated items have in common. A shape is (time, height, width) in patches, and
    every slot is real."""

    name = "diffusion"
    parts: ClassVar[tuple[str, ...]] = ("image", "video")
    generated = True
    copies = 1  # of an item in its row
    centred = False  # where rows and columns are counted from
    diagonal = False  # whether conditions stand behind the patches along all axes

    @property
    def crossed(self) -> bool:
        """Whether patches see conditions by an attention apart."""
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

        Centred, rows and columns are negative above and left of the middle of the picture, where place 0 begins; of
        odd numbers of them, one more is negative (arXiv 2508.02324).
        """
        positions = np.indices(shape, np.int32).reshape(3, -1).T
        if self.centred:
            positions[:, 1:] -= [ceil_divide(side, 2) for side in shape[1:]]
        return positions

    def condition_positions(self, shape: Shape, conditions: int) -> NDArray[np.int32]:
        """(time, row, column) of what an item is drawn from: [count, 3].

        They advance time in row and column 0. Diagonal, they advance along all axes, from the first number that is
        no row and no column of the picture (arXiv 2508.02324).
        """
        positions = np.zeros((conditions, 3), np.int32)
        positions[:, 0] = np.arange(conditions)
        if self.diagonal:
            start = max(side // 2 if self.centred else side for side in shape[1:])
            positions[:] = start + positions[:, :1]
        return positions

    def first_patch(self, conditions: int) -> int:
        """The slot of an item at which its patches begin. What an attention apart reads needs no slots of its own, for
        nothing but its keys and values is computed of it: conditions and patches begin in the same slot."""
        return 0 if self.crossed else conditions

    def patch_count(self, real: int, conditions: int) -> int:
        """Patches of items with so many real slots and conditions."""
        return real - self.first_patch(conditions)

    def first_time(self, conditions: int) -> int:
        """The time at which an item begins that is drawn from so many conditions."""
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

    A slot holds one patch as uint8 [patch_frames, patch_size, patch_size, 3] flattened. What has no whole
    number of patches in time, such as an image, repeats its last frame.
    """

    patch_frames: int = 1
    max_frames: int = 128
    fps: float | None = None  # of clips; none: all frames, whatever their times
    folder_fps: float | None = None  # of the files of a folder
    shorten: bool = False  # clips with more than `max_frames`, instead of refusing them
    sound: Sound = "refuse"  # of MP4 files
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
        """Patch grid from headers; of a folder, from that of its first file. Raises `MediaError`: those of
        images and of `opened_clip`."""
        if not isinstance(media, Clip):
            return super().measure(media)
        with self._opened(media) as frames:
            return self._shape_and_frames(frames, media)[0]

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """uint8 [length, features]. Raises `MediaError`: those of `measure`, shape_changed,
        undecodable_image, undecodable_video, unlike_frames."""
        if not isinstance(media, Clip):
            return super().load(media, shape)
        with self._opened(media) as frames:
            shape_now, numbers = self._shape_and_frames(frames, media)
            if shape_now != shape:
                raise MediaError(
                    "shape_changed",
                    f"{media} was indexed as {shape} patches but is {shape_now} now",
                )
            distinct, inverse = np.unique(numbers, return_inverse=True)
            pixels = np.stack(list(frames.decoded(self, distinct.tolist(), shape)))
        return self.patches(pixels[inverse], shape)

    def _opened(self, media: Clip) -> AbstractContextManager[Frames]:
        anyhow = self.folder_fps or 1.0  # where all frames are taken, their times do not matter
        folder_fps = anyhow if self.fps is None else self.folder_fps
        return opened_clip(media, folder_fps, self.sound, self.section)

    def _shape_and_frames(self, frames: Frames, media: Clip) -> tuple[Shape, Sequence[int]]:
        """The shape of a clip, and the numbers of the frames that it takes of its file or folder."""
        grid = self.grid(*frames.size(self))
        numbers = self._sampled(frames.seconds, media)
        return (ceil_divide(len(numbers), self.patch_frames), *grid), numbers

    def _sampled(self, seconds: Sequence[Fraction], media: MediaReference) -> Sequence[int]:
        """Which frames are taken, given the time that each is shown: those in the middle of each 1 / fps
        seconds, or all."""
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
        ends = list(accumulate(seconds))
        middles = (Fraction(2 * index + 1, 2) / fps for index in indices)
        return [min(bisect_right(ends, middle), len(ends) - 1) for middle in middles]

    def patches(self, pixels: NDArray[np.uint8], shape: Shape) -> NDArray[np.uint8]:
        """Of an image [H, W, 3] or of frames [frames, H, W, 3]."""
        frames = pixels.reshape(-1, *pixels.shape[-3:])
        lacking = shape[0] * self.patch_frames - len(frames)
        frames = np.concatenate([frames, np.repeat(frames[-1:], lacking, axis=0)])
        return patches_of(frames, self.patch_frames, self.patch_size)


def item_slots(modality: Modality, shape: Shape, conditions: int) -> int:
    """Slots of an item in its rows, given how many conditions it is made from: none, but where it is generated."""
    return max(_slots_before(modality, conditions) + modality.length(shape), conditions)


def item_real(modality: Modality, shape: Shape, conditions: int) -> int:
    """How many of them hold data."""
    return _slots_before(modality, conditions) + modality.real(shape)


def _slots_before(modality: Modality, conditions: int) -> int:
    return cast(Generated, modality).first_patch(conditions) if modality.generated else 0


def patches_of(frames: NDArray[Any], patch_frames: int, patch_size: int) -> NDArray[Any]:
    """Frames [T * patch_frames, H * patch_size, W * patch_size, K] -> patches [T * H * W, F], each in the order
    (frame, row, column, channel)."""
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
    """Patches [T * H * W, F] of shape (T, H, W) -> frames [T * patch_frames, H * patch_size, W * patch_size, K]:
    `patches_of` undone."""
    time, height, width = shape
    tiles = patches.reshape(time, height, width, patch_frames, patch_size, patch_size, -1)
    frames = tiles.transpose(0, 3, 1, 4, 2, 5, 6)
    return frames.reshape(time * patch_frames, height * patch_size, width * patch_size, -1)
