"""Small sources for tests of length indexes: records with images and sounds, and their index."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.index.builder import build_index
from jaxmllm.data.index.length_index import LengthIndex
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
    """Writes a JSONL file of records, or of lines as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return SourceConfig(name="animals", path=str(path))


def index_of(source: SourceConfig, cache: Path | None = None) -> LengthIndex:
    return build_index(source, ByteTokenizer(), MODALITIES, cache)


def same(a: LengthIndex, b: LengthIndex) -> bool:
    """Whether two indexes agree in all columns, their types, and what they know of media."""
    words = ("name", "source", "learned", "phases", "labels", "rejected")
    columns = [name for name in vars(a) if name not in (*words, "media")]
    return (
        all(getattr(a, name) == getattr(b, name) for name in words)
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
        and all(getattr(a, name).dtype == getattr(b, name).dtype for name in columns)
        and (a.media.address, a.media.failure) == (b.media.address, b.media.failure)
        and np.array_equal(a.media.stamp, b.media.stamp)
        and np.array_equal(a.media.shape, b.media.shape)
        and np.array_equal(a.media.frames, b.media.frames)
        and np.array_equal(a.media.rate, b.media.rate)
    )
