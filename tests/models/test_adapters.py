"""Adapters of low rank against the matrices that they add up to."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.config.schema import (
    AdapterComponents,
    AdapterConfig,
    AdaptersConfig,
    ComponentConfig,
    ConfigError,
    DiffusionConfig,
    ModelConfig,
    TrainingConfig,
)
from jaxmllm.models.adapters import merged
from jaxmllm.trainable import join, leaves_by_path
from sharding.mesh import make_mesh
from tests.models.test_mllm import AUDIO, LANGUAGE, MESH, VISION, build, make_rows

ADAPTER = AdapterConfig(rank=3, alpha=6.0)
FROZEN = ComponentConfig(freeze=True)
TEXT = ModelConfig(language=LANGUAGE, adapters=AdaptersConfig(language=ADAPTER))
ONE = make_mesh({"data": 1}, jax.devices()[:1])
DIFFUSION = DiffusionConfig(width=16, layers=2, heads=2, mlp_width=24)
PHASES = ("vision", "audio", "language", "diffusion")


def test_every_matrix_of_a_layer_can_have_an_adapter():
    adapters = AdaptersConfig(**dict.fromkeys(PHASES, AdapterConfig(rank=2, alpha=1.0)))
    gated = VISION.model_copy(update={"gated_mlp": True})
    towers = {"vision": gated, "audio": AUDIO, "diffusion": DIFFUSION}
    config = ModelConfig(language=LANGUAGE, adapters=adapters, **towers)
    model = build(config, **dict.fromkeys(PHASES, FROZEN))
    for name in PHASES:
        own = dict(leaves_by_path(model.components[name].shapes))
        factors = dict(leaves_by_path(model.components[f"adapter.{name}"].shapes))
        matrices = getattr(config, name).matrices
        in_layers = {path for path in own if path.startswith("layers.")}
        others = ("bias", "scale", "modulation.weight")  # of norms, and of the time
        assert {*matrices} == {path for path in in_layers if not path.endswith(others)}
        for path, (inputs, outputs) in matrices.items():
            a = factors[f"{path}.a"].shape
            b = factors[f"{path}.b"].shape
            assert a[-1] == b[1] == 2
            assert (math.prod(a[1:-1]), math.prod(b[2:])) == (inputs, outputs)
            assert (*a[:-1], *b[2:]) == own[path].shape


def hidden_states(model):
    media = np.zeros((4, 64, LANGUAGE.width), np.float32)
    return jax.jit(lambda params, rows: model.hidden(params, rows, media)[0]), make_rows(0)


def test_a_new_adapter_changes_nothing_and_begins_by_seed():
    adapted = build(TEXT, ONE, language=FROZEN)
    plain = build(ModelConfig(language=LANGUAGE), ONE)
    params = adapted.init(3, "float32")
    other = adapted.init(4, "float32")["adapter.language"]
    states, rows = hidden_states(adapted)
    expected, _ = hidden_states(plain)
    base = plain.init(3, "float32")
    np.testing.assert_array_equal(states(params, rows), expected(base, rows))
    for path, leaf in leaves_by_path(params["adapter.language"]):
        if path.endswith(".b"):
            assert not np.any(leaf), path
        else:
            assert abs(float(jnp.std(leaf)) * math.prod(leaf.shape[1:-1]) ** 0.5 - 1) < 0.3, path
            assert not np.any(np.asarray(leaf) == np.asarray(dict(leaves_by_path(other))[path]))


def randomized(model, dtype):
    rng = np.random.default_rng(0)
    draw = lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(dtype)  # noqa: E731
    return jax.tree.map(draw, model.abstract("float32"))


def merged_params(params):
    """The decoder with its adapter added to its matrices."""
    factors = dict(leaves_by_path(params["adapter.language"]))

    def leaf(path, value):
        path = ".".join(key.key for key in path)
        if f"{path}.a" not in factors:
            return value
        return merged(value, factors[f"{path}.a"], factors[f"{path}.b"], ADAPTER.scale)

    return {"language": jax.tree.map_with_path(leaf, params["language"])}


@pytest.mark.parametrize(
    "remat, mesh", [("full", ONE), pytest.param("none", MESH, marks=pytest.mark.slow)]
)
def test_states_and_gradients_are_those_of_the_sum(remat, mesh):
    """In float64: W + alpha / rank * A B, and gradients by the chain rule."""
    settings = {"compute_dtype": "float64", "remat": remat}
    model = build(TEXT, mesh, language=ComponentConfig(freeze=True, **settings))
    plain = build(ModelConfig(language=LANGUAGE), ONE, language=ComponentConfig(**settings))
    params = randomized(model, np.float64)
    rows = make_rows(0)
    media = np.zeros((4, 64, LANGUAGE.width))
    weights = np.random.default_rng(1).standard_normal((4, 64, LANGUAGE.width))

    def loss(model, trained, frozen):
        states, _ = model.hidden(join(trained, frozen), rows, media)
        return (states * weights).sum()

    with jax.enable_x64(True):
        trained, frozen = model.trainable.split(params)
        value = jax.value_and_grad(lambda trained: loss(model, trained, frozen))
        got, gradients = jax.jit(value)(trained)
        value = jax.value_and_grad(lambda params: loss(plain, params, {}))
        expected, of_sum = jax.jit(value)(merged_params(params))
    assert gradients.keys() == {"adapter.language"}
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    of_matrix = dict(leaves_by_path(of_sum["language"]))
    factors = dict(leaves_by_path(params["adapter.language"]))
    found = dict(leaves_by_path(gradients["adapter.language"]))
    assert len(found) == 2 * 7
    for path in LANGUAGE.matrices:
        a = factors[f"{path}.a"]
        b = factors[f"{path}.b"]
        flat = np.asarray(of_matrix[path]).reshape(2, math.prod(a.shape[1:-1]), -1)
        a_flat = a.reshape(2, -1, 3)
        b_flat = b.reshape(2, 3, -1)
        wanted_a = ADAPTER.scale * np.einsum("lio,lro->lir", flat, b_flat)
        wanted_b = ADAPTER.scale * np.einsum("lio,lir->lro", flat, a_flat)
        for name, wanted in (("a", wanted_a), ("b", wanted_b)):
            leaf = np.asarray(found[f"{path}.{name}"]).reshape(wanted.shape)
            np.testing.assert_allclose(leaf, wanted, rtol=0, atol=1e-10 * abs(wanted).max())


def products(jaxpr):
    """Shapes of what all matrix products of a traced function yield."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(sorted(equation.outvars[0].aval.shape))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_no_gradient_of_an_adapted_matrix_is_computed(remat):
    matrices = {(16, 4, 8), (16, 2, 8), (16, 24)}  # queries and output, keys and values, MLP

    def traced(config, **settings):
        settings = ComponentConfig(remat=remat, **settings)
        model = build(config, mesh=ONE, language=settings)
        params = model.abstract("float32")
        trained, frozen = model.trainable.split(params)
        rows = make_rows(0)
        media = np.zeros((4, 64, LANGUAGE.width), np.float32)

        def loss(trained, frozen):
            return model.hidden(join(trained, frozen), rows, media)[0].sum()

        return {*products(jax.make_jaxpr(jax.grad(loss))(trained, frozen).jaxpr)}

    of_matrices = {tuple(sorted(shape)) for shape in matrices}
    assert of_matrices <= traced(ModelConfig(language=LANGUAGE))
    found = traced(TEXT, freeze=True)
    assert found.isdisjoint(of_matrices)
    assert (3, 16) in found, "gradients of the factors"


def test_freezing_acts_on_one_component():
    adapters = AdapterComponents(language=TrainingConfig(freeze=True))
    assert build(TEXT, language=FROZEN).trainable.components == {"adapter.language"}
    assert not build(TEXT, language=FROZEN, adapter=adapters).trainable.components
    some = AdapterComponents(language=TrainingConfig(train=("*.b",), learning_rate_scale=2.0))
    model = build(TEXT, language=ComponentConfig(train=("norm.scale",)), adapter=some)
    assert model.trainable.components == {"adapter.language", "language"}
    assert len(model.trainable.paths) == 1 + 7
    assert model.components["adapter.language"].settings.learning_rate_scale == 2.0
    assert model.components["language"].settings.learning_rate_scale == 1.0


def test_an_adapted_matrix_is_not_trained_itself():
    for train in (("*",), ("layers.mlp.up",)):
        with pytest.raises(ConfigError, match=r"mlp.up has an adapter .* would be trained itself"):
            build(
                ModelConfig(
                    language=LANGUAGE,
                    adapters=AdaptersConfig(
                        language=AdapterConfig(rank=1, alpha=1, parameters=("*.up",))
                    ),
                ),
                language=ComponentConfig(train=train),
            )
