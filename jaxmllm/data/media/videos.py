"""Images, and videos whose frames are read in groups: a vision tower reads `patch_frames` of them
at once.

    image   --decode--> [1, H, W, 3], repeated in all frames of a patch
    video   --decode, some frames--> [frames, H, W, 3]
                             |
                             +--> one item per group of frames: patches [slots, frames * p * p * 3]

No tower sees more than one group at once, so groups are packed, placed and sent like images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import ceil_divide
from jaxmllm.config.schema import VideoDataConfig
from jaxmllm.data.media.clips import Frames, opened_clip
from jaxmllm.data.media.images import Images, smart_cells
from jaxmllm.data.media.modality import ClipShape, Shape
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference
from jaxmllm.data.media.video_files import FORMATS
from jaxmllm.row_format import RowFormat

# Values of data.videos.times with which text after a video continues at the maximum position + 1
LINES = ("line", "fractions")


@dataclass(frozen=True)
class FrameImages(Images):
    """Reader for the frames of one video, which all have the same size. With `together`, the bounds
    of pixels apply to that many frames together, rounded to whole patches of `patch_frames`."""

    together: int | None = None
    patch_frames: int = 1

    section = "videos"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        if self.together is None:
            return super().grid(height, width)
        cell = self.cell_size
        if min(height, width) < cell:
            scale = max(cell / height, cell / width)
            height = int(height * scale)
            width = int(width * scale)
        patched_frames = round(self.together / self.patch_frames) * self.patch_frames
        bounds = self.min_pixels, self.max_pixels
        rows, columns = smart_cells(height, width, cell, *bounds, self.together, patched_frames)
        return rows * self.merge, columns * self.merge


@dataclass(frozen=True)
class ImagesAndVideos(Images):
    """The vision modality of models that also read videos. The shape of a video is a `ClipShape`,
    and each of its groups of frames is an item with the shape of an image.

    A slot holds one patch as uint8 [patch_frames, patch_size, patch_size, 3] flattened.
    """

    patch_frames: int = 1
    videos: VideoDataConfig = field(default_factory=VideoDataConfig)

    parts: ClassVar[tuple[str, ...]] = ("image", "video")
    formats = (*Images.formats, *FORMATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.frame_images(self.patch_frames)  # raises if the bounds of videos are wrong

    @cached_property
    def format(self) -> RowFormat:
        of_images = super().format
        return replace(of_images, features=of_images.features * self.patch_frames)

    def frame_images(self, frames: int) -> FrameImages:
        """Reader for the frames of a video of which `frames` frames are used."""
        return FrameImages(
            patch_size=self.patch_size,
            merge=self.merge,
            min_pixels=self.videos.min_pixels,
            max_pixels=self.videos.max_pixels,
            resize=self.resize,
            kernel=self.kernel,
            together=frames if self.videos.bounds == "video" else None,
            patch_frames=self.patch_frames,
        )

    def measure(self, media: MediaReference) -> Shape:
        """Patch grid from headers; for a folder, from the header of its first file. Raises
        `MediaError`: those of images and of `opened_clip`, too_few_frames."""
        if not isinstance(media, Clip):
            return super().measure(media)
        with self._open_clip(media) as frames:
            return self._shape_of_frames(frames, media)

    def _open_clip(self, media: Clip) -> AbstractContextManager[Frames]:
        return opened_clip(media, self.videos.folder_fps, self.videos.sound, "videos")

    def _shape_of_frames(self, frames: Frames, media: Clip) -> ClipShape:
        seconds = frames.seconds
        rate = float(len(seconds) / sum(seconds))
        return self.clip_shape(len(seconds), rate, frames.size(self), media)

    def clip_shape(
        self, frames: int, rate: float, size: tuple[int, int], media: MediaReference | None = None
    ) -> ClipShape:
        """Shape of a video. Raises `MediaError`: too_many_frames, too_few_frames.

        Args:
          frames: number of its frames.
          rate: frames per second.
          size: height and width in pixels.
          media: for messages.
        """
        sampled = len(self.sampled_frames(frames, rate, media))
        grid = self.frame_images(sampled).grid(*size)
        return ClipShape((ceil_divide(sampled, self.patch_frames), *grid), frames, rate)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        """Patches of an image, repeated for all frames of a patch: uint8 [length, features]. Raises
        `MediaError`: those of images."""
        colors = super().load(media, shape)
        return np.tile(colors, (1, self.patch_frames))

    def load_groups(
        self, clip: Clip, numbers: Sequence[int], group: Shape
    ) -> Iterator[NDArray[Any]]:
        """Groups of frames of a clip, by number: uint8 [length of a group, features] each. The
        numbers ascend, and `group` is the shape that every group must have.

        Raises `MediaError`: those of `measure`, shape_changed, undecodable_video, unlike_frames.
        """
        with self._open_clip(clip) as frames:
            shape = self._shape_of_frames(frames, clip)
            if numbers[-1] >= shape[0] or shape.group != group:
                raise MediaError(
                    "shape_changed",
                    f"{clip} was indexed as at least {numbers[-1] + 1} groups of {group[1:]} patches but is "
                    f"{shape[0]} of {shape.group[1:]} now",
                )
            yield from self._group_patches(frames, numbers, shape, clip)

    def _group_patches(
        self, frames: Frames, numbers: Sequence[int], shape: ClipShape, clip: Clip
    ) -> Iterator[NDArray[Any]]:
        """As `load_groups`, for an open clip of this shape."""
        sampled = self.sampled_frames(shape.frames, shape.rate, clip)
        groups = [self._group_frames(sampled, group_index) for group_index in numbers]
        distinct = sorted({frame for of_group in groups for frame in of_group})
        reader = self.frame_images(len(sampled))
        decoded = zip(distinct, frames.decoded(reader, distinct, shape), strict=True)
        held: dict[int, NDArray[Any]] = {}
        for of_group in groups:
            while of_group[-1] not in held:
                frame, pixels = next(decoded)
                held[frame] = self.patches(pixels, shape.group)
            yield np.concatenate([held[frame] for frame in of_group], axis=1)
            # The next group may begin with the last frame of this one
            held = {frame: patches for frame, patches in held.items() if frame >= of_group[-1]}

    def captions(self, shape: Shape) -> tuple[str, ...]:
        if self.videos.times != "text" or not isinstance(shape, ClipShape):
            return ()
        sampled = self.sampled_frames(shape.frames, shape.rate)
        groups = (self._group_frames(sampled, group_index) for group_index in range(shape[0]))
        ends = ((group[0] / shape.rate, group[-1] / shape.rate) for group in groups)
        return tuple(f"<{(start + end) / 2:.1f} seconds>" for start, end in ends)

    def token_positions(self, shape: Shape, start: float) -> tuple[NDArray[Any], float]:
        """Positions of the tokens of an image, or of all groups of a video. The times of groups
        advance from `start` and are rounded down, except with `times: fractions`."""
        of_group, after = super().token_positions((1, *shape[1:]), start)
        if not isinstance(shape, ClipShape):
            return of_group, after
        positions = np.tile(of_group, (shape[0], 1)).astype(np.float64)
        # In float32, as in the published rules: it matters where a product is near a whole number
        seconds = np.float32(self.group_seconds(shape))
        per_second = np.float32(self.videos.positions_per_second)
        numbers = np.arange(shape[0], dtype=np.float32)
        line = self.videos.times in LINES
        times = numbers * seconds * per_second if line else numbers * (per_second * seconds)
        if self.videos.times != "fractions":
            times = np.floor(times)
        positions[:, 0] += np.repeat(times, len(of_group))
        # With `times: positions`, text continues as in transformers 5; before, it continued at the
        # maximum + 1 there, too
        return positions, float(positions.max()) + 1 if line else after

    def group_seconds(self, shape: ClipShape) -> float:
        """Seconds from one group of frames to the next. With `times` in LINES, as if frames were
        always sampled at `fps`."""
        if self.videos.times in LINES and self.videos.fps is not None:
            return self.patch_frames / self.videos.fps
        sampled = self.sampled_frames(shape.frames, shape.rate)
        return self.patch_frames / (len(sampled) / shape.frames * shape.rate)

    def _group_frames(self, sampled: Sequence[int], group_index: int) -> tuple[int, ...]:
        """The frames of a group; the last sampled frame fills up an incomplete one."""
        indices = range(group_index * self.patch_frames, (group_index + 1) * self.patch_frames)
        return tuple(sampled[min(index, len(sampled) - 1)] for index in indices)

    def sampled_frames(
        self, frames: int, rate: float, media: MediaReference | None = None
    ) -> Sequence[int]:
        """Indices of the frames that are used of a video, by the published arithmetic.

        Raises `MediaError`: too_many_frames, too_few_frames.

        Args:
          frames: number of its frames.
          rate: frames per second.
          media: for messages; not needed for a shape from an index, which has been checked.
        """
        videos = self.videos
        patch = self.patch_frames
        # Otherwise `_group_frames` fills up an incomplete patch with the last frame.
        if (videos.fps is not None or videos.bounds == "video") and frames < patch:
            raise MediaError(
                "too_few_frames",
                f"{media} has {frames} frames, fewer than a patch (model.vision.patch_frames, {patch}); show it as an "
                "image",
            )
        if videos.fps is None:
            if frames > videos.max_frames:
                raise MediaError(
                    "too_many_frames",
                    f"{media} has {frames} frames, more than data.videos.max_frames = {videos.max_frames}; raise it, "
                    "set data.videos.fps, or split the video",
                )
            return range(frames)
        at_fps = frames / rate * videos.fps
        if videos.sampling == "ends":
            frame_count = min(max(int(at_fps), videos.min_frames), videos.max_frames, frames)
            indices: NDArray[Any] = np.linspace(0, frames - 1, frame_count).round()
        else:
            max_frames = min(videos.max_frames, frames) // patch * patch
            frame_count = (
                max(int(min(max(at_fps, videos.min_frames), max_frames)) // patch, 1) * patch
            )
            # In float32, as published: it matters where indices are cut to whole numbers below.
            indices = (np.arange(frame_count) * (frames / frame_count)).astype(np.float32)
        return indices.astype(np.int64).tolist()
