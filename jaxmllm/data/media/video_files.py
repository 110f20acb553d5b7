"""MP4 files (and MOV, which has the same structure), read with the package av if it is installed.

    file --header, packets--> how long each frame is shown, whether there is sound  (not decoded)
    file --decode--> upright frames, one by one

A file is opened as MP4 whatever its name, so that it cannot be a playlist that names other files.
Its packets are read to the end, which finds files that are cut.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.data.media.animations import MAX_FRAMES
from jaxmllm.data.media.images import MAX_SOURCE_PIXELS
from jaxmllm.data.media.mpeg import read
from jaxmllm.data.media.reference import MediaError, MediaReference, Stream

INSTALLED: Final = importlib.util.find_spec("av") is not None
FORMATS: Final = ("MP4",) if INSTALLED else ()  # formats that can be read
INSTALL: Final = "pip install av"
ENCODER: Final = "libx264"
QUALITY: Final = "18"  # the encoder's constant rate factor; its losses are barely visible

Sound = Literal["refuse", "ignore"]  # what to do with a video that has sound


def is_video_file(file: Stream) -> bool:
    """Whether the first bytes are those of MP4 or MOV."""
    return read(file, 4, 4) in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


@dataclass
class VideoFile:
    """The frames of an open file, in the order in which they are shown. Each is decoded once, when
    it is asked for.

    Raises `MediaError`: no_video_reader, broken_video_header, truncated_video, too_many_frames,
    unsupported_video, video_with_sound.

    Args:
      section: the section of the config's `data` that has the key `sound`, for messages.
    """

    file: Stream
    media: MediaReference
    sound: Sound
    section: str

    def __post_init__(self) -> None:
        if not INSTALLED:
            raise MediaError(
                "no_video_reader",
                f"{self.media} is a video file, and the package av, which reads these, is not installed; {INSTALL}, or "
                "write its frames into a folder",
            )
        self.seconds: Sequence[Fraction] = self._frame_seconds()
        self._remaining_images = self._decoded()
        self._first_image: Image.Image | None = None

    def first(self) -> Image.Image:
        """The first frame."""
        if self._first_image is None:
            self._first_image = next(self._remaining_images)
        return self._first_image

    def images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these ascending indices. Raises `MediaError("undecodable_video")`."""
        frames = self._all_images()
        decoded = -1
        for index in indices:
            while decoded < index:
                image = next(frames)
                decoded += 1
            yield image

    def _all_images(self) -> Iterator[Image.Image]:
        yield self.first()
        yield from self._remaining_images

    @contextmanager
    def _open_video(self, reason: str) -> Iterator[tuple[Any, Any]]:
        """The container and its only video stream. Errors of av become a `MediaError` of this
        reason, and so do those of the code that uses them."""
        import av

        self.file.seek(0)
        try:
            with av.open(self.file, format="mp4") as container:
                yield container, self._video_stream(container)
        except (av.FFmpegError, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            what = (
                "has no readable MP4 header"
                if reason == "broken_video_header"
                else "does not decode"
            )
            raise MediaError(reason, f"{self.media} {what}: {error}") from error

    def _video_stream(self, container: Any) -> Any:
        """The only video stream of a container. Raises `MediaError` if it cannot be used."""
        if self.sound == "refuse" and container.streams.audio:
            raise MediaError(
                "video_with_sound",
                f"{self.media} has sound, which is not read from a video; set data.{self.section}.sound: ignore, or "
                "write it without (ffmpeg -an)",
            )
        videos = [
            stream
            for stream in container.streams.video
            if not stream.disposition & type(stream.disposition).attached_pic
        ]
        if len(videos) != 1:
            self._refuse(f"has {len(videos)} streams of pictures; write it with one")
        (video,) = videos
        if video.codec_context is None or not video.codec_context.width:
            self._refuse("is of a codec that this build of av does not decode; write it anew")
        if video.width * video.height > MAX_SOURCE_PIXELS:
            raise MediaError(
                "image_too_large",
                f"{self.media} has frames of more than {MAX_SOURCE_PIXELS} pixels, and these are not safe to decode; "
                "scale them down",
            )
        if (video.sample_aspect_ratio or 1) != 1:
            self._refuse(
                f"has pixels of {video.sample_aspect_ratio}, which are not square; scale it "
                "(ffmpeg -vf scale=iw*sar:ih,setsar=1)"
            )
        video.codec_context.thread_count = 1  # parallelism comes from worker processes
        return video

    def _frame_seconds(self) -> tuple[Fraction, ...]:
        """Seconds that each frame is shown, from the packets."""
        with self._open_video("broken_video_header") as (container, video):
            stated = video.frames
            shown = []
            packets = 0
            for packet in container.demux(video):
                if not packet.size:  # the empty packet after the last one
                    continue
                packets += 1
                if packet.is_corrupt:
                    self._fail_truncated()
                if packet.pts is None:
                    self._refuse("does not say when its frames are shown; write it anew")
                if not packet.is_discard:  # discarded packets are cut away by an edit list
                    shown.append((packet.pts, packet.duration or 0))
                if packets > MAX_FRAMES:
                    raise MediaError(
                        "too_many_frames",
                        f"{self.media} has more than {MAX_FRAMES} frames; split it",
                    )
            if packets < stated or not shown:
                self._fail_truncated()
            shown.sort()
            unit = Fraction(video.time_base)
        starts = [start for start, _ in shown]
        between = [after - before for before, after in pairwise(starts)]
        if any(ticks <= 0 for ticks in between):
            self._refuse("shows two frames at one time; write it anew")
        # The last frame has no successor to end it: its duration comes from its own packet, or else
        # from the frame before it.
        last_ticks = shown[-1][1] or (between[-1] if between else 0)
        return tuple((ticks or 1) * unit for ticks in (*between, last_ticks))

    def _decoded(self) -> Iterator[Image.Image]:
        """Decode the frames one by one, upright. Raises `MediaError("undecodable_video")`."""
        with self._open_video("undecodable_video") as (container, video):
            video.codec_context.options = {"err_detect": "explode"}
            decoded = 0
            for frame in container.decode(video):
                if frame.is_corrupt:
                    break
                decoded += 1
                yield _upright_image(frame)
            if decoded < len(self.seconds):
                raise MediaError(
                    "undecodable_video",
                    f"{self.media} has {len(self.seconds)} frames, of which {decoded} decode; copy it again",
                )

    def _fail_truncated(self) -> NoReturn:
        raise MediaError(
            "truncated_video", f"{self.media} ends before its last frame does; copy it again"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise MediaError("unsupported_video", f"{self.media} {what}")


def _upright_image(frame: Any) -> Image.Image:
    """The picture of a frame, turned and mirrored as its display matrix asks."""
    image = frame.to_image()
    angle = frame.rotation  # counter-clockwise, as Pillow counts it
    if matrix := frame.side_data.get("DISPLAYMATRIX"):
        a, b, _, c, d, *_ = np.frombuffer(matrix, np.int32).tolist()
        if a * d < b * c:
            # A negative determinant: the matrix mirrors. The angle comes from its first row, which
            # then points the opposite way.
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            angle += 180
    return image.rotate(angle, expand=True)


def lacks_writer() -> str:
    """Why MP4 files cannot be written; empty if they can."""
    if not INSTALLED:
        return f"the package av, which writes MP4, is not installed; {INSTALL}"
    import av

    if ENCODER not in av.codecs_available:
        return f"this build of av has no {ENCODER}, which writes MP4; {INSTALL}"
    return ""


def write_video(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    """Write frames [frames, height, width, 3] as an MP4 file of H.264.

    If both sides are even, colors are stored for every second pixel, as players expect.
    """
    import av

    _, height, width, _ = frames.shape
    # The exact fraction of a float such as 29.97 has a denominator that av cannot store.
    rate = Fraction(fps).limit_denominator(1_000_000)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(ENCODER, rate=rate, options={"crf": QUALITY})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        # Called without a frame, the encoder returns what it still holds.
        container.mux(stream.encode())
