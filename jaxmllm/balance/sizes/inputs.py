"""Inputs to choosing sizes other than the sampled lengths: of a phase, and of the search itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import PhaseSpec, row_classes
from jaxmllm.config.schema import PhaseConfig
from jaxmllm.phases import Phase

Capacities = tuple[int, ...]  # row classes of a phase, descending

HEAD_ROOM = 8  # sizes are 1/8 above what the samples needed


@dataclass(frozen=True)
class SizingInputs:
    """Inputs to the rows of one phase other than the sampled lengths."""

    phase: Phase
    ranks: int
    alignment: int  # capacities are multiples of it: whole attention blocks, whole language tokens
    slots_per_token: int  # 1 for language
    longest: int  # slots of the largest item of the whole data; 0 without any
    flops: ItemCost
    config: PhaseConfig
    time: PhaseTime | None = None  # balances items instead of their FLOPs

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def largest_capacity(self) -> int:
        """Slots of the largest row that `max_capacity` and the alignment allow."""
        return self.config.max_capacity // self.alignment * self.alignment

    def of_ordinary_items(self) -> SizingInputs:
        """The same inputs for the items that get no long row."""
        config = self.config
        if config.long_capacity is None:
            return self
        largest = self.largest_capacity if config.capacities == "auto" else max(config.capacities)
        return replace(self, longest=min(self.longest, largest))


@dataclass(frozen=True)
class CapacitySearch:
    """Constants of the search for row capacities, and of how its candidates are judged."""

    # Candidates. The first class holds one of these shares of a load, in the fewest rows that can
    # hold the load, or in one, two or three rows more.
    load_shares: tuple[float, ...] = (0.8, 0.85, 0.9, 0.95, 1.0, 1.03)
    row_numbers: int = 4
    # Another class is the median load divided by one of the former, to hold what the first class
    # leaves over, or smaller than the class before it by the median load divided by one of the
    # latter: classes of similar size.
    leftover_divisors: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    step_divisors: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128)

    # All candidates are judged by a bound, on 128 sampled and redrawn batches or those of 1 << 19
    # examples: rows that just hold a few batches overflow in the next.
    judged_batches: int = 128
    judged_examples: int = 1 << 19
    # In the bound rows get as full as this; it would favour rows that exactly hold the mean load.
    expected_fill: float = 0.99
    # Where no calibration says what a microbatch takes besides its slots: a share of the load.
    microbatch_overhead: float = 0.002

    # The 24 best by the bound are really packed in a quarter of 32 batches, and the 4 best of these
    # in all of them. There are fewer batches where the former would pack over 1.2 million items.
    first_packed: int = 24
    then_packed: int = 4
    packed_batches: int = 32
    packed_items: int = 1_200_000


CAPACITY_SEARCH = CapacitySearch()


def phase_spec(
    inputs: SizingInputs, capacities: Capacities, max_segments: int | None = None
) -> PhaseSpec:
    """The phase with the given rows; without `max_segments` any number of items may share one."""
    return PhaseSpec(
        phase=inputs.phase,
        ranks=inputs.ranks,
        classes=row_classes(capacities),
        max_segments=capacities[0] if max_segments is None else max_segments,
        slots_per_token=inputs.slots_per_token,
        cost=inputs.flops if inputs.time is None else inputs.time.item,
        model_flops=None if inputs.time is None else inputs.flops,
    )


def with_head_room(amount: int, multiple: int) -> int:
    """An amount that samples needed, with some head room, as a multiple of `multiple`."""
    return round_up(max(amount, 1) + ceil_divide(amount, HEAD_ROOM), multiple)
