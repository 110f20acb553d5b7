"""A run of a published model that sees, hears and speaks.

What it trains goes back into a folder, and all other tensors stay bit for bit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.train import main as train
from tests.training.test_pictured_run import changed
from tests.training.test_published_run import WORDS, published

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SPECIAL += ["<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"]
SPECIAL += ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """A published folder of Qwen2.5-Omni, or of the golden that a test names."""
    name = getattr(request, "param", "qwen2_5_omni")
    return published(tmp_path_factory.mktemp("heard"), name, SPECIAL)


@pytest.fixture(scope="module")
def config(folder) -> Path:
    """The config of a run with frozen towers, trained projectors and adapters on the decoder.

    Records have a picture, a clip, both or neither.
    """
    base = folder.parent
    rng = np.random.default_rng(0)
    records = []
    for index in range(16):
        content = [{"type": "text", "text": "what"}]
        if index % 2:
            size = (*rng.integers(8, 40, 2), 3)
            Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(base / f"{index}.png")
            content.insert(0, {"type": "image", "image": f"{index}.png"})
        if index % 4 > 1:
            sound = rng.uniform(-0.5, 0.5, rng.integers(800, 20_000))
            soundfile.write(base / f"{index}.wav", sound, 16_000)
            content.append({"type": "audio", "audio": f"{index}.wav"})
        answer = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        records.append(json.dumps({"messages": turns}) + "\n")
    (base / "train.jsonl").write_text("".join(records))
    frozen = {"freeze": True}
    phases = ("vision", "audio", "language")
    tree = {
        "run": {"directory": str(base / "run"), "steps": 1},
        "model": {
            "from": str(folder),
            "adapters": {"language": {"rank": 2, "alpha": 4.0, "parameters": ["*.query"]}},
        },
        "components": dict.fromkeys(phases, frozen),
        "data": {
            "sources": [{"name": "a", "path": str(base / "train.jsonl")}],
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {name: {"block": 32, "row_classes": 1, "spans": [1]} for name in phases},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "logging": {"tensorboard": False},
    }
    (base / "config.yaml").write_text(write_text(tree))
    return base / "config.yaml"


MERGER = {
    *(f"thinker.visual.merger.mlp.{n}.{part}" for n in (0, 2) for part in ("weight", "bias")),
    *(f"thinker.model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)),
}
TRAINED = MERGER | {f"thinker.audio_tower.proj.{part}" for part in ("weight", "bias")}
OF_QWEN3 = MERGER | {
    f"thinker.{module}.{part}"
    for module in (
        *("audio_tower.proj1", "audio_tower.proj2"),
        *(f"visual.merger_list.0.{name}" for name in ("ln_q", "mlp.0", "mlp.2")),
    )
    for part in ("weight", "bias")
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "trained"),
    [
        ("qwen2_5_omni", TRAINED),
        pytest.param("qwen3_omni_moe", OF_QWEN3, marks=pytest.mark.exhaustive),
    ],
    indirect=["folder"],
)
def test_projectors_and_adapters_alone_change(folder, config, trained, tmp_path):
    """The first step moves the factor of an adapter that was zero, which changes the product."""
    run = [f"run.directory={tmp_path / 'run'}"]
    assert train(["--config", str(config), *run]) == 0
    assert "attention: chunk" in (tmp_path / "run" / "config.yaml").read_text()
    assert changed(folder, tmp_path / "run", tmp_path / "out") == trained


PARTS = ["mesh.data=1", "mesh.context=2", "mesh.tensor=1", "mesh.fsdp=4", "phases.audio.block=160"]
STAGES = ["mesh.data=1", "pipeline.stages=2"]
FOUR_STAGES = ["mesh.data=1", "mesh.fsdp=1", "pipeline.stages=4"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folder", "overrides", "trained"),
    [
        ("qwen2_5_omni", PARTS, TRAINED),
        ("qwen2_5_omni", STAGES, TRAINED),
        ("qwen2_5_omni", FOUR_STAGES, TRAINED),
        ("qwen3_omni_moe", STAGES, OF_QWEN3),
        ("qwen3_omni_moe", FOUR_STAGES, OF_QWEN3),
    ],
    ids=["parts", "stages", "four-stages", "stages-of-experts", "four-stages-of-experts"],
    indirect=["folder"],
)
def test_parts_and_stages_train_the_same(folder, config, tmp_path, overrides, trained):
    run = [f"run.directory={tmp_path / 'run'}", *overrides]
    assert train(["--config", str(config), *run]) == 0
    assert changed(folder, tmp_path / "run", tmp_path / "out") == trained
