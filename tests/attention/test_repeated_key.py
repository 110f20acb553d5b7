"""A key that every query sees several times over, against as many slots that hold it."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmllm.attention.attention import attention_and_logsumexp, with_repeated_key
from jaxmllm.attention.mask import Mask, TileLists, TokenIds, item_ids
from jaxmllm.attention.tiles import crossed_tiles, tile_lists

BLOCK = 4
SLOTS = 16
HEADS = 2
SIZE = 4
# Items by slot. Queries have three items, and item 2 has no keys. COUNTS says how often each query
# sees the repeated key.
QUERIES = np.array([0, 0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 3, 3, 3, 0, 0], np.int32)
KEYS = np.array([1, 1, 0, 0, 0, 0, 0, 3, 3, 3, 3, 0, 0, 0, 0, 0], np.int32)
COUNTS = np.where(QUERIES > 0, np.array([0, 3, 5, 0])[QUERIES], 0).astype(np.int32)


def on_device(ids: TokenIds) -> TokenIds:
    return ids.map(lambda column: jnp.asarray(column)[None])


def expected(q, k, v, own_key, own_value):
    """The dense formula, with the weight of every slot that would hold the repeated key,
    which all queries share."""
    visible = (QUERIES[:, None] == KEYS) & (QUERIES > 0)[:, None]
    logits = 0.3 * jnp.einsum("qhk,thk->qht", q, k)
    weights = jnp.where(visible[:, None], jnp.exp(logits), 0)
    repeated_weight = COUNTS[:, None] * jnp.exp(0.3 * (q * own_key).sum(axis=-1))
    total = (weights.sum(axis=-1) + repeated_weight)[..., None]
    out = jnp.einsum("qht,thk->qhk", weights, v) + repeated_weight[..., None] * own_value
    return out / jnp.where(total > 0, total, 1)


def test_a_repeated_key_is_as_many_slots():
    """Values and gradients in float64. Queries that see nothing else get its value, and queries
    that see nothing at all get zeros."""
    tables = tile_lists(crossed_tiles(QUERIES, KEYS, BLOCK), SLOTS // BLOCK, SLOTS // BLOCK)
    lists = jax.tree.map(lambda table: jnp.asarray(table)[None], (tables.queries, tables.keys))
    ids = on_device(item_ids(QUERIES)), on_device(item_ids(KEYS))
    mask = Mask(*ids, *(TileLists(*table) for table in lists))
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        arrays = [random.normal(size=(slots, HEADS, SIZE)) for slots in (*[SLOTS] * 3, 1, 1)]
        direction = np.random.default_rng(1).normal(size=(SLOTS, HEADS, SIZE))

        def found(*arrays):
            q, k, v, own_key, own_value = (jnp.asarray(x)[None] for x in arrays)
            attended = attention_and_logsumexp(q, k, v, mask, scale=0.3)
            return with_repeated_key(*attended, q, own_key, own_value, COUNTS[None], scale=0.3)[0]

        def with_gradients(function):
            def product(*arrays):
                out = function(*arrays)
                return (out * direction).sum(), out

            gradients = jax.value_and_grad(product, argnums=range(5), has_aux=True)
            (_, out), gradients_of_arrays = jax.jit(gradients)(*arrays)
            return out, *gradients_of_arrays

        results = (with_gradients(function) for function in (found, expected))
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


def test_tiles_are_those_of_the_mask():
    """A tile is listed if it has a visible pair, and is full if all its pairs are visible."""
    queries = np.repeat([1, 0, 2, 0], [6, 4, 5, 1]).astype(np.int32)
    keys = np.repeat([0, 1, 2], [6, 4, 6]).astype(np.int32)
    for documents in ((queries, keys), (QUERIES, KEYS), (np.zeros_like(QUERIES), KEYS)):
        tiles = crossed_tiles(*documents, 2)
        visible = (documents[0][:, None] == documents[1]) & (documents[0] > 0)[:, None]
        pairs = visible.reshape(SLOTS // 2, 2, SLOTS // 2, 2).sum(axis=(1, 3))
        assert sorted(zip(tiles.query, tiles.key, strict=True)) == list(
            zip(*np.nonzero(pairs), strict=True)
        )
        assert (tiles.full == (pairs[tiles.query, tiles.key] == 4)).all()
