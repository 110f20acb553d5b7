"""The audio tower: a convolutional stem inside fixed-size chunks of each clip, then a transformer over the clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmllm.attention.mask import item_ids
from jaxmllm.config.schema import AudioConfig, ComponentConfig
from jaxmllm.models.layers import (
    RMSNorm,
    RowContext,
    bias,
    biased,
    encoder_block,
    parameter,
    rotary_angles,
    run_stack,
    stacked,
    weight,
)
from jaxmllm.models.rows import EncoderRows
from sharding.rules import Layout


class HalvingConvolution(nnx.Module):
    """Convolution of width 3 and stride 2 over spans of T slots, written as one matrix product."""

    def __init__(self, in_width: int, width: int, rngs: nnx.Rngs):
        inputs = AudioConfig.stem_kernel * in_width
        self.kernel = parameter(rngs, (inputs, width), (None, "embed"), inputs)
        self.bias = bias((width,), (None,))

    def __call__(
        self, x: Float[Array, "R N T I"], first: Bool[Array, "R N T/2"], layout: Layout
    ) -> Float[Array, "R N T/2 D"]:
        """Outputs that are `first` see zeros before their two slots."""
        even, odd = x[:, :, 0::2], x[:, :, 1::2]
        before = jnp.pad(odd[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
        before = jnp.where(first[..., None], 0, before)
        windows = jnp.concatenate([before, even, odd], axis=-1)
        return jax.nn.gelu(
            biased(windows @ weight(self.kernel, layout, x.dtype), self.bias, layout)
        )


class AudioTower(nnx.Module):
    """Log-mel frames -> features at a quarter of the frame rate, bidirectional inside each clip.

    The stem sees one chunk of a clip at a time, so a clip's features depend neither on its neighbours in the row nor
    on where it stands.
    """

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        self.config = config
        self.stem_mels = HalvingConvolution(config.mel_bins, config.width, rngs)
        self.stem_width = HalvingConvolution(config.width, config.width, rngs)
        self.layers = stacked(lambda rngs: encoder_block(config, rngs), config.layers, rngs)
        self.norm = RMSNorm(config.width, config.norm_epsilon)

    def __call__(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> Float[Array, "R C/4 D"]:
        x, context = self.embed(rows, layout, dtype), self.context(rows, layout, dtype, settings)
        return self.norm(run_stack(self.layers, x, context, settings.remat))

    def embed(self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype) -> Float[Array, "R C/4 D"]:
        """What the first layer reads."""
        ranks, slots, mels = rows.features.shape
        # Parts of rows hold whole chunks, kept apart here so that no window reaches over the edge of a part.
        stride = self.config.stem_stride
        stretch = self.config.chunk_frames if layout.parts > 1 else slots
        x = rows.features.astype(dtype).reshape(ranks, -1, stretch, mels)
        first = rows.positions[:, ::stride, 0] % (self.config.chunk_frames // stride) == 0
        first = first.reshape(ranks, -1, stretch // stride)
        first_halves = jnp.stack([first, jnp.zeros_like(first)], axis=-1).reshape(
            ranks, -1, stretch // 2
        )
        x = self.stem_width(self.stem_mels(x, first_halves, layout), first, layout)
        return layout.constrain(x.reshape(ranks, slots // stride, -1), ("batch", "sequence", None))

    def context(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> RowContext:
        """What all layers know of the rows; depends on no parameters."""
        stride = self.config.stem_stride
        sections = (self.config.head_size // 2,)
        angles = rotary_angles(
            rows.positions[:, ::stride, :1], sections, self.config.rope_theta, dtype
        )
        ids = item_ids(rows.segments[:, ::stride])
        return RowContext(layout, ids, rows.tiles, angles, settings.attention)
