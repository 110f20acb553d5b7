"""What a family is: how its config.json reads in the project's words, and where its parameters lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.lines import Line


@dataclass(frozen=True)
class Family:
    """One family of published models."""

    name: str
    model_type: str  # in config.json
    language: Callable[[FolderConfig], dict[str, Any]]  # the keys of `model.language`
    parameters: Mapping[str, str]  # line of each parameter of the decoder, by dotted path
    # Second tensors that some folders have of a parameter, read to compare and written back
    copies: Mapping[str, str]
    # Patterns of keys that follow from config.json: not read, and written back as they are
    carried: tuple[str, ...] = ()

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Parsed lines, by path of the parameter."""
        return {path: Line.of(text) for path, text in self.parameters.items()}

    @cached_property
    def copy_lines(self) -> dict[str, Line]:
        """The same of the copies."""
        return {path: Line.of(text) for path, text in self.copies.items()}
