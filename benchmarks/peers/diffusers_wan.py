"""A transformer of Wan 2.1 as users of diffusers train it, for an interpreter that may have nothing
else.

It makes a random model in the form of a published folder, and answers each step with seconds and
the loss (answering.py).

A batch is an .npz file (peer_diffusers.py writes it) of latents, noise, states of texts, and times.
Items of one shape are a batch of the model, and texts are padded with zeros to the number of states
that the model was published with. A step is forward, backward, clipping and PyTorch's fused AdamW
in float32. A step draws its noise itself; a request for the loss alone (`"step": false`) uses the
noise of the file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from benchmarks.peers.answering import answer

WEIGHTS = "diffusion_pytorch_model.safetensors"
TIMES = 1000  # the model's time runs from 0 for data to this number for pure noise

Item = dict[str, torch.Tensor]  # latents, noise [C, F, H, W]; states [L, D]; time []


def make(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Write a random model in which no parameter is zero."""
    torch.manual_seed(sizes["seed"])
    model = WanTransformer3DModel(**sizes["model"])
    for parameter in model.parameters():
        scale = parameter.ndim == 1 and parameter.mean() > 0.5  # scales of norms are near 1
        spread = 0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        torch.nn.init.normal_(parameter, float(scale), spread)
    model.save_pretrained(folder)


def read(path: Path) -> list[Item]:
    """The items of a batch."""
    with np.load(path) as arrays:
        names = ("latents", "noise", "states", "time")
        return [
            {name: torch.from_numpy(arrays[f"{name}_{i}"]) for name in names}
            for i in range(int(arrays["count"]))
        ]


def by_shape(items: Sequence[Item]) -> list[list[Item]]:
    """Groups of items whose latents have the same shape."""
    groups = defaultdict(list)
    for item in items:
        groups[tuple(item["latents"].shape)].append(item)
    return list(groups.values())


def padded(states: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """States of texts, followed by zeros: [items, length, D]."""
    return torch.stack(
        [torch.nn.functional.pad(text, (0, 0, 0, length - len(text))) for text in states]
    )


class Trainer:
    """The model and its optimizer."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        torch.set_num_threads(settings["threads"])
        self.settings = settings
        # Read by hand, because `from_pretrained` would need one more package
        self.model = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder))
        self.model.load_state_dict(load_file(folder / WEIGHTS))
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings["learning_rate"],
            betas=tuple(settings["betas"]),
            weight_decay=settings["weight_decay"],
            fused=True,
        )

    def __call__(self, items: list[Item], step: bool) -> dict[str, Any]:
        """Train on a batch; return the seconds and the loss. Without `step`, only compute the
        loss."""
        start = time.perf_counter()
        cpu_start = time.process_time()
        value_count = sum(item["latents"].numel() for item in items)
        loss = 0.0
        texts = 0
        groups = by_shape(items)
        for group in groups:
            with torch.set_grad_enabled(step):
                group_loss = self._errors(group, drawn=step) / value_count
            if step:
                group_loss.backward()
            loss += group_loss.item()
            texts += len(group) * self.settings["padded_text"]
        if step:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"])
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        result = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
        }
        return result | {"loss": loss, "batches": len(groups), "padded_text": texts}

    def _errors(self, group: Sequence[Item], drawn: bool) -> torch.Tensor:
        """Sum of the squared errors of the velocity, over items of one shape.

        Args:
          drawn: whether noise is drawn here, instead of taken from the items.
        """
        latents = torch.stack([item["latents"] for item in group])
        noise = torch.stack([item["noise"] for item in group])
        if drawn:
            noise = torch.randn_like(latents)
        times = torch.stack([item["time"] for item in group])
        noisy = torch.lerp(latents, noise, times[:, None, None, None, None])
        text = padded([item["states"] for item in group], self.settings["padded_text"])
        velocity = self.model(noisy, TIMES * times, text, return_dict=False)[0]
        return (velocity - (noise - latents)).square().sum()


if __name__ == "__main__":
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
    answer(make, Trainer, read, versions)
