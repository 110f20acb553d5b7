"""The cost of a microbatch in addition to its slots: every layer starts its operations and
collectives again, reads weights and adds to their gradients.

An estimate, for runs without a calibration, which would measure it.
"""

from __future__ import annotations

from jaxmllm.config.schema import ModelConfig

# FLOPs that a device could do while a layer starts its operations, forward and backward. CPU: with
# configs/real-small.yaml on 8 forced devices of two cores, a microbatch of each phase takes 60 ms
# however few its slots (`jaxmllm calibrate` with two capacities), 4 to 5 ms per layer and core.
# GPU: about a hundred kernels of 1 to 2 us at 400 TFLOP/s: on an H100 nothing waits for the host
# where kernels take 10 us or more.
LAYER_START = {"gpu": 50_000_000_000, "cpu": 300_000_000}
# Number of slots whose products with weights take as long as what a microbatch does once, for all
# its slots, with weights and their gradients: casts, copies of a layer's own, sums. CPU: with the
# same slots in one row less, a decoder of 31M parameters takes 83 ms less, the time of 40 of its
# slots. GPU: a decoder of 1.5B took 20 of 160 ms for it on an H100, the time of 1,160 of its slots,
# and 15 of 122 ms once layers were computed again without a barrier, the time of 820
# (docs/performance.md); gradients were not added in place then, which takes less.
WEIGHT_SLOTS = {"gpu": 1_000, "cpu": 40}


def microbatch_cost(model: ModelConfig, phase: str, platform: str, slot: int, shards: int) -> int:
    """FLOPs that a device of a JAX platform could do in the time that a microbatch of a phase takes
    however few its slots: `SizingInputs.microbatch_cost`.

    Args:
      slot: FLOPs of a slot's products with weights.
      shards: devices that parameters are split over. Splitting saves nothing on a CPU, whose
        devices share its cores.
    """
    layers: int = getattr(model, phase).layers
    start = layers * LAYER_START.get(platform, LAYER_START["gpu"])
    slots = WEIGHT_SLOTS.get(platform, WEIGHT_SLOTS["gpu"])
    return start + slots * slot // (1 if platform == "cpu" else shards)
