"""Rows and stages of a pipeline, tried on sampled batches: the sizes whose steps are predicted to
take least time.

    capacities --pack_run--> rows of some samples --partition--> ring --greedy--> ticks: lockstep FLOPs

A row costs its capacity and must hold the longest item, so long items leave few rows that are full,
or many that are not; few rows keep few stages busy; finer chunks keep more of them busy, in more
ticks. No formula weighs all of that up, so candidates are packed and scheduled as a step would be.
Smaller rows beside those that hold the longest item are full where these are not, and more of them
keep more stages busy; each class of rows is code of its own in the compiled program.
Coordinate by coordinate: layout and chunks; then the capacities of the language model, of each
encoder, and once more layout and chunks, twice. All of that for rows that most ranks hold together,
which must hold the longest item, too, but are full with fewer examples; then for fewer ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.records import BatchItems, PhaseSpec, PlanSpec, RowClass
from jaxmllm.balance.sizes.capacities import checked_capacities
from jaxmllm.balance.sizes.inputs import SizingInputs, phase_spec, with_head_room
from jaxmllm.balance.stages.chain_costs import ChainCosts, ChainLayers
from jaxmllm.balance.stages.microbatches import MicrobatchPlan
from jaxmllm.balance.stages.plan import PipelineSpec, best_rows, graph_of, predicted_cost
from jaxmllm.balance.stages.run_rows import (
    RunRows,
    capacities_to_try,
    examples_in_microbatches,
    pack_run,
)
from jaxmllm.config.schema import PipelineConfig
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.cuts import LayoutName, partition
from sharding.pipeline.graph import Pool, Slots
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.table_spec import TableSpec


@dataclass(frozen=True)
class Choice:
    """What is tried, and what sizes aim at."""

    # Of the slots of an average microbatch's rows, where their number is given
    fill: float = 0.9
    per_stage: int = 4  # language microbatches in flight for each stage
    # Backwards of a component on a rank whose weight gradient waits: each needs much memory
    pending: int = 2
    # Of every chain: far more than any schedule has, while none is known yet
    ticks_per_row: int = 64

    # Capacities that hold a replica's mean load in so many rows, as a share of the most rows there
    # can be, and so much more of it, because batches differ
    row_shares: tuple[float, ...] = (1.0, 0.85, 0.7, 0.5, 0.3)
    rows_per_stage: int = 8  # of language, at most
    slacks: tuple[float, ...] = (1.04, 1.15)
    # Further classes of rows have the slots of the largest divided by these; each must gain some
    # hundredths, for it is more to compile.
    divisors: tuple[float, ...] = (1.25, 1.5, 1.8, 2.2, 2.7, 3.3, 4, 5.5, 8)
    class_worth: float = 0.97
    # Chunks of a component on each rank; more of them must gain a hundredth, for each tick takes
    # time besides its operations.
    chunks: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    encoder_chunks: tuple[int, ...] = (1, 2, 3)
    worth: float = 0.99
    rounds: int = 2

    # Samples that candidates are tried on, at least and at most, and their examples together; a
    # sample has so many of its replicas that the fewest samples have no more.
    samples: tuple[int, int] = (3, 6)
    examples: int = 3072


CHOICE: Final = Choice()


@dataclass(frozen=True)
class Cut:
    """How layers lie on the stages: `chunks` of components on each rank, of segments."""

    layout: LayoutName
    chunks: tuple[tuple[str, int], ...] = ()

    def with_chunks(self, name: str, count: int) -> Cut:
        return replace(self, chunks=tuple(sorted((dict(self.chunks) | {name: count}).items())))


@dataclass(frozen=True)
class Sampled:
    """Batches in rows, each in those that it may have, and the pipeline that they make, with slots and
    ticks that are more than enough."""

    spec: PlanSpec
    pipeline: PipelineSpec
    runs: list[list[RunRows]]

    @property
    def fitting(self) -> list[RunRows]:
        """The best of each batch whose microbatches read no more rows than there is room for."""
        most = self.pipeline.tables.rows_read
        fitting = [
            [
                run
                for run in of_batch
                if all(need <= room for need, room in zip(run.rows_read, most, strict=True))
            ]
            for of_batch in self.runs
        ]
        return [best_rows(of_batch, self.pipeline) for of_batch in fitting if of_batch]


Capacities = Mapping[str, tuple[int, ...]]  # of the rows of a phase by class, the largest first
# (capacities, spans), both by class, the largest first
Layers = Callable[[Capacities, Capacities], ChainLayers]
# (phase, its capacity, layers of a chunk) -> forwards of such chunks whose residuals a rank can keep
Keeps = Callable[[str, int, int], int]


def keeps_none(phase: str, capacity: int, layers: int) -> int:
    """Where nothing is known of memory."""
    return 0


class Trials:
    """Some batches as a pipeline of any sizes would run them.

    Args:
      samples: global batches.
      phases: in the order of `make_phases`.
      layers: of all chains, for rows of some capacities.
      examples: of a batch.
      largest: examples that shall fit a run by themselves.
      keeps: what `kept_residuals: auto` comes to.
      widest: ranks that hold a row together, of phases that allow so many; else as many as they allow.
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
        self.microbatches = None if config.microbatches == "auto" else config.microbatches
        self._plans: dict[tuple[int, int], MicrobatchPlan] = {}
        self._runs: dict[tuple[tuple[int, ...], ...], list[list[RunRows]]] = {}

    def of_span(self, widest: int) -> Trials:
        """The same with rows that so many ranks hold together."""
        inputs = list(self.inputs.values())
        rest = self.config, self.layers, self.examples, self.largest, self.keeps, widest
        return Trials(self.samples, inputs, *rest)

    def with_some(self) -> Trials:
        """The same with fewer samples, of fewer replicas, on which candidates are tried."""
        ranks = self.inputs[LANGUAGE].ranks
        per_replica = ceil_divide(self.examples, ranks)
        fewest, most = CHOICE.samples
        replicas = min(ranks, max(1, CHOICE.examples // (fewest * per_replica)))
        most_span = max(self.spans_to_try)
        replicas = max(1, replicas // most_span) * most_span
        count = min(most, max(fewest, CHOICE.examples // (per_replica * replicas)))
        inputs = [replace(each, ranks=replicas) for each in self.inputs.values()]
        part = per_replica * replicas
        samples = [_first_examples(batch, part) for batch in self.samples[:count]]
        return Trials(samples, inputs, self.config, self.layers, part, keeps=self.keeps)

    # ------------------------------------------------------------------------ spans

    @property
    def spans_to_try(self) -> list[int]:
        """Ranks that may hold a row of some phase together, most first."""
        spans = {span for inputs in self.inputs.values() for span in inputs.spans}
        # Capacities that are given come with all spans that are.
        least = max(
            min(inputs.spans) if self.given(name) is None else max(inputs.spans)
            for name, inputs in self.inputs.items()
        )
        return sorted((span for span in spans if span >= least), reverse=True)

    def span(self, name: str) -> int:
        """Most ranks that hold a row of a phase together."""
        return max(span for span in self.inputs[name].spans if span <= self.widest)

    def spans(self, name: str) -> tuple[int, ...]:
        """Of each capacity of a phase, most first: all that are allowed where capacities are given."""
        if self.given(name) is None:
            return (self.span(name),)
        return tuple(sorted(self.inputs[name].spans, reverse=True))

    def classes(self, name: str, capacities: tuple[int, ...]) -> tuple[RowClass, ...]:
        """By capacity, the largest first, and span."""
        return tuple(
            RowClass(capacity, span) for capacity in capacities for span in self.spans(name)
        )

    # ------------------------------------------------------------------------ rows

    def spec(self, capacities: Capacities) -> PlanSpec:
        """Rows of these capacities."""
        return PlanSpec(
            {
                name: _phase_spec(
                    inputs, self.classes(name, capacities[name]), self.examples, self.span(name)
                )
                for name, inputs in self.inputs.items()
            },
            {},
        )

    def given(self, name: str) -> tuple[int, ...] | None:
        """The capacities that the config gives a phase; none: they are to be chosen."""
        inputs = self.inputs[name]
        if inputs.config.capacities == "auto":
            return None
        return checked_capacities(inputs.config.capacities, inputs, max(inputs.spans))

    def capacity(self, name: str, rows: float, slack: float) -> int:
        """The capacity with which so many rows hold `slack` times a replica's mean load, if they
        hold the longest item."""
        inputs = self.inputs[name]
        ideal = round_up(int(self.load(name) * slack / rows), inputs.alignment)
        return max(self.least(name), min(inputs.largest_capacity, ideal))

    def least(self, name: str) -> int:
        """The capacity of a rank with which rows hold the longest item and no more."""
        inputs = self.inputs[name]
        return round_up(max(ceil_divide(inputs.longest, self.span(name)), 1), inputs.alignment)

    def candidates(self, name: str, microbatches: int) -> list[int]:
        """Capacities to try, ascending: few rows of a replica, or as many as the longest item
        allows; about as many rows as there are microbatches, and twice or half as many."""
        most = max(1, self.load(name) // self.least(name))
        if name == LANGUAGE:
            most = min(most, CHOICE.rows_per_stage * self.config.stages)
            counts = [most + 1]
        else:
            counts = [microbatches // 2, microbatches, 2 * microbatches, most + 1]
        counts += [round(most * share) for share in CHOICE.row_shares]
        tried = {
            self.capacity(name, count, slack)
            for count in counts
            if 1 <= count <= most + 1
            for slack in CHOICE.slacks
        }
        return sorted(tried)

    def further(self, name: str, capacities: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The same with one more class, to try, and the largest rows such that they just hold the
        longest item."""
        largest = self.least(name)
        alignment = self.inputs[name].alignment
        shares = {round_up(int(largest / divisor), alignment) for divisor in CHOICE.divisors}
        return [
            tuple(sorted({largest, *capacities[1:], share}, reverse=True))
            for share in sorted(shares - {largest, *capacities[1:]})
        ]

    def load(self, name: str) -> int:
        """Slots of a phase of a replica, in the mean of the samples."""
        loads = [int(batch.phases[name].length.sum()) for batch in self.samples]
        return sum(loads) // max(1, len(loads) * self.inputs[name].ranks)

    # ------------------------------------------------------------------------ stages

    def sampled(self, capacities: Capacities, cut: Cut) -> Sampled:
        """The samples in rows of these capacities, on stages cut like that.

        Raises:
          PipelineError: more stages or chunks than layers.
        """
        spec = self.spec(capacities)
        runs = self.runs(capacities)
        of_samples = [run for of_batch in runs for run in of_batch]
        alone = _alone(self.largest, spec)
        rows_read = _rows_read(of_samples, alone, len(self.encoders), self.config)
        rows = {
            name: _most_rows([*of_samples, *alone], name, len(phase.classes))
            for name, phase in spec.phases.items()
        }
        # One microbatch may read as many rows as that, so a run has them.
        for name, fewest in zip(self.encoders, rows_read, strict=True):
            rows[name] = tuple(max(count, fewest) for count in rows[name])
        # All language rows of a step may be of one class, and they hold integers alone.
        load = with_head_room(self.load(LANGUAGE), 1)
        rows[LANGUAGE] = tuple(
            max(*rows[LANGUAGE], ceil_divide(load, capacity))
            for capacity in spec.phases[LANGUAGE].capacities
        )
        layers = self.layers(
            {name: phase.capacities for name, phase in spec.phases.items()},
            {name: phase.spans for name, phase in spec.phases.items()},
        )
        ring = _ring(layers, [of_batch[0] for of_batch in runs], self.config.stages, cut)
        costs = layers.costs(ring)
        ticks = len(ring.chains) * sum(map(sum, rows.values())) * CHOICE.ticks_per_row
        # Until a schedule is chosen
        schedule = "greedy" if self.config.schedule == "auto" else self.config.schedule
        config = self.config.model_copy(update={"layout": cut.layout, "schedule": schedule})
        slots = _slot_budget(ring, costs, rows_read, config, rows, self.keeps)
        classes = tuple(len(spec.phases[chain.name].classes) for chain in ring.chains)
        tables = TableSpec(ring, slots, ticks, rows_read, classes)
        pipeline = PipelineSpec(config, tables, rows, costs, self.microbatches, self.examples)
        return Sampled(spec, pipeline, runs)

    def with_schedule(self, sampled: Sampled, schedule: str, split: bool) -> PipelineSpec:
        """The pipeline with a schedule of this name, and its backward pass split or whole."""
        pipeline = sampled.pipeline
        config = pipeline.config.model_copy(update={"schedule": schedule, "split_backward": split})
        tables = pipeline.tables
        slots = _slot_budget(
            tables.ring, pipeline.costs, tables.rows_read, config, pipeline.rows, self.keeps
        )
        return replace(pipeline, config=config, tables=replace(tables, slots=slots))

    def predicted(self, capacities: Capacities, cut: Cut, bound: float = math.inf) -> int | None:
        """FLOPs of the steps of all samples, tick by tick those of the slowest rank; none where no
        schedule can be kept, or where they are no fewer than a bound."""
        try:
            sampled = self.sampled(capacities, cut)
        except PipelineError:
            return None
        # The ranks' own work is cheap to know, and most candidates end here.
        graphs = [[graph_of(run, sampled.pipeline) for run in runs] for runs in sampled.runs]
        if sum(min(int(graph.rank_work.max()) for graph in each) for each in graphs) >= bound:
            return None
        total: float = 0
        for of_batch in graphs:
            least = math.inf
            for graph in of_batch:
                least = min(least, predicted_cost(graph, sampled.pipeline, least))
            total += least
        return None if total == math.inf else int(total)

    def runs(self, capacities: Capacities) -> list[list[RunRows]]:
        """The samples in rows of these capacities, each in those that it may have."""
        key = tuple(tuple(capacities[name]) for name in self.inputs)
        if key not in self._runs:
            spec = self.spec(capacities)
            self._runs[key] = [
                [
                    self._packed_sample(number, capacity, spec)
                    for capacity in capacities_to_try(np.arange(len(batch.examples)), batch, spec)
                ]
                for number, batch in enumerate(self.samples)
            ]
        return self._runs[key]

    def _packed_sample(self, number: int, capacity: int, spec: PlanSpec) -> RunRows:
        """Which examples run together depends on language rows alone, and takes most of the time."""
        batch = self.samples[number]
        request = (np.arange(len(batch.examples)), batch, spec, self.microbatches or 1)
        deferral = self.config.deferral
        if (number, capacity) not in self._plans:
            plan = examples_in_microbatches(*request, deferral, capacity)
            self._plans[number, capacity] = plan
        return pack_run(*request, deferral, plan=self._plans[number, capacity])


# ---------------------------------------------------------------------------- the search


def choose_sampled(trials: Trials) -> tuple[Trials, Sampled]:
    """The samples in rows and stages of least predicted step time. Rows of most ranks are tried first,
    then those of fewer as long as they cost less.

    Raises:
      PipelineError: more stages than layers.
    """
    some = trials.with_some()
    best: _Best | None = None
    for span in some.spans_to_try:
        found = _choose_rows_and_cut(some.of_span(span), best)
        if best is not None and found.cost_or_infinite >= best.cost_or_infinite:
            break
        best = found
    assert best is not None
    chosen = trials.of_span(best.trials.widest)
    return chosen, chosen.sampled(best.capacities, best.cut)


def _choose_rows_and_cut(tried: Trials, similar: _Best | None = None) -> _Best:
    """Capacities and stages of least predicted step time with rows of one span. Where the number of
    microbatches is given, an average one fills a row of every phase.

    Args:
      similar: those of another span, from which the search goes on in one round.

    Raises:
      PipelineError: more stages than layers.
    """
    first = _first_capacities(tried)
    rounds = CHOICE.rounds
    if similar is not None and tried.microbatches is None:
        first = {
            name: tried.given(name) or (max(tried.least(name), largest),)
            for name, (largest, *_) in similar.capacities.items()
        }
        rounds = 1
    best = _Best(tried, first, _first_cut(tried) if similar is None else similar.cut)
    to_choose = [] if tried.microbatches else [LANGUAGE, *tried.encoders]
    to_choose = [name for name in to_choose if tried.given(name) is None]
    if similar is None:
        best.choose_cut()
    for _ in range(rounds if to_choose else 0):
        before = best.cost
        for name in to_choose:
            best.choose_capacity(name)
        best.choose_cut()
        if best.cost == before:
            break
    return best


def _first_capacities(trials: Trials) -> dict[str, tuple[int, ...]]:
    """Rows that an average microbatch fills, of as many microbatches as the config says or the
    longest example allows."""
    microbatches = trials.microbatches
    if microbatches is None:
        most = CHOICE.per_stage * trials.config.stages
        (*_, language) = trials.given(LANGUAGE) or (
            trials.capacity(LANGUAGE, most, 1 / CHOICE.fill),
        )
        microbatches = max(1, ceil_divide(trials.load(LANGUAGE), language))
    return {
        name: trials.given(name) or (trials.capacity(name, microbatches, 1 / CHOICE.fill),)
        for name in trials.inputs
    }


def _first_cut(trials: Trials) -> Cut:
    layout = trials.config.layout
    return Cut("segments" if layout == "auto" else layout)


class _Best:
    """The best sizes so far."""

    def __init__(self, trials: Trials, capacities: dict[str, tuple[int, ...]], cut: Cut):
        self.trials = trials
        self.capacities = capacities
        self.cut = cut
        self.cost = trials.predicted(capacities, cut)

    @property
    def cost_or_infinite(self) -> float:
        return math.inf if self.cost is None else self.cost

    def choose_capacity(self, name: str) -> None:
        """Rows of one class, and of one more as long as that gains enough."""
        rows = max(
            (run.phases[LANGUAGE].count for run, *_ in self.trials.runs(self.capacities)), default=1
        )
        if len(self.capacities[name]) == 1:
            for capacity in self.trials.candidates(name, rows):
                self._try(self.capacities | {name: (capacity,)}, self.cut)
        for count in range(1, self.trials.inputs[name].row_classes):
            worth = CHOICE.class_worth if len(self.capacities[name]) == count else 1.0
            for capacities in self.trials.further(name, self.capacities[name][:count]):
                if self._try(self.capacities | {name: capacities}, self.cut, worth):
                    worth = 1.0
            if len(self.capacities[name]) == count:
                break

    def choose_cut(self) -> None:
        """Layouts, then chunks of every component, each in turn."""
        config = self.trials.config
        if config.layout == "auto":
            for layout in ("chain", "parallel", "segments"):
                self._try(self.capacities, Cut(layout))
        if self.cut.layout != "segments":
            return
        for name in (LANGUAGE, *self.trials.encoders):
            for count in CHOICE.chunks if name == LANGUAGE else CHOICE.encoder_chunks:
                self._try(self.capacities, self.cut.with_chunks(name, count), CHOICE.worth)

    def _try(self, capacities: dict[str, tuple[int, ...]], cut: Cut, worth: float = 1.0) -> bool:
        """Whether these cost less, and are the best now."""
        if (capacities, cut) == (self.capacities, self.cut):
            return False
        bound = worth * self.cost_or_infinite
        cost = self.trials.predicted(capacities, cut, bound)
        if cost is not None and cost < bound:
            self.capacities, self.cut, self.cost = capacities, cut, cost
            return True
        return False


# ---------------------------------------------------------------------------- rows


def _first_examples(batch: BatchItems, count: int) -> BatchItems:
    """The first examples of a batch."""
    phases = {
        name: items.at(np.flatnonzero(items.example < count))
        for name, items in batch.phases.items()
    }
    return BatchItems(batch.examples[:count], batch.targets, phases)


def _phase_spec(
    inputs: SizingInputs, classes: tuple[RowClass, ...], examples: int, widest: int
) -> PhaseSpec:
    config = inputs.config
    # The ranks that share rows get their share of the examples, so a row never has more of them.
    of_group = ceil_divide(examples, inputs.ranks // widest)
    segments = of_group if config.max_segments == "auto" else config.max_segments
    return phase_spec(inputs, classes, max(segments, of_group))


def _alone(largest: Sequence[BatchItems], spec: PlanSpec) -> list[RunRows]:
    """Every one of these examples in a run by itself."""
    return [
        pack_run(np.array([number]), batch, spec, microbatches=1, deferral=False)
        for batch in largest
        for number in range(len(batch.examples))
    ]


def _most_rows(runs: Sequence[RunRows], name: str, classes: int) -> tuple[int, ...]:
    """Rows of each class of a phase that hold each of these runs, with some to spare; as many of a
    class as of larger ones, which become some of it where less lies in them."""
    counts = [np.cumsum(run.phases[name].counts(classes)) for run in runs]
    most = np.max([np.ones(classes, np.int64), *counts], axis=0).tolist()
    return tuple(with_head_room(count, 1) for count in most)


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


def _ring(layers: ChainLayers, sampled: Sequence[RunRows], stages: int, cut: Cut) -> Ring:
    """Stages for the average row of every phase."""
    squares = {}
    count = {}
    slots = {}
    for name, capacities in layers.capacities.items():
        rows = [run.phases[name] for run in sampled]
        count[name] = sum(phase_rows.count for phase_rows in rows)
        sums = np.array([phase_rows.squares.sum(axis=1) for phase_rows in rows]).sum(axis=0)
        squares[name] = (sums // max(count[name], 1)).tolist()
        of_rows = sum(int(np.array(capacities)[each.row_class].sum()) for each in rows)
        slots[name] = of_rows // count[name] if count[name] else capacities[0]
    rows_per_microbatch = {name: count[name] / max(count[LANGUAGE], 1) for name in count}
    chunks = dict(cut.chunks) if cut.layout == "segments" else None
    of_layers = layers.layers(squares, slots)
    return partition(of_layers, stages, cut.layout, rows_per_microbatch, chunks=chunks)


# ---------------------------------------------------------------------------- slots


def _slot_budget(
    ring: Ring,
    costs: Mapping[str, ChainCosts],
    rows_read: Sequence[int],
    config: PipelineConfig,
    rows: Mapping[str, tuple[int, ...]],
    keeps: Keeps,
) -> Slots:
    """The most slots of every pool: those of `pipeline.microbatches_in_flight` microbatches with
    all that they read."""
    in_flight = config.microbatches_in_flight
    if in_flight == "auto":
        all_at_once = scheduler_of(config.schedule).all_in_flight
        in_flight = sum(rows[LANGUAGE]) if all_at_once else CHOICE.per_stage * config.stages
    slots: Slots = {}
    for number, chain in enumerate(ring.chains):
        encoder = number < len(rows_read)
        rows_in_flight = in_flight * (rows_read[number] if encoder else 1)
        if chain.depth > 1 or chain.head_only:
            slots[Pool.INPUT, number] = rows_in_flight * chain.chunks_per_rank
        if encoder:
            slots[Pool.TOKENS, number] = rows_in_flight
        goes_back = bool(costs[chain.name].linear[:, 1:].any())
        if goes_back:
            slots |= _backward_slots(number, chain, rows_in_flight, encoder, config)
            most = rows_in_flight * chain.chunks_per_rank
            if config.kept_residuals == "auto":
                capacity = costs[chain.name].capacity
                kept = min(most, keeps(chain.name, capacity, max(chain.layers)))
            else:
                kept = config.kept_residuals
            if kept and not chain.head_only:  # there the features wait, and no residuals
                slots[Pool.RESIDUAL, number] = kept
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
    if config.split_backward is True:
        slots[Pool.PENDING, number] = CHOICE.pending
    return slots
