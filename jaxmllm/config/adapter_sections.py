"""Section `model.adapters`: matrices of small rank beside frozen ones (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from pydantic import PositiveFloat, PositiveInt, field_validator

from jaxmllm.config.section import Section

ADAPTER: Final = "adapter."  # what the names of components of adapters begin with

# By path of a parameter inside its component: numbers that its matrix reads of a slot, and that it makes
Matrices = Mapping[str, tuple[int, int]]


class AdapterConfig(Section):
    """The adapter of one component: x W becomes x W + alpha / rank * (x A) B.

    A [inputs, rank] begins at random and B [rank, outputs] with zeros, for each matrix W that one of
    `parameters` matches: patterns of paths inside the component, in which `*` stands for any
    characters. Only matrices of its layers can have adapters. They stay frozen.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    parameters: tuple[str, ...] = ("*",)

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: tuple[str, ...]) -> tuple[str, ...]:
        if not parameters:
            raise ValueError("is empty: name some matrices, or leave the adapter out")
        return parameters

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.alpha / self.rank

    def adapted(self, matrices: Matrices) -> dict[str, tuple[int, int]]:
        """Of the matrices of a component, those that have an adapter."""
        return {
            path: size
            for path, size in matrices.items()
            if any(fnmatchcase(path, pattern) for pattern in self.parameters)
        }

    def check(self, component: str, matrices: Matrices) -> None:
        """Raise ValueError for a pattern that matches nothing, and for a rank that is not low."""
        where = f"adapters.{component}"
        for pattern in self.parameters:
            if not any(fnmatchcase(path, pattern) for path in matrices):
                raise ValueError(
                    f"{where}.parameters: {pattern!r} matches no matrix that can have an adapter; "
                    f"{component} has {', '.join(matrices)}"
                )
        for path, size in self.adapted(matrices).items():
            if self.rank > min(size):
                raise ValueError(
                    f"{where}.rank ({self.rank}): {path} is a matrix of {size[0]} x {size[1]}, whose rank is at "
                    f"most {min(size)}; lower it, or leave this matrix out of {where}.parameters"
                )


class AdaptersConfig(Section):
    """Adapters by component; those of `language` become the component `adapter.language`, and so on."""

    vision: AdapterConfig | None = None
    audio: AdapterConfig | None = None
    language: AdapterConfig | None = None
    diffusion: AdapterConfig | None = None

    @property
    def by_component(self) -> dict[str, AdapterConfig]:
        """The adapters that there are, by the component that they adapt."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: section for name, section in sections.items() if section is not None}
