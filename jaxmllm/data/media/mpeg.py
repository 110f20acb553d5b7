"""Length of MP3 streams from their frame headers (ISO/IEC 11172-3 section 2.4.2.3), without
decoding and in little memory.

    ID3v2 tags | info frame: number of frames | frame | frame | ... | ID3v1, APE, lyrics, zeros

The MP3 format does not store the length of a file. If the first frame stores one (Xing, Info,
VBRI), decoders trust it and leave out frames beyond it. If not, libsndfile guesses the length from
the size and the first bit rate, and is wrong by factors. So frames are counted here, and a count
that is not stored is put in front of the stream (`info_frame`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxmllm.data.media.reference import MediaError, MediaReference, Stream, size_of

# Samples that a decoder would emit before the first one of the clip; mpg123 leaves them out
DECODER_DELAY = 529

_KBITS = {  # bit rates of Layer III by MPEG generation; index 0 and 15 have no fixed frame size
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES = (44_100, 48_000, 32_000)
_RATE_DIVISORS = {3: 1, 2: 2, 0: 4}  # version bits -> divisor of the rates: MPEG 1, 2, 2.5
_HEAD_BYTES = 64  # bytes that are read of a frame: its header, and the fields of an info frame
# Bit rate index of the info frames made here: gives them at least 200 bytes at every sample rate
_INFO_BIT_RATE = 9
_ID3V1_BYTES = 128
# Lyrics3 tags begin with LYRICSBEGIN and end with one of these, version 1 after at most 5100 bytes,
# version 2 after a size of six digits.
_LYRICS_END = re.compile(rb"LYRICSEND|LYRICS200")
_MAX_LYRICS = 1 << 20  # bytes in which that end is looked for
_MAX_TAGS = 16  # most tags that are read before a stream, and again after it
_MAX_PADDING = 1 << 20  # a file may end with fewer zero bytes than this


@dataclass(frozen=True)
class Frame:
    """One frame header: its four bytes, the size of the frame in bytes, and its decoded samples."""

    header: int
    size: int
    samples: int  # of each channel
    rate: int  # Hz
    channels: int


@dataclass(frozen=True)
class MpegStream:
    """The beginning of an MP3 stream: its first frame `first` at byte `start`. If that is an info
    frame (`has_info`), `stored` is the number of frames that follow it and `stored_bytes` the size
    of the stream, each None if it is not stored. Decoders use a count that is `understood` (not
    that of VBRI)."""

    start: int
    first: Frame
    has_info: bool
    stored: int | None
    stored_bytes: int | None
    understood: bool

    def samples(self, frames: int) -> int:
        """Samples of each channel that `frames` frames decode to, if `info_frame` precedes them."""
        return frames * self.first.samples - DECODER_DELAY


@dataclass(frozen=True)
class Scan:
    """Result of counting frames: `frames` with sound (without the info frame), in bytes `begin` to
    `end` of the file."""

    frames: int
    begin: int
    end: int


def open_stream(file: Stream, media: MediaReference) -> MpegStream:
    """Read the beginning of an MP3 file. Raises `MediaError`: broken_audio_header, and
    truncated_audio or joined_audio if the stored size shows it."""
    start = after_id3(file)
    head = read(file, start, _HEAD_BYTES)
    first_frame = _parse_frame(head)
    if first_frame is None:
        raise MediaError(
            "broken_audio_header",
            f"{media} holds no MP3 (MPEG Layer III) frame where its stream begins",
        )
    has_info, stored, stored_bytes = _parse_info(head, first_frame)
    size = size_of(file)
    if stored_bytes is not None and stored_bytes > size:
        raise MediaError(
            "truncated_audio",
            f"{media} has {size} bytes, but its MP3 header says {stored_bytes}: the file is cut; copy it again",
        )
    if stored_bytes is not None:
        # More bytes may follow the stored size, as tags do. An info frame there begins another
        # stream.
        second = read(file, start + stored_bytes, _HEAD_BYTES)
        if (frame := _parse_frame(second)) is not None and _parse_info(second, frame)[0]:
            raise _joined_error(media, f"a second stream begins at byte {start + stored_bytes}")
    understood = stored is not None and head[36:40] != b"VBRI"
    return MpegStream(start, first_frame, has_info, stored, stored_bytes, understood)


def scan(file: Stream, stream: MpegStream, media: MediaReference, max_frames: int) -> Scan:
    """Count the frames of a stream, at most `max_frames` of them.

    Raises `MediaError`: truncated_audio (the last frame is cut, or there are fewer than stored),
    joined_audio (another stream follows), wrong_audio_length (more frames than stored),
    undecodable_audio (bytes between frames).
    """
    size = size_of(file)
    # The info frame holds no sound, and the number that it stores leaves it out.
    begin = stream.start + (stream.first.size if stream.has_info else 0)
    position = begin
    frames = 0
    while frames < max_frames:
        head = read(file, position, _HEAD_BYTES)
        frame = _parse_frame(head)
        if frame is None:
            _check_tail(file, position, frames == stream.stored, media)
            break
        # Streams that were joined without a tag between them are told apart by their format, or by
        # an info frame of the second.
        if (frame.rate, frame.channels) != (stream.first.rate, stream.first.channels):
            raise _joined_error(
                media, f"{frame.rate} Hz in {frame.channels} channels begin at byte {position}"
            )
        if _parse_info(head, frame)[0]:
            raise _joined_error(media, f"a second stream begins at byte {position}")
        if position + frame.size > size:
            raise MediaError(
                "truncated_audio",
                f"{media} ends within an MP3 frame, at byte {size}: the file is cut; copy it again",
            )
        position += frame.size
        frames += 1
    if stream.stored is not None and frames < stream.stored:
        raise MediaError(
            "truncated_audio",
            f"{media} has {frames} MP3 frames where its header says {stream.stored}; copy it again",
        )
    if stream.stored is not None and frames > stream.stored:
        raise MediaError(
            "wrong_audio_length",
            f"{media} continues after the {stream.stored} MP3 frames that its header tells of; encode the clip again",
        )
    return Scan(frames, begin, position)


def info_frame(stream: MpegStream, frames: int) -> bytes:
    """A frame without sound, in the format of `stream`, that stores the number of frames that
    follow it.

    A decoder that reads it yields DECODER_DELAY samples fewer than the frames hold.
    """
    header = (stream.first.header | 1 << 16) & ~(1 << 9)  # no checksum, no padding
    # With the bit rate of the first frame, the info frame could be too small for the number
    header = header & ~(15 << 12) | _INFO_BIT_RATE << 12
    bare = _parse_frame(header.to_bytes(4, "big"))
    assert bare is not None
    body = bytearray(bare.size)
    body[:4] = header.to_bytes(4, "big")
    position = _info_tag_offset(bare)
    body[position : position + 12] = b"Info" + (1).to_bytes(4, "big") + frames.to_bytes(4, "big")
    return bytes(body)


def after_id3(file: Stream) -> int:
    """Byte at which the stream begins, after ID3v2 tags. Each tag stores its size in four bytes of
    seven bits."""
    position = 0
    for _ in range(_MAX_TAGS):
        head = read(file, position, 10)
        if head[:3] != b"ID3" or len(head) < 10:
            break
        position += _id3_size(head)
    return position


def read(file: Stream, position: int, size: int) -> bytes:
    """Up to `size` bytes from byte `position` on."""
    file.seek(position)
    return file.read(size)


def only_zeros(file: Stream, position: int) -> bool:
    """Whether all bytes from a position to the file's end are zeros, less than _MAX_PADDING."""
    tail = read(file, position, _MAX_PADDING)
    return len(tail) < _MAX_PADDING and not tail.strip(b"\0")


def is_frame(head: bytes) -> bool:
    """Whether bytes begin with the header of an MP3 frame."""
    return _parse_frame(head) is not None


def _parse_frame(head: bytes) -> Frame | None:
    """The frame whose header these bytes begin with; None if they begin with no header."""
    if len(head) < 4:
        return None
    header = int.from_bytes(head[:4], "big")
    # Bits from the top: 11 sync, 2 version, 2 layer, 1 without checksum, 4 bit rate, 2 sample rate,
    # 1 padding, 1 private, 2 channel mode, 6 that do not matter here
    version = header >> 19 & 3
    layer = header >> 17 & 3
    rate = header >> 10 & 3
    kbits = header >> 12 & 15
    if header >> 21 != 0x7FF or version == 1 or layer != 1 or rate == 3 or kbits in (0, 15):
        return None
    generation = 1 if version == 3 else 2
    samples = 1152 if generation == 1 else 576
    hertz = _SAMPLE_RATES[rate] // _RATE_DIVISORS[version]
    size = samples // 8 * 1000 * _KBITS[generation][kbits] // hertz + (header >> 9 & 1)
    return Frame(header, size, samples, hertz, 1 if header >> 6 & 3 == 3 else 2)


def _info_tag_offset(frame: Frame) -> int:
    """Offset of the tag in an info frame without checksum: after header and side information."""
    side = {(1152, 2): 32, (1152, 1): 17, (576, 2): 17, (576, 1): 9}[frame.samples, frame.channels]
    return 4 + side


def _parse_info(head: bytes, frame: Frame) -> tuple[bool, int | None, int | None]:
    """(whether a frame is an info frame, frames and bytes that it stores); None: not stored."""
    if head[36:40] == b"VBRI" and len(head) >= 54:
        return True, int.from_bytes(head[50:54], "big") or None, int.from_bytes(head[46:50], "big")
    for position in (
        _info_tag_offset(frame),
        _info_tag_offset(frame) + 2,
    ):  # some writers leave room for a checksum
        if head[position : position + 4] not in (b"Xing", b"Info"):
            continue
        flags = int.from_bytes(head[position + 4 : position + 8], "big")
        values = [
            int.from_bytes(head[position + offset : position + offset + 4], "big")
            for offset in (8, 12)
        ]
        stored = values.pop(0) if flags & 1 else None
        # A stored 0 means that the writer could not go back to fill it in
        return True, stored or None, values[0] if flags & 2 else None
    return False, None, None


def _check_tail(file: Stream, position: int, complete: bool, media: MediaReference) -> None:
    """Raise `MediaError` unless the bytes after the last frame, from byte `position` on, are tags
    or zeros. If the stream is known to be `complete`, or after an ID3v1 or Lyrics3 tag, which end a
    file, anything except another stream may follow."""
    for tags in range(_MAX_TAGS):
        head = read(file, position, 32)
        if not head:
            return
        # A frame after a tag is the beginning of a second file.
        if tags and is_frame(head):
            raise _joined_error(media, f"a second stream begins at byte {position}")
        if head[:3] == b"ID3" and len(head) >= 10:
            position += _id3_size(head)
        elif head[:8] == b"APETAGEX" and len(head) == 32:
            # The size in the header counts what follows it, the footer included.
            position += 32 + int.from_bytes(head[12:16], "little")
        elif head[:3] == b"TAG":
            position += _ID3V1_BYTES
            complete = True
        elif head[:11] == b"LYRICSBEGIN":
            end = _LYRICS_END.search(read(file, position, _MAX_LYRICS))
            if end is None:
                return
            position += end.end()
            complete = True
        elif complete or only_zeros(file, position):
            return
        # Two bytes tell sync, version and layer; the two that may be missing are replaced.
        elif is_frame(head[:2] + bytes([0x90, 0])) and len(head) < 4:
            raise MediaError(
                "truncated_audio", f"{media} ends within the header of an MP3 frame; copy it again"
            )
        else:
            break
    raise MediaError(
        "undecodable_audio",
        f"{media} holds something else than MP3 frames at byte {position}; encode it again",
    )


def _joined_error(media: MediaReference, what: str) -> MediaError:
    return MediaError(
        "joined_audio",
        f"{media} holds several MP3 streams ({what}), and decoders end after the first; encode it as one or split it",
    )


def _id3_size(head: bytes) -> int:
    footer = 10 if head[5] & 0x10 else 0
    return 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]) + footer
