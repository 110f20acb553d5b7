"""The audio tower: a convolutional stem inside fixed-size chunks of each clip, then a transformer
over the clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped
from numpy.typing import NDArray

from jaxmllm.attention.mask import item_ids
from jaxmllm.config.schema import AudioConfig, ComponentConfig, Gelu
from jaxmllm.models.layers import (
    RowContext,
    documents_of,
    encoder_block,
    row_keys,
    run_stack,
    stacked,
)
from jaxmllm.models.mel_planes import PlaneStem
from jaxmllm.models.norms import NORMS
from jaxmllm.models.products import bias, biased, parameter, times_matrix, weight
from jaxmllm.models.rotary import Rotation, rotary_angles
from jaxmllm.models.rows import BlockMargins, EncoderRows
from sharding.rules import Layout


class StemConvolution(nnx.Module):
    """Convolution of width 3 and stride 1 or 2 over stretches of T slots, as one matrix product."""

    def __init__(self, in_width: int, width: int, stride: int, gelu: Gelu, rngs: nnx.Rngs):
        inputs = AudioConfig.stem_kernel * in_width
        self.kernel = parameter(rngs, (inputs, width), (None, "embed"), inputs)
        self.bias = bias((width,), (None,))
        self.stride = stride
        self.gelu = gelu

    def __call__(
        self, x: Float[Array, "R N T I"], first: Bool[Array, "R N T/s"], layout: Layout
    ) -> Float[Array, "R N T/s D"]:
        """Convolve. Outputs that are `first` see zeros before their slots, and the outputs before
        them see zeros after theirs."""
        # With stride s, output t is made of slots s t - 1, s t and s t + 1. With s = 2 the first of
        # these is also the last slot of output t - 1.
        middle = x[:, :, 0 :: self.stride]
        after = x[:, :, 1 :: self.stride]
        if self.stride == 1:
            before = _shifted(x, 1)
            after = _shifted(x, -1)
            after = jnp.where(_shifted(first, -1)[..., None], 0, after)
        else:
            before = _shifted(after, 1)
        before = jnp.where(first[..., None], 0, before)
        windows = jnp.concatenate([before, middle, after], axis=-1)
        return jax.nn.gelu(
            biased(
                times_matrix(1, windows, weight(self.kernel, layout, x.dtype)), self.bias, layout
            ),
            approximate=self.gelu == "tanh",
        )


def _shifted(x: Shaped[Array, "R N T *I"], slots: int) -> Shaped[Array, "R N T *I"]:
    """x shifted by one slot, forward if `slots` is positive and else backward; zeros come in."""
    widths = [(0, 0)] * x.ndim
    widths[2] = (1, 0) if slots > 0 else (0, 1)
    return jnp.pad(x[:, :, :-1] if slots > 0 else x[:, :, 1:], widths)


class AudioTower(nnx.Module):
    """Log-mel frames -> features at 1/2, 1/4 or 1/8 of the frame rate, or means of neighbouring
    ones. Attention is bidirectional inside each clip or its chunks.

    The stem sees one chunk of a clip at a time, so a clip's features depend neither on its
    neighbours in the row nor on its place there.
    """

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        self.config = config
        if config.stem_channels is None:
            first_stride, second_stride = config.stem_strides
            mels = config.mel_bins
            width = config.width
            gelu = config.gelu
            self.stem_mels = StemConvolution(mels, width, first_stride, gelu, rngs)
            self.stem_width = StemConvolution(width, width, second_stride, gelu, rngs)
        else:
            self.stem = PlaneStem(config, rngs)
        self.layers = stacked(lambda rngs: encoder_block(config, rngs), config.layers, rngs)
        self.norm = NORMS[config.norm](config.width, config.norm_epsilon)
        if positions := config.learned_positions:
            self.position_embedding = parameter(
                rngs, (positions, config.width), (None, "embed"), config.width
            )

    def __call__(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> Float[Array, "R C/s/p D"]:
        x = self.embed(rows, layout, dtype)
        context = self.context(rows, layout, dtype, settings)
        return self.normed(run_stack(self.layers, x, context, settings.remat))

    def normed(self, x: Float[Array, "R C/s D"]) -> Float[Array, "R C/s/p D"]:
        """Output of the last layer -> normed features, each of the mean of p = `pool`
        neighbours."""
        if (pool := self.config.pool) > 1:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            ranks, tokens, width = x.shape
            groups = x.reshape(ranks, tokens // pool, pool, width)
            x = groups.mean(axis=2, dtype=wide).astype(x.dtype)
        return self.norm(x)

    def embed(self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype) -> Float[Array, "R C/s D"]:
        """Input of the first layer: outputs of the stem, plus positions unless these are rotary."""
        ranks, slots, _ = rows.features.shape
        stride = self.config.stem_stride
        stretches = _stem_stretches(rows, stride)
        x = stretches.features.astype(dtype)
        places = self._chunk_places(stretches.positions)
        if self.config.stem_channels is None:
            x = self._line_stem(x, jnp.equal(places, 0), stretches.segments, layout)
        else:
            x = self.stem(x, places, layout)
        if rows.margins is not None:
            # A margin of one stride on either side has become one token, which is not the block's.
            x = x[:, :, 1:-1]
        x = x.reshape(ranks, slots // stride, -1)
        if self.config.positions != "rotary":
            x = x + self._position_table(layout, dtype)[self._chunk_places(rows.positions)]
        return layout.constrain(x, ("batch", "sequence", None))

    def _chunk_places(self, positions: Int[Array, "*rows C A"]) -> Int[Array, "*rows C/s"]:
        """Number of each attention token in its chunk."""
        tokens: Array = positions[..., :: self.config.stem_stride, 0]
        return tokens % self.config.chunk_tokens

    def _line_stem(
        self,
        x: Float[Array, "R N T M"],
        first: Bool[Array, "R N T/s"],
        segments: Int[Array, "R N T"],
        layout: Layout,
    ) -> Float[Array, "R N T/s D"]:
        """Two convolutions along time; tokens that are `first` in their chunk see zeros before."""
        # The second convolution has stride 2: a token covers two outputs of the first one, of which
        # only the earlier can be the first of a chunk.
        first_halves = jnp.stack([first, jnp.zeros_like(first)], axis=-1)
        x = self.stem_mels(x, first_halves.reshape(*first.shape[:2], -1), layout)
        if self.config.silence == "masked":
            real = segments[:, :, :: self.stem_mels.stride] > 0
            x = jnp.where(real[..., None], x, 0)
        return self.stem_width(x, first, layout)

    def _position_table(self, layout: Layout, dtype: jnp.dtype) -> Float[Array, "P D"]:
        """Embedding of the position of each token of a chunk."""
        if self.config.positions == "table":
            return weight(self.position_embedding, layout, dtype)
        return jnp.asarray(sinusoids(self.config.chunk_tokens, self.config.width), dtype)

    def context(
        self, rows: EncoderRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> RowContext:
        """What all layers know of the rows; depends on no parameters."""
        stride = self.config.stem_stride
        sections = (self.config.head_size // 2,)
        rotation = None
        if self.config.positions == "rotary":
            angles = rotary_angles(
                rows.positions[:, ::stride, :1], sections, self.config.rope_theta, dtype
            )
            rotation = Rotation.of(angles)
        ids = item_ids(rows.segments[:, ::stride])
        return RowContext(
            *(layout, ids, row_keys(layout, ids), rows.tiles, rotation, settings.attention),
            documents=documents_of(rows),
        )


def _stem_stretches(rows: EncoderRows, margin: int) -> BlockMargins:
    """The slots of rows that the stem reads, [R, N, T, ..]: each row as a whole, or, where parts
    separate its blocks, each block with `margin` slots of the row on either side."""
    slots = BlockMargins(rows.features, rows.segments, rows.positions)
    if rows.margins is None:
        return jax.tree.map(lambda leaf: leaf[:, None], slots)
    blocks = rows.margins.segments.shape[1] // (2 * margin)

    def with_margins(leaf: Array, margins: Array) -> Array:
        ranks, *width = leaf.shape[0], *leaf.shape[2:]
        # Margins are stored block by block: first the slots before it, then those after it.
        before, after = jnp.split(margins.reshape(ranks, blocks, 2 * margin, *width), 2, axis=2)
        block = leaf.reshape(ranks, blocks, -1, *width)
        return jnp.concatenate([before, block, after], axis=2)

    return jax.tree.map(with_margins, slots, rows.margins)


def sinusoids(places: int, width: int) -> NDArray[np.float64]:
    """Sines, and then cosines, of each place, with periods from 2 pi to 20,000 pi: [places, width]
    (arXiv 1706.03762)."""
    frequency = 10_000 ** (-np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(places)[:, None] * frequency
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
