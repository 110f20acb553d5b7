"""Functions by platform: all of them are traced where the platform is not
known, one where it is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from sharding.by_platform import by_platform, traced_for
from sharding.mesh import make_mesh


@jax.jit
def doubled_on_cpu(x):
    """Jitted, so that JAX caches its traces."""
    return by_platform(x, cpu=lambda x: x * 2, cuda=jnp.sin, default=jnp.cos)


def mesh_of(platform, **client):
    """A stand-in for a mesh of one device, with the attributes that tell its platform."""
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(**client))
    return SimpleNamespace(devices=SimpleNamespace(flat=[device]))


def text(function, platform):
    """The program that is lowered for a platform."""
    return function.trace(jnp.ones(2)).lower(lowering_platforms=(platform,)).as_text()


def test_all_are_traced_where_the_platform_is_not_known():
    assert doubled_on_cpu(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert "sine" in text(doubled_on_cpu, "cuda")
    assert "cosine" in text(doubled_on_cpu, "tpu")


@pytest.mark.parametrize(
    ("mesh", "operation"),
    [
        (make_mesh({"data": 8}), "mul"),
        (mesh_of("gpu", _raw_platform="cuda"), "sin"),
        (mesh_of("gpu", _raw_platform="rocm"), "cos"),
        (mesh_of("tpu"), "cos"),
    ],
)
def test_one_is_traced_where_it_is_known(mesh, operation):
    with traced_for(mesh):
        program = jax.make_jaxpr(doubled_on_cpu)(jnp.ones(2))
    (call,) = program.eqns
    assert [str(eqn.primitive) for eqn in call.params["jaxpr"].eqns] == [operation]


def test_a_gpu_that_may_be_either_kind_is_not_known():
    with traced_for(mesh_of("gpu")):
        program = str(jax.make_jaxpr(doubled_on_cpu)(jnp.ones(2)))
    assert "platform_index" in program and "cos" in program and "sin" in program


def test_what_was_traced_for_one_platform_is_not_found_for_another():
    """The cache must not return the trace for CUDA where the platform is the
    CPU, or is not known."""
    with traced_for(mesh_of("gpu", _raw_platform="cuda")):
        jax.make_jaxpr(doubled_on_cpu)(jnp.ones(3))
    with traced_for(make_mesh({"data": 8})):
        assert doubled_on_cpu(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert doubled_on_cpu(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
