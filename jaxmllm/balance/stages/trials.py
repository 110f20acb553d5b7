"""Rows and stages of a pipeline, tried on sampled batches: the sizes whose steps are predicted to
take least time.

    capacities --pack_run--> rows of some samples --partition--> ring --greedy--> ticks: lockstep FLOPs

A row costs its capacity and must hold the longest item, so long items leave few rows that are full,
or many that are not; few rows keep few stages busy; finer chunks keep more of them busy, in more
ticks. No formula weighs all of that up, so candidates are packed and scheduled as a step would be.
Smaller rows next to those that hold the longest item are full where these are not, and more of them
keep more stages busy; but each class of rows is code of its own in the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmllm.arrays import Longs, ceil_divide
from jaxmllm.balance.records import BatchItems, PhaseSpec, PlanSpec, RowClass
from jaxmllm.balance.sizes.capacities import checked_capacities, smallest_capacity
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec, with_head_room
from jaxmllm.balance.stages.chain_costs import ChainLayers
from jaxmllm.balance.stages.microbatches import MicrobatchPlan
from jaxmllm.balance.stages.plan import PipelineSpec, best_rows, graph_of, predicted_cost
from jaxmllm.balance.stages.run_rows import (
    RunRows,
    capacities_to_try,
    examples_in_microbatches,
    pack_run,
)
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.balance.stages.trial_slots import Keeps, keeps_none, slot_budget
from jaxmllm.config.schema import ConfigError, PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.cuts import LayoutName, partition
from sharding.pipeline.ring import PipelineError, Ring
from sharding.pipeline.table_spec import TableSpec


@dataclass(frozen=True)
class Cut:
    """How layers are divided among stages: with segments, `chunks` of each component on a rank."""

    layout: LayoutName
    chunks: tuple[tuple[str, int], ...] = ()

    def with_chunks(self, name: str, count: int) -> Cut:
        return replace(self, chunks=tuple(sorted((dict(self.chunks) | {name: count}).items())))


@dataclass(frozen=True)
class Sampled:
    """Sampled batches in rows, each in all rows that it may have, and the pipeline of these sizes,
    with more than enough slots and ticks."""

    spec: PlanSpec
    pipeline: PipelineSpec
    runs: list[list[RunRows]]

    @property
    def fitting(self) -> list[RunRows]:
        """The best rows of each batch, of those whose microbatches read no more rows than there is
        room for; a batch without any is left out."""
        rows_read = self.pipeline.rows_read

        def fits(run: RunRows) -> bool:
            return all(run.rows_read[name] <= room for name, room in rows_read.items())

        fitting = [[run for run in of_batch if fits(run)] for of_batch in self.runs]
        return [best_rows(of_batch, self.pipeline) for of_batch in fitting if of_batch]


Capacities = Mapping[str, tuple[int, ...]]  # of the rows of each phase, the largest first
# (capacities, spans), both by class, the largest first
Layers = Callable[[Capacities, Capacities], ChainLayers]


class Trials:
    """Sampled batches, and how pipelines of different sizes would run them.

    Args:
      samples: global batches.
      phases: in the order of `make_phases`.
      layers: makes the layers of all chains, for rows of some capacities and spans.
      examples: number of examples of a batch.
      largest: examples that must each fit a run by themselves.
      keeps: tells how many forwards `kept_residuals: auto` keeps the residuals of (`Keeps`).
      widest: ranks that hold a row together, in phases that allow so many; others have the most
        that they allow.
    """

    def __init__(
        self,
        samples: Sequence[BatchItems],
        phases: Sequence[SizingInputs],
        config: PipelineConfig,
        layers: Layers,
        examples: int,
        largest: Sequence[BatchItems] = (),
        keeps: Keeps = keeps_none,
        widest: int = 1,
    ):
        self.samples = [batch for batch in samples if len(batch.examples)]
        self.inputs = {inputs.name: inputs for inputs in phases}
        self.config = config
        self.layers = layers
        self.examples = examples
        self.largest = largest
        self.keeps = keeps
        self.widest = widest
        self.encoders = self.inputs[LANGUAGE].phase.reads
        # Encoders and generators; and all phases that others read
        self.media = tuple(name for name in self.inputs if name != LANGUAGE)
        self.read = tuple(self.inputs)[:-1]
        self.microbatches = None if config.microbatches == "auto" else config.microbatches
        self._plans: dict[tuple[int, int], MicrobatchPlan] = {}
        self._runs: dict[tuple[tuple[int, ...], ...], list[list[RunRows]]] = {}

    def of_span(self, widest: int) -> Trials:
        """The same trials with rows that `widest` ranks hold together."""
        inputs = list(self.inputs.values())
        settings = self.config, self.layers, self.examples, self.largest, self.keeps, widest
        return Trials(self.samples, inputs, *settings)

    def with_some(self) -> Trials:
        """The same trials with fewer samples of fewer replicas, on which candidates are tried."""
        ranks = self.inputs[LANGUAGE].ranks
        per_replica = ceil_divide(self.examples, ranks)
        fewest_samples, most_samples = CHOICE.samples
        replicas = min(ranks, max(1, CHOICE.examples // (fewest_samples * per_replica)))
        # Ranks that share rows stay together, so replicas are a multiple of the largest span.
        most_span = max(self.spans_to_try)
        replicas = max(1, replicas // most_span) * most_span
        examples = per_replica * replicas
        # Fewer replicas leave room for more samples.
        sample_count = min(most_samples, max(fewest_samples, CHOICE.examples // examples))
        sample_count = max(sample_count, CHOICE.few_examples // examples)
        inputs = [replace(phase_inputs, ranks=replicas) for phase_inputs in self.inputs.values()]
        samples = [_first_examples(batch, examples) for batch in self.samples[:sample_count]]
        return Trials(samples, inputs, self.config, self.layers, examples, keeps=self.keeps)

    @property
    def added_class_worth(self) -> float:
        """Share of the best cost below which a class beyond the usual number is taken."""
        _, most_samples = CHOICE.samples
        if len(self.samples) > most_samples:
            return CHOICE.class_worth
        return CHOICE.added_class_worth

    # ------------------------------------------------------------------------ spans

    @property
    def spans_to_try(self) -> list[int]:
        """Ranks that may hold a row of some phase together, most first."""
        spans = {span for inputs in self.inputs.values() for span in inputs.spans}
        least_spans = []
        for name, inputs in self.inputs.items():
            if self.given(name) is None:
                least_spans.append(min(inputs.spans))
            else:  # given capacities come with every span that is given
                least_spans.append(max(inputs.spans))
        least_span = max(least_spans)
        return sorted((span for span in spans if span >= least_span), reverse=True)

    def span(self, name: str) -> int:
        """Most ranks that hold a row of a phase together."""
        return max(span for span in self.inputs[name].spans if span <= self.widest)

    def spans(self, name: str) -> tuple[int, ...]:
        """Spans of every capacity of a phase, widest first: one, or all that are allowed if the
        config gives the capacities."""
        if self.given(name) is None:
            return (self.span(name),)
        return tuple(sorted(self.inputs[name].spans, reverse=True))

    def classes(self, name: str, capacities: tuple[int, ...]) -> tuple[RowClass, ...]:
        """Row classes of these capacities, the largest first, each in every span."""
        return tuple(
            RowClass(capacity, span) for capacity in capacities for span in self.spans(name)
        )

    # ------------------------------------------------------------------------ rows

    def spec(self, capacities: Capacities) -> PlanSpec:
        """The planner's inputs for rows of these capacities."""
        return PlanSpec(
            {
                name: self._phase_spec(name, self.classes(name, capacities[name]))
                for name in self.inputs
            },
            {},
        )

    def _phase_spec(self, name: str, classes: tuple[RowClass, ...]) -> PhaseSpec:
        inputs = self.inputs[name]
        config = inputs.config
        if inputs.phase.generates:
            segments = config.max_segments
            if segments == "auto":
                lengths = [batch.phases[name].length for batch in self.samples]
                segments = _segments(np.concatenate([*lengths, np.zeros(0, np.int64)]), classes)
            return phase_spec(inputs, classes, segments)
        # Ranks that share rows get their share of the examples, so a row never has more of them.
        group_examples = ceil_divide(self.examples, inputs.ranks // self.span(name))
        segments = group_examples if config.max_segments == "auto" else config.max_segments
        return phase_spec(inputs, classes, max(segments, group_examples))

    def given(self, name: str) -> tuple[int, ...] | None:
        """The capacities that the config gives a phase; None: they are to be chosen."""
        inputs = self.inputs[name]
        if inputs.config.capacities == "auto":
            return None
        return checked_capacities(inputs.config.capacities, inputs, max(inputs.spans))

    def capacity(self, name: str, rows: float, slack: float) -> int:
        """The capacity with which `rows` rows hold `slack` times a replica's mean load; at least
        what holds the longest item, and at most the largest capacity."""
        inputs = self.inputs[name]
        share = int(self.load(name) * slack / rows)
        ideal = inputs.alignment.round_up(share)
        return max(self.least(name), min(inputs.largest_capacity, ideal))

    def least(self, name: str) -> int:
        """The least capacity with which rows hold the longest item."""
        return smallest_capacity(self.inputs[name], self.span(name))

    def candidates(self, name: str, microbatches: int) -> list[int]:
        """Capacities to try, ascending: for few rows of a replica up to as many as the longest item
        allows; of media, also for as many rows as microbatches, and twice or half as many."""
        most_rows = max(1, self.load(name) // self.least(name))
        if name == LANGUAGE:
            most_rows = min(most_rows, CHOICE.rows_per_stage * self.config.stages)
            counts = [most_rows + 1]
        else:
            counts = [microbatches // 2, microbatches, 2 * microbatches, most_rows + 1]
        counts += [round(most_rows * share) for share in CHOICE.row_shares]
        tried = {
            self.capacity(name, rows, slack)
            for rows in counts
            if 1 <= rows <= most_rows + 1
            for slack in CHOICE.slacks
        }
        return sorted(tried)

    def further(
        self, name: str, capacities: tuple[int, ...], largest: int
    ) -> list[tuple[int, ...]]:
        """Candidates with one more class than `capacities`, the first of which is replaced by
        `largest`."""
        round_up = self.inputs[name].alignment.round_up
        divisors = list(CHOICE.divisors)
        # Where the longest item is long and rare, even the last of these shares may be so large
        # that a replica fills only a few such rows, and stages wait for each other.
        row_load = self.load(name) // (CHOICE.rows_per_stage * self.config.stages)
        least_share = round_up(max(row_load, 1))
        while largest / (CHOICE.next_divisor * divisors[-1]) >= least_share:
            divisors.append(CHOICE.next_divisor * divisors[-1])
        shares = {round_up(int(largest / divisor)) for divisor in divisors}
        return [
            tuple(sorted({largest, *capacities[1:], share}, reverse=True))
            for share in sorted(shares - {largest, *capacities[1:]})
        ]

    def fill(self, name: str, capacities: Capacities) -> float:
        """Share of the slots of a phase that its items take, in all samples."""
        return self.load(name) * len(self.samples) / max(self.slots(name, capacities), 1)

    def load(self, name: str) -> int:
        """Mean slots of a phase on a replica, over the samples."""
        loads = [int(batch.phases[name].length.sum()) for batch in self.samples]
        return sum(loads) // max(1, len(loads) * self.inputs[name].ranks)

    # ------------------------------------------------------------------------ stages

    def sampled(self, capacities: Capacities, cut: Cut) -> Sampled:
        """The samples in rows of these capacities, on stages of this cut.

        Raises:
          ConfigError: encoder rows are given that do not hold one of the largest examples.
          PipelineError: more stages or chunks than layers.
        """
        spec = self.spec(capacities)
        runs = self.runs(capacities)
        sample_runs = [run for of_batch in runs for run in of_batch]
        single_runs = _single_example_runs(self.largest, spec)
        rows_read = _rows_read(sample_runs, single_runs, self.read, self.config)
        rows = {
            name: _most_rows([*sample_runs, *single_runs], name, len(phase.classes))
            for name, phase in spec.phases.items()
        }
        # One microbatch may read `rows_read` rows, so a run has at least as many.
        for name, fewest in zip(self.read, rows_read, strict=True):
            rows[name] = tuple(max(class_rows, fewest) for class_rows in rows[name])
        # All language rows of a step may be of one class. They take little memory: integers only.
        load = with_head_room(self.load(LANGUAGE), 1)
        rows[LANGUAGE] = tuple(
            max(*rows[LANGUAGE], ceil_divide(load, capacity))
            for capacity in spec.phases[LANGUAGE].capacities
        )
        class_capacities = {name: phase.capacities for name, phase in spec.phases.items()}
        class_spans = {name: phase.spans for name, phase in spec.phases.items()}
        layers = self.layers(class_capacities, class_spans)
        ring = _balanced_ring(layers, [of_batch[0] for of_batch in runs], self.config.stages, cut)
        costs = layers.costs(ring)
        ticks = len(ring.chains) * sum(map(sum, rows.values())) * CHOICE.ticks_per_row
        # "auto" means greedy until a schedule is chosen
        schedule = "greedy" if self.config.schedule == "auto" else self.config.schedule
        config = self.config.model_copy(update={"layout": cut.layout, "schedule": schedule})
        slots = slot_budget(ring, costs, rows_read, config, rows, self.keeps)
        classes = tuple(len(spec.phases[chain.name].classes) for chain in ring.chains)
        tables = TableSpec(ring, slots, ticks, rows_read, classes)
        pipeline = PipelineSpec(config, tables, rows, costs, self.microbatches, self.examples)
        return Sampled(spec, pipeline, runs)

    def with_schedule(self, sampled: Sampled, schedule: str, split: bool) -> PipelineSpec:
        """The pipeline with a schedule of this name, and its backward pass split or whole."""
        pipeline = sampled.pipeline
        config = pipeline.config.model_copy(update={"schedule": schedule, "split_backward": split})
        tables = pipeline.tables
        slots = slot_budget(
            tables.ring, pipeline.costs, tables.rows_read, config, pipeline.rows, self.keeps
        )
        return replace(pipeline, config=config, tables=replace(tables, slots=slots))

    def predicted(self, capacities: Capacities, cut: Cut, bound: float = math.inf) -> int | None:
        """FLOPs of the steps of all samples: the sum over ticks of the slowest rank's. None if no
        schedule can be kept, or if they are not below `bound`."""
        try:
            sampled = self.sampled(capacities, cut)
        except PipelineError:
            return None
        # The work of the busiest rank is a bound that is cheap to know; it ends most candidates.
        graphs = [[graph_of(run, sampled.pipeline) for run in runs] for runs in sampled.runs]
        floors = [min(int(graph.rank_work.max()) for graph in of_batch) for of_batch in graphs]
        total: float = sum(floors)
        for of_batch, floor in zip(graphs, floors, strict=True):
            # Without this floor, the total is the cost of the batches before this one plus the
            # floors of those after it.
            total -= floor
            # What this batch may cost at most, if all batches after it cost only their floors
            least_cost = bound - total
            for graph in of_batch:
                least_cost = min(least_cost, predicted_cost(graph, sampled.pipeline, least_cost))
            total += least_cost
            if total >= bound:
                return None
        return int(total)

    def runs(self, capacities: Capacities) -> list[list[RunRows]]:
        """The samples in rows of these capacities, each in all rows that it may have."""
        key = tuple(tuple(capacities[name]) for name in self.inputs)
        if key not in self._runs:
            spec = self.spec(capacities)
            runs = []
            for sample_number, batch in enumerate(self.samples):
                all_examples = np.arange(len(batch.examples))
                runs.append(
                    [
                        self._packed_sample(sample_number, capacity, spec)
                        for capacity in capacities_to_try(all_examples, batch, spec)
                    ]
                )
            self._runs[key] = runs
        return self._runs[key]

    def slots(self, name: str, capacities: Capacities) -> int:
        """Slots of a phase on a rank in all samples, each in the possible rows that have fewest."""
        class_slots = np.array(self.spec(capacities).phases[name].capacities)

        def slots_of(run: RunRows) -> int:
            return int(class_slots[run.phases[name].row_class].sum())

        return sum(min(map(slots_of, of_batch)) for of_batch in self.runs(capacities))

    def _packed_sample(self, number: int, capacity: int, spec: PlanSpec) -> RunRows:
        """A sample in rows of `spec`. The choice of examples that run together takes most of the
        time and depends on language rows only, so it is kept for other rows of media."""
        batch = self.samples[number]
        request = (np.arange(len(batch.examples)), batch, spec, self.microbatches or 1)
        deferral = self.config.deferral
        if (number, capacity) not in self._plans:
            plan = examples_in_microbatches(*request, deferral, capacity)
            self._plans[number, capacity] = plan
        return pack_run(*request, deferral, plan=self._plans[number, capacity])


# ---------------------------------------------------------------------------- rows


def _first_examples(batch: BatchItems, count: int) -> BatchItems:
    """The first examples of a batch."""
    phases = {
        name: items.at(np.flatnonzero(items.example < count))
        for name, items in batch.phases.items()
    }
    return BatchItems(batch.examples[:count], batch.targets, phases)


def _segments(lengths: Longs, classes: tuple[RowClass, ...]) -> int:
    """Most items of a generator in a row: as many as fill the largest row if all have the first
    quartile of the sampled lengths. Every layer has scales and shifts for each of them."""
    ordered = np.sort(lengths)
    short = int(ordered[len(ordered) // 4]) if len(ordered) else classes[0].slots
    return ceil_divide(classes[0].slots, max(short, 1))


def _single_example_runs(largest: Sequence[BatchItems], spec: PlanSpec) -> list[RunRows]:
    """Each of these examples in a run by itself."""
    return [
        pack_run(np.array([example]), batch, spec, microbatches=1, deferral=False)
        for batch in largest
        for example in range(len(batch.examples))
    ]


def _most_rows(runs: Sequence[RunRows], name: str, classes: int) -> tuple[int, ...]:
    """Rows of each class of a phase that suffice for each of these runs, with head room. A class
    has rows for all larger ones, too: rows of these become some of it where they hold less."""
    counts = [np.cumsum(run.phases[name].counts(classes)) for run in runs]
    most_rows = np.max([np.ones(classes, np.int64), *counts], axis=0).tolist()
    return tuple(with_head_room(rows, 1) for rows in most_rows)


def _rows_read(
    sampled: Sequence[RunRows],
    alone: Sequence[RunRows],
    read: Sequence[str],
    config: PipelineConfig,
) -> tuple[int, ...]:
    """Rows of each phase that is read which one microbatch of its reader may read: enough for the
    samples, and for each of the largest examples by itself. Raises `ConfigError` if the config
    gives a number that is too low for one of the largest examples."""

    def most(runs: Sequence[RunRows], name: str) -> int:
        return max([1, *(run.rows_read[name] for run in runs)])

    given_rows = config.encoder_rows_per_microbatch
    if given_rows != "auto":
        for name in read:
            if most(alone, name) > given_rows:
                raise ConfigError(
                    f"pipeline.encoder_rows_per_microbatch ({given_rows}): the data have an example that reads "
                    f"{most(alone, name)} rows of {name}; raise it or phases.{name}.capacities",
                )
        return (given_rows,) * len(read)
    return tuple(max(with_head_room(most(sampled, name), 1), most(alone, name)) for name in read)


# ---------------------------------------------------------------------------- stages


def _balanced_ring(layers: ChainLayers, sampled: Sequence[RunRows], stages: int, cut: Cut) -> Ring:
    """The ring whose stages are balanced for the average row of every phase."""
    squares = {}
    row_count = {}
    slots = {}
    for name, capacities in layers.capacities.items():
        rows = [run.phases[name] for run in sampled]
        row_count[name] = sum(phase_rows.count for phase_rows in rows)
        # [kinds], over all rows of all samples
        sums = np.array([phase_rows.squares.sum(axis=1) for phase_rows in rows]).sum(axis=0)
        squares[name] = (sums // max(row_count[name], 1)).tolist()
        all_slots = sum(
            int(np.array(capacities)[rows_of_run.row_class].sum()) for rows_of_run in rows
        )
        # A phase without rows in the samples still has layers: they are costed for its largest row.
        slots[name] = all_slots // row_count[name] if row_count[name] else capacities[0]
    rows_per_microbatch = {
        name: row_count[name] / max(row_count[LANGUAGE], 1) for name in row_count
    }
    chunks = dict(cut.chunks) if cut.layout == "segments" else None
    phase_layers = layers.layers(squares, slots)
    return partition(
        phase_layers,
        stages,
        cut.layout,
        rows_per_microbatch,
        chunks=chunks,
        reading=layers.reading,
    )
