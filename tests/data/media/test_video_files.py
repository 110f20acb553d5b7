"""MP4 files, read and written.

Read files have the frames, times and sizes with which they were written, or are refused. Drawn
clips are written with small losses."""

import importlib.util
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmllm.config.schema import VideoDataConfig
from jaxmllm.data.media import video_files
from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import Clip, File, FileRange, MediaError
from jaxmllm.data.media.videos import ImagesAndVideos

needs_av = pytest.mark.skipif(not importlib.util.find_spec("av"), reason="needs av")
COLORS = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3)).astype(np.uint8)  # of frames
GRID = (1, 4, 6)


def film(
    path: Path,
    colors: np.ndarray = COLORS,
    times: Any = range(7),
    rotation: int = 0,
    sound: bool = False,
    square: bool = True,
) -> Clip:
    """Writes an MP4 file of frames without loss, with B frames in between.

    `times` are in quarters of a second, and each frame is shown from its time on."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=4, options={"qp": "0", "bf": "2"})
        stream.height, stream.width = colors.shape[1:3]
        stream.pix_fmt = "rgb24"
        if rotation:
            stream.set_display_rotation(rotation)
        if not square:
            stream.sample_aspect_ratio = Fraction(4, 3)
        audio_stream = container.add_stream("aac", rate=8000, layout="mono") if sound else None
        for pixels, time in zip(colors, times, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 4)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio_stream is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.rate = 8000
            container.mux(audio_stream.encode(silence))
            container.mux(audio_stream.encode())
    return Clip(File(path))


def drawn(**changes: Any) -> GeneratedPixels:
    return GeneratedPixels(4, 1, 1, 4096, **changes)


def frames(made: GeneratedPixels, clip: Clip) -> list[int]:
    """The numbers of the frames that are taken, told by their pixels."""
    shape = made.measure(clip)
    assert shape[1:] == GRID[1:]
    images = Images(4, 1, 1, 4096)
    known_patches = [images.patches(pixels, GRID) for pixels in COLORS]
    loaded = made.load(clip, shape).reshape(shape[0], *known_patches[0].shape)
    return [
        next(index for index, pixels in enumerate(known_patches) if np.array_equal(pixels, patches))
        for patches in loaded
    ]


# ---------------------------------------------------------------------------- reading


@needs_av
def test_a_file_has_the_frames_and_times_that_were_written(tmp_path):
    clip = film(tmp_path / "a.mp4")
    assert frames(drawn(), clip) == frames(drawn(fps=4.0), clip) == [*range(7)]
    assert frames(drawn(fps=2.0), clip) == [1, 3, 5, 6]
    uneven = film(tmp_path / "b.mp4", COLORS[:3], [0, 1, 4])
    assert frames(drawn(fps=4.0, max_frames=4, shorten=True), uneven) == [0, 1, 1, 1]
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "archive").write_bytes(b"before" + content + b"after")
    member = Clip(FileRange(tmp_path / "archive", 6, len(content), "a.mp4"))
    assert frames(drawn(), member) == [*range(7)]


@needs_av
def test_groups_of_frames_are_seen_and_each_is_decoded_once(tmp_path, monkeypatch):
    clip = film(tmp_path / "a.mp4")
    decoded = []
    decode = video_files.VideoFile._decoded

    def counted(self):
        for image in decode(self):
            decoded.append(image)
            yield image

    monkeypatch.setattr(video_files.VideoFile, "_decoded", counted)
    videos = VideoDataConfig(min_pixels=64, max_pixels=64 * 40)
    modality = ImagesAndVideos(4, 2, 64, 640, resize="smart", patch_frames=2, videos=videos)
    shape = modality.measure(clip)
    assert (shape, shape.frames, shape.rate) == ((4, 4, 6), 7, 4.0)
    assert len(decoded) == 1, "of which the size is told"
    decoded.clear()
    groups = [*modality.load_groups(clip, range(4), shape.group)]
    assert len(decoded) == 7
    images = Images(4, 2, 64, 640)
    for group, pair in zip(groups, [(0, 1), (2, 3), (4, 5), (6, 6)], strict=True):
        expected = [images.patches(COLORS[frame], GRID) for frame in pair]
        np.testing.assert_array_equal(group, np.concatenate(expected, axis=1))


@needs_av
@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_turned_as_the_file_says(tmp_path, degrees):
    quarter_turns = degrees // 90
    stored = np.ascontiguousarray(np.rot90(COLORS, -quarter_turns, axes=(1, 2)))
    assert frames(drawn(), film(tmp_path / "a.mp4", stored, rotation=degrees)) == [*range(7)]


@needs_av
@pytest.mark.parametrize("turns", range(4))
def test_mirrored_frames_are_mirrored_back(tmp_path, turns):
    """Frames are mirrored from left to right, and then turned counter-clockwise."""
    stored = np.ascontiguousarray(np.rot90(COLORS, -turns, axes=(1, 2))[:, :, ::-1])
    clip = film(tmp_path / "a.mp4", stored)
    # The display matrix of an MP4 track: mirror, then rotate. Its numbers are fixed-point, 16.16
    # and 2.30.
    (a, b), (c, d) = np.diag([-1, 1]) @ np.linalg.matrix_power([[0, -1], [1, 0]], turns)
    matrix = np.array([a, b, 0, c, d, 0, 0, 0, 1 << 14]) << 16
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    start = data.index(b"tkhd") + 44  # of the matrix in the track header
    data[start : start + 36] = matrix.astype(">i4").tobytes()
    (tmp_path / "a.mp4").write_bytes(data)
    assert frames(drawn(), clip) == [*range(7)]


# ---------------------------------------------------------------------------- refusals


def cut(path: Path) -> Clip:
    """A file cut short, without the header at its end."""
    clip = film(path)
    path.write_bytes(path.read_bytes()[:-400])
    return clip


def cut_at_its_end(path: Path) -> Clip:
    """A file cut short whose header is at its beginning, so that it can be opened."""
    import av

    film(path)
    front = path.with_name("front.mp4")
    with (
        av.open(str(path)) as source,
        av.open(str(front), "w", format="mp4", options={"movflags": "faststart"}) as container,
    ):
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
    front.write_bytes(front.read_bytes()[:-2000])
    return Clip(File(front))


def damaged(path: Path) -> Clip:
    """A file with random bytes inside its frames."""
    clip = film(path)
    data = bytearray(path.read_bytes())
    damage_start = data.index(b"mdat") + 2500
    data[damage_start : damage_start + 1500] = np.random.default_rng(0).bytes(1500)
    path.write_bytes(data)
    return clip


def header_alone(path: Path) -> Clip:
    path.write_bytes(b"\0\0\0\x18ftypisom" + bytes(64))
    return Clip(File(path))


def of_no_known_codec(path: Path) -> Clip:
    clip = film(path)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"none"))
    return clip


def with_sound(path: Path) -> Clip:
    return film(path, sound=True)


def with_wide_pixels(path: Path) -> Clip:
    return film(path, square=False)


REFUSED: dict[Callable[[Path], Clip], str] = {
    cut: "broken_video_header",
    cut_at_its_end: "truncated_video",
    damaged: "undecodable_video",
    header_alone: "broken_video_header",
    of_no_known_codec: "unsupported_video",
    with_sound: "video_with_sound",
    with_wide_pixels: "unsupported_video",
}


@needs_av
@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_read_is_refused(make, tmp_path):
    clip = make(tmp_path / "a.mp4")
    modality = drawn()
    with pytest.raises(MediaError) as error:
        modality.load(clip, modality.measure(clip))
    assert error.value.reason == REFUSED[make] and "\n" not in str(error.value)
    assert str(clip) in str(error.value)


@needs_av
def test_too_many_frames_and_sound_that_is_ignored(tmp_path):
    clip = film(tmp_path / "a.mp4", sound=True)
    assert frames(drawn(sound="ignore"), clip) == [*range(7)]
    with pytest.raises(MediaError, match=r"data\.generated\.sound: ignore, or write it without"):
        drawn().measure(clip)
    with pytest.raises(MediaError, match=r"7 frames, more than data\.generated\.max_frames = 6"):
        drawn(max_frames=6, sound="ignore").measure(clip)


def test_without_av_a_video_file_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "INSTALLED", False)
    with pytest.raises(MediaError, match=r"package av, .* pip install av") as error:
        drawn().measure(header_alone(tmp_path / "a.mp4"))
    assert error.value.reason == "no_video_reader"
    assert "av" in video_files.lacks_writer()


# ---------------------------------------------------------------------------- writing


@needs_av
@pytest.mark.parametrize("width", [24, 23])
def test_a_clip_is_written(tmp_path, width):
    """The codec loses some detail. Where both sides are even, it also stores colors for every
    second pixel alone."""
    import av

    pixels = np.full((5, 16, width, 3), 0, np.uint8)
    pixels[...] = np.arange(5)[:, None, None, None] * 40 + [0, 10, 20]
    video_files.write_video(tmp_path / "a.mp4", pixels, fps=7.5)
    with av.open(str(tmp_path / "a.mp4")) as container:
        (stream,) = container.streams
        assert stream.average_rate == Fraction(15, 2)
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert decoded.shape == pixels.shape
    assert np.abs(decoded.astype(int) - pixels).max() < 6
