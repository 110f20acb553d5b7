"""The batches and models of benchmarks/pipeline.py: models of several chains, and batches whose
rows are made in two ways.

    examples --drawn_rows---> Rows     microbatches as drawn, each with feeding rows of its own
             --planned_rows-> Rows     examples placed by the planner, feeding rows filled in the order
                                       in which microbatches run

The rows of all chains but the last feed the rows of the last chain, the reader, as encoders feed a
language model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.costs.flops import Layer, phase_layers
from jaxmllm.balance.stages.microbatches import PhaseLoad, plan_microbatches
from jaxmllm.config.schema import AudioConfig, LanguageConfig, ModelConfig, VisionConfig
from jaxmllm.phases import LANGUAGE, make_phases
from jaxmllm.tools.workload import MODEL as WORKLOAD_MODEL


@dataclass(frozen=True)
class Rows:
    """The rows of a batch: for every row the sum of the squared lengths of its items.

    Attributes:
      feeding: sums of the rows of each feeding chain, in the order of the chains.
      reading: sums of the rows of the reader.
      inputs: for each row of the reader, the (chain, row) of all feeding rows that it reads.
    """

    feeding: list[list[int]]
    reading: list[int]
    inputs: list[set[tuple[int, int]]]


@dataclass(frozen=True)
class Chains:
    """A model of chains that all feed the last one, what of it may be trained, and its batches.

    Attributes:
      layers: layers of each chain, a stem first; feeding chains first, the reader last.
      modes: the trained components of each mode.
      slots: slots of a row of each chain.
      squares: mean sum of squared item lengths in a row of each chain.
      read: mean number of rows of each feeding chain in a microbatch.
      room: rows of each feeding chain that have room on a rank, for each microbatch of the reader
        that has room there.
      tokens: the most tokens, as wide as the language model, that a row of each feeding chain
        delivers.
      generate: makes a batch from a seed and a number of microbatches.
      drawn_rows, planned_rows: make the rows of a batch.
      chunks: numbers of chunks on each rank, one for each chain, that are tried where all chains
        are on every rank. Empty: a formula decides.
    """

    model: ModelConfig
    layers: Mapping[str, tuple[Layer, ...]]
    modes: Mapping[str, frozenset[str]]
    slots: Mapping[str, int]
    squares: Mapping[str, int]
    read: Mapping[str, Fraction]
    room: int
    tokens: Mapping[str, int]
    generate: Callable[[int, int], Any]
    drawn_rows: Callable[[Any], Rows]
    planned_rows: Callable[[Any], Rows]
    chunks: tuple[tuple[int, ...], ...] = ()


# ---------------------------------------------------------------------------- media -> text


@dataclass(frozen=True)
class Medium:
    """Items of one size for an encoder."""

    slots: int  # of an item in the encoder
    tokens: int  # of an item in the language sequence
    most: int  # items in a microbatch of a model without another encoder
    of_row: int  # items that a row of the encoder holds


MEDIA = {
    "vision": Medium(slots=576, tokens=144, most=48, of_row=8),  # images of 24 x 24 patches
    "audio": Medium(slots=1024, tokens=256, most=12, of_row=4),  # clips of 10 s
}
FRAME = 2  # tokens around an item
ROW_TOKENS = 8192
EXAMPLES = 16  # in a microbatch
FILL = (0.85, 0.97)  # least and largest share of a language row that drawn examples fill
LEAST_TEXT = 16  # text tokens of an example


@dataclass(frozen=True)
class Batch:
    """Examples in the order drawn: microbatch, number of items of every encoder and text tokens of
    each, all [B]."""

    microbatch: Longs
    items: Mapping[str, Longs]
    text: Longs

    @property
    def tokens(self) -> Longs:
        """Tokens of each example's language sequence, [B]."""
        media_tokens = [count * (MEDIA[name].tokens + FRAME) for name, count in self.items.items()]
        return np.sum([self.text, *media_tokens], axis=0)


def generate(encoders: Sequence[str], seed: int, microbatches: int) -> Batch:
    """Draw microbatches of `EXAMPLES` examples, which share a microbatch's items at random."""
    random = np.random.default_rng(seed)
    totals = {
        name: random.integers(0, MEDIA[name].most // len(encoders) + 1, microbatches)
        for name in encoders
    }
    items: dict[str, list[Longs]] = {name: [] for name in encoders}
    text = []
    for microbatch in range(microbatches):
        media_tokens = 0
        for name in encoders:
            total = int(totals[name][microbatch])
            items[name].append(random.multinomial(total, random.dirichlet(np.ones(EXAMPLES))))
            media_tokens += total * (MEDIA[name].tokens + FRAME)
        text_budget = int(ROW_TOKENS * random.uniform(*FILL)) - media_tokens - LEAST_TEXT * EXAMPLES
        text.append(
            LEAST_TEXT
            + random.multinomial(max(text_budget, 0), random.dirichlet(np.ones(EXAMPLES)))
        )
    return Batch(
        np.repeat(np.arange(microbatches), EXAMPLES),
        {name: np.concatenate(counts) for name, counts in items.items()},
        np.concatenate(text),
    )


def drawn_rows(batch: Batch) -> Rows:
    """Rows of a batch whose microbatches are as drawn, each with encoder rows of its own."""
    count = int(batch.microbatch.max()) + 1
    inputs: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    feeding_squares = []
    for chain, (name, items) in enumerate(batch.items.items()):
        row_items: list[int] = []
        for microbatch, total in enumerate(sums_by(batch.microbatch, items, count).tolist()):
            row_capacity = MEDIA[name].of_row
            rows = [min(row_capacity, total - start) for start in range(0, total, row_capacity)]
            inputs[microbatch] |= {(chain, len(row_items) + row) for row in range(len(rows))}
            row_items += rows
        feeding_squares.append([item_count * MEDIA[name].slots ** 2 for item_count in row_items])
    return Rows(feeding_squares, sums_by(batch.microbatch, batch.tokens**2, count).tolist(), inputs)


def planned_rows(model: ModelConfig, batch: Batch) -> Rows:
    """Rows of a batch whose examples are placed by `plan_microbatches`; encoder rows are filled in
    the order in which microbatches run."""

    def load(name: str, slots: Longs, capacity: int | None = None) -> PhaseLoad:
        work = sum(layer.linear(1) for layer in phase_layers(model, name))
        return PhaseLoad(slots * work, slots, capacity)

    plan = plan_microbatches(
        {name: load(name, items * MEDIA[name].slots) for name, items in batch.items.items()},
        load(LANGUAGE, batch.tokens, ROW_TOKENS),
        replicas=1,
        microbatches=int(batch.microbatch.max()) + 1,
    )
    inputs: list[set[tuple[int, int]]] = [set() for _ in range(plan.microbatches)]
    order = np.lexsort((plan.language, plan.encoder)).tolist()
    feeding_squares = []
    for chain, (name, items) in enumerate(batch.items.items()):
        row_items: list[int] = []
        for example in order:
            for _ in range(int(items[example])):
                if not row_items or row_items[-1] == MEDIA[name].of_row:
                    row_items.append(0)
                row_items[-1] += 1
                inputs[plan.language[example]].add((chain, len(row_items) - 1))
        feeding_squares.append([item_count * MEDIA[name].slots ** 2 for item_count in row_items])
    reading_squares = sums_by(plan.language, batch.tokens**2, plan.microbatches).tolist()
    return Rows(feeding_squares, reading_squares, inputs)


def media_and_text(
    model: ModelConfig,
    modes: Mapping[str, Sequence[str]],
    chunks: tuple[tuple[int, ...], ...] = (),
) -> Chains:
    """The chains of a model with encoders.

    Args:
      modes: for each mode, what the names of its trained components begin with.
    """
    *encoders, _ = make_phases(model)
    media = {name: MEDIA[name] for name in encoders}
    components = [*encoders, *(f"projector.{name}" for name in encoders), LANGUAGE]
    return Chains(
        model=model,
        layers={name: phase_layers(model, name) for name in (*encoders, LANGUAGE)},
        modes={
            mode: frozenset(entry for entry in components if entry.startswith(tuple(prefixes)))
            for mode, prefixes in modes.items()
        },
        slots={name: entry.of_row * entry.slots for name, entry in media.items()}
        | {LANGUAGE: ROW_TOKENS},
        squares={name: entry.of_row * entry.slots**2 for name, entry in media.items()}
        | {LANGUAGE: ROW_TOKENS**2 // EXAMPLES},
        read={
            name: Fraction(entry.most // len(encoders), 2 * entry.of_row)
            for name, entry in media.items()
        },
        room=4,
        tokens={name: entry.of_row * entry.tokens for name, entry in media.items()},
        generate=lambda seed, microbatches: generate(encoders, seed, microbatches),
        drawn_rows=drawn_rows,
        planned_rows=lambda batch: planned_rows(model, batch),
        chunks=chunks,
    )


ALL = ("",)
PROJECTORS = ("projector.",)
TOWER_5B = VisionConfig(width=3072, layers=44, heads=24, mlp_width=12_288, patch_size=14, merge=2)
TOWER_6B = VisionConfig(width=3200, layers=45, heads=25, mlp_width=12_800, patch_size=14, merge=2)
TOWER_300M = VisionConfig(width=1024, layers=24, heads=16, mlp_width=4096, patch_size=14, merge=2)
LARGE = ModelConfig(
    vision=TOWER_6B,
    language=LanguageConfig(
        width=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_size=128,
        mlp_width=29_568,
        vocab_size=152_064,
    ),
)
UNEVEN = LARGE.model_copy(update={"vision": TOWER_300M})
THREE_TOWERS = ModelConfig(
    vision=TOWER_6B,
    audio=AudioConfig(
        width=2048, layers=40, heads=32, mlp_width=8192, mel_bins=128, chunk_frames=32, merge=2
    ),
    language=LanguageConfig(
        width=2048,
        layers=36,
        heads=16,
        kv_heads=2,
        head_size=128,
        mlp_width=11_008,
        vocab_size=151_936,
    ),
)
VISION_LANGUAGE = media_and_text(
    WORKLOAD_MODEL.model_copy(update={"audio": None, "vision": TOWER_5B}),
    {"train_all": ALL, "alignment": PROJECTORS},
    tuple(itertools.product((1, 2, 3), (1, 2, 3, 4))),
)
UNLIKE: Mapping[str, Chains] = {
    "6B + 2B + 3B": media_and_text(
        THREE_TOWERS,
        {"train_all": ALL, "alignment": PROJECTORS},
        tuple(itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 4))),
    ),
    "0.3B + 72B": media_and_text(
        UNEVEN,
        {"train_all": ALL, "alignment": PROJECTORS},
        tuple(itertools.product((1, 2), (1, 2, 3, 4, 5, 6))),
    ),
    "6B + 72B": media_and_text(
        LARGE,
        {"frozen_encoders": (*PROJECTORS, LANGUAGE), "train_all": ALL, "alignment": PROJECTORS},
        tuple(itertools.product((1, 2, 3), (1, 2, 3, 4, 5, 6))),
    ),
}
