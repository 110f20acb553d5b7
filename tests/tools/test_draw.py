"""Requests that cannot be drawn give one line that names the option, the line or the key.

Drawing itself is tested in tests/setup/test_sampling.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from jaxmllm.config.read import parse_config
from jaxmllm.data.media import video_files
from jaxmllm.setup.sampling import Drawn
from jaxmllm.tools import draw
from jaxmllm.tools.shapes_judge import judge
from jaxmllm.training.run_folder import write_config
from tests.support import tiny_config
from tests.training.drawing import drawing_config, latents_config

TEXT_ALONE = {"model__vision": None, "model__audio": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder without a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    tree = drawing_config(folder, model__vision=None, objective__diffusion__condition_drop=0.0)
    write_config(folder, parse_config(tree))
    return folder


@pytest.fixture
def refusal(tmp_path, capsys):
    """A function that runs the command, and returns its one line of error."""

    def refuse(run: Path, *arguments: Any, out: Path = tmp_path / "out") -> str:
        options = ["--run", run, *arguments, "--out", out]
        assert draw.main([*map(str, options)]) == 1
        error: str = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return refuse


def asked(size: str = "8x8", prompt: str = "a circle", guidance: int = 1) -> list[Any]:
    """Options of a request for one picture."""
    return ["--prompt", prompt, "--size", size, "--guidance", guidance]


def test_folders_that_hold_no_run_that_draws(run, refusal, tmp_path):
    assert "holds no run: there is no config.yaml" in refusal(tmp_path / "absent", *asked())
    silent_run = tmp_path / "silent"
    write_config(silent_run, parse_config(tiny_config(silent_run, **TEXT_ALONE)))
    assert "draws nothing: it has no model.diffusion" in refusal(silent_run, *asked())
    assert f"{run} holds no checkpoint" in refusal(run, *asked())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (asked("6x8"), "--prompt:1: size 6x8: both sides must be multiples of model.diffusion"),
        (asked("64x64"), "4096 pixels are more than data.generated.max_pixels (1024)"),
        ([*asked("32x32"), "phases.diffusion.capacities=[64]"], "its largest row holds 64"),
        (asked("8by8"), "size must be HEIGHTxWIDTH"),
        (asked(prompt=" "), "--prompt:1: the prompt must be a text that is not empty"),
        (asked(guidance=2), "--guidance 2: with objective.diffusion.condition_drop 0"),
        (
            [*asked(), "model.diffusion.width=32"],
            "model.diffusion.width is what the run was trained",
        ),
        ([*asked(), "mesh.data=3"], "there are 8"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(run, refusal, arguments, words):
    assert words in refusal(run, *arguments)


def test_lines_of_a_file_are_named(run, refusal, tmp_path):
    path = tmp_path / "asked.jsonl"
    user_message = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    entries = [
        {"prompt": "a", "size": "8x8"},
        {"messages": user_message, "size": "8x8"},
        {"prompt": "b"},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    error = refusal(run, "--jsonl", path, "--guidance", 1)
    assert f"{path}:2: holds an image, but no encoder of the model takes it" in error
    assert "(and 1 more)" in error


def test_a_folder_that_cannot_be_written(run, refusal, tmp_path):
    (tmp_path / "file").write_text("")
    assert "--out: " in refusal(run, *asked(), out=tmp_path / "file" / "out")


def test_wrong_options_end_with_a_usage(run, capsys):
    for arguments in (["--prompt", "a"], [*asked()[:4], "--steps", "0"]):
        with pytest.raises(SystemExit):
            draw.main(["--run", str(run), *map(str, arguments), "--out", "unused"])
        assert "jaxmllm draw: error: --" in capsys.readouterr().err


@pytest.mark.parametrize("is_clip", [False, True])
def test_latents_are_written_as_arrays(tmp_path, is_clip):
    frames = np.random.default_rng(0).normal(size=(3 if is_clip else 1, 4, 6, 5))
    draw.Writer(tmp_path)(Drawn("a", is_clip, True, frames))
    written = np.load(tmp_path / "a.npy")
    assert written.dtype == np.float32
    channels_first = np.moveaxis(frames, -1, 0).astype(np.float32)
    np.testing.assert_array_equal(written, channels_first if is_clip else channels_first[:, 0])


def test_a_clip_has_all_its_frames_though_they_are_equal(tmp_path):
    """Writers of PNG merge equal frames unless told not to."""
    frames = np.random.default_rng(0).uniform(-1, 1, (2, 8, 4, 3))[[0, 0, 1, 1, 1]]
    still = Drawn("red-circle-moves-up-0", True, False, frames[:2])
    draw.Writer(tmp_path, 4)(still)
    assert judge(tmp_path)["clips"]["motion"] == 0
    still = still._replace(frames=frames)
    draw.Writer(tmp_path, 4)(still)
    with Image.open(tmp_path / f"{still.name}.png") as clip:
        decoded = [(np.asarray(f), f.info["duration"]) for f in ImageSequence.Iterator(clip)]
    np.testing.assert_array_equal([pixels for pixels, _ in decoded], still.pixels)
    assert {duration for _, duration in decoded} == {250}


@pytest.mark.parametrize("clips", ["png", "mp4"])
def test_clips_are_written_as_asked_for(tmp_path, monkeypatch, clips):
    """A picture is a PNG file whatever clips are."""
    videos = []
    monkeypatch.setattr(draw, "write_video", lambda *arguments: videos.append(arguments))
    write = draw.Writer(tmp_path, 4, clips)
    frames = np.linspace(-1, 1, 3 * 8 * 4 * 3).reshape(3, 8, 4, 3)
    write(Drawn("still", False, False, frames[:1]))
    write(Drawn("moving", True, False, frames))
    images = {path.name: Image.open(path) for path in sorted(tmp_path.iterdir())}
    assert images["still.png"].size == (4, 8)
    if clips == "png":
        moving: Any = images["moving.png"]
        assert (moving.n_frames, moving.info["duration"], videos) == (3, 250, [])
    else:
        ((path, pixels, fps),) = videos
        assert (path, pixels.shape, fps) == (tmp_path / "moving.mp4", (3, 8, 4, 3), 4)


def test_mp4_files_that_cannot_be_written(run, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "INSTALLED", False)
    error = refusal(run, *asked(), "--clips", "mp4")
    assert "--clips mp4: the package av, which writes MP4, is not installed; pip install" in error
    latents = tmp_path / "latents"
    write_config(latents, parse_config(latents_config(latents)))
    error = refusal(latents, *asked("4x4"), "--clips", "mp4")
    assert "--clips mp4: the run draws latents (model.diffusion.channels)" in error
