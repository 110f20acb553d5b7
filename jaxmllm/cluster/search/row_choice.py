"""Row classes of a plan: those that a run would choose, as far as a config can express them, from a
part of large batches.

Every part of a large batch resembles the whole, so classes are chosen for a part of the ranks and
of the examples, and pools from one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from jaxmllm.arrays import Ints
from jaxmllm.balance.records import BatchItems, ExchangeGrid, PhaseSpec
from jaxmllm.balance.sizes.capacities import smallest_capacity
from jaxmllm.balance.sizes.choose import PhaseRows
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.config.schema import BalanceConfig

ENOUGH: Final = 2048  # examples of a batch that classes are chosen from
NO_GRIDS: Final[Mapping[str, ExchangeGrid]] = {}


class RowChoice:
    """The row classes of layouts, chosen from the same samples."""

    def __init__(self, samples: Sequence[BatchItems]):
        self._samples = samples
        self._rows: dict[int, PhaseRows] = {}

    def chosen(
        self,
        inputs: Sequence[SizingInputs],
        grids: Mapping[str, ExchangeGrid],
        balance: BalanceConfig,
    ) -> list[SizingInputs]:
        """The inputs with chosen capacities and spans.

        A config gives a phase every capacity in every span. Where the chosen classes are not all
        such pairs, they are chosen again with the span of the largest class alone.

        Raises:
          ConfigError: no row holds the longest item.
        """
        if all(sizing.config.capacities != "auto" for sizing in inputs):
            return list(inputs)
        share = equal_parts(inputs, self._samples, grids)
        part_inputs = [replace(sizing, ranks=sizing.ranks // share) for sizing in inputs]
        if share > 1:  # ranks of many examples need not share rows to have equal work
            part_inputs = [replace(sizing, spans=(_least_span(sizing),)) for sizing in part_inputs]
        part_grids = {phase: _first_peers(grid, share) for phase, grid in grids.items()}
        rows = self._part_rows(share)
        specs = rows.chosen(part_inputs, part_grids, balance, segments=False)
        if any(not _is_product(spec) for spec in specs.values()):
            again = []
            for sizing in part_inputs:
                spec = specs[sizing.name]
                if _is_product(spec):
                    again.append(_with_classes(sizing, spec))
                else:
                    again.append(replace(sizing, spans=(spec.classes[0].span,)))
            specs = rows.chosen(again, part_grids, balance, segments=False)
        return [_with_classes(sizing, specs[sizing.name]) for sizing in inputs]

    def _part_rows(self, share: int) -> PhaseRows:
        """The rows of the first of `share` equal parts of the samples."""
        if share not in self._rows:
            self._rows[share] = PhaseRows([first_examples(batch, share) for batch in self._samples])
        return self._rows[share]


def _is_product(spec: PhaseSpec) -> bool:
    """Whether a phase has every capacity in every span."""
    capacities, spans = _capacities_and_spans(spec)
    return len(capacities) * len(spans) == len(spec.classes)


def _capacities_and_spans(spec: PhaseSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The capacities of a phase, descending, and its spans, ascending."""
    return tuple(sorted(set(spec.capacities), reverse=True)), tuple(sorted(set(spec.spans)))


def _least_span(inputs: SizingInputs) -> int:
    """The fewest ranks that can hold the longest item in a row; the most allowed if none can."""
    largest = inputs.largest_capacity
    holding = (span for span in inputs.spans if smallest_capacity(inputs, span) <= largest)
    return next(holding, max(inputs.spans))


def _with_classes(inputs: SizingInputs, spec: PhaseSpec) -> SizingInputs:
    """The inputs with the classes of `spec`."""
    capacities, spans = _capacities_and_spans(spec)
    config = inputs.config.model_copy(update={"capacities": capacities})
    return replace(inputs, config=config, spans=spans)


# ---------------------------------------------------------------------------- a share of a batch


def equal_parts(
    inputs: Sequence[SizingInputs],
    samples: Sequence[BatchItems],
    grids: Mapping[str, ExchangeGrid] = NO_GRIDS,
) -> int:
    """The largest number of equal parts of the ranks such that a part has enough examples."""
    most_parts = min(len(batch.examples) for batch in samples) // ENOUGH
    peers = [grid.peers for grid in grids.values()]
    for share in range(max(most_parts, 1), 1, -1):
        ranks_divide = all(sizing.ranks % (share * max(sizing.spans)) == 0 for sizing in inputs)
        if ranks_divide and all(grid_peers % share == 0 for grid_peers in peers):
            return share
    return 1


def first_examples(batch: BatchItems, share: int) -> BatchItems:
    """The first of `share` equal parts of a batch."""
    if share == 1:
        return batch
    examples = len(batch.examples) // share
    phases = {
        phase: items.at(np.flatnonzero(items.example < examples))
        for phase, items in batch.phases.items()
    }
    return BatchItems(batch.examples[:examples], batch.targets // share, phases)


def _first_peers(grid: ExchangeGrid, share: int) -> ExchangeGrid:
    """The first of `share` equal parts of the devices, with ranks renumbered from 0."""
    if share == 1:
        return grid
    peers = grid.peers // share
    return ExchangeGrid(_renumbered(grid.encoder[:peers]), _renumbered(grid.language[:peers]))


def _renumbered(ranks: Ints) -> Ints:
    order = np.unique(ranks, return_inverse=True)[1]
    return order.reshape(ranks.shape).astype(np.int32)
