"""Qwen3: heads whose size is a key of its own, norms of queries and keys, biases where
`attention_bias` says so."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import decoder_family, dense_decoder, windows_by_layer
from jaxmllm.families.folder_config import FolderConfig


def qwen3_decoder(config: FolderConfig) -> dict[str, Any]:
    """The keys of `model.language`, with an MLP in every layer."""
    bias = config.flag("attention_bias")
    return dense_decoder(
        config,
        windows_by_layer(config),
        head_size=config.count("head_dim", 128),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


QWEN3 = decoder_family("Qwen3", "qwen3", qwen3_decoder)
