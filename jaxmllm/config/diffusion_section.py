"""Section `model.diffusion`: the generator, which draws images and clips."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from jaxmllm.config.layer_sections import (
    LayerCount,
    Layered,
    attention_matrices,
    matrices_of_mlp,
    tower_matrices,
)
from jaxmllm.config.tower_sections import ProjectorShapes

EDGE_WAVES = 8  # wavelengths that encode the distance of a patch from an edge


class DiffusionConfig(Layered):
    """A diffusion transformer that draws images and clips of frames at native size, patch by patch:
    as pixels, or as latents with `channels` channels.

    An image is drawn from states of the decoder, its conditions. With `conditioning: joint`,
    conditions and patches form one sequence. They share all weights (arXiv 2503.21758), or with
    `streams: 2` have separate weights in the layers and meet in attention only (arXiv 2403.03206).
    With `cross`, layers do not change the conditions, but read them by a second attention, between
    that of the patches and the MLP (arXiv 2310.00426).

    `modulation`: each layer computes scales, shifts and gates from the time with its own weights
    (`layer`, arXiv 2212.09748), or all layers share one result, to which each adds its own vector
    (`shared`, arXiv 2310.00426).

    With `pooled_conditions`, the mean of the conditions is added to the embedded time, and so also
    changes scales, shifts and gates (arXiv 2403.03206). The model then learns properties of whole
    pictures in fewer steps than by attention alone.

    With `edge_distances`, a patch also reads its distances from both edges of its item along every
    axis, because rotary positions alone do not tell it how large the picture is.

    With `condition_positions: time`, conditions advance along time, in row and column 0, and the
    patches begin at the time after them. With `diagonal`, conditions advance along all axes at
    once, from the first number that follows all rows and columns of the patches
    (arXiv 2508.02324).

    With `padded_conditions`, an item has at least that many conditions, as if its text had been
    padded: missing ones are zeros.

    With `from`, the transformer comes from a published folder: its parameters are read from there,
    and keys of its shapes that are left out are filled in from there. The others must equal the
    folder's. With `projector: folder`, `projector.language` is read from there too.
    """

    from_: str | None = Field(None, alias="from")
    projector: Literal["new", "folder"] = "new"
    projector_layers: Literal["mlp", "normed_linear"] = "mlp"  # form of projector.language
    conditioning: Literal["joint", "cross"] = "joint"
    streams: Literal[1, 2] = 1  # sets of weights in a layer
    pooled_conditions: bool = False
    padded_conditions: PositiveInt | None = None
    width: PositiveInt
    layers: LayerCount
    heads: PositiveInt
    mlp_width: PositiveInt
    channels: PositiveInt | None = None  # of the latents; none: pixels of three colors are drawn
    patch_size: PositiveInt = 16  # side of a patch, in pixels, or in numbers of a latent channel
    patch_frames: PositiveInt = 1  # frames of a patch
    edge_distances: bool = False
    modulation: Literal["shared", "layer"] = "layer"
    # How scale and shift of the output are made: from the time with weights, or as the embedded
    # time plus learned vectors
    output_modulation: Literal["weights", "vectors"] = "weights"
    norm: Literal["rms", "layer"] = "rms"  # layer: without parameters where the time modulates
    attention_bias: bool = False
    qk_norm: bool = True
    qk_norm_over: Literal["head", "heads"] = "head"  # over each head, or over all heads together
    rope_theta: PositiveFloat = 10_000.0
    # Rotary pairs of the (time, height, width) axes; none: 1/4, 3/8, 3/8
    rope_sections: tuple[int, int, int] | None = None
    rope_origin: Literal["corner", "centre"] = "corner"  # where rows and columns are 0
    condition_positions: Literal["time", "diagonal"] = "time"
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
        """Numbers that encode a patch's distances: cosine and sine of each wave, for two edges
        along three axes; 0 without `edge_distances`."""
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
        matrices = tower_matrices(self.width, self.mlp_width)
        widths = (self.width, self.width, self.width)
        if self.conditioning == "cross":
            matrices |= attention_matrices(*widths, "cross_attention")
        if self.streams == 2:
            matrices |= attention_matrices(*widths, "conditions.attention")
            matrices |= matrices_of_mlp(
                self.width, self.mlp_width, gated=False, part="conditions.mlp"
            )
        return matrices

    @property
    def projector_shapes(self) -> ProjectorShapes:
        """Shapes of `projector.language`, which reads states of the decoder."""
        if self.projector_layers == "mlp":
            return ProjectorShapes()
        return ProjectorShapes(linear=True, norm="rms", norm_epsilon=self.norm_epsilon)

    @property
    def attentions(self) -> int:
        """Number of attentions in a layer."""
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
        if self.conditioning == "cross":
            self._check_cross_keys()
        if self.streams == 2 and self.modulation == "shared":
            raise ValueError(
                "modulation (shared): with streams: 2 layers have weights of their own for patches and for conditions; "
                "leave it out"
            )
        if not self.qk_norm and self.qk_norm_over != "head":
            raise ValueError(
                f"qk_norm_over ({self.qk_norm_over}): without qk_norm nothing is normed; leave it out"
            )
        return self

    def _check_cross_keys(self) -> None:
        for key in ("rope_origin", "condition_positions"):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} ({value}): with conditioning: cross no position is told from another but "
                    "those of an item's patches, so that it changes nothing; leave it out"
                )
        if self.streams == 2:
            raise ValueError(
                "streams (2): with conditioning: cross layers change no conditions, and have nothing else of their own "
                "for them; leave it out, or set conditioning: joint"
            )

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
