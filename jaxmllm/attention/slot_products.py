"""Dot products over the numbers of each slot, and products of slots with factors, whose gradients
are such dot products.

XLA's CPU backend takes 12 times longer for `(x * y).sum(-1)` than for the same written as a dot
product, or than for `(x * x).sum(-1)` (jax 0.10.2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def slot_dots(x: Float[Array, "*S K"], y: Float[Array, "*S K"]) -> Float[Array, "*S"]:
    """The sums of x * y over the last axis, in the dtype of both."""
    return jnp.einsum("...k,...k->...", x, y, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def times_factors(x: Float[Array, "*S K"], factors: Float[Array, "*S"]) -> Float[Array, "*S K"]:
    """x times a factor for each slot."""
    return x * factors[..., None]


def _forward(x: Array, factors: Array) -> tuple[Array, tuple[Array, Array]]:
    return x * factors[..., None], (x, factors)


def _backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, factors = kept
    return gradient * factors[..., None], slot_dots(x, gradient)


times_factors.defvjp(_forward, _backward)
