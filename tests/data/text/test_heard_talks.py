"""Conversations with pictures and clips: ids and positions are the reference's.

The goldens come from make_heard_talks.py, so that no model is needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.data.media.images import Images
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.text.conversation import ConversationError
from jaxmllm.data.text.render import render
from tests.data.text.dialects import DIALECTS, load
from tests.data.text.talks import conversation_of

FOLDER = Path(__file__).parent / "heard_talks"
TALKS = json.loads((FOLDER / "talks.json").read_text())
SIZE = json.loads((FOLDER / "preprocessor_config.json").read_text())["size"]
IMAGES = Images(14, 2, SIZE["shortest_edge"], SIZE["longest_edge"], resize="smart")
CLIPS = Sounds(16_000, 400, 160, 8, 200, 1, 300.0, stem_stride=2, silence="masked", pool=2)


@pytest.fixture(scope="module")
def tokenizer():
    return load(FOLDER)


@pytest.mark.parametrize("number", range(len(TALKS)))
def test_ids_and_positions_are_those_of_the_reference(tokenizer, number):
    talk = TALKS[number]
    expected = np.load(FOLDER / "talks.npz")
    shapes = [
        (-(-media // 160), 1, 1) if isinstance(media, int) else (1, *IMAGES.grid(*media))
        for media in talk["media"]
    ]
    modalities = {"vision": IMAGES, "audio": CLIPS}
    rendered = render(conversation_of(talk["record"]), tokenizer, modalities, shapes)
    np.testing.assert_array_equal(rendered.tokens, expected[f"ids_{number}"])
    np.testing.assert_array_equal(rendered.positions, expected[f"positions_{number}"])
    pads = [tokenizer.layout.media[part].pad for part in ("image", "audio")]
    assert not np.isin(rendered.targets, pads).any(), "nothing is learned of media"


def test_videos_are_refused(tokenizer):
    content = [{"type": "video", "video": "a.gif"}, {"type": "text", "text": "What?"}]
    record = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A"}]
    }
    with pytest.raises(ConversationError, match="holds a video, but no encoder of the model takes"):
        render(conversation_of(record), tokenizer, {"vision": IMAGES, "audio": CLIPS}, [(1, 2, 2)])


def test_the_files_are_those_of_the_dialect(tmp_path):
    """The reference's files are those that the dialect writes today."""
    DIALECTS["qwen2.5-omni"].folder(tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
