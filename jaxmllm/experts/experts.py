"""A dropless mixture of experts: every token goes through all experts that it chose, however many
tokens choose the same.

    tokens --gathered over the devices that share the experts--> own experts compute --summed, scattered back--> tokens

The devices along the logical axis `experts` hold different experts. Each device computes its own
experts for the tokens of all these devices, so there is no capacity, and nothing is dropped.
Gradients return the same way; the gradient of a matrix stays with its expert, and is summed only
over devices that hold the same expert for other tokens.

    experts     checks, and owns the gradient rule and the collectives
    kernels     forward: out        backward: gradients      expert_blocks.py       every platform
                                                             expert_ragged_dot.py   jax.lax.ragged_dot

Letters: R rows, C slots, k experts of a token, E experts, D width, F MLP width; of one device: T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmllm.config.schema import ExpertKernel
from jaxmllm.experts import expert_blocks, expert_ragged_dot
from jaxmllm.experts.expert_blocks import Matrices
from sharding.rules import Layout

SLOTS = ("batch", "sequence")
# Axes of gathered matrices: only those that stay split during the computation
MATRICES = Matrices(
    gate=("experts", None, "mlp"), up=("experts", None, "mlp"), down=("experts", "mlp", None)
)
KERNELS = {"auto": expert_blocks, "jax": expert_blocks, "ragged_dot": expert_ragged_dot}


def experts(
    x: Float[Array, "R C D"],
    chosen: Int[Array, "R C k"],
    weights: Float[Array, "R C k"],
    matrices: Matrices,
    layout: Layout,
    kernel: ExpertKernel = "auto",
) -> Float[Array, "R C D"]:
    """Weighted sum of the chosen experts' outputs for each token, in the dtype of x.

    Args:
      chosen: different experts for each token; E where there is no token, whose result is zero.
      matrices: of E experts, in the dtype of x, gathered except along the axes of `MATRICES`.
      kernel: "jax", "ragged_dot", or "auto": "jax" on every platform, which needs the least memory.

    A device keeps its sums in at least float32. Outputs and gradients of tokens are added over
    devices in the dtype of x, gradients of weights in that of the weights. Raises `ValueError` if
    the shapes do not fit each other.
    """
    _check_shapes(x, chosen, weights, matrices)
    return _experts(_Mixture(layout, kernel), x, chosen, weights, matrices)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    mixture: _Mixture, x: Array, chosen: Array, weights: Array, matrices: Matrices
) -> Array:
    return mixture.forward(x, chosen, weights, matrices)


def _forward_rule(
    mixture: _Mixture, x: Any, chosen: Any, weights: Any, matrices: Any
) -> tuple[Array, tuple[Any, ...]]:
    wants_matrices = any(matrix.perturbed for matrix in matrices)
    values = x.value, chosen.value, weights.value, Matrices(*(m.value for m in matrices))
    # Residuals can only be trees of arrays, so () stands for true and None for false
    return mixture.forward(*values), (*values, () if wants_matrices else None)


def _backward_rule(
    mixture: _Mixture, residuals: tuple[Any, ...], d_out: Any
) -> tuple[Array, None, Array, Matrices]:
    x, chosen, weights, matrices, matrices_marker = residuals
    if isinstance(d_out, jax.custom_derivatives.SymbolicZero):
        d_out = jnp.zeros(d_out.shape, d_out.dtype)
    d_x, d_weights, d_matrices = mixture.backward(
        x, chosen, weights, matrices, d_out, matrices_marker is not None
    )
    if d_matrices is None:
        return d_x, None, d_weights, Matrices(None, None, None)
    return d_x, None, d_weights, d_matrices


_experts.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@dataclass(frozen=True)
class _Mixture:
    """The exchange between devices, and the code that each of them runs."""

    layout: Layout
    kernel: ExpertKernel

    def forward(self, x: Array, chosen: Array, weights: Array, matrices: Matrices) -> Array:
        tokens = (*SLOTS, None)
        local = self.layout.local(self._device_forward, (tokens, tokens, tokens, MATRICES), tokens)
        out: Array = local(x, chosen, weights, matrices)
        return out

    def backward(
        self,
        x: Array,
        chosen: Array,
        weights: Array,
        matrices: Matrices,
        d_out: Array,
        wants_matrices: bool,
    ) -> tuple[Array, Array, Matrices | None]:
        tokens = (*SLOTS, None)
        local = self.layout.local(
            partial(self._device_backward, wants_matrices),
            (tokens, tokens, tokens, MATRICES, tokens),
            (tokens, tokens, MATRICES if wants_matrices else None),
        )
        gradients: tuple[Array, Array, Matrices | None] = local(x, chosen, weights, matrices, d_out)
        return gradients

    # ------------------------------------------------------------------ one device

    def _device_forward(self, x: Array, chosen: Array, weights: Array, matrices: Matrices) -> Array:
        x_all, chosen_all, weights_all = self._gathered_slots(x, chosen, weights)
        chosen_all = self._local_numbers(chosen_all, matrices)
        out = KERNELS[self.kernel].forward(
            x_all, chosen_all, weights_all, matrices, self._all_experts(matrices)
        )
        return self._returned_sums(out.astype(x.dtype), x.shape)

    def _device_backward(
        self,
        wants_matrices: bool,
        x: Array,
        chosen: Array,
        weights: Array,
        matrices: Matrices,
        d_out: Array,
    ) -> tuple[Array, Array, Matrices | None]:
        x_all, chosen_all, weights_all, d_all = self._gathered_slots(x, chosen, weights, d_out)
        chosen_all = self._local_numbers(chosen_all, matrices)
        d_x, d_weights, d_matrices = KERNELS[self.kernel].backward(
            x_all,
            chosen_all,
            weights_all,
            matrices,
            d_all,
            self._all_experts(matrices),
            wants_matrices,
        )
        # The sums are over the tokens of all devices that share the experts, not yet over replicas.
        if d_matrices is not None:
            d_matrices = jax.tree.map(
                lambda gradient, matrix: jax.lax.psum(gradient, self._replica_axes).astype(
                    matrix.dtype
                ),
                d_matrices,
                matrices,
            )
        return (
            self._returned_sums(d_x.astype(x.dtype), x.shape),
            self._returned_sums(d_weights.astype(weights.dtype), weights.shape),
            d_matrices,
        )

    def _all_experts(self, matrices: Matrices) -> int:
        """E, from the matrices of this device's experts."""
        axes = self.layout.split_axes("experts")
        return len(matrices.gate) * math.prod(self.layout.mesh.shape[axis] for axis in axes)

    def _local_numbers(self, chosen: Array, matrices: Matrices) -> Array:
        """Numbers of the chosen experts, counted from the first expert of this device."""
        axes = self.layout.split_axes("experts")
        if not axes:
            return chosen
        # Other devices' experts get numbers below 0 or past the own ones, which kernels leave out.
        return chosen - jax.lax.axis_index(axes) * len(matrices.gate)

    def _gathered_slots(self, *of_slots: Array) -> list[Array]:
        """[R, C, ...] of this device -> [T, ...] of all devices that share the experts."""
        flat = [x.reshape(-1, x.shape[-1]) for x in of_slots]
        axes = self._token_axes
        if not axes:
            return flat
        return [jax.lax.all_gather(x, axes, axis=0, tiled=True) for x in flat]

    def _returned_sums(self, partial_sums: Array, shape: tuple[int, ...]) -> Array:
        """Sums for this device's tokens over all experts and all parts of their matrices."""
        sum_axes = [
            a for a in self.layout.split_axes("experts", "mlp") if a not in self._token_axes
        ]
        total = jax.lax.psum(partial_sums, tuple(sum_axes))
        # Every device has partial sums for all gathered tokens. They are added, and each device
        # gets those of its own tokens.
        if self._token_axes:
            total = jax.lax.psum_scatter(total, self._token_axes, scatter_dimension=0, tiled=True)
        return total.reshape(shape)

    @property
    def _token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split both experts and tokens."""
        slots = self.layout.split_axes(*SLOTS)
        return tuple(axis for axis in self.layout.split_axes("experts") if axis in slots)

    @property
    def _replica_axes(self) -> tuple[str, ...]:
        """Mesh axes along which devices hold the same experts and other tokens, except manual axes:
        along those, devices keep sums of their own."""
        split_axes = {*self.layout.split_axes("experts"), *self.layout.manual_axes}
        return tuple(axis for axis in self.layout.split_axes(*SLOTS) if axis not in split_axes)


def _check_shapes(x: Array, chosen: Array, weights: Array, matrices: Matrices) -> None:
    width = x.shape[-1]
    mlp_width = matrices.gate.shape[-1]
    experts = len(matrices.gate)
    expected = ((experts, width, mlp_width),) * 2 + ((experts, mlp_width, width),)
    if tuple(matrix.shape for matrix in matrices) != expected:
        raise ValueError(
            f"experts: x {x.shape} needs gate and up [E, {width}, F] and down [E, F, {width}], got "
            f"{', '.join(str(matrix.shape) for matrix in matrices)}"
        )
    if chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"experts: chosen and weights must be {[*x.shape[:-1], 'k']}, got {chosen.shape} and {weights.shape}"
        )
