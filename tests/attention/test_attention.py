"""Attention over tiles against the dense formula in float64: results and gradients of every kernel
that runs on CPUs, for any mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmllm.attention.attention import attention
from jaxmllm.attention.mask import Mask, TokenIds, causal_ids, item_ids
from jaxmllm.attention.tiles import dealt_tiles, visible_tiles
from tests.attention import masks
from tests.attention.masks import stacked, visible_pairs

BLOCK = 8
SLOTS = 40

RAGGED = [1] * 5 + [2] * 12 + [3] * 1 + [4] * 15 + [0] * 7
HOLED = [0] * 2 + [1] * 6 + [0] * 3 + [1] * 4 + [0] * 9 + [1] * 2 + [3] * 11 + [0] * 1 + [3] * 2
WHOLE = [1] * SLOTS
EMPTY = [0] * SLOTS


KERNELS = ("jax", "cpu")  # these run on the devices of tests
each_kernel = pytest.mark.parametrize("kernel", KERNELS)

tiled = jax.jit(attention, static_argnames=("scale", "kernel"))


@jax.jit
def dense_vjp(q, k, v, visible, d_out):
    """Output and gradients of the plain formula. In float64, with logits of order one, exp needs
    no maximum subtracted."""

    def formula(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        logits = jnp.einsum("bqhk,bphk->bhqp", q, k) / np.sqrt(q.shape[-1])
        weights = jnp.where(visible[:, None], jnp.exp(logits), 0)
        total = weights.sum(axis=-1, keepdims=True)
        return jnp.einsum("bhqp,bphk->bqhk", weights / jnp.where(total > 0, total, 1), v)

    out, pullback = jax.vjp(formula, q, k, v)
    return out, *pullback(d_out)


@partial(jax.jit, static_argnames="kernel")
def tiled_vjp(q, k, v, mask, d_out, kernel="jax"):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, mask, kernel=kernel), q, k, v)
    return out, *pullback(d_out)


def mask_of(ids, block=BLOCK, bound=None):
    return masks.mask_of(ids, block, bound)


def packed(rows, causal, block=BLOCK):
    """The mask of rows of segments."""
    return mask_of(
        [(causal_ids if causal else item_ids)(np.array(row, np.int32)) for row in rows], block
    )


def random_inputs(rows, slots=SLOTS, heads=4, key_heads=2, size=8, seed=0, keys=None):
    """q, k, v and the cotangent of the output, which is not zero at padding."""
    rng = np.random.default_rng(seed)
    q, d_out = rng.standard_normal((2, rows, slots, heads, size))
    k, v = rng.standard_normal((2, rows, keys or slots, key_heads, size))
    return q, k, v, d_out


def reference(q, k, v, visible, d_out):
    """`dense_vjp` in float64 of inputs of any dtype."""
    with jax.enable_x64(True):
        wide = (np.asarray(x, np.float64) for x in (q, k, v))
        return [np.asarray(x) for x in dense_vjp(*wide, visible, np.asarray(d_out, np.float64))]


def check(mask, inputs, dtype=np.float32, tolerance=2e-6):
    """All results of every kernel against the dense reference, relative to its largest entry;
    queries that see nothing and keys that nobody sees have exact zeros."""
    q, k, v, d_out = (x.astype(dtype) for x in inputs)
    visible = visible_pairs(mask.queries, mask.keys)
    expected = reference(q, k, v, visible, d_out)
    blind = ~visible.any(axis=2)
    unseen = ~visible.any(axis=1)
    for kernel in KERNELS if dtype == np.float32 else ("jax",):
        results = tiled_vjp(q, k, v, mask, d_out, kernel)
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            label = f"{name} of {kernel}"
            assert got.dtype == dtype, label
            got = np.asarray(got, np.float64)
            np.testing.assert_allclose(
                got, want, rtol=0, atol=tolerance * max(1, abs(want).max()), err_msg=label
            )
            assert (got[blind if name in ("out", "dq") else unseen] == 0).all(), label


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 8), (3, 3, 16), (4, 1, 8)])
def test_equals_dense_attention(causal, heads, key_heads, size):
    rows = [RAGGED, HOLED, EMPTY, WHOLE]
    check(
        packed(rows, causal), random_inputs(len(rows), heads=heads, key_heads=key_heads, size=size)
    )


@pytest.mark.parametrize("block", [4, 20, SLOTS])
def test_block_size_does_not_matter(block):
    check(packed([HOLED], True, block), random_inputs(1))


@pytest.mark.parametrize("causal", [True, False])
def test_float64_inputs_are_computed_in_float64(causal):
    with jax.enable_x64(True):
        check(packed([RAGGED, HOLED], causal), random_inputs(2), dtype=np.float64, tolerance=1e-13)


def test_bfloat16_is_exact_to_its_rounding():
    """2**-7 is the distance of neighbouring bfloat16 numbers relative to their size."""
    check(packed([RAGGED, HOLED], True), random_inputs(2), dtype=jnp.bfloat16, tolerance=2**-7)


def test_bfloat16_sums_are_kept_in_float32():
    """A mean over 4,096 equal values: a bfloat16 sum of ones would stop growing at 256."""
    slots = 4096
    mask = packed([[1] * slots], False, block=256)
    q = jnp.zeros((1, slots, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, slots, 1, 8), jnp.bfloat16)
    out, _, _, dv = tiled_vjp(q, q, v, mask, jnp.ones_like(v))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)
    np.testing.assert_array_equal(np.asarray(dv, np.float32), 1)


@each_kernel
def test_large_logits_do_not_overflow(kernel):
    """Logits of a million make every softmax one-hot, so each query takes the
    value of its nearest key."""
    q, k, v, d_out = random_inputs(1)
    mask = packed([RAGGED], True)
    narrow = [x.astype(np.float32) for x in (q * 1e3, k * 1e3, v, d_out)]
    results = tiled_vjp(*narrow[:3], mask, narrow[3], kernel)
    assert all(np.isfinite(x).all() for x in results)
    nearest = np.einsum("qhk,phk->hqp", q[0], np.repeat(k[0], 2, axis=1))
    is_token = np.array(RAGGED) > 0
    visible = visible_pairs(mask.queries, mask.keys)[0]
    chosen_key = np.where(visible, nearest, -np.inf).argmax(axis=-1)  # the softmax is one-hot
    expected = np.stack([v[0, chosen_key[h], h // 2] for h in range(4)], axis=1)
    np.testing.assert_allclose(results[0][0][is_token], expected[is_token], rtol=1e-5)


# ---------------------------------------------------------------------------- any mask


@st.composite
def packed_rows(draw):
    """Documents of text, images and clips end to end, some split into windows, with
    padding anywhere between."""
    ids = np.zeros((2, SLOTS), np.int32)
    start = 0
    document = 0
    while start < SLOTS:
        document += 1
        window = draw(st.sampled_from([0, 0, 3]))
        for item in range(1, draw(st.integers(1, 4)) + 1):
            end = min(start + draw(st.integers(1, 12)), SLOTS)
            ids[0, start:end] = (
                document if not window else document + np.arange(end - start) // window
            )
            ids[1, start:end] = item * draw(st.integers(0, 1)) if not window else item
            document = max(document, ids[0].max())
            start = min(end + draw(st.sampled_from([0, 0, 0, 5])), SLOTS)
    return TokenIds(ids[0], ids[1] * (ids[0] > 0), np.arange(SLOTS, dtype=np.int32))


@st.composite
def scattered_rows(draw):
    """Rows without any order: interleaved documents, groups in pieces, positions anywhere."""
    numbers = lambda most: st.lists(st.integers(0, most), min_size=SLOTS, max_size=SLOTS)  # noqa: E731
    return TokenIds(*(np.array(draw(numbers(most)), np.int32) for most in (3, 3, 20)))


any_rows = st.lists(st.one_of(packed_rows(), scattered_rows()), min_size=3, max_size=3)


@settings(max_examples=25)
@given(any_rows, st.integers(0, 99))
def test_any_mask_equals_dense_attention(ids, seed):
    check(mask_of(ids), random_inputs(3, seed=seed))


@settings(max_examples=15)
@given(any_rows, st.sampled_from([1, 4, 9, 30]))
def test_any_mask_in_windows_equals_dense_attention(ids, window):
    check(mask_of([row.within(window) for row in ids]), random_inputs(3))


@settings(max_examples=10)
@given(any_rows, st.sampled_from([1, 3, 9]))
def test_lists_that_are_too_short_change_nothing(ids, bound):
    """Where a list has no room for its tiles, a range of tiles takes its place."""
    check(mask_of(ids, bound=bound), random_inputs(3))


@settings(max_examples=10)
@given(
    st.one_of(packed_rows(), scattered_rows()),
    st.permutations(range(SLOTS // BLOCK)),
    st.sampled_from([1, 5]),
)
def test_a_part_of_the_row_gets_its_own_queries(ids, places, parts):
    """Blocks are dealt to parts: each part has its own queries and all keys, in the new order.
    Gradients of keys and values add up over parts."""
    order = np.argsort(places)
    slots = (order[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    moved = ids.at(slots)
    inputs = random_inputs(1)
    part_slots = SLOTS // parts
    of_whole_row = tiled_vjp(
        *(x.astype(np.float32) for x in inputs[:3]), mask_of([ids]), inputs[3].astype(np.float32)
    )
    sums = [np.zeros_like(of_whole_row[2]), np.zeros_like(of_whole_row[3])]
    for part, lists in enumerate(
        dealt_tiles(visible_tiles(ids, BLOCK), np.array(places, np.int32), parts)
    ):
        part_slice = slice(part * part_slots, (part + 1) * part_slots)
        queries = moved.at(part_slice)
        mask = Mask(
            stacked([queries]), stacked([moved]), stacked([lists.queries]), stacked([lists.keys])
        )
        q, d_out = (x[:, slots[part_slice]] for x in (inputs[0], inputs[3]))
        check(mask, (q, inputs[1][:, slots], inputs[2][:, slots], d_out))
        q, k, v, d_out = (
            x.astype(np.float32) for x in (q, inputs[1][:, slots], inputs[2][:, slots], d_out)
        )
        out, dq, dk, dv = tiled_vjp(q, k, v, mask, d_out)
        np.testing.assert_allclose(out, of_whole_row[0][:, slots[part_slice]], atol=1e-5)
        np.testing.assert_allclose(dq, of_whole_row[1][:, slots[part_slice]], atol=1e-5)
        sums = [total + np.asarray(x) for total, x in zip(sums, (dk, dv), strict=True)]
    for total, want in zip(sums, of_whole_row[2:], strict=True):
        np.testing.assert_allclose(total, want[:, slots], atol=2e-5)


# ---------------------------------------------------------------------------- as the project needs it


@each_kernel
def test_gradients_are_the_same_in_every_run(kernel):
    mask = packed([RAGGED, HOLED], True)
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(2))
    first_run, second_run = (tiled_vjp(q, k, v, mask, d_out, kernel) for _ in range(2))
    for a, b in zip(first_run, second_run, strict=True):
        np.testing.assert_array_equal(a, b)


@each_kernel
@pytest.mark.parametrize("causal", [True, False])
def test_packed_equals_alone(causal, kernel):
    """Each document of a packed row has the results that it has at the
    start of a row of its own."""
    inputs = [x.astype(np.float32) for x in random_inputs(1)]
    packed_results = tiled_vjp(*inputs[:3], packed([RAGGED], causal), inputs[3], kernel)
    for segment in range(1, max(RAGGED) + 1):
        slots = np.flatnonzero(np.array(RAGGED) == segment)
        unpacked = [np.zeros_like(x) for x in inputs]
        for row, x in zip(unpacked, inputs, strict=True):
            row[:, : len(slots)] = x[:, slots]
        own_mask = packed([[1] * len(slots) + [0] * (SLOTS - len(slots))], causal)
        results = tiled_vjp(*unpacked[:3], own_mask, unpacked[3], kernel)
        for a, b in zip(packed_results, results, strict=True):
            np.testing.assert_allclose(a[:, slots], b[:, : len(slots)], rtol=0, atol=2e-6)


@each_kernel
def test_blocks_that_are_not_listed_are_not_read(kernel):
    """NaN in the blocks of document 2 would spread to the others by any product with it, even
    if its weight is zero."""
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    row = [1] * 8 + [2] * 16 + [3] * 16
    for x in (q, k, v, d_out):
        x[:, 8:24] = np.nan
    for x in tiled_vjp(q, k, v, packed([row], False), d_out, kernel):
        assert np.isfinite(x[:, :8]).all() and np.isfinite(x[:, 24:]).all()


@each_kernel
def test_one_compilation_serves_every_mask(kernel):
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    compiled = jax.jit(lambda *arrays: tiled_vjp(*arrays, kernel))
    rng = np.random.default_rng(0)
    for _ in range(20):
        segments = np.sort(rng.integers(0, 6, SLOTS)).astype(np.int32)
        groups = (rng.integers(0, 3, SLOTS) * (segments > 0)).astype(np.int32)
        compiled(q, k, v, mask_of([causal_ids(segments, groups)]), d_out)
    assert compiled._cache_size() == 1


def test_nothing_in_the_loops_is_split_over_threads():
    """If XLA cut work inside of the loops into tasks for other threads, every
    tile would wait for them."""
    mask = packed([[1] * 300 + [2] * 200 + [0] * 12], True, block=64)
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1, slots=512))
    program = tiled_vjp.lower(q, k, v, mask, d_out).compile().as_text()
    loops, entry = program.split("\nENTRY ")
    assert "while(" in entry
    assert 'outer_dimension_partitions":["' not in loops


def test_memory_is_linear_in_the_row():
    """Temporary memory of the compiled gradients, for rows of 8, 16 and 32 thousand slots."""

    def temporary(slots):
        q, k, v, d_out = (
            x.astype(np.float32)
            for x in random_inputs(1, slots=slots, heads=2, key_heads=1, size=16)
        )
        mask = packed([[1] * slots], True, block=128)
        return tiled_vjp.lower(q, k, v, mask, d_out).compile().memory_analysis().temp_size_in_bytes

    short_row, middle_row, long_row = (temporary(slots) for slots in (8192, 16384, 32768))
    # The second step of the row is twice the first. If memory were quadratic it would take four
    # times as much, and one head's logits alone 4 GiB.
    assert long_row - middle_row <= 2.2 * (middle_row - short_row)
    assert long_row < 200 * 32768 * 16


def test_memory_for_the_backward_pass_is_linear_in_the_row():
    """Numbers that the forward pass keeps for the backward pass."""

    def kept(slots):
        q, k, v, _ = (x.astype(np.float32) for x in random_inputs(1, slots=slots))
        mask = packed([[1] * slots], True)
        pullback = jax.vjp(lambda q, k, v: tiled(q, k, v, mask), q, k, v)[1]
        return sum(
            x.size for x in jax.tree.leaves(pullback) if jnp.issubdtype(x.dtype, jnp.floating)
        )

    assert kept(128) == 2 * kept(64)


def test_scale_replaces_the_default():
    q, k, v, _ = (x.astype(np.float32) for x in random_inputs(1))
    mask = packed([RAGGED], True)
    for kernel in KERNELS:
        np.testing.assert_allclose(
            tiled(q, k, v, mask, scale=2 * 8**-0.5, kernel=kernel),
            tiled(2 * q, k, v, mask, kernel=kernel),
            atol=1e-6,
        )


@each_kernel
def test_works_in_a_rematerialised_scan_inside_shard_map(kernel):
    """As the model calls it: rows over `data`, heads over `tensor`, and layers in a scan that
    recomputes each of them."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    rows = PartitionSpec("data")
    heads = PartitionSpec("data", None, "tensor")
    q, k, v, _ = (x.astype(np.float32) for x in random_inputs(2))
    mask = packed([RAGGED, HOLED], True)

    def layers(q, k, v, mask):
        def layer(x, _):
            return x + attention(x, k, v, mask, kernel=kernel), None

        return jax.lax.scan(jax.checkpoint(layer), q, length=2)[0]

    def loss(run, q, k, v):
        return (run(q, k, v, mask) ** 2).sum()

    specs = (heads,) * 3 + (rows,)
    sharded = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    gradients = [
        jax.jit(jax.grad(partial(loss, run), argnums=(0, 1, 2)))(q, k, v)
        for run in (layers, sharded)
    ]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def short(lists, blocks):
    return lists._replace(spans=lists.spans[:, :blocks])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": np.zeros((1, SLOTS, 3, 8))}, "divisor of 4"),
        ({"v": np.zeros((1, SLOTS, 2, 4))}, "one shape"),
        (
            {
                "mask": lambda m: m._replace(
                    queries=m.queries._replace(group=np.zeros((1, 8), np.int32))
                )
            },
            "queries.group",
        ),
        (
            {"mask": lambda m: m._replace(key_tiles=short(m.key_tiles, 3))},
            "40 query slots and 40 key slots",
        ),
        ({"mask": lambda m: m._replace(query_tiles=short(m.query_tiles, 3))}, "blocks of one size"),
        (
            {"mask": lambda m: m._replace(key_tiles=m.key_tiles._replace(blocks=np.zeros(4)))},
            "key_tiles must be",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    q, k, v, _ = random_inputs(1)
    arrays = {"q": q, "k": k, "v": v, "mask": packed([RAGGED], True)}
    change = {name: new(arrays[name]) if callable(new) else new for name, new in change.items()}
    with pytest.raises(ValueError, match=message):
        attention(**(arrays | change))
