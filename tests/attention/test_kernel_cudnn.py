"""The cuDNN kernel: what cuDNN would be told is checked against the rule of masks, by the loops
that take its place where it is missing. The call is lowered for CUDA, and compiled where the
compiler is installed, but not run."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmllm.attention import kernel_cudnn, kernel_jax
from jaxmllm.attention.attention import attention, attention_and_logsumexp
from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import causal_ids, document_runs, item_ids
from tests.attention.masks import mask_of
from tests.attention.test_attention import random_inputs

BLOCK = 16
SLOTS = 48
MOST = 6


@st.composite
def runs_of_slots(draw):
    """Documents of a row in runs, some of them empty, with padding anywhere
    between and after them."""
    sizes = draw(st.lists(st.integers(0, 15), min_size=1, max_size=MOST))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    row: list[int] = []
    for document, (size, gap) in enumerate(zip(sizes, gaps, strict=True), 1):
        row += [0] * gap + [document] * size
    return np.array((row + [0] * SLOTS)[:SLOTS], np.int32)


def masked(rows, causal, window=None):
    """The mask of rows whose documents are also given as runs of slots."""
    ids = [causal_ids(row) if causal else item_ids(row) for row in rows]
    ids = [row.within(window) for row in ids] if window else ids
    documents = Documents(jnp.asarray(document_runs(np.stack(rows), MOST)), causal, window)
    return jax.tree.map(jnp.asarray, mask_of(ids, BLOCK))._replace(documents=documents)


@partial(jax.jit, static_argnames="kernel")
def vjp(q, k, v, mask, d_out, kernel="cudnn"):
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, mask, kernel=kernel), q, k, v)
    return out, *pullback(d_out)


def inputs_of(rows=2, size=16):
    arrays = random_inputs(rows, SLOTS, heads=4, key_heads=2, size=size)
    return [jnp.asarray(x, jnp.bfloat16) for x in arrays]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(runs_of_slots(), min_size=2, max_size=2),
    st.sampled_from([(True, None), (True, 5), (False, None)]),
)
def test_runs_are_the_rule_of_the_ids(rows, rule):
    """The loops read runs, the jax kernel reads ids; both in bfloat16, so they
    agree to two percent."""
    mask = masked(rows, *rule)
    q, k, v, d_out = inputs_of()
    by_runs = vjp(q, k, v, mask, d_out)
    by_ids = vjp(q, k, v, mask, d_out, "jax")
    for a, b in zip(by_runs, by_ids, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def cudnn(q, k, v, lengths, offsets, scale, causal, window):
    """What cuDNN computes on its packed layout, sequence by sequence: outputs, and logsumexps
    [M, H, T] by sequence."""
    heads = q.shape[2]
    group = q.shape[2] // k.shape[2]
    (query_offsets, key_offsets), strides = offsets, (q[0, 0].size, k[0, 0].size)
    flat_q, flat_k, flat_v = (
        np.asarray(x, np.float64).reshape(-1, *x.shape[2:]) for x in (q, k, v)
    )
    outputs = np.full(flat_q.shape, np.nan)
    sums = np.full((lengths.size, heads, len(flat_q)), np.nan)
    for index, length in enumerate(lengths):
        assert query_offsets[index] % strides[0] == 0 and key_offsets[index] % strides[1] == 0
        first_query = query_offsets[index] // strides[0]
        first_key = key_offsets[index] // strides[1]
        queries_slice = slice(first_query, first_query + length)
        keys_slice = slice(first_key, first_key + length)
        keys, values = (np.repeat(x[keys_slice], group, axis=1) for x in (flat_k, flat_v))
        logits = scale * np.einsum("qhk,phk->hqp", flat_q[queries_slice], keys)
        distance = np.arange(length)[:, None] - np.arange(length)
        visible = (
            (distance >= 0) & (distance < (window or SLOTS)) if causal else distance == distance
        )
        logits = np.where(visible, logits, -np.inf)
        if length:
            largest = logits.max(axis=-1, keepdims=True)
            total = np.exp(logits - largest).sum(axis=-1, keepdims=True)
            sums[index, :, :length] = (largest + np.log(total))[..., 0]
            outputs[queries_slice] = np.einsum(
                "hqp,phk->qhk", np.exp(logits - largest) / total, values
            )
    return outputs, sums


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_the_call_is_given_the_sequences_and_read_back_by_slots(monkeypatch, causal, window):
    """The passes around a cuDNN of numpy, which leaves NaN wherever it writes nothing."""
    rows = [
        np.repeat(np.array([1, 0, 2, 3, 0], np.int32), [10, 3, 20, 7, 8]),
        np.repeat(np.array([0, 4, 9], np.int32), [5, 13, 30]),
    ]
    mask = masked(rows, causal, window)
    q, k, v, d_out = inputs_of()
    scale = 0.25
    calls = {}

    def call(name, given_scale, q_of_call, given_mask, packing, inputs, results):
        """Takes the place of the call of cuDNN, and checks what it is given."""
        lengths, key_lengths, *offsets = (np.asarray(x)[0] for x in packing.operands)
        assert (lengths == key_lengths).all() and len(offsets[0]) == len(lengths) + 1
        assert (np.diff((lengths == 0).astype(int)) >= 0).all()  # empty sequences come last
        assert list(lengths[:5]) == [10, 20, 7, 13, 30]
        out, sums = cudnn(q, k, v, lengths, offsets, given_scale, causal, window)
        calls[name] = inputs, sums
        if name == kernel_cudnn.FORWARD:
            out = jnp.asarray(out.swapaxes(0, 1)[None], q.dtype)
            assert out.shape == results[0].shape and sums.shape == results[1].shape
            return [out, jnp.asarray(sums, jnp.float32)]
        return [jnp.full(result.shape, jnp.nan, result.dtype) for result in results]

    monkeypatch.setattr(kernel_cudnn, "_call", call)
    out, logsumexp = kernel_cudnn.forward(scale, q, k, v, mask)
    want, sums_wanted = kernel_jax.forward(scale, q, k, v, mask)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, want)), atol=2e-2)
    np.testing.assert_allclose(logsumexp, sums_wanted, rtol=2e-2, atol=2e-2)

    # The backward pass returns the sums as they came, and slots of no sequence have zero gradients.
    gradients = kernel_cudnn.backward(scale, q, k, v, mask, out, logsumexp, d_out)
    inputs, sums = calls[kernel_cudnn.BACKWARD]
    written = np.isfinite(sums)
    np.testing.assert_allclose(np.asarray(inputs[3])[written], sums[written], rtol=1e-5)
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        in_sequence = np.isnan(np.asarray(gradient, np.float32)).any(axis=(2, 3))
        np.testing.assert_array_equal(in_sequence, np.stack(rows) > 0)


def test_lowers_for_cuda_on_any_machine():
    rows = [np.repeat(np.array([1, 2, 0], np.int32), [20, 20, 8])] * 2
    mask = masked(rows, causal=True, window=7)
    q, k, v, d_out = inputs_of()
    text = vjp.trace(q, k, v, mask, d_out).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @(__cudnn\S+)\(", text)
    assert calls == [kernel_cudnn.FORWARD, kernel_cudnn.BACKWARD]
    texts = re.findall(r'backend_config = "(\{.*?\})"', text)
    configs = [json.loads(config.replace("\\22", '"')) for config in texts]
    call_configs = [config["cudnn_fmha_backend_config"] for config in configs]
    assert len(call_configs) == 2
    for config in call_configs:
        assert config["mask_type"] == "PADDING_CAUSAL"
        assert config["sliding_window_length"] == 7
        assert config["max_seg_per_batch"] == 2 * MOST


def test_one_compilation_serves_all_rows():
    q, k, v, d_out = inputs_of()
    traces = []

    @jax.jit
    def run(q, k, v, mask, d_out):
        traces.append(1)
        return attention(q, k, v, mask, kernel="cudnn")

    for sizes in ([48], [10, 38], [1, 2, 3, 42]):
        row = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
        run(q, k, v, masked([row, row], causal=True), d_out)
    assert len(traces) == 1


def test_the_memory_of_the_backward_pass_is_that_of_an_h100():
    """36.28 GiB is what XLA asked for on an H100 with jax 0.11.2, for one row of 8,192 slots with
    room for 144 documents."""
    needed = kernel_cudnn.backward_bytes(8192, heads=32, key_heads=8, size=128, documents=144)
    assert needed / 2**30 == pytest.approx(36.28, abs=0.005)


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        (jnp.float32, 16, "needs bfloat16 or float16, not float32"),
        (jnp.bfloat16, 12, "needs heads of a multiple of 8 numbers up to 256, not 12"),
        (jnp.bfloat16, 264, "needs heads of a multiple of 8 numbers up to 256, not 264"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(dtype, size, message):
    row = np.ones(SLOTS, np.int32)
    q, k, v, _ = (x.astype(dtype) for x in inputs_of(size=size))
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, masked([row, row], causal=True), kernel="cudnn")


def test_masks_without_runs_and_gradients_of_a_logsumexp_are_refused():
    row = np.ones(SLOTS, np.int32)
    q, k, v, _ = inputs_of()
    mask = masked([row, row], causal=True)
    with pytest.raises(ValueError, match="tell where their documents lie"):
        attention(q, k, v, mask._replace(documents=None), kernel="cudnn")
    with pytest.raises(ValueError, match="no gradient of a logsumexp"):
        attention_and_logsumexp(q, k, v, mask, kernel="cudnn")


@pytest.mark.parametrize(
    "row", [[1, 1, 2, 2, 1, 1], [1, 0, 1, 0, 0, 0], [1, 2, 3, 0, 0, 0]], ids=["torn", "gap", "many"]
)
def test_rows_that_runs_cannot_tell_are_refused(row):
    with pytest.raises(ValueError, match="takes up to 2 documents that are one run each"):
        document_runs(np.array([row], np.int32), 2)
