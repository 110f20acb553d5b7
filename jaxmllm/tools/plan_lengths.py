"""Lengths of the batches that `jaxmllm plan` plans: of the config's data, or made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from jaxmllm.balance.records import BatchItems
from jaxmllm.cluster.search.layouts import LengthsError, Sampled
from jaxmllm.config.schema import Config
from jaxmllm.data.batches import Segment, continued_examples, example_order, source_batches
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.tokenizers import Tokenizer
from jaxmllm.models.mllm import MLLM
from jaxmllm.phases import LANGUAGE
from jaxmllm.setup.prepare import open_corpora, row_limits, sizing_samples
from jaxmllm.setup.sizing import largest_examples
from jaxmllm.setup.spans import Spans
from jaxmllm.tools.workload import DEFAULT_MIX, generated_batches, longest, mix_for
from jaxmllm.training.history import segment_of

STEPS: Final = 5  # most batches that are planned
STEP_EXAMPLES: Final = 4096  # most examples of several batches together
UNBOUNDED: Final = 1 << 40  # slots of a row without a bound: the planner says what does not fit


def planned_steps(batch_size: int) -> int:
    """How many batches are planned."""
    return min(max(STEP_EXAMPLES // batch_size, 1), STEPS)


@dataclass
class DataLengths:
    """Batches of the config's data, as a run draws them."""

    tokenizer: Tokenizer
    steps: Sequence[int]  # numbers of the batches that are planned
    # Batch sizes and weights up to these steps; empty: always those of the config
    history: Sequence[Segment] = ()
    _known_lengths: dict[str, Sampled | LengthsError] = field(default_factory=dict)

    def __call__(self, config: Config, model: MLLM, spans: Spans) -> Sampled:
        media = modalities(config.model, config.data)
        stages = config.pipeline.stages > 1
        limits = row_limits(config, model, row_formats(media), spans, fitting=UNBOUNDED)
        # Examples are refused by bounds that the config names, so lengths depend on these alone
        limits = {phase: slots for phase, slots in limits.items() if _is_bounded(config, phase)}
        key = f"{stages} {limits} {media!r}"
        if key not in self._known_lengths:
            self._known_lengths[key] = self._data_lengths(config, model, spans)
        known = self._known_lengths[key]
        if isinstance(known, LengthsError):
            raise known
        return known

    def _data_lengths(self, config: Config, model: MLLM, spans: Spans) -> Sampled | LengthsError:
        """Lengths of the data's batches for one layout's rows, or the error that refuses them."""
        media = modalities(config.model, config.data)
        try:
            corpus, held_out = open_corpora(_unbounded(config), self.tokenizer, media, model, spans)
        except DataError as error:
            return LengthsError(str(error))
        corpora = [corpus] if held_out is None else [corpus, held_out]
        order = example_order(corpus.members, config.run.seed)
        size = config.data.batch_size
        history = self.history or [segment_of(config)]
        examples_of_steps = [
            continued_examples(corpus.members, config.run.seed, history, step)
            for step in self.steps
        ]
        samples = sizing_samples(order, corpus, size)
        others = source_batches(corpus.members, corpus, size)
        steps = [corpus.gather(examples) for examples in examples_of_steps]
        # Held-out examples are never planned here, but a run's rows have to hold them too.
        longest_items = {
            phase: max(opened.longest(phase) for opened in corpora) for phase in model.phases
        }
        largest = []
        if config.pipeline.stages > 1:
            media_phases = [phase for phase in model.phases if phase != LANGUAGE]
            largest = [
                largest_examples(opened, phase) for opened in corpora for phase in media_phases
            ]
        return Sampled(
            samples=samples,
            others=others,
            steps=steps,
            longest=longest_items,
            formats=corpus.formats,
            sources=len(corpus.sources),
            largest=largest,
        )


@dataclass
class MadeUpLengths:
    """Batches of the generator in jaxmllm/tools/workload.py."""

    seed: int
    mix: Mapping[str, float] = field(default_factory=lambda: DEFAULT_MIX)
    _known_lengths: dict[str, Sampled] = field(default_factory=dict)
    _batches: tuple[list[BatchItems], list[BatchItems]] | None = None

    def __call__(self, config: Config, model: MLLM, spans: Spans) -> Sampled:
        media = modalities(config.model, config.data)
        key = repr(media)
        if key not in self._known_lengths:
            learns_text = config.objective.learns_text
            mix = mix_for(config.model, self.mix, learns_text)
            if self._batches is None:
                size = config.data.batch_size
                self._batches = generated_batches(
                    size, self.seed, config.model, mix, planned_steps(size)
                )
            samples, steps = self._batches
            self._known_lengths[key] = Sampled(
                samples=samples,
                others=[],
                steps=steps,
                longest={phase: longest(phase, mix, config.model) for phase in model.phases},
                formats=row_formats(media),
                sources=len(config.data.sources),
            )
        return self._known_lengths[key]


def _unbounded(config: Config) -> Config:
    """The config with rows of any size, where it does not name a bound."""
    phases = {
        phase: settings.model_copy(update={"max_capacity": UNBOUNDED})
        for phase in config.model.phases
        if (settings := getattr(config.phases, phase)).max_capacity == "auto"
    }
    return config.model_copy(update={"phases": config.phases.model_copy(update=phases)})


def _is_bounded(config: Config, phase: str) -> bool:
    settings = getattr(config.phases, phase)
    return (settings.capacities, settings.max_capacity) != ("auto", "auto")
