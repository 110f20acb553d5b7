"""The backends of the exchange by name, and the index tables that they make of a plan's rounds.

RouteRound, on every host --route_tables--> RouteTables of a host's own exchange ranks
RouteTables of all ranks  --run_hops------> what the devices do with them, in numpy
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmllm.arrays import Ints, Longs
from jaxmllm.balance.exchange.backend import Backend, take
from jaxmllm.balance.exchange.padded import PADDED
from jaxmllm.balance.exchange.ragged import RAGGED
from jaxmllm.balance.records import Hop, RouteRound, RouteSpec, RouteTables

# Keyed by the values of `balance.exchange` in the config. `auto` takes the first backend that the
# devices can run, so the one that runs on every platform is last.
BACKENDS: dict[str, Backend] = {"ragged": RAGGED, "padded": PADDED}


def backend_of(route: RouteSpec) -> Backend:
    return BACKENDS[route.backend]


def backend_for(platform: str) -> str:
    """Name of the first backend that devices of a jax platform can run."""
    return next(name for name, backend in BACKENDS.items() if backend.available(platform))


def route_tables(round_: RouteRound, route: RouteSpec, ranks: Sequence[int]) -> RouteTables:
    """The index tables of a round for some exchange ranks, in the order given."""
    local = np.full(route.grid.ranks, -1, np.int64)
    local[list(ranks)] = np.arange(len(ranks))
    return backend_of(route).tables(round_, route, local=local, ranks=ranks)


def run_hops(
    source: Longs, hops: Sequence[Hop], gather: Ints, *, route: RouteSpec, direction: int
) -> Longs:
    """Do in numpy what the devices do with the tables of all exchange ranks, to check plans.

    Args:
      source: [X, W] tokens as numbers; 0 is nothing.
      hops: `send_forward` or `send_backward` of the tables.
      gather: `gather_forward` or `gather_backward`.
      direction: 0 forward, 1 backward.

    Returns:
      [X, W] the target pools, of W slots each, after the hops.
    """
    backend = backend_of(route)
    buffer = np.zeros((len(source), backend.buffer_slots(route)[direction]), source.dtype)
    for hop_index, hop in enumerate(hops):
        backend.hop_on_host(source, buffer, hop_index, hop=hop, route=route)
    return take(np.concatenate([buffer, source], axis=1), gather)
