"""The vision tower: a transformer over the patches of images at native resolution (NaViT packing, arXiv 2307.06304)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmllm.attention.mask import item_ids
from jaxmllm.config.schema import ComponentConfig, VisionConfig
from jaxmllm.models.layers import (
    RMSNorm,
    RowContext,
    bias,
    biased,
    encoder_block,
    parameter,
    rotary_angles_2d,
    run_stack,
    stacked,
    weight,
)
from jaxmllm.models.rows import EncoderRows
from sharding.rules import Layout


class VisionTower(nnx.Module):
    """Patches -> features, bidirectional inside each image or its windows, rotary positions by (row, column)."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        self.config = config
        patch = config.patch_features
        self.patch = parameter(rngs, (patch, config.width), (None, "embed"), patch)
        self.patch_bias = bias((config.width,), (None,))
        self.layers = stacked(lambda rngs: encoder_block(config, rngs), config.layers, rngs)
        self.norm = RMSNorm(config.width, config.norm_epsilon)

    def __call__(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> Float[Array, "R C D"]:
        x, context = self.embed(rows, layout, dtype), self.context(rows, layout, dtype, settings)
        return self.norm(run_stack(self.layers, x, context, settings.remat, self.config.windowed))

    def embed(self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype) -> Float[Array, "R C D"]:
        """What the first layer reads."""
        pixels = rows.features.astype(dtype) / 127.5 - 1
        x = biased(pixels @ weight(self.patch, layout, dtype), self.patch_bias, layout)
        return layout.constrain(x, ("batch", "sequence", None))

    def context(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> RowContext:
        """What all layers know of the rows; depends on no parameters."""
        angles = rotary_angles_2d(
            rows.positions, self.config.head_size // 2, self.config.rope_theta, dtype
        )
        windows = None
        if rows.windows is not None and rows.window_tiles is not None:
            windows = item_ids(rows.windows), rows.window_tiles
        return RowContext(
            layout, item_ids(rows.segments), rows.tiles, angles, settings.attention, windows
        )
