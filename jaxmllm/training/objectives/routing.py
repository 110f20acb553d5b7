"""What a mixture of experts adds to the loss, and what is known of its routing.

    counts of the last step, over all devices --Routing--> every microbatch of this one
    RouterSums of rows --router_loss--> a term of the objective, linear in the tokens

The fractions of the last step are constants: so the loss of a batch is the sum of those of its tokens, and no plan,
packing or number of microbatches changes it (arXiv 2501.11873).

Letters: R ranks or rows, L layers, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmllm.config.schema import ExpertsObjectiveConfig
from jaxmllm.models.mixture import RouterSums


class Routing(NamedTuple):
    """What a microbatch's router loss takes from outside."""

    counts: (
        Any  # int32 [L, E]: tokens that chose an expert in the last step; zeros before the first
    )
    tokens: Any  # number of this step's batch


def router_loss(
    config: ExpertsObjectiveConfig, sums: RouterSums, routing: Routing
) -> Float[Array, ""]:
    """What the rows' tokens add to the loss of the batch."""
    balance, z = router_means(sums, routing)
    return config.balance * balance + config.router_z * z


def router_means(sums: RouterSums, routing: Routing) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(balance, z) of some rows: what these add to the means over all tokens and layers of the batch."""
    dtype = sums.z.dtype
    layers, experts = routing.counts.shape
    counts = jnp.asarray(routing.counts, dtype)  # their sum may be past the last integer of 32 bits
    chosen = counts.sum(axis=1, keepdims=True)
    fractions = jnp.where(chosen > 0, counts / jnp.maximum(chosen, 1), 1 / experts)
    scale = 1 / (layers * jnp.maximum(routing.tokens, 1).astype(dtype))
    balance = experts * (sums.probabilities.sum(0) * fractions).sum()
    return balance * scale, sums.z.sum() * scale
