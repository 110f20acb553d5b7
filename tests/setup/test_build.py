"""Warnings and errors of a run before it compiles anything."""

import logging

import numpy as np
import pytest

from jaxmllm.balance.records import ExchangeGrid, PlanSpec, RouteSpec
from jaxmllm.config.read import parse_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.models import mllm
from jaxmllm.setup import build, row_memory
from jaxmllm.setup.build import (
    _warn_of_late_warm_up,
    _warn_of_rounded_moments,
    make_programs,
    plan_facts,
    plan_programs,
)
from jaxmllm.setup.prepare import prepare
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.programs.base import Programs
from sharding.mesh import abstract_mesh, make_mesh
from tests.support import tiny_config


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_auto_that_comes_to_the_loop_on_a_gpu_is_a_warning(tmp_path, monkeypatch, caplog, platform):
    """Heads have 8 numbers in towers, too few for the kernel, and 16 in the decoder.

    Audio asks for the loop, and so is not warned of.
    """
    make_sample(tmp_path, seed=1, train=32, test=8)
    config = parse_config(
        tiny_config(
            tmp_path,
            model__language__head_size=16,
            model__language__rope_sections=[4, 2, 2],
            components__audio__attention="jax",
        )
    )
    monkeypatch.setattr(mllm, "platform_of", lambda mesh: platform)
    monkeypatch.setattr(Programs, "compile", lambda self: self)
    with caplog.at_level(logging.WARNING, "jaxmllm"):
        programs, _ = make_programs(config, prepare(config, make_mesh(config.mesh_sizes)))
    kernels = {
        phase: programs.functions.model.attention_choice(phase, block).kernel
        for phase, block in programs.attention.blocks.items()
    }
    towers = "jax" if platform == "gpu" else "cpu"
    assert kernels == {"vision": towers, "audio": "jax", "language": platform}
    lines = [line for line in caplog.messages if "attention" in line]
    if platform == "cpu":
        assert not lines
    else:
        (line,) = lines
        assert line.startswith("attention of vision is the loop")
        assert "heads of 16 numbers" in line and "components.vision.attention" in line


@pytest.mark.parametrize(
    ("attention", "dtype", "needs"),
    [
        ("gpu", "float32", "heads of 16 numbers to 512 bytes, not 8 of float32"),
        ("cpu", "bfloat16", "float32, not bfloat16"),
    ],
)
def test_a_kernel_that_does_not_take_a_phase_is_refused_before_anything_is_compiled(
    tmp_path, attention, dtype, needs
):
    make_sample(tmp_path, seed=1, train=32, test=8)
    settings = {"attention": attention, "compute_dtype": dtype}
    config = parse_config(tiny_config(tmp_path, components__vision=settings))
    with pytest.raises(
        ConfigError, match=rf"components\.vision\.attention \({attention}\).*{needs}"
    ):
        plan_programs(config, prepare(config, abstract_mesh(config.mesh_sizes, 1)))


def test_pools_that_no_device_holds_are_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    """The same sizes, on devices with memory for the state and for all or a part of the pools."""
    make_sample(tmp_path, seed=1, train=32, test=8)
    config = parse_config(tiny_config(tmp_path))
    monkeypatch.setattr(Programs, "compile", lambda self: self)
    inputs = prepare(config, make_mesh(config.mesh_sizes))
    planned = plan_programs(config, inputs)
    monkeypatch.setattr(build, "plan_programs", lambda config, inputs: planned)
    pools = planned[0].pools
    slots = sum(pools[name].tokens.shape[1] for name in ("vision", "language"))
    pool_bytes = slots * 4 * (32 + 1)  # a token and its validity; audio shares the pools of vision
    state = row_memory.state_bytes(config, inputs.model)
    monkeypatch.setattr(row_memory, "device_memory", lambda device: state + pool_bytes - 1)
    with pytest.raises(ConfigError, match=r"^data\.batch_size \(16\): a device has .* GiB, of w"):
        make_programs(config, inputs)
    # None: a device that does not tell
    for memory in (state + pool_bytes, None):
        monkeypatch.setattr(row_memory, "device_memory", lambda device, memory=memory: memory)
        make_programs(config, inputs)


def test_keys_that_change_nothing_are_named(tmp_path, monkeypatch, caplog):
    make_sample(tmp_path, seed=1, train=32, test=8)
    monkeypatch.setattr(Programs, "compile", lambda self: self)

    def warnings(**changes):
        config = parse_config(tiny_config(tmp_path, **changes))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jaxmllm"):
            make_programs(config, prepare(config, make_mesh(config.mesh_sizes)))
        return [line for line in caplog.messages if "changes nothing" in line]

    assert not warnings() and not warnings(pipeline__schedule="greedy")
    (line,) = warnings(pipeline__microbatches=4, pipeline__schedule="1f1b")
    assert line.startswith("pipeline.schedule, pipeline.microbatches: pipeline.stages is 1")


@pytest.mark.parametrize(
    ("warmup", "steps", "warned"), [(20, 30, True), (9, 30, False), (20, 20, False)]
)
def test_a_rate_that_falls_in_one_step_is_a_warning(tmp_path, caplog, warmup, steps, warned):
    optimizer = {
        "learning_rate": 1,
        "schedule": "cosine",
        "warmup_steps": warmup,
        "decay_steps": 10,
    }
    run = {"directory": str(tmp_path), "steps": steps}
    _warn_of_late_warm_up(parse_config(tiny_config(tmp_path, run=run, optimizer=optimizer)))
    assert [line.partition(" lasts")[0] for line in caplog.messages] == [
        f"optimizer.warmup_steps ({warmup})"
    ] * warned


@pytest.mark.parametrize(
    ("dtype", "beta2", "warned"),
    [("bfloat16", 0.999, True), ("bfloat16", 0.99, False), ("float32", 0.999, False)],
)
def test_moments_that_rounding_keeps_are_a_warning(tmp_path, caplog, dtype, beta2, warned):
    run = {"directory": str(tmp_path), "steps": 1, "param_dtype": dtype}
    optimizer = {"learning_rate": 1, "beta2": beta2}
    _warn_of_rounded_moments(parse_config(tiny_config(tmp_path, run=run, optimizer=optimizer)))
    assert [line.startswith("optimizer.beta2") for line in caplog.messages] == [True] * warned


def test_large_grids_that_differ_in_the_middle_are_told_apart():
    # Larger than numpy prints in full, so that text with an ellipsis would not tell them apart
    ranks = np.arange(2560, dtype=np.int32)
    swapped = ranks.copy()
    swapped[[1000, 1001]] = swapped[[1001, 1000]]
    facts = [
        plan_facts(PlanSpec({}, {"vision": RouteSpec(ExchangeGrid(grid, grid), 64, 64, 64)}))
        for grid in (ranks[:, None], swapped[:, None])
    ]
    assert [key for key in facts[0] if facts[0][key] != facts[1][key]] == ["route vision.grid"]
