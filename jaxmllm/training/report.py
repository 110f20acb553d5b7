"""The records, limits and summary of a run.

    StartedStep --follow--> one record of metrics.jsonl (step_metrics.py says what each number means)
                            past a limit a `TrainingError`
    held-out batches --evaluate--> eval/... records (evaluate.py)
    messages of processes --tell, warnings--> the log, message records
    all steps --summary--> summary.json

A message record has `process` and `message`. Records of all kinds have `step` and `time`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.workers.reader import Loader
from jaxmllm.runtime import hosts
from jaxmllm.runtime.agreement import agreed_numbers
from jaxmllm.runtime.board import HostsError
from jaxmllm.runtime.metrics import METRICS_FILE, MetricsWriter, read_metrics, read_summary
from jaxmllm.runtime.progress import ProgressBar
from jaxmllm.runtime.step_times import StepTimes
from jaxmllm.training.evaluate import (
    evaluate,
    evaluation_record,
    evaluation_text,
    recorded_evaluation,
)
from jaxmllm.training.process_messages import Message, Messages, bounded
from jaxmllm.training.run import Run
from jaxmllm.training.step_functions import TrainState
from jaxmllm.training.step_metrics import AMOUNTS, RATE_STEPS, StepFacts, step_record


class TrainingError(RuntimeError):
    """The run cannot continue; the message says at which step, why, and what to do."""


@dataclass(frozen=True)
class StartedStep:
    """A step whose programs were started and whose metrics are read later; `step` counts from 1."""

    step: int
    batch: HostStep
    metrics: dict[str, jax.Array]
    waited: float  # seconds for data
    began: float  # when its programs were started
    completed: Future[float]  # when they had run


DENOMINATORS = (
    "where media do not decode, gradients stay divided by the planned numbers of target tokens and patches, and losses "
    "in metrics are over those that are left"
)


@dataclass
class RunReport:
    """Turns device metrics and plan statistics into records, enforces the limits, and keeps what
    the summary needs.

    Metrics of a step are read when the next one was started, so that the devices always have work.
    """

    run: Run
    writer: MetricsWriter
    progress: ProgressBar
    loader: Loader[HostStep]
    messages: Messages = field(default_factory=Messages)
    evaluation: dict[str, Any] | None = None  # the last one, with its step
    loss: float | None = None
    streak: int = 0  # `skipped_in_row` of the last step written
    _explained: bool = False  # whether `DENOMINATORS` was told
    _step: int = 0  # number of the last step that was started
    _pending: StartedStep | None = None
    _times: StepTimes = field(default_factory=StepTimes)
    _recent: deque[StepFacts] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _kept_summary: dict[str, Any] | None = None  # the run folder's, until something is added

    def resume(self, step: int) -> None:
        """Continue the run folder's history after `step` steps; only the main process reads it."""
        self._step = step
        if not self.run.is_main:
            return
        for record in read_metrics(self.run.directory):
            self.loss = record.get("loss", self.loss)
            if "eval/loss" in record:
                self.evaluation = recorded_evaluation(record)
        summary = read_summary(self.run.directory)
        if summary is not None and summary.get("steps") == step and summary.get("error") is None:
            self._kept_summary = summary

    def follow(self, started: StartedStep) -> None:
        """Write the step before the one just started; raises `TrainingError` past a limit."""
        before = self._pending
        self._pending = started
        self._step = started.step
        if before is not None:
            self._write(before)

    def settle(self) -> None:
        """Wait for the step that still runs and write it: what follows is no step, and its time
        counts in no step.

        Raises `TrainingError` past a limit.
        """
        before = self._pending
        self._pending = None
        if before is not None:
            self._write(before)
        self._times.pause()

    def tell(self, step: int, failures: Sequence[str], what: str = "masked") -> None:
        """Report which media items of a step this process could not decode; called before the
        step's programs are started. For a model that draws, the first report also says what losses
        are then divided by."""
        lines = [f"{what}: {failure}" for failure in failures]
        if lines and what == "masked" and self.run.config.model.generators and not self._explained:
            self._explained = True
            lines.insert(0, DENOMINATORS)
        self.messages.tell(step, lines)
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
        """Whether a run that resumes after `step` steps had ended before the evaluation due then;
        all processes get the main one's answer."""
        if not self.evaluation_due(step):
            return False
        missing = self.evaluation is None or self.evaluation["step"] != step
        # No collective: the main process may still be reading records, longer than one would wait
        return bool(agreed_numbers([missing])[0])

    def evaluate(self, step: int, state: TrainState, should_stop: Callable[[], bool]) -> bool:
        """Measure the held-out set and write a record; False, without a record, if `should_stop`,
        which is called once per batch, returned true.

        All steps must be settled. Raises `TrainingError`, without a record, if more media items
        than `data.max_failed_media` could not be decoded: each evaluation counts its own.
        """
        run = self.run
        assert run.evaluation is not None and run.held_out is not None

        def tell(failures: Sequence[str]) -> None:
            self.tell(step, failures, "masked in the evaluation")

        source_of = run.held_out.source_of
        with closing(self.loader.read(run.evaluation, 0, len(run.evaluation))) as loaded:
            params = run.programs.averaged(state)
            # Without a recent step, this process has not run a step yet.
            batches = loaded if self._recent else _meet_at_first_batch(loaded)
            results = evaluate(
                run.programs, params, batches, run.sources, source_of, should_stop, tell
            )
        if results is None:
            self.progress.print(f"step {step}: asked to stop, so the evaluation is given up")
            return False
        if state.averages is not None:
            results |= {"averaged": ", ".join(state.averages)}
        self._publish()
        self.progress.print(f"step {step}: held-out {evaluation_text(results)}")
        if results["failed_media"] > run.config.data.max_failed_media:
            # The error says that the log names the failed items, and ends this process.
            self.messages.await_publication()
            raise TrainingError(
                f"step {step}: {results['failed_media']} media items of the evaluation could not be decoded, and "
                f"{results['masked_examples']} examples were left out; {_failure_limit_text(run)}"
            )
        self.evaluation = {"step": step} | results
        # The summary in the run folder lacks this evaluation, so it is not kept.
        self._kept_summary = None
        self.writer.write(step, evaluation_record(results))
        return True

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Publish the messages that are left, unless the coordinator is gone."""
        with suppress(HostsError):
            self._publish()

    def summary(
        self, steps: int, seconds: float, error: str | None = None, stopped: bool = False
    ) -> dict[str, Any]:
        """The content of summary.json after `steps` steps; fractions and ratios are over the steps
        of this process.

        A resumed run that had nothing left to do keeps its earlier summary. A run that was
        `stopped` is not complete while an evaluation is still due.
        """
        done = steps >= self.run.config.run.steps and not (stopped and self.evaluation_due(steps))
        complete = error is None and done
        if self._kept_summary is not None and error is None:
            return self._kept_summary | {"complete": complete}
        phases = self.run.programs.spec.phases
        sums = self._sums
        fractions = {
            p: sums[f"{p}/tokens"] / sums[f"{p}/slots"] for p in phases if sums[f"{p}/slots"]
        }
        costs = {p: sums[f"{p}/slowest"] / sums[f"{p}/flops"] for p in phases if sums[f"{p}/flops"]}
        return {
            "steps": steps,
            "complete": complete,
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
        """Pass on the warnings of this process and, in the main one, print and record all
        processes' messages."""
        warnings = self.run.warnings.take()
        if self.run.is_main:
            for line in bounded(warnings):  # already shown when they were logged
                self.writer.write_message(self._step, 0, line)
        else:
            self.messages.tell(self._step, warnings)
        self.messages.drain(self._publish_message)

    def _publish_message(self, message: Message) -> None:
        process = f"process {message.process}: " if jax.process_count() > 1 else ""
        self.progress.print(f"step {message.step}: {process}{message.text}")
        self.writer.write_message(message.step, message.process, message.text)

    def _write(self, started: StartedStep) -> None:
        """Read the metrics of a step, waiting until it has run, and write its record."""
        values = jax.device_get(started.metrics)
        self._publish()  # what any process told before the step: a limit's error refers to it
        self._kept_summary = None
        record = self._record(started, values)
        self.loss = record["loss"]
        self.streak = int(values["skipped_in_row"])
        if self.run.is_main:
            ids = [self.run.corpus.id(example) for example in started.batch.examples]
            record["batch"] = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()
            if self.run.config.logging.examples:
                self.writer.write_examples(started.step, ids)
        if (
            due(started.step, self.run.config.logging.every)
            or started.step == self.run.config.run.steps
        ):
            self.writer.write(started.step, record)
        shown: dict[str, Any] = {
            name: record[name] for name in ("loss", "examples/s", "mfu") if name in record
        }
        self.progress.update(started.step, shown)
        self._enforce(started.step, values)

    def _record(self, started: StartedStep, device: dict[str, Any]) -> dict[str, Any]:
        run = self.run
        statistics = started.batch.statistics
        phases = tuple(run.programs.spec.phases)
        facts = StepFacts(
            device=device,
            statistics=statistics | run.programs.route_metrics(statistics),
            examples=len(started.batch.examples),
            seconds=self._times.seconds(started.began, started.completed.result()),
            waited=started.waited,
            compilations=run.compilations.count,
            sources=run.sources,
            phases=phases,
            head_flops=run.head_flops,
            peak_flops=run.peak_flops,
        )
        self._recent.append(facts)
        for phase in phases:
            for name in AMOUNTS:
                self._sums[f"{phase}/{name}"] += statistics[f"{phase}/{name}"]
            # The phase's FLOPs, if every rank had as much to do as the slowest
            slowest = statistics[f"{phase}/flops"] * statistics.get(f"{phase}/max_over_mean", 0)
            self._sums[f"{phase}/slowest"] += slowest
        return step_record(tuple(self._recent))

    def _enforce(self, step: int, values: dict[str, Any]) -> None:
        """Raise `TrainingError` past the limit of skipped updates in a row or of failed media."""
        config = self.run.config
        if values["skipped_in_row"] >= config.optimizer.max_skipped:
            why = "not finite"
            # Updates are also skipped if nothing has a loss; the counts by source tell.
            learned = {"targets_by_source": "target token", "patches_by_source": "patch"}
            names = [name for name in learned if name in values]
            if not any(values[name].any() for name in names):
                why += f", or of no {' or '.join(learned[name] for name in names)},"
            raise TrainingError(
                f"step {step}: loss or gradients were {why} for {values['skipped_in_row']} steps in a row "
                f"(loss {values['loss']}, gradient norm {values['gradient_norm']}); resume from the last checkpoint "
                f"with a lower optimizer.learning_rate, or allow more with optimizer.max_skipped"
            )
        if values["failed_media"] > config.data.max_failed_media:
            self.messages.await_publication()
            raise TrainingError(
                f"step {step}: {values['failed_media']} media items could not be decoded so far; "
                f"{_failure_limit_text(self.run)}"
            )


def due(step: int, every: int | None) -> bool:
    """Whether what is done every `every` steps (None: never) is due after this step."""
    return every is not None and step % every == 0


def _meet_at_first_batch(batches: Iterator[HostStep]) -> Iterator[HostStep]:
    """The batches of an evaluation before the first step. Processes meet once all have the first
    batch, because the first collective would not wait for a slow reader."""
    for batch_number, batch in enumerate(batches):
        if batch_number == 0:
            hosts.meet("its first evaluation")
        yield batch


def _failure_limit_text(run: Run) -> str:
    return (
        f"data.max_failed_media = {run.config.data.max_failed_media} allows no more. The log and {METRICS_FILE} of "
        f"{run.directory} name them: fix or remove them, or raise the limit"
    )
