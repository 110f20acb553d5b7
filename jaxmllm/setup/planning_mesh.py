"""The mesh of commands that plan steps without running them."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractMesh

from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.setup.spans import node_spans
from sharding.mesh import abstract_mesh


def planning_mesh(config: Config, ranks: int | None = None) -> AbstractMesh:
    """The config's mesh without devices; -1 takes as many as this machine has.

    Args:
      ranks: data ranks, in place of the config's. The model is sharded over gcd(ranks, fsdp) of
        them or, where `fsdp` is -1, over ranks / gcd(ranks, data).

    Raises:
      ConfigError: an axis is left open, or the config has a pipeline, whose rows such commands do
        not plan.
    """
    if config.pipeline.stages > 1:
        raise ConfigError(
            f"pipeline.stages ({config.pipeline.stages}): this command plans steps without a "
            "pipeline; set pipeline.stages=1"
        )
    sizes = config.mesh.model_dump()
    if ranks is not None:
        data = sizes["data"]
        fsdp = sizes["fsdp"]
        shards = ranks // math.gcd(ranks, data) if fsdp == -1 else math.gcd(ranks, fsdp)
        sizes |= {"data": ranks // shards, "fsdp": shards}
        for axis, size in sizes.items():
            if size == -1:
                raise ConfigError(
                    f"mesh.{axis} is -1, but --ranks leaves no devices to count; set mesh.{axis} to a number"
                )
    if -1 in sizes.values():
        return abstract_mesh(sizes, jax.device_count(), spans=node_spans(config, sizes))
    return abstract_mesh(sizes, math.prod(sizes.values()), spans=node_spans(config, sizes))


def check_staged(config: Config) -> None:
    """Raise `ConfigError` for a config without stages."""
    if config.pipeline.stages == 1:
        raise ConfigError(
            "pipeline.stages (1): there is no schedule without stages; set pipeline.stages"
        )


def staged_mesh(config: Config) -> AbstractMesh:
    """The mesh of a config with a pipeline, without devices; -1 takes as many as this machine has,
    or one where it has too few.

    Raises:
      ConfigError: the config has no stages.
    """
    check_staged(config)
    sizes = config.mesh_sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    devices = fixed * max(1, jax.device_count() // fixed) if -1 in sizes.values() else fixed
    return abstract_mesh(sizes, devices, spans=node_spans(config, sizes))
