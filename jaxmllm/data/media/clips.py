"""Clips of frames in any form: animations, MP4 files, and folders with one file per frame.

How long each frame is shown is read from headers, once for an open clip. Frames are decoded and
resized one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.data.media.animations import Animation, read_animation
from jaxmllm.data.media.images import Images, opened
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import Clip, MediaError, MediaReference
from jaxmllm.data.media.video_files import Sound, VideoFile, is_video_file


class Frames(Protocol):
    """The frames of an open clip."""

    @property
    def seconds(self) -> Sequence[Fraction]:
        """Seconds that each frame is shown."""
        ...

    def size(self, reader: Images) -> tuple[int, int]:
        """Height and width of the first frame, upright. Raises `MediaError`: those of measuring an
        image, undecodable_video."""
        ...

    def decoded(
        self, reader: Images, numbers: Sequence[int], shape: Shape
    ) -> Iterator[NDArray[np.uint8]]:
        """The frames of these ascending numbers, resized to the grid of a shape: [height, width, 3]
        each. May be called only once.

        Raises `MediaError`: those of images, undecodable_video, unlike_frames.
        """
        ...


@contextmanager
def opened_clip(
    media: Clip, folder_fps: float | None, sound: Sound, section: str
) -> Iterator[Frames]:
    """Open a clip and yield its frames.

    Raises `MediaError`: missing_file, unknown_frame_rate, broken_video_header, truncated_video,
    too_many_frames, and those of `VideoFile`.

    Args:
      folder_fps: frames per second of a folder of files.
      sound: what to do with a video file that has sound.
      section: the section of the config's `data` that has both keys, for messages.
    """
    if files := media.files():
        yield _FolderFrames(media, files, folder_fps, section)
        return
    with media.open() as file:
        if is_video_file(file):
            yield _VideoFrames(VideoFile(file, media, sound, section))
            return
        animation = read_animation(file, media)
        with closing(opened(file, media)) as image:
            yield _AnimationFrames(media, animation, image)


class _FolderFrames:
    """The frames of a folder with one file per frame."""

    def __init__(
        self, media: Clip, files: Sequence[MediaReference], fps: float | None, section: str
    ):
        if fps is None:
            raise MediaError(
                "unknown_frame_rate",
                f"{media} is a folder of frames, and nothing says how many of them are one second; set "
                f"data.{section}.folder_fps",
            )
        self.media = media
        self.files = files
        self.seconds = (1 / Fraction(fps),) * len(files)

    def size(self, reader: Images) -> tuple[int, int]:
        first_file = self.files[0]
        with first_file.open() as file, closing(opened(file, first_file)) as image:
            return reader.size(image, first_file)

    def decoded(
        self, reader: Images, numbers: Sequence[int], shape: Shape
    ) -> Iterator[NDArray[np.uint8]]:
        grid = (1, *shape[1:])
        for frame in numbers:
            file = self.files[frame]
            if reader.measure(file) != grid:
                raise MediaError(
                    "unlike_frames",
                    f"{file} is of another size than the first frame of {self.media}; frames of a clip "
                    "have the same",
                )
            yield reader.pixels(file, grid)


@dataclass(frozen=True)
class _AnimationFrames:
    """The frames of an animation, decoded by Pillow."""

    media: Clip
    animation: Animation
    image: Image.Image

    @property
    def seconds(self) -> Sequence[Fraction]:
        return self.animation.seconds

    def size(self, reader: Images) -> tuple[int, int]:
        return reader.size(self.image, self.media)

    def decoded(
        self, reader: Images, numbers: Sequence[int], shape: Shape
    ) -> Iterator[NDArray[np.uint8]]:
        grid = (1, *shape[1:])
        for frame in numbers:
            image_frame = self.animation.first + frame
            yield reader.decoded(self.image, grid, self.media, "undecodable_video", image_frame)


@dataclass(frozen=True)
class _VideoFrames:
    """The frames of a video file, decoded by av."""

    video: VideoFile

    @property
    def seconds(self) -> Sequence[Fraction]:
        return self.video.seconds

    def size(self, reader: Images) -> tuple[int, int]:
        return reader.size(self.video.first(), self.video.media)

    def decoded(
        self, reader: Images, numbers: Sequence[int], shape: Shape
    ) -> Iterator[NDArray[np.uint8]]:
        grid = (1, *shape[1:])
        for image in self.video.images(numbers):
            yield reader.decoded(image, grid, self.video.media, "undecodable_video")
