"""Temporary bytes of programs by moment.

The reference is what XLA reported for the same programs compiled for H100s (jax 0.10.2).
"""

from __future__ import annotations

import math
from functools import cache

import jax
import pytest

from benchmarks.omni import omni_config
from jaxmllm.cluster.device_peak import programs_peak
from jaxmllm.cluster.phase_program import PhaseProgram
from jaxmllm.cluster.temporaries import job_temporaries, program_temporaries
from jaxmllm.config.read import config_tree, parse_config
from jaxmllm.models.compose import build_model
from jaxmllm.tools.generated_lengths import generated_lengths
from jaxmllm.training.programs.base import ProgramName
from sharding.mesh import abstract_mesh, make_mesh

LOSS = "language_loss_and_grad"
GRAD = "encode_grad"
FSDP = (("data", 1), ("fsdp", 64))
DATA = (("data", 8), ("fsdp", 1))
TENSOR = (("data", 1), ("fsdp", 16), ("tensor", 4))
CONTEXT = (("data", 1), ("fsdp", 16), ("context", 4))


@cache
def model_of(name, mesh, remat="full", frozen=(), choices=(), audio=()):
    """A published model on an abstract mesh, with changes to its decoder and its audio tower."""
    tree = config_tree(omni_config(name, mesh=dict(mesh), data={"batch_size": 128}, remat=remat))
    tree["model"]["language"] |= dict(choices)
    tree["model"]["audio"] |= dict(audio)
    for component in frozen:
        tree["components"][component]["freeze"] = True
    config = parse_config(tree)
    sizes = config.mesh_sizes
    devices = abstract_mesh(sizes, math.prod(sizes.values()))
    return build_model(config.model, config.model.language.vocab_size, config.components, devices)


@pytest.mark.parametrize(
    ("model", "mesh", "remat", "program", "phase", "capacity", "compiled_gb"),
    [
        ("7B", FSDP, "full", LOSS, "language", 8192, 5.568),
        ("7B", FSDP, "dots", LOSS, "language", 8192, 26.708),
        ("7B", FSDP, "dots", GRAD, "vision", 16384, 13.015),
        ("7B", TENSOR, "full", LOSS, "language", 16384, 5.277),
        ("7B", CONTEXT, "full", GRAD, "vision", 16384, 0.808),
        ("2B", DATA, "full", LOSS, "language", 8192, 2.773),
        ("84B", (("data", 5), ("fsdp", 512)), "full", LOSS, "language", 8192, 19.112),
        ("30B-A3B", FSDP, "full", LOSS, "language", 8192, 10.870),
        ("30B-A3B", FSDP, "dots", "evaluate", "language", 8192, 6.619),
        ("30B-A3B", (("data", 1), ("fsdp", 128)), "none", LOSS, "language", 4096, 22.350),
        ("30B-A3B", TENSOR, "full", LOSS, "language", 16384, 8.331),
        ("30B-A3B", CONTEXT, "dots", LOSS, "language", 16384, 6.214),
    ],
)
def test_estimates_are_what_was_compiled(model, mesh, remat, program, phase, capacity, compiled_gb):
    name = ProgramName(program, phase, capacity)
    estimated = program_temporaries(model_of(model, mesh, remat), name)
    assert 0.94 * compiled_gb < estimated.total / 1e9 < 1.1 * compiled_gb


@pytest.mark.parametrize(
    ("remat", "choice", "compiled_gb"),
    [
        ("full", ("post_norms", True), 5.568),
        ("dots", ("post_norms", True), 28.352),
        ("none", ("post_norms", True), 89.454),
        ("none", ("activation", "gelu_tanh"), 93.678),
    ],
)
def test_choices_of_the_decoder_take_what_was_compiled(remat, choice, compiled_gb):
    model = model_of("7B", FSDP, remat, choices=(choice,))
    estimated = program_temporaries(model, ProgramName(LOSS, "language", 8192))
    assert 0.94 * compiled_gb < estimated.total / 1e9 < 1.1 * compiled_gb


@pytest.mark.parametrize(("program", "compiled_gb"), [("encode", 0.819), (GRAD, 2.149)])
def test_convolutions_along_time_and_mels_take_what_was_compiled(program, compiled_gb):
    stem = (("chunk_frames", 96), ("stem_channels", 480))
    model = model_of("7B", (("data", 2), ("fsdp", 32)), audio=stem)
    estimated = program_temporaries(model, ProgramName(program, "audio", 12_288))
    assert 0.94 * compiled_gb < estimated.total / 1e9 < 1.1 * compiled_gb
    assert estimated.moment.startswith("stem")


def test_freezing_takes_less_and_longer_rows_more():
    model = model_of("7B", FSDP)
    for phase, program in (("language", LOSS), ("vision", GRAD)):
        frozen = model_of("7B", FSDP, frozen=(phase,))
        sizes = [
            program_temporaries(variant, ProgramName(program, phase, capacity)).total
            for variant, capacity in ((frozen, 16384), (model, 16384), (model, 24576))
        ]
        assert 0 < sizes[0] < sizes[1] < sizes[2]


def test_other_rows_of_a_program_take_what_that_program_does():
    model = model_of("7B", FSDP)
    for phase, program in (("language", LOSS), ("vision", GRAD), ("vision", "encode")):
        short, long = (ProgramName(program, phase, capacity) for capacity in (2048, 24576))
        program_of_rows = PhaseProgram(model, short)
        assert program_of_rows.temporaries() == program_temporaries(model, short)
        assert program_of_rows.with_rows(24576).temporaries() == program_temporaries(model, long)


def test_a_moment_is_named():
    """A short row peaks in the head, a long one in the backward pass of a layer."""
    short_row, long_row = (
        program_temporaries(model_of("7B", FSDP), ProgramName(LOSS, "language", capacity))
        for capacity in (2048, 24576)
    )
    assert (short_row.moment, long_row.moment) == ("head", "layer backward")
    assert program_temporaries(model_of("7B", FSDP), ProgramName("update")).total == 0


@pytest.mark.slow
def test_stages_hold_what_their_schedule_does():
    devices = make_mesh(
        {"stage": 2, "data": 1, "fsdp": 4, "context": 1, "tensor": 1}, jax.devices()
    )
    config = parse_config(
        config_tree(
            omni_config(
                "tiny", mesh={"data": 1, "fsdp": 4}, pipeline={"stages": 2}, data={"batch_size": 16}
            )
        )
    )
    programs = generated_lengths(config, devices, 0).programs()
    carried = programs.held.total + programs.held_sums
    estimate = job_temporaries(programs, ProgramName("gradients"))
    assert estimate.total > carried
    assert {moment.split()[0] for moment in estimate.moments} == {"vision", "audio", "language"}
    assert programs_peak(programs).program == ProgramName("gradients")
