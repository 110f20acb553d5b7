"""Meshes for a number of devices, and which of their axes encoders count as data: all layouts that
a config leaves open.

    config, devices --mesh_choices--> MeshChoice, of which the model may refuse some

What a config fixes stays: an axis with a number (-1 is open, and so is an axis that it does not
name), and the layout of a component that has one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from jaxmllm.config.schema import Config, ConfigError, MeshConfig

AXES: Final = ("data", "fsdp", "context", "tensor")
# Axes that split rows or layers of the decoder, over which encoders may have more ranks instead
INNER_AXES: Final = ("context", "tensor")
BATCH_AXES: Final = ("data", "fsdp")
STAGES: Final = (1, 2, 4, 8, 16)  # tried where the config leaves stages open


@dataclass(frozen=True, order=True)
class MeshChoice:
    """Devices along each axis, the axes that encoders count as data, and pipeline stages, each on
    such a mesh."""

    data: int
    fsdp: int
    context: int
    tensor: int
    as_data: tuple[str, ...] = ()
    stages: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis, as in `mesh` of a config."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices by axis, with stages, as `Config.mesh_sizes`."""
        return ({"stage": self.stages} if self.stages > 1 else {}) | self.sizes

    @property
    def sizes_key(self) -> tuple[int, ...]:
        """A key of the mesh alone, whatever encoders count as data."""
        return (self.stages, *self.sizes.values())

    @property
    def devices(self) -> int:
        return math.prod(self.mesh_sizes.values())

    @property
    def axes(self) -> int:
        """Axes of more than one device, and as many more as encoders count as data."""
        return sum(size > 1 for size in self.mesh_sizes.values()) + len(self.as_data)

    @property
    def words(self) -> str:
        """The choice in words, for tables."""
        stages = [f"{self.stages} stages"] if self.stages > 1 else []
        axes = (f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
        used = ", ".join([*stages, *axes])
        over = f"; encoders over {' and '.join(self.as_data)}" if self.as_data else ""
        return (used or "one device") + over

    def of(self, config: Config) -> Config:
        """The config on this mesh. Its sections are not checked against each other again."""
        components = config.components
        if self.as_data:
            layout = {"batch": [axis for axis in AXES if axis in (*BATCH_AXES, *self.as_data)]}
            towers = {
                name: getattr(components, name).model_copy(update={"layout": layout})
                for name in open_layouts(config)
            }
            components = components.model_copy(update=towers)
        pipeline = config.pipeline.model_copy(update={"stages": self.stages})
        mesh = MeshConfig(**self.sizes)
        return config.model_copy(
            update={"mesh": mesh, "components": components, "pipeline": pipeline}
        )


def fixed_axes(config: Config) -> dict[str, int]:
    """Devices of the axes whose number the config fixes, by axis."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    named = config.mesh.model_fields_set
    return {axis: size for axis, size in sizes.items() if axis in named and size != -1}


def open_layouts(config: Config) -> tuple[str, ...]:
    """Encoders whose layout the config leaves open."""
    return tuple(
        name for name in config.model.encoders if not getattr(config.components, name).layout
    )


def open_remat(config: Config) -> tuple[str, ...]:
    """Phases whose tower or decoder has no `remat` in the config."""
    return tuple(
        name
        for name in config.model.phases
        if "remat" not in getattr(config.components, name).model_fields_set
    )


def stage_counts(config: Config) -> tuple[int, ...]:
    """Numbers of pipeline stages to consider: the config's, or several where it names neither
    stages nor the size of an axis."""
    if "stages" in config.pipeline.model_fields_set or fixed_axes(config):
        return (config.pipeline.stages,)
    return STAGES


def mesh_choices(config: Config, devices: int) -> list[MeshChoice]:
    """All ways to lay out so many devices, in a fixed order.

    Raises:
      ConfigError: axes that the config fixes do not divide the devices.
    """
    fixed = fixed_axes(config)
    stages = config.pipeline.stages
    product = math.prod(fixed.values()) * stages
    if devices % product or (len(fixed) == len(AXES) and product != devices):
        of_stages = [f"pipeline.stages {stages}"] if stages > 1 else []
        named = ", ".join([*of_stages, *(f"mesh.{axis} {size}" for axis, size in fixed.items())])
        below = devices // product * product if len(fixed) < len(AXES) else product
        nearest = below or product
        raise ConfigError(
            f"{named} need a multiple of {product} devices, not {devices}; say --devices {nearest}, or leave the axes "
            "open with mesh={}"
        )
    return [
        choice
        for stage_count in stage_counts(config)
        if devices % stage_count == 0
        for choice in _staged_choices(config, devices // stage_count, stage_count)
    ]


def _staged_choices(config: Config, devices: int, stages: int) -> Iterator[MeshChoice]:
    """Choices with `stages` stages, each stage on a mesh of `devices` devices."""
    fixed = fixed_axes(config)
    # With stages, all rows are on the ranks of the decoder
    inner = open_layouts(config) if stages == 1 else ()
    for factors in _factorizations(devices, [fixed.get(axis) for axis in AXES]):
        sizes = dict(zip(AXES, factors, strict=True))
        for as_data in _shared(sizes) if inner else [()]:
            yield MeshChoice(**sizes, as_data=as_data, stages=stages)


def _shared(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """All sets of inner axes that have several devices, the empty set included."""
    several = [axis for axis in INNER_AXES if sizes[axis] > 1]
    return [
        chosen
        for axis_count in range(len(several) + 1)
        for chosen in itertools.combinations(several, axis_count)
    ]


def _factorizations(number: int, fixed: list[int | None]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of ordered factors, of which some are given."""
    fixed_factor, *later_fixed = fixed
    if not later_fixed:
        if fixed_factor in (None, number):
            yield (number,)
        return
    factors = [fixed_factor] if fixed_factor is not None else divisors(number)
    for factor in factors:
        if number % factor == 0:
            for later_factors in _factorizations(number // factor, later_fixed):
                yield (factor, *later_factors)


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
