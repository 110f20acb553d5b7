"""Make a data set of coloured shapes and words to learn drawing and seeing from, or judge drawn
files by rules.

    jaxmllm shapes OUT [--seed 0] [--train 9216] [--test 288]
    jaxmllm shapes --judge FOLDER [--json PATH] [--seconds-training S] [--seconds-sampling S]

    OUT/pictures-{train,test}.jsonl    the user says a caption, the assistant answers with a picture
    OUT/clips-{train,test}.jsonl       the same with clips: a quarter as many to train, a third to
                                       test
    OUT/edits-{train,test}.jsonl       the user shows a picture, the assistant answers with the same
                                       in another colour: half as many
    OUT/questions-{train,test}.jsonl   the user shows a picture and asks about it, the assistant
                                       answers in words; in training all questions, one after
                                       another: half as many to train, as many to test
    OUT/draw.jsonl, OUT/edit.jsonl     requests for jaxmllm draw: the held-out captions; the
                                       held-out edits
    OUT/tokenizer.json                 a token for each word
    OUT/media/                         PNG pictures, clips as animated ones

A picture of 24 to 64 pixels a side, of any ratio, shows a shape (circle, square, triangle) of one
of six colours in one of its quarters; in a clip of 4 to 12 frames of 24 to 40 pixels a side it
moves in one of four directions. Training lacks 12 of the 72 combinations of either; held-out files
take all of them in turn. Equal arguments and library versions give equal bytes.

The judge reads PNG files whose names say what they should show (red-circle-top-left-0.png,
blue-square-moves-up-3.png). It prints the shares of them that show the right colour, shape, place
or motion, and all of these (`all`), and the share of the combinations that training lacks that show
all (`unseen_all`).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.data.printable import shown
from jaxmllm.tools.arguments import command_parser, new_file, seed_int
from jaxmllm.tools.sample_data import random_of
from jaxmllm.tools.shapes_judge import file_name, judge, table
from jaxmllm.tools.shapes_scenes import (
    CLIP_SCENES,
    CLIP_SIDES,
    FRAMES,
    QUESTIONS,
    SCENES,
    SIDES,
    Figure,
    Scene,
    caption,
    edit,
    question,
    size,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
UNKNOWN = SPECIAL[-1]
ROLES = "user assistant"  # words of every conversation
FRAME_MILLISECONDS = 125


@dataclass(frozen=True)
class Record:
    """A conversation of a data file, and the request that has its picture or clip drawn."""

    said: tuple[str | Path, ...]  # by the user: pictures that are shown, and text
    answer: str | Path
    further: tuple[tuple[str, str], ...] = ()  # later questions, with their answers
    name: str = ""  # of the drawn file, without its ending; empty where the answer is words
    size: tuple[int, int] = (0, 0)  # height and width, in pixels
    frames: int = 1

    @property
    def words(self) -> Iterator[str]:
        """All texts of the conversation."""
        contents = (*self.said, self.answer, *itertools.chain(*self.further))
        return (content for content in contents if isinstance(content, str))

    def conversation(self, id: str) -> dict[str, Any]:
        """The line of a data file to train on."""
        moving = "video" if self.frames > 1 else "image"
        answer = self.answer if isinstance(self.answer, str) else [_entry(self.answer, moving)]
        messages = [self._question(), {"role": "assistant", "content": answer}]
        for asked, answered in self.further:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return {"id": id, "messages": messages}

    def request(self) -> dict[str, Any]:
        """The line of a file of requests for jaxmllm draw."""
        height, width = self.size
        asked: dict[str, Any] = {"messages": [self._question()], "size": f"{height}x{width}"}
        if self.frames > 1:
            asked["frames"] = self.frames
        return asked | {"name": self.name}

    def _question(self) -> dict[str, Any]:
        contents = [
            {"type": "text", "text": content}
            if isinstance(content, str)
            else _entry(content, "image")
            for content in self.said
        ]
        text = self.said[0]
        plain = len(contents) == 1 and isinstance(text, str)
        return {"role": "user", "content": text if plain else contents}


def _entry(path: Path, kind: str) -> dict[str, str]:
    return {"type": kind, kind: path.as_posix()}


def make_shapes(out: Path, seed: int = 0, train: int = 9216, test: int = len(SCENES) * 4) -> None:
    """Write the data set into folder `out`.

    `train` and `test` are counts of pictures. Raises `ValueError` unless `train` is at least 4 and
    `test` a positive multiple of the number of combinations.
    """
    if train < 4:
        raise ValueError(f"--train {train}: must be at least 4")
    if test <= 0 or test % len(SCENES):
        raise ValueError(
            f"--test {test}: must be a positive multiple of {len(SCENES)}, the combinations"
        )
    records_of: dict[str, list[Record]] = {}
    for kind, record, scenes, (of_train, of_test) in (
        ("pictures", _caption_record, SCENES, (train, test)),
        ("clips", _caption_record, CLIP_SCENES, (train // 4, test // 3)),
        ("edits", _edit_record, SCENES, (train // 2, test // 2)),
        ("questions", _question_record, SCENES, (train // 2, test)),
    ):
        for split, length in (("train", of_train), ("test", of_test)):
            split_scenes = [scene for scene in scenes if split == "test" or not scene.unseen]
            name = f"{kind}-{split}"
            # Each file has random numbers of its own, so its length changes no other.
            random = random_of(seed, name, "shapes")
            maker = _RecordMaker(out, Path("media") / name, random, split_scenes, split == "test")
            records_of[name] = [record(maker, n) for n in range(length)]
            # A generator, which is used up before the loop changes `name`.
            lines = (r.conversation(f"{name}-{n:05d}") for n, r in enumerate(records_of[name]))
            _write_lines(out / f"{name}.jsonl", lines)
    for file, requested in (("draw", ("pictures-test", "clips-test")), ("edit", ("edits-test",))):
        requests = (record.request() for name in requested for record in records_of[name])
        _write_lines(out / f"{file}.jsonl", requests)
    words = (text for records in records_of.values() for record in records for text in record.words)
    (out / "tokenizer.json").write_text(_tokenizer_json([*words, ROLES]), encoding="utf-8")


@dataclass(frozen=True)
class _RecordMaker:
    """The scenes, random numbers and folder that the records of one data file are made with."""

    out: Path
    folder: Path  # of its media, inside `out`
    random: np.random.Generator
    scenes: Sequence[Scene]  # of the records, in turn
    held_out: bool

    def __post_init__(self) -> None:
        (self.out / self.folder).mkdir(parents=True, exist_ok=True)

    def scene(self, index: int) -> Scene:
        """The scene that record `index` shows."""
        return self.scenes[index % len(self.scenes)]

    def save(self, name: str, frames: NDArray[np.uint8]) -> Path:
        """Write a picture, or a clip if there are several frames; return its path inside `out`."""
        path = self.folder / f"{name}.png"
        picture, *later = map(Image.fromarray, frames)
        if later:
            picture.save(
                self.out / path, save_all=True, append_images=later, duration=FRAME_MILLISECONDS
            )
        else:
            picture.save(self.out / path)
        return path


def _caption_record(maker: _RecordMaker, index: int) -> Record:
    """A caption with its picture or clip."""
    random = maker.random
    scene = maker.scene(index)
    moving = scene.motion is not None
    sides = size(random, CLIP_SIDES if moving else SIDES)
    frames = int(random.integers(FRAMES[0], FRAMES[1] + 1)) if moving else 1
    name = file_name(scene, index)
    path = maker.save(name, Figure.of(random, scene, *sides, frames).frames())
    return Record((caption(random, scene),), path, name=name, size=sides, frames=frames)


def _edit_record(maker: _RecordMaker, index: int) -> Record:
    """An edit: the answer shows the record's scene, and the picture that is shown has another
    colour, one that the file has for this shape and place."""
    random = maker.random
    scene = maker.scene(index)
    recoloured = [
        candidate
        for candidate in maker.scenes
        if (candidate.shape, candidate.place) == (scene.shape, scene.place) and candidate != scene
    ]
    before = recoloured[random.integers(len(recoloured))]
    sides = size(random, SIDES)
    figure = Figure.of(random, before, *sides)
    source = maker.save(f"{file_name(before, index)}-shown", figure.frames())
    name = file_name(scene, index)
    answer = maker.save(name, figure.coloured(random, scene.colour).frames())
    return Record((source, edit(random, scene.colour)), answer, name=name, size=sides)


def _question_record(maker: _RecordMaker, index: int) -> Record:
    """A picture with all questions about it in random order, or with one of them if held out."""
    random = maker.random
    scene = maker.scene(index)
    picture = maker.save(
        file_name(scene, index), Figure.of(random, scene, *size(random, SIDES)).frames()
    )
    aspects = random.permutation(list(QUESTIONS)).tolist()
    (asked, answer), *further = (question(random, scene, aspect) for aspect in aspects)
    return Record((picture, asked), answer, () if maker.held_out else tuple(further))


def _tokenizer_json(texts: Iterable[str]) -> str:
    """A tokenizer file that has a token for each word and mark of some texts."""
    split = tokenizers.pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer.to_str(pretty=True) + "\n"


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm shapes")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write into")
    parser.add_argument("--seed", type=seed_int, default=0)
    parser.add_argument(
        "--train", type=int, default=9216, help="number of training pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--test", type=int, default=288, help="number of held-out pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="FOLDER",
        help="judge the drawn pictures and clips of this folder",
    )
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="PATH",
        help="also write the judgement to this file, as one JSON object",
    )
    for work in ("training", "sampling"):
        parser.add_argument(
            f"--seconds-{work}",
            type=float,
            metavar="S",
            help=f"seconds that {work} took, for the JSON",
        )
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.judge is None):
        parser.error("name either a folder to write into or --judge FOLDER")
    if options.json is not None and options.judge is None:
        parser.error("--json is what --judge says; leave it out, or name a folder of drawn files")
    for key in ("training", "sampling"):
        if getattr(options, f"seconds_{key}") is not None and options.json is None:
            parser.error(f"--seconds-{key} is for the JSON; leave it out, or name a file by --json")
    try:
        if options.judge is not None:
            _judge_folder(options)
        else:
            make_shapes(options.out, options.seed, options.train, options.test)
    except (ValueError, OSError) as error:
        parser.error(shown(error))
    return 0


def _judge_folder(options: argparse.Namespace) -> None:
    scores = judge(options.judge)
    for kind, shares in scores.items():
        if shares is not None:
            print("  ".join([kind, *table(shares)]))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        seconds = {
            "seconds_training": options.seconds_training,
            "seconds_sampling": options.seconds_sampling,
        }
        options.json.write_text(json.dumps(scores | seconds, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
