"""Conversations with videos of many lengths: ids and positions are those of the reference, from files alone."""

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
# What families say of it
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
    """Of a dialect."""
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load(FOLDER / name)


@pytest.fixture(scope="module")
def reader(name) -> ImagesAndVideos:
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
    found = rendered(name, number, tokenizer, reader)
    np.testing.assert_array_equal(found.tokens, expected[f"ids_{number}"])
    np.testing.assert_array_equal(found.positions, expected[f"positions_{number}"])
    pads = {part: tokenizer.layout.media[part].pad for part in ("image", "video")}
    seen = np.isin(found.tokens, [*pads.values()])
    assert seen.sum() == sum(span.tokens for span in found.media)
    for span in found.media:
        assert seen[span.slot : span.slot + span.tokens].all() and span.shape[0] == 1
    assert not np.isin(found.targets, [*pads.values()]).any(), "nothing is learned of media"


def test_where_text_after_a_video_goes_on(tokenizer, reader, name):
    """Below the last time, after what is as large as a picture, or after the last time."""
    found = rendered(name, 1, tokenizer, reader)
    clip = found.media[0].reference.clip
    groups = [span for span in found.media if getattr(span.reference, "clip", None) == clip]
    # Of 61 frames, 10 per second, at two or three per second
    assert len(groups) == (9 if "omni" in name else 6)
    end = groups[-1].slot + groups[-1].tokens
    times, following = found.positions[groups[0].slot : end, 0], found.positions[end, 0]
    assert (following < times.max()) == (name == "qwen2.5-vl-moving")
    assert following <= found.positions[:end].max() + 1


def test_the_files_are_those_of_the_dialect(name, tmp_path):
    """What the reference was asked with."""
    DIALECTS[name].folder(tmp_path)
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (FOLDER / name / file).read_bytes()
