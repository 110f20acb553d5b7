"""The greedy scheduler: decides tick by tick, within a slot budget.

For every tick it chooses the duration for which the ranks are busiest on average; then each rank
does its best operation that is no longer. A `Policy` says which operation is best.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final

from sharding.pipeline.graph import Graph, Kind, Longs, Pool, RankPool, Slots
from sharding.pipeline.ring import PipelineError
from sharding.pipeline.schedules.bounds import longest_paths
from sharding.pipeline.schedules.schedule import WAITS, Schedule, lockstep
from sharding.pipeline.schedules.ticks import TickClock

# Exponents of a tick's duration that are tried, in quarters. 4 is mostly the best, 5 (shorter
# ticks) with frozen towers, 3 where ranks have chunks of unequal cost.
POWERS: Final = (4, 5, 3)

FORWARD_SIDE = 0
BACKWARD_SIDE = 1
WEIGHT_SIDE = 2
SIDES: Final = {
    Kind.FORWARD: FORWARD_SIDE,
    Kind.WEIGHT_GRADIENT: WEIGHT_SIDE,
}  # everything else: BACKWARD_SIDE

Choice = tuple[int, int, int]  # duration, side, operation


@dataclass(frozen=True)
class Policy:
    """The weights by which the greedy scheduler fills a tick, in units of the priorities.

    Of all durations a tick gets the one with the most work of all ranks / duration ** (power / 4).
    Then each rank does the operation, no longer than the tick, with the greatest sum of

        near * quarters of the tick that it fills
        + late, unless it is a weight gradient
        + turn, unless it is of the same kind as the one before (forward, backward, weight gradient)
        - priority

    `window` language microbatches are let in at a time, from the first unfinished one on.
    """

    near: int
    late: int
    turn: int
    window: int
    power: int = 4

    @staticmethod
    def default(graph: Graph) -> Policy:
        """In order of falling weight: fill the tick, no weight gradient, another kind, priority."""
        size = max(1, graph.size)
        return Policy(
            near=4 * size,
            late=2 * size,
            turn=size,
            window=max(graph.group, default=0) + 1,
        )


def default_priority(graph: Graph) -> list[int]:
    """[N] priorities, smaller first: by language microbatch, and in it the later chains, and of a
    chain the later chunks, first."""
    order = sorted(
        range(graph.size),
        key=lambda n: (graph.group[n], -graph.chain[n], -graph.depth[n], graph.microbatch[n]),
    )
    priority = [0] * graph.size
    for rank_in_order, n in enumerate(order):
        priority[n] = rank_in_order
    return priority


def path_priority(graph: Graph) -> list[int]:
    """[N] priorities, smaller first: by the longest path from an operation's start to the end.

    On 80 graphs of benchmarks/pipeline.py and benchmarks/pipeline_real.py, 4 and 8 stages, the
    better schedule of exponents 4 and 5 costs 1.294 of the lower bound with these, 1.318 with
    `default_priority`.
    """
    path = longest_paths(graph)[1]
    priority = [0] * graph.size
    for rank_in_order, n in enumerate(sorted(range(graph.size), key=lambda n: (-path[n], n))):
        priority[n] = rank_in_order
    return priority


def greedy(
    graph: Graph,
    slots: Slots | None = None,
    priority: Sequence[int] | Longs | None = None,
    powers: Sequence[int] = POWERS,
    bound: int | None = None,
) -> Schedule:
    """The shortest greedy schedule of several runs, within a slot budget.

    Of the operations that are no longer than the tick, a rank prefers those that fill it best, then
    those that are no weight gradient, then another kind than its last operation's, then the
    smallest `priority[n]` (0 .. N-1), by default by longest path. There is one run for each of
    `powers`. Where the budget leads into a dead end, fewer language microbatches are let in at a
    time. Runs are given up once they can only be longer than `bound`. Raises `PipelineError` when
    no schedule is found that fits the slots and the bound.
    """
    priorities = path_priority(graph) if priority is None else [int(value) for value in priority]
    policy = Policy.default(graph)
    lookup = _LookupTables.of(graph)
    while True:
        best: Schedule | None = None
        for power in powers:
            try:
                of_power = replace(policy, power=power)
                schedule = _GreedyRun(lookup, slots, priorities, of_power, bound).run()
            except _StuckError as error:
                stuck = error
                continue
            # The first of equal schedules is kept, so the order of powers matters.
            if best is None or lockstep(schedule) < lockstep(best):
                best = schedule
                bound = lockstep(schedule)
        if best is not None:
            return best
        if policy.window == 1 or isinstance(stuck, _TooLongError):
            raise PipelineError(str(stuck))
        policy = replace(policy, window=policy.window // 2)
        # The priority may have led into the dead end.
        priorities = default_priority(graph)


def rollout(
    graph: Graph,
    slots: Slots | None,
    priority: Sequence[int],
    policy: Policy,
    bound: int | None = None,
) -> Schedule | None:
    """The schedule of one run of the greedy scheduler, smaller `priority[n]` first, or None where
    it gets into a dead end.

    bound: the result is None, too, once the lockstep cost can only be greater than this.
    """
    try:
        return _GreedyRun(_LookupTables.of(graph), slots, priority, policy, bound).run()
    except _StuckError:
        return None


class _StuckError(Exception):
    """A dead end."""


class _TooLongError(_StuckError):
    """The schedule can only be longer than the bound."""


@dataclass(frozen=True)
class _LookupTables:
    """Tables of a graph that the greedy scheduler looks up repeatedly. A class is all operations of
    one chunk and kind."""

    graph: Graph
    class_of: tuple[int, ...]  # [N]
    rank_classes: tuple[tuple[int, ...], ...]  # by rank
    side: tuple[int, ...]  # by class
    writes: tuple[tuple[int, ...], ...]  # buffers that an operation writes
    reads: tuple[tuple[int, ...], ...]
    rank_pool: tuple[RankPool, ...]  # by buffer
    opens: tuple[
        int,
        ...,
    ]  # by buffer: which of its writers, counted from 1, makes it occupy a slot

    @staticmethod
    def of(graph: Graph) -> _LookupTables:
        """The tables of a graph, made once for it: a search needs them hundreds of times."""
        # Cached in `__dict__`, because attributes of a frozen record cannot be set
        lookup = graph.__dict__.get("_greedy_lookup")
        if lookup is None:
            lookup = graph.__dict__["_greedy_lookup"] = _LookupTables._make(graph)
        return lookup

    @staticmethod
    def _make(graph: Graph) -> _LookupTables:
        class_numbers: dict[tuple[int, ...], int] = {}
        class_of = []
        for key in zip(graph.stage, graph.chain, graph.depth, graph.kind, strict=True):
            class_of.append(class_numbers.setdefault(key, len(class_numbers)))
        rank_classes: list[list[int]] = [[] for _ in range(graph.ring.stages)]
        for (rank, *_), class_number in class_numbers.items():
            rank_classes[rank].append(class_number)
        writes: list[list[int]] = [[] for _ in range(graph.size)]
        reads: list[list[int]] = [[] for _ in range(graph.size)]
        for index, buffer in enumerate(graph.buffers):
            for n in buffer.writers:
                writes[n].append(index)
            for n in buffer.readers:
                reads[n].append(index)
        sides = [SIDES.get(Kind(kind), BACKWARD_SIDE) for _, _, _, kind in class_numbers]
        # A value with hops is summed before it is sent, so its last writer makes it arrive.
        opens = [len(buffer.writers) if buffer.hops else 1 for buffer in graph.buffers]
        return _LookupTables(
            graph=graph,
            class_of=tuple(class_of),
            rank_classes=tuple(map(tuple, rank_classes)),
            side=tuple(sides),
            writes=tuple(map(tuple, writes)),
            reads=tuple(map(tuple, reads)),
            rank_pool=tuple(buffer.rank_pool for buffer in graph.buffers),
            opens=tuple(opens),
        )


class _GreedyRun:
    """One run of the greedy scheduler; see `greedy`."""

    def __init__(
        self,
        lookup: _LookupTables,
        slots: Slots | None,
        priority: Sequence[int],
        policy: Policy,
        bound: int | None = None,
    ):
        graph = lookup.graph
        self.lookup = lookup
        self.graph = graph
        self.priority = priority
        self.policy = policy
        self.bound = bound
        self.clock = TickClock(graph)
        self.work: list[int] = graph.rank_work.tolist()  # of each rank, still to be done
        # By class: (priority, operation)
        self.heaps: list[list[tuple[int, int]]] = [[] for _ in lookup.side]
        self.free: dict[RankPool, int] = {}
        for rank_pool in lookup.rank_pool:
            pool_key = rank_pool[:2]
            self.free[rank_pool] = graph.size if slots is None else slots.get(pool_key, 0)
        self.written = [0] * len(graph.buffers)
        self.unread = [len(buffer.readers) for buffer in graph.buffers]
        # Operations of each language microbatch
        self.unfinished = [0] * (max(graph.group, default=0) + 1)
        for group in graph.group:
            self.unfinished[group] += 1
        self.base = 0  # first language microbatch that is not finished
        self.weights: dict[int, float] = {}
        # The last pool that had no free slot, for the error message
        self.blocked: RankPool | None = None

    def run(self) -> Schedule:
        arrivals: dict[int, list[int]] = defaultdict(list, {0: self.clock.start()})
        releases: dict[int, list[RankPool]] = defaultdict(list)
        rows: list[list[int]] = []
        stages = self.graph.ring.stages
        size = self.graph.size
        done = 0
        cost = 0
        last_side = [BACKWARD_SIDE] * stages  # of each rank's last operation
        while done < size:
            tick = len(rows)
            for n in arrivals.pop(tick, ()):
                heappush(self.heaps[self.lookup.class_of[n]], (self.priority[n], n))
            for rank_pool in releases.pop(tick, ()):
                self.free[rank_pool] += 1
            row = self._pick_row([self._candidates(rank) for rank in range(stages)], last_side)
            # Waiting helps while an operation is still to become possible, or a slot to become
            # free; otherwise all later ticks would be the same.
            if max(row) == WAITS and not arrivals and not releases:
                raise _StuckError(self._dead_end_text())
            length = 0
            for rank, n in enumerate(row):
                if n == WAITS:
                    continue
                if not self._has_room(n):  # another rank took the slot in this tick
                    row[rank] = WAITS
                    continue
                duration = self.graph.duration[n]
                length = max(length, duration)
                self.work[rank] -= duration
                class_number = self.lookup.class_of[n]
                # This is n: choices are heads of heaps, and a rank does one operation in a tick.
                heappop(self.heaps[class_number])
                last_side[rank] = self.lookup.side[class_number]
                done += 1
                self._occupy_slots(n)
                for when, follower in self.clock.finish(n, tick):
                    arrivals[when].append(follower)
                self._release_slots(n, tick, releases)
            rows.append(row)
            cost += length
            # The remaining ticks together take at least as long as any rank's remaining work.
            if self.bound is not None and cost + max(self.work) > self.bound:
                raise _TooLongError("the schedule is longer than the bound")
        while rows and max(rows[-1]) == WAITS:
            rows.pop()
        return Schedule.of_rows(self.graph, rows)

    # ------------------------------------------------------------------------ possible operations

    def _candidates(self, rank: int) -> list[Choice]:
        """The best operation of every class that can run now."""
        choices = []
        limit = self.base + self.policy.window
        for class_number in self.lookup.rank_classes[rank]:
            if self.heaps[class_number]:
                n = self.heaps[class_number][0][1]
                if self.graph.group[n] < limit and self._has_room(n):
                    choices.append((self.graph.duration[n], self.lookup.side[class_number], n))
        return choices

    def _has_room(self, n: int) -> bool:
        needed: dict[RankPool, int] = {}
        for buffer in self.lookup.writes[n]:
            if self.written[buffer] + 1 == self.lookup.opens[buffer]:
                rank_pool = self.lookup.rank_pool[buffer]
                needed[rank_pool] = needed.get(rank_pool, 0) + 1
                if self.free[rank_pool] < needed[rank_pool]:
                    self.blocked = rank_pool
                    return False
        return True

    def _occupy_slots(self, n: int) -> None:
        for buffer in self.lookup.writes[n]:
            self.written[buffer] += 1
            if self.written[buffer] == self.lookup.opens[buffer]:
                self.free[self.lookup.rank_pool[buffer]] -= 1

    def _release_slots(self, n: int, tick: int, releases: dict[int, list[RankPool]]) -> None:
        """Free the slots that no operation needs any more, from the next tick on."""
        for buffer in self.lookup.reads[n]:
            self.unread[buffer] -= 1
            if not self.unread[buffer]:
                releases[tick + 1].append(self.lookup.rank_pool[buffer])
        for encoder, sub, _ in self.graph.returns[n]:
            # A sum that leaves its rank has no readers: its slot is free once it is sent. It is in
            # `sent` if all shares are there, of which n has just added the last one.
            if (encoder, sub) in self.clock.sent and self.clock.hops[encoder]:
                rank_pool = (Pool.TOKEN_GRADIENT, encoder, self.graph.stage[n])
                releases[self.clock.sent[encoder, sub] + 1].append(rank_pool)
        self.unfinished[self.graph.group[n]] -= 1
        while self.base < len(self.unfinished) and not self.unfinished[self.base]:
            self.base += 1

    # ------------------------------------------------------------------------ best operations

    def _pick_row(self, choices: list[list[Choice]], last_side: list[int]) -> list[int]:
        """The operations of a tick, one for each rank, -1 for none."""
        near = self.policy.near
        late = self.policy.late
        turn = self.policy.turn
        priority = self.priority
        worths = []
        for rank_choices, previous in zip(choices, last_side, strict=True):
            rank_worths = []
            for duration, side, n in rank_choices:
                worth = late * (side != WEIGHT_SIDE) + turn * (side != previous) - priority[n]
                rank_worths.append((worth, duration, n))
            worths.append(rank_worths)
        best_share = -1.0
        best_row = [WAITS] * len(choices)
        for length in sorted(
            {duration for rank_choices in choices for duration, _, _ in rank_choices},
        ):
            work = 0
            row = []
            for rank_worths in worths:
                chosen = WAITS
                chosen_duration = 0
                best_worth = -math.inf
                for worth, duration, n in rank_worths:
                    if duration <= length and worth + near * (4 * duration // length) > best_worth:
                        chosen = n
                        chosen_duration = duration
                        best_worth = worth + near * (4 * duration // length)
                row.append(chosen)
                work += chosen_duration
            # Lengths ascend, so of equal shares the longest tick is taken.
            if work / self._tick_weight(length) >= best_share:
                best_share = work / self._tick_weight(length)
                best_row = row
        return best_row

    def _tick_weight(self, duration: int) -> float:
        """duration ** (power / 4), by operations that are exact to the last bit on any machine."""
        if duration not in self.weights:
            root = math.sqrt(math.sqrt(duration**self.policy.power))
            self.weights[duration] = float(duration) if self.policy.power == 4 else root
        return self.weights[duration]

    def _dead_end_text(self) -> str:
        if self.blocked is None:
            return "the operations wait for each other"
        pool, chain, rank = self.blocked
        name = self.graph.ring.chains[chain].name
        return (
            f"no schedule fits the slots: rank {rank} has no free {pool.name.lower()} slot for {name}, and nothing "
            "that would free one can run; raise the slots of the pipeline, pipeline.microbatches_in_flight"
        )
