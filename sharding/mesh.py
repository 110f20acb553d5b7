"""The device mesh, whose axes are cut into sub-axes so that neighbouring ranks can share rows.

    {"data": 16, "tensor": 2}, spans 1, 2, 4    -->    data 4, data.1 2, data.2 2, tensor 1, tensor.1 2

A span takes the innermost sub-axes (`Layout.spanned`). All other code names whole axes; devices
and ranks are numbered as if no axis were cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from sharding.pipeline.ring import STAGE

CUT = "."  # between the name of an axis and the number of a sub-axis


class MeshError(ValueError):
    """A mesh or layout that the devices or the arrays cannot have."""


def make_mesh(
    sizes: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    spans: Sequence[int] = (),
) -> Mesh:
    """A mesh with the named axes, in the given order, over all devices (or those given).

    One size may be -1: it takes the devices that the others leave.

    Args:
      spans: how many neighbouring ranks may hold a row together; the axes are cut by their prime
        factors (see above).

    Raises:
      MeshError: the sizes do not multiply to the number of devices, or a span does not divide the
        next one.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(sizes, len(devices))
    # By default jax.make_mesh makes axes Explicit, and then shard_map refuses unsharded inputs.
    auto = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, tuple(sizes), axis_types=auto, devices=devices)
    axes = _cut_axes(dict(zip(sizes, shape, strict=True)), spans)
    # The cut mesh reshapes this one: where devices have a topology, jax.make_mesh orders them by
    # the shape it is given, so that a second call in the cut shape could number them differently.
    ordered = mesh.devices.reshape(tuple(axes.values()))
    return Mesh(ordered, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def abstract_mesh(
    sizes: Mapping[str, int],
    devices: int,
    spans: Sequence[int] = (),
    device: AbstractDevice | None = None,
) -> AbstractMesh:
    """A mesh like that of `make_mesh`, over devices that need not exist: for shapes and plans.

    Args:
      device: kind of the devices; None: as if the run started on this machine.
    """
    axes = _cut_axes(dict(zip(sizes, mesh_shape(sizes, devices), strict=True)), spans)
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        abstract_device=device,
    )


def whole_axis(axis: str) -> str:
    """The axis that a sub-axis was cut from."""
    return axis.partition(CUT)[0]


def axis_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Sizes of the whole axes, in the mesh's order."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.shape.items():
        sizes[whole_axis(axis)] = sizes.get(whole_axis(axis), 1) * size
    return sizes


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """JAX platform of a mesh's devices; this machine's if an abstract mesh names no device."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    device = mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


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


def _cut_axes(sizes: Mapping[str, int], spans: Sequence[int]) -> dict[str, int]:
    """The axes with their sub-axes, outermost first; the outermost keeps the name, even at size 1.

    Every axis except the stages' is cut, because layouts choose which of them are batch axes.
    """
    factors = _prime_factors(spans)
    axes: dict[str, int] = {}
    for name, size in sizes.items():
        inner: list[int] = []
        # Factors of shorter spans come first and stay innermost, because each later factor is put
        # in front: so the innermost sub-axes multiply to every span.
        for factor in factors:
            if name != STAGE and size % factor == 0:
                size //= factor
                inner.insert(0, factor)
        axes[name] = size
        axes |= {f"{name}{CUT}{index}": length for index, length in enumerate(inner, 1)}
    return axes


def _prime_factors(spans: Sequence[int]) -> list[int]:
    """Prime factors of the longest span, those of shorter spans first.

    Raises:
      MeshError: a span is not positive, or does not divide the next one.
    """
    factors: list[int] = []
    shorter = 1
    for span in sorted(set(spans)):
        if span < 1 or span % shorter:
            raise MeshError(f"spans {list(spans)} must be positive, and each divide the next one")
        # The factors so far multiply to the shorter span; these make them multiply to this one.
        remaining = span // shorter
        factor = 2
        # No number below `factor` divides what remains, so if `factor` does, it is prime.
        while remaining > 1:
            if remaining % factor:
                factor += 1
            else:
                factors.append(factor)
                remaining //= factor
        shorter = span
    return factors
