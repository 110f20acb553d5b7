"""Inputs to choosing sizes other than the sampled lengths: those of a phase, and constants of the
search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.costs.flops import ItemCost, PhaseTime
from jaxmllm.balance.records import PhaseSpec, RowClass
from jaxmllm.config.schema import PhaseConfig
from jaxmllm.phases import Phase

Capacities = tuple[int, ...]  # slots of a rank, descending
Classes = tuple[RowClass, ...]  # of a phase, by slots of a row, descending

ODD_FACTORS = (3, 5, 7)  # odd factors that the spans chosen by `auto` may have
HEAD_ROOM = 8  # sizes are 1/8 above what the samples needed


@dataclass(frozen=True)
class Alignment:
    """The units that rows of a phase consist of: whole attention blocks and whole language tokens.

    Where a device has few blocks of a row, attention uses smaller blocks: half a block per device
    is padding on average, and a few large blocks cannot be divided evenly among several devices
    that hold a row. Where a block does not hold whole language tokens, a device gets stretches of
    blocks that do.

    Attributes:
      block: slots of an attention block.
      small: slots of a smaller block; None: there is none.
      smallest: slots of an even smaller block; None: there is none.
      stride: slots per token of attention.
      token: slots that the tower or its projector takes as a whole.
      few: a device has few blocks if it has fewer than this; half of this for small blocks. Fewer
        blocks than there are devices are few, too: those of one long item could not be divided
        among the devices.
      parts: number of parts of the slots of a rank, each on one device.
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
        """Unit of capacities where blocks are not few."""
        return self._unit_of(self.block)

    def unit(self, slots: int) -> int:
        """The smallest unit that a capacity of about this many slots may be a multiple of."""
        if self.small is None:
            return self.slots
        if self.smallest is None or slots >= self._enough_small_blocks:
            return self._unit_of(self.small)
        return self._unit_of(self.smallest)

    def _unit_of(self, block: int) -> int:
        return math.lcm(block, self.token) * self.parts

    def round_up(self, slots: int) -> int:
        """The smallest capacity that `auto` may choose with at least this many slots."""
        return round_up(slots, self._auto_unit(slots))

    def round_down(self, slots: int) -> int:
        """The largest capacity that `auto` may choose with at most this many slots; 0 if none."""
        unit = self._auto_unit(slots)
        return slots // unit * unit

    def _auto_unit(self, slots: int) -> int:
        """Unit of capacities that `auto` chooses. Each smaller unit divides the bound above which
        the next larger unit applies, so rounding up never passes that bound."""
        return self.slots if slots >= self.few * self.slots else self.unit(slots)

    def attention_block(self, row_class: RowClass) -> int:
        """Tokens of the attention blocks of rows of a class.

        Raises:
          ValueError: a row that several devices hold is not, on each of them, a whole number of
            blocks, or of stretches of blocks that hold whole language tokens.
        """
        capacity, span = row_class
        slots = self._block_slots(capacity, span)
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
        """Slots of the block by which items of each class are laid out; None where a block does not
        hold whole language tokens."""
        blocks = tuple(self._block_slots(*row_class) for row_class in classes)
        return None if any(block % self.token for block in blocks) else blocks

    @property
    def _enough_small_blocks(self) -> int:
        """Slots of a rank below which it has few small blocks."""
        return self.few // 2 * (self.small or 0) * self.parts

    def _block_slots(self, capacity: int, span: int) -> int:
        """Slots of the largest block that divides a device's part of a row into enough blocks; else
        of the smallest block."""
        blocks = (self.block, self.small, self.smallest)
        *larger, smallest = (block for block in blocks if block is not None)
        enough = max(self.few, span * self.parts) * self.block * self.parts
        # Each larger block goes with the smallest capacity that has enough of these blocks. There
        # may be fewer than two larger blocks, so the lengths may differ.
        for block, least_capacity in zip(larger, (enough, self._enough_small_blocks), strict=False):
            if capacity >= least_capacity and capacity % self._unit_of(block) == 0:
                return block
        return smallest


@dataclass(frozen=True)
class SizingInputs:
    """Inputs to choosing the rows of one phase other than the sampled lengths."""

    phase: Phase
    ranks: int
    alignment: Alignment
    slots_per_token: int  # 1 for language
    longest: int  # slots of the largest item of the whole data; 0 without any
    flops: ItemCost
    config: PhaseConfig
    time: PhaseTime | None = None  # measured times, to balance by instead of FLOPs
    # Allowed spans, ascending; each divides the next and the number of ranks
    spans: tuple[int, ...] = (1,)
    # Price of gathering the keys and values of one slot of another rank, in FLOPs that could be
    # done meanwhile
    gather_cost: int = 0
    # What a microbatch takes in addition to its slots, in FLOPs; not used where a calibration
    # measured it
    microbatch_cost: int = 0
    fitting: int | None = None  # slots that the memory of a rank holds; None: not known

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def row_classes(self) -> int:
        """Most row classes that may be chosen; `auto` may add more, each of which saves enough."""
        chosen = self.config.row_classes
        return CAPACITY_SEARCH.usual_classes if chosen == "auto" else chosen

    @property
    def largest_capacity(self) -> int:
        """The largest capacity that `max_capacity` and the alignment allow."""
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

    # Candidates. The first class holds one of `load_shares` of a load, in the fewest rows that can
    # hold the load or in up to three more. That load is the median or one of `load_quantiles`: with
    # few examples per rank loads are far apart, and a class that holds most of them in one row is
    # between the median and the largest.
    load_quantiles: tuple[float, ...] = (0.0, 0.8, 0.95, 1.0)
    load_shares: tuple[float, ...] = (0.8, 0.85, 0.9, 0.95, 1.0, 1.03)
    row_numbers: int = 4
    # Another class is the median load divided by one of `leftover_divisors`, to hold what the first
    # class leaves over, or it is smaller than the class before it by the median load divided by one
    # of `step_divisors`: classes of similar size.
    leftover_divisors: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    step_divisors: tuple[int, ...] = (16, 24, 32, 48, 64, 96, 128)
    # Where the first class is larger than the median load, because of the longest item, another may
    # be a share of that load or the first divided by one of these, to fill the range between.
    first_divisors: tuple[float, ...] = (1.5, 2, 3, 4, 6, 8, 12, 16)
    # Or it holds a whole load that is one of these quantiles of the loads.
    whole_quantiles: tuple[float, ...] = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
    # Or it holds an item as long as one of these quantiles of the loads' longest items.
    longest_quantiles: tuple[float, ...] = (0.5, 0.8, 0.95, 1.0)
    # A further class is added to this many of the best sets of the smallest span, and to a part of
    # this number for each other span.
    extended: int = 512
    # That part is equal for all spans, but at least one in 4, however many spans there are.
    most_parts: int = 4
    # Few examples per rank gain most by a third class; each class is a program to compile. Each
    # class that `auto` adds to these has to save this share of a step, as it does for batches of a
    # handful of examples.
    usual_classes: int = 3
    class_saves: float = 0.005
    # Replacing a class must save a thousandth, because less may be chance of the samples. Tried are
    # classes that may follow others, and some near each class, such as those this many units of
    # capacity from it.
    capacity_worth: float = 0.999
    unit_steps: tuple[int, ...] = (1, 2, 4, 8)
    # The largest capacity where the config gives none and memory allows it: enough for 4 of the
    # longest items, which can still be balanced, and at least `usual_capacity` slots.
    longest_items: int = 4
    usual_capacity: int = 32_768

    # All candidates are judged by a bound, on 128 sampled and redrawn batches, or fewer if these
    # have over 1 << 19 examples: rows that just hold a few batches overflow in the next one.
    judged_batches: int = 128
    judged_examples: int = 1 << 19
    # The bound assumes that rows get this full; else it would favour rows that exactly hold the
    # mean load.
    expected_fill: float = 0.99
    # The least overhead of a microbatch, as a share of the load.
    least_overhead: float = 0.002
    # The least price of gathering a slot, in slots, so that shared rows must save something.
    least_gather: float = 0.001

    # The best candidates by the bound, 24 of the smallest span and a part of that number of each
    # other span, at least 8, are really packed in a quarter of 32 batches, and the 4 best of these
    # in all 32. There are fewer batches where packing 24 candidates in all of them would pack over
    # 4 million items.
    first_packed: int = 24
    least_packed: int = 8
    then_packed: int = 4
    packed_batches: int = 32
    packed_items: int = 4_000_000


CAPACITY_SEARCH = CapacitySearch()


def phase_spec(
    inputs: SizingInputs, classes: Classes, max_segments: int | None = None
) -> PhaseSpec:
    """The phase with the given rows; without `max_segments` any number of items may share a row."""
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
