"""The bytes that a device holds while it runs a table, counted from shapes before compilation.

State   pools      slots of every pool      Held.pools
        scratch    one box of every pool    Held.boxes; that of RESIDUAL is a chunk's backward
        media      of all encoders          Held.media
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding.pipeline.executor.buffers import Shapes, State
from sharding.pipeline.executor.trees import Tree
from sharding.pipeline.graph import Pool, PoolKey, Slots


@dataclass(frozen=True)
class Held:
    """Bytes of one device, by pool and component. `slots` are the numbers of slots, one more in
    each pool than tables know; `pools` are the bytes of all slots of a pool."""

    slots: Slots
    pools: dict[PoolKey, int]
    boxes: dict[PoolKey, int]
    media: int

    @property
    def total(self) -> int:
        """Bytes of slots, boxes and media together."""
        return sum(self.pools.values()) + sum(self.boxes.values()) + self.media

    @staticmethod
    def of(shapes: Shapes, state: State, mesh: Mesh | AbstractMesh) -> Held:
        """The bytes of a state, whose arrays are those of one device along the manual axes.

        For residuals that are not only inputs the compiler chooses the sharding; they are counted
        as if their rows were split like those of activations.
        """

        def total(key: PoolKey, tree: Tree, leading: int) -> int:
            pool, c = key
            activation = shapes.components[c][0].activation or PartitionSpec()
            rows = jax.tree.leaves(shapes.x[c][0])[0].shape[0]
            byte_count = 0
            for leaf, spec in zip(jax.tree.leaves(tree), shapes.specs(pool, c), strict=True):
                if spec is not None:
                    byte_count += _device_bytes(leaf, spec, leading, mesh)
                    continue
                axes = leading + (pool in (Pool.RESIDUAL, Pool.PENDING))  # 1 more, of the layers
                is_of_rows = leaf.ndim > axes and leaf.shape[axes] == rows
                byte_count += _device_bytes(leaf, activation[:1] if is_of_rows else (), axes, mesh)
            return byte_count

        encoders = range(shapes.reader)
        # The box of token gradients has a leading axis: one gradient for each row that is read
        leading = {(Pool.TOKEN_GRADIENT, e): 1 for e in encoders}
        boxes = state.work.scratch
        return Held(
            slots={key: shapes.spec.room(*key) + 1 for key in state.pools},
            pools={key: total(key, pool, 1) for key, pool in state.pools.items()},
            boxes={key: total(key, box, leading.get(key, 0)) for key, box in boxes.items()},
            media=sum(total((Pool.TOKENS, e), state.work.media[e], 1) for e in encoders),
        )


def _device_bytes(leaf: Any, spec: Iterable[Any], leading: int, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of one device's part of an array; `spec` is for the axes after the `leading` ones."""
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * leading, *spec))
    return math.prod(sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)
