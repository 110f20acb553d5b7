"""A step's mathematics in stages: every phase as a component of the pipeline executor.

rows --first--> x --layer, layer, ..--> x --last--> tokens of an encoder, or loss and sums
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmllm.models.layers import checkpointed
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.rows import EncoderRows, LanguageRows, TokenPool
from jaxmllm.phases import LANGUAGE
from jaxmllm.trainable import Trainable, join
from jaxmllm.training.objectives.tokens import Sums
from jaxmllm.training.programs.stage_layers import LAYERS, STAGE, StageLayers
from jaxmllm.training.step_functions import StepFunctions
from sharding.gradient import Params
from sharding.pipeline.executor.component import Component, Inputs
from sharding.pools import take_rows


class Activation(NamedTuple):
    """What goes from one chunk of the decoder to the next."""

    hidden: Float[Array, "R C D"]
    valid: Float[Array, "R C"]  # 0 where a media token could not be computed


class StageFunctions:
    """A step's mathematics as components of the executor, for code inside manual axes: stages and
    `replicas`."""

    def __init__(
        self,
        functions: StepFunctions,
        replicas: tuple[str, ...],
        stage_layers: Mapping[str, StageLayers],
    ):
        model = functions.model
        self.stage_layers = stage_layers
        # Their axes are manual here, so that layouts must not name them.
        components = {
            name: replace(component, layout=component.layout.inside(STAGE, *replicas))
            for name, component in model.components.items()
        }
        self.functions = replace(functions, model=replace(model, components=components))
        self.encoders = model.config.encoders

    @property
    def model(self) -> MLLM:
        """The model, with layouts as they are inside the manual axes."""
        return self.functions.model

    def components(self) -> tuple[Component, ...]:
        """Encoders in model order, then language."""
        return (*map(self._encoder, self.encoders), self._language())

    def inputs(
        self,
        params: Any,
        rows: Mapping[str, Any],
        scale: jax.Array,
        trainable: Trainable,
    ) -> Inputs:
        """Staged parameters and rows as the executor takes them; `scale` is what losses are
        multiplied by."""
        layers = []
        outer = []
        for phase in self.model.phases:
            trained, frozen = trainable.split(
                {name: params[name] for name in self.model.phases[phase].components},
            )
            layers.append(
                Params(
                    _layers_of(trained),
                    (_layers_of(frozen), self._windowed(phase), self._numbers(phase)),
                ),
            )
            outer.append(Params(_without_layers(trained), (_without_layers(frozen), scale)))
        return Inputs(
            tuple(layers),
            tuple(outer),
            tuple(rows[phase] for phase in self.model.phases),
        )

    def _windowed(self, phase: str) -> Bool[Array, "S K L"] | None:
        """Which layers of a phase attend in windows, where any do: a part of their frozen
        parameters."""
        windows = self.model.config.windows
        if phase not in windows:
            return None
        return self.stage_layers[phase].staged(jnp.array(windows[phase].windowed)).astype(bool)

    def _numbers(self, phase: str) -> Int[Array, "S K L"] | None:
        """Numbers of a phase's layers, where something goes beside what they yield: likewise."""
        shapes = getattr(self.model.config, phase)
        if self.model.config.carried_width(phase) == shapes.width:
            return None
        index = self.stage_layers[phase].index
        return jnp.where(index < 0, shapes.layers, index)  # nothing is added after what is no layer

    def gradients(self, layers: tuple[Any, ...], outer: tuple[Any, ...]) -> dict[str, Any]:
        """The executor's gradients by trained component."""
        gradients: dict[str, Any] = {}
        for stacks, components in zip(layers, outer, strict=True):
            for name, tree in components.items():
                gradients[name] = tree | ({LAYERS: stacks[name]} if name in stacks else {})
        return gradients

    def _encoder(self, phase: str) -> Component:
        layout = self.model.layout(phase)
        dtype = self.model.components[LANGUAGE].dtype

        def first(outer: Params, rows: EncoderRows, media: Any) -> Array:
            return self.model.stem(_outer_params(outer), phase, rows)

        def layer(params: Params, x: Array, rows: EncoderRows) -> Array:
            frozen, *which = params.frozen
            return self.model.layer(phase, join(params.trained, frozen), x, rows, *which)

        def last(outer: Params, x: Array, rows: EncoderRows) -> TokenPool:
            params = _outer_params(outer)
            tokens = self.model.project(
                params,
                phase,
                self.model.normed(params, phase, x),
                rows.places,
            )
            return TokenPool(tokens.astype(dtype), rows.valid.astype(jnp.float32))

        return Component(
            first,
            self._checkpointed(phase, layer),
            last,
            layout.spec(("batch", "sequence")),
            layout.spec(("batch",)),
        )

    def _language(self) -> Component:
        layout = self.model.layout(LANGUAGE)
        dtype = self.model.components[LANGUAGE].dtype

        def first(outer: Params, rows: LanguageRows, media: tuple[TokenPool, ...]) -> Activation:
            if media:
                pools = [jax.tree.map(_concat_rows, tokens) for tokens in media]
                pool = TokenPool(
                    *(jnp.concatenate(leaves, axis=1) for leaves in zip(*pools, strict=True)),
                )
                arrived = TokenPool(*(take_rows(layout, leaf, rows.media) for leaf in pool))
            else:
                ranks, slots = rows.tokens.shape
                width = self.model.config.token_width
                arrived = TokenPool(
                    jnp.zeros((ranks, slots, width), dtype),
                    jnp.zeros((ranks, slots)),
                )
            return Activation(
                self.model.begin(_outer_params(outer), rows, arrived.tokens),
                arrived.valid,
            )

        def layer(params: Params, x: Activation, rows: LanguageRows) -> Activation:
            frozen, *which = params.frozen
            hidden = self.model.layer(
                LANGUAGE,
                join(params.trained, frozen),
                x.hidden,
                rows,
                *which,
            )
            return x._replace(hidden=hidden)

        def last(outer: Params, x: Activation, rows: LanguageRows) -> tuple[Array, Sums]:
            params = _outer_params(outer)
            scale = outer.frozen[1]
            hidden = self.model.normed(params, LANGUAGE, x.hidden)
            total, sums = self.functions.losses(hidden, self.model.head(params), rows, x.valid)
            return (total * scale).astype(jnp.float32), jax.tree.map(
                lambda by_rank: by_rank.sum(0),
                sums,
            )

        return Component(
            first,
            self._checkpointed(LANGUAGE, layer),
            last,
            layout.spec(("batch", "sequence")),
        )

    def _checkpointed(self, phase: str, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer, of which the executor keeps what `remat` of its component says."""
        return checkpointed(layer, self.model.components[phase].settings.remat)


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


def _concat_rows(tokens: jax.Array) -> jax.Array:
    """[rows read, R, T, ...] -> [R, rows read * T, ...]"""
    return jnp.moveaxis(tokens, 0, 1).reshape(tokens.shape[1], -1, *tokens.shape[3:])
