"""The device half of a generator's step: pure functions, compiled once for every row class.

language_states   rows, pool -> states in the pool                       (step_functions.py)
(exchange^T       language pool -> generator pool: sharding/exchange.py)
draw_loss_and_grad   rows, pool -> sums, gradients, gradients of the states in their place
(exchange         gradients back to the language ranks)
language_loss_and_grad   which is given the gradients of its states      (step_functions.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmllm.models.mllm import Params
from jaxmllm.models.rows import GeneratorRows, TokenPool
from jaxmllm.trainable import join
from jaxmllm.training.objectives.flow import FlowSums, flow_losses, flow_sums, noisy_patches
from jaxmllm.training.objectives.tokens import failed_examples
from jaxmllm.training.step_functions import StepFunctions, accumulated
from sharding.pools import PoolSlots


@dataclass(frozen=True)
class GeneratorFunctions:
    """The functions of one generator phase, of the whole mesh or of one device (`StepFunctions.by_device`)."""

    step: StepFunctions
    phase: str

    def draw_loss_and_grad(
        self,
        params: Params,
        rows: GeneratorRows,
        pool: TokenPool,
        pool_offset: Int[Array, ""],
        scale: Float[Array, ""],
        grads: Params,
        sums: FlowSums,
    ) -> tuple[TokenPool, Params, FlowSums]:
        """Add one microbatch's gradients and sums, and put the gradients of the states that it reads, from slot
        `pool_offset` of the pool on, in their place."""
        layout = self.step.model.layout(self.phase)
        slots = _condition_slots(rows, pool_offset)
        states, valid = slots.take(layout, pool)
        trained, frozen = self.step.split(params, self.phase)

        def objective(trained: Params, states: Array) -> tuple[Array, FlowSums]:
            total, sums = self._loss(join(trained, frozen), rows, states, valid)
            return total * scale, sums

        if self.step.trains_states:
            (d_params, d_states), row_sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(
                trained, states
            )
            pool = pool._replace(tokens=slots.put(layout, d_states, pool.tokens))
        else:
            d_params, row_sums = jax.grad(objective, has_aux=True)(trained, states)
        sums = self.step.added(self.phase, sums, row_sums)
        return pool, accumulated(grads, d_params), sums

    def evaluate(
        self,
        params: Params,
        rows: GeneratorRows,
        pool: TokenPool,
        pool_offset: Int[Array, ""],
        sums: FlowSums,
    ) -> FlowSums:
        """Add one microbatch's sums, without gradients."""
        slots = _condition_slots(rows, pool_offset)
        states, valid = slots.take(self.step.model.layout(self.phase), pool)
        _, row_sums = self._loss(params, rows, states, valid)
        return self.step.added(self.phase, sums, row_sums)

    def _loss(
        self, params: Params, rows: GeneratorRows, states: Array, valid: Array
    ) -> tuple[Float[Array, ""], FlowSums]:
        """Sum of the losses of the rows' patches, and the sums by source."""
        model = self.step.model
        layout = model.layout(self.phase)
        wide = jnp.promote_types(model.components[self.phase].dtype, jnp.float32)
        patches = noisy_patches(layout, rows, wide)
        predicted = model.draw(params, self.phase, rows, patches.noisy, states)
        missing = (rows.conditions >= 0) & (valid == 0)
        failed = failed_examples(layout, missing, rows.owners, rows.sources.shape[1])
        counted = (rows.patches >= 0) & ~failed
        prediction = self.step.objective.diffusion.prediction
        losses = flow_losses(prediction, predicted, patches, counted)
        sums = flow_sums(
            layout,
            self.step.sources,
            jax.lax.stop_gradient(losses),
            counted,
            rows.owners,
            rows.sources,
        )
        return losses.sum(), sums


def _condition_slots(rows: GeneratorRows, pool_offset: Int[Array, ""]) -> PoolSlots:
    """Where rows read states: conditions are told from the first slot that a microbatch has in the pool."""

    def moved(conditions: Array) -> Array:
        return jnp.where(conditions >= 0, conditions + pool_offset, -1)

    packed = None if rows.arrived is None else moved(rows.arrived)
    return PoolSlots(moved(rows.conditions), packed, rows.order)
