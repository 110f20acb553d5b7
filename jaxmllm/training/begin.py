"""The beginning of a run: at its latest checkpoint or with fresh parameters; the run folder records
what it is made from."""

from __future__ import annotations

from dataclasses import replace

from jaxmllm.config.read import dump_config
from jaxmllm.data.batches import continued_steps
from jaxmllm.runtime.checkpoint import Checkpoints
from jaxmllm.runtime.metrics import MetricsWriter
from jaxmllm.runtime.resume import begun_config, changes
from jaxmllm.training.data_stamps import check_data, write_data
from jaxmllm.training.history import continued_history, read_history, segment_of, write_history
from jaxmllm.training.initial import initial_state
from jaxmllm.training.run import Run
from jaxmllm.training.run_folder import read_config, write_config
from jaxmllm.training.step_functions import TrainState


def begin(run: Run, checkpoints: Checkpoints, writer: MetricsWriter) -> tuple[Run, TrainState, int]:
    """Restore the latest checkpoint or make a new state; store what the run is made from.

    Returns the run with its batches from there on, its state, and the steps done.
    """
    check_data(run.directory, run.corpus, run.is_main, run.say)
    config = begun_config(run.config)
    saved_config = read_config(run.directory)
    history = read_history(run.directory) or ((segment_of(saved_config),) if saved_config else ())
    if run.is_main:
        print(dump_config(config), run.describe(), sep="\n")
    restored = checkpoints.restore_latest(run.programs.saved_state, run.say)
    if restored is None:
        state = initial_state(config, run.programs, run.say)
        step = 0
    else:
        saved, step = restored
        state = run.programs.from_saved(saved)
    history, lines = continued_history(history, segment_of(config, step), run.directory)
    for line in (*lines, *(changes(saved_config, config, step) if saved_config else ())):
        run.say(line)
    writer.resume_from(step)
    if run.is_main:
        # The config first: if a kill left a folder with other files of a run but no config, the
        # folder would be refused.
        write_config(run.directory, config)
        write_history(run.directory, history)
        write_data(run.directory, run.corpus)
    batches = continued_steps(run.batches.filler, run.corpus.members, config.run.seed, history)
    return replace(run, batches=batches), state, step
