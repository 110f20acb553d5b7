"""What only the kernel for CPUs has: threads, its exponential, and where it is chosen. Its results
are compared with the dense form in test_attention.py, beside those of the jax kernel."""

import hashlib
import inspect
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmllm.attention import kernel_cpu
from jaxmllm.attention.attention import attention
from jaxmllm.attention.kernel_cpu import TARGET, _exp, _product_sides, _sees
from jaxmllm.attention.mask import TokenIds, visible
from tests.attention.test_attention import (
    HOLED,
    RAGGED,
    SLOTS,
    WHOLE,
    packed,
    random_inputs,
    tiled_vjp,
)


def singles():
    """Three rows in float32, and their mask."""
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(3))
    return q, k, v, packed([RAGGED, HOLED, WHOLE], True), d_out


@pytest.mark.parametrize(("cores", "workers"), [(2, {2}), (3, {3}), (16, {16, 6}), (100, {30, 6})])
def test_threads_change_no_bit(cores, workers, monkeypatch):
    """Three rows of two key heads and five blocks of queries: there are never more threads
    than shares of the work."""
    inputs = singles()
    single_thread = tiled_vjp(*inputs, "cpu")
    monkeypatch.setattr(kernel_cpu, "_workers_per_device", lambda: cores)
    lowered = jax.jit(lambda *arrays: tiled_vjp.__wrapped__(*arrays, "cpu")).lower(*inputs)
    assert {int(x) for x in re.findall(r"workers = (\d+)", lowered.as_text())} == workers
    for a, b in zip(single_thread, lowered.compile()(*inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_devices_of_a_process_share_its_cores(monkeypatch):
    """Eight devices on 24 cores have three threads each; on few cores each has one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(24), raising=False)
    assert jax.local_device_count() == 8
    assert kernel_cpu._workers_per_device() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert kernel_cpu._workers_per_device() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 17)
    assert kernel_cpu._workers_per_device() == 2


def test_nan_goes_where_the_jax_kernel_has_it():
    """Otherwise a run would not notice that its loss is NaN."""
    q, k, v, mask, d_out = singles()
    k[0, 7] = np.nan  # in document 2 of the first row, which has slots 5 to 16
    results = tiled_vjp(q, k, v, mask, d_out, "cpu")
    assert np.isnan(results[0][0, 7:17]).all()
    for got, want in zip(results, tiled_vjp(q, k, v, mask, d_out, "jax"), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("size", [40, 160, 300])
@pytest.mark.parametrize("block", [64, 97, 100, 128])
def test_products_are_cut_out_of_blocks_and_joined_of_several(block, size):
    """Documents whose tiles are whole, partial and empty, among neighbouring
    blocks and distant ones."""
    segments = np.zeros(6 * block, np.int32)
    segments[: 4 * block + 9] = 1
    segments[4 * block + 9 : 5 * block + 3] = 2
    mask = packed([segments], True, block)
    random = np.random.default_rng(0)
    q, k, v, d_out = (
        random.standard_normal((1, len(segments), heads, size), dtype=np.float32)
        for heads in (2, 1, 1, 2)
    )
    expected = tiled_vjp(q, k, v, mask, d_out, "jax")
    for got, want in zip(tiled_vjp(q, k, v, mask, d_out, "cpu"), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("block", "size", "sides"),
    [
        (8, 16, (8, 192)),
        (64, 64, (64, 192)),
        (128, 64, (64, 128)),
        (128, 128, (64, 64)),
        (64, 256, (64, 32)),
        (100, 32, (50, 100)),
        (97, 64, (97, 97)),
    ],
)
def test_products_are_small(block, size, sides):
    """The sides of a product divide the block or join several, and its size stays
    below `SMALL_PRODUCT`."""
    assert _product_sides(block, size) == sides
    assert block % sides[0] == 0 and math.prod(sides) * size <= kernel_cpu.SMALL_PRODUCT


def test_exponential():
    """Relative to float64; results below the smallest normal number of float32 may be zero."""
    x = np.concatenate([np.linspace(-90, 20, 40_001), [0, -1e-8, -87.99, -np.inf, -1e30]])
    x = x.astype(np.float32)
    got = np.array([_exp(value) for value in x])
    want = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(got[x > -87], want[x > -87], rtol=4e-7)
    assert (got[x < -88] == 0).all() and (got[x <= -87] < 1.7e-38).all()
    assert np.isnan(_exp(np.float32(np.nan)))


tokens = st.builds(TokenIds, *[st.integers(0, 2)] * 2, *[st.integers(-3, 9)] * 2)


def test_a_new_rule_compiles_its_loops_anew():
    """numba caches the compiled loops on disk and does not notice that the rule of masks changed,
    so its digest is part of the code."""
    source = inspect.getsource(TokenIds) + inspect.getsource(visible)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    assert digest == kernel_cpu.RULE, (
        f"write {digest} there: what numba has on disk holds the old rule"
    )


@given(tokens, tokens)
def test_its_rule_is_that_of_masks(query, key):
    query, key = (ids.map(np.int32) for ids in (query, key))
    assert _sees(query, key) == visible(query, key)


@pytest.mark.parametrize(
    ("kernel", "dtype", "called"),
    [
        ("auto", np.float32, True),
        ("cpu", np.float32, True),
        ("jax", np.float32, False),
        ("auto", jnp.bfloat16, False),
    ],
)
def test_it_runs_where_it_can(kernel, dtype, called):
    q, k, v, mask, _ = singles()
    function = jax.jit(lambda *arrays: attention(*arrays, mask, kernel=kernel))
    text = function.lower(*(jnp.asarray(x, dtype) for x in (q, k, v))).as_text()
    assert (TARGET in text) == called


@pytest.mark.parametrize("kernel", ["auto", "cpu"])
def test_a_process_for_other_devices_does_not_compile_it(kernel, monkeypatch):
    q, k, v, mask, _ = singles()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernel_cpu, "_register", lambda: pytest.fail("was compiled"))
    function = jax.jit(lambda *arrays: attention(*arrays, mask, kernel=kernel))
    assert TARGET not in function.lower(q, k, v).as_text()


def test_what_it_cannot_take_is_refused_by_name():
    q, k, v, mask, _ = singles()
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    with pytest.raises(
        ValueError, match=r"the cpu kernel needs float32, not bfloat16; set .*auto or jax"
    ):
        attention(q, k, v, mask, kernel="cpu")


def test_it_works_under_vmap():
    q, k, v, mask, _ = singles()
    batched = jax.vmap(lambda q: attention(q, k, v, mask, kernel="cpu"))(jnp.stack([q, 2 * q]))
    for got, times in zip(batched, (1, 2), strict=True):
        want = attention(times * q, k, v, mask, kernel="cpu")
        np.testing.assert_array_equal(got, want)


LOAD = """
from jaxmllm import compiled
from jaxmllm.attention import kernel_cpu
kernel_cpu._register()
print(sum(callback.cache_hits for callback in compiled._callbacks))
"""


def test_another_process_loads_what_this_one_compiled():
    """Both compiled callbacks come from numba's cache."""
    kernel_cpu._register()
    run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 2


def test_rows_of_no_slots_of_data_are_zero():
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    for x in tiled_vjp(q, k, v, packed([[0] * SLOTS], True), d_out, "cpu"):
        assert not np.asarray(x).any()
