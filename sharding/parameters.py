"""Parameters stored in shards: gathered where they are used, their gradients scattered to shards.

    shard --cast--> compute dtype --all-gather--> whole          whole --float32, reduce-scatter--> shard

Inside a shard_map that is manual over the axes of rows (`row_axes`), these collectives are our own:
a gradient is summed only over the devices that split its parameter. Devices that hold copies of a
shard, its replicas, each keep a sum of their own; these need not be added before the last
microbatch (`replica_axes`). Elsewhere XLA places the collectives. It gathers as here in the forward
pass, but adds gradients over all devices that have rows in every microbatch, and may cast late.

The gradient of a `Deferred` parameter stays whole on the device that computed it, and is summed
there; `reduced` sends the sum to the shards, once for many microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.by_platform import by_platform
from sharding.rules import KEPT_AXES, Axes, Layout


@partial(jax.tree_util.register_dataclass, data_fields=("shard", "stand_in"), meta_fields=())
@dataclass(frozen=True)
class Deferred:
    """A parameter whose gradient is not scattered yet. The whole gradient is returned as that of
    `stand_in`, which has the shape of the gathered parameter, and whose values nothing reads."""

    shard: jax.Array
    stand_in: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        return self.shard.dtype

    def __getitem__(self, index: Any) -> Deferred:
        """The parameter itself, for `[...]`, which is how modules read their parameters."""
        assert index is Ellipsis, "a parameter that lies in shards is used whole"
        return self


Parameter = jax.Array | Deferred


@lru_cache(maxsize=1024)
def row_axes(layout: Layout) -> tuple[str, ...]:
    """Mesh axes along which devices have different slots of rows, and in addition all axes of size
    1, for which that makes no difference; no axes where one device has all rows."""
    rows = (*layout.mesh_axes("batch"), *layout.mesh_axes("sequence"))
    sizes = layout.mesh.shape
    if all(sizes[axis] == 1 for axis in rows):
        return ()
    return tuple(axis for axis, size in sizes.items() if axis in rows or size == 1)


def replica_axes(layout: Layout, sharding: NamedSharding) -> tuple[str, ...]:
    """Mesh axes along which devices have different rows but the same shard of a parameter."""
    split = {axis for axes in sharding.spec if axes for axis in _axes_tuple(axes)}
    sizes = layout.mesh.shape
    return tuple(axis for axis in row_axes(layout) if sizes[axis] > 1 and axis not in split)


def by_replica(layout: Layout, leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The array that sums a parameter's gradient: [replicas, ...], or [...] with a single replica.

    It has the parameter's sharding, and each replica has its own sum.
    """
    axes = replica_axes(layout, leaf.sharding)
    shape = leaf.shape
    spec = leaf.sharding.spec
    if axes:
        replicas = math.prod(layout.mesh.shape[axis] for axis in axes)
        shape = (replicas, *shape)
        spec = P(axes, *spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(leaf.sharding.mesh, spec))


def whole_sum(layout: Layout, leaf: Any, axes: Axes, dtype: Any) -> jax.ShapeDtypeStruct:
    """The array that sums a `Deferred` parameter's gradient: [devices along the axes of rows, ...].

    Args:
      layout: the layout inside `map_rows`.
    """
    shape = (math.prod(layout.mesh.shape[axis] for axis in _manual_split_axes(layout)), *leaf.shape)
    spec = P(_manual_split_axes(layout), *layout.spec(kept_axes(axes)))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(leaf.sharding.mesh, spec))


def map_rows(
    layout: Layout, function: Callable[..., Any], arguments: Any, results: Any
) -> Callable[..., Any]:
    """A function of whole arrays that runs `function` on every device along the axes of rows.

    Args:
      layout: the layout outside; inside, it is `layout.inside(*row_axes(layout))`.
      function: code of one device along these axes.
      arguments: shapes and shardings of the whole arguments.
      results: shapes and shardings of the whole results.
    """
    return _map_devices(layout, function, arguments, _restricted_specs(row_axes(layout), results))


def results_of_devices(layout: Layout, function: Callable[..., Any], arguments: Any) -> Any:
    """`results` for `map_rows`, for a function whose results are arrays [1, ...] of every device by
    itself: as whole arrays they are [devices along the axes of rows, ...]."""
    axes = row_axes(layout)
    spec = P(axes) if axes else P()
    sharding = NamedSharding(layout.mesh, spec)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(_map_devices(layout, function, arguments, spec), *arguments),
    )


def _map_devices(
    layout: Layout, function: Callable[..., Any], arguments: Any, out_specs: Any
) -> Callable[..., Any]:
    axes = row_axes(layout)
    if not axes:
        return function
    return jax.shard_map(
        function,
        mesh=layout.mesh,
        in_specs=_restricted_specs(axes, tuple(arguments)),
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def _restricted_specs(axes: tuple[str, ...], tree: Any) -> Any:
    """Partition specs of abstract arrays, restricted to some of the mesh's axes."""

    return jax.tree.map(lambda leaf: kept_spec(leaf.sharding.spec, axes), tree)


def kept_spec(spec: P, axes: Collection[str]) -> P:
    """A partition spec restricted to some of the mesh's axes."""
    dimensions = []
    for names in spec:
        kept = tuple(axis for axis in _axes_tuple(names) if axis in axes)
        dimensions.append(kept or None)
    return P(*dimensions)


def is_split(layout: Layout, axes: Axes) -> bool:
    """Whether devices that have different rows, and run the code here one by one (manual axes),
    hold parts of a parameter that each gathers whole. False for experts: each keeps its own."""
    sizes = layout.mesh.shape
    gathered_over = _gather_axes(layout, axes)
    kept_over = map(layout.mesh_axes, kept_axes(axes))
    split = {axis for names in gathered_over for axis in names if sizes[axis] > 1}
    kept = {axis for names in kept_over for axis in names if sizes[axis] > 1}
    return bool(split) and not kept & layout.manual_axes


def deferred(layout: Layout, shard: jax.Array, axes: Axes, dtype: Any) -> Deferred:
    """A shard as a `Deferred` parameter, whose whole gradient has the type `dtype`."""
    sizes = layout.mesh.shape
    shape = []
    for length, names in zip(shard.shape, _gather_axes(layout, axes), strict=True):
        shard_count = math.prod(sizes[axis] for axis in names)
        shape.append(length * shard_count)
    return Deferred(shard, jnp.zeros(tuple(shape), dtype))


def differentiated(parameter: Any) -> jax.Array:
    """The array of a parameter, or of its gradient, that has the shape of the gradients' sums."""
    array: jax.Array = parameter.stand_in if isinstance(parameter, Deferred) else parameter
    return array


def whole_gradient(gradient: jax.Array | None) -> Any:
    """The gradient of a `Deferred` parameter in the form that a gradient rule returns; `gradient`
    is None where JAX asks for none."""
    return Deferred(None, gradient)  # type: ignore[arg-type]  # None is JAX's word for zero


def reduced(
    layout: Layout, rows: tuple[str, ...], axes: Axes, dtype: Any
) -> Callable[[jax.Array], jax.Array]:
    """A function from a `Deferred` parameter's sums by device (`whole_sum`) to its gradient: it
    adds them over all devices that have rows, and each device gets its shard.

    Args:
      layout: the layout outside `map_rows`.
      rows: the axes of rows.
      dtype: type in which sums are sent to the shards, where the layout has narrow gradients.
    """
    inside = layout.inside(*rows)
    devices = _manual_split_axes(inside)
    shards = _gather_axes(inside, axes)
    split = {axis for names in shards for axis in names}
    replicas = tuple(axis for axis in devices if axis not in split)

    def on_device(total: jax.Array) -> jax.Array:
        gradient = total[0].astype(dtype) if layout.narrow_gradients else total[0]
        shard = _reduce_scatter(inside, axes, gradient).astype(total.dtype)
        return jax.lax.psum(shard, replicas) if replicas else shard

    # Manual along all axes: XLA's partitioner cannot copy between arrays manual along only some
    inside_spec = inside.spec(kept_axes(axes))
    result_spec = [
        names or inside_axes for names, inside_axes in zip(shards, inside_spec, strict=True)
    ]
    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=P(devices, *inside_spec),
        out_specs=P(*result_spec),
        check_vma=False,
    )


def gathered(layout: Layout, weight: Parameter, axes: Axes, dtype: Any) -> jax.Array:
    """A parameter in `dtype`, gathered along all axes but `KEPT_AXES`, as the computation needs it.

    This is the all-gather of FSDP. It sends values in the compute dtype. The gradient is sent in at
    least float32, because it is a sum over many devices, unless the layout has narrow gradients.
    """
    if isinstance(weight, Deferred):
        return _gather_deferred(layout, axes, jnp.dtype(dtype), weight.stand_in.dtype, weight)
    if any(_gather_axes(layout, axes)):
        return _gather_shard(layout, axes, jnp.dtype(dtype), weight.dtype, weight)
    return layout.constrain(weight.astype(dtype), kept_axes(axes))


def looked_up(
    layout: Layout, table: Parameter, axes: Axes, rows: jax.Array, dtype: Any
) -> jax.Array:
    """Rows of a table [V, D] in `dtype`: [R, C, D] for int32 [R, C].

    Where devices hold parts of the width D, each looks up its part of everyone's rows, and they
    exchange the results: neither the table nor its gradient is gathered. A row's gradient is
    summed in the type of the table, because that of a frequent row is a long sum.
    """
    along_rows, names = _gather_axes(layout, axes)
    if along_rows or not names:
        return _look_up_rows(gathered(layout, table, axes, table.dtype), rows).astype(dtype)
    if isinstance(table, Deferred):
        table = _deferred_shard(layout, axes, table.stand_in.dtype, table)
    # [F * R, C]: the rows of all F devices that hold parts of the width, in the devices' order
    all_rows = jax.lax.all_gather(rows, names, axis=0, tiled=True)
    vectors = _look_up_rows(layout.constrain(table, kept_axes(axes)), all_rows).astype(dtype)
    return _return_rows(layout, names, vectors)


@jax.custom_vjp
def _look_up_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """table[rows], with a gradient that is the same in every run: see `sorted_sums`."""
    return table[rows]


def _look_up_rows_forward(
    table: jax.Array, rows: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The backward pass reads only the table's shape and type
    return table[rows], (table, rows)


def _look_up_rows_backward(
    residuals: tuple[jax.Array, jax.Array], found: jax.Array
) -> tuple[jax.Array, None]:
    table, rows = residuals
    nothing = jnp.zeros_like(table)
    added = by_platform(
        nothing, rows, found, cuda=sorted_sums, default=lambda x, rows, y: x.at[rows].add(y)
    )
    return added, None


_look_up_rows.defvjp(_look_up_rows_forward, _look_up_rows_backward)


def sorted_sums(nothing: jax.Array, rows: jax.Array, found: jax.Array) -> jax.Array:
    """The sum of all entries of each row of a table, [V, D], added in a fixed order.

    On GPUs XLA's scatter adds every entry by an atomic operation: the order is arbitrary, and the
    entries of a frequent row wait for each other. So entries are sorted by row, runs of equal rows
    are summed in a scan, and the sum at the end of each run is written, once for each row.

    Args:
      nothing: zeros [V, D].
      rows: int32 [...], the row of each entry; 0 <= row < V.
      found: [..., D], the entries.
    """
    rows = rows.reshape(-1)
    order = jnp.argsort(rows, stable=True)
    rows, found = rows[order], found.reshape(len(order), -1)[order]
    changes = rows[1:] != rows[:-1]
    is_start = jnp.append(True, changes)
    is_end = jnp.append(changes, True)

    # Joins two neighbouring stretches of entries. Each is a pair: whether a run begins in it, and
    # the sum since its last run began. The left sum counts only if no run begins in the right
    # stretch.
    def add(
        left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        begins = left[0] | right[0]
        return begins, jnp.where(right[0], right[1], left[1] + right[1])

    _, sums = jax.lax.associative_scan(add, (is_start[:, None], found))
    # Entries that end no run get distinct rows past the table's end, which "drop" ignores: distinct
    # because `unique_indices` promises it.
    target_rows = jnp.where(is_end, rows, len(nothing) + jnp.arange(len(rows), dtype=rows.dtype))
    return nothing.at[target_rows].set(sums, mode="drop", unique_indices=True)


def kept_axes(axes: Axes) -> Axes:
    """Logical axes of a parameter after it is gathered: those not in `KEPT_AXES` become None."""
    return tuple(name if name in KEPT_AXES else None for name in axes)


def _manual_split_axes(layout: Layout) -> tuple[str, ...]:
    """The manual axes that have more than one device."""
    sizes = layout.mesh.shape
    return tuple(axis for axis in sizes if axis in layout.manual_axes and sizes[axis] > 1)


def _gather_axes(layout: Layout, axes: Axes) -> list[tuple[str, ...]]:
    """For each dimension of a parameter, the manual axes along which it must be gathered."""
    manual = layout.manual_axes
    return [
        ()
        if name in KEPT_AXES
        else tuple(axis for axis in layout.mesh_axes(name) if axis in manual)
        for name in axes
    ]


# The collectives below run inside `Layout.local`: outside, XLA would first gather, over the axes
# that are not manual, the arrays that they send.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather_shard(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, shard: jax.Array
) -> jax.Array:
    def on_device(shard: jax.Array) -> jax.Array:
        for dimension, names in enumerate(_gather_axes(layout, axes)):
            if names:
                shard = jax.lax.all_gather(shard, names, axis=dimension, tiled=True)
        return shard

    # Where axes that are not manual split these dimensions too, XLA gathers along them
    return layout.local(on_device, (kept_axes(axes),), kept_axes(axes))(shard.astype(dtype))


def _gather_shard_forward(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, shard: jax.Array
) -> tuple[jax.Array, None]:
    return _gather_shard(layout, axes, dtype, param_dtype, shard), None


def _gather_shard_backward(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    if not layout.narrow_gradients:
        gradient = gradient.astype(jnp.promote_types(param_dtype, jnp.float32))
    scatter = partial(_reduce_scatter, layout, axes)
    scattered = layout.local(scatter, (kept_axes(axes),), kept_axes(axes))(gradient)
    return (layout.constrain(scattered.astype(param_dtype), axes),)


_gather_shard.defvjp(_gather_shard_forward, _gather_shard_backward)


def _reduce_scatter(layout: Layout, axes: Axes, gradient: jax.Array) -> jax.Array:
    for dimension, names in enumerate(_gather_axes(layout, axes)):
        if names:
            gradient = jax.lax.psum_scatter(
                gradient, names, scatter_dimension=dimension, tiled=True
            )
    return gradient


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather_deferred(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, weight: Deferred
) -> jax.Array:
    return _gather_shard(layout, axes, dtype, weight.dtype, weight.shard)


def _gather_deferred_forward(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, weight: Deferred
) -> tuple[jax.Array, None]:
    return _gather_deferred(layout, axes, dtype, param_dtype, weight), None


def _gather_deferred_backward(
    layout: Layout, axes: Axes, dtype: Any, param_dtype: Any, _: None, gradient: jax.Array
) -> tuple[Deferred]:
    return (whole_gradient(layout.constrain(gradient.astype(param_dtype), kept_axes(axes))),)


_gather_deferred.defvjp(_gather_deferred_forward, _gather_deferred_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _deferred_shard(layout: Layout, axes: Axes, param_dtype: Any, table: Deferred) -> jax.Array:
    """The shard [V, D / F] of a table. The gradient is that of the whole table, zero elsewhere."""
    return table.shard


def _deferred_shard_forward(
    layout: Layout, axes: Axes, param_dtype: Any, table: Deferred
) -> tuple[jax.Array, None]:
    return table.shard, None


def _deferred_shard_backward(
    layout: Layout, axes: Axes, param_dtype: Any, _: None, gradient: jax.Array
) -> tuple[Deferred]:
    names = _gather_axes(layout, axes)[1]
    shards = math.prod(layout.mesh.shape[axis] for axis in names)

    def on_device(d_shard: jax.Array) -> jax.Array:
        width = d_shard.shape[1]
        d_table = jnp.zeros((len(d_shard), shards * width), d_shard.dtype)
        begin = jax.lax.axis_index(names) * width
        return jax.lax.dynamic_update_slice_in_dim(d_table, d_shard, begin, axis=1)

    d_shard = gradient.astype(param_dtype)
    return (whole_gradient(layout.local(on_device, (kept_axes(axes),), kept_axes(axes))(d_shard)),)


_deferred_shard.defvjp(_deferred_shard_forward, _deferred_shard_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _return_rows(layout: Layout, names: tuple[str, ...], part_rows: jax.Array) -> jax.Array:
    """Parts of everyone's rows [F * R, C, D / F] -> the device's own rows, whole, [R, C, D]."""
    return _all_to_all(layout, names, part_rows, 0, 2)


def _return_rows_forward(
    layout: Layout, names: tuple[str, ...], part_rows: jax.Array
) -> tuple[jax.Array, None]:
    return _return_rows(layout, names, part_rows), None


def _return_rows_backward(
    layout: Layout, names: tuple[str, ...], _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (_all_to_all(layout, names, gradient, 2, 0),)


_return_rows.defvjp(_return_rows_forward, _return_rows_backward)


def _all_to_all(
    layout: Layout, names: tuple[str, ...], x: jax.Array, split: int, joined: int
) -> jax.Array:
    unsplit = (None,) * x.ndim
    exchange = partial(
        jax.lax.all_to_all, axis_name=names, split_axis=split, concat_axis=joined, tiled=True
    )
    return layout.local(exchange, (unsplit,), unsplit)(x)


def _axes_tuple(axes: Any) -> tuple[str, ...]:
    """The axes of one dimension of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
