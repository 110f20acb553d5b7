"""The parts that all towers share: parameters with logical axes, norms, rotary positions, attention, MLPs, stacks.

Letters: R ranks (rows), C slots of a row, D width, H heads, G key-value heads, K head size, F MLP width.
Every parameter carries the names of its logical axes; `RowContext` carries what varies from row to row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.attention.attention import attention, attention_and_logsumexp, with_repeated_key
from jaxmllm.attention.mask import Mask, TileLists, TokenIds
from jaxmllm.config.schema import (
    Activation,
    ExpertKernel,
    Gelu,
    Kept,
    Kernel,
    Remat,
    RotaryScaling,
    TowerConfig,
)
from jaxmllm.models.rows import RowTiles
from sharding.context import gather_parts, gathered_attention
from sharding.parameters import Parameter, gathered
from sharding.rules import Axes, Layout

AnyBlock = TypeVar("AnyBlock", bound=nnx.Module)


@dataclass(frozen=True)
class RowContext:
    """What attention and positions need to know of the rows of one microbatch."""

    layout: Layout
    ids: TokenIds  # [R, C] each
    tiles: RowTiles
    angles: (
        Float[Array, "R C K/2"] | None
    )  # none: positions were added to what the first layer reads
    kernel: Kernel = "auto"  # of attention
    # Ids and tiles of layers that attend in windows, instead
    windows: tuple[TokenIds, RowTiles] | None = None
    # Angles of these layers, where they are others
    window_angles: Float[Array, "R C K/2"] | None = None
    multiplier: float = 1.0  # of rotated queries and keys
    added: Float[Array, "N R C D"] | None = None  # to what the first N layers yield
    experts: ExpertKernel = "auto"  # the kernel of a mixture
    # Ids of keys and values, where they are others than those of queries
    keys: TokenIds | None = None
    # Of each query: how often it sees its own slot's key and value, too
    repeated: Int[Array, "R C"] | None = None

    def for_layer(self, windowed: Bool[Array, ""] | None) -> RowContext:
        """The rows as one layer sees them, in windows or whole: a choice of integers, not of programs.

        Args:
          windowed: whether it attends in windows, where there are any.
        """
        if self.windows is None or windowed is None:
            return self
        choose = lambda window, whole: jnp.where(windowed, window, whole)  # noqa: E731
        ids, tiles = jax.tree.map(choose, self.windows, (self.ids, self.tiles))
        angles = self.angles
        if self.window_angles is not None:
            angles = choose(self.window_angles, angles)
        return replace(self, ids=ids, tiles=tiles, angles=angles, windows=None, window_angles=None)

    def add(self, x: Float[Array, "R C D"], layer: Int[Array, ""] | None) -> Float[Array, "R C D"]:
        """What this layer has yielded, with what is added to it."""
        return x if self.added is None or layer is None else with_added(x, self.added, layer)


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, fan_in: int, looked_up: bool = False
) -> nnx.Param[Array]:
    """Normal with standard deviation fan_in**-0.5.

    Args:
      looked_up: whether it is only ever a table to look up, which is never gathered.
    """
    values = jax.random.normal(rngs.params(), shape) * fan_in**-0.5
    return nnx.Param(values, axes=axes, looked_up=looked_up)


def bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[Array]:
    """Zeros."""
    return nnx.Param(jnp.zeros(shape), axes=axes, looked_up=False)


def weight(p: nnx.Param[Array], layout: Layout, dtype: Any) -> Array:
    """The parameter as a computation in `dtype` needs it: cast, then gathered."""
    return gathered(layout, p[...], p.axes, dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("matrix", "a", "b"), meta_fields=("scale",))
@dataclass(frozen=True)
class Adapted:
    """A frozen matrix with factors of low rank: in place of its array, for `product`."""

    matrix: Array  # [*inputs, *outputs]
    a: Parameter  # [*inputs, rank]
    b: Parameter  # [rank, *outputs]
    scale: float  # of their product

    def __getitem__(self, index: Any) -> Adapted:
        """Itself, for `[...]`: modules read their parameters so."""
        assert index is Ellipsis, "a matrix with an adapter is used whole"
        return self


def product(
    x: Float[Array, "R C *I"], p: nnx.Param[Array], layout: Layout, inputs: int = 1
) -> Float[Array, "R C *O"]:
    """x times a matrix [*I, *O], to which its adapter is added, where it has one (arXiv 2106.09685).

    The factors stay factors. So the gradient of x and those of the factors are products of low rank,
    and the matrix, of which no gradient is asked, costs that of x alone.

    Args:
      inputs: number of axes in I.
    """
    value: Any = p[...]
    if not isinstance(value, Adapted):
        return jnp.tensordot(x, gathered(layout, value, p.axes, x.dtype), inputs)
    matrix = gathered(layout, value.matrix, p.axes, x.dtype)
    a = gathered(layout, value.a, (*p.axes[:inputs], None), x.dtype)
    b = gathered(layout, value.b, (None, *p.axes[inputs:]), x.dtype)
    low = layout.constrain(jnp.tensordot(x, a, inputs), ("batch", "sequence", None))
    return jnp.tensordot(x, matrix, inputs) + jnp.tensordot(value.scale * low, b, 1)


def named(x: Array, name: Kept) -> Array:
    """The same value, which `remat` may keep by its name.

    What no gradient asks for has none, such as the last product of an MLP that no norm follows. "attention" is named
    by its own gradient rule (attention/attention.py).
    """
    value: Array = checkpoint_name(x, name)
    return value


def biased(x: Float[Array, "*S *F"], b: nnx.Param[Array], layout: Layout) -> Float[Array, "*S *F"]:
    """x with a bias added in every slot."""
    return _plus(x.ndim - b[...].ndim, x, weight(b, layout, x.dtype))


def affine(
    x: Float[Array, "R C *I"],
    p: nnx.Param[Array],
    b: nnx.Param[Array] | None,
    layout: Layout,
    inputs: int = 1,
) -> Float[Array, "R C *O"]:
    """`product`, and a bias where there is one."""
    out = product(x, p, layout, inputs)
    return out if b is None else biased(out, b, layout)


# What all slots share, added or multiplied. Its gradient is a sum over slots, which `slot_sum` writes.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plus(slots: int, x: Array, shared: Array) -> Array:
    """x [*S, *F] and what is shared [*F] by slots of so many dimensions."""
    return x + shared


def _plus_forward(slots: int, x: Array, shared: Array) -> tuple[Array, None]:
    return x + shared, None


def _plus_backward(slots: int, _: None, gradient: Array) -> tuple[Array, Array]:
    return gradient, slot_sum(gradient, slots)


_plus.defvjp(_plus_forward, _plus_backward)


@jax.custom_vjp
def _times(x: Array, shared: Array) -> Array:
    return x * shared


def _times_forward(x: Array, shared: Array) -> tuple[Array, tuple[Array, Array]]:
    return x * shared, (x, shared)


def _times_backward(factors: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, shared = factors
    return gradient * shared, slot_sum(gradient * x, x.ndim - shared.ndim)


_times.defvjp(_times_forward, _times_backward)


def slot_sum(x: Float[Array, "*S *F"], slots: int) -> Float[Array, "*F"]:
    """The sum over the first `slots` dimensions, in the dtype of x but added in at least float32.

    Over all of them at once: what JAX derives keeps the dimension of rows, and one of length 1 makes
    XLA's CPU backend take far longer for a sum of products [1, C, D] -> [1, D]. And bfloat16 would be
    added in bfloat16.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x, axis=tuple(range(slots)), dtype=wide).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in at least float32 (arXiv 1910.07467).

    It multiplies by scale + offset, at first 1. With `heads` it is over the last two axes, of which they are the first.
    """

    def __init__(self, width: int, epsilon: float, offset: float = 0.0, heads: int | None = None):
        shape = (width,) if heads is None else (heads, width)
        axes = (None,) * len(shape)
        self.scale = nnx.Param(jnp.ones(shape) - offset, axes=axes, looked_up=False)
        self.epsilon = epsilon
        self.offset = offset
        self.over = tuple(range(-len(shape), 0))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(wide * wide, axis=self.over, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean + self.epsilon)
        scale = self.scale[...].astype(wide.dtype)
        if self.offset:
            scale = scale + self.offset
        return _times(normed, scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Norm to mean 0 and variance 1 over the last axis, computed in at least float32 (arXiv 1607.06450).

    Without `affine`, nothing comes after it.
    """

    def __init__(self, width: int, epsilon: float, affine: bool = True):
        ones = nnx.Param(jnp.ones((width,)), axes=(None,), looked_up=False) if affine else None
        self.scale = ones
        self.bias = bias((width,), (None,)) if affine else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.scale is None or self.bias is None:
            return normed.astype(x.dtype)
        scaled = _times(normed, self.scale[...].astype(wide.dtype))
        shift = self.bias[...].astype(wide.dtype)
        return _plus(x.ndim - 1, scaled, shift).astype(x.dtype)


MakeNorm = Callable[[int, float], RMSNorm | LayerNorm]  # of width and epsilon
NORMS: dict[str, MakeNorm] = {
    "rms": RMSNorm,
    "zero_centred_rms": partial(RMSNorm, offset=1.0),
    "layer": LayerNorm,
}
MODULATED_NORMS: dict[str, MakeNorm] = {  # whose result is scaled and shifted in any case
    "rms": RMSNorm,
    "layer": partial(LayerNorm, affine=False),
}


def rotary_angles(
    positions: Int[Array, "R C A"],
    sections: tuple[int, ...],
    theta: float,
    dtype: Any = jnp.float32,
    scaling: RotaryScaling | None = None,
    interleaved: bool = False,
) -> Float[Array, "R C K/2"]:
    """Rotation angles of positions with A axes, for a computation in `dtype` but in at least float32.

    The first sections[0] pairs rotate with axis 0, and so on. Interleaved, axes take turns: pair a + A * n rotates
    with axis a, for n < sections[a], and what is left with axis 0 (arXiv 2511.21631).
    Frequencies continue through the sections, as in M-RoPE (arXiv 2409.12191); text, whose axes are equal, gets
    the one-dimensional RoPE (arXiv 2104.09864) exactly.
    """
    pairs = sum(sections)
    frequency = theta ** (-np.arange(pairs) / pairs)
    if scaling is not None:
        frequency = scaling.scaled(frequency, theta)
    axis = np.repeat(np.arange(len(sections)), sections)
    if interleaved:
        axis = np.zeros_like(axis)
        for number, pairs in enumerate(sections[1:], start=1):
            axis[number : len(sections) * pairs : len(sections)] = number
    return _angles(positions, frequency, axis, dtype)


def rotary_angles_2d(
    positions: Int[Array, "R C 2"], pairs: int, theta: float, dtype: Any = jnp.float32
) -> Float[Array, "R C K/2"]:
    """Rotation angles of (row, column): half of the pairs each, both over the whole range of frequencies."""
    return rotary_angles_by_axis(positions, (pairs // 2, pairs // 2), theta, dtype)


def rotary_angles_by_axis(
    positions: Int[Array, "R C A"],
    sections: tuple[int, ...],
    theta: float,
    dtype: Any = jnp.float32,
) -> Float[Array, "R C K/2"]:
    """Rotation angles of positions with A axes: sections[a] pairs rotate with axis a, each section over the
    whole range of frequencies."""
    frequency = np.concatenate([theta ** (-np.arange(pairs) / pairs) for pairs in sections])
    return _angles(positions, frequency, np.repeat(np.arange(len(sections)), sections), dtype)


def _angles(positions: Array, frequency: np.ndarray, axis: np.ndarray, dtype: Any) -> Array:
    dtype = jnp.promote_types(dtype, jnp.float32)
    return positions[..., axis].astype(dtype) * jnp.asarray(frequency, dtype)


def rotate(
    x: Float[Array, "R C H K"], angles: Float[Array, "R C K/2"], multiplier: float = 1.0
) -> Float[Array, "R C H K"]:
    """Rotate pairs (x[i], x[i + K/2]) by their angles, and multiply them."""
    cos, sin = (part(angles)[:, :, None] for part in (jnp.cos, jnp.sin))
    if multiplier != 1.0:
        cos, sin = cos * multiplier, sin * multiplier
    first, second = jnp.split(x.astype(jnp.promote_types(x.dtype, cos.dtype)), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


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

    def __call__(
        self,
        x: Float[Array, "R C D"],
        rows: RowContext,
        given: Float[Array, "R C D"] | None = None,
    ) -> Float[Array, "R C D"]:
        """What queries made of x mix of the values in the same rows.

        Args:
          given: what keys and values are made of; none: x.
        """
        layout = rows.layout
        given = x if given is None else given
        q = self._project(x, self.query, self.query_bias, self.query_norm, rows)
        k = self._project(given, self.key, self.key_bias, self.key_norm, rows)
        v = self._project(given, self.value, self.value_bias, None, rows)
        if rows.angles is not None:
            q, k = (rotate(x, rows.angles, rows.multiplier) for x in (q, k))
        query_axes = ("batch", "sequence", "heads", None)
        kv_axes = ("batch", "sequence", "kv_heads", None)
        if layout.mesh_axes("heads") != layout.mesh_axes(
            "kv_heads"
        ):  # a device lacks the keys of its own queries
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            kv_axes = query_axes
        slots = ("batch", "sequence")
        repeats = rows.repeated is not None
        attend = layout.local(
            partial(_attend, layout.mesh_axes("sequence"), rows.kernel, self.scale, repeats),
            in_axes=(query_axes, kv_axes, kv_axes, slots, slots, slots),
            out_axes=(query_axes, query_axes[:3]) if repeats else query_axes,
        )
        keys = rows.ids if rows.keys is None else rows.keys
        mixed = attend(q, k, v, rows.ids, keys, rows.tiles)
        if rows.repeated is not None:
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            out, logsumexp = mixed
            mixed = with_repeated_key(out, logsumexp, q, k, v, rows.repeated, scale=self.scale)
        out = affine(mixed, self.out, self.out_bias, layout, inputs=2)
        return named(layout.constrain(out, ("batch", "sequence", None)), "projections")

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
    with_logsumexp: bool,
    q: Array,
    k: Array,
    v: Array,
    queries: TokenIds,
    keys: TokenIds,
    tiles: RowTiles,
) -> Any:
    """Attention on one device: from its part of a row to the whole row."""
    keys = keys.map(lambda column: gather_parts(column, split))
    query_spans, query_blocks, key_spans, key_blocks = (table[:, 0] for table in tiles)
    lists = TileLists(query_spans, query_blocks), TileLists(key_spans, key_blocks)
    mask = Mask(queries, keys, *lists)
    function = attention_and_logsumexp if with_logsumexp else attention
    attend = partial(function, mask=mask, scale=scale, kernel=kernel)
    return gathered_attention(attend, q, k, v, mask.block, split)


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

    With `post_norms`, what these two add is normed, too.
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        attention: SelfAttention,
        mlp: GatedMLP | MLP,
        norm: MakeNorm = RMSNorm,
        post_norms: bool = False,
    ):
        self.attention_norm = norm(width, epsilon)
        self.attention = attention
        self.post_attention_norm = norm(width, epsilon) if post_norms else None
        self.mlp_norm = norm(width, epsilon)
        self.mlp = mlp
        self.post_mlp_norm = norm(width, epsilon) if post_norms else None

    def __call__(self, x: Float[Array, "R C D"], rows: RowContext) -> Float[Array, "R C D"]:
        mixed = self.attention(self.attention_norm(x), rows)
        if self.post_attention_norm is not None:
            mixed = self.post_attention_norm(mixed)
        x = x + mixed
        out = self.mlp(self.mlp_norm(x), rows.layout)
        if self.post_mlp_norm is not None:
            out = self.post_mlp_norm(named(out, "mlp"))
        return x + out


def encoder_block(config: TowerConfig, rngs: nnx.Rngs) -> Block:
    """A layer of an encoder tower: bidirectional attention and a plain or gated MLP, with biases."""
    attention = SelfAttention(
        rngs,
        config.width,
        config.heads,
        config.heads,
        config.head_size,
        qkv_bias=True,
        out_bias=True,
        key_bias=config.key_bias,
    )
    mlp: GatedMLP | MLP
    if config.mlp_matrices == 3:
        mlp = GatedMLP(rngs, config.width, config.mlp_width, biases=True)
    else:
        mlp = MLP(rngs, config.width, config.mlp_width, gelu=config.gelu)
    return Block(config.width, config.norm_epsilon, attention, mlp, NORMS[config.norm])


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
    """Scan over the layers, each computed again in the backward pass as `remat` says (see `checkpointed`).

    Args:
      windowed: which layers attend in the windows of the rows; none: there are no windows.
    """
    x, _, _ = scan_layers(_run_block, blocks, x, rows, remat, windowed)
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
    x, tapped, _ = scan_layers(_run_block, blocks, x, rows, remat, windowed, taps)
    return x, tapped


def _run_block(block: Block, x: Array, rows: RowContext) -> tuple[Array, None]:
    return block(x, rows), None


def scan_layers(
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
    numbers = np.arange(layers) if taps or rows.added is not None else None
    tapped = jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None

    def layer(x: Array, layer: Any) -> tuple[Array, Any]:
        parameters, windowed = layer
        return run(nnx.merge(graph, parameters), x, rows.for_layer(windowed))

    run_layer = checkpointed(layer, remat)

    # Outside of what is computed again: neither sums nor choices keep anything for the backward pass
    def step(carry: Any, layer: Any) -> tuple[Any, Any]:
        (x, tapped), (number, of_layer) = carry, layer
        x, out = run_layer(x, of_layer)
        x = rows.add(x, number)
        if taps:
            tapped = with_tapped(x, tapped, taps, number)
        return (x, tapped), out

    (x, tapped), outs = jax.lax.scan(step, (x, tapped), (numbers, (parameters, kinds)))
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


def checkpointed(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """The function, whose backward pass computes again what `remat` does not keep.

    That is all but the arguments (full), products with weights (dots), or values of some names; or nothing (none).
    """
    policies = jax.checkpoint_policies
    match remat:
        case "none":
            return function
        case "full":
            policy = policies.nothing_saveable
        case "dots":
            policy = policies.dots_with_no_batch_dims_saveable
        case kept:
            policy = policies.save_only_these_names(*kept)
    return jax.checkpoint(function, policy=policy)
