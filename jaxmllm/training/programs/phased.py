"""The step's functions compiled ahead of the first step, and driven by the host.

How many microbatches, pools and exchange rounds a step has differs from step to step. Here that is a loop count, so
no program is ever compiled again:

    zero pools; encode x M; (hop x hops; deliver) x rounds; decode_and_grad x M;
    (hop_back x hops; deliver_back) x rounds; encode_grad x M; update
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.balance.records import Hop, PlanSpec, RouteTables, shared_exchange
from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.rows.masks import AttentionSpec
from jaxmllm.models.rows import (
    EncoderRows,
    LanguageRows,
    TokenPool,
    abstract_encoder_rows,
    abstract_language_rows,
    abstract_pool,
)
from jaxmllm.phases import LANGUAGE
from jaxmllm.row_format import RowFormat
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.optimizer import make_optimizer
from jaxmllm.training.step_functions import KeptFeatures, Step, TrainState
from sharding.exchange import Exchange
from sharding.rules import Layout

COMPILE_THREADS = os.cpu_count()


@dataclass(frozen=True)
class Job:
    """A program to compile: its arguments' shapes and shardings, those of its result, and what it may overwrite."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Any  # tree of ShapeDtypeStruct
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.result)
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=shardings)
        return jitted.lower(*self.arguments)


@dataclass(frozen=True)
class DeviceTables:
    """`RouteTables` whose arrays are on the devices; of each hop, its index and, if ragged, its sizes."""

    send_forward: list[tuple[jax.Array, ...]]
    gather_forward: jax.Array
    send_backward: list[tuple[jax.Array, ...]]
    gather_backward: jax.Array


@dataclass(frozen=True)
class DeviceStep:
    """A `HostStep` whose arrays are on the devices."""

    host: HostStep
    rows: dict[str, list[Any]]  # EncoderRows or LanguageRows, by phase and microbatch
    tables: dict[str, list[DeviceTables]]  # by encoder phase and round


class Evaluated(NamedTuple):
    """What evaluation batches come to."""

    sums: Sums  # by rank and source
    failed: jax.Array  # media items that could not be decoded


class Programs:
    """The compiled programs of a run: `put` a batch on the devices, `train` on it or `evaluate` it.

    Compiling happens here, once, in threads.
    """

    def __init__(
        self,
        step: Step,
        spec: PlanSpec,
        formats: Mapping[str, RowFormat],
        attention: AttentionSpec,
        param_dtype: str,
    ):
        self.step = step
        self.spec = spec
        self.encoders = tuple(spec.routes)
        self.layouts: dict[str, Layout] = {phase: step.model.layout(phase) for phase in spec.phases}
        self.mesh = self.layouts[LANGUAGE].mesh
        self.exchange_owner = shared_exchange(spec.routes)
        self.exchanges = {
            phase: Exchange(self.mesh, self.layouts[phase], self.layouts[LANGUAGE], route.backend == "ragged")
            for phase, route in spec.routes.items()
        }
        self.attention = attention
        self.param_dtype = param_dtype
        self.params = self._abstract_params()
        self.pools = self._abstract_pools()
        self.state = self._abstract_state(self.params)
        jobs = self._jobs(formats)
        lowered = [job.lower() for job in jobs.values()]  # tracing is Python; compiling is not
        with ThreadPoolExecutor(COMPILE_THREADS) as threads:
            compiled = threads.map(jax.stages.Lowered.compile, lowered)
            self.compiled: dict[Any, Callable[..., Any]] = dict(zip(jobs, compiled, strict=True))

    # ------------------------------------------------------------------ running

    def init(self, seed: int) -> TrainState:
        """A fresh state on the mesh."""
        params = self.step.model.init(seed, self.param_dtype)
        return jax.jit(self.step.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.state))(params)

    def put(self, batch: HostStep) -> DeviceStep:
        """Start the transfer of this host's rows and tables."""
        rows = {
            phase: [self._put_row(phase, *both) for both in zip(rows, batch.capacities[phase], strict=True)]
            for phase, rows in batch.rows.items()
        }
        tables = {
            phase: [self._put_tables(phase, round_) for round_ in rounds] for phase, rounds in batch.rounds.items()
        }
        return DeviceStep(batch, rows, tables)

    def train(self, state: TrainState, batch: DeviceStep) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step. Nothing here waits for the devices."""
        grads, sums, failed = self.gradients(state.params, batch)
        return self.compiled["update"](state, grads, sums, self._targets(batch), failed)

    def gradients(self, params: Any, batch: DeviceStep) -> tuple[Any, Sums, jax.Array]:
        """Gradients of the mean loss over the batch's planned targets, by trainable component; the sums by rank and
        source; and the number of media items that could not be decoded."""
        run, host = self.compiled, batch.host
        pools, starts, failed = self._encode(params, batch, run["zero", "failed"]())
        d_pools = [run["zero", "d_language"]() for _ in pools]
        grads, sums, scale = run["zero", "grads"](), run["zero", "sums"](), 1 / self._targets(batch)
        for m, rows in enumerate(batch.rows[LANGUAGE]):
            pool, decode = host.pools[LANGUAGE][m], run["decode", host.capacities[LANGUAGE][m]]
            own, language = self._grads(grads, LANGUAGE), self._components(params, LANGUAGE)
            arguments = language, rows, pools[pool], scale, d_pools[pool], own, sums
            d_pools[pool], own, sums = decode(*arguments, *self._home(host, m))
            grads |= own
        d_encoder_pools = self._returned(batch, d_pools)
        for phase in self.encoders:
            if self.step.trainable_of(phase):
                d_encoder, own = d_encoder_pools[self.exchange_owner[phase]], self._grads(grads, phase)
                grads |= self._encoder_grads(phase, params, batch, starts[phase], d_encoder, own)
        return grads, sums, failed

    def _targets(self, batch: Any) -> np.ndarray:
        return np.asarray(batch.host.targets, self._real_dtype)

    def evaluate(self, params: Any, batch: DeviceStep, found: Evaluated | None = None) -> Evaluated:
        """Add what a batch comes to, to what others came to (none: zero)."""
        sums, failed = found or self._nothing_evaluated()
        pools, _, failed = self._encode(params, batch, failed)
        for m, rows in enumerate(batch.rows[LANGUAGE]):
            capacity, pool = batch.host.capacities[LANGUAGE][m], batch.host.pools[LANGUAGE][m]
            arguments = self._components(params, LANGUAGE), rows, pools[pool], sums
            sums = self.compiled["evaluate", capacity](*arguments, *self._home(batch.host, m))
        return Evaluated(sums, failed)

    def _nothing_evaluated(self) -> Evaluated:
        return Evaluated(self.compiled["zero", "sums"](), self.compiled["zero", "failed"]())

    @staticmethod
    def _home(host: HostStep, microbatch: int) -> tuple[np.int32, ...]:
        """What the programs of long rows know besides."""
        return (np.int32(host.homes[microbatch]),) if host.homes[microbatch] >= 0 else ()

    def totals(self, sums: Sums) -> Sums:
        """Sums over the ranks: [N], whole on every host."""
        return self.compiled["totals"](sums)

    def _encode(
        self, params: Any, batch: DeviceStep, failed: jax.Array
    ) -> tuple[list[TokenPool], dict[str, list[Any]], jax.Array]:
        """Language pools with all media tokens, what each encoder's backward starts from, and the items that could not
        be decoded, added to `failed`."""
        run, host = self.compiled, batch.host
        encoder_pools = self._zero_pools(batch, self.exchange_owner.values(), "")
        starts: dict[str, list[Any]] = {}
        for phase in self.encoders:
            pools = encoder_pools[self.exchange_owner[phase]]
            starts[phase] = []
            for m, rows in enumerate(batch.rows[phase]):
                pool, at = host.pools[phase][m], np.int32(host.pool_offsets[phase][m])
                pools[pool], features, failed = run["encode", phase, host.capacities[phase][m]](
                    self._components(params, phase), rows, pools[pool], at, failed
                )
                starts[phase].append(rows if features is None else features)
        language_pools = [run["zero", LANGUAGE]() for _ in range(max(host.pools[LANGUAGE], default=0) + 1)]
        for phase, pools in encoder_pools.items():
            for round_, tables in zip(host.rounds[phase], batch.tables[phase], strict=True):
                buffer = run["zero", "buffer", phase]()
                for number, hop in enumerate(tables.send_forward):
                    buffer = run["hop", phase](pools[round_.source], buffer, np.int32(number), *hop)
                language_pools[round_.target] = run["deliver", phase](
                    pools[round_.source], buffer, language_pools[round_.target], tables.gather_forward
                )
        return language_pools, starts, failed

    def _returned(self, batch: DeviceStep, d_language: list[jax.Array]) -> dict[str, list[jax.Array]]:
        """Gradients of the encoder pools, by phase whose exchange has something to train."""
        run, host = self.compiled, batch.host
        d_encoder = self._zero_pools(batch, self._trained_exchanges, "d_")
        for phase, pools in d_encoder.items():
            for round_, tables in zip(host.rounds[phase], batch.tables[phase], strict=True):
                buffer = run["zero", "d_buffer", phase]()
                for number, hop in enumerate(tables.send_backward):
                    buffer = run["hop_back", phase](d_language[round_.target], buffer, np.int32(number), *hop)
                pools[round_.source] = run["deliver_back", phase](
                    d_language[round_.target], buffer, pools[round_.source], tables.gather_backward
                )
        return d_encoder

    def _zero_pools(self, batch: DeviceStep, chosen: Iterable[str], prefix: str) -> dict[str, list[Any]]:
        """Empty encoder pools of the chosen exchanges, as many as the step needs."""
        numbers: dict[str, int] = dict.fromkeys(chosen, -1)
        for phase, owner in self.exchange_owner.items():
            if owner in numbers:
                numbers[owner] = max(numbers[owner], *batch.host.pools[phase], -1)
        return {name: [self.compiled["zero", prefix + name]() for _ in range(n + 1)] for name, n in numbers.items()}

    def _encoder_grads(
        self, phase: str, params: Any, batch: DeviceStep, starts: list[Any], d_pools: list[jax.Array], grads: Any
    ) -> Any:
        run, host = self.compiled, batch.host
        for m, start in enumerate(starts):
            pool, at = host.pools[phase][m], np.int32(host.pool_offsets[phase][m])
            encode_grad = run["encode_grad", phase, host.capacities[phase][m]]
            grads = encode_grad(self._components(params, phase), start, d_pools[pool], at, grads)
        return grads

    # ------------------------------------------------------------------ checkpoints

    @property
    def saved_state(self) -> TrainState:
        """Shapes, types and shardings of the state as checkpoints hold it, on any mesh."""
        return self.state

    def to_saved(self, state: TrainState) -> TrainState:
        """The state as checkpoints hold it."""
        return state

    def from_saved(self, saved: TrainState) -> TrainState:
        """The state that `to_saved` was made of."""
        return saved

    # ------------------------------------------------------------------ compiling

    def _jobs(self, formats: Mapping[str, RowFormat]) -> dict[Any, Job]:
        jobs = self._common_jobs() | self._language_jobs(self.attention.blocks[LANGUAGE])
        for owner in dict.fromkeys(self.exchange_owner.values()):
            jobs |= self._exchange_jobs(owner)
        for phase in self.encoders:
            jobs |= self._encoder_jobs(phase, formats[phase], self.attention.blocks[phase])
        return jobs

    def _common_jobs(self) -> dict[Any, Job]:
        grads = {name: self.params[name] for phase in self.spec.phases for name in self.step.trainable_of(phase)}
        sums = self._abstract_sums()
        pool, failed = self.pools[LANGUAGE], self._scalar(np.int32)
        update = jax.eval_shape(self.step.update, self.state, grads, sums, self._scalar(), failed)[1]
        metrics = jax.tree.map(lambda leaf: self._replicated(leaf.shape, leaf.dtype), update)
        return {
            ("zero", LANGUAGE): _zeros(pool),
            ("zero", "d_language"): _zeros(pool.tokens),
            ("zero", "grads"): _zeros(grads),
            ("zero", "sums"): _zeros(sums),
            ("zero", "failed"): _zeros(failed),
            "totals": Job(
                lambda sums: jax.tree.map(lambda x: x.sum(0), sums),
                (sums,),
                jax.tree.map(lambda leaf: self._replicated(leaf.shape[1:], leaf.dtype), sums),
            ),
            "update": Job(
                self.step.update, (self.state, grads, sums, self._scalar(), failed), (self.state, metrics), (0,)
            ),
        }

    def _language_jobs(self, block: int) -> dict[Any, Job]:
        spec, layout = self.spec.phases[LANGUAGE], self.layouts[LANGUAGE]
        params, grads = self._components(self.params, LANGUAGE), self._grads(self.params, LANGUAGE)
        pool, sums = self.pools[LANGUAGE], self._abstract_sums()
        jobs: dict[Any, Job] = {}
        for capacity in spec.capacities:
            rows = abstract_language_rows(layout, capacity, spec.max_segments, block)
            jobs["decode", capacity] = Job(
                self.step.decode_and_grad,
                (params, rows, pool, self._scalar(), pool.tokens, grads, sums),
                (pool.tokens, grads, sums),
                (4, 5, 6),
            )
            jobs["evaluate", capacity] = Job(self.step.evaluate, (params, rows, pool, sums), sums, (3,))
        if capacity := spec.long_capacity:
            rows, home = abstract_language_rows(layout.long, capacity, spec.max_segments, block), self._scalar(np.int32)
            jobs["decode", capacity] = Job(
                self.step.decode_and_grad_long,
                (params, rows, pool, self._scalar(), pool.tokens, grads, sums, home),
                (pool.tokens, grads, sums),
                (4, 5, 6),
            )
            jobs["evaluate", capacity] = Job(self.step.evaluate_long, (params, rows, pool, sums, home), sums, (3,))
        return jobs

    def _exchange_jobs(self, phase: str) -> dict[Any, Job]:
        exchange, pool, language_pool = self.exchanges[phase], self.pools[phase], self.pools[LANGUAGE]
        send, pick, place, back, buffer, d_buffer = self._abstract_tables(phase)
        number = self._scalar(np.int32)
        jobs: dict[Any, Job] = {
            ("zero", phase): _zeros(pool),
            ("zero", "buffer", phase): _zeros(buffer),
            ("hop", phase): Job(exchange.hop, (pool, buffer, number, *send), buffer, (1,)),
            ("deliver", phase): Job(exchange.deliver, (pool, buffer, language_pool, pick), language_pool, (2,)),
        }
        if phase not in self._trained_exchanges:
            return jobs
        tokens, d_language, d_buffer = pool.tokens, language_pool.tokens, d_buffer.tokens
        return jobs | {
            ("zero", f"d_{phase}"): _zeros(tokens),
            ("zero", "d_buffer", phase): _zeros(d_buffer),
            ("hop_back", phase): Job(exchange.hop_back, (d_language, d_buffer, number, *place), d_buffer, (1,)),
            ("deliver_back", phase): Job(exchange.deliver_back, (d_language, d_buffer, tokens, back), tokens, (2,)),
        }

    def _encoder_jobs(self, phase: str, row_format: RowFormat, block: int) -> dict[Any, Job]:
        step, layout = self.step, self.layouts[phase]
        params, grads = self._components(self.params, phase), self._grads(self.params, phase)
        pool = self.pools[self.exchange_owner[phase]]
        at, failed = self._scalar(np.int32), self._scalar(np.int32)
        jobs: dict[Any, Job] = {}
        for capacity in self.spec.phases[phase].capacities:
            rows = abstract_encoder_rows(layout, capacity, row_format, block, phase in step.model.config.windows)

            def encode(*arguments: Any) -> Any:
                return step.encode(phase, *arguments)

            def encode_grad(*arguments: Any) -> Any:
                return step.encode_grad(phase, *arguments)

            features = jax.eval_shape(encode, params, rows, pool, at, failed)[1]
            if features is not None:
                kept: Any = features.features
                sharding = layout.sharding(("batch", "sequence"))
                kept = jax.ShapeDtypeStruct(kept.shape, kept.dtype, sharding=sharding)
                features = KeptFeatures(kept, rows.places)
            jobs["encode", phase, capacity] = Job(
                encode, (params, rows, pool, at, failed), (pool, features, failed), (2,)
            )
            if step.trainable_of(phase):
                start = rows if features is None else features
                jobs["encode_grad", phase, capacity] = Job(
                    encode_grad, (params, start, pool.tokens, at, grads), grads, (4,)
                )
        return jobs

    # ------------------------------------------------------------------ shapes

    def _components(self, params: Any, phase: str) -> Any:
        return {name: params[name] for name in self.step.model.phases[phase].components}

    def _grads(self, grads: Any, phase: str) -> Any:
        return {name: grads[name] for name in self.step.trainable_of(phase)}

    def _abstract_pools(self) -> dict[str, TokenPool]:
        language = self.step.model.components[LANGUAGE]
        width = self.step.model.config.language.width
        slots = {phase: route.encoder_pool for phase, route in self.spec.routes.items()}
        slots[LANGUAGE] = max((route.language_pool for route in self.spec.routes.values()), default=1)
        return {phase: abstract_pool(self.layouts[phase], slots[phase], width, language.dtype) for phase in slots}

    def route_metrics(self, statistics: Mapping[str, float]) -> dict[str, float]:
        """What the exchanges of a step move one way, of its plan statistics: `route/<owner>/bytes_moved` from rank
        to rank, padding and second legs included, and `route/<owner>/node_bytes` of tokens that change node."""
        metrics: dict[str, float] = {}
        for owner in dict.fromkeys(self.exchange_owner.values()):
            leaves = jax.tree.leaves(self.pools[owner])
            token_bytes = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in leaves)
            for name, amount in (("bytes_moved", "slots_moved"), ("node_bytes", "node_tokens")):
                if (key := f"route/{owner}/{amount}") in statistics:
                    metrics[f"route/{owner}/{name}"] = statistics[key] * token_bytes
        return metrics

    def _abstract_params(self) -> Any:
        return self.step.model.abstract(self.param_dtype)

    def _abstract_state(self, params: Any) -> TrainState:
        state = jax.eval_shape(self.step.init, params)
        optimizer = {
            name: optax.tree_utils.tree_map_params(
                make_optimizer(self.step.optimizer),
                lambda _, parameter: parameter,
                component,
                params[name],
                transform_non_params=lambda leaf: self._replicated(leaf.shape, leaf.dtype),
            )
            for name, component in state.optimizer.items()
        }
        counts = jax.tree.map(lambda _: self._scalar(np.int32), state._replace(params=None, optimizer=None))
        return counts._replace(params=params, optimizer=optimizer)

    def _abstract_sums(self) -> Sums:
        layout = self.layouts[LANGUAGE]
        array: Any = jax.ShapeDtypeStruct((layout.ranks, self.step.sources), self._real_dtype, sharding=layout.rows)
        return Sums(*(array for _ in Sums._fields))

    def _abstract_tables(self, phase: str) -> tuple[Any, ...]:
        """Shapes of what the exchange programs read: send, pick, place, back, and the buffers both ways."""
        route, sharding = self.spec.routes[phase], self.exchanges[phase].tables
        places, ranks = route.grid.shape[0], math.prod(route.grid.shape)

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((ranks, *shape), np.int32, sharding=sharding)

        def buffer(slots: int) -> TokenPool:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((ranks, slots, *leaf.shape[2:]), leaf.dtype, sharding=sharding),
                self.pools[phase],
            )

        encoder, language = ints(route.encoder_pool), ints(route.language_pool)
        padded, sizes = ints(places, route.pair_slots), ints(4, places)
        send, place = ((encoder, sizes), (language, sizes)) if route.backend == "ragged" else ((padded,), (padded,))
        return send, language, place, encoder, *(buffer(slots) for slots in route.buffers)

    @property
    def _trained_exchanges(self) -> tuple[str, ...]:
        """Phases whose exchange some phase wants gradients through."""
        trained = (owner for phase, owner in self.exchange_owner.items() if self.step.trainable_of(phase))
        return tuple(dict.fromkeys(trained))

    @property
    def _real_dtype(self) -> Any:
        """Losses and sums: float32, or float64 when the parameters are."""
        return jnp.promote_types(self.param_dtype, np.float32)

    def _scalar(self, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return self._replicated((), dtype or self._real_dtype)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P()))

    # ------------------------------------------------------------------ transfer

    def _put_row(self, phase: str, row: Mapping[str, Any], capacity: int) -> LanguageRows | EncoderRows:
        layout = self.layouts[phase]
        if capacity > self.spec.phases[phase].capacities[0]:
            layout = layout.long
        kind = LanguageRows if self.step.model.phases[phase].has_loss else EncoderRows
        put = lambda array, sharding: put_ranks(array, sharding, layout.ranks)  # noqa: E731
        local = kind.of(dict(row))
        return jax.tree.map(put, local, local.shardings(layout))

    def _put_tables(self, phase: str, round_: RouteTables) -> DeviceTables:
        sharding, ranks = self.exchanges[phase].tables, math.prod(self.spec.routes[phase].grid.shape)

        def put(table: np.ndarray) -> jax.Array:
            return put_ranks(table, sharding, ranks)

        def put_hops(hops: tuple[Hop, ...]) -> list[tuple[jax.Array, ...]]:
            return [tuple(put(table) for table in (hop.index, hop.sizes) if table is not None) for hop in hops]

        return DeviceTables(
            put_hops(round_.send_forward),
            put(round_.gather_forward),
            put_hops(round_.send_backward),
            put(round_.gather_backward),
        )


def local_ranks(sharding: NamedSharding, *shape: int) -> tuple[int, ...]:
    """Which ranks of an array [R, ...] of that shape this host must supply, ascending."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(sorted({_start(index) for index in indices}))


def put_ranks(local: np.ndarray, sharding: NamedSharding, ranks: int, axis: int = 0) -> jax.Array:
    """A global array with R ranks on an axis (one a device), of which this host holds those that `local_ranks` names.

    Args:
      local: this host's ranks, whole in all other axes.
      sharding: of the global array.
    """
    shape = (*local.shape[:axis], ranks, *local.shape[axis + 1 :])
    indices = sharding.addressable_devices_indices_map(shape).values()
    place = {rank: row for row, rank in enumerate(sorted({_start(index, axis) for index in indices}))}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        row = place[_start(index, axis)]
        before, after = (index or ())[:axis], (index or ())[axis + 1 :]
        return local[(*before, slice(row, row + 1), *after)]

    return jax.make_array_from_callback(shape, sharding, part)


def _start(index: tuple[slice, ...] | None, axis: int = 0) -> int:
    assert index is not None, "asked for a device of another host"
    return index[axis].start or 0


def _zeros(tree: Any) -> Job:
    return Job(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree), (), tree)
