"""The price of gathering keys and values, from the shapes of a model."""

from __future__ import annotations

from jaxmllm.balance.costs.gather import (
    GATHER_PRICE,
    flops_per_byte,
    gather_cost,
    gathered_bytes,
)
from jaxmllm.tools.workload import MODEL


def test_bytes_of_a_slot_are_those_of_its_keys_and_values():
    """Keys and values of two bytes: 36 language layers of 8 heads of 128, 32 layers of width 1280
    in each tower. Audio has one token per stride of its stem."""
    assert gathered_bytes(MODEL, "language") == 2 * 2 * 36 * 8 * 128
    assert gathered_bytes(MODEL, "vision") == 2 * 2 * 32 * 1280
    assert gathered_bytes(MODEL, "audio") == 2 * 2 * 32 * 1280 / MODEL.audio.stem_stride


def test_the_price_counts_what_is_waited_for_in_every_pass():
    for phase in ("vision", "audio", "language"):
        received = GATHER_PRICE.passes * gathered_bytes(MODEL, phase)
        assert gather_cost(MODEL, phase, 400) == received * 400 * GATHER_PRICE.exposed


def test_platforms_that_are_not_known_count_as_gpus():
    assert flops_per_byte("cpu") < flops_per_byte("gpu") == flops_per_byte("cuda")
