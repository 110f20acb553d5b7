"""Rows against a slow reference that asks, slot by slot, which item the plan put there."""

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
    """Items of shape (real slots, number, 1); slot s of item k holds k + s / 64, twice."""

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
    """Notes which items are loaded."""

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
    examples: dict[int, Rendered]
    modalities: Mapping[str, FakeModality] = dataclasses.field(default_factory=lambda: MODALITIES)

    def example(self, i):
        return self.examples[i]

    def source_of(self, i):
        return i % 5


def make_example(number: int, rng: np.random.Generator, broken: bool) -> Rendered:
    spans, slot = [], int(rng.integers(1, 4))
    for k in range(rng.integers(0, 4)):
        phase = ("vision", "audio")[rng.integers(2)]
        shape = (int(rng.integers(1, 25)), number * 8 + k + 1, 1)
        tokens = -(-shape[0] // MODALITIES[phase].format.slots_per_token)
        name = f"{number}-{k}-{'broken' if broken and rng.random() < 0.5 else 'whole'}"
        spans.append(MediaSpan(phase, File(Path(name)), shape, slot, tokens))
        slot += tokens + int(rng.integers(0, 3))
    length = slot + int(rng.integers(1, 6))
    targets = np.where(rng.random(length) < 0.5, rng.integers(0, 99, length), -1)
    return Rendered(
        rng.integers(1, 99, length),
        targets,
        rng.integers(0, 99, (length, 3)).astype(np.int32),
        tuple(spans),
    )


def gather(corpus: FakeCorpus, examples: np.ndarray) -> BatchItems:
    rows: dict[str, list[tuple[int, ...]]] = {"vision": [], "audio": [], "language": []}
    for index, number in enumerate(examples.tolist()):
        example = corpus.example(number)
        rows["language"].append(
            (len(example.tokens), len(example.tokens), index, len(example.tokens), 0)
        )
        for span in example.media:
            length = MODALITIES[span.phase].length(span.shape)
            rows[span.phase].append((length, span.shape[0], index, span.tokens, span.slot))
    phases = {}
    for phase, values in rows.items():
        table = np.array(values, np.int64).reshape(-1, 5)
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
    """Items in random order, first-fit into rows with random gaps: any legal plan will do here. Whole rows have
    `capacity` slots, and any of the spans."""
    used: list[list[int]] = []  # [microbatch][group]
    count: list[list[int]] = []
    place = np.zeros((len(lengths), 4), np.int32)
    span: list[int] = []
    for item in rng.permutation(len(lengths)):
        gap = int(rng.integers(0, 2)) * alignment
        open_rows = [(m, r) for m, groups in enumerate(used) for r in range(len(groups))]
        fits = [(m, r) for m, r in open_rows if used[m][r] + gap + lengths[item] <= capacity]
        if not fits:
            span.append(spans[len(span) % len(spans)])
            groups = ranks // span[-1]
            used.append([0] * groups)
            count.append([0] * groups)
            fits, gap = [(len(used) - 1, int(rng.integers(groups)))], 0
        m, r = fits[0]
        count[m][r] += 1
        place[item] = m, r * span[m], used[m][r] + gap, count[m][r]
        used[m][r] += gap + int(lengths[item])
    zeros = np.zeros(len(used), np.int32)
    of_rows = np.array(span, np.int32)
    return PhasePlan(
        (capacity // np.maximum(of_rows, 1)).astype(np.int32),
        of_rows,
        zeros,
        np.arange(len(used), dtype=np.int32),
        *place.T,
    )


def make_plan(
    items: BatchItems,
    rng: np.random.Generator,
    ranks=RANKS,
    capacities=CAPACITIES,
    spans: tuple[int, ...] = (1,),
) -> StepPlan:
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
    routes, filled = (
        {},
        dict.fromkeys(np.ndindex(phases["language"].microbatches, ranks["language"]), 0),
    )
    for encoder in MODALITIES:
        media = items.phases[encoder]
        pieces = []
        for n, (example, tokens) in enumerate(zip(media.example, media.tokens, strict=True)):
            for skipped, amount, pool in owners(phases["language"], example, media.slot[n], tokens):
                pieces.append((n, skipped, amount, filled[pool]))
                filled[pool] += amount
        one = np.ones(4, np.int32)
        there = np.array([0, 1, 2, 3], np.int32)  # one token from each exchange rank to the next
        near, far = (there, there + 4) if encoder == "vision" else (there, there)
        round_ = RouteRound(0, 1, 1, 0, 8, one, near, far, there, (there + 1) % 4, one, one > 0)
        columns = np.array(pieces, np.int32).reshape(-1, 4).T
        routes[encoder] = RoutePlan(*columns, (round_,))
    return StepPlan(phases, routes, {"vision/max_over_mean": 1.5})


def owners(language: PhasePlan, item: int, first: int, tokens: int):
    """(tokens before, tokens, (microbatch, rank that owns them)) of media `first` .. of an example, by rank."""
    m = int(language.microbatch[item])
    slots = language.offset[item] + first + np.arange(tokens)
    rank = language.rank[item] + slots // language.capacity[m]
    for number in np.unique(rank):
        members = np.flatnonzero(rank == number)
        yield int(members[0]), len(members), (m, int(number))


def make_spec(ranks=RANKS, capacities=CAPACITIES) -> PlanSpec:
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
        corpus = dataclasses.replace(self.corpus, modalities=modalities)
        filler = StepFiller(corpus, make_spec(), local, ATTENTION, threads=threads)
        return filler.fill(7, self.examples, self.items, self.plan, cancelled)


def make_case(seed: int, batch: int = 12, broken: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    corpus = FakeCorpus({i: make_example(i, rng, broken) for i in range(20)})
    examples = rng.integers(0, 20, batch)  # an example may come twice in a batch
    items = gather(corpus, examples)
    return Case(corpus, examples, items, make_plan(items, rng))


def item_at(
    plan: PhasePlan, items: PhaseItems, microbatch: int, rank: int, slot: int
) -> tuple[int, int] | None:
    """(item, slot inside it), or None for padding."""
    found = [
        (n, slot - int(plan.offset[n]))
        for n in range(len(items.length))
        if (plan.microbatch[n], plan.rank[n]) == (microbatch, rank)
        and plan.offset[n] <= slot < plan.offset[n] + items.length[n]
    ]
    assert len(found) <= 1
    return found[0] if found else None


def span_of(case: Case, phase: str, item: int) -> MediaSpan:
    spans = [
        span
        for number in case.examples.tolist()
        for span in case.corpus.example(number).media
        if span.phase == phase
    ]
    return spans[item]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phase", ["vision", "audio"])
def test_encoder_rows_hold_each_item_where_the_plan_says(seed, phase):
    case = make_case(seed, broken=seed % 2 == 1)
    modality, plan, items = MODALITIES[phase], case.plan.phases[phase], case.items.phases[phase]
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
            found = item_at(plan, items, m, r, slot)
            if found is None:
                continue
            item, inside = found
            span = span_of(case, phase, item)
            broken = "broken" in span.reference.path.name
            expected["positions"][r, slot] = inside, span.shape[1]
            if inside < span.shape[0]:
                expected["segments"][r, slot] = plan.segment[item]
                expected["features"][r, slot] = 0 if broken else span.shape[1] + inside / 64
            expected["valid"][r, slot // modality.format.slots_per_token] = not broken
            expected["failed"][r] += broken and inside == 0
        for name, values in expected.items():
            np.testing.assert_array_equal(row[name], values, err_msg=name)
        for r, segments in enumerate(row["segments"]):
            ids = item_ids(segments[:: modality.format.stride])
            check_tiles(row["tiles"], r, tile_map(ids, ATTENTION.blocks[phase]))
        assert (row["places"] == np.arange(row["valid"].shape[1])).all()


def check_tiles(tables, rank, expected):
    names = {"query_spans": expected.queries.spans, "query_blocks": expected.queries.blocks}
    names |= {"key_spans": expected.keys.spans, "key_blocks": expected.keys.blocks}
    assert tables.keys() == names.keys()
    for name, table in names.items():
        np.testing.assert_array_equal(tables[name][rank, 0], table, err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_language_rows_hold_each_example_where_the_plan_says(seed):
    case = make_case(seed)
    plan, items = case.plan.phases["language"], case.items.phases["language"]
    step = case.fill()
    for m, row in enumerate(step.rows["language"]):
        fillers = {
            "tokens": 0,
            "targets": -1,
            "segments": 0,
            "positions": 0,
            "media": -1,
            "sources": -1,
            "groups": 0,
        }
        expected = {name: np.full_like(row[name], value) for name, value in fillers.items()}
        for r, slot in np.ndindex(row["tokens"].shape):
            found = item_at(plan, items, m, r, slot)
            if found is None:
                continue
            item, inside = found
            example = case.corpus.example(int(case.examples[item]))
            for name in ("tokens", "targets", "positions"):
                expected[name][r, slot] = getattr(example, name)[inside]
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
        for name, values in expected.items():
            np.testing.assert_array_equal(row[name], values, err_msg=name)
        for r, segments in enumerate(row["segments"]):
            ids = causal_ids(segments, row["groups"][r])
            check_tiles(row["tiles"], r, tile_map(ids, ATTENTION.blocks["language"]))
        assert (row["order"] == np.arange(row["tokens"].shape[1])).all()


def test_every_slot_of_the_batch_is_filled_exactly_once():
    case = make_case(11)
    step = case.fill()
    for phase, modality in MODALITIES.items():
        filled = np.concatenate(
            [row["features"][..., 0][row["segments"] > 0] for row in step.rows[phase]]
        )
        wanted = [
            span.shape[1] + np.arange(span.shape[0], dtype=np.float32) / 64
            for number in case.examples.tolist()
            for span in case.corpus.example(number).media
            if span.phase == phase
        ]
        np.testing.assert_array_equal(np.sort(filled), np.sort(np.concatenate(wanted)))
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
        for number in case.examples.tolist()
        for span in case.corpus.example(number).media
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
    """Whatever a modality lets through: one such number would cost the update of the whole batch."""

    @dataclass(frozen=True)
    class Overflowing(FakeModality):
        def load(self, media, shape):
            features = super().load(File(Path("whole")), shape)
            if "broken" in media.path.name:
                features[-1, 1] = value
            return features

    case = make_case(3, broken=True)
    modalities = {name: Overflowing(name, fake.format) for name, fake in MODALITIES.items()}
    step, expected = case.fill(modalities=modalities), case.fill()
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
    """The media may be sound: the run ends, and says with which file."""

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
    whole = case.fill()
    local = LocalRanks(
        {"vision": (1, 3), "audio": (2,), "language": (1,)}, {"vision": (2, 0), "audio": (3,)}
    )
    part = case.fill(local, threads=1)
    for phase, ranks in local.phases.items():
        for mine, full in zip(part.rows[phase], whole.rows[phase], strict=True):
            assert mine.keys() == full.keys()
            for name in full.keys() - {"tiles"}:
                np.testing.assert_array_equal(
                    mine[name], full[name][list(ranks)], err_msg=f"{phase} {name}"
                )
    for phase, ranks in local.exchange.items():
        planned = case.plan.routes[phase].rounds
        assert len(part.rounds[phase]) == len(planned) == 1
        (mine,), full = (
            part.rounds[phase],
            route_tables(planned[0], make_spec().routes[phase], range(4)),
        )
        assert (mine.source, mine.target) == (0, 1)
        for name in ("gather_forward", "gather_backward"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(full, name)[list(ranks)])
        for own, whole_hop in zip(
            (*mine.send_forward, *mine.send_backward),
            (*full.send_forward, *full.send_backward),
            strict=True,
        ):
            assert (own.index >= 0).any()
            np.testing.assert_array_equal(own.index, whole_hop.index[list(ranks)])
    assert part.targets == whole.targets and part.capacities == whole.capacities
    assert set(part.failures) < set(whole.failures)


def test_media_of_other_hosts_are_not_decoded():
    case = make_case(6)
    recording = Recording("vision", MODALITIES["vision"].format)
    local = LocalRanks(
        {"vision": (2,), "audio": (), "language": (0,)}, {"vision": (0,), "audio": (0,)}
    )
    step = case.fill(local, modalities={**MODALITIES, "vision": recording})
    mine = np.flatnonzero(case.plan.phases["vision"].rank == 2)
    wanted = [str(span_of(case, "vision", n).reference) for n in mine]
    assert sorted(recording.loaded) == sorted(wanted) and wanted
    assert all(row["features"].shape[0] == 0 for row in step.rows["audio"])


@pytest.mark.parametrize("last", [0, 3, None])
def test_filling_ends_soon_after_it_is_cancelled(last):
    """Before media are loaded, between them, and after all of them."""
    case = make_case(6)
    loaded = []
    count = sum(
        len(items.length) for name, items in case.items.phases.items() if name != "language"
    )
    last = count if last is None else last
    recording = {name: Recording(name, fake.format, loaded) for name, fake in MODALITIES.items()}
    with pytest.raises(CancelledError):
        case.fill(threads=1, modalities=recording, cancelled=lambda: len(loaded) >= last)
    assert len(loaded) == last


FOUR = {"vision": 4, "audio": 4, "language": 4}
EVEN = {"vision": 64, "audio": 64, "language": 64}  # slots of whole rows
ALL_FOUR = LocalRanks({phase: (0, 1, 2, 3) for phase in FOUR}, {phase: () for phase in MODALITIES})


@dataclass(frozen=True)
class SharedRows:
    """The same items in rows that several ranks hold, and in rows of as many slots of one rank each."""

    case: Case
    parts: int  # of a rank's share of a row

    def fill(self, local: LocalRanks = ALL_FOUR, whole: bool = False) -> HostStep:
        case = self.case
        plan = case.plan
        parts = {phase: 1 if whole else self.parts for phase in FOUR}
        if whole:
            phases = {name: whole_rows(phase) for name, phase in plan.phases.items()}
            plan = dataclasses.replace(plan, phases=phases)
        blocks = {"vision": 8, "audio": 2, "language": 8}
        attention = dataclasses.replace(ATTENTION, blocks=blocks, parts=parts)
        filler = StepFiller(case.corpus, make_spec(FOUR, EVEN), local, attention)
        return filler.fill(7, case.examples, case.items, plan)


def whole_rows(plan: PhasePlan) -> PhasePlan:
    ones = np.ones_like(plan.span)
    group = plan.rank // plan.span[plan.microbatch]
    return dataclasses.replace(plan, capacity=plan.capacity * plan.span, span=ones, rank=group)


def shared_rows(
    seed: int, spans: tuple[int, ...], parts: int = 1, examples: int = 72
) -> SharedRows:
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
    made = shared_rows(1, spans, parts)
    dealt, whole = made.fill(), made.fill(whole=True)
    assert sorted(dealt.failures) == sorted(whole.failures) != []
    for phase in FOUR:
        plan = made.case.plan.phases[phase]
        assert dealt.spans[phase] == tuple(plan.span) and set(plan.span) == set(spans)
        for row, before, span in zip(
            dealt.rows[phase], whole.rows[phase], plan.span.tolist(), strict=True
        ):
            groups = 4 // span
            assert {len(array) for array in row.values() if not isinstance(array, dict)} == {groups}
            assert row["tiles"]["query_spans"].shape[:2] == (groups, span * parts)
            if phase == "language":
                assert ("arrived" in row) == (span > 1)
                np.testing.assert_array_equal(row["sources"], before["sources"][:groups])
                for group, order in enumerate(row["order"]):
                    assert sorted(order) == list(range(64))
                    for name in ("tokens", "targets", "segments", "positions", "groups"):
                        np.testing.assert_array_equal(row[name][group], before[name][group][order])
            else:
                for name in ("valid", "failed"):
                    np.testing.assert_array_equal(row[name], before[name][:groups])
                tokens = row["valid"].shape[1]
                for group, places in enumerate(row["places"]):
                    assert sorted(places) == list(range(tokens))
                    for name in ("features", "segments", "positions"):
                        by_token = row[name][group].reshape(tokens, -1)[places]
                        expected = before[name][group].reshape(tokens, -1)
                        np.testing.assert_array_equal(by_token, expected)


def test_a_host_may_hold_no_rank_of_rows_that_others_share():
    nowhere: dict[str, tuple[int, ...]] = dict.fromkeys(FOUR, ())
    local = LocalRanks(nowhere | {"audio": (0, 1)}, ALL_FOUR.exchange)
    step = shared_rows(1, (2,)).fill(local)
    held = {phase: {len(row["segments"]) for row in rows} for phase, rows in step.rows.items()}
    assert held == {"vision": {0}, "audio": {1}, "language": {0}}


@pytest.mark.parametrize("spans", [(2,), (4,), (4, 2, 1)])
def test_media_tokens_of_shared_rows_are_those_of_the_rank_that_owns_their_slot(spans):
    made = shared_rows(2, spans)
    case = made.case
    plan = case.plan.phases["language"]
    rows = made.fill().rows["language"]
    expected = [np.full((4 // span, 64), -1) for span in plan.span.tolist()]
    pieces = 0
    for encoder, route in case.plan.routes.items():
        media = case.items.phases[encoder]
        pieces += len(route.item) - len(media.length)
        for n, skipped, tokens, arrival in zip(
            route.item, route.skipped, route.tokens, route.arrival, strict=True
        ):
            item = media.example[n]
            m = plan.microbatch[item]
            first = plan.offset[item] + media.slot[n] + skipped
            group = plan.rank[item] // plan.span[m]
            expected[m][group, first : first + tokens] = arrival + np.arange(tokens)
    assert pieces > 0  # media on both sides of a cut
    for row, span, arrived in zip(rows, plan.span.tolist(), expected, strict=True):
        if span > 1:
            np.testing.assert_array_equal(row["arrived"], arrived)
        dealt = np.take_along_axis(arrived, row["order"], axis=1)
        np.testing.assert_array_equal(row["media"], dealt)


def test_hosts_of_one_group_fill_the_same_whole_row():
    """And of these only the one with the first rank tells of items that did not load."""
    made = shared_rows(3, (4, 2, 1))
    everywhere = made.fill()
    hosts = [(0,), (1, 2), (3,)]
    failures: list[str] = []
    for ranks in hosts:
        local = LocalRanks({phase: ranks for phase in FOUR}, {phase: () for phase in MODALITIES})
        step = made.fill(local)
        failures += step.failures
        for phase in FOUR:
            for row, full, span in zip(
                step.rows[phase], everywhere.rows[phase], step.spans[phase], strict=True
            ):
                groups = sorted({rank // span for rank in ranks})
                assert row.keys() == full.keys()
                for name in full.keys() - {"tiles"}:
                    np.testing.assert_array_equal(row[name], full[name][groups], err_msg=name)
                for name, table in full["tiles"].items():
                    np.testing.assert_array_equal(row["tiles"][name], table[groups])
    assert sorted(failures) == sorted(everywhere.failures) != []


def test_an_item_that_reaches_beyond_a_shared_row_is_refused():
    made = shared_rows(2, (2,))
    vision = made.case.plan.phases["vision"]
    late = dataclasses.replace(vision, offset=vision.offset + 60)
    plan = dataclasses.replace(made.case.plan, phases=made.case.plan.phases | {"vision": late})
    with pytest.raises(MisalignmentError, match=r"ends at slot .* of a row of 64"):
        dataclasses.replace(made, case=dataclasses.replace(made.case, plan=plan)).fill()


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
    """The same plan over a corpus whose first media item has changed since."""
    number, example = next(
        (i, e) for i, e in case.corpus.examples.items() if i in case.examples and e.media
    )
    changed = dataclasses.replace(example, media=change(example.media))
    return dataclasses.replace(case, corpus=FakeCorpus({**case.corpus.examples, number: changed}))


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
    number = int(case.examples[0])
    example = case.corpus.examples[number]
    longer = dataclasses.replace(example, tokens=np.append(example.tokens, 1))
    with pytest.raises(
        MisalignmentError, match=rf"has {len(longer.tokens)} tokens.*for {len(example.tokens)}"
    ):
        dataclasses.replace(
            case, corpus=FakeCorpus({**case.corpus.examples, number: longer})
        ).fill()


def test_plans_that_do_not_fit_are_refused():
    case = make_case(2)
    vision = case.plan.phases["vision"]
    late = dataclasses.replace(vision, offset=vision.offset + 28)
    with pytest.raises(MisalignmentError, match=r"ends at slot .* of a row of 32"):
        dataclasses.replace(
            case, plan=dataclasses.replace(case.plan, phases={**case.plan.phases, "vision": late})
        ).fill()
    odd = dataclasses.replace(vision, offset=vision.offset + 1)
    with pytest.raises(MisalignmentError, match="cuts a language token of 4"):
        dataclasses.replace(
            case, plan=dataclasses.replace(case.plan, phases={**case.plan.phases, "vision": odd})
        ).fill()
