"""What is random of the items that a model learns to draw: functions of (seed, step, example id, item), of
nothing else.

    (seed, step, id, item) --blake2b--> key of the noise; numbers in (0, 1) --> time, whether conditions are hidden

The noise itself is made on the device, patch by patch, from the key. In evaluations there is no step: an item
has the same noise in each of them, conditions are never hidden, and times lie on a fixed grid.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from jaxmllm.config.schema import DiffusionObjectiveConfig

EVALUATION_TIMES = 8  # of the grid, at the middle of as many bands of the unshifted times


class Draws(NamedTuple):
    """Of one item."""

    noise: tuple[int, int]  # key, two words of 32 bits
    time: float  # 0: the image, 1: noise
    hidden: bool  # whether the item is made without its conditions


@dataclass(frozen=True)
class DrawRule:
    """How they are drawn; `evaluation` says whether for a held-out loss, `guided` whether items lie in their rows
    twice, with and without their conditions (media/blanks.py)."""

    seed: int
    objective: DiffusionObjectiveConfig
    evaluation: bool = False
    guided: bool = False

    def of(self, step: int, id: str, item: int) -> Draws:
        """Those of an item, given by its number among those of the example."""
        key = (self.seed, None if self.evaluation else step, id, item)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
        first, second, *words = np.frombuffer(digest, np.uint32).tolist()
        # Strictly between 0 and 1
        uniform, chance = ((word + 0.5) / 2**32 for word in words[:2])
        if self.evaluation:
            band = words[0] % EVALUATION_TIMES
            return Draws((first, second), self._time((band + 0.5) / EVALUATION_TIMES), False)
        hidden = chance < self.objective.condition_drop
        return Draws((first, second), self._time(uniform), hidden)

    def _time(self, uniform: float) -> float:
        time = uniform
        if self.objective.times == "logit_normal":
            time = 1 / (1 + math.exp(-NormalDist().inv_cdf(uniform)))
        return shifted(time, self.objective.shift)


def shifted(time: float, shift: float) -> float:
    """A time, moved towards noise."""
    return shift * time / (1 + (shift - 1) * time)
