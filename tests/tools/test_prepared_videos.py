"""Texts with videos, prepared by another program: equal to the reference, or refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmllm.data.media.modalities import modalities
from jaxmllm.tools.convert import main
from jaxmllm.tools.prepared_inputs import PreparedRun, PreparedTexts, _config, differences
from tests.support import EXHAUSTIVE

FAMILIES = Path(__file__).parents[1] / "families"
MOVING = sorted(path.name for path in (FAMILIES / "moving_goldens").iterdir())
QUICK = "qwen2_5_vl"
ROWS = {"block": 32, "row_classes": 1, "spans": [1]}


def differences_of(name: str, devices: int, **sections: Any) -> dict[str, Any]:
    """Differences of logits, loss and gradients to the reference, on so many devices."""
    folder = FAMILIES / "moving_goldens" / name
    run = PreparedRun.of(
        FAMILIES / "goldens" / name,
        folder / "inputs.npz",
        jax.devices()[:devices],
        phases={phase: ROWS for phase in ("vision", "language")},
        **sections,
    )
    assert devices > 1 or len(run.step.rows["language"]) == 1, "all texts in one row"
    return differences(run, folder / "reference.npz", folder / "gradients.npz")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == QUICK else EXHAUSTIVE, id=name)
        for name in MOVING
    ],
)
def test_logits_and_gradients_are_those_of_the_reference(name):
    """Three texts with videos and pictures share one row here, and are padded in the reference."""
    check(differences_of(name, 1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2, "data": 2}]
)
def test_a_mesh_changes_nothing(mesh):
    """Groups of frames of a video are encoded on different devices."""
    check(differences_of("qwen3_vl", 8, mesh=mesh))


def check(found: dict[str, Any]) -> None:
    """Assert that logits, loss and gradients agree with the reference."""
    assert found["logits"] < 1e-4 and found["loss_difference"] < 1e-4
    assert found["gradients"] and max(found["gradients"].values()) < 1e-4


def test_types_mark_the_kinds_that_have_no_token_of_their_own():
    """With a token for pictures alone, videos are found by their type, as both are without one."""
    inputs = FAMILIES / "moving_goldens" / QUICK / "inputs.npz"
    config = _config(FAMILIES / "goldens" / QUICK, inputs, {})
    readers = modalities(config.model, config.data)
    arrays = np.load(inputs)
    vocabulary = config.model.language.vocab_size
    (picture,) = set(arrays["input_ids"][arrays["mm_token_type_ids"] == 1].tolist())
    spans = [
        PreparedTexts.read(inputs, vocabulary, config, placeholders, readers).spans
        for placeholders in ({}, {"image": picture})
    ]
    assert spans[0] == spans[1]
    assert {span.phase for of_text in spans[0] for span in of_text} == {"vision"}


def test_videos_that_are_none(tmp_path, capsys):
    folder = FAMILIES / "goldens" / QUICK
    inputs = dict(np.load(FAMILIES / "moving_goldens" / QUICK / "inputs.npz"))
    pixels = inputs["pixel_values_videos"]
    grids = inputs["video_grid_thw"]
    types = inputs["mm_token_type_ids"]
    seconds = inputs["second_per_grid_ts"]
    for changes, message in (
        ({"video_grid_thw": None}, "second_per_grid_ts: there are no videos whose times are pos"),
        (
            {"video_grid_thw": None, "second_per_grid_ts": None},
            "has videos, but not video_grid_thw",
        ),
        ({"second_per_grid_ts": None}, "has videos, but not second_per_grid_ts or video_second_p"),
        ({"second_per_grid_ts": seconds[1:]}, "but not second_per_grid_ts or video_second_per_gr"),
        ({"pixel_values_videos": pixels[1:]}, "pixel_values_videos has 79 patches, and video_grid"),
        ({"pixel_values_videos": pixels + 0.01}, "pixel_values_videos are not colors of 8 bits le"),
        ({"video_grid_thw": grids + np.array([0, 1, 0])}, "whole cells of 2 x 2 patches"),
        ({"mm_token_type_ids": np.minimum(types, 1)}, "the pictures of image_grid_thw have [6, 1]"),
        ({"image_grid_thw": 2 * inputs["image_grid_thw"]}, "pictures have one frame, and whole ce"),
    ):
        arrays = {name: value for name, value in (inputs | changes).items() if value is not None}
        np.savez(tmp_path / "inputs.npz", **arrays)
        assert main(["verify", str(folder), str(tmp_path / "inputs.npz")]) == 2
        assert message in capsys.readouterr().err
