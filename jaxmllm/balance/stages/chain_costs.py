"""What the chunks of every chain cost: a row's slots, filled or not, and the attention of the items
in it."""

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

# Attention of a row is counted in such parts of what one item that fills it takes
ATTENTION_PARTS = 1024
# Of a layer's products with weights, about what those of attention and those of the MLP are
LINEAR_SHARES: dict[Kept, Fraction] = {"projections": Fraction(1, 3), "mlp": Fraction(2, 3)}


@dataclass(frozen=True)
class ChainCosts:
    """What the chunks of a chain cost for one row: forward, input gradient, weight gradient,
    recompute, each [4, D].

    `linear` [classes, 4, D] is paid for every slot of a row of each class on a rank, filled or not, and
    `gathered`, likewise, for keys and values of other ranks that hold it (zero by default). `attention`
    [kinds, 4, D] is what attention adds, by kind of its squares (`ItemCost.squares`), where these are
    as many as of one item that fills a row of the first class, the largest.
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
        """The work of M rows of these classes [M] whose items have squares of these sums [kinds, M]."""
        of_slots = self.linear if self.gathered is None else self.linear + self.gathered
        costs = np.moveaxis(of_slots[row_class], 0, -1)
        for attention, attended in zip(
            self.attention,
            squares * ATTENTION_PARTS // self.capacity**2,
            strict=True,
        ):
            # Parts of the quotient and of the remainder: a product with all of it does not fit 64 bits of long rows
            quotient, remainder = np.divmod(attention[:, :, None], ATTENTION_PARTS)
            costs = costs + quotient * attended + remainder * attended // ATTENTION_PARTS
        forward, input_gradient, weight_gradient, recompute = costs
        if not backward:
            input_gradient = weight_gradient = recompute = np.zeros_like(forward)
        forward = np.maximum(forward, 1)
        return ChainWork(forward, recompute, input_gradient, weight_gradient, row_class)


@dataclass(frozen=True)
class ChainLayers:
    """Layers of all chains with their costs for rows of the given capacities, the largest first."""

    model: ModelConfig
    trained: Mapping[str, Fraction | int]  # share of the parameters, by component of which any is
    capacities: Mapping[str, tuple[int, ...]]
    remat: Mapping[str, Remat]  # by phase, of its tower or decoder; full where it is not said
    # By phase and class; 1 where nothing is said
    spans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # By phase, what gathering a slot of another rank takes in all layers (`SizingInputs.gather_cost`)
    gather_cost: Mapping[str, int] = field(default_factory=dict)
    reading: Reading = USUAL

    def layers(
        self, squares: Mapping[str, Sequence[int]], slots: Mapping[str, int]
    ) -> dict[str, list[Layer]]:
        """By phase, for rows of so many slots whose items have squares of these sums [kinds]."""
        return {
            name: [
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
            for name, capacity in slots.items()
        }

    def _with_recomputation(self, phase: str) -> Iterator[tuple[FlopsLayer, dict[str, Any]]]:
        """The layers of a phase, and what their own backward pass computes again: only between the first,
        a stem or embedding, and the last, a projector or head."""
        layers = self._flops_layers(phase)
        for index, layer in enumerate(layers):
            if 0 < index < len(layers) - 1:
                yield layer, computed_again(self.remat.get(phase, "full"))
            else:
                yield layer, {}

    def _flops_layers(self, phase: str) -> tuple[FlopsLayer, ...]:
        """A stem or embedding, layers, and a projector or head."""
        layers = phase_layers(self.model, phase)
        record = make_phases(self.model)[phase]
        if record.generates:  # what makes conditions and patches into slots is one stem
            projector, stem, *other_layers = layers
            products = (*projector.products, *stem.products)
            parameters = projector.parameters + stem.parameters
            either = projector if projector.is_trained(self.trained) else stem
            return (replace(either, parameters=parameters, products=products), *other_layers)
        if phase in self.reading.optional - self.reading.losses:  # a norm follows the layers
            *other_layers, head = layers
            return (*other_layers, replace(head, parameters=0, products=()))
        return layers

    def costs(self, ring: Ring) -> dict[str, ChainCosts]:
        """Costs of the chunks of every chain."""
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
            # All chains together: the first language chunk returns gradients where an encoder is trained.
            without_attention = [
                layer_costs(
                    self.layers(nothing, {**largest, chain.name: capacity}), self.reading.readers
                )[chain.name]
                for capacity in capacities
            ]
            linear = [_columns(chunk_costs(chain, layers)) for layers in without_attention]
            totals = [_columns(chunk_costs(chain, layers[chain.name])) for layers in one_item]
            # What squares of each kind add to the largest row, [kinds, 4, D]
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
    """What gathering keys and values for a row adds to the costs of chunks: [4, D]. A third of the price
    where a chunk runs forward, the rest where it goes back, by the attention that it has.

    Args:
      attention: [kinds, 4, D], as of `ChainCosts`.
    """
    forward, input_gradient, weight_gradient, _ = attention.sum(axis=0)
    shares = forward / max(int(forward.sum()), 1)
    costs = np.zeros(attention.shape[1:], np.int64)
    costs[0] = price / 3 * shares
    costs[1] = np.where(input_gradient + weight_gradient > 0, 2 * price / 3 * shares, 0)
    return costs


def computed_again(remat: Remat) -> dict[str, Any]:
    """What the backward pass of a layer computes once more, as `Layer` says it."""
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
    """[4, D], in the order in which `ChainCosts.work` reads them."""
    return np.array([cost.columns for cost in costs], np.int64).T
