"""The price of a microbatch, and what it does to the choice of rows."""

from __future__ import annotations

from jaxmllm.balance.costs.microbatch import LAYER_START, WEIGHT_SLOTS, microbatch_cost
from jaxmllm.tools.workload import MODEL

SLOT = 7_000  # FLOPs


def test_every_layer_starts_once():
    assert microbatch_cost(MODEL, "language", "cpu", 0) == 36 * LAYER_START["cpu"]
    assert microbatch_cost(MODEL, "vision", "gpu", 0) == 32 * LAYER_START["gpu"]


def test_a_cpu_reads_weights_and_adds_to_gradients_once():
    more = microbatch_cost(MODEL, "vision", "cpu", SLOT) - microbatch_cost(
        MODEL, "vision", "cpu", 0
    )
    assert more == WEIGHT_SLOTS["cpu"] * SLOT


def test_platforms_that_are_not_known_count_as_gpus():
    gpu = microbatch_cost(MODEL, "audio", "gpu", SLOT)
    assert gpu == microbatch_cost(MODEL, "audio", "tpu", SLOT)
    assert microbatch_cost(MODEL, "audio", "cpu", 0) < gpu
