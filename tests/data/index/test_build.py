import json
import math
import os
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.index import build as index_module
from jaxmllm.data.index.build import DataError, LengthIndex, build_index
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.text.tokenizers import ByteTokenizer

IMAGES = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 100)
SOUNDS = Sounds(16_000, 400, 160, 40, chunk_frames=32, merge=2, max_seconds=5.0)
MODALITIES: dict[str, Modality] = {"vision": IMAGES, "audio": SOUNDS}
ANSWER = {"role": "assistant", "content": "yes"}


def ask(*content: dict[str, str], **keys: Any) -> dict[str, Any]:
    return {**keys, "messages": [{"role": "user", "content": list(content)}, ANSWER]}


def image(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def sound(path: str) -> dict[str, str]:
    return {"type": "audio", "audio": path}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def write(path: Path, *records: dict[str, Any] | str) -> SourceConfig:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return SourceConfig(name="animals", path=str(path))


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """a.png is 4 x 6 patches, b.png 2 x 2; c.wav has 50 frames."""
    Image.new("RGB", (24, 16)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    soundfile.write(tmp_path / "c.wav", np.zeros(8000), 16_000)
    return tmp_path


def index_of(source: SourceConfig, cache: Path | None = None) -> LengthIndex:
    return build_index(source, ByteTokenizer(), MODALITIES, cache)


def same(a: LengthIndex, b: LengthIndex) -> bool:
    words = ("source", "path", "root", "learned", "phases", "labels", "rejected")
    columns = [name for name in vars(a) if name not in (*words, "media")]
    return (
        all(getattr(a, name) == getattr(b, name) for name in words)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and all(getattr(a, name).dtype == getattr(b, name).dtype for name in columns)
        and (a.media.path, a.media.failure) == (b.media.path, b.media.failure)
        and np.array_equal(a.media.stamp, b.media.stamp)
        and np.array_equal(a.media.shape, b.media.shape)
    )


def test_columns(media: Path) -> None:
    source = write(
        media / "train.jsonl",
        ask(text("é?"), id="one", source="words"),
        "  ",
        ask(image("b.png"), text("?"), sound("c.wav"), image("a.png"), id=2),
        ask(image("a.png")),
    )
    index = index_of(source)
    lines = (media / "train.jsonl").read_bytes().splitlines(keepends=True)
    assert index.rejected == ()
    assert index.id.tolist() == ["one", "2", "animals:4"]
    assert index.line.tolist() == [1, 3, 4]
    assert index.offset.tolist() == [0, len(lines[0]) + 3, len(lines[0]) + 3 + len(lines[2])]
    assert [index.labels[label] for label in index.label] == ["words", "animals", "animals"]
    # user header, content, end, assistant header, 3 letters, end; media stand between a begin and an end token
    tokens = math.ceil(math.ceil(50 / 4) / 2)
    assert index.language_length.tolist() == [1 + 3 + 6, 1 + (1 + 2) + 1 + (tokens + 2) + (6 + 2) + 6, 1 + (6 + 2) + 6]
    assert index.targets.tolist() == [4, 4, 4]
    assert index.item_start.tolist() == [0, 0, 3, 4]
    assert [index.phases[phase] for phase in index.item_phase] == ["vision", "audio", "vision", "vision"]
    assert index.item_shape.tolist() == [[2, 2], [50, 1], [4, 6], [4, 6]]
    assert index.item_length.tolist() == [4, 56, 24, 24]
    assert index.item_real.tolist() == [4, 50, 24, 24]
    assert index.item_tokens.tolist() == [1, tokens, 6, 6]
    assert index.item_slot.tolist() == [2, 6, 2 + 5 + tokens + 1, 2]
    assert index.shapes(1) == ((2, 2), (50, 1), (4, 6))
    assert [index.media.path[row] for row in index.item_media] == ["b.png", "c.wav", "a.png", "a.png"]


def test_every_bad_record_is_refused_with_its_line_and_the_others_stay(media: Path) -> None:
    whole = (media / "a.png").read_bytes()
    (media / "cut.png").write_bytes(whole[:20])
    (media / "cut_body.png").write_bytes(whole[:45])
    soundfile.write(media / "none.wav", np.zeros(0), 16_000)
    soundfile.write(media / "long.wav", np.zeros(16_000 * 6), 16_000)
    os.symlink("/etc/hostname", media / "link.png")
    bad = {
        "malformed_json": '{"messages": [',
        "unknown_role": {"messages": [{"role": "robot", "content": "hi"}, ANSWER]},
        "placeholder_mismatch": {
            "images": ["a.png"],
            "messages": [{"role": "user", "content": "<image><image>"}, ANSWER],
        },
        "missing_file": ask(image("a.png"), image("absent.png")),
        "broken_image_header": ask(image("cut.png")),
        "empty_audio": ask(sound("none.wav")),
        "audio_too_long": ask(sound("long.wav")),
        "path_escapes_root": ask(image("link.png")),
        "no_assistant_turn": {"id": "mute", "messages": []},
        "broken_audio_header": ask(sound("a.png")),
    }
    good = [ask(image("a.png"), id="first"), ask(image("cut_body.png"), id="last")]
    source = write(media / "train.jsonl", good[0], *bad.values(), good[1])
    index = index_of(source)
    assert index.id.tolist() == ["first", "last"]
    assert [(r.reason, r.line) for r in index.rejected] == [(reason, line) for line, reason in enumerate(bad, 2)]
    assert str(index.rejected[0]).startswith(f"{media / 'train.jsonl'}:2: not valid JSON")
    assert str(media / "absent.png") in index.rejected[3].message
    assert [r.id for r in index.rejected if r.reason in ("malformed_json", "no_assistant_turn")] == [
        "animals:2",
        "mute",
    ]
    assert same(index, index_of(source))


def test_media_without_an_encoder(media: Path) -> None:
    source = write(media / "train.jsonl", ask(text("hi")), ask(sound("c.wav")))
    index = build_index(source, ByteTokenizer(), {"vision": IMAGES})
    assert len(index) == 1 and [r.reason for r in index.rejected] == ["no_encoder"]


def test_root_and_missing_source(media: Path) -> None:
    (media / "lists").mkdir()
    source = write(media / "lists/train.jsonl", ask(image("a.png")))
    assert [r.reason for r in index_of(source).rejected] == ["missing_file"]
    assert len(index_of(source.model_copy(update={"root": str(media)}))) == 1
    with pytest.raises(DataError, match=r"source 'x'.*absent\.jsonl.*data\.sources"):
        index_of(SourceConfig(name="x", path=str(media / "absent.jsonl")))


def test_empty_source(media: Path) -> None:
    source = write(media / "train.jsonl")
    assert len(index_of(source)) == 0
    assert same(index_of(source), index_of(source))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose headers were read."""
    names: list[str] = []
    for kind in (Images, Sounds):

        def measure(self: Any, path: Path, real: Any = kind.measure) -> Any:
            names.append(path.name)
            return real(self, path)

        monkeypatch.setattr(kind, "measure", measure)
    return names


def test_the_cache_is_used_until_something_changes(media: Path, measured: list[str]) -> None:
    records = [ask(image("a.png"), sound("c.wav")), ask(image("a.png"), image("later.png"))]
    source, cache = write(media / "train.jsonl", *records), media / "cache"

    def read_again() -> tuple[LengthIndex, list[str]]:
        measured.clear()
        return index_of(source, cache), sorted(measured)

    first, names = read_again()
    assert names == ["a.png", "c.wav", "later.png"] and len(first.rejected) == 1
    again, names = read_again()
    assert names == [] and same(first, again)
    os.utime(media / "train.jsonl", ns=(1, 1))  # a fresh copy of the same content
    assert read_again()[1] == []

    Image.new("RGB", (16, 16)).save(media / "later.png")
    index, names = read_again()
    assert names == ["later.png"] and len(index) == 2 and index.rejected == ()

    Image.new("RGB", (40, 40)).save(media / "a.png")
    index, names = read_again()
    assert names == ["a.png"] and index.item_shape[0].tolist() == [10, 10]

    write(media / "train.jsonl", *records, ask(image("b.png")))
    index, names = read_again()
    assert names == ["b.png"] and len(index) == 3
    assert len(list(cache.iterdir())) == 1 and not list(media.glob("*.npz"))


def test_other_settings_have_another_cache(media: Path, measured: list[str]) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    small = Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 2)
    for images, shape in [(IMAGES, [4, 6]), (small, [2, 2]), (IMAGES, [4, 6])]:
        index = build_index(source, ByteTokenizer(), {"vision": images})
        assert index.item_shape[0].tolist() == shape
    assert measured == ["a.png", "a.png"] and len(list(media.glob("train.*.index.npz"))) == 2


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "text"])
def test_a_damaged_cache_is_built_anew(harm: str, media: Path, measured: list[str]) -> None:
    source = write(media / "train.jsonl", *(ask(image("a.png"), id=i) for i in range(50)))
    first = index_of(source)
    (file,) = media.glob("*.index.npz")
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes({"cut": content[:-100], "flip": content, "empty": b"", "text": b"hello"}[harm])
    assert same(index_of(source), first)
    assert measured == ["a.png", "a.png"]
    index_of(source)
    assert measured == ["a.png", "a.png"]


def test_a_cache_that_cannot_be_written_is_only_a_warning(media: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    (media / "taken").write_text("")
    assert len(index_of(source, media / "taken")) == 1
    assert "data.index_cache" in caplog.text


def test_without(media: Path) -> None:
    records = [ask(image("a.png"), id="a"), ask(image("b.png"), sound("c.wav"), id="b"), ask(text("?"), id="c")]
    source = write(media / "train.jsonl", records[0], "{", *records[1:], ask(sound("c.wav"), id="d"))
    index = index_of(source)
    assert index.without([]) is index
    less = index.without([(1, "too_big", "b is too big")])
    alone = index_of(write(media / "less.jsonl", records[0], records[2], ask(sound("c.wav"), id="d")))
    for name in ("id", "language_length", "targets", "item_start", "item_phase", "item_shape", "item_slot"):
        np.testing.assert_array_equal(getattr(less, name), getattr(alone, name))
    assert [(r.line, r.reason, r.id) for r in less.rejected] == [
        (2, "malformed_json", "animals:2"),
        (3, "too_big", "b"),
    ]


# ---------------------------------------------------------------------------- input that would hurt


def test_only_regular_files_are_read(media: Path) -> None:
    os.mkfifo(media / "pipe.jsonl")
    for path in (media / "pipe.jsonl", Path("/dev/zero"), media):
        with pytest.raises(DataError, match=r"source 'x': .* is no regular file; see data\.sources"):
            index_of(SourceConfig(name="x", path=str(path)))


def test_a_line_without_end_is_refused_without_being_held(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_LINE", 10_000)
    long = json.dumps({"id": "long", "text": "x" * 50_000_000})
    source = write(media / "train.jsonl", ask(text("a"), id="first"), long, ask(text("b"), id="last"))
    tracemalloc.start()
    index = index_of(source)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    assert index.id.tolist() == ["first", "last"] and index.line.tolist() == [1, 3]
    (rejected,) = index.rejected
    assert (rejected.reason, rejected.line, rejected.id) == ("line_too_long", 2, "animals:2")
    assert f"a line of {len(long) + 1} bytes; a record has at most 10000" in rejected.message
    with (media / "train.jsonl").open("rb") as file:
        file.seek(int(index.offset[1]))
        assert json.loads(file.readline())["id"] == "last"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_of_just_the_bound_is_read(end: str, media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.dumps(ask(text("a"), id="first"))
    for bound, read in ((len(record + end), 1), (len(record + end) - 1, 0)):
        monkeypatch.setattr(index_module, "MAX_LINE", bound)
        (media / "train.jsonl").write_text(record + end)
        index = index_of(SourceConfig(name="s", path=str(media / "train.jsonl")), media / str(bound))
        assert len(index) == read and len(index.rejected) == 1 - read


def test_few_long_lines_are_held_at_a_time(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [ask(text("x" * n), id=str(n)) for n in range(200)]
    source = write(media / "train.jsonl", *records)
    chunks = [list(chunk) for chunk in index_module._line_chunks(media / "train.jsonl")]
    assert [len(chunk) for chunk in chunks] == [200]
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 1000)
    chunks = [list(chunk) for chunk in index_module._line_chunks(media / "train.jsonl")]
    assert len(chunks) > 20 and all(sum(line.size for line in chunk[:-1]) < 1000 for chunk in chunks)
    assert index_of(source).id.tolist() == [str(n) for n in range(200)]


def test_hostile_records_are_refused_one_by_one(media: Path) -> None:
    """Each in one printable line, whatever its path or id holds."""
    hostile = "\n\x1b[2J\u2028error: all is lost\r"
    bad = {
        "missing_file": ask(image(f"a{hostile}.png"), id=hostile),
        "invalid_text": ask(text("?"), id="ends in NUL\0"),
        "malformed_json": '{"id": ' + "9" * 10_000 + "}",
        "unknown_role": {"messages": [{"role": hostile, "content": "hi"}, ANSWER]},
    }
    nested = "[" * 200_000 + "]" * 200_000
    many = {"messages": [*({"role": "user", "content": ""} for _ in range(20_000)), ANSWER], "id": "empty turns"}
    pictures = ask(*(image("a.png") for _ in range(3000)), id="pictures")
    source = write(media / "train.jsonl", *bad.values(), nested, many, pictures)
    index = index_of(source)
    assert index.id.tolist() == ["empty turns", "pictures"]
    assert np.diff(index.item_start).tolist() == [0, 3000]
    assert [r.reason for r in index.rejected] == [*bad, "malformed_json"]
    assert all(str(r).isprintable() for r in index.rejected)
    assert same(index_of(source), index)


def test_ids_need_not_be_unique(media: Path) -> None:
    index = index_of(write(media / "train.jsonl", ask(text("a"), id=1), ask(text("bc"), id="1")))
    assert index.id.tolist() == ["1", "1"] and index.language_length.tolist() == [8, 9]


def test_documents_are_indexed_where_all_text_is_learned(media: Path) -> None:
    page = {"text": "abc <image> d", "images": ["b.png"]}
    source = write(media / "train.jsonl", page, ask(text("hello")))
    assert [r.reason for r in index_of(source).rejected] == ["no_assistant_turn"]
    everything = source.model_copy(update={"targets": "all"})
    index = index_of(everything)
    assert index.learned == "all" and not index.rejected
    assert index.targets.tolist() == [4 - 1 + 2 + 1, 5 + 1 + 3 + 1]  # without the first token, but with every end
    assert same(index_of(everything), index)  # from the cache
    assert len(list(media.glob("*.npz"))) == 2


def test_drafts_of_killed_builds_are_swept(media: Path) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    index_of(source)
    (file,) = media.glob("*.index.npz")
    file.unlink()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    drafts = {
        "dead": f"{here}.{ended.pid}.abc",
        "old": "elsewhere.1.abc",
        "of a process": f"{here}.{os.getpid()}.abc",
        "of a host": "elsewhere.2.abc",
    }
    for name in drafts.values():
        (media / f"{file.name}.{name}").mkdir()
        (media / f"{file.name}.{name}" / "half").write_bytes(b"x")
    os.utime(media / f"{file.name}.{drafts['old']}", (0, 0))
    index_of(source)
    left = {path.name.removeprefix(f"{file.name}.") for path in media.glob("*.index.npz.*")}
    assert left == {drafts["of a process"], drafts["of a host"]}


def test_a_cache_that_is_a_pipe_or_has_no_name_is_only_a_warning(media: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(media / "train.jsonl", ask(image("a.png")))
    first = index_of(source)
    (file,) = media.glob("*.index.npz")
    file.unlink()
    os.mkfifo(file)
    assert same(index_of(source), first)
    assert len(index_of(source, media / ("x" * 300))) == 1
    assert "data.index_cache" in caplog.text
