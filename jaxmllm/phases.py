"""The phases of a run: each has its own rows and programs, and is balanced on its own.

    vision   --tokens-->
                          language   --states-->  diffusion
    audio    --tokens-->

Encoders write tokens that the decoder reads, and have no loss. Generators read the decoder's states
of a stretch of text, and have a loss of their own, as the decoder does.

Planner, training and tools read from a `Phase` what it runs, whose tokens it reads and whether it
has a loss. A new kind of phase is a record made here, never a comparison with a name elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from jaxmllm.config.schema import ADAPTER, PROJECTOR, ModelConfig

# Name of the decoder's phase, component and sections of the config. An example belongs to the rank
# that holds its decoder sequence.
LANGUAGE: Final = "language"


@dataclass(frozen=True)
class Phase:
    """One phase: the components it runs, the phases whose tokens it reads, whether it has a loss.

    A phase without a loss (an encoder) writes tokens that another phase reads, and gets its
    gradients from there. A phase that reads the decoder is a generator.
    """

    name: str  # also the name of its tower or decoder, its row shapes in the config and its metrics
    components: tuple[str, ...]  # in the order of computation
    reads: tuple[str, ...] = ()  # names of phases that are computed before it
    has_loss: bool = False

    @property
    def generates(self) -> bool:
        """Whether it reads states of the decoder, so that its route runs the other way."""
        return LANGUAGE in self.reads


def make_phases(model: ModelConfig) -> dict[str, Phase]:
    """The phases of a model by name, in the order of computation: encoders, decoder, generators."""
    encoders = [encoder_phase(name) for name in model.encoders]
    generators = [generator_phase(name) for name in model.generators]
    phases = (*encoders, decoder_phase(model.encoders), *generators)
    return {phase.name: _with_adapters(phase, model) for phase in phases}


def _with_adapters(phase: Phase, model: ModelConfig) -> Phase:
    """The phase with the adapter of each adapted component listed after it."""
    adapters = {name: f"{ADAPTER}{name}" for name in model.adapters.by_component}
    names = ((name, adapters[name]) if name in adapters else (name,) for name in phase.components)
    return replace(phase, components=tuple(itertools.chain(*names)))


def encoder_phase(name: str) -> Phase:
    """Phase of a tower and its projector, which make tokens for the decoder."""
    return Phase(name, components=(name, f"{PROJECTOR}{name}"))


def decoder_phase(encoders: tuple[str, ...] = ()) -> Phase:
    """Phase of the decoder, which reads the tokens of `encoders` and has a loss."""
    return Phase(LANGUAGE, components=(LANGUAGE,), reads=encoders, has_loss=True)


def generator_phase(name: str) -> Phase:
    """Phase of a generator and its projector, which turns states of the decoder into conditions."""
    return Phase(
        name, components=(f"{PROJECTOR}{LANGUAGE}", name), reads=(LANGUAGE,), has_loss=True
    )


def component_names(phases: Mapping[str, Phase]) -> tuple[str, ...]:
    """Names of all components that the phases run, as in the config, metrics and checkpoints."""
    return tuple(name for phase in phases.values() for name in phase.components)
