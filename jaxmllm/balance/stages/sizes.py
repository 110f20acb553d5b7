"""Choosing the fixed sizes of a pipelined run, once, from sampled batches.

    samples --trials.py, trial_search.py--> capacities, ring --schedule--> slots, ticks

A later batch that needs more than these sizes is computed in several runs in its step (plan.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from jaxmllm.balance.records import BatchItems, PlanSpec
from jaxmllm.balance.sizes.inputs import SizingInputs, with_head_room
from jaxmllm.balance.sizes.loads import to_plan
from jaxmllm.balance.stages.chain_costs import ChainLayers
from jaxmllm.balance.stages.plan import PipelineSpec, graph_of, schedule_of
from jaxmllm.balance.stages.run_rows import RunRows
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.balance.stages.trial_search import choose_sampled
from jaxmllm.balance.stages.trial_slots import Keeps, keeps_none
from jaxmllm.balance.stages.trials import Capacities, Sampled, Trials
from jaxmllm.config.schema import ConfigError, ModelConfig, PipelineConfig, Remat
from jaxmllm.phases import LANGUAGE, Phase
from sharding.pipeline.cuts import USUAL, Reading
from sharding.pipeline.graph import Pool, PoolKey
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import SCHEDULES
from sharding.pipeline.schedules.schedule import Schedule, lockstep
from sharding.pipeline.slots import slots_needed

# Schedules that `schedule: auto` tries, the simplest first. Those with all microbatches in flight
# are left out: they need slots for all, and save no time.
AUTOMATIC: Final = [name for name, scheduler in SCHEDULES.items() if not scheduler.all_in_flight]
TRIED: Final = 3  # samples that schedules are compared on
DECIDING: Final = 8  # sampled batches (those of most rows) whose schedules decide slots and ticks
ALL_FULL: Mapping[str, Remat] = {}


@dataclass(frozen=True)
class PipelineSizes:
    """The sizes of a pipeline: of its rows, and of its runs in training and in evaluation."""

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
    keeps: Keeps = keeps_none,
    learns_text: bool = True,
) -> PipelineSizes:
    """Fill in every size of a pipeline.

    Args:
      samples: global batches drawn as training will draw them.
      phases: in the order of `make_phases`.
      model: shapes, with the size of the vocabulary.
      trained: share of the parameters that are trained, by component that has any.
      examples: number of examples of a batch.
      largest: the examples of the whole data that need most rows; each must fit a run by itself.
      remat: by phase, of its tower or decoder; full for phases left out.
      keeps: tells how many forwards `kept_residuals: auto` keeps the residuals of (`Keeps`).
      learns_text: whether the decoder has a loss.

    Raises:
      ConfigError: capacities that hold no example, encoder rows that do not hold one of the largest
        examples, or slots that no schedule of a sample fits.
      PipelineError: more stages than layers.
    """
    gather_cost = {inputs.name: inputs.gather_cost for inputs in phases}
    reading = _reading_of_phases([inputs.phase for inputs in phases], learns_text)

    def layers(capacities: Capacities, spans: Capacities) -> ChainLayers:
        return ChainLayers(model, trained, capacities, remat, spans, gather_cost, reading)

    trials = Trials(to_plan(samples), phases, config, layers, examples, largest, keeps)
    sampled = _with_best_schedule(*choose_sampled(trials))
    by_rows = sorted(
        sampled.fitting,
        key=lambda run: -sum(phase_rows.count for phase_rows in run.phases.values()),
    )[:DECIDING]
    training = _fitted_pipeline(sampled.pipeline, by_rows)
    evaluation = _fitted_pipeline(replace(sampled.pipeline, backward=False), by_rows)
    ticks = max(training.tables.ticks, evaluation.tables.ticks)
    return PipelineSizes(sampled.spec, _with_ticks(training, ticks), _with_ticks(evaluation, ticks))


def _reading_of_phases(phases: Sequence[Phase], learns_text: bool) -> Reading:
    """The `Reading` of these phases: who reads whom in a pipeline."""
    if not any(phase.generates for phase in phases):
        return USUAL
    readers = {read: phase.name for phase in phases for read in phase.reads}
    language = frozenset({LANGUAGE})
    return Reading(readers, language if learns_text else frozenset(), optional=language)


def _with_best_schedule(trials: Trials, sampled: Sampled) -> Sampled:
    """The samples with the schedule, and the backward pass whole or split, that take the least time
    on some of them, where the config has `auto`; simpler ones are kept if others gain little."""
    config = trials.config
    if config.schedule != "auto" and config.split_backward != "auto":
        return sampled
    names = AUTOMATIC if config.schedule == "auto" else (config.schedule,)
    splits = (False, True) if config.split_backward == "auto" else (config.split_backward,)
    best: tuple[int, PipelineSpec] | None = None
    runs = sampled.fitting[:TRIED]
    for split, name in itertools.product(splits, names):
        pipeline = trials.with_schedule(sampled, name, split)
        try:
            cost = sum(lockstep(schedule_of(graph_of(run, pipeline), pipeline)) for run in runs)
        except PipelineError:  # its order cannot be kept on this ring
            continue
        if best is None or cost < CHOICE.worth * best[0]:
            best = cost, pipeline
    return sampled if best is None else replace(sampled, pipeline=best[1])


def _with_ticks(pipeline: PipelineSpec, ticks: int) -> PipelineSpec:
    return replace(pipeline, tables=replace(pipeline.tables, ticks=ticks))


# ---------------------------------------------------------------------------- slots and ticks


def _fitted_pipeline(generous: PipelineSpec, sampled: Sequence[RunRows]) -> PipelineSpec:
    """The spec with as many slots and ticks as schedules of these samples use, and head room."""
    schedules: list[Schedule] = []
    for run in sampled:
        try:
            schedules.append(schedule_of(graph_of(run, generous), generous))
        except (
            PipelineError
        ) as error:  # other batches may fit; this one would get the greedy schedule
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
        budget = {
            key: most_slots
            for key, most_slots in budget.items()
            if key[0] in (Pool.INPUT, Pool.TOKENS)
        }
    needed = slots_needed(schedules)
    slots = {
        key: _pool_slots(key, most_slots, needed.get(key, 0), generous)
        for key, most_slots in budget.items()
    }
    ticks = max((len(schedule.ticks) for schedule in schedules), default=1)
    return replace(
        generous,
        tables=replace(generous.tables, slots=slots, ticks=with_head_room(2 * ticks, 8)),
    )


def _pool_slots(key: PoolKey, most: int, needed: int, pipeline: PipelineSpec) -> int:
    """Slots of a pool, up to `most`, where schedules of the samples need `needed`."""
    pool, chain = key
    tables = pipeline.tables
    if pool == Pool.RESIDUAL and pipeline.config.kept_residuals == "auto":
        return min(most, with_head_room(needed, 1))
    if pool in (Pool.RESIDUAL, Pool.PENDING):  # not required, but used if there
        return most
    # At least enough for two microbatches with all the rows that each may read.
    least_slots = 2 * tables.ring.chains[chain].chunks_per_rank * [*tables.rows_read, 1][chain]
    return min(most, max(least_slots, with_head_room(needed, 1)))
