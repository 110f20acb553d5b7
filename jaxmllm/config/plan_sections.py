"""Sections `phases`, `balance`, `mesh` and `pipeline`: rows, and where they are computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from jaxmllm.config.section import Auto, Section

AxisSize = PositiveInt | Literal[-1]


class PhaseConfig(Section):
    """Row shapes of one phase: `capacities` in slots (patches, frames, tokens), one program each.

    `auto` capacities are chosen from the lengths of the data, `row_classes` of them, none above
    `max_capacity`.
    """

    capacities: tuple[PositiveInt, ...] | Auto = "auto"
    row_classes: int = Field(1, ge=1, le=4)
    max_capacity: PositiveInt = 32_768
    max_segments: PositiveInt | Auto = "auto"  # items per row
    block: PositiveInt = 128  # attention block; capacities are multiples of it
    # Language only: slots of a row that all ranks compute together, for one example that is longer
    # than other rows hold.
    long_capacity: PositiveInt | None = None

    @field_validator("capacities")
    @classmethod
    def _check_capacities(cls, capacities: tuple[int, ...] | Auto) -> tuple[int, ...] | Auto:
        if not capacities:
            raise ValueError("must be 'auto' or at least one number of slots (got [])")
        return capacities


class PhasesConfig(Section):
    """Row shapes by phase."""

    vision: PhaseConfig = PhaseConfig()
    audio: PhaseConfig = PhaseConfig()
    language: PhaseConfig = PhaseConfig()

    @model_validator(mode="after")
    def _check(self) -> PhasesConfig:
        for name in ("vision", "audio"):
            if getattr(self, name).long_capacity is not None:
                raise ValueError(
                    f"{name}.long_capacity: only the language phase has long rows; use mesh.context there"
                )
        return self


class BalanceConfig(Section):
    """How work is balanced over ranks, and how tokens are exchanged for it.

    Modes: `none`: examples stay on the rank where sampling put them, with their media; `tokens`:
    examples and their media are spread by one number, their tokens in all phases; `language`: the
    language phase is balanced, media stay with their example; `phases`: every phase is balanced on
    its own.
    """

    mode: Literal["none", "tokens", "language", "phases"] = "phases"
    pool_slots: PositiveInt | Auto = "auto"  # routed tokens that a rank holds in one buffer
    pair_slots: PositiveInt | Auto = "auto"  # tokens from a rank to another per padded all-to-all
    # A name in balance/exchange/tables.py; auto: ragged where the platform has it, else padded.
    exchange: str = "auto"
    ranks_per_node: PositiveInt | Auto = "auto"  # auto: the devices of a process
    check_every: PositiveInt = 100  # steps between comparisons of the plan over processes
    calibration: str | None = None  # file of `jaxmllm calibrate`; none: items are balanced by FLOPs


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
    the step. All rows of a phase are of one class.
    """

    stages: PositiveInt = 1  # 1: no pipeline
    layout: Literal["chain", "segments", "parallel"] = "segments"
    schedule: str = "greedy"  # a name in sharding/pipeline/schedules/by_name.py
    rollouts: PositiveInt = 64  # greedy schedules that a search tries
    split_backward: bool = False  # input and weight gradients as operations of their own
    deferral: bool = True  # examples may run their language part one microbatch after their media
    microbatches: PositiveInt | Auto = "auto"  # of the language model per step; auto: 4 * stages
    microbatches_in_flight: PositiveInt | Auto = "auto"  # on a rank at a time; auto: 4 * stages
    # That one microbatch reads, by encoder
    encoder_rows_per_microbatch: PositiveInt | Auto = "auto"
    # Forwards of each component whose residuals a rank keeps for the backward.
    kept_residuals: int = Field(0, ge=0)
