"""Qwen2.5-VL: the decoder of Qwen2.5 with positions of three axes, a vision tower with windows, and
a merger of its features as the projector.

The norm of the merger is applied before features are grouped, so here it is the tower's last norm.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import (
    COPIES,
    FREQUENCIES,
    LANGUAGE,
    dense_decoder,
    rotary_record,
    windows_by_layer,
)
from jaxmllm.families.family import Family, Processor, together
from jaxmllm.families.folder_config import FolderConfig

KIND = "qwen2_5_vl"
LAYER = "blocks.{layer}"
JOINED = f"{LAYER}.attn.qkv"
JOINED_ATTENTION = {
    "layers.attention.query": f"{JOINED}.weight[0/3]: (h k) d -> layer d h k",
    "layers.attention.query_bias": f"{JOINED}.bias[0/3]: (h k) -> layer h k",
    "layers.attention.key": f"{JOINED}.weight[1/3]: (h k) d -> layer d h k",
    "layers.attention.key_bias": f"{JOINED}.bias[1/3]: (h k) -> layer h k",
    "layers.attention.value": f"{JOINED}.weight[2/3]: (h k) d -> layer d h k",
    "layers.attention.value_bias": f"{JOINED}.bias[2/3]: (h k) -> layer h k",
    "layers.attention.out": f"{LAYER}.attn.proj.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{LAYER}.attn.proj.bias: d -> layer d",
}
VISION = {
    "patch": "patch_embed.proj.weight: d c t p q -> (t p q c) d",
    "layers.attention_norm.scale": f"{LAYER}.norm1.weight: d -> layer d",
    **JOINED_ATTENTION,
    "layers.mlp_norm.scale": f"{LAYER}.norm2.weight: d -> layer d",
    "layers.mlp.gate": f"{LAYER}.mlp.gate_proj.weight: f d -> layer d f",
    "layers.mlp.gate_bias": f"{LAYER}.mlp.gate_proj.bias: f -> layer f",
    "layers.mlp.up": f"{LAYER}.mlp.up_proj.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.mlp.up_proj.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.mlp.down_proj.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.mlp.down_proj.bias: d -> layer d",
    "norm.scale": "merger.ln_q.weight: d -> d",
}
PROJECTOR = {
    "mlp.up": "merger.mlp.0.weight: f i -> i f",
    "mlp.up_bias": "merger.mlp.0.bias: f -> f",
    "mlp.down": "merger.mlp.2.weight: d f -> f d",
    "mlp.down_bias": "merger.mlp.2.bias: d -> d",
}
# Prefixes as transformers has them in memory, and as they are published
IN_LANGUAGE = ("model.language_model.", "model.")
IN_VISION = ("model.visual.", "visual.")
# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
}
SECTIONS = [16, 24, 24]  # rotary pairs of time, height and width
FULL_LAYERS = [7, 15, 23, 31]
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]
PIXELS = 56 * 56, 28 * 28 * 1280  # least and most of a picture ...
VIDEO_PIXELS = 128 * 28 * 28, 768 * 28 * 28  # ... and of each frame
MIN_FRAMES = 4
MAX_FRAMES = 768
TOKENS_PER_SECOND = 4
BICUBIC = 3  # Pillow's number


def _language(config: FolderConfig) -> dict[str, Any]:
    text = config.part("text_config") if "text_config" in config.values else config
    tied = config.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    return axial_decoder(text.completed(TEXT).updated(tie_word_embeddings=tied))


def axial_decoder(text: FolderConfig) -> dict[str, Any]:
    """The keys of `model.language` of a decoder whose positions have three axes."""
    rotary = rotary_record(text, {"mrope": "default"})  # mrope keeps the usual frequencies
    sections = rotary.get("mrope_section", SECTIONS)
    text = text.updated(rope_parameters=rotary, rope_scaling=None)
    return dense_decoder(
        text,
        windows_by_layer(text),
        qkv_bias=True,
        rope_sections=sections,
        bidirectional=[],
    )


def windowed_tower(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.vision`, except those of the projector."""
    vision = config.part("vision_config")
    vision.expect("hidden_act", "silu")
    vision.expect("in_channels", 3)
    vision.expect("in_chans", 3)
    layers = vision.count("depth", 32)
    patch = vision.count("patch_size", 14)
    tower = {
        "width": vision.count("hidden_size", 3584),
        "layers": layers,
        "heads": vision.count("num_heads", 16),
        "mlp_width": vision.count("intermediate_size", 3420),
        "rope_theta": axial_theta(vision),
        "patch_size": patch,
        "patch_frames": vision.count("temporal_patch_size", 2),
        "patch_bias": False,
        "gated_mlp": True,
        "norm": "rms",
        "norm_epsilon": 1e-6,
    }
    cell = patch * vision.count("spatial_merge_size", 2)
    full = vision.get("fullatt_block_indexes", FULL_LAYERS)
    # Numbers beyond the last layer mean nothing to the reference; the schema would refuse them.
    full = sorted({layer for layer in full if layer < layers})
    # Without a layer that attends in windows, the schema takes no window.
    if len(full) == layers:
        return tower
    cells = vision.count("window_size", 112) // cell
    if not cells:
        vision.refuse(f"has window_size {vision.get('window_size')}", f"a merged cell has {cell}")
    # The reference rounds windows down to whole merged cells. `window` counts patches.
    return tower | {"window": cells * cell // patch, "full_layers": full}


def axial_theta(vision: FolderConfig) -> float:
    """The base of the tower's rotary positions. Raises `FolderError` for positions other than those
    of rows and columns."""
    rotary = rotary_record(vision)
    if rotary["rope_type"] not in ("axial", "default"):  # the latter in older files
        vision.refuse(
            f"has rope_parameters {rotary!r}",
            "rope_type axial alone is supported, which default means, too",
        )
    return float(rotary["rope_theta"])


def _projector(config: FolderConfig) -> dict[str, Any]:
    return merger(config.part("vision_config"), _language(config)["width"])


def merger(vision: FolderConfig, wide: int) -> dict[str, Any]:
    """The keys of the projector in the section of the tower.

    Args:
      vision: the tower's part of config.json.
      wide: the width of the decoder.
    """
    merge = vision.count("spatial_merge_size", 2)
    width = vision.count("hidden_size", 3584)
    output_width = vision.count("out_hidden_size", 3584)
    if output_width != wide:
        vision.refuse(f"has out_hidden_size {output_width}", f"the decoder is {wide} wide")
    return {"merge": merge, "projector": {"mlp_width": merge**2 * width, "gelu": "exact"}}


def picture_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    """How pictures are read."""
    _expect_usual_settings(file, section)
    colors = {"pixel_mean": file.get("image_mean", MEAN), "pixel_std": file.get("image_std", STD)}
    return Processor(colors, bounds(file, PIXELS) | {"resize": "smart", "kernel": "bicubic"})


def _expect_usual_settings(file: FolderConfig, section: dict[str, Any]) -> None:
    """Refuse settings other than those usual for pictures and videos."""
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        file.expect(step, True)
    file.expect("rescale_factor", 1 / 255)
    file.expect("resample", BICUBIC)
    file.expect("patch_size", section["patch_size"])
    file.expect("temporal_patch_size", section["patch_frames"])
    if "merge" in section:
        file.expect("merge_size", section["merge"])


def bounds(file: FolderConfig, usual: tuple[int, int]) -> dict[str, int]:
    """Least and most pixels, from a processor's file or `usual`."""
    size = file.part("size") if file.get("size") is not None else FolderConfig(file.path, {})
    return {
        key: file.number(key, size.number(edge, size.number(key, default)))
        for key, edge, default in zip(
            ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), usual, strict=True
        )
    }


def video_processor(
    file: FolderConfig, section: dict[str, Any], pixels: tuple[int, int], fps: float | None = None
) -> dict[str, Any]:
    """The keys of `data.videos` that say which frames are taken, and how large.

    Args:
      pixels: least and most pixels where the file gives none.
      fps: frames per second where the file gives none; none: all frames are taken.
    """
    _expect_usual_settings(file, section)
    # Videos share the colors of pictures, for which the tower has one set of keys.
    for key in ("pixel_mean", "pixel_std"):
        file.expect(key.replace("pixel", "image"), list(section[key]))
    file.expect("cap_pixels_per_frame", False)
    if (frames := file.get("num_frames")) is not None:
        file.refuse(f"has num_frames {frames!r}", "videos are sampled by fps alone")
    sizes: dict[str, Any] = bounds(file, pixels) | {
        "max_frames": file.number("max_frames", MAX_FRAMES)
    }
    # Without sampling all frames are taken, whatever `fps` the file has.
    sampled = file.flag("do_sample_frames", fps is not None)
    fps = file.get("fps", fps) if sampled else None
    if fps is None:
        return sizes
    return sizes | {"fps": float(fps), "min_frames": file.number("min_frames", MIN_FRAMES)}


def _videos(config: FolderConfig, file: FolderConfig, section: dict[str, Any]) -> dict[str, Any]:
    rate = config.part("vision_config").number("tokens_per_second", TOKENS_PER_SECOND)
    return video_processor(file, section, VIDEO_PIXELS) | {"positions_per_second": float(rate)}


def patch_letters(section: dict[str, Any]) -> dict[str, int]:
    """Sizes of the letters that the line of patches joins."""
    patch = section["patch_size"]
    return {"c": 3, "t": section["patch_frames"], "p": patch, "q": patch}


QWEN2_5_VL = together(
    Family(
        "Qwen2.5-VL",
        KIND,
        _language,
        LANGUAGE,
        copies=COPIES,
        prefixes=IN_LANGUAGE,
        unprefixed=("head",),
    ),
    Family(
        "Qwen2.5-VL",
        KIND,
        windowed_tower,
        VISION,
        copies={},
        component="vision",
        prefixes=IN_VISION,
        letters=patch_letters,
        processor=picture_processor,
        videos=_videos,
    ),
    Family(
        "Qwen2.5-VL",
        KIND,
        _projector,
        PROJECTOR,
        copies={},
        component="projector.vision",
        prefixes=IN_VISION,
    ),
    carried=FREQUENCIES,
)
