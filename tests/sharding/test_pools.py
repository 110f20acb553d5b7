"""Rows and their ranks' pools, against plain loops over slots."""

import jax
import jax.numpy as jnp
import numpy as np

from sharding.mesh import make_mesh
from sharding.pools import put_rows, take_rows
from sharding.rules import make_layout

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
WIDTH = 3


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
