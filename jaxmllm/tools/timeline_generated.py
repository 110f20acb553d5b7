"""The schedule of a generated batch, for users who have no config yet."""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxmllm.arrays import Ints, Longs, sums_by
from jaxmllm.balance.costs.flops import phase_layers
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.stages.microbatches import PhaseLoad, plan_microbatches
from jaxmllm.balance.stages.run_rows import pack_rows
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.workload import MODEL, PHASES, generate
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.cuts import LayoutName, partition
from sharding.pipeline.graph import Workload
from sharding.pipeline.layer_costs import Layer, chain_work, layer_costs
from sharding.pipeline.schedules.by_name import scheduler_of
from sharding.pipeline.schedules.schedule import Schedule
from sharding.pipeline.schedules.search import ROLLOUTS

ROWS: Final = {"vision": 16_384, "audio": 16_384, "language": 8192}  # slots of a row
EXAMPLES_PER_MICROBATCH = 9
UNIT = 10**9  # FLOPs that a duration of 1 stands for


def generated_schedule(
    layout: LayoutName,
    schedule: str,
    stages: int,
    microbatches: int,
    seed: int,
    split: bool,
) -> Schedule:
    """Schedule of a generated batch on the generator's own model, with everything trained and
    without a limit of slots."""
    batch = generate(seed, EXAMPLES_PER_MICROBATCH * microbatches)
    inputs, rows = _rows(batch, microbatches)
    # An average row: eight equal items fill it, so their squares add up to 1/8 of the row's square
    average = {name: _layers(name, ROWS[name] * ROWS[name] // 8) for name in PHASES}
    per_microbatch = {name: len(rows[name]) / microbatches for name in PHASES}
    ring = partition(average, stages, layout, per_microbatch)
    work = []
    for chain in ring.chains:
        costs = [
            layer_costs(average | {chain.name: _layers(chain.name, squares)})[chain.name]
            for squares in rows[chain.name]
        ]
        work.append(chain_work(chain, costs))
    graph = build_graph(ring, Workload(tuple(work), inputs), split=split)
    return scheduler_of(schedule).make(graph, None, ROLLOUTS)


def _layers(phase: str, squares: int) -> list[Layer]:
    """Layers of a phase on a row whose items have this sum of squared lengths, in units of
    `UNIT`."""
    return [
        Layer(
            component=layer.component,
            linear=layer.linear(ROWS[phase]) // UNIT,
            attention=layer.attention((squares, 0)) // UNIT,
            parameters=layer.parameters,
        )
        for layer in phase_layers(MODEL, phase)
    ]


def _rows(
    batch: BatchItems,
    microbatches: int,
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], dict[str, list[int]]]:
    """The encoder rows, as (encoder, row), that every language microbatch reads, and for each phase
    the sum of squared item lengths of every row."""
    examples = len(batch.examples)
    loads = {}
    for name, items in batch.phases.items():
        flops = sum(layer.linear(1) for layer in phase_layers(MODEL, name))
        slots = sums_by(items.example, items.length, examples)
        loads[name] = PhaseLoad(slots * flops, slots, ROWS[name] if PHASES[name].has_loss else None)
    language = loads.pop(LANGUAGE)
    plan = plan_microbatches(loads, language, replicas=1, microbatches=microbatches)
    inputs: list[set[tuple[int, int]]] = [set() for _ in range(plan.microbatches)]
    squares: dict[str, list[int]] = {}
    for encoder, name in enumerate(loads):
        items = batch.phases[name]
        microbatch = plan.encoder[items.example]
        row_in_microbatch, _ = pack_rows(microbatch, items.length, ROWS[name])
        # Rows are numbered over all microbatches
        pairs = np.stack([microbatch, row_in_microbatch])
        rows, row_of_item = np.unique(pairs, axis=1, return_inverse=True)
        row_of_item = row_of_item.reshape(-1)  # numpy 2.0 gave it the shape of the pairs
        squares[name] = _square_sums(row_of_item, items.length, rows.shape[1])
        for example, row in zip(items.example.tolist(), row_of_item.tolist(), strict=True):
            inputs[plan.language[example]].add((encoder, row))
    texts = batch.phases[LANGUAGE]
    squares[LANGUAGE] = _square_sums(plan.language[texts.example], texts.length, plan.microbatches)
    return tuple(tuple(sorted(rows_read)) for rows_read in inputs), squares


def _square_sums(row: Ints | Longs, length: Longs, rows: int) -> list[int]:
    return sums_by(row, length**2, rows).tolist()
