"""What is random of the items that a model learns to draw: functions of (seed, step, example id, item), and of how
many patches the item has.

    (seed, step, id, item) --blake2b--> key of the noise; numbers in (0, 1) --> time, whether conditions are hidden

Where a step has several examples of one id, the second and later ones have their number among these besides.
The noise itself is made on the device, patch by patch, from the key. In evaluations there is no step: an item
has the same noise in each of them, conditions are never hidden, and times lie on a fixed grid.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxmllm.arrays import Longs
from jaxmllm.config.schema import DiffusionObjectiveConfig

EVALUATION_TIMES = 8  # of the grid, at the middle of as many bands of the unshifted times


class Draws(NamedTuple):
    """Of one item."""

    noise: tuple[int, int]  # key, two words of 32 bits
    time: float  # 0: the image, 1: noise; of guided items, whose times come with every step, what shifts these
    hidden: bool  # whether the item is made without its conditions


@dataclass(frozen=True)
class DrawRule:
    """How they are drawn; `evaluation` says whether for a held-out loss, `guided` whether items are to be drawn
    (media/blanks.py)."""

    seed: int
    objective: DiffusionObjectiveConfig
    evaluation: bool = False
    guided: bool = False

    def of(self, step: int, id: str, item: int, patches: int, before: int = 0) -> Draws:
        """Those of an item, given by its number among those of the example; `patches`: how many it has, `before`: how
        many examples of this id stand before its own in the step."""
        shift = self._shift(patches)
        key: tuple[Any, ...] = (self.seed, None if self.evaluation else step, id, item)
        if before and not self.evaluation:  # where batches of any size draw the same
            key += (before,)
        # Six words of 32 bits: two are the key, the next two become numbers in (0, 1).
        digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
        first, second, *words = np.frombuffer(digest, np.uint32).tolist()
        # Strictly between 0 and 1
        uniform, chance = ((word + 0.5) / 2**32 for word in words[:2])
        if self.guided:
            return Draws((first, second), shift, False)
        if self.evaluation:
            uniform = (words[0] % EVALUATION_TIMES + 0.5) / EVALUATION_TIMES
        hidden = not self.evaluation and chance < self.objective.condition_drop
        return Draws((first, second), shifted(self._time(uniform), shift), hidden)

    def _time(self, uniform: float) -> float:
        if self.objective.times == "uniform":
            return uniform
        return 1 / (1 + math.exp(-NormalDist().inv_cdf(uniform)))

    def _shift(self, patches: int) -> float:
        objective = self.objective
        if objective.shift_patches is None:
            return objective.shift
        return objective.shift * math.sqrt(patches / objective.shift_patches)


@dataclass(frozen=True)
class StepDraws:
    """What is random of the items of one step."""

    rule: DrawRule
    step: int
    examples: Longs  # [B] numbers, of all hosts
    id_of: Callable[[int], str]  # of an example number

    def of(self, index: int, item: int, patches: int) -> Draws:
        """As `DrawRule.of`, by the place of the example in the batch."""
        id, before = self._ids[index]
        return self.rule.of(self.step, id, item, patches, before)

    @cached_property
    def _ids(self) -> list[tuple[str, int]]:
        """Id of each example, and how many of the same id stand before it."""
        counts: Counter[str] = Counter()
        ids = []
        for example in self.examples.tolist():
            id = self.id_of(example)
            ids.append((id, counts[id]))
            counts[id] += 1
        return ids


def shifted(time: Any, shift: Any) -> Any:
    """A time, moved towards noise: numbers or arrays."""
    return shift * time / (1 + (shift - 1) * time)
