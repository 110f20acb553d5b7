"""Pixels that a model learns to draw: patches of images and clips, and which frames are taken."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.data.media.blanks import Blanks
from jaxmllm.data.media.generated import GeneratedPixels, item_real, item_slots, patches_of
from jaxmllm.data.media.reference import Clip, File, MediaError

SIZE = (20, 12)  # width, height
GRAYS = range(0, 200, 20)  # of the ten frames
FRAMES = [Image.new("RGB", SIZE, (gray, gray, gray)) for gray in GRAYS]


def pixels(**changes: object) -> GeneratedPixels:
    return GeneratedPixels(4, 1, 1, 4096, **changes)  # type: ignore[arg-type]


def animation(path: Path, **options: object) -> File:
    """Writes ten frames, each of a single gray."""
    FRAMES[0].save(path, save_all=True, append_images=FRAMES[1:], **options)
    return File(path)


def folder(path: Path, count: int = 10) -> File:
    path.mkdir()
    for index, frame in enumerate(FRAMES[:count]):
        frame.save(path / f"frame{index}.png")
    (path / ".hidden").write_text("no frame")
    return File(path)


def grays(modality: GeneratedPixels, media: File) -> list[int]:
    """The grays of the frames that are taken."""
    clip = Clip(media)
    shape = modality.measure(clip)
    assert shape[1:] == (3, 5)
    frames = modality.load(clip, shape).reshape(shape[0], 15, modality.patch_frames, -1)
    frame_means = frames.astype(int).mean((1, 3)).reshape(-1)
    return [round(gray) for gray in frame_means]


KINDS: dict[str, dict[str, object]] = {
    "a.gif": {"duration": 100},
    "a.webp": {"duration": 100, "lossless": True},
    "a.png": {"duration": 100},
}


@pytest.mark.parametrize("name", KINDS)
def test_an_animation_has_the_frames_that_its_times_say(name: str, tmp_path: Path) -> None:
    media = animation(tmp_path / name, **KINDS[name])
    all_grays = list(GRAYS)
    assert grays(pixels(), media) == grays(pixels(fps=10.0), media) == all_grays
    assert grays(pixels(fps=5.0), media) == all_grays[1::2]
    assert grays(pixels(fps=20.0), media) == [gray for gray in all_grays for _ in range(2)]
    assert grays(pixels(max_frames=4, shorten=True), media) == all_grays[:4]
    # Read as an image, an animation is its first frame, repeated where a patch has several frames.
    shape = pixels(patch_frames=4).measure(media)
    assert shape == (1, 3, 5) and not pixels(patch_frames=4).load(media, shape).any()
    assert grays(pixels(patch_frames=4), media) == [*all_grays, all_grays[-1], all_grays[-1]]


def test_frames_are_shown_for_unlike_times(tmp_path: Path) -> None:
    media = animation(tmp_path / "a.png", duration=[100] * 9 + [300])
    assert grays(pixels(fps=10.0), media) == [*GRAYS, GRAYS[-1], GRAYS[-1]]
    default_image = animation(tmp_path / "b.png", duration=100, default_image=True)
    assert grays(pixels(), default_image) == list(GRAYS)[1:], (
        "the first is shown where nothing moves"
    )
    FRAMES[3].save(tmp_path / "still.gif")
    assert grays(pixels(fps=10.0), File(tmp_path / "still.gif")) == [60]


def test_a_folder_has_a_file_for_each_frame(tmp_path: Path) -> None:
    media = folder(tmp_path / "clip", 10)
    (tmp_path / "clip/frame9.png").rename(tmp_path / "clip/frame10.png")
    (tmp_path / "clip/frame0.png").rename(tmp_path / "clip/frame009.png")
    order = [*GRAYS[1:9], GRAYS[0], GRAYS[9]]  # ordered by numbers, not letters
    assert grays(pixels(), media) == order
    assert grays(pixels(fps=5.0, folder_fps=10.0), media) == order[1::2]


def test_patches_are_those_of_a_plain_loop() -> None:
    frames = np.arange(4 * 6 * 9 * 2).reshape(4, 6, 9, 2)
    expected = [
        frames[t : t + 2, y : y + 3, x : x + 3].reshape(-1)
        for t in (0, 2)
        for y in (0, 3)
        for x in (0, 3, 6)
    ]
    np.testing.assert_array_equal(patches_of(frames, 2, 3), expected)
    positions = pixels().positions((2, 2, 3))
    np.testing.assert_array_equal(
        positions, [(t, y, x) for t in range(2) for y in range(2) for x in range(3)]
    )


# ---------------------------------------------------------------------------- what is refused


def cut(path: Path, keep: float = 0.6) -> File:
    """Cuts a file short, and keeps this share of it."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    return File(path)


def unlike(path: Path) -> File:
    """A folder in which one frame has another size."""
    media = folder(path)
    FRAMES[0].resize((40, 40)).save(path / "frame7.png")
    return media


def noisy(path: Path, change: Callable[[bytearray], None]) -> File:
    """An animation of noise whose bytes are changed."""
    random = np.random.default_rng(0)
    frames = [Image.fromarray(random.integers(0, 256, (12, 20, 3), np.uint8)) for _ in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return File(path)


def damaged_body(content: bytearray) -> None:
    body = content.index(b"fdAT") + 30
    content[body : body + 20] = bytes(20)


def one_frame_less(content: bytearray) -> None:
    count_start = content.index(b"acTL") + 4
    content[count_start : count_start + 4] = (2).to_bytes(4, "big")


REFUSED: dict[str, tuple[Callable[[Path], File], dict[str, object], str]] = {
    "more frames": (lambda d: animation(d / "a.gif"), {"max_frames": 9}, "too_many_frames"),
    "more frames at this rate": (
        lambda d: animation(d / "a.gif", duration=100),
        {"max_frames": 10, "fps": 11.0},
        "too_many_frames",
    ),
    "no rate": (lambda d: folder(d / "clip"), {"fps": 4.0}, "unknown_frame_rate"),
    "unlike sizes": (lambda d: unlike(d / "clip"), {}, "unlike_frames"),
    "nothing there": (lambda d: File(d / "absent"), {}, "missing_file"),
    "empty folder": (lambda d: folder(d / "clip", 0), {}, "missing_file"),
    "no animation": (
        lambda d: FRAMES[0].save(d / "a.jpg") or File(d / "a.jpg"),  # type: ignore[func-returns-value]
        {},
        "broken_video_header",
    ),
    **{
        f"cut {name}": (
            lambda d, name=name: cut(animation(d / name, **KINDS[name]).path),  # type: ignore[misc]
            {},
            "truncated_video",
        )
        for name in KINDS
    },
    "damaged body": (lambda d: noisy(d / "a.png", damaged_body), {}, "undecodable_video"),
    "wrong count": (lambda d: noisy(d / "a.png", one_frame_less), {}, "broken_video_header"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, settings, reason = REFUSED[name]
    media = Clip(make(tmp_path))
    modality = pixels(**settings)
    with pytest.raises(MediaError) as caught:
        modality.load(media, modality.measure(media))
    assert caught.value.reason == reason
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "head", [b"\x1aE\xdf\xa3" + bytes(60), b"RIFF\0\0\0\0AVI LIST" + bytes(48)]
)
def test_what_to_convert_other_videos_to_is_told(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(head)
    with pytest.raises(
        MediaError, match=r"no MP4, GIF, WebP or PNG file; .*ffmpeg -i FILE out\.mp4"
    ):
        pixels().measure(Clip(File(tmp_path / "a")))


def test_rows_and_columns_are_counted_from_the_middle():
    shape = (2, 3, 4)
    centred = pixels(centred=True).positions(shape)
    assert_equal = np.testing.assert_array_equal
    assert_equal(np.unique(centred[:, 0]), [0, 1])
    assert_equal(np.unique(centred[:, 1]), [-2, -1, 0])  # as Qwen-Image counts odd numbers
    assert_equal(np.unique(centred[:, 2]), [-2, -1, 0, 1])
    assert_equal(centred - pixels().positions(shape), np.tile([0, -2, -2], (24, 1)))
    # Drawn items have the positions of learned ones.
    blanks = Blanks(pixels(centred=True)).positions(shape)
    assert_equal(blanks, np.tile(centred, (2, 1)))


def test_what_an_attention_apart_reads_takes_no_slots_of_its_own():
    shape = (1, 3, 5)
    in_row = pixels()
    for modality, copies in ((in_row, 1), (Blanks(in_row), 2)):
        slots = [item_slots(modality, shape, conditions) for conditions in (0, 4, 40)]
        assert slots == [copies * 15 + conditions for conditions in (0, 4, 40)]
        assert item_real(modality, shape, 4) == slots[1]
        assert modality.patch_count(slots[1], 4) == copies * 15
    crossed = pixels(crossed=True)
    for modality, copies in ((crossed, 1), (Blanks(crossed), 2)):
        assert modality.crossed
        assert [item_slots(modality, shape, n) for n in (0, 4, 40)] == [copies * 15] * 2 + [40]
        assert item_real(modality, shape, 40) == copies * 15
        assert modality.patch_count(copies * 15, 40) == copies * 15


def test_texts_advance_time_or_stand_behind_pictures_along_all_axes():
    shape = (1, 3, 5)
    in_time = pixels(centred=True)
    assert in_time.condition_positions(shape, 2).tolist() == [[0, 0, 0], [1, 0, 0]]
    assert in_time.first_time(2) == 2
    for centred, first_position in ((True, 2), (False, 5)):
        diagonal = pixels(centred=centred, diagonal=True)
        assert diagonal.positions(shape)[:, 1:].max() == first_position - 1
        for modality in (diagonal, Blanks(diagonal)):
            expected = [[first_position] * 3, [first_position + 1] * 3]
            assert modality.condition_positions(shape, 2).tolist() == expected
            assert modality.first_time(2) == 0
