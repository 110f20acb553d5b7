"""Qwen2-Audio: the decoder of Qwen2, the encoder of Whisper with means of two features before the
last norm, and one matrix as the projector. Clips are filled up with silence, which only the
convolutions hear.
"""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import (
    FREQUENCIES,
    dense_decoder,
    head_variant,
    windows_by_layer,
)
from jaxmllm.families.dense_decoder import LANGUAGE as DECODER
from jaxmllm.families.family import Family, together
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.whisper import PARAMETERS as AUDIO
from jaxmllm.families.whisper import chunk_processor, encoder, stem_letters

KIND = "qwen2_audio"
POOL = 2
LANGUAGE = DECODER | {"head": f"language_model.{DECODER['head']}"}
PROJECTOR = {"linear": "linear.weight: d i -> i d", "linear_bias": "linear.bias: d -> d"}
# Prefixes as the reference names its modules, and as folders have them
IN_LANGUAGE = ("model.language_model.", "language_model.model.")
IN_AUDIO = ("model.audio_tower.", "audio_tower.")
IN_PROJECTOR = ("model.multi_modal_projector.", "multi_modal_projector.")
# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
HEARING = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}
CLIP = 151_646  # id of the token


def _language(config: FolderConfig) -> dict[str, Any]:
    text = config.part("text_config").completed(TEXT)
    text.expect("model_type", "qwen2")
    text = text.updated(
        tie_word_embeddings=False
    )  # the reference never ties them, whatever the file says
    return dense_decoder(text, windows_by_layer(text), qkv_bias=True, bidirectional=[])


def _audio(config: FolderConfig) -> dict[str, Any]:
    return encoder(config.part("audio_config").completed(HEARING)) | {
        "silence": "stem",
        "pool": POOL,
    }


def _projector(config: FolderConfig) -> dict[str, Any]:
    """The keys of the projector in the section of the tower."""
    return {"merge": 1, "projector": {"linear": True}}


def _placeholder_id(config: FolderConfig) -> int:
    return int(config.number("audio_token_index", CLIP))


QWEN2_AUDIO = together(
    Family(
        "Qwen2-Audio",
        KIND,
        _language,
        LANGUAGE,
        copies={},
        prefixes=IN_LANGUAGE,
        unprefixed=("head",),
        variants=(head_variant("lm_head.weight"),),  # as the reference has it in memory
    ),
    Family(
        "Qwen2-Audio",
        KIND,
        _audio,
        AUDIO,
        copies={},
        component="audio",
        prefixes=IN_AUDIO,
        letters=stem_letters,
        processor=chunk_processor,
        placeholder=_placeholder_id,
    ),
    Family(
        "Qwen2-Audio",
        KIND,
        _projector,
        PROJECTOR,
        copies={},
        component="projector.audio",
        prefixes=IN_PROJECTOR,
    ),
    carried=FREQUENCIES,
)
