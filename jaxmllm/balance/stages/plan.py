"""Planning a pipelined step from the lengths of its global batch: pure, integers only, the same on
every host.

    examples --pack_run--------> RunRows        microbatches, rows of all phases   run_rows.py
    rows     --ChainCosts.work-> operations     what they cost                     chain_costs.py
             --schedule, table-> PipelineRun    who does what in which tick        sharding/pipeline/

Where language rows have several capacities, microbatches are made for each capacity that holds the
longest example: many short ones, or fewer that are fuller. Those whose step is predicted to take
the least time are kept.

A run of the executor has bounds: rows of each phase, rows that one microbatch reads, slots, ticks.
A batch that needs more is split, and its parts run one after another; gradients add up, so nothing
is dropped.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.records import (
    BatchItems,
    PhasePlan,
    PipelineRun,
    PlanSpec,
    StepPlan,
)
from jaxmllm.balance.stages.chain_costs import ChainCosts
from jaxmllm.balance.stages.row_groups import group_route
from jaxmllm.balance.stages.run_rows import RunRows, capacities_to_try, pack_run
from jaxmllm.balance.statistics import phase_statistics
from jaxmllm.config.schema import ConfigError, PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import Graph, Pool, Slots, Workload
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import fixed_orders, scheduler_of
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import Schedule, idle_by_cause, lockstep
from sharding.pipeline.schedules.shortest import shortest
from sharding.pipeline.slots import keep_residuals, slots_needed
from sharding.pipeline.table import Table, make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate

QUICK_POWERS: Final = (4, 3)  # powers of greedy schedules that only serve to compare sizes


@dataclass(frozen=True)
class PipelineSpec:
    """All inputs to the plan of a pipelined step other than `PlanSpec`."""

    config: PipelineConfig
    tables: TableSpec  # ring, slots, ticks and encoder rows read, of one run
    rows: Mapping[str, tuple[int, ...]]  # most rows of each phase in one run, by class
    costs: Mapping[str, ChainCosts]  # by phase
    # Language microbatches of a batch of `examples` examples; None: as few as hold them
    microbatches: int | None
    examples: int
    backward: bool = True  # false: evaluation

    @property
    def rows_read(self) -> dict[str, int]:
        """Rows of each phase that is read which one microbatch of its reader may read."""
        names = (chain.name for chain in self.tables.ring.encoders)
        return dict(zip(names, self.tables.rows_read, strict=True))


@dataclass(frozen=True)
class PlannedRun:
    """One run of the executor: the rows of some examples of a batch, and their schedule."""

    rows: RunRows
    schedule: Schedule
    table: Table
    fallback: bool  # whether the schedule is greedy because the configured one did not work
    search_ms: float


def plan_pipeline(items: BatchItems, spec: PlanSpec, pipeline: PipelineSpec) -> StepPlan:
    """Place every item of a global batch in rows of the pipeline's runs, and schedule each run.

    Statistics of the phases as in `plan_step`; `plan_ms`; and `pipeline/...`: `runs`, `ticks`,
    `cost` (FLOPs: the sum over ticks of the slowest rank's), `asynchronous_cost` (that of the same
    orders if ranks waited only for their inputs; the difference is what ticks cost), `idle_share`
    (of all ranks' time, as these costs predict it) and its parts `idle_imbalance`, `idle_bubble`
    and `idle_lockstep` (see `idle_by_cause`), `search_ms` (finding schedules), `fallbacks` (runs
    whose configured schedule could not be kept or did not fit the slots), `deferred_examples`,
    `slots_used` (most slots of a rank that one run fills, all pools).

    Raises:
      ConfigError: an example that no run holds; names the key that would make room.
    """
    began = time.perf_counter()
    runs = plan_runs(items, spec, pipeline)
    phases, arrivals = _joined_plans([run.rows for run in runs], items, spec)
    # Pool slots of a rank by phase that is read: as many rows as a microbatch may read of it.
    room = {name: spec.phases[name].row_tokens * rows for name, rows in pipeline.rows_read.items()}
    # Language reads all encoders from one pool; a generator reads language from another.
    pool_of_language = sum(slots for name, slots in room.items() if name != LANGUAGE)
    statistics: dict[str, float] = {}
    for name, phase in spec.phases.items():
        statistics |= phase_statistics(phases[name], items.phases[name], phase)
    statistics |= _pipeline_statistics(runs)
    routes = {}
    for name, arrival in arrivals.items():
        pool = room[LANGUAGE] if spec.phases[name].phase.generates else pool_of_language
        routes[name] = group_route(phases, items.phases, arrival, name, spec, pool)
    statistics["plan_ms"] = 1e3 * (time.perf_counter() - began)
    return StepPlan(phases, routes, statistics, _run_records(runs))


def plan_runs(items: BatchItems, spec: PlanSpec, pipeline: PipelineSpec) -> list[PlannedRun]:
    """The runs of a step with their schedules. Raises `ConfigError` as `plan_pipeline` does."""
    return list(_planned_runs(np.arange(len(items.examples)), items, spec, pipeline))


def _planned_runs(
    examples: Longs,
    items: BatchItems,
    spec: PlanSpec,
    pipeline: PipelineSpec,
) -> Iterator[PlannedRun]:
    """One run if it holds all examples; otherwise the runs of two halves of about equal slots."""
    try:
        yield _planned_run(examples, items, spec, pipeline)
        return
    except PipelineError as error:
        if len(examples) == 1:
            example = int(items.examples[examples[0]])
            raise ConfigError(
                f"example {example} does not fit the pipeline by itself: {error}",
            ) from error
    for half in _halves(examples, items):
        yield from _planned_runs(half, items, spec, pipeline)


def _halves(examples: Longs, items: BatchItems) -> tuple[Longs, Longs]:
    """Two halves of the examples: in descending order of slots, every second one, and the others.
    The numbers of each half are ascending."""
    position = np.full(len(items.examples), -1, np.int64)
    position[examples] = np.arange(len(examples))
    slots = np.zeros(len(examples), np.int64)
    for phase_items in items.phases.values():
        owner = position[phase_items.example]
        slots += sums_by(owner[owner >= 0], phase_items.length[owner >= 0], len(examples))
    by_slots = examples[np.argsort(-slots, kind="stable")]
    return np.sort(by_slots[::2]), np.sort(by_slots[1::2])


def _planned_run(
    examples: Longs,
    items: BatchItems,
    spec: PlanSpec,
    pipeline: PipelineSpec,
) -> PlannedRun:
    """The run of these examples. Raises `PipelineError` if a run cannot hold them."""
    possible = _possible_rows(examples, items, spec, pipeline)
    began = time.perf_counter()
    rows = best_rows(possible, pipeline)
    graph = graph_of(rows, pipeline)
    schedule, table, fallback = _schedule_or_greedy(graph, pipeline)
    search_ms = 1e3 * (time.perf_counter() - began)
    validate(table, graph)
    return PlannedRun(rows, schedule, table, fallback, search_ms)


def _possible_rows(
    examples: Longs,
    items: BatchItems,
    spec: PlanSpec,
    pipeline: PipelineSpec,
) -> list[RunRows]:
    """The rows that a run of all these examples may have: one entry per capacity of language rows.
    Raises `PipelineError` if none fits the bounds of a run."""
    share = round((pipeline.microbatches or 0) * len(examples) / pipeline.examples)
    microbatches = max(1, min(share, *pipeline.rows[LANGUAGE]))
    fitting = []
    for capacity in capacities_to_try(examples, items, spec):
        rows = pack_run(
            examples,
            items,
            spec,
            microbatches,
            pipeline.config.deferral,
            pipeline.rows_read,
            capacity=capacity,
        )
        try:
            _check_bounds(rows, spec, pipeline)
            fitting.append(rows)
        except PipelineError as error:  # rows of another capacity may fit
            problem = error
        if rows.phases[LANGUAGE].count <= microbatches:
            break  # larger rows would hold the same microbatches
    if not fitting:
        raise problem
    return fitting


def best_rows(rows: Sequence[RunRows], pipeline: PipelineSpec) -> RunRows:
    """The one of several possible rows of some examples whose step should take the least time."""
    if len(rows) == 1:
        return rows[0]
    best = rows[0]
    least_cost = math.inf
    for run_rows in rows:
        cost = predicted_cost(graph_of(run_rows, pipeline), pipeline, least_cost)
        if cost < least_cost:
            best = run_rows
            least_cost = cost
    return best


def predicted_cost(graph: Graph, pipeline: PipelineSpec, bound: float = math.inf) -> float:
    """FLOPs of a run with a quick schedule: the sum over ticks of the slowest rank's. Infinite if
    there is no schedule; a cost that is not below `bound` may be returned as infinite, too."""
    if graph.rank_work.max() >= bound:
        return math.inf
    try:
        return lockstep(quick_schedule(graph, pipeline, bound))
    except PipelineError:
        return math.inf


def quick_schedule(graph: Graph, pipeline: PipelineSpec, bound: float = math.inf) -> Schedule:
    """The configured fixed order; for greedy and searched schedules, and in evaluation, the
    shortest schedule that is found fast.

    Raises:
      PipelineError: the fixed order cannot be kept, or no schedule found fast is below `bound`.
    """
    if pipeline.backward and pipeline.config.schedule not in ("greedy", "search"):
        return schedule_of(graph, pipeline)
    most_cost = None if bound == math.inf else math.ceil(bound) - 1
    slots = pipeline.tables.slots
    return shortest(graph, fixed_orders(), slots, powers=QUICK_POWERS, bound=most_cost)


def _check_bounds(rows: RunRows, spec: PlanSpec, pipeline: PipelineSpec) -> None:
    """Raise `PipelineError` if one run of the executor does not hold these rows."""
    for name, bound in pipeline.rows_read.items():
        needed = rows.rows_read[name]
        if needed > bound:
            raise PipelineError(
                f"a microbatch reads {needed} rows of {name}, room is for {bound}: "
                f"raise pipeline.encoder_rows_per_microbatch or phases.{name}.capacities",
            )
    for name, phase_rows in rows.phases.items():
        phase = spec.phases[name]
        counts = phase_rows.counts(len(phase.capacities))
        for (capacity, _), class_rows, bound in zip(
            phase.classes, counts, pipeline.rows[name], strict=True
        ):
            if class_rows > bound:
                # A language row is a microbatch, so a run with more microbatches holds more rows.
                key = f"phases.{name}.capacities" if name != LANGUAGE else "pipeline.microbatches"
                raise PipelineError(
                    f"{class_rows} rows of {name} of {capacity} slots, a run has {bound}: raise {key}",
                )


# ---------------------------------------------------------------------------- schedules


def graph_of(rows: RunRows, pipeline: PipelineSpec) -> Graph:
    """The operations of one run."""
    ring = pipeline.tables.ring
    work = tuple(
        pipeline.costs[chain.name].work(of_phase.squares, of_phase.row_class, pipeline.backward)
        for chain in ring.chains
        for of_phase in (rows.phases[chain.name],)
    )
    before = {
        chain_number: rows.inputs[chain.name]
        for chain_number, chain in enumerate(ring.encoders)
        if chain.name in rows.inputs
    }
    config = pipeline.config
    return build_graph(
        ring,
        Workload(work, rows.inputs[ring.reader.name], before),
        split=config.split_backward is True,
        overhead=round(config.flops_per_tick),
    )


def schedule_of(graph: Graph, pipeline: PipelineSpec) -> Schedule:
    """The configured schedule; evaluation is always scheduled greedily.

    Raises `PipelineError` if its order cannot be kept in this batch or, for a schedule that
    considers slots, none that fits them is found.
    """
    slots = pipeline.tables.slots
    if not pipeline.backward:
        return _with_residuals(greedy(graph, slots), slots)
    scheduler = scheduler_of(pipeline.config.schedule)
    return _with_residuals(scheduler.make(graph, slots, pipeline.config.rollouts), slots)


def _schedule_or_greedy(graph: Graph, pipeline: PipelineSpec) -> tuple[Schedule, Table, bool]:
    """The schedule of a run (the configured one, or a greedy one if that cannot be kept or does not
    fit the slots), its table, and whether it is such a greedy replacement."""
    tables = pipeline.tables
    try:
        schedule = schedule_of(graph, pipeline)
        return schedule, make_table(schedule, tables), False
    except PipelineError:
        # If a schedule that considers slots found nothing that fits, nothing is left to try.
        if not pipeline.backward or scheduler_of(pipeline.config.schedule).keeps_slots:
            raise
    schedule = _with_residuals(greedy(graph, tables.slots), tables.slots)
    return schedule, make_table(schedule, tables), True


def _with_residuals(schedule: Schedule, slots: Slots) -> Schedule:
    """The schedule with residuals kept in the slots for residuals, if there are any."""
    if any(pool == Pool.RESIDUAL for pool, _ in slots):
        return keep_residuals(schedule, slots)
    return schedule


# ---------------------------------------------------------------------------- records


def _joined_plans(
    runs: Sequence[RunRows],
    items: BatchItems,
    spec: PlanSpec,
) -> tuple[dict[str, PhasePlan], dict[str, Ints]]:
    """Plans of all phases, with the rows of each run after those of the run before. And for every
    item of an encoder or generator, the slot of a rank's pool where the row that holds it, or that
    it reads, begins."""
    plans = {}
    arrivals = {}
    for name, phase in spec.phases.items():
        # Every example of the batch is in exactly one run, so every entry is set once.
        microbatch, rank, offset, segment, arrival = np.zeros(
            (5, len(items.phases[name].length)),
            np.int32,
        )
        # Number of the run's first row in the joined plan.
        begin = 0
        for run in runs:
            rows = run.phases[name]
            microbatch[rows.item] = rows.row + begin
            rank[rows.item] = rows.rank
            offset[rows.item] = rows.offset
            segment[rows.item] = rows.segment
            # Language, which arrives nowhere, gets zeros that are not returned.
            arrival[rows.item] = run.arrivals.get(name, 0)
            begin += rows.count
        row_class = np.concatenate([run.phases[name].row_class for run in runs])
        # pool and pool_offset: without an exchange there is one pool, and no offset in it.
        zeros = np.zeros(begin, np.int32)
        capacity, span = np.array(phase.classes, np.int32)[row_class].T
        plans[name] = PhasePlan(
            capacity,
            span,
            zeros,
            zeros,
            microbatch,
            rank,
            offset,
            segment,
        )
        if name != LANGUAGE:
            arrivals[name] = arrival
    return plans, arrivals


def _run_records(runs: Sequence[PlannedRun]) -> tuple[PipelineRun, ...]:
    """The records of the runs in the step plan."""
    records = []
    begin = dict.fromkeys(runs[0].rows.phases, 0) if runs else {}
    for run in runs:
        counts = {name: rows.count for name, rows in run.rows.phases.items()}
        table, wire_active = run.table.used
        records.append(
            PipelineRun(
                microbatches={name: (begin[name], row_count) for name, row_count in counts.items()},
                table=table,
                wire_active=wire_active,
            ),
        )
        begin = {name: begin[name] + row_count for name, row_count in counts.items()}
    return tuple(records)


def _pipeline_statistics(runs: Sequence[PlannedRun]) -> dict[str, float]:
    cost = sum(lockstep(run.schedule) for run in runs)
    ranks = runs[0].schedule.graph.ring.stages if runs else 1
    idle: Counter[str] = Counter()
    for run in runs:
        idle.update(idle_by_cause(run.schedule))
    shares = {cause: time / (ranks * cost) for cause, time in idle.items()}
    slots_used = [sum(slots_needed([run.schedule]).values()) for run in runs]
    return {
        "pipeline/runs": len(runs),
        "pipeline/ticks": sum(run.table.count for run in runs),
        "pipeline/cost": cost,
        "pipeline/asynchronous_cost": cost - idle["lockstep"] // ranks,
        "pipeline/idle_share": sum(shares.values()),
        **{f"pipeline/idle_{cause}": share for cause, share in shares.items()},
        "pipeline/search_ms": sum(run.search_ms for run in runs),
        "pipeline/fallbacks": sum(run.fallback for run in runs),
        "pipeline/deferred_examples": sum(run.rows.deferred for run in runs),
        "pipeline/slots_used": max(slots_used, default=0),
    }
