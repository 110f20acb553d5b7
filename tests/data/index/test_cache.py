"""The cache of length indexes: when it is used, and when headers are read again."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from jaxmllm.data.index.builder import build_index
from jaxmllm.data.index.length_index import LengthIndex
from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import File, MediaReference
from jaxmllm.data.text.tokenizers import ByteTokenizer
from tests.data.index.examples import IMAGES, ask, image, index_of, same, sound, text, write


def test_the_cache_is_used_until_something_changes(media: Path, measured: list[str]) -> None:
    records = [ask(image("a.png"), sound("c.wav")), ask(image("a.png"), image("later.png"))]
    source = write(media / "train.jsonl", *records)
    cache = media / "cache"

    def read_again() -> tuple[LengthIndex, list[str]]:
        measured.clear()
        return index_of(source, cache), sorted(measured)

    first_index, names = read_again()
    # later.png does not exist yet, so its record is refused.
    assert names == ["a.png", "c.wav", "later.png"] and len(first_index.rejected) == 1
    second_index, names = read_again()
    assert names == [] and same(first_index, second_index)
    os.utime(media / "train.jsonl", ns=(1, 1))  # a fresh copy of the same content
    assert read_again()[1] == []

    Image.new("RGB", (16, 16)).save(media / "later.png")
    index, names = read_again()
    assert names == ["later.png"] and len(index) == 2 and index.rejected == ()

    Image.new("RGB", (40, 40)).save(media / "a.png")
    index, names = read_again()
    assert names == ["a.png"] and index.item_shape[0].tolist() == [1, 10, 10]

    write(media / "train.jsonl", *records, ask(image("b.png")))
    index, names = read_again()
    assert names == ["b.png"] and len(index) == 3
    assert len(list(cache.iterdir())) == 1 and not list(media.glob("*.npz"))


def test_a_link_that_leads_elsewhere_is_followed_anew(media: Path) -> None:
    """The last target is a copy with the size and time of what was measured, but outside the root."""
    root = media / "root"
    for name, size in (("v1", (24, 16)), ("v2", (8, 8))):
        (root / name).mkdir(parents=True)
        Image.new("RGB", size).save(root / name / "a.png")
    shutil.copytree(root / "v2", media / "outside")
    source = write(root / "train.jsonl", ask(image("now/a.png")), ask(text("b")))
    for target, reasons in (("v1", []), ("v2", []), ("../outside", ["path_escapes_root"])):
        (root / "now").unlink(missing_ok=True)
        (root / "now").symlink_to(target)
        index = index_of(source)
        assert [refusal.reason for refusal in index.rejected] == reasons
        if not reasons:
            assert index.shapes(0) == (IMAGES.measure(File(root / target / "a.png")),)
            resolved = index.source.resolve("now/a.png")
            assert index.media.address == (resolved.address,)
            assert IMAGES.load(resolved, index.shapes(0)[0]).size


def test_a_new_format_is_measured_and_a_lost_one_refused(
    media: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When formats are only added, headers that were understood are not read again."""
    Image.new("RGB", (16, 16)).save(media / "new.bmp")
    source = write(
        media / "train.jsonl", ask(image("a.png")), ask(image("new.bmp")), ask(sound("c.wav"))
    )
    all_formats = Images.formats
    older_formats = tuple(name for name in all_formats if name != "BMP")
    for formats, measured_names, usable_count in (
        (older_formats, ["a.png", "c.wav", "new.bmp"], 2),
        (all_formats, ["new.bmp"], 3),
        (all_formats, [], 3),
        (older_formats, ["a.png", "new.bmp"], 2),
    ):
        measured.clear()
        monkeypatch.setattr(Images, "formats", formats)
        index = index_of(source)
        assert sorted(measured) == measured_names and len(index) == usable_count
        assert [refused.reason for refused in index.rejected] == ["broken_image_header"] * (
            3 - usable_count
        )
    assert len(list(media.glob("*.npz"))) == 1


def test_other_settings_have_another_cache(media: Path, measured: list[str]) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    small = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 2)
    for images, shape in [(IMAGES, [1, 4, 6]), (small, [1, 2, 2]), (IMAGES, [1, 4, 6])]:
        index = build_index(source, ByteTokenizer(), {"vision": images})
        assert index.item_shape[0].tolist() == shape
    assert measured == ["a.png", "a.png"] and len(list(media.glob("train.*.index.npz"))) == 2


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text"])
def test_a_damaged_cache_is_built_anew(harm: str, media: Path, measured: list[str]) -> None:
    source = write(media / "train.jsonl", *(ask(image("a.png"), id=i) for i in range(50)))
    original = index_of(source)
    (file,) = media.glob("*.index.npz")
    content = bytearray(file.read_bytes())
    # "flip" keeps this one damaged byte; the other cases replace or cut the content.
    content[len(content) // 3] ^= 0xFF
    file.write_bytes({"cut": content[:-100], "flip": content, "empty": b"", "text": b"hello"}[harm])
    assert same(index_of(source), original)
    assert measured == ["a.png", "a.png"]
    index_of(source)
    assert measured == ["a.png", "a.png"]


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    media: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    (media / "taken").write_text("")
    assert len(index_of(source, media / "taken")) == 1
    assert "data.index_cache" in caplog.text


def test_drafts_of_killed_builds_are_swept(media: Path) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    index_of(source)
    (file,) = media.glob("*.index.npz")
    file.unlink()
    ended_process = subprocess.Popen([sys.executable, "-c", ""])
    ended_process.wait()
    host = socket.gethostname()
    # A draft is swept if its process has ended on this host, or if it is old.
    drafts = {
        "dead": f"{host}.{ended_process.pid}.abc",
        "old": "elsewhere.1.abc",
        "of a process": f"{host}.{os.getpid()}.abc",
        "of a host": "elsewhere.2.abc",
    }
    for name in drafts.values():
        (media / f"{file.name}.{name}").mkdir()
        (media / f"{file.name}.{name}" / "half").write_bytes(b"x")
    os.utime(media / f"{file.name}.{drafts['old']}", (0, 0))
    index_of(source)
    left_drafts = {path.name.removeprefix(f"{file.name}.") for path in media.glob("*.index.npz.*")}
    assert left_drafts == {drafts["of a process"], drafts["of a host"]}


def test_a_cache_that_is_a_pipe_or_has_no_name_is_only_a_warning(
    media: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    original = index_of(source)
    (file,) = media.glob("*.index.npz")
    file.unlink()
    os.mkfifo(file)
    assert same(index_of(source), original)
    assert len(index_of(source, media / ("x" * 300))) == 1
    assert "data.index_cache" in caplog.text


def test_a_file_is_measured_as_an_image_and_as_a_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of frames is measured again when one of them changes."""
    frames = [Image.new("RGB", (8, 12), (40 * i, 0, 0)) for i in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "clip").mkdir()
    for index in range(2):
        frames[index].save(tmp_path / f"clip/{index}.png")
    drawn_items = [{"type": "image", "image": "a.gif"}, {"type": "video", "video": "a.gif"}]
    drawn_items.append({"type": "video", "video": "clip"})
    answers = [
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, item]}
        for item in drawn_items
    ]
    source = write(tmp_path / "train.jsonl", {"messages": answers})
    measured: list[str] = []

    def measure(self: GeneratedPixels, media: MediaReference) -> Shape:
        measured.append(media.address)
        return real(self, media)

    real = GeneratedPixels.measure
    monkeypatch.setattr(GeneratedPixels, "measure", measure)

    def index_again() -> LengthIndex:
        measured.clear()
        return build_index(source, ByteTokenizer(), {"diffusion": GeneratedPixels(4, 1, 1, 4096)})

    first_index = index_again()
    assert first_index.shapes(0) == ((1, 3, 2), (3, 3, 2), (2, 3, 2))
    assert sorted(measured) == ["a.gif", "a.gif", "clip"]
    assert same(first_index, index_again()) and measured == []
    frames[2].save(tmp_path / "clip/2.png")
    assert index_again().shapes(0)[2] == (3, 3, 2) and measured == ["clip"]
    os.utime(tmp_path / "clip/1.png", ns=(1, 2**62))
    assert index_again().shapes(0)[2] == (3, 3, 2) and measured == ["clip"]
