"""A run of a published model that reads videos beside pictures.

Records name files alone; the folder says how to read them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.strict_yaml import write_text
from jaxmllm.train import main as train
from tests.support import EXHAUSTIVE
from tests.training.test_heard_run import SPECIAL as HEARD
from tests.training.test_pictured_run import SPECIAL, changed
from tests.training.test_published_run import WORDS, published


def records(place: Path) -> Path:
    """Videos of 2 to 9 frames, one of them a folder, pictures, and text alone."""
    rng = np.random.default_rng(0)
    lines = []
    for index in range(16):
        size = (*rng.integers(8, 30, 2), 3)
        frames = [
            Image.fromarray(rng.integers(0, 256, size, np.uint8))
            for _ in range(rng.integers(2, 10))
        ]
        content = [{"type": "text", "text": "what"}]
        if index == 8:
            (place / "8").mkdir()
            for frame_index, frame in enumerate(frames):
                frame.save(place / "8" / f"{frame_index}.png")
            content.insert(0, {"type": "video", "video": "8"})
        elif index % 2:
            name = f"{index}.webp"
            frames[0].save(place / name, save_all=True, append_images=frames[1:], duration=300)
            content.append({"type": "video", "video": name})
        if index % 4 == 3:
            frames[0].save(place / f"{index}.png")
            content.insert(0, {"type": "image", "image": f"{index}.png"})
        answer = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (place / "train.jsonl").write_text("".join(lines))
    return place / "train.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("golden", "overrides"),
    [
        ("qwen2_5_vl", []),
        pytest.param("qwen3_vl", ["components.vision.freeze=false"], marks=EXHAUSTIVE),
        pytest.param("qwen3_vl_moe", ["data.videos.fps=null"], marks=EXHAUSTIVE),
        pytest.param("qwen3_vl", ["mesh.data=2", "pipeline.stages=2"], marks=EXHAUSTIVE),
        pytest.param("qwen2_5_omni", ["data.videos.min_pixels=256"], marks=EXHAUSTIVE),
    ],
)
def test_a_run_reads_videos(golden, overrides, tmp_path):
    """Videos in files and folders are read, and only parts that train change."""
    hears = golden == "qwen2_5_omni"
    folder = published(tmp_path, golden, HEARD if hears else [*SPECIAL, "<|video_pad|>"])
    tree = {
        "run": {"directory": str(tmp_path / "run"), "steps": 2},
        "model": {"from": str(folder), "vision": {"videos": True}},
        "components": {"language": {"freeze": True}, "vision": {"freeze": True}},
        "data": {
            "sources": [{"name": "a", "path": str(records(tmp_path))}],
            "videos": {"folder_fps": 4.0},
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "phases": {
            name: {"block": 32, "row_classes": 1, "spans": [1]} for name in ("vision", "language")
        },
        "mesh": {"data": 4, "fsdp": 2},
        "logging": {"tensorboard": False, "every": 1},
    }
    (tmp_path / "config.yaml").write_text(write_text(tree))
    assert train(["--config", str(tmp_path / "config.yaml"), *overrides]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for line in lines if "loss" in (record := json.loads(line))]
    assert len(steps) == 2 and all(np.isfinite(record["loss"]) for record in steps)
    assert "videos: true" in (tmp_path / "run" / "config.yaml").read_text()
    changed_keys = changed(folder, tmp_path / "run", tmp_path / "out")
    patches = [key for key in changed_keys if "patch_embed.proj.weight" in key]
    assert bool(patches) == ("components.vision.freeze=false" in overrides)
    assert any("merger" in key for key in changed_keys)
