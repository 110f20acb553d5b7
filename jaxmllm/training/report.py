"""What the numbers of a run mean: device metrics and plan statistics become records, the summary and the limits.

Pending (step, batch, device metrics) --follow--> one record of metrics.jsonl; past a limit a `TrainingError`
held-out batches --evaluate--> eval/... records            all steps --summary--> summary.json
what processes have to say --tell, warnings--> the log, message records

A record of a step has

    loss, loss/<source>     mean over the target tokens of the whole batch, and of one source. null: not finite, or the
                            batch had no target left (then `masked_targets` are all of them); the update was skipped
    gradient_norm           before clipping
    learning_rate           before it is scaled by component
    skipped                 updates left out so far, because loss or gradients were not finite, or no target was left
    failed_media            media items so far that did not decode, on all processes
    masked_targets          target tokens of this step that carry no loss, because a media item of their example failed
    step_seconds            from the completion of the step before to its own, waiting for data included; after an
                            evaluation, a checkpoint, an edge of the profile, and at first: from the start of its
                            programs
    mfu                     FLOPs of the real lengths, encoders counted and padding not, over `step_seconds` at the peak
                            of all devices
    examples/s, <phase>/tokens/s  real amounts over the `step_seconds` of the last 20 steps
    data_wait_seconds       that this process waited for its batch; some of it while the devices had work
    compilations            programs compiled so far; it stays as it is after the first steps
    <phase>/..., route/..., pipeline/..., plan_ms   statistics of the plan (balance/records.py)

A record of an evaluation has

    eval/loss, eval/loss_by_source/<source>         over the target tokens of the examples below; null without any
    eval/exact_match/<source>                       share of examples that are answered exactly
    eval/examples/<source>                          examples that both are over
    eval/masked_examples, eval/masked_by_source/<source>   examples left out of both: a media item did not decode
    eval/failed_media                               media items of this evaluation that did not decode

A record of a message has `process` and `message`. Records of all kinds have `step` and `time`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.workers.reader import Loader
from jaxmllm.runtime.board import HostsError
from jaxmllm.runtime.clock import RateMeter, StepClock
from jaxmllm.runtime.metrics import METRICS_FILE, MetricsWriter, ProgressBar, read_metrics, read_summary
from jaxmllm.training.evaluate import NOTHING, evaluate
from jaxmllm.training.messages import Message, Messages, bounded
from jaxmllm.training.run import Run
from jaxmllm.training.step_functions import TrainState

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
    messages: Messages = field(default_factory=Messages)
    evaluation: dict[str, Any] | None = None  # the last one, with its step
    loss: float | None = None
    streak: int = 0  # updates in a row, up to the last one written, that were not finite
    _step: int = 0  # the last one that was started
    _pending: Pending | None = None
    _clock: StepClock = field(default_factory=StepClock)
    _rates: RateMeter = field(default_factory=RateMeter)
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _kept_summary: dict[str, Any] | None = None  # of a run that had come this far

    def resume(self, step: int) -> None:
        """Continue the history that the run folder holds after `step` steps, in the main process."""
        self._step = step
        if not self.run.is_main:
            return
        for record in read_metrics(self.run.directory):
            self.loss = record.get("loss", self.loss)
            if "eval/loss" in record:
                self.evaluation = _nested(record)
        summary = read_summary(self.run.directory)
        if summary is not None and summary.get("steps") == step and summary.get("error") is None:
            self._kept_summary = summary

    def follow(self, started: Pending) -> None:
        """Write the step before the one just started; raises `TrainingError` past a limit."""
        before, self._pending = self._pending, started
        self._step = started.step
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

    def tell(self, step: int, failures: Sequence[str], what: str = "masked") -> None:
        """Say which media items of a step this process could not decode, before the step's programs are started."""
        self.messages.tell(step, [f"{what}: {failure}" for failure in failures])
        self._publish()

    # ------------------------------------------------------------------ evaluation

    def evaluation_due(self, step: int) -> bool:
        """Whether the config asks for an evaluation after `step` steps."""
        if self.run.evaluation is None:
            return False
        config = self.run.config
        if step == 0:
            return config.evaluation.at_start
        return step == config.run.steps or due(step, config.evaluation.every)

    def evaluation_missing(self, step: int) -> bool:
        """Whether a run that resumes after `step` steps was ended before the evaluation due then; all processes get
        the main one's answer."""
        if not self.evaluation_due(step):
            return False
        missing = self.evaluation is None or self.evaluation["step"] != step
        if jax.process_count() > 1:
            missing = bool(multihost_utils.broadcast_one_to_all(np.int32(missing)))
        return missing

    def evaluate(self, step: int, state: TrainState, should_stop: Callable[[], bool]) -> bool:
        """Measure the held-out set; False when `should_stop`, asked once per batch, said so: then there is no record.

        All steps must be settled. Raises `TrainingError` when more media items than `data.max_failed_media` could not
        be decoded: the limit holds for each evaluation by itself. Then there is no record either.
        """
        run = self.run
        assert run.evaluation is not None and run.held_out is not None

        def tell(failures: Sequence[str]) -> None:
            self.tell(step, failures, "masked in the evaluation")

        source_of = run.held_out.source_of
        with closing(self.loader.read(run.evaluation, 0, len(run.evaluation))) as batches:
            results = evaluate(run.programs, state.params, batches, run.sources, source_of, should_stop, tell)
        if results is None:
            self.progress.print(f"step {step}: asked to stop, so the evaluation is given up")
            return False
        self._publish()
        self.progress.print(f"step {step}: held-out {_text(results)}")
        if results["failed_media"] > run.config.data.max_failed_media:
            self.messages.await_publication()
            raise TrainingError(
                f"step {step}: {results['failed_media']} media items of the evaluation could not be decoded, and "
                f"{results['masked_examples']} examples were left out; {_limit_of_failures(run)}"
            )
        self.evaluation = {"step": step} | results
        self._kept_summary = None
        self.writer.write(step, {f"eval/{name}": value for name, value in _flat(results).items()})
        return True

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Publish what is still to be said, if anybody listens."""
        with suppress(HostsError):
            self._publish()

    def summary(self, steps: int, seconds: float, error: str | None = None) -> dict[str, Any]:
        """The content of summary.json after `steps` steps; fractions and ratios are over the steps of this process.

        A run that had come this far before, and had nothing left to do, keeps its summary.
        """
        if self._kept_summary is not None and error is None:
            return self._kept_summary
        phases = self.run.programs.spec.phases
        sums = self._sums
        fractions = {p: sums[f"{p}/tokens"] / sums[f"{p}/slots"] for p in phases if sums[f"{p}/slots"]}
        costs = {p: sums[f"{p}/slowest"] / sums[f"{p}/flops"] for p in phases if sums[f"{p}/flops"]}
        return {
            "steps": steps,
            "complete": error is None and steps == self.run.config.run.steps,
            "error": error,
            "loss": self.loss,
            "compilations": self.run.compilations.count,
            "eval": self.evaluation,
            "real_token_fraction": fractions,
            "max_over_mean_cost": costs,
            "rejected": self.run.corpus.rejected_counts(),
            "wall_seconds": seconds,
        }

    # ------------------------------------------------------------------ records

    def _publish(self) -> None:
        """Print and record the warnings of this process and, in the main one, what all of them have told."""
        warnings = self.run.warnings.take()
        if self.run.is_main:
            for line in bounded(warnings):  # which were shown as they came
                self.writer.write_message(self._step, 0, line)
        else:
            self.messages.tell(self._step, warnings)
        self.messages.drain(self._publish_message)

    def _publish_message(self, message: Message) -> None:
        process = f"process {message.process}: " if jax.process_count() > 1 else ""
        self.progress.print(f"step {message.step}: {process}{message.text}")
        self.writer.write_message(message.step, message.process, message.text)

    def _write(self, pending: Pending) -> None:
        """Read the metrics of a step, which waits until it has run."""
        values = jax.device_get(pending.metrics)
        self._publish()  # all that was told before the step, by any process; a limit's error refers to it
        self._kept_summary = None
        record = self._record(pending, values)
        self.loss = record["loss"]
        self.streak = int(values["skipped_in_row"])
        if self.run.is_main:
            ids = [self.run.corpus.id(example) for example in pending.batch.examples]
            record["batch"] = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()
            if self.run.config.logging.examples:
                self.writer.write_examples(pending.step, ids)
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
        if not values["targets_by_source"].any():
            record["loss"] = None  # a mean over nothing
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
            why = "not finite" if values["targets_by_source"].any() else "not finite, or of no target token,"
            raise TrainingError(
                f"step {step}: loss or gradients were {why} for {values['skipped_in_row']} steps in a row "
                f"(loss {values['loss']}, gradient norm {values['gradient_norm']}); resume from the last checkpoint "
                f"with a lower optimizer.learning_rate, or allow more with optimizer.max_skipped"
            )
        if values["failed_media"] > config.data.max_failed_media:
            self.messages.await_publication()
            raise TrainingError(
                f"step {step}: {values['failed_media']} media items could not be decoded so far; "
                f"{_limit_of_failures(self.run)}"
            )


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps (none: never) happens after this one."""
    return every is not None and step % every == 0


def _limit_of_failures(run: Run) -> str:
    return (
        f"data.max_failed_media = {run.config.data.max_failed_media} allows no more. The log and {METRICS_FILE} of "
        f"{run.directory} name them: fix or remove them, or raise the limit"
    )


def _nested(record: dict[str, Any]) -> dict[str, Any]:
    """The evaluation that a record was made of, with its step."""
    evaluation: dict[str, Any] = NOTHING | {"step": record["step"]}
    for name, value in record.items():
        if name.startswith("eval/"):
            _, key, *source = name.split("/", 2)
            evaluation[key] = evaluation.get(key, {}) | {source[0]: value} if source else value
    return evaluation


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _text(evaluation: dict[str, Any]) -> str:
    loss = "none" if evaluation["loss"] is None else f"{evaluation['loss']:.4f}"
    matches = "  ".join(f"{source} {share:.1%}" for source, share in evaluation["exact_match"].items())
    left_out = ""
    if evaluation["masked_examples"]:
        left_out = (
            f"  left out: {evaluation['masked_examples']} examples, for {evaluation['failed_media']} media items that "
            f"could not be decoded"
        )
    return f"loss {loss}  exact match: {matches or 'none'}{left_out}"
