"""A backend of the exchange: everything that depends on how tokens are sent, in one object.

    plan      spread         tokens that leave their rank -> stretches by round, hops per round
              tables         a round -> index tables of some exchange ranks
    sizes     buffer_slots   slots of the buffers that a round's hops fill
              hop_shapes     shapes of the arrays that one hop reads
    run       hop_on_host    numpy, for checking plans
              hop_on_device  jax, inside shard_map

To add a backend, write such an object in a file of its own and name it in `BACKENDS` (tables.py).

Letters: N items (or runs of an item's tokens) that leave their rank, K stretches, T tokens, W pool
slots, U buffer slots, and X exchange ranks. The A peers of a group send each other tokens: exchange
rank x is peer x // groups of group x % groups (`ExchangeGrid`).
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
    """Stretches of consecutive tokens of an item, each sent in one round: arrays are [K]."""

    round: Longs
    item: Longs
    start: Longs  # first token of the stretch, counted in the item
    tokens: Longs
    direct: Bools  # sent straight to the receiver, without a relay
    # Number of the stretch's first token in its round: among those of the same sender and receiver
    # if it is direct, otherwise among all that the sender spreads over relays.
    ordinal: Longs
    hops: list[tuple[int, int]]  # hops of the first and of the second leg, for each round
    direct_tokens: int  # most direct tokens per pair of ranks and round


class Backend(ABC):
    """One way to send tokens between exchange ranks.

    A backend has no state: sizes come from the `RouteSpec`, and tables from the round.
    """

    ragged: ClassVar[bool]  # whether chunks may have any size, so that only tokens are sent

    @abstractmethod
    def available(self, platform: str) -> bool:
        """Whether devices of a jax platform ("cpu", "gpu", ..) can run this backend."""

    @abstractmethod
    def spread(self, sender: Longs, receiver: Longs, tokens: Longs, route: RouteSpec) -> Stretches:
        """Divide the tokens that leave their rank into as few rounds as the sizes allow.

        Args:
          sender, receiver: [N] exchange ranks of each item, two different ones of a group; pairs
            (sender, receiver) are in ascending order.
          tokens: [N] tokens of each item, above 0.
        """

    @abstractmethod
    def tables(
        self, round_: RouteRound, route: RouteSpec, *, local: Longs, ranks: Sequence[int]
    ) -> RouteTables:
        """The index tables of a round for some exchange ranks.

        Args:
          local: [X] index of each exchange rank in `ranks`, -1 if it is not among them.
        """

    @abstractmethod
    def buffer_slots(self, route: RouteSpec) -> tuple[int, int]:
        """Slots U of the buffers that a round's hops fill, forward and backward."""

    @abstractmethod
    def hop_shapes(self, route: RouteSpec, pool_slots: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of `Hop.arrays` of one exchange rank, which sends from a pool of `pool_slots`."""

    @abstractmethod
    def slots_moved(self, rounds: Sequence[RouteRound], route: RouteSpec) -> int:
        """Total slots sent between different exchange ranks in some rounds, one way."""

    def problem(self, round_: RouteRound, route: RouteSpec) -> str | None:
        """An error in a round that running its tables would not show; None if there is none."""
        return None

    @abstractmethod
    def hop_on_host(
        self, source: Longs, buffer: Longs, hop_index: int, *, hop: Hop, route: RouteSpec
    ) -> None:
        """Run a hop on all exchange ranks: source [X, W], buffer [X, U], which is filled in place.

        Args:
          hop_index: number of the hop in its round.
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
          hop_index: number of the hop in its round.
          tables: the arrays of the `Hop`, for this exchange rank.
          axes: mesh axes of the peers; empty if there is only one peer.
        """


def tokens_of(stretches: Longs, tokens: Ints) -> tuple[Longs, Longs]:
    """Return (stretch, number in the stretch), [T] each, for all tokens of the given stretches."""
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
