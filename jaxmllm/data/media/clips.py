"""Clips of frames as files hold them: animations, and folders with a file per frame.

Headers tell how long each frame is shown. Frames are decoded and resized one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from jaxmllm.data.media.animations import read_animation
from jaxmllm.data.media.images import Images, opened
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import Clip, MediaError


def frame_seconds(media: Clip, folder_fps: float | None, section: str) -> Sequence[Fraction]:
    """How long each frame is shown. Raises `MediaError`: unknown_frame_rate, broken_video_header, truncated_video,
    too_many_frames.

    Args:
      folder_fps: files of a folder per second.
      section: of the config's `data` that says so.
    """
    files = media.files()
    if not files:
        with media.open() as file:
            return read_animation(file, media).seconds
    if folder_fps is None:
        raise MediaError(
            "unknown_frame_rate",
            f"{media} is a folder of frames, and nothing says how many of them are one second; set "
            f"data.{section}.folder_fps",
        )
    return (1 / Fraction(folder_fps),) * len(files)


def first_size(reader: Images, media: Clip) -> tuple[int, int]:
    """Height and width of the first frame, upright. Raises `MediaError`: those that images raise when measured."""
    files = media.files()
    first = files[0] if files else media
    with first.open() as file, closing(opened(file, first)) as image:
        return reader.size(image, first)


def decoded_frames(
    reader: Images, media: Clip, numbers: Sequence[int], shape: Shape
) -> Iterator[NDArray[np.uint8]]:
    """The frames of these rising numbers, resized to the grid of a shape: [height, width, 3] each.

    Raises `MediaError`: those that images raise, undecodable_video, unlike_frames.
    """
    grid = (1, *shape[1:])
    if files := media.files():
        for number in numbers:
            if reader.measure(files[number]) != grid:
                raise MediaError(
                    "unlike_frames",
                    f"{files[number]} is of another size than the first frame of {media}; frames of a clip "
                    "have the same",
                )
            yield reader.pixels(files[number], grid)
        return
    with media.open() as file:
        first = read_animation(file, media).first
        with closing(opened(file, media)) as image:
            for number in numbers:
                yield reader.decoded(image, grid, media, "undecodable_video", first + number)
