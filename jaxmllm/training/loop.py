"""The training loop: host steps in, metrics, checkpoints and evaluations out.

    next batch (prepared ahead) -> put -> train (asynchronous) -> read the metrics of the step
    before

Reading one step late keeps the devices busy: while step k runs, the host prepares step k + 1.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import Any

import jax

from jaxmllm.data.rows.fill import HostStep
from jaxmllm.data.workers.reader import Interrupted, Loader, LoadError
from jaxmllm.runtime import hosts
from jaxmllm.runtime.checkpoint import Checkpoints, state_bytes
from jaxmllm.runtime.checkpoint_files import CheckpointError
from jaxmllm.runtime.metrics import MetricsWriter
from jaxmllm.runtime.profiler import ProfilerWindow
from jaxmllm.runtime.progress import ProgressBar
from jaxmllm.runtime.signals import StopSignals
from jaxmllm.runtime.step_times import Completions
from jaxmllm.training.begin import begin
from jaxmllm.training.initial import CHECKPOINTS
from jaxmllm.training.process_messages import Messages
from jaxmllm.training.report import RunReport, StartedStep, TrainingError, due
from jaxmllm.training.run import USER_ERRORS, Run
from jaxmllm.training.run_folder import SCHEDULE_FILE
from jaxmllm.training.step_functions import TrainState

DATA_ERRORS = (*USER_ERRORS, LoadError)  # what loading a step may raise
RUN_ERRORS = (TrainingError, CheckpointError, LoadError)


def train(run: Run, stop: StopSignals | None = None) -> dict[str, Any]:
    """Train to the last step or until `stop` says so; returns the summary, also written to
    summary.json.

    Without `stop`, signals are received from here on. Continues from the latest checkpoint of the
    run folder, if there is one; the caller has checked by `open_folder` whether the run may do so.
    Raises `TrainingError` after too many non-finite updates or undecodable media, `CheckpointError`
    when the checkpoint does not fit, and `DATA_ERRORS` when a step cannot be loaded; where this is
    the only process, the state before that step is saved first.
    """
    logging = run.config.logging
    started = time.monotonic()
    # Faster processes wait for the others here: collectives that meet for the first time allow 30 s
    # of skew (Gloo).
    hosts.meet("the opening of its checkpoints")
    size = state_bytes(run.programs.saved_state)
    with (
        Checkpoints(run.directory / CHECKPOINTS, run.config.checkpoint.keep, size) as checkpoints,
        MetricsWriter(run.directory, logging.tensorboard, logging.wandb, run.is_main) as writer,
        nullcontext(stop) if stop else StopSignals() as stop,
    ):
        run, state, step = begin(run, checkpoints, writer)
        hosts.meet("training")
        loop = Loop(run, checkpoints, writer, stop, state, step)
        try:
            if step < run.config.run.steps:
                # Says that the run is not complete: a run that is killed cannot say so later
                writer.write_summary(loop.report.summary(step, time.monotonic() - started))
            loop.run_steps()
            checkpoints.wait()
        except (TrainingError, CheckpointError, OSError, *DATA_ERRORS) as error:
            seconds = time.monotonic() - started
            with suppress(OSError):  # perhaps the disk is what failed
                writer.write_summary(loop.report.summary(loop.step, seconds, str(error)))
            raise
        finally:
            loop.close()
        seconds = time.monotonic() - started
        summary = loop.report.summary(loop.step, seconds, stopped=loop.stopped)
        writer.write_summary(summary)
    return summary


class Loop:
    """The steps of one process from `step` on; `state` is the state after `step` steps."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        stop: StopSignals,
        state: TrainState,
        step: int,
    ) -> None:
        config = run.config
        self.run = run
        self.checkpoints = checkpoints
        self.stop = stop
        self.state = state
        self.step = step
        self.first_step = step
        self.stopped = False  # by a signal, which may leave an evaluation undone
        self.alone = jax.process_count() == 1
        self.together = hosts.current()
        board = self.together.board if self.together else None
        stop.begin_training(board, jax.process_index(), jax.process_count())
        self.progress = ProgressBar(config.run.steps, step, visible=run.is_main)
        self.profiler = ProfilerWindow(
            run.directory / "profile", config.profile.start, config.profile.steps
        )
        sources = [source for source in (run.batches, run.evaluation) if source is not None]
        self.loader = Loader(
            sources, config.data.workers, config.data.prefetch, interrupted=stop.ends_waiting
        )
        self.batches = self.loader.read(run.batches, step, config.run.steps)
        self.report = RunReport(
            run, writer, self.progress, self.loader, Messages(board, jax.process_index())
        )
        self.report.resume(step)
        self.completions = Completions()

    def run_steps(self) -> None:
        """Train until the last step is done, or a signal or an error ends the run."""
        try:
            self.stopped = self.report.evaluation_missing(self.step) and not self._evaluate()
            while self.step < self.run.config.run.steps and not self.stopped:
                asked = time.monotonic()
                batch = self._next_batch()
                self._start_step(batch, waited=time.monotonic() - asked)
                self.stopped = not self._save_and_evaluate()
        except Interrupted:  # by a signal, while waiting for data
            self.stopped = True
            self.report.settle()
            if self.step > self.first_step:
                self._save()

    def close(self) -> None:
        """End threads and worker processes, whichever way the run ended."""
        self.loader.close()
        self.report.close()
        self.completions.close()
        self.profiler.close(self.state.step)
        self.progress.close()

    def _next_batch(self) -> HostStep:
        try:
            return next(self.batches)
        except DATA_ERRORS:
            if self.step > self.first_step and self.alone:  # others would not join in saving
                self.report.settle()
                self._save()
            raise

    def _start_step(self, batch: HostStep, waited: float) -> None:
        """Start a step's programs, and read the metrics of the step before."""
        if self.step == self.first_step:
            hosts.meet("its first step")
        self.report.tell(self.step + 1, batch.failures)
        if self.together and due(self.step + 1, self.run.config.balance.check_every):
            self.together.post_plan(self.step + 1, batch.digest)
        if self.profiler.before_step(self.step, self.state.step):
            self.report.settle()
        programs = self.run.programs
        began = time.monotonic()
        self.state, metrics = programs.train(self.state, programs.put(batch))
        self.step += 1
        self.checkpoints.look()
        if self.run.is_main:  # while the devices compute
            programs.save_schedule(batch, self.run.directory / SCHEDULE_FILE)
            if self.profiler.recording:
                profiled = self.profiler.directory / f"schedule_{self.step}.npz"
                programs.save_schedule(batch, profiled)
        self.report.follow(
            StartedStep(self.step, batch, metrics, waited, began, self.completions.of(metrics))
        )

    def _save_and_evaluate(self) -> bool:
        """Save and evaluate where that is due; returns whether the run continues."""
        stopped = self.stop.should_stop()
        is_last = stopped or self.step == self.run.config.run.steps
        saves = is_last or due(self.step, self.run.config.checkpoint.every)
        evaluates = not stopped and self.report.evaluation_due(self.step)
        if saves or evaluates:
            self.report.settle()  # raises past a limit, so that no such state is saved
        if saves and (is_last or not self.report.streak):
            self._save()
        elif saves:
            streak = self.report.streak
            self.progress.print(
                f"step {self.step}: no checkpoint, the last {streak} updates were not finite"
            )
        return self._evaluate() if evaluates else not stopped

    def _evaluate(self) -> bool:
        """Evaluate; returns whether the run continues. If not, the state is saved, since nothing is
        wrong with it."""
        try:
            continues = self.report.evaluate(self.step, self.state, self.stop.should_stop)
        except TrainingError:
            self._save()
            raise
        except DATA_ERRORS:
            if self.alone:  # others would not join in saving
                self._save()
            raise
        if not continues:
            self._save()
        return continues

    def _save(self) -> None:
        """Save the state after the steps done so far; one inside a streak of skipped updates
        displaces no other."""
        saved = self.run.programs.to_saved(self.state)
        self.checkpoints.save(self.step, saved, sound=not self.report.streak)
