"""What becomes of damaged and hostile media.

A table lists kinds of damage, each with the reason word that it is refused with. Sound libraries
cut, shorten and skip in silence. Here every kind is refused by name when the index is built, or
masked by name when it is decoded, or loads as a whole with finite features."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import File, MediaError
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.printable import shown

SOUNDS = Sounds(
    sample_rate=16_000,
    window_length=400,
    hop_length=160,
    mel_bins=40,
    chunk_frames=32,
    merge=2,
    max_seconds=5.0,
)
IMAGES = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 30)
RATE = 16_000
NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, 32_000)

Change = Callable[[bytes], bytes]


def clip(kind: str, samples: np.ndarray = NOISE, rate: int = RATE) -> bytes:
    """The bytes of a sound file of a kind. "bare.mp3" lacks the frame that stores the length."""
    buffer = io.BytesIO()
    options = {
        "opus": {"format": "OGG", "subtype": "OPUS"},
        "float.wav": {"format": "WAV", "subtype": "FLOAT"},
        "rf64.wav": {"format": "RF64"},
        "bare.mp3": {"format": "MP3"},
    }.get(kind, {"format": kind.upper()})
    soundfile.write(buffer, samples, rate, **options)
    content = buffer.getvalue()
    return content[content.index(content[:2], 4) :] if kind == "bare.mp3" else content


def picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


# ---------------------------------------------------------------------------- kinds of damage


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def last_byte_gone(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]


def part_gone(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + content[middle + 300 :]


def twice(content: bytes) -> bytes:
    return content + content


def and_(kind: str, rate: int = RATE) -> Change:
    """Another clip follows in the same file."""
    return lambda content: content + clip(kind, NOISE[:20_000], rate)


def then(tail: bytes) -> Change:
    return lambda content: content + tail


def again_behind(tags: bytes) -> Change:
    """The same clip follows behind tags."""
    return lambda content: content + tags + content


def put(mark: bytes, offset: int, form: str, value: int) -> Change:
    """Writes a number `offset` bytes after a mark."""

    def change(content: bytes) -> bytes:
        start = content.index(mark) + offset
        return content[:start] + struct.pack(form, value) + content[start + struct.calcsize(form) :]

    return change


def data_size(value: int) -> Change:
    return put(b"data", 4, "<I", value)


def flac_total(value: int) -> Change:
    return put(b"fLaC", 22, ">I", value)  # the lower 32 of 36 bits


def mp3_frames(factor: float) -> Change:
    def change(content: bytes) -> bytes:
        stored = struct.unpack_from(">I", content, content.index(b"Xing") + 8)[0]
        return put(b"Xing", 8, ">I", int(stored * factor))(content)

    return change


def without_pages(first: int, last: int) -> Change:
    """Leaves out some pages of an Ogg file, given like the bounds of a slice."""

    def change(content: bytes) -> bytes:
        page_starts = [i for i in range(len(content)) if content.startswith(b"OggS", i)] + [
            len(content)
        ]
        return content[: page_starts[first]] + content[page_starts[last] :]

    return change


def filled(value: float) -> Change:
    """The last quarter of the samples of a float WAV gets a value."""
    return lambda content: content[:-32_000] + np.full(8000, value, "<f4").tobytes()


ID3 = b"ID3\x04\x00\x00" + bytes([0, 0, 1, 0]) + bytes(128)
OLD_TAG = b"TAG" + bytes(125)
LYRICS = b"LYRICSBEGIN[00:02]la la" + b"LYRICSEND"
SIZED_LYRICS = b"LYRICSBEGININD0000210LYR00005la la000031LYRICS200"

REFUSED: dict[str, tuple[str, Change, str]] = {
    # name: (clip, damage, reason)
    "wav cut in half": ("wav", half, "truncated_audio"),
    "wav without its last byte": ("wav", last_byte_gone, "truncated_audio"),
    "wav with a data size that is too long": ("wav", data_size(128_000), "truncated_audio"),
    "wav with a data size that is too short": ("wav", data_size(30_000), "wrong_audio_length"),
    "wav with a data size of zero": ("wav", data_size(0), "wrong_audio_length"),
    "wav joined to another": ("wav", and_("wav"), "joined_audio"),
    "wav with something behind it": ("wav", then(b"hello" * 5), "wrong_audio_length"),
    "rf64 cut in half": ("rf64.wav", half, "truncated_audio"),
    "wav of 200 MHz": ("wav", put(b"fmt ", 12, "<I", 200_000_000), "unsupported_sample_rate"),
    "wav of 65535 channels": ("wav", put(b"fmt ", 10, "<H", 65_535), "broken_audio_header"),
    "wav of NaN": ("float.wav", filled(np.nan), "undecodable_audio"),
    "wav of infinity": ("float.wav", filled(-np.inf), "undecodable_audio"),
    "wav of amplitude 1e20": ("float.wav", filled(1e20), "samples_out_of_range"),
    "wav of 16 bits written as floats": ("float.wav", filled(-32768), "samples_out_of_range"),
    "flac cut in half": ("flac", half, "undecodable_audio"),
    "flac without its last byte": ("flac", last_byte_gone, "undecodable_audio"),
    "flac with a flipped byte": ("flac", flipped, "undecodable_audio"),
    "flac without its total": ("flac", flac_total(0), "broken_audio_header"),
    "flac with a total that is too long": ("flac", flac_total(64_000), "undecodable_audio"),
    "flac with a total that is too short": ("flac", flac_total(16_000), "wrong_audio_length"),
    "flac joined to itself": ("flac", twice, "joined_audio"),
    "flac joined to another": ("flac", and_("flac"), "joined_audio"),
    "ogg cut in half": ("ogg", half, "truncated_audio"),
    "ogg without its last byte": ("ogg", last_byte_gone, "truncated_audio"),
    "ogg without a page in the middle": ("ogg", without_pages(-4, -3), "undecodable_audio"),
    "ogg with a flipped byte": ("ogg", flipped, "undecodable_audio"),
    "ogg with something behind it": ("ogg", then(b"hello" * 50_000), "truncated_audio"),
    "ogg joined to itself": ("ogg", twice, "joined_audio"),
    "ogg joined to another": ("ogg", and_("ogg"), "joined_audio"),
    "ogg joined to one of another rate": ("ogg", and_("ogg", 44_100), "joined_audio"),
    "opus cut in half": ("opus", half, "truncated_audio"),
    "opus joined to itself": ("opus", twice, "joined_audio"),
    "mp3 cut in half": ("mp3", half, "truncated_audio"),
    "mp3 without its last byte": ("mp3", last_byte_gone, "truncated_audio"),
    "mp3 without a part": ("mp3", part_gone, "truncated_audio"),
    "mp3 that stores too few frames": ("mp3", mp3_frames(0.5), "wrong_audio_length"),
    "mp3 that stores too many frames": ("mp3", mp3_frames(2), "truncated_audio"),
    "mp3 joined to itself": ("mp3", twice, "joined_audio"),
    "mp3 joined to one behind tags": (
        "mp3",
        again_behind(ID3),
        "joined_audio",
    ),
    "mp3 joined to one behind an old tag": (
        "mp3",
        again_behind(OLD_TAG),
        "joined_audio",
    ),
    "mp3 joined to one behind lyrics": (
        "mp3",
        again_behind(LYRICS),
        "joined_audio",
    ),
    "mp3 joined to one behind lyrics and an old tag": (
        "mp3",
        again_behind(SIZED_LYRICS + OLD_TAG),
        "joined_audio",
    ),
    "mp3 joined to one that stores no length": ("mp3", and_("bare.mp3"), "wrong_audio_length"),
    "mp3 without a stored length, cut": ("bare.mp3", half, "truncated_audio"),
    "mp3 without a stored length, joined to another rate": (
        "bare.mp3",
        and_("bare.mp3", 22_050),
        "joined_audio",
    ),
    "mp3 without a stored length, joined behind tags": (
        "bare.mp3",
        again_behind(ID3),
        "joined_audio",
    ),
    "mp3 without a stored length, joined behind tags of two kinds": (
        "bare.mp3",
        again_behind(OLD_TAG + ID3),
        "joined_audio",
    ),
    "mp3 without a stored length, joined behind lyrics": (
        "bare.mp3",
        again_behind(SIZED_LYRICS),
        "joined_audio",
    ),
    "mp3 without a stored length, joined behind lyrics and an old tag": (
        "bare.mp3",
        again_behind(LYRICS + OLD_TAG),
        "joined_audio",
    ),
    "mp3 without a stored length, then something else": (
        "bare.mp3",
        then(b"hello" * 99),
        "undecodable_audio",
    ),
    "aiff": ("aiff", lambda content: content, "broken_audio_header"),
    "png cut in half": ("png", half, "undecodable_image"),
    "png with a flipped byte": ("png", flipped, "undecodable_image"),
    "jpeg cut in half": ("jpeg", half, "undecodable_image"),
    "jpeg of thousands of passes": (
        "jpeg",
        lambda content: content[:-2] + b"\xff\xda\0\2" * 5000,
        "undecodable_image",
    ),
    "jpeg of a camera, of thousands of passes": (
        "jpeg",
        lambda content: with_another(content)[:-2] + b"\xff\xda\0\2" * 5000,
        "undecodable_image",
    ),
    "webp cut in half": ("webp", half, "broken_image_header"),
    "gif cut in half": ("gif", half, "undecodable_image"),
    "bmp cut in half": ("bmp", half, "undecodable_image"),
}

# What looks damaged, but is all there: (clip, change, samples at 16 kHz). The sums for MP3 files
# are frames of 576 samples, less the decoder's delay of 529.
WHOLE: dict[str, tuple[str, Change, int]] = {
    "wav that was streamed": ("wav", data_size(0xFFFF_FFFF), 32_000),
    "wav that sox streamed": ("wav", data_size(0x7FFF_F000), 32_000),
    "wav with a wrong size of all": ("wav", put(b"RIFF", 4, "<I", 0), 32_000),
    "wav with chunks behind": ("wav", then(b"LIST\x05\0\0\0abcde\0bext\x02\0\0\0ab"), 32_000),
    "wav with a tag behind": ("wav", then(b"TAG" + bytes(125)), 32_000),
    "wav with zeros behind": ("wav", then(bytes(100)), 32_000),
    "rf64": ("rf64.wav", lambda content: content, 32_000),
    "wav a little beyond full scale": ("float.wav", filled(1.7), 32_000),
    "flac behind a tag": ("flac", lambda content: ID3 + content, 32_000),
    "flac before a tag": ("flac", then(b"TAG" + bytes(125)), 32_000),
    "ogg of a program that was stopped": ("ogg", without_pages(-2, -1), 27_776),
    "ogg with zeros behind": ("ogg", then(bytes(100)), 32_000),
    "mp3 between tags": ("mp3", lambda content: ID3 + content + ID3 + b"TAG" + bytes(125), 32_000),
    "mp3 before lyrics": ("mp3", then(LYRICS + OLD_TAG), 32_000),
    "mp3 before lyrics without an end": ("mp3", then(b"LYRICSBEGIN[00:02]la la"), 32_000),
    "mp3 without a stored length, before lyrics": (
        "bare.mp3",
        then(SIZED_LYRICS + OLD_TAG),
        58 * 576 - 529,
    ),
    "mp3 that stores zero frames": ("mp3", mp3_frames(0), 58 * 576 - 529),
    "mp3 without a stored length": ("bare.mp3", lambda content: content, 58 * 576 - 529),
    "mp3 without a stored length, twice": ("bare.mp3", twice, 2 * 58 * 576 - 529),
}


def with_another(content: bytes) -> bytes:
    """A JPEG with a second picture. Pillow calls this an MPO."""
    file = io.BytesIO()
    with Image.open(io.BytesIO(content)) as image:
        image.save(file, "MPO", save_all=True, append_images=[image.copy()])
    return file.getvalue()


def make(kind: str, change: Change, folder: Path) -> tuple[Images | Sounds, Path]:
    is_sound = kind not in ("png", "jpeg", "webp", "gif", "bmp")
    path = folder / f"a.{kind}"
    path.write_bytes(change(clip(kind) if is_sound else picture(kind)))
    return (SOUNDS if is_sound else IMAGES), path


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_media_are_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, change, reason = REFUSED[name]
    modality, path = make(kind, change, tmp_path)
    with pytest.raises(MediaError) as caught:
        modality.load(File(path), modality.measure(File(path)))
    assert caught.value.reason == reason
    message = str(caught.value)
    assert (
        message.startswith(str(path))
        and len(message.splitlines()) == 1
        and len(message) > len(str(path)) + 10
    )


@pytest.mark.parametrize("name", WHOLE)
def test_whole_media_are_loaded_whole(name: str, tmp_path: Path) -> None:
    kind, change, samples = WHOLE[name]
    modality, path = make(kind, change, tmp_path)
    shape = modality.measure(File(path))
    features = modality.load(File(path), shape)
    assert shape == (-(-samples // 160), 1, 1) and np.isfinite(features).all()
    sound = features[: shape[0]]
    # The clip is noise up to its end, except for gaps that MP3 encoders leave between streams.
    is_loud = sound.max(axis=1) > 0.3
    assert is_loud[-30:-8].all() and is_loud.mean() > 0.95


# ---------------------------------------------------------------------------- files that ask for memory or never end


def chunk(name: bytes, content: bytes) -> bytes:
    """A PNG chunk: length, name, content and checksum."""
    return (
        struct.pack(">I", len(content))
        + name
        + content
        + struct.pack(">I", zlib.crc32(name + content))
    )


def blank_png(width: int, height: int, *before: bytes) -> bytes:
    """A PNG of all pixels of a picture with one bit per pixel, in few bytes."""
    packer = zlib.compressobj(9)
    rows = bytes(1 + -(-width // 8)) * 1000
    pixels = b"".join([packer.compress(rows) for _ in range(height // 1000)]) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(before)
        + chunk(b"IDAT", pixels)
        + chunk(b"IEND", b"")
    )


def peak_memory(action: Callable[[], object]) -> int:
    """The bytes that numpy and Python held at once. What C libraries take on their own is not
    counted."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(modality: Images | Sounds, path: Path) -> str:
    with pytest.raises(MediaError) as caught:
        modality.load(File(path), modality.measure(File(path)))
    return caught.value.reason


def blank_gif(screen: int, frame: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", screen, screen, 0x80, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", 0, 0, frame, frame, 0) + b"\x02\x02\x44\x01\x00;"


def blank_bmp(side: int) -> bytes:
    head = b"BM" + struct.pack("<IHHI", 100, 0, 0, 62)
    return head + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 1, 0, 0, 0, 0, 2, 0) + bytes(46)


def blank_jpeg(side: int) -> bytes:
    frame = (
        b"\xff\xc0\x00\x11\x08"
        + struct.pack(">HH", side, side)
        + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01"
    )
    return b"\xff\xd8" + frame + b"\xff\xda\x00\x0c\x03\x01\x00\x02\x11\x03\x11\x00\x3f\x00"


def blank_webp(side: int) -> bytes:
    """The header of a lossless WebP file of a square picture."""
    size = (side - 1) | (side - 1) << 14
    return (
        b"RIFF"
        + struct.pack("<I", 28)
        + b"WEBPVP8L"
        + struct.pack("<IBI", 10, 0x2F, size)
        + bytes(6)
    )


GIGAPIXELS = {
    "a.png": blank_png(32_000, 32_000),
    "a.gif": blank_gif(32_000, 32_000),
    "frame.gif": blank_gif(10, 32_000),  # the frame is larger than its screen
    "a.bmp": blank_bmp(32_000),
    "a.jpg": blank_jpeg(32_000),
    "a.webp": blank_webp(16_383),  # the largest that the format can say
}


@pytest.mark.parametrize("name", GIGAPIXELS)
def test_a_gigapixel_is_refused_from_its_header(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    (tmp_path / name).write_bytes(GIGAPIXELS[name])
    assert len(GIGAPIXELS[name]) < 400_000
    assert refused(IMAGES, tmp_path / name) == "image_too_large"
    assert peak_memory(lambda: refused(IMAGES, tmp_path / name)) < 20e6


def test_pictures_whose_metadata_unpack_to_much_are_refused(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(200_000_000))
    for metadata in (chunk(b"zTXt", b"a\0\0" + packed), chunk(b"iCCP", b"a\0\0" + packed)):
        (tmp_path / "a.png").write_bytes(blank_png(1000, 1000, metadata))
        assert peak_memory(lambda: refused(IMAGES, tmp_path / "a.png")) < 20e6
        assert refused(IMAGES, tmp_path / "a.png") == "broken_image_header"


def test_a_picture_of_too_many_bytes_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.write(picture("png")[:33] + struct.pack(">I", 2**31 - 1) + b"eXIf")
        file.truncate(2**31)  # without taking room on the disk
    assert peak_memory(lambda: refused(IMAGES, tmp_path / "a.png")) < 1e6
    assert refused(IMAGES, tmp_path / "a.png") == "image_too_large"


def test_memory_goes_with_seconds_not_with_rate_and_channels(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    # 4 seconds are 128 MB here, and at most 30 MB may be held while they are loaded.
    rate = 1_000_000
    channels = 16
    seconds = 4
    size = 2 * rate * channels * seconds
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate * channels, 2 * channels, 16)
    with path.open("wb") as file:
        file.write(
            b"RIFF"
            + struct.pack("<I", size + 36)
            + b"WAVEfmt \x10\0\0\0"
            + form
            + b"data"
            + struct.pack("<I", size)
        )
        file.truncate(44 + size)
    assert SOUNDS.measure(File(path)) == (400, 1, 1)
    assert peak_memory(lambda: SOUNDS.load(File(path), (400, 1, 1))) < 30e6 < size


LOAD = """
import pathlib, sys
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import File

def peak():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

images = Images(14, 2, 784, 1024 * 1024)
path = pathlib.Path(sys.argv[1])
images.measure(File(path))
before = peak()
images.load(File(path), images.measure(File(path)))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "most"),
    [("a.png", "RGBA", 12), ("b.png", "LA", 12), ("a.bmp", "RGB", 12), ("a.webp", "RGBA", 20)],
)
def test_the_largest_pictures_take_the_stated_memory(
    name: str, mode: str, most: int, tmp_path: Path
) -> None:
    """`most` is the number of bytes per source pixel."""
    width = 9000
    height = 9900
    Image.new(mode, (width, height)).save(
        tmp_path / name, **({"method": 0} if name.endswith("webp") else {})
    )
    command = [sys.executable, "-c", LOAD, str(tmp_path / name)]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert int(printed) < most * width * height


@pytest.mark.parametrize("kind", ["mp3", "bare.mp3"])
def test_an_mp3_of_ten_gigabytes_is_not_read_whole(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    with path.open("wb") as file:
        file.write(clip(kind))
        file.truncate(10 * 2**30)
    if kind == "mp3":  # this one says where it ends
        assert peak_memory(lambda: SOUNDS.load(File(path), SOUNDS.measure(File(path)))) < 20e6
    else:
        assert peak_memory(lambda: refused(SOUNDS, path)) < 20e6
        assert refused(SOUNDS, path) == "undecodable_audio"


@pytest.mark.parametrize("modality", [IMAGES, SOUNDS], ids=["images", "sounds"])
def test_what_is_no_regular_file_is_refused_without_waiting(
    modality: Images | Sounds, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "link", "zero", "loop", "dangling", "folder", "socket", "absent"):
            assert refused(modality, tmp_path / name) == "missing_file", name
            with pytest.raises(MediaError):
                modality.load(File(tmp_path / name), (1, 4, 4))


def test_a_file_that_becomes_a_pipe_between_two_looks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "a.wav")
    (tmp_path / "b.wav").write_bytes(clip("wav"))
    regular = os.stat(tmp_path / "b.wav")
    # Every look by path sees the regular file, so that only the opened file can tell that it is a
    # pipe.
    monkeypatch.setattr(Path, "stat", lambda self: regular)
    assert refused(SOUNDS, tmp_path / "a.wav") == "missing_file"


def test_messages_are_one_line_whatever_the_path(tmp_path: Path) -> None:
    for name in ("a\nepoch 1: loss 0.0", "\x1b[2J", "b\u2028c", "d\u202egnp"):
        path = tmp_path / name
        path.write_bytes(b"nothing")
        for modality in (IMAGES, SOUNDS):
            with pytest.raises(MediaError) as caught:
                modality.measure(File(path))
            assert str(caught.value).isprintable() and shown(path) in str(caught.value)


# ---------------------------------------------------------------------------- any bytes at all

FORMATS = (
    "png",
    "jpeg",
    "webp",
    "gif",
    "bmp",
    "wav",
    "float.wav",
    "flac",
    "ogg",
    "opus",
    "mp3",
    "bare.mp3",
)


def mangle(content: bytes, rng: np.random.Generator) -> bytes:
    """Flips, overwrites, cuts out or repeats a few bytes.

    They lie more often near the beginning, where headers are."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        start = int(len(changed) * rng.random() ** rng.choice([1, 8]))
        length = int(rng.choice([1, 1, 4, 100]))
        match rng.integers(6):
            case 0:
                del changed[start:]
            case 1:
                del changed[start : start + length]
            case 2:
                changed[start:start] = changed[start : start + length]
            case 3:
                changed[start : start + length] = rng.integers(0, 256, length, np.uint8).tobytes()
            case 4:
                changed[start : start + length] = bytes([int(rng.choice([0, 255]))]) * length
            case _:
                if start < len(changed):
                    changed[start] ^= 1 << int(rng.integers(8))
    return bytes(changed)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rounds", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_any_bytes_load_whole_or_are_refused(kind: str, rounds: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([rounds, *kind.encode()])
    is_sound = kind in FORMATS[5:]
    modality: Images | Sounds = SOUNDS if is_sound else IMAGES
    content = clip(kind) if is_sound else picture(kind)
    path = tmp_path / "a"
    loaded = 0
    for _ in range(rounds):
        path.write_bytes(mangle(content, rng))
        try:
            shape = modality.measure(File(path))
            features = modality.load(File(path), shape)
        except MediaError as error:
            assert str(error).startswith(str(path)) and str(error).isprintable()
            continue
        assert (
            features.shape == (modality.length(shape), modality.format.features)
            and features.dtype == modality.format.dtype
        )
        assert np.isfinite(features).all()
        loaded += 1
    assert loaded < rounds
