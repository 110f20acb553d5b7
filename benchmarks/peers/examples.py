"""The examples of a step in memory, for systems that are compared: plain arrays, and a corpus that
decodes nothing twice.

Media are decoded before anything is timed, into the same slots for all systems: patches of an image
merge-group by merge-group, log-mel frames of a clip padded to whole tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.records import BatchItems
from jaxmllm.config.schema import ModelConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.data.text.render import Rendered
from jaxmllm.tools.workload import FRAME_TOKENS, FRAMES_PER_SECOND, generate

SAMPLE_RATE: Final = 16_000  # of generated clips
PROMPT: Final = "Describe it."


class Item(NamedTuple):
    """An image or a clip of P slots that becomes T tokens."""

    phase: str
    slot: int  # place of the first token in the example
    tokens: int
    real: int  # slots that hold data
    features: NDArray[Any]  # [P, F]
    positions: Ints  # [P, A]
    shape: Shape


class Example(NamedTuple):
    """A conversation of L tokens, and its media."""

    tokens: Ints  # [L]
    targets: Ints  # [L], -1 where there is none
    positions: NDArray[np.float32]  # [L, 3]
    items: tuple[Item, ...]


def _in_memory(modalities: Mapping[str, Modality], rendered: Rendered) -> Example:
    """A rendered example, with its media decoded."""
    items = []
    for span in rendered.media:
        modality = modalities[span.phase]
        items.append(
            Item(
                span.phase,
                span.slot,
                span.tokens,
                modality.real(span.shape),
                modality.load(span.reference, span.shape),
                modality.positions(span.shape)[:, modality.format.axes],
                span.shape,
            )
        )
    return Example(rendered.tokens, rendered.targets, rendered.positions, tuple(items))


# ---------------------------------------------------------------------------- a corpus that keeps what it decoded


@dataclass(frozen=True)
class KeptModality:
    """A modality that keeps what it has loaded."""

    modality: Modality
    loaded: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.modality, name)

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        if media.address not in self.loaded:
            self.loaded[media.address] = self.modality.load(media, shape)
        return self.loaded[media.address]


class KeptCorpus:
    """A corpus for `StepFiller` that keeps the examples and media that it has read."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self.modalities: Mapping[str, Any] = {
            phase: KeptModality(modality) for phase, modality in corpus.modalities.items()
        }
        self.rendered: dict[int, Rendered] = {}

    @property
    def members(self) -> tuple[tuple[str, float, Longs], ...]:
        return self.corpus.members

    def gather(self, examples: Longs) -> BatchItems:
        return self.corpus.gather(examples)

    def source_of(self, i: int) -> int:
        return self.corpus.source_of(i)

    def id(self, i: int) -> str:
        return self.corpus.id(i)

    def example(self, i: int) -> Rendered:
        if i not in self.rendered:
            self.rendered[i] = self.corpus.example(i)
        return self.rendered[i]

    def read(self, examples: Longs) -> list[Example]:
        """The decoded examples of a step; reading them again gives the same media arrays."""
        return [_in_memory(self.modalities, self.example(example)) for example in examples.tolist()]


# ---------------------------------------------------------------------------- data of generated sizes


def write_generated(
    folder: Path, seed: int, examples: int, model: ModelConfig, smaller: float
) -> Path:
    """Write conversations and media with the sizes of `jaxmllm.tools.workload`, all of them
    `smaller` times smaller. Answers have one letter for each token of text; pictures and sounds are
    noise.

    Returns:
      The JSONL file.
    """
    random = np.random.default_rng([seed, examples])
    batch = generate(seed, examples, model=model)
    (folder / "media").mkdir(parents=True, exist_ok=True)
    content: list[list[dict[str, str]]] = [[] for _ in range(examples)]
    text = batch.phases["language"].length.copy()
    for phase in model.encoders:
        items = batch.phases[phase]
        for index, (example, tokens, real_length) in enumerate(
            zip(items.example.tolist(), items.tokens.tolist(), items.real.tolist(), strict=True)
        ):
            text[example] -= tokens + FRAME_TOKENS
            if phase == "vision":
                path = f"media/{index:05d}.png"
                _write_picture(folder / path, random, max(1, round(tokens / smaller)), model)
                content[example].append({"type": "image", "image": path})
            else:
                path = f"media/{index:05d}.wav"
                seconds = max(0.1, real_length / smaller / FRAMES_PER_SECOND)
                noise = random.uniform(-0.5, 0.5, round(seconds * SAMPLE_RATE))
                soundfile.write(folder / path, noise, SAMPLE_RATE, subtype="PCM_16")
                content[example].append({"type": "audio", "audio": path})
    lines = []
    for index in range(examples):
        letters = random.integers(ord("a"), ord("z") + 1, max(2, round(text[index] / smaller)))
        answer = bytes(letters.astype(np.uint8)).decode()
        question = [*content[index], {"type": "text", "text": PROMPT}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        lines.append(json.dumps({"id": f"{index:05d}", "messages": messages}) + "\n")
    data_file = folder / "train.jsonl"
    data_file.write_text("".join(lines), encoding="utf-8")
    return data_file


def _write_picture(
    path: Path, random: np.random.Generator, tokens: int, model: ModelConfig
) -> None:
    """Write a picture of noise with about so many tokens, in any shape from 1 : 2 to 2 : 1."""
    assert model.vision is not None
    unit = model.vision.patch_size * model.vision.merge
    rows = max(1, round((tokens * np.exp(random.uniform(-0.7, 0.7))) ** 0.5))
    size = (rows * unit, max(1, round(tokens / rows)) * unit, 3)
    Image.fromarray(random.integers(0, 256, size, np.uint8)).save(path, compress_level=1)
