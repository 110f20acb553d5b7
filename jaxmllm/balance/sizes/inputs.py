"""Inputs to choosing sizes other than the sampled lengths: of a phase, and of the search itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import PhaseSpec, RowClass
from jaxmllm.config.schema import PhaseConfig
from jaxmllm.phases import Phase

Capacities = tuple[int, ...]  # slots of a rank, descending
Classes = tuple[RowClass, ...]  # of a phase, by the slots of a row, most first

ODD_FACTORS = (3, 5, 7)  # of ranks that may hold a row together, where `auto` decides how many
HEAD_ROOM = 8  # sizes are 1/8 above what the samples needed


@dataclass(frozen=True)
class Alignment:
    """What rows of a phase consist of: whole attention blocks, and whole language tokens.

    Where a device has few blocks of a row, attention takes smaller ones: on average half a block of it is padding, and
    few and large ones cannot be shared out evenly where several devices hold a row. Blocks that hold no whole tokens go
    to a device in stretches that do.

    Attributes:
      block: slots of an attention block.
      small: of a smaller one; none: there is none.
      smallest: of one still smaller; none: there is none.
      stride: slots of a token of attention.
      token: slots that the tower or its projector takes as a whole.
      few: blocks of a device below which they are few; of small ones half as many. Fewer than there are devices are
        few, too: those of one long item could not be shared out.
      parts: of the slots of a rank, each on a device.
    """

    block: int
    small: int | None = None
    smallest: int | None = None
    stride: int = 1
    token: int = 1
    few: int = 8
    parts: int = 1

    @property
    def slots(self) -> int:
        """What capacities are multiples of, where blocks are not few."""
        return self._unit_of(self.block)

    def unit(self, slots: int) -> int:
        """What capacities of about so many slots may be multiples of."""
        if self.small is None:
            return self.slots
        if self.smallest is None or slots >= self._few_small:
            return self._unit_of(self.small)
        return self._unit_of(self.smallest)

    def _unit_of(self, block: int) -> int:
        return math.lcm(block, self.token) * self.parts

    def round_up(self, slots: int) -> int:
        """The least capacity of so many slots or more."""
        return round_up(slots, self._chosen_unit(slots))

    def round_down(self, slots: int) -> int:
        """The largest capacity of so many slots or fewer; 0 where there is none."""
        unit = self._chosen_unit(slots)
        return slots // unit * unit

    def _chosen_unit(self, slots: int) -> int:
        """What those that are chosen are multiples of. Each smaller unit divides the bound from which the next counts,
        so that rounding up ends no further than there."""
        return self.slots if slots >= self.few * self.slots else self.unit(slots)

    def attention_block(self, row_class: RowClass) -> int:
        """Tokens of the blocks in which attention takes rows of a class.

        Raises:
          ValueError: a row that several devices hold is no whole number of blocks on each of them, or of stretches of
            blocks that hold whole language tokens.
        """
        capacity, span = row_class
        slots = self._block(capacity, span)
        block = slots // self.stride
        unit = self._unit_of(slots)
        devices = span * self.parts
        if devices > 1 and (not capacity or capacity % unit):
            raise ValueError(
                f"a row of {span * capacity // self.stride} tokens is not a whole number of blocks of {block} on "
                f"each of {devices} devices; make phases.<phase>.capacities multiples of {unit}, or change "
                "mesh.context"
            )
        return block

    def layout_blocks(self, classes: Classes) -> tuple[int, ...] | None:
        """Slots of the blocks that items of each class are laid out by; none where blocks hold no whole tokens."""
        blocks = tuple(self._block(*row_class) for row_class in classes)
        return None if any(block % self.token for block in blocks) else blocks

    @property
    def _few_small(self) -> int:
        """Slots of a rank below which it has few small blocks."""
        return self.few // 2 * (self.small or 0) * self.parts

    def _block(self, capacity: int, span: int) -> int:
        """The largest of which a device has a whole number that is not few."""
        blocks = (self.block, self.small, self.smallest)
        *larger, smallest = (block for block in blocks if block is not None)
        enough = max(self.few, span * self.parts) * self.block * self.parts
        # Each larger block with the least capacity of which it makes enough blocks. There may be
        # none or one of them, so the lengths may differ.
        for block, least_capacity in zip(larger, (enough, self._few_small), strict=False):
            if capacity >= least_capacity and capacity % self._unit_of(block) == 0:
                return block
        return smallest


@dataclass(frozen=True)
class SizingInputs:
    """Inputs to the rows of one phase other than the sampled lengths."""

    phase: Phase
    ranks: int
    alignment: Alignment
    slots_per_token: int  # 1 for language
    longest: int  # slots of the largest item of the whole data; 0 without any
    flops: ItemCost
    config: PhaseConfig
    time: PhaseTime | None = None  # balances items instead of their FLOPs
    # Numbers of ranks that may hold a row together, ascending: each divides the next and the ranks
    spans: tuple[int, ...] = (1,)
    # What gathering the keys and values of a slot of another rank takes, in FLOPs that could be
    # done meanwhile
    gather_cost: int = 0
    # What a microbatch takes besides its slots, in FLOPs; a calibration knows better
    microbatch_cost: int = 0
    fitting: int | None = None  # slots that the memory of a rank holds; none: not known

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def row_classes(self) -> int:
        """Most row classes that may be chosen, but for one more of `auto` where that saves enough."""
        chosen = self.config.row_classes
        return CAPACITY_SEARCH.usual_classes if chosen == "auto" else chosen

    @property
    def largest_capacity(self) -> int:
        """Most slots of a rank that `max_capacity` and the alignment allow."""
        return self.alignment.round_down(self._most_slots())

    def _most_slots(self) -> int:
        max_capacity = self.config.max_capacity
        if max_capacity != "auto":
            return max_capacity
        longest_part = ceil_divide(self.longest, max(self.spans))
        enough = max(CAPACITY_SEARCH.usual_capacity, CAPACITY_SEARCH.longest_items * longest_part)
        return enough if self.fitting is None else min(enough, self.fitting)


@dataclass(frozen=True)
class CapacitySearch:
    """Constants of the search for row capacities, and of how its candidates are judged."""

    # Candidates. The first class holds one of these shares of a load, in the fewest rows that can
    # hold the load, or in one, two or three rows more. Of the median load, and of those that such
    # shares of the loads do not exceed: with few examples per rank loads are far apart, and a class
    # that holds most of them in one row lies between the median and the largest.
    load_quantiles: tuple[float, ...] = (0.0, 0.8, 0.95, 1.0)
    load_shares: tuple[float, ...] = (0.8, 0.85, 0.9, 0.95, 1.0, 1.03)
    row_numbers: int = 4
    # Another class is the median load divided by one of the former, to hold what the first class
    # leaves over, or smaller than the class before it by the median load divided by one of the
    # latter: classes of similar size.
    leftover_divisors: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    step_divisors: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128)
    # Where the first class is larger than the median load, because of the longest item, another is
    # a share of that load or the first divided by one of these: nothing else lies between the two.
    first_divisors: tuple[float, ...] = (1.5, 2, 3, 4, 6, 8, 12, 16)
    # Or it holds a whole load: one that such a share of the loads does not exceed.
    whole_quantiles: tuple[float, ...] = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
    # Or it holds the longest item of these shares of the loads.
    longest_quantiles: tuple[float, ...] = (0.5, 0.8, 0.95, 1.0)
    # A further class is added to the best sets so far: this many, the same number of each span.
    extended: int = 512
    # Of so many for all spans, each but the fewest ranks has a part: one in 4, however many more spans there are.
    most_parts: int = 4
    # A third class is what few examples per rank gain most by; each is a program to compile. Each further one of `auto`
    # has to save this share of a step, as it does for batches of a handful of examples.
    usual_classes: int = 3
    class_saves: float = 0.005
    # Another class in the place of one must save a thousandth: what is less is chance of the samples. Tried are those
    # that may come after others, and some near to each, such as those so many units of capacities from it.
    capacity_worth: float = 0.999
    unit_steps: tuple[int, ...] = (1, 2, 4, 8)
    # Where nothing bounds capacities: rows that hold 4 of the longest items can still be balanced,
    # and no fewer slots than these.
    longest_items: int = 4
    usual_capacity: int = 32_768

    # All candidates are judged by a bound, on 128 sampled and redrawn batches or those of 1 << 19
    # examples: rows that just hold a few batches overflow in the next.
    judged_batches: int = 128
    judged_examples: int = 1 << 19
    # In the bound rows get as full as this; it would favour rows that exactly hold the mean load.
    expected_fill: float = 0.99
    # What a microbatch takes besides its slots at least, as a share of the load.
    least_overhead: float = 0.002
    # What gathering a slot takes at least, in slots: rows that ranks share must save something.
    least_gather: float = 0.001

    # The 24 best by the bound, the same number of each span but at least 8, are really packed in a
    # quarter of 32 batches, and the 4 best of these in all of them. There are fewer batches where
    # the former would pack over 4 million items.
    first_packed: int = 24
    least_packed: int = 8
    then_packed: int = 4
    packed_batches: int = 32
    packed_items: int = 4_000_000


CAPACITY_SEARCH = CapacitySearch()


def phase_spec(
    inputs: SizingInputs, classes: Classes, max_segments: int | None = None
) -> PhaseSpec:
    """The phase with the given rows; without `max_segments` any number of items may share one."""
    return PhaseSpec(
        phase=inputs.phase,
        ranks=inputs.ranks,
        classes=classes,
        max_segments=classes[0].slots if max_segments is None else max_segments,
        slots_per_token=inputs.slots_per_token,
        cost=inputs.flops if inputs.time is None else inputs.time.item,
        model_flops=None if inputs.time is None else inputs.flops,
        blocks=inputs.alignment.layout_blocks(classes),
    )


def with_head_room(amount: int, multiple: int) -> int:
    """An amount that samples needed, with some head room, as a multiple of `multiple`."""
    return round_up(max(amount, 1) + ceil_divide(amount, HEAD_ROOM), multiple)
