"""Plans of pipelined steps: every token arrives where its microbatch looks for it, whatever the batch holds."""

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
    """From (text tokens, slots of each image) of every example; images come first."""
    images = [(number, slots) for number, (_, of) in enumerate(examples) for slots in of]
    length = np.array([slots for _, slots in images], np.int64)
    tokens = (length // PER_TOKEN).astype(np.int32)
    owner = np.array([number for number, _ in images], np.int32)
    slot = [int(tokens[:n][owner[:n] == owner[n]].sum()) for n in range(len(images))]
    text = np.array([count + sum(of) // PER_TOKEN for count, of in examples], np.int64)
    numbers = np.arange(len(examples), dtype=np.int32)
    none = np.zeros(len(examples), np.int32)
    vision = PhaseItems(length, length, owner, tokens, np.array(slot, np.int32))
    return BatchItems(
        numbers.astype(np.int64),
        1,
        {"vision": vision, "language": PhaseItems(text, text, numbers, none, none)},
    )


def random_batch(seed: int, count: int = 24) -> BatchItems:
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
    """Everything but samples that sizes are chosen from: rows of one class, or of given capacities."""
    given = capacities or {}
    shared = spans or {}
    return [
        SizingInputs(
            phase,
            replicas,
            alignment=Alignment(16),
            slots_per_token=PER_TOKEN if name == "vision" else 1,
            longest=LONGEST[name],
            flops=phase_flops(model, name, trained),
            config=PhaseConfig(row_classes=1, capacities=given.get(name, "auto")),
            spans=shared.get(name, (1,)),
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
    made = CASES[case]
    items = batch(examples)
    for pipeline in (made.training, made.evaluation):
        plan = plan_pipeline(items, made.spec, pipeline)
        for name, spec in made.spec.phases.items():
            where = plan.phases[name]
            length = items.phases[name].length
            taken = np.zeros((where.microbatches, spec.ranks, spec.longest_row), np.int32)
            for m, rank, offset, size in zip(
                where.microbatch, where.rank, where.offset, length, strict=True
            ):
                assert rank % where.span[m] == 0
                assert offset + size <= where.capacity[m] * where.span[m]
                taken[m, rank, offset : offset + size] += 1
            assert taken.max(initial=0) <= 1
            first = 0
            for run in plan.runs:
                assert run.microbatches[name][0] == first
                begin, count = run.microbatches[name]
                shapes = np.stack([where.capacity, where.span], axis=1)[begin : begin + count]
                held = list(map(tuple, shapes.tolist()))
                for row_class, most in zip(spec.classes, pipeline.rows[name], strict=True):
                    assert held.count(row_class) <= most
                first += run.microbatches[name][1]
            assert first == where.microbatches
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
    """What the ranks of a group read for a microbatch, end to end and token by token, against what arrival says."""
    made = CASES[case]
    items = random_batch(seed)
    pipeline = made.training
    vision = items.phases["vision"]
    ranks = made.spec.phases["vision"].ranks
    (run,) = plan_runs(items, made.spec, pipeline)
    plan = plan_pipeline(items, made.spec, pipeline)
    where = plan.phases["vision"]
    language = plan.phases["language"]
    per_row = made.spec.phases["vision"].row_tokens
    held = np.full((where.microbatches, ranks, per_row, 2), -1)
    for n, tokens in enumerate(vision.tokens.tolist()):
        own = where.capacity[where.microbatch[n]] // PER_TOKEN
        for token in range(tokens):
            member, slot = divmod(where.offset[n] // PER_TOKEN + token, own)
            held[where.microbatch[n], where.rank[n] + member, slot] = n, token
    nothing = np.full((pipeline.tables.rows_read[0] * per_row, 2), -1)
    group = max(phase.widest for phase in made.spec.phases.values())
    route = plan.routes["vision"]
    found = {n: [] for n in range(len(vision.tokens))}
    for n, tokens, arrival in zip(route.item, route.tokens, route.arrival, strict=True):
        reader = vision.example[n]
        first = language.rank[reader] // group * group
        pools = []
        for rank in range(first, first + group):
            rows = [
                held[row, rank]
                for _, row in run.rows.inputs["language"][language.microbatch[reader]]
            ]
            pools.append(np.concatenate([*rows, nothing])[: len(nothing)])
        found[n] += np.concatenate(pools)[arrival : arrival + tokens].tolist()
    for n, tokens in enumerate(vision.tokens.tolist()):
        assert found[n] == [[n, token] for token in range(tokens)]
    assert run.rows.deferred == 0 or pipeline.config.deferral


def test_rows_are_of_as_few_ranks_as_hold_their_items():
    """Both spans of a capacity in one step: a row that no two groups of half the ranks can hold is of them all."""
    made = sizes(replicas=2, capacities={"language": (64,)}, spans={"language": (1, 2)})
    plan = plan_pipeline(batch([(90, []), (60, []), (60, []), (30, [])]), made.spec, made.training)
    language = plan.phases["language"]
    spans = language.span[language.microbatch].tolist()
    assert spans[0] == 2 and set(spans) == {1, 2}
    assert plan.statistics["language/shared_rows"] == 1


def test_equal_batches_have_equal_plans_and_other_batches_others():
    made = CASES["segments"]
    plans = [plan_pipeline(random_batch(seed), made.spec, made.training) for seed in (1, 1, 2)]
    digests = [plan.digest(np.arange(3)) for plan in plans]
    assert digests[0] == digests[1] != digests[2]


def test_what_a_run_does_not_hold_goes_into_another():
    made = CASES["segments"]
    items = random_batch(3)
    whole = plan_pipeline(items, made.spec, made.training)
    most = {name: (place.microbatches - 1,) for name, place in whole.phases.items()}
    small = dataclasses.replace(made.training, rows=most)
    plan = plan_pipeline(items, made.spec, small)
    assert len(whole.runs) == 1 and len(plan.runs) >= 2
    assert plan.statistics["pipeline/runs"] == len(plan.runs)
    assert plan.statistics["pipeline/ticks"] == sum(len(run.table) for run in plan.runs)


def test_orders_that_do_not_fit_the_slots_give_way_to_the_greedy_one():
    made = CASES["parallel"]  # gpipe holds all microbatches at a time
    few = {place_: min(slots, 4) for place_, slots in made.training.tables.slots.items()}
    tight = dataclasses.replace(
        made.training, tables=dataclasses.replace(made.training.tables, slots=few)
    )
    items = random_batch(5)
    assert plan_pipeline(items, made.spec, made.training).statistics["pipeline/fallbacks"] == 0
    assert plan_pipeline(items, made.spec, tight).statistics["pipeline/fallbacks"] >= 1


def test_samples_without_an_image_still_make_room_for_some():
    made = sizes(samples=[batch([(20, [])] * 24)], largest=[random_batch(0)])
    plan = plan_pipeline(random_batch(0), made.spec, made.training)
    assert plan.phases["vision"].microbatches >= 1


def test_encoder_rows_that_do_not_hold_the_largest_example_are_refused():
    """At the start, and not in the step that draws it."""
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
    made = CASES["chain"]
    tables = dataclasses.replace(made.training.tables, **change)
    with pytest.raises(ConfigError, match=rf"example 0 does not fit .* raise [^,;]*,? ?{key}$"):
        plan_pipeline(
            batch([(5, [52])]), made.spec, dataclasses.replace(made.training, tables=tables)
        )


def test_orders_that_a_layout_cannot_keep():
    with pytest.raises(
        ConfigError, match=r"pipeline\.schedule = '1f1b'.*'segments'.*use schedule greedy"
    ):
        sizes(schedule="1f1b", layout="segments", microbatches=8)


def test_another_schedule_is_chosen_for_and_planned(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    made = sizes(layout="chain", schedule="toy")
    plan = plan_pipeline(random_batch(1), made.spec, made.training)
    assert plan.statistics["pipeline/fallbacks"] == 0 and len(plan.runs) == 1


def test_what_is_trained_after_its_layers_alone_keeps_no_residuals():
    """The executor has no place for them; the features wait instead."""
    made = sizes(
        layout="chain", kept_residuals=2, trained=dict.fromkeys(("projector.vision", "language"), 1)
    )
    ring = made.training.tables.ring
    slots = made.training.tables.slots
    assert [chain.head_only for chain in ring.chains] == [True, False]
    assert (Pool.RESIDUAL, 0) not in slots and slots[Pool.RESIDUAL, 1] == 2
    assert plan_pipeline(random_batch(1), made.spec, made.training).runs


def test_a_step_takes_the_rows_that_its_longest_example_asks_for():
    """Rows of one capacity would hold the longest of all data, in every step."""
    made = sizes(layout="segments", capacities={"language": (192, 48)})
    short = batch([(20, [])] * 24)
    long = batch([(90, []), *[(20, [])] * 23])
    held = [
        plan_pipeline(items, made.spec, made.training).phases["language"].capacity
        for items in (short, long)
    ]
    assert set(held[0].tolist()) == {48} and 192 in held[1]
    one = sizes(layout="segments", capacities={"language": (192,)})
    costs = [
        plan_pipeline(short, each.spec, each.training).statistics["pipeline/cost"]
        for each in (made, one)
    ]
    assert costs[0] < costs[1]
