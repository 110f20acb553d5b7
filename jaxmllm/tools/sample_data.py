"""Make a small, ragged, learnable data set of real media files.

    jaxmllm sample-data OUT [--seed 0] [--train 4096] [--test 512]

    OUT/train.jsonl, OUT/test.jsonl    conversations; media paths are relative to OUT
    OUT/media/{train,test}/            PNG, JPEG, WebP pictures; WAV, FLAC clips
    OUT/sample.json                    seed, counts, spreads, and the chance level of each kind of question

Four kinds of question in equal shares, named in each record's "source": `picture` (what colour is the shape),
`sound` (what does the clip hold), `both` (colour and sound together) and `text` (the opposite of a word). So half of
the examples have no picture and half no clip. The splits share no file and no text question; equal arguments and
library versions give equal bytes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.data.printable import shown
from jaxmllm.tools.output import command_parser

T = TypeVar("T")

KINDS = ("picture", "sound", "both", "text")
COLOURS = {
    "red": (215, 35, 35),
    "green": (40, 165, 60),
    "blue": (40, 70, 215),
    "yellow": (235, 210, 35),
    "purple": (150, 45, 170),
    "black": (25, 25, 25),
}
TONES = {"low": (180.0, 240.0), "middle": (600.0, 800.0), "high": (2000.0, 2600.0)}  # Hz
SOUNDS = (*TONES, "noise", "siren", "clicks")
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "day": "night",
    "up": "down",
    "wet": "dry",
    "fast": "slow",
    "open": "shut",
    "left": "right",
}
NAMES = ("Ada", "Bela", "Chidi", "Dora", "Emil", "Fatma", "Goro", "Hana", "Ivo", "June", "Kofi", "Lena")

SMALLEST, LARGEST = (28, 28), (220, 160)  # pixels
SHORTEST, LONGEST = 0.2, 4.0  # seconds
SAMPLE_RATES = (8_000, 16_000, 22_050, 44_100)
SAMPLE_RATE_SHARES = (0.4, 0.3, 0.2, 0.1)
SEVERAL = 0.15  # share of picture and sound questions with two or three files

QUESTIONS = {
    "picture": (
        "What colour is the shape?",
        "Which colour do you see?",
        "Name the colour.",
        "Look at the shape in the middle. What colour does it have?",
    ),
    "sound": (
        "What do you hear?",
        "Which sound is this?",
        "Name the sound.",
        "Listen closely. What kind of sound is being played here?",
    ),
    "both": (
        "What colour and what sound?",
        "Name the colour, then the sound.",
        "Say what you see and what you hear.",
        "There is a picture and there is a sound. Give the colour and the sound.",
    ),
    "text": (
        "What is the opposite of {word}?",
        "{name} asks for the opposite of {word}.",
        "Name the opposite: {word}",
        "{name} does not say {word}, but the opposite. What does {name} say?",
    ),
}


@dataclass(frozen=True)
class Media:
    """A written file: path relative to the data folder, the word that describes it, its size in pixels or seconds."""

    path: str
    label: str
    size: float


@dataclass(frozen=True)
class Split:
    """What one split holds."""

    records: list[dict[str, Any]]
    pictures: list[Media]
    clips: list[Media]


def make_sample(out: str | Path, seed: int = 0, train: int = 4096, test: int = 512) -> dict[str, Any]:
    """Write the data set into folder `out` and return what `sample.json` holds.

    `train` and `test` are counts of examples. Raises `ValueError` unless both are positive multiples of four.
    """
    for name, count in (("train", train), ("test", test)):
        if count <= 0 or count % len(KINDS):
            raise ValueError(f"--{name} {count}: must be a positive multiple of {len(KINDS)}, the kinds of question")
    out = Path(out)
    splits = {"train": _make_split(out, "train", seed, train), "test": _make_split(out, "test", seed, test)}
    for name, split in splits.items():
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in split.records)
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    summary = {"seed": seed, **{name: _describe(split) for name, split in splits.items()}}
    (out / "sample.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def answer_of(record: dict[str, Any]) -> str:
    """The text of a record's last turn."""
    return str(record["messages"][-1]["content"][0]["text"])


# ---------------------------------------------------------------------------- conversations


def _make_split(out: Path, split: str, seed: int, count: int) -> Split:
    folder = Path("media") / split
    (out / folder).mkdir(parents=True, exist_ok=True)
    # Files are shared by several questions: they cost more time and disk than lines of text.
    pictures = _make_pictures(out, folder, _random(seed, split, "picture"), max(count // 4, 2 * len(COLOURS)))
    clips = _make_clips(out, folder, _random(seed, split, "sound"), max(count // 8, 2 * len(SOUNDS)))

    rng = _random(seed, split, "questions")
    share = count // len(KINDS)
    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "picture": lambda: _ask_one(rng, "picture", "image", pictures, tuple(COLOURS), share),
        "sound": lambda: _ask_one(rng, "sound", "audio", clips, SOUNDS, share),
        "both": lambda: _ask_both(rng, pictures, clips, share),
        "text": lambda: _ask_text(rng, split, share),
    }
    examples = [(kind, messages) for kind in KINDS for messages in makers[kind]()]
    records = [
        {"id": f"{split}-{number:05d}", "source": examples[place][0], "messages": examples[place][1]}
        for number, place in enumerate(rng.permutation(count).tolist())
    ]
    return Split(records, pictures, clips)


def _random(seed: int, split: str, use: str) -> np.random.Generator:
    """A stream of its own for every split and use, so that changing one leaves the others as they were."""
    return np.random.default_rng([seed, *f"{split}/{use}".encode()])


def _ask_one(
    rng: np.random.Generator, kind: str, part: str, media: Sequence[Media], labels: Sequence[str], count: int
) -> list[Any]:
    groups = _by_label(media)
    turns = []
    for label in itertools.islice(itertools.cycle(labels), count):
        files = 1 if rng.random() >= SEVERAL else int(rng.integers(2, 4))
        chosen = [groups[label][i] for i in rng.integers(len(groups[label]), size=files)]
        parts = [{"type": part, part: item.path} for item in chosen]
        turns.append(_conversation(rng, parts, _pick(rng, QUESTIONS[kind]), label))
    return turns


def _ask_both(rng: np.random.Generator, pictures: Sequence[Media], clips: Sequence[Media], count: int) -> list[Any]:
    seen, heard = _by_label(pictures), _by_label(clips)
    turns = []
    for colour, sound in itertools.islice(itertools.cycle(itertools.product(COLOURS, SOUNDS)), count):
        picture, clip = _pick(rng, seen[colour]), _pick(rng, heard[sound])
        parts = [{"type": "image", "image": picture.path}, {"type": "audio", "audio": clip.path}]
        if rng.random() < 0.5:
            parts.reverse()
        turns.append(_conversation(rng, parts, _pick(rng, QUESTIONS["both"]), f"{colour} {sound}"))
    return turns


def _ask_text(rng: np.random.Generator, split: str, count: int) -> list[Any]:
    answers = OPPOSITES | {right: left for left, right in OPPOSITES.items()}
    wordings = sorted({form.format(word="{word}", name=name) for form in QUESTIONS["text"] for name in NAMES})
    # Every fifth wording of a word, another fifth for each word, is kept for the test split.
    groups = {
        word: [text for i, text in enumerate(wordings) if ((i + place) % 5 == 0) == (split == "test")]
        for place, word in enumerate(answers)
    }
    words = itertools.islice(itertools.cycle(answers), count)
    return [_conversation(rng, [], _pick(rng, groups[word]).format(word=word), answers[word]) for word in words]


def _conversation(rng: np.random.Generator, media: list[Any], question: str, answer: str) -> list[Any]:
    text = {"type": "text", "text": question}
    content = [text, *media] if rng.random() < 0.25 else [*media, text]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def _by_label(media: Sequence[Media]) -> dict[str, list[Media]]:
    groups: dict[str, list[Media]] = {}
    for item in media:
        groups.setdefault(item.label, []).append(item)
    return groups


def _pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


# ---------------------------------------------------------------------------- pictures


def _make_pictures(out: Path, folder: Path, rng: np.random.Generator, count: int) -> list[Media]:
    """Areas are spread evenly on a log scale, both ends included."""
    areas = rng.permutation(np.geomspace(np.prod(SMALLEST), np.prod(LARGEST), count))
    media = []
    for number, (area, colour) in enumerate(zip(areas, itertools.cycle(COLOURS), strict=False)):
        aspect = np.exp(rng.uniform(-0.5, 0.5))
        width, height = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
        image = Image.fromarray(_draw(rng, height, width, COLOURS[colour]))
        path = folder / f"{number:05d}"
        match number % 5:
            case 0:
                path = path.with_suffix(".png")
                image.save(out / path, compress_level=3)
            case 1:
                path = path.with_suffix(".png")
                image.convert("RGBA").save(out / path, compress_level=3)
            case 2:
                path = path.with_suffix(".png")
                image.quantize(32).save(out / path, compress_level=3)
            case 3:
                path = path.with_suffix(".jpg")
                image.save(out / path, quality=85)
            case _:
                path = path.with_suffix(".webp")
                image.save(out / path, quality=85, method=0)
        media.append(Media(path.as_posix(), colour, width * height))
    return media


def _draw(rng: np.random.Generator, height: int, width: int, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A disc, box or diamond of about the given colour over the middle of a light ground: [height, width, 3]."""
    y = np.abs(np.linspace(-1, 1, height) + rng.uniform(-0.1, 0.1))[:, None]
    x = np.abs(np.linspace(-1, 1, width) + rng.uniform(-0.1, 0.1))[None, :]
    distance = (np.hypot(x, y), np.maximum(x, y), (x + y) * 0.8)[rng.integers(3)]
    inside = (distance < rng.uniform(0.65, 0.85))[..., None]
    ground = rng.uniform(215, 250, size=3)
    pixels = np.where(inside, colour + rng.uniform(-15, 15, size=3), ground) + rng.normal(0, 4, (height, width, 1))
    return pixels.clip(0, 255).astype(np.uint8)


# ---------------------------------------------------------------------------- clips


def _make_clips(out: Path, folder: Path, rng: np.random.Generator, count: int) -> list[Media]:
    """Durations are spread evenly on a log scale, both ends included."""
    durations = rng.permutation(np.geomspace(SHORTEST, LONGEST, count))
    media = []
    for number, (seconds, sound) in enumerate(zip(durations, itertools.cycle(SOUNDS), strict=False)):
        rate = int(rng.choice(SAMPLE_RATES, p=SAMPLE_RATE_SHARES))
        samples = _play(rng, sound, round(seconds * rate), rate)
        if rng.random() < 0.3:
            samples = np.stack([samples, samples * rng.uniform(0.5, 1.0)], axis=1)
        path = folder / f"{number:05d}{('.wav', '.flac')[number % 2]}"
        # Integer samples: a WAV file of floats carries the time of writing.
        soundfile.write(out / path, samples, rate, subtype="PCM_16")
        media.append(Media(path.as_posix(), sound, len(samples) / rate))
    return media


def _play(rng: np.random.Generator, sound: str, samples: int, rate: int) -> NDArray[np.float64]:
    """One of `SOUNDS` with a little hiss: [samples], within -1..1."""
    time = np.arange(samples) / rate
    if sound in TONES:
        wave = np.sin(2 * np.pi * rng.uniform(*TONES[sound]) * time + rng.uniform(0, 2 * np.pi))
    elif sound == "noise":
        wave = rng.uniform(-1, 1, samples)
    elif sound == "siren":
        frequency = 1000 + 600 * np.sin(2 * np.pi * rng.uniform(6, 8) * time + rng.uniform(0, 2 * np.pi))
        wave = np.sin(2 * np.pi * np.cumsum(frequency) / rate)
    else:
        since = (time + rng.uniform(0, 0.05)) % (1 / rng.uniform(14, 20))
        wave = rng.uniform(-1, 1, samples) * np.exp(-since / 0.003)
    return rng.uniform(0.4, 0.8) * wave + rng.normal(0, 0.003, samples)


# ---------------------------------------------------------------------------- summary


def _describe(split: Split) -> dict[str, Any]:
    """Counts, spreads (largest over smallest), and for each kind the exact match of its most frequent answer."""
    answers = {kind: Counter(answer_of(r) for r in split.records if r["source"] == kind) for kind in KINDS}
    parts = [{part["type"] for part in record["messages"][0]["content"]} for record in split.records]
    areas, seconds = ([item.size for item in media] for media in (split.pictures, split.clips))
    return {
        "examples": {kind: counts.total() for kind, counts in answers.items()},
        "chance": {kind: max(counts.values()) / counts.total() for kind, counts in answers.items()},
        "pictures": {"files": len(areas), "pixels": [min(areas), max(areas)], "spread": max(areas) / min(areas)},
        "clips": {
            "files": len(seconds),
            "seconds": [min(seconds), max(seconds)],
            "spread": max(seconds) / min(seconds),
        },
        "without_picture": sum("image" not in kinds for kinds in parts) / len(parts),
        "without_clip": sum("audio" not in kinds for kinds in parts) / len(parts),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm sample-data")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096, help="training examples")
    parser.add_argument("--test", type=int, default=512, help="held-out examples")
    options = parser.parse_args(arguments)
    try:
        summary = make_sample(options.out, options.seed, options.train, options.test)
    except (ValueError, OSError) as error:
        parser.error(shown(error))
    for name in ("train", "test"):
        split = summary[name]
        print(
            f"{name}: {sum(split['examples'].values())} examples, {split['pictures']['files']} pictures "
            f"(area x{split['pictures']['spread']:.0f}), {split['clips']['files']} clips "
            f"(length x{split['clips']['spread']:.0f})"
        )
    print("chance level of exact match: " + ", ".join(f"{k} {v:.3f}" for k, v in summary["test"]["chance"].items()))
    return 0
