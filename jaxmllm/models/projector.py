"""Projectors: `group` neighbouring features of a tower -> one language token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmllm.config.schema import ProjectorShapes, VisionConfig
from jaxmllm.models.layers import MLP, stacked
from jaxmllm.models.norms import NORMS
from jaxmllm.models.products import affine, bias, parameter
from sharding.rules import Layout

USUAL = ProjectorShapes()


class Projector(nnx.Module):
    """An MLP or one matrix over the concatenated features of a group or their mean, which may be
    normed first. The features of a group are contiguous: rows hold images group by group."""

    def __init__(
        self,
        features: int,
        group: int,
        width: int,
        rngs: nnx.Rngs,
        shapes: ProjectorShapes = USUAL,
    ):
        self.group = group
        self.takes_mean = shapes.grouping == "mean"
        inputs = shapes.inputs(features, group)
        self.norm = NORMS[shapes.norm](inputs, shapes.norm_epsilon) if shapes.norm else None
        if shapes.linear:
            self.mlp = None
            self.linear = parameter(rngs, (inputs, width), ("embed", None), inputs)
            self.linear_bias = bias((width,), (None,)) if shapes.bias else None
        else:
            self.mlp = MLP(rngs, inputs, shapes.mlp_width or width, width, shapes.gelu)

    def __call__(self, features: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C/g O"]:
        join = _mean if self.takes_mean else _joined_groups
        grouped = join(features, self.group, layout)
        if self.norm is not None:
            grouped = self.norm(grouped)
        if self.mlp is not None:
            return self.mlp(grouped, layout)
        tokens = affine(grouped, self.linear, self.linear_bias, layout)
        return layout.constrain(tokens, ("batch", "sequence", None))


class NormedProjector(nnx.Module):
    """A norm over concatenated features, and an MLP. The features are already grouped."""

    def __init__(self, config: VisionConfig, width: int, rngs: nnx.Rngs):
        features = config.merge**2 * config.width
        shapes = config.projector
        self.norm = NORMS[config.norm](features, config.norm_epsilon)
        self.mlp = MLP(rngs, features, shapes.mlp_width or width, width, shapes.gelu)

    def __call__(self, grouped: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C O"]:
        return self.mlp(self.norm(grouped), layout)


class DeepstackProjector(Projector):
    """A projector for the output of a tower's last layer, and a `NormedProjector` for the output of
    each of N `deepstack_layers`. The N + 1 tokens are concatenated to one, N + 1 times as wide."""

    def __init__(self, config: VisionConfig, width: int, rngs: nnx.Rngs):
        super().__init__(config.width, config.merge**2, width, rngs, config.projector)
        self.depth = len(config.deepstack_layers)
        self.deepstack = stacked(
            lambda rngs: NormedProjector(config, width, rngs), self.depth, rngs
        )

    def __call__(
        self, features: Float[Array, "R C (N+1)*D"], layout: Layout
    ) -> Float[Array, "R C/g (N+1)*O"]:
        of_last_layer, *tapped = jnp.split(features, 1 + self.depth, axis=-1)
        graph, parameters = nnx.split(self.deepstack)

        def project(_: None, layer: tuple[Any, Array]) -> tuple[None, Array]:
            parameters, grouped = layer
            return None, nnx.merge(graph, parameters)(grouped, layout)

        grouped = jnp.stack([_joined_groups(of_layer, self.group, layout) for of_layer in tapped])
        _, tokens = jax.lax.scan(project, None, (parameters, grouped))
        return jnp.concatenate([super().__call__(of_last_layer, layout), *tokens], axis=-1)


def vision_projector(config: VisionConfig, width: int, rngs: nnx.Rngs) -> Projector:
    """The projector of a vision tower, to tokens for a decoder of this width."""
    if config.deepstack_layers:
        return DeepstackProjector(config, width, rngs)
    return Projector(config.width, config.merge**2, width, rngs, config.projector)


def _joined_groups(
    features: Float[Array, "R C D"], group: int, layout: Layout
) -> Float[Array, "R C/g g*D"]:
    """Groups of neighbouring features, concatenated."""
    ranks, slots, width = features.shape
    grouped = features.reshape(ranks, slots // group, group * width)
    return layout.constrain(grouped, ("batch", "sequence", None))


def _mean(features: Float[Array, "R C D"], group: int, layout: Layout) -> Float[Array, "R C/g D"]:
    """Means of groups of neighbouring features."""
    ranks, slots, width = features.shape
    mean = features.reshape(ranks, slots // group, group, width).mean(axis=2)
    return layout.constrain(mean, ("batch", "sequence", None))
