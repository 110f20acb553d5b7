from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmllm.balance.tiles import tile_ranges
from jaxmllm.models.attention import attention

BLOCK = 8
SLOTS = 40

RAGGED = [1] * 5 + [2] * 12 + [3] * 1 + [4] * 15 + [0] * 7
HOLED = [0] * 2 + [1] * 6 + [0] * 3 + [1] * 4 + [0] * 9 + [1] * 2 + [3] * 11 + [0] * 1 + [3] * 2
WHOLE = [1] * SLOTS
EMPTY = [0] * SLOTS


tiled = jax.jit(attention, static_argnames=("causal", "scale"))


@partial(jax.jit, static_argnames="causal")
def dense_vjp(q, k, v, segments, d_out, causal):
    """Output and gradients of the plain formula; exp needs no maximum in float64 with logits of order one."""
    slots = np.arange(q.shape[1])
    visible = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    if causal:
        visible &= slots[:, None] >= slots

    def formula(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("bqhk,bphk->bhqp", q, k) / np.sqrt(q.shape[-1])
        weights = jnp.where(visible[:, None], jnp.exp(logits), 0)
        total = weights.sum(axis=-1, keepdims=True)
        return jnp.einsum("bhqp,bphk->bqhk", weights / jnp.where(total > 0, total, 1), v)

    out, pullback = jax.vjp(formula, q, k, v)
    return out, *pullback(d_out)


@partial(jax.jit, static_argnames="causal")
def tiled_vjp(q, k, v, segments, query_tiles, key_tiles, d_out, causal):
    masks = segments, query_tiles, key_tiles
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, *masks, causal=causal), q, k, v)
    return out, *pullback(d_out)


def packed(rows, causal, block=BLOCK):
    """Segments [B, C] and both tile tables of rows of equal length."""
    segments = np.array(rows, np.int32)
    ranges = [tile_ranges(row, block, causal) for row in segments]
    return segments, np.stack([r.queries for r in ranges]), np.stack([r.keys for r in ranges])


def random_inputs(rows, slots=SLOTS, heads=4, key_heads=2, size=8, seed=0):
    """q, k, v and the output's cotangent, which is not zero at padding."""
    rng = np.random.default_rng(seed)
    q, d_out = rng.standard_normal((2, rows, slots, heads, size))
    k, v = rng.standard_normal((2, rows, slots, key_heads, size))
    return q, k, v, d_out


def reference(q, k, v, segments, d_out, causal):
    with jax.enable_x64(True):
        wide = (np.asarray(x, np.float64) for x in (q, k, v))
        results = dense_vjp(*wide, segments, np.asarray(d_out, np.float64), causal=causal)
        return [np.asarray(x) for x in results]


def check(rows, causal, inputs, block=BLOCK, dtype=np.float32, tolerance=5e-6):
    q, k, v, d_out = (x.astype(dtype) for x in inputs)
    segments, *tiles = packed(rows, causal, block)
    results = tiled_vjp(q, k, v, segments, *tiles, d_out, causal=causal)
    expected = reference(q, k, v, segments, d_out, causal)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        assert got.dtype == dtype, name
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, abs(want).max()), err_msg=name)
        assert (got[segments == 0] == 0).all(), name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 8), (3, 3, 16), (4, 1, 8)])
def test_equals_dense_attention(causal, heads, key_heads, size):
    rows = [RAGGED, HOLED, EMPTY, WHOLE]
    check(rows, causal, random_inputs(len(rows), heads=heads, key_heads=key_heads, size=size))


@pytest.mark.parametrize("block", [4, 20, SLOTS])
def test_block_size_does_not_matter(block):
    check([HOLED], True, random_inputs(1), block=block)


@pytest.mark.parametrize("causal", [True, False])
def test_float64_inputs_are_computed_in_float64(causal):
    with jax.enable_x64(True):
        check([RAGGED, HOLED], causal, random_inputs(2), dtype=np.float64, tolerance=1e-13)


def test_bfloat16_is_exact_to_its_rounding():
    check([RAGGED, HOLED], True, random_inputs(2), dtype=jnp.bfloat16, tolerance=2**-7)


def test_bfloat16_sums_are_kept_in_float32():
    """A mean over 4,096 equal values: a bfloat16 sum of ones would stop growing at 256."""
    slots = 4096
    segments, *tiles = packed([[1] * slots], False, block=256)
    q, v = jnp.zeros((1, slots, 1, 8), jnp.bfloat16), jnp.ones((1, slots, 1, 8), jnp.bfloat16)
    out, _, _, dv = tiled_vjp(q, q, v, segments, *tiles, jnp.ones_like(v), causal=False)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    np.testing.assert_array_equal(np.asarray(dv, np.float32), 1)


def test_large_logits_do_not_overflow():
    q, k, v, d_out = random_inputs(1)
    segments, *tiles = packed([RAGGED], True)
    narrow = [x.astype(np.float32) for x in (q * 1e3, k * 1e3, v, d_out)]
    results = tiled_vjp(*narrow[:3], segments, *tiles, narrow[3], causal=True)
    assert all(np.isfinite(x).all() for x in results)
    nearest = np.einsum("qhk,phk->hqp", q[0], np.repeat(k[0], 2, axis=1))
    seen = (segments[0][:, None] == segments[0]) & np.tri(SLOTS, dtype=bool)
    pick = np.where(seen, nearest, -np.inf).argmax(axis=-1)  # the softmax is one-hot
    want = np.stack([v[0, pick[h], h // 2] for h in range(4)], axis=1)
    np.testing.assert_allclose(results[0][0][segments[0] > 0], want[segments[0] > 0], rtol=1e-5)


@st.composite
def segmentations(draw):
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 16)), min_size=1, max_size=10))
    ids = np.repeat(np.arange(1, len(runs) + 1) * [real for real, _ in runs], [length for _, length in runs])[:SLOTS]
    return np.pad(ids, (0, SLOTS - len(ids)))


@settings(max_examples=15, deadline=None)
@given(st.lists(segmentations(), min_size=4, max_size=4), st.booleans(), st.integers(0, 99))
def test_any_segmentation_equals_dense_attention(rows, causal, seed):
    check(rows, causal, random_inputs(4, seed=seed))


@pytest.mark.parametrize("causal", [True, False])
def test_packed_equals_alone(causal):
    inputs = [x.astype(np.float32) for x in random_inputs(1)]
    segments, *tiles = packed([RAGGED], causal)
    together = tiled_vjp(*inputs[:3], segments, *tiles, inputs[3], causal=causal)
    for segment in range(1, segments.max() + 1):
        slots = np.flatnonzero(segments[0] == segment)
        alone = [np.zeros_like(x) for x in inputs]
        for row, x in zip(alone, inputs, strict=True):
            row[:, : len(slots)] = x[:, slots]
        own, *own_tiles = packed([[1] * len(slots) + [0] * (SLOTS - len(slots))], causal)
        results = tiled_vjp(*alone[:3], own, *own_tiles, alone[3], causal=causal)
        for a, b in zip(together, results, strict=True):
            np.testing.assert_allclose(a[:, slots], b[:, : len(slots)], rtol=0, atol=2e-6)


def test_blocks_outside_the_ranges_are_not_read():
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    row = [1] * 8 + [2] * 16 + [3] * 16
    for x in (q, k, v, d_out):
        x[:, 8:24] = np.nan
    segments, *tiles = packed([row], False)
    for x in tiled_vjp(q, k, v, segments, *tiles, d_out, causal=False):
        assert np.isfinite(x[:, :8]).all() and np.isfinite(x[:, 24:]).all()


def test_one_compilation_serves_every_mask():
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    compiled = jax.jit(partial(tiled_vjp.__wrapped__, causal=True))
    for row in (RAGGED, HOLED, WHOLE, EMPTY):
        segments, *tiles = packed([row], True)
        compiled(q, k, v, segments, *tiles, d_out)
    assert compiled._cache_size() == 1


def test_memory_for_the_backward_pass_is_linear_in_the_row():
    def kept(slots):
        q, k, v, _ = (x.astype(np.float32) for x in random_inputs(1, slots=slots))
        segments, *tiles = packed([[1] * slots], True)
        pullback = jax.vjp(lambda q, k, v: tiled(q, k, v, segments, *tiles, causal=True), q, k, v)[1]
        return sum(x.size for x in jax.tree.leaves(pullback))

    assert kept(128) == 2 * kept(64)


def test_scale_replaces_the_default():
    q, k, v, _ = (x.astype(np.float32) for x in random_inputs(1))
    segments, *tiles = packed([RAGGED], True)
    doubled = tiled(2 * q, k, v, segments, *tiles, causal=True)
    np.testing.assert_allclose(tiled(q, k, v, segments, *tiles, causal=True, scale=2 * 8**-0.5), doubled, atol=1e-6)


def test_works_in_a_rematerialised_scan_inside_shard_map():
    """As the model calls it: rows over `data`, heads over `tensor`, layers in a scan, each recomputed."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    q, k, v, _ = (x.astype(np.float32) for x in random_inputs(2))
    masks = packed([RAGGED, HOLED], True)

    def layers(q, k, v, *masks):
        def layer(x, _):
            return x + attention(x, k, v, *masks, causal=True), None

        return jax.lax.scan(jax.checkpoint(layer), q, length=2)[0]

    def loss(run, q, k, v):
        return (run(q, k, v, *masks) ** 2).sum()

    sharded = jax.shard_map(layers, mesh=mesh, in_specs=(heads,) * 3 + (rows,) * 3, out_specs=heads)
    gradients = [jax.jit(jax.grad(partial(loss, run), argnums=(0, 1, 2)))(q, k, v) for run in (layers, sharded)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((1, SLOTS, 3, 8))}, "divisor of 4"),
        ({"v": np.zeros((1, SLOTS, 2, 4))}, "one shape"),
        ({"segments": np.zeros((1, 8), np.int32)}, "segments must be"),
        ({"key_tiles": np.zeros((1, 3, 2), np.int32)}, "key_tiles"),
        ({"query_tiles": np.zeros((1, 7, 2), np.int32), "key_tiles": np.zeros((1, 7, 2), np.int32)}, "divide 40 slots"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    q, k, v, _ = random_inputs(1)
    segments, query_tiles, key_tiles = packed([RAGGED], True)
    arrays = {"q": q, "k": k, "v": v, "segments": segments, "query_tiles": query_tiles, "key_tiles": key_tiles}
    with pytest.raises(ValueError, match=message):
        attention(**(arrays | change), causal=True)
