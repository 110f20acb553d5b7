"""The Triton kernels, interpreted on CPUs against the dense formula; for CUDA they
are lowered, not run."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmllm.attention import kernel_gpu as attention_gpu
from jaxmllm.attention.attention import Choice, attention, choice
from jaxmllm.attention.mask import Mask, causal_ids, item_ids
from jaxmllm.attention.tiles import dealt_tiles, visible_tiles
from jaxmllm.config.schema import ComponentConfig, ComponentsConfig, LanguageConfig, ModelConfig
from jaxmllm.models.compose import build_model
from jaxmllm.models.rows import abstract_language_rows
from sharding.mesh import make_mesh
from tests.attention.masks import stacked, visible_pairs
from tests.attention.test_attention import (
    SLOTS,
    mask_of,
    packed_rows,
    random_inputs,
    reference,
    scattered_rows,
)

try:
    from jax._src.pallas.triton import gpu_info
except ImportError:  # before JAX 0.11
    gpu_info = None

BLOCK = 16
PADDED = 48  # slots of the rows of test_attention.py, rounded up to whole blocks


@pytest.fixture(autouse=True)
def a_gpu_to_lower_for(monkeypatch):
    """Newer JAX asks for which GPU a kernel is lowered, and has a register of
    answers for other devices."""
    if gpu_info is not None:
        h100 = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
        monkeypatch.setitem(gpu_info.registry, jax.devices()[0].device_kind, lambda: h100)


@partial(jax.jit, static_argnames="kernel")
def vjp(q, k, v, mask, d_out, kernel="gpu"):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, mask, kernel=kernel), q, k, v)
    return out, *pullback(d_out)


def check(mask, inputs, dtype=np.float32, tolerance=2e-6):
    """All results against the dense formula in float64, relative to its largest entry; what nothing
    sees has exact zeros."""
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in inputs)
    results = vjp(q, k, v, mask, d_out)
    visible = visible_pairs(mask.queries, mask.keys)
    blind = ~visible.any(axis=2)
    unseen = ~visible.any(axis=1)
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), results, reference(q, k, v, visible, d_out), strict=True
    ):
        assert got.dtype == dtype, name
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance * max(1, abs(want).max()), err_msg=name
        )
        assert (got[blind if name in ("out", "dq") else unseen] == 0).all(), name


def padded(ids):
    """Rows of `SLOTS` slots with padding after them, up to a whole block."""
    return ids.map(lambda column: np.pad(column, (0, PADDED - SLOTS)))


def image_rows(slots):
    """A causal row with an image within its text, a row of windows, and a row of padding alone."""
    third = slots // 3
    text = np.repeat(
        np.array([1, 2, 3, 0], np.int32), [third, third + 2, third - 5, slots - 3 * third + 3]
    )
    image = np.where((np.arange(slots) >= third + 7) & (np.arange(slots) < 2 * third), 1, 0).astype(
        np.int32
    )
    windows = (1 + np.arange(slots, dtype=np.int32) // 24) * (np.arange(slots) < slots - 3)
    empty = np.zeros(slots, np.int32)
    return [causal_ids(text, image), item_ids(windows), causal_ids(empty)]


# ---------------------------------------------------------------------------- against the dense formula


@settings(max_examples=12)
@given(
    st.lists(st.one_of(packed_rows(), scattered_rows()), min_size=2, max_size=2),
    st.sampled_from([None, 1, 4]),
)
def test_any_mask_equals_dense_attention(ids, bound):
    """Lists that are too short (`bound`) change nothing."""
    mask = mask_of([padded(row) for row in ids], BLOCK)
    mask = mask if bound is None else shortened(mask, ids, bound)
    check(mask, random_inputs(2, PADDED, heads=2, key_heads=1, size=16))


@settings(max_examples=6)
@given(
    st.lists(st.one_of(packed_rows(), scattered_rows()), min_size=2, max_size=2),
    st.sampled_from([1, 5, 20]),
)
def test_any_mask_in_windows_equals_dense_attention(ids, window):
    mask = mask_of([padded(row).within(window) for row in ids], BLOCK)
    check(mask, random_inputs(2, PADDED, heads=2, key_heads=1, size=16))


def shortened(mask, ids, bound):
    """The mask with lists of `bound` blocks, in arrays of the original length so that
    one program serves both."""
    with_short_lists = mask_of([padded(row) for row in ids], BLOCK, bound)

    def widen(lists):
        blocks = np.pad(lists.blocks, ((0, 0), (0, 9 - bound)), constant_values=-1)
        return lists._replace(blocks=blocks)

    return with_short_lists._replace(
        query_tiles=widen(with_short_lists.query_tiles), key_tiles=widen(with_short_lists.key_tiles)
    )


@pytest.mark.parametrize(
    ("size", "heads", "key_heads", "block", "dtype"),
    [
        (64, 4, 2, 64, jnp.float32),
        (72, 1, 1, 48, jnp.float32),  # the last piece is wider than the remainder of the head
        (80, 2, 2, 64, jnp.bfloat16),
        (96, 2, 1, 32, jnp.float16),
        (128, 4, 1, 128, jnp.bfloat16),
    ],
)
def test_head_sizes_and_types(size, heads, key_heads, block, dtype):
    mask = mask_of(image_rows(384 if block == 128 else 192), block)
    tolerance = {jnp.float32: 2e-6, jnp.bfloat16: 2**-7, jnp.float16: 2**-10}[dtype]
    check(
        mask,
        random_inputs(3, mask.queries.document.shape[1], heads, key_heads, size),
        dtype,
        tolerance,
    )


def test_a_part_of_a_row_attends_to_all_of_it():
    """Two of six blocks of queries, in another order, against the keys of all."""
    ids = image_rows(96)[0]
    places = np.array([4, 0, 3, 5, 1, 2], np.int32)
    slots = (np.argsort(places)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    moved = ids.at(slots)
    part = moved.at(slice(32, 64))
    lists = dealt_tiles(visible_tiles(ids, BLOCK), places, 3)[1]
    mask = Mask(stacked([part]), stacked([moved]), stacked([lists.queries]), stacked([lists.keys]))
    check(mask, random_inputs(1, 32, heads=2, key_heads=1, size=16, keys=96))


def test_large_logits_and_equal_values():
    """A softmax of one-hot rows neither overflows nor loses a key, and the mean of many equal
    values is that value."""
    mask = mask_of([causal_ids(np.ones(PADDED, np.int32))] * 2, BLOCK)
    q, k, v, _ = random_inputs(2, PADDED, heads=2, key_heads=1, size=16)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (1e3 * q, 1e3 * k, v))
    out, dq, dk, dv = vjp(q, k, v, mask, jnp.ones_like(q))
    logits = np.einsum(
        "qhk,pk->hqp", np.asarray(q[0], np.float64), np.asarray(k[0, :, 0], np.float64)
    )
    nearest = np.where(visible_pairs(mask.queries, mask.keys)[0], logits, -np.inf).argmax(axis=-1)
    np.testing.assert_allclose(out[0], np.asarray(v)[0, nearest.T, 0], rtol=1e-6)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    ones = jnp.ones_like(v)
    np.testing.assert_allclose(
        vjp(jnp.zeros_like(q), k, ones, mask, jnp.ones_like(q))[0], 1, rtol=1e-6
    )


def test_gradients_are_the_same_in_every_run():
    mask = mask_of(image_rows(PADDED)[:2], BLOCK)
    inputs = [
        jnp.asarray(x, jnp.float32) for x in random_inputs(2, PADDED, heads=2, key_heads=1, size=16)
    ]
    first_run, second_run = (vjp(*inputs[:3], mask, inputs[3]) for _ in range(2))
    for a, b in zip(first_run, second_run, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_program_writes_what_another_one_writes():
    """This makes gradients deterministic on a GPU as well: kernels have no atomics, and nothing
    around them scatters."""
    q, k, v, mask = model_inputs(jnp.float32)
    text = str(jax.make_jaxpr(vjp)(q, k, v, mask, q))
    assert text.count("attention_queries") and "atomic" not in text and "scatter" not in text


# ---------------------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("kernel", "platform", "dtype", "head", "chosen"),
    [
        ("auto", "gpu", jnp.bfloat16, 64, Choice("gpu")),
        ("auto", "cuda", jnp.bfloat16, 64, Choice("gpu")),
        ("auto", "cpu", jnp.bfloat16, 8, Choice("jax")),
        ("auto", "cpu", jnp.float64, 8, Choice("jax")),
        ("auto", "cpu", jnp.float32, 8, Choice("cpu")),
        ("auto", "tpu", jnp.bfloat16, 64, Choice("jax")),
        ("jax", "gpu", jnp.bfloat16, 8, Choice("jax")),
        ("gpu", "cpu", jnp.bfloat16, 64, Choice("gpu")),
        ("cpu", "cpu", jnp.float32, 8, Choice("cpu")),
        ("cpu", "gpu", jnp.float32, 8, Choice("jax", "attention: auto or gpu, not cpu")),
        ("cpu", "tpu", jnp.float32, 8, Choice("jax")),
        ("cpu", "cpu", jnp.bfloat16, 8, Choice("cpu", "float32, not bfloat16")),
    ],
)
def test_auto_is_the_kernel_of_the_platform(kernel, platform, dtype, head, chosen):
    assert choice(kernel, platform, dtype, head, BLOCK) == chosen


@pytest.mark.parametrize(
    ("dtype", "head", "block", "needs"),
    [
        (jnp.float64, 64, BLOCK, "bfloat16, float16 or float32, not float64"),
        (jnp.bfloat16, 8, BLOCK, "heads of 16 numbers to 512 bytes, not 8 of bfloat16"),
        (jnp.bfloat16, 64, 8, "attention blocks of a multiple of 16 slots, not 8"),
    ],
)
def test_auto_says_what_the_kernel_of_the_platform_would_need(dtype, head, block, needs):
    assert choice("auto", "gpu", dtype, head, block) == Choice("jax", needs)


def layers(kernel, q, k, v, mask):
    """Attention as the model calls it: layers in a scan that recomputes each of them."""

    def layer(x, _):
        return x + attention(x, k, v, mask, kernel=kernel), None

    return jax.lax.scan(jax.checkpoint(layer), q, length=2)[0]


def sharded_gradients(kernel):
    """A function for the gradients of `layers`, with rows over `data` and heads over `tensor`."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    rows = PartitionSpec("data")
    heads = PartitionSpec("data", None, "tensor")
    run = jax.shard_map(
        partial(layers, kernel),
        mesh=mesh,
        in_specs=(heads,) * 3 + (rows,),
        out_specs=heads,
        check_vma=False,
    )
    return jax.jit(
        jax.grad(lambda *inputs: run(*inputs).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    )


def model_inputs(dtype, block=BLOCK, size=16):
    mask = mask_of(image_rows(3 * block)[:2], block)
    q, k, v, _ = random_inputs(2, 3 * block, heads=4, key_heads=2, size=size)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), jax.tree.map(jnp.asarray, mask)


def kernels_of(function, *inputs):
    """Names of the kernels in the program that this machine lowers for CUDA."""
    text = jax.jit(function).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    return {
        name
        for name in ("attention_forward", "attention_queries", "attention_keys")
        if f'name = "{name}"' in text
    }


def test_works_in_a_rematerialised_scan_inside_shard_map():
    inputs = model_inputs(jnp.float32)
    for a, b in zip(
        *(sharded_gradients(kernel)(*inputs) for kernel in ("gpu", "jax")), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["gpu", "auto"])
def test_lowers_for_cuda_on_any_machine(kernel):
    inputs = model_inputs(jnp.bfloat16, block=128, size=128)
    gradients = {"attention_forward", "attention_queries", "attention_keys"}
    assert kernels_of(partial(attention, kernel=kernel), *inputs) == {"attention_forward"}
    assert kernels_of(sharded_gradients(kernel), *inputs) == gradients


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (64, jnp.float16),
        (72, jnp.float32),
        (80, jnp.bfloat16),
        (96, jnp.bfloat16),
        (128, jnp.float32),
    ],
)
def test_lowers_for_every_head_size_and_type(size, dtype):
    q, k, v, mask = model_inputs(dtype, block=64, size=size)
    assert len(kernels_of(vjp, q, k, v, mask, q)) == 3


@pytest.mark.parametrize(("capability", "stages"), [("8.0", 3), ("8.9", 2), ("9.0", 3)])
def test_small_shared_memory_holds_fewer_stages(capability, stages, monkeypatch):
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(attention_gpu.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention_gpu.jax, "devices", lambda: [device])
    assert attention_gpu._forward_stages() == stages


def test_it_is_not_the_one_elsewhere_nor_where_another_is_named():
    q, k, v, mask = model_inputs(jnp.float32)
    assert not kernels_of(partial(vjp, kernel="jax"), q, k, v, mask, q)
    for a, b in zip(*(vjp(q, k, v, mask, q, kernel) for kernel in ("auto", "cpu")), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("block", "size", "dtype", "message"),
    [
        (BLOCK, 16, np.float64, "bfloat16, float16 or float32, not float64"),
        (8, 16, np.float32, "blocks of a multiple of 16 slots, not 8"),
        (BLOCK, 8, np.float32, "heads of 16 numbers to 512 bytes, not 8 of float32"),
        (BLOCK, 136, np.float32, "heads of 16 numbers to 512 bytes, not 136 of float32"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name_and_left_to_jax_otherwise(
    block, size, dtype, message
):
    with jax.enable_x64(True):
        inputs = model_inputs(dtype, block, size)
        with pytest.raises(
            ValueError, match=f"the gpu kernel needs .*{message}.*components.<name>.attention"
        ):
            attention(*inputs, kernel="gpu")
        assert not kernels_of(attention, *inputs)


def test_a_jax_without_triton_is_told_from_others(monkeypatch):
    monkeypatch.setattr(attention_gpu, "triton", None)
    inputs = model_inputs(jnp.float32)
    with pytest.raises(ValueError, match="Triton"):
        attention(*inputs, kernel="gpu")
    # A new function, because JAX would otherwise find the one that was traced before.
    assert not kernels_of(lambda *inputs: attention(*inputs), *inputs)


@pytest.mark.parametrize(
    ("kernel", "calls", "window"),
    [("auto", 3, None), ("auto", 3, 20), ("gpu", 3, None), ("jax", 0, None)],
)
def test_a_component_names_its_kernel(kernel, calls, window):
    """`components.language.attention` with rows split over context and heads over tensor. Full
    layers and layers in windows share the kernels."""
    sizes = {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 16,
        "mlp_width": 64,
        "vocab_size": 32,
    }
    if window is not None:
        sizes |= {"window": window, "full_layers": (1,)}
    settings = ComponentsConfig(language=ComponentConfig(attention=kernel))
    mesh = make_mesh({"data": 2, "context": 2, "tensor": 2})
    model = build_model(ModelConfig(language=LanguageConfig(**sizes)), 32, settings, mesh)
    layout = model.layout("language")
    rows = abstract_language_rows(layout, 4 * BLOCK, 4, BLOCK, windows=window is not None)
    media = jax.ShapeDtypeStruct((layout.ranks, 4 * BLOCK, 64), jnp.float32)
    loss = lambda params, rows, media: model.hidden(params, rows, media)[0].sum()  # noqa: E731
    assert len(kernels_of(jax.grad(loss), model.abstract("float32"), rows, media)) == calls
