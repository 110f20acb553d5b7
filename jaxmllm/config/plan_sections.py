"""Sections `phases`, `balance`, `mesh` and `pipeline`: rows, and where they are computed."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from jaxmllm.config.section import Auto, Section

AxisSize = PositiveInt | Literal[-1]
Slots = Annotated[int, Field(gt=0, lt=1 << 31)]  # whose places are counted in 32 bits
MOST_ROW_CLASSES: Final = 6  # of a phase; each is a program to compile


class PhaseConfig(Section):
    """Row shapes of one phase: `capacities`, the slots (patches, frames, tokens) of a row on one rank,
    and `spans`, how many neighbouring ranks may hold a row together. Each pair is one program.

    `auto` capacities are chosen from the lengths of the data, up to `row_classes` of them, none above
    `max_capacity`, each with the span that suits it. Capacities that are given come with every span
    that is given; `auto` spans are then 1.
    """

    capacities: tuple[PositiveInt, ...] | Auto = "auto"
    # auto: those of 1 to 8, 10 and 12 that the mesh's innermost axes multiply to and that stay on a node;
    # with balance.spans_cross_nodes on any nodes, and 16, 32 and 64 besides
    spans: tuple[PositiveInt, ...] | Auto = "auto"
    # auto: up to 3, and up to 6 as long as each saves half a percent of a step
    row_classes: Annotated[int, Field(ge=1, le=MOST_ROW_CLASSES)] | Auto = "auto"
    max_capacity: Slots | Auto = "auto"  # auto: what memory allows, by an estimate
    max_segments: Slots | Auto = "auto"  # items per row
    # Tokens of an attention block. Capacities are multiples of it, or of 64 or 32 tokens, which are blocks of rows that
    # have few of them on a device
    block: PositiveInt = 128
    # Of an encoder, and of a decoder that a generator reads: microbatches per step whose backward pass starts from
    # residuals of the forward pass, instead of running it again; auto: as many as memory allows, by an estimate
    kept_residuals: NonNegativeInt | Auto = "auto"

    @field_validator("capacities")
    @classmethod
    def _check_capacities(cls, capacities: tuple[int, ...] | Auto) -> tuple[int, ...] | Auto:
        if not capacities:
            raise ValueError("must be 'auto' or at least one number of slots (got [])")
        return capacities

    @field_validator("spans")
    @classmethod
    def _check_spans(cls, spans: tuple[int, ...] | Auto) -> tuple[int, ...] | Auto:
        if spans == "auto":
            return spans
        ascending = tuple(sorted(spans))
        chain = all(larger % smaller == 0 for smaller, larger in pairwise(ascending))
        if not spans or len(set(spans)) < len(spans) or not chain:
            raise ValueError(
                "must be 'auto' or different numbers of ranks of which each divides the next, as in "
                f"[1, 2, 8] (got {list(spans)})"
            )
        return ascending


class PhasesConfig(Section):
    """Row shapes by phase."""

    vision: PhaseConfig = PhaseConfig()
    audio: PhaseConfig = PhaseConfig()
    language: PhaseConfig = PhaseConfig()
    diffusion: PhaseConfig = PhaseConfig()


class BalanceConfig(Section):
    """How work is balanced over ranks, and how tokens are exchanged for it.

    Modes: `none`: examples stay on the rank where sampling put them, with their media; `tokens`:
    examples and their media are spread by one number, their tokens in all phases, and the slots of
    what they draw; `language`: the language phase is balanced, media stay with their example;
    `phases`: every phase is balanced on its own.
    """

    mode: Literal["none", "tokens", "language", "phases"] = "phases"
    pool_slots: Slots | Auto = "auto"  # routed tokens that a rank holds in one buffer
    pair_slots: Slots | Auto = "auto"  # tokens from a rank to another per padded all-to-all
    # A name in balance/exchange/tables.py; auto: ragged where the platform has it, else padded.
    exchange: str = "auto"
    # Devices of a node, in the order of their ids, whatever ranks they make; auto: those of a process
    ranks_per_node: PositiveInt | Auto = "auto"
    # Whether ranks of several nodes may hold a row together, whose keys and values then cross nodes.
    spans_cross_nodes: bool = False
    # What a device could compute while a byte of keys and values of another rank arrives: the price
    # of rows of several ranks when `auto` chooses them; auto: by the platform (costs/gather.py).
    flops_per_gathered_byte: PositiveFloat | Auto = "auto"
    check_every: PositiveInt = 100  # steps between comparisons of the plan over processes
    # File of the command `calibrate`; none: items are balanced by FLOPs
    calibration: str | None = None


class MeshConfig(Section):
    """Devices along each mesh axis; -1 on at most one axis takes the rest."""

    data: AxisSize = -1
    fsdp: AxisSize = 1
    context: AxisSize = 1  # parts of a row; see `sequence` in sharding/rules.py
    tensor: AxisSize = 1

    @model_validator(mode="after")
    def _check_rest(self) -> MeshConfig:
        free = [name for name, size in self.model_dump().items() if size == -1]
        if len(free) > 1:
            raise ValueError(
                f"{' and '.join(free)} are -1, but only one axis can take the rest of the devices"
            )
        return self


class PipelineConfig(Section):
    """Stages that layers are cut into (docs/pipelines.md); `stages` is the outermost mesh axis.

    Numbers are per replica. What a batch needs beyond these bounds is computed in further runs within
    the step.
    """

    stages: PositiveInt = 1  # 1: no pipeline
    layout: Literal["auto", "chain", "segments", "parallel"] = "auto"
    # A name in sharding/pipeline/schedules/by_name.py; auto: the fastest, as predicted
    schedule: str = "greedy"
    rollouts: PositiveInt = 64  # greedy schedules that a search tries
    # Input and weight gradients as operations of their own; auto: where that is predicted to pay
    split_backward: bool | Auto = False
    # What a tick takes besides its operations, as FLOPs that the devices of a stage could do
    flops_per_tick: NonNegativeFloat = 0.0
    deferral: bool = True  # examples may run their language part one microbatch after their media
    # Of the language model per step; auto: as few as hold a batch, in rows chosen by predicted time
    microbatches: PositiveInt | Auto = "auto"
    # On a rank at a time; auto: 4 * stages, of which memory may allow fewer; with schedule: gpipe all of a step
    microbatches_in_flight: PositiveInt | Auto = "auto"
    # That one microbatch reads, by encoder
    encoder_rows_per_microbatch: PositiveInt | Auto = "auto"
    # Forwards of each component on a rank that keep what `remat` says for their backward; auto: as many
    # as memory holds
    kept_residuals: NonNegativeInt | Auto = "auto"
