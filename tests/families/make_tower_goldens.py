"""Makes the goldens of published towers: random tiny checkpoints and what the reference computes.

python -m tests.families.make_tower_goldens FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/NAME/               config.json, preprocessor_config.json, safetensors, as the reference
                           writes them
FOLDER/NAME/inputs.npz     image_I [H, W, 3] of sizes that are not resized, or sound_I [N];
                           direction_I [n, D]
FOLDER/NAME/reference.npz  features_I [n, D], row by row
FOLDER/NAME/gradients.npz  gradients of sum(features_I * direction_I), by key of the tensor
FOLDER/NAME/processed.npz  image_I of other sizes, and the processor's pixels_I [n, P * P * 3] and
                           grid_I; or mel_I [n, M] of the sounds above
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import compact

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
    "siglip": ("siglip", True, {"image_size": SIDE}, "bfloat16"),
    "siglip-tower": (
        "siglip",
        False,
        {"image_size": SIDE, "hidden_act": "gelu", "vision_use_head": False},
        "bfloat16",
    ),
    "siglip2": ("siglip2", True, {"num_patches": 16}, "bfloat16"),
    "siglip2-tower": ("siglip2", False, {"num_patches": 9}, "float32"),
}
WHISPER = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 12,
    "max_source_positions": 50,  # chunks of one second
    "max_target_positions": 8,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# name -> (whether the model has a head, dtype)
ENCODERS = {"whisper": (True, "bfloat16"), "whisper-headless": (False, "bfloat16")}
SAMPLES = (16_000, 1_600, 7_777)  # of sounds at 16 kHz: a whole chunk, whole frames, and neither
PATCHES = 16  # at most, of an image
SQUARES = ((SIDE, SIDE), (SIDE, SIDE))
ANY_SIZE = ((28, 28), (14, 56), (56, 14))
ODD = ((37, 53), (120, 31), (9, 12))  # heights and widths that are resized
# Of the processors beside a tower alone.
COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}


def main(folder: Path, names: tuple[str, ...] = (*MODELS, *ENCODERS), seed: int = 0) -> None:
    """Writes the checkpoints and goldens of these names."""
    for name in names:
        if name in ENCODERS:
            make_encoder(folder / name, *ENCODERS[name], seed)
            continue
        model_type, has_text_tower, changes, dtype = MODELS[name]
        make(folder / name, model_type, has_text_tower, SIZES | changes, dtype, seed)


def make(
    folder: Path, model_type: str, whole: bool, values: dict[str, Any], dtype: str, seed: int
) -> None:
    """Makes one random checkpoint, and what the reference computes of it in float32."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(seed)
    config = AutoConfig.for_model(f"{model_type}_vision_model", **values)
    if whole:
        config = AutoConfig.for_model(model_type, text_config=TEXT, vision_config=config.to_dict())
    model = AutoModel.from_config(config)
    _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tower = model.vision_model if whole else model
    processor = _processor(model_type, whole)
    processor.save_pretrained(folder)
    random = np.random.default_rng(seed)
    sizes = SQUARES if model_type == "siglip" else ANY_SIZE
    images = [_picture(random, *size) for size in sizes]
    features = [_features(tower, processor, image) for image in images]
    _save(folder, model, "image", images, features, random)
    processed = {}
    for i, size in enumerate(ODD):
        image = _picture(random, *size)
        pixels, grid = _patches(processor, image)
        processed |= {f"image_{i}": image, f"pixels_{i}": pixels, f"grid_{i}": np.array(grid)}
    np.savez_compressed(folder / "processed.npz", **processed)


def make_encoder(folder: Path, head: bool, dtype: str, seed: int) -> None:
    """Makes the same for an audio encoder with a decoder beside it."""
    import torch
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperModel,
    )

    torch.manual_seed(seed)
    kind = WhisperForConditionalGeneration if head else WhisperModel
    model = kind(WhisperConfig(**WHISPER))
    _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    extractor = WhisperFeatureExtractor(feature_size=WHISPER["num_mel_bins"], chunk_length=1)
    extractor.save_pretrained(folder)
    encoder = model.get_encoder()
    encoder.embed_positions.requires_grad_(True)  # the reference freezes these
    random = np.random.default_rng(seed)
    sounds = [_sound(random, count) for count in SAMPLES]
    mels = [
        extractor(sound / 32768, sampling_rate=16_000, return_tensors="pt")["input_features"]
        for sound in sounds
    ]
    features = [encoder(mel).last_hidden_state[0] for mel in mels]
    _save(folder, model, "sound", sounds, features, random)
    np.savez_compressed(
        folder / "processed.npz", **{f"mel_{i}": mel[0].numpy().T for i, mel in enumerate(mels)}
    )


def _randomize(model: Any) -> None:
    import torch

    for parameter in model.parameters():
        # 1 for the scales of norms.
        mean = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0
        torch.nn.init.normal_(parameter, mean, 0.2)


def _save(
    folder: Path,
    model: Any,
    kind: str,
    media: list[np.ndarray],
    features: list[Any],
    random: np.random.Generator,
) -> None:
    """Saves the inputs, the features, and the gradients of the features in random directions."""
    import torch

    inputs: dict[str, Any] = {f"{kind}_{i}": medium for i, medium in enumerate(media)}
    reference = {}
    total = torch.zeros(())
    for i, feature in enumerate(features):
        direction = random.choice(np.float32([-1, 1]), feature.shape)
        total = total + (feature * torch.tensor(direction)).sum()
        inputs[f"direction_{i}"] = direction
        reference[f"features_{i}"] = feature.detach().numpy()
    total.backward()
    gradients = {
        key: parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    np.savez_compressed(folder / "inputs.npz", **inputs)
    np.savez_compressed(folder / "reference.npz", **reference)
    np.savez_compressed(folder / "gradients.npz", **gradients)


def _sound(random: np.random.Generator, count: int) -> np.ndarray:
    """Two tones with noise, in 16 bits, loud to the end."""
    times = np.arange(count) / 16_000
    tones = np.sin(2 * np.pi * 440 * times) + np.sin(2 * np.pi * 1_234 * times)
    return (6_000 * tones + 800 * random.standard_normal(count)).astype(np.int16)


def _processor(model_type: str, whole: bool) -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    colors = {} if whole else COLORS
    if model_type == "siglip":
        return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **colors)
    return Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=PATCHES, **colors)


def _picture(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Waves with noise, which tell kernels and orders of patches apart."""
    rows, columns, colors = np.ogrid[:height, :width, :3]
    waves = np.sin(rows / 5 + colors) + np.cos(columns / 7 - colors)
    noise = random.standard_normal((height, width, 3))
    return (128 + 40 * waves + 15 * noise).clip(0, 255).astype(np.uint8)


def _features(tower: Any, processor: Any, image: np.ndarray) -> Any:
    """The features [n, D] of one image, without padding."""
    inputs = processor(images=image, return_tensors="pt")
    real_patches = (
        inputs["pixel_attention_mask"][0].bool()
        if "pixel_attention_mask" in inputs
        else slice(None)
    )
    return tower(**inputs).last_hidden_state[0][real_patches]


def _patches(processor: Any, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """What the processor makes of an image, patch by patch, and its rows and columns of patches."""
    inputs = processor(images=image, return_tensors="np")
    pixels = inputs["pixel_values"][0]
    if "spatial_shapes" in inputs:
        grid = tuple(inputs["spatial_shapes"][0].tolist())
        return pixels[: grid[0] * grid[1]], grid
    side = SIDE // PATCH
    patches = pixels[:, : side * PATCH, : side * PATCH].reshape(3, side, PATCH, side, PATCH)
    return patches.transpose(1, 3, 2, 4, 0).reshape(side**2, -1), (side, side)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    compact(Path(sys.argv[1]))
