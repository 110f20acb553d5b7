"""A run's config, completed from the published folders that it names: the one in `model.from` gives
shapes, tokenizer and chat template of the decoder, the one in `model.vision.from` shapes of the
tower and how its images are read, the one in `model.diffusion.from` shapes of the generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxmllm.config.read import load_config
from jaxmllm.config.schema import (
    PROJECTOR,
    AudioConfig,
    Config,
    ConfigError,
    DiffusionConfig,
    LanguageConfig,
    Section,
    VisionConfig,
)
from jaxmllm.families.by_type import components_of, family_of
from jaxmllm.families.folder_config import CONFIG_JSON, FolderConfig
from jaxmllm.families.model_folder import is_model_folder
from jaxmllm.families.weight_files import FolderError

TOKENIZER = "tokenizer.json"
# Files that may hold the chat template of a folder; the first that has one counts
TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "processor_config.json",
)
# Files that say how media are read: one for all media, and in older folders one for each kind
PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
OF_VIDEOS = "video_preprocessor_config.json"
# Keys of model.language that a config may set unless the folder does: they do not change how text
# is computed
OPEN = {"loss_chunk", "bidirectional", "media_positions", "rope_sections", "rope_interleaved"}
# The same for towers; keys of the projector only where it does not come from the folder
TOWER_OPEN = {"from", "silence", "videos"}
PROJECTOR_OPEN = {"merge", "projector", "deepstack_layers"}
# The same for the generator, which may read other states than those it was trained with
GENERATOR_OPEN = {"from", "projector", "padded_conditions"}
# By component of an encoder: its section of `model`, that of `data`, and the name of its processor
# in a file of all media
TOWERS: dict[str, tuple[type[Section], str, str]] = {
    "vision": (VisionConfig, "images", "image_processor"),
    "audio": (AudioConfig, "audio", "feature_extractor"),
}
GENERATOR = "diffusion"


def load_run_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """`load_config` for a file that may leave out what its published folders say."""
    return load_config(path, overrides, resolved)


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's tree, completed from the folders of its model: `model.language`, `data.tokenizer`
    and `data.chat_template` from the one in `model.from`, towers and how their media are read from
    those in `model.vision.from` and the like.

    Raises:
      ConfigError: a folder is of no known family, or the config contradicts it.
    """
    if not isinstance(tree.get("model"), dict):
        return tree  # which the schema refuses
    tree = _complete_from_folders(tree)
    _check_state_width(tree)
    return tree


def _complete_from_folders(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree, completed from its folders: those of towers and generator, then the decoder's."""
    data = tree.get("data")
    # Decided before towers add sections to `data`: a tree of `model` alone, as conversion passes
    # it, needs no tokenizer.
    reads_text = isinstance(data, dict) and data.get("tokenizer") is None
    # Named towers and the generator come first: their folders are read whatever `model.from` is.
    for component in TOWERS:
        tree = _with_named_tower(tree, component)
    tree = _with_named_generator(tree)
    model = tree["model"]
    source = model.get("from")
    if not isinstance(source, str):
        return tree
    # A run or a checkpoint has no config.json, so the config itself gives the decoder's shapes.
    if not is_model_folder(source):
        if model.get("language") is None:
            raise ConfigError(
                f"model.language is missing, and model.from: {source} has no {CONFIG_JSON} that would say it; "
                "correct the path, or give the section (a run folder's config.yaml has it)"
            )
        return tree
    config = FolderConfig.read(Path(source))
    shapes = family_of(config).section(config)
    settings = model.get("language") or {}
    if not isinstance(settings, dict):
        return tree
    _check_agreement("language", LanguageConfig, OPEN - shapes.keys(), settings, shapes, config)
    for component in TOWERS:
        if component in components_of(config):
            tree = _with_own_tower(tree, component, config)
    if reads_text:
        data = tree["data"]
        named = {key: value for key, value in data.items() if value is not None}
        tree = tree | {"data": data | _tokenizer_and_template(Path(source)) | named}
    return tree | {"model": tree["model"] | {"language": shapes | settings}}


def _tokenizer_and_template(folder: Path) -> dict[str, str]:
    """`data.tokenizer` of a folder, and `data.chat_template` where it has one."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise ConfigError(
            f"data.tokenizer: {folder} has no {TOKENIZER}; name the tokenizer file that belongs to it"
        )
    template = _chat_template_file(folder)
    templates = {} if template is None else {"chat_template": str(template)}
    return {"tokenizer": str(tokenizer), **templates}


def _chat_template_file(folder: Path) -> Path | None:
    """The file of a folder that holds its chat template; none without one."""
    for path in (folder / name for name in TEMPLATES):
        if not path.is_file():
            continue
        if path.suffix == ".jinja":
            return path
        # A file of this name need not hold a template: processors and tokenizers have other
        # settings in it.
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FolderError(f"{path} cannot be read: {error}; copy the folder again") from error
        if isinstance(values, dict) and values.get("chat_template") is not None:
            return path
    return None


def _with_named_tower(tree: dict[str, Any], component: str) -> dict[str, Any]:
    """The tree with the tower from the folder in `model.vision.from` or the like, if any."""
    config = _named_folder_config(tree, component)
    if config is None:
        return tree
    return _with_tower(tree, component, config, family_of(config, component).section(config))


def _with_named_generator(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the generator from the folder in `model.diffusion.from`, if there is one."""
    config = _named_folder_config(tree, GENERATOR)
    if config is None:
        return tree
    model = tree["model"]
    shapes = family_of(config, GENERATOR).section(config)
    settings = model[GENERATOR]
    _check_agreement(GENERATOR, DiffusionConfig, GENERATOR_OPEN, settings, shapes, config)
    return tree | {"model": model | {GENERATOR: shapes | settings}}


def _check_state_width(tree: dict[str, Any]) -> None:
    """Raise `ConfigError` if the projector from a generator's folder reads states of another width
    than the decoder's."""
    model = tree["model"]
    generator = model.get(GENERATOR)
    language = model.get("language")
    if not isinstance(generator, dict) or generator.get("projector") != "folder":
        return
    config = _named_folder_config(tree, GENERATOR)
    if config is None or not isinstance(language, dict):
        return
    reads = family_of(config, f"{PROJECTOR}language").section(config)["reads"]
    if language.get("width") != reads:
        raise ConfigError(
            f"model.{GENERATOR}.projector (folder): that of {config.path.parent} reads states of width {reads}, and "
            f"model.language.width is {language.get('width')}; leave it out, so that a new one is trained"
        )


def _named_folder_config(tree: dict[str, Any], component: str) -> FolderConfig | None:
    """config.json of the folder in `model.vision.from` or the like, if there is one."""
    settings = tree["model"].get(component)
    source = settings.get("from") if isinstance(settings, dict) else None
    if not isinstance(source, str):
        return None
    if not is_model_folder(source):
        raise ConfigError(
            f"model.{component}.from: {source} has no {CONFIG_JSON}; name the folder of a published model (a run, or "
            "its checkpoint, belongs in model.from)"
        )
    return FolderConfig.read(Path(source))


def _with_own_tower(tree: dict[str, Any], component: str, config: FolderConfig) -> dict[str, Any]:
    """The tree with the tower and the projector from the decoder's own folder, unless the config
    names another folder for the tower, or sets the tower to null."""
    model = tree["model"]
    settings = model.get(component, {})
    if not isinstance(settings, dict) or settings.get("from") is not None:
        return tree
    shapes = [
        family_of(config, name).section(config) for name in (component, f"{PROJECTOR}{component}")
    ]
    tree = tree | {"model": model | {component: settings}}
    return _with_tower(tree, component, config, shapes[0] | shapes[1])


def _with_tower(
    tree: dict[str, Any], component: str, config: FolderConfig, shapes: dict[str, Any]
) -> dict[str, Any]:
    """The tree with a tower of these shapes, and the section of `data` that reads its media."""
    section, media, part = TOWERS[component]
    model = tree["model"]
    data = tree.get("data") or {}
    settings = model[component]
    read = data.get(media) or {} if isinstance(data, dict) else None
    family = family_of(config, component)
    if family.processor is not None and isinstance(read, dict):
        # In `data` the config takes precedence over the folder; in `model` it must agree (below).
        processor = family.processor(_processor_file(config.path.parent, part), shapes)
        shapes = shapes | dict(processor.model)
        data = data | {media: dict(processor.data) | read}
        # After the keys of the processor, because colors of videos are compared with those of
        # pictures.
        if family.videos is not None and settings.get("videos") is True:
            data = data | {
                "videos": _videos_section(family.videos, config, shapes, data.get("videos"))
            }
        tree = tree | {"data": data}
    # A projector from the folder puts its keys into `shapes`, and then these must agree as well.
    free = TOWER_OPEN | (PROJECTOR_OPEN - shapes.keys())
    _check_agreement(component, section, free, settings, shapes, config)
    return tree | {"model": model | {component: shapes | settings}}


def _videos_section(
    said: Callable[[FolderConfig, FolderConfig, dict[str, Any]], dict[str, Any]],
    config: FolderConfig,
    shapes: dict[str, Any],
    own: Any,
) -> Any:
    """`data.videos` from the folder, where keys that the config sets (`own`) take precedence."""
    if not isinstance(own, dict | None):
        return own  # which the schema refuses
    folder = config.path.parent
    kinds = (("video_processor", OF_VIDEOS), (TOWERS["vision"][2], PREPROCESSOR))
    # Some folders have one processor for pictures and videos.
    part, name = kinds[0] if _has_processor(folder, *kinds[0]) else kinds[1]
    videos = said(config, _processor_file(folder, part, name), shapes) | (own or {})
    if videos.get("fps") is None:  # all frames are taken
        videos = {
            key: value
            for key, value in videos.items()
            if key in (own or {}) or key not in ("sampling", "min_frames")
        }
    return videos


def _has_processor(folder: Path, part: str, own: str) -> bool:
    joint_file = folder / PROCESSOR
    return (folder / own).is_file() or (
        joint_file.is_file() and part in FolderConfig.read(folder, PROCESSOR).values
    )


def _processor_file(folder: Path, part: str, own: str = PREPROCESSOR) -> FolderConfig:
    """Values that say how media are read: a part of a file of all media, or a file of their own."""
    if (folder / PROCESSOR).is_file():
        file = FolderConfig.read(folder, PROCESSOR)
        if part in file.values:
            return file.part(part)
    return FolderConfig.read(folder, own)


def _check_agreement(
    component: str,
    section: type[Section],
    free: set[str],
    own: dict[str, Any],
    shapes: dict[str, Any],
    config: FolderConfig,
) -> None:
    """Raise `ConfigError` where a config contradicts the folder."""
    usual = {field.alias or name: field.default for name, field in section.model_fields.items()}
    for key in own.keys() & usual.keys() - free:
        stated = shapes.get(key, usual[key])
        value = own[key]
        default = usual[key]
        if isinstance(default, Section) and isinstance(stated, dict) and isinstance(value, dict):
            stated, value = (default.model_dump(mode="json") | fields for fields in (stated, value))
        if value != (list(stated) if isinstance(stated, tuple) else stated):
            raise ConfigError(
                f"model.{component}.{key} is {own[key]!r}, but {config.path} says {stated!r}; leave it out"
            )
