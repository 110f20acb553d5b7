"""The rows of one run of the executor: which row holds which items, and who reads which rows.

examples --plan_microbatches--> microbatches --pack_rows--> encoder rows, and those of a generator
encoder rows --> inputs: the rows that every microbatch reads; arrivals: where their tokens are
language rows --> the same for rows of a generator

Where ranks share rows, the widest groups of a phase are filled as if each were one rank with the
slots of all its ranks. Then a row whose items fit the rows of narrower groups is split among these
(row_groups.py).
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

# For how many microbatches after its first one a row still takes items: all these are tried, and
# the rows with fewest slots are kept
REACHES = (1, 2, 4)
WORK_BITS = 50  # of an item's work, at most: sums over a batch then fit 64 bits


@dataclass(frozen=True)
class PhaseRows:
    """The items of a phase in the rows of one run: [n] numbers of the items, and their places."""

    row_class: Longs  # [count] class of each row, the same on every rank
    item: Longs
    row: Longs
    rank: Longs  # the first of those that hold the item's row
    offset: Ints
    segment: Ints
    # [kinds, count] sum of the `ItemCost.squares` of a row's items, the largest over all groups,
    # divided by the row's span
    squares: Longs

    @property
    def count(self) -> int:
        """Number of rows, the same on every rank."""
        return len(self.row_class)

    def counts(self, classes: int) -> tuple[int, ...]:
        """Number of rows of each class."""
        return tuple(np.bincount(self.row_class, minlength=classes).tolist())


@dataclass(frozen=True)
class RunRows:
    """The rows of some examples. `inputs[reader][m]` lists the (phase number, row) pairs that
    microbatch m of phase `reader` reads, the same on all replicas; `rows_read` has, for each phase
    that is read, the most rows of it that one microbatch reads."""

    phases: dict[str, PhaseRows]
    # By encoder or generator, for the items in `phases`: slot of a rank's pool where the row begins
    # that holds the item (of an encoder) or that the item reads (of a generator)
    arrivals: dict[str, Longs]
    inputs: dict[str, Consumed]
    rows_read: dict[str, int]
    deferred: int  # number of deferred examples


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
    replica: more if their rows do not hold the examples, so 1 gives as few as hold them.

    Args:
      examples: numbers in the batch, ascending.
      rows_read: rows of each phase that is read for which a reader's pool has room, end to end;
        None: as many as needed.
      plan: result of `examples_in_microbatches` for the same examples; None: it is called.
      capacity: most slots of a language microbatch on a rank; None: those of the largest rows.
        Whatever it is, every row has the smallest class that holds its items.
    """
    if plan is None:
        plan = examples_in_microbatches(examples, items, spec, microbatches, deferral, capacity)
    members, owner, chosen = _items_of_examples(examples, items)
    encoders = [name for name, phase in spec.phases.items() if not phase.has_loss]
    generators = [name for name, phase in spec.phases.items() if phase.phase.generates]
    language = spec.phases[LANGUAGE]
    # Microbatches without an example in any group are left out.
    language_microbatch = np.unique(plan.language, return_inverse=True)[1].astype(np.int64)
    group_of_example = plan.replica.astype(np.int64)

    phases = {}
    for name in (*encoders, *generators):
        phase = spec.phases[name]
        microbatch_of_example = language_microbatch if name in generators else plan.encoder
        length = chosen[name].length
        group = encoder_groups(group_of_example[owner[name]], length, language.widest, phase.widest)
        if name in generators:  # so that no row has more items than segments
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
    return _linked_rows(phases, sequences, spec, rows_read, int(plan.deferred.sum()))


def _phase_rows(
    phase: PhaseSpec, items: PhaseItems, numbers: Longs, row: Longs, group: Longs, count: int
) -> PhaseRows:
    """The rows of a phase, each of the smallest class that holds its items in every group.

    Args:
      numbers: [n] of the items.
      row: [n] row of each item.
      group: [n] widest group of each item.
      count: of the rows.
    """
    groups = phase.ranks // phase.widest
    slots = sums_by(row * groups + group, items.length, count * groups).reshape(count, groups)
    capacity = capacities_holding(slots.max(axis=1, initial=0), phase)
    squares = phase.cost.squares(items.length, items.extra)
    span, member = narrowest(phase, items.length, squares[0], row, group, capacity)
    rank = group * phase.widest + member
    # Every rank has every row; a shared row is counted as its first rank's, with all its slots.
    row_on_rank = row * phase.ranks + rank
    row_slots = np.repeat(capacity * span, phase.ranks)
    blocks = phase.row_blocks(capacity, span, phase.ranks)
    offset, segment = lay_out(row_on_rank, items.length, row_slots, blocks)
    most_squares = np.array(
        [
            sums_by(row_on_rank, item_squares, count * phase.ranks)
            .reshape(count, phase.ranks)
            .max(axis=1, initial=0)
            for item_squares in squares
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
    """Assign widest groups and microbatches to these examples. The only size that matters here is
    that of a language microbatch, `capacity` slots on a rank; None: those of the largest rows."""
    _, owner, chosen = _items_of_examples(examples, items)
    loads = _phase_loads(items, spec, chosen, owner, len(examples))
    phase = spec.phases[LANGUAGE]
    if capacity is not None:
        loads[LANGUAGE] = replace(loads[LANGUAGE], capacity=capacity * phase.widest)
    language = loads.pop(LANGUAGE)
    groups = phase.ranks // phase.widest
    # Only a phase that reads encoders can be deferred
    defers = deferral and bool(phase.phase.reads)
    return plan_microbatches(loads, language, groups, microbatches, None if defers else 0)


def capacities_to_try(examples: Longs, items: BatchItems, spec: PlanSpec) -> list[int]:
    """Capacities of language rows that hold the longest of these examples on the widest groups,
    ascending; the largest capacity if none does."""
    phase = spec.phases[LANGUAGE]
    *_, chosen = _items_of_examples(examples, items)
    longest = int(chosen[LANGUAGE].length.max(initial=0))
    capacities = _distinct_capacities(phase)
    holding = capacities[capacities * phase.widest >= longest].tolist()
    return holding or capacities[-1:].tolist()


def capacities_holding(slots: Longs, phase: PhaseSpec) -> Longs:
    """Least capacity of each of M rows with `slots` [M] filled on a widest group: [M]."""
    capacities = _distinct_capacities(phase)
    return np.asarray(capacities[np.searchsorted(capacities * phase.widest, slots)])


def _distinct_capacities(phase: PhaseSpec) -> Longs:
    """The capacities of a phase, ascending, each once: classes of several spans may share one."""
    return np.unique(np.array(phase.capacities, np.int64))


def _items_of_examples(
    examples: Longs,
    items: BatchItems,
) -> tuple[dict[str, Longs], dict[str, Longs], dict[str, PhaseItems]]:
    """For every phase: the numbers of these examples' items, the index in `examples` that each item
    belongs to, and the items."""
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
    """Put the items of each microbatch of a replica into rows of `capacity` slots, by first-fit in
    descending order of length.

    Args:
      microbatch: [N] of each item, such as an image.
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


def _phase_loads(
    items: BatchItems,
    spec: PlanSpec,
    chosen: Mapping[str, PhaseItems],
    owner: Mapping[str, Longs],
    examples: int,
) -> dict[str, PhaseLoad]:
    """The load that the examples put on every phase.

    Args:
      chosen: their items.
      owner: [n] index of each item's example.
      examples: number of the examples.
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
            # A language microbatch is one row; other phases have as many rows as items need.
            capacity=phase.longest_row if name == LANGUAGE else None,
        )
    return loads


# ---------------------------------------------------------------------------- rows of media


def _media_rows(
    microbatch: Ints | Longs, microbatches: int, group: Longs, length: Longs, phase: PhaseSpec
) -> tuple[Longs, int]:
    """Row [N] of every item of an encoder or generator, and the number of rows. Of several packings
    the one with fewest slots: rows shared by groups of consecutive microbatches, or rows filled in
    turn, begun with the largest capacity or with the least that holds the item."""
    groups = phase.ranks // phase.widest
    capacities = tuple((_distinct_capacities(phase)[::-1] * phase.widest).tolist())
    packed = [
        _grouped_rows(microbatches, microbatch, group, length, capacities[0], groups),
    ]
    for reach in REACHES:
        packed.append(rows_in_turn(microbatch, group, length, capacities[:1], groups, reach))
        # With one capacity both ways are the same.
        if len(capacities) > 1:
            packed.append(rows_in_turn(microbatch, group, length, capacities, groups, reach))

    def slots(rows: tuple[Longs, int]) -> tuple[int, int]:
        row, count = rows
        # [count, groups]. Rows of one number have one capacity, which the fullest group decides.
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
    """Fill rows in the order in which microbatches run, so that the last rows of a microbatch also
    hold items of the next: row [N] of every item, and the number of rows. A row is begun with the
    least capacity that holds its first item; rows of one capacity have consecutive numbers.

    Args:
      capacities: slots of a whole row, descending.
      reach: for how many microbatches after its first one a row still takes items.
    """
    # Index of the least capacity that holds each item
    row_class = np.asarray((length[:, None] <= np.array(capacities)).sum(axis=1) - 1)
    row = np.zeros(len(length), np.int64)
    # Free slots of every row so far, by replica and class
    free: list[list[list[int]]] = [[[] for _ in capacities] for _ in range(ranks)]
    # By replica, the microbatches in reach, each with the number of rows per class before it
    recent: list[list[tuple[int, list[int]]]] = [[] for _ in range(ranks)]
    for item in np.lexsort((-length, microbatch)).tolist():
        item_replica = int(replica[item])
        item_microbatch = int(microbatch[item])
        rows = free[item_replica]
        if not recent[item_replica] or recent[item_replica][-1][0] != item_microbatch:
            recent[item_replica] = [
                begun for begun in recent[item_replica] if begun[0] >= item_microbatch - reach
            ]
            recent[item_replica].append((item_microbatch, [len(class_rows) for class_rows in rows]))
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
            # The loop left `smallest` in `k`, and the number of the new row in `chosen`.
            rows[smallest].append(capacities[smallest])
        rows[k][chosen] -= size
        row[item] = chosen
        row_class[item] = k
    # Rows have the same numbers on all replicas: each class has as many as the replica with most.
    most_rows = np.array([[len(class_rows) for class_rows in rows] for rows in free]).max(axis=0)
    return (np.cumsum(most_rows) - most_rows)[row_class] + row, int(most_rows.sum())


def _grouped_rows(
    microbatches: int,
    microbatch: Ints | Longs,
    replica: Longs,
    length: Longs,
    capacity: int,
    ranks: int,
) -> tuple[Longs, int]:
    """As `rows_in_turn`, but groups of consecutive microbatches have rows of their own, of one
    capacity."""
    sharing = _sharing_groups(microbatch, replica, length, capacity, microbatches)
    group = sharing[microbatch]
    row_in_group, _ = pack_rows(group * ranks + replica, length, capacity)
    rows_before = np.zeros(microbatches + 1, np.int64)
    # Entry g + 1 has the rows of group g, so the running sum at g has those of all groups before.
    np.maximum.at(rows_before, group + 1, row_in_group + 1)
    return np.cumsum(rows_before)[group] + row_in_group, int(rows_before.sum())


def _sharing_groups(
    microbatch: Ints | Longs,
    replica: Longs,
    length: Longs,
    capacity: int,
    count: int,
) -> Longs:
    """Number of each microbatch's group [count]. A group shares rows: it has as many consecutive
    microbatches as together need no more rows than the one of them that needs most, because a row
    costs the same however little it holds."""

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


def _linked_rows(
    phases: dict[str, PhaseRows],
    sequences: Mapping[str, Longs],
    spec: PlanSpec,
    rows_read: Mapping[str, int] | None,
    deferred: int,
) -> RunRows:
    """Link every microbatch to the rows that it reads, and give these rows their places in a rank's
    pool: one after another, each with room for the largest.

    Args:
      sequences: by encoder or generator, [n] language microbatch that reads each item, or that the
        item reads.
    """
    phase_number = {name: index for index, name in enumerate(phases)}
    inputs: dict[str, list[list[tuple[int, int]]]] = {}
    position = {}  # by phase, for each item: number of the row among those its microbatch reads
    needed: dict[str, int] = {}
    for name, sequence in sequences.items():
        read, reader = (LANGUAGE, name) if spec.phases[name].phase.generates else (name, LANGUAGE)
        item_row = phases[name].row
        # Rows of a generator read language rows; microbatches of language read rows of encoders.
        row, reading = (sequence, item_row) if reader == name else (item_row, sequence)
        stride = phases[read].count + 1
        # A number for every pair of microbatch and row: sorted, a microbatch's rows are neighbours.
        pairs, pair_of_item = np.unique(reading * stride + row, return_inverse=True)
        microbatch, row = np.divmod(pairs, stride)
        pair_position = running_sums(microbatch, np.ones_like(microbatch))
        reader_rows = inputs.setdefault(reader, [[] for _ in range(phases[reader].count)])
        for m, read_row in zip(microbatch.tolist(), row.tolist(), strict=True):
            reader_rows[m].append((phase_number[read], read_row))
        position[name] = pair_position[pair_of_item]
        needed[read] = int(pair_position.max(initial=-1)) + 1
    # The last phase is the reader of the ring, and needs an entry even if it reads nothing.
    inputs.setdefault([*phases][-1], [[] for _ in range(phases[[*phases][-1]].count)])
    arrivals = {}
    # A reader's pool: | rows_read rows of vision | rows_read rows of audio |, each with the tokens
    # of the largest row. Where a microbatch reads fewer rows, slots stay empty.
    base = dict.fromkeys(inputs, 0)
    for name in position:
        read, reader = (LANGUAGE, name) if spec.phases[name].phase.generates else (name, LANGUAGE)
        tokens = spec.phases[read].row_tokens
        arrivals[name] = base[reader] + position[name] * tokens
        base[reader] += (rows_read or needed)[read] * tokens
    consumed = {reader: tuple(map(tuple, reader_rows)) for reader, reader_rows in inputs.items()}
    return RunRows(phases, arrivals, consumed, needed, deferred)
