"""The programs of an exchange: one round of it forward, and one of its gradients backward.

    encoder pool --hop x hops--> buffer --deliver--> language pool
    d language pool --hop_back x hops--> d buffer --deliver_back--> d encoder pool

For a generator the directions are swapped: states go from the language pool to the generator's pool
by the tables that serve gradients of encoders, and their gradients return by those that serve
tokens of encoders.

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
from jaxmllm.phases import LANGUAGE
from jaxmllm.training.programs.base import Job, Jobs, ProgramName, zeros_job
from jaxmllm.training.programs.transfer import put_ranks
from sharding.exchange import Exchange

Call = Callable[[str, str], Callable[..., Any]]  # function, subject -> compiled program


@dataclass(frozen=True)
class DeviceTables:
    """`RouteTables` whose arrays are on the devices; each hop is a tuple, its `arrays`."""

    send_forward: list[tuple[jax.Array, ...]]
    gather_forward: jax.Array
    send_backward: list[tuple[jax.Array, ...]]
    gather_backward: jax.Array


@dataclass(frozen=True)
class ExchangePrograms:
    """The exchange that phase `owner` owns. `pool` and `language_pool` are shapes; `trained` says
    whether gradients are sent back.

    Programs are named by the direction of computation: `hop` and `deliver` bring tokens to the
    phase that reads them, `hop_back` and `deliver_back` return their gradients.
    """

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
            return put_ranks(table, self.exchange.tables, self._exchange_ranks)

        def put_hops(hops: tuple[Hop, ...]) -> list[tuple[jax.Array, ...]]:
            return [tuple(put(table) for table in hop.arrays) for hop in hops]

        return DeviceTables(
            send_forward=put_hops(tables.send_forward),
            gather_forward=put(tables.gather_forward),
            send_backward=put_hops(tables.send_backward),
            gather_backward=put(tables.gather_backward),
        )

    def deliver(
        self, call: Call, source: TokenPool, target: TokenPool, tables: DeviceTables
    ) -> TokenPool:
        """`target`, the pool of the reading phase, plus the tokens of one round."""
        forward, _ = self._direction_tables(tables)
        delivered: TokenPool = self._run(call, "", source, target, *forward)
        return delivered

    def deliver_back(
        self, call: Call, d_target: jax.Array, d_source: jax.Array, tables: DeviceTables
    ) -> jax.Array:
        """`d_source`, the gradient of the writing phase's pool, plus that of one round."""
        _, back = self._direction_tables(tables)
        delivered: jax.Array = self._run(call, "_back", d_target, d_source, *back)
        return delivered

    def _run(
        self, call: Call, way: str, source: Any, target: Any, hops: Any, gather: jax.Array
    ) -> Any:
        buffer = call("zero", self._buffer_name(way))()
        for hop_number, hop in enumerate(hops):
            buffer = call(f"hop{way}", self.owner)(source, buffer, np.int32(hop_number), *hop)
        return call(f"deliver{way}", self.owner)(source, buffer, target, gather)

    def _buffer_name(self, way: str) -> str:
        """Name of the zeroed buffer that the hops of a direction fill."""
        return f"{'d_' if way else ''}buffer of {self.owner}"

    def _direction_tables(self, tables: DeviceTables) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(hops, gather table) of the forward direction, and those of the backward direction."""
        to_language = tables.send_forward, tables.gather_forward
        from_language = tables.send_backward, tables.gather_backward
        return (from_language, to_language) if self.route.outward else (to_language, from_language)

    # ------------------------------------------------------------------ compiling

    def jobs(self) -> Jobs:
        """Programs of both directions; the backward ones only if gradients are sent back."""
        pools = self.pool, self.language_pool
        send_forward, gather_forward, send_backward, gather_backward = self._abstract_tables()
        slots = backend_of(self.route).buffer_slots(self.route)
        ways = [
            (self.exchange.hop, self.exchange.deliver, send_forward, gather_forward, slots[0]),
            (
                self.exchange.hop_back,
                self.exchange.deliver_back,
                send_backward,
                gather_backward,
                slots[1],
            ),
        ]
        source, target = pools[::-1] if self.route.outward else pools
        forward, back = ways[::-1] if self.route.outward else ways
        jobs = {ProgramName("zero", self.owner): zeros_job(self.pool)}
        jobs |= self._direction_jobs("", source, target, *forward)
        if self.trained:
            # Gradients return into zeros like the source: for a generator, the language pool.
            d_written = ProgramName("zero", f"d_{LANGUAGE if self.route.outward else self.owner}")
            jobs[d_written] = zeros_job(source.tokens)
            jobs |= self._direction_jobs("_back", target.tokens, source.tokens, *back)
        return jobs

    def _direction_jobs(
        self,
        way: str,
        source: Any,
        target: Any,
        hop: Callable[..., Any],
        deliver: Callable[..., Any],
        send: Any,
        gather: Any,
        slots: int,
    ) -> Jobs:
        buffer = self._abstract_buffer(source, slots)
        hop_number = jax.ShapeDtypeStruct(
            (), np.int32, sharding=NamedSharding(self.exchange.mesh, P())
        )
        hop_arguments = (source, buffer, hop_number, *send)
        deliver_arguments = (source, buffer, target, gather)
        return {
            ProgramName("zero", self._buffer_name(way)): zeros_job(buffer),
            ProgramName(f"hop{way}", self.owner): Job(hop, hop_arguments, buffer, (1,)),
            ProgramName(f"deliver{way}", self.owner): Job(deliver, deliver_arguments, target, (2,)),
        }

    def _abstract_tables(self) -> tuple[Any, Any, Any, Any]:
        """Shapes of `DeviceTables`, with one hop for each direction."""
        route = self.route

        def hop(pool_slots: int) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(
                self._table_shape(*shape)
                for shape in backend_of(route).hop_shapes(route, pool_slots)
            )

        # A hop's table depends on the pool that tokens leave; a gather has an entry for each slot
        # of the pool that they enter.
        forward = hop(route.encoder_pool), self._table_shape(route.language_pool)
        backward = hop(route.language_pool), self._table_shape(route.encoder_pool)
        return *forward, *backward

    def _abstract_buffer(self, pool: Any, slots: int) -> Any:
        def stretched(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (self._exchange_ranks, slots, *leaf.shape[2:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.exchange.tables)

        return jax.tree.map(stretched, pool)

    def _table_shape(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self._exchange_ranks, *shape), np.int32, sharding=self.exchange.tables
        )

    @property
    def _exchange_ranks(self) -> int:
        return self.route.grid.ranks
