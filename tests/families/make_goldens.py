"""Makes the goldens of published families: random tiny checkpoints and what the reference computes
of them.

python -m tests.families.make_goldens FOLDER        (needs torch 2.13 and transformers 5.23)

FOLDER/NAME/               config.json, safetensors, as the reference writes them
FOLDER/NAME/inputs.npz     input_ids, attention_mask [B, T]
FOLDER/NAME/reference.npz  valid [B, T], logits [B, T, V], loss (mean over the next tokens)
FOLDER/NAME/gradients.npz  gradients of the loss, by key of the tensor; golden_files.py says which
                           are kept and how exactly

The goldens of models that read pictures or hear sounds hold more: see make_pictured_goldens.py,
make_square_goldens.py, make_heard_goldens.py and make_omni_goldens.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.golden_files import compact, write_numbers
from tests.families.make_heard_goldens import HEARD, make_heard
from tests.families.make_omni_goldens import LIVE, OMNI, experts_as_stored, make_omni
from tests.families.make_pictured_goldens import PICTURED, make_pictured
from tests.families.make_square_goldens import SQUARE, make_square

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"moe_intermediate_size": 10, "num_experts": 6, "num_experts_per_tok": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
LAYER_TYPES = ["sliding_attention", "full_attention"]
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
GEMMA = {
    "hidden_size": 20,
    "head_dim": 6,
    "query_pre_attn_scalar": 10,
    "sliding_window": 5,
    "layer_types": LAYER_TYPES,
}
# name -> (model_type, what differs from SIZES, dtype)
MODELS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "llama": (
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 8},
        "float32",
    ),
    "llama-biased": (
        "llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "rms_norm_eps": 1e-5},
        "float32",
    ),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 6}, "float32"),
    "mistral-wide": (
        "mistral",
        {"sliding_window": None, "head_dim": 12, "rope_parameters": YARN},
        "bfloat16",
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, "float32"),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "float32",
    ),
    "qwen3": ("qwen3", {"head_dim": 8, "rope_parameters": YARN}, "float32"),
    "qwen3-biased": ("qwen3", {"head_dim": 4, "attention_bias": True}, "float32"),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, **EXPERTS, "norm_topk_prob": True, "rope_parameters": YARN},
        "float32",
    ),
    "qwen3_moe-weighted": ("qwen3_moe", {"head_dim": 4, **EXPERTS}, "bfloat16"),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "rope_parameters": dict(zip(LAYER_TYPES, (LOCAL, LINEAR), strict=True))},
        "float32",
    ),
    "gemma3-biased": (
        "gemma3_text",
        {**GEMMA, "attention_bias": True, "tie_word_embeddings": False},
        "bfloat16",
    ),
}
# Other kernels require sizes that no test here has.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
LENGTHS = (23, 9, 14)  # of the texts, which the tests pack into one row


def main(
    folder: Path,
    names: tuple[str, ...] = (*MODELS, *PICTURED, *SQUARE, *HEARD, *OMNI),
    seed: int = 0,
    **sizes: Any,
) -> None:
    """Writes the checkpoints and goldens of these names. `sizes` change text models alone."""
    for name in names:
        if name in PICTURED:
            make_pictured(folder / name, *PICTURED[name], seed)
            continue
        if name in SQUARE:
            make_square(folder / name, *SQUARE[name], seed)
            continue
        if name in HEARD:
            make_heard(folder / name, *HEARD[name], seed)
            continue
        if name in OMNI | LIVE:
            make_omni(folder / name, *(OMNI | LIVE)[name], seed)
            continue
        model_type, changes, dtype = MODELS[name]
        make(folder / name, model_type, SIZES | changes | sizes, dtype, seed)


def make(
    folder: Path,
    model_type: str,
    values: dict[str, Any],
    dtype: str,
    seed: int,
    computed_in: str = "float32",
) -> None:
    """Makes one random checkpoint, in files of at most 8 kB, and what the reference computes of it.

    Args:
      computed_in: type of the products; norms, positions and routers stay in float32 in any case.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, **EAGER)
    for key, parameter in model.named_parameters():
        # These would be all 0 or all 1.
        if key.endswith(("bias", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter, parameter[0].item(), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="8KB")
    # Read the model again: `to` has rounded what is computed from the config, too.
    compute_dtype = getattr(torch, computed_in)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype, **EAGER)
    random = np.random.default_rng(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    ids = np.where(mask, random.integers(3, values["vocab_size"], shape), 0)
    # The mask is left out. Texts do not see the padding behind them, so it changes no real token.
    # With the mask, windows of nothing but padding have no key, and the softmax, float32 in any
    # case, is NaN there: float32 cannot hold the lowest number of float64.
    output = model(input_ids=torch.tensor(ids), labels=torch.tensor(np.where(mask, ids, -100)))
    output.loss.backward()
    logits, loss = (value.detach().numpy() for value in (output.logits, output.loss))
    gradients: dict[str, Any] = {}
    for key, parameter in model.named_parameters():
        gradients |= experts_as_stored(key, parameter.grad.numpy())
    inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
    write_numbers(folder, inputs, logits, loss, gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    compact(Path(sys.argv[1]))
