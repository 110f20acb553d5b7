"""Wan 2.1: the transformer that draws clips from text, and its embedding of the text's states as
the projector.

In the reference, texts are padded with zeros to 512 states, and patches attend to these, too. In
its heads, the two numbers of a rotary pair are neighbours; here each half of a head has one of
them. The lines state this permutation.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.family import Family, together
from jaxmllm.families.folder_config import FolderConfig

KIND = "WanTransformer3DModel"
LAYER = "blocks.{layer}"
SELF = f"{LAYER}.attn1"
CROSS = f"{LAYER}.attn2"
TIME = "condition_embedder.time_embedder"
PARAMETERS = {
    "patch": "patch_embedding.weight: d c t i j -> (t i j c) d",
    "patch_bias": "patch_embedding.bias: d -> d",
    "time.up": f"{TIME}.linear_1.weight: d f -> f d",
    "time.up_bias": f"{TIME}.linear_1.bias: d -> d",
    "time.down": f"{TIME}.linear_2.weight: d e -> e d",
    "time.down_bias": f"{TIME}.linear_2.bias: d -> d",
    "modulation.weight": "condition_embedder.time_proj.weight: (n d) e -> e n d",
    "modulation.bias": "condition_embedder.time_proj.bias: (n d) -> n d",
    "layers.modulation_bias": f"{LAYER}.scale_shift_table: one n d -> layer (one n) d",
    "layers.attention.query": f"{SELF}.to_q.weight: (h pair two) d -> layer d h (two pair)",
    "layers.attention.query_bias": f"{SELF}.to_q.bias: (h pair two) -> layer h (two pair)",
    "layers.attention.query_norm.scale": f"{SELF}.norm_q.weight: (h pair two) -> layer h (two pair)",
    "layers.attention.key": f"{SELF}.to_k.weight: (h pair two) d -> layer d h (two pair)",
    "layers.attention.key_bias": f"{SELF}.to_k.bias: (h pair two) -> layer h (two pair)",
    "layers.attention.key_norm.scale": f"{SELF}.norm_k.weight: (h pair two) -> layer h (two pair)",
    "layers.attention.value": f"{SELF}.to_v.weight: (h k) d -> layer d h k",
    "layers.attention.value_bias": f"{SELF}.to_v.bias: (h k) -> layer h k",
    "layers.attention.out": f"{SELF}.to_out.0.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{SELF}.to_out.0.bias: d -> layer d",
    "layers.cross_norm.scale": f"{LAYER}.norm2.weight: d -> layer d",
    "layers.cross_norm.bias": f"{LAYER}.norm2.bias: d -> layer d",
    "layers.cross_attention.query": f"{CROSS}.to_q.weight: (h k) d -> layer d h k",
    "layers.cross_attention.query_bias": f"{CROSS}.to_q.bias: (h k) -> layer h k",
    "layers.cross_attention.query_norm.scale": f"{CROSS}.norm_q.weight: (h k) -> layer h k",
    "layers.cross_attention.key": f"{CROSS}.to_k.weight: (h k) d -> layer d h k",
    "layers.cross_attention.key_bias": f"{CROSS}.to_k.bias: (h k) -> layer h k",
    "layers.cross_attention.key_norm.scale": f"{CROSS}.norm_k.weight: (h k) -> layer h k",
    "layers.cross_attention.value": f"{CROSS}.to_v.weight: (h k) d -> layer d h k",
    "layers.cross_attention.value_bias": f"{CROSS}.to_v.bias: (h k) -> layer h k",
    "layers.cross_attention.out": f"{CROSS}.to_out.0.weight: d (h k) -> layer h k d",
    "layers.cross_attention.out_bias": f"{CROSS}.to_out.0.bias: d -> layer d",
    "layers.mlp.up": f"{LAYER}.ffn.net.0.proj.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.ffn.net.0.proj.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.ffn.net.2.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.ffn.net.2.bias: d -> layer d",
    "output_modulation_bias": "scale_shift_table: one m d -> (one m) d",
    "output": "proj_out.weight: f d -> d f",
    "output_bias": "proj_out.bias: f -> f",
}
TEXT = "condition_embedder.text_embedder"
PROJECTOR = {
    "mlp.up": f"{TEXT}.linear_1.weight: f i -> i f",
    "mlp.up_bias": f"{TEXT}.linear_1.bias: f -> f",
    "mlp.down": f"{TEXT}.linear_2.weight: d f -> f d",
    "mlp.down_bias": f"{TEXT}.linear_2.bias: d -> d",
}
PADDED_CONDITIONS = 512
TIME_FEATURES = 256
MODULATIONS = 6
OUTPUT_MODULATIONS = 2


def _transformer(config: FolderConfig) -> dict[str, Any]:
    config.expect("cross_attn_norm", True)
    config.expect("qk_norm", "rms_norm_across_heads")
    config.expect("freq_dim", TIME_FEATURES)
    for key in (
        "image_dim",
        "added_kv_proj_dim",
        "pos_embed_seq_len",
    ):  # keys of models that see a picture
        config.expect(key, None)
    channels = config.count("in_channels", 16)
    config.expect("out_channels", channels)
    patch = config.get("patch_size", [1, 2, 2])
    if not isinstance(patch, list) or len(patch) != 3 or patch[1] != patch[2]:
        config.refuse(f"has patch_size {patch!r}", "[frames, side, side] is understood")
    heads = config.count("num_attention_heads", 40)
    size = config.count("attention_head_dim", 128)
    side = size // 6  # rotary pairs of rows, and of columns
    return {
        "width": heads * size,
        "layers": config.count("num_layers", 40),
        "heads": heads,
        "mlp_width": config.count("ffn_dim", 13_824),
        "channels": channels,
        "patch_frames": patch[0],
        "patch_size": patch[1],
        "conditioning": "cross",
        "padded_conditions": PADDED_CONDITIONS,
        "modulation": "shared",
        "output_modulation": "vectors",
        "norm": "layer",
        "norm_epsilon": float(config.number("eps", 1e-6)),
        "attention_bias": True,
        "qk_norm_over": "heads",
        "rope_sections": [size // 2 - 2 * side, side, side],
    }


def _projector(config: FolderConfig) -> dict[str, Any]:
    return {"reads": config.count("text_dim", 4096)}


def _letters(section: dict[str, Any]) -> dict[str, int]:
    side = section["patch_size"]
    size = section["width"] // section["heads"]
    return {
        "c": section["channels"],
        "t": section["patch_frames"],
        "i": side,
        "j": side,
        "one": 1,
        "n": MODULATIONS,
        "m": OUTPUT_MODULATIONS,
        "two": 2,
        "pair": size // 2,
    }


_TRANSFORMER_FAMILY = Family(
    "Wan 2.1",
    KIND,
    _transformer,
    PARAMETERS,
    copies={},
    component="diffusion",
    letters=_letters,
)
_PROJECTOR_FAMILY = Family(
    "Wan 2.1", KIND, _projector, PROJECTOR, copies={}, component="projector.language"
)
WAN = together(_TRANSFORMER_FAMILY, _PROJECTOR_FAMILY)
