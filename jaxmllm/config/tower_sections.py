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
    """What every encoder tower has; `merge` neighbouring outputs become one language token.

    With `from`, the tower is that of a published folder: its shapes are those of the other keys, and its
    parameters are read from there.
    """

    from_: str | None = Field(None, alias="from")
    width: PositiveInt
    layers: LayerCount
    heads: PositiveInt
    mlp_width: PositiveInt
    merge: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0
    norm: Literal["rms", "layer"] = "rms"  # layer: with biases
    norm_epsilon: PositiveFloat = 1e-6
    gelu: Gelu = "tanh"  # tanh: approximated by it
    qkv_bias: bool = True  # the output always has one
    key_bias: bool = True
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
        """Projectors of one token: of what the last layer yields, and of other layers."""
        return 1

    @property
    def features_width(self) -> int:
        """Numbers of a feature, as projectors read it."""
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
    """The two matrices of a projector and what lies between them; with `linear`, there is one matrix alone.

    The features of a token are concatenated, or their mean is taken; with `norm`, what comes of that is normed.
    """

    mlp_width: PositiveInt | None = None  # none: the width of the decoder
    gelu: Gelu = "tanh"
    linear: bool = False
    bias: bool = True  # of the one matrix; two always have some
    grouping: Literal["concatenated", "mean"] = "concatenated"
    norm: Literal["layer", "rms", "zero_centred_rms"] | None = None
    norm_epsilon: PositiveFloat = 1e-6

    def inputs(self, features: int, group: int) -> int:
        """Numbers that the first matrix reads, of `group` features of so many."""
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
    """Native-resolution vision transformer; `merge` x `merge` patches become one language token.

    With `window`, layers attend inside windows of `window` x `window` patches, except `full_layers`,
    which see the whole image. With `gated_mlp`, MLPs are SwiGLU (arXiv 2002.05202) with biases.

    With `patch_frames`, a patch has weights for so many frames of a video, one after another. An image
    is such a video that stands still, so that its patches meet the sum of these weights. With `videos`, rows
    hold all frames of each patch, twice the numbers for two, and conversations may have videos.

    With `deepstack_layers` (arXiv 2406.04334), what each of these layers yields has a projector of its own,
    normed over the patches of a token; what it makes is added to the hidden states of that token after the first
    layer of the decoder, the second, and so on.

    With `class_token`, one more token with an embedding and a position of its own goes through the layers of every
    image, or of every tile of one, and leaves no feature (arXiv 2010.11929).
    """

    patch_size: PositiveInt = 14  # pixels of a side
    patch_frames: PositiveInt = 1
    videos: bool = False
    patch_bias: bool = True  # of the embedding of patches
    gated_mlp: bool = False
    last_norm: bool = True  # after all layers
    class_token: bool = False
    projector: ProjectorShapes = ProjectorShapes()
    deepstack_layers: tuple[int, ...] = ()  # counted from 0
    # Rotary; or learned, one for each place of a square grid that every image has (table), or that is
    # resampled to the image's own, bilinearly and antialiased (resampled); or rotary, and learned ones that are
    # resampled bilinearly, corner to corner (rotary_and_resampled)
    positions: Literal["rotary", "table", "resampled", "rotary_and_resampled"] = "rotary"
    position_grid: PositiveInt | None = None  # rows and columns of learned positions
    # Of the colors, black being 0 and white 1: a patch is read as (color - mean) / std
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    pixel_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.5, 0.5, 0.5)

    @property
    def patch_features(self) -> int:
        """Numbers per patch: three colors of every pixel."""
        return 3 * self.patch_size**2

    @property
    def row_frames(self) -> int:
        """Frames of a patch that rows hold; an image is the same in all of them."""
        return self.patch_frames if self.videos else 1

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp else 2

    @property
    def merged(self) -> int:
        """Tokens of attention that become one of the language."""
        return self.merge**2

    @property
    def learned_positions(self) -> int:
        """Places that have learned positions; none: 0."""
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

    The stem is two convolutions along time, of `stem_strides`; or with `stem_channels`, three along time and mels, each
    of stride 2 and with so many channels, and a matrix (arXiv 2509.17765). Then a chunk is followed by empty slots up
    to a whole token.

    A clip ends inside a chunk, and no token of what is left of the chunk reaches the decoder. `silence` says
    what the tower makes of it:

        unseen    zeros in the frames; attention does not see it
        cut       likewise, and the last frames of the clip hear silence after it
        masked    likewise, and zeros after the first convolution
        stem      frames of silence, which the convolutions hear, and attention does not see
        heard     frames of silence, which the tower hears like the clip

    Where the last of the decoder's tokens reads more than the clip has, those features are zeros.

    With `attention: chunk`, tokens see their own chunk, or `window_chunks` of them, not the whole clip. The means
    of `pool` neighbouring tokens are normed last, those of whole groups alone: what is left at the end of a clip is
    dropped.
    """

    # The width of all convolutions of the stem
    stem_kernel: ClassVar[int] = 3
    # Of those along time and mels
    plane_strides: ClassVar[tuple[int, ...]] = (2, 2, 2)

    mel_bins: PositiveInt = 80
    chunk_frames: PositiveInt = 64  # of data.audio.hop_length samples
    stem_strides: tuple[Literal[1, 2], Literal[2]] = (2, 2)
    stem_channels: PositiveInt | None = None
    # One for each place of a chunk: learned (table), or waves (sinusoidal, arXiv 1706.03762)
    positions: Literal["rotary", "table", "sinusoidal"] = "rotary"
    silence: Silence = "unseen"
    attention: Literal["clip", "chunk"] = "clip"
    window_chunks: PositiveInt = 1
    pool: PositiveInt = 1
    projector: ProjectorShapes = ProjectorShapes()

    @property
    def stem_stride(self) -> int:
        """Frames that become one token of attention."""
        return math.prod(self.stem_strides if self.stem_channels is None else self.plane_strides)

    @property
    def stem_mels(self) -> tuple[int, ...]:
        """Mels that are left after each convolution along time and mels."""
        mels = [self.mel_bins]
        for stride in self.plane_strides:
            mels.append(-(-mels[-1] // stride))
        return tuple(mels[1:])

    @property
    def stem_numbers(self) -> int:
        """Numbers per slot that convolutions along time and mels yield, all together."""
        slots = itertools.accumulate(self.plane_strides, operator.mul)
        outputs = zip(self.stem_mels, slots, strict=True)
        return (self.stem_channels or 0) * sum(-(-mels // per) for mels, per in outputs)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of attention of a chunk."""
        return -(-self.chunk_frames // self.stem_stride)

    @property
    def chunk_slots(self) -> int:
        """Slots of a row that a chunk takes: its frames, up to a whole token."""
        return self.chunk_tokens * self.stem_stride

    @property
    def seen_slots(self) -> int:
        """Slots that see one another with `attention: chunk`."""
        return self.window_chunks * self.chunk_slots

    @property
    def merged(self) -> int:
        """Tokens of attention that become one of the language."""
        return self.pool * self.merge

    @property
    def rotates(self) -> bool:
        return self.positions == "rotary"

    @property
    def learned_positions(self) -> int:
        """Places of a chunk that have learned positions; none: 0."""
        return self.chunk_tokens if self.positions == "table" else 0

    @model_validator(mode="after")
    def _check_chunk(self) -> AudioConfig:
        token = self.stem_stride * self.merged
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
