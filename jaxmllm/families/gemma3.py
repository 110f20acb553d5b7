"""Gemma 3: windows in five of six layers, which have a rotary base of their own; zero-centred norms
before and after attention and MLP.

gemma3_text  a decoder alone
gemma3       decoder, the vision tower of SigLIP, and a projector of means of its features

The tokens of a picture see one another, and have consecutive positions.
"""

from __future__ import annotations

import math
from typing import Any

from jaxmllm.families.dense_decoder import (
    COPIES,
    LANGUAGE,
    LAYER_TYPES,
    decoder_family,
    dense_decoder,
    head_variant,
    windows_by_type,
)
from jaxmllm.families.family import Family, Processor, patterns
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.siglip import CARRIED as HEADS
from jaxmllm.families.siglip import PARAMETERS as TOWER
from jaxmllm.families.siglip import patch_letters, square_processor, square_tower

DEFAULTS = {  # for keys that published files leave out
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}
LAYER = "layers.{layer}"
TEXT_PARAMETERS = LANGUAGE | {
    "layers.post_attention_norm.scale": f"{LAYER}.post_attention_layernorm.weight: d -> layer d",
    "layers.mlp_norm.scale": f"{LAYER}.pre_feedforward_layernorm.weight: d -> layer d",
    "layers.post_mlp_norm.scale": f"{LAYER}.post_feedforward_layernorm.weight: d -> layer d",
}
PROJECTOR = {
    "norm.scale": "mm_soft_emb_norm.weight: i -> i",
    "linear": "mm_input_projection_weight: i d -> i d",
}
PREFIXES = ("model.language_model.", "language_model.model.")  # as of transformers 5, and before
IN_VISION = tuple(
    f"{prefix}vision_tower.{inner}" for prefix in ("model.", "") for inner in ("vision_model.", "")
)
IN_PROJECTOR = ("model.multi_modal_projector.", "multi_modal_projector.")
OTHER_PARTS = ("vision_tower.*", "multi_modal_projector.*")
NOT_TEXT = (*OTHER_PARTS, *(f"model.{part}" for part in OTHER_PARTS))
TEXT = ("model.language_model.*", "language_model.*", "lm_head.weight")
BILINEAR = 2  # Pillow's number


def _text(config: FolderConfig) -> dict[str, Any]:
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("attn_logit_softcapping", None)
    config.expect("final_logit_softcapping", None)
    config.expect("use_bidirectional_attention", False)
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        config.refuse("has no sliding_window", "the layers that attend in windows need one")
    config = config.completed(DEFAULTS)
    windowed = _windowed_layers(config)
    full, local = _full_and_local_rotary(config)
    bias = config.flag("attention_bias")
    return dense_decoder(
        config.updated(rope_parameters=full, rope_scaling=None),
        windowed,
        window_rope_theta=local if any(windowed) else None,
        attention_scale=_positive_number(config, "query_pre_attn_scalar") ** -0.5,
        activation="gelu_tanh",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm="zero_centred_rms",
        post_norms=True,
        scale_embedding=True,
    )


def _windowed_layers(config: FolderConfig) -> tuple[bool, ...]:
    """Whether each layer attends in windows: `layer_types`, or in older files all layers except
    every n-th (`sliding_window_pattern`)."""
    if config.get("layer_types") is not None:
        return windows_by_type(config)
    every = _positive_number(config, "sliding_window_pattern")
    return tuple((layer + 1) % every != 0 for layer in range(config.count("num_hidden_layers")))


def _positive_number(config: FolderConfig, key: str) -> Any:
    value = config.number(key)
    if value <= 0:
        config.refuse(f"has {key} {value!r}", "it must be greater than 0")
    return value


def _full_and_local_rotary(config: FolderConfig) -> tuple[dict[str, Any], float]:
    """(record of layers that see everything, theta of layers with windows), in either spelling."""
    records = config.get("rope_parameters", {})
    if not isinstance(records, dict) or not records.keys() <= {*LAYER_TYPES}:
        config.refuse(
            f"has rope_parameters {records!r}",
            f"those of {' and '.join(LAYER_TYPES)} are understood",
        )
    full, local = (records.get(kind) or {} for kind in LAYER_TYPES)
    scaling = config.get("rope_scaling", {})
    for record in (full, local, scaling):
        if not isinstance(record, dict):
            config.refuse(f"has rotary parameters {record!r}", "they must be a JSON object")
    if local.get("rope_type", "default") != "default":
        config.refuse(
            f"has rope_type {local['rope_type']!r} of {LAYER_TYPES[1]}",
            "positions of windows are not scaled",
        )
    full = {"rope_theta": config.number("rope_theta")} | full | scaling
    if full.get("rope_type", full.get("type")) == "yarn":  # it multiplies queries and keys, too
        config.refuse(
            f"has rope_type 'yarn' of {LAYER_TYPES[0]}",
            "beside windows, linear and llama3 are understood",
        )
    return full, float(local.get("rope_theta", config.number("rope_local_base_freq")))


def _decoder(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.language` in a folder with a vision tower."""
    text = config.part("text_config")
    for part in (config, text):
        part.expect("tie_word_embeddings", True)
    return _text(text) | {"media_positions": "line"}


def _tower(config: FolderConfig) -> dict[str, Any]:
    config.part("vision_config").expect("model_type", "siglip_vision_model")
    return square_tower(config)


def _projector(config: FolderConfig) -> dict[str, Any]:
    """The keys of the projector in the section of the tower."""
    tower = _tower(config)
    language = _decoder(config)
    tokens = config.count("mm_tokens_per_image", 256)
    grid = tower["position_grid"]
    side = math.isqrt(tokens)
    if not side or side**2 != tokens or grid % side:
        config.refuse(
            f"has mm_tokens_per_image {tokens}",
            f"squares of {grid} patches a side become a square of tokens, each of whole patches",
        )
    window = language.get("window")
    if (
        window is not None and window < tokens
    ):  # in the reference, windows also cut attention within a picture
        config.refuse(
            f"has mm_tokens_per_image {tokens} and sliding_window {window}",
            "a picture must fit into a window",
        )
    shapes = {"linear": True, "bias": False, "grouping": "mean", "norm": "zero_centred_rms"}
    return {
        "merge": grid // side,
        "projector": shapes | {"norm_epsilon": tower["norm_epsilon"]},
    }


def _processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    file.expect("do_pan_and_scan", False)
    return square_processor(file, section, BILINEAR)


ALONE = decoder_family("Gemma 3", "gemma3_text", _text, TEXT_PARAMETERS)
BESIDE_TOWER = Family(
    "Gemma 3",
    "gemma3",
    _decoder,
    {path: line for path, line in TEXT_PARAMETERS.items() if path != "head"},
    COPIES,
    NOT_TEXT,
    prefixes=PREFIXES,
    unprefixed=("head",),
    variants=(head_variant("language_model.lm_head.weight"),),  # a copy, before transformers 5
)
VISION = Family(
    "Gemma 3",
    "gemma3",
    _tower,
    TOWER,
    copies={},
    carried=(*TEXT, *patterns(PROJECTOR.values(), IN_PROJECTOR), *patterns(HEADS, IN_VISION)),
    component="vision",
    prefixes=IN_VISION,
    letters=patch_letters,
    processor=_processor,
)
OF_VISION = Family(
    "Gemma 3",
    "gemma3",
    _projector,
    PROJECTOR,
    copies={},
    carried=(*TEXT, *(pattern for pattern in NOT_TEXT if "vision" in pattern)),
    component="projector.vision",
    prefixes=IN_PROJECTOR,
)
GEMMA3 = (ALONE, BESIDE_TOWER, VISION, OF_VISION)
