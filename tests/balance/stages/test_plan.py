"""Plans of pipelined steps: every token arrives where its microbatch looks for it,
whatever the batch holds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.records import BatchItems, PhaseItems
from jaxmllm.balance.sizes.inputs import Alignment, SizingInputs
from jaxmllm.balance.stages.plan import plan_pipeline, plan_runs
from jaxmllm.balance.stages.sizes import choose_pipeline
from jaxmllm.config.schema import (
    ConfigError,
    LanguageConfig,
    ModelConfig,
    PhaseConfig,
    PipelineConfig,
    VisionConfig,
)
from jaxmllm.phases import make_phases
from sharding.pipeline.graph import Kind, Pool
from sharding.pipeline.schedules.by_name import SCHEDULES
from tests.sharding.pipeline.schedules.toy import TOY

PER_TOKEN = 4
LONGEST = {"vision": 64, "language": 96}
MODEL = ModelConfig(
    language=LanguageConfig(
        vocab_size=64,
        width=16,
        layers=4,
        heads=2,
        kv_heads=2,
        head_size=8,
        mlp_width=32,
        tie_embeddings=True,
    ),
    vision=VisionConfig(width=16, layers=2, heads=2, mlp_width=32),
)
TRAINED = dict.fromkeys(("vision", "projector.vision", "language"), 1)


def batch(examples) -> BatchItems:
    """A batch from (text tokens, slots of each image) per example, where the images come first."""
    images = [
        (example, slots)
        for example, (_, image_slots) in enumerate(examples)
        for slots in image_slots
    ]
    length = np.array([slots for _, slots in images], np.int64)
    tokens = (length // PER_TOKEN).astype(np.int32)
    owner = np.array([example for example, _ in images], np.int32)
    slot = [int(tokens[:n][owner[:n] == owner[n]].sum()) for n in range(len(images))]
    text = np.array(
        [text_tokens + sum(image_slots) // PER_TOKEN for text_tokens, image_slots in examples],
        np.int64,
    )
    numbers = np.arange(len(examples), dtype=np.int32)
    zeros = np.zeros(len(examples), np.int32)
    vision = PhaseItems(length, length, owner, tokens, np.array(slot, np.int32))
    return BatchItems(
        numbers.astype(np.int64),
        1,
        {"vision": vision, "language": PhaseItems(text, text, numbers, zeros, zeros)},
    )


def random_batch(seed: int, count: int = 24) -> BatchItems:
    """A batch of short texts with up to three images each."""
    random = np.random.default_rng(seed)
    return batch(
        [
            (
                int(random.integers(1, 40)),
                (PER_TOKEN * random.integers(1, 14, random.integers(0, 4))).tolist(),
            )
            for _ in range(count)
        ]
    )


def sizing(
    replicas: int, model: ModelConfig = MODEL, trained=TRAINED, capacities=None, spans=None
) -> list[SizingInputs]:
    """Everything that sizes are chosen from except samples: rows of one class,
    or of given capacities."""
    phase_capacities = capacities or {}
    phase_spans = spans or {}
    return [
        SizingInputs(
            phase,
            replicas,
            alignment=Alignment(16),
            slots_per_token=PER_TOKEN if name == "vision" else 1,
            longest=LONGEST[name],
            flops=phase_flops(model, name, trained),
            config=PhaseConfig(row_classes=1, capacities=phase_capacities.get(name, "auto")),
            spans=phase_spans.get(name, (1,)),
        )
        for name, phase in make_phases(model).items()
    ]


def sizes(
    replicas: int = 2,
    examples: int = 24,
    samples=None,
    largest=(),
    trained=TRAINED,
    capacities=None,
    spans=None,
    **config,
):
    """Sizes of a pipeline for random batches, with `config` for the keys of its section."""
    samples = [random_batch(seed, examples) for seed in range(8)] if samples is None else samples
    return choose_pipeline(
        samples,
        sizing(replicas, trained=trained, capacities=capacities, spans=spans),
        PipelineConfig(**{"stages": 2} | config),
        MODEL,
        trained,
        examples,
        largest,
    )


TEXT_ALONE = {"language": (128,), "vision": (16,)}
CASES = {
    "auto": sizes(),
    "segments": sizes(layout="segments", microbatches=8),
    "chain": sizes(layout="chain", schedule="1f1b", microbatches=6),
    "parallel": sizes(layout="parallel", schedule="gpipe", split_backward=True, microbatches=8),
    "four": sizes(
        stages=4, layout="chain", schedule="greedy", split_backward=True, kept_residuals=2
    ),
    "three": sizes(stages=3),
    "five": sizes(stages=5, layout="chain", schedule="gpipe", deferral=False),
    "one-replica": sizes(replicas=1, microbatches=3, layout="segments"),
    "no-deferral": sizes(deferral=False, microbatches=8, layout="segments"),
    "classes": sizes(layout="segments", capacities={"vision": (96, 64, 32), "language": (128, 96)}),
    "shared": sizes(
        replicas=4,
        capacities={"vision": (48, 32), "language": (64, 32)},
        spans={"vision": (1, 2), "language": (1, 2, 4)},
    ),
    "shared by encoders alone": sizes(replicas=4, spans={"vision": (1, 4)}, capacities=TEXT_ALONE),
    "as many as pay": sizes(replicas=4, spans={"vision": (1, 2), "language": (1, 2, 4)}),
}


@given(
    case=st.sampled_from(sorted(CASES)),
    examples=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.lists(st.integers(1, 14).map(lambda n: PER_TOKEN * n), max_size=4),
        ),
        min_size=1,
        max_size=40,
    ),
)
@settings(max_examples=60, deadline=None)
def test_every_item_has_a_place_and_every_run_a_table(case, examples):
    """No two items share a slot, runs follow one another without gaps within their limits, and each
    table tallies every language microbatch once."""
    chosen = CASES[case]
    items = batch(examples)
    for pipeline in (chosen.training, chosen.evaluation):
        plan = plan_pipeline(items, chosen.spec, pipeline)
        for name, spec in chosen.spec.phases.items():
            phase_plan = plan.phases[name]
            length = items.phases[name].length
            occupancy = np.zeros((phase_plan.microbatches, spec.ranks, spec.longest_row), np.int32)
            for m, rank, offset, size in zip(
                phase_plan.microbatch, phase_plan.rank, phase_plan.offset, length, strict=True
            ):
                assert rank % phase_plan.span[m] == 0
                assert offset + size <= phase_plan.capacity[m] * phase_plan.span[m]
                occupancy[m, rank, offset : offset + size] += 1
            assert occupancy.max(initial=0) <= 1
            first_microbatch = 0
            for run in plan.runs:
                assert run.microbatches[name][0] == first_microbatch
                start, run_microbatches = run.microbatches[name]
                shapes = np.stack([phase_plan.capacity, phase_plan.span], axis=1)[
                    start : start + run_microbatches
                ]
                row_shapes = list(map(tuple, shapes.tolist()))
                for row_class, row_limit in zip(spec.classes, pipeline.rows[name], strict=True):
                    assert row_shapes.count(row_class) <= row_limit
                first_microbatch += run.microbatches[name][1]
            assert first_microbatch == phase_plan.microbatches
        columns = pipeline.tables.columns
        for run in plan.runs:
            rows = run.table.reshape(-1, len(columns))
            tallied = rows[rows[:, columns["count_loss"]] > 0, columns["microbatch"]]
            assert sorted(tallied) == list(range(run.microbatches["language"][1]))
            kinds = {
                (action - 1) % len(Kind) for action in rows[:, columns["action"]].tolist() if action
            }
            assert pipeline.backward or kinds == {Kind.FORWARD}


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("seed", range(4))
def test_tokens_lie_where_microbatches_look_for_them(case, seed):
    """What the ranks of a group read for a microbatch, end to end, against what the route says of
    arrival. Every slot is labelled by (item, token)."""
    chosen = CASES[case]
    items = random_batch(seed)
    pipeline = chosen.training
    vision = items.phases["vision"]
    ranks = chosen.spec.phases["vision"].ranks
    (run,) = plan_runs(items, chosen.spec, pipeline)
    plan = plan_pipeline(items, chosen.spec, pipeline)
    vision_plan = plan.phases["vision"]
    language = plan.phases["language"]
    per_row = chosen.spec.phases["vision"].row_tokens
    held_tokens = np.full((vision_plan.microbatches, ranks, per_row, 2), -1)
    for n, tokens in enumerate(vision.tokens.tolist()):
        row_tokens = vision_plan.capacity[vision_plan.microbatch[n]] // PER_TOKEN
        for token in range(tokens):
            member, slot = divmod(vision_plan.offset[n] // PER_TOKEN + token, row_tokens)
            held_tokens[vision_plan.microbatch[n], vision_plan.rank[n] + member, slot] = n, token
    # A microbatch reads a fixed number of encoder rows; those that it does not need are padding.
    padding = np.full((pipeline.tables.rows_read[0] * per_row, 2), -1)
    group = max(phase.widest for phase in chosen.spec.phases.values())
    route = plan.routes["vision"]
    tokens_read = {n: [] for n in range(len(vision.tokens))}
    for n, tokens, arrival in zip(route.item, route.tokens, route.arrival, strict=True):
        reader = vision.example[n]
        first_rank = language.rank[reader] // group * group
        pools = []
        for rank in range(first_rank, first_rank + group):
            rows = [
                held_tokens[row, rank]
                for _, row in run.rows.inputs["language"][language.microbatch[reader]]
            ]
            pools.append(np.concatenate([*rows, padding])[: len(padding)])
        tokens_read[n] += np.concatenate(pools)[arrival : arrival + tokens].tolist()
    for n, tokens in enumerate(vision.tokens.tolist()):
        assert tokens_read[n] == [[n, token] for token in range(tokens)]
    assert run.rows.deferred == 0 or pipeline.config.deferral


def test_rows_are_of_as_few_ranks_as_hold_their_items():
    """Both spans of one capacity occur in one step: the item of 90 tokens needs a row of both
    ranks, the others rows of one."""
    chosen = sizes(replicas=2, capacities={"language": (64,)}, spans={"language": (1, 2)})
    plan = plan_pipeline(
        batch([(90, []), (60, []), (60, []), (30, [])]), chosen.spec, chosen.training
    )
    language = plan.phases["language"]
    spans = language.span[language.microbatch].tolist()
    assert spans[0] == 2 and set(spans) == {1, 2}
    assert plan.statistics["language/shared_rows"] == 1


def test_equal_batches_have_equal_plans_and_other_batches_others():
    chosen = CASES["segments"]
    plans = [plan_pipeline(random_batch(seed), chosen.spec, chosen.training) for seed in (1, 1, 2)]
    digests = [plan.digest(np.arange(3)) for plan in plans]
    assert digests[0] == digests[1] != digests[2]


def test_what_a_run_does_not_hold_goes_into_another():
    """With room for one microbatch less per phase, the step takes a second
    run of the same program."""
    chosen = CASES["segments"]
    items = random_batch(3)
    single_run = plan_pipeline(items, chosen.spec, chosen.training)
    row_limits = {
        name: (phase_plan.microbatches - 1,) for name, phase_plan in single_run.phases.items()
    }
    limited = dataclasses.replace(chosen.training, rows=row_limits)
    plan = plan_pipeline(items, chosen.spec, limited)
    assert len(single_run.runs) == 1 and len(plan.runs) >= 2
    assert plan.statistics["pipeline/runs"] == len(plan.runs)
    assert plan.statistics["pipeline/ticks"] == sum(len(run.table) for run in plan.runs)


def test_orders_that_do_not_fit_the_slots_give_way_to_the_greedy_one():
    chosen = CASES["parallel"]  # gpipe holds all microbatches at a time
    few_slots = {place_: min(slots, 4) for place_, slots in chosen.training.tables.slots.items()}
    limited = dataclasses.replace(
        chosen.training, tables=dataclasses.replace(chosen.training.tables, slots=few_slots)
    )
    items = random_batch(5)
    assert plan_pipeline(items, chosen.spec, chosen.training).statistics["pipeline/fallbacks"] == 0
    assert plan_pipeline(items, chosen.spec, limited).statistics["pipeline/fallbacks"] >= 1


def test_samples_without_an_image_still_make_room_for_some():
    chosen = sizes(samples=[batch([(20, [])] * 24)], largest=[random_batch(0)])
    plan = plan_pipeline(random_batch(0), chosen.spec, chosen.training)
    assert plan.phases["vision"].microbatches >= 1


def test_encoder_rows_that_do_not_hold_the_largest_example_are_refused():
    """The error comes at the start, and not in the step that draws the example."""
    request = {"capacities": {"vision": (64,)}, "largest": [batch([(5, [52, 52])])]}
    with pytest.raises(
        ConfigError, match=r"encoder_rows_per_microbatch \(1\): .* reads 2 rows of vision; raise"
    ):
        sizes(encoder_rows_per_microbatch=1, **request)
    assert sizes(encoder_rows_per_microbatch=2, **request).training.tables.rows_read == (2,)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"rows_read": (0,)}, r"pipeline\.encoder_rows_per_microbatch or phases.vision.capacities"),
        ({"slots": {}}, r"pipeline\.microbatches_in_flight"),
    ],
)
def test_what_holds_no_example_is_told_by_its_key_alone(change, key):
    chosen = CASES["chain"]
    tables = dataclasses.replace(chosen.training.tables, **change)
    with pytest.raises(ConfigError, match=rf"example 0 does not fit .* raise [^,;]*,? ?{key}$"):
        plan_pipeline(
            batch([(5, [52])]), chosen.spec, dataclasses.replace(chosen.training, tables=tables)
        )


def test_orders_that_a_layout_cannot_keep():
    with pytest.raises(
        ConfigError, match=r"pipeline\.schedule = '1f1b'.*'segments'.*use schedule greedy"
    ):
        sizes(schedule="1f1b", layout="segments", microbatches=8)


def test_another_schedule_is_chosen_for_and_planned(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    chosen = sizes(layout="chain", schedule="toy")
    plan = plan_pipeline(random_batch(1), chosen.spec, chosen.training)
    assert plan.statistics["pipeline/fallbacks"] == 0 and len(plan.runs) == 1


def test_what_is_trained_after_its_layers_alone_keeps_no_residuals():
    """Where only the projector of a tower is trained the executor has no place for residuals of its
    layers; the features wait instead."""
    chosen = sizes(
        layout="chain", kept_residuals=2, trained=dict.fromkeys(("projector.vision", "language"), 1)
    )
    ring = chosen.training.tables.ring
    slots = chosen.training.tables.slots
    assert [chain.head_only for chain in ring.chains] == [True, False]
    assert (Pool.RESIDUAL, 0) not in slots and slots[Pool.RESIDUAL, 1] == 2
    assert plan_pipeline(random_batch(1), chosen.spec, chosen.training).runs


def test_a_step_takes_the_rows_that_its_longest_example_asks_for():
    """With one capacity, every step would run rows that hold the longest example of all data."""
    chosen = sizes(layout="segments", capacities={"language": (192, 48)})
    without_long = batch([(20, [])] * 24)
    with_long = batch([(90, []), *[(20, [])] * 23])
    capacities = [
        plan_pipeline(items, chosen.spec, chosen.training).phases["language"].capacity
        for items in (without_long, with_long)
    ]
    assert set(capacities[0].tolist()) == {48} and 192 in capacities[1]
    single_class = sizes(layout="segments", capacities={"language": (192,)})
    costs = [
        plan_pipeline(without_long, pipeline_sizes.spec, pipeline_sizes.training).statistics[
            "pipeline/cost"
        ]
        for pipeline_sizes in (chosen, single_class)
    ]
    assert costs[0] < costs[1]
