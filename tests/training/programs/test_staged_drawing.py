"""Training a model that draws computes the same in pipeline stages as without them.

Cases have two or three levels (encoder, text, generator), any ring, schedule, mesh and freezing,
and a loss of patches alone or of text and patches. The reference is the same config on one device.
"""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from jaxmllm.data.media.reference import MediaError
from jaxmllm.phases import LANGUAGE
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.tools import draw, timeline
from jaxmllm.train import main
from jaxmllm.training.programs.staged import StagedPrograms
from sharding.pipeline.graph import Pool
from tests.support import EXHAUSTIVE, Setup, assemble, assert_close, slow_cases
from tests.training.drawing import TWO_STREAMS, drawing_config, make_pictures, params_of
from tests.training.test_drawing import READ_APART

EXAMPLES = np.random.default_rng(1).permutation(24)[:16]
SEGMENTS = {"stages": 2, "layout": "segments"}
DEEP = {"model__language__layers": 4, "model__diffusion__layers": 4}
TWO_LEVELS = DEEP | {"model__vision": None}
THREE_LEVELS = DEEP | {"model__vision__layers": 2}
ONE_LOSS = {"objective__language__weight": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of captioned pictures by whether the user shows pictures, too."""
    folder_by_shown = {}
    for shown in (False, True):
        folder_by_shown[shown] = tmp_path_factory.mktemp("shown" if shown else "captions")
        make_pictures(folder_by_shown[shown], shown=shown)
    return folder_by_shown


@pytest.fixture(scope="module")
def made(folders):
    """(changes, devices) -> the setup and what it computes of `EXAMPLES`, kept by configuration."""
    results: dict[str, Any] = {}

    def get(devices: int = 1, **changes: Any) -> tuple[Setup, Any]:
        key = json.dumps([devices, changes], sort_keys=True)
        if key not in results:
            sees = changes.get("model__vision", True) is not None
            setup = assemble(drawing_config(folders[sees], **changes), devices)
            results[key] = setup, computed(setup, EXAMPLES)
        return results[key]

    return get


def computed(setup: Setup, examples, failures: int = 0) -> tuple[Any, Any]:
    """Gradients with the layers of all stages in their order, and sums by source over all ranks."""
    step = setup.step(examples)
    grads, sums, failed = setup.programs.gradients(params_of(setup), setup.put(step))
    assert failed == len(step.failures) == failures
    if isinstance(setup.programs, StagedPrograms):
        grads = setup.programs.joined(grads)
    return jax.device_get(grads), jax.tree.map(lambda x: x.sum(0), jax.device_get(sums))


def assert_same(actual, expected, tolerance: float = 1e-5) -> None:
    """Sums and gradients agree, and components without a gradient in `expected` have none."""
    used = {name for name, tree in expected[0].items() if any(map(np.any, jax.tree.leaves(tree)))}
    assert actual[0].keys() == expected[0].keys()
    used_grads = [{name: grads[name] for name in used} for grads in (actual[0], expected[0])]
    assert_close(*used_grads, tolerance)
    for name in actual[0].keys() - used:
        assert not any(map(np.any, jax.tree.leaves(actual[0][name]))), name
    for got, want in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance)


# ---------------------------------------------------------------------------- three levels, two losses


@pytest.fixture(scope="module")
def three(made) -> Setup:
    """Encoder, language model and generator on two stages of two ranks, backward in halves."""
    pipeline = SEGMENTS | {"split_backward": True, "microbatches": 6}
    return made(4, mesh={"data": 2}, pipeline=pipeline, **THREE_LEVELS)[0]


@pytest.fixture(scope="module")
def alone(made) -> Setup:
    return made(**THREE_LEVELS)[0]


@pytest.mark.slow
def test_three_levels_with_a_loss_on_both(made, three):
    assert_same(computed(three, EXAMPLES), made(**THREE_LEVELS)[1])
    ring = three.pipeline.training.tables.ring
    assert [chain.name for chain in ring.chains] == ["vision", "language", "diffusion"]
    assert ring.readers == (1, 2) and ring.has_loss(1)


@pytest.mark.slow
def test_batches_of_every_composition(three, alone):
    """Texts, drawn pictures, edits or a single example: no batch compiles anything."""
    by_kind = [
        [i for i in range(24) if {m.phase for m in alone.corpus.example(i).media} == kind]
        for kind in (set(), {"diffusion"}, {"vision", "diffusion"})
    ]
    batches = [*by_kind, by_kind[1][:1], by_kind[0][:1] + by_kind[2][:2]]
    params = params_of(three)
    counter = CompilationCounter()
    results = []
    for batch in batches:
        step = three.step(batch)
        results.append(jax.device_get(three.programs.gradients(params, three.put(step))))
    assert counter.names == []
    counter.close()
    for batch, (grads, sums, _) in zip(batches, results, strict=True):
        joined = jax.device_get(three.programs.joined(grads))
        assert_same((joined, jax.tree.map(lambda x: x.sum(0), sums)), computed(alone, batch), 2e-5)


@pytest.mark.slow
def test_evaluations_count_the_same(three, alone):
    totals = []
    for setup in (three, alone):
        pipeline = setup.pipeline and replace(setup.pipeline, training=setup.pipeline.evaluation)
        step = replace(setup, pipeline=pipeline).step(EXAMPLES)
        sums, failed = setup.programs.evaluate(params_of(setup), setup.put(step))
        assert failed == 0
        totals.append(jax.device_get(setup.programs.totals(sums)))
    for got, want in zip(*map(jax.tree.leaves, totals), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert totals[0].drawn.patches.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["vision", "diffusion"])
def test_a_picture_that_does_not_decode(made, three, alone, monkeypatch, phase):
    """A shown picture masks what is read after it, in both losses; a drawn one masks itself."""
    failed_example, media = next(
        (i, media)
        for i in EXAMPLES.tolist()
        for media in alone.corpus.example(i).media
        if media.phase == phase
    )
    modality = alone.corpus.modalities[phase]
    load = type(modality).load

    def broken(self, reference, shape):
        if reference == media.reference:
            raise MediaError("undecodable_image", f"{reference} is broken")
        return load(self, reference, shape)

    monkeypatch.setattr(type(modality), "load", broken)
    result = computed(three, EXAMPLES, 1)
    expected = computed(alone, EXAMPLES, 1)
    assert_same(result, expected)
    source = alone.corpus.source_of(failed_example)
    complete_sums = made(**THREE_LEVELS)[1][1]
    assert result[1].drawn.patches[source] < complete_sums.drawn.patches[source]
    assert (result[1].targets[source] == 0) == (phase == "vision")


# ---------------------------------------------------------------------------- any ring, schedule, mesh and freezing


def rows_of(*phases: str) -> dict[str, Any]:
    """Short rows that belong to one rank or to two."""
    return {
        f"phases__{name}": {"block": 16, "capacities": [64], "spans": [1, 2]} for name in phases
    }


FROZEN = {"components": {"language": {"freeze": True}}}
CHAIN = {"stages": 2, "layout": "chain"}
CASES = {  # devices, mesh, pipeline, model
    "two-levels-split": (
        4,
        {"data": 2},
        {"stages": 2, "layout": "parallel", "split_backward": True},
        TWO_LEVELS | ONE_LOSS,
    ),
    "two-levels-chain": (2, {"data": 1}, CHAIN | {"microbatches": 4}, TWO_LEVELS | ONE_LOSS),
    "two-losses-context2": (
        4,
        {"data": 1, "context": 2},
        CHAIN | {"schedule": "gpipe"},
        TWO_LEVELS,
    ),
    "frozen-text": (
        2,
        {"data": 1},
        SEGMENTS | {"schedule": "interleaved"},
        TWO_LEVELS | ONE_LOSS | FROZEN,
    ),
    "projector-alone": (
        2,
        {"data": 1},
        CHAIN,
        TWO_LEVELS
        | ONE_LOSS
        | {"components": {"language": {"freeze": True}, "diffusion": {"freeze": True}}},
    ),
    "generator-frozen": (
        2,
        {"data": 1},
        SEGMENTS,
        TWO_LEVELS | {"components": {"diffusion": {"freeze": True}}},
    ),
    "three-levels-1f1b": (
        4,
        {"data": 1},
        {"stages": 4, "layout": "chain", "schedule": "1f1b"},
        THREE_LEVELS,
    ),
    "three-levels-parallel4": (
        4,
        {"data": 1},
        {"stages": 4, "layout": "parallel", "split_backward": True, "deferral": False},
        THREE_LEVELS | ONE_LOSS,
    ),
    "three-levels-fsdp2-search": (
        4,
        {"data": 1, "fsdp": 2},
        SEGMENTS | {"schedule": "search", "rollouts": 8, "kept_residuals": 2},
        THREE_LEVELS | ONE_LOSS,
    ),
    "three-levels-shared-rows": (
        4,
        {"data": 2},
        SEGMENTS,
        THREE_LEVELS | rows_of("vision", "language", "diffusion"),
    ),
    "two-streams-tensor2": (
        8,
        {"data": 2, "tensor": 2},
        CHAIN,
        THREE_LEVELS | {f"model__diffusion__{key}": value for key, value in TWO_STREAMS.items()},
    ),
    "read-apart-context2": (
        4,
        {"data": 1, "context": 2},
        SEGMENTS,
        TWO_LEVELS
        | ONE_LOSS
        | {f"model__diffusion__{key}": value for key, value in READ_APART.items()},
    ),
}


@pytest.mark.parametrize(
    "devices, mesh, pipeline, model", slow_cases(CASES, {"two-losses-context2"})
)
def test_any_ring_mesh_and_freezing(made, folders, devices, mesh, pipeline, model):
    unshared = {key: value for key, value in model.items() if not key.startswith("phases__")}
    expected = made(**unshared)[1]  # on one device, where no row is shared
    sees = model.get("model__vision", True) is not None
    tree = drawing_config(folders[sees], mesh=mesh, pipeline=pipeline, **model)
    setup = assemble(tree, devices)
    result = computed(setup, EXAMPLES)
    assert_same(result, expected)
    # A frozen decoder below a generator needs no backward pass through its tokens
    if "components" in model and model["components"].get("language"):
        slots = setup.pipeline.training.tables.slots
        backward = {(Pool.GRADIENT, 0), (Pool.TOKEN_GRADIENT, 0)} & slots.keys()
        assert not backward and LANGUAGE not in result[0], "frozen text runs forward alone"


# ---------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@EXHAUSTIVE[1]
def test_a_run_goes_on_with_other_stages_and_draws(folders, tmp_path, capsys):
    """Runs in 4, 1 and 2 stages continue one another and equal one run without stages.

    Compared are both losses of every step and of held-out data with averaged parameters. The
    timeline of the last step is drawn, and a picture from what was saved in stages.
    """
    config = tmp_path / "config.yaml"
    averaged = {"components__diffusion__ema": 0.6, "mesh": {"data": -1}}
    config.write_text(yaml.safe_dump(drawing_config(folders[True], **averaged, **THREE_LEVELS)))

    def losses(folder: str, *stages: int) -> list[float]:
        for index, stage_count in enumerate(stages):
            overrides = [
                f"run.directory={tmp_path / folder}",
                f"run.steps={(index + 1) * 3 // len(stages)}",
                f"pipeline.stages={stage_count}",
                "pipeline.layout=chain",
            ]
            assert main(["--config", str(config), "--resume", *overrides]) == 0
        lines = [
            json.loads(line)
            for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        ]
        step_losses = [
            record[key] for record in lines for key in ("text_loss", "drawn_loss") if key in record
        ]
        return [*step_losses, lines[-1]["eval/loss"], lines[-1]["eval/drawn_loss"]]

    expected = losses("without", 1)
    assert len(expected) == 8
    # AdamW amplifies the rounding differences between the programs over three steps
    np.testing.assert_allclose(losses("stages", 4, 1, 2), expected, rtol=3e-4)
    run = tmp_path / "stages"
    assert timeline.main(["--run", str(run), "--out", str(tmp_path)]) == 0
    arguments = ["--prompt", "a red circle", "--size", "16x24", "--steps", "2"]
    for name in ("stages", "without"):
        output = ["--out", str(tmp_path / f"drawn-{name}")]
        assert draw.main(["--run", str(tmp_path / name), *arguments, *output]) == 0
    assert len(list((tmp_path / "drawn-stages").glob("*.png"))) == 1
