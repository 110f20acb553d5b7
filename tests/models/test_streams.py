"""Slots with weights of one stream or of the other, against both of them over all slots."""

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
    """Whatever share of the rows conditions take, values and gradients are those of a choice by slot."""
    assert shares(LAYOUT, SLOTS) == [4, 8, 16, 32, 64]
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, SLOTS, 3)), jnp.float32)
    weights = jnp.asarray(random.normal(size=(2, 3, 4)), jnp.float32)
    direction = jnp.asarray(random.normal(size=(2, SLOTS, 4)), jnp.float32)

    def streams(is_condition, x, weights):
        where = ConditionSlots.of(LAYOUT, is_condition)
        of = lambda weight, x: (jnp.tanh(x @ weight), 2 * x)  # noqa: E731
        of_patches, of_conditions = weights
        return where.share, in_streams(LAYOUT, where, partial(of, of_patches), of, of_conditions, x)

    def chosen(is_condition, x, weights):
        kept = is_condition[..., None]
        return None, (jnp.where(kept, *(jnp.tanh(x @ w) for w in weights[::-1])), 2 * x)

    def sums(function):
        def total(x, weights, is_condition):
            share, (made, twice) = function(is_condition, x, weights)
            return (made * direction).sum() + (twice**2).sum(), (share, made)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

    found = sums(streams)
    expected = sums(chosen)
    for counts, share in (((0, 0), 0), ((4, 3), 0), ((9, 1), 2), ((32, 0), 3), ((33, 64), 4)):
        is_condition = np.zeros((2, SLOTS), bool)
        for row, count in zip(is_condition, counts, strict=True):
            row[random.choice(SLOTS, count, replace=False)] = True
        (loss, (taken, made)), gradients = found(x, weights, is_condition)
        (loss_, (_, made_)), gradients_ = expected(x, weights, is_condition)
        assert taken == share
        np.testing.assert_allclose(made, made_, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(loss, loss_, rtol=1e-5)
        for gradient, gradient_ in zip(gradients, gradients_, strict=True):
            np.testing.assert_allclose(gradient, gradient_, rtol=1e-5, atol=1e-5)
