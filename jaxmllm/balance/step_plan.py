"""The plan of a step, made from the lengths of its global batch: pure, integers only, the same on
every host.

    place_items    rows, microbatches and ranks of every phase       rows/
                   ranks and swaps that keep items near their text   exchange/placement.py, swaps.py
    plan_routes    pools, and the exchange between them              exchange/routes.py
    statistics     what the plan wastes                              statistics.py
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import numpy as np

from jaxmllm.arrays import Ints, Longs, running_sums, sums_by
from jaxmllm.balance.exchange.placement import place_items_near
from jaxmllm.balance.exchange.routes import plan_routes, route_statistics
from jaxmllm.balance.records import (
    BatchItems,
    ExchangeGrid,
    Mode,
    PhasePlan,
    PhaseSpec,
    PlanSpec,
    StepPlan,
    shared_exchange,
)
from jaxmllm.balance.rows.assign import assign, assign_in_place
from jaxmllm.balance.rows.ranks import packed
from jaxmllm.balance.statistics import phase_statistics, step_statistics
from jaxmllm.phases import LANGUAGE


def plan_step(items: BatchItems, spec: PlanSpec) -> StepPlan:
    """Place every item of a global batch and route encoder outputs to the language phase.

    The plan's statistics are `plan_ms`, those of `phase_statistics` for every phase,
    `step/over_ideal` (see `step_statistics`), and, as `route/<phase>/...`, for every phase that
    owns an exchange (see `shared_exchange`): `ragged`, 1 with a backend whose chunks have any size
    and 0 with equal chunks; `rounds`; `hops` (all-to-alls, and as many back); `tokens` routed;
    `moved_tokens`, those that change rank; `slots_moved` from one rank to another, padding and
    second legs included; `slots_over_moved` and `slots_over_tokens`, these slots per moved and per
    routed token; with known nodes `node_tokens`, those that change node, and
    `node_tokens_over_arbitrary`, their ratio to the tokens that would change node if ranks were
    assigned at random.

    Raises:
      ValueError: an item is longer than the largest row of its phase, or a pool cannot hold one
        row.
    """
    began = time.perf_counter()
    grids = {phase: route.grid for phase, route in spec.routes.items()}
    placed = place_items(items, spec.phases, grids, spec.mode, spec.nodes)
    phases, routes = plan_routes(placed, items, spec)
    statistics: dict[str, float] = {}
    for phase, phase_spec in spec.phases.items():
        statistics |= phase_statistics(phases[phase], items.phases[phase], phase_spec)
    statistics |= step_statistics(statistics, spec.phases)
    # The rounds of phases that share an exchange are all in its owner's route.
    for owner in dict.fromkeys(shared_exchange(spec.routes).values()):
        rounds = routes[owner].rounds
        encoder_node = spec.nodes.get(owner)
        language_node = spec.nodes.get(LANGUAGE)
        route = route_statistics(rounds, spec.routes[owner], encoder_node, language_node)
        statistics |= {f"route/{owner}/{name}": value for name, value in route.items()}
    statistics["plan_ms"] = 1e3 * (time.perf_counter() - began)
    return StepPlan(phases, routes, statistics)


def place_items(
    items: BatchItems,
    phases: Mapping[str, PhaseSpec],
    grids: Mapping[str, ExchangeGrid],
    mode: Mode,
    nodes: Mapping[str, Ints] | None = None,
) -> dict[str, PhasePlan]:
    """Rows, microbatches and ranks of every phase; pools are not set yet.

    Args:
      phases: all phases by name.
      grids: by encoder or generator phase.
      mode: "phases" balances each phase; otherwise media stay with their example, and the examples
        are placed as `example_ranks` says.
      nodes: by phase, node of each rank; None or empty: not known, so ranks stay as balancing left
        them.
    """
    if mode == "phases":
        balanced = {phase: assign(spec, items.phases[phase]) for phase, spec in phases.items()}
        return place_items_near(balanced, items, phases, grids, nodes) if nodes else balanced
    # Planned first, because the examples, and so all media, follow it.
    language = assign(phases[LANGUAGE], items.phases[LANGUAGE]) if mode == "language" else None
    generators = [name for name, spec in phases.items() if spec.phase.generates]
    example_rank = example_ranks(items, phases[LANGUAGE].ranks, mode, language, generators)
    plans = {}
    for phase, spec in phases.items():
        if phase == LANGUAGE and language is not None:
            plans[phase] = language
        else:
            rank = item_ranks(items, phase, example_rank, grids)
            plans[phase] = assign_in_place(spec, items.phases[phase], rank)
    return plans


def example_ranks(
    items: BatchItems,
    ranks: int,
    mode: Mode,
    language: PhasePlan | None = None,
    generators: Collection[str] = (),
) -> Longs:
    """Language rank of each example when its media stay with it: [B].

    Args:
      ranks: number of ranks of the language phase.
      mode: "none" cuts the batch into contiguous blocks, as sampling does: position p belongs to
        rank p * ranks // B. "tokens" balances the sum of an example's tokens over all phases: those
        of its language sequence, the tokens that its media become counted a second time, and the
        slots of what it draws. "language" follows the plan of the language phase.
      language: plan of the language phase, for mode "language".
      generators: phases whose items are drawn, for mode "tokens".
    """
    examples = len(items.examples)
    sequences = items.phases[LANGUAGE]
    if mode == "tokens":
        tokens = np.zeros(examples, np.int64)
        for name, of_phase in items.phases.items():
            # `tokens` of a generator's item count the text that it reads, not what it becomes.
            by_length = name == LANGUAGE or name in generators
            item_tokens = of_phase.length if by_length else of_phase.tokens.astype(np.int64)
            tokens += sums_by(of_phase.example, item_tokens, examples)
        return packed(tokens, ranks)
    if mode == "none":
        return np.arange(examples) * ranks // max(examples, 1)
    assert language is not None, f"mode {mode!r} follows the plan of the language phase"
    example_rank = np.zeros(examples, np.int64)
    example_rank[sequences.example] = language.rank
    return example_rank


def item_ranks(
    items: BatchItems, phase: str, example_rank: Longs, grids: Mapping[str, ExchangeGrid]
) -> Longs:
    """Rank of each item of a phase when it stays with its example: [N].

    Media go to the encoder ranks on the devices of their example, in turn where there are several.

    Args:
      example_rank: [B] language rank of each example.
      grids: by encoder or generator phase.
    """
    language_rank = example_rank[items.phases[phase].example]
    if phase not in grids:  # the language phase itself
        return language_rank
    grid = grids[phase]
    # A block is an index along A of the grid: encoder and language ranks on the same devices.
    block_of_rank = np.empty(grid.language.size, np.int64)
    block_of_rank[grid.language] = np.arange(len(grid.language))[:, None]
    block = block_of_rank[language_rank]
    by_block = np.argsort(block, kind="stable")
    ordinal = np.empty_like(block)  # number of the item among those of its block
    ordinal[by_block] = running_sums(block[by_block], np.ones_like(block))
    return grid.encoder[block, ordinal % grid.encoder.shape[1]].astype(np.int64)
