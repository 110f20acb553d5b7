"""Qwen3-MoE: the attention of Qwen3, and in every layer experts in place of the MLP."""

from __future__ import annotations

from typing import Any

from jaxmllm.families.dense_decoder import LANGUAGE, decoder_family
from jaxmllm.families.expert_lines import APART, ROUTER, expert_variants
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.qwen3 import qwen3_decoder


def _language(config: FolderConfig) -> dict[str, Any]:
    # The reference has windows in all layers or none, whatever Qwen3's keys for layers say.
    uniform = config.updated(layer_types=None, max_window_layers=0)
    return qwen3_decoder(uniform.completed({"num_key_value_heads": 4})) | experts_of(config)


def experts_of(config: FolderConfig, renormalise: bool = False) -> dict[str, Any]:
    """The keys of `model.language` that describe the experts.

    Args:
      renormalise: default of norm_topk_prob.
    """
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    # Older files say num_experts
    expert_count = config.count("num_local_experts", config.count("num_experts", 128))
    experts = {
        "count": expert_count,
        "per_token": config.count("num_experts_per_tok", 8),
        "renormalise": config.flag("norm_topk_prob", renormalise),
    }
    return {"mlp_width": config.count("moe_intermediate_size", 768), "experts": experts}


QWEN3_MOE = decoder_family(
    "Qwen3-MoE", "qwen3_moe", _language, LANGUAGE | ROUTER | APART, expert_variants()
)
