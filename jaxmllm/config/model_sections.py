"""Section `model`: the parts of what is trained, and their shapes."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxmllm.config.adapter_sections import AdaptersConfig
from jaxmllm.config.component_sections import PROJECTOR
from jaxmllm.config.rotary_scaling import RotaryScaling
from jaxmllm.config.section import Auto, Section

Gelu = Literal["tanh", "exact"]  # tanh: approximated by it
Activation = Literal["silu", "gelu_tanh"]  # of a gated MLP


class LayerWindows(Section):
    """Which layers attend in windows: with `window`, all but `full_layers`."""

    layers: PositiveInt
    window: PositiveInt | None = None
    full_layers: tuple[int, ...] = ()  # counted from 0

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer attends in windows."""
        if self.window is None:
            return (False,) * self.layers
        return tuple(layer not in self.full_layers for layer in range(self.layers))

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.window is None and self.full_layers:
            raise ValueError(
                f"full_layers {list(self.full_layers)} need a window; without one, all layers are full"
            )
        if outside := [layer for layer in self.full_layers if not 0 <= layer < self.layers]:
            raise ValueError(f"full_layers names {outside}, but layers are 0 .. {self.layers - 1}")
        if self.window is not None and not any(self.windowed):
            raise ValueError(
                f"full_layers names all layers, so that window ({self.window}) changes nothing; unset both"
            )
        return self


class ExpertsConfig(Section):
    """A mixture of experts in place of the MLP of every layer: a token goes through the `per_token` of
    `count` experts that the router's softmax gives most, whose shares are their weights.

    With `renormalise`, the weights of a token add up to 1. No expert is ever full, and no token dropped.
    """

    count: PositiveInt
    per_token: PositiveInt
    renormalise: bool = False

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        if self.per_token > self.count:
            raise ValueError(
                f"per_token ({self.per_token}): a token cannot choose more than all experts, count ({self.count})"
            )
        return self


EDGE_WAVES = 8  # of the distance of a patch from an edge
DENSE_CHOICES = (  # of decoders without experts
    "window_rope_theta",
    "attention_scale",
    "activation",
    "norm",
    "post_norms",
    "scale_embedding",
)


class LanguageConfig(LayerWindows):
    """A decoder with grouped-query attention, RMS norms and gated MLPs, or experts that are such MLPs.

    With `window`, a token sees itself and the `window` - 1 tokens before it in its example, except in
    `full_layers`, where it sees all before it. Media see their whole item in layers of both kinds.

    `rope_sections` are the (time, height, width) shares of the rotary pairs of one head (M-RoPE,
    arXiv 2409.12191); they add up to head_size / 2, one section after another. With `rope_interleaved`
    the axes take turns pair by pair, until height and width have theirs (arXiv 2511.21631). With
    `window_rope_theta`, layers that attend in windows rotate by frequencies of their own, which
    `rope_scaling` leaves as they are.
    """

    vocab_size: PositiveInt | Auto = "auto"
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    mlp_width: PositiveInt  # with `experts`, of each of them
    experts: ExpertsConfig | None = None
    rope_theta: PositiveFloat = 10_000.0
    rope_sections: tuple[int, int, int] | None = None
    rope_interleaved: bool = False
    rope_scaling: RotaryScaling | None = None
    window_rope_theta: PositiveFloat | None = None  # none: that of all layers
    attention_scale: PositiveFloat | None = None  # factor on logits; none: head_size ** -0.5
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False  # of attention
    qk_norm: bool = False
    norm: Literal["rms", "zero_centred_rms"] = "rms"  # zero-centred: multiplies by 1 + scale
    post_norms: bool = False  # also of what attention and MLP add
    scale_embedding: bool = False  # that of text, by sqrt(width)
    tie_embeddings: bool = False
    norm_epsilon: PositiveFloat = 1e-6
    loss_chunk: PositiveInt = 512  # tokens whose logits exist at one time, at most
    # Media whose tokens see their whole item; all else is causal.
    bidirectional: tuple[Literal["vision", "audio"], ...] = ("vision", "audio")

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: it is gated."""
        return 3

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of every layer that can have adapters, those of experts not: see adapter_sections.py."""
        heads, kv_heads = (count * self.head_size for count in (self.heads, self.kv_heads))
        attention = _attention_matrices(self.width, heads, kv_heads)
        if self.experts is not None:
            return attention
        return attention | _mlp_matrices(self.width, self.mlp_width, gated=True)

    @model_validator(mode="after")
    def _check(self) -> LanguageConfig:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        pairs, odd = divmod(self.head_size, 2)
        if odd:
            raise ValueError(
                f"head_size ({self.head_size}) must be even: rotary positions rotate pairs"
            )
        if self.rope_sections is not None and sum(self.rope_sections) != pairs:
            raise ValueError(
                f"rope_sections {self.rope_sections} must add up to head_size / 2 = {pairs}"
            )
        self._check_interleaved(pairs)
        self._check_window_rotation()
        self._check_choices_beside_experts()
        return self

    def _check_interleaved(self, pairs: int) -> None:
        if not self.rope_interleaved:
            return
        if self.rope_sections is None:
            raise ValueError("rope_interleaved: it orders rope_sections; set them, or leave it out")
        last = (axis + 3 * (count - 1) for axis, count in enumerate(self.rope_sections) if axis)
        if max(last) >= pairs:
            raise ValueError(
                f"rope_sections {self.rope_sections}: with rope_interleaved every third of {pairs} pairs is of "
                "height, and of width; they must not have more than there are"
            )

    def _check_choices_beside_experts(self) -> None:
        if self.experts is None:
            return
        for key in DENSE_CHOICES:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} ({value}): a decoder with experts runs without it; leave it out"
                )

    def _check_window_rotation(self) -> None:
        if self.window_rope_theta is None:
            return
        what = f"window_rope_theta ({self.window_rope_theta:g})"
        if self.window is None:
            raise ValueError(f"{what}: no layer attends in windows; set window, or leave it out")
        if self.rope_scaling is not None and self.rope_scaling.multiplier != 1.0:
            raise ValueError(
                f"{what}: rope_scaling (kind {self.rope_scaling.kind!r}) also multiplies queries and keys, which "
                "layers that attend in windows would not; set rope_scaling.attention_factor: 1.0, or leave it out"
            )


class TowerConfig(Section):
    """What every encoder tower has; `merge` neighbouring outputs become one language token.

    With `from`, the tower is that of a published folder: its shapes are those of the other keys, and its
    parameters are read from there.
    """

    from_: str | None = Field(None, alias="from")
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    merge: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0
    norm: Literal["rms", "layer"] = "rms"  # layer: with biases
    norm_epsilon: PositiveFloat = 1e-6
    gelu: Gelu = "tanh"
    key_bias: bool = True  # queries, values and the output always have one

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 2

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of every layer that can have adapters: see adapter_sections.py."""
        return _tower_matrices(self.width, self.mlp_width, gated=self.mlp_matrices == 3)

    def _check_not_rotary(self, positions: str) -> None:
        if self.rope_theta != TowerConfig.model_fields["rope_theta"].default:
            raise ValueError(
                f"rope_theta ({self.rope_theta:g}): {positions} positions are not rotary; leave it out"
            )

    @model_validator(mode="after")
    def _check_heads(self) -> TowerConfig:
        if self.width % (self.heads * 4):
            raise ValueError(
                f"width ({self.width}) must be a multiple of 4 * heads ({self.heads}): two rotary axes of pairs"
            )
        return self


class ProjectorShapes(Section):
    """The two matrices of a projector and what lies between them; with `linear`, there is one matrix alone."""

    mlp_width: PositiveInt | None = None  # none: the width of the decoder
    gelu: Gelu = "tanh"
    linear: bool = False

    @model_validator(mode="after")
    def _check_linear(self) -> ProjectorShapes:
        for key in ("mlp_width", "gelu"):
            value = getattr(self, key)
            if self.linear and value != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({value}): a linear projector has no MLP; leave it out")
        return self


class VisionConfig(LayerWindows, TowerConfig):
    """Native-resolution vision transformer; `merge` x `merge` patches become one language token.

    With `window`, layers attend inside windows of `window` x `window` patches, except `full_layers`,
    which see the whole image. With `gated_mlp`, MLPs are SwiGLU (arXiv 2002.05202) with biases.

    With `patch_frames`, a patch has weights for so many frames of a video, one after another. An image
    is such a video that stands still, so that its patches meet the sum of these weights.

    With `deepstack_layers` (arXiv 2406.04334), what each of these layers yields has a projector of its own,
    normed over the patches of a token; what it makes is added to the hidden states of that token after the first
    layer of the decoder, the second, and so on.
    """

    patch_size: PositiveInt = 14
    patch_frames: PositiveInt = 1
    patch_bias: bool = True
    gated_mlp: bool = False
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
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp else 2

    @property
    def merged(self) -> int:
        """Tokens of attention that become one of the language."""
        return self.merge**2

    @property
    def learned_positions(self) -> int:
        """Places of the grid of learned positions; none: 0."""
        return (self.position_grid or 0) ** 2

    @property
    def rotates(self) -> bool:
        """Whether layers rotate queries and keys."""
        return self.positions in ("rotary", "rotary_and_resampled")

    @property
    def resamples(self) -> bool:
        """Whether learned positions are resampled to the grid of each image."""
        return self.positions in ("resampled", "rotary_and_resampled")

    @property
    def features_width(self) -> int:
        """Numbers of a feature, as projectors read it: those of the last layer, and of `deepstack_layers`."""
        return (1 + len(self.deepstack_layers)) * self.width

    @model_validator(mode="after")
    def _check_mlp(self) -> VisionConfig:
        if self.gated_mlp and self.gelu != TowerConfig.model_fields["gelu"].default:
            raise ValueError(
                f"gelu ({self.gelu}): with gated_mlp the activation is SiLU; leave it out"
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
        if [*layers] != sorted({*layers}) or not all(0 <= layer < self.layers for layer in layers):
            raise ValueError(
                f"deepstack_layers {[*layers]} must be layers 0 .. {self.layers - 1} in ascending order, each once"
            )
        return self


class AudioConfig(TowerConfig):
    """Log-mel encoder: a convolutional stem inside chunks of `chunk_frames` frames, then the tower.

    A clip ends inside a chunk, and no token of what is left of the chunk reaches the decoder. `silence` says
    what the tower makes of it:

        unseen    zeros in the frames; attention does not see it
        masked    likewise, and zeros after the first convolution
        stem      frames of silence, which the convolutions hear, and attention does not see
        heard     frames of silence, which the tower hears like the clip

    With `attention: chunk`, tokens see their own chunk, not the whole clip. The means of `pool` neighbouring
    tokens are normed last, those of whole groups alone: what is left at the end of a clip is dropped.
    """

    # The stem is two convolutions of this kernel width
    stem_kernel: ClassVar[int] = 3

    mel_bins: PositiveInt = 80
    chunk_frames: PositiveInt = 64
    stem_strides: tuple[Literal[1, 2], Literal[2]] = (2, 2)
    # One for each place of a chunk: learned (table), or waves (sinusoidal, arXiv 1706.03762)
    positions: Literal["rotary", "table", "sinusoidal"] = "rotary"
    silence: Literal["unseen", "masked", "stem", "heard"] = "unseen"
    attention: Literal["clip", "chunk"] = "clip"
    pool: PositiveInt = 1
    projector: ProjectorShapes = ProjectorShapes()

    @property
    def stem_stride(self) -> int:
        """Frames that become one token of attention."""
        return math.prod(self.stem_strides)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of attention of a chunk."""
        return self.chunk_frames // self.stem_stride

    @property
    def merged(self) -> int:
        """Tokens of attention that become one of the language."""
        return self.pool * self.merge

    @property
    def learned_positions(self) -> int:
        """Places of a chunk that have learned positions; none: 0."""
        return self.chunk_tokens if self.positions == "table" else 0

    @model_validator(mode="after")
    def _check_chunk(self) -> AudioConfig:
        token = self.stem_stride * self.merged
        if self.chunk_frames % token:
            raise ValueError(
                f"chunk_frames ({self.chunk_frames}) must be a multiple of {self.stem_stride} * pool * merge ({token})"
            )
        if self.positions != "rotary":
            self._check_not_rotary(self.positions)
        if self.attention == "chunk" and self.silence == "heard":
            raise ValueError(
                f"silence ({self.silence}): with attention (chunk), the last chunk of a clip sees itself alone; set "
                "silence: unseen, masked or stem"
            )
        return self


class DiffusionConfig(Section):
    """A diffusion transformer that draws images and clips of frames, patch by patch at native size: pixels, or
    latents of so many `channels`.

    What an image is drawn from are states of the decoder, its conditions. With `conditioning: joint` they are one
    sequence with its patches, and share all weights (arXiv 2503.21758). With `cross`, layers read them by attention
    of its own, between that of the patches and the MLP (arXiv 2310.00426), and do not change them.

    `modulation`: each layer makes scales, shifts and gates of the time with weights of its own (`layer`,
    arXiv 2212.09748), or all take the same and add a vector of their own (`shared`, arXiv 2310.00426).

    With `pooled_conditions`, their mean is added to the embedded time, and so moves scales, shifts and gates, too
    (arXiv 2403.03206): what a whole picture has is learned from it in fewer steps than by attention alone.

    With `edge_distances`, a patch reads how far it is from the edges of its item, too, before and behind along every
    axis: rotary positions alone tell no patch how large a picture is.

    With `padded_conditions`, an item is drawn from so many states at least, as where texts were padded in training:
    those that it lacks are zeros.

    With `from`, the transformer is that of a published folder: its shapes are those of the other keys, and its
    parameters are read from there, with `projector: folder` also those of `projector.language`.
    """

    from_: str | None = Field(None, alias="from")
    projector: Literal["new", "folder"] = "new"
    conditioning: Literal["joint", "cross"] = "joint"
    pooled_conditions: bool = False
    padded_conditions: PositiveInt | None = None
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    mlp_width: PositiveInt
    channels: PositiveInt | None = None  # of latents; none: pixels of three colors
    patch_size: PositiveInt = 16  # pixels, or numbers of a channel, of a patch's side
    patch_frames: PositiveInt = 1  # frames of a patch
    edge_distances: bool = False
    modulation: Literal["shared", "layer"] = "layer"
    # What scales and shifts the output: made of the time with weights, or the embedded time and vectors added to it
    output_modulation: Literal["weights", "vectors"] = "weights"
    norm: Literal["rms", "layer"] = "rms"  # layer: without parameters where the time modulates
    attention_bias: bool = False
    qk_norm: bool = True
    qk_norm_over: Literal["head", "heads"] = "head"  # heads: over all of them together
    rope_theta: PositiveFloat = 10_000.0
    # Rotary pairs of the (time, height, width) axes; none: 1/4, 3/8, 3/8
    rope_sections: tuple[int, int, int] | None = None
    rope_origin: Literal["corner", "centre"] = "corner"  # from where rows and columns are counted
    norm_epsilon: PositiveFloat = 1e-6

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def patch_features(self) -> int:
        """Numbers per patch."""
        return (self.channels or 3) * self.patch_frames * self.patch_size**2

    @property
    def edge_features(self) -> int:
        """Numbers that tell a patch its distances: cosine and sine of waves, of two edges along three axes."""
        return 2 * EDGE_WAVES * 2 * 3 if self.edge_distances else 0

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rotary pairs of the (time, height, width) axes."""
        if self.rope_sections is not None:
            return self.rope_sections
        pairs = self.head_size // 2
        spatial = 3 * pairs // 8
        return pairs - 2 * spatial, spatial, spatial

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 2

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of every layer that can have adapters: see adapter_sections.py."""
        matrices = _tower_matrices(self.width, self.mlp_width)
        if self.conditioning == "cross":
            matrices |= _attention_matrices(self.width, self.width, self.width, "cross_attention")
        return matrices

    @property
    def attentions(self) -> int:
        """Attentions of a layer."""
        return 2 if self.conditioning == "cross" else 1

    @model_validator(mode="after")
    def _check_conditioning(self) -> DiffusionConfig:
        if self.from_ is None and self.projector != "new":
            raise ValueError(
                f"projector ({self.projector}): without from there is no folder to read it from; leave it out"
            )
        if self.conditioning == "joint" and self.padded_conditions is not None:
            raise ValueError(
                f"padded_conditions ({self.padded_conditions}): with conditioning: joint an item has the states of its "
                "text alone; leave it out, or set conditioning: cross"
            )
        if self.conditioning == "cross" and self.rope_origin != "corner":
            raise ValueError(
                f"rope_origin ({self.rope_origin}): with conditioning: cross no position is told from another but "
                "those of an item's patches, so that it changes nothing; leave it out"
            )
        if not self.qk_norm and self.qk_norm_over != "head":
            raise ValueError(
                f"qk_norm_over ({self.qk_norm_over}): without qk_norm nothing is normed; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_sections(self) -> DiffusionConfig:
        pairs = self.head_size // 2
        sections = self.rope_sections
        if sections is not None and (sum(sections) != pairs or min(sections) < 0):
            raise ValueError(
                f"rope_sections {sections} must add up to half of width / heads = {pairs}, and be at least 0"
            )
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> DiffusionConfig:
        if self.width % (self.heads * 2) or self.head_size < 8:
            raise ValueError(
                f"width ({self.width}) must be a multiple of 2 * heads ({self.heads}), with at least 8 numbers "
                "in a head: three rotary axes of pairs"
            )
        return self


class ModelConfig(Section):
    """The composition: any subset of encoders over the decoder, and a generator that reads its states.

    With `from`, parameters come from another run (its folder: the latest checkpoint) or checkpoint,
    component by component; its optimizer and step are not taken along.
    """

    from_: str | None = Field(None, alias="from")
    language: LanguageConfig
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    diffusion: DiffusionConfig | None = None
    adapters: AdaptersConfig = AdaptersConfig()

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoder phases present, in the order used everywhere."""
        return tuple(name for name in ("vision", "audio") if getattr(self, name) is not None)

    @property
    def deepstack_depth(self) -> int:
        """Layers of the decoder after which something of a tower is added."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def token_width(self) -> int:
        """Numbers of a token on its way from an encoder to the decoder: what the first layer reads, and what is
        added after `deepstack_depth` layers."""
        return (1 + self.deepstack_depth) * self.language.width

    def carried_width(self, phase: str) -> int:
        """Numbers of a slot that go from layer to layer in stages: what layers read and yield, and what deepstack
        takes of towers or adds to the decoder."""
        section = getattr(self, phase)
        if isinstance(section, LanguageConfig):
            return self.token_width
        width: int = getattr(section, "features_width", section.width)
        return width

    @property
    def tower_sources(self) -> dict[str, str]:
        """Published folders that encoders and generators are read from, by component."""
        sources = {name: getattr(self, name).from_ for name in (*self.encoders, *self.generators)}
        if self.diffusion is not None and self.diffusion.projector == "folder":
            sources[f"{PROJECTOR}language"] = self.diffusion.from_
        return {name: source for name, source in sources.items() if source is not None}

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of all phases, which are also sections here, in the order of computation."""
        return (*self.encoders, "language", *self.generators)

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the phases that read the decoder's states."""
        return () if self.diffusion is None else ("diffusion",)

    @property
    def crossed(self) -> dict[str, int]:
        """Phases whose layers attend to conditions apart, and how many of these an item has at least."""
        sections = {phase: getattr(self, phase) for phase in self.generators}
        return {
            phase: section.padded_conditions or 0
            for phase, section in sections.items()
            if section.conditioning == "cross"
        }

    @property
    def windows(self) -> dict[str, LayerWindows]:
        """The attention windows of phases whose layers have any."""
        sections = {phase: getattr(self, phase) for phase in self.phases}
        return {
            phase: section
            for phase, section in sections.items()
            if getattr(section, "window", None) is not None
        }

    @model_validator(mode="after")
    def _check_deepstack(self) -> Self:
        depth, key = self.deepstack_depth, "vision.deepstack_layers"
        if depth > self.language.layers:
            raise ValueError(
                f"{key}: {depth} layers, but the decoder has {self.language.layers} after which they are added"
            )
        if depth and self.diffusion is not None:
            raise ValueError(
                f"{key}: tokens of a model with model.diffusion have the width of the decoder; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        for name, adapter in self.adapters.by_component.items():
            section = getattr(self, name)
            if section is None:
                raise ValueError(
                    f"adapters.{name}: there is no model.{name} to adapt; leave it out, or add that section"
                )
            adapter.check(name, section.matrices)
        return self


def _attention_matrices(
    width: int, heads: int, kv_heads: int, part: str = "attention"
) -> dict[str, tuple[int, int]]:
    """Those of attention; `heads` and `kv_heads` are the widths of all heads together."""
    matrices = {
        "query": (width, heads),
        "key": (width, kv_heads),
        "value": (width, kv_heads),
        "out": (heads, width),
    }
    return _in_layers(part, matrices)


def _mlp_matrices(width: int, mlp_width: int, gated: bool) -> dict[str, tuple[int, int]]:
    """Those of an MLP."""
    inner = ("gate", "up") if gated else ("up",)
    mlp = dict.fromkeys(inner, (width, mlp_width)) | {"down": (mlp_width, width)}
    return _in_layers("mlp", mlp)


def _tower_matrices(width: int, mlp_width: int, gated: bool = False) -> dict[str, tuple[int, int]]:
    """Those of towers, whose heads are as wide as they are."""
    return _attention_matrices(width, width, width) | _mlp_matrices(width, mlp_width, gated)


def _in_layers(part: str, matrices: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """With the paths that parameters of a part of every layer have."""
    return {f"layers.{part}.{name}": size for name, size in matrices.items()}
