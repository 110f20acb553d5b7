"""Adapters of low rank against the sum of each matrix and the product of its factors."""

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
    """Factors a and b have the shape of the matrix, with the rank between
    its inputs and outputs."""
    adapters = AdaptersConfig(**dict.fromkeys(PHASES, AdapterConfig(rank=2, alpha=1.0)))
    gated = VISION.model_copy(update={"gated_mlp": True})
    towers = {"vision": gated, "audio": AUDIO, "diffusion": DIFFUSION}
    config = ModelConfig(language=LANGUAGE, adapters=adapters, **towers)
    model = build(config, **dict.fromkeys(PHASES, FROZEN))
    for name in PHASES:
        parameters = dict(leaves_by_path(model.components[name].shapes))
        factors = dict(leaves_by_path(model.components[f"adapter.{name}"].shapes))
        matrices = getattr(config, name).matrices
        in_layers = {path for path in parameters if path.startswith("layers.")}
        # Parameters of norms, and of what depends on the time.
        without_adapters = ("bias", "scale", "modulation.weight")
        assert {*matrices} == {path for path in in_layers if not path.endswith(without_adapters)}
        for path, (inputs, outputs) in matrices.items():
            a = factors[f"{path}.a"].shape
            b = factors[f"{path}.b"].shape
            assert a[-1] == b[1] == 2
            assert (math.prod(a[1:-1]), math.prod(b[2:])) == (inputs, outputs)
            assert (*a[:-1], *b[2:]) == parameters[path].shape


def hidden_states(model):
    """A compiled function for the states of the decoder, and rows to call it with."""
    media = np.zeros((4, 64, LANGUAGE.width), np.float32)
    return jax.jit(lambda params, rows: model.hidden(params, rows, media)[0]), make_rows(0)


def test_a_new_adapter_changes_nothing_and_begins_by_seed():
    """One factor starts at zero, so that the product is zero; the other has the scale of its input
    and depends on the seed."""
    adapted = build(TEXT, ONE, language=FROZEN)
    plain = build(ModelConfig(language=LANGUAGE), ONE)
    params = adapted.init(3, "float32")
    other_adapter = adapted.init(4, "float32")["adapter.language"]
    states, rows = hidden_states(adapted)
    expected, _ = hidden_states(plain)
    plain_params = plain.init(3, "float32")
    np.testing.assert_array_equal(states(params, rows), expected(plain_params, rows))
    for path, leaf in leaves_by_path(params["adapter.language"]):
        if path.endswith(".b"):
            assert not np.any(leaf), path
        else:
            assert abs(float(jnp.std(leaf)) * math.prod(leaf.shape[1:-1]) ** 0.5 - 1) < 0.3, path
            assert not np.any(
                np.asarray(leaf) == np.asarray(dict(leaves_by_path(other_adapter))[path])
            )


def randomized(model, dtype):
    """Random parameters in a dtype, none of them zero."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: (0.3 * rng.standard_normal(leaf.shape)).astype(dtype)  # noqa: E731
    return jax.tree.map(draw, model.abstract("float32"))


def merged_params(params):
    """Parameters of the decoder with its adapter added to its matrices."""
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
    """In float64, against W + alpha / rank * A B. The gradients of A and B follow from the gradient
    of the sum by the chain rule."""
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
        expected, sum_gradients = jax.jit(value)(merged_params(params))
    assert gradients.keys() == {"adapter.language"}
    np.testing.assert_allclose(got, expected, rtol=1e-10)
    matrix_gradients = dict(leaves_by_path(sum_gradients["language"]))
    factors = dict(leaves_by_path(params["adapter.language"]))
    factor_gradients = dict(leaves_by_path(gradients["adapter.language"]))
    # Four matrices of attention and three of the MLP, with two factors each.
    assert len(factor_gradients) == 2 * 7
    for path in LANGUAGE.matrices:
        a = factors[f"{path}.a"]
        b = factors[f"{path}.b"]
        matrix_gradient = np.asarray(matrix_gradients[path]).reshape(
            2, math.prod(a.shape[1:-1]), -1
        )
        a_flat = a.reshape(2, -1, 3)
        b_flat = b.reshape(2, 3, -1)
        expected_a = ADAPTER.scale * np.einsum("lio,lro->lir", matrix_gradient, b_flat)
        expected_b = ADAPTER.scale * np.einsum("lio,lir->lro", matrix_gradient, a_flat)
        for name, expected_factor in (("a", expected_a), ("b", expected_b)):
            leaf = np.asarray(factor_gradients[f"{path}.{name}"]).reshape(expected_factor.shape)
            np.testing.assert_allclose(
                leaf, expected_factor, rtol=0, atol=1e-10 * abs(expected_factor).max()
            )


def products(jaxpr):
    """Shapes of the results of all matrix products in a traced function, each sorted."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(sorted(equation.outvars[0].aval.shape))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("remat", ["full", "none"])
def test_no_gradient_of_an_adapted_matrix_is_computed(remat):
    """No matrix product has the shape of an adapted matrix; without adapters, all
    of these shapes occur."""
    matrices = {(16, 4, 8), (16, 2, 8), (16, 24)}  # queries and output, keys and values, MLP

    def traced(config, **settings):
        """Shapes of all matrix products in the gradient of a decoder."""
        settings = ComponentConfig(remat=remat, **settings)
        model = build(config, mesh=ONE, language=settings)
        params = model.abstract("float32")
        trained, frozen = model.trainable.split(params)
        rows = make_rows(0)
        media = np.zeros((4, 64, LANGUAGE.width), np.float32)

        def loss(trained, frozen):
            return model.hidden(join(trained, frozen), rows, media)[0].sum()

        return {*products(jax.make_jaxpr(jax.grad(loss))(trained, frozen).jaxpr)}

    gradient_shapes = {tuple(sorted(shape)) for shape in matrices}
    assert gradient_shapes <= traced(ModelConfig(language=LANGUAGE))
    adapted_products = traced(TEXT, freeze=True)
    assert adapted_products.isdisjoint(gradient_shapes)
    assert (3, 16) in adapted_products, "gradients of the factors"


def test_freezing_acts_on_one_component():
    adapters = AdapterComponents(language=TrainingConfig(freeze=True))
    assert build(TEXT, language=FROZEN).trainable.components == {"adapter.language"}
    assert not build(TEXT, language=FROZEN, adapter=adapters).trainable.components
    partly_trained = AdapterComponents(
        language=TrainingConfig(train=("*.b",), learning_rate_scale=2.0)
    )
    model = build(TEXT, language=ComponentConfig(train=("norm.scale",)), adapter=partly_trained)
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
