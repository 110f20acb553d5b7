"""A step's mathematics in stages: every phase as a component of the pipeline executor.

rows --first--> x --layer, layer, ..--> x --last--> encoder: tokens
                                                    decoder: states if a generator reads them; if
                                                             text has a loss, loss and sums
                                                    generator: loss and sums
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.balance.records import RowClass
from jaxmllm.models.diffusion import Drawn
from jaxmllm.models.layers import checkpointed
from jaxmllm.models.mixture import RouterSums
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.model_component import LAYERS
from jaxmllm.models.rows import EncoderRows, GeneratorRows, LanguageRows, TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.trainable import Trainable, join
from jaxmllm.training.generator_functions import GeneratorFunctions
from jaxmllm.training.objectives.flow import FlowSums, noisy_patches
from jaxmllm.training.objectives.routing import Routing, router_loss
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.stage_layers import StageLayers
from jaxmllm.training.step_functions import StepFunctions, media_slots
from sharding.context import by_rank, to_ranks
from sharding.gradient import Params
from sharding.pipeline.executor.component import Component, Components, Inputs
from sharding.pipeline.ring import STAGE
from sharding.pools import of_group, on_first_part
from sharding.rules import Layout


class Activation(NamedTuple):
    """The result of one chunk of the decoder, which the next chunk reads."""

    hidden: Float[Array, "R C D"]
    valid: Float[Array, "R C"]  # 0 where a media token could not be computed
    # With experts: sums over the layers so far, [R, L, ...]; all floats, as gradients flow back
    routed: RouterSums | None = None


class Drawing(NamedTuple):
    """The result of one chunk of a generator, which the next chunk reads."""

    drawn: Drawn
    valid: Float[Array, "R C"]  # 0 where a state that is read could not be computed


class LossConstants(NamedTuple):
    """Inputs of the losses from outside the pipeline."""

    scale: Any  # factor of the sum over targets
    routing: Routing | None = None  # of a decoder with experts, in training
    drawn_scale: Any = None  # with a generator, factor of the sum over patches


class StageFunctions:
    """A step's mathematics as components of the executor, whose code runs inside manual axes: the
    stages and the axes of rows.

    Args:
      manual: the axes of rows.
      classes: row classes of each phase.
    """

    def __init__(
        self,
        functions: StepFunctions,
        manual: tuple[str, ...],
        stage_layers: Mapping[str, StageLayers],
        classes: Mapping[str, tuple[RowClass, ...]],
    ):
        self.stage_layers = stage_layers
        self.manual = manual
        self.functions = functions
        self.classes = classes
        config = functions.model.config
        self.generators = config.generators
        self.media = (*config.encoders, *config.generators)

    @property
    def model(self) -> MLLM:
        """The model, with layouts as they are outside of the manual axes."""
        return self.functions.model

    @property
    def _sent_dtype(self) -> Any:
        """Type of the tokens and states that one phase sends to another."""
        return self.model.components[LANGUAGE].dtype

    @property
    def group(self) -> Layout:
        """Layout of language rows with the largest span of any phase: what one rank of such a group
        encodes, all of its ranks may read."""
        widest = max(row_class.span for of_phase in self.classes.values() for row_class in of_phase)
        return self.model.layout(LANGUAGE).spanned(widest).inside(STAGE, *self.manual)

    def components(self) -> Components:
        """For each phase (encoders in model order, language, its generator) and each of its row
        classes, a component."""
        return tuple(
            tuple(self._component(phase, row_class.span) for row_class in self.classes[phase])
            for phase in self.model.phases
        )

    def _component(self, phase: str, span: int) -> Component:
        functions = self._manual_functions(phase, span)
        if phase == LANGUAGE:
            return self._language_component(functions)
        generates = self.model.phases[phase].generates
        return (self._generator_component if generates else self._encoder_component)(
            phase, functions
        )

    def _manual_functions(self, phase: str, span: int) -> StepFunctions:
        """The functions for rows of a phase that `span` ranks hold together, inside manual axes."""
        model = self.model.spanned(phase, span)
        components = {
            name: replace(component, layout=component.layout.inside(STAGE, *self.manual))
            for name, component in model.components.items()
        }
        return replace(self.functions, model=replace(model, components=components))

    def inputs(
        self,
        params: Any,
        rows: Mapping[str, Any],
        constants: LossConstants,
        trainable: Trainable,
    ) -> Inputs:
        """Staged parameters and rows, or their shapes, as the executor takes them."""
        layers = []
        outer = []
        for phase in self.model.phases:
            trained, frozen = trainable.split(
                {name: params[name] for name in self.model.phases[phase].components},
            )
            # Window flags and layer numbers reach each layer as parameters do, so they are put with
            # the frozen ones.
            layers.append(
                Params(
                    _layers_of(trained),
                    (_layers_of(frozen), self._window_flags(phase), self._layer_numbers(phase)),
                ),
            )
            outer.append(Params(_without_layers(trained), (_without_layers(frozen), constants)))
        return Inputs(
            tuple(layers),
            tuple(outer),
            tuple(rows[phase] for phase in self.model.phases),
        )

    def _window_flags(self, phase: str) -> Bool[Array, "S K L"] | None:
        """Which layers of a phase attend in windows, passed with their frozen parameters; None if
        no layer does."""
        windows = self.model.config.windows
        if phase not in windows:
            return None
        return self.stage_layers[phase].staged(jnp.array(windows[phase].windowed)).astype(bool)

    def _layer_numbers(self, phase: str) -> Int[Array, "S K L"] | None:
        """Numbers of a phase's layers, passed in the same way; None unless a layer adds to values
        that are carried next to its result (features for deepstack, sums over the routing)."""
        shapes = getattr(self.model.config, phase)
        routes = phase == LANGUAGE and self.functions.routing_shape is not None
        if self.model.config.carried_width(phase) == shapes.width and not routes:
            return None
        index = self.stage_layers[phase].index
        return jnp.where(index < 0, shapes.layers, index)  # no layer: a number that adds nothing

    def gradients(self, layers: tuple[Any, ...], outer: tuple[Any, ...]) -> dict[str, Any]:
        """The executor's gradients by trained component."""
        gradients: dict[str, Any] = {}
        for stacks, components in zip(layers, outer, strict=True):
            for name, tree in components.items():
                gradients[name] = tree | ({LAYERS: stacks[name]} if name in stacks else {})
        return gradients

    def _encoder_component(self, phase: str, functions: StepFunctions) -> Component:
        model = functions.model
        layout = model.layout(phase)

        def first(outer: Params, rows: EncoderRows, media: Any) -> Array:
            return model.stem(_outer_params(outer), phase, rows)

        def layer(params: Params, x: Array, rows: EncoderRows) -> Array:
            # `inputs` puts flags of windows and layer numbers with the frozen parameters.
            frozen, *which = params.frozen
            return model.layer(phase, join(params.trained, frozen), x, rows, *which)[0]

        def last(outer: Params, x: Array, rows: EncoderRows) -> TokenPool:
            params = _outer_params(outer)
            features = model.finish(params, phase, rows, x)
            tokens = model.project(params, phase, features, rows.places)
            # Tokens are by rank already, but `rows.valid` only where no ranks share a row.
            valid = by_rank(layout, rows.valid) if layout.span > 1 else rows.valid
            return TokenPool(tokens.astype(self._sent_dtype), valid.astype(jnp.float32))

        return Component(
            first,
            self._checkpointed_layer(phase, layer),
            last,
            _automatic_spec(layout, "batch", "sequence"),
            _automatic_spec(layout, "rank"),
        )

    def _language_component(self, functions: StepFunctions) -> Component:
        model = functions.model
        layout = model.layout(LANGUAGE)
        generates = bool(self.generators)
        learns = functions.learns_text

        def first(outer: Params, rows: LanguageRows, media: tuple[TokenPool, ...]) -> Activation:
            arrived = self._take_media(layout, rows, media)
            hidden = model.begin(_outer_params(outer), rows, arrived.tokens)
            return Activation(hidden, arrived.valid, self._zero_router_sums(len(rows.tokens)))

        def layer(params: Params, x: Activation, rows: LanguageRows) -> Activation:
            frozen, windowed, layer_number = params.frozen
            layer_params = join(params.trained, frozen)
            hidden, routed = model.layer(
                LANGUAGE, layer_params, x.hidden, rows, windowed, layer_number
            )
            if x.routed is None or routed is None:
                return x._replace(hidden=hidden)
            return x._replace(hidden=hidden, routed=_add_layer_sums(x.routed, routed, layer_number))

        def last(outer: Params, x: Activation, rows: LanguageRows) -> Any:
            hidden = model.finish_states(_outer_params(outer), x.hidden)
            losses = _text_losses(functions, outer, x, hidden, rows) if learns else None
            if not generates:
                return losses
            # Text losses leave out examples with failed media. States of these are marked as not
            # valid, so that generators leave out the items that read them.
            computed = ~functions.failed_tokens(rows, x.valid)
            states = TokenPool(hidden.astype(self._sent_dtype), computed.astype(jnp.float32))
            # From rows [R / g, g * C, ...], which may be in parts, to each rank's slots in packed
            # order, [R, C, ...]
            pool: TokenPool = to_ranks(layout, states, rows.order)
            return (pool, losses) if learns else pool

        return Component(
            first,
            self._checkpointed_layer(LANGUAGE, layer),
            last,
            _automatic_spec(layout, "batch", "sequence"),
            _automatic_spec(layout, "rank"),
        )

    def _take_media(
        self, layout: Layout, rows: LanguageRows, media: tuple[TokenPool, ...]
    ) -> TokenPool:
        """The media tokens of language rows, at their slots: [R, C, ...]."""
        if media:
            return media_slots(rows).take(layout, of_group(self.group, _concat_tokens(media)))
        shape = rows.tokens.shape
        width = self.model.config.token_width
        return TokenPool(jnp.zeros((*shape, width), self._sent_dtype), jnp.zeros(shape))

    def _generator_component(self, phase: str, functions: StepFunctions) -> Component:
        model = functions.model
        layout = model.layout(phase)
        drawing = GeneratorFunctions(functions, phase)
        group = self.group

        def first(outer: Params, rows: GeneratorRows, media: tuple[TokenPool, ...]) -> Drawing:
            states, valid = drawing.conditions(rows, of_group(group, _concat_tokens(media)))
            noisy = noisy_patches(layout, rows, drawing.dtype).noisy
            begun = model.begin_drawing(_outer_params(outer), phase, rows, noisy, states)
            return Drawing(begun, valid)

        def layer(params: Params, x: Drawing, rows: GeneratorRows) -> Drawing:
            layer_params = join(params.trained, params.frozen[0])
            return x._replace(drawn=model.draw_layer(phase, layer_params, x.drawn, rows))

        def last(outer: Params, x: Drawing, rows: GeneratorRows) -> tuple[Array, FlowSums]:
            constants: LossConstants = outer.frozen[1]
            predicted = model.finish_drawing(_outer_params(outer), phase, rows, x.drawn)
            # The same noise as in `first`, made again from its keys.
            patches = noisy_patches(layout, rows, drawing.dtype)
            total, sums = drawing.losses(rows, patches, predicted, x.valid)
            total *= constants.drawn_scale
            return total.astype(jnp.float32), _row_sums(layout, sums)

        return Component(
            first,
            self._checkpointed_layer(phase, layer),
            last,
            _automatic_spec(layout, "batch", "sequence"),
        )

    def _zero_router_sums(self, rows: int) -> RouterSums | None:
        """Zeroed sums over the routing of rows; None without experts."""
        shape = self.functions.routing_shape
        if shape is None:
            return None
        layers, experts = shape
        dtype = jnp.promote_types(self.model.components[LANGUAGE].dtype, jnp.float32)
        by_expert = jnp.zeros((rows, layers, experts), dtype)
        return RouterSums(by_expert, by_expert, jnp.zeros((rows, layers), dtype))

    def _checkpointed_layer(self, phase: str, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer, of which the executor keeps what its component's `remat` says."""
        return checkpointed(layer, self.model.components[phase].settings.remat, in_loop=True)


def _text_losses(
    functions: StepFunctions,
    outer: Params,
    x: Activation,
    hidden: Float[Array, "R C D"],
    rows: LanguageRows,
) -> tuple[Array, Sums]:
    """The objective to differentiate and the sums of language rows, from the last layer's result
    `x` and its hidden states after the final norm, `hidden`."""
    constants: LossConstants = outer.frozen[1]
    head = functions.model.head(_outer_params(outer))
    total, sums = functions.losses(hidden, head, rows, x.valid)
    total *= constants.scale
    if x.routed is not None:
        # Counts were carried from chunk to chunk as floats, like all of an `Activation`.
        expert_counts = jnp.round(x.routed.counts).astype(jnp.int32)
        routed = x.routed._replace(counts=expert_counts)
        sums = sums._replace(routed=functions.routed_sums(routed))
        if constants.routing is not None:
            total += router_loss(functions.objective.experts, routed, constants.routing)
    return total.astype(jnp.float32), _row_sums(functions.model.layout(LANGUAGE), sums)


def _row_sums(layout: Layout, sums: Any) -> Any:
    """Sums over rows, on the first of the devices that hold a row's parts; zero on the others."""
    return jax.tree.map(lambda by_row: on_first_part(layout, by_row.sum(0)), sums)


def _add_layer_sums(sums: RouterSums, of_layer: RouterSums, number: Int[Array, ""]) -> RouterSums:
    """Sums by layer [R, L, ...] plus those of layer `number`; number L, no layer, adds nothing."""
    added: RouterSums = jax.tree.map(
        lambda total, own: total.at[:, number].add(own.astype(total.dtype), mode="drop"),
        sums,
        of_layer,
    )
    return added


def _automatic_spec(layout: Layout, *axes: str) -> PartitionSpec | None:
    """How arrays are split over the axes that are not manual; None if all axes are."""
    if layout.manual_axes == set(layout.mesh.axis_names):
        return None
    return layout.spec(axes)


def _layers_of(params: dict[str, Any]) -> dict[str, Any]:
    """The stacked layers of components that have any."""
    return {name: tree[LAYERS] for name, tree in params.items() if LAYERS in tree}


def _without_layers(params: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: leaf for key, leaf in tree.items() if key != LAYERS}
        for name, tree in params.items()
    }


def _outer_params(outer: Params) -> dict[str, Any]:
    """Parameters outside the layers, by component."""
    params: dict[str, Any] = join(outer.trained, outer.frozen[0])
    return params


def _concat_tokens(media: tuple[TokenPool, ...]) -> TokenPool:
    """The tokens of all rows that a microbatch reads, concatenated: [R, W, ...]."""
    pools = [jax.tree.map(_concat_rows, tokens) for tokens in media]
    return TokenPool(*(jnp.concatenate(leaves, axis=1) for leaves in zip(*pools, strict=True)))


def _concat_rows(tokens: jax.Array) -> jax.Array:
    """[rows read, R, T, ...] -> [R, rows read * T, ...]"""
    return jnp.moveaxis(tokens, 0, 1).reshape(tokens.shape[1], -1, *tokens.shape[3:])
