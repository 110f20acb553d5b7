"""What the thinkers of the Omni models share: where a folder stores them, and what it says about
all their media."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from jaxmllm.families.family import Family, together
from jaxmllm.families.folder_config import FolderConfig
from jaxmllm.families.qwen2_5_vl import video_processor

# Prefixes of a thinker's parts: after "model." as the reference names its modules, and as folders
# have them
MODULES: Final = {
    "language": ("language_model.", "model."),
    "vision": ("visual.", "visual."),
    "audio": ("audio_tower.", "audio_tower."),
}
THINKER: Final = "thinker."  # before the keys of a folder that has a talker, too
CLIP, PICTURE, VIDEO = 151_646, 151_655, 151_656  # ids of tokens
AUDIO_WIDTH = 3584
POSITIONS_PER_SECOND = 25


def thinker_of(config: FolderConfig) -> FolderConfig:
    """The thinker's part of a config.json, which may hold that of a talker, too."""
    return config.part("thinker_config") if "thinker_config" in config.values else config


def token(key: str, usual: int) -> Callable[[FolderConfig], int]:
    """The id of a token that config.json has under a key."""
    return lambda config: int(thinker_of(config).number(key, usual))


def videos(
    pixels: tuple[int, int], fps: float, **times: str
) -> Callable[[FolderConfig, FolderConfig, dict[str, Any]], dict[str, Any]]:
    """A function for `Family.videos`. The reference's processor bounds frames as its class does,
    whatever the file says."""
    bounds = dict(zip(("min_pixels", "max_pixels"), pixels, strict=True))

    def read(config: FolderConfig, file: FolderConfig, section: dict[str, Any]) -> dict[str, Any]:
        rate = thinker_of(config).number("position_id_per_seconds", POSITIONS_PER_SECOND)
        seconds = times | {"positions_per_second": float(rate)}
        return video_processor(file, section, pixels, fps) | bounds | seconds

    return read


def check_width(audio: FolderConfig, width: int) -> None:
    """Raise `FolderError` where a projector's tokens are not as wide as the decoder."""
    if (output_width := audio.count("output_dim", AUDIO_WIDTH)) != width:
        audio.refuse(f"has output_dim {output_width}", f"the decoder is {width} wide")


def thinkers(kind: str, parts: Iterable[Family], carried: Iterable[str]) -> tuple[Family, ...]:
    """The parts of a thinker, for folders of the `model_type` `kind`, which also have a talker, and
    for folders of the thinker alone.

    Args:
      parts: without model_type and prefixes.
      carried: patterns of keys in a whole folder that belong to none of the parts.
    """
    of_folders = {kind: THINKER, f"{kind}_thinker": ""}
    return tuple(
        family
        for model_type, prefix in of_folders.items()
        for family in together(
            *(_prefixed_part(part, model_type, prefix) for part in parts), carried=carried
        )
    )


def _prefixed_part(part: Family, model_type: str, prefix: str) -> Family:
    """A part whose keys have the prefixes of its module, except the head's."""
    named, stored = MODULES[part.component.removeprefix("projector.")]
    outside_lines = {path: prefix + part.parameters[path] for path in part.unprefixed}
    return replace(
        part,
        model_type=model_type,
        parameters={**part.parameters, **outside_lines},
        copies={path: prefix + line for path, line in part.copies.items()},
        prefixes=(f"{prefix}model.{named}", f"{prefix}{stored}"),
    )
