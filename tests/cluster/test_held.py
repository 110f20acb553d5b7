"""Bytes counted from shapes and shardings, against what the compiler reports."""

from __future__ import annotations

import jax
import pytest

from jaxmllm.cluster.held import device_bytes, program_bytes, resident
from jaxmllm.setup.ahead import memory_of
from jaxmllm.training.programs.base import ProgramName
from tests.cluster.programs import tiny


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
)
def test_arguments_are_those_of_the_compiled_programs(mesh):
    _, programs = tiny(mesh=mesh)
    for name, job in programs.jobs.items():
        if name.function in ("update", "add_replicas", "hop", "deliver"):
            compiled = memory_of(job.lower().compile())
            assert compiled is not None
            expected = program_bytes(job)
            assert expected.arguments == compiled.arguments, name
            # The compiler counts a table of one pointer per output
            pointers = 8 * len(jax.tree.leaves(job.result))
            assert expected.outputs + pointers == compiled.outputs, name


def test_what_lies_between_programs_is_the_state_and_what_it_adds_up_in():
    _, programs = tiny(mesh={"data": 2, "fsdp": 4})
    held = resident(programs)
    update = program_bytes(programs.jobs[ProgramName("update")])
    state = held.parameters + held.optimizer
    trained = device_bytes(programs.trained)
    # The remainder is a few scalars, some of which the update does not read
    assert 0 < update.arguments - state - trained < 32
    assert update.aliased == state
    assert held.gradients == trained  # of the device's replica, in float32
    assert held.optimizer > 2 * held.parameters > 0 and held.total > state


def test_frozen_components_have_neither_gradients_nor_moments():
    _, trained = tiny(mesh={"data": 2, "fsdp": 4})
    _, frozen = tiny(mesh={"data": 2, "fsdp": 4}, frozen=("vision", "language"))
    assert resident(frozen).parameters == resident(trained).parameters
    assert resident(frozen).gradients < resident(trained).gradients
    assert resident(frozen).optimizer < resident(trained).optimizer
