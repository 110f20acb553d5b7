"""A schedule outside of the table: one microbatch at a time, through everything and back."""

from __future__ import annotations

from sharding.pipeline.graph import Graph, Kind
from sharding.pipeline.schedules.by_name import Scheduler, fixed_order
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.schedules.ticks import follow


def one_at_a_time(graph: Graph) -> Schedule:
    """Nothing overlaps: all forward operations of a language microbatch, then all its backward
    operations, then the next microbatch."""

    def key(n: int) -> tuple[int, ...]:
        """Order of an operation: forward along the chains, then backward against them."""
        backward = graph.kind[n] != Kind.FORWARD
        sign = -1 if backward else 1
        return (
            graph.group[n],
            backward,
            sign * graph.chain[n],
            sign * graph.depth[n],
            graph.microbatch[n],
            graph.kind[n],
        )

    order = sorted(range(graph.size), key=key)
    return follow(
        graph, [[n for n in order if graph.stage[n] == rank] for rank in range(graph.ring.stages)]
    )


TOY: Scheduler = fixed_order(one_at_a_time)
