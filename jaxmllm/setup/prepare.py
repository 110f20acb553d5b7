"""The data and the model of a run, before anything is compiled or put on a device.

sources --index--> Corpus, without the examples that no row can hold --> order, sampled batches
tokenizer, config --> components of the model, as shapes on the mesh
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmllm.balance.costs.visible_pairs import VisiblePairs
from jaxmllm.balance.records import BatchItems
from jaxmllm.balance.sizes.loads import SampleSize
from jaxmllm.config.schema import Config, ConfigError, SourceConfig
from jaxmllm.data.batches import example_order, sample_batches, source_batches
from jaxmllm.data.corpus import Corpus
from jaxmllm.data.media.modalities import modalities, row_formats
from jaxmllm.data.media.modality import Modality
from jaxmllm.data.text.load import load_tokenizer
from jaxmllm.data.text.tokenizers import Tokenizer
from jaxmllm.models.compose import build_model
from jaxmllm.models.mllm import MLLM
from jaxmllm.row_format import RowFormat
from jaxmllm.runtime import hosts
from jaxmllm.setup.exchange_layout import check_exchange
from jaxmllm.setup.row_memory import slots_that_fit
from jaxmllm.setup.row_shapes import largest_row
from jaxmllm.setup.spans import Spans, spans_of_phases
from sharding.pipeline.schedules.by_name import scheduler_of

# Sampled examples, whose lengths decide the sizes that the config leaves to `auto`
SAMPLED = SampleSize(16_384, fewest=8, most=128)
# No more batches than hold each example so often: any epoch of grain's shuffle takes 25 ms or more
SAMPLED_EPOCHS = 64
VOCABULARY_MULTIPLE = 64  # so that an `auto` vocabulary divides over tensor-parallel ranks
SAME_DATA = "Give all hosts the same files for data.sources and data.evaluation"


@dataclass(frozen=True)
class RunInputs:
    """What sizes are chosen from, programs compiled for, and batches read from."""

    model: MLLM
    corpus: Corpus  # the training examples
    held_out: Corpus | None  # those of `data.evaluation`
    order: grain.MapDataset[int]  # of the training examples
    samples: list[BatchItems]  # batches that stand for all
    spans: Spans  # how many ranks may hold a row together
    # Batches of each source alone, where there are several: a step may differ from all samples
    of_sources: list[BatchItems]

    @property
    def corpora(self) -> list[Corpus]:
        """All data that rows must hold."""
        return [self.corpus] if self.held_out is None else [self.corpus, self.held_out]


def prepare(config: Config, mesh: Mesh | AbstractMesh) -> RunInputs:
    """Index the data and compose the model. An abstract mesh is enough where nothing will run."""
    # Wrong names are errors before the data are indexed; that of a schedule even without stages.
    check_exchange(config)
    if config.pipeline.schedule != "auto":
        scheduler_of(config.pipeline.schedule)
    tokenizer = load_tokenizer(config.data)
    model = trained_model(config, tokenizer, mesh)
    spans = spans_of_phases(config, model)
    media = modalities(config.model, config.data)
    corpus, held_out = open_corpora(config, tokenizer, media, model, spans)
    _check_drawings(config, corpus)
    # Hosts that differ would plan different steps, and hang in the first collective.
    hosts.compare("data", lambda: data_facts(corpus, held_out), SAME_DATA)
    order = example_order(corpus.members, config.run.seed)
    samples = sizing_samples(order, corpus, config.data.batch_size)
    of_sources = source_batches(corpus.members, corpus, config.data.batch_size)
    return RunInputs(model, corpus, held_out, order, samples, spans, of_sources)


def trained_model(config: Config, tokenizer: Tokenizer, mesh: Mesh | AbstractMesh) -> MLLM:
    """The model of a config. Raises `ConfigError` and `MeshError` as `build_model` does, and
    `ConfigError` if every component is frozen."""
    model = build_model(config.model, vocabulary(config, tokenizer), config.components, mesh)
    if not model.trainable.components:
        raise ConfigError(
            "every component is frozen: set components.<name>.freeze: false for what shall be trained"
        )
    return model


def _check_drawings(config: Config, corpus: Corpus) -> None:
    """Raise `ConfigError` where only drawings have a loss and the data have no drawings: every step
    would be skipped."""
    generators = config.model.generators
    if config.objective.learns_text or not generators:
        return
    for index in corpus.indexes:
        numbers = [phase for phase, name in enumerate(index.phases) if name in generators]
        if np.isin(index.item_phase, numbers).any():
            return
    raise ConfigError(
        "objective.language.weight (0): nothing of data.sources is drawn, so that nothing has a loss; let an assistant "
        "answer with images or clips there, or raise the weight"
    )


def sizing_samples(
    order: grain.MapDataset[int], corpus: Corpus, batch_size: int
) -> list[BatchItems]:
    """The batches that sizes are chosen from."""
    enough = max(SAMPLED.fewest, math.ceil(SAMPLED_EPOCHS * len(corpus) / batch_size))
    return sample_batches(order, corpus, batch_size, min(SAMPLED.batches(batch_size), enough))


def vocabulary(config: Config, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: as the config says, or the tokenizer's rounded up."""
    size = config.model.language.vocab_size
    if size == "auto":
        return math.ceil(tokenizer.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.language.vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} "
            "tokens; raise it, or say 'auto'"
        )
    return size


def open_corpora(
    config: Config,
    tokenizer: Tokenizer,
    modalities: Mapping[str, Modality],
    model: MLLM,
    spans: Spans,
) -> tuple[Corpus, Corpus | None]:
    """The training corpus and, where there is one, the held-out corpus.

    They number their sources the same way, so that losses by source can be compared.
    """
    limits = row_limits(config, model, row_formats(modalities), spans)

    def open_corpus(sources: Sequence[SourceConfig]) -> Corpus:
        rooted = [under_root(config.data.root, source) for source in sources]
        corpus = Corpus.open(
            rooted,
            tokenizer,
            modalities,
            config.data.index_cache,
            progress=jax.process_index() == 0,
            pairs=VisiblePairs.of_model(config.model),
        )
        # Refused records count as rejected, so the limit is checked after refusing.
        corpus = corpus.refuse(limits)
        corpus.check_rejected(config.data.max_rejected)
        return corpus

    splits = (config.data.sources, config.data.evaluation)
    corpora = [open_corpus(sources) for sources in splits if sources]
    names = tuple(sorted({name for corpus in corpora for name in corpus.sources}))
    corpus, *held_out = (corpus.with_sources(names) for corpus in corpora)
    return corpus, held_out[0] if held_out else None


def row_limits(
    config: Config,
    model: MLLM,
    formats: Mapping[str, RowFormat],
    spans: Spans,
    fitting: int | None = None,
) -> dict[str, int]:
    """Slots of the largest row of each phase.

    Args:
      fitting: slots that the memory of a rank holds; none: those of an estimate.
    """
    limits = {}
    for phase in model.phases:
        parts = model.layout(phase).parts
        span = max(spans[phase])
        held = slots_that_fit(config, model, phase) if fitting is None else fitting
        limits[phase] = largest_row(config, phase, formats, parts, span=span, fitting=held)
    return limits


def under_root(root: str | None, source: SourceConfig) -> SourceConfig:
    """The source with its paths under `data.root`."""
    if root is None:
        return source
    media = None if source.root is None else str(Path(root) / source.root)
    return source.model_copy(update={"path": str(Path(root) / source.path), "root": media})


def data_facts(corpus: Corpus, held_out: Corpus | None) -> dict[str, str]:
    """Facts on the data that must be the same on all hosts that have read them."""
    facts = {}
    for split, opened in (("data", corpus), ("held-out data", held_out)):
        if opened is None:
            continue
        for (name, _, examples), index in zip(opened.members, opened.indexes, strict=True):
            # Bytes of clips do not count: the size of a folder of frames differs by file system
            clips = np.array([part == "video" for part in index.media.part], np.bool_)
            media_bytes = np.where(clips, 0, index.media.stamp[:, 0])[index.item_media]
            contents = (index.checksum, media_bytes)
            columns = (index.id, index.offset, index.item_shape, examples, *contents)
            digest = hosts.digest_of_bytes(column.tobytes() for column in columns)
            facts[f"{split} of source {name!r}"] = f"{len(examples)} examples, index {digest}"
        facts[f"{split} as a whole"] = opened.fingerprint()
    return facts
