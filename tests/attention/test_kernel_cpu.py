"""What is of the kernel for CPUs alone: threads, its exponential, and where it is chosen. Its results are compared with
the dense form beside those of the jax kernel, in test_attention.py."""

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
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(3))
    return q, k, v, packed([RAGGED, HOLED, WHOLE], True), d_out


@pytest.mark.parametrize(("cores", "workers"), [(2, {2}), (3, {3}), (16, {16, 6}), (100, {30, 6})])
def test_threads_change_no_bit(cores, workers, monkeypatch):
    """Three rows of two key heads and five blocks of queries: no more threads than there are shares."""
    inputs = singles()
    alone = tiled_vjp(*inputs, "cpu")
    monkeypatch.setattr(kernel_cpu, "_workers_per_device", lambda: cores)
    lowered = jax.jit(lambda *arrays: tiled_vjp.__wrapped__(*arrays, "cpu")).lower(*inputs)
    assert {int(x) for x in re.findall(r"workers = (\d+)", lowered.as_text())} == workers
    for a, b in zip(alone, lowered.compile()(*inputs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_devices_of_a_process_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(24), raising=False)
    assert jax.local_device_count() == 8
    assert kernel_cpu._workers_per_device() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    assert kernel_cpu._workers_per_device() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 17)
    assert kernel_cpu._workers_per_device() == 2


def test_nan_goes_where_the_jax_kernel_has_it():
    """Or a run would not see that its numbers are none."""
    q, k, v, mask, d_out = singles()
    k[0, 7] = np.nan  # of document 2 of the first row, slots 5 to 16
    results = tiled_vjp(q, k, v, mask, d_out, "cpu")
    assert np.isnan(results[0][0, 7:17]).all()
    for got, want in zip(results, tiled_vjp(q, k, v, mask, d_out, "jax"), strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("size", [40, 160, 300])
@pytest.mark.parametrize("block", [64, 97, 100, 128])
def test_products_are_cut_out_of_blocks_and_joined_of_several(block, size):
    """Of documents whose tiles are whole, partial and none, of neighbouring blocks and of others."""
    segments = np.zeros(6 * block, np.int32)
    segments[: 4 * block + 9] = 1
    segments[4 * block + 9 : 5 * block + 3] = 2
    mask = packed([segments], True, block)
    random = np.random.default_rng(0)
    q, k, v, d_out = (
        random.standard_normal((1, len(segments), heads, size), dtype=np.float32)
        for heads in (2, 1, 1, 2)
    )
    wanted = tiled_vjp(q, k, v, mask, d_out, "jax")
    for got, want in zip(tiled_vjp(q, k, v, mask, d_out, "cpu"), wanted, strict=True):
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
    assert _product_sides(block, size) == sides
    assert block % sides[0] == 0 and math.prod(sides) * size <= kernel_cpu.SMALL_PRODUCT


def test_exponential():
    x = np.concatenate([np.linspace(-90, 20, 40_001), [0, -1e-8, -87.99, -np.inf, -1e30]])
    x = x.astype(np.float32)
    got = np.array([_exp(value) for value in x])
    want = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(got[x > -87], want[x > -87], rtol=4e-7)
    assert (got[x < -88] == 0).all() and (got[x <= -87] < 1.7e-38).all()
    assert np.isnan(_exp(np.float32(np.nan)))


tokens = st.builds(TokenIds, *[st.integers(0, 2)] * 2, *[st.integers(-3, 9)] * 2)


def test_a_new_rule_compiles_its_loops_anew():
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
    of_many = jax.vmap(lambda q: attention(q, k, v, mask, kernel="cpu"))(jnp.stack([q, 2 * q]))
    for got, times in zip(of_many, (1, 2), strict=True):
        want = attention(times * q, k, v, mask, kernel="cpu")
        np.testing.assert_array_equal(got, want)


LOAD = """
from jaxmllm import compiled
from jaxmllm.attention import kernel_cpu
kernel_cpu._register()
print(sum(callback.cache_hits for callback in compiled._callbacks))
"""


def test_another_process_loads_what_this_one_compiled():
    kernel_cpu._register()
    run = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 2


def test_rows_of_no_slots_of_data_are_zero():
    q, k, v, d_out = (x.astype(np.float32) for x in random_inputs(1))
    for x in tiled_vjp(q, k, v, packed([[0] * SLOTS], True), d_out, "cpu"):
        assert not np.asarray(x).any()
