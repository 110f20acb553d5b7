"""The device half of a generator's step: pure functions, compiled once for every row class.

language_states   rows, pool -> states in the pool                       (step_functions.py)
(exchange^T       language pool -> generator pool: sharding/exchange.py)
draw_loss_and_grad   rows, pool -> sums, gradients, gradients of the states in their place
(exchange         gradients back to the language ranks)
language_loss_and_grad   takes the gradients of its states               (step_functions.py)

first_patches     rows -> noise                                          drawing, instead of the last three
draw_step         rows, pool, noisy patches -> less noisy ones
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmllm.data.rows.draws import shifted
from jaxmllm.models.rows import GeneratorRows, TokenPool
from jaxmllm.trainable import Params, join
from jaxmllm.training.objectives.flow import (
    FlowSums,
    NoisyPatches,
    euler_step,
    flow_losses,
    flow_sums,
    noisy_patches,
    row_noise,
    slot_times,
)
from jaxmllm.training.objectives.tokens import failed_examples
from jaxmllm.training.step_functions import StepFunctions, accumulated, gradients
from sharding.context import permute
from sharding.pools import PoolSlots


@dataclass(frozen=True)
class GeneratorFunctions:
    """The functions of one generator phase, for the whole mesh or for one device
    (`StepFunctions.by_device`)."""

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
        """Add one microbatch's gradients and sums. In the pool, gradients replace the states that
        it reads, from slot `pool_offset` on."""
        layout = self.step.model.layout(self.phase)
        slots = _condition_slots(rows, pool_offset)
        states, valid = slots.take(layout, pool)
        # The sums so far are passed, because the backward pass itself adds the gradients of layers.
        trained, frozen = self.step.split(params, self.phase, grads)

        def objective(trained: Params, states: Array) -> tuple[Array, FlowSums]:
            total, sums = self._loss(join(trained, frozen), rows, states, valid)
            return total * scale, sums

        d_params, d_states, row_sums = gradients(
            objective, trained, states, self.step.trains_states
        )
        if d_states is not None:
            pool = pool._replace(tokens=slots.put(layout, d_states, pool.tokens))
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

    def first_patches(self, rows: GeneratorRows) -> Float[Array, "R C F"]:
        """Noise in place of patches, from which drawing starts."""
        return row_noise(self.step.model.layout(self.phase), rows, self.dtype)

    def draw_step(
        self,
        params: Params,
        rows: GeneratorRows,
        pool: TokenPool,
        pool_offset: Int[Array, ""],
        noisy: Float[Array, "R C F"],
        time: Float[Array, ""],
        next_time: Float[Array, ""],
        guidance: Float[Array, ""],
    ) -> Float[Array, "R C F"]:
        """Noisy patches of items at `next_time`, which is less than `time` (arXiv 2207.12598,
        2209.03003). Both times are shifted by each segment's shift, here in `rows.times`.

        A guidance of 1 draws from the conditions, 0 without them, and values above 1 extrapolate in
        that direction. It has no effect where rows hold each item only with its conditions.
        """
        model = self.step.model
        layout = model.layout(self.phase)
        states, _ = _condition_slots(rows, pool_offset).take(layout, pool)
        shift = jnp.where(rows.times > 0, rows.times, 1)  # 1, no shift: segments without an item
        now, then = (shifted(when, shift).astype(rows.times.dtype) for when in (time, next_time))
        free = (rows.segments != rows.owners)[..., None]  # patches that do not see conditions
        # Segment s + S is the half of item s without conditions, drawn at the times of segment s.
        # It becomes an owner of its own: else the pooled conditions of item s would modulate it.
        now, then = (jnp.concatenate([times, times], axis=1) for times in (now, then))
        rows = rows._replace(times=now, owners=rows.segments)
        predicted = model.draw(params, self.phase, rows, noisy, states).astype(noisy.dtype)
        if rows.partners is not None:
            # Predictions for the same patches in the other half of their item
            of_partners = permute(layout, predicted, rows.partners)
            with_conditions = jnp.where(free, of_partners, predicted)
            without = jnp.where(free, predicted, of_partners)
            predicted = without + guidance * (with_conditions - without)
        prediction = self.step.objective.diffusion.prediction
        return euler_step(
            prediction,
            predicted,
            noisy,
            *(
                slot_times(layout, rows, times)[..., None].astype(noisy.dtype)
                for times in (now, then)
            ),
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The type in which patches are made and losses computed: at least float32."""
        dtype = self.step.model.components[self.phase].dtype
        return jnp.dtype(jnp.promote_types(dtype, jnp.float32))

    def conditions(self, rows: GeneratorRows, pool: TokenPool) -> TokenPool:
        """The states that are the conditions of rows, and which of them could be computed:
        [R / g, g * C, ...]."""
        states: TokenPool = _condition_slots(rows, jnp.int32(0)).take(
            self.step.model.layout(self.phase), pool
        )
        return states

    def _loss(
        self, params: Params, rows: GeneratorRows, states: Array, valid: Array
    ) -> tuple[Float[Array, ""], FlowSums]:
        """Sum of the losses of the rows' patches, and the sums by source and by time."""
        model = self.step.model
        patches = noisy_patches(model.layout(self.phase), rows, self.dtype)
        predicted = model.draw(params, self.phase, rows, patches.noisy, states)
        return self.losses(rows, patches, predicted, valid)

    def losses(
        self,
        rows: GeneratorRows,
        patches: NoisyPatches,
        predicted: Float[Array, "R C F"],
        valid: Array,
    ) -> tuple[Float[Array, ""], FlowSums]:
        """Sum of the losses, and the sums, from the model's predictions; `valid` [R, C] is 0 where
        a state could not be computed."""
        layout = self.step.model.layout(self.phase)
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
            patches.times,
        )
        return losses.sum(), sums


def _condition_slots(rows: GeneratorRows, pool_offset: Int[Array, ""]) -> PoolSlots:
    """The pool slots from which rows read states; `rows.conditions` count from the microbatch's
    first slot in the pool, `pool_offset`."""

    def moved(conditions: Array) -> Array:
        return jnp.where(conditions >= 0, conditions + pool_offset, -1)

    packed = None if rows.arrived is None else moved(rows.arrived)
    return PoolSlots(moved(rows.conditions), packed, rows.order)
