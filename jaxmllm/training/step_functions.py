"""The device half of a step: pure functions over pytrees, each compiled once for every row class.

    encode            rows -> tokens written into the encoder pool
    (exchange         encoder pool -> language pool: sharding/exchange.py)
    language_loss_and_grad   rows, pool -> sums, language gradients, gradients of the pool
    (exchange^T       gradients back to the encoder ranks)
    encode_grad       rows, gradients of the pool -> encoder gradients
                      (or from what encode kept of the microbatch; language_loss_and_grad can
                      likewise start from what language_states kept: generator_functions.py)
    (add_replicas     gradients of every replica -> gradients: training/programs/gradient_sums.py)
    update            gradients, sums -> new state, metrics

Gradients arrive with their final scale, the loss's weight over the planned number of target tokens
(or patches) of the whole batch, so accumulation only adds microbatches. `update` rescales by
planned / actual when undecodable media masked some targets, except in models that draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxmllm.config.schema import PROJECTOR, ObjectiveConfig, OptimizerConfig
from jaxmllm.models.language import OutputHead
from jaxmllm.models.mixture import RouterSums, sums_of_rows
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import EncoderRows, LanguageRows, TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.trainable import Params, join
from jaxmllm.training.averages import first_averages, moved_averages
from jaxmllm.training.objectives.flow import FlowSums
from jaxmllm.training.objectives.routing import Routing, router_loss, router_means
from jaxmllm.training.objectives.tokens import Sums, failed_examples, sums_by_source, token_losses
from jaxmllm.training.optimizer import (
    clip_scale,
    init_optimizer,
    learning_rate,
    optimizer_updates,
)
from sharding.context import by_rank
from sharding.gradient import KeptForward
from sharding.gradient import Params as Parted
from sharding.layer_loop import Summed
from sharding.parameters import Parameter, differentiated
from sharding.pools import PoolSlots, add_to_first_rank

ONE_LOSS = ObjectiveConfig()  # the objective of a model that draws nothing


class TrainState(NamedTuple):
    """All that a checkpoint holds. The step number alone says which examples come next."""

    params: Params
    optimizer: dict[str, Any]  # by trainable component
    step: Int[Array, ""]
    skipped: Int[Array, ""]  # updates skipped so far because something was not finite
    skipped_in_row: Int[Array, ""]
    failed_media: Int[Array, ""]  # media items so far whose body could not be decoded
    averages: Params | None = None  # of trained parameters, by component that has an `ema`, if any
    # With experts: tokens that chose each expert in the last step whose update was applied
    expert_counts: Int[Array, "L E"] | None = None


class KeptFeatures(NamedTuple):
    """Features of a frozen tower, from which the backward pass of its projector starts."""

    features: Float[Array, "R/g g*C D"]
    places: Int[Array, "R/g g*T"]  # as in `EncoderRows`


Rows = TypeVar("Rows", EncoderRows, LanguageRows)


class KeptResiduals(NamedTuple, Generic[Rows]):
    """The rows of a microbatch and residuals of its forward pass: a start for its backward pass."""

    rows: Rows
    residuals: Any  # tree of [devices along the axes of rows, ...]


EncoderStart = EncoderRows | KeptFeatures | KeptResiduals[EncoderRows]
LanguageStart = LanguageRows | KeptResiduals[LanguageRows]
Start = EncoderStart | LanguageStart
AnySums = TypeVar("AnySums")  # of text, of a generator or of routing
Decoded = tuple[Float[Array, "R C D"], RouterSums | None]  # hidden states, sums over the routing


@dataclass(frozen=True)
class StepFunctions:
    """The step's functions for one model; `sources` is the number of sources that losses are
    reported for, and the learning rate has decayed after `decay_steps`."""

    model: MLLM
    optimizer: OptimizerConfig
    decay_steps: int
    sources: int
    objective: ObjectiveConfig = ONE_LOSS

    @property
    def learns_text(self) -> bool:
        """See `ObjectiveConfig.learns_text`."""
        return self.objective.learns_text

    @property
    def routing_shape(self) -> tuple[int, int] | None:
        """(layers, experts of each layer) of the decoder; None without experts."""
        language = self.model.config.language
        if language.experts is None:
            return None
        return language.layers, language.experts.count

    @property
    def trains_states(self) -> bool:
        """Whether any gradient flows from generators back into the decoder."""
        generates = any(phase.generates for phase in self.model.phases.values())
        return generates and self.trains_language

    @property
    def trains_language(self) -> bool:
        """Whether the backward pass of the decoder has something to compute."""
        return self.trains_encoders or bool(self.trainable_of(LANGUAGE))

    def spanned(self, phase: str, span: int) -> StepFunctions:
        """The same functions for rows of a phase that `span` ranks hold together. Pools and sums
        stay by rank: [R, W, D] and [R, N]."""
        return replace(self, model=self.model.spanned(phase, span))

    def by_device(self, phase: str) -> StepFunctions:
        """The same functions, with a phase's code being that of one device along the axes of rows
        (sharding/parameters.py)."""
        return replace(self, model=self.model.by_device(phase))

    def trainable_of(self, phase: str) -> tuple[str, ...]:
        """Trainable components of a phase; an encoder without any has no backward programs."""
        trained = self.model.trainable.components
        return tuple(name for name in self.model.phases[phase].components if name in trained)

    @property
    def trains_encoders(self) -> bool:
        """Whether any gradient flows from the language rows back to an encoder phase."""
        return any(self.trainable_of(phase) for phase in self.model.phases[LANGUAGE].reads)

    def keeps_features(self, phase: str) -> bool:
        """Whether backward starts from features of a frozen tower instead of running it again."""
        return self.trainable_of(phase) == (f"{PROJECTOR}{phase}",)

    def may_keep_residuals(self, phase: str) -> bool:
        """Whether the backward pass of a phase is a separate program that could start from
        residuals of its forward pass."""
        if phase == LANGUAGE:
            return self.trains_states
        return bool(self.trainable_of(phase)) and not self.keeps_features(phase)

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
        """Write the rows' tokens into the pool from slot `pool_offset` on; count the items that
        could not be decoded.

        The second result is what `encode_grad` starts from; None if it starts from the rows.
        """
        features = KeptFeatures(self.model.features(params, phase, rows), rows.places)
        tokens = self.tokens(phase, params, features)
        pool, failed = self.written(phase, rows, tokens, pool, pool_offset, failed)
        return pool, (features if self.keeps_features(phase) else None), failed

    def written(
        self,
        phase: str,
        rows: EncoderRows,
        tokens: Float[Array, "R T D"],
        pool: TokenPool,
        pool_offset: Int[Array, ""],
        failed: Int[Array, ""],
    ) -> tuple[TokenPool, Int[Array, ""]]:
        """The pool with the rows' tokens written from slot `pool_offset` on, and `failed` plus the
        rows' items that could not be decoded."""
        layout = self.model.layout(phase)
        # Pools are by rank. So are rows of one rank, but not shared rows.
        valid = by_rank(layout, rows.valid) if layout.span > 1 else rows.valid
        pool = TokenPool(
            *(
                jax.lax.dynamic_update_slice_in_dim(
                    into, new.astype(into.dtype), pool_offset, axis=1
                )
                for into, new in zip(pool, (tokens, valid), strict=True)
            )
        )
        return pool, failed + rows.failed.sum(dtype=failed.dtype)

    def tokens(
        self, phase: str, params: Params, start: EncoderRows | KeptFeatures
    ) -> Float[Array, "R T D"]:
        """Language tokens of every rank, [R, T, D], in packed order."""
        if isinstance(start, EncoderRows):
            start = KeptFeatures(self.model.features(params, phase, start), start.places)
        return self.model.project(params, phase, *start)

    def tokens_and_residuals(
        self, phase: str, params: Params, rows: EncoderRows
    ) -> tuple[Float[Array, "R T D"], tuple[Array, ...]]:
        """Tokens of rows, and one device's residuals [1, ...] for `encode_grad` to start from."""
        parted = Parted(*self.split(params, phase))
        tokens, residuals = self._kept_encoder(phase, parted, rows).forward(parted, rows)
        return tokens, tuple(leaf[None] for leaf in residuals)

    def encode_grad(
        self,
        phase: str,
        params: Params,
        start: EncoderStart,
        d_pool: Float[Array, "R W D"],
        pool_offset: Int[Array, ""],
        grads: Params,
    ) -> Params:
        """Add a microbatch's gradients of the trainable components to `grads`. What `start` lacks
        of the forward pass is computed again."""
        parted = Parted(*self.split(params, phase, grads))
        backward: Callable[[Array], Params]
        if isinstance(start, KeptResiduals):
            kept_encoder = self._kept_encoder(phase, parted, start.rows)
            residuals = tuple(leaf[0] for leaf in start.residuals)
            # Abstract, only its shape is used: nothing runs forward here.
            tokens = kept_encoder.y
            backward = partial(kept_encoder.backward, parted, start.rows, residuals)
        else:
            tokens, vjp = jax.vjp(
                lambda trained: self.tokens(phase, join(trained, parted.frozen), start),
                parted.trained,
            )
            backward = lambda d_tokens: vjp(d_tokens)[0]  # noqa: E731
        d_tokens = jax.lax.dynamic_slice_in_dim(d_pool, pool_offset, tokens.shape[1], axis=1)
        return accumulated(grads, backward(d_tokens.astype(tokens.dtype)))

    def _kept_encoder(self, phase: str, parted: Parted, rows: EncoderRows) -> KeptForward:
        return KeptForward(
            lambda parted, rows: self.tokens(phase, join(*parted), rows), parted, rows
        )

    # ------------------------------------------------------------------ language

    def language_loss(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C D"], valid: Array
    ) -> tuple[Float[Array, ""], Sums]:
        """Sum of the losses of the rows' target tokens, and the sums by source."""
        hidden, head, routed = self.model.routed_hidden(params, rows, media)
        total, sums = self.losses(hidden, head, rows, valid)
        return total, sums._replace(routed=self.routed_sums(routed))

    def losses(
        self,
        hidden: Float[Array, "R C D"],
        head: OutputHead,
        rows: LanguageRows,
        valid: Array,
    ) -> tuple[Float[Array, ""], Sums]:
        """`language_loss` from hidden states, without sums of routing; `valid` [R, C] is 0 where a
        media token could not be computed."""
        layout = self.model.layout(LANGUAGE)
        counted = (rows.targets >= 0) & ~self.failed_tokens(rows, valid)
        total, losses, hits = token_losses(
            hidden,
            head,
            jnp.where(counted, rows.targets, -1),
            self.model.config.language.loss_chunk,
            layout,
        )
        return total, sums_by_source(
            layout, self.sources, losses, hits, counted, rows.segments, rows.sources
        )

    def language_loss_and_grad(
        self,
        params: Params,
        start: LanguageStart,
        pool: TokenPool,
        scale: Float[Array, ""],
        grads: Params,
        sums: Sums,
        routing: Routing | None = None,
        d_states: Float[Array, "R W D"] | None = None,
    ) -> tuple[TokenPool, Params, Sums]:
        """Add one microbatch's gradients and sums. In the pool, gradients replace the tokens that
        this microbatch reads, which no other microbatch reads.

        Args:
          start: the rows, or what `language_states` kept of them.
          routing: inputs of the router loss, for a decoder with experts.
          d_states: a pool with the gradients of the states that generators read; None if no
            gradient flows back from generators.
        """
        rows = start.rows if isinstance(start, KeptResiduals) else start
        media, valid = self._take_media(rows, pool)
        trained, frozen = self.split(params, LANGUAGE, grads)
        # Media tokens are passed with the parameters, because both may need gradients.
        decoded = self._decoder_of_trained(start, Parted((trained, media), frozen))
        layout = self.model.layout(LANGUAGE)
        d_hidden = None if d_states is None else states_slots(rows).take(layout, d_states)

        def objective(
            trained: Params, media: Array
        ) -> tuple[Array, tuple[Sums | None, RouterSums | None]]:
            hidden, routed = decoded((trained, media))
            total = jnp.zeros((), scale.dtype)
            sums = None
            if self.learns_text:
                head = self.model.head(join(trained, frozen))
                total, sums = self.losses(hidden, head, rows, valid)
                total *= scale
            if routing is not None and routed is not None:
                total += router_loss(self.objective.experts, routed, routing)
            if d_hidden is not None:  # a term whose gradient is d_hidden, as generators returned it
                total += (hidden * d_hidden).sum(dtype=scale.dtype)
            return total, (sums, self.routed_sums(routed))

        # Router sums are added separately: `row_sums` has none, and is None if text has no loss.
        d_params, d_media, (row_sums, row_routed) = gradients(
            objective, trained, media, self.trains_encoders
        )
        if d_media is not None:
            pool = pool._replace(tokens=media_slots(rows).put(layout, d_media, pool.tokens))
        routed = self.added(LANGUAGE, sums.routed, row_routed)
        sums = sums._replace(routed=None)
        if row_sums is not None:
            sums = self.added(LANGUAGE, sums, row_sums)
        return pool, accumulated(grads, d_params), sums._replace(routed=routed)

    def routed_sums(self, sums: RouterSums | None) -> RouterSums | None:
        """Router sums of whole rows, without gradients: for metrics and the next step's loss."""
        if sums is None:
            return None
        return jax.lax.stop_gradient(sums_of_rows(self.model.layout(LANGUAGE), sums))

    def evaluate(self, params: Params, rows: LanguageRows, pool: TokenPool, sums: Sums) -> Sums:
        """Add one microbatch's sums, without gradients."""
        _, row_sums = self.language_loss(params, rows, *self._take_media(rows, pool))
        return self.added(LANGUAGE, sums, row_sums)

    def language_states(
        self, params: Params, rows: LanguageRows, pool: TokenPool, keeps: bool = False
    ) -> tuple[TokenPool, Any]:
        """Write the states that generators read into the pool, and which could be computed.

        The second result is what `language_loss_and_grad` can start from: a tree of one device's
        arrays [1, ...], or None unless `keeps`.
        """
        media, valid = self._take_media(rows, pool)
        kept = None
        if keeps:
            trained, frozen = self.split(params, LANGUAGE)
            # Media tokens are passed with the parameters, because both may need gradients.
            parted = Parted((trained, media), frozen)
            decoded, residuals = self._kept_decoder(parted, rows).forward(parted, rows)
            hidden, _ = decoded
            # Each device keeps its own arrays: outside its code, the new axis counts devices.
            kept = jax.tree.map(lambda leaf: leaf[None], (decoded, residuals))
        else:
            hidden, _ = self.model.hidden(params, rows, media)
        computed = ~self.failed_tokens(rows, valid)
        states = TokenPool(hidden.astype(pool.tokens.dtype), computed.astype(pool.valid.dtype))
        put: TokenPool = states_slots(rows).put(self.model.layout(LANGUAGE), states, pool)
        return put, kept

    def _decoded(self, parted: Parted, rows: LanguageRows) -> Decoded:
        """Hidden states and router sums. `parted.trained` is (trained parameters, media tokens):
        all that may be differentiated."""
        trained, media = parted.trained
        hidden, _, routed = self.model.routed_hidden(join(trained, parted.frozen), rows, media)
        return hidden, routed

    def _kept_decoder(self, parted: Parted, rows: LanguageRows) -> KeptForward:
        return KeptForward(self._decoded, parted, rows)

    def _decoder_of_trained(self, start: LanguageStart, parted: Parted) -> Callable[[Any], Decoded]:
        """`_decoded` as a function of `parted.trained`, to be differentiated."""
        if not isinstance(start, KeptResiduals):
            return lambda trained: self._decoded(parted._replace(trained=trained), start)
        decoded, residuals = jax.tree.map(lambda leaf: leaf[0], start.residuals)
        kept_decoder = self._kept_decoder(parted, start.rows)
        return kept_decoder.remembered(parted, start.rows, residuals, decoded)

    def failed_tokens(self, rows: LanguageRows, valid: Array) -> Array:
        """Which tokens belong to examples with a media token that could not be computed."""
        missing = (rows.media >= 0) & (valid == 0)
        layout = self.model.layout(LANGUAGE)
        return failed_examples(layout, missing, rows.segments, rows.sources.shape[1])

    def _take_media(self, rows: LanguageRows, pool: TokenPool) -> tuple[Array, Array]:
        """The rows' media tokens, and which of them could be computed: [R / g, g * C, ...]."""
        media, valid = media_slots(rows).take(self.model.layout(LANGUAGE), pool)
        return media, valid

    def added(self, phase: str, sums: AnySums, row_sums: AnySums) -> AnySums:
        """Sums by rank plus those of a phase's rows; a shared row counts on its first rank."""
        layout = self.model.layout(phase)
        added: AnySums = jax.tree.map(
            lambda total, of_rows: add_to_first_rank(layout, total, of_rows), sums, row_sums
        )
        return added

    # ------------------------------------------------------------------ update

    def init(self, params: Params) -> TrainState:
        """A state before the first update."""
        trained, _ = self.model.trainable.split(params)
        zero = jnp.zeros((), jnp.int32)
        optimizer = init_optimizer(self.optimizer, trained)
        averages = first_averages(trained, self.model.ema) if self.model.ema else None
        expert_counts = None
        if self.routing_shape is not None:
            expert_counts = jnp.zeros(self.routing_shape, jnp.int32)
        return TrainState(params, optimizer, zero, zero, zero, zero, averages, expert_counts)

    def update(
        self,
        state: TrainState,
        grads: Params,
        sums: Sums,
        planned: Float[Array, ""],
        failed: Any,
    ) -> tuple[TrainState, dict[str, Array]]:
        """Apply the gradients unless something is not finite or no target (or patch) is left; count
        the updates that were skipped.

        Args:
          failed: a tree of counts, such as those of ranks, of items that could not be decoded.
        """
        # An exact integer: float32 cannot tell 2^24 targets from one more.
        targets = sums.targets.astype(jnp.int32).sum()
        text_loss = sums.loss.sum() / jnp.maximum(targets, 1)
        norm = optax.tree.norm(grads)
        if sums.drawn is None:  # the router loss is part of the gradients, and rescaled with them
            loss = text_loss
            counted = targets
            drawn_metrics = {}
            rescale = (planned / jnp.maximum(targets, 1)).astype(norm.dtype)
        else:  # the gradients are a sum of two means, which cannot be rescaled separately
            drawn_metrics = _drawn_metrics(text_loss, sums.drawn)
            weights = self.objective.language.weight, self.objective.diffusion.weight
            loss = weights[0] * text_loss + weights[1] * drawn_metrics["drawn_loss"]
            counted = sums.drawn.patches.sum() + (targets if self.learns_text else 0)
            rescale = jnp.ones((), norm.dtype)
        norm = norm * rescale
        rate = learning_rate(self.optimizer, self.decay_steps, state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        usable = finite & (counted > 0)
        # If only drawings have a loss, a batch of texts alone is skipped: no sign of divergence
        in_row = state.skipped_in_row + (~usable if self.learns_text else ~finite)

        trained, frozen = self.model.trainable.split(state.params)
        # One factor for rescaling and clipping, so that gradients are not written in between
        scale = rescale * clip_scale(norm, self.optimizer.clip_norm)
        trained, optimizer = self._apply_update(
            trained, state.optimizer, grads, scale, rate, usable
        )
        averages = state.averages
        if averages is not None:
            averages = moved_averages(averages, trained, self.model.ema, state.step, usable)
        expert_counts, routing_metrics = self._routing_after(state, sums, usable)
        # `step` numbers batches, so it also counts a skipped update, which leaves the optimizer's
        # own count and moments as they were.
        new = TrainState(
            join(trained, frozen),
            optimizer,
            state.step + 1,
            state.skipped + ~usable,
            jnp.where(usable, 0, in_row),
            state.failed_media + sum_of_counts(failed),
            averages,
            expert_counts,
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
            "masked_targets": planned - targets if self.learns_text else jnp.zeros_like(planned),
        }
        return new, metrics | routing_metrics | drawn_metrics

    def _apply_update(
        self,
        trained: Params,
        optimizer: Any,
        grads: Params,
        scale: Array,
        rate: Array,
        usable: Array,
    ) -> tuple[Params, Any]:
        """Trained parameters and optimizer state after an update by `scale` times the gradients;
        unchanged unless `usable`."""
        scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, moved = optimizer_updates(self.optimizer, scaled, optimizer, trained)
        after = dict(trained)
        for name in grads:
            component_rate = rate * self.model.components[name].settings.learning_rate_scale
            after[name] = jax.tree.map(
                lambda p, u, r=component_rate: jnp.where(usable, p - r.astype(p.dtype) * u, p),
                trained[name],
                updates[name],
            )
        return after, jax.tree.map(lambda new, old: jnp.where(usable, new, old), moved, optimizer)

    def _routing_after(
        self, state: TrainState, sums: Sums, usable: Array
    ) -> tuple[Array | None, dict[str, Array]]:
        """(expert counts of the new state, metrics of the routing); (None, {}) without experts."""
        experts = self.model.config.language.experts
        if experts is None:
            return None, {}
        if sums.drawn is not None and not self.trains_language:
            return state.expert_counts, {}  # the decoder runs forward only: no routing is counted
        assert sums.routed is not None and state.expert_counts is not None
        expert_counts = sums.routed.counts.sum(0)
        real = expert_counts.astype(sums.routed.z.dtype)  # floats: sums of these may overflow int32
        # Every token counts `per_token` times in each layer, so one layer tells how many there are.
        tokens = real[0].sum() / experts.per_token
        balance, z = router_means(sums.routed, Routing(state.expert_counts, tokens))
        layout = self.model.layout(LANGUAGE)
        # The experts of a device are consecutive: [L, devices, experts of each].
        devices = real.reshape(len(expert_counts), layout.size("experts"), -1).sum(2)
        metrics = {
            "balance_loss": balance,
            "router_z_loss": z,
            "expert_max_over_mean": _max_over_mean(real),
            "expert_device_max_over_mean": _max_over_mean(devices),
        }
        return jnp.where(usable, expert_counts, state.expert_counts), metrics

    def split(
        self, params: Params, phase: str, grads: Params | None = None
    ) -> tuple[Params, Params]:
        """(trained, frozen) parameters of a phase, for code of one device. Trained ones may be
        `Deferred`: their gradients stay whole on the device.

        Args:
          grads: the sums so far, to which the backward pass itself adds the gradients of layers;
            see `accumulated`.
        """
        trained, frozen = self.model.trainable.split(
            {name: params[name] for name in self.model.phases[phase].components}
        )
        trained = self.model.deferred(trained)
        return trained if grads is None else self.model.summed(trained, grads), frozen


def sum_of_counts(counts: Any) -> Int[Array, ""]:
    """The sum of all entries of a tree of counts."""
    leaves = jax.tree.leaves(counts)
    return sum((leaf.sum(dtype=jnp.int32) for leaf in leaves), jnp.zeros((), jnp.int32))


def _drawn_metrics(text_loss: Array, drawn: FlowSums) -> dict[str, Array]:
    """Metrics of a step that only models that draw have."""
    patches = drawn.patches.sum(0)
    patches_by_time = drawn.patches_by_time.sum(0)
    return {
        "text_loss": text_loss,
        "drawn_loss": drawn.loss.sum() / jnp.maximum(drawn.patches.sum(), 1),
        "drawn_loss_by_source": drawn.loss.sum(0) / jnp.maximum(patches, 1),
        "patches_by_source": patches,
        "drawn_loss_by_time": drawn.loss_by_time.sum(0) / jnp.maximum(patches_by_time, 1),
        "patches_by_time": patches_by_time,
    }


def _max_over_mean(counts: Float[Array, "L N"]) -> Float[Array, ""]:
    """The largest count of a layer over the layer's mean, in the layer where that is highest; 1 if
    all counts are zero."""
    means = counts.mean(axis=1)
    return jnp.max(jnp.where(means > 0, counts.max(axis=1) / jnp.maximum(means, 1e-9), 1))


def media_slots(rows: LanguageRows) -> PoolSlots:
    """The pool slots from which language rows read encoder tokens."""
    return PoolSlots(rows.media, rows.arrived, rows.order)


def states_slots(rows: LanguageRows) -> PoolSlots:
    """The pool slots into which language rows write the states that generators read."""
    assert rows.states is not None
    return PoolSlots(rows.states, rows.leaving, rows.order)


def gradients(
    objective: Callable[[Params, Array], tuple[Array, Any]],
    trained: Params,
    tokens: Array,
    wants_tokens: bool,
) -> tuple[Params, Array | None, Any]:
    """Gradients of an objective with respect to parameters and, if wanted, to the tokens that rows
    read from a pool (else None), and the objective's second result."""
    if not wants_tokens:
        d_params, others = jax.grad(objective, has_aux=True)(trained, tokens)
        return d_params, None, others
    both = jax.grad(objective, argnums=(0, 1), has_aux=True)
    (d_params, d_tokens), others = both(trained, tokens)
    return d_params, d_tokens, others


def accumulated(grads: Params, added: Params) -> Params:
    """Sums of gradients plus those of one more microbatch; a `Summed` leaf already is the new sum.

    In code of one device, a sum is that of the device's replica [1, ...], or of the only replica
    [...], or the device's own whole gradient [1, ...] (`Deferred`).
    """

    def sum_of(total: Array, leaf: Parameter | Summed) -> Array:
        if isinstance(leaf, Summed):
            return leaf.total
        return total + differentiated(leaf).astype(total.dtype).reshape(total.shape)

    return jax.tree.map(sum_of, grads, added)
