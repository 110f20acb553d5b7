"""The pipeline as a function of (seed, step): the same elements however they are asked for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhaseItems,
    PhaseSpec,
    PlanSpec,
    RouteSpec,
    row_classes,
)
from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.batches import (
    Segment,
    batch_examples,
    continued_steps,
    evaluation_order,
    evaluation_steps,
    example_order,
    sample_batches,
    source_batches,
    steps,
    taken_examples,
)
from jaxmllm.data.corpus import Corpus as RealCorpus
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.reference import File, MediaError
from jaxmllm.data.rows.fill import HostStep, LocalRanks, StepFiller
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.data.text.render import MediaSpan, Rendered
from jaxmllm.data.text.tokenizers import ByteTokenizer
from jaxmllm.data.workers.reader import Loader
from jaxmllm.phases import decoder_phase, encoder_phase
from jaxmllm.row_format import RowFormat
from tests.data.workers.elements import Imported

SQUARES = RowFormat(2, np.dtype(np.float32), slots_per_token=4, stride=1, alignment=4, axes=(1, 2))


@dataclass(frozen=True)
class Squares:
    """A modality whose item of shape (tokens, number, 1) holds its number in every slot.

    Each seventh item is broken."""

    name: str = "vision"
    format: RowFormat = SQUARES
    generated = False

    def length(self, shape):
        return shape[0] * 4

    def load(self, media, shape):
        if shape[1] % 7 == 0:
            raise MediaError("decode", f"{media}: broken body")
        return np.full((self.length(shape), 2), shape[1], np.float32)

    def positions(self, shape):
        return np.zeros((self.length(shape), 3), np.int32)

    def apart(self, shape):
        return None

    def real_slots(self, shape):
        return np.ones(self.length(shape), np.bool_)


@dataclass(frozen=True)
class Corpus:
    """A corpus whose example i has 6 + i % 9 tokens, and i % 3 media items of one token each."""

    members: tuple[tuple[str, float, np.ndarray], ...]
    modalities: dict[str, Squares] = field(default_factory=lambda: {"vision": Squares()})

    def example(self, i):
        """Example i, whose tokens and media tell its number."""
        tokens = np.full(6 + i % 9, i + 1, np.int32)
        media = tuple(
            MediaSpan("vision", File(Path(f"{i}-{k}")), (1, 2 * i + k + 1, 1), 1 + k, 1)
            for k in range(i % 3)
        )
        return Rendered(
            tokens, tokens - 1, np.stack([np.arange(len(tokens), dtype=np.int32)] * 3, 1), media
        )

    def source_of(self, i):
        return next(n for n, (_, _, examples) in enumerate(self.members) if i in examples)

    def gather(self, examples):
        """The items of a batch, by phase."""
        rendered = [self.example(int(i)) for i in examples]
        lengths = np.array([len(r.tokens) for r in rendered], np.int64)
        media_counts = np.array([len(r.media) for r in rendered])
        slot = np.array([span.slot for r in rendered for span in r.media], np.int32)
        ones = np.ones(media_counts.sum(), np.int64)
        order = np.arange(len(rendered), dtype=np.int32)
        return BatchItems(
            examples,
            int(lengths.sum()),
            {
                "vision": PhaseItems(
                    4 * ones, 4 * ones, np.repeat(order, media_counts), ones.astype(np.int32), slot
                ),
                "language": PhaseItems(
                    lengths, lengths, order, lengths.astype(np.int32), np.zeros_like(order)
                ),
            },
        )


def make_corpus() -> Corpus:
    return Corpus((("many", 3.0, np.arange(0, 40)), ("few", 1.0, np.arange(40, 50))))


def make_filler(corpus: Corpus, ranks: tuple[int, ...] = (0, 1)) -> StepFiller:
    """A filler of rows on two ranks. This host fills only `ranks`."""
    grid = ExchangeGrid(np.array([[0], [1]], np.int32), np.array([[0], [1]], np.int32))
    spec = PlanSpec(
        {
            "vision": PhaseSpec(
                encoder_phase("vision"), 2, row_classes((16,)), 4, 4, ItemCost(10, 1)
            ),
            "language": PhaseSpec(
                decoder_phase(("vision",)), 2, row_classes((32,)), 8, 1, ItemCost(10, 1)
            ),
        },
        {"vision": RouteSpec(grid, encoder_pool=16, language_pool=64, pair_slots=8)},
    )
    local = LocalRanks({"vision": ranks, "language": ranks}, {"vision": ranks})
    return StepFiller(corpus, spec, local, AttentionSpec({"vision": 8, "language": 8}), threads=2)


def assert_equal_steps(one: HostStep, other: HostStep) -> None:
    """Compares two steps in all that reaches the device."""
    assert (one.step, one.targets, one.failures) == (other.step, other.targets, other.failures)
    assert (one.capacities, one.pools, one.pool_offsets) == (
        other.capacities,
        other.pools,
        other.pool_offsets,
    )
    np.testing.assert_array_equal(one.examples, other.examples)
    assert one.rows.keys() == other.rows.keys() and one.rounds.keys() == other.rounds.keys()
    for phase in one.rows:
        for arrays, other_arrays in zip(one.rows[phase], other.rows[phase], strict=True):
            assert arrays.keys() == other_arrays.keys()
            jax.tree.map(
                partial(np.testing.assert_array_equal, err_msg=phase, strict=True),
                arrays,
                other_arrays,
            )
    for phase in one.rounds:
        for arrays, other_arrays in zip(one.rounds[phase], other.rounds[phase], strict=True):
            assert (arrays.source, arrays.target) == (other_arrays.source, other_arrays.target)
            for name in ("gather_forward", "gather_backward"):
                np.testing.assert_array_equal(getattr(arrays, name), getattr(other_arrays, name))
            for hop, other_hop in zip(
                (*arrays.send_forward, *arrays.send_backward),
                (*other_arrays.send_forward, *other_arrays.send_backward),
                strict=True,
            ):
                np.testing.assert_array_equal(hop.index, other_hop.index)


def read(dataset, start: int, stop: int, workers: int = 0, prefetch: int = 2) -> list[HostStep]:
    with Loader([dataset], workers, prefetch) as loader:
        return list(loader.read(dataset, start, stop))


def test_step_k_is_the_same_from_any_start_and_any_number_of_workers():
    reference = steps(make_filler(make_corpus()), batch_size=8, seed=3)
    dataset = steps(make_filler(make_corpus()), batch_size=8, seed=3)
    for start, stop, workers, prefetch in [(0, 5, 0, 3), (2, 6, 2, 1), (4, 5, 0, 1)]:
        read_steps = read(dataset, start, stop, workers, prefetch)
        assert [step.step for step in read_steps] == list(range(start, stop))
        for step in read_steps:
            assert_equal_steps(step, reference[step.step])
    assert read(dataset, 4, 4) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_reaches_the_caller_as_itself(workers):
    filler = make_filler(Corpus((("long", 1.0, np.arange(8)),)))
    # The corpus has examples of up to 14 tokens, and rows are 8 slots long.
    short_rows = PhaseSpec(decoder_phase(("vision",)), 2, row_classes((8,)), 8, 1, ItemCost(10, 1))
    short_filler = replace(
        filler, spec=replace(filler.spec, phases={**filler.spec.phases, "language": short_rows})
    )
    with pytest.raises(ValueError, match="language") as caught:
        read(steps(short_filler, 8, seed=0), 0, 2, workers)
    assert "\n" not in str(caught.value)


def test_workers_import_neither_jax_nor_grain(pictures):
    dataset = steps(fitting_filler(pictures), 10, seed=0)
    (packages,) = read(replace(dataset, filler=Imported(dataset.filler)), 0, 1, workers=1)
    assert {"jaxmllm", "numpy", "PIL"} <= packages
    assert not packages & {"jax", "jaxlib", "flax", "grain", "orbax"}


def test_hosts_plan_alike_and_fill_their_own_rows():
    corpus = make_corpus()
    full_step = steps(make_filler(corpus), 8, seed=1)[9]
    for rank in (0, 1):
        local_step = steps(make_filler(corpus, (rank,)), 8, seed=1)[9]
        np.testing.assert_array_equal(local_step.examples, full_step.examples)
        assert local_step.capacities == full_step.capacities
        for phase in full_step.rows:
            for row, full_row in zip(local_step.rows[phase], full_step.rows[phase], strict=True):
                np.testing.assert_array_equal(
                    row["segments"], full_row["segments"][rank : rank + 1]
                )


def test_a_step_holds_its_examples_once_each():
    corpus = make_corpus()
    dataset = steps(make_filler(corpus), 8, seed=1)
    for step_index in (0, 31):
        step = dataset[step_index]
        # Tokens of example i are i + 1, so that they tell which examples a step holds.
        tokens = Counter(
            int(t) - 1 for row in step.rows["language"] for t in row["tokens"].ravel() if t
        )
        example_counts = Counter(step.examples.tolist())
        assert tokens == Counter({i: count * (6 + i % 9) for i, count in example_counts.items()})
        media = [2 * i + k + 1 for i in step.examples.tolist() for k in range(i % 3)]
        features = np.concatenate([row["features"][..., 0].ravel() for row in step.rows["vision"]])
        assert Counter(features[features > 0].astype(int).tolist()) == Counter(
            4 * [m for m in media if m % 7]
        )
        assert len(step.failures) == sum(m % 7 == 0 for m in media)
        arrived = sum(int((row["media"] >= 0).sum()) for row in step.rows["language"])
        assert (
            arrived
            == len(media)
            == sum(int((round_.gather_forward >= 0).sum()) for round_ in step.rounds["vision"])
        )


def test_each_source_is_a_new_permutation_every_epoch():
    (_, _, numbers), epochs = make_corpus().members[0], []
    order = example_order(make_corpus().members[:1], seed=5)
    for epoch in range(3):
        epoch_examples = [int(order[i]) for i in range(epoch * 40, epoch * 40 + 40)]
        assert sorted(epoch_examples) == numbers.tolist()
        epochs.append(tuple(epoch_examples))
    assert len(set(epochs)) == 3 and tuple(numbers) not in epochs
    other_order = example_order(make_corpus().members[:1], seed=6)
    # Seeds do not replay each other's epochs.
    assert tuple(int(other_order[i]) for i in range(40)) not in epochs


def test_batches_of_one_example_have_a_length_that_python_can_count():
    corpus = make_corpus()
    single = steps(make_filler(corpus), 1, seed=3)
    order = example_order(corpus.members, 3)
    assert len(single) > 1 << 50
    assert [step.examples.tolist() for step in read(single, 2, 5)] == [
        [order[k]] for k in range(2, 5)
    ]


def test_mixture_follows_the_weights_and_loses_nothing():
    order = example_order(make_corpus().members, seed=0)
    examples = np.array([order[i] for i in range(1600)])
    # Weights of 3 to 1 give the first source three quarters of the examples.
    assert abs((examples < 40).mean() - 0.75) < 0.01
    few_examples = examples[examples >= 40]
    for epoch in range(len(few_examples) // 10):
        assert sorted(few_examples[10 * epoch : 10 * epoch + 10]) == list(range(40, 50))


# ---------------------------------------------------------------------------- batch size and weights that change


def drawn(history: tuple[Segment, ...], stop: int) -> list[int]:
    """The examples of all steps up to `stop`, each from the segments known when its step was done."""
    corpus = make_corpus()
    examples = []
    filler = make_filler(corpus)
    for step in range(stop):
        known_segments = tuple(segment for segment in history if segment.step <= step)
        examples += (
            continued_steps(filler, corpus.members, 3, known_segments).examples(step).tolist()
        )
    return examples


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=3))
def test_another_batch_size_skips_and_repeats_nothing(changes):
    history = [Segment(0, 8, (3.0, 1.0))]
    step = 0
    for interval, size in changes:
        step += interval
        history.append(Segment(step, size, (3.0, 1.0)))
    examples = drawn(tuple(history), step + 3)
    order = example_order(make_corpus().members, 3)
    assert examples == [order[i] for i in range(len(examples))]


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=3
    )
)
def test_with_other_weights_every_source_goes_on_where_it_stands(changes):
    history = [Segment(0, 8, (3.0, 1.0))]
    step = 0
    for interval, size, weight in changes:
        step += interval
        history.append(Segment(step, size, (weight, 1.0)))
    examples = np.array(drawn(tuple(history), step + 4))
    for source_index, (name, _, numbers) in enumerate(make_corpus().members):
        single_members = (("", 1.0, np.zeros(1, np.int64)),) * source_index + (
            (name, 1.0, numbers),
        )
        # The order of this source alone, at its own number, because its seed depends on the number.
        order = example_order(single_members, 3)
        expected = [order[i] for i in range((source_index + 1) * len(examples) + 1)][
            source_index :: source_index + 1
        ]
        source_examples = examples[np.isin(examples, numbers)].tolist()
        assert source_examples == expected[: len(source_examples)]


def test_new_weights_are_those_of_the_mixture():
    history = (Segment(0, 8, (3.0, 1.0)), Segment(10, 8, (1.0, 3.0)))
    examples = np.array(drawn(history, 110))
    assert (
        abs((examples[:80] < 40).mean() - 0.75) < 0.05
        and abs((examples[80:] < 40).mean() - 0.25) < 0.02
    )


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (1.0, 200.0, 7.5), (0.3, 0.3, 0.4)])
def test_taken_examples_are_those_that_the_mixture_drew(weights):
    members = [
        (str(n), weight, np.arange(1000 * n, 1000 * n + 1000)) for n, weight in enumerate(weights)
    ]
    order = example_order(members, 0)
    source_numbers = np.array([order[i] // 1000 for i in range(400)])
    for count in (0, 1, 2, 17, 400):
        expected = [int((source_numbers[:count] == n).sum()) for n in range(len(weights))]
        assert taken_examples(weights, count) == expected


def test_steps_before_a_segment_are_not_its_own():
    corpus = make_corpus()
    history = (Segment(0, 8, (3.0, 1.0)), Segment(5, 1, (1.0, 1.0)))
    steps_ = continued_steps(make_filler(corpus), corpus.members, 3, history)
    with pytest.raises(IndexError):
        steps_.examples(4)
    assert len(steps_.examples(5)) == 1 and len(steps_) > 1 << 50


def test_source_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"'empty' of data\.sources"):
        example_order((("empty", 1.0, np.zeros(0, np.int64)),), seed=0)


def test_examples_of_a_step_are_known_without_loading():
    corpus = make_corpus()
    order = example_order(corpus.members, seed=2)
    dataset = steps(make_filler(corpus), 8, seed=2)
    for step in (0, 1, 1_000_000):
        np.testing.assert_array_equal(batch_examples(order, 8, step), dataset[step].examples)
    batches = sample_batches(order, corpus, 8, 3)
    assert [b.examples.tolist() for b in batches] == [
        batch_examples(order, 8, k).tolist() for k in range(3)
    ]


def test_evaluation_visits_every_example_once():
    corpus = make_corpus()
    read_steps = read(evaluation_steps(make_filler(corpus), 16), 0, 4)
    assert [len(step.examples) for step in read_steps] == [16, 16, 16, 2]
    assert np.concatenate([step.examples for step in read_steps]).tolist() == list(range(50))
    assert sum(step.targets for step in read_steps) == sum(6 + i % 9 for i in range(50))
    dataset = evaluation_steps(make_filler(corpus), 16, limit=20)
    assert len(dataset) == 2
    limited = np.concatenate([dataset[k].examples for k in range(2)])
    # Sources keep their shares: 4 of 20 examples, as 10 of 50.
    assert len(set(limited.tolist())) == 20 and (limited >= 40).sum() == 4


def test_steps_beyond_a_finite_order_are_refused():
    order = evaluation_order(make_corpus().members)
    assert batch_examples(order, 16, 3).tolist() == [48, 49]
    with pytest.raises(IndexError, match="step 4 of 16 examples is outside an order of 50"):
        batch_examples(order, 16, 4)
    assert len(sample_batches(order, make_corpus(), 16, 99)) == 4


@pytest.fixture
def pictures(tmp_path):
    """A corpus of real files: ten examples over six pictures, the last of them cut in half."""
    rng = np.random.default_rng(0)
    for k in range(6):
        pixels = rng.integers(0, 255, (8 * (k % 3 + 1), 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
    body = (tmp_path / "5.png").read_bytes()
    (tmp_path / "5.png").write_bytes(body[: len(body) // 2])
    records = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": f"{i % 6}.png"},
                        {"type": "text", "text": "?"},
                    ],
                },
                {"role": "assistant", "content": "a" * (i + 1)},
            ]
        }
        for i in range(10)
    ]
    (tmp_path / "data.jsonl").write_text(
        "\n".join(map(json.dumps, records)) + "\n", encoding="utf-8"
    )
    source = SourceConfig(name="pictures", path=str(tmp_path / "data.jsonl"))
    images = Images(4, 2, 8 * 8, 64 * 64)
    return RealCorpus.open([source], ByteTokenizer(), {"vision": images}, progress=False)


def fitting_filler(pictures: RealCorpus) -> StepFiller:
    """The filler of make_filler with rows that hold the pictures and their texts."""
    filler = make_filler(pictures)
    phases = {
        "vision": replace(filler.spec.phases["vision"], classes=row_classes((32,)), max_segments=8),
        "language": replace(filler.spec.phases["language"], classes=row_classes((64,))),
    }
    return replace(filler, spec=replace(filler.spec, phases=phases))


def test_real_files_reach_the_rows_through_a_worker(pictures):
    (step,) = read(steps(fitting_filler(pictures), 10, seed=0), 0, 1, workers=1)
    assert sorted(step.examples.tolist()) == list(range(10))
    images = pictures.modalities["vision"]
    expected = []
    for example in step.examples.tolist():
        for span in pictures.example(example).media:
            if span.reference.path.name != "5.png":
                expected.append(images.load(span.reference, span.shape))
    loaded = []
    for row in step.rows["vision"]:
        tokens = np.repeat(row["valid"], images.format.slots_per_token, axis=1)
        loaded.append(row["features"][tokens])
        assert not row["features"][~tokens].any()
    expected = np.concatenate(expected)
    loaded = np.concatenate(loaded)
    # Rows are sorted on both sides, because packing changes where slots lie.
    np.testing.assert_array_equal(loaded[np.lexsort(loaded.T)], expected[np.lexsort(expected.T)])
    assert len(step.failures) == 1 and "5.png" in step.failures[0]
    assert sum(int(row["failed"].sum()) for row in step.rows["vision"]) == 1
    targets = np.concatenate([row["targets"][row["targets"] >= 0] for row in step.rows["language"]])
    assert (targets == ord("a")).sum() == sum(range(1, 11)) and len(targets) == step.targets


def test_batches_of_sources_hold_one_source_each():
    corpus = make_corpus()
    members = (("first", 0.9, np.arange(5)), ("second", 0.1, np.arange(5, 40)))
    first_batch, second_batch = source_batches(members, corpus, 16)
    assert len(first_batch.examples) == len(second_batch.examples) == 16
    assert first_batch.examples.max() < 5 <= second_batch.examples.min()
    assert source_batches(members[:1], corpus, 16) == []
