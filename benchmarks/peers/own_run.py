"""Our system in comparisons with others: the programs of a run on one device, compiled beforehand,
and a run that starts from the parameters of a folder.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.balance_step import RowsOf, runs_first
from benchmarks.peers.answering import peak_bytes
from benchmarks.peers.examples import KeptCorpus
from jaxmllm.config.schema import Config
from jaxmllm.data.rows.fill import HostStep, StepFiller
from jaxmllm.runtime.compilation_cache import keep_programs
from jaxmllm.setup.build import draw_rule, phased_programs
from jaxmllm.setup.prepare import RunInputs, prepare
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.training.folder_parameters import read_folder
from jaxmllm.training.programs.phased import PhasedPrograms
from jaxmllm.training.run import USER_ERRORS
from sharding.mesh import make_mesh


def compiled_programs(config: Config) -> tuple[RunInputs, PhasedPrograms]:
    """A run's data and its compiled programs on one device. They are read from disk if some process
    has compiled them before."""
    inputs, programs = _programs(config)
    return inputs, programs.compile()


def _programs(config: Config) -> tuple[RunInputs, PhasedPrograms]:
    """A run's data and its programs on one device, not compiled yet."""
    keep_programs(config)
    inputs = prepare(config, make_mesh(config.mesh_sizes, jax.devices()[:1]))
    programs = phased_programs(
        config,
        inputs.model,
        inputs.corpus.formats,
        plan_spec(config, inputs),
        len(inputs.corpus.sources),
    )
    assert isinstance(programs, PhasedPrograms)
    return inputs, programs


def compile_alone(config: Config) -> float:
    """Compile the programs of a run in another process: compiling fragments memory, and most runs
    find their programs compiled.

    Returns:
      Seconds of compiling, without the time to start the process and read the data.

    Raises:
      ValueError: that process failed, and has said why.
    """
    context = multiprocessing.get_context("spawn")
    seconds = context.Value("d", 0.0)
    process = context.Process(target=_compile, args=(config, seconds))
    process.start()
    process.join()
    if process.exitcode:
        raise ValueError("ours was not compiled")
    return seconds.value


def _compile(config: Config, seconds: Any) -> None:
    with suppress(*USER_ERRORS):  # the measuring process raises them, too, and reports them
        _, programs = _programs(config)
        start = time.perf_counter()
        programs.compile()
        seconds.value = time.perf_counter() - start


def run_before(
    programs: PhasedPrograms, params: Any, host: HostStep, programs_run: set[RowsOf]
) -> None:
    """Run the programs of a step, untimed, if some would run for the first time: that takes longer,
    and happens only once in training. Adds the step's rows to `programs_run`."""
    if runs_first(host, programs_run):
        jax.block_until_ready(programs.gradients(params, programs.put(host)))


class OwnRun:
    """A run, step by step.

    Args:
      components: components whose parameters are read from the folder; all others are initialized
        from the seed. None: all are read.
      phase: phase whose slots are counted.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        programs: PhasedPrograms,
        corpus: KeptCorpus,
        components: Sequence[str] | None = None,
        phase: str = "language",
    ):
        self.programs = programs
        self.filler = StepFiller(
            corpus,
            programs.spec,
            programs.local_share,
            programs.attention,
            draws=draw_rule(config),
        )
        self.phase = phase
        self.programs_run: set[RowsOf] = set()
        state = programs.init(config.run.seed)
        abstract = programs.saved_state.params
        names = abstract if components is None else components
        read = {name: read_folder(str(folder), abstract[name], name) for name in names}
        self.state = state._replace(params={**state.params, **read})
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(read))

    def loss(self, examples: Any) -> float:
        """Mean loss of a batch, without an update: over patches if the model draws, else over
        tokens."""
        batch = self.programs.put(self.filler(0, examples))
        _, sums, _ = self.programs.gradients(self.state.params, batch)
        drawn_sums = sums.drawn
        loss_and_count = (
            (sums.loss, sums.targets)
            if drawn_sums is None
            else (drawn_sums.loss, drawn_sums.patches)
        )
        total, targets = (float(np.sum(jax.device_get(x))) for x in loss_and_count)
        return total / targets

    def __call__(self, step: int, examples: Any) -> dict[str, Any]:
        """Train on a batch; return the seconds of the step and of the host's work, and the loss."""
        start = time.perf_counter()
        cpu = time.process_time()
        host = self.filler(step, examples)
        fill_seconds = time.perf_counter() - start
        fill_cpu = time.process_time() - cpu
        run_before(self.programs, self.state.params, host, self.programs_run)
        start = time.perf_counter()
        cpu = time.process_time()
        self.state, metrics = self.programs.train(self.state, self.programs.put(host))
        jax.block_until_ready((self.state, metrics))
        seconds = fill_seconds + time.perf_counter() - start
        cpu_seconds = fill_cpu + time.process_time() - cpu
        slots = sum(row["segments"].size for row in host.rows[self.phase])
        record = {"seconds": seconds, "cpu_seconds": cpu_seconds, "host": fill_seconds}
        record["loss"] = float(metrics["loss"])
        return record | {"targets": host.targets, "slots": slots, "peak_bytes": peak_bytes()}
