"""The length of an MP3 file from its frame headers (ISO/IEC 11172-3 section 2.4.2.3), without decoding."""

from __future__ import annotations

_KBITS = {  # bit rates of Layer III by MPEG generation; index 0 and 15 have no fixed frame size
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44_100, 48_000, 32_000)
_DIVIDERS = {3: 1, 2: 2, 0: 4}  # version bits -> what the rates are divided by: MPEG 1, 2, 2.5


def count_samples(data: bytes) -> int | None:
    """Samples a channel of a Layer III stream; None when its first frame already says so (Xing, Info, VBRI), or
    when there is no such frame."""
    place = _after_id3(data)
    first = _frame(data, place)
    if first is None or any(tag in data[place : place + first[0]] for tag in (b"Xing", b"Info", b"VBRI")):
        return None
    samples = 0
    while (frame := _frame(data, place)) is not None and place + frame[0] <= len(data):
        place, samples = place + frame[0], samples + frame[1]
    return samples


def _after_id3(data: bytes) -> int:
    """Where the stream begins: an ID3v2 tag stores its size in four bytes of seven bits."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    return 10 + (data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9])


def _frame(data: bytes, place: int) -> tuple[int, int] | None:
    """(bytes, samples) of the frame whose header stands at `place`."""
    header = int.from_bytes(data[place : place + 4], "big")
    version, layer, rate, kbits = header >> 19 & 3, header >> 17 & 3, header >> 10 & 3, header >> 12 & 15
    if header >> 21 != 0x7FF or version == 1 or layer != 1 or rate == 3 or kbits in (0, 15):
        return None
    generation = 1 if version == 3 else 2
    samples = 1152 if generation == 1 else 576
    hertz = _RATES[rate] // _DIVIDERS[version]
    return samples // 8 * 1000 * _KBITS[generation][kbits] // hertz + (header >> 9 & 1), samples
