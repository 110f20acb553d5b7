"""Slots that pass through the weights of one stream or of the other, against both
streams over all slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.models.streams import ConditionSlots, in_streams, shares
from sharding.mesh import make_mesh
from sharding.rules import make_layout

LAYOUT = make_layout(make_mesh({"data": 1}, jax.devices()[:1]))
SLOTS = 64


def test_each_slot_goes_through_the_weights_of_its_stream():
    """Whatever share of the rows conditions take, values and gradients equal a choice by slot."""
    assert shares(LAYOUT, SLOTS) == [4, 8, 16, 32, 64]
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, SLOTS, 3)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(2, 3, 4)), jnp.float32)
    direction = jnp.asarray(random.normal(size=(2, SLOTS, 4)), jnp.float32)

    def streams(is_condition, x, weights):
        condition_slots = ConditionSlots.of(LAYOUT, is_condition)
        apply = lambda weight, x: (jnp.tanh(x @ weight), 2 * x)  # noqa: E731
        patch_weights, condition_weights = weights
        return condition_slots.share, in_streams(
            LAYOUT, condition_slots, partial(apply, patch_weights), apply, condition_weights, x
        )

    def chosen(is_condition, x, weights):
        chosen_slots = is_condition[..., None]
        return None, (jnp.where(chosen_slots, *(jnp.tanh(x @ w) for w in weights[::-1])), 2 * x)

    def sums(function):
        def total(x, weights, is_condition):
            share, (outputs, doubled) = function(is_condition, x, weights)
            return (outputs * direction).sum() + (doubled**2).sum(), (share, outputs)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

    by_streams = sums(streams)
    by_choice = sums(chosen)
    # Conditions in each of the two rows, and the index of the smallest share that holds them.
    for condition_counts, share in (
        ((0, 0), 0),
        ((4, 3), 0),
        ((9, 1), 2),
        ((32, 0), 3),
        ((33, 64), 4),
    ):
        is_condition = np.zeros((2, SLOTS), bool)
        for row, condition_count in zip(is_condition, condition_counts, strict=True):
            row[random.choice(SLOTS, condition_count, replace=False)] = True
        (loss, (share_used, outputs)), gradients = by_streams(x, weights, is_condition)
        (expected_loss, (_, expected_outputs)), expected_gradients = by_choice(
            x, weights, is_condition
        )
        assert share_used == share
        np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_outputs_that_nothing_reads_have_no_gradient():
    """Gradients are those of the outputs that the loss reads."""
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(2, SLOTS, 3)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(2, 3, 4)), jnp.float32)
    is_condition = jnp.asarray(random.random((2, SLOTS)) < 0.2)

    def loss(weights, x):
        both = lambda weight, x: (jnp.tanh(x @ weight), 2 * x)  # noqa: E731
        condition_slots = ConditionSlots.of(LAYOUT, is_condition)
        patch_weights, condition_weights = weights
        outputs, _ = in_streams(
            LAYOUT, condition_slots, partial(both, patch_weights), both, condition_weights, x
        )
        return (outputs**2).sum()

    def expected_loss(weights, x):
        outputs = jnp.where(is_condition[..., None], *(jnp.tanh(x @ w) for w in weights[::-1]))
        return (outputs**2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))(weights, x)
    expected_gradients = jax.grad(expected_loss, argnums=(0, 1))(weights, x)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
