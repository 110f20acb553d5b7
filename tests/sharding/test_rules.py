import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding.mesh import MeshError, abstract_mesh, make_mesh
from sharding.rules import Layout, make_layout, rank_nodes

MESH = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


def test_default_layout():
    layout = make_layout(MESH)
    assert (layout.ranks, layout.batch_axes) == (4, ("data", "fsdp"))
    assert layout.spec(("embed", "heads", None)) == P(("fsdp",), ("tensor",), None)
    assert layout.spec(("layers", None, "vocab")) == P(None, None, ("tensor",))
    assert layout.rows.spec == P(("data", "fsdp"))
    assert layout.size("heads") == 2 and layout.size("layers") == 1


def test_batch_takes_axes_from_the_computation():
    """An encoder that counts `tensor` as data has more ranks and computes with whole heads."""
    layout = make_layout(MESH, {"batch": ["data", "fsdp", "tensor"]})
    assert layout.ranks == 8
    assert all(layout.mesh_axes(name) == () for name in ("heads", "kv_heads", "mlp", "vocab"))
    # Parameters may stay split over a batch axis: they are gathered
    assert layout.mesh_axes("embed") == ("fsdp",)


def test_axes_are_in_mesh_order_however_they_are_named():
    assert make_layout(MESH, {"batch": ["tensor", "data"]}).batch_axes == ("data", "tensor")


def test_an_empty_override_replicates():
    layout = make_layout(MESH, {"batch": [], "mlp": []})
    assert layout.ranks == 1 and layout.rows.spec == P(None)
    assert layout.mesh_axes("mlp") == () and layout.mesh_axes("heads") == ("tensor",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"width": ["fsdp"]},
            r"here: unknown logical axis 'width'; known: batch, sequence, layers, embed",
        ),
        (
            {"embed": ["model"]},
            r"here\.embed: unknown mesh axis 'model'; the mesh has data, fsdp, tensor",
        ),
        (
            {"batch": ["data", "tensor"], "mlp": ["tensor"]},
            r"here: .*\['tensor'\] .*'batch' and 'mlp'",
        ),
        ({"heads": ["data"]}, r"here: .*\['data'\] .*'batch' and 'heads'"),
    ],
)
def test_impossible_layouts_are_refused(overrides, message):
    with pytest.raises(MeshError, match=message):
        make_layout(MESH, overrides, "here")


def test_a_dimension_that_does_not_split_is_refused():
    layout = make_layout(MESH)
    layout.check("language.head", (16, 6), ("embed", "vocab"))
    with pytest.raises(
        MeshError, match=r"language\.head: axis 'vocab' of length 7 .* \('tensor',\) of 2 devices"
    ):
        layout.check("language.head", (16, 7), ("embed", "vocab"))


def test_two_dimensions_over_one_mesh_axis_are_refused():
    layout = make_layout(MESH, {"embed": ["fsdp", "tensor"]})
    with pytest.raises(
        MeshError, match=r"language\.up: .*'embed', 'mlp'.* \['tensor'\]; change this .* layout"
    ):
        layout.check("language.up", (16, 16), ("embed", "mlp"))


def shard_shape(x):
    return x.sharding.shard_shape(x.shape)


def test_gathered_keeps_only_the_compute_axes_split():
    layout = make_layout(MESH)
    weight = jax.device_put(np.arange(32.0).reshape(8, 4), layout.sharding(("embed", "mlp")))
    assert shard_shape(weight) == (4, 2)
    whole = jax.jit(lambda w: layout.gathered(w, ("embed", "mlp")))(weight)
    assert shard_shape(whole) == (8, 2)
    np.testing.assert_array_equal(whole, weight)


def test_local_runs_on_each_devices_own_part():
    layout = make_layout(MESH)
    rows, table = jnp.arange(4.0 * 6).reshape(4, 6), jnp.arange(6.0)

    def own(row, part):
        assert row.shape == (1, 6) and part.shape == (3,)
        return row.sum(keepdims=True)[:, :1], part * 2

    axes: tuple[str | None, ...] = ("batch",)
    sums, doubled = jax.jit(layout.local(own, (axes, ("heads",)), (axes, ("heads",))))(rows, table)
    np.testing.assert_array_equal(sums[:, 0], np.asarray(rows).sum(1))
    np.testing.assert_array_equal(doubled, 2 * np.arange(6))


def test_layouts_are_values():
    """Layouts are static arguments of compiled functions: equal ones must not compile anew."""
    one, two = make_layout(MESH), make_layout(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert isinstance(one, Layout) and one == two and hash(one) == hash(two)
    assert one != make_layout(MESH, {"batch": ["data"]})


def test_nodes_of_ranks():
    """Eight devices in order; a rank's node is that of its first device."""
    both = make_layout(MESH, {"batch": ["data", "fsdp"]})
    assert rank_nodes(both, 4).tolist() == [0, 0, 1, 1]
    assert rank_nodes(both, 2).tolist() == [0, 1, 2, 3]
    assert rank_nodes(make_layout(MESH, {"batch": ["fsdp", "tensor"]}), 2).tolist() == [0, 0, 1, 1]
    assert rank_nodes(both).tolist() == [0, 0, 0, 0]
    planned = make_layout(abstract_mesh({"data": 16, "fsdp": 2}, 32))
    assert rank_nodes(planned, 8).tolist() == [rank // 8 for rank in range(32)]
    assert rank_nodes(planned).tolist() == [0] * 32
