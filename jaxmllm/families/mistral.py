"""Mistral: no biases; with `sliding_window`, every layer attends in windows."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import COPIES, FREQUENCIES, PARAMETERS, dense_decoder
from jaxmllm.families.family import Family
from jaxmllm.families.folder_config import FolderConfig


def _language(config: FolderConfig) -> dict[str, Any]:
    narrow = config.values.get("sliding_window", 4096) is not None
    windowed = (narrow,) * config.count("num_hidden_layers")
    return dense_decoder(config.completed({"num_key_value_heads": 8}), windowed)


MISTRAL = Family("Mistral", "mistral", _language, PARAMETERS, COPIES, FREQUENCIES)
