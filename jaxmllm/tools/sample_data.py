"""Make a small, ragged, learnable data set of real media files.

    jaxmllm sample-data OUT [--seed 0] [--train 4096] [--test 512]

    OUT/train.jsonl, OUT/test.jsonl    conversations; media paths are relative to OUT
    OUT/media/{train,test}/            PNG, JPEG, WebP pictures; WAV, FLAC clips
    OUT/sample.json                    seed, counts, spreads, and the chance level of each kind of
                                       question

Four kinds of question in equal shares, named in each record's "source": `picture` (what colour is
the shape), `sound` (what does the clip hold), `both` (colour and sound together) and `text` (the
opposite of a word). So half of the examples have no picture and half no clip. The splits share no
file and no text question; equal arguments and library versions give equal bytes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxmllm.data.printable import shown
from jaxmllm.tools.arguments import command_parser, seed_int
from jaxmllm.tools.sample_media import COLOURS, SOUNDS, SampleFile, make_clips, make_pictures

T = TypeVar("T")

KINDS = ("picture", "sound", "both", "text")
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
NAMES = (
    "Ada",
    "Bela",
    "Chidi",
    "Dora",
    "Emil",
    "Fatma",
    "Goro",
    "Hana",
    "Ivo",
    "June",
    "Kofi",
    "Lena",
)

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
class Split:
    """The records and media files of one split."""

    records: list[dict[str, Any]]
    pictures: list[SampleFile]
    clips: list[SampleFile]


def make_sample(
    out: str | Path, seed: int = 0, train: int = 4096, test: int = 512
) -> dict[str, Any]:
    """Write the data set into folder `out` and return what `sample.json` holds.

    `train` and `test` are counts of examples. Raises `ValueError` unless both are positive
    multiples of four.
    """
    for name, examples in (("train", train), ("test", test)):
        if examples <= 0 or examples % len(KINDS):
            raise ValueError(
                f"--{name} {examples}: must be a positive multiple of {len(KINDS)}, the kinds of question"
            )
    out = Path(out)
    splits = {
        "train": _make_split(out, "train", seed, train),
        "test": _make_split(out, "test", seed, test),
    }
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


def _make_split(out: Path, split: str, seed: int, examples: int) -> Split:
    """Write the media of one split, and make its conversations in random order."""
    folder = Path("media") / split
    (out / folder).mkdir(parents=True, exist_ok=True)
    # Files are shared by several questions: they cost more time and disk than lines of text.
    pictures = make_pictures(
        out, folder, random_of(seed, split, "picture"), max(examples // 4, 2 * len(COLOURS))
    )
    clips = make_clips(
        out, folder, random_of(seed, split, "sound"), max(examples // 8, 2 * len(SOUNDS))
    )

    rng = random_of(seed, split, "questions")
    share = examples // len(KINDS)
    # All kinds draw from `rng`, so their order here decides what is drawn.
    asked = {
        "picture": _ask_one(rng, "picture", "image", pictures, tuple(COLOURS), share),
        "sound": _ask_one(rng, "sound", "audio", clips, SOUNDS, share),
        "both": _ask_both(rng, pictures, clips, share),
        "text": _ask_text(rng, split, share),
    }
    conversations = [(kind, messages) for kind in KINDS for messages in asked[kind]]
    records = []
    for number_in_file, index in enumerate(rng.permutation(examples).tolist()):
        kind, messages = conversations[index]
        records.append(
            {"id": f"{split}-{number_in_file:05d}", "source": kind, "messages": messages}
        )
    return Split(records, pictures, clips)


def random_of(seed: int, split: str, use: str) -> np.random.Generator:
    """Random numbers for one split and use alone: a change to one use leaves the others as they
    are."""
    return np.random.default_rng([seed, *f"{split}/{use}".encode()])


def _ask_one(
    rng: np.random.Generator,
    kind: str,
    medium: str,
    files: Sequence[SampleFile],
    labels: Sequence[str],
    examples: int,
) -> list[Any]:
    """Conversations about one picture or sound, or about several with the same label."""
    groups = _group_by_label(files)
    conversations = []
    for label in itertools.islice(itertools.cycle(labels), examples):
        size = 1 if rng.random() >= SEVERAL else int(rng.integers(2, 4))
        chosen = [groups[label][i] for i in rng.integers(len(groups[label]), size=size)]
        content = [{"type": medium, medium: file.path} for file in chosen]
        conversations.append(_conversation(rng, content, _pick(rng, QUESTIONS[kind]), label))
    return conversations


def _ask_both(
    rng: np.random.Generator,
    pictures: Sequence[SampleFile],
    clips: Sequence[SampleFile],
    examples: int,
) -> list[Any]:
    """Conversations about one picture and one clip, for each pair of labels in turn."""
    pictures_of = _group_by_label(pictures)
    clips_of = _group_by_label(clips)
    conversations = []
    for colour, sound in itertools.islice(
        itertools.cycle(itertools.product(COLOURS, SOUNDS)), examples
    ):
        picture = _pick(rng, pictures_of[colour])
        clip = _pick(rng, clips_of[sound])
        content = [{"type": "image", "image": picture.path}, {"type": "audio", "audio": clip.path}]
        if rng.random() < 0.5:
            content.reverse()
        conversations.append(
            _conversation(rng, content, _pick(rng, QUESTIONS["both"]), f"{colour} {sound}")
        )
    return conversations


def _ask_text(rng: np.random.Generator, split: str, examples: int) -> list[Any]:
    """Conversations about opposites, without media."""
    answers = OPPOSITES | {opposite: word for word, opposite in OPPOSITES.items()}
    wordings = sorted(
        {form.format(word="{word}", name=name) for form in QUESTIONS["text"] for name in NAMES}
    )
    # The test split has every fifth wording of a word, starting at another one for each word.
    is_test = split == "test"
    groups = {}
    for offset, word in enumerate(answers):
        groups[word] = [
            wording for i, wording in enumerate(wordings) if ((i + offset) % 5 == 0) == is_test
        ]
    words = itertools.islice(itertools.cycle(answers), examples)
    return [
        _conversation(rng, [], _pick(rng, groups[word]).format(word=word), answers[word])
        for word in words
    ]


def _conversation(
    rng: np.random.Generator, media: list[Any], question: str, answer: str
) -> list[Any]:
    text = {"type": "text", "text": question}
    content = [text, *media] if rng.random() < 0.25 else [*media, text]
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def _group_by_label(media: Sequence[SampleFile]) -> dict[str, list[SampleFile]]:
    groups: dict[str, list[SampleFile]] = {}
    for item in media:
        groups.setdefault(item.label, []).append(item)
    return groups


def _pick(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


# ---------------------------------------------------------------------------- summary


def _describe(split: Split) -> dict[str, Any]:
    """Counts, spreads (largest over smallest), and the exact match of each kind's commonest
    answer."""
    answers: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    without_picture = 0
    without_clip = 0
    for record in split.records:
        answers[record["source"]][answer_of(record)] += 1
        types = {content["type"] for content in record["messages"][0]["content"]}
        without_picture += "image" not in types
        without_clip += "audio" not in types
    areas = [picture.size for picture in split.pictures]
    seconds = [clip.size for clip in split.clips]
    return {
        "examples": {kind: counts.total() for kind, counts in answers.items()},
        "chance": {kind: max(counts.values()) / counts.total() for kind, counts in answers.items()},
        "pictures": {
            "files": len(areas),
            "pixels": [min(areas), max(areas)],
            "spread": max(areas) / min(areas),
        },
        "clips": {
            "files": len(seconds),
            "seconds": [min(seconds), max(seconds)],
            "spread": max(seconds) / min(seconds),
        },
        "without_picture": without_picture / len(split.records),
        "without_clip": without_clip / len(split.records),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm sample-data")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--seed", type=seed_int, default=0)
    parser.add_argument(
        "--train", type=int, default=4096, help="number of training examples (default: %(default)s)"
    )
    parser.add_argument(
        "--test", type=int, default=512, help="number of held-out examples (default: %(default)s)"
    )
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
    print(
        "chance level of exact match: "
        + ", ".join(f"{k} {v:.3f}" for k, v in summary["test"]["chance"].items())
    )
    return 0
