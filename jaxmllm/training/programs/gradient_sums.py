"""The gradients of a step: sums over its microbatches, and the program that adds up the sums of all
replicas.

    zero gradients --language_loss_and_grad, encode_grad x M--> sums --add_replicas--> gradients in shards

Every replica of a shard has its own sum, in at least float32. With `components.*.reduce: step`,
every device has its own whole sum instead, of each parameter that is gathered where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxmllm.models.mllm import MLLM
from jaxmllm.models.model_component import ParameterAxes
from jaxmllm.trainable import Params
from jaxmllm.training.programs.base import Job, Jobs, ProgramName, zeros_job
from sharding.parameters import reduced, row_axes


class GradientSums:
    """The sums of a step's gradients: their shapes (`abstract`), zeros, and their reduction to
    gradients of the shapes of `trained`."""

    def __init__(self, model: MLLM, trained: Params, dtype: Any):
        self._model = model
        self._trained = trained
        self.abstract = model.gradient_sums(trained, dtype)
        self._reductions = {
            name: self._component_reductions(model, phase, name)
            for phase, record in model.phases.items()
            for name in record.components
            if name in trained
        }

    @property
    def whole_bytes(self) -> dict[str, int]:
        """Bytes of all sums of a component on a device, by component with whole sums."""
        components = self._model.components
        whole_bytes = {}
        for name, sums in self.abstract.items():
            if components[name].settings.reduce == "step":
                whole_bytes[name] = sum(map(_device_bytes, jax.tree.leaves(sums)))
        return whole_bytes

    def jobs(self) -> Jobs:
        """Zeroed sums, and the only program of a step in which replicas communicate."""
        jobs: Jobs = {ProgramName("zero", "gradients"): zeros_job(self.abstract)}
        if unfinished := self._unfinished_leaves(self.abstract):
            totals = self._unfinished_leaves(self._trained)
            reductions = self._unfinished_leaves(self._reductions)

            def add_replicas(sums: list[jax.Array]) -> list[jax.Array]:
                return [reduce(leaf) for reduce, leaf in zip(reductions, sums, strict=True)]

            jobs[ProgramName("add_replicas")] = Job(add_replicas, (unfinished,), totals)
        return jobs

    def finish(self, call: Callable[[str], Callable[..., Any]], sums: Params) -> Params:
        """The complete gradients, from the sums of all devices."""
        unfinished = self._unfinished_leaves(sums)
        if not unfinished:
            return sums
        # In the order of the leaves, in which the map below consumes them.
        totals = iter(call("add_replicas")(unfinished))

        def finished(one: Any, abstract: Any, total: Any) -> Any:
            return one if _is_gradient(abstract, total) else next(totals)

        return jax.tree.map(finished, sums, self.abstract, self._trained)

    def _unfinished_leaves(self, tree: Any) -> list[Any]:
        """The leaves of a tree like the sums, at those sums that are not gradients yet."""
        trees = map(jax.tree.leaves, (tree, self.abstract, self._trained))
        return [
            leaf for leaf, sums, total in zip(*trees, strict=True) if not _is_gradient(sums, total)
        ]

    def _component_reductions(self, model: MLLM, phase: str, name: str) -> Any:
        """For each trained parameter of a component, the function from its sums to its gradient."""
        component = model.by_device(phase).components[name]

        def leaf(total: Any, axes: ParameterAxes) -> Callable[[jax.Array], jax.Array]:
            if not component.defers(axes):
                return partial(_sum_replicas, total)
            layout = model.components[name].layout
            rows = row_axes(model.layout(phase))
            shards = reduced(layout, rows, axes.names, component.dtype)
            return lambda sums: shards(sums).astype(total.dtype)

        trained = self._trained[name]
        return jax.tree.map(leaf, trained, component.axes_of(trained))


def _device_bytes(leaf: Any) -> int:
    """Bytes of a device's part of an abstract array."""
    size = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return size * int(leaf.dtype.itemsize)


def _is_gradient(sums: Any, total: Any) -> bool:
    """Whether sums already are the gradient: one replica, and the type of the parameter."""
    return (sums.shape, sums.dtype) == (total.shape, total.dtype)


def _sum_replicas(total: Any, sums: jax.Array) -> jax.Array:
    """The gradient, from sums by replica [replicas, ...] or the sum of the only replica [...]."""
    return (sums.sum(0) if sums.ndim > total.ndim else sums).astype(total.dtype)
