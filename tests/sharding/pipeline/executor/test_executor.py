"""The executor against the same step without a pipeline: every schedule, layout, choice of
frozen parts, and mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.gradient import Params
from sharding.mesh import make_mesh
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.executor.component import Inputs, ManualAxes, TableArrays
from sharding.pipeline.executor.executor import make_executor
from sharding.pipeline.graph import Kind, Pool
from sharding.pipeline.ring import Chain, PipelineError, Ring
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.orders import gpipe, interleaved, one_f_one_b
from sharding.pipeline.schedules.ticks import follow
from sharding.pipeline.slots import keep_residuals
from sharding.pipeline.table import make_table, padded_table, with_pauses
from tests.sharding.pipeline.models import (
    ALL,
    HEAD,
    NONE,
    Program,
    components,
    inputs,
    program,
    ring_of,
    rows,
    workload_of,
)
from tests.support import EXHAUSTIVE

SIZES = (20, 6)


@functools.cache
def segments() -> Program:
    """One program for many tests: 4 stages, every component on all of them, residuals kept and
    backward operations split."""
    ring = ring_of("segments", 4)
    return program(ring, (ALL, ALL), SIZES, slots=24, pools=(Pool.RESIDUAL, Pool.PENDING))


@functools.cache
def three() -> Program:
    """Vision and audio on rank 0, language on rank 1."""
    return program(ring_of("chain", 2, ("vision", "audio")), (ALL,) * 3, (16, 16, 6))


@functools.cache
def parallel() -> Program:
    """Vision on rank 0, audio on rank 1, language on ranks 2 and 3, so that tokens of
    vision take two hops."""
    return program(ring_of("parallel", 4, ("vision", "audio")), (ALL,) * 3, (16, 16, 6))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("planner", [gpipe, interleaved, greedy])
def test_schedules(planner, fused):
    pipeline = segments()
    pipeline.check(
        planner(
            build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 6, seed=1), fused=fused)
        ),
        seed=1,
    )


@pytest.mark.parametrize("planner", [gpipe, interleaved, greedy])
def test_backwards_split_in_two(planner):
    pipeline = segments()
    graph = build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 6, seed=2), split=True)
    assert Kind.WEIGHT_GRADIENT in graph.kind
    pipeline.check(planner(graph), seed=2)


@pytest.mark.parametrize("split", [False, True])
def test_residuals_kept(split):
    pipeline = segments()
    schedule = greedy(
        build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 6, seed=3), split=split)
    )
    with_residuals = keep_residuals(schedule, pipeline.spec.slots)
    assert (
        0
        < len(with_residuals.keepers)
        < sum(kind == Kind.FORWARD for kind in with_residuals.graph.kind)
    )
    pipeline.check(with_residuals, seed=3)


POLICIES = {
    "inputs": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=name, marks=[pytest.mark.slow] if name == "products" else [])
        for name, policy in POLICIES.items()
    ],
)
def test_layers_computed_again_one_by_one(policy):
    """Whole chunks and parts of them, residuals kept and not, and backward operations
    whole and in two halves."""
    ring = ring_of("chain", 3)
    pipeline = program(
        ring,
        (ALL, ALL),
        SIZES,
        slots=24,
        pools=(Pool.RESIDUAL, Pool.PENDING),
        policy=policy,
    )
    for seed, split in ((11, False), (12, True)):
        schedule = greedy(build_graph(ring, workload_of(ring, 5, seed=seed), split=split))
        pipeline.check(schedule, seed)
        with_residuals = keep_residuals(schedule, pipeline.spec.slots)
        assert with_residuals.keepers
        pipeline.check(with_residuals, seed)


@settings(max_examples=15)
@given(st.data())
def test_any_legal_order(data):
    """Orders drawn at random from all legal ones, whether or not a scheduler would make them."""
    pipeline = segments()
    seed = data.draw(st.integers(0, 100))
    work = workload_of(
        pipeline.spec.ring,
        data.draw(st.integers(1, 6)),
        seed=seed,
        most=data.draw(st.integers(0, 2)),
    )
    graph = build_graph(
        pipeline.spec.ring, work, split=data.draw(st.booleans()), fused=data.draw(st.booleans())
    )
    random = np.random.default_rng(seed)
    waits = list(graph.waits)
    # Operations run in a random order that respects the graph: one becomes ready with the last that
    # it waits for.
    ready = [n for n in range(graph.size) if not waits[n]]
    orders = [[] for _ in range(4)]
    while ready:
        n = ready.pop(random.integers(len(ready)))
        orders[graph.stage[n]].append(n)
        for successor in [op for op, _ in graph.successors[n]] + [
            op for *_, op in graph.returns[n]
        ]:
            waits[successor] -= 1
            if not waits[successor]:
                ready.append(successor)
    schedule = follow(graph, orders)
    if data.draw(st.booleans()):
        schedule = keep_residuals(schedule, pipeline.spec.slots)
    pipeline.check(schedule, seed)


def test_one_compilation():
    """Twenty batches with a schedule each run on one program."""
    pipeline = segments()
    for seed in range(20):
        graph = build_graph(
            pipeline.spec.ring,
            workload_of(pipeline.spec.ring, 1 + seed % 6, seed=seed),
            split=bool(seed % 3),
        )
        table = make_table((gpipe, interleaved, greedy)[seed % 3](graph), pipeline.spec)
        batch = rows(pipeline.spec.ring, graph.workload, SIZES, pipeline.spec.rows_read, seed)
        assert np.isfinite(
            pipeline.run(
                TableArrays.of(table),
                inputs(pipeline.spec.ring, pipeline.layers, pipeline.outer, batch),
            ).loss
        )
    assert pipeline.run._cache_size() == 1


@pytest.mark.parametrize(
    "most", [(2, 0), (0, 2), (0, 0), (2, 2)], ids=["vision", "audio", "text", "mixed"]
)
@pytest.mark.parametrize("layout", [three, parallel])
def test_three_components(layout, most):
    pipeline = layout()
    for planner in (one_f_one_b, gpipe, greedy):
        pipeline.check(
            planner(
                build_graph(
                    pipeline.spec.ring, workload_of(pipeline.spec.ring, 6, (ALL,) * 3, 4, most)
                )
            ),
            seed=4,
        )


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", pytest.param("inputs", marks=pytest.mark.exhaustive)])
def test_rows_of_several_classes_in_a_step(keep):
    """Rows of two classes in any mix, in one program: whole and split backward operations,
    residuals kept and not, and rows that two microbatches read."""
    ring = ring_of("parallel" if keep == "all" else "segments", 2)
    pipeline = program(
        ring,
        (ALL, ALL),
        SIZES,
        slots=24,
        pools=(Pool.RESIDUAL, Pool.PENDING),
        policy=None if keep == "all" else POLICIES[keep],
        classes=True,
    )
    for seed in range(4 if keep == "all" else 2):
        work = workload_of(ring, 3 + seed, seed=20 + seed, classes=True)
        schedule = greedy(build_graph(ring, work, split=seed % 2 > 0))
        pipeline.check(
            keep_residuals(schedule, pipeline.spec.slots) if seed % 3 else schedule, seed
        )
    assert pipeline.run._cache_size() == 1


def test_eight_stages():
    pipeline = program(ring_of("segments", 8), (ALL, ALL), (12, 5))
    pipeline.check(
        greedy(build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 5, seed=5)))
    )
    pipeline.check(
        interleaved(
            build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 5, seed=6), fused=False)
        )
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_language_alone(stages):
    pipeline = program(ring_of("segments", stages, ()), (ALL,), (6,))
    pipeline.check(
        greedy(build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 6, (ALL,))))
    )
    pipeline.check(
        interleaved(
            build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 4, (ALL,)), fused=False)
        )
    )


def test_one_stage_holds_all():
    pipeline = program(ring_of("segments", 1, ("vision", "audio")), (ALL,) * 3, (12, 12, 4))
    pipeline.check(
        greedy(build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 4, (ALL,) * 3)))
    )


@pytest.mark.parametrize(
    ("trained", "layout"),
    [
        pytest.param((HEAD, NONE), "chain", marks=pytest.mark.slow),
        ((HEAD, NONE), "segments"),
        ((HEAD, ALL), "chain"),
        ((ALL, NONE), "segments"),
        ((NONE, ALL), "chain"),
        pytest.param((NONE, HEAD), "segments", marks=EXHAUSTIVE),
    ],
    ids=[
        "alignment, chain",
        "alignment, segments",
        "encoder frozen",
        "language frozen",
        "nothing of the encoder",
        "only the head",
    ],
)
def test_freezing(trained, layout):
    ring = ring_of(layout, 2, heads=tuple(of == HEAD for of in trained))
    of = program(ring, trained, (12, 5))
    for seed, fused in ((7, True), (8, False)):
        graph = build_graph(ring, workload_of(ring, 5, trained, seed), fused=fused)
        of.check(greedy(graph), seed)


def tensor_parallel(params: Params, x, row):
    """models.layer with its hidden units spread over `tensor`, written as one device of
    that axis computes it."""
    weights = params.trained | params.frozen

    def local(up, down, scale, x, level):
        mixed = jnp.cumsum(x, axis=-2) / jnp.arange(1.0, x.shape[-2] + 1)[:, None]
        hidden = jax.nn.silu(mixed @ up) * scale / level[..., None]
        return x + jax.lax.psum(hidden @ down, "tensor")

    mapped = jax.shard_map(
        local,
        in_specs=(P(None, "tensor"), P("tensor"), P("tensor"), P(), P()),
        out_specs=P(),
        axis_names={"tensor"},
        check_vma=False,
    )
    return mapped(weights["up"], weights["down"], weights["scale"], x, row["level"])


@pytest.mark.parametrize("replicas", [(), ("data",)], ids=["data automatic", "data summed once"])
def test_data_and_tensor_axes_inside_of_stages(replicas):
    """Rows are spread over `data` and hidden units over `tensor` inside of each stage, with both
    automatic or both manual."""
    ring = ring_of("segments", 2)
    trained = (ALL, ALL)
    plain = program(ring, trained, SIZES)
    mesh = make_mesh({"stage": 2, "data": 2, "tensor": 2})
    # With `data` automatic, activations are constrained to it; as a manual axis it is summed by the
    # executor.
    row_spec = None if replicas else P("data")
    members = [
        dataclasses.replace(of, activation=row_spec, tokens=row_spec) for of in components(ring)
    ]
    if replicas:
        members = [dataclasses.replace(of, layer=tensor_parallel) for of in members]

    def put(found: Inputs) -> Inputs:
        """Place parameters and rows on the mesh."""
        spec_by_name = {"up": P("stage", None, None, None, "tensor")}
        default_spec = P("stage", None, None, "tensor")

        def placed(path, leaf):
            return jax.device_put(
                leaf, NamedSharding(mesh, spec_by_name.get(path[-1].key, default_spec))
            )

        row_sharding = NamedSharding(mesh, P(None, "data"))
        layers = jax.tree_util.tree_map_with_path(placed, found.layers)
        return found._replace(layers=layers, rows=jax.device_put(found.rows, row_sharding))

    members = tuple((of,) for of in members)
    run = jax.jit(make_executor(plain.spec, members, mesh, manual=ManualAxes(replicas)))
    of = dataclasses.replace(plain, run=run, put=put)
    of.check(greedy(build_graph(ring, workload_of(ring, 6, seed=9))), seed=9)
    of.check(interleaved(build_graph(ring, workload_of(ring, 6, seed=10))), seed=10)


def test_memory_does_not_grow_with_microbatches_and_is_not_copied():
    """Slots alone take temporary memory, so it is the same for 8 microbatches and for 64."""
    ring = Ring(2, (Chain("vision", (0,), (2,)), Chain("language", (1,), (3,))))
    temporary_sizes = set()
    for microbatches in (8, 64):
        pipeline = program(ring, (ALL, ALL), (2 * microbatches, microbatches), slots=4)
        graph = build_graph(ring, workload_of(ring, microbatches, defer=False))
        table = make_table(greedy(graph, pipeline.spec.slots), pipeline.spec)
        batch = rows(ring, graph.workload, pipeline.sizes, pipeline.spec.rows_read)
        arrays = inputs(ring, pipeline.layers, pipeline.outer, batch)
        compiled = pipeline.run.lower(TableArrays.of(table), arrays).compile()
        temporary_sizes.add(compiled.memory_analysis().temp_size_in_bytes)
    assert len(temporary_sizes) == 1
    # Gradients are not copied from tick to tick either, as XLA copies whatever passes through a
    # switch. These are the shapes of the sums of gradients.
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\((?!.*wrapped_broadcast)", compiled.as_text())
    assert copied and not {"3,16,32", "3,32,16", "11,16", "16,11"} & set(copied)


def test_pauses_change_no_result():
    """Idle ticks inserted into a schedule leave every output as it was, bit for bit."""
    pipeline = segments()
    graph = build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 3, seed=1))
    table = make_table(greedy(graph, pipeline.spec.slots), pipeline.spec)
    arrays = inputs(
        pipeline.spec.ring,
        pipeline.layers,
        pipeline.outer,
        rows(pipeline.spec.ring, graph.workload, SIZES, pipeline.spec.rows_read),
    )
    planned = table.rows[: table.count]
    wires = table.wire_active[: table.count]
    pauses = min(table.count, pipeline.spec.ticks - table.count)
    assert pauses > 4
    paused_table = padded_table(pipeline.spec, *with_pauses(pipeline.spec, planned, wires, pauses))
    assert paused_table.count == table.count + pauses
    outputs, expected = (
        pipeline.run(TableArrays.of(variant), arrays) for variant in (paused_table, table)
    )
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)


def test_idle_table_computes_nothing():
    """With zero ticks to run, loss and gradients stay zero."""
    pipeline = segments()
    graph = build_graph(pipeline.spec.ring, workload_of(pipeline.spec.ring, 1, seed=1, most=0))
    table = make_table(greedy(graph), pipeline.spec)
    batch = rows(pipeline.spec.ring, graph.workload, SIZES, pipeline.spec.rows_read)
    arrays = TableArrays.of(table)._replace(ticks=jnp.asarray(0, jnp.int32))
    outputs = pipeline.run(
        arrays, inputs(pipeline.spec.ring, pipeline.layers, pipeline.outer, batch)
    )
    assert not any(leaf.any() for leaf in jax.tree.leaves(outputs))


def test_meshes_and_components_that_do_not_fit():
    ring = ring_of("chain", 2)
    spec = program(ring, (ALL, ALL), SIZES).spec
    with pytest.raises(PipelineError, match="2 stages on a mesh"):
        make_executor(spec, components(ring), make_mesh({"stage": 4}, jax.devices()[:4]))
    with pytest.raises(PipelineError, match="1 components for a ring of 2"):
        make_executor(spec, components(ring)[:1], make_mesh({"stage": 2}, jax.devices()[:2]))
