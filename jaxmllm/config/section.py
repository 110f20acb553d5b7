"""What all sections of the config share."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]  # the value is chosen when the run is built
DType = Literal["float32", "bfloat16", "float64"]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key, why, and what to do."""


class RenamedKeyError(ConfigError):
    """A configuration with keys that have been renamed or removed; the message says which."""


class Section(BaseModel):
    """Base of all sections: frozen, strict about types, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
