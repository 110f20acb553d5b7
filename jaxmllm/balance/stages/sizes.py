"""Choosing the fixed sizes of a pipelined run, once, from sampled batches.

    samples --> capacities of rows --place--> rows and fan of a run --partition--> ring --schedule--> slots, ticks

What later batches need beyond these sizes is computed in further runs within their step (pipeline_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmllm.arrays import round_up
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import BatchItems, PhaseSpec, PlanSpec
from jaxmllm.balance.sizes.capacities import checked_capacities
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec, with_head_room
from jaxmllm.balance.stages.plan import ChainCosts, PipelineSpec, Placed, graph_of, place, schedule_of
from jaxmllm.config.schema import ConfigError, ModelConfig, PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.cuts import partition
from sharding.pipeline.graph import Pool, Slots
from sharding.pipeline.layer_costs import Layer, LayerCost, chunk_costs, layer_costs
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.slots import slots_needed
from sharding.pipeline.table_spec import TableSpec

FILL = 0.9  # of the slots of an average microbatch's rows
SCHEDULED = 8  # sampled batches, those of most rows, whose schedules decide slots and ticks
SPLIT = 2  # backwards of a component on a rank whose weight gradient waits: it needs much of what the forward made
PER_STAGE = 4  # language microbatches for each stage, and as many under way


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
    trainable: frozenset[str],
    examples: int,
    largest: Sequence[BatchItems] = (),
) -> PipelineSizes:
    """Fill in every size of a pipeline.

    Args:
      samples: global batches drawn as training will draw them.
      phases: in the order of `make_phases`.
      model: shapes, with the size of the vocabulary.
      trainable: components.
      examples: of a batch.
      largest: the examples of the whole data that have most slots; each shall fit a run by itself.

    Raises:
      ConfigError: a setting of a phase that pipelines do not have, or slots that no schedule of a sample fits.
      PipelineError: more stages than layers.
    """
    ranks = {needs.name: needs.ranks for needs in phases}
    if set(ranks.values()) != {ranks[LANGUAGE]}:
        raise ConfigError(
            f"pipeline.stages = {config.stages}: all components need the same ranks, but they have {ranks}; leave "
            f"`batch` out of components.<name>.layout"
        )
    microbatches = PER_STAGE * config.stages if config.microbatches == "auto" else config.microbatches
    spec = PlanSpec({needs.name: _rows(needs, samples, microbatches, examples) for needs in phases}, {})
    placed = [
        place(np.arange(len(batch.examples)), batch, spec, microbatches, config.deferral)
        for batch in samples
        if len(batch.examples)
    ]
    alone = [
        place(np.array([number]), batch, spec, 1, False) for batch in largest for number in range(len(batch.examples))
    ]
    encoders = spec.phases[LANGUAGE].phase.reads
    usual, most = (np.array([[1] * len(encoders), *(each.fan for each in of)]).max(axis=0) for of in (placed, alone))
    if config.encoder_rows_per_microbatch == "auto":
        fan = tuple(max(with_head_room(int(rows), 1), int(need)) for rows, need in zip(usual, most, strict=True))
    else:
        fan = (config.encoder_rows_per_microbatch,) * len(encoders)
    rows = {
        name: with_head_room(max((each.phases[name].count for each in placed), default=1), 1) for name in spec.phases
    }
    rows |= {name: max(rows[name], most) for name, most in zip(encoders, fan, strict=True)}

    layers = ChainLayers(model, trainable, {name: phase.capacities[0] for name, phase in spec.phases.items()})
    ring = _ring(layers, placed, config)
    costs = layers.costs(ring)
    tables = TableSpec(ring, _budget(ring, costs, fan, config, rows), len(ring.chains) * sum(rows.values()) * 64, fan)
    wide = PipelineSpec(config, tables, rows, costs, microbatches, examples)
    fitting = [each for each in placed if all(need <= most for need, most in zip(each.fan, fan, strict=True))]
    biggest = sorted(fitting, key=lambda each: -sum(of.count for of in each.phases.values()))[:SCHEDULED]
    training, evaluation = _fitted(wide, biggest), _fitted(replace(wide, backward=False), biggest)
    ticks = max(training.tables.ticks, evaluation.tables.ticks)
    training, evaluation = (replace(each, tables=replace(each.tables, ticks=ticks)) for each in (training, evaluation))
    return PipelineSizes(spec, training, evaluation)


# ---------------------------------------------------------------------------- rows


def _rows(needs: SizingInputs, samples: Sequence[BatchItems], microbatches: int, examples: int) -> PhaseSpec:
    """Rows of one capacity, by default such that an average microbatch of a replica fills one of every phase."""
    config, key = needs.config, f"phases.{needs.name}"
    if config.long_capacity is not None:
        raise ConfigError(f"{key}.long_capacity: a pipeline has rows of one capacity; unset it")
    least = round_up(max(needs.longest, 1), needs.alignment)
    if config.capacities == "auto":
        loads = [int(batch.phases[needs.name].length.sum()) for batch in samples]
        mean = sum(loads) / max(len(loads), 1) / (needs.ranks * microbatches)
        most = config.max_capacity // needs.alignment * needs.alignment
        capacity = max(least, min(most, round_up(math.ceil(mean / FILL), needs.alignment)))
    else:
        capacities = checked_capacities(config.capacities, needs)
        if len(capacities) > 1:
            raise ConfigError(f"{key}.capacities: a pipeline has rows of one capacity, not {list(capacities)}")
        capacity = capacities[0]
    # A replica gets its share of the examples, so a row never has more of them.
    segments = -(-examples // needs.ranks) if config.max_segments == "auto" else config.max_segments
    return phase_spec(needs, (capacity,), max(segments, -(-examples // needs.ranks)))


# ---------------------------------------------------------------------------- costs and stages


@dataclass(frozen=True)
class ChainLayers:
    """Layers of all chains with their costs for rows of the given capacities."""

    model: ModelConfig
    trainable: frozenset[str]
    capacities: Mapping[str, int]

    def of(self, squares: Mapping[str, int]) -> dict[str, list[Layer]]:
        """By phase, for rows whose items have squared lengths of these sums."""
        return {
            name: [
                Layer(
                    component=layer.component,
                    linear=layer.linear(capacity),
                    attention=layer.attention(capacity, squares[name]),
                    parameters=layer.parameters,
                    trainable=layer.component in self.trainable,
                )
                for layer in phase_layers(self.model, name)
            ]
            for name, capacity in self.capacities.items()
        }

    def costs(self, ring: Ring) -> dict[str, ChainCosts]:
        """Of the chunks of every chain."""
        empty, full = (
            layer_costs(self.of({name: share * capacity**2 for name, capacity in self.capacities.items()}))
            for share in (0, 1)
        )
        found = {}
        for chain in ring.chains:
            linear, whole = (_columns(chunk_costs(chain, each[chain.name])) for each in (empty, full))
            found[chain.name] = ChainCosts(self.capacities[chain.name], linear, whole - linear)
        return found


def _columns(costs: Sequence[LayerCost]) -> np.ndarray:
    columns = [(cost.forward, cost.input_grad, cost.weight_grad, cost.recompute) for cost in costs]
    return np.array(columns, np.int64).T


def _ring(layers: ChainLayers, placed: Sequence[Placed], config: PipelineConfig) -> Ring:
    """Stages for the average row of every phase."""
    squares, count = {}, {}
    for name in layers.capacities:
        rows = [each.phases[name] for each in placed]
        count[name] = sum(of.count for of in rows)
        squares[name] = sum(int(of.squares.sum()) for of in rows) // max(count[name], 1)
    share = {name: count[name] / max(count[LANGUAGE], 1) for name in count}
    return partition(layers.of(squares), config.stages, config.layout, share)


# ---------------------------------------------------------------------------- slots and ticks


def _budget(
    ring: Ring, costs: Mapping[str, ChainCosts], fan: Sequence[int], config: PipelineConfig, rows: Mapping[str, int]
) -> Slots:
    """The most slots of every pool: those of the microbatches in flight with all that they read."""
    live = config.microbatches_in_flight
    if live == "auto":
        live = rows[LANGUAGE] if config.schedule == "gpipe" else PER_STAGE * config.stages
    slots: Slots = {}
    for number, chain in enumerate(ring.chains):
        read = number < len(fan)  # an encoder, whose rows some microbatch reads
        together = live * (fan[number] if read else 1)
        backward = bool(costs[chain.name].linear[1:].any())
        if chain.depth > 1 or chain.head_only:
            slots[Pool.INPUT, number] = together * chain.chunks_per_rank
        if read:
            slots[Pool.TOKENS, number] = together
        if backward:
            slots |= _backward_slots(number, chain, read, together, config)
    return slots


def _backward_slots(number: int, chain: Chain, read: bool, together: int, config: PipelineConfig) -> Slots:
    slots: Slots = {}
    if chain.depth > 1 and not chain.head_only:
        slots[Pool.GRADIENT, number] = together * chain.chunks_per_rank
    if read:
        slots[Pool.TOKEN_GRADIENT, number] = together
    if config.split_backward:
        slots[Pool.PENDING, number] = SPLIT
    if config.kept_residuals:
        slots[Pool.RESIDUAL, number] = config.kept_residuals
    return slots


def _fitted(wide: PipelineSpec, placed: Sequence[Placed]) -> PipelineSpec:
    """With as many slots and ticks as schedules of these samples use, and some more."""
    schedules: list[Schedule] = []
    for each in placed:
        try:
            schedules.append(schedule_of(graph_of(each, wide), wide))
        except PipelineError as error:  # other batches may do; this one would get the greedy schedule
            problem = error
    if placed and not schedules:
        raise ConfigError(
            f"pipeline.schedule = {wide.config.schedule!r} cannot be kept with pipeline.layout = "
            f"{wide.config.layout!r} and pipeline.microbatches_in_flight = {wide.config.microbatches_in_flight}: "
            f"{problem}; use schedule greedy or interleaved, or more microbatches in flight"
        ) from problem
    budget, needed = wide.tables.slots, slots_needed(schedules)
    if not wide.backward:
        budget = {place: most for place, most in budget.items() if place[0] in (Pool.INPUT, Pool.TOKENS)}
    slots = {}
    for (pool, chain), most in budget.items():
        # Enough for two microbatches, of which one reads what the other one does.
        least = 2 * wide.tables.ring.chains[chain].chunks_per_rank * [*wide.tables.rows_read, 1][chain]
        slots[pool, chain] = min(most, max(least, with_head_room(needed.get((pool, chain), 0), 1)))
        if pool in (Pool.RESIDUAL, Pool.PENDING):
            slots[pool, chain] = most
    ticks = max((len(schedule.ticks) for schedule in schedules), default=1)
    return replace(wide, tables=replace(wide.tables, slots=slots, ticks=with_head_room(2 * ticks, 8)))
