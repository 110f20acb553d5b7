"""Norms of slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmllm.attention.slot_products import times_factors
from jaxmllm.models.products import bias, plus_shared, times_shared


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in at least float32 (arXiv 1910.07467).

    The result is multiplied by scale + offset, which is 1 at first. With `heads` the norm is over
    the last two axes, heads and width.
    """

    def __init__(self, width: int, epsilon: float, offset: float = 0.0, heads: int | None = None):
        shape = (width,) if heads is None else (heads, width)
        axes = (None,) * len(shape)
        self.scale = nnx.Param(jnp.ones(shape) - offset, axes=axes, looked_up=False)
        self.epsilon = epsilon
        self.offset = offset
        self.axes = len(shape)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # The axes of the norm are joined: sums over one axis are dot products.
        normed = _over_root_mean_square(
            wide.reshape(*x.shape[: x.ndim - self.axes], -1), self.epsilon
        ).reshape(x.shape)
        scale = self.scale[...].astype(wide.dtype)
        if self.offset:
            scale = scale + self.offset
        return times_shared(normed, scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm to mean 0 and variance 1 over the last axis, computed in at least float32
    (arXiv 1607.06450).

    With `affine`, a scale and a bias follow.
    """

    def __init__(self, width: int, epsilon: float, affine: bool = True):
        ones = nnx.Param(jnp.ones((width,)), axes=(None,), looked_up=False) if affine else None
        self.scale = ones
        self.bias = bias((width,), (None,)) if affine else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = _over_root_mean_square(centred, self.epsilon)
        if self.scale is None or self.bias is None:
            return normed.astype(x.dtype)
        scaled = times_shared(normed, self.scale[...].astype(wide.dtype))
        shift = self.bias[...].astype(wide.dtype)
        return plus_shared(x.ndim - 1, scaled, shift).astype(x.dtype)


def _over_root_mean_square(x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """x divided by the root of (the mean of its squares + epsilon)."""
    return times_factors(x, jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + epsilon))


MakeNorm = Callable[[int, float], RMSNorm | LayerNorm]  # (width, epsilon) -> norm
NORMS: dict[str, MakeNorm] = {
    "rms": RMSNorm,
    "zero_centred_rms": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
}
MODULATED_NORMS: dict[str, MakeNorm] = {  # for results that are scaled and shifted afterwards
    "rms": RMSNorm,
    "layer": partial(LayerNorm, affine=False),
}
