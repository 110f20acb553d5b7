"""Attention over packed rows: exact, in memory linear in the row, and skipping what no query sees.

Rows are cut into blocks; which key blocks a query block needs is data, computed on the host (balance/tiles.py), and
reaches the loops below as their bounds. The softmax is accumulated online and recomputed for the gradients
(arXiv 2205.14135, 2307.08691), so that only the output and one logsumexp a query are kept.

    forward     for each query block: for key blocks in its range:   maximum, total, out   -> out, logsumexp
    backward    for each key block: for query blocks in its range:   dk, dv, and dq in place

Both are plain sequential loops, hence deterministic, and their bounds are dynamic, hence one compilation for every
mask. Rows lie end to end in one list of blocks: ranges stay within their row, so rows need no loop of their own.

Letters: B rows, C slots, H query heads, G key heads, K head size, b slots of a block, N = B * C / b blocks,
M = H / G * b queries of a block that share one key head.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    query_tiles: Array,
    key_tiles: Array,
    *,
    causal: bool,
    scale: float | None = None,
) -> Array:
    """Softmax attention in which each slot of a row sees the slots of its own segment.

    Args:
      q: [B, C, H, K] queries.
      k: [B, C, G, K] keys; each of the G heads serves H / G consecutive heads of queries.
      v: [B, C, G, K] values.
      segments: [B, C] int32; 0 is padding, which sees nothing and is not seen.
      query_tiles: [B, C / b, 2] int32, `TileRanges.queries` of each row; its shape sets the block size b.
      key_tiles: [B, C / b, 2] int32, `TileRanges.keys` of each row.
      causal: whether a slot sees only slots at or before itself; the tiles must have been made for the same.
      scale: factor on the logits; K ** -0.5 if none.

    Returns:
      [B, C, H, K] in the dtype of q; exactly zero at padding, where the gradients of q, k and v are zero too.
      Sums are kept in float32 (float64 for float64 inputs).

    Raises `ValueError` if the shapes do not fit each other.
    """
    _check_shapes(q, k, v, segments, query_tiles, key_tiles)
    (rows, slots, heads, size), key_heads = q.shape, k.shape[2]
    count = query_tiles.shape[1]  # blocks of a row
    block = slots // count

    def blocks(x: Array) -> Array:  # [B, C, heads, K] -> [N, G, M or b, K]
        x = x.reshape(rows * count, block, key_heads, -1, size)
        return x.transpose(0, 2, 3, 1, 4).reshape(rows * count, key_heads, -1, size)

    def ranges(tiles: Array) -> Array:  # [B, C / b, 2] -> [N, 2], counted over all rows
        return (tiles + count * jnp.arange(rows, dtype=jnp.int32)[:, None, None]).reshape(rows * count, 2)

    out = _attention(
        causal,
        size**-0.5 if scale is None else scale,
        blocks(q),
        blocks(k),
        blocks(v),
        segments.reshape(-1, block),
        ranges(query_tiles),
        ranges(key_tiles),
    )
    out = out.reshape(rows * count, key_heads, heads // key_heads, block, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    causal: bool, scale: float, q: Array, k: Array, v: Array, segments: Array, query_ranges: Array, key_ranges: Array
) -> Array:
    """Attention on blocks: q [N, G, M, K], k and v [N, G, b, K], segments [N, b], ranges [N, 2] -> [N, G, M, K]."""
    return _forward(causal, scale, q, k, v, segments, query_ranges, key_ranges)[0]


def _forward(
    causal: bool, scale: float, q: Array, k: Array, v: Array, segments: Array, query_ranges: Array, key_ranges: Array
) -> tuple[Array, tuple[Array, ...]]:
    dtype = _sum_dtype(q)

    def query_block(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        i, q_i, (low, high) = block

        def key_block(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            maximum, total, out = sums
            logits = _logits(causal, scale, q_i, k[j], segments[i], segments[j], i - j)
            new = jnp.maximum(maximum, logits.max(axis=-1))
            shrink, weights = jnp.exp(maximum - new), jnp.exp(logits - new[..., None])
            total = total * shrink + weights.sum(axis=-1)
            out = out * shrink[..., None] + _dot("gmb,gbk->gmk", weights.astype(v.dtype), v[j])
            return new, total, out

        # The first maximum is finite, so that exp(-inf - maximum) is 0 and not NaN where nothing has been seen yet.
        maximum = jnp.full_like(q_i[..., 0], np.finfo(dtype).min, dtype=dtype)
        sums = maximum, jnp.zeros_like(maximum), jnp.zeros_like(q_i, dtype=dtype)
        maximum, total, out = lax.fori_loop(low, high, key_block, sums)
        seen = total > 0
        out = out / jnp.where(seen, total, 1)[..., None]
        # At padding +inf: its weights, recomputed as exp(logits - logsumexp), are then 0.
        return out.astype(q.dtype), jnp.where(seen, maximum + jnp.log(total), jnp.inf)

    out, logsumexp = lax.map(query_block, (jnp.arange(len(q)), q, query_ranges))
    return out, (q, k, v, segments, key_ranges, out, logsumexp)


def _backward(
    causal: bool, scale: float, residuals: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None, None, None]:
    q, k, v, segments, key_ranges, out, logsumexp = residuals
    dtype = _sum_dtype(q)
    delta = (d_out.astype(dtype) * out.astype(dtype)).sum(axis=-1)  # [N, G, M]

    # One pass makes all three gradients from each tile's weights. A second pass for dq alone would recompute the
    # weights: measured 1.4 times slower on CPU than adding to dq where it lies.
    def key_block(dq: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        j, k_j, v_j, (low, high) = block

        def query_block(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk, dv = sums
            logits = _logits(causal, scale, q[i], k_j, segments[i], segments[j], i - j)
            weights = jnp.exp(logits - logsumexp[i][..., None])
            dv = dv + _dot("gmb,gmk->gbk", weights.astype(d_out.dtype), d_out[i])
            d_weights = _dot("gmk,gbk->gmb", d_out[i], v_j)
            d_logits = (weights * (d_weights - delta[i][..., None])).astype(q.dtype)
            dk = dk + _dot("gmb,gmk->gbk", d_logits, q[i])
            dq = dq.at[i].add(_dot("gmb,gbk->gmk", d_logits, k_j))
            return dq, dk, dv

        sums = dq, jnp.zeros_like(k_j, dtype=dtype), jnp.zeros_like(v_j, dtype=dtype)
        dq, dk, dv = lax.fori_loop(low, high, query_block, sums)
        return dq, ((scale * dk).astype(k.dtype), dv.astype(v.dtype))

    dq, (dk, dv) = lax.scan(key_block, jnp.zeros_like(q, dtype=dtype), (jnp.arange(len(k)), k, v, key_ranges))
    return (scale * dq).astype(q.dtype), dk, dv, None, None, None


_attention.defvjp(_forward, _backward)


def _logits(
    causal: bool, scale: float, q: Array, k: Array, query_segments: Array, key_segments: Array, distance: Array
) -> Array:
    """Scaled logits [G, M, b] of one tile, -inf where invisible; `distance` is query block minus key block."""
    block = len(key_segments)
    visible = (query_segments[:, None] == key_segments) & (key_segments > 0)
    if causal:
        slots = jnp.arange(block)
        visible &= slots[:, None] + distance * block >= slots
    logits = scale * _dot("gmk,gbk->gmb", q, k)
    by_head = logits.reshape(len(q), -1, block, block)  # M is heads times slots
    return jnp.where(visible, by_head, -jnp.inf).reshape(logits.shape)


def _dot(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=_sum_dtype(x))


def _sum_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _check_shapes(q: Array, k: Array, v: Array, segments: Array, query_tiles: Array, key_tiles: Array) -> None:
    rows, slots, heads, size = q.shape
    if k.shape != v.shape or k.shape[:2] != (rows, slots) or k.shape[3] != size or heads % k.shape[2]:
        raise ValueError(
            f"attention: q {q.shape} needs k and v of one shape [{rows}, {slots}, divisor of {heads}, {size}], "
            f"got k {k.shape} and v {v.shape}"
        )
    if segments.shape != (rows, slots):
        raise ValueError(f"attention: segments must be [{rows}, {slots}] like q {q.shape}, got {segments.shape}")
    count = query_tiles.shape[1]
    if not count or slots % count or {query_tiles.shape, key_tiles.shape} != {(rows, count, 2)}:
        raise ValueError(
            f"attention: both tiles must be [{rows}, blocks that divide {slots} slots, 2], "
            f"got query_tiles {query_tiles.shape} and key_tiles {key_tiles.shape}"
        )
