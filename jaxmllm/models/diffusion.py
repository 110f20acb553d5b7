"""The diffusion transformer: noisy patches and the conditions they are drawn from -> predictions.

    states --projector--> conditions \
                                      one sequence --layers, modulated by the time--> predictions of the patches
    patches --embed----------------- /

The drawing shows `conditioning: joint`. With `streams: 2`, conditions have weights of their own in
all layers and meet patches only in attention (models/streams.py). With `conditioning: cross`, the
sequence holds patches alone; conditions share their slots, and layers read them by cross-attention:

    patches --embed--> attention, attention to conditions, MLP: layer by layer --> predictions of the patches

Items are segments of packed rows, and each sees only itself. Scales, shifts and gates
(arXiv 2212.09748) are computed from an item's time, and with `pooled_conditions` also from the mean
of its conditions: once per segment, in at least float32. Every slot takes those of its segment.

Letters: R ranks, C slots, P parts of a row, D width, F numbers of a patch, S segments of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmllm.attention.mask import item_ids
from jaxmllm.config.schema import ComponentConfig, DiffusionConfig
from jaxmllm.models.layers import MLP, RowContext, SelfAttention, checkpointed, row_keys, stacked
from jaxmllm.models.norms import MODULATED_NORMS, NORMS
from jaxmllm.models.products import bias, biased, named, parameter, weight
from jaxmllm.models.rotary import Rotation, rotary_angles_by_axis
from jaxmllm.models.rows import GeneratorRows
from jaxmllm.models.streams import ConditionSlots, in_streams, of_conditions_alone
from sharding.by_platform import by_platform
from sharding.context import SLOTS
from sharding.layer_loop import run_layers
from sharding.rules import Layout

TIME_FREQUENCIES = 128  # frequencies of a time's features, each with a cosine and a sine
SLOWEST_TIME = (
    10_000.0  # the longest wave is near 2 pi times this, with times counted in thousandths
)
MODULATIONS = 6  # vectors of a layer: shift, scale and gate, for attention and for the MLP
OUTPUT_MODULATIONS = 2  # shift and scale before the output
SHORTEST_EDGE_WAVE, LONGEST_EDGE_WAVE = 3.0, 192.0  # wavelengths of distance features, in patches


class Conditions(NamedTuple):
    """The states of the decoder that items are drawn from, projected to the width of the layers."""

    states: Float[Array, "R C D"]  # in their slots
    padded: Float[Array, "R P D"] | None  # what stands for each condition that an item lacks


# Conditions, their slots, and the rows as the attention to them sees them
ConditionsApart = tuple[Conditions, ConditionSlots, RowContext]


class Drawn(NamedTuple):
    """Input and output of the layers. Layers change only `x` and read the rest."""

    x: Float[Array, "R C D"]
    embedded: Float[Array, "R S D"]  # of each segment: its time, and mean condition if pooled
    shared: Float[Array, "R S 6 D"] | None = (
        None  # scales, shifts and gates before a layer's own bias, with `modulation: shared`
    )
    conditions: Conditions | None = None  # with `conditioning: cross`


class DrawnContext(NamedTuple):
    """What layers also read of the rows; none of it has gradients."""

    rows: RowContext
    owners: Int[Array, "R C"]  # segment of each slot, 0 for padding
    apart: RowContext | None  # rows as the attention to conditions sees them
    where: ConditionSlots | None  # slots of conditions, where they have weights of their own


class DiffusionTower(nnx.Module):
    """A transformer whose patches see their whole item and its conditions, with rotary positions by
    (time, height, width)."""

    def __init__(self, config: DiffusionConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        patch = config.patch_features
        self.patch = parameter(rngs, (patch, width), (None, "embed"), patch)
        self.patch_bias = bias((width,), (None,))
        self.time = _Embedding(2 * TIME_FREQUENCIES, width, rngs)
        shared = config.modulation == "shared"
        self.modulation = _Modulation(width, MODULATIONS) if shared else None
        self.layers = stacked(lambda rngs: _DiffusionBlock(config, rngs), config.layers, rngs)
        self.norm = MODULATED_NORMS[config.norm](width, config.norm_epsilon)
        weights = config.output_modulation == "weights"
        self.output_modulation = _Modulation(width, OUTPUT_MODULATIONS) if weights else None
        vectors = (OUTPUT_MODULATIONS, width), (None, None)
        self.output_modulation_bias = None if weights else bias(*vectors)
        # Zeros: the first predictions are zero whatever the time (arXiv 2212.09748)
        self.output = nnx.Param(jnp.zeros((width, patch)), axes=("embed", None), looked_up=False)
        self.output_bias = bias((patch,), (None,))
        edges = config.edge_features
        self.edges = parameter(rngs, (edges, width), (None, "embed"), edges) if edges else None
        self.pooled = _Embedding(width, width, rngs) if config.pooled_conditions else None

    def __call__(
        self,
        rows: GeneratorRows,
        noisy: Float[Array, "R C F"],
        conditions: Conditions,
        layout: Layout,
        dtype: jnp.dtype,
        settings: ComponentConfig,
    ) -> Float[Array, "R C F"]:
        """Predictions for the slots of patches; in other slots they mean nothing."""
        start = self.begin(rows, noisy, conditions, layout, dtype)
        context = self.context(rows, layout, dtype, settings)
        graph, parameters = nnx.split(self.layers)

        def block(parameters: Any, drawn: Drawn, context: DrawnContext) -> Array:
            return nnx.merge(graph, parameters)(drawn, context)

        run_block = checkpointed(block, settings.remat, in_loop=True)

        def layer(parameters: Any, x: Array, _: None, of_all: Any) -> tuple[Array, None]:
            beside, context = of_all
            return run_block(parameters, Drawn(x, *beside), context), None

        # Layers close over no traced arrays: what all of them read is passed to `run_layers`.
        x, *beside = start
        x, _ = run_layers(layout, layer, parameters, x, None, (beside, context))
        return self.finish(rows, start._replace(x=x), layout, dtype)

    def begin(
        self,
        rows: GeneratorRows,
        noisy: Float[Array, "R C F"],
        conditions: Conditions,
        layout: Layout,
        dtype: jnp.dtype,
    ) -> Drawn:
        """Input of the first layer, and the arrays that all layers read."""
        config = self.config
        patches = biased(
            noisy.astype(dtype) @ weight(self.patch, layout, dtype), self.patch_bias, layout
        )
        if self.edges is not None:
            distances = edge_distances(layout, rows)
            waves = edge_features(distances, config.edge_features // distances.shape[-1])
            patches += waves.astype(dtype) @ weight(self.edges, layout, dtype)
        x = patches
        apart = config.conditioning == "cross"
        # In one sequence, conditions have slots of their own. With `conditioning: cross` their
        # slots may also hold patches, so they are passed to the layers beside x.
        if not apart:
            is_condition = rows.conditions >= 0
            x = jnp.where(is_condition[..., None], conditions.states.astype(dtype), patches)
        x = layout.constrain(x, ("batch", "sequence", None))
        # Modulation is computed once for each segment, [R, S, D], in at least float32.
        wide = jnp.promote_types(dtype, jnp.float32)
        embedded = self.time(time_features(rows.times, wide), layout)
        if self.pooled is not None:
            mean = mean_conditions(layout, rows, conditions.states.astype(wide))
            embedded += self.pooled(mean, layout)
        time = jax.nn.silu(embedded)
        shared = None if self.modulation is None else self.modulation(time, layout)
        of_layers = jax.tree.map(lambda states: states.astype(dtype), conditions)
        return Drawn(x, embedded, shared, of_layers if apart else None)

    def context(
        self, rows: GeneratorRows, layout: Layout, dtype: jnp.dtype, settings: ComponentConfig
    ) -> DrawnContext:
        """What layers read of rows. With `conditioning: cross`, only patches see one another."""
        config = self.config
        angles = rotary_angles_by_axis(rows.positions, config.sections, config.rope_theta, dtype)
        rotation = Rotation.of(angles)
        ids = item_ids(rows.segments)
        context = RowContext(
            *(layout, ids, row_keys(layout, ids), rows.tiles, rotation, settings.attention)
        )
        crossed = config.conditioning == "cross"
        own_weights = crossed or config.streams == 2
        where = ConditionSlots.of(layout, rows.conditions >= 0) if own_weights else None
        apart = self._cross_context(context, rows) if crossed else None
        return DrawnContext(context, rows.owners, apart, where)

    def finish(
        self, rows: GeneratorRows, drawn: Drawn, layout: Layout, dtype: jnp.dtype
    ) -> Float[Array, "R C F"]:
        """Predictions, given the output of the last layer."""
        x = drawn.x
        embedded = drawn.embedded
        time = jax.nn.silu(embedded)
        if self.output_modulation is not None:
            output_modulation = self.output_modulation(time, layout)
        else:
            assert self.output_modulation_bias is not None
            # [R, S, 2, D]: shift and scale are the embedded time itself, without the SiLU, and
            # differ by their biases alone.
            twice = jnp.stack([embedded] * OUTPUT_MODULATIONS, axis=2)
            output_modulation = biased(twice, self.output_modulation_bias, layout)
        shift, scale = by_slot(layout, output_modulation, rows.owners)
        x = _modulated(self.norm(x), shift, scale)
        return biased(x @ weight(self.output, layout, dtype), self.output_bias, layout)

    def _cross_context(self, context: RowContext, rows: GeneratorRows) -> RowContext:
        """The rows as the attention from patches to conditions sees them
        (`conditioning: cross`)."""
        assert rows.cross_tiles is not None
        keys = row_keys(context.layout, item_ids(rows.seen_conditions))
        repeated = None if self.config.padded_conditions is None else rows.padded
        return replace(context, keys=keys, tiles=rows.cross_tiles, rotation=None, repeated=repeated)


class _Embedding(nnx.Module):
    """Two biased matrices with a SiLU between them. Their input has segments instead of slots, so
    nothing is split by `sequence`."""

    def __init__(self, features: int, width: int, rngs: nnx.Rngs):
        self.up = parameter(rngs, (features, width), (None, "embed"), features)
        self.up_bias = bias((width,), (None,))
        self.down = parameter(rngs, (width, width), (None, "embed"), width)
        self.down_bias = bias((width,), (None,))

    def __call__(self, features: Float[Array, "R S E"], layout: Layout) -> Float[Array, "R S D"]:
        dtype = features.dtype
        x = biased(features @ weight(self.up, layout, dtype), self.up_bias, layout)
        return biased(jax.nn.silu(x) @ weight(self.down, layout, dtype), self.down_bias, layout)


class _Modulation(nnx.Module):
    """`count` vectors made from the embedded time. They are zeros at first, so that layers pass on
    their input unchanged (arXiv 2212.09748)."""

    def __init__(self, width: int, count: int):
        self.weight = nnx.Param(
            jnp.zeros((width, count, width)), axes=("embed", None, None), looked_up=False
        )
        self.bias = bias((count, width), (None, None))

    def __call__(self, time: Float[Array, "R S D"], layout: Layout) -> Float[Array, "R S N D"]:
        return biased(
            jnp.einsum("rsd,dne->rsne", time, weight(self.weight, layout, time.dtype)),
            self.bias,
            layout,
        )


class _Stream(nnx.Module):
    """A layer's weights for the slots of one stream, and what it computes around attention: x is
    modulated before attention and before the MLP, and the output of each is gated. With
    `conditioning: cross`, attention to conditions comes between the two, without modulation."""

    def __init__(self, config: DiffusionConfig, rngs: nnx.Rngs):
        width = config.width
        norm = MODULATED_NORMS[config.norm]
        self.attention_norm = norm(width, config.norm_epsilon)
        self.attention = _make_attention(config, rngs)
        apart = config.conditioning == "cross"
        self.cross_norm = NORMS[config.norm](width, config.norm_epsilon) if apart else None
        self.cross_attention = _make_attention(config, rngs) if apart else None
        self.mlp_norm = norm(width, config.norm_epsilon)
        self.mlp = MLP(rngs, width, config.mlp_width)
        # With `modulation: shared`, a layer only adds its own bias to vectors that all layers read.
        per_layer = config.modulation == "layer"
        self.modulation = _Modulation(width, MODULATIONS) if per_layer else None
        self.modulation_bias = None if per_layer else bias((MODULATIONS, width), (None, None))

    def vectors(
        self, time: Float[Array, "R S D"], shared: Float[Array, "R S 6 D"] | None, layout: Layout
    ) -> Float[Array, "R S 6 D"]:
        """Shift, scale and gate of attention, and then of the MLP."""
        if self.modulation is not None:
            return self.modulation(time, layout)
        assert shared is not None and self.modulation_bias is not None
        return biased(shared, self.modulation_bias, layout)

    def read(
        self,
        vectors: Float[Array, "R S 6 D"],
        rows: RowContext,
        owners: Int[Array, "R C"],
        x: Float[Array, "R C D"],
    ) -> tuple[Array, Array, Array]:
        """Queries, keys and values of the modulated slots."""
        shift, scale = by_slot(rows.layout, vectors[:, :, :2], owners)
        return self.attention.projections(_modulated(self.attention_norm(x), shift, scale), rows)

    def finish(
        self,
        vectors: Float[Array, "R S 6 D"],
        rows: RowContext,
        owners: Int[Array, "R C"],
        x: Float[Array, "R C D"],
        mixed: Float[Array, "R C H K"],
        apart: ConditionsApart | None = None,
    ) -> Float[Array, "R C D"]:
        """Output of the layer, given that of its attention (`mixed`)."""
        gate, shift, scale, mlp_gate = by_slot(rows.layout, vectors[:, :, 2:], owners)
        x = x + _gated(self.attention.output(mixed, rows), gate)
        if apart is not None:
            x = x + self._cross_attention_output(apart, x)
        out = self.mlp(_modulated(self.mlp_norm(x), shift, scale), rows.layout)
        out = named(out, "mlp")  # which the gradient of the gate needs
        return x + _gated(out, mlp_gate)

    def _cross_attention_output(self, apart: ConditionsApart, x: Float[Array, "R C D"]) -> Array:
        """Output of the attention from patches to conditions."""
        (states, padded), where, rows = apart
        norm = self.cross_norm
        attention = self.cross_attention
        assert norm is not None and attention is not None
        # The parameters are passed: `of_conditions_alone` differentiates by its arguments alone, so
        # nothing that the function closes over may have a gradient.
        graph, parameters = nnx.split(attention)

        def keys_and_values(given: tuple[Any, RowContext], states: Array) -> tuple[Array, Array]:
            parameters, rows = given
            return nnx.merge(graph, parameters).keys_and_values(states, rows)

        given = parameters, rows
        k, v = of_conditions_alone(rows.layout, where, keys_and_values, given, states)
        besides = None if padded is None else attention.keys_and_values(padded, rows)
        mixed = attention.mixed(attention.queries(norm(x), rows), k, v, rows, besides)
        return attention.output(mixed, rows)


class _DiffusionBlock(_Stream):
    """One layer. With two streams it is itself the stream of patches; `conditions` is the other."""

    def __init__(self, config: DiffusionConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.conditions = _Stream(config, rngs) if config.streams == 2 else None

    def __call__(self, drawn: Drawn, context: DrawnContext) -> Float[Array, "R C D"]:
        x, embedded, shared, conditions_apart = drawn
        rows, owners, to_conditions, where = context
        apart: ConditionsApart | None = None
        if conditions_apart is not None and to_conditions is not None and where is not None:
            apart = conditions_apart, where, to_conditions
        time = jax.nn.silu(embedded)
        layout = rows.layout
        vectors = self.vectors(time, shared, layout)
        if self.conditions is None:
            mixed = self.attention.mixed(*self.read(vectors, rows, owners, x), rows)
            return self.finish(vectors, rows, owners, x, mixed, apart)
        assert where is not None
        condition_vectors = self.conditions.vectors(time, shared, layout)
        graph, parameters = nnx.split(self.conditions)

        def in_both(step: Callable[..., Any], *slots: Array) -> Any:
            def of_conditions(given: Any, *slots: Array) -> Any:
                parameters, condition_vectors, rows = given
                return step(nnx.merge(graph, parameters), condition_vectors, rows, *slots)

            of_patches = partial(step, self, vectors, rows)
            # All that conditions read and that has a gradient, as `in_streams` requires
            given = parameters, condition_vectors, rows
            return in_streams(layout, where, of_patches, of_conditions, given, owners, *slots)

        queries, keys, values = in_both(_Stream.read, x)
        return in_both(_Stream.finish, x, self.attention.mixed(queries, keys, values, rows))


def _make_attention(config: DiffusionConfig, rngs: nnx.Rngs) -> SelfAttention:
    return SelfAttention(
        rngs,
        config.width,
        config.heads,
        config.heads,
        config.head_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        epsilon=config.norm_epsilon,
        norm_heads=config.qk_norm_over == "heads",
    )


def time_features(times: Float[Array, "R S"], dtype: jnp.dtype) -> Float[Array, "R S E"]:
    """Cosines and sines of times in [0, 1]."""
    frequency = SLOWEST_TIME ** (-np.arange(TIME_FREQUENCIES) / TIME_FREQUENCIES)
    angles = 1000 * times.astype(dtype)[..., None] * jnp.asarray(frequency, dtype)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def edge_features(distances: Float[Array, "R C A"], count: int) -> Float[Array, "R C A*count"]:
    """Cosines and sines of distances in patches, `count` numbers for each distance."""
    ratio = LONGEST_EDGE_WAVE / SHORTEST_EDGE_WAVE
    frequency = 2 * np.pi / SHORTEST_EDGE_WAVE * ratio ** -np.linspace(0, 1, count // 2)
    angles = distances[..., None] * jnp.asarray(frequency, distances.dtype)
    features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return features.reshape(*distances.shape[:2], -1)


def by_slot(
    layout: Layout, modulation: Float[Array, "R S N D"], owners: Int[Array, "R C"]
) -> tuple[Float[Array, "R C D"], ...]:
    """The N vectors of each slot's segment, zeros in slots without one. They are looked up one by
    one, because the gradients of a joint lookup would first have to be stacked and transposed."""
    segments = modulation.shape[1]
    slots = (
        _owner_vectors(segments, vectors, owners) for vectors in jnp.moveaxis(modulation, 2, 0)
    )
    return tuple(layout.constrain(slot_vectors, (*SLOTS, None)) for slot_vectors in slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _owner_vectors(
    segments: int, vectors: Float[Array, "R S D"], owners: Int[Array, "R C"]
) -> Float[Array, "R C D"]:
    """The vector of each slot's segment.

    Except on CPUs the vector is looked up in the place where it is used: a product would write and
    read the vectors of all slots. The gradient is a product with zeros and ones, because a
    scatter-add would sum in any order.
    """
    slot_vectors: Array = by_platform(vectors, owners, cpu=_multiplied, default=_looked_up)
    return slot_vectors


def _multiplied(vectors: Array, owners: Array) -> Array:
    chosen = _membership(owners, vectors.shape[1], vectors.dtype)
    return jnp.einsum("rcs,rsd->rcd", chosen, vectors, precision=jax.lax.Precision.HIGHEST)


def _looked_up(vectors: Array, owners: Array) -> Array:
    # Segments count from 1: owner 0, padding, finds zeros.
    from_one = jnp.pad(vectors, ((0, 0), (1, 0), (0, 0)))
    return jnp.take_along_axis(from_one, owners[..., None], axis=1, mode="clip")


def _owner_vectors_forward(segments: int, vectors: Array, owners: Array) -> tuple[Array, Array]:
    return _owner_vectors(segments, vectors, owners), owners


def _owner_vectors_backward(segments: int, owners: Array, gradient: Array) -> tuple[Array, None]:
    chosen = _membership(owners, segments, gradient.dtype)
    d_vectors = jnp.einsum("rcs,rcd->rsd", chosen, gradient, precision=jax.lax.Precision.HIGHEST)
    return d_vectors, None


_owner_vectors.defvjp(_owner_vectors_forward, _owner_vectors_backward)


def edge_distances(layout: Layout, rows: GeneratorRows) -> Float[Array, "R C 6"]:
    """Distances of each patch from the first and the last patch of its item along every axis, plus
    a half, in patches."""
    axes = layout.mesh_axes("sequence")
    limit = jnp.iinfo(rows.positions.dtype).max

    def on_device(owners: Array, positions: Array) -> tuple[Array, Array]:
        chosen = _membership(owners, rows.times.shape[1], jnp.dtype(bool))[..., None]
        place = positions[:, :, None, :]
        # Slots of other segments get a number that wins neither minimum nor maximum.
        first = jnp.where(chosen, place, limit).min(axis=1)
        last = jnp.where(chosen, place, -limit).max(axis=1)
        if axes:
            first, last = jax.lax.pmin(first, axes), jax.lax.pmax(last, axes)
        return first, last

    patches = rows.owners_of_patches
    ends = layout.local(on_device, in_axes=(SLOTS, SLOTS), out_axes=(("batch",), ("batch",)))
    ends_by_segment = jnp.stack(ends(patches, rows.positions), axis=2).astype(jnp.float32)
    first, last = by_slot(layout, ends_by_segment, patches)
    place = rows.positions.astype(jnp.float32)
    return jnp.concatenate([place - first, last - place], axis=-1) + 0.5


def mean_conditions(
    layout: Layout, rows: GeneratorRows, conditions: Float[Array, "R C D"]
) -> Float[Array, "R S D"]:
    """Mean of the conditions that each segment sees; zeros where they are hidden."""
    axes = layout.mesh_axes("sequence")

    def on_device(owners: Array, conditions: Array) -> Array:
        chosen = _membership(owners, rows.times.shape[1], conditions.dtype)
        sums = jnp.einsum("rcs,rcd->rsd", chosen, conditions, precision=jax.lax.Precision.HIGHEST)
        condition_counts = chosen.sum(axis=1)
        if axes:
            sums, condition_counts = jax.lax.psum((sums, condition_counts), axes)
        return sums / jnp.maximum(condition_counts, 1)[..., None]

    of_means = layout.local(on_device, in_axes=(SLOTS, SLOTS), out_axes=("batch",))
    return of_means(rows.seen_conditions, conditions)


def _membership(
    owners: Int[Array, "R C"], segments: int, dtype: jnp.dtype
) -> Float[Array, "R C S"]:
    """1 where a slot belongs to a segment, numbered from 1, else 0."""
    return (owners[..., None] == jnp.arange(1, segments + 1, dtype=owners.dtype)).astype(dtype)


def _modulated(x: Array, shift: Array, scale: Array) -> Array:
    return (x.astype(shift.dtype) * (1 + scale) + shift).astype(x.dtype)


def _gated(x: Array, gate: Array) -> Array:
    return (x.astype(gate.dtype) * gate).astype(x.dtype)
