"""Length indexes are built from records: columns, refusals by line, and input that would hurt."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.index import builder
from jaxmllm.data.index.builder import build_index
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.tokenizers import ByteTokenizer
from tests.data.index.examples import ANSWER, IMAGES, ask, image, index_of, same, sound, text, write


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
    # User header, content, end, assistant header, 3 letters, end. Media stand between a begin and
    # an end token.
    # 50 frames make 13 attention tokens, and these 7 language tokens.
    tokens = math.ceil(math.ceil(50 / 4) / 2)
    assert index.language_length.tolist() == [
        1 + 3 + 6,
        1 + (1 + 2) + 1 + (tokens + 2) + (6 + 2) + 6,
        1 + (6 + 2) + 6,
    ]
    assert index.targets.tolist() == [4, 4, 4]
    assert index.item_start.tolist() == [0, 0, 3, 4]
    assert [index.phases[phase] for phase in index.item_phase] == [
        "vision",
        "audio",
        "vision",
        "vision",
    ]
    assert index.item_shape.tolist() == [[1, 2, 2], [50, 1, 1], [1, 4, 6], [1, 4, 6]]
    assert index.item_length.tolist() == [4, 56, 24, 24]
    assert index.item_real.tolist() == [4, 50, 24, 24]
    assert index.item_tokens.tolist() == [1, tokens, 6, 6]
    assert index.item_slot.tolist() == [2, 6, 2 + 5 + tokens + 1, 2]
    assert index.shapes(1) == ((1, 2, 2), (50, 1, 1), (1, 4, 6))
    assert [index.media.address[row] for row in index.item_media] == [
        "b.png",
        "c.wav",
        "a.png",
        "a.png",
    ]


def test_every_bad_record_is_refused_with_its_line_and_the_others_stay(media: Path) -> None:
    png_bytes = (media / "a.png").read_bytes()
    (media / "cut.png").write_bytes(png_bytes[:20])
    (media / "cut_body.png").write_bytes(png_bytes[:45])
    soundfile.write(media / "none.wav", np.zeros(0), 16_000)
    soundfile.write(media / "long.wav", np.zeros(16_000 * 6), 16_000)
    os.symlink("/etc/hostname", media / "link.png")
    bad_records = {
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
    good_records = [ask(image("a.png"), id="first"), ask(image("cut_body.png"), id="last")]
    source = write(media / "train.jsonl", good_records[0], *bad_records.values(), good_records[1])
    index = index_of(source)
    assert index.id.tolist() == ["first", "last"]
    assert [(r.reason, r.line) for r in index.rejected] == [
        (reason, line) for line, reason in enumerate(bad_records, 2)
    ]
    assert str(index.rejected[0]).startswith(f"{media / 'train.jsonl'}:2: not valid JSON")
    assert str(media / "absent.png") in index.rejected[3].message
    assert [
        r.id for r in index.rejected if r.reason in ("malformed_json", "no_assistant_turn")
    ] == [
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


# ---------------------------------------------------------------------------- input that would hurt


def test_few_long_lines_are_held_at_a_time(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [ask(text("x" * n), id=str(n)) for n in range(200)]
    source = write(media / "train.jsonl", *records)
    lines = JsonLines.of(source)
    assert [len(chunk) for chunk in builder.chunks(lines.records())] == [200]
    monkeypatch.setattr(builder, "CHUNK_BYTES", 1000)
    chunks = list(builder.chunks(lines.records()))
    assert len(chunks) > 20 and all(
        sum(line.size for line in chunk[:-1]) < 1000 for chunk in chunks
    )
    assert index_of(source).id.tolist() == [str(n) for n in range(200)]


def test_hostile_records_are_refused_one_by_one(media: Path) -> None:
    """Each refusal is one printable line, whatever the path or id holds."""
    hostile = "\n\x1b[2J\u2028error: all is lost\r"
    bad_records = {
        "missing_file": ask(image(f"a{hostile}.png"), id=hostile),
        "invalid_text": ask(text("?"), id="ends in NUL\0"),
        "malformed_json": '{"id": ' + "9" * 10_000 + "}",
        "unknown_role": {"messages": [{"role": hostile, "content": "hi"}, ANSWER]},
    }
    nested = "[" * 200_000 + "]" * 200_000
    empty_turns = {
        "messages": [*({"role": "user", "content": ""} for _ in range(20_000)), ANSWER],
        "id": "empty turns",
    }
    pictures = ask(*(image("a.png") for _ in range(3000)), id="pictures")
    source = write(media / "train.jsonl", *bad_records.values(), nested, empty_turns, pictures)
    index = index_of(source)
    assert index.id.tolist() == ["empty turns", "pictures"]
    assert np.diff(index.item_start).tolist() == [0, 3000]
    assert [r.reason for r in index.rejected] == [*bad_records, "malformed_json"]
    assert all(str(r).isprintable() for r in index.rejected)
    assert same(index_of(source), index)


def test_ids_need_not_be_unique(media: Path) -> None:
    index = index_of(write(media / "train.jsonl", ask(text("a"), id=1), ask(text("bc"), id="1")))
    assert index.id.tolist() == ["1", "1"] and index.language_length.tolist() == [8, 9]


def test_documents_are_indexed_where_all_text_is_learned(media: Path) -> None:
    page = {"text": "abc <image> d", "images": ["b.png"]}
    source = write(media / "train.jsonl", page, ask(text("hello")))
    assert [r.reason for r in index_of(source).rejected] == ["no_assistant_turn"]
    all_targets = source.model_copy(update={"targets": "all"})
    index = index_of(all_targets)
    assert index.learned == "all" and not index.rejected
    # All text but the first token, and every end, are learned.
    assert index.targets.tolist() == [4 - 1 + 2 + 1, 5 + 1 + 3 + 1]
    assert same(index_of(all_targets), index)  # the second one is read from the cache
    assert len(list(media.glob("*.npz"))) == 2
