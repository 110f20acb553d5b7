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
Slots = Annotated[int, Field(gt=0, lt=1 << 31)]  # positions in them are counted in 32 bits
MOST_ROW_CLASSES: Final = 6  # of a phase; each is one more set of programs to compile


class PhaseConfig(Section):
    """Row shapes of one phase: `capacities`, the slots (patches, frames, tokens) of a row on one
    rank, and `spans`, how many neighbouring ranks may hold a row together. Each pair of the two is
    a row class, with one set of programs.

    `auto` capacities are chosen from the lengths of the data, up to `row_classes` of them, none
    above `max_capacity`, each with the span that suits it. Capacities given by hand are combined
    with every span given; `auto` spans are then 1.
    """

    capacities: tuple[PositiveInt, ...] | Auto = "auto"
    # auto: those of 1 to 8, 10 and 12 that are products of the mesh's innermost axes and whose
    # groups stay on a node; with balance.spans_cross_nodes on any nodes, and also 16, 32 and 64
    spans: tuple[PositiveInt, ...] | Auto = "auto"
    # Most row classes; auto: 3, or up to 6 as long as each saves half a percent of a step (with
    # stages three percent, or one in batches of few examples, if a fifth of the phase's slots would
    # be empty with 3)
    row_classes: Annotated[int, Field(ge=1, le=MOST_ROW_CLASSES)] | Auto = "auto"
    max_capacity: Slots | Auto = "auto"  # auto: an estimate of what memory allows
    max_segments: Slots | Auto = "auto"  # most items in a row
    # Tokens of an attention block, of which capacities are multiples. Row classes that would have
    # few blocks have smaller ones, of 64 or 32 tokens, and capacities that are multiples of these
    block: PositiveInt = 128
    # For encoders, and for a decoder that a generator reads: microbatches per step whose backward
    # pass starts from kept residuals of the forward pass instead of running it again; auto: an
    # estimate of how many memory allows
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

    `mode` says what is balanced:

        none       nothing: examples stay on the rank where sampling put them, with their media
        tokens     examples, with their media, by the sum of their tokens in all phases and of the
                   slots of what they draw
        language   the language phase; media stay with their example
        phases     every phase on its own
    """

    mode: Literal["none", "tokens", "language", "phases"] = "phases"
    pool_slots: Slots | Auto = "auto"  # tokens that one pool of a rank holds
    pair_slots: Slots | Auto = "auto"  # tokens from one rank to another in a padded all-to-all
    # A name in balance/exchange/tables.py; auto: ragged where the platform has it, else padded.
    exchange: str = "auto"
    # Devices of a node, by ascending id, however they form ranks; auto: those of a process
    ranks_per_node: PositiveInt | Auto = "auto"
    # Whether ranks of several nodes may hold a row together; its keys and values then cross nodes
    spans_cross_nodes: bool = False
    # FLOPs that a device could compute while it receives one byte of another rank's keys and
    # values: the price of shared rows when capacities are `auto`, and in the costs of pipeline
    # stages; auto: by the platform (costs/gather.py)
    flops_per_gathered_byte: PositiveFloat | Auto = "auto"
    check_every: PositiveInt = 100  # steps between checks that all processes made the same plan
    # File that the command `calibrate` has written; none: items are balanced by FLOPs
    calibration: str | None = None


class MeshConfig(Section):
    """Devices along each mesh axis; -1 on at most one axis takes the rest."""

    data: AxisSize = -1
    fsdp: AxisSize = 1
    context: AxisSize = 1  # parts that a row is split into; see `sequence` in sharding/rules.py
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
    """Pipeline stages, into which layers are cut (docs/pipelines.md); `stages` is the outermost
    mesh axis.

    Numbers count for each replica. A batch that needs more than they allow is computed in several
    runs of the pipeline within the step.
    """

    stages: PositiveInt = 1  # 1: no pipeline
    layout: Literal["auto", "chain", "segments", "parallel"] = "auto"
    # A name in sharding/pipeline/schedules/by_name.py; auto: the fastest, as predicted
    schedule: str = "greedy"
    rollouts: PositiveInt = 64  # greedy schedules that `schedule: search` tries
    # Input and weight gradients as separate operations; auto: if that is predicted to be faster
    split_backward: bool | Auto = False
    # Time of a tick beyond its operations, as FLOPs that the devices of a stage could do in it
    flops_per_tick: NonNegativeFloat = 0.0
    deferral: bool = True  # examples may run their language part one microbatch after their media
    # Microbatches of the language model in a step; auto: as few as hold a batch, in rows chosen by
    # predicted time
    microbatches: PositiveInt | Auto = "auto"
    # Microbatches under way on a rank at one time; auto: 4 * stages, or with schedule: gpipe all of a
    # step. If memory is short, rows are chosen smaller
    microbatches_in_flight: PositiveInt | Auto = "auto"
    # Rows of each encoder that one microbatch may read, and rows of language that one of a
    # generator may read; auto: from the data
    encoder_rows_per_microbatch: PositiveInt | Auto = "auto"
    # Forward operations of each component on a rank that keep what `remat` says for their backward
    # operations; auto: as many as memory holds
    kept_residuals: NonNegativeInt | Auto = "auto"
