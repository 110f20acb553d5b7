"""Everything about one GPU in one command: attention, programs, a step, the exchange, a profile.

    python -m benchmarks.gpu --json gpu.json [--seconds 480] [--only attention step ...] [--set key=value ...]
    JAX_PLATFORMS=cpu python -m benchmarks.gpu --small          tries out the code itself, with tiny sizes

Each section begins only if enough of the time is left for it. One that fails is printed with its
reason, and the next one runs:

    attention     forward and backward of rows of 4k to 64k slots: our kernels and cuDNN
                  (benchmarks/attention_gpu.py)
    spans         C queries that see the keys of 1, 2, 4 and 8 C slots: what a rank computes of a
                  row that as many ranks hold
    programs      the model's programs on full rows: seconds, MFU, and the memory that the compiler
                  says they need
    step          whole training steps on sample data: seconds, MFU, peak memory, and seconds and
                  MFU of each phase
    profile       a trace of one step, for TensorBoard and Perfetto
    calibration   the coefficients that `jaxmllm calibrate` would write
    exchange      media through the padded and the ragged exchange of one device: seconds, and a
                  check that the loss is the same
    prediction    memory that `jaxmllm check` predicts for the programs, next to what they need
    masks         ragged rows of every mask rule: errors of our kernels against float32 at the
                  highest precision, and whether their bits repeat

The model is `2B` of benchmarks/omni.py in bfloat16, with AdamW in float32. Any GPU with 80 GB, jax
0.10 to 0.12, Python 3.11 to 3.13. A machine without a network needs the packages brought along.
Where there is a network,

    pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d wheels \\
        absl-py flax grain jaxtyping jinja2 matplotlib ml-dtypes numba optax orbax-checkpoint pillow pydantic pyyaml \\
        rich scipy soundfile soxr tensorboardX threadpoolctl tokenizers

then leave out the wheels of jax, jaxlib and numpy that come with them, and those of packages that
the machine has; flax must be of the same age as jax (0.12.12 for jax 0.11). On the machine, where
jax runs on the GPU,

    pip install --no-index --no-deps --target packages wheels/*.whl
    PYTHONPATH=packages:. python -m benchmarks.gpu --json gpu.json
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention_gpu
from benchmarks.attention_gpu import (
    DOCUMENTS,
    SHAPES,
    Shape,
    errors,
    in_float32,
    random_inputs,
    record,
)
from benchmarks.omni import COMPUTE_DTYPE, omni_config
from jaxmllm.attention.attention import attention
from jaxmllm.attention.kernel_cudnn import Documents
from jaxmllm.attention.mask import Mask, causal_ids, document_runs, item_ids
from jaxmllm.attention.tiles import dealt_tiles, tile_lists, visible_tiles
from jaxmllm.balance.costs.calibration import Fill
from jaxmllm.balance.costs.flops import phase_flops
from jaxmllm.balance.records import RowClass
from jaxmllm.config.read import dump_config, load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.gpu_memory import take_gpu_memory
from jaxmllm.runtime.hardware import peak_flops
from jaxmllm.setup.ahead import memory_of
from jaxmllm.setup.build import build_run, phased_programs
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.sizing import plan_spec, resolved_shapes
from jaxmllm.tools import calibrate
from jaxmllm.tools.arguments import measuring_parser
from jaxmllm.tools.check import in_words
from jaxmllm.tools.made_up_rows import made_up_rows
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import Run
from jaxmllm.training.step_metrics import flops_by_phase
from sharding.mesh import make_mesh

Row = dict[str, Any]
GENERATOR: Final = "the sample data of `jaxmllm sample-data`, and made-up rows of equal items"
PHASES: Final = ("vision", "audio", "language")
SPANS: Final = (1, 2, 4, 8)
ITEMS: Final = 4  # in a full row
# Rows of at most this many slots also run kernel_jax, whose loops are slow, and are compared with
# float32
COMPARED: Final = 8192
# What `remat` keeps: whatever is slow to compute again and fits into the memory of one device
KEPT: Final = ("attention", "projections", "mlp")
RAGGED_RUNS: Final = 13  # stretches of a ragged row, each a document or padding
RAGGED_RULES: Final = ("causal", "window", "items", "images")
RAGGED_SHAPES: Final = (
    Shape(heads=4, key_heads=2, size=128),
    Shape(heads=3, key_heads=1, size=80, block=64),
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str
    slots: tuple[int, ...]  # lengths of the rows in section `attention`
    shapes: dict[str, Shape]  # heads and blocks in section `attention`
    ragged_slots: int
    span_slots: int
    rows: dict[str, Any]  # the config's `phases` section
    examples: int  # in a step
    steps: int
    repeats: int


FULL: Final = Sizes(
    model="2B",
    slots=(4096, 8192, 16_384, 32_768, 65_536),
    shapes=SHAPES,
    ragged_slots=2048,
    span_slots=8192,
    # One row class per phase keeps programs few; its size is chosen as in a run
    rows={phase: {"row_classes": 1} for phase in PHASES},
    examples=512,
    steps=6,
    repeats=5,
)
SMALL: Final = Sizes(
    model="tiny",
    slots=(128,),
    shapes={
        "decoder": Shape(heads=2, key_heads=1, size=16, block=16),
        "tower": Shape(heads=2, key_heads=2, size=16, block=16, causal=False),
    },
    ragged_slots=512,
    span_slots=64,
    rows={
        "vision": {"capacities": [512], "block": 32},
        "audio": {"capacities": [1024], "block": 32},
        "language": {"capacities": [512], "block": 32},
    },
    examples=8,
    steps=2,
    repeats=1,
)


class Bench:
    """Settings, data and programs that the sections share; each is made when a section first needs
    it."""

    def __init__(
        self,
        sizes: Sizes,
        folder: Path,
        deadline: float,
        seed: int,
        overrides: Sequence[str] = (),
    ):
        self.sizes = sizes
        self.folder = folder
        self.deadline = deadline  # on the clock of `time.perf_counter`
        self.seed = seed
        self.overrides = overrides  # key=value, of the config

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline of the whole command."""
        return self.deadline - time.perf_counter()

    def config(self, exchange: str = "auto") -> Config:
        """The config of the model on the sample data and one device; also written to a file."""
        sizes = self.sizes
        config = omni_config(
            sizes.model,
            run={"directory": str(self.folder / "run"), "steps": sizes.steps},
            data={
                "sources": [{"name": "sample", "path": str(self.data / "train.jsonl")}],
                "batch_size": sizes.examples,
                "images": {"max_pixels": 40_000},
                "audio": {"max_seconds": 5},
            },
            phases=sizes.rows,
            balance={"exchange": exchange},
            mesh={"data": 1},
            remat=list(KEPT),
        )
        path = self.folder / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        return load_config(path, self.overrides)

    @cached_property
    def data(self) -> Path:
        """Folder of the sample data, written once."""
        folder = self.folder / "sample"
        make_sample(folder, self.seed, train=4 * self.sizes.examples, test=8)
        return folder

    @cached_property
    def run(self) -> Run:
        """The run of the config, compiled."""
        start = time.perf_counter()
        run = build_run(self.config())
        print(f"compiled in {time.perf_counter() - start:.0f} s\n{run.describe()}", flush=True)
        return run

    @cached_property
    def programs(self) -> PhasedPrograms:
        programs = self.run.programs
        assert isinstance(programs, PhasedPrograms), "the config has no stages"
        return programs

    @cached_property
    def params(self) -> Any:
        """Fresh parameters, for programs that overwrite none."""
        return self.programs.init(self.seed).params

    @cached_property
    def peak(self) -> float | None:
        """Peak FLOP/s of the device; None where it is unknown."""
        return peak_flops(jax.devices()[0], COMPUTE_DTYPE)

    def mfu(self, flops: float, seconds: float) -> float | None:
        """Share of the device's peak that these FLOPs reach; None where the peak is unknown."""
        return None if self.peak is None else flops / seconds / self.peak


# ---------------------------------------------------------------------------- attention


class Case(NamedTuple):
    """Kernels to be measured on one row."""

    cells: Row  # first columns of their records
    mask: Mask
    inputs: attention_gpu.Inputs
    attends: dict[str, attention_gpu.Attend]  # by the kernel's name


Compiled = dict[str, attention_gpu.Passes | Exception]


def compiled(cases: Sequence[Case]) -> list[Compiled]:
    """The kernels of each case by name, all compiled concurrently."""
    passes = iter(
        attention_gpu.compile_all(
            [(attend, case.inputs) for case in cases for attend in case.attends.values()]
        )
    )
    return [{kernel: next(passes) for kernel in case.attends} for case in cases]


def mask_rows(bench: Bench) -> list[Row]:
    """Errors of the kernels on ragged rows (documents, padding, windows, images in text), and
    whether two calls give the same bits."""
    cases: list[Case] = []
    slots = bench.sizes.ragged_slots
    for case_index, (shape, rule) in enumerate(itertools.product(RAGGED_SHAPES, RAGGED_RULES)):
        random = np.random.default_rng([bench.seed, case_index])
        mask = ragged_mask(random, rule, slots, shape.block)
        inputs = random_inputs((bench.seed, case_index), slots, shape)
        attends = attention_gpu.attends(mask, RAGGED_RUNS)
        kernels = ("gpu", "packed") if mask.documents else ("gpu",)
        cells: Row = {"rule": rule, "heads": str(shape)}
        cases.append(Case(cells, mask, inputs, {kernel: attends[kernel] for kernel in kernels}))
    rows: list[Row] = []
    for case, kernels_of_case in zip(cases, compiled(cases), strict=True):
        references = in_float32(case.mask, case.inputs)
        for kernel, passes in kernels_of_case.items():
            cells = case.cells | {"kernel": kernel}
            try:
                measurement = attention_gpu.measure(passes, case.inputs, 1)
            except Exception as error:
                rows.append(cells | {"failed": reason(error)})
                continue
            relative_errors = errors(measurement.results, references)
            for direction in attention_gpu.FLOPS:
                cells[f"{direction} error"] = relative_errors[direction]
                cells[f"{direction} same bits"] = measurement.same_bits[direction]
            rows.append(cells)
    return rows


def ragged_mask(random: np.random.Generator, rule: str, slots: int, block: int) -> Mask:
    """The mask of one row of documents of random lengths, with padding between them.

    Args:
      rule: one of `RAGGED_RULES`.
    """
    boundaries = np.sort(random.choice(np.arange(1, slots), RAGGED_RUNS - 1, replace=False))
    run = np.repeat(np.arange(RAGGED_RUNS), np.diff(np.r_[0, boundaries, slots]))
    segments = np.where(run % 5 == 4, 0, run + 1).astype(np.int32)  # every fifth run is padding
    window = slots // RAGGED_RUNS if rule == "window" else None
    if rule == "items":
        ids = item_ids(segments)
    elif rule == "images":  # runs of 16 slots, every third of them an image
        image = np.arange(slots) // 16
        ids = causal_ids(segments, np.where(image % 3 == 0, image + 1, 0).astype(np.int32))
    else:
        ids = causal_ids(segments)
        ids = ids.within(window) if window else ids
    lists = tile_lists(visible_tiles(ids, block), slots // block, slots // block)
    runs = Documents(document_runs(segments[None], RAGGED_RUNS)[0], rule != "items", window)
    mask = Mask(ids, ids, lists.queries, lists.keys, None if rule == "images" else runs)
    return jax.tree.map(lambda array: jnp.asarray(array[None]), mask)


def attention_rows(bench: Bench) -> list[Row]:
    """Records of every kernel at every length: decoder heads on one document per row, tower heads
    on as many images as attention_gpu.py has. Lengths are compiled and measured one after another,
    while there is time."""
    # This section takes at most 40 % of the time that is left, because later sections need more
    stop = bench.deadline - 0.6 * bench.seconds_left
    rows: list[Row] = []
    for slots in bench.sizes.slots:
        if time.perf_counter() > stop:
            rows.append({"slots": slots, "failed": "no time left for it"})
        else:
            rows += attention_rows_of(bench, slots)
    return rows


def attention_rows_of(bench: Bench, slots: int) -> list[Row]:
    """Records of every kernel at one length."""
    cases: list[Case] = []
    facts: list[tuple[Shape, int, int]] = []  # for each case: shape, documents, visible tiles
    for name, shape in bench.sizes.shapes.items():
        documents = DOCUMENTS[name][0]
        mask, tiles = attention_gpu.equal_documents(slots, documents, shape.block, shape.causal)
        attends = attention_gpu.attends(mask, documents)
        if slots > COMPARED:
            del attends["jax"]  # its loops take minutes
        inputs = random_inputs((bench.seed, slots), slots, shape)
        cases.append(Case({"shape": name, "slots": slots}, mask, inputs, attends))
        facts.append((shape, documents, tiles))
    rows: list[Row] = []
    for case, (shape, documents, tiles), kernels in zip(cases, facts, compiled(cases), strict=True):
        references = in_float32(case.mask, case.inputs) if slots <= COMPARED else None
        for kernel, passes in kernels.items():
            try:
                repeats = min(attention_gpu.REPEATS[kernel], bench.sizes.repeats)
                measurement = attention_gpu.measure(passes, case.inputs, repeats)
            except Exception as error:
                rows.append(case.cells | {"kernel": kernel, "failed": reason(error)})
                continue
            relative_errors = {} if references is None else errors(measurement.results, references)
            rows.append(
                record(kernel, slots, documents, tiles, measurement, relative_errors, shape)
            )
    return rows


def span_rows(bench: Bench) -> list[Row]:
    """Times of one rank's part of a causal row that 1, 2, 4 and 8 ranks hold: its own queries, and
    the keys of all ranks."""
    shape = bench.sizes.shapes["decoder"]
    slots = bench.sizes.span_slots
    cases: list[Case] = []
    for span in SPANS:
        mask, tiles = part_of_row(slots, span, shape.block)
        inputs = random_inputs((bench.seed, slots, span), slots, shape, keys=span * slots)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask = mask) -> jax.Array:
            return attention(q, k, v, mask)

        cells = {"span": span, "slots": slots, "keys": span * slots, "tiles": tiles}
        cases.append(Case(cells, mask, inputs, {"auto": attend}))
    rows: list[Row] = []
    for case, kernels in zip(cases, compiled(cases), strict=True):
        seconds = attention_gpu.measure(kernels["auto"], case.inputs, bench.sizes.repeats).seconds
        times = {f"{direction} ms": 1e3 * duration for direction, duration in seconds.items()}
        rows.append(case.cells | times)
    for row in rows:
        for direction in attention_gpu.FLOPS:
            slowdown = row[f"{direction} ms"] / rows[0][f"{direction} ms"]
            row[f"{direction} over tiles"] = slowdown * rows[0]["tiles"] / row["tiles"]
    return rows


def part_of_row(slots: int, span: int, block: int) -> tuple[Mask, int]:
    """The mask of the last of `span` parts of a causal row of span * slots, whose blocks are
    assigned to the parts in turn; and its number of visible tiles."""
    blocks = span * slots // block
    row_ids = causal_ids(np.ones(span * slots, np.int32))
    tiles = visible_tiles(row_ids, block)
    # Block i goes to part i % span; `positions[i]` is its position when parts follow one another
    part_index = np.arange(blocks) % span
    offset = np.arange(blocks) // span
    positions = (part_index * (blocks // span) + offset).astype(np.int32)
    lists = dealt_tiles(tiles, positions, span)[-1]
    order = np.argsort(positions)
    ordered_ids = row_ids.map(lambda column: column.reshape(blocks, block)[order].ravel())
    part_ids = ordered_ids.at(slice((span - 1) * slots, None))
    mask = Mask(part_ids, ordered_ids, lists.queries, lists.keys)
    tile_count = int((tiles.query % span == span - 1).sum())
    return jax.tree.map(lambda array: jnp.asarray(array[None]), mask), tile_count


# ---------------------------------------------------------------------------- programs and steps


def program_rows(bench: Bench) -> list[Row]:
    """Times of every phase on a full row, forward and with the backward pass; then the memory of
    every program."""
    rows: list[Row] = []
    programs = bench.programs
    config = bench.run.config
    model = programs.functions.model
    shapes = resolved_shapes(config, model)
    for phase, spec in programs.spec.phases.items():
        unit = math.lcm(spec.slots_per_token, getattr(config.phases, phase).block)
        (capacity,) = spec.capacities
        fill = Fill(capacity, ITEMS, capacity // ITEMS // unit * unit)
        host = made_up_rows(bench.run, phase, fill)
        timer = calibrate.MicrobatchTimer(programs, phase, bench.params)
        timed = [timer(RowClass(capacity, 1), host) for _ in range(bench.sizes.repeats + 1)][1:]
        for name, trained_shares, seconds in zip(
            ("forward", "with backward"),
            ({}, model.trainable.shares),
            zip(*timed, strict=True),
            strict=True,
        ):
            pass_seconds = statistics.median(seconds)
            flops = ITEMS * phase_flops(shapes, phase, trained_shares).of(fill.length)
            rows.append(
                {
                    "phase": phase,
                    "pass": name,
                    "slots": capacity,
                    "ms": 1e3 * pass_seconds,
                    "teraflops": flops / 1e12,
                    "mfu": bench.mfu(flops, pass_seconds),
                }
            )
    for program, compiled in programs.compiled.items():
        memory = memory_of(compiled)
        if program.function != "zero" and memory is not None:
            rows.append(
                {
                    "program": in_words(program),
                    "temporary_gb": memory.temporaries / 1e9,
                    "needed_gb": memory.needed / 1e9,
                }
            )
    return rows


def step_rows(bench: Bench) -> list[Row]:
    """Times of whole steps, then of each phase by itself."""
    run = bench.run
    programs = bench.programs
    bench.__dict__.pop("params", None)  # frees their memory: the state has parameters of its own
    state = programs.init(bench.seed)
    times = []
    for step in range(bench.sizes.steps + 1):
        host = run.batches[step]
        batch = programs.put(host)
        jax.block_until_ready((batch.rows, batch.tables))
        start = time.perf_counter()
        state, metrics = programs.train(state, batch)
        jax.block_until_ready((state, metrics))
        elapsed = time.perf_counter() - start
        phases = programs.spec.phases
        flops = flops_by_phase(host.statistics, phases, host.targets, run.head_flops)
        times.append((elapsed, flops))
    counted_steps = times[1:]  # the first one warms up
    seconds = statistics.median(elapsed for elapsed, _ in counted_steps)
    mean_flops = statistics.fmean(sum(step_flops.values()) for _, step_flops in counted_steps)
    rows: list[Row] = [
        {
            "phase": "step",
            "seconds": seconds,
            "mfu": bench.mfu(mean_flops, seconds),
            "loss": float(metrics["loss"]),
            "peak_gb": peak_memory(),
        }
    ]
    for phase in programs.spec.phases:
        elapsed = sum(phase_seconds(programs, phase, state.params, batch))
        rows.append(
            {
                "phase": phase,
                "seconds": elapsed,
                "microbatches": len(batch.rows[phase]),
                "real tokens": host.statistics[f"{phase}/real_token_fraction"],
                "mfu": bench.mfu(flops[phase], elapsed) if elapsed else None,
            }
        )
    return rows


def phase_seconds(programs: PhasedPrograms, phase: str, params: Any, batch: Any) -> list[float]:
    """Seconds of every microbatch of a phase in a batch, forward and backward as in training."""
    seconds = []
    buffers = programs.buffers(phase)
    for m, rows in enumerate(batch.rows[phase]):
        host = batch.host
        row_class = RowClass(host.capacities[phase][m], host.spans[phase][m])
        jax.block_until_ready((params, rows, buffers))
        start = time.perf_counter()
        # A phase without a forward program runs forward inside its backward program
        if programs.functions_of(phase).forward:
            buffers = programs.forward(phase, params, rows, row_class, buffers, m)
        buffers = jax.block_until_ready(programs.backward(phase, params, rows, row_class, buffers))
        seconds.append(time.perf_counter() - start)
    return seconds


def peak_memory() -> float | None:
    """Most GB that the device has held since this process began; None where it does not say."""
    memory_stats = jax.devices()[0].memory_stats() or {}
    peak = memory_stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 1e9


def profile_rows(bench: Bench) -> list[Row]:
    """Write a trace of one step; the record says where it is, and its size."""
    programs = bench.programs
    state = programs.init(bench.seed)
    batch = programs.put(bench.run.batches[0])
    folder = bench.folder / "profile"
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(programs.train(state, batch))
    trace_files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in trace_files)
    return [{"folder": str(folder), "files": len(trace_files), "megabytes": size / 1e6}]


def calibration_rows(bench: Bench) -> list[Row]:
    """The calibrated coefficients of every phase."""
    calibration = calibrate.measure(bench.run, min(2, bench.sizes.repeats))
    names = [name.replace(" ", "_") for name in calibrate.COLUMNS]
    return [dict(zip(names, line, strict=True)) for line in calibrate.table(calibration)]


def exchange_rows(bench: Bench) -> list[Row]:
    """Times of the tiny model's gradients through each exchange, and whether several calls give the
    same bits. Raises AssertionError if the losses differ."""
    # A folder of its own keeps the sample of `bench` as it is: `prediction`, which runs later,
    # chooses its sizes from that sample
    folder = bench.folder / "exchange"
    tiny = Bench(replace(SMALL, examples=32), folder, bench.deadline, bench.seed)
    rows: list[Row] = []
    for exchange in ("padded", "ragged"):
        try:
            config = tiny.config(exchange)
            inputs = prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:1]))
            spec = plan_spec(config, inputs)
            sources = len(inputs.corpus.sources)
            programs = phased_programs(
                config, inputs.model, inputs.corpus.formats, spec, sources
            ).compile()
            filler = StepFiller(inputs.corpus, spec, programs.local_share, programs.attention)
            batch = programs.put(filler(0, np.arange(config.data.batch_size)))
            params = programs.init(bench.seed).params
            times = []
            results = []
            for _ in range(bench.sizes.repeats + 1):
                start = time.perf_counter()
                gradients, sums, _ = jax.block_until_ready(programs.gradients(params, batch))
                times.append(time.perf_counter() - start)
                results.append(jax.tree.map(np.asarray, gradients))
            same = all(
                jax.tree.all(jax.tree.map(np.array_equal, results[0], repeated))
                for repeated in results
            )
            rows.append(
                {
                    "exchange": exchange,
                    "ms": 1e3 * statistics.median(times[1:]),
                    "loss": float(programs.totals(sums).loss.sum()),
                    "same bits": same,
                }
            )
        except Exception as error:  # an exchange that this platform does not have
            rows.append({"exchange": exchange, "failed": reason(error)})
    losses = [row["loss"] for row in rows if "loss" in row]
    if losses and not np.allclose(losses, losses[0], rtol=1e-4):
        raise AssertionError(f"the exchanges disagree: losses {losses}")
    return rows


def prediction_rows(bench: Bench) -> list[Row]:
    """Memory of every program, next to what `jaxmllm check` predicts: that compiles for a chip that
    is not there, in a process that does not see the GPU."""
    config = bench.folder / "predicted.yaml"
    config.write_text(dump_config(bench.run.config), encoding="utf-8")
    chip = "h100" if jax.default_backend() == "gpu" else "cpu"
    check_path = bench.folder / "check.json"
    command = [sys.executable, "-m", "jaxmllm", "check", "--config", str(config), "--chip", chip]
    completed = subprocess.run(
        [*command, "--devices", "1", "--json", str(check_path)],
        capture_output=True,
        text=True,
        timeout=max(bench.seconds_left, 10),
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if not check_path.exists():
        raise RuntimeError(
            completed.stderr.strip().splitlines()[-1] if completed.stderr else "no answer"
        )
    predicted = {
        row["program"]: row["memory"]
        for row in json.loads(check_path.read_text())["rows"]
        if "memory" in row
    }
    rows: list[Row] = []
    for name, compiled in bench.programs.compiled.items():
        words = in_words(name)
        memory = memory_of(compiled)
        if name.function == "zero" or memory is None:
            continue
        if words not in predicted:
            rows.append({"program": words, "failed": "`jaxmllm check` has no such program"})
            continue
        rows.append(
            {
                "program": words,
                "needed_gb": memory.needed / 1e9,
                "predicted_gb": predicted[words]["needed"] / 1e9,
                "temporary_gb": memory.temporaries / 1e9,
                "predicted_temporary_gb": predicted[words]["temporaries"] / 1e9,
            }
        )
    return rows


# ---------------------------------------------------------------------------- the command

# Sections in the order in which they run, each with the seconds that must be left for it to begin
SECTIONS: Final[dict[str, tuple[Callable[[Bench], list[Row]], float]]] = {
    "attention": (attention_rows, 60),
    "spans": (span_rows, 30),
    "programs": (program_rows, 90),
    "step": (step_rows, 40),
    "profile": (profile_rows, 20),
    "calibration": (calibration_rows, 30),
    "exchange": (exchange_rows, 40),
    "prediction": (prediction_rows, 30),
    "masks": (mask_rows, 40),
}


def measure(bench: Bench, sections: Sequence[str]) -> list[Row]:
    """Records of all sections, printed as each section ends; a section that failed has one record
    with its reason."""
    rows: list[Row] = []
    for name in sections:
        section, needed_seconds = SECTIONS[name]
        start = time.perf_counter()
        if bench.seconds_left < needed_seconds:
            section_rows: list[Row] = [
                {"failed": f"{bench.seconds_left:.0f} s are left, it needs {needed_seconds:.0f}"}
            ]
        else:
            try:
                section_rows = section(bench)
            except Exception as error:  # of any kind: the other sections must still run
                section_rows = [{"failed": reason(error)}]
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        show(name, section_rows)
        rows += [{"section": name} | row for row in section_rows]
    return rows


def reason(error: Exception) -> str:
    """An error in one line of text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def show(name: str, rows: Sequence[Row]) -> None:
    """Print a table for all records with the same columns, and a line for each that did not run."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if "failed" in row:
            description = " ".join(str(value) for key, value in row.items() if key != "failed")
            print(f"  could not run {description or name}: {row['failed']}", flush=True)
        else:
            tables.setdefault(tuple(row), []).append(row)
    for columns, table_rows in tables.items():
        print_table(name, columns, [[row[column] for column in columns] for row in table_rows])


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=480,
        help="time limit of the whole command (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, help="sections to run (default: all)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="replace values of the config"
    )
    parser.add_argument(
        "--small", action="store_true", help="run every section with tiny sizes, on any platform"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for sample data and profile (default: a temporary one)"
    )
    options = parser.parse_args(command)
    deadline = time.perf_counter() + options.seconds
    take_gpu_memory()
    if jax.default_backend() != "gpu" and not options.small:
        print(
            f"benchmarks.gpu needs a GPU; jax finds only {jax.default_backend()}", file=sys.stderr
        )
        return 2
    if jax.device_count() > 1:
        print(
            f"benchmarks.gpu measures one device, and jax finds {jax.device_count()}: choose one, "
            "as by CUDA_VISIBLE_DEVICES=0",
            file=sys.stderr,
        )
        return 2
    folder = options.folder or Path(tempfile.mkdtemp(prefix="benchmarks-gpu-"))
    sizes = SMALL if options.small else FULL
    bench = Bench(sizes, folder, deadline, options.seed, options.set)
    rows = measure(bench, options.only or list(SECTIONS))
    failures = [row for row in rows if "failed" in row]
    settings: Row = {"seconds": options.seconds, "set": options.set}
    write_json(options.json, "gpu", options.seed, GENERATOR, rows=rows, **settings)
    print(
        f"{len(rows)} records in {options.seconds - bench.seconds_left:.0f} s, "
        f"{len(failures)} failed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
