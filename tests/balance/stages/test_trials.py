"""Sizes of a pipeline that are tried on samples: full rows, as many chunks as pay, and the same
choice on every host."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxmllm.arrays import INT64_MAX
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.stages.chain_costs import ChainLayers
from jaxmllm.balance.stages.plan import graph_of, plan_pipeline, schedule_of
from jaxmllm.balance.stages.sizes import choose_pipeline
from jaxmllm.balance.stages.trial_choice import CHOICE
from jaxmllm.balance.stages.trial_search import _Best
from jaxmllm.balance.stages.trial_slots import Keeps, keeps_none
from jaxmllm.balance.stages.trials import Cut, Trials
from jaxmllm.config.schema import MOST_ROW_CLASSES, PhaseConfig, PipelineConfig
from sharding.pipeline.graph import Pool
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import lockstep
from tests.balance.stages.test_plan import (
    LONGEST,
    MODEL,
    TRAINED,
    batch,
    random_batch,
    sizes,
    sizing,
)

DEEP = MODEL.model_copy(
    update={
        "language": MODEL.language.model_copy(update={"layers": 24}),
        "vision": MODEL.vision.model_copy(update={"layers": 8}),
    }
)


def chosen(examples: int = 96, keeps: Keeps = keeps_none, **config):
    """Sizes of a model with layers enough for several chunks on each of four stages."""
    samples = [random_batch(seed, examples) for seed in range(6)]
    settings = PipelineConfig(**{"stages": 4} | config)
    return choose_pipeline(samples, sizing(2, DEEP), settings, DEEP, TRAINED, examples, keeps=keeps)


def trials(examples: int = 96, **config) -> Trials:
    """The trials by which `chosen` decides."""
    return Trials(
        [random_batch(seed, examples) for seed in range(6)],
        sizing(2, DEEP),
        PipelineConfig(**{"stages": 4} | config),
        lambda capacities, spans: ChainLayers(DEEP, TRAINED, capacities, {}, spans),
        examples,
    )


def fill(made, batch: BatchItems) -> dict[str, float]:
    """Share of real tokens in the slots of each phase, in the plan of one batch."""
    statistics = plan_pipeline(batch, made.spec, made.training).statistics
    return {name: statistics[f"{name}/real_token_fraction"] for name in made.spec.phases}


def cost(made, batches) -> float:
    """Cost of the plans of all batches, in the unit of the pipeline's statistics."""
    return sum(
        plan_pipeline(batch, made.spec, made.training).statistics["pipeline/cost"]
        for batch in batches
    )


def test_rows_are_full_and_steps_shorter_than_with_a_number_of_microbatches_for_each_stage():
    """The longest example is a quarter of what a replica holds, so 16 microbatches that could each
    hold it are mostly empty."""
    batches = [random_batch(100 + seed, 24) for seed in range(4)]
    automatic = chosen(24)
    by_number = chosen(24, microbatches=16)
    assert np.mean([fill(automatic, batch)["language"] for batch in batches]) > 0.7
    assert np.mean([fill(by_number, batch)["language"] for batch in batches]) < 0.4
    assert cost(automatic, batches) < 0.7 * cost(by_number, batches)


def test_rows_hold_the_longest_item_whatever_is_tried():
    tried = trials()
    for name, inputs in tried.inputs.items():
        capacities = tried.candidates(name, 8)
        assert capacities == sorted(set(capacities)) and capacities[0] >= inputs.longest
        assert all(capacity % inputs.alignment.slots == 0 for capacity in capacities)


def test_where_the_longest_example_is_rare_rows_have_several_classes():
    """The longest item of the data is four times as long as the longest of any sample."""
    samples = [random_batch(seed) for seed in range(4)]
    config = PipelineConfig(stages=2, layout="chain")

    def chosen_with(row_classes: int):
        """Sizes for data whose longest item is four times as long as the longest sample."""
        inputs = [
            replace(
                phase_inputs,
                longest=4 * phase_inputs.longest,
                config=PhaseConfig(row_classes=row_classes),
            )
            for phase_inputs in sizing(2)
        ]
        return choose_pipeline(samples, inputs, config, MODEL, TRAINED, 24)

    one_class = chosen_with(1)
    two_classes = chosen_with(2)
    largest, smaller = two_classes.spec.phases["language"].capacities
    assert largest >= 4 * LONGEST["language"] > smaller
    assert len(one_class.spec.phases["language"].capacities) == 1
    batches = [random_batch(100 + seed) for seed in range(3)]
    assert cost(two_classes, batches) < 0.9 * cost(one_class, batches)


def test_where_the_longest_example_is_far_longer_than_a_replica_holds_rows_are_still_full():
    """A replica has about 370 tokens of a step, and the longest example of the data has 6,144: an
    eighth of a row that holds that example would hold all of them twice."""
    samples = [random_batch(seed) for seed in range(4)]
    inputs = [
        replace(
            phase_inputs,
            longest=64 * phase_inputs.longest,
            config=PhaseConfig(row_classes=2),
        )
        for phase_inputs in sizing(2)
    ]
    config = PipelineConfig(stages=2, layout="chain")
    made = choose_pipeline(samples, inputs, config, MODEL, TRAINED, 24)
    largest, smaller = made.spec.phases["language"].capacities
    assert largest >= 64 * LONGEST["language"]
    assert smaller <= 3 * LONGEST["language"]
    batches = [random_batch(100 + seed) for seed in range(3)]
    assert np.mean([fill(made, batch)["language"] for batch in batches]) > 0.8


def test_where_rows_of_three_classes_are_a_fifth_empty_auto_adds_classes():
    """A batch of two texts of one length is one row, of the class that holds it; batches come in
    six lengths. The many texts of a larger batch fill rows of any class."""
    lengths = (220, 330, 500, 740, 1010, 1510)
    config = PipelineConfig(stages=2, layout="chain")

    def texts(number: int, examples: int) -> BatchItems:
        return batch([(lengths[number % len(lengths)], [])] * examples)

    def chosen_with(row_classes, examples: int):
        inputs = [
            replace(phase_inputs, longest=longest, config=PhaseConfig(row_classes=row_classes))
            for phase_inputs, longest in zip(sizing(1), (0, 8192), strict=True)
        ]
        samples = [texts(number, examples) for number in range(6)]
        return choose_pipeline(samples, inputs, config, MODEL, TRAINED, examples)

    def classes(made) -> int:
        return len(made.spec.phases["language"].classes)

    usual = chosen_with(3, 2)
    automatic = chosen_with("auto", 2)
    assert classes(usual) == 3 < classes(automatic) <= MOST_ROW_CLASSES
    batches = [texts(number, 2) for number in range(6)]
    assert cost(automatic, batches) < CHOICE.added_class_worth * cost(usual, batches)
    assert classes(chosen_with("auto", 24)) <= 3


def test_batches_of_few_examples_are_tried_on_more_samples():
    """The first six batches of two texts are short, and one of three later ones is long. Long texts
    fill their rows, although the longest text of the data is eight times as long."""
    short, long = 220, 1010
    texts = [short] * 6 + [short, short, long] * 6
    inputs = [
        replace(phase_inputs, longest=longest, config=PhaseConfig())
        for phase_inputs, longest in zip(sizing(1), (0, 8 * long), strict=True)
    ]
    config = PipelineConfig(stages=2, layout="chain")
    samples = [batch([(length, [])] * 2) for length in texts]
    made = choose_pipeline(samples, inputs, config, MODEL, TRAINED, 2)
    plan = plan_pipeline(batch([(long, [])] * 2), made.spec, made.training)
    assert plan.statistics["language/real_token_fraction"] > 0.5


def test_added_classes_are_no_more_than_a_phase_may_have():
    """Each class shortens steps by a tenth, and rows stay half empty, in both rounds."""

    def predicted(capacities, cut, bound=math.inf):
        total = 1000 * 0.9 ** len(capacities["language"])
        return total if total < bound else None

    tried = SimpleNamespace(
        inputs={"language": SimpleNamespace(row_classes=3, config=PhaseConfig())},
        fill=lambda name, capacities: 0.5,
        further=lambda name, before, largest: [(*before, before[-1] - 1)],
        predicted=predicted,
    )
    best = _Best(tried, {"language": (9, 8, 7)}, Cut("segments"))
    for _ in range(2):
        best.add_classes("language")
        assert best.capacities == {"language": (9, 8, 7, 6, 5, 4)}


def test_of_capacities_that_take_as_long_media_have_the_fullest():
    """Differences below a thousandth of the time are chance: media then take the fullest rows.
    Language rows take the fastest, because they decide which examples run together."""
    costs = {4: 100_000, 3: 100_090, 2: 100_050, 1: 100_200}

    def predicted(capacities, cut, bound=math.inf):
        total = costs[capacities["vision"][0]] + costs[capacities["language"][0]]
        return total if total < bound else None

    tried = SimpleNamespace(
        inputs=dict.fromkeys(("vision", "language"), SimpleNamespace(row_classes=1)),
        runs=lambda capacities: [],
        candidates=lambda name, rows: [1, 2, 3, 4],
        slots=lambda name, capacities: 100 * capacities[name][0],
        predicted=predicted,
    )
    best = _Best(tried, {"vision": (4,), "language": (4,)}, Cut("segments"))
    best.choose_capacity("language")
    assert best.capacities == {"vision": (4,), "language": (4,)}
    best.choose_capacity("vision")
    assert best.capacities == {"vision": (1,), "language": (4,)}
    costs[1] = 100_300
    best = _Best(tried, {"vision": (4,), "language": (4,)}, Cut("segments"))
    best.choose_capacity("vision")
    assert best.capacities == {"vision": (2,), "language": (4,)} and best.cost == 200_050


def test_layout_and_chunks_are_no_worse_than_any_single_one():
    """Compared on the samples that they are chosen on, and by the same schedules."""
    selected = chosen(microbatches=8)
    tried = trials(microbatches=8)
    capacities = {name: phase.capacities for name, phase in selected.spec.phases.items()}
    ring = selected.training.tables.ring
    counts = {chain.name: chain.chunks_per_rank for chain in ring.chains}
    cut = Cut(selected.training.config.layout, tuple(sorted(counts.items())))
    alternatives = [Cut("chain"), Cut("parallel"), Cut("segments").with_chunks("language", 1)]
    chosen_cost = tried.predicted(capacities, cut)
    assert chosen_cost is not None
    for alternative in alternatives:
        alternative_cost = tried.predicted(capacities, alternative)
        assert alternative_cost is None or chosen_cost <= alternative_cost


def test_a_bound_ends_a_trial_and_changes_no_figure():
    """A trial stops when it exceeds the best cost so far; below that bound the
    prediction is the full one."""
    tried = trials()
    cut = Cut("segments")
    capacities = {name: (tried.least(name),) for name in tried.inputs}
    predicted_cost = tried.predicted(capacities, cut)
    assert predicted_cost is not None
    assert tried.predicted(capacities, cut, INT64_MAX) == predicted_cost
    assert tried.predicted(capacities, cut, predicted_cost // 2) is None


def test_what_a_tick_takes_besides_makes_chunks_fewer():
    """The fixed price of a tick is eight times the costliest operation, so more ticks of
    smaller chunks do not pay."""
    without_price = chosen(microbatches=8).training
    linear = max(int(costs.linear.max()) for costs in without_price.costs.values())
    with_price = chosen(microbatches=8, flops_per_tick=8.0 * linear).training
    chunks = [
        sum(chain.depth for chain in pipeline.tables.ring.chains)
        for pipeline in (without_price, with_price)
    ]
    assert chunks[1] < chunks[0]


@pytest.mark.parametrize("split", [False, "auto"])
def test_the_automatic_schedule_is_no_worse_than_greedy(split):
    """Within the margin by which a costlier schedule must win."""
    auto = chosen(microbatches=8, layout="segments", schedule="auto", split_backward=split)
    greedy = chosen(microbatches=8, layout="segments")
    pipeline = auto.training
    assert pipeline.config.schedule in ("1f1b", "interleaved", "greedy", "search")
    assert split or pipeline.config.split_backward is False
    tried = trials(microbatches=8)
    capacities = {name: phase.capacities for name, phase in auto.spec.phases.items()}
    runs = [run for run, *_ in tried.runs(capacities)[:3]]
    costs = [
        sum(lockstep(schedule_of(graph_of(run, pipeline_sizes), pipeline_sizes)) for run in runs)
        for pipeline_sizes in (pipeline, replace(greedy.training, tables=pipeline.tables))
    ]
    assert costs[0] <= 1.03 * costs[1]


def test_every_host_chooses_the_same():
    first_host, second_host = (sizes(stages=2) for _ in range(2))
    assert repr(first_host.spec) == repr(second_host.spec)
    assert repr(first_host.training.tables) == repr(second_host.training.tables)


def test_more_stages_than_any_layout_has_layers_for():
    """The error advises fewer stages, and no other layout."""
    with pytest.raises(PipelineError, match=r"stages = 40, but .* 32 in all; use fewer stages$"):
        chosen(24, stages=40)


def test_many_replicas_are_tried_on_some():
    """Trials of very large batches run on some replicas with the same load per rank."""
    tried = trials(examples=6144)
    smaller = tried.with_some()
    assert smaller.inputs["language"].ranks < tried.inputs["language"].ranks
    ratio = smaller.load("language") / tried.load("language")
    assert 0.9 < ratio < 1.1


def test_forwards_keep_what_memory_holds_and_no_more_than_wait():
    """With `auto`, forward operations keep as many residuals as memory holds. Steps become shorter,
    because backward operations do not run those chunks again."""
    queries = set()

    def keeps(few: int) -> Keeps:
        def count(phase: str, capacity: int, layers: int) -> int:
            queries.add((phase, capacity, layers))
            return few

        return count

    settings = {"layout": "segments", "microbatches": 8}
    no_residuals, two_residuals, all_residuals = (
        chosen(keeps=keeps(few), **settings) for few in (0, 2, 10**6)
    )
    chains = two_residuals.training.tables.ring.chains
    capacities = {name: rows.capacities[0] for name, rows in two_residuals.spec.phases.items()}
    assert {
        (kept_chain.name, capacities[kept_chain.name], max(kept_chain.layers))
        for kept_chain in chains
    } <= queries
    slots = [
        {
            chain: n
            for (pool, chain), n in selected.training.tables.slots.items()
            if pool == Pool.RESIDUAL
        }
        for selected in (no_residuals, two_residuals, all_residuals)
    ]
    assert slots[0] == {} and slots[1] == {0: 2, 1: 2}
    assert all(2 < n < 200 for n in slots[2].values())
    batches = [random_batch(100 + seed, 96) for seed in range(3)]
    costs = [cost(selected, batches) for selected in (no_residuals, two_residuals, all_residuals)]
    assert costs[0] > costs[1] > costs[2]
    configured = chosen(keeps=keeps(10**6), kept_residuals=3, **settings)
    assert configured.training.tables.slots[Pool.RESIDUAL, 1] == 3
