"""Adapters: for some matrices of a component, two factors whose low-rank product is added to them.

language          layers.mlp.up    W [layers, D, F]                                        frozen
adapter.language  layers.mlp.up    a [layers, D, rank], b [layers, rank, F]

`with_adapters` joins the factors to their matrices, where `product` (products.py) finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxmllm.config.schema import AdapterConfig, Matrices
from jaxmllm.models.products import Adapted, parameter
from sharding.rules import Axes


class Adapter(nnx.Module):
    """The factors of a component's adapted matrices, under the same names as these."""

    def __init__(
        self,
        config: AdapterConfig,
        matrices: Matrices,
        parameters: Mapping[str, tuple[tuple[int, ...], Axes]],
        rngs: nnx.Rngs,
    ):
        """Make the factors.

        Args:
          matrices: the matrices that can have adapters: (inputs, outputs) by path.
          parameters: shape and axes of each parameter of the component, stacked layers first.
        """
        for path, (inputs, _) in config.adapted(matrices).items():
            *names, matrix_name = path.split(".")
            node: nnx.Module = self
            for name in names:
                if not hasattr(node, name):
                    setattr(node, name, nnx.Module())
                node = getattr(node, name)
            shape, axes = parameters[path]
            setattr(
                node,
                matrix_name,
                _Factors(shape[1:], axes[1:], shape[0], inputs, config.rank, rngs),
            )


class _Factors(nnx.Module):
    """Two factors for a matrix of every layer; their product is zero at first."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        layers: int,
        inputs: int,
        rank: int,
        rngs: nnx.Rngs,
    ):
        read = _input_axis_count(shape, inputs)
        self.a = parameter(rngs, (layers, *shape[:read], rank), (*axes[:read], None), inputs)
        zeros = jnp.zeros((layers, rank, *shape[read:]))
        self.b = nnx.Param(zeros, axes=(None, *axes[read:]), looked_up=False)


def _input_axis_count(shape: tuple[int, ...], inputs: int) -> int:
    """Number of leading axes of a matrix that are its inputs, which may be split into heads."""
    return next(axes for axes in range(1, len(shape)) if math.prod(shape[:axes]) == inputs)


def with_adapters(parameters: Any, factors: Any, scale: float) -> Any:
    """All or some parameters of a component, in which each adapted matrix is an `Adapted`.

    Args:
      parameters: nested dicts.
      factors: nested dicts with the same names, of adapted matrices only.
    """
    if not isinstance(parameters, dict):
        return Adapted(parameters, factors["a"], factors["b"], scale) if factors else parameters
    return {
        name: with_adapters(value, factors.get(name, {}), scale)
        for name, value in parameters.items()
    }


def merged(matrix: NDArray[Any], a: NDArray[Any], b: NDArray[Any], scale: float) -> NDArray[Any]:
    """A matrix of all layers with its adapter added to it, in at least float32.

    Args:
      matrix: [layers, *inputs, *outputs].
      a: [layers, *inputs, rank].
      b: [layers, rank, *outputs].
    """
    layers, rank = b.shape[:2]
    total: NDArray[Any] = matrix.astype(np.promote_types(matrix.dtype, np.float32))
    for layer in range(layers):
        factors = (a[layer].reshape(-1, rank), b[layer].reshape(rank, -1))
        low = np.matmul(*(factor.astype(total.dtype) for factor in factors))
        total[layer] += scale * low.reshape(matrix.shape[1:])
    return total
