"""A tiny set-up of a model that draws.

The data has pictures and clips with captions, edits of pictures, and text alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from jaxmllm.training.programs.staged import StagedPrograms
from tests.data.media.test_latents import tensors
from tests.support import Setup, tiny_config

PATCH = 4
CHANNELS = 5  # of latents
TWO_STREAMS = {  # all that Qwen-Image has besides its two streams
    "streams": 2,
    "pooled_conditions": True,
    "norm": "layer",
    "attention_bias": True,
    "rope_origin": "centre",
    "condition_positions": "diagonal",
    "projector_layers": "normed_linear",
}


def make_pictures(folder: Path, examples: int = 24, shown: bool = True) -> Path:
    """Write a JSONL file of captions with pictures in the assistant's turns, and of text alone.

    Some pictures are followed by a clip (an animation, or a folder of frames), and some, if
    `shown`, answer one that the user shows. Every example is a source of its own.
    """
    random = np.random.default_rng(0)
    moving = np.random.default_rng(1)

    def first_frame() -> Image.Image:
        height, width = random.integers(5, 24, 2)
        return Image.fromarray(random.integers(0, 256, (height, width, 3)).astype(np.uint8))

    def picture(name: str) -> dict[str, str]:
        first_frame().save(folder / f"{name}.png")
        return {"type": "image", "image": f"{name}.png"}

    def clip(name: str) -> dict[str, str]:
        start_frame = first_frame()
        later_frames = [
            Image.fromarray(
                moving.integers(0, 256, (start_frame.height, start_frame.width, 3)).astype(np.uint8)
            )
            for _ in range(int(moving.integers(1, 5)))
        ]
        if len(later_frames) > 2:
            (folder / name).mkdir()
            for number, frame in enumerate((start_frame, *later_frames)):
                frame.save(folder / name / f"{number}.png")
            return {"type": "video", "video": name}
        start_frame.save(
            folder / f"{name}.webp", save_all=True, append_images=later_frames, lossless=True
        )
        return {"type": "video", "video": f"{name}.webp"}

    return _write(folder / "pictures.jsonl", examples, random, picture, clip, shown)


def make_latents(folder: Path, examples: int = 12) -> Path:
    """The same with latents of pictures and clips; the user shows nothing."""
    random = np.random.default_rng(0)

    def values(*frames: int) -> NDArray[np.float32]:
        sides = 2 * random.integers(1, 8, 2)
        return random.normal(size=(CHANNELS, *frames, *sides)).astype(np.float32)

    def picture(name: str) -> dict[str, str]:
        np.save(folder / f"{name}.npy", values().astype(np.float16))
        return {"type": "image", "image": f"{name}.npy"}

    def clip(name: str) -> dict[str, str]:
        latents = values(int(random.integers(2, 6)))
        (folder / f"{name}.safetensors").write_bytes(tensors(latents))
        return {"type": "video", "video": f"{name}.safetensors"}

    return _write(folder / "pictures.jsonl", examples, random, picture, clip, shown=False)


def _write(
    path: Path,
    examples: int,
    random: np.random.Generator,
    picture: Callable[[str], dict[str, str]],
    clip: Callable[[str], dict[str, str]],
    shown: bool,
) -> Path:
    """Write examples of four kinds in turn: picture, picture and clip, edit, text alone."""
    lines = []
    for i in range(examples):
        kind = i % 4
        question: list[dict[str, str]] = [
            {"type": "text", "text": "draw " + "a" * int(random.integers(1, 30))}
        ]
        answer: list[dict[str, str]] = [picture(f"{i}")]
        if kind == 1:
            answer += [{"type": "text", "text": "or so"}, clip(f"{i}-again")]
        if kind == 2 and shown:
            question.insert(0, picture(f"{i}-shown"))
        if kind == 3:
            answer = [{"type": "text", "text": "no"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(
            json.dumps({"id": f"e{i:02}", "source": f"e{i:02}", "messages": messages}) + "\n"
        )
    path.write_text("".join(lines))
    return path


def drawing_config(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a model that sees and draws pictures; `changes` are those of `tiny_config`."""
    source = [{"name": "pictures", "path": str(data / "pictures.jsonl")}]
    diffusion = {"width": 16, "layers": 2, "heads": 2, "mlp_width": 24}
    diffusion |= {"patch_size": PATCH, "patch_frames": 2}
    tiny_changes = {
        "model__vision__patch_size": 4,
        "model__diffusion": diffusion,
        "data__sources": source,
        "data__evaluation": source,
        "data__images": {"min_pixels": 16, "max_pixels": 1024},
        "data__generated": {"min_pixels": 16, "max_pixels": 1024},
        "phases__diffusion": {"block": 32, "spans": [1], "row_classes": 1},
        "objective__diffusion__condition_drop": 0.2,
    }
    tree = tiny_config(data, **(tiny_changes | changes))
    tree["model"].pop("audio", None)
    return tree


def latents_config(data: Path, **changes: Any) -> dict[str, Any]:
    """The config of a model that draws latents, and learns from them alone."""
    tree = drawing_config(
        data, model__vision=None, objective__language__weight=0.0, **LATENTS | changes
    )
    del tree["data"]["generated"]
    return tree


LATENTS: dict[str, Any] = {
    "model__diffusion__channels": CHANNELS,
    "model__diffusion__patch_size": 2,
    "model__diffusion__patch_frames": 1,
    "data__latents": {"mean": [0.5], "std": [1.0, 2.0, 3.0, 2.0, 1.0]},
}


def perturbed(params: Any) -> Any:
    """The parameters with noise added to all of them.

    Gates and outputs of a new generator are zero and would let no gradient through.
    """

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        noise = np.random.default_rng(seed).normal(size=leaf.shape, scale=0.1)
        return jax.device_put(leaf + noise.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(moved, params)


def params_of(setup: Setup) -> Any:
    """Perturbed parameters of a setup, the same with stages as without."""
    programs = setup.programs
    if not isinstance(programs, StagedPrograms):
        return perturbed(setup.params)
    joined = jax.device_get(jax.jit(programs.joined)(setup.params))
    staged = programs.staged(perturbed(jax.tree.map(jax.numpy.asarray, joined)))
    return jax.tree.map(
        lambda leaf, like: jax.device_put(leaf, like.sharding), staged, setup.params
    )
