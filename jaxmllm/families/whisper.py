"""Whisper: the encoder, an audio tower after two convolutions. The decoder is carried through."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.family import Family, Processor
from jaxmllm.families.folder_config import FolderConfig

LAYER = "layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"
PARAMETERS = {
    "stem_mels.kernel": "conv1.weight: d m t -> (t m) d",
    "stem_mels.bias": "conv1.bias: d -> d",
    "stem_width.kernel": "conv2.weight: d e t -> (t e) d",
    "stem_width.bias": "conv2.bias: d -> d",
    "position_embedding": "embed_positions.weight: s d -> s d",
    "layers.attention_norm.scale": f"{LAYER}.self_attn_layer_norm.weight: d -> layer d",
    "layers.attention_norm.bias": f"{LAYER}.self_attn_layer_norm.bias: d -> layer d",
    "layers.attention.query": f"{ATTENTION}.q_proj.weight: (h k) d -> layer d h k",
    "layers.attention.query_bias": f"{ATTENTION}.q_proj.bias: (h k) -> layer h k",
    "layers.attention.key": f"{ATTENTION}.k_proj.weight: (h k) d -> layer d h k",
    "layers.attention.value": f"{ATTENTION}.v_proj.weight: (h k) d -> layer d h k",
    "layers.attention.value_bias": f"{ATTENTION}.v_proj.bias: (h k) -> layer h k",
    "layers.attention.out": f"{ATTENTION}.out_proj.weight: d (h k) -> layer h k d",
    "layers.attention.out_bias": f"{ATTENTION}.out_proj.bias: d -> layer d",
    "layers.mlp_norm.scale": f"{LAYER}.final_layer_norm.weight: d -> layer d",
    "layers.mlp_norm.bias": f"{LAYER}.final_layer_norm.bias: d -> layer d",
    "layers.mlp.up": f"{LAYER}.fc1.weight: f d -> layer d f",
    "layers.mlp.up_bias": f"{LAYER}.fc1.bias: f -> layer f",
    "layers.mlp.down": f"{LAYER}.fc2.weight: d f -> layer f d",
    "layers.mlp.down_bias": f"{LAYER}.fc2.bias: d -> layer d",
    "norm.scale": "layer_norm.weight: d -> d",
    "norm.bias": "layer_norm.bias: d -> d",
}
CARRIED = ("model.decoder.*", "decoder.*", "proj_out.weight")
TAPS = 3  # of both convolutions
STRIDES = (1, 2)


def encoder(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.audio` for an encoder like this one."""
    config.expect("activation_function", "gelu")
    config.expect("scale_embedding", False)  # the encoder does not use it
    for key in ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"):
        config.expect(key, 0.0)
    return {
        "width": config.count("d_model", 384),
        "layers": config.count("encoder_layers", 4),
        "heads": config.count("encoder_attention_heads", 6),
        "mlp_width": config.count("encoder_ffn_dim", 1536),
        "mel_bins": config.count("num_mel_bins", 80),
        "chunk_frames": config.count("max_source_positions", 1500) * STRIDES[1],
        "stem_strides": list(STRIDES),
        "positions": "table",
        "silence": "heard",
        "norm": "layer",
        "norm_epsilon": 1e-5,
        "gelu": "exact",
        "key_bias": False,
    }


def _tower(config: FolderConfig) -> dict[str, Any]:
    config.expect("apply_spec_augment", False)
    return encoder(config)


def chunk_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    """How clips of at most one chunk are read."""
    file.expect("do_normalize", False)
    processor = clip_processor(file, section)
    seconds, rate, hop = (
        processor.data[key] for key in ("max_seconds", "sample_rate", "hop_length")
    )
    if seconds * rate != section["chunk_frames"] * hop:
        file.refuse(
            f"has chunk_length {seconds:g}",
            f"the tower hears {section['chunk_frames']} frames at once",
        )
    return processor


def clip_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    """How clips of at most chunk_length seconds are read."""
    file.expect("feature_size", section["mel_bins"])
    file.expect("padding_value", 0.0)
    file.expect("dither", 0.0)
    rate = file.count("sampling_rate", 16_000)
    hop = file.count("hop_length", 160)
    seconds = file.count("chunk_length", 30)
    return Processor(
        {},
        {
            "sample_rate": rate,
            "window_length": file.count("n_fft", 400),
            "hop_length": hop,
            "max_seconds": float(seconds),
        },
    )


def stem_letters(section: dict[str, Any]) -> dict[str, int]:
    """Sizes of the letters that the lines of convolutions join."""
    return {"t": TAPS, "m": section["mel_bins"], "e": section["width"]}


WHISPER = Family(
    "Whisper",
    "whisper",
    _tower,
    PARAMETERS,
    copies={},
    carried=CARRIED,
    component="audio",
    prefixes=("model.encoder.", "encoder."),
    letters=stem_letters,
    processor=chunk_processor,
)
