"""Qwen-Image: the transformer that draws pictures from text, with two streams of weights, which
meet in attention.

The projector is a norm and one matrix, which make conditions of the text's states. Pictures are
packed outside of the reference's transformer, 2 x 2 numbers of each channel in a patch, channels
first. In the reference's heads, the two numbers of a rotary pair are neighbours; here each half of
a head has one of them. The lines state this permutation.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.family import Family, together
from jaxmllm.families.folder_config import FolderConfig

KIND = "QwenImageTransformer2DModel"
LAYER = "transformer_blocks.{layer}"
TIME = "time_text_embed.timestep_embedder"


def _stream_lines(
    own: str, part: str, projections: tuple[str, str, str, str], norm: str
) -> dict[str, str]:
    """Lines of one stream of every layer.

    Args:
      own: prefix of the paths of its parameters.
      part: prefix of the keys of its modulation and MLP.
      projections: keys of the matrices of queries, keys, values and output.
      norm: prefix of the keys of the norms of queries and keys.
    """
    query, key, value, out = (f"{LAYER}.attn.{name}" for name in projections)
    modulation = f"{LAYER}.{part}_mod.1"
    mlp = f"{LAYER}.{part}_mlp.net"
    return {
        f"{own}.modulation.weight": f"{modulation}.weight: (n d) e -> layer e n d",
        f"{own}.modulation.bias": f"{modulation}.bias: (n d) -> layer n d",
        f"{own}.attention.query": f"{query}.weight: (h pair two) d -> layer d h (two pair)",
        f"{own}.attention.query_bias": f"{query}.bias: (h pair two) -> layer h (two pair)",
        f"{own}.attention.query_norm.scale": f"{LAYER}.attn.{norm}_q.weight: (pair two) -> layer (two pair)",
        f"{own}.attention.key": f"{key}.weight: (h pair two) d -> layer d h (two pair)",
        f"{own}.attention.key_bias": f"{key}.bias: (h pair two) -> layer h (two pair)",
        f"{own}.attention.key_norm.scale": f"{LAYER}.attn.{norm}_k.weight: (pair two) -> layer (two pair)",
        f"{own}.attention.value": f"{value}.weight: (h k) d -> layer d h k",
        f"{own}.attention.value_bias": f"{value}.bias: (h k) -> layer h k",
        f"{own}.attention.out": f"{out}.weight: d (h k) -> layer h k d",
        f"{own}.attention.out_bias": f"{out}.bias: d -> layer d",
        f"{own}.mlp.up": f"{mlp}.0.proj.weight: f d -> layer d f",
        f"{own}.mlp.up_bias": f"{mlp}.0.proj.bias: f -> layer f",
        f"{own}.mlp.down": f"{mlp}.2.weight: d f -> layer f d",
        f"{own}.mlp.down_bias": f"{mlp}.2.bias: d -> layer d",
    }


PARAMETERS = {
    "patch": "img_in.weight: d (c i j) -> (i j c) d",
    "patch_bias": "img_in.bias: d -> d",
    "time.up": f"{TIME}.linear_1.weight: d f -> f d",
    "time.up_bias": f"{TIME}.linear_1.bias: d -> d",
    "time.down": f"{TIME}.linear_2.weight: d e -> e d",
    "time.down_bias": f"{TIME}.linear_2.bias: d -> d",
    **_stream_lines("layers", "img", ("to_q", "to_k", "to_v", "to_out.0"), "norm"),
    **_stream_lines(
        "layers.conditions",
        "txt",
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        "norm_added",
    ),
    # The reference has the scale first, this project the shift.
    "output_modulation.weight": "norm_out.linear.weight: (-m d) e -> e m d",
    "output_modulation.bias": "norm_out.linear.bias: (-m d) -> m d",
    "output": "proj_out.weight: (c i j) d -> d (i j c)",
    "output_bias": "proj_out.bias: (c i j) -> (i j c)",
}
PROJECTOR = {
    "norm.scale": "txt_norm.weight: i -> i",
    "linear": "txt_in.weight: d i -> i d",
    "linear_bias": "txt_in.bias: d -> d",
}
MLP_RATIO = 4
MODULATIONS = 6
OUTPUT_MODULATIONS = 2
# Flags of models that also see pictures, or layers of one
OTHER_MODELS = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")


def _transformer(config: FolderConfig) -> dict[str, Any]:
    for key in OTHER_MODELS:
        config.expect(key, False)
    side = config.count("patch_size", 2)
    packed = config.count("in_channels", 64)
    channels, remainder = divmod(packed, side**2)
    if remainder:
        config.refuse(
            f"has in_channels {packed}",
            f"patches of {side} x {side} numbers have a multiple of {side**2}",
        )
    # in_channels counts the numbers of a patch, out_channels the autoencoder's channels.
    config.expect("out_channels", channels)
    heads = config.count("num_attention_heads", 24)
    size = config.count("attention_head_dim", 128)
    axes = config.get("axes_dims_rope", [16, 56, 56])
    understood = isinstance(axes, list) and len(axes) == 3 and sum(axes) == size
    if not understood or any(axis % 2 for axis in axes):
        config.refuse(
            f"has axes_dims_rope {axes!r}",
            f"three even numbers that add up to {size} are understood",
        )
    width = heads * size
    return {
        "width": width,
        "layers": config.count("num_layers", 60),
        "heads": heads,
        "mlp_width": MLP_RATIO * width,
        "channels": channels,
        "patch_size": side,
        "conditioning": "joint",
        "streams": 2,
        "norm": "layer",
        "attention_bias": True,
        # Sections count rotary pairs, axes_dims_rope counts numbers.
        "rope_sections": [axis // 2 for axis in axes],
        "rope_origin": "centre",
        "condition_positions": "diagonal",
        "projector_layers": "normed_linear",
    }


def _projector(config: FolderConfig) -> dict[str, Any]:
    return {"reads": config.count("joint_attention_dim", 3584)}


def _letters(section: dict[str, Any]) -> dict[str, int]:
    side = section["patch_size"]
    size = section["width"] // section["heads"]
    return {
        "c": section["channels"],
        "i": side,
        "j": side,
        "n": MODULATIONS,
        "m": OUTPUT_MODULATIONS,
        "two": 2,
        "pair": size // 2,
    }


_TRANSFORMER_FAMILY = Family(
    "Qwen-Image",
    KIND,
    _transformer,
    PARAMETERS,
    copies={},
    component="diffusion",
    letters=_letters,
)
_PROJECTOR_FAMILY = Family(
    "Qwen-Image", KIND, _projector, PROJECTOR, copies={}, component="projector.language"
)
QWEN_IMAGE = together(_TRANSFORMER_FAMILY, _PROJECTOR_FAMILY)
