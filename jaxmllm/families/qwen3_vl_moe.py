"""Qwen3-VL-MoE: Qwen3-VL with experts in place of every MLP of the decoder. All experts of a layer
share two tensors, one of them for their first two matrices: [experts, in, out] as published,
[experts, out, in] as transformers 5 writes them."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import LANGUAGE
from jaxmllm.families.expert_lines import INPUTS_FIRST, ROUTER, expert_variants
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.qwen3_vl import qwen3_vl_decoder, qwen3_vl_family

# Defaults of keys that a config.json leaves out
TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_theta": 5e5,
    "max_position_embeddings": 128_000,
}


def _language(config: FolderConfig) -> dict[str, Any]:
    text = config.part("text_config")
    text.expect("decoder_sparse_step", 1)
    text.expect("mlp_only_layers", [])
    text.expect("norm_topk_prob", True)  # as the reference always has it
    experts = {
        "count": text.count("num_local_experts", text.count("num_experts", 60)),
        "per_token": text.count("num_experts_per_tok", 4),
        "renormalise": True,
    }
    mlp_width = text.count("moe_intermediate_size", 1408)
    return qwen3_vl_decoder(config, TEXT) | {"mlp_width": mlp_width, "experts": experts}


QWEN3_VL_MOE = qwen3_vl_family(
    "Qwen3-VL-MoE",
    "qwen3_vl_moe",
    _language,
    LANGUAGE | ROUTER | INPUTS_FIRST,
    expert_variants(),
)
