"""Sums of products over the numbers of a slot, and their gradients, against
the sums written out."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.attention.slot_products import slot_dots, times_factors

RNG = np.random.default_rng(0)


def test_dots_of_slots():
    with jax.enable_x64(True):
        x, y = (jnp.asarray(RNG.standard_normal((2, 5, 3, 8))) for _ in range(2))
        np.testing.assert_allclose(slot_dots(x, y), (x * y).sum(-1), rtol=0, atol=1e-13)


def test_gradients_of_factors_are_dots():
    with jax.enable_x64(True):
        x, factors = (jnp.asarray(RNG.standard_normal(shape)) for shape in ((2, 5, 8), (2, 5)))
        products, pull = jax.vjp(times_factors, x, factors)
        expected_products, pull_plain = jax.vjp(
            lambda x, factors: x * factors[..., None], x, factors
        )
        np.testing.assert_array_equal(products, expected_products)
        d_out = jnp.asarray(RNG.standard_normal(products.shape))
        for gradient, expected in zip(pull(d_out), pull_plain(d_out), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-13)
