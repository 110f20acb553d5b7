"""Which pipeline rank computes which layers: costs that know about freezing, cuts, and three kinds of layout.

    layers --partition--> Ring: chunks, runs of layers of one chain on one rank
    layers of every microbatch --layer_costs, chain_work--> ChainWork of every chain

    chain                    segments                       parallel
    rank 0  [vision    ]     rank 0  [vision 0][lang 0]     rank 0  [vision  ]
    rank 1  [vision|lng]     rank 1  [vision 1][lang 1]     rank 1  [audio   ]      (side by side)
    rank 2  [language  ]     rank 2  [vision 2][lang 2]     rank 2  [language]
    rank 3  [language  ]     rank 3  [vision 3][lang 3]     rank 3  [language]

A chain is an encoder or the language model: first its stem or embedding, then its blocks, last its projector, or its
head and loss. Each is a layer with a cost of its own; stems stay with the first block, projectors with the last one.
Encoder chains come first and feed the language chain, the last. Stages that heed what is frozen, and encoders side by
side, are after Cornstarch (arXiv 2503.11367); segments, every chain over all ranks, are after DIP (arXiv 2504.14145).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np

from sharding.pipeline.graph import Chain, ChainWork, PipelineError, Ring

LayoutName = Literal["chain", "segments", "parallel"]
CutBy = Literal["cost", "parameters"]
MINOR = 0.1  # of a microbatch's forward passes: a chain with less does not decide how finely the others are cut


@dataclass(frozen=True)
class Layer:
    """One layer of a chain, with its forward cost for one row in any one unit (FLOPs, microseconds)."""

    component: str  # what it is frozen by: "vision", "projector.vision", "language"
    linear: int  # matrix products with weights
    attention: int = 0  # scores and mixing, which have none
    parameters: int = 0
    trainable: bool = True
    checkpointed: bool = True  # its forward pass is computed again before its backward pass


@dataclass(frozen=True)
class LayerCost:
    """What a layer, or a run of layers, costs for one row; 0 for what freezing leaves out."""

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
    if sum(chain.layers) + 2 != len(costs):
        raise PipelineError(
            f"{chain.name} has {sum(chain.layers)} layers in its chunks, but costs of {len(costs)}: "
            "a stem or embedding, the layers, a projector or head"
        )
    bounds = [0, *(stop + 1 for stop in itertools.accumulate(chain.layers))]
    bounds[-1] += 1
    return tuple(sum(costs[start:stop], LayerCost()) for start, stop in itertools.pairwise(bounds))


def rank_costs(ring: Ring, costs: Mapping[str, Sequence[LayerCost]]) -> tuple[int, ...]:
    """Cost of each rank, forward and backward of one microbatch of every chain: [S]."""
    total = [0] * ring.stages
    for chain in ring.chains:
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
    rows: Mapping[str, float] | None = None,
    cut_by: CutBy = "cost",
    chunks: Mapping[str, int] | None = None,
) -> Ring:
    """Lay chains over the ranks of a pipeline.

    chain      all chains one behind another, cut into one stage a rank; a rank where two chains meet has a chunk of
               either
    segments   a chain is cut into stages * (T_i // T_1) chunks that go round the ranks; T_i is what the forward pass
               of one of its rows costs, T_1 the least of these over chains with `MINOR` of the work or more: so
               operations of all that counts cost alike
    parallel   every chain has ranks of its own; the split of the ranks is the best of all

    Args:
      chains: by name, encoders first and language last; of each a stem, blocks, and what comes after.
      stages: ranks of the pipeline.
      rows: of each chain in an average microbatch; one where it is left out.
      cut_by: what stages shall have alike; "parameters" is what ignores freezing and the sizes of inputs.
      chunks: for segments, chunks of a chain on each rank instead of T_i // T_1.

    Raises:
      PipelineError: more stages than a chain has blocks (segments), or than there are blocks, or fewer stages than
        chains (parallel).
    """
    if stages < 1 or not chains or any(len(chain) < 3 for chain in chains.values()):
        raise PipelineError(
            f"pipeline.stages = {stages} with {', '.join(chains) or 'no chain'}: a pipeline has at least one stage, "
            "and a chain at least a stem, a block, and a projector or head"
        )
    costs = layer_costs(chains)
    weights = {}
    for name, layers in chains.items():
        each = [
            cost.total if cut_by == "cost" else layer.parameters
            for cost, layer in zip(costs[name], layers, strict=True)
        ]
        count = (rows or {}).get(name, 1) if cut_by == "cost" else 1
        weights[name] = _units(each, count, last=name == [*chains][-1])
    if layout == "chain":
        pieces = _chain(weights, stages)
    elif layout == "segments":
        forward = {name: sum(cost.forward for cost in each) for name, each in costs.items()}
        share = {name: time * (rows or {}).get(name, 1) for name, time in forward.items()}
        unit = min(forward[name] for name in chains if share[name] >= MINOR * sum(share.values()))
        wanted = {name: time // max(1, unit) for name, time in forward.items()}
        most = {name: min(wanted[name], len(weights[name]) // stages) for name in chains}
        pieces = _segments(weights, stages, {name: max(1, count) for name, count in most.items()} | dict(chunks or {}))
    else:
        pieces = _parallel(weights, stages)
    return Ring(stages, tuple(_joined(name, pieces[name], costs[name]) for name in chains))


@dataclass(frozen=True)
class _Weights:
    """What cuts go between: the blocks of a chain, the first with the stem, and the head or, with the last, the
    projector."""

    units: list[int]  # for one row
    blocks: int
    rows: float

    @property
    def whole(self) -> list[int]:
        """For a microbatch."""
        return [round(unit * self.rows) for unit in self.units]

    def __len__(self) -> int:
        return self.blocks


def _units(weights: Sequence[int], rows: float, last: bool) -> _Weights:
    stem, *blocks, head = weights
    count = len(blocks)
    blocks[0] += stem
    if last:  # it may have a stage of its own, for a vocabulary is as much work as a few blocks
        return _Weights([*blocks, head], count, rows)
    blocks[-1] += head
    return _Weights(blocks, count, rows)


def _joined(name: str, pieces: Sequence[tuple[int, int]], costs: Sequence[LayerCost]) -> Chain:
    """A chain of pieces that count units."""
    ranks, units = zip(*pieces, strict=True)
    surplus = sum(units) - (len(costs) - 2)  # the unit of the head
    layers = (*units[:-1], units[-1] - surplus)
    return Chain(name, ranks, layers, head_only=not any(cost.backward for cost in costs[:-1]))


Pieces = dict[str, list[tuple[int, int]]]  # by chain: rank and number of units of every chunk


def _chain(weights: Mapping[str, _Weights], stages: int) -> Pieces:
    if stages > (layers := sum(map(len, weights.values()))):
        raise PipelineError(f"pipeline.stages = {stages}, but {_counts(weights)}: {layers} in all; use fewer stages")
    bounds = cut([weight for chain in weights.values() for weight in chain.whole], stages)
    pieces: Pieces = {}
    first = 0
    for name, chain in weights.items():
        stop = first + len(chain.units)
        counts = [min(b, stop) - max(a, first) for a, b in itertools.pairwise(bounds)]
        pieces[name] = [(rank, count) for rank, count in enumerate(counts) if count > 0]
        first = stop
    return pieces


def _segments(weights: Mapping[str, _Weights], stages: int, chunks: Mapping[str, int]) -> Pieces:
    if short := {name: chain for name, chain in weights.items() if len(chain) < stages}:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_counts(short)}, and layout 'segments' needs one of each on every "
            "rank; use fewer stages or pipeline.layout = 'chain' or 'parallel'"
        )
    pieces: Pieces = {}
    for name, chain in weights.items():
        count = chunks[name]
        if not 1 <= count * stages <= len(chain):
            raise PipelineError(f"{count} chunks of {name!r} on each of {stages} stages, but {_counts({name: chain})}")
        bounds = cut(chain.units, stages * count)
        pieces[name] = [(index % stages, units) for index, units in enumerate(np.diff(bounds).tolist())]
    return pieces


def _parallel(weights: Mapping[str, _Weights], stages: int) -> Pieces:
    if stages < len(weights):
        raise PipelineError(
            f"pipeline.stages = {stages}, but layout 'parallel' needs a rank for each of {', '.join(weights)}: "
            f"use at least {len(weights)} stages or pipeline.layout = 'chain'"
        )
    limits = [len(chain) for chain in weights.values()]
    if stages > sum(limits):
        raise PipelineError(f"pipeline.stages = {stages}, but {_counts(weights)}; use fewer stages")
    slowest = [
        {
            count: _slowest([0, *itertools.accumulate(chain.whole)], count)
            for count in range(1, min(len(chain), stages) + 1)
        }
        for chain in weights.values()
    ]

    def worth(split: tuple[int, ...]) -> list[int]:
        return sorted((slowest[number][count] for number, count in enumerate(split)), reverse=True)

    best = min(_splits(stages, limits), key=worth)
    pieces: Pieces = {}
    first = 0
    for (name, chain), count in zip(weights.items(), best, strict=True):
        bounds = cut(chain.whole, count)
        pieces[name] = [(first + index, units) for index, units in enumerate(np.diff(bounds).tolist())]
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


def _counts(chains: Mapping[str, _Weights]) -> str:
    return " and ".join(f"{name!r} has {len(chain)} layers" for name, chain in chains.items())
