"""Batches of made-up lengths for the model, layouts and rows of a config, and the sizes that a run would choose for
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from jaxmllm.balance.records import BatchItems, PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.config.schema import Config
from jaxmllm.data.media.modalities import row_formats
from jaxmllm.data.text.tokenizers import load_tokenizer
from jaxmllm.models.mllm import MLLM, build_model
from jaxmllm.row_format import RowFormat
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.prepare import run_modalities, vocabulary
from jaxmllm.setup.sizing import sizing_inputs
from jaxmllm.setup.spans import Spans, spans_of_phases
from jaxmllm.tools.workload import generated_batches, longest, mix_for


@dataclass(frozen=True)
class GeneratedLengths:
    """A model on a mesh, and lengths for it in place of data."""

    config: Config
    model: MLLM
    formats: Mapping[str, RowFormat]  # by encoder phase
    spans: Spans
    samples: list[BatchItems]  # that sizes are chosen from
    items: BatchItems  # another batch

    @property
    def spec(self) -> PlanSpec:
        """The sizes that a run would choose."""
        config = self.config
        mix = mix_for(config.model)
        largest = {phase: longest(phase, mix, config.model) for phase in self.items.phases}
        return choose_sizes(
            self.samples,
            sizing_inputs(config, self.model, self.formats, largest, self.spans),
            exchange_grids(self.model),
            config.balance,
            nodes_of_ranks(config, self.model),
            exchange_backend(config, self.model),
        )


def generated_lengths(config: Config, mesh: Mesh | AbstractMesh, seed: int) -> GeneratedLengths:
    """Compose the config's model on a mesh, and make up lengths of `data.batch_size` examples."""
    words = vocabulary(config, load_tokenizer(config.data.tokenizer))
    model = build_model(config.model, words, config.components, mesh)
    spans = spans_of_phases(config, model)
    samples, items = generated_batches(config.data.batch_size, seed, config.model)
    return GeneratedLengths(
        config=config,
        model=model,
        formats=row_formats(run_modalities(config, model, spans)),
        spans=spans,
        samples=samples,
        items=items,
    )
