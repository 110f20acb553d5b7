"""Random global batches and specs that several of the tests of balance plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxmllm.arrays import ceil_divide, round_up
from jaxmllm.balance.costs.flops import ItemCost
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    PhaseItems,
    PhaseSpec,
    PlanSpec,
    RouteSpec,
    RowClass,
    row_classes,
)
from jaxmllm.phases import decoder_phase, encoder_phase
from tests.balance.any_plan import scattered

ENCODERS = {"vision": 4, "audio": 8}  # slots per language token


def random_batch(
    seed: int, examples: int, media: int = 3, longest: int = 512, text: int = 100
) -> BatchItems:
    """Examples with log-normal lengths, whose language sequences interleave text and media tokens.

    Half of the examples have no items of an encoder, the others up to `media`; no media item is
    longer than `longest` slots.
    """
    random = np.random.default_rng(seed)
    columns = {name: [] for name in (*ENCODERS, "language")}
    for example in range(examples):
        slot = 0
        for name, per_token in ENCODERS.items():
            for _ in range(random.integers(0, media + 1) * random.integers(0, 2)):
                tokens = int(np.clip(random.lognormal(2, 1), 1, longest // per_token))
                slot += int(random.integers(0, 9))
                length = tokens * per_token
                real = length - int(random.integers(0, per_token))
                columns[name].append((length, real, example, tokens, slot))
                slot += tokens
        length = slot + int(np.clip(random.lognormal(np.log(text), 0.8), 1, 4 * text))
        columns["language"].append((length, length, example, 0, 0))
    phases = {}
    for name, rows in columns.items():
        length, real, example, tokens, slot = np.array(rows, np.int64).reshape(-1, 5).T
        phases[name] = PhaseItems(
            length, real, *(column.astype(np.int32) for column in (example, tokens, slot))
        )
    return BatchItems(np.arange(examples) + 1000, int(phases["language"].length.sum()), phases)


def grid_of(shape: tuple[int, int, int]) -> ExchangeGrid:
    """The exchange grid of `shape` = (peers, encoder ranks per peer, language ranks per peer)."""
    a, e, n = shape
    return ExchangeGrid(
        np.arange(a * e, dtype=np.int32).reshape(a, e),
        np.arange(a * n, dtype=np.int32).reshape(n, a).T.copy(),  # any numbering is allowed
    )


def spec_for(
    batch: BatchItems,
    grids: dict[str, tuple[int, int, int]],
    classes: int = 1,
    mode: str = "phases",
    max_segments: int = 64,
    pool: int | None = None,
    pair: int = 64,
    hops: int = 16,
    backend: str = "padded",
    node: int | None = None,
) -> PlanSpec:
    """A spec whose largest rows just hold the largest items. Pools hold `pool` tokens
    more than the least that is legal, and `node` ranks of each phase make one node (None:
    nodes are not known)."""
    phases = {}
    routes = {}
    language_ranks = next(iter(grids.values()))[0] * next(iter(grids.values()))[2]
    ranks = {name: shape[0] * shape[1] for name, shape in grids.items()} | {
        "language": language_ranks
    }
    for name, rank_count in ranks.items():
        phase = encoder_phase(name) if name in grids else decoder_phase(tuple(grids))
        alignment = 2 * ENCODERS.get(name, 4)
        largest = round_up(int(batch.phases[name].length.max(initial=1)), alignment)
        smaller = (largest // 3**k // alignment * alignment for k in range(classes))
        capacities = tuple(sorted({max(alignment, capacity) for capacity in smaller}, reverse=True))
        phases[name] = PhaseSpec(
            phase,
            rank_count,
            row_classes(capacities),
            max_segments,
            ENCODERS.get(name, 1),
            ItemCost(1000, 3),
        )
    encoder = max(phases[name].capacities[0] // ENCODERS[name] for name in grids) + (pool or 0)
    language = phases["language"].capacities[0] + (pool or 0)
    for name, shape in grids.items():
        routes[name] = RouteSpec(grid_of(shape), encoder, language, pair, hops, backend)
    nodes = (
        {name: np.arange(rank_count, dtype=np.int32) // node for name, rank_count in ranks.items()}
        if node
        else {}
    )
    return PlanSpec(phases, routes, mode, nodes)


def with_spans(spec: PlanSpec, spans: tuple[int, ...]) -> PlanSpec:
    """The spec with rows of those `spans` that divide a phase's ranks, or of span 1 if none does.

    Each span has two classes. A row of the larger one just holds the largest item, so one rank's
    part of a shared row does not.
    """
    phases = {}
    for name, phase in spec.phases.items():
        alignment = 2 * ENCODERS.get(name, 4)
        classes = {
            RowClass(
                round_up(max(1, ceil_divide(phase.longest_row // divisor, span)), alignment), span
            )
            for span in [span for span in spans if phase.ranks % span == 0] or [1]
            for divisor in (1, 3)
        }
        ordered = sorted(classes, key=lambda row_class: (-row_class.slots, row_class))
        phases[name] = replace(phase, classes=tuple(ordered))
    return replace(spec, phases=phases)


class Make:
    """The builders above, as one fixture."""

    batch = staticmethod(random_batch)
    grid = staticmethod(grid_of)
    spec = staticmethod(spec_for)
    with_spans = staticmethod(with_spans)
    scattered = staticmethod(scattered)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
