"""Text to video in a pipeline: captions go through a language model, and a diffusion transformer
reads its states. Part of benchmarks/pipeline.py, as its model `text_to_video`.

The decoder of 8B and the transformer are those of benchmarks/diffusion.py, and so are the captions
and the seconds of clips; frames have the area of 256 x 256 pixels. Clips are drawn one after
another, and a microbatch takes them until it would have more than 8 of them, more than 16 s, or
more slots than a row. Only the generator has a loss (`objective.language.weight: 0`), so the
decoder has no head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from benchmarks.diffusion import (
    CAPTION,
    CLIP_SIDES,
    DIFFUSION,
    FRAME_RATE,
    FRAME_TOKENS,
    FRAMES,
    MODEL,
    SECONDS,
    SIDE,
    TRAINED,
)
from benchmarks.pipeline_batches import Chains, Rows
from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.costs.flops import Layer, phase_layers
from jaxmllm.balance.stages.microbatches import PhaseLoad, plan_microbatches
from jaxmllm.phases import LANGUAGE

MOST_CLIPS = 8  # in a drawn microbatch
MOST_FRAMES = 16 * FRAME_RATE  # in a drawn microbatch: 16 seconds
FRAME_SLOTS = (min(CLIP_SIDES) // SIDE) ** 2  # slots for each `FRAMES` frames
ROW_TEXT = 1024  # tokens of a row of the decoder
ROW_SLOTS = MOST_FRAMES // FRAMES * FRAME_SLOTS + ROW_TEXT  # slots of a row of the generator
# Items in an average row: captions of the decoder, clips of the generator
CAPTIONS = 10
CLIPS = 3


@dataclass(frozen=True)
class Clips:
    """Clips in the order drawn: microbatch, slots of latents and caption tokens of each, all
    [N]."""

    microbatch: Longs
    latents: Longs
    caption: Longs

    @property
    def text(self) -> Longs:
        """Tokens of each clip's language sequence, [N]."""
        return self.caption + FRAME_TOKENS

    @property
    def slots(self) -> Longs:
        """Slots of each clip in the generator, [N]: latents, and the states that it reads."""
        return self.latents + self.caption


def generate(seed: int, microbatches: int) -> Clips:
    """Draw clips; each microbatch takes them in that order until the next clip has no room."""
    random = np.random.default_rng(seed)
    placements: list[tuple[int, int, int]] = []
    microbatch = 0
    clips = 0
    frames = 0
    slots = 0
    while True:
        clip_frames = round(SECONDS.draw(random, 1)[0] * FRAME_RATE)
        caption = round(CAPTION.draw(random, 1)[0])
        latents = -(-clip_frames // FRAMES) * FRAME_SLOTS
        clips = clips + 1
        frames = frames + clip_frames
        slots = slots + latents + caption
        if clips > MOST_CLIPS or frames > MOST_FRAMES or slots > ROW_SLOTS:
            microbatch = microbatch + 1
            clips = 1
            frames = clip_frames
            slots = latents + caption
        if microbatch == microbatches:
            return Clips(*np.array(placements, np.int64).T)
        placements.append((microbatch, latents, caption))


def drawn_rows(batch: Clips) -> Rows:
    """Rows of a batch whose microbatches are as drawn, each with decoder rows of its own."""
    count = int(batch.microbatch.max()) + 1
    return _rows(batch, np.argsort(batch.microbatch, kind="stable"), batch.microbatch, count, True)


def planned_rows(batch: Clips) -> Rows:
    """Rows of a batch whose clips are placed by `plan_microbatches`; decoder rows are filled in the
    order in which microbatches run."""
    plan = plan_microbatches(
        {LANGUAGE: PhaseLoad(batch.text * _work(LANGUAGE, batch.text), batch.text)},
        PhaseLoad(batch.slots * _work(DIFFUSION, batch.slots), batch.slots, ROW_SLOTS),
        replicas=1,
        microbatches=int(batch.microbatch.max()) + 1,
        reader=DIFFUSION,
    )
    order = np.lexsort((plan.language, plan.encoder))
    return _rows(batch, order, plan.language.astype(np.int64), plan.microbatches, False)


def _work(phase: str, lengths: Longs) -> Longs:
    """FLOPs of one slot of each item, given the items' lengths: [N]."""
    linear = sum(layer.linear(1) for layer in LAYERS[phase])
    return linear + sum(layer.attention((1, 0)) for layer in LAYERS[phase]) * lengths


def _rows(batch: Clips, order: Longs, microbatch: Longs, count: int, apart: bool) -> Rows:
    """Rows of clips, whose captions fill rows of the decoder one after another.

    Args:
      order: the order in which captions are taken.
      microbatch: microbatch of each clip.
      count: number of microbatches.
      apart: whether each row has captions of one microbatch only.
    """
    inputs: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    row_squares: list[int] = []
    row_tokens = ROW_TEXT
    last_reader = -1
    for clip in order.tolist():
        text = int(batch.text[clip])
        reader = int(microbatch[clip])
        if row_tokens + text > ROW_TEXT or (apart and reader != last_reader):
            row_squares.append(0)
            row_tokens = 0
        row_tokens = row_tokens + text
        last_reader = reader
        row_squares[-1] += text**2
        inputs[reader].add((0, len(row_squares) - 1))
    return Rows([row_squares], sums_by(microbatch, batch.slots**2, count).tolist(), inputs)


def _language_layers() -> tuple[Layer, ...]:
    """Layers of the decoder, with a last layer that costs nothing: only a norm follows the
    blocks."""
    *layers, head = phase_layers(MODEL, LANGUAGE)
    return (*layers, replace(head, parameters=0, products=()))


def _generator_layers() -> tuple[Layer, ...]:
    """Layers of the generator, with the projector of states and the stem of patches merged into one
    stem."""
    projector, stem, *blocks = phase_layers(MODEL, DIFFUSION)
    products = (*projector.products, *stem.products)
    parameters = projector.parameters + stem.parameters
    return (replace(stem, parameters=parameters, products=products), *blocks)


LAYERS = {LANGUAGE: _language_layers(), DIFFUSION: _generator_layers()}

TEXT_TO_VIDEO = Chains(
    model=MODEL,
    layers=LAYERS,
    modes={
        "train_all": frozenset({LANGUAGE, *TRAINED}),
        "frozen_text": frozenset(TRAINED),
    },
    slots={LANGUAGE: ROW_TEXT, DIFFUSION: ROW_SLOTS},
    squares={LANGUAGE: ROW_TEXT**2 // CAPTIONS, DIFFUSION: ROW_SLOTS**2 // CLIPS},
    read={LANGUAGE: Fraction(1)},
    room=2,
    tokens={LANGUAGE: ROW_TEXT},
    generate=generate,
    drawn_rows=drawn_rows,
    planned_rows=planned_rows,
    chunks=tuple(itertools.product((1, 2, 3), (1, 2, 4, 5, 7))),
)
