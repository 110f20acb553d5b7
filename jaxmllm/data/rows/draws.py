"""The random values of items that a model learns to draw: pure functions of (seed, step, example
id, item), and for times also of the item's number of patches.

    (seed, step, id, item) --blake2b--> key of the noise; numbers in (0, 1) --> time, `hidden`

Where a step has several examples with the same id, the hash of the second and later ones also takes
their number among these. The noise itself is made on the device, patch by patch, from the key.
Evaluations leave the step out: an item has the same noise in each of them, conditions are never
hidden, and times are on a fixed grid.
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

EVALUATION_TIMES = 8  # grid points: the middles of 8 equal bands of the unshifted times


class Draws(NamedTuple):
    """The random values of one item."""

    noise: tuple[int, int]  # key, two words of 32 bits
    # 0: the image, 1: noise. Guided items have the shift of their times here, because their times
    # are those of the sampler's steps
    time: float
    hidden: bool  # whether the item is made without its conditions


@dataclass(frozen=True)
class DrawRule:
    """How `Draws` are made. `evaluation`: for a held-out loss; `guided`: for items that the model
    is to draw, not to learn from (media/blanks.py)."""

    seed: int
    objective: DiffusionObjectiveConfig
    evaluation: bool = False
    guided: bool = False

    def of(self, step: int, id: str, item: int, patches: int, before: int = 0) -> Draws:
        """Random values of one item.

        Args:
          id: id of its example.
          item: its number among the items of the phase in the example.
          patches: number of its patches.
          before: number of earlier examples with the same id in the step.
        """
        shift = self._shift(patches)
        key: tuple[Any, ...] = (self.seed, None if self.evaluation else step, id, item)
        if before and not self.evaluation:  # evaluations draw the same values for any batch size
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
    """The random values of all generated items of one step."""

    rule: DrawRule
    step: int
    examples: Longs  # [B] numbers, of all hosts
    id_of: Callable[[int], str]  # id of an example, by its number

    def of(self, index: int, item: int, patches: int) -> Draws:
        """As `DrawRule.of`, with the item's example given by its `index` in the batch."""
        id, before = self._counted_ids[index]
        return self.rule.of(self.step, id, item, patches, before)

    @cached_property
    def _counted_ids(self) -> list[tuple[str, int]]:
        """(id, number of earlier examples of the batch with the same id) of each example: [B]."""
        counts: Counter[str] = Counter()
        ids = []
        for example in self.examples.tolist():
            id = self.id_of(example)
            ids.append((id, counts[id]))
            counts[id] += 1
        return ids


def shifted(time: Any, shift: Any) -> Any:
    """A time in 0 .. 1, moved towards noise where `shift` is above 1; numbers or arrays."""
    return shift * time / (1 + (shift - 1) * time)
