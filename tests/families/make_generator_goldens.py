"""Makes the goldens of published generators, with the reference: random tiny checkpoints, and what it makes of them.

python -m tests.families.make_generator_goldens FOLDER        (needs torch 2.13 and diffusers 0.42)

FOLDER/NAME/               config.json, safetensors, as the reference writes them
FOLDER/NAME/inputs.npz     latents_I and direction_I [channels, frames, height, width], states_I [n, D], time_I
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

PADDED = 512  # states of a text, which zeros fill up
SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "ffn_dim": 20,
    "num_layers": 2,
}
OTHERS = SIZES | {"num_attention_heads": 3, "attention_head_dim": 16, "patch_size": (2, 2, 2)}
MODELS: Mapping[str, dict[str, Any]] = {"wan": SIZES, "wan-frames": OTHERS}  # name -> sizes
# (frames, height, width) of latents, states of the text: the last one is drawn without any
ITEMS = (((4, 6, 8), 7), ((2, 4, 10), 19), ((2, 8, 4), 0))


def main(folder: Path, names: tuple[str, ...] = ("wan",), seed: int = 0) -> None:
    """Write the checkpoints and goldens of these names."""
    for name in names:
        make(folder / name, MODELS[name], seed)


def make(folder: Path, sizes: dict[str, Any], seed: int) -> None:
    """One random checkpoint, and what the reference computes of it in float32."""
    import torch
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    model = WanTransformer3DModel(**sizes)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 and parameter.mean() > 0.5 else 0.0  # scales of norms
        spread = 0.2 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        torch.nn.init.normal_(parameter, mean, spread)
    model.save_pretrained(folder)
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    for i, (shape, length) in enumerate(ITEMS):
        latents, direction = random.standard_normal((2, sizes["in_channels"], *shape), np.float32)
        states = random.standard_normal((length, sizes["text_dim"]), np.float32)
        time = np.float32(random.uniform())
        inputs |= {f"latents_{i}": latents, f"direction_{i}": direction}
        inputs |= {f"states_{i}": states, f"time_{i}": time}
        leaves = [torch.tensor(values, requires_grad=True) for values in (latents, states)]
        text = torch.nn.functional.pad(leaves[1], (0, 0, 0, PADDED - length))
        when = torch.tensor([1000 * time])
        velocity = model(leaves[0][None], when, text[None], return_dict=False)[0][0]
        (velocity * torch.tensor(direction)).sum().backward()
        reference[f"velocity_{i}"] = velocity.detach().numpy()
        reference[f"latents_gradient_{i}"] = leaves[0].grad.numpy()
        reference[f"states_gradient_{i}"] = leaves[1].grad.numpy()
    gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    np.savez_compressed(folder / "inputs.npz", **inputs)
    np.savez_compressed(folder / "reference.npz", **reference)
    np.savez_compressed(folder / "gradients.npz", **gradients)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
