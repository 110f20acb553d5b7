"""A run that is ready to train: what setup/ builds and the loop works on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from jaxmllm.balance.records import RowClass
from jaxmllm.config.schema import Config, ConfigError
from jaxmllm.data.batches import Steps
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.rows.batch import MisalignmentError
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.tokenizers import TokenizerError
from jaxmllm.runtime import compilation_cache, compiler_options
from jaxmllm.runtime.compilations import CompilationCounter
from jaxmllm.training.process_messages import WarningLog
from jaxmllm.training.programs.base import Programs
from sharding.mesh import MeshError
from sharding.pipeline.ring import PipelineError

# Errors that a user's config, data or mesh can cause; all others are bugs and keep their traceback.
USER_ERRORS = (ConfigError, DataError, MeshError, MisalignmentError, PipelineError, TokenizerError)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    config: Config
    programs: Programs
    corpus: Corpus
    batches: Steps
    evaluation: Steps | None
    sources: tuple[str, ...]  # names of the sources, by source number
    head_flops: int  # of one slot
    peak_flops: float | None  # of one device
    compilations: CompilationCounter
    warnings: WarningLog
    held_out: Corpus | None  # what `evaluation` is made from
    # Phases whose ranks share no rows, since they are on different nodes
    left_alone: tuple[str, ...]

    @property
    def directory(self) -> Path:
        return Path(self.config.run.directory)

    @property
    def is_main(self) -> bool:
        return jax.process_index() == 0

    def say(self, line: str) -> None:
        """Print a line once per run, not once per process."""
        if self.is_main:
            print(line, flush=True)

    def describe(self) -> str:
        """A few lines: the sizes that `auto` resolved to, rejected examples, and other choices."""
        rejected = (
            ", ".join(f"{n} {reason}" for reason, n in self.corpus.rejected_counts().items())
            or "none"
        )
        lines = [f"data: {len(self.corpus)} examples; rejected: {rejected}"]
        for name, phase in self.programs.spec.phases.items():
            rows = " and ".join(map(_row_class_text, phase.classes))
            parts = self.programs.layouts[name].parts
            ranks = f"{phase.ranks} ranks" + (f" of {parts} parts" if parts > 1 else "")
            model = self.programs.functions.model
            block = self.programs.attention.blocks[name]
            kernel = model.attention_choice(name, block).kernel
            kept_microbatches = self.programs.kept_residuals.get(name)
            residuals = (
                f"residuals of up to {kept_microbatches} microbatches kept, "
                if kept_microbatches
                else ""
            )
            lines.append(
                f"{name}: {ranks}, rows of {rows} slots, at most {phase.max_segments} segments, "
                f"{residuals}attention kernel {kernel}"
            )
        if self.left_alone:
            lines.append(
                f"rows of one rank each, since groups of ranks would cross nodes: {', '.join(self.left_alone)} "
                "(balance.spans_cross_nodes=true allows them)"
            )
        if gradient_bytes := self.programs.whole_gradient_bytes:
            sizes = ", ".join(
                f"{name} {size / 1e9:.2f} GB" for name, size in gradient_bytes.items()
            )
            lines.append(
                f"gradients reduced once a step, whole on every device until then: {sizes}"
            )
        for name, route in self.programs.spec.routes.items():
            pools = f"pools of {route.encoder_pool} and {route.language_pool} tokens"
            lines.append(f"route {name}: {pools}, {route.backend} exchange")
        lines += self.programs.describe_memory()
        lines.append(compiler_options.describe(jax.default_backend()))
        lines.append(compilation_cache.describe(self.config))
        return "\n".join(lines)


def _row_class_text(row_class: RowClass) -> str:
    capacity, span = row_class
    return str(capacity) if span == 1 else f"{span} x {capacity}"
