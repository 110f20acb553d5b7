"""What attention costs where several ranks hold a row: each receives the keys and values of the others' slots.

forward     keys and values of every layer are gathered in the group
backward    gathered again, for nothing of it is kept, and their gradients are summed over the group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, TowerConfig
from jaxmllm.phases import LANGUAGE


@dataclass(frozen=True)
class GatherPrice:
    """Constants of the price of gathering."""

    number_bytes: int = 2  # of a key's or a value's element: bfloat16
    passes: int = 3  # forward, again in the backward pass, and the gradients
    # FLOPs that a device could do while a byte arrives: an H100 that does 400 TFLOP/s and gets
    # 400 GB/s of the others in its node. What overlaps with other work costs nothing, and how much
    # does is not known beforehand: none is taken to.
    flops_per_byte: int = 1000


GATHER_PRICE = GatherPrice()


def gathered_bytes(model: ModelConfig, phase: str) -> float:
    """Bytes of keys and values of one row slot, of all layers of a phase: what a rank receives in a forward pass for
    each slot of another rank of its group."""
    return float(_numbers(model, phase)) * GATHER_PRICE.number_bytes


def gather_cost(model: ModelConfig, phase: str) -> int:
    """Price of a row slot of another rank in forward and backward, in FLOPs that could be done meanwhile:
    `SizingInputs.gather_cost`."""
    received = gathered_bytes(model, phase) * GATHER_PRICE.passes
    return round(received * GATHER_PRICE.flops_per_byte)


def _numbers(model: ModelConfig, phase: str) -> Fraction:
    """Elements of the keys and values of one slot, of all layers."""
    if phase == LANGUAGE:
        return _of_language(model.language)
    return _ENCODERS[phase](getattr(model, phase))


def _of_language(config: LanguageConfig) -> Fraction:
    return Fraction(2 * config.layers * config.kv_heads * config.head_size)


def _of_tower(config: TowerConfig) -> Fraction:
    return Fraction(2 * config.layers * config.width)


def _of_audio(config: AudioConfig) -> Fraction:
    """`stem_stride` frames are one token of the tower's attention."""
    return _of_tower(config) / config.stem_stride


_ENCODERS: dict[str, Callable[[Any], Fraction]] = {"vision": _of_tower, "audio": _of_audio}
