"""Integer arrays: their types, and arithmetic and sums that many rooms need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


INT64_MAX = int(np.iinfo(np.int64).max)

Amount = TypeVar("Amount", int, Longs)


def ceil_divide(amount: Amount, divisor: int | Amount) -> Amount:
    """`amount / divisor` rounded up, exactly: of an integer or of every element of an array."""
    return -(-amount // divisor)


def round_up(amount: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `amount`."""
    return ceil_divide(amount, multiple) * multiple


def running_sums(group: Longs, amount: Longs) -> Longs:
    """Sum of `amount` over the earlier members of the same group, for each member: [N].

    Args:
      group: [N] number of the group; members of a group are neighbours.
      amount: [N]
    """
    if not len(group):
        return np.zeros(0, np.int64)
    before = np.cumsum(amount, dtype=np.int64) - amount
    inner = np.flatnonzero(group[1:] != group[:-1])
    # First member of each group, and N; np.r_ would cost more than everything else here.
    edges = np.zeros(len(inner) + 2, np.int64)
    edges[1:-1], edges[-1] = inner + 1, len(group)
    return before - np.repeat(before[edges[:-1]], edges[1:] - edges[:-1])


def sums_by(group: Sequence[int] | Ints | Longs, amount: Longs, groups: int) -> Longs:
    """Exact integer sums of `amount` by group number: [groups]."""
    result = np.zeros(groups, np.int64)
    np.add.at(result, np.asarray(group, np.int64), amount)
    return result
