"""The exchange that carries encoder outputs to the ranks where the language phase needs them.

    hop        encoder pool [R_encoder, W, ...], buffer [X, U, ...] --> buffer    several per round
    deliver    buffer, encoder pool --gather--> language pool [R_language, W, ...]

A hop sends tokens between devices. The backend decides how, and by which index tables; its function
for one device is passed in. A hop may forward tokens that an earlier hop brought, so that a token
can go around a busy pair of ranks. Tokens that stay on their device take no hop.

Both directions only gather: the way back has index tables of its own, so no scatter-add is needed
and the gradient is deterministic. Mesh axes fall into three groups: A are batch axes of both
layouts, E of the encoder's only, L of the language's only. Each device sends along A; what devices
along E received is summed, because only one of them fills each slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.pools import gather_either
from sharding.rules import Layout

Pool = Any  # a pytree of arrays [R, W, ...]

Tables = tuple[jax.Array, ...]

# On one device: (pool [W, ...], buffer [U, ...], number of the hop, its tables, mesh axes A) -> buffer
HopOnDevice = Callable[[jax.Array, jax.Array, jax.Array, Tables, tuple[str, ...]], jax.Array]


@dataclass(frozen=True)
class LayoutPair:
    """The layouts of an encoder and of language on one mesh, and the batch axes that they share."""

    mesh: Mesh | AbstractMesh
    encoder: Layout
    language: Layout

    @property
    def shared(self) -> tuple[str, ...]:
        """A: batch axes of both layouts."""
        return tuple(axis for axis in self.encoder.batch_axes if axis in self.language.batch_axes)

    @property
    def encoder_only(self) -> tuple[str, ...]:
        """E: batch axes of the encoder alone."""
        return tuple(axis for axis in self.encoder.batch_axes if axis not in self.shared)

    @property
    def language_only(self) -> tuple[str, ...]:
        """L: batch axes of the language alone."""
        return tuple(axis for axis in self.language.batch_axes if axis not in self.shared)

    @property
    def tables(self) -> NamedSharding:
        """Sharding of the index tables [X, ...], X = A * E * L exchange ranks."""
        return NamedSharding(self.mesh, P((*self.shared, *self.encoder_only, *self.language_only)))

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Rank numbers on the grid of devices: encoder int32 [A, E], language int32 [A, L]."""
        return (
            self._rank_grid(self.encoder.batch_axes, self.encoder_only),
            self._rank_grid(self.language.batch_axes, self.language_only),
        )

    def _rank_grid(self, batch_axes: tuple[str, ...], own_axes: tuple[str, ...]) -> np.ndarray:
        sizes = [self.mesh.shape[axis] for axis in batch_axes]
        ranks = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
        # Shared axes come first, in the same order, so row a of both grids is the same devices.
        order = [batch_axes.index(axis) for axis in (*self.shared, *own_axes)]
        peers = math.prod(self.mesh.shape[axis] for axis in self.shared)
        return ranks.transpose(order).reshape(peers, -1)


@dataclass(frozen=True)
class Exchange(LayoutPair):
    """The programs of the exchange between two layouts."""

    hop_on_device: HopOnDevice

    def hop(
        self, encoder_pool: Pool, buffer: Pool, hop_index: jax.Array, *tables: jax.Array
    ) -> Pool:
        """One hop on the way to the language ranks.

        Args:
          buffer: arrays [X, U, ...], which the hop fills.
          hop_index: number of the hop in its round.
          tables: int32 [X, ...], as the backend makes them: they index pool ++ buffer.
        """
        return self._hop(encoder_pool, buffer, hop_index, tables, self.encoder)

    def hop_back(
        self, d_language_pool: Pool, buffer: Pool, hop_index: jax.Array, *tables: jax.Array
    ) -> Pool:
        """One hop on the way back; arguments as for `hop`."""
        return self._hop(d_language_pool, buffer, hop_index, tables, self.language)

    def deliver(
        self, encoder_pool: Pool, buffer: Pool, language_pool: Pool, gather: jax.Array
    ) -> Pool:
        """Add the tokens that have arrived to `language_pool`, which is zero in their slots.

        Args:
          gather: int32 [X, W] into buffer ++ encoder pool.
        """
        return self._deliver(
            encoder_pool,
            buffer,
            language_pool,
            gather,
            layouts=(self.encoder, self.language),
            summed=self.encoder_only,
        )

    def deliver_back(
        self, d_language_pool: Pool, buffer: Pool, d_encoder_pool: Pool, gather: jax.Array
    ) -> Pool:
        """Add the gradients that have come back to `d_encoder_pool`; arguments as for `deliver`."""
        return self._deliver(
            d_language_pool,
            buffer,
            d_encoder_pool,
            gather,
            layouts=(self.language, self.encoder),
            summed=self.language_only,
        )

    def _hop(
        self, source: Pool, buffer: Pool, hop_index: jax.Array, tables: Tables, layout: Layout
    ) -> Pool:
        def on_device(source: Pool, buffer: Pool, hop_index: jax.Array, *tables: jax.Array) -> Pool:
            own_tables = tuple(table[0] for table in tables)

            def move(pool: jax.Array, received: jax.Array) -> jax.Array:
                buffer = self.hop_on_device(
                    pool[0], received[0], hop_index, own_tables, self.shared
                )
                return buffer[None]

            return jax.tree.map(move, source, buffer)

        by_rank = layout.rows.spec
        by_exchange_rank = self.tables.spec
        table_specs = [by_exchange_rank] * len(tables)
        hop_on_devices = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(by_rank, by_exchange_rank, P(), *table_specs),
            out_specs=by_exchange_rank,
            check_vma=False,
        )
        return hop_on_devices(source, buffer, hop_index, *tables)

    def _deliver(
        self,
        source: Pool,
        buffer: Pool,
        target: Pool,
        gather: jax.Array,
        *,
        layouts: tuple[Layout, Layout],
        summed: tuple[str, ...],
    ) -> Pool:
        def on_device(source: Pool, buffer: Pool, target: Pool, gather: jax.Array) -> Pool:
            def add(pool: jax.Array, received: jax.Array, into: jax.Array) -> jax.Array:
                arrived = gather_either(received[0], pool[0], gather[0])
                # Devices along these axes received different slots, and have zeros in the others.
                # After the sum all have the same, as the target's layout needs, which splits
                # nothing over these axes.
                if summed:
                    arrived = jax.lax.psum(arrived, summed)
                return into + arrived[None]

            return jax.tree.map(add, source, buffer, target)

        source_layout, target_layout = layouts
        by_exchange_rank = self.tables.spec
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(
                source_layout.rows.spec,
                by_exchange_rank,
                target_layout.rows.spec,
                by_exchange_rank,
            ),
            out_specs=target_layout.rows.spec,
            check_vma=False,
        )(source, buffer, target, gather)
