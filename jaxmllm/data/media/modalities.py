"""The modalities of a model: one record per encoder or generator phase, made from the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmllm.config.schema import DataConfig, DiffusionConfig, ModelConfig, VisionConfig
from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.image_tiles import ClassedTiles
from jaxmllm.data.media.images import Images
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.media.sounds import Sounds
from jaxmllm.data.media.videos import ImagesAndVideos
from jaxmllm.row_format import RowFormat


def modalities(model: ModelConfig, data: DataConfig) -> dict[str, Modality]:
    """The modalities of the model's encoders and generators by phase, in model order."""
    by_phase: dict[str, Modality] = {}
    for phase in model.encoders:
        if phase == "vision" and model.vision is not None:
            in_line = model.language.media_positions == "line"
            by_phase[phase] = _vision_modality(model.vision, data, in_line)
        if phase == "audio" and model.audio is not None:
            by_phase[phase] = Sounds(
                sample_rate=data.audio.sample_rate,
                window_length=data.audio.window_length,
                hop_length=data.audio.hop_length,
                mel_bins=model.audio.mel_bins,
                chunk_frames=model.audio.chunk_frames,
                merge=model.audio.merge,
                max_seconds=data.audio.max_seconds,
                stem_stride=model.audio.stem_stride,
                silence=model.audio.silence,
                attention=model.audio.attention,
                window_chunks=model.audio.window_chunks,
                pool=model.audio.pool,
            )
    if model.diffusion is not None:
        by_phase["diffusion"] = _generated(model.diffusion, data)
    return by_phase


def _vision_modality(model: VisionConfig, data: DataConfig, in_line: bool) -> Images:
    """The vision modality; it also reads videos if the model does. `in_line`: as in `Images`."""
    images = data.images
    settings: dict[str, Any] = {
        "patch_size": model.patch_size,
        "merge": model.merge,
        "in_line": in_line,
        **images.model_dump(exclude={"min_tiles", "max_tiles"}),
    }
    if model.class_token:
        cut = images.resize == "tiles"
        return ClassedTiles(
            **settings, tiles=(images.min_tiles, images.max_tiles) if cut else (1, 1)
        )
    settings["with_grids"] = model.resamples
    if model.videos:
        return ImagesAndVideos(**settings, patch_frames=model.patch_frames, videos=data.videos)
    return Images(**settings)


def _generated(model: DiffusionConfig, data: DataConfig) -> Modality:
    if model.channels is None:
        return GeneratedPixels(
            patch_size=model.patch_size,
            merge=1,
            patch_frames=model.patch_frames,
            centred=model.rope_origin == "centre",
            diagonal=model.condition_positions == "diagonal",
            crossed=model.conditioning == "cross",
            **data.generated.model_dump(),
        )
    return GeneratedLatents(
        channels=model.channels,
        patch_frames=model.patch_frames,
        patch_size=model.patch_size,
        centred=model.rope_origin == "centre",
        diagonal=model.condition_positions == "diagonal",
        crossed=model.conditioning == "cross",
        **data.latents.model_dump(),
    )


def row_formats(modalities: Mapping[str, Modality]) -> dict[str, RowFormat]:
    """Row format of each phase."""
    return {phase: modality.format for phase, modality in modalities.items()}
