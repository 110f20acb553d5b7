"""The exchange of a random batch on real devices, against plain loops over its tokens."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxmllm.balance.exchange.tables import BACKENDS, backend_of, route_tables
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PlanSpec, RouteSpec, StepPlan
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.training.programs.transfer import local_ranks
from sharding.exchange import Exchange, LayoutPair
from sharding.mesh import make_mesh
from sharding.rules import make_layout
from tests.balance.conftest import ENCODERS, random_batch, spec_for

# Mesh axes over which the batch is split: (encoder, language).
LAYOUTS = ((["data", "fsdp"], ["data", "fsdp"]), (["data", "fsdp"], ["data"]))


def layout_pairs():
    """Pairs of layouts on four devices: the first with equal ranks of encoder and language, the
    second with two encoder ranks per language rank."""
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    for encoder, language in LAYOUTS:
        yield LayoutPair(
            mesh, make_layout(mesh, {"batch": encoder}), make_layout(mesh, {"batch": language})
        )


def plan_on(pair: LayoutPair, backend: str) -> tuple[StepPlan, BatchItems, PlanSpec]:
    """A random batch and its plan for a pair of layouts, with sizes so small that it
    takes several rounds."""
    batch = random_batch(5, 24)
    grid = ExchangeGrid(*pair.grid())
    shapes = dict.fromkeys(ENCODERS, grid.shape)
    spec = spec_for(batch, shapes, classes=2, pool=64, pair=16, hops=6, backend=backend)
    routes = {phase: dataclasses.replace(route, grid=grid) for phase, route in spec.routes.items()}
    spec = dataclasses.replace(spec, routes=routes)
    return plan_step(batch, spec), batch, spec


def check(pair: LayoutPair, backend: str) -> tuple[int, int]:
    """Run the rounds of a random batch in both directions on numbered tokens, and compare every
    pool. Returns the number of hops, and of tokens that cross from one process to another."""
    plan, batch, spec = plan_on(pair, backend)
    route = spec.routes["vision"]
    exchange = Exchange(pair.mesh, pair.encoder, pair.language, BACKENDS[backend].hop_on_device)
    encoder_pools, language_pools, crossing_tokens = numbered_tokens(plan, batch, route, pair)
    local = local_ranks(exchange.tables, route.grid.ranks)
    hop = jax.jit(exchange.hop)
    hop_back = jax.jit(exchange.hop_back)
    deliver = jax.jit(exchange.deliver)
    deliver_back = jax.jit(exchange.deliver_back)

    def whole(array, sharding):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def table(own):
        return jax.make_array_from_process_local_data(
            exchange.tables, own, (route.grid.ranks, *own.shape[1:])
        )

    def run(move, finish, hops, gather, source, target, slots):
        buffer = whole(
            np.zeros((route.grid.ranks, slots, source.shape[2]), np.float32), exchange.tables
        )
        for hop_index, hop in enumerate(hops):
            buffer = move(
                source, buffer, np.int32(hop_index), *(table(array) for array in hop.arrays)
            )
        return finish(source, buffer, target, table(gather))

    language_sharding = exchange.language.rows
    encoder_sharding = exchange.encoder.rows
    received_tokens = {
        pool: whole(np.zeros_like(tokens), language_sharding)
        for pool, tokens in language_pools.items()
    }
    received_gradients = {
        pool: whole(np.zeros_like(tokens), encoder_sharding)
        for pool, tokens in encoder_pools.items()
    }
    hop_count = 0
    for round_ in plan.routes["vision"].rounds:
        tables = route_tables(round_, route, local)
        encoder_source = whole(encoder_pools[round_.source], encoder_sharding)
        language_source = whole(language_pools[round_.target], language_sharding)
        slots, slots_back = backend_of(route).buffer_slots(route)
        forward = (tables.send_forward, tables.gather_forward)
        backward = (tables.send_backward, tables.gather_backward)
        received_tokens[round_.target] = run(
            hop, deliver, *forward, encoder_source, received_tokens[round_.target], slots
        )
        received_gradients[round_.source] = run(
            hop_back,
            deliver_back,
            *backward,
            language_source,
            received_gradients[round_.source],
            slots_back,
        )
        hop_count += round_.hops
    for received, expected in (
        (received_tokens, language_pools),
        (received_gradients, encoder_pools),
    ):
        for pool, array in received.items():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[pool][shard.index])
    return hop_count, crossing_tokens


def numbered_tokens(plan: StepPlan, batch, route: RouteSpec, pair: LayoutPair):
    """Encoder pools [R, W, 2] and the language pools that the exchange must turn them into, each by
    pool number, and how many tokens change their process on the way."""
    language = plan.phases["language"]
    process = {
        layout: [device.process_index for device in layout.mesh.devices.flat][
            :: layout.mesh.size // layout.ranks
        ]
        for layout in (pair.encoder, pair.language)
    }
    encoder_pools: dict[int, np.ndarray] = {}
    language_pools: dict[int, np.ndarray] = {}
    crossing_tokens = label = 0
    for phase, per_token in ENCODERS.items():
        encoder = plan.phases[phase]
        items = batch.phases[phase]
        for item, example in enumerate(items.example.tolist()):
            microbatch = encoder.microbatch[item]
            language_microbatch = language.microbatch[example]
            tokens = int(items.tokens[item])
            source = int(encoder.rank[item])
            target = int(language.rank[example])
            # Two features per token: its number, and half of it.
            values = np.arange(label + 1, label + 1 + tokens)[:, None] * np.array(
                [1.0, 0.5], np.float32
            )
            label += tokens
            encoder_pool = encoder_pools.setdefault(
                int(encoder.pool[microbatch]),
                np.zeros((pair.encoder.ranks, route.encoder_pool, 2), np.float32),
            )
            language_pool = language_pools.setdefault(
                int(language.pool[language_microbatch]),
                np.zeros((pair.language.ranks, route.language_pool, 2), np.float32),
            )
            start = encoder.pool_offset[microbatch] + encoder.offset[item] // per_token
            arrival = plan.routes[phase].arrival[item]
            encoder_pool[source, start : start + tokens] = language_pool[
                target, arrival : arrival + tokens
            ] = values
            crossing_tokens += tokens * (
                process[pair.encoder][source] != process[pair.language][target]
            )
    return encoder_pools, language_pools, crossing_tokens
