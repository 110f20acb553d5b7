"""Makes the goldens of published families whose towers see squares of one size.

They are random tiny checkpoints and what the reference computes of texts with pictures.
make_goldens.py calls this file.

FOLDER/NAME/inputs.npz     input_ids, attention_mask, labels [B, T], pixel_values [squares, 3, S,
S],
                           and token_type_ids [B, T] where the reference asks for them
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the learned next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor
FOLDER/NAME/processed.npz  image_I [H, W, 3], and what the processor makes of them: pixels
                           [I, 3, S, S]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import write_numbers

PICTURE = 3
BEGIN = 4
END = 5  # tokens
GEMMA3: dict[str, Any] = {
    "text_config": {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": PICTURE,
    "boi_token_index": BEGIN,
    "eoi_token_index": END,
}
INTERNVL: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen2",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "image_size": [16, 16],
        "patch_size": [4, 4],
    },
    "image_token_id": PICTURE,
    "image_seq_length": 4,
    "tie_word_embeddings": False,
}
NORMED: dict[str, Any] = INTERNVL | {
    "text_config": INTERNVL["text_config"] | {"model_type": "qwen3", "head_dim": 8},
    "vision_config": INTERNVL["vision_config"]
    | {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"},
    "tie_word_embeddings": True,
}


def _internvl(config: Any) -> tuple[Any, int]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side = config.vision_config.image_size[0]
    size = {"height": side, "width": side}
    return GotOcr2ImageProcessorPil(size=size, max_patches=4), config.image_seq_length


def _gemma3(config: Any) -> tuple[Any, int]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side = config.vision_config.image_size
    return Gemma3ImageProcessorPil(size={"height": side, "width": side}), config.mm_tokens_per_image


# name -> (sections of its config, dtype, the function that makes its processor and says how many
# tokens a square has)
SQUARE: Mapping[str, tuple[dict[str, Any], str, Callable[[Any], tuple[Any, int]]]] = {
    "gemma3-tower": (GEMMA3, "bfloat16", _gemma3),
    "internvl": (INTERNVL, "bfloat16", _internvl),
    "internvl-normed": (NORMED, "bfloat16", _internvl),
}
CUT = ("internvl",)  # families whose pictures are cut into tiles
TYPED = ("gemma3",)  # model types that ask for token types
# Key biases of towers, whose gradient is 0: softmax does not see what all keys share.
SHARED = re.compile(r".*vision_tower\.encoder\..*k_proj\.bias")
ODD = ((37, 53), (120, 31), (9, 12))  # heights and widths of pictures
TEXTS = ((6, "a", 4, "a", 3), (9,), (2, "a", 5))  # numbers of tokens, and pictures


def make_square(
    folder: Path,
    sections: dict[str, Any],
    dtype: str,
    processor_of: Callable[[Any], tuple[Any, int]],
    seed: int,
) -> None:
    """Makes one random checkpoint, and what the reference computes of it in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.for_model(folder.name.partition("-")[0], **sections)
    eager = {"attn_implementation": "eager"}
    model = AutoModelForImageTextToText.from_config(config, **eager)
    for key, parameter in model.named_parameters():
        centre = float(parameter.ndim == 1 and parameter.mean() > 0.5)  # 1 for the scale of a norm
        scale = 0.5 if "projector" in key else 0.2
        torch.nn.init.normal_(parameter, centre, scale)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **eager)
    processor, tokens = processor_of(config)
    processor.save_pretrained(folder)
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (*size, 3)).astype(np.uint8) for size in ODD]
    crop_options = {"crop_to_patches": True} if config.model_type in CUT else {}
    processed = processor(images=images, **crop_options)
    pixels = np.stack(processed["pixel_values"])
    tiles = processed["num_patches"] if crop_options else [1] * len(images)
    vocabulary = config.get_text_config().vocab_size
    inputs = _texts(random, [tokens * count for count in tiles], vocabulary)
    inputs["pixel_values"] = pixels
    if config.model_type in TYPED:
        inputs["token_type_ids"] = (inputs["input_ids"] == PICTURE).astype(np.int64)
    output = model(**{key: torch.tensor(value) for key, value in inputs.items()})
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    stored = _keys_in_files(folder)
    gradients = {
        stored[_plain(key)]: parameter.grad.numpy()
        for key, parameter in model.named_parameters()
        # No loss reaches a tower's head, and key biases of the tower have no gradient.
        if parameter.grad is not None and not SHARED.fullmatch(key)
    }
    write_numbers(folder, inputs, logits, loss, gradients)
    pictures = {f"image_{i}": image for i, image in enumerate(images)}
    np.savez_compressed(folder / "processed.npz", pixels=pixels, **pictures)


def _texts(
    random: np.random.Generator, tokens: list[int], vocabulary: int
) -> dict[str, np.ndarray]:
    """Texts in which pictures alternate with tokens. No token of a picture is learned."""
    rows = []
    picture_tokens = iter(tokens)
    for text in TEXTS:
        ids: list[int] = []
        for piece in text:
            if isinstance(piece, int):
                ids += random.integers(END + 1, vocabulary, piece).tolist()
            else:
                ids += [BEGIN, *[PICTURE] * next(picture_tokens), END]
        rows.append(ids)
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.arange(length) < np.array([len(row) for row in rows])[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "labels": np.where(mask & (ids != PICTURE), ids, -100),
    }


def _plain(key: str) -> str:
    """A key without its prefix, so that memory and files have the same keys."""
    key = key.removeprefix("model.").replace("language_model.model.", "language_model.")
    return key.removeprefix("language_model.")


def _keys_in_files(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {_plain(key): key for key in index["weight_map"]}
