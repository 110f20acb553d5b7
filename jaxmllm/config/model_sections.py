"""Section `model`: the parts of what is trained, and their shapes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxmllm.config.adapter_sections import AdaptersConfig
from jaxmllm.config.component_sections import PROJECTOR
from jaxmllm.config.diffusion_section import DiffusionConfig
from jaxmllm.config.layer_sections import (
    Activation,
    LayerWindows,
    attention_matrices,
    matrices_of_mlp,
)
from jaxmllm.config.rotary_scaling import RotaryScaling
from jaxmllm.config.section import Auto, Section
from jaxmllm.config.tower_sections import AudioConfig, TowerConfig, VisionConfig


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

    vocab_size: PositiveInt | Auto = "auto"  # auto: the tokenizer's, rounded up to a multiple of 64
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
    qk_norm: bool = False  # RMS norms of queries and keys, by head
    norm: Literal["rms", "zero_centred_rms"] = "rms"  # zero-centred: multiplies by 1 + scale
    post_norms: bool = False  # also of what attention and MLP add
    scale_embedding: bool = False  # that of text, by sqrt(width)
    tie_embeddings: bool = False  # the head is the embedding
    norm_epsilon: PositiveFloat = 1e-6
    loss_chunk: PositiveInt = 512  # tokens whose logits exist at one time, at most
    # Those of an image's tokens: its row and column, and tile (grid), or one after another, as text has them (line)
    media_positions: Literal["grid", "line"] = "grid"
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
        attention = attention_matrices(self.width, heads, kv_heads)
        if self.experts is not None:
            return attention
        return attention | matrices_of_mlp(self.width, self.mlp_width, gated=True)

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
        sections = self.rope_sections
        if sections is not None and (sum(sections) != pairs or min(sections) < 0):
            raise ValueError(
                f"rope_sections {sections} must add up to head_size / 2 = {pairs}, and be at least 0"
            )
        if (scaling := self.rope_scaling) and scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta ({self.rope_theta:g}): with rope_scaling of kind 'yarn' it must be greater than 1"
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
        last_pairs = (
            axis + 3 * (pair_count - 1)
            for axis, pair_count in enumerate(self.rope_sections)
            if axis
        )
        if max(last_pairs) >= pairs:
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
        match section:
            case LanguageConfig():
                return self.token_width
            case TowerConfig():
                return section.features_width
        width: int = section.width
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
    def two_passes(self) -> tuple[str, ...]:
        """Names of the phases that run forward before another phase, and backward after it: encoders, and a decoder
        whose states are read."""
        return (*self.encoders, "language") if self.generators else self.encoders

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
        depth = self.deepstack_depth
        key = "vision.deepstack_layers"
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
