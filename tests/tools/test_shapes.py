"""Pictures of coloured shapes: what is made of them, and that the judge tells right from wrong."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import load_config
from jaxmllm.data.text.tokenizers import FileTokenizer
from jaxmllm.tools.sample_media import COLOURS
from jaxmllm.tools.shapes import UNKNOWN, main, make_shapes
from jaxmllm.tools.shapes_judge import judge, look, scene_of
from jaxmllm.tools.shapes_scenes import PLACES, SCENES, SHAPES, Scene, paint

ROOT = Path(__file__).parents[2]
RED_CIRCLE = Scene("red", "circle", "top-left")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    out = tmp_path_factory.mktemp("shapes")
    make_shapes(out, seed=3, train=120, test=72)
    return out


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def picture_of(record: dict) -> str:
    return record["messages"][1]["content"][0]["image"]


def test_training_lacks_two_combinations_of_every_colour_and_the_test_has_all(shapes):
    trained = {scene_of(Path(picture_of(record))) for record in read(shapes / "train.jsonl")}
    tested = Counter(scene_of(Path(picture_of(record))) for record in read(shapes / "test.jsonl"))
    assert set(tested) == set(SCENES) and set(tested.values()) == {1}
    unseen = set(SCENES) - trained
    assert unseen == {scene for scene in SCENES if scene.unseen}
    for part, names in (("colour", COLOURS), ("shape", SHAPES), ("place", PLACES)):
        assert Counter(getattr(scene, part) for scene in unseen) == dict.fromkeys(
            names, 12 // len(names)
        )


def test_what_is_to_be_drawn_are_the_held_out_captions_and_sizes(shapes):
    for record, asked in zip(read(shapes / "test.jsonl"), read(shapes / "draw.jsonl"), strict=True):
        path = shapes / picture_of(record)
        assert asked["prompt"] == record["messages"][0]["content"]
        assert asked["name"] == path.stem
        with Image.open(path) as image:
            assert asked["size"] == f"{image.height}x{image.width}"
            assert 24 <= min(image.size) <= max(image.size) <= 64


def test_the_tokenizer_knows_every_word(shapes):
    tokenizer = FileTokenizer(shapes / "tokenizer.json")
    unknown = tokenizer.encode("zebra")
    assert len(unknown) == 1 and UNKNOWN not in tokenizer.decode(unknown)
    captions = [asked["prompt"] for asked in read(shapes / "draw.jsonl")]
    assert len(set(captions)) > 60
    for caption in captions:
        assert unknown[0] not in tokenizer.encode(caption)
    assert unknown[0] not in tokenizer.layout.headers["user"]


def test_equal_seeds_give_equal_bytes_and_others_do_not(shapes, tmp_path):
    for seed in (3, 4):
        make_shapes(tmp_path / str(seed), seed=seed, train=60, test=72)
    for name in ("draw.jsonl", f"media/test/{read(shapes / 'draw.jsonl')[0]['name']}.png"):
        assert (tmp_path / "3" / name).read_bytes() == (shapes / name).read_bytes()
        assert (tmp_path / "4" / name).read_bytes() != (shapes / name).read_bytes()


def test_the_judge_is_right_about_real_pictures(shapes):
    for split, files in (("train", 120), ("test", 72)):
        scores = judge(shapes / "media" / split)
        assert scores.pop("files") == files
        assert (scores.pop("unseen_all") is None) == (split == "train")
        assert min(scores.values()) >= 0.99, scores


def test_the_judge_sees_what_is_wrong(shapes, tmp_path):
    """Every picture under the name of another one."""
    paths = sorted((shapes / "media/test").glob("*.png"))
    for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
        shutil.copy(path, tmp_path / other.name)
    scores = judge(tmp_path)
    expected = {
        part: np.mean(
            [
                getattr(scene_of(path), part) == getattr(scene_of(other), part)
                for path, other in zip(paths, paths[1:] + paths[:1], strict=True)
            ]
        )
        for part in ("colour", "shape", "place")
    }
    assert scores == {"files": 72, **expected, "all": 0, "unseen_all": 0}


def test_the_judge_sees_nothing_in_grounds_noise_and_other_outlines():
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (40, 40, 3)).astype(np.uint8)
    assert look(noise)["shape"] is None
    assert look(np.full((24, 32, 3), 230, np.uint8)) == dict.fromkeys(("colour", "shape", "place"))
    opposite = np.full((24, 24, 3), 128, np.uint8)
    opposite[6:10, 6:10], opposite[12:16, 12:16] = 28, 228
    assert look(opposite) == dict.fromkeys(("colour", "shape", "place"))
    picture = paint(random, RED_CIRCLE, 40, 40)
    assert look(picture) == {"colour": "red", "shape": "circle", "place": "top-left"}
    two = np.maximum(0, np.minimum(picture, picture[::-1, ::-1]))
    assert look(two)["shape"] is None
    cyan = picture.copy()
    cyan[(picture[..., 1] < 100)] = (0, 220, 220)
    assert look(cyan)["colour"] is None


def test_the_command_writes_what_the_judge_says(shapes, tmp_path, capsys):
    path = tmp_path / "scores.json"
    words = ["--judge", str(shapes / "media/test"), "--json", str(path), "--seconds-training", "60"]
    assert main([*words, "--seconds-sampling", "7.5"]) == 0
    assert "unseen_all 1.000" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["seconds_training"], written["seconds_sampling"]) == (60, 7.5)
    assert written["pictures"]["files"] == 72 and written["pictures"]["all"] >= 0.99


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "either a folder"),
        (["out", "--judge", "out"], "either a folder"),
        (["out", "--test", "100"], "--test 100"),
        (["out", "--train", "0"], "--train 0"),
        (["--judge", "empty"], "no PNG files"),
        (["--judge", "other"], "red-circle-top-left-0"),
    ],
)
def test_wrong_arguments_are_one_line(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    Image.new("RGB", (24, 24)).save(tmp_path / "other/cat.png")
    with pytest.raises(SystemExit):
        main(words)
    assert reason in capsys.readouterr().err


def test_the_config_reads_what_is_made():
    config = load_config(ROOT / "configs/shapes.yaml", [])
    assert config.data.tokenizer == "shapes/tokenizer.json"
    assert [source.path for source in config.data.sources] == ["shapes/train.jsonl"]
    assert [source.path for source in config.data.evaluation] == ["shapes/test.jsonl"]
    assert config.objective.diffusion.prediction == "sample"
    patch = config.model.diffusion.patch_size
    assert not any(side % patch for side in (24, 32, 40, 48, 56, 64))
