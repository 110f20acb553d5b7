"""Reading and writing a config: YAML file + dotted overrides -> the records of schema.py, and back.

    configs/x.yaml --strict_yaml--> dict --"a.b=c" overrides--> dict --pydantic--> Config

Unknown keys and ill-typed values are errors that name the nearest valid key.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jaxmllm.config import strict_yaml
from jaxmllm.config.renamed import renamed_keys
from jaxmllm.config.schema import Config, ConfigError, RenamedKeyError

SHOWN = 200  # characters of a value in a message
# Prefixes of the names that pydantic gives to branches of a union in the location of an error
BRANCHES = ("bool", "constrained-", "literal[", "tuple[")


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides (values are YAML) and validate.

    Raises `ConfigError` with every offending key.

    Args:
      complete: returns the tree with the values that the file leaves to other files.
    """
    path = Path(path)
    try:
        tree = strict_yaml.read_file(path)
    except strict_yaml.YamlError as error:
        raise ConfigError(f"config file {path} {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config file {path} must hold a mapping of sections, not {type(tree).__name__}"
        )
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(complete(tree) if complete else tree, where=str(path))


def parse_config(tree: dict[str, Any], where: str = "config") -> Config:
    """Validate a nested dict into a `Config`.

    Raises `ConfigError`; for keys that have been renamed or removed its subclass `RenamedKeyError`.
    """
    if renamed := renamed_keys(tree):
        raise RenamedKeyError(f"{where}: " + "; ".join(renamed))
    try:
        # In JSON mode, pydantic is strict about scalars but lets lists become tuples.
        return Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from error


def dump_config(config: Config) -> str:
    """The config as YAML text, which `load_config` reads back to an equal record."""
    return strict_yaml.write_text(config_tree(config))


def config_tree(config: Config) -> dict[str, Any]:
    """The config as nested dicts, lists and scalars, by the names that YAML files use."""
    return config.model_dump(mode="json", by_alias=True)


def dotted_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, leaf) pairs of nested dicts and lists, such as `config_tree` returns.

    An empty dict or list is a leaf.
    """
    if not isinstance(node, dict | list) or not node:
        yield prefix, node
        return
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from dotted_values(child, f"{prefix}.{name}" if prefix else str(name))


def _apply_override(tree: dict[str, Any], override: str) -> None:
    where = f"override {_short_text(override)}"
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{where} is not of the form dotted.key=value")
    *parents, leaf = key.strip().split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = {} if node.get(name) is None else node[name]
        path = ".".join(parents[: depth + 1])
        if isinstance(child, list):
            raise ConfigError(f"{where}: {path} is a list; give the whole list as its value")
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: {path} is a value, not a section")
        # A copy, because with YAML's aliases other keys may hold the same dict
        node[name] = dict(child)
        node = node[name]
    try:
        node[leaf] = strict_yaml.read_text(text)
    except strict_yaml.YamlError as error:
        raise ConfigError(f"{where}: the value {error}") from error


def _explain(error: ValidationError, where: str) -> str:
    """One line that names every offending key and what would be valid there."""
    problems: dict[str, None] = {}
    # A union reports an error for each of its branches: they are gathered by key and value.
    valid_values: dict[tuple[str, str], list[str]] = {}
    for item in error.errors():
        location = item["loc"]
        key = ".".join(map(str, location))
        if item["type"] == "extra_forbidden":
            problems[f"unknown key {key!r}; {_key_hint(location)}"] = None
        elif item["type"] == "missing":
            problems[f"missing key {key!r}"] = None
        elif item["type"] == "value_error":
            # Errors of checks of the whole config (no key here) name their keys themselves.
            prefix = f"{key}: " if key else ""
            problems[prefix + item["msg"].removeprefix("Value error, ")] = None
        else:
            steps = [str(step) for step in location]
            key = ".".join(step for step in steps if not step.startswith(BRANCHES))
            valid = item["msg"].removeprefix("Input should be ")
            valid_values.setdefault((key, _short_text(item["input"])), []).append(valid)
    for (key, value), branches in valid_values.items():
        # pydantic speaks of JSON, but the file is YAML.
        valid = " or ".join(branches).replace("array", "list").replace("an object", "a mapping")
        problems[f"{key}: must be {valid} (got {value})"] = None
    return f"{where}: " + "; ".join(problems)


def _key_hint(location: Sequence[Any]) -> str:
    """Hint at the valid key nearest to an unknown one, or else at all keys that are valid there."""
    *parents, name = location
    valid = _fields_at(Config, parents)
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
    if not close:
        return f"valid here: {', '.join(sorted(valid))}"
    nearest = ".".join(map(str, [*parents, *close]))
    return f"did you mean {nearest!r}?"


def _short_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def _fields_at(section: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """Keys that are valid at a location in the schema; none if there is no such section."""
    for step in location:
        if isinstance(step, int):  # number of an entry in a list of sections
            continue
        field = section.model_fields.get(str(step))
        if field is None:
            return []
        section = next(iter(sections_of(field.annotation)), section)
    return [field.alias or name for name, field in section.model_fields.items()]


def sections_of(annotation: Any) -> Iterable[type[BaseModel]]:
    """Sections in the type of a key: a section, one or none, or a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from sections_of(argument)
