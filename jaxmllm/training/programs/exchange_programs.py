"""The programs of an exchange: one round of it forward, and one of its gradients backward.

    encoder pool --hop x hops--> buffer --deliver--> language pool
    d language pool --hop_back x hops--> d buffer --deliver_back--> d encoder pool

Encoders of equal rank grids share pools and one exchange, which the first of them owns and names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.balance.exchange.tables import backend_of
from jaxmllm.balance.records import Hop, RouteSpec, RouteTables
from jaxmllm.models.rows import TokenPool
from jaxmllm.training.programs.base import Job, Jobs, ProgramName, zeros_job
from jaxmllm.training.programs.transfer import put_ranks
from sharding.exchange import Exchange

Call = Callable[[str, str], Callable[..., Any]]  # function, subject -> compiled program


@dataclass(frozen=True)
class DeviceTables:
    """`RouteTables` whose arrays are on the devices; for each hop its `arrays`."""

    send_forward: list[tuple[jax.Array, ...]]
    gather_forward: jax.Array
    send_backward: list[tuple[jax.Array, ...]]
    gather_backward: jax.Array


@dataclass(frozen=True)
class ExchangePrograms:
    """The exchange that phase `owner` owns. `pool` and `language_pool` are shapes; `trained` says
    whether gradients go back."""

    owner: str
    exchange: Exchange
    route: RouteSpec
    pool: TokenPool
    language_pool: TokenPool
    trained: bool

    # ------------------------------------------------------------------ running

    def put(self, tables: RouteTables) -> DeviceTables:
        """Start the transfer of this host's tables of one round."""

        def put(table: np.ndarray) -> jax.Array:
            return put_ranks(table, self.exchange.tables, self._ranks)

        def put_hops(hops: tuple[Hop, ...]) -> list[tuple[jax.Array, ...]]:
            return [tuple(put(table) for table in hop.arrays) for hop in hops]

        return DeviceTables(
            send_forward=put_hops(tables.send_forward),
            gather_forward=put(tables.gather_forward),
            send_backward=put_hops(tables.send_backward),
            gather_backward=put(tables.gather_backward),
        )

    def deliver(
        self, call: Call, pool: TokenPool, language_pool: TokenPool, tables: DeviceTables
    ) -> TokenPool:
        """The language pool with the tokens of one round."""
        buffer = call("zero", f"buffer of {self.owner}")()
        for number, hop in enumerate(tables.send_forward):
            buffer = call("hop", self.owner)(pool, buffer, np.int32(number), *hop)
        delivered: TokenPool = call("deliver", self.owner)(
            pool, buffer, language_pool, tables.gather_forward
        )
        return delivered

    def deliver_back(
        self, call: Call, d_language: jax.Array, d_pool: jax.Array, tables: DeviceTables
    ) -> jax.Array:
        """The gradient of the encoder pool with that of one round's tokens."""
        buffer = call("zero", f"d_buffer of {self.owner}")()
        for number, hop in enumerate(tables.send_backward):
            buffer = call("hop_back", self.owner)(d_language, buffer, np.int32(number), *hop)
        delivered: jax.Array = call("deliver_back", self.owner)(
            d_language, buffer, d_pool, tables.gather_backward
        )
        return delivered

    # ------------------------------------------------------------------ compiling

    def jobs(self) -> Jobs:
        """Programs of both directions; the way back only where gradients go back."""
        exchange, pool, language_pool = self.exchange, self.pool, self.language_pool
        send_forward, gather_forward, send_backward, gather_backward = self._abstract_tables()
        buffer, d_buffer = (
            self._abstract_buffer(slots)
            for slots in backend_of(self.route).buffer_slots(self.route)
        )
        d_pool = pool.tokens
        d_language = language_pool.tokens
        number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(exchange.mesh, P()))
        jobs = {
            ProgramName("zero", self.owner): zeros_job(pool),
            ProgramName("zero", f"buffer of {self.owner}"): zeros_job(buffer),
            ProgramName("hop", self.owner): Job(
                exchange.hop, (pool, buffer, number, *send_forward), buffer, (1,)
            ),
            ProgramName("deliver", self.owner): Job(
                exchange.deliver, (pool, buffer, language_pool, gather_forward), language_pool, (2,)
            ),
        }
        if not self.trained:
            return jobs
        return jobs | {
            ProgramName("zero", f"d_{self.owner}"): zeros_job(d_pool),
            ProgramName("zero", f"d_buffer of {self.owner}"): zeros_job(d_buffer.tokens),
            ProgramName("hop_back", self.owner): Job(
                exchange.hop_back,
                (d_language, d_buffer.tokens, number, *send_backward),
                d_buffer.tokens,
                (1,),
            ),
            ProgramName("deliver_back", self.owner): Job(
                exchange.deliver_back,
                (d_language, d_buffer.tokens, d_pool, gather_backward),
                d_pool,
                (2,),
            ),
        }

    def _abstract_tables(self) -> tuple[Any, Any, Any, Any]:
        """Shapes of `DeviceTables`, with those of one hop for each direction."""
        route = self.route

        def hop(pool_slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(
                self._ints(*shape) for shape in backend_of(route).hop_shapes(route, pool_slots)
            )

        forward = hop(route.encoder_pool), self._ints(route.language_pool)
        backward = hop(route.language_pool), self._ints(route.encoder_pool)
        return *forward, *backward

    def _abstract_buffer(self, slots: int) -> TokenPool:
        def stretched(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (self._ranks, slots, *leaf.shape[2:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.exchange.tables)

        buffer: TokenPool = jax.tree.map(stretched, self.pool)
        return buffer

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._ranks, *shape), np.int32, sharding=self.exchange.tables)

    @property
    def _ranks(self) -> int:
        return self.route.grid.ranks
