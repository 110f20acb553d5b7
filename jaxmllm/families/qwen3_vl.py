"""Qwen3-VL: the decoder of Qwen3 with positions of three axes that take turns, a vision tower, and
mergers of its features and of those of some of its layers as the projector.

The norm of the last features is applied before they are grouped, so here it is the tower's last
norm; those of other layers are applied after their features are grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxmllm.families.dense_decoder import (
    COPIES,
    FREQUENCIES,
    LANGUAGE,
    dense_decoder,
    rotary_record,
)
from jaxmllm.families.family import Family, Variant, together
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.qwen2_5_vl import (
    IN_VISION,
    JOINED_ATTENTION,
    LAYER,
    axial_theta,
    merger,
    patch_letters,
    picture_processor,
    video_processor,
)

VISION = {
    "patch": "patch_embed.proj.weight: d c t p q -> (t p q c) d",
    "patch_bias": "patch_embed.proj.bias: d -> d",
    "position_embedding": "pos_embed.weight: (r s) d -> r s d",
    "layers.attention_norm.scale": f"{LAYER}.norm1.weight: d -> layer d",
    "layers.attention_norm.bias": f"{LAYER}.norm1.bias: d -> layer d",
    **JOINED_ATTENTION,
    "layers.mlp_norm.scale": f"{LAYER}.norm2.weight: d -> layer d",
    "layers.mlp_norm.bias": f"{LAYER}.norm2.bias: d -> layer d",
    "layers.mlp.up": f"{LAYER}.mlp.linear_fc1.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.mlp.linear_fc1.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.mlp.linear_fc2.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.mlp.linear_fc2.bias: d -> layer d",
    "norm.scale": "merger.norm.weight: d -> d",
    "norm.bias": "merger.norm.bias: d -> d",
}
MERGERS = "deepstack_merger_list.{layer}"
PROJECTOR = {
    "mlp.up": "merger.linear_fc1.weight: f i -> i f",
    "mlp.up_bias": "merger.linear_fc1.bias: f -> f",
    "mlp.down": "merger.linear_fc2.weight: d f -> f d",
    "mlp.down_bias": "merger.linear_fc2.bias: d -> d",
    "deepstack.norm.scale": f"{MERGERS}.norm.weight: i -> layer i",
    "deepstack.norm.bias": f"{MERGERS}.norm.bias: i -> layer i",
    "deepstack.mlp.up": f"{MERGERS}.linear_fc1.weight: f i -> layer i f",
    "deepstack.mlp.up_bias": f"{MERGERS}.linear_fc1.bias: f -> layer f",
    "deepstack.mlp.down": f"{MERGERS}.linear_fc2.weight: d f -> layer f d",
    "deepstack.mlp.down_bias": f"{MERGERS}.linear_fc2.bias: d -> layer d",
}
IN_LANGUAGE = ("model.language_model.",)
# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rope_theta": 5e5,
    "max_position_embeddings": 128_000,
}
SEEING = {"hidden_size": 1152}
SECTIONS = [24, 20, 20]  # rotary pairs of time, height and width
DEEPSTACK_LAYERS = [8, 16, 24]
VIDEO_PIXELS = 128 * 32 * 32, 768 * 32 * 32  # least and most of all frames together
FPS = 2.0

Section = Callable[[FolderConfig], dict[str, Any]]  # keys of a section of `model`


def qwen3_vl_decoder(config: FolderConfig, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `model.language`, with an MLP in every layer.

    Args:
      usual: defaults of keys that a `text_config` leaves out.
    """
    tied = config.flag("tie_word_embeddings")  # whatever text_config says
    text = config.part("text_config").completed(usual).updated(tie_word_embeddings=tied)
    text.expect("use_sliding_window", False)
    rotary = rotary_record(text)
    FolderConfig(config.path, rotary).expect("mrope_interleaved", True)
    width = text.count("hidden_size")
    heads = text.count("num_attention_heads")
    bias = text.flag("attention_bias")
    return dense_decoder(
        text,
        head_size=text.count("head_dim", width // heads),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        rope_sections=rotary.get("mrope_section", SECTIONS),
        rope_interleaved=True,
        bidirectional=[],
    )


def _language(config: FolderConfig) -> dict[str, Any]:
    return qwen3_vl_decoder(config, TEXT)


def vision_tower(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.vision`, except those of the projector."""
    vision = config.part("vision_config").completed(SEEING)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("in_channels", 3)
    positions = vision.count("num_position_embeddings", 2304)
    side = round(positions**0.5)
    if side**2 != positions:
        vision.refuse(
            f"has num_position_embeddings {positions}", "it must be the square of a number"
        )
    return {
        "width": vision.count("hidden_size"),
        "layers": vision.count("depth", 27),
        "heads": vision.count("num_heads", 16),
        "mlp_width": vision.count("intermediate_size", 4304),
        "rope_theta": axial_theta(vision),
        "patch_size": vision.count("patch_size", 16),
        "patch_frames": vision.count("temporal_patch_size", 2),
        "positions": "rotary_and_resampled",
        "position_grid": side,
        "norm": "layer",
        "norm_epsilon": 1e-6,
        "gelu": "tanh",
    }


def _videos(config: FolderConfig, file: FolderConfig, section: dict[str, Any]) -> dict[str, Any]:
    read = video_processor(file, section, VIDEO_PIXELS, FPS)
    return read | {"sampling": "ends", "bounds": "video", "times": "text"}


def mergers(config: FolderConfig, wide: int) -> dict[str, Any]:
    """The keys of the projectors in the section of the tower.

    Args:
      wide: the width of the decoder.
    """
    vision = config.part("vision_config").completed(SEEING)
    tapped = vision.get("deepstack_visual_indexes", DEEPSTACK_LAYERS)
    return merger(vision, wide) | {"deepstack_layers": tapped}


def _projector_of(language: Section) -> Section:
    """A function for the projectors' keys in the tower's section, given one for
    `model.language`."""

    return lambda config: mergers(config, language(config)["width"])


def qwen3_vl_family(
    name: str,
    kind: str,
    language: Section,
    lines: Mapping[str, str],
    variants: tuple[Variant, ...] = (),
) -> tuple[Family, ...]:
    """The components of a model with this decoder.

    Args:
      kind: `model_type` of config.json.
      lines: lines of the decoder.
      variants: variants of these lines.
    """
    return together(
        Family(
            name,
            kind,
            language,
            lines,
            copies=COPIES,
            prefixes=IN_LANGUAGE,
            unprefixed=("head",),
            variants=variants,
        ),
        Family(
            name,
            kind,
            vision_tower,
            VISION,
            copies={},
            component="vision",
            prefixes=IN_VISION,
            letters=patch_letters,
            processor=picture_processor,
            videos=_videos,
        ),
        Family(
            name,
            kind,
            _projector_of(language),
            PROJECTOR,
            copies={},
            component="projector.vision",
            prefixes=IN_VISION,
        ),
        carried=FREQUENCIES,
    )


QWEN3_VL = qwen3_vl_family("Qwen3-VL", "qwen3_vl", _language, LANGUAGE)
