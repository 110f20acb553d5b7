"""Parameters with logical axes, and products with them, biases and scales in every slot.

Every parameter carries the names of its logical axes. Letters: R ranks (rows), C slots of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmllm.config.schema import Kept
from sharding.by_platform import by_platform
from sharding.parameters import Parameter, gathered
from sharding.rules import Axes, Layout


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, fan_in: int, looked_up: bool = False
) -> nnx.Param[Array]:
    """A parameter with normal values of standard deviation fan_in**-0.5.

    Args:
      looked_up: whether it is only ever used as a lookup table, which is never gathered.
    """
    values = jax.random.normal(rngs.params(), shape) * fan_in**-0.5
    return nnx.Param(values, axes=axes, looked_up=looked_up)


def bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[Array]:
    """A bias of zeros."""
    return nnx.Param(jnp.zeros(shape), axes=axes, looked_up=False)


def layer_scale(width: int) -> nnx.Param[Array]:
    """Factors that are small at first, so that layers change little (arXiv 2103.17239)."""
    return nnx.Param(jnp.full((width,), 0.1), axes=(None,), looked_up=False)


def weight(p: nnx.Param[Array], layout: Layout, dtype: Any) -> Array:
    """The parameter as a computation in `dtype` needs it: cast, then gathered."""
    return gathered(layout, p[...], p.axes, dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("matrix", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapted:
    """A frozen matrix with factors of low rank, in place of the matrix's array, for `product`."""

    matrix: Array  # [*inputs, *outputs]
    a: Parameter  # [*inputs, rank]
    b: Parameter  # [rank, *outputs]
    scale: float  # factor on their product

    def __getitem__(self, index: Any) -> Adapted:
        """This object itself, for `[...]`: that is how modules read their parameters."""
        assert index is Ellipsis, "a matrix with an adapter is used whole"
        return self


def product(
    x: Float[Array, "R C *I"], p: nnx.Param[Array], layout: Layout, inputs: int = 1
) -> Float[Array, "R C *O"]:
    """x times a matrix [*I, *O] plus its adapter, where it has one (arXiv 2106.09685).

    The adapter's factors are not multiplied with each other. So they and their gradients cost only
    products of low rank. In the backward pass, the frozen matrix costs only its product for the
    gradient of x, because nobody needs its own gradient.

    Args:
      inputs: number of axes in I.
    """
    value: Any = p[...]
    if not isinstance(value, Adapted):
        return times_matrix(inputs, x, gathered(layout, value, p.axes, x.dtype))
    matrix = gathered(layout, value.matrix, p.axes, x.dtype)
    a = gathered(layout, value.a, (*p.axes[:inputs], None), x.dtype)
    b = gathered(layout, value.b, (None, *p.axes[inputs:]), x.dtype)
    low = layout.constrain(times_matrix(inputs, x, a), ("batch", "sequence", None))
    return times_matrix(inputs, x, matrix) + times_matrix(1, value.scale * low, b)


def named(x: Array, name: Kept) -> Array:
    """The same value, with a name by which `remat` may keep it.

    Values that no gradient needs have no name, such as the last product of an MLP that no norm
    follows. Attention's own gradient rule gives the name "attention" (attention/attention.py).
    """
    value: Array = checkpoint_name(x, name)
    return value


def biased(x: Float[Array, "*S *F"], b: nnx.Param[Array], layout: Layout) -> Float[Array, "*S *F"]:
    """x with a bias added in every slot."""
    return plus_shared(x.ndim - b[...].ndim, x, weight(b, layout, x.dtype))


def scaled(x: Float[Array, "*S D"], p: nnx.Param[Array], layout: Layout) -> Float[Array, "*S D"]:
    """x times a vector in every slot."""
    return times_shared(x, weight(p, layout, x.dtype))


def affine(
    x: Float[Array, "R C *I"],
    p: nnx.Param[Array],
    b: nnx.Param[Array] | None,
    layout: Layout,
    inputs: int = 1,
) -> Float[Array, "R C *O"]:
    """`product` plus a bias, where there is one."""
    out = product(x, p, layout, inputs)
    return out if b is None else biased(out, b, layout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def times_matrix(inputs: int, x: Float[Array, "*S *I"], matrix: Float[Array, "*I *O"]) -> Array:
    """x times a matrix whose first `inputs` axes are I, in every slot: [*S, *O].

    The matrix's gradient is written as one product, because JAX derives the transpose of another
    product, which XLA's CPU backend computes from two transposed factors: that takes twice as long.
    """
    return jnp.tensordot(x, matrix, inputs)


def _matrix_forward(inputs: int, x: Any, matrix: Any) -> tuple[Array, tuple[Any, Any]]:
    # Each factor is kept only if the gradient of the other one is asked for (`perturbed`).
    residuals = x.value if matrix.perturbed else None, matrix.value if x.perturbed else None
    return jnp.tensordot(x.value, matrix.value, inputs), residuals


def _matrix_backward(
    inputs: int, kept: tuple[Array | None, Array | None], gradient: Array
) -> tuple[Array | None, Array | None]:
    x, matrix = kept
    d_x = d_matrix = None
    if matrix is not None:
        outputs = matrix.ndim - inputs
        d_x = jnp.tensordot(
            gradient, matrix, (_last_axes(gradient, outputs), _last_axes(matrix, outputs))
        )
    if x is not None:
        d_matrix = _product_over_slots(x, gradient, x.ndim - inputs)
    return d_x, d_matrix


times_matrix.defvjp(_matrix_forward, _matrix_backward, symbolic_zeros=True)


def _last_axes(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


def _product_over_slots(
    x: Float[Array, "*S *I"], y: Float[Array, "*S *O"], slots: int
) -> Float[Array, "*I *O"]:
    """The sum over slots of the outer products of x and y. `slots`: number of dimensions of S."""
    over = tuple(range(slots))

    def plain(x: Array, y: Array) -> Array:
        return jnp.tensordot(x, y, (over, over))

    def narrow_first(x: Array, y: Array) -> Array:
        # Without the barrier XLA would swap the factors back.
        turned = jax.lax.optimization_barrier(plain(y, x))
        outputs = y.ndim - slots
        return turned.transpose(*range(outputs, turned.ndim), *range(outputs))

    if x.size <= y.size:
        return plain(x, y)
    # A CPU copies the first factor into another layout, so the narrow one should come first.
    product: Array = by_platform(x, y, cpu=narrow_first, default=plain)
    return product


SUMMED_TOGETHER: Final = 64  # most slots of a group in `sum_in_groups`

# Sums and products with an array that all slots share; `slot_sum` makes its gradient.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def plus_shared(slots: int, x: Array, shared: Array) -> Array:
    """x [*S, *F] plus an array [*F] that all slots share. `slots`: number of dimensions of S."""
    return x + shared


def _plus_forward(slots: int, x: Array, shared: Array) -> tuple[Array, None]:
    return x + shared, None


def _plus_backward(slots: int, _: None, gradient: Array) -> tuple[Array, Array]:
    return gradient, slot_sum(gradient, slots)


plus_shared.defvjp(_plus_forward, _plus_backward)


@jax.custom_vjp
def times_shared(x: Array, shared: Array) -> Array:
    return x * shared


def _times_forward(x: Array, shared: Array) -> tuple[Array, tuple[Array, Array]]:
    return x * shared, (x, shared)


def _times_backward(factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, shared = factors
    return gradient * shared, slot_sum(gradient * x, x.ndim - shared.ndim)


times_shared.defvjp(_times_forward, _times_backward)


def slot_sum(x: Float[Array, "*S *F"], slots: int) -> Float[Array, "*F"]:
    """The sum over the first `slots` dimensions, in the dtype of x but added in at least float32.

    It sums over all of them at once. The sum that JAX derives keeps the dimension of rows, and if
    that has length 1, XLA's CPU backend takes far longer for a sum of products [1, C, D] -> [1, D];
    and JAX would add bfloat16 in bfloat16.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    in_groups = partial(sum_in_groups, slots=slots)
    total: Array = by_platform(
        wide, cuda=in_groups, rocm=in_groups, default=partial(sum_at_once, slots=slots)
    )
    return total.astype(x.dtype)


def sum_at_once(x: Float[Array, "*S *F"], slots: int) -> Float[Array, "*F"]:
    """`slot_sum`, added in the dtype of x."""
    return jnp.sum(x, axis=tuple(range(slots)))


def sum_in_groups(x: Float[Array, "*S *F"], slots: int) -> Float[Array, "*F"]:
    """As `sum_at_once`, but over groups of slots first: XLA gives all slots of 32 columns to one
    block of threads, which leaves most of a GPU idle."""
    # Split the longest dimension: that of heads may be spread over several devices.
    longest = max(range(slots), key=lambda dimension: x.shape[dimension])
    group = math.gcd(x.shape[longest], SUMMED_TOGETHER)
    grouped = x.reshape(*x.shape[:longest], -1, group, *x.shape[longest + 1 :])
    # The barrier keeps XLA from merging the two sums into one.
    sums = jax.lax.optimization_barrier(jnp.sum(grouped, axis=longest + 1))
    return sum_at_once(sums, slots)
