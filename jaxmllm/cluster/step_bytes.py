"""Bytes of a device at the peak of a step, from shapes, layouts and the rows: an estimate before anything is compiled.

state         parameters, moments, sums of gradients                    exact
pools         media tokens of a step, and room for their gradients
a program     its rows as layers keep them, the layer that runs, gathered weights, the head's logits
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import jax
import jax.numpy as jnp

from jaxmllm.config.schema import Config
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.row_memory import RUNNING_WIDTHS, kept_bytes, kept_weights, state_bytes
from jaxmllm.training.optimizer import MOMENTS

SUM_BYTES: Final = 4  # of a gradient before it is scattered, and of a logit
# Pools that are there at once: encoders' and the language model's, tokens or gradients
POOLS: Final = 2
# A layer's weights are gathered while those of the one before are used
GATHERED_LAYERS: Final = 2


# By component and logical axes: all, and those that are trained
Numbers = Mapping[str, Mapping[tuple[str | None, ...], tuple[int, int]]]


def parameter_numbers(model: MLLM) -> Numbers:
    """How many numbers a model has by the logical axes that split them, whatever its layouts."""
    trained, _ = model.trainable.split(
        {name: component.shapes for name, component in model.components.items()}
    )
    result = {}
    for name, component in model.components.items():
        of_component: dict[tuple[str | None, ...], tuple[int, int]] = {}
        for tree, index in ((component.shapes, 0), (trained.get(name, {}), 1)):
            axes_of_leaves = jax.tree.leaves(component.axes_of(tree))
            for leaf, axes in zip(jax.tree.leaves(tree), axes_of_leaves, strict=True):
                counts = [*of_component.get(axes.names, (0, 0))]
                counts[index] += leaf.size
                of_component[axes.names] = (counts[0], counts[1])
        result[name] = of_component
    return result


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a config on a mesh. Rows are given in slots of a rank."""

    config: Config
    model: MLLM
    pool_tokens: float  # media tokens of a rank of the language model, in a step
    numbers: Numbers  # of the model, see `parameter_numbers`

    @cached_property
    def state(self) -> float:
        """What lies there between the programs, but for pools."""
        components = self.model.components.values()
        if any(part.settings.reduce == "step" for part in components):
            return state_bytes(self.config, self.model)
        itemsize = jnp.dtype(self.config.run.param_dtype).itemsize
        trained_bytes = MOMENTS * itemsize + max(itemsize, SUM_BYTES)
        total = 0.0
        for name, of_component in self.numbers.items():
            layout = self.model.components[name].layout
            sizes = {axis: layout.size(axis) for axes in of_component for axis in axes if axis}
            for axes, (numbers, trained) in of_component.items():
                split = math.prod(sizes[axis] for axis in axes if axis)
                total += (numbers * itemsize + trained * trained_bytes) / split
        return total

    @cached_property
    def pools(self) -> float:
        token = self.model.config.language.width * self.model.components[LANGUAGE].dtype.itemsize
        return POOLS * self.pool_tokens * token

    @property
    def resident(self) -> float:
        """All that lies there between programs."""
        return self.state + self.pools

    def slot(self, phase: str) -> float:
        """Of one slot of a row on each device of its rank."""
        layout = self.model.layout(phase)
        shapes = getattr(self.config.model, phase)
        itemsize = self.model.components[phase].dtype.itemsize
        kept = self.kept_slot(phase)
        running, running_mlp = RUNNING_WIDTHS
        inner = layout.size("mlp")
        # Norms and residuals are whole on every device that splits a layer inside
        values = (
            running * shapes.width * (1 + 1 / inner) / 2 + running_mlp * shapes.mlp_width / inner
        )
        return (kept + values * itemsize) / layout.parts

    def kept_slot(self, phase: str) -> float:
        """What of it stays until the backward pass."""
        shapes = getattr(self.config.model, phase)
        itemsize = self.model.components[phase].dtype.itemsize
        inputs = shapes.layers * shapes.width * itemsize
        inside = kept_bytes(self.config, phase) - inputs
        return inputs + inside / self.model.layout(phase).size("mlp")

    def weights(self, phase: str) -> float:
        """Of gathered weights and their gradients, and of the logits of a chunk."""
        component = self.model.components[phase]
        inner = component.layout.size("mlp")
        itemsize = component.dtype.itemsize
        layer = sum(
            math.prod(leaf.shape[1:])
            for path, leaf in jax.tree.leaves_with_path(component.shapes)
            if "layers" in jax.tree_util.keystr(path)
        )
        largest = layer / inner * (GATHERED_LAYERS * itemsize + SUM_BYTES)
        kept = kept_weights(self.config, self.model, phase) / inner
        if phase != LANGUAGE:
            return largest + kept
        language = self.model.config.language
        split = component.layout.size("vocab")
        head = language.width * self.model.vocab_size / split * (itemsize + SUM_BYTES)
        logits = 2 * language.loss_chunk * self.model.vocab_size / split * SUM_BYTES
        return max(largest, head) + kept + logits

    def peak(self, capacities: Mapping[str, int]) -> dict[str, float]:
        """Of the programs of each phase, by phase."""
        return {
            phase: self.resident + self.weights(phase) + slots * self.slot(phase)
            for phase, slots in capacities.items()
        }

    def fitting(self, phase: str, budget: float) -> int:
        """Slots of a rank's row for which there is room: a power of two, so that layouts of like room have like rows;
        0 where there is none."""
        slots = (budget - self.resident - self.weights(phase)) / self.slot(phase)
        return 1 << int(math.log2(slots)) if slots >= 1 else 0
