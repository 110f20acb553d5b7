"""Runs that are killed at random instants and resumed elsewhere, against the run that was never
killed.

    python -m benchmarks.drill [--kills 40] [--steps 24] [--seed 0] [--json PATH]

    reference  one process, eight devices, never killed
    run        start --kill -9 at a random instant--> resume on 1, 2, 4 or 8 devices in one or two processes --> ...
               until its last step is done; then another run begins, until all kills are done

A kill hits the training process, one of two training processes, or their launcher; everything that
is left must then end by itself. For each run that reached its end, the example ids and the loss of
every step are compared with the reference, and its metrics must hold each step once. Shared memory
and processes that outlive a kill are violations, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxmllm.tools.arguments import measuring_parser, new_folder
from jaxmllm.tools.output import print_table, write_json
from jaxmllm.tools.sample_data import make_sample

GENERATOR = (
    "96 sample examples; instants, victims, devices, processes and workers drawn from the seed"
)
MARKER = "JAXMLLM_DRILL"  # environment variable that all processes of a run inherit
# Largest relative difference of a loss: rounding differs with the number of devices, and later
# steps inherit it
TOLERANCE = 2e-4
END_WITHIN = 180.0  # seconds in which all processes that survive a kill must have ended
START_WITHIN = 600.0  # seconds in which a run must reach its next step, on a busy machine
SHARED_MEMORY = Path("/dev/shm")
# Violations after which the drill stops: a run that cannot start would be started forever
GIVE_UP = 5
LOG_LINES = 5  # last lines of a run's log, printed with each violation
WHILE_STARTING = 0.3  # share of the kills that strike before the first step


@dataclass(frozen=True)
class Life:
    """One start of a run: where it runs and with how many data workers per process."""

    devices: int
    processes: int
    workers: int

    @classmethod
    def draw(cls, random: np.random.Generator) -> Life:
        """A random life; devices divide evenly among processes."""
        processes = int(random.choice([1, 2]))
        devices = int(random.choice([1, 2, 4, 8] if processes == 1 else [2, 4, 8]))
        return cls(devices, processes, int(random.integers(0, 3)))


@dataclass
class Outcome:
    """Results of the drill; `violations` has one line for each broken promise."""

    kills: int = 0
    runs: int = 0
    victims: Counter[str] = field(default_factory=Counter)
    largest_difference: float = 0.0  # of a loss, relative
    violations: list[str] = field(default_factory=list)


class Drill:
    """Starts, kills and resumes runs in one folder."""

    def __init__(self, folder: Path, steps: int, seed: int):
        self.folder = folder
        self.steps = steps
        self.random = np.random.default_rng(seed)
        self.marker = uuid.uuid4().hex
        self.outcome = Outcome()
        make_sample(folder / "data", train=96, test=24)
        self.config = folder / "config.yaml"
        self.config.write_text(
            yaml.safe_dump(tiny_config(folder / "data", steps)), encoding="utf-8"
        )
        self.shared_memory = set(shared_memory())
        self.startup = 0.0  # seconds until the first step of the reference

    def run(self, kills: int) -> Outcome:
        """Kill runs `kills` times; each of them is resumed to its end and compared."""
        reference = self.folder / "reference"
        start = time.monotonic()
        process = self.start(reference, Life(8, 1, 0))
        self.wait_for_step(process, reference, 1)
        self.startup = time.monotonic() - start
        self.finish(process, reference)
        while self.continues(kills):
            directory = self.folder / f"run-{self.outcome.runs}"
            while self.continues(kills) and self.live_and_die(directory):
                pass
            self.finish(self.start(directory, Life.draw(self.random)), directory)
            self.outcome.runs += 1
            self.compare(reference, directory)
        return self.outcome

    def continues(self, kills: int) -> bool:
        """Whether kills are left to do, and fewer than `GIVE_UP` violations were found."""
        return self.outcome.kills < kills and len(self.outcome.violations) < GIVE_UP

    def live_and_die(self, directory: Path) -> bool:
        """Start or resume a run and kill it at a random instant, unless it ends first. Returns
        whether steps are left to do."""
        process = self.start(directory, Life.draw(self.random))
        if self.random.random() < WHILE_STARTING:
            time.sleep(self.random.uniform(0, self.startup))
        else:
            self.wait_for_step(
                process, directory, last_step(directory) + int(self.random.integers(1, 9))
            )
            time.sleep(self.random.uniform(0, 0.5))
        candidates = [
            (pid, role) for pid, role in self.members() if role in ("launcher", "trainer")
        ]
        finished = last_step(directory) >= self.steps  # a kill while it exits would test nothing
        if finished or process.poll() is not None or not candidates:
            self.finish(process, directory)
            return last_step(directory) < self.steps
        pid, role = candidates[int(self.random.integers(len(candidates)))]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            self.finish(process, directory)
            return last_step(directory) < self.steps
        self.outcome.kills += 1
        self.outcome.victims[role] += 1
        self.end(process, directory)
        return last_step(directory) < self.steps

    def start(self, directory: Path, life: Life) -> subprocess.Popen[bytes]:
        """Start or resume the run of a folder; its output goes to a log next to the folder."""
        command = [sys.executable, "-m", "jaxmllm.train", "--config", str(self.config), "--resume"]
        command += [f"run.directory={directory}", f"data.workers={life.workers}"]
        if life.processes > 1:
            launch_options = [
                "--processes",
                str(life.processes),
                "--devices",
                str(life.devices // life.processes),
            ]
            command = [sys.executable, "-m", "launch.local", *launch_options, "--", *command]
        environment = os.environ | {
            MARKER: self.marker,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={life.devices}",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment.pop("NPROC", None)  # the run sets it from its number of devices
        log = self.folder / f"{directory.name}.log"
        with log.open("ab") as stream:
            stream.write(f"--- {life}\n".encode())
            stream.flush()
            return subprocess.Popen(
                command,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        """Let a run reach its end; an exit code other than 0 is a violation."""
        while last_step(directory) < self.steps and process.poll() is None:
            self.wait_for_step(process, directory, last_step(directory) + 1)
        code = process.wait(START_WITHIN)
        if code:
            self.violation(directory, f"ended with code {code} though nobody killed it")
        self.end(process, directory)

    def wait_for_step(self, process: subprocess.Popen[bytes], directory: Path, step: int) -> None:
        """Wait until a run has recorded a step or has ended; kill it if that takes too long."""
        deadline = time.monotonic() + START_WITHIN
        while last_step(directory) < min(step, self.steps) and process.poll() is None:
            if time.monotonic() > deadline:
                self.violation(
                    directory, f"step {step} was not reached within {START_WITHIN:.0f} s"
                )
                self.kill_all()
            time.sleep(0.02)

    def end(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        """Wait until no process and no shared memory of the run is left. What stays is a violation;
        processes among it are killed."""
        deadline = time.monotonic() + END_WITHIN
        while self.members() and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.1)
        if survivors := self.members():
            roles = [role for _, role in survivors]
            self.violation(directory, f"left behind {END_WITHIN:.0f} s after its end: {roles}")
            self.kill_all()
        process.wait()
        if blocks := set(shared_memory()) - self.shared_memory:
            self.violation(directory, f"left in shared memory: {sorted(blocks)}")
            self.shared_memory |= blocks

    def compare(self, reference: Path, directory: Path) -> None:
        """Record every difference of a finished run from the reference as a violation."""
        expected = example_ids(reference)
        actual = example_ids(directory)
        for step in sorted(expected.keys() | actual.keys()):
            if expected.get(step) != actual.get(step):
                self.violation(directory, f"step {step} took other examples")
        recorded = [record["step"] for record in records(directory)]
        if recorded != list(range(1, self.steps + 1)):
            self.violation(directory, f"metrics.jsonl holds the steps {recorded}")
        losses = {record["step"]: record["loss"] for record in records(directory)}
        for record in records(reference):
            loss = losses.get(record["step"], np.nan)
            difference = abs(loss - record["loss"]) / record["loss"]
            self.outcome.largest_difference = max(self.outcome.largest_difference, difference)
            if not difference <= TOLERANCE:
                self.violation(
                    directory, f"step {record['step']}: loss {loss} instead of {record['loss']}"
                )

    def violation(self, directory: Path, what: str) -> None:
        """Record and print a violation, with the last lines of the run's log."""
        self.outcome.violations.append(f"{directory.name}, kill {self.outcome.kills}: {what}")
        print(self.outcome.violations[-1], self.last_lines(directory), sep="\n", flush=True)

    def last_lines(self, directory: Path) -> str:
        """The last lines of a run's log."""
        log = self.folder / f"{directory.name}.log"
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        )
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def members(self) -> list[tuple[int, str]]:
        """Process number and role of every living process that has this drill's marker."""
        marker = f"{MARKER}={self.marker}".encode()
        members = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            try:
                if marker not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if b"launch.local" in arguments:
                members.append((int(entry.name), "launcher"))
            elif b"jaxmllm.train" in arguments:
                members.append((int(entry.name), "trainer"))
            elif any(arguments):  # a zombie has no words
                members.append((int(entry.name), "worker"))
        return members

    def kill_all(self) -> None:
        for pid, _ in self.members():
            os.kill(pid, signal.SIGKILL)


def tiny_config(data: Path, steps: int) -> dict[str, Any]:
    """A run of all three modalities whose steps take a fraction of a second."""
    tower = {"width": 16, "layers": 1, "heads": 2, "mlp_width": 32}
    language = {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "mlp_width": 48,
    }
    return {
        "run": {"directory": "unset", "steps": steps},
        "model": {
            "vision": tower,
            "audio": tower | {"mel_bins": 8, "chunk_frames": 32},
            "language": language,
        },
        "data": {
            "sources": [{"name": "sample", "path": str(data / "train.jsonl")}],
            "batch_size": 16,
            "images": {"max_pixels": 20000},
            "audio": {"max_seconds": 5},
        },
        "mesh": {"data": -1},
        "optimizer": {"learning_rate": 1e-3},
        "phases": {name: {"block": 32} for name in ("vision", "audio", "language")},
        "checkpoint": {"every": 3},
        "logging": {"tensorboard": False, "examples": True},
    }


def shared_memory() -> list[str]:
    return [path.name for path in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []


def records(directory: Path) -> list[dict[str, Any]]:
    """The step records of a run, in the order written, without a line that is still being
    written."""
    return [record for record in _lines(directory / "metrics.jsonl") if "loss" in record]


def last_step(directory: Path) -> int:
    return max((record["step"] for record in records(directory)), default=0)


def example_ids(directory: Path) -> dict[int, list[str]]:
    """Example ids of each step."""
    return {record["step"]: record["ids"] for record in _lines(directory / "examples.jsonl")}


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(command: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--kills", type=int, default=40, help="number of kills in all (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="steps per run (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=new_folder,
        help="keep the runs and their logs here (default: a temporary folder)",
    )
    options = parser.parse_args(command)
    if options.kills < 1 or options.steps < 2:
        parser.error("--kills must be at least 1, --steps at least 2")
    if options.folder and options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(
            f"--folder {options.folder} is not empty: its runs would count as those of this drill; name another"
        )
    with tempfile.TemporaryDirectory() as temporary:
        outcome = Drill(options.folder or Path(temporary), options.steps, options.seed).run(
            options.kills
        )
    row = {
        "kills": outcome.kills,
        "runs": outcome.runs,
        "victims": dict(outcome.victims),
        "largest_loss_difference": outcome.largest_difference,
        "violations": len(outcome.violations),
    }
    print_table(
        "Killed and resumed runs against the one that was never killed",
        list(row),
        [list(row.values())],
    )
    write_json(
        options.json, "drill", options.seed, GENERATOR, rows=[row], violations=outcome.violations
    )
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
