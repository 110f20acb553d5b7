"""What programs send, predicted from shapes and shardings, against their compiled text."""

from __future__ import annotations

import jax
import pytest

from benchmarks.ahead import MIX
from jaxmllm.cluster.sends import _stays_whole, leaves, program_sends, ring_bytes
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import abstract_mesh
from tests.cluster.programs import assert_agrees, tiny, tiny_lengths
from tests.support import EXHAUSTIVE


def test_replicas_add_their_gradients_once():
    config, programs = tiny(mesh={"data": 2, "fsdp": 4})
    assert_agrees(config, programs, ProgramName("add_replicas"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        ({"data": 2, "fsdp": 4}, "full"),
        pytest.param({"data": 2, "fsdp": 4}, "dots", marks=EXHAUSTIVE),
        pytest.param({"data": 4, "context": 2}, "none", marks=EXHAUSTIVE),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, "full", marks=EXHAUSTIVE),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "none"),
    ],
    ids=str,
)
def test_programs_send_what_is_predicted(mesh, remat):
    config, programs = tiny(mesh=mesh, remat=remat)
    for name in programs.jobs:
        if name.function in ("language_loss_and_grad", "encode_grad", "encode_grad_kept"):
            assert_agrees(config, programs, name)


def test_sums_over_tensor_are_added_again_with_the_products_that_remat_does_not_keep():
    def sums(remat):
        _, programs = tiny(mesh={"data": 2, "fsdp": 2, "tensor": 2}, remat=remat)
        name = ProgramName("language_loss_and_grad", "language", 4096)
        sends = program_sends(programs, name) or []
        exact = (send for send in sends if not send.by_data)
        return ring_bytes(exact)["all-reduce", ("tensor",)]

    full, attention, projections, dots = map(
        sums, ("full", ["attention"], ["attention", "projections"], "dots")
    )
    assert full == attention > projections == dots


@pytest.mark.slow
def test_a_program_that_keeps_attention_alone_sends_what_is_predicted():
    config, programs = tiny(mesh={"data": 2, "fsdp": 2, "tensor": 2}, remat=["attention"])
    name = ProgramName("language_loss_and_grad", "language", 4096)
    assert_agrees(config, programs, name)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_gradients_that_stay_whole_are_sent_once():
    config, programs = tiny(mesh={"data": 2, "fsdp": 4}, reduce="step")
    for name in programs.jobs:
        if name.function in ("language_loss_and_grad", "encode_grad", "add_replicas"):
            assert_agrees(config, programs, name)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        ({"data": 2, "fsdp": 4}, "dots"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "full"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "none"),
    ],
    ids=str,
)
def test_adapters_send_what_is_predicted(mesh, remat):
    adapters = {"language": {"rank": 8, "alpha": 8.0}, "vision": {"rank": 4, "alpha": 4.0}}
    config, programs = tiny(
        mesh=mesh, remat=remat, adapters=adapters, frozen=("vision", "language")
    )
    for name in programs.jobs:
        if name.function in ("language_loss_and_grad", "encode_grad", "add_replicas"):
            assert_agrees(config, programs, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        ({"data": 2, "fsdp": 4}, "full"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "dots"),
        pytest.param({"data": 1, "fsdp": 4, "context": 2}, "none", marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_experts_send_what_is_predicted(mesh, remat):
    config, programs = tiny(mesh=mesh, remat=remat, experts={"count": 8, "per_token": 2})
    for name in programs.jobs:
        if name.function in ("language_loss_and_grad", "add_replicas"):
            assert_agrees(config, programs, name)


def test_gradients_stay_whole_where_a_step_defers_them():
    """Gradients of experts are the exception: their width is split over one more axis here."""
    _, programs = tiny(
        mesh={"data": 2, "fsdp": 4},
        reduce="step",
        experts={"count": 8, "per_token": 2},
        layout={"embed": ["data", "fsdp"]},
    )
    model = programs.functions.model
    trained = programs.trained["language"]
    by_device, sharded = (
        variant.components["language"] for variant in (model.by_device("language"), model)
    )
    axes_of_leaves = jax.tree.leaves(by_device.axes_of(trained))
    gathered = [
        (by_device.defers(axes), _stays_whole(sharded, leaf))
        for axes, leaf in zip(axes_of_leaves, leaves(trained, sharded), strict=True)
        if leaf.gathered
    ]
    assert {*gathered} == {(True, True), (False, False)}


@pytest.mark.slow
def test_forward_programs_send_what_is_predicted():
    config, programs = tiny(mesh={"fsdp": 4, "context": 2, "data": 1})
    for name in programs.jobs:
        if name.function in ("evaluate", "encode", "add_replicas"):
            assert_agrees(config, programs, name)


@pytest.mark.slow
def test_freezing_sends_less_and_one_device_nothing():
    def total(programs):
        return sum(
            send.ring_bytes
            for name in programs.jobs
            for send in program_sends(programs, name) or []
        )

    trained, frozen, one_device = (
        total(tiny(**sections)[1])
        for sections in (
            {"mesh": {"data": 2, "fsdp": 4}},
            {"mesh": {"data": 2, "fsdp": 4}, "frozen": ("vision", "language")},
            {"mesh": {"data": 1}, "devices": 1},
        )
    )
    assert trained > frozen > one_device == 0


def test_what_the_routes_decide_is_not_known():
    _, programs = tiny(mesh={"data": 2, "fsdp": 4})
    hops = [name for name in programs.jobs if name.function == "hop"]
    assert hops and all(program_sends(programs, name) is None for name in hops)


@pytest.mark.slow
def test_gradients_of_what_reads_the_same_are_added_before_they_are_reduced_but_for_cpus():
    lengths = tiny_lengths(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    abstract = generated_lengths(
        lengths.config, abstract_mesh(lengths.config.mesh_sizes, 8), 0, MIX
    )
    name = ProgramName("language_loss_and_grad", "language", 4096)
    cpu_bytes, abstract_bytes = (
        ring_bytes(
            send for send in program_sends(source.programs(), name) or [] if not send.by_data
        )["all-reduce", ("tensor",)]
        for source in (lengths, abstract)
    )
    # Sums over tensor of two layers and the lookup. A layer has two forward and one in
    # recomputation. Backward, products with one input share a sum, which leaves two, but on CPU all
    # five are summed.
    assert abstract_bytes / cpu_bytes == pytest.approx(
        (2 * (2 + 1 + 2) + 1) / (2 * (2 + 1 + 5) + 1)
    )
