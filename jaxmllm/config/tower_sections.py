"""Sections `model.vision` and `model.audio`: encoders, and their projectors."""

from __future__ import annotations

import itertools
import math
import operator
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxmllm.config.layer_sections import (
    Gelu,
    LayerCount,
    Layered,
    LayerWindows,
    tower_matrices,
)
from jaxmllm.config.section import Section


class TowerConfig(Layered):
    """Keys of every encoder tower. `merge` neighbouring features become one language token (in
    images, `merge` x `merge`).

    With `from`, the tower comes from a published folder: its parameters are read from there, and
    keys of its shapes that are left out are filled in from there. The others must equal the
    folder's.
    """

    from_: str | None = Field(None, alias="from")
    width: PositiveInt
    layers: LayerCount
    heads: PositiveInt
    mlp_width: PositiveInt
    merge: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0
    norm: Literal["rms", "layer"] = "rms"  # layer: LayerNorm, with biases
    norm_epsilon: PositiveFloat = 1e-6
    gelu: Gelu = "tanh"  # tanh: its tanh approximation
    qkv_bias: bool = True  # the output projection always has one
    key_bias: bool = True  # false: queries and values alone have biases
    qk_norm: bool = False  # RMS norms of queries and keys, over all heads together
    layer_scale: bool = False  # vectors multiply what attention and MLP add (arXiv 2103.17239)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 2

    @property
    def projectors(self) -> int:
        """Projectors of one token: of the last layer's output, and of other layers' outputs."""
        return 1

    @property
    def features_width(self) -> int:
        """Width of a feature: the outputs of all layers that projectors read, side by side."""
        return self.projectors * self.width

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of every layer that can have adapters: see adapter_sections.py."""
        return tower_matrices(self.width, self.mlp_width, gated=self.mlp_matrices == 3)

    @property
    def rotates(self) -> bool:
        """Whether layers rotate queries and keys."""
        return True

    def _check_not_rotary(self, positions: str) -> None:
        if self.rope_theta != TowerConfig.model_fields["rope_theta"].default:
            raise ValueError(
                f"rope_theta ({self.rope_theta:g}): {positions} positions are not rotary; leave it out"
            )

    @model_validator(mode="after")
    def _check_biases(self) -> TowerConfig:
        if not self.qkv_bias and not self.key_bias:
            raise ValueError("key_bias (False): without qkv_bias keys have none; leave it out")
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> TowerConfig:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        if self.rotates and self.width % (self.heads * 4):
            raise ValueError(
                f"width ({self.width}) must be a multiple of 4 * heads ({self.heads}): two rotary axes of pairs"
            )
        return self


class ProjectorShapes(Section):
    """Shapes of a projector, which makes one language token of several features: two matrices with
    a GELU between them or, with `linear`, one matrix.

    The features of a token are concatenated or averaged first (`grouping`), and the result is
    normed with `norm`.
    """

    mlp_width: PositiveInt | None = None  # none: the width of the decoder
    gelu: Gelu = "tanh"
    linear: bool = False
    bias: bool = True  # of the one matrix of `linear`; two matrices always have biases
    grouping: Literal["concatenated", "mean"] = "concatenated"
    norm: Literal["layer", "rms", "zero_centred_rms"] | None = None
    norm_epsilon: PositiveFloat = 1e-6

    def inputs(self, features: int, group: int) -> int:
        """Input width of the first matrix, for `group` features of width `features`."""
        return features if self.grouping == "mean" else group * features

    @model_validator(mode="after")
    def _check_linear(self) -> ProjectorShapes:
        for key in ("mlp_width", "gelu"):
            value = getattr(self, key)
            if self.linear and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({value}): a linear projector has no MLP; leave it out")
        if not self.bias and not self.linear:
            raise ValueError(
                "bias (False): the two matrices of a projector have biases; set linear: true"
            )
        return self

    @model_validator(mode="after")
    def _check_norm(self) -> ProjectorShapes:
        epsilon = self.norm_epsilon
        if self.norm is None and epsilon != type(self).model_fields["norm_epsilon"].default:
            raise ValueError(
                f"norm_epsilon ({epsilon:g}): there is no norm; set norm, or leave it out"
            )
        return self


class VisionConfig(LayerWindows, TowerConfig):
    """Vision transformer at native resolution; `merge` x `merge` patches become one language token.

    With `window`, layers attend inside windows of `window` x `window` patches, except
    `full_layers`, which see the whole image. With `gated_mlp`, MLPs are SwiGLU (arXiv 2002.05202)
    with biases.

    A patch spans `patch_frames` consecutive frames of a video, each with weights of its own. An
    image counts as a video of equal frames, so its patches are multiplied by the sum of these
    weights. With `videos`, conversations may have videos, and rows hold all frames of each patch
    (twice the numbers for two frames).

    The output of each of the `deepstack_layers` goes through its own projector, which norms the
    concatenated patches of a token (arXiv 2406.04334). The results are added to the hidden states
    of that token in the decoder: the first one after the first layer, the second one after the
    second, and so on.

    With `class_token`, every image, or every tile of one, has one more token, with a learned
    embedding and position. It takes part in attention and yields no feature (arXiv 2010.11929).
    """

    patch_size: PositiveInt = 14  # side of a patch, in pixels
    patch_frames: PositiveInt = 1
    videos: bool = False
    patch_bias: bool = True  # of the patch embedding
    gated_mlp: bool = False
    last_norm: bool = True  # a norm after the last layer
    class_token: bool = False
    projector: ProjectorShapes = ProjectorShapes()
    deepstack_layers: tuple[int, ...] = ()  # numbers of layers, from 0
    # rotary: of queries and keys; table: learned, one for each patch of a square grid that every
    # image has; resampled: a learned grid, resampled to the image's own (bilinear, antialiased);
    # rotary_and_resampled: rotary, and a learned grid resampled with aligned corners (bilinear)
    positions: Literal["rotary", "table", "resampled", "rotary_and_resampled"] = "rotary"
    position_grid: PositiveInt | None = None  # side of the grid of learned positions
    # Mean of each color, from 0 (black) to 1 (white): the tower reads (color - mean) / std
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    # Standard deviation of each color, on the same scale
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.5, 0.5, 0.5)

    @property
    def patch_features(self) -> int:
        """Numbers of a patch in one frame: three colors of every pixel."""
        return 3 * self.patch_size**2

    @property
    def row_frames(self) -> int:
        """Frames of a patch that rows hold. For an image they are all the same."""
        return self.patch_frames if self.videos else 1

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp else 2

    @property
    def merged(self) -> int:
        """Tokens of the tower's attention that become one language token."""
        return self.merge**2

    @property
    def learned_positions(self) -> int:
        """Number of learned positions; 0 if there are none."""
        return (self.position_grid or 0) ** 2 + self.class_token

    @property
    def rotates(self) -> bool:
        """Whether layers rotate queries and keys."""
        return self.positions in ("rotary", "rotary_and_resampled")

    @property
    def resamples(self) -> bool:
        """Whether learned positions are resampled to the grid of each image."""
        return self.positions in ("resampled", "rotary_and_resampled")

    @property
    def projectors(self) -> int:
        return 1 + len(self.deepstack_layers)

    @model_validator(mode="after")
    def _check_mlp(self) -> VisionConfig:
        if self.gated_mlp and self.gelu != TowerConfig.model_fields["gelu"].default:
            raise ValueError(
                f"gelu ({self.gelu}): with gated_mlp the activation is SiLU; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_class_token(self) -> VisionConfig:
        if self.class_token and self.positions != "table":
            raise ValueError(
                f"class_token (True): it has a learned position, and {self.positions} ones have no place for it; set "
                "positions: table"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> VisionConfig:
        learned = self.positions != "rotary"
        if learned != (self.position_grid is not None):
            raise ValueError(
                f"position_grid ({self.position_grid}): learned positions (table, resampled) have one, and "
                f"{self.positions} positions {'need it' if learned else 'have none'}"
            )
        if learned and self.window is not None:
            raise ValueError(
                f"window ({self.window}): layers attend in windows with rotary positions alone, not with "
                f"{self.positions} ones"
            )
        if not self.rotates:
            self._check_not_rotary(self.positions)
        if self.positions == "table" and self.position_grid and self.position_grid % self.merge:
            raise ValueError(
                f"merge ({self.merge}) must divide position_grid ({self.position_grid}), the patches along a "
                "side of every image"
            )
        return self

    @model_validator(mode="after")
    def _check_deepstack(self) -> VisionConfig:
        layers = self.deepstack_layers
        if layers and self.projector.linear:
            raise ValueError(
                "projector.linear: with deepstack_layers projectors have two matrices; leave one of them out"
            )
        for key in ("grouping", "norm"):
            value = getattr(self.projector, key)
            if layers and value != ProjectorShapes.model_fields[key].default:
                raise ValueError(
                    f"projector.{key} ({value}): those of deepstack_layers concatenate features, and norm them in "
                    "their own way; leave one of them out"
                )
        if [*layers] != sorted({*layers}) or not all(0 <= layer < self.layers for layer in layers):
            raise ValueError(
                f"deepstack_layers {[*layers]} must be layers 0 .. {self.layers - 1} in ascending order, each once"
            )
        return self


Silence = Literal["unseen", "cut", "masked", "stem", "heard"]


class AudioConfig(TowerConfig):
    """Log-mel encoder: a convolutional stem inside chunks of `chunk_frames` frames, then the tower.

    The stem is two convolutions along time, with strides `stem_strides`. With `stem_channels` it is
    three convolutions along time and mels, each of stride 2 and with that many channels, and a
    matrix (arXiv 2509.17765); empty slots then fill every chunk up to a whole token.

    A clip usually ends inside a chunk, and the rest of that chunk yields no tokens for the decoder.
    `silence` says how the tower treats the rest:

        unseen    its frames are zeros, and attention does not see it
        cut       like unseen, but the clip's last frames hear silence after its end; with unseen
                  they hear the end mirrored
        masked    like cut, and also set to zero after the first convolution
        stem      its frames are silence, which the convolutions hear and attention does not see
        heard     its frames are silence, which the whole tower hears like the clip

    If the last language token of a clip reads more features than the clip has, those are zeros.

    With `attention: chunk`, a token sees its own chunk only, or with `window_chunks` its group of
    that many chunks, instead of the whole clip. A feature is the mean of `pool` neighbouring
    tokens, normed; tokens left over at the end of a clip are dropped.
    """

    # Width of every convolution of the stem
    stem_kernel: ClassVar[int] = 3
    # Strides of the convolutions along time and mels
    plane_strides: ClassVar[tuple[int, ...]] = (2, 2, 2)

    mel_bins: PositiveInt = 80
    chunk_frames: PositiveInt = 64  # one every data.audio.hop_length samples
    stem_strides: tuple[Literal[1, 2], Literal[2]] = (2, 2)
    stem_channels: PositiveInt | None = None
    # rotary: of queries and keys, over the whole clip; or one for each token of a chunk: learned
    # (table), or sines and cosines (sinusoidal, arXiv 1706.03762)
    positions: Literal["rotary", "table", "sinusoidal"] = "rotary"
    silence: Silence = "unseen"
    attention: Literal["clip", "chunk"] = "clip"
    window_chunks: PositiveInt = 1
    pool: PositiveInt = 1
    projector: ProjectorShapes = ProjectorShapes()

    @property
    def stem_stride(self) -> int:
        """Slots (frames) that become one token of the tower's attention."""
        return math.prod(self.stem_strides if self.stem_channels is None else self.plane_strides)

    @property
    def stem_mels(self) -> tuple[int, ...]:
        """Height in mels of the output of each convolution along time and mels."""
        mels = [self.mel_bins]
        for stride in self.plane_strides:
            mels.append(-(-mels[-1] // stride))
        return tuple(mels[1:])

    @property
    def stem_numbers(self) -> int:
        """Numbers per slot that all convolutions along time and mels yield together."""
        slots = itertools.accumulate(self.plane_strides, operator.mul)
        outputs = zip(self.stem_mels, slots, strict=True)
        return (self.stem_channels or 0) * sum(-(-mels // per) for mels, per in outputs)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the tower's attention in a chunk."""
        return -(-self.chunk_frames // self.stem_stride)

    @property
    def chunk_slots(self) -> int:
        """Slots that a chunk takes in a row: its frames, rounded up to a whole token."""
        return self.chunk_tokens * self.stem_stride

    @property
    def seen_slots(self) -> int:
        """Slots of a group that see one another with `attention: chunk`."""
        return self.window_chunks * self.chunk_slots

    @property
    def merged(self) -> int:
        """Tokens of the tower's attention that become one language token."""
        return self.pool * self.merge

    @property
    def rotates(self) -> bool:
        return self.positions == "rotary"

    @property
    def learned_positions(self) -> int:
        """Learned positions of a chunk; 0 if there are none."""
        return self.chunk_tokens if self.positions == "table" else 0

    @model_validator(mode="after")
    def _check_chunk(self) -> AudioConfig:
        token = self.stem_stride * self.merged
        # With `stem_channels`, empty slots fill a chunk up to whole tokens of the tower's
        # attention.
        slots = self.chunk_frames if self.stem_channels is None else self.chunk_slots
        if slots % token:
            raise ValueError(
                f"chunk_frames ({self.chunk_frames}) must be a multiple of {self.stem_stride} * pool * merge ({token})"
            )
        if not self.rotates:
            self._check_not_rotary(self.positions)
        if self.positions == "sinusoidal" and (self.width % 2 or self.width < 4):
            raise ValueError(
                f"width ({self.width}): sinusoidal positions are a sine and a cosine of each period, two at least; "
                "set an even width from 4 on"
            )
        if self.attention == "chunk" and self.silence == "heard":
            raise ValueError(
                f"silence ({self.silence}): with attention (chunk), the last chunk of a clip sees itself alone; set "
                "silence: unseen, cut, masked or stem"
            )
        if self.attention == "clip" and self.window_chunks > 1:
            raise ValueError(
                f"window_chunks ({self.window_chunks}): with attention (clip), tokens see the whole clip; leave it "
                "out, or set attention: chunk"
            )
        return self

    @model_validator(mode="after")
    def _check_stem(self) -> AudioConfig:
        if self.stem_channels is None:
            return self
        if self.stem_strides != AudioConfig.model_fields["stem_strides"].default:
            raise ValueError(
                f"stem_strides ({[*self.stem_strides]}): with stem_channels there are three strides of 2; leave it out"
            )
        if self.silence not in ("unseen", "cut"):
            raise ValueError(
                f"silence ({self.silence}): convolutions along time and mels (stem_channels) take zeros after a clip; "
                "set silence: unseen or cut"
            )
        return self
