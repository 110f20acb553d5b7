"""Time in ticks: when operations become possible, and the schedule that given orders lead to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from sharding.pipeline.graph import Graph
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.schedule import WAITS, Schedule

Orders = Sequence[Sequence[int]]  # operations of each rank in the order in which it does them


class TickClock:
    """Finds when operations become possible. Tell it which operation was done in which tick, by
    `finish`, in the order of ticks.

    `sent[encoder, encoder row]` is the tick in which the summed token gradient leaves the first
    language rank.
    """

    def __init__(self, graph: Graph):
        encoders = range(len(graph.ring.encoders))
        self.graph = graph
        self.sent: dict[tuple[int, int], int] = {}
        self.hops = [graph.ring.delivery_hops(encoder) for encoder in encoders]
        self._waits = list(graph.waits)
        self._earliest = [0] * graph.size
        self._missing_shares: dict[tuple[int, int], int] = defaultdict(
            int,
        )  # token gradients that a sum still lacks
        for shares in graph.returns:
            for encoder, sub, _ in shares:
                self._missing_shares[encoder, sub] += 1
        self._wire_free_tick = [0] * len(
            encoders,
        )  # tick from which the wire of an encoder's token gradients is free

    def start(self) -> list[int]:
        """Operations that wait for nothing."""
        return [n for n, waits in enumerate(self._waits) if not waits]

    def finish(self, n: int, tick: int) -> list[tuple[int, int]]:
        """Note that n was done in a tick, and return (first possible tick, operation) for each
        operation that no longer waits for any other."""
        released = []
        earliest = self._earliest
        waits = self._waits
        for follower, ticks in self.graph.successors[n]:
            if tick + ticks > earliest[follower]:
                earliest[follower] = tick + ticks
            waits[follower] -= 1
            if not waits[follower]:
                released.append((earliest[follower], follower))
        for encoder, sub, follower in self.graph.returns[n]:
            self._missing_shares[encoder, sub] -= 1
            if not self._missing_shares[encoder, sub]:
                send = tick
                if self.hops[encoder]:
                    # All sums of an encoder share a wire, which takes one of them a tick. They go
                    # the same way at the same speed, so they cannot meet on a later hop.
                    send = max(tick, self._wire_free_tick[encoder])
                    self._wire_free_tick[encoder] = send + 1
                self.sent[encoder, sub] = send
                earliest[follower] = max(earliest[follower], send + max(1, self.hops[encoder]))
            waits[follower] -= 1
            if not waits[follower]:
                released.append((earliest[follower], follower))
        return released


def follow(graph: Graph, orders: Orders, last: Collection[int] = ()) -> Schedule:
    """The schedule in which every rank does its operations in the given order, each in the first
    tick in which it is possible. Operations in `last` wait until all others are done.

    Raises `PipelineError` when the orders wait for each other, or leave an operation out or do it
    on a wrong rank.
    """
    _check_orders(graph, orders)
    clock = TickClock(graph)
    ready = [-1] * graph.size  # tick from which an operation is possible; -1: not known yet
    for n in clock.start():
        ready[n] = 0
    position = [0] * len(orders)
    done = 0
    before_last = graph.size - len(last)  # operations that come before the last ones
    latest = 0
    rows: list[list[int]] = []
    while done < graph.size:
        tick = len(rows)
        row = [WAITS] * len(orders)
        waiting = last if done < before_last else ()
        for rank, order in enumerate(orders):
            if position[rank] == len(order) or order[position[rank]] in waiting:
                continue
            if 0 <= ready[order[position[rank]]] <= tick:
                row[rank] = order[position[rank]]
                position[rank] += 1
        done += sum(n != WAITS for n in row)
        for n in row:
            if n == WAITS:
                continue
            for when, follower in clock.finish(n, tick):
                ready[follower] = when
                latest = max(latest, when)
        # No operation was done, and nothing that was sent can still make one possible.
        if max(row) == WAITS and tick > latest:
            stuck = next(
                order[at] for order, at in zip(orders, position, strict=True) if at < len(order)
            )
            raise PipelineError(
                f"the orders of the ranks wait for each other: {graph.name(stuck)} can never start",
            )
        rows.append(row)
    return Schedule.of_rows(graph, rows)


def _check_orders(graph: Graph, orders: Orders) -> None:
    complete = sorted(n for order in orders for n in order) == list(range(graph.size))
    if not complete or any(
        graph.stage[n] != rank for rank, order in enumerate(orders) for n in order
    ):
        raise PipelineError("orders must hold every operation once, on the rank of its chunk")
