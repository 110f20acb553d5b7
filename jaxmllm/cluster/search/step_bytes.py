"""Bytes of a device at the peak of a step, from shapes and layouts before rows are chosen: an early
estimate of what device_peak.py says of a planned layout.

state         parameters, moments, sums of gradients                    exact
pools         media tokens and states of a step, and room for their gradients
a program     its largest moment                                        temporaries.py
replicas      gradients between replicas, in addition to their sums
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Final

import jax
import jax.numpy as jnp

from jaxmllm.cluster.drawing_program import phase_program
from jaxmllm.cluster.phase_program import PhaseProgram
from jaxmllm.config.schema import Config, Remat
from jaxmllm.models.compose import with_settings
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import step_functions
from jaxmllm.setup.row_memory import state_bytes
from jaxmllm.training.optimizer import MOMENTS
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.programs.phase_functions import phase_functions

SUM_BYTES: Final = 4  # of a gradient before it is scattered, and of a logit
# Tokens and gradients, each of the other phase and of the language model
POOLS: Final = 4
POOL_ROOM: Final = 1.5  # room of a pool over an even share of a step's tokens
# Logical axes that split what a program holds
AXES: Final = ("embed", "heads", "kv_heads", "mlp", "vocab", "experts", "expert_embed")
LARGEST_ROW: Final = 1 << 24  # slots

# Numbers in parameters by component and logical axes: (all, trained)
Numbers = Mapping[str, Mapping[tuple[str | None, ...], tuple[int, int]]]
# Bytes of the largest program of a phase as a function of the slots of its rows, by everything else
# that they depend on. Many layouts share an entry
KnownPrograms = dict[object, Callable[[int], int]]


def parameter_numbers(model: MLLM) -> Numbers:
    """How many numbers a model has, by component and the logical axes of parameters. It is the same
    for all layouts."""
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
    pool_tokens: float  # that a language rank takes in or gives away in a step
    numbers: Numbers  # of the model, see `parameter_numbers`
    known: KnownPrograms = field(default_factory=dict)

    @cached_property
    def state(self) -> float:
        """Bytes that are held between programs, without pools."""
        components = self.model.components.values()
        # Bytes of whole gradients also depend on how parameters are used. All else follows from the
        # counts by logical axes, which many layouts share.
        if any(component.settings.reduce == "step" for component in components):
            return state_bytes(self.config, self.model) / self.stages
        itemsize = jnp.dtype(self.config.run.param_dtype).itemsize
        trained_bytes = MOMENTS * itemsize + max(itemsize, SUM_BYTES)
        total = 0.0
        for name, of_component in self.numbers.items():
            layout = self.model.components[name].layout
            sizes = {axis: layout.size(axis) for axes in of_component for axis in axes if axis}
            averaged_bytes = max(itemsize, SUM_BYTES) if name in self.model.ema else 0
            for axes, (numbers, trained) in of_component.items():
                split = math.prod(sizes[axis] for axis in axes if axis)
                total += (numbers * itemsize + trained * (trained_bytes + averaged_bytes)) / split
        return total / self.stages

    @property
    def stages(self) -> int:
        """Stages that layers are cut into; other parameters are split over them, too."""
        return self.config.pipeline.stages

    def shards(self, name: str) -> float:
        """Trained numbers of a component on one device."""
        layout = self.model.components[name].layout
        numbers_on_device = []
        for axes, (_, trained) in self.numbers[name].items():
            split = math.prod(layout.size(axis) for axis in axes if axis)
            numbers_on_device.append(trained / split)
        return sum(numbers_on_device)

    @cached_property
    def replicas(self) -> float:
        """Bytes of the gradients of components with several replicas, while they are reduced."""
        layouts = {name: self.model.components[name].layout for name in self.numbers}
        several = (
            name
            for name, layout in layouts.items()
            if layout.ranks * layout.parts > layout.size("embed")
        )
        return SUM_BYTES * sum(map(self.shards, several)) / self.stages

    @cached_property
    def pools(self) -> float:
        if self.stages > 1:  # tokens wait in slots of the pipeline
            return 0.0
        token = self.model.config.token_width * self.model.components[LANGUAGE].dtype.itemsize
        return POOLS * POOL_ROOM * self.pool_tokens * token

    @property
    def resident(self) -> float:
        """Bytes that are held between programs, and for a pipeline what a run gathers once."""
        return self.state + self.pools + (self._gathered_bytes if self.stages > 1 else 0.0)

    @cached_property
    def _gathered_bytes(self) -> float:
        """Bytes of parameters outside of layers, on every stage, and of sums of all gradients."""
        itemsize = jnp.dtype(self.config.run.param_dtype).itemsize
        total = 0.0
        for name, of_component in self.numbers.items():
            layout = self.model.components[name].layout
            for axes, (numbers, trained) in of_component.items():
                split = math.prod(layout.size(axis) for axis in axes if axis)
                of_layers = "layers" in axes
                total += SUM_BYTES * trained / split / (self.stages if of_layers else 1)
                total += 0.0 if of_layers else itemsize * numbers / split
        return total

    def program(self, phase: str, slots: int, remat: Remat) -> int:
        """Bytes that the largest program of a phase takes for itself."""
        model = self.model
        components = [phase, *(name for name in model.phases[phase].components if name != phase)]
        layouts = [model.components[name].layout for name in components]
        sizes = [(layout.parts, *map(layout.size, AXES)) for layout in layouts]
        key = (phase, repr(remat), self.stages, *sizes)
        if key not in self.known:
            functions = phase_functions(step_functions(self.config, model, 1), phase)
            names = ("gradients",) if self.stages > 1 else functions.names
            model = with_settings(model, with_remat(self.config, {phase: remat}).components)
            # Made for rows of 1 slot; `with_rows` changes that alone.
            programs = [phase_program(model, ProgramName(name, phase, 1)) for name in names]
            self.known[key] = _largest_program_bytes(programs, self.stages)
        return self.known[key](slots)

    def peak(self, phase: str, slots: int, remat: Remat) -> float:
        """Most bytes held while programs of a phase run, or while replicas reduce gradients."""
        return self.resident + max(self.program(phase, slots, remat), self.replicas)

    def fitting(self, phase: str, budget: float, remat: Remat) -> int:
        """Slots of a rank's row that fit the budget: a power of two, so that layouts with similar
        room have the same rows; 0 where none fit."""
        room = budget - self.resident
        if room < self.replicas:
            return 0
        # The first exponent without room: half its power has room, 0 where one slot has none.
        fit = bisect.bisect_left(
            range(LARGEST_ROW.bit_length()),
            True,
            key=lambda exponent: self.program(phase, 1 << exponent, remat) > room,
        )
        return (1 << fit) >> 1


def _largest_program_bytes(programs: Sequence[PhaseProgram], stages: int) -> Callable[[int], int]:
    """Bytes of the largest program as a function of the slots of its rows."""

    def size(program: PhaseProgram) -> int:
        return program.in_stages(stages) if stages > 1 else program.temporaries().total

    return cache(lambda slots: max(size(program.with_rows(slots)) for program in programs))


def with_remat(config: Config, remats: Mapping[str, Remat]) -> Config:
    """The config with these remats of towers and decoder, by phase."""
    towers = {
        phase: getattr(config.components, phase).model_copy(update={"remat": remat})
        for phase, remat in remats.items()
    }
    return config.model_copy(update={"components": config.components.model_copy(update=towers)})


def with_kept(config: Config, kept: Mapping[str, int]) -> Config:
    """The config with residuals kept of so many microbatches, by phase."""
    phases = {
        phase: getattr(config.phases, phase).model_copy(update={"kept_residuals": microbatches})
        for phase, microbatches in kept.items()
    }
    return config.model_copy(update={"phases": config.phases.model_copy(update=phases)})
