"""Drawing with a run: results do not depend on the other requests, the devices or the programs."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmllm.config.read import parse_config
from jaxmllm.data.sources.requests import Requests
from jaxmllm.models.rows import TokenPool
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.setup.sampling import Drawing, drawing_config, plan_drawing
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools import draw
from jaxmllm.training.generator_functions import GeneratorFunctions
from jaxmllm.training.objectives.flow import TIME_BANDS, FlowSums
from jaxmllm.training.run_folder import write_config
from jaxmllm.training.saved_parameters import saved_parameters
from sharding.mesh import make_mesh
from tests.support import EXHAUSTIVE
from tests.training.drawing import TWO_STREAMS, latents_config, make_pictures, perturbed
from tests.training.drawing import drawing_config as run_config

ALONE = {"prompt": "draw aaa", "size": "20x24", "name": "alone"}
SHOWN = [{"type": "image", "image": "2-shown.png"}, {"type": "text", "text": "the same"}]
OTHERS = [
    {"prompt": "draw a", "size": "8x12", "seed": 3},
    {"messages": [{"role": "user", "content": SHOWN}], "size": "16x16", "name": "seen"},
    {"prompt": "draw a clip", "size": "8x4", "frames": 3, "name": "clip"},
    *({"prompt": "draw " + n * "b", "size": f"{4 * n}x{8 * n}"} for n in range(1, 4)),
]


TWENTY = [
    *OTHERS,
    *({"prompt": "draw " + n * "c", "size": f"{4 * n}x8", "seed": n} for n in range(1, 15)),
]


def saved_run(folder: Path, tree: dict[str, Any]) -> Path:
    """A run folder whose checkpoint holds spoiled weights beside the
    averages, which drawing must use."""
    write_config(folder, parse_config(tree))
    planned = planned_drawing(folder, [ALONE], 1)
    model = planned.programs.functions.model
    params = perturbed(model.init(0, "float32"))
    spoiled = jax.tree.map(lambda leaf: leaf + 1, params["diffusion"])
    state = {"params": params | {"diffusion": spoiled}}
    state["averages"] = {"diffusion": params["diffusion"]}
    with Checkpoints(folder / "checkpoints", 1) as checkpoints:
        checkpoints.save(1, state)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder that draws, with pictures to show."""
    folder = tmp_path_factory.mktemp("sampling")
    make_pictures(folder)
    tree = run_config(
        folder,
        run={"directory": str(folder), "steps": 1},
        objective__diffusion={"prediction": "sample", "shift": 4.0, "condition_drop": 0.2},
        model__diffusion__patch_frames=1,
        components__diffusion__ema=0.9,
        data__batch_size=4,
    )
    return saved_run(folder, tree)


def planned_drawing(run: Path, entries: Sequence[Any], devices: int, *overrides: str) -> Drawing:
    """Plan to draw requests with a run on some devices."""
    path = run / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    config = drawing_config(run, overrides)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:devices], spans=mesh_spans(config))
    return plan_drawing(config, Requests.of_file(path, 0), mesh)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compiled programs to draw with, and their parameters."""

    drawing: Drawing
    params: Any

    def values(self, steps: int = 4, guidance: float = 2.5) -> dict[str, np.ndarray]:
        pictures = self.drawing.drawn(self.params, steps, guidance)
        return {
            picture.name: picture.frames[0] if not picture.is_clip else picture.frames
            for picture in pictures
        }


def compiled(run: Path, entries: Sequence[Any], devices: int, *overrides: str) -> Compiled:
    """Plan, load the parameters and compile."""
    drawing = planned_drawing(run, entries, devices, *overrides)
    params, _ = saved_parameters(run, drawing.programs.params, lambda line: None)
    drawing.programs.compile()
    return Compiled(drawing, params)


@pytest.fixture(scope="module")
def alone(run) -> Compiled:
    return compiled(run, [ALONE], 1)


def test_what_was_measured_of_training_does_not_count(tmp_path):
    write_config(
        tmp_path, parse_config(run_config(tmp_path, balance={"calibration": "absent.json"}))
    )
    assert drawing_config(tmp_path).balance.calibration is None


@pytest.mark.slow
def test_steps_and_guidance_compile_nothing(alone):
    picture = alone.values()["alone"]
    counter = CompilationCounter()
    fewer_steps = alone.values(3, 2.5)["alone"]
    unguided, prompted, guided = (
        alone.values(1, guidance)["alone"] for guidance in (0.0, 1.0, 2.5)
    )
    assert counter.count == 0
    assert picture.shape == (20, 24, 3) and np.abs(picture - fewer_steps).max() > 1e-2
    # Within a single step, guidance is linear
    np.testing.assert_allclose(guided - unguided, 2.5 * (prompted - unguided), atol=1e-5)
    assert np.abs(prompted - unguided).max() > 1e-3, "what is drawn depends on the prompt"


@pytest.mark.slow
def test_times_are_shifted_by_the_size_of_what_is_drawn(alone):
    """The shift is an argument, so programs are not compiled again.

    A picture of 30 patches has half the shift of 120 patches, since shifts
    grow with the root of the size.
    """
    config = alone.drawing.config
    picture = alone.values()["alone"]
    counter = CompilationCounter()

    def drawn_with(**objective: Any) -> np.ndarray:
        diffusion = config.objective.diffusion.model_copy(update=objective)
        changed = config.objective.model_copy(update={"diffusion": diffusion})
        changed = config.model_copy(update={"objective": changed})
        drawing = dataclasses.replace(alone.drawing, config=changed)
        return dataclasses.replace(alone, drawing=drawing).values()["alone"]

    assert config.objective.diffusion.shift == 4.0
    by_size = drawn_with(shift=8.0, shift_patches=120)
    np.testing.assert_allclose(by_size, picture, atol=1e-6)
    assert np.abs(drawn_with(shift_patches=120) - picture).max() > 1e-3
    assert counter.count == 0


@pytest.mark.slow
def test_one_step_goes_where_the_loss_is_zero(alone):
    """From the same noise at time 1, the training loss is the distance between the picture of one
    step and the true one.

    This holds for the half with the prompt and for the half without. Blank patches are
    those of a black picture, -1.
    """
    programs = alone.drawing.programs
    params = alone.params
    batch = programs.put(alone.drawing._filler(0, np.arange(1)))
    pools, _, _ = programs._encode(params, batch, programs._zeros("failed"), backward=False)
    states, _ = programs._states(params, batch, pools, backward=False)
    (pool,) = states["diffusion"]
    (rows,) = batch.rows["diffusion"]
    source_sums, time_sums = (np.zeros((1, groups), np.float32) for groups in (1, TIME_BANDS))
    sums = FlowSums(source_sums, source_sums, time_sums, time_sums)
    functions = GeneratorFunctions(programs.functions, "diffusion")
    rows_at_one = rows._replace(times=np.ones_like(rows.times))
    sums = jax.jit(functions.evaluate)(params, rows_at_one, pool, np.int32(0), sums)
    loss = sums.loss
    patches = sums.patches
    np.testing.assert_array_equal(sums.loss_by_time[:, -1], loss[:, 0])
    assert not sums.patches_by_time[:, :-1].any()
    pictures = [alone.values(1, guidance)["alone"] for guidance in (1.0, 0.0)]
    assert patches.sum() == 2 * 30
    expected = sum(30 * np.mean((values + 1) ** 2) for values in pictures)
    np.testing.assert_allclose(loss.sum(), expected, rtol=1e-5)


MESHES = {  # devices, and overrides of the run's config
    "data4": (4, ()),
    "context2": (2, ("mesh.data=1", "mesh.context=2")),
    "spans": (4, ("phases.diffusion.spans=[4]", "phases.diffusion.capacities=[32]")),
}


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "data4" else EXHAUSTIVE)
        for name in MESHES
    ],
)
def test_a_picture_is_the_same_whatever_is_drawn_with_it(run, alone, mesh):
    devices, overrides = MESHES[mesh]
    entries = TWENTY if mesh == "data4" else OTHERS
    pictures = compiled(run, [*entries, ALONE], devices, *overrides).values()
    assert len(pictures) == len(entries) + 1 and pictures["clip"].shape == (3, 8, 4, 3)
    np.testing.assert_allclose(pictures["alone"], alone.values()["alone"], atol=1e-4)
    assert not np.allclose(pictures["0005"][:4, :8], pictures["0006"][:4, :8])


@pytest.mark.parametrize("conditioning", [pytest.param("joint", marks=EXHAUSTIVE), "cross"])
def test_what_is_pooled_of_a_prompt_does_not_move_the_half_without_it(tmp_path, conditioning):
    """With guidance 0, a step must not depend on the states of the prompt."""
    changes = {"conditioning": conditioning, "pooled_conditions": True}
    changes = {f"model__diffusion__{key}": value for key, value in changes.items()}
    tree = run_config(tmp_path, model__vision=None, data__batch_size=2, **changes)
    write_config(tmp_path, parse_config(tree))
    drawing = planned_drawing(tmp_path, [ALONE, OTHERS[0]], 1)
    functions = GeneratorFunctions(drawing.programs.functions, "diffusion")
    params = perturbed(functions.step.model.init(0, "float32"))
    batch = drawing.programs.put(drawing._filler(0, np.arange(2)))
    (rows,) = batch.rows["diffusion"]
    noisy = np.asarray(functions.first_patches(rows))
    pool = drawing.programs.pools["diffusion"]
    draw_step = jax.jit(functions.draw_step)

    def drawn(seed: int, guidance: float) -> np.ndarray:
        states = np.random.default_rng(seed).normal(1, 1, pool.tokens.shape).astype(np.float32)
        prompt = TokenPool(states, np.ones(pool.valid.shape, np.int32))
        times = np.float32([1.0, 0.5])
        stepped = draw_step(params, rows, prompt, np.int32(0), noisy, *times, np.float32(guidance))
        return np.asarray(stepped)[np.asarray(rows.patches) >= 0]

    np.testing.assert_allclose(drawn(0, 0.0), drawn(1, 0.0), atol=1e-6)
    assert np.abs(drawn(0, 1.0) - drawn(1, 1.0)).max() > 1e-3


def test_without_guidance_patches_lie_once_and_take_the_same_step(tmp_path):
    shallow = run_config(tmp_path, model__vision=None, model__diffusion__layers=1)
    write_config(tmp_path, parse_config(shallow))
    (tmp_path / "asked.jsonl").write_text(json.dumps(ALONE))
    config = drawing_config(tmp_path)
    requests = Requests.of_file(tmp_path / "asked.jsonl", 0)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:1], spans=mesh_spans(config))
    steps = []
    params = None
    for guided in (True, False):
        drawing = plan_drawing(config, requests, mesh, guided)
        functions = GeneratorFunctions(drawing.programs.functions, "diffusion")
        batch = drawing.programs.put(drawing._filler(0, np.arange(1)))
        (rows,), (host,) = batch.rows["diffusion"], batch.host.rows["diffusion"]
        width = config.model.language.width
        states = np.random.default_rng(0).normal(size=(1, 64, width)).astype(np.float32)
        prompt = TokenPool(states, np.ones((1, 64), np.int32))
        params = params or perturbed(functions.step.model.init(0, "float32"))
        noisy = functions.first_patches(rows)
        times_and_guidance = np.float32([1.0, 0.5, 1.0])
        stepped = jax.jit(functions.draw_step)(
            params, rows, prompt, np.int32(0), noisy, *times_and_guidance
        )
        (picture,) = drawing._of_row(host, np.asarray(stepped))
        steps.append((picture.frames, (host["patches"] >= 0).sum()))
    (doubled, doubled_patches), (single, single_patches) = steps
    assert (doubled_patches, single_patches) == (60, 30)
    np.testing.assert_allclose(single, doubled, atol=1e-5)


READ_APART = {"conditioning": "cross", "pooled_conditions": True, "padded_conditions": 40}


@pytest.mark.slow
@pytest.mark.parametrize(
    "generator", [READ_APART, pytest.param(TWO_STREAMS, marks=EXHAUSTIVE)], ids=["apart", "streams"]
)
def test_weights_of_conditions_draw_a_picture_whatever_is_drawn_with_it(tmp_path, generator):
    make_pictures(tmp_path)
    changes = {f"model__diffusion__{key}": value for key, value in generator.items()}
    run = saved_run(tmp_path / "run", run_config(tmp_path, **changes))
    picture = compiled(run, [ALONE], 1).values()["alone"]
    entries = [entry for entry in OTHERS if "messages" not in entry]
    batch = compiled(run, [*entries, ALONE], 4, *MESHES["context2"][1], "mesh.fsdp=2")
    np.testing.assert_allclose(batch.values()["alone"], picture, atol=1e-4)
    counter = CompilationCounter()
    unprompted, prompted = (batch.values(1, guidance)["alone"] for guidance in (0.0, 1.0))
    assert counter.count == 0
    assert np.abs(prompted - unprompted).max() > 1e-3, "what is drawn depends on the prompt"


@pytest.mark.slow
def test_the_command_writes_them(run, alone, tmp_path, capsys):
    requests = tmp_path / "asked.jsonl"
    requests.write_text("\n".join(map(json.dumps, [ALONE, OTHERS[2]])))
    options = ["--steps", "4", "--out", str(tmp_path / "new"), "--fps", "4", "mesh.data=8"]
    assert draw.main(["--run", str(run), "--jsonl", str(requests), *options]) == 0
    assert "checkpoints/1, averaged: diffusion" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"alone.png", "clip.png"}
    values = np.clip((alone.values()["alone"] + 1) * 127.5, 0, 255)
    pixels = np.asarray(Image.open(tmp_path / "new" / "alone.png"), np.float32)
    assert np.abs(pixels - values).max() < 1
    with Image.open(tmp_path / "new" / "clip.png") as clip:
        assert (clip.n_frames, clip.size, clip.info["duration"]) == (3, (4, 8), 250)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_latents_are_drawn_with_their_mean_and_deviation(tmp_path):
    clips = {}
    for name, mean in (("plain", 0.0), ("moved", 3.0)):
        folder = tmp_path / name
        folder.mkdir()
        latents = {"mean": [mean], "std": [2.0 if mean else 1.0]}
        tree = latents_config(
            folder, run={"directory": str(folder), "steps": 1}, data__latents=latents
        )
        clip = {"prompt": "a clip", "size": "4x6", "frames": 3, "name": "clip"}
        clips[name] = compiled(saved_run(folder, tree), [clip], 1).values()["clip"]
    assert clips["plain"].shape == (3, 4, 6, 5)
    np.testing.assert_allclose(clips["moved"], 2 * clips["plain"] + 3, atol=1e-5)
