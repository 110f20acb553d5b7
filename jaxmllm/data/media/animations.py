"""Animated pictures as containers: how long each frame is shown, from the blocks around the pixels.

Pillow knows the time of a frame only after it has decoded all frames before it. So the blocks are
read here: of GIF89a, of PNG (third edition, section 11.3.6) and of WebP (RFC 9649). A file that
ends before its last block is refused.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn, cast

from jaxmllm.data.media.reference import MediaError, MediaReference, Stream

MAX_FRAMES = 100_000  # most frames of a file, so that its times fit into memory
UNTIMED = Fraction(1, 10)  # seconds of a frame whose stored time is 0, as in browsers

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Animation:
    """The frames of a file; a still picture has one."""

    seconds: tuple[Fraction, ...]  # how long each frame is shown
    first: int = 0  # Pillow's number of the first frame; 1 after a PNG's stand-in image


def read_animation(file: Stream, media: MediaReference) -> Animation:
    """Times of the frames of a file, without decoding. Raises `MediaError`: broken_video_header,
    truncated_video, too_many_frames."""
    file.seek(0)
    # Buffered, because most blocks are short and streams are not buffered
    buffered = io.BufferedReader(cast(io.RawIOBase, file))
    try:
        return _BlockReader(buffered, media).animation()
    finally:
        buffered.detach()


class _BlockReader:
    """The blocks of one file, read one after another."""

    def __init__(self, file: io.BufferedReader[Any], media: MediaReference):
        self.file = file
        self.media = media
        self.seconds: list[Fraction] = []

    def animation(self) -> Animation:
        head = self.file.read(12)
        if head[:6] in (b"GIF87a", b"GIF89a"):
            self._read_gif()
        elif head[:8] == _PNG_SIGNATURE:
            return Animation(*self._read_png())
        elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
            self._read_webp(int.from_bytes(head[4:8], "little") + 8)
        else:
            self._fail("it is no MP4, GIF, WebP or PNG file; convert it (ffmpeg -i FILE out.mp4)")
        return self._timed_animation()

    def _read_gif(self) -> None:
        self.file.seek(6)
        self._skip_colors(self._read(7)[4])
        shown = Fraction(0)
        while (kind := self._read(1)) != b";":
            if kind == b"!":
                label = self._read(1)
                size = self._read(1)[0]
                block = self._read(size)
                if label == b"\xf9" and size >= 4:
                    shown = Fraction(int.from_bytes(block[1:3], "little"), 100)
                if size:
                    self._skip_sub_blocks()
            elif kind == b",":
                self._skip_colors(self._read(9)[8])
                self._read(1)  # the code width of the compressed pixels
                self._skip_sub_blocks()
                self._add_frame(shown)
                shown = Fraction(0)
            elif kind != b"\0":  # some programs end blocks twice
                self._fail(f"byte {self.file.tell() - 1} begins no block")

    def _skip_colors(self, flags: int) -> None:
        if flags & 0x80:
            self._read(3 << (flags & 7) + 1)

    def _skip_sub_blocks(self) -> None:
        while size := self._read(1)[0]:
            self._read(size)

    def _read_png(self) -> tuple[tuple[Fraction, ...], int]:
        """(seconds of each frame, Pillow's number of the first frame) of a PNG file."""
        stated = 0
        first_frame = 0
        self.file.seek(len(_PNG_SIGNATURE))
        while True:
            head = self._read(8)
            size = int.from_bytes(head[:4], "big")
            kind = head[4:]
            if kind == b"acTL":
                stated = int.from_bytes(self._read(size)[:4], "big")
            elif kind == b"fcTL" and stated:
                data = self._read(size)
                delay, denominator = (
                    int.from_bytes(data[offset : offset + 2], "big") for offset in (20, 22)
                )
                self._add_frame(Fraction(delay, denominator or 100))
            else:
                if kind == b"IDAT" and stated and not self.seconds:
                    first_frame = 1
                self._skip(size)
            self._skip(4)  # the checksum
            if kind == b"IEND":
                break
        if stated != len(self.seconds):
            self._fail(f"it tells of {stated} frames and has {len(self.seconds)}")
        return self._timed_animation().seconds, first_frame

    def _read_webp(self, end: int) -> None:
        while self.file.tell() < end:
            head = self._read(8)
            size = int.from_bytes(head[4:], "little")
            if head[:4] == b"ANMF":
                start = self._read(16)
                self._add_frame(Fraction(int.from_bytes(start[12:15], "little"), 1000))
                size -= len(start)
            self._skip(size + size % 2)

    def _timed_animation(self) -> Animation:
        """The animation, with UNTIMED in place of times of 0."""
        if len(self.seconds) < 2:
            return Animation((UNTIMED,))
        return Animation(tuple(shown or UNTIMED for shown in self.seconds))

    def _add_frame(self, seconds: Fraction) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) > MAX_FRAMES:
            raise MediaError(
                "too_many_frames",
                f"{self.media} has more than {MAX_FRAMES} frames; split it",
            )

    def _skip(self, size: int) -> None:
        """Skip `size` bytes, and check that the last of them exists."""
        if size > 0:
            self.file.seek(size - 1, io.SEEK_CUR)
            self._read(1)

    def _read(self, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise MediaError(
                "truncated_video", f"{self.media} ends before its last frame does; copy it again"
            )
        return data

    def _fail(self, what: str) -> NoReturn:
        raise MediaError("broken_video_header", f"{self.media} is no animation: {what}")
