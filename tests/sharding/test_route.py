"""The exchange against plain loops over tokens, on every geometry of encoder and language ranks."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.route import Exchange, put_rows, take_rows
from sharding.rules import make_layout

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
WIDTH, ENCODER_SLOTS, LANGUAGE_SLOTS = 3, 10, 14
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
    """Random moves (encoder rank, slot) -> (language rank, slot), each slot at most once, and their tables."""

    exchange: Exchange
    moves: list[tuple[int, int, int, int]]
    send: np.ndarray
    pick: np.ndarray
    place: np.ndarray
    back: np.ndarray

    @cached_property
    def forward(self):
        return jax.jit(self.exchange.forward)

    @cached_property
    def transposed(self):
        return jax.jit(self.exchange.transposed)


def make_case(name, seed=0):
    """The tables as balance/plan.py documents them, filled one token at a time."""
    encoder_axes, language_axes, (shared, encoder_only, language_only) = GEOMETRIES[name]
    exchange = Exchange(MESH, make_layout(MESH, {"batch": encoder_axes}), make_layout(MESH, {"batch": language_axes}))
    encoder_grid, language_grid = exchange.grid()
    assert encoder_grid.shape == (shared, encoder_only) and language_grid.shape == (shared, language_only)
    rng = np.random.default_rng(seed)
    sources = rng.permutation([(r, s) for r in range(encoder_grid.size) for s in range(ENCODER_SLOTS)])
    targets = rng.permutation([(r, s) for r in range(language_grid.size) for s in range(LANGUAGE_SLOTS)])
    count = 4 * min(len(sources), len(targets)) // 5
    moves = np.concatenate([sources[:count], targets[:count]], axis=1).tolist()

    ranks, pairs = shared * encoder_only * language_only, ENCODER_SLOTS
    send, place = np.full((2, ranks, shared, pairs), -1, np.int32)
    pick = np.full((ranks, LANGUAGE_SLOTS), -1, np.int32)
    back = np.full((ranks, ENCODER_SLOTS), -1, np.int32)
    used = np.zeros((ranks, shared), int)
    encoder_place = {int(rank): place for place, rank in np.ndenumerate(encoder_grid)}
    language_place = {int(rank): place for place, rank in np.ndenumerate(language_grid)}
    for encoder_rank, slot, language_rank, arrival in moves:
        (a, e), (b, l) = encoder_place[encoder_rank], language_place[language_rank]  # noqa: E741
        sender, receiver = ((x * encoder_only + e) * language_only + l for x in (a, b))
        pair = used[sender, b]
        used[sender, b] += 1
        send[sender, b, pair], pick[receiver, arrival] = slot, a * pairs + pair
        place[receiver, a, pair], back[sender, slot] = arrival, b * pairs + pair
    return Case(exchange, moves, send, pick, place, back)


@pytest.fixture(scope="module", params=GEOMETRIES)
def case(request):
    return make_case(request.param)


def pools(case, seed):
    """(tokens, valid) of the encoder ranks and of the language ranks."""
    rng = np.random.default_rng(seed)
    for layout, slots in ((case.exchange.encoder, ENCODER_SLOTS), (case.exchange.language, LANGUAGE_SLOTS)):
        tokens = rng.standard_normal((layout.ranks, slots, WIDTH)).astype(np.float32)
        yield tokens, rng.integers(0, 9, (layout.ranks, slots)).astype(np.int32)


def test_forward_brings_every_token_to_its_slot(case):
    encoder, language = pools(case, 1)
    want = [x.copy() for x in language]
    for rank, slot, target, arrival in case.moves:
        for into, values in zip(want, encoder, strict=True):
            into[target, arrival] += values[rank, slot]
    for got, expected in zip(case.forward(encoder, language, case.send, case.pick), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_transposed_brings_every_gradient_back(case):
    encoder, language = pools(case, 2)
    want = encoder[0].copy()
    for rank, slot, target, arrival in case.moves:
        want[rank, slot] += language[0][target, arrival]
    got = case.transposed(language[0], encoder[0], case.place, case.back)
    np.testing.assert_array_equal(got, want)


def test_transposed_is_the_derivative_of_forward(case):
    (encoder, _), (language, _) = pools(case, 3)

    @jax.jit
    def pullback(encoder, d_language):
        zeros = jnp.zeros_like(d_language)
        return jax.vjp(lambda pool: case.exchange.forward(pool, zeros, case.send, case.pick), encoder)[1](d_language)[0]

    got = case.transposed(language, np.zeros_like(encoder), case.place, case.back)
    np.testing.assert_allclose(got, pullback(encoder, language), rtol=1e-6, atol=1e-6)


def test_one_program_serves_every_table(case):
    encoder, language = pools(case, 4)
    empty = np.full_like(case.send, -1), np.full_like(case.pick, -1)
    for got, expected in zip(case.forward(encoder, language, *empty), language, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert case.forward._cache_size() == 1


def test_values_that_are_not_sent_do_no_harm():
    case = make_case("encoder_has_more")
    (encoder, _), (language, _) = pools(case, 5)
    moved = {(rank, slot) for rank, slot, *_ in case.moves}
    for rank in range(len(encoder)):
        for slot in range(ENCODER_SLOTS):
            if (rank, slot) not in moved:
                encoder[rank, slot] = np.nan
    assert np.isfinite(case.forward(encoder, language, case.send, case.pick)).all()


def test_lowers_for_gpus_from_a_machine_without_one():
    case = make_case("both_have_own")
    encoder, language = pools(case, 6)
    lowered = case.forward.trace(encoder, language, case.send, case.pick).lower(lowering_platforms=("cuda",))
    assert "all_to_all" in lowered.as_text()


# ---------------------------------------------------------------------------- rows


def rows_and_pool(seed=0, ranks=4, slots=9, capacity=12):
    """Each row takes some slots of its own rank's pool, none twice; -1 elsewhere."""
    rng = np.random.default_rng(seed)
    index = np.full((ranks, capacity), -1, np.int32)
    for row in index:
        row[rng.permutation(capacity)[:7]] = rng.permutation(slots)[:7]
    index[1] = -1
    draw = lambda n: rng.standard_normal((ranks, n, WIDTH)).astype(np.float32)  # noqa: E731
    return index, draw(slots), draw(capacity)


def test_take_rows_is_a_lookup_in_the_ranks_own_pool():
    index, pool, _ = rows_and_pool()
    got = jax.jit(take_rows, static_argnums=0)(make_layout(MESH), pool, index)
    for rank, slot in np.ndindex(index.shape):
        want = pool[rank, index[rank, slot]] if index[rank, slot] >= 0 else np.zeros(WIDTH)
        np.testing.assert_array_equal(got[rank, slot], want)


def test_put_rows_is_the_transpose_of_take_rows():
    layout = make_layout(MESH)
    index, pool, d_rows = rows_and_pool(1)
    pulled = jax.vjp(lambda pool: take_rows(layout, pool, index), pool)[1](d_rows)[0]
    got = jax.jit(put_rows, static_argnums=0)(layout, d_rows, index, pool)
    np.testing.assert_allclose(got, pool + pulled, rtol=0, atol=1e-6)
    want = pool.copy()
    for rank, slot in np.ndindex(index.shape):
        if index[rank, slot] >= 0:
            want[rank, index[rank, slot]] += d_rows[rank, slot]
    np.testing.assert_array_equal(got, want)


def test_rows_of_another_dtype_are_added_in_the_pools():
    index, pool, d_rows = rows_and_pool(2)
    got = put_rows(make_layout(MESH), d_rows.astype(jnp.bfloat16), index, pool)
    assert got.dtype == pool.dtype
    np.testing.assert_allclose(got, put_rows(make_layout(MESH), d_rows, index, pool), atol=0.03)
