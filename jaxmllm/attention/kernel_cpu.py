"""Tile-list attention for CPUs, float32: loops that numba compiles, and matrix products by BLAS.

    q, k, v, mask --jax.ffi.ffi_call--> XLA --> _handler --> _thread, one for each worker
                                                                _forward, or _backward
                                                                    _multiply: BLAS     _exp     _hide_queries

The mathematics is that of kernel_jax.py, whose loops XLA runs on one core, starting every product
separately. Here the cores of a device share a call, tiles are cut or joined to products that BLAS
is fast at, and everything that is done to the results is vector instructions.

Each thread computes key heads of rows (forward, parts of their queries where key heads are fewer
than threads), chosen by its number alone. One thread adds up each sum, in the order of its loop. So
results are the same bits for any number of threads.

XLA passes a call as structs of C (jaxlib's include/xla/ffi/api/c_api.h), which are read here word
by word. Its authors keep that interface compatible, and XLA refuses a handler that was written for
another version of it. BLAS is SciPy's.

Letters: B rows, C query slots, T key slots, H query heads, G key heads, K head size, b and M slots
of the two sides of a product (`_product_sides`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding
import numpy as np
from jax import Array
from llvmlite import ir
from numba import carray, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import get_cython_function_address, intrinsic
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from jaxmllm.arrays import Ints, Longs
from jaxmllm.attention.mask import Mask, TokenIds, visible
from jaxmllm.compiled import compiled, compiled_callback, compiled_leaf, compiled_sums

Singles = NDArray[np.float32]
Columns = tuple[Ints, Ints, Ints, Ints]  # of `TokenIds`

# OpenBLAS multiplies matrices as they are stored up to so many multiplications; larger ones it
# copies into another layout first.
SMALL_PRODUCT = 10**6
SIDE, TOGETHER = 64, 192  # most slots of one side of a product, and of the other


def unsupported_reason(dtype: Any) -> str | None:
    """What the kernel needs instead of these inputs; None if it takes them."""
    if sys.platform == "win32":
        return "threads of POSIX, which Windows has not"
    return None if jnp.dtype(dtype) == jnp.float32 else f"float32, not {jnp.dtype(dtype)}"


def forward(scale: float, q: Array, k: Array, v: Array, mask: Mask) -> tuple[Array, Array]:
    """As `kernel_jax.forward`, for float32; for CPUs."""
    results = _shape_of(q), jax.ShapeDtypeStruct(q.shape[:3], q.dtype)
    inputs = q, k, v, *_columns(mask.queries), *_columns(mask.keys), *mask.query_tiles
    shares = q.shape[0] * k.shape[2] * mask.query_tiles.spans.shape[1]
    out, logsumexp = _call(scale, results, inputs, shares)
    return out, logsumexp


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
    """As `kernel_jax.backward`, for float32; for CPUs."""
    results = _shape_of(q), _shape_of(k), _shape_of(v)
    inputs = q, k, v, *_columns(mask.queries), *_columns(mask.keys), *mask.key_tiles
    shares = q.shape[0] * k.shape[2]
    dq, dk, dv = _call(scale, results, (*inputs, delta, logsumexp, d_out), shares)
    return dq, dk, dv


def _shape_of(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _columns(ids: TokenIds) -> TokenIds:
    return ids if ids.first is not None else ids.within(None)


def _call(scale: float, results: Any, inputs: tuple[Array, ...], shares: int) -> Any:
    _register()
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    workers = min(_workers_per_device(), shares)
    return call(*inputs, scale=np.float32(scale), workers=np.int64(workers))


def _workers_per_device() -> int:
    """Threads of a call: the devices of a process share its cores."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // jax.local_device_count("cpu"))


# ---------------------------------------------------------------------------- the loops

# Numbers of the arguments of a call; only a backward pass has the last three
QUERIES, KEYS, VALUES, QUERY_IDS = range(4)
KEY_IDS = QUERY_IDS + len(TokenIds._fields)  # of the first column, as QUERY_IDS is
SPANS = KEY_IDS + len(TokenIds._fields)
BLOCKS, DELTA, LOGSUMEXP, D_OUT = range(SPANS + 1, SPANS + 5)


@compiled_sums
def _forward(frame: int, worker: int, workers: int) -> None:
    """Compute the share that one of `workers` threads has of a forward call."""
    q = _floats4(_argument(frame, QUERIES))
    k = _floats4(_argument(frame, KEYS))
    v = _floats4(_argument(frame, VALUES))
    spans = _integers3(_argument(frame, SPANS))
    blocks = _integers2(_argument(frame, BLOCKS))
    out = _floats4(_result(frame, 0))
    logsumexp = _floats3(_result(frame, 1))
    scale = _scale(frame)
    rows, slots, heads, size = q.shape
    key_heads = k.shape[2]
    query_blocks = spans.shape[1]
    heads_per_key = heads // key_heads
    block = slots // query_blocks
    side, together = _product_sides(block, size)
    # Parts of a head's queries: more than one if the key heads of all rows are fewer than threads
    parts = -(-workers // (rows * key_heads))
    products = _workspace()
    runs = np.empty((_most_runs(k.shape[1], block, together), 3), np.int64)
    keys = _empty_matrix(k.shape[1], size)
    values = _empty_matrix(k.shape[1], size)
    # Queries are neighbours in memory, so that maxima and sums over keys are vector instructions
    weights = _empty_matrix(together, side)
    queries = _empty_matrix(size, side)
    total = _empty_matrix(side, size)
    maximum = _empty_vector(side)
    shrink = _empty_vector(side)
    norm = _empty_vector(side)
    # A task is a key head of a row, with every parts-th tile of the queries of its heads.
    for task in range(worker, rows * key_heads * parts, workers):
        r = task // (key_heads * parts)
        g = task // parts % key_heads
        part = task % parts
        _load_head(k, r, g, keys)
        _load_head(v, r, g, values)
        for first_query in range(part * side, slots, parts * side):
            query = slice(first_query, first_query + side)
            query_ids = _token_ids(frame, QUERY_IDS, r, query)
            run_count = _list_runs(spans[r, first_query // block], blocks[r], block, together, runs)
            for h in range(g * heads_per_key, (g + 1) * heads_per_key):
                _transpose(q[r, query, h], queries)
                # Finite, so that exp(-inf - maximum) is 0 and not NaN while nothing has been seen
                maximum[:] = LOWEST
                norm[:] = 0
                total[:] = 0
                for n in range(run_count):
                    first_key, length, partial = runs[n]
                    key = slice(first_key, first_key + length)
                    tile = weights[:length]
                    # Logits [keys, queries]
                    _multiply(products, scale, keys[key], queries, 0, tile)
                    if partial:
                        _hide_queries(tile, _token_ids(frame, KEY_IDS, r, key), query_ids)
                    # `shrink` is first the old maximum, then the factor of the new one on norm and
                    # total.
                    shrink[:] = maximum
                    for t in range(length):
                        for c in range(side):
                            maximum[c] = tile[t, c] if tile[t, c] > maximum[c] else maximum[c]
                    for c in range(side):
                        shrink[c] = _exp(shrink[c] - maximum[c])
                        norm[c] *= shrink[c]
                    for c in range(side):
                        for e in range(size):
                            total[c, e] *= shrink[c]
                    for t in range(length):
                        for c in range(side):
                            tile[t, c] = _exp(tile[t, c] - maximum[c])
                            norm[c] += tile[t, c]
                    _multiply_transposed(products, 1, tile, values[key], 1, total)
                for c in range(side):
                    seen = norm[c] > 0
                    share = 1 / norm[c] if seen else ONE
                    for e in range(size):
                        out[r, first_query + c, h, e] = total[c, e] * share
                    logsumexp[r, first_query + c, h] = (
                        maximum[c] + np.log(norm[c]) if seen else np.inf
                    )


@compiled_sums
def _backward(frame: int, worker: int, workers: int) -> None:
    """Compute the share that one of `workers` threads has of a backward call."""
    q = _floats4(_argument(frame, QUERIES))
    k = _floats4(_argument(frame, KEYS))
    v = _floats4(_argument(frame, VALUES))
    spans = _integers3(_argument(frame, SPANS))
    blocks = _integers2(_argument(frame, BLOCKS))
    delta = _floats3(_argument(frame, DELTA))
    logsumexp = _floats3(_argument(frame, LOGSUMEXP))
    d_out = _floats4(_argument(frame, D_OUT))
    dq = _floats4(_result(frame, 0))
    dk = _floats4(_result(frame, 1))
    dv = _floats4(_result(frame, 2))
    scale = _scale(frame)
    rows, slots, heads, size = q.shape
    key_heads = k.shape[2]
    key_blocks = spans.shape[1]
    heads_per_key = heads // key_heads
    block = k.shape[1] // key_blocks
    side, together = _product_sides(block, size)
    products = _workspace()
    runs = np.empty((_most_runs(slots, block, together), 3), np.int64)
    queries = _empty_matrix(slots, size)
    d_queries = _empty_matrix(slots, size)
    d_outs = _empty_matrix(slots, size)
    keys = _empty_matrix(k.shape[1], size)
    d_keys = _empty_matrix(k.shape[1], size)
    values = _empty_matrix(k.shape[1], size)
    d_values = _empty_matrix(k.shape[1], size)
    keys_across = _empty_matrix(size, side)
    values_across = _empty_matrix(size, side)
    weights = _empty_matrix(together, side)
    d_weights = _empty_matrix(together, side)
    sums = _empty_vector(slots)
    deltas = _empty_vector(slots)
    for task in range(worker, rows * key_heads, workers):
        r, g = divmod(task, key_heads)
        _load_head(k, r, g, keys)
        _load_head(v, r, g, values)
        d_keys[:] = 0
        d_values[:] = 0
        for h in range(g * heads_per_key, (g + 1) * heads_per_key):
            _load_head(q, r, h, queries)
            _load_head(d_out, r, h, d_outs)
            sums[:] = logsumexp[r, :, h]
            deltas[:] = delta[r, :, h]
            # d_keys and d_values add up over the heads of the group, d_queries over a head's tiles.
            d_queries[:] = 0
            for first_key in range(0, k.shape[1], side):
                key = slice(first_key, first_key + side)
                key_ids = _token_ids(frame, KEY_IDS, r, key)
                _transpose(keys[key], keys_across)
                _transpose(values[key], values_across)
                span = spans[r, first_key // block]
                for n in range(_list_runs(span, blocks[r], block, together, runs)):
                    first_query, length, partial = runs[n]
                    query = slice(first_query, first_query + length)
                    tile = weights[:length]
                    d_tile = d_weights[:length]
                    _multiply(products, scale, queries[query], keys_across, 0, tile)
                    if partial:
                        _hide_keys(tile, _token_ids(frame, QUERY_IDS, r, query), key_ids)
                    _multiply(products, 1, d_outs[query], values_across, 0, d_tile)
                    _weigh(tile, d_tile, sums[query], deltas[query])
                    _multiply_transposed(products, 1, tile, d_outs[query], 1, d_values[key])
                    _multiply_transposed(products, scale, d_tile, queries[query], 1, d_keys[key])
                    _multiply(products, scale, d_tile, keys[key], 1, d_queries[query])
            _store_head(d_queries, dq, r, h)
        _store_head(d_keys, dk, r, g)
        _store_head(d_values, dv, r, g)


@compiled
def _empty_matrix(rows: int, columns: int) -> Singles:
    # Memory of its own: LLVM makes no vector instructions of a loop over two parts of one array
    return np.empty((rows, columns), np.float32)


@compiled
def _empty_vector(size: int) -> Singles:
    return np.empty(size, np.float32)


@compiled_leaf
def _product_sides(block: int, size: int) -> tuple[int, int]:
    """Slots of the two sides of a product: each a part of a block, or the second several blocks."""
    side = _part(block, SIDE)
    longest = min(TOGETHER, SMALL_PRODUCT // (side * size))
    return side, longest // block * block if longest >= block else _part(block, longest)


@compiled_leaf
def _part(block: int, most: int) -> int:
    """Slots of the largest equal parts of a block that have up to `most` slots; all slots of the
    block if these parts have less than a quarter of that."""
    parts = -(-block // max(1, most))
    while block % parts:
        parts += 1
    return block if 4 * block < most * parts else block // parts


@compiled_leaf
def _most_runs(slots: int, block: int, together: int) -> int:
    return slots // block * -(-block // together)


@compiled_leaf
def _list_runs(span: Ints, blocks: Ints, block: int, together: int, runs: Longs) -> int:
    """Write (first slot, slots, whether partial) of the blocks that a span lists to `runs`, as runs
    of neighbouring blocks or as parts of one, of up to `together` slots; return their number."""
    first, partial, full = span
    run_count = 0
    for n in range(partial + full):
        block_number = blocks[first + n] if first >= 0 else -1 - first + n
        begin = block_number * block
        end = (block_number + 1) * block
        is_partial = int(n < partial)
        if run_count:
            # A view of `runs`: the last run grows in place. Parts of a block never grow.
            run = runs[run_count - 1]
            if run[0] + run[1] == begin and run[2] == is_partial and run[1] + block <= together:
                run[1] += block
                continue
        for slot in range(begin, end, together):
            runs[run_count] = slot, min(together, end - slot), is_partial
            run_count += 1
    return run_count


_sees = compiled_leaf(visible)
# Hash of the source of that rule in attention/mask.py, which is compiled into the loops here. They
# stay on disk until this file changes, so a new rule must change this file: a test compares the
# hash, and says what to write.
RULE = "9473a243"


@compiled_leaf
def _hide_queries(tile: Singles, keys: Columns, queries: Columns) -> None:
    """Put -inf for the invisible pairs of a tile of logits [M keys, b queries]."""
    for t in range(tile.shape[0]):
        key = _token(keys, t)
        for c in range(tile.shape[1]):
            tile[t, c] = tile[t, c] if _sees(_token(queries, c), key) else -np.inf


@compiled_leaf
def _hide_keys(tile: Singles, queries: Columns, keys: Columns) -> None:
    """Put -inf for the invisible pairs of a tile of logits [M queries, b keys]."""
    for c in range(tile.shape[0]):
        query = _token(queries, c)
        for t in range(tile.shape[1]):
            tile[c, t] = tile[c, t] if _sees(query, _token(keys, t)) else -np.inf


@compiled_leaf
def _token(ids: Columns, slot: int) -> TokenIds:
    return TokenIds(ids[0][slot], ids[1][slot], ids[2][slot], ids[3][slot])


@compiled_sums
def _weigh(tile: Singles, d_tile: Singles, sums: Singles, deltas: Singles) -> None:
    """Replace logits by weights in `tile`, and gradients of weights by those of logits in `d_tile`,
    both [M queries, b keys]."""
    for c in range(tile.shape[0]):
        query_sum = sums[c]
        delta = deltas[c]
        for t in range(tile.shape[1]):
            weight = _exp(tile[c, t] - query_sum)
            tile[c, t] = weight
            d_tile[c, t] = weight * (d_tile[c, t] - delta)


@compiled_leaf
def _load_head(x: Singles, row: int, head: int, y: Singles) -> None:
    """Copy a head of a row to `y`, where its slots are neighbours: products are then faster."""
    for c in range(y.shape[0]):
        for e in range(y.shape[1]):
            y[c, e] = x[row, c, head, e]


@compiled_leaf
def _store_head(x: Singles, y: Singles, row: int, head: int) -> None:
    for c in range(x.shape[0]):
        for e in range(x.shape[1]):
            y[row, c, head, e] = x[c, e]


@compiled_leaf
def _transpose(x: Singles, y: Singles) -> None:
    for c in range(x.shape[0]):
        for e in range(x.shape[1]):
            y[e, c] = x[c, e]


# ---------------------------------------------------------------------------- exponentials

LOWEST = np.finfo(np.float32).min
ZERO_BELOW = np.float32(-88)
PER_LN_2 = np.float32(1 / np.log(2))
# ln 2 in two parts: the first has few bits, so that its product with a power is exact
LN_2 = np.float32(0.693359375)
LN_2_REST = np.float32(np.log(2) - 0.693359375)
HALF = np.float32(0.5)
ONE = np.float32(1)
# Coefficients of exp(r) = 1 + r + r ** 2 (...) for |r| <= ln 2 / 2: Cephes' expf, to 4e-7
P0 = np.float32(1.9875691500e-4)
P1 = np.float32(1.3981999507e-3)
P2 = np.float32(8.3334519073e-3)
P3 = np.float32(4.1665795894e-2)
P4 = np.float32(1.6666665459e-1)
P5 = np.float32(5.0000001201e-1)


@compiled_sums
def _exp(x: np.float32) -> np.float32:
    """exp(x), and 0 below -88; unlike a library's it becomes vector instructions."""
    # At -88 the power is -127, whose bits of the exponent are all 0: the factor is 0.0.
    x = ZERO_BELOW if x < ZERO_BELOW else x
    power = np.floor(x * PER_LN_2 + HALF)
    r = x - power * LN_2 - power * LN_2_REST
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    return (p * r * r + r + ONE) * _from_bits(np.int32((np.int32(power) + 127) << 23))


@intrinsic
def _from_bits(context: Any, bits: Any) -> Any:
    """The float32 with these bits."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), code


# ---------------------------------------------------------------------------- products

Workspace = tuple[NDArray[np.uint8], Ints, Singles]

SGEMM = "jaxmllm_sgemm"  # name in compiled code, which is kept on disk
_sgemm = types.ExternalFunction(SGEMM, types.void(*[types.intp] * 13))


@compiled_sums
def _workspace() -> Workspace:
    """Memory of one thread for the arguments of its products: letters, sizes, factors."""
    return np.array([ord("N"), ord("T")], np.uint8), np.empty(6, np.int32), np.empty(2, np.float32)


@compiled_leaf
def _multiply(
    told: Workspace, alpha: float, x: Singles, y: Singles, beta: float, z: Singles
) -> None:
    """z = alpha x @ y + beta z"""
    _gemm(told, 0, alpha, x, y, beta, z, x.shape[1])


@compiled_leaf
def _multiply_transposed(
    told: Workspace, alpha: float, x: Singles, y: Singles, beta: float, z: Singles
) -> None:
    """z = alpha x.T @ y + beta z"""
    _gemm(told, 1, alpha, x, y, beta, z, x.shape[0])


@compiled_leaf
def _gemm(
    told: Workspace,
    transposed: int,
    alpha: float,
    x: Singles,
    y: Singles,
    beta: float,
    z: Singles,
    inner: int,
) -> None:
    """z = alpha x @ y + beta z by BLAS, with x transposed if `transposed` is 1."""
    letters, sizes, factors = told
    # Fortran's matrices are stored by columns: to it, ours are the transposed ones, whose product
    # has the opposite order.
    sizes[0], sizes[1], sizes[2] = z.shape[1], z.shape[0], inner
    # Strides of rows in float32 numbers, so that matrices may be parts of wider ones.
    sizes[3], sizes[4], sizes[5] = y.strides[0] // 4, x.strides[0] // 4, z.strides[0] // 4
    factors[0], factors[1] = alpha, beta
    letter = letters.ctypes.data
    size = sizes.ctypes.data
    factor = factors.ctypes.data
    _sgemm(
        letter,
        letter + transposed,
        size,
        size + 4,
        size + 8,
        factor,
        y.ctypes.data,
        size + 12,
        x.ctypes.data,
        size + 16,
        factor + 4,
        z.ctypes.data,
        size + 20,
    )


# ---------------------------------------------------------------------------- what XLA hands over

# XLA_FFI_API_MAJOR and _MINOR of the structs as they are read here
VERSION = 0, 1
METADATA = 1  # XLA_FFI_Extension_Metadata, which asks for that version instead of results
# Sizes of XLA_FFI_CallFrame, XLA_FFI_Buffer and XLA_FFI_Scalar, each followed by indices of its
# fields, in words of 8 bytes
FRAME = 21
EXTENSION = 1
ARGUMENTS = 9
RESULT_COUNT = 12
RESULTS = 14
ATTRIBUTES = 20
BUFFER = 6
DATA = 3
DIMENSIONS = 5
SCALAR = 2
VALUE = 1


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), code


@compiled
def _words(address: int, count: int) -> Longs:
    return carray(_pointer(address), count, np.intp)


@compiled
def _argument(frame: int, i: int) -> Longs:
    return _words(_words(_words(frame, FRAME)[ARGUMENTS], i + 1)[i], BUFFER)


@compiled
def _result(frame: int, i: int) -> Longs:
    return _words(_words(_words(frame, FRAME)[RESULTS], i + 1)[i], BUFFER)


@compiled
def _attribute_address(frame: int, i: int) -> Any:
    """Address of the value of a static argument; such arguments are in the order of their names."""
    return _pointer(_words(_words(_words(frame, FRAME)[ATTRIBUTES], i + 1)[i], SCALAR)[VALUE])


@compiled
def _scale(frame: int) -> float:
    return carray(_attribute_address(frame, 0), 1, np.float32)[0]


@compiled
def _workers(frame: int) -> int:
    return carray(_attribute_address(frame, 1), 1, np.int64)[0]


@compiled
def _floats4(buffer: Longs) -> Singles:
    n = _words(buffer[DIMENSIONS], 4)
    return carray(_pointer(buffer[DATA]), (n[0], n[1], n[2], n[3]), np.float32)


@compiled
def _floats3(buffer: Longs) -> Singles:
    n = _words(buffer[DIMENSIONS], 3)
    return carray(_pointer(buffer[DATA]), (n[0], n[1], n[2]), np.float32)


@compiled
def _integers3(buffer: Longs) -> Ints:
    n = _words(buffer[DIMENSIONS], 3)
    return carray(_pointer(buffer[DATA]), (n[0], n[1], n[2]), np.int32)


@compiled
def _integers2(buffer: Longs) -> Ints:
    n = _words(buffer[DIMENSIONS], 2)
    return carray(_pointer(buffer[DATA]), (n[0], n[1]), np.int32)


@compiled
def _token_ids(frame: int, first: int, row: int, slots: slice) -> Columns:
    """The columns of `TokenIds` for some slots of a row: arguments `first` to `first` + 3."""
    return (
        _integers2(_argument(frame, first))[row, slots],
        _integers2(_argument(frame, first + 1))[row, slots],
        _integers2(_argument(frame, first + 2))[row, slots],
        _integers2(_argument(frame, first + 3))[row, slots],
    )


# ---------------------------------------------------------------------------- threads

TARGET = "jaxmllm_attention"  # name in compiled programs, which are kept on disk
THREAD = "jaxmllm_attention_thread"
TOLD = 4  # words for each thread: its handle, then frame, worker and workers
_call_thread = types.ExternalFunction(THREAD, types.intp(types.intp))
_pthread_create = types.ExternalFunction("pthread_create", types.int32(*[types.intp] * 4))
_pthread_join = types.ExternalFunction("pthread_join", types.int32(types.intp, types.intp))


@functools.cache
def _register() -> None:
    """Compile the loops, or load them from disk, and register them with XLA."""
    sgemm = get_cython_function_address("scipy.linalg.cython_blas", "sgemm")
    threadpool_limits(1, user_api="blas")  # affects only loaded libraries, as SciPy's now is
    llvmlite.binding.add_symbol(SGEMM, sgemm)
    llvmlite.binding.add_symbol(THREAD, compiled_callback(types.intp(types.intp), _thread))
    handler = compiled_callback(types.intp(types.intp), _handler)
    capsule = jax.ffi.pycapsule(ctypes.c_void_p(handler))
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")


def _handler(frame: int) -> int:
    """The function that XLA calls: it runs the workers of a call on threads, and waits for them."""
    words = _words(frame, FRAME)
    if words[EXTENSION]:
        # Words of the extension: size, kind (an int32, the lower half), next extension, metadata.
        # Of the metadata: size, then the version's size and extension, then its two int32 numbers
        # in one word.
        kind, _, metadata = _words(words[EXTENSION], 4)[1:]
        if kind & 0xFFFFFFFF == METADATA:
            _words(metadata, 4)[3] = VERSION[0] | VERSION[1] << 32
            return 0
    workers = _workers(frame)
    told = np.zeros((workers, TOLD), np.int64)
    for worker in range(workers):
        told[worker, 1:] = frame, worker, workers
        thread_words = told[worker].ctypes.data
        if worker and _pthread_create(thread_words, 0, _thread_address(), thread_words):
            told[worker, 0] = 0  # no more threads can be started: the share runs here
            _call_thread(thread_words)
    _call_thread(told[0].ctypes.data)
    # Reading `told` here keeps it until the threads end: numba frees an array after its last use.
    for worker in range(1, workers):
        if told[worker, 0]:
            _pthread_join(told[worker, 0], 0)
    return 0


def _thread(told: int) -> int:
    _, frame, worker, workers = _words(told, TOLD)
    if _words(frame, FRAME)[RESULT_COUNT] == 3:
        _backward(frame, worker, workers)
    else:
        _forward(frame, worker, workers)
    return 0


@intrinsic
def _thread_address(context: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        function = get_or_insert_function(builder.module, ir.FunctionType(word, [word]), THREAD)
        return builder.ptrtoint(function, word)

    return types.intp(), code
