"""The price of a microbatch: the start of every layer, and the traffic of its weights."""

from __future__ import annotations

import pytest

from jaxmllm.balance.costs.microbatch import LAYER_START, WEIGHT_SLOTS, microbatch_cost
from jaxmllm.tools.workload import MODEL

SLOT = 7_000  # FLOPs


def test_every_layer_starts_once():
    assert microbatch_cost(MODEL, "language", "cpu", 0, 1) == 36 * LAYER_START["cpu"]
    assert microbatch_cost(MODEL, "vision", "gpu", 0, 1) == 32 * LAYER_START["gpu"]


@pytest.mark.parametrize(("platform", "of_eight"), [("cpu", 1), ("gpu", 8)])
def test_a_device_reads_its_weights_and_adds_to_their_gradients_once(platform, of_eight):
    start = microbatch_cost(MODEL, "vision", platform, 0, 1)
    weights = WEIGHT_SLOTS[platform] * SLOT
    assert microbatch_cost(MODEL, "vision", platform, SLOT, 1) == start + weights
    assert microbatch_cost(MODEL, "vision", platform, SLOT, 8) == start + weights // of_eight


def test_platforms_that_are_not_known_count_as_gpus():
    gpu = microbatch_cost(MODEL, "audio", "gpu", SLOT, 1)
    assert gpu == microbatch_cost(MODEL, "audio", "tpu", SLOT, 1)
    assert microbatch_cost(MODEL, "audio", "cpu", 0, 1) < gpu
