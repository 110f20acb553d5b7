"""Section `data`: which files are read, and how."""

from __future__ import annotations

import unicodedata
from datetime import date
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from jaxmllm.config.section import Section

Targets = Literal["assistant", "all"]
CHATML = "chatml"  # the layout of turns that needs no template


class SourceConfig(Section):
    """One file of conversations; media paths in it are relative to `root` (default: its folder).

    `path` and `root` are relative to `data.root`.
    """

    name: str  # in metrics and messages
    path: str  # of the file
    # A name in data/sources/formats.py; none: by the file's ending, jsonl for unknown endings.
    format: str | None = None
    root: str | None = None  # of media; none: the folder of the file
    # Of examples; relative to the smallest weight it counts in hundredths
    weight: PositiveFloat = 1.0
    # What is learned: what the assistant says, or all text. Only with `all` may an example have
    # nothing that the assistant says.
    targets: Targets = "assistant"

    @field_validator("name", "path", "root")
    @classmethod
    def _check_text(cls, value: str | None) -> str | None:
        control = any(unicodedata.category(character) == "Cc" for character in value or "")
        if value == "" or control:
            raise ValueError(
                f"must be text, not empty and without control characters (got {value!r})"
            )
        return value


ResizeKernel = Literal["bicubic", "bilinear", "lanczos"]
ResizeRule = Literal["area", "smart", "fill", "square", "tiles"]
SQUARES: tuple[ResizeRule, ...] = ("square", "tiles")  # of one size


class ImageDataConfig(Section):
    """How images are resized: `min_pixels` and `max_pixels` bound the area, `resize` is the rule.

        area     the nearest size in whole merged cells within the bounds; the aspect ratio stays
        smart    nearly the same sizes, as `smart_resize` of Qwen2-VL has them (arXiv 2409.12191), from all pixels of a
                 file; thin images may exceed max_pixels
        fill     the largest within max_pixels, sides rounded up to whole merged cells (NaFlex, arXiv 2502.14786)
        square   the square of max_pixels, whatever the aspect ratio; what is left of whole patches is cut off
        tiles    rows and columns of such squares, as near to the aspect ratio as there are, and the whole image as one
                 more where these are several (arXiv 2404.16821)

    With the last three an image or tile always has about max_pixels, and min_pixels must be the same.
    """

    min_pixels: int = Field(28 * 28, ge=1, le=89_478_485)  # at most what a file may have
    max_pixels: PositiveInt = 1024 * 1024
    resize: ResizeRule = "area"
    kernel: ResizeKernel = "bicubic"


class ShownImagesConfig(ImageDataConfig):
    """What encoders see: with `resize: tiles` an image becomes `min_tiles` to `max_tiles` tiles."""

    min_tiles: PositiveInt = 1
    max_tiles: PositiveInt = 12

    @model_validator(mode="after")
    def _check_tiles(self) -> ShownImagesConfig:
        for key in ("min_tiles", "max_tiles"):
            value = getattr(self, key)
            if self.resize != "tiles" and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} ({value}): with resize ({self.resize}) an image is not cut; set resize: tiles, or leave "
                    "it out"
                )
        if self.min_tiles > self.max_tiles:
            raise ValueError(
                f"min_tiles ({self.min_tiles}) is more than max_tiles ({self.max_tiles})"
            )
        return self


class ClipBounds(Section):
    """How long clips of frames may be. What has more than `max_frames` is refused, or with `shorten` ends there."""

    max_frames: PositiveInt = 128
    shorten: bool = False


class GeneratedDataConfig(ClipBounds, ImageDataConfig):
    """What is learned to be drawn, as pixels: areas are those of an image and of each frame of a clip.

    With `fps`, clips are sampled at so many frames per second, an animation by the times of its frames, and a
    folder of frames by `folder_fps`. Without, all frames are taken. A video file with `sound` is refused, or what is
    heard is left out.
    """

    fps: PositiveFloat | None = None
    folder_fps: PositiveFloat | None = None
    sound: Literal["refuse", "ignore"] = "refuse"

    @model_validator(mode="after")
    def _check_whole(self) -> GeneratedDataConfig:
        if self.resize == "tiles":
            raise ValueError("resize (tiles): what is drawn is not cut; name another rule")
        return self

    @model_validator(mode="after")
    def _check_rates(self) -> GeneratedDataConfig:
        if self.folder_fps is not None and self.fps is None:
            raise ValueError(
                f"folder_fps ({self.folder_fps:g}): without fps all frames are taken, whatever their times; set fps, "
                "or leave it out"
            )
        return self


class VideoDataConfig(Section):
    """How videos are read, where `model.vision.videos` says so: which of their frames, how large, and how the decoder
    knows their times.

    Without `fps` all frames are taken, and videos with more than `max_frames` are refused. With it, so many per second
    on average, but at least `min_frames` and at most `max_frames`:

        steps   from the first one on in even steps, a whole number of patches of them (arXiv 2502.13923)
        ends    evenly from the first one to the last (arXiv 2511.21631)

    An animation has its own times, and a folder of frames `folder_fps`. `min_pixels` and `max_pixels` bound the
    area of each frame, or with `bounds: video` that of all frames together; the rest is as `data.images` says.
    A video file with `sound` is refused, or what is heard is left out.

    A video has `positions_per_second` on the axis of time, rounded down; or its times are written:

        positions   text after a video goes on as after an image, below the last times (transformers 5; before, and in
                    arXiv 2502.13923, at the maximum + 1)
        line        text after a video goes on at the maximum + 1; groups of frames are as far apart as `fps` says, also
                    of videos that are too short or too long for it (arXiv 2503.20215)
        fractions   likewise, and nothing is rounded down (arXiv 2509.17765)
        text        "<0.5 seconds>" before each group of frames, which stands there as an image would (arXiv 2511.21631)
    """

    fps: PositiveFloat | None = None
    sampling: Literal["steps", "ends"] = "steps"
    min_frames: PositiveInt = 4
    max_frames: PositiveInt = 768
    folder_fps: PositiveFloat | None = None
    sound: Literal["refuse", "ignore"] = "refuse"
    min_pixels: int = Field(28 * 28, ge=1)
    max_pixels: PositiveInt = 768 * 28 * 28
    bounds: Literal["frame", "video"] = "frame"
    times: Literal["positions", "line", "fractions", "text"] = "positions"
    positions_per_second: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _check_frames(self) -> VideoDataConfig:
        if self.fps is not None and self.min_frames > self.max_frames:
            raise ValueError(
                f"min_frames ({self.min_frames}) is more than max_frames ({self.max_frames})"
            )
        usual = VideoDataConfig.model_fields
        for key in ("sampling", "min_frames"):
            if self.fps is None and getattr(self, key) != usual[key].default:
                raise ValueError(
                    f"{key} ({getattr(self, key)}): without fps all frames are taken; set fps, or leave it out"
                )
        if self.times == "text" and self.positions_per_second != (
            usual["positions_per_second"].default
        ):
            raise ValueError(
                f"positions_per_second ({self.positions_per_second:g}): with times (text), groups of frames have the "
                "positions of images; leave it out"
            )
        return self


class LatentsDataConfig(ClipBounds):
    """What is learned to be drawn, as latents x: the model draws (x - mean) / std, one number for all channels
    or one for each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[PositiveFloat, ...] = (1.0,)


class AudioDataConfig(Section):
    """Log-mel settings: frames of `window_length` samples, `hop_length` samples apart.

    Clips longer than `max_seconds` are rejected, not cut.
    """

    sample_rate: int = Field(16_000, ge=1_000, le=1_000_000)  # Hz; the same bounds as for files
    window_length: PositiveInt = 400  # samples
    hop_length: PositiveInt = 160  # samples
    max_seconds: PositiveFloat = 60.0


class DataConfig(Section):
    """What is trained on and evaluated on, and how it is read."""

    sources: tuple[SourceConfig, ...]  # of training, mixed by weight
    evaluation: tuple[SourceConfig, ...] = ()  # held out
    root: str | None = None  # folder of the sources' relative paths; none: where one starts
    batch_size: int = Field(gt=0, le=1 << 20)  # examples per step, on all hosts together
    tokenizer: str | None = None  # a tokenizers JSON file; none: bytes
    # How turns are laid out: `chatml`, or a file with a Jinja template
    chat_template: str = Field(CHATML, min_length=1)
    # That the template prints as today's date; none: it is given no clock
    chat_date: date | None = None
    images: ShownImagesConfig = ShownImagesConfig()
    audio: AudioDataConfig = AudioDataConfig()
    videos: VideoDataConfig = VideoDataConfig()  # with model.vision.videos
    generated: GeneratedDataConfig = GeneratedDataConfig()  # of models that draw pixels
    latents: LatentsDataConfig = LatentsDataConfig()  # of models that draw latents
    index_cache: str | None = None  # folder of length indexes; none: next to each source
    # Processes per host that decode and fill rows; 0: a thread does
    workers: int = Field(0, ge=0, le=1024)
    prefetch: int = Field(2, ge=1, le=1024)  # steps prepared ahead, at least one per worker
    max_rejected: float = Field(0.0, ge=0.0, le=1.0)  # share of examples that the index may reject
    # Media items that may fail to decode before the run stops
    max_failed_media: int = Field(0, ge=0)

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        if not sources:
            raise ValueError("must name at least one source (got [])")
        return sources

    @model_validator(mode="after")
    def _check_template(self) -> DataConfig:
        if self.chat_template != CHATML and self.tokenizer is None:
            raise ValueError(
                f"chat_template ({self.chat_template}): it is written with the tokens of its model, and bytes have "
                "none; name the model's tokenizer.json in data.tokenizer"
            )
        if self.chat_template == CHATML and self.chat_date is not None:
            raise ValueError(
                f"chat_date ({self.chat_date}): {CHATML} prints no date; leave it out, or name a data.chat_template"
            )
        return self
