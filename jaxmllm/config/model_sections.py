"""Section `model`: the components of the model, and their shapes."""

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
    """A mixture of experts in place of the MLP of every layer.

    Of `count` experts, a token goes through the `per_token` ones with the highest probabilities in
    the router's softmax, and these probabilities weight their outputs. With `renormalise`, the
    weights of a token are scaled to add up to 1. No expert is ever full, and no token is dropped.
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


DENSE_CHOICES = (  # keys that only decoders without experts may set
    "window_rope_theta",
    "attention_scale",
    "activation",
    "norm",
    "post_norms",
    "scale_embedding",
)


class LanguageConfig(LayerWindows):
    """Decoder with grouped-query attention, RMS norms, and gated MLPs or a mixture of such MLPs.

    With `window`, a token sees itself and the `window` - 1 tokens before it in its example, except
    in `full_layers`, where it sees all tokens before it. Media listed in `bidirectional` see their
    whole item in layers of both kinds.

    `rope_sections` says how many of a head's rotary pairs belong to the (time, height, width) axes
    (M-RoPE, arXiv 2409.12191). The numbers add up to head_size / 2, and the pairs of an axis follow
    one another. With `rope_interleaved` the axes alternate pair by pair instead, as long as height
    and width have pairs left (arXiv 2511.21631). With `window_rope_theta`, layers that attend in
    windows have rotary frequencies of their own, which `rope_scaling` does not change.
    """

    vocab_size: PositiveInt | Auto = "auto"  # auto: the tokenizer's, rounded up to a multiple of 64
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_size: PositiveInt
    mlp_width: PositiveInt  # with `experts`, the width of each expert
    experts: ExpertsConfig | None = None
    rope_theta: PositiveFloat = 10_000.0
    rope_sections: tuple[int, int, int] | None = None
    rope_interleaved: bool = False
    rope_scaling: RotaryScaling | None = None
    window_rope_theta: PositiveFloat | None = None  # none: rope_theta, as in all layers
    attention_scale: PositiveFloat | None = None  # factor of logits; none: head_size ** -0.5
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False  # of the output projection of attention
    qk_norm: bool = False  # RMS norms of queries and keys, over each head
    norm: Literal["rms", "zero_centred_rms"] = "rms"  # zero-centred: norms multiply by 1 + scale
    post_norms: bool = False  # also norm the outputs of attention and MLP
    scale_embedding: bool = False  # multiply text embeddings by sqrt(width)
    tie_embeddings: bool = False  # the head uses the matrix of the embedding
    norm_epsilon: PositiveFloat = 1e-6
    loss_chunk: PositiveInt = 512  # most tokens whose logits are in memory at one time
    # How positions of an image's tokens count: tile, row and column (grid), or one after another as
    # in text (line)
    media_positions: Literal["grid", "line"] = "grid"
    # Media whose tokens see their whole item; all other attention is causal
    bidirectional: tuple[Literal["vision", "audio"], ...] = ("vision", "audio")

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP: three, because it is gated."""
        return 3

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of every layer that can have adapters (see adapter_sections.py). Those of
        experts cannot."""
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
    """The components of the model: a decoder, any of the encoders, and optionally a generator that
    reads the decoder's states.

    With `from`, parameters come from a run folder (its latest checkpoint), a checkpoint, or the
    folder of a published model, component by component. Optimizer states and the step count are not
    taken over.
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
        """Number of decoder layers after which features of a tower are added."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def token_width(self) -> int:
        """Numbers of a token that an encoder sends to the decoder: an input of the first layer, and
        what is added after each of the first `deepstack_depth` layers."""
        return (1 + self.deepstack_depth) * self.language.width

    def carried_width(self, phase: str) -> int:
        """Numbers of a slot that stages carry from layer to layer: the states of the layers, and
        features for deepstack that a tower has kept or that the decoder has yet to add."""
        section = getattr(self, phase)
        match section:
            case LanguageConfig():
                return self.token_width
            case TowerConfig():
                return section.features_width
        width: int = section.width
        return width

    def carried_beside(self, phase: str) -> int:
        """Numbers of a slot that stages carry beside the states of the layers: features for
        deepstack, and the conditions that the second attention of a generator reads."""
        section = getattr(self, phase)
        if isinstance(section, DiffusionConfig):
            return (section.attentions - 1) * section.width
        width: int = section.width
        return self.carried_width(phase) - width

    @property
    def tower_sources(self) -> dict[str, str]:
        """Folder of the published model that a component is read from, by component: encoders,
        generators, and the projector of the decoder's states."""
        sources = {name: getattr(self, name).from_ for name in (*self.encoders, *self.generators)}
        if self.diffusion is not None and self.diffusion.projector == "folder":
            sources[f"{PROJECTOR}language"] = self.diffusion.from_
        return {name: source for name, source in sources.items() if source is not None}

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of all phases, each also a section here, in the order of computation."""
        return (*self.encoders, "language", *self.generators)

    @property
    def generators(self) -> tuple[str, ...]:
        """Names of the phases that read the decoder's states."""
        return () if self.diffusion is None else ("diffusion",)

    @property
    def two_passes(self) -> tuple[str, ...]:
        """Names of the phases that run forward before another phase and backward after it: the
        encoders, and a decoder whose states a generator reads."""
        return (*self.encoders, "language") if self.generators else self.encoders

    @property
    def crossed(self) -> dict[str, int]:
        """Least number of conditions of an item, for each phase that reads them by a second
        attention."""
        sections = {phase: getattr(self, phase) for phase in self.generators}
        return {
            phase: section.padded_conditions or 0
            for phase, section in sections.items()
            if section.conditioning == "cross"
        }

    @property
    def windows(self) -> dict[str, LayerWindows]:
        """Sections of the phases whose layers attend in windows, by phase."""
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
