"""The exchange on devices against plain loops over tokens, on every geometry of
encoder and language ranks."""

import functools
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmllm.balance.exchange.padded import PADDED
from jaxmllm.balance.exchange.ragged import RAGGED
from sharding.exchange import Exchange
from sharding.mesh import make_mesh
from sharding.rules import make_layout

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
WIDTH = 3
ENCODER_SLOTS = 10
LANGUAGE_SLOTS = 14
HOPS = 3
PAIRS = 20
BUFFER = {shared: HOPS * shared * PAIRS for shared in (1, 2, 4)}
GEOMETRIES = {  # encoder batch axes, language batch axes, (A, E, L)
    "shared": (["data", "fsdp"], ["data", "fsdp"], (4, 1, 1)),
    "encoder_has_more": (["data", "fsdp", "tensor"], ["data", "fsdp"], (4, 2, 1)),
    "language_has_more": (["data"], ["data", "fsdp"], (2, 1, 2)),
    "both_have_own": (["fsdp", "tensor"], ["data", "fsdp"], (2, 2, 2)),
    "nothing_shared": (["tensor"], ["data", "fsdp"], (1, 2, 4)),
    "one_encoder_rank": ([], ["data"], (1, 1, 2)),
}


@dataclass(frozen=True)
class Case:
    """Random moves (encoder rank, slot) -> (language rank, slot), each slot at most once, and the
    tables that make them."""

    exchange: Exchange
    moves: list[tuple[int, int, int, int]]
    send_forward: np.ndarray  # [H, X, A, Q]
    gather_forward: np.ndarray
    send_backward: np.ndarray  # [H, X, A, Q]
    gather_backward: np.ndarray

    def buffers(self, pool):
        return jax.tree.map(
            lambda x: np.zeros(
                (len(self.gather_forward), BUFFER[self.pairs], *x.shape[2:]), x.dtype
            ),
            pool,
        )

    @property
    def pairs(self):
        return self.send_forward.shape[2]

    @cached_property
    def forward(self):
        """The compiled exchange from encoder pools to language pools."""
        return jax.jit(
            functools.partial(
                self._run,
                self.exchange.hop,
                self.exchange.deliver,
                self.send_forward,
                self.gather_forward,
            )
        )

    @cached_property
    def transposed(self):
        """The compiled exchange of gradients, from language pools to encoder pools."""
        hop = self.exchange.hop_back
        deliver = self.exchange.deliver_back
        return jax.jit(
            functools.partial(self._run, hop, deliver, self.send_backward, self.gather_backward)
        )

    def _run(self, hop, deliver, hops, gather, source, target):
        buffer = self.buffers(source)
        for hop_index, index in enumerate(hops):
            buffer = hop(source, buffer, hop_index, index)
        return deliver(source, buffer, target, gather)


def make_case(name, seed=0):
    """Tables as balance/records.py documents them, filled one token at a time.

    Tokens that change their exchange rank go straight in a random hop, or, every other one, in two
    hops by a random third rank.
    """
    encoder_axes, language_axes, (shared, encoder_only, language_only) = GEOMETRIES[name]
    layouts = (
        make_layout(MESH, {"batch": encoder_axes}),
        make_layout(MESH, {"batch": language_axes}),
    )
    exchange = Exchange(MESH, *layouts, PADDED.hop_on_device)
    encoder_grid, language_grid = exchange.grid()
    assert encoder_grid.shape == (shared, encoder_only) and language_grid.shape == (
        shared,
        language_only,
    )
    rng = np.random.default_rng(seed)
    sources = rng.permutation(
        [(r, s) for r in range(encoder_grid.size) for s in range(ENCODER_SLOTS)]
    )
    targets = rng.permutation(
        [(r, s) for r in range(language_grid.size) for s in range(LANGUAGE_SLOTS)]
    )
    move_count = 4 * min(len(sources), len(targets)) // 5
    moves = np.concatenate([sources[:move_count], targets[:move_count]], axis=1).tolist()

    ranks = shared * encoder_only * language_only
    buffer = BUFFER[shared]
    send, place = np.full((2, HOPS, ranks, shared, PAIRS), -1, np.int32)
    gather = np.full((ranks, LANGUAGE_SLOTS), -1, np.int32)
    gather_back = np.full((ranks, ENCODER_SLOTS), -1, np.int32)
    used = np.zeros((HOPS, ranks, shared), int)
    encoder_place = {int(rank): place for place, rank in np.ndenumerate(encoder_grid)}
    language_place = {int(rank): place for place, rank in np.ndenumerate(language_grid)}

    def at(block, e, n):
        return (block * encoder_only + e) * language_only + n

    def chunk_slot(hop, sender, to):
        used[hop, sender, to] += 1
        return hop, used[hop, sender, to] - 1

    def received(hop, block, slot):
        return (hop * shared + block) * PAIRS + slot

    for move_index, (encoder_rank, slot, language_rank, arrival) in enumerate(moves):
        (a, e), (b, n) = encoder_place[encoder_rank], language_place[language_rank]
        sender = at(a, e, n)
        receiver = at(b, e, n)
        relays = [c for c in range(shared) if c not in (a, b)]
        if a == b:
            gather[receiver, arrival], gather_back[sender, slot] = buffer + slot, buffer + arrival
        elif move_index % 2 or not relays:
            h, s = chunk_slot(int(rng.integers(HOPS)), sender, b)
            send[h, sender, b, s], gather[receiver, arrival] = slot, received(h, a, s)
            t = HOPS - 1 - h
            place[t, receiver, a, s], gather_back[sender, slot] = arrival, received(t, b, s)
        else:
            c = int(rng.choice(relays))
            h, s = chunk_slot(0, sender, c)
            k, u = chunk_slot(int(rng.integers(1, HOPS)), at(c, e, n), b)
            send[h, sender, c, s] = slot
            send[k, at(c, e, n), b, u] = ENCODER_SLOTS + received(h, a, s)
            gather[receiver, arrival] = received(k, c, u)
            place[HOPS - 1 - k, receiver, c, u] = arrival
            place[HOPS - 1 - h, at(c, e, n), a, s] = LANGUAGE_SLOTS + received(HOPS - 1 - k, b, u)
            gather_back[sender, slot] = received(HOPS - 1 - h, c, s)
    return Case(exchange, moves, send, gather, place, gather_back)


@pytest.fixture(scope="module", params=GEOMETRIES)
def case(request):
    return make_case(request.param)


def pools(case, seed):
    """(tokens, valid) of the encoder ranks and of the language ranks."""
    rng = np.random.default_rng(seed)
    for layout, slots in (
        (case.exchange.encoder, ENCODER_SLOTS),
        (case.exchange.language, LANGUAGE_SLOTS),
    ):
        tokens = rng.standard_normal((layout.ranks, slots, WIDTH)).astype(np.float32)
        yield tokens, rng.integers(0, 9, (layout.ranks, slots)).astype(np.int32)


def test_forward_brings_every_token_to_its_slot(case):
    encoder, language = pools(case, 1)
    want = [x.copy() for x in language]
    for rank, slot, target, arrival in case.moves:
        for pool, values in zip(want, encoder, strict=True):
            pool[target, arrival] += values[rank, slot]
    for got, expected in zip(case.forward(encoder, language), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_transposed_brings_every_gradient_back(case):
    encoder, language = pools(case, 2)
    want = encoder[0].copy()
    for rank, slot, target, arrival in case.moves:
        want[rank, slot] += language[0][target, arrival]
    np.testing.assert_array_equal(case.transposed(language[0], encoder[0]), want)


def test_transposed_is_the_derivative_of_forward(case):
    """Against jax.vjp, which derives the transposed direction from the forward tables."""
    (encoder, _), (language, _) = pools(case, 3)

    @jax.jit
    def pullback(encoder, d_language):
        zeros = jnp.zeros_like(d_language)
        return jax.vjp(lambda pool: case.forward(pool, zeros), encoder)[1](d_language)[0]

    want = pullback(encoder, language)
    got = case.transposed(language, np.zeros_like(encoder))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_garbage_in_unused_slots_stays_there():
    """NaN in slots that no token uses must not reach any pool."""
    case = make_case("both_have_own")
    (encoder, _), (language, _) = pools(case, 4)
    used = {(rank, slot) for rank, slot, _, _ in case.moves}
    for rank, slot in np.ndindex(encoder.shape[:2]):
        if (rank, slot) not in used:
            encoder[rank, slot] = np.nan
    assert np.isfinite(case.forward(encoder, language)).all()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", ["shared", "both_have_own"])
def test_lowers_for_gpus_from_a_machine_without_one(name, ragged):
    """Both backends in both directions, with shapes alone, since nothing runs."""
    case = make_case(name)
    hop_on_device = RAGGED.hop_on_device if ragged else PADDED.hop_on_device
    exchange = Exchange(MESH, case.exchange.encoder, case.exchange.language, hop_on_device)
    shared = case.pairs
    ranks = len(case.gather_forward)
    for hop, deliver, layout, target_layout, slots, arrivals in (
        (
            exchange.hop,
            exchange.deliver,
            exchange.encoder,
            exchange.language,
            ENCODER_SLOTS,
            LANGUAGE_SLOTS,
        ),
        (
            exchange.hop_back,
            exchange.deliver_back,
            exchange.language,
            exchange.encoder,
            LANGUAGE_SLOTS,
            ENCODER_SLOTS,
        ),
    ):
        source = jax.ShapeDtypeStruct(
            (layout.ranks, slots, WIDTH), np.float32, sharding=layout.rows
        )
        target = jax.ShapeDtypeStruct(
            (target_layout.ranks, arrivals, WIDTH), np.float32, sharding=target_layout.rows
        )

        def table(*shape, dtype=np.int32):
            return jax.ShapeDtypeStruct((ranks, *shape), dtype, sharding=exchange.tables)

        buffer = table(arrivals if ragged else BUFFER[shared], WIDTH, dtype=np.float32)
        tables = (table(slots), table(4, shared)) if ragged else (table(shared, PAIRS),)

        def run(source, buffer, target, gather, *tables, hop=hop, deliver=deliver):
            return deliver(source, hop(source, buffer, 0, *tables), target, gather)

        lowered = (
            jax.jit(run)
            .trace(source, buffer, target, table(arrivals), *tables)
            .lower(lowering_platforms=("cuda",))
        )
        assert ("ragged_all_to_all" if ragged else "all_to_all") in lowered.as_text()
