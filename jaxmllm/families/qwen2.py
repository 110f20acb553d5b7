"""Qwen2 and Qwen2.5: queries, keys and values with biases; windows in the last layers, where they
are in use."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import decoder_family, dense_decoder, windows_by_layer
from jaxmllm.families.folder_config import FolderConfig


def _language(config: FolderConfig) -> dict[str, Any]:
    return dense_decoder(config, windows_by_layer(config), qkv_bias=True)


QWEN2 = decoder_family("Qwen2", "qwen2", _language)
