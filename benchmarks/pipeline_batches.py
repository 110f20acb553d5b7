"""What benchmarks/pipeline.py lays into a pipeline: a model of two chains, and batches whose rows are made in two ways.

    examples --drawn_rows---> Rows     microbatches as drawn, each with feeding rows of its own
             --planned_rows-> Rows     examples placed by the planner, feeding rows filled as microbatches run

The rows of the first chain feed those of the second, its reader, as an encoder feeds a language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.costs.flops import Layer, phase_layers
from jaxmllm.balance.stages.microbatches import PhaseLoad, plan_microbatches
from jaxmllm.config.schema import ModelConfig, VisionConfig
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.workload import MODEL as WORKLOAD_MODEL


@dataclass(frozen=True)
class Rows:
    """What is computed, row by row: squared lengths of every feeding row and of every row of the reader, and the
    feeding rows that each of the latter reads."""

    feeding: list[int]
    reading: list[int]
    inputs: list[set[int]]


@dataclass(frozen=True)
class Chains:
    """A model of two chains, what may be trained of it, and its batches.

    layers: of each chain, a stem first; the feeding one first, its reader last.
    slots: of a row of each chain; `squares` what its lengths squared come to on average.
    read: feeding rows of an average microbatch; `room` of those, for every microbatch of the reader that has room.
    tokens: that a feeding row delivers at most, as wide as the language model.
    chunks: per rank of both chains, that are tried where both lie on every rank; none: a formula.
    generate: batches of a seed and a number of microbatches, of which rows are made.
    """

    model: ModelConfig
    layers: Mapping[str, tuple[Layer, ...]]
    modes: Mapping[str, frozenset[str]]
    slots: Mapping[str, int]
    squares: Mapping[str, int]
    read: Fraction
    room: int
    tokens: int
    generate: Callable[[int, int], Any]
    drawn_rows: Callable[[Any], Rows]
    planned_rows: Callable[[Any], Rows]
    chunks: tuple[tuple[int, int], ...] = ()


# ---------------------------------------------------------------------------- images -> text

MODEL = WORKLOAD_MODEL.model_copy(
    update={
        "audio": None,
        "vision": VisionConfig(
            width=3072, layers=44, heads=24, mlp_width=12_288, patch_size=14, merge=2
        ),
    }
)
PATCHES, TOKENS, FRAME = 576, 144, 2  # of an image: 24 x 24 patches; and two tokens around it
MOST_IMAGES = 48  # of a microbatch
ROW_IMAGES = 8  # of an encoder row
ROW_TOKENS = 8192
EXAMPLES = 16  # of a microbatch
FILL = (0.85, 0.97)  # of a language row, as examples are drawn
LEAST_TEXT = 16  # tokens of an example


@dataclass(frozen=True)
class Batch:
    """Examples in the order drawn: `microbatch`, images and text tokens of each."""

    microbatch: Longs
    images: Longs
    text: Longs

    @property
    def tokens(self) -> Longs:
        """Of an example's language sequence."""
        return self.text + self.images * (TOKENS + FRAME)


def generate(seed: int, microbatches: int) -> Batch:
    """Microbatches of `EXAMPLES` examples; the images of a microbatch fall to them with random shares."""
    random = np.random.default_rng(seed)
    images, text = [], []
    for total in random.integers(0, MOST_IMAGES + 1, microbatches):
        images.append(random.multinomial(total, random.dirichlet(np.ones(EXAMPLES))))
        left = (
            int(ROW_TOKENS * random.uniform(*FILL))
            - int(total) * (TOKENS + FRAME)
            - LEAST_TEXT * EXAMPLES
        )
        text.append(
            LEAST_TEXT + random.multinomial(max(left, 0), random.dirichlet(np.ones(EXAMPLES)))
        )
    return Batch(
        np.repeat(np.arange(microbatches), EXAMPLES), np.concatenate(images), np.concatenate(text)
    )


def drawn_rows(batch: Batch) -> Rows:
    """Every microbatch as drawn, with encoder rows of its own."""
    count = int(batch.microbatch.max()) + 1
    images: list[int] = []
    inputs: list[set[int]] = []
    for total in sums_by(batch.microbatch, batch.images, count).tolist():
        rows = [min(ROW_IMAGES, total - start) for start in range(0, total, ROW_IMAGES)]
        inputs.append(set(range(len(images), len(images) + len(rows))))
        images += rows
    squares = sums_by(batch.microbatch, batch.tokens**2, count).tolist()
    return Rows([number * PATCHES**2 for number in images], squares, inputs)


def planned_rows(batch: Batch) -> Rows:
    """Examples placed by `plan_microbatches`; encoder rows are filled in the order in which microbatches run."""
    image_work = sum(layer.linear(PATCHES) for layer in phase_layers(MODEL, "vision"))
    token_work = sum(layer.linear(1) for layer in phase_layers(MODEL, LANGUAGE))
    patches, tokens = batch.images * PATCHES, batch.tokens
    plan = plan_microbatches(
        {"vision": PhaseLoad(batch.images * image_work, patches)},
        PhaseLoad(tokens * token_work, tokens, ROW_TOKENS),
        replicas=1,
        microbatches=int(batch.microbatch.max()) + 1,
    )
    images: list[int] = []
    inputs: list[set[int]] = [set() for _ in range(plan.microbatches)]
    for example in np.lexsort((plan.language, plan.encoder)).tolist():
        for _ in range(int(batch.images[example])):
            if not images or images[-1] == ROW_IMAGES:
                images.append(0)
            images[-1] += 1
            inputs[plan.language[example]].add(len(images) - 1)
    squares = sums_by(plan.language, tokens**2, plan.microbatches).tolist()
    return Rows([number * PATCHES**2 for number in images], squares, inputs)


VISION_LANGUAGE = Chains(
    model=MODEL,
    layers={name: phase_layers(MODEL, name) for name in ("vision", LANGUAGE)},
    modes={
        "train_all": frozenset({"vision", "projector.vision", LANGUAGE}),
        "alignment": frozenset({"projector.vision"}),
    },
    slots={"vision": ROW_IMAGES * PATCHES, LANGUAGE: ROW_TOKENS},
    squares={"vision": ROW_IMAGES * PATCHES**2, LANGUAGE: ROW_TOKENS**2 // EXAMPLES},
    read=Fraction(MOST_IMAGES, 2 * ROW_IMAGES),
    room=4,
    tokens=ROW_IMAGES * TOKENS,
    generate=generate,
    drawn_rows=drawn_rows,
    planned_rows=planned_rows,
)
