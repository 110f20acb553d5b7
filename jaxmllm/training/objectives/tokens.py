"""Cross-entropy whose logits exist for one chunk of tokens at a time, and its sums by source.

Letters: R ranks, C row capacity, D width, V vocabulary, S segments of a row, N sources.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sharding.rules import Layout


class Sums(NamedTuple):
    """Sums over the target tokens that count, by rank and source; adding two microbatches' sums is exact."""

    loss: Float[Array, "R N"]
    targets: Float[Array, "R N"]
    exact: Float[Array, "R N"]  # examples whose every target is the argmax
    examples: Float[Array, "R N"]


def token_losses(
    hidden: Float[Array, "R C D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "R C"],
    largest: int,
    layout: Layout,
) -> tuple[Float[Array, "R C"], Bool[Array, "R C"]]:
    """Cross-entropy of every token whose target is >= 0 (else 0), and whether the target is the argmax.

    A device holds the logits of at most `largest` tokens at one time, forward and backward; the
    head's gradient accumulates in at least float32.
    """
    shape = targets.shape
    hidden, targets = (
        x.reshape(shape[0] * layout.parts, -1, *x.shape[2:]) for x in (hidden, targets)
    )
    chunk = chunk_size(targets.shape[1], largest)
    losses, hits = _token_losses(hidden, head, targets, chunk, layout.by_part)
    return losses.reshape(shape), hits.reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_losses(
    hidden: Array, head: Array, targets: Array, chunk: int, layout: Layout
) -> tuple[Array, Array]:
    """`token_losses` of rows that are not split."""
    losses, hits, _ = _forward(hidden, head, targets, chunk, layout)
    return losses, hits


def _forward(
    hidden: Array, head: Array, targets: Array, chunk: int, layout: Layout
) -> tuple[Array, Array, Array]:
    def one(_: None, chunk_of: tuple[Array, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        x, target = chunk_of
        logits = _logits(x, head, layout)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
        counts = target >= 0
        return None, (
            jnp.where(counts, normalizer - chosen, 0),
            counts & (chosen >= logits.max(axis=-1)),
            normalizer,
        )

    _, chunks = jax.lax.scan(one, None, (_split(hidden, chunk), _split(targets, chunk)))
    losses, hits, normalizers = (_join(part) for part in chunks)
    return losses, hits, normalizers


def _forward_rule(
    hidden: Array, head: Array, targets: Array, chunk: int, layout: Layout
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    losses, hits, normalizers = _forward(hidden, head, targets, chunk, layout)
    return (losses, hits), (hidden, head, targets, normalizers)


def _backward_rule(
    chunk: int, layout: Layout, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    hidden, head, targets, normalizers = residuals
    d_losses = jnp.where(targets >= 0, cotangents[0], 0)

    def one(d_head: Array, chunk_of: tuple[Array, ...]) -> tuple[Array, Array]:
        x, target, normalizer, d_loss = chunk_of
        probability = jnp.exp(_logits(x, head, layout) - normalizer[..., None])
        hot = target[..., None] == jnp.arange(head.shape[1])
        d_logits = ((probability - hot) * d_loss[..., None]).astype(x.dtype)
        d_logits = layout.constrain(d_logits, ("batch", None, "vocab"))
        d_head += jnp.einsum("rcd,rcv->rdv", x, d_logits, preferred_element_type=d_head.dtype)
        return layout.constrain(d_head, by_rank), jnp.einsum("rcv,dv->rcd", d_logits, head)

    # Each rank keeps a sum of its own: one sum for all would be reduced over the ranks chunk by chunk.
    by_rank = ("batch", None, "vocab")
    d_head = jnp.zeros((len(hidden), *head.shape), jnp.promote_types(head.dtype, jnp.float32))
    parts = tuple(_split(array, chunk) for array in (hidden, targets, normalizers, d_losses))
    d_head, d_hidden = jax.lax.scan(one, layout.constrain(d_head, by_rank), parts)
    return _join(d_hidden).astype(hidden.dtype), d_head.sum(0).astype(head.dtype), None


_token_losses.defvjp(_forward_rule, _backward_rule)


def chunk_size(capacity: int, largest: int) -> int:
    """Tokens whose logits exist at one time: the largest divisor of the row capacity that is at most `largest`."""
    return next(size for size in range(min(capacity, largest), 0, -1) if capacity % size == 0)


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

    def over_parts(x: Array) -> Array:
        return jax.lax.psum(x, split) if split else x

    def on_device(
        losses: Array, hits: Array, counted: Array, segments: Array, source_of: Array
    ) -> Sums:
        segment_source = source_of[0]
        segment = jnp.where(segments[0] > 0, segments[0] - 1, segment_source.size)
        token_source = jnp.append(segment_source, -1)[segment]
        some = jnp.zeros(segment_source.size, jnp.int32)
        has_target = over_parts(some.at[segment].max(counted[0], mode="drop")) > 0
        missed = over_parts(some.at[segment].max(counted[0] & ~hits[0], mode="drop")) > 0

        def total(
            values: Array, source: Array
        ) -> Array:  # no matrix product: accelerators round its inputs
            by_source = source[:, None] == jnp.arange(sources)
            return jnp.where(by_source, values[:, None].astype(losses.dtype), 0).sum(0)[None]

        return Sums(
            loss=over_parts(total(losses[0], token_source)),
            targets=over_parts(total(counted[0], token_source)),
            exact=total(has_target & ~missed, segment_source),
            examples=total(has_target, segment_source),
        )

    slots = ("batch", "sequence")
    local = layout.local(on_device, (slots,) * 4 + (("batch",),), ("batch",))
    return local(losses, hits, counted, segments, source_of)


def failed_examples(
    layout: Layout, failed: Bool[Array, "R C"], segments: Int[Array, "R C"], max_segments: int
) -> Bool[Array, "R C"]:
    """Spread a token's failure over its whole example: targets that follow an undecodable image carry no loss."""

    split = layout.mesh_axes("sequence")

    def on_device(failed: Array, segments: Array) -> Array:
        any_failed = jnp.zeros(max_segments + 1, jnp.int32).at[segments[0]].max(failed[0])
        return (jax.lax.psum(any_failed, split) if split else any_failed)[segments[0]][None] > 0

    slots = ("batch", "sequence")
    return layout.local(on_device, (slots, slots), slots)(failed, segments)


def _logits(x: Array, head: Array, layout: Layout) -> Array:
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("rcd,dv->rcv", x, head, preferred_element_type=accumulate)
    return layout.constrain(logits, ("batch", None, "vocab"))


def _split(x: Array, chunk: int) -> Array:
    """[R, C, ...] -> [C / chunk, R, chunk, ...]"""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(chunks: Array) -> Array:
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1, *chunks.shape[3:])
