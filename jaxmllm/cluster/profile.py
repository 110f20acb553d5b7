"""How large a batch must be for its phases to split the devices the same way in every step
(Entrain, arXiv 2605.27918).

    draws of n examples --sums of loads--> splits of the devices --all equal?--> n, or n doubled

Ratios of sums converge as batches grow. Near a tie of two splits they never settle, but there the
choice does not matter: *regret* says what the worst split that was drawn costs over the best one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxmllm.arrays import Floats, Longs

# So many draws show, with 95 % probability, a different split that one batch in 20 asks for
DRAWS: Final = math.ceil(math.log(0.05) / math.log(0.95))
FIRST: Final = 512  # examples
MOST: Final = 65_536
CHEAP: Final = 0.05  # regret that is not worth a larger batch


@dataclass(frozen=True)
class Profile:
    """The splits that batches of one size ask for.

    Attributes:
      samples: examples of a batch.
      splits: devices by component, every split that a batch asked for, the most frequent first.
      worst_regret: time of the worst of these splits over that of the best split, less 1, for the
        mean loads of all batches.
    """

    samples: int
    splits: tuple[tuple[int, ...], ...]
    worst_regret: float

    @property
    def settled(self) -> bool:
        """Whether all batches ask for the same split."""
        return len(self.splits) == 1

    @property
    def line(self) -> str:
        """The profile in words."""
        names = " or ".join(" : ".join(map(str, split)) for split in self.splits)
        if self.settled:
            return f"batches of {self.samples} examples agree on {names} devices"
        return (
            f"batches of {self.samples} examples ask for {names} devices; the worst of these costs "
            f"{100 * self.worst_regret:.1f} % over the best"
        )


def best_split(loads: Sequence[float] | Floats, devices: int) -> tuple[int, ...]:
    """Devices for each component such that the slowest takes least time; each has at least one.

    Raises:
      ValueError: there are fewer devices than components.
    """
    if devices < len(loads):
        raise ValueError(f"{devices} devices for {len(loads)} components: each needs one")
    # Each further device goes to the slowest component: no other choice makes the whole faster.
    # Loads are negative in the heap, so that it has the slowest one first.
    split = [1] * len(loads)
    slowest = [(-load, component) for component, load in enumerate(loads)]
    heapq.heapify(slowest)
    for _ in range(devices - len(split)):
        _, component = slowest[0]
        split[component] += 1
        heapq.heapreplace(slowest, (-loads[component] / split[component], component))
    return tuple(split)


def split_time(loads: Sequence[float] | Floats, split: Sequence[int]) -> float:
    """Time of the slowest component."""
    return max(load / devices for load, devices in zip(loads, split, strict=True))


def profile(draw: Callable[[int], Floats], devices: int, samples: int) -> Profile:
    """The profile of `DRAWS` batches of `samples` examples each.

    Args:
      draw: loads of the components in a fresh batch of so many examples, summed: [components].
    """
    loads = np.stack([draw(samples) for _ in range(DRAWS)])
    splits, counts = np.unique(
        [best_split(of_batch, devices) for of_batch in loads], axis=0, return_counts=True
    )
    order: Longs = np.argsort(-counts, kind="stable")
    mean = loads.mean(axis=0)
    times = [split_time(mean, split) for split in splits]
    best = split_time(mean, best_split(mean, devices))
    return Profile(
        samples, tuple(tuple(splits[index].tolist()) for index in order), max(times) / best - 1
    )


def smallest_batch(
    draw: Callable[[int], Floats], devices: int, most: int = MOST, first: int = FIRST
) -> list[Profile]:
    """Profiles of batches, each twice as large as the one before, until all batches of a size agree
    or a larger size would exceed `most`.

    The last one is that of the smallest batch that settles, if any does. Where none does, the
    result of `enough` will do.
    """
    profiles = [profile(draw, devices, first)]
    while not profiles[-1].settled and 2 * profiles[-1].samples <= most:
        profiles.append(profile(draw, devices, 2 * profiles[-1].samples))
    return profiles


def enough(profiles: Sequence[Profile]) -> Profile | None:
    """The first of growing batches from which on regret stays at most `CHEAP`; none where even that
    of the last one is larger."""
    smallest = None
    for batch in reversed(profiles):
        if batch.worst_regret > CHEAP:
            break
        smallest = batch
    return smallest
