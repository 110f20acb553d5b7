"""The stage of each layer of a component in a pipeline, and conversions in both directions.

[layers, ...]  <--joined-- --staged-->  [S, K, L, ...]: K chunks of up to L layers on each stage
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.arrays import Ints
from sharding.pipeline.ring import Chain


@dataclass(frozen=True)
class StageLayers:
    """The layers of one component: `index` [S, K, L] is the number of a layer, -1 for no layer."""

    index: Ints

    @staticmethod
    def of(stages: int, chain: Chain) -> StageLayers:
        """The layers of a chain, placed as its ring says."""
        index = np.full((stages, chain.chunks_per_rank, max(1, *chain.layers)), -1, np.int32)
        begin = 0
        for depth, (stage, layer_count) in enumerate(zip(chain.stages, chain.layers, strict=True)):
            index[stage, chain.local(depth), :layer_count] = np.arange(begin, begin + layer_count)
            begin += layer_count
        return StageLayers(index)

    def staged(self, leaf: jax.Array) -> jax.Array:
        """[layers, ...] -> [S, K, L, ...], zero where there is no layer."""
        layers = jnp.take(leaf, np.maximum(self.index, 0), axis=0)
        is_layer = (self.index >= 0).reshape(*self.index.shape, *(1,) * (leaf.ndim - 1))
        return jnp.where(is_layer, layers, 0)

    def joined(self, leaf: jax.Array) -> jax.Array:
        """[S, K, L, ...] -> [layers, ...]"""
        index = self.index.reshape(-1)
        # Positions of the layers in [S * K * L], in the layers' own order.
        positions = np.flatnonzero(index >= 0)[np.argsort(index[index >= 0])]
        return jnp.take(leaf.reshape(-1, *leaf.shape[3:]), positions, axis=0)
