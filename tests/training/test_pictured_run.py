"""A run of a published model that reads pictures, by `model.from` alone, and in stages.

What it trains goes back into a folder, and all other tensors stay bit for bit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import WeightFile
from jaxmllm.tools.convert import main as convert
from jaxmllm.train import main as train
from tests.training.test_published_run import WORDS, published

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SPECIAL += ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return published(tmp_path_factory.mktemp("pictured"), "qwen2_5_vl", SPECIAL)


@pytest.fixture(scope="module")
def config(folder) -> Path:
    """The config of a run that trains the projector alone; half of the records have pictures."""
    base = folder.parent
    rng = np.random.default_rng(0)
    records = []
    for index in range(16):
        name = f"{index}.png"
        size = (*rng.integers(8, 40, 2), 3)
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(base / name)
        picture = [{"type": "image", "image": name}] * (index % 2)
        answer = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        question = [*picture, {"type": "text", "text": "what"}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": turns}) + "\n")
    (base / "train.jsonl").write_text("".join(records))
    tree = {
        "run": {"directory": str(base / "run"), "steps": 1},
        "model": {"from": str(folder)},
        "components": {"language": {"freeze": True}, "vision": {"freeze": True}},
        "data": {
            "sources": [{"name": "a", "path": str(base / "train.jsonl")}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {
            name: {"block": 32, "row_classes": 1, "spans": [1]} for name in ("vision", "language")
        },
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "logging": {"tensorboard": False},
    }
    (base / "config.yaml").write_text(write_text(tree))
    return base / "config.yaml"


@pytest.fixture(scope="module")
def run(config) -> Path:
    assert train(["--config", str(config)]) == 0
    return config.parent / "run"


def changed(folder: Path, run: Path, out: Path, *arguments: str) -> set[str]:
    """Keys of the tensors that differ in the folder written from a run; other files are equal."""
    assert convert(["to-hf", str(run), str(out), *arguments]) == 0
    before = ModelFolder.open(folder)
    after = ModelFolder.open(out)
    weight_files = {file.path.name for file in before.files}
    for file in folder.iterdir():
        is_equal = (out / file.name).read_bytes() == file.read_bytes()
        assert is_equal or file.name in weight_files, file.name
    assert [file.head for file in before.files] == [file.head for file in after.files]
    return {
        key
        for key, tensor in before.tensors.items()
        if not np.array_equal(tensor.array(), after.tensors[key].array())
    }


@pytest.mark.slow
def test_what_is_trained_goes_back_and_all_else_stays(folder, run, tmp_path, capsys):
    stored = (run / "config.yaml").read_text()
    assert "gated_mlp: true" in stored and "resize: smart" in stored
    projector = {f"visual.merger.mlp.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")}
    assert changed(folder, run, tmp_path / "out") == projector
    capsys.readouterr()
    assert changed(folder, run, tmp_path / "tower", "--component", "vision") == set()
    assert f"left out, {folder} keeps its own" in capsys.readouterr().out
    projector_folder = tmp_path / "projector"
    assert (
        convert(["to-hf", str(run), str(projector_folder), "--component", "projector.vision"]) == 0
    )
    projector_config = json.loads((projector_folder / "config.json").read_text())
    assert (
        projector_config["hidden_act"],
        projector_config["hidden_size"],
        projector_config["group"],
    ) == ("gelu", 64, 4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_all_projectors_of_deepstack_are_trained_and_written(config, tmp_path):
    """Every merger changes, except for the norm that belongs to the tower."""
    folder = published(tmp_path, "qwen3_vl", SPECIAL)
    directory = tmp_path / "run"
    overrides = [f"run.directory={directory}", f"model.from={folder}"]
    assert train(["--config", str(config), *overrides]) == 0
    stored = (directory / "config.yaml").read_text()
    assert "rope_interleaved: true" in stored and "positions: rotary_and_resampled" in stored
    mergers = {key for key in ModelFolder.open(folder).tensors if "merger" in key}
    tower_norms = {key for key in mergers if ".merger.norm" in key}
    assert changed(folder, directory, tmp_path / "out") == mergers - tower_norms
    projector_folder = tmp_path / "projector"
    assert (
        convert(["to-hf", str(directory), str(projector_folder), "--component", "projector.vision"])
        == 0
    )
    assert json.loads((projector_folder / "config.json").read_text())["deepstack_layers"] == [0, 2]
    written_tensors = ModelFolder.open(tmp_path / "out").tensors
    for key, tensor in WeightFile.open(projector_folder / "model.safetensors").tensors.items():
        merger = "merger." if key.startswith("linear") else ""
        path = key.replace("deepstack.", "deepstack_merger_list.").replace("linear_", "linear_fc")
        model_tensor = written_tensors[f"model.visual.{merger}{path}"]
        array = model_tensor.array()
        np.testing.assert_array_equal(tensor.array().astype(array.dtype), array)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_second_run_trains_all_of_it_in_stages(folder, config, run, tmp_path):
    overrides = [f"run.directory={tmp_path / 'next'}", f"model.from={run}", "mesh.data=1"]
    overrides += ["pipeline.stages=2", "components.vision.freeze=false"]
    overrides += ["components.language.freeze=false"]
    stored = run / "config.yaml"
    assert train(["--config", str(stored), *overrides]) == 0
    assert changed(folder, tmp_path / "next", tmp_path / "out") == {
        *ModelFolder.open(folder).tensors
    }


@pytest.mark.slow
@pytest.mark.exhaustive
def test_adapters_of_the_tower_are_merged_into_joined_tensors(folder, config, tmp_path, capsys):
    """Queries, keys and values are one tensor of the folder, but have an adapter each."""
    overrides = [f"run.directory={tmp_path / 'run'}", "components.projector.vision.freeze=true"]
    overrides += ["model.adapters.vision={rank: 2, alpha: 4.0}"]
    assert train(["--config", str(config), *overrides]) == 0
    matrices = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    adapted = {f"visual.blocks.{layer}.{name}.weight" for layer in range(3) for name in matrices}
    assert changed(folder, tmp_path / "run", tmp_path / "out") == adapted
    capsys.readouterr()
    command = ["to-hf", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapters"]
    assert convert(command) == 2
    assert "has no adapter.language to write" in capsys.readouterr().err
