"""Row capacities: no worse than what a plain search finds, and with clear errors
where the config is wrong."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import BatchItems, PhaseItems, PhaseSpec, RowClass, row_classes
from jaxmllm.balance.rows.assign import assign
from jaxmllm.balance.rows.row_counts import by_capacity, row_counts, row_needs
from jaxmllm.balance.sizes.capacities import (
    _Candidates,
    _fewest_slots,
    _Judge,
    _load_shares,
    _with_more,
)
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import CAPACITY_SEARCH, Alignment, SizingInputs
from jaxmllm.balance.sizes.loads import loads_of
from jaxmllm.balance.statistics import phase_statistics, step_statistics
from jaxmllm.balance.step_plan import place_items, plan_step
from jaxmllm.config.schema import BalanceConfig, ConfigError, PhaseConfig
from jaxmllm.phases import decoder_phase
from jaxmllm.tools.workload import generate, make_spec
from tests.balance.sizes.sample_inputs import (
    ALIGNMENT,
    LONGEST,
    PER_TOKEN,
    grids_of,
    inputs_of,
)


@pytest.mark.slow
def test_measured_times_take_the_place_of_flops_and_weigh_rows(make):
    """A price per row makes rows fewer."""
    samples = [make.batch(k, 120) for k in range(2)]
    config = PhaseConfig(max_capacity=8192)
    inputs = inputs_of(2, vision=config, audio=config, language=config)

    def chosen(row):
        timed = [
            dataclasses.replace(phase_inputs, time=PhaseTime(ItemCost(1000, 3), row))
            for phase_inputs in inputs
        ]
        return choose_sizes(samples, timed, grids_of(make, 2), BalanceConfig())

    def microbatches(spec):
        return sum(plan_step(batch, spec).statistics["vision/microbatches"] for batch in samples)

    plain = choose_sizes(samples, inputs, grids_of(make, 2), BalanceConfig())
    timed = chosen(0)
    # Measured times that equal the FLOPs, and a price of zero per row, must not change the sizes.
    for name, phase in plain.phases.items():
        assert timed.phases[name] == dataclasses.replace(phase, model_flops=ItemCost(1000, 3))
    assert microbatches(chosen(10**9)) < microbatches(chosen(1))


def test_one_class_is_as_good_as_a_search_over_all_multiples(make):
    """Every legal capacity is tried; the chosen one may be at most 2 % worse by the
    objective of the search."""
    samples = [make.batch(k, 24) for k in range(8)]
    config = PhaseConfig(row_classes=1, max_capacity=2048, max_segments=1000)
    inputs = inputs_of(2, vision=config)
    spec = choose_sizes(samples, inputs, grids_of(make, 2), BalanceConfig()).phases["vision"]

    def score(capacity: int) -> float:
        """Slots of all rows, and the least overhead per row in units of a rank's
        load, over all samples."""
        total = 0.0
        for batch in samples:
            items = batch.phases["vision"]
            rows = assign(
                dataclasses.replace(spec, classes=row_classes((capacity,))), items
            ).microbatches
            total += rows * (
                capacity + CAPACITY_SEARCH.least_overhead * -(-items.length.sum() // 2)
            )
        return total

    lowest_score = min(score(capacity) for capacity in range(512, 2049, ALIGNMENT))
    assert score(spec.capacities[0]) <= 1.02 * lowest_score


def test_more_classes_waste_less(make):
    """The fill of audio rows grows with the number of classes, up to chance of one percent."""
    samples = [make.batch(k, 64) for k in range(16)]
    fill = []
    for classes in (1, 2, 3):
        configs = dict.fromkeys(PER_TOKEN, PhaseConfig(row_classes=classes))
        spec = choose_sizes(samples, inputs_of(8, **configs), grids_of(make, 8), BalanceConfig())
        plans = [plan_step(batch, spec) for batch in samples]
        slots = sum(int(plan.phases["audio"].capacity.sum()) for plan in plans)
        fill.append(sum(batch.phases["audio"].length.sum() for batch in samples) / slots / 8)
    assert fill[0] < fill[1] <= fill[2] + 0.01
    assert fill[2] > 0.85


def with_longest(batch, phase: str, length: int):
    """The batch with the first item of a phase made `length` slots long."""
    items = batch.phases[phase]
    lengths = items.length.copy()
    lengths[0] = length
    items = dataclasses.replace(items, length=lengths, real=lengths)
    return dataclasses.replace(batch, phases=batch.phases | {phase: items})


def statistics_of(plan, batch, spec):
    """Statistics of all phases of a plan."""
    statistics = {}
    for name, phase in spec.phases.items():
        statistics |= phase_statistics(plan[name], batch.phases[name], phase)
    return statistics


def test_rows_that_ranks_share_are_chosen_where_one_item_would_bound_the_step():
    """On eight ranks with four examples each, the longest item is far more than a
    rank's share of the step."""
    samples = [generate([0, n], 32) for n in range(12)]
    fresh = [generate([1, n], 32) for n in range(8)]
    over_ideal = {}
    for spans in ((1,), (1, 2, 4)):
        spec = make_spec(8, samples, row_classes=3, spans=spans)
        assert all(row_class.span in spans for row_class in spec.phases["vision"].classes)
        plans = [place_items(batch, spec.phases, {}, "phases") for batch in fresh]
        over_ideal[spans] = np.mean(
            [
                step_statistics(statistics_of(plan, batch, spec), spec.phases)["step/over_ideal"]
                for plan, batch in zip(plans, fresh, strict=True)
            ]
        )
    # Without sharing, the longest item alone bounds the step at over 1.5 times the ideal.
    assert over_ideal[1,] > 1.5
    assert over_ideal[1, 2, 4] < 1.25


@pytest.mark.slow
def test_a_handful_of_examples_gain_by_more_than_three_classes():
    """`auto` takes more classes only where the step gains by them: not with 32 examples, nor for
    audio clips, which are a hundredth of a step."""

    def spec_of(examples: int, row_classes: int | Literal["auto"], phase="language") -> PhaseSpec:
        samples = [generate([0, n], examples) for n in range(64)]
        return make_spec(1, samples, row_classes=row_classes).phases[phase]

    def waste(spec: PhaseSpec, examples: int) -> float:
        fresh = [generate([1, n], examples).phases["language"] for n in range(64)]
        slots = sum(int(assign(spec, items).capacity.sum()) for items in fresh)
        return slots / sum(int(items.length.sum()) for items in fresh) - 1

    three_classes = spec_of(4, 3)
    auto_classes = spec_of(4, "auto")
    assert (len(three_classes.classes), len(auto_classes.classes)) == (3, 6)
    assert waste(auto_classes, 4) < 0.6 * waste(three_classes, 4)
    assert spec_of(32, "auto") == spec_of(32, 3)
    assert spec_of(4, "auto", "audio") == spec_of(4, 3, "audio")


@pytest.mark.parametrize(
    ("costs", "classes"),
    [
        ((100.0, 99.8, 98.5, 98.4), 5),  # the fourth saves too little, but enough with the fifth
        ((100.0, 99.8, 99.6, 97.0), 3),
        ((100.0, 99.0, 98.0, 97.0), 6),
    ],
)
def test_more_classes_have_to_save_enough_of_a_step(costs, classes):
    """Each further class must save half a percent. `costs` belong to sets of
    three to six classes."""
    sets = [
        tuple(RowClass(64 * n, 1) for n in range(class_count, 0, -1))
        for class_count in (3, 4, 5, 6)
    ]
    expected = dict(zip(sets, costs, strict=True))
    judge = SimpleNamespace(
        least=1.0,
        expected=lambda classes, step: expected[classes],
        best=lambda sets: min(sets, key=expected.__getitem__),
    )
    candidates = SimpleNamespace(
        bound=0.0,  # a search from scratch finds nothing better
        with_one_moved=lambda classes: [],
        with_one_more=lambda classes: [s for s in sets if len(s) == len(classes) + 1],
    )
    assert len(_with_more(sets[0], candidates, judge, share=1.0)) == classes


def test_a_set_with_one_class_moved_or_one_more_holds_all_items():
    samples = [generate([0, n], 24) for n in range(6)]
    inputs = shared_rows(row_classes=3)
    candidates = _Candidates(_Judge(inputs, loads_of(samples, inputs, {}, [None] * 6)), 8)
    classes = max(candidates.best(), key=len)
    moved = candidates.with_one_moved(classes)
    enlarged = candidates.with_one_more(classes)
    assert moved and enlarged
    assert all(len(row_set) == 3 and len({*row_set} - {*classes}) == 1 for row_set in moved)
    assert all(len(row_set) == 4 and {*row_set} > {*classes} for row_set in enlarged)
    for row_set in moved + enlarged:
        slots = [row_class.slots for row_class in row_set]
        assert slots == sorted({*slots}, reverse=True)
        assert slots[0] >= inputs.longest
        assert max(row_class.capacity for row_class in row_set) <= inputs.largest_capacity


def test_a_first_class_is_fitted_to_those_after_it():
    """A fifth of the texts have ten times the tokens of the others, and the only
    rank takes eight texts."""

    def batch(seed: int) -> BatchItems:
        random = np.random.default_rng(seed)
        lengths = np.where(
            random.random(8) < 0.2, random.normal(2000, 100, 8), random.normal(200, 30, 8)
        )
        return texts(lengths.clip(16, 9000).astype(int))

    inputs = SizingInputs(
        *(decoder_phase(), 1, Alignment(128, small=64, smallest=32), 1, 9000, ItemCost(1000, 0)),
        PhaseConfig(row_classes=3),
    )
    spec = choose_sizes([batch(n) for n in range(64)], [inputs], {}, BalanceConfig())
    rows = spec.phases["language"]
    fresh = [batch(n).phases["language"] for n in range(100, 200)]
    slots = sum(int(assign(rows, items).capacity.sum()) for items in fresh)
    assert slots < 1.07 * sum(int(items.length.sum()) for items in fresh)  # 1.075 without the fit


SHORT = {"vision": 64, "audio": 64}


def test_rows_that_save_nothing_are_not_shared(make):
    """Many short items balance well in rows of one rank, and gathering costs a
    little, so span 1 wins."""
    samples = [make.batch(k, 128, longest=64) for k in range(6)]
    inputs = [
        dataclasses.replace(
            phase_inputs,
            spans=(1, 2, 4),
            longest=SHORT.get(phase_inputs.name, LONGEST[phase_inputs.name]),
        )
        for phase_inputs in inputs_of(4, vision=PhaseConfig(row_classes=2))
    ]
    spec = choose_sizes(samples, inputs, grids_of(make, 4), BalanceConfig())
    assert all(row_class.span == 1 for row_class in spec.phases["vision"].classes)


def shared_rows(row_classes: int) -> SizingInputs:
    """Inputs of texts of up to 10,256 tokens on 8 ranks, any number of which may share a row."""
    return SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, 10_256, ItemCost(1000, 1)),
        *(PhaseConfig(row_classes=row_classes), None, (1, 2, 4, 8)),
    )


def test_a_high_price_of_gathering_keeps_rows_apart():
    """`gathered` counts the slots that ranks receive from the others of their row."""
    samples = [generate([0, n], 24) for n in range(6)]

    def gathered(cost: int) -> int:
        inputs = dataclasses.replace(shared_rows(row_classes=2), gather_cost=cost)
        spec = choose_sizes(samples, [inputs], {}, BalanceConfig())
        plan = assign(spec.phases["language"], samples[0].phases["language"])
        return int((plan.capacity * (plan.span - 1)).sum())

    assert gathered(0) > 0
    assert gathered(100_000) == 0


def test_a_high_price_of_microbatches_makes_fewer_of_them():
    samples = [generate([0, n], 24) for n in range(6)]

    def microbatches(cost: int) -> int:
        inputs = dataclasses.replace(shared_rows(row_classes=3), microbatch_cost=cost)
        spec = choose_sizes(samples, [inputs], {}, BalanceConfig()).phases["language"]
        return sum(
            assign(spec, batch.phases["language"]).microbatches
            for batch in [*samples, generate([0, 6], 24), generate([0, 7], 24)]
        )

    assert microbatches(0) > microbatches(10**8) >= 8


def texts(tokens: np.ndarray) -> BatchItems:
    """A batch of texts of the given lengths."""
    examples = len(tokens)
    items = PhaseItems(
        *(tokens, tokens, np.arange(examples, dtype=np.int32)),
        *(np.zeros(examples, np.int32), np.zeros(examples, np.int32)),
    )
    return BatchItems(np.arange(examples), examples, {"language": items})


def test_spans_leave_the_rows_that_are_best_without_them():
    """Items of one length fill rows of one rank best, so allowing wider spans must
    not change the classes."""
    samples = [texts(np.full(96, 2000))] * 8
    chosen = [
        choose_sizes(
            samples,
            [
                SizingInputs(
                    *(decoder_phase(), 12, Alignment(128), 1, 2000, ItemCost(1000, 1)),
                    *(PhaseConfig(row_classes=3), None, spans),
                )
            ],
            {},
            BalanceConfig(),
        )
        .phases["language"]
        .classes
        for spans in ((1,), (1, 2, 4))
    ]
    assert chosen[0] == chosen[1]


def test_given_capacities_have_every_span():
    """Each capacity of the config becomes one class per allowed span, since the config
    says nothing of spans."""
    config = PhaseConfig(capacities=(128, 512))
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, 4000, ItemCost(1000, 1), config, None, (1, 8))
    )
    classes = choose_sizes([generate(0, 64)], [inputs], {}, BalanceConfig()).phases["language"]
    assert classes.classes == ((512, 8), (128, 8), (512, 1), (128, 1))
    with pytest.raises(ConfigError, match=r"512 on each of 8 ranks, is too small.*raise it to 640"):
        choose_sizes(
            [generate(0, 64)], [dataclasses.replace(inputs, longest=5000)], {}, BalanceConfig()
        )


@pytest.mark.parametrize("spans", [(1,), (1, 8), (8,)])
def test_classes_have_whole_blocks_of_their_span(spans):
    """Texts of 1,000 tokens, shared by 8 ranks or not: shared rows have whole blocks
    of 64, others of 128."""
    samples = [texts(np.full(8, 1000))] * 4
    inputs = SizingInputs(
        *(decoder_phase(), 64, Alignment(128, small=64), 1, 1000, ItemCost(1000, 1)),
        *(PhaseConfig(row_classes=3), None, spans),
    )
    chosen = choose_sizes(samples, [inputs], {}, BalanceConfig()).phases["language"].classes
    assert chosen[0] == ((1024, 1) if spans == (1,) else (128, 8))
    assert all(row.capacity % (64 if row.span > 1 else 128) == 0 for row in chosen)


def test_no_class_is_over_the_largest_capacity():
    """Where ranks share the longest rows, rows of fewer ranks must not be larger, either."""
    samples = [generate([2, n], 64) for n in range(4)]
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, 20_000, ItemCost(1000, 1)),
        *(PhaseConfig(row_classes=2, max_capacity=3072), None, (1, 8)),
    )
    judge = _Judge(inputs, loads_of(samples, inputs, {}, [None] * len(samples)))
    assert judge.median > 3072
    classes = {row_class for classes in _Candidates(judge, 8).sets for row_class in classes}
    assert {row_class.span for row_class in classes} == {1, 8}
    assert max(row_class.capacity for row_class in classes) <= 3072


@pytest.mark.parametrize(
    ("longest", "spans", "fitting", "given", "largest"),
    [
        (20_000, (1,), None, "auto", 80_000),  # four of the longest items, in whole blocks
        (20_100, (1,), None, "auto", 80_384),
        # Four eighths of the longest item are less than the usual minimum.
        (20_000, (1, 2, 8), None, "auto", 32_768),
        (100_000, (1, 2, 8), None, "auto", 49_920),
        (500, (1,), None, "auto", 32_768),
        (20_000, (1,), 1 << 15, "auto", 1 << 15),  # what memory holds, if that is less
        (20_000, (1,), 1 << 20, "auto", 80_000),
        (20_000, (1,), 1 << 10, 40_000, 39_936),  # a number of the config is taken as it is
    ],
)
def test_the_largest_capacity_follows_lengths_and_memory(longest, spans, fitting, given, largest):
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, longest, ItemCost(1000, 1)),
        *(PhaseConfig(max_capacity=given), None, spans),
        fitting=fitting,
    )
    assert inputs.largest_capacity == largest


def test_a_class_may_hold_most_loads_in_one_row():
    """Made-up loads of 32 batches of pictures on 8 ranks: a row that holds 80 % of them is a
    candidate, although it is no simple part of the largest load."""
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(64), 1, 1020, ItemCost(1000, 1)), PhaseConfig()
    )
    samples = [generate([0, 0], 8)]
    judge = _Judge(inputs, loads_of(samples, inputs, {}, [None]))
    judge.slots = np.array([54, *[300] * 20, *[560] * 9, 640, 844])
    judge.median = float(np.median(judge.slots))
    assert {576, 640} <= _load_shares(judge)


def test_a_class_lies_between_the_load_and_the_longest_item():
    """One rare item has ten times the load of a rank; the steps without it keep rows about
    as small as their load."""
    samples = [generate([0, n], 64) for n in range(16)]
    samples[3] = with_longest(samples[3], "language", 60_000)
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, 60_000, ItemCost(1000, 1)),
        PhaseConfig(row_classes=2, max_capacity=65_536),
    )
    spec = choose_sizes(samples, [inputs], {}, BalanceConfig()).phases["language"]
    loads = [int(batch.phases["language"].length.sum()) / 8 for batch in samples]
    slots = [int(assign(spec, batch.phases["language"]).capacity.sum()) for batch in samples]
    assert slots[3] >= 60_000
    assert np.mean(np.delete(slots, 3) / np.delete(loads, 3)) < 1.5


def test_what_memory_does_not_hold_is_said_as_such():
    inputs = SizingInputs(
        *(decoder_phase(), 8, Alignment(128), 1, 9000, ItemCost(1000, 1), PhaseConfig()),
        spans=(1, 2),
        fitting=4096,
    )
    message = r"max_capacity \(auto\): .*9000 slots.* a row of 4608 on each of 2 ranks.*hold 4096;.*to 4608"
    with pytest.raises(ConfigError, match=message):
        choose_sizes([generate(0, 64)], [inputs], {}, BalanceConfig())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.sampled_from([((16, 2), (12, 2), (20, 1)), ((8, 8), (32, 1), (4, 2)), ((40, 2), (9, 1))]),
)
def test_the_bound_is_the_first_set_that_meets_the_needs(lengths, classes):
    """`_fewest_slots` against `row_counts`, which lists sets by their number of slots."""
    ranks = 8
    classes = tuple(RowClass(*row_class) for row_class in classes)
    length = np.minimum(np.array(lengths, np.int64), classes[0].slots)
    spec = PhaseSpec(decoder_phase(), ranks, classes, len(length), 1, ItemCost(1, 0))
    needs = row_needs(spec, length, np.zeros(len(length), np.int64), 1)
    first_set = next(row_counts(classes, ranks, needs))
    capacity = np.array([row_class.capacity for row_class in classes])
    rows = np.array([ranks // row_class.span for row_class in classes])
    order = np.array(by_capacity(classes))
    fewest = _fewest_slots(capacity, rows, order, needs.slots[None], needs.rows[None])[0]
    assert fewest @ capacity == first_set @ capacity and fewest.sum() == first_set.sum()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            PhaseConfig(capacities=(500,)),
            r"phases\.vision\.capacities: 500 is not a multiple of 64.*use 512",
        ),
        (
            PhaseConfig(capacities=(256, 64)),
            r"phases\.vision\.capacities.*256, is too small.*512 slots",
        ),
        (
            PhaseConfig(capacities=(1 << 31,)),
            r"phases\.vision\.capacities: 2147483648 slots.*more than",
        ),
        (PhaseConfig(capacities=(512, 512)), r"phases\.vision\.capacities.*different"),
        (
            PhaseConfig(max_capacity=500),
            r"phases\.vision\.max_capacity = 500 is too small.*raise it to 512",
        ),
    ],
)
def test_errors_name_the_key(make, config, message):
    with pytest.raises(ConfigError, match=message):
        choose_sizes(
            [make.batch(0, 8)], inputs_of(2, vision=config), grids_of(make, 2), BalanceConfig()
        )
