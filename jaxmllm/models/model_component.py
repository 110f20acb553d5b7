"""One named part of the model: its module, parameters, axes and layout.

A component is the unit of freezing, learning rate, dtype, remat, layout, metrics and checkpoints.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxmllm.config.schema import (
    ADAPTER,
    ComponentConfig,
)
from jaxmllm.models.adapters import with_adapters
from jaxmllm.trainable import Params
from sharding.layer_loop import Summed
from sharding.parameters import deferred, is_split
from sharding.rules import Layout

LAYERS = "layers"  # name of the stacked layers among a tower's parameters


@dataclass(frozen=True)
class ParameterAxes:
    """Logical axes of one parameter; a leaf for tree functions, which a tuple would not be."""

    names: tuple[str | None, ...]
    looked_up: bool  # whether it is only ever used as a lookup table, which is never gathered

    @property
    def stacked(self) -> bool:
        """Whether it holds the parameters of all layers."""
        return "layers" in self.names


@dataclass(frozen=True)
class Component:
    """One named part of the model: its module, how it is laid out, and how it is trained."""

    name: str
    make: Callable[[nnx.Rngs], nnx.Module]
    graph: nnx.GraphDef[Any]
    axes: Any  # `ParameterAxes`, in a tree like the parameters
    shapes: Any  # jax.ShapeDtypeStruct, in a tree like the parameters
    layout: Layout
    settings: ComponentConfig
    # Scale of its adapter, which is a component of its own; none without an adapter
    adapter_scale: float | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.settings.compute_dtype)

    def module(self, params: Params) -> Any:
        """The module with the parameters of this component; for use inside traced functions.

        Parameters may be left out; then only methods that do not need them can be called.
        """
        # Top-level subtrees that are left out remain shapes, with which nothing may compute.
        return nnx.merge(self.graph, self.shapes | self.adapted(params)[self.name])

    def adapted(self, params: Params) -> Params:
        """Parameters by component, with matrices of this one joined to the factors of its
        adapter, if it has one."""
        factors = params.get(f"{ADAPTER}{self.name}")
        if self.adapter_scale is None or not factors:
            return params
        with_factors = with_adapters(params[self.name], factors, self.adapter_scale)
        return params | {self.name: with_factors}

    def defers(self, axes: ParameterAxes) -> bool:
        """Whether a parameter's gradient stays whole on every device until a step's microbatches
        are done.

        Only in code of one device along the axes of rows: elsewhere XLA places the collectives.
        """
        asked = self.settings.reduce == "step" and not axes.looked_up
        return asked and is_split(self.layout, axes.names)

    def deferred(self, params: Params) -> Params:
        """All or some parameters of this component, `Deferred` where it defers them."""

        def leaf(value: Array, axes: ParameterAxes) -> Any:
            if not self.defers(axes):
                return value
            return deferred(self.layout, value, axes.names, self.whole_dtype(axes, value.dtype))

        return jax.tree.map(leaf, params, self.axes_of(params))

    def summed(self, params: Params, totals: Params) -> Params:
        """Trained parameters of this component, in which those of layers are `Summed`.

        Args:
          totals: sums of gradients of all of them.
        """
        if LAYERS not in params:
            return params
        layers = jax.tree.map(
            lambda total, parameter: Summed(parameter, total), totals[LAYERS], params[LAYERS]
        )
        return params | {LAYERS: layers}

    def whole_dtype(self, axes: ParameterAxes, own: Any) -> jnp.dtype:
        """Type of the whole gradient of one microbatch, for a parameter of type `own`.

        Gradients of layers are added to wide sums one by one, so they keep the compute type.
        Others, such as the head's, may be sums of many products, so they have at least float32.
        """
        dtype = self.dtype if axes.stacked else jnp.promote_types(own, jnp.float32)
        return jnp.dtype(dtype)

    def axes_of(self, params: Params) -> Any:
        """`axes` of some of the parameters."""
        return _part(self.axes, params)


def shardings(component: Component) -> Any:
    """Shardings of a component's parameters."""
    return jax.tree.map(
        lambda leaf, axes: component.layout.sharding(axes.names), component.shapes, component.axes
    )


def make_component(
    name: str, make: Callable[[nnx.Rngs], nnx.Module], layout: Layout, settings: ComponentConfig
) -> Component:
    """The component of the module that `make` makes. Raises `MeshError` as `check_shapes` does."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    shapes = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(
        jax.tree.map(_parameter_axes, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    )
    component = Component(name, make, graph, axes, shapes, layout, settings)
    check_shapes(component)
    return component


def check_shapes(component: Component) -> None:
    """Raise `MeshError` where a parameter cannot be split as its layout says."""
    leaves = jax.tree.leaves_with_path(component.shapes)
    for (path, leaf), names in zip(leaves, jax.tree.leaves(component.axes), strict=True):
        where = f"{component.name}{jax.tree_util.keystr(path)}"
        component.layout.check(where, leaf.shape, names.names)


def _parameter_axes(variable: nnx.Variable[Any]) -> ParameterAxes:
    names: tuple[str | None, ...] = variable.axes
    # Stacking layers (`stacked`) adds an axis to the array, and none to its names.
    stacked = len(variable.get_value().shape) - len(names)
    return ParameterAxes(("layers",) * stacked + names, variable.looked_up)


def _part(tree: Any, params: Params) -> Any:
    """The part of a tree like all parameters that belongs to some of them."""
    return {
        key: _part(tree[key], value) if isinstance(value, dict) else tree[key]
        for key, value in params.items()
    }


def init_component(component: Component, seed: int, dtype: str, places: Any) -> Any:
    """New parameters of a component, in shardings `places`; functions of (seed, its name) alone."""

    def create() -> Any:
        # crc32 is the same in every process, unlike Python's hash of a string.
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(component.name.encode()))
        parameters = nnx.to_pure_dict(nnx.state(component.make(nnx.Rngs(key))))
        return jax.tree.map(lambda leaf: leaf.astype(dtype), parameters)

    # It runs once, and optimizing it takes far longer than running it.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(create, out_shardings=places, compiler_options=options)()
