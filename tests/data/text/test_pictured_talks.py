"""Conversations with pictures of many sizes: ids and positions are the reference's.

The goldens come from make_pictured_talks.py, so that no model is needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.data.media.images import Images
from jaxmllm.data.text.render import render
from tests.data.text.dialects import DIALECTS, load
from tests.data.text.talks import conversation_of

FOLDER = Path(__file__).parent / "pictured_talks"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TALKS = {name: json.loads((FOLDER / name / "talks.json").read_text()) for name in NAMES}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    """The name of a dialect."""
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load(FOLDER / name)


@pytest.fixture(scope="module")
def images(name) -> Images:
    values = json.loads((FOLDER / name / "preprocessor_config.json").read_text())
    bounds = values["size"]["shortest_edge"], values["size"]["longest_edge"]
    return Images(values["patch_size"], values["merge_size"], *bounds, resize="smart")


@pytest.mark.parametrize("number", range(5))
def test_ids_and_positions_are_those_of_the_reference(tokenizer, images, name, number):
    talk = TALKS[name][number]
    expected = np.load(FOLDER / name / "talks.npz")
    shapes = [(1, *images.grid(height, width)) for height, width in talk["sizes"]]
    rendered = render(conversation_of(talk["record"]), tokenizer, {"vision": images}, shapes)
    np.testing.assert_array_equal(rendered.tokens, expected[f"ids_{number}"])
    np.testing.assert_array_equal(rendered.positions, expected[f"positions_{number}"])
    pad = tokenizer.layout.media["image"].pad
    assert (rendered.tokens == pad).sum() == sum(span.tokens for span in rendered.media)
    learned = rendered.targets[rendered.targets >= 0]
    assert pad not in learned, "nothing is learned of pictures"


def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """The reference's files are those that the dialect writes today."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
