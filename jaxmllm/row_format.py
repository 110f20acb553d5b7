"""The format of an encoder's rows, on which the host, which fills them, and the model, which reads
them, agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RowFormat:
    """The slots of one encoder phase.

    Attributes:
      features: F, the numbers that a slot holds.
      dtype: their type on the host.
      slots_per_token: slots that become one language token.
      stride: slots that become one token of the tower's attention.
      alignment: slots that the tower or its projector takes as a whole; lengths of items and rows
        are multiples of it.
      axes: P position axes that rows hold, of (time, height, width) as 0, 1, 2: those of the
        tower's rotary positions; 3 and 4, if rows also hold each image's height and width.
      margin: slots before and after each attention block that the tower also reads, needed where
        several devices hold a row, so that its blocks are not neighbours.
    """

    features: int
    dtype: np.dtype[Any]
    slots_per_token: int
    stride: int
    alignment: int
    axes: tuple[int, ...]
    margin: int = 0
