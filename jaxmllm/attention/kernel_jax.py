"""Tile-list attention in plain JAX, for every platform.

    forward     for each query block: for listed key blocks:     maximum, total, out   -> out, logsumexp
    backward    for each key block: for listed query blocks:     dk, dv, and dq in place

Both are plain sequential loops, hence deterministic. Their bounds are data, and blocks that meet no
others are skipped: blocks of padding and, in rows that several devices hold, blocks that no query
of this device sees. Masks are made only for tiles that are partly visible. Rows are end to end in
one list of blocks, so they need no loop of their own.

Letters: B rows, C query slots, T key slots, H query heads, G key heads, K head size, b slots of a
block, N = B * C / b query blocks, P = B * T / b key blocks, M = H / G * b queries of a block that
share one key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxmllm.attention.mask import Mask, TileLists, TokenIds, visible

# Part of the names that operations of this file have in a compiled program
LOOP_SCOPE = "attention_loop"


@jax.named_scope(LOOP_SCOPE)
def forward(scale: float, q: Array, k: Array, v: Array, mask: Mask) -> tuple[Array, Array]:
    """q [B, C, H, K], k and v [B, T, G, K] -> out [B, C, H, K] and logsumexp [B, C, H] of the
    visible logits, infinite where nothing is visible."""
    dtype = _sum_dtype(q)
    block = mask.block
    key_heads = k.shape[2]
    tiles = _joined_lists(mask.query_tiles, mask.key_tiles.spans.shape[1])
    query_ids = _ids_by_block(mask.queries, block)
    key_ids = _ids_by_block(mask.keys, block)
    shape = q.shape
    q, k, v = (_blocks(x, block, key_heads) for x in (q, k, v))

    def query_block(n: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        i = order[n]
        q_i = q[i]
        ids_i = query_ids.at(i)

        def key_block(
            partial: Array, j: Array, sums: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            maximum, total, out = sums
            logits = _masked_logits(
                scale * _dot("gmk,gbk->gmb", q_i, k[j]), partial, ids_i, key_ids.at(j)
            )
            new = jnp.maximum(maximum, logits.max(axis=-1))
            shrink = jnp.exp(maximum - new)
            weights = jnp.exp(logits - new[..., None])
            total = total * shrink + weights.sum(axis=-1)
            out = out * shrink[..., None] + _dot("gmb,gbk->gmk", weights.astype(v.dtype), v[j])
            return new, total, out

        # The first maximum is finite, so that exp(-inf - maximum) is 0 and not NaN where nothing
        # has been seen yet.
        maximum = jnp.full_like(q_i[..., 0], np.finfo(dtype).min, dtype=dtype)
        sums = maximum, jnp.zeros_like(maximum), jnp.zeros_like(q_i, dtype=dtype)
        maximum, total, out = _loop_over_tiles(tiles.spans[i], tiles.blocks, key_block, sums)
        seen = total > 0
        out = out / jnp.where(seen, total, 1)[..., None]
        # +inf where nothing is seen: weights, recomputed as exp(logits - logsumexp), are then 0.
        logsumexp = jnp.where(seen, maximum + jnp.log(total), jnp.inf)
        return _put(results[0], i, out.astype(q.dtype)), _put(results[1], i, logsumexp)

    order, block_count = _meeting_first(tiles.spans)
    nothing_seen = jnp.zeros_like(q), jnp.full(q.shape[:-1], jnp.inf, dtype)
    out, logsumexp = lax.fori_loop(0, block_count, query_block, nothing_seen)
    return _slots(out, block, shape), _slots(logsumexp[..., None], block, (*shape[:3], 1))[..., 0]


@jax.named_scope(LOOP_SCOPE)
def backward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    delta: Array,
    logsumexp: Array,
    d_out: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v from the gradient of `out`, the logsumexp that `forward` returned,
    and `delta` [B, C, H]: the dot products of `out` and its gradient, less the gradient of the
    logsumexp."""
    dtype = _sum_dtype(q)
    block = mask.block
    key_heads = k.shape[2]
    tiles = _joined_lists(mask.key_tiles, mask.query_tiles.spans.shape[1])
    query_ids = _ids_by_block(mask.queries, block)
    key_ids = _ids_by_block(mask.keys, block)
    shapes = q.shape, k.shape
    q, k, v, d_out = (_blocks(x, block, key_heads) for x in (q, k, v, d_out))
    logsumexp, delta = (_blocks(x[..., None], block, key_heads) for x in (logsumexp, delta))

    # One pass makes all three gradients from each tile's weights. A second pass for dq alone would
    # recompute the weights: measured 1.4 times slower on CPU than adding to dq in place.
    def key_block(n: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # Blocks that meet no others come last in `order`. The loop ends before them, and their dk
        # and dv remain zero.
        j = order[n]
        k_j = k[j]
        v_j = v[j]
        ids_j = key_ids.at(j)

        def query_block(
            partial: Array, i: Array, sums: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            dq, dk, dv = sums
            logits = _masked_logits(
                scale * _dot("gmk,gbk->gmb", q[i], k_j), partial, query_ids.at(i), ids_j
            )
            # The logsumexp of all keys makes these the final weights, whatever the order of tiles.
            weights = jnp.exp(logits - logsumexp[i])
            dv = dv + _dot("gmb,gmk->gbk", weights.astype(d_out.dtype), d_out[i])
            d_weights = _dot("gmk,gbk->gmb", d_out[i], v_j)
            # dq and dk lack the factor `scale` here; it is applied once to their sums.
            d_logits = (weights * (d_weights - delta[i])).astype(q.dtype)
            dk = dk + _dot("gmb,gmk->gbk", d_logits, q[i])
            dq = dq.at[i].add(_dot("gmb,gbk->gmk", d_logits, k_j), mode="promise_in_bounds")
            return dq, dk, dv

        # The loop over queries completes dk and dv of this block; dq collects from all key blocks.
        dq, dk, dv = gradients
        sums = dq, jnp.zeros_like(k_j, dtype=dtype), jnp.zeros_like(v_j, dtype=dtype)
        dq, dk_j, dv_j = _loop_over_tiles(tiles.spans[j], tiles.blocks, query_block, sums)
        return dq, _put(dk, j, (scale * dk_j).astype(k.dtype)), _put(dv, j, dv_j.astype(v.dtype))

    order, block_count = _meeting_first(tiles.spans)
    nothing = jnp.zeros_like(q, dtype=dtype), jnp.zeros_like(k), jnp.zeros_like(v)
    dq, dk, dv = lax.fori_loop(0, block_count, key_block, nothing)
    dq = (scale * dq).astype(q.dtype)
    return _slots(dq, block, shapes[0]), _slots(dk, block, shapes[1]), _slots(dv, block, shapes[1])


def _loop_over_tiles(
    span: Array, blocks: Array, step: Callable[[Array, Array, Any], Any], sums: Any
) -> Any:
    """Call `step(partial, block, sums)` for every block that a span lists, and return the last
    sums; `partial`: only some pairs of the tile are visible."""
    first, partial, full = span

    def tile(t: Array, sums: Any) -> Any:
        return step(t < partial, jnp.where(first >= 0, blocks[first + t], -1 - first + t), sums)

    return lax.fori_loop(0, partial + full, tile, sums)


def _meeting_first(spans: Array) -> tuple[Array, Array]:
    """All blocks, those that meet others before those that do not, and how many meet others."""
    meets = spans[:, 1] + spans[:, 2] > 0
    return jnp.argsort(~meets, stable=True), jnp.sum(meets)


def _put(blocks: Array, i: Array, block: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, block, i, axis=0)


def _masked_logits(logits: Array, partial: Array, query_ids: TokenIds, key_ids: TokenIds) -> Array:
    """Logits [G, M, b] of one tile, -inf where invisible; ids are [b]."""

    def partial_mask() -> Array:
        query_rows = query_ids.map(lambda column: column[:, None])
        return visible(query_rows, key_ids)

    # The condition saves full tiles the mask, and makes XLA store a mask once: it would otherwise
    # compute the mask again for every head and every use of the logits, which took four times as
    # long where most tiles are partial. A mask of numbers instead is large enough for XLA to split
    # over threads, which doubled the time of a partial tile on CPU.
    shape = (query_ids.document.size, key_ids.document.size)
    seen = lax.cond(partial, partial_mask, lambda: jnp.ones(shape, bool))
    # M is (heads that share a key head) * (slots of the block)
    by_head = logits.reshape(len(logits), -1, *shape)
    return jnp.where(seen, by_head, -jnp.inf).reshape(logits.shape)


def _blocks(x: Array, block: int, key_heads: int) -> Array:
    """[B, slots, heads, K] -> [B * slots / b, G, M or b, K]."""
    size = x.shape[-1]
    x = x.reshape(-1, block, key_heads, x.shape[2] // key_heads, size)
    return x.transpose(0, 2, 3, 1, 4).reshape(len(x), key_heads, -1, size)


def _slots(x: Array, block: int, shape: tuple[int, ...]) -> Array:
    """The inverse of `_blocks`."""
    x = x.reshape(len(x), x.shape[1], -1, block, x.shape[-1])
    return x.transpose(0, 3, 1, 2, 4).reshape(shape)


def _ids_by_block(ids: TokenIds, block: int) -> TokenIds:
    """The ids by block: [blocks of all rows, b] each."""
    return ids.map(lambda column: column.reshape(-1, block))


def _joined_lists(lists: TileLists, others: int) -> TileLists:
    """The lists of all rows as one: spans [N, 3] into blocks [B * L] that number the blocks of all
    rows; `others` is the number of blocks that a row has on the listed side."""
    row = jnp.arange(len(lists.blocks), dtype=jnp.int32)
    # Row r begins at entry r * L of the lists and at block r * others of the listed side. A
    # negative first is -1 - block (`TileLists`): to raise the block, it is lowered.
    first = lists.spans[..., 0]
    first = jnp.where(
        first >= 0, first + lists.blocks.shape[1] * row[:, None], first - others * row[:, None]
    )
    spans = lists.spans.at[..., 0].set(first).reshape(-1, 3)
    return TileLists(spans, (lists.blocks + others * row[:, None]).reshape(-1))


def _dot(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=_sum_dtype(x))


def _sum_dtype(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
