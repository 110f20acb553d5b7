"""The operations of one stage rank: forward, backward and its two halves, for rows of each class.

A switch over operations is written as a series of conditions whose other branch does nothing,
because XLA copies the values that a switch passes through any branch but the first
(openxla/xla#46314).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.gradient import Params, used_leaves
from sharding.pipeline.executor.buffers import Pools, Row, Shapes, Values, Work, does
from sharding.pipeline.executor.trees import (
    Tree,
    add_at,
    corner,
    read,
    replaced,
    unchanged,
    with_corner,
    write,
)
from sharding.pipeline.graph import Kind, Pool

Branch = Callable[[Work, Values], Work]


class Program:
    """The code of a rank's operations. `rows` are leaves [M, ...] by component and class.

    Letters: c the component of an operation, k the class of its row.
    """

    def __init__(self, shapes: Shapes, rows: tuple[tuple[Tree, ...], ...]):
        self.shapes = shapes
        self.components = shapes.components
        self.ring = shapes.ring
        self.chains = shapes.chains
        self.reader = shapes.reader
        self.layers = shapes.layers
        self.outer = shapes.outer
        self.rows = rows

    def operate(self, pools: Pools, work: Work, row: Row) -> Work:
        """Do the operation that a row names; a rank that waits does nothing."""
        for c in range(len(self.components)):
            # The branches are fixed when the program is traced; the row says which one runs.
            branches = []
            for kind in Kind:
                for k in range(len(self.rows[c])):
                    branch = self._branch(c, k, kind, row)
                    if branch:
                        branches.append((kind, k, branch))
            # Slots are read here, outside of all conditions (see buffers.py).
            values = self._row_values(pools, work, c, row)

            # The defaults bind the variables of this turn of the loop.
            def component(
                work: Work,
                c: int = c,
                branches: Any = branches,
                values: Values = values,
            ) -> Work:
                for kind, k, branch in branches:
                    chosen = does(row, c, kind) & (row["row_class"] == k)
                    work = lax.cond(
                        chosen,
                        lambda work, branch=branch: branch(work, values),
                        unchanged,
                        work,
                    )
                return work

            # Around the conditions of all branches: other components' operations skip them all.
            work = lax.cond(does(row, c, *Kind), component, unchanged, work)
        return work

    def _branch(self, c: int, k: int, kind: Kind, row: Row) -> Branch | None:
        """The code of one kind of operation, or None where no table of the spec can hold it."""
        goes_back = self.shapes.goes_back(c)
        split = self.shapes.has(Pool.PENDING, c)
        match kind:
            case Kind.FORWARD:
                return lambda work, values: self._forward(c, k, work, row, values)
            case Kind.BACKWARD if goes_back:
                return lambda work, values: self._backward(c, k, work, row, values, split=False)
            case Kind.INPUT_GRADIENT if goes_back and split:
                return lambda work, values: self._backward(c, k, work, row, values, split=True)
            case Kind.WEIGHT_GRADIENT if split:
                return lambda work, values: self._weight_gradient(c, k, work, row)
        return None

    def _row_values(self, pools: Pools, work: Work, c: int, row: Row) -> Values:
        """The values of component c that a row names; None in place of those without a pool."""

        def slot(pool: Pool, column: str) -> Tree:
            return read(pools[pool, c], jnp.maximum(row[column], 0)) if (pool, c) in pools else None

        d_tokens = slot(Pool.TOKEN_GRADIENT, "gradient")
        if self.chains[c].optional and d_tokens is not None:  # nothing may have read the tokens
            returned = row["gradient"] >= 0
            d_tokens = jax.tree.map(lambda leaf: jnp.where(returned, leaf, 0), d_tokens)
        return Values(
            x=slot(Pool.INPUT, "input"),
            dy=slot(Pool.GRADIENT, "gradient"),
            d_tokens=d_tokens,
            media=tuple(work.media[e] for e in self.ring.feeding(c)),
        )

    def _class_corners(self, c: int, k: int, values: Values) -> Values:
        """The corners of the values that a row of class k fills."""
        x = self.shapes.x[c][k]
        tokens = () if c == self.reader else self.shapes.tokens[c][k]

        def part(value: Tree, shape: Tree) -> Tree:
            return None if value is None else corner(value, shape)

        return values._replace(
            x=part(values.x, x), dy=part(values.dy, x), d_tokens=part(values.d_tokens, tokens)
        )

    # ------------------------------------------------------------------------ operations

    def _forward(self, c: int, k: int, work: Work, row: Row, values: Values) -> Work:
        data = read(self.rows[c][k], row["row"])
        values = self._class_corners(c, k, values)
        scratch = dict(work.scratch)
        y = self._chunk_input(c, k, row, data, values)
        residual_key = (Pool.RESIDUAL, c)
        if self.shapes.has(*residual_key) and not self.chains[c].head_only:
            # Two loops, of which one makes no turn: a condition would copy the residuals.
            keeps = row["write_residual"] >= 0
            stack, y_box = scratch[residual_key]
            stack, y = self._forward_with_residuals(c, k, row, data, y, stack, keeps)
            y = self._run_layers(c, k, row, data, y, ~keeps)
            scratch[residual_key] = (stack, with_corner(y_box, y))
        else:
            y = self._run_layers(c, k, row, data, y)
        if (Pool.INPUT, c) in scratch:
            scratch[Pool.INPUT, c] = with_corner(scratch[Pool.INPUT, c], y)
        last = self.components[c][k].last

        def finish(given: tuple[Tree, tuple[Array, Tree]]) -> tuple[Tree, tuple[Array, Tree]]:
            box, totals = given
            tokens, losses = self.shapes.parted(c, last(self.outer[c], y, data))
            box = box if tokens is None else with_corner(box, tokens)
            return box, totals if losses is None else _add_counted(row, totals, losses)

        box, (loss, sums) = self._apply_if_last(
            c, row, finish, (scratch.get((Pool.TOKENS, c)), (work.loss, work.sums[c]))
        )
        if box is not None:
            scratch[Pool.TOKENS, c] = box
        return work._replace(scratch=scratch, loss=loss, sums=replaced(work.sums, c, sums))

    def _backward(self, c: int, k: int, work: Work, row: Row, values: Values, split: bool) -> Work:
        data = read(self.rows[c][k], row["row"])
        values = self._class_corners(c, k, values)
        if self.chains[c].head_only:
            y = self._features(c, k, row, data, values)
            return self._back_through_last(c, k, row, data, y, values, (values.dy, work))[1]
        residual_key = (Pool.RESIDUAL, c)
        stack, y_box = work.scratch[residual_key]
        recomputes = row["read_residual"] < 0
        x = self._chunk_input(c, k, row, data, values)
        is_last = True if self.chains[c].depth == 1 else row["last"] > 0
        stack, y = self._forward_with_residuals(
            c,
            k,
            row,
            data,
            x,
            stack,
            recomputes,
            needs_y=is_last,
        )
        if self.shapes.has(*residual_key):
            # Where residuals were read, the loop above made no turn and its y is x; the true y was
            # kept with the residuals.
            kept_y = corner(y_box, self.shapes.x[c][k])
            y = jax.tree.map(lambda new, old: jnp.where(recomputes, new, old), y, kept_y)
        work = work._replace(scratch=work.scratch | {residual_key: (stack, with_corner(y_box, y))})
        # At the last chunk dy is not read, but it has the right shape.
        dy = y if values.dy is None else values.dy

        def through_last(carry: Any) -> Any:
            return self._back_through_last(c, k, row, data, y, values, carry)

        dy, work = self._apply_if_last(c, row, through_last, (dy, work))
        dx, work = self._back_through_layers(c, k, work, row, data, stack, dy, split)
        gradient_key = (Pool.GRADIENT, c)
        if gradient_key in work.scratch:
            box = with_corner(work.scratch[gradient_key], dx)
            work = work._replace(scratch=work.scratch | {gradient_key: box})

        def through_first(work: Work) -> Work:
            return self._back_through_first(c, k, work, data, dx, values)

        if self.chains[c].depth == 1:
            return through_first(work)
        return lax.cond(row["first"] > 0, through_first, unchanged, work)

    def _weight_gradient(self, c: int, k: int, work: Work, row: Row) -> Work:
        data = read(self.rows[c][k], row["row"])
        pending_key = (Pool.PENDING, c)
        stack = work.scratch[pending_key]
        split_gradient = self.shapes.split(c, k)

        def step(index: Array, gradients: Tree) -> Tree:
            layer = self._layer(c, row, index)
            params = read(self.layers[c], layer)
            pending = read(stack, index, split_gradient.pending)
            return add_at(gradients, layer, split_gradient.weight_gradient(params, data, pending))

        layers = lax.fori_loop(0, row["layers"], step, work.layers[c])
        # If this branch only read the stack, XLA would copy it in the branches that write it. So
        # write something here too, after the loop: `mark` depends on its result.
        mark = sum(leaf.ravel()[0] for leaf in jax.tree.leaves(layers))
        stack = jax.tree.map(lambda leaf: _write_mark(leaf, mark), stack)
        return work._replace(
            scratch=work.scratch | {pending_key: stack},
            layers=replaced(work.layers, c, layers),
        )

    # ------------------------------------------------------------------------ forward through a chunk

    def _apply_if_last(self, c: int, row: Row, function: Any, operand: Any) -> Any:
        """function(operand) in the last chunk, the operand elsewhere."""
        if self.chains[c].depth == 1:
            return function(operand)
        return lax.cond(row["last"] > 0, function, unchanged, operand)

    def _chunk_input(self, c: int, k: int, row: Row, data: Tree, values: Values) -> Tree:
        """The input of a chunk's layers: made by `first` in the first chunk, else from a slot."""

        def first(x: Tree) -> Tree:
            return self.components[c][k].first(self.outer[c], data, values.media)

        if self.chains[c].depth == 1:
            return first(None)
        return lax.cond(row["first"] > 0, first, unchanged, values.x)

    def _features(self, c: int, k: int, row: Row, data: Tree, values: Values) -> Tree:
        """The output of a chunk's last layer, for chains of which only the head is trained."""

        def computed(x: Tree) -> Tree:
            return self._run_layers(c, k, row, data, self._chunk_input(c, k, row, data, values))

        if values.x is None:
            return computed(None)
        if c < self.reader:
            return values.x
        # A language backward that counts the loss does the forward's work too (fused).
        return lax.cond(row["count_loss"] > 0, computed, unchanged, values.x)

    def _layer(self, c: int, row: Row, index: Array) -> Array:
        """Number of a layer of the row's chunk among all layers of the rank."""
        return row["chunk"] * self.shapes.per_chunk[c] + index

    def _run_layers(
        self,
        c: int,
        k: int,
        row: Row,
        data: Tree,
        x: Tree,
        wanted: Array | bool = True,
    ) -> Tree:
        """x after the layers of a chunk, or x itself if these are not wanted."""

        def step(index: Array, x: Tree) -> Tree:
            return self.components[c][k].layer(
                read(self.layers[c], self._layer(c, row, index)),
                x,
                data,
            )

        return lax.fori_loop(0, jnp.where(wanted, row["layers"], 0), step, x)

    def _forward_with_residuals(
        self,
        c: int,
        k: int,
        row: Row,
        data: Tree,
        x: Tree,
        stack: Tree,
        wanted: Array | bool,
        needs_y: Array | bool = True,
    ) -> tuple[Tree, Tree]:
        """The residuals of all layers of a chunk, and y, if wanted; otherwise `stack` and x.

        Where residuals are only the inputs of layers and y is not needed, the last layer does not
        run, and the returned y has no meaning.
        """
        gradient = self.shapes.gradients[c][k]

        def through(index: Array, x: Tree) -> Tree:
            params = read(self.layers[c], self._layer(c, row, index))
            return self.components[c][k].layer(params, x, data)

        def step(index: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            stack, x = carry
            if gradient.keeps_input_alone:
                # Only the next layer, or a caller that needs y, reads what this layer yields.
                runs = needs_y | (index + 1 < row["layers"])
                y = lax.cond(runs, partial(through, index), unchanged, x)
                return write(stack, index, gradient.residuals_of_input(x)), y
            params = read(self.layers[c], self._layer(c, row, index))
            y, residuals = gradient.forward(params, x, data)
            return write(stack, index, residuals), y

        # A loop of no turns if nothing is wanted, because a condition would copy the stack.
        return lax.fori_loop(0, jnp.where(wanted, row["layers"], 0), step, (stack, x))

    # ------------------------------------------------------------------------ backward through a chunk

    def _back_through_layers(
        self,
        c: int,
        k: int,
        work: Work,
        row: Row,
        data: Tree,
        stack: Tree,
        dy: Tree,
        split: bool,
    ) -> tuple[Tree, Work]:
        """dx, and `work` with the layers' gradients added to its sums or, if split, pending."""
        gradient = self.shapes.gradients[c][k]
        split_gradient = self.shapes.split(c, k) if split else None

        def step(index: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
            dx, gradients = carry
            index = row["layers"] - 1 - index
            layer = self._layer(c, row, index)
            params = read(self.layers[c], layer)
            residuals = read(stack, index, gradient.residuals)
            if split_gradient:
                dx, pending = split_gradient.input_gradient(params, data, residuals, dx)
                return dx, write(gradients, index, pending)
            dw, dx = gradient.backward(params, data, residuals, dx)
            return dx, add_at(gradients, layer, dw)

        pending_key = (Pool.PENDING, c)
        # `gradients` are, if split, the pending arrays by layer of the chunk, otherwise the sums by
        # layer of the rank.
        start = work.scratch[pending_key] if split else work.layers[c]
        dx, gradients = lax.fori_loop(0, row["layers"], step, (dy, start))
        if split:
            return dx, work._replace(scratch=work.scratch | {pending_key: gradients})
        return dx, work._replace(layers=replaced(work.layers, c, gradients))

    def _back_through_last(
        self,
        c: int,
        k: int,
        row: Row,
        data: Tree,
        y: Tree,
        values: Values,
        carry: tuple[Tree, Work],
    ) -> tuple[Tree, Work]:
        """dy, and `work` with the gradients of the parameters after the layers added, and loss and
        sums where no forward counted them."""
        work = carry[1]

        def last(outer: Params, y: Tree) -> Any:
            return self.components[c][k].last(outer, y, data)

        if not self.ring.has_loss(c):
            vjp, add, _ = self._outer_vjp(c, last, y, has_aux=False)
            dy, weights = vjp(values.d_tokens)
            return dy, work._replace(outer=replaced(work.outer, c, add(work.outer[c], weights)))

        def with_sums(outer: Params, y: Tree) -> Any:
            tokens, (loss, sums) = self.shapes.parted(c, last(outer, y))
            return (tokens, loss), sums

        vjp, add, ((_, loss), sums) = self._outer_vjp(c, with_sums, y, has_aux=True)
        d_loss = jnp.ones_like(loss)
        loss, sums = _add_counted(row, (work.loss, work.sums[c]), (loss, sums))
        work = work._replace(loss=loss, sums=replaced(work.sums, c, sums))
        # Gradients of (tokens, loss); the last chain yields no tokens.
        dy, weights = vjp((values.d_tokens if c < self.reader else None, d_loss))
        return dy, work._replace(outer=replaced(work.outer, c, add(work.outer[c], weights)))

    def _back_through_first(
        self, c: int, k: int, work: Work, data: Tree, dx: Tree, values: Values
    ) -> Work:
        """Add the gradients of the parameters before the layers; the shares of the gradients of
        consumed tokens go into the scratch."""
        media_of = dict(zip(self.ring.feeding(c), values.media, strict=True))
        trained_encoders = [e for e in media_of if self.shapes.has(Pool.TOKEN_GRADIENT, e)]

        def first(outer: Params, trained_media: list[Tree]) -> Tree:
            # `|` keeps the order of its left side, in which `first` expects the encoders.
            media = media_of | dict(zip(trained_encoders, trained_media, strict=True))
            return self.components[c][k].first(outer, data, tuple(media.values()))

        vjp, add, _ = self._outer_vjp(
            c,
            first,
            [media_of[e] for e in trained_encoders],
            has_aux=False,
        )
        shares, weights = vjp(dx)
        scratch = work.scratch | {
            (Pool.TOKEN_GRADIENT, e): share
            for e, share in zip(trained_encoders, shares, strict=True)
        }
        return work._replace(
            scratch=scratch,
            outer=replaced(work.outer, c, add(work.outer[c], weights)),
        )

    def _outer_vjp(
        self,
        c: int,
        function: Callable[[Params, Tree], Any],
        argument: Tree,
        has_aux: bool,
    ) -> tuple[
        Callable[[Tree], tuple[Tree, list[Array]]],
        Callable[[Tree, list[Array]], Tree],
        Any,
    ]:
        """Differentiate function(outer, argument) by its argument and the parameters that it uses.

        Parameters that it does not use would get zeros, and adding zeros to the gradient of a
        vocabulary costs as much as adding anything else. Returns the vjp -> (gradient of the
        argument, gradients of the parameters used), a function that adds the latter to the sums of
        all trained parameters, and the results.
        """
        trained, frozen = self.outer[c]
        leaves, tree = jax.tree.flatten(trained)
        uses = used_leaves(
            lambda trained, argument: function(Params(trained, frozen), argument),
            trained,
            argument,
        )

        # A function of the parameters in use alone; the others are constants.
        def with_chosen(chosen: list[Array], argument: Tree) -> Any:
            remaining = iter(chosen)
            merged = [
                next(remaining) if used else leaf for leaf, used in zip(leaves, uses, strict=True)
            ]
            return function(Params(jax.tree.unflatten(tree, merged), frozen), argument)

        chosen = [leaf for leaf, used in zip(leaves, uses, strict=True) if used]
        if has_aux:
            # Only `value` is differentiated, not `sums`.
            value, vjp, sums = jax.vjp(with_chosen, chosen, argument, has_aux=True)
            results: Any = (value, sums)
        else:
            results, vjp = jax.vjp(with_chosen, chosen, argument)

        def add(totals: Tree, weights: list[Array]) -> Tree:
            remaining = iter(weights)
            added = []
            for total, used in zip(jax.tree.leaves(totals), uses, strict=True):
                if used:
                    weight = next(remaining)
                    # Sums are in float32 or wider, whatever the parameter's type.
                    added.append(total + weight.astype(total.dtype))
                else:
                    added.append(total)
            return jax.tree.unflatten(tree, added)

        def argument_first(cotangent: Tree) -> tuple[Tree, list[Array]]:
            weights, argument_gradient = vjp(cotangent)
            return argument_gradient, weights

        return argument_first, add, results


def _add_counted(
    row: Row,
    totals: tuple[Array, Tree],
    results: tuple[Array, Tree],
) -> tuple[Array, Tree]:
    """Loss and sums, with the results of this operation added if it is the one that counts."""
    return jax.tree.map(
        lambda total, result: total + jnp.where(row["count_loss"] > 0, result, 0),
        totals,
        results,
    )


def _write_mark(leaf: Array, mark: Array) -> Array:
    """The array with `mark` as its first element."""
    return lax.dynamic_update_slice(
        leaf,
        mark.astype(leaf.dtype).reshape((1,) * leaf.ndim),
        (0,) * leaf.ndim,
    )
