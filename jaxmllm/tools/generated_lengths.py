"""Batches of made-up lengths for the model, layouts and rows of a config, and the sizes that a run
would choose for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from jaxmllm.balance.records import BatchItems, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.balance.sizes.inputs import SizingInputs
from jaxmllm.balance.stages.sizes import PipelineSizes
from jaxmllm.config.schema import Config
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.build import phased_programs, staged_programs
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.prepare import vocabulary
from jaxmllm.setup.sizing import sizing_inputs, stage_sizes
from jaxmllm.setup.spans import Spans, spans_of_phases
from jaxmllm.tools.workload import DEFAULT_MIX, generated_batches, longest, mix_for
from jaxmllm.training.programs.base import Programs


@dataclass(frozen=True)
class GeneratedLengths:
    """A model on a mesh, and lengths for it in place of data."""

    config: Config
    model: MLLM
    formats: Mapping[str, RowFormat]  # by encoder phase
    spans: Spans
    samples: list[BatchItems]  # batches that sizes are chosen from
    items: BatchItems  # another batch
    mix: Mapping[str, float]  # weight of every task

    @property
    def spec(self) -> PlanSpec:
        """The sizes that a run without stages would choose."""
        config = self.config
        return choose_sizes(
            self.samples,
            self._sizing_inputs,
            exchange_grids(self.model),
            config.balance,
            nodes_of_ranks(config, self.model),
            exchange_backend(config, self.model),
        )

    @property
    def pipeline(self) -> PipelineSizes:
        """The sizes that a run with stages would choose."""
        return stage_sizes(self.config, self.model, self.samples, self._sizing_inputs)

    @property
    def _sizing_inputs(self) -> list[SizingInputs]:
        shapes = self.config.model
        largest = {phase: longest(phase, self.mix, shapes) for phase in self.items.phases}
        return sizing_inputs(self.config, self.model, self.formats, largest, self.spans)

    def programs(self) -> Programs:
        """The programs of a run, not compiled yet."""
        config = self.config
        model = self.model
        formats = self.formats
        sources = len(config.data.sources)
        if config.pipeline.stages > 1:
            return staged_programs(config, model, formats, self.pipeline, sources)
        return phased_programs(config, model, formats, self.spec, sources)


def generated_lengths(
    config: Config,
    mesh: Mesh | AbstractMesh,
    seed: int,
    mix: Mapping[str, float] = DEFAULT_MIX,
) -> GeneratedLengths:
    """Compose the config's model on a mesh, and make up lengths of `data.batch_size` examples, from
    the tasks of a mix that the model has encoders for and those of what it draws."""
    mix = mix_for(config.model, mix, learns_text=config.objective.learns_text)
    words = vocabulary(config, load_tokenizer(config.data))
    model = build_model(config.model, words, config.components, mesh)
    spans = spans_of_phases(config, model)
    samples, (items,) = generated_batches(config.data.batch_size, seed, config.model, mix)
    return GeneratedLengths(
        config=config,
        model=model,
        formats=row_formats(modalities(config.model, config.data)),
        spans=spans,
        samples=samples,
        items=items,
        mix=mix,
    )
