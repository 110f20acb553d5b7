"""Projectors: `group` neighbouring features of a tower -> one language token."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float

from jaxmllm.config.schema import ProjectorShapes
from jaxmllm.models.layers import MLP
from sharding.rules import Layout

USUAL = ProjectorShapes()


class Projector(nnx.Module):
    """MLP over concatenated features. Neighbours are contiguous: rows hold images merge-group by merge-group."""

    def __init__(
        self,
        features: int,
        group: int,
        width: int,
        rngs: nnx.Rngs,
        shapes: ProjectorShapes = USUAL,
    ):
        self.group = group
        self.mlp = MLP(rngs, group * features, shapes.mlp_width or width, width, shapes.gelu)

    def __call__(self, features: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C/g O"]:
        ranks, slots, width = features.shape
        grouped = features.reshape(ranks, slots // self.group, self.group * width)
        return self.mlp(layout.constrain(grouped, ("batch", "sequence", None)), layout)
