"""A thinker of Qwen2.5-Omni as users of transformers train it, for an interpreter that may have
nothing else.

It makes a random model in the form of a published folder, and answers each step with seconds and
the loss (answering.py).

A batch is an .npz file of examples whose media are decoded (peer_hf.py writes it). The host does
the work of the processor: it pads the texts of a micro-batch to the longest, normalises patches and
puts them end to end, and pads the frames of clips to the longest. A step is forward, backward,
clipping and PyTorch's fused AdamW in float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.peers.answering import answer

SCALE = 0.02  # standard deviation of matrices, as in published configs
NO_TARGET = -100  # the label that the loss of transformers ignores

Example = dict[str, Any]  # tokens, targets [L]; images, grids, clips: lists


def make(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Write a random model, and the configuration of its processor of media."""
    torch.manual_seed(sizes["seed"])
    model = Qwen2_5OmniThinkerForConditionalGeneration(Qwen2_5OmniThinkerConfig(**sizes["model"]))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, SCALE)
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(**sizes["images"])
    sounds = transformers.WhisperFeatureExtractor(**sizes["sounds"])
    processors = {"feature_extractor": sounds.to_dict(), "image_processor": images.to_dict()}
    (folder / "processor_config.json").write_text(json.dumps(processors))


def read(path: Path) -> list[Example]:
    """The examples of a batch."""
    with np.load(path) as arrays:
        counts = arrays["counts"].tolist()
        return [
            {
                "tokens": arrays[f"tokens_{i}"],
                "targets": arrays[f"targets_{i}"],
                "images": [arrays[f"image_{i}_{j}"] for j in range(images)],
                "grids": [arrays[f"grid_{i}_{j}"] for j in range(images)],
                "clips": [arrays[f"clip_{i}_{j}"] for j in range(clips)],
            }
            for i, (images, clips) in enumerate(counts)
        ]


def collate(examples: Sequence[Example], settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs that the processor would make of a micro-batch, from decoded media."""
    max_length = max(len(example["tokens"]) for example in examples)
    shape = (len(examples), max_length)
    ids = np.zeros(shape, np.int64)
    labels = np.full(shape, NO_TARGET, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, example in enumerate(examples):
        length = len(example["tokens"])
        ids[row, :length], mask[row, :length] = example["tokens"], 1
        # The model shifts labels itself, so our target of a token is the label of the next one
        following = example["targets"][: length - 1]
        labels[row, 1:length] = np.where(following < 0, NO_TARGET, following)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    images = [image for example in examples for image in example["images"]]
    if images:
        mean, std = (np.float32(settings[key]) for key in ("pixel_mean", "pixel_std"))
        size = settings["patch_size"]
        frames = settings["patch_frames"]
        colors = np.concatenate(images).reshape(-1, size, size, 3).astype(np.float32) / 255
        pixels = ((colors - mean) / std).transpose(0, 3, 1, 2)[:, :, None]
        inputs["pixel_values"] = np.repeat(pixels, frames, axis=2).reshape(len(pixels), -1)
        grids = [grid for example in examples for grid in example["grids"]]
        inputs["image_grid_thw"] = np.array(grids, np.int64)
    clips = [clip for example in examples for clip in example["clips"]]
    if clips:
        frames = max(map(len, clips))
        features = np.zeros((len(clips), clips[0].shape[1], frames), np.float32)
        audio_mask = np.zeros((len(clips), frames), np.int64)
        for row, clip in enumerate(clips):
            features[row, :, : len(clip)], audio_mask[row, : len(clip)] = clip.T, 1
        inputs |= {"input_features": features, "feature_attention_mask": audio_mask}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}


class Trainer:
    """The model and its optimizer."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        torch.set_num_threads(settings["threads"])
        self.settings = settings
        model = Qwen2_5OmniThinkerForConditionalGeneration
        self.model = model.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        for parameter in self.model.parameters():  # the reference freezes some positions
            parameter.requires_grad_(True)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings["learning_rate"],
            betas=tuple(settings["betas"]),
            weight_decay=settings["weight_decay"],
            fused=True,
        )

    def __call__(self, examples: list[Example], step: bool) -> dict[str, Any]:
        """Train on a batch; return the seconds of the step and of the processor's work, and the
        loss. Without `step`, only compute the loss."""
        start = time.perf_counter()
        cpu_start = time.process_time()
        host = 0.0
        if self.settings["grouped"]:
            examples = sorted(examples, key=lambda example: len(example["tokens"]))
        total = sum(int((example["targets"][:-1] >= 0).sum()) for example in examples)
        loss = 0.0
        slots = 0
        for offset in range(0, len(examples), self.settings["micro_batch"]):
            collate_start = time.perf_counter()
            inputs = collate(
                examples[offset : offset + self.settings["micro_batch"]], self.settings
            )
            host += time.perf_counter() - collate_start
            share = int((inputs["labels"] != NO_TARGET).sum()) / total
            slots += inputs["input_ids"].numel()
            with torch.set_grad_enabled(step):
                microbatch_loss = share * self.model(**inputs, use_cache=False).loss
            if step:
                microbatch_loss.backward()
            loss += microbatch_loss.item()
        if step:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip"])
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        result = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
        }
        return result | {"host": host, "loss": loss, "targets": total, "slots": slots}


if __name__ == "__main__":
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    answer(make, Trainer, read, versions)
