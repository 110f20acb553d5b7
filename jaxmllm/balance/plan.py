"""The records of a step plan: integers only, identical on every host.

    BatchItems (lengths of B examples) --plan_step(.., PlanSpec)--> StepPlan --fill--> rows

Letters: B examples, N items of a phase, R ranks, M microbatches, C row capacity in slots, S segments of a row,
W pool slots, E pair slots, X exchange ranks (see `ExchangeGrid`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Mode = Literal["none", "tokens", "language", "phases"]


@dataclass(frozen=True)
class PhaseItems:
    """The items of one phase in a global batch: images, clips, or (language) one token sequence an example.

    All arrays have length N, ordered by example, then by place in the example. `length` counts row slots and is
    a multiple of the phase's granule; `real` counts those that hold data rather than padding inside the item.
    Encoder items become `tokens` language tokens that start at `slot` of their example's language sequence.
    """

    length: Longs
    real: Longs
    example: Ints
    tokens: Ints
    slot: Ints


@dataclass(frozen=True)
class BatchItems:
    """Lengths of one global batch of B examples; `phases` has "language" and every encoder phase of the model."""

    examples: Longs  # [B] index of each example in its length index
    targets: int  # target tokens of the whole batch
    phases: dict[str, PhaseItems]


@dataclass(frozen=True)
class PhaseSpec:
    """What the planner must know of a phase. The cost of one item of l slots is linear * l + quadratic * l**2."""

    name: str
    ranks: int
    capacities: tuple[int, ...]  # row classes, descending
    max_segments: int
    slots_per_token: int  # encoder slots behind one language token; 1 for language
    linear: int
    quadratic: int


@dataclass(frozen=True)
class ExchangeGrid:
    """How the ranks of an encoder phase and of the language phase lie on the same devices.

    Devices form a grid [A, E, L]: A mesh axes that are batch axes of both phases, E of the encoder's only, L of
    the language's only. Exchange rank x = (a * E + e) * L + l. Encoder rank of (a, e) is `encoder[a, e]`,
    language rank of (a, l) is `language[a, l]`. A token of encoder rank (a, e) for language rank (b, l) is sent
    by exchange rank (a, e, l) to (b, e, l): the all-to-all runs over A alone.
    """

    encoder: Ints  # [A, E]
    language: Ints  # [A, L]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.encoder.shape[0], self.encoder.shape[1], self.language.shape[1]


@dataclass(frozen=True)
class RouteSpec:
    """Fixed sizes of the exchange of one encoder phase."""

    grid: ExchangeGrid
    encoder_pool: int  # W of an encoder rank's pool, in tokens; >= largest capacity // slots_per_token
    language_pool: int  # W of a language rank's pool, in tokens; >= largest language capacity
    pair_slots: int  # E: tokens one exchange rank sends another in one round


@dataclass(frozen=True)
class PlanSpec:
    """Everything a plan depends on beside the lengths."""

    phases: dict[str, PhaseSpec]  # encoder phases in model order, then "language"
    routes: dict[str, RouteSpec]  # by encoder phase
    mode: Mode = "phases"


@dataclass(frozen=True)
class PhasePlan:
    """Where every item of a phase is computed. A microbatch is one row on every rank.

    Item n lies in microbatch[n], on rank[n], at slots offset[n] .. offset[n] + length, as segment[n] >= 1 (counted
    from 1 in each row; 0 marks padding). Microbatch m has rows of capacity[m] slots and writes its tokens
    (encoders) or finds its media tokens (language) in pool[m]; an encoder microbatch writes at pool_offset[m].
    """

    capacity: Ints  # [M]
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
    """One all-to-all from encoder pools number `source` to language pools number `target`; -1 means nothing.

    Forward:    chunk[x, b, c] = encoder_pool[x, send[x, b, c]];  all-to-all over A;
                language_pool[x, w] = received.flat[pick[x, w]] where pick >= 0.
    Transposed: chunk[x, a, c] = d_language_pool[x, place[x, a, c]];  all-to-all;
                d_encoder_pool[x, w] = received.flat[back[x, w]] where back >= 0.
    """

    source: int
    target: int
    send: Ints  # [X, A, E]
    pick: Ints  # [X, language W]
    place: Ints  # [X, A, E]
    back: Ints  # [X, encoder W]


@dataclass(frozen=True)
class RoutePlan:
    """The rounds of one encoder phase, and where each item's tokens arrive.

    Item n's tokens occupy language pool slots arrival[n] .. arrival[n] + tokens of its language rank, in the pool
    number of its example's language microbatch.
    """

    arrival: Ints  # [N]
    rounds: tuple[RouteRound, ...]


@dataclass(frozen=True)
class StepPlan:
    """Placement of every item of a step and the routes between phases."""

    phases: dict[str, PhasePlan]
    routes: dict[str, RoutePlan]
    statistics: dict[str, float] = field(default_factory=dict)  # e.g. "vision/max_over_mean", "plan_ms"

    def digest(self) -> str:
        """Sixteen hexadecimal digits of all placements and arrivals: equal on hosts that planned alike."""
        digest = hashlib.blake2b(digest_size=8)
        for name, phase in self.phases.items():
            digest.update(name.encode())
            for column in fields(phase):
                digest.update(np.ascontiguousarray(getattr(phase, column.name)).tobytes())
        for route in self.routes.values():
            digest.update(np.ascontiguousarray(route.arrival).tobytes())
        return digest.hexdigest()
