"""A format that a test adds: a tar file whose members are records and media.

The format takes one class and one line in the table of sources. The reference is the same data as a
JSONL file with a folder."""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.balance.records import (
    ExchangeGrid,
    ItemCost,
    PhaseSpec,
    PlanSpec,
    RouteSpec,
    row_classes,
)
from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.batches import evaluation_steps
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.media.reference import FileRange
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.rows.fill import LocalRanks, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.data.sources.formats import SOURCES, open_source
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.data.sources.source import DataError, RawRecord
from jaxmllm.data.text.conversation import ConversationError
from jaxmllm.data.text.tokenizers import ByteTokenizer
from jaxmllm.data.workers.reader import Loader
from jaxmllm.phases import decoder_phase, encoder_phase

MODALITIES: dict[str, Modality] = {
    "vision": Images(patch_size=4, merge=2, min_pixels=64, max_pixels=64 * 100),
    "audio": Sounds(16_000, 400, 160, 40, chunk_frames=32, merge=2, max_seconds=5.0),
}


@dataclass(frozen=True)
class Tar:
    """A source whose members `N.json` are the records, in order. Media that they name are members,
    too."""

    path: Path

    @classmethod
    def of(cls, config: SourceConfig) -> "Tar":
        return cls(Path(config.path).resolve())

    @cached_property
    def members(self) -> dict[str, tuple[int, int]]:
        """For each member, where its content begins and how many bytes it has."""
        with tarfile.open(self.path) as archive:
            return {member.name: (member.offset_data, member.size) for member in archive}

    def size(self) -> int:
        return self.path.stat().st_size

    def stamp(self) -> str:
        return str(self.path.stat().st_mtime_ns)

    def records(self) -> Iterator[RawRecord]:
        names = [name for name in self.members if name.endswith(".json")]
        for line, name in enumerate(names, 1):
            start, size = self.members[name]
            yield RawRecord(line, start, size, self.media(name).open().read())

    def record(self, offset: int) -> bytes:
        name = next(name for name, (start, _) in self.members.items() if start == offset)
        return self.media(name).open().read()

    def place(self, line: int) -> tuple[str, int]:
        return str(self.path), line

    def resolve(self, name: str) -> FileRange:
        if name not in self.members:
            raise ConversationError("missing_member", f"{self.path} has no member {name!r}")
        return self.media(name)

    def media(self, address: str) -> FileRange:
        return FileRange(self.path, *self.members[address], name=address, address=address)

    def media_stamp(self, address: str) -> tuple[int, int]:
        return self.members[address][1], self.path.stat().st_mtime_ns


@pytest.fixture
def tar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "tar", Tar.of)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same records and media as a JSONL file with a folder, and as one tar file.

    The last image is cut short, so it fails when loaded."""
    rng = np.random.default_rng(0)
    names = [f"{index}.png" for index in range(4)]
    for index, name in enumerate(names):
        pixels = rng.integers(0, 256, (16 + 8 * index, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    # The header still tells the size, so the damage is only found when the image is loaded.
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:-500])
    for name, rate in (("a.wav", 16_000), ("b.flac", 44_100), ("c.ogg", 16_000), ("d.mp3", 16_000)):
        soundfile.write(tmp_path / name, rng.uniform(-0.5, 0.5, rate // 3), rate)
        names.append(name)
    records = []
    for index, name in enumerate(names):
        kind = "image" if name.endswith(".png") else "audio"
        content = [{"type": kind, kind: name}, {"type": "text", "text": "?" * index}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": name}]
        records.append(json.dumps({"id": name, "messages": messages}))
    records.append(json.dumps({"id": "bad", "messages": []}))
    (tmp_path / "data.jsonl").write_text("".join(f"{record}\n" for record in records))
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        for index, record in enumerate(records):
            member = tarfile.TarInfo(f"{index}.json")
            member.size = len(record)
            archive.addfile(member, io.BytesIO(record.encode()))
        for name in names:
            archive.add(tmp_path / name, name)
    return tmp_path


def open_corpus(path: Path) -> Corpus:
    source = SourceConfig(name="things", path=str(path))
    return Corpus.open([source], ByteTokenizer(), MODALITIES, progress=False)


def make_filler(corpus: Corpus) -> StepFiller:
    """A filler of rows on two ranks, with capacities that hold all examples."""
    grid = ExchangeGrid(np.array([[0], [1]], np.int32), np.array([[0], [1]], np.int32))
    capacities = {"vision": (128, 4), "audio": (128, 8), "language": (128, 1)}
    kinds = {
        **{name: encoder_phase(name) for name in MODALITIES},
        "language": decoder_phase(tuple(MODALITIES)),
    }
    phases = {
        name: PhaseSpec(
            kinds[name], 2, row_classes((capacity,)), 16, slots_per_token, ItemCost(10, 1)
        )
        for name, (capacity, slots_per_token) in capacities.items()
    }
    route = RouteSpec(grid, encoder_pool=64, language_pool=128, pair_slots=32)
    local = LocalRanks({name: (0, 1) for name in phases}, {name: (0, 1) for name in MODALITIES})
    attention = AttentionSpec({"vision": 16, "audio": 8, "language": 16})
    return StepFiller(corpus, PlanSpec(phases, dict.fromkeys(MODALITIES, route)), local, attention)


def test_a_tar_file_makes_the_same_index_and_rows_as_files(folder: Path, tar: None) -> None:
    file_corpus = open_corpus(folder / "data.jsonl")
    tar_corpus = open_corpus(folder / "data.tar")
    assert isinstance(tar_corpus.indexes[0].source, Tar)
    for name in ("id", "language_length", "item_shape", "item_length", "item_slot", "checksum"):
        np.testing.assert_array_equal(
            getattr(tar_corpus.indexes[0], name), getattr(file_corpus.indexes[0], name)
        )
    # Line 9 is the record without an assistant turn.
    (refusal,) = tar_corpus.rejected
    assert str(refusal).startswith(f"{folder / 'data.tar'}:9: no turn has the role 'assistant'")
    examples = np.arange(len(file_corpus))
    expected = make_filler(file_corpus)(0, examples)
    step = make_filler(tar_corpus)(0, examples)
    assert len(expected.failures) == 1
    assert step.failures == tuple(
        line.replace(f"{folder}/", f"{folder}/data.tar:") for line in expected.failures
    )
    for phase, rows in expected.rows.items():
        jax.tree.map(np.testing.assert_array_equal, step.rows[phase], rows)
    assert all(sum(row["valid"].sum() for row in step.rows[phase]) > 8 for phase in MODALITIES)


def test_packed_examples_are_those_alone(folder: Path, tar: None) -> None:
    filler = make_filler(open_corpus(folder / "data.tar"))
    packed_step = filler(0, np.arange(8))
    for phase in MODALITIES:
        # Rows are compared as multisets of slots, because packing changes where slots lie.
        single_rows = [
            row for example in range(8) for row in filler(0, np.array([example])).rows[phase]
        ]
        slots = [
            np.concatenate([row["features"][row["segments"] > 0] for row in rows])
            for rows in (single_rows, packed_step.rows[phase])
        ]
        counted = [np.unique(features, axis=0, return_counts=True) for features in slots]
        for single, packed in zip(*counted, strict=True):
            np.testing.assert_array_equal(single, packed)


def test_worker_processes_read_it(folder: Path, tar: None) -> None:
    filler = make_filler(open_corpus(folder / "data.tar"))
    batches = evaluation_steps(filler, 4)
    with Loader([batches], workers=1, prefetch=1) as loader:
        for index, step in enumerate(loader.read(batches, 0, 2)):
            for phase, rows in batches[index].rows.items():
                jax.tree.map(np.testing.assert_array_equal, step.rows[phase], rows)


def test_its_index_is_cached_until_the_file_changes(
    folder: Path, tar: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = open_corpus(folder / "data.tar")
    monkeypatch.setattr(Images, "measure", lambda *_: pytest.fail("measured again"))
    assert open_corpus(folder / "data.tar").fingerprint() == original.fingerprint()
    monkeypatch.undo()
    monkeypatch.setitem(SOURCES, "tar", Tar.of)
    with tarfile.open(folder / "data.tar", "a") as archive:
        record = b'{"text": "more", "messages": [{"role": "assistant", "content": "yes"}]}'
        member = tarfile.TarInfo("more.json")
        member.size = len(record)
        archive.addfile(member, io.BytesIO(record))
    assert len(open_corpus(folder / "data.tar")) == len(original) + 1


def test_the_format_is_named_by_the_config_or_the_ending(tmp_path: Path, tar: None) -> None:
    config = SourceConfig(name="s", path=str(tmp_path / "a.tar"))
    assert isinstance(open_source(config), Tar)
    assert isinstance(open_source(replace_format(config, "jsonl")), JsonLines)
    text_config = SourceConfig(name="s", path=str(tmp_path / "a.txt"))
    assert isinstance(open_source(text_config), JsonLines)
    assert isinstance(open_source(replace_format(text_config, "tar")), Tar)
    with pytest.raises(
        DataError, match=r"source 's': data.sources.format is 'zip', but formats are jsonl, tar"
    ):
        open_source(replace_format(text_config, "zip"))


def replace_format(config: SourceConfig, name: str) -> SourceConfig:
    return config.model_copy(update={"format": name})
