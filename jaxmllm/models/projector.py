"""Projectors: `group` neighbouring features of a tower -> one language token."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxmllm.config.schema import ProjectorShapes
from jaxmllm.models.layers import MLP, affine, bias, parameter
from sharding.rules import Layout

USUAL = ProjectorShapes()


class Projector(nnx.Module):
    """An MLP, or one matrix, over concatenated features. Neighbours are contiguous: rows hold images merge-group by
    merge-group."""

    def __init__(
        self,
        features: int,
        group: int,
        width: int,
        rngs: nnx.Rngs,
        shapes: ProjectorShapes = USUAL,
    ):
        self.group = group
        inputs = group * features
        if shapes.linear:
            self.mlp = None
            self.linear = parameter(rngs, (inputs, width), ("embed", None), inputs)
            self.linear_bias = bias((width,), (None,))
        else:
            self.mlp = MLP(rngs, inputs, shapes.mlp_width or width, width, shapes.gelu)

    def __call__(self, features: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C/g O"]:
        ranks, slots, width = features.shape
        grouped = features.reshape(ranks, slots // self.group, self.group * width)
        grouped = layout.constrain(grouped, ("batch", "sequence", None))
        if self.mlp is not None:
            return self.mlp(grouped, layout)
        tokens = affine(grouped, self.linear, self.linear_bias, layout)
        return layout.constrain(tokens, ("batch", "sequence", None))
