"""The reader of HLO text: on short texts by hand, and on a compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmllm.setup.hlo import HloError, array_bytes, collectives, device_groups, mesh_axes, parse
from sharding.mesh import make_mesh

ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
# A loop of 5 around a loop of 3, each with a collective, and a loop whose end depends on the data
LOOPS = (
    """\
HloModule jit_loops, is_scheduled=true

FileNames
1 "models/{body}.py"

"""
    + ADD
    + """
%inner (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %r = f32[8,16]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/while/body/psum"}
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %r)
}

%outer (p.1: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %w = (s32[], /*index=1*/f32[8,16]{1,0}) while(%p.1), condition=%ends, body=%inner, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  %y = f32[8,16]{1,0} get-tuple-element(%w), index=1
  %h = bf16[8,16]{1,0} convert(%y)
  %g = (bf16[8,16]{1,0}, bf16[8,64]{1,0}) all-gather-start(%h), channel_id=2, \
replica_groups=[1,4]<=[4], dimensions={1}
  %d = bf16[8,64]{1,0} all-gather-done(%g)
  ROOT %t.1 = (s32[], f32[8,16]{1,0}) tuple(%i.1, %y)
}

%ends (p.2: (s32[], f32[8,16])) -> pred[] {
  %p.2 = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.9_spmd (param: f32[8,16]) -> f32[8,16] {
  %param = f32[8,16]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %w.1 = (s32[], f32[8,16]{1,0}) while(%tuple), condition=%ends, body=%outer, \
backend_config={"known_trip_count":{"n":"5"}}
  %w.2 = (s32[], f32[8,16]{1,0}) while(%w.1), condition=%ends, body=%inner, backend_config={}
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%w.2), index=1
}
"""
)
# As for GPUs: an asynchronous computation, a call, and two dtypes in one collective
ASYNCHRONOUS = (
    """\
HloModule jit_async, num_partitions=4

"""
    + ADD
    + """
%wrapped (q: f32[8,16]) -> f32[2,16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[2,16]{1,0} reduce-scatter(%q), channel_id=3, replica_groups={}, dimensions={0}, \
to_apply=%add
}

%called (q.1: f32[8,16]) -> f32[8,16] {
  %q.1 = f32[8,16]{1,0} parameter(0)
  ROOT %cp = f32[8,16]{1,0} collective-permute(%q.1), channel_id=4, \
source_target_pairs={{0,2},{2,0}}
}

%left (l: f32[8,16]) -> f32[8,16] {
  %l = f32[8,16]{1,0} parameter(0)
  ROOT %al = f32[8,16]{1,0} all-to-all(%l), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}
}

%right (m: f32[8,16]) -> f32[8,16] {
  ROOT %m = f32[8,16]{1,0} parameter(0)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %h.1 = bf16[4]{0} parameter(2)
  %s = ((f32[8,16]{1,0}), f32[2,16]{1,0}, s32[]) async-start(%x), calls=%wrapped
  %e = f32[2,16]{1,0} async-done(%s), calls=%wrapped
  %c = f32[8,16]{1,0} call(%x), to_apply=%called
  %b = f32[8,16]{1,0} conditional(%n, %x, %x), branch_computations={%left, %right}
  %k = (f32[8,16]{1,0}, f32[4]{0}) custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
backend_config="body=%nothing"
  %ra = ((f32[8,16]{1,0}, f32[32,16]{1,0}, s64[4]{0}, s64[4]{0}), \
f32[32,16]{1,0}) ragged-all-to-all-start(%x, %b, %o, %o), channel_id=1, replica_groups={{0,1,2,3}}
  %rd = f32[32,16]{1,0} ragged-all-to-all-done(%ra)
  ROOT %ar = (f32[8,16]{1,0}, bf16[4]{0}) all-reduce(%x, %h.1), channel_id=6, \
replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
}
"""
)
BYTES = 8 * 16 * 4


def facts(text, devices=4):
    """What is known of each collective in a text, as tuples."""
    return [
        (
            collective.operation,
            collective.dtype,
            collective.bytes,
            collective.groups,
            collective.trips,
            collective.exact,
        )
        for collective in collectives(parse(text), devices)
    ]


def test_loops_multiply_and_those_that_end_by_the_data_are_marked():
    pairs = ((0, 1), (2, 3))
    assert facts(LOOPS) == [
        ("all-reduce", "f32", BYTES, pairs, 15, True),
        ("all-gather", "bf16", 4 * BYTES // 2, ((0, 1, 2, 3),), 5, True),
        ("all-reduce", "f32", BYTES, pairs, 1, False),
    ]
    reduction, gathering, _ = collectives(parse(LOOPS), 4)
    assert reduction.scope == "jit(f)/while/body/psum" and gathering.scope == ""
    assert reduction.total_bytes == 15 * BYTES
    # An all-reduce over two devices sends half of the array, twice
    assert reduction.sent_bytes == 15 * BYTES
    assert gathering.sent_bytes == 5 * 4 * BYTES / 2 * 3 / 4


# As for TPUs: a loop from 1 to 8 without a trip count, so its condition must be read
COUNTED = (
    """\
HloModule jit_counted

"""
    + ADD
    + """
%layer (p: (f32[8,16], s32[], s32[])) -> (f32[8,16], s32[], s32[]) {
  %one = s32[]{:T(128)} constant(1)
  %p = (f32[8,16]{1,0}, s32[]{:T(128)}, s32[]) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %r = f32[8,16]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add
  %next = s32[] add(%i, %one)
  ROOT %t = (f32[8,16]{1,0}, s32[], s32[]) tuple(%r, %next, %n)
}

%ends (q: (f32[8,16], s32[], s32[])) -> pred[] {
  %eight = s32[] constant(8)
  %q = (f32[8,16]{1,0}, s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%q), index=1
  %n.1 = s32[] get-tuple-element(%q), index=2
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %eight), direction=LT, backend_config={}
}

ENTRY %main (y: f32[8,16], m: s32[]) -> f32[8,16] {
  %y = f32[8,16]{1,0} parameter(0)
  %m = s32[] parameter(1)
  %first = s32[] constant(1)
  %copy.1 = s32[] copy(%first)
  %begun = (f32[8,16]{1,0}, s32[], s32[]) tuple(%y, %copy.1, %m)
  %w = (f32[8,16]{1,0}, s32[], s32[]) while(%begun), condition=%ends, body=%layer
  ROOT %out = f32[8,16]{1,0} get-tuple-element(%w), index=0
}
"""
)


@pytest.mark.parametrize(
    "change, trips",
    [
        (("", ""), (7, True)),
        (("constant(8)", "constant(1)"), (0, True)),
        # Begin, end or increment depend on the data
        (("tuple(%y, %copy.1, %m)", "tuple(%y, %m, %m)"), (1, False)),
        (("compare(%i.1, %eight)", "compare(%i.1, %n.1)"), (1, False)),
        (("add(%i, %one)", "add(%i, %n)"), (1, False)),
        (("add(%i, %one)", "add(%n, %one)"), (1, False)),
        (("add(%i, %one)", "subtract(%i, %one)"), (1, False)),
        (("direction=LT", "direction=NE"), (1, False)),
    ],
)
def test_loops_are_counted_by_their_condition_where_the_compiler_does_not(change, trips):
    text = COUNTED.replace(*change) if change[0] else COUNTED
    (reduced,) = collectives(parse(text), 4)
    assert (reduced.trips, reduced.exact) == trips


def test_asynchronous_called_and_mixed_collectives_count_once():
    all_devices = ((0, 1, 2, 3),)
    assert facts(ASYNCHRONOUS) == [
        ("reduce-scatter", "f32", BYTES, all_devices, 1, True),
        ("collective-permute", "f32", BYTES, ((0, 2), (2, 0)), 1, True),
        ("all-to-all", "f32", BYTES, all_devices, 1, False),
        ("ragged-all-to-all", "f32", BYTES, all_devices, 1, True),
        ("all-reduce", "f32", BYTES, ((0, 2), (1, 3)), 1, True),
        ("all-reduce", "bf16", 8, ((0, 2), (1, 3)), 1, True),
    ]
    kernels = [execution.instruction.target for execution in parse(ASYNCHRONOUS).executed()]
    assert [kernel for kernel in kernels if kernel] == ["__gpu$xla.gpu.triton"]


def test_collectives_of_single_devices_are_left_out():
    single_devices = LOOPS.replace("{{0,1},{2,3}}", "{{0},{1},{2},{3}}")
    assert [operation for operation, *_ in facts(single_devices)] == ["all-gather"]


@pytest.mark.parametrize(
    "attributes, groups",
    [
        ("replica_groups={{0,2},{1,3}}, to_apply=%add", ((0, 2), (1, 3))),
        ("replica_groups={}, dimensions={0}", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8], x=1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        # Device numbers 0 to 7 in shape [2, 2, 2], transposed to have the last dimension first
        (
            "replica_groups=[4,2]<=[2,2,2]T(2,0,1), dimensions={0}",
            ((0, 2), (4, 6), (1, 3), (5, 7)),
        ),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=8] {'a'}, x", (tuple(range(8)),)),
        # The mesh holds 0 2 4 6 / 1 3 5 7
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}, x",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        # The outer half of b, and the inner one
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, x", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}, x", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (
            "replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}, x",
            ((0, 1, 4, 5), (2, 3, 6, 7)),
        ),
    ],
)
def test_devices_of_a_collective(attributes, groups):
    assert device_groups(attributes, "all-reduce", 8) == groups


def test_what_is_not_understood_is_refused():
    with pytest.raises(HloError, match="no ENTRY"):
        parse(ADD)
    # A collective that is not read would be missing from what a program sends
    with pytest.raises(HloError, match="no instruction in 'all-reduce %r"):
        parse(LOOPS.replace("%r = f32[8,16]{1,0} all-reduce(", "all-reduce %r("))
    with pytest.raises(HloError, match="devices of a all-reduce"):
        device_groups("replica_groups=v9<0..3>, x", "all-reduce", 4)
    with pytest.raises(HloError, match="source_target_pairs"):
        device_groups("replica_groups={{0,1}}", "collective-permute", 2)
    with pytest.raises(HloError, match="is not there"):
        collectives(parse(LOOPS.replace("all-reduce(%x)", "all-reduce(%elsewhere)")), 4)
    with pytest.raises(HloError, match="calls gone"):
        collectives(parse(LOOPS.replace("body=%inner", "body=%gone")), 4)
    with pytest.raises(HloError, match="how many bits"):
        array_bytes("quux[3]{0}")


@pytest.mark.parametrize(
    "shape, arrays",
    [
        ("f32[]", [("f32", 4)]),
        ("(bf16[3,5]{1,0:T(8,128)(2,1)}, pred[7]{0})", [("bf16", 30), ("pred", 7)]),
        ("s4[5]{0:E(4)}", [("s4", 3)]),
        ("f8e4m3fn[16]{0}", [("f8e4m3fn", 16)]),
        ("(f32[0,3]{1,0}, token[], c64[2]{0})", [("f32", 0), ("token", 0), ("c64", 16)]),
    ],
)
def test_bytes_of_arrays(shape, arrays):
    assert array_bytes(shape) == arrays


def test_axes_of_a_mesh():
    def axes(groups):
        text = ASYNCHRONOUS.replace("replica_groups=[2,2]<=[2,2]T(1,0)", f"replica_groups={groups}")
        return mesh_axes(collectives(parse(text), 8)[-1], {"data": 2, "one": 1, "fsdp": 4})

    assert axes("{{0,4},{1,5},{2,6},{3,7}}") == ("data",)
    assert axes("[2,4]<=[8]") == ("fsdp",)
    assert axes("[1,8]<=[8]") == ("data", "fsdp")
    assert axes("{{0,1},{2,3},{4,5},{6,7}}") == ("part of fsdp",)
    permute = collectives(parse(ASYNCHRONOUS), 4)[1]
    assert mesh_axes(permute, {"data": 2, "fsdp": 2}) == ("data",)


def test_a_compiled_program_of_known_collectives():
    """Seven layers in a loop, with weights split over `fsdp`, and sums over `tensor`."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])

    def layers(x, weights):
        def layer(x, weight):
            weight = jax.lax.all_gather(weight, "fsdp", axis=0, tiled=True)
            return jax.lax.psum(jnp.tanh(x @ weight), "tensor"), None

        x, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

    mapped = jax.shard_map(
        layers,
        mesh=mesh,
        in_specs=(P("data"), P(None, "fsdp", "tensor")),
        out_specs=P("data"),
        check_vma=False,
    )
    arguments = (
        jax.ShapeDtypeStruct((4, 16), np.float32, sharding=NamedSharding(mesh, P("data"))),
        jax.ShapeDtypeStruct(
            (7, 16, 32), np.float32, sharding=NamedSharding(mesh, P(None, "fsdp", "tensor"))
        ),
    )
    text = jax.jit(mapped).lower(*arguments).compile().as_text()
    sent = {
        (collective.operation, mesh_axes(collective, mesh.shape)): (
            collective.dtype,
            collective.bytes,
            collective.trips,
            collective.exact,
        )
        for collective in collectives(parse(text), 8)
    }
    assert sent == {
        ("all-gather", ("fsdp",)): ("f32", 16 * 16 * 4, 7, True),
        ("all-reduce", ("tensor",)): ("f32", 2 * 16 * 4, 7, True),
        ("collective-permute", ("data",)): ("f32", 2 * 16 * 4, 1, True),
    }
