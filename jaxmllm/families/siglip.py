"""SigLIP and SigLIP 2: vision towers with learned positions, of whole models or of folders of the
tower alone.

SigLIP sees squares of one size, and its positions are a table. Most checkpoints of SigLIP 2 are of
this kind, too, and say `siglip`. NaFlex checkpoints see images of any size within a number of
patches, and positions are resampled to each image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxmllm.families.family import Family, Processor
from jaxmllm.families.folder_config import FolderConfig

LAYER = "encoder.layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"
PARAMETERS = {
    "patch": "embeddings.patch_embedding.weight: d c p q -> (p q c) d",
    "patch_bias": "embeddings.patch_embedding.bias: d -> d",
    "position_embedding": "embeddings.position_embedding.weight: (r s) d -> r s d",
    "layers.attention_norm.scale": f"{LAYER}.layer_norm1.weight: d -> layer d",
    "layers.attention_norm.bias": f"{LAYER}.layer_norm1.bias: d -> layer d",
    "layers.attention.query": f"{ATTENTION}.q_proj.weight: (h k) d -> layer d h k",
    "layers.attention.query_bias": f"{ATTENTION}.q_proj.bias: (h k) -> layer h k",
    "layers.attention.key": f"{ATTENTION}.k_proj.weight: (h k) d -> layer d h k",
    "layers.attention.key_bias": f"{ATTENTION}.k_proj.bias: (h k) -> layer h k",
    "layers.attention.value": f"{ATTENTION}.v_proj.weight: (h k) d -> layer d h k",
    "layers.attention.value_bias": f"{ATTENTION}.v_proj.bias: (h k) -> layer h k",
    "layers.attention.out": f"{ATTENTION}.out_proj.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{ATTENTION}.out_proj.bias: d -> layer d",
    "layers.mlp_norm.scale": f"{LAYER}.layer_norm2.weight: d -> layer d",
    "layers.mlp_norm.bias": f"{LAYER}.layer_norm2.bias: d -> layer d",
    "layers.mlp.up": f"{LAYER}.mlp.fc1.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.mlp.fc1.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.mlp.fc2.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.mlp.fc2.bias: d -> layer d",
    "norm.scale": "post_layernorm.weight: d -> d",
    "norm.bias": "post_layernorm.bias: d -> d",
}
# Heads that pool an image to one vector, the text tower, and the numbers that compare the two
CARRIED = ("vision_model.head.*", "head.*", "text_model.*", "logit_scale", "logit_bias")
GELU = {"gelu_pytorch_tanh": "tanh", "gelu": "exact"}
KERNELS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # by Pillow's number


def _vision(config: FolderConfig) -> FolderConfig:
    """The part of a config.json that describes the tower."""
    return config.part("vision_config") if "vision_config" in config.values else config


def _tower(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.vision` that both kinds read from the same keys of config.json."""
    vision = _vision(config)
    vision.expect("num_channels", 3)
    vision.expect("attention_dropout", 0.0)
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in GELU:
        vision.refuse(f"has hidden_act {activation!r}", f"there are {', '.join(GELU)}")
    return {
        "width": vision.count("hidden_size", 768),
        "layers": vision.count("num_hidden_layers", 12),
        "heads": vision.count("num_attention_heads", 12),
        "mlp_width": vision.count("intermediate_size", 3072),
        "patch_size": vision.count("patch_size", 16),
        "norm": "layer",
        "norm_epsilon": float(vision.number("layer_norm_eps", 1e-6)),
        "gelu": GELU[activation],
    }


def square_tower(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.vision` of a tower that sees squares of one size."""
    tower = _tower(config)
    vision = _vision(config)
    side = vision.count("image_size", 224) // tower["patch_size"]
    return tower | {"positions": "table", "position_grid": side}


def _any_size_tower(config: FolderConfig) -> dict[str, Any]:
    tower = _tower(config)
    vision = _vision(config)
    patches = vision.count("num_patches", 256)
    side = round(patches**0.5)
    if side**2 != patches:
        vision.refuse(f"has num_patches {patches}", "it must be the square of a number")
    return tower | {"positions": "resampled", "position_grid": side}


def _square_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    return square_processor(file, section, kernel=3)


def square_processor(file: FolderConfig, section: dict[str, Any], kernel: int) -> Processor:
    """How images are read when all become squares of one size.

    Args:
      kernel: Pillow's number of the resampling kernel, where the file names none.
    """
    size = file.get("size", {"height": 224, "width": 224})
    if not isinstance(size, dict) or {*size} != {"height", "width"}:
        file.refuse(f"has size {size!r}", "height and width are understood")
    side = size["height"]
    if size["width"] != side or side // section["patch_size"] != section["position_grid"]:
        file.refuse(
            f"has size {size!r}",
            f"the tower takes squares of {section['position_grid']} patches a side",
        )
    return _processor(file, "square", side**2, kernel)


def _filling_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    file.expect("patch_size", section["patch_size"])
    pixels = file.count("max_num_patches", 256) * section["patch_size"] ** 2
    return _processor(file, "fill", pixels, kernel=2)


def _processor(file: FolderConfig, resize: str, pixels: int, kernel: int) -> Processor:
    for step in ("do_resize", "do_rescale", "do_normalize"):
        file.expect(step, True)
    file.expect("rescale_factor", 1 / 255)
    resample = file.get("resample", kernel)
    if resample not in KERNELS:
        file.refuse(f"has resample {resample!r}", f"there are {KERNELS}")
    images = {
        "min_pixels": pixels,
        "max_pixels": pixels,
        "resize": resize,
        "kernel": KERNELS[resample],
    }
    tower = {
        "pixel_mean": file.get("image_mean", [0.5] * 3),
        "pixel_std": file.get("image_std", [0.5] * 3),
    }
    return Processor(tower, images)


def patch_letters(section: dict[str, Any]) -> dict[str, int]:
    """Sizes of the letters that the line of patches joins."""
    return {"c": 3, "p": section["patch_size"], "q": section["patch_size"]}


_WHOLE_MODEL = Family(
    "SigLIP",
    "siglip",
    square_tower,
    PARAMETERS,
    copies={},
    carried=CARRIED,
    component="vision",
    prefixes=("vision_model.", ""),
    letters=patch_letters,
    processor=_square_processor,
)
_WHOLE_MODEL_ANY_SIZE = replace(
    _WHOLE_MODEL,
    name="SigLIP 2",
    model_type="siglip2",
    section=_any_size_tower,
    parameters=PARAMETERS | {"patch": "embeddings.patch_embedding.weight: d f -> f d"},
    processor=_filling_processor,
)
SIGLIP = (_WHOLE_MODEL, replace(_WHOLE_MODEL, model_type="siglip_vision_model"))
SIGLIP2 = (_WHOLE_MODEL_ANY_SIZE, replace(_WHOLE_MODEL_ANY_SIZE, model_type="siglip2_vision_model"))
