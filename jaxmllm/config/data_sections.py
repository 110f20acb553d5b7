"""Section `data`: the files that are read, and how they are read."""

from __future__ import annotations

import unicodedata
from datetime import date
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from jaxmllm.config.section import Section

Targets = Literal["assistant", "all"]
CHATML = "chatml"  # the one layout of turns that needs no template file


class SourceConfig(Section):
    """One file of conversations; media paths in it are relative to `root` (default: its folder).

    `path` and `root` are relative to `data.root`.
    """

    name: str  # its name in metrics and messages
    path: str  # the file
    # A name in data/sources/formats.py; none: told by the file's ending, jsonl for unknown endings
    format: str | None = None
    root: str | None = None  # folder of relative media paths; none: the folder of the file
    # Of examples; each source gives examples in proportion to its weight, whose ratio to the
    # smallest weight is rounded down to hundredths
    weight: PositiveFloat = 1.0
    # Which text is learned: the assistant's, or all. Only with `all` may an example have no text of
    # the assistant
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
SQUARES: tuple[ResizeRule, ...] = ("square", "tiles")  # rules that make squares of one size


class ImageDataConfig(Section):
    """How images are resized: `min_pixels` and `max_pixels` bound the area, `resize` is the rule.

        area     the nearest size in whole merged cells within the bounds; the aspect ratio is kept
        smart    nearly the same sizes, by the rule `smart_resize` of Qwen2-VL (arXiv 2409.12191),
                 made from all pixels of a file; thin images may exceed max_pixels
        fill     the largest size within max_pixels, sides rounded up to whole merged cells
                 (NaFlex, arXiv 2502.14786)
        square   a square of max_pixels, whatever the aspect ratio; pixels beyond the last whole
                 patch are cut off
        tiles    a grid of such squares, with the rows and columns nearest to the aspect ratio; if
                 there are several, one more shows the whole image (arXiv 2404.16821)

    With the last three, an image or tile always has about max_pixels, and min_pixels must equal it.
    A merged cell is the square of patches that becomes one language token or, in pictures that are
    drawn, one patch.
    """

    # The upper bound is the most pixels that a file may have
    min_pixels: int = Field(28 * 28, ge=1, le=89_478_485)
    max_pixels: PositiveInt = 1024 * 1024
    resize: ResizeRule = "area"
    kernel: ResizeKernel = "bicubic"


class ShownImagesConfig(ImageDataConfig):
    """Images for encoders. With `resize: tiles`, each becomes `min_tiles` to `max_tiles` tiles."""

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
    """How long clips may be: those of more than `max_frames` are refused, or cut with `shorten`."""

    max_frames: PositiveInt = 128
    shorten: bool = False


class GeneratedDataConfig(ClipBounds, ImageDataConfig):
    """Images and clips that a model learns to draw, as pixels. Areas are those of an image, or of
    each frame of a clip.

    With `fps`, clips are sampled at that many frames per second: an animation by the times of its
    frames, a folder of frames by `folder_fps`. Without it, all frames are taken. `sound` says
    whether video files with sound are refused, or read without it.
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
    """How videos are read, with `model.vision.videos`: which frames, at which size, and how the
    decoder knows their times.

    Without `fps` all frames are taken, and videos with more than `max_frames` are refused. With it,
    that many frames per second are taken on average, at least `min_frames` and at most
    `max_frames`. `sampling` says which:

        steps   from the first frame on in even steps, a whole number of patches (arXiv 2502.13923)
        ends    evenly from the first frame to the last (arXiv 2511.21631)

    The frames of an animation have times of their own; a folder has `folder_fps` frames per second.
    `min_pixels` and `max_pixels` bound the area of each frame, or of all frames together with
    `bounds: video`; all else is as in `data.images`. `sound` says whether video files with sound
    are refused, or read without it.

    On the time axis, a second of video has `positions_per_second` positions, and a group of frames
    (those of one patch) the position of its time, rounded down. `times` says how text continues
    after a video, or that times are written as text instead:

        positions   as after an image, at a position that may be below the last times
                    (transformers 5; in its earlier versions and in arXiv 2502.13923, at the maximum
                    position + 1)
        line        at the maximum + 1; groups of frames are as far apart as `fps` says, even in
                    videos that are too short or too long for it (arXiv 2503.20215)
        fractions   as in line, and times are not rounded down (arXiv 2509.17765)
        text        "<0.5 seconds>" is written before each group of frames, whose positions are
                    those of an image (arXiv 2511.21631)
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
        defaults = VideoDataConfig.model_fields
        for key in ("sampling", "min_frames"):
            if self.fps is None and getattr(self, key) != defaults[key].default:
                raise ValueError(
                    f"{key} ({getattr(self, key)}): without fps all frames are taken; set fps, or leave it out"
                )
        if self.times == "text" and self.positions_per_second != (
            defaults["positions_per_second"].default
        ):
            raise ValueError(
                f"positions_per_second ({self.positions_per_second:g}): with times (text), groups of frames have the "
                "positions of images; leave it out"
            )
        return self


class LatentsDataConfig(ClipBounds):
    """Images and clips that a model learns to draw, as latents x: it draws (x - `mean`) / `std`.
    Both have one number for all channels, or one for each."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[PositiveFloat, ...] = (1.0,)


class AudioDataConfig(Section):
    """Log-mel settings: frames of `window_length` samples, `hop_length` samples apart.

    Clips longer than `max_seconds` are rejected, not cut.
    """

    sample_rate: int = Field(16_000, ge=1_000, le=1_000_000)  # Hz; files have the same bounds
    window_length: PositiveInt = 400  # samples
    hop_length: PositiveInt = 160  # samples
    max_seconds: PositiveFloat = 60.0


class DataConfig(Section):
    """The examples of training and evaluation, and how they are read."""

    sources: tuple[SourceConfig, ...]  # for training, mixed by weight
    evaluation: tuple[SourceConfig, ...] = ()  # held-out examples
    root: str | None = None  # folder of the sources' relative paths; none: the working directory
    batch_size: int = Field(gt=0, le=1 << 20)  # examples per step, on all hosts together
    tokenizer: str | None = None  # a tokenizers JSON file; none: bytes
    # How turns are laid out: `chatml`, or a file with a Jinja template
    chat_template: str = Field(CHATML, min_length=1)
    # The date that the template prints as today's; none: the template gets no date or clock
    chat_date: date | None = None
    images: ShownImagesConfig = ShownImagesConfig()
    audio: AudioDataConfig = AudioDataConfig()
    videos: VideoDataConfig = VideoDataConfig()  # with model.vision.videos
    generated: GeneratedDataConfig = GeneratedDataConfig()  # for models that draw pixels
    latents: LatentsDataConfig = LatentsDataConfig()  # for models that draw latents
    index_cache: str | None = None  # folder for indexes of lengths; none: next to each source
    # Processes per host that decode media and fill rows; 0: a thread does it
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
