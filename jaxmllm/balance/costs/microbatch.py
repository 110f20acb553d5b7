"""What a microbatch takes besides its slots: every layer starts its operations and collectives anew.

An estimate, for runs without a calibration, which measures it.
"""

from __future__ import annotations

from jaxmllm.config.schema import ModelConfig

# FLOPs that a device could do while a layer starts its operations, forward and backward. CPU: of
# configs/real-small.yaml on 8 forced devices of two cores, a microbatch of each phase takes 60 ms
# however few its slots (`jaxmllm calibrate` with two capacities), 4 to 5 ms a layer and core. GPU: about a
# hundred kernels of 1 to 2 us at 400 TFLOP/s, not measured.
LAYER_START = {"gpu": 50_000_000_000, "cpu": 300_000_000}


def microbatch_cost(model: ModelConfig, phase: str, platform: str) -> int:
    """FLOPs that a device of a JAX platform could do while a microbatch of a phase starts:
    `SizingInputs.microbatch_cost`."""
    layers: int = getattr(model, phase).layers
    return layers * LAYER_START.get(platform, LAYER_START["gpu"])
