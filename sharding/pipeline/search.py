"""Schedules found by search: the greedy scheduler run again and again with other priorities, the best kept.

The objective is what the executor pays (lockstep). A rollout is one run of the greedy scheduler. Deterministic for a
graph, slots, number of rollouts and seed, so all hosts agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sharding.pipeline.graph import Graph, PipelineError, Slots
from sharding.pipeline.schedule import Schedule, default_priority, greedy, lockstep

ROLLOUTS = 64


@dataclass(frozen=True)
class Searched:
    """The best schedule found, its lockstep cost, that of the greedy schedule, and how many rollouts there were."""

    schedule: Schedule
    lockstep: int
    baseline: int
    rollouts: int


def search(graph: Graph, slots: Slots | None = None, *, rollouts: int = ROLLOUTS, seed: int = 0) -> Searched:
    """The best of the greedy schedule and of `rollouts` with other priorities.

    Raises `PipelineError` when the greedy scheduler finds no schedule that fits the slots.
    """
    best = greedy(graph, slots)
    baseline = least = lockstep(best)
    random = np.random.default_rng(seed)
    priority = np.array(default_priority(graph), np.int64)
    keys = np.stack([np.array(each) for each in (graph.chain, graph.depth, graph.kind)], axis=1)
    classes = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    offsets = np.zeros(int(classes.max(initial=-1)) + 1, np.int64)
    for _ in range(rollouts):
        changed = random.random(offsets.size) < 0.3
        tried = offsets + changed * random.integers(-graph.size // 8, graph.size // 8 + 1, offsets.size)
        try:
            schedule = greedy(graph, slots, priority + tried[classes])
        except PipelineError:
            continue
        cost = lockstep(schedule)
        if cost <= least:
            best, least, offsets = schedule, cost, tried
    return Searched(best, least, baseline, rollouts)
