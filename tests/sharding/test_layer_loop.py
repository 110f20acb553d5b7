"""The loop over layers equals jax.lax.scan, and its gradients are added to sums in place."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import layer_loop
from sharding.by_platform import traced_for
from sharding.layer_loop import Summed
from sharding.mesh import make_mesh
from sharding.parameters import Deferred
from sharding.rules import make_layout

LAYERS = 3
SLOTS = 4
WIDTH = 8
run_layers = partial(
    layer_loop.run_layers,
    make_layout(make_mesh({"data": 1, "fsdp": 1, "context": 1, "tensor": 1}, jax.devices()[:1])),
)
CHECKPOINTED = {
    "kept": lambda layer: layer,
    "recomputed": jax.checkpoint,
    "products kept": lambda layer: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    ),
}


def gated(parameters, x, own, of_all):
    """A layer that counts itself, and whose own number scales what it adds to its input."""
    hidden = jnp.tanh(x["slots"] @ parameters["up"] + of_all["shift"]) * of_all["level"]
    added = (own * parameters["scale"]) * (hidden @ parameters["down"]) / of_all["again"]
    out = {"mean": hidden.mean(), "positive": (hidden > 0).sum(dtype=jnp.int32)}
    return {"slots": x["slots"] + added + of_all["beside"], "count": x["count"] + 1}, out


class Inputs(NamedTuple):
    """Parameters of all layers, the input of the first, and what all layers read."""

    parameters: dict
    x: dict
    read: dict  # by all layers; it has gradients
    known: dict  # by all layers; it has none


def inputs(dtype=jnp.float32):
    """Random inputs of the loop."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)  # noqa: E731
    parameters = {
        "up": draw(LAYERS, WIDTH, 2 * WIDTH),
        "down": draw(LAYERS, 2 * WIDTH, WIDTH),
        "scale": draw(LAYERS, WIDTH),
    }
    level = jnp.asarray(2.0, dtype)
    return Inputs(
        parameters,
        {"slots": draw(SLOTS, WIDTH), "count": jnp.zeros((), dtype)},
        {"shift": draw(SLOTS, 2 * WIDTH), "beside": draw(SLOTS, WIDTH)},
        {"level": level, "again": level},  # one array in two places
    )


def scanned(layer, parameters, x, of_layers, of_all):
    """The reference: the same loop by jax.lax.scan."""

    def step(x, of_layer):
        return layer(of_layer[0], x, of_layer[1], of_all)

    return jax.lax.scan(step, x, (parameters, of_layers))


def loss(loop, layer, trained, x, read, frozen, known):
    """A loss of the last output and of one of the values that layers yield; the other one, of
    integers, is returned."""
    x, outs = loop(layer, trained | frozen, x, np.arange(LAYERS), read | known)
    weights = jnp.arange(x["slots"].size).reshape(x["slots"].shape)
    return (weights * x["slots"]).sum() + (outs["mean"] ** 2).sum(), outs["positive"]


def gradients(loop, given, parameters=None):
    """Gradients of the parameters alone."""
    trained = given.parameters if parameters is None else parameters
    function = jax.grad(loss, argnums=2, has_aux=True)
    return function(loop, gated, trained, given.x, given.read, {}, given.known)[0]


def assert_close(found, expected, tolerance=1e-5):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "frozen", [(), ("scale",), ("down", "up"), ("down", "scale", "up")], ids=str
)
@pytest.mark.parametrize("checkpointed", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_it_is_the_loop_of_scan(checkpointed, frozen):
    """Values and gradients, whatever is frozen, and whichever inputs have gradients."""
    sample = inputs()
    trained, frozen_parameters = (
        {name: leaf for name, leaf in sample.parameters.items() if (name in frozen) == is_frozen}
        for is_frozen in (False, True)
    )
    arguments = trained, sample.x, sample.read, frozen_parameters, sample.known

    def run(loop):
        argument_sets = [(2, 3, 4), (2,), (3,)] if trained else [(3, 4), (3,)]
        return [
            jax.jit(
                jax.value_and_grad(loss, argnums=argnums, has_aux=True), static_argnums=(0, 1)
            )(loop, checkpointed(gated), *arguments)
            for argnums in argument_sets
        ]  # fmt: skip

    assert_close(run(run_layers), run(scanned))
    values = [loss(loop, checkpointed(gated), *arguments) for loop in (run_layers, scanned)]
    assert_close(*values)


@pytest.mark.parametrize("summed", [("up",), ("down", "scale", "up")], ids=str)
@pytest.mark.parametrize("leading", [(), (1,)], ids=["as they are", "of one device"])
def test_gradients_are_added_to_sums(summed, leading):
    """Parameters that come with a sum get it back with their gradient added; the others
    get the gradient alone."""
    sample = inputs()
    totals = {
        name: jax.random.normal(jax.random.key(7), (*leading, *sample.parameters[name].shape))
        for name in summed
    }

    def with_sums(parameters, totals):
        summed_parameters = {
            name: Summed(parameters[name], total) for name, total in totals.items()
        }
        results = gradients(run_layers, sample, parameters | summed_parameters)
        return {name: leaf.total if name in totals else leaf for name, leaf in results.items()}

    expected = gradients(scanned, sample)
    for name, total in totals.items():
        expected[name] = total + expected[name].reshape(total.shape)
    assert_close(jax.jit(with_sums)(sample.parameters, totals), expected)


def test_sums_are_as_wide_as_they_were():
    """bfloat16 gradients are added to float32 sums, which would lose their small parts
    if they were rounded."""
    sample = inputs(jnp.bfloat16)
    totals = {
        name: jnp.full(leaf.shape, 1e-6, jnp.float32) for name, leaf in sample.parameters.items()
    }
    summed_parameters = {
        name: Summed(leaf, totals[name]) for name, leaf in sample.parameters.items()
    }
    results = gradients(run_layers, sample, summed_parameters)
    for name, gradient in gradients(run_layers, sample).items():
        assert results[name].total.dtype == jnp.float32
        np.testing.assert_array_equal(
            results[name].total, totals[name] + gradient.astype(jnp.float32), name
        )


def test_the_gradient_that_a_deferred_parameter_stands_for_is_added():
    """The gradient of the whole parameter is added to the sum; the shard itself gets zeros."""
    weights = jnp.arange(1.0, 1 + LAYERS * WIDTH).reshape(LAYERS, WIDTH)
    total = jnp.ones((1, LAYERS, WIDTH))

    @jax.custom_vjp
    def whole(parameter):
        return parameter.shard

    whole.defvjp(lambda parameter: (parameter.shard, None), lambda _, d: (Deferred(None, d),))

    def layer(parameter, x, own, of_all):
        return x * whole(parameter), None

    def product(parameter):
        return run_layers(layer, parameter, jnp.ones(WIDTH), None, None)[0].sum()

    gradient = jax.grad(product)(Summed(Deferred(weights, jnp.zeros_like(weights)), total))
    expected = jax.grad(lambda weights: weights.prod(0).sum())(weights)
    np.testing.assert_allclose(gradient.total, total + expected[None], rtol=1e-6)
    assert not gradient.parameter.shard.any()


def test_sums_take_no_room_of_their_own():
    """Beside arguments and results, the program needs less than a quarter of the gradients of all
    layers; adding them afterwards needs them all at once."""
    width = 64
    layers = 32
    weights = jnp.zeros((layers, width, width))

    def layer(weights, x, own, of_all):
        return jnp.tanh(x @ weights), None

    def objective(weights, x):
        return run_layers(layer, weights, x, None, None)[0].sum()

    def temporary_bytes(add):
        lowered = jax.jit(add, donate_argnums=1).lower(weights, weights, jnp.ones((1, width)))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    in_place = lambda w, total, x: jax.grad(objective)(Summed(w, total), x).total  # noqa: E731
    afterwards = lambda w, total, x: total + jax.grad(objective)(w, x)  # noqa: E731
    assert temporary_bytes(in_place) < weights.nbytes / 4
    assert temporary_bytes(afterwards) >= weights.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((LAYERS, WIDTH, 5), jnp.float32),
        ((LAYERS, 4, 2, 5), jnp.bfloat16),
        ((LAYERS, 5), jnp.float32),
    ],
    ids=["matrices", "heads in bfloat16", "vectors"],
)
def test_rows_of_gradients_are_added_to_sums_on_cpus(shape, dtype):
    """They have the bits that slices of all layers get. A vector of each layer has no rows."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "context": 1, "tensor": 1}, jax.devices()[:1])
    weights = jax.random.normal(jax.random.key(1), shape, dtype)
    total = jax.random.normal(jax.random.key(2), (1, *shape))

    def layer(weights, x, own, of_all):
        return x + jnp.sin(weights).sum() * x, None

    @jax.jit
    def added(weights, total, x):
        objective = lambda summed: run_layers(layer, summed, x, None, None)[0].sum()  # noqa: E731
        return jax.grad(objective)(Summed(weights, total)).total

    arguments = weights, total, jnp.ones(WIDTH)
    by_slices = added.lower(*arguments)
    with traced_for(mesh):
        by_rows = added.lower(*arguments)
    assert "stablehlo.scatter" not in by_slices.as_text()
    assert ("stablehlo.scatter" in by_rows.as_text()) == (len(shape) > 2)
    np.testing.assert_array_equal(
        by_rows.compile()(*arguments), by_slices.compile()(*arguments), strict=True
    )


def test_what_all_layers_read_is_not_kept_for_each():
    """If each layer kept its copy of `read`, the program would need 16 of them."""
    slots = 1 << 16
    layers = 16
    read = jnp.ones(slots)

    def objective(read, weights):
        layer = jax.checkpoint(lambda w, x, own, read: (x + (jnp.sin(w * read) * read).sum(), None))
        return run_layers(layer, weights, jnp.zeros(()), None, read)[0]

    lowered = jax.jit(jax.grad(objective)).lower(read, jnp.ones(layers))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < layers / 2 * read.nbytes


@pytest.mark.parametrize(
    ("platform", "tensor", "constrained"),
    [("cuda", 1, True), ("cuda", 2, False), ("cpu", 1, False)],
)
def test_what_lies_for_all_layers_keeps_its_order_on_gpus(platform, tensor, constrained):
    """Except where XLA splits layers over devices, because it would gather
    whatever is constrained."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "context": 1, "tensor": tensor}, jax.devices()[:tensor])

    def objective(weights, x):
        layer = lambda weights, x, own, of_all: (x @ weights, None)  # noqa: E731
        return layer_loop.run_layers(make_layout(mesh), layer, weights, x, None, None)[0].sum()

    traced = jax.jit(jax.grad(objective)).trace(jnp.zeros((2, 4, 4)), jnp.zeros((1, 4)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("LayoutConstraint" in text) == constrained
