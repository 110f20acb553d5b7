"""Cross-entropy of slots that have a target, a chunk of logits at a time, and its sums by source.

    targets --slots_with_target--> slots --chunk by chunk--> hidden states -> logits -> losses, gradients

Slots without a target cost nothing: a loop runs over chunks of those that have one, as often as
their number requires. Each chunk's logits are computed once: gradients are made from them right
away, because the objective is the plain sum of the losses.

Letters: R ranks, C row capacity, D width, V vocabulary, S segments of a row, N sources; of one
device: T slots, K slots of a chunk, P slots of the list that chunks are cut from.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.models.language import OutputHead
from jaxmllm.models.mixture import RouterSums
from jaxmllm.training.objectives.flow import FlowSums, sums_by_group
from sharding.context import SLOTS
from sharding.parameters import Deferred, Parameter, kept_axes, whole_gradient
from sharding.rules import Axes, Layout

# Rows are cut into at least this many chunks, because the last chunk is computed whole ..
CHUNKS = 8
# .. unless chunks had fewer slots than this: every chunk reads and writes the head's gradient
SMALLEST_CHUNK = 128


class Sums(NamedTuple):
    """Sums over the target tokens that count, by rank and source; they add up over microbatches."""

    loss: Float[Array, "R N"]
    targets: Int[Array, "R N"]
    exact: Int[Array, "R N"]  # examples in which every target is the argmax
    examples: Int[Array, "R N"]
    drawn: FlowSums | None = None  # of a generator, once it has run
    routed: RouterSums | None = None  # with experts: [R, L, ...], over all tokens


class TokenLosses(NamedTuple):
    """Losses of a microbatch. Gradients flow through `total` alone."""

    total: Float[Array, ""]
    losses: Float[Array, "R C"]  # 0 where there is no target
    hits: Bool[Array, "R C"]  # whether the target is the argmax


def token_losses(
    hidden: Float[Array, "R C D"],
    head: OutputHead,
    targets: Int[Array, "R C"],
    largest: int,
    layout: Layout,
) -> TokenLosses:
    """Cross-entropy of every token whose target is >= 0.

    The head is gathered in the type of the hidden states. A device holds the logits of at most
    `largest` tokens at one time. The head's gradient is summed in at least float32 and sent once,
    to the devices that hold its parts; if the head is `Deferred`, it stays on the device.
    """
    tokens = targets.size // math.prod(map(layout.size, SLOTS))
    stays = isinstance(head.matrix, Deferred)
    loss = _DeviceLoss(head.axes, chunk_size(tokens, largest), layout, stays)
    total, losses, hits = _objective(loss, hidden, head.matrix, targets)
    return TokenLosses(total, jax.lax.stop_gradient(losses), hits)


def chunk_size(tokens: int, largest: int) -> int:
    """K, how many tokens of a device have logits at one time."""
    return min(largest, max(tokens // CHUNKS, SMALLEST_CHUNK), tokens)


# ---------------------------------------------------------------------------- loss and gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(
    loss: _DeviceLoss, hidden: Array, matrix: Parameter, targets: Array
) -> tuple[Array, ...]:
    shard = matrix.shard if isinstance(matrix, Deferred) else matrix
    losses, hits = loss(hidden, shard, targets)
    return losses.sum(), losses, hits


def _forward_rule(loss: _DeviceLoss, hidden: Any, matrix: Any, targets: Any) -> tuple[Any, Any]:
    """The losses; kept for the backward pass are the wanted gradients of their sum, with respect to
    hidden states and head."""
    shard, head = (matrix.shard, matrix.stand_in) if loss.stays else (matrix, matrix)
    # `perturbed` says whether the gradient of an argument is wanted.
    perturbed = hidden.perturbed, head.perturbed
    losses, hits, *gradients = loss(hidden.value, shard.value, targets.value, *perturbed)
    # Without this, the whole gradient of the head may be kept until all layers are done, and only
    # then be scattered.
    gradients = jax.lax.optimization_barrier(gradients)
    remaining = iter(gradients)
    saved = tuple(
        next(remaining).astype(into.value.dtype) if into.perturbed else None
        for into in (hidden, head)
    )
    return (losses.sum(), losses, hits), saved


def _backward_rule(
    loss: _DeviceLoss, saved: tuple[Any, Any], cotangents: Any
) -> tuple[Any, Any, None]:
    d_total = cotangents[0]
    d_hidden, d_matrix = (
        None if gradient is None else (gradient * d_total).astype(gradient.dtype)
        for gradient in saved
    )
    return d_hidden, whole_gradient(d_matrix) if loss.stays else d_matrix, None


_objective.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@dataclass(frozen=True)
class _DeviceLoss:
    """The computation of one device, on its slots and its part of the vocabulary."""

    axes: Axes  # of the head's matrix
    chunk: int
    layout: Layout
    stays: bool  # whether the head's gradient stays whole on each device

    def __call__(
        self,
        hidden: Float[Array, "R C D"],
        matrix: Float[Array, ...],
        targets: Int[Array, "R C"],
        wants_hidden: bool = False,
        wants_head: bool = False,
    ) -> tuple[Array, ...]:
        """Losses and hits, and the gradients of the losses' sum that are wanted."""
        run = functools.partial(self._on_device, wants_hidden, wants_head)
        d_head = kept_axes(self.axes) if self.stays else self.axes
        results = [SLOTS, SLOTS] + wants_hidden * [(*SLOTS, None)] + wants_head * [d_head]
        local = self.layout.local(run, ((*SLOTS, None), self.axes, SLOTS), tuple(results))
        computed: tuple[Array, ...] = local(hidden, matrix, targets)
        return computed

    def _on_device(
        self, wants_hidden: bool, wants_head: bool, hidden: Array, matrix: Array, targets: Array
    ) -> tuple[Array, ...]:
        shape = targets.shape
        x = hidden.reshape(-1, hidden.shape[-1])
        target = targets.reshape(-1)
        # The loop runs over a list of slots [P]; `positions` [T] brings its results back.
        slots, positions, targets_on_device = slots_with_target(target, self.chunk)
        if self.layout.split_axes("vocab"):
            # Devices that communicate inside the loop must run it equally often
            targets_on_device = jax.lax.pmax(
                targets_on_device, self.layout.split_axes("vocab") + self._slot_axes
            )
        wide = jnp.promote_types(x.dtype, jnp.float32)
        table = self._gather_width(matrix.astype(x.dtype))
        # In the order of `results` in `__call__`, in which they are returned.
        begin = {
            "losses": jnp.zeros(slots.shape, wide),
            "hits": jnp.zeros(slots.shape, bool),
        }
        if wants_hidden:
            begin["d_hidden"] = jnp.zeros((slots.size, x.shape[1]), x.dtype)
        if wants_head:
            # A zero hidden from XLA, which would otherwise share the zeros that the embedding's
            # gradient begins with, and keep them in memory from here on
            zero = jax.lax.optimization_barrier(
                jnp.zeros((), jnp.promote_types(matrix.dtype, wide))
            )
            begin["d_head"] = jnp.broadcast_to(zero, table.shape)

        def step(index: Array, done: dict[str, Array]) -> dict[str, Array]:
            start = index * self.chunk
            chunk_slots = jax.lax.dynamic_slice_in_dim(slots, start, self.chunk)
            # After the last target the list holds T, out of range: zeros, without a target.
            chunk_x = x.at[chunk_slots].get(mode="fill", fill_value=0)
            chunk_target = target.at[chunk_slots].get(mode="fill", fill_value=-1)
            losses, hits, d_logits = self._cross_entropy(chunk_x, table, chunk_target)
            new = {"losses": losses, "hits": hits}
            if wants_hidden:
                d_x = jnp.einsum(f"kv,{self._matrix_letters}->kd", d_logits, table)
                new["d_hidden"] = jax.lax.psum(d_x, self.layout.split_axes("vocab"))
            written = {
                name: jax.lax.dynamic_update_slice_in_dim(done[name], values, start, axis=0)
                for name, values in new.items()
            }
            if wants_head:
                product = f"kd,kv->{self._matrix_letters}"
                written["d_head"] = done["d_head"] + jnp.einsum(
                    product, chunk_x, d_logits, preferred_element_type=done["d_head"].dtype
                )
            return written

        trips = (targets_on_device + self.chunk - 1) // self.chunk
        done = jax.lax.fori_loop(0, trips, step, begin)
        results = {
            name: _at_slots(values, positions, shape)
            for name, values in done.items()
            if name != "d_head"
        }
        if wants_head:
            results["d_head"] = self._sent_gradient(done["d_head"], table.dtype, matrix.dtype)
        return tuple(results[name] for name in begin)

    def _cross_entropy(
        self, x: Float[Array, "K D"], table: Array, target: Int[Array, " K"]
    ) -> tuple[Array, Array, Array]:
        """Loss and hit of each token; the gradient of the losses' sum with respect to the logits,
        in the type of x."""
        split = self.layout.split_axes("vocab")
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum(f"kd,{self._matrix_letters}->kv", x, table, preferred_element_type=wide)
        largest = logits.max(axis=-1)
        largest = jax.lax.pmax(largest, split) if split else largest
        first_token = jax.lax.axis_index(split) * logits.shape[1] if split else 0
        # One-hot over the columns of this device; all false for another device's target and for -1.
        hot = (target - first_token)[:, None] == jnp.arange(logits.shape[1])
        powers = jnp.exp(logits - largest[:, None])
        chosen = jnp.where(hot, logits, 0).sum(axis=-1)
        total, chosen = jax.lax.psum((powers.sum(axis=-1), chosen), split)
        has_target = target >= 0
        d_logits = jnp.where(has_target[:, None], powers / total[:, None] - hot, 0)
        return (
            jnp.where(has_target, jnp.log(total) + largest - chosen, 0),
            has_target & (chosen >= largest),
            d_logits.astype(x.dtype),
        )

    # ------------------------------------------------------------------ the head's matrix

    @property
    def _matrix_letters(self) -> str:
        """Letters of the matrix's axes in einsum: d width, v vocabulary."""
        return "".join("v" if name == "vocab" else "d" for name in self.axes)

    @property
    def _width_axis(self) -> int:
        return self._matrix_letters.index("d")

    @property
    def _slot_axes(self) -> tuple[str, ...]:
        """Mesh axes that split slots, except manual axes, along which replicas keep their own
        counts and sums."""
        manual = self.layout.manual_axes
        return tuple(axis for axis in self.layout.split_axes(*SLOTS) if axis not in manual)

    def _gather_width(self, matrix: Array) -> Array:
        """The matrix along its whole width."""
        axes = self.layout.split_axes("embed")
        if not axes:
            return matrix
        return jax.lax.all_gather(matrix, axes, axis=self._width_axis, tiled=True)

    def _sent_gradient(self, d_head: Array, narrow: Any, dtype: Any) -> Array:
        """What the device returns of the head's gradient: its part, of type `dtype`, or the whole
        gradient if that stays. It is sent in the type `narrow` if the layout says so."""
        if self.stays:
            return d_head
        if self.layout.narrow_gradients:
            d_head = d_head.astype(narrow)
        return self._reduce_scatter(d_head).astype(dtype)

    def _reduce_scatter(self, d_head: Array) -> Array:
        """This device's part of the gradient, summed over all ranks; or over the ranks of a
        replica, where replicas are added once per step (`sharding.parameters.by_replica`)."""
        holders = self.layout.split_axes("embed")
        copies = tuple(axis for axis in holders if axis not in self.layout.split_axes(*SLOTS))
        if copies:  # devices along these have computed the same, which must count once
            d_head = jnp.where(jax.lax.axis_index(copies) == 0, d_head, 0)
        if holders:
            d_head = jax.lax.psum_scatter(
                d_head, holders, scatter_dimension=self._width_axis, tiled=True
            )
        return jax.lax.psum(d_head, tuple(axis for axis in self._slot_axes if axis not in holders))


def _at_slots(values: Array, positions: Int[Array, " T"], shape: tuple[int, ...]) -> Array:
    """Values of a list of slots, [P, ...], put back into rows of slots, [*shape, ...]; 0 or false
    in slots without a target."""
    by_slot = values.at[positions].get(mode="fill", fill_value=0)
    return by_slot.reshape(*shape, *values.shape[1:])


def slots_with_target(
    targets: Int[Array, " T"], chunk: int
) -> tuple[Int[Array, " P"], Int[Array, " T"], Int[Array, ""]]:
    """The slots that have a target, in order; each slot's position in this list; and their number.

    P, the length of the list, is T rounded up to whole chunks. After the last slot with a target
    the list holds T; slots without a target have the position P.
    """
    length = -(-targets.size // chunk) * chunk
    has_target = targets >= 0
    positions = jnp.where(has_target, jnp.cumsum(has_target, dtype=jnp.int32) - 1, length)
    slot_numbers = jnp.arange(targets.size, dtype=jnp.int32)
    slots = jnp.full(length, targets.size, jnp.int32).at[positions].set(slot_numbers, mode="drop")
    return slots, positions, has_target.sum(dtype=jnp.int32)


# ---------------------------------------------------------------------------- sums


def sums_by_source(
    layout: Layout,
    sources: int,
    losses: Float[Array, "R C"],
    hits: Bool[Array, "R C"],
    counted: Bool[Array, "R C"],
    segments: Int[Array, "R C"],
    source_of: Int[Array, "R S"],
) -> Sums:
    """Per rank and source: loss, target tokens, examples, and examples answered exactly."""
    split = layout.mesh_axes("sequence")

    over_parts = functools.partial(jax.lax.psum, axis_name=split)

    def on_device(
        losses: Array, hits: Array, counted: Array, segments: Array, source_of: Array
    ) -> Sums:
        # A slot's segment counted from 0; padding gets the number S, whose source is -1: none.
        segment_source = source_of[0]
        segment = jnp.where(segments[0] > 0, segments[0] - 1, segment_source.size)
        token_source = jnp.append(segment_source, -1)[segment]
        some = jnp.zeros(segment_source.size, jnp.int32)
        # A segment may have slots on several parts of a row. After `over_parts` each of them knows
        # whether it has a target and whether one was missed: examples are not summed over parts.
        has_target = over_parts(some.at[segment].max(counted[0], mode="drop")) > 0
        missed = over_parts(some.at[segment].max(counted[0] & ~hits[0], mode="drop")) > 0

        def total(values: Array, source: Array) -> Array:
            return sums_by_group(values, source, sources)[None]

        return Sums(
            loss=over_parts(total(losses[0], token_source)),
            targets=over_parts(total(counted[0], token_source)),
            exact=total(has_target & ~missed, segment_source),
            examples=total(has_target, segment_source),
        )

    local = layout.local(on_device, (SLOTS,) * 4 + (("batch",),), ("batch",))
    return local(losses, hits, counted, segments, source_of)


def failed_examples(
    layout: Layout, failed: Bool[Array, "R C"], segments: Int[Array, "R C"], max_segments: int
) -> Bool[Array, "R C"]:
    """Spread a token's failure over its whole example: targets of an example with an undecodable
    image carry no loss."""

    split = layout.mesh_axes("sequence")

    def on_device(failed: Array, segments: Array) -> Array:
        # Segments count from 1; index 0 is padding, which has no targets.
        any_failed = jnp.zeros(max_segments + 1, jnp.int32).at[segments[0]].max(failed[0])
        return jax.lax.psum(any_failed, split)[segments[0]][None] > 0

    return layout.local(on_device, (SLOTS, SLOTS), SLOTS)(failed, segments)
