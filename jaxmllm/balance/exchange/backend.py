"""A backend of the exchange: all that depends on how tokens are sent, in one object.

    plan      spread         tokens that leave their rank -> stretches by round, hops per round
              tables         a round -> index tables of some exchange ranks
    sizes     buffer_slots   what the hops of a round fill
              hop_shapes     arrays that one hop reads
    run       hop_on_host    numpy, for checking plans
              hop_on_device  jax, inside shard_map

To add a backend, write such an object in a file of its own and name it in `BACKENDS` (tables.py).

Letters: N items that leave their rank, K stretches, T tokens, W pool slots, U buffer slots, and X
exchange ranks. The A peers of a group send each other tokens: exchange rank x is peer x // groups
of group x % groups (`ExchangeGrid`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from jaxmllm.arrays import Bools, Ints, Longs, running_sums
from jaxmllm.balance.records import Hop, RouteRound, RouteSpec, RouteTables

if TYPE_CHECKING:  # the processes that plan never import jax
    import jax


@dataclass(frozen=True)
class Stretches:
    """Items, or parts of them, by round: all [K]."""

    round: Longs
    item: Longs
    start: Longs  # its first token, counted in the item
    tokens: Longs
    direct: Bools  # sent to the receiver at once, without a relay
    # Number of its first token in the round: among those of the same sender and receiver if it is
    # direct, else among all that the sender spreads.
    ordinal: Longs
    hops: list[tuple[int, int]]  # of the first and the second leg, for each round
    direct_tokens: int  # per pair and round


class Backend(ABC):
    """One way to send tokens between exchange ranks.

    A backend has no state: sizes are those of the `RouteSpec`, tables those of the round.
    """

    ragged: ClassVar[bool]  # whether chunks have any size, so that nothing is sent but tokens

    @abstractmethod
    def available(self, platform: str) -> bool:
        """Whether devices of a jax platform ("cpu", "gpu", ..) can run it."""

    @abstractmethod
    def spread(self, sender: Longs, receiver: Longs, tokens: Longs, route: RouteSpec) -> Stretches:
        """Divide what leaves its rank into as few rounds as the sizes allow.

        Args:
          sender, receiver: [N] different exchange ranks of one group, in ascending order.
          tokens: [N], above 0.
        """

    @abstractmethod
    def tables(
        self, round_: RouteRound, route: RouteSpec, *, local: Longs, ranks: Sequence[int]
    ) -> RouteTables:
        """The index tables of a round for some exchange ranks.

        Args:
          local: [X] place of each exchange rank in `ranks`, -1 where it is not among them.
        """

    @abstractmethod
    def buffer_slots(self, route: RouteSpec) -> tuple[int, int]:
        """U of the buffers that the hops of a round fill: forward, backward."""

    @abstractmethod
    def hop_shapes(self, route: RouteSpec, pool_slots: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of `Hop.arrays` for one exchange rank, which sends from `pool_slots`."""

    @abstractmethod
    def slots_moved(self, rounds: Sequence[RouteRound], route: RouteSpec) -> int:
        """Slots sent from one exchange rank to another in some rounds, one way."""

    def problem(self, round_: RouteRound, route: RouteSpec) -> str | None:
        """What is wrong with a round, beyond what running its tables shows; none: nothing."""
        return None

    @abstractmethod
    def hop_on_host(
        self, source: Longs, buffer: Longs, hop_index: int, *, hop: Hop, route: RouteSpec
    ) -> None:
        """Run a hop on all exchange ranks: source [X, W], buffer [X, U], which is filled in place.

        Args:
          hop_index: of the hop in its round.
        """

    @abstractmethod
    def hop_on_device(
        self,
        pool: jax.Array,
        buffer: jax.Array,
        hop_index: jax.Array,
        tables: tuple[jax.Array, ...],
        axes: tuple[str, ...],
    ) -> jax.Array:
        """Run a hop on one device inside shard_map: pool [W, ...], buffer [U, ...] -> buffer.

        Args:
          hop_index: of the hop in its round.
          tables: the arrays of the `Hop`, for this exchange rank.
          axes: mesh axes over which the peers lie; none: there is but one.
        """


def tokens_of(stretches: Longs, tokens: Ints) -> tuple[Longs, Longs]:
    """(stretch, number in the stretch) of every token of the stretches with the given numbers: [T] each."""
    stretch = np.repeat(stretches, tokens[stretches])
    return stretch, running_sums(stretch, np.ones_like(stretch))


def fill(table: Ints, row: Longs, chosen: Bools | bool, slot: Longs, values: Longs) -> None:
    """table[row, slot] = values, for the chosen tokens whose rank is local (row >= 0)."""
    local = np.flatnonzero((row >= 0) & chosen)
    table[row[local], slot[local]] = values[local]


def take(values: Longs, index: Ints) -> Longs:
    """values[x, index[x, ..]], 0 where the index is -1."""
    gathered = np.take_along_axis(values, np.maximum(index, 0).astype(np.int64), axis=1)
    return np.where(index >= 0, gathered, 0)
