"""How the makers of goldens write what the reference computes, in little space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

BITS: Final = 16


def write_numbers(
    folder: Path,
    inputs: Mapping[str, np.ndarray],
    logits: np.ndarray,
    loss: np.ndarray,
    gradients: Mapping[str, np.ndarray],
) -> None:
    """Writes a decoder's inputs with their `attention_mask` [B, T], logits [B, T, V], loss and
    gradients."""
    valid = inputs["attention_mask"].astype(bool)
    np.savez_compressed(folder / "inputs.npz", **inputs)
    np.savez_compressed(folder / "reference.npz", valid=valid, logits=logits, loss=loss)
    np.savez_compressed(folder / "gradients.npz", **gradients)


def compact(folder: Path) -> None:
    """Rounds the gradients of all goldens of a folder and writes them anew.

    A variant is named after its family, a hyphen and what differs. It keeps the gradients of
    vectors alone: every layer has some, and the family's own golden covers the matrices."""
    for file in folder.glob("*/gradients.npz"):
        with np.load(file) as gradients:
            rounded_gradients = {
                key: rounded(gradient)
                for key, gradient in gradients.items()
                if "-" not in file.parent.name or gradient.ndim == 1
            }
        np.savez_compressed(file, **rounded_gradients)


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds values to 1.6e-5 of the largest one. The bits that remain compress to half the space."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0:
        return values
    step = 2.0 ** (np.ceil(np.log2(largest)) - BITS)
    return (np.round(values / step) * step).astype(values.dtype)
