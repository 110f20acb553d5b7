"""Mistral: no biases; with `sliding_window`, every layer attends in windows."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import decoder_family, dense_decoder
from jaxmllm.families.folder_config import FolderConfig


def _language(config: FolderConfig) -> dict[str, Any]:
    has_windows = config.values.get("sliding_window", 4096) is not None
    windowed = (has_windows,) * config.count("num_hidden_layers")
    return dense_decoder(config.completed({"num_key_value_heads": 8}), windowed)


MISTRAL = decoder_family("Mistral", "mistral", _language)
