"""The table of source formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxmllm.config.schema import SourceConfig
from jaxmllm.data.sources.jsonl import JsonLines
from jaxmllm.data.sources.source import DataError, Source

DEFAULT = "jsonl"

# Sources by name of their format. A file whose ending is one of these names has that format, unless
# data.sources[].format says otherwise.
SOURCES: dict[str, Callable[[SourceConfig], Source]] = {
    DEFAULT: JsonLines.of,
}


def open_source(config: SourceConfig) -> Source:
    """The source of an entry of data.sources, whose paths no longer depend on `data.root`. Raises
    `DataError` for an unknown format."""
    ending = Path(config.path).suffix.removeprefix(".")
    name = config.format or (ending if ending in SOURCES else DEFAULT)
    if name not in SOURCES:
        formats = ", ".join(SOURCES)
        raise DataError(
            f"source {config.name!r}: data.sources.format is {name!r}, but formats are {formats}"
        )
    return SOURCES[name](config)
