"""Section `model.diffusion`: what draws."""

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

EDGE_WAVES = 8  # of the distance of a patch from an edge


class DiffusionConfig(Layered):
    """A diffusion transformer that draws images and clips of frames, patch by patch at native size: pixels, or
    latents of so many `channels`.

    What an image is drawn from are states of the decoder, its conditions. With `conditioning: joint` they are one
    sequence with its patches, and share all weights (arXiv 2503.21758) or, with `streams: 2`, meet in attention alone:
    conditions have all other weights of the layers for themselves (arXiv 2403.03206). With `cross`, layers read them
    by attention of its own, between that of the patches and the MLP (arXiv 2310.00426), and do not change them.

    `modulation`: each layer makes scales, shifts and gates of the time with weights of its own (`layer`,
    arXiv 2212.09748), or all take the same and add a vector of their own (`shared`, arXiv 2310.00426).

    With `pooled_conditions`, their mean is added to the embedded time, and so moves scales, shifts and gates, too
    (arXiv 2403.03206): what a whole picture has is learned from it in fewer steps than by attention alone.

    With `edge_distances`, a patch reads how far it is from the edges of its item, too, before and behind along every
    axis: rotary positions alone tell no patch how large a picture is.

    With `condition_positions: time`, conditions advance time, in row and column 0, and patches stand at the time after
    them. With `diagonal`, they stand behind the patches along all axes (arXiv 2508.02324).

    With `padded_conditions`, an item is drawn from so many states at least, as where texts were padded in training:
    those that it lacks are zeros.

    With `from`, the transformer is that of a published folder: its shapes are those of the other keys, and its
    parameters are read from there, with `projector: folder` also those of `projector.language`.
    """

    from_: str | None = Field(None, alias="from")
    projector: Literal["new", "folder"] = "new"
    projector_layers: Literal["mlp", "normed_linear"] = "mlp"  # of projector.language
    conditioning: Literal["joint", "cross"] = "joint"
    streams: Literal[1, 2] = 1  # of weights
    pooled_conditions: bool = False
    padded_conditions: PositiveInt | None = None
    width: PositiveInt
    layers: LayerCount
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
        """What `projector.language` does to states of the decoder."""
        if self.projector_layers == "mlp":
            return ProjectorShapes()
        return ProjectorShapes(linear=True, norm="rms", norm_epsilon=self.norm_epsilon)

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
        if self.conditioning == "cross":
            self._check_apart()
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

    def _check_apart(self) -> None:
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
