"""Qwen2.5-Omni's thinker: decoder, vision tower and merger of Qwen2.5-VL, and an audio tower that
hears each chunk of two seconds by itself. The talker is carried through, and so are the embeddings
for begin and end of clips, which the reference does not use. Of videos only the frames are read,
not the sound.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import COPIES
from jaxmllm.families.dense_decoder import LANGUAGE as DECODER
from jaxmllm.families.family import Family
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
from jaxmllm.families.qwen2_5_vl import PROJECTOR as MERGER
from jaxmllm.families.qwen2_5_vl import (
    VIDEO_PIXELS,
    axial_decoder,
    merger,
    patch_letters,
    picture_processor,
    windowed_tower,
)
from jaxmllm.families.qwen2_5_vl import VISION as JOINED_VISION
from jaxmllm.families.qwen2_audio import HEARING, POOL
from jaxmllm.families.whisper import PARAMETERS as ENCODER
from jaxmllm.families.whisper import STRIDES, clip_processor, encoder, stem_letters

NAME = "Qwen2.5-Omni"
ATTENTION = "blocks.{layer}.attn"
VISION = JOINED_VISION | {  # queries, keys and values have tensors of their own
    f"layers.attention.{name}{bias}": line
    for name in ("query", "key", "value")
    for bias, line in (
        ("", f"{ATTENTION}.{name[0]}.weight: (h k) d -> layer d h k"),
        ("_bias", f"{ATTENTION}.{name[0]}.bias: (h k) -> layer h k"),
    )
}
AUDIO = {path: line for path, line in ENCODER.items() if path != "position_embedding"} | {
    "norm.scale": "ln_post.weight: d -> d",
    "norm.bias": "ln_post.bias: d -> d",
}
PROJECTOR = {"linear": "proj.weight: d i -> i d", "linear_bias": "proj.bias: d -> d"}
UNUSED = "*audio_tower.audio_bos_eos_token.weight"
# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
}
HALF_CHUNK = 100
FPS = 2.0


def _language(config: FolderConfig) -> dict[str, Any]:
    thinker = thinker_of(config)
    text = thinker.part("text_config").completed(TEXT)
    tied = thinker.flag("tie_word_embeddings")  # whatever the part for text says
    return axial_decoder(text.updated(tie_word_embeddings=tied))


def _vision(config: FolderConfig) -> dict[str, Any]:
    return windowed_tower(thinker_of(config))


def _merger(config: FolderConfig) -> dict[str, Any]:
    return merger(thinker_of(config).part("vision_config"), _language(config)["width"])


def _audio(config: FolderConfig) -> dict[str, Any]:
    audio = thinker_of(config).part("audio_config").completed(HEARING)
    half_chunk = audio.count("n_window", HALF_CHUNK)
    positions = audio.count("max_source_positions")
    if half_chunk > positions:
        audio.refuse(
            f"has n_window {half_chunk}", f"there are {positions} positions (max_source_positions)"
        )
    if half_chunk % POOL:
        audio.refuse(
            f"has n_window {half_chunk}",
            "a token would be of features of two chunks; it must be even",
        )
    return encoder(audio) | {
        "chunk_frames": half_chunk * STRIDES[1],
        "positions": "sinusoidal",
        "silence": "masked",
        "attention": "chunk",
        "pool": POOL,
    }


def _audio_projector(config: FolderConfig) -> dict[str, Any]:
    """The keys of the projector in the section of the tower."""
    check_width(thinker_of(config).part("audio_config"), _language(config)["width"])
    return {"merge": 1, "projector": {"linear": True}}


PARTS = (
    Family(
        NAME,
        "",
        _language,
        DECODER,
        copies=COPIES,
        unprefixed=("head",),
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
        videos=videos(VIDEO_PIXELS, FPS, sampling="ends", times="line"),
        placeholder=token("image_token_index", PICTURE),
        video_placeholder=token("video_token_index", VIDEO),
    ),
    Family(NAME, "", _merger, MERGER, copies={}, component="projector.vision"),
    Family(
        NAME,
        "",
        _audio,
        AUDIO,
        copies={},
        component="audio",
        letters=stem_letters,
        processor=clip_processor,
        placeholder=token("audio_token_index", CLIP),
    ),
    Family(NAME, "", _audio_projector, PROJECTOR, copies={}, component="projector.audio"),
)
QWEN2_5_OMNI = thinkers("qwen2_5_omni", PARTS, (UNUSED, "talker.*", "token2wav.*"))
