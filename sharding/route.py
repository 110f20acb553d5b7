"""The exchange that carries encoder outputs to the ranks where the language phase needs them.

    encoder pool [R_encoder, W, ...] --gather by send--> chunks [A, E, ...] --all-to-all over A--> received
    received --gather by pick--> language pool [R_language, W, ...]

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
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.rules import Layout

Pool = Any  # a pytree of arrays [R, W, ...]


@dataclass(frozen=True)
class Exchange:
    """Geometry of the exchange between two layouts on one mesh."""

    mesh: Mesh | AbstractMesh
    encoder: Layout
    language: Layout

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

    def forward(self, encoder_pool: Pool, language_pool: Pool, send: jax.Array, pick: jax.Array) -> Pool:
        """Add the routed tokens to `language_pool` (zero where they arrive). send [X, A, E], pick [X, W]."""
        return self._move(encoder_pool, language_pool, send, pick, self.encoder, self.language, self.encoder_only)

    def transposed(self, d_language_pool: Pool, d_encoder_pool: Pool, place: jax.Array, back: jax.Array) -> Pool:
        """Add the gradients that belong to `encoder_pool`. place [X, A, E], back [X, W]."""
        return self._move(d_language_pool, d_encoder_pool, place, back, self.language, self.encoder, self.language_only)

    def _move(
        self,
        source: Pool,
        target: Pool,
        take: jax.Array,
        put: jax.Array,
        source_layout: Layout,
        target_layout: Layout,
        summed: tuple[str, ...],
    ) -> Pool:
        def on_device(source: Pool, target: Pool, take: jax.Array, put: jax.Array) -> Pool:
            def move(pool: jax.Array, into: jax.Array) -> jax.Array:
                chunks = _gather(pool[0], take[0])
                if self.shared:
                    chunks = jax.lax.all_to_all(chunks, self.shared, 0, 0, tiled=True)
                arrived = _gather(chunks.reshape(-1, *chunks.shape[2:]), put[0])
                if summed:
                    arrived = jax.lax.psum(arrived, summed)
                return into + arrived[None]

            return jax.tree.map(move, source, target)

        table = self.tables.spec
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(source_layout.rows.spec, target_layout.rows.spec, table, table),
            out_specs=target_layout.rows.spec,
            check_vma=False,
        )(source, target, take, put)


def _gather(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], zero where index is -1."""
    taken = values[jnp.maximum(index, 0)]
    present = (index >= 0).reshape(index.shape + (1,) * (taken.ndim - index.ndim))
    return jnp.where(present, taken, 0)


def take_rows(layout: Layout, pool: jax.Array, index: jax.Array) -> jax.Array:
    """Each rank's rows from its own pool: pool [R, W, D], index int32 [R, C] (-1: zero) -> [R, C, D]."""
    axes = ("batch",)
    return layout.local(lambda pool, index: _gather(pool[0], index[0])[None], (axes, axes), axes)(pool, index)


def put_rows(layout: Layout, rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
    """The transpose of `take_rows`, added to `pool`. No slot may occur twice in one row's index.

    The inverse table is built from integers, so the values themselves are gathered, never scattered.
    """

    def on_device(rows: jax.Array, index: jax.Array, pool: jax.Array) -> jax.Array:
        slots = pool.shape[1]
        target = jnp.where(index[0] >= 0, index[0], slots)
        inverse = (
            jnp.full(slots, -1, jnp.int32).at[target].set(jnp.arange(index.shape[1], dtype=jnp.int32), mode="drop")
        )
        return pool + _gather(rows[0], inverse)[None].astype(pool.dtype)

    axes = ("batch",)
    return layout.local(on_device, (axes, axes, axes), axes)(rows, index, pool)
