"""Schedules: which rank does which operation in which tick, and what that costs.

Ticks are lockstep: in each, every rank does at most one operation, then edges move one place along the ring. GPipe,
1F1B and interleaved 1F1B give every rank a fixed order; the greedy scheduler decides tick by tick.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from sharding.pipeline.graph import Graph, Kind, Longs, PipelineError, Pool, Slots

Ints = NDArray[np.int32]
Orders = Sequence[Sequence[int]]  # operations of each rank, one after another


@dataclass(frozen=True)
class Schedule:
    """`ticks[t, s]` is the operation of rank s in tick t, -1 for none; `kept` are the forwards that keep residuals."""

    graph: Graph
    ticks: Ints  # [T, S]
    kept: frozenset[int] = frozenset()

    @property
    def orders(self) -> list[list[int]]:
        """Operations of each rank, one after another."""
        return [[int(n) for n in rank if n >= 0] for rank in self.ticks.T]


# ---------------------------------------------------------------------------- costs


def durations(schedule: Schedule) -> list[int]:
    """[N] durations, less what a backward need not recompute because its forward kept the residuals."""
    graph, found = schedule.graph, list(schedule.graph.duration)
    for n in schedule.kept:
        if (back := graph.backward_of(n)) is not None:
            recompute = graph.workload.chains[graph.chain[n]].recompute
            found[back] -= int(recompute[graph.depth[n], graph.microbatch[n]])
    return found


def lockstep(schedule: Schedule) -> int:
    """Duration of a step on the executor: the sum over ticks of the slowest rank's operation."""
    cost = np.array([*durations(schedule), 0])
    return int(cost[schedule.ticks].max(axis=1).sum())


def asynchronous(schedule: Schedule) -> int:
    """Makespan of the same orders on ranks that wait only for what they need, over edges that take no time."""
    graph, cost = schedule.graph, durations(schedule)
    ready, free = [0] * graph.size, [0] * graph.ring.stages
    for n in schedule.ticks.ravel().tolist():
        if n >= 0:
            rank = graph.stage[n]
            free[rank] = max(free[rank], ready[n]) + cost[n]
            for after in [op for op, _ in graph.successors[n]] + [op for _, _, op in graph.returns[n]]:
                ready[after] = max(ready[after], free[rank])
    return max(free)


def efficiency(schedule: Schedule, makespan: int) -> float:
    """The busiest rank's work over a makespan."""
    cost, graph = durations(schedule), schedule.graph
    work = [0] * graph.ring.stages
    for rank, duration in zip(graph.stage, cost, strict=True):
        work[rank] += duration
    return max(work) / makespan if makespan else 1.0


# ---------------------------------------------------------------------------- time


class Clock:
    """When operations become possible: tell it what was done in which tick, ticks ascending.

    `sent[encoder, sub-microbatch]` is the tick in which the summed token gradient leaves the first language rank.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.sent: dict[tuple[int, int], int] = {}
        self._waits = list(graph.waits)
        self._earliest = [0] * graph.size
        self._shares: dict[tuple[int, int], int] = defaultdict(int)
        for shares in graph.returns:
            for encoder, sub, _ in shares:
                self._shares[encoder, sub] += 1
        self._free = [0] * len(graph.ring.encoders)
        self.hops = [graph.ring.delivery_hops(encoder) for encoder in range(len(graph.ring.encoders))]

    def start(self) -> list[int]:
        """Operations that wait for nothing."""
        return [n for n, waits in enumerate(self._waits) if not waits]

    def finish(self, n: int, tick: int) -> list[tuple[int, int]]:
        """(tick, operation) of all that wait for nothing any more, once n was done in a tick."""
        found = []
        earliest, waits = self._earliest, self._waits
        for after, ticks in self.graph.successors[n]:
            if tick + ticks > earliest[after]:
                earliest[after] = tick + ticks
            waits[after] -= 1
            if not waits[after]:
                found.append((earliest[after], after))
        for encoder, sub, after in self.graph.returns[n]:
            self._shares[encoder, sub] -= 1
            if not self._shares[encoder, sub]:
                send = tick
                if self.hops[encoder]:  # one wire
                    send = max(tick, self._free[encoder])
                    self._free[encoder] = send + 1
                self.sent[encoder, sub] = send
                earliest[after] = max(earliest[after], send + max(1, self.hops[encoder]))
            waits[after] -= 1
            if not waits[after]:
                found.append((earliest[after], after))
        return found


def follow(graph: Graph, orders: Orders) -> Schedule:
    """Every rank does its operations in the order given, each in the first tick in which it is possible.

    Raises `PipelineError` when the orders wait for each other, or leave an operation out or do it on a wrong rank.
    """
    if sorted(n for order in orders for n in order) != list(range(graph.size)) or any(
        graph.stage[n] != rank for rank, order in enumerate(orders) for n in order
    ):
        raise PipelineError("orders must hold every operation once, on the rank of its chunk")
    clock, ready = Clock(graph), [-1] * graph.size
    for n in clock.start():
        ready[n] = 0
    place, done, latest = [0] * len(orders), 0, 0
    ticks: list[list[int]] = []
    while done < graph.size:
        tick = len(ticks)
        row = [-1] * len(orders)
        for rank, order in enumerate(orders):
            if place[rank] < len(order) and 0 <= ready[order[place[rank]]] <= tick:
                row[rank] = order[place[rank]]
                place[rank] += 1
                done += 1
        for n in row:
            if n >= 0:
                for when, after in clock.finish(n, tick):
                    ready[after] = when
                    latest = max(latest, when)
        if max(row) < 0 and tick > latest:
            stuck = next(order[at] for order, at in zip(orders, place, strict=True) if at < len(order))
            raise PipelineError(f"the orders of the ranks wait for each other: {graph.name(stuck)} can never start")
        ticks.append(row)
    return Schedule(graph, _rows(ticks, graph))


def _rows(ticks: list[list[int]], graph: Graph) -> Ints:
    return np.array(ticks, np.int32).reshape(len(ticks), graph.ring.stages)


# ---------------------------------------------------------------------------- fixed orders


def gpipe(graph: Graph) -> Schedule:
    """All forwards, then all backwards, chunk by chunk."""
    return follow(graph, [_flat(forward + backward) for forward, backward in _units(graph, graph.size)])


def one_f_one_b(graph: Graph) -> Schedule:
    """1F1B: each rank warms up with as many microbatches as ranks follow it, then alternates.

    A unit is all that a rank does for a language microbatch and the sub-microbatches that go with it. Raises
    `PipelineError` where a component goes round the ring: that needs `interleaved`.
    """
    last = graph.ring.stages - 1
    return follow(graph, [_alternate(*units, last - rank) for rank, units in enumerate(_units(graph, 1))])


def interleaved(graph: Graph) -> Schedule:
    """Interleaved 1F1B for ranks with several chunks: groups of S microbatches go through chunk after chunk.

    Ranks with fewer chunks than others would need a forward that those do after a backward that waits for it: then all
    warm up longer, by a group at a time.
    """
    stages, units = graph.ring.stages, _units(graph, graph.ring.stages)
    most, longer = max(len(forward) for forward, _ in units), 0
    while True:
        orders = []
        for rank, (forward, backward) in enumerate(units):
            chunks = sum(chain.stages.count(rank) for chain in graph.ring.chains)
            orders.append(_alternate(forward, backward, (chunks - 1) * stages + 2 * (stages - 1 - rank) + longer))
        try:
            return follow(graph, orders)
        except PipelineError:
            longer += stages
            if longer > most + stages:
                raise


Units = list[list[int]]


def _units(graph: Graph, together: int) -> list[tuple[Units, Units]]:
    """By rank: forward and backward units, each the operations of one chunk for one language microbatch.

    `together` microbatches go through a chunk before the next chunk has its turn; one alone is a unit as a whole. A
    weight gradient follows its input gradient at once, as in an unsplit backward.
    """
    groups, found = max(graph.group, default=-1) + 1, []
    if 1 < together <= graph.ring.stages:  # an incomplete group would come too early on the ranks behind
        groups = -(-groups // together) * together
    for rank in range(graph.ring.stages):
        chunks = [(c, d) for c, chain in enumerate(graph.ring.chains) for d, s in enumerate(chain.stages) if s == rank]
        place = {chunk: number for number, chunk in enumerate(chunks)}
        sides: list[dict[tuple[int, int, int], list[int]]] = [{}, {}]
        for sign, side in zip((1, -1), sides, strict=True):
            for group in range(groups):
                for number in place.values():
                    side[group // together, sign * number, group] = []
        for n in range(graph.size):
            if graph.stage[n] == rank:
                side, sign = (sides[0], 1) if graph.kind[n] == Kind.FORWARD else (sides[1], -1)
                side[graph.group[n] // together, sign * place[graph.chain[n], graph.depth[n]], graph.group[n]].append(n)
        forward, backward = (
            [sorted(side[key], key=lambda n: (graph.microbatch[n], graph.kind[n])) for key in sorted(side)]
            for side in sides
        )
        if together == 1:
            width = len(chunks)
            forward, backward = (
                [_flat(side[at : at + width]) for at in range(0, len(side), max(1, width))]
                for side in (forward, backward)
            )
        found.append((forward, backward))
    return found


def _flat(units: Units) -> list[int]:
    return list(itertools.chain.from_iterable(units))


def _alternate(forward: Units, backward: Units, warmup: int) -> list[int]:
    """Some forward units, then one forward and one backward in turn, then what is left."""
    order = _flat(forward[:warmup])
    rest = forward[warmup:]
    for number in range(max(len(rest), len(backward))):
        order += _flat(rest[number : number + 1] + backward[number : number + 1])
    return order


# ---------------------------------------------------------------------------- greedy


def default_priority(graph: Graph) -> list[int]:
    """Smaller first: by language microbatch, and in it what is nearer to its end."""
    order = sorted(
        range(graph.size), key=lambda n: (graph.group[n], -graph.chain[n], -graph.depth[n], graph.microbatch[n])
    )
    priority = [0] * graph.size
    for number, n in enumerate(order):
        priority[n] = number
    return priority


POWERS = (4, 5)  # the first is mostly the better with split backwards, the second with frozen towers


@dataclass(frozen=True)
class Policy:
    """What the greedy scheduler weighs up when it fills a tick; weights are in units of the priorities.

    Of all durations a tick takes the one with most work of all ranks / duration ** (power / 4). Then each rank does
    the operation, no longer than the tick, with most of
    `near` * quarters of the tick it fills + `late` unless a weight gradient + `turn` unless of the same kind as the
    one before (forward, backward, weight gradient) - priority. `window` language microbatches are let in at a time.
    """

    near: int
    late: int
    turn: int
    window: int
    power: int = 4

    @staticmethod
    def default(graph: Graph) -> Policy:
        """One thing after the other: fill the tick, no weight gradient, another kind, priority."""
        size = max(1, graph.size)
        return Policy(4 * size, 2 * size, size, max(graph.group, default=0) + 1)


def greedy(graph: Graph, slots: Slots | None = None, priority: Sequence[int] | Longs | None = None) -> Schedule:
    """Dual queues of forward and backward operations on every rank, within a slot budget.

    Every tick takes the duration for which the ranks are busiest on average, and each rank does its best operation
    that is no longer: the operation nearest to it, backward and forward in turn, then by `priority[n]` (0 .. N-1),
    smaller first. The same with a taste for short ticks, and the shorter of both schedules. Where the budget leads
    into a dead end, fewer language microbatches are let in at a time.
    Raises `PipelineError` when no schedule is found that fits the slots.
    """
    chosen = default_priority(graph) if priority is None else [int(value) for value in priority]
    policy, plan = Policy.default(graph), _Plan.of(graph)
    while True:
        found = []
        for power in POWERS:
            try:
                found.append(_Greedy(plan, slots, chosen, replace(policy, power=power)).run())
            except _StuckError as error:
                stuck = error
        if found:
            return min(found, key=lockstep)
        if policy.window == 1:
            raise PipelineError(str(stuck))
        policy, chosen = replace(policy, window=policy.window // 2), default_priority(graph)


def rollout(
    graph: Graph, slots: Slots | None, priority: Sequence[int], policy: Policy, bound: int | None = None
) -> Schedule | None:
    """One run of the greedy scheduler, smaller `priority[n]` first; none where it comes to a dead end.

    bound: it is given up, too, once its lockstep cost can only be greater.
    """
    try:
        return _Greedy(_Plan.of(graph), slots, priority, policy, bound).run()
    except _StuckError:
        return None


class _StuckError(Exception):
    """A dead end."""


@dataclass(frozen=True)
class _Plan:
    """What the greedy scheduler looks up again and again. A class is the operations of one chunk and kind."""

    graph: Graph
    classes: tuple[int, ...]  # [N]
    at: tuple[tuple[int, ...], ...]  # classes of each rank
    side: tuple[int, ...]  # by class: 0 forward, 1 backward, 2 weight gradient
    writes: tuple[tuple[int, ...], ...]  # buffers an operation writes
    reads: tuple[tuple[int, ...], ...]
    pool: tuple[tuple[Pool, int, int], ...]  # by buffer: pool, component, rank
    opens: tuple[int, ...]  # by buffer: which of its writers makes it occupy a slot

    @staticmethod
    def of(graph: Graph) -> _Plan:
        found = graph.__dict__.get("_greedy_plan")
        if found is None:
            found = graph.__dict__["_greedy_plan"] = _Plan._make(graph)
        return found

    @staticmethod
    def _make(graph: Graph) -> _Plan:
        numbers: dict[tuple[int, ...], int] = {}
        classes = []
        for key in zip(graph.stage, graph.chain, graph.depth, graph.kind, strict=True):
            classes.append(numbers.setdefault(key, len(numbers)))
        at: list[list[int]] = [[] for _ in range(graph.ring.stages)]
        for (rank, *_), number in numbers.items():
            at[rank].append(number)
        side = [{Kind.FORWARD: 0, Kind.WEIGHT_GRADIENT: 2}.get(Kind(key[3]), 1) for key in numbers]
        writes: list[list[int]] = [[] for _ in range(graph.size)]
        reads: list[list[int]] = [[] for _ in range(graph.size)]
        for number, buffer in enumerate(graph.buffers):
            for n in buffer.writers:
                writes[n].append(number)
            for n in buffer.readers:
                reads[n].append(number)
        return _Plan(
            graph,
            tuple(classes),
            tuple(map(tuple, at)),
            tuple(side),
            tuple(map(tuple, writes)),
            tuple(map(tuple, reads)),
            tuple((buffer.pool, buffer.chain, buffer.rank) for buffer in graph.buffers),
            tuple(len(buffer.writers) if buffer.hops else 1 for buffer in graph.buffers),
        )


class _Greedy:
    """One run of the greedy scheduler; see `greedy`."""

    def __init__(
        self, plan: _Plan, slots: Slots | None, priority: Sequence[int], policy: Policy, bound: int | None = None
    ):
        graph = plan.graph
        self.plan, self.graph, self.priority, self.policy = plan, graph, priority, policy
        self.bound, self.work = bound, graph.rank_work.tolist()
        self.clock = Clock(graph)
        self.heaps: list[list[tuple[int, int]]] = [[] for _ in plan.side]
        self.free: dict[tuple[Pool, int, int], int] = {
            place: graph.size if slots is None else slots.get(place[:2], 0) for place in plan.pool
        }
        self.written = [0] * len(graph.buffers)
        self.unread = [len(buffer.readers) for buffer in graph.buffers]
        self.left = [0] * (max(graph.group, default=0) + 1)
        for group in graph.group:
            self.left[group] += 1
        self.base = 0
        self.weights: dict[int, float] = {}
        self.blocked: tuple[Pool, int, int] | None = None

    def run(self) -> Schedule:
        arrivals: dict[int, list[int]] = defaultdict(list, {0: self.clock.start()})
        releases: dict[int, list[tuple[Pool, int, int]]] = defaultdict(list)
        ticks: list[list[int]] = []
        stages, done, size, cost = self.graph.ring.stages, 0, self.graph.size, 0
        turn = [1] * stages
        while done < size:
            tick = len(ticks)
            for n in arrivals.pop(tick, ()):
                heappush(self.heaps[self.plan.classes[n]], (self.priority[n], n))
            for place in releases.pop(tick, ()):
                self.free[place] += 1
            row = self._pick([self._choices(rank) for rank in range(stages)], turn)
            if max(row) < 0 and not arrivals and not releases:
                raise _StuckError(self._dead_end())
            length = 0
            for rank, n in enumerate(row):
                if n < 0:
                    continue
                if not self._room(n):  # a slot that another rank took in this tick
                    row[rank] = -1
                    continue
                duration = self.graph.duration[n]
                length = max(length, duration)
                self.work[rank] -= duration
                number = self.plan.classes[n]
                heappop(self.heaps[number])
                turn[rank] = self.plan.side[number]
                done += 1
                self._occupy(n)
                for when, after in self.clock.finish(n, tick):
                    arrivals[when].append(after)
                self._settle(n, tick, releases)
            ticks.append(row)
            cost += length
            if self.bound is not None and cost + max(self.work) > self.bound:
                raise _StuckError("the schedule is longer than the bound")
        while ticks and max(ticks[-1]) < 0:
            ticks.pop()
        return Schedule(self.graph, _rows(ticks, self.graph))

    def _choices(self, rank: int) -> list[tuple[int, int, int]]:
        """(duration, side, operation) of the best operation of every class that can run now."""
        found = []
        limit = self.base + self.policy.window
        for number in self.plan.at[rank]:
            if self.heaps[number]:
                n = self.heaps[number][0][1]
                if self.graph.group[n] < limit and self._room(n):
                    found.append((self.graph.duration[n], self.plan.side[number], n))
        return found

    def _room(self, n: int) -> bool:
        needed: dict[tuple[Pool, int, int], int] = {}
        for buffer in self.plan.writes[n]:
            if self.written[buffer] + 1 == self.plan.opens[buffer]:
                place = self.plan.pool[buffer]
                needed[place] = needed.get(place, 0) + 1
                if self.free[place] < needed[place]:
                    self.blocked = place
                    return False
        return True

    def _occupy(self, n: int) -> None:
        for buffer in self.plan.writes[n]:
            self.written[buffer] += 1
            if self.written[buffer] == self.plan.opens[buffer]:
                self.free[self.plan.pool[buffer]] -= 1

    def _settle(self, n: int, tick: int, releases: dict[int, list[tuple[Pool, int, int]]]) -> None:
        """Free what nobody needs any more, from the next tick on."""
        for buffer in self.plan.reads[n]:
            self.unread[buffer] -= 1
            if not self.unread[buffer]:
                releases[tick + 1].append(self.plan.pool[buffer])
        for encoder, sub, _ in self.graph.returns[n]:
            if (encoder, sub) in self.clock.sent and self.clock.hops[encoder]:
                place = (Pool.TOKEN_GRADIENT, encoder, self.graph.stage[n])
                releases[self.clock.sent[encoder, sub] + 1].append(place)
        self.left[self.graph.group[n]] -= 1
        while self.base < len(self.left) and not self.left[self.base]:
            self.base += 1

    def _pick(self, choices: list[list[tuple[int, int, int]]], turn: list[int]) -> list[int]:
        """One operation for each rank, -1 for none."""
        near, late, other = self.policy.near, self.policy.late, self.policy.turn
        worths = [
            [(late * (side != 2) + other * (side != last) - self.priority[n], duration, n) for duration, side, n in of]
            for of, last in zip(choices, turn, strict=True)
        ]
        most, row = -1.0, [-1] * len(choices)
        for length in sorted({duration for of in choices for duration, _, _ in of}):
            work, filled = 0, []
            for of in worths:
                chosen, lasting, best = -1, 0, -math.inf
                for worth, duration, n in of:
                    if duration <= length and worth + near * (4 * duration // length) > best:
                        chosen, lasting, best = n, duration, worth + near * (4 * duration // length)
                filled.append(chosen)
                work += lasting
            if work / self._weight(length) >= most:
                most, row = work / self._weight(length), filled
        return row

    def _weight(self, duration: int) -> float:
        """duration ** (power / 4), by operations that are exact to the last bit on any machine."""
        if duration not in self.weights:
            root = math.sqrt(math.sqrt(duration**self.policy.power))
            self.weights[duration] = float(duration) if self.policy.power == 4 else root
        return self.weights[duration]

    def _dead_end(self) -> str:
        if self.blocked is None:
            return "the operations wait for each other"
        pool, chain, rank = self.blocked
        name = self.graph.ring.chains[chain].name
        return (
            f"no schedule fits the slots: rank {rank} has no free {pool.name.lower()} slot for {name}, and nothing "
            f"that would free one can run; raise the slots of the pipeline"
        )
