"""The MLPs of own experts by `jax.lax.ragged_dot`, over the rows of all pairs at once.

This needs memory for k rows of each token, and on CPU it computes as many dense products as there
are experts. Arguments and results are those of expert_blocks.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmllm.experts.expert_blocks import Matrices


def forward(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    matrices: Matrices,
    all_experts: int,
) -> Float[Array, "N D"]:
    """Weighted sum of own experts' outputs for each token. There are no blocks, so `all_experts`
    changes nothing."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    experts = len(matrices.gate)
    expert = chosen.reshape(-1)
    is_own = (expert >= 0) & (expert < experts)
    pairs = jnp.argsort(jnp.where(is_own, expert, experts), stable=True)
    pairs_per_expert = (expert[:, None] == jnp.arange(experts)).sum(axis=0, dtype=jnp.int32)
    product = partial(jax.lax.ragged_dot, group_sizes=pairs_per_expert)
    tokens = pairs // chosen.shape[1]
    # Rows of other devices' experts come after those of own ones, and in no group: products and
    # their gradients are undefined there
    own = is_own[pairs][:, None]
    inputs = jnp.where(own, x[tokens], 0)
    hidden = jax.nn.silu(product(inputs, matrices.gate)) * product(inputs, matrices.up)
    outputs = jnp.where(own, product(hidden, matrices.down, preferred_element_type=wide), 0)
    weight = weights.reshape(-1)[pairs].astype(wide)
    return jnp.zeros(x.shape, wide).at[tokens].add(weight[:, None] * outputs)


def backward(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    matrices: Matrices,
    d_out: Float[Array, "N D"],
    all_experts: int,
    wants_matrices: bool = True,
) -> tuple[Float[Array, "N D"], Float[Array, "N k"], Matrices | None]:
    """Gradients of x, weights and, if wanted, matrices; computes the forward pass again."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    d_out = d_out.astype(wide)
    if wants_matrices:
        _, vjp = jax.vjp(
            lambda x, w, m: forward(x, chosen, w, m, all_experts), x, weights, matrices
        )
        d_x, d_weights, d_matrices = vjp(d_out)
        return d_x, d_weights, d_matrices
    _, vjp = jax.vjp(lambda x, w: forward(x, chosen, w, matrices, all_experts), x, weights)
    return *vjp(d_out), None
