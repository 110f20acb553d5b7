"""Schedules found by search: the greedy scheduler run many times with other weights.

The objective is the lockstep cost, the time that the executor takes. A rollout is one run of the
greedy scheduler, given up as soon as it cannot be as short as the best, unless slots keep
residuals: then all run to their end, and the cost is that with residuals kept. What is tuned
("genes", small integers) are the weights of the policy, how much the order by microbatch adds to
the priority by longest path, and an offset to the priorities of every class (one chunk and kind). A
quarter of the rollouts draws all genes; the others draw about a quarter of the best genes again.

Mean efficiency and seconds of variants on six batches of benchmarks/pipeline.py, 100 rollouts each:
offsets alone 0.938 in 0.46, all genes at random 0.950 in 0.32, a pool of the best with crossing
0.951 in 0.55, steps to neighbouring values 0.951 in 0.46, Monte-Carlo tree search (one gene per
level, best-score UCB) 0.952 in 0.53, this one 0.952 in 0.41. A single run of the greedy scheduler
has 0.925.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sharding.pipeline.graph import Graph, Longs, Slots
from sharding.pipeline.schedules.bounds import lower_bound
from sharding.pipeline.schedules.greedy import (
    Policy,
    default_priority,
    path_priority,
    rollout,
)
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.schedules.shortest import Order, cost_within, keeps_residuals, shortest

ROLLOUTS: Final = 64


@dataclass(frozen=True)
class Genes:
    """How genes are drawn. Ranges are least and greatest values of the genes before the offsets."""

    drawn: float = 0.25  # share of the rollouts, the first ones, that draw all genes at random
    changed: float = 0.25  # share of the best genes that every other rollout draws again on average
    near: tuple[int, int] = (0, 7)  # exponents of two
    turn: tuple[int, int] = (-8, 8)
    late: tuple[int, int] = (0, 8)
    power: tuple[int, int] = (1, 8)  # quarters of the exponent of a tick's duration
    order: tuple[int, int] = (-4, 12)  # quarters of the order by microbatch, added to the priority
    window: tuple[int, int] = (0, 8)  # from 4 on: all microbatches
    offset: int = 12  # the greatest offset of a class, in either direction, ...
    offset_parts: int = 32  # ... in units of N / offset_parts priorities

    @property
    def ranges(self) -> Longs:
        """[genes, 2], in the order in which `_Space.decode` reads them."""
        return np.array(
            [self.near, self.turn, self.late, self.power, self.order, self.window],
            np.int64,
        )


GENES: Final = Genes()


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    `lockstep` is the schedule's cost, with residuals kept in the slots that there are for them;
    `baseline` is the least cost of the greedy and the fixed schedules that fit the slots;
    `rollouts` is the number of rollouts, fewer than allowed where the lower bound was reached.
    `history[i]` is the least cost after i rollouts.
    """

    schedule: Schedule
    lockstep: int
    baseline: int
    rollouts: int
    history: tuple[int, ...]


def search(
    graph: Graph,
    fixed_orders: Iterable[Order],
    slots: Slots | None = None,
    *,
    rollouts: int = ROLLOUTS,
    seed: int = 0,
) -> Searched:
    """The schedule of least lockstep cost among greedy, fixed orders and some rollouts, within a
    slot budget.

    The result is the same on every host for the same graph, slots, rollouts and seed. Raises
    `PipelineError` when no schedule is found that fits the slots.
    """
    best = shortest(graph, fixed_orders, slots)
    baseline = least_cost = cost_within(best, slots)
    # The gain from kept residuals is known only for a whole schedule, and no bound considers it.
    keeps = keeps_residuals(slots)
    floor = 0 if keeps else lower_bound(graph)
    space = _Space.of(graph)
    best_genes = space.default()
    random = np.random.default_rng(seed)
    history = [baseline]
    while len(history) <= rollouts and least_cost > floor:
        genes = space.draw(random)
        if len(history) - 1 >= GENES.drawn * rollouts:
            genes = np.where(random.random(genes.size) < GENES.changed, genes, best_genes)
        schedule = rollout(graph, slots, *space.decode(genes), None if keeps else least_cost)
        # An equal cost is taken too: genes that are no worse may lead to better ones.
        if schedule is not None and (cost := cost_within(schedule, slots)) <= least_cost:
            best = schedule
            least_cost = cost
            best_genes = genes
        history.append(least_cost)
    return Searched(best, least_cost, baseline, len(history) - 1, tuple(history))


# ---------------------------------------------------------------------------- genes


@dataclass(frozen=True)
class _Space:
    """The meaning of genes for a graph. Columns [N]: priority by the longest path, by microbatch
    (`order`), and class."""

    graph: Graph
    priority: Longs
    order: Longs
    classes: Longs

    @staticmethod
    def of(graph: Graph) -> _Space:
        keys = np.array([graph.chain, graph.depth, graph.kind], np.int64)
        return _Space(
            graph=graph,
            priority=np.array(path_priority(graph), np.int64),
            order=np.array(default_priority(graph), np.int64),
            classes=np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1),
        )

    @property
    def offsets(self) -> int:
        """The number of classes, each of which has an offset."""
        return int(self.classes.max(initial=-1)) + 1

    def default(self) -> Longs:
        """Genes whose schedule is about that of `greedy`."""
        return np.array([7, 8, 8, 4, 0, 8] + [0] * self.offsets, np.int64)

    def draw(self, random: np.random.Generator) -> Longs:
        """Random genes; about half of the offsets are zero."""
        low, high = GENES.ranges.T
        drawn = random.integers(-GENES.offset, GENES.offset + 1, self.offsets)
        offsets = drawn * (random.random(self.offsets) < 0.5)
        return np.concatenate([random.integers(low, high + 1), offsets])

    def decode(self, genes: Longs) -> tuple[list[int], Policy]:
        """Priorities and policy. Integers throughout: floating point might differ between hosts."""
        size = self.graph.size
        groups = max(self.graph.group, default=0) + 1
        weights = len(GENES.ranges)
        near, turn, late, power, order, window = genes[:weights].tolist()
        offsets = genes[weights:] * size // GENES.offset_parts
        priority = self.priority + order * self.order // 4 + offsets[self.classes]
        # With N operations, whose `self.priority` is 0 .. N-1, weights of the policy are: near from
        # N/8 to 16 N, late from 0 to 4 N, turn from -N/4 to N/4. The window is in fifths of all
        # microbatches.
        policy = Policy(
            near=(size << near) // 8,
            late=size * late // 2,
            turn=size * turn // 32,
            window=max(1, groups * min(window + 1, 5) // 5),
            power=power,
        )
        return priority.tolist(), policy
