"""Costs of the chunks of every chain for one row: of its slots, filled or not, and of the attention
of its items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.balance.costs.flops import NO_SQUARES, phase_layers
from jaxmllm.balance.costs.flops import Layer as FlopsLayer
from jaxmllm.config.schema import Kept, ModelConfig, Remat
from jaxmllm.phases import make_phases
from sharding.pipeline.cuts import USUAL, Reading
from sharding.pipeline.graph import ChainWork
from sharding.pipeline.layer_costs import Layer, LayerCost, chunk_costs, layer_costs
from sharding.pipeline.ring import Ring

# Squares of a row are counted in 1/1024ths of those that `ChainCosts.attention` is for
ATTENTION_PARTS = 1024
# Approximate shares of attention and of the MLP in a layer's products with weights
LINEAR_SHARES: dict[Kept, Fraction] = {"projections": Fraction(1, 3), "mlp": Fraction(2, 3)}


@dataclass(frozen=True)
class ChainCosts:
    """Costs of a chain's D chunks for one row: forward, input gradient, weight gradient and
    recompute, [4, D].

    `linear` [classes, 4, D] is the cost of a rank's slots, filled or not, of a row of each class.
    `gathered`, of the same shape, is that of gathering keys and values from the row's other ranks
    (zero by default). `attention` [kinds, 4, D] is what attention adds for `capacity`**2 squares of
    each kind (`ItemCost.squares`).
    """

    capacities: tuple[int, ...]
    linear: Longs
    attention: Longs
    gathered: Longs | None = None

    @property
    def capacity(self) -> int:
        """Slots of the largest rows on a rank."""
        return self.capacities[0]

    def work(self, squares: Longs, row_class: Longs, backward: bool = True) -> ChainWork:
        """The work of M rows of classes `row_class` [M], whose items' squares sum to `squares`
        [kinds, M]."""
        of_slots = self.linear if self.gathered is None else self.linear + self.gathered
        costs = np.moveaxis(of_slots[row_class], 0, -1)
        for attention, attended in zip(
            self.attention,
            squares * ATTENTION_PARTS // self.capacity**2,
            strict=True,
        ):
            # Quotient and remainder are multiplied separately: for long rows the product of
            # `attention` and `attended` does not fit 64 bits.
            quotient, remainder = np.divmod(attention[:, :, None], ATTENTION_PARTS)
            costs = costs + quotient * attended + remainder * attended // ATTENTION_PARTS
        forward, input_gradient, weight_gradient, recompute = costs
        if not backward:
            input_gradient = weight_gradient = recompute = np.zeros_like(forward)
        forward = np.maximum(forward, 1)
        return ChainWork(forward, recompute, input_gradient, weight_gradient, row_class)


@dataclass(frozen=True)
class ChainLayers:
    """The layers of all chains with their costs for rows of the given capacities, largest first."""

    model: ModelConfig
    trained: Mapping[str, Fraction | int]  # trained share of the parameters, by component with any
    capacities: Mapping[str, tuple[int, ...]]
    remat: Mapping[str, Remat]  # by phase, of its tower or decoder; full for phases left out
    # By phase and class; 1 for phases left out
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # By phase, cost of gathering a slot of another rank in all layers (`SizingInputs.gather_cost`)
    gather_cost: Mapping[str, int] = field(default_factory=dict)
    reading: Reading = USUAL

    def layers(
        self, squares: Mapping[str, Sequence[int]], slots: Mapping[str, int]
    ) -> dict[str, list[Layer]]:
        """The layers of each phase, for rows of `slots` slots whose items' squares sum to `squares`
        [kinds]."""
        layers = {}
        for name, capacity in slots.items():
            layers[name] = [
                Layer(
                    component=layer.component,
                    linear=layer.linear(capacity),
                    attention=layer.attention(squares[name]),
                    parameters=layer.parameters,
                    trainable=layer.is_trained(self.trained),
                    trained_share=layer.trained_share(self.trained),
                    **again,
                )
                for layer, again in self._with_recomputation(name)
            ]
        return layers

    def _with_recomputation(self, phase: str) -> Iterator[tuple[FlopsLayer, dict[str, Any]]]:
        """Each layer of a phase, with what its own backward pass computes again: nothing in the
        first (a stem or embedding) and the last (a projector or head)."""
        layers = self._flops_layers(phase)
        for index, layer in enumerate(layers):
            if 0 < index < len(layers) - 1:
                yield layer, computed_again(self.remat.get(phase, "full"))
            else:
                yield layer, {}

    def _flops_layers(self, phase: str) -> tuple[FlopsLayer, ...]:
        """The layers of a phase: a stem or embedding, blocks, and a projector or head."""
        layers = phase_layers(self.model, phase)
        record = make_phases(self.model)[phase]
        if record.generates:  # the layers that turn conditions and patches into slots are one stem
            projector, stem, *other_layers = layers
            products = (*projector.products, *stem.products)
            parameters = projector.parameters + stem.parameters
            either = projector if projector.is_trained(self.trained) else stem
            return (replace(either, parameters=parameters, products=products), *other_layers)
        if phase in self.reading.optional - self.reading.losses:  # only a norm follows
            *other_layers, head = layers
            return (*other_layers, replace(head, parameters=0, products=()))
        return layers

    def costs(self, ring: Ring) -> dict[str, ChainCosts]:
        """Costs of the chunks of every chain, by phase."""
        kinds = len(NO_SQUARES)
        largest = {name: capacities[0] for name, capacities in self.capacities.items()}
        one_item = []
        for unit in np.eye(kinds, dtype=int).tolist():
            full = {
                name: [capacity**2 * share for share in unit] for name, capacity in largest.items()
            }
            one_item.append(layer_costs(self.layers(full, largest), self.reading.readers))
        nothing = dict.fromkeys(self.capacities, (0,) * kinds)
        costs = {}
        for chain in ring.chains:
            capacities = self.capacities[chain.name]
            # All chains together, because the first language chunk returns gradients only where an
            # encoder is trained.
            without_attention = [
                layer_costs(
                    self.layers(nothing, {**largest, chain.name: capacity}), self.reading.readers
                )[chain.name]
                for capacity in capacities
            ]
            linear = [_columns(chunk_costs(chain, layers)) for layers in without_attention]
            totals = [_columns(chunk_costs(chain, layers[chain.name])) for layers in one_item]
            # Cost that squares of each kind add to the largest row, [kinds, 4, D]
            attention = np.array(totals) - linear[0]
            spans = self.spans.get(chain.name, (1,) * len(capacities))
            price = self.gather_cost.get(chain.name, 0)
            gathered = [
                gathering(attention, price * (span - 1) * capacity)
                for capacity, span in zip(capacities, spans, strict=True)
            ]
            costs[chain.name] = ChainCosts(
                capacities, np.array(linear), attention, np.array(gathered)
            )
        return costs


def gathering(attention: Longs, price: int) -> Longs:
    """Cost that gathering keys and values for a row adds to the chunks: [4, D]. A third of the
    price is for forward passes, the rest for backward passes where a chunk has one. Chunks share
    it in proportion to their attention forward.

    Args:
      attention: [kinds, 4, D], as in `ChainCosts`.
      price: of all chunks, forward and backward.
    """
    forward, input_gradient, weight_gradient, _ = attention.sum(axis=0)
    shares = forward / max(int(forward.sum()), 1)
    costs = np.zeros(attention.shape[1:], np.int64)
    costs[0] = price / 3 * shares
    costs[1] = np.where(input_gradient + weight_gradient > 0, 2 * price / 3 * shares, 0)
    return costs


def computed_again(remat: Remat) -> dict[str, Any]:
    """What a layer's backward pass computes again, as keyword arguments of `Layer`."""
    match remat:
        case "none":
            return {}
        case "full":
            return {"linear_again": 1, "attention_again": 1}
        case "dots":
            return {"attention_again": 1}
        case kept:
            linear = sum(share for name, share in LINEAR_SHARES.items() if name not in kept)
            return {"linear_again": linear, "attention_again": int("attention" not in kept)}


def _columns(costs: Sequence[LayerCost]) -> Longs:
    """Costs of D chunks as [4, D], in the order in which `ChainCosts.work` reads them."""
    return np.array([cost.columns for cost in costs], np.int64).T
