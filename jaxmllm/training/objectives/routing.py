"""The router losses of a mixture of experts, and what they need to know of its routing.

    counts of the last step, over all devices --Routing--> every microbatch of this one
    RouterSums of rows --router_loss--> a term of the objective, linear in the tokens

The fractions of the last step are constants, so the loss of a batch is the sum of its tokens'
losses, and no plan, packing or number of microbatches changes it (arXiv 2501.11873).

Letters: R ranks or rows, L layers, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmllm.config.schema import ExpertsObjectiveConfig
from jaxmllm.models.mixture import RouterSums


class Routing(NamedTuple):
    """Inputs of a microbatch's router loss from outside the microbatch."""

    counts: (
        Any  # int32 [L, E]: tokens that chose an expert in the last step; zeros before the first
    )
    tokens: Any  # number of tokens in this step's batch


def router_loss(
    config: ExpertsObjectiveConfig, sums: RouterSums, routing: Routing
) -> Float[Array, ""]:
    """The part of the batch's loss that the rows' tokens add: `router_means`, weighted."""
    balance, z = router_means(sums, routing)
    return config.balance * balance + config.router_z * z


def router_means(sums: RouterSums, routing: Routing) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(balance, z): what some rows add to the means over all tokens and layers of the batch."""
    dtype = sums.z.dtype
    layers, experts = routing.counts.shape
    counts = jnp.asarray(routing.counts, dtype)  # floats: their sum may overflow int32
    chosen = counts.sum(axis=1, keepdims=True)
    fractions = jnp.where(chosen > 0, counts / jnp.maximum(chosen, 1), 1 / experts)
    scale = 1 / (layers * jnp.maximum(routing.tokens, 1).astype(dtype))
    balance = experts * (sums.probabilities.sum(0) * fractions).sum()
    return balance * scale, sums.z.sum() * scale
