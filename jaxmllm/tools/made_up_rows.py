"""Rows without data: a microbatch in which every row of a phase holds the same equal items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmllm.balance.costs.calibration import Fill
from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.balance.records import (
    BatchItems,
    PhaseItems,
    PlanSpec,
    RoutePlan,
    RowClass,
    StepPlan,
)
from jaxmllm.balance.rows.assign import assign
from jaxmllm.data.media.modality import Shape
from jaxmllm.data.media.reference import MediaReference
from jaxmllm.data.rows.fill import HostStep, StepFiller
from jaxmllm.data.text.render import Rendered
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.build import draw_rule
from jaxmllm.training.run import Run


def made_up_rows(run: Run, phase: str, fill: Fill) -> HostStep:
    """This host's share of one microbatch of a phase, whose rows are filled as `fill` says."""
    programs = run.programs
    generators = [name for name, spec in programs.spec.phases.items() if spec.phase.generates]
    # Generators' specs are needed as well: rows of text have columns for what generators read
    specs = {name: programs.spec.phases[name] for name in (phase, LANGUAGE, *generators)}
    specs[phase] = replace(specs[phase], classes=(RowClass(fill.capacity, fill.span),))
    tokens = 0 if phase in generators else fill.length // specs[phase].slots_per_token
    groups = specs[phase].ranks // fill.span
    batch = _equal_items(list(specs), phase, fill.length, tokens, groups * fill.items)
    nothing = np.zeros(0, np.int32)
    assigned = {name: assign(specs[name], batch.phases[name]) for name in specs}
    routes = dict.fromkeys(generators, RoutePlan.of_whole_items(nothing, nothing))
    plan = StepPlan(assigned, routes)
    rows = assigned[phase]
    items_of_groups = np.bincount(rows.rank // fill.span)
    assert rows.microbatches == 1 and (items_of_groups == fill.items).all(), (
        "equal items make equal rows"
    )
    modalities = {
        name: MadeUpModality(run.corpus.modalities[name], run.corpus.pairs)
        for name in specs
        if name != LANGUAGE
    }
    examples: Any = EqualExamples(phase, fill.length, tokens, modalities)
    filler = StepFiller(
        examples,
        PlanSpec(specs, {}),
        programs.local_share,
        programs.attention,
        draws=draw_rule(run.config),
    )
    return filler.fill(0, batch.examples, batch, plan)


def _equal_items(
    phases: list[str], phase: str, length: int, tokens: int, examples: int
) -> BatchItems:
    """A batch of `examples` examples, each with one item of one phase and nothing of the others."""
    no_slots = np.zeros(0, np.int64)
    no_items = np.zeros(0, np.int32)
    items = {name: PhaseItems(no_slots, no_slots, no_items, no_items, no_items) for name in phases}
    lengths = np.full(examples, length)
    items[phase] = PhaseItems(
        length=lengths,
        real=lengths,
        example=np.arange(examples, dtype=np.int32),
        tokens=np.full(examples, tokens, np.int32),
        slot=np.zeros(examples, np.int32),
    )
    return BatchItems(np.arange(examples), examples, items)


@dataclass(frozen=True)
class EqualExamples:
    """Examples that are all the same: a text of `length` tokens, or one item of a phase of media.

    A generated item has no conditions: what is to be drawn takes all of its slots.
    """

    phase: str
    length: int
    tokens: int
    modalities: Mapping[str, MadeUpModality]

    def example(self, i: int) -> Rendered:
        from jaxmllm.data.media.reference import File
        from jaxmllm.data.text.render import MediaSpan, Rendered

        is_text = self.phase == LANGUAGE
        line = np.arange(self.length if is_text else 0, dtype=np.int32)
        item = MediaSpan(self.phase, File(Path()), (self.length, 1, 1), 0, self.tokens)
        spans = () if is_text else (item,)
        return Rendered(
            np.zeros_like(line), np.zeros_like(line), np.repeat(line[:, None], 3, axis=1), spans
        )

    def source_of(self, i: int) -> int:
        return 0

    def id(self, i: int) -> str:
        return str(i)


class MadeUpModality:
    """A modality like another, whose items have shape (slots, 1, 1) and are made up, without a
    file.

    Attention sees the pairs of an item that `ItemCost.squares` counts: windows and chunks are
    whole, except for the last one, and tiles of an image see one another.
    """

    def __init__(self, like: Any, pairs: VisiblePairs):
        self._like = like
        self._pairs = pairs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)

    def length(self, shape: Shape) -> int:
        return shape[0]

    def real_slots(self, shape: Shape) -> Any:
        return np.ones(shape[0], np.bool_)

    def positions(self, shape: Shape) -> Any:
        """Positions of a strip of slots that is one slot or one window wide."""
        axes = self._like.format.axes
        positions = np.zeros((shape[0], 1 + max(axes)), np.int32)
        window = self._pairs.tower_window if self._like.name == "vision" else None
        rows, columns = divmod(np.arange(shape[0]), window or 1)
        positions[:, axes[0]] = rows
        if window is not None:
            positions[:, axes[1]] = columns
        return positions

    def apart(self, shape: Shape) -> Any:
        chunk = self._pairs.chunk if self._like.name == "audio" else None
        return None if chunk is None else np.arange(shape[0], dtype=np.int32) // chunk

    def load(self, media: MediaReference, shape: Shape) -> Any:
        # Not zeros: some chips multiply them faster.
        row_format = self._like.format
        return (
            np.random.default_rng(0)
            .integers(0, 2, (shape[0], row_format.features))
            .astype(row_format.dtype)
        )
