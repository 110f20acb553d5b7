"""Parameters in shards: gathered weights and looked-up tables, and their gradients, equal whole
parameters on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import make_mesh
from sharding.parameters import (
    Deferred,
    by_replica,
    deferred,
    gathered,
    is_split,
    looked_up,
    map_rows,
    reduced,
    replica_axes,
    row_axes,
    whole_sum,
)
from sharding.rules import make_layout

AXES = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "scale": (None,)}
SHAPES = {"table": (12, 8), "up": (8, 4), "scale": (8,)}
SLOTS = ("batch", "sequence")
BOTH = {"embed": ["fsdp", "tensor"], "mlp": [], "vocab": []}
MESHES = {  # mesh, span, replicas of a split parameter, rules of the layout
    "data-fsdp-tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 1, 2, {}),
    "fsdp": ({"data": 1, "fsdp": 4}, 1, 1, {}),
    "data-context": ({"data": 2, "context": 2}, 1, 4, {}),
    "spans": ({"data": 2, "fsdp": 4}, 2, 2, {}),
    "tensor": ({"data": 1, "tensor": 2}, 1, 1, {}),
    "width-over-both": ({"data": 2, "fsdp": 2, "tensor": 2}, 1, 2, BOTH),
}


def layout_of(sizes, span=1, rules=None):
    """A layout of the first devices, where axes that are not named have one device."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    mesh = make_mesh(sizes, jax.devices()[: np.prod([*sizes.values()])], spans=(1, span))
    return make_layout(mesh, rules)


def loss(layout, params, rows, target, dtype):
    """A model of one table that is looked up, one scale and one matrix that is gathered."""
    x = looked_up(layout, params["table"], AXES["table"], rows, dtype)
    x = x * params["scale"].astype(dtype)
    y = x @ gathered(layout, params["up"], AXES["up"], dtype)
    y = layout.constrain(y, (*SLOTS, "mlp"))
    return jnp.sum(jnp.tanh(y.astype(jnp.float32)) * target)


def step(layout, dtype, params, rows, target, totals):
    """Gradients of all parameters, added to their totals."""
    grads = jax.grad(lambda params: loss(layout, params, rows, target, dtype))(params)
    return jax.tree.map(lambda total, leaf: total + leaf.reshape(total.shape), totals, grads)


@pytest.mark.parametrize("sizes, span, replicas, rules", MESHES.values(), ids=MESHES)
def test_gradients_add_up_by_replica(sizes, span, replicas, rules):
    """Sums of gradients have a leading axis of replicas, whose sum is the gradient on one
    device; they begin with one."""
    unspanned = layout_of(sizes, span, rules)
    layout = unspanned.spanned(span)
    random = np.random.default_rng(0)
    params = {
        name: jax.device_put(
            random.standard_normal(shape).astype(np.float32), unspanned.sharding(AXES[name])
        )
        for name, shape in SHAPES.items()
    }
    rows = random.integers(0, 12, (layout.groups, 4 * layout.parts)).astype(np.int32)
    target = random.standard_normal((*rows.shape, 4)).astype(np.float32)
    sums = jax.tree.map(lambda leaf: by_replica(layout, leaf, np.float32), params)
    assert {sums[name].shape[: sums[name].ndim - 2] for name in ("table", "up")} == {
        (replicas,) if replicas > 1 else ()
    }
    device_rows = jax.device_put(rows, layout.sharding(SLOTS))
    device_target = jax.device_put(target, layout.sharding((*SLOTS, None)))
    totals = jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape), leaf.sharding), sums)

    def by_device(*arguments):
        return step(layout.inside(*row_axes(layout)), jnp.float32, *arguments)

    arguments = (params, device_rows, device_target, totals)
    results = jax.jit(map_rows(layout, by_device, arguments, sums))(*arguments)
    single_device = layout_of({})
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    expected = step(single_device, jnp.float32, jax.device_get(params), rows, target, zeros)
    for name, want in expected.items():
        got = np.asarray(results[name]) - 1
        got = got.sum(0) if got.ndim > want.ndim else got
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=name)


def test_experts_that_devices_keep_apart_are_not_gathered_whole():
    axes = ("experts", "expert_embed", "mlp")
    experts_apart = layout_of(
        {"data": 2, "fsdp": 2, "tensor": 2}, rules={"embed": ["data", "fsdp"]}
    )
    assert not is_split(experts_apart.inside(*row_axes(experts_apart)), axes)
    rules = {"embed": ["data", "fsdp"], "experts": []}
    experts_together = layout_of({"data": 2, "fsdp": 2, "tensor": 2}, rules=rules)
    assert is_split(experts_together.inside(*row_axes(experts_together)), axes)


@pytest.mark.parametrize("sizes, span, replicas, rules", MESHES.values(), ids=MESHES)
def test_deferred_gradients_are_those_of_whole_parameters(sizes, span, replicas, rules):
    """Each device adds up the gradient of the whole table and matrix, and the sums are reduced
    to shards at the end."""
    unspanned = layout_of(sizes, span, rules)
    layout = unspanned.spanned(span)
    inside = layout.inside(*row_axes(layout))
    random = np.random.default_rng(0)
    names = [name for name in SHAPES if is_split(inside, AXES[name])]
    assert names == ([] if sizes.get("fsdp", 1) == 1 else ["table", "up"])
    params = {
        name: jax.device_put(
            random.standard_normal(shape).astype(np.float32), unspanned.sharding(AXES[name])
        )
        for name, shape in SHAPES.items()
    }
    rows = random.integers(0, 12, (layout.groups, 4 * layout.parts)).astype(np.int32)
    target = random.standard_normal((*rows.shape, 4)).astype(np.float32)
    shapes = {name: whole_sum(inside, params[name], AXES[name], np.float32) for name in names}
    for name in names:
        assert shapes[name].shape == (layout.groups * layout.parts, *SHAPES[name])
    totals = {
        name: jax.device_put(np.ones(struct.shape), struct.sharding)
        for name, struct in shapes.items()
    }

    def on_device(params, rows, target, totals):
        held = {
            name: deferred(inside, leaf, AXES[name], np.float32) if name in names else leaf
            for name, leaf in params.items()
        }
        grads = jax.grad(lambda held: loss(inside, held, rows, target, np.float32))(held)
        assert all(isinstance(grads[name], Deferred) for name in names)
        return {name: totals[name] + grads[name].stand_in[None] for name in names}

    arguments = (
        params,
        jax.device_put(rows, layout.sharding(SLOTS)),
        jax.device_put(target, layout.sharding((*SLOTS, None))),
        totals,
    )
    results = jax.jit(map_rows(layout, on_device, arguments, shapes))(*arguments)
    zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    expected = step(layout_of({}), np.float32, jax.device_get(params), rows, target, zeros)
    for name in names:
        shards = reduced(layout, row_axes(layout), AXES[name], np.float32)
        gradient = jax.jit(shards, out_shardings=params[name].sharding)(results[name])
        initial_sum = layout.groups * layout.parts  # the totals began with one on each device
        np.testing.assert_allclose(np.asarray(gradient) - initial_sum, expected[name], atol=1e-5)


def test_replicas_are_all_that_have_rows_and_the_same_shard():
    """Replicas of a parameter are the devices that hold the same shard and rows of their own."""
    layout = layout_of({"data": 2, "fsdp": 2, "context": 2})
    mesh = layout.mesh
    assert row_axes(layout) == ("data", "fsdp", "context", "tensor")
    assert replica_axes(layout, layout.sharding(AXES["up"])) == ("data", "context")
    assert replica_axes(layout, NamedSharding(mesh, P())) == ("data", "fsdp", "context")
    assert row_axes(layout_of({"tensor": 2})) == ()
    total = by_replica(
        layout,
        jax.ShapeDtypeStruct((8, 4), "bfloat16", sharding=layout.sharding(AXES["up"])),
        np.float32,
    )
    assert (total.shape, total.dtype, total.sharding.spec) == (
        (4, 8, 4),
        np.float32,
        P(("data", "context"), ("fsdp",), ("tensor",)),
    )


def test_an_encoder_over_tensor_has_replicas_there():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    layout = make_layout(mesh, {"batch": ["data", "fsdp", "tensor"]})
    assert replica_axes(layout, layout.sharding(AXES["up"])) == ("data", "tensor")


def test_gathered_keeps_only_the_compute_axes_split():
    layout = layout_of(MESHES["data-fsdp-tensor"][0])
    weight = jax.device_put(np.arange(32.0).reshape(8, 4), layout.sharding(AXES["up"]))
    assert weight.sharding.shard_shape(weight.shape) == (4, 2)
    gathered_weight = jax.jit(lambda w: gathered(layout, w, AXES["up"], w.dtype))(weight)
    assert gathered_weight.sharding.shard_shape(gathered_weight.shape) == (8, 2)
    np.testing.assert_array_equal(gathered_weight, weight)
