"""Interleaved timing, used by several benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)

QUICK = 1.0  # seconds; functions that take less are called twice per round


def median_seconds(functions: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, float]:
    """Median wall seconds of each function, results awaited.

    Every round times each function once, so that a slow moment of the machine affects all of them;
    a first round, not counted, compiles. Functions that take less than `QUICK` are called twice and
    timed the second time: the first call pays for what a large function before it left behind.
    """

    def call(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - start

    seconds: dict[Key, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name, function in functions.items():
            duration = call(function)
            seconds[name].append(call(function) if duration < QUICK else duration)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}
