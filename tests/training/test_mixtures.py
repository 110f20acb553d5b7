"""Steps of a decoder with experts: packing, meshes and stages, counts of tokens, router losses.

Gradients are compared with one device, and router losses with their definition token by token.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ExpertsObjectiveConfig
from jaxmllm.models.compose import build_model
from jaxmllm.models.mixture import RouterSums
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.training.objectives.routing import Routing, router_loss, router_means
from jaxmllm.training.programs.staged import StagedPrograms
from jaxmllm.training.step_functions import StepFunctions
from sharding.mesh import MeshError, abstract_mesh
from tests.support import (
    EXHAUSTIVE,
    added,
    assemble,
    assert_close,
    scaled,
    slow_cases,
    tiny_config,
)
from tests.training.drawing import drawing_config, make_pictures, params_of

LAYERS = 2
COUNT = 8
PER_TOKEN = 2
EXAMPLES = np.random.default_rng(0).permutation(24)[:16]
MODEL = {
    "model__language__experts": {"count": COUNT, "per_token": PER_TOKEN, "renormalise": True},
    "model__language__mlp_width": 24,
    "objective__experts": {"balance": 0.1, "router_z": 0.01},
}
# Counts of the step before, squared so that they are very uneven
COUNTS = np.random.default_rng(1).integers(0, 100, (LAYERS, COUNT)).astype(np.int32) ** 2


def computed(setup, step, counts=COUNTS):
    """(gradients, sums over the ranks), with the layers of all stages in their order."""
    gradients, sums, _ = setup.programs.gradients(setup.params, setup.put(step), counts)
    if isinstance(setup.programs, StagedPrograms):
        gradients = setup.programs.joined(gradients)
    return jax.device_get((gradients, jax.tree.map(lambda leaf: leaf.sum(0), sums)))


@pytest.fixture(scope="session")
def texts(data):
    """The config of a decoder with experts, on the examples of the sample that hold only text."""
    lines = (data / "each-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path = data / "each-text.jsonl"
    path.write_text("".join(line for line in lines if '"media/' not in line))

    def config(**changes):
        sources = [{"name": "each", "path": str(path)}]
        towers = {"model__vision": None, "model__audio": None}
        defaults = MODEL | towers | {"data__sources": sources, "data__evaluation": []}
        return tiny_config(data, **defaults | changes)

    return config


@pytest.fixture(scope="module")
def one(setups, texts):
    return setups(texts(), 1)


@pytest.fixture(scope="module")
def whole(one):
    return computed(one, one.step(EXAMPLES))


def assert_routed_alike(sums, expected):
    """Losses, probabilities and router losses agree closely, and counts of tokens exactly."""
    np.testing.assert_array_equal(sums.routed.counts, expected.routed.counts)
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=1e-5)
    for actual_sum, expected_sum in zip(sums.routed[1:], expected.routed[1:], strict=True):
        np.testing.assert_allclose(actual_sum, expected_sum, rtol=1e-5)
    means = [
        router_means(jax.tree.map(lambda leaf: leaf[None], step_sums.routed), Routing(COUNTS, 1.0))
        for step_sums in (sums, expected)
    ]
    np.testing.assert_allclose(*means, rtol=1e-6)


@pytest.mark.slow
def test_packed_equals_unpacked(one, whole):
    """Router losses are means over tokens, others over targets: each has a weight of its own."""
    gradients, sums = whole
    steps = [one.step([example]) for example in EXAMPLES]
    step = one.step(EXAMPLES)
    # Tokens per target are made those of the batch, so that one weight is right for both losses
    targets_per_token = step.targets / step.statistics["language/tokens"]
    single_results = [
        computed(
            one,
            dataclasses.replace(
                single_step,
                statistics=single_step.statistics
                | {"language/tokens": single_step.targets / targets_per_token},
            ),
        )
        for single_step in steps
    ]
    single_grads = [
        scaled(result, single_step.targets / step.targets)
        for (result, _), single_step in zip(single_results, steps, strict=True)
    ]
    assert_close(gradients, added(single_grads), 1e-5)
    counts = sum(result.routed.counts for _, result in single_results)
    np.testing.assert_array_equal(counts, sums.routed.counts)
    # Every layer routes every token to PER_TOKEN experts
    assert (counts.sum(1) == step.statistics["language/tokens"] * PER_TOKEN).all()


MESHES = {  # devices, mesh, what else
    "data2-fsdp2-tensor2": (8, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "context2-fsdp4": (8, {"data": 1, "fsdp": 4, "context": 2}, {}),
    "fsdp8": (8, {"data": 1, "fsdp": 8}, {}),
    "gathered": (
        4,
        {"data": 1, "fsdp": 4},
        {"components__language__layout": {"experts": []}, "components__language__reduce": "step"},
    ),
    "width-over-both": (
        4,
        {"data": 2, "fsdp": 2},
        {
            "components__language__layout": {"embed": ["data", "fsdp"]},
            "components__language__reduce": "step",
        },
    ),
    "ragged_dot": (2, {"data": 1, "fsdp": 2}, {"components__language__experts": "ragged_dot"}),
    "kept": (2, {"data": 1, "fsdp": 2}, {"components__language__remat": "none"}),
    "stages2-fsdp2": (4, {"data": 1, "fsdp": 2}, {"pipeline": {"stages": 2, "layout": "chain"}}),
    "stages2-tensor2-split": (
        4,
        {"data": 1, "tensor": 2},
        {"pipeline": {"stages": 2, "split_backward": True}},
    ),
    "stages2-context2": (
        4,
        {"data": 1, "context": 2},
        {"pipeline": {"stages": 2, "layout": "segments"}, "components__language__remat": "none"},
    ),
}


@pytest.mark.parametrize(
    "devices, mesh, changes", slow_cases(MESHES, {"data2-fsdp2-tensor2", "stages2-fsdp2"})
)
def test_no_mesh_changes_the_mathematics(setups, texts, whole, devices, mesh, changes):
    setup = setups(texts(mesh=mesh, **changes), devices)
    gradients, sums = computed(setup, setup.step(EXAMPLES))
    assert_close(gradients, whole[0], 1e-5)
    assert_routed_alike(sums, whole[1])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh, pipeline",
    [
        ({"data": 1, "context": 2, "fsdp": 4}, {"stages": 1}),
        ({"data": 2, "fsdp": 1}, {"stages": 4, "layout": "chain"}),
    ],
)
def test_media_are_routed_like_text(setups, by_example, mesh, pipeline):
    alone = setups(by_example(mesh={"data": 1}, **MODEL), 1)
    meshed = setups(by_example(mesh=mesh, pipeline=pipeline, **MODEL), 8)
    gradients, sums = computed(meshed, meshed.step(EXAMPLES))
    expected, expected_sums = computed(alone, alone.step(EXAMPLES))
    assert_close(gradients, expected, 1e-5)
    assert_routed_alike(sums, expected_sums)


DRAWING = {  # whether text is learned, too; mesh, pipeline
    "alone-split": (0.0, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "both-parts": (1.0, {"data": 1, "fsdp": 2, "context": 2}, {}),
    "both-stages": (1.0, {"data": 1, "fsdp": 2}, {"stages": 2, "layout": "chain"}),
}


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    make_pictures(folder, shown=False)
    return folder


@pytest.mark.parametrize(
    ("weight", "mesh", "pipeline"), slow_cases(DRAWING, {"alone-split", "both-stages"})
)
def test_a_decoder_with_experts_draws(captions, weight, mesh, pipeline):
    """The generator's gradients reach experts and router, whether or not text has a loss.

    Counts and router losses cover all tokens, once.
    """

    def run(devices, **changes):
        changes |= MODEL | {"model__vision": None, "objective__language__weight": weight}
        setup = assemble(drawing_config(captions, **changes), devices)
        step = setup.step(EXAMPLES)
        gradients, sums, _ = setup.programs.gradients(params_of(setup), setup.put(step), COUNTS)
        if isinstance(setup.programs, StagedPrograms):
            gradients = setup.programs.joined(gradients)
        sums = jax.device_get(jax.tree.map(lambda leaf: leaf.sum(0), sums))
        tokens = step.statistics["language/tokens"]
        assert (sums.routed.counts.sum(1) == tokens * PER_TOKEN).all()
        return jax.device_get(gradients), sums

    expected, expected_sums = run(1)
    assert np.any(expected["language"]["layers"]["router"]["matrix"])
    actual, sums = run(
        math.prod(mesh.values()) * pipeline.get("stages", 1), mesh=mesh, pipeline=pipeline
    )
    if not weight:
        for gradients in (actual, expected):
            assert not np.any(gradients["language"].pop("head")), "it is not in the program"
    assert_close(actual, expected, 1e-5)
    assert_routed_alike(sums, expected_sums)
    np.testing.assert_allclose(sums.drawn.loss, expected_sums.drawn.loss, rtol=1e-5)


@pytest.mark.parametrize(
    "stages", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=EXHAUSTIVE)]
)
def test_counts_are_the_states_and_batches_compile_nothing_anew(setups, texts, stages):
    """The update stores the counts of its step in the state; the next balance loss reads them."""
    setup = setups(texts(pipeline={"stages": stages}), stages)
    state = setup.programs.init(0)
    assert not state.expert_counts.any()
    batches = [setup.put(setup.step(range(start, start + 16))) for start in range(0, 9, 2)]
    state, metrics = setup.programs.train(state, batches[0])
    # Before the first step fractions are even, so the balance loss is the sum of probabilities: 1
    assert float(metrics["balance_loss"]) == pytest.approx(1, abs=1e-5)
    # A device has all experts, so devices are even while experts are not
    assert metrics["expert_max_over_mean"] > metrics["expert_device_max_over_mean"] == 1
    counter = CompilationCounter()
    for batch in batches[1:]:
        expected = batch.host.statistics["language/tokens"] * PER_TOKEN
        state, metrics = setup.programs.train(state, batch)
        metrics = jax.device_get(metrics)
        assert (np.asarray(state.expert_counts).sum(1) == expected).all()
        assert np.isfinite(metrics["loss"]) and metrics["balance_loss"] > 1
    assert counter.names == []
    counter.close()


# ---------------------------------------------------------------------------- losses alone


def router_sums(logits, chosen):
    """Sums of one row [1, L, ...], as the decoder has them."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    counts = (chosen[..., None] == np.arange(COUNT)).sum((1, 2))
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    return RouterSums(counts[None], probabilities.sum(1)[None], z.sum(1)[None])


def test_losses_of_the_router_have_their_gradients():
    """The reference is the definition, token by token; a batch in two parts adds up to the same."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((LAYERS, 6, COUNT)), jnp.float32)
    chosen = rng.integers(0, COUNT, (LAYERS, 6, PER_TOKEN))
    routing = Routing(COUNTS, np.float32(6))
    config = ExpertsObjectiveConfig(balance=0.5, router_z=0.25)

    def found(logits):
        part_losses = (
            router_loss(
                config, router_sums(logits[:, token_range], chosen[:, token_range]), routing
            )
            for token_range in (slice(0, 2), slice(2, 6))
        )
        return sum(part_losses)

    def expected(logits):
        fractions = COUNTS / COUNTS.sum(1, keepdims=True)
        probabilities = jax.nn.softmax(logits, axis=-1)
        balance = COUNT * (fractions[:, None] * probabilities).sum(-1).mean()
        return 0.5 * balance + 0.25 * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()

    assert float(found(logits)) == pytest.approx(float(expected(logits)), rel=1e-6)
    np.testing.assert_allclose(
        jax.grad(found)(logits), jax.grad(expected)(logits), atol=1e-7, rtol=1e-5
    )


def test_fractions_before_the_first_step_are_even():
    sums = router_sums(jnp.zeros((LAYERS, 3, COUNT)), np.zeros((LAYERS, 3, PER_TOKEN)))
    balance, z = router_means(sums, Routing(0 * COUNTS, jnp.float32(3)))
    assert float(balance) == pytest.approx(1) and float(z) == pytest.approx(np.log(COUNT) ** 2)


def test_counts_whose_sum_is_past_32_bits():
    """All tokens choose the first expert, which had three tenths of the last step's tokens."""
    counts = np.int32([[3, 1, 1, 1, 1, 1, 1, 1]] * LAYERS) * 400_000_000
    tokens = int(counts[0].sum(dtype=np.int64)) // PER_TOKEN
    probabilities = np.zeros((LAYERS, COUNT), np.float32)
    probabilities[:, 0] = tokens
    sums = RouterSums(counts[None], probabilities[None], np.full((1, LAYERS), tokens, np.float32))
    balance, z = router_means(sums, Routing(counts, jnp.float32(tokens)))
    assert float(balance) == pytest.approx(COUNT * 0.3) and float(z) == pytest.approx(1)

    experts = SimpleNamespace(per_token=PER_TOKEN)
    layout = SimpleNamespace(size=lambda axis: 1)
    step: Any = SimpleNamespace(
        model=SimpleNamespace(
            config=SimpleNamespace(language=SimpleNamespace(experts=experts)),
            layout=lambda phase: layout,
        )
    )
    state: Any = SimpleNamespace(expert_counts=counts)
    step_sums: Any = SimpleNamespace(drawn=None, routed=jax.tree.map(jnp.asarray, sums))
    after, metrics = StepFunctions._routing_after(step, state, step_sums, jnp.bool_(True))
    assert (np.asarray(after) == counts).all()
    assert float(metrics["balance_loss"]) == pytest.approx(COUNT * 0.3)
    assert float(metrics["router_z_loss"]) == pytest.approx(1)
    assert float(metrics["expert_max_over_mean"]) == pytest.approx(2.4)
    assert float(metrics["expert_device_max_over_mean"]) == 1


def test_a_count_that_the_mesh_does_not_divide(texts):
    experts = {"model__language__experts": {"count": 6, "per_token": 2}}
    config = parse_config(texts(mesh={"data": 1, "fsdp": 4}, **experts))
    mesh = abstract_mesh(config.mesh_sizes, 4)
    with pytest.raises(MeshError, match=r"mlp.*axis 'experts' of length 6 cannot be split over"):
        build_model(config.model, 320, config.components, mesh)
