"""Schedules: which rank does which operation in which tick, and what that costs.

Ticks are lockstep: in each, every rank does at most one operation, then edges move one place along the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sharding.pipeline.graph import Graph, Longs

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Slots:
    """Places for what waits on a rank, by component (encoders in model order, then language): the pools of the executor.

    inputs: activations that wait for a chunk's forward and stay for its backward; gradients: gradients of a
    chunk's output; tokens: encoder outputs on their way to, or at, the first language chunk, until its last
    backward; token_gradients: the same way back; residuals: what a forward kept for its backward, or an input
    gradient for its weight gradient. The language model has no tokens: the last two but one are for encoders.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    tokens: tuple[int, ...]
    token_gradients: tuple[int, ...]
    residuals: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """`ticks[t, s]` is the operation of rank s in tick t, -1 for none; `kept[n]` marks forwards that keep residuals."""

    graph: Graph
    ticks: Ints  # [T, S]
    kept: NDArray[np.bool_]  # [N]


def gpipe(graph: Graph) -> Schedule:
    """All forwards, then all backwards."""
    raise NotImplementedError


def one_f_one_b(graph: Graph) -> Schedule:
    """1F1B: each rank warms up with as many microbatches as ranks follow it, then alternates."""
    raise NotImplementedError


def interleaved(graph: Graph) -> Schedule:
    """Interleaved 1F1B for ranks with several chunks: groups of S microbatches go through chunk after chunk."""
    raise NotImplementedError


def greedy(graph: Graph, slots: Slots | None = None, priority: Sequence[int] | Longs | None = None) -> Schedule:
    """Dual-queue greedy within a slot budget; `priority[n]`, smaller first, orders operations of the same kind.

    Raises `PipelineError` when no schedule is found that fits the slots.
    """
    raise NotImplementedError


def lockstep(schedule: Schedule) -> int:
    """Duration of a step on the executor: the sum over ticks of the slowest rank's operation."""
    raise NotImplementedError


def asynchronous(schedule: Schedule) -> int:
    """Makespan of the same orders on ranks that wait only for what they need, with edges that take no time."""
    raise NotImplementedError


def efficiency(schedule: Schedule, makespan: int) -> float:
    """The busiest rank's work over a makespan."""
    raise NotImplementedError
