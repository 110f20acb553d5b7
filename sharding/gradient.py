"""Backward passes as programs of their own, from the residuals of a forward pass, or in two halves.

KeptForward, of whole towers and decoders
  forward            row -> y, residuals          residuals: what depends on both row and parameters
  backward           row, residuals, dy -> dw     the rest is computed again
  remembered         row, residuals, y -> the function, without its forward pass
LayerGradient, of one layer, in a pipeline or in a loop (layer_loop.py)
  forward            x -> y, residuals            residuals: what depends on x, nothing else; of a
                                                  layer under `jax.checkpoint`, what its policy keeps
  backward           residuals, dy -> dw, dx      the rest is computed again from the parameters
  input_gradient     residuals, dy -> dx, pending    by the equations of the backward that dx needs
  weight_gradient    pending -> dw                   by its other equations
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

Tree = Any
_CALL_PRIMITIVES = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "remat")


class Params(NamedTuple):
    """Trained and frozen parameters, as any two pytrees, which may be empty."""

    trained: Tree
    frozen: Tree


class KeptForward:
    """The forward and the backward pass of function(params, row) -> y, for two programs. Construct
    it in each of them while tracing: shapes alone decide which values are residuals."""

    def __init__(self, function: Callable[[Params, Tree], Tree], params: Params, row: Tree):
        def linearized(params: Params, row: Tree) -> tuple[Tree, Any]:
            def of_trained(trained: Tree) -> Tree:
                return function(Params(trained, params.frozen), row)

            return jax.vjp(of_trained, params.trained)

        self._passes = _Linearized(linearized, params, row)
        self.y = self._passes.y
        of_params, of_row = map(self._passes.depends_on, range(2))
        # `backward` receives params and row, and recomputes what depends on at most one of them.
        self._kept = [*map(all, zip(of_params, of_row, strict=True))]

    def forward(self, params: Params, row: Tree) -> tuple[Tree, tuple[jax.Array, ...]]:
        """y and the residuals."""
        return self._passes.forward(self._kept, params, row)

    def backward(self, params: Params, row: Tree, residuals: Sequence[jax.Array], dy: Tree) -> Tree:
        """Gradients of the trained parameters."""
        (gradients,) = self._passes.backward(self._kept, residuals, dy, params, row)
        return gradients

    def remembered(
        self, params: Params, row: Tree, residuals: Sequence[jax.Array], y: Tree
    ) -> Callable[[Tree], Tree]:
        """The function of the trained parameters alone, to be differentiated where they are as in
        the forward pass: it returns y, and its backward pass starts from the residuals."""

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

    An equation that serves both gradients and cannot be taken apart, such as a shard_map around
    whole matrix products, counts toward the input gradient.
    """

    def __init__(
        self,
        layer: Callable[[Params, Tree, Tree], Tree],
        params: Params,
        x: Tree,
        row: Tree,
    ):
        self._params, self._x, self._row = jax.tree.map(_shape, (params, x, row))

        def linearized(params: Params, x: Tree, row: Tree) -> tuple[Tree, Any]:
            def of_trained_and_x(trained: Tree, x: Tree) -> Tree:
                return layer(Params(trained, params.frozen), x, row)

            return jax.vjp(of_trained_and_x, params.trained, x)

        self._passes = _Linearized(linearized, params, x, row)
        self._depends_on_x = self._passes.depends_on(1)
        self.residuals = _select(self._passes.leaves, self._depends_on_x)
        # For each residual: the leaf of x that it is, or None
        self.of_x = _select(self._passes.numbers_in(1), self._depends_on_x)

    def forward(self, params: Params, x: Tree, row: Tree) -> tuple[Tree, tuple[jax.Array, ...]]:
        """y and the residuals that depend on x."""
        return self._passes.forward(self._depends_on_x, params, x, row)

    @property
    def keeps_input_alone(self) -> bool:
        """Whether all residuals are leaves of x, so that no forward pass is needed to have them."""
        return None not in self.of_x

    def residuals_of_input(self, x: Tree) -> tuple[jax.Array, ...]:
        """The residuals, where all of them are leaves of x."""
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
        """Gradients of the trained parameters and of x. Leaves of dy for integers are not read."""
        # Shapes of x are enough: nothing that is computed again depends on x
        result: tuple[Tree, Tree] = self._passes.backward(
            self._depends_on_x, residuals, dy, params, self._x, row
        )
        return result

    def split(self) -> SplitGradient:
        """The backward pass as two operations."""
        # A layer's y is the next one's x, so dy is like x.
        return SplitGradient(self, self._params, self._row, self._x)


class SplitGradient:
    """The equations of a layer's backward pass in two halves: those that dx needs, and the rest."""

    def __init__(self, gradient: LayerGradient, params: Params, row: Tree, dy: Tree):
        closed = _trace_inlined(gradient.backward, params, row, gradient.residuals, dy)
        jaxpr = closed.jaxpr
        # Inputs are parameters and row, then residuals and dy; outputs are gradients of the trained
        # parameters, then of x.
        known = len(jax.tree.leaves((params, row)))  # number of inputs that both halves receive
        trained = len(jax.tree.leaves(params.trained))
        weights = jaxpr.outvars[:trained]
        inputs = jaxpr.outvars[trained:]
        self._trained = jax.tree.structure(params.trained)
        self._x = jax.tree.structure(dy)
        input_eqns = _needed_equations(jaxpr.eqns, inputs)
        # The variables known once the input half is done, from which the weight half may start
        early = {*jaxpr.invars[known:], *(var for eqn in input_eqns for var in eqn.outvars)}
        # Variables that depend on parameters and row alone are computed twice rather than stored.
        early &= _dependent_variables(jaxpr, jaxpr.invars[known:])
        weight_eqns = _needed_equations(jaxpr.eqns, weights, stop=early)
        # The input half may have made a weight's gradient itself, which is then stored as it is.
        reads = _variables(var for eqn in weight_eqns for var in eqn.invars) | _variables(weights)
        ordered = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
        pending = [var for var in ordered if var in reads & early]
        self.pending = tuple(
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in pending
        )
        self._input_half = _as_function(closed, input_eqns, jaxpr.invars, [*inputs, *pending])
        self._weight_half = _as_function(
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
        """dx, and the arrays that `weight_gradient` needs (`pending`)."""
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
    """For each leaf of `tree`: whether the results of function(tree, *others) depend on it."""
    jaxpr = _trace_inlined(function, tree, *others).jaxpr
    eqns = _needed_equations(jaxpr.eqns, jaxpr.outvars)
    reads = _variables(var for eqn in eqns for var in eqn.invars) | _variables(jaxpr.outvars)
    return [var in reads for var in jaxpr.invars[: len(jax.tree.leaves(tree))]]


# ---------------------------------------------------------------------------- residuals


class _Linearized:
    """A function that returns y and a backward pass, as `jax.vjp` does, traced once.

    Some leaves of the backward pass are kept, as residuals, and the others are computed again;
    arguments that these do not need may then be shapes. It makes no difference whether two
    arguments are the same array.
    """

    def __init__(self, function: Callable[..., tuple[Tree, Any]], *args: Tree):
        # `vjp` is a pytree too, and its leaves are the arrays that it keeps. So the outputs of the
        # traced function are the leaves of y, followed by those of `vjp`.
        closed, (self.y, vjp) = jax.make_jaxpr(function, return_shape=True)(
            *jax.tree.map(_shape, args)
        )
        leaves, self._vjp_tree = jax.tree.flatten(vjp)
        self.leaves = tuple(map(_shape, leaves))
        self._leaf_counts = [len(jax.tree.leaves(tree)) for tree in args]
        # Calls are inlined: one that reads an argument may also compute values independent of it
        self._closed = _inline_calls(closed)

    def _input_vars(self, argument: int) -> list[Any]:
        begin = sum(self._leaf_counts[:argument])
        return self._closed.jaxpr.invars[begin : begin + self._leaf_counts[argument]]

    @property
    def _leaf_vars(self) -> list[Any]:
        outputs = self._closed.jaxpr.outvars
        return outputs[len(outputs) - len(self.leaves) :]

    def depends_on(self, argument: int) -> list[bool]:
        """For each leaf of the backward pass: whether it depends on the argument of this number."""
        reached = _dependent_variables(self._closed.jaxpr, self._input_vars(argument))
        return [isinstance(var, core.Var) and var in reached for var in self._leaf_vars]

    def numbers_in(self, argument: int) -> list[int | None]:
        """For each leaf of the backward pass: the leaf of the argument that it is, or None."""
        inputs = self._input_vars(argument)
        return [inputs.index(var) if var in inputs else None for var in self._leaf_vars]

    def forward(self, kept: Sequence[bool], *args: Tree) -> tuple[Tree, tuple[jax.Array, ...]]:
        """y and the residuals."""
        y_count = len(jax.tree.leaves(self.y))
        outputs = self._compute([True] * y_count + list(kept), args)
        y = jax.tree.unflatten(jax.tree.structure(self.y), outputs[:y_count])
        return y, tuple(outputs[y_count:])

    def backward(
        self, kept: Sequence[bool], residuals: Sequence[jax.Array], dy: Tree, *args: Tree
    ) -> Any:
        """The result of the backward pass for dy: from the residuals, and leaves computed again."""
        y_count = len(jax.tree.leaves(self.y))
        again = iter(self._compute([False] * y_count + [not is_kept for is_kept in kept], args))
        kept_residuals = iter(residuals)
        leaves = [next(kept_residuals) if is_kept else next(again) for is_kept in kept]
        gradients = jax.tree.map(lambda d, y: d if _is_real(y) else _zero_gradient(y), dy, self.y)
        return jax.tree.unflatten(self._vjp_tree, leaves)(gradients)

    def _compute(self, wanted: Sequence[bool], args: tuple[Tree, ...]) -> list[jax.Array]:
        """The wanted outputs of the traced function, run without the equations they do not need."""
        jaxpr = self._closed.jaxpr
        outputs = _select(jaxpr.outvars, wanted)
        eqns = _needed_equations(jaxpr.eqns, outputs)
        read = _variables(var for eqn in eqns for var in eqn.invars) | _variables(outputs)
        leaves = zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
        inputs = {var: leaf for var, leaf in leaves if var in read}
        return _as_function(self._closed, eqns, list(inputs), outputs)(*inputs.values())


def _select(leaves: Sequence[Any], choice: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(leaf for leaf, chosen in zip(leaves, choice, strict=True) if chosen)


def _is_real(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _zero_gradient(leaf: Any) -> Any:
    """Zeros of the type that JAX accepts as the gradient of integers."""
    return np.zeros(leaf.shape, jax.dtypes.float0)


# ---------------------------------------------------------------------------- equations


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if isinstance(atom, core.Var)}


def _dependent_variables(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """The variables that depend on `sources`, with the sources themselves."""
    reached = set(sources)
    for eqn in jaxpr.eqns:
        if _variables(eqn.invars) & reached:
            reached.update(eqn.outvars)
    return reached


def _needed_equations(
    eqns: Sequence[Any], targets: Iterable[Any], stop: Set[Any] = frozenset()
) -> list[Any]:
    """The equations that `targets` need, in order; the variables in `stop` count as known."""
    needed = _variables(targets) - stop
    backwards = []
    for eqn in reversed(eqns):
        if needed & set(eqn.outvars):
            backwards.append(eqn)
            needed |= _variables(eqn.invars) - stop
    return backwards[::-1]


def _as_function(
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


def _trace_inlined(function: Callable[..., Any], *args: Tree) -> Any:
    """The closed jaxpr of a function of pytrees, with calls replaced by what they call."""
    return _inline_calls(jax.make_jaxpr(function)(*args))


def _inline_calls(closed: Any) -> Any:
    """A closed jaxpr with calls replaced by what they call."""

    def run(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALL_PRIMITIVES else None
            arguments = [_value(atom, values) for atom in eqn.invars]
            if inner is None:
                inputs = list(
                    dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, core.Var)),
                )
                outputs = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
                # Running the equation by itself adds it to the jaxpr that is being traced here.
                # Constants that it reads are inputs like all others.
                alone = core.ClosedJaxpr(jaxpr.replace(constvars=[]), [])
                results = _as_function(alone, [eqn], inputs, outputs)(
                    *(values[var] for var in inputs)
                )
                values.update(zip(outputs, results, strict=True))
            elif isinstance(inner, core.ClosedJaxpr):
                values.update(
                    zip(eqn.outvars, run(inner.jaxpr, inner.consts, arguments), strict=True),
                )
            else:
                values.update(zip(eqn.outvars, run(inner, (), arguments), strict=True))
        return [_value(atom, values) for atom in jaxpr.outvars]

    flat = jax.make_jaxpr(lambda *arrays: run(closed.jaxpr, closed.consts, arrays))
    return flat(*closed.in_avals)


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]
