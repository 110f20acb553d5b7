"""What the chunks of every chain cost: a row's slots, filled or not, and the attention of the items in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.config.schema import ModelConfig
from sharding.pipeline.graph import ChainWork
from sharding.pipeline.layer_costs import Layer, LayerCost, chunk_costs, layer_costs
from sharding.pipeline.ring import Ring

ATTENTION_PARTS = 1024  # attention of a row is counted in such parts of what one item that fills it takes


@dataclass(frozen=True)
class ChainCosts:
    """What the chunks of a chain cost for one row: forward, input gradient, weight gradient, recompute, each [4, D].

    `linear` is paid for every slot, filled or not; `attention` is what one item that fills the row adds.
    """

    capacity: int
    linear: Longs
    attention: Longs

    def work(self, squares: Longs, backward: bool = True) -> ChainWork:
        """The work of M rows whose items have squared lengths of these sums [M]."""
        attended = squares * ATTENTION_PARTS // self.capacity**2
        costs = self.linear[:, :, None] + self.attention[:, :, None] * attended // ATTENTION_PARTS
        forward, input_gradient, weight_gradient, recompute = costs
        if not backward:
            input_gradient = weight_gradient = recompute = np.zeros_like(forward)
        return ChainWork(np.maximum(forward, 1), recompute, input_gradient, weight_gradient)


@dataclass(frozen=True)
class ChainLayers:
    """Layers of all chains with their costs for rows of the given capacities."""

    model: ModelConfig
    trainable: frozenset[str]
    capacities: Mapping[str, int]

    def layers(self, squares: Mapping[str, int]) -> dict[str, list[Layer]]:
        """By phase, for rows whose items have squared lengths of these sums."""
        return {
            name: [
                Layer(
                    component=layer.component,
                    linear=layer.linear(capacity),
                    attention=layer.attention(capacity, squares[name]),
                    parameters=layer.parameters,
                    trainable=layer.component in self.trainable,
                )
                for layer in phase_layers(self.model, name)
            ]
            for name, capacity in self.capacities.items()
        }

    def costs(self, ring: Ring) -> dict[str, ChainCosts]:
        """Costs of the chunks of every chain."""
        without_attention = layer_costs(self.layers(dict.fromkeys(self.capacities, 0)))
        one_item = layer_costs(self.layers({name: capacity**2 for name, capacity in self.capacities.items()}))
        costs = {}
        for chain in ring.chains:
            linear = _columns(chunk_costs(chain, without_attention[chain.name]))
            total = _columns(chunk_costs(chain, one_item[chain.name]))
            costs[chain.name] = ChainCosts(self.capacities[chain.name], linear, total - linear)
        return costs


def _columns(costs: Sequence[LayerCost]) -> Longs:
    """[4, D], in the order in which `ChainCosts.work` reads them."""
    columns = [(cost.forward, cost.input_grad, cost.weight_grad, cost.recompute) for cost in costs]
    return np.array(columns, np.int64).T
