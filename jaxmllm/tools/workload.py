"""Generated batches for measuring the planner without data: seeded lengths of six tasks, two more
for models that draw, and a model to compute costs for.

    text                 no media
    speech_recognition   a clip and its transcript: text follows the seconds
    spoken_question      a clip and an answer, independent of each other
    captioning           an image, then a caption
    visual_question      an image and a short answer
    multi_image          two to eight images with text between them
    draw_picture         a caption, then a picture that is drawn from it
    draw_clip            a caption, then a clip

Images are log-uniform, text and clips truncated log-normal. Units are those of training: vision
slots are patches, merge**2 of them per token; audio slots are frames of 10 ms, padded to whole
tokens, or with silence to whole chunks where the tower hears it; the language sequence of an
example counts its text, the tokens of its media and two frame tokens around each. Media are spread
evenly between equal stretches of the text. A drawn picture or clip follows its caption, is made
from all of it, and adds only its frame tokens to the text. With patches of 16 pixels, drawn
pictures have sides of 256 to 1,024 pixels, and clips 2 to 32 patches along time and sides of 256 to
768 pixels. Examples are independent draws from the mix; one seed makes one batch.

The default model has 0.6B vision, 0.6B audio and 8B language parameters, all trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from jaxmllm.arrays import Amount, Longs, ceil_divide, running_sums, sums_by
from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.balance.records import BatchItems, ExchangeGrid, Mode, PhaseItems, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import ODD_FACTORS, Alignment, SizingInputs
from jaxmllm.balance.sizes.loads import SampleSize
from jaxmllm.config.schema import (
    AudioConfig,
    BalanceConfig,
    LanguageConfig,
    ModelConfig,
    PhaseConfig,
    VisionConfig,
)
from jaxmllm.phases import LANGUAGE, component_names, make_phases

MODEL: Final = ModelConfig(
    vision=VisionConfig(width=1280, layers=32, heads=16, mlp_width=5120, patch_size=14, merge=2),
    audio=AudioConfig(
        width=1280, layers=32, heads=20, mlp_width=5120, mel_bins=128, chunk_frames=32, merge=2
    ),
    language=LanguageConfig(
        width=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_size=128,
        mlp_width=12288,
        vocab_size=151_936,
    ),
)
assert MODEL.audio is not None
PHASES: Final = make_phases(MODEL)
FRAMES_PER_SECOND: Final = 100
ALIGNMENTS: Final = {
    "vision": Alignment(128, small=64, smallest=32),
    "audio": Alignment(
        128 * MODEL.audio.stem_stride,
        small=64 * MODEL.audio.stem_stride,
        smallest=32 * MODEL.audio.stem_stride,
        stride=MODEL.audio.stem_stride,
    ),
    "language": Alignment(128, small=64, smallest=32),
}  # rows are whole attention blocks
FRAME_TOKENS: Final = 2  # around every image and clip
SAMPLED: Final = SampleSize(8192, fewest=2, most=16)  # generated to choose sizes from


@dataclass(frozen=True)
class LogNormal:
    """Log-normal distribution, given its median and the standard deviation of its logarithm; draws
    out of bounds are repeated."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, random: np.random.Generator, size: int) -> NDArray[np.float64]:
        drawn = random.lognormal(np.log(self.median), self.sigma, size)
        while (outside := np.flatnonzero((drawn < self.low) | (drawn > self.high))).size:
            drawn[outside] = random.lognormal(np.log(self.median), self.sigma, outside.size)
        return drawn


@dataclass(frozen=True)
class LogUniform:
    """Distribution whose logarithm is uniform between those of the bounds."""

    low: float
    high: float

    def draw(self, random: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.exp(random.uniform(np.log(self.low), np.log(self.high), size))


@dataclass(frozen=True)
class Task:
    """One task: how much text and which media its examples hold."""

    text: LogNormal  # tokens that do not depend on media
    images: tuple[int, int] = (0, 0)  # fewest and most of an example, all numbers equally likely
    image: LogUniform = LogUniform(64, 2560)  # tokens of an image
    clip: LogNormal | None = None  # seconds
    # Tokens of transcript per second of the clip, added to the text
    speech: LogNormal | None = None
    drawn: LogUniform | None = None  # patches of a drawn picture, or of a clip at one time
    times: LogUniform = LogUniform(1, 1)  # patches of a drawn clip along time

    @property
    def phases(self) -> set[str]:
        """Phases that run the media of its examples."""
        is_run = {
            "vision": self.images[1] > 0,
            "audio": self.clip is not None,
            "diffusion": self.drawn is not None,
        }
        return {phase for phase, is_there in is_run.items() if is_there}


TASKS: Final[Mapping[str, Task]] = {
    "text": Task(LogNormal(400, 1.0, 16, 4096)),
    "speech_recognition": Task(
        LogNormal(12, 0.2, 8, 24),
        clip=LogNormal(12, 0.7, 1, 60),
        speech=LogNormal(3.5, 0.2, 1.5, 8),
    ),
    "spoken_question": Task(LogNormal(200, 0.9, 16, 2048), clip=LogNormal(8, 0.6, 1, 60)),
    "captioning": Task(LogNormal(120, 0.7, 16, 1024), images=(1, 1)),
    "visual_question": Task(LogNormal(48, 0.9, 8, 1024), images=(1, 1)),
    "multi_image": Task(LogNormal(300, 0.8, 32, 2048), images=(2, 8), image=LogUniform(64, 1024)),
    "draw_picture": Task(LogNormal(60, 0.8, 16, 512), drawn=LogUniform(256, 4096)),
    "draw_clip": Task(
        LogNormal(60, 0.8, 16, 512), drawn=LogUniform(256, 2304), times=LogUniform(2, 32)
    ),
}
DEFAULT_MIX: Final[Mapping[str, float]] = {
    "text": 0.25,
    "speech_recognition": 0.20,
    "spoken_question": 0.15,
    "captioning": 0.15,
    "visual_question": 0.15,
    "multi_image": 0.10,
}
# Added for models that draw, and for those of them whose patches span several frames
PICTURES: Final[Mapping[str, float]] = {"draw_picture": 0.5}
CLIPS: Final[Mapping[str, float]] = {"draw_clip": 0.5}


def generate(
    seed: int | Sequence[int],
    examples: int,
    mix: Mapping[str, float] = DEFAULT_MIX,
    model: ModelConfig = MODEL,
) -> BatchItems:
    """Lengths of one global batch.

    Args:
      seed: determines all draws; a sequence of integers makes families of batches, as in numpy.
      examples: B, the number of examples.
      mix: weight of each task of `TASKS`; need not add up to one.
      model: determines the slots of a media token, and which tasks are possible.

    Returns:
      Items of every phase of the model; `examples` is 0 .. B - 1, and all text tokens are targets.

    Raises:
      ValueError: a task is unknown or needs an encoder or a generator that the model lacks, a
        weight is negative, or none is positive.
    """
    possible = _learnable_tasks(model, dict.fromkeys(TASKS, 1.0))
    if impossible := mix.keys() - possible.keys():
        raise ValueError(
            f"tasks {sorted(impossible)} are unknown or need another encoder than {list(model.encoders)}, or another "
            f"generator than {list(model.generators)}; possible are {list(possible)}"
        )
    weights = np.array([*mix.values()], np.float64)
    if (weights < 0).any() or not weights.sum():
        raise ValueError(
            f"the weights of a mix must be at least 0, and one of them more: {dict(mix)}"
        )
    random = np.random.default_rng(seed)
    task_of = random.choice(len(weights), examples, p=weights / weights.sum())
    text = np.zeros(examples, np.int64)
    empty = np.zeros(0, np.int64)
    images = _Media(empty, empty)
    clips = _Media(empty, empty)
    drawn = _Media(empty, empty)
    # The order of the draws is part of what a seed means: figures in the docs were made with it.
    for index, name in enumerate(mix):
        members = np.flatnonzero(task_of == index)
        task = TASKS[name]
        tokens = task.text.draw(random, len(members))
        fewest_images, most_images = task.images
        owner = np.repeat(members, random.integers(fewest_images, most_images + 1, len(members)))
        images = images.with_more(owner, np.rint(task.image.draw(random, len(owner))))
        if task.clip is not None:
            seconds = task.clip.draw(random, len(members))
            clips = clips.with_more(members, np.ceil(seconds * FRAMES_PER_SECOND))
            if task.speech is not None:
                tokens += seconds * task.speech.draw(random, len(members))
        if task.drawn is not None:
            patches = np.rint(task.drawn.draw(random, len(members)))
            patches *= np.rint(task.times.draw(random, len(members)))
            drawn = drawn.with_more(members, patches)
        text[members] = np.rint(tokens)
    return _batch_items(text, images.ordered(), clips.ordered(), drawn.ordered(), model)


def generated_batches(
    examples: int,
    seed: int,
    model: ModelConfig = MODEL,
    mix: Mapping[str, float] = DEFAULT_MIX,
    steps: int = 1,
) -> tuple[list[BatchItems], list[BatchItems]]:
    """Generate batches to choose sizes from, and `steps` others to plan."""
    sampled = SAMPLED.batches(examples)
    batches = [generate([seed, index], examples, mix, model) for index in range(sampled + steps)]
    return batches[:sampled], batches[sampled:]


def mix_for(
    model: ModelConfig, mix: Mapping[str, float] = DEFAULT_MIX, learns_text: bool = True
) -> dict[str, float]:
    """The tasks of a mix whose media the model has encoders for, and those of what it draws.

    Args:
      learns_text: whether examples without anything to draw train the model; if not, the mix is
        left out.
    """
    tasks = _learnable_tasks(model, mix) if learns_text else {}
    if model.diffusion is not None:
        tasks |= PICTURES
        if model.diffusion.patch_frames > 1:
            tasks |= CLIPS
    return tasks


def _learnable_tasks(model: ModelConfig, mix: Mapping[str, float]) -> dict[str, float]:
    """The tasks of a mix that the model can learn from."""
    missing = {"vision", "audio", "diffusion"} - {*model.encoders, *model.generators}
    return {name: weight for name, weight in mix.items() if missing.isdisjoint(TASKS[name].phases)}


def describe(batch: BatchItems) -> dict[str, float]:
    """How ragged a batch is; belongs next to every figure that was measured on it.

    Returns:
      Over the items of each phase: `<phase>/items`, `<phase>/mean` (slots), `<phase>/cv` (standard
      deviation / mean), `<phase>/max_over_mean`, `<phase>/inner_padding` (share of slots that are
      padding inside items). Between the amounts of an example, zeros included:
      `correlation/<amount>,<amount>`, where an amount is the slots in a phase, or "text". Over the
      examples that have items of an encoder: `correlation/text|<phase>`.
      Undefined statistics are left out.
    """
    statistics: dict[str, float] = {}
    examples = len(batch.examples)
    encoders = [phase for phase in batch.phases if phase in MODEL.encoders]
    amounts: dict[str, Longs] = {}
    for phase, items in batch.phases.items():
        length = items.length
        amounts[phase] = sums_by(items.example, length, examples)
        statistics[f"{phase}/items"] = len(length)
        if len(length):
            statistics[f"{phase}/mean"] = float(length.mean())
            statistics[f"{phase}/cv"] = float(length.std() / length.mean())
            statistics[f"{phase}/max_over_mean"] = float(length.max() / length.mean())
            statistics[f"{phase}/inner_padding"] = 1 - float(items.real.sum() / length.sum())
    amounts["text"] = amounts[LANGUAGE].copy()  # less the tokens of media, below
    for phase in encoders:
        tokens = batch.phases[phase].tokens.astype(np.int64)
        amounts["text"] -= sums_by(batch.phases[phase].example, tokens, examples)
    for name_x, name_y in combinations(amounts, 2):
        _correlate(statistics, f"{name_x},{name_y}", amounts[name_x], amounts[name_y])
    for phase in encoders:
        has = amounts[phase] > 0
        _correlate(statistics, f"text|{phase}", amounts["text"][has], amounts[phase][has])
    return statistics


def longest(phase: str, mix: Mapping[str, float] = DEFAULT_MIX, model: ModelConfig = MODEL) -> int:
    """Slots of the largest item of a phase that the mix can draw."""
    return max(_longest_item(phase, TASKS[name], model) for name in mix)


def make_spec(
    ranks: int,
    samples: Sequence[BatchItems],
    mode: Mode = "phases",
    row_classes: int | Literal["auto"] = "auto",
    mix: Mapping[str, float] = DEFAULT_MIX,
    ranks_per_node: int | None = None,
    backend: str = "padded",
    spans: tuple[int, ...] = (1,),
    others: Sequence[BatchItems] = (),
    longest_items: Mapping[str, int] | None = None,
) -> PlanSpec:
    """Sizes for planning generated batches, chosen from `samples` as a run chooses them.

    Row capacities are `auto`, and costs are the FLOPs of `MODEL`.

    Args:
      ranks: data ranks, the same in every phase.
      spans: how many ranks may hold a row together.
      others: batches unlike the samples that may also come.
      longest_items: slots of the longest item of each phase; None: the longest that `mix` can draw.
    """
    if longest_items is None:
        longest_items = {name: longest(name, mix) for name in PHASES}
    trained = dict.fromkeys(component_names(PHASES), 1)
    needs = [
        SizingInputs(
            phase=phase,
            ranks=ranks,
            alignment=ALIGNMENTS[name],
            slots_per_token=slots_per_token(name, MODEL),
            longest=longest_items[name],
            flops=phase_flops(MODEL, name, trained),
            config=PhaseConfig(row_classes=row_classes),
            spans=spans,
        )
        for name, phase in PHASES.items()
    ]
    nodes = None
    if ranks_per_node is not None:
        nodes = dict.fromkeys(PHASES, np.arange(ranks, dtype=np.int32) // ranks_per_node)
    balance = BalanceConfig(mode=mode)
    grids = make_grids(ranks)
    return choose_sizes(samples, needs, grids, balance, nodes, backend, others)


def spans_up_to(widest: int, ranks: int) -> tuple[int, ...]:
    """Numbers of ranks, `widest` at most, that may hold a row together, as `phases.<phase>.spans:
    auto` has them: powers of two that divide `ranks`, then the last of them times odd factors."""
    spans = [1]
    for factor in (*[2] * ranks.bit_length(), *ODD_FACTORS):
        longer = factor * spans[-1]
        if longer <= widest and ranks % longer == 0:
            spans.append(longer)
    return tuple(spans)


def make_grids(ranks: int) -> dict[str, ExchangeGrid]:
    """Exchange grid of each encoder, whose ranks are those of the language phase."""
    line = np.arange(ranks, dtype=np.int32)[:, None]
    return {phase: ExchangeGrid(line, line) for phase in MODEL.encoders}


# ---------------------------------------------------------------------------- units


@dataclass(frozen=True)
class _Media:
    """Items of one kind: the example of each, and its size in tokens (images) or frames (clips)."""

    example: Longs
    size: Longs

    def with_more(self, example: Longs, size: NDArray[np.float64]) -> _Media:
        return _Media(np.append(self.example, example), np.append(self.size, size.astype(np.int64)))

    def ordered(self) -> _Media:
        order = np.argsort(self.example, kind="stable")
        return _Media(self.example[order], self.size[order])


def _batch_items(
    text: Longs, images: _Media, clips: _Media, drawn: _Media, model: ModelConfig
) -> BatchItems:
    """Items of all phases. Each example has media of at most one kind, so where its media begin
    does not depend on other kinds."""
    phases = {}
    if model.vision is not None:
        patches = images.size * slots_per_token("vision", model)
        phases["vision"] = _items(images.example, patches, patches, images.size, text)
    if model.audio is not None:
        frames = slots_per_token("audio", model)
        heard = _heard(clips.size, model.audio)
        tokens = ceil_divide(heard, frames)
        phases["audio"] = _items(clips.example, tokens * frames, heard, tokens, text)
    length = text.copy()
    # `phases` has no generators yet: only tokens of encoders lengthen a text.
    for items in phases.values():
        length += sums_by(items.example, items.tokens.astype(np.int64) + FRAME_TOKENS, len(text))
    # Indexing adds once to each example, which has at most one drawn item.
    length[drawn.example] += FRAME_TOKENS
    examples = np.arange(len(text))
    zeros = np.zeros(len(text), np.int32)
    phases |= {phase: _generated_items(drawn, text, model, phase) for phase in model.generators}
    phases[LANGUAGE] = PhaseItems(
        length, length, examples.astype(np.int32), tokens=zeros, slot=zeros
    )
    return BatchItems(examples, int(text.sum()), phases)


def _items(example: Longs, length: Longs, real: Longs, tokens: Longs, text: Longs) -> PhaseItems:
    ones = np.ones_like(example)
    items_before = running_sums(example, ones)  # of the same example
    items_of_example = sums_by(example, ones, len(text))[example]
    # Item k of n, from 0, follows (k + 1) / (n + 1) of the text, the earlier items with their frame
    # tokens, and the first of its own
    text_before = text[example] * (items_before + 1) // (items_of_example + 1)
    slot = text_before + running_sums(example, tokens + FRAME_TOKENS) + FRAME_TOKENS // 2
    return PhaseItems(
        length, real, example.astype(np.int32), tokens.astype(np.int32), slot.astype(np.int32)
    )


def _generated_items(drawn: _Media, text: Longs, model: ModelConfig, phase: str) -> PhaseItems:
    """Items of a generator: each is drawn from all text tokens of its example, its conditions."""
    conditions = text[drawn.example].astype(np.int32)
    ones = np.ones_like(drawn.size)
    shapes = np.stack([drawn.size, ones, ones], axis=1)
    slots = _generated_slots(drawn.size, conditions, model, phase)
    return PhaseItems(
        length=slots,
        real=drawn.size if phase in model.crossed else slots,
        example=drawn.example.astype(np.int32),
        tokens=conditions,
        slot=np.zeros(len(conditions), np.int32),
        extra_squares=VisiblePairs.of_model(model).of_items(phase, shapes, conditions),
    )


def _generated_slots(patches: Any, conditions: Any, model: ModelConfig, phase: str) -> Any:
    """Slots of drawn items, as numbers or arrays: patches and conditions each take slots, or share
    them where cross-attention reads the conditions."""
    if phase in model.crossed:
        return np.maximum(patches, conditions)
    return patches + conditions


def _heard(frames: Amount, audio: AudioConfig) -> Amount:
    """Frames of a clip that the tower takes: its own, or where the tower hears silence, the slots
    of whole chunks."""
    if audio.silence != "heard":
        return frames
    return ceil_divide(frames, audio.chunk_frames) * audio.chunk_slots


def _longest_item(phase: str, task: Task, model: ModelConfig) -> int:
    """Slots of the largest item of a phase that a task can draw."""
    images = task.images[1]
    image = round(task.image.high)
    frames = slots_per_token("audio", model)
    clip = 0
    if task.clip is not None and model.audio is not None:
        clip_frames = math.ceil(task.clip.high * FRAMES_PER_SECOND)
        # In language tokens, as `image` is.
        clip = ceil_divide(_heard(clip_frames, model.audio), frames)
    if phase == "vision":
        return image * slots_per_token("vision", model) if images else 0
    if phase == "audio":
        return clip * frames
    patches = 0 if task.drawn is None else round(task.drawn.high * task.times.high)
    if phase in model.generators:
        text = round(task.text.high) if patches else 0
        return int(_generated_slots(patches, text, model, phase))
    length = task.text.high + images * (image + FRAME_TOKENS)
    length += FRAME_TOKENS if patches else 0
    if task.clip is not None:
        length += FRAME_TOKENS + clip
        length += 0 if task.speech is None else task.clip.high * task.speech.high
    return math.ceil(length)


def slots_per_token(phase: str, model: ModelConfig) -> int:
    """Slots of a row that become one language token; 1 for language."""
    if phase == "vision" and model.vision is not None:
        return model.vision.merged
    if phase == "audio" and model.audio is not None:
        return model.audio.stem_stride * model.audio.merged
    return 1


def _correlate(statistics: dict[str, float], name: str, x: Longs, y: Longs) -> None:
    if len(x) > 1 and x.std() and y.std():
        statistics[f"correlation/{name}"] = float(np.corrcoef(x, y)[0, 1])
