"""Programs of a run, compiled ahead of time for other devices.

What they send must follow from the parameters, and operations that fell back are named.
"""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.setup import ahead, chips
from jaxmllm.setup.ahead import check_job, target_mesh, transfers, whole_axes
from jaxmllm.setup.build import plan_programs
from jaxmllm.setup.chips import CHIPS
from jaxmllm.setup.hlo import Collective
from jaxmllm.setup.prepare import prepare
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import make_mesh
from tests.support import tiny_config
from tests.training.drawing import drawing_config, make_pictures

WHEELS = any(map(chips._installed, chips.CUDA_PLUGINS))
NEEDS_WHEELS = pytest.mark.skipif(not WHEELS, reason="needs jaxmllm[ahead]")
LAYERS = 2  # of the language model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    make_sample(folder, seed=1, train=64, test=8)
    return folder


def checked(data, chip, functions, **changes):
    """The programs for 8 devices of a chip, and the checks of those of some functions."""
    config = parse_config(tiny_config(data, **{"mesh": {"data": 2, "fsdp": 4}} | changes))
    programs, _ = plan_programs(config, prepare(config, target_mesh(config, CHIPS[chip], 8)))
    assert not programs.compiled
    return programs, {
        (name.function, name.subject): check_job(config, programs, name, job, CHIPS[chip])
        for name, job in programs.jobs.items()
        if name.function in functions
    }


def sharded_bytes(tree):
    """Bytes of all whole arrays in a tree that are split over devices."""
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    )


def total_bytes(operation, program, **facts):
    """Bytes that a program sends by an operation, of transfers with certain attributes."""
    return sum(
        transfer.total_bytes
        for transfer in program.transfers
        if transfer.operation == operation
        and all(getattr(transfer, name) == value for name, value in facts.items())
    )


gathered = partial(total_bytes, "all-gather")
reduced = partial(total_bytes, "reduce-scatter")


def test_evaluation_gathers_every_sharded_weight_once(data):
    programs, results = checked(data, "cpu", {"evaluate"})
    program = results["evaluate", "language"]
    layers = programs.params["language"]["layers"]
    assert gathered(program, axes=("fsdp",), trips=LAYERS) == sharded_bytes(layers)
    assert gathered(program, axes=("fsdp",)) == sharded_bytes(programs.params["language"])
    assert gathered(program) == gathered(program, axes=("fsdp",), dtype="f32", exact=True)
    # Losses are summed over ranks at the end of an evaluation, in another program
    assert {transfer.operation for transfer in program.transfers} == {"all-gather"}


COMPONENTS = ("vision", "audio", "language", "projector__vision", "projector__audio")
BFLOAT16 = {f"components__{name}__compute_dtype": "bfloat16" for name in COMPONENTS}
BACKWARD = {"language_loss_and_grad", "encode_grad"}


@pytest.mark.parametrize("chip", ["cpu", pytest.param("h100", marks=NEEDS_WHEELS)])
def test_a_microbatch_gathers_what_it_computes_with_and_adds_gradients_within_shards(data, chip):
    programs, results = checked(data, chip, BACKWARD | {"add_replicas"}, **BFLOAT16)
    replica_sums = results.pop(("add_replicas", "")).transfers
    assert {(transfer.operation, transfer.dtype, transfer.trips) for transfer in replica_sums} == {
        ("all-reduce", "f32", 1)
    }
    assert all("data" in transfer.axes for transfer in replica_sums)
    for program in results.values():
        assert {transfer.operation for transfer in program.transfers} <= {
            "all-gather",
            "reduce-scatter",
            "all-to-all",
        }
        assert {transfer.axes for transfer in program.transfers} == {("fsdp",)}
        assert reduced(program) == reduced(program, dtype="f32", exact=True)
    program = results["language_loss_and_grad", "language"]
    params = programs.params["language"]
    layers, head = map(sharded_bytes, (params["layers"], params["head"]))
    # The embedding stays in its shards; layers are gathered again for the backward pass
    assert reduced(program) == layers + head
    (dtype,) = {transfer.dtype for transfer in program.transfers} - {"s32", "f32"} or {"f32"}
    assert gathered(program, dtype=dtype) == (2 * layers + head) * (0.5 if dtype == "bf16" else 1)
    assert (dtype == "bf16") == (chip != "cpu")  # XLA for CPUs sends no bfloat16


def test_replicas_encode_without_waiting_for_each_other(data):
    """Not even the number of undecodable items is added in a microbatch."""
    _, results = checked(data, "cpu", {"encode"}, mesh={"data": 8})
    assert {phase: program.transfers for (_, phase), program in results.items()} == {
        "vision": (),
        "audio": (),
    }


@pytest.mark.slow
def test_replicas_draw_without_waiting_for_each_other(tmp_path):
    make_pictures(tmp_path, shown=False)
    config = parse_config(drawing_config(tmp_path, model__vision=None, mesh={"data": 8}))
    programs, _ = plan_programs(config, prepare(config, target_mesh(config, CHIPS["cpu"], 8)))
    drawing = [name for name in programs.jobs if name.subject == "diffusion"]
    microbatches = [name for name in drawing if name.function in ("draw_loss_and_grad", "evaluate")]
    assert len(microbatches) == 2
    for name in microbatches:
        assert check_job(config, programs, name, programs.jobs[name], CHIPS["cpu"]).transfers == ()


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["cpu", pytest.param("h100", marks=NEEDS_WHEELS)])
@pytest.mark.parametrize("tied", [False, True])
def test_with_reduce_step_no_microbatch_reduces_a_gradient(data, chip, tied):
    step = {f"components__{name}__reduce": "step" for name in COMPONENTS}
    programs, results = checked(
        data,
        chip,
        BACKWARD | {"add_replicas"},
        **BFLOAT16,
        **step,
        model__language__tie_embeddings=tied,
    )
    step_sums = results.pop(("add_replicas", ""))
    for program in results.values():
        assert {transfer.operation for transfer in program.transfers} <= {
            "all-gather",
            "all-to-all",
        }
    # Gradients of gathered parameters are reduced once per step in float32: to
    # shards, then over replicas
    split_bytes = sum(sharded_bytes(programs.trained[name]) for name in programs.trained)
    split_bytes -= 0 if tied else sharded_bytes(programs.trained["language"]["embedding"])
    assert (
        reduced(step_sums)
        == reduced(step_sums, dtype="f32", axes=("fsdp",), trips=1)
        == split_bytes
    )
    assert {transfer.operation for transfer in step_sums.transfers} == {
        "reduce-scatter",
        "all-reduce",
    }
    assert all("data" in t.axes for t in step_sums.transfers if t.operation == "all-reduce")


def test_weights_are_asked_for_in_the_type_of_the_computation(data):
    """In the text before compilation: the compiler for CPUs turns bfloat16 into float32."""
    config = parse_config(tiny_config(data, mesh={"data": 2, "fsdp": 4}, **BFLOAT16))
    programs, _ = plan_programs(config, prepare(config, target_mesh(config, CHIPS["cpu"], 8)))
    for name, job in programs.jobs.items():
        if name.function in BACKWARD:
            dtypes = re.findall(
                r"stablehlo\.all_gather.*-> tensor<[\dx]*x(\w+)>", job.lower().as_text()
            )
            assert len(dtypes) > 10 and set(dtypes) <= {"bf16", "i32"}, name


def test_memory_of_arguments_and_outputs_is_that_of_the_shards(data):
    programs, results = checked(data, "cpu", {"zero"})
    gradients = results["zero", "gradients"].memory
    shards = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(programs.trained)
    ]
    assert gradients.arguments == gradients.aliased == 0
    # Outputs include a table of pointers
    assert sum(shards) <= gradients.outputs <= sum(shards) + 64 * len(shards)


def test_collectives_that_agree_are_one_record():
    mesh = make_mesh({"data": 4, "fsdp": 2}, jax.devices()[:8], spans=(1, 2))
    assert tuple(mesh.shape) == ("data", "data.1", "fsdp", "fsdp.1")
    all_devices = (tuple(range(8)),)

    def collective(scope, dtype="f32", trips=3, groups=all_devices):
        return Collective("all-reduce", dtype, 80, groups, trips, True, scope)

    agreeing = [collective("a"), collective("b"), collective("a", "bf16"), collective("a", trips=1)]
    merged, *records = transfers([*agreeing, collective("c", groups=((0, 2), (1, 3)))], mesh)
    assert (merged.axes, merged.count, merged.scopes) == (("data", "fsdp"), 2, ("a", "b"))
    assert merged.total_bytes == 80 * 3 * 2 and merged.sent_bytes == 2 * 480 * 7 / 8
    assert [(record.dtype, record.trips, record.axes) for record in records] == [
        ("bf16", 3, ("data", "fsdp")),
        ("f32", 3, ("data.1",)),
        ("f32", 1, ("data", "fsdp")),
    ]
    assert whole_axes(("data", "fsdp.1"), mesh) == ("data", "fsdp")


# Heads that the GPU kernel takes: it needs at least 16 numbers
WIDE_HEADS = {"model__language__head_size": 16, "model__language__rope_sections": [4, 2, 2]}


@NEEDS_WHEELS
def test_gpus_run_the_kernel_and_the_ragged_exchange_or_say_why_not(data):
    programs, results = checked(data, "h100", {"evaluate", "hop", "encode"}, **WIDE_HEADS)
    program = results["evaluate", "language"]
    assert program.custom_calls == {"__gpu$xla.gpu.triton": 1} and not program.fallbacks
    assert gathered(program, axes=("fsdp",)) == sharded_bytes(programs.params["language"])
    assert {transfer.operation for transfer in results["hop", "vision"].transfers} == {
        "ragged-all-to-all"
    }
    # Heads of the towers have 8 numbers, fewer than the kernel takes
    (line,) = results["encode", "vision"].fallbacks
    assert "attention of vision is the loop" in line and "heads of 16 numbers" in line


@NEEDS_WHEELS
def test_gpus_call_cudnn_where_it_was_asked_for(data):
    """cuDNN is not installed here, so the compiler does not ask it whether it has such a kernel."""
    changes = {
        f"components__{name}__attention": "cudnn" for name in ("vision", "audio", "language")
    }
    changes |= {f"phases__{name}__spans": [1] for name in ("vision", "audio", "language")}
    changes |= {"model__language__bidirectional": [], **BFLOAT16}
    functions = {"language_loss_and_grad", "encode", "encode_grad", "evaluate"}
    _, results = checked(data, "h100", functions, **changes)
    for (function, _), program in results.items():
        assert program.custom_calls["__cudnn$fmhaSoftmax"] and not program.fallbacks
        backward = "__cudnn$fmhaSoftmaxBackward" in program.custom_calls
        assert backward == function.endswith("grad")


@NEEDS_WHEELS
def test_what_cudnn_works_in_must_fit_a_device(data):
    changes = {"components__vision__attention": "cudnn", "phases__vision__spans": [1], **BFLOAT16}
    changes |= {"phases__vision__capacities": [65_536], "phases__vision__max_segments": 20_000}
    with pytest.raises(ConfigError, match="segments its backward pass works in 105 GB, and a dev"):
        checked(data, "h100", {"encode"}, **changes)


@NEEDS_WHEELS
def test_attention_that_is_kept_runs_forward_once(data):
    def kernels(remat):
        changes = WIDE_HEADS | {"components__language__remat": remat}
        _, results = checked(data, "h100", {"language_loss_and_grad"}, **changes)
        return results["language_loss_and_grad", "language"].custom_calls["__gpu$xla.gpu.triton"]

    # The forward pass has one kernel. The backward pass has two for gradients, and a third to
    # compute attention again; XLA may copy the backward pass, so only the ratio is known.
    recomputed = kernels("full")
    remembered = kernels(["attention"])
    assert (remembered - 1) * 3 == (recomputed - 1) * 2 > 0


@NEEDS_WHEELS
def test_an_attention_that_was_asked_for_is_no_fallback(data):
    _, results = checked(data, "h100", {"evaluate"}, components__language__attention="jax")
    assert not results["evaluate", "language"].fallbacks
    assert not results["evaluate", "language"].custom_calls


@pytest.mark.skipif(not chips._installed("libtpu"), reason="needs jaxmllm[tpu]")
def test_tpus_gather_as_much_and_their_layers_are_counted(data):
    programs, results = checked(data, "v5p", {"evaluate", "hop"})
    layers = programs.params["language"]["layers"]
    gathers = gathered(results["evaluate", "language"], axes=("fsdp",), trips=LAYERS, exact=True)
    # The TPU compiler may gather in bfloat16 what its matrix units read in bfloat16
    assert sharded_bytes(layers) / 2 <= gathers <= sharded_bytes(layers)
    hop = results["hop", "vision"]
    assert {transfer.operation for transfer in hop.transfers} == {"ragged-all-to-all"}
    assert not hop.fallbacks


@pytest.mark.slow
@NEEDS_WHEELS
@pytest.mark.parametrize(
    "changes, functions",
    [
        ({"phases__language__spans": [1, 2]}, {"language_loss_and_grad", "hop_back"}),
        (
            {"pipeline": {"stages": 2, "layout": "chain"}, "mesh": {"data": 2, "fsdp": 2}},
            {"gradients"},
        ),
    ],
    ids=["spans", "stages"],
)
def test_shared_rows_and_stages_compile_for_gpus(data, changes, functions):
    wide_heads = {"model__language__head_size": 16, "model__language__rope_sections": [4, 2, 2]}
    towers = {f"model__{tower}__heads": 1 for tower in ("vision", "audio")}
    programs, results = checked(data, "h100", functions, **wide_heads, **towers, **changes)
    assert {function for function, _ in results} == functions
    assert not any(program.fallbacks for program in results.values())
    for (function, _), program in results.items():
        assert bool(program.custom_calls) == (function != "hop_back")
    if "pipeline" in changes:
        transfers_of_step = results["gradients", ""].transfers
        wires = [
            transfer for transfer in transfers_of_step if transfer.operation == "collective-permute"
        ]
        assert wires and {transfer.axes for transfer in wires} == {("stage",)}
        assert not any(transfer.exact for transfer in wires)  # the schedule is data
    else:
        spans = {row_class.span for row_class in programs.spec.phases["language"].classes}
        assert spans <= {1, 2}


def test_the_programs_of_a_step_are_compiled_and_failures_named(monkeypatch):
    memory = ahead.Memory(arguments=1, outputs=2, aliased=0, temporaries=3, code=4)

    def check(config, programs, name, job, chip):
        if name.function == "update":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 TB\nand more")
        return SimpleNamespace(name=name, memory=memory)

    monkeypatch.setattr(ahead, "check_job", check)
    names = [ProgramName(function) for function in ("zero", "evaluate", "update", "to_saved")]
    programs = SimpleNamespace(jobs=dict.fromkeys(names))
    compiled = ahead.compiled_memory(None, programs, CHIPS["cpu"])
    failed = ahead.FailedProgram(names[2], "RESOURCE_EXHAUSTED: 3 TB")
    assert compiled == {names[1]: memory, names[2]: failed}
