"""A stem of convolutions over the plane of time and mels (arXiv 2509.17765).

    frames [T, M] -> [T/2, M/2, C] -> [T/4, M/4, C] -> [T/8, M/8, C] -> tokens [T/8, D]

Letters: R ranks (rows), N stretches of a row, T slots of a stretch, M mels, I input channels, C
output channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxmllm.config.schema import AudioConfig, Gelu
from jaxmllm.models.products import bias, biased, parameter, product, weight
from sharding.rules import Layout


class PlaneConvolution(nnx.Module):
    """Convolution of width 3 and stride 2 along both axes."""

    def __init__(self, inputs: int, channels: int, gelu: Gelu, rngs: nnx.Rngs):
        side = AudioConfig.stem_kernel
        size = side**2 * inputs
        self.kernel = parameter(rngs, (size, channels), (None, "embed"), size)
        self.bias = bias((channels,), (None,))
        self.shape = side, side, inputs, channels
        self.gelu = gelu

    def __call__(
        self, x: Float[Array, "R N T M I"], first: Bool[Array, "R N T/2"], layout: Layout
    ) -> Float[Array, "R N T/2 M/2 C"]:
        """Convolve. Outputs that are `first` see zeros before their slots, and zeros pad the mels
        on both sides."""
        # Output t reads slots 2t - 1, 2t and 2t + 1. `before` has 2t - 1, and zeros for t = 0.
        before = jnp.pad(x[:, :, 1:-1:2], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
        before = jnp.where(first[..., None, None], 0, before)
        kernel = weight(self.kernel, layout, x.dtype).reshape(self.shape)
        # A slot before that is of another chunk must be zero for this output alone, so slots before
        # have a convolution of their own.
        y = _convolved(before, kernel[:1]) + _convolved(x, kernel[1:])
        return jax.nn.gelu(biased(y, self.bias, layout), approximate=self.gelu == "tanh")


def _convolved(
    x: Float[Array, "R N T M I"], kernel: Float[Array, "h 3 I C"]
) -> Float[Array, "R N T/h M/2 C"]:
    """Convolution in steps of h slots and 2 mels."""
    spans = x.reshape(-1, *x.shape[2:])
    y = jax.lax.conv_general_dilated(
        spans,
        kernel,
        window_strides=(kernel.shape[0], 2),
        padding=((0, 0), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y.reshape(*x.shape[:2], *y.shape[1:])


class PlaneStem(nnx.Module):
    """Frames -> attention tokens, with each chunk convolved as if it were alone.

    The backward pass recomputes the convolutions, whatever `remat` says: their outputs are many
    times as large as what the layers keep.
    """

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        assert config.stem_channels is not None
        channels = config.stem_channels
        self.config = config
        self.first = PlaneConvolution(1, channels, config.gelu, rngs)
        self.second = PlaneConvolution(channels, channels, config.gelu, rngs)
        self.third = PlaneConvolution(channels, channels, config.gelu, rngs)
        inputs = config.stem_mels[-1] * channels
        self.matrix = parameter(rngs, (inputs, config.width), (None, "embed"), inputs)

    def __call__(
        self, frames: Float[Array, "R N T M"], places: Int[Array, "R N T/8"], layout: Layout
    ) -> Float[Array, "R N T/8 D"]:
        """Attention tokens, made of frames.

        Args:
          places: number of each token in its chunk.
        """
        return jax.checkpoint(lambda x: self._attention_tokens(x, places, layout))(frames)

    def _attention_tokens(
        self, frames: Float[Array, "R N T M"], places: Int[Array, "R N T/8"], layout: Layout
    ) -> Float[Array, "R N T/8 D"]:
        x = frames[..., None]
        stride = 1
        for convolution in (self.first, self.second, self.third):
            stride *= 2
            frame_places = _output_places(places, self.config.stem_stride // stride)
            x = convolution(x, frame_places == 0, layout)
            # The next convolution must see zeros after the last frame of a chunk.
            outputs = -(-self.config.chunk_frames // stride)
            x = jnp.where((frame_places < outputs)[..., None, None], x, 0)
        return product(x.reshape(*x.shape[:3], -1), self.matrix, layout)


def _output_places(places: Shaped[Array, "R N T"], outputs: int) -> Shaped[Array, "R N T*n"]:
    """Number of each output in its chunk, where each token covers `outputs` of them."""
    inside = jnp.arange(outputs, dtype=places.dtype)
    return (places[..., None] * outputs + inside).reshape(*places.shape[:2], -1)
