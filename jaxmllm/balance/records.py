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
    row slots and is a multiple of the phase's alignment; `real` counts the slots that hold data
    rather than padding inside the item. An encoder's item becomes `tokens` tokens of the language
    phase, from slot `slot` of its example's sequence on. A generator's item reads those tokens
    instead, into its own first slots. Language items have zeros in both.
    """

    length: Longs
    real: Longs
    example: Ints
    tokens: Ints
    slot: Ints
    # [N, 2] added to `ItemCost.squares` of the lengths (`VisiblePairs`); None: zeros
    extra_squares: Longs | None = None

    @property
    def extra(self) -> tuple[Any, ...]:
        """`extra_squares` as `ItemCost` takes them: an entry for each kind of layer."""
        return (0, 0) if self.extra_squares is None else tuple(self.extra_squares.T)

    @cached_property
    def most(self) -> tuple[int, list[int]]:
        """Largest length, and largest `extra` of each kind of layer, all at least 0.

        No item costs more than one that had all of these.
        """
        return int(self.length.max(initial=0)), [
            int(np.max(kind, initial=0)) for kind in self.extra
        ]

    def at(self, numbers: Longs) -> PhaseItems:
        """The items with the given numbers, in the order of these."""
        columns: dict[str, Any] = {}
        for column in fields(self):
            values = getattr(self, column.name)
            columns[column.name] = None if values is None else values[numbers]
        return PhaseItems(**columns)


@dataclass(frozen=True)
class BatchItems:
    """Lengths of one global batch of B examples; `phases` has an entry for every phase."""

    examples: Longs  # [B] index of each example in its length index
    targets: int  # target tokens of the whole batch
    phases: dict[str, PhaseItems]


class RowClass(NamedTuple):
    """The shape of a microbatch's rows: `span` neighbouring ranks hold a row together, and each
    rank holds `capacity` of its slots."""

    capacity: int
    span: int = 1

    @property
    def slots(self) -> int:
        """Slots of a whole row, on all of its ranks."""
        return self.capacity * self.span


def row_classes(capacities: Iterable[int], span: int = 1) -> tuple[RowClass, ...]:
    """The row classes with the given capacities, all of one span."""
    return tuple(RowClass(capacity, span) for capacity in capacities)


@dataclass(frozen=True)
class PhaseSpec:
    """All that the planner must know about a phase."""

    phase: Phase
    ranks: int
    classes: tuple[RowClass, ...]  # by slots of a row, descending
    max_segments: int
    slots_per_token: int  # encoder slots per language token; 1 for language
    cost: ItemCost  # to balance by: FLOPs, or femtoseconds where measured (tools/calibrate.py)
    model_flops: ItemCost | None = None  # where `cost` is measured; None: `cost` is the FLOPs
    # Slots of an attention block of each class, by which items are laid out (`lay_out` in
    # rows/pack.py); None: items are laid end to end
    blocks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def has_loss(self) -> bool:
        return self.phase.has_loss

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots that a row of each class takes on a rank."""
        return tuple(row_class.capacity for row_class in self.classes)

    @property
    def spans(self) -> tuple[int, ...]:
        """Number of ranks that hold a row of each class together."""
        return tuple(row_class.span for row_class in self.classes)

    @property
    def longest_row(self) -> int:
        """Slots of the largest row, which no item may exceed."""
        return self.classes[0].slots

    @property
    def widest(self) -> int:
        """The largest span of a row."""
        return max(self.spans)

    @property
    def row_tokens(self) -> int:
        """Language tokens of the largest capacity: the most that a row has on one rank."""
        return max(self.capacities) // self.slots_per_token

    def row_blocks(self, capacity: Ints | Longs, span: Ints | Longs, rows: int) -> Longs | None:
        """Entry of `blocks` for every row, microbatch by microbatch: [M * rows]. None without
        `blocks`.

        Args:
          capacity, span: [M] shape of each microbatch's rows.
          rows: number of rows of a microbatch.
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
        """FLOPs of one item, for MFU, even where measured times balance items."""
        return self.model_flops or self.cost


@dataclass(frozen=True)
class ExchangeGrid:
    """Layout of the ranks of an encoder phase and of the language phase on the same devices.

    Devices form a grid [A, E, L]: A along mesh axes that are batch axes of both phases, E along
    those of the encoder only, L along those of the language phase only. Exchange rank
    x = (a * E + e) * L + l. The encoder rank at (a, e) is `encoder[a, e]`, the language rank at
    (a, l) is `language[a, l]`. A token of encoder rank (a, e) for language rank (b, l) is sent by
    exchange rank (a, e, l) to (b, e, l): the all-to-all runs along A alone.
    """

    encoder: Ints  # [A, E]
    language: Ints  # [A, L]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.encoder.shape[0], self.encoder.shape[1], self.language.shape[1]

    @property
    def peers(self) -> int:
        """A: exchange ranks of a group, which send tokens to each other. Exchange rank x is peer
        x // groups of group x % groups."""
        return self.encoder.shape[0]

    @property
    def groups(self) -> int:
        """E * L: groups of exchange ranks that send tokens to each other."""
        return self.encoder.shape[1] * self.language.shape[1]

    @property
    def ranks(self) -> int:
        """X: number of exchange ranks."""
        return self.peers * self.groups


@dataclass(frozen=True)
class RouteSpec:
    """Fixed sizes of the exchange of one encoder or generator phase; "encoder" stands for both.

    Phases with equal grids share encoder pools and one exchange, that of the first such phase; see
    `shared_exchange`.
    """

    grid: ExchangeGrid
    encoder_pool: (
        int  # W of an encoder rank's pool, in tokens; >= largest capacity // slots_per_token
    )
    language_pool: int  # W of a language rank's pool, in tokens; >= largest language capacity
    pair_slots: int  # Q: tokens one exchange rank sends another in one hop
    hops: int = 16  # H: most hops of a round, at least 2
    backend: str = "padded"  # a name in `BACKENDS`, exchange/tables.py
    # True for a generator: tokens go from the language pool to the generator's, with the tables
    # of the backward direction.
    outward: bool = False


def shared_exchange(routes: Mapping[str, RouteSpec]) -> dict[str, str]:
    """For each encoder or generator phase, the phase whose pools and exchange carry its tokens: the
    first phase of the same direction with an equal grid."""
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
    """The microbatch, row and slots of every item of a phase.

    A microbatch is one row in every group of `span` neighbouring ranks: ranks
    k * span .. (k + 1) * span - 1 hold row k. Item n is in microbatch[n], in the row of the group
    whose first rank is rank[n], at slots offset[n] .. offset[n] + length[n] - 1, as segment[n]
    (counted from 1 in each row; 0 marks padding). Microbatch m has rows of span[m] * capacity[m]
    slots, capacity[m] on each rank. Encoders write the tokens of microbatch m to pool[m] from
    pool_offset[m] on; a language microbatch finds its media tokens in pool[m].
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
    """One round: the tokens that a few hops carry from encoder pool `source` of every rank to
    language pool `target`.

    A stretch is consecutive tokens of one item, K stretches in all: from slots `start` .. of
    exchange rank `sender` to slots `arrival` .. of `receiver`. If the two ranks differ, a `direct`
    stretch is sent straight to the receiver, as up to `direct_tokens` tokens of each pair of ranks
    are. Tokens of other stretches are spread over relay ranks in the hops of the first leg and
    forwarded in those of the second (relay.py). `ordinal` is the number of a stretch's first token:
    among the tokens of its pair of ranks if it is direct, else among all tokens that the sender
    spreads. Ragged: all stretches are direct, in one hop of any size.
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
    """Index tables of one all-to-all for exchange ranks x, in the shapes of the backend.

    Padded: `index` [x, A, Q], the slots sent to each peer. Ragged: `index` [x, W], all slots sent,
    by peer; `sizes` [x, 4, A]: for each peer the start of its tokens in `index`, their number,
    their first slot at the peer, and the number of tokens that come from it.
    """

    index: Ints
    sizes: Ints | None = None

    @property
    def arrays(self) -> tuple[Ints, ...]:
        return (self.index,) if self.sizes is None else (self.index, self.sizes)


@dataclass(frozen=True)
class RouteTables:
    """A round as index tables of gathers, for exchange ranks x; index -1 gathers nothing.

    Forward:    a hop sends from encoder pool ++ buffer, and received tokens fill the buffer;
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
    """The language pool slots at which the tokens of an encoder phase's items arrive, and the
    rounds that bring them there (stored with the phase that owns the exchange).

    An item that several language ranks of a group read is cut into pieces, one for each rank; any
    other item, even one without tokens, is one piece. Piece k is tokens[k] tokens of item item[k],
    after the first skipped[k]. It occupies slots arrival[k] .. of a language pool, on the rank
    that reads it, in the pool of its example's language microbatch. Pieces are in the order of
    items, and those of an item in the order of tokens.
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
        """A route of one piece for each of N items, with the given tokens and arrivals [N]."""
        item = np.arange(len(tokens), dtype=np.int32)
        return cls(item, np.zeros_like(item), tokens, arrival, rounds)

    def arrivals(self, item: int) -> Longs:
        """Pool slot at which each token of an item arrives."""
        begin, end = np.searchsorted(self.item, [item, item + 1])
        pieces = zip(self.arrival[begin:end].tolist(), self.tokens[begin:end].tolist(), strict=True)
        return np.concatenate([np.arange(arrival, arrival + tokens) for arrival, tokens in pieces])


@dataclass(frozen=True)
class PipelineRun:
    """One run of the pipeline executor: microbatches first .. first + count - 1 of every phase, and
    the schedule table."""

    microbatches: dict[str, tuple[int, int]]  # by phase: first, count
    table: Ints  # [T, S, columns]; see sharding/pipeline/table.py
    wire_active: Ints  # [T, wires]


@dataclass(frozen=True)
class StepPlan:
    """Placement of every item of a step and the routes between phases.

    With a pipeline there are `runs`, and the routes have no rounds: their arrivals are slots of the
    pools of all ranks of a widest group, end to end (`group_route` in stages/row_groups.py).
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
    """Add everything below `node` to the digest: records, dicts, tuples, arrays and numbers."""
    if is_dataclass(node):
        # Names of fields are left out: plans have the same ones on all hosts.
        for column in fields(node):
            _add_to_digest(digest, getattr(node, column.name))
    elif isinstance(node, dict):
        # Names here, and lengths and shapes below, tell trees with the same numbers apart. Order
        # counts: hosts insert in the same order.
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
