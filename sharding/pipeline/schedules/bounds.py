"""How short a schedule can be at best, and the longest paths through a graph."""

from __future__ import annotations

from heapq import heappop, heappush

from sharding.pipeline.graph import Graph

Job = tuple[int, int, int]  # release, duration, longest path that follows


def lower_bound(graph: Graph) -> int:
    """A lower bound on the lockstep cost of schedules that keep no residuals, whatever the slots.

    It is the greatest makespan of any rank's operations by themselves, each released after the
    longest path to it and followed by the longest path from it, if they could be interrupted: then
    it is always right to do the operation that is followed by the longest path.
    """
    before, to_end = longest_paths(graph)
    rank_jobs: list[list[Job]] = [[] for _ in range(graph.ring.stages)]
    for n, rank in enumerate(graph.stage):
        rank_jobs[rank].append((before[n], graph.duration[n], to_end[n] - graph.duration[n]))
    return max(_interruptible_makespan(jobs) for jobs in rank_jobs)


def longest_paths(graph: Graph) -> tuple[list[int], list[int]]:
    """[N] longest path to the start of each operation, and from its start to the step's end."""
    before = [0] * graph.size
    to_end = list(graph.duration)
    waits = list(graph.waits)
    order = [n for n, waiting in enumerate(waits) if not waiting]
    for n in order:  # the list grows while it is walked over
        for follower in graph.followers(n):
            before[follower] = max(before[follower], before[n] + graph.duration[n])
            waits[follower] -= 1
            if not waits[follower]:
                order.append(follower)
    for n in reversed(order):
        to_end[n] += max((to_end[follower] for follower in graph.followers(n)), default=0)
    return before, to_end


def _interruptible_makespan(jobs: list[Job]) -> int:
    """Least makespan of interruptible jobs on one rank."""
    by_release = sorted(jobs)
    ready: list[tuple[int, int]] = []  # (-longest path that follows, what remains of the duration)
    now = 0
    makespan = 0
    for index, (release, duration, follows) in enumerate(by_release):
        now = max(now, release)
        heappush(ready, (-follows, duration))
        until = by_release[index + 1][0] if index + 1 < len(by_release) else None
        # Until the next job is released, work on the ready job with the longest path after it; the
        # part of it that is left then goes back into the heap.
        while ready and (until is None or now < until):
            negative_follows, remaining = heappop(ready)
            work = remaining if until is None else min(remaining, until - now)
            now += work
            if work < remaining:
                heappush(ready, (negative_follows, remaining - work))
            else:
                makespan = max(makespan, now - negative_follows)
    return makespan
