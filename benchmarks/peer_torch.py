"""A whole training step on CPU next to the steps that users of PyTorch run on the same examples:
seconds, and where they go.

    python -m benchmarks.peer_torch [--size 40m | quickstart] [--data FOLDER] [--json PATH] [key=value ...]

Needs `pip install torch transformers`; without them says so in a line and exits with 2. FOLDER
holds a train.jsonl (like that of configs/real-small.yaml); without it the examples are generated:
those of `jaxmllm sample-data` for the size `quickstart`, else with the sizes of
jaxmllm/tools/workload.py, eight times smaller.

    whole      transformers: a SigLIP 2 tower for native resolutions, Whisper's layers after two
               strided convolutions, a Llama; SDPA and padding masks. All examples of a step are one
               batch, padded to its longest item: the default of a collator
    padded     the same in micro-batches in the order of the data, each padded to its longest item
    grouped    the same with the step's examples sorted by length first; as one batch it would be
               `whole`
    packed     our mathematics from our parameters, over the tokens of a micro-batch end to end,
               with SDPA segment by segment or with the segments gathered into a padded batch,
               whichever is faster; the head runs on targets alone
    ours       the programs of a run on one CPU device: plan, rows, and step. The programs are
               compiled beforehand in another process, and each has run once before a timed step
               needs it

A step is forward, backward, clipping and AdamW (PyTorch's fused one) in float32, on the same
examples for all. Media are decoded before the clock starts; padding, packing, planning and filling
rows are timed. PyTorch's micro-batches, except those of `whole`, have the number of examples that
is fastest on the first batch: the best choice of its users. Ours keeps what takes long to compute
again (`remat: [attention, projections, mlp]`), and text alone is causal (`bidirectional` empty), so
that `packed` has the same loss. That is checked, and so are the numbers of parameters (to 1 %) and
of targets.

All systems run on the same cores. PyTorch has a process of its own; it waits while ours runs, and
the other way round. Steps take turns, so that a slow moment of the machine affects all. `x ours` is
the median over steps of a peer's seconds over ours, on the same batch.

On a machine under other load, PyTorch's two threads wait for each other and its seconds mean
nothing: measure with `--threads 1`, and compare CPU seconds.

`parts` are medians of CPU seconds. Ours are those of each program by itself, waited for.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.balance_step import RowsOf, quartiles
from benchmarks.peers.examples import Example, KeptCorpus, write_generated
from benchmarks.peers.own_run import compile_alone, compiled_programs, run_before
from jaxmllm.balance.records import RowClass
from jaxmllm.config import strict_yaml
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import batch_examples
from jaxmllm.data.rows.fill import HostStep, StepFiller
from jaxmllm.tools.arguments import measuring_parser, positive_int
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.sample_data import make_sample
from jaxmllm.training.optimizer import learning_rate
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import USER_ERRORS

# Peers whose micro-batches have a size that is either tuned or given on the command line
IN_MICRO_BATCHES: Final = ("padded", "grouped", "packed")
PEERS: Final = ("whole", *IN_MICRO_BATCHES)
NEEDED: Final = ("torch", "transformers")
WARM_UP: Final = 1  # first steps, not counted
SMALLER: Final = 8.0  # examples are this many times smaller than the workload generator's
EXAMPLES: Final = 1024  # generated examples
SAME_PARAMETERS: Final = 0.01  # largest relative difference of a component's parameters
SAME_LOSS: Final = 1e-3  # largest relative difference of first losses
GENERATOR: Final = "batches of the run after those that its sizes were chosen from"
QUICKSTART: Final = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

SIZES: Final[Mapping[str, dict[str, Any]]] = {
    "40m": {
        "model": {
            "vision": {"width": 256, "layers": 4, "heads": 4, "mlp_width": 768},
            "audio": {
                "width": 256,
                "layers": 4,
                "heads": 4,
                "mlp_width": 768,
                "mel_bins": 80,
                "chunk_frames": 32,
            },
            "language": {
                "width": 512,
                "layers": 10,
                "heads": 8,
                "kv_heads": 4,
                "head_size": 64,
                "mlp_width": 1536,
            },
        },
        "data": {
            "batch_size": 16,
            "images": {"max_pixels": 200_000},
            "audio": {"max_seconds": 60},
            "max_rejected": 0.05,
        },
        "phases": {"vision": {"block": 64}, "audio": {"block": 32}, "language": {"block": 64}},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 20, "weight_decay": 0.05},
    },
    "tiny": {  # for trying out the code itself
        "model": {
            "vision": {"width": 96, "layers": 1, "heads": 2, "mlp_width": 192},
            "audio": {
                "width": 96,
                "layers": 1,
                "heads": 2,
                "mlp_width": 192,
                "mel_bins": 40,
                "chunk_frames": 32,
            },
            "language": {
                "width": 96,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "head_size": 24,
                "mlp_width": 192,
            },
        },
        "data": {"batch_size": 8},
        "phases": {"vision": {"block": 32}, "audio": {"block": 32}, "language": {"block": 32}},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4, "weight_decay": 0.05},
    },
}


def config_of(
    size: str, data: Path | None, folder: Path, seed: int, overrides: Sequence[str]
) -> Config:
    """The config of a size on one device. Without `data`, examples are generated in the folder."""
    tree = copy.deepcopy(strict_yaml.read_file(QUICKSTART) if size == "quickstart" else SIZES[size])
    tree["run"] = {"directory": str(folder / "run"), "steps": 1000, "seed": seed}
    tree["mesh"] = {"data": 1}
    component_settings = {"remat": ["attention", "projections", "mlp"]}
    tree["components"] = {
        "vision": component_settings,
        "audio": component_settings,
        "language": component_settings,
    }
    tree["model"]["language"]["bidirectional"] = []
    for section in ("evaluation", "checkpoint"):
        tree.pop(section, None)
    generated_folder = folder / "data"
    tree["data"] = {name: value for name, value in tree["data"].items() if name != "evaluation"} | {
        "root": str(data or generated_folder),
        "sources": [{"name": "train", "path": "train.jsonl"}],
        "index_cache": str(folder / "indexes"),
    }
    path = folder / "config.yaml"
    path.write_text(strict_yaml.write_text(tree), encoding="utf-8")
    config = load_config(path, overrides)
    if data is None and size == "quickstart":
        make_sample(generated_folder, seed, train=EXAMPLES, test=4)
    elif data is None:
        write_generated(generated_folder, seed, EXAMPLES, config.model, SMALLER)
    return config


# ---------------------------------------------------------------------------- ours


class Ours:
    """Our run on one device, step by step."""

    def __init__(self, programs: PhasedPrograms, corpus: KeptCorpus, seed: int):
        self.programs = programs
        self.filler = StepFiller(corpus, programs.spec, programs.local_share, programs.attention)
        self.state = programs.init(seed)
        self.step = 0
        self.programs_run: set[RowsOf] = set()

    def __call__(self, examples: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Run a step; return the seconds of the step and of the host's part, the loss, and the
        filled rows."""
        start = time.perf_counter()
        cpu = time.process_time()
        host = self.filler(self.step, examples)
        fill_seconds = time.perf_counter() - start
        fill_cpu = time.process_time() - cpu
        run_before(self.programs, self.state.params, host, self.programs_run)
        start = time.perf_counter()
        cpu = time.process_time()
        self.state, metrics = self.programs.train(self.state, self.programs.put(host))
        jax.block_until_ready((self.state, metrics))
        train_seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        self.step += 1
        return {
            "seconds": fill_seconds + train_seconds,
            "cpu_seconds": fill_cpu + cpu,
            "parts": {"host": fill_cpu},
            "loss": float(metrics["loss"]),
            "targets": host.targets,
            "host": host,
        }

    def seconds_by_program(self, host: HostStep) -> dict[str, float]:
        """CPU seconds of the programs that encode or compute gradients, on one batch, each waited
        for."""
        programs = self.programs
        batch = programs.put(host)
        seconds: dict[str, float] = defaultdict(float)
        for phase in programs.spec.phases:
            buffers = programs.buffers(phase)
            for m, rows in enumerate(batch.rows[phase]):
                row_class = RowClass(host.capacities[phase][m], host.spans[phase][m])
                arguments = phase, self.state.params, rows, row_class
                jax.block_until_ready((rows, buffers))
                start = time.process_time()
                if programs.functions_of(phase).forward:
                    buffers = jax.block_until_ready(programs.forward(*arguments, buffers, m))
                    seconds[f"{phase} forward"] += time.process_time() - start
                    start = time.process_time()
                buffers = jax.block_until_ready(programs.backward(*arguments, buffers))
                seconds[f"{phase} forward and backward"] += time.process_time() - start
        return dict(seconds)

    def padding(self, host: HostStep) -> dict[str, float]:
        """Slots of the rows over slots that hold data, by phase; NaN for a phase without data."""
        ratios = {}
        for phase, rows in host.rows.items():
            slots = sum(row["segments"].size for row in rows)
            real_slots = sum(int((row["segments"] > 0).sum()) for row in rows)
            ratios[phase] = slots / real_slots if real_slots else math.nan
        return ratios


# ---------------------------------------------------------------------------- measuring


def measure(config: Config, steps: int, sizes: Mapping[str, int], threads: int) -> dict[str, Any]:
    """Measurements of every step, by system.

    Args:
      sizes: examples in a micro-batch, for peers that must not choose.
    """
    from benchmarks.peers.torch_steps import serve

    tell("compiles ours")
    compile_alone(config)
    tell("reads lengths and the programs of ours")
    inputs, programs = compiled_programs(config)
    corpus = KeptCorpus(inputs.corpus)
    own_run = Ours(programs, corpus, config.run.seed)
    params = jax.tree.map(np.asarray, own_run.state.params)
    rates = [
        float(learning_rate(config.optimizer, config.decay_steps, jnp.int32(step)))
        for step in range(WARM_UP + steps)
    ]
    context = multiprocessing.get_context("spawn")
    connection, peer_connection = context.Pipe()
    seed = config.run.seed
    arguments = (
        peer_connection,
        config.model,
        config.optimizer,
        rates,
        params,
        sizes,
        threads,
        seed,
    )
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    tell("read ours; PyTorch chooses its micro-batches")
    peer_connection.close()
    results_by_system: dict[str, list[dict[str, Any]]] = {name: [] for name in (*PEERS, "ours")}
    by_program: list[dict[str, float]] = []
    settings: dict[str, Any] = {}
    for step in range(WARM_UP + steps):
        numbers = batch_examples(inputs.order, config.data.batch_size, len(inputs.samples) + step)
        examples = corpus.read(numbers)
        connection.send(examples)
        if not step:
            settings = ask(connection, "tune")
            tell("measures")
        names = [*results_by_system]
        offset = step % len(names)
        for name in names[offset:] + names[:offset]:
            result = own_run(numbers) if name == "ours" else ask(connection, name)
            if step >= WARM_UP:
                results_by_system[name].append(result)
        if step >= WARM_UP:
            host = results_by_system["ours"][-1].pop("host")
            by_program.append(own_run.seconds_by_program(host))
    connection.send(None)
    process.join()
    counts = {name: count(component) for name, component in params.items()}
    for name in PEERS:
        check_parameters(name, settings[name]["parameters"], counts)
    check_losses(results_by_system)
    return {
        "told": results_by_system,
        "by_program": by_program,
        "settings": settings,
        "parameters": counts,
        "padding": own_run.padding(host),
        "batch": {
            "examples": len(examples),
            "tokens": sum(len(example.tokens) for example in examples),
            **slots_of(examples),
        },
    }


def tell(what: str) -> None:
    """Print progress to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def ask(connection: Connection, request: str) -> Any:
    """The answer of PyTorch's process to a request. Raises `EOFError` if that process has ended."""
    connection.send(request)
    return connection.recv()


def count(component: Any) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(component))


def slots_of(examples: Sequence[Example]) -> dict[str, int]:
    """Slots of all media of some examples, by phase."""
    slots: dict[str, int] = defaultdict(int)
    for example in examples:
        for item in example.items:
            slots[f"{item.phase} slots"] += len(item.features)
    return dict(slots)


def check_parameters(name: str, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Raise ValueError unless every component has as many parameters as ours, to
    `SAME_PARAMETERS`."""
    for component, size in expected.items():
        if abs(found.get(component, 0) / size - 1) > SAME_PARAMETERS:
            raise ValueError(
                f"{name}: {component} has {found.get(component, 0)} parameters, ours {size}"
            )


def check_losses(told: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise ValueError unless all systems had the same targets and finite losses, and `packed` has
    our loss in the first step."""
    for name, results in told.items():
        for result, reference in zip(results, told["ours"], strict=True):
            if result["targets"] != reference["targets"] or not math.isfinite(result["loss"]):
                raise ValueError(
                    f"{name}: loss {result['loss']} of {result['targets']} targets, "
                    f"ours {reference['loss']} of {reference['targets']}"
                )
    packed = told["packed"][0]["loss"]
    reference = told["ours"][0]["loss"]
    if abs(packed / reference - 1) > SAME_LOSS:
        raise ValueError(
            f"packed: loss {packed}, ours {reference} from the same parameters and examples"
        )


def rows_of(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One record for every system."""
    results_by_system = measured["told"]
    own_times = {
        clock: np.array([result[clock] for result in results_by_system["ours"]])
        for clock in ("seconds", "cpu_seconds")
    }
    rows = []
    for name, results in results_by_system.items():
        seconds, cpu = (np.array([result[clock] for result in results]) for clock in own_times)
        settings = measured["settings"].get(name, {})
        part_seconds = median_parts([result["parts"] for result in results])
        if name == "ours":
            part_seconds |= median_parts(measured["by_program"])
        part_seconds["rest"] = statistics.median(cpu.tolist()) - sum(part_seconds.values())
        rows.append(
            {
                "system": name,
                "seconds": quartiles(seconds.tolist()),
                "over_ours": quartiles((seconds / own_times["seconds"]).tolist()),
                "cpu_seconds": quartiles(cpu.tolist()),
                "cpu_over_ours": quartiles((cpu / own_times["cpu_seconds"]).tolist()),
                "micro_batch": settings.get("micro_batch"),
                "attention": settings.get("attention"),
                "parameters": settings.get("parameters", measured["parameters"]),
                "loss": results[-1]["loss"],
                "targets": results[-1]["targets"],
                "parts": part_seconds,
                "all_seconds": seconds.tolist(),
            }
        )
    return rows


def median_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median over steps of every part; a step without a part counts as 0."""
    names = dict.fromkeys(name for step_parts in parts for name in step_parts)
    return {
        name: statistics.median(step_parts.get(name, 0.0) for step_parts in parts) for name in names
    }


# ---------------------------------------------------------------------------- the command


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--size", choices=["quickstart", *SIZES], default="40m")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="folder that holds train.jsonl (default: generated sizes)",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=8,
        help="measured steps per system (default: %(default)s)",
    )
    add_threads(parser, 2)
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        nargs=len(IN_MICRO_BATCHES),
        metavar=tuple(name.upper() for name in IN_MICRO_BATCHES),
        help="examples per micro-batch of the peers (default: the fastest, by a search)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replace values of our config"
    )
    options = parser.parse_args(command)
    sizes = dict(zip(IN_MICRO_BATCHES, options.micro_batch or (), strict=False))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"benchmarks.peer_torch measures nothing: it needs {' and '.join(missing)}; pip install torch transformers",
            file=sys.stderr,
        )
        return 2
    use_cores(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = config_of(
                options.size, options.data, Path(folder), options.seed, options.overrides
            )
            measurements = measure(config, options.steps, sizes, options.threads)
        except (*USER_ERRORS, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    rows = rows_of(measurements)
    batch = ", ".join(f"{value} {name}" for name, value in measurements["batch"].items())
    million = sum(measurements["parameters"].values()) / 1e6
    show(rows, f"{options.size}: {million:.1f}M parameters, {options.threads} threads; {batch}")
    write_json(
        options.json,
        "peer_torch",
        options.seed,
        GENERATOR,
        size=options.size,
        data=None if options.data is None else str(options.data),
        overrides=options.overrides,
        threads=options.threads,
        steps=options.steps,
        batch=measurements["batch"],
        padding=measurements["padding"],
        peers=measurements["settings"]["versions"],
        rows=rows,
    )
    return 0


def show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print one line per system, and the CPU seconds of the parts of its step."""
    lines = [
        [
            row["system"],
            row["micro_batch"],
            *row["seconds"].values(),
            row["over_ours"]["median"],
            row["cpu_seconds"]["median"],
            row["cpu_over_ours"]["median"],
            row["loss"],
        ]
        for row in rows
    ]
    columns = ["system", "micro-batch", "seconds", "quarter below", "quarter above", "x ours"]
    columns += ["CPU s", "x ours", "loss"]
    print_table(title, columns, lines)
    part_rows = [
        [row["system"], name, seconds, seconds / row["cpu_seconds"]["median"]]
        for row in rows
        for name, seconds in row["parts"].items()
    ]
    print_table(
        "where the time goes", ["system", "part", "CPU s", "share"], part_rows, left_aligned=2
    )


def cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def add_threads(parser: argparse.ArgumentParser, default: int) -> None:
    """Add `--threads`, which rejects more cores than there are: a table must not name a number that
    was not measured."""

    def threads(text: str) -> int:
        count = positive_int(text)
        if count > len(cores()):
            raise argparse.ArgumentTypeError(f"{count}: this process may use {len(cores())} cores")
        return count

    default_threads = min(default, len(cores()))
    parser.add_argument(
        "--threads",
        type=threads,
        default=default_threads,
        help="threads of every system (default: %(default)s)",
    )


def use_cores(threads: int) -> None:
    """Keep this process and the processes that it starts on this many cores, if the system allows
    that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores()[:threads])
        # NPROC sets the threads of jax; PyTorch gets its number of threads from `serve`
        os.environ["NPROC"] = str(threads)


if __name__ == "__main__":
    sys.exit(main())
