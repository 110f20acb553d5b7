"""Which pipeline rank computes which layers: costs that know about freezing, cuts, and three kinds of layout.

    layers --partition--> Layout: chunks, runs of layers of one chain on one rank
    layers of every microbatch --layer_costs, chain_work--> ChainWork of every chain

    chain                    segments                       parallel
    rank 0  [vision    ]     rank 0  [vision 0][lang 0]     rank 0  [vision  ]
    rank 1  [vision|lng]     rank 1  [vision 1][lang 1]     rank 1  [audio   ]      (side by side)
    rank 2  [language  ]     rank 2  [vision 2][lang 2]     rank 2  [language]
    rank 3  [language  ]     rank 3  [vision 3][lang 3]     rank 3  [language]

A chain is a tower with its projector, or the language model with its embedding, head and loss: every one of these is a
layer with a cost of its own. Encoder chains come first and feed the language chain, the last. Stages that heed what
is frozen, and encoders side by side, are after Cornstarch (arXiv 2503.11367); segments, every chain over all ranks, are
after DIP (arXiv 2504.14145).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

from sharding.pipeline.graph import Chain, ChainWork, Layout, PipelineError

LayoutName = Literal["chain", "segments", "parallel"]
CutBy = Literal["cost", "parameters"]


@dataclass(frozen=True)
class Layer:
    """One layer of a chain, with its forward cost for an average microbatch in any one unit (FLOPs, microseconds)."""

    component: str  # what it is frozen by: "vision", "projector.vision", "language"
    linear: int  # matrix products with weights
    attention: int = 0  # scores and mixing, which have none
    parameters: int = 0
    trainable: bool = True
    checkpointed: bool = True  # its forward pass is computed again before its backward pass


@dataclass(frozen=True)
class LayerCost:
    """What a layer, or a run of layers, costs for one microbatch; 0 for what freezing leaves out."""

    forward: int = 0
    input_grad: int = 0
    weight_grad: int = 0
    recompute: int = 0

    @property
    def backward(self) -> int:
        return self.input_grad + self.weight_grad + self.recompute

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.recompute + other.recompute,
        )


# ---------------------------------------------------------------------------- costs


def layer_costs(chains: Mapping[str, Sequence[Layer]]) -> dict[str, tuple[LayerCost, ...]]:
    """Costs of all layers, as far as freezing demands them.

        up(l)   = something trainable strictly upstream of l
        bwd(l)  = [up] dX + [trainable] dW + [either, and checkpointed] forward

    dX and dW of a matrix product cost its forward pass each. Attention's own backward pass is 2.5 times its forward
    pass, frozen or not, wherever anything flows through it: it counts as input gradient, or, in a layer with nothing
    trainable upstream, as weight gradient.

    Args:
      chains: encoders first; upstream of the last one, language, is all of them.
    """
    costs: dict[str, tuple[LayerCost, ...]] = {}
    *_, last = chains
    anywhere = any(layer.trainable for chain, layers in chains.items() if chain != last for layer in layers)
    for chain, layers in chains.items():
        up, found = chain == last and anywhere, []
        for layer in layers:
            found.append(_cost(layer, up))
            up = up or layer.trainable
        costs[chain] = tuple(found)
    return costs


def _cost(layer: Layer, up: bool) -> LayerCost:
    forward = layer.linear + layer.attention
    through = 5 * layer.attention // 2
    flows = up or layer.trainable
    return LayerCost(
        forward=forward,
        input_grad=layer.linear + through if up else 0,
        weight_grad=(layer.linear if layer.trainable else 0) + (through if flows and not up else 0),
        recompute=forward if flows and layer.checkpointed else 0,
    )


def chunk_costs(chain: Chain, costs: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Costs of the chunks of a chain, [D], from those of its layers."""
    bounds = [0, *itertools.accumulate(chain.layers)]
    if bounds[-1] != len(costs):
        raise PipelineError(f"{chain.name} has {bounds[-1]} layers in its layout, but costs of {len(costs)}")
    return tuple(sum(costs[start:stop], LayerCost()) for start, stop in itertools.pairwise(bounds))


def rank_costs(layout: Layout, costs: Mapping[str, Sequence[LayerCost]]) -> tuple[int, ...]:
    """Cost of each rank, forward and backward of one microbatch of every chain: [S]."""
    total = [0] * layout.stages
    for chain in layout.chains:
        for rank, cost in zip(chain.stages, chunk_costs(chain, costs[chain.name]), strict=True):
            total[rank] += cost.total
    return tuple(total)


def chain_work(chain: Chain, costs: Sequence[Sequence[LayerCost]]) -> ChainWork:
    """Work of a chain in one batch: [D, M].

    Args:
      costs: of the chain's layers, for each of its M microbatches; where these repeat, the same objects may.
    """
    known = {id(each): chunk_costs(chain, each) for each in costs}
    parts = np.array([[astuple(cost) for cost in known[id(each)]] for each in costs], np.int64)
    forward, input_grad, weight_grad, recompute = parts.reshape(-1, chain.depth, 4).transpose(2, 1, 0)
    return ChainWork(np.maximum(forward, 1), recompute, input_grad, weight_grad)  # an embedding alone is an operation


# ---------------------------------------------------------------------------- cuts


def cut(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a run of layers into consecutive stages of at least one layer so that the costliest stage costs least.

    Exact, by dynamic programming; of all such cuts, one with the least sum of squares.

    Args:
      costs: [L], at least 0.

    Returns:
      [stages + 1] bounds: stage s has layers bounds[s] .. bounds[s + 1] - 1.

    Raises:
      PipelineError: more stages than layers, or none.
    """
    if not 1 <= stages <= len(costs):
        raise PipelineError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer each")
    ends = [0, *itertools.accumulate(costs)]
    slowest = _slowest(ends, stages)
    # Python's integers: squares of FLOPs do not fit 64 bits.
    layers, never = len(costs), float("inf")
    least: list[list[int | float]] = [[never] * (layers + 1) for _ in range(stages + 1)]
    source = [[0] * (layers + 1) for _ in range(stages + 1)]
    least[0][0] = 0
    for stage in range(1, stages + 1):
        for stop in range(stage, layers - (stages - stage) + 1):
            for start in range(stop - 1, stage - 2, -1):
                cost = ends[stop] - ends[start]
                if cost > slowest:
                    break
                if (total := least[stage - 1][start] + cost * cost) < least[stage][stop]:
                    least[stage][stop], source[stage][stop] = total, start
    bounds = [layers]
    for stage in range(stages, 0, -1):
        bounds.append(source[stage][bounds[-1]])
    return tuple(reversed(bounds))


def _slowest(ends: Sequence[int], stages: int) -> int:
    """The least possible cost of the costliest of some stages."""
    sums, layers = np.array(ends, object), len(ends) - 1
    best = sums.copy()  # of the first n layers in one stage
    for stage in range(2, stages + 1):
        more = best.copy()
        for stop in range(stage, layers + 1):
            starts = slice(stage - 1, stop)
            more[stop] = np.maximum(best[starts], sums[stop] - sums[starts]).min()
        best = more
    return int(best[layers])


# ---------------------------------------------------------------------------- layouts


def partition(
    chains: Mapping[str, Sequence[Layer]],
    stages: int,
    layout: LayoutName,
    cut_by: CutBy = "cost",
    chunks: Mapping[str, int] | None = None,
) -> Layout:
    """Lay chains over the ranks of a pipeline.

    chain      all chains one behind another, cut into one stage a rank; a rank where two chains meet has a chunk of
               either
    segments   chain i, in ascending order of cost T_i, is cut into stages * (T_i // T_1) chunks that go round the ranks
    parallel   every chain has ranks of its own; the split of the ranks is the best of all

    Args:
      chains: layers by chain, encoders first and language last; chains without layers are left out.
      stages: ranks of the pipeline.
      cut_by: what stages shall have alike; "parameters" is what ignores freezing and the sizes of inputs.
      chunks: for segments, chunks of a chain on each rank instead of T_i // T_1.

    Raises:
      PipelineError: more stages than a chain has layers (segments), than there are layers (chain), or fewer than there
        are chains (parallel).
    """
    chains = {name: layers for name, layers in chains.items() if len(layers)}
    if stages < 1 or not chains:
        raise PipelineError(f"pipeline.stages = {stages} and {len(chains)} chains: there must be at least one of each")
    costs = layer_costs(chains)
    weights = {
        name: [
            cost.total if cut_by == "cost" else layer.parameters
            for cost, layer in zip(costs[name], layers, strict=True)
        ]
        for name, layers in chains.items()
    }
    if layout == "chain":
        pieces = _chain(weights, stages)
    elif layout == "segments":
        pieces = _segments(weights, stages, chunks)
    else:
        pieces = _parallel(weights, stages)
    return Layout(
        stages,
        tuple(
            Chain(name, tuple(rank for rank, _ in pieces[name]), tuple(layers for _, layers in pieces[name]))
            for name in chains
        ),
    )


Pieces = dict[str, list[tuple[int, int]]]  # by chain: rank and number of layers of every chunk


def _chain(weights: Mapping[str, list[int]], stages: int) -> Pieces:
    layers = sum(map(len, weights.values()))
    if stages > layers:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_counts(weights)}: {layers} layers in all; use fewer stages"
        )
    bounds = cut([weight for chain in weights.values() for weight in chain], stages)
    pieces: Pieces = {}
    first = 0
    for name, chain in weights.items():
        ranges = [
            (rank, max(bounds[rank] - first, 0), min(bounds[rank + 1] - first, len(chain))) for rank in range(stages)
        ]
        pieces[name] = [(rank, stop - start) for rank, start, stop in ranges if start < stop]
        first += len(chain)
    return pieces


def _segments(weights: Mapping[str, list[int]], stages: int, chunks: Mapping[str, int] | None) -> Pieces:
    if short := {name: chain for name, chain in weights.items() if len(chain) < stages}:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_counts(short)}, and layout 'segments' needs one of each chain on every "
            "rank; use fewer stages or pipeline.layout = 'chain' or 'parallel'"
        )
    per_rank = chunks_per_rank(weights, stages) | dict(chunks or {})
    for name, count in per_rank.items():
        layers = len(weights.get(name, ()))
        if not 1 <= count * stages <= layers:
            raise PipelineError(f"{count} chunks of {name!r} on each of {stages} stages do not fit its {layers} layers")
    pieces: Pieces = {}
    for name, chain in weights.items():
        bounds = cut(chain, stages * per_rank[name])
        pieces[name] = [(index % stages, layers) for index, layers in enumerate(np.diff(bounds).tolist())]
    return pieces


def chunks_per_rank(weights: Mapping[str, Sequence[int]], stages: int) -> dict[str, int]:
    """K_i = T_i // T_1 by chain, T_1 that of the cheapest, so that chunks of all chains cost alike; no more than the
    layers of a chain allow."""
    cheapest = max(1, min(sum(chain) for chain in weights.values()))
    return {name: max(1, min(sum(chain) // cheapest, len(chain) // stages)) for name, chain in weights.items()}


def _parallel(weights: Mapping[str, list[int]], stages: int) -> Pieces:
    if stages < len(weights):
        raise PipelineError(
            f"pipeline.stages = {stages}, but layout 'parallel' needs a rank for each of {', '.join(weights)}: "
            f"use at least {len(weights)} stages or pipeline.layout = 'chain'"
        )
    limits = [len(chain) for chain in weights.values()]
    if stages > sum(limits):
        raise PipelineError(f"pipeline.stages = {stages}, but {_counts(weights)}; use fewer stages")
    ends = [[0, *itertools.accumulate(chain)] for chain in weights.values()]
    slowest = [
        {count: _slowest(of, count) for count in range(1, min(limit, stages) + 1)}
        for of, limit in zip(ends, limits, strict=True)
    ]

    def worth(split: tuple[int, ...]) -> list[int]:
        return sorted((slowest[number][count] for number, count in enumerate(split)), reverse=True)

    best = min(_splits(stages, limits), key=worth)
    pieces: Pieces = {}
    first = 0
    for (name, chain), count in zip(weights.items(), best, strict=True):
        bounds = cut(chain, count)
        pieces[name] = [(first + index, layers) for index, layers in enumerate(np.diff(bounds).tolist())]
        first += count
    return pieces


def _splits(stages: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give each chain one rank or more, and no more than its layers."""
    if len(limits) == 1:
        if 1 <= stages <= limits[0]:
            yield (stages,)
        return
    for count in range(1, min(limits[0], stages - len(limits) + 1) + 1):
        for rest in _splits(stages - count, limits[1:]):
            yield (count, *rest)


def _counts(chains: Mapping[str, Sequence[int]]) -> str:
    return " and ".join(f"{name!r} has {len(layers)} layers" for name, layers in chains.items())
