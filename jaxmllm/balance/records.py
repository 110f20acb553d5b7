"""The records of a step plan: integers only, identical on every host.

    BatchItems (lengths of B examples) --plan_step(.., PlanSpec)--> StepPlan --fill--> rows

Letters: B examples, N items of a phase, R ranks, M microbatches, C row capacity in slots, S
segments of a row, W pool slots, Q pair slots, H hops, U buffer slots, X exchange ranks (see
`ExchangeGrid`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmllm.arrays import Bools, Ints, Longs
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.phases import Phase

Mode = Literal["none", "tokens", "language", "phases"]


@dataclass(frozen=True)
class PhaseItems:
    """The items of one phase in a global batch: images, clips, or (language) one token sequence per
    example.

    All arrays have length N, ordered by example, then by position in the example. `length` counts
    row slots and is a multiple of the phase's alignment; `real` counts those that hold data rather
    than padding inside the item. Items become `tokens` tokens of the phase that reads theirs, from
    `slot` of their example's sequence there on; both are zero where none does. Items of a generator
    read those tokens; they are their first slots.
    """

    length: Longs
    real: Longs
    example: Ints
    tokens: Ints
    slot: Ints
    # [N, 2] what attention sees of them besides what follows from their lengths (`VisiblePairs`);
    # none: nothing is known of it
    extra_squares: Longs | None = None

    @property
    def extra(self) -> tuple[Any, ...]:
        """`extra_squares` by kind of layer, as `ItemCost` takes them."""
        return (0, 0) if self.extra_squares is None else tuple(self.extra_squares.T)

    @cached_property
    def most(self) -> tuple[int, list[int]]:
        """The largest length and `extra`, at least 0: an item of these costs as much as any."""
        return int(self.length.max(initial=0)), [
            int(np.max(kind, initial=0)) for kind in self.extra
        ]

    def at(self, numbers: Longs) -> PhaseItems:
        """Some of the items, or the same ones in another order."""
        columns: dict[str, Any] = {}
        for column in fields(self):
            values = getattr(self, column.name)
            columns[column.name] = None if values is None else values[numbers]
        return PhaseItems(**columns)


@dataclass(frozen=True)
class BatchItems:
    """Lengths of one global batch of B examples; `phases` has every phase of the model."""

    examples: Longs  # [B] index of each example in its length index
    targets: int  # target tokens of the whole batch
    phases: dict[str, PhaseItems]


class RowClass(NamedTuple):
    """The shape of a microbatch's rows: `span` neighbouring ranks hold a row together, each of them
    `capacity` of its slots."""

    capacity: int
    span: int = 1

    @property
    def slots(self) -> int:
        """Of a whole row."""
        return self.capacity * self.span


def row_classes(capacities: Iterable[int], span: int = 1) -> tuple[RowClass, ...]:
    """Classes of rows that equally many ranks hold together."""
    return tuple(RowClass(capacity, span) for capacity in capacities)


@dataclass(frozen=True)
class PhaseSpec:
    """What the planner must know of a phase."""

    phase: Phase
    ranks: int
    classes: tuple[RowClass, ...]  # by the slots of a row, most first
    max_segments: int
    slots_per_token: int  # encoder slots per language token; 1 for language
    cost: ItemCost  # balances items: FLOPs, or femtoseconds where measured (tools/calibrate.py)
    model_flops: ItemCost | None = None  # where the cost is measured; none: the cost is the FLOPs
    # Of each class, slots of a block of attention, at whose edges items begin where rows have room; none: anywhere
    blocks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def has_loss(self) -> bool:
        return self.phase.has_loss

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots that each class takes on a rank."""
        return tuple(row_class.capacity for row_class in self.classes)

    @property
    def spans(self) -> tuple[int, ...]:
        """Ranks that hold a row of each class together."""
        return tuple(row_class.span for row_class in self.classes)

    @property
    def longest_row(self) -> int:
        """Slots of the largest row, which no item may exceed."""
        return self.classes[0].slots

    @property
    def widest(self) -> int:
        """Most ranks that hold a row together."""
        return max(self.spans)

    @property
    def row_tokens(self) -> int:
        """Language tokens of the largest row on a rank."""
        return max(self.capacities) // self.slots_per_token

    def row_blocks(self, capacity: Ints | Longs, span: Ints | Longs, rows: int) -> Longs | None:
        """`blocks` of so many rows of each microbatch, one after another: [M * rows].

        Args:
          capacity, span: [M] of the microbatches.
        """
        if self.blocks is None:
            return None
        of_microbatch = np.zeros(len(capacity), np.int64)
        for row_class, block in zip(self.classes, self.blocks, strict=True):
            alike = (capacity == row_class.capacity) & (span == row_class.span)
            of_microbatch[alike] = block
        return np.repeat(of_microbatch, rows)

    @property
    def flops(self) -> ItemCost:
        """FLOPs of one item, whatever it is balanced by: for MFU."""
        return self.model_flops or self.cost


@dataclass(frozen=True)
class ExchangeGrid:
    """How the ranks of an encoder phase and of the language phase lie on the same devices.

    Devices form a grid [A, E, L]: A mesh axes that are batch axes of both phases, E of the
    encoder's only, L of the language's only. Exchange rank x = (a * E + e) * L + l. Encoder rank of
    (a, e) is `encoder[a, e]`, language rank of (a, l) is `language[a, l]`. A token of encoder rank
    (a, e) for language rank (b, l) is sent by exchange rank (a, e, l) to (b, e, l): the all-to-all
    runs over A alone.
    """

    encoder: Ints  # [A, E]
    language: Ints  # [A, L]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.encoder.shape[0], self.encoder.shape[1], self.language.shape[1]

    @property
    def peers(self) -> int:
        """A: exchange ranks of a group, which send each other tokens; x is peer x // groups of
        group x % groups."""
        return self.encoder.shape[0]

    @property
    def groups(self) -> int:
        """E * L."""
        return self.encoder.shape[1] * self.language.shape[1]

    @property
    def ranks(self) -> int:
        """X: all exchange ranks."""
        return self.peers * self.groups


@dataclass(frozen=True)
class RouteSpec:
    """Fixed sizes of the exchange of one encoder or generator phase; what is said of encoders holds for both.

    Phases of equal grids share encoder pools and one exchange, that of the first of them; see
    `shared_exchange`.
    """

    grid: ExchangeGrid
    encoder_pool: (
        int  # W of an encoder rank's pool, in tokens; >= largest capacity // slots_per_token
    )
    language_pool: int  # W of a language rank's pool, in tokens; >= largest language capacity
    pair_slots: int  # Q: tokens one exchange rank sends another in one hop
    hops: int = 16  # H: most hops of a round, at least 2
    backend: str = "padded"  # of `BACKENDS`, in exchange/tables.py
    # Of a generator: tokens go from the language pool to its own, by the tables of the other direction
    outward: bool = False


def shared_exchange(routes: Mapping[str, RouteSpec]) -> dict[str, str]:
    """By encoder or generator phase: the phase whose pools and exchange carry its tokens, the first
    of its direction with an equal grid."""
    owners: dict[str, str] = {}
    for phase, route in routes.items():
        with_equal_grid = (
            owner
            for owner in owners.values()
            if routes[owner].outward == route.outward and _equal(routes[owner].grid, route.grid)
        )
        owners[phase] = next(with_equal_grid, phase)
    return owners


def _equal(a: ExchangeGrid, b: ExchangeGrid) -> bool:
    return np.array_equal(a.encoder, b.encoder) and np.array_equal(a.language, b.language)


@dataclass(frozen=True)
class PlanSpec:
    """All planner inputs other than the lengths."""

    phases: dict[str, PhaseSpec]  # in the order of `make_phases`
    routes: dict[str, RouteSpec]  # by encoder or generator phase
    mode: Mode = "phases"
    # Node of each rank [R], by phase; empty: not known
    nodes: dict[str, Ints] = field(default_factory=dict)


@dataclass(frozen=True)
class PhasePlan:
    """Where every item of a phase is computed. A microbatch is one row in every group of `span`
    neighbouring ranks: ranks k * span .. (k + 1) * span - 1 hold row k.

    Item n lies in microbatch[n], in the row of the group whose first rank is rank[n], at slots
    offset[n] .. offset[n] + length, as segment[n] >= 1 (counted from 1 in each row; 0 marks
    padding). Microbatch m has rows of span[m] * capacity[m] slots, capacity[m] on each rank; it
    writes its tokens (encoders) or finds its media tokens (language) in pool[m]; an encoder
    microbatch writes at pool_offset[m].
    """

    capacity: Ints  # [M]
    span: Ints  # [M]
    pool: Ints  # [M]
    pool_offset: Ints  # [M], tokens; zeros for language
    microbatch: Ints  # [N]
    rank: Ints  # [N]
    offset: Ints  # [N]
    segment: Ints  # [N]

    @property
    def microbatches(self) -> int:
        return len(self.capacity)


@dataclass(frozen=True)
class RouteRound:
    """What goes from encoder pools number `source` to language pools number `target` in some hops.

    A stretch is consecutive tokens of one item, [K] of them: from slots `start` .. of exchange rank
    `sender` to slots `arrival` .. of `receiver`. If the two differ, a stretch goes there at once where
    it is `direct`, as up to `direct_tokens` of a pair do; otherwise its tokens are spread over
    relay ranks in the hops of the first leg and forwarded in those of the second (relay.py).
    `ordinal` is the number of its first token among those of the pair or, where it is not direct,
    among all that the sender spreads. Ragged: all stretches are direct, in one hop of any size.
    """

    source: int
    target: int
    first_leg: int
    second_leg: int
    direct_tokens: int
    tokens: Ints  # [K]
    start: Ints  # [K]
    arrival: Ints  # [K]
    sender: Ints  # [K]
    receiver: Ints  # [K]
    ordinal: Ints  # [K]
    direct: Bools  # [K]

    @property
    def hops(self) -> int:
        return self.first_leg + self.second_leg


@dataclass(frozen=True)
class Hop:
    """Index tables of one all-to-all for exchange ranks x; their shapes are those of the backend.

    Padded: `index` [x, A, Q], what is sent to each peer. Ragged: `index` [x, W], what is sent, by
    peer; `sizes` [x, 4, A]: where in `index` the tokens of each peer begin and how many they are,
    where they land there, and how many come from it.
    """

    index: Ints
    sizes: Ints | None = None

    @property
    def arrays(self) -> tuple[Ints, ...]:
        return (self.index,) if self.sizes is None else (self.index, self.sizes)


@dataclass(frozen=True)
class RouteTables:
    """A round as gathers, for exchange ranks x; -1 means nothing.

    Forward:    the sources of a hop are encoder pool ++ buffer, and what it receives fills the buffer;
                language_pool[x, w] += (buffer ++ encoder_pool)[x, gather_forward[x, w]].
    Backward:   the same with `send_backward`, and d_language_pool in place of the encoder pool;
                d_encoder_pool[x, w] += (buffer ++ d_language_pool)[x, gather_backward[x, w]].
    """

    source: int
    target: int
    send_forward: tuple[Hop, ...]
    gather_forward: Ints  # [x, language W]
    send_backward: tuple[Hop, ...]
    gather_backward: Ints  # [x, encoder W]


@dataclass(frozen=True)
class RoutePlan:
    """Where the tokens of an encoder phase's items arrive, and the rounds that bring them there
    (under the phase that owns the exchange).

    An item that several language ranks of a group read is cut into pieces, one for each of them;
    any other, also one without tokens, is one piece. Piece k is `tokens` tokens of item item[k],
    after the first skipped[k]. It occupies slots arrival[k] .. of the language pool of the rank
    that owns its slots, in the pool number of its example's language microbatch. Pieces are in the
    order of items and, in each, of tokens.
    """

    item: Ints  # [K]
    skipped: Ints  # [K]
    tokens: Ints  # [K]
    arrival: Ints  # [K]
    rounds: tuple[RouteRound, ...]

    @classmethod
    def of_whole_items(
        cls, tokens: Ints, arrival: Ints, rounds: tuple[RouteRound, ...] = ()
    ) -> RoutePlan:
        """With one piece for each of N items, of the given tokens and arrivals [N]."""
        item = np.arange(len(tokens), dtype=np.int32)
        return cls(item, np.zeros_like(item), tokens, arrival, rounds)

    def arrivals(self, item: int) -> Longs:
        """Slot of the pool for each token of an item."""
        begin, end = np.searchsorted(self.item, [item, item + 1])
        pieces = zip(self.arrival[begin:end].tolist(), self.tokens[begin:end].tolist(), strict=True)
        return np.concatenate([np.arange(arrival, arrival + tokens) for arrival, tokens in pieces])


@dataclass(frozen=True)
class PipelineRun:
    """One run of the pipeline executor: microbatches first .. first + count of every phase, and the
    schedule table."""

    microbatches: dict[str, tuple[int, int]]  # by phase: first, count
    table: Ints  # [T, S, columns]; see sharding/pipeline/table.py
    wire_active: Ints  # [T, wires]


@dataclass(frozen=True)
class StepPlan:
    """Placement of every item of a step and the routes between phases.

    With a pipeline there are `runs`, and the routes have only arrivals: slots of the tokens that a
    language microbatch consumes, end to end.
    """

    phases: dict[str, PhasePlan]
    routes: dict[str, RoutePlan]
    # e.g. "vision/max_over_mean", "plan_ms"
    statistics: dict[str, float] = field(default_factory=dict)
    runs: tuple[PipelineRun, ...] = ()

    def digest(self, examples: Longs) -> str:
        """Sixteen hexadecimal digits of the batch's example numbers [B], all placements, arrivals,
        rounds and runs: equal on hosts that drew the same examples and made the same plan."""
        digest = hashlib.blake2b(digest_size=8)
        _add_to_digest(digest, (examples, self.phases, self.routes, self.runs))
        return digest.hexdigest()


def _add_to_digest(digest: hashlib.blake2b, node: Any) -> None:
    """Everything below `node`: records, dicts, tuples, arrays and numbers."""
    if is_dataclass(node):
        for column in fields(node):
            _add_to_digest(digest, getattr(node, column.name))
    elif isinstance(node, dict):
        for name, value in node.items():
            digest.update(f"{name}:".encode())
            _add_to_digest(digest, value)
    elif isinstance(node, tuple | list):
        digest.update(f"{len(node)};".encode())
        for value in node:
            _add_to_digest(digest, value)
    elif isinstance(node, np.ndarray):
        digest.update(f"{node.shape};".encode())
        digest.update(np.ascontiguousarray(node).tobytes())
    else:
        digest.update(f"{node!r};".encode())
