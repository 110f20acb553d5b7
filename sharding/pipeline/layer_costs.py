"""Costs of layers and of chunks, forward and backward, without what freezing leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from sharding.pipeline.graph import ChainWork
from sharding.pipeline.ring import Chain, PipelineError

LAST_READS_ALL: Mapping[str, str] = {}


@dataclass(frozen=True)
class Layer:
    """One layer of a chain, with its forward cost for one row in any one unit (FLOPs,
    microseconds)."""

    component: str  # the name by which it is frozen: "vision", "projector.vision", "language"
    linear: int  # matrix products with weights
    attention: int = 0  # scores and mixing, which have no weights
    parameters: int = 0
    trainable: bool = True
    trained_share: Fraction | int = 1  # share of its weights that is trained, if it is trainable
    # Shares of the products with weights, and of attention, that the layer's own backward pass
    # computes again although it has the layer's input, as `remat` says
    linear_again: Fraction | int = 0
    attention_again: int = 0

    @property
    def keeps_input_alone(self) -> bool:
        """Whether its backward pass needs only its input, and nothing that its forward computes."""
        return self.linear_again == 1 and self.attention_again == 1


@dataclass(frozen=True)
class LayerCost:
    """Costs of a layer, or of several consecutive ones, for one row; 0 for parts that freezing
    leaves out."""

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    # `recompute`: the forward pass from the chunk's input to what its layers keep, where the
    # forward operation kept nothing. `unread`: the part of it not needed if this is the chunk's
    # last layer.
    recompute: int = 0
    unread: int = 0

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Forward pass, input gradient, weight gradient, recomputation."""
        return self.forward, self.input_grad, self.weight_grad, self.recompute

    @property
    def backward(self) -> int:
        """Cost of everything but the forward pass."""
        return self.input_grad + self.weight_grad + self.recompute

    @property
    def total(self) -> int:
        """Cost forward and backward."""
        return self.forward + self.backward

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            forward=self.forward + other.forward,
            input_grad=self.input_grad + other.input_grad,
            weight_grad=self.weight_grad + other.weight_grad,
            recompute=self.recompute + other.recompute,
            # That of the last layer: `sum` adds from the left, in the order of the layers.
            unread=other.unread,
        )


def layer_costs(
    chains: Mapping[str, Sequence[Layer]], readers: Mapping[str, str] = LAST_READS_ALL
) -> dict[str, tuple[LayerCost, ...]]:
    """Costs of all layers, without the parts that freezing leaves out.

        up(l)   = something trainable strictly upstream of l
        bwd(l)  = [up] dX + [trainable] share * dW + [either] (again + recompute)

    `again` is what `remat` makes a layer's own backward pass compute once more. `recompute` is the
    forward pass through the chunk that precedes the backward pass. dX and dW of a matrix product
    cost its forward pass each. Attention's own backward pass is 2.5 times its forward pass, frozen
    or not, wherever a gradient flows through it. It and `again` count as input gradient or, in a
    layer with nothing trainable upstream, as weight gradient.

    Args:
      chains: every chain before its reader.
      readers: reader of each chain that the last chain does not read.
    """
    *_, last_chain = chains
    costs: dict[str, tuple[LayerCost, ...]] = {}
    upstream: set[str] = set()  # chains that read a chain in which something is trained
    for name, layers in chains.items():
        up = name in upstream
        chain_costs = []
        for layer in layers:
            chain_costs.append(_layer_cost(layer, up))
            up = up or layer.trainable
        if up:
            upstream.add(readers.get(name, last_chain))
        costs[name] = tuple(chain_costs)
    return costs


def _layer_cost(layer: Layer, up: bool) -> LayerCost:
    forward = layer.linear + layer.attention
    attention_backward = 5 * layer.attention // 2
    flows = up or layer.trainable
    weights = round(layer.linear * layer.trained_share) if layer.trainable else 0
    again = round(layer.linear * layer.linear_again) + layer.attention * layer.attention_again
    input_grad = 0
    weight_grad = weights
    if up:
        input_grad = layer.linear + attention_backward + again
    elif flows:
        # Nothing upstream needs a gradient, but the layer's own weights before attention do.
        weight_grad += attention_backward + again
    recompute = forward if flows else 0
    return LayerCost(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        recompute=recompute,
        unread=recompute if layer.keeps_input_alone else 0,
    )


def chunk_costs(chain: Chain, costs: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Costs of the chunks of a chain, [D], from those of its layers."""
    if sum(chain.layers) + 2 != len(costs):
        raise PipelineError(
            f"{chain.name} has {sum(chain.layers)} layers in its chunks, but costs of {len(costs)}: "
            "a stem or embedding, the layers, a projector or head",
        )
    # The stem, costs[0], belongs to the first chunk, and the projector or head, costs[-1], to the
    # last one.
    bounds = [0, *(stop + 1 for stop in itertools.accumulate(chain.layers))]
    bounds[-1] += 1
    chunks = [sum(costs[start:stop], LayerCost()) for start, stop in itertools.pairwise(bounds)]
    return tuple(
        replace(chunk, recompute=chunk.recompute - chunk.unread, unread=0) for chunk in chunks
    )


def chain_work(chain: Chain, costs: Sequence[Sequence[LayerCost]]) -> ChainWork:
    """Work of a chain in one batch: [D, M].

    Args:
      costs: costs of the chain's layers for each of its M microbatches. Those of equal microbatches
        may be the same object, whose sums by chunk are then made once.
    """
    by_id = {id(row_costs): chunk_costs(chain, row_costs) for row_costs in costs}
    row_columns = []
    for row_costs in costs:
        chunks = by_id[id(row_costs)]
        row_columns.append([chunk.columns for chunk in chunks])
    columns = np.array(row_columns, np.int64)
    # [M, D, 4] becomes [4, D, M]; without microbatches the reshape makes [0, D, 4].
    forward, input_grad, weight_grad, recompute = columns.reshape(-1, chain.depth, 4).transpose(
        2,
        1,
        0,
    )
    # A chunk of the embedding alone costs nothing by these figures, but is an operation of a tick.
    return ChainWork(np.maximum(forward, 1), recompute, input_grad, weight_grad)
