"""Rows of the data loader against a slow reference that asks, slot by slot, which item the plan put
there.

Corpus, modalities and plans are small fakes. Every number in a row tells the item and the slot that
it came from, so one value in a wrong place fails a comparison."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxmllm.arrays import round_up
from jaxmllm.attention.mask import causal_ids, item_ids
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.exchange.tables import route_tables
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhaseItems,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    RoutePlan,
    RouteRound,
    RouteSpec,
    StepPlan,
    row_classes,
)
from jaxmllm.data.media.reference import File, MediaError
from jaxmllm.data.rows.batch import MisalignmentError
from jaxmllm.data.rows.fill import HostStep, LocalRanks, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.data.text.render import MediaSpan, Rendered
from jaxmllm.phases import decoder_phase, encoder_phase
from jaxmllm.row_format import RowFormat
from tests.attention.masks import tile_map

RANKS = {"vision": 4, "audio": 3, "language": 2}
CAPACITIES = {"vision": 32, "audio": 48, "language": 64}
ATTENTION = AttentionSpec({"vision": 8, "audio": 4, "language": 16}, bidirectional=("vision",))
SEGMENTS = 24


@dataclass(frozen=True)
class FakeModality:
    """A modality whose items have shape (real slots, number, 1). Slot s of item k holds k + s / 64,
    twice."""

    name: str
    format: RowFormat
    generated = False

    def length(self, shape):
        return round_up(shape[0], self.format.slots_per_token)

    def load(self, media, shape):
        if "broken" in media.path.name:
            raise MediaError("decode", f"{media}: broken body")
        slots = np.arange(self.length(shape))
        values = np.where(self.real_slots(shape), shape[1] + slots / 64, 0)
        return np.stack([values, values], 1).astype(self.format.dtype)[
            : -1 if "short" in media.path.name else None
        ]

    def positions(self, shape):
        axes = (
            np.arange(self.length(shape)),
            np.full(self.length(shape), shape[1]),
            np.full(self.length(shape), 99),
        )
        return np.stack(axes, 1).astype(np.int32)

    def apart(self, shape):
        return None

    def real_slots(self, shape):
        return np.arange(self.length(shape)) < shape[0]


@dataclass(frozen=True)
class Recording(FakeModality):
    """A fake modality that notes which items are loaded."""

    loaded: list[str] = dataclasses.field(default_factory=list)

    def load(self, media, shape):
        self.loaded.append(str(media))
        return super().load(media, shape)


def row_format(slots_per_token, stride):
    return RowFormat(
        2, np.dtype(np.float32), slots_per_token, stride, alignment=slots_per_token, axes=(0, 1)
    )


MODALITIES = {
    "vision": FakeModality("vision", row_format(4, 1)),
    "audio": FakeModality("audio", row_format(8, 4)),
}


@dataclass(frozen=True)
class FakeCorpus:
    """A corpus of examples by number, each of source i % 5."""

    examples: dict[int, Rendered]
    modalities: Mapping[str, FakeModality] = dataclasses.field(default_factory=lambda: MODALITIES)

    def example(self, i):
        return self.examples[i]

    def source_of(self, i):
        return i % 5


def make_example(number: int, rng: np.random.Generator, broken: bool) -> Rendered:
    """An example with up to three media items of random sizes, at random places in its text."""
    media = []
    slot = int(rng.integers(1, 4))
    for k in range(rng.integers(0, 4)):
        phase = ("vision", "audio")[rng.integers(2)]
        shape = (int(rng.integers(1, 25)), number * 8 + k + 1, 1)
        tokens = -(-shape[0] // MODALITIES[phase].format.slots_per_token)
        name = f"{number}-{k}-{'broken' if broken and rng.random() < 0.5 else 'whole'}"
        media.append(MediaSpan(phase, File(Path(name)), shape, slot, tokens))
        slot += tokens + int(rng.integers(0, 3))
    length = slot + int(rng.integers(1, 6))
    targets = np.where(rng.random(length) < 0.5, rng.integers(0, 99, length), -1)
    return Rendered(
        rng.integers(1, 99, length),
        targets,
        rng.integers(0, 99, (length, 3)).astype(np.int32),
        tuple(media),
    )


def gather(corpus: FakeCorpus, examples: np.ndarray) -> BatchItems:
    """What the planner knows about a batch: lengths, work, examples, tokens and slots of all items,
    by phase."""
    records: dict[str, list[tuple[int, ...]]] = {"vision": [], "audio": [], "language": []}
    for index, example_id in enumerate(examples.tolist()):
        example = corpus.example(example_id)
        records["language"].append(
            (len(example.tokens), len(example.tokens), index, len(example.tokens), 0)
        )
        for span in example.media:
            length = MODALITIES[span.phase].length(span.shape)
            records[span.phase].append((length, span.shape[0], index, span.tokens, span.slot))
    phases = {}
    for phase, phase_records in records.items():
        table = np.array(phase_records, np.int64).reshape(-1, 5)
        phases[phase] = PhaseItems(
            table[:, 0], table[:, 1], *(table[:, i].astype(np.int32) for i in (2, 3, 4))
        )
    return BatchItems(
        examples,
        sum(int((corpus.example(i).targets >= 0).sum()) for i in examples.tolist()),
        phases,
    )


def scatter(
    lengths: np.ndarray,
    ranks: int,
    capacity: int,
    alignment: int,
    rng: np.random.Generator,
    spans: tuple[int, ...] = (1,),
) -> PhasePlan:
    """A random legal plan: items in random order, first-fit into rows with random gaps.

    Any legal plan will do, because rows must follow whatever the plan says. Whole rows have
    `capacity` slots. Microbatches take the spans in turn."""
    used_slots: list[list[int]] = []  # [microbatch][group]
    segment_counts: list[list[int]] = []
    placements = np.zeros((len(lengths), 4), np.int32)
    row_spans: list[int] = []
    for item in rng.permutation(len(lengths)):
        gap = int(rng.integers(0, 2)) * alignment
        open_rows = [(m, r) for m, groups in enumerate(used_slots) for r in range(len(groups))]
        fitting_rows = [
            (m, r) for m, r in open_rows if used_slots[m][r] + gap + lengths[item] <= capacity
        ]
        if not fitting_rows:
            row_spans.append(spans[len(row_spans) % len(spans)])
            groups = ranks // row_spans[-1]
            used_slots.append([0] * groups)
            segment_counts.append([0] * groups)
            fitting_rows = [(len(used_slots) - 1, int(rng.integers(groups)))]
            gap = 0
        m, r = fitting_rows[0]
        segment_counts[m][r] += 1
        placements[item] = m, r * row_spans[m], used_slots[m][r] + gap, segment_counts[m][r]
        used_slots[m][r] += gap + int(lengths[item])
    zeros = np.zeros(len(used_slots), np.int32)
    span_array = np.array(row_spans, np.int32)
    return PhasePlan(
        (capacity // np.maximum(span_array, 1)).astype(np.int32),
        span_array,
        zeros,
        np.arange(len(used_slots), dtype=np.int32),
        *placements.T,
    )


def make_plan(
    items: BatchItems,
    rng: np.random.Generator,
    ranks=RANKS,
    capacities=CAPACITIES,
    spans: tuple[int, ...] = (1,),
) -> StepPlan:
    """A legal step plan: random rows for each phase, and routes whose tokens arrive in order of
    media."""
    alignments = {
        "language": 1,
        **{name: modality.format.slots_per_token for name, modality in MODALITIES.items()},
    }
    phases = {
        phase: scatter(
            items.phases[phase].length,
            ranks[phase],
            capacities[phase],
            alignments[phase],
            rng,
            spans,
        )
        for phase in ranks
    }
    routes = {}
    next_arrival = dict.fromkeys(np.ndindex(phases["language"].microbatches, ranks["language"]), 0)
    for encoder in MODALITIES:
        media = items.phases[encoder]
        route_pieces = []
        for n, (example, tokens) in enumerate(zip(media.example, media.tokens, strict=True)):
            # The tokens of one media item are cut where their slots pass from one rank to the next.
            for skipped, tokens_moved, pool in owners(
                phases["language"], example, media.slot[n], tokens
            ):
                route_pieces.append((n, skipped, tokens_moved, next_arrival[pool]))
                next_arrival[pool] += tokens_moved
        ones = np.ones(4, np.int32)
        sender = np.array([0, 1, 2, 3], np.int32)  # one token from each exchange rank to the next
        start, arrival = (sender, sender + 4) if encoder == "vision" else (sender, sender)
        round_ = RouteRound(
            0, 1, 1, 0, 8, ones, start, arrival, sender, (sender + 1) % 4, ones, ones > 0
        )
        columns = np.array(route_pieces, np.int32).reshape(-1, 4).T
        routes[encoder] = RoutePlan(*columns, (round_,))
    return StepPlan(phases, routes, {"vision/max_over_mean": 1.5})


def owners(language: PhasePlan, item: int, first: int, tokens: int):
    """Yields, per rank, which tokens of one media item it owns: (tokens before, tokens,
    (microbatch, rank)).

    The media item starts at slot `first` of its example."""
    m = int(language.microbatch[item])
    slots = language.offset[item] + first + np.arange(tokens)
    rank = language.rank[item] + slots // language.capacity[m]
    for owner in np.unique(rank):
        members = np.flatnonzero(rank == owner)
        yield int(members[0]), len(members), (m, int(owner))


def make_spec(ranks=RANKS, capacities=CAPACITIES) -> PlanSpec:
    """The specification of plans with one class of rows per phase."""
    phases = {
        phase.name: PhaseSpec(
            phase,
            ranks[phase.name],
            row_classes((capacities[phase.name],)),
            SEGMENTS,
            1,
            ItemCost(1, 0),
        )
        for phase in (*map(encoder_phase, MODALITIES), decoder_phase(tuple(MODALITIES)))
    }
    grid = ExchangeGrid(
        np.arange(4, dtype=np.int32)[:, None], np.arange(4, dtype=np.int32)[:, None]
    )
    return PlanSpec(phases, {phase: RouteSpec(grid, 8, 64, 8) for phase in MODALITIES})


EVERYWHERE = LocalRanks(
    {phase: tuple(range(ranks)) for phase, ranks in RANKS.items()},
    {phase: tuple(range(4)) for phase in MODALITIES},
)


@dataclass(frozen=True)
class Case:
    """A batch with its corpus and plan, ready to be filled."""

    corpus: FakeCorpus
    examples: np.ndarray
    items: BatchItems
    plan: StepPlan

    def fill(
        self,
        local: LocalRanks = EVERYWHERE,
        threads: int = 2,
        modalities: Mapping[str, FakeModality] = MODALITIES,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> HostStep:
        """The rows that the given ranks fill for step 7."""
        corpus = dataclasses.replace(self.corpus, modalities=modalities)
        filler = StepFiller(corpus, make_spec(), local, ATTENTION, threads=threads)
        return filler.fill(7, self.examples, self.items, self.plan, cancelled)


def make_case(seed: int, batch: int = 12, broken: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    corpus = FakeCorpus({i: make_example(i, rng, broken) for i in range(20)})
    examples = rng.integers(0, 20, batch)  # an example may occur twice in a batch
    items = gather(corpus, examples)
    return Case(corpus, examples, items, make_plan(items, rng))


def item_at(
    plan: PhasePlan, items: PhaseItems, microbatch: int, rank: int, slot: int
) -> tuple[int, int] | None:
    """The (item, slot inside the item) at a slot of a row, or None for padding."""
    matches = [
        (n, slot - int(plan.offset[n]))
        for n in range(len(items.length))
        if (plan.microbatch[n], plan.rank[n]) == (microbatch, rank)
        and plan.offset[n] <= slot < plan.offset[n] + items.length[n]
    ]
    # The plan must not put two items into one slot.
    assert len(matches) <= 1
    return matches[0] if matches else None


def span_of(case: Case, phase: str, item: int) -> MediaSpan:
    spans = [
        span
        for example_id in case.examples.tolist()
        for span in case.corpus.example(example_id).media
        if span.phase == phase
    ]
    return spans[item]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phase", ["vision", "audio"])
def test_encoder_rows_hold_each_item_where_the_plan_says(seed, phase):
    case = make_case(seed, broken=seed % 2 == 1)
    modality = MODALITIES[phase]
    plan = case.plan.phases[phase]
    items = case.items.phases[phase]
    step = case.fill()
    assert (
        step.capacities[phase] == tuple(plan.capacity)
        and len(step.rows[phase]) == plan.microbatches
    )
    for m, row in enumerate(step.rows[phase]):
        expected = {
            name: np.zeros_like(row[name])
            for name in ("features", "segments", "positions", "valid", "failed")
        }
        for r, slot in np.ndindex(row["segments"].shape):
            location = item_at(plan, items, m, r, slot)
            if location is None:
                continue
            item, item_slot = location
            span = span_of(case, phase, item)
            broken = "broken" in span.reference.path.name
            expected["positions"][r, slot] = item_slot, span.shape[1]
            if item_slot < span.shape[0]:
                expected["segments"][r, slot] = plan.segment[item]
                expected["features"][r, slot] = 0 if broken else span.shape[1] + item_slot / 64
            expected["valid"][r, slot // modality.format.slots_per_token] = not broken
            expected["failed"][r] += broken and item_slot == 0
        for name, array in expected.items():
            np.testing.assert_array_equal(row[name], array, err_msg=name)
        for r, segments in enumerate(row["segments"]):
            ids = item_ids(segments[:: modality.format.stride])
            check_tiles(row["tiles"], r, tile_map(ids, ATTENTION.blocks[phase]))
        assert (row["places"] == np.arange(row["valid"].shape[1])).all()


def check_tiles(tables, rank, expected):
    """Compares one rank's tile tables of a row with the tiles of a dense mask."""
    names = {"query_spans": expected.queries.spans, "query_blocks": expected.queries.blocks}
    names |= {"key_spans": expected.keys.spans, "key_blocks": expected.keys.blocks}
    assert tables.keys() == names.keys()
    for name, table in names.items():
        np.testing.assert_array_equal(tables[name][rank, 0], table, err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_language_rows_hold_each_example_where_the_plan_says(seed):
    case = make_case(seed)
    plan = case.plan.phases["language"]
    items = case.items.phases["language"]
    step = case.fill()
    for m, row in enumerate(step.rows["language"]):
        padding = {
            "tokens": 0,
            "targets": -1,
            "segments": 0,
            "positions": 0,
            "media": -1,
            "sources": -1,
            "groups": 0,
        }
        expected = {name: np.full_like(row[name], value) for name, value in padding.items()}
        for r, slot in np.ndindex(row["tokens"].shape):
            location = item_at(plan, items, m, r, slot)
            if location is None:
                continue
            item, item_slot = location
            example = case.corpus.example(int(case.examples[item]))
            for name in ("tokens", "targets", "positions"):
                expected[name][r, slot] = getattr(example, name)[item_slot]
            expected["segments"][r, slot] = plan.segment[item]
            expected["sources"][r, plan.segment[item] - 1] = case.examples[item] % 5
        for encoder, route in case.plan.routes.items():
            media = case.items.phases[encoder]
            for n, index in enumerate(media.example):
                if plan.microbatch[index] == m:
                    for token in range(media.tokens[n]):
                        slot = plan.offset[index] + media.slot[n] + token
                        expected["media"][plan.rank[index], slot] = route.arrival[n] + token
                        if encoder == "vision":
                            expected["groups"][plan.rank[index], slot] = (
                                plan.offset[index] + media.slot[n] + 1
                            )
        for name, array in expected.items():
            np.testing.assert_array_equal(row[name], array, err_msg=name)
        for r, segments in enumerate(row["segments"]):
            ids = causal_ids(segments, row["groups"][r])
            check_tiles(row["tiles"], r, tile_map(ids, ATTENTION.blocks["language"]))
        assert (row["order"] == np.arange(row["tokens"].shape[1])).all()


def test_every_slot_of_the_batch_is_filled_exactly_once():
    case = make_case(11)
    step = case.fill()
    # Items carry values of their own, so equal sorted values mean that no slot is lost or doubled.
    for phase, modality in MODALITIES.items():
        loaded_values = np.concatenate(
            [row["features"][..., 0][row["segments"] > 0] for row in step.rows[phase]]
        )
        expected_values = [
            span.shape[1] + np.arange(span.shape[0], dtype=np.float32) / 64
            for example_id in case.examples.tolist()
            for span in case.corpus.example(example_id).media
            if span.phase == phase
        ]
        np.testing.assert_array_equal(
            np.sort(loaded_values), np.sort(np.concatenate(expected_values))
        )
        valid = sum(int(row["valid"].sum()) for row in step.rows[phase])
        assert (
            valid == case.items.phases[phase].tokens.sum() and modality.format.slots_per_token > 1
        )
    targets = sum(int((row["targets"] >= 0).sum()) for row in step.rows["language"])
    assert targets == step.targets > 0
    arrivals = sum(int((row["media"] >= 0).sum()) for row in step.rows["language"])
    assert arrivals == sum(case.items.phases[phase].tokens.sum() for phase in MODALITIES)


def test_items_that_do_not_decode_are_counted_and_named():
    case = make_case(3, broken=True)
    broken = [
        str(span.reference)
        for example_id in case.examples.tolist()
        for span in case.corpus.example(example_id).media
        if "broken" in span.reference.path.name
    ]
    step = case.fill()
    assert len(broken) >= 3
    assert sorted(step.failures) == sorted(f"{path}: broken body" for path in broken)
    assert sum(int(row["failed"].sum()) for phase in MODALITIES for row in step.rows[phase]) == len(
        broken
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_masked_like_a_broken_body(value):
    """A modality may let such a number through, and a single one would spoil the update of the
    whole batch."""

    @dataclass(frozen=True)
    class Overflowing(FakeModality):
        def load(self, media, shape):
            features = super().load(File(Path("whole")), shape)
            if "broken" in media.path.name:
                features[-1, 1] = value
            return features

    case = make_case(3, broken=True)
    modalities = {name: Overflowing(name, fake.format) for name, fake in MODALITIES.items()}
    step = case.fill(modalities=modalities)
    expected = case.fill()
    assert len(step.failures) == len(expected.failures) >= 3
    assert all(
        "broken was loaded as numbers that are not finite" in message for message in step.failures
    )
    for phase in MODALITIES:
        for row, masked in zip(step.rows[phase], expected.rows[phase], strict=True):
            for name in ("features", "valid", "failed", "segments"):
                np.testing.assert_array_equal(row[name], masked[name], err_msg=f"{phase} {name}")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (MemoryError(), MemoryError, "no memory is left to load {}"),
        (OSError(5, "Input/output error"), OSError, "Input/output error: {}"),
        (KeyError("rate"), RuntimeError, "{} cannot be loaded: KeyError: 'rate'"),
    ],
)
def test_whatever_goes_wrong_names_its_item(error, kind, words):
    """The media may be sound, so the run ends with an error that says which file it was."""

    @dataclass(frozen=True)
    class Failing(FakeModality):
        def load(self, media, shape):
            if "broken" in media.path.name:
                raise error
            return super().load(media, shape)

    case = make_case(3, broken=True)
    modalities = {name: Failing(name, fake.format) for name, fake in MODALITIES.items()}
    with pytest.raises(kind) as caught:
        case.fill(modalities=modalities)
    assert re.search(re.escape(words).replace(r"\{\}", r"\d+-\d-broken"), str(caught.value))


def test_a_subset_of_ranks_gets_its_slice_of_the_full_rows():
    case = make_case(5, broken=True)
    full_step = case.fill()
    local = LocalRanks(
        {"vision": (1, 3), "audio": (2,), "language": (1,)}, {"vision": (2, 0), "audio": (3,)}
    )
    local_step = case.fill(local, threads=1)
    for phase, ranks in local.phases.items():
        for local_tables, full_tables in zip(
            local_step.rows[phase], full_step.rows[phase], strict=True
        ):
            assert local_tables.keys() == full_tables.keys()
            for name in full_tables.keys() - {"tiles"}:
                np.testing.assert_array_equal(
                    local_tables[name], full_tables[name][list(ranks)], err_msg=f"{phase} {name}"
                )
    for phase, ranks in local.exchange.items():
        planned_rounds = case.plan.routes[phase].rounds
        assert len(local_step.rounds[phase]) == len(planned_rounds) == 1
        (local_tables,), full_tables = (
            local_step.rounds[phase],
            route_tables(planned_rounds[0], make_spec().routes[phase], range(4)),
        )
        assert (local_tables.source, local_tables.target) == (0, 1)
        for name in ("gather_forward", "gather_backward"):
            np.testing.assert_array_equal(
                getattr(local_tables, name), getattr(full_tables, name)[list(ranks)]
            )
        for local_hop, full_hop in zip(
            (*local_tables.send_forward, *local_tables.send_backward),
            (*full_tables.send_forward, *full_tables.send_backward),
            strict=True,
        ):
            assert (local_hop.index >= 0).any()
            np.testing.assert_array_equal(local_hop.index, full_hop.index[list(ranks)])
    assert local_step.targets == full_step.targets and local_step.capacities == full_step.capacities
    assert set(local_step.failures) < set(full_step.failures)


def test_media_of_other_hosts_are_not_decoded():
    case = make_case(6)
    recording = Recording("vision", MODALITIES["vision"].format)
    local = LocalRanks(
        {"vision": (2,), "audio": (), "language": (0,)}, {"vision": (0,), "audio": (0,)}
    )
    step = case.fill(local, modalities={**MODALITIES, "vision": recording})
    local_items = np.flatnonzero(case.plan.phases["vision"].rank == 2)
    expected_references = [str(span_of(case, "vision", n).reference) for n in local_items]
    assert sorted(recording.loaded) == sorted(expected_references) and expected_references
    assert all(row["features"].shape[0] == 0 for row in step.rows["audio"])


@pytest.mark.parametrize("last", [0, 3, None])
def test_filling_ends_soon_after_it_is_cancelled(last):
    """Cancellation is noticed before any media are loaded, between them, and after all of them."""
    case = make_case(6)
    loaded = []
    media_items = sum(
        len(items.length) for name, items in case.items.phases.items() if name != "language"
    )
    last = media_items if last is None else last
    recording = {name: Recording(name, fake.format, loaded) for name, fake in MODALITIES.items()}
    with pytest.raises(CancelledError):
        case.fill(threads=1, modalities=recording, cancelled=lambda: len(loaded) >= last)
    assert len(loaded) == last


FOUR = {"vision": 4, "audio": 4, "language": 4}
# Slots of a row, which is the same whatever its span.
EVEN = {"vision": 64, "audio": 64, "language": 64}
ALL_FOUR = LocalRanks({phase: (0, 1, 2, 3) for phase in FOUR}, {phase: () for phase in MODALITIES})


@dataclass(frozen=True)
class SharedRows:
    """The same items in rows that several ranks share, and in rows of the same slots on one rank
    each."""

    case: Case
    parts: int  # number of parts that a rank's share of a row is dealt to

    def fill(self, local: LocalRanks = ALL_FOUR, whole: bool = False) -> HostStep:
        """The rows of shared spans, or with `whole` the same items in rows of one rank each."""
        case = self.case
        plan = case.plan
        part_counts = {phase: 1 if whole else self.parts for phase in FOUR}
        if whole:
            phases = {name: whole_rows(phase) for name, phase in plan.phases.items()}
            plan = dataclasses.replace(plan, phases=phases)
        blocks = {"vision": 8, "audio": 2, "language": 8}
        attention = dataclasses.replace(ATTENTION, blocks=blocks, parts=part_counts)
        filler = StepFiller(case.corpus, make_spec(FOUR, EVEN), local, attention)
        return filler.fill(7, case.examples, case.items, plan)


def whole_rows(plan: PhasePlan) -> PhasePlan:
    """The same plan with each shared row on one rank, which holds all of its slots."""
    ones = np.ones_like(plan.span)
    group = plan.rank // plan.span[plan.microbatch]
    return dataclasses.replace(plan, capacity=plan.capacity * plan.span, span=ones, rank=group)


def shared_rows(
    seed: int, spans: tuple[int, ...], parts: int = 1, examples: int = 72
) -> SharedRows:
    """A case with about three times as many examples as usual, in rows of the given spans on four
    ranks."""
    rng = np.random.default_rng(seed)
    corpus = FakeCorpus({i: make_example(i, rng, True) for i in range(20)})
    examples = rng.integers(0, 20, examples)
    items = gather(corpus, examples)
    return SharedRows(
        Case(corpus, examples, items, make_plan(items, rng, FOUR, EVEN, spans)), parts
    )


@pytest.mark.parametrize(
    ("spans", "parts"), [((2,), 1), ((4,), 1), ((2,), 2), ((4, 2, 1), 1), ((4, 1), 2)]
)
def test_shared_rows_are_whole_ones_whose_slots_are_dealt(spans, parts):
    rows_case = shared_rows(1, spans, parts)
    dealt_step = rows_case.fill()
    whole_step = rows_case.fill(whole=True)
    assert sorted(dealt_step.failures) == sorted(whole_step.failures) != []
    for phase in FOUR:
        plan = rows_case.case.plan.phases[phase]
        assert dealt_step.spans[phase] == tuple(plan.span) and set(plan.span) == set(spans)
        for row, whole_row, span in zip(
            dealt_step.rows[phase], whole_step.rows[phase], plan.span.tolist(), strict=True
        ):
            groups = 4 // span
            assert {len(array) for array in row.values() if not isinstance(array, dict)} == {groups}
            assert row["tiles"]["query_spans"].shape[:2] == (groups, span * parts)
            if phase == "language":
                assert ("arrived" in row) == (span > 1)
                # Slots of the dealt row are a permutation of the slots of the whole row, and
                # `order` tells which.
                np.testing.assert_array_equal(row["sources"], whole_row["sources"][:groups])
                for group, order in enumerate(row["order"]):
                    assert sorted(order) == list(range(64))
                    for name in ("tokens", "targets", "segments", "positions", "groups"):
                        np.testing.assert_array_equal(
                            row[name][group], whole_row[name][group][order]
                        )
            else:
                for name in ("valid", "failed"):
                    np.testing.assert_array_equal(row[name], whole_row[name][:groups])
                tokens = row["valid"].shape[1]
                # Attention tokens of encoders are moved as units, and `places` tells where each one
                # went.
                for group, token_places in enumerate(row["places"]):
                    assert sorted(token_places) == list(range(tokens))
                    for name in ("features", "segments", "positions"):
                        by_token = row[name][group].reshape(tokens, -1)[token_places]
                        expected = whole_row[name][group].reshape(tokens, -1)
                        np.testing.assert_array_equal(by_token, expected)


def test_a_host_may_hold_no_rank_of_rows_that_others_share():
    nowhere: dict[str, tuple[int, ...]] = dict.fromkeys(FOUR, ())
    local = LocalRanks(nowhere | {"audio": (0, 1)}, ALL_FOUR.exchange)
    step = shared_rows(1, (2,)).fill(local)
    row_counts = {
        phase: {len(row["segments"]) for row in rows} for phase, rows in step.rows.items()
    }
    assert row_counts == {"vision": {0}, "audio": {1}, "language": {0}}


@pytest.mark.parametrize("spans", [(2,), (4,), (4, 2, 1)])
def test_media_tokens_of_shared_rows_are_those_of_the_rank_that_owns_their_slot(spans):
    rows_case = shared_rows(2, spans)
    case = rows_case.case
    plan = case.plan.phases["language"]
    rows = rows_case.fill().rows["language"]
    expected = [np.full((4 // span, 64), -1) for span in plan.span.tolist()]
    pieces = 0
    for encoder, route in case.plan.routes.items():
        media = case.items.phases[encoder]
        pieces += len(route.item) - len(media.length)
        for n, skipped, tokens, arrival in zip(
            route.item, route.skipped, route.tokens, route.arrival, strict=True
        ):
            example = media.example[n]
            m = plan.microbatch[example]
            first_slot = plan.offset[example] + media.slot[n] + skipped
            group = plan.rank[example] // plan.span[m]
            expected[m][group, first_slot : first_slot + tokens] = arrival + np.arange(tokens)
    # Some media item lies on both sides of a cut, or else the test would not see the cuts.
    assert pieces > 0
    for row, span, arrived in zip(rows, plan.span.tolist(), expected, strict=True):
        if span > 1:
            np.testing.assert_array_equal(row["arrived"], arrived)
        dealt = np.take_along_axis(arrived, row["order"], axis=1)
        np.testing.assert_array_equal(row["media"], dealt)


def test_hosts_of_one_group_fill_the_same_whole_row():
    """Failed media are reported only by the host that has the group's first rank, so none is
    counted twice."""
    rows_case = shared_rows(3, (4, 2, 1))
    full_step = rows_case.fill()
    hosts = [(0,), (1, 2), (3,)]
    failures: list[str] = []
    for ranks in hosts:
        local = LocalRanks({phase: ranks for phase in FOUR}, {phase: () for phase in MODALITIES})
        step = rows_case.fill(local)
        failures += step.failures
        for phase in FOUR:
            for row, full_row, span in zip(
                step.rows[phase], full_step.rows[phase], step.spans[phase], strict=True
            ):
                groups = sorted({rank // span for rank in ranks})
                assert row.keys() == full_row.keys()
                for name in full_row.keys() - {"tiles"}:
                    np.testing.assert_array_equal(row[name], full_row[name][groups], err_msg=name)
                for name, table in full_row["tiles"].items():
                    np.testing.assert_array_equal(row["tiles"][name], table[groups])
    assert sorted(failures) == sorted(full_step.failures) != []


def test_an_item_that_reaches_beyond_a_shared_row_is_refused():
    rows_case = shared_rows(2, (2,))
    vision = rows_case.case.plan.phases["vision"]
    # 60 of 64 slots: any item longer than 4 slots now ends beyond its row.
    shifted_vision = dataclasses.replace(vision, offset=vision.offset + 60)
    plan = dataclasses.replace(
        rows_case.case.plan, phases=rows_case.case.plan.phases | {"vision": shifted_vision}
    )
    with pytest.raises(MisalignmentError, match=r"ends at slot .* of a row of 64"):
        dataclasses.replace(rows_case, case=dataclasses.replace(rows_case.case, plan=plan)).fill()


def test_steps_without_a_modality_have_no_rows_of_it():
    rng = np.random.default_rng(0)
    corpus = FakeCorpus(
        {i: dataclasses.replace(make_example(i, rng, False), media=()) for i in range(4)}
    )
    examples = np.arange(4)
    items = gather(corpus, examples)
    step = Case(corpus, examples, items, make_plan(items, rng)).fill()
    assert step.rows["vision"] == step.rows["audio"] == [] and step.capacities["vision"] == ()
    assert all((row["media"] == -1).all() for row in step.rows["language"])


SHORT = File(Path("short"))


def with_media(case: Case, change) -> Case:
    """The same plan over a corpus whose first media item has changed since the plan was made."""
    example_id, example = next(
        (i, e) for i, e in case.corpus.examples.items() if i in case.examples and e.media
    )
    changed = dataclasses.replace(example, media=change(example.media))
    return dataclasses.replace(
        case, corpus=FakeCorpus({**case.corpus.examples, example_id: changed})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[1:], r"has \d+ (vision|audio) items, but the plan was made for \d+"),
        (
            lambda m: (dataclasses.replace(m[0], shape=(99, 1, 1)), *m[1:]),
            r"\((100|104), .*made for",
        ),
        (lambda m: (dataclasses.replace(m[0], tokens=77), *m[1:]), r", 77, .*made for"),
        (lambda m: (dataclasses.replace(m[0], slot=55), *m[1:]), r", 55\).*made for"),
        (
            lambda m: (dataclasses.replace(m[0], reference=File(Path("short"))), *m[1:]),
            r"short was loaded as .*room for",
        ),
    ],
)
def test_media_that_differ_from_the_plan_are_refused(change, message):
    with pytest.raises(MisalignmentError, match=message):
        with_media(make_case(2), change).fill()


def test_text_that_differs_from_the_plan_is_refused():
    case = make_case(2)
    example_id = int(case.examples[0])
    example = case.corpus.examples[example_id]
    longer = dataclasses.replace(example, tokens=np.append(example.tokens, 1))
    with pytest.raises(
        MisalignmentError, match=rf"has {len(longer.tokens)} tokens.*for {len(example.tokens)}"
    ):
        dataclasses.replace(
            case, corpus=FakeCorpus({**case.corpus.examples, example_id: longer})
        ).fill()


def test_plans_that_do_not_fit_are_refused():
    case = make_case(2)
    vision = case.plan.phases["vision"]
    shifted_vision = dataclasses.replace(vision, offset=vision.offset + 28)
    with pytest.raises(MisalignmentError, match=r"ends at slot .* of a row of 32"):
        dataclasses.replace(
            case,
            plan=dataclasses.replace(
                case.plan, phases={**case.plan.phases, "vision": shifted_vision}
            ),
        ).fill()
    misaligned_vision = dataclasses.replace(vision, offset=vision.offset + 1)
    with pytest.raises(MisalignmentError, match="cuts a language token of 4"):
        dataclasses.replace(
            case,
            plan=dataclasses.replace(
                case.plan, phases={**case.plan.phases, "vision": misaligned_vision}
            ),
        ).fill()
