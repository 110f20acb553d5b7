"""Slots of rows in another order, against numpy, and attention over the parts of
rows, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import context
from sharding.context import gathered_attention, permute, permute_back, take_slots
from sharding.mesh import make_mesh
from sharding.rules import make_layout


@pytest.mark.parametrize("span", [1, 2, 4])
@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 2}, {"data": 4, "context": 2}])
def test_slots_in_another_order(span, sizes):
    """Values, their inverse, and the gradient against a loop over slots."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "context": 1} | sizes, spans=(1, 2, 4))
    layout = make_layout(mesh).spanned(span)
    rng = np.random.default_rng(span)
    x, d_y = (rng.standard_normal((layout.groups, 24, 3)).astype(np.float32) for _ in range(2))
    marks = rng.integers(0, 9, (layout.groups, 24), dtype=np.int32)
    index = np.stack([rng.permutation(24).astype(np.int32) for _ in x])
    y, moved = jax.jit(permute, static_argnums=0)(layout, (x, marks), index)
    np.testing.assert_array_equal(y, np.take_along_axis(x, index[..., None], axis=1))
    np.testing.assert_array_equal(moved, np.take_along_axis(marks, index, axis=1))
    restored = jax.jit(permute_back, static_argnums=0)(layout, y, index)
    np.testing.assert_array_equal(restored, x)
    pull = jax.jit(lambda x, d_y: jax.vjp(lambda x: permute(layout, x, index), x)[1](d_y)[0])
    want = np.zeros_like(x)
    for row, slot in np.ndindex(index.shape):
        want[row, index[row, slot]] = d_y[row, slot]
    np.testing.assert_array_equal(pull(x, d_y), want)
    # The gradient is gathered by the inverse order. Only that inverse, of integers, is scattered.
    assert "scatter(f32" not in pull.lower(x, d_y).compile().as_text()


@pytest.mark.parametrize("sizes", [{"data": 4, "fsdp": 2}, {"data": 4, "context": 2}])
def test_packed_tokens_come_to_the_ranks_that_hold_them(sizes):
    """The gradient of a permutation takes every token back to its slot."""
    mesh = make_mesh({"data": 1, "fsdp": 1, "context": 1} | sizes, spans=(1, 2))
    layout = make_layout(mesh).spanned(2)
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (layout.groups, 24, 3)).astype(np.float32)
    slots = np.stack([rng.permutation(24).astype(np.int32) for _ in x])

    @jax.jit
    def there_and_back(x):
        tokens, pull = jax.vjp(lambda x: take_slots(layout, x, slots), x)
        return tokens, pull(tokens)[0]

    tokens, pulled = there_and_back(x)
    packed = np.take_along_axis(x, slots[..., None], axis=1)
    np.testing.assert_array_equal(tokens, packed.reshape(layout.ranks, 12, 3))
    np.testing.assert_array_equal(pulled, x)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_heads_change_nothing(groups, monkeypatch):
    """Four key heads whose keys and values are gathered at once or in groups, by how many
    bytes a group may have."""
    layout = make_layout(make_mesh({"data": 2, "fsdp": 1, "context": 4}))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 32, heads, 8)).astype(np.float32) for heads in (8, 4, 4))
    gathered_bytes = 2 * k[0].nbytes  # keys and values of a row
    monkeypatch.setattr(context, "GROUP_BYTES", gathered_bytes // groups)
    heads_seen = []

    def attend(q, k, v):
        heads_seen.append(k.shape[2])
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k), axis=-1)
        return jnp.einsum("bhqt,bthk->bqhk", weights, v)

    def in_parts(q, k, v):
        return gathered_attention(attend, q, k, v, 4, layout.mesh_axes("sequence"))

    slots = ("batch", "sequence", None, None)
    parted = layout.local(in_parts, (slots, slots, slots), slots)
    out, pull = jax.vjp(jax.jit(parted), q, k, v)
    assert heads_seen == [4 // groups] * groups
    want, pull_whole = jax.vjp(attend, q, k, v)
    np.testing.assert_allclose(out, want, atol=1e-5)
    for gradient, wanted in zip(pull(out), pull_whole(want), strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5)


def test_one_device_along_the_axes_gathers_nothing():
    """Keys and values are not even cut into groups of heads."""
    layout = make_layout(make_mesh({"data": 8, "fsdp": 1, "context": 1}))
    axes = layout.mesh_axes("sequence")
    assert axes == ("context",)
    slots = ("batch", "sequence", None, None)

    def attend(q, k, v):
        assert k.shape == (1, 32, 4, 2)
        return q + k + v

    local = layout.local(lambda *x: gathered_attention(attend, *x, 4, axes), (slots,) * 3, slots)
    x = jnp.ones((8, 32, 4, 2))
    assert not {"all_gather", "transpose", "concatenate"} & set(
        str(jax.make_jaxpr(local)(x, x, x)).replace("[", " ").split()
    )
