"""Backward passes that are programs of their own: from the residuals of a forward pass, and in two halves.

KeptForward, of whole towers and decoders
  forward            row -> y, residuals          residuals: what depends on both row and parameters
  backward           row, residuals, dy -> dw     the rest is computed again
  remembered         row, residuals, y -> the function, without its forward pass
LayerGradient, of one layer, in a pipeline or in a loop (layer_loop.py)
  forward            x -> y, residuals            residuals: what depends on x, nothing else; of a
                                                  layer under `jax.checkpoint`, what its policy keeps
  backward           residuals, dy -> dw, dx      the rest is computed again from the parameters
  input_gradient     residuals, dy -> dx, pending equations of the backward that dx needs
  weight_gradient    pending -> dw                the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Tree = Any
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "remat")


class Params(NamedTuple):
    """Parameters that are trained, and those that are frozen: any pytrees, also empty ones."""

    trained: Tree
    frozen: Tree


class KeptForward:
    """The two passes of function(params, row) -> y as two programs. Construct it in each of them,
    while tracing: shapes alone decide what the residuals are."""

    def __init__(self, function: Callable[[Params, Tree], Tree], params: Params, row: Tree):
        self._function = function
        jaxpr = _inline(self._linearize, params, row).jaxpr
        param_count = len(jax.tree.leaves(params))
        of_both = _reached(jaxpr, jaxpr.invars[:param_count])
        of_both &= _reached(jaxpr, jaxpr.invars[param_count:])
        self.y = jax.eval_shape(function, params, row)
        leaves = jaxpr.outvars[len(jax.tree.leaves(self.y)) :]
        self._kept = [isinstance(var, core.Var) and var in of_both for var in leaves]

    def _linearize(self, params: Params, row: Tree) -> tuple[Tree, list[jax.Array]]:
        y, vjp = self._vjp(params, row)
        return y, jax.tree.leaves(vjp)

    def _vjp(self, params: Params, row: Tree) -> tuple[Tree, Callable[..., Any]]:
        y, vjp = jax.vjp(
            lambda trained: self._function(Params(trained, params.frozen), row), params.trained
        )
        return y, vjp

    def forward(self, params: Params, row: Tree) -> tuple[Tree, tuple[jax.Array, ...]]:
        """y and the residuals."""
        y, leaves = self._linearize(params, row)
        return y, _chosen(leaves, self._kept)

    def backward(self, params: Params, row: Tree, residuals: Sequence[jax.Array], dy: Tree) -> Tree:
        """Gradients of the trained parameters."""
        # XLA drops the equations that nothing but y and the residuals need
        _, vjp = self._vjp(params, row)
        (gradients,) = _with_chosen(vjp, self._kept, residuals)(dy)
        return gradients

    def remembered(
        self, params: Params, row: Tree, residuals: Sequence[jax.Array], y: Tree
    ) -> Callable[[Tree], Tree]:
        """The function of the trained parameters, to be differentiated where these are what they were: its value is y,
        and its backward pass starts from the residuals."""

        @jax.custom_vjp
        def function(trained: Tree) -> Tree:
            return y

        def backward(_: None, dy: Tree) -> tuple[Tree]:
            return (self.backward(params, row, residuals, dy),)

        function.defvjp(lambda trained: (y, None), backward)
        return function


class LayerGradient:
    """The backward pass of layer(params, x, row) -> y. Construct it while tracing, from shapes or
    arrays.

    What cannot be taken apart, such as a shard_map around whole matrix products, counts to the
    input gradient.
    """

    def __init__(
        self,
        layer: Callable[[Params, Tree, Tree], Tree],
        params: Params,
        x: Tree,
        row: Tree,
    ):
        self._layer = layer
        self._params, self._x, self._row = jax.tree.map(_shape, (params, x, row))
        self._y = jax.eval_shape(layer, params, x, row)
        y_count = len(jax.tree.leaves(self._y))
        jaxpr = _inline(self._linearize, params, x, row).jaxpr
        param_count = len(jax.tree.leaves(params))
        x_vars = jaxpr.invars[param_count : param_count + len(jax.tree.leaves(x))]
        depends_on_x = _reached(jaxpr, x_vars)
        leaves = jaxpr.outvars[y_count:]
        self._depends = [isinstance(var, core.Var) and var in depends_on_x for var in leaves]
        kept = _chosen(leaves, self._depends)
        self.residuals = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in kept)
        # Which leaf of x a residual is, if it is one
        self.of_x = [x_vars.index(var) if var in x_vars else None for var in kept]
        self._forward = _traced(self._linearize, [True] * y_count + self._depends, params, x, row)

    def _linearize(self, params: Params, x: Tree, row: Tree) -> tuple[Tree, list[jax.Array]]:
        y, vjp = self._vjp(params, x, row)
        return y, jax.tree.leaves(vjp)

    def _vjp(self, params: Params, x: Tree, row: Tree) -> tuple[Tree, Callable[..., Any]]:
        return jax.vjp(
            lambda trained, x: self._layer(Params(trained, params.frozen), x, row),
            params.trained,
            x,
        )

    def forward(self, params: Params, x: Tree, row: Tree) -> tuple[Tree, tuple[jax.Array, ...]]:
        """y and the residuals that depend on x."""
        outputs = self._forward(*jax.tree.leaves((params, x, row)))
        y_count = len(outputs) - len(self.residuals)
        y = jax.tree.unflatten(jax.tree.structure(self._y), outputs[:y_count])
        return y, tuple(outputs[y_count:])

    @property
    def keeps_input_alone(self) -> bool:
        """Whether the residuals are parts of x, so that they are there without a forward pass."""
        return None not in self.of_x

    def residuals_of_input(self, x: Tree) -> tuple[jax.Array, ...]:
        """The residuals, where they are parts of x."""
        assert self.keeps_input_alone, "residuals that only a forward pass yields"
        leaves = jax.tree.leaves(x)
        return tuple(leaves[index] for index in self.of_x if index is not None)

    def backward(
        self,
        params: Params,
        row: Tree,
        residuals: Sequence[jax.Array],
        dy: Tree,
    ) -> tuple[Tree, Tree]:
        """Gradients of the trained parameters and of x. Integers of y have none in dy that would be read."""
        outputs = self._backward(*jax.tree.leaves((params, row, tuple(residuals))), *self._real(dy))
        gradients = jax.tree.structure((self._params.trained, self._x))
        result: tuple[Tree, Tree] = jax.tree.unflatten(gradients, outputs)
        return result

    @cached_property
    def _backward(self) -> Callable[..., list[jax.Array]]:
        """`backward` of leaves."""
        real = self._real(self._y)
        return _traced(self._pulled_back, None, self._params, self._row, self.residuals, real)

    def _pulled_back(
        self,
        params: Params,
        row: Tree,
        residuals: Sequence[jax.Array],
        real: Sequence[jax.Array],
    ) -> tuple[Tree, Tree]:
        # Only what does not depend on x is read of this
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._x)
        _, vjp = self._vjp(params, zeros, row)
        given = iter(real)
        dy = jax.tree.map(lambda y: next(given) if _is_real(y) else _no_gradient(y), self._y)
        return _with_chosen(vjp, self._depends, residuals)(dy)

    def _real(self, dy: Tree) -> list[Any]:
        """Leaves of dy where y is no integer."""
        leaves = zip(jax.tree.leaves(dy), jax.tree.leaves(self._y), strict=True)
        return [leaf for leaf, y in leaves if _is_real(y)]

    def split(self) -> SplitGradient:
        """The backward pass as two operations."""
        return SplitGradient(self, self._params, self._row, self._x)


class SplitGradient:
    """The equations of a layer's backward pass, split into those that dx needs and those that it
    does not."""

    def __init__(self, gradient: LayerGradient, params: Params, row: Tree, dy: Tree):
        closed = _inline(gradient.backward, params, row, gradient.residuals, dy)
        jaxpr = closed.jaxpr
        known = len(jax.tree.leaves((params, row)))  # inputs that both halves are given
        trained = len(jax.tree.leaves(params.trained))
        weights = jaxpr.outvars[:trained]
        inputs = jaxpr.outvars[trained:]
        self._trained = jax.tree.structure(params.trained)
        self._x = jax.tree.structure(dy)
        input_eqns = _needed(jaxpr.eqns, inputs)
        early = {*jaxpr.invars[known:], *(var for eqn in input_eqns for var in eqn.outvars)}
        # What depends on parameters and row alone is computed twice rather than stored.
        early &= _reached(jaxpr, jaxpr.invars[known:])
        weight_eqns = _needed(jaxpr.eqns, weights, stop=early)
        reads = _variables(var for eqn in weight_eqns for var in eqn.invars) | _variables(weights)
        ordered = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
        pending = [var for var in ordered if var in reads & early]
        self.pending = tuple(
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in pending
        )
        self._input_half = _function(closed, input_eqns, jaxpr.invars, [*inputs, *pending])
        self._weight_half = _function(
            closed,
            weight_eqns,
            [*jaxpr.invars[:known], *pending],
            weights,
        )

    def input_gradient(
        self,
        params: Params,
        row: Tree,
        residuals: Sequence[jax.Array],
        dy: Tree,
    ) -> tuple[Tree, tuple[jax.Array, ...]]:
        """dx, and what the weight gradient needs."""
        outputs = self._input_half(*jax.tree.leaves((params, row, tuple(residuals), dy)))
        dx_count = len(outputs) - len(self.pending)
        return jax.tree.unflatten(self._x, outputs[:dx_count]), tuple(outputs[dx_count:])

    def weight_gradient(self, params: Params, row: Tree, pending: Sequence[jax.Array]) -> Tree:
        """Gradients of the trained parameters."""
        return jax.tree.unflatten(
            self._trained,
            self._weight_half(*jax.tree.leaves((params, row)), *pending),
        )


def used_leaves(function: Callable[..., Any], tree: Tree, *others: Tree) -> list[bool]:
    """Which leaves of `tree` the results of function(tree, *others) depend on at all."""
    jaxpr = _inline(function, tree, *others).jaxpr
    eqns = _needed(jaxpr.eqns, jaxpr.outvars)
    reads = _variables(var for eqn in eqns for var in eqn.invars) | _variables(jaxpr.outvars)
    return [var in reads for var in jaxpr.invars[: len(jax.tree.leaves(tree))]]


# ---------------------------------------------------------------------------- residuals


def _chosen(leaves: Sequence[Any], choice: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(leaf for leaf, chosen in zip(leaves, choice, strict=True) if chosen)


def _with_chosen(
    vjp: Callable[..., Any], choice: Sequence[bool], residuals: Sequence[jax.Array]
) -> Callable[..., Any]:
    """A backward pass that reads these residuals in place of its own."""
    leaves, tree = jax.tree.flatten(vjp)
    given = iter(residuals)
    leaves = [next(given) if chosen else leaf for leaf, chosen in zip(leaves, choice, strict=True)]
    function: Callable[..., Any] = jax.tree.unflatten(tree, leaves)
    return function


# ---------------------------------------------------------------------------- equations


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if isinstance(atom, core.Var)}


def _reached(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """Variables that depend on some others, with these."""
    reached = set(sources)
    for eqn in jaxpr.eqns:
        if _variables(eqn.invars) & reached:
            reached.update(eqn.outvars)
    return reached


def _needed(eqns: Sequence[Any], targets: Iterable[Any], stop: Set[Any] = frozenset()) -> list[Any]:
    """Equations that lead to some variables, in order, without those that lead to `stop`."""
    needed = _variables(targets) - stop
    backwards = []
    for eqn in reversed(eqns):
        if needed & set(eqn.outvars):
            backwards.append(eqn)
            needed |= _variables(eqn.invars) - stop
    return backwards[::-1]


def _function(
    closed: Any,
    eqns: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
) -> Callable[..., Any]:
    """Some equations of a jaxpr as a function of arrays."""
    jaxpr = closed.jaxpr
    names = core.DebugInfo("pipeline", "gradient", ("",) * len(inputs), ("",) * len(outputs))
    selected = core.Jaxpr(
        jaxpr.constvars,
        list(inputs),
        list(outputs),
        list(eqns),
        jaxpr.effects,
        names,
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(selected, closed.consts))


def _inline(function: Callable[..., Any], *args: Tree) -> Any:
    """The closed jaxpr of a function of pytrees, with calls replaced by what they call."""

    def run(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
            arguments = [_value(atom, values) for atom in eqn.invars]
            if inner is None:
                inputs = list(
                    dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, core.Var)),
                )
                outputs = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
                alone = core.ClosedJaxpr(jaxpr.replace(constvars=[]), [])
                results = _function(alone, [eqn], inputs, outputs)(*(values[var] for var in inputs))
                values.update(zip(outputs, results, strict=True))
            elif isinstance(inner, core.ClosedJaxpr):
                values.update(
                    zip(eqn.outvars, run(inner.jaxpr, inner.consts, arguments), strict=True),
                )
            else:
                values.update(zip(eqn.outvars, run(inner, (), arguments), strict=True))
        return [_value(atom, values) for atom in jaxpr.outvars]

    closed = jax.make_jaxpr(function)(*args)
    flat = jax.make_jaxpr(lambda *arrays: run(closed.jaxpr, closed.consts, arrays))
    return flat(*(_shape(leaf) for leaf in jax.tree.leaves(args)))


def _traced(
    function: Callable[..., Any], wanted: Sequence[bool] | None, *args: Tree
) -> Callable[..., list[jax.Array]]:
    """A function of pytrees as one of their leaves, traced once: some leaves of its results, and no equation but those
    that these need. Which leaves of `args` are one array makes no difference to it."""
    closed = jax.make_jaxpr(function)(*jax.tree.map(_shape, args))
    jaxpr = closed.jaxpr
    outputs = jaxpr.outvars if wanted is None else _chosen(jaxpr.outvars, wanted)
    return _function(closed, _needed(jaxpr.eqns, outputs), jaxpr.invars, outputs)


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _no_gradient(leaf: Any) -> Any:
    """What JAX takes for the gradient of integers."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]
