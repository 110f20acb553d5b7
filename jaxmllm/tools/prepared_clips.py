"""Clips that another program prepared: log-mel frames, and how many of them are sound.

input_features [clips, mel_bins, F], feature_attention_mask [clips, F] --> slots of rows, spans of texts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmllm.config.schema import AudioConfig, ConfigError
from jaxmllm.data.media.modality import Modality, Shape
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.tools.prepared_media import Prepared, Spans

ARGUMENTS = ("input_features", "feature_attention_mask")


@dataclass(frozen=True)
class PreparedSounds(Sounds):
    """Clips with prepared frames, which are not read from files."""

    frames: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by address

    def load(self, media: MediaReference, shape: Shape) -> NDArray[Any]:
        return self.laid_out(self.frames[media.address], shape)


def read_clips(
    prepared: Prepared, sounds: Modality, audio: AudioConfig
) -> tuple[PreparedSounds, tuple[Spans, ...]]:
    """The clips of some texts, and their spans in each text.

    Raises `ConfigError` for clips that the tower does not take, or that do not have the tokens of
    the texts.

    Args:
      sounds: the modality that reads clips from files.
    """
    path = prepared.path
    arrays = prepared.arrays
    if missing := [name for name in ARGUMENTS if name not in arrays]:
        raise ConfigError(f"{path} has clips, but not {' and '.join(missing)}")
    assert isinstance(sounds, Sounds)
    features, mask = (arrays[name] for name in ARGUMENTS)
    if features.ndim != 3 or mask.shape != features[:, 0].shape:
        raise ConfigError(
            f"{path}: input_features must be [clips, {audio.mel_bins}, frames], and feature_attention_mask [clips, "
            f"frames] (got {list(features.shape)} and {list(mask.shape)})"
        )
    if features.shape[1] != audio.mel_bins:
        raise ConfigError(
            f"{path}: input_features have {features.shape[1]} mel bins, and the tower {audio.mel_bins}"
        )
    counts = mask.astype(np.int64).sum(axis=1)
    if (mask.astype(bool) != (np.arange(mask.shape[1]) < counts[:, None])).any():
        raise ConfigError(
            f"{path}: feature_attention_mask must be ones, and then zeros, in each clip"
        )
    shapes: list[Shape] = [(int(clip_frames), 1, 1) for clip_frames in counts]
    for shape in shapes:
        if sounds.heard(shape) > mask.shape[1]:
            raise ConfigError(
                f"{path}: input_features have {mask.shape[1]} frames, and the tower hears {sounds.heard(shape)} of a "
                f"clip of {shape[0]}; fill clips up with silence, as the folder's processor does"
            )
    what = "the clips of feature_attention_mask"
    spans = prepared.spans("audio", what, sounds, shapes)
    settings = {part.name: getattr(sounds, part.name) for part in fields(sounds)}
    # All frames, also those past the sound: a tower may hear some of the silence after it.
    frames = {str(number): clip.T.astype(np.float32) for number, clip in enumerate(features)}
    return PreparedSounds(**settings, frames=frames), spans
