"""What one process finds, known to all of them: so that all go on, or all end, for the same reason."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

TEXT_BYTES = 1024
MOST_NUMBERS = 64


def agreed_problem(problem: str | None) -> str | None:
    """The problem of the first process that has one; none: no process has. All processes call it."""
    if jax.process_count() == 1:
        return problem
    text = np.zeros(TEXT_BYTES, np.uint8)
    encoded = (problem or "").encode()[:TEXT_BYTES]
    text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    gathered = multihost_utils.process_allgather(text)
    found = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in gathered)
    return next((each for each in found if each), None)


def agreed_numbers(numbers: Sequence[int]) -> list[int]:
    """The last `MOST_NUMBERS` of the main process's numbers, from 0 on. All processes call it."""
    if jax.process_count() == 1:
        return list(numbers)
    padded = np.full(MOST_NUMBERS, -1, np.int32)
    last = list(numbers)[-MOST_NUMBERS:]
    padded[: len(last)] = last
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded) if number >= 0]
