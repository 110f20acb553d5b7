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

# Of encoder and language
LAYOUTS = ((["data", "fsdp"], ["data", "fsdp"]), (["data", "fsdp"], ["data"]))


def layout_pairs():
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    for encoder, language in LAYOUTS:
        yield LayoutPair(
            mesh, make_layout(mesh, {"batch": encoder}), make_layout(mesh, {"batch": language})
        )


def plan_on(pair: LayoutPair, backend: str) -> tuple[StepPlan, BatchItems, PlanSpec]:
    """A random batch, planned for a pair of layouts in a few rounds."""
    batch = random_batch(5, 24)
    grid = ExchangeGrid(*pair.grid())
    shapes = dict.fromkeys(ENCODERS, grid.shape)
    spec = spec_for(batch, shapes, classes=2, pool=64, pair=16, hops=6, backend=backend)
    routes = {phase: dataclasses.replace(route, grid=grid) for phase, route in spec.routes.items()}
    spec = dataclasses.replace(spec, routes=routes)
    return plan_step(batch, spec), batch, spec


def check(pair: LayoutPair, backend: str) -> tuple[int, int]:
    """Run the rounds of a random batch both ways on numbered tokens; the number of hops, and of tokens that cross from
    process to process."""
    plan, batch, spec = plan_on(pair, backend)
    route = spec.routes["vision"]
    exchange = Exchange(pair.mesh, pair.encoder, pair.language, BACKENDS[backend].hop_on_device)
    made, wanted, crossing = numbered_tokens(plan, batch, route, pair)
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
        for number, hop in enumerate(hops):
            buffer = move(source, buffer, np.int32(number), *(table(array) for array in hop.arrays))
        return finish(source, buffer, target, table(gather))

    there = exchange.language.rows
    back = exchange.encoder.rows
    arrived = {pool: whole(np.zeros_like(tokens), there) for pool, tokens in wanted.items()}
    returned = {pool: whole(np.zeros_like(tokens), back) for pool, tokens in made.items()}
    count = 0
    for round_ in plan.routes["vision"].rounds:
        tables = route_tables(round_, route, local)
        out = whole(made[round_.source], back)
        into = whole(wanted[round_.target], there)
        slots, slots_back = backend_of(route).buffer_slots(route)
        forward = (tables.send_forward, tables.gather_forward)
        backward = (tables.send_backward, tables.gather_backward)
        arrived[round_.target] = run(hop, deliver, *forward, out, arrived[round_.target], slots)
        returned[round_.source] = run(
            hop_back, deliver_back, *backward, into, returned[round_.source], slots_back
        )
        count += round_.hops
    for found, expected in ((arrived, wanted), (returned, made)):
        for pool, array in found.items():
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[pool][shard.index])
    return count, crossing


def numbered_tokens(plan: StepPlan, batch, route: RouteSpec, pair: LayoutPair):
    """Encoder pools [R, W, 2] and the language pools that they shall become, by pool number, and how many tokens
    change their process on the way."""
    language = plan.phases["language"]
    process = {
        layout: [device.process_index for device in layout.mesh.devices.flat][
            :: layout.mesh.size // layout.ranks
        ]
        for layout in (pair.encoder, pair.language)
    }
    made: dict[int, np.ndarray] = {}
    wanted: dict[int, np.ndarray] = {}
    crossing = label = 0
    for phase, per_token in ENCODERS.items():
        encoder = plan.phases[phase]
        items = batch.phases[phase]
        for item, example in enumerate(items.example.tolist()):
            m = encoder.microbatch[item]
            home = language.microbatch[example]
            tokens = int(items.tokens[item])
            source = int(encoder.rank[item])
            goal = int(language.rank[example])
            values = np.arange(label + 1, label + 1 + tokens)[:, None] * np.array(
                [1.0, 0.5], np.float32
            )
            label += tokens
            out = made.setdefault(
                int(encoder.pool[m]),
                np.zeros((pair.encoder.ranks, route.encoder_pool, 2), np.float32),
            )
            into = wanted.setdefault(
                int(language.pool[home]),
                np.zeros((pair.language.ranks, route.language_pool, 2), np.float32),
            )
            first = encoder.pool_offset[m] + encoder.offset[item] // per_token
            arrival = plan.routes[phase].arrival[item]
            out[source, first : first + tokens] = into[goal, arrival : arrival + tokens] = values
            crossing += tokens * (process[pair.encoder][source] != process[pair.language][goal])
    return made, wanted, crossing
