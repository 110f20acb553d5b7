"""Rows and the pools of their ranks, against plain loops over slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.mesh import make_mesh
from sharding.pools import add_to_first_rank, put_rows, take_rows
from sharding.rules import make_layout

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
WIDTH = 3


def rows_and_pool(seed=0, ranks=4, slots=9, capacity=12):
    """Each row takes seven slots of the pool of its rank, none twice, and has -1 elsewhere; the
    second row takes nothing."""
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


def test_put_rows_takes_the_place_of_what_take_rows_took():
    """Put into zeros, rows are the gradient of taking them; into a pool, they
    replace what was taken."""
    layout = make_layout(MESH)
    index, pool, d_rows = rows_and_pool(1)
    pulled = jax.vjp(lambda pool: take_rows(layout, pool, index), pool)[1](d_rows)[0]
    got = jax.jit(put_rows, static_argnums=0)(layout, d_rows, index, pool)
    want = np.zeros_like(pool)
    np.testing.assert_array_equal(put_rows(layout, d_rows, index, want), pulled)
    want = pool.copy()
    for rank, slot in np.ndindex(index.shape):
        if index[rank, slot] >= 0:
            want[rank, index[rank, slot]] = d_rows[rank, slot]
    np.testing.assert_array_equal(got, want)


def test_rows_of_another_dtype_are_put_in_the_pools():
    """The pool keeps its dtype; 0.03 allows for rounding rows to bfloat16."""
    index, pool, d_rows = rows_and_pool(2)
    got = put_rows(make_layout(MESH), d_rows.astype(jnp.bfloat16), index, pool)
    assert got.dtype == pool.dtype
    np.testing.assert_allclose(got, put_rows(make_layout(MESH), d_rows, index, pool), atol=0.03)


# ---------------------------------------------------------------------------- rows of several ranks

MESHES = [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "context": 2}]


def layouts(sizes):
    all_sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    return make_layout(make_mesh(all_sizes, spans=(1, 2, 4)))


@pytest.mark.parametrize("sizes", MESHES)
def test_a_shared_row_reads_the_pools_of_its_ranks(sizes):
    """A row of span g is g rows of one rank each, end to end."""
    layout = layouts(sizes)
    index, pool, d_rows = rows_and_pool(3, ranks=layout.ranks)
    take, put = (jax.jit(function, static_argnums=0) for function in (take_rows, put_rows))
    want = take(layout, pool, index)
    d_want = put(layout, d_rows, index, pool)
    for span in (2, 4):
        spanned = layout.spanned(span)
        shared = index.reshape(layout.groups // span, -1)
        got = take(spanned, pool, shared)
        np.testing.assert_array_equal(got.reshape(want.shape), want)
        d_shared = d_rows.reshape(*shared.shape, WIDTH)
        np.testing.assert_array_equal(put(spanned, d_shared, shared, pool), d_want)


@pytest.mark.parametrize("span", [1, 2, 4])
def test_sums_of_a_row_go_to_its_first_rank(span):
    layout = layouts({"data": 2, "fsdp": 2, "tensor": 2}).spanned(span)
    totals = np.random.default_rng(5).standard_normal((4, 3)).astype(np.float32)
    rows = np.ones((4 // span, 3), np.float32)
    got = jax.jit(add_to_first_rank, static_argnums=0)(layout, totals, rows)
    totals[::span] += rows
    np.testing.assert_array_equal(got, totals)
