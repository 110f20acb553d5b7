"""All families, by what their folders call them: `model_type` of config.json."""

from __future__ import annotations

from jaxmllm.families.family import Family
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.gemma3 import GEMMA3
from jaxmllm.families.llama import LLAMA
from jaxmllm.families.mistral import MISTRAL
from jaxmllm.families.qwen2 import QWEN2
from jaxmllm.families.qwen3 import QWEN3
from jaxmllm.families.qwen3_moe import QWEN3_MOE
from jaxmllm.families.siglip import SIGLIP, SIGLIP2
from jaxmllm.families.whisper import WHISPER

FAMILIES = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, *GEMMA3, *SIGLIP, *SIGLIP2, WHISPER)
}


def family_of(config: FolderConfig, component: str = "language") -> Family:
    """The family of a folder that is to hold a component. Raises `FolderError` for one that is not there, holds
    another component, or is quantised."""
    known = [kind for kind, family in FAMILIES.items() if family.component == component]
    kind = config.get("model_type")
    if kind not in FAMILIES:
        config.refuse(f"has model_type {kind!r}", f"there are {', '.join(known)}")
    family = FAMILIES[kind]
    if family.component != component:
        key = "model.from" if family.component == "language" else f"model.{family.component}.from"
        config.refuse(
            f"has model_type {kind!r} and so no {component}",
            f"name the folder in {key}, or one of {', '.join(known)} here",
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        config.refuse(
            f"has a quantization_config ({method})", "take the folder of the weights as trained"
        )
    return family
