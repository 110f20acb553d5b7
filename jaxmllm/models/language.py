"""The decoder, over packed rows of text and routed media tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import TokenIds
from jaxmllm.config.schema import ComponentConfig, LanguageConfig
from jaxmllm.models.layers import (
    Block,
    GatedMLP,
    RowContext,
    SelfAttention,
    loop_over_layers,
    row_keys,
    run_stack,
    stacked,
)
from jaxmllm.models.mixture import MixtureBlock, RouterSums
from jaxmllm.models.norms import NORMS
from jaxmllm.models.products import parameter
from jaxmllm.models.rotary import Rotation, rotary_angles
from jaxmllm.models.rows import LanguageRows
from sharding.parameters import Deferred, looked_up
from sharding.rules import Axes, Layout


def rope_sections(config: LanguageConfig) -> tuple[int, int, int]:
    """Rotary pairs of the (time, height, width) axes; by default 1/4, 3/8, 3/8
    (arXiv 2409.12191)."""
    if config.rope_sections is not None:
        return config.rope_sections
    pairs = config.head_size // 2
    spatial = 3 * pairs // 8
    return pairs - 2 * spatial, spatial, spatial


def decoder_block(config: LanguageConfig, rngs: nnx.Rngs) -> Block | MixtureBlock:
    """A decoder layer: causal grouped-query attention, and a gated MLP or a mixture of them."""
    norm = NORMS[config.norm]
    attention = SelfAttention(
        rngs,
        config.width,
        config.heads,
        config.kv_heads,
        config.head_size,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm=config.qk_norm,
        epsilon=config.norm_epsilon,
        norm=norm,
        scale=config.attention_scale,
    )
    if config.experts is not None:
        return MixtureBlock(
            rngs, config.width, config.norm_epsilon, attention, config.mlp_width, config.experts
        )
    mlp = GatedMLP(rngs, config.width, config.mlp_width, config.activation)
    return Block(config.width, config.norm_epsilon, attention, mlp, norm, config.post_norms)


class OutputHead(NamedTuple):
    """The matrix that turns hidden states into logits, for use inside traced functions.

    It keeps the parameter's order of axes, because a transposed table would be a second copy.
    """

    matrix: Float[Array, "D V"] | Float[Array, "V D"] | Deferred
    axes: Axes  # "embed" and "vocab", in the matrix's order


class Decoder(nnx.Module):
    """Embedding, causal transformer, head. Attention never leaves an example's segment."""

    def __init__(self, config: LanguageConfig, vocab_size: int, rngs: nnx.Rngs):
        self.config = config
        # Small entries: a tied head then starts with logits of unit size, and the first norm sets
        # the scale anyway.
        self.embedding = parameter(
            rngs,
            (vocab_size, config.width),
            ("vocab", "embed"),
            config.width,
            looked_up=not config.tie_embeddings,
        )
        self.layers = stacked(lambda rngs: decoder_block(config, rngs), config.layers, rngs)
        self.norm = NORMS[config.norm](config.width, config.norm_epsilon)
        self.head = (
            None
            if config.tie_embeddings
            else parameter(rngs, (config.width, vocab_size), ("embed", "vocab"), config.width)
        )

    def embed(
        self, tokens: Int[Array, "R C"], layout: Layout, dtype: jnp.dtype
    ) -> Float[Array, "R C D"]:
        table = self.embedding
        embedded = looked_up(layout, table[...], table.axes, tokens, dtype)
        if self.config.scale_embedding:  # the factor is rounded to `dtype`, too
            embedded = embedded * jnp.asarray(self.config.width**0.5, dtype)
        return layout.constrain(embedded, ("batch", "sequence", None))

    def output_head(self) -> OutputHead:
        """The head, which the loss gathers and applies chunk by chunk."""
        matrix = self.embedding if self.head is None else self.head
        return OutputHead(matrix[...], matrix.axes)

    def __call__(
        self,
        x: Float[Array, "R C D"],
        rows: LanguageRows,
        layout: Layout,
        settings: ComponentConfig,
        added: Float[Array, "N R C D"] | None = None,
    ) -> tuple[Float[Array, "R C D"], RouterSums | None]:
        """Embedded rows -> normed hidden states, and sums over their routing [R, L, ...] where
        there are experts.

        Args:
          added: what is added after each of the first N layers.
        """
        context = replace(self.context(rows, layout, x.dtype, settings), added=added)
        how = context, settings.remat, self.config.windowed
        if isinstance(self.layers, Block):
            return self.normed(run_stack(self.layers, x, *how)), None
        x, _, by_layer = loop_over_layers(
            lambda block, x, rows: block(x, rows), self.layers, x, *how
        )
        sums: RouterSums = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), by_layer)
        return self.normed(x), sums

    def normed(self, x: Float[Array, "R C D"]) -> Float[Array, "R C D"]:
        """Output of the last layer -> normed hidden states."""
        return self.norm(x)

    def context(
        self, rows: LanguageRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> RowContext:
        """What all layers know of the rows; depends on no parameters."""
        config = self.config
        positions = rows.positions, rope_sections(config)
        interleaved = config.rope_interleaved
        angles = rotary_angles(
            *positions, config.rope_theta, dtype, config.rope_scaling, interleaved
        )
        multiplier = config.rope_scaling.multiplier if config.rope_scaling else 1.0
        ids = TokenIds(rows.segments, rows.groups, rows.order)
        rotation = Rotation.of(angles, multiplier)
        windows = None
        window_rotation = None
        if rows.window_tiles is not None:
            narrow = ids.within(config.window)
            windows = narrow, row_keys(layout, narrow), rows.window_tiles
            ids = ids.within(None)  # for layers of both kinds, arrays must have the same shapes
            if config.window_rope_theta is not None:
                angles = rotary_angles(
                    *positions, config.window_rope_theta, dtype, interleaved=interleaved
                )
                window_rotation = Rotation.of(angles, multiplier)
        documents = None
        if rows.runs is not None:
            documents = Documents(rows.runs, causal=True, window=config.window)
        return RowContext(
            layout=layout,
            ids=ids,
            keys=row_keys(layout, ids),
            tiles=rows.tiles,
            rotation=rotation,
            kernel=settings.attention,
            windows=windows,
            window_rotation=window_rotation,
            experts=settings.experts,
            documents=documents,
        )
