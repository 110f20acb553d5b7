"""Backward passes that are split into parts give the gradients of jax.vjp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.gradient import KeptForward, LayerGradient, Params, used_leaves


def gated(params: Params, x, row):
    """Two matrix products into a gate and one out of it."""
    weights = params.trained | params.frozen
    hidden = (
        jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"]) * weights["scale"] / row["level"]
    )
    return x + hidden @ weights["down"]


def activated(params: Params, x, row):
    """A layer that reads the exponential of a matrix, which depends on no input."""
    weights = params.trained | params.frozen
    return x + (x @ jnp.exp(weights["gate"]) * weights["scale"] / row["level"]) @ weights["down"]


PLAIN = {
    "plain": gated,
    "jitted": jax.jit(gated),
    "jitted, with what depends on weights alone": jax.jit(activated),
    "recomputed": jax.checkpoint(gated),
    "products kept": jax.checkpoint(gated, policy=jax.checkpoint_policies.dots_saveable),
    "loop": lambda params, x, row: jax.lax.fori_loop(0, 2, lambda _, x: gated(params, x, row), x),
}
SHAPES = {"gate": (8, 16), "up": (8, 16), "down": (16, 8), "scale": (16,)}


def arrays(frozen: tuple[str, ...] = ("scale",)):
    """Parameters, an input, a row and a cotangent; `frozen` names the
    parameters without gradients."""
    random = np.random.default_rng(0)
    draw = {
        name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }
    trained = {name: value for name, value in draw.items() if name not in frozen}
    x, dy = (jnp.asarray(random.normal(size=(4, 8)), jnp.float32) for _ in range(2))
    row = {"level": jnp.asarray(random.uniform(1, 2, (4, 1)), jnp.float32)}
    return Params(trained, {name: draw[name] for name in frozen}), x, row, dy


@pytest.mark.parametrize("frozen", [("scale",), tuple(SHAPES)], ids=["some frozen", "all frozen"])
@pytest.mark.parametrize("layer", PLAIN.values(), ids=PLAIN)
def test_every_way_gives_the_gradients_of_vjp(layer, frozen):
    """The backward pass as one function and in two halves, of layers with and without jit,
    recomputation and loops."""
    params, x, row, dy = arrays(frozen)

    @jax.jit
    def run(params, x, row, dy):
        """(output, gradients) by jax.vjp, by the whole backward pass, and by its halves."""
        y, vjp = jax.vjp(
            lambda trained, x: layer(Params(trained, params.frozen), x, row), params.trained, x
        )
        gradient = LayerGradient(layer, params, x, row)
        result, residuals = gradient.forward(params, x, row)
        split = gradient.split()
        dx, pending = split.input_gradient(params, row, residuals, dy)
        parted = split.weight_gradient(params, row, pending), dx
        return (
            (y, vjp(dy)),
            (result, gradient.backward(params, row, residuals, dy)),
            (result, parted),
        )

    expected, *variants = run(params, x, row, dy)
    for result in variants:
        for leaf, expected_leaf in zip(
            jax.tree.leaves(result), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-5)


def test_residuals_hold_no_parameters():
    params, x, row, _ = arrays()
    gradient = LayerGradient(gated, params, x, row)
    shapes = {leaf.shape for leaf in gradient.residuals}
    assert shapes and not shapes & set(SHAPES.values())


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        ("recomputed", [(4, 8)]),
        ("products kept", [(4, 8), (4, 16), (4, 16)]),
    ],
)
def test_residuals_of_a_checkpointed_layer_are_its_input_and_what_its_policy_keeps(layer, shapes):
    params, x, row, _ = arrays()
    gradient = LayerGradient(PLAIN[layer], params, x, row)
    assert sorted(leaf.shape for leaf in gradient.residuals) == shapes
    assert gradient.keeps_input_alone == (layer == "recomputed")
    if gradient.keeps_input_alone:
        np.testing.assert_array_equal(gradient.residuals_of_input(x), [x])


def products(function, *args) -> int:
    """Number of matrix products in a compiled function."""
    return jax.jit(function).lower(*args).compile().as_text().count(" dot(")


@pytest.mark.parametrize("layer", ["plain", "jitted"])
def test_the_halves_share_no_matrix_product(layer):
    """Three products of input gradients and three of weight gradients; none is computed twice."""
    params, x, row, dy = arrays()
    gradient = LayerGradient(PLAIN[layer], params, x, row)
    residuals = gradient.forward(params, x, row)[1]
    split = gradient.split()
    pending = split.input_gradient(params, row, residuals, dy)[1]
    assert products(gradient.backward, params, row, residuals, dy) == 6
    assert products(split.input_gradient, params, row, residuals, dy) == 3
    assert products(split.weight_gradient, params, row, pending) == 3


def test_used_leaves():
    """Leaves of a dictionary are sorted: down, gate, scale, up. The function reads two of them."""
    params, x, *_ = arrays()

    def function(tree, x):
        return jax.jit(lambda tree: x @ tree["gate"] * tree["scale"])(tree)

    assert used_leaves(function, params.trained | params.frozen, x) == [False, True, True, False]


# ---------------------------------------------------------------------------- two passes as two programs


@pytest.mark.parametrize("layer", PLAIN.values(), ids=PLAIN)
def test_a_backward_pass_goes_on_from_what_the_forward_pass_kept(layer):
    """Forward and backward are two programs, between which only residuals pass. With zeros in their
    place, gradients must be wrong."""
    params, *row, dy = arrays()

    def function(params, row):
        return layer(params, *row)

    @jax.jit
    def forward(params, row):
        return KeptForward(function, params, row).forward(params, row)

    @jax.jit
    def backward(params, row, residuals, dy):
        return KeptForward(function, params, row).backward(params, row, residuals, dy)

    expected, vjp = jax.vjp(
        lambda trained: function(Params(trained, params.frozen), row), params.trained
    )
    y, residuals = forward(params, row)
    gradients = backward(params, row, residuals, dy)
    for leaf, expected_leaf in zip(
        jax.tree.leaves((y, gradients)), jax.tree.leaves((expected, *vjp(dy))), strict=True
    ):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-5)
    assert bool(residuals) == (layer is not PLAIN["recomputed"])
    zeros = backward(params, row, jax.tree.map(jnp.zeros_like, residuals), dy)
    assert np.allclose(zeros["down"], gradients["down"]) == (not residuals), "what is kept is read"


def test_only_what_depends_on_both_parameters_and_row_is_kept():
    """Of tanh(sin(x) @ exp(w)), neither sin(x) nor exp(w) is kept, because either can be computed
    anew from an argument."""
    params = Params({"w": jnp.ones((8, 16))}, {})
    kept = KeptForward(
        lambda params, x: jnp.tanh(jnp.sin(x) @ jnp.exp(params.trained["w"])),
        params,
        jnp.ones((4, 8)),
    )
    _, residuals = kept.forward(params, jnp.ones((4, 8)))
    assert {leaf.shape for leaf in residuals} == {(4, 16)}


def test_a_remembered_function_goes_back_from_its_residuals_inside_of_others():
    """As in a loss around the decoder, whose head may be the decoder's own embedding."""
    params, x, row, dy = arrays()

    def function(params, row):
        return gated(params, row["x"], row)

    def loss(of_row, trained):
        return jnp.sum(of_row(trained) * dy) + jnp.sum(jnp.square(trained["down"]))

    row |= {"x": x}
    expected = jax.grad(
        lambda trained: loss(lambda t: function(Params(t, params.frozen), row), trained)
    )(params.trained)
    y, residuals = KeptForward(function, params, row).forward(params, row)

    @jax.jit
    def found(params, row, residuals, y):
        kept = KeptForward(function, params, row)
        remembered = kept.remembered(params, row, residuals, y)
        return jax.value_and_grad(lambda trained: loss(remembered, trained))(params.trained)

    value, gradients = found(params, row, residuals, y)
    for leaf, expected_leaf in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-5)
    twice, _ = found(params, row, residuals, 2 * y)
    assert float(twice - value) == pytest.approx(float(jnp.sum(y * dy)), rel=1e-4), "y is read"
