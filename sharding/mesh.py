"""The device mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh


class MeshError(ValueError):
    """A mesh or layout that the devices or the arrays cannot have."""


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the named axes, in the given order, over all devices (or those given).

    One size may be -1: it takes the devices that the others leave.

    Raises:
      MeshError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    # By default jax.make_mesh makes axes Explicit, and then shard_map refuses unsharded inputs.
    auto = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, tuple(sizes), axis_types=auto, devices=devices)


def abstract_mesh(sizes: Mapping[str, int], devices: int) -> AbstractMesh:
    """A mesh as `make_mesh` makes it, over devices that need not exist: for shapes and plans."""
    shape = mesh_shape(sizes, devices)
    return AbstractMesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def mesh_shape(sizes: Mapping[str, int], devices: int) -> tuple[int, ...]:
    """The sizes with -1 replaced by the devices that the others leave.

    Raises:
      MeshError: the sizes do not multiply to the number of devices.
    """
    free = [name for name, size in sizes.items() if size == -1]
    wrong = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if wrong or len(free) > 1:
        raise MeshError(
            f"mesh sizes {dict(sizes)} must be positive; -1 is allowed once, for 'the rest'"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or (not free and fixed != devices):
        raise MeshError(
            f"mesh {dict(sizes)} needs {'a multiple of ' if free else ''}{fixed} devices but there "
            f"are {devices}; change the mesh sizes or start with another number of devices"
        )
    return tuple(devices // fixed if size == -1 else size for size in sizes.values())
