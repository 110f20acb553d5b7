"""Checks of WAV, OGG and FLAC files: that a clip is complete, and that its header has its length.

libsndfile decodes what it finds and does not report the rest: it shortens a cut WAV or OGG, ends at
the length that a header states, and leaves out a second clip that was joined to the first. So the
bytes are checked first, in little memory: with bounded reads where only the header is needed
(`check_wave`, `check_last_page`), else through the whole file (`check_pages`, `check_flac`). What
fills the last block of a WAV file of blocks, libsndfile decodes as sound (`wave_filling`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from jaxmllm.arrays import ceil_divide
from jaxmllm.data.media.mpeg import after_id3, is_frame, only_zeros, read
from jaxmllm.data.media.reference import MediaError, MediaReference, Stream, size_of

_BLOCK = 1 << 20  # bytes read at once


def container(file: Stream) -> str:
    """Format by the first bytes after ID3 tags: WAV, FLAC, OGG or MP3; empty for any other."""
    head = read(file, after_id3(file), 12)
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:] == b"WAVE":
        return "WAV"
    if is_frame(head[:4]):
        return "MP3"
    return {b"fLaC": "FLAC", b"OggS": "OGG"}.get(head[:4], "")


# ---------------------------------------------------------------------------- WAV

# Programs that do not know the length write a chunk size of at least this
STREAMED = 0x7FFF_F000
_MAX_CHUNKS = 1000  # most chunks that are read before the samples, and again after them
# Codes of a WAV file's `fmt ` chunk: MS and IMA ADPCM and GSM 6.10, which store blocks of samples
_BLOCK_CODES = (0x02, 0x11, 0x31)


def check_wave(file: Stream, media: MediaReference) -> None:
    """Compare the size of a WAV file's data chunk with the file. A size that means "unknown"
    (STREAMED and more) is not compared: the rest of the file is then the clip, complete or not.

    Raises `MediaError`: truncated_audio (the chunk is longer than the file), wrong_audio_length
    (the bytes after it are no chunk, so they may be sound), joined_audio (another clip follows).
    """
    size = size_of(file)
    order = _byte_order(file)
    stored_64 = None
    for name, begin, chunk_size in _wave_chunks(file):
        if name == b"ds64":
            # RF64: first the size of the file, then that of the samples, in 64 bits each
            stored_64 = int.from_bytes(read(file, begin + 8, 8), "little")
        if name == b"data":
            if chunk_size == 0xFFFF_FFFF and stored_64 is not None:
                chunk_size = stored_64
            # Only in a file that is shorter does such a size mean that the length was unknown.
            elif chunk_size >= STREAMED and begin + chunk_size > size:
                return
            if begin + chunk_size > size:
                raise MediaError(
                    "truncated_audio",
                    f"{media} holds {size - begin} of the {chunk_size} bytes of samples that its header says: the "
                    "file is cut; copy it again",
                )
            _check_after_data(file, begin + chunk_size, size, order, media)
            return
    # The file has no samples: libsndfile reports that.


def _byte_order(file: Stream) -> Literal["big", "little"]:
    """Byte order of the numbers in a WAV file."""
    return "big" if read(file, 0, 4) == b"RIFX" else "little"


def _wave_chunks(file: Stream) -> Iterator[tuple[bytes, int, int]]:
    """(name, first byte, size as the header states it) of the first chunks of a WAV file."""
    order = _byte_order(file)
    position = 12
    for _ in range(_MAX_CHUNKS):
        head = read(file, position, 8)
        if len(head) < 8:
            return
        chunk_size = int.from_bytes(head[4:], order)
        begin = position + 8
        yield head[:4], begin, chunk_size
        # A chunk of odd size is followed by one byte of padding.
        position = begin + chunk_size + chunk_size % 2


def wave_filling(file: Stream, decoded: int) -> int:
    """Number of samples of each channel at the end of a WAV file of `decoded` samples that only
    fill its last block, because the encoding stores whole blocks; 0 for all other encodings.

    The `fact` chunk holds the number of samples without them. It is not believed where it would
    take a block or more, nor where it is the number of all samples divided by that of the channels,
    which libsndfile writes for IMA ADPCM.
    """
    order = _byte_order(file)
    layout = b""
    stored = 0
    for name, begin, _ in _wave_chunks(file):
        if name == b"data":
            break
        if name == b"fmt ":
            layout = read(file, begin, 20)
        elif name == b"fact":
            stored = int.from_bytes(read(file, begin, 4), order)
    code, channels, block = (
        int.from_bytes(layout[place : place + 2], order) for place in (0, 2, 18)
    )
    if code not in _BLOCK_CODES or not stored or not channels or stored == decoded // channels:
        return 0
    filling = decoded - stored
    return filling if 0 < filling < block else 0


def _check_after_data(
    file: Stream, end: int, size: int, order: Literal["big", "little"], media: MediaReference
) -> None:
    """Raise `MediaError` unless the bytes after the samples, from byte `end` on, are chunks, an
    ID3v1 tag or zeros."""
    position = end
    for _ in range(_MAX_CHUNKS):
        if position >= size or only_zeros(file, position):
            return
        head = read(file, position, 12)
        if head[:3] == b"TAG" and size - position == 128:
            return
        if (head[:4] in (b"RIFF", b"RIFX") and head[8:] == b"WAVE") or head[:4] == b"data":
            raise _joined_error(media)
        chunk_size = int.from_bytes(head[4:8], order)
        if len(head) >= 8 and _is_chunk_name(head[:4]) and position + 8 + chunk_size <= size:
            position += 8 + chunk_size
        elif position % 2:  # chunks of odd size are padded by one byte, though not by every program
            position += 1
        else:
            break
    raise MediaError(
        "wrong_audio_length",
        f"{media} continues for {size - end} bytes after the samples that its header tells of, and they may be sound; "
        "write the clip again",
    )


def _is_chunk_name(name: bytes) -> bool:
    return name.isascii() and name.decode("ascii").isprintable()


# ---------------------------------------------------------------------------- OGG

_PAGE_HEAD = 27
_LARGEST_PAGE = _PAGE_HEAD + 255 + 255 * 255
_FIRST_PAGE_FLAG = 2  # flag of the first page of a stream
_MAX_STREAMS = 16  # most first pages that are read of the parallel streams of a file
_REVERSED_BITS = bytes(int(f"{n:08b}"[::-1], 2) for n in range(256))


@dataclass(frozen=True)
class _Page:
    position: int  # byte of the file at which the page begins
    flags: int
    serial: int
    number: int
    content: bytes

    @property
    def end(self) -> int:
        return self.position + len(self.content)

    @property
    def intact(self) -> bool:
        """Whether the checksum is right. It is a CRC-32 of the same polynomial as zlib's, but takes
        the bits of each byte in the opposite order, from zero, without the final complement."""
        bare = self.content[:22] + bytes(4) + self.content[26:]
        mirrored = zlib.crc32(bare.translate(_REVERSED_BITS), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
        return int(f"{mirrored:032b}"[::-1], 2) == int.from_bytes(self.content[22:26], "little")


def check_last_page(file: Stream, media: MediaReference) -> None:
    """Check that an OGG file ends with a whole page of one of the streams that it begins with.
    Reads only both ends of the file.

    That page need not be marked as the last one: programs that were stopped leave files without the
    mark, data sets contain them, and all that was written is there. (A file cut exactly between two
    pages looks the same.)

    Raises `MediaError`: truncated_audio, joined_audio.
    """
    first_page = _read_page(file, 0)
    if first_page is None:
        return  # libsndfile reports what is wrong with the file
    size = size_of(file)
    begin = max(0, size - 2 * _LARGEST_PAGE)
    tail = read(file, begin, size - begin)
    for match in re.finditer(b"OggS", tail):
        pages = list(_read_pages(file, begin + match.start()))
        if pages and pages[0].intact:
            break
    else:
        raise _cut_error(media, "its end holds no whole page")
    if not only_zeros(file, pages[-1].end):
        raise _cut_error(media, f"the page at byte {pages[-1].end} is not whole")
    if pages[-1].serial not in _stream_serials(file, first_page):
        raise _joined_error(media)


def check_pages(file: Stream, media: MediaReference) -> None:
    """Check the checksum and the number of every page of an OGG file, and that the file ends with a
    whole page.

    Raises `MediaError`: truncated_audio, joined_audio, undecodable_audio (damaged or missing pages,
    which libsndfile leaves out silently).
    """
    next_numbers: dict[int, int] = {}  # stream -> number of its next page
    end = 0
    begun = False  # whether a page that is not the first of its stream has been read
    for page in _read_pages(file, 0):
        if page.flags & _FIRST_PAGE_FLAG:
            if begun:
                raise _joined_error(media)
            next_numbers[page.serial] = page.number
        begun = begun or not page.flags & _FIRST_PAGE_FLAG
        if not page.intact or next_numbers.get(page.serial) != page.number:
            raise MediaError(
                "undecodable_audio",
                f"{media} is damaged or lacks a part before byte {page.end}; copy it again",
            )
        next_numbers[page.serial] += 1
        end = page.end
    if not only_zeros(file, end):
        size = size_of(file)
        if size - end < _LARGEST_PAGE and read(file, end, 4) == b"OggS":
            raise _cut_error(media, f"the page at byte {end} is not whole")
        raise MediaError(
            "undecodable_audio",
            f"{media} holds something else than OGG pages at byte {end}; copy it again",
        )


def _read_page(file: Stream, position: int) -> _Page | None:
    """The page at a position of the file; None if there is no whole one."""
    head = read(file, position, _PAGE_HEAD + 255)
    if len(head) < _PAGE_HEAD or head[:5] != b"OggS\0":
        return None
    # Sizes of the segments, one byte each; byte 26 is their number.
    table = head[_PAGE_HEAD : _PAGE_HEAD + head[26]]
    size = _PAGE_HEAD + len(table) + sum(table)
    content = read(file, position, size)
    if len(table) < head[26] or len(content) < size:
        return None
    serial = int.from_bytes(head[14:18], "little")
    page_number = int.from_bytes(head[18:22], "little")
    return _Page(position, head[5], serial, page_number, content)


def _read_pages(file: Stream, position: int) -> Iterator[_Page]:
    """Consecutive whole pages from a position of the file on."""
    while (page := _read_page(file, position)) is not None:
        yield page
        position = page.end


def _stream_serials(file: Stream, first_page: _Page) -> set[int]:
    """Serial numbers of the parallel streams that begin at the beginning of the file."""
    serials = {first_page.serial}
    for page in islice(_read_pages(file, first_page.end), _MAX_STREAMS):
        if not page.flags & _FIRST_PAGE_FLAG:
            break
        serials.add(page.serial)
    return serials


# ---------------------------------------------------------------------------- FLAC

_FLAC_FRAME = re.compile(rb"\xff[\xf8\xf9]")  # \xff\xf9: frames of varying size
# The 8 bytes that begin a file: its marker and the header of its STREAMINFO block
_FLAC_BEGIN = re.compile(rb"fLaC[\0\x80]\0\0\x22")
_FLAC_HEAD = 16  # bytes of the longest frame header
# Upper limits of the first byte of a number (coded as in UTF-8) that has 1, -, 2, 3, .. bytes
_FIRST_BYTE_LIMITS = (0x80, 0xC0, 0xE0, 0xF0, 0xF8, 0xFC, 0xFE, 0xFF)


def check_flac(file: Stream, samples: int, media: MediaReference) -> None:
    """Check that a FLAC file has no frames beyond the `samples` of its header, and no second clip
    (RFC 9639, section 9).

    Raises `MediaError`: wrong_audio_length, joined_audio. Missing frames are found by decoding.
    """
    start = after_id3(file)
    # Samples of a frame; the same for all frames except the last
    frame_size = max(1, int.from_bytes(read(file, start + 8, 2), "big"))
    expected = ceil_divide(samples, frame_size)
    frames = 0
    for position, data in _overlapping_blocks(file, start + 8):
        second = _FLAC_BEGIN.search(data)
        for match in _FLAC_FRAME.finditer(data, 0, second.start() if second else len(data)):
            head = data[match.start() : match.start() + _FLAC_HEAD]
            coded_number = _flac_frame_number(head)
            varying = head[1] & 1  # frames are then numbered by their first sample
            if coded_number == (samples if varying else expected) and (
                varying or frames == expected
            ):
                raise MediaError(
                    "wrong_audio_length",
                    f"{media} continues at byte {position + match.start()} after the {samples} samples that its header "
                    "tells of; encode the clip again",
                )
            frames += coded_number == frames and not varying
        if second:
            raise _joined_error(media)


def _flac_frame_number(head: bytes) -> int | None:
    """The number in a frame header; None if fields or checksum show that the bytes are none."""
    if len(head) < 6 or head[2] >> 4 == 0 or head[2] & 15 == 15 or head[3] >> 4 > 10 or head[3] & 1:
        return None
    size = next((size for size, limit in enumerate(_FIRST_BYTE_LIMITS) if head[4] < limit), 7)
    if size == 1 or head[4] == 0xFF:
        return None
    size = max(1, size)
    coded_number = head[4] & (0x7F if size == 1 else 0x7F >> size)
    for byte in head[5 : 4 + size]:
        coded_number = coded_number << 6 | byte & 0x3F
    # Some codes of the frame's size and rate mean that the value follows the number, in 1 or 2
    # bytes.
    size_bytes = {6: 1, 7: 2}.get(head[2] >> 4, 0)
    rate_bytes = {12: 1, 13: 2, 14: 2}.get(head[2] & 15, 0)
    end = 4 + size + size_bytes + rate_bytes
    return coded_number if end < len(head) and _crc_8(head[:end]) == head[end] else None


def _crc_8(data: bytes) -> int:
    """CRC-8 with the polynomial x^8 + x^2 + x + 1, starting from zero."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ (0x07 if crc & 0x80 else 0)) & 0xFF
    return crc


# ---------------------------------------------------------------------------- reading


def _overlapping_blocks(file: Stream, position: int) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) of blocks of a file. They overlap by 2 * _FLAC_HEAD, so that every header
    is whole in at least one block."""
    while data := read(file, position, _BLOCK):
        yield position, data
        if len(data) < _BLOCK:
            return
        position += _BLOCK - 2 * _FLAC_HEAD


def _joined_error(media: MediaReference) -> MediaError:
    return MediaError(
        "joined_audio",
        f"{media} holds several clips one after the other, and decoders end after the first; encode them as one, or "
        "split the file",
    )


def _cut_error(media: MediaReference, what: str) -> MediaError:
    return MediaError(
        "truncated_audio", f"{media} is cut ({what}); copy it again, or encode it again"
    )
