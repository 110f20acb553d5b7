"""The choice of which pipeline rank computes which layers: exact cuts, and three kinds of layout.

    layers --layer_costs--> costs --partition--> Ring: chunks, consecutive layers on one rank

    chain                    segments                       parallel
    rank 0  [vision    ]     rank 0  [vision 0][lang 0]     rank 0  [vision  ]
    rank 1  [vision|lng]     rank 1  [vision 1][lang 1]     rank 1  [audio   ]      (at the same time)
    rank 2  [language  ]     rank 2  [vision 2][lang 2]     rank 2  [language]
    rank 3  [language  ]     rank 3  [vision 3][lang 3]     rank 3  [language]

A chain is an encoder, the language model or a generator: first its stem or embedding, then its
blocks, last its projector, or its head and loss. Each is a layer with a cost of its own; stems stay
with the first block, projectors with the last one. Chains precede the chain that reads them, the
last one unless `Reading` names another: encoders before the language model, the language model
before a generator, or all three. Stages that consider what is frozen, and encoders on ranks of
their own, are after Cornstarch (arXiv 2503.11367); segments, every chain over all ranks, are after
DIP (arXiv 2504.14145).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from sharding.pipeline.layer_costs import Layer, LayerCost, layer_costs
from sharding.pipeline.ring import Chain, PipelineError, Ring


@dataclass(frozen=True)
class Reading:
    """Which chain reads which, where the last chain does not read all others.

    readers: reader of each chain that the last chain does not read, by name.
    losses: chains that have a loss although they are read.
    optional: chains of which some rows may have no reader.
    """

    readers: Mapping[str, str] = field(default_factory=dict)
    losses: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


USUAL = Reading()
LayoutName = Literal["chain", "segments", "parallel"]
CutBy = Literal["cost", "parameters"]
# Share of the forward cost of a microbatch: a chain with less than that does not decide how finely
# the others are cut.
MINOR = 0.1

# ---------------------------------------------------------------------------- cuts


def cut(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a sequence of layers into consecutive stages of at least one layer so that the costliest
    stage costs least.

    Exact, by dynamic programming; of all such cuts, the one with the least sum of squares, and
    among equal sums the one whose first stages are the costliest: in 1F1B these go forward while no
    gradient comes back yet.

    Args:
      costs: [L], at least 0.

    Returns:
      [stages + 1] bounds: stage s has layers bounds[s] .. bounds[s + 1] - 1.

    Raises:
      PipelineError: more stages than layers, or none.
    """
    return _cut_bounds(costs, stages, 1, costliest_last=False)


def cut_in_rounds(costs: Sequence[int], stages: int, rounds: int) -> tuple[int, ...]:
    """Cut a sequence of layers into chunks of at least one layer that go round the stages `rounds`
    times, so that the sum over rounds of the costliest chunk's cost is least.

    A stage waits for the stages that do the same round in the same tick, so a batch costs every
    stage the costliest chunk of each round. Where layers do not divide evenly, one round has all
    the larger chunks, instead of a few in every round. Exact; of all such cuts, one of the most
    equal rounds, and among those the one whose costliest chunks come last: backward passes begin
    there, in ticks that the head makes long.

    Args:
      costs: [L], at least 0.

    Returns:
      [stages * rounds + 1] bounds: chunk c has layers bounds[c] .. bounds[c + 1] - 1.

    Raises:
      PipelineError: more chunks than layers, or none.
    """
    return _cut_bounds(costs, stages, rounds, costliest_last=True)


def _cut_bounds(
    costs: Sequence[int], stages: int, rounds: int, *, costliest_last: bool
) -> tuple[int, ...]:
    """The bounds of chunks that go round the stages; see `cut` and `cut_in_rounds`."""
    chunks = stages * rounds
    if not 1 <= chunks <= len(costs):
        raise PipelineError(
            f"{len(costs)} layers cannot be cut into {chunks} stages of at least one layer each",
        )
    ends = [0, *itertools.accumulate(costs)]
    limits = [_least_maximum(ends, stages)] if rounds == 1 else _round_limits(ends, stages, rounds)
    chunk_limits = [limit for limit in limits for _ in range(stages)]
    return _cut_within_limits(ends, chunk_limits, costliest_last=costliest_last)


def _cut_within_limits(
    ends: Sequence[int], limits: Sequence[int], *, costliest_last: bool
) -> tuple[int, ...]:
    """The bounds of chunks that cost no more than their limits, with the least sum of squares;
    among equal sums the cut whose last chunk costs most (`costliest_last`) or least, then likewise
    the chunk before it, and so on.

    `ends` [L + 1] are cumulative costs, from 0.
    """
    layers = len(ends) - 1
    chunks = len(limits)
    # squares[c][l]: least sum of squared costs of c chunks with the first l layers; Python's
    # integers, because squares of FLOPs do not fit 64 bits. cut_before[c][l]: where the last of
    # these chunks begins.
    squares: list[list[int | float]] = [[float("inf")] * (layers + 1) for _ in range(chunks + 1)]
    cut_before = [[0] * (layers + 1) for _ in range(chunks + 1)]
    squares[0][0] = 0
    for chunk, limit in enumerate(limits, start=1):
        # `stop` and `start` leave at least one layer for every chunk after and before this one.
        for stop in range(chunk, layers - (chunks - chunk) + 1):
            for start in range(stop - 1, chunk - 2, -1):
                cost = ends[stop] - ends[start]
                if cost > limit:
                    break
                total = squares[chunk - 1][start] + cost * cost
                best = squares[chunk][stop]
                # `start` falls, so of equal totals the last one found has the longest last chunk
                if total < best or (costliest_last and total == best):
                    squares[chunk][stop] = total
                    cut_before[chunk][stop] = start
    bounds = [layers]
    for chunk in range(chunks, 0, -1):
        bounds.append(cut_before[chunk][bounds[-1]])
    return tuple(reversed(bounds))


def _round_limits(ends: Sequence[int], stages: int, rounds: int) -> list[int]:
    """The most that a chunk may cost in each round, so that a cut exists and the sum of these
    limits is least; among equal sums the limits with the least sum of squares. `ends` [L + 1] are
    cumulative costs, from 0."""
    layers = len(ends) - 1
    # The sum of the limits where all rounds have the same one. The least sum is at most that, so no
    # single limit in it is greater.
    upper_bound = rounds * _least_maximum(ends, stages * rounds)
    # By number of layers in the rounds so far: sum and sum of squares of their limits, the limits
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    least_limits = _least_limits(ends, stages, upper_bound)
    for round_number in range(1, rounds + 1):
        latest = layers - stages * (
            rounds - round_number
        )  # leaves one layer for each chunk of the later rounds
        further: dict[int, tuple[int, int, list[int]]] = {}
        for start, (total, squares, limits) in best.items():
            for stop, limit in least_limits[start].items():
                candidate = (total + limit, squares + limit * limit, [*limits, limit])
                # Among equal sums and squares the lists decide: cheaper rounds first, the costliest
                # last.
                if stop <= latest and (stop not in further or candidate < further[stop]):
                    further[stop] = candidate
        best = further
    return best[layers][2]


def _least_limits(ends: Sequence[int], stages: int, most: int) -> list[dict[int, int]]:
    """For each first layer, by end: the least possible cost of the costliest of `stages` chunks,
    where it is at most `most`. `ends` [L + 1] are cumulative costs, from 0."""
    sums = {stop - start for start, stop in itertools.combinations(ends, 2)}
    least_limits: list[dict[int, int]] = [{} for _ in ends]
    for limit in sorted(cost for cost in sums if cost <= most):
        # By first layer of a chunk: its latest end
        latest = [bisect.bisect_right(ends, end + limit) - 1 for end in ends]
        # By first layer of the first chunk: the latest end of the chunks so far
        reached: Sequence[int] = range(len(ends))
        for _ in range(stages):
            reached = [latest[stop] for stop in reached]
        for start, stop in enumerate(reached):
            # Every end up to the latest is possible that leaves a layer for each chunk. Limits
            # ascend, so ends that already have a limit keep it, and the others get this one.
            longest = max(least_limits[start], default=start + stages - 1)
            least_limits[start].update(dict.fromkeys(range(longest + 1, stop + 1), limit))
    return least_limits


def _least_maximum(ends: Sequence[int], stages: int) -> int:
    """The least possible cost of the costliest stage when layers are cut into `stages` stages;
    `ends` [L + 1] are cumulative costs, from 0."""
    sums = np.array(ends, object)  # Python's integers, of any size
    layers = len(ends) - 1
    # maxima[n]: the least maximum for the first n layers in the stages so far, at first one stage
    maxima = sums.copy()
    for stage in range(2, stages + 1):
        finer = maxima.copy()
        for stop in range(stage, layers + 1):
            starts = slice(stage - 1, stop)
            # By start of the last stage: the greater of its cost and the maximum before it
            finer[stop] = np.maximum(maxima[starts], sums[stop] - sums[starts]).min()
        maxima = finer
    return int(maxima[layers])


# ---------------------------------------------------------------------------- layouts


def partition(
    chains: Mapping[str, Sequence[Layer]],
    stages: int,
    layout: LayoutName,
    rows: Mapping[str, float] | None = None,
    cut_by: CutBy = "cost",
    chunks: Mapping[str, int] | None = None,
    reading: Reading = USUAL,
) -> Ring:
    """Place chains on the ranks of a pipeline.

    chain      all chains one after another, cut into one stage for each rank; a rank where two
               chains meet has a chunk of either
    segments   a chain is cut into stages * (T_i // T_1) chunks that go round the ranks; T_i is the
               forward cost of one of its rows, T_1 the least T_i of the chains that have at least
               `MINOR` of the work: so operations of all these chains cost about the same
    parallel   every chain has ranks of its own; of all splits of the ranks, the best

    Args:
      chains: layers by name of the chain, encoders first and their reader last; each has a stem,
        blocks, and a projector or head.
      stages: number of ranks of the pipeline.
      rows: rows of each chain in an average microbatch; 1 for a chain that is left out.
      cut_by: what is made equal over stages; "parameters" ignores freezing and the sizes of inputs.
      chunks: for segments, the number of chunks of a chain on each rank, instead of T_i // T_1.
      reading: which chain reads which, and which have a loss although they are read.

    Raises:
      PipelineError: more stages than a chain has blocks (segments), or than there are blocks, or
        fewer stages than chains (parallel).
    """
    if stages < 1 or not chains or any(len(layers) < 3 for layers in chains.values()):
        raise PipelineError(
            f"pipeline.stages = {stages} with {', '.join(chains) or 'no chain'}: a pipeline has at least one stage, "
            "and a chain at least a stem, a block, and a projector or head",
        )
    costs = layer_costs(chains, reading.readers)
    row_counts = {name: (rows or {}).get(name, 1) for name in chains}
    *_, reader = chains
    # The cut makes these equal over stages. Parameters count once, however many rows of their chain
    # a microbatch has.
    weights = {}
    for name, layers in chains.items():
        if cut_by == "cost":
            layer_weights = [cost.total for cost in costs[name]]
            row_count = row_counts[name]
        else:
            layer_weights = [layer.parameters for layer in layers]
            row_count = 1
        has_loss = name == reader or name in reading.losses
        weights[name] = _chain_units(layer_weights, row_count, has_loss)
    match layout:
        case "chain":
            placed = _place_as_chain(weights, stages)
        case "segments":
            per_rank = _chunks_per_rank(weights, stages, costs, row_counts) | dict(chunks or {})
            placed = _place_as_segments(weights, stages, per_rank)
        case "parallel":
            placed = _place_in_parallel(weights, stages)
    laid = []
    for name in chains:
        chain = _chain_of_chunks(name, placed[name], costs[name])
        laid.append(
            replace(
                chain,
                reader=reading.readers.get(name, ""),
                has_loss=name in reading.losses,
                optional=name in reading.optional,
            )
        )
    return Ring(stages, tuple(laid))


@dataclass(frozen=True)
class _ChainUnits:
    """The units of a chain that cuts may separate: its blocks, the stem part of the first one, and
    then a head with its loss; without a loss, what follows the blocks is part of the last one."""

    costs: list[int]  # for one row
    blocks: int
    rows: float

    @property
    def microbatch_costs(self) -> list[int]:
        """The costs for all rows of a microbatch."""
        return [round(cost * self.rows) for cost in self.costs]

    def __len__(self) -> int:
        return self.blocks


def _chain_units(weights: Sequence[int], rows: float, has_loss: bool) -> _ChainUnits:
    stem, *blocks, head = weights
    block_count = len(blocks)
    blocks[0] += stem
    # A head may have a stage of its own, because a vocabulary is as much work as a few blocks
    if has_loss:
        return _ChainUnits([*blocks, head], block_count, rows)
    blocks[-1] += head
    return _ChainUnits(blocks, block_count, rows)


Placed = dict[str, list[tuple[int, int]]]  # by chain: rank and number of units of every chunk


def _chain_of_chunks(
    name: str, chunks: Sequence[tuple[int, int]], costs: Sequence[LayerCost]
) -> Chain:
    """A chain made of chunks of units; its layer counts leave out the unit of the head."""
    ranks, units = zip(*chunks, strict=True)
    # 1 where the head is a unit of its own, else 0; a last chunk of the head alone has no layers.
    surplus = sum(units) - (len(costs) - 2)
    layers = (*units[:-1], units[-1] - surplus)
    return Chain(name, ranks, layers, head_only=not any(cost.backward for cost in costs[:-1]))


def _place_as_chain(weights: Mapping[str, _ChainUnits], stages: int) -> Placed:
    layers = sum(map(len, weights.values()))
    if stages > layers:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_count_text(weights)}: {layers} in all; use fewer stages",
        )
    bounds = cut([cost for units in weights.values() for cost in units.microbatch_costs], stages)
    placed: Placed = {}
    begin = 0
    for name, units in weights.items():
        end = begin + len(units.costs)
        # How many units of this chain, begin .. end - 1, each stage has; 0 or less: none
        sizes = [min(stop, end) - max(start, begin) for start, stop in itertools.pairwise(bounds)]
        placed[name] = [(rank, size) for rank, size in enumerate(sizes) if size > 0]
        begin = end
    return placed


def _chunks_per_rank(
    weights: Mapping[str, _ChainUnits],
    stages: int,
    costs: Mapping[str, Sequence[LayerCost]],
    rows: Mapping[str, float],
) -> dict[str, int]:
    """T_i // T_1 of every chain (see `partition`), or as many chunks as its layers allow."""
    forward = {
        name: sum(cost.forward for cost in chain_costs) for name, chain_costs in costs.items()
    }
    work = {name: cost * rows[name] for name, cost in forward.items()}
    unit = min(forward[name] for name in weights if work[name] >= MINOR * sum(work.values()))
    return {
        name: max(1, min(forward[name] // max(1, unit), len(units) // stages))
        for name, units in weights.items()
    }


def _place_as_segments(
    weights: Mapping[str, _ChainUnits], stages: int, chunks: Mapping[str, int]
) -> Placed:
    if short := {name: units for name, units in weights.items() if len(units) < stages}:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_count_text(short)}, and layout 'segments' needs one of each on every "
            "rank; use fewer stages or pipeline.layout = 'chain' or 'parallel'",
        )
    placed: Placed = {}
    for name, units in weights.items():
        per_rank = chunks[name]
        if not 1 <= per_rank * stages <= len(units):
            raise PipelineError(
                f"{per_rank} chunks of {name!r} on each of {stages} stages, but {_count_text({name: units})}",
            )
        bounds = cut_in_rounds(units.costs, stages, per_rank)
        placed[name] = [
            (index % stages, size) for index, size in enumerate(np.diff(bounds).tolist())
        ]
    return placed


def _place_in_parallel(weights: Mapping[str, _ChainUnits], stages: int) -> Placed:
    if stages < len(weights):
        raise PipelineError(
            f"pipeline.stages = {stages}, but layout 'parallel' needs a rank for each of {', '.join(weights)}: "
            f"use at least {len(weights)} stages or pipeline.layout = 'chain'",
        )
    limits = [len(units) for units in weights.values()]
    if stages > sum(limits):
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_count_text(weights)}; use fewer stages"
        )
    slowest = []  # by chain: cost of its costliest stage, by number of stages
    for units in weights.values():
        ends = [0, *itertools.accumulate(units.microbatch_costs)]
        slowest.append(
            {ranks: _least_maximum(ends, ranks) for ranks in range(1, min(len(units), stages) + 1)},
        )

    def worth(split: tuple[int, ...]) -> list[int]:
        """Smaller is better: the cost of the slowest chain decides, then of the second slowest."""
        return sorted((slowest[index][ranks] for index, ranks in enumerate(split)), reverse=True)

    best = min(_rank_splits(stages, limits), key=worth)
    placed: Placed = {}
    begin = 0
    for (name, units), ranks in zip(weights.items(), best, strict=True):
        bounds = cut(units.microbatch_costs, ranks)
        placed[name] = [
            (begin + index, size) for index, size in enumerate(np.diff(bounds).tolist())
        ]
        begin += ranks
    return placed


def _rank_splits(stages: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give each chain at least one rank, and at most as many as it has layers."""
    if len(limits) == 1:
        if 1 <= stages <= limits[0]:
            yield (stages,)
        return
    for ranks in range(1, min(limits[0], stages - len(limits) + 1) + 1):
        for remaining in _rank_splits(stages - ranks, limits[1:]):
            yield (ranks, *remaining)


def _count_text(chains: Mapping[str, _ChainUnits]) -> str:
    return " and ".join(f"{name!r} has {len(units)} layers" for name, units in chains.items())
