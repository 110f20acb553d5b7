"""How many slots of a row fit a device: an estimate, on the safe side, that bounds what `auto` may choose.

What a backward pass starts from grows with the slots of a row; the state does not. The estimate counts what
each layer keeps, what the largest layer holds while it runs, and leaves as much again to everything else.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmllm.config.schema import Config
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.hardware import device_memory
from jaxmllm.training.optimizer import MOMENTS

PLANNED_MEMORY = 80 << 30  # bytes of a device that is only planned for
USED_SHARE = 0.5  # of what the state leaves, for the rows of one microbatch
LEAST_SHARE = 0.1  # of a device, where the state leaves less: the run will say that it does not fit
# Values of a layer that are kept, by `remat`, and that are there while it runs: in widths of the layer, and
# of its MLP.
KEPT_WIDTHS = {"full": (1, 0), "dots": (6, 2), "none": (12, 4)}
RUNNING_WIDTHS = (16, 6)
# Capacities that differ by little must not differ between hosts: down to a power of two.


def slots_that_fit(config: Config, model: MLLM, phase: str) -> int:
    """Slots of a phase's row that a rank can hold: a power of two."""
    memory = _memory(model)
    left = max(memory - _state_bytes(config, model), memory * LEAST_SHARE)
    slots = left * USED_SHARE / _slot_bytes(config, model, phase)
    parts = model.layout(phase).parts
    return 1 << int(math.log2(max(slots * parts, 1)))


def _memory(model: MLLM) -> int:
    mesh = model.layout(LANGUAGE).mesh
    if not isinstance(mesh, Mesh):
        return PLANNED_MEMORY
    # A device of this process: those of others do not tell theirs
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return device_memory(own[0] if own else mesh.devices.flat[0]) or PLANNED_MEMORY


def _state_bytes(config: Config, model: MLLM) -> int:
    """Parameters, gradients and moments of the largest share that a device holds."""
    params = model.abstract(config.run.param_dtype)
    trained, _ = model.trainable.split(params)

    def bytes_of(tree: object, least: int = 0) -> int:
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * max(leaf.dtype.itemsize, least)
            for leaf in jax.tree.leaves(tree)
        )

    # Gradients add up in at least float32
    return bytes_of(params) + bytes_of(trained, 4) + MOMENTS * bytes_of(trained)


def _slot_bytes(config: Config, model: MLLM, phase: str) -> float:
    """Bytes that a slot of a row takes on the devices of its rank."""
    shapes = getattr(config.model, phase)
    settings = getattr(config.components, phase)
    kept, kept_mlp = KEPT_WIDTHS[settings.remat]
    running, running_mlp = RUNNING_WIDTHS
    values = shapes.layers * (kept * shapes.width + kept_mlp * shapes.mlp_width)
    values += running * shapes.width + running_mlp * shapes.mlp_width
    return float(values * jnp.dtype(settings.compute_dtype).itemsize)
