"""The price of a microbatch, and what it does to the choice of rows."""

from __future__ import annotations

from jaxmllm.balance.costs.microbatch import LAYER_START, microbatch_cost
from jaxmllm.tools.workload import MODEL


def test_every_layer_starts_once():
    assert microbatch_cost(MODEL, "language", "cpu") == 36 * LAYER_START["cpu"]
    assert microbatch_cost(MODEL, "vision", "gpu") == 32 * LAYER_START["gpu"]


def test_platforms_that_are_not_known_count_as_gpus():
    gpu = microbatch_cost(MODEL, "audio", "gpu")
    assert microbatch_cost(MODEL, "audio", "cpu") < gpu == microbatch_cost(MODEL, "audio", "tpu")
