"""The exchange that carries encoder outputs to the ranks where the language phase needs them.

    encoder pool [R_encoder, W, ...] --gather--> chunks [A, Q, ...] --all-to-all over A--> buffer [X, U, ...]  a hop
                                         buffer --gather--> chunks --all-to-all over A--> buffer               ...
    buffer, encoder pool --gather--> language pool [R_language, W, ...]                                     deliver

A hop may send on what an earlier one brought, so that a token can take a way round a busy pair of ranks; tokens that
stay where they are take no hop. The ragged all-to-all has no busy pairs, and needs one hop.

Both directions only gather: the transpose has index tables of its own, so no scatter-add is needed and the
gradient is deterministic. Mesh axes fall into three groups: A are batch axes of both layouts, E of the encoder's
only, L of the language's only. Each device sends along A; what the E axes received is summed, because every slot is
filled by one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.pools import gather_either
from sharding.rules import Layout

Pool = Any  # a pytree of arrays [R, W, ...]


@dataclass(frozen=True)
class Exchange:
    """Geometry of the exchange between two layouts on one mesh."""

    mesh: Mesh | AbstractMesh
    encoder: Layout
    language: Layout
    ragged: bool = False  # one all-to-all of chunks of any size, where the platform has it

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.encoder.batch_axes if axis in self.language.batch_axes)

    @property
    def encoder_only(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.encoder.batch_axes if axis not in self.shared)

    @property
    def language_only(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.language.batch_axes if axis not in self.shared)

    @property
    def tables(self) -> NamedSharding:
        """Sharding of the index tables [X, ...], X = A * E * L exchange ranks."""
        return NamedSharding(self.mesh, P((*self.shared, *self.encoder_only, *self.language_only)))

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Rank numbers on the exchange's device grid: encoder int32 [A, E] and language int32 [A, L]."""
        return (
            self._ranks(self.encoder.batch_axes, self.encoder_only),
            self._ranks(self.language.batch_axes, self.language_only),
        )

    def _ranks(self, batch_axes: tuple[str, ...], rest: tuple[str, ...]) -> np.ndarray:
        sizes = [self.mesh.shape[axis] for axis in batch_axes]
        ranks = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
        order = [batch_axes.index(axis) for axis in (*self.shared, *rest)]
        return ranks.transpose(order).reshape(math.prod(self.mesh.shape[axis] for axis in self.shared), -1)

    def hop(self, encoder_pool: Pool, buffer: Pool, number: jax.Array, *tables: jax.Array) -> Pool:
        """One all-to-all on the way to the language ranks.

        Args:
          buffer: arrays [X, U, ...] that it fills: chunk n of the buffer if it is padded.
          number: n.
          tables: index into pool ++ buffer, int32 [X, A, Q]; ragged: [X, W], and sizes int32 [X, 4, A]: where the
            tokens for each place begin and how many they are, where they land there, and how many come from it.
        """
        return self._hop(encoder_pool, buffer, number, tables, self.encoder)

    def hop_back(self, d_language_pool: Pool, buffer: Pool, number: jax.Array, *tables: jax.Array) -> Pool:
        """One all-to-all on the way back; as `hop`."""
        return self._hop(d_language_pool, buffer, number, tables, self.language)

    def deliver(self, encoder_pool: Pool, buffer: Pool, language_pool: Pool, pick: jax.Array) -> Pool:
        """Add what has arrived to `language_pool` (zero where it arrives): pick int32 [X, W] into buffer ++ encoder
        pool."""
        return self._deliver(encoder_pool, buffer, language_pool, pick, self.encoder, self.language, self.encoder_only)

    def deliver_back(self, d_language_pool: Pool, buffer: Pool, d_encoder_pool: Pool, back: jax.Array) -> Pool:
        """Add the gradients that have come back to `d_encoder_pool`; as `deliver`."""
        return self._deliver(
            d_language_pool, buffer, d_encoder_pool, back, self.language, self.encoder, self.language_only
        )

    def _hop(
        self, source: Pool, buffer: Pool, number: jax.Array, tables: tuple[jax.Array, ...], layout: Layout
    ) -> Pool:
        def on_device(source: Pool, buffer: Pool, number: jax.Array, *tables: jax.Array) -> Pool:
            def move(pool: jax.Array, received: jax.Array) -> jax.Array:
                chunks = gather_either(pool[0], received[0], tables[0][0])
                if self.ragged:
                    return _ragged_all_to_all(chunks, received[0], tables[1][0], self.shared)[None]
                if self.shared:
                    chunks = jax.lax.all_to_all(chunks, self.shared, 0, 0, tiled=True)
                chunks = chunks.reshape(1, -1, *chunks.shape[2:])
                return jax.lax.dynamic_update_slice_in_dim(received, chunks, number * chunks.shape[1], 1)

            return jax.tree.map(move, source, buffer)

        of_rank, of_exchange = layout.rows.spec, self.tables.spec
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(of_rank, of_exchange, P(), *(of_exchange for _ in tables)),
            out_specs=of_exchange,
            check_vma=False,
        )(source, buffer, number, *tables)

    def _deliver(
        self,
        source: Pool,
        buffer: Pool,
        target: Pool,
        gather: jax.Array,
        source_layout: Layout,
        target_layout: Layout,
        summed: tuple[str, ...],
    ) -> Pool:
        def on_device(source: Pool, buffer: Pool, target: Pool, gather: jax.Array) -> Pool:
            def add(pool: jax.Array, received: jax.Array, into: jax.Array) -> jax.Array:
                arrived = gather_either(received[0], pool[0], gather[0])
                if summed:
                    arrived = jax.lax.psum(arrived, summed)
                return into + arrived[None]

            return jax.tree.map(add, source, buffer, target)

        of_exchange = self.tables.spec
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(source_layout.rows.spec, of_exchange, target_layout.rows.spec, of_exchange),
            out_specs=target_layout.rows.spec,
            check_vma=False,
        )(source, buffer, target, gather)


def _ragged_all_to_all(chunks: jax.Array, received: jax.Array, sizes: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes:
        return received
    begin, sent, land, expected = sizes
    return jax.lax.ragged_all_to_all(chunks, received, begin, sent, land, expected, axis_name=axes)
