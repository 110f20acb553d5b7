"""What buckets lose and what plans keep: pictures and clips for a diffusion transformer, counted on
generated sizes. Nothing is decoded, compiled or run.

    python -m benchmarks.diffusion --json diffusion.json                 the table of docs/diffusion.md
    python -m benchmarks.diffusion --ranks 8 --items 256 --seeds 1       in seconds

A transformer of 28 layers, width 3584 and MLPs of 10240 reads states of a frozen decoder of 8B
parameters and draws latents of 8 frames x 16 x 16 pixels per slot. Captions have 16 to 512 tokens,
log-normal around a median of 60. Mixes of what is drawn:

    images    sides (roots of the area) from 256 to 1024 pixels, log-uniform; ratios log-normal
              around 1
    clips     1 to 16 s of 16 frames per second, log-uniform; sides of 256, 480 and 768 pixels,
              6:3:1; 16:9, 9:16 and 1:1, 7:2:1
    mixed     half of each

Methods:

    balanced        the planner, rows of one rank
    balanced_long   the planner, rows of up to 8 ranks: a node
    balanced_across the planner, rows of up to 64 ranks
    packed          rows packed at native size, items where sampling put them (balance.mode none)
    buckets         batches of one shape in Open-Sora's buckets, texts padded to 512
                    (diffusion_buckets.py)
    padded_alike    items sorted by length, batches padded to their longest

All methods may use the same number of slots of a rank at once: those of the longest clip with the
longest caption. Rows have up to four sizes, chosen from 16 batches that are not measured. A batch
of the last two methods has one item at least, and with more it costs no more than one item of that
many slots; an epoch has 16 times as many items as the planner's batch. Buckets drop the items that
do not fill a batch. `buckets` gives batches to ranks in any order, `padded_alike` in the order of
their lengths.

    real slots      latents and text tokens / all slots of rows or batches
    kept pixels     share of a frame's pixels left after cropping and scaling down; kept frames:
                    share left after cutting clips. Means over items
    dropped         items without a batch, of every `--items` items
    synchronised    sum over microbatches of the costliest rank / sum of means: ranks meet at every
                    one
    over ideal      FLOPs of the slowest rank of every microbatch, padding included / an equal share
                    of the FLOPs of what is kept
    shapes          classes of rows, or shapes of batches that occur in an epoch: each needs a set
                    of programs
    plan ms         a whole plan of all phases and routes, on one core, median; `cpu` leaves out the
                    time that other processes took
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.balance import milliseconds, spans_up_to
from benchmarks.diffusion_buckets import (
    FRAMES,
    MOST_TEXT,
    SIDE,
    Batch,
    Media,
    batches_of_buckets,
    batches_of_like_sizes,
    bucket_media,
    figures,
)
from jaxmllm.arrays import Floats, Ints, Longs, round_up
from jaxmllm.balance.costs.flops import ItemCost, phase_flops
from jaxmllm.balance.costs.gather import flops_per_byte, gather_cost
from jaxmllm.balance.costs.microbatch import microbatch_cost
from jaxmllm.balance.records import BatchItems, ExchangeGrid, Mode, PhaseItems, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import Alignment, SizingInputs
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.config.schema import BalanceConfig, DiffusionConfig, ModelConfig, PhaseConfig
from jaxmllm.phases import LANGUAGE, generator_phase, make_phases
from jaxmllm.tools import workload
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.workload import LogNormal, LogUniform

DIFFUSION = "diffusion"
MODEL = ModelConfig(
    language=workload.MODEL.language,
    diffusion=DiffusionConfig(width=3584, layers=28, heads=28, mlp_width=10_240, patch_size=SIDE),
)
TRAINED = dict.fromkeys(generator_phase(DIFFUSION).components, 1)
CAPTION = LogNormal(median=60, sigma=0.8, low=16, high=MOST_TEXT)  # tokens
PICTURE_SIDE = LogUniform(256, 1024)  # pixels
PICTURE_RATIO = LogNormal(median=1, sigma=0.35, low=1 / 2.4, high=2.4)
SECONDS = LogUniform(1, 16)
FRAME_RATE = 16
CLIP_SIDES = (256, 480, 768)
CLIP_SIDE_SHARES = (0.6, 0.3, 0.1)
CLIP_RATIOS = (9 / 16, 16 / 9, 1.0)  # height / width
CLIP_RATIO_SHARES = (0.7, 0.2, 0.1)
MIXES = {"images": 0.0, "clips": 1.0, "mixed": 0.5}  # share of clips
PLANNED: Mapping[str, tuple[Mode, int]] = {  # mode, and most ranks that hold a row together
    "balanced": ("phases", 1),
    "balanced_long": ("phases", 8),
    "balanced_across": ("phases", 64),
    "packed": ("none", 1),
}
NODE = 8  # ranks per node
ALIGNMENT = Alignment(128, small=64, smallest=32)  # rows consist of whole attention blocks
ROW_CLASSES = 4  # several sizes of rows, because items have from 272 to 74,240 slots
FRAME_TOKENS = 2  # text tokens around the place of a drawn item
SAMPLED = 16  # batches from which sizes are chosen, and batches in an epoch of the baselines
# The streams are parts of the seeds, so that samples and measured batches never coincide
SAMPLE_STREAM = 1
MEASURED_STREAM = 2
GENERATOR = "benchmarks.diffusion.draw([seed, 2, i], items, share of clips), i < seeds"


def draw(seed: Sequence[int], items: int, clips: float) -> Media:
    """Pictures and clips of native size in random order; sides are whole slots.

    Args:
      clips: share of clips.
    """
    random = np.random.default_rng(seed)
    is_clip = random.permutation(items) < round(clips * items)
    side = PICTURE_SIDE.draw(random, items)
    ratio = PICTURE_RATIO.draw(random, items)
    seconds = SECONDS.draw(random, items)
    side = np.where(is_clip, random.choice(CLIP_SIDES, items, p=CLIP_SIDE_SHARES), side)
    ratio = np.where(is_clip, random.choice(CLIP_RATIOS, items, p=CLIP_RATIO_SHARES), ratio)
    frames = np.where(is_clip, np.rint(seconds * FRAME_RATE), 1).astype(np.int64)
    root = np.sqrt(ratio)
    height, width = (_whole_slots(pixels) for pixels in (side * root, side / root))
    text = np.rint(CAPTION.draw(random, items)).astype(np.int64)
    return Media(frames, height, width, text)


def _whole_slots(pixels: Floats) -> Longs:
    rows: Longs = (pixels / SIDE + 1e-6).astype(np.int64)  # 1024 / 16 may round to less than 64
    return rows * SIDE


def longest(clips: float) -> int:
    """Slots of the largest item, text included, of a mix with this share of clips."""
    side = max(CLIP_SIDES) if clips else PICTURE_SIDE.high
    frames = SECONDS.high * FRAME_RATE if clips else FRAMES
    return round((side / SIDE) ** 2 * frames / FRAMES) + MOST_TEXT


def batch_of(media: Media) -> BatchItems:
    """One example for each item: its caption, and the picture or clip to draw."""
    examples = np.arange(len(media))
    example = examples.astype(np.int32)
    zeros = np.zeros_like(example)
    sequence = media.text + FRAME_TOKENS
    slots = media.slots
    phases = {
        LANGUAGE: PhaseItems(sequence, sequence, example, tokens=zeros, slot=zeros),
        DIFFUSION: PhaseItems(slots, slots, example, media.text.astype(np.int32), slot=zeros),
    }
    return BatchItems(examples, int(media.text.sum()), phases)


def make_spec(
    samples: Sequence[BatchItems], ranks: int, mode: Mode, widest: int, clips: float
) -> PlanSpec:
    """Plan inputs with the sizes that a run on GPUs would choose, with the same ranks in both
    phases; up to `widest` ranks may hold a row together."""
    longest_by_phase = {LANGUAGE: MOST_TEXT + FRAME_TOKENS, DIFFUSION: longest(clips)}
    inputs = [
        SizingInputs(
            phase=phase,
            ranks=ranks,
            alignment=ALIGNMENT,
            slots_per_token=1,
            longest=longest_by_phase[name],
            flops=flops,
            config=PhaseConfig(max_capacity=MOST_SLOTS, row_classes=ROW_CLASSES),
            spans=spans_up_to(widest, ranks),
            gather_cost=gather_cost(MODEL, name, flops_per_byte("gpu")),
            microbatch_cost=microbatch_cost(MODEL, name, "gpu", flops.linear, shards=ranks),
        )
        for name, phase in make_phases(MODEL).items()
        for flops in (phase_flops(MODEL, name, TRAINED),)
    ]
    rank_column = np.arange(ranks, dtype=np.int32)[:, None]
    grids = {DIFFUSION: ExchangeGrid(rank_column, rank_column)}
    node: Ints = np.arange(ranks, dtype=np.int32) // NODE
    nodes = dict.fromkeys(longest_by_phase, node)
    return choose_sizes(samples, inputs, grids, BalanceConfig(mode=mode), nodes, "ragged")


# Slots that a rank may hold at one time, with any method
MOST_SLOTS = round_up(longest(1.0), ALIGNMENT.slots)


# ---------------------------------------------------------------------------- methods


def measure_plans(
    method: str, clips: float, ranks: int, items: int, seeds: int, seed: int
) -> dict[str, Any]:
    """Figures of a planned method: means over `seeds` batches, and the median time of a plan."""
    mode, widest = PLANNED[method]
    samples = [
        batch_of(draw([seed, SAMPLE_STREAM, index], items, clips)) for index in range(SAMPLED)
    ]
    spec = make_spec(samples, ranks, mode, widest, clips)
    batches = [
        batch_of(draw([seed, MEASURED_STREAM, index], items, clips)) for index in range(seeds)
    ]
    plan_step(batches[0], spec)  # lets numba compile before anything is timed
    plans = [plan_step(batch, spec) for batch in batches]
    times = [milliseconds(plan_step, batch, spec) for batch in batches]

    def mean(name: str) -> float:
        return statistics.fmean(plan.statistics[f"{DIFFUSION}/{name}"] for plan in plans)

    return {
        "real_slots": mean("real_token_fraction"),
        "kept_pixels": 1.0,
        "kept_frames": 1.0,
        "dropped_items": 0.0,
        "synchronised": mean("synchronised"),
        "over_ideal": mean("over_ideal"),
        "shapes": len(spec.phases[DIFFUSION].classes),
        **{name: statistics.median(time[name] for time in times) for name in times[0]},
        "classes": [list(row_class) for row_class in spec.phases[DIFFUSION].classes],
    }


def measure_buckets(clips: float, ranks: int, items: int, seeds: int, seed: int) -> dict[str, Any]:
    """Figures of Open-Sora's buckets, whose batches are taken in random order."""
    kept_pixels = kept_frames = dropped = 0.0

    def batch(media: Media, order: np.random.Generator) -> list[Batch]:
        """The batches of an epoch; adds what its buckets keep and drop to the means."""
        nonlocal kept_pixels, kept_frames, dropped
        bucketed = bucket_media(media)
        batches, leftover = batches_of_buckets(bucketed.kept, *_bounds())
        kept_count = len(bucketed.kept)
        kept_pixels += bucketed.pixels / kept_count / seeds
        kept_frames += bucketed.frames / kept_count / seeds
        dropped += (len(media) - kept_count + leftover) / SAMPLED / seeds
        return [batches[index] for index in order.permutation(len(batches))]

    epoch_means = _measure_epochs(batch, clips, ranks, items, seeds, seed)
    return epoch_means | {
        "kept_pixels": kept_pixels,
        "kept_frames": kept_frames,
        "dropped_items": dropped,
    }


def measure_padded(clips: float, ranks: int, items: int, seeds: int, seed: int) -> dict[str, Any]:
    """Figures of batches of similar sizes, taken in the order of their sizes."""

    def batch(media: Media, order: np.random.Generator) -> list[Batch]:
        del order
        return batches_of_like_sizes(media, *_bounds())

    epoch_means = _measure_epochs(batch, clips, ranks, items, seeds, seed)
    return epoch_means | {"kept_pixels": 1.0, "kept_frames": 1.0, "dropped_items": 0.0}


def _measure_epochs(
    batch: Callable[[Media, np.random.Generator], list[Batch]],
    clips: float,
    ranks: int,
    items: int,
    seeds: int,
    seed: int,
) -> dict[str, Any]:
    """Mean figures over `seeds` epochs, each of `SAMPLED` times `items` items; a figure is None if
    no epoch has enough batches for a step.

    Args:
      batch: makes the batches of an epoch in the order in which ranks take them.
    """
    epochs = [
        figures(
            batch(
                draw([seed, MEASURED_STREAM, index], SAMPLED * items, clips),
                np.random.default_rng([seed, MEASURED_STREAM, index]),
            ),
            ranks,
            _bounds()[-1],
        )
        for index in range(seeds)
    ]
    values_by_name = {
        name: [epoch[name] for epoch in epochs if name in epoch]
        for name in ("real_slots", "synchronised", "over_ideal", "shapes")
    }
    return {
        name: statistics.fmean(values) if values else None
        for name, values in values_by_name.items()
    }


def _bounds() -> tuple[int, float, ItemCost]:
    """Bounds of a batch: the most slots and the largest cost; and the formula of the cost."""
    cost = phase_flops(MODEL, DIFFUSION, TRAINED)
    return MOST_SLOTS, float(cost.of(float(MOST_SLOTS))), cost


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    **{method: partial(measure_plans, method) for method in PLANNED},
    "buckets": measure_buckets,
    "padded_alike": measure_padded,
}


# ---------------------------------------------------------------------------- command


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--ranks", type=positive_int, default=64)
    parser.add_argument(
        "--items",
        type=positive_int,
        default=2048,
        help="items per step, over all ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=10, help="measured batches (default: %(default)s)"
    )
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=[*MIXES])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options = parser.parse_args(command)
    rows = []
    for mix in options.mixes:
        for method in options.methods:
            start = time.perf_counter()
            arguments = (MIXES[mix], options.ranks, options.items, options.seeds, options.seed)
            rows.append({"mix": mix, "method": method} | METHODS[method](*arguments))
            seconds = time.perf_counter() - start
            print(f"{mix}, {method} in {seconds:.0f} s", file=sys.stderr)
    show(rows)
    write_json(
        options.json,
        "diffusion",
        options.seed,
        GENERATOR,
        ranks=options.ranks,
        items=options.items,
        seeds=options.seeds,
        rows=rows,
    )
    return 0


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per mix and method."""
    share_names = ("real_slots", "kept_pixels", "kept_frames")
    columns = (
        "mix",
        "method",
        *share_names,
        "dropped_items",
        "synchronised",
        "over_ideal",
        "shapes",
    )
    table = [
        [
            *(row[name] for name in columns[:2]),
            *(_decimals(row[name]) for name in share_names),
            f"{row['dropped_items']:.1f}",
            *(_decimals(row[name]) for name in ("synchronised", "over_ideal")),
            round(row["shapes"]),
            row.get("plan_ms"),
            row.get("plan_cpu_ms"),
        ]
        for row in rows
    ]
    headers = [name.replace("_", " ") for name in (*columns, "plan_ms", "cpu")]
    print_table("Pictures and clips for a diffusion transformer", headers, table, left_aligned=2)


def _decimals(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


if __name__ == "__main__":
    sys.exit(main())
