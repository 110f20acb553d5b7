"""What an encoder's rows look like: all that the host, which fills them, and the model, which reads
them, agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RowFormat:
    """The slots of one encoder phase.

    Attributes:
      features: F, the numbers that a slot holds. dtype: their type on the host. slots_per_token:
      slots that become one language token. stride: slots that become one token of the tower's
      attention. alignment: slots that the tower or its projector takes as a whole; items and rows
      are multiples of it. axes: P position axes that rows keep, of (time, height, width): those
      that the tower's rotary positions have; and 3 and 4 where it has the height and width of each
      patch's image, too. margin: slots before and after each block of attention
      that the tower also reads, where blocks lie apart because several devices hold the row.
    """

    features: int
    dtype: np.dtype[Any]
    slots_per_token: int
    stride: int
    alignment: int
    axes: tuple[int, ...]
    margin: int = 0
