"""Make pictures of coloured shapes with captions to learn drawing from, or judge drawn ones by rule.

    jaxmllm shapes OUT [--seed 0] [--train 9216] [--test 288]
    jaxmllm shapes --judge FOLDER [--json PATH] [--seconds-training S] [--seconds-sampling S]

    OUT/train.jsonl, OUT/test.jsonl    a caption that the user says, a picture that the assistant answers
    OUT/draw.jsonl                     the captions of test.jsonl, with sizes and names of files to draw
    OUT/tokenizer.json                 a token for each word of the captions
    OUT/media/{train,test}/            PNG pictures

A picture of 24 to 64 pixels a side, of any ratio, shows a shape (circle, square, triangle) of one of six
colours in one of its quarters. Training has no picture of 12 of the 72 combinations; the held-out
pictures show all equally often. Equal arguments and library versions give equal bytes.

The judge reads PNG files whose names say what they should show (red-circle-top-left-0.png) and prints
which shares of them show the colour, the shape, the place and all three, and of the combinations that
training lacks (`unseen_all`).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image

from jaxmllm.data.printable import shown
from jaxmllm.tools.output import command_parser
from jaxmllm.tools.sample_data import random_of
from jaxmllm.tools.shapes_judge import file_name, judge, table
from jaxmllm.tools.shapes_scenes import SCENES, Scene, caption, paint, size

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
UNKNOWN = SPECIAL[-1]
ROLES = "user assistant"  # words of every conversation


def make_shapes(out: Path, seed: int = 0, train: int = 9216, test: int = len(SCENES) * 4) -> None:
    """Write the data set into folder `out`.

    `train` and `test` are counts of pictures. Raises `ValueError` unless they are positive and `test` is a
    multiple of the number of combinations.
    """
    if train <= 0:
        raise ValueError(f"--train {train}: must be positive")
    if test <= 0 or test % len(SCENES):
        raise ValueError(
            f"--test {test}: must be a positive multiple of {len(SCENES)}, the combinations"
        )
    seen = [scene for scene in SCENES if not scene.unseen]
    records = _make_split(out, "train", seed, itertools.islice(itertools.cycle(seen), train))
    held_out = _make_split(out, "test", seed, itertools.islice(itertools.cycle(SCENES), test))
    _write_lines(
        out / "draw.jsonl",
        [
            {"prompt": record["caption"], "size": record["size"], "name": record["name"]}
            for record in held_out
        ],
    )
    captions = [record["caption"] for record in records + held_out]
    (out / "tokenizer.json").write_text(_tokenizer([*captions, ROLES]), encoding="utf-8")


def _make_split(out: Path, split: str, seed: int, scenes: Iterable[Scene]) -> list[dict[str, str]]:
    """Pictures of scenes and their conversations: caption, size and name of each."""
    folder = Path("media") / split
    (out / folder).mkdir(parents=True, exist_ok=True)
    random = random_of(seed, split, "shapes")
    made = []
    lines = []
    for number, scene in enumerate(scenes):
        height, width = size(random)
        name = file_name(scene, number)
        path = (folder / name).with_suffix(".png")
        Image.fromarray(paint(random, scene, height, width)).save(out / path)
        words = caption(random, scene)
        made.append({"caption": words, "size": f"{height}x{width}", "name": name})
        lines.append(
            {
                "id": f"{split}-{number:05d}",
                "messages": [
                    {"role": "user", "content": words},
                    {
                        "role": "assistant",
                        "content": [{"type": "image", "image": path.as_posix()}],
                    },
                ],
            }
        )
    _write_lines(out / f"{split}.jsonl", lines)
    return made


def _tokenizer(texts: Iterable[str]) -> str:
    """A tokenizer file that has a token for each word and mark of some texts."""
    split = tokenizers.pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in split.pre_tokenize_str(text)})
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer.to_str(pretty=True) + "\n"


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "jaxmllm shapes")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=9216, help="training pictures")
    parser.add_argument("--test", type=int, default=288, help="held-out pictures")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="of drawn pictures")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write what the judge says")
    for work in ("training", "sampling"):
        parser.add_argument(
            f"--seconds-{work}", type=float, metavar="S", help="that it took, for the JSON"
        )
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.judge is None):
        parser.error("name either a folder to write into or --judge FOLDER")
    try:
        if options.judge is not None:
            _judge(options)
        else:
            make_shapes(options.out, options.seed, options.train, options.test)
    except (ValueError, OSError) as error:
        parser.error(shown(error))
    return 0


def _judge(options: argparse.Namespace) -> None:
    pictures = judge(options.judge)
    print("  ".join(table(pictures)))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "pictures": pictures,
            "seconds_training": options.seconds_training,
            "seconds_sampling": options.seconds_sampling,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
