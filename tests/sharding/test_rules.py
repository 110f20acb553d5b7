"""Layouts: which logical axes lie on which mesh axes, which layouts are refused, and how
ranks form rows and nodes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
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
    """An encoder that counts `tensor` as data has more ranks, and computes with whole heads."""
    layout = make_layout(MESH, {"batch": ["data", "fsdp", "tensor"]})
    assert layout.ranks == 8
    assert all(layout.mesh_axes(name) == () for name in ("heads", "kv_heads", "mlp", "vocab"))
    # Parameters may stay split over a batch axis, because they are gathered.
    assert layout.mesh_axes("embed") == ("fsdp",)


WITH_CONTEXT = make_mesh({"data": 2, "context": 2, "tensor": 2})


def test_sequence_takes_axes_from_the_rest_of_the_computation():
    layout = make_layout(WITH_CONTEXT, {"sequence": ["context", "tensor"]})
    assert layout.parts == 4
    assert all(layout.mesh_axes(name) == () for name in ("heads", "kv_heads", "mlp", "vocab"))


@pytest.mark.parametrize("name", ["heads", "kv_heads", "mlp", "vocab"])
def test_what_slots_are_split_over_splits_nothing_else_of_the_computation(name):
    with pytest.raises(MeshError, match=rf"here: .*\['context'\] .*'sequence' and '{name}'"):
        make_layout(WITH_CONTEXT, {name: ["context"]}, "here")
    make_layout(WITH_CONTEXT, {name: ["context"], "sequence": []})


@pytest.mark.parametrize("name", ["batch", "layers", "embed", "heads"])
def test_the_axis_of_stages_is_refused(name):
    staged = make_mesh({"stage": 2, "data": 4})
    with pytest.raises(MeshError, match=rf"here\.{name}: mesh axis 'stage' holds the stages"):
        make_layout(staged, {name: ["stage"]}, "here")


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


def test_local_runs_on_each_devices_own_part():
    layout = make_layout(MESH)
    rows = jnp.arange(4.0 * 6).reshape(4, 6)
    table = jnp.arange(6.0)

    def own(row, part):
        assert row.shape == (1, 6) and part.shape == (3,)
        return row.sum(keepdims=True)[:, :1], part * 2

    axes: tuple[str | None, ...] = ("batch",)
    sums, doubled = jax.jit(layout.local(own, (axes, ("heads",)), (axes, ("heads",))))(rows, table)
    np.testing.assert_array_equal(sums[:, 0], np.asarray(rows).sum(1))
    np.testing.assert_array_equal(doubled, 2 * np.arange(6))


def test_layouts_are_values():
    """Layouts are static arguments of compiled functions: equal ones must not compile anew."""
    layout = make_layout(MESH)
    equal_layout = make_layout(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert (
        isinstance(layout, Layout) and layout == equal_layout and hash(layout) == hash(equal_layout)
    )
    assert layout != make_layout(MESH, {"batch": ["data"]})


def test_nodes_of_ranks():
    """Eight devices in order. A rank belongs to the node of its first device."""
    four_ranks = make_layout(MESH, {"batch": ["data", "fsdp"]})
    assert rank_nodes(four_ranks, 4).tolist() == [0, 0, 1, 1]
    assert rank_nodes(four_ranks, 2).tolist() == [0, 1, 2, 3]
    assert rank_nodes(make_layout(MESH, {"batch": ["fsdp", "tensor"]}), 2).tolist() == [0, 0, 1, 1]
    assert rank_nodes(four_ranks).tolist() == [0, 0, 0, 0]
    planned = make_layout(abstract_mesh({"data": 16, "fsdp": 2}, 32))
    assert rank_nodes(planned, 8).tolist() == [rank // 8 for rank in range(32)]
    assert rank_nodes(planned).tolist() == [0] * 32


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"


def test_nodes_of_devices_whose_ids_have_gaps():
    """Devices of several processes on CPUs have such ids."""
    devices = [Device(2048 * (index // 2) + index % 2, index // 2) for index in range(8)]
    layout = make_layout(Mesh(np.array(devices).reshape(4, 2), ("data", "fsdp")))
    assert rank_nodes(layout).tolist() == rank_nodes(layout, 2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rank_nodes(layout, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


CUT = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, spans=(1, 2, 4))


def test_layouts_of_a_cut_mesh_have_sub_axes():
    layout = make_layout(CUT)
    assert layout.batch_axes == ("data", "data.1", "fsdp", "fsdp.1")
    assert layout.mesh_axes("heads") == ("tensor", "tensor.1")
    assert layout.whole_axes("batch") == ("data", "fsdp")
    assert (layout.ranks, layout.groups, layout.span, layout.parts) == (4, 4, 1, 1)
    assert layout.spanned(1) is layout


@pytest.mark.parametrize("mesh", [{}, {"context": 2, "tensor": 1}])
def test_a_span_takes_the_innermost_ranks(mesh):
    """A row of span g lies on g neighbouring ranks, so that its parts are where rows
    of one rank would lie."""
    cut_mesh = make_mesh({"data": 2, "fsdp": 2, "context": 1, "tensor": 2} | mesh, spans=(1, 2, 4))
    layout = make_layout(cut_mesh)
    parts = layout.parts
    for span in (1, 2, 4):
        spanned = layout.spanned(span)
        assert (spanned.ranks, spanned.groups, spanned.span) == (4, 4 // span, span)
        assert spanned.parts == span * parts
        assert spanned.part_axes == (("context.1",) if parts == 2 else ())
    # Rank k * span + j holds part j of row k.
    rows = np.arange(2 * 8).reshape(2, 8)
    shared = jax.device_put(rows, layout.spanned(2).sharding(("batch", "sequence")))
    by_rank = jax.device_put(rows.reshape(4, 4), layout.sharding(("batch", "sequence")))
    slots_by_device = [
        {shard.device: shard.data.tolist() for shard in array.addressable_shards}
        for array in (shared, by_rank)
    ]
    assert slots_by_device[0] == slots_by_device[1]


def test_an_encoder_with_more_ranks_has_spans_of_its_own():
    layout = make_layout(CUT, {"batch": ["data", "fsdp", "tensor"]}).spanned(4)
    assert layout.mesh_axes("sequence")[-1] == "tensor.1"
    assert (layout.ranks, layout.groups) == (8, 2)


def test_spans_that_the_mesh_cannot_form_are_refused():
    with pytest.raises(
        MeshError,
        match=r"span 3 .* of 4 ranks on mesh axes \{'data': 2, 'fsdp': 2\}, cut into .* phases\.<phase>\.spans",
    ):
        make_layout(MESH).spanned(3)
    with pytest.raises(MeshError, match="span 8 cannot be formed of 4 ranks"):
        make_layout(CUT).spanned(8)
    with pytest.raises(MeshError, match="span 2 cannot be formed of 4 ranks"):
        make_layout(make_mesh({"data": 4}, jax.devices()[:4])).spanned(2)


def test_errors_speak_of_whole_axes():
    with pytest.raises(
        MeshError, match=r"unknown mesh axis 'data\.1'; the mesh has data, fsdp, te"
    ):
        make_layout(CUT, {"batch": ["data.1"]})
    with pytest.raises(MeshError, match=r"\['data'\] .*'batch' and 'heads'"):
        make_layout(CUT, {"heads": ["data"]})
    with pytest.raises(MeshError, match=r"over mesh axes \('tensor',\) of 2 devices"):
        make_layout(CUT).check("head", (7,), ("vocab",))
    with pytest.raises(MeshError, match=r"split over \['tensor'\]"):
        make_layout(CUT, {"embed": ["tensor"]}).check("up", (8, 8), ("embed", "mlp"))
