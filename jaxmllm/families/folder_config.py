"""A folder's config.json, read strictly, in old spellings and new ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jaxmllm.families.weight_files import FolderError

CONFIG_JSON = "config.json"
# Keys whose null does not mean their default, but: as many as heads; no windows
NULLED = ("num_key_value_heads", "sliding_window")


@dataclass(frozen=True)
class FolderConfig:
    """The values of one config.json. A key that is null counts as absent."""

    path: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str = CONFIG_JSON) -> FolderConfig:
        """Read config.json of a model folder, or another JSON file of it. Raises `FolderError`."""
        path = folder / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FolderError(f"{path} cannot be read: {error}; copy the folder again") from error
        if not isinstance(values, dict):
            raise FolderError(f"{path} must hold a JSON object")
        return cls(path, values)

    @property
    def kind(self) -> Any:
        """What the folder calls its model: `model_type`, or `_class_name` if it has a generator."""
        return self.get("model_type", self.get("_class_name"))

    def part(self, key: str) -> FolderConfig:
        """The values that a key holds. Raises `FolderError` if they are no JSON object."""
        values = self.get(key)
        if not isinstance(values, dict):
            self.refuse(f"has {key} {values!r}", "it must be a JSON object")
        return FolderConfig(self.path, values)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def completed(self, defaults: Mapping[str, Any]) -> FolderConfig:
        """These values, with defaults for keys that are absent, or null and not in NULLED."""
        values = {
            key: value for key, value in self.values.items() if value is not None or key in NULLED
        }
        return FolderConfig(self.path, {**defaults, **values})

    def updated(self, **values: Any) -> FolderConfig:
        """These values, some of them replaced."""
        return FolderConfig(self.path, {**self.values, **values})

    def number(self, key: str, default: float | None = None) -> Any:
        """The number under a key. Raises `FolderError` if it is missing, or no number."""
        value = self.get(key, default)
        if value is None:
            self.refuse(f"has no {key!r}", "copy the file again")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(f"has {key} {value!r}", "it must be a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The count under a key. Raises `FolderError` if it is missing, or no positive integer."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            self.refuse(f"has {key} {value!r}", "it must be a whole number above 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """The flag under a key. Raises `FolderError` if it is neither true nor false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"has {key} {value!r}", "it must be true or false")
        return value

    def expect(self, key: str, *usual: Any) -> None:
        """Refuse any other value than the usual ones, the first of which is the default."""
        value = self.get(key, usual[0])
        if value not in usual:
            choices = " or ".join(map(repr, usual))
            self.refuse(f"has {key} {value!r}", f"{choices} alone is supported")

    def refuse(self, what: str, cure: str) -> NoReturn:
        """Raise `FolderError`, always."""
        raise FolderError(f"{self.path} {what}; {cure}")
