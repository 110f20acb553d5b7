"""What a microbatch takes besides its slots: every layer starts its operations and collectives anew, and reads
weights and adds to their gradients.

An estimate, for runs without a calibration, which measures it.
"""

from __future__ import annotations

from jaxmllm.config.schema import ModelConfig

# FLOPs that a device could do while a layer starts its operations, forward and backward. CPU: of
# configs/real-small.yaml on 8 forced devices of two cores, a microbatch of each phase takes 60 ms
# however few its slots (`jaxmllm calibrate` with two capacities), 4 to 5 ms a layer and core. GPU: about a
# hundred kernels of 1 to 2 us at 400 TFLOP/s: on an H100 nothing waits for the host where they take 10 us or more.
LAYER_START = {"gpu": 50_000_000_000, "cpu": 300_000_000}
# Slots whose products with weights take as long as what a microbatch does once for all of them with weights and their
# gradients: casts, copies of a layer's own, sums. CPU: a decoder of 31M parameters takes 83 ms less for every row less
# of the same slots, as for 40 of its slots. GPU: one of 1.5B took 20 of 160 ms for it on an H100, as for 1,160 of its
# slots, and 15 of 122 once layers were computed again without a barrier, as for 820 (docs/performance.md); gradients
# were not added in place then, which takes less.
WEIGHT_SLOTS = {"gpu": 1_000, "cpu": 40}


def microbatch_cost(model: ModelConfig, phase: str, platform: str, slot: int, shards: int) -> int:
    """FLOPs that a device of a JAX platform could do besides in the time that a microbatch of a phase takes however
    few its slots: `SizingInputs.microbatch_cost`.

    Args:
      slot: FLOPs of a slot's products with weights.
      shards: devices that parameters are split over. Those of a CPU share its cores, and so do the same together.
    """
    layers: int = getattr(model, phase).layers
    start = layers * LAYER_START.get(platform, LAYER_START["gpu"])
    slots = WEIGHT_SLOTS.get(platform, WEIGHT_SLOTS["gpu"])
    return start + slots * slot // (1 if platform == "cpu" else shards)
