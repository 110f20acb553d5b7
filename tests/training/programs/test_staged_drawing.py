"""Training a model that draws in pipeline stages is the same training: two and three levels, any ring, schedule, mesh
and freezing, with a loss of patches or of text and patches."""

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
    """Captions alone, and with pictures that are shown, by whether the model sees."""
    made = {}
    for shown in (False, True):
        made[shown] = tmp_path_factory.mktemp("shown" if shown else "captions")
        make_pictures(made[shown], shown=shown)
    return made


@pytest.fixture(scope="module")
def made(folders):
    """(changes, devices) -> Setup, and what it computes of `EXAMPLES`; the latest with no stages are kept."""
    kept: dict[str, Any] = {}

    def get(devices: int = 1, **changes: Any) -> tuple[Setup, Any]:
        key = json.dumps([devices, changes], sort_keys=True)
        if key not in kept:
            sees = changes.get("model__vision", True) is not None
            setup = assemble(drawing_config(folders[sees], **changes), devices)
            kept[key] = setup, computed(setup, EXAMPLES)
        return kept[key]

    return get


def computed(setup: Setup, examples, failures: int = 0) -> tuple[Any, Any]:
    """Gradients with the layers one behind another, and sums by source."""
    step = setup.step(examples)
    grads, sums, failed = setup.programs.gradients(params_of(setup), setup.put(step))
    assert failed == len(step.failures) == failures
    if isinstance(setup.programs, StagedPrograms):
        grads = setup.programs.joined(grads)
    return jax.device_get(grads), jax.tree.map(lambda x: x.sum(0), jax.device_get(sums))


def assert_same(actual, expected, tolerance: float = 1e-5) -> None:
    used = {name for name, tree in expected[0].items() if any(map(np.any, jax.tree.leaves(tree)))}
    assert actual[0].keys() == expected[0].keys()
    parts = [{name: grads[name] for name in used} for grads in (actual[0], expected[0])]
    assert_close(*parts, tolerance)
    for name in actual[0].keys() - used:
        assert not any(map(np.any, jax.tree.leaves(actual[0][name]))), name
    for got, want in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance)


# ---------------------------------------------------------------------------- three levels, two losses


@pytest.fixture(scope="module")
def three(made) -> Setup:
    """Encoder, language and generator on two stages of two ranks, a backward pass in two halves."""
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
    """Text alone, pictures alone, edits alone, one example: none of them compiles anything."""
    by_kind = [
        [i for i in range(24) if {m.phase for m in alone.corpus.example(i).media} == kind]
        for kind in (set(), {"diffusion"}, {"vision", "diffusion"})
    ]
    batches = [*by_kind, by_kind[1][:1], by_kind[0][:1] + by_kind[2][:2]]
    params = params_of(three)
    counter = CompilationCounter()
    found = []
    for batch in batches:
        step = three.step(batch)
        found.append(jax.device_get(three.programs.gradients(params, three.put(step))))
    assert counter.names == []
    counter.close()
    for batch, (grads, sums, _) in zip(batches, found, strict=True):
        joined = jax.device_get(three.programs.joined(grads))
        assert_same((joined, jax.tree.map(lambda x: x.sum(0), sums)), computed(alone, batch), 2e-5)


@pytest.mark.slow
def test_evaluations_count_the_same(three, alone):
    results = []
    for setup in (three, alone):
        pipeline = setup.pipeline and replace(setup.pipeline, training=setup.pipeline.evaluation)
        step = replace(setup, pipeline=pipeline).step(EXAMPLES)
        sums, failed = setup.programs.evaluate(params_of(setup), setup.put(step))
        assert failed == 0
        results.append(jax.device_get(setup.programs.totals(sums)))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert results[0].drawn.patches.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["vision", "diffusion"])
def test_a_picture_that_does_not_decode(made, three, alone, monkeypatch, phase):
    """A shown one masks what is read behind it, in both losses; a drawn one masks itself."""
    bad, media = next(
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
    result, expected = computed(three, EXAMPLES, 1), computed(alone, EXAMPLES, 1)
    assert_same(result, expected)
    source = alone.corpus.source_of(bad)
    whole = made(**THREE_LEVELS)[1][1]
    assert result[1].drawn.patches[source] < whole.drawn.patches[source]
    assert (result[1].targets[source] == 0) == (phase == "vision")


# ---------------------------------------------------------------------------- any ring, schedule, mesh and freezing


def rows_of(*phases: str) -> dict[str, Any]:
    """Short rows, of one rank or of two."""
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
    one_rank = {key: value for key, value in model.items() if not key.startswith("phases__")}
    expected = made(**one_rank)[1]  # which shares rows with none
    sees = model.get("model__vision", True) is not None
    tree = drawing_config(folders[sees], mesh=mesh, pipeline=pipeline, **model)
    setup = assemble(tree, devices)
    result = computed(setup, EXAMPLES)
    assert_same(result, expected)
    if "components" in model and model["components"].get("language"):
        slots = setup.pipeline.training.tables.slots
        backward = {(Pool.GRADIENT, 0), (Pool.TOKEN_GRADIENT, 0)} & slots.keys()
        assert not backward and LANGUAGE not in result[0], "frozen text runs forward alone"


# ---------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@EXHAUSTIVE[1]
def test_a_run_goes_on_with_other_stages_and_draws(folders, tmp_path, capsys):
    """Steps in 2, in 4 and in no stages against as many without any; averages, held-out losses, the timeline of its
    last step, and a picture of what was saved in stages."""
    config = tmp_path / "config.yaml"
    averaged = {"components__diffusion__ema": 0.6, "mesh": {"data": -1}}
    config.write_text(yaml.safe_dump(drawing_config(folders[True], **averaged, **THREE_LEVELS)))

    def losses(folder: str, *stages: int) -> list[float]:
        for number, count in enumerate(stages):
            overrides = [
                f"run.directory={tmp_path / folder}",
                f"run.steps={(number + 1) * 3 // len(stages)}",
                f"pipeline.stages={count}",
                "pipeline.layout=chain",
            ]
            assert main(["--config", str(config), "--resume", *overrides]) == 0
        lines = [
            json.loads(line)
            for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        ]
        found = [
            record[key] for record in lines for key in ("text_loss", "drawn_loss") if key in record
        ]
        return [*found, lines[-1]["eval/loss"], lines[-1]["eval/drawn_loss"]]

    expected = losses("without", 1)
    assert len(expected) == 8
    np.testing.assert_allclose(losses("stages", 4, 1, 2), expected, rtol=3e-4)
    run = tmp_path / "stages"
    assert timeline.main(["--run", str(run), "--out", str(tmp_path)]) == 0
    asked = ["--prompt", "a red circle", "--size", "16x24", "--steps", "2"]
    for name in ("stages", "without"):
        out = ["--out", str(tmp_path / f"drawn-{name}")]
        assert draw.main(["--run", str(tmp_path / name), *asked, *out]) == 0
    assert len(list((tmp_path / "drawn-stages").glob("*.png"))) == 1
