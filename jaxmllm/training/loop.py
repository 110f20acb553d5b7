"""The training loop: host steps in, metrics, checkpoints and evaluations out.

    next batch (prepared ahead) -> put -> train (asynchronous) -> read the metrics of the step before

Reading one step late keeps the devices busy: while step k runs, the host prepares step k + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax

from jaxmllm.config.read import dump_config
from jaxmllm.data.batches import continued_steps
from jaxmllm.data.workers.reader import Interrupted, Loader, LoadError
from jaxmllm.runtime import hosts
from jaxmllm.runtime.checkpoint import CheckpointError, Checkpoints
from jaxmllm.runtime.clock import Completions
from jaxmllm.runtime.metrics import MetricsWriter, ProgressBar
from jaxmllm.runtime.profiler import ProfilerWindow
from jaxmllm.runtime.resume import begun_config, changes
from jaxmllm.runtime.signals import StopSignals
from jaxmllm.training.data_stamps import check_data
from jaxmllm.training.history import continued_history, read_history, segment_of, write_history
from jaxmllm.training.initial import CHECKPOINTS, initial_state
from jaxmllm.training.messages import Messages
from jaxmllm.training.report import Pending, Report, TrainingError, due
from jaxmllm.training.run import USER_ERRORS, Run
from jaxmllm.training.run_folder import read_config, write_config
from jaxmllm.training.step_functions import TrainState

DATA_ERRORS = (*USER_ERRORS, LoadError)  # what loading a step may raise
RUN_ERRORS = (TrainingError, CheckpointError, LoadError)


def train(run: Run, stop: StopSignals | None = None) -> dict[str, Any]:
    """Train to the last step or until `stop` says so; returns the summary that it also writes to summary.json.

    Without `stop`, signals are received from here on. Continues from the latest checkpoint of the run folder, if
    there is one; `check_folder` says whether that is meant. Raises `TrainingError` after too many non-finite updates or
    undecodable media, `CheckpointError` when the checkpoint does not fit, and `DATA_ERRORS` when a step cannot be
    loaded, after saving the steps before it where this is the only process.
    """
    config = run.config
    started = time.monotonic()
    # Whoever is faster waits for the others: collectives that meet for the first time allow 30 s of skew (Gloo).
    hosts.meet("the opening of its checkpoints")
    with (
        Checkpoints(run.directory / CHECKPOINTS, config.checkpoint.keep) as checkpoints,
        MetricsWriter(run.directory, config.logging.tensorboard, config.logging.wandb, run.is_main) as writer,
        nullcontext(stop) if stop else StopSignals() as stop,
    ):
        run, state, step = _begin(run, checkpoints, writer)
        hosts.meet("training")
        together = hosts.current()
        stop.begin_training(together.board if together else None, jax.process_index(), jax.process_count())
        progress = ProgressBar(config.run.steps, step, visible=run.is_main)
        profiler = ProfilerWindow(run.directory / "profile", config.profile.start, config.profile.steps)
        sources = [source for source in (run.batches, run.evaluation) if source is not None]
        loader = Loader(sources, config.data.workers, config.data.prefetch, interrupted=stop.ends_waiting)
        batches = loader.read(run.batches, step, config.run.steps)
        messages = Messages(together.board if together else None, jax.process_index())
        report = Report(run, writer, progress, loader, messages)
        report.resume(step)
        completions = Completions()
        alone = jax.process_count() == 1
        first, stopped = step, False

        def save() -> None:
            """Keep the state after the steps done so far; one inside a streak of skipped updates evicts no other."""
            checkpoints.save(step, run.programs.to_saved(state), sound=not report.streak)

        try:
            if report.evaluation_missing(step):
                stopped = not _evaluate(report, step, state, save, stop)
            while step < config.run.steps and not stopped:
                asked = time.monotonic()
                try:
                    batch = next(batches)
                except DATA_ERRORS:
                    if step > first and alone:  # others would not join in saving
                        report.settle()
                        save()
                    raise
                waited = time.monotonic() - asked
                if step == first:
                    hosts.meet("its first step")
                report.tell(step + 1, batch.failures)
                if together and due(step + 1, config.balance.check_every):
                    together.post_plan(step + 1, batch.digest)
                if profiler.before_step(step, state.step):
                    report.settle()
                began = time.monotonic()
                state, metrics = run.programs.train(state, run.programs.put(batch))
                step += 1
                report.follow(Pending(step, batch, metrics, waited, began, completions.of(metrics)))

                stopped = stop.should_stop()
                last = stopped or step == config.run.steps
                saves = last or due(step, config.checkpoint.every)
                evaluates = not stopped and report.evaluation_due(step)
                if saves or evaluates:
                    report.settle()  # never keep a state that the limits forbid
                if saves and (last or not report.streak):
                    save()
                elif saves:
                    progress.print(f"step {step}: no checkpoint, the last {report.streak} updates were not finite")
                if evaluates:
                    stopped = not _evaluate(report, step, state, save, stop)
        except (TrainingError, *DATA_ERRORS) as error:
            writer.write_summary(report.summary(step, time.monotonic() - started, str(error)))
            raise
        except Interrupted:  # by a signal, in a wait for data
            report.settle()
            if step > first:
                save()
        finally:
            loader.close()
            report.close()
            completions.close()
            profiler.close(state.step)
            progress.close()
        checkpoints.wait()
        summary = report.summary(step, time.monotonic() - started)
        writer.write_summary(summary)
    return summary


def _evaluate(report: Report, step: int, state: TrainState, save: Callable[[], None], stop: StopSignals) -> bool:
    """Whether the run continues after an evaluation; if not, the state is kept, for nothing is wrong with it."""
    try:
        continues = report.evaluate(step, state, stop.should_stop)
    except TrainingError:
        save()
        raise
    except DATA_ERRORS:
        if jax.process_count() == 1:  # others would not join in saving
            save()
        raise
    if not continues:
        save()
    return continues


def _begin(run: Run, checkpoints: Checkpoints, writer: MetricsWriter) -> tuple[Run, TrainState, int]:
    """Restore the latest checkpoint, or start afresh; leave in the run folder what the run is made from.

    Returns the run with its batches from there on, its state, and the steps done.
    """
    check_data(run.directory, run.corpus, run.is_main, run.say)
    config, saved_config = begun_config(run.config), read_config(run.directory)
    history = read_history(run.directory) or ((segment_of(saved_config),) if saved_config else ())
    if run.is_main:
        print(dump_config(config), run.describe(), sep="\n")
    restored = checkpoints.restore_latest(run.programs.saved_state, run.say)
    if restored is None:
        state, step = initial_state(config, run.programs, run.say), 0
    else:
        state, step = run.programs.from_saved(restored[0]), restored[1]
    history, lines = continued_history(history, segment_of(config, step), run.directory)
    for line in (*lines, *(changes(saved_config, config, step) if saved_config else ())):
        run.say(line)
    writer.resume_from(step)
    if run.is_main:
        write_history(run.directory, history)
        write_config(run.directory, config)
    batches = continued_steps(run.batches.filler, run.corpus.members, config.run.seed, history)
    return replace(run, batches=batches), state, step
