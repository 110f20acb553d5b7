"""The vision tower: a transformer over the patches of images at native resolution (NaViT packing,
arXiv 2307.06304)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxmllm.attention.mask import item_ids
from jaxmllm.config.schema import ComponentConfig, VisionConfig
from jaxmllm.models.layers import (
    RowContext,
    documents_of,
    encoder_block,
    row_keys,
    run_stack,
    run_tapped_stack,
    stacked,
)
from jaxmllm.models.norms import NORMS
from jaxmllm.models.products import bias, biased, parameter, times_matrix, weight
from jaxmllm.models.rotary import Rotation, rotary_angles_2d
from jaxmllm.models.rows import EncoderRows
from sharding.rules import Layout


class VisionTower(nnx.Module):
    """Patches -> features, bidirectional inside each image or its windows; positions by (row,
    column), rotary, learned, or both. With `deepstack_layers`, a feature is the normed output of
    the last layer, followed by the output of each of these layers."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        self.config = config
        patch = config.patch_frames * config.patch_features
        self.patch = parameter(rngs, (patch, config.width), (None, "embed"), patch)
        self.patch_bias = bias((config.width,), (None,)) if config.patch_bias else None
        self.layers = stacked(lambda rngs: encoder_block(config, rngs), config.layers, rngs)
        norm = NORMS[config.norm]
        self.norm = norm(config.width, config.norm_epsilon) if config.last_norm else None
        if (side := config.position_grid) is not None:
            # With a class token, all positions are in one line: the token's, then those of patches.
            grid = (1, 1 + side**2) if config.class_token else (side, side)
            self.position_embedding = parameter(
                rngs, (*grid, config.width), (None, None, "embed"), config.width
            )
        if config.class_token:
            self.class_token = parameter(
                rngs, (1, 1, config.width), (None, None, "embed"), config.width
            )

    def __call__(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> Float[Array, "R C F"]:
        x = self.embed(rows, layout, dtype)
        context = self.context(rows, layout, dtype, settings)
        how = settings.remat, self.config.windowed
        if not (taps := self.config.deepstack_layers):
            return self.normed(run_stack(self.layers, x, context, *how))
        x, tapped = run_tapped_stack(self.layers, x, context, *how, taps)
        return jnp.concatenate([self.normed(x), *tapped], axis=-1)

    def normed(self, x: Float[Array, "R C D"]) -> Float[Array, "R C D"]:
        """Output of the last layer -> features."""
        return x if self.norm is None else self.norm(x)

    def embed(self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype) -> Float[Array, "R C D"]:
        """Input of the first layer: embedded patches, plus learned positions if there are any."""
        x = times_matrix(
            1, self._normalised(rows.features, dtype), self._patch_matrix(layout, dtype)
        )
        if self.patch_bias is not None:
            x = biased(x, self.patch_bias, layout)
        if self.config.class_token:
            x = self._insert_class_token(x, rows.positions, layout)
        if self.config.position_grid is not None:
            x = x + self._learned(rows.positions, layout, dtype)
        return layout.constrain(x, ("batch", "sequence", None))

    def _patch_matrix(self, layout: Layout, dtype: jnp.dtype) -> Float[Array, "F D"]:
        """The matrix that embeds patches of rows. Where rows hold one frame for all frames of a
        patch, it is the sum of the frames' weights, added in at least float32."""
        patch = weight(self.patch, layout, dtype)
        if (frames := self.config.patch_frames) == self.config.row_frames:
            return patch
        wide = jnp.promote_types(dtype, jnp.float32)
        return patch.reshape(frames, -1, patch.shape[1]).sum(axis=0, dtype=wide).astype(dtype)

    def _normalised(
        self, colors: Shaped[Array, "R C F"], dtype: jnp.dtype
    ) -> Float[Array, "R C F"]:
        """(color / 255 - mean) / std, computed in at least float32: in bfloat16 each step would
        round again."""
        wide = jnp.promote_types(dtype, jnp.float32)
        std = np.array(self.config.pixel_std)
        per_color = 255 * std, np.array(self.config.pixel_mean) / std
        scale: Any
        shift: Any
        if all(len({*values}) == 1 for values in per_color):
            scale, shift = (float(values[0]) for values in per_color)
        else:  # the colors of a pixel are neighbours
            pixels = self.config.row_frames * self.config.patch_size**2
            scale, shift = (jnp.asarray(np.tile(values, pixels), wide) for values in per_color)
        return (colors.astype(wide) / scale - shift).astype(dtype)

    def _learned(
        self, positions: Int[Array, "R C A"], layout: Layout, dtype: jnp.dtype
    ) -> Float[Array, "R C D"]:
        """The learned position of each patch."""
        table = weight(self.position_embedding, layout, dtype)
        if self.config.class_token:  # its position comes first in the table
            side = self.config.position_grid or 0
            patch = 1 + positions[..., 0] * side + positions[..., 1]
            return table[0, jnp.where(self._is_class_token(positions), 0, patch)]
        side, _, width = table.shape
        if self.config.positions == "table":
            return table[positions[..., 0], positions[..., 1]]
        weights = resampling_weights if self.config.positions == "resampled" else aligned_weights
        # Positions are (row, column, rows, columns) here: a place, and the size of its image.
        rows, columns = (
            weights(positions[..., axis], positions[..., axis + 2], side, dtype) for axis in (0, 1)
        )
        grid_weights = (rows[..., :, None] * columns[..., None, :]).reshape(
            *rows.shape[:2], side**2
        )
        return grid_weights.astype(dtype) @ table.reshape(side**2, width)

    def _is_class_token(self, positions: Int[Array, "R C A"]) -> Bool[Array, "R C"]:
        """Whether a slot holds the class token, whose row is the one after that of all patches."""
        return jnp.equal(positions[..., 0], self.config.position_grid or 0)

    def _insert_class_token(
        self, x: Float[Array, "R C D"], positions: Int[Array, "R C A"], layout: Layout
    ) -> Float[Array, "R C D"]:
        """Embedded patches, and the class token in its slots."""
        slots = self._is_class_token(positions)[..., None].astype(x.dtype)
        # The token enters by a product, whose gradient is added in float32.
        return x * (1 - slots) + slots @ weight(self.class_token, layout, x.dtype)[0]

    def context(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> RowContext:
        """What all layers know of the rows; depends on no parameters."""
        rotation = None
        if self.config.rotates:
            angles = rotary_angles_2d(
                rows.positions, self.config.head_size // 2, self.config.rope_theta, dtype
            )
            rotation = Rotation.of(angles)
        ids = item_ids(rows.segments)
        windows = None
        if rows.windows is not None and rows.window_tiles is not None:
            window_ids = item_ids(rows.windows)
            windows = window_ids, row_keys(layout, window_ids), rows.window_tiles
        return RowContext(
            *(layout, ids, row_keys(layout, ids), rows.tiles, rotation, settings.attention),
            windows=windows,
            documents=documents_of(rows),
        )


def resampling_weights(
    place: Int[Array, "*B"], places: Int[Array, "*B"], side: int, dtype: jnp.dtype
) -> Float[Array, "*B G"]:
    """Weight of each of `side` values along an axis in one of the `places` values that they are
    resampled to: linearly and antialiased, corners not aligned, as image libraries reduce and
    enlarge pictures. Computed in at least float32.

    Args:
      place: number of the resampled value; 0 <= place < places, except in padding.
    """
    step = side / jnp.maximum(places, 1).astype(jnp.promote_types(dtype, jnp.float32))
    reach = jnp.maximum(step, 1)
    # Distance between centres, in units of the given values. Where there are fewer places than
    # values, weights reach further, so that every value counts.
    distance = jnp.arange(side) + 0.5 - (step * (place + 0.5))[..., None]
    weights = jnp.maximum(0, 1 - jnp.abs(distance) / reach[..., None])
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-6)


def aligned_weights(
    place: Int[Array, "*B"], places: Int[Array, "*B"], side: int, dtype: jnp.dtype
) -> Float[Array, "*B G"]:
    """As `resampling_weights`, for values that are resampled linearly, corner to corner: the first
    place has the first value, and the last place the last one."""
    wide = jnp.promote_types(dtype, jnp.float32)
    position = place.astype(wide) * (side - 1) / jnp.maximum(places - 1, 1)
    return jnp.maximum(0, 1 - jnp.abs(jnp.arange(side) - position[..., None]))
