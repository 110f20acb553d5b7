"""What a static configuration of pipeline stages is worth: how many each component has, and where
its layers are cut.

    rows configuration    `profile`, `mix`, `mode` (what is trained), `stages`, `method`, `time` (of
                          a step, over that of the best method), `slowest_over_mean` (of stages),
                          `split` (stages of each component)

Components have stages of their own, and encoders run at the same time (layout `parallel`). Stages
are cut for the mean microbatch of a batch of the generator (jaxmllm/tools/workload.py). The time of
a step is that of one microbatch on its way through the longer encoder and the language model, and
then that of the slowest stage for each of the other microbatches. Layers run forward again in the
backward pass.

    cost          the best split and cuts by what layers cost in these batches, frozen or not:
                  dynamic programming
    parameters    the same, with stages of equal parameters
    rounding      stages by rounding each component's share of the cost, layers spread evenly over
                  them
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.pipeline_real import MIXES, MODES, PROFILES, Instance, instances
from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.stages.chain_costs import ChainLayers
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.output import print_table
from jaxmllm.tools.workload import generate, mix_for
from sharding.pipeline.cuts import partition
from sharding.pipeline.layer_costs import Layer, chunk_costs, layer_costs
from sharding.pipeline.ring import Chain, Ring

CONFIGURATION: Final = "configuration"
STAGES: Final = (4, 8, 16)
EXAMPLES: Final = 8  # in a microbatch
MICROBATCHES: Final = 4  # per stage
BATCHED: Final = 4096  # examples over which the mean microbatch is taken
METHODS: Final = ("cost", "parameters", "rounding")

Chains = Mapping[str, Sequence[Layer]]


def configuration_rows(seed: int) -> list[dict[str, Any]]:
    """The rows of every profile, mix and mode, on every number of stages."""
    rows: list[dict[str, Any]] = []
    for instance in instances([*PROFILES], [*MIXES], [*MODES], STAGES, [EXAMPLES]):
        rows += _rows(instance, seed)
    _show(rows)
    return rows


def _rows(instance: Instance, seed: int) -> Iterator[dict[str, Any]]:
    """One row for each method on one instance."""
    chains = mean_layers(instance, seed)
    microbatches = MICROBATCHES * instance.stages
    times = {}
    for method in METHODS:
        ring = ring_of(method, chains, instance.stages)
        times[method] = step_time(ring, chains, microbatches), ring
    best_time = min(time for time, _ in times.values())
    for method, (time, ring) in times.items():
        rank_costs = np.concatenate([*stage_costs(ring, chains).values()])
        yield {
            "kind": CONFIGURATION,
            "profile": instance.profile,
            "mix": instance.mix,
            "mode": instance.mode,
            "stages": instance.stages,
            "method": method,
            "time": time / best_time,
            "slowest_over_mean": float(rank_costs.max() / rank_costs.mean()),
            "split": {chain.name: chain.depth for chain in ring.chains},
        }


def mean_layers(instance: Instance, seed: int) -> dict[str, list[Layer]]:
    """Layers of all components, with their costs for the mean microbatch."""
    model = instance.model
    batch = generate([seed, 0], BATCHED, mix_for(model, MIXES[instance.mix]), model)
    slots = {
        name: _mean(items.length, batch)
        for name, items in batch.phases.items()
        if name in model.phases
    }
    squares = {}
    for name in slots:
        cost = phase_flops(model, name, instance.trained)
        item_squares = cost.squares(batch.phases[name].length.astype(float))
        squares[name] = [_mean(np.asarray(kind), batch) for kind in item_squares]
    present = [*(name for name in slots if name != LANGUAGE and slots[name]), LANGUAGE]
    layers = ChainLayers(model, instance.trained, {name: (slots[name],) for name in present}, {})
    return layers.layers(squares, {name: slots[name] for name in present})


def _mean(of_items: Any, batch: BatchItems) -> int:
    """The sum of a quantity over a batch's items, scaled to one microbatch."""
    return round(float(of_items.sum()) * EXAMPLES / len(batch.examples))


def ring_of(method: str, chains: Chains, stages: int) -> Ring:
    """Stages of each component by one of `METHODS`."""
    match method:
        case "cost":
            return partition(chains, stages, "parallel")
        case "parameters":
            return partition(chains, stages, "parallel", cut_by="parameters")
        case _:
            return _rounded(chains, stages)


def _rounded(chains: Chains, stages: int) -> Ring:
    """Stages by rounding. Every component has at least one stage and at most one for each block;
    the costliest component takes the stages that rounding leaves over or lacks."""
    costs = {
        name: sum(cost.total for cost in chain_costs)
        for name, chain_costs in layer_costs(chains).items()
    }
    total_cost = sum(costs.values())
    counts = {
        name: min(max(round(stages * cost / total_cost), 1), len(chains[name]) - 2)
        for name, cost in costs.items()
    }
    counts[max(costs, key=lambda name: costs[name])] += stages - sum(counts.values())
    placed_chains = []
    first_stage = 0
    for name, count in counts.items():
        layers = len(chains[name]) - 2
        bounds = [round(layers * stage / count) for stage in range(count + 1)]
        layer_counts = tuple(stop - start for start, stop in itertools.pairwise(bounds))
        frozen = not any(layer.trainable for layer in chains[name][:-1])
        placed_chains.append(
            Chain(
                name, tuple(range(first_stage, first_stage + count)), layer_counts, head_only=frozen
            )
        )
        first_stage += count
    return Ring(stages, tuple(placed_chains))


def stage_costs(ring: Ring, chains: Chains) -> dict[str, Any]:
    """FLOPs of every stage, forward and backward, by component."""
    costs = layer_costs(chains)
    return {
        chain.name: np.array([cost.total for cost in chunk_costs(chain, costs[chain.name])], float)
        for chain in ring.chains
    }


def step_time(ring: Ring, chains: Chains, microbatches: int) -> float:
    """Time of a step: one microbatch on its way through the costliest encoder and the language
    model, and the slowest stage for each of the other microbatches."""
    costs = stage_costs(ring, chains)
    encoder_time = max(
        (chain_costs.sum() for name, chain_costs in costs.items() if name != LANGUAGE), default=0.0
    )
    slowest = max(chain_costs.max() for chain_costs in costs.values())
    return float(encoder_time + costs[LANGUAGE].sum() + (microbatches - 1) * slowest)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of all rows, and one of the median and worst times of each model."""
    lines: dict[tuple[Any, ...], list[Any]] = {}
    times: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        times.setdefault(row["profile"], {}).setdefault(row["method"], []).append(row["time"])
        instance = tuple(row[name] for name in ("profile", "mix", "mode", "stages"))
        stage_counts = " : ".join(str(count) for count in row["split"].values())
        lines.setdefault(instance, []).extend([f"{row['time']:.3f}", stage_counts])
    columns = [word for method in METHODS for word in (method, "stages of each")]
    print_table(
        f"{MICROBATCHES} microbatches of {EXAMPLES} examples per stage: time of a step over the best",
        ["model", "mix", "trained", "stages", *columns],
        [[*instance, *line] for instance, line in lines.items()],
        left_aligned=3,
    )
    print_table(
        "median (worst)",
        ["model", *METHODS],
        [
            [
                profile,
                *(
                    f"{statistics.median(by_method[method]):.3f} ({max(by_method[method]):.2f})"
                    for method in METHODS
                ),
            ]
            for profile, by_method in times.items()
        ],
        left_aligned=1,
    )
