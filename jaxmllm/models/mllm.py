"""The composed model: any subset of encoders, the decoder, and perhaps a generator that reads it,
as named components, each with its own layout and settings.

    rows --tower--> features --projector--> language tokens --(pool, exchange)--> decoder --> hidden states

Parameters are a dict {component name: pytree}; modules exist only while a function is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.attention.attention import Choice, choice
from jaxmllm.config.schema import (
    PROJECTOR,
    ModelConfig,
)
from jaxmllm.models.diffusion import Conditions, Drawn
from jaxmllm.models.language import Decoder, OutputHead
from jaxmllm.models.layers import checkpointed, with_added, with_tapped
from jaxmllm.models.mixture import MixtureBlock, RouterSums
from jaxmllm.models.model_component import (
    LAYERS,
    Component,
    ParameterAxes,
    init_component,
    shardings,
)
from jaxmllm.models.rows import EncoderRows, GeneratorRows, LanguageRows
from jaxmllm.phases import LANGUAGE, Phase, make_phases
from jaxmllm.trainable import Params, Trainable
from sharding.context import take_slots
from sharding.mesh import MeshError, platform_of
from sharding.parameters import by_replica, row_axes, whole_sum
from sharding.rules import Layout


@dataclass(frozen=True)
class MLLM:
    """A model made of components. Methods that compute with parameters are for traced code."""

    config: ModelConfig
    vocab_size: int
    components: dict[str, Component]
    trainable: Trainable

    @cached_property
    def phases(self) -> dict[str, Phase]:
        return make_phases(self.config)

    @property
    def ema(self) -> dict[str, float]:
        """Share of the average that an update keeps, by component with averaged parameters."""
        settings = {name: component.settings for name, component in self.components.items()}
        return {
            name: setting.ema
            for name, setting in sorted(settings.items())
            if setting.ema is not None
        }

    def layout(self, phase: str) -> Layout:
        return self.components[phase].layout

    def with_layout(self, name: str, layout: Layout) -> MLLM:
        """The same model with another layout for a component's activations; its parameters stay
        where they are."""
        return replace(
            self, components=self.components | {name: replace(self.components[name], layout=layout)}
        )

    def key_value_bytes(self, phase: str) -> int:
        """Bytes of the keys and values of one attention token in all layers of a phase, as all
        devices of a rank together compute them."""
        component = self.components[phase]
        tower = getattr(self.config, phase)
        heads = tower.heads
        # If heads and kv_heads are split differently, `SelfAttention.mixed` repeats keys and values
        # for all heads.
        if component.layout.mesh_axes("heads") == component.layout.mesh_axes("kv_heads"):
            heads = getattr(tower, "kv_heads", heads)
        size: int = 2 * tower.layers * heads * tower.head_size * component.dtype.itemsize
        return size * getattr(tower, "attentions", 1)

    def attention_choice(self, phase: str, block: int) -> Choice:
        """The attention kernel of a phase on the mesh's devices, for blocks of `block` tokens."""
        component = self.components[phase]
        return choice(
            component.settings.attention,
            platform_of(component.layout.mesh),
            component.dtype,
            getattr(self.config, phase).head_size,
            block,
        )

    def spanned(self, phase: str, span: int) -> MLLM:
        """The same model for rows of a phase that `span` ranks hold together."""
        model = self
        for name in self.phases[phase].components:
            model = model.with_layout(name, self.components[name].layout.spanned(span))
        return model

    def by_device(self, phase: str) -> MLLM:
        """The same model, for code of one device along the axes of rows (sharding/parameters.py).

        Raises `MeshError` where devices with different rows would also hold different layers: each
        device runs its rows through all layers.
        """
        axes = row_axes(self.layout(phase))
        model = self
        for name in self.phases[phase].components:
            layout = self.components[name].layout.inside(*axes)
            if layout.size(LAYERS) != self.components[name].layout.size(LAYERS):
                raise MeshError(
                    f"components.{name}.layout.layers: mesh axes {[*layout.whole_axes(LAYERS)]} split rows, each of "
                    "which needs all layers; leave it out, or name axes that are neither of 'batch' nor of 'sequence'"
                )
            model = model.with_layout(name, layout)
        return model

    def deferred(self, params: Params) -> Params:
        """Parameters of some components, in which those whose gradients stay whole are `Deferred`;
        for models made by `by_device`."""
        return {
            name: self.components[name].deferred(parameters) for name, parameters in params.items()
        }

    def summed(self, trained: Params, totals: Params) -> Params:
        """Trained parameters of some components, in which those of layers are `Summed`.

        Args:
          totals: sums of gradients by component, of at least these components.
        """
        return {
            name: self.components[name].summed(parameters, totals[name])
            for name, parameters in trained.items()
        }

    def gradient_sums(self, trained: Params, dtype: Any) -> Params:
        """Shapes and shardings of the sums of gradients over the microbatches of a step, for
        trained parameters given by shape.

        Each replica of a shard has a sum of its own. With `reduce: step` each device has a sum for
        the whole parameter, as far as the parameter is gathered where it is used.
        """

        def sums(phase: str, component: Component, part: Params) -> Any:
            def leaf(value: Any, axes: ParameterAxes) -> jax.ShapeDtypeStruct:
                if component.defers(axes):
                    return whole_sum(component.layout, value, axes.names, dtype)
                return by_replica(self.layout(phase), value, dtype)

            return jax.tree.map(leaf, part, component.axes_of(part))

        by_component = {}
        for phase, record in self.phases.items():
            for name in record.components:
                if name in trained:
                    # Components defer only in code of one device, see `Component.defers`.
                    component = self.by_device(phase).components[name]
                    by_component[name] = sums(phase, component, trained[name])
        return by_component

    def init(self, seed: int, dtype: str, places: Params | None = None) -> Params:
        """New parameters on the mesh. Those of a component depend only on (seed, its name).

        Args:
          places: shardings of the parameters; none: those of `abstract`.
        """
        params = {}
        for name, component in self.components.items():
            component_places = shardings(component) if places is None else places[name]
            params[name] = init_component(component, seed, dtype, component_places)
        return params

    def abstract(self, dtype: str) -> Params:
        """Shapes, types and shardings of the parameters."""

        def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

        return {
            name: jax.tree.map(placed, component.shapes, shardings(component))
            for name, component in self.components.items()
        }

    def features(
        self, params: Params, phase: str, rows: EncoderRows
    ) -> Float[Array, "R/g g*C/m D"]:
        """Run the tower of an encoder phase."""
        component = self.components[phase]
        tower = component.module(params)
        return _zero_dataless_slots(
            tower(rows, component.layout, component.dtype, component.settings), rows.segments
        )

    def project(
        self,
        params: Params,
        phase: str,
        features: Float[Array, "R/g g*C D"],
        places: Int[Array, "R/g g*T"],
    ) -> Float[Array, "R T O"]:
        """Turn a tower's features into language tokens, each rank's in packed order. Where decoder
        layers add tokens of another tower (deepstack), zeros fill up the tokens of this one."""
        name = f"{PROJECTOR}{phase}"
        tokens = self._projector_output(params, name, features)
        if missing := self.config.token_width - tokens.shape[-1]:
            tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, missing)))
        layout = self.components[name].layout
        if not layout.mesh_axes("sequence") and phase not in self.config.windows:
            return tokens  # rows in one part are in packed order, except in phases with windows
        return take_slots(layout, tokens, places)

    def _projector_output(self, params: Params, name: str, given: Float[Array, "R C D"]) -> Array:
        """Output of the projector of this name for features of a tower or states of the decoder."""
        component = self.components[name]

        def projected(params: Params, given: Array) -> Array:
            result: Array = component.module(params)(
                given.astype(component.dtype), component.layout
            )
            return result

        project = checkpointed(projected, component.settings.remat, in_loop=False)
        return project({name: params[name]}, given)

    def hidden(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C W"]
    ) -> tuple[Float[Array, "R C D"], OutputHead]:
        """Normed hidden states of language rows, and the head. `media` holds the routed tokens."""
        hidden, head, _ = self.routed_hidden(params, rows, media)
        return hidden, head

    def routed_hidden(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C W"]
    ) -> tuple[Float[Array, "R C D"], OutputHead, RouterSums | None]:
        """As `hidden`, and sums over routing [R, L, ...] where there are experts."""
        component = self.components[LANGUAGE]
        decoder: Decoder = component.module(params)
        added = self._deepstack_vectors(rows, media) if self.config.deepstack_depth else None
        hidden, routed = decoder(
            self.embed(params, rows, media), rows, component.layout, component.settings, added
        )
        return hidden, decoder.output_head(), routed

    def _deepstack_vectors(
        self, rows: LanguageRows, media: Float[Array, "R C W"]
    ) -> Float[Array, "N R C D"]:
        """Parts of the routed tokens: for each of the first N layers, what is added after it."""
        _, *deepstack = jnp.split(media, 1 + self.config.deepstack_depth, axis=-1)
        added = jnp.stack(deepstack).astype(self.components[LANGUAGE].dtype)
        return jnp.where((rows.media >= 0)[..., None], added, 0)

    def draw(
        self,
        params: Params,
        phase: str,
        rows: GeneratorRows,
        noisy: Float[Array, "R C F"],
        states: Float[Array, "R C D"],
    ) -> Float[Array, "R C F"]:
        """Predictions of a generator for noisy patches. `states` holds states of the decoder in the
        slots of conditions."""
        conditions = self._projected_conditions(params, states)
        component = self.components[phase]
        predictions: Array = component.module(params)(
            rows, noisy, conditions, component.layout, component.dtype, component.settings
        )
        return predictions

    def _projected_conditions(self, params: Params, states: Float[Array, "R C D"]) -> Conditions:
        """The decoder's states that generators read, projected. With `conditioning: cross`, also
        the projection of zeros, which stands for each condition that an item lacks."""
        name = f"{PROJECTOR}{LANGUAGE}"
        padded = None
        if any(self.config.crossed.values()):
            nothing = jnp.zeros_like(states[:, : self.components[name].layout.parts])
            padded = self._projector_output(params, name, nothing)
        return Conditions(self._projector_output(params, name, states), padded)

    # ------------------------------------------------------------------ piece by piece, for pipelines

    def stem(self, params: Params, phase: str, rows: EncoderRows) -> Float[Array, "R T D"]:
        """Input of a tower's first layer, and zeros where the outputs of its tapped layers
        (deepstack) will go."""
        component = self.components[phase]
        x: Array = component.module(params).embed(rows, component.layout, component.dtype)
        # In stages a slot holds x and then N more vectors, all of the layers' width D: in a tower
        # the outputs of its taps so far, zeros at first; in the decoder what is added after its
        # first N layers.
        beside = self.config.carried_width(phase) - x.shape[-1]
        return jnp.pad(x, ((0, 0), (0, 0), (0, beside))) if beside else x

    def begin(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C W"]
    ) -> Float[Array, "R C W"]:
        """Input of the decoder's first layer, and then what is added after the first N layers."""
        x = self.embed(params, rows, media)
        if not self.config.deepstack_depth:
            return x
        return jnp.concatenate([x, *self._deepstack_vectors(rows, media)], axis=-1)

    def embed(
        self, params: Params, rows: LanguageRows, media: Float[Array, "R C W"]
    ) -> Float[Array, "R C D"]:
        """Input of the decoder's first layer: embedded text, and routed `media` in their slots."""
        component = self.components[LANGUAGE]
        text = component.module(params).embed(rows.tokens, component.layout, component.dtype)
        tokens = media[..., : text.shape[-1]].astype(component.dtype)
        return jnp.where((rows.media >= 0)[..., None], tokens, text)

    def layer(
        self,
        phase: str,
        params: Params,
        x: Float[Array, "R T D"],
        rows: EncoderRows | LanguageRows,
        windowed: Bool[Array, ""] | None = None,
        number: Int[Array, ""] | None = None,
    ) -> tuple[Array, RouterSums | None]:
        """Run one layer of a tower or of the decoder; returns its output, and sums over its routing
        [R, ...] where it has experts.

        Args:
          params: this layer's parameters, by component.
          x: input of the layer; with deepstack followed by the vectors of `stem` or `begin`.
          windowed: whether the layer attends in windows; none: no layer of the phase does.
          number: number of the layer; needed only with deepstack.
        """
        component = self.components[phase]
        tower = component.module({phase: {}})
        # The graph of all layers also serves one layer, because it holds no shapes of parameters.
        block = nnx.merge(nnx.split(tower.layers)[0], component.adapted(params)[phase])
        context = tower.context(rows, component.layout, component.dtype, component.settings)
        x, beside = self._split_carried(phase, x)
        out: Array
        routed: RouterSums | None = None
        if isinstance(block, MixtureBlock):
            out, routed = block(x, context.for_layer(windowed))
        else:
            out = block(x, context.for_layer(windowed))
        if beside is None:
            return out, routed
        assert number is not None
        if phase == LANGUAGE:
            out = with_added(out, beside, number)
        else:
            taps = getattr(self.config, phase).deepstack_layers
            beside = with_tapped(out, beside, taps, number)
        return jnp.concatenate([out, *beside], axis=-1), routed

    def finish(
        self, params: Params, phase: str, rows: EncoderRows, x: Float[Array, "R T D"]
    ) -> Float[Array, "R T D"]:
        """Features of a tower, as `features` returns them, given the output of its last layer."""
        x, beside = self._split_carried(phase, x)
        normed: Array = self.components[phase].module(params).normed(x)
        features = normed if beside is None else jnp.concatenate([normed, *beside], axis=-1)
        return _zero_dataless_slots(features, rows.segments)

    def finish_states(self, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Normed hidden states of the decoder, given the output of its last layer."""
        states: Array = (
            self.components[LANGUAGE].module(params).normed(self._split_carried(LANGUAGE, x)[0])
        )
        return states

    def begin_drawing(
        self,
        params: Params,
        phase: str,
        rows: GeneratorRows,
        noisy: Float[Array, "R C F"],
        states: Float[Array, "R C D"],
    ) -> Drawn:
        """Input of a generator's first layer, from the arguments of `draw`."""
        conditions = self._projected_conditions(params, states)
        component = self.components[phase]
        begun: Drawn = component.module(params).begin(
            rows, noisy, conditions, component.layout, component.dtype
        )
        return begun

    def draw_layer(self, phase: str, params: Params, drawn: Drawn, rows: GeneratorRows) -> Drawn:
        """Run one layer of a generator.

        Args:
          params: this layer's parameters, by component.
        """
        component = self.components[phase]
        tower = component.module({phase: {}})
        block = nnx.merge(nnx.split(tower.layers)[0], component.adapted(params)[phase])
        context = tower.context(rows, component.layout, component.dtype, component.settings)
        return drawn._replace(x=block(drawn, context))

    def finish_drawing(
        self, params: Params, phase: str, rows: GeneratorRows, drawn: Drawn
    ) -> Float[Array, "R C F"]:
        """Predictions of a generator, given the output of its last layer."""
        component = self.components[phase]
        predictions: Array = component.module(params).finish(
            rows, drawn, component.layout, component.dtype
        )
        return predictions

    def _split_carried(
        self, phase: str, x: Float[Array, "R T W"]
    ) -> tuple[Float[Array, "R T D"], Float[Array, "N R T D"] | None]:
        """Split the slots of stages into x and the N vectors after it; none if there are none."""
        width = getattr(self.config, phase).width
        if x.shape[-1] == width:
            return x, None
        # A slot is x, D numbers, and N vectors of D: [R, T, (1 + N) * D] -> [N, R, T, D].
        parts = x.reshape(*x.shape[:-1], -1, width)
        return parts[..., 0, :], jnp.moveaxis(parts[..., 1:, :], -2, 0)

    def head(self, params: Params) -> OutputHead:
        """The output head, which turns hidden states into logits."""
        head: OutputHead = self.components[LANGUAGE].module(params).output_head()
        return head


def _zero_dataless_slots(
    features: Float[Array, "R C/m D"], segments: Int[Array, "R C"]
) -> Float[Array, "R C/m D"]:
    """Features, with zeros in slots of an item that hold no data but are read: those after the end
    of a clip, in its last language token.

    Such a slot attends to nothing. As long as biases are zero, it stays zero in every layer, and
    its gradient would grow by the derivative of every norm, which is up to 1,000 at zero: beyond
    float32 in 13 layers.
    """
    stride = segments.shape[1] // features.shape[1]
    return jnp.where(segments[:, ::stride, None] > 0, features, 0)
