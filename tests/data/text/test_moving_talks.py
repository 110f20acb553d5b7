"""Conversations with videos of many lengths: ids and positions are the reference's.

The goldens come from make_moving_talks.py, so that no model is needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.config.schema import VideoDataConfig
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.data.text.render import Rendered, render
from tests.data.text.dialects import DIALECTS, load
from tests.data.text.talks import conversation_of

FOLDER = Path(__file__).parent / "moving_talks"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TALKS = {name: json.loads((FOLDER / name / "talks.json").read_text()) for name in NAMES}
# What the families say about the times of videos.
TIMES = {
    "qwen2.5-vl-moving": {"times": "positions"},
    "qwen3-vl-moving": {"times": "text", "sampling": "ends", "bounds": "video"},
    "qwen2.5-omni-moving": {
        "fps": 3.0,
        "min_pixels": 128 * 28 * 28,
        "max_pixels": 768 * 28 * 28,
        "times": "line",
        "positions_per_second": 25.0,
    },
}


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    """The name of a dialect."""
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load(FOLDER / name)


@pytest.fixture(scope="module")
def reader(name) -> ImagesAndVideos:
    """The reader of pictures and videos, as the family's files and TIMES describe it."""
    values = json.loads((FOLDER / name / "preprocessor_config.json").read_text())
    bounds = values["size"]["shortest_edge"], values["size"]["longest_edge"]
    videos = {"fps": 2.0, "min_pixels": bounds[0], "max_pixels": bounds[1]} | TIMES[name]
    return ImagesAndVideos(
        values["patch_size"],
        values["merge_size"],
        *bounds,
        resize="smart",
        patch_frames=2,
        videos=VideoDataConfig(**videos),
    )


def rendered(name, number, tokenizer, reader) -> Rendered:
    """The golden conversation as our reader renders it, from the sizes of its media alone."""
    talk = TALKS[name][number]
    shapes = [
        reader.clip_shape(media[0], media[1], media[2:])
        if len(media) == 4
        else (1, *reader.grid(*media))
        for media in talk["media"]
    ]
    return render(conversation_of(talk["record"]), tokenizer, {"vision": reader}, shapes)


@pytest.mark.parametrize("number", range(4))
def test_ids_and_positions_are_those_of_the_reference(tokenizer, reader, name, number):
    expected = np.load(FOLDER / name / "talks.npz")
    rendering = rendered(name, number, tokenizer, reader)
    np.testing.assert_array_equal(rendering.tokens, expected[f"ids_{number}"])
    np.testing.assert_array_equal(rendering.positions, expected[f"positions_{number}"])
    pads = {part: tokenizer.layout.media[part].pad for part in ("image", "video")}
    is_media = np.isin(rendering.tokens, [*pads.values()])
    assert is_media.sum() == sum(span.tokens for span in rendering.media)
    for span in rendering.media:
        assert is_media[span.slot : span.slot + span.tokens].all() and span.shape[0] == 1
    assert not np.isin(rendering.targets, [*pads.values()]).any(), "nothing is learned of media"


def test_where_text_after_a_video_goes_on(tokenizer, reader, name):
    """Positions go on below the last time, after the height and width of a frame, or after the last
    time."""
    rendering = rendered(name, 1, tokenizer, reader)
    clip = rendering.media[0].reference.clip
    groups = [span for span in rendering.media if getattr(span.reference, "clip", None) == clip]
    # The clip has 61 frames at 10 per second, and two or three frames per second are taken.
    assert len(groups) == (9 if "omni" in name else 6)
    end = groups[-1].slot + groups[-1].tokens
    times = rendering.positions[groups[0].slot : end, 0]
    following = rendering.positions[end, 0]
    assert (following < times.max()) == (name == "qwen2.5-vl-moving")
    assert following <= rendering.positions[:end].max() + 1


def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """The reference's files are those that the dialect writes today."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
