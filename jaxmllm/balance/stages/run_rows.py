"""The rows of one run of the executor: which items lie in which row, and who reads which rows.

examples --plan_microbatches--> microbatches --pack_rows--> encoder rows, and those of a generator
encoder rows --> inputs: the rows that every microbatch reads; arrivals: where tokens lie there
language rows --> the same for rows of a generator

Where ranks share rows, the widest groups of a phase are filled as if each were one rank with the slots
of all its ranks. Then a row whose items lie in narrower groups is given to these (row_groups.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxmllm.arrays import Ints, Longs, ceil_divide, running_sums, sums_by
from jaxmllm.balance.records import BatchItems, PhaseItems, PhaseSpec, PlanSpec, RowClass
from jaxmllm.balance.rows.pack import lay_out
from jaxmllm.balance.stages.microbatches import MicrobatchPlan, PhaseLoad, plan_microbatches
from jaxmllm.balance.stages.row_groups import encoder_groups, narrowest
from jaxmllm.phases import LANGUAGE
from sharding.pipeline.graph import Consumed

# How many microbatches later encoder rows still take items: tried, and the fewest slots kept
REACHES = (1, 2, 4)
WORK_BITS = 50  # of an example's work, at most: sums over a batch then fit 64 bits


@dataclass(frozen=True)
class PhaseRows:
    """Items of a phase in the rows of one run: numbers [n] of the items, and where each lies."""

    row_class: Longs  # [count] of the rows of every rank
    item: Longs
    row: Longs
    rank: Longs  # the first of those that hold the item's row
    offset: Ints
    segment: Ints
    # [kinds, count] sums of the items' `ItemCost.squares`, a rank's part of them where that is most
    squares: Longs

    @property
    def count(self) -> int:
        """Rows of every rank."""
        return len(self.row_class)

    def counts(self, classes: int) -> tuple[int, ...]:
        """Rows of every class."""
        return tuple(np.bincount(self.row_class, minlength=classes).tolist())


@dataclass(frozen=True)
class RunRows:
    """Examples in rows. `inputs[reader][m]` are the (phase, row) that microbatch m of a phase reads, the
    same on all replicas, phases by number; `rows_read` is, of each phase that is read, how many rows the
    microbatch reads that reads most."""

    phases: dict[str, PhaseRows]
    # By encoder or generator, of the items in `phases`: where the rows that they are read from or read
    # begin in the pool of a rank
    arrivals: dict[str, Longs]
    inputs: dict[str, Consumed]
    rows_read: dict[str, int]
    deferred: int  # examples


def pack_run(
    examples: Longs,
    items: BatchItems,
    spec: PlanSpec,
    microbatches: int,
    deferral: bool,
    rows_read: Mapping[str, int] | None = None,
    plan: MicrobatchPlan | None = None,
    capacity: int | None = None,
) -> RunRows:
    """Put some examples of a batch into rows, in about `microbatches` language microbatches per
    replica: more where their rows do not hold the examples, so 1 asks for as few as hold them.

    Args:
      examples: numbers in the batch, ascending.
      rows_read: rows of each phase that is read whose tokens lie end to end where a microbatch finds
        them; none: as many as needed.
      plan: what `examples_in_microbatches` made of the same; none: it is asked.
      capacity: most slots of a language microbatch on a replica; none: those of the largest rows.
        Whatever it is, a row is of the smallest class that holds what lies in it.
    """
    if plan is None:
        plan = examples_in_microbatches(examples, items, spec, microbatches, deferral, capacity)
    members, owner, chosen = _items_of(examples, items)
    encoders = [name for name, phase in spec.phases.items() if not phase.has_loss]
    generators = [name for name, phase in spec.phases.items() if phase.phase.generates]
    language = spec.phases[LANGUAGE]
    # Microbatches without an example on any group are left out.
    language_microbatch = np.unique(plan.language, return_inverse=True)[1].astype(np.int64)
    group_of_example = plan.replica.astype(np.int64)

    phases = {}
    for name in (*encoders, *generators):
        phase = spec.phases[name]
        microbatch_of_example = language_microbatch if name in generators else plan.encoder
        length = chosen[name].length
        group = encoder_groups(group_of_example[owner[name]], length, language.widest, phase.widest)
        if name in generators:  # no row shall have more items than segments
            length = np.maximum(length, ceil_divide(phase.longest_row, phase.max_segments))
        microbatch = microbatch_of_example[owner[name]]
        row, count = _media_rows(microbatch, plan.microbatches, group, length, phase)
        phases[name] = _phase_rows(phase, chosen[name], members[name], row, group, count)
    phases[LANGUAGE] = _phase_rows(
        language,
        chosen[LANGUAGE],
        members[LANGUAGE],
        language_microbatch[owner[LANGUAGE]],
        group_of_example[owner[LANGUAGE]],
        int(language_microbatch.max(initial=-1)) + 1,
    )
    phases = {name: phases[name] for name in spec.phases}
    sequences = {name: language_microbatch[owner[name]] for name in (*encoders, *generators)}
    return _linked(phases, sequences, spec, rows_read, int(plan.deferred.sum()))


def _phase_rows(
    phase: PhaseSpec, items: PhaseItems, numbers: Longs, row: Longs, group: Longs, count: int
) -> PhaseRows:
    """The rows of a phase, each of the least class that holds what lies in it on any group.

    Args:
      numbers: of the items.
      row: [n] of the items.
      group: [n] of the widest groups.
    """
    groups = phase.ranks // phase.widest
    slots = sums_by(row * groups + group, items.length, count * groups).reshape(count, groups)
    capacity = capacities_holding(slots.max(axis=1, initial=0), phase)
    squares = phase.cost.squares(items.length, items.extra)
    span, member = narrowest(phase, items.length, squares[0], row, group, capacity)
    rank = group * phase.widest + member
    # Every rank has every row; one of several ranks counts as its first rank's, with all its slots.
    row_on_rank = row * phase.ranks + rank
    row_slots = np.repeat(capacity * span, phase.ranks)
    blocks = phase.row_blocks(capacity, span, phase.ranks)
    offset, segment = lay_out(row_on_rank, items.length, row_slots, blocks)
    most_squares = np.array(
        [
            sums_by(row_on_rank, of_items, count * phase.ranks)
            .reshape(count, phase.ranks)
            .max(axis=1, initial=0)
            for of_items in squares
        ]
    )
    by_shape = {shape: k for k, shape in enumerate(phase.classes)}
    shapes = zip(capacity.tolist(), span.tolist(), strict=True)
    row_class = np.array([by_shape[RowClass(*shape)] for shape in shapes], np.int64)
    return PhaseRows(
        row_class, numbers, row, rank, offset, segment, ceil_divide(most_squares, span)
    )


def examples_in_microbatches(
    examples: Longs,
    items: BatchItems,
    spec: PlanSpec,
    microbatches: int,
    deferral: bool,
    capacity: int | None = None,
) -> MicrobatchPlan:
    """Widest group and microbatches of these examples; of all sizes, the slots of a language microbatch
    on a rank alone matter: `capacity`, or none for those of the largest rows."""
    _, owner, chosen = _items_of(examples, items)
    loads = _loads(items, spec, chosen, owner, len(examples))
    phase = spec.phases[LANGUAGE]
    if capacity is not None:
        loads[LANGUAGE] = replace(loads[LANGUAGE], capacity=capacity * phase.widest)
    language = loads.pop(LANGUAGE)
    groups = phase.ranks // phase.widest
    # What is deferred is what follows encoders
    defers = deferral and bool(phase.phase.reads)
    return plan_microbatches(loads, language, groups, microbatches, None if defers else 0)


def capacities_to_try(examples: Longs, items: BatchItems, spec: PlanSpec) -> list[int]:
    """Capacities of language rows that hold the longest of these examples on the widest groups,
    ascending; the largest where none does."""
    phase = spec.phases[LANGUAGE]
    *_, chosen = _items_of(examples, items)
    longest = int(chosen[LANGUAGE].length.max(initial=0))
    capacities = _distinct_capacities(phase)
    holding = capacities[capacities * phase.widest >= longest].tolist()
    return holding or capacities[-1:].tolist()


def capacities_holding(slots: Longs, phase: PhaseSpec) -> Longs:
    """Of rows with so many slots filled on a widest group [M], the least capacity that holds each."""
    capacities = _distinct_capacities(phase)
    return np.asarray(capacities[np.searchsorted(capacities * phase.widest, slots)])


def _distinct_capacities(phase: PhaseSpec) -> Longs:
    """Slots that rows take on a rank, ascending; classes of several spans may have the same."""
    return np.unique(np.array(phase.capacities, np.int64))


def _items_of(
    examples: Longs,
    items: BatchItems,
) -> tuple[dict[str, Longs], dict[str, Longs], dict[str, PhaseItems]]:
    """Of every phase, the numbers of these examples' items; which of the examples each belongs to;
    and the items."""
    position = np.full(len(items.examples), -1, np.int64)
    position[examples] = np.arange(len(examples))
    members = {
        name: np.flatnonzero(position[phase_items.example] >= 0)
        for name, phase_items in items.phases.items()
    }
    owner = {
        name: position[items.phases[name].example[numbers]] for name, numbers in members.items()
    }
    return members, owner, {name: items.phases[name].at(members[name]) for name in members}


def pack_rows(microbatch: Ints | Longs, slots: Longs, capacity: int) -> tuple[Ints, Ints]:
    """The items of each microbatch of a replica in as few rows of `capacity` slots as first-fit by
    descending length finds.

    Args:
      microbatch: [N] of each item, an image for one.
      slots: [N].

    Returns:
      (row [N] of the item inside its microbatch, offset [N] in slots inside the row).

    Raises:
      ValueError: an item that no row holds.
    """
    if len(slots) and slots.max() > capacity:
        worst = int(slots.argmax())
        raise ValueError(
            f"item {worst} has {slots[worst]} slots, but rows have {capacity}: raise the capacity",
        )
    row = np.empty(len(slots), np.int64)
    free_slots: dict[int, list[int]] = {}  # of every row so far, by microbatch
    for item in np.argsort(-slots, kind="stable").tolist():
        size = int(slots[item])
        rows = free_slots.setdefault(int(microbatch[item]), [])
        chosen = next((candidate for candidate, free in enumerate(rows) if free >= size), len(rows))
        if chosen == len(rows):
            rows.append(capacity)
        rows[chosen] -= size
        row[item] = chosen
    rows_per_microbatch = int(row.max(initial=0)) + 1
    offset, _ = lay_out(microbatch.astype(np.int64) * rows_per_microbatch + row, slots)
    return row.astype(np.int32), offset


def _loads(
    items: BatchItems,
    spec: PlanSpec,
    chosen: Mapping[str, PhaseItems],
    owner: Mapping[str, Longs],
    examples: int,
) -> dict[str, PhaseLoad]:
    """What the examples ask of every phase.

    Args:
      chosen: their items.
    """
    costliest = max(phase.cost.of(*items.phases[name].most) for name, phase in spec.phases.items())
    shift = max(0, costliest.bit_length() - WORK_BITS)
    loads = {}
    for name, phase in spec.phases.items():
        length = chosen[name].length
        work = phase.cost.shifted(shift).of(length, chosen[name].extra)
        loads[name] = PhaseLoad(
            work=sums_by(owner[name], work, examples),
            slots=sums_by(owner[name], length, examples),
            # Others have as many rows as their items need; a language microbatch is one row.
            capacity=phase.longest_row if name == LANGUAGE else None,
        )
    return loads


# ---------------------------------------------------------------------------- rows of media


def _media_rows(
    microbatch: Ints | Longs, microbatches: int, group: Longs, length: Longs, phase: PhaseSpec
) -> tuple[Longs, int]:
    """Row [N] of every item of an encoder or generator, and the number of rows: shared by consecutive
    microbatches, or one after another, begun as the largest rows or as what just holds the item;
    whichever have fewest slots."""
    groups = phase.ranks // phase.widest
    capacities = tuple((_distinct_capacities(phase)[::-1] * phase.widest).tolist())
    packed = [
        _grouped_rows(microbatches, microbatch, group, length, capacities[0], groups),
    ]
    for reach in REACHES:
        packed.append(rows_in_turn(microbatch, group, length, capacities[:1], groups, reach))
        if len(capacities) > 1:
            packed.append(rows_in_turn(microbatch, group, length, capacities, groups, reach))

    def slots(rows: tuple[Longs, int]) -> tuple[int, int]:
        row, count = rows
        filled = sums_by(row * groups + group, length, count * groups).reshape(count, groups)
        return int(capacities_holding(filled.max(axis=1, initial=0), phase).sum()), count

    return min(packed, key=slots)


def rows_in_turn(
    microbatch: Ints | Longs,
    replica: Longs,
    length: Longs,
    capacities: tuple[int, ...],
    ranks: int,
    reach: int = 1,
) -> tuple[Longs, int]:
    """Rows filled in the order in which microbatches run, so that the last ones of a microbatch
    also hold items of the next: row [N] of every item, and the number of rows. A row is begun with the
    least capacity that holds its first item; those of one capacity have consecutive numbers.

    Args:
      reach: how many microbatches later a row still takes items.
    """
    # The least that holds each item
    row_class = np.asarray((length[:, None] <= np.array(capacities)).sum(axis=1) - 1)
    row = np.zeros(len(length), np.int64)
    # By replica and class
    free: list[list[list[int]]] = [[[] for _ in capacities] for _ in range(ranks)]
    # Of each replica, the microbatches in reach, and how many rows there were before each
    recent: list[list[tuple[int, list[int]]]] = [[] for _ in range(ranks)]
    for item in np.lexsort((-length, microbatch)).tolist():
        item_replica = int(replica[item])
        item_microbatch = int(microbatch[item])
        rows = free[item_replica]
        if not recent[item_replica] or recent[item_replica][-1][0] != item_microbatch:
            recent[item_replica] = [
                begun for begun in recent[item_replica] if begun[0] >= item_microbatch - reach
            ]
            recent[item_replica].append((item_microbatch, [len(of_class) for of_class in rows]))
        # Rows from these numbers on were begun by microbatches in reach; those before are closed.
        _, rows_before = recent[item_replica][0]
        size = int(length[item])
        smallest = int(row_class[item])
        for k in range(smallest + 1):
            chosen = rows_before[k]
            while chosen < len(rows[k]) and rows[k][chosen] < size:
                chosen += 1
            if chosen < len(rows[k]):
                break
        else:
            # The last turn left `smallest` in `k`, and the number of the new row in `chosen`.
            rows[smallest].append(capacities[smallest])
        rows[k][chosen] -= size
        row[item] = chosen
        row_class[item] = k
    # On all replicas rows have the same numbers: of a class, as many as one has that has most.
    most_rows = np.array([[len(of_class) for of_class in rows] for rows in free]).max(axis=0)
    return (np.cumsum(most_rows) - most_rows)[row_class] + row, int(most_rows.sum())


def _grouped_rows(
    microbatches: int,
    microbatch: Ints | Longs,
    replica: Longs,
    length: Longs,
    capacity: int,
    ranks: int,
) -> tuple[Longs, int]:
    """The same where groups of consecutive microbatches have rows of their own."""
    sharing = _sharing_groups(microbatch, replica, length, capacity, microbatches)
    group = sharing[microbatch]
    row_in_group, _ = pack_rows(group * ranks + replica, length, capacity)
    rows_before = np.zeros(microbatches + 1, np.int64)
    # At g + 1, the rows of group g; their running sum at g is that of all groups before.
    np.maximum.at(rows_before, group + 1, row_in_group + 1)
    return np.cumsum(rows_before)[group] + row_in_group, int(rows_before.sum())


def _sharing_groups(
    microbatch: Ints | Longs,
    replica: Longs,
    length: Longs,
    capacity: int,
    count: int,
) -> Longs:
    """Number of each microbatch's group [count]: consecutive ones that share encoder rows, as many
    as need no more rows together than the one of them that needs most. A row costs the same however
    little it holds."""

    def rows_needed(begin: int, end: int) -> int:
        inside = (microbatch >= begin) & (microbatch <= end)
        return int(pack_rows(replica[inside], length[inside], capacity)[0].max(initial=-1)) + 1

    group = np.zeros(count, np.int64)
    begin = 0
    group_number = 0
    most_needed = 0  # by any one microbatch of the group
    for m in range(count):
        alone = rows_needed(m, m)
        if rows_needed(begin, m) > max(most_needed, alone):
            begin = m
            group_number += 1
            most_needed = 0
        most_needed = max(most_needed, alone)
        group[m] = group_number
    return group


def _linked(
    phases: dict[str, PhaseRows],
    sequences: Mapping[str, Longs],
    spec: PlanSpec,
    rows_read: Mapping[str, int] | None,
    deferred: int,
) -> RunRows:
    """Which microbatch reads which rows, and where it finds them in the pool of a rank: one row after
    another, each with room for the largest.

    Args:
      sequences: by encoder or generator, the language microbatch that reads each item [n], or is read.
    """
    phase_number = {name: index for index, name in enumerate(phases)}
    inputs: dict[str, list[list[tuple[int, int]]]] = {}
    position = {}  # of the row that is read among those of its reader
    needed: dict[str, int] = {}
    for name, sequence in sequences.items():
        read, reader = (LANGUAGE, name) if spec.phases[name].phase.generates else (name, LANGUAGE)
        of_item = phases[name].row
        # Rows of a generator read language rows, microbatches of language read rows of encoders.
        row, reading = (sequence, of_item) if reader == name else (of_item, sequence)
        stride = phases[read].count + 1
        # A number for every pair of microbatch and row: sorted, a microbatch's rows are neighbours.
        pairs, pair_of_item = np.unique(reading * stride + row, return_inverse=True)
        microbatch, row = np.divmod(pairs, stride)
        pair_position = running_sums(microbatch, np.ones_like(microbatch))
        of_reader = inputs.setdefault(reader, [[] for _ in range(phases[reader].count)])
        for m, read_row in zip(microbatch.tolist(), row.tolist(), strict=True):
            of_reader[m].append((phase_number[read], read_row))
        position[name] = pair_position[pair_of_item]
        needed[read] = int(pair_position.max(initial=-1)) + 1
    inputs.setdefault([*phases][-1], [[] for _ in range(phases[[*phases][-1]].count)])
    arrivals = {}
    # A reader's pool: | rows_read rows of vision | rows_read rows of audio |, each with the tokens
    # of the largest row. Where a microbatch reads fewer, places stay empty.
    base = dict.fromkeys(inputs, 0)
    for name in position:
        read, reader = (LANGUAGE, name) if spec.phases[name].phase.generates else (name, LANGUAGE)
        tokens = spec.phases[read].row_tokens
        arrivals[name] = base[reader] + position[name] * tokens
        base[reader] += (rows_read or needed)[read] * tokens
    consumed = {reader: tuple(map(tuple, of_reader)) for reader, of_reader in inputs.items()}
    return RunRows(phases, arrivals, consumed, needed, deferred)
