"""Experts in files are the same parameters whatever their form, when read and when written.

Files hold experts apart or joined, and with inputs or outputs first."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmllm.config.schema import ComponentsConfig, ModelConfig
from jaxmllm.families.model_folder import ModelFolder, write_folder
from jaxmllm.families.resolved import resolved
from jaxmllm.families.weight_files import FolderError, WeightFile, write_tensors
from jaxmllm.models.compose import build_model
from jaxmllm.trainable import leaves_by_path
from sharding.mesh import make_mesh
from tests.families.test_model_folder import GOLDENS, copy_in_one_file

FAMILIES = ("qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe")
FORMS = ("apart", "inputs", "outputs")
EXPERT = re.compile(r"(?P<stem>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<name>\w+)_proj\.weight")
JOINED = re.compile(r"(?P<stem>.*\.mlp\.experts)\.(?P<name>gate_up|down)_proj")


def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The matrices [out, in] of single experts, whatever the form of `tensors`.

    Tensors that join experts have inputs first."""
    separate = {}
    for key, tensor in tensors.items():
        joined = JOINED.fullmatch(key)
        if joined is None or "talker" in key:
            separate[key] = tensor
            continue
        names = joined["name"].split("_")
        for expert, expert_tensor in enumerate(tensor):
            for name, matrix in zip(
                names, np.split(expert_tensor, len(names), axis=1), strict=True
            ):
                separate[f"{joined['stem']}.{expert}.{name}_proj.weight"] = matrix.T
    return separate


def in_form(tensors: dict[str, np.ndarray], form: str) -> dict[str, np.ndarray]:
    """The same tensors in another form, from matrices of single experts."""
    if form == "apart":
        return tensors
    converted = {}
    experts = {}
    for key, tensor in tensors.items():
        entry = EXPERT.fullmatch(key)
        if entry is None or "talker" in key:
            converted[key] = tensor
        else:
            experts.setdefault(entry["stem"], {})[entry["name"], int(entry["expert"])] = tensor
    for stem, matrices in experts.items():
        expert_count = 1 + max(expert for _, expert in matrices)
        gate, up, down = (
            np.stack([matrices[name, expert] for expert in range(expert_count)])
            for name in ("gate", "up", "down")
        )
        joined = {"gate_up": np.concatenate([gate, up], axis=1), "down": down}
        for name, tensor in joined.items():
            entry = tensor if form == "outputs" else tensor.swapaxes(1, 2)
            converted[f"{stem}.{name}_proj"] = np.ascontiguousarray(entry)
    return converted


def folder_in(form: str, golden: str, place: Path) -> Path:
    return copy_in_one_file(
        GOLDENS / golden, place / form, lambda tensors: in_form(apart(tensors), form)
    )


def shapes_by_component(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of a folder's model, by component and path."""
    tree = resolved({"model": {"from": str(folder)}})["model"]
    config = ModelConfig.model_validate_json(json.dumps(tree))
    vocabulary = tree["language"]["vocab_size"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    model = build_model(config, vocabulary, ComponentsConfig(), mesh)
    return {
        name: {path: leaf.shape for path, leaf in leaves_by_path(component.shapes)}
        for name, component in model.components.items()
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("golden", FAMILIES)
def test_experts_are_the_same_in_every_form(golden, form, tmp_path):
    """The components beside the experts fit the folder, too, and all is written back as it was."""
    folder = folder_in(form, golden, tmp_path)
    original = GOLDENS / golden
    component_weights = []
    for component, shapes in shapes_by_component(original).items():
        fit, expected = (
            ModelFolder.open(path, component).check(shapes) for path in (folder, original)
        )

        read_whole = partial(fit.whole, dtype=np.float32)
        for path in shapes:
            np.testing.assert_array_equal(read_whole(path), expected.whole(path, np.float32))
        component_weights.append((fit, read_whole))
    write_folder(component_weights, tmp_path / "out")
    written_bytes = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written_bytes == (folder / "model.safetensors").read_bytes()
    assert any(key.endswith("experts.down_proj") for key in ModelFolder.open(folder).tensors) == (
        form != "apart"
    )


def test_experts_of_no_form_are_named(tmp_path):
    folder = folder_in("outputs", "qwen3_moe", tmp_path)
    path = folder / "model.safetensors"
    tensors = {key: np.array(t.array()) for key, t in WeightFile.open(path).tensors.items()}
    write_tensors(path, {key: t[:-1] if ".experts." in key else t for key, t in tensors.items()})
    shapes = shapes_by_component(folder)["language"]
    with pytest.raises(FolderError, match=r"experts\.0\.down_proj\.weight is missing: \[16, 10\]"):
        ModelFolder.open(folder).check(shapes)
