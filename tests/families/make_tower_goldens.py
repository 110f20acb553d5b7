"""Makes the goldens of published vision towers, with the reference: random tiny checkpoints, and what it makes of them.

python -m tests.families.make_tower_goldens FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/NAME/               config.json, preprocessor_config.json, safetensors, as the reference writes them
FOLDER/NAME/inputs.npz     image_I [H, W, 3] of sizes that are not resized, direction_I [n, D]
FOLDER/NAME/reference.npz  features_I [n, D], row by row
FOLDER/NAME/gradients.npz  of sum(features_I * direction_I), by key of the tensor
FOLDER/NAME/processed.npz  image_I of other sizes; of the processor pixels_I [n, P * P * 3] (row, column, color), grid_I
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PATCH = 7
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}
TEXT = SIZES | {"vocab_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 4}
SIDE = 30  # of square images: two pixels more than four patches
# name -> (model_type, whether the folder has a text tower, what differs from SIZES, dtype)
MODELS: Mapping[str, tuple[str, bool, dict[str, Any], str]] = {
    "siglip": ("siglip", True, {"image_size": SIDE}, "float32"),
    "siglip-tower": (
        "siglip",
        False,
        {"image_size": SIDE, "hidden_act": "gelu", "vision_use_head": False},
        "bfloat16",
    ),
    "siglip2": ("siglip2", True, {"num_patches": 16}, "float32"),
    "siglip2-tower": ("siglip2", False, {"num_patches": 9}, "float32"),
}
PATCHES = 16  # of an image, at most
SQUARES = ((SIDE, SIDE), (SIDE, SIDE))
ANY_SIZE = ((28, 28), (14, 56), (56, 14))
ODD = ((37, 53), (200, 31), (9, 12))  # heights and widths that are resized
COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}  # of some processors


def main(folder: Path, names: tuple[str, ...] = tuple(MODELS), seed: int = 0, **sizes: Any) -> None:
    """Write the checkpoints and goldens of these names, with other sizes if given."""
    for name in names:
        model_type, whole, changes, dtype = MODELS[name]
        make(folder / name, model_type, whole, SIZES | changes | sizes, dtype, seed)


def make(
    folder: Path, model_type: str, whole: bool, values: dict[str, Any], dtype: str, seed: int
) -> None:
    """One random checkpoint, and what the reference computes of it in float32."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    config = AutoConfig.for_model(f"{model_type}_vision_model", **values)
    if whole:
        config = AutoConfig.for_model(model_type, text_config=TEXT, vision_config=config.to_dict())
    model = AutoModel.from_config(config)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0  # scales of norms
        torch.nn.init.normal_(parameter, mean, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tower = model.vision_model if whole else model
    processor = _processor(model_type, whole)
    processor.save_pretrained(folder)
    random = np.random.default_rng(seed)
    sizes = SQUARES if model_type == "siglip" else ANY_SIZE
    images = [_picture(random, *size) for size in sizes]
    inputs: dict[str, Any] = {f"image_{i}": image for i, image in enumerate(images)}
    reference, total = {}, 0
    for i, image in enumerate(images):
        features = _features(tower, processor, image)
        direction = random.standard_normal(features.shape).astype(np.float32)
        total = total + (features * torch.tensor(direction)).sum()
        inputs[f"direction_{i}"] = direction
        reference[f"features_{i}"] = features.detach().numpy()
    total.backward()
    gradients = {
        key: parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    np.savez_compressed(folder / "inputs.npz", **inputs)
    np.savez_compressed(folder / "reference.npz", **reference)
    np.savez_compressed(folder / "gradients.npz", **gradients)
    processed = {}
    for i, size in enumerate(ODD):
        image = _picture(random, *size)
        pixels, grid = _patches(processor, image)
        processed |= {f"image_{i}": image, f"pixels_{i}": pixels, f"grid_{i}": np.array(grid)}
    np.savez_compressed(folder / "processed.npz", **processed)


def _processor(model_type: str, whole: bool) -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    colors = {} if whole else COLORS
    if model_type == "siglip":
        return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **colors)
    return Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=PATCHES, **colors)


def _picture(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Waves with noise, so that kernels and orders of patches show."""
    rows, columns, colors = np.ogrid[:height, :width, :3]
    waves = np.sin(rows / 5 + colors) + np.cos(columns / 7 - colors)
    noise = random.standard_normal((height, width, 3))
    return (128 + 40 * waves + 15 * noise).clip(0, 255).astype(np.uint8)


def _features(tower: Any, processor: Any, image: np.ndarray) -> Any:
    """Of one image, [n, D]."""
    inputs = processor(images=image, return_tensors="pt")
    real = (
        inputs["pixel_attention_mask"][0].bool()
        if "pixel_attention_mask" in inputs
        else slice(None)
    )
    return tower(**inputs).last_hidden_state[0][real]


def _patches(processor: Any, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """What the processor makes of an image, by patch, and the rows and columns of patches."""
    inputs = processor(images=image, return_tensors="np")
    pixels = inputs["pixel_values"][0]
    if "spatial_shapes" in inputs:
        grid = tuple(inputs["spatial_shapes"][0].tolist())
        return pixels[: grid[0] * grid[1]], grid
    side = SIDE // PATCH
    cut = pixels[:, : side * PATCH, : side * PATCH].reshape(3, side, PATCH, side, PATCH)
    return cut.transpose(1, 3, 2, 4, 0).reshape(side**2, -1), (side, side)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
