"""Rotary positions. Letters: R ranks (rows), C slots of a row, H heads, K head size."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Real

from jaxmllm.config.schema import RotaryScaling


def rotary_angles(
    positions: Real[Array, "R C A"],
    sections: tuple[int, ...],
    theta: float,
    dtype: Any = jnp.float32,
    scaling: RotaryScaling | None = None,
    interleaved: bool = False,
) -> Float[Array, "R C K/2"]:
    """Rotation angles of positions with A axes, in `dtype`, but in at least float32.

    The first sections[0] pairs rotate with axis 0, and so on. With `interleaved`, axes take turns:
    pair a + A * n rotates with axis a, for n < sections[a], and the remaining pairs with axis 0
    (arXiv 2511.21631). Frequencies continue through the sections, as in M-RoPE (arXiv 2409.12191);
    text, whose axes are equal, gets the one-dimensional RoPE (arXiv 2104.09864) exactly.
    """
    pairs = sum(sections)
    frequency = theta ** (-np.arange(pairs) / pairs)
    if scaling is not None:
        frequency = scaling.scaled(frequency, theta)
    axis = np.repeat(np.arange(len(sections)), sections)
    if interleaved:
        axis = np.zeros_like(axis)
        for axis_index, pairs in enumerate(sections[1:], start=1):
            axis[axis_index : len(sections) * pairs : len(sections)] = axis_index
    return _angles(positions, frequency, axis, dtype)


def rotary_angles_2d(
    positions: Int[Array, "R C 2"], pairs: int, theta: float, dtype: Any = jnp.float32
) -> Float[Array, "R C K/2"]:
    """Rotation angles of (row, column): half of the pairs each, over the whole frequency range."""
    return rotary_angles_by_axis(positions, (pairs // 2, pairs // 2), theta, dtype)


def rotary_angles_by_axis(
    positions: Int[Array, "R C A"],
    sections: tuple[int, ...],
    theta: float,
    dtype: Any = jnp.float32,
) -> Float[Array, "R C K/2"]:
    """Rotation angles of positions with A axes: sections[a] pairs rotate with axis a, each section
    over the whole range of frequencies."""
    frequency = np.concatenate([theta ** (-np.arange(pairs) / pairs) for pairs in sections])
    return _angles(positions, frequency, np.repeat(np.arange(len(sections)), sections), dtype)


def _angles(positions: Array, frequency: np.ndarray, axis: np.ndarray, dtype: Any) -> Array:
    dtype = jnp.promote_types(dtype, jnp.float32)
    return positions[..., axis].astype(dtype) * jnp.asarray(frequency, dtype)


class Rotation(NamedTuple):
    """Cosines and sines by which the pairs of a slot are rotated, times a multiplier.

    They are made before the loop over layers: if angles enter it, XLA's CPU backend computes
    cosines and sines again for every head, forward and backward, which took as long as products
    with weights.
    """

    cos: Float[Array, "R C K/2"]
    sin: Float[Array, "R C K/2"]

    @classmethod
    def of(cls, angles: Float[Array, "R C K/2"], multiplier: float = 1.0) -> Rotation:
        """Rotation by these angles."""
        cos = jnp.cos(angles)
        sin = jnp.sin(angles)
        return cls(cos, sin) if multiplier == 1.0 else cls(cos * multiplier, sin * multiplier)


def rotate(x: Float[Array, "R C H K"], rotation: Rotation) -> Float[Array, "R C H K"]:
    """Rotate pairs (x[i], x[i + K/2])."""
    cos, sin = (part[:, :, None] for part in rotation)
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
