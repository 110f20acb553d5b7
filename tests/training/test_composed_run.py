"""A run of a published decoder and a published tower with a fresh projector, by config alone; and back by parts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.families.model_folder import ModelFolder
from jaxmllm.families.weight_files import WeightFile
from jaxmllm.tools.convert import main as convert
from jaxmllm.train import main as train

FAMILIES = Path(__file__).parents[1] / "families"
WORDS = ["what", "is", "a", "cat", "dog", "it", "red", "blue", "green", "one", "two", "three"]


@pytest.fixture
def decoder(tmp_path) -> Path:
    """A published folder with a tokenizer of a few words."""
    folder = Path(shutil.copytree(FAMILIES / "goldens" / "qwen3", tmp_path / "decoder"))
    words = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    return folder


def write_config(tmp_path: Path, decoder: Path, **sections) -> Path:
    random = np.random.default_rng(0)
    records = []
    for number in range(16):
        size = (*random.integers(10, 60, 2), 3)
        Image.fromarray(random.integers(0, 256, size, np.uint8)).save(tmp_path / f"{number}.png")
        said = " ".join(random.choice(WORDS, random.integers(2, 9)))
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what"}]
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": said},
        ]
        records.append(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "train.jsonl").write_text("".join(records))
    tower = FAMILIES / "tower_goldens" / "siglip2"
    phases = {
        name: {"block": 32, "row_classes": 1, "spans": [1]} for name in ("vision", "language")
    }
    tree = {
        "run": {"directory": str(tmp_path / "run"), "steps": 1},
        "model": {"from": str(decoder), "vision": {"from": str(tower)}},
        "components": {"language": {"freeze": True}, "vision": {"freeze": True}},
        "data": {
            "sources": [{"name": "a", "path": str(tmp_path / "train.jsonl")}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": phases,
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "logging": {"tensorboard": False},
    }
    (tmp_path / "config.yaml").write_text(write_text(tree | sections))
    return tmp_path / "config.yaml"


@pytest.mark.slow
def test_parts_of_two_folders_train_and_go_back(decoder, tmp_path, capsys):
    config = write_config(tmp_path, decoder)
    tower = FAMILIES / "tower_goldens" / "siglip2"
    assert train(["--config", str(config)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"model.vision.from: vision from {tower}" in said
    assert f"model.from: projector.vision not in {decoder}: initialized at random" in said
    run = tmp_path / "run"
    for component, source in (("language", decoder), ("vision", tower)):
        out = tmp_path / component
        assert convert(["to-hf", str(run), str(out), "--component", component]) == 0
        for name in source.iterdir():
            assert (out / name.name).read_bytes() == name.read_bytes(), name
    out = tmp_path / "projector"
    assert convert(["to-hf", str(run), str(out), "--component", "projector.vision"]) == 0
    said = json.loads((out / "config.json").read_text())
    assert said["group"] == 4 and said["input_size"] == 64 and said["output_size"] == 16
    tensors = WeightFile.open(out / "model.safetensors").tensors
    assert {key: tensor.shape for key, tensor in tensors.items()} == {
        "linear_1.weight": (16, 64),
        "linear_1.bias": (16,),
        "linear_2.weight": (16, 16),
        "linear_2.bias": (16,),
    }
    assert np.array(tensors["linear_1.bias"].array()).any()  # which began at zero
    follow(run, tower, tmp_path, capsys)


def follow(run: Path, tower: Path, tmp_path: Path, capsys) -> None:
    """A second run, in stages, trains the tower of the first one; its tower knows the folder that it came from."""
    overrides = [f"run.directory={tmp_path / 'next'}", f"model.from={run}", "mesh.data=1"]
    overrides += ["pipeline.stages=2", "components.vision.freeze=false"]
    again = ["--config", str(run / "config.yaml"), *overrides]
    assert train(again) == 1
    error = capsys.readouterr().err
    assert "has vision, which model.vision.from reads from" in error and "\n" not in error.strip()
    shutil.rmtree(tmp_path / "next", ignore_errors=True)
    assert train([*again, "model.vision.from=null"]) == 0, capsys.readouterr().err
    out = tmp_path / "trained"
    assert convert(["to-hf", str(tmp_path / "next"), str(out), "--component", "vision"]) == 0
    before, after = (ModelFolder.open(path, "vision") for path in (tower, out))
    for key, tensor in before.tensors.items():
        carried = ("text_model.", "vision_model.head.", "logit_")
        changed = not np.array_equal(tensor.array(), after.tensors[key].array())
        assert changed != key.startswith(carried), key
