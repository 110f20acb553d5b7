"""The parts that all towers share: attention, MLPs, stacks of layers.

Letters: R ranks (rows), C slots of a row, D width, H heads, G key-value heads, K head size, F MLP width.
`RowContext` carries what varies from row to row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.attention.attention import attention, attention_and_logsumexp, with_repeated_key
from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import Mask, TileLists, TokenIds
from jaxmllm.config.schema import Activation, ExpertKernel, Gelu, Kernel, Remat, TowerConfig
from jaxmllm.models.norms import NORMS, LayerNorm, MakeNorm, RMSNorm
from jaxmllm.models.products import affine, bias, layer_scale, named, parameter, scaled
from jaxmllm.models.rotary import Rotation, rotate
from jaxmllm.models.rows import EncoderRows, RowTiles
from sharding.context import gather_parts, gathered_attention
from sharding.layer_loop import run_layers
from sharding.rules import Layout

AnyBlock = TypeVar("AnyBlock", bound=nnx.Module)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowContext:
    """What attention and positions need to know of the rows of one microbatch."""

    layout: Layout = field(metadata={"static": True})
    ids: TokenIds  # [R, C] each
    keys: TokenIds  # of the keys and values of whole rows, [R, g*C]; see `row_keys`
    tiles: RowTiles
    rotation: Rotation | None  # none: positions were added to what the first layer reads
    kernel: Kernel = field(default="auto", metadata={"static": True})  # of attention
    # Ids of queries and keys, and tiles of layers that attend in windows, instead
    windows: tuple[TokenIds, TokenIds, RowTiles] | None = None
    # Of these layers, where it is another
    window_rotation: Rotation | None = None
    added: Float[Array, "N R C D"] | None = None  # to what the first N layers yield
    # The kernel of a mixture
    experts: ExpertKernel = field(default="auto", metadata={"static": True})
    # How often each query sees a key and a value besides, which all share
    repeated: Int[Array, "R C"] | None = None
    documents: Documents | None = None  # where the kernel of attention reads them

    def for_layer(self, windowed: Bool[Array, ""] | None) -> RowContext:
        """The rows as one layer sees them, in windows or whole: a choice of integers, not of programs.

        Args:
          windowed: whether it attends in windows, where there are any.
        """
        if self.windows is None or windowed is None:
            return self
        choose = lambda window, whole: jnp.where(windowed, window, whole)  # noqa: E731
        ids, keys, tiles = jax.tree.map(choose, self.windows, (self.ids, self.keys, self.tiles))
        rotation = self.rotation
        if self.window_rotation is not None:
            rotation = jax.tree.map(choose, self.window_rotation, rotation)
        return replace(
            self,
            ids=ids,
            keys=keys,
            tiles=tiles,
            rotation=rotation,
            windows=None,
            window_rotation=None,
        )

    def add(self, x: Float[Array, "R C D"], layer: Int[Array, ""] | None) -> Float[Array, "R C D"]:
        """What this layer has yielded, with what is added to it."""
        return x if self.added is None or layer is None else with_added(x, self.added, layer)


def row_keys(layout: Layout, ids: TokenIds) -> TokenIds:
    """`RowContext.keys` for keys of these ids, [R, C]: where rows are in parts they are gathered, once for all layers
    and in one collective."""
    axes = layout.mesh_axes("sequence")
    if not axes:
        return ids
    gather = layout.local(
        partial(gather_parts, axes=axes), in_axes=(("batch", "sequence"),), out_axes=("batch",)
    )
    columns, shape = jax.tree.flatten(ids)
    gathered = gather(jnp.stack(columns, axis=-1))
    return jax.tree.unflatten(shape, [gathered[..., column] for column in range(len(columns))])


def documents_of(rows: EncoderRows) -> Documents | None:
    """The items of an encoder's rows, whose slots see them whole; none where the kernel does not read them."""
    return None if rows.runs is None else Documents(rows.runs, causal=False)


class SelfAttention(nnx.Module):
    """Grouped-query attention of what the rows' masks make visible."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        epsilon: float = 1e-6,
        key_bias: bool = True,
        norm: MakeNorm = RMSNorm,
        scale: float | None = None,
        norm_heads: bool = False,
    ):
        """Make the parameters.

        Args:
          norm: of queries and keys.
          norm_heads: whether these are normed over all heads together, by `RMSNorm`.
          scale: factor on logits; none: head_size ** -0.5.
        """
        self.query = parameter(rngs, (width, heads, head_size), ("embed", "heads", None), width)
        self.key = parameter(rngs, (width, kv_heads, head_size), ("embed", "kv_heads", None), width)
        self.value = parameter(
            rngs, (width, kv_heads, head_size), ("embed", "kv_heads", None), width
        )
        self.out = parameter(
            rngs, (heads, head_size, width), ("heads", None, "embed"), heads * head_size
        )
        self.query_bias = bias((heads, head_size), ("heads", None)) if qkv_bias else None
        of_heads = (kv_heads, head_size), ("kv_heads", None)
        self.key_bias = bias(*of_heads) if qkv_bias and key_bias else None
        self.value_bias = bias(*of_heads) if qkv_bias else None
        self.out_bias = bias((width,), (None,)) if out_bias else None

        def norm_of(heads: int) -> RMSNorm | LayerNorm:
            if norm_heads:
                return RMSNorm(head_size, epsilon, heads=heads)
            return norm(head_size, epsilon)

        self.query_norm = norm_of(heads) if qk_norm else None
        self.key_norm = norm_of(kv_heads) if qk_norm else None
        self.scale = scale

    def __call__(self, x: Float[Array, "R C D"], rows: RowContext) -> Float[Array, "R C D"]:
        """What queries made of x mix of the values in the same rows."""
        return self.output(self.mixed(*self.projections(x, rows), rows), rows)

    def projections(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Float[Array, "R C H K"], Float[Array, "R C G K"], Float[Array, "R C G K"]]:
        """Queries, keys and values, normed and not yet rotated."""
        return self.queries(x, rows), *self.keys_and_values(x, rows)

    def queries(self, x: Float[Array, "R C D"], rows: RowContext) -> Float[Array, "R C H K"]:
        """Normed and not yet rotated."""
        return self._project(x, self.query, self.query_bias, self.query_norm, rows)

    def keys_and_values(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Float[Array, "R C G K"], Float[Array, "R C G K"]]:
        """Keys normed and not yet rotated."""
        k = self._project(x, self.key, self.key_bias, self.key_norm, rows)
        return k, self._project(x, self.value, self.value_bias, None, rows)

    def mixed(
        self,
        q: Float[Array, "R C H K"],
        k: Float[Array, "R C G K"],
        v: Float[Array, "R C G K"],
        rows: RowContext,
        besides: tuple[Float[Array, "R P G K"], Float[Array, "R P G K"]] | None = None,
    ) -> Float[Array, "R C H K"]:
        """What queries mix of the values in the same rows, by head.

        Args:
          besides: a key and a value on each of P parts, which queries see as often as `rows.repeated` says.
        """
        layout = rows.layout
        if rows.rotation is not None:
            q, k = (rotate(x, rows.rotation) for x in (q, k))
        query_axes = ("batch", "sequence", "heads", None)
        kv_axes = ("batch", "sequence", "kv_heads", None)
        if layout.mesh_axes("heads") != layout.mesh_axes(
            "kv_heads"
        ):  # a device lacks the keys of its own queries
            k, v, besides = jax.tree.map(
                lambda x: jnp.repeat(x, q.shape[2] // x.shape[2], axis=2), (k, v, besides)
            )
            kv_axes = query_axes
        slots = ("batch", "sequence")
        # Queries, their ids and the tiles are those of a part; ids of keys and documents those of
        # the row, for keys and values are gathered in `gathered_attention`.
        attend = layout.local(
            partial(_attend, layout.mesh_axes("sequence"), rows.kernel, self.scale),
            in_axes=(
                *(query_axes, kv_axes, kv_axes, slots, ("batch",), slots, ("batch",)),
                *(kv_axes, slots),
            ),
            out_axes=query_axes,
        )
        mixed: Array = attend(
            *(q, k, v, rows.ids, rows.keys, rows.tiles, rows.documents, besides, rows.repeated)
        )
        return mixed

    def output(self, mixed: Float[Array, "R C H K"], rows: RowContext) -> Float[Array, "R C D"]:
        """The heads of every slot through one matrix."""
        out = affine(mixed, self.out, self.out_bias, rows.layout, inputs=2)
        return named(rows.layout.constrain(out, ("batch", "sequence", None)), "projections")

    @staticmethod
    def _project(
        x: Array,
        p: nnx.Param[Array],
        b: nnx.Param[Array] | None,
        norm: RMSNorm | LayerNorm | None,
        rows: RowContext,
    ) -> Array:
        y = affine(x, p, b, rows.layout)
        y = rows.layout.constrain(y, ("batch", "sequence", p.axes[1], None))
        y = named(y, "projections")
        return norm(y) if norm is not None else y


def _attend(
    split: tuple[str, ...],
    kernel: Kernel,
    scale: float | None,
    q: Array,
    k: Array,
    v: Array,
    queries: TokenIds,
    keys: TokenIds,
    tiles: RowTiles,
    documents: Documents | None,
    besides: tuple[Array, Array] | None,
    repeated: Array | None,
) -> Array:
    """Attention on one device: from its part of a row to the whole row."""
    # A device has the tables of its own part alone: their axis P is of length 1 here.
    query_spans, query_blocks, key_spans, key_blocks = (table[:, 0] for table in tiles)
    lists = TileLists(query_spans, query_blocks), TileLists(key_spans, key_blocks)
    mask = Mask(queries, keys, *lists, documents)
    function = attention if repeated is None else attention_and_logsumexp
    attend = partial(function, mask=mask, scale=scale, kernel=kernel)
    mixed = gathered_attention(attend, q, k, v, mask.block, split)
    if repeated is None:
        return mixed
    assert besides is not None, "what is repeated has a key and a value"
    out, logsumexp = mixed
    key, value = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in besides)
    return with_repeated_key(out, logsumexp, q, key, value, repeated, scale=scale)


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """SwiGLU or GeGLU (arXiv 2002.05202), by default without biases."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        mlp_width: int,
        activation: Activation = "silu",
        biases: bool = False,
    ):
        self.activation = activation
        self.gate = parameter(rngs, (width, mlp_width), ("embed", "mlp"), width)
        self.up = parameter(rngs, (width, mlp_width), ("embed", "mlp"), width)
        self.down = parameter(rngs, (mlp_width, width), ("mlp", "embed"), mlp_width)
        self.gate_bias = bias((mlp_width,), ("mlp",)) if biases else None
        self.up_bias = bias((mlp_width,), ("mlp",)) if biases else None
        self.down_bias = bias((width,), (None,)) if biases else None

    def __call__(self, x: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C D"]:
        inner = (self.gate, self.gate_bias), (self.up, self.up_bias)
        gate, up = (named(affine(x, *factors, layout), "mlp") for factors in inner)
        hidden = ACTIVATIONS[self.activation](gate) * up
        hidden = layout.constrain(hidden, ("batch", "sequence", "mlp"))
        out = affine(hidden, self.down, self.down_bias, layout)
        return layout.constrain(out, ("batch", "sequence", None))


class MLP(nnx.Module):
    """Two biased matrices with GELU between them, by default its approximation by tanh."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int,
        mlp_width: int,
        out_width: int | None = None,
        gelu: Gelu = "tanh",
    ):
        out_width = out_width or width
        self.gelu = gelu
        self.up = parameter(rngs, (width, mlp_width), ("embed", "mlp"), width)
        self.up_bias = bias((mlp_width,), ("mlp",))
        self.down = parameter(rngs, (mlp_width, out_width), ("mlp", "embed"), mlp_width)
        self.down_bias = bias((out_width,), (None,))

    def __call__(self, x: Float[Array, "R C D"], layout: Layout) -> Float[Array, "R C O"]:
        up = affine(x, self.up, self.up_bias, layout)
        hidden = jax.nn.gelu(named(up, "mlp"), approximate=self.gelu == "tanh")
        hidden = layout.constrain(hidden, ("batch", "sequence", "mlp"))
        out = affine(hidden, self.down, self.down_bias, layout)
        return layout.constrain(out, ("batch", "sequence", None))


class Block(nnx.Module):
    """Pre-norm transformer layer; `attention` and `mlp` are made by the tower.

    With `post_norms`, what these two add is normed, too; `with_layer_scale`, it is multiplied by a vector.
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        attention: SelfAttention,
        mlp: GatedMLP | MLP,
        norm: MakeNorm = RMSNorm,
        post_norms: bool = False,
        with_layer_scale: bool = False,
    ):
        self.attention_norm = norm(width, epsilon)
        self.attention = attention
        self.attention_scale = layer_scale(width) if with_layer_scale else None
        self.mlp_scale = layer_scale(width) if with_layer_scale else None
        self.post_attention_norm = norm(width, epsilon) if post_norms else None
        self.mlp_norm = norm(width, epsilon)
        self.mlp = mlp
        self.post_mlp_norm = norm(width, epsilon) if post_norms else None

    def __call__(self, x: Float[Array, "R C D"], rows: RowContext) -> Float[Array, "R C D"]:
        mixed = self.attention(self.attention_norm(x), rows)
        if self.post_attention_norm is not None:
            mixed = self.post_attention_norm(mixed)
        if self.attention_scale is not None:
            mixed = scaled(mixed, self.attention_scale, rows.layout)
        x = x + mixed
        out = self.mlp(self.mlp_norm(x), rows.layout)
        if self.post_mlp_norm is not None:
            out = self.post_mlp_norm(named(out, "mlp"))
        if self.mlp_scale is not None:
            out = scaled(named(out, "mlp"), self.mlp_scale, rows.layout)
        return x + out


def encoder_block(config: TowerConfig, rngs: nnx.Rngs) -> Block:
    """A layer of an encoder tower: bidirectional attention and a plain or gated MLP, most of them with biases."""
    attention = SelfAttention(
        rngs,
        config.width,
        config.heads,
        config.heads,
        config.head_size,
        qkv_bias=config.qkv_bias,
        out_bias=True,
        qk_norm=config.qk_norm,
        epsilon=config.norm_epsilon,
        key_bias=config.key_bias,
        norm_heads=True,
    )
    mlp: GatedMLP | MLP
    if config.mlp_matrices == 3:
        mlp = GatedMLP(rngs, config.width, config.mlp_width, biases=True)
    else:
        mlp = MLP(rngs, config.width, config.mlp_width, gelu=config.gelu)
    return Block(
        config.width,
        config.norm_epsilon,
        attention,
        mlp,
        NORMS[config.norm],
        with_layer_scale=config.layer_scale,
    )


def stacked(make_block: Callable[[nnx.Rngs], AnyBlock], layers: int, rngs: nnx.Rngs) -> AnyBlock:
    """One module whose parameters hold all layers, with a leading `layers` axis."""
    create = nnx.vmap(make_block, in_axes=(0,), out_axes=0)
    return nnx.split_rngs(splits=layers)(create)(rngs)


def run_stack(
    blocks: Block,
    x: Float[Array, "R C D"],
    rows: RowContext,
    remat: Remat,
    windowed: Sequence[bool] | None = None,
) -> Float[Array, "R C D"]:
    """Loop over the layers, each computed again in the backward pass as `remat` says (see `checkpointed`).

    Args:
      windowed: which layers attend in the windows of the rows; none: there are no windows.
    """
    x, _, _ = loop_over_layers(_run_block, blocks, x, rows, remat, windowed)
    return x


def run_tapped_stack(
    blocks: Block,
    x: Float[Array, "R C D"],
    rows: RowContext,
    remat: Remat,
    windowed: Sequence[bool] | None,
    taps: Sequence[int],
) -> tuple[Float[Array, "R C D"], Float[Array, "T R C D"]]:
    """The same, and what the layers of these numbers yield."""
    x, tapped, _ = loop_over_layers(_run_block, blocks, x, rows, remat, windowed, taps)
    return x, tapped


def _run_block(block: Block, x: Array, rows: RowContext) -> tuple[Array, None]:
    return block(x, rows), None


def loop_over_layers(
    run: Callable[[Any, Array, RowContext], tuple[Array, Any]],
    blocks: nnx.Module,
    x: Float[Array, "R C D"],
    rows: RowContext,
    remat: Remat,
    windowed: Sequence[bool] | None = None,
    taps: Sequence[int] = (),
) -> tuple[Float[Array, "R C D"], Any, Any]:
    """The same for layers that `run` runs: x, what the layers `taps` yield, none without any, and what each layer
    returns besides x, stacked."""
    graph, parameters = nnx.split(blocks)
    kinds = None if windowed is None else np.array(windowed)
    layers = len(jax.tree.leaves(parameters)[0])
    layer_numbers = np.arange(layers) if taps or rows.added is not None else None
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(parameters: Any, x: Array, windowed: Any, rows: RowContext) -> tuple[Array, Any]:
        return run(nnx.merge(graph, parameters), x, rows.for_layer(windowed))

    run_block = checkpointed(block, remat, in_loop=True)

    # Outside of what is computed again: neither sums nor choices keep anything for the backward pass
    def layer(parameters: Any, carry: Any, own: Any, rows: RowContext) -> tuple[Any, Any]:
        (x, tapped), (layer_number, windowed) = carry, own
        x, out = run_block(parameters, x, windowed, rows)
        x = rows.add(x, layer_number)
        if taps:
            tapped = with_tapped(x, tapped, taps, layer_number)
        return (x, tapped), out

    (x, tapped), outs = run_layers(
        rows.layout, layer, parameters, (x, tapped), (layer_numbers, kinds), rows
    )
    return x, tapped, outs


def with_added(
    x: Float[Array, "R C D"], added: Float[Array, "N R C D"], layer: Int[Array, ""]
) -> Float[Array, "R C D"]:
    """What a layer has yielded, with what is added to the first N."""
    depth = len(added)
    return x + jnp.where(layer < depth, added[jnp.minimum(layer, depth - 1)], 0)


def with_tapped(
    x: Float[Array, "R C D"],
    tapped: Float[Array, "T R C D"],
    taps: Sequence[int],
    layer: Int[Array, ""],
) -> Float[Array, "T R C D"]:
    """What the layers `taps` have yielded, once this one has yielded x."""
    return jnp.where((np.array(taps) == layer)[:, None, None, None], x, tapped)


def checkpointed(function: Callable[..., Any], remat: Remat, in_loop: bool) -> Callable[..., Any]:
    """The function, whose backward pass computes again what `remat` does not keep.

    That is all but the arguments (full), products with weights (dots), or values of some names; or nothing (none).

    Args:
      in_loop: whether it runs in the body of a loop, and its backward pass in that of another one. Elsewhere XLA would
        find that both compute the same, and keep it: a barrier hides that. In a loop it would only make copies of all
        that it hides, the layer's weights and what is kept: 6 % of a step on an H100.
    """
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return function
        case "full":
            policy = policies.nothing_saveable
        case "dots":
            policy = policies.dots_with_no_batch_dims_saveable
        case (*kept,):
            policy = policies.save_only_these_names(*kept)
    return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)
