"""Rectified flow (arXiv 2209.03003): noisy patches, and the squared error of the velocity, by
source and by time.

    image x, noise n, time t --> x_t = (1 - t) x + t n  --model--> velocity v, or the image     loss (v - (n - x))^2

Noise is made patch by patch from (key of the item, number of the patch), so it does not depend on
where the patch is placed.

Letters: R ranks, C slots, F numbers of a patch, S segments of a row, N sources, B bands of time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.models.rows import GeneratorRows
from sharding.context import SLOTS
from sharding.rules import Layout

# The velocity of a predicted image is (noisy patch - image) / time, where the time counts as at
# least this (arXiv 2511.13720): at t = 0 nothing is left to predict.
LEAST_TIME = 0.05
MIDDLE_GRAY = 127.5
TIME_BANDS = 4  # of equal width, from the image (0) to noise (1), that losses are reported for


class FlowSums(NamedTuple):
    """Sums over the patches that count, by rank and source, and by rank and time."""

    loss: Float[Array, "R N"]  # of each patch, the mean over its numbers
    patches: Int[Array, "R N"]  # an evaluation may count beyond 2^24, where float32 is inexact
    loss_by_time: Float[Array, "R B"]  # the same, by the time of the noise
    patches_by_time: Int[Array, "R B"]


class NoisyPatches(NamedTuple):
    """The model's input, the velocities that its predictions are compared with, and the times."""

    noisy: Float[Array, "R C F"]
    velocity: Float[Array, "R C F"]
    times: Float[Array, "R C"]


def noisy_patches(layout: Layout, rows: GeneratorRows, dtype: jnp.dtype) -> NoisyPatches:
    """The patches of rows, pixels in [-1, 1], with noise; any finite values in other slots.

    Noise is made in float32, whatever the dtype.
    """

    def on_device(
        features: Array, owners: Array, patches: Array, keys: Array, times: Array
    ) -> tuple[Array, ...]:
        # A device has slots of only one row: every leading axis has length 1.
        image = features[0].astype(dtype)
        if features.dtype == jnp.uint8:  # pixels; latents are normalised where they are loaded
            image = image / MIDDLE_GRAY - 1
        segment = jnp.maximum(owners[0] - 1, 0)
        noise = patch_noise(keys[0][segment], patches[0], image.shape[1]).astype(dtype)
        time = times[0][segment].astype(dtype)
        noisy = image + time[:, None] * (noise - image)
        return noisy[None], (noise - image)[None], time[None]

    by_row = ("batch",)
    local = layout.local(on_device, (SLOTS, SLOTS, SLOTS, by_row, by_row), (SLOTS, SLOTS, SLOTS))
    return NoisyPatches(*local(rows.features, rows.owners, rows.patches, rows.noise, rows.times))


def row_noise(layout: Layout, rows: GeneratorRows, dtype: jnp.dtype) -> Float[Array, "R C F"]:
    """The noise of the patches of rows, as in `noisy_patches`: drawing starts from it."""
    numbers = rows.features.shape[-1]

    def on_device(owners: Array, patches: Array, keys: Array) -> Array:
        segment = jnp.maximum(owners[0] - 1, 0)
        return patch_noise(keys[0][segment], patches[0], numbers)[None].astype(dtype)

    local = layout.local(on_device, (SLOTS, SLOTS, ("batch",)), SLOTS)
    noise: Array = local(rows.owners, rows.patches, rows.noise)
    return noise


def slot_times(
    layout: Layout, rows: GeneratorRows, times: Float[Array, "R S"]
) -> Float[Array, "R C"]:
    """The time of each slot: that of its segment, or anything finite for a slot without one."""

    def on_device(owners: Array, times: Array) -> Array:
        return times[0][jnp.maximum(owners[0] - 1, 0)][None]

    by_slot: Array = layout.local(on_device, (SLOTS, ("batch",)), SLOTS)(rows.owners, times)
    return by_slot


def patch_noise(
    keys: Int[Array, "C 2"], patches: Int[Array, " C"], numbers: int
) -> Float[Array, "C F"]:
    """Standard normal numbers for each patch, from its item's key and its number in the item."""

    def of_patch(key: Array, patch: Array) -> Array:
        wrapped = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.normal(jax.random.fold_in(wrapped, patch), (numbers,), jnp.float32)

    return jax.vmap(of_patch)(keys, patches)


def velocity_of(
    prediction: str,
    predicted: Float[Array, "R C F"],
    patches: NoisyPatches,
) -> tuple[Float[Array, "R C F"], Float[Array, "R C F"]]:
    """(predicted velocity, true velocity) of a model that predicts velocities or images (`sample`).

    For images, both are differences divided by a time of at least `LEAST_TIME`.
    """
    predicted = predicted.astype(patches.velocity.dtype)
    if prediction == "velocity":
        return predicted, patches.velocity
    time = patches.times[..., None]
    over = jnp.maximum(time, LEAST_TIME)
    return (patches.noisy - predicted) / over, patches.velocity * (time / over)


def euler_step(
    prediction: str,
    predicted: Float[Array, "R C F"],
    noisy: Float[Array, "R C F"],
    time: Float[Array, "R C 1"],
    next_time: Float[Array, "R C 1"],
) -> Float[Array, "R C F"]:
    """Noisy patches moved from `time` to a lesser `next_time` along the predicted velocity."""
    velocity = predicted if prediction == "velocity" else (noisy - predicted) / time
    return noisy + (next_time - time) * velocity


def time_bands() -> list[str]:
    """Names of the bands of time: the time at which each begins."""
    return [f"{band / TIME_BANDS:g}" for band in range(TIME_BANDS)]


def flow_losses(
    prediction: str,
    predicted: Float[Array, "R C F"],
    patches: NoisyPatches,
    counted: Bool[Array, "R C"],
) -> Float[Array, "R C"]:
    """The loss of every patch that counts, zero in all other slots."""
    velocity, true = velocity_of(prediction, predicted, patches)
    return jnp.where(counted, jnp.square(velocity - true).mean(-1), 0)


def sums_by_group(values: Array, group: Int[Array, " T"], groups: int) -> Array:
    """Sums of values [T], or for booleans how many are true (int32), by group: [groups]. Values of
    group -1 are left out."""
    dtype = jnp.int32 if values.dtype == bool else values.dtype
    # No matrix product: accelerators round its inputs
    by_group = jnp.where(group[:, None] == jnp.arange(groups), values[:, None].astype(dtype), 0)
    return by_group.sum(0, dtype=dtype)


def flow_sums(
    layout: Layout,
    sources: int,
    losses: Float[Array, "R C"],
    counted: Bool[Array, "R C"],
    owners: Int[Array, "R C"],
    source_of: Int[Array, "R S"],
    times: Float[Array, "R C"],
) -> FlowSums:
    """Losses and numbers of patches, per rank and source and per rank and band of time."""
    split = layout.mesh_axes("sequence")

    def on_device(
        losses: Array, counted: Array, owners: Array, source_of: Array, times: Array
    ) -> FlowSums:
        # Segments count from 1. Slots of no item have 0 and get source -1, which is in no sum.
        padded = jnp.concatenate([jnp.full_like(source_of[0][:1], -1), source_of[0]])
        source = padded[owners[0]]
        band = jnp.minimum((times[0] * TIME_BANDS).astype(jnp.int32), TIME_BANDS - 1)

        def total(values: Array, group: Array, groups: int) -> Array:
            return jax.lax.psum(sums_by_group(values[0], group, groups)[None], split)

        return FlowSums(
            loss=total(losses, source, sources),
            patches=total(counted, source, sources),
            loss_by_time=total(losses, band, TIME_BANDS),
            patches_by_time=total(counted, band, TIME_BANDS),
        )

    local = layout.local(on_device, (SLOTS, SLOTS, SLOTS, ("batch",), SLOTS), ("batch",))
    sums: FlowSums = local(losses, counted, owners, source_of, times)
    return sums
