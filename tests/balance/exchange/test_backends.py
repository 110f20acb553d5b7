"""A backend is one object: a third way to exchange tokens, known by its entry in the table alone,
delivers the same tokens as the others."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxmllm.arrays import running_sums
from jaxmllm.balance.exchange.backend import Backend, Stretches, fill, take, tokens_of
from jaxmllm.balance.exchange.padded import PADDED, choose_pair_slots
from jaxmllm.balance.exchange.ragged import RAGGED
from jaxmllm.balance.exchange.tables import BACKENDS, backend_for
from jaxmllm.balance.records import Hop, RouteSpec, RouteTables
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.balance.validate_plan import validate
from jaxmllm.tools.sample_data import make_sample
from sharding.pools import gather_either
from tests.balance.exchange.on_devices import check, layout_pairs
from tests.support import assemble, assert_same, tiny_config


class Gathered(Backend):
    """A backend in which every rank receives the whole pools of its peers and picks the
    tokens that it needs."""

    ragged = False

    def available(self, platform):
        return True

    def spread(self, sender, receiver, tokens, route):
        zeros = np.zeros_like(tokens)
        ordinal = running_sums(sender * route.grid.ranks + receiver, tokens)
        hops = [(int(len(tokens) > 0), 0)]
        return Stretches(zeros, np.arange(len(tokens)), zeros, tokens, tokens > 0, ordinal, hops, 0)

    def tables(self, round_, route, local, ranks):
        """Index tables of a round: whole pools are sent, and the gathers pick each token where its
        pool lies in the buffer."""
        stretch, step = tokens_of(np.arange(len(round_.tokens)), round_.tokens)
        sender = round_.sender[stretch].astype(int)
        receiver = round_.receiver[stretch].astype(int)
        start = round_.start[stretch] + step
        arrival = round_.arrival[stretch] + step
        moves, (forward_slots, backward_slots) = sender != receiver, self.buffer_slots(route)
        # The buffer holds the pools of all peers one after another.
        arrives = sender // route.grid.groups * route.encoder_pool + start
        returns = receiver // route.grid.groups * route.language_pool + arrival
        gathers = [
            np.full((len(ranks), slots), -1, np.int32)
            for slots in (route.language_pool, route.encoder_pool)
        ]
        fill(
            gathers[0],
            local[receiver],
            True,
            arrival,
            # Tokens that stay on their rank are read from its own pool, which follows the buffer.
            np.where(moves, arrives, forward_slots + start),
        )
        fill(
            gathers[1],
            local[sender],
            True,
            start,
            np.where(moves, returns, backward_slots + arrival),
        )
        send, send_back = (
            self._whole_pool(len(ranks), slots)
            for slots in (route.encoder_pool, route.language_pool)
        )
        return RouteTables(
            round_.source,
            round_.target,
            (send,) * round_.hops,
            gathers[0],
            (send_back,) * round_.hops,
            gathers[1],
        )

    def _whole_pool(self, ranks, slots):
        return Hop(np.tile(np.arange(slots, dtype=np.int32), (ranks, 1)))

    def buffer_slots(self, route):
        return route.grid.peers * route.encoder_pool, route.grid.peers * route.language_pool

    def hop_shapes(self, route, pool_slots):
        return ((pool_slots,),)

    def slots_moved(self, rounds, route):
        return (
            sum(round_.hops for round_ in rounds)
            * route.grid.ranks
            * (route.grid.peers - 1)
            * route.encoder_pool
        )

    def hop_on_host(self, source, buffer, number, hop, route):
        pools = take(np.concatenate([source, buffer], axis=1), hop.index).reshape(
            route.grid.peers, route.grid.groups, -1
        )
        for rank in range(len(source)):
            buffer[rank] = pools[:, rank % route.grid.groups].reshape(-1)

    def hop_on_device(self, pool, buffer, number, tables, axes):
        sent = gather_either(pool, buffer, tables[0])
        return jax.lax.all_gather(sent, axes, axis=0, tiled=True) if axes else sent


@pytest.fixture
def gathered(monkeypatch):
    monkeypatch.setitem(BACKENDS, "gathered", Gathered())


@pytest.mark.parametrize(
    "grid", [(1, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (1, 4, 1), (3, 2, 1)]
)
def test_every_backend_delivers_all_tokens_and_gradients(make, gathered, grid):
    """`validate` runs the tables of all ranks, both ways, on numbered tokens."""
    batch = make.batch(7, 24)
    arrivals = []
    for backend in BACKENDS:
        spec = make.spec(
            batch,
            {"vision": grid, "audio": grid},
            classes=2,
            pool=64,
            pair=8,
            hops=6,
            backend=backend,
        )
        plan = plan_step(batch, spec)
        validate(plan, batch, spec)
        arrivals.append([plan.routes[phase].arrival.tolist() for phase in spec.routes])
        assert (
            plan.statistics["route/vision/slots_moved"]
            >= plan.statistics["route/vision/moved_tokens"]
        )
    assert len(arrivals) > 2 and all(arrival == arrivals[0] for arrival in arrivals)


def test_a_wrong_table_of_any_backend_is_found(make, gathered, monkeypatch):
    """A backend that gathers nothing must not pass validation."""

    class Forgetful(Gathered):
        def tables(self, *arguments, **local):
            tables = super().tables(*arguments, **local)
            return dataclasses.replace(
                tables, gather_forward=np.full_like(tables.gather_forward, -1)
            )

    monkeypatch.setitem(BACKENDS, "forgetful", Forgetful())
    batch = make.batch(7, 24)
    spec = make.spec(batch, {"vision": (4, 1, 1), "audio": (4, 1, 1)}, pool=64, backend="forgetful")
    with pytest.raises(ValueError, match="every token"):
        validate(plan_step(batch, spec), batch, spec)


def test_backends_for_cpus_deliver_on_devices(gathered):
    """The exchange as XLA runs it, on real arrays."""
    for pair in layout_pairs():
        for name in (name for name, backend in BACKENDS.items() if backend.available("cpu")):
            hops, _ = check(pair, name)
            assert hops


def test_auto_takes_the_first_backend_that_the_platform_has(gathered):
    """`ragged` precedes the others, but has no implementation for CPUs."""
    assert (backend_for("gpu"), backend_for("tpu"), backend_for("cpu")) == (
        "ragged",
        "ragged",
        "padded",
    )


@pytest.mark.slow
def test_a_run_exchanges_by_the_backend_that_its_config_names(tmp_path, gathered):
    """Sizes, tables, programs and gradients of a whole step agree between two backends."""
    make_sample(tmp_path, train=96, test=24)
    results = []
    for backend in ("padded", "gathered"):
        setup = assemble(tiny_config(tmp_path, balance__exchange=backend), 8)
        assert setup.spec.routes["vision"].backend == backend
        results.append(setup.gradients(setup.step(range(16))))
    assert_same(*results, 1e-6)


def test_where_nothing_can_move_buffers_have_a_slot_for_each_hop(make):
    """A grid with one peer moves nothing, so buffers must not grow with the
    pools of 9000 tokens."""
    zeros = np.zeros(0, np.int64)
    for shape in ((1, 1, 1), (1, 2, 2)):
        grid = make.grid(shape)
        slots = choose_pair_slots([(zeros, zeros, zeros)], grid, longest=9000)
        route = RouteSpec(grid, encoder_pool=9000, language_pool=9000, pair_slots=slots)
        assert PADDED.buffer_slots(route) == (route.hops, route.hops)
        assert RAGGED.buffer_slots(route) == (1, 1)
