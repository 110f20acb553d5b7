"""A run's config with what the folder of its model says: `model.from` names the shapes, the tokenizer, its template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config, ConfigError, LanguageConfig
from jaxmllm.families.by_type import family_of
from jaxmllm.families.folder_config import CONFIG_JSON, FolderConfig
from jaxmllm.families.model_folder import is_model_folder
from jaxmllm.families.weight_files import FolderError

TOKENIZER = "tokenizer.json"
# Where a folder may have its chat template; the first that has one counts
TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "processor_config.json",
)
# Keys of model.language that are not the folder's: no text is computed otherwise
OPEN = {"loss_chunk", "bidirectional", "rope_sections"}


def load_run_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config`, for a file that may leave to `model.from` what a published folder says."""
    return load_config(path, overrides, resolved)


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's tree with `model.language`, `data.tokenizer` and `data.chat_template` of the folder that `model.from`
    names.

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
        named = {key: value for key, value in data.items() if value is not None}
        tree = tree | {"data": data | _text_of(Path(source)) | named}
    return tree | {"model": model | {"language": shapes | own}}


def _text_of(folder: Path) -> dict[str, str]:
    """`data.tokenizer` and `data.chat_template` of a folder; the latter where it has one."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise ConfigError(
            f"data.tokenizer: {folder} has no {TOKENIZER}; name the tokenizer file that belongs to it"
        )
    template = _template_of(folder)
    templates = {} if template is None else {"chat_template": str(template)}
    return {"tokenizer": str(tokenizer), **templates}


def _template_of(folder: Path) -> Path | None:
    """The file of a folder that has its chat template."""
    for path in (folder / name for name in TEMPLATES):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FolderError(f"{path} cannot be read: {error}; copy the folder again") from error
        if isinstance(values, dict) and values.get("chat_template") is not None:
            return path
    return None
