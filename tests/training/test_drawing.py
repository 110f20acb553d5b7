"""A model that sees pictures and draws pictures and clips has the same gradients however it runs.

Packing, plans, meshes, adapters and frozen components are compared with one device (the fixtures
`drawing`, `both` and `whole`), and gradients with the slope of the losses.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from PIL import Image

from jaxmllm.config.schema import ConfigError
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.sources.source import DataError
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.train import main
from tests.support import (
    ENCODER_LAYOUT,
    EXHAUSTIVE,
    Setup,
    added,
    assemble,
    assert_close,
    scaled,
    slow_cases,
)
from tests.training.drawing import (
    TWO_STREAMS,
    drawing_config,
    latents_config,
    make_latents,
    make_pictures,
    perturbed,
)

EXAMPLES = np.random.default_rng(1).permutation(24)[:16]
# Only the generator has a loss: the decoder learns through the states that the generator reads
DRAWING_ALONE = {"model__vision": None, "objective__language__weight": 0.0}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    make_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    """The same examples without pictures that the user shows."""
    folder = tmp_path_factory.mktemp("captions")
    make_pictures(folder, shown=False)
    return folder


@pytest.fixture(scope="module")
def drawing(captions) -> Setup:
    """Text to pictures on one rank; the decoder learns from pictures alone."""
    return assemble(drawing_config(captions, **DRAWING_ALONE), 1)


def test_data_without_a_drawn_item_are_refused_where_text_has_no_loss(tmp_path):
    record = {"messages": [{"role": role, "content": "text"} for role in ("user", "assistant")]}
    (tmp_path / "pictures.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=r"nothing of data.sources is drawn, so that nothing has"):
        assemble(drawing_config(tmp_path, **DRAWING_ALONE), 1)


@pytest.fixture(scope="module")
def both(pictures) -> Setup:
    """Pictures are seen as well, and text has a loss: the reference of all plans and meshes."""
    return assemble(drawing_config(pictures), 1)


def computed(setup: Setup, step: HostStep):
    """Gradients, and sums by source over all ranks."""
    grads, sums, failed = jax.device_get(
        setup.programs.gradients(perturbed(setup.params), setup.put(step))
    )
    assert failed == len(step.failures) == 0
    return grads, jax.tree.map(lambda by_rank: by_rank.sum(0), sums)


def draws(step: HostStep) -> dict[tuple[int, ...], tuple[Any, ...]]:
    """Key of the noise -> (time, whether conditions are seen, source) of every drawn item."""
    items: dict[tuple[int, ...], tuple[Any, ...]] = {}
    for row in step.rows["diffusion"]:
        for q, segment in zip(*np.nonzero(row["sources"] >= 0), strict=True):
            in_item = row["owners"][q] == segment + 1
            seen = bool((row["segments"][q][in_item & (row["conditions"][q] >= 0)] > 0).all())
            key = tuple(row["noise"][q, segment])
            items[key] = (row["times"][q, segment], seen, row["sources"][q, segment])
    return items


def assert_as(actual, expected, tolerance=1e-5):
    """Gradients and sums by source agree."""
    assert_close(actual[0], expected[0], tolerance)
    for actual_sum, expected_sum in zip(
        *map(jax.tree.leaves, (actual[1], expected[1])), strict=True
    ):
        np.testing.assert_allclose(actual_sum, expected_sum, rtol=tolerance)


def without_pictures(setup: Setup) -> list[int]:
    corpus = setup.corpus
    return [i for i in range(len(corpus)) if not corpus.example(i).media]


# ---------------------------------------------------------------------------- programs

TIMES = ({"times": "uniform"}, {"times": "uniform", "shift": 4.0}, {"times": "logit_normal"})


@pytest.mark.slow
def test_batches_of_any_sizes_and_times_compile_nothing_anew(tmp_path):
    """Twenty steps with clips of 20 sizes and lengths and three distributions of times."""
    with make_pictures(tmp_path, examples=60).open("a") as file:
        question_content = [
            {"type": "image", "image": "2-shown.png"},
            {"type": "text", "text": "what is it?"},
        ]
        record("question", question_content, "it is red", file)
        for patches in range(1, 21):
            clip = moving(tmp_path / f"{patches}.png", 2 * patches)
            record(f"clip{patches}", "draw it", [{"type": "video", "video": clip.name}], file)
    setup = assemble(drawing_config(tmp_path), 1)
    setups = [of_times(setup, times) for times in TIMES]
    question, *clips = range(60, 81)
    pictures = np.random.default_rng(0).permutation(60).reshape(20, 3)
    state = setup.programs.init(0)
    state, _ = setup.programs.train(state, setup.put(setup.step([0, 1, 2, 3])))
    counter = CompilationCounter()
    shapes = set()
    for step, (clip, picture_examples) in enumerate(zip(clips, pictures, strict=True)):
        examples = [question, clip, *picture_examples.tolist()]
        host_step = setups[step % len(setups)].step(examples)
        state, metrics = setup.programs.train(state, setup.put(host_step))
        assert np.isfinite(jax.device_get(metrics["loss"]))
        media = [item for i in examples for item in setup.corpus.example(i).media]
        shapes |= {item.shape for item in media if item.phase == "diffusion"}
    assert counter.names == []
    counter.close()
    assert len({shape[1:] for shape in shapes}) >= 20
    assert len({shape[0] for shape in shapes}) >= 20
    sampled_times = [
        timed_setup.step([1]).rows["diffusion"][0]["times"][0, 0] for timed_setup in setups
    ]
    assert len(set(map(float, sampled_times))) == len(TIMES)


def of_times(setup: Setup, times: dict[str, Any]) -> Setup:
    """The same programs, fed with times of another distribution."""
    objective = setup.config.objective
    diffusion_objective = objective.diffusion.model_copy(update=times)
    objective = objective.model_copy(update={"diffusion": diffusion_objective})
    return replace(setup, config=setup.config.model_copy(update={"objective": objective}))


def moving(path: Path, frames: int) -> Path:
    """A clip of noise in a file."""
    colors = np.random.default_rng(frames).integers(0, 256, (frames, 8, 8, 3)).astype(np.uint8)
    first_frame, *later_frames = map(Image.fromarray, colors)
    first_frame.save(path, save_all=True, append_images=later_frames)
    return path


def record(name: str, asked: Any, answer: Any, file: TextIO) -> None:
    """Write a conversation of one question and answer, which is a source of its own."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    file.write(json.dumps({"id": name, "source": name, "messages": messages}) + "\n")


# ---------------------------------------------------------------------------- one rank


def test_packed_equals_each_item_alone(drawing):
    """The decoder's gradients come from pictures and clips alone, through the states they read."""
    assert_packed_as_alone(drawing)


def assert_packed_as_alone(drawing: Setup) -> None:
    """Gradients of packed examples are the sum of those of single ones, weighted by patches."""
    examples = [i for i in range(12) if drawing.corpus.example(i).media][:3]
    packed = drawing.step(examples)
    shapes = [media.shape for i in examples for media in drawing.corpus.example(i).media]
    # The examples have clips and pictures, and several items share a row
    assert max(time for time, _, _ in shapes) > 1 and min(time for time, _, _ in shapes) == 1
    assert max(row["owners"].max() for row in packed.rows["diffusion"]) >= 3
    packed_result = computed(drawing, packed)
    single_grads = []
    patches = 0
    for i in examples:
        step = drawing.step([i])
        grads, sums = computed(drawing, step)
        source = drawing.corpus.source_of(i)
        assert sums.drawn.patches[source] == step.patches == packed_result[1].drawn.patches[source]
        np.testing.assert_allclose(
            sums.drawn.loss[source], packed_result[1].drawn.loss[source], rtol=1e-5
        )
        single_grads.append(scaled(grads, step.patches))
        patches += step.patches
    assert patches == packed.patches
    assert set(packed_result[0]) == {"language", "projector.language", "diffusion"}
    packed_grads = {name: dict(tree) for name, tree in scaled(packed_result[0], patches).items()}
    assert not np.any(packed_grads["language"].pop("head")), "it is not in the program"
    summed = added(single_grads)
    summed["language"].pop("head")
    assert_close(packed_grads, summed, 2e-5)


def test_steps_without_pictures_and_without_text_just_work(drawing):
    text = drawing.step(without_pictures(drawing))
    assert text.patches == 0 and not text.rows["diffusion"]
    grads, sums = computed(drawing, text)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
    assert sums.drawn.patches.sum() == 0


def test_items_larger_than_a_row_are_refused_by_the_keys_that_bound_them(drawing):
    # An item takes slots for its patches and for the text that conditions it
    longest = max(m.conditions + np.prod(m.shape) for i in range(24) for m in media_of(drawing, i))
    smaller_corpus = drawing.corpus.refuse({"diffusion": int(longest) - 1})
    assert smaller_corpus.rejected_counts()["longer_than_row"] == 24 - len(smaller_corpus) >= 1
    with pytest.raises(DataError, match=r"slots of the diffusion phase.*data\.generated\.max_pix"):
        smaller_corpus.check_rejected(0)


def media_of(drawing: Setup, example: int) -> Any:
    return drawing.corpus.example(example).media


def test_hidden_conditions_and_noise_are_those_of_the_item_in_any_batch(drawing):
    """Noise, times and hidden conditions do not depend on what else is in the batch of a step."""

    all_draws = draws(drawing.step(range(24)))
    batch_draws = draws(drawing.step(EXAMPLES))
    assert batch_draws.items() <= all_draws.items()
    assert {seen for _, seen, _ in all_draws.values()} == {True, False}


def test_a_picture_that_does_not_decode_masks_itself_and_is_counted(drawing):
    examples = [i for i in EXAMPLES if drawing.corpus.example(i).media][:3]
    complete = computed(drawing, drawing.step(examples))
    broken_path = drawing.corpus.example(examples[0]).media[0].reference.path
    content = broken_path.read_bytes()
    try:
        broken_path.write_bytes(content[: len(content) // 2])
        step = drawing.step(examples)
        assert len(step.failures) == 1 and broken_path.name in step.failures[0]
        _, sums, failed = jax.device_get(
            drawing.programs.gradients(perturbed(drawing.params), drawing.put(step))
        )
    finally:
        broken_path.write_bytes(content)
    assert failed == 1
    patches = jax.tree.map(lambda x: x.sum(0), sums).drawn.patches
    other_sources = [drawing.corpus.source_of(i) for i in examples[1:]]
    np.testing.assert_array_equal(patches[other_sources], complete[1].drawn.patches[other_sources])
    assert patches.sum() < step.patches


@pytest.mark.slow
def test_latents_are_drawn_as_pixels_are(tmp_path):
    """Latents are packed and split like pixels; items that are not finite are masked."""
    make_latents(tmp_path)
    alone = assemble(latents_config(tmp_path), 1)
    assert_packed_as_alone(alone)
    expected = computed(alone, alone.step(range(12)))
    mesh = {"data": 2, "fsdp": 2, "context": 2}
    split_setup = assemble(latents_config(tmp_path, mesh=mesh), 8)
    assert_as(computed(split_setup, split_setup.step(range(12))), expected)
    damaged_path = alone.corpus.example(0).media[0].reference.path
    values = np.load(damaged_path)
    values[0, 0, 0] = np.nan
    np.save(damaged_path, values)
    step = alone.step(range(12))
    _, sums, failed = jax.device_get(
        alone.programs.gradients(perturbed(alone.params), alone.put(step))
    )
    assert failed == len(step.failures) == 1 and "not finite" in step.failures[0]
    patches = sums.drawn.patches.sum(0)
    undamaged_patches = expected[1].drawn.patches
    source = alone.corpus.source_of(0)
    assert patches[source] == 0 < undamaged_patches[source]
    np.testing.assert_array_equal(np.delete(patches, source), np.delete(undamaged_patches, source))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("conditioning", ["usual", "read-apart", "two-streams"])
def test_adapters_of_decoder_and_generator_on_a_mesh(captions, conditioning):
    """Decoder and generator are frozen; gradients pass through both to the adapters' matrices."""
    adapter = {"rank": 2, "alpha": 4.0}
    frozen = {"freeze": True}
    changes = {
        "model__adapters": {"language": adapter, "diffusion": adapter},
        "components": {"language": frozen, "diffusion": frozen},
        **CONDITIONED.get(conditioning, DRAWING_ALONE),
    }
    alone = assemble(drawing_config(captions, **changes), 1)
    expected = computed(alone, alone.step(EXAMPLES))
    assert set(expected[0]) == {"adapter.language", "adapter.diffusion", "projector.language"}
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    meshed = assemble(drawing_config(captions, mesh=mesh, **changes), 8)
    assert_as(computed(meshed, meshed.step(EXAMPLES)), expected)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_gradients_are_those_of_both_losses(both):
    """The reference is the slope of the evaluated losses along each component's gradient."""
    step = both.step(EXAMPLES)
    params = perturbed(both.params)
    grads, _ = computed(both, step)

    def objective(params) -> float:
        sums = jax.device_get(both.programs.evaluate(params, both.put(step)).sums)
        text_loss = np.float64(sums.loss).sum() / step.targets
        return text_loss + np.float64(sums.drawn.loss).sum() / step.patches

    for name, gradient in grads.items():
        norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(gradient)))
        # Short enough for a straight line, long enough for a difference in float32
        length = 0.02 / norm

        def moved(sign: int, name=name, gradient=gradient, length=length):
            put = lambda p, g: jax.device_put(p + np.float32(sign * length) * g, p.sharding)  # noqa: E731
            return params | {name: jax.tree.map(put, params[name], gradient)}

        slope = (objective(moved(1)) - objective(moved(-1))) / (2 * length)
        assert slope == pytest.approx(norm**2, rel=0.03), name


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_resumed_run_draws_as_one_that_went_on(pictures, tmp_path):
    """Pictures and clips have the same noise in the same steps, even on another mesh."""

    def run(name: str, steps: int, **changes: Any) -> list[float]:
        folder = tmp_path / name
        tree = drawing_config(pictures, run={"directory": str(folder), "steps": steps}, **changes)
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(tree))
        assert main(["--config", str(config), "--resume"]) == 0
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [record["drawn_loss"] for record in records if "drawn_loss" in record]

    uninterrupted = run("whole", 4, mesh={"data": 2, "fsdp": 4})
    run("resumed", 2, mesh={"data": 2, "fsdp": 4})
    resumed = run("resumed", 4, mesh={"data": 2, "fsdp": 2, "context": 2})
    assert len(uninterrupted) == 4
    np.testing.assert_allclose(resumed, uninterrupted, rtol=1e-4)


# ---------------------------------------------------------------------------- any plan on any mesh


@pytest.fixture(scope="module")
def whole(both):
    return computed(both, both.step(EXAMPLES))


WIDE = {f"components__{name}__layout": ENCODER_LAYOUT for name in ("vision", "diffusion")}
SMALL_ROWS = {  # and small pools
    "phases__vision": {"block": 32, "capacities": [96, 64]},
    "phases__language": {"block": 32, "capacities": [128, 64]},
    "phases__diffusion": {"block": 32, "capacities": [160, 96]},
    "balance__pool_slots": 288,
    "balance__pair_slots": 12,
}
SHARED_ROWS = {"phases__diffusion": {"block": 32, "spans": [1, 2], "capacities": [64]}}
KEPT_STATES = {  # the decoder keeps the first microbatches' residuals
    "phases__language": {"block": 32, "capacities": [128, 64], "kept_residuals": 1},
}
CASES = {  # devices, further changes
    "small-rows-and-pools": (2, {"mesh": {"data": 2}, **SMALL_ROWS}),
    "context2": (2, {"mesh": {"data": 1, "context": 2}}),
    "ranks8": (8, {"mesh": {"data": 8}}),
    "wide": (8, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, **WIDE}),
    "shared-rows": (2, {"mesh": {"data": 2}, **SHARED_ROWS}),
    "kept": (2, {"mesh": {"fsdp": 2}, **KEPT_STATES}),
    "kept-tensor": (
        4,
        {
            "mesh": {"data": 1, "fsdp": 2, "tensor": 2},
            "components__language": {"remat": "none", "reduce": "step"},
            **KEPT_STATES,
        },
    ),
    "kept-context": (2, {"mesh": {"data": 1, "context": 2}, **KEPT_STATES}),
}


@pytest.mark.parametrize(
    "case",
    slow_cases({case: (case,) for case in CASES}, always=("context2", "kept")),
)
def test_plans_and_meshes_leave_the_mathematics_alone(pictures, both, whole, case):
    devices, changes = CASES[case]
    setup = assemble(drawing_config(pictures, **changes), devices)
    for mode in ("phases",) if case.startswith("shared") else ("phases", "none"):
        step = setup.step(EXAMPLES, mode=mode)
        if case.startswith("shared"):
            assert set(step.spans["diffusion"]) == {1, 2}
        if case.startswith("small") and mode == "none":
            assert len(set(step.capacities["language"])) == 2
            assert len(step.rounds["diffusion"]) == max(step.pools["diffusion"]) + 1 == 2
        if case.startswith("kept"):
            kept_count = setup.programs.kept_residuals["language"]
            assert 0 < kept_count < len(step.rows["language"])
        if not case.startswith("shared"):  # rows of several ranks are stored in parts
            assert draws(step) == draws(both.step(EXAMPLES)), "noise, times and drops, bit for bit"
        assert_as(computed(setup, step), whole)


@pytest.mark.slow
def test_ragged_tables_carry_states_and_gradients(pictures, both, whole, monkeypatch):
    """The same step with exchanges of any size, which XLA's CPU backend does not have.

    A substitute gathers everything and cuts out what each rank receives.
    """
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    setup = assemble(
        drawing_config(pictures, mesh={"data": 8}, balance__exchange="ragged"), devices=8
    )
    assert {route.backend for route in setup.spec.routes.values()} == {"ragged"}
    step = setup.step(EXAMPLES)
    # In this plan, pictures are on the ranks of their texts, so only states move
    assert step.statistics["route/diffusion/moved_tokens"] > 0
    assert draws(step) == draws(both.step(EXAMPLES))
    assert_as(computed(setup, step), whole)


def ragged_all_to_all(operand, output, begin, sent, land, expected, *, axis_name):
    """What `jax.lax.ragged_all_to_all` promises, from everything that any rank sends."""
    chunks, begins, sizes, landings = (
        jax.lax.all_gather(x, axis_name) for x in (operand, begin, sent, land)
    )
    rank = jax.lax.axis_index(axis_name)
    slots = jnp.arange(len(output))
    for peer in range(len(chunks)):
        offset = slots - landings[peer, rank]
        received = (offset >= 0) & (offset < sizes[peer, rank])
        values = chunks[peer][jnp.clip(begins[peer, rank] + offset, 0, len(operand) - 1)]
        output = jnp.where(received.reshape(-1, *[1] * (output.ndim - 1)), values, output)
    return output


READ_APART = {  # conditions in an attention of their own, and every other variant of a generator
    "conditioning": "cross",
    "pooled_conditions": True,
    "edge_distances": True,
    "padded_conditions": 40,
    "modulation": "shared",
    "output_modulation": "vectors",
    "norm": "layer",
    "attention_bias": True,
    "qk_norm_over": "heads",
    "rope_sections": [0, 2, 2],
}
CONDITIONED = {
    name: DRAWING_ALONE | {f"model__diffusion__{key}": value for key, value in keys.items()}
    for name, keys in {"read-apart": READ_APART, "two-streams": TWO_STREAMS}.items()
}


@pytest.fixture(
    scope="module", params=["read-apart", pytest.param("two-streams", marks=EXHAUSTIVE)]
)
def conditioned(captions, request) -> tuple[dict[str, Any], Setup]:
    changes = CONDITIONED[request.param]
    return changes, assemble(drawing_config(captions, **changes), 1)


@pytest.mark.slow
def test_conditions_that_are_read_apart_lie_in_slots_of_patches(captions):
    """Patches and conditions both begin in the first slot of their item.

    The item has as many slots as the longer of the two.
    """
    setup = assemble(drawing_config(captions, **CONDITIONED["read-apart"]), 1)
    examples = [i for i in EXAMPLES.tolist() if setup.corpus.example(i).media]
    items = setup.corpus.gather(np.array(examples)).phases["diffusion"]
    step = setup.step(examples)
    item_sizes = set()
    hidden_items = 0
    for row in step.rows["diffusion"]:
        for segment in range(1, row["owners"].max() + 1):
            in_order = np.argsort(row["order"][0])
            columns = ("owners", "segments", "patches", "conditions", "readers")
            owners, *slot_arrays = (row[name][0, in_order] for name in columns)
            item_segments, patches, conditions, readers = (
                values[owners == segment] for values in slot_arrays
            )
            counts = (patches >= 0).sum(), (conditions >= 0).sum()
            assert len(item_segments) == max(counts)
            item_sizes.add((len(item_segments), *counts))
            np.testing.assert_array_equal(patches[: counts[0]], np.arange(counts[0]))
            np.testing.assert_array_equal(item_segments, np.where(patches >= 0, segment, 0))
            np.testing.assert_array_equal(
                conditions >= 0, np.arange(len(item_segments)) < counts[1]
            )
            hidden_items += not readers.any()
            assert not readers.any() or ((readers == segment) == (conditions >= 0)).all()
    assert item_sizes == {*zip(items.length, items.real, items.tokens, strict=True)}
    assert 0 < hidden_items < len(items.length)
    assert {*np.sign(items.real - items.tokens).tolist()} >= {-1, 1}


@pytest.mark.slow
def test_conditions_with_weights_of_their_own(captions, conditioned):
    """Packing and meshes change nothing where texts are shorter or longer than their padding."""
    changes, alone = conditioned
    step = alone.step(EXAMPLES)
    if changes is CONDITIONED["read-apart"]:
        padded = np.concatenate([row["padded"].ravel() for row in step.rows["diffusion"]])
        assert {0, 40} < {*padded.tolist()}, (
            "some see no zeros, and those whose text is hidden zeros alone"
        )
    assert_packed_as_alone(alone)
    mesh = {"data": 2, "fsdp": 2, "context": 2}
    split_setup = assemble(drawing_config(captions, mesh=mesh, **changes), 8)
    assert_as(computed(split_setup, split_setup.step(EXAMPLES)), computed(alone, step), 2e-5)
    counter = CompilationCounter()
    rng = np.random.default_rng(2)
    for size in range(1, 21):  # the loss is finite whatever share of a row texts take
        _, sums = computed(alone, alone.step(rng.choice(len(alone.corpus), size, replace=False)))
        assert np.isfinite(sums.drawn.loss).all()
    assert counter.count == 0
    counter.close()


@pytest.mark.slow
def test_frozen_weights_of_conditions_pass_gradients_on(captions, conditioned):
    changes, alone = conditioned
    frozen = {f"components__{name}": {"freeze": True} for name in ("language", "diffusion")}
    setup = assemble(drawing_config(captions, **changes, **frozen), 1)
    grads, sums = computed(setup, setup.step(EXAMPLES))
    expected, expected_sums = computed(alone, alone.step(EXAMPLES))
    assert grads.keys() == {"projector.language"}
    assert_as((grads, sums.drawn), ({name: expected[name] for name in grads}, expected_sums.drawn))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["small-rows-and-pools", "wide", "shared-rows"])
def test_conditions_with_weights_of_their_own_in_other_plans(captions, conditioned, case):
    devices, changes = CASES[case]
    plan_changes = {key: value for key, value in changes.items() if "vision" not in key}
    model_changes, alone = conditioned
    # items are shorter in these rows
    if case.startswith("shared") and model_changes is CONDITIONED["read-apart"]:
        plan_changes["phases__diffusion"] = plan_changes["phases__diffusion"] | {"capacities": [32]}
    setup = assemble(drawing_config(captions, **model_changes, **plan_changes), devices)
    step = setup.step(EXAMPLES)
    if case.startswith("shared"):
        assert set(step.spans["diffusion"]) == {1, 2}
    expected = computed(alone, alone.step(EXAMPLES))
    assert_as(computed(setup, step), expected, 2e-5)


FROZEN = {"freeze": True}
TRAINED = {  # changes, components that train
    "frozen-text": ({"components__language": FROZEN}, {"projector.language", "diffusion"}),
    "projector-alone": (
        {"components__language": FROZEN, "components__diffusion": FROZEN},
        {"projector.language"},
    ),
}


@pytest.mark.parametrize(
    "case", slow_cases({case: (case,) for case in TRAINED}, always=("frozen-text",))
)
def test_what_is_frozen_changes_no_other_gradient(captions, drawing, case):
    changes, trained = TRAINED[case]
    setup = assemble(drawing_config(captions, **DRAWING_ALONE, **changes), 1)
    functions = {name.function for name in setup.programs.jobs}
    assert "language_loss_and_grad" not in functions and "deliver_back" not in functions
    grads, sums = computed(setup, setup.step(EXAMPLES))
    expected, expected_sums = computed(drawing, drawing.step(EXAMPLES))
    assert grads.keys() == trained
    assert_as(
        (grads, sums.drawn), ({name: expected[name] for name in trained}, expected_sums.drawn)
    )
