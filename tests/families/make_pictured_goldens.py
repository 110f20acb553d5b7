"""Makes the goldens of published families that read pictures: random tiny checkpoints and what the
reference computes of texts with pictures. make_goldens.py calls this file.

FOLDER/NAME/inputs.npz     input_ids, attention_mask, mm_token_type_ids, labels [B, T],
                           pixel_values [patches, numbers], image_grid_thw [pictures, 3]
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the learned next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor
FOLDER/NAME/processed.npz  for one: image_I [H, W, 3], and the processor's pixels_I [n, numbers] and
                           grid_I [3]; bounds [K, 2] of pixels, sizes [N, 2], and what these
                           become, resized [K, N, 2]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import write_numbers

TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,  # two merged cells
    "out_hidden_size": 16,
    "fullatt_block_indexes": [1],
}
INTERLEAVED = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
TEXT_3 = TEXT | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "rope_parameters": INTERLEAVED | {"mrope_section": [2, 1, 1]},
}
VISION_3 = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
# name -> (sizes of text, of vision, whether embedding and head are one matrix, dtype, and whether
# its keys, config.json or tensors are spelled in another way than the reference writes them)
PICTURED: Mapping[str, tuple[dict[str, Any], dict[str, Any], bool, str, bool]] = {
    "qwen2_5_vl": (
        TEXT
        | {"hidden_size": 24, "num_attention_heads": 4}
        | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [1, 1, 1]}},
        VISION | {"out_hidden_size": 24},
        True,
        "float32",
        False,
    ),
    "qwen2_5_vl-flat": (
        TEXT | {"rms_norm_eps": 1e-6},
        VISION | {"depth": 2, "fullatt_block_indexes": [0, 7]},
        False,
        "bfloat16",
        True,
    ),
    "qwen3_vl": (TEXT_3, VISION_3, True, "bfloat16", False),
    "qwen3_vl-biased": (
        TEXT_3
        | {"head_dim": 16, "attention_bias": True, "hidden_size": 24}
        | {"rope_parameters": INTERLEAVED | {"mrope_section": [3, 3, 2]}},
        VISION_3 | {"out_hidden_size": 24, "deepstack_visual_indexes": [1]},
        False,
        "bfloat16",
        False,
    ),
    "qwen3_vl_moe": (
        TEXT_3
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"num_hidden_layers": 2},
        VISION_3 | {"deepstack_visual_indexes": [0, 1]},
        False,
        "bfloat16",
        True,
    ),
}
# Other kernels require sizes that no test here has.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
PROCESSED = "qwen2_5_vl"  # the one with a processed.npz
BEGIN = 3
END = 4
PICTURE = 5  # tokens
CELLS = {"tall": (3, 2), "small": (1, 1), "wide": (2, 5)}  # rows and columns of merged cells
TEXTS = ((6, "tall", 4, "small", 3), (9,), (2, "wide", 5))  # numbers of tokens, and pictures
ODD = ((37, 53), (200, 31), (9, 12), (70, 64))  # heights and widths that are resized
# Smallest and largest numbers of pixels of a picture: as published, the default of processors, and
# a narrow range.
BOUNDS = ((3_136, 12_845_056), (3_136, 1_003_520), (1_568, 3_136))


def make_pictured(
    folder: Path,
    text: dict[str, Any],
    vision: dict[str, Any],
    tied: bool,
    dtype: str,
    spelled_otherwise: bool,
    seed: int,
) -> None:
    """Makes one random checkpoint, and what the reference computes of it in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    tokens = {"vision_start_token_id": BEGIN, "vision_end_token_id": END, "image_token_id": PICTURE}
    sections = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(folder.name.partition("-")[0], **sections, **tokens)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        is_scale = parameter.ndim == 1 and parameter.mean() > 0.5  # a norm's scale, whose mean is 1
        torch.nn.init.normal_(parameter, float(is_scale), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
    if spelled_otherwise and "num_experts" in text:
        _transpose_experts(folder)
    elif spelled_otherwise:
        _spell_otherwise(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **EAGER)
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"], min_pixels=8 * 8, max_pixels=8 * 8 * 12
    )
    processor.save_pretrained(folder)
    random = np.random.default_rng(seed)
    inputs = _texts_with_pictures(random, processor, text["vocab_size"])
    output = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    stored = keys_in_files(folder)
    file_gradients = {stored[plain_key(key)]: as_stored(key, g) for key, g in gradients.items()}
    write_numbers(folder, inputs, logits, loss, file_gradients)
    if folder.name == PROCESSED:
        np.savez_compressed(folder / "processed.npz", **_processed(random, processor))


def _processed(random: np.random.Generator, processor: Any) -> dict[str, np.ndarray]:
    """Resized pictures, and the grids of many sizes, from icons to posters, thin ones among them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    arrays: dict[str, Any] = {}
    for i, size in enumerate(ODD):
        image = random.integers(0, 256, (*size, 3)).astype(np.uint8)
        processed = processor(images=image, return_tensors="np")
        arrays |= {f"image_{i}": image, f"pixels_{i}": processed["pixel_values"]}
        arrays[f"grid_{i}"] = processed["image_grid_thw"][0]
    sizes = np.exp(random.uniform(np.log(4), np.log(6000), (600, 2))).round().astype(np.int32)
    sizes = sizes[sizes.max(axis=1) <= 200 * sizes.min(axis=1)]
    resized = [[smart_resize(*size, 28, *bounds) for size in sizes.tolist()] for bounds in BOUNDS]
    return arrays | {"bounds": BOUNDS, "sizes": sizes, "resized": np.array(resized, np.int32)}


def _texts_with_pictures(
    random: np.random.Generator, processor: Any, vocabulary: int
) -> dict[str, np.ndarray]:
    """Texts in which pictures alternate with tokens. No token of a picture is learned."""
    cell = processor.patch_size * processor.merge_size
    rows = []
    images = []
    for text in TEXTS:
        ids: list[int] = []
        for piece in text:
            if isinstance(piece, int):
                ids += random.integers(PICTURE + 3, vocabulary, piece).tolist()
                continue
            height, width = CELLS[piece]
            size = height * cell, width * cell, 3
            images.append(random.integers(0, 256, size).astype(np.uint8))
            ids += [BEGIN, *[PICTURE] * height * width, END]
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    processed = processor(images=images, return_tensors="np")
    return {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "mm_token_type_ids": (ids == PICTURE).astype(np.int64),
        "labels": np.where(mask & (ids != PICTURE), ids, -100),
        "pixel_values": processed["pixel_values"],
        "image_grid_thw": processed["image_grid_thw"],
    }


def plain_key(key: str) -> str:
    """A key without its prefix, so that files of one spelling or another have the same keys."""
    key = key.removeprefix("model.")
    return key.removeprefix("language_model.")


def as_stored(key: str, values: np.ndarray) -> np.ndarray:
    """A tensor as the files hold it."""
    return values.swapaxes(1, 2) if ".experts." in key else values


def keys_in_files(folder: Path) -> dict[str, str]:
    """The keys of a folder's files, by plain key."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {plain_key(key): key for key in index["weight_map"]}


def _transpose_experts(folder: Path) -> None:
    """Transposes the tensors of experts, as they are published. The reference reads both layouts."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {
            key: tensor.transpose(1, 2).contiguous() if ".experts." in key else tensor
            for key, tensor in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})


def _spell_otherwise(folder: Path) -> None:
    """Writes the keys that transformers has in memory, and a config.json without a text section.

    This is how the first checkpoints were published."""
    from safetensors.torch import load_file, save_file

    def key_in_memory(key: str) -> str:
        if key.startswith("visual."):
            return f"model.{key}"
        return key.replace("model.", "model.language_model.", 1)

    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for name in {*index["weight_map"].values()}:
        tensors = load_file(folder / name)
        renamed = {key_in_memory(key): tensor for key, tensor in tensors.items()}
        save_file(renamed, folder / name, metadata={"format": "pt"})
    names = {key_in_memory(key): name for key, name in index["weight_map"].items()}
    index_file.write_text(json.dumps(index | {"weight_map": names}, indent=2))
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rotary = text.pop("rope_parameters")
    config["vision_config"]["model_type"] = config["model_type"]
    legacy_rotary = {
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rotary["mrope_section"]},
    }
    (folder / "config.json").write_text(json.dumps(text | legacy_rotary | config, indent=2))
