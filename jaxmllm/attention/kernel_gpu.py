"""Tile-list attention for NVIDIA GPUs: three Pallas kernels, lowered through Triton.

    forward    a program for each tile of queries, head:      over the listed keys                     -> out, logsumexp
    queries    a program for each tile of queries, head:      over the listed keys                     -> dq
    keys       a program for each tile of keys, key head:     over the listed queries of its heads     -> dk, dv

Each program alone writes its results, after a loop of fixed order: there are no atomics, so
gradients are deterministic. No copy of the size of q, k or v is made. Arrays in Triton have a power
of two of elements, so a head is read in pieces (80 = 64 + 16, 96 = 64 + 32), and a block of slots
in tiles.

Letters: B rows, C query slots, T key slots, H query heads, G key heads, K head size, b slots of a
block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxmllm.attention.mask import Mask, TileLists, TokenIds, visible

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since JAX 0.11
    triton = None

SMALLEST = 16  # fewest slots or columns of a factor of a matrix product
LARGEST_HEAD = 512  # bytes
# CUDA compute capabilities of GPUs with little shared memory
SMALL_MEMORY = ("7.5", "8.6", "8.9", "12.0", "12.1")
LOG2_E = math.log2(math.e)  # factor on logits: GPUs compute powers of 2, so kernels use base 2

Ref = Any  # reference to an array in memory
Columns = list[Array]  # [slots, K] in pieces
Step = Callable[[bool, Any, Any], Any]


class Cut(NamedTuple):
    """The sizes into which the work of a kernel is cut."""

    head: int  # K
    block: int  # b
    own: int  # slots of a program's own tile
    step: int  # slots of the other side that the tile meets at a time
    warps: int
    stages: int  # steps whose loads are under way at once

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First column and columns of each piece of a head; the last may reach beyond it."""
        pieces = []
        column = 0
        end = pl.cdiv(self.head, SMALLEST) * SMALLEST
        while column < end:
            pieces.append((column, 1 << (end - column).bit_length() - 1))
            column += pieces[-1][1]
        return pieces

    @property
    def columns(self) -> int:
        """Columns of all pieces together."""
        return sum(width for _, width in self.pieces)

    @property
    def compiler_params(self) -> Any:
        return triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def unsupported_reason(dtype: Any, head: int, block: int) -> str | None:
    """What the kernels need instead of these inputs; None if they take them."""
    if triton is None:
        return f"a JAX with Pallas's Triton backend, not {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"bfloat16, float16 or float32, not {jnp.dtype(dtype)}"
    if not SMALLEST <= head <= LARGEST_HEAD // jnp.dtype(dtype).itemsize:
        return (
            f"heads of {SMALLEST} numbers to {LARGEST_HEAD} bytes, not {head} of {jnp.dtype(dtype)}"
        )
    if block % SMALLEST:
        return f"attention blocks of a multiple of {SMALLEST} slots, not {block}"
    return None


def forward(
    scale: float, q: Array, k: Array, v: Array, mask: Mask, *, interpret: bool = False
) -> tuple[Array, Array]:
    """As `kernel_jax.forward`; `interpret` runs the kernel on any platform, slowly."""
    rows, slots, heads, _ = q.shape
    cut = _choose_cut(q, mask, own=128, stages=_forward_stages())
    own, keys, sums = _query_specs(cut, heads // k.shape[2], k.shape[1])
    attend = pl.pallas_call(
        partial(_forward_kernel, scale, cut),
        grid=(slots // cut.own, heads, rows),
        in_specs=[own, keys, keys, *_mask_specs(cut, mask.queries, mask.keys, mask.query_tiles)],
        out_specs=[own, sums],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, heads, slots), jnp.float32),
        ],
        compiler_params=cut.compiler_params,
        interpret=interpret,
        name="attention_forward",
    )
    out, logsumexp = attend(q, k, v, mask.queries, mask.keys, mask.query_tiles)
    return out, logsumexp.swapaxes(1, 2)


def backward(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    delta: Array,
    logsumexp: Array,
    d_out: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """As `kernel_jax.backward`; `interpret` runs the kernels on any platform, slowly."""
    (rows, slots, heads, _), (_, key_slots, key_heads, _) = q.shape, k.shape
    group = heads // key_heads
    cut = _choose_cut(q, mask, own=64, stages=2)
    call = partial(pl.pallas_call, compiler_params=cut.compiler_params, interpret=interpret)
    # [B, H, C], so that the numbers of a tile are neighbours in memory.
    sums_of_tiles = LOG2_E * logsumexp.swapaxes(1, 2), delta.swapaxes(1, 2)
    inputs = q, k, v, d_out, *sums_of_tiles

    own, keys, sums = _query_specs(cut, group, key_slots)
    query_kernel = call(
        partial(_query_gradients_kernel, scale, cut),
        grid=(slots // cut.own, heads, rows),
        in_specs=[
            own,
            keys,
            keys,
            own,
            sums,
            sums,
            *_mask_specs(cut, mask.queries, mask.keys, mask.query_tiles),
        ],
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="attention_queries",
    )
    dq = query_kernel(*inputs, mask.queries, mask.keys, mask.query_tiles)

    own = pl.BlockSpec((None, cut.own, None, cut.columns), lambda j, g, r: (r, j, g, 0))
    queries = pl.BlockSpec((None, slots, group, cut.columns), lambda j, g, r: (r, 0, g, 0))
    sums = pl.BlockSpec((None, group, slots), lambda j, g, r: (r, g, 0))
    key_kernel = call(
        partial(_key_gradients_kernel, scale, cut, group),
        grid=(key_slots // cut.own, key_heads, rows),
        in_specs=[
            queries,
            own,
            own,
            queries,
            sums,
            sums,
            *_mask_specs(cut, mask.keys, mask.queries, mask.key_tiles),
        ],
        out_specs=[own, own],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        name="attention_keys",
    )
    dk, dv = key_kernel(*inputs, mask.keys, mask.queries, mask.key_tiles)
    return dq, dk, dv


def _forward_stages() -> int:
    """Stages of the forward kernel. Three take 128 KiB of shared memory for heads of 256 bytes:
    consumer GPUs have 99 KiB, others 163 and more."""
    if jax.default_backend() != "gpu":  # compiling for other devices
        return 3
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return 2 if capability in SMALL_MEMORY else 3


def _choose_cut(q: Array, mask: Mask, own: int, stages: int) -> Cut:
    # Of 18 sizes measured for heads of 128 and 64 numbers on an H100, the best or nearly so
    # (docs/performance.md)
    head = q.shape[-1]
    shrink = 1 if q.shape[-1] * q.dtype.itemsize <= 256 else 2
    # The gcd with a power of two is a power of two, and at least SMALLEST, which divides a block.
    own, step = math.gcd(mask.block, own // shrink), math.gcd(mask.block, 64 // shrink)
    return Cut(head, mask.block, own, step, min(4, own // 16), stages)


def _query_specs(
    cut: Cut, group: int, keys: int
) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Specs for programs (tile of queries, head, row): of the tile, of all keys of its head, and of
    one number per query."""
    own = pl.BlockSpec((None, cut.own, None, cut.columns), lambda i, h, r: (r, i, h, 0))
    all_keys = pl.BlockSpec(
        (None, keys, None, cut.columns), lambda i, h, r: (r, 0, lax.div(h, group), 0)
    )
    sums = pl.BlockSpec((None, None, cut.own), lambda i, h, r: (r, h, i))
    return own, all_keys, sums


def _mask_specs(cut: Cut, own: TokenIds, others: TokenIds, tiles: TileLists) -> list[Any]:
    """Specs of the mask: ids of the program's own tile, ids of the whole other side, and the span
    of its block with the lists of its row."""
    tiles_of_block = cut.block // cut.own
    tile = pl.BlockSpec((None, cut.own), lambda i, h, r: (r, i))
    row = pl.BlockSpec((None, others.document.shape[1]), lambda i, h, r: (r, 0))
    span = pl.BlockSpec((None, None, 3), lambda i, h, r: (r, lax.div(i, tiles_of_block), 0))
    blocks = pl.BlockSpec((None, tiles.blocks.shape[1]), lambda i, h, r: (r, 0))
    return [own.map(lambda _: tile), others.map(lambda _: row), TileLists(span, blocks)]


# ---------------------------------------------------------------------------- kernels


def _forward_kernel(
    scale: float,
    cut: Cut,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    query_ids: TokenIds,
    key_ids: TokenIds,
    tiles: TileLists,
    out_ref: Ref,
    logsumexp_ref: Ref,
) -> None:
    q = _load_columns(cut, q_ref, slice(None))
    ids = _column(query_ids, slice(None))

    def meet(
        masked: bool, slots: Any, sums: tuple[Array, Array, Columns]
    ) -> tuple[Array, Array, Columns]:
        maximum, total, out = sums
        logits = scale * LOG2_E * _dot_transposed(q, _load_columns(cut, k_ref, slots))
        if masked:
            logits = jnp.where(visible(ids, _row(key_ids, slots)), logits, -jnp.inf)
        new = jnp.maximum(maximum, logits.max(axis=1))
        shrink = jnp.exp2(maximum - new)
        weights = jnp.exp2(logits - new[:, None])
        out = [x * shrink[:, None] for x in out]
        return (
            new,
            total * shrink + weights.sum(axis=1),
            _add_dot(out, weights, _load_columns(cut, v_ref, slots)),
        )

    # The first maximum is finite, so that exp2(-inf - maximum) is 0 and not NaN where nothing has
    # been seen yet.
    maximum = jnp.full((cut.own,), np.finfo(np.float32).min, jnp.float32)
    sums = maximum, jnp.zeros((cut.own,), jnp.float32), _zeros(cut)
    maximum, total, out = _loop_over_tiles(cut, tiles, meet, sums)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    _store_columns(cut, out_ref, [x / total[:, None] for x in out])
    logsumexp_ref[...] = jnp.where(seen, (maximum + jnp.log2(total)) / LOG2_E, jnp.inf)


def _query_gradients_kernel(
    scale: float,
    cut: Cut,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    d_out_ref: Ref,
    logsumexp_ref: Ref,
    delta_ref: Ref,
    query_ids: TokenIds,
    key_ids: TokenIds,
    tiles: TileLists,
    dq_ref: Ref,
) -> None:
    q, d_out = (_load_columns(cut, ref, slice(None)) for ref in (q_ref, d_out_ref))
    ids = _column(query_ids, slice(None))
    logsumexp = logsumexp_ref[...][:, None]
    delta = delta_ref[...][:, None]

    def meet(masked: bool, slots: Any, dq: Columns) -> Columns:
        k = _load_columns(cut, k_ref, slots)
        # Weights of invisible pairs may be infinite, until the mask puts zeros there.
        weights = jnp.exp2(scale * LOG2_E * _dot_transposed(q, k) - logsumexp)
        if masked:
            weights = jnp.where(visible(ids, _row(key_ids, slots)), weights, 0.0)
        d_weights = _dot_transposed(d_out, _load_columns(cut, v_ref, slots))
        return _add_dot(dq, weights * (d_weights - delta), k)

    dq = _loop_over_tiles(cut, tiles, meet, _zeros(cut))
    _store_columns(cut, dq_ref, [scale * x for x in dq])


def _key_gradients_kernel(
    scale: float,
    cut: Cut,
    group: int,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    d_out_ref: Ref,
    logsumexp_ref: Ref,
    delta_ref: Ref,
    key_ids: TokenIds,
    query_ids: TokenIds,
    tiles: TileLists,
    dk_ref: Ref,
    dv_ref: Ref,
) -> None:
    k, v = (_load_columns(cut, ref, slice(None)) for ref in (k_ref, v_ref))
    ids = _column(key_ids, slice(None))

    def of_head(head: Array, sums: tuple[Columns, Columns]) -> tuple[Columns, Columns]:
        def meet(
            masked: bool, slots: Any, sums: tuple[Columns, Columns]
        ) -> tuple[Columns, Columns]:
            dk, dv = sums
            q, d_out = (_load_columns(cut, ref, slots, head) for ref in (q_ref, d_out_ref))
            # Tiles are transposed, [keys, queries], so that both sums take them as they are.
            weights = jnp.exp2(
                scale * LOG2_E * _dot_transposed(k, q) - logsumexp_ref[head, slots][None]
            )
            if masked:
                weights = jnp.where(visible(_row(query_ids, slots), ids), weights, 0.0)
            d_weights = _dot_transposed(v, d_out)
            d_logits = weights * (d_weights - delta_ref[head, slots][None])
            return _add_dot(dk, d_logits, q), _add_dot(dv, weights, d_out)

        return _loop_over_tiles(cut, tiles, meet, sums)

    dk, dv = lax.fori_loop(0, group, of_head, (_zeros(cut), _zeros(cut)))
    _store_columns(cut, dk_ref, [scale * x for x in dk])
    _store_columns(cut, dv_ref, dv)


# ---------------------------------------------------------------------------- parts of kernels


def _loop_over_tiles(cut: Cut, tiles: TileLists, meet: Step, sums: Any) -> Any:
    """Call `meet(masked, slots, sums)` for all slots of the blocks that the span lists, the partial
    ones first, and return the last sums."""
    first, partial, full = (tiles.spans[n] for n in range(3))
    steps = cut.block // cut.step

    def slots(t: Array) -> Any:
        # Step t is in the n-th block. Without a list (first < 0), entry 0 is read but not used.
        n = lax.div(t, steps)
        listed = tiles.blocks[jnp.where(first >= 0, first + n, 0)]
        block = jnp.where(first >= 0, listed, -1 - first + n)
        return pl.ds(block * cut.block + lax.rem(t, steps) * cut.step, cut.step)

    sums = lax.fori_loop(0, partial * steps, lambda t, sums: meet(True, slots(t), sums), sums)
    return lax.fori_loop(
        partial * steps, (partial + full) * steps, lambda t, sums: meet(False, slots(t), sums), sums
    )


def _column(ids: TokenIds, slots: Any) -> TokenIds:
    return ids.at(slots).at(np.s_[:, None])


def _row(ids: TokenIds, slots: Any) -> TokenIds:
    return ids.at(slots).at(None)


def _load_columns(cut: Cut, ref: Ref, *where: Any) -> Columns:
    return [
        triton.load(ref.at[*where, columns], **padding)
        for columns, padding in _piece_accesses(cut, other=0)
    ]


def _store_columns(cut: Cut, ref: Ref, x: Columns) -> None:
    for (columns, padding), piece in zip(_piece_accesses(cut), x, strict=True):
        triton.store(ref.at[:, columns], piece.astype(ref.dtype), **padding)


def _piece_accesses(cut: Cut, **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Columns of each piece, and arguments of its access: for a piece that reaches beyond the head,
    the mask of the columns that exist, and `options`."""
    pieces = []
    for first, width in cut.pieces:
        masked = first + width > cut.head
        padding = (
            {"mask": (first + jnp.arange(width) < cut.head)[None], **options} if masked else {}
        )
        pieces.append((pl.ds(first, width), padding))
    return pieces


def _zeros(cut: Cut) -> Columns:
    return [jnp.zeros((cut.own, width), jnp.float32) for _, width in cut.pieces]


def _dot_transposed(x: Columns, y: Columns) -> Array:
    """x y^T over all pieces."""
    products = [_dot(a, b, 1) for a, b in zip(x, y, strict=True)]
    return sum(products[1:], products[0])


def _add_dot(sums: Columns, x: Array, y: Columns) -> Columns:
    """sums + x y, with x rounded to the dtype of y."""
    return [
        total + _dot(x.astype(piece.dtype), piece, 0) for total, piece in zip(sums, y, strict=True)
    ]


def _dot(x: Array, y: Array, axis: int) -> Array:
    # Highest: float32 is not rounded to tf32. Narrower types are multiplied exactly in any case.
    return lax.dot_general(
        x,
        y,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
