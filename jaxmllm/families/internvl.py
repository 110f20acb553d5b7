"""InternVL3 and 3.5, as transformers writes them: the decoder of Qwen2.5 or Qwen3, InternViT, and a
projector that norms four neighbouring features, concatenated. Pictures become tiles. Videos are
not read.

The first learned position is that of the class token.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import COPIES, FREQUENCIES, LANGUAGE, head_variant
from jaxmllm.families.family import Family, Processor, patterns, together
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.qwen2 import QWEN2
from jaxmllm.families.qwen2_5_vl import MEAN, STD
from jaxmllm.families.qwen3 import QWEN3
from jaxmllm.families.siglip import GELU, patch_letters, square_processor

KIND = "internvl"
DECODERS = {family.model_type: family for family in (QWEN2, QWEN3)}
LAYER = "encoder.layer.{layer}"
ATTENTION = f"{LAYER}.attention"
VISION = {
    "patch": "embeddings.patch_embeddings.projection.weight: d c p q -> (p q c) d",
    "patch_bias": "embeddings.patch_embeddings.projection.bias: d -> d",
    "class_token": "embeddings.cls_token: one s d -> one s d",
    "position_embedding": "embeddings.position_embeddings: one r d -> one r d",
    "layers.attention_norm.scale": f"{LAYER}.layernorm_before.weight: d -> layer d",
    "layers.attention_norm.bias": f"{LAYER}.layernorm_before.bias: d -> layer d",
    "layers.attention.query": f"{ATTENTION}.q_proj.weight: (h k) d -> layer d h k",
    "layers.attention.query_bias": f"{ATTENTION}.q_proj.bias: (h k) -> layer h k",
    "layers.attention.query_norm.scale": f"{ATTENTION}.q_norm.weight: (h k) -> layer h k",
    "layers.attention.key": f"{ATTENTION}.k_proj.weight: (h k) d -> layer d h k",
    "layers.attention.key_bias": f"{ATTENTION}.k_proj.bias: (h k) -> layer h k",
    "layers.attention.key_norm.scale": f"{ATTENTION}.k_norm.weight: (h k) -> layer h k",
    "layers.attention.value": f"{ATTENTION}.v_proj.weight: (h k) d -> layer d h k",
    "layers.attention.value_bias": f"{ATTENTION}.v_proj.bias: (h k) -> layer h k",
    "layers.attention.out": f"{ATTENTION}.projection_layer.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{ATTENTION}.projection_layer.bias: d -> layer d",
    "layers.attention_scale": f"{LAYER}.lambda_1: d -> layer d",
    "layers.mlp_norm.scale": f"{LAYER}.layernorm_after.weight: d -> layer d",
    "layers.mlp_norm.bias": f"{LAYER}.layernorm_after.bias: d -> layer d",
    "layers.mlp.up": f"{LAYER}.mlp.fc1.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.mlp.fc1.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.mlp.fc2.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.mlp.fc2.bias: d -> layer d",
    "layers.mlp_scale": f"{LAYER}.lambda_2: d -> layer d",
    "norm.scale": "layernorm.weight: d -> d",
    "norm.bias": "layernorm.bias: d -> d",
}
PROJECTOR = {
    "norm.scale": "layer_norm.weight: i -> i",
    "norm.bias": "layer_norm.bias: i -> i",
    "mlp.up": "linear_1.weight: f i -> i f",
    "mlp.up_bias": "linear_1.bias: f -> f",
    "mlp.down": "linear_2.weight: d f -> f d",
    "mlp.down_bias": "linear_2.bias: d -> d",
}
PROJECTOR_EPSILON = 1e-5
# Prefixes as transformers 5 has them in memory, and as they are published
IN_LANGUAGE = ("model.language_model.", "language_model.model.")
IN_VISION = ("model.vision_tower.", "vision_tower.")
IN_PROJECTOR = ("model.multi_modal_projector.", "multi_modal_projector.")
MASK = "embeddings.mask_token"  # used by training without texts
SQUARE = 448  # pixels along a side
BICUBIC = 3  # Pillow's number
# Defaults of keys that a config.json leaves out
SEEING = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": SQUARE,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
}
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}


def _language(config: FolderConfig) -> dict[str, Any]:
    text = config.part("text_config")
    if text.kind not in DECODERS:
        text.refuse(f"has model_type {text.kind!r}", f"there are {', '.join(DECODERS)}")
    # The outer key comes first; files of transformers 4 have it in text_config alone.
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))
    section = DECODERS[text.kind].section(text.updated(tie_word_embeddings=tied))
    return section | {"bidirectional": [], "media_positions": "line"}


def _vision(config: FolderConfig) -> dict[str, Any]:
    vision = config.part("vision_config").completed(SEEING)
    vision.expect("num_channels", 3)
    vision.expect("use_absolute_position_embeddings", True)
    for key in ("hidden_dropout_prob", "attention_dropout", "projection_dropout"):
        vision.expect(key, 0.0)
    activation = vision.get("hidden_act")
    kind = vision.get("norm_type")
    if activation not in GELU:
        vision.refuse(f"has hidden_act {activation!r}", f"there are {', '.join(GELU)}")
    if kind not in NORMS:
        vision.refuse(f"has norm_type {kind!r}", f"there are {', '.join(NORMS)}")
    norm = NORMS[kind]
    epsilon = float(vision.number("layer_norm_eps", 1e-6))
    normed = vision.flag("use_qk_norm")
    # Where features are not averaged, the reference's tower ends with a LayerNorm, whatever
    # norm_type is.
    last_norm = not vision.flag("use_mean_pooling", True)
    if last_norm and norm != "layer":
        vision.refuse(
            "has norm_type 'rms_norm' and use_mean_pooling False", "its last norm is another one"
        )
    if normed and epsilon != 1e-6:
        vision.refuse(f"has layer_norm_eps {epsilon}", "queries and keys are normed with 1e-6")
    patch = _square_side(vision, "patch_size")
    return {
        "width": vision.count("hidden_size"),
        "layers": vision.count("num_hidden_layers"),
        "heads": vision.count("num_attention_heads"),
        "mlp_width": vision.count("intermediate_size"),
        "patch_size": patch,
        "positions": "table",
        "position_grid": _square_side(vision, "image_size") // patch,
        "class_token": True,
        "norm": norm,
        "norm_epsilon": epsilon,
        "last_norm": last_norm,
        "gelu": GELU[activation],
        "qkv_bias": vision.flag("attention_bias"),
        "qk_norm": normed,
        "layer_scale": True,
    }


def _square_side(vision: FolderConfig, key: str) -> int:
    """A size in pixels, one number or the same one twice."""
    sides = vision.get(key)
    sides = sides if isinstance(sides, list) else [sides]
    if len({*sides}) != 1 or not isinstance(sides[0], int):
        vision.refuse(f"has {key} {vision.get(key)!r}", "squares are understood")
    return int(sides[0])


def _projector(config: FolderConfig) -> dict[str, Any]:
    """The keys of the projector in the section of the tower."""
    config.expect("vision_feature_layer", -1)
    config.expect("vision_feature_select_strategy", "default")
    activation = config.get("projector_hidden_act", "gelu")
    ratio = config.number("downsample_ratio", 0.5)
    if activation not in GELU:
        config.refuse(f"has projector_hidden_act {activation!r}", f"there are {', '.join(GELU)}")
    if not 0 < ratio <= 1 or 1 / ratio % 1:
        config.refuse(f"has downsample_ratio {ratio}", "one over a whole number is understood")
    shapes = {"gelu": GELU[activation], "norm": "layer", "norm_epsilon": PROJECTOR_EPSILON}
    return {"merge": int(1 / ratio), "projector": shapes}


def _processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    """How images are read: cut into square tiles, as the reference's processor of texts and
    pictures asks, whatever this file says about tiles."""
    colors = file.completed({"image_mean": MEAN, "image_std": STD})
    read = square_processor(colors, section, BICUBIC)
    tiles = {"resize": "tiles", "min_tiles": file.number("min_patches", 1)}
    return Processor(
        read.model, {**read.data, **tiles, "max_tiles": file.number("max_patches", 12)}
    )


INTERNVL = together(
    Family(
        "InternVL",
        KIND,
        _language,
        LANGUAGE,
        copies=COPIES,
        prefixes=IN_LANGUAGE,
        unprefixed=("head",),
        variants=(head_variant("language_model.lm_head.weight"),),
    ),
    Family(
        "InternVL",
        KIND,
        _vision,
        VISION,
        copies={},
        component="vision",
        prefixes=IN_VISION,
        letters=patch_letters,
        processor=_processor,
        placeholder=lambda config: int(config.number("image_token_id", 151_667)),
    ),
    Family(
        "InternVL",
        KIND,
        _projector,
        PROJECTOR,
        copies={},
        component="projector.vision",
        prefixes=IN_PROJECTOR,
    ),
    carried=(*FREQUENCIES, *patterns([MASK], IN_VISION)),
)
