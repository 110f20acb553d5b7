"""The device half of a step: pure functions over pytrees, each compiled once for every row capacity.

    encode            rows -> tokens written into the encoder pool
    (exchange         encoder pool -> language pool: sharding/exchange.py)
    language_loss_and_grad   rows, pool -> sums, language gradients, gradients of the pool
    (exchange^T       gradients back to the encoder ranks)
    encode_grad       rows, gradients of the pool -> encoder gradients
    update            gradients, sums -> new state, metrics

Gradients arrive with their final scale, one over the planned number of target tokens of the whole
batch, so adding microbatches is all there is to accumulation. `update` rescales by planned / actual
when undecodable media masked some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmllm.config.schema import OptimizerConfig
from jaxmllm.models.mllm import MLLM, Params
from jaxmllm.models.rows import EncoderRows, LanguageRows, TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.trainable import join
from jaxmllm.training.objectives.tokens import Sums, failed_examples, sums_by_source, token_losses
from jaxmllm.training.optimizer import (
    clip_by_norm,
    init_optimizer,
    learning_rate,
    optimizer_updates,
)
from sharding.pools import add_to_rank, put_rows, share_rank, take_rows


class TrainState(NamedTuple):
    """All that a checkpoint holds: the data state is the step number."""

    params: Params
    optimizer: dict[str, Any]  # by trainable component
    step: Int[Array, ""]
    skipped: Int[Array, ""]  # updates skipped so far because something was not finite
    skipped_in_row: Int[Array, ""]
    failed_media: Int[Array, ""]  # media items so far whose body could not be decoded


class KeptFeatures(NamedTuple):
    """What the backward pass of a projector over a frozen tower starts from."""

    features: Float[Array, "R C D"]
    places: Int[Array, "R T"]  # of `EncoderRows`


@dataclass(frozen=True)
class StepFunctions:
    """The step's functions for one model; `sources` is the number of sources that losses are
    reported for, and the learning rate has decayed after `decay_steps`."""

    model: MLLM
    optimizer: OptimizerConfig
    decay_steps: int
    sources: int

    def trainable_of(self, phase: str) -> tuple[str, ...]:
        """Trainable components of a phase; without any, its backward programs do not exist."""
        trained = self.model.trainable.components
        return tuple(name for name in self.model.phases[phase].components if name in trained)

    @property
    def trains_encoders(self) -> bool:
        """Whether any gradient flows from the language rows back to an encoder phase."""
        return any(self.trainable_of(phase) for phase in self.model.phases[LANGUAGE].reads)

    def keeps_features(self, phase: str) -> bool:
        """Whether backward starts from the features of a frozen tower instead of running it again."""
        return self.trainable_of(phase) == (f"projector.{phase}",)

    # ------------------------------------------------------------------ encoders

    def encode(
        self,
        phase: str,
        params: Params,
        rows: EncoderRows,
        pool: TokenPool,
        pool_offset: Int[Array, ""],
        failed: Int[Array, ""],
    ) -> tuple[TokenPool, KeptFeatures | None, Int[Array, ""]]:
        """Write the rows' tokens into the pool from slot `pool_offset` on; count the items that could not be decoded.

        The second result is what `encode_grad` starts from, where that is not the rows.
        """
        features = KeptFeatures(self.model.features(params, phase, rows), rows.places)
        tokens = self.model.project(params, phase, *features).astype(pool.tokens.dtype)
        pool = TokenPool(
            jax.lax.dynamic_update_slice_in_dim(pool.tokens, tokens, pool_offset, axis=1),
            jax.lax.dynamic_update_slice_in_dim(
                pool.valid, rows.valid.astype(pool.valid.dtype), pool_offset, axis=1
            ),
        )
        return (
            pool,
            (features if self.keeps_features(phase) else None),
            failed + rows.failed.sum(dtype=failed.dtype),
        )

    def encode_grad(
        self,
        phase: str,
        params: Params,
        start: EncoderRows | KeptFeatures,
        d_pool: Float[Array, "R W D"],
        pool_offset: Int[Array, ""],
        grads: Params,
    ) -> Params:
        """Add the gradients of a microbatch's trainable components; recomputes the forward from
        `start`: the rows, or the features of a frozen tower."""
        trained, frozen = self._split(params, phase)

        def tokens_of(trained: Params) -> Array:
            everything = join(trained, frozen)
            if isinstance(start, KeptFeatures):
                return self.model.project(everything, phase, *start)
            return self.model.project(
                everything, phase, self.model.features(everything, phase, start), start.places
            )

        tokens, vjp = jax.vjp(tokens_of, trained)
        d_tokens = jax.lax.dynamic_slice_in_dim(d_pool, pool_offset, tokens.shape[1], axis=1)
        return jax.tree.map(jnp.add, grads, vjp(d_tokens.astype(tokens.dtype))[0])

    # ------------------------------------------------------------------ language

    def language_loss(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C D"], valid: Array
    ) -> tuple[Float[Array, ""], Sums]:
        """Sum of the losses of the rows' target tokens, and the sums by source."""
        return self.losses(*self.model.hidden(params, rows, media), rows, valid)

    def losses(
        self,
        hidden: Float[Array, "R C D"],
        head: Float[Array, "D V"],
        rows: LanguageRows,
        valid: Array,
    ) -> tuple[Float[Array, ""], Sums]:
        """The same from hidden states; valid [R, C] is 0 where a media token could not be computed."""
        layout = self.model.layout(LANGUAGE)
        losses, hits = token_losses(
            hidden, head, rows.targets, self.model.config.language.loss_chunk, layout
        )
        missing = (rows.media >= 0) & (valid == 0)
        failed = failed_examples(layout, missing, rows.segments, rows.sources.shape[1])
        counted = (rows.targets >= 0) & ~failed
        losses = jnp.where(counted, losses, 0)
        return losses.sum(), sums_by_source(
            layout, self.sources, losses, hits, counted, rows.segments, rows.sources
        )

    def language_loss_and_grad(
        self,
        params: Params,
        rows: LanguageRows,
        pool: TokenPool,
        scale: Float[Array, ""],
        d_pool: Float[Array, "R W D"],
        grads: Params,
        sums: Sums,
    ) -> tuple[Float[Array, "R W D"], Params, Sums]:
        """Add one microbatch's gradients (of the language model and of the pool) and sums."""
        layout = self.model.layout(LANGUAGE)
        media, valid = self._arrived(rows, pool)
        trained, frozen = self._split(params, LANGUAGE)

        def objective(trained: Params, media: Array) -> tuple[Array, Sums]:
            total, sums = self.language_loss(join(trained, frozen), rows, media, valid)
            return total * scale, sums

        if self.trains_encoders:
            (d_params, d_media), row_sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(
                trained, media
            )
            d_pool = put_rows(layout, d_media, rows.media, d_pool)
        else:
            d_params, row_sums = jax.grad(objective, has_aux=True)(trained, media)
        return d_pool, jax.tree.map(jnp.add, grads, d_params), jax.tree.map(jnp.add, sums, row_sums)

    def evaluate(self, params: Params, rows: LanguageRows, pool: TokenPool, sums: Sums) -> Sums:
        """Add one microbatch's sums, without gradients."""
        return jax.tree.map(
            jnp.add, sums, self.language_loss(params, rows, *self._arrived(rows, pool))[1]
        )

    def language_loss_and_grad_long(
        self,
        params: Params,
        rows: LanguageRows,
        pool: TokenPool,
        scale: Float[Array, ""],
        d_pool: Float[Array, "R W D"],
        grads: Params,
        sums: Sums,
        media_rank: Int[Array, ""],
    ) -> tuple[Float[Array, "R W D"], Params, Sums]:
        """`language_loss_and_grad` of one row [1, C] in parts on all ranks, whose media arrived on `media_rank`."""
        shared = self._shared(pool, media_rank)
        d_shared, grads, row_sums = self._long_row_step.language_loss_and_grad(
            params, rows, shared, scale, jnp.zeros_like(shared.tokens), grads, _zero_sums(sums)
        )
        return (
            add_to_rank(self.model.layout(LANGUAGE), d_pool, d_shared, media_rank),
            grads,
            _add_to_first_rank(sums, row_sums),
        )

    def evaluate_long(
        self,
        params: Params,
        rows: LanguageRows,
        pool: TokenPool,
        sums: Sums,
        media_rank: Int[Array, ""],
    ) -> Sums:
        """`evaluate` of one row in parts on all ranks."""
        return _add_to_first_rank(
            sums,
            self._long_row_step.evaluate(
                params, rows, self._shared(pool, media_rank), _zero_sums(sums)
            ),
        )

    def _shared(self, pool: TokenPool, media_rank: Int[Array, ""]) -> TokenPool:
        """What one rank's pool holds, for all ranks: leaves [1, W, ...]."""
        return TokenPool(
            *(share_rank(self.model.layout(LANGUAGE), leaf, media_rank) for leaf in pool)
        )

    @property
    def _long_row_step(self) -> StepFunctions:
        """The step of long rows."""
        return replace(
            self, model=self.model.with_layout(LANGUAGE, self.model.layout(LANGUAGE).long)
        )

    def _arrived(self, rows: LanguageRows, pool: TokenPool) -> tuple[Array, Array]:
        layout = self.model.layout(LANGUAGE)
        return take_rows(layout, pool.tokens, rows.media), take_rows(layout, pool.valid, rows.media)

    # ------------------------------------------------------------------ update

    def init(self, params: Params) -> TrainState:
        """A state before the first update."""
        trained, _ = self.model.trainable.split(params)
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, init_optimizer(self.optimizer, trained), zero, zero, zero, zero)

    def update(
        self,
        state: TrainState,
        grads: Params,
        sums: Sums,
        planned: Float[Array, ""],
        failed: Int[Array, ""],
    ) -> tuple[TrainState, dict[str, Array]]:
        """Apply the gradients unless something is not finite (or no target is left); count what was skipped."""
        targets = sums.targets.sum()
        rescale = planned / jnp.maximum(targets, 1)
        grads = jax.tree.map(lambda g: g * rescale.astype(g.dtype), grads)
        loss = sums.loss.sum() / jnp.maximum(targets, 1)
        norm = optax.tree.norm(grads)
        rate = learning_rate(self.optimizer, self.decay_steps, state.step)
        usable = jnp.isfinite(loss) & jnp.isfinite(norm) & (targets > 0)

        trained, frozen = self.model.trainable.split(state.params)
        clipped = clip_by_norm(grads, norm, self.optimizer.clip_norm)
        updates, optimizer = optimizer_updates(self.optimizer, clipped, state.optimizer, trained)
        for name in grads:
            component_rate = rate * self.model.components[name].settings.learning_rate_scale
            trained[name] = jax.tree.map(
                lambda p, u, r=component_rate: jnp.where(usable, p - r.astype(p.dtype) * u, p),
                trained[name],
                updates[name],
            )
        optimizer = jax.tree.map(
            lambda new, old: jnp.where(usable, new, old), optimizer, state.optimizer
        )
        new = TrainState(
            join(trained, frozen),
            optimizer,
            state.step + 1,
            state.skipped + ~usable,
            jnp.where(usable, 0, state.skipped_in_row + 1),
            state.failed_media + failed,
        )
        metrics = {
            "loss": loss,
            "loss_by_source": sums.loss.sum(0) / jnp.maximum(sums.targets.sum(0), 1),
            "targets_by_source": sums.targets.sum(0),
            "gradient_norm": norm,
            "learning_rate": rate,
            "skipped": new.skipped,
            "skipped_in_row": new.skipped_in_row,
            "failed_media": new.failed_media,
            "masked_targets": planned - targets,
        }
        return new, metrics

    def _split(self, params: Params, phase: str) -> tuple[Params, Params]:
        """(trained, frozen) parameters of a phase."""
        return self.model.trainable.split(
            {name: params[name] for name in self.model.phases[phase].components}
        )


def _zero_sums(sums: Sums) -> Sums:
    """Zero sums [1, N] of all ranks together."""
    return jax.tree.map(lambda x: jnp.zeros_like(x[:1]), sums)


def _add_to_first_rank(sums: Sums, row_sums: Sums) -> Sums:
    """Add sums [1, N] of all ranks to those [R, N] of the first."""
    return jax.tree.map(lambda total, row: total.at[:1].add(row), sums, row_sums)
