"""Drawing with a run: its config and weights, and programs whose rows are chosen for the requests.

run folder --drawing_config--> config of a model of which nothing is trained
requests, like a corpus --index--> conversations that end with a picture --sizes--> programs
checkpoint --> weights (averages where there are any) --> pictures
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.balance.records import PlanSpec
from jaxmllm.balance.sizes.choose import choose_sizes
from jaxmllm.config.read import load_config
from jaxmllm.config.schema import Config, ConfigError, PipelineConfig, TrainingConfig
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.index.builder import uncached_index
from jaxmllm.data.media.blanks import Blank, Blanks
from jaxmllm.data.media.generated import GeneratedPixels
from jaxmllm.data.media.latents import GeneratedLatents
from jaxmllm.data.media.modalities import modalities
from jaxmllm.data.media.reference import Clip
from jaxmllm.data.rows.draws import DrawRule
from jaxmllm.data.rows.fill import StepFiller
from jaxmllm.data.rows.masks import Row
from jaxmllm.data.sources.requests import Requests
from jaxmllm.data.sources.source import DataError
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.models.compose import build_model
from jaxmllm.runtime.resume import check_free
from jaxmllm.setup.exchange_layout import exchange_backend, exchange_grids, nodes_of_ranks
from jaxmllm.setup.prepare import row_limits, vocabulary
from jaxmllm.setup.row_shapes import attention_spec
from jaxmllm.setup.sizing import sizing_inputs
from jaxmllm.setup.spans import spans_of_phases
from jaxmllm.training.objectives.flow import MIDDLE_GRAY
from jaxmllm.training.programs.sampling_programs import SamplingPrograms
from jaxmllm.training.run_folder import CONFIG_FILE, named_config
from jaxmllm.training.step_functions import StepFunctions

UNTRAINED = {"freeze": True, "train": ("*",), "ema": None}


class Drawn(NamedTuple):
    """One picture or clip, or its latents."""

    name: str
    is_clip: bool
    is_latent: bool
    frames: NDArray[Any]  # [frames, height, width, channels]; pixels from about -1 (black) to 1

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Its frames as colours from 0 to 255."""
        return np.rint((self.frames + 1) * MIDDLE_GRAY).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Drawing:
    """Requests, and the compiled programs that draw them."""

    config: Config
    requests: Requests
    corpus: Corpus
    programs: SamplingPrograms

    def drawn(self, params: Any, steps: int, guidance: float) -> Iterator[Drawn]:
        """Draw all requests, in batches of `data.batch_size`. Raises `DataError` where media in a
        request do not decode. A `guidance` other than 1 needs programs planned as guided."""
        assert guidance == 1 or self.programs.guided
        times = [1 - step / steps for step in range(steps + 1)]
        for batch_number, examples in enumerate(self._batches):
            batch = self._filler(batch_number, examples)
            if batch.failures:
                raise DataError(f"what is shown does not decode: {batch.failures[0]}")
            on_devices = self.programs.put(batch)
            for row, patches in self.programs.draw(params, on_devices, times, guidance):
                yield from self._of_row(row, patches)

    def _of_row(self, row: Row, patches: NDArray[Any]) -> Iterator[Drawn]:
        modality = self.corpus.modalities[self.config.model.generators[0]]
        assert isinstance(modality, Blanks)
        for group, segment in zip(*np.nonzero(row["sources"] >= 0), strict=True):
            owned = (row["owners"][group] == segment + 1) & (row["patches"][group] >= 0)
            # A guided item repeats its patches in a second half, whose segments are other ones
            item_slots = owned & (row["segments"][group] == segment + 1)
            of_item = np.empty((item_slots.sum(), patches.shape[2]), patches.dtype)
            of_item[row["patches"][group][item_slots]] = patches[group][item_slots]
            request = int(row["sources"][group, segment])
            media = self.corpus.example(request).media[-1].reference
            yield Drawn(
                self.requests.entries[request].name,
                isinstance(media, Clip),
                isinstance(modality.learned, GeneratedLatents),
                modality.frames(of_item, Blank.at(media.address)),
            )

    @property
    def _batches(self) -> list[NDArray[np.int64]]:
        return batches_of(len(self.corpus), self.config.data.batch_size)

    @cached_property
    def _filler(self) -> StepFiller:
        rule = DrawRule(0, self.config.objective.diffusion, evaluation=True, guided=True)
        programs = self.programs
        return StepFiller(
            self.corpus, programs.spec, programs.local_share, programs.attention, draws=rule
        )


def drawing_config(run: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run folder for drawing alone: nothing trains, text has no loss, no times
    measured in training count, and there are no stages.

    Raises:
      ConfigError: there is no run, it has no generator, or an override changes more than where and
        how rows are computed.
      CheckpointError: its config is damaged.
    """
    saved = named_config("--run", run)
    config = load_config(run / CONFIG_FILE, overrides)
    check_free(saved, config)
    if not config.model.generators:
        raise ConfigError(f"--run: the model of {run} draws nothing: it has no model.diffusion")
    silent = config.objective.language.model_copy(update={"weight": 0.0})
    objective = config.objective.model_copy(update={"language": silent})
    # A calibration was measured while something trained
    unmeasured = config.balance.model_copy(update={"calibration": None})
    folder = config.run.model_copy(update={"directory": str(run)})
    return config.model_copy(
        update={
            "balance": unmeasured,
            "components": _frozen(config.components),
            "objective": objective,
            "pipeline": PipelineConfig(),
            "run": folder,
        }
    )


def _frozen(section: Any) -> Any:
    """A section of components, and those in it, with nothing trained."""
    if isinstance(section, TrainingConfig):
        return section.model_copy(update=UNTRAINED)
    return section.model_copy(update={name: _frozen(subsection) for name, subsection in section})


def check_guidance(config: Config, guidance: float) -> None:
    """Raise `ConfigError` for a guidance that a run has not learned."""
    if guidance != 1 and not config.objective.diffusion.condition_drop:
        raise ConfigError(
            f"--guidance {guidance:g}: with objective.diffusion.condition_drop 0 the run has not learned to draw "
            "without conditions; use --guidance 1"
        )


def plan_drawing(config: Config, requests: Requests, mesh: Mesh, guided: bool = True) -> Drawing:
    """The programs that draw the requests, not compiled yet. Unless `guided`, rows lack the half
    that sees no prompt.

    Raises:
      ConfigError, MeshError: a config that cannot be run on this mesh.
      DataError: requests that cannot be drawn.
    """
    tokenizer = load_tokenizer(config.data)
    model = build_model(config.model, vocabulary(config, tokenizer), config.components, mesh)
    spans = spans_of_phases(config, model)
    readers = modalities(config.model, config.data)
    # Requested items have no pixels yet. A blank takes as many slots as the item, or twice as many
    # if it is drawn both with and without its conditions.
    for phase, modality in readers.items():
        if isinstance(modality, GeneratedPixels | GeneratedLatents):
            readers[phase] = Blanks(modality, copies=2 if guided else 1)
    index = uncached_index("requests", requests, tokenizer, readers)
    pairs = VisiblePairs.of_model(config.model)
    corpus = Corpus((index,), (1.0,), tokenizer, readers, pairs=pairs)
    corpus = corpus.refuse(row_limits(config, model, corpus.formats, spans))
    if corpus.rejected:
        and_more = f" (and {len(corpus.rejected) - 1} more)" if len(corpus.rejected) > 1 else ""
        raise DataError(f"{corpus.rejected[0]}{and_more}")
    # Sizes are chosen from all batches that will be drawn, not from a sample of them.
    samples = [
        corpus.gather(examples) for examples in batches_of(len(corpus), config.data.batch_size)
    ]
    longest = {phase: corpus.longest(phase) for phase in model.phases}
    spec: PlanSpec = choose_sizes(
        samples,
        sizing_inputs(config, model, corpus.formats, longest, spans),
        exchange_grids(model),
        config.balance,
        nodes_of_ranks(config, model),
        exchange_backend(config, model),
    )
    functions = StepFunctions(
        model, config.optimizer, config.decay_steps, len(corpus.sources), config.objective
    )
    attention = attention_spec(config, model, corpus.formats, spec)
    arguments = functions, spec, corpus.formats, attention, config.run.param_dtype
    programs = SamplingPrograms(*arguments, guided=guided)
    return Drawing(config, requests, corpus, programs)


def batches_of(count: int, size: int) -> list[NDArray[np.int64]]:
    """The numbers below `count`, in arrays of up to `size`."""
    return [
        np.arange(start, min(start + size, count), dtype=np.int64)
        for start in range(0, count, size)
    ]
