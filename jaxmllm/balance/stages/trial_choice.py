"""Constants of the trials that choose the sizes of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Choice:
    """Candidates of the trials, and how much they must gain."""

    # Filled share of an average microbatch's rows, for a given number of microbatches
    fill: float = 0.9
    per_stage: int = 4  # language microbatches in flight for each stage
    # Input gradients of a component on a rank whose weight gradient waits: each needs much memory
    pending: int = 2
    # Ticks of every chain for each row: far more than any schedule has, until one is known
    ticks_per_row: int = 64

    # Candidate capacities hold a replica's mean load in this share of the most rows there can be.
    # The load is multiplied by `slacks`, because batches differ.
    row_shares: tuple[float, ...] = (1.0, 0.85, 0.7, 0.5, 0.3)
    rows_per_stage: int = 8  # most rows of language
    slacks: tuple[float, ...] = (1.04, 1.15)
    # Other capacities must gain two thousandths: smaller gains are chance of the samples, and were
    # lost on other batches.
    capacity_worth: float = 0.998
    # Further classes of rows have the slots of the largest divided by these. Each must gain a
    # hundredth of the time, or 3.5 % of the phase's slots (`class_fill`) in no more time, because
    # it is more to compile.
    divisors: tuple[float, ...] = (1.25, 1.5, 1.8, 2.2, 2.7, 3.3, 4, 5.5, 8)
    # Each further divisor is this many times the one before, down to rows of which a replica's mean
    # load fills `rows_per_stage` for each stage.
    next_divisor: float = 1.5
    class_worth: float = 0.99
    class_fill: float = 0.965
    # `row_classes: auto` adds classes to the usual number where these leave over a fifth of the
    # phase's slots empty, and each of them must gain three hundredths: more than what a class can
    # gain on the usual number of samples and lose on other batches. On more samples a hundredth
    # (`class_worth`) is enough.
    full: float = 0.8
    added_class_worth: float = 0.97
    # Among capacities of media whose times differ by no more than this factor, which is chance, the
    # fullest are taken.
    chance: float = 1.001
    # Chunks of a component on each rank; more of them must gain a hundredth, because each tick
    # takes some time of its own.
    chunks: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    encoder_chunks: tuple[int, ...] = (1, 2, 3)
    worth: float = 0.99
    rounds: int = 2  # of choosing every capacity and then the stages

    # Fewest and most samples that candidates are tried on, and most examples of all samples
    # together; replicas are left out until that many examples allow the fewest samples. Batches of
    # few examples are unlike each other: there are as many samples as `few_examples` examples fill,
    # if that is more.
    samples: tuple[int, int] = (3, 6)
    examples: int = 3072
    few_examples: int = 96


CHOICE: Final = Choice()
