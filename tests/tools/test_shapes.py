"""Data sets of coloured shapes, and the judge that tells right drawings from wrong ones."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import load_config
from jaxmllm.data.text.tokenizers import FileTokenizer
from jaxmllm.tools.sample_media import COLOURS
from jaxmllm.tools.shapes import UNKNOWN, main, make_shapes
from jaxmllm.tools.shapes_judge import judge, look, look_at_clip, scene_of
from jaxmllm.tools.shapes_scenes import CLIP_SCENES, MOTIONS, PLACES, SCENES, SHAPES, Figure, Scene

ROOT = Path(__file__).parents[2]
RED_CIRCLE = Scene("red", "circle", "top-left")
# Numbers of training and test records of the fixture, by kind
KINDS = {"pictures": (120, 72), "clips": (30, 24), "edits": (60, 36), "questions": (60, 72)}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    out = tmp_path_factory.mktemp("shapes")
    make_shapes(out, seed=3, train=120, test=72)
    return out


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(record: dict) -> Path:
    """The picture or clip of an answer."""
    (answer,) = record["messages"][1]["content"]
    return Path(answer[answer["type"]])


def shown(record: dict) -> Path:
    """The picture of a question."""
    return Path(record["messages"][0]["content"][0]["image"])


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_as_many_of_a_kind_as_is_said(kind, shapes):
    for split, size in zip(("train", "test"), KINDS[kind], strict=True):
        records = read(shapes / f"{kind}-{split}.jsonl")
        assert len(records) == len({record["id"] for record in records}) == size


@pytest.mark.parametrize(
    ("kind", "scenes", "where"), [("pictures", SCENES, "place"), ("clips", CLIP_SCENES, "motion")]
)
def test_training_lacks_two_combinations_of_every_colour(kind, scenes, where, tmp_path):
    make_shapes(tmp_path, train=288, test=216)
    trained = {scene_of(answered(record)) for record in read(tmp_path / f"{kind}-train.jsonl")}
    test_scenes = Counter(
        scene_of(answered(record)) for record in read(tmp_path / f"{kind}-test.jsonl")
    )
    assert set(test_scenes) == set(scenes) and len(set(test_scenes.values())) == 1
    unseen = set(scenes) - trained
    assert unseen == {scene for scene in scenes if scene.unseen}
    names = PLACES if where == "place" else MOTIONS
    for attribute, values in (("colour", COLOURS), ("shape", SHAPES), (where, names)):
        assert Counter(getattr(scene, attribute) for scene in unseen) == dict.fromkeys(
            values, 12 // len(values)
        )


def test_few_clips_have_all_colours_with_all_motions(shapes):
    test_scenes = [scene_of(answered(record)) for record in read(shapes / "clips-test.jsonl")]
    assert len({(scene.colour, scene.motion) for scene in test_scenes}) == 24
    assert set(Counter(scene.shape for scene in test_scenes).values()) == {8}


def test_edits_change_the_colour_alone_and_train_on_nothing_unseen(shapes):
    for split in ("train", "test"):
        for record in read(shapes / f"edits-{split}.jsonl"):
            original = scene_of(shown(record))
            edited = scene_of(answered(record))
            assert original.colour != edited.colour and edited == replace(
                original, colour=edited.colour
            )
            assert edited.colour in record["messages"][0]["content"][1]["text"].split()
            assert split == "test" or not (original.unseen or edited.unseen)
            pixels = [np.asarray(Image.open(shapes / path(record))) for path in (shown, answered)]
            colours = [look(picture)["colour"] for picture in pixels]
            assert colours == [original.colour, edited.colour]
            changed_share = (pixels[0] != pixels[1]).any(axis=2).mean()
            assert pixels[0].shape == pixels[1].shape and 0 < changed_share < 0.25


def test_answers_are_what_the_shown_picture_has(shapes):
    """Training asks for colour, shape and place in any order, held-out records for one of them."""
    for split, questions in (("train", 3), ("test", 1)):
        orders = Counter()
        for record in read(shapes / f"questions-{split}.jsonl"):
            scene = scene_of(shown(record))
            position = scene.place.replace("-", " ")
            aspects = {scene.colour: "colour", scene.shape: "shape", position: "place"}
            answers = record["messages"][1::2]
            order = tuple(aspects[answer["content"]] for answer in answers)
            assert len(set(order)) == questions
            orders[order] += 1
        assert len(orders) == (6 if questions == 3 else 3)


def test_what_is_to_be_drawn_is_what_is_held_out(shapes):
    held_out = [
        record for kind in ("pictures", "clips") for record in read(shapes / f"{kind}-test.jsonl")
    ]
    for file, records in (("draw", held_out), ("edit", read(shapes / "edits-test.jsonl"))):
        for record, request in zip(records, read(shapes / f"{file}.jsonl"), strict=True):
            path = shapes / answered(record)
            assert request["messages"] == record["messages"][:1]
            assert request["name"] == path.stem
            with Image.open(path) as image:
                frames = getattr(image, "n_frames", 1)
                assert request["size"] == f"{image.height}x{image.width}"
                assert 24 <= min(image.size) <= max(image.size) <= (64 if frames == 1 else 40)
            assert request.get("frames", 1) == frames and (frames == 1 or 4 <= frames <= 12)


def test_the_tokenizer_knows_every_word(shapes):
    tokenizer = FileTokenizer(shapes / "tokenizer.json")
    unknown = tokenizer.encode("zebra")
    assert len(unknown) == 1 and UNKNOWN not in tokenizer.decode(unknown)
    texts = [record["messages"][0]["content"] for record in read(shapes / "pictures-test.jsonl")]
    assert len(set(texts)) > 60
    for text in (*texts, "now make it blue", "where is the shape", "bottom right"):
        assert unknown[0] not in tokenizer.encode(text)
    assert unknown[0] not in tokenizer.layout.headers["user"]


def test_equal_seeds_give_equal_bytes_and_others_do_not(shapes, tmp_path):
    for seed in (3, 4):
        make_shapes(tmp_path / str(seed), seed=seed, train=60, test=72)
    picture = read(shapes / "draw.jsonl")[0]["name"]
    for name in ("draw.jsonl", f"media/pictures-test/{picture}.png"):
        assert (tmp_path / "3" / name).read_bytes() == (shapes / name).read_bytes()
        assert (tmp_path / "4" / name).read_bytes() != (shapes / name).read_bytes()


@pytest.mark.parametrize("kind", ["pictures", "clips"])
def test_the_judge_is_right_about_real_files(kind, shapes):
    for split, files in zip(("train", "test"), KINDS[kind], strict=True):
        verdict = judge(shapes / "media" / f"{kind}-{split}")
        scores = verdict.pop(kind)
        assert [*verdict.values()] == [None] and scores.pop("files") == files
        assert (scores.pop("unseen_all") is None) == (split == "train")
        assert scores.pop("motion" if kind == "pictures" else "place") is None
        assert min(scores.values()) >= 0.99, scores


@pytest.mark.parametrize(("kind", "where"), [("pictures", "place"), ("clips", "motion")])
def test_the_judge_sees_what_is_wrong(kind, where, shapes, tmp_path):
    """Each file is judged under the name of another, so it is right only by coincidence."""
    paths = sorted((shapes / "media" / f"{kind}-test").glob("*.png"))
    pairs = list(zip(paths, paths[1:] + paths[:1], strict=True))
    for path, renamed in pairs:
        shutil.copy(path, tmp_path / renamed.name)
    expected = {
        attribute: np.mean(
            [
                getattr(scene_of(path), attribute) == getattr(scene_of(renamed), attribute)
                for path, renamed in pairs
            ]
        )
        for attribute in ("colour", "shape", where)
    }
    impossible = {"motion" if where == "place" else "place": None, "all": 0, "unseen_all": 0}
    assert judge(tmp_path)[kind] == {"files": len(paths), **expected, **impossible}


def test_a_clip_that_stands_still_or_goes_astray_has_no_motion(shapes):
    frames = Figure.of(np.random.default_rng(0), CLIP_SCENES[0], 32, 32, 5).frames()
    assert look_at_clip(frames)["motion"] == CLIP_SCENES[0].motion == "up"
    assert look_at_clip(frames[::-1])["motion"] == "down"
    assert look_at_clip(frames.transpose(0, 2, 1, 3))["motion"] == "left"
    assert look_at_clip(frames[[0, 0, 0]])["motion"] is None
    ground = np.full_like(frames[0], 230)
    assert look_at_clip([ground, *frames[1:]])["motion"] is None
    assert look_at_clip([ground] * 3) == dict.fromkeys(("colour", "shape", "motion"))


def test_the_judge_sees_nothing_in_grounds_noise_and_other_outlines():
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (40, 40, 3)).astype(np.uint8)
    assert look(noise)["shape"] is None
    assert look(np.full((24, 32, 3), 230, np.uint8)) == dict.fromkeys(("colour", "shape", "place"))
    # Two figures that differ from the ground in opposite directions
    opposite = np.full((24, 24, 3), 128, np.uint8)
    opposite[6:10, 6:10], opposite[12:16, 12:16] = 28, 228
    assert look(opposite) == dict.fromkeys(("colour", "shape", "place"))
    (picture,) = Figure.of(random, RED_CIRCLE, 40, 40).frames()
    assert look(picture) == {"colour": "red", "shape": "circle", "place": "top-left"}
    # The picture, and a copy turned by 180 degrees
    two_circles = np.maximum(0, np.minimum(picture, picture[::-1, ::-1]))
    assert look(two_circles)["shape"] is None
    # A colour that is not in the palette
    cyan = picture.copy()
    cyan[(picture[..., 1] < 100)] = (0, 220, 220)
    assert look(cyan)["colour"] is None


def test_the_command_writes_what_the_judge_says(shapes, tmp_path, capsys):
    path = tmp_path / "scores.json"
    arguments = [
        "--judge",
        str(shapes / "media/pictures-test"),
        "--json",
        str(path),
        "--seconds-training",
        "60",
    ]
    assert main([*arguments, "--seconds-sampling", "7.5"]) == 0
    assert "unseen_all 1.000" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert (written["seconds_training"], written["seconds_sampling"]) == (60, 7.5)
    assert written["pictures"]["files"] == 72 and written["pictures"]["all"] >= 0.99
    assert written["clips"] is None


@pytest.mark.parametrize("kind", ["pictures", "clips"])
@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b[:40] + b"x" + b[41:]])
def test_a_damaged_file_is_named(kind, damage, shapes, tmp_path, capsys):
    path = min((shapes / "media" / f"{kind}-test").glob("*.png"))
    (tmp_path / path.name).write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit):
        main(["--judge", str(tmp_path)])
    assert f"{tmp_path / path.name} is damaged (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "either a folder"),
        (["out", "--judge", "out"], "either a folder"),
        (["out", "--test", "100"], "--test 100"),
        (["out", "--train", "0"], "--train 0"),
        (["--judge", "empty"], "no PNG files"),
        (["--judge", "other"], "red-circle-top-left-0"),
        (["--judge", "still"], "it has one frame"),
    ],
)
def test_wrong_arguments_are_one_line(words, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("other/cat", "still/red-circle-moves-up-0"):
        (tmp_path / name).parent.mkdir()
        Image.new("RGB", (24, 24)).save(tmp_path / f"{name}.png")
    with pytest.raises(SystemExit):
        main(words)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("shapes", ["pictures"]),
        ("shapes-clips", ["pictures", "clips"]),
        ("shapes-unified", ["pictures", "edits", "questions"]),
    ],
)
def test_configs_read_what_is_made(name, kinds):
    config = load_config(ROOT / f"configs/{name}.yaml", [])
    assert config.data.tokenizer == "shapes/tokenizer.json"
    for sources, split in ((config.data.sources, "train"), (config.data.evaluation, "test")):
        read = {source.name: source.path for source in sources}
        assert read == {kind: f"shapes/{kind}-{split}.jsonl" for kind in kinds}
    assert config.objective.diffusion.prediction == "sample"
    patch = config.model.diffusion.patch_size
    assert not any(side % patch for side in (24, 32, 40, 48, 56, 64))
