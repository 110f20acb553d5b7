"""The training loop: host steps in, metrics, checkpoints and evaluations out.

    next batch (prepared ahead) -> put -> train (asynchronous) -> read the metrics of the step before

Reading one step late keeps the devices busy: while step k runs, the host prepares step k + 1.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from jaxmllm.config import dump_config
from jaxmllm.data.reader import Loader, LoadError
from jaxmllm.training.build import USER_ERRORS, Run
from jaxmllm.training.checkpoint import CheckpointError, Checkpoints
from jaxmllm.training.clock import Completions
from jaxmllm.training.files import write_atomically
from jaxmllm.training.initial import CHECKPOINTS, initial_state
from jaxmllm.training.metrics import MetricsWriter, ProgressBar
from jaxmllm.training.profiler import ProfilerWindow
from jaxmllm.training.report import Pending, Report, TrainingError, due
from jaxmllm.training.resume import begun_config, changes
from jaxmllm.training.run_folder import read_config, write_config
from jaxmllm.training.signals import StopSignals
from jaxmllm.training.step import TrainState

DATA_FILE = "data.json"  # what the run was trained on
REJECTED_FILE = "rejected.jsonl"  # examples that were refused, with reasons

RUN_ERRORS = (TrainingError, CheckpointError, LoadError)


def train(run: Run, stop: StopSignals | None = None) -> dict[str, Any]:
    """Train to the last step or until `stop` says so; returns the summary that it also writes to summary.json.

    Without `stop`, signals are received from here on. Continues from the latest checkpoint of the run folder, if
    there is one; `check_folder` says whether that is meant. Raises `TrainingError` after too many non-finite updates or
    undecodable media, `CheckpointError` when the checkpoint does not fit.
    """
    config = run.config
    started = time.monotonic()
    with (
        Checkpoints(run.directory / CHECKPOINTS, config.checkpoint.keep) as checkpoints,
        MetricsWriter(run.directory, config.logging.tensorboard, config.logging.wandb, run.is_main) as writer,
        nullcontext(stop) if stop else StopSignals() as stop,
    ):
        state, step = _begin(run, checkpoints, writer)
        board = multihost.get_jax_distributed_client() if jax.process_count() > 1 else None
        stop.begin_training(board, jax.process_index(), jax.process_count())
        progress = ProgressBar(config.run.steps, step, visible=run.is_main)
        profiler = ProfilerWindow(run.directory / "profile", config.profile.start, config.profile.steps)
        sources = [source for source in (run.batches, run.evaluation) if source is not None]
        loader = Loader(sources, config.data.workers, config.data.prefetch, progress.print)
        batches = loader.read(run.batches, step, config.run.steps)
        report, completions = Report(run, writer, progress, loader), Completions()
        first, stopped = step, False
        try:
            if config.evaluation.at_start and step == 0:
                report.evaluate(step, state)
            while step < config.run.steps and not stopped:
                asked = time.monotonic()
                try:
                    batch = next(batches)
                except (*USER_ERRORS, LoadError):
                    if step > first and jax.process_count() == 1:  # others would not join in saving
                        report.settle()
                        checkpoints.save(step, run.programs.to_saved(state))
                    raise
                waited = time.monotonic() - asked
                for failure in batch.failures:
                    progress.print(f"step {step + 1}: masked: {failure}")
                if jax.process_count() > 1 and due(step + 1, config.balance.check_every):
                    check_digests(step + 1, multihost_utils.process_allgather(_digest_bytes(batch.digest)))
                if profiler.before_step(step, state.step):
                    report.settle()
                began = time.monotonic()
                state, metrics = run.programs.train(state, run.programs.put(batch))
                step += 1
                report.follow(Pending(step, batch, metrics, waited, began, completions.of(metrics)))

                stopped = stop.should_stop()
                last = stopped or step == config.run.steps
                saves = last or due(step, config.checkpoint.every)
                evaluates = run.evaluation is not None and not stopped and (last or due(step, config.evaluation.every))
                if saves or evaluates:
                    report.settle()  # never keep a state that the limits forbid
                if saves and (last or not report.streak):
                    checkpoints.save(step, run.programs.to_saved(state), sound=not report.streak)
                elif saves:
                    progress.print(f"step {step}: no checkpoint, the last {report.streak} updates were not finite")
                if evaluates:
                    report.evaluate(step, state)
        finally:
            loader.close()
            completions.close()
            profiler.close(state.step)
            progress.close()
        checkpoints.wait()
        summary = report.summary(step, time.monotonic() - started)
        writer.write_summary(summary)
    return summary


def _begin(run: Run, checkpoints: Checkpoints, writer: MetricsWriter) -> tuple[TrainState, int]:
    """Restore the latest checkpoint, or start afresh; leave in the run folder what the run is made from."""
    _check_data(run)
    config, saved_config = begun_config(run.config), read_config(run.directory)
    if run.is_main:
        print(dump_config(config), run.describe(), sep="\n")
    restored = checkpoints.restore_latest(run.programs.saved_state, run.say)
    if restored is None:
        state, step = initial_state(config, run.programs, run.say), 0
    else:
        state, step = run.programs.from_saved(restored[0]), restored[1]
    for line in changes(saved_config, config, step) if saved_config else ():
        run.say(line)
    writer.resume_from(step)
    if run.is_main:
        write_config(run.directory, config)
    return state, step


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
