"""All families, by the kind of model that config.json names and by component."""

from __future__ import annotations

from jaxmllm.families.family import Family
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.gemma3 import GEMMA3
from jaxmllm.families.internvl import INTERNVL
from jaxmllm.families.llama import LLAMA
from jaxmllm.families.mistral import MISTRAL
from jaxmllm.families.qwen2 import QWEN2
from jaxmllm.families.qwen2_5_omni import QWEN2_5_OMNI
from jaxmllm.families.qwen2_5_vl import QWEN2_5_VL
from jaxmllm.families.qwen2_audio import QWEN2_AUDIO
from jaxmllm.families.qwen3 import QWEN3
from jaxmllm.families.qwen3_moe import QWEN3_MOE
from jaxmllm.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from jaxmllm.families.qwen3_vl import QWEN3_VL
from jaxmllm.families.qwen3_vl_moe import QWEN3_VL_MOE
from jaxmllm.families.qwen_image import QWEN_IMAGE
from jaxmllm.families.siglip import SIGLIP, SIGLIP2
from jaxmllm.families.wan import WAN
from jaxmllm.families.whisper import WHISPER

DECODERS = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, *GEMMA3)
TOWERS = (*SIGLIP, *SIGLIP2, WHISPER)
WHOLE_MODELS = (
    *(*QWEN2_5_VL, *QWEN2_AUDIO, *QWEN2_5_OMNI),
    *(*QWEN3_VL, *QWEN3_VL_MOE, *QWEN3_OMNI_MOE, *INTERNVL),
)
GENERATORS = (*WAN, *QWEN_IMAGE)
FAMILIES = {  # by kind and component
    (family.model_type, family.component): family
    for family in (*DECODERS, *TOWERS, *WHOLE_MODELS, *GENERATORS)
}


def components_of(config: FolderConfig) -> tuple[str, ...]:
    """The components that a folder holds; none if its family is not known."""
    return tuple(component for kind, component in FAMILIES if kind == config.kind)


def family_of(config: FolderConfig, component: str = "language") -> Family:
    """The family of a component in a folder. Raises `FolderError` if the family is not known, the
    folder lacks the component, or its weights are quantised."""
    known = [kind for kind, of_family in FAMILIES if of_family == component]
    kind = config.kind
    components = components_of(config)
    if not components:
        config.refuse(f"has model_type {kind!r}", f"there are {', '.join(known)}")
    if component not in components:
        key = "model.from" if "language" in components else f"model.{components[0]}.from"
        config.refuse(
            f"has model_type {kind!r} and so no {component}",
            f"name the folder in {key}, or one of {', '.join(known)} here",
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        config.refuse(
            f"has a quantization_config ({method})", "take the folder of the weights as trained"
        )
    return FAMILIES[kind, component]
