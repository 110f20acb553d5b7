"""All families, by what their folders call them: `model_type` of config.json."""

from __future__ import annotations

from jaxmllm.families.family import Family
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.llama import LLAMA
from jaxmllm.families.mistral import MISTRAL
from jaxmllm.families.qwen2 import QWEN2
from jaxmllm.families.qwen3 import QWEN3
from jaxmllm.families.qwen3_moe import QWEN3_MOE

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def family_of(config: FolderConfig) -> Family:
    """The family of a folder. Raises `FolderError` for one that is not there, or is quantised."""
    known = ", ".join(FAMILIES)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        config.refuse(f"has model_type {kind!r}", f"there are {known}")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        config.refuse(
            f"has a quantization_config ({method})", "take the folder of the weights as trained"
        )
    return FAMILIES[kind]
