"""Simulated steps next to measured ones: settings of a small model on eight CPU devices that share
this machine's cores.

    rows measured    16 settings and more; the cluster is fitted (`fitted`) to three of them

The model and the data are those of configs/quickstart.yaml, with data generated from the seed;
widths and batch are larger, so that computing outweighs dispatch. All settings train on the same
batch and take turns step by step. A step's seconds are the median over turns of the CPU time of the
process, divided by the number of cores, so that other work on the machine counts little. Three
settings calibrate: one that splits nothing, one that gathers weights, and one with pipeline stages.
The peak is measured after all steps.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import jax

from jaxmllm.balance.records import BatchItems, StepPlan
from jaxmllm.balance.stages.plan import plan_pipeline
from jaxmllm.balance.step_plan import plan_step
from jaxmllm.cluster.clusters import CLUSTERS, Cluster
from jaxmllm.cluster.device_seconds import Device
from jaxmllm.cluster.fitting import MeasuredStep, fitted
from jaxmllm.cluster.simulate import simulate
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.runtime.distributed import reserve_cpu_threads
from jaxmllm.runtime.hardware import measured_cpu_flops
from jaxmllm.setup.build import plan_programs
from jaxmllm.setup.prepare import prepare
from jaxmllm.setup.spans import node_spans
from jaxmllm.tools.output import print_table
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.programs.base import Programs, compile_jobs
from sharding.mesh import make_mesh

MEASURED: Final = "measured"
DEVICES: Final = 8
CONFIG: Final = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
EXAMPLES: Final = 1024  # of the sample data
# Sources of the sample data that are kept: two phases compile in half the time of three
SOURCES: Final = ("picture", "text")
BASE: Final = (
    "model.audio=null",
    "model.vision.width=192",
    "model.vision.mlp_width=768",
    "model.language.width=256",
    "model.language.layers=4",
    "model.language.head_size=64",
    "model.language.mlp_width=1024",
    "model.language.rope_sections=[8,12,12]",
    "phases.vision.kept_residuals=0",
    "data.batch_size=32",
)
PHASES: Final = ("vision", "language")
ROWS: Final = (512, 512)  # slots: four devices that share a row each get whole attention blocks


def mesh(**axes: int) -> tuple[str, ...]:
    """Overrides that set the mesh; axes that are not given have one device."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | axes
    return tuple(f"mesh.{axis}={size}" for axis, size in sizes.items())


def stages(count: int, **axes: int) -> tuple[str, ...]:
    return (*mesh(**axes), f"pipeline.stages={count}")


def remat(kind: str) -> tuple[str, ...]:
    return tuple(f"components.{phase}.remat={kind}" for phase in PHASES)


def rows(*slots: int) -> tuple[str, ...]:
    """Overrides that set the row capacity of each phase, in the order of `PHASES`."""
    return tuple(
        f"phases.{phase}.capacities=[{capacity}]"
        for phase, capacity in zip(PHASES, slots, strict=True)
    )


SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "data 8": mesh(data=8),
    "fsdp 8": mesh(fsdp=8),
    "data 4, tensor 2": mesh(data=4, tensor=2),
    "data 4, fsdp 2": mesh(data=4, fsdp=2),
    "fsdp 4, tensor 2": mesh(fsdp=4, tensor=2),
    "data 4, context 2": mesh(data=4, context=2),
    "fsdp 2, context 4": mesh(fsdp=2, context=4),
    "2 stages, data 4": stages(2, data=4),
    "2 stages, fsdp 4": stages(2, fsdp=4),
    "4 stages, data 2": stages(4, data=2),
    "data 8, remat none": (*mesh(data=8), *remat("none")),
    "fsdp 8, remat none": (*mesh(fsdp=8), *remat("none")),
    "fsdp 8, remat dots": (*mesh(fsdp=8), *remat("dots")),
    "data 8, short rows": (*mesh(data=8), *rows(256, 256)),
    "fsdp 8, short rows": (*mesh(fsdp=8), *rows(256, 256)),
    "data 8, long rows": (*mesh(data=8), *rows(1024, 1024)),
    "data 8, mode none": (*mesh(data=8), "balance.mode=none"),
    "fsdp 8, mode language": (*mesh(fsdp=8), "balance.mode=language"),
}
CALIBRATING: Final = ("data 8", "fsdp 8", "2 stages, data 4")


@dataclass
class Setting:
    """One of `SETTINGS`, ready to run and to be simulated."""

    name: str
    programs: Programs
    plan: StepPlan
    items: BatchItems
    batch: Any  # on the devices
    state: Any

    @classmethod
    def of(cls, name: str, config: Config) -> Setting:
        """Compile its programs; plan and transfer the first batch after those from which sizes were
        chosen."""
        inputs = prepare(
            config, make_mesh(config.mesh_sizes, spans=node_spans(config, config.mesh_sizes))
        )
        programs, sizes = plan_programs(config, inputs)
        trained_names = (name for name in programs.jobs if name.function != "evaluate")
        programs.compiled = compile_jobs({name: programs.jobs[name] for name in trained_names})
        jax.clear_caches()  # the traces of all settings together would take gigabytes
        pipeline = sizes.training if sizes else None
        examples = batch_examples(inputs.order, config.data.batch_size, len(inputs.samples))
        items = inputs.corpus.gather(examples)
        spec = programs.spec
        plan = plan_pipeline(items, spec, pipeline) if pipeline else plan_step(items, spec)
        filler = StepFiller(inputs.corpus, spec, programs.local_share, programs.attention, pipeline)
        batch = programs.put(filler(0, examples))
        return cls(name, programs, plan, items, batch, programs.init(config.run.seed))

    def step(self) -> tuple[float, float]:
        """Train on the batch; return wall seconds, and CPU seconds of this process on all cores."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        cpu_start = time.process_time()
        self.state, metrics = self.programs.train(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start, time.process_time() - cpu_start

    @property
    def ticks(self) -> int:
        return sum(len(run.table) for run in self.plan.runs)

    def predicted(self, cluster: Cluster) -> float:
        device = Device(cluster, cluster.efficiency.share, dtype="float32")
        return simulate(self.programs, self.plan, self.items, device).seconds


def force_devices() -> None:
    """Make JAX see eight CPU devices. Call this before anything asks for devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    reserve_cpu_threads()


def measured_rows(
    turns: int, names: Sequence[str] = tuple(SETTINGS), seed: int = 0
) -> list[dict[str, Any]]:
    """Measured and predicted rows of every setting, on data of a seed. Call `force_devices`
    before."""
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder), seed)
        settings = [Setting.of(name, _config(folder, name)) for name in names]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for round_index in range(turns + 1):
            for setting in settings if round_index % 2 else settings[::-1]:
                times[setting.name].append(setting.step())
    rows = rows_of(settings, {name: step_times[1:] for name, step_times in times.items()})
    show(rows)
    return rows


def rows_of(
    settings: Sequence[Setting], times: Mapping[str, Sequence[tuple[float, float]]]
) -> list[dict[str, Any]]:
    """Rows of measured times and of predictions, from a cluster fitted to the `CALIBRATING`
    settings.

    Args:
      times: wall and CPU seconds of every counted step, by setting.
    """
    cores = len(os.sched_getaffinity(0))
    by_name = {
        name: [cpu_seconds / cores for _, cpu_seconds in samples] for name, samples in times.items()
    }
    medians = {name: statistics.median(samples) for name, samples in by_name.items()}
    peak = DEVICES * measured_cpu_flops("float32")
    cluster = fitted(
        CLUSTERS["cpu"].model_copy(update={"peak_flops": peak}),
        [
            MeasuredStep(medians[setting.name], setting.predicted, setting.ticks)
            for setting in settings
            if setting.name in CALIBRATING
        ],
    )
    print(f"fitted: {cluster.efficiency}, {cluster.in_node}, tick_seconds={cluster.tick_seconds}")
    rows = []
    for setting in settings:
        samples = by_name[setting.name]
        low, _, high = statistics.quantiles(samples, n=4)
        measured_seconds = medians[setting.name]
        predicted_seconds = setting.predicted(cluster)
        rows.append(
            {
                "kind": MEASURED,
                "setting": setting.name,
                "predicted_s": predicted_seconds,
                "measured_s": measured_seconds,
                "error": predicted_seconds / measured_seconds - 1,
                "spread": (high - low) / measured_seconds,
                "wall_s": statistics.median(wall for wall, _ in times[setting.name]),
                "calibrates": setting.name in CALIBRATING,
            }
        )
    return rows


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How well predictions order the settings that do not calibrate, and how large the errors are.

    Returns:
      `pairs`: pairs of settings whose measured times differ by more than the larger spread.
      `tau`: Kendall's, over these pairs.
      `first`: measured time of the setting that is predicted to be fastest, over the least measured
        time, less 1.
      `median`: median size of the errors.
      `range`: largest over least measured time.
    """
    predicted_rows = [row for row in rows if not row["calibrates"]]
    signs = []
    for first_row, second_row in combinations(predicted_rows, 2):
        gap = first_row["measured_s"] - second_row["measured_s"]
        spread = max(row["spread"] * row["measured_s"] for row in (first_row, second_row))
        if abs(gap) > spread:
            signs.append(
                1 if gap * (first_row["predicted_s"] - second_row["predicted_s"]) > 0 else -1
            )
    measured_times = [row["measured_s"] for row in predicted_rows]
    predicted_fastest = min(predicted_rows, key=lambda row: row["predicted_s"])
    return {
        "pairs": len(signs),
        "tau": statistics.fmean(signs),
        "first": predicted_fastest["measured_s"] / min(measured_times) - 1,
        "median": statistics.median(abs(row["error"]) for row in predicted_rows),
        "range": max(measured_times) / min(measured_times),
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the rows, and their `agreement`."""
    lines = [
        [
            row["setting"] + (" (calibrates)" if row["calibrates"] else ""),
            row["measured_s"],
            row["predicted_s"],
            f"{100 * row['error']:+.1f} %",
            row["spread"],
            row["wall_s"],
        ]
        for row in rows
    ]
    columns = ["setting", "measured s", "predicted s", "error", "spread", "wall s"]
    print_table("measured", columns, lines, left_aligned=1)
    print(", ".join(f"{name} {value:.3g}" for name, value in agreement(rows).items()))


def make_data(folder: Path, seed: int) -> None:
    """Write sample data, and keep only the training examples without sound."""
    make_sample(folder, seed, EXAMPLES, 4)
    file = folder / "train.jsonl"
    records = file.read_text(encoding="utf-8").splitlines(keepends=True)
    silent_records = (record for record in records if json.loads(record)["source"] in SOURCES)
    file.write_text("".join(silent_records), encoding="utf-8")


def _config(folder: str, name: str) -> Config:
    data = (
        f"data.root={folder}",
        "data.sources=[{name: sample, path: train.jsonl}]",
        "data.evaluation=[]",
    )
    return load_config(CONFIG, [*BASE, *rows(*ROWS), *data, *SETTINGS[name]])
