"""This host's share of one step: rows of fixed shape, filled as the plan says.

    StepPlan + BatchItems: the place of every item        (the same on every host)
        |
        v  only items that are placed on local ranks
    load media, render text --> rows[phase][microbatch] of arrays [q, C, ...], route tables [x, ...]

Letters: q local rows, x local exchange ranks, C row slots. The arrays of a row are described in
encoder_rows.py, language_rows.py and generator_rows.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.exchange.tables import route_tables
from jaxmllm.balance.records import BatchItems, PipelineRun, PlanSpec, RouteTables, StepPlan
from jaxmllm.balance.stages.plan import PipelineSpec, plan_pipeline
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.data.media.generated import Generated
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.rows.batch import Batch
from jaxmllm.data.rows.draws import DrawRule, StepDraws
from jaxmllm.data.rows.encoder_rows import encoder_rows
from jaxmllm.data.rows.generator_rows import generator_rows
from jaxmllm.data.rows.language_rows import language_rows
from jaxmllm.data.rows.masks import AttentionSpec, Row
from jaxmllm.data.text.render import Rendered
from jaxmllm.phases import LANGUAGE

# Threads help because Pillow, soundfile and numpy release the interpreter lock.
DECODE_THREADS = min(4, os.cpu_count() or 1)


def _never_cancelled() -> bool:
    return False


class Examples(Protocol):
    """The part of a corpus that filling rows uses."""

    def example(self, i: int) -> Rendered: ...
    def source_of(self, i: int) -> int: ...
    def id(self, i: int) -> str: ...


class Lengths(Protocol):
    """The part of a corpus that planning uses."""

    def gather(self, examples: Longs) -> BatchItems: ...


class StepCorpus(Examples, Lengths, Protocol):
    """The part of a corpus that making steps uses."""

    @property
    def members(self) -> tuple[tuple[str, float, Longs], ...]: ...
    @property
    def modalities(self) -> Mapping[str, Modality]: ...


@dataclass(frozen=True)
class LocalRanks:
    """The ranks whose rows this host supplies, by phase, and its exchange ranks, by encoder or
    generator phase."""

    phases: dict[str, tuple[int, ...]]
    exchange: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HostStep:
    """This host's share of one step: numpy and plain values, so that a worker process can send it.

    `capacities`, `spans`, `pools` and `pool_offsets` have one entry per microbatch, as in
    `PhasePlan`. `rows` has one dict per microbatch, with the rows of the local ranks, or of the
    groups that have a local rank. The tables of `rounds` are those of the local exchange ranks.
    `failures` has one message for each item that did not decode on this host.
    """

    step: int
    examples: Longs  # [B]
    targets: int  # target tokens of the whole batch, over all hosts
    capacities: dict[str, tuple[int, ...]]
    spans: dict[str, tuple[int, ...]]
    pools: dict[str, tuple[int, ...]]
    pool_offsets: dict[str, tuple[int, ...]]
    rows: dict[str, list[Row]]
    rounds: dict[str, list[RouteTables]]
    failures: tuple[str, ...]
    statistics: dict[str, float]
    digest: str  # digest of the examples and the plan
    patches: int = 0  # patches to draw in the whole batch, over all hosts
    runs: tuple[PipelineRun, ...] = ()  # of a pipeline: ranges of the microbatches of `rows`


@dataclass(frozen=True)
class StepFiller:
    """(step, examples) -> HostStep: plans the whole batch, with a pipeline also its schedule, and
    fills the local rows."""

    corpus: StepCorpus
    spec: PlanSpec
    local: LocalRanks
    attention: AttentionSpec
    pipeline: PipelineSpec | None = None
    threads: int = DECODE_THREADS  # threads that load the media of one step
    draws: DrawRule | None = None  # random values of generated items, required if there are any

    def __call__(
        self, step: int, examples: Longs, cancelled: Callable[[], bool] = _never_cancelled
    ) -> HostStep:
        items = self.corpus.gather(examples)
        plan = (
            plan_pipeline(items, self.spec, self.pipeline)
            if self.pipeline
            else plan_step(items, self.spec)
        )
        return self.fill(step, examples, items, plan, cancelled)

    def fill(
        self,
        step: int,
        examples: Longs,
        items: BatchItems,
        plan: StepPlan,
        cancelled: Callable[[], bool] = _never_cancelled,
    ) -> HostStep:
        """Load and lay out the items that `plan` places on the local ranks.

        `examples` [B] are the example numbers whose lengths are `items`. A media item that does not
        load is counted and leaves zeros that are not valid; it changes no shape and no placement.
        Raises `MisalignmentError` when the data is not what the plan was made from, and
        `CancelledError` soon after `cancelled` returns True.
        """
        corpus = self.corpus
        phases = self.spec.phases
        batch = Batch(
            examples,
            items,
            # Every phase asks for its examples; each example is rendered once for all of them.
            functools.cache(corpus.example),
            corpus.source_of,
            corpus.modalities,
            cancelled,
        )
        rows, failures = self._media_rows(step, batch, plan)
        rows[LANGUAGE] = language_rows(
            batch,
            plan,
            self.local.phases[LANGUAGE],
            self.attention,
            phases[LANGUAGE].max_segments,
        )
        return HostStep(
            step=step,
            examples=np.asarray(examples, np.int64),
            targets=items.targets,
            patches=self._patch_total(items),
            capacities={phase: _plain(plan.phases[phase].capacity) for phase in phases},
            spans={phase: _plain(plan.phases[phase].span) for phase in phases},
            pools={phase: _plain(plan.phases[phase].pool) for phase in phases},
            pool_offsets={phase: _plain(plan.phases[phase].pool_offset) for phase in phases},
            rows=rows,
            rounds=self._local_route_tables(plan),
            failures=tuple(failures),
            statistics=dict(plan.statistics),
            digest=plan.digest(examples),
            runs=plan.runs,
        )

    def _patch_total(self, items: BatchItems) -> int:
        """Patches to draw in the whole batch."""
        total = 0
        for phase, modality in self.corpus.modalities.items():
            if modality.generated:
                # Linear in slots and conditions, so the count can be taken of sums over all items
                slots = int(items.phases[phase].real.sum())
                conditions = int(items.phases[phase].tokens.sum())
                total += cast(Generated, modality).patch_count(slots, conditions)
        return total

    def _local_route_tables(self, plan: StepPlan) -> dict[str, list[RouteTables]]:
        """The tables of every round for the local exchange ranks, by phase."""
        tables = {}
        for phase, route in self.spec.routes.items():
            ranks = self.local.exchange[phase]
            rounds = plan.routes[phase].rounds
            tables[phase] = [route_tables(round_, route, ranks) for round_ in rounds]
        return tables

    def _media_rows(
        self, step: int, batch: Batch, plan: StepPlan
    ) -> tuple[dict[str, list[Row]], list[str]]:
        """Rows of every encoder and generator phase, and messages of items that did not load."""
        rows: dict[str, list[Row]] = {}
        failures: list[str] = []
        for phase, modality in batch.modalities.items():
            of_phase = batch, phase, plan.phases[phase], self.local.phases[phase], self.attention
            if modality.generated:
                assert self.draws is not None, f"nothing says what is random of {phase}"
                max_segments = self.spec.phases[phase].max_segments
                draws = StepDraws(self.draws, step, batch.examples, self.corpus.id)
                # A plan with `runs` has stages, where the states that items read arrive by a route.
                route = plan.routes[phase] if plan.runs else None
                rows[phase], messages = generator_rows(
                    *of_phase, max_segments, draws, self.threads, route
                )
            else:
                rows[phase], messages = encoder_rows(*of_phase, self.threads)
            failures += messages
        return rows, failures


def _plain(values: Ints) -> tuple[int, ...]:
    return tuple(values.tolist())
