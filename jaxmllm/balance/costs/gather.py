"""The price of rows that several ranks hold: for attention, each rank receives the keys and values
of the others' slots.

forward     keys and values of every layer are gathered in the group
backward    gathered again, because they are not kept, and their gradients summed over the group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from jaxmllm.config.schema import (
    DiffusionConfig,
    LanguageConfig,
    ModelConfig,
    TowerConfig,
)


@dataclass(frozen=True)
class GatherPrice:
    """Constants of the price of gathering."""

    number_bytes: int = 2  # of a key's or a value's element: bfloat16
    passes: int = 3  # forward, again in the backward pass, and the gradients
    # Of four groups of heads, the first is waited for; the others arrive during attention
    # (sharding/context.py).
    exposed: Fraction = Fraction(1, 4)
    # FLOPs that a device could do while a byte arrives. GPU: an H100 that does 400 TFLOP/s and gets
    # 400 GB/s from the others in its node. CPU: rows of span 8 compared with rows of span 1 with
    # the same attention, by `jaxmllm calibrate` of configs/real-small.yaml on 8 forced devices of
    # two cores; nothing overlaps there, numbers have 4 bytes, and gathered data is copied again.
    flops_per_byte: Mapping[str, int] = field(default_factory=lambda: {"gpu": 1000, "cpu": 400})


GATHER_PRICE = GatherPrice()


def gathered_bytes(
    model: ModelConfig, phase: str, number_bytes: int = GATHER_PRICE.number_bytes
) -> float:
    """Bytes of the keys and values of one slot in all layers of a phase: what a rank receives in a
    forward pass for each slot of another rank of its group.

    Args:
      number_bytes: bytes of an element of a key or a value.
    """
    return float(_key_value_numbers(model, phase)) * number_bytes


def flops_per_byte(platform: str) -> int:
    """FLOPs that a device of a JAX platform could do while a byte arrives from another rank in its
    node."""
    return GATHER_PRICE.flops_per_byte.get(platform, GATHER_PRICE.flops_per_byte["gpu"])


def gather_cost(model: ModelConfig, phase: str, per_byte: float) -> int:
    """Price of gathering one slot of another rank, forward and backward, in FLOPs that could be
    done while waiting for it: `SizingInputs.gather_cost`.

    Args:
      per_byte: FLOPs per byte, from `flops_per_byte` or known for the cluster.
    """
    received = gathered_bytes(model, phase) * GATHER_PRICE.passes
    return round(received * per_byte * GATHER_PRICE.exposed)


def _key_value_numbers(model: ModelConfig, phase: str) -> Fraction:
    """Elements of the keys and values of one slot in all layers."""
    config: LanguageConfig | TowerConfig | DiffusionConfig = getattr(model, phase)
    if isinstance(config, LanguageConfig):
        return Fraction(2 * config.layers * config.kv_heads * config.head_size)
    # `stem_stride` slots of a tower are one token of its attention
    numbers = Fraction(2 * config.layers * config.width, config.stem_stride)
    return numbers * (config.attentions if isinstance(config, DiffusionConfig) else 1)
