"""Which pipeline rank computes which layers: exact cuts, and three kinds of layout.

    layers --layer_costs--> costs --partition--> Ring: chunks, consecutive layers on one rank

    chain                    segments                       parallel
    rank 0  [vision    ]     rank 0  [vision 0][lang 0]     rank 0  [vision  ]
    rank 1  [vision|lng]     rank 1  [vision 1][lang 1]     rank 1  [audio   ]      (at the same time)
    rank 2  [language  ]     rank 2  [vision 2][lang 2]     rank 2  [language]
    rank 3  [language  ]     rank 3  [vision 3][lang 3]     rank 3  [language]

A chain is an encoder, the language model or a generator: first its stem or embedding, then its blocks,
last its projector, or its head and loss. Each is a layer with a cost of its own; stems stay with the first
block, projectors with the last one. Chains come first that feed the last one, their reader: encoders
before the language model, or the language model before a generator, or (`Reading`) all three. Stages that
heed what is frozen, and encoders on ranks of their own, are after Cornstarch (arXiv 2503.11367); segments,
every chain over all ranks, are after DIP (arXiv 2504.14145).
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
    """Who reads whom, where that is not simply the last chain all others.

    readers: by chain that another than the last one reads, that one. losses: chains with a loss although they are
    read. optional: those of which rows may have no reader.
    """

    readers: Mapping[str, str] = field(default_factory=dict)
    losses: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


USUAL = Reading()
LayoutName = Literal["chain", "segments", "parallel"]
CutBy = Literal["cost", "parameters"]
MINOR = 0.1  # of a microbatch's forward passes: a chain with less does not decide how finely the others are cut

# ---------------------------------------------------------------------------- cuts


def cut(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a sequence of layers into consecutive stages of at least one layer so that the costliest
    stage costs least.

    Exact, by dynamic programming; of all such cuts, the one with the least sum of squares, and of
    equal ones the one whose first stages are the costliest: in 1F1B those go forward while nothing
    comes back yet.

    Args:
      costs: [L], at least 0.

    Returns:
      [stages + 1] bounds: stage s has layers bounds[s] .. bounds[s + 1] - 1.

    Raises:
      PipelineError: more stages than layers, or none.
    """
    return _cut(costs, stages, 1, costliest_last=False)


def cut_in_rounds(costs: Sequence[int], stages: int, rounds: int) -> tuple[int, ...]:
    """Cut a sequence of layers into chunks of at least one layer that go round the stages so many
    times, so that the costliest chunks of all rounds together cost least.

    A stage waits for those that do the same round in the same tick, so a batch costs every stage
    the costliest chunk of each round. Where layers do not divide evenly, one round has the larger
    chunks instead of every round a few. Exact; of all such cuts, one of most equal rounds, and of
    equal ones the one whose costliest chunks come last: backward passes begin there, in ticks that
    the head makes long.

    Args:
      costs: [L], at least 0.

    Returns:
      [stages * rounds + 1] bounds: chunk c has layers bounds[c] .. bounds[c + 1] - 1.

    Raises:
      PipelineError: more chunks than layers, or none.
    """
    return _cut(costs, stages, rounds, costliest_last=True)


def _cut(
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
    of_chunks = [limit for limit in limits for _ in range(stages)]
    return _cut_below(ends, of_chunks, costliest_last=costliest_last)


def _cut_below(
    ends: Sequence[int], limits: Sequence[int], *, costliest_last: bool
) -> tuple[int, ...]:
    """The bounds of chunks that cost no more than their limits, with the least sum of squares; of
    equal cuts, one whose last chunk costs most or least, then the one before it, and so on."""
    layers = len(ends) - 1
    chunks = len(limits)
    # squares[c][l]: least sum of squared costs of c chunks with the first l layers; Python's
    # integers, because squares of FLOPs do not fit 64 bits. cut_before[c][l]: where the last of
    # these chunks begins.
    squares: list[list[int | float]] = [[float("inf")] * (layers + 1) for _ in range(chunks + 1)]
    cut_before = [[0] * (layers + 1) for _ in range(chunks + 1)]
    squares[0][0] = 0
    for chunk, limit in enumerate(limits, start=1):
        # `stop` and `start` leave a layer to every other chunk, after and before.
        for stop in range(chunk, layers - (chunks - chunk) + 1):
            for start in range(stop - 1, chunk - 2, -1):
                cost = ends[stop] - ends[start]
                if cost > limit:
                    break
                total = squares[chunk - 1][start] + cost * cost
                best = squares[chunk][stop]
                if total < best or (costliest_last and total == best):  # longer chunks come later
                    squares[chunk][stop] = total
                    cut_before[chunk][stop] = start
    bounds = [layers]
    for chunk in range(chunks, 0, -1):
        bounds.append(cut_before[chunk][bounds[-1]])
    return tuple(reversed(bounds))


def _round_limits(ends: Sequence[int], stages: int, rounds: int) -> list[int]:
    """What a chunk may cost in every round, so that chunks can be cut and the sum is least; of equal
    sums, the one of least squares. `ends` [L + 1] are cumulative costs, from 0."""
    layers = len(ends) - 1
    # The sum of the limits where all rounds have the same; no limit of the least sum is above it.
    upper_bound = rounds * _least_maximum(ends, stages * rounds)
    # By the layers that the rounds so far have: sum and squares of their limits, and the limits.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    least_limits = _least_limits(ends, stages, upper_bound)
    for round_number in range(1, rounds + 1):
        latest = layers - stages * (
            rounds - round_number
        )  # the chunks that follow have a layer each
        further: dict[int, tuple[int, int, list[int]]] = {}
        for start, (total, squares, limits) in best.items():
            for stop, limit in least_limits[start].items():
                candidate = (total + limit, squares + limit * limit, [*limits, limit])
                # Of equal sums and squares, the lists decide: cheaper rounds first, the costliest
                # last.
                if stop <= latest and (stop not in further or candidate < further[stop]):
                    further[stop] = candidate
        best = further
    return best[layers][2]


def _least_limits(ends: Sequence[int], stages: int, most: int) -> list[dict[int, int]]:
    """By first layer and end, the least cost of the costliest of so many chunks, where it is no more
    than `most`."""
    sums = {stop - start for start, stop in itertools.combinations(ends, 2)}
    least_limits: list[dict[int, int]] = [{} for _ in ends]
    for limit in sorted(cost for cost in sums if cost <= most):
        # Where a chunk ends at the latest, and then where the last of all does
        latest = [bisect.bisect_right(ends, end + limit) - 1 for end in ends]
        # By first layer, where the chunks so far end at the latest
        reached: Sequence[int] = range(len(ends))
        for _ in range(stages):
            reached = [latest[stop] for stop in reached]
        for start, stop in enumerate(reached):
            # With a layer for every chunk, each end up to the latest can be had. Limits ascend, so
            # ends that have one keep it, and the others get this one.
            longest = max(least_limits[start], default=start + stages - 1)
            least_limits[start].update(dict.fromkeys(range(longest + 1, stop + 1), limit))
    return least_limits


def _least_maximum(ends: Sequence[int], stages: int) -> int:
    """The least possible cost of the costliest of some stages; `ends` [L + 1] are cumulative costs,
    from 0."""
    sums = np.array(ends, object)
    layers = len(ends) - 1
    maxima = sums.copy()  # of the first n layers in the stages so far; one stage to begin with
    for stage in range(2, stages + 1):
        finer = maxima.copy()
        for stop in range(stage, layers + 1):
            starts = slice(stage - 1, stop)
            # By start of the last stage: the costlier of it and of the stages before it
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
    """Lay chains over the ranks of a pipeline.

    chain      all chains one after another, cut into one stage per rank; a rank where two chains meet has a chunk of
               either
    segments   a chain is cut into stages * (T_i // T_1) chunks that go round the ranks; T_i is what the forward pass
               of one of its rows costs, T_1 the least of these over chains with `MINOR` of the work
               or more: so operations of all that counts cost about the same
    parallel   every chain has ranks of its own; the split of the ranks is the best of all

    Args:
      chains: by name, encoders first and their reader last; of each a stem, blocks, and what comes
      after.
      stages: ranks of the pipeline.
      rows: of each chain in an average microbatch; one where it is left out.
      cut_by: what shall be equal over stages; "parameters" ignores freezing and the sizes of
      inputs.
      chunks: for segments, chunks of a chain on each rank instead of T_i // T_1.
      reading: who reads whom, and has a loss besides.

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
    weights = {}
    for name, layers in chains.items():
        if cut_by == "cost":
            layer_weights = [cost.total for cost in costs[name]]
            row_count = row_counts[name]
        else:
            layer_weights = [layer.parameters for layer in layers]
            row_count = 1
        has_loss = name == reader or name in reading.losses
        weights[name] = _units(layer_weights, row_count, has_loss)
    match layout:
        case "chain":
            placed = _chain(weights, stages)
        case "segments":
            per_rank = _chunks_per_rank(weights, stages, costs, row_counts) | dict(chunks or {})
            placed = _segments(weights, stages, per_rank)
        case "parallel":
            placed = _parallel(weights, stages)
    laid = [
        replace(
            _joined(name, placed[name], costs[name]),
            reader=reading.readers.get(name, ""),
            has_loss=name in reading.losses,
            optional=name in reading.optional,
        )
        for name in chains
    ]
    return Ring(stages, tuple(laid))


@dataclass(frozen=True)
class _Units:
    """What cuts go between: the blocks of a chain, the first with the stem; after them the head with its
    loss as a unit; without one, what follows is in the last block's."""

    costs: list[int]  # for one row
    blocks: int
    rows: float

    @property
    def microbatch_costs(self) -> list[int]:
        """The costs for all rows of a microbatch."""
        return [round(cost * self.rows) for cost in self.costs]

    def __len__(self) -> int:
        return self.blocks


def _units(weights: Sequence[int], rows: float, has_loss: bool) -> _Units:
    stem, *blocks, head = weights
    block_count = len(blocks)
    blocks[0] += stem
    # A head may have a stage of its own, for a vocabulary is as much work as a few blocks
    if has_loss:
        return _Units([*blocks, head], block_count, rows)
    blocks[-1] += head
    return _Units(blocks, block_count, rows)


Placed = dict[str, list[tuple[int, int]]]  # by chain: rank and number of units of every chunk


def _joined(name: str, chunks: Sequence[tuple[int, int]], costs: Sequence[LayerCost]) -> Chain:
    """A chain whose layer counts are those of its units, but for the head's."""
    ranks, units = zip(*chunks, strict=True)
    # 1 where the head is a unit of its own, else 0; a last chunk of the head alone has no layers.
    surplus = sum(units) - (len(costs) - 2)  # the unit of the head
    layers = (*units[:-1], units[-1] - surplus)
    return Chain(name, ranks, layers, head_only=not any(cost.backward for cost in costs[:-1]))


def _chain(weights: Mapping[str, _Units], stages: int) -> Placed:
    layers = sum(map(len, weights.values()))
    if stages > layers:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_counts(weights)}: {layers} in all; use fewer stages",
        )
    bounds = cut([cost for units in weights.values() for cost in units.microbatch_costs], stages)
    placed: Placed = {}
    begin = 0
    for name, units in weights.items():
        end = begin + len(units.costs)
        # What of each stage lies in units begin .. end - 1, those of this chain; 0 or less: none
        sizes = [min(stop, end) - max(start, begin) for start, stop in itertools.pairwise(bounds)]
        placed[name] = [(rank, size) for rank, size in enumerate(sizes) if size > 0]
        begin = end
    return placed


def _chunks_per_rank(
    weights: Mapping[str, _Units],
    stages: int,
    costs: Mapping[str, Sequence[LayerCost]],
    rows: Mapping[str, float],
) -> dict[str, int]:
    """T_i // T_1 of every chain, as far as its layers allow it."""
    forward = {
        name: sum(cost.forward for cost in chain_costs) for name, chain_costs in costs.items()
    }
    work = {name: cost * rows[name] for name, cost in forward.items()}
    unit = min(forward[name] for name in weights if work[name] >= MINOR * sum(work.values()))
    return {
        name: max(1, min(forward[name] // max(1, unit), len(units) // stages))
        for name, units in weights.items()
    }


def _segments(weights: Mapping[str, _Units], stages: int, chunks: Mapping[str, int]) -> Placed:
    if short := {name: units for name, units in weights.items() if len(units) < stages}:
        raise PipelineError(
            f"pipeline.stages = {stages}, but {_counts(short)}, and layout 'segments' needs one of each on every "
            "rank; use fewer stages or pipeline.layout = 'chain' or 'parallel'",
        )
    placed: Placed = {}
    for name, units in weights.items():
        per_rank = chunks[name]
        if not 1 <= per_rank * stages <= len(units):
            raise PipelineError(
                f"{per_rank} chunks of {name!r} on each of {stages} stages, but {_counts({name: units})}",
            )
        bounds = cut_in_rounds(units.costs, stages, per_rank)
        placed[name] = [
            (index % stages, size) for index, size in enumerate(np.diff(bounds).tolist())
        ]
    return placed


def _parallel(weights: Mapping[str, _Units], stages: int) -> Placed:
    if stages < len(weights):
        raise PipelineError(
            f"pipeline.stages = {stages}, but layout 'parallel' needs a rank for each of {', '.join(weights)}: "
            f"use at least {len(weights)} stages or pipeline.layout = 'chain'",
        )
    limits = [len(units) for units in weights.values()]
    if stages > sum(limits):
        raise PipelineError(f"pipeline.stages = {stages}, but {_counts(weights)}; use fewer stages")
    slowest = []  # by chain: cost of its costliest stage, by the number of its stages
    for units in weights.values():
        ends = [0, *itertools.accumulate(units.microbatch_costs)]
        slowest.append(
            {ranks: _least_maximum(ends, ranks) for ranks in range(1, min(len(units), stages) + 1)},
        )

    def worth(split: tuple[int, ...]) -> list[int]:
        return sorted((slowest[index][ranks] for index, ranks in enumerate(split)), reverse=True)

    best = min(_splits(stages, limits), key=worth)
    placed: Placed = {}
    begin = 0
    for (name, units), ranks in zip(weights.items(), best, strict=True):
        bounds = cut(units.microbatch_costs, ranks)
        placed[name] = [
            (begin + index, size) for index, size in enumerate(np.diff(bounds).tolist())
        ]
        begin += ranks
    return placed


def _splits(stages: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to give each chain one rank or more, and no more than its layers."""
    if len(limits) == 1:
        if 1 <= stages <= limits[0]:
            yield (stages,)
        return
    for ranks in range(1, min(limits[0], stages - len(limits) + 1) + 1):
        for remaining in _splits(stages - ranks, limits[1:]):
            yield (ranks, *remaining)


def _counts(chains: Mapping[str, _Units]) -> str:
    return " and ".join(f"{name!r} has {len(units)} layers" for name, units in chains.items())
