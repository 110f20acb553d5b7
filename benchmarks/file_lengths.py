"""Lengths of the examples of a folder of real files, for benchmarks that plan and run nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmllm.balance.records import BatchItems
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import ConfigError
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.sources.source import DataError
from jaxmllm.setup.planning_mesh import staged_mesh
from jaxmllm.setup.prepare import prepare

CONFIG = Path(__file__).parents[1] / "configs" / "real-small.yaml"
FILE_ERRORS = (ConfigError, DataError)  # raised for a folder that cannot be read


@dataclass(frozen=True)
class FileLengths:
    """The tokens (bytes), patches and frames that configs/real-small.yaml makes of a folder's
    examples.

    Attributes:
      phases: phases of the planned model. Media without an encoder among them keep their places in
        the language sequences, as tokens of text.
    """

    corpus: Corpus
    phases: Collection[str]

    @classmethod
    def of(cls, folder: Path, phases: Collection[str]) -> FileLengths:
        """Read the lengths of a folder that holds train.jsonl. Raises one of `FILE_ERRORS` if it
        cannot be read."""
        overrides = [f"data.root={folder}", "data.evaluation=[]"]
        overrides += ["pipeline.stages=2", "mesh.data=1", "mesh.fsdp=1"]
        config = load_config(CONFIG, overrides)
        return cls(prepare(config, staged_mesh(config)).corpus, phases)

    def draw(self, seed: Sequence[int], examples: int) -> BatchItems:
        """A batch of examples, drawn with replacement."""
        random = np.random.default_rng(seed)
        # Examples stay in the order drawn, not sorted: neighbours in a file are similar, and mode
        # `none` gives each rank consecutive examples of a batch
        items = self.corpus.gather(random.integers(0, len(self.corpus), examples))
        items_by_phase = {name: items.phases[name] for name in self.phases}
        return BatchItems(items.examples, items.targets, items_by_phase)

    @property
    def longest(self) -> dict[str, int]:
        """Slots of the largest item of each phase."""
        return {phase: self.corpus.longest(phase) for phase in self.phases}
