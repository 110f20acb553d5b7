"""Pipelines on real mixtures: what fixed rows, stages and lockstep cost on ragged lengths.
Modelled; part of benchmarks/pipeline.py, as its family `real`.

Lengths are those of the generator (jaxmllm/tools/workload.py) in three mixes, or of the files of
`--data`. The model is 8B with 0.6B vision and 0.6B audio, or 72B with 6B or 0.3B vision, on 8
replicas. Sizes are chosen from batches other than the measured ones, as in a run.

In all lines a layer runs forward twice, the second time in the backward pass. Others keep the
inputs of all layers for that, and so do stages with `remat: full` and enough
`pipeline.kept_residuals`; stages with `remat: none` need no kept residuals for it.

    asynchronous 1F1B   what others run: encoder, then language, in stages of equal parameters;
                        examples assigned by their tokens in all phases to 4 microbatches per stage.
                        Nothing is padded, and ranks wait only for what they need.
    4 per stage         segments with `pipeline.microbatches` = 4 per stage, greedy
    rows of one rank    what `auto` chooses with `phases.*.spans: [1]`
    sizes               what `auto` chooses
    + search            the same sizes, with searched schedules

    lockstep      PFLOP of a step on the executor, padding included
    asynchronous  PFLOP of the same orders if ranks wait only for what they need
    efficiency    work of the real slots on the busiest rank (mean of the replicas) / lockstep; in
                  the first line / its asynchronous makespan
    over          lockstep / asynchronous, of the same graph
    fill          real slots / slots of rows
    GB            what waits on a rank; bfloat16, nothing sharded
    gain          asynchronous makespan of the first line / lockstep of this one; the next column,
                  `asynchronous`, divides by the asynchronous makespan of this one
    over ideal    lockstep (in the first line asynchronous) / the work of the real slots, as its
                  chunks compute them, shared evenly by all ranks of all replicas
    bound         gain of a step that takes no longer than that work
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from benchmarks.file_lengths import FileLengths
from benchmarks.pipeline_batches import LARGE, UNEVEN
from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.costs.gather import flops_per_byte, gather_cost
from jaxmllm.balance.records import BatchItems, PlanSpec
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.chain_costs import ChainCosts, ChainLayers
from jaxmllm.balance.stages.plan import PipelineSpec, PlannedRun, plan_runs
from jaxmllm.balance.stages.sizes import choose_pipeline
from jaxmllm.config.schema import (
    ModelConfig,
    PhaseConfig,
    PipelineConfig,
    Remat,
)
from jaxmllm.phases import LANGUAGE, component_names, make_phases
from jaxmllm.tools.output import print_table
from jaxmllm.tools.workload import (
    ALIGNMENTS,
    DEFAULT_MIX,
    MODEL,
    generate,
    longest,
    mix_for,
    slots_per_token,
)
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.cuts import partition
from sharding.pipeline.graph import ChainWork, Pool, Workload
from sharding.pipeline.ring import Ring
from sharding.pipeline.schedules.orders import one_f_one_b
from sharding.pipeline.schedules.schedule import Schedule, asynchronous, lockstep
from sharding.pipeline.slots import slots_needed

REPLICAS: Final = 8
SPANS: Final = (1, 2, 4, 8)  # replicas that may hold a row together
PER_STAGE: Final = 4  # microbatches, unless `auto` chooses them
# With `none` a layer runs forward twice: in the forward pass, and when the backward pass runs its
# chunk again
FORWARD_TWICE: Final[Mapping[str, Remat]] = {"vision": "none", "audio": "none", LANGUAGE: "none"}
SAMPLES: Final = 8  # batches that sizes are chosen from
PFLOP: Final = 1e15
PROFILES: Final[Mapping[str, ModelConfig]] = {"8B": MODEL, "72B": LARGE, "72B + 0.3B": UNEVEN}
MIXES: Final[Mapping[str, Mapping[str, float]]] = {
    "all": DEFAULT_MIX,
    "images": {"text": 0.1, "captioning": 0.35, "visual_question": 0.35, "multi_image": 0.2},
    "speech": {"text": 0.3, "speech_recognition": 0.4, "spoken_question": 0.3},
}
FILES: Final = "files"  # the mix of `--data`
# Prefixes of the names of the components that are trained
MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "train_all": ("",),
    "alignment": ("projector.",),
    "frozen_encoders": ("projector.", "language"),
}


@dataclass(frozen=True)
class Instance:
    """One measured combination: model, mix of lengths, what is trained, stages and batch size."""

    profile: str
    mix: str
    mode: str
    stages: int
    per_replica: int

    @property
    def model(self) -> ModelConfig:
        return PROFILES[self.profile]

    @property
    def trained(self) -> dict[str, int]:
        names = component_names(make_phases(self.model))
        return dict.fromkeys([name for name in names if name.startswith(MODES[self.mode])], 1)

    @property
    def examples(self) -> int:
        return REPLICAS * self.per_replica


@dataclass(frozen=True)
class Lengths:
    """Batches to choose sizes from, others to measure, and slots of the largest item by phase."""

    samples: list[BatchItems]
    batches: list[BatchItems]
    longest: Mapping[str, int]


VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "4 per stage": {"layout": "segments"},
    "rows of one rank": {},
    "sizes": {},
    "+ search": {"schedule": "search"},
}
SHARING: Final = ("sizes", "+ search")  # variants whose rows several replicas may hold
OTHERS: Final = "asynchronous 1F1B"


# ---------------------------------------------------------------------------- lengths


def generated(instance: Instance, seeds: Sequence[int]) -> Lengths:
    """Generated batches of the instance's mix."""
    model = instance.model
    mix = mix_for(model, MIXES[instance.mix])

    def batch(seed: list[int]) -> BatchItems:
        return generate(seed, instance.examples, mix, model)

    return Lengths(
        [batch([1, index]) for index in range(SAMPLES)],
        [batch([0, seed]) for seed in seeds],
        {phase: longest(phase, mix, model) for phase in make_phases(model)},
    )


def from_files(instance: Instance, files: FileLengths, seeds: Sequence[int]) -> Lengths:
    """Batches drawn from the examples of a folder."""
    files = replace(files, phases=tuple(make_phases(instance.model)))
    return Lengths(
        [files.draw([1, index], instance.examples) for index in range(SAMPLES)],
        [files.draw([0, seed], instance.examples) for seed in seeds],
        files.longest,
    )


# ---------------------------------------------------------------------------- ours


def sizing_inputs(
    instance: Instance, longest_items: Mapping[str, int], spans: tuple[int, ...]
) -> list[SizingInputs]:
    """The inputs, other than sampled batches, from which sizes are chosen."""
    return [
        SizingInputs(
            phase=phase,
            ranks=REPLICAS,
            alignment=ALIGNMENTS[name],
            slots_per_token=slots_per_token(name, instance.model),
            longest=longest_items[name],
            flops=phase_flops(instance.model, name, instance.trained),
            config=PhaseConfig(),
            spans=spans,
            gather_cost=gather_cost(instance.model, name, flops_per_byte("gpu")),
        )
        for name, phase in make_phases(instance.model).items()
    ]


def ours(instance: Instance, lengths: Lengths, variant: str, rollouts: int) -> dict[str, Any]:
    """Figures of one of our variants, means over batches."""
    settings = {"stages": instance.stages, "rollouts": rollouts, **VARIANTS[variant]}
    spans = SPANS if variant in SHARING else (1,)
    if variant == "4 per stage":
        settings["microbatches"] = PER_STAGE * instance.stages
    start = time.process_time()
    sizes = choose_pipeline(
        lengths.samples,
        sizing_inputs(instance, lengths.longest, spans),
        PipelineConfig(**settings),
        instance.model,
        instance.trained,
        instance.examples,
        remat=FORWARD_TWICE,
    )
    sizing_end = time.process_time()
    figures = []
    for batch in lengths.batches:
        runs = plan_runs(batch, sizes.spec, sizes.training)
        figures.append(_figures(instance, batch, sizes.spec, sizes.training, runs))
    planning_end = time.process_time()
    return _mean(figures) | {
        "sizing_s": sizing_end - start,
        "plan_s": (planning_end - sizing_end) / len(figures),
        "capacities": {name: list(phase.capacities) for name, phase in sizes.spec.phases.items()},
        "spans": {name: phase.widest for name, phase in sizes.spec.phases.items()},
        "chunks": {
            chain.name: chain.chunks_per_rank for chain in sizes.training.tables.ring.chains
        },
    }


def _figures(
    instance: Instance,
    batch: BatchItems,
    spec: PlanSpec,
    pipeline: PipelineSpec,
    runs: Sequence[PlannedRun],
) -> dict[str, Any]:
    """Figures of one planned batch."""
    work = np.zeros(instance.stages)
    slots = dict.fromkeys(spec.phases, 0)
    for run in runs:
        graph = run.schedule.graph
        for chain in graph.ring.chains:
            rows = run.rows.phases[chain.name]
            items = batch.phases[chain.name]
            phase = spec.phases[chain.name]
            row_values = np.array(phase.capacities)[rows.row_class]
            slots[chain.name] += int(row_values.sum()) * phase.ranks
            real_slots, squares = (
                sums_by(rows.row, values[rows.item], rows.count)
                for values in (items.real, phase.cost.squares(items.length, items.extra)[0])
            )
            costs = pipeline.costs[chain.name]
            row_values = slot_work(costs, real_slots / REPLICAS, np.array([squares / REPLICAS]))
            work += rank_work(row_values, chain.stages, instance.stages, chain.name == LANGUAGE)
    schedules = [run.schedule for run in runs]
    times = [
        sum(time_of(schedule) for schedule in schedules) for time_of in (lockstep, asynchronous)
    ]
    capacities = {name: phase.capacities[0] for name, phase in spec.phases.items()}
    return {
        "lockstep": times[0] / PFLOP,
        "asynchronous": times[1] / PFLOP,
        "over_asynchronous": times[0] / times[1],
        "efficiency": work.max() / times[0],
        "ideal": work.mean() / PFLOP,
        "live_gb": max(waiting_gb(instance.model, schedule, capacities) for schedule in schedules),
        "microbatches": sum(run.rows.phases[LANGUAGE].count for run in runs),
        "runs": len(runs),
        "ticks": sum(len(schedule.ticks) for schedule in schedules),
        "fill": {
            name: int(batch.phases[name].real.sum()) / slots[name] for name in slots if slots[name]
        },
    }


# ---------------------------------------------------------------------------- what others run


def others(instance: Instance, lengths: Lengths) -> dict[str, Any]:
    """Figures of asynchronous 1F1B, means over batches."""
    return _mean([_others(instance, batch) for batch in lengths.batches])


def _others(instance: Instance, batch: BatchItems) -> dict[str, Any]:
    """Figures of asynchronous 1F1B on one batch."""
    count = min(PER_STAGE * instance.stages, instance.per_replica)
    examples = len(batch.examples)
    tokens = sum(sums_by(items.example, items.length, examples) for items in batch.phases.values())
    cell = dealt(np.asarray(tokens), REPLICAS * count)
    flops = {
        name: phase_flops(instance.model, name, instance.trained)
        for name in make_phases(MODEL)
        if name in batch.phases
    }
    slots = {}
    squares = {}
    for name, items in batch.phases.items():
        owner = cell[items.example]
        slots[name] = sums_by(owner, items.length, REPLICAS * count)
        squares[name] = sums_by(
            owner, flops[name].squares(items.length, items.extra)[0], REPLICAS * count
        )
    capacities = {name: max(1, int(cell_values.mean())) for name, cell_values in slots.items()}
    rows = {name: (capacity,) for name, capacity in capacities.items()}
    layers = ChainLayers(instance.model, instance.trained, rows, FORWARD_TWICE)
    mean_squares = {name: (int(cell_values.mean()), 0) for name, cell_values in squares.items()}
    chain_layers = layers.layers(mean_squares, capacities)
    ring = partition(chain_layers, instance.stages, "chain", cut_by="parameters")
    costs = layers.costs(ring)
    schedules = []
    work = np.zeros(instance.stages)
    for replica in range(REPLICAS):
        cells = np.arange(replica * count, (replica + 1) * count)
        schedule = one_f_one_b(build_graph(ring, _workload(ring, costs, slots, squares, cells)))
        schedules.append(schedule)
        work += schedule.graph.rank_work / REPLICAS
    # The replicas meet at the end of a step, so the slowest one decides its time
    slowest = max(schedules, key=asynchronous)
    times = lockstep(slowest), asynchronous(slowest)
    largest_slots = {name: int(cell_values.max()) for name, cell_values in slots.items()}
    return {
        "lockstep": times[0] / PFLOP,
        "asynchronous": times[1] / PFLOP,
        "over_asynchronous": times[0] / times[1],
        "efficiency": work.max() / times[1],
        "ideal": work.mean() / PFLOP,
        "live_gb": waiting_gb(instance.model, slowest, largest_slots),
        "microbatches": count,
        "runs": 1,
        "ticks": len(slowest.ticks),
        "fill": {
            name: float(items.real.sum() / max(1, items.length.sum()))
            for name, items in batch.phases.items()
        },
    }


def dealt(tokens: Longs, cells: int) -> Longs:
    """Cell (replica and microbatch) of each example, [B]: the longest example first, each to the
    cell with the fewest tokens so far."""
    heap = [(0, index) for index in range(cells)]
    cell = np.zeros(len(tokens), np.int64)
    for example in np.argsort(-tokens, kind="stable").tolist():
        load, index = heapq.heappop(heap)
        cell[example] = index
        heapq.heappush(heap, (load + int(tokens[example]), index))
    return cell


def _workload(
    ring: Ring,
    costs: Mapping[str, ChainCosts],
    slots: Mapping[str, Longs],
    squares: Mapping[str, Longs],
    cells: Longs,
) -> Workload:
    """Work of one replica: a microbatch costs what it holds, and has no encoder row where it has no
    media."""
    chain_works = []
    inputs: list[list[tuple[int, int]]] = [[] for _ in cells]
    for chain_index, chain in enumerate(ring.chains):
        filled_cells = cells if chain.name == LANGUAGE else cells[slots[chain.name][cells] > 0]
        row_work = slot_work(
            costs[chain.name],
            slots[chain.name][filled_cells],
            squares[chain.name][None, filled_cells],
        )
        rounded_work = [np.rint(kind_work).astype(np.int64) for kind_work in row_work]
        chain_works.append(
            ChainWork(
                np.maximum(rounded_work[0], 1), rounded_work[3], rounded_work[1], rounded_work[2]
            )
        )
        if chain.name != LANGUAGE:
            for row, microbatch in enumerate((filled_cells - cells[0]).tolist()):
                inputs[microbatch].append((chain_index, row))
    return Workload(tuple(chain_works), tuple(map(tuple, inputs)))


# ---------------------------------------------------------------------------- figures


def slot_work(costs: ChainCosts, slots: Any, squares: Any) -> Any:
    """[4, D, M] FLOPs of M rows, in the order of `ChainCosts.linear`, if slots without data cost
    nothing.

    Args:
      slots: [M] slots with data.
      squares: [1, M] sums of the squared lengths of their items.
    """
    linear = costs.linear[0][:, :, None].astype(float) * slots / costs.capacity
    return linear + costs.attention[0][:, :, None].astype(float) * squares[0] / costs.capacity**2


def rank_work(of_rows: Any, stages: Sequence[int], count: int, last_is_fused: bool) -> Any:
    """[S] FLOPs of every rank, forward and backward, from the [4, D, M] FLOPs of rows.

    Args:
      stages: [D] the rank of each chunk.
      count: S.
      last_is_fused: the last chunk has one operation for both passes, so its forward runs once.
    """
    chunk_work = of_rows.sum(axis=(0, 2))
    if last_is_fused and of_rows[1:, -1].any():
        chunk_work[-1] -= of_rows[0, -1].sum()  # its backward already counts the forward
    return np.bincount(stages, chunk_work, count)


def waiting_gb(model: ModelConfig, schedule: Schedule, capacities: Mapping[str, int]) -> float:
    """GB of the slots that a schedule needs on a rank, in bfloat16. No backward is split."""
    total = 0
    for (pool, chain_index), count in slots_needed([schedule]).items():
        name = schedule.graph.ring.chains[chain_index].name
        crosses = pool in (Pool.TOKENS, Pool.TOKEN_GRADIENT)
        slots = capacities[name] // (slots_per_token(name, model) if crosses else 1)
        width = model.token_width if crosses else model.carried_width(name)
        total += 2 * count * slots * width
    return total / 1e9


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of every figure over the batches that have it."""
    means: dict[str, Any] = {}
    for name, sample_value in found[0].items():
        if isinstance(sample_value, dict):
            means[name] = {
                key: statistics.fmean(record[name][key] for record in found if key in record[name])
                for key in sample_value
            }
        else:
            means[name] = statistics.fmean(record[name] for record in found)
    return means


# ---------------------------------------------------------------------------- all of it


def instances(
    profiles: Sequence[str],
    mixes: Sequence[str],
    modes: Sequence[str],
    stages: Sequence[int],
    per_replica: Sequence[int],
) -> Iterator[Instance]:
    """Every combination, except the mix `speech` with models that have no audio encoder."""
    for profile in profiles:
        encoders = PROFILES[profile].encoders
        for mix in mixes:
            if mix == "speech" and "audio" not in encoders:
                continue
            for mode in modes:
                for stage_count in stages:
                    for examples in per_replica:
                        yield Instance(profile, mix, mode, stage_count, examples)


def measure_real(
    instance: Instance,
    seeds: Sequence[int],
    rollouts: int,
    files: FileLengths | None,
    variants: Sequence[str] = tuple(VARIANTS),
) -> list[dict[str, Any]]:
    """Records of one instance: one for what others run, and one for each of our variants."""
    if instance.mix == FILES:
        assert files is not None
        lengths = from_files(instance, files, seeds)
    else:
        lengths = generated(instance, seeds)
    reference = others(instance, lengths)
    figures = {OTHERS: reference} | {
        variant: ours(instance, lengths, variant, rollouts) for variant in variants
    }
    times = {
        variant: record["asynchronous" if variant == OTHERS else "lockstep"]
        for variant, record in figures.items()
    }
    return [
        {
            "family": "real",
            **vars(instance),
            "variant": variant,
            **record,
            "gain": reference["asynchronous"] / times[variant],
            "gain_asynchronous": reference["asynchronous"] / record["asynchronous"],
            "over_ideal": times[variant] / record["ideal"],
            "bound": reference["asynchronous"] / record["ideal"],
        }
        for variant, record in figures.items()
    ]


def show_real(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of one instance."""
    reference = rows[0]
    columns = ("lockstep", "asynchronous", "over_asynchronous", "efficiency")
    table = [
        [
            row["variant"],
            *(row[name] for name in columns),
            " ".join(f"{share:.2f}" for share in row["fill"].values()),
            row["microbatches"],
            row["live_gb"],
            row["gain"],
            row["gain_asynchronous"],
            row["bound"],
            row["over_ideal"],
            row.get("sizing_s", 0.0),
        ]
        for row in rows
    ]
    print_table(
        f"real: {reference['profile']}, mix {reference['mix']}, {reference['mode']}, "
        f"{reference['stages']} stages, "
        f"{reference['per_replica']} examples per replica; fill of {' '.join(reference['fill'])}",
        [
            *("variant", "lockstep", "asynchronous", "over", "efficiency", "fill", "microbatches"),
            *("GB", "gain", "asynchronous", "bound", "over ideal", "sizing s"),
        ],
        table,
        left_aligned=1,
    )
