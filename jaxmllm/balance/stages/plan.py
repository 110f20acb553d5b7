"""From the lengths of a global batch to the plan of its pipelined step: pure, integers only, the same on every host.

    examples --plan_microbatches--> microbatches      which examples run together                  microbatches.py
    items    --pack_rows----------> rows              sub-microbatches of encoders, and which microbatches read them
    rows     --ChainCosts.work----> operations        what they cost: a row's slots, and its attention
             --schedule, table----> PipelineRun       who does what in which tick                  sharding/pipeline/

A run of the executor has bounds: rows of each phase, rows that one microbatch reads, slots, ticks. A batch that needs
more is parted, and its parts run one after another; gradients add up, so nothing is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums, sums_by
from jaxmllm.balance.records import BatchItems, PhasePlan, PipelineRun, PlanSpec, RoutePlan, StepPlan
from jaxmllm.balance.rows.pack import lay_out
from jaxmllm.balance.stages.microbatches import PhaseLoad, pack_rows, plan_microbatches
from jaxmllm.balance.statistics import phase_statistics
from jaxmllm.config.schema import ConfigError, PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.graph import ChainWork, Graph, Pool, Slots, Workload
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import Schedule, durations, lockstep
from sharding.pipeline.slots import keep_residuals, slots_needed
from sharding.pipeline.table import Table, make_table
from sharding.pipeline.table_spec import TableSpec
from sharding.pipeline.validator import validate

STEPS = 1024  # attention of a row is counted in such parts of what one item that fills it takes
WORK_BITS = 50  # of an example's work, at most


@dataclass(frozen=True)
class ChainCosts:
    """What the chunks of a chain cost for one row: forward, input gradient, weight gradient, recompute, each [4, D].

    `linear` is paid for every slot, filled or not; `attention` is what one item that fills the row adds.
    """

    capacity: int
    linear: Longs
    attention: Longs

    def work(self, squares: Longs, backward: bool = True) -> ChainWork:
        """Of M rows whose items have squared lengths of these sums [M]."""
        filled = squares * STEPS // self.capacity**2
        forward, *back = self.linear[:, :, None] + self.attention[:, :, None] * filled // STEPS
        if not backward:
            back = [np.zeros_like(each) for each in back]
        input_gradient, weight_gradient, recompute = back
        return ChainWork(np.maximum(forward, 1), recompute, input_gradient, weight_gradient)


@dataclass(frozen=True)
class PipelineSpec:
    """What the plan of a pipelined step depends on beside `PlanSpec`."""

    config: PipelineConfig
    tables: TableSpec  # ring, slots, ticks and fan of one run
    rows: Mapping[str, int]  # most rows of each phase in one run
    costs: Mapping[str, ChainCosts]  # by phase
    microbatches: int  # of the language model that a batch of `examples` shall have
    examples: int
    backward: bool = True  # false: evaluation


def plan_pipeline(items: BatchItems, spec: PlanSpec, pipeline: PipelineSpec) -> StepPlan:
    """Place every item of a global batch in rows of the pipeline's runs, and schedule each run.

    Statistics of the phases as in `plan_step`; `plan_ms`; and `pipeline/...`: `runs`, `ticks`, `cost` (FLOPs,
    tick by tick those of the slowest rank), `idle_share` (of all ranks' time, as these costs predict it), `search_ms`
    (finding schedules), `fallbacks` (runs whose schedule is not the configured one, for want of slots),
    `deferred_examples`, `live_slots` (most slots of a rank that one run fills, all pools).

    Raises:
      ConfigError: an example that no run holds; names the key that would make room.
    """
    began = time.perf_counter()
    parts = list(_parts(np.arange(len(items.examples)), items, spec, pipeline))
    phases, arrivals = _joined([part.placed for part in parts], items, spec)
    statistics: dict[str, float] = {}
    for name, phase in spec.phases.items():
        statistics |= phase_statistics(phases[name], items.phases[name], phase)
    statistics |= _statistics(parts)
    statistics["plan_ms"] = 1e3 * (time.perf_counter() - began)
    return StepPlan(phases, {name: RoutePlan(each, ()) for name, each in arrivals.items()}, statistics, _runs(parts))


# ---------------------------------------------------------------------------- placement


@dataclass(frozen=True)
class Rows:
    """Items of a phase in the rows of one run: numbers [n] of the items, and where each lies."""

    count: int  # rows of every replica
    item: Longs
    row: Longs
    rank: Longs
    offset: Ints
    segment: Ints
    squares: Longs  # [count] sum of squared lengths in a row, of the replica that has most


@dataclass(frozen=True)
class Placed:
    """Examples in rows. `inputs[m]` are the (encoder, row) that language microbatch m reads, on all replicas alike."""

    phases: dict[str, Rows]
    arrivals: dict[str, Longs]  # by encoder: of the items in `phases`
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    fan: tuple[int, ...]
    deferred: int


def place(
    examples: Longs, items: BatchItems, spec: PlanSpec, wanted: int, deferral: bool, fan: tuple[int, ...] | None = None
) -> Placed:
    """Place some examples of a batch, in about `wanted` language microbatches of a replica.

    Args:
      examples: numbers in the batch, ascending.
      fan: rows of each encoder whose tokens lie end to end where a microbatch finds them; none: as many as needed.
    """
    position = np.full(len(items.examples), -1, np.int64)
    position[examples] = np.arange(len(examples))
    members = {name: np.flatnonzero(position[of.example] >= 0) for name, of in items.phases.items()}
    owner = {name: position[items.phases[name].example[of]] for name, of in members.items()}
    loads = _loads(items, spec, members, owner, len(examples))
    language = loads.pop(LANGUAGE)
    ranks = spec.phases[LANGUAGE].ranks
    plan = plan_microbatches(loads, language, ranks, wanted, None if deferral else 0)
    replica = plan.replica.astype(np.int64)
    # A microbatch of no example on any replica is none.
    run = np.unique(plan.language, return_inverse=True)[1].astype(np.int64)

    def rows(name: str, row: Longs, count: int) -> Rows:
        of = items.phases[name].length[members[name]]
        rank = replica[owner[name]]
        offset, segment = lay_out(row * ranks + rank, of)
        squares = sums_by(row * ranks + rank, of**2, count * ranks).reshape(count, ranks).max(axis=1, initial=0)
        return Rows(count, members[name], row, rank, offset, segment, squares)

    phases = {}
    for name in loads:
        phase, of = spec.phases[name], owner[name]
        length, capacity = items.phases[name].length[members[name]], phase.capacities[0]
        group = _sharing(plan.encoder[of], replica[of], length, capacity, plan.microbatches)[plan.encoder[of]]
        within, _ = pack_rows(group * ranks + replica[of], length, capacity)
        needed = np.zeros(plan.microbatches + 1, np.int64)
        np.maximum.at(needed, group + 1, within + 1)
        phases[name] = rows(name, np.cumsum(needed)[group] + within, int(needed.sum()))
    phases[LANGUAGE] = rows(LANGUAGE, run[owner[LANGUAGE]], int(run.max(initial=-1)) + 1)
    return _linked(phases, {name: run[owner[name]] for name in loads}, spec, fan, int(plan.deferred.sum()))


def _sharing(microbatch: Ints, replica: Longs, length: Longs, capacity: int, count: int) -> Longs:
    """Number of each microbatch's group [count]: consecutive ones that share encoder rows, as many as need no more rows
    together than the one of them that needs most. A row costs the same however little it holds."""

    def needed(first: int, last: int) -> int:
        of = (microbatch >= first) & (microbatch <= last)
        return int(pack_rows(replica[of], length[of], capacity)[0].max(initial=-1)) + 1

    group = np.zeros(count, np.int64)
    first = most = number = 0
    for m in range(count):
        alone = needed(m, m)
        if needed(first, m) > max(most, alone):
            first, most, number = m, 0, number + 1
        most = max(most, alone)
        group[m] = number
    return group


def _loads(
    items: BatchItems, spec: PlanSpec, members: Mapping[str, Longs], owner: Mapping[str, Longs], examples: int
) -> dict[str, PhaseLoad]:
    """What the examples ask of every phase."""
    longest = {name: int(of.length.max(initial=0)) for name, of in items.phases.items()}
    most = max(phase.cost.of(longest[name]) for name, phase in spec.phases.items())
    shift = max(0, most.bit_length() - WORK_BITS)
    loads = {}
    for name, phase in spec.phases.items():
        length = items.phases[name].length[members[name]]
        work = phase.cost.shifted(shift).of(length)
        capacity = phase.capacities[0] if phase.has_loss else None
        loads[name] = PhaseLoad(sums_by(owner[name], work, examples), sums_by(owner[name], length, examples), capacity)
    return loads


def _linked(
    phases: dict[str, Rows], reader: Mapping[str, Longs], spec: PlanSpec, fan: tuple[int, ...] | None, deferred: int
) -> Placed:
    """Which microbatch reads which rows, and where it finds the tokens of each item: one row behind another."""
    inputs: list[list[tuple[int, int]]] = [[] for _ in range(phases[LANGUAGE].count)]
    places, most = {}, []
    for encoder, (name, of) in enumerate(reader.items()):
        rows = phases[name]
        pairs, pair = np.unique(of * (rows.count + 1) + rows.row, return_inverse=True)
        microbatch, row = np.divmod(pairs, rows.count + 1)
        place = running_sums(microbatch, np.ones_like(microbatch))
        for m, n in zip(microbatch.tolist(), row.tolist(), strict=True):
            inputs[m].append((encoder, n))
        places[name] = place[pair]
        most.append(int(place.max(initial=-1)) + 1)
    arrivals, base = {}, 0
    for encoder, (name, place) in enumerate(places.items()):
        phase = spec.phases[name]
        tokens = phase.capacities[0] // phase.slots_per_token
        arrivals[name] = base + place * tokens + phases[name].offset // phase.slots_per_token
        base += (fan[encoder] if fan else most[encoder]) * tokens
    return Placed(phases, arrivals, tuple(map(tuple, inputs)), tuple(most), deferred)


def _joined(parts: list[Placed], items: BatchItems, spec: PlanSpec) -> tuple[dict[str, PhasePlan], dict[str, Ints]]:
    """Plans of all phases, the rows of a run behind those of the run before; and arrivals of encoder items."""
    plans, arrivals = {}, {}
    for name, phase in spec.phases.items():
        columns = np.zeros((5, len(items.phases[name].length)), np.int32)
        first = 0
        for part in parts:
            rows = part.phases[name]
            columns[:4, rows.item] = rows.row + first, rows.rank, rows.offset, rows.segment
            columns[4, rows.item] = part.arrivals.get(name, 0)
            first += rows.count
        microbatch, rank, offset, segment, arrival = columns
        none = np.zeros(first, np.int32)
        plans[name] = PhasePlan(none + phase.capacities[0], none, none, microbatch, rank, offset, segment)
        if not phase.has_loss:
            arrivals[name] = arrival
    return plans, arrivals


# ---------------------------------------------------------------------------- schedules


@dataclass(frozen=True)
class _Part:
    """Some examples of a batch, which one run computes."""

    placed: Placed
    table: Table
    schedule: Schedule
    fallback: bool
    search_ms: float


def _parts(examples: Longs, items: BatchItems, spec: PlanSpec, pipeline: PipelineSpec) -> Iterator[_Part]:
    """One part if a run holds all; else those of either half, which have about equal work."""
    try:
        yield _part(examples, items, spec, pipeline)
        return
    except PipelineError as error:
        if len(examples) == 1:
            number = int(items.examples[examples[0]])
            raise ConfigError(
                f"example {number} does not fit the pipeline by itself: {error}; its slots are those of "
                "pipeline.microbatches_in_flight"
            ) from error
    position = np.full(len(items.examples), -1, np.int64)
    position[examples] = np.arange(len(examples))
    slots = np.zeros(len(examples), np.int64)
    for of in items.phases.values():
        mine = position[of.example]
        slots += sums_by(mine[mine >= 0], of.length[mine >= 0], len(examples))
    by_slots = examples[np.argsort(-slots, kind="stable")]
    for half in (by_slots[::2], by_slots[1::2]):
        yield from _parts(np.sort(half), items, spec, pipeline)


def _part(examples: Longs, items: BatchItems, spec: PlanSpec, pipeline: PipelineSpec) -> _Part:
    """Raises `PipelineError` when a run cannot hold the examples."""
    wanted = max(1, min(round(pipeline.microbatches * len(examples) / pipeline.examples), pipeline.rows[LANGUAGE]))
    placed = place(examples, items, spec, wanted, pipeline.config.deferral, pipeline.tables.rows_read)
    for encoder, name in enumerate(placed.arrivals):
        if placed.fan[encoder] > pipeline.tables.rows_read[encoder]:
            raise PipelineError(
                f"a microbatch reads {placed.fan[encoder]} rows of {name}, room is for "
                f"{pipeline.tables.rows_read[encoder]}: raise pipeline.encoder_rows_per_microbatch or "
                f"phases.{name}.capacities"
            )
    for name, rows in placed.phases.items():
        if rows.count > pipeline.rows[name]:
            key = "pipeline.microbatches" if spec.phases[name].has_loss else f"phases.{name}.capacities"
            raise PipelineError(f"{rows.count} rows of {name}, a run has {pipeline.rows[name]}: raise {key}")
    graph = graph_of(placed, pipeline)
    began = time.perf_counter()
    schedule, table, fallback = _scheduled(graph, pipeline)
    search_ms = 1e3 * (time.perf_counter() - began)
    validate(table, graph)
    return _Part(placed, table, schedule, fallback, search_ms)


def graph_of(placed: Placed, pipeline: PipelineSpec) -> Graph:
    """The operations of one run."""
    work = tuple(
        pipeline.costs[chain.name].work(placed.phases[chain.name].squares, pipeline.backward)
        for chain in pipeline.tables.ring.chains
    )
    return build_graph(pipeline.tables.ring, Workload(work, placed.inputs), split=pipeline.config.split_backward)


def _scheduled(graph: Graph, pipeline: PipelineSpec) -> tuple[Schedule, Table, bool]:
    """The configured schedule, or the greedy one where its order cannot be kept or does not fit the slots; its table;
    and whether it is the greedy one instead of another."""
    tables = pipeline.tables
    fixed = pipeline.backward and not scheduler_of(pipeline.config.schedule).keeps_slots
    try:
        schedule = schedule_of(graph, pipeline)
        return schedule, make_table(schedule, tables), False
    except PipelineError:
        if not fixed:
            raise
    schedule = _residuals_kept(greedy(graph, tables.slots), tables.slots)
    return schedule, make_table(schedule, tables), True


def schedule_of(graph: Graph, pipeline: PipelineSpec) -> Schedule:
    """The configured schedule; evaluation is always scheduled greedily.

    Raises `PipelineError` when its order cannot be kept in this batch or, if greedy, does not fit the slots.
    """
    slots = pipeline.tables.slots
    if not pipeline.backward:
        return _residuals_kept(greedy(graph, slots), slots)
    schedule = scheduler_of(pipeline.config.schedule).make(graph, slots, pipeline.config.rollouts)
    return _residuals_kept(schedule, slots)


def _residuals_kept(schedule: Schedule, slots: Slots) -> Schedule:
    return keep_residuals(schedule, slots) if any(pool == Pool.RESIDUAL for pool, _ in slots) else schedule


def _runs(parts: list[_Part]) -> tuple[PipelineRun, ...]:
    runs, first = [], dict.fromkeys(parts[0].placed.phases, 0) if parts else {}
    for part in parts:
        counts = {name: rows.count for name, rows in part.placed.phases.items()}
        used = slice(part.table.count)
        runs.append(
            PipelineRun(
                {name: (first[name], count) for name, count in counts.items()},
                part.table.rows[used],
                part.table.wire_active[used],
            )
        )
        first = {name: first[name] + count for name, count in counts.items()}
    return tuple(runs)


def _statistics(parts: list[_Part]) -> dict[str, float]:
    length = sum(lockstep(part.schedule) for part in parts)
    ranks = parts[0].schedule.graph.ring.stages if parts else 1
    busy = sum(sum(durations(part.schedule)) for part in parts)
    live = [sum(slots_needed([part.schedule]).values()) for part in parts]
    return {
        "pipeline/runs": len(parts),
        "pipeline/ticks": sum(part.table.count for part in parts),
        "pipeline/cost": length,
        "pipeline/idle_share": 1 - busy / (ranks * length) if length else 0.0,
        "pipeline/search_ms": sum(part.search_ms for part in parts),
        "pipeline/fallbacks": sum(part.fallback for part in parts),
        "pipeline/deferred_examples": sum(part.placed.deferred for part in parts),
        "pipeline/live_slots": max(live, default=0),
    }
