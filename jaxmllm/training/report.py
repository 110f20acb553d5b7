"""What the numbers of a run mean: device metrics and plan statistics become records, the summary and the limits.

Pending (step, batch, device metrics) --write--> one record of metrics.jsonl; past a limit a `TrainingError`
held-out batches --evaluate--> eval/... records            all steps --summary--> summary.json
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmllm.data.fill import HostStep
from jaxmllm.data.reader import Loader
from jaxmllm.training.build import Run
from jaxmllm.training.clock import RateMeter, StepClock
from jaxmllm.training.evaluate import evaluate
from jaxmllm.training.metrics import MetricsWriter, ProgressBar
from jaxmllm.training.step import TrainState

SUMMED = ("tokens", "slots", "flops")  # statistics that become rates and ratios


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step, why, and what to do."""


@dataclass(frozen=True)
class Pending:
    """A step whose programs were started and whose metrics are read later; `step` steps are then done."""

    step: int
    batch: HostStep
    metrics: dict[str, jax.Array]
    waited: float  # seconds for data
    began: float  # when its programs were started
    completed: Future[float]  # when they had run


@dataclass
class Report:
    """Turns device metrics and plan statistics into records, enforces the limits, keeps what the summary needs.

    Metrics of a step are read when the next one was started, so that the devices always have work.
    """

    run: Run
    writer: MetricsWriter
    progress: ProgressBar
    loader: Loader[HostStep]
    evaluation: dict[str, Any] | None = None
    loss: float | None = None
    streak: int = 0  # updates in a row, up to the last one written, that were not finite
    _pending: Pending | None = None
    _clock: StepClock = field(default_factory=StepClock)
    _rates: RateMeter = field(default_factory=RateMeter)
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def follow(self, started: Pending) -> None:
        """Write the step before the one just started; raises `TrainingError` past a limit."""
        before, self._pending = self._pending, started
        if before is not None:
            self._write(before)

    def settle(self) -> None:
        """Wait for the step that still runs and write it: what follows is no step, and its time counts for none.

        Raises `TrainingError` past a limit.
        """
        before, self._pending = self._pending, None
        if before is not None:
            self._write(before)
        self._clock.pause()

    def evaluate(self, step: int, state: TrainState) -> None:
        """Measure the held-out set, if there is one; all steps must be settled."""
        if self.run.evaluation is None:
            return
        with closing(self.loader.read(self.run.evaluation, 0, len(self.run.evaluation))) as batches:
            self.evaluation = evaluate(self.run.programs, state.params, batches, self.run.sources)
        self.writer.write(step, {f"eval/{name}": value for name, value in _flat(self.evaluation).items()})
        self.progress.print(f"step {step}: held-out {_text(self.evaluation)}")

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

    def _write(self, pending: Pending) -> None:
        """Read the metrics of a step, which waits until it has run."""
        values = jax.device_get(pending.metrics)
        record = self._record(pending, values)
        self.loss = record["loss"]
        self.streak = int(values["skipped_in_row"])
        if due(pending.step, self.run.config.logging.every) or pending.step == self.run.config.run.steps:
            self.writer.write(pending.step, record)
        shown: dict[str, Any] = {name: record[name] for name in ("loss", "examples/s", "mfu") if name in record}
        self.progress.update(pending.step, shown)
        self._enforce(pending.step, values)

    def _record(self, pending: Pending, values: dict[str, Any]) -> dict[str, Any]:
        seconds = self._clock.seconds(pending.began, pending.completed.result())
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
        record |= self._rates.update(amounts, seconds)
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


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps (none: never) happens after this one."""
    return every is not None and step % every == 0


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _text(evaluation: dict[str, Any]) -> str:
    matches = "  ".join(f"{source} {share:.1%}" for source, share in evaluation["exact_match"].items())
    return f"loss {evaluation['loss']:.4f}  exact match: {matches}"
