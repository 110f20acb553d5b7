"""Fixed-shape rows from a plan: this host's share of one step.

    StepPlan + BatchItems: which item lies where          (the same on every host)
        |
        v  only what is placed on local ranks
    decode media, render text  -->  rows[phase][microbatch] of arrays [r, C, ...],  route tables [x, ...]

Letters: r local ranks, x local exchange ranks, C row capacity, F features of a slot, S segments of a row,
T language tokens of an encoder row.

Encoder rows hold
    features [r, C, F], segments int32 [r, C] (0: padding, also the padding inside an item), positions int32 [r, C, 2],
    valid bool [r, C / slots_per_token] (language token really computed), failed int32 [r] (items not decoded),
    places int32 [r, C / slots_per_token] (where its tokens are), tiles, and for towers that attend in windows
    windows int32 [r, C] and window_tiles (see masks.py).
Language rows hold
    tokens, targets int32 [r, C] (target -1: none), segments int32 [r, C], positions int32 [r, C, 3],
    media int32 [r, C] (slot of the language pool where this token's embedding arrives; -1: text),
    sources int32 [r, S] (source of segment s at s - 1; -1: none), groups int32 [r, C] (media seen in both directions),
    order int32 [r, C] (slot before the row was dealt to parts), tiles (see masks.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.exchange.tables import route_tables
from jaxmllm.balance.records import BatchItems, PhasePlan, PhaseSpec, PipelineRun, PlanSpec, RouteTables, StepPlan
from jaxmllm.balance.rows.long import is_long
from jaxmllm.balance.stages.plan import PipelineSpec, plan_pipeline
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import MediaError, MediaReference
from jaxmllm.data.printable import shown
from jaxmllm.data.rows.masks import AttentionSpec, Row, finish_encoder_row, finish_language_row
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat

DECODE_THREADS = min(4, os.cpu_count() or 1)  # pillow, soundfile and numpy let go of the interpreter lock

Array = NDArray[Any]


class MisalignmentError(ValueError):
    """What was loaded is not what the plan was made from; the message says both counts, in one line."""

    def __init__(self, message: str):
        super().__init__(shown(message))


def _never() -> bool:
    return False


class Span(Protocol):
    """One media item of an example: `tokens` language tokens from token `slot` of its sequence on."""

    @property
    def phase(self) -> str: ...
    @property
    def reference(self) -> MediaReference: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def slot(self) -> int: ...
    @property
    def tokens(self) -> int: ...


class Example(Protocol):
    """One rendered conversation of L tokens."""

    @property
    def tokens(self) -> Ints: ...  # [L]
    @property
    def targets(self) -> Ints: ...  # [L], -1: none
    @property
    def positions(self) -> Ints: ...  # [L, 3]
    @property
    def media(self) -> tuple[Span, ...]: ...


class Examples(Protocol):
    """What filling asks of a corpus."""

    def example(self, i: int) -> Example: ...
    def source_of(self, i: int) -> int: ...


class Lengths(Protocol):
    """What planning asks of a corpus."""

    def gather(self, examples: Longs) -> BatchItems: ...


class Corpus(Examples, Lengths, Protocol):
    """What the pipeline asks of a corpus."""

    @property
    def members(self) -> tuple[tuple[str, float, Longs], ...]: ...
    @property
    def modalities(self) -> Mapping[str, Modality]: ...


@dataclass(frozen=True)
class LocalRanks:
    """The ranks whose rows this host supplies, by phase, and its exchange ranks, by encoder phase."""

    phases: dict[str, tuple[int, ...]]
    exchange: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HostStep:
    """This host's share of one step: numpy and plain values, so that a worker process can send it.

    `capacities`, `pools` and `pool_offsets` have one entry per microbatch, as in `PhasePlan`, and `rows` one dict per
    microbatch, long ones whole on every host; `media_ranks` has the rank where the media of a long language row
    arrive, and -1 for the others. The tables of `rounds` are those of the local exchange ranks. `failures` has one
    message for each item that did not decode on this host.
    """

    step: int
    examples: Longs  # [B]
    targets: int  # target tokens of the whole batch, over all hosts
    capacities: dict[str, tuple[int, ...]]
    pools: dict[str, tuple[int, ...]]
    pool_offsets: dict[str, tuple[int, ...]]
    rows: dict[str, list[Row]]
    media_ranks: tuple[int, ...]
    rounds: dict[str, list[RouteTables]]
    failures: tuple[str, ...]
    statistics: dict[str, float]
    digest: str  # of the examples and the plan
    runs: tuple[PipelineRun, ...] = ()  # of a pipeline, whose microbatches are parts of `rows`


def fill(
    step: int,
    examples: Longs,
    items: BatchItems,
    plan: StepPlan,
    spec: PlanSpec,
    corpus: Examples,
    modalities: Mapping[str, Modality],
    local: LocalRanks,
    attention: AttentionSpec,
    threads: int = DECODE_THREADS,
    cancelled: Callable[[], bool] = _never,
) -> HostStep:
    """Decode and lay out what `plan` places on the local ranks.

    `examples` [B] are the numbers behind `items`; `modalities` go by phase. A media item that does not decode leaves
    zeros that are not valid and is counted; it changes no shape and no placement. Raises `MisalignmentError` when the
    data is not what the plan was made from, and `CancelledError` soon after `cancelled` returns True.
    """
    batch = _Batch(examples, items, functools.cache(corpus.example), modalities, cancelled)
    rows: dict[str, list[Row]] = {}
    failures: list[str] = []
    for phase in modalities:
        rows[phase], messages = _encoder_rows(batch, phase, plan.phases[phase], local.phases[phase], attention, threads)
        failures += messages
    rows[LANGUAGE] = _language_rows(
        batch, plan, local.phases[LANGUAGE], attention, spec.phases[LANGUAGE], corpus.source_of
    )
    media_ranks = np.full(plan.phases[LANGUAGE].microbatches, -1)
    long = is_long(spec.phases[LANGUAGE], items.phases[LANGUAGE].length)
    media_ranks[plan.phases[LANGUAGE].microbatch[long]] = plan.phases[LANGUAGE].rank[long]
    return HostStep(
        step=step,
        examples=np.asarray(examples, np.int64),
        targets=items.targets,
        capacities={phase: _plain(plan.phases[phase].capacity) for phase in spec.phases},
        pools={phase: _plain(plan.phases[phase].pool) for phase in spec.phases},
        pool_offsets={phase: _plain(plan.phases[phase].pool_offset) for phase in spec.phases},
        rows=rows,
        media_ranks=_plain(media_ranks),
        rounds={
            phase: [route_tables(round_, route, local.exchange[phase]) for round_ in plan.routes[phase].rounds]
            for phase, route in spec.routes.items()
        },
        failures=tuple(failures),
        statistics=dict(plan.statistics),
        digest=plan.digest(examples),
        runs=plan.runs,
    )


@dataclass(frozen=True)
class StepFiller:
    """(step, examples) -> HostStep: plan the whole batch, with a pipeline also its schedule; fill the local rows."""

    corpus: Corpus
    spec: PlanSpec
    local: LocalRanks
    attention: AttentionSpec
    pipeline: PipelineSpec | None = None
    threads: int = DECODE_THREADS  # that decode the media of one step

    def __call__(self, step: int, examples: Longs, cancelled: Callable[[], bool] = _never) -> HostStep:
        items = self.corpus.gather(examples)
        plan = plan_pipeline(items, self.spec, self.pipeline) if self.pipeline else plan_step(items, self.spec)
        where = (self.corpus, self.corpus.modalities, self.local, self.attention)
        return fill(step, examples, items, plan, self.spec, *where, self.threads, cancelled)


@dataclass(frozen=True)
class _Batch:
    examples: Longs
    items: BatchItems
    render: Callable[[int], Example]
    modalities: Mapping[str, Modality]
    cancelled: Callable[[], bool]

    def example(self, index: int) -> Example:
        if self.cancelled():
            raise CancelledError
        return self.render(int(self.examples[index]))

    def media(self, phase: str, index: int) -> Iterator[tuple[int, Span]]:
        """Item number and span of each media item of the `index`-th example of the batch."""
        items, number = self.items.phases[phase], int(self.examples[index])
        start, stop = (int(n) for n in np.searchsorted(items.example, [index, index + 1]))
        spans = [span for span in self.example(index).media if span.phase == phase]
        if len(spans) != stop - start:
            raise MisalignmentError(
                f"example {number} has {len(spans)} {phase} items, but the plan was made for {stop - start}: {_REBUILD}"
            )
        for item, span in zip(range(start, stop), spans, strict=True):
            found = (self.modalities[phase].length(span.shape), span.tokens, span.slot)
            planned = (int(items.length[item]), int(items.tokens[item]), int(items.slot[item]))
            if found != planned:
                raise MisalignmentError(
                    f"{span.reference} of example {number} has (slots, tokens, first token) {found}, "
                    f"but the plan was made for {planned}: {_REBUILD}"
                )
            yield item, span


_REBUILD = "the data changed after its length index was built; delete the index (data.index_cache) and start again"


def _encoder_rows(
    batch: _Batch, phase: str, plan: PhasePlan, ranks: tuple[int, ...], attention: AttentionSpec, threads: int
) -> tuple[list[Row], list[str]]:
    """Rows of every microbatch, and a message for each item that did not decode."""
    modality = batch.modalities[phase]
    row_format = modality.format
    items = batch.items.phases[phase]
    for name, slots in (("capacity", plan.capacity), ("offset", plan.offset)):
        for value in slots[slots % row_format.slots_per_token != 0][:1]:
            raise MisalignmentError(
                f"a {phase} row has {name} {value}, which cuts a language token of {row_format.slots_per_token} slots; "
                f"make phases.{phase}.capacities multiples of it"
            )
    rows = [_encoder_row(len(ranks), int(capacity), row_format) for capacity in plan.capacity]
    mine = np.flatnonzero(np.isin(plan.rank, ranks))
    spans = {
        item: span for index in np.unique(items.example[mine]).tolist() for item, span in batch.media(phase, index)
    }

    def place(item: int) -> str | None:
        if batch.cancelled():
            raise CancelledError
        # Items own disjoint slots, so threads may write into one row; only `failed` is shared, and counted below.
        span, row = spans[item], rows[plan.microbatch[item]]
        rank, slots = _slots(phase, item, plan, ranks, int(items.length[item]))
        row["segments"][rank, slots] = np.where(modality.real_slots(span.shape), plan.segment[item], 0)
        row["positions"][rank, slots] = modality.positions(span.shape)
        try:
            features = modality.load(span.reference, span.shape)
        except MediaError as error:
            return str(error)
        expected = (slots.stop - slots.start, row_format.features)
        if features.shape != expected:
            raise MisalignmentError(
                f"{span.reference} was loaded as {features.shape}, but the plan has room for {expected}"
            )
        if features.dtype.kind == "f" and not np.isfinite(features).all():
            return shown(f"{span.reference} was loaded as numbers that are not finite; leave it out, or write it again")
        np.copyto(row["features"][rank, slots], features, casting="same_kind")
        first = slots.start // row_format.slots_per_token
        row["valid"][rank, first : first + int(items.tokens[item])] = True
        return None

    with ThreadPoolExecutor(max(1, threads)) as pool:
        results = list(pool.map(place, mine.tolist()))
    failed = [(item, message) for item, message in zip(mine.tolist(), results, strict=True) if message is not None]
    for item, _ in failed:
        rows[plan.microbatch[item]]["failed"][ranks.index(int(plan.rank[item]))] += 1
    for row in rows:
        finish_encoder_row(
            row,
            *attention.of(phase),
            stride=row_format.stride,
            slots_per_token=row_format.slots_per_token,
            window=attention.windows.get(phase),
        )
    return rows, [message for _, message in failed]


def _encoder_row(ranks: int, capacity: int, row_format: RowFormat) -> Row:
    return {
        "features": np.zeros((ranks, capacity, row_format.features), row_format.dtype),
        "segments": np.zeros((ranks, capacity), np.int32),
        "positions": np.zeros((ranks, capacity, 2), np.int32),
        "valid": np.zeros((ranks, capacity // row_format.slots_per_token), np.bool_),
        "failed": np.zeros(ranks, np.int32),
    }


def _language_rows(
    batch: _Batch,
    plan: StepPlan,
    ranks: tuple[int, ...],
    attention: AttentionSpec,
    spec: PhaseSpec,
    source_of: Callable[[int], int],
) -> list[Row]:
    phase, items = plan.phases[LANGUAGE], batch.items.phases[LANGUAGE]
    shared = phase.capacity > spec.capacities[0]  # one long row for all ranks
    rows = [
        _language_row(1 if long else len(ranks), int(capacity), spec.max_segments)
        for capacity, long in zip(phase.capacity, shared, strict=True)
    ]
    for item in np.flatnonzero(np.isin(phase.rank, ranks) | shared[phase.microbatch]).tolist():
        index, row = int(items.example[item]), rows[phase.microbatch[item]]
        number, example = int(batch.examples[index]), batch.example(index)
        if len(example.tokens) != items.length[item]:
            raise MisalignmentError(
                f"example {number} has {len(example.tokens)} tokens, but the plan was made for {items.length[item]}: "
                f"{_REBUILD}"
            )
        here = (int(phase.rank[item]),) if shared[phase.microbatch[item]] else ranks
        rank, slots = _slots(LANGUAGE, item, phase, here, len(example.tokens))
        row["tokens"][rank, slots] = example.tokens
        row["targets"][rank, slots] = example.targets
        row["positions"][rank, slots] = example.positions
        row["segments"][rank, slots] = phase.segment[item]
        row["sources"][rank, phase.segment[item] - 1] = source_of(number)
        for encoder, route in plan.routes.items():
            for media, span in batch.media(encoder, index):
                first = slots.start + span.slot
                row["media"][rank, first : first + span.tokens] = route.arrival[media] + np.arange(span.tokens)
                if encoder in attention.bidirectional:
                    row["groups"][rank, first : first + span.tokens] = first + 1  # unlike any other of the row
    block, parts = attention.of(LANGUAGE)
    for row, long in zip(rows, shared, strict=True):
        finish_language_row(row, block, parts * spec.ranks if long else parts)
    return rows


def _language_row(ranks: int, capacity: int, max_segments: int) -> Row:
    return {
        "tokens": np.zeros((ranks, capacity), np.int32),
        "targets": np.full((ranks, capacity), -1, np.int32),
        "segments": np.zeros((ranks, capacity), np.int32),
        "positions": np.zeros((ranks, capacity, 3), np.int32),
        "media": np.full((ranks, capacity), -1, np.int32),
        "groups": np.zeros((ranks, capacity), np.int32),
        "sources": np.full((ranks, max_segments), -1, np.int32),
    }


def _slots(phase: str, item: int, plan: PhasePlan, ranks: tuple[int, ...], length: int) -> tuple[int, slice]:
    """Where an item goes: local number of its rank, and its slots in that row."""
    start, capacity = int(plan.offset[item]), int(plan.capacity[plan.microbatch[item]])
    if start + length > capacity:  # a slice would be cut silently
        raise MisalignmentError(
            f"{phase} item {item} ends at slot {start + length} of a row of {capacity}: the plan does not fit its items"
        )
    return ranks.index(int(plan.rank[item])), slice(start, start + length)


def _plain(values: Ints) -> tuple[int, ...]:
    return tuple(values.tolist())
