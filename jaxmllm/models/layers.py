"""The parts that all towers share: attention, MLPs, stacks of layers.

Letters: R ranks (rows), C slots of a row, D width, H heads, G key-value heads, K head size, F MLP
width. `RowContext` carries what varies from row to row.
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
    """What attention and positions read of the rows of one microbatch."""

    layout: Layout = field(metadata={"static": True})
    ids: TokenIds  # each column [R, C]
    keys: TokenIds  # ids of the keys and values of whole rows, [R, g*C]; see `row_keys`
    tiles: RowTiles
    rotation: Rotation | None  # none: positions are in the first layer's input
    kernel: Kernel = field(default="auto", metadata={"static": True})  # of attention
    # Ids of queries, ids of keys, and tiles for layers that attend in windows
    windows: tuple[TokenIds, TokenIds, RowTiles] | None = None
    # Rotation in these layers, where it differs from that of the others
    window_rotation: Rotation | None = None
    added: Float[Array, "N R C D"] | None = None  # added after each of the first N layers
    # Kernel of mixtures of experts
    experts: ExpertKernel = field(default="auto", metadata={"static": True})
    # How often each query also sees one key and value that all queries share
    repeated: Int[Array, "R C"] | None = None
    documents: Documents | None = None  # where the attention kernel reads them

    def for_layer(self, windowed: Bool[Array, ""] | None) -> RowContext:
        """The rows as one layer sees them, in windows or whole. The choice is one between arrays,
        so that one program serves both kinds of layers.

        Args:
          windowed: whether the layer attends in windows; none: no layer does.
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
        """Output x of a layer, plus what is added after that layer, if anything is."""
        return x if self.added is None or layer is None else with_added(x, self.added, layer)


def row_keys(layout: Layout, ids: TokenIds) -> TokenIds:
    """`RowContext.keys` for keys with these ids, [R, C]. Where rows are in parts, ids are gathered
    once for all layers, in one collective."""
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
    """The items of an encoder's rows as documents, which their slots see whole; none where the
    kernel reads no documents."""
    return None if rows.runs is None else Documents(rows.runs, causal=False)


class SelfAttention(nnx.Module):
    """Grouped-query attention to what the rows' masks make visible."""

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
          key_bias: whether keys have a bias, with `qkv_bias`.
          norm: makes the norms of queries and keys, with `qk_norm`.
          norm_heads: whether queries and keys are normed over all heads together, by `RMSNorm`.
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
        """Attend from every slot of x to the slots of its row that it sees."""
        return self.output(self.mixed(*self.projections(x, rows), rows), rows)

    def projections(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Float[Array, "R C H K"], Float[Array, "R C G K"], Float[Array, "R C G K"]]:
        """Queries, keys and values, normed and not yet rotated."""
        return self.queries(x, rows), *self.keys_and_values(x, rows)

    def queries(self, x: Float[Array, "R C D"], rows: RowContext) -> Float[Array, "R C H K"]:
        """Queries, normed and not yet rotated."""
        return self._project(x, self.query, self.query_bias, self.query_norm, rows)

    def keys_and_values(
        self, x: Float[Array, "R C D"], rows: RowContext
    ) -> tuple[Float[Array, "R C G K"], Float[Array, "R C G K"]]:
        """Keys, normed and not yet rotated, and values."""
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
        """Attention of the queries to the same rows: for each head, a mix of the values.

        Args:
          besides: one key and one value, a copy on each of P parts, that queries see in addition,
            as often as `rows.repeated` says.
        """
        layout = rows.layout
        if rows.rotation is not None:
            q, k = (rotate(x, rows.rotation) for x in (q, k))
        query_axes = ("batch", "sequence", "heads", None)
        kv_axes = ("batch", "sequence", "kv_heads", None)
        if layout.mesh_axes("heads") != layout.mesh_axes(
            "kv_heads"
        ):  # without this, a device would lack keys of its queries
            k, v, besides = jax.tree.map(
                lambda x: jnp.repeat(x, q.shape[2] // x.shape[2], axis=2), (k, v, besides)
            )
            kv_axes = query_axes
        slots = ("batch", "sequence")
        # Queries, their ids and the tiles are those of a part. Ids of keys and documents are those
        # of the whole row, because `gathered_attention` gathers keys and values.
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
        """Multiply the heads of every slot by one matrix, to the width of the layers."""
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
    # A device has the tables of its own part only: their axis P has length 1 here.
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

    With `post_norms`, the outputs of these two are normed, too; `with_layer_scale`, each is
    multiplied by a vector.
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
            # The gradients of norm and scale need their input, which `remat` can keep by its name.
            # The output of attention already has one.
            out = self.post_mlp_norm(named(out, "mlp"))
        if self.mlp_scale is not None:
            out = scaled(named(out, "mlp"), self.mlp_scale, rows.layout)
        return x + out


def encoder_block(config: TowerConfig, rngs: nnx.Rngs) -> Block:
    """A layer of an encoder tower: bidirectional attention and a plain or gated MLP. All matrices
    have biases, except that the config may leave out those of queries, keys and values."""
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
    """Run the layers in a loop; the backward pass recomputes them as `remat` says (`checkpointed`).

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
    """As `run_stack`, and the outputs of the layers with the numbers `taps`."""
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
    """As `run_stack`, for layers of any kind, which `run` runs.

    Returns:
      x after all layers; the outputs of the layers `taps` [T, R, C, D], none without taps; what
      each layer returns in addition to x, stacked.
    """
    graph, parameters = nnx.split(blocks)
    kinds = None if windowed is None else np.array(windowed)
    layers = len(jax.tree.leaves(parameters)[0])
    layer_numbers = np.arange(layers) if taps or rows.added is not None else None
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def block(parameters: Any, x: Array, windowed: Any, rows: RowContext) -> tuple[Array, Any]:
        return run(nnx.merge(graph, parameters), x, rows.for_layer(windowed))

    run_block = checkpointed(block, remat, in_loop=True)

    # Outside of the recomputed block, because sums and choices keep nothing for the backward pass
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
    """Output x of a layer, plus what is added after it if it is one of the first N."""
    depth = len(added)
    # The clamped index only keeps later layers in range: they add 0.
    return x + jnp.where(layer < depth, added[jnp.minimum(layer, depth - 1)], 0)


def with_tapped(
    x: Float[Array, "R C D"],
    tapped: Float[Array, "T R C D"],
    taps: Sequence[int],
    layer: Int[Array, ""],
) -> Float[Array, "T R C D"]:
    """Outputs of the layers `taps` so far, with that of this layer entered if it is one of them."""
    return jnp.where((np.array(taps) == layer)[:, None, None, None], x, tapped)


def checkpointed(function: Callable[..., Any], remat: Remat, in_loop: bool) -> Callable[..., Any]:
    """The function, with a backward pass that recomputes what `remat` does not keep.

    It keeps the arguments alone (full), also products with weights (dots) or values of some names
    (a list), or everything (none).

    Args:
      in_loop: whether the function runs in the body of a loop, and its backward pass in that of
        another one. Elsewhere XLA would find that both compute the same values and keep them: a
        barrier hides that. In a loop the barrier would only copy all that passes it, the layer's
        weights and what is kept: 6 % of a step on an H100.
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
