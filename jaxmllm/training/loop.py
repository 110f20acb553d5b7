"""The training loop: host steps in, metrics, checkpoints and evaluations out.

    next batch (prepared ahead) -> put -> train (asynchronous) -> read the metrics of the step before

Reading one step late keeps the devices busy: while step k runs, the host prepares step k + 1.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmllm.config import Config, dump_config
from jaxmllm.data.fill import HostStep
from jaxmllm.data.pipeline import train_iterator
from jaxmllm.training.build import Run
from jaxmllm.training.checkpoint import CheckpointError, Checkpoints, check_compatible, read_config, write_config
from jaxmllm.training.evaluate import evaluate
from jaxmllm.training.files import write_atomically
from jaxmllm.training.metrics import MetricsWriter, ProgressBar, RateMeter
from jaxmllm.training.profiler import ProfilerWindow
from jaxmllm.training.signals import StopSignals
from jaxmllm.training.step import TrainState

DATA_FILE = "data.json"  # what the run was trained on
REJECTED_FILE = "rejected.jsonl"  # examples that were refused, with reasons
SUMMED = ("tokens", "slots", "flops")  # statistics that become rates and ratios


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step, why, and what to do."""


RUN_ERRORS = (TrainingError, CheckpointError)


def check_folder(config: Config, resume: bool) -> None:
    """Raise `CheckpointError` unless the run folder is new, or `resume` and the run in it may go on like this."""
    saved = read_config(config.run.directory)
    if saved is None:
        return
    if not resume:
        raise CheckpointError(
            f"{config.run.directory} already holds a run; pass --resume to continue it, or choose another run.directory"
        )
    check_compatible(saved, config)


def train(run: Run) -> dict[str, Any]:
    """Train to the last step, or to a SIGTERM; returns the summary that it also writes to summary.json.

    Goes on from the latest checkpoint of the run folder, if there is one; `check_folder` says whether that is meant.
    Raises `TrainingError` after too many non-finite updates or undecodable media, `CheckpointError` when the
    checkpoint does not fit.
    """
    config = run.config
    started = time.monotonic()
    report = Report(run)
    with (
        Checkpoints(run.directory / "checkpoints", config.checkpoint.keep) as checkpoints,
        MetricsWriter(run.directory, config.logging.tensorboard, config.logging.wandb, run.is_main) as writer,
        StopSignals() as stop,
    ):
        state, step = _begin(run, checkpoints, writer)
        progress = ProgressBar(config.run.steps, step, visible=run.is_main)
        profiler = ProfilerWindow(run.directory / "profile", config.profile.start, config.profile.steps)
        batches = train_iterator(run.batches, step, config.run.steps, config.data.workers, config.data.prefetch)
        pending: Pending | None = None
        stopped = False
        try:
            if config.evaluation.at_start and step == 0:
                report.evaluate(step, state, writer, progress)
            while step < config.run.steps and not stopped:
                asked = time.monotonic()
                batch = next(batches)
                waited = time.monotonic() - asked
                for failure in batch.failures:
                    progress.print(f"step {step + 1}: masked: {failure}")
                if jax.process_count() > 1 and _due(step + 1, config.balance.check_every):
                    check_digests(step + 1, multihost_utils.process_allgather(_digest_bytes(batch.digest)))
                profiler.before_step(step, state.step)
                state, metrics = run.programs.train(state, run.programs.put(batch))
                step += 1
                if pending is not None:
                    report.write(pending, writer, progress)
                pending = Pending(step, batch, metrics, waited)

                stopped = stop.should_stop(step)
                last = stopped or step == config.run.steps
                if last or _due(step, config.checkpoint.every):
                    report.write(pending, writer, progress)  # never keep a state that the limits forbid
                    pending = None
                    checkpoints.save(step, run.programs.to_saved(state))
                if not stopped and (last or _due(step, config.evaluation.every)):
                    report.evaluate(step, state, writer, progress)
        finally:
            batches.close()
            profiler.close(state.step)
            progress.close()
        checkpoints.wait()
        summary = report.summary(step, time.monotonic() - started)
        writer.write_summary(summary)
    return summary


@dataclass(frozen=True)
class Pending:
    """A step whose programs were started and whose metrics are read later; `step` steps are then done."""

    step: int
    batch: HostStep
    metrics: dict[str, jax.Array]
    waited: float  # seconds for data


@dataclass
class Report:
    """Turns device metrics and plan statistics into records, enforces the limits, keeps what the summary needs."""

    run: Run
    evaluation: dict[str, Any] | None = None
    loss: float | None = None
    _rates: RateMeter = field(default_factory=RateMeter)
    _last: float = field(default_factory=time.monotonic)
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def write(self, pending: Pending, writer: MetricsWriter, progress: ProgressBar) -> None:
        """Read the metrics of a step, which waits until it has run; raise `TrainingError` past a limit."""
        values = jax.device_get(pending.metrics)
        record = self._record(pending, values)
        self.loss = record["loss"]
        if _due(pending.step, self.run.config.logging.every) or pending.step == self.run.config.run.steps:
            writer.write(pending.step, record)
        progress.update(pending.step, {name: record[name] for name in ("loss", "examples/s", "mfu") if name in record})
        self._enforce(pending.step, values)

    def evaluate(self, step: int, state: TrainState, writer: MetricsWriter, progress: ProgressBar) -> None:
        """Measure the held-out set, if there is one; the time it takes counts for no step."""
        if self.run.evaluation is None:
            return
        began = time.monotonic()
        self.evaluation = evaluate(self.run.programs, state.params, self.run.evaluation, self.run.sources)
        writer.write(step, {f"eval/{name}": value for name, value in _flat(self.evaluation).items()})
        progress.print(f"step {step}: held-out {_text(self.evaluation)}")
        self._last += time.monotonic() - began

    def summary(self, steps: int, seconds: float) -> dict[str, Any]:
        """The content of summary.json; fractions and ratios are over all steps of this process."""
        phases = self.run.programs.spec.phases
        sums = self._sums
        fractions = {p: sums[f"{p}/tokens"] / sums[f"{p}/slots"] for p in phases if sums[f"{p}/slots"]}
        costs = {p: sums[f"{p}/slowest"] / sums[f"{p}/flops"] for p in phases if sums[f"{p}/flops"]}
        return {
            "steps": steps,
            "loss": self.loss,
            "compilations": self.run.compilations.count,
            "eval": self.evaluation,
            "real_token_fraction": fractions,
            "max_over_mean_cost": costs,
            "rejected": self.run.corpus.rejected_counts(),
            "wall_seconds": seconds,
        }

    def _record(self, pending: Pending, values: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        statistics, run = pending.batch.statistics, self.run
        amounts = {"examples/s": float(len(pending.batch.examples))}
        for phase in run.programs.spec.phases:
            amounts[f"{phase}/tokens/s"] = statistics[f"{phase}/tokens"]
            for name in SUMMED:
                self._sums[f"{phase}/{name}"] += statistics[f"{phase}/{name}"]
            self._sums[f"{phase}/slowest"] += statistics[f"{phase}/flops"] * statistics.get(f"{phase}/max_over_mean", 0)
        record: dict[str, Any] = {
            name: values[name] for name in ("loss", "learning_rate", "gradient_norm", "skipped", "failed_media")
        }
        record["masked_targets"] = values["masked_targets"]
        for source, loss, targets in zip(
            run.sources, values["loss_by_source"], values["targets_by_source"], strict=True
        ):
            if targets:
                record[f"loss/{source}"] = loss
        record |= self._rates.update(amounts, now)
        record |= {name: value for name, value in statistics.items() if name.split("/")[-1] not in SUMMED}
        record |= run.programs.route_metrics(statistics)
        if run.peak_flops is not None:
            flops = sum(statistics[f"{phase}/flops"] for phase in run.programs.spec.phases)
            record["mfu"] = flops / (seconds * run.peak_flops * jax.device_count())
        record["step_seconds"] = seconds
        record["data_wait_seconds"] = pending.waited
        record["compilations"] = run.compilations.count
        return {name: value.item() if hasattr(value, "item") else value for name, value in record.items()}

    def _enforce(self, step: int, values: dict[str, Any]) -> None:
        config = self.run.config
        if values["skipped_in_row"] >= config.optimizer.max_skipped:
            raise TrainingError(
                f"step {step}: loss or gradients were not finite for {values['skipped_in_row']} steps in a row "
                f"(loss {values['loss']}, gradient norm {values['gradient_norm']}); resume from the last checkpoint "
                f"with a lower optimizer.learning_rate, or allow more with optimizer.max_skipped"
            )
        if values["failed_media"] > config.data.max_failed_media:
            raise TrainingError(
                f"step {step}: {values['failed_media']} media items could not be decoded so far, more than "
                f"data.max_failed_media = {config.data.max_failed_media}; the lines above name them: mend or remove "
                f"them, or raise the limit"
            )


def _begin(run: Run, checkpoints: Checkpoints, writer: MetricsWriter) -> tuple[TrainState, int]:
    """Restore the latest checkpoint, or start afresh; leave in the run folder what the run is made from."""
    _check_data(run)
    if run.is_main:
        write_config(run.directory, run.config)
        print(dump_config(run.config), run.describe(), sep="\n")
    step = checkpoints.latest_step
    if step is not None:
        writer.resume_from(step)
        return run.programs.from_saved(checkpoints.restore(run.programs.saved_state)), step
    writer.resume_from(0)
    return run.programs.init(run.config.run.seed), 0


def _check_data(run: Run) -> None:
    """All hosts, and the run that began in this folder, must have seen the same data, and all hosts must cost it alike:
    else their steps differ."""
    fingerprint = run.corpus.fingerprint()
    if jax.process_count() > 1:
        digest = np.frombuffer(bytes.fromhex(fingerprint), np.uint8)
        multihost_utils.assert_equal(
            digest, "the hosts read different data: data.sources must be the same files on all"
        )
        phases = hashlib.blake2b(repr(run.programs.spec.phases).encode(), digest_size=16).digest()
        multihost_utils.assert_equal(
            np.frombuffer(phases, np.uint8),
            "the hosts plan with different rows or costs: balance.calibration must be the same file on all",
        )
    path = run.directory / DATA_FILE
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if saved is not None and saved["fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{run.directory} was trained on other data: {saved['examples']} examples then, {len(run.corpus)} now, or "
            f"other lengths; restore the files and row limits, or set run.directory to a new folder"
        )
    if run.is_main:
        content = {
            "fingerprint": fingerprint,
            "examples": len(run.corpus),
            "rejected": run.corpus.rejected_counts(),
        }
        write_atomically(path, json.dumps(content, indent=1))
        lines = [json.dumps(asdict(rejected), ensure_ascii=False) for rejected in run.corpus.rejected]
        write_atomically(run.directory / REJECTED_FILE, "".join(f"{line}\n" for line in lines))


def check_digests(step: int, digests: np.ndarray) -> None:
    """Raise `TrainingError` unless all processes planned the step alike; digests uint8 [processes, bytes]."""
    for process, digest in enumerate(digests):
        if (digest != digests[0]).any():
            raise TrainingError(
                f"step {step}: the plan of process {process} is {bytes(digest).hex()}, that of process 0 "
                f"{bytes(digests[0]).hex()}; give all hosts the same code, config, data and library versions"
            )


def _digest_bytes(digest: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(digest), np.uint8)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _text(evaluation: dict[str, Any]) -> str:
    matches = "  ".join(f"{source} {share:.1%}" for source, share in evaluation["exact_match"].items())
    return f"loss {evaluation['loss']:.4f}  exact match: {matches}"
