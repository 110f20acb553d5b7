"""A tiny set-up of a model that draws: pictures with captions, edits of pictures, and text alone."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from tests.support import tiny_config

PATCH = 4


def make_pictures(folder: Path, examples: int = 24, shown: bool = True) -> Path:
    """A JSONL file of captions with pictures in the assistant's turns, some after another picture or (`shown`) of
    one that the user shows, and of text alone; every example is a source of its own."""
    random = np.random.default_rng(0)
    lines = []

    def picture(name: str) -> dict[str, str]:
        height, width = random.integers(5, 24, 2)
        pixels = random.integers(0, 256, (height, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name)
        return {"type": "image", "image": name}

    for i in range(examples):
        kind = i % 4
        asked: list[dict[str, str]] = [
            {"type": "text", "text": "draw " + "a" * int(random.integers(1, 30))}
        ]
        answer: list[dict[str, str]] = [picture(f"{i}.png")]
        if kind == 1:
            answer += [{"type": "text", "text": "or so"}, picture(f"{i}-again.png")]
        if kind == 2 and shown:
            asked.insert(0, picture(f"{i}-shown.png"))
        if kind == 3:
            answer = [{"type": "text", "text": "no"}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(
            json.dumps({"id": f"e{i:02}", "source": f"e{i:02}", "messages": messages}) + "\n"
        )
    path = folder / "pictures.jsonl"
    path.write_text("".join(lines))
    return path


def drawing_config(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a model that sees and draws pictures; `changes` as of `tiny_config`."""
    source = [{"name": "pictures", "path": str(data / "pictures.jsonl")}]
    diffusion = {"width": 16, "layers": 2, "heads": 2, "mlp_width": 24, "patch_size": PATCH}
    small = {
        "model__vision__patch_size": 4,
        "model__diffusion": diffusion,
        "data__sources": source,
        "data__evaluation": source,
        "data__images": {"min_pixels": 16, "max_pixels": 1024},
        "data__generated": {"min_pixels": 16, "max_pixels": 1024},
        "phases__diffusion": {"block": 32, "spans": [1], "row_classes": 1},
        "objective__diffusion__condition_drop": 0.2,
    }
    tree = tiny_config(data, **(small | changes))
    tree["model"].pop("audio", None)
    return tree


def perturbed(params: Any) -> Any:
    """Parameters of which none is zero: gates and outputs of a new generator are, and let no gradient through."""

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = np.random.default_rng(seed).normal(size=leaf.shape, scale=0.1)
        return jax.device_put(leaf + noise.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(moved, params)
