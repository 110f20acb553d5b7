"""Choosing the fixed sizes of a pipelined run, once, from sampled batches.

    samples --> capacities --pack_run--> rows of a run --partition--> ring --schedule--> slots, ticks

What later batches need beyond these sizes is computed in further runs within their step (plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.records import BatchItems, PhaseSpec, PlanSpec, RowClass
from jaxmllm.balance.sizes.capacities import checked_capacities
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec, with_head_room
from jaxmllm.balance.stages.chain_costs import ChainCosts, ChainLayers
from jaxmllm.balance.stages.plan import PipelineSpec, graph_of, schedule_of
from jaxmllm.balance.stages.run_rows import RunRows, pack_run
from jaxmllm.config.schema import ConfigError, ModelConfig, PipelineConfig, Remat
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.cuts import partition
from sharding.pipeline.graph import Pool, PoolKey, Slots
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table_spec import TableSpec


@dataclass(frozen=True)
class Choice:
    """What the sizes aim at."""

    fill: float = 0.9  # of the slots of an average microbatch's rows
    # Sampled batches, those of most rows, whose schedules decide slots and ticks
    schedules: int = 8
    # Backwards of a component on a rank whose weight gradient waits: each needs much memory
    pending: int = 2
    per_stage: int = 4  # language microbatches for each stage, and as many in flight
    # Of every chain: far more than any schedule has, while none is known yet
    ticks_per_row: int = 64


CHOICE: Final = Choice()
ALL_FULL: Mapping[str, Remat] = {}


@dataclass(frozen=True)
class PipelineSizes:
    """Rows, and the programs of training and of evaluation."""

    spec: PlanSpec
    training: PipelineSpec
    evaluation: PipelineSpec


def choose_pipeline(
    samples: Sequence[BatchItems],
    phases: Sequence[SizingInputs],
    config: PipelineConfig,
    model: ModelConfig,
    trained: Mapping[str, Fraction | int],
    examples: int,
    largest: Sequence[BatchItems] = (),
    remat: Mapping[str, Remat] = ALL_FULL,
) -> PipelineSizes:
    """Fill in every size of a pipeline.

    Args:
      samples: global batches drawn as training will draw them.
      phases: in the order of `make_phases`.
      model: shapes, with the size of the vocabulary.
      trained: share of the parameters that are trained, by component that has any.
      examples: of a batch.
      largest: the examples of the whole data that have most slots; each shall fit a run by itself.
      remat: by phase, of its tower or decoder; full where it is not said.

    Raises:
      ConfigError: a setting of a phase that pipelines do not have, or slots that no schedule of a
      sample fits.
      PipelineError: more stages than layers.
    """
    ranks = {inputs.name: inputs.ranks for inputs in phases}
    if set(ranks.values()) != {ranks[LANGUAGE]}:
        raise ConfigError(
            f"pipeline.stages = {config.stages}: all components need the same ranks, but they have {ranks}; leave "
            f"`batch` out of components.<name>.layout",
        )
    microbatches = (
        CHOICE.per_stage * config.stages if config.microbatches == "auto" else config.microbatches
    )
    spec = PlanSpec(
        {inputs.name: _phase_spec(inputs, samples, microbatches, examples) for inputs in phases},
        {},
    )
    sampled = [
        pack_run(np.arange(len(batch.examples)), batch, spec, microbatches, config.deferral)
        for batch in samples
        if len(batch.examples)
    ]
    encoders = spec.phases[LANGUAGE].phase.reads
    rows_read = _rows_read(sampled, _alone(largest, spec), len(encoders), config)
    rows = {
        name: with_head_room(max((run.phases[name].count for run in sampled), default=1), 1)
        for name in spec.phases
    }
    # One microbatch may read as many rows as that, so a run has them.
    rows |= {name: max(rows[name], count) for name, count in zip(encoders, rows_read, strict=True)}

    layers = ChainLayers(
        model,
        trained,
        {name: phase.capacities[0] for name, phase in spec.phases.items()},
        remat,
    )
    ring = _ring(layers, sampled, config)
    costs = layers.costs(ring)
    ticks = len(ring.chains) * sum(rows.values()) * CHOICE.ticks_per_row
    tables = TableSpec(ring, _slot_budget(ring, costs, rows_read, config, rows), ticks, rows_read)
    generous = PipelineSpec(config, tables, rows, costs, microbatches, examples)
    fitting = [
        run
        for run in sampled
        if all(need <= most for need, most in zip(run.rows_read, rows_read, strict=True))
    ]
    by_rows = sorted(
        fitting,
        key=lambda run: -sum(phase_rows.count for phase_rows in run.phases.values()),
    )
    training = _fitted(generous, by_rows[: CHOICE.schedules])
    evaluation = _fitted(replace(generous, backward=False), by_rows[: CHOICE.schedules])
    ticks = max(training.tables.ticks, evaluation.tables.ticks)
    return PipelineSizes(spec, _with_ticks(training, ticks), _with_ticks(evaluation, ticks))


def _with_ticks(pipeline: PipelineSpec, ticks: int) -> PipelineSpec:
    return replace(pipeline, tables=replace(pipeline.tables, ticks=ticks))


# ---------------------------------------------------------------------------- rows


def _phase_spec(
    inputs: SizingInputs,
    samples: Sequence[BatchItems],
    microbatches: int,
    examples: int,
) -> PhaseSpec:
    """Rows of one capacity, by default such that an average microbatch of a replica fills one of
    every phase."""
    config = inputs.config
    key = f"phases.{inputs.name}"
    if config.capacities == "auto":
        least = round_up(max(inputs.longest, 1), inputs.alignment)
        loads = [int(batch.phases[inputs.name].length.sum()) for batch in samples]
        mean = sum(loads) / max(len(loads), 1) / (inputs.ranks * microbatches)
        ideal = round_up(math.ceil(mean / CHOICE.fill), inputs.alignment)
        capacity = max(least, min(inputs.largest_capacity, ideal))
    else:
        capacities = checked_capacities(config.capacities, inputs)
        if len(capacities) > 1:
            raise ConfigError(
                f"{key}.capacities: a pipeline has rows of one capacity, not {list(capacities)}",
            )
        capacity = capacities[0]
    # A replica gets its share of the examples, so a row never has more of them.
    examples_per_replica = ceil_divide(examples, inputs.ranks)
    segments = examples_per_replica if config.max_segments == "auto" else config.max_segments
    return phase_spec(inputs, (RowClass(capacity),), max(segments, examples_per_replica))


def _alone(largest: Sequence[BatchItems], spec: PlanSpec) -> list[RunRows]:
    """Every one of these examples in a run by itself."""
    return [
        pack_run(np.array([number]), batch, spec, microbatches=1, deferral=False)
        for batch in largest
        for number in range(len(batch.examples))
    ]


def _rows_read(
    sampled: Sequence[RunRows],
    alone: Sequence[RunRows],
    encoders: int,
    config: PipelineConfig,
) -> tuple[int, ...]:
    """Rows of each encoder that one microbatch may read: enough for the samples, and for each of
    the largest examples by itself."""
    if config.encoder_rows_per_microbatch != "auto":
        return (config.encoder_rows_per_microbatch,) * encoders
    at_least_one = [1] * encoders
    of_samples = np.array([at_least_one, *(run.rows_read for run in sampled)]).max(axis=0).tolist()
    of_largest = np.array([at_least_one, *(run.rows_read for run in alone)]).max(axis=0).tolist()
    return tuple(
        max(with_head_room(usual, 1), needed)
        for usual, needed in zip(of_samples, of_largest, strict=True)
    )


# ---------------------------------------------------------------------------- stages


def _ring(layers: ChainLayers, sampled: Sequence[RunRows], config: PipelineConfig) -> Ring:
    """Stages for the average row of every phase."""
    squares = {}
    count = {}
    for name in layers.capacities:
        rows = [run.phases[name] for run in sampled]
        count[name] = sum(phase_rows.count for phase_rows in rows)
        sums = np.array([phase_rows.squares.sum(axis=1) for phase_rows in rows]).sum(axis=0)
        squares[name] = (sums // max(count[name], 1)).tolist()
    rows_per_microbatch = {name: count[name] / max(count[LANGUAGE], 1) for name in count}
    return partition(layers.layers(squares), config.stages, config.layout, rows_per_microbatch)


# ---------------------------------------------------------------------------- slots and ticks


def _slot_budget(
    ring: Ring,
    costs: Mapping[str, ChainCosts],
    rows_read: Sequence[int],
    config: PipelineConfig,
    rows: Mapping[str, int],
) -> Slots:
    """The most slots of every pool: those of `pipeline.microbatches_in_flight` microbatches with
    all that they read."""
    in_flight = config.microbatches_in_flight
    if in_flight == "auto":
        all_at_once = scheduler_of(config.schedule).all_in_flight
        in_flight = rows[LANGUAGE] if all_at_once else CHOICE.per_stage * config.stages
    slots: Slots = {}
    for number, chain in enumerate(ring.chains):
        encoder = number < len(rows_read)
        rows_in_flight = in_flight * (rows_read[number] if encoder else 1)
        if chain.depth > 1 or chain.head_only:
            slots[Pool.INPUT, number] = rows_in_flight * chain.chunks_per_rank
        if encoder:
            slots[Pool.TOKENS, number] = rows_in_flight
        goes_back = bool(costs[chain.name].linear[1:].any())
        if goes_back:
            slots |= _backward_slots(number, chain, rows_in_flight, encoder, config)
    return slots


def _backward_slots(
    number: int,
    chain: Chain,
    rows_in_flight: int,
    encoder: bool,
    config: PipelineConfig,
) -> Slots:
    slots: Slots = {}
    if chain.depth > 1 and not chain.head_only:
        slots[Pool.GRADIENT, number] = rows_in_flight * chain.chunks_per_rank
    if encoder:
        slots[Pool.TOKEN_GRADIENT, number] = rows_in_flight
    if config.split_backward:
        slots[Pool.PENDING, number] = CHOICE.pending
    if config.kept_residuals and not chain.head_only:  # there the features wait, and no residuals
        slots[Pool.RESIDUAL, number] = config.kept_residuals
    return slots


def _fitted(generous: PipelineSpec, sampled: Sequence[RunRows]) -> PipelineSpec:
    """The spec with as many slots and ticks as schedules of these samples use, and some more."""
    schedules: list[Schedule] = []
    for run in sampled:
        try:
            schedules.append(schedule_of(graph_of(run, generous), generous))
        except (
            PipelineError
        ) as error:  # other batches may do; this one would get the greedy schedule
            problem = error
    if sampled and not schedules:
        raise ConfigError(
            f"pipeline.schedule = {generous.config.schedule!r} cannot be kept with pipeline.layout = "
            f"{generous.config.layout!r} and pipeline.microbatches_in_flight = "
            f"{generous.config.microbatches_in_flight}: {problem}; use schedule greedy or interleaved, or more "
            "microbatches in flight",
        ) from problem
    budget = generous.tables.slots
    if not generous.backward:
        budget = {key: most for key, most in budget.items() if key[0] in (Pool.INPUT, Pool.TOKENS)}
    needed = slots_needed(schedules)
    slots = {
        key: _slots_of(key, most, needed.get(key, 0), generous.tables)
        for key, most in budget.items()
    }
    ticks = max((len(schedule.ticks) for schedule in schedules), default=1)
    return replace(
        generous,
        tables=replace(generous.tables, slots=slots, ticks=with_head_room(2 * ticks, 8)),
    )


def _slots_of(key: PoolKey, most: int, needed: int, tables: TableSpec) -> int:
    """Slots of a pool, of at most so many, where schedules of the samples need some."""
    pool, chain = key
    if pool in (Pool.RESIDUAL, Pool.PENDING):  # not needed, but made use of
        return most
    # Enough for two microbatches, of which one reads what the other one does.
    least = 2 * tables.ring.chains[chain].chunks_per_rank * [*tables.rows_read, 1][chain]
    return min(most, max(least, with_head_room(needed, 1)))
