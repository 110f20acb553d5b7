"""What a run reads of eight conversations is what the reference makes of them.

The conversations have pictures, clips, reasoning and system prompts; the media are made files. The
run takes all that a published folder says. The goldens come from make_eight_talks.py."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.media.reference import File
from jaxmllm.data.text.conversation import parse_conversation
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.data.text.render import render
from jaxmllm.data.text.tokenizers import Tokenizer
from jaxmllm.families.resolved import resolved
from tests.data.text.dialects import DIALECTS
from tests.data.text.made_media import CLIPS, PICTURES, write_media

FOLDER = Path(__file__).parent / "eight_talks"
NAMES = sorted(path.name for path in FOLDER.iterdir())
PICTURED = [name for name in NAMES if name not in ("llama3.1", "qwen3")]
HEARING = [name for name in NAMES if name.endswith("omni")]


@dataclass(frozen=True)
class Reading:
    """A dialect as a run reads it."""

    tokenizer: Tokenizer
    modalities: dict[str, Modality]
    records: list[dict[str, Any]]
    reference: dict[str, np.ndarray]


@cache
def reading(name: str) -> Reading:
    """The reading of a dialect's folder, made once per process."""
    folder = FOLDER / name
    talks = json.loads((folder / "talks.json").read_text())
    dated = {"chat_date": talks["day"]} if name == "llama3.1" else {}
    config = _config(folder, **dated)
    with np.load(folder / "talks.npz") as arrays:
        reference = dict(arrays)
    return Reading(
        load_tokenizer(config.data),
        modalities(config.model, config.data),
        talks["records"],
        reference,
    )


def _config(folder: Path, **data: str) -> Config:
    """The config of a run that takes from the folder all that it says."""
    sources = {"sources": [{"name": "a", "path": "a.jsonl"}], "batch_size": 1}
    tree = {
        "run": {"directory": "runs/a", "steps": 1},
        "model": {"from": str(folder)},
        "data": sources | data,
        "optimizer": {"learning_rate": 1.0},
    }
    return parse_config(resolved(tree))


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_media(folder)
    return folder


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_ids_spans_and_positions_are_those_of_the_reference(name, number, media):
    dialect = reading(name)
    conversation = parse_conversation(
        dialect.records[number],
        lambda path: File(media / path),
        default_id="x",
        default_source="s",
        targets="assistant",
    )
    readers = {part: reader for reader in dialect.modalities.values() for part in reader.parts}
    shapes = [readers[item.part].measure(item.reference) for item in conversation.media]
    rendered = render(conversation, dialect.tokenizer, dialect.modalities, shapes)
    ids, learned, positions = (
        dialect.reference[f"{part}_{number}"] for part in ("ids", "learned", "positions")
    )
    np.testing.assert_array_equal(rendered.tokens, ids)
    np.testing.assert_array_equal(rendered.positions, positions)
    np.testing.assert_array_equal(rendered.targets, np.append(np.where(learned, ids, -1)[1:], -1))
    assert learned.any() and not learned.all()


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", PICTURED)
def test_pixels_are_those_of_the_reference(name, picture, media):
    """Pixels are compared as 8-bit levels, which make_eight_talks.py recovered to within 1e-6.

    Pictures range from icons to posters, and are also thin or transparent."""
    dialect = reading(name)
    file = File(media / picture)
    vision = dialect.modalities["vision"]
    patches = vision.load(file, vision.measure(file))
    expected = dialect.reference[picture]
    if name == "gemma3":  # one square, not yet cut into patches
        pairs = len(expected) // 16
        tiles = expected.reshape(pairs, 2, 8, pairs, 2, 8, 3)
        expected = tiles.transpose(0, 3, 1, 4, 2, 5, 6)
    np.testing.assert_array_equal(patches.ravel(), expected.ravel())


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", HEARING)
def test_frames_are_those_of_the_reference(name, clip, media):
    """All frames of clips of 0.1 to 31 s at three rates are compared, the last ones included."""
    dialect = reading(name)
    file = File(media / clip)
    reader = dialect.modalities["audio"]
    expected = dialect.reference[clip]
    shape = reader.measure(file)
    assert shape[0] == len(expected)
    slots = reader.load(file, shape)
    laid_out = reader.laid_out(np.ones((len(slots), reader.mel_bins), np.float32), shape)
    frames = slots[laid_out[:, 0] > 0][: len(expected)]
    np.testing.assert_allclose(frames, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """The reference's files are those that the dialect writes today."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
