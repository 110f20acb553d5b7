"""Schedules found by search: the greedy scheduler run again and again, each time weighing things up otherwise.

The objective is what the executor pays, the lockstep cost. A rollout is one run of the greedy scheduler, given up as
soon as it cannot beat the best. What may vary are the weights of its policy, how much the longest path behind an
operation counts, and an offset to the priorities of every class (one chunk and kind): small integers, the genes.
A quarter of the rollouts draws genes at random; the others change a quarter of the best ones.

Compared on six batches of benchmarks/pipeline.py, 100 rollouts each, mean efficiency and seconds: offsets alone 0.938
in 0.46, all genes at random 0.950 in 0.32, a pool of the best with crossing 0.951 in 0.55, steps to neighbouring values
0.951 in 0.46, Monte-Carlo tree search (one gene a level, best-score UCB) 0.952 in 0.53, this one 0.952 in 0.41. One
run of the greedy scheduler alone: 0.925.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import numpy as np

from sharding.pipeline.graph import Graph, Longs, PipelineError, Slots
from sharding.pipeline.schedules.orders import (
    Policy,
    Schedule,
    default_priority,
    gpipe,
    greedy,
    interleaved,
    lockstep,
    one_f_one_b,
    rollout,
)
from sharding.pipeline.table import slots_needed

ROLLOUTS: Final = 64
DRAWN = 0.25  # of the rollouts: genes at random
CHANGED = 0.25  # of the genes of the best: drawn anew

# Least and greatest value of the genes in front of the offsets.
GENES: Final = {
    "near": (0, 7),  # powers of two
    "turn": (-8, 8),
    "late": (0, 8),
    "power": (1, 8),
    "path": (-8, 8),
    "window": (0, 8),  # from 4 on: all microbatches
}
OFFSET = 12  # of a class, at most, in parts of STEPS of all priorities
STEPS = 32


@dataclass(frozen=True)
class Searched:
    """What a search found.

    `lockstep` is the schedule's cost, `baseline` the least of the greedy and the fixed schedules that fit the slots;
    `rollouts` how many there were: fewer than allowed where the lower bound was met. `history[i]` is the least cost
    after i rollouts.
    """

    schedule: Schedule
    lockstep: int
    baseline: int
    rollouts: int
    history: tuple[int, ...]


def search(graph: Graph, slots: Slots | None = None, *, rollouts: int = ROLLOUTS, seed: int = 0) -> Searched:
    """The schedule of least lockstep cost among greedy, fixed orders and some rollouts, within a slot budget.

    The same on every host for the same graph, slots, rollouts and seed.
    Raises `PipelineError` when no schedule is found that fits the slots.
    """
    best = min(_baselines(graph, slots), key=lockstep)
    baseline = least = lockstep(best)
    space, random, floor = _Space.of(graph), np.random.default_rng(seed), lower_bound(graph)
    genes, history = space.default(), [baseline]
    while (count := len(history) - 1) < rollouts and least > floor:
        tried = space.draw(random)
        if count >= DRAWN * rollouts:
            tried = np.where(random.random(tried.size) < CHANGED, tried, genes)
        found = rollout(graph, slots, *space.decode(tried), least)
        if found is not None and lockstep(found) <= least:  # equal too: what is no worse may lead further
            best, least, genes = found, lockstep(found), tried
        history.append(least)
    return Searched(best, least, baseline, count, tuple(history))


def _baselines(graph: Graph, slots: Slots | None) -> list[Schedule]:
    """The greedy schedule and the fixed ones, where their order can be kept and fits the slots."""
    found, failure = [], PipelineError("a graph without operations")
    try:
        found.append(greedy(graph, slots))
    except PipelineError as error:
        failure = error
    for fixed in (one_f_one_b, interleaved, gpipe):
        try:
            schedule = fixed(graph)
        except PipelineError:  # the orders of its ranks wait for each other
            continue
        if slots is None or all(count <= slots.get(place, 0) for place, count in slots_needed([schedule]).items()):
            found.append(schedule)
    if not found:
        raise failure
    return found


# ---------------------------------------------------------------------------- genes


@dataclass(frozen=True)
class _Space:
    """What genes mean for a graph. Columns [N]: default priority, longest path behind an operation as a share of N, and
    class."""

    graph: Graph
    priority: Longs
    path: Longs
    classes: Longs

    @staticmethod
    def of(graph: Graph) -> _Space:
        path = np.array(_paths(graph)[1], np.int64)
        keys = np.array([graph.chain, graph.depth, graph.kind], np.int64)
        classes = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        priority = np.array(default_priority(graph), np.int64)
        return _Space(graph, priority, path * graph.size // path.max(initial=1), classes)

    @property
    def offsets(self) -> int:
        return int(self.classes.max(initial=-1)) + 1

    def default(self) -> Longs:
        """Genes of about what `greedy` does."""
        return np.array([7, 8, 8, 4, 0, 8] + [0] * self.offsets, np.int64)

    def draw(self, random: np.random.Generator) -> Longs:
        """Random genes; half of the offsets are none."""
        low, high = np.array(list(GENES.values()), np.int64).T
        offsets = random.integers(-OFFSET, OFFSET + 1, self.offsets) * (random.random(self.offsets) < 0.5)
        return np.concatenate([random.integers(low, high + 1), offsets])

    def decode(self, genes: Longs) -> tuple[list[int], Policy]:
        """Priorities and policy. Integers throughout: floating point might differ between hosts."""
        size, groups = self.graph.size, max(self.graph.group, default=0) + 1
        near, turn, late, power, path, window = genes[: len(GENES)].tolist()
        offsets = genes[len(GENES) :] * size // STEPS
        priority = self.priority - path * self.path // 8 + offsets[self.classes]
        parts = max(1, groups * min(window + 1, 5) // 5)
        return priority.tolist(), Policy((size << near) // 8, size * late // 2, size * turn // 32, parts, power)


# ---------------------------------------------------------------------------- bounds


def lower_bound(graph: Graph) -> int:
    """No schedule's lockstep cost is less, whatever the slots.

    Of every rank, the makespan of its operations by themselves, each between what must be done before and after it
    elsewhere, if they could be interrupted: then the one with the longest path behind it is always right to do.
    """
    before, behind = _paths(graph)
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(graph.ring.stages)]
    for n, rank in enumerate(graph.stage):
        ranks[rank].append((before[n], graph.duration[n], behind[n] - graph.duration[n]))
    return max(_interruptible(jobs) for jobs in ranks)


def _interruptible(jobs: list[tuple[int, int, int]]) -> int:
    """Least makespan of (release, duration, what follows) on one rank."""
    releases = sorted(jobs)
    ready: list[tuple[int, int]] = []  # -what follows, what is left of the duration
    now = longest = 0
    for number, (release, duration, follows) in enumerate(releases):
        now = max(now, release)
        heappush(ready, (-follows, duration))
        until = releases[number + 1][0] if number + 1 < len(releases) else None
        while ready and (until is None or now < until):
            negative, left = heappop(ready)
            done = left if until is None else min(left, until - now)
            now += done
            if done < left:
                heappush(ready, (negative, left - done))
            else:
                longest = max(longest, now - negative)
    return longest


def _paths(graph: Graph) -> tuple[list[int], list[int]]:
    """[N] longest path to the start of each operation, and from its start to the end of the step."""
    before, behind, waits = [0] * graph.size, list(graph.duration), list(graph.waits)
    order = [n for n, count in enumerate(waits) if not count]
    for n in order:  # which grows
        for after in _after(graph, n):
            before[after] = max(before[after], before[n] + graph.duration[n])
            waits[after] -= 1
            if not waits[after]:
                order.append(after)
    for n in reversed(order):
        behind[n] += max((behind[after] for after in _after(graph, n)), default=0)
    return before, behind


def _after(graph: Graph, n: int) -> Iterator[int]:
    for after, _ in graph.successors[n]:
        yield after
    for _, _, after in graph.returns[n]:
        yield after
