"""Qwen3-Omni's thinker: the decoder of Qwen3-VL-MoE, whose experts have tensors of their own, the
vision tower of Qwen3-VL, and an audio tower that convolves chunks of a second along time and mels.
The talker is carried through. Of videos only the frames are read, not the sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmllm.config.schema import AudioConfig
from jaxmllm.families.dense_decoder import COPIES
from jaxmllm.families.dense_decoder import LANGUAGE as DECODER
from jaxmllm.families.expert_lines import APART, ROUTER, expert_variants
from jaxmllm.families.family import Family, Processor
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.omni_thinker import (
    CLIP,
    PICTURE,
    VIDEO,
    check_width,
    thinker_of,
    thinkers,
    token,
    videos,
)
from jaxmllm.families.qwen2_5_vl import patch_letters, picture_processor
from jaxmllm.families.qwen2_audio import HEARING
from jaxmllm.families.qwen3_moe import experts_of
from jaxmllm.families.qwen3_vl import PROJECTOR as MERGERS
from jaxmllm.families.qwen3_vl import VIDEO_PIXELS, mergers, qwen3_vl_decoder, vision_tower
from jaxmllm.families.qwen3_vl import VISION as PLAIN_VISION
from jaxmllm.families.whisper import ATTENTION, clip_processor, encoder
from jaxmllm.families.whisper import PARAMETERS as ENCODER

NAME = "Qwen3-Omni"
LANGUAGE = DECODER | ROUTER | APART
# Words in the keys of mergers here, and in those of Qwen3-VL
SPELLED = (
    ("merger_list", "deepstack_merger_list"),
    (".ln_q.", ".norm."),
    (".mlp.0.", ".linear_fc1."),
    (".mlp.2.", ".linear_fc2."),
)


def _renamed_mergers(lines: Mapping[str, str]) -> dict[str, str]:
    renamed = dict(lines)
    for path, line in lines.items():
        for word, usual in SPELLED if "merger" in line else ():
            line = line.replace(usual, word)
        renamed[path] = line
    return renamed


VISION = _renamed_mergers(PLAIN_VISION)
MERGER = _renamed_mergers(MERGERS)
LAYERS = {path: line for path, line in ENCODER.items() if path.startswith("layers.")}
AUDIO = LAYERS | {
    "layers.attention.key_bias": f"{ATTENTION}.k_proj.bias: (h k) -> layer h k",
    "stem.first.kernel": "conv2d1.weight: d one m t -> (t m one) d",
    "stem.first.bias": "conv2d1.bias: d -> d",
    "stem.second.kernel": "conv2d2.weight: d c m t -> (t m c) d",
    "stem.second.bias": "conv2d2.bias: d -> d",
    "stem.third.kernel": "conv2d3.weight: d c m t -> (t m c) d",
    "stem.third.bias": "conv2d3.bias: d -> d",
    "stem.matrix": "conv_out.weight: d (c f) -> (f c) d",
    "norm.scale": "ln_post.weight: d -> d",
    "norm.bias": "ln_post.bias: d -> d",
}
PROJECTOR = {
    "mlp.up": "proj1.weight: f i -> i f",
    "mlp.up_bias": "proj1.bias: f -> f",
    "mlp.down": "proj2.weight: d f -> f d",
    "mlp.down_bias": "proj2.bias: d -> d",
}
# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
}
IN_CHUNKS = HEARING | {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}
CHUNK_TOKENS = 13  # of a chunk, as the reference counts, however many frames it has
FPS = 1.0
LONGEST = 2400.0  # seconds of a clip: the reference has no bound, and was trained with 40 minutes


def _language(config: FolderConfig) -> dict[str, Any]:
    thinker = thinker_of(config)
    experts = experts_of(thinker.part("text_config"), renormalise=True)
    return qwen3_vl_decoder(thinker, TEXT) | experts


def _vision(config: FolderConfig) -> dict[str, Any]:
    return vision_tower(thinker_of(config))


def _mergers(config: FolderConfig) -> dict[str, Any]:
    return mergers(thinker_of(config), _language(config)["width"])


def _audio(config: FolderConfig) -> dict[str, Any]:
    audio = thinker_of(config).part("audio_config").completed(IN_CHUNKS)
    frames = 2 * audio.count("n_window")
    seen = audio.count("n_window_infer")
    if seen < frames:
        audio.refuse(f"has n_window_infer {seen}", f"a chunk has {frames} frames (2 * n_window)")
    tower = encoder(audio) | {
        "chunk_frames": frames,
        "stem_channels": audio.count("downsample_hidden_size"),
        "positions": "sinusoidal",
        "silence": "cut",
        "attention": "chunk",
        "window_chunks": seen // frames,
        "key_bias": True,
    }
    del tower["stem_strides"]
    if (tokens := AudioConfig.model_validate(tower | {"merge": 1}).chunk_tokens) != CHUNK_TOKENS:
        audio.refuse(
            f"has n_window {frames // 2}",
            f"chunks have {tokens} tokens then, and the reference counts {CHUNK_TOKENS}; 50 is usual",
        )
    return tower


def _audio_projector(config: FolderConfig) -> dict[str, Any]:
    """The keys of the projector in the section of the tower."""
    audio = thinker_of(config).part("audio_config").completed(IN_CHUNKS)
    check_width(audio, _language(config)["width"])
    return {"merge": 1, "projector": {"mlp_width": audio.count("d_model"), "gelu": "exact"}}


def _clip_processor(file: FolderConfig, section: dict[str, Any]) -> Processor:
    """How clips are read: up to `LONGEST` seconds; the reference cuts none at chunk_length."""
    processor = clip_processor(file, section)
    return Processor(processor.model, dict(processor.data) | {"max_seconds": LONGEST})


def _stem_letters(section: dict[str, Any]) -> dict[str, int]:
    """Sizes of the letters that the lines of the stem join."""
    mels = AudioConfig.model_validate(section | {"merge": 1}).stem_mels[-1]
    side = AudioConfig.stem_kernel
    return {"t": side, "m": side, "one": 1, "c": section["stem_channels"], "f": mels}


PARTS = (
    Family(
        NAME,
        "",
        _language,
        LANGUAGE,
        copies=COPIES,
        unprefixed=("head",),
        variants=expert_variants(),
    ),
    Family(
        NAME,
        "",
        _vision,
        VISION,
        copies={},
        component="vision",
        letters=patch_letters,
        processor=picture_processor,
        videos=videos(VIDEO_PIXELS, FPS, times="fractions"),
        placeholder=token("image_token_id", PICTURE),
        video_placeholder=token("video_token_id", VIDEO),
    ),
    Family(NAME, "", _mergers, MERGER, copies={}, component="projector.vision"),
    Family(
        NAME,
        "",
        _audio,
        AUDIO,
        copies={},
        component="audio",
        letters=_stem_letters,
        processor=_clip_processor,
        placeholder=token("audio_token_id", CLIP),
    ),
    Family(NAME, "", _audio_projector, PROJECTOR, copies={}, component="projector.audio"),
)
QWEN3_OMNI_MOE = thinkers("qwen3_omni_moe", PARTS, ("talker.*", "code2wav.*"))
