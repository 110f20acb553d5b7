"""Makes the goldens of published generators: random tiny checkpoints and what the reference
computes of them.

python -m tests.families.make_generator_goldens FOLDER        (needs torch 2.13 and diffusers 0.42)

FOLDER/NAME/               config.json, safetensors, as the reference writes them
FOLDER/NAME/inputs.npz     latents_I and direction_I [channels, frames, height, width],
                           states_I [n, D], time_I
FOLDER/NAME/reference.npz  velocity_I, and the gradients latents_gradient_I and states_gradient_I
FOLDER/NAME/gradients.npz  by key of the tensor

Gradients are of the sum of velocity_I * direction_I. The reference draws one item at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PADDED = 512  # states of a text, once zeros have filled it up
TIMES = 1000  # Wan's times are thousandths
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "ffn_dim": 20,
    "num_layers": 2,
}
QWEN_IMAGE = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 12,
    "out_channels": 3,
    "joint_attention_dim": 16,
    "num_layers": 2,
    "axes_dims_rope": (2, 2, 4),
}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {  # name -> class, sizes
    "wan": ("WanTransformer3DModel", WAN),
    "wan-frames": (
        "WanTransformer3DModel",
        WAN | {"num_attention_heads": 3, "attention_head_dim": 16, "patch_size": (2, 2, 2)},
    ),
    "qwen-image": ("QwenImageTransformer2DModel", QWEN_IMAGE),
    "qwen-image-wide": (
        "QwenImageTransformer2DModel",
        QWEN_IMAGE
        | {"num_attention_heads": 3, "attention_head_dim": 16, "axes_dims_rope": (2, 8, 6)}
        | {"num_layers": 3, "in_channels": 36, "out_channels": 4, "patch_size": 3},
    ),
}
# (frames, height, width) of latents, and the states of the text. Wan has an item without text.
ITEMS = {
    "WanTransformer3DModel": (((4, 6, 8), 7), ((2, 4, 10), 19), ((2, 8, 4), 0)),
    "QwenImageTransformer2DModel": (((1, 6, 12), 7), ((1, 18, 6), 19), ((1, 6, 6), 1)),
}


def main(
    folder: Path,
    names: tuple[str, ...] = ("wan", "qwen-image"),
    seed: int = 0,
    dtype: str = "float32",
) -> None:
    """Writes the checkpoints and goldens of these names."""
    for name in names:
        make(folder / name, *MODELS[name], seed, dtype)


def make(folder: Path, kind: str, sizes: dict[str, Any], seed: int, dtype: str) -> None:
    """Makes one random checkpoint, and what the reference computes of it in `dtype`, stored as
    float32."""
    import diffusers
    import torch

    torch.manual_seed(seed)
    model = getattr(diffusers, kind)(**sizes)
    for parameter in model.parameters():
        # 1 for the scales of norms.
        mean = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0
        spread = 0.2 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        torch.nn.init.normal_(parameter, mean, spread)
    model.save_pretrained(folder)
    model.to(getattr(torch, dtype))
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    width = sizes.get("text_dim", sizes.get("joint_attention_dim"))
    for i, (shape, length) in enumerate(ITEMS[kind]):
        latents, direction = random.standard_normal((2, sizes["out_channels"], *shape), np.float32)
        states = random.standard_normal((length, width), np.float32)
        time = np.float32(random.uniform())
        inputs |= {f"latents_{i}": latents, f"direction_{i}": direction}
        inputs |= {f"states_{i}": states, f"time_{i}": time}
        leaves = [
            torch.tensor(values.astype(dtype), requires_grad=True) for values in (latents, states)
        ]
        velocity = DRAWN[kind](model, *leaves, torch.tensor([time]))
        (velocity * torch.tensor(direction)).sum().backward()
        reference[f"velocity_{i}"] = velocity.detach().float().numpy()
        reference[f"latents_gradient_{i}"] = leaves[0].grad.float().numpy()
        reference[f"states_gradient_{i}"] = leaves[1].grad.float().numpy()
    gradients = {  # the conditions of the last layer reach no output and have no gradient
        key: np.zeros(parameter.shape, np.float32)
        if parameter.grad is None
        else parameter.grad.float().numpy()
        for key, parameter in model.named_parameters()
    }
    np.savez_compressed(folder / "inputs.npz", **inputs)
    np.savez_compressed(folder / "reference.npz", **reference)
    np.savez_compressed(folder / "gradients.npz", **gradients)


def _wan(model: Any, latents: Any, states: Any, time: Any) -> Any:
    """The velocity [channels, frames, height, width] that Wan predicts. Zeros fill up the text."""
    import torch

    text = torch.nn.functional.pad(states, (0, 0, 0, PADDED - len(states)))
    return model(latents[None], TIMES * time, text[None], return_dict=False)[0][0]


def _qwen_image(model: Any, latents: Any, states: Any, time: Any) -> Any:
    """The velocity that Qwen-Image predicts for a picture.

    The pipeline, not the model, packs latents into patches, with channels first inside a patch."""
    channels, frames, height, width = latents.shape
    side = model.config.patch_size
    rows = height // side
    columns = width // side
    patches = latents.view(channels, rows, side, columns, side).permute(1, 3, 0, 2, 4)
    output = model(
        patches.reshape(1, rows * columns, -1),
        states[None],
        timestep=time,
        img_shapes=[[(frames, rows, columns)]],
        return_dict=False,
    )[0]
    velocity = output.view(rows, columns, channels, side, side).permute(2, 0, 3, 1, 4)
    return velocity.reshape(latents.shape)


DRAWN = {"WanTransformer3DModel": _wan, "QwenImageTransformer2DModel": _qwen_image}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
