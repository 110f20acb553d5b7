"""Our system in comparisons with others: the programs of a run on one device, from the parameters of a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peers.answering import peak_bytes
from benchmarks.peers.examples import KeptCorpus
from jaxmllm.config.schema import Config
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.setup.build import draw_rule, phased_programs
from jaxmllm.setup.prepare import RunInputs
from jaxmllm.setup.sizing import plan_spec
from jaxmllm.training.folder_parameters import read_folder


class OwnRun:
    """A run, step by step.

    Args:
      components: whose parameters are the folder's; all but these begin as the seed says. None: all.
      phase: whose slots are counted.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        inputs: RunInputs,
        corpus: KeptCorpus,
        components: Sequence[str] | None = None,
        phase: str = "language",
    ):
        began = time.perf_counter()
        spec = plan_spec(config, inputs)
        programs = phased_programs(
            config, inputs.model, inputs.corpus.formats, spec, len(inputs.corpus.sources)
        )
        self.programs: Any = programs.compile()
        self.compiled = time.perf_counter() - began
        draws = draw_rule(config)
        self.filler = StepFiller(
            corpus, spec, programs.local_share, programs.attention, draws=draws
        )
        self.phase = phase
        state = self.programs.init(config.run.seed)
        abstract = self.programs.saved_state.params
        names = abstract if components is None else components
        read = {name: read_folder(str(folder), abstract[name], name) for name in names}
        self.state = state._replace(params={**state.params, **read})
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(read))

    def loss(self, examples: Any) -> float:
        """The mean loss of a batch, of which nothing is learned: that of patches where a model draws."""
        batch = self.programs.put(self.filler(0, examples))
        _, sums, _ = self.programs.gradients(self.state.params, batch)
        drawn = sums.drawn
        of_kind = (sums.loss, sums.targets) if drawn is None else (drawn.loss, drawn.patches)
        total, targets = (float(np.sum(jax.device_get(x))) for x in of_kind)
        return total / targets

    def __call__(self, step: int, examples: Any) -> dict[str, Any]:
        """Seconds of a step, of the host's work in it, and the loss."""
        began, cpu = time.perf_counter(), time.process_time()
        host = self.filler(step, examples)
        filled = time.perf_counter() - began
        self.state, metrics = self.programs.train(self.state, self.programs.put(host))
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - began
        slots = sum(row["segments"].size for row in host.rows[self.phase])
        record = {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "host": filled}
        record["loss"] = float(metrics["loss"])
        return record | {"targets": host.targets, "slots": slots, "peak_bytes": peak_bytes()}
