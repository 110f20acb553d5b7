"""Section `model.adapters`: low-rank matrices added to frozen ones (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from pydantic import PositiveFloat, PositiveInt, field_validator

from jaxmllm.config.section import Section

ADAPTER: Final = "adapter."  # prefix of the names of adapters as components

# (inputs, outputs) of a matrix, by the path of its parameter inside the component
Matrices = Mapping[str, tuple[int, int]]


class AdapterConfig(Section):
    """The adapter of one component: x W becomes x W + alpha / rank * (x A) B.

    Every matrix W that one of `parameters` matches has an A [inputs, rank], random at first, and a
    B [rank, outputs], zero at first. `parameters` are patterns of paths inside the component, in
    which `*` stands for any characters. Only matrices of the component's layers can have adapters.
    The adapted matrices stay frozen.
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
        """Factor by which the product of A and B is multiplied."""
        return self.alpha / self.rank

    def adapted(self, matrices: Matrices) -> dict[str, tuple[int, int]]:
        """Those of a component's matrices that have an adapter."""
        return {
            path: size
            for path, size in matrices.items()
            if any(fnmatchcase(path, pattern) for pattern in self.parameters)
        }

    def check(self, component: str, matrices: Matrices) -> None:
        """Raise ValueError if a pattern matches no matrix, or the rank exceeds that of a matrix."""
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
    """Adapters by component. That of `language` is the component `adapter.language`, and so on."""

    vision: AdapterConfig | None = None
    audio: AdapterConfig | None = None
    language: AdapterConfig | None = None
    diffusion: AdapterConfig | None = None

    @property
    def by_component(self) -> dict[str, AdapterConfig]:
        """The configured adapters, by the component that they adapt."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: section for name, section in sections.items() if section is not None}
