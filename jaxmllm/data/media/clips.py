"""Clips of frames as files hold them: animations, MP4 files, and folders with a file per frame.

Headers tell how long each frame is shown, and are read once however often a clip is asked. Frames are decoded and
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
        """How long each is shown."""
        ...

    def size(self, reader: Images) -> tuple[int, int]:
        """Height and width of the first one, upright. Raises `MediaError`: those that images raise when measured,
        undecodable_video."""
        ...

    def decoded(
        self, reader: Images, numbers: Sequence[int], shape: Shape
    ) -> Iterator[NDArray[np.uint8]]:
        """Those of these rising numbers, resized to the grid of a shape: [height, width, 3] each; once.

        Raises `MediaError`: those that images raise, undecodable_video, unlike_frames.
        """
        ...


@contextmanager
def opened_clip(
    media: Clip, folder_fps: float | None, sound: Sound, section: str
) -> Iterator[Frames]:
    """The frames of a clip, while it is open.

    Raises `MediaError`: missing_file, unknown_frame_rate, broken_video_header, truncated_video, too_many_frames, and
    those of `VideoFile`.

    Args:
      folder_fps: files of a folder per second.
      sound: what becomes of that of a video file.
      section: of the config's `data` that says both.
    """
    if files := media.files():
        yield _Folder(media, files, folder_fps, section)
        return
    with media.open() as file:
        if is_video_file(file):
            yield _VideoFrames(VideoFile(file, media, sound, section))
            return
        animation = read_animation(file, media)
        with closing(opened(file, media)) as image:
            yield _AnimationFrames(media, animation, image)


class _Folder:
    """A file for every frame."""

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
    """A file that Pillow decodes."""

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
    """A file that av decodes."""

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
