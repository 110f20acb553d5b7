"""Compiler options: the platform's own, except for options that the environment sets."""

from __future__ import annotations

import jax
import pytest

from jaxmllm.runtime.compiler_options import OPTIONS, compiler_options, describe

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_gpus_have_the_same_options_by_any_name(platform):
    assert compiler_options(platform, {}) == OPTIONS["gpu"]


def test_a_platform_without_options_has_none():
    assert compiler_options("another", {}) == {}
    assert describe("another", {}) == "compiler options: none"


def test_what_the_environment_names_is_left_to_it():
    flags = f"--xla_dump_to=/there --{SCHEDULER}=false"
    assert SCHEDULER in compiler_options("gpu", {"XLA_FLAGS": "--xla_dump_to=/there"})
    assert SCHEDULER not in compiler_options("gpu", {"XLA_FLAGS": flags})
    assert f"{SCHEDULER}=true" in describe("gpu", {})
    assert describe("gpu", {"XLA_FLAGS": flags}).endswith(flags)


@pytest.mark.parametrize("platform", OPTIONS)
def test_this_version_of_xla_knows_every_option(platform):
    options = compiler_options(platform, {})
    compiled = jax.jit(lambda x: x + 1).lower(1).compile(compiler_options=options)
    assert compiled(1) == 2
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 2).lower(1).compile(compiler_options={"xla_gpu_unheard_of": True})
