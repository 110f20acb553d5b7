"""Meshes from the sizes of their axes, concrete and abstract, and axes that are cut for
rows of several ranks."""

import jax
import pytest
from jax.sharding import AxisType

from sharding.mesh import MeshError, abstract_mesh, axis_sizes, make_mesh


def test_axes_keep_their_order_and_use_every_device():
    mesh = make_mesh({"data": 2, "fsdp": 4, "tensor": 1})
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == (2, 4, 1)
    assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize(
    ("sizes", "shape"), [((-1, 2, 2), (2, 2, 2)), ((2, -1, 1), (2, 4, 1)), ((8, 1, -1), (8, 1, 1))]
)
def test_one_size_may_be_the_rest(sizes, shape):
    assert (
        make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))).devices.shape == shape
    )


def test_axes_are_left_to_the_compiler():
    """`jax.make_mesh` would make axes Explicit, and shard_map then refuses unsharded inputs."""
    assert set(make_mesh({"data": -1}).axis_types) == {AxisType.Auto}


def test_given_devices_are_used():
    devices = jax.devices()[2:6]
    assert list(make_mesh({"data": 2, "tensor": -1}, devices).devices.flat) == devices


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3, "tensor": 2}, "needs 6 devices but there are 8"),
        ({"data": 2, "tensor": 2}, "needs 4 devices but there are 8"),
        ({"data": 16}, "needs 16 devices but there are 8"),
        ({"data": -1, "tensor": 3}, "needs a multiple of 3 devices but there are 8"),
        ({"data": -1, "tensor": 16}, "needs a multiple of 16 devices but there are 8"),
        ({"data": -1, "tensor": -1}, "-1 is allowed once"),
        ({"data": 0, "tensor": 8}, "must be positive"),
        ({"data": -2, "tensor": 8}, "must be positive"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(sizes)


def test_an_abstract_mesh_is_the_same_mesh_without_devices():
    sizes = {"data": -1, "fsdp": 2, "tensor": 1}
    abstract = abstract_mesh(sizes, 8)
    real = make_mesh(sizes)
    assert abstract.shape == real.shape
    assert abstract.axis_types == real.axis_types
    assert abstract_mesh(sizes, 4096).shape == {"data": 2048, "fsdp": 2, "tensor": 1}
    with pytest.raises(MeshError, match="needs a multiple of 2 devices but there are 9"):
        abstract_mesh(sizes, 9)


def test_axes_are_cut_by_the_prime_factors_of_spans():
    """Innermost sub-axes hold the factors of the shortest spans, and
    devices stay where they are."""
    sizes = {"data": 4, "fsdp": 2, "tensor": 1}
    mesh = make_mesh(sizes, spans=(1, 2, 8))
    assert dict(mesh.shape) == {
        "data": 1, "data.1": 2, "data.2": 2, "fsdp": 1, "fsdp.1": 2, "tensor": 1
    }  # fmt: skip
    assert list(mesh.devices.flat) == list(make_mesh(sizes).devices.flat)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert abstract_mesh(sizes, 8, (1, 2, 8)).shape == mesh.shape
    assert axis_sizes(mesh) == sizes and axis_sizes(mesh)["data"] == 4
    large = abstract_mesh({"data": 512}, 512, (1, 2, 4, 8))
    assert tuple(large.shape.values()) == (64, 2, 2, 2)
    assert tuple(abstract_mesh({"data": 24}, 24, (2, 6)).shape.values()) == (4, 3, 2)
    assert tuple(abstract_mesh({"data": 5}, 5, (2, 6)).shape.values()) == (5,)


@pytest.mark.parametrize("spans", [(), (1,)])
def test_without_spans_nothing_is_cut(spans):
    sizes = {"data": 4, "fsdp": 2}
    assert make_mesh(sizes, spans=spans) == make_mesh(sizes)
    assert abstract_mesh(sizes, 8, spans) == abstract_mesh(sizes, 8)


@pytest.mark.parametrize("spans", [(0, 2), (2, 3), (4, 6)])
def test_spans_form_a_chain(spans):
    with pytest.raises(MeshError, match=r"spans \[.*\] must be positive, and each divide the next"):
        make_mesh({"data": 8}, spans=spans)
