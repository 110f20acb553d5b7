"""Logical axes -> mesh axes, one `Layout` for each component.

Parameters and activations name their axes by meaning ("embed", "heads", "batch"); a layout says
which mesh axes each of them is split over. Two components may have different layouts on one mesh:
an encoder can count `tensor` as one more data axis, which gives it more ranks than the language
model has. Rules name whole axes of the mesh; a layout holds their sub-axes (sharding/mesh.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.mesh import MeshError, axis_sizes, whole_axis
from sharding.pipeline.ring import STAGE

Axes = tuple[str | None, ...]

DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),  # R: rows of a microbatch, one for each rank or group of ranks
    "sequence": ("context",),  # the slots of a row
    "layers": (),
    "embed": ("fsdp",),  # a parameter's model width; gathered before use
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("fsdp",),  # of a mixture: a device runs its own experts on the tokens of all
}
# Logical axes that stay split during the computation. So none of them shares a mesh axis with
# `batch`, and none of the others shares one with `sequence`.
COMPUTE_AXES = ("sequence", "heads", "kv_heads", "mlp", "vocab")
# Axis of activations -> the logical axes that may not be split over the same mesh axes
APART = {"batch": COMPUTE_AXES, "sequence": COMPUTE_AXES[1:]}
# Parameters are never gathered along these. Experts may be split over a batch axis, because tokens
# are sent to them.
KEPT_AXES = (*COMPUTE_AXES, "experts")


@dataclass(frozen=True)
class Layout:
    """How one component is placed on the mesh: which mesh axes split each logical axis."""

    mesh: Mesh | AbstractMesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    # Whether gradients are sent in the type they are computed in, instead of at least float32
    narrow_gradients: bool = False

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        return dict(self.rules).get(name, ()) if name else ()

    def whole_axes(self, name: str) -> tuple[str, ...]:
        """The whole mesh axes of a logical axis, as a config names them."""
        return tuple(dict.fromkeys(whole_axis(axis) for axis in self.mesh_axes(name)))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return self.mesh_axes("batch")

    @property
    def ranks(self) -> int:
        """R: number of ranks; all compute equally many slots at the same time."""
        return self._device_count("rank")

    @property
    def groups(self) -> int:
        """R / g: number of rows computed at the same time, one in each group of ranks."""
        return self._device_count("batch")

    @property
    def span(self) -> int:
        """g: how many neighbouring ranks hold a row together."""
        return self.ranks // self.groups

    def size(self, name: str) -> int:
        """Number of parts that a logical axis of arrays has here; manual mesh axes do not count."""
        if name not in self._cached_sizes:
            self._cached_sizes[name] = math.prod(
                self.mesh.shape[axis] for axis in self._automatic_axes(name)
            )
        return self._cached_sizes[name]

    @cached_property
    def _cached_sizes(self) -> dict[str, int]:
        """Cached results of `size`, by logical axis."""
        return {}

    def spec(self, axes: Axes) -> P:
        """Partition spec of arrays with these logical axes, without the mesh axes manual here."""
        return P(*(self._automatic_axes(name) or None for name in axes))

    def _automatic_axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes of a logical axis, without those that are manual here."""
        manual = self.manual_axes
        return tuple(axis for axis in self.mesh_axes(name) if axis not in manual)

    def _device_count(self, name: str) -> int:
        """Number of devices along the mesh axes of a logical axis."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(name))

    def sharding(self, axes: Axes) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    @property
    def parts(self) -> int:
        """g * X: number of parts that a row's slots are split into, X on each of its ranks
        (context parallelism); 1 inside a shard_map that is manual over the parts."""
        return self.size("sequence")

    @property
    def part_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device over which the slots of one rank are split."""
        ranks = self.mesh_axes("rank")
        return tuple(
            axis
            for axis in self.mesh_axes("sequence")
            if axis not in ranks and self.mesh.shape[axis] > 1
        )

    def split_axes(self, *names: str) -> tuple[str, ...]:
        """Mesh axes of more than one device that split these logical axes, manual here or not."""
        axes = (axis for name in names for axis in self.mesh_axes(name))
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def rows(self) -> NamedSharding:
        """Sharding of [R / g, ...] arrays: one row on every rank or group of ranks."""
        return self.sharding(("batch",))

    def spanned(self, span: int) -> Layout:
        """This layout for rows that `span` neighbouring ranks hold together: [R / g, g * C].

        Group k is ranks k * span .. (k + 1) * span - 1; their parts of the row are in this order.

        Raises:
          MeshError: no innermost sub-axes of the batch axes multiply to `span`.
        """
        if span == 1:
            return self
        outer = list(self.batch_axes)
        inner: list[str] = []
        while outer and math.prod(self.mesh.shape[axis] for axis in inner) < span:
            inner.insert(0, outer.pop())
        if math.prod(self.mesh.shape[axis] for axis in inner) != span:
            sizes = {name: axis_sizes(self.mesh)[name] for name in self.whole_axes("batch")}
            cut = {axis: self.mesh.shape[axis] for axis in self.batch_axes}
            raise MeshError(
                f"rows of span {span} cannot be formed of {self.ranks} ranks on mesh axes {sizes}, cut "
                f"into {cut}: a span must be a product of the innermost of these; change "
                f"phases.<phase>.spans or the mesh"
            )
        # The ranks' axes precede those of one rank's devices, so parts are numbered rank by rank.
        return self._with_rules(batch=tuple(outer), sequence=(*inner, *self.mesh_axes("sequence")))

    def _with_rules(self, **rules: tuple[str, ...]) -> Layout:
        return replace(self, rules=tuple((dict(self.rules) | rules).items()))

    @cached_property
    def manual_axes(self) -> frozenset[str]:
        """Mesh axes over which the code here is manual: it sees one device's share along them."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return frozenset(axis for axis, axis_type in types if axis_type == AxisType.Manual)

    @property
    def is_partitioned(self) -> bool:
        """Whether XLA splits the computation of the code here over several devices."""
        sizes = self.mesh.shape
        return any(sizes[axis] > 1 for axis in set(sizes) - self.manual_axes)

    def inside(self, *axes: str) -> Layout:
        """This layout for code inside a shard_map that is manual over mesh axes.

        `size` and `spec` do not count these axes there. Collectives may name them.
        """
        if not axes:
            return self
        mesh = self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh
        return replace(self, mesh=mesh.update_axis_types(dict.fromkeys(axes, AxisType.Manual)))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        if self.manual_axes == set(self.mesh.axis_names):
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def local(
        self, function: Callable[..., Any], in_axes: Sequence[Any], out_axes: Any
    ) -> Callable[..., Any]:
        """`function` as a function of whole arrays that runs on each device's own part of them.

        A kernel whose loop bounds are its rank's data needs this, for example.

        Args:
          in_axes: logical axes of each argument, or a tree of them.
          out_axes: logical axes of the result, likewise.
        """
        # A shard_map inside another one may not name the outer one's manual axes again.
        names = set(self.mesh.axis_names) - self.manual_axes
        if not names:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=jax.tree.map(self.spec, tuple(in_axes), is_leaf=_is_axes),
            out_specs=jax.tree.map(self.spec, out_axes, is_leaf=_is_axes),
            axis_names=names,
            check_vma=False,
        )

    def check(self, name: str, shape: Sequence[int], axes: Axes) -> None:
        """Raise `MeshError` when `shape` cannot be split as `axes` say."""
        used = [mesh_axis for axis in axes for mesh_axis in self.mesh_axes(axis)]
        twice = _whole_axis_names({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1})
        if twice:
            raise MeshError(
                f"{name}: two of its axes {axes} are split over {twice}; change this component's layout"
            )
        for length, axis in zip(shape, axes, strict=True):
            if axis is not None and length % self.size(axis):
                raise MeshError(
                    f"{name}: axis {axis!r} of length {length} cannot be split over mesh axes "
                    f"{self.whole_axes(axis)} of {self.size(axis)} devices; change the mesh or this "
                    f"component's layout"
                )


def make_layout(
    mesh: Mesh | AbstractMesh,
    overrides: Mapping[str, Sequence[str]] | None = None,
    where: str = "layout",
) -> Layout:
    """The default rules with overrides.

    Mesh axes named for `batch` are taken away from the compute axes that the overrides do not name,
    so `{batch: [data, fsdp, tensor]}` alone turns tensor parallelism into data parallelism. Axes
    named for `sequence` are likewise taken away from the other compute axes.

    Args:
      overrides: whole mesh axes by logical axis.
      where: key of the config that errors name.

    Raises:
      MeshError: an axis is unknown, is the axis of pipeline stages, or is named for two logical
        axes that may not share it.
    """
    overrides = overrides or {}
    for name, axes in overrides.items():
        if name not in DEFAULT_RULES:
            known = ", ".join(DEFAULT_RULES)
            raise MeshError(f"{where}: unknown logical axis {name!r}; known: {known}")
        for axis in axes:
            if axis not in axis_sizes(mesh):
                known = ", ".join(axis_sizes(mesh))
                raise MeshError(f"{where}.{name}: unknown mesh axis {axis!r}; the mesh has {known}")
            if axis == STAGE:
                raise MeshError(
                    f"{where}.{name}: mesh axis {STAGE!r} holds the stages of the pipeline; leave it out"
                )
    rules = {
        name: _in_mesh_order(mesh, overrides.get(name, axes))
        for name, axes in DEFAULT_RULES.items()
    }
    # `batch` first: a mesh axis that it takes from `sequence` is then not taken from the others
    # on behalf of `sequence`.
    for taker, names in APART.items():
        for name in names:
            clash = set(rules[name]) & set(rules[taker])
            if clash and name in overrides:
                raise MeshError(
                    f"{where}: mesh axes {_whole_axis_names(clash)} are named for both {taker!r} and {name!r}"
                )
            rules[name] = tuple(axis for axis in rules[name] if axis not in clash)
    # Width of the experts' matrices: the mesh axes of `embed` that `experts` does not use
    rules["expert_embed"] = tuple(a for a in rules["embed"] if a not in rules["experts"])
    rules["rank"] = rules["batch"]  # stays as it is when `spanned` moves axes out of `batch`
    return Layout(mesh, tuple(rules.items()))


def _in_mesh_order(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """The sub-axes of whole axes, in the order of the mesh."""
    return tuple(axis for axis in mesh.axis_names if whole_axis(axis) in axes)


def _whole_axis_names(axes: Iterable[str]) -> list[str]:
    """The whole axes of sub-axes, by name."""
    return sorted({whole_axis(axis) for axis in axes})


def rank_nodes(layout: Layout, devices_per_node: int | None = None) -> np.ndarray:
    """Node of each rank of a layout, int32 [R]: the node of the rank's first device.

    A node is the devices of one process or, with `devices_per_node`, that many devices in the order
    of their ids, which may have gaps. The devices of an abstract mesh count in the mesh's order;
    without `devices_per_node` they are one node.
    """
    mesh = layout.mesh
    if not isinstance(mesh, Mesh):
        nodes = np.arange(mesh.size) // (devices_per_node or mesh.size)
    elif devices_per_node is None:
        nodes = np.array([device.process_index for device in mesh.devices.flat])
    else:
        ids = np.array([device.id for device in mesh.devices.flat])
        # The position of each id among all ids, so that gaps do not count
        nodes = np.searchsorted(np.sort(ids), ids) // devices_per_node
    numbered = np.unique(nodes, return_inverse=True)[1].reshape(tuple(mesh.shape.values()))
    first_devices = tuple(
        slice(None) if axis in layout.batch_axes else 0 for axis in mesh.axis_names
    )
    return numbered[first_devices].reshape(-1).astype(np.int32)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)
