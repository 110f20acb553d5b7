"""Llama 2 and 3: rotary scaling by wavelength, biases where `attention_bias` says so."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import decoder_family, dense_decoder
from jaxmllm.families.folder_config import FolderConfig


def _language(config: FolderConfig) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return dense_decoder(config, qkv_bias=bias, out_bias=bias)


LLAMA = decoder_family("Llama", "llama", _language)
