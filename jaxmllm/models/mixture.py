"""The MLP of a layer as a mixture of experts: router, experts, and sums over the router's choices.

    x --router--> probabilities --the most likely--> experts, weights --experts/experts.py--> their sum
                        |
                        v
                  RouterSums: what losses and metrics need of a row

Letters: R rows, C slots of a row, L layers, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmllm.config.schema import ExpertsConfig
from jaxmllm.experts.expert_blocks import Matrices
from jaxmllm.experts.experts import experts
from jaxmllm.models.layers import RowContext, SelfAttention
from jaxmllm.models.norms import RMSNorm
from jaxmllm.models.products import parameter, weight
from sharding.rules import Layout


class RouterSums(NamedTuple):
    """Sums over the tokens of each row; once a stack has run, of all its layers, [R, L, ...]."""

    counts: Any  # int32 [R, E]: tokens that chose each expert
    probabilities: Any  # [R, E]: probabilities of each expert, chosen or not
    z: Any  # [R]: squares of the logarithms of the softmax's denominators


class Router(nnx.Module):
    """Chooses the experts of each token: a softmax over all experts, in at least float32
    (arXiv 1701.06538)."""

    def __init__(self, rngs: nnx.Rngs, width: int, config: ExpertsConfig):
        self.config = config
        self.matrix = parameter(rngs, (width, config.count), ("embed", None), width)

    def __call__(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Int[Array, "R C k"], Float[Array, "R C k"], RouterSums]:
        """(experts of each token, their weights, sums); padding gets E, which is no expert."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        matrix = weight(self.matrix, rows.layout, wide)
        # Rounded logits would choose other experts, so no platform may round the factors.
        logits = jnp.matmul(x.astype(wide), matrix, precision=jax.lax.Precision.HIGHEST)
        denominators = jax.nn.logsumexp(logits, axis=-1)
        probabilities = jnp.exp(logits - denominators[..., None])
        weights, chosen = jax.lax.top_k(probabilities, self.config.per_token)
        if self.config.renormalise:
            weights /= weights.sum(axis=-1, keepdims=True)
        token = rows.ids.document > 0
        # No device computes expert E, and the sums below leave padding out. So nothing reads the
        # weights of padding, which stay as they are.
        chosen = jnp.where(token[..., None], chosen, self.config.count)
        sums = RouterSums(
            (chosen[..., None] == jnp.arange(self.config.count)).sum((1, 2), dtype=jnp.int32),
            jnp.where(token[..., None], probabilities, 0).sum(1),
            jnp.where(token, denominators**2, 0).sum(1),
        )
        return chosen, weights, sums


class ExpertMLPs(nnx.Module):
    """The experts' gated MLPs (arXiv 2002.05202), without biases."""

    def __init__(self, rngs: nnx.Rngs, width: int, mlp_width: int, count: int):
        inner = (count, width, mlp_width)
        outer = (count, mlp_width, width)
        into = ("experts", "expert_embed", "mlp")
        out_of = ("experts", "mlp", "expert_embed")
        self.gate = parameter(rngs, inner, into, width)
        self.up = parameter(rngs, inner, into, width)
        self.down = parameter(rngs, outer, out_of, mlp_width)

    def __call__(
        self,
        x: Float[Array, "R C D"],
        chosen: Int[Array, "R C k"],
        weights: Float[Array, "R C k"],
        rows: RowContext,
    ) -> Float[Array, "R C D"]:
        """Weighted sum of the outputs of each token's chosen experts."""
        matrices = Matrices(
            *(weight(factor, rows.layout, x.dtype) for factor in (self.gate, self.up, self.down))
        )
        return experts(x, chosen, weights, matrices, rows.layout, rows.experts)


class MixtureBlock(nnx.Module):
    """A pre-norm transformer layer with experts in place of the MLP."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        epsilon: float,
        attention: SelfAttention,
        mlp_width: int,
        config: ExpertsConfig,
    ):
        self.attention_norm = RMSNorm(width, epsilon)
        self.attention = attention
        self.mlp_norm = RMSNorm(width, epsilon)
        self.router = Router(rngs, width, config)
        self.mlp = ExpertMLPs(rngs, width, mlp_width, config.count)

    def __call__(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Float[Array, "R C D"], RouterSums]:
        x = x + self.attention(self.attention_norm(x), rows)
        normed = self.mlp_norm(x)
        chosen, weights, sums = self.router(normed, rows)
        return x + self.mlp(normed, chosen, weights, rows), sums


def sums_of_rows(layout: Layout, sums: RouterSums) -> RouterSums:
    """Sums over whole rows, for code of one device, which has the sums of its parts of rows."""
    axes = tuple(axis for axis in layout.mesh_axes("sequence") if axis in layout.manual_axes)
    if not any(layout.mesh.shape[axis] > 1 for axis in axes):
        return sums
    rows = RouterSums(*[("batch",)] * 3)
    over_parts = layout.local(lambda sums: jax.lax.psum(sums, axes), (rows,), rows)
    added: RouterSums = over_parts(sums)
    return added
