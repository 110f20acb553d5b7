"""Which parameters are trained: one mask by parameter path, made once from the config.

    shapes, patterns --Trainable.of--> mask          parameters --split--> (trained, frozen) --join--> parameters

Step functions differentiate the parameters that `split` calls trained, and optimizer states and
gradients exist for them only. Costs and pipeline stages ask how much of each component is trained.
Parameters are {component: nested dicts of arrays}; the path of one is the keys that lead to it,
joined by dots: "language.layers.mlp.up".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any

from jaxmllm.config.schema import ConfigError

Params = dict[str, Any]  # component name -> nested dicts of arrays
EVERYTHING = ("*",)
LISTED = 6  # most parameters that an error names


@dataclass(frozen=True)
class Trainable:
    """The mask of a model: paths of its trained parameters, and their share of each component."""

    paths: frozenset[str]
    # Trained share of a component's numbers; only components of which anything is trained
    shares: Mapping[str, Fraction]

    @classmethod
    def of(cls, shapes: Params, patterns: Mapping[str, Sequence[str]]) -> Trainable:
        """The mask of a model with parameters of these shapes.

        Args:
          shapes: parameters, or anything with their shapes, by component.
          patterns: by component, which of its parameters are trained: paths inside the component,
            in which `*` stands for any characters ("layers.mlp.*", "*bias"). A component without
            patterns is frozen.

        Raises:
          ConfigError: no parameter matches a pattern.
        """
        paths: set[str] = set()
        shares: dict[str, Fraction] = {}
        for component, tree in shapes.items():
            sizes = {path: math.prod(leaf.shape) for path, leaf in leaves_by_path(tree)}
            chosen: set[str] = set()
            for pattern in patterns.get(component, ()):
                matched = {path for path in sizes if fnmatchcase(path, pattern)}
                if not matched:
                    raise ConfigError(
                        f"components.{component}.train: {pattern!r} matches no parameter of {component}: it has "
                        f"{', '.join([*sizes][:LISTED])}{', ..' if len(sizes) > LISTED else ''}"
                    )
                chosen |= matched
            if chosen:
                paths |= {f"{component}.{path}" for path in chosen}
                shares[component] = Fraction(
                    sum(sizes[path] for path in chosen), sum(sizes.values())
                )
        return cls(frozenset(paths), shares)

    @property
    def components(self) -> frozenset[str]:
        """Components of which anything is trained. Gradients flow into and through them."""
        return frozenset(self.shares)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split parameters of all or some components into (trained, frozen), without overlap."""
        trained = _selected_params(params, lambda path: path in self.paths)
        frozen = _selected_params(params, lambda path: path not in self.paths)
        return trained, frozen


def join(trained: Params, frozen: Params) -> Params:
    """Merge the two results of `Trainable.split`."""
    both = trained.keys() & frozen.keys()
    return trained | frozen | {name: join(trained[name], frozen[name]) for name in both}


def leaves_by_path(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, array) of every parameter."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves_by_path(value, f"{path}.")
        else:
            yield path, value


def _selected_params(tree: Params, wanted: Callable[[str], bool], prefix: str = "") -> Params:
    """The parameters whose paths are wanted, without dicts that would be empty."""
    chosen: Params = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            if inside := _selected_params(value, wanted, f"{path}."):
                chosen[key] = inside
        elif wanted(path):
            chosen[key] = value
    return chosen
