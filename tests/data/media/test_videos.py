"""Videos that a model sees: which frames are taken, how large they are, and in which groups.

The references are the processed.npz of published video processors, and frames cut as pictures.
Pictures stay what they are."""

import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.schema import ConfigError, VideoDataConfig
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import ClipShape
from jaxmllm.data.media.reference import Clip, File, FrameGroup, MediaError
from jaxmllm.data.media.videos import ImagesAndVideos

GOLDENS = Path(__file__).parents[2] / "families" / "moving_goldens"
BY_FRAME = {"times": "positions"}
BY_VIDEO = {"times": "text", "bounds": "video"}
FAMILIES = {"qwen2_5_vl": (BY_FRAME, 14), "qwen3_vl": (BY_VIDEO, 16)}
COLORS = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3)).astype(np.uint8)  # of frames


def reader(patch: int = 4, **videos: object) -> ImagesAndVideos:
    bounds = {"min_pixels": 64, "max_pixels": 64 * 40} | videos
    settings = VideoDataConfig(**bounds)  # type: ignore[arg-type]
    return ImagesAndVideos(
        patch, 2, 64, max(640, 4 * patch**2), resize="smart", patch_frames=2, videos=settings
    )


def animation(path: Path, colors: np.ndarray = COLORS, milliseconds: int = 250) -> Clip:
    first_frame, *later_frames = map(Image.fromarray, colors)
    first_frame.save(
        path, save_all=True, append_images=later_frames, duration=milliseconds, lossless=True
    )
    return Clip(File(path))


def folder(path: Path, colors: np.ndarray = COLORS) -> Clip:
    path.mkdir()
    for index, frame in enumerate(colors):
        Image.fromarray(frame).save(path / f"{index}.png")
    return Clip(File(path))


@pytest.fixture(params=FAMILIES)
def processed(request) -> tuple[str, dict[str, np.ndarray]]:
    """The name of a family, and what its reference makes of videos."""
    return request.param, dict(np.load(GOLDENS / request.param / "processed.npz"))


# ---------------------------------------------------------------------------- against the reference


def test_the_frames_that_are_taken_are_those_of_the_reference(processed):
    name, arrays = processed
    settings = {**FAMILIES[name][0], "fps": 2.0}
    settings |= {"sampling": "ends"} if name == "qwen3_vl" else {}
    for index, (frames, rate) in enumerate(arrays["lengths"].tolist()):
        frames_taken = reader(**settings).sampled_frames(int(frames), rate)
        assert [*frames_taken] == arrays[f"taken_{index}"].tolist(), (frames, rate)


def test_grids_are_those_of_the_reference(processed):
    name, arrays = processed
    settings, patch = FAMILIES[name]
    min_pixels, max_pixels = arrays["resized_bounds"].tolist()
    modality = reader(patch, **settings, min_pixels=min_pixels, max_pixels=max_pixels)
    grids = [
        modality.frame_images(frames).grid(*size) for frames, *size in arrays["sizes"].tolist()
    ]
    np.testing.assert_array_equal(patch * np.array(grids), arrays["resized"])


def test_pixels_are_those_of_the_reference(processed, tmp_path):
    """The reference's processor got frames that Pillow had resized, because its own kernel rounds
    differently."""
    name, arrays = processed
    min_pixels, max_pixels = arrays["bounds"].tolist()
    modality = reader(**FAMILIES[name][0], min_pixels=min_pixels, max_pixels=max_pixels)
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    for index in range(3):
        video = arrays[f"video_{index}"]
        clip = animation(tmp_path / f"{index}.png", video)
        shape = modality.measure(clip)
        assert shape == tuple(arrays[f"grid_{index}"])
        groups = np.concatenate([*modality.load_groups(clip, range(shape[0]), shape.group)])
        pixels = (groups.reshape(-1, 2, 4, 4, 3) / 255 - mean) / std
        expected = arrays[f"pixels_{index}"].reshape(-1, 3, 2, 4, 4).transpose(0, 2, 3, 4, 1)
        np.testing.assert_allclose(pixels, expected, rtol=0, atol=1e-6, err_msg=str(index))


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["a.webp", "a.png", "clip"])
def test_groups_hold_the_frames_of_a_file(name, tmp_path):
    """Seven frames are four groups, and the last group has its frame twice. One group may be asked
    for alone."""
    modality = reader(folder_fps=4.0)
    clip = (folder if name == "clip" else animation)(tmp_path / name)
    shape = modality.measure(clip)
    assert isinstance(shape, ClipShape) and shape == (4, 4, 6)
    assert (shape.frames, shape.rate, shape.group) == (7, 4.0, (1, 4, 6))
    images = Images(4, 2, 64, 640)
    frames = [images.patches(colors, (1, 4, 6)) for colors in COLORS]
    pairs = [(0, 1), (2, 3), (4, 5), (6, 6)]
    for numbers in ([0, 1, 2, 3], [3], [0, 2]):
        for group_index, group in zip(
            numbers, modality.load_groups(clip, numbers, shape.group), strict=True
        ):
            first, second = pairs[group_index]
            np.testing.assert_array_equal(group[:, :48], frames[first])
            np.testing.assert_array_equal(group[:, 48:], frames[second])
    sampled = reader(folder_fps=4.0, fps=2.0)
    assert [*sampled.sampled_frames(7, 4.0)] == [0, 1, 3, 5]
    first = next(sampled.load_groups(clip, [1], shape.group))
    np.testing.assert_array_equal(first[:, :48], frames[3])


def test_a_picture_is_the_same_in_all_frames(tmp_path):
    Image.fromarray(COLORS[0]).save(tmp_path / "a.png")
    file = File(tmp_path / "a.png")
    modality = reader()
    images = Images(4, 2, 64, 640, resize="smart")
    shape = modality.measure(file)
    assert shape == images.measure(file) and not isinstance(shape, ClipShape)
    np.testing.assert_array_equal(modality.load(file, shape), np.tile(images.load(file, shape), 2))
    assert modality.format.features == 2 * images.format.features


def test_times_are_positions_or_words():
    shape = ClipShape((3, 4, 8), 6, 5.0)  # a group every 0.4 seconds
    positions, following = reader(positions_per_second=4.0).token_positions(shape, 10)
    assert positions[:, 0].reshape(3, 8).tolist() == [[10] * 8, [11] * 8, [13] * 8]
    assert following == 14 and positions[-1].tolist() == [13, 11, 13]
    line_reader = reader(positions_per_second=25.0, times="line")
    assert line_reader.token_positions(shape, 10)[1] == 31 and line_reader.captions(shape) == ()
    captions = reader(times="text").captions(shape)
    assert captions == ("<0.1 seconds>", "<0.5 seconds>", "<0.9 seconds>")
    unpickled = pickle.loads(pickle.dumps(shape))
    assert unpickled == shape and (unpickled.frames, unpickled.rate) == (6, 5.0)


def cut(path: Path) -> Clip:
    clip = animation(path)
    path.write_bytes(path.read_bytes()[:-400])
    return clip


def empty(path: Path) -> Clip:
    path.mkdir()
    return Clip(File(path))


def unlike(path: Path) -> Clip:
    clip = folder(path)
    Image.new("RGB", (40, 40)).save(path / "5.png")
    return clip


REFUSED: dict[str, tuple[Callable[[Path], Clip], dict[str, object], str]] = {
    "too long": (lambda d: animation(d / "a.png"), {"max_frames": 6}, "too_many_frames"),
    "too short": (
        lambda d: animation(d / "a.png", COLORS[:1]),
        {"fps": 2.0},
        "too_few_frames",
    ),
    "no rate": (lambda d: folder(d / "clip"), {}, "unknown_frame_rate"),
    "no frames": (lambda d: empty(d / "clip"), {"folder_fps": 4.0}, "missing_file"),
    "cut": (lambda d: cut(d / "a.png"), {}, "truncated_video"),
    "unlike": (lambda d: unlike(d / "clip"), {"folder_fps": 4.0}, "unlike_frames"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(name, tmp_path):
    make, settings, reason = REFUSED[name]
    modality = reader(**settings)
    clip = make(tmp_path)
    with pytest.raises(MediaError) as error:
        shape = modality.measure(clip)
        [*modality.load_groups(clip, range(shape[0]), shape.group)]
    assert error.value.reason == reason and "\n" not in str(error.value)
    assert str(FrameGroup(clip, 3)).endswith("(frames 3)")


def test_a_video_that_changed(tmp_path):
    """The video has fewer frames, or larger ones, than when it was indexed."""
    modality = reader()
    clip = animation(tmp_path / "a.png")
    shape = modality.measure(clip)
    assert shape[0] == 4
    for colors in (COLORS[:3], np.repeat(COLORS, 2, axis=1)):
        animation(tmp_path / "a.png", colors)
        with pytest.raises(
            MediaError, match=r"as at least 4 groups of \(4, 6\) patches but is"
        ) as e:
            next(modality.load_groups(clip, [3], shape.group))
        assert e.value.reason == "shape_changed"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_pixels": 63, "min_pixels": 1}, r"data.videos.max_pixels \(63\) is less than one m"),
        ({"min_pixels": 9999}, r"data.videos.min_pixels \(9999\) is more than data.videos.max_p"),
    ],
)
def test_bounds_that_no_frame_has(settings, words):
    with pytest.raises(ConfigError, match=words):
        reader(**settings)


def test_averages_of_uneven_times(tmp_path):
    clip = animation(tmp_path / "a.png", COLORS[:4], [100, 100, 100, 700])  # type: ignore[arg-type]
    # Four frames last one second together, whatever the single times.
    shape = reader().measure(clip)
    assert isinstance(shape, ClipShape) and shape.rate == float(4 / Fraction(1))
