"""Fixed orders: GPipe, 1F1B and interleaved 1F1B. They consider neither cost nor slots.

A unit is all operations of a rank for one chunk and one language microbatch, with the encoder rows
that belong to it; an order arranges the forward and backward units of each rank.
"""

from __future__ import annotations

import itertools

from sharding.pipeline.graph import Graph, Kind
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import Schedule, lockstep
from sharding.pipeline.schedules.ticks import follow

Units = list[list[int]]


def gpipe(graph: Graph) -> Schedule:
    """All forwards, then all backwards, chunk by chunk.

    The last chunk could go backward as soon as it has its input. But no rank needs that before it
    has gone forward itself, and until then it only makes the others' ticks longer; so all backwards
    wait for the last forward, unless that takes more time.
    """
    units = _pass_units(graph, graph.size)
    orders = [_flatten(forward + backward) for forward, backward in units]
    backwards = frozenset(n for _, backward in units for n in _flatten(backward))
    return min(follow(graph, orders), follow(graph, orders, backwards), key=lockstep)


def one_f_one_b(graph: Graph) -> Schedule:
    """1F1B: each rank warms up with as many microbatches as ranks follow it, then alternates.

    A unit holds all chunks of a rank for a language microbatch. Raises `PipelineError` where a
    component goes round the ring: that needs `interleaved`.
    """
    last_rank = graph.ring.stages - 1
    orders = [
        _alternate(forward, backward, warmup=last_rank - rank)
        for rank, (forward, backward) in enumerate(_pass_units(graph, 1))
    ]
    return follow(graph, orders)


def interleaved(graph: Graph) -> Schedule:
    """Interleaved 1F1B for ranks with several chunks: groups of S microbatches go through chunk
    after chunk.

    With unequal numbers of chunks the orders can wait for each other: a rank needs a forward that
    another rank does only after a backward, which waits for the first rank. Then all ranks warm up
    longer, by one group at a time until the orders are possible.
    """
    stages = graph.ring.stages
    units = _pass_units(graph, stages)
    longest = max(len(forward) for forward, _ in units)
    chunks = [
        sum(chain.stages.count(rank) for chain in graph.ring.chains) for rank in range(stages)
    ]
    longer = 0
    while True:
        orders = []
        for rank, (forward, backward) in enumerate(units):
            # A microbatch enters the last chunk here after S units of each chunk before; then it
            # takes S - 1 - rank ticks to the last rank, and its gradient as many back.
            warmup = (chunks[rank] - 1) * stages + 2 * (stages - 1 - rank) + longer
            orders.append(_alternate(forward, backward, warmup))
        try:
            return follow(graph, orders)
        except PipelineError:
            longer += stages
            if longer > longest + stages:
                raise


def _pass_units(graph: Graph, together: int) -> list[tuple[Units, Units]]:
    """Forward and backward units of every rank, in the order of a pass.

    `together` microbatches go through a chunk before any goes through the next; with 1, a unit
    holds all chunks of a microbatch. A weight gradient follows its input gradient at once, as in an
    unsplit backward.
    """
    groups = graph.groups
    if 1 < together <= graph.ring.stages:
        # An incomplete group would reach the later ranks too early: fill it up with empty units.
        groups = -(-groups // together) * together
    return [_rank_units(graph, rank, together, groups) for rank in range(graph.ring.stages)]


def _rank_units(graph: Graph, rank: int, together: int, groups: int) -> tuple[Units, Units]:
    chunks = [
        (c, d)
        for c, chain in enumerate(graph.ring.chains)
        for d, stage in enumerate(chain.stages)
        if stage == rank
    ]
    position = {chunk: index for index, chunk in enumerate(chunks)}
    # By group of microbatches, chunk (backwards: from the last one) and microbatch.
    forward: dict[tuple[int, int, int], list[int]] = {}
    backward: dict[tuple[int, int, int], list[int]] = {}
    for group in range(groups):
        for index in position.values():
            forward[group // together, index, group] = []
            backward[group // together, -index, group] = []
    for n in range(graph.size):
        if graph.stage[n] != rank:
            continue
        group = graph.group[n]
        index = position[graph.chain[n], graph.depth[n]]
        if graph.kind[n] == Kind.FORWARD:
            forward[group // together, index, group].append(n)
        else:
            backward[group // together, -index, group].append(n)
    width = len(chunks) if together == 1 else 1
    return _sorted_units(graph, forward, width), _sorted_units(graph, backward, width)


def _sorted_units(
    graph: Graph, operations: dict[tuple[int, int, int], list[int]], width: int
) -> Units:
    """Units in the order of their keys, `width` at a time joined into one."""

    def in_unit(n: int) -> tuple[int, int]:
        return graph.microbatch[n], graph.kind[n]

    units = [sorted(operations[key], key=in_unit) for key in sorted(operations)]
    if width == 1:
        return units
    return [_flatten(units[start : start + width]) for start in range(0, len(units), max(1, width))]


def _flatten(units: Units) -> list[int]:
    return list(itertools.chain.from_iterable(units))


def _alternate(forward: Units, backward: Units, warmup: int) -> list[int]:
    """`warmup` forward units, then one forward and one backward in turn, then those that remain."""
    order = _flatten(forward[:warmup])
    remaining = forward[warmup:]
    for index in range(max(len(remaining), len(backward))):
        order += _flatten(remaining[index : index + 1] + backward[index : index + 1])
    return order
