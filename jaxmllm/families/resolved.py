"""A run's config with what the folder of its model says: `model.from` names the shapes, and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config, ConfigError, LanguageConfig
from jaxmllm.families.by_type import family_of
from jaxmllm.families.folder_config import CONFIG_JSON, FolderConfig
from jaxmllm.families.model_folder import is_model_folder

TOKENIZER = "tokenizer.json"
# Keys of model.language that are not the folder's: no text is computed otherwise
OPEN = {"loss_chunk", "bidirectional", "rope_sections"}


def load_run_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config`, for a file that may leave to `model.from` what a published folder says."""
    return load_config(path, overrides, resolved)


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's tree with `model.language` and `data.tokenizer` of the folder that `model.from` names.

    Raises:
      ConfigError: the folder is none of a family that there is, or the config says otherwise.
    """
    model = tree.get("model")
    if not isinstance(model, dict):
        return tree  # which the schema refuses
    source = model.get("from")
    if not isinstance(source, str):
        return tree
    if not is_model_folder(source):
        if model.get("language") is None:
            raise ConfigError(
                f"model.language is missing, and model.from: {source} has no {CONFIG_JSON} that would say it; "
                "correct the path, or give the section (a run folder's config.yaml has it)"
            )
        return tree
    config = FolderConfig.read(Path(source))
    shapes = family_of(config).language(config)
    own = model.get("language") or {}
    if not isinstance(own, dict):
        return tree
    usual = {name: field.default for name, field in LanguageConfig.model_fields.items()}
    for key in own.keys() & usual.keys() - OPEN:
        said = shapes.get(key, usual[key])
        if own[key] != said:
            raise ConfigError(
                f"model.language.{key} is {own[key]!r}, but {config.path} says {said!r}; leave it out"
            )
    data = tree.get("data")
    if isinstance(data, dict) and data.get("tokenizer") is None:
        tokenizer = Path(source) / TOKENIZER
        if not tokenizer.is_file():
            raise ConfigError(
                f"data.tokenizer: {source} has no {TOKENIZER}; name the tokenizer file that belongs to it"
            )
        data = data | {"tokenizer": str(tokenizer)}
        tree = tree | {"data": data}
    return tree | {"model": model | {"language": shapes | own}}
