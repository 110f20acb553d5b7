"""Step time in closed form: one microbatch of each phase with an even share of the batch, times how
many there are.

Only sums of the batch's lengths count, so no rank waits for a slower one and rows have no padding.
Layouts are ranked by this time before steps are planned for them (sieves.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Floats, ceil_divide
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import (
    BatchItems,
    PhaseItems,
    PhasePlan,
    PlanSpec,
    RoutePlan,
    RouteRound,
    RouteSpec,
    RowClass,
    StepPlan,
)
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.simulate import simulate
from jaxmllm.config.schema import BalanceConfig
from jaxmllm.models.mllm import MLLM
from jaxmllm.setup.exchange_layout import exchange_grids
from jaxmllm.training.programs.phased import PhasedPrograms

NOTHING = np.zeros(1, np.int32)
NO_LENGTH = np.zeros(1, np.int64)


@dataclass(frozen=True)
class PhaseLoad:
    """Sums over a phase's items in a batch, as means over batches."""

    slots: float
    squares: Floats  # sums of `ItemCost.squares` over the items, by kind of layer
    tokens: float  # language tokens that the items become


@dataclass(frozen=True)
class EvenRows:
    """Rows of a phase that hold an even share of its load: slots per rank, and microbatches."""

    capacity: int
    microbatches: int


def mean_loads(
    batches: Sequence[BatchItems], flops: Mapping[str, ItemCost]
) -> dict[str, PhaseLoad]:
    """The load of a batch, by phase."""
    loads = {}
    for phase, cost in flops.items():
        items_of_batches = [batch.phases[phase] for batch in batches]
        slots = [items.length.sum() for items in items_of_batches]
        squares = [_square_sums(items, cost) for items in items_of_batches]
        tokens = [items.tokens.sum() for items in items_of_batches]
        loads[phase] = PhaseLoad(
            slots=float(np.mean(slots)),
            squares=np.mean(squares, axis=0),
            tokens=float(np.mean(tokens)),
        )
    return loads


def _square_sums(items: PhaseItems, cost: ItemCost) -> list[float]:
    squares = cost.squares(items.length.astype(float), items.extra)
    return [float(np.sum(kind)) for kind in squares]


def even_rows(load: PhaseLoad, inputs: SizingInputs, most: int) -> EvenRows:
    """The fewest rows per rank, of at most `most` slots, that hold an equal share of the load."""
    per_rank = math.ceil(load.slots / inputs.ranks)
    alignment = inputs.alignment
    largest = max(alignment.round_down(most), alignment.round_up(1))
    microbatches = max(ceil_divide(per_rank, largest), 1)
    share = alignment.round_up(max(ceil_divide(per_rank, microbatches), 1))
    return EvenRows(share, microbatches)


def even_spec(
    model: MLLM,
    inputs: Sequence[SizingInputs],
    rows: Mapping[str, EvenRows],
    balance: BalanceConfig,
    backend: str,
) -> PlanSpec:
    """Sizes with one class of rows per phase."""
    specs = {
        sizing.name: phase_spec(sizing, (RowClass(rows[sizing.name].capacity),), max_segments=1)
        for sizing in inputs
    }
    routes = {
        phase: RouteSpec(grid, encoder_pool=1, language_pool=1, pair_slots=1, backend=backend)
        for phase, grid in exchange_grids(model).items()
    }
    return PlanSpec(specs, routes, balance.mode)


def even_step(
    programs: PhasedPrograms,
    loads: Mapping[str, PhaseLoad],
    rows: Mapping[str, EvenRows],
    device: Device,
) -> dict[str, float]:
    """Seconds of a step by part, named as in `StepTime`, without `straggling`.

    Args:
      programs: for rows of `even_spec`.
    """
    phases = {}
    items = {}
    for phase, spec in programs.spec.phases.items():
        of_rank = loads[phase].squares / spec.ranks / rows[phase].microbatches
        phases[phase] = _one_microbatch_plan(rows[phase].capacity, spec.ranks)
        tokens = loads[phase].tokens / spec.ranks / rows[phase].microbatches
        # An item without length on every rank stands for the even share: its squares are its extra
        # ones.
        nothing = np.zeros(spec.ranks, np.int32)
        no_length = np.zeros(spec.ranks, np.int64)
        items[phase] = PhaseItems(
            length=no_length,
            real=no_length,
            example=nothing,
            tokens=np.full(spec.ranks, round(tokens), np.int32),
            slot=nothing,
            extra_squares=np.tile(of_rank.astype(np.int64), (spec.ranks, 1)),
        )
    routes: dict[str, RoutePlan] = {}
    statistics: dict[str, float] = {}
    for phase, owner in programs.exchange_owner.items():
        # One of `peers` equal shares of a rank's tokens is for the rank itself and does not move.
        peers = programs.spec.routes[owner].grid.peers
        key = f"route/{owner}/slots_moved"
        statistics[key] = statistics.get(key, 0.0) + loads[phase].tokens * (1 - 1 / peers)
        routes[owner] = RoutePlan.of_whole_items(NOTHING, NOTHING, (_ONE_HOP,))
    plan = StepPlan(phases, routes, statistics)
    part_seconds = simulate(programs, plan, BatchItems(NO_LENGTH, 0, items), device).parts
    step_seconds = {}
    for part, seconds in part_seconds.items():
        if part == "straggling":
            continue
        phase = part.split("/")[0]
        microbatches = rows[phase].microbatches if phase in rows else 1
        step_seconds[part] = seconds * microbatches
    return step_seconds


def _one_microbatch_plan(capacity: int, ranks: int) -> PhasePlan:
    """One microbatch with an item on every rank."""
    of_ranks = np.arange(ranks, dtype=np.int32)
    zeros = np.zeros_like(of_ranks)
    return PhasePlan(
        capacity=np.array([capacity], np.int32),
        span=np.ones(1, np.int32),
        pool=NOTHING,
        pool_offset=NOTHING,
        microbatch=zeros,
        rank=of_ranks,
        offset=zeros,
        segment=np.ones_like(of_ranks),
    )


_ONE_HOP = RouteRound(
    source=0,
    target=0,
    first_leg=1,
    second_leg=0,
    direct_tokens=1,
    tokens=NOTHING,
    start=NOTHING,
    arrival=NOTHING,
    sender=NOTHING,
    receiver=NOTHING,
    ordinal=NOTHING,
    direct=np.ones(1, np.bool_),
)
