"""Conversations with pictures that become squares, one or several: ids of the reference, positions in a line."""

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
# Of four tokens a square
SQUARES = {"patch_size": 4, "merge": 2, "min_pixels": 16**2, "max_pixels": 16**2, "in_line": True}
READERS = {
    "gemma3": Images(**SQUARES, resize="square"),
    "internvl": ClassedTiles(**SQUARES, resize="tiles", tiles=(1, 12)),
}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    """Of a dialect."""
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load(FOLDER / name)


@pytest.mark.parametrize("number", range(5))
def test_ids_are_those_of_the_reference(tokenizer, name, number):
    """Texts beside pictures are stripped, line breaks around pictures join those of texts."""
    talk, expected = TALKS[name][number], np.load(FOLDER / name / "talks.npz")
    images = READERS[name]
    shapes = [images.shape_of(height, width) for height, width in talk["sizes"]]
    found = render(conversation_of(talk["record"]), tokenizer, {"vision": images}, shapes)
    np.testing.assert_array_equal(found.tokens, expected[f"ids_{number}"])
    line = np.arange(len(found.tokens))
    np.testing.assert_array_equal(found.positions, np.stack([line] * 3, axis=1))
    pad = tokenizer.layout.media["image"].pad
    assert (found.tokens == pad).sum() == 4 * sum(tiles for tiles, *_ in shapes)
    assert pad not in found.targets, "nothing is learned of pictures"


def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """What the reference was asked with."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
