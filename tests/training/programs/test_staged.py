"""Training in pipeline stages computes the same as training without them, for any ring, schedule,
freezing and batch, and continues from the checkpoints of either.

The reference is the same step on one device without stages (the fixtures `alone` and `deep`).
"""

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
from tests.support import (
    ENCODER_LAYOUT,
    EXHAUSTIVE,
    Result,
    assert_close,
    assert_same,
    slow_cases,
    tiny_config,
)

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
    """Loss and gradients of a step, with the layers of all stages joined in their order."""
    result = setup.gradients(step)
    return dataclasses.replace(result, grads=jax.device_get(setup.programs.joined(result.grads)))


def used(result: Result) -> dict:
    """Gradients of the components that a step uses: those with an entry that is not zero."""
    return {
        name: g
        for name, g in result.grads.items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(g))
    }


def rows_of_step(step) -> dict[str, list]:
    """The capacity and span of every row of a step, by phase."""
    return {
        name: list(zip(capacities, step.spans[name], strict=True))
        for name, capacities in step.capacities.items()
    }


# Image rows have one of two sizes, text rows belong to one rank or to two
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
    """More examples than a run has microbatches for need further runs; nothing is dropped."""
    step = piped.step(examples)
    assert runs <= len(step.runs) < 2 * runs
    statistics = step.statistics
    assert {f"pipeline/{name}" for name in METRICS} <= statistics.keys()
    assert 0 < statistics["pipeline/idle_share"] < 1 and statistics["pipeline/ticks"] > 8 * runs
    # Every idle tick has one cause
    causes = sum(statistics[f"pipeline/idle_{cause}"] for cause in CAUSES)
    assert statistics["pipeline/idle_share"] == pytest.approx(causes)
    for name, rows in rows_of_step(step).items():
        real_slots = piped.corpus.gather(np.asarray(examples)).phases[name].real.sum()
        slots = 2 * sum(capacity for capacity, _ in rows)
        assert statistics[f"{name}/real_token_fraction"] == pytest.approx(real_slots / slots)
    assert_same(computed(piped, step), alone.gradients(alone.step(examples)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 12])
def test_batches_of_one_kind(piped, alone, kind, count):
    examples = alone.of_kind(kind)[:count]
    result = computed(piped, piped.step(examples))
    expected = alone.gradients(alone.step(examples))
    np.testing.assert_array_equal(result.targets, expected.targets)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    assert set(used(result)) == {"language", *kind, *(f"projector.{phase}" for phase in kind)}
    assert_close(used(result), used(expected), 1e-5)


# Trained parameters are of a different kind per component: biases of a tower, a head and MLPs
PATTERNS = {
    "vision": {"train": ["*bias"]},
    "audio": {"freeze": True},
    "language": {"train": ["head", "*.mlp.*"]},
}


def same_as_alone(setups, by_example, alone, components, split_backward):
    """Check the gradients of stages that train some of the parameters; return the setup and the
    reference's gradients.
    """
    pipeline = {"stages": 2, "layout": "chain", "split_backward": split_backward}
    staged = setups(by_example(mesh={"data": 2}, pipeline=pipeline, components=components), 4)
    result = computed(staged, staged.step(EXAMPLES))
    expected = alone.gradients(alone.step(EXAMPLES))
    trained, _ = staged.programs.functions.model.trainable.split(expected.grads)
    assert_same(result, dataclasses.replace(expected, grads=trained), 1e-5)
    return staged, trained


@pytest.mark.slow
@pytest.mark.parametrize("language", [{"freeze": True}, {"train": ["head"]}], ids=["none", "head"])
def test_layers_without_weight_gradients_have_none_to_keep(setups, by_example, alone, language):
    """A backward pass in halves keeps nothing for its second half where no layer is trained."""
    same_as_alone(setups, by_example, alone, {"language": language}, split_backward=True)


@pytest.mark.slow
@pytest.mark.parametrize("split_backward", [pytest.param(False, marks=EXHAUSTIVE), True])
def test_parameters_trained_by_pattern(setups, by_example, alone, tmp_path, split_backward):
    """The checkpoint holds optimizer states of the trained parameters alone."""
    staged, trained = same_as_alone(setups, by_example, alone, PATTERNS, split_backward)

    programs = staged.programs
    state = programs.init(0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, programs.to_saved(state))
        checkpoints.wait()
        restored = checkpoints.restore(programs.saved_state)
    moments = {name: optimizer[0].mu for name, optimizer in restored.optimizer.items()}
    assert jax.tree.structure(moments) == jax.tree.structure(trained)


@pytest.mark.slow
def test_deferred_examples(piped, alone):
    """A batch whose plan leaves language work to another microbatch has the same gradients."""
    # Which batches defer depends on the schedule, so random ones are tried
    batches = (np.random.default_rng(seed).permutation(96)[:28] for seed in range(200))
    batch = next(batch for batch in batches if deferred(piped, batch))
    assert_same(computed(piped, piped.step(batch)), alone.gradients(alone.step(batch)), 1e-5)


@pytest.mark.slow
def test_a_schedule_of_ones_own(piped, alone, data, monkeypatch):
    """An entry of the table `SCHEDULES` is all that a further schedule takes.

    The config names it, plans use it and prove it, and the same compiled program computes the same
    loss and gradients with it.
    """
    tree = tiny_config(
        data, mesh={"data": 1}, pipeline={"stages": 2, "layout": "chain", "schedule": "toy"}
    )
    with pytest.raises(
        USER_ERRORS, match=r"pipeline.schedule = 'toy'.*choose one of 1f1b, .*search"
    ):
        prepare(parse_config(tree), make_mesh({"stage": 2}, jax.devices()[:2]))
    monkeypatch.setitem(SCHEDULES, "toy", TOY)
    step = piped.step(EXAMPLES)
    toy_step = scheduled_by(piped, "toy").step(EXAMPLES)
    assert toy_step.statistics["pipeline/fallbacks"] == 0
    assert toy_step.statistics["pipeline/ticks"] > step.statistics["pipeline/ticks"], (
        "nothing overlaps"
    )
    result = computed(piped, toy_step)
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
    """Whether the plan of a batch leaves language work of an example to another microbatch."""
    plan = plan_pipeline(setup.corpus.gather(batch), setup.spec, setup.pipeline.training)
    return plan.statistics["pipeline/deferred_examples"] > 0


@pytest.mark.slow
def test_evaluation_counts_the_same(piped, alone):
    totals = []
    for setup in (piped, alone):
        pipeline = setup.pipeline and dataclasses.replace(
            setup.pipeline, training=setup.pipeline.evaluation
        )
        step = dataclasses.replace(setup, pipeline=pipeline).step(EXAMPLES)
        sums, failed = setup.programs.evaluate(setup.params, setup.put(step))
        assert failed == 0
        totals.append(jax.device_get(setup.programs.totals(sums)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *totals)


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
    result = computed(piped, piped.step(examples))
    expected = alone.gradients(alone.step(examples))
    assert result.failed == expected.failed == 1
    assert result.targets[alone.corpus.source_of(bad)] == 0
    np.testing.assert_array_equal(result.targets, expected.targets)
    assert_close(used(result), used(expected), 1e-5)


# ---------------------------------------------------------------------------- whole steps


@pytest.mark.slow
def test_steps_and_checkpoints_are_those_without_stages(piped, alone, tmp_path):
    """After the first step, each setup continues from the saved state of the other."""
    batches = [EXAMPLES[:12], EXAMPLES[12:], EXAMPLES[4:18]]
    setups = {"piped": piped, "alone": alone}
    losses = {"piped": [], "alone": []}
    states = {name: setup.programs.init(0) for name, setup in setups.items()}
    for index, batch in enumerate(batches):
        for name, setup in setups.items():
            states[name], metrics = setup.programs.train(states[name], setup.put(setup.step(batch)))
            losses[name].append(
                [float(metrics[key]) for key in ("loss", "gradient_norm", "learning_rate")]
            )
        if index == 0:
            for name, setup in setups.items():
                with Checkpoints(tmp_path / name, 1) as checkpoints:
                    checkpoints.save(1, setup.programs.to_saved(states[name]))
            for name, reader in (("piped", "alone"), ("alone", "piped")):
                with Checkpoints(tmp_path / reader, 1) as checkpoints:
                    saved = checkpoints.restore(setups[name].programs.saved_state)
                states[name] = setups[name].programs.from_saved(saved)
    np.testing.assert_allclose(losses["piped"], losses["alone"], rtol=2e-4)
    restored = piped.programs.from_saved(piped.programs.to_saved(states["piped"]))
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(states["piped"])
    )


@pytest.mark.slow
def test_rows_of_several_classes_in_a_step(piped, alone):
    """A step has rows of both classes in a phase. Which row has which class is data, and the
    gradients do not change.
    """
    row_classes = set()
    for batch in (EXAMPLES, range(8)):
        step = piped.step(batch)
        row_classes |= {(name, frozenset(held)) for name, held in rows_of_step(step).items()}
        assert_same(computed(piped, step), alone.gradients(alone.step(batch)), 1e-5)
    two_sizes = frozenset({(96, 1), (32, 1)})
    two_spans = frozenset({(96, 1), (96, 2)})
    assert {("vision", two_sizes), ("language", two_spans)} <= row_classes


@pytest.mark.slow
def test_batches_of_every_composition_use_the_same_program(piped, alone):
    """Batches differ in tables and rows, which are data of the program."""
    rng = np.random.default_rng(1)
    batches = [alone.of_kind(kind)[:12] for kind in KINDS]
    while len(batches) < 20:
        batches.append(rng.permutation(96)[: rng.integers(1, 25)].tolist())
    state = piped.programs.init(0)
    state, _ = piped.programs.train(state, piped.put(piped.step(EXAMPLES)))
    tables = set()
    row_mixes = set()
    counter = CompilationCounter()
    for batch in batches:
        step = piped.step(batch)
        tables |= {run.table.tobytes() for run in step.runs}
        row_mixes |= {tuple(sorted(held)) for held in rows_of_step(step).values()}
        state, metrics = piped.programs.train(state, piped.put(step))
        metrics = jax.device_get(metrics)
        assert metrics["targets_by_source"].sum() == step.targets and metrics["skipped"] == 0
    # The steps differed in tables and rows, which makes one program for all of them a finding
    assert counter.names == [] and len(tables) >= 20 and len(row_mixes) >= 20
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
    # Layers that do not divide evenly among the stages
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
    """Blocks are so small that even short rows have parts to share between ranks."""
    return {
        f"phases__{name}": {"block": 16, "capacities": slots, "spans": spans}
        for name, slots in capacities.items()
    }


# With these capacities, rows of both spans occur in one step
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
    """One step has rows of one rank and rows that several ranks share."""
    setup = setups(by_example(mesh=mesh, pipeline=pipeline, **changes, **DEEP), devices)
    step = setup.step(EXAMPLES)
    assert {1, 2} <= {span for spans in step.spans.values() for span in spans}
    assert_same(computed(setup, step), deep.gradients(deep.step(EXAMPLES)), 1e-5)


@pytest.mark.slow
def test_an_encoder_may_have_a_layout_of_its_own(setups, by_example, deep):
    """The encoder is replicated where the language model is split; only the axis `batch` must be
    the same for both.
    """
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
    """On two ranks, rows are shared as well."""
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
    """Runs of one step each in 2, 4 and no stages continue one another and equal one run of three
    steps without stages.
    """
    config = tmp_path / "config.yaml"
    averaged = {"components__language__ema": 0.6}
    config.write_text(yaml.safe_dump(tiny_config(data, mesh={"data": -1}, **averaged, **DEEP)))

    def losses(folder: str, *stages: int) -> list[float]:
        for index, stage_count in enumerate(stages):
            steps = (index + 1) * 3 // len(stages)
            pipeline = [f"pipeline.stages={stage_count}", "pipeline.layout=chain"]
            overrides = [f"run.directory={tmp_path / folder}", f"run.steps={steps}", *pipeline]
            assert main(["--config", str(config), "--resume", *overrides]) == 0
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        step_losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
        # The held-out loss is measured with averaged parameters
        return [*step_losses, json.loads(lines[-1])["eval/loss"]]

    expected = losses("without", 1)
    assert len(expected) == 4
    # AdamW amplifies the rounding differences between the programs over three steps
    np.testing.assert_allclose(losses("stages", 2, 4, 1), expected, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_profiled_run_saves_the_tables_that_timeline_draws(data, tmp_path, capsys):
    """Saved tables equal those planned for the same step; `timeline` draws them."""
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
    (saved_path,) = (tmp_path / "run" / "profile").rglob("schedule_*.npz")
    assert saved_path.name == "schedule_2.npz"
    planned_path = tmp_path / "planned.npz"
    assert (
        timeline.main(
            [*command, "--step", "2", "--save", str(planned_path), "--out", str(tmp_path)]
        )
        == 0
    )
    run = load_tables(saved_path)
    plan = load_tables(planned_path)
    assert run.columns == plan.columns and run.components == ("vision", "audio", "language")
    for name in ("rows", "wire_active"):
        for run_rows, planned_rows in zip(getattr(run, name), getattr(plan, name), strict=True):
            np.testing.assert_array_equal(run_rows, planned_rows)
    assert timeline.main(["--table", str(saved_path), "--out", str(tmp_path)]) == 0
    assert "schedule_2.npz" in capsys.readouterr().out
    last_tables = load_tables(tmp_path / "run" / "schedule.npz")
    np.testing.assert_array_equal(np.concatenate(last_tables.rows), np.concatenate(run.rows))
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
    """The programs of a config with deep models, planned but not compiled."""
    config = parse_config(tiny_config(data, **DEEP | changes))
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices])
    return plan_programs(config, prepare(config, mesh))[0]


CHAIN = {"stages": 2, "layout": "chain"}


@pytest.mark.slow
def test_a_chunk_keeps_of_every_layer_what_remat_says(data):
    """Bytes per slot follow from the model: 32 numbers in a hidden state, 4 heads of 8."""

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
    # Bytes per slot: float32 numbers have 4
    hidden = 4 * 32
    valid_flag = 4
    # The input of every layer, and the output of the last one
    assert full == layers * hidden + hidden + valid_flag
    heads = 4
    head_size = 8
    logsumexp = 1
    # `attention` keeps the output of each head and its logsumexp, in 4 bytes per number
    assert named == full + layers * 4 * heads * (head_size + logsumexp)
    assert named < dots < none


def test_memory_is_stated_in_words(data):
    programs = planned(data, 2, mesh={"data": 1}, pipeline=CHAIN | {"kept_residuals": 3})
    summary, *phase_lines = programs.describe_memory()
    assert summary.startswith("stages: a device holds ") and "sums of gradients" in summary
    assert [line.partition(":")[0] for line in phase_lines] == [
        "stages, vision",
        "stages, audio",
        "stages, language",
    ]
    assert all("residual 4 x" in line and "backward of a chunk" in line for line in phase_lines)


def test_what_is_not_of_the_layers_lies_on_the_stages_in_parts(data):
    """Each of two stages holds half of embedding, head, projectors and their optimizer state."""
    programs = planned(data, 4, mesh={"data": 1, "fsdp": 2}, pipeline=CHAIN)
    unstaged = programs.functions.model.abstract("float32")
    for name in ("language", "projector.vision"):
        for tree in (programs.state.params, programs.state.optimizer[name][0].mu, programs.trained):
            tree = tree.get(name, tree)
            for key in tree.keys() - {"layers"}:
                for leaf, unstaged_leaf in zip(
                    jax.tree.leaves(tree[key]), jax.tree.leaves(unstaged[name][key]), strict=True
                ):
                    assert held_by_device(leaf) == held_by_device(unstaged_leaf) / 2


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
    """The loop carries the bytes that the plan states, up to 5 % for counters and small arrays."""
    devices = 2 * mesh["data"] * mesh.get("fsdp", 1)
    setup = setups(by_example(mesh=mesh, pipeline=pipeline, **classes, **DEEP), devices)
    text = setup.programs.compiled[ProgramName("gradients")].as_text()
    carried = max(carried_bytes(parse(text)))
    assert carried == pytest.approx(setup.programs.held.total + setup.programs.held_sums, rel=0.05)


def carried_bytes(module) -> list[int]:
    """For every loop of a module, the bytes of the carried arrays that an iteration changes."""
    sizes_by_loop = []
    for lines in module.computations.values():
        for loop in (line for line in lines if line.opcode == "while"):
            body = {
                line.name: line for line in module.computations[BODY.search(loop.attributes)[1]]
            }
            (root,) = (line for line in body.values() if line.root)
            sizes = [size for _, size in array_bytes(loop.shape)]
            assert len(sizes) == len(root.operands)
            unchanged = [body[name].index == n for n, name in enumerate(root.operands)]
            sizes_by_loop.append(
                sum(size for size, same in zip(sizes, unchanged, strict=True) if not same)
            )
    return sizes_by_loop


# ---------------------------------------------------------------------------- what cannot be


def sizes(data, devices: int, **changes):
    """Sizes of the pipeline of a config."""
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
        (
            {
                "pipeline": {"stages": 2, "layout": "chain"},
                "mesh": {"data": 1, "tensor": 2},
                "components__vision__layout": {"sequence": ["tensor"]},
            },
            ["components.vision.layout.sequence", "pipeline.stages", "['tensor']"],
        ),
    ],
)
def test_settings_that_cannot_be(data, changes, words):
    mesh = {"data": 1} | changes.pop("mesh", {})
    devices = changes["pipeline"]["stages"] * mesh.get("tensor", 1)
    with pytest.raises(USER_ERRORS) as error:
        sizes(data, devices, mesh=mesh, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_layout_may_name_an_axis_of_one_device(data):
    """The layout that spreads an encoder over `tensor` changes nothing where that is one device."""
    staged = {"mesh": {"data": 2}, "pipeline": {"stages": 2, "layout": "chain"}}
    wide = {f"components__{phase}__layout": ENCODER_LAYOUT for phase in ("vision", "audio")}
    assert sizes(data, 4, **staged, **wide).spec == sizes(data, 4, **staged).spec


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"rows_read": (0, 0)}, "encoder_rows_per_microbatch"),
        ({"slots": {}}, "microbatches_in_flight"),
    ],
)
def test_an_example_that_no_run_holds(data, changes, key):
    """The error names the example and the key to raise."""
    planned = sizes(data, 2, mesh={"data": 1}, pipeline={"stages": 2, "layout": "chain"})
    cramped = dataclasses.replace(
        planned.training, tables=dataclasses.replace(planned.training.tables, **changes)
    )
    config = parse_config(tiny_config(data))
    inputs = prepare(config, make_mesh({"data": 1}, jax.devices()[:1]))
    example = next(i for i in range(96) if inputs.corpus.example(i).media)
    with pytest.raises(ConfigError, match=rf"example {example} .*raise .*{key}"):
        plan_pipeline(inputs.corpus.gather(np.array([example])), planned.spec, cramped)
