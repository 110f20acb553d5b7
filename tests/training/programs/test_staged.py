"""Training in pipeline stages is the same training: any ring, schedule, freezing and batch, from any checkpoint."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
import yaml

from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.data.media.reference import MediaError
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.setup.build import plan_programs
from jaxmllm.setup.hlo import BODY, array_bytes, parse
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import pipeline_sizes
from jaxmllm.tools import timeline
from jaxmllm.train import main
from jaxmllm.training.programs.base import ProgramName
from jaxmllm.training.run import USER_ERRORS
from sharding.mesh import make_mesh
from sharding.pipeline.graph import Pool
from sharding.pipeline.schedules.by_name import SCHEDULES
from sharding.pipeline.table_file import load_tables
from tests.sharding.pipeline.schedules.toy import TOY
from tests.support import EXHAUSTIVE, Result, assert_close, assert_same, slow_cases, tiny_config

EXAMPLES = np.random.default_rng(0).permutation(96)[:24]
KINDS = [(), ("vision",), ("audio",), ("vision", "audio")]
DEEP = {"model__vision__layers": 2, "model__audio__layers": 2, "model__language__layers": 4}
CAUSES = ("imbalance", "bubble", "lockstep")
METRICS = (
    "ticks",
    "cost",
    "asynchronous_cost",
    "idle_share",
    *(f"idle_{cause}" for cause in CAUSES),
    "search_ms",
    "fallbacks",
    "deferred_examples",
    "slots_used",
)


def computed(setup, step) -> Result:
    """Gradients with the layers one behind another."""
    result = setup.gradients(step)
    return dataclasses.replace(result, grads=jax.device_get(setup.programs.joined(result.grads)))


def used(result: Result) -> dict:
    return {
        name: g
        for name, g in result.grads.items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(g))
    }


def rows_of_step(step) -> dict[str, list]:
    """Capacity and span of every row, by phase."""
    return {
        name: list(zip(held, step.spans[name], strict=True))
        for name, held in step.capacities.items()
    }


# Rows of two sizes for images, and of one rank or two for text
CLASSES = {
    "phases__vision__capacities": [96, 32],
    "phases__language__capacities": [96],
    "phases__language__spans": [1, 2],
}


@pytest.fixture(scope="module")
def piped(setups, by_example):
    pipeline = {"stages": 2, "layout": "chain", "microbatches": 8}
    return setups(by_example(mesh={"data": 2}, pipeline=pipeline, **CLASSES), 4)


# ---------------------------------------------------------------------------- the same mathematics


@pytest.mark.slow
@pytest.mark.parametrize("examples, runs", [(EXAMPLES, 1), (range(60), 2)])
def test_loss_and_gradients_are_those_without_stages(piped, alone, examples, runs):
    """More examples than the samples had need more runs; nothing is dropped."""
    step = piped.step(examples)
    assert runs <= len(step.runs) < 2 * runs
    told = step.statistics
    assert {f"pipeline/{name}" for name in METRICS} <= told.keys()
    assert 0 < told["pipeline/idle_share"] < 1 and told["pipeline/ticks"] > 8 * runs
    causes = sum(told[f"pipeline/idle_{cause}"] for cause in CAUSES)
    assert told["pipeline/idle_share"] == pytest.approx(causes)
    for name, held in rows_of_step(step).items():
        real = piped.corpus.gather(np.asarray(examples)).phases[name].real.sum()
        slots = 2 * sum(capacity for capacity, _ in held)
        assert told[f"{name}/real_token_fraction"] == pytest.approx(real / slots)
    assert_same(computed(piped, step), alone.gradients(alone.step(examples)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 12])
def test_batches_of_one_kind(piped, alone, kind, count):
    examples = alone.of_kind(kind)[:count]
    result, expected = computed(piped, piped.step(examples)), alone.gradients(alone.step(examples))
    np.testing.assert_array_equal(result.targets, expected.targets)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    assert set(used(result)) == {"language", *kind, *(f"projector.{phase}" for phase in kind)}
    assert_close(used(result), used(expected), 1e-5)


# Parameters of some kind in each component: biases of a tower, a head and MLPs
PATTERNS = {
    "vision": {"train": ["*bias"]},
    "audio": {"freeze": True},
    "language": {"train": ["head", "*.mlp.*"]},
}


def same_as_alone(setups, by_example, alone, components, split_backward):
    """Stages that train some of the parameters, whose gradients are checked; and these."""
    pipeline = {"stages": 2, "layout": "chain", "split_backward": split_backward}
    parted = setups(by_example(mesh={"data": 2}, pipeline=pipeline, components=components), 4)
    result = computed(parted, parted.step(EXAMPLES))
    expected = alone.gradients(alone.step(EXAMPLES))
    trained, _ = parted.programs.functions.model.trainable.split(expected.grads)
    assert_same(result, dataclasses.replace(expected, grads=trained), 1e-5)
    return parted, trained


@pytest.mark.slow
@pytest.mark.parametrize("language", [{"freeze": True}, {"train": ["head"]}], ids=["none", "head"])
def test_layers_without_weight_gradients_have_none_to_keep(setups, by_example, alone, language):
    """A backward pass in halves leaves nothing for the second where no layer is trained."""
    same_as_alone(setups, by_example, alone, {"language": language}, split_backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("split_backward", [pytest.param(False, marks=EXHAUSTIVE), True])
def test_parameters_trained_by_pattern(setups, by_example, alone, tmp_path, split_backward):
    """The checkpoint holds optimizer states of these alone."""
    parted, trained = same_as_alone(setups, by_example, alone, PATTERNS, split_backward)

    programs = parted.programs
    state = programs.init(0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, programs.to_saved(state))
        checkpoints.wait()
        restored = checkpoints.restore(programs.saved_state)
    moments = {name: optimizer[0].mu for name, optimizer in restored.optimizer.items()}
    assert jax.tree.structure(moments) == jax.tree.structure(trained)


@pytest.mark.slow
def test_deferred_examples(piped, alone):
    batches = (np.random.default_rng(seed).permutation(96)[:28] for seed in range(200))
    batch = next(batch for batch in batches if deferred(piped, batch))
    assert_same(computed(piped, piped.step(batch)), alone.gradients(alone.step(batch)), 1e-5)


@pytest.mark.slow
def test_a_schedule_of_ones_own(piped, alone, data, monkeypatch):
    """An entry of the table is all that another schedule takes: the config names it, plans use and prove it, and the
    same compiled program computes the same loss and gradients by it."""
    tree = tiny_config(
        data, mesh={"data": 1}, pipeline={"stages": 2, "layout": "chain", "schedule": "toy"}
    )
    with pytest.raises(
        USER_ERRORS, match=r"pipeline.schedule = 'toy'.*choose one of 1f1b, .*search"
    ):
        prepare(parse_config(tree), make_mesh({"stage": 2}, jax.devices()[:2]))
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    step, own = piped.step(EXAMPLES), scheduled_by(piped, "toy").step(EXAMPLES)
    assert own.statistics["pipeline/fallbacks"] == 0
    assert own.statistics["pipeline/ticks"] > step.statistics["pipeline/ticks"], "nothing overlaps"
    result = computed(piped, own)
    assert_same(result, computed(piped, step), 1e-5)
    assert_same(result, alone.gradients(alone.step(EXAMPLES)), 1e-5)


def scheduled_by(setup, name: str):
    """The setup with another schedule, on the same programs."""
    training = setup.pipeline.training
    config = training.config.model_copy(update={"schedule": name})
    return dataclasses.replace(
        setup,
        pipeline=dataclasses.replace(
            setup.pipeline, training=dataclasses.replace(training, config=config)
        ),
    )


def deferred(setup, batch) -> bool:
    plan = plan_pipeline(setup.corpus.gather(batch), setup.spec, setup.pipeline.training)
    return plan.statistics["pipeline/deferred_examples"] > 0


@pytest.mark.slow
def test_evaluation_counts_the_same(piped, alone):
    results = []
    for setup in (piped, alone):
        pipeline = setup.pipeline and dataclasses.replace(
            setup.pipeline, training=setup.pipeline.evaluation
        )
        step = dataclasses.replace(setup, pipeline=pipeline).step(EXAMPLES)
        sums, failed = setup.programs.evaluate(setup.params, setup.put(step))
        assert failed == 0
        results.append(jax.device_get(setup.programs.totals(sums)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *results)


@pytest.mark.slow
def test_an_undecodable_image_masks_its_example(piped, alone, monkeypatch):
    bad = alone.of_kind(["vision"])[0]
    reference = alone.corpus.example(bad).media[0].reference
    modality = alone.corpus.modalities["vision"]
    load = type(modality).load

    def broken(self, media, shape):
        if media == reference:
            raise MediaError("undecodable_image", f"{media} is broken")
        return load(self, media, shape)

    monkeypatch.setattr(type(modality), "load", broken)
    examples = [bad, *alone.of_kind(["audio"])[:4], *alone.of_kind([])[:4]]
    result, expected = computed(piped, piped.step(examples)), alone.gradients(alone.step(examples))
    assert result.failed == expected.failed == 1
    assert result.targets[alone.corpus.source_of(bad)] == 0
    np.testing.assert_array_equal(result.targets, expected.targets)
    assert_close(used(result), used(expected), 1e-5)


# ---------------------------------------------------------------------------- whole steps


@pytest.mark.slow
def test_steps_and_checkpoints_are_those_without_stages(piped, alone, tmp_path):
    """Both ways: the state of either continues in the other."""
    batches = [EXAMPLES[:12], EXAMPLES[12:], EXAMPLES[4:18]]
    setups, losses = {"piped": piped, "alone": alone}, {"piped": [], "alone": []}
    states = {name: setup.programs.init(0) for name, setup in setups.items()}
    for number, batch in enumerate(batches):
        for name, setup in setups.items():
            states[name], metrics = setup.programs.train(states[name], setup.put(setup.step(batch)))
            losses[name].append(
                [float(metrics[key]) for key in ("loss", "gradient_norm", "learning_rate")]
            )
        if number == 0:
            for name, setup in setups.items():
                with Checkpoints(tmp_path / name, 1) as checkpoints:
                    checkpoints.save(1, setup.programs.to_saved(states[name]))
            for name, other in (("piped", "alone"), ("alone", "piped")):
                with Checkpoints(tmp_path / other, 1) as checkpoints:
                    saved = checkpoints.restore(setups[name].programs.saved_state)
                states[name] = setups[name].programs.from_saved(saved)
    np.testing.assert_allclose(losses["piped"], losses["alone"], rtol=2e-4)
    again = piped.programs.from_saved(piped.programs.to_saved(states["piped"]))
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(again), jax.device_get(states["piped"])
    )


@pytest.mark.slow
def test_rows_of_several_classes_in_a_step(piped, alone):
    """A step has both in a phase; which rows have which is data, and each step is the same without stages."""
    mixes = set()
    for batch in (EXAMPLES, range(8)):
        step = piped.step(batch)
        mixes |= {(name, frozenset(held)) for name, held in rows_of_step(step).items()}
        assert_same(computed(piped, step), alone.gradients(alone.step(batch)), 1e-5)
    sizes, shared = frozenset({(96, 1), (32, 1)}), frozenset({(96, 1), (96, 2)})
    assert {("vision", sizes), ("language", shared)} <= mixes


@pytest.mark.slow
def test_batches_of_every_composition_use_the_same_program(piped, alone):
    random = np.random.default_rng(1)
    batches = [alone.of_kind(kind)[:12] for kind in KINDS]
    while len(batches) < 20:
        batches.append(random.permutation(96)[: random.integers(1, 25)].tolist())
    state = piped.programs.init(0)
    state, _ = piped.programs.train(state, piped.put(piped.step(EXAMPLES)))
    tables, mixes = set(), set()
    counter = CompilationCounter()
    for batch in batches:
        step = piped.step(batch)
        tables |= {run.table.tobytes() for run in step.runs}
        mixes |= {tuple(sorted(held)) for held in rows_of_step(step).values()}
        state, metrics = piped.programs.train(state, piped.put(step))
        metrics = jax.device_get(metrics)
        assert metrics["targets_by_source"].sum() == step.targets and metrics["skipped"] == 0
    assert counter.names == [] and len(tables) >= 20 and len(mixes) >= 20
    counter.close()


# ---------------------------------------------------------------------------- any ring, schedule and freezing


@pytest.fixture(scope="module")
def deep(setups, by_example):
    return setups(by_example(**DEEP), 1)


SEGMENTS = {"stages": 2, "layout": "segments"}
CASES = {  # devices, mesh, pipeline
    "stages2": (2, {"data": 1}, SEGMENTS),
    "stages2-auto": (
        2,
        {"data": 1},
        {"stages": 2, "schedule": "auto", "split_backward": "auto", "rollouts": 8},
    ),
    # Layers that do not divide evenly
    "stages3": (3, {"data": 1}, {"stages": 3, "layout": "chain"}),
    "stages5-gpipe": (
        5,
        {"data": 1},
        {"stages": 5, "layout": "chain", "schedule": "gpipe", "split_backward": True},
    ),
    "stages4-split": (4, {"data": 1}, {"stages": 4, "layout": "parallel", "split_backward": True}),
    "stages8": (8, {"data": 1}, {"stages": 8, "layout": "chain", "schedule": "1f1b"}),
    "stages2-data2-tensor2": (8, {"data": 2, "tensor": 2}, SEGMENTS | {"split_backward": True}),
    "stages2-fsdp2-interleaved": (
        4,
        {"data": 1, "fsdp": 2},
        SEGMENTS | {"schedule": "interleaved", "kept_residuals": 2},
    ),
    "stages2-context2-gpipe": (
        4,
        {"data": 1, "context": 2},
        {"stages": 2, "layout": "chain", "schedule": "gpipe"},
    ),
    "stages4-search": (
        4,
        {"data": 1},
        {"stages": 4, "layout": "chain", "schedule": "search", "deferral": False},
    ),
}


@pytest.mark.parametrize(
    "devices, mesh, pipeline",
    slow_cases(CASES, {"stages2-data2-tensor2"}),
)
def test_any_ring_and_schedule(setups, by_example, deep, devices, mesh, pipeline):
    setup = setups(by_example(mesh=mesh, pipeline=pipeline, **DEEP), devices)
    assert_same(computed(setup, setup.step(EXAMPLES)), deep.gradients(deep.step(EXAMPLES)), 1e-5)


def rows_of(spans, capacities):
    """Blocks so small that rows of few slots have parts."""
    return {
        f"phases__{name}": {"block": 16, "capacities": slots, "spans": spans}
        for name, slots in capacities.items()
    }


# On these, both spans of one capacity occur in a step
SHORT = {"vision": [64], "audio": [256], "language": [96]}
SHARED = {  # devices, mesh, pipeline, changes
    "data2-sizes": (
        4,
        {"data": 2},
        SEGMENTS,
        rows_of([1, 2], SHORT | {"vision": [64, 32], "language": [96, 64]}),
    ),
    "fsdp2": (4, {"data": 1, "fsdp": 2}, {"stages": 2, "layout": "chain"}, rows_of([1, 2], SHORT)),
    "fsdp2-tensor2-split": (
        8,
        {"data": 1, "fsdp": 2, "tensor": 2},
        {"stages": 2, "layout": "chain", "schedule": "1f1b", "split_backward": True},
        rows_of([1, 2], SHORT),
    ),
    "data2-fsdp2-kept": (
        8,
        {"data": 2, "fsdp": 2},
        SEGMENTS | {"kept_residuals": 2, "schedule": "interleaved"},
        rows_of([1, 2, 4], {"vision": [48], "audio": [128], "language": [64]})
        | {"components__language__remat": "none"},
    ),
    "fsdp2-context2": (
        8,
        {"data": 1, "fsdp": 2, "context": 2},
        SEGMENTS,
        rows_of([1, 2], SHORT),
    ),
    "encoders-alone": (
        4,
        {"data": 2},
        {"stages": 2, "layout": "chain"},
        rows_of([1, 2], {"vision": [64]}) | rows_of([1], {"audio": [512], "language": [192]}),
    ),
}


@pytest.mark.parametrize("devices, mesh, pipeline, changes", slow_cases(SHARED, {"fsdp2"}))
def test_rows_of_several_ranks(setups, by_example, deep, devices, mesh, pipeline, changes):
    """Of one rank and of several in one step."""
    setup = setups(by_example(mesh=mesh, pipeline=pipeline, **changes, **DEEP), devices)
    step = setup.step(EXAMPLES)
    assert {1, 2} <= {span for spans in step.spans.values() for span in spans}
    assert_same(computed(setup, step), deep.gradients(deep.step(EXAMPLES)), 1e-5)


@pytest.mark.slow
def test_an_encoder_may_have_a_layout_of_its_own(setups, by_example, deep):
    """Whole on every device, where the language model is split; `batch` alone must be the same."""
    layout: dict[str, list[str]] = {axis: [] for axis in ("heads", "kv_heads", "mlp")}
    changes = {"mesh": {"data": 1, "tensor": 2}, "pipeline": SEGMENTS}
    setup = setups(by_example(**changes, components__vision__layout=layout, **DEEP), 4)
    assert_same(computed(setup, setup.step(EXAMPLES)), deep.gradients(deep.step(EXAMPLES)), 1e-5)


ALL = {"vision", "audio", "projector.vision", "projector.audio", "language"}
PROJECTORS = {"projector.vision", "projector.audio"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trained",
    [
        PROJECTORS,
        *(
            pytest.param(part, marks=EXHAUSTIVE)
            for part in (
                PROJECTORS | {"language"},
                {"language"},
                {"vision", "projector.audio"},
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "layout, ranks", [("segments", 1), pytest.param("chain", 2, marks=pytest.mark.exhaustive)]
)
def test_any_freezing(setups, by_example, trained, layout, ranks):
    """On two ranks, rows that they share."""
    frozen = {f"components__{name.replace('.', '__')}__freeze": True for name in ALL - trained}
    pipeline = {"stages": 2, "layout": layout, "split_backward": layout == "segments"}
    shared = rows_of([1, 2], SHORT) if ranks > 1 else {}
    changes = {"mesh": {"data": ranks}, "pipeline": pipeline, **shared, **frozen, **DEEP}
    setup = setups(by_example(**changes), 2 * ranks)
    alone = setups(by_example(**frozen, **DEEP), 1)
    result = computed(setup, setup.step(EXAMPLES))
    assert set(result.grads) == trained
    assert_same(result, alone.gradients(alone.step(EXAMPLES)), 1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(data, tmp_path):
    """A step each in 2, in 4 and in no stages, through the command; against three steps without any."""
    config = tmp_path / "config.yaml"
    averaged = {"components__language__ema": 0.6}
    config.write_text(yaml.safe_dump(tiny_config(data, mesh={"data": -1}, **averaged, **DEEP)))

    def losses(folder: str, *stages: int) -> list[float]:
        for number, count in enumerate(stages):
            steps = (number + 1) * 3 // len(stages)
            pipeline = [f"pipeline.stages={count}", "pipeline.layout=chain"]
            overrides = [f"run.directory={tmp_path / folder}", f"run.steps={steps}", *pipeline]
            assert main(["--config", str(config), "--resume", *overrides]) == 0
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        found = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        return [*found, json.loads(lines[-1])["eval/loss"]]  # the latter of averages

    expected = losses("without", 1)
    assert len(expected) == 4
    np.testing.assert_allclose(losses("stages", 2, 4, 1), expected, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_profiled_run_saves_the_tables_that_timeline_draws(data, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny_config(data, mesh={"data": -1})))
    stages = [
        "pipeline.stages=2",
        "pipeline.layout=chain",
        f"run.directory={tmp_path / 'run'}",
        "run.steps=2",
    ]
    command = ["--config", str(config), *stages]
    assert main([*command, "profile.start=1", "profile.steps=1"]) == 0
    (saved,) = (tmp_path / "run" / "profile").rglob("schedule_*.npz")
    assert saved.name == "schedule_2.npz"
    planned = tmp_path / "planned.npz"
    assert (
        timeline.main([*command, "--step", "2", "--save", str(planned), "--out", str(tmp_path)])
        == 0
    )
    run, plan = load_tables(saved), load_tables(planned)
    assert run.columns == plan.columns and run.components == ("vision", "audio", "language")
    for name in ("rows", "wire_active"):
        for ours, theirs in zip(getattr(run, name), getattr(plan, name), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert timeline.main(["--table", str(saved), "--out", str(tmp_path)]) == 0
    assert "schedule_2.npz" in capsys.readouterr().out
    last = load_tables(tmp_path / "run" / "schedule.npz")
    np.testing.assert_array_equal(np.concatenate(last.rows), np.concatenate(run.rows))
    assert timeline.main(["--run", str(tmp_path / "run"), "--out", str(tmp_path)]) == 0


# ---------------------------------------------------------------------------- what is kept


KEPT = {
    "nothing": ("none", {}),
    "products kept, some forwards too": ("dots", {"kept_residuals": 2}),
    "all but names, split": (["attention", "mlp"], {"split_backward": True}),
}


@pytest.mark.parametrize("remat, pipeline", slow_cases(KEPT, ()))
def test_what_is_computed_again_changes_no_gradient(setups, by_example, deep, remat, pipeline):
    components = {phase: {"remat": remat} for phase in ("vision", "audio", "language")}
    pipeline = {"stages": 2, "layout": "chain"} | pipeline
    setup = setups(by_example(pipeline=pipeline, components=components, **DEEP), 2)
    assert_same(computed(setup, setup.step(EXAMPLES)), deep.gradients(deep.step(EXAMPLES)), 1e-5)


def planned(data, devices: int, **changes):
    """Programs that are not compiled."""
    config = parse_config(tiny_config(data, **DEEP | changes))
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices])
    return plan_programs(config, prepare(config, mesh))[0]


CHAIN = {"stages": 2, "layout": "chain"}


def test_a_chunk_keeps_of_every_layer_what_remat_says(data):
    def kept(remat):
        components = {"language": {"remat": remat}}
        changes = {"pipeline": CHAIN, "components": components, "mesh": {"data": 1}}
        programs = planned(data, 2, **changes)
        (language,) = (c for c in programs.sizes.training.tables.ring.chains if c.name == LANGUAGE)
        slots = programs.spec.phases[LANGUAGE].capacities[0]
        return programs.held.boxes[Pool.RESIDUAL, 2] / slots, max(language.layers)

    (full, layers), (named, _), (dots, _), (none, _) = map(
        kept, ("full", ["attention"], "dots", "none")
    )
    hidden, valid = 4 * 32, 4
    # Of every layer its input, and what the last one yields
    assert full == layers * hidden + hidden + valid
    heads, head_size, logsumexp = 4, 8, 1
    assert named == full + layers * 4 * heads * (head_size + logsumexp)
    assert named < dots < none


def test_memory_is_stated_in_words(data):
    programs = planned(data, 2, mesh={"data": 1}, pipeline=CHAIN | {"kept_residuals": 3})
    first, *phases = programs.describe_memory()
    assert first.startswith("stages: a device holds ") and "sums of gradients" in first
    assert [line.partition(":")[0] for line in phases] == [
        "stages, vision",
        "stages, audio",
        "stages, language",
    ]
    assert all("residual 4 x" in line and "backward of a chunk" in line for line in phases)


def test_what_is_not_of_the_layers_lies_on_the_stages_in_parts(data):
    """Embedding, head, projectors, and what the optimizer keeps of them."""
    programs = planned(data, 4, mesh={"data": 1, "fsdp": 2}, pipeline=CHAIN)
    whole = programs.functions.model.abstract("float32")
    for name in ("language", "projector.vision"):
        for tree in (programs.state.params, programs.state.optimizer[name][0].mu, programs.trained):
            tree = tree.get(name, tree)
            for key in tree.keys() - {"layers"}:
                for leaf, before in zip(
                    jax.tree.leaves(tree[key]), jax.tree.leaves(whole[name][key]), strict=True
                ):
                    assert held_by_device(leaf) == held_by_device(before) / 2


def held_by_device(leaf) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "classes"),
    [
        pytest.param({"data": 2}, CHAIN, {}, marks=EXHAUSTIVE),
        ({"data": 2, "fsdp": 2}, SEGMENTS | {"kept_residuals": 2}, CLASSES),
        pytest.param(
            {"data": 1, "fsdp": 2}, CHAIN | {"split_backward": True}, {}, marks=EXHAUSTIVE
        ),
    ],
    ids=["data", "data x fsdp, kept, rows of several classes", "fsdp, split"],
)
def test_the_compiled_loop_holds_what_is_stated(setups, by_example, mesh, pipeline, classes):
    devices = 2 * mesh["data"] * mesh.get("fsdp", 1)
    setup = setups(by_example(mesh=mesh, pipeline=pipeline, **classes, **DEEP), devices)
    text = setup.programs.compiled[ProgramName("gradients")].as_text()
    found = max(carried_bytes(parse(text)))
    assert found == pytest.approx(setup.programs.held.total + setup.programs.held_sums, rel=0.05)


def carried_bytes(module) -> list[int]:
    """Of every loop, the bytes of what its turns change."""
    found = []
    for lines in module.computations.values():
        for loop in (line for line in lines if line.opcode == "while"):
            body = {
                line.name: line for line in module.computations[BODY.search(loop.attributes)[1]]
            }
            (root,) = (line for line in body.values() if line.root)
            sizes = [size for _, size in array_bytes(loop.shape)]
            assert len(sizes) == len(root.operands)
            unchanged = [body[name].index == n for n, name in enumerate(root.operands)]
            found.append(sum(size for size, same in zip(sizes, unchanged, strict=True) if not same))
    return found


# ---------------------------------------------------------------------------- what cannot be


def sizes(data, devices: int, **changes):
    config = parse_config(tiny_config(data, **changes))
    inputs = prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:devices]))
    return pipeline_sizes(config, inputs)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pipeline": {"stages": 8, "layout": "chain"}}, ["pipeline.stages = 8", "4 in all"]),
        (
            {"pipeline": {"stages": 2, "layout": "segments"}},
            ["pipeline.stages = 2", "'vision' has 1 layers"],
        ),
        (
            {"pipeline": {"stages": 2, "layout": "parallel"}},
            ["pipeline.stages = 2", "a rank for each"],
        ),
        (
            {"pipeline": {"stages": 2, "layout": "chain"}, "phases__language__spans": [1, 2]},
            ["phases.language.spans", "does not divide"],
        ),
        (
            {"pipeline": {"stages": 2, "layout": "chain"}, "balance__mode": "none"},
            ["balance.mode (none)", "pipeline.stages"],
        ),
        (
            {
                "pipeline": {"stages": 2, "layout": "chain"},
                "mesh": {"data": 1, "tensor": 2},
                "components__vision__layout": {"batch": ["data", "fsdp", "tensor"]},
            },
            ["components.<name>.layout", "same ranks"],
        ),
    ],
)
def test_settings_that_cannot_be(data, changes, words):
    mesh = {"data": 1} | changes.pop("mesh", {})
    devices = changes["pipeline"]["stages"] * mesh.get("tensor", 1)
    with pytest.raises(USER_ERRORS) as error:
        sizes(data, devices, mesh=mesh, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"rows_read": (0, 0)}, "encoder_rows_per_microbatch"),
        ({"slots": {}}, "microbatches_in_flight"),
    ],
)
def test_an_example_that_no_run_holds(data, changes, key):
    made = sizes(data, 2, mesh={"data": 1}, pipeline={"stages": 2, "layout": "chain"})
    cramped = dataclasses.replace(
        made.training, tables=dataclasses.replace(made.training.tables, **changes)
    )
    config = parse_config(tiny_config(data))
    inputs = prepare(config, make_mesh({"data": 1}, jax.devices()[:1]))
    example = next(i for i in range(96) if inputs.corpus.example(i).media)
    with pytest.raises(ConfigError, match=rf"example {example} .*raise .*{key}"):
        plan_pipeline(inputs.corpus.gather(np.array([example])), made.spec, cramped)
