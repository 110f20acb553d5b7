"""Sizing inputs of a small model, and the grids of its exchanges."""

from __future__ import annotations

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.sizes.inputs import Alignment, SizingInputs
from jaxmllm.config.schema import PhaseConfig
from jaxmllm.phases import decoder_phase, encoder_phase

PER_TOKEN = {"vision": 4, "audio": 8, "language": 1}
LONGEST = {"vision": 512, "audio": 512, "language": 1500}
ALIGNMENT = 64
PHASES = encoder_phase("vision"), encoder_phase("audio"), decoder_phase(("vision", "audio"))


def inputs_of(ranks: int, **configs: PhaseConfig) -> list[SizingInputs]:
    """Sizing inputs of every phase on `ranks` ranks, with configs by phase name where they
    differ from the default."""
    return [
        SizingInputs(
            phase,
            ranks,
            Alignment(ALIGNMENT),
            PER_TOKEN[phase.name],
            LONGEST[phase.name],
            ItemCost(1000, 3),
            configs.get(phase.name, PhaseConfig()),
        )
        for phase in PHASES
    ]


def grids_of(make, ranks: int):
    """Exchange grids in which every rank is a peer, for both encoders."""
    return {name: make.grid((ranks, 1, 1)) for name in ("vision", "audio")}
