"""Conversations with pictures of many sizes: ids and positions are those of the reference, from files alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import File
from jaxmllm.data.text.conversation import parse_conversation
from jaxmllm.data.text.render import render
from tests.data.text.dialects import DIALECTS, load

FOLDER = Path(__file__).parent / "pictured_talks"
TALKS = json.loads((FOLDER / "talks.json").read_text())
SIZE = json.loads((FOLDER / "preprocessor_config.json").read_text())["size"]
IMAGES = Images(14, 2, SIZE["shortest_edge"], SIZE["longest_edge"], resize="smart")


@pytest.fixture(scope="module")
def tokenizer():
    return load(FOLDER)


@pytest.mark.parametrize("number", range(len(TALKS)))
def test_ids_and_positions_are_those_of_the_reference(tokenizer, number):
    talk, expected = TALKS[number], np.load(FOLDER / "talks.npz")
    conversation = parse_conversation(
        talk["record"],
        lambda path: File(Path(path)),
        default_id="x",
        default_source="s",
        targets="all",
    )
    shapes = [(1, *IMAGES.grid(height, width)) for height, width in talk["sizes"]]
    found = render(conversation, tokenizer, {"vision": IMAGES}, shapes)
    np.testing.assert_array_equal(found.tokens, expected[f"ids_{number}"])
    np.testing.assert_array_equal(found.positions, expected[f"positions_{number}"])
    pad = tokenizer.layout.media["image"].pad
    assert (found.tokens == pad).sum() == sum(span.tokens for span in found.media)
    learned = found.targets[found.targets >= 0]
    assert pad not in learned, "nothing is learned of pictures"


def test_the_files_are_those_of_the_dialect(tmp_path):
    """What the reference was asked with."""
    DIALECTS["qwen2.5-vl"].folder(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
