"""Conversations with pictures that become one square or several: the reference's ids, in a line.

The goldens come from make_square_talks.py, so that no model is needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.data.media.image_tiles import ClassedTiles
from jaxmllm.data.media.images import Images
from jaxmllm.data.text.render import render
from tests.data.text.dialects import DIALECTS, load
from tests.data.text.talks import conversation_of

FOLDER = Path(__file__).parent / "square_talks"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TALKS = {name: json.loads((FOLDER / name / "talks.json").read_text()) for name in NAMES}
# Four tokens per square.
SQUARES = {"patch_size": 4, "merge": 2, "min_pixels": 16**2, "max_pixels": 16**2, "in_line": True}
READERS = {
    "gemma3": Images(**SQUARES, resize="square"),
    "internvl": ClassedTiles(**SQUARES, resize="tiles", tiles=(1, 12)),
}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    """The name of a dialect."""
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load(FOLDER / name)


@pytest.mark.parametrize("number", range(5))
def test_ids_are_those_of_the_reference(tokenizer, name, number):
    """Texts beside pictures are stripped, and line breaks around pictures join those of texts."""
    talk = TALKS[name][number]
    expected = np.load(FOLDER / name / "talks.npz")
    images = READERS[name]
    shapes = [images.shape_of(height, width) for height, width in talk["sizes"]]
    rendered = render(conversation_of(talk["record"]), tokenizer, {"vision": images}, shapes)
    np.testing.assert_array_equal(rendered.tokens, expected[f"ids_{number}"])
    line = np.arange(len(rendered.tokens))
    np.testing.assert_array_equal(rendered.positions, np.stack([line] * 3, axis=1))
    pad = tokenizer.layout.media["image"].pad
    assert (rendered.tokens == pad).sum() == 4 * sum(tiles for tiles, *_ in shapes)
    assert pad not in rendered.targets, "nothing is learned of pictures"


def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """The reference's files are those that the dialect writes today."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
