"""From this host's ranks to global arrays.

local_ranks(sharding) --> ranks that this host fills        put_ranks(local, sharding) --> array over all hosts
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding


def local_ranks(sharding: NamedSharding, *shape: int) -> tuple[int, ...]:
    """Ranks that this host must supply of an array [R, ...] with this shape, ascending."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(sorted({_first_rank(index) for index in indices}))


def put_ranks(local: np.ndarray, sharding: NamedSharding, ranks: int, axis: int = 0) -> jax.Array:
    """A global array with R ranks on `axis`, one per device, made from the ranks that this host
    supplies (`local_ranks`).

    Args:
      local: this host's ranks, complete in all other axes.
      sharding: sharding of the global array.
      ranks: R.
      axis: the axis of the ranks.
    """
    shape = (*local.shape[:axis], ranks, *local.shape[axis + 1 :])
    indices = sharding.addressable_devices_indices_map(shape).values()
    # Rows of `local` are this host's ranks, ascending as in `local_ranks`.
    present = sorted({_first_rank(index, axis) for index in indices})
    row_of_rank = {rank: row for row, rank in enumerate(present)}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        row = row_of_rank[_first_rank(index, axis)]
        before = (index or ())[:axis]
        after = (index or ())[axis + 1 :]
        return local[(*before, slice(row, row + 1), *after)]

    return jax.make_array_from_callback(shape, sharding, shard)


def _first_rank(index: tuple[slice, ...] | None, axis: int = 0) -> int:
    assert index is not None, "asked for a device of another host"
    return index[axis].start or 0
