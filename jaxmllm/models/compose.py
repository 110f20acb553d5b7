"""Config -> model: which components it has, and how each is laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxmllm.config.schema import (
    ADAPTER,
    PROJECTOR,
    ComponentConfig,
    ComponentsConfig,
    ConfigError,
    ModelConfig,
)
from jaxmllm.models.adapters import Adapter
from jaxmllm.models.audio import AudioTower
from jaxmllm.models.diffusion import DiffusionTower
from jaxmllm.models.language import Decoder
from jaxmllm.models.mllm import MLLM
from jaxmllm.models.model_component import Component, check_shapes, make_component
from jaxmllm.models.projector import Projector, vision_projector
from jaxmllm.models.vision import VisionTower
from jaxmllm.phases import LANGUAGE
from jaxmllm.trainable import Trainable, leaves_by_path
from sharding.mesh import MeshError, axis_sizes
from sharding.rules import Layout, make_layout

Maker = Callable[[nnx.Rngs], nnx.Module]  # of a component's module


def build_model(
    config: ModelConfig, vocab_size: int, settings: ComponentsConfig, mesh: Mesh | AbstractMesh
) -> MLLM:
    """Compose the model that the config names.

    Raises `sharding.mesh.MeshError` for an impossible layout, and `ConfigError` for a pattern of
    `train` that names no parameter, or one that trains a matrix with an adapter.
    """
    makers = _makers(config, vocab_size)
    layouts = _layouts({name: settings.of(name) for name in makers}, mesh)
    components = {
        name: make_component(name, make, layouts[name], settings.of(name))
        for name, make in makers.items()
    }
    for name in config.adapters.by_component:
        components |= _component_and_adapter(components[name], config, settings)
    shapes = {name: component.shapes for name, component in components.items()}
    # With `freeze`, a component gets no patterns, whatever its `train` says.
    patterns = {
        name: part.settings.train for name, part in components.items() if not part.settings.freeze
    }
    trainable = Trainable.of(shapes, patterns)
    _check_adapted_frozen(config, trainable)
    return MLLM(config, vocab_size, components, trainable)


def _makers(config: ModelConfig, vocab_size: int) -> dict[str, Maker]:
    """A function by component that makes its module. Nothing is made here: `make_component` only
    traces a maker for its shapes. A tower comes before its projector, as `_layouts` requires."""
    language = config.language
    makers: dict[str, Maker] = {}
    if config.vision is not None:
        vision = config.vision
        makers["vision"] = partial(VisionTower, vision)
        makers["projector.vision"] = partial(vision_projector, vision, language.width)
    if config.audio is not None:
        audio = config.audio
        makers["audio"] = partial(AudioTower, audio)
        makers["projector.audio"] = partial(
            Projector, audio.width, audio.merge, language.width, shapes=audio.projector
        )
    makers[LANGUAGE] = partial(Decoder, language, vocab_size)
    if config.diffusion is not None:
        diffusion = config.diffusion
        makers["diffusion"] = partial(DiffusionTower, diffusion)
        makers[f"{PROJECTOR}{LANGUAGE}"] = partial(
            Projector, language.width, 1, diffusion.width, shapes=diffusion.projector_shapes
        )
    return makers


def _component_and_adapter(
    component: Component, config: ModelConfig, settings: ComponentsConfig
) -> dict[str, Component]:
    """A component with the scale of its adapter, and the adapter as a component, by name."""
    adapter = config.adapters.by_component[component.name]
    matrices = getattr(config, component.name).matrices
    axes = dict(leaves_by_path(component.axes))
    parameters = {
        path: (leaf.shape, axes[path].names) for path, leaf in leaves_by_path(component.shapes)
    }
    name = f"{ADAPTER}{component.name}"
    adapter_component = make_component(
        name,
        lambda rngs: Adapter(adapter, matrices, parameters, rngs),
        component.layout,
        settings.of(name),
    )
    return {
        component.name: replace(component, adapter_scale=adapter.scale),
        name: adapter_component,
    }


def _check_adapted_frozen(config: ModelConfig, trainable: Trainable) -> None:
    """Raise `ConfigError` for a matrix that has an adapter and would also be trained itself."""
    for name, adapter in config.adapters.by_component.items():
        for path in adapter.adapted(getattr(config, name).matrices):
            if f"{name}.{path}" in trainable.paths:
                raise ConfigError(
                    f"components.{name}: {path} has an adapter (model.adapters.{name}) and would be trained "
                    f"itself; set components.{name}.freeze: true, or leave it out of components.{name}.train"
                )


def laid_out(model: MLLM, settings: ComponentsConfig, mesh: Mesh | AbstractMesh) -> MLLM:
    """The same model on another mesh or in other layouts, without tracing its shapes again.

    Args:
      settings: with the `freeze` and `train` that the model was built with.

    Raises:
      MeshError: a layout is impossible.
    """
    chosen = {name: settings.of(name) for name in model.components}
    layouts = _layouts(chosen, mesh)
    components = {
        name: replace(part, layout=layouts[name], settings=chosen[name])
        for name, part in model.components.items()
    }
    for component in components.values():
        check_shapes(component)
    return replace(model, components=components)


def with_settings(model: MLLM, settings: ComponentsConfig) -> MLLM:
    """The same model in the same layouts, with other settings of its components (remat, types)."""
    components = {
        name: replace(component, settings=settings.of(name))
        for name, component in model.components.items()
    }
    return replace(model, components=components)


def _layouts(
    settings: Mapping[str, ComponentConfig], mesh: Mesh | AbstractMesh
) -> dict[str, Layout]:
    """Layouts by component. In `settings`, a tower must come before its projector and its adapter.

    Raises `MeshError` for an impossible layout, or a projector on other ranks than its tower.
    """
    sizes = axis_sizes(mesh)
    layouts: dict[str, Layout] = {}
    for name, setting in settings.items():
        if name.startswith(ADAPTER):  # factors are laid out as the matrices that they adapt
            layouts[name] = layouts[name.removeprefix(ADAPTER)]
            continue
        overrides = dict(setting.layout)
        if name.startswith(PROJECTOR):  # a projector runs on the ranks of its tower
            owner = (
                "diffusion" if name == f"{PROJECTOR}{LANGUAGE}" else name.removeprefix(PROJECTOR)
            )
            tower = layouts[owner]
            for axes in ("batch", "sequence"):
                of_tower = list(tower.whole_axes(axes))
                named = overrides.setdefault(axes, of_tower)
                # Axes of size 1 split nothing, so the two may differ in them.
                if any(sizes.get(axis) != 1 for axis in {*named} ^ {*of_tower}):
                    raise MeshError(
                        f"components.{name}.layout.{axes}: {list(named)} is not {of_tower}, that of "
                        f"components.{owner}, whose rows it reads; leave it out"
                    )
        layouts[name] = replace(
            make_layout(mesh, overrides, f"components.{name}.layout"),
            narrow_gradients=setting.reduce_dtype == "compute",
        )
    return layouts
