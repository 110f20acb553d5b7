"""A corpus of several sources: numbering, what a batch gathers, changed files, refusals and limits.

The reference for gathered items is each example rendered on its own."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.config.schema import DataConfig, ModelConfig, SourceConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.tokenizers import ByteTokenizer

LANGUAGE = {"width": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 16, "mlp_width": 16}
TOWER = {"width": 16, "layers": 1, "heads": 1, "mlp_width": 16}
MODEL = ModelConfig.model_validate(
    {
        "language": LANGUAGE,
        "vision": {**TOWER, "patch_size": 4},
        "audio": {**TOWER, "mel_bins": 40, "chunk_frames": 32},
    }
)


SOURCES = [{"name": "a", "path": "a.jsonl"}]
DATA = DataConfig.model_validate(
    {"sources": SOURCES, "batch_size": 2, "images": {"min_pixels": 64}}, strict=False
)
MODALITIES = modalities(MODEL, DATA)


def record(words: str, images: int = 0, sounds: int = 0, **keys: Any) -> dict[str, Any]:
    """A record with pictures before its words and sounds behind them; the answer is the words in
    capitals."""
    content = "<image>" * images + words + "<audio>" * sounds
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": words.upper()},
    ]
    return {
        **keys,
        "images": ["a.png"] * images,
        "audios": ["c.wav"] * sounds,
        "messages": messages,
    }


def write(path: Path, *records: dict[str, Any] | str) -> None:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def sources(tmp_path: Path) -> tuple[SourceConfig, ...]:
    """Two sources: one with images, sounds and a line that is no JSON, and one with an image."""
    Image.new("RGB", (24, 16)).save(tmp_path / "a.png")
    soundfile.write(tmp_path / "c.wav", np.zeros(8000), 16_000)
    write(
        tmp_path / "first.jsonl",
        record("both", 2, 1, id="f0", source="zebra"),
        record("text", id="f1"),
        "{",
        record("sound", 0, 2, id="f2", source="apple"),
    )
    write(
        tmp_path / "second.jsonl",
        record("long words", 1, id="s0", source="apple"),
        record("x", id="s1"),
    )
    return (
        SourceConfig(name="first", path=str(tmp_path / "first.jsonl"), weight=3.0),
        SourceConfig(name="second", path=str(tmp_path / "second.jsonl")),
    )


def test_what_attention_sees_travels_with_the_items(sources: tuple[SourceConfig, ...]) -> None:
    pairs = VisiblePairs(tower_window=3, bidirectional=("vision",))
    corpus = Corpus.open(sources, ByteTokenizer(), MODALITIES, pairs=pairs).refuse({"audio": 10**9})
    examples = np.array([0, 3, 0, 1])
    batch = corpus.gather(examples)
    vision = batch.phases["vision"]
    for phase in vision, batch.phases["language"]:
        assert phase.extra_squares is not None and phase.extra_squares.shape[1] == 2
    shapes = [span.shape for n in examples for span in corpus.example(n).media]
    grids = [shape for shape in shapes if shape[2] > 1]
    assert len(grids) == len(vision.length) > 0
    np.testing.assert_array_equal(vision.extra_squares, pairs.of_items("vision", np.array(grids)))
    images = np.bincount(vision.example, vision.tokens.astype(float) ** 2, len(examples))
    np.testing.assert_array_equal(batch.phases["language"].extra_squares, np.stack([images] * 2, 1))
    assert batch.phases["audio"].extra == (0, 0)


@pytest.fixture
def corpus(sources: tuple[SourceConfig, ...]) -> Corpus:
    return Corpus.open(sources, ByteTokenizer(), MODALITIES)


def test_modalities_follow_the_model() -> None:
    assert list(MODALITIES) == ["vision", "audio"]
    assert MODALITIES["vision"] == Images(4, 2, 64, 1024 * 1024)
    assert MODALITIES["audio"] == Sounds(16_000, 400, 160, 40, 32, 2, 60.0)
    assert modalities(ModelConfig.model_validate({"language": LANGUAGE}), DATA) == {}


def test_numbering(corpus: Corpus) -> None:
    assert len(corpus) == 5
    assert [corpus.id(i) for i in range(5)] == ["f0", "f1", "f2", "s0", "s1"]
    assert corpus.sources == ("apple", "first", "second", "zebra")
    assert [corpus.sources[corpus.source_of(i)] for i in range(5)] == [
        "zebra",
        "first",
        "apple",
        "apple",
        "second",
    ]
    assert [(name, weight, list(numbers)) for name, weight, numbers in corpus.members] == [
        ("first", 3.0, [0, 1, 2]),
        ("second", 1.0, [3, 4]),
    ]
    for beyond in (-1, 5):
        with pytest.raises(IndexError):
            corpus.example(beyond)


def test_gather_agrees_with_rendering_one_by_one(corpus: Corpus) -> None:
    batch = np.array([3, 0, 4, 0, 2], np.int64)
    items = corpus.gather(batch)
    rendered = [corpus.example(int(i)) for i in batch]
    assert items.examples.tolist() == batch.tolist()
    assert items.targets == sum(int((example.targets >= 0).sum()) for example in rendered)
    assert list(items.phases) == ["vision", "audio", "language"]
    for phase, modality in MODALITIES.items():
        spans = [
            (n, span)
            for n, example in enumerate(rendered)
            for span in example.media
            if span.phase == phase
        ]
        phase_items = items.phases[phase]
        assert phase_items.example.tolist() == [n for n, _ in spans]
        assert phase_items.length.tolist() == [modality.length(span.shape) for _, span in spans]
        assert phase_items.real.tolist() == [modality.real(span.shape) for _, span in spans]
        assert phase_items.tokens.tolist() == [span.tokens for _, span in spans]
        assert phase_items.slot.tolist() == [span.slot for _, span in spans]
        assert (phase_items.length.dtype, phase_items.example.dtype) == (np.int64, np.int32)
    language = items.phases["language"]
    assert (
        language.length.tolist()
        == language.real.tolist()
        == [len(example.tokens) for example in rendered]
    )
    assert language.example.tolist() == [0, 1, 2, 3, 4]


def test_gather_of_text_alone_and_of_nothing(corpus: Corpus) -> None:
    for batch in ([1, 4], []):
        items = corpus.gather(np.array(batch, np.int64))
        assert len(items.phases["vision"].length) == len(items.phases["audio"].length) == 0
        assert len(items.phases["language"].length) == len(batch)


def test_example_reads_its_own_line(corpus: Corpus) -> None:
    texts = [ByteTokenizer().decode(corpus.example(i).tokens.tolist()) for i in range(5)]
    assert texts == ["bothBOTH", "textTEXT", "soundSOUND", "long wordsLONG WORDS", "xX"]
    assert [span.reference.path.name for span in corpus.example(0).media] == [
        "a.png",
        "a.png",
        "c.wav",
    ]


def test_what_is_learned_of_an_example_is_up_to_its_source(tmp_path: Path) -> None:
    """A file of pages and a file of answers lie in one corpus."""
    write(tmp_path / "pages.jsonl", {"id": "page", "text": "abc"})
    write(tmp_path / "talks.jsonl", record("hi", 0, id="talk"))
    sources = (
        SourceConfig(name="pages", path=str(tmp_path / "pages.jsonl"), targets="all"),
        SourceConfig(name="talks", path=str(tmp_path / "talks.jsonl")),
    )
    corpus = Corpus.open(sources, ByteTokenizer(), MODALITIES)
    learned = [example.targets[example.targets >= 0] for example in map(corpus.example, (0, 1))]
    assert [ByteTokenizer().decode(ids.tolist()) for ids in learned] == ["bc", "HI"]
    assert corpus.gather(np.array([0, 1])).targets == 3 + 3


def test_a_file_that_changed_under_the_run_is_an_error(corpus: Corpus, tmp_path: Path) -> None:
    write(tmp_path / "second.jsonl", record("short", 1, id="s0"), record("x", id="s2"))
    for i in (3, 4):
        with pytest.raises(DataError, match=rf"second\.jsonl:{i - 2}: not the record 's{i - 3}'"):
            corpus.example(i)
    assert len(corpus.example(0).tokens)


def test_another_record_of_the_same_id_and_length_is_an_error(
    corpus: Corpus, tmp_path: Path
) -> None:
    path = tmp_path / "second.jsonl"
    path.write_text(path.read_text().replace("LONG WORDS", "LONG WORKS"))
    with pytest.raises(DataError, match=r"second\.jsonl:1: not the record 's0' that was indexed"):
        corpus.example(3)
    assert len(corpus.example(4).tokens)


def test_it_travels_to_worker_processes(corpus: Corpus) -> None:
    copy = pickle.loads(pickle.dumps(corpus))
    assert copy.fingerprint() == corpus.fingerprint()
    np.testing.assert_array_equal(copy.example(0).tokens, corpus.example(0).tokens)


def test_rows_are_made_without_the_names_of_media(corpus: Corpus) -> None:
    rows_corpus = corpus.for_rows()
    assert not any(index.media.address or index.rejected for index in rows_corpus.indexes)
    assert rows_corpus.fingerprint() == corpus.fingerprint()
    assert rows_corpus._columns is corpus._columns and rows_corpus._shapes is corpus._shapes
    for example in range(len(corpus)):
        rendered = rows_corpus.example(example), corpus.example(example)
        assert rendered[0].media == rendered[1].media
        np.testing.assert_array_equal(rendered[0].tokens, rendered[1].tokens)


def test_fingerprint_sees_data_and_order(
    corpus: Corpus, sources: tuple[SourceConfig, ...], tmp_path: Path
) -> None:
    def open_again(order: int = 1) -> str:
        return Corpus.open(sources[::order], ByteTokenizer(), MODALITIES).fingerprint()

    fingerprint = corpus.fingerprint()
    assert fingerprint == open_again() != open_again(-1)
    assert fingerprint != corpus.refuse({"vision": 23}).fingerprint()
    Image.new("RGB", (16, 24)).save(tmp_path / "a.png")  # as many patches in another grid
    assert fingerprint != open_again()


def test_rejected_share(corpus: Corpus) -> None:
    assert corpus.rejected_counts() == {"malformed_json": 1}
    corpus.check_rejected(1 / 6)
    with pytest.raises(DataError) as caught:
        corpus.check_rejected(0.16)
    message = str(caught.value)
    assert "1 of 6 examples are refused" in message and "1 malformed_json" in message
    assert "first.jsonl:3: not valid JSON" in message and "data.max_rejected" in message


def test_a_file_without_a_line_of_json_is_told_apart(tmp_path: Path) -> None:
    """A table, for instance, or one JSON array over several lines."""
    write(tmp_path / "a.csv", "image,text", "a.png,a cat")
    write(tmp_path / "b.jsonl", "{", record("x"))
    sources = [SourceConfig(name=name, path=str(tmp_path / name)) for name in ("a.csv", "b.jsonl")]
    with pytest.raises(DataError) as caught:
        Corpus.open(sources, ByteTokenizer(), MODALITIES).check_rejected(0)
    *_, told, way_on = str(caught.value).splitlines()
    assert told.startswith(f"{tmp_path / 'a.csv'} is no JSONL file, in which each line is")
    assert way_on == "Fix the records, or raise data.max_rejected to train without them."
    with pytest.raises(DataError, match=r"Fix the records\.$"):
        Corpus.open(sources[:1], ByteTokenizer(), MODALITIES).check_rejected(1)


def test_a_share_is_allowed_that_is_just_reached(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *["{"] * 29, *[record("x")] * 71)
    corpus = Corpus.open(
        [SourceConfig(name="a", path=str(tmp_path / "a.jsonl"))], ByteTokenizer(), MODALITIES
    )
    corpus.check_rejected(0.29)
    with pytest.raises(DataError, match="29 of 100"):
        corpus.check_rejected(0.28)


def test_nothing_left_is_an_error_whatever_the_share(tmp_path: Path) -> None:
    write(tmp_path / "bad.jsonl", *["{"] * 8)
    source = SourceConfig(name="bad", path=str(tmp_path / "bad.jsonl"))
    with pytest.raises(DataError, match="and 3 more"):
        Corpus.open([source], ByteTokenizer(), MODALITIES).check_rejected(1.0)


@pytest.mark.parametrize(
    ("limits", "kept", "words"),
    [
        (
            {"vision": 23, "audio": 56},
            ["f1", "f2", "s1"],
            "a.png takes 24 slots .* holds 23: lower data.images.max_pixels",
        ),
        (
            {"audio": 55},
            ["f1", "s0", "s1"],
            "c.wav takes 56 slots .* data.audio.max_seconds .*phases.audio.capacities",
        ),
        ({"language": 10}, ["s1"], "tokens long, .* holds 10: .*phases.language.capacities"),
        ({"vision": 24, "audio": 56, "language": 100}, ["f0", "f1", "f2", "s0", "s1"], None),
    ],
)
def test_examples_longer_than_a_row(
    limits: dict[str, int], kept: list[str], words: str | None, corpus: Corpus
) -> None:
    reduced = corpus.refuse(limits)
    assert [reduced.id(i) for i in range(len(reduced))] == kept
    assert reduced.rejected_counts().get("longer_than_row", 0) == 5 - len(kept)
    assert [list(numbers) for _, _, numbers in reduced.members] == [
        [i for i, id in enumerate(kept) if id[0] == source] for source in "fs"
    ]
    for phase, items in reduced.gather(np.arange(len(reduced))).phases.items():
        assert (items.length <= limits.get(phase, 10**6)).all()
    if words is not None:
        with pytest.raises(DataError, match=words):
            reduced.check_rejected(0.0)
    assert all(reduced.example(i).tokens.size for i in range(len(reduced)))
    assert len(corpus) == 5
