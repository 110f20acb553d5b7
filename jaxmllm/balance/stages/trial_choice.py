"""What is tried for the sizes of a pipeline, and what they aim at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Choice:
    """What is tried, and what sizes aim at."""

    # Of the slots of an average microbatch's rows, where their number is given
    fill: float = 0.9
    per_stage: int = 4  # language microbatches in flight for each stage
    # Backwards of a component on a rank whose weight gradient waits: each needs much memory
    pending: int = 2
    # Of every chain: far more than any schedule has, while none is known yet
    ticks_per_row: int = 64

    # Capacities that hold a replica's mean load in so many rows, as a share of the most rows there
    # can be, and so much more of it, because batches differ
    row_shares: tuple[float, ...] = (1.0, 0.85, 0.7, 0.5, 0.3)
    rows_per_stage: int = 8  # of language, at most
    slacks: tuple[float, ...] = (1.04, 1.15)
    # Other capacities must gain two thousandths: what is less is chance of the samples, and was lost
    # on other batches.
    capacity_worth: float = 0.998
    # Further classes of rows have the slots of the largest divided by these; each must gain a
    # hundredth of the time, or some of the phase's slots in no more time, for it is more to compile.
    divisors: tuple[float, ...] = (1.25, 1.5, 1.8, 2.2, 2.7, 3.3, 4, 5.5, 8)
    class_worth: float = 0.99
    class_fill: float = 0.965
    # Of capacities of media whose time differs by no more than this, which is chance, the fullest are taken.
    chance: float = 1.001
    # Chunks of a component on each rank; more of them must gain a hundredth, for each tick takes
    # time besides its operations.
    chunks: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    encoder_chunks: tuple[int, ...] = (1, 2, 3)
    worth: float = 0.99
    rounds: int = 2

    # Samples that candidates are tried on, at least and at most, and their examples together; a
    # sample has so many of its replicas that the fewest samples have no more.
    samples: tuple[int, int] = (3, 6)
    examples: int = 3072


CHOICE: Final = Choice()
