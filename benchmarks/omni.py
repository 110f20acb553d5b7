"""Omni models that the benchmarks compile and run, and whole configs around them.

Each model has a vision tower, an audio tower and a decoder. `2B` fits one device of 80 GB with its
AdamW state, and `7B` is of the size of Qwen2.5-Omni. `30B-A3B` has a decoder of the size of
Qwen3-30B-A3B, with experts as MLPs. `84B` and `OrchMLLM-84B` have a decoder of the size of
Qwen2.5-72B; the towers of `OrchMLLM-84B` have other widths (arXiv 2503.23830). `tiny` is for trying
out the code itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import Config

Tree = dict[str, Any]

LANGUAGE_72B: dict[str, Any] = {
    "width": 8192,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "head_size": 128,
    "mlp_width": 29_568,
    "vocab_size": 152_064,
}
AUDIO_0_6B: dict[str, Any] = {
    "width": 1280,
    "layers": 32,
    "heads": 20,
    "mlp_width": 5120,
    "mel_bins": 128,
    "chunk_frames": 32,
}
MODELS: Final[Mapping[str, Tree]] = {
    "tiny": {
        "vision": {"width": 64, "layers": 2, "heads": 2, "mlp_width": 128},
        "audio": {
            "width": 64,
            "layers": 2,
            "heads": 2,
            "mlp_width": 128,
            "mel_bins": 40,
            "chunk_frames": 32,
        },
        "language": {
            "width": 64,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_size": 16,
            "mlp_width": 128,
            "vocab_size": 512,
        },
    },
    "2B": {
        "vision": {"width": 1024, "layers": 24, "heads": 16, "mlp_width": 4096},
        "audio": {
            "width": 1024,
            "layers": 24,
            "heads": 16,
            "mlp_width": 4096,
            "mel_bins": 128,
            "chunk_frames": 32,
        },
        "language": {
            "width": 1536,
            "layers": 28,
            "heads": 12,
            "kv_heads": 2,
            "head_size": 128,
            "mlp_width": 8960,
            "vocab_size": 151_936,
            "tie_embeddings": True,
        },
    },
    "7B": {
        "vision": {"width": 1280, "layers": 32, "heads": 16, "mlp_width": 5120},
        "audio": AUDIO_0_6B,
        "language": {
            "width": 3584,
            "layers": 28,
            "heads": 28,
            "kv_heads": 4,
            "head_size": 128,
            "mlp_width": 18_944,
            "vocab_size": 152_064,
        },
    },
    "30B-A3B": {
        "vision": {"width": 1152, "layers": 27, "heads": 16, "mlp_width": 4304},
        "audio": AUDIO_0_6B,
        "language": {
            "width": 2048,
            "layers": 48,
            "heads": 32,
            "kv_heads": 4,
            "head_size": 128,
            "mlp_width": 768,
            "vocab_size": 151_936,
            "experts": {"count": 128, "per_token": 8, "renormalise": True},
        },
    },
    "84B": {
        "vision": {"width": 4096, "layers": 48, "heads": 32, "mlp_width": 16_384},
        "audio": {
            "width": 2048,
            "layers": 32,
            "heads": 16,
            "mlp_width": 8192,
            "mel_bins": 128,
            "chunk_frames": 32,
        },
        "language": LANGUAGE_72B,
    },
    "OrchMLLM-84B": {
        "vision": {"width": 4096, "layers": 51, "heads": 32, "mlp_width": 16_384},
        "audio": AUDIO_0_6B,
        "language": LANGUAGE_72B,
    },
}
COMPUTE_DTYPE: Final = "bfloat16"


def omni_config(model: str, **sections: Any) -> Config:
    """A whole config of a model that computes in bfloat16, without real data.

    Args:
      sections: sections of the config other than `model` and `components`; `data` may leave out its
        sources. The key `remat` applies to the towers and the decoder, `reduce_dtype` and `reduce`
        apply to all components.

    Raises:
      ConfigError: the sections do not make a config.
    """
    remat = sections.pop("remat", "full")
    settings = {"compute_dtype": COMPUTE_DTYPE}
    settings |= {key: sections.pop(key) for key in ("reduce_dtype", "reduce") if key in sections}
    layer_settings = settings | {"remat": remat}
    components = {phase: layer_settings for phase in MODELS[model]}
    components["projector"] = {phase: settings for phase in MODELS[model] if phase != "language"}
    tree: Tree = {
        "run": {"directory": "runs/omni", "steps": 4},
        "optimizer": {"learning_rate": 1e-4},
        "model": MODELS[model],
        "components": components,
    }
    tree |= sections
    tree["data"] = {"sources": [{"name": "none", "path": "none.jsonl"}]} | tree.get("data", {})
    return parse_config(tree)
