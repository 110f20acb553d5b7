"""What compiled programs must send at least, against counts by hand for a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest

from benchmarks import ahead
from benchmarks.omni import MODELS, omni_config
from jaxmllm.models.compose import build_model
from jaxmllm.setup.ahead import OUTSIDE_STEPS, CheckedProgram, Memory, Transfer
from jaxmllm.setup.chips import ChipError
from jaxmllm.setup.spans import mesh_spans
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import abstract_mesh, make_mesh

SLOTS = 4096
# Parameters of the tiny decoder's two layers: queries and outputs, keys and values, the MLP
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
TABLES = 2 * 512 * 64  # embedding and head
NORMS = 5 * 64
TYPE = 2  # bytes of a number in bfloat16
# Parameters of a tower's two layers: attention, MLP
TOWER = 2 * (4 * 64 * 64 + 2 * 64 * 128)


def tiny_programs(**sections):
    """Programs of the tiny model on 8 devices, for rows of given sizes."""
    phases = {name: {"capacities": [16384], "spans": [1]} for name in ("vision", "audio")}
    phases["language"] = {"capacities": [SLOTS], "spans": sections.pop("spans", [1])}
    config = omni_config("tiny", phases=phases, data={"batch_size": 16}, **sections)
    mesh = make_mesh(config.mesh_sizes, jax.devices()[:8], spans=mesh_spans(config))
    return generated_lengths(config, mesh, 0, ahead.MIX).programs()


def needed(programs, function, subject="language", capacity=SLOTS, span=1):
    """Bytes that a program must send, by operation and axes."""
    return ahead.needed_bytes(programs, ProgramName(function, subject, capacity, span))


def test_weights_are_gathered_once_a_pass_and_gradients_scattered_once():
    programs = tiny_programs(mesh={"data": 2, "fsdp": 4})
    # In a ring of four, a device sends three quarters of each array
    forward = TYPE * (LAYERS + TABLES) * 3 / 4
    assert needed(programs, "evaluate") == {("all-gather", ("fsdp",)): forward}
    assert needed(programs, "language_loss_and_grad") == {
        ("all-gather", ("fsdp",)): forward + TYPE * LAYERS * 3 / 4,
        ("reduce-scatter", ("fsdp",)): forward,
    }
    # Replicas are added once per step: as shards, and whole where a gradient is not split
    replica_sums = needed(programs, "add_replicas", "")
    assert replica_sums.keys() == {("all-reduce", ("data",)), ("all-reduce", ("data", "fsdp"))}
    sharded = sum(
        leaf.size
        for leaf in jax.tree.leaves(programs.trained)
        if leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    )
    assert replica_sums["all-reduce", ("data",)] == 2 / 2 * 4 * sharded / 4
    backward = needed(programs, "encode_grad", "vision", 16384)["all-gather", ("fsdp",)]
    forward_of_tower = needed(programs, "encode", "vision", 16384)["all-gather", ("fsdp",)]
    assert backward - forward_of_tower == pytest.approx(TYPE * TOWER * 3 / 4)


def test_gradients_reduced_once_a_step_leave_no_microbatch():
    by_microbatch, by_step = (
        tiny_programs(mesh={"data": 2, "fsdp": 4}, reduce=reduce)
        for reduce in ("microbatch", "step")
    )
    scatter = ("reduce-scatter", ("fsdp",))
    for function, subject, capacity in (
        ("language_loss_and_grad", "language", SLOTS),
        ("encode_grad", "vision", 16384),
    ):
        sent = needed(by_microbatch, function, subject, capacity)
        assert sent.pop(scatter) > 0
        assert needed(by_step, function, subject, capacity) == sent
    replica_sums = needed(by_step, "add_replicas", "")
    sharded = sum(
        leaf.size
        for leaf in jax.tree.leaves(by_step.trained)
        if leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    )
    assert replica_sums.pop(scatter) == 4 * sharded * 3 / 4
    assert replica_sums == needed(by_microbatch, "add_replicas", "")
    assert ahead.resident_bytes(by_step) > ahead.resident_bytes(by_microbatch)


def test_tensor_adds_activations_and_parts_gather_keys_and_values():
    tensor = needed(tiny_programs(mesh={"data": 4, "tensor": 2}), "language_loss_and_grad")
    # Two sums per layer and one for the tables, in two passes; a ring of two sends each array once
    assert tensor == {("all-reduce", ("tensor",)): 2 * (2 * 2 + 1) * SLOTS * 64 * TYPE}

    context = needed(tiny_programs(mesh={"data": 4, "context": 2}), "language_loss_and_grad")
    keys_and_values = 2 * 2 * SLOTS * 32 * TYPE / 2
    assert context == {
        ("all-gather", ("context",)): 2 * keys_and_values,
        ("reduce-scatter", ("context",)): keys_and_values,
    }
    programs = tiny_programs(mesh={"data": 8}, spans=[1, 2])
    shared_row = needed(programs, "evaluate", span=2)
    assert list(shared_row.values()) == [2 * keys_and_values]  # the row is twice as long
    assert not needed(programs, "evaluate")


def test_what_the_data_decide_has_no_least():
    programs = tiny_programs(mesh={"data": 2, "fsdp": 4})
    assert needed(programs, "hop", "vision", 0) is None
    assert needed(programs, "deliver", "vision", 0) == {}
    staged = tiny_programs(mesh={"data": 4}, pipeline={"stages": 2})
    assert needed(staged, "gradients", "", 0) is None


def test_rows_set_what_is_sent_beside_what_must_be():
    def gather(dtype, sent, exact=True):
        return Transfer("all-gather", ("fsdp",), dtype, 8, 2, exact, 1, sent, ())

    program = CheckedProgram(
        ProgramName("evaluate", "language", SLOTS),
        1.0,
        2.0,
        Memory(1, 2, 3, 5_000_000_000, 4),
        (gather("f32", 6.0), gather("bf16", 2.0, exact=False)),
        {},
        ("no kernel",),
    )
    needed_sends = {("all-gather", ("fsdp",)): 4.0, ("all-reduce", ("data",)): 1.0}
    gathering, reduction = ahead.rows_of({"model": "tiny"}, program, needed_sends)
    assert (gathering["program"], gathering["model"]) == ("evaluate language 4096", "tiny")
    assert (gathering["bytes"], gathering["needed_bytes"], gathering["exact"]) == (8.0, 4.0, False)
    assert gathering["by_type"] == {"f32": 6.0, "bf16": 2.0} and gathering["temporary_gb"] == 5
    assert gathering["fallbacks"] == ["no kernel"]
    assert (reduction["operation"], reduction["axes"]) == ("all-reduce", ["data"])
    assert (reduction["bytes"], reduction["needed_bytes"], reduction["exact"]) == (0, 1.0, True)
    assert all(row["needed_bytes"] is None for row in ahead.rows_of({}, program, None))


@pytest.mark.parametrize("model", ahead.MESHES)
def test_every_mesh_has_the_devices_and_splits_the_model(model):
    for mesh in ahead.MESHES[model]:
        config = ahead.Setting(model, mesh).config()
        shape = abstract_mesh(config.mesh_sizes, ahead.DEVICES[model], mesh_spans(config))
        assert shape.size == ahead.DEVICES[model]
        built = build_model(config.model, 152_064, config.components, shape)
        leaves = jax.tree.leaves(built.abstract("float32"))
        billions = sum(leaf.size for leaf in leaves) / 1e9
        assert billions == pytest.approx({"7B": 8.93, "84B": 84.3}[model], rel=0.01)
    assert MODELS[model].keys() == ahead.CAPACITIES.keys()


def test_unknown_functions_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(ahead, "only_compile", None)
    with pytest.raises(SystemExit):
        ahead.main(["--only", "language_loss"])
    assert "invalid choice: 'language_loss'" in capsys.readouterr().err


def test_the_functions_that_may_be_asked_for_are_those_of_steps():
    phased = tiny_programs(mesh={"data": 2, "fsdp": 4})
    staged = tiny_programs(mesh={"data": 4}, pipeline={"stages": 2})
    names = {name.function for name in [*phased.jobs, *staged.jobs]}
    assert names - {*OUTSIDE_STEPS} == {*ahead.FUNCTIONS}


def test_a_program_that_does_not_compile_is_a_failure(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise jax.errors.JaxRuntimeError("out of memory\nand more")

    lengths = SimpleNamespace(programs=lambda: SimpleNamespace(jobs={ProgramName("update"): None}))
    monkeypatch.setattr(ahead, "only_compile", lambda: None)
    monkeypatch.setattr(ahead, "target_mesh", lambda *_: None)
    monkeypatch.setattr(ahead, "generated_lengths", lambda *_: lengths)
    monkeypatch.setattr(ahead, "resident_bytes", lambda _: 0)
    monkeypatch.setattr(ahead, "check_job", refuse)
    path = tmp_path / "ahead.json"
    assert ahead.main(["--model", "7B", "--mesh", "fsdp", "--json", str(path)]) == 1
    failed = ["7B, fsdp, remat full: update does not compile: out of memory"]
    assert json.loads(path.read_text())["failed"] == failed
    assert capsys.readouterr().err == f"error: {failed[0]}\n"


def test_without_the_compiler_it_says_so(monkeypatch, capsys):
    def missing(chip, count):
        raise ChipError("compiling for h100 needs jax_plugins")

    monkeypatch.setattr(ahead, "only_compile", lambda: None)
    monkeypatch.setattr("jaxmllm.setup.ahead.chip_devices", missing)
    assert ahead.main(["--model", "7B", "--mesh", "fsdp"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
