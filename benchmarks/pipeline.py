"""What layouts, schedules and deferral gain in a pipelined step: modelled, nothing is compiled or
run.

    python -m benchmarks.pipeline [--model NAME] [--seeds N] [--microbatches M] [--stages S] [--modes ...] [--live L]
                                  [--variants ...] [--rollouts N] [--long N] [--json PATH]
    python -m benchmarks.pipeline --families real [--real-seeds N] [--profiles 8B 72B] [--mixes all images speech]
                                  [--data DIR] [--real-modes ...] [--real-stages 4 8] [--per-replica 8 32 128]
                                  [--real-variants ...]

The default model (`vision_language`) has a vision encoder of 5B and a language model of 8B
parameters, on 4 pipeline ranks. A batch has M microbatches of 16 examples and 0 to 48 images each,
all numbers equally likely; an image is 576 patches and 144 tokens. Rows have fixed shapes: a
language row holds 8,192 tokens, an encoder row 8 images.

`--model text_to_video` has the language model and a diffusion transformer of 3.5B that reads its
states, trained by the loss of what is drawn: microbatches of up to 8 clips and 16 s in all
(benchmarks/pipeline_video.py). A language row holds 1,024 tokens of captions, a row of the
generator 9,216 slots.

Other models have parts of very different sizes, and the same text and images
(benchmarks/pipeline_batches.py): `6B + 2B + 3B` (vision, audio, language; 0 to 24 images and 0 to 6
clips of 10 s per microbatch, 4 clips in an encoder row), `0.3B + 72B`, `6B + 72B`.

A row costs the linear FLOPs of all its slots and the attention of what is in it, layer by layer;
everything is recomputed. Every line of the table adds to the one before. With `text_to_video`, read
language for encoder, and generator for language:

    chain by parameters   encoder, then language, cut into stages of equal parameters; 1F1B
    chain                 cut by cost, aware of what is frozen
    parallel              encoder and language on ranks of their own; greedy schedule
    segments              all on every rank, in the chunks that take least time on another batch
    + search              the best of greedy, 1F1B and `--rollouts` schedules of
                          sharding/pipeline/schedules/search.py
    + split               backward split into input and weight gradients
    + deferral            examples assigned to microbatches by the planner: full encoder rows, and
                          microbatches of equal cost

    lockstep       PFLOP of a step on the executor: a tick lasts as long as its longest operation
    asynchronous   PFLOP of the same orders if ranks wait only for what they need
    efficiency     work of the busiest rank / lockstep: mean, and `worst` of the seeds
    GB             the most that waits on a rank: inputs of chunks, tokens, gradients, and what
                   split backwards leave for their second half; bfloat16, one replica, nothing
                   sharded
    gain           lockstep of the first line / lockstep of this one
    over 1F1B      asynchronous makespan of the first line, which is what others run, / lockstep of
                   this one
    over           lockstep / asynchronous

A rank has room for what 2 split backwards of each component leave. Room for everything else is
unlimited, or with `--live L` there is room for L language microbatches and 4 encoder rows of each
(`text_to_video`: 2 language rows for each of L microbatches of the generator).

Modes: `train_all` trains everything, `alignment` the projectors alone, `frozen_encoders` everything
but the towers, `frozen_text` the generator and its projector of states.

The next table is about the search alone (`--long 0` leaves it out), on the batches of the last
line: how much longer the greedy and the searched schedules are than the best known one, which
`--long` rollouts with another seed find if the search itself does not; how much longer that one is
than the lower bound; and how long a search, greedy schedules included, runs on one core until it is
within 2 % of the best.

The last table is about microbatches alone (family `microbatches`): by how much the standard
deviation of their work falls against random order, on 512 examples of log-uniform work, 4 replicas,
32 microbatches.

These tables are the families `layouts` and `microbatches`. The family `real` has lengths of real
mixtures, on rows chosen for them: benchmarks/pipeline_real.py explains its lines.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.file_lengths import FILE_ERRORS, FileLengths
from benchmarks.pipeline_batches import UNLIKE, VISION_LANGUAGE, Chains, Rows
from benchmarks.pipeline_real import (
    FILES,
    MIXES,
    PROFILES,
    instances,
    measure_real,
    show_real,
)
from benchmarks.pipeline_real import MODES as REAL_MODES
from benchmarks.pipeline_real import VARIANTS as REAL_VARIANTS
from benchmarks.pipeline_video import TEXT_TO_VIDEO
from jaxmllm.arrays import Longs, sums_by
from jaxmllm.balance.stages.microbatches import MicrobatchPlan, PhaseLoad, plan_microbatches
from jaxmllm.config.schema import ModelConfig
from jaxmllm.phases import LANGUAGE
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import PHASES
from sharding.pipeline.build_graph import build_graph
from sharding.pipeline.cuts import CutBy, LayoutName, partition
from sharding.pipeline.graph import Graph, Pool, Slots, Workload
from sharding.pipeline.layer_costs import Layer, LayerCost, chain_work, layer_costs
from sharding.pipeline.ring import PipelineError, Ring
from sharding.pipeline.schedules.bounds import lower_bound
from sharding.pipeline.schedules.by_name import fixed_orders, scheduler_of
from sharding.pipeline.schedules.greedy import greedy
from sharding.pipeline.schedules.schedule import Schedule, asynchronous, durations, lockstep
from sharding.pipeline.schedules.search import ROLLOUTS, search
from sharding.pipeline.schedules.shortest import shortest
from sharding.pipeline.slots import slots_needed

MODELS: Mapping[str, Chains] = {
    "vision_language": VISION_LANGUAGE,
    "text_to_video": TEXT_TO_VIDEO,
    **UNLIKE,
}
MODES = tuple(dict.fromkeys(mode for chains in MODELS.values() for mode in chains.modes))
PENDING = 2  # slots per rank and component, which hold what its split backwards leave
LONG = 1000  # rollouts of the search whose result counts as the best known
WITHIN = 1.02  # a schedule is near the best if it is at most this much longer
SAMPLE_SEED = 2**40  # seed of the batch on which chunks are tried
FAMILIES = ("layouts", "microbatches", "real")
UNIT = 10**9  # FLOPs in one unit of duration, so that durations fit into 32 bits
GENERATOR = "benchmarks.pipeline.MODELS[model].generate(seed + i, microbatches), i = 0 .. seeds - 1"


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    name: str
    layout: LayoutName
    cut_by: CutBy = "cost"
    schedule: str = "greedy"  # a name of SCHEDULES
    split: bool = False
    deferred: bool = False


VARIANTS = (
    Variant("chain by parameters", "chain", cut_by="parameters", schedule="1f1b"),
    Variant("chain", "chain", schedule="1f1b"),
    Variant("parallel", "parallel"),
    Variant("segments", "segments"),
    Variant("+ search", "segments", schedule="search"),
    Variant("+ split", "segments", schedule="search", split=True),
    Variant("+ deferral", "segments", schedule="search", split=True, deferred=True),
)


# ---------------------------------------------------------------------------- costs


def layers_of(
    chains: Chains, trainable: frozenset[str], squares: Mapping[str, int]
) -> dict[str, list[Layer]]:
    """Layers of all chains, with costs for rows whose items have these sums of squared lengths.

    Args:
      squares: by chain; 0 for a chain that is left out.
    """
    return {
        name: [
            Layer(
                component=layer.component,
                linear=layer.linear(chains.slots[name]) // UNIT,
                attention=layer.attention((squares.get(name, 0), 0)) // UNIT,
                parameters=layer.parameters,
                trainable=layer.component in trainable,
            )
            for layer in layers
        ]
        for name, layers in chains.layers.items()
    }


def make_ring(
    chains: Chains,
    trainable: frozenset[str],
    stages: int,
    layout: LayoutName,
    cut_by: CutBy = "cost",
    chunks: Sequence[int] = (),
) -> Ring:
    """Stages cut for the average microbatch.

    Args:
      chunks: chunks on each rank, by chain, for the layout of segments.
    """
    return partition(
        layers_of(chains, trainable, chains.squares),
        stages,
        layout,
        {name: float(rows) for name, rows in chains.read.items()},
        cut_by,
        dict(zip(chains.layers, chunks, strict=True)) if chunks else None,
    )


def best_chunks(
    chains: Chains, variant: Variant, mode: str, microbatches: int, stages: int
) -> tuple[int, ...]:
    """The tried chunks whose shortest schedule, on a batch that is not measured, takes least time;
    empty if none are tried."""
    if variant.layout != "segments" or not chains.chunks:
        return ()
    shape = (chains, variant, mode, SAMPLE_SEED, microbatches, stages)
    blocks = [len(layers) - 2 for layers in chains.layers.values()]  # layers without stem and head
    candidates = [
        chunks
        for chunks in chains.chunks
        if all(
            stages * count <= block_count for count, block_count in zip(chunks, blocks, strict=True)
        )
    ]
    cheapest: tuple[int, ...] = ()
    least_cost: int | None = None
    for chunks in candidates:
        graph = make_graph(*shape, chunks)
        try:
            slots = make_slots(chains, graph)
            cost = lockstep(shortest(graph, fixed_orders(), slots, bound=least_cost))
        except PipelineError:  # no schedule of these chunks is shorter than `least_cost`
            continue
        if least_cost is None or cost < least_cost:
            cheapest = chunks
            least_cost = cost
    return cheapest


def make_workload(chains: Chains, ring: Ring, trainable: frozenset[str], rows: Rows) -> Workload:
    """Work of the chunks of a ring in a batch."""
    cached_costs: dict[tuple[str, int], tuple[LayerCost, ...]] = {}

    def costs(name: str, squares: int) -> tuple[LayerCost, ...]:
        key = (name, squares)
        if key not in cached_costs:
            cached_costs[key] = layer_costs(layers_of(chains, trainable, {name: squares}))[name]
        return cached_costs[key]

    return Workload(
        tuple(
            chain_work(chain, [costs(chain.name, row) for row in squares])
            for chain, squares in zip(ring.chains, (*rows.feeding, rows.reading), strict=True)
        ),
        tuple(tuple(sorted(row)) for row in rows.inputs),
    )


def make_graph(
    chains: Chains,
    variant: Variant,
    mode: str,
    seed: int,
    microbatches: int,
    stages: int,
    chunks: Sequence[int] = (),
) -> Graph:
    """Graph of the operations of a batch."""
    trainable = chains.modes[mode]
    batch = chains.generate(seed, microbatches)
    ring = make_ring(chains, trainable, stages, variant.layout, variant.cut_by, chunks)
    rows = chains.planned_rows(batch) if variant.deferred else chains.drawn_rows(batch)
    return build_graph(ring, make_workload(chains, ring, trainable, rows), split=variant.split)


def make_slots(chains: Chains, graph: Graph, live: int | None = None) -> Slots:
    """Slots with room for `live` microbatches of the reader at a time; None: for all of a step. No
    residuals are kept."""
    slots: Slots = {}
    for chain_index, chain in enumerate(graph.ring.chains):
        rows = chains.room if chain.name in chains.read else 1
        room = graph.size if live is None else live * rows * chain.chunks_per_rank
        slots |= {(pool, chain_index): room for pool in Pool if pool != Pool.RESIDUAL}
        slots[Pool.PENDING, chain_index] = PENDING
    return slots


def make_schedule(
    chains: Chains,
    variant: Variant,
    graph: Graph,
    live: int | None = None,
    rollouts: int = ROLLOUTS,
) -> Schedule:
    """Schedule of a graph by the variant's method."""
    slots = make_slots(chains, graph, live)
    return scheduler_of(variant.schedule).make(graph, slots, rollouts)


def waiting_bytes(chains: Chains, schedule: Schedule) -> float:
    """Bytes of the slots that a schedule needs on every rank, in bfloat16."""
    width = chains.model.language.width
    total = 0
    for (pool, chain_index), count in slots_needed([schedule]).items():
        name = schedule.graph.ring.chains[chain_index].name
        blocks = max(schedule.graph.ring.chains[chain_index].layers)
        values_by_pool = {
            Pool.TOKENS: chains.tokens.get(name, 0) * width,
            Pool.TOKEN_GRADIENT: chains.tokens.get(name, 0) * width,
            Pool.PENDING: chains.slots[name] * _products(chains.model, name) * blocks,
        }
        phase_width = getattr(chains.model, name).width
        total += 2 * count * values_by_pool.get(pool, chains.slots[name] * phase_width)
    return float(total)


def _products(model: ModelConfig, name: str) -> int:
    """Numbers that a split backward leaves of one slot in one block: inputs of its matrix products,
    and gradients of their outputs."""
    if name != LANGUAGE:
        tower = getattr(model, name)
        return int(9 * tower.width + tower.mlp_matrices * tower.mlp_width)
    language = model.language
    heads = language.heads * language.head_size
    keys = 2 * language.kv_heads * language.head_size
    return 3 * language.width + 2 * heads + keys + 3 * language.mlp_width + language.width


def efficiency(schedule: Schedule, makespan: int) -> float:
    """Work of the busiest rank over a makespan."""
    graph = schedule.graph
    work = [0] * graph.ring.stages
    for rank, duration in zip(graph.stage, durations(schedule), strict=True):
        work[rank] += duration
    return max(work) / makespan


def measure(
    model: str,
    mode: str,
    variant: Variant,
    seeds: Sequence[int],
    microbatches: int,
    stages: int,
    live: int | None = None,
    rollouts: int = ROLLOUTS,
) -> dict[str, Any]:
    """Record of one variant: means over the batches of all seeds."""
    chains = MODELS[model]
    chunks = best_chunks(chains, variant, mode, microbatches, stages)
    samples = []
    for seed in seeds:
        graph = make_graph(chains, variant, mode, seed, microbatches, stages, chunks)
        start = time.perf_counter()
        schedule = make_schedule(chains, variant, graph, live, rollouts)
        seconds = time.perf_counter() - start
        ticks = len(schedule.ticks)
        lockstep_time = lockstep(schedule)
        petaflops = lockstep_time * UNIT / 1e15, asynchronous(schedule) * UNIT / 1e15
        samples.append(
            (
                *petaflops,
                efficiency(schedule, lockstep_time),
                ticks,
                waiting_bytes(chains, schedule) / 1e9,
                seconds,
            )
        )
    means = [statistics.fmean(column) for column in zip(*samples, strict=True)]
    names = ("lockstep", "asynchronous", "efficiency", "ticks", "waiting_gb", "seconds")
    worst_efficiency = min(sample[2] for sample in samples)
    return {
        "family": "layouts",
        "model": model,
        "mode": mode,
        "variant": variant.name,
        **dict(zip(names, means, strict=True)),
        "over_asynchronous": means[0] / means[1],
        "efficiency_worst": worst_efficiency,
    }


# ---------------------------------------------------------------------------- search alone


def measure_search(
    model: str,
    mode: str,
    seeds: Sequence[int],
    microbatches: int,
    stages: int,
    live: int | None = None,
    rollouts: int = ROLLOUTS,
    long: int = LONG,
) -> dict[str, Any]:
    """Record of the search: how much longer schedules are than the best known one, in the mean over
    batches, and the time that a search takes to come near it."""
    chains = MODELS[model]
    chunks = best_chunks(chains, VARIANTS[-1], mode, microbatches, stages)
    samples = []
    for seed in seeds:
        graph = make_graph(chains, VARIANTS[-1], mode, seed, microbatches, stages, chunks)
        slots = make_slots(chains, graph, live)
        greedy_time = lockstep(greedy(graph, slots))
        setup_start = time.process_time()
        search(graph, fixed_orders(), slots, rollouts=0)
        search_start = time.process_time()
        searched = search(graph, fixed_orders(), slots, rollouts=rollouts)
        seconds = time.process_time() - search_start
        setup_seconds = search_start - setup_start
        best_time = min(
            searched.lockstep, search(graph, fixed_orders(), slots, rollouts=long, seed=1).lockstep
        )
        near_rollouts = [
            rollout for rollout, cost in enumerate(searched.history) if cost <= WITHIN * best_time
        ]
        near_seconds = (
            setup_seconds + (seconds - setup_seconds) * near_rollouts[0] / max(1, searched.rollouts)
            if near_rollouts
            else float("inf")
        )
        gaps = (
            greedy_time / best_time - 1,
            searched.lockstep / best_time - 1,
            best_time / lower_bound(graph) - 1,
        )
        samples.append((*gaps, seconds, near_seconds))
    greedy_gap, search_gap, best_gap, mean_seconds, _ = (
        statistics.fmean(column) for column in zip(*samples, strict=True)
    )
    times = [sample[-1] for sample in samples if sample[-1] != float("inf")]
    return {
        "model": model,
        "mode": mode,
        "instances": len(samples),
        "greedy_gap": greedy_gap,
        "search_gap": search_gap,
        "search_gap_worst": max(sample[1] for sample in samples),
        "best_over_bound": best_gap,
        "search_cpu_s": mean_seconds,
        "near": len(times),
        "near_cpu_s": statistics.median(times) if times else None,
    }


# ---------------------------------------------------------------------------- microbatches alone


def loads_of(plan: MicrobatchPlan, work: Longs, phase: str, replicas: int) -> Longs:
    """Work of a phase on each replica in each microbatch: [replicas, M]."""
    microbatch = plan.language if phase == LANGUAGE else plan.encoder
    cell = plan.replica.astype(np.int64) * plan.microbatches + microbatch
    return sums_by(cell, work, replicas * plan.microbatches).reshape(replicas, plan.microbatches)


def measure_microbatches(
    seeds: Sequence[int], examples: int = 512, replicas: int = 4, count: int = 32
) -> dict[str, float]:
    """How much more even planned microbatches are than microbatches in random order: ratios of
    standard deviations, the mean and the least over seeds."""
    std_ratios: dict[str, list[float]] = {"vision": [], "language": []}
    milliseconds = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        vision, text = np.exp(random.uniform(0, np.log([[40.0], [20.0]]), (2, examples)))
        work = {"vision": np.rint(1e9 * vision), "language": np.rint(5e8 * (vision + text))}
        loads = {
            name: PhaseLoad(values.astype(np.int64), values.astype(np.int64))
            for name, values in work.items()
        }
        start = time.process_time()
        plan = plan_microbatches({"vision": loads["vision"]}, loads[LANGUAGE], replicas, count)
        milliseconds.append(1e3 * (time.process_time() - start))
        in_order = random.permutation(examples).reshape(replicas * count, -1)
        for name, values in work.items():
            planned_loads = loads_of(plan, loads[name].work, name, replicas)
            std_ratios[name].append(float(values[in_order].sum(axis=1).std() / planned_loads.std()))
    return {
        **{f"{name}_std_ratio": statistics.fmean(values) for name, values in std_ratios.items()},
        **{f"{name}_std_ratio_worst": min(values) for name, values in std_ratios.items()},
        "plan_cpu_ms": statistics.median(milliseconds),
    }


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--seeds", type=positive_int, default=10, help="batches (default: %(default)s)"
    )
    parser.add_argument("--microbatches", type=positive_int, default=16)
    parser.add_argument("--stages", type=positive_int, default=4)
    parser.add_argument(
        "--live",
        type=positive_int,
        help="language microbatches with room on a rank (default: all)",
    )
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=names,
        default=names,
        help="lines to print after the first (default: all)",
    )
    parser.add_argument(
        "--rollouts", type=int, default=ROLLOUTS, help="rollouts of a search (default: %(default)s)"
    )
    parser.add_argument(
        "--long",
        type=int,
        default=LONG,
        help="rollouts of the long search, whose result counts as the best (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=tuple(MODELS),
        default="vision_language",
        help="model of the drawn microbatches (default: %(default)s)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, help="modes (default: all of the model)"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    real_group = parser.add_argument_group("real")
    real_group.add_argument("--profiles", nargs="+", choices=tuple(PROFILES), default=["8B"])
    real_group.add_argument("--mixes", nargs="+", choices=tuple(MIXES), default=["all"])
    real_group.add_argument(
        "--data", type=Path, metavar="DIR", help="folder that holds train.jsonl, as another mix"
    )
    real_group.add_argument("--real-stages", nargs="+", type=positive_int, default=[4])
    real_group.add_argument("--per-replica", nargs="+", type=positive_int, default=[8, 32, 128])
    real_group.add_argument(
        "--real-modes", nargs="+", choices=tuple(REAL_MODES), default=["train_all"]
    )
    real_group.add_argument(
        "--real-seeds",
        type=positive_int,
        default=2,
        help="batches per instance (default: %(default)s)",
    )
    real_group.add_argument(
        "--real-variants", nargs="+", choices=tuple(REAL_VARIANTS), default=list(REAL_VARIANTS)
    )
    options = parser.parse_args(command)
    model_modes = MODELS[options.model].modes
    if unknown_modes := [mode for mode in options.modes or () if mode not in model_modes]:
        parser.error(
            f"--modes {' '.join(unknown_modes)}: --model {options.model!r} has "
            f"{', '.join(model_modes)}"
        )
    try:  # before anything is measured
        files = FileLengths.of(options.data, tuple(PHASES)) if options.data else None
    except FILE_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results: dict[str, Any] = {"rows": []}
    if "layouts" in options.families:
        results = _layouts(options)
    if "microbatches" in options.families:
        evenness = measure_microbatches(range(options.seed, options.seed + options.seeds))
        print_table("Microbatches against random order", [*evenness], [[*evenness.values()]])
        results["even"] = evenness
    if "real" in options.families:
        results["rows"] += _real(options, files)
    write_json(
        options.json,
        "pipeline",
        options.seed,
        GENERATOR,
        seeds=options.seeds,
        real_seeds=options.real_seeds,  # for rows of the family `real`, instead of `seeds`
        data=options.data and str(options.data),
        microbatches=options.microbatches,
        stages=options.stages,
        live=options.live,
        rollouts=options.rollouts,
        long=options.long,
        **results,
    )
    return 0


def _layouts(options: Namespace) -> dict[str, Any]:
    """Measure and print the family `layouts`: layouts and schedules on drawn microbatches."""
    seeds = range(options.seed, options.seed + options.seeds)
    shape = (seeds, options.microbatches, options.stages, options.live, options.rollouts)
    modes = options.modes or list(MODELS[options.model].modes)
    variants = [
        candidate
        for candidate in VARIANTS
        if candidate == VARIANTS[0] or candidate.name in options.variants
    ]
    rows = []
    for mode in modes:
        mode_rows = [measure(options.model, mode, variant, *shape) for variant in variants]
        show(mode, mode_rows)
        rows += mode_rows
    if not options.long:
        return {"rows": rows}
    quality = [measure_search(options.model, mode, *shape, options.long) for mode in modes]
    print_table(
        "Search against the best known", [*quality[0]], [[*row.values()] for row in quality]
    )
    return {"rows": rows, "search": quality}


def _real(options: Namespace, files: FileLengths | None) -> list[dict[str, Any]]:
    """Measure and print the family `real`: lengths of real mixtures."""
    seeds = range(options.seed, options.seed + options.real_seeds)
    mixes = [*options.mixes, *([FILES] if files else [])]
    rows = []
    for instance in instances(
        options.profiles, mixes, options.real_modes, options.real_stages, options.per_replica
    ):
        instance_rows = measure_real(
            instance, seeds, options.rollouts, files, options.real_variants
        )
        show_real(instance_rows)
        rows += instance_rows
    return rows


def show(mode: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of one mode."""
    reference = rows[0]
    names = (
        "lockstep",
        "asynchronous",
        "over_asynchronous",
        "efficiency",
        "efficiency_worst",
        "ticks",
        "waiting_gb",
        "seconds",
    )
    table = [
        [
            row["variant"],
            *(row[name] for name in names),
            reference["lockstep"] / row["lockstep"],
            reference["asynchronous"] / row["lockstep"],
        ]
        for row in rows
    ]
    columns = [
        "variant",
        "lockstep",
        "asynchronous",
        "over",
        "efficiency",
        "worst",
        "ticks",
        "GB",
        "seconds",
        "gain",
        "over 1F1B",
    ]
    print_table(f"{mode}: PFLOP of a step, mean of the seeds", columns, table)


if __name__ == "__main__":
    sys.exit(main())
